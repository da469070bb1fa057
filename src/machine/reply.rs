//! What the machine answers, and what follows from it.
//!
//! A [`Reply`] goes to whoever asked, also when the same command comes again. An [`Effect`] is a
//! fact every node learns as it applies the entry; each node acts on the ones that concern it. The
//! machine performs none of them.

use serde::{Deserialize, Serialize};

use super::command::{QueueKey, RowKey};
use crate::types::{Fence, Incarnation, Prefix, Revision, TicketId};

/// What became of a [`super::Batch`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum BatchReply {
    /// It ran, now or when it came first: one reply a command.
    Applied(Vec<Reply>),
    /// It ran before the last batch of its lane; nobody waits for it any more.
    Forgotten,
    /// A batch before it is missing: send from `next` on. Nothing ran.
    Gap {
        /// The serial the lane waits for.
        next: u64,
    },
    /// The node has been started again since; nothing ran.
    Superseded {
        /// The node's newest boot.
        boot: u64,
    },
}

/// A granted ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The grant's fence.
    pub fence: Fence,
    /// Who held the queue before; `None` = nobody the machine remembers, which counts as another.
    pub previous: Option<Incarnation>,
}

/// Who is in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The session that holds the queue, or the first that waits.
    pub session: Incarnation,
    /// Its fence, once granted.
    pub fence: Option<Fence>,
}

/// Which bound was met (SPEC M3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Limit {
    /// Tickets waiting in one queue.
    TicketsPerQueue,
    /// Live sessions.
    Sessions,
    /// Remembered idempotency keys of a prefix.
    IdempotencyKeys,
    /// Bytes of a key.
    KeyBytes,
    /// Bytes of a value.
    ValueBytes,
    /// Prefixes.
    Prefixes,
    /// Unsent entries of one chat's outbox.
    OutboxEntries,
}

/// What became of one message of an admission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Admission {
    /// Journaled; this is its place in the chat's queue.
    Fresh {
        /// Its ticket.
        ticket: TicketId,
        /// Set where the turn was free.
        grant: Option<Grant>,
    },
    /// Seen before (SPEC G1).
    Duplicate {
        /// Whether the body was the same too.
        same_body: bool,
    },
    /// Not taken: a bound was met. The same message may be sent again later.
    Full(Limit),
}

/// Why a [`super::Command::Commit`] was refused. Nothing of it was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The condition of this operation does not hold.
    Superseded {
        /// Index of the operation.
        op: u32,
        /// The revision that is there.
        found: Option<Revision>,
    },
    /// The authority does not hold the queue (any more).
    Fenced {
        /// Who does.
        holder: Option<Holder>,
    },
    /// The session is not alive.
    SessionExpired,
    /// A bound was met.
    Full {
        /// Index of the operation.
        op: u32,
        /// Which.
        limit: Limit,
    },
}

/// The answer to one command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// Done; nothing to say.
    Done,
    /// A session.
    Session {
        /// Its incarnation.
        session: Incarnation,
        /// The lease granted, in ms.
        lease_ms: u64,
        /// Set when another live incarnation runs under the same replica id: the older one, which
        /// goes on until it ends or its lease does.
        shared_with: Option<Incarnation>,
    },
    /// A renewal was accepted.
    Renewed {
        /// The renewal's number.
        seq: u64,
        /// The lease, in ms.
        lease_ms: u64,
        /// A newer live incarnation under the same replica id (SPEC A3: `ReplicaIdShared`).
        shared_with: Option<Incarnation>,
    },
    /// The session is not alive: never opened, closed, expired. It does not come back. To an
    /// opening: the process it was for was declared dead.
    SessionExpired,
    /// A place in a queue.
    Ticket {
        /// The ticket.
        ticket: TicketId,
        /// Set where granted at once.
        grant: Option<Grant>,
        /// How many tickets are before it, the holder's included.
        ahead: u64,
    },
    /// A lock.
    Lock {
        /// Names this acquisition.
        token: Incarnation,
        /// Its fence.
        fence: Fence,
        /// The ttl granted, in ms.
        ttl_ms: u64,
    },
    /// Somebody else has it.
    Held(Holder),
    /// The ticket was never allocated in this prefix.
    UnknownTicket,
    /// The ticket was allocated and has ended.
    TicketGone,
    /// The ticket is another session's.
    NotYours,
    /// Refused as too old: a renewal, an expiry, a lock's token, a task's occurrence.
    Stale,
    /// One revision an operation that wrote a row, in order; zero for the others.
    Committed(Vec<Revision>),
    /// Nothing was written.
    Refused(Refusal),
    /// One answer a message.
    Admitted(Vec<Admission>),
    /// A task's occurrence is the caller's.
    Claimed {
        /// Grows with every claim.
        fence: Fence,
        /// How often this occurrence was claimed, this one included.
        attempt: u32,
    },
    /// A bound was met; nothing was done.
    Full(Limit),
    /// The idempotency key was used with another request; nothing was done.
    KeyReused,
    /// Something is there already; nothing was done.
    Taken {
        /// What.
        row: RowKey,
    },
}

/// Why a session ended. Stored where its end goes on: only grows, at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndReason {
    /// It closed itself.
    Closed,
    /// It was not renewed in time.
    Expired,
    /// Its process is certainly dead.
    Dead,
}

/// A fact that follows from an entry.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// The session was opened or renewed: its deadline on this node is now + lease.
    SessionArmed {
        /// Which.
        session: Incarnation,
        /// Its last renewal.
        seq: u64,
        /// The lease, in ms.
        lease_ms: u64,
    },
    /// The session ended, with all it held.
    SessionEnded {
        /// Which.
        session: Incarnation,
        /// Why.
        reason: EndReason,
    },
    /// A ticket came to the head of its queue.
    Granted {
        /// The owner.
        session: Incarnation,
        /// The queue.
        queue: QueueKey,
        /// The ticket.
        ticket: TicketId,
        /// The grant.
        grant: Grant,
    },
    /// A ticket came to stand behind the one that holds a turn: whoever holds it though it does
    /// nothing is to let it go.
    CalledBack {
        /// The holder.
        session: Incarnation,
        /// The queue.
        queue: QueueKey,
    },
    /// A ticket ended, granted or not.
    TicketEnded {
        /// The owner, where it had one.
        session: Option<Incarnation>,
        /// The bot.
        prefix: Prefix,
        /// The ticket.
        ticket: TicketId,
    },
    /// A journaled ticket has a new owner, which does not know of it yet. Where it is granted at
    /// once, `Granted` follows.
    Adopted {
        /// The new owner.
        session: Incarnation,
        /// The queue.
        queue: QueueKey,
        /// The ticket.
        ticket: TicketId,
    },
    /// The chat's outbox, with something to send, came to this session from one that ended without
    /// closing: whether its first entry went out is unknown. `OutboxReady` follows.
    OutboxAdopted {
        /// Who sends from now on.
        session: Incarnation,
        /// The bot.
        prefix: Prefix,
        /// The chat.
        chat: String,
    },
    /// The chat's outbox has something to send, and this session is to send it. Raised when an
    /// entry is added, when the head was sent and more is there, and when the owner changes.
    OutboxReady {
        /// Who sends.
        session: Incarnation,
        /// The bot.
        prefix: Prefix,
        /// The chat.
        chat: String,
    },
    /// The list of a chat's replies grew.
    Replied {
        /// The bot.
        prefix: Prefix,
        /// The chat.
        chat: String,
    },
    /// A message was given up after its last attempt.
    DeadLettered {
        /// The bot.
        prefix: Prefix,
        /// The chat.
        chat: String,
        /// The ticket it had.
        ticket: TicketId,
        /// The message's id.
        id: String,
    },
    /// A message id came again with another body.
    BodyDiffers {
        /// The bot.
        prefix: Prefix,
        /// The message's id.
        id: String,
    },
    /// A row changed.
    RowChanged(RowKey),
    /// A task was put, claimed, finished or freed.
    TaskChanged {
        /// The bot.
        prefix: Prefix,
        /// The task.
        id: String,
    },
    /// Take a hash of the logical state now (SPEC N4 `state_marks`).
    Mark,
}
