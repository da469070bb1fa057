//! What the state holds: every replicated table, and the counters.
//!
//! Everything here is written to disk and to snapshots, and is equal on all nodes at one log
//! index. What only speeds up finding things stands in [`super::index`] and is rebuilt on load.
//! Tags name tables on disk: they are never reused and never change (DESIGN 8).

use std::collections::BTreeMap;
use std::hash::Hash;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::digest::Digest;
use super::state::{JournalRecord, Limits, LoadError, OutboxEntry};
use super::stored::decode;
use super::table::{CutTable, FrozenTable, Hashed, Shelf, Table};
use super::{EndReason, Grant, IdempotencyKey, QueueKey, Reply, RowKey, SessionKind};
use crate::types::{Fence, Incarnation, NodeId, Prefix, ProcessToken, Revision, TicketId};

/// The counters and settings: one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Meta {
    pub(super) limits: Limits,
    /// Machine time: the greatest stamp so far.
    pub(super) now_ms: u64,
    /// Raised at every grant and claim.
    pub(super) fence: u64,
    /// Raised at every opening of a session.
    pub(super) incarnation: u64,
    /// Raised at every write of a row.
    pub(super) revision: u64,
    /// Raised whenever a queue becomes idle: the order of their eviction.
    pub(super) idle: u64,
    /// Raised at every message id remembered: the order in which they are forgotten.
    pub(super) seen: u64,
    /// Machine time of the last [`super::Effect::Mark`].
    pub(super) mark_ms: u64,
}

/// Stands for a prefix inside the state, so that a ticket's key is two integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct PrefixId(pub(super) u32);

/// What is kept of a prefix, for ever: its tickets are never numbered twice.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PrefixRecord {
    pub(super) id: PrefixId,
    /// The last ticket given out.
    pub(super) tickets: u64,
}

/// The last batch of one lane of one client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Lane {
    /// The serial it waits for.
    pub(super) next: u64,
    /// The answers to the batch before that.
    pub(super) replies: Arc<Vec<Reply>>,
}

/// A live session. One that ended is absent, and its incarnation is never used again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Session {
    pub(super) prefix: Prefix,
    pub(super) prefix_id: PrefixId,
    pub(super) kind: SessionKind,
    pub(super) replica: String,
    pub(super) node: NodeId,
    pub(super) lease_ms: u64,
    /// The last renewal.
    pub(super) seq: u64,
    /// The lock it stands for; set exactly where the kind is `Lock`.
    pub(super) lock: Option<Arc<QueueKey>>,
}

/// Names a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct TicketKey {
    pub(super) prefix: PrefixId,
    pub(super) ticket: TicketId,
}

/// A live ticket. It is durable exactly as long as the journal has a record under its key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ticket {
    pub(super) queue: Arc<QueueKey>,
    /// `None` only for a durable ticket while no replica lives; one that has ended only while its
    /// end goes on.
    pub(super) owner: Option<Incarnation>,
    /// Set exactly while it is granted.
    pub(super) grant: Option<Grant>,
}

/// A queue with tickets, or one without whose last holder is remembered.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Queue {
    /// Who was granted last.
    pub(super) last: Option<Incarnation>,
    /// When it became idle, counted in [`Meta::idle`]; 0 while it has tickets.
    pub(super) idle: u64,
    /// Its tickets in order, which is the order of their ids: found again from the tickets on load.
    #[serde(skip)]
    pub(super) line: std::collections::VecDeque<TicketId>,
}

/// A fence that goes on with the next ticket of the session that was granted last (SPEC B10).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    pub(super) fence: Fence,
    /// How much was said under it in the turns that ended.
    pub(super) said: u64,
}

/// Bytes that are somebody else's; shared, so that copying a shard does not copy them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Payload(pub(super) Arc<[u8]>);

impl Serialize for Payload {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Payload {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes: Vec<u8> = serde_bytes::deserialize(deserializer)?;
        Ok(Self(bytes.into()))
    }
}

/// A row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StoredRow {
    pub(super) value: Payload,
    pub(super) revision: Revision,
    pub(super) expires_ms: Option<u64>,
}

/// A message id seen.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Seen {
    /// Hash of the body it came with.
    pub(super) body: u64,
    pub(super) seen_ms: u64,
    /// Its number among all ids seen.
    pub(super) order: u64,
}

/// Names a chat's outbox.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct ChatName {
    pub(super) prefix: PrefixId,
    pub(super) chat: String,
}

/// Names one entry of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct EntryKey {
    pub(super) chat: Arc<ChatName>,
    pub(super) number: u64,
}

/// A chat's outbox: entries `first..=last` are listed, those above `sent` have to be sent yet.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Outbox {
    /// Number of the newest entry; 0 before the first.
    pub(super) last: u64,
    /// Everything up to here was sent or needed no sending.
    pub(super) sent: u64,
    /// The oldest entry listed.
    pub(super) first: u64,
    /// The oldest number whose id is still known.
    pub(super) known: u64,
    /// How many sent entries stay listed: the newest entry's wish.
    pub(super) keep: u32,
    /// Who sends; set only while something is unsent.
    pub(super) owner: Option<Incarnation>,
}

/// Names a task.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct TaskKey {
    pub(super) prefix: PrefixId,
    pub(super) id: String,
}

/// A scheduled task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) due_ms: u64,
    pub(super) body: Payload,
    pub(super) claimed_by: Option<Incarnation>,
    /// The fence of the last claim.
    pub(super) fence: Fence,
    pub(super) attempt: u32,
}

/// The answer to a caller's idempotency key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct KeyedReply {
    pub(super) fingerprint: [u8; 16],
    pub(super) reply: Arc<Reply>,
    pub(super) expires_ms: u64,
}

/// Defines the tables once, and from that all that must not forget one of them.
macro_rules! tables {
    ($($(#[$doc:meta])* $tag:literal $name:ident: $key:ty => $value:ty, $shelf:ident, $shards:expr;)*) => {
        /// Every replicated table.
        #[derive(Debug, Clone)]
        pub(super) struct Tables {
            pub(super) meta: Meta,
            /// The counters as the last cut wrote them.
            meta_cut: Option<Meta>,
            $($(#[$doc])* pub(super) $name: Table<$key, $value, $shelf<$key, $value>>,)*
        }

        /// Every table held still.
        #[derive(Debug, Clone)]
        pub(super) struct FrozenTables {
            meta: Meta,
            $($name: FrozenTable<$key, $value, $shelf<$key, $value>>,)*
        }

        /// The changes of every table held still.
        #[derive(Debug)]
        pub(super) struct CutTables {
            meta: Option<Meta>,
            $($name: CutTable<$key, $value, $shelf<$key, $value>>,)*
        }

        impl Tables {
            /// The tags of all of them: where one is added, [`super::LEVEL`] rises.
            #[cfg(test)]
            pub(super) const TAGS: &'static [u8] = &[META_TAG, $($tag),*];

            pub(super) fn new(meta: Meta) -> Self {
                Self { meta, meta_cut: None, $($name: Table::new($shards),)* }
            }

            pub(super) fn freeze(&self) -> FrozenTables {
                FrozenTables { meta: self.meta, $($name: self.$name.freeze(),)* }
            }

            pub(super) fn cut(&mut self) -> CutTables {
                let meta = (self.meta_cut != Some(self.meta)).then_some(self.meta);
                self.meta_cut = Some(self.meta);
                CutTables { meta, $($name: self.$name.cut(),)* }
            }

            /// Forgets what changed: this very state is on disk.
            pub(super) fn mark_clean(&mut self) {
                self.meta_cut = Some(self.meta);
                $(self.$name.mark_clean();)*
            }

            /// Takes one record of a stored state. The counters come back apart.
            pub(super) fn load(
                &mut self,
                key: &[u8],
                value: &[u8],
            ) -> Result<Option<Meta>, LoadError> {
                match key {
                    [META_TAG] => return decode(value).map(Some),
                    $([$tag, key @ ..] => load_into(&mut self.$name, key, value)?,)*
                    [tag, ..] => {
                        let why = format!("it has records of a table {tag}");
                        return Err(LoadError::Newer(why));
                    }
                    [] => return Err(LoadError::Corrupt("a record without a key".into())),
                }
                Ok(None)
            }
        }

        impl FrozenTables {
            /// How many records [`FrozenTables::records`] gives.
            pub(super) fn len(&self) -> u64 {
                1 $(+ self.$name.len())*
            }

            /// All records, by table and key.
            pub(super) fn records(&self) -> Box<dyn Iterator<Item = (Vec<u8>, Vec<u8>)> + '_> {
                let all = std::iter::once((vec![META_TAG], super::stored::encode(&self.meta)));
                $(let all = all.chain(Late::new(move || self.$name.records($tag)));)*
                Box::new(all)
            }

            /// All records in no order that means anything.
            pub(super) fn records_unordered(
                &self,
            ) -> Box<dyn Iterator<Item = (Vec<u8>, Vec<u8>)> + '_> {
                let all = std::iter::once((vec![META_TAG], super::stored::encode(&self.meta)));
                $(let all = all.chain(self.$name.records_unordered($tag));)*
                Box::new(all)
            }
        }

        impl CutTables {
            pub(super) fn records(
                &self,
            ) -> Box<dyn Iterator<Item = (Vec<u8>, Option<Vec<u8>>)> + '_> {
                let meta = self.meta.iter();
                let all = meta.map(|meta| (vec![META_TAG], Some(super::stored::encode(meta))));
                $(let all = all.chain(self.$name.records($tag));)*
                Box::new(all)
            }

            pub(super) fn is_empty(&self) -> bool {
                self.meta.is_none() $(&& self.$name.is_empty())*
            }
        }
    };
}

/// Shards of a table that grows with the chats; few in the machine's own tests, which walk all of
/// them after every command.
const MANY: usize = if cfg!(test) { 4 } else { 1024 };

/// Shards of a table that stays smaller.
const FEW: usize = if cfg!(test) { 2 } else { 64 };

/// The tag of the one record that holds [`Meta`].
const META_TAG: u8 = 1;

tables! {
    /// How often each node's data directory was opened, as far as its batches told.
    2 clients: NodeId => u64, Hashed, 1;
    /// The last answers of every lane.
    3 lanes: (NodeId, u16) => Lane, BTreeMap, 1;
    /// Every prefix ever used.
    4 prefixes: Prefix => PrefixRecord, Hashed, 1;
    /// Live sessions.
    5 sessions: Incarnation => Session, Hashed, FEW;
    /// Queues that have tickets or a remembered last holder.
    6 queues: Arc<QueueKey> => Queue, Hashed, MANY;
    /// Live tickets.
    7 tickets: TicketKey => Ticket, Hashed, MANY;
    /// Rows, ended ones included until they are swept.
    8 rows: Arc<RowKey> => StoredRow, BTreeMap, MANY;
    /// Messages that are not acknowledged.
    9 journal: TicketKey => Arc<JournalRecord>, Hashed, MANY;
    /// Message ids seen, by digest.
    10 seen: Digest => Seen, Hashed, MANY;
    /// Outboxes.
    11 outboxes: Arc<ChatName> => Outbox, Hashed, MANY;
    /// Listed entries of outboxes.
    12 entries: EntryKey => Arc<OutboxEntry>, Hashed, MANY;
    /// Ids of entries that are no longer listed, by digest.
    13 sent_ids: EntryKey => Digest, Hashed, MANY;
    /// Messages given up.
    14 dead: TicketKey => Arc<JournalRecord>, BTreeMap, 1;
    /// Scheduled tasks.
    15 tasks: TaskKey => Task, Hashed, FEW;
    /// Answers to callers' idempotency keys.
    16 keyed: Arc<IdempotencyKey> => KeyedReply, Hashed, FEW;
    /// The process of each session that named one.
    17 processes: Incarnation => ProcessToken, Hashed, FEW;
    /// Processes that are certainly dead, by the order in which that became known.
    18 dead_processes: u64 => ProcessToken, Hashed, 1;
    /// Fences that go on, by the queue of the turn.
    19 kept: Arc<QueueKey> => Kept, Hashed, MANY;
    /// The leads that channels belong to.
    21 homes: (PrefixId, String) => Arc<QueueKey>, Hashed, 1;
    /// The agreed level; one record, once it is above the lowest.
    22 levels: () => u32, BTreeMap, 1;
    /// Sessions that have ended and still leave something.
    23 endings: Incarnation => EndReason, BTreeMap, 1;
}

impl Tables {
    /// The agreed level.
    pub(super) fn level(&self) -> u32 {
        self.levels.get(&()).copied().unwrap_or(super::LEVEL_LOWEST)
    }
}

fn load_into<K, V, S>(table: &mut Table<K, V, S>, key: &[u8], value: &[u8]) -> Result<(), LoadError>
where
    K: Ord + Hash + Clone + serde::de::DeserializeOwned,
    V: Clone + serde::de::DeserializeOwned,
    S: Shelf<K, V>,
{
    match table.insert(decode(key)?, decode(value)?) {
        None => Ok(()),
        Some(_) => Err(LoadError::Corrupt("a record comes twice".into())),
    }
}

/// An iterator made when it is first asked: a table is sorted only when its turn comes.
struct Late<F, I> {
    make: Option<F>,
    made: Option<I>,
}

impl<F, I> Late<F, I> {
    fn new(make: F) -> Self {
        Self { make: Some(make), made: None }
    }
}

impl<F: FnOnce() -> I, I: Iterator> Iterator for Late<F, I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        if let Some(make) = self.make.take() {
            self.made = Some(make());
        }
        let next = self.made.as_mut()?.next();
        if next.is_none() {
            self.made = None;
        }
        next
    }
}
