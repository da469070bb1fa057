//! Turns, one after the other and many at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use botmesh::clock::{Clock, SystemClock};
use botmesh::coordinator::Coordinator;
use botmesh::machine::Command;
use botmesh::types::ChatKey;
use futures_util::future::try_join_all;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::Fault;
use super::cluster::Cluster;
use super::report::Checks;

/// No turn of a bench waits longer; one that does is lost.
const PATIENCE: Duration = Duration::from_secs(10);
/// Left out at the beginning of a loaded measurement.
const WARM_UP: Duration = Duration::from_secs(1);

/// Latencies at one client, in ms.
pub(crate) struct One {
    pub(crate) commits: Vec<f64>,
    pub(crate) grants: Vec<f64>,
    pub(crate) turns: Vec<f64>,
}

/// A loaded measurement.
pub(crate) struct Many {
    /// Turns in each second.
    pub(crate) per_second: Vec<f64>,
    /// Ticket → grant, in ms.
    pub(crate) grants: Vec<f64>,
    pub(crate) checks: Checks,
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1_000.0
}

/// A bare commit and a turn, taking turns with each other so that both meet the same machine.
pub(crate) async fn one_client(cluster: &Cluster, count: usize) -> Result<One, Fault> {
    let coordinator = cluster.coordinator().await?;
    let group = cluster.group();
    let clock = SystemClock;
    let mut one = One { commits: vec![], grants: vec![], turns: vec![] };
    for i in 0..count {
        let began = Instant::now();
        group.execute(Command::Noop, clock.now() + PATIENCE).await?;
        one.commits.push(ms(began));

        let key = ChatKey::new("bench", format!("one-{}", i % 100));
        let began = Instant::now();
        let mut ticket = coordinator.take_ticket(&key).await?;
        let turn = coordinator.wait_turn(&mut ticket, clock.now() + PATIENCE).await?;
        one.grants.push(ms(began));
        turn.release().await?;
        one.turns.push(ms(began));
    }
    coordinator.close().await?;
    // The first ones meet cold connections and an empty log.
    let warm = count / 10;
    for samples in [&mut one.commits, &mut one.grants, &mut one.turns] {
        samples.drain(..warm);
    }
    Ok(one)
}

/// What is known of every chat, to find overlaps and fences that do not grow.
struct Chats {
    states: Vec<(AtomicBool, AtomicU64)>,
    doubled: AtomicU64,
    out_of_order: AtomicU64,
    lost: AtomicU64,
}

impl Chats {
    fn new(count: usize) -> Self {
        let state = || (AtomicBool::new(false), AtomicU64::new(0));
        Self {
            states: (0..count).map(|_| state()).collect(),
            doubled: AtomicU64::new(0),
            out_of_order: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        }
    }

    fn enter(&self, chat: usize, fence: u64) {
        let (held, last) = &self.states[chat];
        if held.swap(true, SeqCst) {
            self.doubled.fetch_add(1, SeqCst);
        }
        if last.swap(fence, SeqCst) >= fence {
            self.out_of_order.fetch_add(1, SeqCst);
        }
    }

    fn leave(&self, chat: usize) {
        self.states[chat].0.store(false, SeqCst);
    }

    fn checks(&self) -> Checks {
        Checks {
            lost: self.lost.load(SeqCst),
            doubled: self.doubled.load(SeqCst),
            out_of_order: self.out_of_order.load(SeqCst),
        }
    }
}

/// Counts turns a second and keeps the latencies of a worker's share.
pub(crate) struct Meter {
    began: Instant,
    until: Instant,
    seconds: Vec<AtomicU64>,
    grants: Mutex<Vec<f64>>,
}

impl Meter {
    pub(crate) fn new(length: Duration) -> Self {
        let began = Instant::now() + WARM_UP;
        let seconds = (0..length.as_secs()).map(|_| AtomicU64::new(0)).collect();
        Self { began, until: began + length, seconds, grants: Mutex::default() }
    }

    pub(crate) fn goes_on(&self) -> bool {
        Instant::now() < self.until
    }

    pub(crate) fn turn_done(&self) {
        let Some(since) = Instant::now().checked_duration_since(self.began) else { return };
        if let Some(second) = self.seconds.get(since.as_secs() as usize) {
            second.fetch_add(1, SeqCst);
        }
    }

    pub(crate) fn per_second(&self) -> Vec<f64> {
        self.seconds.iter().map(|second| second.load(SeqCst) as f64).collect()
    }

    fn finish(self, chats: &Chats) -> Many {
        let per_second = self.per_second();
        Many { per_second, grants: self.grants.into_inner(), checks: chats.checks() }
    }
}

/// Walks through the chats in an order of its own, the same in every run.
struct Walk(u64);

impl Walk {
    fn next(&mut self, chats: usize) -> usize {
        // xorshift64
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % chats as u64) as usize
    }
}

/// Many turns in flight through the node of this process.
pub(crate) async fn many(
    cluster: &Cluster,
    count: usize,
    in_flight: usize,
    length: Duration,
) -> Result<Many, Fault> {
    let coordinator = cluster.coordinator().await?;
    let chats = Arc::new(Chats::new(count));
    let meter = Arc::new(Meter::new(length));
    let workers = (0..in_flight).map(|number| {
        let worker = work(coordinator.clone(), chats.clone(), meter.clone(), number);
        async { tokio::spawn(worker).await? }
    });
    try_join_all(workers).await?;
    coordinator.close().await?;
    let meter = Arc::into_inner(meter).ok_or("a worker is still there")?;
    Ok(meter.finish(&chats))
}

async fn work(
    coordinator: Arc<dyn Coordinator>,
    chats: Arc<Chats>,
    meter: Arc<Meter>,
    number: usize,
) -> Result<(), Fault> {
    let clock = SystemClock;
    let mut walk = Walk(0x9e37_79b9_7f4a_7c15 ^ ((number as u64 + 1) << 20));
    let mut grants = Vec::new();
    while meter.goes_on() {
        let chat = walk.next(chats.states.len());
        let key = ChatKey::new("bench", chat.to_string());
        let began = Instant::now();
        let mut ticket = coordinator.take_ticket(&key).await?;
        let Ok(turn) = coordinator.wait_turn(&mut ticket, clock.now() + PATIENCE).await else {
            chats.lost.fetch_add(1, SeqCst);
            continue;
        };
        grants.push(ms(began));
        chats.enter(chat, turn.fence().0);
        chats.leave(chat);
        turn.release().await?;
        meter.turn_done();
    }
    meter.grants.lock().append(&mut grants);
    Ok(())
}

/// The same through the coordination API of a node in another process.
pub(crate) async fn over_http(
    cluster: &Cluster,
    count: usize,
    in_flight: usize,
    length: Duration,
) -> Result<Many, Fault> {
    let api = cluster.api()?;
    let opened = api.post("sessions", json!({ "lease_ms": 60_000 })).await?;
    let session = opened["session"].clone();
    let chats = Arc::new(Chats::new(count));
    let meter = Arc::new(Meter::new(length));
    let workers = (0..in_flight).map(|number| {
        let (api, session) = (api.clone(), session.clone());
        let (chats, meter) = (chats.clone(), meter.clone());
        async move {
            let mut walk = Walk(0x9e37_79b9_7f4a_7c15 ^ ((number as u64 + 1) << 20));
            while meter.goes_on() {
                let chat = walk.next(chats.states.len());
                let wait_ms = PATIENCE.as_millis() as u64;
                let body = json!({
                    "session": session, "key": format!("bench:{chat}"), "wait_ms": wait_ms
                });
                let granted = api.post("turns", body).await?;
                match (granted["fence"].as_u64(), &granted["ticket"]) {
                    (Some(fence), Value::Number(ticket)) => {
                        chats.enter(chat, fence);
                        chats.leave(chat);
                        api.delete(&format!("turns/{ticket}?session={session}")).await?;
                        meter.turn_done();
                    }
                    _ => {
                        chats.lost.fetch_add(1, SeqCst);
                    }
                }
            }
            Ok::<(), Fault>(())
        }
    });
    try_join_all(workers.map(|worker| async { tokio::spawn(worker).await? })).await?;
    api.delete(&format!("sessions/{session}")).await?;
    let meter = Arc::into_inner(meter).ok_or("a worker is still there")?;
    Ok(meter.finish(&chats))
}
