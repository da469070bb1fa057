//! The queue on a clock that moves when told, before a leader that answers by a script.

use std::sync::atomic::AtomicBool;

use tokio::task::JoinHandle;

use super::*;
use crate::clock::ManualClock;
use crate::machine::{Authority, SessionKind};
use crate::types::{Incarnation, Prefix, ProcessToken};

const CLIENT: ClientId = ClientId { node: 1, boot: 1 };
const LONG: Duration = Duration::from_secs(60);

/// Takes what it is sent and applies it at once, unless the script says otherwise.
#[derive(Debug, Default)]
struct Leader {
    away: AtomicBool,
    /// Answers to the next attempts; `Committed` beyond.
    script: Mutex<VecDeque<Sent>>,
    /// Every attempt.
    tried: Mutex<Vec<Batch>>,
    /// What was committed.
    taken: Mutex<Vec<Batch>>,
}

#[derive(Debug)]
struct Way(Arc<Leader>, Arc<Proposals>);

#[async_trait]
impl Carrier for Way {
    fn hindrance(&self) -> Option<Unavailable> {
        let away = self.0.away.load(Ordering::Relaxed);
        away.then_some(Unavailable::NoQuorum { reachable: 1, voters: 3 })
    }

    fn stamp_ms(&self) -> u64 {
        0
    }

    async fn propose(&self, proposal: Proposal) -> Sent {
        let batch = proposal.open().unwrap();
        self.0.tried.lock().push(batch.clone());
        let sent = self.0.script.lock().pop_front().unwrap_or(Sent::Committed);
        if sent == Sent::Committed {
            let replies = batch.commands.iter().map(|_| Reply::Done).collect();
            self.0.taken.lock().push(batch.clone());
            self.1.landed(&batch, BatchReply::Applied(replies));
        }
        sent
    }

    fn remembered(&self, _client: ClientId, _lane: u16, _serial: u64) -> Option<BatchReply> {
        None
    }
}

/// A node's queue and its leader. Time does not pass by itself, not even tokio's.
struct Bench {
    clock: ManualClock,
    leader: Arc<Leader>,
    proposals: Arc<Proposals>,
    stop: CancellationToken,
}

impl Bench {
    fn new(waiting_max: usize) -> Self {
        let clock = ManualClock::new();
        let stop = CancellationToken::new();
        let shared: Arc<dyn Clock> = Arc::new(clock.clone());
        let proposals = Arc::new(Proposals::new(CLIENT, waiting_max, shared, stop.clone()));
        Self { clock, leader: Arc::default(), proposals, stop }
    }

    /// Starts the lanes; until then everything waits.
    fn run(&self) {
        for lane in Proposals::lane_numbers() {
            let (proposals, way) =
                (self.proposals.clone(), Way(self.leader.clone(), self.proposals.clone()));
            tokio::spawn(async move { proposals.run_lane(lane, &way).await });
        }
    }

    /// Asks; it waits once this has been let run.
    fn ask(&self, command: Command, within: Duration) -> JoinHandle<Answer> {
        let lease = match &command {
            Command::RenewSession { .. } => Some(LONG),
            Command::RenewLock { ttl_ms, .. } => Some(Duration::from_millis(*ttl_ms)),
            _ => None,
        };
        let (proposals, deadline) = (self.proposals.clone(), self.clock.now() + within);
        let leader = self.leader.clone();
        tokio::spawn(async move {
            let way = Way(leader, proposals.clone());
            proposals.execute(command, lease, deadline, || way.hindrance()).await
        })
    }

    /// Asks for something that may ride for so long.
    fn ask_by(&self, command: Command, rides: Duration) -> JoinHandle<Answer> {
        let proposals = self.proposals.clone();
        let (latest, deadline) = (self.clock.now() + rides, self.clock.now() + LONG);
        tokio::spawn(async move { proposals.execute_by(command, latest, deadline, || None).await })
    }

    async fn waits(&self, count: usize) {
        until_time(|| self.proposals.waiting() == count).await;
    }

    /// The commands of every batch that was committed.
    fn taken(&self) -> Vec<Vec<Command>> {
        self.leader.taken.lock().iter().map(|batch| batch.commands.clone()).collect()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Lets the other tasks run until something is so.
async fn until(mut is: impl FnMut() -> bool) {
    for _ in 0..100_000 {
        if is() {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("it does not come to that");
}

/// Lets the other tasks run as long as they have anything to do.
async fn settle() {
    for _ in 0..1_000 {
        tokio::task::yield_now().await;
    }
}

/// Commands of one session go through one lane.
const ONE: Incarnation = Incarnation(1);

fn renew(seq: u64) -> Command {
    Command::RenewSession { session: ONE, seq: Some(seq) }
}

fn expire(seq: u64) -> Command {
    Command::ExpireSession { session: ONE, seq }
}

fn renew_lock(ttl_ms: u64) -> Command {
    Command::RenewLock { prefix: Prefix::new("p").unwrap(), key: "k".into(), token: ONE, ttl_ms }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn not_executed(answer: Answer) -> Unavailable {
    match answer {
        Err(ExecuteError::NotExecuted(why)) => why,
        other => panic!("{other:?}"),
    }
}

/// A renewal that is delivered late extends a lease that its holder has given up meanwhile: it is
/// dropped at a third of its lease, at half a second at the latest (DESIGN 3 rule 10).
#[tokio::test(start_paused = true)]
async fn e3_a_renewal_that_has_waited_too_long_is_not_sent() {
    // (lease, the most it may wait)
    for (lease, most) in [(900, 300), (1_500, 500), (60_000, 500)] {
        for late in [false, true] {
            let bench = Bench::new(16);
            let asked = bench.ask(renew_lock(lease), LONG);
            bench.waits(1).await;
            bench.clock.advance(ms(most));
            if late {
                bench.clock.advance(ms(1));
            }
            bench.run();
            let answer = asked.await.unwrap();
            if late {
                assert_eq!(not_executed(answer), Unavailable::Timeout { waited: ms(most + 1) });
                assert_eq!(bench.taken(), Vec::<Vec<Command>>::new(), "a lease of {lease} ms");
            } else {
                assert_eq!(answer, Ok(Reply::Done), "a lease of {lease} ms");
                assert_eq!(bench.taken(), [[renew_lock(lease)]]);
            }
            assert_eq!(bench.proposals.waiting(), 0);
        }
    }
}

/// Its age counts from when it was asked, also where a leader has refused it in between; what else
/// was in its batch goes on, in order.
#[tokio::test(start_paused = true)]
async fn e3_a_renewal_that_was_refused_grows_older_all_the_same() {
    let bench = Bench::new(16);
    bench.leader.script.lock().push_back(Sent::NotTaken);
    let mut asked = Vec::new();
    for command in [expire(1), renew(2), expire(3)] {
        asked.push(bench.ask(command, LONG));
        bench.waits(asked.len()).await;
    }
    bench.run();
    until(|| bench.leader.tried.lock().len() == 1).await;
    bench.leader.away.store(true, Ordering::Relaxed);
    bench.waits(3).await;
    bench.clock.advance(ms(501));
    bench.leader.away.store(false, Ordering::Relaxed);
    let answers: Vec<Answer> =
        futures_util::future::join_all(asked).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(answers[0], Ok(Reply::Done));
    assert_eq!(
        answers[1],
        Err(ExecuteError::NotExecuted(Unavailable::Timeout { waited: ms(501) }))
    );
    assert_eq!(answers[2], Ok(Reply::Done));
    let tried = bench.leader.tried.lock();
    assert_eq!(tried[0].commands, [expire(1), renew(2), expire(3)]);
    assert_eq!(tried[1].commands, [expire(1), expire(3)]);
    assert_eq!((tried.len(), tried[0].serial, tried[1].serial), (2, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn m3_what_is_over_the_bound_is_refused_and_counts_for_nothing() {
    let bench = Bench::new(3);
    let mut asked = Vec::new();
    for seq in 1..=3 {
        asked.push(bench.ask(expire(seq), LONG));
        bench.waits(asked.len()).await;
    }
    for _ in 0..5 {
        let refused = bench.ask(expire(9), LONG).await.unwrap();
        assert_eq!(not_executed(refused), Unavailable::Overloaded { waiting: 3 });
        assert_eq!(bench.proposals.waiting(), 3, "a refusal takes no place");
    }
    bench.run();
    for one in asked {
        assert_eq!(one.await.unwrap(), Ok(Reply::Done));
    }
    assert_eq!(bench.proposals.waiting(), 0);
    assert_eq!(bench.taken(), [[expire(1), expire(2), expire(3)]]);
    // And there is room for as many again.
    let again = bench.ask(expire(4), LONG).await.unwrap();
    assert_eq!(again, Ok(Reply::Done));
}

/// Where no leader is, callers give up, and what they took back leaves its place.
#[tokio::test(start_paused = true)]
async fn m3_what_was_taken_back_leaves_its_place_while_no_leader_is_there() {
    let bench = Bench::new(2);
    bench.leader.away.store(true, Ordering::Relaxed);
    bench.run();
    for _ in 0..10 {
        let first = bench.ask(expire(1), ms(100));
        bench.waits(1).await;
        let second = bench.ask(expire(2), ms(100));
        bench.waits(2).await;
        bench.clock.advance(ms(100));
        for one in [first, second] {
            let why = not_executed(one.await.unwrap());
            assert_eq!(why, Unavailable::NoQuorum { reachable: 1, voters: 3 });
        }
        bench.waits(0).await;
    }
    assert!(bench.leader.tried.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_command_taken_back_by_its_deadline_is_never_sent() {
    let bench = Bench::new(16);
    let first = bench.ask(expire(1), ms(100));
    bench.waits(1).await;
    let second = bench.ask(expire(2), LONG);
    bench.waits(2).await;
    bench.clock.advance(ms(100));
    // Told so, it is certain: the lanes start only now.
    let why = not_executed(first.await.unwrap());
    assert_eq!(why, Unavailable::Timeout { waited: ms(100) });
    bench.run();
    assert_eq!(second.await.unwrap(), Ok(Reply::Done));
    assert_eq!(bench.taken(), [[expire(2)]]);
    assert_eq!(bench.proposals.waiting(), 0);
}

/// Once it is on its way, its caller is told that the outcome is open, and no more.
#[tokio::test(start_paused = true)]
async fn a_command_on_its_way_is_not_taken_back() {
    let bench = Bench::new(16);
    bench.leader.script.lock().push_back(Sent::Unknown);
    bench.run();
    let asked = bench.ask(expire(1), ms(100));
    until(|| bench.leader.tried.lock().len() == 1).await;
    bench.leader.away.store(true, Ordering::Relaxed);
    bench.clock.advance(ms(100));
    match asked.await.unwrap() {
        Err(ExecuteError::OutcomeUnknown(Unavailable::NoQuorum { .. })) => {}
        other => panic!("{other:?}"),
    }
    // It is repeated under its serial until it lands, unchanged.
    bench.leader.away.store(false, Ordering::Relaxed);
    until_time(|| !bench.leader.taken.lock().is_empty()).await;
    let tried = bench.leader.tried.lock();
    assert!(tried.len() >= 2 && tried.iter().all(|batch| *batch == tried[0]), "{tried:?}");
}

/// As [`until`], where the lanes wait for tokio's time: it passes as soon as nobody else runs.
async fn until_time(mut is: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        if is() {
            return;
        }
        tokio::time::sleep(ms(1)).await;
    }
    panic!("it does not come to that");
}

#[tokio::test(start_paused = true)]
async fn a_command_in_no_hurry_goes_with_the_next_one() {
    let bench = Bench::new(16);
    bench.run();
    let riding = bench.ask_by(expire(1), ms(200));
    bench.waits(1).await;
    bench.clock.advance(ms(199));
    settle().await;
    assert!(bench.leader.tried.lock().is_empty(), "it waits for another");
    let next = bench.ask(expire(2), LONG);
    assert_eq!(next.await.unwrap(), Ok(Reply::Done));
    assert_eq!(riding.await.unwrap(), Ok(Reply::Done));
    assert_eq!(bench.taken(), [[expire(1), expire(2)]], "one entry, in the order they were asked");
}

#[tokio::test(start_paused = true)]
async fn a_command_in_no_hurry_goes_alone_when_its_time_has_come() {
    let bench = Bench::new(16);
    bench.run();
    let later = bench.ask_by(expire(1), ms(300));
    bench.waits(1).await;
    let sooner = bench.ask_by(expire(2), ms(200));
    bench.waits(2).await;
    bench.clock.advance(ms(199));
    settle().await;
    assert!(bench.leader.tried.lock().is_empty());
    // The earliest of those that ride takes the others along.
    bench.clock.advance(ms(1));
    assert_eq!(sooner.await.unwrap(), Ok(Reply::Done));
    assert_eq!(later.await.unwrap(), Ok(Reply::Done));
    assert_eq!(bench.taken(), [[expire(1), expire(2)]]);
}

#[tokio::test(start_paused = true)]
async fn a_stop_tells_what_was_sent_and_what_was_not() {
    let bench = Bench::new(16);
    bench.leader.script.lock().extend([Sent::Unknown, Sent::Unknown, Sent::Unknown]);
    bench.run();
    let sent = bench.ask(expire(1), LONG);
    until(|| !bench.leader.tried.lock().is_empty()).await;
    let waiting = bench.ask(expire(2), LONG);
    bench.waits(1).await;
    bench.stop.cancel();
    assert!(matches!(sent.await.unwrap(), Err(ExecuteError::OutcomeUnknown(_))));
    not_executed(waiting.await.unwrap());
    let late = bench.ask(expire(3), LONG);
    not_executed(late.await.unwrap());
    assert_eq!(bench.proposals.waiting(), 0);
}

#[test]
fn b1_what_one_session_says_goes_through_one_lane() {
    let prefix = Prefix::new("p").unwrap();
    let lane = |command: &Command| lane_of(command, LANES);
    for session in (1..100).map(Incarnation) {
        let close = Command::CloseSession { session };
        let release =
            Command::Release { prefix: prefix.clone(), ticket: crate::types::TicketId(1), session };
        let by = Authority::Holder {
            queue: crate::machine::QueueKey {
                kind: crate::machine::QueueKind::Turn,
                prefix: prefix.clone(),
                name: "chat".into(),
            },
            fence: crate::types::Fence(1),
            session: Some(session),
        };
        let commit = Command::Commit { by, ops: Vec::new() };
        assert_eq!(lane(&close), lane(&release));
        assert_eq!(lane(&close), lane(&commit));
    }
    // What wraps a command takes its lane.
    let open = Command::OpenSession {
        prefix,
        kind: SessionKind::Replica,
        replica: "r".into(),
        node: 1,
        lease_ms: 1,
    };
    let wrapped = Command::ForProcess { process: ProcessToken(1), command: open.clone().into() };
    assert_eq!(lane(&open), lane(&wrapped));
}
