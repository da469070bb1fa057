//! A thousand histories of checkpoints, locks and turns, taken while leaders die (SPEC K6).
//!
//! Many keys are worked on at a time, each by clients that go through all three nodes, while the
//! leader is killed with SIGKILL and restarted again and again. Every history must be
//! linearizable. That the checker and the clients would notice is shown in `tests/museum.rs`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::fs::FlockOperation;
use tokio::sync::Semaphore;

use support::api::Api;
use support::cluster::{Cluster, Options};
use support::histories::History;
use support::session::Prefix;
use support::turnlog::{Held, faults};
use support::workload::Size;

/// A third of each kind.
const HISTORIES: u64 = 1_020;
/// Keys worked on at a time.
const AT_A_TIME: usize = 90;
const SIZE: Size = Size { clients: 4, rounds: 6, stall: Duration::from_secs(30) };
/// A round of turns is more calls than one of the others.
const TURNS: Size = Size { rounds: 4, ..SIZE };

/// One history, and what it ran through.
struct Taken {
    history: History,
    /// Kills that fell between its first and its last call.
    kills: usize,
}

impl Taken {
    async fn take(api: &Api, number: u64, kills: &AtomicUsize) -> Self {
        let before = kills.load(Ordering::Relaxed);
        let history = History::take(api, "lin", number, (SIZE, TURNS)).await;
        Self { history, kills: kills.load(Ordering::Relaxed) - before }
    }
}

/// Checks all histories, on every processor.
fn check_all(histories: &[Taken]) -> Vec<String> {
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let part = histories.len().div_ceil(threads);
    std::thread::scope(|scope| {
        let parts: Vec<_> = histories
            .chunks(part)
            .map(|part| {
                scope.spawn(|| {
                    part.iter().filter_map(|taken| taken.history.fault()).collect::<Vec<_>>()
                })
            })
            .collect();
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
    })
}

/// Kills the leader, waits for the next one, brings the dead one back; until told to stop.
async fn kill_leaders(
    mut cluster: Cluster,
    stop: Arc<AtomicBool>,
    kills: Arc<AtomicUsize>,
) -> Cluster {
    let mut random = StdRng::seed_from_u64(6);
    while !stop.load(Ordering::Relaxed) {
        let pause = Duration::from_millis(random.random_range(300..1_500));
        tokio::time::sleep(pause).await;
        let leader = cluster.leader().await;
        cluster.nodes[leader].kill();
        kills.fetch_add(1, Ordering::Relaxed);
        // The survivors have to elect by themselves; the dead one comes back afterwards.
        cluster.leader().await;
        cluster.restart(leader).await;
    }
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn k6_a_thousand_histories_are_linearizable_while_leaders_die() {
    let cluster = Cluster::start(Options::nodes(3)).await;
    let api = cluster.api();
    let began = Instant::now();
    let stop = Arc::new(AtomicBool::new(false));
    let kills = Arc::new(AtomicUsize::new(0));
    let killer = tokio::spawn(kill_leaders(cluster, stop.clone(), kills.clone()));

    // Phase 1: take the histories while the killer works.
    let slots = Arc::new(Semaphore::new(AT_A_TIME));
    let mut running = tokio::task::JoinSet::new();
    for number in 0..HISTORIES {
        let (api, kills, slots) = (api.clone(), kills.clone(), slots.clone());
        running.spawn(async move {
            let _slot = slots.acquire_owned().await;
            Taken::take(&api, number, &kills).await
        });
    }
    let mut histories = Vec::new();
    while let Some(history) = running.join_next().await {
        histories.push(history.unwrap());
    }
    stop.store(true, Ordering::Relaxed);
    let cluster = killer.await.unwrap();
    let taken = began.elapsed();

    // Phase 2: check them, and say what was seen.
    let wrong = check_all(&histories);
    let calls: usize = histories.iter().map(|taken| taken.history.len()).sum();
    let unknown: usize = histories.iter().map(|taken| taken.history.unknown()).sum();
    let through_a_kill = histories.iter().filter(|taken| taken.kills > 0).count();
    let log: Vec<Held> =
        histories.iter().flat_map(|taken| taken.history.turns()).cloned().collect();
    let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    let counts = &api.counts;
    println!(
        "{} histories, {calls} calls, {} turns, taken in {:.0} s, checked in {:.0} s\n\
         {} leaders killed; {through_a_kill} histories ran through a kill\n\
         {} retries, {} attempts left open, {} calls settled by a retry after one, \
         {unknown} calls unknown, {} answered by two nodes",
        histories.len(),
        log.len(),
        taken.as_secs_f64(),
        (began.elapsed() - taken).as_secs_f64(),
        count(&kills),
        count(&counts.retries),
        count(&counts.open_attempts),
        count(&counts.settled_by_retry),
        count(&counts.answered_twice),
    );
    if !wrong.is_empty() {
        panic!("{} histories are not linearizable; the first:\n{}", wrong.len(), wrong[0]);
    }
    assert_eq!(faults(&log), []);
    assert_eq!(*counts.differing.lock().unwrap(), Vec::<String>::new(), "answers under one key");
    assert_eq!(count(&counts.stalls), 0, "a turn was not granted within {:?}", SIZE.stall);

    // Phase 3: the run has to have met what it is about.
    assert!(histories.len() >= 1_000);
    assert!(count(&kills) >= 3, "only {} leaders were killed", count(&kills));
    assert!(through_a_kill >= histories.len() / 4, "only {through_a_kill} histories met a kill");
    assert!(unknown > 0 && count(&counts.settled_by_retry) > 0, "no outcome was ever in doubt");

    // Phase 4: and all three nodes hold the same.
    cluster.states_are_equal().await;
}

/// A lease that does not run out within a test.
const LONG_MS: u64 = 600_000;

/// The leader dies within the milliseconds in which it grants the turns of many chats at once.
/// `TEST_KILLS=500` for the whole of it.
#[tokio::test(flavor = "multi_thread")]
async fn case_c10_a_leader_that_dies_in_the_instant_of_a_grant_grants_nothing_twice() {
    const CHATS: usize = 24;
    let kills = std::env::var("TEST_KILLS").map_or(10, |kills| kills.parse().unwrap());
    let mut cluster = Cluster::start(Options::nodes(3)).await;
    let mut random = StdRng::seed_from_u64(10);
    let mut log: Vec<Held> = Vec::new();
    for round in 0..kills {
        let prefix = Prefix::new(cluster.api(), format!("c10-{}", round / 10));
        let leader = cluster.leader().await;
        let (here, there) = ((leader + 1) % 3, (leader + 2) % 3);
        let (first, second) = (prefix.open(here, LONG_MS).await, prefix.open(there, LONG_MS).await);
        let mut handing = tokio::task::JoinSet::new();
        for chat in 0..CHATS {
            let key = format!("demo:{round}-{chat}");
            let held = prefix.take(here, first, &key).await;
            let start = prefix.api.now();
            let next = prefix.take(there, second, &key).await;
            assert_eq!((next.fence, next.ahead), (None, 1), "{key}");
            let prefix = prefix.clone();
            handing.spawn(async move {
                let end = prefix.api.now();
                prefix.release(here, first, held.ticket).await;
                let granted = prefix.granted(there, next.ticket, SIZE.stall).await;
                let again = prefix.api.now();
                let (chat, fence) = (key.clone(), held.fence.unwrap());
                let one = Held { chat, ticket: held.ticket, fence, start, end };
                let fence = granted.fence.unwrap();
                let two =
                    Held { chat: key, ticket: next.ticket, fence, start: again, end: again + 1 };
                prefix.release(there, second, next.ticket).await;
                [one, two]
            });
        }
        tokio::time::sleep(Duration::from_micros(random.random_range(0..4_000))).await;
        cluster.nodes[leader].kill();
        while let Some(handed) = handing.join_next().await {
            log.extend(handed.unwrap());
        }
        cluster.restart(leader).await;
    }
    assert_eq!(log.len(), kills * CHATS * 2);
    assert_eq!(faults(&log), []);
    let fences: std::collections::BTreeSet<u64> = log.iter().map(|held| held.fence).collect();
    assert_eq!(fences.len(), log.len(), "a fence was given twice");
    cluster.states_are_equal().await;
}

/// Three event loops, each with a node of its own, and a section that the kernel guards: nobody ever
/// finds it taken.
#[tokio::test(flavor = "multi_thread")]
async fn case_c7_a_turn_excludes_others_also_where_they_share_no_event_loop() {
    const EACH: usize = 40;
    let cluster = Cluster::start(Options::nodes(3)).await;
    let section = cluster.root().join("section");
    std::fs::write(&section, "0").unwrap();
    let work = |node: usize| {
        // Its connections belong to the loop that makes them.
        let prefix = Prefix::new(cluster.api(), "c7");
        let section = section.clone();
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let session = prefix.open(node, LONG_MS).await;
                for _ in 0..EACH {
                    let place = prefix.take(node, session, "demo:one").await;
                    prefix.granted(node, place.ticket, SIZE.stall).await;
                    let file = std::fs::File::open(&section).unwrap();
                    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
                        .expect("nobody else is in the section");
                    let counted: usize =
                        std::fs::read_to_string(&section).unwrap().parse().unwrap();
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    std::fs::write(&section, (counted + 1).to_string()).unwrap();
                    drop(file);
                    prefix.release(node, session, place.ticket).await;
                }
            });
        }
    };
    let workers = [0, 1, 2].map(|node| std::thread::spawn(work(node)));
    let ended = tokio::task::spawn_blocking(|| workers.map(std::thread::JoinHandle::join));
    for worker in ended.await.unwrap() {
        worker.unwrap();
    }
    assert_eq!(std::fs::read_to_string(&section).unwrap(), (3 * EACH).to_string());
}
