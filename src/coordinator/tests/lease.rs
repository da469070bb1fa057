//! The lease rules of DESIGN 3, one by one.

use std::sync::atomic::{AtomicI64, Ordering};

use super::*;
use crate::coordinator::driver::margin;
use crate::coordinator::{CoordinationError, CoordinatorEvent, LostReason};
use crate::machine::{Authority, Effect, Op, QueueKey, QueueKind, Refusal, SessionKind, Table};
use crate::store::{self, CommitError, Expect, RowKey, Store};
use crate::types::Incarnation;

#[test]
fn e3_the_margin_covers_clocks_that_run_apart() {
    for (lease_ms, margin_ms) in
        [(500, 166), (999, 333), (1_000, 250), (3_000, 300), (15_000, 1_500)]
    {
        assert_eq!(margin(Duration::from_millis(lease_ms)).as_millis(), margin_ms, "{lease_ms}");
    }
}

/// Rule 1: the answer to a renewal is what its apply found; it never brings a session back.
#[tokio::test]
async fn e3_a_renewal_of_an_expired_session_is_refused_and_revives_nothing() {
    let Scene { clock, hub, .. } = scene();
    let ask = |command| {
        let hub = hub.clone();
        async move { hub.execute(command, BootInstant::never()).await.unwrap() }
    };
    let open = Command::OpenSession {
        prefix: prefix(),
        kind: SessionKind::Replica,
        replica: "raw".to_owned(),
        node: 1,
        lease_ms: 15_000,
    };
    let Reply::Session { session, .. } = ask(open).await else { panic!("no session") };
    pass(&clock, Duration::from_millis(14_950)).await;
    let renew = |seq| Command::RenewSession { session, seq: Some(seq) };
    assert!(matches!(ask(renew(1)).await, Reply::Renewed { seq: 1, .. }));
    assert_eq!(ask(renew(1)).await, Reply::Stale, "rule 2: a number counts once");
    // E7: not before its last renewal + lease.
    pass(&clock, Duration::from_millis(14_950)).await;
    assert!(look(&hub, |machine| machine.session(session).is_some()));
    pass(&clock, SECOND).await;
    assert!(look(&hub, |machine| machine.session(session).is_none()));
    assert_eq!(ask(renew(2)).await, Reply::SessionExpired);
    assert!(look(&hub, |machine| machine.session(session).is_none()));
    let queue = QueueKey { kind: QueueKind::Turn, prefix: prefix(), name: "test:c".to_owned() };
    // Rule 5: no command of it is taken any more.
    let take = Command::TakeTicket { session, queue, if_free: false };
    assert_eq!(ask(take).await, Reply::SessionExpired);
}

/// Rules 1 and 5: a coordinator whose session the group ended loses everything at once and comes
/// back as somebody new.
#[tokio::test]
async fn a3_an_expired_coordinator_comes_back_as_a_new_incarnation() {
    let Scene { hub, a, .. } = scene();
    let replica = open(&a, "a").await;
    let mut events = replica.events();
    let held = turn(&replica, &chat("c")).await;
    let old = held.incarnation();
    let expire = Command::ExpireSession { session: old, seq: 0 };
    assert_eq!(hub.execute(expire, BootInstant::never()).await, Ok(Reply::Done));
    settle().await;
    assert_eq!(held.check(), Err(LostReason::Expired));
    let new = replica.incarnation().expect("it opened another session by itself");
    assert!(new > old, "{new} after {old}");
    let lost = CoordinatorEvent::Lost { incarnation: old, reason: LostReason::Expired };
    assert_eq!(events.try_recv(), Ok(lost));
    assert_eq!(events.try_recv(), Ok(CoordinatorEvent::Opened { incarnation: new }));
    // The new one inherits nothing of the old, not even on the same chat.
    assert_eq!(look(&hub, |machine| machine.tickets_of(new)), []);
    let again = turn(&replica, &chat("c")).await;
    assert_eq!((again.incarnation(), again.previous_holder()), (new, Some(old)));
}

/// Rule 2: a retry keeps its number and the instant of its first attempt.
#[tokio::test]
async fn e3_a_retry_keeps_its_number_and_its_instant() {
    let Scene { clock, a, .. } = scene();
    let began = clock.now();
    let replica = open(&a, "a").await;
    let held = turn(&replica, &chat("c")).await;
    assert_eq!(held.valid_until() - began, Duration::from_millis(13_500), "opened: lease − margin");
    let mut first = true;
    a.faults(move |command| {
        (is_renewal(command) && std::mem::take(&mut first)).then_some(Fault::Lose)
    });
    pass(&clock, Duration::from_secs(9)).await;
    assert_eq!(a.asked(is_renewal).len(), 1, "the first attempt has no answer yet");
    assert_eq!(held.valid_until() - began, Duration::from_millis(13_500));
    pass(&clock, Duration::from_millis(1_500)).await;
    let asked = a.asked(is_renewal);
    let seq = |nth: usize| match asked[nth].command {
        Command::RenewSession { seq, .. } => seq.unwrap(),
        _ => unreachable!("filtered"),
    };
    assert_eq!(seq(0), seq(1), "the retry is the same renewal");
    assert!(seq(2) > seq(1), "the next one is another");
    assert!(asked[1].at > asked[0].at);
    // The third went out at once, five seconds after the first attempt being past.
    let counted = asked[2].at + Duration::from_millis(13_500);
    assert_eq!(held.valid_until(), counted);
}

/// Rule 2, the give-up instant itself: with the retry's answer as the only one, the session is
/// counted from the first attempt.
#[tokio::test]
async fn e3_an_answered_retry_counts_from_the_first_attempt() {
    let Scene { clock, a, .. } = scene();
    let began = clock.now();
    let replica = open(&a, "a").await;
    let held = turn(&replica, &chat("c")).await;
    let mut attempts = 0;
    a.faults(move |command| {
        if !is_renewal(command) {
            return None;
        }
        attempts += 1;
        // Only the second attempt of the first renewal gets through.
        (attempts != 2).then_some(Fault::Lose)
    });
    pass(&clock, Duration::from_secs(12)).await;
    let first = a.asked(is_renewal)[0].at;
    assert_eq!(first - began, Duration::from_secs(5));
    assert_eq!(held.valid_until(), first + Duration::from_millis(13_500));
    // And there it ends, while the group still has the session.
    pass(&clock, held.valid_until() - clock.now() - Duration::from_millis(50)).await;
    assert_eq!(held.check(), Ok(()));
    pass(&clock, Duration::from_millis(50)).await;
    assert_eq!(held.check(), Err(LostReason::Expired));
}

/// Rule 4: whoever acts asks the clock; no timer has to fire first.
#[tokio::test]
async fn e3_acts_are_judged_by_the_clock_and_not_by_timers() {
    let Scene { clock, a, .. } = scene();
    let replica = open(&a, "a").await;
    let (held, store) = (turn(&replica, &chat("c")).await, a.store());
    let lead = replica.try_lead("job").await.unwrap().unwrap();
    a.forget_asked();
    // The process is stopped for 14 s: nothing of it runs in between.
    clock.advance(Duration::from_secs(14));
    assert_eq!(held.check(), Err(LostReason::Expired));
    assert_eq!(lead.check(), Err(LostReason::Expired));
    assert_eq!(replica.incarnation(), None);
    let row = RowKey::new(Table::Checkpoint, "test:c");
    let put = store::Op::Put { row, value: b"late".to_vec(), expect: Expect::Any, ttl_ms: None };
    let refused = store.commit(store::Authority::Turn(&held), vec![put]).await;
    assert!(matches!(refused, Err(CommitError::Fenced { .. })), "{refused:?}");
    assert_eq!(a.asked(is_commit).len(), 0, "a lost turn asks nothing of the group");
}

/// Rule 8: giving up is final. An answer "accepted" that comes afterwards changes nothing.
#[tokio::test]
async fn e3_an_answer_after_giving_up_changes_nothing() {
    let Scene { clock, hub, a, .. } = scene();
    let replica = open(&a, "a").await;
    let held = turn(&replica, &chat("c")).await;
    let (old, until, late) = (held.incarnation(), held.valid_until(), gate());
    let answers = late.clone();
    a.faults(move |command| is_renewal(command).then(|| Fault::HoldAnswer(answers.clone())));
    pass(&clock, Duration::from_secs(12)).await;
    // The renewals were applied: the group has the session until 20 s and more.
    assert!(look(&hub, |machine| machine.session(old).unwrap().seq > 0));
    // The answer is there as soon as the process runs again, past its give-up instant.
    clock.advance(Duration::from_secs(2));
    late.send_replace(true);
    a.heal();
    settle().await;
    assert_eq!(held.check(), Err(LostReason::Expired));
    assert_eq!(held.valid_until(), until, "it was not extended");
    let closes = |command: &Command| matches!(command, Command::GiveUpSession { .. });
    assert_eq!(a.asked(closes).len(), 1, "the session was closed");
    assert!(look(&hub, |machine| machine.session(old).is_none()), "others need not wait");
    assert!(replica.incarnation().is_some_and(|new| new > old));
    pass(&clock, Duration::from_secs(30)).await;
    assert_eq!(held.check(), Err(LostReason::Expired), "and it stays lost");
}

/// Rule 8: the check that finds a tenure past its end makes that final, against any later renewal.
#[tokio::test]
async fn e3_who_sees_the_end_first_decides() {
    let clock = ManualClock::new();
    let until = clock.now() + SECOND;
    let (tenure, _returned) =
        crate::coordinator::guards::Tenure::new(Incarnation(1), Arc::new(clock.clone()), until);
    assert_eq!(tenure.extend(until + SECOND), Ok(()));
    clock.advance(SECOND + SECOND);
    assert_eq!(tenure.check(), Err(LostReason::Expired));
    assert_eq!(tenure.extend(clock.now() + LEASE), Err(LostReason::Expired));
    assert_eq!(tenure.check(), Err(LostReason::Expired));
    assert_eq!(tenure.end(LostReason::SteppedDown), LostReason::Expired, "the first reason stays");
}

/// Rule 6: the apply that ends a session also passes on what it held.
#[tokio::test]
async fn e3_expiry_passes_on_in_the_same_apply() {
    let Scene { clock, hub, a, b } = scene();
    let (dying, living) = (open(&a, "a").await, open(&b, "b").await);
    let held = turn(&dying, &chat("c")).await;
    let mut next = living.take_ticket(&chat("c")).await.unwrap();
    let mut applies = hub.wakeups().everything();
    dying.crash();
    let dead = held.incarnation();
    pass(&clock, LEASE + SECOND).await;
    let ended = |effect: &Effect| matches!(effect, Effect::SessionEnded { session, .. } if *session == dead);
    let passed =
        |effect: &Effect| matches!(effect, Effect::Granted { ticket, .. } if *ticket == next.id());
    let mut together = false;
    while let Ok(effects) = applies.try_recv() {
        together |= effects.iter().any(ended) && effects.iter().any(passed);
    }
    assert!(together, "no apply had both");
    let granted = living.wait_turn(&mut next, clock.now()).await.unwrap();
    assert_eq!(granted.previous_holder(), Some(dead));
}

/// Rule 7: no act under a turn may be under way past its give-up instant.
#[tokio::test]
async fn e3_no_act_has_a_deadline_beyond_giving_up() {
    let Scene { clock, a, .. } = scene();
    let replica = open(&a, "a").await;
    let (held, store) = (turn(&replica, &chat("c")).await, a.store());
    a.faults(|command| is_renewal(command).then_some(Fault::Lose));
    pass(&clock, Duration::from_secs(12)).await;
    store.commit(store::Authority::Turn(&held), Vec::new()).await.unwrap();
    let commits = a.asked(is_commit);
    assert_eq!(commits.len(), 1);
    assert_eq!(commits[0].deadline, held.valid_until());
    assert!(a.asked(is_renewal).iter().all(|asked| asked.deadline <= held.valid_until()));
}

/// A clock whose wall time can be set.
#[derive(Debug, Clone)]
struct WallJumps {
    boot: ManualClock,
    jumped_ms: Arc<AtomicI64>,
}

impl Clock for WallJumps {
    fn now(&self) -> BootInstant {
        self.boot.now()
    }
    fn wall_ms(&self) -> u64 {
        self.boot.wall_ms().saturating_add_signed(self.jumped_ms.load(Ordering::Relaxed))
    }
    fn sleep_until(
        &self,
        at: BootInstant,
    ) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.boot.sleep_until(at)
    }
}

/// E5: a wall clock that jumps an hour loses and extends nothing.
#[tokio::test]
async fn e5_a_wall_clock_jump_loses_and_extends_no_lease() {
    for hour_ms in [3_600_000, -3_600_000] {
        let boot = ManualClock::new();
        let jumped_ms = Arc::new(AtomicI64::new(0));
        let hub =
            MemoryHub::with_clock(WallJumps { boot: boot.clone(), jumped_ms: jumped_ms.clone() });
        let (a, b) = (Node::new(&hub, &boot), Node::new(&hub, &boot));
        let (living, dying) = (open(&a, "a").await, open(&b, "b").await);
        let held = turn(&living, &chat("c")).await;
        let dead = turn(&dying, &chat("d")).await.incarnation();
        jumped_ms.store(hour_ms, Ordering::Relaxed);
        dying.crash();
        pass(&boot, LEASE - SECOND).await;
        held.check().unwrap();
        assert!(look(&hub, |machine| machine.session(dead).is_some()), "not before its lease");
        pass(&boot, SECOND * 2).await;
        assert!(look(&hub, |machine| machine.session(dead).is_none()), "and not long after");
        held.check().unwrap();
    }
}

/// E3: what a stalled replica does after giving up is refused by the group too, should it get
/// there.
#[tokio::test]
async fn e3_a_late_write_of_a_dead_session_is_refused_at_apply() {
    let Scene { clock, hub, a, b } = scene();
    let (stalled, other) = (open(&a, "a").await, open(&b, "b").await);
    let held = turn(&stalled, &chat("c")).await;
    let late = Command::Commit {
        by: Authority::Holder {
            queue: held.queue().clone(),
            fence: held.fence(),
            session: Some(held.incarnation()),
        },
        ops: vec![Op::Release { prefix: prefix(), ticket: held.ticket() }],
    };
    stalled.crash();
    pass(&clock, LEASE + SECOND).await;
    let next = turn(&other, &chat("c")).await;
    let answer = hub.execute(late, BootInstant::never()).await;
    assert_eq!(answer, Ok(Reply::Refused(Refusal::SessionExpired)));
    next.check().unwrap();
    assert_eq!(
        look(&hub, |machine| machine.holder(next.queue()).unwrap().fence),
        Some(next.fence())
    );
}

/// A dead replica releases nothing and closes nothing; the group finds out by its lease.
#[tokio::test]
async fn i1_a_crash_releases_nothing() {
    let Scene { clock, hub, a, .. } = scene();
    let replica = open(&a, "a").await;
    let held = turn(&replica, &chat("c")).await;
    let session = held.incarnation();
    a.forget_asked();
    replica.crash();
    assert_eq!(held.check(), Err(LostReason::Expired));
    drop(held);
    assert!(matches!(replica.open().await, Err(CoordinationError::Closed)), "dead for good");
    pass(&clock, LEASE - SECOND).await;
    assert_eq!(a.asked(|_| true).len(), 0, "a dead replica asks nothing");
    assert!(look(&hub, |machine| machine.session(session).is_some()));
    pass(&clock, SECOND * 2).await;
    assert!(look(&hub, |machine| machine.session(session).is_none()));
}

fn told_of(events: &mut tokio::sync::broadcast::Receiver<CoordinatorEvent>) -> Vec<Incarnation> {
    let events = std::iter::from_fn(|| events.try_recv().ok());
    let others = events.filter_map(|event| match event {
        CoordinatorEvent::ReplicaIdShared { other } => Some(other),
        _ => None,
    });
    others.collect()
}

/// A3: two live replicas of one name both hear of it, once.
#[tokio::test]
async fn a3_two_replicas_of_one_name_are_told() {
    let Scene { clock, a, b, .. } = scene();
    let older = open(&a, "same").await;
    let mut older_events = older.events();
    let newer = b.coordinator("same", LEASE);
    let mut newer_events = newer.events();
    newer.open().await.unwrap();
    let (old, new) = (older.incarnation().unwrap(), newer.incarnation().unwrap());
    assert_eq!(told_of(&mut newer_events), [], "that the older one is there says nothing yet");
    pass(&clock, LEASE * 2).await;
    assert_eq!(told_of(&mut older_events), [new]);
    assert_eq!(told_of(&mut newer_events), [old]);
}

/// A3: what a process left behind of itself is nobody else. Here openings whose answer was lost, an
/// opening that arrives long after, and a session that was given up and could not be closed.
#[tokio::test]
async fn a3_a_replica_does_not_take_itself_for_another() {
    let lease = Duration::from_millis(900);
    let Scene { clock, hub, a, .. } = scene();
    let (late, mut openings) = (gate(), 0);
    let held = late.clone();
    a.faults(move |command| {
        openings += u32::from(matches!(command, Command::OpenSession { .. }));
        match command {
            Command::OpenSession { .. } if openings == 1 => Some(Fault::Hold(held.clone())),
            Command::OpenSession { .. } if openings == 2 => Some(Fault::LoseAnswer),
            _ => None,
        }
    });
    let replica = a.coordinator("same", lease);
    let mut events = replica.events();
    let opening = tokio::spawn({
        let replica = replica.clone();
        async move { replica.open().await }
    });
    // Each attempt waits 600 ms for its answer, and the next comes 200 ms later.
    settle().await;
    pass(&clock, Duration::from_millis(1_650)).await;
    opening.await.unwrap().unwrap();
    let mine = replica.incarnation().unwrap();
    let others = || look(&hub, |machine| machine.namesakes(mine));
    assert!(others().iter().any(|(other, _)| *other < mine), "one of its own still lives");
    late.send_replace(true);
    settle().await;
    assert!(others().iter().any(|(other, _)| *other > mine), "one of its own came late");
    pass(&clock, lease).await;
    assert_eq!(told_of(&mut events), []);

    // Renewals and the closing arrive only after it has given up and opened another.
    let late = gate();
    let held = late.clone();
    a.faults(move |command| match command {
        Command::RenewSession { session, .. } | Command::GiveUpSession { session }
            if *session == mine =>
        {
            Some(Fault::Hold(held.clone()))
        }
        _ => None,
    });
    let given_up = async {
        while replica.incarnation().is_none_or(|now| now == mine) {
            pass(&clock, Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(SECOND * 20, given_up).await.expect("it comes back as another");
    let now = replica.incarnation().unwrap();
    late.send_replace(true);
    pass(&clock, lease * 4).await;
    assert_eq!(replica.incarnation(), Some(now), "nothing happened to the new one");
    assert_eq!(told_of(&mut events), []);
}

/// A3: an earlier life of the process that was killed is nobody else either.
#[tokio::test]
async fn a3_a_replica_restarted_within_its_lease_is_not_two() {
    let Scene { clock, a, b, .. } = scene();
    let first = open(&a, "same").await;
    first.crash();
    let second = b.coordinator("same", LEASE);
    let mut events = second.events();
    second.open().await.unwrap();
    pass(&clock, LEASE * 2).await;
    assert_eq!(told_of(&mut events), []);
}

/// What a log said.
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

impl Log {
    fn listen() -> (Self, tracing::subscriber::DefaultGuard) {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::WARN)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        (log, tracing::subscriber::set_default(subscriber))
    }
    fn said(&self) -> String {
        String::from_utf8(self.0.lock().clone()).unwrap()
    }
}

/// Case c21: without a quorum, opening says why within 5 s, what needs a session fails with a typed
/// error, and both work once the quorum is back.
#[tokio::test]
async fn case_c21_a_blocked_start_says_why() {
    let Scene { clock, a, .. } = scene();
    let (log, _listening) = Log::listen();
    a.faults(|_| Some(Fault::Refuse));
    let replica = a.coordinator("a", LEASE);
    let opening = tokio::spawn({
        let replica = replica.clone();
        async move { replica.open().await }
    });
    settle().await;
    let asking = tokio::spawn({
        let replica = replica.clone();
        async move { replica.take_ticket(&chat("c")).await.map(drop) }
    });
    pass(&clock, Duration::from_secs(5)).await;
    let said = log.said();
    assert!(said.contains("no quorum: 1 of 3 voters"), "{said}");
    assert!(!opening.is_finished(), "it keeps trying");
    pass(&clock, Duration::from_secs(11)).await;
    match asking.await.unwrap() {
        Err(fault @ CoordinationError::Unavailable { .. }) => {
            assert!(fault.is_retryable());
            let said = fault.to_string();
            assert!(said.contains("NoQuorum") && said.contains("test:c"), "{said}");
            assert!(said.contains("start or reconnect"), "it says what to do: {said}");
        }
        other => panic!("without a quorum a ticket was answered {other:?}"),
    }
    a.heal();
    pass(&clock, SECOND).await;
    opening.await.unwrap().unwrap();
    turn(&replica, &chat("c")).await.check().unwrap();
}

/// E2: a lease too short to survive an election says so at the start; half a second works.
#[tokio::test]
async fn e2_a_short_lease_works_and_is_warned_of() {
    let Scene { clock, a, .. } = scene();
    let (log, _listening) = Log::listen();
    let replica = a.coordinator("a", Duration::from_millis(500));
    replica.open().await.unwrap();
    assert!(log.said().contains("500ms"), "{}", log.said());
    let held = turn(&replica, &chat("c")).await;
    pass(&clock, Duration::from_secs(10)).await;
    held.check().unwrap();
    let before = log.said().len();
    open(&a, "b").await;
    assert_eq!(log.said().len(), before, "the default lease needs no warning");
}

/// E1: one session, renewed every third of its lease; turns and leads that are held cost nothing.
#[tokio::test]
async fn e1_a_replica_renews_as_often_with_a_thousand_turns_as_with_none() {
    let Scene { clock, a, .. } = scene();
    let replica = open(&a, "a").await;
    let (mut held, mut leads, mut renewals) = (Vec::new(), Vec::new(), Vec::new());
    for (turns, named) in [(0, 0), (1, 0), (1_000, 10)] {
        while held.len() < turns {
            held.push(turn(&replica, &chat(&format!("c{}", held.len()))).await);
        }
        while leads.len() < named {
            let name = format!("job-{}", leads.len());
            leads.push(replica.try_lead(&name).await.unwrap().expect("nobody else wants it"));
        }
        a.forget_asked();
        pass(&clock, LEASE * 8).await;
        let others = a.asked(|command| !is_renewal(command));
        assert!(others.is_empty(), "{} commands besides renewals", others.len());
        renewals.push(a.asked(is_renewal).len());
    }
    // Three a lease; where a span of time begins between two makes one more or less.
    assert!(renewals.iter().all(|count| (23..=25).contains(count)), "{renewals:?}");
    held.iter().for_each(|turn| turn.check().unwrap());
}
