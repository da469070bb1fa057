//! What runs on every replica of a simulation, and the record of what it saw.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use botmesh::bot::{Bot, BoxError, Coordination, Durability};
use botmesh::coordinator::{Coordinator, RaftCoordinator};
use botmesh::store::{
    Authority, CommitError, Consistency, Expect, GroupStore, Op, RowKey, Store, Table,
};
use botmesh::testing::Replica;
use botmesh::types::{ChatKey, Prefix};
use parking_lot::Mutex;

use crate::linearize::{Call, Verdict};
use crate::models::{CheckpointAnswer, CheckpointCall, CheckpointOp, Condition, check_checkpoint};
use crate::turnlog::{self, Held};

/// Chats whose turns are taken by hand.
const CHATS: u64 = 3;
/// Checkpoints that are written by hand.
const ROWS: u64 = 2;
/// The lease of those who take turns by hand.
const LEASE: Duration = Duration::from_millis(500);
/// The lease of the bot.
const BOT_LEASE: Duration = Duration::from_millis(600);

/// What is done wrong on purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bugs {
    /// Who holds a turn acts without asking whether it does.
    pub(crate) never_checks: bool,
    /// What is read is what the own node has.
    pub(crate) reads_locally: bool,
}

/// What all lives of all replicas saw.
#[derive(Debug, Default)]
pub(crate) struct Record {
    bugs: Bugs,
    held: Mutex<BTreeMap<(String, u64), Held>>,
    calls: Mutex<BTreeMap<String, Vec<CheckpointCall>>>,
    values: AtomicUsize,
    stop: AtomicBool,
}

fn ns(replica: &Replica) -> u64 {
    replica.elapsed().as_nanos() as u64
}

impl Record {
    pub(crate) fn new(bugs: Bugs) -> Self {
        Self { bugs, ..Self::default() }
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// How many turns were held.
    pub(crate) fn turns(&self) -> usize {
        self.held.lock().len()
    }

    /// How many calls there were, and how many of them were never answered.
    pub(crate) fn calls(&self) -> (usize, usize) {
        let calls = self.calls.lock();
        let open = |call: &&CheckpointCall| call.answer.is_none();
        (calls.values().map(Vec::len).sum(), calls.values().flatten().filter(open).count())
    }

    /// What is wrong with it.
    pub(crate) fn faults(&self) -> Vec<String> {
        let held: Vec<Held> = self.held.lock().values().cloned().collect();
        let mut faults: Vec<String> =
            turnlog::faults(&held).iter().map(|fault| format!("{fault:?}")).collect();
        for (key, calls) in &*self.calls.lock() {
            match check_checkpoint(calls) {
                Verdict::Linearizable => {}
                Verdict::Refuted(text) => faults.push(format!("{key}: {text}")),
                Verdict::GaveUp { visited } => faults.push(format!("{key}: gave up at {visited}")),
            }
        }
        faults
    }
}

fn prefix(name: &str) -> Prefix {
    Prefix::new(name).unwrap()
}

/// The program of a replica: a bot with durability, one that takes turns, one that writes.
pub(crate) async fn all(replica: Replica, record: Arc<Record>) -> Result<(), BoxError> {
    tokio::spawn(take_turns(replica.clone(), record.clone()));
    tokio::spawn(write(replica.clone(), record));
    bot(replica).await
}

/// The order flow, with durability.
pub(crate) async fn bot(replica: Replica) -> Result<(), BoxError> {
    let shop = prefix("shop");
    let coordination = Coordination::new(replica.coordinator(&shop, BOT_LEASE));
    let bot = botmesh::cli::demo::flows(Bot::builder())
        .provider(replica.provider("x"))
        .store(replica.store(&shop))
        .coordination(coordination.durability(Durability::On));
    Ok(bot.build().await?.run_until(std::future::pending()).await?)
}

async fn rest(replica: &Replica, most_ms: u64) {
    tokio::time::sleep(Duration::from_millis(1 + replica.random(most_ms))).await;
}

/// Takes one turn after the other.
async fn take_turns(replica: Replica, record: Arc<Record>) {
    let coordinator = replica.coordinator(&prefix("turns"), LEASE);
    if coordinator.open().await.is_err() {
        return;
    }
    while !record.is_over() {
        let chat = ChatKey::new("x", format!("c{}", replica.random(CHATS)));
        // Refused, lost, or too late: the next one is another.
        let _ = take_turn(&replica, &coordinator, &chat, &record).await;
        rest(&replica, 150).await;
    }
    // Others may be gone by now.
    let _ = tokio::time::timeout(Duration::from_secs(5), coordinator.close()).await;
}

async fn take_turn(
    replica: &Replica,
    coordinator: &RaftCoordinator,
    chat: &ChatKey,
    record: &Record,
) -> Result<(), BoxError> {
    let mut ticket = coordinator.take_ticket(chat).await?;
    let until = replica.clock().now() + Duration::from_secs(5);
    let turn = coordinator.wait_turn(&mut ticket, until).await?;
    let key = (chat.to_string(), turn.fence().0);
    let start = ns(replica);
    let held = Held {
        chat: chat.to_string(),
        ticket: turn.ticket().0,
        fence: turn.fence().0,
        start,
        end: start,
    };
    // Now and then for longer than a lease.
    let acts = if replica.random(8) == 0 { 40 } else { 1 + replica.random(4) };
    for _ in 0..acts {
        // Every act is one look and no waiting behind it.
        if !record.bugs.never_checks && turn.check().is_err() {
            return Ok(());
        }
        let now = ns(replica);
        record.held.lock().entry(key.clone()).or_insert_with(|| held.clone()).end = now;
        rest(replica, 25).await;
    }
    Ok(turn.release().await?)
}

/// Reads and writes checkpoints, one call after the other.
async fn write(replica: Replica, record: Arc<Record>) {
    let store = replica.store(&prefix("rows"));
    let mut seen: BTreeMap<String, Option<u64>> = BTreeMap::new();
    while !record.is_over() {
        let key = format!("x:k{}", replica.random(ROWS));
        match seen.remove(&key) {
            Some(revision) if replica.random(2) == 0 => {
                put(&replica, &store, &record, &key, revision).await;
            }
            _ => {
                if let Some(revision) = get(&replica, &store, &record, &key).await {
                    seen.insert(key, revision);
                }
            }
        }
        rest(&replica, 200).await;
    }
}

/// Begins a call: without an answer, for its process may end.
fn begin(replica: &Replica, record: &Record, key: &str, op: CheckpointOp) -> usize {
    let mut calls = record.calls.lock();
    let calls = calls.entry(key.to_owned()).or_default();
    let start = ns(replica);
    calls.push(Call { client: replica.number(), op, answer: None, start, end: u64::MAX });
    calls.len() - 1
}

fn end(replica: &Replica, record: &Record, key: &str, call: usize, answer: CheckpointAnswer) {
    let mut calls = record.calls.lock();
    let calls = calls.get_mut(key).unwrap();
    (calls[call].answer, calls[call].end) = (Some(answer), ns(replica));
}

async fn get(
    replica: &Replica,
    store: &GroupStore,
    record: &Record,
    key: &str,
) -> Option<Option<u64>> {
    let call = begin(replica, record, key, CheckpointOp::Get);
    let row = RowKey::new(Table::Checkpoint, key);
    let how = match record.bugs.reads_locally {
        true => Consistency::Local,
        false => Consistency::Linearizable,
    };
    let found = store.read(&row, how).await.ok()?;
    let answer = match &found {
        None => CheckpointAnswer::Absent,
        Some(row) => CheckpointAnswer::Found {
            value: u64::from_be_bytes(row.value[..8].try_into().unwrap()),
            revision: row.revision.0,
        },
    };
    end(replica, record, key, call, answer);
    Some(found.map(|row| row.revision.0))
}

async fn put(
    replica: &Replica,
    store: &GroupStore,
    record: &Record,
    key: &str,
    revision: Option<u64>,
) {
    let value = 1 + record.values.fetch_add(1, Ordering::SeqCst) as u64;
    let condition = revision.map_or(Condition::Absent, Condition::Revision);
    let call = begin(replica, record, key, CheckpointOp::Put { condition, value });
    let expect = match revision {
        None => Expect::Absent,
        Some(revision) => Expect::Revision(botmesh::types::Revision(revision)),
    };
    let row = RowKey::new(Table::Checkpoint, key);
    let value = value.to_be_bytes().to_vec();
    let op = Op::Put { row, value, expect, ttl_ms: None };
    let answer = match store.commit(Authority::Nobody, vec![op]).await {
        Ok(revisions) => CheckpointAnswer::Written { revision: revisions[0].0 },
        Err(CommitError::Superseded { .. }) => CheckpointAnswer::Refused,
        // Not written for certain is one of the things that an open call may be.
        Err(_) => return,
    };
    end(replica, record, key, call, answer);
}
