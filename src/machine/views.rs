//! The reading side: what a node shows of its own state. Nothing here changes anything.

use super::index::Holdings;
use super::state::{DeadLetter, JournalRecord, Machine, SessionView, TaskView, TicketState};
use super::tables::{Session, TaskKey, TicketKey};
use super::{Grant, Holder, QueueKey};
use crate::types::{Fence, Incarnation, Prefix, TicketId};

fn session_view(session: Incarnation, record: &Session) -> SessionView {
    SessionView {
        session,
        prefix: record.prefix.clone(),
        kind: record.kind,
        replica: record.replica.clone(),
        node: record.node,
        lease_ms: record.lease_ms,
        seq: record.seq,
    }
}

impl Machine {
    /// One live session.
    pub fn session(&self, session: Incarnation) -> Option<SessionView> {
        self.tables.sessions.get(&session).map(|record| session_view(session, record))
    }

    /// All live sessions, in order. One that has ended is none, though it may still leave something.
    pub fn sessions(&self) -> Vec<SessionView> {
        self.index.holdings.keys().filter_map(|session| self.session(*session)).collect()
    }

    /// Other live replicas of a session's prefix under its replica id, in order: (incarnation, last
    /// renewal).
    pub fn namesakes(&self, session: Incarnation) -> Vec<(Incarnation, u64)> {
        let others = self.namesakes_of(session).filter(|other| *other != session);
        others.filter_map(|other| Some((other, self.tables.sessions.get(&other)?.seq))).collect()
    }

    /// Where a ticket stands.
    pub fn ticket(&self, prefix: &Prefix, ticket: TicketId) -> TicketState {
        let key = self.prefix_id(prefix).map(|prefix| TicketKey { prefix, ticket });
        let Some(found) = key.and_then(|key| self.tables.tickets.get(&key)) else {
            return match self.was_allocated(prefix, ticket) {
                true => TicketState::Gone,
                false => TicketState::Unknown,
            };
        };
        let queue = QueueKey::clone(&found.queue);
        let session = found.owner.filter(|owner| !self.left_something(*owner));
        if session != found.owner && !key.is_some_and(|key| self.tables.journal.contains(&key)) {
            return TicketState::Gone;
        }
        match (found.grant, session) {
            (Some(grant), Some(session)) => TicketState::Granted { queue, session, grant },
            (_, session) => {
                let line = self.tables.queues.get(&queue).map(|queue| &queue.line);
                let place = line.and_then(|line| line.binary_search(&ticket).ok());
                let ahead = place.expect("a live ticket stands in its queue") as u64;
                TicketState::Waiting { queue, session, ahead }
            }
        }
    }

    /// Who holds, or first waits for, a queue. `None` also where its tickets have no owner yet.
    pub fn holder(&self, queue: &QueueKey) -> Option<Holder> {
        let prefix = self.prefix_id(&queue.prefix)?;
        let line = &self.tables.queues.get(queue)?.line;
        let mut tickets = line.iter().map(|t| self.live_ticket(TicketKey { prefix, ticket: *t }));
        tickets.find_map(|ticket| {
            let fence = ticket.grant.map(|grant| grant.fence);
            let owner = ticket.owner.filter(|owner| !self.left_something(*owner));
            owner.map(|session| Holder { session, fence })
        })
    }

    /// Whether this ticket holds its turn under this fence and nobody stands behind it.
    pub fn is_alone(&self, queue: &QueueKey, ticket: TicketId, fence: Fence) -> bool {
        let Some(head) = self.head(queue) else { return false };
        let holds = self.live_ticket(head).grant.is_some_and(|grant| grant.fence == fence);
        let holds = holds && head.ticket == ticket && !self.is_left(head);
        let line = self.tables.queues.get(queue).into_iter().flat_map(|record| &record.line);
        let mut behind = line.skip(1).map(|ticket| TicketKey { ticket: *ticket, ..head });
        holds && behind.all(|key| self.is_left(key))
    }

    /// How much was said under this fence in turns that ended, where it went on from them; else 0.
    pub fn said_under(&self, queue: &QueueKey, fence: Fence) -> u64 {
        self.tables.kept.get(queue).filter(|kept| kept.fence == fence).map_or(0, |kept| kept.said)
    }

    /// Every held lead: (queue, holder).
    pub fn leads(&self) -> Vec<(QueueKey, Holder)> {
        let leads = self.index.leads.iter();
        leads.filter_map(|lead| Some((QueueKey::clone(lead), self.holder(lead)?))).collect()
    }

    /// Turns held and tickets waiting.
    pub fn turn_counts(&self) -> (u64, u64) {
        (self.index.turns_held, self.index.turn_tickets - self.index.turns_held)
    }

    /// Tickets a session owns: (ticket, queue, grant).
    pub fn tickets_of(&self, session: Incarnation) -> Vec<(TicketId, QueueKey, Option<Grant>)> {
        let held = self.index.holdings.get(&session).filter(|_| !self.left_something(session));
        let mut keys: Vec<_> = held.into_iter().flat_map(Holdings::all_tickets).collect();
        keys.sort_unstable();
        let tickets = keys.into_iter().map(|key| {
            let ticket = self.live_ticket(*key);
            (key.ticket, QueueKey::clone(&ticket.queue), ticket.grant)
        });
        tickets.collect()
    }

    /// A journaled message that is not acknowledged.
    pub fn journal(&self, prefix: &Prefix, ticket: TicketId) -> Option<JournalRecord> {
        let prefix = self.prefix_id(prefix)?;
        let record = self.tables.journal.get(&TicketKey { prefix, ticket })?;
        Some(JournalRecord::clone(record))
    }

    /// Chats whose outbox this session is to send.
    pub fn outboxes_of(&self, session: Incarnation) -> Vec<(Prefix, String)> {
        let Some(record) = self.tables.sessions.get(&session) else { return Vec::new() };
        let chats = self.index.holdings.get(&session).into_iter().flat_map(|held| &held.outboxes);
        chats.map(|chat| (record.prefix.clone(), chat.chat.clone())).collect()
    }

    /// For how long back a message id is surely recognised, ms (SPEC G1): the configured window, or
    /// less where so many ids came that the oldest were forgotten early.
    pub fn dedupe_window_ms(&self) -> u64 {
        let (limits, now_ms) = (&self.tables.meta.limits, self.tables.meta.now_ms);
        let full = self.tables.seen.len() >= u64::from(limits.dedupe_ids_max);
        let oldest = self.index.seen.first().filter(|_| full);
        let oldest = oldest.and_then(|digest| self.tables.seen.get(digest));
        oldest.map_or(limits.dedupe_ms, |seen| {
            now_ms.saturating_sub(seen.seen_ms).min(limits.dedupe_ms)
        })
    }

    /// Dead letters of a prefix.
    pub fn dead_letters(&self, prefix: &Prefix) -> Vec<DeadLetter> {
        let Some(prefix) = self.prefix_id(prefix) else { return Vec::new() };
        let of = |ticket| TicketKey { prefix, ticket: TicketId(ticket) };
        let found = self.tables.dead.range(of(0)..=of(u64::MAX), usize::MAX, |_| true);
        let letters = found.into_iter();
        letters
            .map(|(key, record)| DeadLetter {
                ticket: key.ticket,
                record: JournalRecord::clone(record),
            })
            .collect()
    }

    /// Tasks of a prefix that are due at or before `until_ms`, earliest first.
    pub fn tasks_due(&self, prefix: &Prefix, until_ms: u64, limit: usize) -> Vec<TaskView> {
        let Some(prefix) = self.prefix_id(prefix) else { return Vec::new() };
        let first = (prefix, 0, TaskKey { prefix, id: String::new() });
        let due = self.index.due.range(first..);
        let due = due.take_while(|(of, due_ms, _)| *of == prefix && *due_ms <= until_ms);
        due.take(limit).filter_map(|(_, _, key)| self.task_view(key)).collect()
    }

    /// One task of a prefix.
    pub fn task(&self, prefix: &Prefix, id: &str) -> Option<TaskView> {
        self.task_view(&TaskKey { prefix: self.prefix_id(prefix)?, id: id.to_owned() })
    }

    fn task_view(&self, key: &TaskKey) -> Option<TaskView> {
        let task = self.tables.tasks.get(key)?;
        Some(TaskView {
            id: key.id.clone(),
            due_ms: task.due_ms,
            claimed_by: task.claimed_by,
            fence: task.fence,
            attempt: task.attempt,
            body: task.body.0.to_vec(),
        })
    }
}
