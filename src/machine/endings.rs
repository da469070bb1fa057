//! Sessions that have ended and left so much that one apply does not take it.
//!
//! Problem: the entry that ends a session frees all it held, some microseconds for each ticket, and
//! while a node applies that entry it applies no other: whoever held 100,000 turns would make every
//! other chat wait for half a second.
//!
//! Idea: the session ends in one apply, as every session does: it is out of the table, so that nothing
//! is done in its name any more, and its leads are free. What else it had stays its, and each entry that
//! follows frees a slice of it; a leader proposes empty entries while something is left. Until a ticket's turn
//! comes, it is as if it were free already: whatever looks at a queue or an outbox first *settles* it,
//! which frees what the dead have there.
//!
//! Invariants:
//! * A command cannot tell the end of a session in slices from one in one apply, nor can anybody but by
//!   when those who waited are granted: it finds its queue and its outbox settled, and the head of a
//!   queue is settled before it is granted. What is read passes over what the dead own; counts of
//!   tickets, and how many are ahead of one, go down as they go.
//! * Nothing is ever given to a session that has ended.
//! * A group does so from [`LEVEL_SLICES`] on: programs that do not know it would apply another end.

use super::index::Holdings;
use super::journal::turn_of;
use super::level::LEVEL_SLICES;
use super::state::Machine;
use super::table::Hashed;
use super::tables::{ChatName, TicketKey};
use super::{Authority, Effect, EndReason, Op, QueueKey};
use crate::types::Incarnation;

/// What the sessions that one entry ends may leave, tickets and outboxes, and still end with it. This
/// and [`SLICE`] are part of what an entry means: other numbers need another level.
const AT_ONCE_MAX: usize = if cfg!(test) { 2 } else { 2_000 };

/// How much of what the dead left one entry frees, besides one for each of its commands: what is left
/// becomes less however much new there is. It may be more by one queue's line.
const SLICE: usize = if cfg!(test) { 1 } else { 512 };

/// What is not part of the state.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    /// How much of what the dead left this entry has freed.
    freed: usize,
    /// Queues in which the dead have nothing: whoever ended since left nothing either.
    settled: Hashed<QueueKey, ()>,
}

impl Machine {
    /// Whether a session has ended that still leaves something. Each entry frees some of it.
    pub fn is_ending(&self) -> bool {
        self.tables.endings.len() > 0
    }

    /// Whether this session has ended and still leaves something.
    pub(super) fn left_something(&self, session: Incarnation) -> bool {
        self.is_ending() && self.tables.endings.contains(&session)
    }

    /// An entry begins: frees the next slice of what the dead left.
    pub(super) fn go_on_ending(&mut self, commands: usize, effects: &mut Vec<Effect>) {
        self.progress.freed = 0;
        self.free_up_to(SLICE + commands, effects);
    }

    /// Whether sessions that end together leave more than this entry can still free. It counts what it
    /// frees here where it can.
    pub(super) fn leaves_too_much<'a>(&mut self, held: impl Iterator<Item = &'a Holdings>) -> bool {
        let much = |held: &Holdings| held.leads.len() + held.tickets.len() + held.outboxes.len();
        let freed = self.progress.freed + held.map(much).sum::<usize>();
        if self.level() >= LEVEL_SLICES && freed > AT_ONCE_MAX {
            return true;
        }
        self.progress.freed = freed;
        false
    }

    /// Leaves to sessions that have ended what they had, for the entries to come to free. Their leads
    /// are free at once, whoever else's end goes on.
    pub(super) fn begin_ending(
        &mut self,
        held: Vec<(Incarnation, Holdings)>,
        reason: EndReason,
        effects: &mut Vec<Effect>,
    ) {
        self.progress.settled.clear();
        let leads = held.iter().flat_map(|(_, held)| &held.leads);
        let leads: Vec<TicketKey> = leads.take(AT_ONCE_MAX).copied().collect();
        for (session, held) in held {
            self.tables.endings.insert(session, reason);
            self.index.holdings.insert(session, held);
        }
        for key in &leads {
            self.take_from_dead(*key);
        }
        self.progress.freed += leads.len();
        self.free_tickets(leads, effects);
        self.free_up_to(SLICE, effects);
    }

    /// Frees what the dead left until this entry has freed so much.
    fn free_up_to(&mut self, most: usize, effects: &mut Vec<Effect>) {
        while self.progress.freed < most && self.is_ending() {
            let first = self.tables.endings.range(.., 1, |_| true);
            let Some((session, reason)) = first.first().map(|(session, why)| (**session, **why))
            else {
                return;
            };
            let held = self.index.holdings.get_mut(&session);
            let held = held.expect("a session that leaves something has holdings");
            if let Some(key) = held.leads.pop_first().or_else(|| held.tickets.pop_first()) {
                self.progress.freed += 1;
                self.free_tickets(vec![key], effects);
            } else if let Some(chat) = held.outboxes.pop_first() {
                self.progress.freed += 1;
                self.pass_outbox(&chat, reason, effects);
            } else {
                // Also what others settled meanwhile.
                self.index.holdings.remove(&session);
                self.tables.endings.remove(&session);
            }
        }
        if !self.is_ending() {
            self.progress.settled.clear();
        }
    }

    /// Frees what the dead have in a queue, so that it stands as if they had left it with their end.
    pub(super) fn settle(&mut self, queue: &QueueKey, effects: &mut Vec<Effect>) {
        if !self.is_ending() || self.progress.settled.contains_key(queue) {
            return;
        }
        self.progress.settled.insert(queue.clone(), ());
        let (Some(prefix), Some(record)) =
            (self.prefix_id(&queue.prefix), self.tables.queues.get(queue))
        else {
            return;
        };
        let line = record.line.iter().map(|ticket| TicketKey { prefix, ticket: *ticket });
        let left: Vec<TicketKey> = line.filter(|key| self.is_left(*key)).collect();
        for key in &left {
            self.take_from_dead(*key);
        }
        self.progress.freed += left.len();
        self.free_tickets(left, effects);
    }

    /// As [`Machine::settle`], for the queue in which a ticket stands.
    pub(super) fn settle_queue_of(&mut self, key: TicketKey, effects: &mut Vec<Effect>) {
        if self.is_ending()
            && let Some(ticket) = self.tables.tickets.get(&key)
        {
            let queue = ticket.queue.clone();
            self.settle(&queue, effects);
        }
    }

    /// As [`Machine::settle`], for every queue that a commit looks at.
    pub(super) fn settle_for(&mut self, by: &Authority, ops: &[Op], effects: &mut Vec<Effect>) {
        if !self.is_ending() {
            return;
        }
        if let Authority::Holder { queue, .. } = by {
            self.settle(queue, effects);
        }
        for op in ops {
            if let Op::Post { prefix, message, .. } = op {
                self.settle(&turn_of(prefix, &message.chat), effects);
            }
        }
    }

    /// The head of a queue, once those of the dead before it are gone.
    pub(super) fn settled_head(
        &mut self,
        queue: &QueueKey,
        effects: &mut Vec<Effect>,
    ) -> Option<TicketKey> {
        loop {
            let head = self.head(queue)?;
            if !self.is_left(head) {
                return Some(head);
            }
            self.take_from_dead(head);
            self.progress.freed += 1;
            self.free_ticket(head, effects);
        }
    }

    /// Gives the outbox of a session that has ended to another.
    pub(super) fn settle_outbox(&mut self, name: &ChatName, effects: &mut Vec<Effect>) {
        if !self.is_ending() {
            return;
        }
        let Some(chat) = self.tables.outboxes.get_key(name).cloned() else { return };
        let Some(owner) = self.tables.outboxes.get(&chat).and_then(|outbox| outbox.owner) else {
            return;
        };
        let Some(reason) = self.tables.endings.get(&owner).copied() else { return };
        if let Some(held) = self.index.holdings.get_mut(&owner) {
            held.outboxes.remove(&chat);
        }
        self.pass_outbox(&chat, reason, effects);
    }

    /// Whether this live ticket is one that a session left.
    pub(super) fn is_left(&self, key: TicketKey) -> bool {
        self.is_ending()
            && self.live_ticket(key).owner.is_some_and(|owner| self.left_something(owner))
    }

    /// Takes a ticket that a session left out of what it has; it is to be freed next.
    fn take_from_dead(&mut self, key: TicketKey) {
        let ticket = self.live_ticket(key);
        let (owner, kind) = (ticket.owner, ticket.queue.kind);
        if let Some(held) = owner.and_then(|owner| self.index.holdings.get_mut(&owner)) {
            held.tickets_of(kind).remove(&key);
        }
    }
}
