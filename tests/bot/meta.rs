//! WhatsApp, Messenger and Instagram: what is posted to the webhook, and what goes to the Graph API.

use std::sync::Arc;
use std::time::Duration;

use botmesh::bot::{Bot, BotBuilder, Coordination, Event, Route, RuntimeError};
use botmesh::provider::meta::Meta;
use botmesh::provider::{ReceiptState, Secret, WebhookRequest, WebhookResponse};
use botmesh::testing::{CoordinatorOptions, ManualClock, MemoryHub, MemoryStore};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::graph_api::GraphApi;
use super::support::{next_event, until};

pub(super) const ACCOUNT: &str = "1055";

pub(super) fn secret() -> Secret {
    Secret::new("app secret")
}

pub(super) fn whatsapp(graph: &GraphApi) -> Meta {
    let meta = Meta::whatsapp("wa", secret(), Secret::new("verify me"));
    meta.account(ACCOUNT, "token").base_url(&graph.url)
}

/// A replica on this hub.
pub(super) async fn start(
    hub: &MemoryHub,
    meta: Meta,
    make: impl FnOnce(BotBuilder) -> BotBuilder,
) -> Bot {
    let store = hub.store(MemoryHub::default_prefix());
    let coordination = Coordination::new(store.coordinator(CoordinatorOptions::default()));
    let bot = make(Bot::builder()).provider(meta).store(store).coordination(coordination);
    let bot = bot.build().await.unwrap();
    bot.start().await.unwrap();
    bot
}

pub(super) type Taken = Arc<Mutex<Vec<(String, String)>>>;

/// Notes (chat, text) of all it gets.
pub(super) fn noting(taken: &Taken) -> impl FnOnce(BotBuilder) -> BotBuilder + use<> {
    let taken = taken.clone();
    move |bot| {
        bot.on(Route::Any, async move |ctx| {
            taken.lock().push((ctx.chat().chat.clone(), ctx.text().to_owned()));
            Ok(())
        })
    }
}

async fn handle(bot: &Bot, id: &str, request: WebhookRequest) -> WebhookResponse {
    let hooks = bot.webhooks();
    let (_, hook) = hooks.iter().find(|(found, _)| found == id).expect("the provider has one");
    hook.handle(request, &bot.link(), &*bot.store()).await
}

fn signed(body: Vec<u8>, signature: &str) -> WebhookRequest {
    WebhookRequest {
        method: "POST".into(),
        path: String::new(),
        query: String::new(),
        headers: vec![("x-hub-signature-256".into(), signature.to_owned())],
        body: body.into(),
    }
}

pub(super) async fn post_bytes(bot: &Bot, id: &str, body: Vec<u8>) -> WebhookResponse {
    let signature = format!("sha256={}", secret().sign(&body));
    handle(bot, id, signed(body, &signature)).await
}

async fn post(bot: &Bot, id: &str, body: &Value) -> u16 {
    post_bytes(bot, id, body.to_string().into_bytes()).await.status
}

pub(super) fn message(id: &str, from: &str, text: &str) -> Value {
    json!({
        "id": id, "from": from, "timestamp": "1700000000",
        "type": "text", "text": { "body": text },
    })
}

pub(super) fn status(id: &str, state: &str) -> Value {
    json!({ "id": id, "recipient_id": "491", "status": state, "timestamp": "1700000001" })
}

pub(super) fn change(messages: Vec<Value>, statuses: Vec<Value>) -> Value {
    let mut value = json!({
        "messaging_product": "whatsapp",
        "metadata": { "display_phone_number": "+49 555", "phone_number_id": ACCOUNT },
        "contacts": [{ "wa_id": "491", "user_id": "DE.1", "profile": { "name": "Ann" } }],
    });
    for (name, items) in [("messages", messages), ("statuses", statuses)] {
        if !items.is_empty() {
            value[name] = items.into();
        }
    }
    json!({ "field": "messages", "value": value })
}

pub(super) fn envelope(changes: Vec<Value>) -> Value {
    let entry = json!({ "id": "waba", "changes": changes });
    json!({ "object": "whatsapp_business_account", "entry": [entry] })
}

fn value(bot: &Bot, name: &str) -> u64 {
    let figures = bot.figures();
    figures.iter().filter(|figure| figure.name == name).map(|figure| figure.value).sum()
}

#[tokio::test]
async fn case_w1_a_batch_is_unpacked_whole_and_in_order() {
    let (hub, graph, taken) = (MemoryHub::new(), GraphApi::start().await, Taken::default());
    let bot = start(&hub, whatsapp(&graph), noting(&taken)).await;
    let mut events = bot.events();
    let mut entries = Vec::new();
    for entry in 0..2 {
        let changes = (0..2).map(|part| {
            let n = entry * 2 + part;
            let messages = (0..3).map(|m| {
                let id = format!("m{}", n * 3 + m);
                message(&id, "491", &id)
            });
            let statuses = vec![status(&format!("s{n}"), "sent"), status(&format!("s{n}"), "read")];
            change(messages.collect(), statuses)
        });
        entries.push(json!({ "id": "waba", "changes": changes.collect::<Vec<_>>() }));
    }
    let body = json!({ "object": "whatsapp_business_account", "entry": entries });
    assert_eq!(post(&bot, "wa", &body).await, 200);
    until("all are handled", || taken.lock().len() == 12).await;
    let texts: Vec<String> = taken.lock().iter().map(|(_, text)| text.clone()).collect();
    assert_eq!(texts, (0..12).map(|n| format!("m{n}")).collect::<Vec<_>>());
    assert_eq!(taken.lock()[0].0, "1055/491");
    for n in 0..8 {
        let receipt = next_event(&mut events, |event| match event {
            Event::Receipt { receipt } => Some(receipt.clone()),
            _ => None,
        });
        let receipt = receipt.await;
        let wanted = if n % 2 == 0 { ReceiptState::Sent } else { ReceiptState::Read };
        assert_eq!((receipt.sent, receipt.state), (format!("s{}", n / 2), wanted));
        assert_eq!(receipt.at_ms, 1_700_000_001_000, "seconds are told from milliseconds");
    }
    // The whole of it once more: nothing is handled twice.
    assert_eq!(post(&bot, "wa", &body).await, 200);
    assert_eq!(value(&bot, "duplicates"), 12);
    assert_eq!(taken.lock().len(), 12);
}

#[tokio::test]
async fn m2_the_same_id_twice_in_one_batch_is_one_turn() {
    let (hub, graph, taken) = (MemoryHub::new(), GraphApi::start().await, Taken::default());
    let bot = start(&hub, whatsapp(&graph), noting(&taken)).await;
    let twice = vec![message("m", "491", "a"), message("m", "491", "a"), message("n", "491", "b")];
    assert_eq!(post(&bot, "wa", &envelope(vec![change(twice, vec![])])).await, 200);
    until("both are handled", || taken.lock().len() == 2).await;
    assert_eq!(value(&bot, "duplicates"), 1);
}

#[tokio::test]
async fn case_w2_a_bad_item_leaves_the_others() {
    let (hub, graph, taken) = (MemoryHub::new(), GraphApi::start().await, Taken::default());
    let bot = start(&hub, whatsapp(&graph), noting(&taken)).await;
    for (n, bad) in [
        json!({ "from": "491", "type": "text", "text": { "body": "no id" } }),
        json!("not even an object"),
        message(&"i".repeat(600), "491", "an id that is no key"),
        json!({ "id": "x", "type": "botmesh.post", "from": "491" }),
    ]
    .into_iter()
    .enumerate()
    {
        let mut events = bot.events();
        let [first, last] = ["a", "b"].map(|side| message(&format!("{side}{n}"), "491", side));
        let body = envelope(vec![change(vec![first, bad, last], vec![])]);
        assert_eq!(post(&bot, "wa", &body).await, 200);
        until("the others are handled", || taken.lock().len() == (n + 1) * 2).await;
        let error = next_event(&mut events, |event| match event {
            Event::Error { error, .. } => Some(error.clone()),
            _ => None,
        });
        assert!(matches!(&*error.await, RuntimeError::Item { provider, .. } if provider == "wa"));
        assert_eq!(value(&bot, "errors"), n as u64 + 1, "one error event");
    }
}

#[tokio::test]
async fn case_w3_what_becomes_of_statuses_does_not_delay_a_message() {
    let (hub, graph) = (MemoryHub::new(), GraphApi::start().await);
    let bot = start(&hub, whatsapp(&graph), |bot| {
        bot.on(Route::Any, async |ctx| Ok(ctx.reply("an answer").await?))
    });
    let bot = bot.await;
    // Whoever listens to statuses panics over the first of them.
    let mut events = bot.events();
    let listener = tokio::spawn(async move {
        while let Some(event) = events.next().await {
            assert!(!matches!(event, Event::Receipt { .. }), "a status");
        }
    });
    let statuses = (0..50).map(|n| status(&format!("s{n}"), "delivered")).collect();
    let body =
        envelope(vec![change(vec![], statuses), change(vec![message("m", "491", "hi")], vec![])]);
    assert_eq!(post(&bot, "wa", &body).await, 200);
    until("it is answered", || graph.texts() == ["an answer"]).await;
    assert!(listener.await.unwrap_err().is_panic());
}

#[tokio::test]
async fn d4_statuses_only_advance() {
    let (hub, graph, taken) = (MemoryHub::new(), GraphApi::start().await, Taken::default());
    let a = start(&hub, whatsapp(&graph), noting(&taken)).await;
    let b = start(&hub, whatsapp(&graph), noting(&taken)).await;
    let (mut of_a, mut of_b) = (a.events(), b.events());
    let body = |state: &str| envelope(vec![change(vec![], vec![status("s", state)])]);
    let next = async |events: &mut botmesh::bot::Events| {
        let state = next_event(events, |event| match event {
            Event::Receipt { receipt } => Some(receipt.state),
            _ => None,
        });
        state.await
    };
    assert_eq!(post(&a, "wa", &body("delivered")).await, 200);
    assert_eq!(next(&mut of_a).await, ReceiptState::Delivered);
    // Late, twice and at another replica: only what is further is told.
    for state in ["sent", "delivered", "read", "delivered", "sent", "flying"] {
        assert_eq!(post(&b, "wa", &body(state)).await, 200);
    }
    assert_eq!(next(&mut of_b).await, ReceiptState::Read);
    assert_eq!(post(&b, "wa", &body("played")).await, 200);
    assert_eq!(next(&mut of_b).await, ReceiptState::Played, "nothing came in between");
    assert_eq!(value(&b, "unknown_events"), 1);
}

#[tokio::test]
async fn case_w6_the_signature_is_of_the_raw_bytes() {
    let (hub, graph, taken) = (MemoryHub::new(), GraphApi::start().await, Taken::default());
    let bot = start(&hub, whatsapp(&graph), noting(&taken)).await;
    // Escapes, accents, emoji, CRLF: decoded and written again it would be other bytes.
    let body = envelope(vec![change(vec![message("m", "491", "GRÜSSE")], vec![])]).to_string();
    let body = body.replace("GRÜSSE", "Gr\\u00fc\u{df}e \\/ 🦀").replace(",", ",\r\n ");
    assert_eq!(post_bytes(&bot, "wa", body.clone().into_bytes()).await.status, 200);
    until("it is handled", || taken.lock().len() == 1).await;
    assert_eq!(taken.lock()[0].1, "Grüße / 🦀");

    let signature = format!("sha256={}", secret().sign(body.as_bytes()));
    let mut flipped = body.clone().into_bytes();
    flipped[10] ^= 1;
    assert_eq!(handle(&bot, "wa", signed(flipped, &signature)).await.status, 401);
    let unsigned = WebhookRequest { headers: vec![], ..signed(body.into_bytes(), "") };
    assert_eq!(handle(&bot, "wa", unsigned).await.status, 401);
    // Signed and no JSON; signed JSON of another shape: 400, and nothing of the content.
    for (bad, at) in [("secret", "at ."), (r#"{"object": "page", "entry": "secret"}"#, "at entry")]
    {
        let answer = post_bytes(&bot, "wa", bad.as_bytes().to_vec()).await;
        let said = String::from_utf8(answer.body.to_vec()).unwrap();
        assert_eq!(answer.status, 400);
        assert!(said.contains(at) && !said.contains("secret"), "{said}");
    }
}

#[tokio::test]
async fn case_w5_a_body_of_three_megabytes_is_taken_and_one_of_five_refused() {
    let (hub, graph, taken) = (MemoryHub::new(), GraphApi::start().await, Taken::default());
    let bot = start(&hub, whatsapp(&graph), noting(&taken)).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/webhooks/wa", listener.local_addr().unwrap());
    let router = bot.router();
    let server = tokio::spawn(async move { axum::serve(listener, router).await });
    let client = reqwest::Client::new();
    let sized = |bytes: usize| {
        let one = status("s00000000", "unheard-of").to_string().len() + 1;
        let statuses = (0..bytes / one).map(|n| status(&format!("s{n:08}"), "unheard-of"));
        let changes = change(vec![message("m", "491", "hi")], statuses.collect());
        envelope(vec![changes]).to_string()
    };
    let send = async |body: reqwest::Body, signature: String| {
        let request = client.post(&url).header("x-hub-signature-256", signature).body(body);
        request.send().await.unwrap().status().as_u16()
    };
    let body = sized(2_900_000);
    assert!((2_800_000..3_000_000).contains(&body.len()), "{}", body.len());
    assert_eq!(send(body.clone().into(), secret().sign(body.as_bytes())).await, 200);
    until("it is handled", || taken.lock().len() == 1).await;
    let body = vec![b'x'; 5_000_000];
    assert_eq!(send(body.clone().into(), secret().sign(&body)).await, 413);
    server.abort();
}

#[tokio::test]
async fn case_w25_a_gigabyte_in_chunks_is_refused_before_it_has_come() {
    let (hub, graph, taken) = (MemoryHub::new(), GraphApi::start().await, Taken::default());
    let bot = start(&hub, whatsapp(&graph), noting(&taken)).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = bot.router();
    let server = tokio::spawn(async move { axum::serve(listener, router).await });
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (mut reader, mut writer) = stream.into_split();
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let head = "POST /webhooks/wa HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    writer.write_all(head.as_bytes()).await.unwrap();
    let sending = tokio::spawn(async move {
        let mut chunk = b"100000\r\n".to_vec();
        chunk.extend(vec![b'x'; 1 << 20]);
        chunk.extend(b"\r\n");
        let mut sent = 0_u64;
        // A gigabyte, or until the other side has enough.
        while sent < 1 << 30 && writer.write_all(&chunk).await.is_ok() {
            sent += 1 << 20;
        }
        sent
    });
    let mut answer = vec![0; 12];
    reader.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 413");
    drop(reader);
    assert!(sending.await.unwrap() < 1 << 30, "it was not read to its end");
    server.abort();
}

#[tokio::test]
async fn case_w7_the_webhook_is_answered_while_the_handler_sleeps() {
    let (hub, graph) = (MemoryHub::new(), GraphApi::start().await);
    let awake = Arc::new(Notify::new());
    let sleeping = awake.clone();
    let bot = start(&hub, whatsapp(&graph), |bot| {
        bot.on(Route::Any, async move |ctx| {
            sleeping.notified().await;
            Ok(ctx.reply("at last").await?)
        })
    });
    let bot = bot.await;
    let body = envelope(vec![change(vec![message("m", "491", "hi")], vec![])]);
    // Meta asks again and again, as it does where it had to wait.
    for _ in 0..3 {
        assert_eq!(post(&bot, "wa", &body).await, 200);
    }
    assert_eq!(graph.texts(), Vec::<String>::new());
    awake.notify_one();
    until("it is answered", || graph.texts() == ["at last"]).await;
    assert_eq!(value(&bot, "duplicates"), 2);
    bot.stop().await.unwrap();
    assert_eq!(graph.texts().len(), 1, "one reply");
}

#[tokio::test]
async fn case_w10_a_retry_of_what_never_came_is_handled() {
    let (hub, graph, taken) = (MemoryHub::new(), GraphApi::start().await, Taken::default());
    let bot = start(&hub, whatsapp(&graph), noting(&taken)).await;
    let body = envelope(vec![change(vec![message("m", "491", "hi")], vec![])]).to_string();
    let mut request = signed(body.clone().into_bytes(), &secret().sign(body.as_bytes()));
    request.headers.push(("x-hub-retry-count".into(), "3".into()));
    request.headers.push(("x-retry-num".into(), "1".into()));
    assert_eq!(handle(&bot, "wa", request).await.status, 200);
    until("it is handled", || taken.lock().len() == 1).await;
}

#[tokio::test]
async fn g1_a_batch_that_cannot_be_committed_is_asked_for_again() {
    let (graph, taken) = (GraphApi::start().await, Taken::default());
    let store = MemoryStore::new(MemoryHub::default_prefix());
    let coordinator = store.coordinator(CoordinatorOptions::default());
    let bot = noting(&taken)(Bot::builder()).provider(whatsapp(&graph)).store(store);
    let bot = bot.coordination(Coordination::new(coordinator.clone())).build().await.unwrap();
    bot.start().await.unwrap();
    coordinator.crash();
    let body = envelope(vec![change(vec![message("m", "491", "hi")], vec![])]);
    let answer = post_bytes(&bot, "wa", body.to_string().into_bytes()).await;
    assert_eq!(answer.status, 503);
    assert!(answer.headers.iter().any(|(name, _)| name == "retry-after"));
}

#[tokio::test]
async fn case_w16_what_the_business_itself_wrote_makes_no_turn() {
    let (hub, graph, taken) = (MemoryHub::new(), GraphApi::start().await, Taken::default());
    let page = Meta::messenger("fb", secret(), Secret::new("v"));
    let page = page.account("page", "token").account("other", "token").base_url(&graph.url);
    let bot = start(&hub, page, noting(&taken)).await;
    let event = |sender: &str, message: Value| {
        json!({
            "sender": { "id": sender }, "recipient": { "id": "psid" },
            "timestamp": 1_700_000_000_000_u64, "message": message,
        })
    };
    let echoes = [
        event("psid", json!({ "mid": "e1", "text": "flagged", "is_echo": true })),
        event("page", json!({ "mid": "e2", "text": "without the flag" })),
        event("other", json!({ "mid": "e3", "text": "of another of ours" })),
        event("psid", json!({ "mid": "m1", "text": "a user's" })),
    ];
    let body = json!({ "object": "page", "entry": [{ "id": "page", "messaging": echoes }] });
    assert_eq!(post(&bot, "fb", &body).await, 200);
    until("the user's is handled", || !taken.lock().is_empty()).await;

    let graph = GraphApi::start().await;
    let bot = start(&hub, whatsapp(&graph), noting(&taken)).await;
    let own = [message("w1", "49555", "by number"), message("w2", ACCOUNT, "by id")];
    let own: Vec<Value> = own.into_iter().chain([message("w3", "491", "another user's")]).collect();
    assert_eq!(post(&bot, "wa", &envelope(vec![change(own, vec![])])).await, 200);
    until("the other user's is handled", || taken.lock().len() == 2).await;
    let texts: Vec<String> = taken.lock().iter().map(|(_, text)| text.clone()).collect();
    assert_eq!(texts, ["a user's", "another user's"]);
}

#[tokio::test]
async fn case_w17_a_late_send_is_a_typed_error_and_not_tried_again() {
    let (hub, graph) = (MemoryHub::new(), GraphApi::start().await);
    let bot = start(&hub, whatsapp(&graph), |bot| {
        bot.on(Route::Any, async |ctx| {
            ctx.reply("too late").await?;
            ctx.reply("the next").await?;
            Ok(())
        })
    });
    let bot = bot.await;
    let mut events = bot.events();
    let error = json!({ "code": 131_047, "message": "Re-engagement message" });
    graph.fail_next(400, error, None);
    let body = envelope(vec![change(vec![message("m", "491", "hi")], vec![])]);
    assert_eq!(post(&bot, "wa", &body).await, 200);
    let said = next_event(&mut events, |event| match event {
        Event::Error { error, .. } => Some(error.to_string()),
        _ => None,
    });
    let said = said.await;
    assert!(said.contains("the time to answer in is over") && said.contains("131047"), "{said}");
    until("the next one goes out", || graph.texts() == ["the next"]).await;
}

#[tokio::test]
async fn g3_a_wait_that_is_asked_for_keeps_the_chats_order() {
    let (clock, graph) = (ManualClock::new(), GraphApi::start().await);
    let hub = MemoryHub::with_clock(clock.clone());
    let bot = start(&hub, whatsapp(&graph), |bot| {
        bot.on(Route::Any, async |ctx| {
            for text in ["one", "two", "three"] {
                ctx.reply(text).await?;
            }
            Ok(())
        })
    });
    let bot = bot.await;
    graph.fail_next(400, json!({ "code": 131_056, "message": "pair rate limit" }), Some(3));
    let body = envelope(vec![change(vec![message("m", "491", "hi")], vec![])]);
    assert_eq!(post(&bot, "wa", &body).await, 200);
    let all = async {
        while graph.texts().len() < 3 {
            clock.advance(Duration::from_millis(100));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(super::support::PATIENCE, all).await.expect("all three go out");
    assert_eq!(graph.texts(), ["one", "two", "three"]);
}

#[tokio::test]
async fn d4_the_address_is_verified_by_its_token() {
    let (hub, graph, taken) = (MemoryHub::new(), GraphApi::start().await, Taken::default());
    let bot = start(&hub, whatsapp(&graph), noting(&taken)).await;
    let get = |query: &str| WebhookRequest {
        method: "GET".into(),
        query: query.to_owned(),
        ..signed(Vec::new(), "")
    };
    let right = "hub.mode=subscribe&hub.verify_token=verify+me&hub.challenge=1158";
    let answer = handle(&bot, "wa", get(right)).await;
    assert_eq!((answer.status, &answer.body[..]), (200, &b"1158"[..]));
    for wrong in ["", "hub.mode=subscribe&hub.challenge=1", &right.replace("verify+me", "other")] {
        assert_eq!(handle(&bot, "wa", get(wrong)).await.status, 403, "{wrong}");
    }
}

#[tokio::test]
async fn m1_odd_things_are_taken_for_what_they_are() {
    let (hub, graph) = (MemoryHub::new(), GraphApi::start().await);
    let seen: Arc<Mutex<Vec<Value>>> = Arc::default();
    let noted = seen.clone();
    let bot = start(&hub, whatsapp(&graph), |bot| {
        bot.on(Route::Any, async move |ctx| {
            noted.lock().push(serde_json::to_value(ctx.message()).unwrap());
            Ok(())
        })
    });
    let bot = bot.await;
    let flow = |id: &str, inner: &str| {
        json!({
            "id": id, "from": "491", "timestamp": 1_700_000_000_123_u64, "type": "interactive",
            "interactive": { "type": "nfm_reply", "nfm_reply": { "body": "Sent", "response_json": inner } },
        })
    };
    let hidden = json!({
        "id": "h", "from_user_id": "DE.77", "timestamp": "1700000000", "type": "text",
        "text": { "body": "no number" }, "referral": { "source_id": "ad" },
    });
    let edit = json!({ "id": "e", "from": "491", "type": "edit", "edit": {} });
    let messages =
        vec![flow("f1", r#"{"a": 1}"#), flow("f2", "[1, 2]"), flow("f3", "no json"), hidden, edit];
    let mut foreign = change(vec![message("x", "491", "for another account")], vec![]);
    foreign["value"]["metadata"]["phone_number_id"] = "9999".into();
    let other = json!({ "field": "account_alerts", "value": {} });
    let body = envelope(vec![foreign, other, change(messages, vec![])]);
    assert_eq!(post(&bot, "wa", &body).await, 200);
    until("four are handled", || seen.lock().len() == 4).await;
    let mut seen = seen.lock().clone();
    seen.sort_by_key(|message| message["id"].as_str().unwrap().to_owned());
    assert_eq!(seen[0]["extra"]["payload"], json!({ "a": 1 }));
    assert_eq!(seen[1]["extra"]["payload"], json!([1, 2]));
    assert_eq!(seen[2]["extra"]["payload"], json!("no json"));
    assert_eq!(seen[2]["extra"]["at_ms"], 1_700_000_000_123_u64);
    assert_eq!(seen[3]["chat"], "wa:1055/DE.77");
    assert_eq!(seen[3]["extra"]["referral"]["source_id"], "ad");
    assert_eq!(seen[3]["extra"]["at_ms"], 1_700_000_000_000_u64);
    assert_eq!(value(&bot, "unknown_events"), 3, "the edit, the other account, the other field");
    assert_eq!(value(&bot, "errors"), 0);
}

#[tokio::test]
async fn d4_a_user_without_a_number_is_answered_by_id() {
    let (hub, graph) = (MemoryHub::new(), GraphApi::start().await);
    let bot = start(&hub, whatsapp(&graph), |bot| {
        bot.on(Route::Any, async |ctx| Ok(ctx.reply("hello").await?))
    });
    let bot = bot.await;
    let hidden = json!({
        "id": "h", "from_user_id": "DE.77", "timestamp": "1", "type": "text",
        "text": { "body": "hi" },
    });
    let number = message("n", "491", "hi");
    assert_eq!(post(&bot, "wa", &envelope(vec![change(vec![hidden, number], vec![])])).await, 200);
    until("both are answered", || graph.calls().len() == 2).await;
    let mut calls = graph.calls();
    calls.sort_by_key(|call| call.body.get("to").is_some());
    assert_eq!(calls[0].body["recipient"], "DE.77");
    assert_eq!(calls[1].body["to"], "491");
    assert_eq!((&*calls[0].account, &*calls[0].token), (ACCOUNT, "token"));
}

#[tokio::test]
async fn d4_several_pages_share_a_webhook_and_each_answers_for_itself() {
    let (hub, graph) = (MemoryHub::new(), GraphApi::start().await);
    for (meta, id, object) in [
        (Meta::messenger("fb", secret(), Secret::new("v")), "fb", "page"),
        (Meta::instagram("ig", secret(), Secret::new("v")), "ig", "instagram"),
    ] {
        let before = graph.calls().len();
        let meta = meta.account("p1", "token 1").account("p2", "token 2").base_url(&graph.url);
        let bot = start(&hub, meta, |bot| {
            bot.on(Route::Any, async |ctx| {
                let said = format!("{} {}", ctx.message().kind, ctx.text());
                Ok(ctx.reply(said).await?)
            })
        });
        let bot = bot.await;
        let mut events = bot.events();
        let event = |page: &str, what: &str, body: Value| {
            let mut event = json!({
                "sender": { "id": "u" }, "recipient": { "id": page }, "timestamp": 1_700_000_000,
            });
            event[what] = body;
            event
        };
        let text = |mid: &str| json!({ "mid": format!("{id}{mid}"), "text": mid });
        let body = json!({ "object": object, "entry": [
            { "id": "p1", "time": 1, "messaging": [event("p1", "message", text("a"))] },
            { "id": "p2", "time": 1, "messaging": [
                event("p2", "postback", json!({ "title": "Go", "payload": "GO" })),
                event("p2", "referral", json!({ "ref": "shop", "source": "SHORTLINK" })),
                event("p2", "read", json!({ "watermark": 1_700_000_000_500_u64 })),
                event("p2", "pass_thread_control", json!({})),
            ] },
            { "id": "p3", "time": 1, "messaging": [event("p3", "message", text("not ours"))] },
            { "id": "p1", "time": 1, "changes": [{ "field": "feed", "value": {} }] },
            { "id": "p1", "time": 1 },
        ] });
        assert_eq!(post(&bot, id, &body).await, 200);
        until("three are answered", || graph.calls().len() == before + 3).await;
        let calls = graph.calls()[before..].to_vec();
        let of = |account: &str| -> Vec<(String, String)> {
            let calls = calls.iter().filter(|call| call.account == account);
            let text = |body: &Value| body["message"]["text"].as_str().unwrap().to_owned();
            calls.map(|call| (call.token.clone(), text(&call.body))).collect()
        };
        assert_eq!(of("p1"), [("token 1".into(), "text a".into())]);
        let [first, second] = ["postback Go", "referral shop"];
        assert_eq!(of("p2"), [("token 2".into(), first.into()), ("token 2".into(), second.into())]);
        let read = next_event(&mut events, |event| match event {
            Event::Receipt { receipt } => Some((receipt.state, receipt.at_ms)),
            _ => None,
        });
        assert_eq!(read.await, (ReceiptState::Read, 1_700_000_000_500));
        assert_eq!(value(&bot, "unknown_events"), 4);
    }
}
