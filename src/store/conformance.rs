//! What every store must do, as a suite that runs on any of them (SPEC F1).
//!
//! It knows the traits only, so it runs unchanged on a Raft group, on memory and on a user's own
//! store:
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! use std::sync::Arc;
//! use botmesh::coordinator::{Coordinator, CoordinatorOptions};
//! use botmesh::store::conformance::{Rig, suite};
//! use botmesh::store::MemoryStore;
//! suite(|| async {
//!     let store = MemoryStore::default();
//!     let coordinator = store.coordinator(CoordinatorOptions::default());
//!     coordinator.open().await.unwrap();
//!     Rig { stores: vec![Arc::new(store)], other: None, coordinator: Some(Arc::new(coordinator)) }
//! })
//! .await;
//! # })
//! ```
//!
//! A check is a function of its own; one that fails panics and says what it saw. Checks use keys of
//! their own, so they may share a store. What a store does not support ([`Store::supports`]) is not
//! asked of it; what needs a turn is skipped where the rig has no coordinator.

// A failed check is a panic: that is what a test is told by.
#![allow(clippy::unwrap_used)]

pub mod tasks;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use tasks::g4_an_occurrence_is_one_replicas_until_it_is_finished;

use super::{
    Authority, CommitError, Consistency, Expect, Feature, Op, RowKey, Store, StoreExt, Table,
};
use crate::coordinator::{Coordinator, JournaledTurn, Turn};
use crate::machine::{Admission, Admit, Outgoing};
use crate::types::{ChatKey, Fence, Revision, TicketId, VALUE_BYTES_MAX};

/// Longest a check waits for anything.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a suite runs on.
#[derive(Clone)]
pub struct Rig {
    /// The same data through one or more replicas.
    pub stores: Vec<Arc<dyn Store>>,
    /// A store of another prefix in the same group, where there are prefixes.
    pub other: Option<Arc<dyn Store>>,
    /// An open coordinator of the same group and prefix, where turns fence writes.
    pub coordinator: Option<Arc<dyn Coordinator>>,
}

impl Rig {
    fn store(&self) -> &dyn Store {
        &*self.stores[0]
    }

    fn last(&self) -> &dyn Store {
        &*self.stores[self.stores.len() - 1]
    }

    fn supports(&self, feature: Feature) -> bool {
        self.store().supports(feature)
    }
}

/// Runs every check, each on what `make` gives.
pub async fn suite<F, Fut>(make: F)
where
    F: Fn() -> Fut,
    Fut: Future<Output = Rig>,
{
    macro_rules! checks {
        ($($check:ident),* $(,)?) => {$(
            let rig = make().await;
            tracing::info!(check = stringify!($check), "store conformance");
            $check(&rig).await;
        )*};
    }
    checks!(
        f1_a_row_reads_back_until_it_is_deleted,
        f1_tables_and_prefixes_never_meet,
        c3_a_write_on_a_stale_revision_is_refused,
        k6_a_revision_is_never_used_twice,
        f5_a_commit_is_done_whole_or_not_at_all,
        f1_a_row_ends_with_its_ttl,
        f1_a_scan_pages_in_key_order,
        f4_every_replica_reads_what_was_acknowledged,
        f4_concurrent_updates_lose_nothing,
        m3_an_oversize_value_is_refused_whole,
        f2_a_lock_has_one_holder_and_growing_fences,
        f2_a_lock_ends_with_its_ttl,
        c10_only_the_exact_holder_writes,
        f4_reads_under_a_turn_see_its_writes,
        c3_a_refused_clear_leaves_the_newer_row,
        c9_acknowledgement_and_effect_are_one_commit,
        c9_after_its_last_attempt_a_message_is_a_dead_letter,
        g1_a_message_is_handled_once,
        g3_an_outbox_keeps_order_and_passes_over_known_ids,
        g4_an_occurrence_is_one_replicas_until_it_is_finished,
    );
}

fn fresh(what: &str) -> String {
    format!("{what}-{}", uuid::Uuid::new_v4().simple())
}

fn chat(what: &str) -> ChatKey {
    ChatKey::new("check", fresh(what))
}

fn put(row: &RowKey, value: &str, expect: Expect) -> Op {
    Op::Put { row: row.clone(), value: value.as_bytes().to_vec(), expect, ttl_ms: None }
}

async fn write(
    store: &dyn Store,
    row: &RowKey,
    value: &str,
    expect: Expect,
) -> Result<Revision, CommitError> {
    let revisions = store.commit(Authority::Nobody, vec![put(row, value, expect)]).await?;
    assert_eq!(revisions.len(), 1, "a commit answers one revision an operation");
    Ok(revisions[0])
}

async fn text(store: &dyn Store, row: &RowKey) -> Option<String> {
    let found = store.read(row, Consistency::Linearizable).await.unwrap();
    found.map(|found| String::from_utf8(found.value).unwrap())
}

async fn turn(coordinator: &dyn Coordinator, key: &ChatKey) -> Turn {
    let mut ticket = coordinator.take_ticket(key).await.unwrap();
    let until = coordinator.clock().now() + PATIENCE;
    coordinator.wait_turn(&mut ticket, until).await.unwrap()
}

async fn journaled(coordinator: &dyn Coordinator) -> JournaledTurn {
    let next = timeout(PATIENCE, coordinator.next_journaled()).await;
    next.expect("an admitted message gets its turn").expect("the coordinator is open")
}

fn message(key: &ChatKey, id: &str, body: &str) -> Admit {
    Admit {
        id: id.to_owned(),
        channel: key.channel.clone(),
        chat: key.to_string(),
        body: body.as_bytes().to_vec(),
    }
}

fn outgoing(id: &str, deliver: bool) -> Outgoing {
    Outgoing {
        id: id.to_owned(),
        in_reply_to: "m".to_owned(),
        body: b"{}".to_vec(),
        turn_seq: 0,
        deliver,
        keep: 10,
    }
}

/// A row reads back as written, with the revision the write answered; deleted, it is gone, and
/// deleting it again unconditionally succeeds.
pub async fn f1_a_row_reads_back_until_it_is_deleted(rig: &Rig) {
    let (store, row) = (rig.store(), RowKey::new(Table::Kv, fresh("row")));
    assert_eq!(text(store, &row).await, None, "a fresh key is absent");
    let revision = write(store, &row, "one", Expect::Any).await.unwrap();
    let found = store.read(&row, Consistency::Linearizable).await.unwrap().unwrap();
    assert_eq!((found.value.as_slice(), found.revision), (b"one".as_slice(), revision));
    let delete = || vec![Op::Delete { row: row.clone(), expect: Expect::Any }];
    store.commit(Authority::Nobody, delete()).await.unwrap();
    assert_eq!(text(store, &row).await, None, "a deleted row is absent");
    store.commit(Authority::Nobody, delete()).await.unwrap();
}

/// The same key in two tables, and under two prefixes, is two rows (SPEC A4).
pub async fn f1_tables_and_prefixes_never_meet(rig: &Rig) {
    let (store, key) = (rig.store(), fresh("row"));
    let tables = [Table::Checkpoint, Table::User, Table::Chat, Table::Kv];
    for table in tables {
        write(store, &RowKey::new(table, &key), &format!("{table:?}"), Expect::Absent)
            .await
            .unwrap();
    }
    for table in tables {
        let row = RowKey::new(table, &key);
        assert_eq!(text(store, &row).await, Some(format!("{table:?}")));
        if let Some(other) = &rig.other {
            assert_eq!(text(&**other, &row).await, None, "another prefix sees nothing of it");
        }
    }
}

/// A write or delete on a revision that is not the row's is refused, and says what is there.
pub async fn c3_a_write_on_a_stale_revision_is_refused(rig: &Rig) {
    let (store, row) = (rig.store(), RowKey::new(Table::Checkpoint, fresh("row")));
    let first = write(store, &row, "1", Expect::Absent).await.unwrap();
    let second = write(store, &row, "2", Expect::Revision(first)).await.unwrap();
    for expect in [Expect::Revision(first), Expect::Absent] {
        for op in [put(&row, "3", expect), Op::Delete { row: row.clone(), expect }] {
            match store.commit(Authority::Nobody, vec![op]).await {
                Err(CommitError::Superseded { op: 0, found }) => assert_eq!(found, Some(second)),
                other => panic!("{expect:?} on revision {second} was answered {other:?}"),
            }
        }
    }
    assert_eq!(text(store, &row).await.as_deref(), Some("2"));
    let absent = RowKey::new(Table::Checkpoint, fresh("row"));
    match write(store, &absent, "1", Expect::Revision(second)).await {
        Err(CommitError::Superseded { op: 0, found: None }) => {}
        other => panic!("a revision expected of an absent row was answered {other:?}"),
    }
}

/// Revisions of a key only grow, across a delete too.
pub async fn k6_a_revision_is_never_used_twice(rig: &Rig) {
    let (store, row) = (rig.store(), RowKey::new(Table::Kv, fresh("row")));
    let mut seen = Vec::new();
    for round in 0..5 {
        seen.push(write(store, &row, &round.to_string(), Expect::Absent).await.unwrap());
        seen.push(write(store, &row, "again", Expect::Any).await.unwrap());
        let delete = Op::Delete { row: row.clone(), expect: Expect::Any };
        store.commit(Authority::Nobody, vec![delete]).await.unwrap();
    }
    assert!(seen.is_sorted_by(|a, b| a < b), "revisions grow: {seen:?}");
}

/// One refused operation refuses the whole commit; the answer names it (SPEC F5).
pub async fn f5_a_commit_is_done_whole_or_not_at_all(rig: &Rig) {
    if !rig.supports(Feature::AtomicCommit) {
        return;
    }
    let store = rig.store();
    let rows: Vec<RowKey> = (0..3).map(|_| RowKey::new(Table::Kv, fresh("row"))).collect();
    let all = |expect| rows.iter().map(|row| put(row, "x", expect)).collect::<Vec<_>>();
    write(store, &rows[1], "there", Expect::Absent).await.unwrap();
    match store.commit(Authority::Nobody, all(Expect::Absent)).await {
        Err(CommitError::Superseded { op: 1, .. }) => {}
        other => panic!("the second operation's condition failed, the answer is {other:?}"),
    }
    assert_eq!(text(store, &rows[0]).await, None, "the operation before wrote nothing");
    assert_eq!(text(store, &rows[2]).await, None, "the operation after wrote nothing");
    let revisions = store.commit(Authority::Nobody, all(Expect::Any)).await.unwrap();
    assert_eq!(revisions.len(), 3);
    for row in &rows {
        assert_eq!(text(store, row).await.as_deref(), Some("x"));
    }
}

/// A row with a ttl is there before and gone after; writing it again without one keeps it.
pub async fn f1_a_row_ends_with_its_ttl(rig: &Rig) {
    let store = rig.store();
    let (short, long) =
        (RowKey::new(Table::Kv, fresh("row")), RowKey::new(Table::Kv, fresh("row")));
    let with = |row: &RowKey, ttl_ms| Op::Put {
        row: row.clone(),
        value: b"x".to_vec(),
        expect: Expect::Any,
        ttl_ms: Some(ttl_ms),
    };
    let ops = vec![with(&short, 50), with(&long, 3_600_000)];
    store.commit(Authority::Nobody, ops).await.unwrap();
    assert_eq!(text(store, &long).await.as_deref(), Some("x"));
    let gone = async {
        while text(store, &short).await.is_some() {
            sleep(Duration::from_millis(20)).await;
            // The group's time moves with what is asked of it.
            write(store, &RowKey::new(Table::Kv, fresh("tick")), "", Expect::Any).await.unwrap();
        }
    };
    timeout(PATIENCE, gone).await.expect("a row with a ttl of 50 ms ends");
    write(store, &short, "again", Expect::Absent).await.expect("an ended row counts as absent");
    assert_eq!(text(store, &long).await.as_deref(), Some("x"), "the other ttl has not passed");
}

/// A scan gives every row once, in key order, whatever the page size.
pub async fn f1_a_scan_pages_in_key_order(rig: &Rig) {
    let (store, base) = (rig.store(), fresh("scan"));
    let keys: Vec<String> = (0..25).map(|nth| format!("{base}-{nth:02}")).collect();
    for key in keys.iter().rev() {
        write(store, &RowKey::new(Table::Kv, key), "x", Expect::Any).await.unwrap();
    }
    for page in [1, 7, 100] {
        let (mut found, mut after) = (Vec::new(), base.clone());
        loop {
            let rows = store.scan(Table::Kv, Some(&after), page).await.unwrap();
            assert!(rows.len() <= page);
            let more = rows.len() == page;
            let mine = rows.into_iter().map(|(row, _)| row.key).filter(|k| k.starts_with(&base));
            let before = found.len();
            found.extend(mine);
            if !more || found.len() == before {
                break;
            }
            after.clone_from(&found[found.len() - 1]);
        }
        assert_eq!(found, keys, "pages of {page}");
    }
}

/// What one replica acknowledged, a linearizable read through any replica sees.
pub async fn f4_every_replica_reads_what_was_acknowledged(rig: &Rig) {
    let row = RowKey::new(Table::User, fresh("row"));
    for round in 0..10 {
        for (nth, writer) in rig.stores.iter().enumerate() {
            let value = format!("{round} by {nth}");
            write(&**writer, &row, &value, Expect::Any).await.unwrap();
            for reader in &rig.stores {
                assert_eq!(text(&**reader, &row).await.as_ref(), Some(&value));
            }
        }
    }
}

/// Counting through compare-and-set from all replicas at once loses no count.
pub async fn f4_concurrent_updates_lose_nothing(rig: &Rig) {
    if !rig.supports(Feature::CheckpointCas) {
        return;
    }
    let row = RowKey::new(Table::User, fresh("count"));
    let mut writers = tokio::task::JoinSet::new();
    for nth in 0..6 {
        let store = rig.stores[nth % rig.stores.len()].clone();
        let row = row.clone();
        writers.spawn(async move {
            for _ in 0..10 {
                let next = |old: Option<&[u8]>| {
                    let old: u64 =
                        old.map_or(0, |old| std::str::from_utf8(old).unwrap().parse().unwrap());
                    (old + 1).to_string().into_bytes()
                };
                store.update_row(&row, next).await.unwrap();
            }
        });
    }
    while let Some(done) = writers.join_next().await {
        done.unwrap();
    }
    assert_eq!(text(rig.last(), &row).await.as_deref(), Some("60"));
}

/// A value over the limit refuses the commit it is in, and names itself; one at the limit is taken.
pub async fn m3_an_oversize_value_is_refused_whole(rig: &Rig) {
    let store = rig.store();
    let (small, large) =
        (RowKey::new(Table::Kv, fresh("row")), RowKey::new(Table::Kv, fresh("row")));
    let with = |bytes| Op::Put {
        row: large.clone(),
        value: vec![b'x'; bytes],
        expect: Expect::Any,
        ttl_ms: None,
    };
    let ops = vec![put(&small, "x", Expect::Any), with(VALUE_BYTES_MAX + 1)];
    match store.commit(Authority::Nobody, ops).await {
        Err(CommitError::TooLarge { op: 1, .. }) => {}
        other => panic!("a value over the limit was answered {other:?}"),
    }
    assert_eq!(text(store, &small).await, None);
    store.commit(Authority::Nobody, vec![with(VALUE_BYTES_MAX)]).await.unwrap();
    assert_eq!(text(store, &large).await.map(|text| text.len()), Some(VALUE_BYTES_MAX));
}

/// A lock has one holder; every acquisition has a greater fence; a stale token renews and releases
/// nothing.
pub async fn f2_a_lock_has_one_holder_and_growing_fences(rig: &Rig) {
    if !rig.supports(Feature::Locks) {
        return;
    }
    let (store, key) = (rig.store(), fresh("lock"));
    let first = store.acquire_lock_fenced(&key, 60_000).await.unwrap().expect("it is free");
    let held = rig.last().acquire_lock_fenced(&key, 60_000).await.unwrap();
    assert_eq!(held, None, "a held lock is given to nobody else");
    assert!(store.renew_lock(&key, first.token, 60_000).await.unwrap());
    assert!(store.release_lock(&key, first.token).await.unwrap());
    let second = rig.last().acquire_lock_fenced(&key, 60_000).await.unwrap().expect("it is free");
    assert!(second.fence > first.fence, "{second:?} after {first:?}");
    assert!(!store.renew_lock(&key, first.token, 60_000).await.unwrap(), "a stale token");
    assert!(!store.release_lock(&key, first.token).await.unwrap(), "a stale token");
    assert_eq!(store.acquire_lock_fenced(&key, 60_000).await.unwrap(), None, "still the second's");
    assert!(store.release_lock(&key, second.token).await.unwrap());
}

/// A lock that is not renewed is free after its ttl; its token is stale then.
pub async fn f2_a_lock_ends_with_its_ttl(rig: &Rig) {
    if !rig.supports(Feature::Locks) {
        return;
    }
    let (store, key) = (rig.store(), fresh("lock"));
    let first = store.acquire_lock_fenced(&key, 100).await.unwrap().expect("it is free");
    let next = async {
        loop {
            match store.acquire_lock_fenced(&key, 60_000).await.unwrap() {
                Some(lock) => return lock,
                None => sleep(Duration::from_millis(20)).await,
            }
        }
    };
    let second = timeout(PATIENCE, next).await.expect("a lock with a ttl of 100 ms ends");
    assert!(second.fence > first.fence);
    assert!(!store.renew_lock(&key, first.token, 60_000).await.unwrap());
    assert!(store.release_lock(&key, second.token).await.unwrap());
}

/// A write in a turn's name is taken while exactly that grant holds, and by nobody else, also not
/// after its release (SPEC C10).
pub async fn c10_only_the_exact_holder_writes(rig: &Rig) {
    let Some(coordinator) = rig.coordinator.as_deref() else { return };
    let (store, key) = (rig.store(), chat("holder"));
    let row = RowKey::new(Table::Checkpoint, key.to_string());
    let first = turn(coordinator, &key).await;
    let ops = |value| vec![put(&row, value, Expect::Any)];
    store.commit(Authority::Turn(&first), ops("1")).await.unwrap();
    let (text_of, fence) = (key.to_string(), first.fence());
    let by = |fence| Authority::Fence { chat: &text_of, fence };
    store.commit(by(fence), ops("2")).await.unwrap();
    for wrong in [Fence(fence.0 - 1), Fence(fence.0 + 1)] {
        let refused = store.commit(by(wrong), ops("no")).await;
        assert!(matches!(refused, Err(CommitError::Fenced { .. })), "{wrong:?}: {refused:?}");
    }
    first.release().await.unwrap();
    let refused = store.commit(by(fence), ops("no")).await;
    assert!(matches!(refused, Err(CommitError::Fenced { .. })), "after its release: {refused:?}");
    let second = turn(coordinator, &key).await;
    assert!(second.fence() > fence);
    let refused = store.commit(by(fence), ops("no")).await;
    assert!(matches!(refused, Err(CommitError::Fenced { .. })), "under a newer turn: {refused:?}");
    store.commit(Authority::Turn(&second), ops("3")).await.unwrap();
    let release = vec![put(&row, "4", Expect::Any), Op::Release(second.ticket())];
    store.commit(Authority::Turn(&second), release).await.unwrap();
    assert!(second.check().is_err(), "the commit released the turn");
    let refused = store.commit(Authority::Turn(&second), ops("no")).await;
    assert!(matches!(refused, Err(CommitError::Fenced { .. })), "after the commit: {refused:?}");
    assert_eq!(text(store, &row).await.as_deref(), Some("4"));
}

/// Under a turn, the next holder reads what the one before wrote, without asking the group
/// (SPEC F4).
pub async fn f4_reads_under_a_turn_see_its_writes(rig: &Rig) {
    let Some(coordinator) = rig.coordinator.as_deref() else { return };
    let (store, key) = (rig.store(), chat("under"));
    let mut revision = None;
    for round in 0..10 {
        let turn = turn(coordinator, &key).await;
        let found = store.checkpoint(&turn).await.unwrap();
        assert_eq!(found.map(|row| row.revision), revision, "round {round}");
        let value = round.to_string().into_bytes();
        revision = Some(store.set_checkpoint_if(&turn, revision, value, None).await.unwrap());
        let found = store.checkpoint(&turn).await.unwrap().unwrap();
        assert_eq!(Some(found.revision), revision, "its own write");
    }
}

/// A checkpoint cleared on an old revision stays.
pub async fn c3_a_refused_clear_leaves_the_newer_row(rig: &Rig) {
    let Some(coordinator) = rig.coordinator.as_deref() else { return };
    if !rig.supports(Feature::CheckpointCas) {
        return;
    }
    let (store, key) = (rig.store(), chat("clear"));
    let turn = turn(coordinator, &key).await;
    let old = store.set_checkpoint_if(&turn, None, b"1".to_vec(), None).await.unwrap();
    let new = store.set_checkpoint_if(&turn, Some(old), b"2".to_vec(), None).await.unwrap();
    let refused = store.clear_checkpoint_if(&turn, old).await;
    assert!(matches!(refused, Err(CommitError::Superseded { .. })), "{refused:?}");
    let found = store.checkpoint_of(&key).await.unwrap().expect("the newer row stays");
    assert_eq!(found.revision, new);
    store.clear_checkpoint_if(&turn, new).await.unwrap();
    assert_eq!(store.checkpoint_of(&key).await.unwrap(), None);
}

async fn admit_one(rig: &Rig, key: &ChatKey, id: &str, body: &str) -> Option<TicketId> {
    let coordinator = rig.coordinator.as_deref().unwrap();
    let admitted = coordinator.admit(vec![message(key, id, body)]).await.unwrap();
    match admitted.as_slice() {
        [Admission::Fresh { ticket, .. }] => Some(*ticket),
        [Admission::Duplicate { .. }] => None,
        other => panic!("an admission was answered {other:?}"),
    }
}

fn journals(rig: &Rig) -> Option<&dyn Coordinator> {
    let coordinator = rig.coordinator.as_deref()?;
    (rig.supports(Feature::Durability) && coordinator.journals()).then_some(coordinator)
}

/// A message's record goes with the commit that holds its effect; a commit that is refused leaves
/// it.
pub async fn c9_acknowledgement_and_effect_are_one_commit(rig: &Rig) {
    let Some(coordinator) = journals(rig) else { return };
    let (store, key) = (rig.store(), chat("ack"));
    let ticket = admit_one(rig, &key, &fresh("m"), "hello").await.expect("it is new");
    let JournaledTurn { turn, record } = journaled(coordinator).await;
    assert_eq!((turn.ticket(), turn.key()), (ticket, &key));
    assert_eq!((record.body.as_slice(), record.attempts), (b"hello".as_slice(), 0));
    let row = RowKey::new(Table::Checkpoint, key.to_string());
    let effect =
        |expect| vec![put(&row, "done", expect), Op::Acknowledge(ticket), Op::Release(ticket)];
    let refused = store.commit(Authority::Turn(&turn), effect(Expect::Revision(Revision(1)))).await;
    assert!(matches!(refused, Err(CommitError::Superseded { .. })), "{refused:?}");
    assert!(store.journal(ticket).await.unwrap().is_some(), "nothing of it was done");
    store.commit(Authority::Turn(&turn), effect(Expect::Absent)).await.unwrap();
    assert_eq!(store.journal(ticket).await.unwrap(), None);
    assert_eq!(text(store, &row).await.as_deref(), Some("done"));
}

/// A message given back unacknowledged comes again, a bounded number of times; then it is listed,
/// the chat goes on, and it can be put back.
pub async fn c9_after_its_last_attempt_a_message_is_a_dead_letter(rig: &Rig) {
    let Some(coordinator) = journals(rig) else { return };
    let (store, key) = (rig.store(), chat("dead"));
    let ticket = admit_one(rig, &key, &fresh("m"), "poison").await.expect("it is new");
    let next = admit_one(rig, &key, &fresh("m"), "after").await.expect("it is new");
    let mut attempts = 0;
    let after = loop {
        let JournaledTurn { turn, record } = journaled(coordinator).await;
        if turn.ticket() != ticket {
            break turn;
        }
        assert_eq!(record.attempts, attempts, "each return counts one");
        attempts += 1;
        assert!(attempts < 100, "a message is not given out for ever");
        drop(turn);
    };
    assert_eq!(after.ticket(), next, "the chat goes on");
    let letters = store.dead_letters().await.unwrap();
    let letter = letters.iter().find(|letter| letter.ticket == ticket).expect("it is listed");
    assert_eq!(letter.record.body, b"poison");
    assert!(store.settle_dead_letter(ticket, true).await.unwrap());
    assert!(!store.settle_dead_letter(ticket, true).await.unwrap(), "it is there no more");
    let done = vec![Op::Acknowledge(next), Op::Release(next)];
    store.commit(Authority::Turn(&after), done).await.unwrap();
    let JournaledTurn { turn, record } = journaled(coordinator).await;
    assert_eq!((record.body.as_slice(), record.attempts), (b"poison".as_slice(), 0));
    let done = vec![Op::Acknowledge(turn.ticket()), Op::Release(turn.ticket())];
    store.commit(Authority::Turn(&turn), done).await.unwrap();
}

/// A message id that was seen is a duplicate, with or without the same body; also after it was
/// handled.
pub async fn g1_a_message_is_handled_once(rig: &Rig) {
    let Some(coordinator) = journals(rig) else { return };
    let (key, id) = (chat("once"), fresh("m"));
    assert!(admit_one(rig, &key, &id, "hello").await.is_some());
    let again = vec![message(&key, &id, "hello"), message(&key, &id, "other")];
    let answers = coordinator.admit(again).await.unwrap();
    let expected = [true, false].map(|same_body| Admission::Duplicate { same_body });
    assert_eq!(answers, expected);
    let JournaledTurn { turn, .. } = journaled(coordinator).await;
    let done = vec![Op::Acknowledge(turn.ticket()), Op::Release(turn.ticket())];
    rig.store().commit(Authority::Turn(&turn), done).await.unwrap();
    assert!(admit_one(rig, &key, &id, "hello").await.is_none(), "handled is not forgotten");
}

/// An outbox lists what was sent in order, once an id; whoever waits for more is woken; only its
/// owner marks it sent.
pub async fn g3_an_outbox_keeps_order_and_passes_over_known_ids(rig: &Rig) {
    let Some(coordinator) = rig.coordinator.as_deref() else { return };
    if !rig.supports(Feature::Durability) {
        return;
    }
    let (store, key) = (rig.store(), chat("outbox"));
    let (turn, name) = (turn(coordinator, &key).await, key.to_string());
    let send = |id: &str, deliver| Op::Send { chat: name.clone(), send: outgoing(id, deliver) };
    let waiting = rig.stores[0].clone();
    let (chat, beyond) = (name.clone(), store.outbox(&name, 0, 10).await.unwrap().len() as u64);
    let woken = tokio::spawn(async move { waiting.outbox_beyond(&chat, beyond + 2).await });
    let first = vec![send("a", true), send("b", true)];
    store.commit(Authority::Turn(&turn), first).await.unwrap();
    let second = vec![send("b", true), send("c", false), send("a", true)];
    store.commit(Authority::Turn(&turn), second).await.unwrap();
    timeout(PATIENCE, woken).await.expect("the third entry wakes").unwrap().unwrap();
    let entries = store.outbox(&name, 0, 10).await.unwrap();
    let ids: Vec<&str> = entries.iter().map(|entry| entry.id.as_str()).collect();
    assert_eq!(ids, ["a", "b", "c"]);
    assert!(entries.is_sorted_by(|a, b| a.number + 1 == b.number), "numbers have no gap");
    assert!(entries.iter().all(|entry| entry.fence == turn.fence().0));
    let after = store.outbox(&name, entries[0].number, 1).await.unwrap();
    assert_eq!(after, entries[1..2], "after a number, at most so many");
    let me = turn.incarnation();
    let stranger = crate::types::Incarnation(u64::MAX);
    assert!(!store.mark_sent(&name, entries[2].number, stranger, Duration::ZERO).await.unwrap());
    assert!(store.mark_sent(&name, entries[0].number, me, Duration::ZERO).await.unwrap());
    let unsent = store.outbox(&name, 0, 10).await.unwrap();
    let unsent: Vec<bool> = unsent.iter().map(|entry| entry.unsent).collect();
    assert_eq!(unsent, [false, true, false]);
    assert!(store.mark_sent(&name, entries[2].number, me, Duration::ZERO).await.unwrap());
    assert!(store.outbox(&name, 0, 10).await.unwrap().iter().all(|entry| !entry.unsent));
}
