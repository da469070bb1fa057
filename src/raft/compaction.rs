//! A log that is bounded in bytes.
//!
//! Problem: openraft counts entries, and an entry is a hundred bytes or a megabyte of messages: the same
//! number of them is nothing, or a full disk. Idea: the log counts its bytes. Where more came since the
//! last snapshot than the bound says, or than that snapshot itself has (a large state is not written for
//! a little log), another one is built; and what lies further back than a quarter of the bound is purged,
//! the rest being kept for followers that are slightly behind.
//!
//! Invariants:
//! * Nothing is purged that is in no snapshot: neither here nor, whatever it is asked for, in openraft.
//! * A node that is short of room builds nothing, also where that would let the log be purged: all the
//!   room below the mark is for what was taken before, a snapshot takes room first (the one before it
//!   stays), and a purge gives none back soon, since sled keeps what it frees for itself.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::member::Member;
use crate::clock::BootInstant;

/// Between two looks at the log.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A snapshot that is still not there after this long is asked for again.
const AGAIN: Duration = Duration::from_secs(120);
/// What is kept behind the end of the log, as a part of the bound.
const KEPT_PART: u64 = 4;
/// How finely it is known where in the log how many bytes end, as a part of the bound.
const STEP_PART: u64 = 64;

/// The log as it is found.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    /// Its last entry.
    last: u64,
    /// Bytes of all entries it ever took.
    appended: u64,
    /// Up to where it was purged.
    purged: u64,
    /// Up to where the newest snapshot goes, and how large that is.
    snapshot: Option<(u64, u64)>,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Todo {
    purge: Option<u64>,
    build: bool,
}

/// What is known of the log's bytes.
#[derive(Debug)]
struct Plan {
    bound: u64,
    /// (entry, bytes of all up to it), ascending in both.
    steps: VecDeque<(u64, u64)>,
    asked: Option<BootInstant>,
    built: Option<u64>,
}

impl Plan {
    /// The log counts from its first entry that is there, so what was purged before has no bytes.
    fn new(bound: u64, purged: u64) -> Self {
        Self { bound, steps: VecDeque::from([(purged, 0)]), asked: None, built: None }
    }

    /// Bytes up to an entry: between two that are known, as if all had the same size.
    fn up_to(&self, index: u64) -> u64 {
        self.between(index, |(at, bytes)| (at, bytes))
    }

    /// The entry up to which there are so many bytes.
    fn entry_at(&self, bytes: u64) -> u64 {
        self.between(bytes, |(at, bytes)| (bytes, at))
    }

    /// The second value where the first is `x`; they grow together.
    fn between(&self, x: u64, read: impl Fn((u64, u64)) -> (u64, u64)) -> u64 {
        let after = self.steps.partition_point(|step| read(*step).0 <= x);
        let Some(before) = after.checked_sub(1).map(|before| read(self.steps[before])) else {
            return 0;
        };
        let Some(after) = self.steps.get(after).map(|after| read(*after)) else { return before.1 };
        let part = u128::from(x - before.0) * u128::from(after.1 - before.1);
        // Below the second value of `after`, which is one.
        before.1 + (part / u128::from(after.0 - before.0)) as u64
    }

    fn look(&mut self, found: Found, now: BootInstant) -> Todo {
        // What was truncated comes again, under the same numbers.
        while self.steps.len() > 1 && self.steps.back().is_some_and(|(at, _)| *at > found.last) {
            self.steps.pop_back();
        }
        let known = self.steps.back().map_or(0, |(_, bytes)| *bytes);
        if found.appended.saturating_sub(known) > self.bound / STEP_PART {
            self.steps.push_back((found.last, found.appended));
        }
        while self.steps.get(1).is_some_and(|(at, _)| *at <= found.purged) {
            self.steps.pop_front();
        }
        let (folded, size) = found.snapshot.unwrap_or_default();
        if self.built != Some(folded) {
            (self.built, self.asked) = (Some(folded), None);
        }
        let kept_from = found.appended.saturating_sub(self.bound / KEPT_PART);
        let purge = Some(self.entry_at(kept_from).min(folded));
        // A little at a time would be many writes.
        let enough = |upto: &u64| {
            let bytes = self.up_to(*upto).saturating_sub(self.up_to(found.purged));
            *upto > found.purged && bytes >= self.bound / STEP_PART
        };
        let purge = purge.filter(enough);
        let since = found.appended.saturating_sub(self.up_to(folded));
        let waits = self.asked.is_some_and(|asked| now - asked < AGAIN);
        let build = since >= self.bound.max(size) && found.last > folded && !waits;
        if build {
            self.asked = Some(now);
        }
        Todo { purge, build }
    }
}

/// Keeps the log below its bound for as long as the node runs.
pub(crate) async fn watch(member: Arc<Member>, bound: u64) {
    if bound == 0 {
        return;
    }
    let purged = || member.log.last_purged().map_or(0, |purged| purged.index);
    let mut plan = Plan::new(bound, purged());
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let (last, appended) = member.log.appended();
        let found = Found { last, appended, purged: purged(), snapshot: member.state.snapshot() };
        let todo = plan.look(found, member.clock.now());
        let trigger = member.raft.trigger();
        if let Some(upto) = todo.purge
            && trigger.purge_log(upto).await.is_err()
        {
            return; // Raft has ended.
        }
        if todo.build && !member.room.is_short() {
            tracing::debug!(last, appended, "building a snapshot for the log's bytes");
            if trigger.snapshot().await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: u64 = 64_000;

    fn found(last: u64, purged: u64, snapshot: Option<(u64, u64)>) -> Found {
        // A thousand bytes an entry.
        Found { last, appended: last * 1_000, purged, snapshot }
    }

    fn after(seconds: u64) -> BootInstant {
        BootInstant::from_boot(Duration::from_secs(seconds))
    }

    #[test]
    fn m3_a_log_beyond_its_bytes_is_folded_and_purged() {
        let mut plan = Plan::new(BOUND, 0);
        for last in (2..64).step_by(2) {
            assert_eq!(plan.look(found(last, 0, None), after(0)), Todo::default());
        }
        let build = Todo { build: true, purge: None };
        assert_eq!(plan.look(found(64, 0, None), after(1)), build);
        assert_eq!(plan.look(found(66, 0, None), after(2)), Todo::default(), "it is under way");
        assert_eq!(plan.look(found(66, 0, None), after(200)), build, "it came to nothing");
        // Built up to 64: what lies more than a quarter of the bound before the end goes.
        let purge = Todo { build: false, purge: Some(50) };
        assert_eq!(plan.look(found(66, 0, Some((64, 500))), after(201)), purge);
        assert_eq!(plan.look(found(66, 50, Some((64, 500))), after(202)), Todo::default());
        // Never beyond the snapshot.
        for last in (68..126).step_by(2) {
            let todo = plan.look(found(last, 50, Some((64, 500))), after(203));
            assert!(!todo.build && todo.purge.is_none_or(|upto| upto <= 64), "{last}: {todo:?}");
        }
        assert!(plan.look(found(128, 64, Some((64, 500))), after(204)).build);
    }

    #[test]
    fn m3_a_large_state_is_not_written_for_a_little_log() {
        let mut plan = Plan::new(BOUND, 0);
        let size = 5 * BOUND;
        for last in (2..=384).step_by(2) {
            let todo = plan.look(found(last, 0, Some((64, size))), after(last));
            assert_eq!(todo.build, last == 384, "{last}");
        }
    }

    /// Spread from entry 0 on, almost all its bytes would lie before the snapshot.
    #[test]
    fn m3_a_log_that_was_purged_before_the_start_is_folded_in_time() {
        let mut plan = Plan::new(BOUND, 100_000);
        // The snapshot goes as far as the purge; what is behind it is counted from there.
        let at = |entries: u64| Found {
            last: 100_000 + entries,
            appended: entries * 1_000,
            purged: 100_000,
            snapshot: Some((100_000, 500)),
        };
        assert_eq!(plan.look(at(40), after(0)), Todo::default());
        assert_eq!(plan.look(at(62), after(1)), Todo::default());
        assert_eq!(plan.look(at(64), after(2)), Todo { build: true, purge: None });
        // A log that already is beyond the bound when it is opened is folded at once.
        let mut plan = Plan::new(BOUND, 100_000);
        assert!(plan.look(at(64), after(0)).build);
    }

    #[test]
    fn m3_what_was_truncated_counts_where_it_comes_again() {
        let mut plan = Plan::new(BOUND, 0);
        for last in [20, 40, 60] {
            plan.look(found(last, 0, None), after(0));
        }
        // Back to 30, and on.
        let todo = plan.look(Found { appended: 63_000, ..found(33, 0, None) }, after(1));
        assert!(!todo.build);
        assert!(plan.steps.iter().is_sorted(), "{:?}", plan.steps);
        assert!(plan.look(Found { appended: 64_000, ..found(34, 0, None) }, after(1)).build);
    }
}
