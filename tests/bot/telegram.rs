//! Telegram against a server of the Bot API: who polls, from where, and what becomes of it.

use std::sync::Arc;
use std::time::Duration;

use botmesh::bot::{Bot, BotBuilder, Coordination, Event, Route};
use botmesh::clock::Clock;
use botmesh::provider::telegram::Telegram;
use botmesh::provider::{Secret, WebhookRequest};
use botmesh::testing::{CoordinatorOptions, ManualClock, MemoryCoordinator, MemoryHub};
use botmesh::types::ChatKey;
use parking_lot::Mutex;
use serde_json::{Value, json};
use teloxide_core::Bot as Client;
use teloxide_core::prelude::Requester;
use tokio::sync::Notify;

use super::bot_api::{BotApi, TOKEN, message};
use super::support::{PAST_LEASE, PATIENCE, next_event, until};

struct Replica {
    bot: Bot,
    coordinator: MemoryCoordinator,
}

fn polling(api: &BotApi) -> Telegram {
    Telegram::new("tg", TOKEN).base_url(&api.url).poll_seconds(20)
}

async fn start(
    hub: &MemoryHub,
    telegram: Telegram,
    make: impl FnOnce(BotBuilder) -> BotBuilder,
) -> Replica {
    let store = hub.store(MemoryHub::default_prefix());
    let prefix = MemoryHub::default_prefix();
    let coordinator = MemoryCoordinator::with(hub, prefix, CoordinatorOptions::default());
    let bot = make(Bot::builder()).provider(telegram).store(store);
    let bot = bot.coordination(Coordination::new(coordinator.clone())).build().await.unwrap();
    bot.start().await.unwrap();
    Replica { bot, coordinator }
}

fn echo(bot: BotBuilder) -> BotBuilder {
    bot.on(Route::Any, async |ctx| {
        let said = format!("echo: {}", ctx.text());
        Ok(ctx.reply(said).await?)
    })
}

async fn polls(api: &BotApi) {
    until("somebody polls", || api.polls().0 == 1).await;
}

/// Lets the lease of whoever died run out.
async fn past_lease(clock: &ManualClock) {
    for _ in 0..PAST_LEASE.as_millis() / 500 {
        clock.advance(Duration::from_millis(500));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn d4_an_independent_client_talks_to_the_fake_bot_api() {
    let api = BotApi::start().await;
    let client = Client::new(TOKEN).set_api_url(api.url.parse().unwrap());
    assert_eq!(client.get_me().await.unwrap().user.id.0, 4242);
    api.says(7, "hello");
    let updates = client.get_updates().await.unwrap();
    assert_eq!(updates.len(), 1);
    let chat = updates[0].chat().unwrap().id;
    let sent = client.send_message(chat, "hi").await.unwrap();
    assert_eq!(sent.text(), Some("hi"));
    assert_eq!(api.sent_to(7), ["hi"]);
    // Waits and refusals are its errors, too.
    api.fail_next(429, "Too Many Requests: retry after 3", json!({ "retry_after": 3 }));
    let error = client.send_message(chat, "again").await.unwrap_err();
    let wait = teloxide_core::types::Seconds::from_seconds(3);
    assert!(matches!(error, teloxide_core::RequestError::RetryAfter(found) if found == wait));
    api.move_chat(-5, -1_005);
    let moved = client.send_message(teloxide_core::types::ChatId(-5), "group").await.unwrap_err();
    assert!(matches!(moved, teloxide_core::RequestError::MigrateToChatId(id) if id.0 == -1_005));
    let client = Client::new("1:wrong").set_api_url(api.url.parse().unwrap());
    assert!(client.get_me().await.is_err());
}

#[tokio::test]
async fn d5_the_offset_moves_with_the_journal_and_another_replica_goes_on_there() {
    let (hub, api) = (MemoryHub::new(), BotApi::start().await);
    let a = start(&hub, polling(&api), echo).await;
    polls(&api).await;
    let b = start(&hub, polling(&api), echo).await;
    let last = (1..=3).map(|n| api.says(n, "hi")).max().unwrap();
    until("all are answered", || api.sent().len() == 3).await;
    until("it asks on from there", || api.offsets().last() == Some(&(last + 1))).await;
    assert_eq!(api.unacknowledged(), 0);
    a.bot.stop().await.unwrap();
    let last = api.says(4, "to the other");
    until("the other answers", || api.sent_to(4) == ["echo: to the other"]).await;
    assert!(api.offsets().iter().all(|offset| *offset <= last + 1));
    assert!(api.offsets().is_sorted(), "it did not start over: {:?}", api.offsets());
    assert_eq!(api.polls().1, 1, "never two at once");
    b.bot.stop().await.unwrap();
    assert_eq!(api.sent().len(), 4);
}

#[tokio::test]
async fn case_w9_a_poller_whose_predecessor_still_polls_is_not_ready_and_polls_soon_after() {
    let (hub, api) = (MemoryHub::new(), BotApi::start().await);
    // The old one's question is open, as a frozen process leaves it.
    let old = reqwest::Client::new()
        .post(format!("{}/bot{TOKEN}/getUpdates", api.url))
        .json(&json!({ "timeout": 600 }))
        .send();
    let old = tokio::spawn(old);
    polls(&api).await;
    let a = start(&hub, polling(&api), echo).await;
    until("it is told of the conflict", || api.conflicts() >= 2).await;
    let ready = tokio::time::timeout(Duration::from_millis(1), a.bot.ready()).await;
    assert!(ready.is_err(), "never ready but deaf");
    old.abort();
    let began = std::time::Instant::now();
    tokio::time::timeout(PATIENCE, a.bot.ready()).await.expect("it is ready");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    api.says(7, "hi");
    until("it answers", || api.sent_to(7) == ["echo: hi"]).await;
}

#[tokio::test]
async fn d2_a_poller_that_never_gets_through_steps_down() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), BotApi::start().await);
    let old = reqwest::Client::new()
        .post(format!("{}/bot{TOKEN}/getUpdates", api.url))
        .json(&json!({ "timeout": 600 }))
        .send();
    let old = tokio::spawn(old);
    polls(&api).await;
    let a = start(&hub, polling(&api), echo).await;
    let mut events = a.bot.events();
    until("it is told of the conflict", || api.conflicts() >= 1).await;
    let down = next_event(&mut events, |event| match event {
        Event::LeaseLost { key, reason } if key == "provider:tg" => Some(*reason),
        _ => None,
    });
    let passing = async {
        loop {
            clock.advance(Duration::from_millis(500));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        reason = down => assert_eq!(reason, botmesh::coordinator::LostReason::SteppedDown),
        () = passing => {}
    }
    old.abort();
}

#[tokio::test]
async fn case_w20_nothing_is_skipped_and_nothing_answered_twice_wherever_it_is_killed() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), BotApi::start().await);
    let (at_work, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let turns: Arc<Mutex<Vec<String>>> = Arc::default();
    let slow = |bot: BotBuilder| {
        let (at_work, gate, turns) = (at_work.clone(), gate.clone(), turns.clone());
        bot.on(Route::Any, async move |ctx| {
            turns.lock().push(ctx.text().to_owned());
            if ctx.text() == "slow" {
                at_work.notify_one();
                gate.notified().await;
            }
            let said = format!("echo: {}", ctx.text());
            Ok(ctx.reply(said).await?)
        })
    };
    // Between fetch and commit: the answer is on its way when the poller dies.
    let a = start(&hub, polling(&api), slow).await;
    polls(&api).await;
    let b = start(&hub, polling(&api), slow).await;
    api.hold(true);
    api.says(1, "fetched");
    a.coordinator.crash();
    api.hold(false);
    past_lease(&clock).await;
    until("the next poller gets it", || api.sent_to(1) == ["echo: fetched"]).await;
    assert_eq!(*turns.lock(), ["fetched"]);

    // Between commit and reply: the offset is past it, and it is in the journal.
    let c = start(&hub, polling(&api), echo).await;
    let last = api.says(2, "slow");
    tokio::time::timeout(PATIENCE, at_work.notified()).await.expect("it is at work");
    until("the offset is past it", || api.offsets().last() == Some(&(last + 1))).await;
    b.coordinator.crash();
    past_lease(&clock).await;
    until("another answers", || api.sent_to(2) == ["echo: slow"]).await;
    gate.notify_waiters();
    api.says(3, "after");
    until("and polls", || api.sent_to(3) == ["echo: after"]).await;
    assert_eq!(api.sent().len(), 3, "{:?}", api.sent());
    assert_eq!(api.unacknowledged(), 0);
    drop((a, b, c));
}

async fn post(bot: &Bot, update: &Value, token: &str) -> u16 {
    let hooks = bot.webhooks();
    let (_, hook) = hooks.iter().find(|(id, _)| id == "tg").expect("it has a webhook");
    let request = WebhookRequest {
        method: "POST".into(),
        path: String::new(),
        query: String::new(),
        headers: vec![("x-telegram-bot-api-secret-token".into(), token.to_owned())],
        body: update.to_string().into(),
    };
    hook.handle(request, &bot.link(), &*bot.store()).await.status
}

fn hooked(api: &BotApi) -> Telegram {
    let url = "https://bot.example/webhooks/tg";
    Telegram::new("tg", TOKEN).base_url(&api.url).webhook(url, Secret::new("s3cret"))
}

#[tokio::test]
async fn case_w8_one_update_at_two_replicas_is_one_turn() {
    let (hub, api) = (MemoryHub::new(), BotApi::start().await);
    let [a, b] = [start(&hub, hooked(&api), echo).await, start(&hub, hooked(&api), echo).await];
    until("the address is told", || api.webhook().is_some()).await;
    let told = api.webhook().unwrap();
    assert_eq!(told["secret_token"], "s3cret");
    assert_eq!(told["url"], "https://bot.example/webhooks/tg");
    let update = json!({ "update_id": 9, "message": message(7, "hi") });
    assert_eq!(post(&a.bot, &update, "s3cret").await, 200);
    until("it is answered", || api.sent_to(7) == ["echo: hi"]).await;
    assert_eq!(post(&b.bot, &update, "s3cret").await, 200);
    assert_eq!(
        post(&a.bot, &json!({ "update_id": 10, "message": message(7, "ho") }), "s3cret").await,
        200
    );
    until("the next is answered", || api.sent_to(7).len() == 2).await;
    assert_eq!(api.sent_to(7), ["echo: hi", "echo: ho"]);
    // Without the token, or with another: nothing.
    for wrong in ["", "s3cre", "s3cret "] {
        assert_eq!(post(&a.bot, &update, wrong).await, 401, "{wrong:?}");
    }
    assert_eq!(post(&a.bot, &json!("no update"), "s3cret").await, 200);
}

#[tokio::test]
async fn d4_updates_are_taken_for_what_they_are() {
    let (hub, api) = (MemoryHub::new(), BotApi::start().await);
    let seen: Arc<Mutex<Vec<Value>>> = Arc::default();
    let noted = seen.clone();
    let make = |bot: BotBuilder| {
        bot.on(Route::Any, async move |ctx| {
            noted.lock().push(serde_json::to_value(ctx.message()).unwrap());
            Ok(())
        })
    };
    let a = start(&hub, hooked(&api), make).await;
    let mut events = a.bot.events();
    let group = json!({ "id": -5, "type": "group", "title": "g" });
    let in_group = |from: i64, mut rest: Value| {
        rest["chat"] = group.clone();
        rest["from"] = json!({ "id": from, "is_bot": false, "first_name": "Bob" });
        rest["date"] = 1_700_000_000.into();
        rest["message_id"] = 3.into();
        rest
    };
    let entity = json!({ "type": "bot_command", "offset": 3, "length": 6 });
    let updates = [
        ("message", in_group(8, json!({ "text": "🦀 /order", "entities": [entity] }))),
        ("message", in_group(9, json!({ "photo": [], "caption": "look" }))),
        (
            "callback_query",
            json!({
                "id": "cb", "from": { "id": 7 }, "data": "yes", "message": message(7, "sure?"),
            }),
        ),
        ("edited_message", message(7, "edited")),
        ("my_chat_member", json!({})),
        ("something_new", json!({ "x": 1 })),
        ("message", in_group(8, json!({ "new_chat_members": [] }))),
        ("message", in_group(4242, json!({ "text": "its own" }))),
        ("message", json!({ "text": "in no chat" })),
        (
            "channel_post",
            json!({
                "message_id": 1, "date": 1, "chat": { "id": -6, "type": "channel" }, "text": "news",
            }),
        ),
    ];
    for (n, (kind, body)) in updates.into_iter().enumerate() {
        assert_eq!(post(&a.bot, &json!({ "update_id": n, kind: body }), "s3cret").await, 200);
    }
    until("four are handled", || seen.lock().len() == 4).await;
    let mut seen = seen.lock().clone();
    seen.sort_by_key(|message| message["id"].as_str().unwrap().parse::<u32>().unwrap());
    let chats: Vec<&str> = seen.iter().map(|message| message["chat"].as_str().unwrap()).collect();
    assert_eq!(chats, ["tg:-5:8", "tg:-5:9", "tg:7", "tg:-6"]);
    let kinds: Vec<&str> = seen.iter().map(|message| message["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["text", "photo", "callback", "channel_post"]);
    assert_eq!(seen[0]["extra"]["entities"][0]["text"], "/order");
    assert_eq!((&seen[1]["text"], &seen[2]["text"]), (&json!("look"), &json!("yes")));
    let moved =
        json!({ "update_id": 99, "message": in_group(8, json!({ "migrate_to_chat_id": -1_005 })) });
    assert_eq!(post(&a.bot, &moved, "s3cret").await, 200);
    let moved = next_event(&mut events, |event| match event {
        Event::ChatMoved { from, to } => Some((from.clone(), to.clone())),
        _ => None,
    });
    assert_eq!(moved.await, (ChatKey::new("tg", "-5"), ChatKey::new("tg", "-1005")));
    let figures = a.bot.figures();
    let figure =
        |name: &str| figures.iter().filter(|f| f.name == name).map(|f| f.value).sum::<u64>();
    assert_eq!((figure("unknown_events"), figure("errors")), (4, 1));
}

#[tokio::test]
async fn case_w25_a_wait_that_is_asked_for_keeps_the_order() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), BotApi::start().await);
    let make = |bot: BotBuilder| {
        bot.on(Route::Any, async |ctx| {
            for text in ["one", "two", "three"] {
                ctx.reply(text).await?;
            }
            Ok(())
        })
    };
    let _a = start(&hub, polling(&api), make).await;
    api.fail_next(429, "Too Many Requests: retry after 3", json!({ "retry_after": 3 }));
    api.fail_next(502, "Bad Gateway", Value::Null);
    let began = clock.wall_ms();
    api.says(7, "hi");
    let all = async {
        while api.sent().len() < 3 {
            clock.advance(Duration::from_millis(50));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, all).await.expect("all three go out");
    assert_eq!(api.sent_to(7), ["one", "two", "three"]);
    assert!(clock.wall_ms() - began >= 3_000, "it waited as it was told");
}

#[tokio::test]
async fn d4_what_is_sent_to_a_group_that_moved_goes_where_it_is_now() {
    let (hub, api) = (MemoryHub::new(), BotApi::start().await);
    let _a = start(&hub, polling(&api), echo).await;
    api.move_chat(-5, -1_005);
    let said = json!({
        "message_id": 1, "date": 1, "chat": { "id": -5, "type": "group" },
        "from": { "id": 7 }, "text": "hi",
    });
    api.update("message", said);
    until("it is answered", || api.sent_to(-1_005) == ["echo: hi"]).await;
    // What Telegram will not have is told, and the next goes out.
    api.fail_next(403, "Forbidden: bot was blocked by the user", Value::Null);
    api.says(7, "blocked");
    api.says(7, "and back");
    until("the next goes out", || api.sent_to(7) == ["echo: and back"]).await;
}

#[tokio::test]
async fn d5_over_fifty_leader_changes_no_update_is_lost_and_none_handled_twice() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), BotApi::start().await);
    // What a turn says names its fence: two turns of one message would say two things.
    let fenced = |bot: BotBuilder| {
        bot.on(Route::Any, async |ctx| {
            let said = format!("{} {}", ctx.text(), ctx.fence());
            Ok(ctx.reply(said).await?)
        })
    };
    let mut said = 0;
    let mut leader = start(&hub, polling(&api), fenced).await;
    for change in 0..50 {
        let next = start(&hub, polling(&api), fenced).await;
        for _ in 0..4 {
            api.says(7, &said.to_string());
            said += 1;
        }
        // Every other one dies in the middle of it, the others stop.
        match change % 2 {
            0 => leader.bot.stop().await.unwrap(),
            _ => {
                leader.coordinator.crash();
                past_lease(&clock).await;
            }
        }
        leader = next;
    }
    let last = |api: &BotApi| api.sent_to(7).last().cloned().unwrap_or_default();
    let whole = async {
        while !last(&api).starts_with(&format!("{} ", said - 1)) {
            clock.advance(Duration::from_millis(100));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, whole).await.expect("the last one is answered");
    // A reply whose sender died over it comes again under its fence; nothing else comes twice.
    let mut texts = api.sent_to(7);
    texts.dedup();
    let numbers: Vec<i32> =
        texts.iter().map(|text| text.split(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!(numbers, (0..said).collect::<Vec<i32>>(), "in order, each in one turn");
    assert_eq!((api.unacknowledged(), api.polls().1), (0, 1), "never two pollers at once");
}
