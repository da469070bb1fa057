//! The machine, its bounds, and the shapes in which its state is read.

use serde::{Deserialize, Serialize};

use super::endings::Progress;
use super::index::Index;
use super::tables::{Meta, Tables};
use super::{Grant, QueueKey, Reply, SessionKind};
use crate::types::{Fence, Incarnation, NodeId, Prefix, Revision, TicketId};

/// The bounds of a machine (SPEC M3). Part of the replicated state: every node applies alike. A machine
/// begins with the default ones, which therefore never change; others come by [`Command::SetLimits`].
///
/// [`Command::SetLimits`]: super::Command::SetLimits
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

impl Limits {
    /// Refuses bounds that nothing fits into, and says which.
    pub fn check(&self) -> Result<(), String> {
        let at_least_one = [
            ("tickets_per_queue_max", u64::from(self.tickets_per_queue_max)),
            ("sessions_max", u64::from(self.sessions_max)),
            ("attempts_max", u64::from(self.attempts_max)),
            ("prefixes_max", u64::from(self.prefixes_max)),
        ];
        if let Some((name, _)) = at_least_one.iter().find(|(_, bound)| *bound == 0) {
            return Err(format!("the bound {name} is 0; give at least 1"));
        }
        if self.lease_ms_min > self.lease_ms_max {
            return Err("the bound lease_ms_min is above lease_ms_max".to_owned());
        }
        Ok(())
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
    /// The fence of the last claim.
    pub fence: Fence,
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
    /// A newer program wrote them.
    #[error("a newer program wrote the stored state: {0}")]
    Newer(String),
}

/// The state machine. What it holds is in `tables`, what only helps to find it in `index`, and what it
/// counts meanwhile in `progress`.
#[derive(Debug, Clone)]
pub struct Machine {
    pub(super) tables: Tables,
    pub(super) index: Index,
    pub(super) progress: Progress,
}

impl Meta {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            now_ms: 0,
            fence: 0,
            incarnation: 0,
            revision: 0,
            idle: 0,
            seen: 0,
            mark_ms: 0,
        }
    }
}

impl Machine {
    /// An empty machine.
    pub fn new(limits: Limits) -> Self {
        Self {
            tables: Tables::new(Meta::new(limits)),
            index: Index::default(),
            progress: Progress::default(),
        }
    }

    /// Machine time, ms since the Unix epoch.
    pub fn now_ms(&self) -> u64 {
        self.tables.meta.now_ms
    }

    /// The bounds it keeps.
    pub fn limits(&self) -> &Limits {
        &self.tables.meta.limits
    }

    pub(super) fn set_limits(&mut self, limits: Limits) -> Reply {
        self.tables.meta.limits = limits;
        // Message ids go a few at each entry: there may be millions too many.
        self.evict_idle();
        Reply::Done
    }
}

impl Default for Machine {
    fn default() -> Self {
        Self::new(Limits::default())
    }
}
