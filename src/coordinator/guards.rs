//! Tickets, turns and leads as values: held while they live, given back when they end.
//!
//! A guard's `Drop` neither spawns nor blocks: it tells the carrier's task, which releases.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{mpsc, watch};

use super::LostReason;
use crate::clock::{BootInstant, Clock};
use crate::types::{ChatKey, Fence, Incarnation, TicketId};

/// Why, once it is lost. `None` while it is held.
pub(crate) type LostSignal = watch::Receiver<Option<LostReason>>;

/// Tickets whose guards were dropped, for the carrier's task to release.
pub(crate) type Dropped = mpsc::UnboundedSender<(Incarnation, TicketId)>;

/// One incarnation's right to act, as far as this process knows: shared by all its guards.
#[derive(Debug, Clone)]
pub(crate) struct Tenure {
    /// The incarnation.
    pub(crate) incarnation: Incarnation,
    /// Judged by this clock.
    pub(crate) clock: Arc<dyn Clock>,
    /// The give-up instant: sent instant of the last accepted renewal + lease − margin.
    pub(crate) until: watch::Receiver<BootInstant>,
    /// Set once the session was given up or ended. Final.
    pub(crate) lost: LostSignal,
}

impl Tenure {
    /// Whether the session may still act, asked of the clock now (DESIGN 3 rule 4).
    pub(crate) fn check(&self) -> Result<(), LostReason> {
        if let Some(reason) = *self.lost.borrow() {
            return Err(reason);
        }
        if self.clock.now() >= *self.until.borrow() {
            return Err(LostReason::Expired);
        }
        Ok(())
    }
}

macro_rules! guard {
    ($(#[$doc:meta])* $name:ident, $key:ty) => {
        $(#[$doc])*
        #[derive(Debug)]
        #[must_use = "dropping it gives it back"]
        pub struct $name {
            key: $key,
            ticket: TicketId,
            fence: Fence,
            previous: Option<Incarnation>,
            tenure: Tenure,
            // Set by a cut (SPEC C10): this guard no longer acts, though the session may.
            revoked: Arc<watch::Sender<Option<LostReason>>>,
            released: AtomicBool,
            dropped: Dropped,
        }

        impl $name {
            pub(crate) fn new(
                key: $key,
                ticket: TicketId,
                fence: Fence,
                previous: Option<Incarnation>,
                tenure: Tenure,
                dropped: Dropped,
            ) -> Self {
                Self {
                    key,
                    ticket,
                    fence,
                    previous,
                    tenure,
                    revoked: Arc::new(watch::channel(None).0),
                    released: AtomicBool::new(false),
                    dropped,
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

            /// The incarnation that holds it.
            pub fn incarnation(&self) -> Incarnation {
                self.tenure.incarnation
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

            /// Resolves when it is lost; the group cannot give it to another before.
            pub fn lost(&self) -> impl Future<Output = LostReason> + Send + use<> {
                let mut revoked = self.revoked.subscribe();
                let mut tenure = self.tenure.clone();
                async move {
                    loop {
                        if let Some(reason) = *revoked.borrow_and_update() {
                            return reason;
                        }
                        if let Err(reason) = tenure.check() {
                            return reason;
                        }
                        let until = *tenure.until.borrow_and_update();
                        let clock = tenure.clock.clone();
                        // A closed channel only means that its side ended first; the others tell.
                        tokio::select! {
                            changed = revoked.changed() => if changed.is_err() {
                                return LostReason::Expired;
                            },
                            changed = tenure.lost.changed() => if changed.is_err() {
                                return LostReason::Expired;
                            },
                            _ = tenure.until.changed() => {}
                            () = clock.sleep_until(until) => {}
                        }
                    }
                }
            }

            /// Tells that its end is on its way by other means (a commit that holds the release).
            pub(crate) fn mark_released(&self) {
                self.released.store(true, Ordering::Release);
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                if !self.released.swap(true, Ordering::AcqRel) {
                    // The carrier's task is gone only when the session is.
                    let _ = self.dropped.send((self.tenure.incarnation, self.ticket));
                }
            }
        }
    };
}

guard! {
    /// The right to act for one chat, under one fence.
    Turn, ChatKey
}

guard! {
    /// The right to one named job or transport, under one fence.
    Lead, String
}

/// A place in a chat's queue. Dropped before its turn came, it is withdrawn.
#[derive(Debug)]
#[must_use = "dropping it withdraws it"]
pub struct Ticket {
    key: ChatKey,
    ticket: TicketId,
    tenure: Tenure,
    taken: bool,
    dropped: Dropped,
}

impl Ticket {
    pub(crate) fn new(key: ChatKey, ticket: TicketId, tenure: Tenure, dropped: Dropped) -> Self {
        Self { key, ticket, tenure, taken: false, dropped }
    }

    /// The chat.
    pub fn key(&self) -> &ChatKey {
        &self.key
    }

    /// Its number.
    pub fn id(&self) -> TicketId {
        self.ticket
    }

    /// Turns it into the turn it was granted; the ticket no longer withdraws.
    pub(crate) fn granted(&mut self, fence: Fence, previous: Option<Incarnation>) -> Turn {
        self.taken = true;
        Turn::new(
            self.key.clone(),
            self.ticket,
            fence,
            previous,
            self.tenure.clone(),
            self.dropped.clone(),
        )
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.taken {
            let _ = self.dropped.send((self.tenure.incarnation, self.ticket));
        }
    }
}
