//! What a bot keeps: rows, checkpoints, locks, the journal and the outbox behind one trait.
//!
//! A [`Store`] is scoped to one prefix (SPEC A4). Two carriers of the same machine: `RaftStore`
//! (a node of the group) and `MemoryStore` (a hub in this process); a user's own store is a third,
//! held to the same public conformance suite (`conformance`).
//!
//! Duties of a caller, in order: read under the consistency it needs; put what belongs together
//! into one [`Store::commit`]; treat [`CommitError::OutcomeUnknown`] as *both may be true*.

mod carriers;
#[cfg(any(test, feature = "test-util"))]
pub mod conformance;
mod ext;
mod group;

use std::time::Duration;

use async_trait::async_trait;

use crate::clock::BootInstant;
use crate::coordinator::{Lead, Turn};
use crate::types::{ChatKey, Fence, Incarnation, Prefix, Revision, TicketId};

pub use ext::{StoreExt, UpdateError};
pub(crate) use group::user_key;
pub use group::{GroupStore, MemoryStore, RaftStore};

pub use crate::machine::{
    Admit, DeadLetter, Expect, JournalRecord, OutboxEntry, Outgoing, Row, Table, TaskView as Task,
};

/// Names one row inside a store's prefix.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowKey {
    /// Which table.
    pub table: Table,
    /// The key; for checkpoints and chat rows a chat's canonical string.
    pub key: String,
}

impl RowKey {
    /// A key of a table.
    pub fn new(table: Table, key: impl Into<String>) -> Self {
        Self { table, key: key.into() }
    }
}

/// How fresh a read must be (SPEC F4).
#[derive(Clone, Copy, Debug)]
pub enum Consistency<'a> {
    /// Never older than anything acknowledged before the call. One round to the leader.
    Linearizable,
    /// What this node has applied. No message is sent.
    Local,
    /// Local, for rows of the chat whose turn this is: never older than the grant nor than the last
    /// write acknowledged under it.
    Under(&'a Turn),
}

/// In whose name a commit is made (SPEC C10).
#[derive(Clone, Debug)]
pub enum Authority<'a> {
    /// Nobody's: conditions alone decide.
    Nobody,
    /// The turn's holder, exactly (incarnation, fence).
    Turn(&'a Turn),
    /// The lead's holder, exactly (incarnation, fence).
    Lead(&'a Lead),
    /// The holder of a chat's turn or a lead, by fence alone.
    Fence {
        /// The chat's canonical string.
        chat: &'a str,
        /// The fence.
        fence: Fence,
    },
}

/// One operation of a commit. All are done or none (SPEC F5).
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Writes a row.
    Put {
        /// Which.
        row: RowKey,
        /// The new value, at most [`crate::types::VALUE_BYTES_MAX`].
        value: Vec<u8>,
        /// The condition.
        expect: Expect,
        /// Ends after this many ms of the group's time.
        ttl_ms: Option<u64>,
    },
    /// Deletes a row.
    Delete {
        /// Which.
        row: RowKey,
        /// The condition.
        expect: Expect,
    },
    /// The journaled message of this ticket has had its effect.
    Acknowledge(TicketId),
    /// Appends to a chat's outbox; an id it already knows is passed over.
    Send {
        /// The chat's canonical string.
        chat: String,
        /// What to send.
        send: Outgoing,
    },
    /// Releases the ticket in the same commit.
    Release(TicketId),
    /// As `Release`, for the holder's own ticket, whose message has had its effect: the fence goes on
    /// where the chat's next ticket is the same session's (SPEC B10).
    Keep {
        /// The ticket.
        ticket: TicketId,
        /// How much was said under the fence so far.
        said: u64,
    },
    /// Journals a message in the bot's own name.
    Post(Admit),
    /// Whose a channel's journaled messages and replies are: of the replica that holds this lead,
    /// or, without one, of any (SPEC D6).
    Home {
        /// The channel.
        channel: String,
        /// The lead's name.
        lead: Option<String>,
    },
}

/// Why a read failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The group cannot be asked now.
    #[error("the store cannot be read now: {why}")]
    Unavailable {
        /// Why, and what to do.
        why: String,
    },
    /// What is stored is not what was expected.
    #[error("row {key} does not decode: {why}")]
    Undecodable {
        /// Which row.
        key: String,
        /// Why.
        why: String,
    },
    /// The store cannot do this at all.
    #[error("this store does not support {what}")]
    Unsupported {
        /// What.
        what: &'static str,
    },
}

/// Why a commit was not made, or may not have been.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// A condition did not hold: somebody wrote meanwhile. Nothing was written.
    #[error("operation {op} was superseded: revision {found:?} is there; read again")]
    Superseded {
        /// Index of the operation.
        op: usize,
        /// What is there.
        found: Option<Revision>,
    },
    /// The turn is not held (any more) under that fence. Nothing was written.
    #[error("the turn is lost: {holder:?} holds it now")]
    Fenced {
        /// Who holds it.
        holder: Option<(Incarnation, Option<Fence>)>,
    },
    /// It may have been written or not.
    #[error("whether it was written is unknown: {why}; read before you repeat it")]
    OutcomeUnknown {
        /// Why.
        why: String,
    },
    /// Certainly not written.
    #[error("not written: {why}")]
    Unavailable {
        /// Why, and what to do.
        why: String,
    },
    /// A bound was met. Nothing was written.
    #[error("operation {op} is over the limit of {what}")]
    TooLarge {
        /// Index of the operation.
        op: usize,
        /// Which bound.
        what: &'static str,
    },
    /// The store cannot do this operation.
    #[error("this store does not support {what}")]
    Unsupported {
        /// What.
        what: &'static str,
    },
}

impl CommitError {
    /// Whether the same commit may succeed later, nothing of it having been written.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }
}

/// What becomes of a row that both keys of a re-key have (SPEC B2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Taken {
    /// Nothing is moved, and the error names the row (default).
    #[default]
    Refuse,
    /// The new key's row stays, the old key's goes.
    KeepNew,
}

/// Why a chat's key was not changed, or may not have been.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RekeyError {
    /// The keys cannot stand for the same chat. Nothing was moved.
    #[error("{from} cannot become {to}: {why}")]
    Keys {
        /// The old key.
        from: String,
        /// The new key.
        to: String,
        /// Why not.
        why: &'static str,
    },
    /// Both keys have this row. Nothing was moved.
    #[error("row {key} of {table:?} is there already; delete one of the two, or keep the new one")]
    Taken {
        /// Its table.
        table: Table,
        /// The new key's row.
        key: String,
    },
    /// The group did not take it, or its answer is unknown: the same call may be repeated.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

/// What a store may lack (SPEC C4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Feature {
    /// Compare-and-set checkpoints.
    CheckpointCas,
    /// Several operations in one commit, all or none.
    AtomicCommit,
    /// Journal and outbox (SPEC G).
    Durability,
    /// Fenced locks.
    Locks,
    /// Scheduled tasks (SPEC G4).
    Tasks,
}

/// A held lock (SPEC F2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FencedLock {
    /// Names this acquisition: renew and release with it.
    pub token: Incarnation,
    /// Grows with every acquisition; give it to the resource.
    pub fence: Fence,
}

/// A claimed occurrence of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Grows with every claim; give it to the resource.
    pub fence: Fence,
    /// How often this occurrence was claimed, this one included.
    pub attempt: u32,
}

/// What a bot keeps. See the module's rustdoc for the duties of a caller.
///
/// No default bodies: a wrapper that forgets a method would lose it silently.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// The prefix this store is scoped to.
    fn prefix(&self) -> &Prefix;

    /// Whether other replicas see the same data.
    fn is_shared(&self) -> bool;

    /// Whether a feature is there.
    fn supports(&self, feature: Feature) -> bool;

    /// Reads one row.
    async fn read(&self, key: &RowKey, how: Consistency<'_>) -> Result<Option<Row>, StoreError>;

    /// Rows of a table in key order, after `after`, at most `limit`; linearizable.
    async fn scan(
        &self,
        table: Table,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<(RowKey, Row)>, StoreError>;

    /// Applies all operations or none. Answers a revision for each; zero for those that write no
    /// row.
    async fn commit(&self, by: Authority<'_>, ops: Vec<Op>) -> Result<Vec<Revision>, CommitError>;

    /// Acquires a lock if it is free.
    async fn acquire_lock_fenced(
        &self,
        key: &str,
        ttl_ms: u64,
    ) -> Result<Option<FencedLock>, CommitError>;

    /// Extends a held lock; `false` where the token is stale.
    async fn renew_lock(
        &self,
        key: &str,
        token: Incarnation,
        ttl_ms: u64,
    ) -> Result<bool, CommitError>;

    /// Releases a held lock; `false` where the token is stale.
    async fn release_lock(&self, key: &str, token: Incarnation) -> Result<bool, CommitError>;

    /// A journaled message that is not acknowledged, as this node sees it.
    async fn journal(&self, ticket: TicketId) -> Result<Option<JournalRecord>, StoreError>;

    /// A chat's outbox after a number, in order, as this node sees it.
    async fn outbox(
        &self,
        chat: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<OutboxEntry>, StoreError>;

    /// Who is to send what the chat's outbox holds, as this node sees it. A live session that finds
    /// itself here stays it until it has marked the last entry as sent.
    async fn outbox_owner(&self, chat: &str) -> Result<Option<Incarnation>, StoreError>;

    /// Returns once the chat's outbox has an entry after that number.
    async fn outbox_beyond(&self, chat: &str, after: u64) -> Result<(), StoreError>;

    /// Records that a chat's outbox was sent up to this number; `false` where `sender` does not own
    /// it. It may wait so long for another write to share its commit with; zero: it goes at once.
    async fn mark_sent(
        &self,
        chat: &str,
        up_to: u64,
        sender: Incarnation,
        within: Duration,
    ) -> Result<bool, CommitError>;

    /// A chat's key changes (SPEC B2): in one commit its queue, checkpoint, chat row, outbox and dead
    /// letters move to the new key, with the user's row where that is named by the chat. A room takes
    /// its participants along. Waiting messages keep their order, by ticket, also among those of the
    /// new key; a turn at work under the old key is lost, and its message comes again under the new.
    /// Where nothing is there, nothing is done.
    async fn rekey(&self, from: &ChatKey, to: &ChatKey, taken: Taken) -> Result<(), RekeyError>;

    /// Messages that were given up.
    async fn dead_letters(&self) -> Result<Vec<DeadLetter>, StoreError>;

    /// Puts a dead letter back (`retry`) or drops it; `false` where there is none of that ticket.
    async fn settle_dead_letter(&self, ticket: TicketId, retry: bool) -> Result<bool, CommitError>;

    /// The group's time, ms since the Unix epoch: never behind what it judged a claim by (DESIGN 9).
    fn now_ms(&self) -> u64;

    /// Sees to it that a task of this body is there: a new one is first due at `due_ms`, one with
    /// another body gets this one and `due_ms`, one with the same body stays as it is. `false` where
    /// it has another body and an occurrence of it is claimed.
    async fn ensure_task(&self, id: &str, due_ms: u64, body: Vec<u8>) -> Result<bool, CommitError>;

    /// A task, as this node sees it.
    async fn task(&self, id: &str) -> Result<Option<Task>, StoreError>;

    /// Returns once the task is no longer as it was `seen`.
    async fn task_changed(&self, id: &str, seen: Option<&Task>) -> Result<(), StoreError>;

    /// Claims the occurrence of a task at `due_ms` for a live session; `None` where it is claimed,
    /// past or still to come. The claim ends with the session.
    async fn claim_task(
        &self,
        id: &str,
        due_ms: u64,
        session: Incarnation,
    ) -> Result<Option<Claim>, CommitError>;

    /// Ends a claimed occurrence and sets the next one; without one the task is removed. `false`
    /// where the occurrence is not this session's.
    async fn finish_task(
        &self,
        id: &str,
        due_ms: u64,
        session: Incarnation,
        next_ms: Option<u64>,
    ) -> Result<bool, CommitError>;

    /// Gives a claimed occurrence back, for another to claim; `false` where it is not this session's.
    async fn return_task(
        &self,
        id: &str,
        due_ms: u64,
        session: Incarnation,
    ) -> Result<bool, CommitError>;

    /// Until when a call made now may take; the store's own deadline for one operation.
    fn deadline(&self) -> BootInstant;
}
