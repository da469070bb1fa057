//! One simulated machine: a process that lives and dies, and a disk that stays.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle, Runtime};

use super::TICK;
use super::replica::Replica;
use crate::raft::simulated::{Disk, HostClock, Look, Net, Place, look, serve};
use crate::raft::{Node, NodeLimits, NodeOptions, Secret, Start, Timing};

/// What runs on each replica besides its node.
pub(super) type Program = Arc<
    dyn Fn(Replica) -> std::pin::Pin<Box<dyn Future<Output = Result<(), String>> + Send>>
        + Send
        + Sync,
>;

/// A process that runs on a host.
#[derive(Debug)]
struct Process {
    /// The way into it.
    handle: Handle,
    /// Once its node belongs to the group.
    replica: Option<Replica>,
}

/// What others see of a host while a process runs there.
#[derive(Clone, Debug, Default)]
pub(super) struct Slot(Arc<Mutex<Option<Process>>>);

impl Slot {
    /// The way into the process.
    pub(super) fn handle(&self) -> Option<Handle> {
        self.0.lock().as_ref().map(|process| process.handle.clone())
    }

    /// The replica, once its node belongs to the group.
    pub(super) fn replica(&self) -> Option<Replica> {
        self.0.lock().as_ref().and_then(|process| process.replica.clone())
    }

    fn set_replica(&self, replica: Replica) {
        if let Some(process) = &mut *self.0.lock() {
            process.replica = Some(replica);
        }
    }
}

/// What all hosts have in common.
#[derive(Clone)]
pub(super) struct Common {
    pub(super) net: Arc<Net>,
    pub(super) secret: Secret,
    pub(super) timing: Timing,
    pub(super) limits: NodeLimits,
    pub(super) addresses: Vec<String>,
    pub(super) program: Option<Program>,
    pub(super) providers: super::replica::Providers,
    /// Why a process did not come up.
    pub(super) failures: Arc<Mutex<Vec<String>>>,
}

/// See the module.
pub(super) struct Host {
    number: usize,
    dir: PathBuf,
    pub(super) disk: Arc<Disk>,
    clock: HostClock,
    common: Common,
    pub(super) slot: Slot,
    runtime: Option<Runtime>,
    frozen_since: Option<Duration>,
}

impl Host {
    pub(super) fn new(number: usize, dir: PathBuf, clock: HostClock, common: Common) -> Self {
        Self {
            number,
            dir,
            disk: Arc::default(),
            clock,
            common,
            slot: Slot::default(),
            runtime: None,
            frozen_since: None,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.runtime.is_some()
    }

    /// Starts a process on what the disk has.
    pub(super) fn start(&mut self) {
        if self.runtime.is_some() {
            return;
        }
        self.common.net.happened(self.number, "start");
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.expect("a runtime without I/O needs nothing of the system");
        let inbox = self.common.net.listen(self.number);
        *self.slot.0.lock() = Some(Process { handle: runtime.handle().clone(), replica: None });
        let (options, common) = (self.options(), self.common.clone());
        let (slot, number, clock) = (self.slot.clone(), self.number, self.clock.clone());
        runtime.spawn(async move {
            let failed = |why: String| common.failures.lock().push(format!("host {number}: {why}"));
            let node = match Node::open(options).await {
                Ok(node) => node,
                Err(error) => return failed(error.to_string()),
            };
            tokio::spawn(serve(common.net.clone(), number, node.router(), inbox));
            if let Err(error) = node.joined(Duration::from_secs(600)).await {
                return failed(error.to_string());
            }
            let replica =
                Replica::new(number, node, Arc::new(clock), (&common.net, &common.providers));
            slot.set_replica(replica.clone());
            if let Some(program) = &common.program
                && let Err(why) = program(replica).await
            {
                failed(why);
            }
        });
        self.runtime = Some(runtime);
    }

    fn options(&self) -> NodeOptions {
        let Common { net, secret, timing, limits, addresses, .. } = &self.common;
        let address = addresses[self.number].clone();
        let place = Place::new(net.clone(), self.number, self.disk.clone(), secret);
        NodeOptions {
            start: Start::Expect { count: addresses.len(), peers: addresses.clone() },
            clock: Arc::new(self.clock.clone()),
            timing: *timing,
            // The disk below the small files is a real one, whose room is none of the simulation's.
            limits: NodeLimits { disk_low_water: 0, ..*limits },
            simulated: Some(place),
            ..NodeOptions::new(format!("n{}", self.number), &self.dir, address, secret.clone())
        }
    }

    /// Ends the process as `kill -9` or a power cut does; how much its disk has lost.
    pub(super) fn crash(&mut self, vanishes: bool) -> usize {
        let Some(runtime) = self.runtime.take() else { return 0 };
        let net = &self.common.net;
        net.happened(self.number, if vanishes { "vanish" } else { "crash" });
        net.gone(self.number, vanishes);
        self.frozen_since = None;
        let record = self.dir.join("process");
        let kept = fs::read(&record).ok();
        // What the process holds lets go of it in its own context, and nothing of it goes on.
        let handle = runtime.handle().clone();
        {
            let _context = handle.enter();
            drop(self.slot.0.lock().take());
            drop(runtime);
        }
        // A process that is killed does not take its name off.
        if let Some(kept) = kept {
            fs::write(record, kept).expect("the simulation's own directory can be written");
        }
        self.disk.crash()
    }

    pub(super) fn freeze(&mut self) {
        if self.is_up() && self.frozen_since.is_none() {
            self.common.net.happened(self.number, "freeze");
            self.frozen_since = Some(self.common.net.now());
        }
    }

    pub(super) fn thaw(&mut self) {
        let Some(since) = self.frozen_since.take() else { return };
        self.common.net.happened(self.number, "thaw");
        let missed = self.common.net.now() - since;
        if let Some(runtime) = &self.runtime {
            runtime.block_on(async { tokio::time::advance(missed).await });
        }
    }

    /// Lets the process run until the end of the tick.
    pub(super) fn step(&self) {
        if let Some(runtime) = &self.runtime
            && self.frozen_since.is_none()
        {
            runtime.block_on(async { tokio::time::sleep(TICK).await });
        }
    }

    /// What is to be seen of its node.
    pub(super) fn look(&self, whole: bool) -> Option<Look> {
        let replica = self.slot.replica()?;
        look(replica.node(), whole)
    }
}
