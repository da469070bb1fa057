//! When this node proposes that a session has ended.
//!
//! Every node arms a deadline as it applies an opening or a renewal; only the one that leads
//! proposes the expiry (DESIGN 3). A follower keeps its deadlines, overdue ones too: the moment it
//! leads, it proposes them. That needs no grace: an expiry that applies means that no renewal was
//! applied for a lease, so the holder has given up already.
//!
//! It also knows who renews: of two live sessions under one replica id the older one alone says
//! little, it may be left by a process that died; where it renews after the newer one has opened, and
//! the newer one renews too, two processes live under one name (SPEC A3).

use std::collections::HashMap;
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
    /// A plain mutex: held for a map access.
    lives: Mutex<Lives>,
    /// Raised when the earliest deadline may have changed, or this node may lead now.
    moved: Notify,
    clock: Arc<dyn Clock>,
}

/// When each session opened and renewed last, in the order of the applies.
#[derive(Debug, Default)]
struct Lives {
    applied: u64,
    /// (opened, last renewed); both 0 where it was there already when this node began to look.
    of: HashMap<Incarnation, (u64, u64)>,
}

impl Lives {
    fn observe(&mut self, effects: &[Effect]) {
        for effect in effects {
            match effect {
                Effect::SessionArmed { session, .. } => {
                    self.applied += 1;
                    let now = self.applied;
                    self.of.entry(*session).and_modify(|life| life.1 = now).or_insert((now, now));
                }
                Effect::SessionEnded { session, .. } => drop(self.of.remove(session)),
                _ => {}
            }
        }
    }

    /// Whether both were alive after the newer of them had opened.
    fn both_live(&self, one: Incarnation, other: Incarnation) -> bool {
        let (older, newer) = (one.min(other), one.max(other));
        match (self.of.get(&older), self.of.get(&newer)) {
            (Some(older), Some(newer)) => older.1 > newer.0 && newer.1 > newer.0,
            _ => false,
        }
    }
}

impl SessionClock {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        let (deadlines, lives) = (Mutex::default(), Mutex::default());
        Self { deadlines, lives, moved: Notify::new(), clock }
    }

    /// Takes in what an apply did.
    pub(crate) fn observe(&self, effects: &[Effect]) {
        self.lives.lock().observe(effects);
        if self.deadlines.lock().observe(effects, self.clock.now()) {
            self.moved.notify_one();
        }
    }

    /// After the start and after a snapshot: every session has its whole lease again.
    pub(crate) fn rearm(&self, machine: &Machine) {
        let sessions = machine.sessions();
        let lives = sessions.iter().map(|view| (view.session, (0, 0))).collect();
        *self.lives.lock() = Lives { applied: 0, of: lives };
        self.deadlines.lock().rearm_all(self.clock.now(), sessions);
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

    /// Which of `others`, sessions under this one's replica id, is certainly another living process.
    pub(crate) fn shared_with(
        &self,
        session: Incarnation,
        others: &[(Incarnation, u64)],
    ) -> Option<Incarnation> {
        let lives = self.lives.lock();
        others.iter().map(|(other, _)| *other).find(|other| lives.both_live(session, *other))
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
                biased;
                () = moved => {}
                () = self.clock.sleep_until(next) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::EndReason;

    #[test]
    fn a3_two_that_renew_under_one_name_are_two_processes() {
        let [old, new] = [Incarnation(1), Incarnation(2)];
        let mut lives = Lives::default();
        let armed = |session, seq| Effect::SessionArmed { session, seq, lease_ms: 1 };
        lives.observe(&[armed(old, 0), armed(old, 1), armed(new, 0), armed(new, 1)]);
        assert!(!lives.both_live(old, new), "the older one may be a dead process's");
        lives.observe(&[armed(old, 2)]);
        assert!(lives.both_live(old, new) && lives.both_live(new, old));
        lives.observe(&[Effect::SessionEnded { session: old, reason: EndReason::Expired }]);
        assert!(!lives.both_live(old, new));
    }

    #[test]
    fn a3_after_a_restart_both_have_to_renew_to_count() {
        let [old, new] = [Incarnation(1), Incarnation(2)];
        let of = [(old, (0, 0)), (new, (0, 0))].into_iter().collect();
        let mut lives = Lives { applied: 0, of };
        assert!(!lives.both_live(old, new));
        let armed = |session| [Effect::SessionArmed { session, seq: 9, lease_ms: 1 }];
        lives.observe(&armed(old));
        assert!(!lives.both_live(old, new));
        lives.observe(&armed(new));
        assert!(lives.both_live(old, new));
    }
}
