//! How a command reaches a machine, and how what follows comes back.
//!
//! Everything above this line (coordinator, store, HTTP API) is written once, against [`Group`].
//! Two things carry it: a node of the Raft group (`raft::Node`) and the in-memory hub
//! ([`MemoryHub`]), which runs the very same machine behind a mutex.
//!
//! The promise that makes reads under a turn local (SPEC F4): [`Group::execute`] answers only after
//! the machine of *this* node has applied the command, and effects are raised by the same apply.

mod deadlines;
mod memory;
mod wakeups;

use std::time::Duration;

use async_trait::async_trait;

use crate::clock::{BootInstant, Clock};
use crate::machine::{Command, LEVEL, Machine, Reply};
use crate::types::{NodeId, ProcessToken};

pub use crate::machine::Limits;
pub use deadlines::Deadlines;
pub use memory::MemoryHub;
pub use wakeups::{SessionEvent, SessionEvents, Topic, Waiter, Wakeups};

/// Why the group cannot be asked at the moment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// No leader is known, or a majority does not answer.
    #[error("no quorum: {}", no_quorum(*reachable, *voters))]
    NoQuorum {
        /// Voters that answer, this node included.
        reachable: usize,
        /// Voters of the group.
        voters: usize,
    },
    /// The deadline passed first.
    #[error("the group did not answer within {waited:?}; ask again")]
    Timeout {
        /// How long was waited.
        waited: Duration,
    },
    /// Too much is waiting at this node; it sheds at the door (SPEC M3).
    #[error("this node has {waiting} commands waiting; ask again later or ask another node")]
    Overloaded {
        /// Commands waiting.
        waiting: usize,
    },
    /// Not every voter's program understands the command (SPEC M5); all that is older goes on.
    #[error(
        "it needs a program of level {needs} on every voting node, and node {node} has announced \
         level {knows}: start the newer version there, then ask again"
    )]
    TooNew {
        /// The command's level.
        needs: u32,
        /// A voter that is below it.
        node: NodeId,
        /// What it has announced; the lowest level where it has said nothing.
        knows: u32,
    },
    /// This node is shutting down, or is not (yet, any more) a member.
    #[error("this node does not serve: {why}")]
    NotServing {
        /// Why.
        why: String,
    },
}

/// A majority may answer and yet nobody lead: between two leaders.
fn no_quorum(reachable: usize, voters: usize) -> String {
    let advice = match reachable * 2 > voters {
        true => "they have no leader yet; ask again",
        false => "start or reconnect the others",
    };
    format!("{reachable} of {voters} voters answer; {advice}")
}

/// Why a command has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecuteError {
    /// Certainly not executed, now or later.
    #[error("not executed: {0}")]
    NotExecuted(#[source] Unavailable),
    /// It may have been executed, or still be.
    #[error("outcome unknown: {0}")]
    OutcomeUnknown(#[source] Unavailable),
}

/// A machine that commands can be sent to.
#[async_trait]
pub trait Group: Send + Sync + 'static {
    /// The node this runs on; 0 for a hub.
    fn node_id(&self) -> NodeId;

    /// The clock by which this node judges leases.
    fn clock(&self) -> &dyn Clock;

    /// Executes one command exactly once and answers after this node has applied it. Commands for
    /// one key are applied in the order of the calls (the order in which the futures are first
    /// polled).
    ///
    /// Past `deadline`: [`ExecuteError::NotExecuted`] where the command had not been handed on,
    /// else [`ExecuteError::OutcomeUnknown`]. Dropping the future does not take the command back.
    async fn execute(&self, command: Command, deadline: BootInstant)
    -> Result<Reply, ExecuteError>;

    /// As [`Group::execute`], for what is in no hurry: until `latest` it may wait for another command
    /// of this node to share its entry with. A group whose entries cost nothing does not wait.
    async fn execute_by(
        &self,
        command: Command,
        latest: BootInstant,
        deadline: BootInstant,
    ) -> Result<Reply, ExecuteError> {
        let _ = latest;
        self.execute(command, deadline).await
    }

    /// Returns once this node has applied everything that was committed when it was called: what
    /// is read from the local machine afterwards is linearizable (ReadIndex, DESIGN 5.4).
    async fn barrier(&self, deadline: BootInstant) -> Result<(), Unavailable>;

    /// Reads this node's machine. Short: applies wait meanwhile. Called once.
    fn read(&self, look: &mut dyn FnMut(&Machine));

    /// Where effects of applies on this node come out.
    fn wakeups(&self) -> &Wakeups;

    /// Whether what is acknowledged survives the end of this process.
    fn is_durable(&self) -> bool;

    /// The level up to which commands may be executed: who has an older way takes that for a command
    /// above it, which would be refused as [`Unavailable::TooNew`]. It never falls.
    fn command_level(&self) -> u32 {
        LEVEL
    }

    /// The process whose sessions end together once it is certain that it died; `None` where nobody
    /// could be certain. For sessions that are opened *in* this process, not for those that other
    /// programs open through it.
    fn process(&self) -> Option<ProcessToken> {
        None
    }
}

/// Reads a value from a group's local machine.
pub fn look<T>(group: &dyn Group, read: impl FnOnce(&Machine) -> T) -> T {
    let mut read = Some(read);
    let mut found = None;
    group.read(&mut |machine| {
        if let Some(read) = read.take() {
            found = Some(read(machine));
        }
    });
    // `Group::read` calls its argument once; that is its contract.
    found.expect("Group::read called its argument")
}
