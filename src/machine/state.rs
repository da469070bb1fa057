//! The state, its reading side and its stored form. (Skeleton: signatures are the contract.)

use std::io::{Read, Write};

use serde::{Deserialize, Serialize};

use super::{Batch, BatchReply, Effect, Grant, Holder, QueueKey, RowKey, SessionKind};
use crate::types::{Incarnation, NodeId, Prefix, Revision, TicketId};

/// The bounds of a machine (SPEC M3). Part of the replicated state: every node applies alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Shortest lease granted, in ms.
    pub lease_ms_min: u64,
    /// Longest lease granted, in ms.
    pub lease_ms_max: u64,
    /// Tickets in one queue.
    pub tickets_per_queue_max: u32,
    /// Live sessions, locks included.
    pub sessions_max: u32,
    /// Idle queues whose last holder is remembered (SPEC I2).
    pub idle_keys_max: u32,
    /// Message ids remembered for deduplication.
    pub dedupe_ids_max: u32,
    /// How long a message id is remembered, in ms.
    pub dedupe_ms: u64,
    /// Remembered idempotency keys of one prefix.
    pub idempotency_keys_max: u32,
    /// How long an idempotency key is remembered, in ms.
    pub idempotency_ms: u64,
    /// Times a message is granted before it becomes a dead letter.
    pub attempts_max: u32,
    /// Unsent entries of one chat's outbox.
    pub outbox_unsent_max: u32,
    /// Dead letters kept per prefix, oldest dropped first.
    pub dead_letters_max: u32,
    /// Distinct prefixes.
    pub prefixes_max: u32,
    /// Machine-time distance of two marks, in ms.
    pub mark_every_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            lease_ms_min: 500,
            lease_ms_max: 3_600_000,
            tickets_per_queue_max: 10_000,
            sessions_max: 100_000,
            idle_keys_max: 10_000,
            dedupe_ids_max: 1_000_000,
            dedupe_ms: 7 * 24 * 3_600_000,
            idempotency_keys_max: 100_000,
            idempotency_ms: 15 * 60_000,
            attempts_max: 5,
            outbox_unsent_max: 10_000,
            dead_letters_max: 1_000,
            prefixes_max: 1_000,
            mark_every_ms: 10_000,
        }
    }
}

/// A row as it is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The value.
    #[serde(with = "serde_bytes")]
    pub value: Vec<u8>,
    /// Its version.
    pub revision: Revision,
    /// When it ends, ms of machine time.
    pub expires_ms: Option<u64>,
}

/// Where a ticket stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TicketState {
    /// Never allocated in this prefix.
    Unknown,
    /// Allocated, and ended since.
    Gone,
    /// Waiting.
    Waiting {
        /// Its queue.
        queue: QueueKey,
        /// Its owner.
        session: Option<Incarnation>,
        /// Tickets before it, the holder's included.
        ahead: u64,
    },
    /// Granted.
    Granted {
        /// Its queue.
        queue: QueueKey,
        /// Its owner.
        session: Incarnation,
        /// The grant.
        grant: Grant,
    },
}

/// A session as it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionView {
    /// Its incarnation.
    pub session: Incarnation,
    /// The bot.
    pub prefix: Prefix,
    /// What it stands for.
    pub kind: SessionKind,
    /// The replica's name.
    pub replica: String,
    /// The node.
    pub node: NodeId,
    /// The lease, ms.
    pub lease_ms: u64,
    /// The last renewal.
    pub seq: u64,
}

/// A journaled message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalRecord {
    /// The provider's id of the message.
    pub id: String,
    /// The provider.
    pub channel: String,
    /// The chat's canonical string.
    pub chat: String,
    /// The message (JSON).
    #[serde(with = "serde_bytes")]
    pub body: Vec<u8>,
    /// How often it was granted and returned.
    pub attempts: u32,
}

/// One entry of a chat's outbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutboxEntry {
    /// Consecutive per chat, from 1.
    pub number: u64,
    /// Stable id.
    pub id: String,
    /// Id of the message that caused it.
    pub in_reply_to: String,
    /// The provider's own format (JSON).
    #[serde(with = "serde_bytes")]
    pub body: Vec<u8>,
    /// The fence it was written under.
    pub fence: u64,
    /// Orders the sends of one fence.
    pub turn_seq: u64,
    /// Whether a transport still has to send it.
    pub unsent: bool,
    /// How many entries of this chat stay listed.
    pub keep: u32,
}

/// A message given up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadLetter {
    /// The ticket it had.
    pub ticket: TicketId,
    /// The record.
    pub record: JournalRecord,
}

/// A scheduled task as it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskView {
    /// Its id.
    pub id: String,
    /// Next due instant, ms.
    pub due_ms: u64,
    /// Who claimed the occurrence.
    pub claimed_by: Option<Incarnation>,
    /// How often the occurrence was claimed.
    pub attempt: u32,
    /// Its owner's data.
    pub body: Vec<u8>,
}

/// Why a stored state was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Reading failed.
    #[error("reading the stored state failed: {0}")]
    Io(#[from] std::io::Error),
    /// The bytes are not a state.
    #[error("the stored state does not decode: {0}")]
    Corrupt(String),
}

/// The state machine.
#[derive(Debug, Clone, Default)]
pub struct Machine {}

/// A state held still: cheap to take (shared shards), independent of later applies.
#[derive(Debug, Clone)]
pub struct Frozen {}

/// What changed since the last cut, held still.
#[derive(Debug)]
pub struct Cut {}

impl Machine {
    /// An empty machine.
    pub fn new(_limits: Limits) -> Self {
        todo!()
    }

    /// Applies one entry. `effects` is appended to, in order.
    pub fn apply(&mut self, _index: u64, _batch: &Batch, _effects: &mut Vec<Effect>) -> BatchReply {
        todo!()
    }

    /// The answer a batch would get if it has been applied already: lets a node answer its own
    /// callers after it caught up by a snapshot.
    pub fn remembered(
        &self,
        _client: super::ClientId,
        _lane: u16,
        _serial: u64,
    ) -> Option<BatchReply> {
        todo!()
    }

    /// The serial the lane waits for; 0 for an unknown client or an older boot's.
    pub fn next_serial(&self, _client: super::ClientId, _lane: u16) -> u64 {
        todo!()
    }

    /// Machine time, ms since the Unix epoch.
    pub fn now_ms(&self) -> u64 {
        todo!()
    }

    /// Panics where the state contradicts itself. Run after every apply in debug builds.
    pub fn check_invariants(&self) {
        todo!()
    }

    /// One live session.
    pub fn session(&self, _session: Incarnation) -> Option<SessionView> {
        todo!()
    }

    /// All live sessions, in order.
    pub fn sessions(&self) -> Vec<SessionView> {
        todo!()
    }

    /// Where a ticket stands.
    pub fn ticket(&self, _prefix: &Prefix, _ticket: TicketId) -> TicketState {
        todo!()
    }

    /// Who holds, or first waits for, a queue.
    pub fn holder(&self, _queue: &QueueKey) -> Option<Holder> {
        todo!()
    }

    /// Every held lead: (queue, holder).
    pub fn leads(&self) -> Vec<(QueueKey, Holder)> {
        todo!()
    }

    /// Turns held and tickets waiting.
    pub fn turn_counts(&self) -> (u64, u64) {
        todo!()
    }

    /// Tickets a session owns: (ticket, queue, grant).
    pub fn tickets_of(&self, _session: Incarnation) -> Vec<(TicketId, QueueKey, Option<Grant>)> {
        todo!()
    }

    /// A row, unless it has ended.
    pub fn row(&self, _key: &RowKey) -> Option<Row> {
        todo!()
    }

    /// Up to `limit` rows of a table and prefix after `after`, in key order, ended ones left out.
    pub fn scan(&self, _first: &RowKey, _after: bool, _limit: usize) -> Vec<(RowKey, Row)> {
        todo!()
    }

    /// A journaled message that is not acknowledged.
    pub fn journal(&self, _prefix: &Prefix, _ticket: TicketId) -> Option<JournalRecord> {
        todo!()
    }

    /// A chat's listed outbox entries with a number above `after`, in order.
    pub fn outbox(
        &self,
        _prefix: &Prefix,
        _chat: &str,
        _after: u64,
        _limit: usize,
    ) -> Vec<OutboxEntry> {
        todo!()
    }

    /// Chats whose outbox this session is to send.
    pub fn outboxes_of(&self, _session: Incarnation) -> Vec<(Prefix, String)> {
        todo!()
    }

    /// Dead letters of a prefix.
    pub fn dead_letters(&self, _prefix: &Prefix) -> Vec<DeadLetter> {
        todo!()
    }

    /// Tasks of a prefix that are due at or before `until_ms`, earliest first.
    pub fn tasks_due(&self, _prefix: &Prefix, _until_ms: u64, _limit: usize) -> Vec<TaskView> {
        todo!()
    }

    /// Holds the state still (O(shards), no copying of data).
    pub fn freeze(&self) -> Frozen {
        todo!()
    }

    /// Takes what changed since the last cut (or since loading). Cheap; encode off the runtime.
    pub fn cut(&mut self) -> Cut {
        todo!()
    }

    /// The state that the records of earlier cuts make together.
    pub fn from_records<I>(_records: I) -> Result<Self, LoadError>
    where
        I: IntoIterator<Item = (Vec<u8>, Vec<u8>)>,
    {
        todo!()
    }

    /// Reads what [`Frozen::write`] wrote.
    pub fn read(_from: &mut dyn Read) -> Result<Self, LoadError> {
        todo!()
    }
}

impl Frozen {
    /// Writes the whole state in its canonical form: equal states write equal bytes.
    pub fn write(&self, _to: &mut dyn Write) -> std::io::Result<()> {
        todo!()
    }

    /// Hash of the logical state: equal states on all nodes have equal hashes.
    pub fn hash(&self) -> u64 {
        todo!()
    }
}

impl Cut {
    /// The changed records: key, and the new value or `None` where deleted.
    pub fn records(&self) -> Box<dyn Iterator<Item = (Vec<u8>, Option<Vec<u8>>)> + '_> {
        todo!()
    }

    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        todo!()
    }
}
