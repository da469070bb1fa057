//! What the machine can be asked to do.
//!
//! A [`Batch`] is one log entry: the commands that gathered at one node while its previous batch
//! was in flight (DESIGN 1). It carries who sent it as (client, lane, serial), and the machine
//! remembers the answers of the last batch of every lane, so a batch sent twice is applied once
//! (SPEC B8): see [`Batch`]. Enums here grow only at the end (DESIGN 8), and what is added has a level
//! (see [`super::level`]), so that older programs in the group are never given it.

use serde::{Deserialize, Serialize};

use super::Limits;
use crate::types::{Fence, Incarnation, NodeId, Prefix, ProcessToken, Revision, TicketId};

/// One run of one node's process, as the sender of batches. `boot` grows with every start of the
/// same data directory, so a batch of an earlier run that arrives late is told from a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClientId {
    /// The node.
    pub node: NodeId,
    /// How often its data directory has been opened.
    pub boot: u64,
}

/// One log entry.
///
/// A client has a fixed number of lanes; every command for one key goes through one lane, and a
/// lane has one batch in flight: so commands of one chat are applied in the order they were asked
/// (SPEC B1), and remembering one batch of answers a lane is enough. At apply: `serial` = next →
/// run; below → the remembered answers, nothing runs; above → refused as a gap; an older boot →
/// refused; a newer boot forgets the older one's lanes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    /// Who sent it.
    pub client: ClientId,
    /// Which of the client's lanes.
    pub lane: u16,
    /// Consecutive in its lane, from 0.
    pub serial: u64,
    /// The proposer's wall clock, ms since the Unix epoch. The machine's time is the greatest
    /// stamp so far; it decides ttl of rows and of remembered answers, never a lease (DESIGN 9).
    pub stamp_ms: u64,
    /// In the order they were asked.
    pub commands: Vec<Command>,
}

/// The kinds of queue. Keys of different kinds never meet (SPEC K6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum QueueKind {
    /// A chat's turn.
    Turn,
    /// A named lead.
    Lead,
    /// A fenced lock; each holder is a session of its own.
    Lock,
}

/// Names one queue.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct QueueKey {
    /// Turn, lead or lock.
    pub kind: QueueKind,
    /// The bot.
    pub prefix: Prefix,
    /// The chat's canonical string, the lead's name or the lock's key.
    pub name: String,
}

/// What a session stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionKind {
    /// A bot replica: it can be given journaled tickets of a dead one.
    Replica,
    /// A program that uses the HTTP API.
    Remote,
    /// One acquisition of a fenced lock; ends when its ttl does.
    Lock,
}

/// The tables of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Table {
    /// A chat's conversation.
    Checkpoint,
    /// A user's state.
    User,
    /// A chat's own facts.
    Chat,
    /// Whatever the bot keeps.
    Kv,
}

/// Names one row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RowKey {
    /// Which table.
    pub table: Table,
    /// The bot.
    pub prefix: Prefix,
    /// The key; for checkpoints a chat's canonical string.
    pub key: String,
}

/// The condition of a compare-and-set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Expect {
    /// Whatever is there.
    Any,
    /// Nothing may be there.
    Absent,
    /// Exactly this revision.
    Revision(Revision),
}

/// In whose name a write is made. The write is accepted only while exactly this holds (SPEC C10).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Authority {
    /// Nobody's: the conditions of the operations decide alone.
    Nobody,
    /// The holder of a queue's turn or lead: exactly this fence, and where given exactly this
    /// session, live.
    Holder {
        /// The turn or lead.
        queue: QueueKey,
        /// Its fence.
        fence: Fence,
        /// The session that holds it; `None` over HTTP, where the fence alone names the grant.
        session: Option<Incarnation>,
    },
}

/// One operation of a [`Command::Commit`]. All are done or none (SPEC F5).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Op {
    /// Writes a row. Answer: its new revision.
    Put {
        /// Which row.
        row: RowKey,
        /// The new value.
        #[serde(with = "serde_bytes")]
        value: Vec<u8>,
        /// The condition.
        expect: Expect,
        /// When the row ends, in ms of machine time from now; `None` = never.
        ttl_ms: Option<u64>,
    },
    /// Deletes a row. With `Expect::Any` deleting an absent row succeeds; with a revision it is
    /// refused.
    Delete {
        /// Which row.
        row: RowKey,
        /// The condition.
        expect: Expect,
    },
    /// The journaled message of this ticket has had its effect: its record goes (SPEC C9). Refused
    /// unless the authority holds exactly this ticket.
    Acknowledge {
        /// The bot.
        prefix: Prefix,
        /// The message's ticket.
        ticket: TicketId,
    },
    /// Appends to the chat's outbox. An id the outbox already knows is passed over (SPEC G3).
    Send {
        /// The bot.
        prefix: Prefix,
        /// The chat's canonical string.
        chat: String,
        /// What to send.
        send: Outgoing,
    },
    /// Ends the ticket as [`Command::Release`] does, in the same apply.
    Release {
        /// The bot.
        prefix: Prefix,
        /// The ticket.
        ticket: TicketId,
    },
    /// Puts a message into the journal and its chat's queue, in the bot's own name (SPEC G5).
    Post {
        /// The bot.
        prefix: Prefix,
        /// The message.
        message: Admit,
        /// The session that owns the ticket; `None` = any live replica.
        session: Option<Incarnation>,
    },
    /// Ends the holder's own ticket of a turn and lets its fence go on: the queue's next ticket, one
    /// that waits already or one that comes before anybody else's, is granted under the same fence
    /// where it is the same session's (SPEC B10). Refused for a message that is not acknowledged.
    Keep {
        /// The bot.
        prefix: Prefix,
        /// The ticket.
        ticket: TicketId,
        /// How much was said under the fence so far: where the next turn's `turn_seq` goes on.
        said: u64,
    },
    /// Says whose a channel's messages and replies are: those of whoever holds the lead, or of any
    /// replica (SPEC D6). What is there moves at once.
    Home {
        /// The bot.
        prefix: Prefix,
        /// The channel, as chats' canonical strings begin.
        channel: String,
        /// The lead's name; `None` = any replica's.
        lead: Option<String>,
    },
}

/// A reply on its way out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outgoing {
    /// Stable id: the same step run again makes the same id.
    pub id: String,
    /// Id of the message that caused it.
    pub in_reply_to: String,
    /// The provider's own format (JSON).
    #[serde(with = "serde_bytes")]
    pub body: Vec<u8>,
    /// Orders the sends of one fence.
    pub turn_seq: u64,
    /// `true`: a transport has to send it, and the outbox keeps it until [`Command::MarkSent`].
    /// `false`: being listed is all (web chat, generic webhook without a reply URL).
    pub deliver: bool,
    /// How many entries of this chat stay listed after they were sent.
    pub keep: u32,
}

/// One message to journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Admit {
    /// The provider's id; with `channel` what is deduplicated.
    pub id: String,
    /// The provider.
    pub channel: String,
    /// The chat's canonical string.
    pub chat: String,
    /// The message (JSON).
    #[serde(with = "serde_bytes")]
    pub body: Vec<u8>,
}

/// Who the caller's `Idempotency-Key` belongs to (SPEC K6).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct IdempotencyKey {
    /// The prefix.
    pub prefix: Prefix,
    /// The session, where the call names one.
    pub session: Option<Incarnation>,
    /// The caller's key.
    pub key: String,
}

/// One command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Does nothing; commits. What a bare Raft commit costs is measured with it.
    Noop,
    /// Opens a session → [`super::Reply::Session`].
    OpenSession {
        /// The bot.
        prefix: Prefix,
        /// What it stands for.
        kind: SessionKind,
        /// The replica's own name; empty for other kinds.
        replica: String,
        /// The node it runs on or came in by.
        node: NodeId,
        /// The lease, in ms. The machine keeps it within its limits and answers what it granted.
        lease_ms: u64,
    },
    /// Renews a session → `Renewed`, `SessionExpired`, or `Stale` for a `seq` not above the last.
    RenewSession {
        /// Which.
        session: Incarnation,
        /// The holder's own count; a retry keeps it (DESIGN 3 rule 2). `None` = the next one.
        seq: Option<u64>,
    },
    /// Ends a session on its own wish → `Done` or `SessionExpired`.
    CloseSession {
        /// Which.
        session: Incarnation,
    },
    /// Ends a session whose deadline passed on some node, unless it was renewed meanwhile
    /// (DESIGN 3) → `Done` or `Stale`.
    ExpireSession {
        /// Which.
        session: Incarnation,
        /// The last renewal that node had seen.
        seq: u64,
    },
    /// Takes a ticket → `Ticket`, `Held` (with `if_free`), `SessionExpired`, `Full`.
    TakeTicket {
        /// Whose.
        session: Incarnation,
        /// Where.
        queue: QueueKey,
        /// Only if nobody is there.
        if_free: bool,
    },
    /// Ends a ticket: a release where it was granted, else a withdrawal. A journaled ticket whose
    /// message was not acknowledged is *returned*: it keeps its place, counts an attempt and is
    /// granted again; after the last attempt it becomes a dead letter (SPEC C9).
    /// → `Done`, `TicketGone`, `UnknownTicket`, `SessionExpired`, `NotYours`; `Stale` for a
    /// journaled ticket that still waits: its message was accepted and keeps its place.
    Release {
        /// The bot.
        prefix: Prefix,
        /// Which.
        ticket: TicketId,
        /// Whose it must be.
        session: Incarnation,
    },
    /// Withdraws or releases by queue instead of by ticket: ends this session's granted ticket, or
    /// its first, in the queue → as `Release`. Leads over HTTP use it.
    ReleaseQueue {
        /// Where.
        queue: QueueKey,
        /// Whose.
        session: Incarnation,
    },
    /// Takes a fenced lock if it is free → `Lock` or `Held`.
    AcquireLock {
        /// The bot.
        prefix: Prefix,
        /// The lock.
        key: String,
        /// How long it is held from this apply on, in ms.
        ttl_ms: u64,
        /// The node that asks.
        node: NodeId,
    },
    /// Renews a lock; `token` is the incarnation its acquisition answered → `Renewed` or `Stale`.
    RenewLock {
        /// The bot.
        prefix: Prefix,
        /// The lock.
        key: String,
        /// The acquisition.
        token: Incarnation,
        /// The new ttl, in ms.
        ttl_ms: u64,
    },
    /// Releases a lock → `Done` or `Stale`.
    ReleaseLock {
        /// The bot.
        prefix: Prefix,
        /// The lock.
        key: String,
        /// The acquisition.
        token: Incarnation,
    },
    /// Several operations, all or none → `Committed`, `Refused`.
    Commit {
        /// In whose name.
        by: Authority,
        /// In order.
        ops: Vec<Op>,
    },
    /// Checks ids, journals the new messages and takes their tickets, in order (SPEC B9)
    /// → `Admitted` or `SessionExpired`.
    Admit {
        /// The bot.
        prefix: Prefix,
        /// The replica that will handle them.
        session: Incarnation,
        /// In order of arrival.
        messages: Vec<Admit>,
        /// The transport's cursor, moved in the same apply (SPEC D5); all or nothing with the
        /// messages.
        #[serde(deserialize_with = "crate::codec::nested")]
        cursor: Option<Box<Command>>,
    },
    /// The first outbox entries of a chat, up to and with this number, were sent → `Done`.
    MarkSent {
        /// The bot.
        prefix: Prefix,
        /// The chat.
        chat: String,
        /// Number of the last one sent.
        up_to: u64,
        /// The session that sent them; refused (`NotYours`) unless it owns the chat's outbox.
        session: Incarnation,
    },
    /// Creates or replaces a task → `Done`, or `Stale` while an occurrence of it is claimed.
    PutTask {
        /// The bot.
        prefix: Prefix,
        /// The task's id.
        id: String,
        /// Next due instant, ms since the Unix epoch, machine time.
        due_ms: u64,
        /// Its owner's data (JSON).
        #[serde(with = "serde_bytes")]
        body: Vec<u8>,
    },
    /// Claims the occurrence of a task at `due_ms` → `Claimed`, or `Stale` where it is another's, is
    /// not the next one, or is still to come by machine time (SPEC G4).
    ClaimTask {
        /// The bot.
        prefix: Prefix,
        /// The task.
        id: String,
        /// The occurrence.
        due_ms: u64,
        /// Who runs it.
        session: Incarnation,
    },
    /// Ends a claimed occurrence and sets the next one; `None` removes the task → `Done`, `Stale`.
    FinishTask {
        /// The bot.
        prefix: Prefix,
        /// The task.
        id: String,
        /// The occurrence.
        due_ms: u64,
        /// Who ran it.
        session: Incarnation,
        /// The next due instant.
        next_ms: Option<u64>,
    },
    /// Runs `command` once for this key, however often and through whichever node it comes
    /// (SPEC K6) → the command's own reply, `KeyReused`, or `KeysFull`.
    Keyed {
        /// The caller's key.
        key: IdempotencyKey,
        /// Hash of the whole request: the same key with another is refused.
        #[serde(with = "serde_bytes")]
        fingerprint: [u8; 16],
        /// What to run.
        #[serde(deserialize_with = "crate::codec::nested")]
        command: Box<Command>,
    },
    /// Puts a dead letter back at the end of its chat's queue, attempts at zero, or drops it
    /// → `Done` or `UnknownTicket`.
    DeadLetter {
        /// The bot.
        prefix: Prefix,
        /// The ticket it had.
        ticket: TicketId,
        /// `true` = retry, `false` = drop.
        retry: bool,
    },
    /// Opens a session as `command` says ([`Command::OpenSession`]; others run as they are), in the
    /// name of a process → the command's own reply; `SessionExpired` where the process was declared
    /// dead, however early that report came.
    ForProcess {
        /// The process the session belongs to.
        process: ProcessToken,
        /// What to run.
        #[serde(deserialize_with = "crate::codec::nested")]
        command: Box<Command>,
    },
    /// The process is certainly dead: whoever says so has waited for it, or holds a lock that it
    /// held until it ended. Ends all its sessions in one apply, and every later opening in its name
    /// is refused → `Done`.
    DeclareDead {
        /// The process.
        process: ProcessToken,
    },
    /// Sees to it that a task is there with this body: creates it, leaves one with the same body as
    /// it is, gives one with another body the new body and due instant → `Done`, or `Stale` for
    /// another body while an occurrence is claimed. All replicas may say it, at every start.
    EnsureTask {
        /// The bot.
        prefix: Prefix,
        /// The task's id.
        id: String,
        /// Due instant of its first occurrence, ms since the Unix epoch, machine time.
        due_ms: u64,
        /// Its owner's data (JSON).
        #[serde(with = "serde_bytes")]
        body: Vec<u8>,
    },
    /// Gives a claimed occurrence back, to be claimed again with one attempt more
    /// → `Done` or `Stale`.
    ReturnTask {
        /// The bot.
        prefix: Prefix,
        /// The task.
        id: String,
        /// The occurrence.
        due_ms: u64,
        /// Who claimed it.
        session: Incarnation,
    },
    /// A chat's key changes: its queue, rows, outbox and dead letters move, with all that stands below
    /// the old key (SPEC B2) → `Done`, also where there is nothing to move; `Taken` where both keys
    /// have a row; `Full`; `Stale` where one key lies below the other.
    Rekey {
        /// The bot.
        prefix: Prefix,
        /// The old key: a chat's canonical string.
        from: String,
        /// The new one.
        to: String,
        /// Keys of user rows that change with it, old and new.
        users: Vec<(String, String)>,
        /// Where both keys have a row, the new key's stays and the old one's goes.
        keep_new: bool,
    },
    /// Ends a session whose holder gave it up: it counts as expired, for what it sent last may have
    /// arrived or not → `Done` or `SessionExpired`.
    GiveUpSession {
        /// Which.
        session: Incarnation,
    },
    /// Every voter's program knows commands up to this level: from now on they may be proposed
    /// (SPEC M5) → `Done`. A lower one than is agreed changes nothing.
    RaiseLevel {
        /// The level.
        level: u32,
    },
    /// The bounds hold from now on (SPEC G1, M3) → `Done`. What is beyond a bound that became smaller
    /// is let go as far as it is only remembered; what waits stays.
    SetLimits {
        /// All of them.
        limits: Limits,
    },
}
