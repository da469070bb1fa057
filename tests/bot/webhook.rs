//! The generic webhook and the chat page's channel, without a listener.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use botmesh::bot::{Bot, Coordination};
use botmesh::cli::demo;
use botmesh::coordinator::CoordinatorOptions;
use botmesh::provider::webhook::{Mapping, WebhookProvider};
use botmesh::provider::{Secret, WebhookRequest, WebhookResponse};
use botmesh::testing::{MemoryCoordinator, MemoryHub, MemoryStore};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::support::PATIENCE;

async fn bot(reply_url: Option<String>) -> (Bot, MemoryCoordinator) {
    let store = MemoryStore::new(MemoryHub::default_prefix());
    let coordinator = store.coordinator(CoordinatorOptions::default());
    let bot = demo::bot(store, Coordination::new(coordinator.clone()), reply_url, demo::flows)
        .await
        .unwrap();
    bot.start().await.unwrap();
    (bot, coordinator)
}

async fn call(bot: &Bot, channel: &str, method: &str, target: &str, body: &str) -> WebhookResponse {
    let hooks = bot.webhooks();
    let (_, hook) = hooks.iter().find(|(id, _)| id == channel).expect("the demo has it");
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let request = WebhookRequest {
        method: method.into(),
        path: path.into(),
        query: query.into(),
        headers: Vec::new(),
        body: body.to_owned().into(),
    };
    hook.handle(request, &bot.link(), &*bot.store()).await
}

fn body(response: &WebhookResponse) -> Value {
    serde_json::from_slice(&response.body).unwrap()
}

/// The replies listed, once there are so many.
async fn listed(bot: &Bot, target: &str, count: usize) -> Vec<Value> {
    let waited = tokio::time::timeout(PATIENCE, async {
        loop {
            let response = call(bot, "demo", "GET", target, "").await;
            assert_eq!(response.status, 200);
            let Value::Array(replies) = body(&response) else { panic!("not an array") };
            if replies.len() >= count {
                return replies;
            }
            tokio::task::yield_now().await;
        }
    });
    waited.await.expect("the replies come")
}

#[tokio::test]
async fn n5_a_post_is_taken_once_and_its_reply_is_listed() {
    let (bot, _) = bot(None).await;
    let message = json!({"id": "m1", "chat": "c 1", "text": "hello"}).to_string();
    let first = call(&bot, "demo", "POST", "", &message).await;
    assert_eq!((first.status, body(&first)), (200, json!({"accepted": true, "duplicate": false})));
    let again = call(&bot, "demo", "POST", "", &message).await;
    assert_eq!((again.status, body(&again)), (200, json!({"accepted": true, "duplicate": true})));
    let replies = listed(&bot, "replies?chat=c+1", 1).await;
    let reply = &replies[0];
    assert_eq!(reply["text"], "echo: hello");
    assert_eq!(reply["chat"], "c 1");
    assert_eq!(reply["in_reply_to"], "m1");
    assert!(reply.get("participant").is_none());
    assert!(reply["id"].is_string() && reply["fence"].is_u64() && reply["turn_seq"].is_u64());
    assert_eq!(listed(&bot, "replies?chat=nobody", 0).await, Vec::<Value>::new());
}

#[tokio::test]
async fn n5_a_group_lists_all_its_participants_or_one() {
    let (bot, _) = bot(None).await;
    for (id, who) in [("m1", "ann"), ("m2", "bob"), ("m3", "ann")] {
        let message = json!({"id": id, "chat": "room", "participant": who, "text": id});
        assert_eq!(call(&bot, "demo", "POST", "", &message.to_string()).await.status, 200);
        listed(&bot, &format!("replies?chat=room&participant={who}"), 1).await;
    }
    let all = listed(&bot, "replies?chat=room", 3).await;
    let of = |replies: &[Value]| -> Vec<String> {
        replies.iter().map(|r| r["in_reply_to"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(of(&all).len(), 3);
    let anns = listed(&bot, "replies?chat=room&participant=ann", 2).await;
    assert_eq!(of(&anns), ["m1", "m3"]);
    assert_eq!(anns[0]["participant"], "ann");
}

#[tokio::test]
async fn n5_the_last_thousand_replies_are_listed() {
    let (bot, _) = bot(None).await;
    for n in 0..1005 {
        let message = json!({"id": format!("m{n}"), "chat": "c", "text": n.to_string()});
        assert_eq!(call(&bot, "demo", "POST", "", &message.to_string()).await.status, 200);
    }
    let last = async {
        loop {
            let replies = listed(&bot, "replies?chat=c", 1000).await;
            if replies.last().is_some_and(|reply| reply["in_reply_to"] == "m1004") {
                return replies;
            }
            tokio::task::yield_now().await;
        }
    };
    let replies = tokio::time::timeout(PATIENCE, last).await.expect("all are answered");
    assert_eq!(replies.len(), 1000);
    assert_eq!(replies[0]["text"], "echo: 5");
}

#[tokio::test]
async fn m1_what_does_not_decode_is_named_by_path_and_not_repeated() {
    let (bot, _) = bot(None).await;
    for (posted, path) in [
        (r#"{"id": "m1", "chat": {"secret": 1}, "text": "x"}"#, "chat"),
        (r#"{"id": "m1", "chat": "c"}"#, "."),
        (r#"{"id": "m1", "chat": "c", "text": "secret"} and more"#, "."),
        ("secret", "."),
        ("", "."),
    ] {
        let response = call(&bot, "demo", "POST", "", posted).await;
        assert_eq!(response.status, 400, "{posted}");
        let message = body(&response)["message"].as_str().unwrap().to_owned();
        assert!(message.contains(&format!("at {path} ")), "{message:?} lacks {path:?}");
        assert!(!message.contains("secret"), "{message:?} repeats the body");
    }
    for (field, value) in [("chat", ""), ("id", ""), ("participant", "")] {
        let mut message = json!({"id": "m1", "chat": "c", "participant": "p", "text": "x"});
        message[field] = value.into();
        let response = call(&bot, "demo", "POST", "", &message.to_string()).await;
        assert_eq!(
            (response.status, body(&response)["error"].clone()),
            (400, "bad_message".into())
        );
    }
    assert_eq!(call(&bot, "demo", "DELETE", "", "").await.status, 405);
    assert_eq!(call(&bot, "demo", "GET", "replies", "").await.status, 400);
    assert_eq!(call(&bot, "demo", "GET", "nothing", "").await.status, 404);
}

#[tokio::test]
async fn g1_where_nothing_can_be_committed_the_answer_is_503() {
    let (bot, coordinator) = bot(None).await;
    coordinator.crash();
    let message = json!({"id": "m1", "chat": "c", "text": "hello"}).to_string();
    let response = call(&bot, "demo", "POST", "", &message).await;
    assert_eq!(response.status, 503);
    assert!(response.headers.iter().any(|(name, value)| name == "retry-after" && value == "1"));
    assert_eq!(body(&response)["error"], "unavailable");
}

type Got = Arc<Mutex<Vec<Value>>>;

#[tokio::test]
async fn n5_replies_are_posted_until_the_answer_is_2xx_in_order_under_one_id() {
    // An outside that refuses every second post.
    let got = Got::default();
    let take = async |State(got): State<Got>, Json(reply): Json<Value>| {
        let mut got = got.lock();
        got.push(reply);
        if got.len() % 2 == 1 { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::CREATED }
    };
    let app = axum::Router::new().route("/in", axum::routing::post(take)).with_state(got.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/in", listener.local_addr().unwrap());
    let outside = tokio::spawn(async move { axum::serve(listener, app).await });

    let (bot, _) = bot(Some(url)).await;
    for n in 0..3 {
        let message = json!({"id": format!("m{n}"), "chat": "c", "text": n.to_string()});
        assert_eq!(call(&bot, "demo", "POST", "", &message.to_string()).await.status, 200);
    }
    let all = async {
        while got.lock().len() < 6 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, all).await.expect("all are posted");
    let posted = got.lock().clone();
    for (n, pair) in posted.chunks(2).enumerate() {
        assert_eq!(pair[0], pair[1], "the same reply, under the same id");
        assert_eq!(pair[0]["text"], format!("echo: {n}"));
        assert_eq!(pair[0]["in_reply_to"], format!("m{n}"));
    }
    // They are listed as well, the same in every field.
    let replies = listed(&bot, "replies?chat=c", 3).await;
    assert_eq!(replies, [&posted[0], &posted[2], &posted[4]].map(Clone::clone));
    bot.stop().await.unwrap();
    outside.abort();
}

#[tokio::test]
async fn n5_a_reply_url_that_cannot_be_posted_to_is_refused_at_start() {
    for url in ["nonsense", "ftp://host/", "https://host/"] {
        let store = MemoryStore::default();
        let coordination = Coordination::new(store.coordinator(CoordinatorOptions::default()));
        let error =
            demo::bot(store, coordination, Some(url.to_owned()), demo::flows).await.unwrap_err();
        assert!(error.to_string().contains(url), "{error}");
    }
}

#[tokio::test]
async fn d4_the_chat_pages_messages_are_taken_and_answered() {
    let (bot, _) = bot(None).await;
    let message = json!({"id": "m1", "chat": "c", "text": "hello"}).to_string();
    assert_eq!(call(&bot, "webchat", "POST", "", &message).await.status, 200);
    let room = botmesh::provider::webchat::room("c");
    let store = bot.store();
    tokio::time::timeout(PATIENCE, store.outbox_beyond(&room, 0)).await.unwrap().unwrap();
    let entries = store.outbox(&room, 0, 10).await.unwrap();
    let reply = botmesh::provider::Reply::from_entry("c", &entries[0]);
    assert_eq!((reply.text.as_str(), entries[0].unsent), ("echo: hello", false));
}

/// A bot with this webhook, and what it is posted with these headers.
async fn posted(
    provider: WebhookProvider,
    requests: &[(&str, &str, &str)],
) -> Vec<(u16, Value, Bot)> {
    let store = MemoryStore::new(MemoryHub::default_prefix());
    let coordination = Coordination::new(store.coordinator(CoordinatorOptions::default()));
    let bot = demo::flows(Bot::builder()).provider(provider).store(store);
    let bot = bot.coordination(coordination).build().await.unwrap();
    bot.start().await.unwrap();
    let mut answers = Vec::new();
    for (name, value, text) in requests {
        let hooks = bot.webhooks();
        let request = WebhookRequest {
            method: "POST".into(),
            path: String::new(),
            query: String::new(),
            headers: vec![((*name).to_owned(), (*value).to_owned())],
            body: (*text).to_owned().into(),
        };
        let answer = hooks[0].1.handle(request, &bot.link(), &*bot.store()).await;
        answers.push((answer.status, body(&answer), bot.clone()));
    }
    answers
}

#[tokio::test]
async fn m1_a_webhook_with_a_secret_takes_only_what_shows_it() {
    let message = json!({"id": "m1", "chat": "c", "text": "Grüße"}).to_string();
    let secret = Secret::new("shared");
    let right = secret.sign(message.as_bytes());
    let prefixed = format!("sha256={right}");
    let other = message.replace("m1", "m2");
    let provider = WebhookProvider::new("hook").signed(secret, "X-Signature");
    let answers = posted(
        provider,
        &[
            ("x-signature", &right, &message),
            ("x-signature", &prefixed, &message),
            ("x-signature", &right, &other),
            ("x-other", &right, &message),
            ("x-signature", "", "no json"),
        ],
    )
    .await;
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.0).collect();
    assert_eq!(statuses, [200, 200, 401, 401, 401]);

    let provider = WebhookProvider::new("hook").token(Secret::new("t0ken"));
    let answers = posted(
        provider,
        &[
            ("authorization", "Bearer t0ken", &message),
            ("authorization", "bearer  t0ken", &message),
            ("authorization", "Bearer t0keN", &message),
            ("authorization", "t0ken", &message),
            ("x-token", "t0ken", &message),
        ],
    )
    .await;
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.0).collect();
    assert_eq!(statuses, [200, 200, 401, 401, 401]);
}

#[tokio::test]
async fn d4_a_webhook_understands_json_of_another_shape() {
    let mapping = Mapping::new("$.uid", "$.room.id", "$.body['plain text']").unwrap();
    let mapping = mapping.each("$.data.events").unwrap().participant("$.author").unwrap();
    let event = |uid: u32, text: Value| json!({ "uid": uid, "room": { "id": 7 }, "author": "ann", "body": { "plain text": text } });
    let body = json!({ "data": { "events": [
        event(1, "one".into()), event(1, "one".into()), event(2, json!({})), event(3, "two".into()),
    ] } });
    let (body, none) = (body.to_string(), json!({ "data": "secret" }).to_string());
    let answers = posted(
        WebhookProvider::new("hook").mapping(mapping),
        &[("x", "", &body), ("x", "", &none), ("x", "", "secret")],
    )
    .await;
    assert_eq!(answers[0].0, 200);
    assert_eq!(answers[0].1, json!({ "accepted": true, "taken": 2, "duplicates": 1 }));
    for (status, said, _) in &answers[1..] {
        assert_eq!(*status, 400);
        assert!(!said.to_string().contains("secret"), "{said}");
    }
    assert!(answers[1].1["message"].as_str().unwrap().contains("$.data.events"));
    let bot = &answers[0].2;
    let room = "hook:7";
    tokio::time::timeout(PATIENCE, bot.store().outbox_beyond(room, 1)).await.unwrap().unwrap();
    let entries = bot.store().outbox(room, 0, 10).await.unwrap();
    let texts: Vec<String> =
        entries.iter().map(|e| botmesh::provider::Reply::from_entry("7", e).text).collect();
    assert_eq!(texts, ["echo: one", "echo: two"]);
    let errors = bot.figures().into_iter().find(|figure| figure.name == "errors").unwrap();
    assert_eq!(errors.value, 1, "the one that has no text");
}
