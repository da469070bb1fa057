//! The time that entries are stamped with.
//!
//! Problem: rows with a time to live, remembered message ids and the scheduler need a time of day,
//! and the machine reads no clock. A stamp off the leader's own clock would let one wrong clock end
//! everything early and fire every schedule. Idea (DESIGN 9): each message between nodes says what
//! its sender's wall clock shows; the leader stamps the *median* of the voters' clocks.
//!
//! Invariants:
//! * A clock counts by how far it is ahead of this node's boot clock, which nobody can set: so a
//!   jump of the own wall clock moves one voice and not the others'.
//! * With an even number of voices the earlier of the middle two counts: nothing ends early.
//! * Only who leads gives stamps: what another node asks with is stamped by the leader. So a node whose
//!   clock is behind does not begin its lead with a history of its own; and it goes on from what the
//!   machine's time has reached, since an earlier stamp would only hold that still.
//! * What a node stamps is slewed, never stepped: where the median moves, the stamp follows by at
//!   most a quarter of the time that passes. While a node stamps nothing, that time passes too, so an
//!   outage leaves no schedule behind.
//! * No lease depends on any of it (SPEC E5).

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::clock::{BootInstant, Clock};
use crate::types::NodeId;

/// How much of the time that passes a correction may take: one part in so many.
const SLEW: i64 = 4;

/// See the module.
#[derive(Debug)]
pub(crate) struct GroupTime {
    clock: Arc<dyn Clock>,
    /// A plain mutex: held for a few additions.
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// How far each peer's wall clock is ahead of this node's boot clock, in ms, as last heard.
    peers: HashMap<NodeId, i64>,
    /// The last stamp, and when it was given.
    last: Option<(i64, i64)>,
}

/// Milliseconds since boot.
fn boot_ms(at: BootInstant) -> i64 {
    i64::try_from((at - BootInstant::default()).as_millis()).unwrap_or(i64::MAX / 4)
}

fn wall(ms: u64) -> i64 {
    // No wall clock of this program's life is beyond that.
    i64::try_from(ms).unwrap_or(i64::MAX / 4)
}

impl GroupTime {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, inner: Mutex::default() }
    }

    /// What this node's wall clock shows, for the header of a message.
    pub(crate) fn own_ms(&self) -> u64 {
        self.clock.wall_ms()
    }

    /// A peer said what its wall clock shows.
    pub(crate) fn heard(&self, peer: NodeId, wall_ms: u64) {
        let ahead = wall(wall_ms) - boot_ms(self.clock.now());
        self.inner.lock().peers.insert(peer, ahead);
    }

    /// The stamp of an entry, where this node is `own` and leads, these vote, and the machine's time
    /// has `reached` so far.
    pub(crate) fn stamp_ms(&self, own: NodeId, voters: &BTreeSet<NodeId>, reached: u64) -> u64 {
        let now = boot_ms(self.clock.now());
        let own_ahead = wall(self.clock.wall_ms()) - now;
        let mut inner = self.inner.lock();
        let voice = |id: &NodeId| match *id == own {
            true => Some(own_ahead),
            false => inner.peers.get(id).copied(),
        };
        let mut voices: Vec<i64> = voters.iter().filter_map(voice).collect();
        voices.sort_unstable();
        let median = match voices.len() {
            0 => own_ahead,
            len => voices[(len - 1) / 2],
        };
        let target = median + now;
        let stamp = match inner.last {
            None => target,
            Some((at, stamp)) => {
                let passed = (now - at).max(0);
                let bound = passed / SLEW;
                let undisturbed = stamp + passed;
                undisturbed + (target - undisturbed).clamp(-bound, bound)
            }
        };
        let stamp = stamp.max(wall(reached));
        inner.last = Some((now, stamp));
        u64::try_from(stamp).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::atomic::{AtomicI64, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::clock::ManualClock;

    /// A manual clock whose wall can be set.
    #[derive(Debug, Default)]
    struct Wrong {
        boot: ManualClock,
        ahead_ms: AtomicI64,
    }

    impl Clock for Wrong {
        fn now(&self) -> BootInstant {
            self.boot.now()
        }
        fn wall_ms(&self) -> u64 {
            self.boot.wall_ms().saturating_add_signed(self.ahead_ms.load(Ordering::Relaxed))
        }
        fn sleep_until(&self, at: BootInstant) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
            self.boot.sleep_until(at)
        }
    }

    const HOUR_MS: i64 = 3_600_000;
    const SECOND: Duration = Duration::from_secs(1);

    fn voters(ids: impl IntoIterator<Item = NodeId>) -> BTreeSet<NodeId> {
        ids.into_iter().collect()
    }

    #[test]
    fn a_jump_of_the_own_clock_moves_nothing() {
        let clock = Arc::new(Wrong::default());
        let time = GroupTime::new(clock.clone());
        let right = clock.wall_ms();
        time.heard(2, right);
        time.heard(3, right + 5);
        let all = voters(1..=3);
        assert_eq!(time.stamp_ms(1, &all, 0), right);
        for jump in [HOUR_MS, -HOUR_MS] {
            clock.ahead_ms.store(jump, Ordering::Relaxed);
            let before = time.stamp_ms(1, &all, 0);
            clock.boot.advance(SECOND);
            let after = time.stamp_ms(1, &all, 0);
            // Five milliseconds are between the other two.
            assert!((995..=1_005).contains(&(after - before)), "{jump}: {before} {after}");
        }
    }

    #[test]
    fn of_two_voices_the_earlier_counts() {
        let clock = Arc::new(Wrong::default());
        let time = GroupTime::new(clock.clone());
        let right = clock.wall_ms();
        clock.ahead_ms.store(HOUR_MS, Ordering::Relaxed);
        time.heard(2, right);
        assert_eq!(time.stamp_ms(1, &voters(1..=3), 0), right);
        // A learner's voice does not count, nor that of one who left.
        time.heard(9, 0);
        assert_eq!(time.stamp_ms(1, &voters(1..=3), 0), right);
    }

    #[test]
    fn a_correction_is_slewed_and_an_outage_leaves_nothing_behind() {
        let clock = Arc::new(Wrong::default());
        let time = GroupTime::new(clock.clone());
        let alone = voters([1]);
        let first = time.stamp_ms(1, &alone, 0);
        clock.ahead_ms.store(HOUR_MS, Ordering::Relaxed);
        for second in 1..=10 {
            clock.boot.advance(SECOND);
            assert_eq!(time.stamp_ms(1, &alone, 0), first + second * 1_250);
        }
        clock.ahead_ms.store(-HOUR_MS, Ordering::Relaxed);
        let before = time.stamp_ms(1, &alone, 0);
        clock.boot.advance(SECOND);
        assert_eq!(time.stamp_ms(1, &alone, 0), before + 750);
        // Nothing was stamped for a day: nothing is left to correct.
        clock.boot.advance(SECOND * 86_400);
        assert_eq!(time.stamp_ms(1, &alone, 0), clock.wall_ms());
    }

    #[test]
    fn a_new_leader_whose_clock_is_behind_holds_nothing_still() {
        let clock = Arc::new(Wrong::default());
        let time = GroupTime::new(clock.clone());
        let all = voters(1..=3);
        let mut reached = clock.wall_ms();
        clock.ahead_ms.store(-HOUR_MS, Ordering::Relaxed);
        // Of the others it has heard one so far: of two voices the earlier counts, its own.
        time.heard(2, reached);
        for _ in 0..10 {
            clock.boot.advance(SECOND);
            let stamp = time.stamp_ms(1, &all, reached);
            assert!(stamp >= reached, "the machine's time stands still");
            reached = stamp.max(reached);
            time.heard(2, clock.boot.wall_ms());
            time.heard(3, clock.boot.wall_ms());
        }
        // It has caught up with the others' clocks, but for what the first seconds lost.
        assert!(clock.boot.wall_ms() - reached < 2_000);
    }
}
