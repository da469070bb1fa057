//! A client of the coordination API (SPEC K6) that knows what it does not know.
//!
//! Problem: a checker is only as good as its record. A call whose answer was lost may have run, may
//! still run, or may never; writing it down as *failed* hides bugs, writing it down as *done*
//! invents them.
//!
//! Idea: a call is a series of attempts at any node under one `Idempotency-Key`. Each attempt is
//! *answered*, *certainly not executed* (refused connection, 429, `not_executed: true`) or *open*
//! (any other 5xx, a broken connection, a time-out). The first answer ends the call. While no
//! attempt is open the start may be moved to the next attempt; from the first open one on it stays.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::Value;

/// One call.
#[derive(Clone, Debug)]
pub struct Request {
    /// GET, POST, PUT or DELETE.
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// Further headers.
    pub headers: Vec<(&'static str, String)>,
    /// The body.
    pub body: Option<Value>,
    /// The `Idempotency-Key`; a write without one is never sent twice.
    pub key: Option<String>,
    /// How long one attempt may take.
    pub attempt: Duration,
    /// How long attempts are made; zero = one attempt.
    pub patience: Duration,
    /// Send the first attempt to two nodes at once.
    pub twice: bool,
}

impl Request {
    /// A call that is tried for two minutes.
    pub fn new(method: Method, path: impl Into<String>) -> Self {
        Self {
            method,
            path: path.into(),
            headers: Vec::new(),
            body: None,
            key: None,
            attempt: Duration::from_secs(10),
            patience: Duration::from_secs(120),
            twice: false,
        }
    }

    /// With a JSON body.
    #[must_use]
    pub fn body(mut self, body: Value) -> Self {
        self.body = Some(body);
        self
    }

    /// Under an `Idempotency-Key`.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// With a header.
    #[must_use]
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Each attempt may take this much longer: the server was asked to wait.
    #[must_use]
    pub fn waiting(mut self, wait: Duration) -> Self {
        self.attempt += wait;
        self
    }

    /// One attempt with this deadline; its outcome may stay unknown.
    #[must_use]
    pub fn once(mut self, deadline: Duration) -> Self {
        self.attempt = deadline;
        self.patience = Duration::ZERO;
        self
    }

    /// The first attempt goes to two nodes at once.
    #[must_use]
    pub fn twice(mut self) -> Self {
        self.twice = true;
        self
    }
}

/// A definite answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The body; `Null` where there is none.
    pub body: Value,
    /// The number in the `ETag`, where there is one.
    pub etag: Option<u64>,
    /// The start of the call, ns.
    pub start: u64,
    /// Its end, ns.
    pub end: u64,
    /// Who answered.
    pub node: String,
}

impl Answer {
    /// The error code of an error body.
    pub fn error(&self) -> &str {
        self.body["error"].as_str().unwrap_or_default()
    }

    /// A number of the body.
    pub fn number(&self, name: &str) -> u64 {
        match self.body[name].as_u64() {
            Some(number) => number,
            None => panic!("{name} is not an integer in {} {}", self.status, self.body),
        }
    }
}

/// What became of a call.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// It was answered.
    Answered(Answer),
    /// It certainly had no effect and never will.
    NotExecuted {
        /// The last refusal.
        why: String,
    },
    /// It may have had, or still have, its effect.
    Unknown {
        /// The start of the call, ns.
        start: u64,
        /// What was seen last.
        why: String,
    },
}

impl Outcome {
    /// The answer; panics where there is none.
    pub fn answer(self) -> Answer {
        match self {
            Outcome::Answered(answer) => answer,
            other => panic!("no answer: {other:?}"),
        }
    }
}

/// What was counted over all calls.
#[derive(Debug, Default)]
pub struct Counts {
    /// Calls.
    pub calls: AtomicUsize,
    /// Attempts beyond the first of a call.
    pub retries: AtomicUsize,
    /// Attempts whose outcome stayed open.
    pub open_attempts: AtomicUsize,
    /// Calls whose outcome stayed unknown.
    pub unknown: AtomicUsize,
    /// Calls answered only by a retry after an open attempt.
    pub settled_by_retry: AtomicUsize,
    /// Turns that were not granted in time.
    pub stalls: AtomicUsize,
    /// Calls sent to two nodes at once and answered by both.
    pub answered_twice: AtomicUsize,
    /// Pairs of answers under one key that differ.
    pub differing: Mutex<Vec<String>>,
}

impl Counts {
    fn add(counter: &AtomicUsize) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

enum Attempt {
    Answered(Answer),
    NotExecuted(String),
    Open(String),
}

/// A client of several nodes. Cheap to clone.
#[derive(Clone)]
pub struct Api {
    http: reqwest::Client,
    secret: String,
    bases: Arc<Vec<String>>,
    origin: Instant,
    /// The longest one attempt may take, whatever a call says.
    attempt_max: Duration,
    /// What was counted.
    pub counts: Arc<Counts>,
}

impl Api {
    /// A client of the nodes at these addresses (`http://host:port`), with the cluster's secret.
    pub fn new(bases: Vec<String>, secret: impl Into<String>) -> Self {
        let http = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(Duration::from_secs(1))
            .pool_idle_timeout(Duration::from_secs(5))
            .build()
            .expect("a client without TLS can always be built");
        Self {
            http,
            secret: secret.into(),
            bases: Arc::new(bases),
            origin: Instant::now(),
            attempt_max: Duration::MAX,
            counts: Arc::default(),
        }
    }

    /// The same counts and clock, other nodes.
    pub fn through(&self, bases: Vec<String>) -> Self {
        Self { bases: Arc::new(bases), ..self.clone() }
    }

    /// The same, but it goes to the next node after so long: nodes may be frozen.
    #[must_use]
    pub fn impatient(&self, attempt_max: Duration) -> Self {
        Self { attempt_max, ..self.clone() }
    }

    /// How many nodes it knows.
    pub fn nodes(&self) -> usize {
        self.bases.len()
    }

    /// The clock of every record of this client.
    pub fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Makes a call, beginning at node `first`.
    pub async fn call(&self, first: usize, request: &Request) -> Outcome {
        Counts::add(&self.counts.calls);
        let outcome = if request.twice && request.key.is_some() {
            let (one, two) =
                tokio::join!(self.attempts(first, request), self.attempts(first + 1, request));
            self.joined(request, one, two)
        } else {
            self.attempts(first, request).await
        };
        if matches!(outcome, Outcome::Unknown { .. }) {
            Counts::add(&self.counts.unknown);
        }
        outcome
    }

    async fn attempts(&self, first: usize, request: &Request) -> Outcome {
        let mut start = self.now();
        let give_up = Instant::now() + request.patience;
        let may_repeat = request.key.is_some() || request.method == Method::GET;
        let mut open = false;
        let mut pause = Duration::from_millis(10);
        for turn in 0.. {
            let base = &self.bases[(first + turn) % self.bases.len()];
            if !open || request.method == Method::GET {
                start = self.now();
            }
            let why = match self.attempt(base, request, start).await {
                Attempt::Answered(answer) => {
                    if open {
                        Counts::add(&self.counts.settled_by_retry);
                    }
                    return Outcome::Answered(answer);
                }
                Attempt::NotExecuted(why) => why,
                Attempt::Open(why) => {
                    Counts::add(&self.counts.open_attempts);
                    open = true;
                    why
                }
            };
            if Instant::now() >= give_up || (open && !may_repeat) {
                return if open {
                    Outcome::Unknown { start, why }
                } else {
                    Outcome::NotExecuted { why }
                };
            }
            Counts::add(&self.counts.retries);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(160));
        }
        unreachable!("the loop above returns")
    }

    async fn attempt(&self, base: &str, request: &Request, start: u64) -> Attempt {
        let mut call = self
            .http
            .request(request.method.clone(), format!("{base}{}", request.path))
            .bearer_auth(&self.secret)
            .timeout(request.attempt.min(self.attempt_max));
        for (name, value) in &request.headers {
            call = call.header(*name, value);
        }
        if let Some(key) = &request.key {
            call = call.header("Idempotency-Key", key);
        }
        if let Some(body) = &request.body {
            call = call.json(body);
        }
        let response = match call.send().await {
            Ok(response) => response,
            Err(fault) if fault.is_connect() => return Attempt::NotExecuted(fault.to_string()),
            Err(fault) => return Attempt::Open(fault.to_string()),
        };
        let status = response.status().as_u16();
        let etag = response
            .headers()
            .get("etag")
            .and_then(|etag| etag.to_str().ok()?.trim_matches('"').parse().ok());
        let bytes = match response.bytes().await {
            Ok(bytes) => bytes,
            Err(fault) => return Attempt::Open(fault.to_string()),
        };
        let end = self.now();
        let body = match serde_json::from_slice(&bytes) {
            Ok(body) => body,
            Err(_) if bytes.is_empty() => Value::Null,
            Err(_) => Value::String(String::from_utf8_lossy(&bytes).into_owned()),
        };
        let seen = || format!("{status} {body}");
        if status == 429 || body["not_executed"] == Value::Bool(true) {
            Attempt::NotExecuted(seen())
        } else if status >= 500 {
            Attempt::Open(seen())
        } else {
            let node = base.to_owned();
            Attempt::Answered(Answer { status, body, etag, start, end, node })
        }
    }

    /// One outcome of two series of attempts under one key; answers that differ are noted.
    fn joined(&self, request: &Request, one: Outcome, two: Outcome) -> Outcome {
        match (one, two) {
            (Outcome::Answered(one), Outcome::Answered(two)) => {
                Counts::add(&self.counts.answered_twice);
                // A ticket may have been granted between the two answers; the ticket is the same.
                let same = match (one.body.get("ticket"), two.body.get("ticket")) {
                    (Some(one), Some(two)) => one == two,
                    _ => one.status == two.status && one.body == two.body,
                };
                if !same {
                    let text = format!("{request:?}: {one:?} and {two:?}");
                    self.counts.differing.lock().unwrap().push(text);
                }
                let start = one.start.min(two.start);
                let first = if one.end <= two.end { one } else { two };
                Outcome::Answered(Answer { start, ..first })
            }
            (Outcome::Answered(answer), other) | (other, Outcome::Answered(answer)) => {
                let start = match other {
                    Outcome::Unknown { start, .. } => answer.start.min(start),
                    _ => answer.start,
                };
                Outcome::Answered(Answer { start, ..answer })
            }
            (Outcome::Unknown { start, why }, Outcome::Unknown { start: other, .. }) => {
                Outcome::Unknown { start: start.min(other), why }
            }
            (unknown @ Outcome::Unknown { .. }, _) | (_, unknown @ Outcome::Unknown { .. }) => {
                unknown
            }
            (refused, _) => refused,
        }
    }
}
