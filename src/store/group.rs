//! The store over a group: a node of a Raft group, or a hub in memory.
//!
//! Every write is one command, so it is done whole or not at all, and exactly once however often
//! the group had to be asked. An answer that did not come stays *unknown*: it is never folded into
//! "not written".

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{
    Authority, Claim, CommitError, Consistency, DeadLetter, Feature, FencedLock, JournalRecord, Op,
    OutboxEntry, RekeyError, Row, RowKey, Store, StoreError, Table, Taken, Task,
};
use crate::clock::BootInstant;
use crate::coordinator::{CoordinatorOptions, GroupCoordinator, LostReason, MemoryCoordinator};
use crate::group::{ExecuteError, Group, MemoryHub, Topic, look};
use crate::machine::{
    Authority as Holding, Command, Limit, Machine, Op as Step, QueueKey, QueueKind, Refusal, Reply,
    RowKey as Key,
};
use crate::types::{
    ChatKey, Incarnation, KEY_BYTES_MAX, Prefix, Revision, TicketId, VALUE_BYTES_MAX,
};

/// How long one operation may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// A store over a group, scoped to one prefix. Cheap to clone.
#[derive(Clone)]
pub struct GroupStore {
    group: Arc<dyn Group>,
    prefix: Prefix,
    shared: bool,
}

/// The store over a node of a Raft group: `RaftStore::new(node, prefix)`.
pub type RaftStore = GroupStore;

impl fmt::Debug for GroupStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = self.group.node_id();
        f.debug_struct("GroupStore").field("prefix", &self.prefix).field("node", &node).finish()
    }
}

impl GroupStore {
    /// The rows of this prefix in this group.
    pub fn new(group: Arc<dyn Group>, prefix: Prefix) -> Self {
        Self { group, prefix, shared: true }
    }

    /// A coordinator of the same group and prefix.
    pub fn coordinator(&self, options: CoordinatorOptions) -> GroupCoordinator {
        GroupCoordinator::new(self.group.clone(), self.prefix.clone(), options)
    }

    /// The group it stands on.
    pub fn group(&self) -> &Arc<dyn Group> {
        &self.group
    }

    fn key(&self, row: &RowKey) -> Key {
        Key { table: row.table, prefix: self.prefix.clone(), key: row.key.clone() }
    }

    fn look<T>(&self, read: impl FnOnce(&Machine) -> T) -> T {
        look(&*self.group, read)
    }

    /// Waits until this node has applied all that was acknowledged.
    async fn barrier(&self) -> Result<(), StoreError> {
        self.group
            .barrier(self.deadline())
            .await
            .map_err(|why| StoreError::Unavailable { why: why.to_string() })
    }

    async fn execute(&self, command: Command, deadline: BootInstant) -> Result<Reply, CommitError> {
        self.group.execute(command, deadline).await.map_err(failed)
    }

    fn holding(&self, by: &Authority<'_>) -> Result<(Holding, BootInstant), CommitError> {
        let deadline = self.deadline();
        match by {
            Authority::Nobody => Ok((Holding::Nobody, deadline)),
            Authority::Turn(turn) => {
                if turn.check().is_err() {
                    let holder = self.look(|machine| machine.holder(turn.queue()));
                    let holder = holder.map(|holder| (holder.session, holder.fence));
                    return Err(CommitError::Fenced { holder });
                }
                let holding = Holding::Holder {
                    queue: turn.queue().clone(),
                    fence: turn.fence(),
                    session: Some(turn.incarnation()),
                };
                // No act may outlast the right to it (DESIGN 3 rule 7).
                Ok((holding, deadline.min(turn.valid_until())))
            }
            Authority::Lead(lead) => {
                if lead.check().is_err() {
                    let holder = self.look(|machine| machine.holder(lead.queue()));
                    let holder = holder.map(|holder| (holder.session, holder.fence));
                    return Err(CommitError::Fenced { holder });
                }
                let holding = Holding::Holder {
                    queue: lead.queue().clone(),
                    fence: lead.fence(),
                    session: Some(lead.incarnation()),
                };
                Ok((holding, deadline.min(lead.valid_until())))
            }
            Authority::Fence { chat, fence } => {
                let queue = QueueKey {
                    kind: QueueKind::Turn,
                    prefix: self.prefix.clone(),
                    name: (*chat).to_owned(),
                };
                Ok((Holding::Holder { queue, fence: *fence, session: None }, deadline))
            }
        }
    }

    fn step(&self, op: Op) -> Step {
        let prefix = self.prefix.clone();
        match op {
            Op::Put { row, value, expect, ttl_ms } => {
                Step::Put { row: self.key(&row), value, expect, ttl_ms }
            }
            Op::Delete { row, expect } => Step::Delete { row: self.key(&row), expect },
            Op::Acknowledge(ticket) => Step::Acknowledge { prefix, ticket },
            Op::Send { chat, send } => Step::Send { prefix, chat, send },
            Op::Release(ticket) => Step::Release { prefix, ticket },
            Op::Keep { ticket, said } => {
                let keep = Step::Keep { prefix: prefix.clone(), ticket, said };
                // In a group with older programs the turn ends all the same, and so does its fence.
                if keep.level() <= self.group.command_level() {
                    keep
                } else {
                    Step::Release { prefix, ticket }
                }
            }
            Op::Home { channel, lead } => {
                // As chats' canonical strings begin.
                let chat = ChatKey::new(channel, "_").to_string();
                let channel = chat.split(':').next().unwrap_or_default().to_owned();
                Step::Home { prefix, channel, lead }
            }
            Op::Post(message) => Step::Post { prefix, message, session: None },
        }
    }

    /// A yes or no of the machine.
    async fn settle(&self, command: Command) -> Result<bool, CommitError> {
        settled(self.execute(command, self.deadline()).await?)
    }
}

fn settled(reply: Reply) -> Result<bool, CommitError> {
    match reply {
        Reply::Done | Reply::Renewed { .. } => Ok(true),
        Reply::Stale | Reply::UnknownTicket | Reply::NotYours | Reply::SessionExpired => Ok(false),
        other => Err(refused(other)),
    }
}

fn failed(fault: ExecuteError) -> CommitError {
    match fault {
        ExecuteError::NotExecuted(why) => CommitError::Unavailable { why: why.to_string() },
        ExecuteError::OutcomeUnknown(why) => CommitError::OutcomeUnknown { why: why.to_string() },
    }
}

/// What an answer that is none of the expected ones means.
fn refused(reply: Reply) -> CommitError {
    match reply {
        Reply::Refused(Refusal::Superseded { op, found }) => {
            CommitError::Superseded { op: op as usize, found }
        }
        Reply::Refused(Refusal::Fenced { holder }) => {
            CommitError::Fenced { holder: holder.map(|holder| (holder.session, holder.fence)) }
        }
        Reply::Refused(Refusal::SessionExpired) | Reply::SessionExpired => {
            CommitError::Fenced { holder: None }
        }
        Reply::Refused(Refusal::Full { op, limit }) => {
            CommitError::TooLarge { op: op as usize, what: named(limit) }
        }
        Reply::Full(limit) => CommitError::TooLarge { op: 0, what: named(limit) },
        other => CommitError::OutcomeUnknown { why: format!("the group answered {other:?}") },
    }
}

fn named(limit: Limit) -> &'static str {
    match limit {
        Limit::TicketsPerQueue => "tickets in one queue",
        Limit::Sessions => "live sessions",
        Limit::IdempotencyKeys => "remembered idempotency keys",
        Limit::KeyBytes => "bytes of a key",
        Limit::ValueBytes => "bytes of a value",
        Limit::Prefixes => "prefixes",
        Limit::OutboxEntries => "unsent replies of one chat",
    }
}

/// Refuses keys that cannot stand for the same chat.
fn check_rekey(from: &ChatKey, to: &ChatKey) -> Result<(), RekeyError> {
    let why = if from.check().is_err() || to.check().is_err() {
        "one of them is no chat key"
    } else if from.channel != to.channel {
        "a chat stays in its channel"
    } else if from.participant.is_some() != to.participant.is_some() {
        "a room becomes a room, and a participant a participant"
    } else {
        return Ok(());
    };
    Err(RekeyError::Keys { from: from.to_string(), to: to.to_string(), why })
}

/// The key of a user's row: `channel:participant`, or `channel:chat` in a chat between two.
pub(crate) fn user_key(chat: &ChatKey) -> String {
    let who = chat.participant.as_ref().unwrap_or(&chat.chat);
    ChatKey::new(&chat.channel, who).to_string()
}

/// Refuses at the door what the machine would refuse after a round.
fn check_sizes(ops: &[Op]) -> Result<(), CommitError> {
    for (op, step) in ops.iter().enumerate() {
        let (key, value) = match step {
            Op::Put { row, value, .. } => (row.key.len(), value.len()),
            Op::Delete { row, .. } => (row.key.len(), 0),
            Op::Send { chat, send } => (chat.len().max(send.id.len()), send.body.len()),
            Op::Post(message) => (message.chat.len().max(message.id.len()), message.body.len()),
            Op::Acknowledge(_) | Op::Release(_) | Op::Keep { .. } => continue,
            Op::Home { channel, lead } => {
                (channel.len().max(lead.as_ref().map_or(0, String::len)), 0)
            }
        };
        if key > KEY_BYTES_MAX {
            return Err(CommitError::TooLarge { op, what: named(Limit::KeyBytes) });
        }
        if value > VALUE_BYTES_MAX {
            return Err(CommitError::TooLarge { op, what: named(Limit::ValueBytes) });
        }
    }
    Ok(())
}

#[async_trait]
impl Store for GroupStore {
    fn prefix(&self) -> &Prefix {
        &self.prefix
    }

    fn is_shared(&self) -> bool {
        self.shared
    }

    fn supports(&self, _feature: Feature) -> bool {
        true
    }

    async fn read(&self, key: &RowKey, how: Consistency<'_>) -> Result<Option<Row>, StoreError> {
        match how {
            Consistency::Linearizable => self.barrier().await?,
            Consistency::Local => {}
            Consistency::Under(turn) => turn.check().map_err(|reason| StoreError::Unavailable {
                why: format!("the turn of {} is lost ({reason:?}); stop", turn.key()),
            })?,
        }
        Ok(self.look(|machine| machine.row(&self.key(key))))
    }

    async fn scan(
        &self,
        table: Table,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<(RowKey, Row)>, StoreError> {
        self.barrier().await?;
        let first =
            Key { table, prefix: self.prefix.clone(), key: after.unwrap_or_default().to_owned() };
        let rows = self.look(|machine| machine.scan(&first, after.is_some(), limit));
        Ok(rows.into_iter().map(|(key, row)| (RowKey::new(table, key.key), row)).collect())
    }

    async fn commit(&self, by: Authority<'_>, ops: Vec<Op>) -> Result<Vec<Revision>, CommitError> {
        check_sizes(&ops)?;
        let (holding, deadline) = self.holding(&by)?;
        let turn = match by {
            Authority::Turn(turn) => Some(turn),
            Authority::Nobody | Authority::Lead(_) | Authority::Fence { .. } => None,
        };
        let releases = turn.filter(|turn| {
            ops.iter().any(|op| match op {
                Op::Release(ticket) | Op::Keep { ticket, .. } => *ticket == turn.ticket(),
                _ => false,
            })
        });
        if let Some(turn) = releases {
            turn.propose_release();
        }
        let ops = ops.into_iter().map(|op| self.step(op)).collect();
        let answer = self.execute(Command::Commit { by: holding, ops }, deadline).await;
        let outcome = match answer {
            Ok(Reply::Committed(revisions)) => Ok(revisions),
            Ok(other) => Err(refused(other)),
            Err(fault) => Err(fault),
        };
        if let (Err(CommitError::OutcomeUnknown { .. }), Some(turn)) = (&outcome, turn) {
            turn.mark_uncertain();
        }
        match (&outcome, releases) {
            (Ok(_), Some(turn)) => {
                turn.revoke(LostReason::SteppedDown);
                turn.mark_released();
            }
            // Its release was proposed, so it is dead here, whatever becomes of it; the guard's
            // own release, under the same fence, makes sure of it (DESIGN 4 rule 10).
            (Err(CommitError::OutcomeUnknown { .. }), Some(turn)) => {
                turn.revoke(LostReason::SteppedDown);
            }
            _ => {}
        }
        outcome
    }

    async fn acquire_lock_fenced(
        &self,
        key: &str,
        ttl_ms: u64,
    ) -> Result<Option<FencedLock>, CommitError> {
        let command = Command::AcquireLock {
            prefix: self.prefix.clone(),
            key: key.to_owned(),
            ttl_ms,
            node: self.group.node_id(),
        };
        match self.execute(command, self.deadline()).await? {
            Reply::Lock { token, fence, .. } => Ok(Some(FencedLock { token, fence })),
            Reply::Held(_) => Ok(None),
            other => Err(refused(other)),
        }
    }

    async fn renew_lock(
        &self,
        key: &str,
        token: Incarnation,
        ttl_ms: u64,
    ) -> Result<bool, CommitError> {
        let (prefix, key) = (self.prefix.clone(), key.to_owned());
        self.settle(Command::RenewLock { prefix, key, token, ttl_ms }).await
    }

    async fn release_lock(&self, key: &str, token: Incarnation) -> Result<bool, CommitError> {
        let (prefix, key) = (self.prefix.clone(), key.to_owned());
        self.settle(Command::ReleaseLock { prefix, key, token }).await
    }

    async fn journal(&self, ticket: TicketId) -> Result<Option<JournalRecord>, StoreError> {
        Ok(self.look(|machine| machine.journal(&self.prefix, ticket)))
    }

    async fn outbox(
        &self,
        chat: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<OutboxEntry>, StoreError> {
        Ok(self.look(|machine| machine.outbox(&self.prefix, chat, after, limit)))
    }

    async fn outbox_owner(&self, chat: &str) -> Result<Option<Incarnation>, StoreError> {
        Ok(self.look(|machine| machine.outbox_owner(&self.prefix, chat)))
    }

    async fn outbox_beyond(&self, chat: &str, after: u64) -> Result<(), StoreError> {
        // Registered before the look: nothing falls between the look and the wait.
        let topic = Topic::Replies(self.prefix.clone(), chat.to_owned());
        let mut grown = self.group.wakeups().wait_for(topic);
        while self.outbox(chat, after, 1).await?.is_empty() {
            grown.woken().await;
        }
        Ok(())
    }

    async fn mark_sent(
        &self,
        chat: &str,
        up_to: u64,
        sender: Incarnation,
        within: Duration,
    ) -> Result<bool, CommitError> {
        let (prefix, chat) = (self.prefix.clone(), chat.to_owned());
        let mark = Command::MarkSent { prefix, chat, up_to, session: sender };
        if within.is_zero() {
            return self.settle(mark).await;
        }
        let latest = self.group.clock().now() + within;
        let asked = self.group.execute_by(mark, latest, latest + PATIENCE).await;
        settled(asked.map_err(failed)?)
    }

    async fn rekey(&self, from: &ChatKey, to: &ChatKey, taken: Taken) -> Result<(), RekeyError> {
        check_rekey(from, to)?;
        let users = [(user_key(from), user_key(to))];
        let command = Command::Rekey {
            prefix: self.prefix.clone(),
            from: from.to_string(),
            to: to.to_string(),
            users: users.into_iter().filter(|(old, new)| old != new).collect(),
            keep_new: taken == Taken::KeepNew,
        };
        match self.execute(command, self.deadline()).await? {
            Reply::Done => Ok(()),
            Reply::Taken { row } => Err(RekeyError::Taken { table: row.table, key: row.key }),
            other => Err(refused(other).into()),
        }
    }

    async fn dead_letters(&self) -> Result<Vec<DeadLetter>, StoreError> {
        self.barrier().await?;
        Ok(self.look(|machine| machine.dead_letters(&self.prefix)))
    }

    async fn settle_dead_letter(&self, ticket: TicketId, retry: bool) -> Result<bool, CommitError> {
        self.settle(Command::DeadLetter { prefix: self.prefix.clone(), ticket, retry }).await
    }

    fn now_ms(&self) -> u64 {
        self.look(Machine::now_ms).max(self.group.clock().wall_ms())
    }

    async fn ensure_task(&self, id: &str, due_ms: u64, body: Vec<u8>) -> Result<bool, CommitError> {
        let (prefix, id) = (self.prefix.clone(), id.to_owned());
        self.settle(Command::EnsureTask { prefix, id, due_ms, body }).await
    }

    async fn task(&self, id: &str) -> Result<Option<Task>, StoreError> {
        Ok(self.look(|machine| machine.task(&self.prefix, id)))
    }

    async fn task_changed(&self, id: &str, seen: Option<&Task>) -> Result<(), StoreError> {
        // Registered before the look: nothing falls between the look and the wait.
        let topic = Topic::Task(self.prefix.clone(), id.to_owned());
        let mut changed = self.group.wakeups().wait_for(topic);
        while self.task(id).await?.as_ref() == seen {
            changed.woken().await;
        }
        Ok(())
    }

    async fn claim_task(
        &self,
        id: &str,
        due_ms: u64,
        session: Incarnation,
    ) -> Result<Option<Claim>, CommitError> {
        let (prefix, id) = (self.prefix.clone(), id.to_owned());
        let claim = Command::ClaimTask { prefix, id, due_ms, session };
        match self.execute(claim, self.deadline()).await? {
            Reply::Claimed { fence, attempt } => Ok(Some(Claim { fence, attempt })),
            Reply::Stale | Reply::SessionExpired => Ok(None),
            other => Err(refused(other)),
        }
    }

    async fn finish_task(
        &self,
        id: &str,
        due_ms: u64,
        session: Incarnation,
        next_ms: Option<u64>,
    ) -> Result<bool, CommitError> {
        let (prefix, id) = (self.prefix.clone(), id.to_owned());
        self.settle(Command::FinishTask { prefix, id, due_ms, session, next_ms }).await
    }

    async fn return_task(
        &self,
        id: &str,
        due_ms: u64,
        session: Incarnation,
    ) -> Result<bool, CommitError> {
        let (prefix, id) = (self.prefix.clone(), id.to_owned());
        self.settle(Command::ReturnTask { prefix, id, due_ms, session }).await
    }

    fn deadline(&self) -> BootInstant {
        self.group.clock().now() + PATIENCE
    }
}

/// A store in this process, on a hub of its own: nothing of it survives.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    store: GroupStore,
    hub: MemoryHub,
}

impl MemoryStore {
    /// An empty store. It says that it is not shared; where replicas in this process are to share
    /// one, it is [`MemoryHub::store`] that does.
    pub fn new(prefix: Prefix) -> Self {
        let mut store = MemoryHub::new().store(prefix);
        store.store.shared = false;
        store
    }

    /// Its hub, for coordinators of other replicas.
    pub fn hub(&self) -> &MemoryHub {
        &self.hub
    }

    /// A coordinator of the same hub and prefix.
    pub fn coordinator(&self, options: CoordinatorOptions) -> MemoryCoordinator {
        MemoryCoordinator::with(&self.hub, self.prefix.clone(), options)
    }
}

impl Default for MemoryStore {
    /// An empty store in the default prefix.
    fn default() -> Self {
        Self::new(MemoryHub::default_prefix())
    }
}

impl Deref for MemoryStore {
    type Target = GroupStore;
    fn deref(&self) -> &GroupStore {
        &self.store
    }
}

impl MemoryHub {
    /// The store of this prefix, shared by all replicas on this hub.
    pub fn store(&self, prefix: Prefix) -> MemoryStore {
        MemoryStore { store: GroupStore::new(self.as_group(), prefix), hub: self.clone() }
    }
}
