//! A store of the user's own that cannot compare and set (SPEC C4).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use botmesh::bot::{Bot, Convo, Coordination, Flow, FlowId, Result};
use botmesh::clock::{BootInstant, ManualClock};
use botmesh::coordinator::CoordinatorOptions;
use botmesh::steps;
use botmesh::store::{
    Authority, Claim, CommitError, Consistency, DeadLetter, Expect, Feature, FencedLock,
    JournalRecord, Op, OutboxEntry, RekeyError, Row, RowKey, Store, StoreError, Table, Taken, Task,
};
use botmesh::testing::{MemoryCoordinator, MemoryHub, ScriptedProvider};
use botmesh::types::{ChatKey, Incarnation, Prefix, ReplicaId, Revision, TicketId};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::support::{PAST_LEASE, until};

/// Rows that are overwritten whoever asks: the other side knows no revisions and no fences.
#[derive(Clone)]
struct Plain {
    rows: Arc<dyn Store>,
    commits: Arc<Mutex<Vec<String>>>,
}

#[async_trait]
impl Store for Plain {
    fn prefix(&self) -> &Prefix {
        self.rows.prefix()
    }
    fn is_shared(&self) -> bool {
        true
    }
    fn supports(&self, _feature: Feature) -> bool {
        false
    }
    async fn read(
        &self,
        key: &RowKey,
        how: Consistency<'_>,
    ) -> std::result::Result<Option<Row>, StoreError> {
        self.rows.read(key, how).await
    }
    async fn scan(
        &self,
        table: Table,
        after: Option<&str>,
        limit: usize,
    ) -> std::result::Result<Vec<(RowKey, Row)>, StoreError> {
        self.rows.scan(table, after, limit).await
    }
    async fn commit(
        &self,
        by: Authority<'_>,
        mut ops: Vec<Op>,
    ) -> std::result::Result<Vec<Revision>, CommitError> {
        self.commits.lock().push(format!("{by:?}"));
        for op in &mut ops {
            if let Op::Put { expect, .. } | Op::Delete { expect, .. } = op {
                *expect = Expect::Any;
            }
        }
        self.rows.commit(Authority::Nobody, ops).await
    }
    async fn acquire_lock_fenced(
        &self,
        key: &str,
        ttl_ms: u64,
    ) -> std::result::Result<Option<FencedLock>, CommitError> {
        self.rows.acquire_lock_fenced(key, ttl_ms).await
    }
    async fn renew_lock(
        &self,
        key: &str,
        token: Incarnation,
        ttl_ms: u64,
    ) -> std::result::Result<bool, CommitError> {
        self.rows.renew_lock(key, token, ttl_ms).await
    }
    async fn release_lock(
        &self,
        key: &str,
        token: Incarnation,
    ) -> std::result::Result<bool, CommitError> {
        self.rows.release_lock(key, token).await
    }
    async fn journal(
        &self,
        ticket: TicketId,
    ) -> std::result::Result<Option<JournalRecord>, StoreError> {
        self.rows.journal(ticket).await
    }
    async fn outbox(
        &self,
        chat: &str,
        after: u64,
        limit: usize,
    ) -> std::result::Result<Vec<OutboxEntry>, StoreError> {
        self.rows.outbox(chat, after, limit).await
    }
    async fn outbox_owner(
        &self,
        chat: &str,
    ) -> std::result::Result<Option<Incarnation>, StoreError> {
        self.rows.outbox_owner(chat).await
    }
    async fn outbox_beyond(&self, chat: &str, after: u64) -> std::result::Result<(), StoreError> {
        self.rows.outbox_beyond(chat, after).await
    }
    async fn mark_sent(
        &self,
        chat: &str,
        up_to: u64,
        sender: Incarnation,
        within: Duration,
    ) -> std::result::Result<bool, CommitError> {
        self.rows.mark_sent(chat, up_to, sender, within).await
    }
    async fn rekey(
        &self,
        from: &ChatKey,
        to: &ChatKey,
        taken: Taken,
    ) -> std::result::Result<(), RekeyError> {
        self.rows.rekey(from, to, taken).await
    }
    async fn dead_letters(&self) -> std::result::Result<Vec<DeadLetter>, StoreError> {
        self.rows.dead_letters().await
    }
    async fn settle_dead_letter(
        &self,
        ticket: TicketId,
        retry: bool,
    ) -> std::result::Result<bool, CommitError> {
        self.rows.settle_dead_letter(ticket, retry).await
    }
    fn now_ms(&self) -> u64 {
        self.rows.now_ms()
    }
    async fn ensure_task(
        &self,
        id: &str,
        due_ms: u64,
        body: Vec<u8>,
    ) -> std::result::Result<bool, CommitError> {
        self.rows.ensure_task(id, due_ms, body).await
    }
    async fn task(&self, id: &str) -> std::result::Result<Option<Task>, StoreError> {
        self.rows.task(id).await
    }
    async fn task_changed(
        &self,
        id: &str,
        seen: Option<&Task>,
    ) -> std::result::Result<(), StoreError> {
        self.rows.task_changed(id, seen).await
    }
    async fn claim_task(
        &self,
        id: &str,
        due_ms: u64,
        session: Incarnation,
    ) -> std::result::Result<Option<Claim>, CommitError> {
        self.rows.claim_task(id, due_ms, session).await
    }
    async fn finish_task(
        &self,
        id: &str,
        due_ms: u64,
        session: Incarnation,
        next_ms: Option<u64>,
    ) -> std::result::Result<bool, CommitError> {
        self.rows.finish_task(id, due_ms, session, next_ms).await
    }
    async fn return_task(
        &self,
        id: &str,
        due_ms: u64,
        session: Incarnation,
    ) -> std::result::Result<bool, CommitError> {
        self.rows.return_task(id, due_ms, session).await
    }
    fn deadline(&self) -> BootInstant {
        self.rows.deadline()
    }
}

/// What was logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

steps! { enum At { Ask, Work } }
const WORK: FlowId<String> = FlowId::new("work");

#[tokio::test]
async fn c4_a_store_that_cannot_compare_and_set_is_warned_of_and_fenced_locally() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let _listening = tracing::subscriber::set_default(subscriber);

    let clock = ManualClock::new();
    let hub = MemoryHub::with_clock(clock.clone());
    let provider = ScriptedProvider::new("x");
    let (gate, entered) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicU32::new(0)));
    let late: Arc<Mutex<Vec<bool>>> = Arc::default();
    let mut replicas = Vec::new();
    for name in ["a", "b"] {
        let prefix = MemoryHub::default_prefix();
        let rows: Arc<dyn Store> = Arc::new(hub.store(prefix.clone()));
        let plain = Plain { rows, commits: Arc::default() };
        let options = CoordinatorOptions {
            replica_id: Some(ReplicaId(name.to_owned())),
            ..CoordinatorOptions::default()
        };
        let coordinator = MemoryCoordinator::with(&hub, prefix, options);
        let (gate, entered, late) = (gate.clone(), entered.clone(), late.clone());
        let work = async move |at: At, c: &mut Convo<String>| match at {
            At::Ask => {
                c.state = c.ask("What?").await?;
                c.next()
            }
            At::Work => {
                if entered.fetch_add(1, Ordering::SeqCst) == 0 {
                    gate.acquire().await?.forget();
                    let said = c.say("late").await;
                    late.lock().push(said.is_ok());
                    said?;
                }
                let more = c.ask(format!("{}, and?", c.state)).await?;
                c.say(format!("{} and {more}", c.state)).await?;
                c.end()
            }
        };
        let side = provider.replica();
        let bot = Bot::builder()
            .flow(Flow::new(WORK, work).persistent())
            .on("work", async |ctx| -> Result { Ok(ctx.enter(WORK, String::new()).await?) })
            .provider(side.clone())
            .store(plain.clone())
            .coordination(Coordination::new(coordinator.clone()))
            .build()
            .await
            .unwrap();
        bot.start().await.unwrap();
        replicas.push((bot, side, coordinator, plain));
    }
    let said = String::from_utf8(log.0.lock().clone()).unwrap();
    assert_eq!(said.matches("fenced locally only").count(), 2, "each replica warns: {said}");

    // Phase 1: it works; the store is told of no turn and checks nothing.
    let (a, b) = (&replicas[0], &replicas[1]);
    let ann = a.1.user("ann");
    ann.says("work").await.hears("What?").await.says("tea").await;
    until("the step is at work", || entered.load(Ordering::SeqCst) == 1).await;
    let commits = a.3.commits.lock().clone();
    assert!(!commits.is_empty() && commits.iter().all(|by| by == "Nobody"), "{commits:?}");

    // Phase 2: its replica loses the lease in the middle of the step; another one goes on.
    a.2.crash();
    for _ in 0..PAST_LEASE.as_millis() / 500 {
        clock.advance(Duration::from_millis(500));
        for _ in 0..16 {
            tokio::task::yield_now().await;
        }
    }
    let ann = b.1.user("ann");
    ann.says("go on").await.hears("tea, and?").await;

    // Phase 3: what the first one does now is stopped by its own fence: nothing reaches the store.
    let before = a.3.commits.lock().len();
    gate.add_permits(1);
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
    assert!(late.lock().iter().all(|said| !said), "a lost turn says nothing");
    assert_eq!(a.3.commits.lock().len(), before, "a lost turn writes nothing");
    ann.says("milk").await.hears("tea and milk").await;
}
