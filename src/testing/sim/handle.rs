//! What a scenario does to a simulation, and what it sees of it.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::host::Slot;
use super::replica::{self, Providers, Replica};
use super::user::SimUser;
use crate::raft::simulated::{Disk, Net};

/// What is done to a host between two ticks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    Crash { vanishes: bool },
    Start,
    Freeze,
    Thaw,
}

/// A process that was to do something is gone, and nobody knows how far it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the process of host {host} is gone; what it was doing may be done or not")]
pub struct Gone {
    /// Where it ran.
    pub host: usize,
}

type Orders = Vec<(usize, Order, oneshot::Sender<()>)>;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) net: Arc<Net>,
    pub(super) orders: Mutex<Orders>,
    pub(super) slots: Vec<Slot>,
    pub(super) disks: Vec<Arc<Disk>>,
    pub(super) providers: Providers,
    pub(super) leader: Mutex<Option<usize>>,
}

/// A running simulation. Clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct Sim(pub(super) Arc<Shared>);

impl Sim {
    /// How many hosts there are.
    pub fn hosts(&self) -> usize {
        self.0.slots.len()
    }

    /// Time since the beginning.
    pub fn now(&self) -> Duration {
        self.0.net.now()
    }

    /// A number below `below`, from the seed.
    pub fn random(&self, below: u64) -> u64 {
        replica::random(below)
    }

    /// Lets time pass. It costs nothing.
    pub async fn sleep(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }

    /// Waits until something is so, looking once a tick.
    ///
    /// # Panics
    /// Where it is not after five minutes.
    pub async fn until(&self, what: &str, mut is: impl FnMut() -> bool) {
        let began = self.now();
        while !is() {
            let waited = self.now() - began;
            assert!(waited < Duration::from_secs(300), "waited {waited:?} for {what}");
            tokio::time::sleep(super::TICK).await;
        }
    }

    /// The host whose node leads the group, as of the last look.
    pub fn leader(&self) -> Option<usize> {
        *self.0.leader.lock()
    }

    /// Waits until a node leads.
    pub async fn led(&self) -> usize {
        self.until("a leader", || self.leader().is_some()).await;
        self.leader().unwrap_or_default()
    }

    async fn order(&self, host: usize, order: Order) {
        let (done, is_done) = oneshot::channel();
        self.0.orders.lock().push((host, order, done));
        // The simulation goes on for as long as the scenario.
        let _ = is_done.await;
    }

    /// Ends a host's process as `kill -9` does: at once, with all that its disk has not synced.
    pub async fn crash(&self, host: usize) {
        self.order(host, Order::Crash { vanishes: false }).await;
    }

    /// The machine is gone: as [`Sim::crash`], and whoever connects is not even refused.
    pub async fn vanish(&self, host: usize) {
        self.order(host, Order::Crash { vanishes: true }).await;
    }

    /// Starts a process on what the disk of a host has.
    pub async fn restart(&self, host: usize) {
        self.order(host, Order::Start).await;
    }

    /// Stops a host's process without telling it, as SIGSTOP does.
    pub async fn pause(&self, host: usize) {
        self.order(host, Order::Freeze).await;
    }

    /// Lets it go on.
    pub async fn resume(&self, host: usize) {
        self.order(host, Order::Thaw).await;
    }

    /// What `from` sends to `to` does not arrive, and nobody is told.
    pub fn cut_one_way(&self, from: usize, to: usize) {
        self.0.net.cut(from, to, true);
    }

    /// Two hosts do not reach each other.
    pub fn cut(&self, one: usize, other: usize) {
        self.cut_one_way(one, other);
        self.cut_one_way(other, one);
    }

    /// A host reaches nobody, and nobody reaches it.
    pub fn isolate(&self, host: usize) {
        (0..self.hosts()).filter(|other| *other != host).for_each(|other| self.cut(host, other));
    }

    /// What `from` sends to `to` takes so much longer.
    pub fn delay(&self, from: usize, to: usize, by: Duration) {
        self.0.net.slow(from, to, by.as_millis() as u64);
    }

    /// The weather between all hosts. Of a thousand requests or answers `lost` disappear with
    /// their connection, and of a thousand requests `twice` come a second time; a message takes up
    /// to `slow`, so that requests overtake each other.
    pub fn weather(&self, lost: u32, twice: u32, slow: Duration) {
        self.0.net.weather(lost, twice, slow.as_millis() as u64);
    }

    /// Every sync of a host's log takes so much longer.
    pub fn slow_disk(&self, host: usize, by: Duration) {
        self.0.disks[host].slow(by);
    }

    /// From here on a host's disk says that it has synced what it has not. No group survives that:
    /// a test that does not notice checks nothing.
    #[doc(hidden)]
    pub fn disk_lies(&self, host: usize) {
        self.0.disks[host].lie();
    }

    /// The network is whole again and disks are fast. Processes stay as they are.
    pub fn heal(&self) {
        self.0.net.heal();
        self.0.disks.iter().for_each(|disk| disk.slow(Duration::ZERO));
    }

    /// Whether a process runs on a host and its node belongs to the group.
    pub fn is_up(&self, host: usize) -> bool {
        self.0.slots[host].replica().is_some()
    }

    /// Runs something on a host, in its process: it stops, crashes and is cut off with it.
    pub async fn on<F, T>(
        &self,
        host: usize,
        work: impl FnOnce(Replica) -> F + Send + 'static,
    ) -> Result<T, Gone>
    where
        F: Future<Output = T> + Send + 'static,
        T: Send + 'static,
    {
        let slot = &self.0.slots[host];
        let (Some(handle), Some(replica)) = (slot.handle(), slot.replica()) else {
            return Err(Gone { host });
        };
        // The replica goes with the task, and so with the process.
        let running = handle.spawn(async move { work(replica).await });
        match running.await {
            Ok(done) => Ok(done),
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(Gone { host }),
        }
    }

    /// A user of a channel that replicas run by [`Replica::provider`].
    pub fn user(&self, channel: &str, name: &str) -> SimUser {
        let provider = replica::channel(&self.0.providers, channel);
        SimUser::new(self.clone(), provider, channel, name)
    }
}
