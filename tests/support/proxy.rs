//! An HTTP proxy between clients and a node that tampers with what passes.
//!
//! It plants a fault in front of a *right* server, so that the whole chain from the recording
//! client to the verdict is seen to catch it. Where the chain calls a stale read or a double grant
//! linearizable, its silence about the real thing is worth nothing.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use rand::Rng;
use serde_json::{Value, json};

/// What it does to answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tamper {
    /// Answers some GETs of a checkpoint from an old answer.
    StaleReads,
    /// Turns some refusals of a lock and some 202 of a ticket into grants.
    DoubleGrants,
    /// Breaks the connection instead of passing every third answer to `POST …/turns`.
    DropThirdTicket,
    /// Leaves the second reply of a chat's list out.
    LosesReply,
    /// Lists the second reply twice.
    DoublesReply,
    /// Lists the second reply before the first.
    SwapsReplies,
    /// Gives the last reply the fence before the first one's.
    FenceBack,
}

#[derive(Clone)]
struct Proxy {
    tamper: Tamper,
    target: String,
    http: reqwest::Client,
    old: Arc<Mutex<HashMap<String, Passed>>>,
    tickets: Arc<AtomicUsize>,
    struck: Arc<AtomicUsize>,
}

#[derive(Clone)]
struct Passed {
    status: StatusCode,
    etag: Option<String>,
    body: Bytes,
}

/// A running proxy; it ends with the runtime.
pub struct Running {
    /// Where it listens.
    pub address: SocketAddr,
    struck: Arc<AtomicUsize>,
}

impl Running {
    /// Its base URL.
    pub fn base(&self) -> String {
        format!("http://{}", self.address)
    }

    /// How many answers it has tampered with.
    pub fn struck(&self) -> usize {
        self.struck.load(Ordering::Relaxed)
    }
}

/// Starts a proxy in front of `target` (`http://host:port`).
pub async fn start(tamper: Tamper, target: impl Into<String>) -> Running {
    let struck = Arc::new(AtomicUsize::new(0));
    let proxy = Proxy {
        tamper,
        target: target.into(),
        http: reqwest::Client::builder().no_proxy().build().unwrap(),
        old: Arc::default(),
        tickets: Arc::default(),
        struck: struck.clone(),
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().fallback(pass).with_state(proxy);
    tokio::spawn(async move { axum::serve(listener, router).await });
    Running { address, struck }
}

async fn pass(
    State(proxy): State<Proxy>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut call = proxy
        .http
        .request(method.clone(), format!("{}{path}", proxy.target))
        .timeout(Duration::from_secs(30))
        .body(body);
    for (name, value) in headers.iter().filter(|(name, _)| !name.as_str().eq("host")) {
        call = call.header(name, value);
    }
    let Ok(response) = call.send().await else {
        return StatusCode::BAD_GATEWAY.into_response();
    };
    let status = response.status();
    let etag = response.headers().get("etag").and_then(|etag| Some(etag.to_str().ok()?.to_owned()));
    let Ok(body) = response.bytes().await else {
        return StatusCode::BAD_GATEWAY.into_response();
    };
    proxy.answer(&method, uri.path(), Passed { status, etag, body })
}

impl Passed {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.body).into_response();
        if let Some(etag) = self.etag.and_then(|etag| etag.parse().ok()) {
            response.headers_mut().insert("etag", etag);
        }
        response.headers_mut().insert("content-type", "application/json".parse().unwrap());
        response
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }
}

impl Proxy {
    fn answer(&self, method: &Method, path: &str, passed: Passed) -> Response {
        match self.tamper {
            Tamper::StaleReads => self.stale(method, path, passed).into_response(),
            Tamper::DoubleGrants => self.double(method, path, passed).into_response(),
            Tamper::LosesReply
            | Tamper::DoublesReply
            | Tamper::SwapsReplies
            | Tamper::FenceBack => self.replies(method, path, passed).into_response(),
            Tamper::DropThirdTicket => {
                let ticket = *method == Method::POST && path.ends_with("/turns");
                if ticket && self.tickets.fetch_add(1, Ordering::Relaxed) % 3 == 2 {
                    self.struck.fetch_add(1, Ordering::Relaxed);
                    broken()
                } else {
                    passed.into_response()
                }
            }
        }
    }

    fn strikes(&self) -> bool {
        let strikes = rand::rng().random_bool(0.3);
        self.struck.fetch_add(usize::from(strikes), Ordering::Relaxed);
        strikes
    }

    fn stale(&self, method: &Method, path: &str, passed: Passed) -> Passed {
        if *method != Method::GET || !path.contains("/checkpoints/") {
            return passed;
        }
        let mut old = self.old.lock().unwrap();
        match old.get(path) {
            Some(old) if self.strikes() => old.clone(),
            _ => {
                old.insert(path.to_owned(), passed.clone());
                passed
            }
        }
    }

    fn replies(&self, method: &Method, path: &str, mut passed: Passed) -> Passed {
        let Value::Array(mut list) = passed.json() else { return passed };
        if *method != Method::GET || !path.ends_with("/replies") || list.len() < 3 {
            return passed;
        }
        match self.tamper {
            Tamper::LosesReply => drop(list.remove(1)),
            Tamper::DoublesReply => list.insert(1, list[1].clone()),
            Tamper::SwapsReplies => list.swap(0, 1),
            _ => {
                let before = list[0]["fence"].as_u64().unwrap() - 1;
                list.last_mut().unwrap()["fence"] = before.into();
            }
        }
        self.struck.fetch_add(1, Ordering::Relaxed);
        passed.body = Value::Array(list).to_string().into();
        passed
    }

    fn double(&self, method: &Method, path: &str, mut passed: Passed) -> Passed {
        let number: u64 = rand::rng().random_range(1 << 40..1 << 50);
        let (status, body) = if *method == Method::POST && path.contains("/locks/") {
            let held = passed.status == StatusCode::CONFLICT && !path.ends_with("/renew");
            if !held || !self.strikes() {
                return passed;
            }
            (StatusCode::CREATED, json!({ "token": format!("planted-{number}"), "fence": number }))
        } else if passed.status == StatusCode::ACCEPTED && path.contains("/turns") {
            if !self.strikes() {
                return passed;
            }
            let ticket = passed.json()["ticket"].clone();
            let body = json!({
                "ticket": ticket, "granted": true, "fence": number, "previous_holder": null
            });
            (StatusCode::OK, body)
        } else {
            return passed;
        };
        passed.status = status;
        passed.body = body.to_string().into();
        passed
    }
}

/// An answer whose connection breaks before its body: the client learns nothing.
fn broken() -> Response {
    let fault = std::io::Error::other("dropped on purpose");
    let body = futures_util::stream::once(async move { Err::<Bytes, _>(fault) });
    let mut response = Body::from_stream(body).into_response();
    response.headers_mut().insert("content-length", "64".parse().unwrap());
    response
}
