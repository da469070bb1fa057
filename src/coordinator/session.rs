//! One incarnation's places in queues: whose grant is whose.
//!
//! Problem: a grant comes out of this node's applies, possibly before the answer to the command
//! that took its ticket, possibly after whoever asked has gone, possibly for a message of a dead
//! replica that nobody here ever asked for. Idea: keep what is known of every ticket of the
//! session, and route each grant by it exactly once.
//!
//! Invariants (DESIGN 4 rules 3 and 10):
//! * A grant is acted upon only as this node applied it, and only if its fence is above the last one
//!   handed out for its ticket; so a grant that was given back is dead here for ever.
//! * A granted ticket that nobody here asked for and that has no journaled message is an orphan (its
//!   asker went, or its answer was lost): it is given back at once, so no chat waits behind it.
//! * The machine is a level: [`Session::resync`] makes up for every effect that was missed.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::guards::{Returned, Tenure};
use super::place::{Holding, Place, Waiter};
use super::sticky::{Sticks, Sticky};
use crate::clock::BootInstant;
use crate::group::{Group, look};
use crate::machine::{Grant, JournalRecord, QueueKey, TicketState};
use crate::types::{Fence, Incarnation, Prefix, TicketId};

/// A journaled ticket whose turn came.
#[derive(Debug)]
pub(super) struct Journaled {
    pub(super) tenure: Tenure,
    pub(super) queue: QueueKey,
    pub(super) ticket: TicketId,
    pub(super) grant: Grant,
    /// How much was said under its fence before.
    pub(super) said: u64,
    pub(super) record: JournalRecord,
}

/// One incarnation.
pub(super) struct Session {
    pub(super) tenure: Tenure,
    pub(super) group: Arc<dyn Group>,
    prefix: Prefix,
    /// One lock for all of it: whether a message takes a ticket or waits for a turn that is here
    /// depends on both.
    pub(super) places: Mutex<Places>,
    journaled: mpsc::UnboundedSender<Journaled>,
    /// Orphans found, and turns that stayed and are to go, for the task that gives back.
    pub(super) orphans: mpsc::UnboundedSender<Returned>,
}

#[derive(Debug)]
pub(super) struct Places {
    known: HashMap<TicketId, Known>,
    /// Queues in which a ticket is being taken right now.
    taking: HashMap<QueueKey, Taking>,
    /// Turns that stay here.
    pub(super) sticks: Sticks,
}

#[derive(Debug)]
enum Known {
    /// Somebody here waits for it, in this queue.
    Waiting(QueueKey, Waiter),
    /// Handed out under this fence, and perhaps given back since.
    Handed(Fence),
}

#[derive(Debug, Default)]
struct Taking {
    /// Commands without an answer.
    asked: usize,
    /// Grants that came before the answer that names their ticket.
    early: Vec<(TicketId, Grant)>,
}

/// A grant nobody waits for: a journaled message's, or an orphan's.
struct Unasked {
    queue: QueueKey,
    ticket: TicketId,
    grant: Grant,
}

impl Session {
    pub(super) fn new(
        tenure: Tenure,
        group: Arc<dyn Group>,
        prefix: Prefix,
        journaled: mpsc::UnboundedSender<Journaled>,
        how: Option<Sticky>,
    ) -> (Self, mpsc::UnboundedReceiver<Returned>, mpsc::UnboundedReceiver<QueueKey>) {
        let (orphans, found) = mpsc::unbounded_channel();
        let (sticks, stranded) = Sticks::new(how);
        let (known, taking) = (HashMap::new(), HashMap::new());
        let places = Mutex::new(Places { known, taking, sticks });
        (Self { tenure, group, prefix, places, journaled, orphans }, found, stranded)
    }

    pub(super) fn incarnation(&self) -> Incarnation {
        self.tenure.incarnation()
    }

    /// Grants as this node applied them, in order.
    pub(super) fn granted(&self, grants: impl IntoIterator<Item = (QueueKey, TicketId, Grant)>) {
        let mut unasked = Vec::new();
        {
            let mut places = self.places.lock();
            for (queue, ticket, grant) in grants {
                unasked.extend(places.granted(queue, ticket, grant));
            }
        }
        self.hand_out(unasked);
    }

    /// A ticket ended.
    pub(super) fn ended(&self, ticket: TicketId) {
        let mut places = self.places.lock();
        if let Some(Known::Waiting(queue, _)) = places.known.remove(&ticket) {
            places.sticks.look_at(&queue);
        }
    }

    /// Reads the machine for what effects may not have told.
    pub(super) fn resync(&self) {
        let mut unasked = Vec::new();
        {
            // Held over the look, so that no ticket taken meanwhile is mistaken for one that ended.
            let mut places = self.places.lock();
            let tickets = look(&*self.group, |machine| machine.tickets_of(self.incarnation()));
            let mut gone: Vec<TicketId> = places.known.keys().copied().collect();
            let present: std::collections::HashSet<TicketId> =
                tickets.iter().map(|(ticket, ..)| *ticket).collect();
            gone.retain(|ticket| !present.contains(ticket));
            for ticket in gone {
                if let Some(Known::Waiting(queue, _)) = places.known.remove(&ticket) {
                    places.sticks.look_at(&queue);
                }
            }
            for (ticket, queue, grant) in tickets {
                if let Some(grant) = grant {
                    unasked.extend(places.granted(queue, ticket, grant));
                }
            }
        }
        self.hand_out(unasked);
        self.call_back_all();
    }

    /// Routes grants nobody asked for: to the stream of journaled turns, or back.
    fn hand_out(&self, unasked: Vec<Unasked>) {
        if unasked.is_empty() {
            return;
        }
        let me = self.incarnation();
        let records: Vec<(bool, Option<(JournalRecord, u64)>)> = look(&*self.group, |machine| {
            let one = |unasked: &Unasked| {
                let state = machine.ticket(&self.prefix, unasked.ticket);
                let mine = matches!(state, TicketState::Granted { session, grant, .. }
                    if session == me && grant.fence == unasked.grant.fence);
                let said = machine.said_under(&unasked.queue, unasked.grant.fence);
                let record = machine.journal(&self.prefix, unasked.ticket).filter(|_| mine);
                (mine, record.map(|record| (record, said)))
            };
            unasked.iter().map(one).collect()
        });
        for (Unasked { queue, ticket, grant }, (mine, record)) in unasked.into_iter().zip(records) {
            match record {
                Some((record, said)) => {
                    let tenure = self.tenure.clone();
                    let found = Journaled { tenure, queue, ticket, grant, said, record };
                    // Nobody listens where the coordinator is gone; so is the session, then.
                    let _ = self.journaled.send(found);
                }
                None if mine => {
                    tracing::debug!(key = %queue.name, %ticket, "giving back a turn nobody waits for");
                    let granted = Some((queue, grant.fence));
                    let _ = self.orphans.send(Returned { ticket, granted, answer: None });
                }
                // Ended since; its end follows among the effects.
                None => {}
            }
        }
    }

    /// Nobody waits any more in a place that held this.
    pub(super) fn withdraw(&self, queue: &QueueKey, holding: &Holding) {
        let ticket = {
            let mut places = self.places.lock();
            // Without a ticket there is nothing to withdraw: it is passed over.
            let Some(ticket) = holding.get() else { return };
            match places.known.get(&ticket) {
                Some(Known::Waiting(_, waiter)) if waiter.is_gone() => {}
                // Its turn came this very moment; a grant that nobody takes is given back.
                _ => return,
            }
            if let Some(next) = places.sticks.oldest_stranded(queue) {
                return places.waits(queue.clone(), ticket, next);
            }
            // Its release is on its way: whoever comes to need a ticket later does not get this one.
            places.known.insert(ticket, Known::Handed(Fence(u64::MAX)));
            ticket
        };
        self.tenure.give_back(Returned { ticket, granted: None, answer: None });
    }

    /// A ticket is about to be asked for in this queue.
    pub(super) fn taking(self: &Arc<Self>, queue: QueueKey) -> Take {
        let mut places = self.places.lock();
        places.taking.entry(queue.clone()).or_default().asked += 1;
        let number = places.sticks.next_number();
        Take { session: self.clone(), queue, number }
    }

    /// See [`Places::needs_ticket`].
    pub(super) fn needs_ticket(&self, queue: &QueueKey) -> bool {
        self.places.lock().needs_ticket(queue)
    }

    /// The oldest message of this queue that has no ticket gets none.
    pub(super) fn refuse_stranded(&self, queue: &QueueKey) {
        drop(self.places.lock().sticks.oldest_stranded(queue));
    }
}

impl Places {
    /// Whether a command that takes a ticket in this queue has no answer yet.
    pub(super) fn is_taking(&self, queue: &QueueKey) -> bool {
        self.taking.contains_key(queue)
    }

    fn waits(&mut self, queue: QueueKey, ticket: TicketId, waiter: Waiter) {
        waiter.gets(ticket);
        self.known.insert(ticket, Known::Waiting(queue, waiter));
    }

    /// Whether messages wait without a ticket, and none that this replica has or is taking will do.
    fn needs_ticket(&mut self, queue: &QueueKey) -> bool {
        let waits = |known: &Known| match known {
            Known::Waiting(of, waiter) => of == queue && !waiter.is_gone(),
            Known::Handed(_) => false,
        };
        self.sticks.has_stranded(queue) && !self.is_taking(queue) && !self.known.values().any(waits)
    }

    /// The turn of a ticket came, for whoever took it and who came before.
    fn hand(
        &mut self,
        queue: QueueKey,
        ticket: TicketId,
        grant: Grant,
        waiter: Waiter,
    ) -> Option<Unasked> {
        self.known.insert(ticket, Known::Handed(grant.fence));
        // Where the waiter is gone, its withdrawal may be on its way.
        match self.sticks.granted(&queue, ticket, grant, waiter) {
            true => None,
            false => Some(Unasked { queue, ticket, grant }),
        }
    }

    fn granted(&mut self, queue: QueueKey, ticket: TicketId, grant: Grant) -> Option<Unasked> {
        match self.known.get_mut(&ticket) {
            Some(Known::Handed(fence)) if grant.fence <= *fence => None,
            Some(known @ Known::Waiting(..)) => {
                match std::mem::replace(known, Known::Handed(grant.fence)) {
                    Known::Waiting(_, waiter) => self.hand(queue, ticket, grant, waiter),
                    Known::Handed(_) => None,
                }
            }
            // Returned before and granted again (SPEC C9).
            Some(Known::Handed(fence)) => {
                *fence = grant.fence;
                Some(Unasked { queue, ticket, grant })
            }
            None => {
                if let Some(taking) = self.taking.get_mut(&queue) {
                    taking.early.push((ticket, grant));
                    return None;
                }
                self.known.insert(ticket, Known::Handed(grant.fence));
                Some(Unasked { queue, ticket, grant })
            }
        }
    }
}

/// A command under way that takes a ticket. Dropped without an answer, whatever it took is an
/// orphan.
pub(super) struct Take {
    session: Arc<Session>,
    queue: QueueKey,
    /// When it was asked for, among all that wait.
    number: u64,
}

impl Take {
    /// The answer: this ticket is ours. Its grant may have come first.
    pub(super) fn answered(self, ticket: TicketId, since: BootInstant) -> Place {
        let (place, waiter) =
            Place::new(self.queue.clone(), ticket, &self.session, since, self.number);
        self.claim(ticket, Some(waiter));
        place
    }

    /// The answer, for the oldest message that has no ticket.
    pub(super) fn answered_for_oldest(self, ticket: TicketId) {
        self.claim(ticket, None);
    }

    fn claim(self, ticket: TicketId, waiter: Option<Waiter>) {
        let mut places = self.session.places.lock();
        let early = places.taking.get_mut(&self.queue).and_then(|taking| {
            let at = taking.early.iter().position(|(early, _)| *early == ticket)?;
            Some(taking.early.swap_remove(at).1)
        });
        let waiter = waiter.or_else(|| places.sticks.oldest_stranded(&self.queue));
        let queue = self.queue.clone();
        let unasked = match (waiter, early) {
            (Some(waiter), None) => return places.waits(queue, ticket, waiter),
            (Some(waiter), Some(grant)) => places.hand(queue, ticket, grant, waiter),
            (None, Some(grant)) => Some(Unasked { queue, ticket, grant }),
            (None, None) => {
                drop(places);
                let unused = Returned { ticket, granted: None, answer: None };
                return self.session.tenure.give_back(unused);
            }
        };
        drop(places);
        self.session.hand_out(unasked.into_iter().collect());
    }
}

impl Drop for Take {
    fn drop(&mut self) {
        let unclaimed = {
            let mut places = self.session.places.lock();
            let Some(taking) = places.taking.get_mut(&self.queue) else { return };
            taking.asked -= 1;
            if taking.asked > 0 {
                return;
            }
            let early = places.taking.remove(&self.queue).map(|taking| taking.early);
            places.sticks.look_at(&self.queue);
            let route = |(ticket, grant)| places.granted(self.queue.clone(), ticket, grant);
            early.into_iter().flatten().filter_map(route).collect()
        };
        self.session.hand_out(unclaimed);
    }
}
