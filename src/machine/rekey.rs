//! Chats whose key changes (SPEC B2): a group becomes a supergroup, a number another number.
//!
//! Problem: what is kept of a chat stands under its key in half a dozen tables, messages wait and a
//! turn may be at work. Idea: one command moves all of it, or nothing.
//!
//! What holds:
//! * A key takes what lies below it along: with a room, all its participants.
//! * Messages wait in the order of their tickets, whichever key they came under.
//! * Whoever has the old key's turn loses it: writes under it name a queue that is gone. Its message
//!   has had no effect and is granted again under the new key; that counts as no attempt. The turn of
//!   the new key stays where it is still first in line.
//! * Tickets without a journaled message end: whoever waits by one would act under the old key.
//! * Nothing remembers who held the old key, so no replica's memory of it is fresh (SPEC C2).
//! * Where both keys have a row, nothing is done, or the new key's stays: the caller says which.

use std::ops::Bound;
use std::sync::Arc;

use super::apply::check_key;
use super::state::{JournalRecord, Machine, OutboxEntry};
use super::tables::{ChatName, EntryKey, PrefixId, TicketKey};
use super::{Effect, Limit, QueueKey, QueueKind, Reply, RowKey, Table};
use crate::types::{Prefix, TicketId};

/// What is below a key, under another.
struct Move<'a> {
    prefix: &'a Prefix,
    from: &'a str,
    to: &'a str,
}

impl Move<'_> {
    /// The new name of what stands under the key or below it.
    fn of(&self, name: &str) -> Option<String> {
        let rest = name.strip_prefix(self.from)?;
        (rest.is_empty() || rest.starts_with(':')).then(|| format!("{}{rest}", self.to))
    }
}

impl Machine {
    pub(super) fn rekey(
        &mut self,
        prefix: &Prefix,
        (from, to): (&str, &str),
        users: &[(String, String)],
        keep_new: bool,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let Some(prefix_id) = self.prefix_id(prefix) else { return Reply::Done };
        let way = Move { prefix, from, to };
        let back = Move { prefix, from: to, to: from };
        if from == to {
            return Reply::Done;
        }
        // A key and one below it are not two chats.
        if way.of(to).is_some() || back.of(from).is_some() {
            return Reply::Stale;
        }
        self.settle_move(prefix_id, &way, effects);
        let rows = self.rows_to_move(&way, users);
        let queues = self.queues_to_move(&way);
        if let Err(limit) = self.check_move(&rows, &queues) {
            return Reply::Full(limit);
        }
        let both = |(old, new): &&(RowKey, RowKey)| {
            self.live_row(old).is_some() && self.live_row(new).is_some()
        };
        if !keep_new && let Some((_, row)) = rows.iter().find(both) {
            return Reply::Taken { row: row.clone() };
        }
        for (old, new) in &rows {
            self.move_row(old, new, effects);
        }
        for (queue, name) in queues {
            self.move_queue(&queue, name, effects);
        }
        for (chat, name) in self.outboxes_to_move(prefix_id, &way) {
            self.move_outbox(prefix, &chat, name, effects);
        }
        self.move_dead(prefix_id, &way);
        Reply::Done
    }

    /// What moves is nobody's who has ended, and neither is what it moves to.
    fn settle_move(&mut self, prefix: PrefixId, way: &Move<'_>, effects: &mut Vec<Effect>) {
        if !self.is_ending() {
            return;
        }
        for (queue, name) in self.queues_to_move(way) {
            let to = QueueKey { name, ..QueueKey::clone(&queue) };
            self.settle(&queue, effects);
            self.settle(&to, effects);
        }
        for (chat, _) in self.outboxes_to_move(prefix, way) {
            self.settle_outbox(&chat, effects);
        }
    }

    fn check_move(
        &self,
        rows: &[(RowKey, RowKey)],
        queues: &[(Arc<QueueKey>, String)],
    ) -> Result<(), Limit> {
        for (_, new) in rows {
            check_key(&new.key)?;
        }
        let max = u64::from(self.tables.meta.limits.tickets_per_queue_max);
        for (queue, name) in queues {
            check_key(name)?;
            let new = QueueKey { name: name.clone(), ..QueueKey::clone(queue) };
            if self.durable_line(queue).len() as u64 + self.line_len(&new) > max {
                return Err(Limit::TicketsPerQueue);
            }
        }
        Ok(())
    }

    /// Rows under the old key that have not ended, with their new keys.
    fn rows_to_move(&self, way: &Move<'_>, users: &[(String, String)]) -> Vec<(RowKey, RowKey)> {
        let mut moves = Vec::new();
        for table in [Table::Checkpoint, Table::Chat] {
            let key = |key: &str| RowKey { table, prefix: way.prefix.clone(), key: key.to_owned() };
            let first = Bound::Included(Arc::new(key(way.from)));
            let found = self.tables.rows.range((first, Bound::Unbounded), usize::MAX, |_| true);
            let within = |row: &RowKey| {
                row.table == table && row.prefix == *way.prefix && row.key.starts_with(way.from)
            };
            let found = found.into_iter().map(|(row, _)| row).take_while(|row| within(row));
            moves.extend(
                found.filter_map(|row| Some((RowKey::clone(row), key(&way.of(&row.key)?)))),
            );
        }
        let user = |name: &String| RowKey {
            table: Table::User,
            prefix: way.prefix.clone(),
            key: name.clone(),
        };
        moves.extend(users.iter().map(|(old, new)| (user(old), user(new))));
        moves.retain(|(old, new)| old != new && self.live_row(old).is_some());
        moves
    }

    fn queues_to_move(&self, way: &Move<'_>) -> Vec<(Arc<QueueKey>, String)> {
        let queues = self.tables.queues.iter().map(|(queue, _)| queue);
        let turns =
            queues.filter(|queue| queue.kind == QueueKind::Turn && queue.prefix == *way.prefix);
        let mut found: Vec<_> =
            turns.filter_map(|queue| Some((queue.clone(), way.of(&queue.name)?))).collect();
        // Hashed: every node has them in another order.
        found.sort();
        found
    }

    fn outboxes_to_move(&self, prefix: PrefixId, way: &Move<'_>) -> Vec<(Arc<ChatName>, String)> {
        let chats = self.tables.outboxes.iter().map(|(chat, _)| chat);
        let own = chats.filter(|chat| chat.prefix == prefix);
        let mut found: Vec<_> =
            own.filter_map(|chat| Some((chat.clone(), way.of(&chat.chat)?))).collect();
        found.sort();
        found
    }

    /// Tickets of a queue that have a journaled message.
    fn durable_line(&self, queue: &QueueKey) -> Vec<TicketKey> {
        self.line_of(queue).into_iter().filter(|key| self.tables.journal.contains(key)).collect()
    }

    fn line_of(&self, queue: &QueueKey) -> Vec<TicketKey> {
        let Some(prefix) = self.prefix_id(&queue.prefix) else { return Vec::new() };
        let line = self.tables.queues.get(queue).into_iter().flat_map(|record| &record.line);
        line.map(|ticket| TicketKey { prefix, ticket: *ticket }).collect()
    }

    /// Moves a row, with a revision of its own and what is left of its time. The one that is there
    /// stays.
    fn move_row(&mut self, old: &RowKey, new: &RowKey, effects: &mut Vec<Effect>) {
        let Some(row) = self.live_row(old).cloned() else { return };
        self.delete_row(old, effects);
        if self.live_row(new).is_none() {
            let now_ms = self.tables.meta.now_ms;
            let ttl_ms = row.expires_ms.map(|expires| expires.saturating_sub(now_ms));
            self.put_row(new, &row.value.0, ttl_ms, effects);
        }
    }

    fn move_queue(&mut self, from: &Arc<QueueKey>, name: String, effects: &mut Vec<Effect>) {
        let durable = self.durable_line(from);
        for key in self.line_of(from) {
            if !durable.contains(&key) {
                self.end_ticket(key, effects);
            }
        }
        let to = QueueKey { name, ..QueueKey::clone(from) };
        let to = (!durable.is_empty()).then(|| self.open_line(&to));
        for key in durable {
            let Some(to) = &to else { break };
            self.ungrant(key);
            self.live_ticket_mut(key).queue = to.clone();
            let record = self.tables.queues.get_mut(to).expect("its line was just opened");
            let place = record.line.partition_point(|ticket| *ticket < key.ticket);
            record.line.insert(place, key.ticket);
            let message = self.tables.journal.get_mut(&key).expect("it is durable");
            Arc::make_mut(message).chat.clone_from(&to.name);
        }
        if let Some(record) = self.tables.queues.remove(from)
            && record.idle > 0
        {
            self.index.idle.remove(&record.idle);
        }
        self.tables.kept.remove(from);
        if let Some(to) = to {
            self.grant_first(&to, effects);
        }
    }

    /// Takes the turn from a ticket that is not the first any more, and gives it to the one that is.
    fn grant_first(&mut self, queue: &Arc<QueueKey>, effects: &mut Vec<Effect>) {
        for key in self.line_of(queue).into_iter().skip(1) {
            if self.live_ticket(key).grant.is_none() {
                continue;
            }
            match self.tables.journal.contains(&key) {
                true => self.ungrant(key),
                false => drop(self.end_ticket(key, effects)),
            }
        }
        self.grant_head(queue, effects);
    }

    /// Moves what is listed and what is still to be sent behind what the new chat has. Ids that were
    /// forgotten from the list are forgotten: a reply's id names its chat, so they never come again.
    fn move_outbox(
        &mut self,
        prefix: &Prefix,
        from: &Arc<ChatName>,
        name: String,
        effects: &mut Vec<Effect>,
    ) {
        let (entries, owner) = self.take_outbox(from);
        let to = ChatName { prefix: from.prefix, chat: name };
        let unsent = |entry: &Arc<OutboxEntry>| entry.unsent;
        let waits = self.tables.outboxes.get(&to).is_some_and(|outbox| outbox.sent < outbox.last);
        if entries.iter().any(unsent)
            && !waits
            && let Some(session) = owner
        {
            // The first may be under way already, in the old chat.
            let chat = to.chat.clone();
            effects.push(Effect::OutboxAdopted { session, prefix: prefix.clone(), chat });
        }
        let sender = owner.or_else(|| self.pick_replica(to.prefix, &to.chat));
        for entry in entries {
            self.append(&to, prefix, OutboxEntry::clone(&entry), sender, effects);
        }
    }

    fn move_dead(&mut self, prefix: PrefixId, way: &Move<'_>) {
        let key = |ticket| TicketKey { prefix, ticket: TicketId(ticket) };
        let dead = self.tables.dead.range(key(0)..=key(u64::MAX), usize::MAX, |_| true);
        let moved = dead.into_iter().filter_map(|(key, record)| {
            let chat = way.of(&record.chat)?;
            Some((*key, JournalRecord { chat, ..JournalRecord::clone(record) }))
        });
        for (key, record) in moved.collect::<Vec<_>>() {
            self.tables.dead.insert(key, Arc::new(record));
        }
    }
}

impl Machine {
    /// Takes an outbox out of the tables: its listed entries, and who was to send.
    fn take_outbox(
        &mut self,
        chat: &Arc<ChatName>,
    ) -> (Vec<Arc<OutboxEntry>>, Option<crate::types::Incarnation>) {
        let outbox = self.tables.outboxes.remove(chat).expect("the caller found it");
        match outbox.owner.and_then(|owner| self.index.holdings.get_mut(&owner)) {
            Some(holdings) => drop(holdings.outboxes.remove(chat)),
            None => drop(self.index.orphan_outboxes.remove(chat)),
        }
        let mut entries = Vec::new();
        for number in outbox.known..=outbox.last {
            let key = EntryKey { chat: chat.clone(), number };
            let digest = if number < outbox.first {
                self.tables.sent_ids.remove(&key).expect("a known id is stored")
            } else {
                let entry = self.tables.entries.remove(&key).expect("a listed entry exists");
                let digest = super::index::send_digest(chat, &entry.id);
                entries.push(entry);
                digest
            };
            self.index.send_ids.remove(&digest);
        }
        (entries, outbox.owner)
    }
}
