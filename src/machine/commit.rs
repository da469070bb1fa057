//! Commits: several operations under one authority, all or none (SPEC F5, C10).
//!
//! Problem: an operation's condition is judged against what the earlier operations of the same
//! commit leave behind, yet a commit that is refused must have left nothing.
//!
//! Idea: first a [`Draft`] goes through the operations and notes what each would change, only as
//! far as a later condition could see it; then, if none is refused, they are done one by one and
//! none of them can fail any more. Nothing has to be undone.

use std::collections::{BTreeMap, BTreeSet};

use super::apply::{check_key, check_value};
use super::digest::Digest;
use super::index::send_digest;
use super::journal::{message_digest, turn_of};
use super::state::Machine;
use super::tables::{ChatName, TicketKey};
use super::{
    Admit, Authority, Effect, Expect, Limit, Op, Outgoing, QueueKey, QueueKind, Refusal, Reply,
    RowKey,
};
use crate::types::{Incarnation, Prefix, Revision, TicketId};

/// In whose name the operations are done.
pub(super) struct Acting {
    /// The ticket that holds the authority's queue.
    holder: Option<TicketKey>,
    /// Its fence; 0 for nobody's.
    pub(super) fence: u64,
    /// The session the committer named.
    pub(super) session: Option<Incarnation>,
}

/// What the operations looked at so far would have changed.
pub(super) struct Draft<'a> {
    machine: &'a Machine,
    acting: &'a Acting,
    /// The revision the next put would take, less one.
    revision: u64,
    /// Rows put (revision) and deleted (`None`).
    rows: BTreeMap<&'a RowKey, Option<Revision>>,
    acknowledged: BTreeSet<TicketKey>,
    released: BTreeSet<TicketKey>,
    /// Messages posted, by digest.
    posted: BTreeSet<Digest>,
    /// By how much each queue became longer, or shorter.
    lines: BTreeMap<QueueKey, i64>,
    /// Entries sent, and how many each outbox got.
    sent: BTreeSet<(&'a Prefix, &'a str, &'a str)>,
    unsent: BTreeMap<(&'a Prefix, &'a str), u64>,
    prefixes: BTreeSet<&'a Prefix>,
}

/// Why one operation cannot be done.
enum Fault {
    Superseded(Option<Revision>),
    Fenced(QueueKey),
    SessionExpired,
    Full(Limit),
}

impl From<Limit> for Fault {
    fn from(limit: Limit) -> Self {
        Self::Full(limit)
    }
}

impl Machine {
    pub(super) fn commit(
        &mut self,
        by: &Authority,
        ops: &[Op],
        effects: &mut Vec<Effect>,
    ) -> Reply {
        self.settle_for(by, ops, effects);
        let acting = match self.check_commit(by, ops) {
            Ok(acting) => acting,
            Err(refusal) => return Reply::Refused(refusal),
        };
        Reply::Committed(self.perform(&acting, ops, effects))
    }

    fn check_commit(&self, by: &Authority, ops: &[Op]) -> Result<Acting, Refusal> {
        let acting = self.acting_for(by)?;
        Draft::new(self, &acting).ops(ops)?;
        Ok(acting)
    }

    /// Checks the authority of a commit.
    pub(super) fn acting_for(&self, by: &Authority) -> Result<Acting, Refusal> {
        let holder = self.check_authority(by)?;
        Ok(match by {
            Authority::Nobody => Acting { holder, fence: 0, session: None },
            Authority::Holder { fence, session, .. } => {
                Acting { holder, fence: fence.0, session: *session }
            }
        })
    }

    /// Does what a draft found possible.
    pub(super) fn perform(
        &mut self,
        acting: &Acting,
        ops: &[Op],
        effects: &mut Vec<Effect>,
    ) -> Vec<Revision> {
        ops.iter().map(|op| self.perform_one(acting, op, effects)).collect()
    }

    fn perform_one(&mut self, acting: &Acting, op: &Op, effects: &mut Vec<Effect>) -> Revision {
        match op {
            Op::Put { row, value, ttl_ms, .. } => {
                self.intern(&row.prefix).expect("the draft found room");
                return self.put_row(row, value, *ttl_ms, effects);
            }
            Op::Delete { row, .. } => self.delete_row(row, effects),
            Op::Acknowledge { prefix, ticket } => {
                let prefix = self.prefix_id(prefix).expect("the draft found its ticket");
                self.tables.journal.remove(&TicketKey { prefix, ticket: *ticket });
            }
            Op::Send { prefix, chat, send } => {
                self.intern(prefix).expect("the draft found room");
                self.send(acting, prefix, chat, send, effects);
            }
            Op::Release { prefix, ticket } => {
                let prefix = self.prefix_id(prefix).expect("the draft found its ticket");
                self.release_ticket(TicketKey { prefix, ticket: *ticket }, effects);
            }
            Op::Post { prefix, message, session } => {
                let prefix_id = self.intern(prefix).expect("the draft found room");
                let chosen = session.or_else(|| self.pick_replica(prefix_id, &message.chat));
                self.admit_one(prefix, message, chosen, effects);
            }
            Op::Keep { prefix, ticket, said } => {
                let prefix = self.prefix_id(prefix).expect("the draft found its ticket");
                self.keep_ticket(TicketKey { prefix, ticket: *ticket }, *said, effects);
            }
            Op::Home { prefix, channel, lead } => {
                self.intern(prefix).expect("the draft found room");
                self.set_home(prefix, channel, lead.as_deref(), effects);
            }
        }
        Revision(0)
    }
}

impl<'a> Draft<'a> {
    pub(super) fn new(machine: &'a Machine, acting: &'a Acting) -> Self {
        Self {
            machine,
            acting,
            revision: machine.tables.meta.revision,
            rows: BTreeMap::new(),
            acknowledged: BTreeSet::new(),
            released: BTreeSet::new(),
            posted: BTreeSet::new(),
            lines: BTreeMap::new(),
            sent: BTreeSet::new(),
            unsent: BTreeMap::new(),
            prefixes: BTreeSet::new(),
        }
    }

    /// Goes through all operations of a commit.
    pub(super) fn ops(&mut self, ops: &'a [Op]) -> Result<(), Refusal> {
        for (place, op) in ops.iter().enumerate() {
            let place = u32::try_from(place).unwrap_or(u32::MAX);
            self.op(op).map_err(|fault| match fault {
                Fault::Superseded(found) => Refusal::Superseded { op: place, found },
                Fault::Fenced(queue) => Refusal::Fenced { holder: self.machine.holder(&queue) },
                Fault::SessionExpired => Refusal::SessionExpired,
                Fault::Full(limit) => Refusal::Full { op: place, limit },
            })?;
        }
        Ok(())
    }

    fn op(&mut self, op: &'a Op) -> Result<(), Fault> {
        match op {
            Op::Put { row, value, expect, ttl_ms } => self.put(row, value, *expect, *ttl_ms),
            Op::Delete { row, expect } => self.delete(row, *expect),
            Op::Acknowledge { prefix, ticket } => self.acknowledge(prefix, *ticket),
            Op::Send { prefix, chat, send } => self.send(prefix, chat, send),
            Op::Release { prefix, ticket } => self.release(prefix, *ticket),
            Op::Post { prefix, message, session } => {
                if let Some(session) = session
                    && self.machine.acting_replica(*session, prefix).is_none()
                {
                    return Err(Fault::SessionExpired);
                }
                Ok(self.post(prefix, message)?)
            }
            Op::Keep { prefix, ticket, .. } => self.keep(prefix, *ticket),
            Op::Home { prefix, channel, lead } => {
                check_key(channel)?;
                check_key(lead.as_deref().unwrap_or_default())?;
                Ok(self.prefix(prefix)?)
            }
        }
    }

    fn revision_of(&self, row: &RowKey) -> Option<Revision> {
        let stored = || self.machine.live_row(row).map(|row| row.revision);
        self.rows.get(row).copied().unwrap_or_else(stored)
    }

    fn expect(&self, row: &RowKey, expect: Expect) -> Result<(), Fault> {
        let found = self.revision_of(row);
        let met = match expect {
            Expect::Any => true,
            Expect::Absent => found.is_none(),
            Expect::Revision(revision) => found == Some(revision),
        };
        if met { Ok(()) } else { Err(Fault::Superseded(found)) }
    }

    fn put(
        &mut self,
        row: &'a RowKey,
        value: &[u8],
        expect: Expect,
        ttl_ms: Option<u64>,
    ) -> Result<(), Fault> {
        check_key(&row.key)?;
        check_value(value)?;
        self.prefix(&row.prefix)?;
        self.expect(row, expect)?;
        self.revision += 1;
        // A row without any time to live has ended before the next operation looks.
        let lives = ttl_ms != Some(0);
        self.rows.insert(row, lives.then_some(Revision(self.revision)));
        Ok(())
    }

    fn delete(&mut self, row: &'a RowKey, expect: Expect) -> Result<(), Fault> {
        self.expect(row, expect)?;
        self.rows.insert(row, None);
        Ok(())
    }

    fn ticket_key(&self, prefix: &Prefix, ticket: TicketId) -> Option<TicketKey> {
        Some(TicketKey { prefix: self.machine.prefix_id(prefix)?, ticket })
    }

    /// The queue whose holder a refusal names.
    fn fenced(&self, key: Option<TicketKey>, prefix: &Prefix) -> Fault {
        let ticket = key.and_then(|key| self.machine.tables.tickets.get(&key));
        Fault::Fenced(match ticket {
            Some(ticket) => QueueKey::clone(&ticket.queue),
            None => turn_of(prefix, ""),
        })
    }

    fn acknowledge(&mut self, prefix: &Prefix, ticket: TicketId) -> Result<(), Fault> {
        match self.ticket_key(prefix, ticket) {
            Some(key) if self.acting.holder == Some(key) && !self.released.contains(&key) => {
                self.acknowledged.insert(key);
                Ok(())
            }
            key => Err(self.fenced(key, prefix)),
        }
    }

    /// A release in a commit is the holder's: of its own ticket, or of another of its session.
    fn release(&mut self, prefix: &Prefix, ticket: TicketId) -> Result<(), Fault> {
        let key = self.ticket_key(prefix, ticket);
        let owner = |key: &TicketKey| self.machine.tables.tickets.get(key).map(|found| found.owner);
        let acting = self.acting.holder.as_ref().and_then(owner);
        let ours = |key: &TicketKey| acting.is_some() && owner(key) == acting;
        let Some(key) = key.filter(ours) else { return Err(self.fenced(key, prefix)) };
        let acknowledged = self.acknowledged.contains(&key);
        let may = acknowledged || self.machine.can_release(key);
        if !may || !self.released.insert(key) {
            return Err(self.fenced(Some(key), prefix));
        }
        if acknowledged || self.machine.is_last_attempt(key) {
            let queue = QueueKey::clone(&self.machine.live_ticket(key).queue);
            *self.lines.entry(queue).or_default() -= 1;
        }
        Ok(())
    }

    /// Only the holder of a turn ends its own ticket so, and only where the message has had its effect.
    fn keep(&mut self, prefix: &Prefix, ticket: TicketId) -> Result<(), Fault> {
        let key = self.ticket_key(prefix, ticket);
        let Some(key) = key.filter(|key| self.acting.holder == Some(*key)) else {
            return Err(self.fenced(key, prefix));
        };
        let done = self.acknowledged.contains(&key) || !self.machine.tables.journal.contains(&key);
        let queue = QueueKey::clone(&self.machine.live_ticket(key).queue);
        if !done || queue.kind != QueueKind::Turn || !self.released.insert(key) {
            return Err(self.fenced(Some(key), prefix));
        }
        *self.lines.entry(queue).or_default() -= 1;
        Ok(())
    }

    fn send(&mut self, prefix: &'a Prefix, chat: &'a str, send: &'a Outgoing) -> Result<(), Fault> {
        [chat, &send.id, &send.in_reply_to].into_iter().try_for_each(check_key)?;
        check_value(&send.body)?;
        self.prefix(prefix)?;
        let known = self.machine.prefix_id(prefix);
        let name = known.map(|prefix| ChatName { prefix, chat: chat.to_owned() });
        let index = &self.machine.index.send_ids;
        let stored = name.as_ref().is_some_and(|name| index.contains(&send_digest(name, &send.id)));
        if stored || !self.sent.insert((prefix, chat, &send.id)) {
            return Ok(());
        }
        let outbox = name.and_then(|name| self.machine.tables.outboxes.get(&name));
        let before = outbox.map_or(0, |outbox| outbox.last - outbox.sent);
        let unsent = self.unsent.entry((prefix, chat)).or_default();
        if !send.deliver && before + *unsent == 0 {
            return Ok(());
        }
        if before + *unsent >= u64::from(self.machine.tables.meta.limits.outbox_unsent_max) {
            return Err(Limit::OutboxEntries.into());
        }
        *unsent += 1;
        Ok(())
    }

    /// Whether one more message can be journaled; a duplicate always can, it does nothing.
    pub(super) fn post(&mut self, prefix: &'a Prefix, message: &Admit) -> Result<(), Limit> {
        let digest = message_digest(prefix, message);
        if self.is_duplicate(&digest) {
            return Ok(());
        }
        self.machine.check_message(message)?;
        self.prefix(prefix)?;
        let queue = turn_of(prefix, &message.chat);
        let stored = self.machine.line_len(&queue);
        let added = self.lines.entry(queue).or_default();
        self.machine.check_line(stored.saturating_add_signed(*added))?;
        *added += 1;
        self.posted.insert(digest);
        Ok(())
    }

    /// Whether a message id is known. Each one posted may push the oldest known out.
    fn is_duplicate(&self, digest: &Digest) -> bool {
        let known = self.machine.tables.seen.len() + self.posted.len() as u64;
        let over = known.saturating_sub(u64::from(self.machine.tables.meta.limits.dedupe_ids_max));
        let over = usize::try_from(over).unwrap_or(usize::MAX).min(self.posted.len());
        let pushed_out = |order: u64| self.machine.index.seen.oldest(over).any(|o| o == order);
        let seen = self.machine.seen(digest);
        self.posted.contains(digest) || seen.is_some_and(|seen| !pushed_out(seen.order))
    }

    /// Whether a prefix is known or can be added, with those the earlier operations add.
    fn prefix(&mut self, prefix: &'a Prefix) -> Result<(), Limit> {
        if self.prefixes.contains(prefix) || self.machine.prefix_id(prefix).is_some() {
            return Ok(());
        }
        let known = self.machine.tables.prefixes.len() + self.prefixes.len() as u64;
        if known >= u64::from(self.machine.tables.meta.limits.prefixes_max) {
            return Err(Limit::Prefixes);
        }
        self.prefixes.insert(prefix);
        Ok(())
    }
}
