//! What every coordinator must do, as a suite that runs on any of them.
//!
//! It knows the trait only, so it runs unchanged on a Raft group and on memory:
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! use std::sync::Arc;
//! use botmesh::coordinator::conformance::{Rig, suite};
//! use botmesh::coordinator::{Coordinator, MemoryCoordinator};
//! use botmesh::group::MemoryHub;
//! suite(|| async {
//!     let hub = MemoryHub::new();
//!     let mut replicas: Vec<Arc<dyn Coordinator>> = Vec::new();
//!     for name in ["a", "b", "c"] {
//!         let replica = MemoryCoordinator::new(&hub, name);
//!         replica.open().await.unwrap();
//!         replicas.push(Arc::new(replica));
//!     }
//!     Rig { replicas, store: None, die: None }
//! })
//! .await;
//! # })
//! ```
//!
//! Each check gets replicas of its own from `make` (it may close or kill them), in a prefix no
//! other check uses, or with nothing left in it.

// A failed check is a panic: that is what a test is told by.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::timeout;

use super::{CoordinationError, Coordinator, JournaledTurn, LostReason, Ticket, Turn};
use crate::machine::{Admission, Admit};
use crate::store::{Authority, Op, Store};
use crate::types::{ChatKey, TicketId};

/// Longest a check waits for anything, leases included.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a suite runs on.
pub struct Rig {
    /// At least two open coordinators of one prefix.
    pub replicas: Vec<Arc<dyn Coordinator>>,
    /// The store of the same group and prefix: without it no message can be acknowledged.
    pub store: Option<Arc<dyn Store>>,
    /// Kills a replica by its place, releasing nothing, and lets its lease run out.
    pub die: Option<Arc<dyn Fn(usize) + Send + Sync>>,
}

impl Rig {
    fn replica(&self, nth: usize) -> &dyn Coordinator {
        &*self.replicas[nth % self.replicas.len()]
    }

    /// The store, where messages can be journaled.
    fn journal(&self) -> Option<&dyn Store> {
        self.store.as_deref().filter(|_| self.replica(0).journals())
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
            assert!(rig.replicas.len() > 1, "one replica has nobody to coordinate with");
            tracing::info!(check = stringify!($check), "coordinator conformance");
            let replicas = rig.replicas.clone();
            $check(rig).await;
            for replica in replicas {
                replica.close().await.unwrap();
            }
        )*};
    }
    checks!(
        a3_every_replica_is_an_incarnation_of_its_own,
        b1_turns_go_in_the_order_of_tickets,
        b1_a_chat_has_one_holder_at_a_time,
        b1_chats_do_not_wait_for_each_other,
        b4_a_withdrawn_ticket_is_passed_over,
        b4_waiting_in_vain_names_the_holder,
        c2_a_grant_names_the_holder_before,
        f3_a_lead_has_one_holder,
        f3_a_campaign_gets_the_lead_when_it_is_free,
        h1_a_revoked_turn_no_longer_acts,
        b9_admitted_messages_come_out_once_and_in_order,
        a7_closing_passes_everything_on_at_once,
        e2_what_a_dead_replica_held_passes_on,
    );
}

fn chat(what: &str) -> ChatKey {
    ChatKey::new("check", format!("{what}-{}", uuid::Uuid::new_v4().simple()))
}

async fn wait(replica: &dyn Coordinator, ticket: &mut Ticket) -> Turn {
    let until = replica.clock().now() + PATIENCE;
    let turn = timeout(PATIENCE, replica.wait_turn(ticket, until)).await;
    turn.expect("the turn comes").unwrap()
}

async fn turn(replica: &dyn Coordinator, key: &ChatKey) -> Turn {
    let mut ticket = replica.take_ticket(key).await.unwrap();
    wait(replica, &mut ticket).await
}

/// Incarnations differ, and are there while the session is.
pub async fn a3_every_replica_is_an_incarnation_of_its_own(rig: Rig) {
    let mut seen: Vec<_> = rig.replicas.iter().map(|one| one.incarnation().unwrap()).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), rig.replicas.len());
    let first = rig.replica(0);
    let before = first.incarnation();
    first.close().await.unwrap();
    assert_eq!(first.incarnation(), None);
    assert!(matches!(first.take_ticket(&chat("x")).await, Err(CoordinationError::Closed)));
    first.open().await.unwrap();
    assert!(first.incarnation() > before, "it came back as a new incarnation");
}

/// Tickets taken one after the other through different replicas are granted in that order, and
/// fences grow.
pub async fn b1_turns_go_in_the_order_of_tickets(rig: Rig) {
    let key = chat("order");
    let mut tickets = Vec::new();
    for nth in 0..30 {
        let replica = nth % rig.replicas.len();
        tickets.push((replica, rig.replica(replica).take_ticket(&key).await.unwrap()));
    }
    assert!(tickets.is_sorted_by(|(_, a), (_, b)| a.id() < b.id()), "numbers grow in the queue");
    let granted = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let mut waiters = tokio::task::JoinSet::new();
    // The last ticket waits first: the order is the queue's, not that of waiting.
    for (replica, mut ticket) in tickets.into_iter().rev() {
        let (replica, granted) = (rig.replicas[replica].clone(), granted.clone());
        waiters.spawn(async move {
            let turn = wait(&*replica, &mut ticket).await;
            granted.lock().push((turn.ticket(), turn.fence()));
            turn.release().await.unwrap();
        });
    }
    while let Some(done) = waiters.join_next().await {
        done.unwrap();
    }
    let granted = granted.lock().clone();
    assert_eq!(granted.len(), 30);
    assert!(granted.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1), "{granted:?}");
}

/// Whatever the interleaving, turns of one chat never overlap.
pub async fn b1_a_chat_has_one_holder_at_a_time(rig: Rig) {
    let (key, inside, fence) =
        (chat("one"), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut workers = tokio::task::JoinSet::new();
    for nth in 0..12 {
        let replica = rig.replicas[nth % rig.replicas.len()].clone();
        let (key, inside, fence) = (key.clone(), inside.clone(), fence.clone());
        workers.spawn(async move {
            for round in 0..10 {
                let turn = turn(&*replica, &key).await;
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two hold {key}");
                let before = fence.swap(turn.fence().0, Ordering::SeqCst);
                assert!(before < turn.fence().0, "fences grow");
                tokio::task::yield_now().await;
                turn.check().unwrap();
                inside.fetch_sub(1, Ordering::SeqCst);
                // Both ways of giving back.
                if round % 2 == 0 { turn.release().await.unwrap() } else { drop(turn) }
            }
        });
    }
    while let Some(done) = workers.join_next().await {
        done.unwrap();
    }
}

/// A held chat keeps no other waiting.
pub async fn b1_chats_do_not_wait_for_each_other(rig: Rig) {
    let held = turn(rig.replica(0), &chat("held")).await;
    let other = turn(rig.replica(1), &chat("other")).await;
    held.check().unwrap();
    other.check().unwrap();
}

/// A ticket dropped before its turn does not hold up the one behind; dropped with its grant on the
/// way, it releases.
pub async fn b4_a_withdrawn_ticket_is_passed_over(rig: Rig) {
    let key = chat("withdrawn");
    let first = turn(rig.replica(0), &key).await;
    let second = rig.replica(1).take_ticket(&key).await.unwrap();
    let mut third = rig.replica(0).take_ticket(&key).await.unwrap();
    drop(second);
    drop(first);
    let third = wait(rig.replica(0), &mut third).await;
    drop(third);
    // Granted at once, and never waited for.
    drop(rig.replica(1).take_ticket(&key).await.unwrap());
    let _last = turn(rig.replica(0), &key).await;
}

/// A wait that ends says whose turn it is, under which fence, and for how long it waited; the
/// ticket keeps its place.
pub async fn b4_waiting_in_vain_names_the_holder(rig: Rig) {
    let key = chat("vain");
    let held = turn(rig.replica(0), &key).await;
    let replica = rig.replica(1);
    let mut ticket = replica.take_ticket(&key).await.unwrap();
    let now = replica.clock().now();
    match replica.wait_turn(&mut ticket, now).await {
        Err(fault @ CoordinationError::Unavailable { .. }) => {
            let said = fault.to_string();
            let CoordinationError::Unavailable { key: named, holder, fence, .. } = fault else {
                unreachable!("matched above")
            };
            assert_eq!(named, key.to_string());
            assert_eq!((holder, fence), (Some(held.incarnation()), Some(held.fence())));
            assert!(said.contains(&key.to_string()), "{said}");
        }
        other => panic!("a wait that ended was answered {other:?}"),
    }
    held.release().await.unwrap();
    wait(replica, &mut ticket).await.release().await.unwrap();
}

/// A grant says who held the chat before, and nobody for a chat that is new.
pub async fn c2_a_grant_names_the_holder_before(rig: Rig) {
    let key = chat("before");
    let mut before = None;
    for nth in [0, 0, 1, 0] {
        let turn = turn(rig.replica(nth), &key).await;
        assert_eq!(turn.previous_holder(), before);
        before = Some(turn.incarnation());
        turn.release().await.unwrap();
    }
}

/// One replica gets the lead, the others get nothing, until it is released.
pub async fn f3_a_lead_has_one_holder(rig: Rig) {
    let name = chat("job").to_string();
    let first = rig.replica(0).try_lead(&name).await.unwrap().expect("it is free");
    for replica in &rig.replicas {
        assert!(replica.try_lead(&name).await.unwrap().is_none(), "it is held");
    }
    let fence = first.fence();
    first.release().await.unwrap();
    let second = rig.replica(1).try_lead(&name).await.unwrap().expect("it is free again");
    assert!(second.fence() > fence);
    // A chat of the same name is another thing.
    let _turn = turn(rig.replica(0), &name.parse().unwrap()).await;
}

/// A campaign waits for its lead; one that is given up leaves no place behind.
pub async fn f3_a_campaign_gets_the_lead_when_it_is_free(rig: Rig) {
    let name = chat("job").to_string();
    let first = rig.replica(0).try_lead(&name).await.unwrap().expect("it is free");
    let (replica, named) = (rig.replicas[1].clone(), name.clone());
    let given_up = tokio::spawn(async move { replica.campaign(&named).await.map(|_| ()) });
    tokio::task::yield_now().await;
    let (replica, named) = (rig.replicas[0].clone(), name.clone());
    let campaign = tokio::spawn(async move { replica.campaign(&named).await });
    tokio::task::yield_now().await;
    assert!(!campaign.is_finished());
    given_up.abort();
    // Its end drops the place it may have had.
    let _ = given_up.await;
    let lost = first.lost();
    first.release().await.unwrap();
    assert_eq!(timeout(PATIENCE, lost).await.unwrap(), LostReason::SteppedDown);
    let lead = timeout(PATIENCE, campaign).await.expect("the lead comes").unwrap().unwrap();
    lead.check().unwrap();
}

/// A turn that was revoked is lost for whoever asks and whoever waits; the session goes on.
pub async fn h1_a_revoked_turn_no_longer_acts(rig: Rig) {
    let key = chat("revoked");
    let first = turn(rig.replica(0), &key).await;
    let lost = first.lost();
    first.revoke(LostReason::Settled);
    first.revoke(LostReason::Superseded);
    assert_eq!(first.check(), Err(LostReason::Settled), "the first reason stays");
    assert_eq!(timeout(PATIENCE, lost).await.unwrap(), LostReason::Settled);
    drop(first);
    turn(rig.replica(0), &key).await.check().unwrap();
}

fn messages(key: &ChatKey, ids: std::ops::Range<u32>) -> Vec<Admit> {
    ids.map(|id| Admit {
        id: format!("{key}/{id}"),
        channel: key.channel.clone(),
        chat: key.to_string(),
        body: id.to_string().into_bytes(),
    })
    .collect()
}

fn tickets(admissions: &[Admission]) -> Vec<TicketId> {
    let fresh = |admission: &Admission| match admission {
        Admission::Fresh { ticket, .. } => Some(*ticket),
        _ => None,
    };
    admissions.iter().filter_map(fresh).collect()
}

async fn journaled(replica: &dyn Coordinator) -> JournaledTurn {
    let next = timeout(PATIENCE, replica.next_journaled()).await;
    next.expect("an admitted message gets its turn").expect("the replica is open")
}

async fn done(store: &dyn Store, turn: &Turn) {
    let ops = vec![Op::Acknowledge(turn.ticket()), Op::Release(turn.ticket())];
    store.commit(Authority::Turn(turn), ops).await.unwrap();
}

/// Every message comes out once, its chat's in order, at the replica that admitted it; a duplicate
/// does not.
pub async fn b9_admitted_messages_come_out_once_and_in_order(rig: Rig) {
    let Some(store) = rig.journal() else { return };
    let keys: Vec<ChatKey> = (0..3).map(|_| chat("admitted")).collect();
    let replica = rig.replica(0);
    let mut expected = Vec::new();
    for key in &keys {
        expected.push(tickets(&replica.admit(messages(key, 0..10)).await.unwrap()));
    }
    let again = rig.replica(1).admit(messages(&keys[0], 0..10)).await.unwrap();
    assert!(again.iter().all(|one| matches!(one, Admission::Duplicate { same_body: true })));
    let mut seen = vec![Vec::new(); keys.len()];
    for _ in 0..30 {
        let JournaledTurn { turn, record } = journaled(replica).await;
        assert_eq!(record.chat, turn.key().to_string());
        let nth = keys.iter().position(|key| key == turn.key()).expect("one of the chats");
        seen[nth].push(turn.ticket());
        done(store, &turn).await;
    }
    assert_eq!(seen, expected);
}

/// A replica that closes hands on what it held and what waited, without waiting for its lease.
pub async fn a7_closing_passes_everything_on_at_once(rig: Rig) {
    let (key, name) = (chat("closing"), chat("job").to_string());
    let held = turn(rig.replica(0), &key).await;
    let lead = rig.replica(0).try_lead(&name).await.unwrap().expect("it is free");
    let queued = rig.replica(0).take_ticket(&key).await.unwrap();
    let mut next = rig.replica(1).take_ticket(&key).await.unwrap();
    let lost = held.lost();
    rig.replica(0).close().await.unwrap();
    assert_eq!(timeout(PATIENCE, lost).await.unwrap(), LostReason::SteppedDown);
    assert!(held.check().is_err() && lead.check().is_err());
    let until = rig.replica(1).clock().now() + PATIENCE;
    let at_once = Duration::from_secs(5);
    let next = timeout(at_once, rig.replica(1).wait_turn(&mut next, until)).await;
    let next = next.expect("not after a lease").unwrap();
    assert_eq!(next.previous_holder(), Some(held.incarnation()));
    assert!(rig.replica(1).try_lead(&name).await.unwrap().is_some());
    assert!(rig.replica(0).next_journaled().await.is_none(), "closed");
    drop(queued);
}

/// What a killed replica held and had queued passes on; its journaled messages come out elsewhere,
/// in their places; it acts no more itself.
pub async fn e2_what_a_dead_replica_held_passes_on(rig: Rig) {
    let Some(die) = rig.die.clone() else { return };
    let (key, name) = (chat("dead"), chat("job").to_string());
    let held = turn(rig.replica(0), &key).await;
    let _queued = rig.replica(0).take_ticket(&key).await.unwrap();
    let mut next = rig.replica(1).take_ticket(&key).await.unwrap();
    let lead = rig.replica(0).try_lead(&name).await.unwrap().expect("it is free");
    let other = chat("adopted");
    let mut admitted = Vec::new();
    if rig.journal().is_some() {
        admitted = tickets(&rig.replica(0).admit(messages(&other, 0..3)).await.unwrap());
    }
    let (lost, dead) = (held.lost(), held.incarnation());
    die(0);
    assert_eq!(timeout(PATIENCE, lost).await.unwrap(), LostReason::Expired);
    assert_eq!(held.check(), Err(LostReason::Expired));
    assert_eq!(lead.check(), Err(LostReason::Expired));
    let next = wait(rig.replica(1), &mut next).await;
    assert!(next.fence() > held.fence());
    assert_eq!(next.previous_holder(), Some(dead), "its queued ticket was skipped");
    let lead = timeout(PATIENCE, rig.replica(1).campaign(&name)).await.unwrap().unwrap();
    lead.check().unwrap();
    let Some(store) = rig.journal() else { return };
    // They went to one of the living; which one is the group's choice.
    let mut seen = Vec::new();
    while seen.len() < admitted.len() {
        let living = rig.replicas[1..].iter().map(|replica| {
            let replica = replica.clone();
            Box::pin(async move { journaled(&*replica).await })
        });
        let (JournaledTurn { turn, .. }, ..) = futures_util::future::select_all(living).await;
        assert_ne!(turn.incarnation(), dead);
        seen.push(turn.ticket());
        done(store, &turn).await;
    }
    assert_eq!(seen, admitted, "in their places");
}
