//! A server of Telegram's Bot API, as far as bots of this project meet it: over real sockets, errors
//! and waits included. `teloxide-core`, a client that knows nothing of this project, works against it
//! unchanged (`d4_an_independent_client_talks_to_the_fake_bot_api`), so what passes here is the protocol
//! and not our idea of it.
//!
//! One question for updates may be open at a time; another is answered 409 meanwhile. A question from
//! an offset on forgets the updates before it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

/// The token the fake knows.
pub const TOKEN: &str = "4242:test-token";

/// A text that was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    pub chat: i64,
    pub text: String,
}

#[derive(Default)]
struct Inner {
    next: i64,
    updates: VecDeque<Value>,
    sent: Vec<Sent>,
    /// Answers to the next sends, errors first.
    faults: VecDeque<Value>,
    /// (old, new) of chats that moved.
    moved: Vec<(i64, i64)>,
    webhook: Option<Value>,
    polling: u32,
    polls_most: u32,
    conflicts: u64,
    /// Offsets asked for, in order.
    offsets: Vec<i64>,
}

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct BotApi {
    pub url: String,
    inner: Arc<Mutex<Inner>>,
    changed: Arc<watch::Sender<u64>>,
    /// While true, answers that hold updates are held back: they are fetched and did not arrive.
    held: Arc<watch::Sender<bool>>,
    _server: Arc<Server>,
}

struct Server(tokio::task::JoinHandle<()>);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl BotApi {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let inner = Arc::new(Mutex::new(Inner { next: 1, ..Inner::default() }));
        let changed = Arc::new(watch::channel(0).0);
        let held = Arc::new(watch::channel(false).0);
        let shared = Shared { inner: inner.clone(), changed: changed.clone(), held: held.clone() };
        let app = axum::Router::new()
            .route("/{bot}/{method}", axum::routing::any(call))
            .with_state(shared);
        let server = tokio::spawn(async move { drop(axum::serve(listener, app).await) });
        Self { url, inner, changed, held, _server: Arc::new(Server(server)) }
    }

    /// Something of this kind happened; its update's id.
    pub fn update(&self, kind: &str, body: Value) -> i64 {
        let id = {
            let mut inner = self.inner.lock();
            let id = inner.next;
            inner.next += 1;
            inner.updates.push_back(json!({ "update_id": id, kind: body }));
            id
        };
        self.changed.send_modify(|n| *n += 1);
        id
    }

    /// A user says something in a chat with the bot.
    pub fn says(&self, user: i64, text: &str) -> i64 {
        self.update("message", message(user, text))
    }

    pub fn sent(&self) -> Vec<Sent> {
        self.inner.lock().sent.clone()
    }

    pub fn sent_to(&self, chat: i64) -> Vec<String> {
        let sent = self.sent().into_iter().filter(|sent| sent.chat == chat);
        sent.map(|sent| sent.text).collect()
    }

    /// The next send is answered so.
    pub fn fail_next(&self, code: u16, description: &str, parameters: Value) {
        self.inner.lock().faults.push_back(json!({
            "ok": false, "error_code": code, "description": description, "parameters": parameters,
        }));
    }

    pub fn move_chat(&self, old: i64, new: i64) {
        self.inner.lock().moved.push((old, new));
    }

    pub fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }

    /// Questions open now, and the most there ever were.
    pub fn polls(&self) -> (u32, u32) {
        let inner = self.inner.lock();
        (inner.polling, inner.polls_most)
    }

    pub fn conflicts(&self) -> u64 {
        self.inner.lock().conflicts
    }

    pub fn offsets(&self) -> Vec<i64> {
        self.inner.lock().offsets.clone()
    }

    /// Updates nobody acknowledged.
    pub fn unacknowledged(&self) -> usize {
        self.inner.lock().updates.len()
    }

    pub fn webhook(&self) -> Option<Value> {
        self.inner.lock().webhook.clone()
    }
}

/// A message of a private chat.
pub fn message(user: i64, text: &str) -> Value {
    json!({
        "message_id": 1,
        "date": 1_700_000_000,
        "chat": { "id": user, "type": "private", "first_name": "Ann" },
        "from": { "id": user, "is_bot": false, "first_name": "Ann", "language_code": "de" },
        "text": text,
    })
}

#[derive(Clone)]
struct Shared {
    inner: Arc<Mutex<Inner>>,
    changed: Arc<watch::Sender<u64>>,
    held: Arc<watch::Sender<bool>>,
}

fn ok(result: Value) -> Response {
    Json(json!({ "ok": true, "result": result })).into_response()
}

fn refuse(answer: &Value) -> Response {
    let code = answer["error_code"].as_u64().and_then(|code| u16::try_from(code).ok());
    let status = code.and_then(|code| StatusCode::from_u16(code).ok());
    (status.unwrap_or(StatusCode::BAD_REQUEST), Json(answer.clone())).into_response()
}

fn error(code: u16, description: &str) -> Response {
    refuse(&json!({ "ok": false, "error_code": code, "description": description }))
}

async fn call(
    State(shared): State<Shared>,
    Path((bot, method)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    if bot != format!("bot{TOKEN}") {
        return error(401, "Unauthorized");
    }
    let asked: Value = match body.is_empty() {
        true => json!({}),
        false => match serde_json::from_slice(&body) {
            Ok(asked) => asked,
            Err(_) => return error(400, "Bad Request: can't parse JSON"),
        },
    };
    // The real one does not care for the case of a method's name either.
    match method.to_ascii_lowercase().as_str() {
        "getme" => ok(json!({
            "id": 4242, "is_bot": true, "first_name": "Bot", "username": "test_bot",
            "can_join_groups": true, "can_read_all_group_messages": false,
            "supports_inline_queries": false, "can_connect_to_business": false,
            "has_main_web_app": false,
        })),
        "setwebhook" => {
            shared.inner.lock().webhook = Some(asked);
            ok(true.into())
        }
        "deletewebhook" => {
            shared.inner.lock().webhook = None;
            ok(true.into())
        }
        "sendmessage" => send(&shared, &asked),
        "getupdates" => get_updates(&shared, &asked).await,
        _ => error(404, "Not Found"),
    }
}

fn send(shared: &Shared, asked: &Value) -> Response {
    let mut inner = shared.inner.lock();
    let (Some(chat), Some(text)) = (asked["chat_id"].as_i64(), asked["text"].as_str()) else {
        return error(400, "Bad Request: chat_id and text are needed");
    };
    if let Some(fault) = inner.faults.pop_front() {
        return refuse(&fault);
    }
    if let Some((_, new)) = inner.moved.iter().find(|(old, _)| *old == chat) {
        return refuse(&json!({
            "ok": false, "error_code": 400,
            "description": "Bad Request: group chat was upgraded to a supergroup chat",
            "parameters": { "migrate_to_chat_id": new },
        }));
    }
    if text.encode_utf16().count() > 4096 {
        return error(400, "Bad Request: message is too long");
    }
    inner.sent.push(Sent { chat, text: text.to_owned() });
    let mut sent = message(chat, text);
    sent["message_id"] = inner.sent.len().into();
    sent["from"] = json!({ "id": 4242, "is_bot": true, "first_name": "Bot" });
    drop(inner);
    shared.changed.send_modify(|n| *n += 1);
    ok(sent)
}

/// One question that is open; gone however it ends, also when its asker dies.
struct Open(Arc<Mutex<Inner>>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.lock().polling -= 1;
    }
}

async fn get_updates(shared: &Shared, asked: &Value) -> Response {
    let offset = asked["offset"].as_i64().unwrap_or_default();
    let limit = usize::try_from(asked["limit"].as_u64().unwrap_or(100)).unwrap().clamp(1, 100);
    let wait = Duration::from_secs(asked["timeout"].as_u64().unwrap_or_default());
    let _open = {
        let mut inner = shared.inner.lock();
        if inner.webhook.is_some() {
            return error(
                409,
                "Conflict: can't use getUpdates method while webhook is active; use deleteWebhook",
            );
        }
        if inner.polling > 0 {
            inner.conflicts += 1;
            return error(
                409,
                "Conflict: terminated by other getUpdates request; make sure that only one bot \
                 instance is running",
            );
        }
        inner.polling += 1;
        inner.polls_most = inner.polls_most.max(inner.polling);
        inner.offsets.push(offset);
        inner.updates.retain(|update| update["update_id"].as_i64().unwrap() >= offset);
        Open(shared.inner.clone())
    };
    let mut changed = shared.changed.subscribe();
    let until = tokio::time::Instant::now() + wait;
    loop {
        changed.borrow_and_update();
        let found: Vec<Value> = shared.inner.lock().updates.iter().take(limit).cloned().collect();
        if !found.is_empty() {
            let _ = shared.held.subscribe().wait_for(|held| !held).await;
            return ok(found.into());
        }
        if tokio::time::timeout_at(until, changed.changed()).await.is_err() {
            return ok(json!([]));
        }
    }
}
