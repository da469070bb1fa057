//! A group of real processes to which everything happens (DESIGN 11; issue *failure*).
//!
//! Three nodes with the demo bot. Users talk to it and programs use turns, locks and checkpoints,
//! through all nodes, while faults come out of a seed ([`nemesis::plan`]), one at a time. What the
//! users are told is judged by `support/talk`, what the programs saw by `support/linearize` and
//! `support/turnlog`; that these would notice is shown in `tests/museum.rs`. After each fault all of
//! the group has to serve again within a bound. A run that met too few kinds of fault fails as
//! *coverage*: it has shown nothing.
//!
//! Here every kind once. `cluster/soak.sh --minutes N [--seed S]` goes on for as long as asked.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;
mod nemesis {
    pub(crate) mod load;
    pub(crate) mod overload;
    pub(crate) mod plan;
    pub(crate) mod strike;
}

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use nemesis::load::{Doors, Load, Seen};
use nemesis::plan::{ALL, Kind, Plan};
use nemesis::strike::{Nemesis, READY_AGAIN, possible};
use support::demo::Demo;

/// One attempt at a node may take so long: it may be frozen.
const ATTEMPT: Duration = Duration::from_secs(3);
/// Users at a time.
const USERS: u64 = 6;
/// Programs at a time.
const PROGRAMS: u64 = 3;
/// A run that met fewer kinds of fault than this has shown nothing.
const KINDS_MIN: usize = 12;

fn number(name: &str) -> Option<f64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// What was done: how often each kind, and how long the group took to serve again.
type Done = BTreeMap<Kind, Vec<Duration>>;

fn percentile(times: &mut [Duration], part: f64) -> Duration {
    times.sort_unstable();
    let last = times.len().saturating_sub(1) as f64;
    times.get((last * part) as usize).copied().unwrap_or_default()
}

fn summary(seed: u64, took: Duration, done: &Done, seen: &mut Seen) {
    let faults: usize = done.values().map(Vec::len).sum();
    println!("seed {seed}: {faults} faults of {} kinds in {:.1} min", done.len(), minutes(took));
    for (kind, times) in done {
        let mut times = times.clone();
        let name = format!("{kind:?}");
        let (middle, most) = (percentile(&mut times, 0.5), percentile(&mut times, 1.0));
        println!(
            "  {name:<18} {:>5}   all serve again after {middle:>7.2?} (p50), {most:>7.2?} (max)",
            times.len()
        );
    }
    let Seen { messages, chats, histories, calls, unknown, turns, violations, waits } = seen;
    println!("  {messages} messages in {chats} chats, each answered once and in order");
    println!(
        "  a user waited {:.2?} (p50), {:.2?} (p99), {:.2?} (max)",
        percentile(waits, 0.5),
        percentile(waits, 0.99),
        percentile(waits, 1.0)
    );
    println!("  {histories} histories of {calls} calls ({unknown} unknown), {turns} turns");
    println!("  {} violations", violations.len());
}

fn minutes(time: Duration) -> f64 {
    time.as_secs_f64() / 60.0
}

#[tokio::test(flavor = "multi_thread")]
async fn b1_e2_g1_k6_the_group_keeps_its_word_whatever_fails() {
    let seed = number("TEST_SEED").map_or(1, |seed| seed as u64);
    let lasts = number("TEST_SOAK_MINUTES").map(|minutes| minutes * 60.0);
    let (mut nemesis, impossible) = Nemesis::start(ATTEMPT).await;
    for (kind, why) in &impossible {
        eprintln!("SKIPPED {kind:?}: {why}");
    }
    let kinds = possible(&impossible);
    println!("seed {seed}, {} kinds of fault: {kinds:?}", kinds.len());

    // Phase 1: users and programs work, and all is well.
    let doors = Doors {
        demo: Demo::new(nemesis.cluster.public().impatient(ATTEMPT)),
        api: nemesis.cluster.api().impatient(ATTEMPT),
    };
    let mut load = Load::start(&doors, seed, USERS, PROGRAMS);
    let began = Instant::now();

    // Phase 2: one fault after the other. Each kind once at the least.
    let mut done = Done::new();
    for (number, fault) in Plan::new(seed, &kinds).enumerate() {
        let enough = lasts.is_none_or(|lasts| began.elapsed().as_secs_f64() >= lasts);
        if number >= kinds.len() && enough {
            break;
        }
        tokio::time::sleep(fault.calm).await;
        let at = began.elapsed();
        println!("{at:>8.1?}  {fault:?}");
        let took = nemesis.strike(&fault).await;
        println!("{:>8.1?}  all serve again after {took:.2?}", began.elapsed());
        done.entry(fault.kind).or_default().push(took);
        load.check();
    }
    let took = began.elapsed();

    // Phase 3: all come to an end of what they do, and what they saw was right.
    let mut seen = load.stop().await;
    for mut chat in std::mem::take(&mut nemesis.chats) {
        seen.violations.extend(chat.faults().await);
        seen.messages += chat.said();
        seen.chats += 1;
    }
    summary(seed, took, &done, &mut seen);
    assert!(seen.violations.is_empty(), "violations: {:#?}", seen.violations);
    let counts = &doors.api.counts;
    assert_eq!(*counts.differing.lock().unwrap(), Vec::<String>::new(), "answers under one key");
    assert_eq!(counts.stalls.load(Relaxed), 0, "a turn was not granted in time");
    nemesis.cluster.states_are_equal().await;
    for node in &nemesis.cluster.nodes {
        assert!(!node.printed().contains("panicked at"), "{}:\n{}", node.name, node.printed());
    }

    // Phase 4: the run has to have met what it is about.
    let (passed, strangers) = nemesis.links.counts();
    println!("  {passed} connections between nodes, {strangers} of unknown nodes");
    assert!(strangers * 5 <= passed, "coverage: whose links were cut is not known");
    assert!(done.len() >= KINDS_MIN, "coverage: only {} kinds of fault: {done:?}", done.len());
    assert!(seen.unknown > 0 || counts.settled_by_retry.load(Relaxed) > 0, "coverage: no doubt");
    assert!(seen.messages >= 100 && seen.histories >= 10, "coverage: {seen:?}");
}

#[test]
fn a_seed_is_a_schedule() {
    let faults = |seed| Plan::new(seed, &ALL).take(3 * ALL.len()).collect::<Vec<_>>();
    assert_eq!(faults(7), faults(7));
    assert_ne!(faults(7), faults(8));
    let mut first: Vec<Kind> = faults(7)[..ALL.len()].iter().map(|fault| fault.kind).collect();
    first.sort();
    assert_eq!(first, ALL, "every kind comes before any comes again");
    assert!(READY_AGAIN > nemesis::strike::LEASE);
}
