//! Turns: granted by the own node's applies, in order, one at a time.

use std::collections::HashMap;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::coordinator::{CoordinationError, JournaledTurn, MemoryCoordinator, UnavailableCause};
use crate::machine::{
    Admission, Batch, BatchReply, ClientId, Limits, QueueKey, QueueKind, SessionKind,
};
use crate::store::{self, Store};
use crate::types::{Incarnation, TicketId};

/// DESIGN 4 rule 3: the answer to a command starts nothing; the own node's apply does.
#[tokio::test]
async fn b7_a_turn_comes_from_the_own_nodes_apply() {
    let Scene { clock, a, .. } = scene();
    let replica = open(&a, "a").await;
    a.applies(Applies::Held);
    let mut ticket = replica.take_ticket(&chat("c")).await.unwrap();
    let state = a.look(|machine| machine.ticket(&prefix(), ticket.id()));
    assert!(matches!(state, crate::machine::TicketState::Granted { .. }), "the group granted it");
    settle().await;
    replica.wait_turn(&mut ticket, clock.now()).await.expect_err("this node has not applied it");
    a.applies(Applies::Shown);
    settle().await;
    replica.wait_turn(&mut ticket, clock.now()).await.unwrap().check().unwrap();
}

/// Effects that a snapshot swallowed are made good from the machine.
#[tokio::test]
async fn b7_a_replaced_state_is_read_again() {
    let Scene { clock, a, b, .. } = scene();
    let (replica, other) = (open(&a, "a").await, open(&b, "b").await);
    let held = turn(&other, &chat("c")).await;
    let mut waiting = replica.take_ticket(&chat("c")).await.unwrap();
    a.applies(Applies::Lost);
    drop(held);
    replica.admit(vec![message(&chat("d"), "m")]).await.unwrap();
    settle().await;
    replica.wait_turn(&mut waiting, clock.now()).await.expect_err("the effect was lost");
    a.applies(Applies::Shown);
    a.wakeups.raise_all();
    settle().await;
    replica.wait_turn(&mut waiting, clock.now()).await.unwrap().check().unwrap();
    let JournaledTurn { turn, record } = replica.next_journaled().await.unwrap();
    assert_eq!((turn.key(), record.id.as_str()), (&chat("d"), "m"));
    // A second time tells nothing new.
    a.wakeups.raise_all();
    settle().await;
    let again = tokio::select! {
        biased;
        again = replica.next_journaled() => again,
        () = settle() => None,
    };
    assert!(again.is_none(), "one grant is handed out once");
}

/// A session that ended while its node was given a snapshot is lost, too.
#[tokio::test]
async fn b7_a_session_that_ended_unseen_is_lost() {
    let Scene { hub, a, .. } = scene();
    let replica = open(&a, "a").await;
    let held = turn(&replica, &chat("c")).await;
    a.applies(Applies::Lost);
    let expire = Command::ExpireSession { session: held.incarnation(), seq: 0 };
    hub.execute(expire, BootInstant::never()).await.unwrap();
    settle().await;
    a.applies(Applies::Shown);
    a.wakeups.raise_all();
    settle().await;
    held.check().expect_err("its session is gone");
}

/// B7, case c16: whoever waits asks nothing; a replica renews once a third of its lease, however
/// much it holds (E1).
#[tokio::test]
async fn b7_waiting_asks_nothing_of_the_group() {
    let Scene { clock, a, b, .. } = scene();
    let (holder, waiter) = (open(&a, "a").await, open(&b, "b").await);
    let mut held = Vec::new();
    let mut waiters = tokio::task::JoinSet::new();
    for nth in 0..50 {
        let key = chat(&format!("c{nth}"));
        held.push(turn(&holder, &key).await);
        let waiter = waiter.clone();
        waiters.spawn(async move { turn(&waiter, &key).await.check() });
    }
    settle().await;
    a.forget_asked();
    b.forget_asked();
    pass(&clock, LEASE * 4).await;
    for node in [&a, &b] {
        let asked = node.asked(|_| true);
        assert!(asked.iter().all(|asked| is_renewal(&asked.command)), "only renewals");
        assert_eq!(asked.len(), 12, "one a third of the lease");
    }
    drop(held);
    settle().await;
    while let Some(turn) = waiters.try_join_next() {
        turn.unwrap().unwrap();
    }
    assert!(waiters.is_empty(), "and all are woken");
}

/// Case c1: a handler ten times as long as the lease keeps its turn; a second message waits.
#[tokio::test]
async fn case_c1_a_handler_longer_than_the_lease_keeps_its_turn() {
    let Scene { clock, a, b, .. } = scene();
    let lease = SECOND;
    let (first, second) = (a.coordinator("a", lease), b.coordinator("b", lease));
    first.open().await.unwrap();
    second.open().await.unwrap();
    let held = turn(&first, &chat("c")).await;
    pass(&clock, SECOND * 2).await;
    let mut next = second.take_ticket(&chat("c")).await.unwrap();
    for _ in 0..80 {
        pass(&clock, Duration::from_millis(100)).await;
        held.check().expect("it is held for as long as its replica lives");
        second.wait_turn(&mut next, clock.now()).await.expect_err("no overlap");
    }
    drop(held);
    settle().await;
    second.wait_turn(&mut next, clock.now()).await.unwrap().check().unwrap();
}

/// Case c2: 100,000 random steps of enqueue and give back on one chat strand nothing.
#[test]
fn case_c2_no_interleaving_strands_a_ticket() {
    let mut machine = Machine::new(Limits::default());
    let mut serial = 0;
    let mut ask = |machine: &mut Machine, commands: Vec<Command>| {
        let client = ClientId { node: 1, boot: 1 };
        let batch = Batch { client, lane: 0, serial, stamp_ms: 0, commands };
        serial += 1;
        match machine.apply(serial, &batch, &mut Vec::new()) {
            BatchReply::Applied(replies) => replies,
            other => panic!("a batch in its order was answered {other:?}"),
        }
    };
    let queue = QueueKey { kind: QueueKind::Turn, prefix: prefix(), name: "test:c".to_owned() };
    let open = Command::OpenSession {
        prefix: prefix(),
        kind: SessionKind::Replica,
        replica: String::new(),
        node: 1,
        lease_ms: 3_600_000,
    };
    let sessions: Vec<Incarnation> = ask(&mut machine, vec![open; 3])
        .into_iter()
        .map(|reply| match reply {
            Reply::Session { session, .. } => session,
            other => panic!("no session: {other:?}"),
        })
        .collect();
    let mut random = StdRng::seed_from_u64(2);
    let mut live: Vec<(TicketId, Incarnation)> = Vec::new();
    let mut taken = 0;
    // Batches of random length, so that the state at rest is looked at after every kind of step.
    let mut left: i32 = 100_000;
    while left > 0 {
        let steps = (0..random.random_range(1..100)).map(|_| {
            if live.is_empty() || live.len() < 20 && random.random_bool(0.5) {
                let session = sessions[random.random_range(0..sessions.len())];
                taken += 1;
                live.push((TicketId(taken), session));
                return Command::TakeTicket { session, queue: queue.clone(), if_free: false };
            }
            // Mostly the holder, now and then one that waits.
            let nth = if random.random_bool(0.7) { 0 } else { random.random_range(0..live.len()) };
            let (ticket, session) = live.remove(nth);
            Command::Release { prefix: prefix(), ticket, session }
        });
        let steps: Vec<Command> = steps.collect();
        left -= steps.len() as i32;
        for reply in ask(&mut machine, steps) {
            assert!(matches!(reply, Reply::Done | Reply::Ticket { .. }), "{reply:?}");
        }
        let holder = machine.holder(&queue);
        let head = live.first().map(|(_, session)| *session);
        assert_eq!(holder.map(|holder| holder.session), head, "{left} steps before the end");
        assert!(holder.is_none_or(|holder| holder.fence.is_some()), "the head is granted");
    }
    let rest = live.drain(..);
    let rest = rest.map(|(ticket, session)| Command::Release { prefix: prefix(), ticket, session });
    ask(&mut machine, rest.collect());
    assert_eq!(machine.holder(&queue), None);
    assert_eq!(machine.turn_counts(), (0, 0));
}

async fn done(store: &GroupStore, turn: &Turn) {
    let ops = vec![store::Op::Acknowledge(turn.ticket()), store::Op::Release(turn.ticket())];
    store.commit(store::Authority::Turn(turn), ops).await.unwrap();
}

/// Case c5: the holder dies in its turn while messages keep coming; the next turn comes within
/// lease + 1 s, and every message is handled, in order.
#[tokio::test]
async fn case_c5_a_dead_holder_delays_its_chat_by_a_lease_at_most() {
    let Scene { clock, a, b, .. } = scene();
    let (dying, living) = (open(&a, "a").await, open(&b, "b").await);
    let (key, store) = (chat("c"), b.store());
    dying.admit(vec![message(&key, "0"), message(&key, "1")]).await.unwrap();
    let JournaledTurn { turn: held, .. } = dying.next_journaled().await.unwrap();
    living.admit(vec![message(&key, "2")]).await.unwrap();
    dying.crash();
    let died = clock.now();
    let handled = tokio::spawn({
        let (living, clock) = (living.clone(), clock.clone());
        async move {
            let mut handled = Vec::new();
            while handled.len() < 20 {
                let JournaledTurn { turn, record } = living.next_journaled().await.unwrap();
                handled.push((record.id, clock.now(), turn.fence()));
                done(&store, &turn).await;
            }
            handled
        }
    });
    for id in 3..20 {
        living.admit(vec![message(&key, &id.to_string())]).await.unwrap();
        pass(&clock, SECOND).await;
    }
    assert!(handled.is_finished(), "nothing waits for ever");
    let handled = handled.await.unwrap();
    let ids: Vec<String> = handled.iter().map(|(id, ..)| id.clone()).collect();
    assert_eq!(ids, (0..20).map(|id| id.to_string()).collect::<Vec<_>>(), "in order, each once");
    let (_, first, fence) = &handled[0];
    assert!(*first - died <= LEASE + SECOND, "{:?}", *first - died);
    assert!(*fence > held.fence());
}

/// Case c13: 1,000 held turns stay held, under the same fences, while others come and go.
#[tokio::test]
async fn case_c13_members_that_come_and_go_disturb_no_turn() {
    let Scene { clock, a, b, .. } = scene();
    let replica = open(&a, "a").await;
    let mut held = Vec::new();
    for nth in 0..1_000 {
        held.push(turn(&replica, &chat(&format!("c{nth}"))).await);
    }
    let fences: Vec<_> = held.iter().map(Turn::fence).collect();
    for (round, one) in held.iter().enumerate().take(3) {
        let guest = b.coordinator(&format!("guest {round}"), LEASE);
        guest.open().await.unwrap();
        let ticket = guest.take_ticket(one.key()).await.unwrap();
        pass(&clock, LEASE).await;
        if round == 1 {
            guest.crash();
        }
        guest.close().await.unwrap();
        drop(ticket);
    }
    pass(&clock, LEASE * 2).await;
    for (turn, fence) in held.iter().zip(fences) {
        turn.check().unwrap();
        let holder = a.look(|machine| machine.holder(turn.queue())).unwrap();
        assert_eq!((holder.session, holder.fence), (turn.incarnation(), Some(fence)));
    }
}

/// Case c19: three replicas start at once with 100 chats waiting; each chat gets one turn.
#[tokio::test]
async fn case_c19_replicas_that_start_at_once_share_the_waiting_chats() {
    let clock = ManualClock::new();
    let hub = MemoryHub::with_clock(clock.clone());
    let before = MemoryCoordinator::new(&hub, "before");
    before.open().await.unwrap();
    let waiting = (0..100).map(|nth| message(&chat(&format!("c{nth}")), "m")).enumerate();
    let waiting = waiting.map(|(nth, one)| Admit { id: format!("m{nth}"), ..one }).collect();
    let admitted = before.admit(waiting).await.unwrap();
    assert!(admitted.iter().all(|one| matches!(one, Admission::Fresh { .. })));
    before.close().await.unwrap();
    let seen: Arc<Mutex<HashMap<ChatKey, Vec<Incarnation>>>> = Arc::default();
    let mut replicas = tokio::task::JoinSet::new();
    for name in ["a", "b", "c"] {
        let (replica, seen) = (MemoryCoordinator::new(&hub, name), seen.clone());
        let store = hub.store(prefix());
        replicas.spawn(async move {
            replica.open().await.unwrap();
            while let Some(JournaledTurn { turn, .. }) = replica.next_journaled().await {
                seen.lock().entry(turn.key().clone()).or_default().push(turn.incarnation());
                tokio::task::yield_now().await;
                done(&store, &turn).await;
            }
        });
    }
    for _ in 0..100 {
        settle().await;
        if seen.lock().len() == 100 {
            break;
        }
    }
    pass(&clock, LEASE).await;
    let seen = seen.lock();
    assert_eq!(seen.len(), 100);
    assert!(seen.values().all(|turns| turns.len() == 1), "one turn each");
}

/// I2: idle chats beyond the bound are forgotten, fences grow across it, and a chat that comes back
/// names nobody.
#[tokio::test]
async fn i2_forgotten_chats_keep_growing_fences() {
    let limits = Limits { idle_keys_max: 2, ..Limits::default() };
    let hub = MemoryHub::with_limits(limits);
    let replica = MemoryCoordinator::new(&hub, "a");
    replica.open().await.unwrap();
    let me = replica.incarnation();
    let mut last = None;
    let mut one = async |name: &str| {
        let granted = turn(&replica, &chat(name)).await;
        let previous = granted.previous_holder();
        let fence = granted.fence();
        assert!(last.replace(fence) < Some(fence), "fences grow");
        granted.release().await.unwrap();
        previous
    };
    assert_eq!(one("a").await, None);
    assert_eq!(one("b").await, None);
    assert_eq!(one("a").await, me, "within the bound it is remembered");
    assert_eq!(one("c").await, None);
    assert_eq!(one("b").await, None, "the least recently used was forgotten");
    assert_eq!(one("c").await, me);
}

/// A4: one key under two prefixes is two chats.
#[tokio::test]
async fn a4_a_key_under_two_prefixes_never_meets() {
    let Scene { hub, .. } = scene();
    let other = Prefix::new("other").unwrap();
    let first = MemoryCoordinator::new(&hub, "a");
    let second = MemoryCoordinator::with(&hub, other, CoordinatorOptions::default());
    first.open().await.unwrap();
    second.open().await.unwrap();
    let _first = turn(&first, &chat("c")).await;
    let _second = turn(&second, &chat("c")).await;
    let _lead = first.try_lead("job").await.unwrap().expect("free");
    assert!(second.try_lead("job").await.unwrap().is_some());
}

/// A coordinator dropped without a close leaves no task behind, and its session to its lease.
#[tokio::test]
async fn e2_a_dropped_coordinator_ends_with_its_lease() {
    let Scene { clock, hub, a, .. } = scene();
    let replica = open(&a, "a").await;
    let session = replica.incarnation().unwrap();
    drop(replica);
    settle().await;
    assert_eq!(Arc::strong_count(&a), 1, "nothing holds on to the group");
    assert!(look(&hub, |machine| machine.session(session).is_some()));
    pass(&clock, LEASE + SECOND).await;
    assert!(look(&hub, |machine| machine.session(session).is_none()));
}

/// B4: a wait that the group cannot end says that it is the group, and names who held the turn.
#[tokio::test]
async fn b4_a_wait_without_a_quorum_says_so() {
    let Scene { clock, a, b, .. } = scene();
    let (first, second) = (open(&a, "a").await, open(&b, "b").await);
    let held = turn(&first, &chat("c")).await;
    let mut ticket = second.take_ticket(&chat("c")).await.unwrap();
    let until = clock.now() + SECOND * 9;
    b.faults(|_| Some(Fault::Refuse));
    let waiting = tokio::spawn(async move { second.wait_turn(&mut ticket, until).await.map(drop) });
    pass(&clock, SECOND * 9).await;
    let error = waiting.await.unwrap().unwrap_err();
    let CoordinationError::Unavailable { cause, key, holder, fence, age_ms, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!((*cause, key.as_str()), (UnavailableCause::NoQuorum, "test:c"));
    assert_eq!((*holder, *fence), (Some(held.incarnation()), Some(held.fence())));
    assert!(*age_ms >= 9_000, "{error}");
    assert!(error.to_string().contains("1 of 3 voters"), "{error}");
}
