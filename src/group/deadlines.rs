//! When sessions end if nobody renews them.
//!
//! Problem: the machine reads no clock, so it cannot know that a session went silent. Idea: every
//! node arms a deadline of its own when it applies an opening or a renewal, and the one that may
//! (a hub; of a Raft group's nodes the leader) proposes `ExpireSession` once its deadline passed.
//! The machine refuses the proposal where a newer renewal was applied, so a deadline that is too
//! early anywhere ends nothing (DESIGN 3).
//!
//! Invariants:
//! * No instant is stored: a deadline is always counted from this node's own apply; after a start or
//!   a snapshot install everything is armed anew ([`Deadlines::rearm_all`], DESIGN 3 rule 3).
//! * An entry leaves only when its session ended. One whose expiry was proposed stays and comes up
//!   again after [`Deadlines::take_due`]'s `again`, since the proposal may be lost.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use crate::clock::BootInstant;
use crate::machine::{Effect, SessionView};
use crate::types::Incarnation;

/// The deadlines of all live sessions, as one node counts them.
#[derive(Debug, Default)]
pub struct Deadlines {
    sessions: HashMap<Incarnation, Armed>,
    /// When each comes up next, earliest first.
    order: BTreeSet<(BootInstant, Incarnation)>,
}

#[derive(Debug, Clone, Copy)]
struct Armed {
    /// The last renewal this node saw: the expiry names it.
    seq: u64,
    /// Apply instant + lease.
    deadline: BootInstant,
    /// When it comes up next: the deadline, or later where its expiry was proposed already.
    next: BootInstant,
}

impl Deadlines {
    /// No sessions.
    pub fn new() -> Self {
        Self::default()
    }

    /// The session was opened or renewed, as this node applied it `now`. A renewal that is not
    /// newer than the last one seen changes nothing.
    pub fn arm(&mut self, session: Incarnation, seq: u64, lease: Duration, now: BootInstant) {
        if self.sessions.get(&session).is_some_and(|armed| seq < armed.seq) {
            return;
        }
        let deadline = now + lease;
        let armed = Armed { seq, deadline, next: deadline };
        if let Some(old) = self.sessions.insert(session, armed) {
            self.order.remove(&(old.next, session));
        }
        self.order.insert((deadline, session));
    }

    /// The session ended.
    pub fn disarm(&mut self, session: Incarnation) {
        if let Some(old) = self.sessions.remove(&session) {
            self.order.remove(&(old.next, session));
        }
    }

    /// Forgets everything and arms these sessions at `now` + their lease: after a start, and after
    /// a snapshot replaced the state.
    pub fn rearm_all(&mut self, now: BootInstant, sessions: impl IntoIterator<Item = SessionView>) {
        self.sessions.clear();
        self.order.clear();
        for view in sessions {
            self.arm(view.session, view.seq, Duration::from_millis(view.lease_ms), now);
        }
    }

    /// Takes in what an apply at `now` did. `true` where the earliest deadline may have changed.
    pub fn observe(&mut self, effects: &[Effect], now: BootInstant) -> bool {
        let before = self.next_due();
        for effect in effects {
            match effect {
                Effect::SessionArmed { session, seq, lease_ms } => {
                    self.arm(*session, *seq, Duration::from_millis(*lease_ms), now);
                }
                Effect::SessionEnded { session, .. } => self.disarm(*session),
                _ => {}
            }
        }
        before != self.next_due()
    }

    /// When the next session comes up; `None` while there is none.
    pub fn next_due(&self) -> Option<BootInstant> {
        self.order.first().map(|(at, _)| *at)
    }

    /// The sessions whose time has come, with the last renewal seen: propose `ExpireSession` for
    /// each. They come up again after `again`, unless they end or are renewed.
    pub fn take_due(&mut self, now: BootInstant, again: Duration) -> Vec<(Incarnation, u64)> {
        let mut due = Vec::new();
        while let Some((at, session)) = self.order.first().copied().filter(|(at, _)| *at <= now) {
            self.order.remove(&(at, session));
            // An entry of `order` has one of `sessions`: the two change together.
            if let Some(armed) = self.sessions.get_mut(&session) {
                armed.next = now + again.max(Duration::from_millis(1));
                self.order.insert((armed.next, session));
                due.push((session, armed.seq));
            }
        }
        due
    }

    /// When this session ends if it is not renewed; for what shows time left.
    pub fn deadline(&self, session: Incarnation) -> Option<BootInstant> {
        self.sessions.get(&session).map(|armed| armed.deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> BootInstant {
        BootInstant::from_boot(Duration::from_millis(ms))
    }
    const LEASE: Duration = Duration::from_secs(1);
    const AGAIN: Duration = Duration::from_millis(200);

    #[test]
    fn a_renewal_moves_the_deadline_and_an_older_one_does_not() {
        let mut deadlines = Deadlines::new();
        deadlines.arm(Incarnation(7), 1, LEASE, at(0));
        deadlines.arm(Incarnation(7), 2, LEASE, at(500));
        deadlines.arm(Incarnation(7), 1, LEASE, at(900));
        assert_eq!(deadlines.next_due(), Some(at(1_500)));
        assert!(deadlines.take_due(at(1_499), AGAIN).is_empty());
        assert_eq!(deadlines.take_due(at(1_500), AGAIN), [(Incarnation(7), 2)]);
    }

    #[test]
    fn a_proposed_expiry_comes_up_again_until_the_session_ends() {
        let mut deadlines = Deadlines::new();
        deadlines.arm(Incarnation(7), 1, LEASE, at(0));
        assert_eq!(deadlines.take_due(at(1_000), AGAIN), [(Incarnation(7), 1)]);
        assert!(deadlines.take_due(at(1_100), AGAIN).is_empty());
        assert_eq!(deadlines.take_due(at(1_200), AGAIN), [(Incarnation(7), 1)]);
        deadlines.disarm(Incarnation(7));
        assert_eq!(deadlines.next_due(), None);
        assert!(deadlines.take_due(at(9_000), AGAIN).is_empty());
    }

    #[test]
    fn e3_after_a_start_every_session_has_its_whole_lease() {
        let mut deadlines = Deadlines::new();
        deadlines.arm(Incarnation(7), 4, LEASE, at(0));
        let view = SessionView {
            session: Incarnation(9),
            prefix: crate::types::Prefix::new("p").unwrap(),
            kind: crate::machine::SessionKind::Replica,
            replica: String::new(),
            node: 1,
            lease_ms: 1_000,
            seq: 3,
        };
        deadlines.rearm_all(at(5_000), [view]);
        assert_eq!(deadlines.deadline(Incarnation(7)), None);
        assert_eq!(deadlines.deadline(Incarnation(9)), Some(at(6_000)));
        assert!(deadlines.take_due(at(5_999), AGAIN).is_empty());
        assert_eq!(deadlines.take_due(at(6_000), AGAIN), [(Incarnation(9), 3)]);
    }
}
