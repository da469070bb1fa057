//! The inbox: messages are checked, journaled and ticketed in one apply (SPEC B9, G1).
//!
//! A message has a record in the journal from its admission until its effect is committed
//! (`Acknowledge`). As long as it has, its ticket is *durable*: it outlives its owner, and giving it
//! back returns it to the head of its queue, with one attempt more, until it becomes a dead letter.
//!
//! What was seen is remembered by digest for a time and up to a number; a message that was not
//! taken because a bound was met is not remembered, so that it may come again (case c3).

use std::sync::Arc;

use super::apply::{SWEEP_MAX, check_key, check_value};
use super::commit::Draft;
use super::digest::{self, Digest};
use super::state::{JournalRecord, Machine};
use super::tables::{Seen, TicketKey};
use super::{
    Admission, Admit, Authority, Command, Effect, Limit, QueueKey, QueueKind, Refusal, Reply,
};
use crate::types::{Incarnation, Prefix, TicketId};

/// The queue of a chat's turn.
pub(super) fn turn_of(prefix: &Prefix, chat: &str) -> QueueKey {
    QueueKey { kind: QueueKind::Turn, prefix: prefix.clone(), name: chat.to_owned() }
}

/// What a message is recognised by.
pub(super) fn message_digest(prefix: &Prefix, message: &Admit) -> Digest {
    let parts = [prefix.as_str(), &message.channel, &message.id];
    digest::of_parts(&parts.map(str::as_bytes))
}

impl Machine {
    pub(super) fn admit(
        &mut self,
        prefix: &Prefix,
        session: Incarnation,
        messages: &[Admit],
        cursor: Option<&Command>,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        if self.acting_replica(session, prefix).is_none() {
            return Reply::SessionExpired;
        }
        if let Some(cursor) = cursor
            && let Err(reply) = self.move_cursor(prefix, messages, cursor, effects)
        {
            return reply;
        }
        let admissions = messages
            .iter()
            .map(|message| self.admit_one(prefix, message, Some(session), effects))
            .collect();
        Reply::Admitted(admissions)
    }

    /// Does the commit that moves a transport's cursor past messages, unless it is refused or one
    /// of the messages would not be taken: that one would be lost behind the cursor.
    fn move_cursor(
        &mut self,
        prefix: &Prefix,
        messages: &[Admit],
        cursor: &Command,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Reply> {
        // Anything but a commit cannot be taken back or refused whole, so it moves no cursor.
        let (by, ops): (&Authority, _) = match cursor {
            Command::Commit { by, ops } => (by, ops),
            _ => return Err(Reply::Refused(Refusal::Fenced { holder: None })),
        };
        self.settle_for(by, ops, effects);
        for message in messages {
            self.settle(&turn_of(prefix, &message.chat), effects);
        }
        let acting = self.acting_for(by).map_err(Reply::Refused)?;
        let mut draft = Draft::new(self, &acting);
        draft.ops(ops).map_err(Reply::Refused)?;
        messages.iter().try_for_each(|message| draft.post(prefix, message)).map_err(Reply::Full)?;
        self.perform(&acting, ops, effects);
        Ok(())
    }

    /// Journals one message and takes its ticket, if it is new. The prefix is interned.
    pub(super) fn admit_one(
        &mut self,
        prefix: &Prefix,
        message: &Admit,
        owner: Option<Incarnation>,
        effects: &mut Vec<Effect>,
    ) -> Admission {
        let digest = message_digest(prefix, message);
        let body = digest::short(&message.body);
        if let Some(seen) = self.seen(&digest) {
            let same_body = seen.body == body;
            if !same_body {
                let (prefix, id) = (prefix.clone(), message.id.clone());
                effects.push(Effect::BodyDiffers { prefix, id });
            }
            return Admission::Duplicate { same_body };
        }
        let queue = turn_of(prefix, &message.chat);
        self.settle(&queue, effects);
        let room = || self.check_line(self.line_len(&queue));
        if let Err(limit) = self.check_message(message).and_then(|()| room()) {
            return Admission::Full(limit);
        }
        self.remember(digest, body);
        let record = JournalRecord {
            id: message.id.clone(),
            channel: message.channel.clone(),
            chat: message.chat.clone(),
            body: message.body.clone(),
            attempts: 0,
        };
        let prefix_id = self.prefix_id(prefix).expect("the caller interned it");
        let owner = self.owner_at_home(prefix_id, &message.chat, owner);
        let key = self.enqueue(&queue, owner, effects);
        self.tables.journal.insert(key, Arc::new(record));
        Admission::Fresh { ticket: key.ticket, grant: self.live_ticket(key).grant }
    }

    pub(super) fn check_message(&self, message: &Admit) -> Result<(), Limit> {
        [&message.id, &message.channel, &message.chat]
            .into_iter()
            .try_for_each(|k| check_key(k))?;
        check_value(&message.body)
    }

    /// What is remembered of a message id within the window.
    pub(super) fn seen(&self, digest: &Digest) -> Option<&Seen> {
        self.tables.seen.get(digest).filter(|seen| !self.is_forgotten(seen.seen_ms))
    }

    fn is_forgotten(&self, seen_ms: u64) -> bool {
        let meta = &self.tables.meta;
        seen_ms.saturating_add(meta.limits.dedupe_ms) <= meta.now_ms
    }

    fn remember(&mut self, digest: Digest, body: u64) {
        self.tables.meta.seen += 1;
        let order = self.tables.meta.seen;
        let seen = Seen { body, seen_ms: self.tables.meta.now_ms, order };
        if let Some(old) = self.tables.seen.insert(digest, seen) {
            self.index.seen.remove(old.order);
        }
        self.index.seen.push(order, digest);
        // One comes, one goes. Where the bound became smaller, the rest goes by and by.
        if self.seen_too_many() {
            self.forget_oldest();
        }
    }

    fn seen_too_many(&self) -> bool {
        self.tables.seen.len() > u64::from(self.tables.meta.limits.dedupe_ids_max)
    }

    fn forget_oldest(&mut self) {
        if let Some(digest) = self.index.seen.pop_first() {
            self.tables.seen.remove(&digest);
        }
    }

    pub(super) fn sweep_seen(&mut self) {
        for _ in 0..SWEEP_MAX {
            let oldest = self.index.seen.first();
            let Some(seen) = oldest.and_then(|digest| self.tables.seen.get(digest)) else {
                return;
            };
            if !self.is_forgotten(seen.seen_ms) && !self.seen_too_many() {
                return;
            }
            self.forget_oldest();
        }
    }

    /// Whether a granted ticket ends when it is given back as things stand: it has no message, or
    /// its message was tried often enough.
    pub(super) fn is_last_attempt(&self, key: TicketKey) -> bool {
        let max = self.tables.meta.limits.attempts_max;
        self.tables.journal.get(&key).is_none_or(|record| record.attempts + 1 >= max)
    }

    /// A granted message comes back unacknowledged: again under a new fence, or given up.
    pub(super) fn return_message(&mut self, key: TicketKey, effects: &mut Vec<Effect>) {
        let last = self.is_last_attempt(key);
        let record = self.tables.journal.get_mut(&key).expect("the caller found its record");
        Arc::make_mut(record).attempts += 1;
        if !last {
            self.ungrant(key);
            self.return_home(key, effects);
            let queue = self.live_ticket(key).queue.clone();
            return self.grant_head(&queue, effects);
        }
        let record = self.tables.journal.remove(&key).expect("it was there above");
        let queue = self.live_ticket(key).queue.clone();
        effects.push(Effect::DeadLettered {
            prefix: queue.prefix.clone(),
            chat: queue.name.clone(),
            ticket: key.ticket,
            id: record.id.clone(),
        });
        self.keep_dead(key, record);
        self.end_ticket(key, effects);
        self.grant_head(&queue, effects);
    }

    fn keep_dead(&mut self, key: TicketKey, record: Arc<JournalRecord>) {
        self.tables.dead.insert(key, record);
        let all = TicketKey { prefix: key.prefix, ticket: TicketId(0) }..=TicketKey {
            prefix: key.prefix,
            ticket: TicketId(u64::MAX),
        };
        let kept = self.tables.dead.range(all, usize::MAX, |_| true);
        let max = self.tables.meta.limits.dead_letters_max as usize;
        let over = kept.len().saturating_sub(max);
        let oldest: Vec<TicketKey> = kept.iter().take(over).map(|(key, _)| **key).collect();
        for key in oldest {
            self.tables.dead.remove(&key);
        }
    }

    pub(super) fn dead_letter(
        &mut self,
        prefix: &Prefix,
        ticket: TicketId,
        retry: bool,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let key = self.prefix_id(prefix).map(|prefix| TicketKey { prefix, ticket });
        let Some((key, record)) = key.and_then(|key| Some((key, self.tables.dead.get(&key)?)))
        else {
            return Reply::UnknownTicket;
        };
        let mut record = JournalRecord::clone(record);
        if retry {
            let queue = turn_of(prefix, &record.chat);
            self.settle(&queue, effects);
            if let Err(limit) = self.check_line(self.line_len(&queue)) {
                return Reply::Full(limit);
            }
            record.attempts = 0;
            let owner = self.pick_replica(key.prefix, &record.chat);
            let new = self.enqueue(&queue, owner, effects);
            if let Some(session) = owner {
                let adopted = Effect::Adopted { session, queue, ticket: new.ticket };
                // The owner learns of the ticket before it learns that it is granted.
                let granted = effects.len() - usize::from(self.live_ticket(new).grant.is_some());
                effects.insert(granted, adopted);
            }
            self.tables.journal.insert(new, Arc::new(record));
        }
        self.tables.dead.remove(&key);
        Reply::Done
    }
}
