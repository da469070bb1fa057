//! Time as a parameter.
//!
//! Problem: a lease is a promise about elapsed time, and `std::time::Instant` stops while a machine
//! is suspended: a replica that slept for an hour would believe its lease alive. Wall clocks jump.
//! So whoever judges a lease reads [`BootInstant`]s (`CLOCK_BOOTTIME`, DESIGN 3 rule 4) from a
//! [`Clock`] it was given; tests give a [`ManualClock`].

use std::future::Future;
use std::ops::{Add, Sub};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// An instant of the boot clock: elapsed time since boot, suspend included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootInstant(Duration);

impl BootInstant {
    /// The instant `since_boot` after boot.
    pub const fn from_boot(since_boot: Duration) -> Self {
        Self(since_boot)
    }

    /// How long before this instant `earlier` was; zero when it was not before.
    pub fn saturating_duration_since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// This instant moved back, no further than boot.
    #[must_use]
    pub fn saturating_sub(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(by))
    }

    /// An instant too far to be reached.
    pub const fn never() -> Self {
        Self(Duration::from_secs(u64::MAX / 4))
    }
}

impl Add<Duration> for BootInstant {
    type Output = Self;
    fn add(self, by: Duration) -> Self {
        Self(self.0.saturating_add(by))
    }
}

impl Sub<BootInstant> for BootInstant {
    type Output = Duration;
    fn sub(self, earlier: BootInstant) -> Duration {
        self.saturating_duration_since(earlier)
    }
}

/// What tells the time to whoever judges a lease or waits for a deadline.
pub trait Clock: Send + Sync + std::fmt::Debug + 'static {
    /// Now, on the boot clock. Never goes back.
    fn now(&self) -> BootInstant;

    /// The wall clock, in milliseconds since the Unix epoch. Decides no lease (SPEC E5).
    fn wall_ms(&self) -> u64;

    /// Resolves once `now()` has reached `at`. May be late; whoever relies on it reads `now()`
    /// again (DESIGN 3 rule 4).
    fn sleep_until(&self, at: BootInstant) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;
}

/// The clock of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl SystemClock {
    /// As the shared handle most callers want.
    pub fn shared() -> Arc<dyn Clock> {
        Arc::new(Self)
    }
}

impl Clock for SystemClock {
    fn now(&self) -> BootInstant {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        // CLOCK_BOOTTIME is never negative: it starts at zero when the machine boots.
        BootInstant(Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32))
    }

    fn wall_ms(&self) -> u64 {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_millis() as u64)
    }

    fn sleep_until(&self, at: BootInstant) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move {
            loop {
                let left = at - self.now();
                if left.is_zero() {
                    return;
                }
                // tokio's timer stops in suspend; looking again at least every second bounds how
                // late a suspended machine notices.
                tokio::time::sleep(left.min(Duration::from_secs(1))).await;
            }
        })
    }
}

/// A clock that moves only when told to.
///
/// ```
/// use std::time::Duration;
/// use botmesh::clock::{Clock, ManualClock};
/// let clock = ManualClock::new();
/// let before = clock.now();
/// clock.advance(Duration::from_secs(16));
/// assert_eq!(clock.now() - before, Duration::from_secs(16));
/// ```
#[derive(Clone, Debug, Default)]
pub struct ManualClock {
    // One lock for the time and its sleepers, so that no sleeper registers between an advance and
    // the wake-ups it causes.
    inner: Arc<Mutex<Manual>>,
}

#[derive(Debug, Default)]
struct Manual {
    elapsed: Duration,
    sleepers: Vec<(BootInstant, oneshot::Sender<()>)>,
}

/// Where a manual clock's wall time starts: 2026-01-01T00:00:00Z.
const MANUAL_EPOCH_MS: u64 = 1_767_225_600_000;

impl ManualClock {
    /// A clock that shows an hour after boot.
    pub fn new() -> Self {
        let clock = Self::default();
        clock.inner.lock().elapsed = Duration::from_secs(3600);
        clock
    }

    /// Moves the clock on and wakes whoever slept until then.
    pub fn advance(&self, by: Duration) {
        let due = {
            let mut inner = self.inner.lock();
            inner.elapsed += by;
            let now = BootInstant(inner.elapsed);
            let (due, rest) = inner.sleepers.drain(..).partition(|(at, _)| *at <= now);
            inner.sleepers = rest;
            let due: Vec<(BootInstant, oneshot::Sender<()>)> = due;
            due
        };
        for (_, sleeper) in due {
            // A sleeper that was dropped meanwhile no longer cares.
            let _ = sleeper.send(());
        }
    }
}

impl Clock for ManualClock {
    fn now(&self) -> BootInstant {
        BootInstant(self.inner.lock().elapsed)
    }

    fn wall_ms(&self) -> u64 {
        MANUAL_EPOCH_MS + self.inner.lock().elapsed.as_millis() as u64
    }

    fn sleep_until(&self, at: BootInstant) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move {
            let woken = {
                let mut inner = self.inner.lock();
                if at <= BootInstant(inner.elapsed) {
                    return;
                }
                let (wake, woken) = oneshot::channel();
                inner.sleepers.push((at, wake));
                woken
            };
            // The sender is dropped only with the clock itself, which `self` keeps alive.
            let _ = woken.await;
        })
    }
}
