//! Queues of tickets: the one primitive behind turns, leads and locks.
//!
//! The head of a queue holds it as soon as it has an owner: *the apply that frees a queue or adds a
//! ticket also grants* (DESIGN 4 rule 2), each time under a new fence. A ticket's number tells its
//! place: numbers only grow, and a ticket that changes its owner keeps it.
//!
//! A fence may outlast its ticket. Where a turn ended by [`super::Op::Keep`] and the same session's
//! ticket is the next, that is granted under the same fence: nobody held the turn in between, and
//! whatever the turn before wrote was applied before. Any other end, and any other session's grant,
//! ends the fence (SPEC B10).
//!
//! A queue without tickets is idle. Who held it last is remembered for a bounded number of idle
//! turns and leads, the least recently used forgotten first (SPEC I2); fences come from one counter
//! and so grow for a key across that, too.

use std::sync::Arc;

use super::apply::check_key;
use super::state::Machine;
use super::tables::{Kept, Queue, Ticket, TicketKey};
use super::{
    Authority, Effect, EndReason, Grant, Holder, Limit, QueueKey, QueueKind, Refusal, Reply,
};
use crate::types::{Fence, Incarnation, Prefix, TicketId};

/// Where a queue's tickets have no owner yet, this stands for one: never a session's number.
const NOBODY: Holder = Holder { session: Incarnation(0), fence: None };

impl Machine {
    pub(super) fn take_ticket(
        &mut self,
        session: Incarnation,
        queue: &QueueKey,
        if_free: bool,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        if self.acting(session, &queue.prefix).is_none() {
            return Reply::SessionExpired;
        }
        if let Err(limit) = check_key(&queue.name) {
            return Reply::Full(limit);
        }
        self.settle(queue, effects);
        let ahead = self.line_len(queue);
        if if_free && ahead > 0 {
            return Reply::Held(self.holder(queue).unwrap_or(NOBODY));
        }
        if let Err(limit) = self.check_line(ahead) {
            return Reply::Full(limit);
        }
        let key = self.enqueue(queue, Some(session), effects);
        Reply::Ticket { ticket: key.ticket, grant: self.live_ticket(key).grant, ahead }
    }

    /// How many tickets a queue has.
    pub(super) fn line_len(&self, queue: &QueueKey) -> u64 {
        self.tables.queues.get(queue).map_or(0, |queue| queue.line.len() as u64)
    }

    pub(super) fn check_line(&self, len: u64) -> Result<(), Limit> {
        let max = u64::from(self.tables.meta.limits.tickets_per_queue_max);
        if len >= max { Err(Limit::TicketsPerQueue) } else { Ok(()) }
    }

    /// Puts a new ticket at the end of a settled queue whose prefix is interned, and grants it where it is
    /// the only one. A ticket without an owner must have its journal record under the next number
    /// already when this returns to the caller of the command.
    pub(super) fn enqueue(
        &mut self,
        queue: &QueueKey,
        owner: Option<Incarnation>,
        effects: &mut Vec<Effect>,
    ) -> TicketKey {
        let ticket = self.next_ticket(&queue.prefix);
        let prefix = self.prefix_id(&queue.prefix).expect("it just gave a ticket");
        let key = TicketKey { prefix, ticket };
        let shared = self.open_line(queue);
        let record = self.tables.queues.get_mut(&shared).expect("its line was just opened");
        record.line.push_back(ticket);
        let first = record.line.len() == 1;
        match shared.kind {
            QueueKind::Turn => self.index.turn_tickets += 1,
            QueueKind::Lead if first => drop(self.index.leads.insert(shared.clone())),
            QueueKind::Lead | QueueKind::Lock => {}
        }
        match owner.and_then(|owner| self.index.holdings.get_mut(&owner)) {
            Some(holdings) => drop(holdings.tickets_of(shared.kind).insert(key)),
            None => drop(self.index.orphans.insert(key)),
        }
        self.tables.tickets.insert(key, Ticket { queue: shared.clone(), owner, grant: None });
        if first {
            self.grant_head(&shared, effects);
        } else if shared.kind == QueueKind::Turn {
            self.call_back(&shared, effects);
        }
        key
    }

    /// The queue, for a ticket about to be put into its line: it is idle no more.
    pub(super) fn open_line(&mut self, queue: &QueueKey) -> Arc<QueueKey> {
        let shared = match self.tables.queues.get_key(queue) {
            Some(shared) => shared.clone(),
            None => {
                let shared = Arc::new(queue.clone());
                self.tables.queues.insert(shared.clone(), Queue::default());
                shared
            }
        };
        let record = self.tables.queues.get_mut(&shared).expect("found or put there above");
        if record.idle > 0 {
            self.index.idle.remove(&std::mem::take(&mut record.idle));
        }
        shared
    }

    /// Grants the head of a queue, if it has an owner and is not granted yet.
    pub(super) fn grant_head(&mut self, queue: &Arc<QueueKey>, effects: &mut Vec<Effect>) {
        let Some(key) = self.settled_head(queue, effects) else { return };
        let head = self.live_ticket(key);
        let (Some(session), None) = (head.owner, head.grant) else { return };
        let fence = self.fence_for(queue, session);
        let record = self.tables.queues.get_mut(queue).expect("its head was just found");
        let grant = Grant { fence, previous: record.last.replace(session) };
        self.live_ticket_mut(key).grant = Some(grant);
        self.index.turns_held += u64::from(queue.kind == QueueKind::Turn);
        let queue = QueueKey::clone(queue);
        let lead = (queue.kind == QueueKind::Lead).then(|| Arc::new(queue.clone()));
        effects.push(Effect::Granted { session, queue, ticket: key.ticket, grant });
        if let Some(lead) = lead {
            self.lead_granted(&lead, effects);
        }
    }

    /// The fence of the next grant: the one that goes on, where it is this session's, else a new one.
    fn fence_for(&mut self, queue: &Arc<QueueKey>, session: Incarnation) -> Fence {
        let last = self.tables.queues.get(queue).and_then(|record| record.last);
        match self.tables.kept.get(queue) {
            Some(kept) if last == Some(session) => kept.fence,
            kept => {
                if kept.is_some() {
                    self.tables.kept.remove(queue);
                }
                self.next_fence()
            }
        }
    }

    /// Tells the holder of a turn that somebody waits for it.
    fn call_back(&self, queue: &Arc<QueueKey>, effects: &mut Vec<Effect>) {
        let Some(head) = self.head(queue).map(|key| self.live_ticket(key)) else { return };
        if let (Some(session), Some(_)) = (head.owner, head.grant) {
            effects.push(Effect::CalledBack { session, queue: QueueKey::clone(queue) });
        }
    }

    /// Ends a granted ticket whose fence may go on ([`super::Op::Keep`]).
    pub(super) fn keep_ticket(&mut self, key: TicketKey, said: u64, effects: &mut Vec<Effect>) {
        let grant = self.live_ticket(key).grant.expect("the draft found it granted");
        let queue = self.end_ticket(key, effects);
        // A queue that nobody remembers has no fence to go on with.
        if self.tables.queues.contains(&queue) {
            self.tables.kept.insert(queue.clone(), Kept { fence: grant.fence, said });
        }
        self.grant_head(&queue, effects);
    }

    /// Takes a grant back; the ticket keeps its place.
    pub(super) fn ungrant(&mut self, key: TicketKey) {
        if self.live_ticket(key).grant.is_none() {
            return;
        }
        let queue = self.live_ticket(key).queue.clone();
        self.tables.kept.remove(&queue);
        let ticket = self.live_ticket_mut(key);
        ticket.grant = None;
        let is_turn = ticket.queue.kind == QueueKind::Turn;
        self.index.turns_held -= u64::from(is_turn);
    }

    /// Gives a ticket that has no owner, or whose owner has ended, a new one.
    pub(super) fn own(
        &mut self,
        key: TicketKey,
        owner: Option<Incarnation>,
        effects: &mut Vec<Effect>,
    ) {
        let ticket = self.live_ticket_mut(key);
        ticket.owner = owner;
        let queue = ticket.queue.clone();
        match owner.and_then(|owner| Some((owner, self.index.holdings.get_mut(&owner)?))) {
            Some((session, holdings)) => {
                holdings.tickets_of(queue.kind).insert(key);
                let queue = QueueKey::clone(&queue);
                effects.push(Effect::Adopted { session, queue, ticket: key.ticket });
            }
            None => drop(self.index.orphans.insert(key)),
        }
    }

    /// Removes a ticket; who comes next is for the caller to grant.
    pub(super) fn end_ticket(
        &mut self,
        key: TicketKey,
        effects: &mut Vec<Effect>,
    ) -> Arc<QueueKey> {
        let ticket = self.tables.tickets.remove(&key).expect("callers end live tickets only");
        let queue = ticket.queue;
        if ticket.grant.is_some() {
            self.tables.kept.remove(&queue);
        }
        match ticket.owner {
            Some(owner) => {
                // The owner's holdings are gone already where its session ends with this apply.
                if let Some(holdings) = self.index.holdings.get_mut(&owner) {
                    holdings.tickets_of(queue.kind).remove(&key);
                }
            }
            None => drop(self.index.orphans.remove(&key)),
        }
        if queue.kind == QueueKind::Turn {
            self.index.turn_tickets -= 1;
            self.index.turns_held -= u64::from(ticket.grant.is_some());
        }
        let record = self.tables.queues.get_mut(&queue).expect("a ticket has its queue");
        match record.line.front() {
            Some(head) if *head == key.ticket => drop(record.line.pop_front()),
            _ => {
                let place = record.line.binary_search(&key.ticket);
                record.line.remove(place.expect("a live ticket stands in its queue"));
            }
        }
        if record.line.is_empty() {
            self.retire(&queue);
        }
        let prefix = queue.prefix.clone();
        effects.push(Effect::TicketEnded { session: ticket.owner, prefix, ticket: key.ticket });
        queue
    }

    /// A queue has no tickets any more: remembers its last holder, or forgets the queue.
    fn retire(&mut self, queue: &Arc<QueueKey>) {
        if queue.kind == QueueKind::Lead {
            self.index.leads.remove(queue);
        }
        let record = self.tables.queues.get_mut(queue).expect("the caller holds it");
        if queue.kind == QueueKind::Lock || record.last.is_none() {
            self.tables.queues.remove(queue);
            return;
        }
        self.tables.meta.idle += 1;
        record.idle = self.tables.meta.idle;
        self.index.idle.insert(record.idle, queue.clone());
        self.evict_idle();
    }

    /// Forgets the queues that have been idle longest, beyond the bound (SPEC I2).
    pub(super) fn evict_idle(&mut self) {
        while self.index.idle.len() as u64 > u64::from(self.tables.meta.limits.idle_keys_max) {
            if let Some((_, oldest)) = self.index.idle.pop_first() {
                self.tables.queues.remove(&oldest);
                self.tables.kept.remove(&oldest);
            }
        }
    }

    pub(super) fn release(
        &mut self,
        prefix: &Prefix,
        ticket: TicketId,
        session: Incarnation,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let live = self.tables.sessions.get(&session).filter(|record| record.prefix == *prefix);
        let Some(prefix_id) = live.map(|record| record.prefix_id) else {
            return Reply::SessionExpired;
        };
        let key = TicketKey { prefix: prefix_id, ticket };
        self.settle_queue_of(key, effects);
        match self.tables.tickets.get(&key) {
            None if self.was_allocated(prefix, ticket) => Reply::TicketGone,
            None => Reply::UnknownTicket,
            Some(found) if found.owner != Some(session) => Reply::NotYours,
            Some(_) if !self.can_release(key) => Reply::Stale,
            Some(_) => {
                self.release_ticket(key, effects);
                Reply::Done
            }
        }
    }

    pub(super) fn was_allocated(&self, prefix: &Prefix, ticket: TicketId) -> bool {
        let last = self.tables.prefixes.get(prefix).map_or(0, |record| record.tickets);
        ticket.0 > 0 && ticket.0 <= last
    }

    pub(super) fn release_queue(
        &mut self,
        queue: &QueueKey,
        session: Incarnation,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let live = self.tables.sessions.get(&session);
        let Some(prefix) = live.filter(|record| record.prefix == queue.prefix) else {
            return Reply::SessionExpired;
        };
        let prefix = prefix.prefix_id;
        self.settle(queue, effects);
        // The granted one is the head, so the first is the one to end in either case.
        let line = self.tables.queues.get(queue).into_iter().flat_map(|queue| &queue.line);
        let mut keys = line.map(|ticket| TicketKey { prefix, ticket: *ticket });
        match keys.find(|key| self.live_ticket(*key).owner == Some(session)) {
            Some(key) => self.release(&queue.prefix, key.ticket, session, effects),
            None => Reply::TicketGone,
        }
    }

    /// Whether a live ticket can be given back: a journaled message that waits cannot, it would be
    /// lost or lose its place.
    pub(super) fn can_release(&self, key: TicketKey) -> bool {
        self.live_ticket(key).grant.is_some() || !self.tables.journal.contains(&key)
    }

    /// Ends a ticket its owner gives back. A message that is not acknowledged is returned.
    pub(super) fn release_ticket(&mut self, key: TicketKey, effects: &mut Vec<Effect>) {
        if self.tables.journal.contains(&key) {
            return self.return_message(key, effects);
        }
        let ticket = self.live_ticket(key);
        let owner = ticket.owner.and_then(|owner| Some((owner, self.tables.sessions.get(&owner)?)));
        match owner {
            // A lock's session is nothing without its ticket.
            Some((owner, session)) if session.lock.as_deref() == Some(&*ticket.queue) => {
                self.end_session(owner, EndReason::Closed, effects);
            }
            _ => {
                let had = ticket.owner.filter(|_| ticket.queue.kind == QueueKind::Lead);
                let queue = self.end_ticket(key, effects);
                self.grant_head(&queue, effects);
                if let Some(had) = had {
                    self.lead_left(&queue, had, effects);
                }
            }
        }
    }

    /// The ticket that holds a queue in whose name a write is made, if it does (SPEC C10).
    pub(super) fn check_authority(&self, by: &Authority) -> Result<Option<TicketKey>, Refusal> {
        let Authority::Holder { queue, fence, session } = by else { return Ok(None) };
        if session.is_some_and(|session| !self.tables.sessions.contains(&session)) {
            return Err(Refusal::SessionExpired);
        }
        let fenced = || Refusal::Fenced { holder: self.holder(queue) };
        let key = self.head(queue).ok_or_else(fenced)?;
        let head = self.live_ticket(key);
        let same_fence = head.grant.is_some_and(|grant| grant.fence == *fence);
        let same_session = session.is_none() || head.owner == *session;
        if same_fence && same_session { Ok(Some(key)) } else { Err(fenced()) }
    }

    /// The first ticket of a queue.
    pub(super) fn head(&self, queue: &QueueKey) -> Option<TicketKey> {
        let ticket = *self.tables.queues.get(queue)?.line.front()?;
        Some(TicketKey { prefix: self.prefix_id(&queue.prefix)?, ticket })
    }

    /// A ticket known to be live.
    pub(super) fn live_ticket(&self, key: TicketKey) -> &Ticket {
        self.tables.tickets.get(&key).expect("a ticket in a line or in holdings is live")
    }

    pub(super) fn live_ticket_mut(&mut self, key: TicketKey) -> &mut Ticket {
        self.tables.tickets.get_mut(&key).expect("a ticket in a line or in holdings is live")
    }
}
