//! The simulated group (SPEC I3): exact replay, a sweep over many seeds, and bugs put in on purpose.
//!
//! `BOTMESH_SEEDS=5000 cargo nextest run --test sim -E 'test(/sweep/)'` sweeps further, and
//! `BOTMESH_SEED=17` runs the one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(unreachable_pub, reason = "a module of a test binary has nobody to be reachable for")]

#[path = "support/linearize.rs"]
#[allow(dead_code, reason = "each test binary uses its own part of this module")]
mod linearize;
#[path = "sim/load.rs"]
mod load;
#[path = "support/models.rs"]
#[allow(dead_code, reason = "each test binary uses its own part of this module")]
mod models;
#[path = "sim/storm.rs"]
mod storm;
#[path = "support/turnlog.rs"]
mod turnlog;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use botmesh::store::{Authority, Consistency, Expect, Op, RowKey, Store as _, Table};
use botmesh::testing::{SimCluster, SimCounts};
use load::Bugs;
use parking_lot::Mutex;
use storm::{Kind, Plan, Run};

/// Seeds of the sweep where nobody asks for more: six to seven minutes of processor time, on every core.
const SEEDS: u64 = 500;

#[test]
fn i3_an_order_survives_whatever_crashes() {
    let group = SimCluster::new(3).seed(42).replicas(load::bot);
    group.run(|sim| async move {
        let ann = sim.user("x", "ann");
        ann.says("order").await.hears("What would you like?").await;
        sim.crash(sim.led().await).await;
        ann.says("tea").await.hears("How many?").await;
        for host in 0..3 {
            sim.crash(host).await;
            sim.restart(host).await;
        }
        ann.says("2").await.hears("Where to?").await;
    });
}

#[test]
fn i3_the_same_seed_does_the_same_again() {
    let run = |seed| storm::run_in(storm::group(seed).keep_lines(), Plan::default()).report;
    let (one, two) = (run(1), run(1));
    let differs = one.lines.iter().zip(&two.lines).position(|(one, two)| one != two);
    if let Ok(dir) = std::env::var("BOTMESH_SIM_LINES") {
        std::fs::write(format!("{dir}/one"), one.lines.join("\n")).unwrap();
        std::fs::write(format!("{dir}/two"), two.lines.join("\n")).unwrap();
    }
    assert_eq!(differs, None, "{:?}", differs.map(|at| (&one.lines[at], &two.lines[at])));
    assert_eq!((one.trace, one.counts), (two.trace.clone(), two.counts));
    assert_ne!(two.trace, run(2).trace);
}

#[test]
fn i3_the_same_seed_does_the_same_in_another_process() {
    const NAME: &str = "i3_the_same_seed_does_the_same_in_another_process";
    const CHILD: &str = "BOTMESH_SIM_CHILD";
    let trace = storm::run(7).report.trace;
    if std::env::var_os(CHILD).is_some() {
        println!("trace={trace}");
        return;
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(said.contains(&format!("trace={trace}")), "{trace} is not in {said}");
}

/// So long a run has a test of its own: whoever is sent a snapshot has missed some hundred entries.
#[test]
fn i3_a_node_that_was_away_for_long_is_sent_a_snapshot() {
    let report = storm::group(5).report(|sim| async move {
        let leader = sim.led().await;
        let away = (leader + 1) % 3;
        sim.until("all", || (0..3).all(|host| sim.is_up(host))).await;
        sim.crash(away).await;
        let written = sim.on(leader, |replica| async move {
            let store = replica.store(&botmesh::types::Prefix::new("rows").unwrap());
            for number in 0..700u64 {
                let row = RowKey::new(Table::Checkpoint, format!("x:{}", number % 9));
                let (value, expect) = (number.to_be_bytes().to_vec(), Expect::Any);
                let put = Op::Put { row, value, expect, ttl_ms: None };
                store.commit(Authority::Nobody, vec![put]).await.unwrap();
            }
        });
        written.await.unwrap();
        sim.restart(away).await;
        sim.until("the node that was away", || sim.is_up(away)).await;
        let read = sim.on(away, |replica| async move {
            let store = replica.store(&botmesh::types::Prefix::new("rows").unwrap());
            let row = RowKey::new(Table::Checkpoint, "x:6");
            store.read(&row, Consistency::Linearizable).await.unwrap().unwrap().value
        });
        assert_eq!(read.await.unwrap(), 699_u64.to_be_bytes());
        sim.sleep(Duration::from_secs(1)).await;
    });
    assert_eq!(report.faults, Vec::<String>::new());
    assert!(report.counts.snapshots > 0, "{:?}", report.counts);
}

/// What a sweep has to have met, or it has shown nothing.
fn missed(counts: &SimCounts, kinds: &BTreeMap<Kind, u64>) -> Vec<String> {
    let SimCounts { leaders, crashes, crashes_with_loss, vanished, pauses, .. } = *counts;
    let SimCounts { cut, cut_one_way, lost, doubled, overtaken, refused, reset, .. } = *counts;
    let SimCounts { sessions_ended, .. } = *counts;
    let met = [
        ("leaders", leaders),
        ("crashes", crashes),
        ("crashes with loss", crashes_with_loss),
        ("vanished", vanished),
        ("pauses", pauses),
        ("cut", cut),
        ("cut one way", cut_one_way),
        ("lost", lost),
        ("doubled", doubled),
        ("overtaken", overtaken),
        ("refused", refused),
        ("reset", reset),
        ("sessions ended", sessions_ended),
    ];
    let mut missed = Vec::new();
    for (what, times) in met {
        println!("{what:<22}{times:>10}");
        missed.extend((times == 0).then(|| what.to_owned()));
    }
    for kind in storm::KINDS {
        let times = kinds.get(&kind).copied().unwrap_or(0);
        println!("{:<22}{times:>10}", format!("{kind:?}"));
        missed.extend((times == 0).then(|| format!("{kind:?}")));
    }
    missed
}

#[derive(Default)]
struct Sweep {
    counts: SimCounts,
    kinds: BTreeMap<Kind, u64>,
    turns: usize,
    calls: (usize, usize),
    simulated: Duration,
    failed: Vec<(u64, Vec<String>)>,
}

impl Sweep {
    fn take(&mut self, seed: u64, run: std::thread::Result<Run>) {
        let Run { report, record, faults } = match run {
            Ok(run) => run,
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                self.failed.push((seed, vec![text.unwrap_or_else(|| "it panicked".to_owned())]));
                return;
            }
        };
        self.counts += report.counts;
        for (kind, times) in report.output {
            *self.kinds.entry(kind).or_default() += times;
        }
        self.turns += record.turns();
        let (calls, open) = record.calls();
        (self.calls.0, self.calls.1) = (self.calls.0 + calls, self.calls.1 + open);
        self.simulated += report.elapsed;
        if !faults.is_empty() {
            self.failed.push((seed, faults));
        }
    }
}

#[test]
fn i3_a_sweep_over_many_seeds_finds_nothing_and_misses_no_fault() {
    let number = |name| std::env::var(name).ok().map(|text: String| text.parse::<u64>().unwrap());
    let seeds = match number("BOTMESH_SEED") {
        Some(seed) => seed..seed + 1,
        None => 1..number("BOTMESH_SEEDS").unwrap_or(SEEDS) + 1,
    };
    let whole = seeds.end - seeds.start >= 100;
    let began = Instant::now();
    let (next, sweep) = (AtomicU64::new(seeds.start), Mutex::<Sweep>::default());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::SeqCst);
                    if seed >= seeds.end {
                        return;
                    }
                    let run = std::panic::catch_unwind(|| storm::run(seed));
                    sweep.lock().take(seed, run);
                }
            });
        }
    });
    let Sweep { counts, kinds, turns, calls, simulated, failed } = sweep.into_inner();
    let missed = missed(&counts, &kinds);
    println!(
        "seeds {seeds:?}: {simulated:?} simulated in {:?}; {} messages, {} entries applied, \
         {turns} turns, {} calls of which {} open",
        began.elapsed(),
        counts.delivered,
        counts.applied,
        calls.0,
        calls.1
    );
    for (seed, faults) in &failed {
        println!("seed {seed}, again by BOTMESH_SEED={seed}:");
        faults.iter().for_each(|fault| println!("  {fault}"));
    }
    assert!(failed.is_empty(), "{} seeds failed", failed.len());
    assert!(!whole || missed.is_empty(), "coverage: the sweep did not meet {missed:?}");
}

// ------------------------------------------------------------------------ bugs put in on purpose

/// Runs a plan with seeds until one shows what is wrong with it.
fn caught(what: &str, plan: &Plan, group: impl Fn(u64) -> SimCluster, is: impl Fn(&str) -> bool) {
    for seed in 1..=40 {
        let run = storm::run_in(group(seed), plan.clone());
        if let Some(fault) = run.faults.iter().find(|fault| is(fault)) {
            println!("{what}: seed {seed}: {fault}");
            return;
        }
    }
    panic!("{what}: nobody noticed");
}

#[test]
fn museum_a_simulated_disk_that_lies_about_its_syncs_is_caught() {
    let kinds = vec![Kind::CrashAll];
    let plan = Plan { kinds, users: 0, disks_lie: true, ..Plan::default() };
    caught("a disk that lies", &plan, storm::group, |_| true);
}

#[test]
fn museum_a_simulated_holder_that_does_not_ask_whether_it_holds_is_caught() {
    let bugs = Bugs { never_checks: true, ..Bugs::default() };
    let plan =
        Plan { kinds: vec![Kind::Isolate, Kind::PauseLong], users: 0, bugs, ..Plan::default() };
    caught("no self-fencing", &plan, storm::group, |fault| fault.contains("Overlap"));
}

#[test]
fn museum_a_simulated_read_that_asks_nobody_is_caught() {
    let bugs = Bugs { reads_locally: true, ..Bugs::default() };
    let plan =
        Plan { kinds: vec![Kind::SlowLink, Kind::Isolate], users: 0, bugs, ..Plan::default() };
    caught("a stale read", &plan, storm::group, |fault| fault.contains("no order explains"));
}
