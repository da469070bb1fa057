//! A small coordination server in this process, right or wrong on demand.
//!
//! It exists to test the checker and the recording client against something whose every bug is
//! known: with [`Bug::None`] their verdict must be *linearizable*, also while it loses answers and
//! refuses calls, and with each other bug it must be *refuted*. It shares no code with the product.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use rand::Rng;
use serde_json::{Value, json};
use tokio::sync::{Mutex, Notify};

/// What it does wrong, now and then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Nothing.
    None,
    /// GET answers the value before.
    StaleRead,
    /// PUT ignores its `If-Match`.
    LostUpdate,
    /// PUT answers 200 and writes nothing.
    Forgets,
    /// A revision is used again after a DELETE.
    RevisionAgain,
    /// A held lock is given to a second holder.
    DoubleLock,
    /// A lock's fence is smaller than the one before.
    FenceBack,
    /// A lock runs out in a third of its ttl.
    EarlyExpiry,
    /// A release with a stale token is accepted.
    StaleRelease,
    /// Two tickets of one chat are granted at once.
    DoubleTurn,
    /// A ticket enters the queue before the last.
    Overtakes,
    /// A retry under the same `Idempotency-Key` runs again.
    RunsAgain,
    /// `previous_holder` is never told.
    NoPrevious,
}

struct Lock {
    token: String,
    until: Instant,
}

#[derive(Default)]
struct Queue {
    /// Ticket, session, fence once granted.
    places: Vec<(u64, u64, Option<u64>)>,
    previous: Option<u64>,
    /// By ticket: who held the turn before it.
    previous_of: HashMap<u64, Option<u64>>,
}

#[derive(Default)]
struct Memory {
    counter: u64,
    checkpoints: HashMap<String, Vec<Option<(u64, Value)>>>,
    locks: HashMap<String, Lock>,
    queues: BTreeMap<String, Queue>,
    queue_of: HashMap<u64, String>,
    sessions: HashMap<u64, bool>,
    answers: HashMap<String, Reply>,
}

type Reply = (u16, Value, Option<u64>);

#[derive(Clone)]
struct Server {
    bug: Bug,
    memory: Arc<Mutex<Memory>>,
    changed: Arc<Notify>,
    /// The part of the answers that is lost, and of the calls that are refused.
    loss: f64,
}

/// Starts one; it ends with the runtime.
pub async fn start(bug: Bug, loss: f64) -> SocketAddr {
    let server = Server { bug, memory: Arc::default(), changed: Arc::default(), loss };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().fallback(handle).with_state(server);
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

fn chance(probability: f64) -> bool {
    rand::rng().random_bool(probability)
}

async fn nap() {
    let micros = rand::rng().random_range(0..3_000);
    tokio::time::sleep(Duration::from_micros(micros)).await;
}

async fn handle(
    State(server): State<Server>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    nap().await;
    if chance(server.loss) {
        let body = json!({ "error": "unavailable", "message": "not now", "not_executed": true });
        return (StatusCode::SERVICE_UNAVAILABLE, body.to_string()).into_response();
    }
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let reply = server.run(&method, &uri, &headers, &body).await;
    server.changed.notify_waiters();
    nap().await;
    if chance(server.loss) {
        let body = json!({ "error": "unavailable", "message": "who knows" });
        return (StatusCode::SERVICE_UNAVAILABLE, body.to_string()).into_response();
    }
    let (status, body, etag) = reply;
    let mut response =
        if body.is_null() { String::new() } else { body.to_string() }.into_response();
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    if let Some(etag) = etag {
        response.headers_mut().insert("etag", format!("\"{etag}\"").parse().unwrap());
    }
    response
}

fn query(uri: &Uri, name: &str) -> Option<String> {
    let pairs = uri.query()?.split('&');
    pairs.filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name)?.1.to_owned().into()
}

impl Server {
    async fn run(&self, method: &Method, uri: &Uri, headers: &HeaderMap, body: &Value) -> Reply {
        let parts: Vec<&str> = uri.path().trim_start_matches("/v1/").split('/').collect();
        if let (&Method::GET, ["turns", ticket]) = (method, &parts[1..]) {
            let wait = query(uri, "wait_ms").and_then(|wait| wait.parse().ok()).unwrap_or(0);
            return self.ask(ticket.parse().unwrap(), Duration::from_millis(wait)).await;
        }
        let text = |name: &str| Some(headers.get(name)?.to_str().ok()?.to_owned());
        let mut memory = self.memory.lock().await;
        let key = text("idempotency-key").filter(|_| !(self.bug == Bug::RunsAgain));
        if let Some(known) = key.as_ref().and_then(|key| memory.answers.get(key)) {
            return known.clone();
        }
        let wanted = text("if-match").and_then(|text| text.trim_matches('"').parse::<u64>().ok());
        let reply = match (method.as_str(), &parts[1..]) {
            ("GET", ["checkpoints", name]) => self.get(&memory, name),
            ("PUT", ["checkpoints", name]) => self.put(&mut memory, name, wanted, Some(body)),
            ("DELETE", ["checkpoints", name]) => self.put(&mut memory, name, wanted, None),
            ("POST", ["locks", name]) => self.acquire(&mut memory, name, body),
            ("POST", ["locks", name, "renew"]) => self.lock(&mut memory, name, Some(body), ""),
            ("DELETE", ["locks", name]) => {
                self.lock(&mut memory, name, None, &query(uri, "token").unwrap())
            }
            ("POST", ["sessions"]) => {
                memory.counter += 1;
                let session = memory.counter;
                memory.sessions.insert(session, true);
                (201, json!({ "session": session, "lease_ms": body["lease_ms"] }), None)
            }
            ("DELETE", ["sessions", session]) => self.close(&mut memory, session.parse().unwrap()),
            ("POST", ["turns"]) => self.take(&mut memory, body),
            ("DELETE", ["turns", ticket]) => self.release(&mut memory, ticket.parse().unwrap()),
            _ => panic!("the simulated server does not know {method} {uri}"),
        };
        if let Some(key) = key {
            memory.answers.insert(key, reply.clone());
        }
        reply
    }

    fn strikes(&self, bug: Bug) -> bool {
        self.bug == bug && chance(0.2)
    }

    fn get(&self, memory: &Memory, name: &str) -> Reply {
        let versions = memory.checkpoints.get(name).map_or(&[][..], Vec::as_slice);
        let stale = usize::from(self.strikes(Bug::StaleRead));
        match versions.iter().rev().nth(stale) {
            Some(Some((revision, value))) => (200, value.clone(), Some(*revision)),
            _ => (404, json!({ "error": "not_found" }), None),
        }
    }

    fn put(
        &self,
        memory: &mut Memory,
        name: &str,
        wanted: Option<u64>,
        value: Option<&Value>,
    ) -> Reply {
        memory.counter += 1;
        let mut fresh = memory.counter;
        let versions = memory.checkpoints.entry(name.to_owned()).or_default();
        let found = versions.last().cloned().flatten().map(|(revision, _)| revision);
        if found != wanted && !(wanted.is_some() && self.bug == Bug::LostUpdate) {
            return (412, json!({ "error": "revision", "message": "another revision" }), None);
        }
        if self.bug == Bug::RevisionAgain {
            fresh = found.map_or(1, |found| found + 1);
        }
        if !self.strikes(Bug::Forgets) {
            versions.push(value.map(|value| (fresh, value.clone())));
        }
        (200, json!({ "revision": fresh }), None)
    }

    fn acquire(&self, memory: &mut Memory, name: &str, body: &Value) -> Reply {
        let now = Instant::now();
        let free = memory.locks.get(name).is_none_or(|lock| lock.until <= now);
        if !free && !self.strikes(Bug::DoubleLock) {
            return (409, json!({ "error": "held", "message": "held" }), None);
        }
        memory.counter += 1;
        let token = format!("t{}", memory.counter);
        memory.counter += 1;
        let mut fence = memory.counter;
        if self.strikes(Bug::FenceBack) {
            fence = fence.saturating_sub(rand::rng().random_range(0..40));
        }
        let mut ttl = Duration::from_millis(body["ttl_ms"].as_u64().unwrap());
        if self.bug == Bug::EarlyExpiry {
            ttl = ttl.min(Duration::from_secs(1)) / 300;
        }
        memory.locks.insert(name.to_owned(), Lock { token: token.clone(), until: now + ttl });
        (201, json!({ "token": token, "fence": fence }), None)
    }

    /// Renews (with a body) or releases.
    fn lock(&self, memory: &mut Memory, name: &str, body: Option<&Value>, token: &str) -> Reply {
        let token = body.map_or(token, |body| body["token"].as_str().unwrap());
        let now = Instant::now();
        let held = memory
            .locks
            .get_mut(name)
            .filter(|lock| lock.until > now)
            .filter(|lock| lock.token == token || self.bug == Bug::StaleRelease);
        match (held, body) {
            (None, _) => (409, json!({ "error": "stale", "message": "not yours" }), None),
            (Some(lock), Some(body)) => {
                lock.until = now + Duration::from_millis(body["ttl_ms"].as_u64().unwrap());
                (200, json!({}), None)
            }
            (Some(_), None) => {
                memory.locks.remove(name);
                (204, Value::Null, None)
            }
        }
    }

    fn take(&self, memory: &mut Memory, body: &Value) -> Reply {
        let session = body["session"].as_u64().unwrap();
        let name = body["key"].as_str().unwrap().to_owned();
        if memory.sessions.get(&session) != Some(&true) {
            return (404, json!({ "error": "session_expired", "message": "gone" }), None);
        }
        memory.counter += 1;
        let ticket = memory.counter;
        memory.queue_of.insert(ticket, name.clone());
        let places = &mut memory.queues.entry(name.clone()).or_default().places;
        let overtakes = places.len() > 1 && self.strikes(Bug::Overtakes);
        let at = if overtakes { places.len() - 1 } else { places.len() };
        places.insert(at, (ticket, session, None));
        self.grant(memory, &name);
        self.told(memory, ticket)
    }

    fn grant(&self, memory: &mut Memory, name: &str) {
        let Memory { counter, queues, .. } = memory;
        let queue = queues.get_mut(name).unwrap();
        let previous = if self.bug == Bug::NoPrevious { None } else { queue.previous };
        let two = if self.strikes(Bug::DoubleTurn) { 2 } else { 1 };
        for (ticket, _, fence) in queue.places.iter_mut().take(two) {
            if fence.is_none() {
                *counter += 1;
                *fence = Some(*counter);
                queue.previous_of.insert(*ticket, previous);
            }
        }
    }

    fn told(&self, memory: &Memory, ticket: u64) -> Reply {
        let gone = || (404, json!({ "error": "ticket_gone", "message": "gone" }), None);
        let Some(queue) = memory.queue_of.get(&ticket).and_then(|name| memory.queues.get(name))
        else {
            return gone();
        };
        let Some(ahead) = queue.places.iter().position(|place| place.0 == ticket) else {
            return gone();
        };
        match queue.places[ahead].2 {
            Some(fence) => {
                let previous = queue.previous_of.get(&ticket).copied().flatten();
                let body = json!({
                    "ticket": ticket, "granted": true, "fence": fence, "previous_holder": previous
                });
                (200, body, None)
            }
            None => (202, json!({ "ticket": ticket, "granted": false, "ahead": ahead }), None),
        }
    }

    async fn ask(&self, ticket: u64, wait: Duration) -> Reply {
        let until = Instant::now() + wait;
        loop {
            let changed = self.changed.notified();
            let reply = self.told(&*self.memory.lock().await, ticket);
            let left = until.saturating_duration_since(Instant::now());
            if reply.0 != 202 || left.is_zero() {
                return reply;
            }
            let _ = tokio::time::timeout(left, changed).await;
        }
    }

    fn remove(&self, memory: &mut Memory, name: &str, gone: impl Fn(u64, u64) -> bool) {
        let Some(queue) = memory.queues.get_mut(name) else { return };
        if let Some(head) = queue.places.first().filter(|place| gone(place.0, place.1)) {
            queue.previous = Some(head.1);
        }
        queue.places.retain(|place| !gone(place.0, place.1));
        self.grant(memory, name);
    }

    fn release(&self, memory: &mut Memory, ticket: u64) -> Reply {
        if let Some(name) = memory.queue_of.get(&ticket).cloned() {
            self.remove(memory, &name, |place, _| place == ticket);
        }
        (204, Value::Null, None)
    }

    fn close(&self, memory: &mut Memory, session: u64) -> Reply {
        if memory.sessions.insert(session, false) != Some(true) {
            return (404, json!({ "error": "session_expired", "message": "gone" }), None);
        }
        let names: Vec<String> = memory.queues.keys().cloned().collect();
        for name in names {
            self.remove(memory, &name, |_, owner| owner == session);
        }
        (204, Value::Null, None)
    }
}
