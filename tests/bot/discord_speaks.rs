//! Discord: what is taken for a message, and how replies, answers and waits go out.

use std::sync::Arc;
use std::time::Duration;

use botmesh::bot::{BotBuilder, Event, Route};
use botmesh::clock::ManualClock;
use botmesh::testing::MemoryHub;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;
use twilight_http::api_error::ApiError;
use twilight_http::error::ErrorType;
use twilight_model::http::interaction::{InteractionResponse, InteractionResponseType};
use twilight_model::id::Id;

use super::discord::{discord, echo, kill, listens, passing, start};
use super::discord_api::{BOT, DiscordApi, TOKEN, channel, user};
use super::support::{PATIENCE, next_event, until};

#[tokio::test]
async fn d4_an_independent_client_talks_to_the_fake_discord() {
    let api = DiscordApi::start().await;
    let client = |token: &str| {
        let host = api.url.strip_prefix("http://").unwrap().split('/').next().unwrap();
        let client = twilight_http::Client::builder().proxy(host.to_owned(), true);
        client.token(token.to_owned()).ratelimiter(None).build()
    };
    let bot = client(TOKEN);
    let me = bot.current_user().await.unwrap().model().await.unwrap();
    assert_eq!(me.id.to_string(), BOT);
    let told = bot.gateway().authed().await.unwrap().model().await.unwrap();
    assert_eq!((told.url, told.session_start_limit.total), (api.gateway.clone(), 1_000));
    let place = Id::new(10_007);
    let said = |text: &'static str| bot.create_message(place).content(text);
    let sent = said("hi").await.unwrap().model().await.unwrap();
    assert_eq!((sent.content.as_str(), api.sent_to("10007")), ("hi", vec!["hi".to_owned()]));

    // It waits as it is told, and is told why it is refused.
    api.limit(1, Duration::from_millis(300));
    let began = std::time::Instant::now();
    said("in time").await.unwrap();
    said("too fast").await.unwrap();
    assert!(api.calls().1 >= 1 && began.elapsed() >= Duration::from_millis(300));
    assert_eq!(api.sent_to("10007"), ["hi", "in time", "too fast"]);
    api.close_channel("10008");
    let error = bot.create_message(Id::new(10_008)).content("no").await.unwrap_err();
    let refused = matches!(error.kind(), ErrorType::Response { error: ApiError::General(general),
        status, .. } if general.code == 50_007 && status.get() == 403);
    assert!(refused, "{error:?}");
    assert!(client("another").current_user().await.is_err());

    let asked = api.asks(7, 2, &json!({ "id": "5", "name": "order", "type": 1 }));
    let token = api.interaction(&asked).token;
    let interactions = bot.interaction(Id::new(BOT.parse().unwrap()));
    assert!(interactions.update_response(&token).content(Some("early")).await.is_err());
    let kind = InteractionResponseType::DeferredChannelMessageWithSource;
    let deferred = InteractionResponse { kind, data: None };
    let id = Id::new(asked.parse().unwrap());
    interactions.create_response(id, &token, &deferred).await.unwrap();
    assert!(interactions.create_response(id, &token, &deferred).await.is_err(), "once");
    interactions.update_response(&token).content(Some("done")).await.unwrap();
    assert_eq!(api.interaction(&asked).answers, ["done"]);
}

/// Notes what came, and answers.
fn noting(seen: &Arc<Mutex<Vec<Value>>>) -> impl FnOnce(BotBuilder) -> BotBuilder + use<> {
    let seen = seen.clone();
    move |bot| {
        bot.on(Route::Any, async move |ctx| {
            seen.lock().push(serde_json::to_value(ctx.message()).unwrap());
            let said = format!("echo: {}", ctx.text());
            Ok(ctx.reply(said).await?)
        })
    }
}

#[tokio::test]
async fn d4_a_thread_that_bears_the_id_of_its_first_message_is_a_chat_of_its_own() {
    let (hub, api) = (MemoryHub::new(), DiscordApi::start().await);
    let seen: Arc<Mutex<Vec<Value>>> = Arc::default();
    let _a = start(&hub, discord(&api), noting(&seen)).await;
    listens(&api).await;
    // A thread is made of a message: it has that message's id, and begins with a reference to it.
    let first = api.in_guild("500", 7, "let us talk");
    api.dispatch("MESSAGE_CREATE", &first);
    let id = first["id"].as_str().unwrap();
    let thread = json!({ "id": id, "type": 11, "parent_id": "500", "guild_id": "99" });
    api.dispatch("THREAD_CREATE", &thread);
    let mut starter = api.in_guild(id, 7, "");
    starter["type"] = 21.into();
    starter["message_reference"] = json!({ "channel_id": "500", "message_id": id });
    api.dispatch("MESSAGE_CREATE", &starter);
    api.dispatch("MESSAGE_CREATE", &api.in_guild(id, 7, "in the thread"));
    // In a forum the first message is in the thread, under its id.
    let mut post = api.in_guild("501", 8, "a post");
    let id_of_post = post["id"].as_str().unwrap().to_owned();
    api.dispatch("THREAD_CREATE", &json!({ "id": id_of_post, "type": 11, "guild_id": "99" }));
    post["channel_id"] = id_of_post.as_str().into();
    api.dispatch("MESSAGE_CREATE", &post);
    api.dispatch("MESSAGE_CREATE", &post);
    api.dispatch("MESSAGE_CREATE", &api.in_guild(&id_of_post, 8, "and a comment"));

    until("all are answered", || api.sent().len() == 4).await;
    assert_eq!(api.sent_to("500"), ["echo: let us talk"]);
    assert_eq!(api.sent_to(id), ["echo: in the thread"]);
    assert_eq!(api.sent_to(&id_of_post), ["echo: a post", "echo: and a comment"]);
    let mut chats: Vec<Value> = seen.lock().iter().map(|one| one["chat"].clone()).collect();
    chats.sort_by_key(|chat| chat.as_str().unwrap().to_owned());
    let mut wanted = vec![format!("dc:500:7"), format!("dc:{id}:7"), format!("dc:{id_of_post}:8")];
    wanted.push(wanted[2].clone());
    wanted.sort();
    assert_eq!(chats, wanted);
}

#[tokio::test]
async fn d4_only_what_people_say_makes_a_turn() {
    let (hub, api) = (MemoryHub::new(), DiscordApi::start().await);
    let a = start(&hub, discord(&api), echo).await;
    listens(&api).await;
    let said = |text: &str| api.in_guild("500", 7, text);
    let mut of_a_bot = said("a bot's");
    of_a_bot["author"] = user("8", true);
    let mut of_a_hook = said("a webhook's");
    of_a_hook["webhook_id"] = "9".into();
    let mut joined = said("");
    joined["type"] = 7.into();
    let mut nobodys = said("nobody's");
    nobodys["author"] = Value::Null;
    for (kind, data) in [
        ("MESSAGE_CREATE", of_a_bot),
        ("MESSAGE_CREATE", of_a_hook),
        ("MESSAGE_CREATE", joined),
        ("MESSAGE_CREATE", nobodys),
        ("MESSAGE_UPDATE", said("edited")),
        ("MESSAGE_DELETE", json!({ "id": "1", "channel_id": "500" })),
        ("SOMETHING_NEW", json!([1])),
        ("MESSAGE_CREATE", said("hi")),
    ] {
        api.dispatch(kind, &data);
    }
    until("one is answered", || api.sent().len() == 1).await;
    api.dispatch("MESSAGE_CREATE", &said("ho"));
    until("and the next", || api.sent().len() == 2).await;
    assert_eq!(api.sent_to("500"), ["echo: hi", "echo: ho"]);
    let figures = a.bot.figures();
    let figure =
        |name: &str| figures.iter().filter(|f| f.name == name).map(|f| f.value).sum::<u64>();
    assert_eq!((figure("unknown_events"), figure("errors")), (4, 1));
}

#[tokio::test]
async fn d4_an_interaction_is_acknowledged_in_time_and_answered_by_the_first_reply() {
    let (hub, api) = (MemoryHub::new(), DiscordApi::start().await);
    let seen: Arc<Mutex<Vec<Value>>> = Arc::default();
    let noted = seen.clone();
    let make = |bot: BotBuilder| {
        bot.on(Route::command("order"), async |ctx| {
            ctx.reply("one").await?;
            Ok(ctx.reply("two").await?)
        })
        .on(Route::Any, async move |ctx| {
            noted.lock().push(serde_json::to_value(ctx.message()).unwrap());
            Ok(ctx.reply("seen").await?)
        })
    };
    let _a = start(&hub, discord(&api), make).await;
    listens(&api).await;
    let options = json!([{ "name": "what", "type": 3, "value": "tea" }]);
    let command = api.asks(7, 2, &json!({ "id": "5", "name": "order", "options": options }));
    until("both are said", || api.sent_to(&channel(7)) == ["two"]).await;
    assert_eq!(api.interaction(&command).answers, ["one"], "in the place of the waiting");
    let button = api.asks(8, 3, &json!({ "custom_id": "yes", "component_type": 2 }));
    until("the button is answered", || api.sent_to(&channel(8)) == ["seen"]).await;
    let form = json!({ "custom_id": "f", "components": [{ "components": [{ "value": "Ann" }] }] });
    let form = api.asks(9, 5, &form);
    until("the form is answered", || api.interaction(&form).answers == ["seen"]).await;
    until("the button is acknowledged", || api.interaction(&button).acknowledged.is_some()).await;
    for (id, kind) in [(&command, 5), (&button, 6), (&form, 5)] {
        let (found, after) = api.interaction(id).acknowledged.unwrap();
        assert!(found == kind && after < Duration::from_secs(3), "{found} after {after:?}");
    }
    assert_eq!(api.interaction(&button).answers, [""; 0], "its message stays what it was");
    let seen = seen.lock();
    let kinds: Vec<_> = seen.iter().map(|one| (&one["id"], &one["type"], &one["text"])).collect();
    let (button, form) = (json!(button), json!(form));
    let (callback, filled) = ((json!("callback"), json!("yes")), (json!("form"), json!("Ann")));
    assert_eq!(kinds[0], (&button, &callback.0, &callback.1));
    assert_eq!(kinds[1], (&form, &filled.0, &filled.1));
}

#[tokio::test]
async fn d4_an_interaction_is_answered_by_whichever_replica_replies_and_once() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), DiscordApi::start().await);
    let at_work = Arc::new(Notify::new());
    let make = |hangs: bool| {
        let at_work = at_work.clone();
        move |bot: BotBuilder| {
            bot.on(Route::Any, async move |ctx| {
                if hangs {
                    at_work.notify_one();
                    std::future::pending::<()>().await;
                }
                Ok(ctx.reply("done").await?)
            })
        }
    };
    let a = start(&hub, discord(&api), make(true)).await;
    listens(&api).await;
    let b = start(&hub, discord(&api), make(false)).await;
    let asked = api.asks(7, 2, &json!({ "id": "5", "name": "order" }));
    tokio::time::timeout(PATIENCE, at_work.notified()).await.expect("it is at work");
    until("it is acknowledged", || api.interaction(&asked).acknowledged.is_some()).await;
    // Its answer is made, and the news of that is lost: the same edit is made again.
    api.trouble(502, "Bad Gateway".into(), &[], true);
    kill(&api, &clock, &a).await;
    passing(&clock, "the other one answers", || api.interaction(&asked).answers.len() == 2).await;
    assert_eq!(api.interaction(&asked).answers, ["done", "done"]);
    assert_eq!(api.sent(), []);

    // One that nobody could acknowledge is answered by a message.
    api.trouble(404, json!({ "message": "Unknown interaction", "code": 10_062 }), &[], false);
    let late = api.asks(8, 2, &json!({ "id": "5", "name": "order" }));
    passing(&clock, "it is answered", || api.sent_to(&channel(8)) == ["done"]).await;
    assert_eq!(api.interaction(&late).answers, [""; 0]);
    drop((a, b));
}

fn three(bot: BotBuilder) -> BotBuilder {
    bot.on(Route::Any, async |ctx| {
        for text in ["one", "two", "three", "four", "five"] {
            ctx.reply(text).await?;
        }
        Ok(())
    })
}

const FIVE: [&str; 5] = ["one", "two", "three", "four", "five"];

#[tokio::test]
async fn g3_discords_limits_are_kept_to_before_they_are_met_and_the_order_stays() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), DiscordApi::start().await);
    let _a = start(&hub, discord(&api), three).await;
    listens(&api).await;
    api.limit(2, Duration::from_millis(300));
    api.says(7, "hi");
    passing(&clock, "all go out", || api.sent().len() == 5).await;
    assert_eq!(api.sent_to(&channel(7)), FIVE);
    assert_eq!(api.calls().1, 0, "none was made in vain");
}

#[tokio::test]
async fn g3_a_wait_that_discord_asks_for_keeps_the_order_and_nobody_asks_meanwhile() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), DiscordApi::start().await);
    let _a = start(&hub, discord(&api), three).await;
    listens(&api).await;
    let before = api.calls().0;
    let slow = json!({ "message": "slow", "retry_after": 0.4, "global": true });
    api.trouble(429, slow, &[("retry-after", "1")], false);
    let began = std::time::Instant::now();
    api.says(7, "hi");
    api.says(8, "hi");
    passing(&clock, "all go out", || api.sent().len() == 10).await;
    assert_eq!(api.sent_to(&channel(7)), FIVE);
    assert_eq!(api.sent_to(&channel(8)), FIVE);
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
    // Two rooms may have asked before the first was told.
    let calls = api.calls().0 - before;
    assert!((11..=12).contains(&calls), "{calls} calls");
}

#[tokio::test]
async fn g3_a_send_whose_answer_was_lost_is_made_once_by_its_nonce() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), DiscordApi::start().await);
    let a = start(&hub, discord(&api), three).await;
    let mut events = a.bot.events();
    listens(&api).await;
    api.trouble(502, "<html>".into(), &[], true);
    api.trouble(500, json!({ "message": "500: Internal Server Error", "code": 0 }), &[], false);
    api.says(7, "hi");
    passing(&clock, "all go out", || api.sent().len() == 5).await;
    assert_eq!(api.sent_to(&channel(7)), FIVE, "the first was made, and not again");
    let unknown = next_event(&mut events, |event| match event {
        Event::SendUnknown { key, .. } => Some(key.clone()),
        _ => None,
    });
    assert_eq!(unknown.await, format!("dc:{}", channel(7)));
    let mut nonces: Vec<Value> = api.sent().iter().map(|one| one.body["nonce"].clone()).collect();
    assert!(api.sent().iter().all(|one| one.body["enforce_nonce"] == true));
    nonces.dedup();
    assert_eq!(nonces.len(), 5);
    // Nobody calls all at once by what a user wrote.
    assert_eq!(api.sent()[0].body["allowed_mentions"], json!({ "parse": ["users"] }));
}

#[tokio::test]
async fn g3_what_discord_will_not_have_is_told_and_the_next_goes_out() {
    let (hub, api) = (MemoryHub::new(), DiscordApi::start().await);
    let long = "x".repeat(2_001);
    let make = |bot: BotBuilder| {
        bot.on(Route::Any, async move |ctx| {
            ctx.reply(long.clone()).await?;
            Ok(ctx.reply("short").await?)
        })
    };
    let a = start(&hub, discord(&api), make).await;
    let mut events = a.bot.events();
    listens(&api).await;
    api.says(7, "hi");
    until("the next goes out", || api.sent_to(&channel(7)) == ["short"]).await;
    api.close_channel(&channel(8));
    api.says(8, "hi");
    for wanted in ["50035", "50007", "50007"] {
        let told = next_event(&mut events, |event| match event {
            Event::Error { error, .. } => Some(error.to_string()),
            _ => None,
        });
        let told = told.await;
        assert!(told.contains(wanted), "{told}");
    }
}
