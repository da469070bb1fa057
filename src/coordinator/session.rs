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
use tokio::sync::{mpsc, oneshot};

use super::guards::{Granted, Place, Returned, Tenure};
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
    /// Somebody here waits for it.
    Waiting(oneshot::Sender<Granted>),
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
        self.places.lock().known.remove(&ticket);
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
                places.known.remove(&ticket);
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

    /// A ticket is about to be asked for in this queue.
    pub(super) fn taking(self: &Arc<Self>, queue: QueueKey) -> Take {
        self.places.lock().taking.entry(queue.clone()).or_default().asked += 1;
        Take { session: self.clone(), queue }
    }
}

impl Places {
    /// Whether a command that takes a ticket in this queue has no answer yet.
    pub(super) fn is_taking(&self, queue: &QueueKey) -> bool {
        self.taking.contains_key(queue)
    }

    fn granted(&mut self, queue: QueueKey, ticket: TicketId, grant: Grant) -> Option<Unasked> {
        match self.known.get_mut(&ticket) {
            Some(Known::Handed(fence)) if grant.fence <= *fence => None,
            Some(known @ Known::Waiting(_)) => {
                let Known::Waiting(waiting) = std::mem::replace(known, Known::Handed(grant.fence))
                else {
                    return None;
                };
                // Where the waiter is gone, its withdrawal may be on its way; one that waited for a
                // turn that stayed knows of no ticket to withdraw.
                match waiting.send(Granted { ticket, grant, local: None }) {
                    Ok(()) => None,
                    Err(_) => Some(Unasked { queue, ticket, grant }),
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
}

impl Take {
    /// The answer: this ticket is ours. Its grant may have come first.
    pub(super) fn answered(self, ticket: TicketId, since: BootInstant) -> Place {
        let (grant, granted) = oneshot::channel();
        let place = Place::new(self.queue.clone(), ticket, &self.session, since, granted);
        self.answered_for(ticket, grant);
        place
    }

    /// The answer, for whoever waits at the other end.
    pub(super) fn answered_for(self, ticket: TicketId, waits: oneshot::Sender<Granted>) {
        let mut places = self.session.places.lock();
        let early = places.taking.get_mut(&self.queue).and_then(|taking| {
            let at = taking.early.iter().position(|(early, _)| *early == ticket)?;
            Some(taking.early.swap_remove(at).1)
        });
        match early {
            Some(early) => {
                places.known.insert(ticket, Known::Handed(early.fence));
                let gone = waits.send(Granted { ticket, grant: early, local: None }).is_err();
                drop(places);
                if gone {
                    let queue = self.queue.clone();
                    self.session.hand_out(vec![Unasked { queue, ticket, grant: early }]);
                }
            }
            None => {
                places.known.insert(ticket, Known::Waiting(waits));
            }
        }
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
            let route = |(ticket, grant)| places.granted(self.queue.clone(), ticket, grant);
            early.into_iter().flatten().filter_map(route).collect()
        };
        self.session.hand_out(unclaimed);
    }
}
