//! A group of real nodes in one thread, on a simulated network, disk and clock.
//!
//! Problem: what a flow does when its replica dies at the worst moment is seen once in a thousand
//! runs of real processes, and never again. Idea: everything that differs from run to run comes
//! from a seed: when messages arrive, how long a sync takes, when a timer fires, who crashes with
//! how much unsynced. So a seed that fails fails again, and time costs nothing.
//!
//! ```text
//!   tick:  deliver what is due ──► host 0 ──► host 1 ──► host 2 ──► scenario ──► its orders
//!                                    each a runtime of its own, with paused time
//! ```
//!
//! Each host is a tokio runtime of one thread. A crash drops it, and with it every task, timer and
//! lock of the process at once; a pause leaves it alone for a while, and then lets its clock jump.
//!
//! Invariants:
//! - One thread, one source of chance, hosts in their order: nothing depends on the system.
//! - A tick is a millisecond; what one host sends is at another no earlier than the next tick.
//! - A process that crashed leaves only its directory and what its disk had synced.

mod handle;
mod host;
mod replica;
mod user;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Builder;

pub use handle::{Gone, Sim};
pub use replica::Replica;
pub use user::SimUser;

use crate::outside::seeded;
use crate::raft::simulated::{HostClock, Net};
use crate::raft::{NodeLimits, Secret, Timing};
use handle::{Order, Shared};
use host::{Common, Host, Program};

/// How time goes.
const TICK: Duration = Duration::from_millis(1);
/// How often the group is looked at, in ticks.
const LOOK_EVERY: u32 = 10;
/// A scenario that takes longer hangs.
const LONGEST: Duration = Duration::from_secs(3600);

/// A simulated group, before it runs.
///
/// A flow of one's own survives the crash of the replica that was asking, and of the group's leader:
///
/// ```
/// use std::time::Duration;
/// use botmesh::bot::{Bot, Coordination, Durability};
/// use botmesh::testing::SimCluster;
/// use botmesh::types::Prefix;
///
/// let shop = Prefix::new("shop").unwrap();
/// let group = SimCluster::new(3).seed(42).replicas(move |replica| {
///     let shop = shop.clone();
///     async move {
///         let coordinator = replica.coordinator(&shop, Duration::from_secs(2));
///         let bot = botmesh::cli::demo::flows(Bot::builder())
///             .provider(replica.provider("x"))
///             .store(replica.store(&shop))
///             .coordination(Coordination::new(coordinator).durability(Durability::On));
///         Ok(bot.build().await?.run_until(std::future::pending()).await?)
///     }
/// });
/// group.run(|sim| async move {
///     let ann = sim.user("x", "ann");
///     ann.says("order").await.hears("What would you like?").await;
///     sim.crash(sim.led().await).await;
///     ann.says("tea").await.hears("How many?").await;
///     for host in 0..3 {
///         sim.crash(host).await;
///         sim.restart(host).await;
///     }
///     ann.says("2").await.hears("Where to?").await;
/// });
/// ```
pub struct SimCluster {
    hosts: usize,
    seed: u64,
    timing: Timing,
    limits: NodeLimits,
    drifts: BTreeMap<usize, (i64, i64)>,
    program: Option<Program>,
    keeps_lines: bool,
}

impl Debug for SimCluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { hosts, seed, .. } = self;
        f.debug_struct("SimCluster").field("hosts", hosts).field("seed", seed).finish()
    }
}

/// What really happened in a simulation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimCounts {
    /// Messages that arrived.
    pub delivered: u64,
    /// Entries applied, over all nodes and lives.
    pub applied: u64,
    /// Leaders there were, by term.
    pub leaders: u64,
    /// Processes that crashed.
    pub crashes: u64,
    /// Crashes that took something that was not synced.
    pub crashes_with_loss: u64,
    /// Machines that vanished.
    pub vanished: u64,
    /// Processes that were paused.
    pub pauses: u64,
    /// Messages swallowed by a cut.
    pub cut: u64,
    /// Of those, where the other direction was open.
    pub cut_one_way: u64,
    /// Messages that got lost.
    pub lost: u64,
    /// Requests that came twice.
    pub doubled: u64,
    /// Requests that overtook another to the same host.
    pub overtaken: u64,
    /// Connections that were refused.
    pub refused: u64,
    /// Connections that ended with the other process.
    pub reset: u64,
    /// Sessions that ended without being closed.
    pub sessions_ended: u64,
    /// Snapshots that were sent and installed.
    pub snapshots: u64,
}

impl std::ops::AddAssign for SimCounts {
    fn add_assign(&mut self, more: Self) {
        self.delivered += more.delivered;
        self.applied += more.applied;
        self.leaders += more.leaders;
        self.crashes += more.crashes;
        self.crashes_with_loss += more.crashes_with_loss;
        self.vanished += more.vanished;
        self.pauses += more.pauses;
        self.cut += more.cut;
        self.cut_one_way += more.cut_one_way;
        self.lost += more.lost;
        self.doubled += more.doubled;
        self.overtaken += more.overtaken;
        self.refused += more.refused;
        self.reset += more.reset;
        self.sessions_ended += more.sessions_ended;
        self.snapshots += more.snapshots;
    }
}

/// How a simulation went.
#[derive(Clone, Debug)]
pub struct SimReport<T> {
    /// Its seed.
    pub seed: u64,
    /// How long it took, in its own time.
    pub elapsed: Duration,
    /// A hash of every message delivered and every entry applied, with their times.
    pub trace: String,
    /// One line for each of these, where [`SimCluster::keep_lines`] asked for them.
    pub lines: Vec<String>,
    /// What really happened.
    pub counts: SimCounts,
    /// What must never happen and did: nodes that applied different things, two leaders of a
    /// term, processes that did not come up.
    pub faults: Vec<String>,
    /// What the scenario returned.
    pub output: T,
}

impl SimCluster {
    /// So many hosts, numbered from 0 on, that form a group by themselves.
    pub fn new(hosts: usize) -> Self {
        Self {
            hosts,
            seed: 0,
            timing: Timing::default(),
            limits: NodeLimits::default(),
            drifts: BTreeMap::new(),
            program: None,
            keeps_lines: false,
        }
    }

    /// What everything random comes from. The same seed does the same again, in any process of the
    /// same program.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The beat of the group.
    #[must_use]
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// The bounds of the nodes.
    #[must_use]
    pub fn limits(mut self, limits: NodeLimits) -> Self {
        self.limits = limits;
        self
    }

    /// The clocks of a host: its boot clock runs so many millionths faster than it should, and its
    /// wall clock is so many ms ahead.
    #[must_use]
    pub fn clocks(mut self, host: usize, drift_ppm: i64, ahead_ms: i64) -> Self {
        self.drifts.insert(host, (drift_ppm, ahead_ms));
        self
    }

    /// What runs on each host besides its node: called in each life, once the node belongs to the
    /// group, in the process of that life. It may end, or run until the process ends. An error fails
    /// the simulation.
    ///
    /// For an exact replay a program takes what is random from nowhere but its arguments, and its
    /// `tokio::select!`s are `biased`.
    #[must_use]
    pub fn replicas<F>(mut self, program: impl Fn(Replica) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), crate::bot::BoxError>> + Send + 'static,
    {
        self.program = Some(Arc::new(move |replica| {
            let running = program(replica);
            Box::pin(async move { running.await.map_err(|error| error.to_string()) })
        }));
        self
    }

    /// Keeps a line for each thing that happens, to compare two runs by.
    #[must_use]
    pub fn keep_lines(mut self) -> Self {
        self.keeps_lines = true;
        self
    }

    /// Runs a scenario to its end, and tells how it went.
    ///
    /// # Panics
    /// Where the scenario does, or takes longer than an hour of the simulation's time; the seed is
    /// printed. And inside an asynchronous runtime: it is one itself.
    pub fn report<F: Future>(self, scenario: impl FnOnce(Sim) -> F) -> SimReport<F::Output> {
        let chance = seeded::begin(self.seed);
        let says = SaysSeed { hosts: self.hosts, seed: self.seed };
        let report = World::new(self).run(scenario);
        drop((says, chance));
        report
    }

    /// As [`SimCluster::report`], for what the scenario returns.
    ///
    /// # Panics
    /// As there, and where something happened that must never happen.
    pub fn run<F: Future>(self, scenario: impl FnOnce(Sim) -> F) -> F::Output {
        let hosts = self.hosts;
        let report = self.report(scenario);
        let says = SaysSeed { hosts, seed: report.seed };
        assert!(report.faults.is_empty(), "{:#?}", report.faults);
        drop(says);
        report.output
    }
}

/// Says how to see a failure again.
struct SaysSeed {
    hosts: usize,
    seed: u64,
}

impl Drop for SaysSeed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { hosts, seed } = self;
            eprintln!(
                "to see it again: the same scenario on SimCluster::new({hosts}).seed({seed})"
            );
        }
    }
}

/// Where the small files of a simulation are.
struct Root(PathBuf);

impl Root {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("botmesh-sim-{}-{number}", std::process::id());
        // What is synced there need not survive this process, so memory will do.
        let memory = Path::new("/dev/shm");
        let below = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let root = below.join(name);
        std::fs::create_dir_all(&root)
            .unwrap_or_else(|error| panic!("cannot make {}: {error}", root.display()));
        Self(root)
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        // Whoever looks for what is left finds nothing of use.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A simulation while it runs.
struct World {
    seed: u64,
    common: Common,
    hosts: Vec<Host>,
    shared: Arc<Shared>,
    counts: SimCounts,
    /// Who led each term.
    led: BTreeMap<u64, BTreeSet<usize>>,
    _root: Root,
}

impl World {
    fn new(cluster: SimCluster) -> Self {
        let SimCluster { hosts, seed, timing, limits, drifts, program, keeps_lines } = cluster;
        let addresses: Vec<String> = (0..hosts).map(|host| format!("host{host}:7000")).collect();
        let net = Arc::new(Net::new(addresses.clone(), keeps_lines));
        let common = Common {
            net: net.clone(),
            secret: Secret::new("a-secret-that-only-the-simulation-knows")
                .expect("long enough and printable"),
            timing,
            limits,
            addresses,
            program,
            providers: Arc::default(),
            failures: Arc::default(),
        };
        let root = Root::new();
        let host = |number: usize| {
            let (drift_ppm, ahead_ms) = drifts.get(&number).copied().unwrap_or_default();
            let clock = HostClock::new(net.clone(), drift_ppm, ahead_ms);
            Host::new(number, root.0.join(format!("host{number}")), clock, common.clone())
        };
        let hosts: Vec<Host> = (0..hosts).map(host).collect();
        let shared = Arc::new(Shared {
            net: net.clone(),
            orders: Mutex::default(),
            slots: hosts.iter().map(|host| host.slot.clone()).collect(),
            disks: hosts.iter().map(|host| host.disk.clone()).collect(),
            providers: common.providers.clone(),
            leader: Mutex::new(None),
        });
        let (counts, led) = (SimCounts::default(), BTreeMap::new());
        Self { seed, common, hosts, shared, counts, led, _root: root }
    }

    fn run<F: Future>(mut self, scenario: impl FnOnce(Sim) -> F) -> SimReport<F::Output> {
        let own = Builder::new_current_thread().enable_time().start_paused(true).build();
        let own = own.expect("a runtime without I/O needs nothing of the system");
        self.hosts.iter_mut().for_each(Host::start);
        let mut scenario = Box::pin({
            let _context = own.enter();
            scenario(Sim(self.shared.clone()))
        });
        let mut tick = 0;
        let output = loop {
            tick += 1;
            let now = TICK * tick;
            assert!(now < LONGEST, "the scenario has not ended after {now:?}");
            let net = &self.common.net;
            net.set_now(now);
            net.deliver();
            self.hosts.iter().for_each(Host::step);
            let ended = own.block_on(async {
                tokio::select! {
                    biased;
                    ended = &mut scenario => Some(ended),
                    () = tokio::time::sleep(TICK) => None,
                }
            });
            if let Some(output) = ended {
                break output;
            }
            self.obey();
            if tick.is_multiple_of(LOOK_EVERY) {
                self.look();
            }
        };
        drop(scenario);
        self.end(output)
    }

    /// Does what the scenario asked for.
    fn obey(&mut self) {
        let orders = std::mem::take(&mut *self.shared.orders.lock());
        for (host, order, done) in orders {
            let host = &mut self.hosts[host];
            match order {
                Order::Crash { vanishes } if host.is_up() => {
                    let lost = host.crash(vanishes);
                    self.counts.crashes += 1;
                    self.counts.crashes_with_loss += u64::from(lost > 0);
                    self.counts.vanished += u64::from(vanishes);
                }
                Order::Crash { .. } => {}
                Order::Start => host.start(),
                Order::Freeze => {
                    host.freeze();
                    self.counts.pauses += 1;
                }
                Order::Thaw => host.thaw(),
            }
            // The scenario may have stopped waiting.
            let _ = done.send(());
        }
    }

    /// Takes note of who leads.
    fn look(&mut self) {
        let looks: Vec<_> = self.hosts.iter().map(|host| host.look(false)).collect();
        let mut leads = None;
        for (host, look) in looks.into_iter().enumerate() {
            let Some(look) = look.filter(|look| look.leads) else { continue };
            self.led.entry(look.term).or_default().insert(host);
            if leads.is_none_or(|(term, _)| term < look.term) && look.serves {
                leads = Some((look.term, host));
            }
        }
        *self.shared.leader.lock() = leads.map(|(_, host)| host);
    }

    fn end<T>(mut self, output: T) -> SimReport<T> {
        self.look();
        let net = self.common.net.clone();
        let mut faults = net.faults();
        faults.append(&mut self.common.failures.lock());
        for (term, hosts) in self.led.iter().filter(|(_, hosts)| hosts.len() > 1) {
            faults.push(format!("hosts {hosts:?} all led in term {term}"));
        }
        let mut states: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for look in self.hosts.iter().filter_map(|host| host.look(true)) {
            states.entry(look.applied).or_default().extend(look.hash);
        }
        for (index, hashes) in states.iter().filter(|(_, hashes)| hashes.len() > 1) {
            faults.push(format!("nodes hold {} different states at {index}", hashes.len()));
        }
        let (trace, lines, elapsed) = (net.trace(), net.lines(), net.now());
        // Not crashes of the scenario's.
        for host in &mut self.hosts {
            host.crash(false);
        }
        let seen = net.counts();
        let counts = SimCounts {
            delivered: seen.delivered,
            applied: seen.applied,
            leaders: self.led.len() as u64,
            cut: seen.cut,
            cut_one_way: seen.cut_one_way,
            lost: seen.lost,
            doubled: seen.doubled,
            overtaken: seen.overtaken,
            refused: seen.refused,
            reset: seen.reset,
            sessions_ended: seen.sessions_ended,
            snapshots: seen.snapshots,
            ..self.counts
        };
        SimReport { seed: self.seed, elapsed, trace, lines, counts, faults, output }
    }
}
