//! Tickets, turns and leads as values: held while they live, given back when they end.
//!
//! Problem: a right that was lost must stop everything done under it, also where the process slept
//! through the news. Idea: every guard shares its session's [`Tenure`], and every act asks the
//! tenure, which asks the boot clock; timers and channels only wake whoever waits.
//!
//! Invariants:
//! * A tenure that was lost, or was once seen past its give-up instant, stays lost: whoever sees it
//!   first makes it so, under the lock that a renewal has to take too (DESIGN 3 rule 8).
//! * A guard's `Drop` neither spawns nor blocks: it tells the session's task, which releases.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::place::{Granted, Place};
use super::sticky::Home;
use super::{CoordinationError, LostReason};
use crate::clock::{BootInstant, Clock};
use crate::machine::{Grant, QueueKey};
use crate::types::{ChatKey, Fence, Incarnation, TicketId};
use crate::watch;

/// A ticket that its holder gave back, for the session's task to end in the group.
#[derive(Debug)]
pub(crate) struct Returned {
    /// Which.
    pub(crate) ticket: TicketId,
    /// Where and under which fence it was granted; `None` where it still waited.
    pub(crate) granted: Option<(QueueKey, Fence)>,
    /// Who wants to know.
    pub(crate) answer: Option<oneshot::Sender<Result<(), CoordinationError>>>,
}

/// One incarnation's right to act, as far as this process knows: shared by all its guards.
#[derive(Debug, Clone)]
pub(crate) struct Tenure {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    incarnation: Incarnation,
    /// Judged by this clock.
    clock: Arc<dyn Clock>,
    /// A mutex and not two channels: that a tenure is past its end and that it is extended must
    /// not both be found true.
    standing: Mutex<Standing>,
    /// Repeats `standing.lost` for those who wait for it.
    lost: watch::Sender<Option<LostReason>>,
    /// Where dropped guards go.
    returns: mpsc::UnboundedSender<Returned>,
}

#[derive(Debug)]
struct Standing {
    /// The give-up instant: sent instant of the last accepted renewal + lease − margin.
    until: BootInstant,
    /// Set once. Final.
    lost: Option<LostReason>,
}

impl Tenure {
    pub(crate) fn new(
        incarnation: Incarnation,
        clock: Arc<dyn Clock>,
        until: BootInstant,
    ) -> (Self, mpsc::UnboundedReceiver<Returned>) {
        let (returns, returned) = mpsc::unbounded_channel();
        let shared = Shared {
            incarnation,
            clock,
            standing: Mutex::new(Standing { until, lost: None }),
            lost: watch::channel(None).0,
            returns,
        };
        (Self { shared: Arc::new(shared) }, returned)
    }

    /// Its clock's now.
    pub(super) fn now(&self) -> BootInstant {
        self.shared.clock.now()
    }

    /// Whose it is.
    pub(crate) fn incarnation(&self) -> Incarnation {
        self.shared.incarnation
    }

    /// The give-up instant.
    pub(crate) fn until(&self) -> BootInstant {
        self.shared.standing.lock().until
    }

    /// Whether the session may still act, asked of the clock now (DESIGN 3 rule 4).
    pub(crate) fn check(&self) -> Result<(), LostReason> {
        let reason = {
            let mut standing = self.shared.standing.lock();
            match standing.lost {
                Some(reason) => return Err(reason),
                None if self.shared.clock.now() < standing.until => return Ok(()),
                None => *standing.lost.insert(LostReason::Expired),
            }
        };
        self.shared.lost.send_replace(Some(reason));
        Err(reason)
    }

    /// A renewal was accepted: the tenure lasts until then, unless it is lost already.
    pub(crate) fn extend(&self, until: BootInstant) -> Result<(), LostReason> {
        {
            let mut standing = self.shared.standing.lock();
            if standing.lost.is_none() && self.shared.clock.now() < standing.until {
                standing.until = standing.until.max(until);
                return Ok(());
            }
        }
        self.check()
    }

    /// Ends it. The first reason stays.
    pub(crate) fn end(&self, reason: LostReason) -> LostReason {
        let reason = *self.shared.standing.lock().lost.get_or_insert(reason);
        self.shared.lost.send_replace(Some(reason));
        reason
    }

    /// Resolves when it is lost. The session's task is what wakes at the give-up instant.
    pub(crate) async fn lost(&self) -> LostReason {
        let mut lost = self.shared.lost.subscribe();
        loop {
            if let Err(reason) = self.check() {
                return reason;
            }
            // `self` keeps the sender.
            let _ = lost.changed().await;
        }
    }

    pub(super) fn give_back(&self, returned: Returned) {
        // The session's task is gone only when the session is, and then nothing is held.
        let _ = self.shared.returns.send(returned);
    }
}

macro_rules! guard {
    ($(#[$doc:meta])* $name:ident, $key:ty) => {
        $(#[$doc])*
        #[derive(Debug)]
        #[must_use = "dropping it gives it back"]
        pub struct $name {
            key: $key,
            queue: QueueKey,
            ticket: TicketId,
            fence: Fence,
            previous: Option<Incarnation>,
            tenure: Tenure,
            // Set by a cut (SPEC C10): this guard no longer acts, though the session may.
            revoked: watch::Sender<Option<LostReason>>,
            released: AtomicBool,
            // Where it may stay when its work is done (SPEC B10).
            home: Option<Home>,
        }

        impl $name {
            pub(crate) fn new(
                key: $key,
                queue: QueueKey,
                ticket: TicketId,
                grant: Grant,
                tenure: Tenure,
            ) -> Self {
                Self {
                    key,
                    queue,
                    ticket,
                    fence: grant.fence,
                    previous: grant.previous,
                    tenure,
                    revoked: watch::channel(None).0,
                    released: AtomicBool::new(false),
                    home: None,
                }
            }

            /// What it is for.
            pub fn key(&self) -> &$key {
                &self.key
            }

            /// Its place in the queue.
            pub fn ticket(&self) -> TicketId {
                self.ticket
            }

            /// Its fence.
            pub fn fence(&self) -> Fence {
                self.fence
            }

            /// Where it is held.
            pub(crate) fn queue(&self) -> &QueueKey {
                &self.queue
            }

            /// The incarnation that holds it.
            pub fn incarnation(&self) -> Incarnation {
                self.tenure.incarnation()
            }

            /// Who held it before; anything but this incarnation (also `None`) means that memory
            /// of it is stale.
            pub fn previous_holder(&self) -> Option<Incarnation> {
                self.previous
            }

            /// Whether it may still be acted upon. Ask at every act.
            pub fn check(&self) -> Result<(), LostReason> {
                if let Some(reason) = *self.revoked.borrow() {
                    return Err(reason);
                }
                self.tenure.check()
            }

            /// No act under it may take longer than until then (DESIGN 3 rule 7). A renewal moves
            /// it on.
            pub fn valid_until(&self) -> BootInstant {
                self.tenure.until()
            }

            /// Ends the right to act, here and now; the release follows when the guard goes.
            pub fn revoke(&self, reason: LostReason) {
                self.revoked.send_if_modified(|revoked| {
                    let first = revoked.is_none();
                    if first {
                        *revoked = Some(reason);
                    }
                    first
                });
            }

            /// Ends the right to act and gives it back at once, though the guard lives on: for what
            /// cannot be made to let go of it (DESIGN 4 rule 9).
            pub fn abandon(&self, reason: LostReason) {
                self.revoke(reason);
                self.give_back(None);
            }

            /// Resolves when it is lost (the group cannot give it to another before), or with
            /// [`LostReason::SteppedDown`] when the guard is gone.
            pub fn lost(&self) -> impl Future<Output = LostReason> + Send + use<> {
                let mut revoked = self.revoked.subscribe();
                let tenure = self.tenure.clone();
                async move {
                    let cut = async {
                        loop {
                            if let Some(reason) = *revoked.borrow_and_update() {
                                return reason;
                            }
                            if revoked.changed().await.is_err() {
                                return LostReason::SteppedDown;
                            }
                        }
                    };
                    tokio::select! {
                        biased;
                        reason = cut => reason,
                        reason = tenure.lost() => reason,
                    }
                }
            }

            /// Gives it back and returns once the group has. Dropping does the same unwatched.
            pub async fn release(self) -> Result<(), CoordinationError> {
                let (answer, answered) = oneshot::channel();
                self.give_back(Some(answer));
                let (tenure, key) = (self.tenure.clone(), self.queue.name.clone());
                drop(self);
                match answered.await {
                    Ok(answer) => answer,
                    // The session ended first, and this with it.
                    Err(_) => Err(CoordinationError::LeaseLost {
                        key,
                        reason: tenure.end(LostReason::Expired),
                    }),
                }
            }

            fn give_back(&self, answer: Option<oneshot::Sender<Result<(), CoordinationError>>>) {
                if self.released.swap(true, Ordering::AcqRel) {
                    if let Some(answer) = answer {
                        // Whoever asked may have stopped waiting.
                        let _ = answer.send(Ok(()));
                    }
                    return;
                }
                if let Some(home) = &self.home {
                    home.ended(&self.queue, self.fence);
                }
                self.tenure.give_back(Returned {
                    ticket: self.ticket,
                    granted: Some((self.queue.clone(), self.fence)),
                    answer,
                });
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                self.give_back(None);
            }
        }
    };
}

guard! {
    /// The right to act for one chat, under one fence.
    Turn, ChatKey
}

impl Turn {
    /// A turn whose fence went on from turns that said this much.
    pub(super) fn after(self, said: u64) -> Self {
        self.at_home(Home::none(said))
    }

    pub(super) fn at_home(mut self, home: Home) -> Self {
        self.home = Some(home);
        self
    }

    /// Which message under its fence this turn is for, from 0; more than 0 only where the turn
    /// stayed here for a message without a ticket of its own (SPEC B10).
    pub fn nth(&self) -> u64 {
        self.home.as_ref().map_or(0, Home::nth)
    }

    /// How much was said under its fence before, by this replica (SPEC N5 `turn_seq`).
    pub fn said_before(&self) -> u64 {
        self.home.as_ref().map_or(0, Home::said)
    }

    /// A write under it has no answer: nothing else may be done under its fence but by whoever
    /// holds this guard (DESIGN 4 rule 6).
    pub(crate) fn mark_uncertain(&self) {
        if let Some(home) = &self.home {
            home.mark_uncertain();
        }
    }

    pub(crate) fn is_uncertain(&self) -> bool {
        self.home.as_ref().is_none_or(Home::is_uncertain)
    }

    /// Its release is about to be proposed by other means (a commit that holds it): it is dead here
    /// from now on, though the guard gives it back where that commit is not made.
    pub(crate) fn propose_release(&self) {
        if let Some(home) = &self.home {
            home.ended(&self.queue, self.fence);
        }
    }

    /// Tells that its end is on its way by other means (a commit that holds the release).
    pub(crate) fn mark_released(&self) {
        self.propose_release();
        self.released.store(true, Ordering::Release);
    }

    /// Whether the commit that ends its work should release it: it would not stay, for somebody
    /// else waits for it, or for something is in doubt.
    pub(crate) fn to_release(&self) -> bool {
        let stays = |home: &Home| !home.to_release(&self.queue, self.fence);
        self.is_uncertain() || !self.home.as_ref().is_some_and(stays)
    }

    /// The work under it is done, cleanly and whole, having said this much under the fence. It
    /// stays with this replica for the chat's next message where that may be (SPEC B10), and is
    /// given back where not. This guard acts no more.
    pub fn keep(&self, said: u64) {
        if self.check().is_ok()
            && !self.is_uncertain()
            && !self.released.swap(true, Ordering::AcqRel)
        {
            self.revoke(LostReason::SteppedDown);
            let home = self.home.as_ref();
            if home.is_some_and(|home| home.kept(&self.queue, self.fence, said)) {
                return;
            }
            self.released.store(false, Ordering::Release);
        }
        self.give_back(None);
    }
}

guard! {
    /// The right to one named job or transport, under one fence.
    Lead, String
}

impl Lead {
    pub(super) fn at(name: &str, place: &Place, grant: Grant) -> Self {
        let Place { queue, tenure, .. } = place;
        Self::new(name.to_owned(), queue.clone(), place.ticket(), grant, tenure.clone())
    }
}

/// A place in a chat's queue. Dropped before its turn came, it is withdrawn.
#[derive(Debug)]
#[must_use = "dropping it withdraws it"]
pub struct Ticket {
    key: ChatKey,
    place: Place,
}

impl Ticket {
    pub(crate) fn new(key: ChatKey, place: Place) -> Self {
        Self { key, place }
    }

    /// The chat.
    pub fn key(&self) -> &ChatKey {
        &self.key
    }

    /// Its number.
    pub fn id(&self) -> TicketId {
        self.place.ticket()
    }

    pub(crate) fn place(&mut self) -> &mut Place {
        &mut self.place
    }

    /// The turn it was granted.
    pub(crate) fn granted(&self, granted: &Granted) -> Turn {
        let Place { queue, tenure, .. } = &self.place;
        let Granted { ticket, grant, .. } = *granted;
        let turn = Turn::new(self.key.clone(), queue.clone(), ticket, grant, tenure.clone());
        match self.place.session() {
            Some(session) => turn.at_home(session.home(queue, granted)),
            None => turn,
        }
    }
}
