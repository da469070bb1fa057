//! Who is to wait, and for how long.
//!
//! Discord says with each answer how many calls are left for a route and when there will be more, and
//! shuts out an address that asks ten thousand times in vain. So a call is not made before its time: it is
//! answered here as Discord would, and whoever made it waits and keeps the order (SPEC G3).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;

use crate::provider::outward::Answer;

/// A wait that is asked for is kept to, up to this.
const WAIT_MAX: Duration = Duration::from_secs(3_600);
/// Where a wait is asked for and not how long.
const WAIT_USUAL: Duration = Duration::from_secs(1);
/// No wait that is asked for is shorter: "at once" would be a loop.
const WAIT_MIN: Duration = Duration::from_millis(50);
/// Routes of which it is remembered until when they are shut, before those are forgotten that are
/// open again.
const SHUT_MAX: usize = 1_024;

/// Until when nothing is to be asked. Shared by all that call.
#[derive(Debug, Default)]
pub(super) struct Limits {
    // One lock for both: held for a look.
    shut: Mutex<Shut>,
}

#[derive(Debug, Default)]
struct Shut {
    all: Option<Instant>,
    routes: HashMap<String, Instant>,
}

impl Limits {
    /// How long this route is to be left alone; routes of interactions do not count towards what
    /// all share.
    pub(super) fn wait(&self, route: &str, shared: bool, now: Instant) -> Option<Duration> {
        let shut = self.shut.lock();
        let all = shut.all.filter(|_| shared);
        let until = all.max(shut.routes.get(route).copied())?;
        until.checked_duration_since(now).filter(|wait| !wait.is_zero())
    }

    /// Learns from an answer; how long it asks to wait, where it is no more than that.
    pub(super) fn learn(
        &self,
        route: &str,
        answer: &Answer,
        said: &Value,
        now: Instant,
    ) -> Option<Duration> {
        let header = |name: &str| answer.headers.get(name)?.to_str().ok().map(str::trim);
        if answer.status != 429 {
            if header("x-ratelimit-remaining") == Some("0") {
                let reset = header("x-ratelimit-reset-after").and_then(|text| text.parse().ok());
                if let Some(wait) = reset.and_then(seconds) {
                    self.shut(route, false, now + wait, now);
                }
            }
            return None;
        }
        let told = said.get("retry_after").and_then(Value::as_f64);
        let told = told.or_else(|| header("retry-after")?.parse().ok());
        let wait = told.and_then(seconds).unwrap_or(WAIT_USUAL).max(WAIT_MIN);
        // What is not the API's own answer comes from what shuts out whole addresses.
        let all = said.get("global").and_then(Value::as_bool).unwrap_or(!said.is_object())
            || header("x-ratelimit-global") == Some("true");
        self.shut(route, all, now + wait, now);
        Some(wait)
    }

    fn shut(&self, route: &str, all: bool, until: Instant, now: Instant) {
        let mut shut = self.shut.lock();
        if all {
            shut.all = shut.all.max(Some(until));
            return;
        }
        if shut.routes.len() >= SHUT_MAX {
            shut.routes.retain(|_, until| *until > now);
        }
        if shut.routes.len() < SHUT_MAX {
            shut.routes.insert(route.to_owned(), until);
        }
    }
}

fn seconds(seconds: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(seconds).ok().map(|wait| wait.min(WAIT_MAX))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use hyper::header::{HeaderMap, HeaderValue};

    use super::*;

    fn answer(status: u16, headers: &[(&'static str, &'static str)], body: &str) -> Answer {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, HeaderValue::from_static(value));
        }
        Answer { status, headers: map, body: Bytes::from(body.to_owned()) }
    }

    fn learn(limits: &Limits, route: &str, answer: &Answer, now: Instant) -> Option<Duration> {
        limits.learn(route, answer, &answer.json(), now)
    }

    #[test]
    fn g3_a_route_is_left_alone_for_as_long_as_discord_says() {
        let (limits, now) = (Limits::default(), Instant::now());
        let s = Duration::from_secs_f64;
        // The last call of a window, which went well: the next would be one in vain.
        let last = [("x-ratelimit-remaining", "0"), ("x-ratelimit-reset-after", "1.5")];
        assert_eq!(learn(&limits, "1", &answer(200, &last, "{}"), now), None);
        assert_eq!(limits.wait("1", true, now), Some(s(1.5)));
        assert_eq!(limits.wait("2", true, now), None);
        assert_eq!(limits.wait("1", true, now + s(1.5)), None);
        // One too many: the body tells more exactly than the header.
        let body = r#"{"message":"slow","retry_after":0.25,"global":false}"#;
        let many = answer(429, &[("retry-after", "1")], body);
        assert_eq!(learn(&limits, "2", &many, now), Some(s(0.25)));
        assert_eq!(limits.wait("2", true, now), Some(s(0.25)));
        // The limit of the whole bot, which is not one of interactions.
        let body = r#"{"message":"slow","retry_after":3,"global":true}"#;
        assert_eq!(learn(&limits, "3", &answer(429, &[], body), now), Some(s(3.0)));
        assert_eq!(limits.wait("4", true, now), Some(s(3.0)));
        assert_eq!(limits.wait("4", false, now), None);
        // What is not Discord's own, and what makes no sense.
        let limits = Limits::default();
        let html = answer(429, &[("retry-after", "7")], "<html>");
        assert_eq!(learn(&limits, "1", &html, now), Some(s(7.0)));
        assert_eq!(limits.wait("2", true, now), Some(s(7.0)));
        let odd = answer(429, &[("retry-after", "soon")], r#"{"retry_after":-1e300}"#);
        assert_eq!(learn(&limits, "3", &odd, now), Some(WAIT_USUAL));
        let long = answer(429, &[], r#"{"retry_after":1e18,"global":false}"#);
        assert_eq!(learn(&limits, "3", &long, now), Some(WAIT_MAX));
        let at_once = answer(429, &[], r#"{"retry_after":0,"global":false}"#);
        assert_eq!(learn(&limits, "4", &at_once, now), Some(WAIT_MIN));
        assert_eq!(limits.wait("4", false, now), Some(WAIT_MIN));
    }
}
