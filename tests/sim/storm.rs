//! What happens to a simulated group, from its seed, and what has to be true of it afterwards.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use botmesh::raft::NodeLimits;
use botmesh::testing::{Sim, SimCluster, SimReport, SimUser};

use crate::load::{self, Bugs, Record};

/// For how long things happen.
const STORM: Duration = Duration::from_millis(900);
/// A snapshot every so many entries, so that whoever was away for long is sent one.
const SNAPSHOT_EVERY: u64 = 20;
/// The most that a boot clock runs wrong, in millionths: leases of half a second bear sixteen hundredths.
const DRIFT_PPM: u64 = 30_000;

/// What is done to the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Crash,
    CrashLeader,
    CrashAll,
    Vanish,
    Pause,
    PauseLong,
    Cut,
    CutOneWay,
    Isolate,
    SlowDisk,
    SlowLink,
    Weather,
}

pub(crate) const KINDS: [Kind; 12] = [
    Kind::Crash,
    Kind::CrashLeader,
    Kind::CrashAll,
    Kind::Vanish,
    Kind::Pause,
    Kind::PauseLong,
    Kind::Cut,
    Kind::CutOneWay,
    Kind::Isolate,
    Kind::SlowDisk,
    Kind::SlowLink,
    Kind::Weather,
];

/// How one seed went.
pub(crate) struct Run {
    pub(crate) report: SimReport<BTreeMap<Kind, u64>>,
    pub(crate) record: Arc<Record>,
    /// Everything that is wrong.
    pub(crate) faults: Vec<String>,
}

/// The group of a seed; its clocks are wrong within what leases bear.
pub(crate) fn group(seed: u64) -> SimCluster {
    let drift = |salt: u64| {
        let mixed = (seed.wrapping_add(salt)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        (mixed % (2 * DRIFT_PPM + 1)) as i64 - DRIFT_PPM as i64
    };
    let limits = NodeLimits::snapshots_every(SNAPSHOT_EVERY);
    (0..3).fold(SimCluster::new(3).seed(seed).limits(limits), |group, host| {
        group.clocks(host, drift(host as u64), drift(host as u64 + 9) / 10)
    })
}

/// What is to happen.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Out of these.
    pub(crate) kinds: Vec<Kind>,
    /// Users who order.
    pub(crate) users: usize,
    /// What is done wrong on purpose.
    pub(crate) bugs: Bugs,
    /// Every disk says that it has synced what it has not.
    pub(crate) disks_lie: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self { kinds: KINDS.to_vec(), users: 1, bugs: Bugs::default(), disks_lie: false }
    }
}

/// Runs a seed.
pub(crate) fn run(seed: u64) -> Run {
    run_in(group(seed), Plan::default())
}

/// Runs a group by a plan.
pub(crate) fn run_in(group: SimCluster, plan: Plan) -> Run {
    let record = Arc::new(Record::new(plan.bugs));
    let (noting, replicas) = (record.clone(), record.clone());
    let group = group.replicas(move |replica| load::all(replica, replicas.clone()));
    let report = group.report(|sim| async move {
        (0..3).filter(|_| plan.disks_lie).for_each(|host| sim.disk_lies(host));
        sim.led().await;
        let names = ["ann", "bob"].into_iter().take(plan.users);
        let users = names.map(|name| orders(sim.user("x", name), sim.clone()));
        let users = futures_util::future::join_all(users);
        let (kinds, _) = futures_util::future::join(storm(&sim, &plan.kinds), users).await;
        // Everybody is idle, and has the same.
        noting.stop();
        sim.sleep(Duration::from_millis(600)).await;
        kinds
    });
    let mut faults = report.faults.clone();
    faults.extend(record.faults());
    Run { report, record, faults }
}

/// A user's order, word for word: nothing is lost, doubled or out of order.
async fn orders(user: SimUser, sim: Sim) {
    while sim.now() < STORM {
        user.says("order").await.hears("What would you like?").await;
        user.says("tea").await.hears("How many?").await;
        user.says("2").await.hears("Where to?").await;
        user.says("5 Elm St").await.hears("Confirm? (yes/no)").await;
        user.says("yes").await.hears("Ordered: 2 × tea, to 5 Elm St.").await;
    }
}

async fn storm(sim: &Sim, kinds: &[Kind]) -> BTreeMap<Kind, u64> {
    let began = sim.now();
    let done: Cell<BTreeMap<Kind, u64>> = Cell::default();
    let one = |number: u64| {
        let done = &done;
        async move {
            sim.sleep(Duration::from_millis(sim.random(200 + number))).await;
            while sim.now() - began < STORM {
                let kind = kinds[sim.random(kinds.len() as u64) as usize];
                strike(sim, kind).await;
                let mut counts = done.take();
                *counts.entry(kind).or_default() += 1;
                done.set(counts);
                sim.sleep(Duration::from_millis(20 + sim.random(150))).await;
            }
        }
    };
    futures_util::future::join(one(0), one(1)).await;
    sim.heal();
    for host in 0..sim.hosts() {
        sim.resume(host).await;
        sim.restart(host).await;
    }
    done.take()
}

async fn strike(sim: &Sim, kind: Kind) {
    let host = sim.random(3) as usize;
    let other = (host + 1 + sim.random(2) as usize) % 3;
    let ms = |most: u64| Duration::from_millis(20 + sim.random(most));
    match kind {
        Kind::Crash => down(sim, &[host], ms(700)).await,
        Kind::CrashLeader => down(sim, &[sim.leader().unwrap_or(host)], ms(500)).await,
        Kind::CrashAll => down(sim, &[0, 1, 2], ms(300)).await,
        Kind::Vanish => {
            sim.vanish(host).await;
            sim.sleep(ms(700)).await;
            sim.restart(host).await;
        }
        Kind::Pause | Kind::PauseLong => {
            sim.pause(host).await;
            sim.sleep(if kind == Kind::Pause { ms(200) } else { ms(900) }).await;
            sim.resume(host).await;
        }
        Kind::Cut => sim.cut(host, other),
        Kind::CutOneWay => sim.cut_one_way(host, other),
        Kind::Isolate => sim.isolate(sim.leader().unwrap_or(host)),
        Kind::SlowDisk => sim.slow_disk(host, ms(250)),
        Kind::SlowLink => sim.delay(host, other, ms(120)),
        Kind::Weather => sim.weather(20, 30, ms(25)),
    }
    if kind >= Kind::Cut {
        sim.sleep(ms(700)).await;
        sim.heal();
    }
}

async fn down(sim: &Sim, hosts: &[usize], time: Duration) {
    for host in hosts {
        sim.crash(*host).await;
    }
    sim.sleep(time).await;
    for host in hosts {
        sim.restart(*host).await;
    }
}
