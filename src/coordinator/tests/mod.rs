//! The session protocol on a manual clock, with a group that loses, delays and refuses on purpose.

mod lease;
mod release;
mod sticky;
mod turns;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::{Coordinator, CoordinatorOptions, GroupCoordinator, Turn};
use crate::clock::{BootInstant, Clock, ManualClock};
use crate::group::{ExecuteError, Group, MemoryHub, Unavailable, Wakeups, look};
use crate::machine::{Admit, Command, Machine, Reply};
use crate::store::GroupStore;
use crate::types::{ChatKey, NodeId, Prefix, ReplicaId};

const LEASE: Duration = Duration::from_secs(15);
const SECOND: Duration = Duration::from_secs(1);

fn prefix() -> Prefix {
    MemoryHub::default_prefix()
}

fn chat(name: &str) -> ChatKey {
    ChatKey::new("test", name)
}

fn message(key: &ChatKey, id: &str) -> Admit {
    Admit {
        id: id.to_owned(),
        channel: key.channel.clone(),
        chat: key.to_string(),
        body: id.as_bytes().to_vec(),
    }
}

/// Lets every task that can run do so.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// Lets time pass in small steps, so that timers fire in their order.
async fn pass(clock: &ManualClock, time: Duration) {
    // Long waits have nothing that is due in between but renewals.
    let step = if time > LEASE { Duration::from_millis(250) } else { Duration::from_millis(50) };
    let mut left = time;
    while !left.is_zero() {
        let by = left.min(step);
        clock.advance(by);
        settle().await;
        left -= by;
    }
}

/// What becomes of one command.
#[derive(Clone)]
enum Fault {
    /// It is certainly not executed.
    Refuse,
    /// It is lost on its way, and the asker cannot know.
    Lose,
    /// It is executed, and the answer is lost.
    LoseAnswer,
    /// It is executed at once and answered when the gate opens, whatever its deadline.
    HoldAnswer(Arc<watch::Sender<bool>>),
    /// It is executed when the gate opens, also where nobody waits any more.
    Hold(Arc<watch::Sender<bool>>),
}

fn gate() -> Arc<watch::Sender<bool>> {
    Arc::new(watch::channel(false).0)
}

type Rule = Box<dyn FnMut(&Command) -> Option<Fault> + Send>;

/// What a node asked of its group.
#[derive(Clone)]
struct Asked {
    command: Command,
    at: BootInstant,
    deadline: BootInstant,
}

/// A node's view of a hub: commands through it meet faults, and its effects can be held back, as
/// on a node that lags, or lost, as on one that was given a snapshot.
struct Node {
    hub: MemoryHub,
    clock: ManualClock,
    rule: Mutex<Option<Rule>>,
    asked: Mutex<Vec<Asked>>,
    wakeups: Wakeups,
    applies: watch::Sender<Applies>,
    pump: AbortHandle,
}

#[derive(Clone, Copy, PartialEq)]
enum Applies {
    Shown,
    Held,
    Lost,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.pump.abort();
    }
}

impl Node {
    fn new(hub: &MemoryHub, clock: &ManualClock) -> Arc<Self> {
        let wakeups = Wakeups::new();
        let (applies, mut state) = watch::channel(Applies::Shown);
        let (mut effects, shown) = (hub.wakeups().everything(), wakeups.clone());
        let pump = tokio::spawn(async move {
            while let Some(effects) = effects.recv().await {
                let Ok(state) = state.wait_for(|state| *state != Applies::Held).await else {
                    return;
                };
                if *state == Applies::Shown {
                    shown.dispatch(effects.to_vec());
                }
            }
        });
        Arc::new(Self {
            hub: hub.clone(),
            clock: clock.clone(),
            rule: Mutex::default(),
            asked: Mutex::default(),
            wakeups,
            applies,
            pump: pump.abort_handle(),
        })
    }

    /// From now on, this decides what becomes of commands.
    fn faults(&self, rule: impl FnMut(&Command) -> Option<Fault> + Send + 'static) {
        *self.rule.lock() = Some(Box::new(rule));
    }

    fn heal(&self) {
        *self.rule.lock() = None;
    }

    fn applies(&self, applies: Applies) {
        self.applies.send_replace(applies);
    }

    /// What was asked so far and fits.
    fn asked(&self, fits: impl Fn(&Command) -> bool) -> Vec<Asked> {
        self.asked.lock().iter().filter(|asked| fits(&asked.command)).cloned().collect()
    }

    fn forget_asked(&self) {
        self.asked.lock().clear();
    }

    fn coordinator(self: &Arc<Self>, name: &str, lease: Duration) -> GroupCoordinator {
        let options = CoordinatorOptions { lease, replica_id: Some(ReplicaId(name.to_owned())) };
        GroupCoordinator::new(self.clone(), prefix(), options)
    }

    fn store(self: &Arc<Self>) -> GroupStore {
        GroupStore::new(self.clone(), prefix())
    }

    fn look<T>(&self, read: impl FnOnce(&Machine) -> T) -> T {
        look(&self.hub, read)
    }
}

#[async_trait]
impl Group for Node {
    fn node_id(&self) -> NodeId {
        1
    }

    fn clock(&self) -> &dyn Clock {
        &self.clock
    }

    async fn execute(
        &self,
        command: Command,
        deadline: BootInstant,
    ) -> Result<Reply, ExecuteError> {
        let at = self.clock.now();
        let fault = self.rule.lock().as_mut().and_then(|rule| rule(&command));
        self.asked.lock().push(Asked { command: command.clone(), at, deadline });
        let why = || Unavailable::NoQuorum { reachable: 1, voters: 3 };
        let unknown = || async {
            self.clock.sleep_until(deadline).await;
            Err(ExecuteError::OutcomeUnknown(why()))
        };
        match fault {
            None => self.hub.execute(command, deadline).await,
            Some(Fault::Refuse) => Err(ExecuteError::NotExecuted(why())),
            Some(Fault::Lose) => unknown().await,
            Some(Fault::LoseAnswer) => {
                self.hub.execute(command, deadline).await?;
                unknown().await
            }
            Some(Fault::HoldAnswer(gate)) => {
                let answer = self.hub.execute(command, deadline).await;
                let _ = gate.subscribe().wait_for(|open| *open).await;
                answer
            }
            Some(Fault::Hold(gate)) => {
                let hub = self.hub.clone();
                let late = tokio::spawn(async move {
                    let _ = gate.subscribe().wait_for(|open| *open).await;
                    hub.execute(command, BootInstant::never()).await
                });
                tokio::select! {
                    answer = late => answer.unwrap(),
                    answer = unknown() => answer,
                }
            }
        }
    }

    async fn barrier(&self, deadline: BootInstant) -> Result<(), Unavailable> {
        self.hub.barrier(deadline).await
    }

    fn read(&self, look: &mut dyn FnMut(&Machine)) {
        self.hub.read(look);
    }

    fn wakeups(&self) -> &Wakeups {
        &self.wakeups
    }

    fn is_durable(&self) -> bool {
        false
    }
}

/// A group on a manual clock, and two nodes of it.
struct Scene {
    clock: ManualClock,
    hub: MemoryHub,
    a: Arc<Node>,
    b: Arc<Node>,
}

fn scene() -> Scene {
    let clock = ManualClock::new();
    let hub = MemoryHub::with_clock(clock.clone());
    let (a, b) = (Node::new(&hub, &clock), Node::new(&hub, &clock));
    Scene { clock, hub, a, b }
}

async fn open(node: &Arc<Node>, name: &str) -> GroupCoordinator {
    let coordinator = node.coordinator(name, LEASE);
    coordinator.open().await.unwrap();
    coordinator
}

async fn turn(coordinator: &GroupCoordinator, key: &ChatKey) -> Turn {
    let mut ticket = coordinator.take_ticket(key).await.unwrap();
    coordinator.wait_turn(&mut ticket, BootInstant::never()).await.unwrap()
}

fn is_renewal(command: &Command) -> bool {
    matches!(command, Command::RenewSession { .. })
}

fn is_take(command: &Command) -> bool {
    matches!(command, Command::TakeTicket { .. })
}

fn is_commit(command: &Command) -> bool {
    matches!(command, Command::Commit { .. })
}
