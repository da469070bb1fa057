//! A program that uses the API, and groups that misbehave on purpose.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::BodyExt;
use parking_lot::Mutex;
use serde_json::Value;
use tower::ServiceExt;

use crate::clock::{BootInstant, Clock, ManualClock};
use crate::group::{ExecuteError, Group, MemoryHub, Unavailable, Wakeups};
use crate::http::coordination::{Options, router_with, routes};
use crate::machine::{Command, Limits, Machine, Reply};
use crate::types::NodeId;

/// (method, path template below `/v1`, status)
pub(super) type Seen = BTreeSet<(String, String, u16)>;

/// One answer.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) text: String,
    pub(super) body: Value,
}

impl Answer {
    /// The error's name; empty where it is none.
    pub(super) fn error(&self) -> &str {
        self.body["error"].as_str().unwrap_or_default()
    }

    #[track_caller]
    pub(super) fn number(&self, field: &str) -> u64 {
        self.body[field].as_u64().unwrap_or_else(|| panic!("no number {field} in {self:?}"))
    }

    #[track_caller]
    pub(super) fn expect(self, status: u16, error: &str) -> Self {
        assert_eq!((self.status, self.error()), (status, error), "{self:?}");
        self
    }

    #[track_caller]
    pub(super) fn ok(self, status: u16) -> Self {
        self.expect(status, "")
    }
}

/// The program. Clones share what they have seen.
#[derive(Clone)]
pub(super) struct Client {
    app: Router,
    seen: Arc<Mutex<Seen>>,
}

impl Client {
    pub(super) fn of(app: Router) -> Self {
        Self { app, seen: Arc::default() }
    }

    pub(super) fn over(group: impl Group) -> Self {
        Self::of(router_with(Arc::new(group), Options::default()))
    }

    /// The same memory of what was seen, over another app.
    pub(super) fn at(&self, app: Router) -> Self {
        Self { app, seen: self.seen.clone() }
    }

    pub(super) fn seen(&self) -> Seen {
        self.seen.lock().clone()
    }

    pub(super) async fn send(&self, request: Request<Body>) -> Answer {
        let method = request.method().to_string();
        let template = template(request.uri().path());
        let response = self.app.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let status = parts.status.as_u16();
        if let Some(template) = template {
            self.seen.lock().insert((method, template, status));
        }
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let body = serde_json::from_str(&text).unwrap_or(Value::Null);
        let answer = Answer { status, headers: parts.headers, text, body };
        check_shape(&answer);
        answer
    }

    pub(super) async fn call(&self, method: &str, path: &str, body: Value) -> Answer {
        self.with(method, path, &[], body).await
    }

    pub(super) async fn with(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Value,
    ) -> Answer {
        let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
        self.send(request(method, path, headers, body)).await
    }

    pub(super) async fn session(&self, prefix: &str) -> u64 {
        let path = format!("/v1/{prefix}/sessions");
        let lease = serde_json::json!({ "lease_ms": 15_000 });
        self.call("POST", &path, lease).await.ok(201).number("session")
    }
}

pub(super) fn request(
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Body,
) -> Request<Body> {
    let mut builder =
        Request::builder().method(Method::from_bytes(method.as_bytes()).unwrap()).uri(path);
    for (name, value) in headers {
        builder = builder.header(*name, *value);
    }
    builder.body(body).unwrap()
}

/// Whatever is refused has a body that programs can read, and a header where it says when to come
/// again (SPEC K6, *Outcomes*).
#[track_caller]
fn check_shape(answer: &Answer) {
    let status = StatusCode::from_u16(answer.status).unwrap();
    if !status.is_client_error() && !status.is_server_error() {
        return;
    }
    assert!(!answer.error().is_empty(), "{answer:?}");
    assert!(answer.body["message"].is_string(), "{answer:?}");
    assert_eq!(answer.headers["content-type"], "application/json");
    let after = answer.body.get("retry_after_ms").and_then(Value::as_u64);
    assert_eq!(after.is_some(), answer.headers.contains_key("retry-after"), "{answer:?}");
    assert!(matches!(answer.body.get("not_executed"), None | Some(Value::Bool(true))));
}

/// The route's template a path belongs to.
fn template(path: &str) -> Option<String> {
    let path = path.strip_prefix("/v1")?;
    let fits = |template: &str| {
        let (mut have, mut want) = (path.split('/'), template.split('/'));
        loop {
            match (have.next(), want.next()) {
                (None, None) => return true,
                (Some(have), Some(want)) if want.starts_with('{') || have == want => {}
                _ => return false,
            }
        }
    };
    routes().into_iter().map(|(template, _)| template).find(|t| fits(t)).map(str::to_owned)
}

/// What a sham group does to commands and barriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Mood {
    Sound,
    NoQuorum,
    /// Executes, and says that it does not know.
    Forgets,
}

/// A hub whose mood can be set and whose looks are counted.
#[derive(Clone)]
pub(super) struct Sham {
    pub(super) hub: MemoryHub,
    mood: Arc<AtomicU8>,
    looks: Arc<AtomicU64>,
}

impl Sham {
    pub(super) fn new(limits: Limits, clock: ManualClock) -> Self {
        let hub = MemoryHub::with(limits, Arc::new(clock));
        Self { hub, mood: Arc::default(), looks: Arc::default() }
    }

    pub(super) fn set(&self, mood: Mood) {
        self.mood.store(mood as u8, Ordering::SeqCst);
    }

    pub(super) fn looks(&self) -> u64 {
        self.looks.load(Ordering::SeqCst)
    }

    fn no_quorum() -> Unavailable {
        Unavailable::NoQuorum { reachable: 1, voters: 3 }
    }
}

#[async_trait]
impl Group for Sham {
    fn node_id(&self) -> NodeId {
        self.hub.node_id()
    }

    fn clock(&self) -> &dyn Clock {
        self.hub.clock()
    }

    async fn execute(
        &self,
        command: Command,
        deadline: BootInstant,
    ) -> Result<Reply, ExecuteError> {
        match self.mood.load(Ordering::SeqCst) {
            mood if mood == Mood::NoQuorum as u8 => {
                Err(ExecuteError::NotExecuted(Self::no_quorum()))
            }
            mood if mood == Mood::Forgets as u8 => {
                self.hub.execute(command, deadline).await?;
                let waited = Duration::from_secs(5);
                Err(ExecuteError::OutcomeUnknown(Unavailable::Timeout { waited }))
            }
            _ => self.hub.execute(command, deadline).await,
        }
    }

    async fn barrier(&self, deadline: BootInstant) -> Result<(), Unavailable> {
        if self.mood.load(Ordering::SeqCst) == Mood::NoQuorum as u8 {
            return Err(Self::no_quorum());
        }
        self.hub.barrier(deadline).await
    }

    fn read(&self, look: &mut dyn FnMut(&Machine)) {
        self.looks.fetch_add(1, Ordering::SeqCst);
        self.hub.read(look);
    }

    fn wakeups(&self) -> &Wakeups {
        self.hub.wakeups()
    }

    fn is_durable(&self) -> bool {
        false
    }
}
