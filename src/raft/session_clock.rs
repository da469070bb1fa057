//! When this node proposes that a session has ended.
//!
//! Every node arms a deadline as it applies an opening or a renewal; only the one that leads
//! proposes the expiry (DESIGN 3). A follower keeps its deadlines, overdue ones too: the moment it
//! leads, it proposes them. That needs no grace: an expiry that applies means that no renewal was
//! applied for a lease, so the holder has given up already.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::clock::{BootInstant, Clock};
use crate::group::Deadlines;
use crate::machine::{Effect, Machine};
use crate::types::Incarnation;

/// After how long an expiry that did not take effect is proposed again.
const AGAIN: Duration = Duration::from_millis(500);

/// The deadlines of one node.
#[derive(Debug)]
pub(crate) struct SessionClock {
    deadlines: Mutex<Deadlines>,
    /// Raised when the earliest deadline may have changed, or this node may lead now.
    moved: Notify,
    clock: Arc<dyn Clock>,
}

impl SessionClock {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { deadlines: Mutex::default(), moved: Notify::new(), clock }
    }

    /// Takes in what an apply did.
    pub(crate) fn observe(&self, effects: &[Effect]) {
        if self.deadlines.lock().observe(effects, self.clock.now()) {
            self.moved.notify_one();
        }
    }

    /// After the start and after a snapshot: every session has its whole lease again.
    pub(crate) fn rearm(&self, machine: &Machine) {
        self.deadlines.lock().rearm_all(self.clock.now(), machine.sessions());
        self.moved.notify_one();
    }

    /// Has the deadlines looked at again.
    pub(crate) fn look_again(&self) {
        self.moved.notify_one();
    }

    /// What is left of a session's lease on this node's clock.
    pub(crate) fn left(&self, session: Incarnation) -> Duration {
        let deadline = self.deadlines.lock().deadline(session);
        deadline.map_or(Duration::ZERO, |at| at - self.clock.now())
    }

    /// Waits for the next deadline and returns what is due. Asks `leads` first: only then are
    /// deadlines taken.
    pub(crate) async fn due(&self, leads: impl Fn() -> bool) -> Vec<(Incarnation, u64)> {
        loop {
            let moved = self.moved.notified();
            let now = self.clock.now();
            if leads() {
                let due = self.deadlines.lock().take_due(now, AGAIN);
                if !due.is_empty() {
                    return due;
                }
            }
            let next = self.deadlines.lock().next_due().unwrap_or_else(BootInstant::never);
            // A node that does not lead only waits to be told that it does.
            let next = if leads() { next } else { BootInstant::never() };
            tokio::select! {
                () = moved => {}
                () = self.clock.sleep_until(next) => {}
            }
        }
    }
}
