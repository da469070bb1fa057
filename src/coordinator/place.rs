//! A place in a queue, and who waits in it.
//!
//! Problem: a message that waited for a turn that stayed (SPEC B10) has no ticket when that turn ends
//! by a cut, while a later one took its own after the call-back. Idea: a ticket that this replica has
//! in the queue serves them all. When its turn comes, who waited without a ticket and came before has
//! it first, one after another, and then who took it ([`super::sticky`]). Only where the replica has
//! no ticket there is one taken for them.
//!
//! Invariant: which ticket a waiter has is read and changed under the session's lock only. So a
//! place that is dropped withdraws the ticket that it has *then*, and never another message's turn.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use tokio::sync::oneshot;

use super::LostReason;
use super::guards::{Returned, Tenure};
use super::session::Session;
use crate::clock::BootInstant;
use crate::machine::{Grant, QueueKey};
use crate::types::TicketId;

/// What comes out of a place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pub(crate) ticket: TicketId,
    pub(crate) grant: Grant,
    /// Set where the ticket is not the place's own but that of a turn that stayed: how many messages
    /// it had before, and how much they said.
    pub(crate) local: Option<(u64, u64)>,
}

/// The ticket that a waiter has at the moment; 0 = none (tickets count from 1).
#[derive(Clone, Debug, Default)]
pub(super) struct Holding(Arc<AtomicU64>);

impl Holding {
    pub(super) fn get(&self) -> Option<TicketId> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            ticket => Some(TicketId(ticket)),
        }
    }
}

/// Where a place's grant goes in.
#[derive(Debug)]
pub(super) struct Waiter {
    grant: oneshot::Sender<Granted>,
    holding: Holding,
    /// Counts the session's waiters as they came.
    pub(super) number: u64,
}

impl Waiter {
    /// Whether nobody waits any more.
    pub(super) fn is_gone(&self) -> bool {
        self.grant.is_closed()
    }

    /// From now on it waits for this ticket's turn.
    pub(super) fn gets(&self, ticket: TicketId) {
        self.holding.0.store(ticket.0, Ordering::Release);
    }

    /// Its turn came. An error where nobody waits any more.
    pub(super) fn granted(self, granted: Granted) -> Result<(), Granted> {
        self.grant.send(granted)
    }
}

/// A place in any queue, and where its grant comes out. Dropped before, it is withdrawn.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) queue: QueueKey,
    pub(crate) tenure: Tenure,
    /// When it was taken.
    pub(crate) since: BootInstant,
    session: Weak<Session>,
    /// The ticket it was made with; a grant names the one it is for.
    ticket: TicketId,
    holding: Holding,
    /// `None` once the grant was taken out.
    grant: Option<oneshot::Receiver<Granted>>,
}

impl Place {
    /// A place made with this ticket, which its waiter has yet to be given.
    pub(super) fn new(
        queue: QueueKey,
        ticket: TicketId,
        session: &Arc<Session>,
        since: BootInstant,
        number: u64,
    ) -> (Self, Waiter) {
        let (tenure, session) = (session.tenure.clone(), Arc::downgrade(session));
        let (grant, waits) = oneshot::channel();
        let holding = Holding::default();
        let waiter = Waiter { grant, holding: holding.clone(), number };
        (Self { queue, tenure, since, session, ticket, holding, grant: Some(waits) }, waiter)
    }

    pub(crate) fn ticket(&self) -> TicketId {
        self.holding.get().unwrap_or(self.ticket)
    }

    pub(super) fn session(&self) -> Option<Arc<Session>> {
        self.session.upgrade()
    }

    /// Waits for the grant. Cancel-safe. The place no longer withdraws itself afterwards.
    pub(crate) async fn granted(&mut self) -> Result<Granted, LostReason> {
        let Some(waiting) = &mut self.grant else { return Err(LostReason::SteppedDown) };
        let grant = tokio::select! {
            biased;
            reason = self.tenure.lost() => return Err(reason),
            grant = waiting => grant,
        };
        self.grant = None;
        // Without an answer the ticket ended by another's doing.
        let lost = || self.tenure.check().err().unwrap_or(LostReason::Superseded);
        grant.map_err(|_| lost())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Some(mut waiting) = self.grant.take() else { return };
        let Some(session) = self.session.upgrade() else { return };
        // From here on nothing can be sent; what was, nobody has taken out.
        waiting.close();
        let Ok(Granted { ticket, grant, local }) = waiting.try_recv() else {
            return session.withdraw(&self.queue, &self.holding);
        };
        let stays = local.is_some() && session.keep(&self.queue, grant.fence, None);
        if !stays {
            let granted = Some((self.queue.clone(), grant.fence));
            self.tenure.give_back(Returned { ticket, granted, answer: None });
        }
    }
}
