//! A group in this process: one machine behind a mutex.
//!
//! Problem: a bot without replicas, and every test of one with replicas, needs the semantics of the
//! group without its disk, network and elections. Idea: run the same machine here and apply each
//! command inline, under one lock, as it is asked. What a Raft group does in an agreed order the
//! hub does in the order of the calls.
//!
//! Invariants:
//! * Effects leave in the order of the applies: they are handed out under the machine's lock.
//! * Sessions end by the hub's own clock, through the same `ExpireSession` a leader would propose;
//!   one task keeps the deadlines, and it ends with the hub.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::{Deadlines, ExecuteError, Group, Unavailable, Wakeups};
use crate::clock::{BootInstant, Clock, SystemClock};
use crate::machine::{Batch, BatchReply, ClientId, Command, Effect, Limits, Machine, Reply};
use crate::types::NodeId;

/// A group in this process. Cheap to clone: clones are the same group.
///
/// Bots whose coordinators share a hub coordinate like replicas of a Raft group (SPEC I1); a bot
/// without coordination has one of its own. Nothing of it survives the process.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use botmesh::coordinator::{Coordinator, MemoryCoordinator};
/// use botmesh::group::MemoryHub;
/// let hub = MemoryHub::new();
/// let coordinator = MemoryCoordinator::new(&hub, "a");
/// coordinator.open().await.unwrap();
/// assert!(coordinator.try_lead("job:report").await.unwrap().is_some());
/// # })
/// ```
#[derive(Clone)]
pub struct MemoryHub {
    inner: Arc<Inner>,
}

struct Inner {
    clock: Arc<dyn Clock>,
    wakeups: Wakeups,
    /// The machine and what moves with it. A plain mutex: applies are short and never wait.
    state: Mutex<State>,
    /// Wakes the keeper when the earliest deadline changed.
    earlier: Arc<Notify>,
    /// The task that ends sessions. Started by the first session, since only then is there surely a
    /// runtime; ended with the hub.
    keeper: Mutex<Option<JoinHandle<()>>>,
}

struct State {
    machine: Machine,
    deadlines: Deadlines,
    /// Index of the last entry applied.
    index: u64,
    effects: Vec<Effect>,
}

/// The hub as the sender of its batches: it has one lane, so a batch's serial follows from its
/// index.
const CLIENT: ClientId = ClientId { node: 0, boot: 1 };

/// How long after an expiry was refused it is tried again. The hub's own are never lost; one is
/// refused only where a renewal came first, which armed the deadline anew.
const EXPIRE_AGAIN: Duration = Duration::from_millis(100);

impl Default for MemoryHub {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryHub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryHub").field("index", &self.inner.state.lock().index).finish()
    }
}

impl MemoryHub {
    /// A hub with the default limits, on this machine's clock.
    pub fn new() -> Self {
        Self::with(Limits::default(), SystemClock::shared())
    }

    /// A hub with these limits, on this machine's clock.
    pub fn with_limits(limits: Limits) -> Self {
        Self::with(limits, SystemClock::shared())
    }

    /// A hub on this clock; give a [`crate::clock::ManualClock`] to decide when leases end.
    pub fn with_clock(clock: impl Clock) -> Self {
        Self::with(Limits::default(), Arc::new(clock))
    }

    /// A hub with these limits, on this clock.
    pub fn with(limits: Limits, clock: Arc<dyn Clock>) -> Self {
        let state = State {
            machine: Machine::new(limits),
            deadlines: Deadlines::new(),
            index: 0,
            effects: Vec::new(),
        };
        Self {
            inner: Arc::new(Inner {
                clock,
                wakeups: Wakeups::new(),
                state: Mutex::new(state),
                earlier: Arc::new(Notify::new()),
                keeper: Mutex::new(None),
            }),
        }
    }

    /// Entries applied so far: what something costs is told by their number before and after.
    pub fn applied(&self) -> u64 {
        self.inner.state.lock().index
    }

    /// As the handle that coordinators and stores stand on.
    pub fn as_group(&self) -> Arc<dyn Group> {
        Arc::new(self.clone())
    }
}

impl Inner {
    /// Applies one command and hands out its effects.
    fn apply(&self, command: Command) -> Reply {
        let mut state = self.state.lock();
        let batch = Batch {
            client: CLIENT,
            lane: 0,
            serial: state.index,
            stamp_ms: self.clock.wall_ms(),
            commands: vec![command],
        };
        state.index += 1;
        let State { machine, deadlines, index, effects } = &mut *state;
        let reply = machine.apply(*index, &batch, effects);
        let effects = std::mem::take(effects);
        if deadlines.observe(&effects, self.clock.now()) {
            self.earlier.notify_one();
        }
        // Under the lock: the next apply's effects must not overtake these.
        self.wakeups.dispatch(effects);
        drop(state);
        match reply {
            BatchReply::Applied(mut replies) if replies.len() == 1 => replies.remove(0),
            // One lane, serials without a gap, one boot: every batch runs.
            other => unreachable!("the hub's batches run in order, not {other:?}"),
        }
    }

    /// Ends the sessions whose time has come; answers when to look again.
    fn expire_due(&self) -> Option<BootInstant> {
        let due = self.state.lock().deadlines.take_due(self.clock.now(), EXPIRE_AGAIN);
        for (session, seq) in due {
            self.apply(Command::ExpireSession { session, seq });
        }
        self.state.lock().deadlines.next_due()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.get_mut().take() {
            keeper.abort();
        }
    }
}

/// Ends sessions as their deadlines pass, until the hub is gone.
async fn keep_deadlines(hub: Weak<Inner>, clock: Arc<dyn Clock>, earlier: Arc<Notify>) {
    loop {
        let Some(next) = hub.upgrade().map(|hub| hub.expire_due()) else { return };
        let Some(next) = next else {
            earlier.notified().await;
            continue;
        };
        tokio::select! {
            biased;
            () = clock.sleep_until(next) => {}
            () = earlier.notified() => {}
        }
    }
}

#[async_trait]
impl Group for MemoryHub {
    fn node_id(&self) -> NodeId {
        CLIENT.node
    }

    fn clock(&self) -> &dyn Clock {
        &*self.inner.clock
    }

    async fn execute(
        &self,
        command: Command,
        deadline: BootInstant,
    ) -> Result<Reply, ExecuteError> {
        if self.inner.clock.now() > deadline {
            return Err(ExecuteError::NotExecuted(Unavailable::Timeout { waited: Duration::ZERO }));
        }
        self.start_keeper();
        Ok(self.inner.apply(command))
    }

    async fn barrier(&self, _deadline: BootInstant) -> Result<(), Unavailable> {
        Ok(())
    }

    fn read(&self, look: &mut dyn FnMut(&Machine)) {
        look(&self.inner.state.lock().machine);
    }

    fn wakeups(&self) -> &Wakeups {
        &self.inner.wakeups
    }

    fn is_durable(&self) -> bool {
        false
    }
}

impl MemoryHub {
    /// Starts the keeper where none runs: at the first command, and again where the runtime that
    /// ran it is gone.
    fn start_keeper(&self) {
        let mut keeper = self.inner.keeper.lock();
        if keeper.as_ref().is_none_or(JoinHandle::is_finished) {
            *keeper = Some(tokio::spawn(keep_deadlines(
                Arc::downgrade(&self.inner),
                self.inner.clock.clone(),
                self.inner.earlier.clone(),
            )));
        }
    }
}
