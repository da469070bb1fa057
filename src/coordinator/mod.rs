//! Sessions, turns and leads: who may act for a chat or a job, as a bot meets it.
//!
//! Duties of a caller, in order: [`Coordinator::open`]; then take tickets, admit messages, campaign;
//! act only while [`Turn::check`] says so, asked again at every act (DESIGN 3 rule 4); release;
//! [`Coordinator::close`]. The carrier opens a session, renews it every lease / 3, gives it up
//! before the group can end it, and comes back by itself under a new [`Incarnation`].

use std::sync::Arc;

use async_trait::async_trait;

use crate::clock::BootInstant;
use crate::store::RowKey;
use crate::types::{ChatKey, Fence, Incarnation, Prefix, ReplicaId, TicketId};

mod carriers;
#[cfg(any(test, feature = "test-util"))]
pub mod conformance;
mod driver;
mod group;
mod group_clock;
mod guards;
mod namesakes;
mod place;
mod session;
mod sticky;
#[cfg(test)]
mod tests;
mod under;

pub use crate::machine::{Admission, Admit, JournalRecord};
pub use carriers::{MemoryCoordinator, RaftCoordinator};
pub use group::{CoordinatorOptions, GroupCoordinator};
pub use guards::{Lead, Ticket, Turn};
pub use sticky::Sticky;

/// Why a right was lost (SPEC H1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LostReason {
    /// The session was given up, or expired.
    Expired,
    /// Somebody newer wrote or holds.
    Superseded,
    /// It was stepped down from on purpose.
    SteppedDown,
    /// The step ran longer than `settle`.
    Settled,
}

/// Why the group could not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnavailableCause {
    /// It did not come in time.
    Timeout,
    /// A majority does not answer.
    NoQuorum,
}

/// What goes wrong in coordination.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CoordinationError {
    /// A turn or an answer did not come.
    #[error("no turn for {key}: {cause:?} after {age_ms} ms, {}; {advice}", held(*holder, *fence))]
    Unavailable {
        /// Which of the two.
        cause: UnavailableCause,
        /// The chat or lead, where there is one.
        key: String,
        /// Who holds it.
        holder: Option<Incarnation>,
        /// Under which fence.
        fence: Option<Fence>,
        /// How long was waited, in ms.
        age_ms: u64,
        /// What to do.
        advice: String,
    },
    /// The session is gone, and all it held.
    #[error("the lease under which {key} was held is lost ({reason:?}); work under it must stop")]
    LeaseLost {
        /// The chat or lead.
        key: String,
        /// Why.
        reason: LostReason,
    },
    /// It may have been done or not.
    #[error("outcome unknown: {why}")]
    OutcomeUnknown {
        /// Why.
        why: String,
    },
    /// Too much is waiting; nothing was done.
    #[error("overloaded: {why}; try again later")]
    Overloaded {
        /// Which bound.
        why: String,
    },
    /// The coordinator is not open.
    #[error("the coordinator is closed; call open() first")]
    Closed,
}

fn held(holder: Option<Incarnation>, fence: Option<Fence>) -> String {
    match (holder, fence) {
        (Some(holder), Some(fence)) => format!("held by incarnation {holder} under fence {fence}"),
        (Some(first), None) => format!("incarnation {first} is first in line"),
        (None, _) => "nobody holds it".to_owned(),
    }
}

impl CoordinationError {
    /// Whether asking again may help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Overloaded { .. })
    }
}

/// What a coordinator tells (a part of SPEC H1; the bot adds its own).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum CoordinatorEvent {
    /// A session is open.
    Opened {
        /// Its incarnation.
        incarnation: Incarnation,
    },
    /// The session was given up or ended; all its turns and leads are lost.
    Lost {
        /// Its incarnation.
        incarnation: Incarnation,
        /// Why.
        reason: LostReason,
    },
    /// Another live incarnation runs under this replica id (SPEC A3): the older of the two renewed
    /// after the newer had opened. Sessions this very process left behind do not count.
    ReplicaIdShared {
        /// The other.
        other: Incarnation,
    },
    /// A chat's outbox came to this incarnation from one that died or was lost: whether its first
    /// unsent reply went out is unknown. `OutboxReady` follows.
    OutboxAdopted {
        /// The chat's canonical string.
        chat: String,
    },
    /// A chat's outbox has something this incarnation is to send.
    OutboxReady {
        /// The chat's canonical string.
        chat: String,
    },
    /// A message was given up after its last attempt.
    DeadLettered {
        /// The chat's canonical string.
        chat: String,
        /// The ticket it had.
        ticket: TicketId,
        /// The message's id.
        id: String,
    },
}

/// A granted turn for a journaled message, its own or one of a dead replica.
#[derive(Debug)]
pub struct JournaledTurn {
    /// The turn. Its ticket is the message's.
    pub turn: Turn,
    /// The message.
    pub record: JournalRecord,
}

/// Who may act.
#[async_trait]
pub trait Coordinator: Send + Sync + 'static {
    /// The prefix.
    fn prefix(&self) -> &Prefix;

    /// What this replica calls itself.
    fn replica(&self) -> &ReplicaId;

    /// The live incarnation; `None` while closed or between two.
    fn incarnation(&self) -> Option<Incarnation>;

    /// Until when the live session may act: no send under it may take longer (DESIGN 3 rule 7). A
    /// renewal moves it on; `None` while closed or between two.
    fn valid_until(&self) -> Option<BootInstant>;

    /// Whether [`Coordinator::admit`] works: the group journals.
    fn journals(&self) -> bool;

    /// Opens the session. Returns when it is open; keeps trying until closed (logs why it cannot
    /// within 5 s).
    async fn open(&self) -> Result<(), CoordinationError>;

    /// Releases everything and closes the session: others carry on at once.
    async fn close(&self) -> Result<(), CoordinationError>;

    /// Takes a ticket in the chat's queue.
    async fn take_ticket(&self, key: &ChatKey) -> Result<Ticket, CoordinationError>;

    /// Waits for the ticket's turn. Cancel-safe: the ticket keeps its place until dropped.
    async fn wait_turn(
        &self,
        ticket: &mut Ticket,
        until: BootInstant,
    ) -> Result<Turn, CoordinationError>;

    /// Deduplicates, journals and tickets messages in one commit (SPEC B9). Their turns come out of
    /// [`Coordinator::next_journaled`].
    async fn admit(&self, messages: Vec<Admit>) -> Result<Vec<Admission>, CoordinationError>;

    /// As [`Coordinator::admit`], in the name of a lead: refused with `LeaseLost` once that is lost,
    /// whole. With a cursor, its row is written in the same commit (SPEC D5); a message that met a
    /// bound refuses all of it, for it would be lost behind the cursor.
    async fn admit_under(
        &self,
        lead: &Lead,
        messages: Vec<Admit>,
        cursor: Option<(RowKey, Vec<u8>)>,
    ) -> Result<Vec<Admission>, CoordinationError>;

    /// The next granted turn of a journaled message. `None` once closed.
    async fn next_journaled(&self) -> Option<JournaledTurn>;

    /// The lead of this name if nobody has it.
    async fn try_lead(&self, name: &str) -> Result<Option<Lead>, CoordinationError>;

    /// Waits for the lead of this name.
    async fn campaign(&self, name: &str) -> Result<Lead, CoordinationError>;

    /// How turns that are kept ([`Turn::keep`]) stay with this replica from now on; `None`, as in
    /// the beginning: not at all, and those that stayed are given back at once (SPEC B10).
    fn keep_turns(&self, how: Option<Sticky>);

    /// What a ticket that waits since then waits for: the error of one who waited in vain (SPEC B4).
    /// `None` where it waits no more.
    fn overdue(&self, ticket: TicketId, since: BootInstant) -> Option<CoordinationError>;

    /// The replica that holds the lead of this name, as this node sees it.
    fn leader(&self, name: &str) -> Option<ReplicaId>;

    /// What happens from now on.
    fn events(&self) -> tokio::sync::broadcast::Receiver<CoordinatorEvent>;

    /// The clock leases are judged by.
    fn clock(&self) -> Arc<dyn crate::clock::Clock>;
}
