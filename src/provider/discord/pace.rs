//! When a bot may identify.
//!
//! Discord counts a bot's identifies over all of its processes, and says how many are left. While more than
//! half are, they may follow each other after the shortest pause. After that what is left is spread over
//! the time until the count begins anew: so they are never used up, by whatever goes wrong. The pause
//! counts from the last identify of any replica, which is a row of the store; a replica whose clock is
//! behind that of whoever wrote it counts from when it saw the row first.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How many identifies are left, as Discord tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Left {
    total: u64,
    remaining: u64,
    reset_after: Duration,
}

/// When a replica identified last, ms since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identified {
    pub(super) at_ms: u64,
}

/// The last identify that is known here, and since when it is.
#[derive(Debug, Default)]
pub(super) struct Seen(Option<(Identified, Instant)>);

impl Seen {
    /// How long ago the last one was, at least: what the clocks say, or since it is known here.
    pub(super) fn since(&mut self, last: Identified, now_ms: u64, now: Instant) -> Duration {
        let first = self.0.filter(|(seen, _)| *seen == last).map_or(now, |(_, first)| first);
        self.0 = Some((last, first));
        let known = now.saturating_duration_since(first);
        Duration::from_millis(now_ms.saturating_sub(last.at_ms)).max(known)
    }
}

impl Left {
    pub(super) fn of(answer: &Value) -> Option<Self> {
        let limit = answer.get("session_start_limit")?;
        let number = |name: &str| limit.get(name).and_then(Value::as_u64);
        Some(Self {
            total: number("total")?,
            remaining: number("remaining")?,
            reset_after: Duration::from_millis(number("reset_after")?),
        })
    }

    /// How long to wait before the next one, where the last was `since` ago; `None` for not at all.
    pub(super) fn wait(self, since: Option<Duration>, shortest: Duration) -> Option<Duration> {
        if self.remaining == 0 {
            return Some(self.reset_after.max(shortest));
        }
        let pause = match self.remaining > self.total / 2 {
            true => shortest,
            false => {
                let spread = self.reset_after.as_millis() / u128::from(self.remaining);
                shortest.max(Duration::from_millis(u64::try_from(spread).unwrap_or(u64::MAX)))
            }
        };
        pause.checked_sub(since?).filter(|wait| !wait.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);
    const SHORTEST: Duration = Duration::from_secs(5);

    fn left(remaining: u64) -> Left {
        Left { total: 1_000, remaining, reset_after: DAY }
    }

    #[test]
    fn case_w14_identifies_are_paced_by_how_many_are_left() {
        let last = Identified { at_ms: 1_000_000 };
        let wait = |remaining, now_ms| {
            let since = Seen::default().since(last, now_ms, Instant::now());
            left(remaining).wait(Some(since), SHORTEST)
        };
        assert_eq!(left(1).wait(None, SHORTEST), None);
        assert_eq!(wait(999, 1_000_000), Some(SHORTEST));
        assert_eq!(wait(999, 1_004_000), Some(Duration::from_secs(1)));
        assert_eq!(wait(999, 1_005_000), None);
        assert_eq!(wait(400, 1_016_000), Some(Duration::from_secs(200)));
        assert_eq!(wait(400, 1_216_000), None);
        assert_eq!(wait(0, 9_000_000), Some(DAY));
        assert_eq!(wait(999, 0), Some(SHORTEST), "the clock was set back");
    }

    #[test]
    fn case_w14_a_clock_that_is_behind_waits_one_pause_and_no_more() {
        let (mut seen, began) = (Seen::default(), Instant::now());
        let last = Identified { at_ms: 600_000 };
        // Ten minutes behind whoever identified last; it asks again and again.
        let mut wait = |last, ms: u64| {
            let since = seen.since(last, ms, began + Duration::from_millis(ms));
            left(999).wait(Some(since), SHORTEST)
        };
        assert_eq!(wait(last, 0), Some(SHORTEST));
        assert_eq!(wait(last, 2_000), Some(Duration::from_secs(3)));
        assert_eq!(wait(last, 4_999), Some(Duration::from_millis(1)));
        assert_eq!(wait(last, 5_000), None);
        // Another one identified meanwhile: from there on anew.
        let next = Identified { at_ms: 605_000 };
        assert_eq!(wait(next, 5_000), Some(SHORTEST));
        assert_eq!(wait(next, 9_000), Some(Duration::from_secs(1)));
        assert_eq!(wait(next, 10_000), None);
    }

    /// Whatever fails at once after each identify.
    #[test]
    fn case_w14_a_loop_does_not_use_them_up() {
        let (mut remaining, mut now_ms, mut last) = (1_000, 0, None::<u64>);
        while now_ms < 86_400_000 {
            let reset_after = Duration::from_millis(86_400_000 - now_ms);
            let left = Left { total: 1_000, remaining, reset_after };
            let since = last.map(|last| Duration::from_millis(now_ms - last));
            if let Some(wait) = left.wait(since, SHORTEST) {
                now_ms += u64::try_from(wait.as_millis()).unwrap();
                continue;
            }
            remaining -= 1;
            assert!(remaining > 0, "used up after {now_ms} ms");
            last = Some(now_ms);
        }
    }

    #[test]
    fn m1_what_says_nothing_of_a_limit_is_none() {
        for odd in [json!(null), json!({}), json!({ "session_start_limit": { "total": -1 } })] {
            assert_eq!(Left::of(&odd), None);
        }
        let told = json!({ "session_start_limit": {
            "total": 1_000, "remaining": 5, "reset_after": 86_400_000, "max_concurrency": 1,
        } });
        assert_eq!(Left::of(&told), Some(left(5)));
    }
}
