//! The checker on trial: before its silence counts, it has to catch bugs put in on purpose.
//!
//! First histories written by hand, then a simulated server with one bug at a time, then the real
//! group behind a proxy that tampers with answers. The same recording client and the same checker
//! are used in `tests/linearizable.rs`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::time::Duration;

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use support::api::Api;
use support::cluster::{Cluster, Options};
use support::demo::{Demo, Reply};
use support::linearize::{Call, Verdict, check_within};
use support::models::{
    CheckpointAnswer, CheckpointCall, CheckpointOp, Condition, Lock, LockAnswer, LockCall, LockOp,
    TurnAnswer, TurnCall, TurnOp, check_checkpoint, check_lock, check_turns,
};
use support::proxy::{self, Tamper};
use support::simulated::{self, Bug};
use support::talk::{self, Chat, Said};
use support::turnlog::{Fault, Held, faults};
use support::workload::{self, Size};

const MS: u64 = 1_000_000;

/// A call from `start` to `end`, in ms.
fn call<Op, A>(client: usize, start: u64, end: u64, op: Op, answer: A) -> Call<Op, A> {
    Call { client, op, answer: Some(answer), start: start * MS, end: end * MS }
}

/// A call whose answer never came.
fn open<Op, A>(client: usize, start: u64, op: Op) -> Call<Op, A> {
    Call { client, op, answer: None, start: start * MS, end: u64::MAX }
}

fn accepted(verdict: Verdict) {
    assert!(verdict.is_linearizable(), "{verdict:?}");
}

fn refuted(verdict: Verdict) {
    assert!(verdict.is_refuted(), "{verdict:?}");
}

// ---------------------------------------------------------------------- histories written by hand

fn put(value: u64, condition: Condition) -> CheckpointOp {
    CheckpointOp::Put { condition, value }
}

fn found(value: u64, revision: u64) -> CheckpointAnswer {
    CheckpointAnswer::Found { value, revision }
}

/// Written at revision 7, rewritten at revision 9.
fn two_writes() -> Vec<CheckpointCall> {
    vec![
        call(0, 0, 1, put(1, Condition::Absent), CheckpointAnswer::Written { revision: 7 }),
        call(0, 2, 3, put(2, Condition::Revision(7)), CheckpointAnswer::Written { revision: 9 }),
    ]
}

#[test]
fn a_read_after_the_write_is_accepted() {
    let mut history = two_writes();
    history.push(call(1, 4, 5, CheckpointOp::Get, found(2, 9)));
    accepted(check_checkpoint(&history));
}

#[test]
fn a_read_beside_the_write_may_see_either_value() {
    for value in [found(1, 7), found(2, 9)] {
        let mut history = two_writes();
        history.push(Call { start: 2 * MS + 1, ..call(1, 2, 5, CheckpointOp::Get, value) });
        accepted(check_checkpoint(&history));
    }
}

#[test]
fn museum_a_stale_read_is_refuted() {
    let mut history = two_writes();
    history.push(call(1, 4, 5, CheckpointOp::Get, found(1, 7)));
    refuted(check_checkpoint(&history));
}

#[test]
fn museum_two_reads_that_go_back_in_time_are_refuted() {
    let mut history = two_writes();
    history[1].end = 9 * MS;
    history.push(call(1, 4, 5, CheckpointOp::Get, found(2, 9)));
    history.push(call(2, 6, 7, CheckpointOp::Get, found(1, 7)));
    refuted(check_checkpoint(&history));
}

#[test]
fn museum_a_lost_update_is_refuted() {
    let mut history = two_writes();
    let op = put(3, Condition::Revision(7));
    history.push(call(1, 2, 3, op, CheckpointAnswer::Written { revision: 10 }));
    refuted(check_checkpoint(&history));
}

#[test]
fn museum_a_lost_acknowledged_write_is_refuted() {
    let mut history = two_writes();
    history.push(call(1, 4, 5, CheckpointOp::Get, CheckpointAnswer::Absent));
    refuted(check_checkpoint(&history));
}

#[test]
fn museum_a_revision_used_again_after_a_delete_is_refuted() {
    let mut history = two_writes();
    history.push(call(0, 4, 5, CheckpointOp::Delete { revision: 9 }, CheckpointAnswer::Deleted));
    let again = CheckpointAnswer::Written { revision: 7 };
    history.push(call(0, 6, 7, put(3, Condition::Absent), again));
    refuted(check_checkpoint(&history));
}

#[test]
fn museum_a_refusal_without_cause_is_refuted() {
    let mut history = two_writes();
    let op = put(3, Condition::Revision(9));
    history.push(call(1, 4, 5, op, CheckpointAnswer::Refused));
    refuted(check_checkpoint(&history));
}

#[test]
fn an_unknown_write_may_have_run_or_not() {
    let lost = open(1, 4, put(3, Condition::Revision(9)));
    for (start, seen) in [(5, found(2, 9)), (5, found(3, 11))] {
        let mut history = two_writes();
        history.push(lost.clone());
        history.push(call(0, start, start + 1, CheckpointOp::Get, seen));
        accepted(check_checkpoint(&history));
    }
    // It may also run long after its client gave up on it: unseen first, seen later.
    let mut history = two_writes();
    history.push(lost);
    history.push(call(0, 50, 51, CheckpointOp::Get, found(2, 9)));
    history.push(call(0, 60, 61, CheckpointOp::Get, found(3, 11)));
    accepted(check_checkpoint(&history));
}

#[test]
fn museum_an_unknown_write_that_comes_and_goes_is_refuted() {
    let mut history = two_writes();
    history.push(open(1, 4, put(3, Condition::Revision(9))));
    history.push(call(0, 5, 6, CheckpointOp::Get, found(3, 11)));
    history.push(call(0, 7, 8, CheckpointOp::Get, found(2, 9)));
    refuted(check_checkpoint(&history));
}

#[test]
fn museum_an_unknown_write_seen_before_it_was_sent_is_refuted() {
    let mut history = two_writes();
    history.push(call(0, 4, 5, CheckpointOp::Get, found(3, 11)));
    history.push(open(1, 6, put(3, Condition::Revision(9))));
    refuted(check_checkpoint(&history));
}

fn acquired(token: &str, fence: u64) -> LockAnswer {
    LockAnswer::Acquired { token: token.to_owned(), fence }
}

fn release(token: &str) -> LockOp {
    LockOp::Release { token: token.to_owned() }
}

const LONG: LockOp = LockOp::Acquire { ttl_ms: 60_000 };

fn held_and_released() -> Vec<LockCall> {
    vec![
        call(0, 0, 1, LONG, acquired("a", 5)),
        call(1, 2, 3, LONG, LockAnswer::Refused),
        call(0, 4, 5, release("a"), LockAnswer::Done),
        call(1, 6, 7, LONG, acquired("b", 8)),
        call(0, 8, 9, release("a"), LockAnswer::Refused),
    ]
}

#[test]
fn a_lock_passed_on_is_accepted() {
    accepted(check_lock(&held_and_released()));
}

#[test]
fn museum_a_lock_granted_twice_is_refuted() {
    let history = [call(0, 0, 1, LONG, acquired("a", 5)), call(1, 2, 3, LONG, acquired("b", 6))];
    refuted(check_lock(&history));
}

#[test]
fn museum_a_fence_that_goes_back_is_refuted() {
    let mut history = held_and_released();
    history[3].answer = Some(acquired("b", 4));
    refuted(check_lock(&history));
}

#[test]
fn museum_a_stale_token_that_still_works_is_refuted() {
    let mut history = held_and_released();
    history[4].answer = Some(LockAnswer::Done);
    refuted(check_lock(&history));
}

#[test]
fn f2_a_lock_may_run_out_after_its_ttl_and_not_before() {
    let short = LockOp::Acquire { ttl_ms: 100 };
    let late =
        [call(0, 0, 1, short.clone(), acquired("a", 5)), call(1, 101, 102, LONG, acquired("b", 6))];
    accepted(check_lock(&late));
    let early =
        [call(0, 0, 1, short.clone(), acquired("a", 5)), call(1, 50, 60, LONG, acquired("b", 6))];
    refuted(check_lock(&early));
    // A renewal moves the instant.
    let renewed = [
        call(0, 0, 1, short, acquired("a", 5)),
        call(0, 50, 60, LockOp::Renew { token: "a".to_owned(), ttl_ms: 100 }, LockAnswer::Done),
        call(1, 120, 130, LONG, acquired("b", 6)),
    ];
    refuted(check_lock(&renewed));
}

#[test]
fn an_unknown_acquisition_explains_a_refusal() {
    let history = [
        open(0, 0, LockOp::Acquire { ttl_ms: 100 }),
        call(1, 10, 20, LONG, LockAnswer::Refused),
        call(1, 150, 160, LONG, acquired("b", 6)),
    ];
    accepted(check_lock(&history));
    let alone = [call(1, 10, 20, LONG, LockAnswer::Refused)];
    refuted(check_lock(&alone));
}

fn granted(ticket: u64, fence: u64, previous: Option<u64>) -> TurnAnswer {
    TurnAnswer::Granted { ticket, fence, previous }
}

fn take(client: usize, start: u64, session: u64, ticket: u64) -> TurnCall {
    call(client, start, start + 1, TurnOp::Take { session }, TurnAnswer::Ticket { ticket })
}

fn ask(start: u64, ticket: u64, answer: TurnAnswer) -> TurnCall {
    call(9, start, start + 1, TurnOp::Ask { ticket }, answer)
}

fn end(start: u64, session: u64, ticket: u64) -> TurnCall {
    call(0, start, start + 1, TurnOp::Release { ticket, session }, TurnAnswer::Done)
}

/// Sessions 1 and 2 take a ticket each; the first is handled and released.
fn two_turns() -> Vec<TurnCall> {
    vec![
        take(0, 0, 1, 10),
        take(1, 2, 2, 11),
        ask(4, 10, granted(10, 100, None)),
        ask(6, 11, TurnAnswer::Waiting { ticket: 11, ahead: 1 }),
        end(8, 1, 10),
        ask(10, 11, granted(11, 101, Some(1))),
        ask(12, 10, TurnAnswer::Gone),
    ]
}

#[test]
fn turns_in_order_are_accepted() {
    accepted(check_turns(&two_turns()));
}

#[test]
fn museum_a_turn_granted_twice_is_refuted() {
    let mut history = two_turns();
    history[3].answer = Some(granted(11, 101, Some(1)));
    refuted(check_turns(&history));
}

#[test]
fn museum_turns_out_of_order_are_refuted() {
    let mut history = two_turns();
    history[2].answer = Some(TurnAnswer::Waiting { ticket: 10, ahead: 1 });
    history[3].answer = Some(granted(11, 100, None));
    history.truncate(4);
    refuted(check_turns(&history));
}

#[test]
fn museum_a_ticket_below_the_one_before_is_refuted() {
    let mut history = two_turns();
    history.truncate(1);
    history.push(take(1, 2, 2, 9));
    refuted(check_turns(&history));
}

#[test]
fn museum_a_turns_fence_that_goes_back_is_refuted() {
    let mut history = two_turns();
    history[5].answer = Some(granted(11, 99, Some(1)));
    refuted(check_turns(&history));
}

#[test]
fn museum_a_wrong_previous_holder_is_refuted() {
    for wrong in [None, Some(2)] {
        let mut history = two_turns();
        history[5].answer = Some(granted(11, 101, wrong));
        refuted(check_turns(&history));
    }
}

#[test]
fn museum_an_orphan_ticket_is_refuted() {
    // One ticket was asked for, two are in the queue.
    let history = [
        take(0, 0, 1, 10),
        end(2, 1, 10),
        take(0, 4, 1, 12),
        ask(6, 12, TurnAnswer::Waiting { ticket: 12, ahead: 1 }),
    ];
    refuted(check_turns(&history));
}

#[test]
fn an_unknown_ticket_may_stand_in_the_way_until_its_session_ends() {
    let history = [
        open(0, 0, TurnOp::Take { session: 1 }),
        take(1, 2, 2, 11),
        ask(4, 11, TurnAnswer::Waiting { ticket: 11, ahead: 1 }),
        call(0, 6, 7, TurnOp::Close { session: 1 }, TurnAnswer::Done),
        ask(8, 11, granted(11, 101, Some(1))),
    ];
    accepted(check_turns(&history));
    let without: Vec<TurnCall> = history[1..].to_vec();
    refuted(check_turns(&without));
}

#[test]
fn a_search_that_meets_its_bound_says_so() {
    let mut history = held_and_released();
    history[4].answer = Some(LockAnswer::Done);
    assert!(matches!(check_within(&Lock, &history, 2), Verdict::GaveUp { visited: 2 }));
}

#[test]
fn museum_the_turn_log_shows_overlap_order_and_fences() {
    let held =
        |ticket, fence, start, end| Held { chat: "demo:a".into(), ticket, fence, start, end };
    assert_eq!(faults(&[held(1, 5, 0, 10), held(2, 6, 10, 20)]), []);
    let chat = || "demo:a".to_owned();
    assert_eq!(
        faults(&[held(1, 5, 0, 11), held(2, 6, 10, 20)]),
        [Fault::Overlap { chat: chat(), first: 5, second: 6 }]
    );
    assert_eq!(
        faults(&[held(1, 5, 0, 10), held(2, 5, 10, 20)]),
        [Fault::FenceWentBack { chat: chat(), before: 5, after: 5 }]
    );
    assert_eq!(
        faults(&[held(2, 5, 0, 10), held(1, 6, 10, 20)]),
        [Fault::OutOfOrder { chat: chat(), before: 2, after: 1 }]
    );
    let elsewhere = Held { chat: "demo:b".into(), ..held(1, 7, 5, 15) };
    assert_eq!(faults(&[held(2, 6, 0, 10), elsewhere]), []);
}

fn said(number: usize) -> Said {
    Said { id: format!("m{number}"), answer: format!("echo: {number}") }
}

fn reply(number: usize, fence: u64, turn_seq: u64) -> Reply {
    let Said { id, answer } = said(number);
    let (reply, fence) = (format!("r{number}"), Some(fence));
    Reply { id: reply, in_reply_to: id, text: answer, fence, turn_seq }
}

#[test]
fn museum_what_a_user_is_told_shows_what_is_lost_doubled_and_out_of_order() {
    let asked: Vec<Said> = (0..3).map(said).collect();
    let right = [reply(0, 5, 1), reply(1, 5, 2), reply(2, 8, 0)];
    let id = |number: usize| said(number).id;
    assert_eq!(talk::faults(&asked, &right), []);
    let found = talk::faults(&asked, &[right[0].clone(), right[2].clone()]);
    assert_eq!(found, [talk::Fault::Lost { id: id(1) }]);
    // The same text again, and another text to the same message.
    for again in [right[1].clone(), Reply { id: "r9".to_owned(), turn_seq: 3, ..right[1].clone() }]
    {
        let told = [right[0].clone(), right[1].clone(), again, right[2].clone()];
        let found = talk::faults(&asked, &told);
        assert!(found.contains(&talk::Fault::Doubled { id: id(1) }), "{found:?}");
    }
    let found = talk::faults(&asked, &[reply(1, 5, 1), reply(0, 5, 2), reply(2, 8, 0)]);
    assert_eq!(found, [talk::Fault::OutOfOrder { id: id(0), behind: id(1) }]);
    for (fence, turn_seq) in [(4, 9), (5, 1)] {
        let found =
            talk::faults(&asked, &[reply(0, 5, 1), reply(1, fence, turn_seq), reply(2, 8, 0)]);
        let (before, after) = ((5, 1), (fence, turn_seq));
        assert_eq!(found, [talk::Fault::NumberWentBack { id: id(1), before, after }]);
    }
    let wrong = Reply { text: "Where to?".to_owned(), ..right[2].clone() };
    let found = talk::faults(&asked, &[right[0].clone(), right[1].clone(), wrong]);
    assert_eq!(found, [talk::Fault::WrongText { id: id(2), text: "Where to?".to_owned() }]);
    let found = talk::faults(&asked[..2], &right);
    assert_eq!(found, [talk::Fault::Unasked { id: id(2) }]);
}

// ------------------------------------------------------------------------- a server in this process

const SMALL: Size = Size { clients: 4, rounds: 8, stall: Duration::from_secs(4) };

/// How many of these histories pass, and how many are refuted.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: usize,
    refuted: usize,
}

impl Tally {
    fn count(&mut self, verdict: &Verdict) {
        match verdict {
            Verdict::Linearizable => self.passed += 1,
            Verdict::Refuted(_) => self.refuted += 1,
            Verdict::GaveUp { visited } => panic!("gave up after {visited}"),
        }
    }
}

/// What kinds of history to take.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Checkpoints,
    Locks,
    Turns,
}

/// Takes histories of one kind, several at a time, and checks them.
async fn tally(api: &Api, kind: Kind, prefix: &str, histories: u64) -> Tally {
    let mut running = tokio::task::JoinSet::new();
    for number in 0..histories {
        let (api, prefix) = (api.clone(), prefix.to_owned());
        running.spawn(async move {
            let key = format!("demo:k{number}");
            match kind {
                Kind::Checkpoints => {
                    let taken = workload::checkpoints(&api, &prefix, &key, number, SMALL).await;
                    check_checkpoint(&taken)
                }
                Kind::Locks => {
                    check_lock(&workload::locks(&api, &prefix, &key, number, SMALL).await)
                }
                Kind::Turns => {
                    let taken = workload::turns(&api, &prefix, &key, number, SMALL).await;
                    let verdict = check_turns(&taken.calls);
                    if verdict.is_linearizable() {
                        assert_eq!(faults(&taken.log), [], "the log of an accepted history");
                    }
                    verdict
                }
            }
        });
    }
    let mut tally = Tally::default();
    while let Some(verdict) = running.join_next().await {
        match verdict.unwrap() {
            Verdict::Refuted(text) if tally.refuted == 0 => {
                println!("{text}");
                tally.refuted += 1;
            }
            verdict => tally.count(&verdict),
        }
    }
    tally
}

const KINDS: [Kind; 3] = [Kind::Checkpoints, Kind::Locks, Kind::Turns];

#[tokio::test(flavor = "multi_thread")]
async fn a_right_server_that_loses_answers_is_accepted() {
    let address = simulated::start(Bug::None, 0.08).await;
    let bases = vec![format!("http://{address}"); 3];
    let api = Api::new(bases, "secret");
    for kind in KINDS {
        let tally = tally(&api, kind, "right", 30).await;
        assert_eq!(tally, Tally { passed: 30, refuted: 0 });
    }
    // The run has to have met what it is about.
    let count = |counter: &std::sync::atomic::AtomicUsize| {
        counter.load(std::sync::atomic::Ordering::Relaxed)
    };
    assert!(count(&api.counts.settled_by_retry) > 50, "{:?}", api.counts);
    assert!(count(&api.counts.unknown) > 0, "{:?}", api.counts);
    assert!(count(&api.counts.answered_twice) > 10, "{:?}", api.counts);
    assert_eq!(*api.counts.differing.lock().unwrap(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn museum_every_bug_of_a_wrong_server_is_caught() {
    let bugs = [
        (Bug::StaleRead, Kind::Checkpoints),
        (Bug::LostUpdate, Kind::Checkpoints),
        (Bug::Forgets, Kind::Checkpoints),
        (Bug::RevisionAgain, Kind::Checkpoints),
        (Bug::DoubleLock, Kind::Locks),
        (Bug::FenceBack, Kind::Locks),
        (Bug::EarlyExpiry, Kind::Locks),
        (Bug::StaleRelease, Kind::Locks),
        (Bug::DoubleTurn, Kind::Turns),
        (Bug::Overtakes, Kind::Turns),
        (Bug::RunsAgain, Kind::Turns),
        (Bug::NoPrevious, Kind::Turns),
    ];
    for (bug, kind) in bugs {
        let address = simulated::start(bug, 0.05).await;
        let api = Api::new(vec![format!("http://{address}"); 3], "secret");
        let tally = tally(&api, kind, "wrong", 12).await;
        println!("{bug:?}: {tally:?}");
        assert!(tally.refuted > 0, "{bug:?} went unseen: {tally:?}");
    }
}

// ------------------------------------------------------------------- the real group, tampered with

#[tokio::test(flavor = "multi_thread")]
async fn museum_a_stale_read_and_a_double_grant_planted_before_a_real_group_are_caught() {
    let cluster = Cluster::start(Options::nodes(3)).await;
    let honest = cluster.api();
    // The very same calls without the proxy are linearizable.
    for (kind, prefix) in KINDS.into_iter().zip(["right-c", "right-l", "right-t"]) {
        let tally = tally(&honest, kind, prefix, 8).await;
        assert_eq!(tally, Tally { passed: 8, refuted: 0 });
    }
    for (tamper, kind, prefix) in [
        (Tamper::StaleReads, Kind::Checkpoints, "stale-c"),
        (Tamper::DoubleGrants, Kind::Locks, "double-l"),
        (Tamper::DoubleGrants, Kind::Turns, "double-t"),
    ] {
        let mut bases = Vec::new();
        let mut proxies = Vec::new();
        for node in &cluster.nodes {
            let proxy = proxy::start(tamper, node.base()).await;
            bases.push(proxy.base());
            proxies.push(proxy);
        }
        let tally = tally(&honest.through(bases), kind, prefix, 8).await;
        let struck: usize = proxies.iter().map(proxy::Running::struck).sum();
        println!("{tamper:?}: {tally:?}, {struck} answers changed");
        assert!(struck > 0);
        assert!(tally.refuted > 0, "{tamper:?} went unseen: {tally:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn museum_a_reply_lost_doubled_swapped_or_under_an_old_fence_before_a_real_group_is_caught() {
    const PATIENCE: Duration = Duration::from_secs(60);
    let cluster = Cluster::start(Options::nodes(3)).await;
    let honest = cluster.public();
    let mut random = StdRng::seed_from_u64(7);
    let mut chat = Chat::new(&Demo::new(honest.clone()), "right".to_owned(), PATIENCE);
    chat.order(&mut random).await;
    chat.chatter(&mut random).await;
    assert_eq!(chat.faults().await, Vec::<String>::new());
    for (tamper, fault) in [
        (Tamper::LosesReply, "Lost"),
        (Tamper::DoublesReply, "Doubled"),
        (Tamper::SwapsReplies, "OutOfOrder"),
        (Tamper::FenceBack, "NumberWentBack"),
    ] {
        let mut bases = Vec::new();
        let mut proxies = Vec::new();
        for node in &cluster.nodes {
            let proxy = proxy::start(tamper, node.public_base()).await;
            bases.push(proxy.base());
            proxies.push(proxy);
        }
        let demo = Demo::new(honest.through(bases));
        let mut chat = Chat::new(&demo, format!("{tamper:?}"), PATIENCE);
        for number in 0..4 {
            chat.say(number, "hello", "echo: hello").await;
        }
        let found = chat.faults().await;
        let struck: usize = proxies.iter().map(proxy::Running::struck).sum();
        assert!(struck > 0);
        assert!(found.iter().any(|found| found.contains(fault)), "{tamper:?}: {found:?}");
    }
}
