//! Clients that call one key through all nodes and write down what they saw.
//!
//! One history = one key, a few clients, a few dozen calls. Most calls are retried under their key
//! until they are answered; some are given up at once, so that unknown outcomes stay in the record;
//! some go to two nodes at the same time.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use reqwest::Method;
use serde_json::json;

use super::api::{Answer, Api, Outcome, Request};
use super::linearize::Call;
use super::models::{
    CheckpointAnswer, CheckpointCall, CheckpointOp, Condition, LockAnswer, LockCall, LockOp,
    TurnAnswer, TurnCall, TurnOp,
};
use super::turnlog::Held;

/// How much a history holds.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Clients.
    pub clients: usize,
    /// Rounds of each client; a round is one to five calls.
    pub rounds: usize,
    /// A turn not granted within this is a stall: it is counted, and its session closed.
    pub stall: Duration,
}

/// A ttl that does not run out within a history.
const LONG_MS: u64 = 600_000;
/// A ttl that does.
const SHORT_MS: u64 = 300;
/// The deadline of calls that are meant to stay unknown now and then.
const HASTY: Duration = Duration::from_millis(4);

struct Client {
    api: Api,
    number: usize,
    random: StdRng,
    prefix: String,
    key: String,
    /// Makes its idempotency keys its own.
    name: uuid::Uuid,
    calls: u64,
}

/// What the clients of one key record.
type Record<Op, Answer> = Arc<Mutex<Vec<Call<Op, Answer>>>>;

impl Client {
    fn new(api: &Api, prefix: &str, key: &str, seed: u64, number: usize) -> Self {
        let random = StdRng::seed_from_u64(seed.wrapping_mul(1_009).wrapping_add(number as u64));
        let (api, prefix, key) = (api.clone(), prefix.to_owned(), key.to_owned());
        Self { api, number, random, prefix, key, name: uuid::Uuid::new_v4(), calls: 0 }
    }

    fn chance(&mut self, probability: f64) -> bool {
        self.random.random_bool(probability)
    }

    fn path(&self, rest: &str) -> String {
        format!("/v1/{}/{rest}", self.prefix)
    }

    /// Under a key no other call of the test has.
    fn keyed(&mut self, request: Request) -> Request {
        self.calls += 1;
        request.key(format!("{}-{}", self.name, self.calls))
    }

    async fn call(&mut self, request: &Request) -> Outcome {
        let first = self.random.random_range(0..self.api.nodes());
        self.api.call(first, request).await
    }

    /// Sends a write in one of the three ways; `hasty` is the chance that it is given up at once.
    async fn write(&mut self, request: Request, hasty: f64) -> Outcome {
        let mut request = self.keyed(request);
        if self.chance(hasty) {
            request = request.once(HASTY);
        } else if self.chance(0.1) {
            request = request.twice();
        }
        self.call(&request).await
    }

    async fn pause(&mut self) {
        let pause = Duration::from_micros(self.random.random_range(0..4_000));
        tokio::time::sleep(pause).await;
    }

    /// Writes a call down. What certainly was not executed, and a read without an answer, say
    /// nothing and are left out.
    fn note<Op, A>(
        &self,
        record: &Record<Op, A>,
        op: Op,
        read: bool,
        outcome: &Outcome,
        answer: impl FnOnce(&Answer) -> A,
    ) {
        let (answer, start, end) = match outcome {
            Outcome::Answered(seen) => (Some(answer(seen)), seen.start, seen.end),
            Outcome::Unknown { start, .. } if !read => (None, *start, u64::MAX),
            Outcome::Unknown { .. } | Outcome::NotExecuted { .. } => return,
        };
        let call = Call { client: self.number, op, answer, start, end };
        record.lock().unwrap().push(call);
    }
}

fn unexpected(what: &str, answer: &Answer) -> ! {
    panic!("{what} was answered at last {answer:?}")
}

fn take<Op, A>(record: Record<Op, A>) -> Vec<Call<Op, A>> {
    std::mem::take(&mut *record.lock().unwrap())
}

/// Runs the clients of one key at the same time.
async fn together<F>(clients: impl Iterator<Item = F>)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut running = tokio::task::JoinSet::new();
    for client in clients {
        running.spawn(client);
    }
    while let Some(ended) = running.join_next().await {
        if let Err(fault) = ended {
            std::panic::resume_unwind(fault.into_panic());
        }
    }
}

// ---------------------------------------------------------------------------------- checkpoints

/// Clients that read, write and delete one checkpoint.
pub async fn checkpoints(
    api: &Api,
    prefix: &str,
    key: &str,
    seed: u64,
    size: Size,
) -> Vec<CheckpointCall> {
    let record: Record<_, _> = Arc::default();
    together((0..size.clients).map(|number| {
        let client = Client::new(api, prefix, key, seed, number);
        checkpoint_client(client, record.clone(), size.rounds)
    }))
    .await;
    take(record)
}

async fn checkpoint_client(
    mut client: Client,
    record: Record<CheckpointOp, CheckpointAnswer>,
    rounds: usize,
) {
    let path = client.path(&format!("checkpoints/{}", client.key));
    let mut seen: Option<u64> = None;
    let mut stale: Option<u64> = None;
    for round in 0..rounds {
        let value = (client.number as u64) << 32 | round as u64;
        match client.random.random_range(0..100) {
            0..45 => seen = get_checkpoint(&mut client, &record, &path).await,
            45..60 => {
                let request = Request::new(Method::PUT, &path)
                    .header("If-None-Match", "*")
                    .body(json!({ "value": value }));
                let condition = Condition::Absent;
                put(&mut client, &record, request, condition, value, &mut seen).await;
            }
            60..88 => {
                // Mostly the revision seen last, now and then one that is surely old.
                let old = client.chance(0.1);
                let Some(revision) = (if old { stale } else { seen }) else {
                    seen = get_checkpoint(&mut client, &record, &path).await;
                    continue;
                };
                let request = Request::new(Method::PUT, &path)
                    .header("If-Match", format!("\"{revision}\""))
                    .body(json!({ "value": value }));
                stale = Some(revision);
                let condition = Condition::Revision(revision);
                put(&mut client, &record, request, condition, value, &mut seen).await;
            }
            _ => {
                let Some(revision) = seen.take() else { continue };
                let request = Request::new(Method::DELETE, &path)
                    .header("If-Match", format!("\"{revision}\""));
                stale = Some(revision);
                let outcome = client.write(request, 0.05).await;
                client.note(&record, CheckpointOp::Delete { revision }, false, &outcome, |seen| {
                    match seen.status {
                        200 | 204 => CheckpointAnswer::Deleted,
                        412 => CheckpointAnswer::Refused,
                        _ => unexpected("DELETE of a checkpoint", seen),
                    }
                });
            }
        }
        client.pause().await;
    }
}

async fn get_checkpoint(
    client: &mut Client,
    record: &Record<CheckpointOp, CheckpointAnswer>,
    path: &str,
) -> Option<u64> {
    let outcome = client.call(&Request::new(Method::GET, path)).await;
    client.note(record, CheckpointOp::Get, true, &outcome, |seen| match seen.status {
        200 => CheckpointAnswer::Found {
            value: seen.number("value"),
            revision: seen.etag.unwrap_or_else(|| unexpected("GET without ETag", seen)),
        },
        404 => CheckpointAnswer::Absent,
        _ => unexpected("GET of a checkpoint", seen),
    });
    match outcome {
        Outcome::Answered(answer) => answer.etag,
        _ => None,
    }
}

async fn put(
    client: &mut Client,
    record: &Record<CheckpointOp, CheckpointAnswer>,
    request: Request,
    condition: Condition,
    value: u64,
    seen: &mut Option<u64>,
) {
    let outcome = client.write(request, 0.05).await;
    let op = CheckpointOp::Put { condition, value };
    client.note(record, op, false, &outcome, |answer| match answer.status {
        200 | 201 => CheckpointAnswer::Written { revision: answer.number("revision") },
        412 => CheckpointAnswer::Refused,
        _ => unexpected("PUT of a checkpoint", answer),
    });
    if let Outcome::Answered(answer) = outcome {
        *seen = answer.body["revision"].as_u64().filter(|_| answer.status < 300);
    }
}

// ---------------------------------------------------------------------------------------- locks

/// Clients that acquire, renew and release one lock.
pub async fn locks(api: &Api, prefix: &str, key: &str, seed: u64, size: Size) -> Vec<LockCall> {
    let record: Record<_, _> = Arc::default();
    together((0..size.clients).map(|number| {
        let client = Client::new(api, prefix, key, seed, number);
        lock_client(client, record.clone(), size.rounds)
    }))
    .await;
    take(record)
}

async fn lock_client(mut client: Client, record: Record<LockOp, LockAnswer>, rounds: usize) {
    let mut old: Option<String> = None;
    for _ in 0..rounds {
        // Nobody can release what a lost answer acquired, so those acquisitions run out soon.
        let hasty = client.chance(0.08);
        let ttl_ms = if hasty || client.chance(0.1) { SHORT_MS } else { LONG_MS };
        let path = client.path(&format!("locks/{}", client.key));
        let request = Request::new(Method::POST, path).body(json!({ "ttl_ms": ttl_ms }));
        let outcome = client.write(request, if hasty { 1.0 } else { 0.0 }).await;
        client.note(&record, LockOp::Acquire { ttl_ms }, false, &outcome, |seen| {
            match seen.status {
                200 | 201 => {
                    LockAnswer::Acquired { token: token(seen), fence: seen.number("fence") }
                }
                409 => LockAnswer::Refused,
                _ => unexpected("acquire", seen),
            }
        });
        let held = match &outcome {
            Outcome::Answered(seen) if seen.status < 300 => Some(token(seen)),
            _ => None,
        };
        if client.chance(0.15)
            && let Some(old) = &old
        {
            end_or_renew(&mut client, &record, old, None).await;
        }
        client.pause().await;
        let Some(held) = held else { continue };
        if client.chance(0.3) {
            end_or_renew(&mut client, &record, &held, Some(LONG_MS)).await;
        }
        end_or_renew(&mut client, &record, &held, None).await;
        old = Some(held);
    }
}

fn token(answer: &Answer) -> String {
    let token = answer.body["token"].as_str();
    token.unwrap_or_else(|| unexpected("acquire, without a token,", answer)).to_owned()
}

async fn end_or_renew(
    client: &mut Client,
    record: &Record<LockOp, LockAnswer>,
    token: &str,
    ttl_ms: Option<u64>,
) {
    let path = client.path(&format!("locks/{}", client.key));
    let name = token.to_owned();
    let (request, op) = match ttl_ms {
        Some(ttl_ms) => {
            let body = json!({ "token": token, "ttl_ms": ttl_ms });
            let request = Request::new(Method::POST, format!("{path}/renew")).body(body);
            (request, LockOp::Renew { token: name, ttl_ms })
        }
        None => {
            let request = Request::new(Method::DELETE, format!("{path}?token={token}"));
            (request, LockOp::Release { token: name })
        }
    };
    let outcome = client.write(request, 0.0).await;
    client.note(record, op, false, &outcome, |seen| match seen.status {
        200 | 204 => LockAnswer::Done,
        409 => LockAnswer::Refused,
        _ => unexpected("a call with a lock's token", seen),
    });
}

// ---------------------------------------------------------------------------------------- turns

/// What the clients of one chat saw.
#[derive(Debug, Default)]
pub struct TurnHistory {
    /// The calls.
    pub calls: Vec<TurnCall>,
    /// The turns they held.
    pub log: Vec<Held>,
}

/// Clients that take tickets of one chat, wait, hold the turn and release it.
pub async fn turns(api: &Api, prefix: &str, key: &str, seed: u64, size: Size) -> TurnHistory {
    let record: Record<_, _> = Arc::default();
    let log: Arc<Mutex<Vec<Held>>> = Arc::default();
    together((0..size.clients).map(|number| {
        let client = Client::new(api, prefix, key, seed, number);
        let (record, log) = (record.clone(), log.clone());
        TurnClient { client, record, log, session: None, stall: size.stall }.run(size.rounds)
    }))
    .await;
    let log = std::mem::take(&mut *log.lock().unwrap());
    TurnHistory { calls: take(record), log }
}

struct TurnClient {
    client: Client,
    record: Record<TurnOp, TurnAnswer>,
    log: Arc<Mutex<Vec<Held>>>,
    session: Option<u64>,
    stall: Duration,
}

impl TurnClient {
    async fn run(mut self, rounds: usize) {
        for _ in 0..rounds {
            let session = match self.session {
                Some(session) => session,
                None => self.open().await,
            };
            let taken = self.take(session).await;
            match taken {
                Some(ticket) if self.client.chance(0.1) => self.release(session, ticket).await,
                Some(ticket) => {
                    self.hold(session, ticket).await;
                    if self.client.chance(0.1) {
                        self.ask(ticket, Duration::ZERO).await;
                    }
                }
                // Whatever it took is in nobody's hands: it goes with its session.
                None => self.close(session).await,
            }
            self.client.pause().await;
        }
        if let Some(session) = self.session {
            self.close(session).await;
        }
    }

    async fn open(&mut self) -> u64 {
        let path = self.client.path("sessions");
        let request = Request::new(Method::POST, path).body(json!({ "lease_ms": LONG_MS }));
        let request = self.client.keyed(request);
        loop {
            if let Outcome::Answered(answer) = self.client.call(&request).await {
                assert_eq!(answer.status, 201, "open: {}", answer.body);
                assert!(answer.number("lease_ms") >= 60_000, "the lease is too short for a test");
                let session = answer.number("session");
                self.session = Some(session);
                return session;
            }
        }
    }

    async fn close(&mut self, session: u64) {
        let path = self.client.path(&format!("sessions/{session}"));
        let outcome = self.client.write(Request::new(Method::DELETE, path), 0.0).await;
        self.session = None;
        self.client.note(
            &self.record,
            TurnOp::Close { session },
            false,
            &outcome,
            |seen| match seen.status {
                204 => TurnAnswer::Done,
                404 if seen.error() == "session_expired" => TurnAnswer::SessionExpired,
                _ => unexpected("DELETE of a session", seen),
            },
        );
    }

    async fn take(&mut self, session: u64) -> Option<u64> {
        let path = self.client.path("turns");
        let body = json!({ "session": session, "key": self.client.key });
        let request = Request::new(Method::POST, path).body(body);
        let outcome = self.client.write(request, 0.04).await;
        self.client.note(
            &self.record,
            TurnOp::Take { session },
            false,
            &outcome,
            |seen| match seen.status {
                200 | 202 => TurnAnswer::Ticket { ticket: seen.number("ticket") },
                404 if seen.error() == "session_expired" => TurnAnswer::SessionExpired,
                _ => unexpected("POST of a ticket", seen),
            },
        );
        match &outcome {
            Outcome::Answered(seen) if seen.status < 300 => {
                let ticket = seen.number("ticket");
                self.note_told(ticket, &outcome);
                Some(ticket)
            }
            _ => None,
        }
    }

    /// Writes down what an answer says of a ticket, and tells whether it was granted.
    fn note_told(&self, ticket: u64, outcome: &Outcome) -> Option<TurnAnswer> {
        self.client.note(&self.record, TurnOp::Ask { ticket }, true, outcome, told);
        match outcome {
            Outcome::Answered(answer) => Some(told(answer)),
            _ => None,
        }
    }

    async fn ask(&mut self, ticket: u64, wait: Duration) -> Option<TurnAnswer> {
        let path = format!("turns/{ticket}?wait_ms={}", wait.as_millis());
        let request = Request::new(Method::GET, self.client.path(&path)).waiting(wait);
        let outcome = self.client.call(&request).await;
        self.note_told(ticket, &outcome)
    }

    async fn hold(&mut self, session: u64, ticket: u64) {
        let patience = Instant::now() + self.stall;
        while Instant::now() < patience {
            let wait = Duration::from_millis(self.client.random.random_range(50..1_500));
            match self.ask(ticket, wait).await {
                Some(TurnAnswer::Granted { fence, .. }) => {
                    let start = self.client.api.now();
                    self.client.pause().await;
                    let end = self.client.api.now();
                    let chat = self.client.key.clone();
                    self.log.lock().unwrap().push(Held { chat, ticket, fence, start, end });
                    return self.release(session, ticket).await;
                }
                Some(TurnAnswer::Waiting { .. }) | None => {}
                Some(_) => return,
            }
        }
        self.client.api.counts.stalls.fetch_add(1, Ordering::Relaxed);
        self.close(session).await;
    }

    async fn release(&mut self, session: u64, ticket: u64) {
        let path = self.client.path(&format!("turns/{ticket}?session={session}"));
        let outcome = self.client.write(Request::new(Method::DELETE, path), 0.0).await;
        let op = TurnOp::Release { ticket, session };
        self.client.note(&self.record, op, false, &outcome, |seen| match seen.status {
            204 => TurnAnswer::Done,
            404 if seen.error() == "session_expired" => TurnAnswer::SessionExpired,
            _ => unexpected("DELETE of a ticket", seen),
        });
        if !matches!(outcome, Outcome::Answered(_)) {
            self.close(session).await;
        }
    }
}

fn told(answer: &Answer) -> TurnAnswer {
    let ticket = || answer.number("ticket");
    match (answer.status, answer.body["granted"].as_bool()) {
        (200, Some(true)) => TurnAnswer::Granted {
            ticket: ticket(),
            fence: answer.number("fence"),
            previous: answer.body["previous_holder"].as_u64(),
        },
        (202, Some(false)) => {
            TurnAnswer::Waiting { ticket: ticket(), ahead: answer.number("ahead") }
        }
        (404, _) if answer.error() == "ticket_gone" => TurnAnswer::Gone,
        (404, _) if answer.error() == "session_expired" => TurnAnswer::SessionExpired,
        _ => unexpected("a ticket", answer),
    }
}
