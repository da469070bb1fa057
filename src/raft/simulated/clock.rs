//! The boot clock of a simulated machine: the simulation's time, at a rate of its own.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::network::Net;
use crate::clock::{BootInstant, Clock};

/// What wall clocks show when a simulation begins: 2026-01-01T00:00:00Z.
const EPOCH_MS: u64 = 1_767_225_600_000;
/// For how long the machines have been running by then.
const UP: Duration = Duration::from_secs(3600);

/// The clock of one host.
#[derive(Clone, Debug)]
pub(crate) struct HostClock {
    net: Arc<Net>,
    /// How much faster than the simulation's time it runs, in millionths.
    drift_ppm: i64,
    /// How far its wall clock is ahead.
    ahead_ms: i64,
}

impl HostClock {
    pub(crate) fn new(net: Arc<Net>, drift_ppm: i64, ahead_ms: i64) -> Self {
        Self { net, drift_ppm, ahead_ms }
    }
}

impl Clock for HostClock {
    fn now(&self) -> BootInstant {
        let ns = self.net.now().as_nanos() as i128;
        let ns = ns + ns * i128::from(self.drift_ppm) / 1_000_000;
        BootInstant::from_boot(UP + Duration::from_nanos(u64::try_from(ns).unwrap_or(0)))
    }

    fn wall_ms(&self) -> u64 {
        let ms = self.net.now().as_millis() as u64;
        (EPOCH_MS + ms).saturating_add_signed(self.ahead_ms)
    }

    fn sleep_until(&self, at: BootInstant) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move {
            loop {
                let left = at - self.now();
                if left.is_zero() {
                    return;
                }
                // Another rate than the timers': it looks again.
                tokio::time::sleep(left.min(Duration::from_secs(1))).await;
            }
        })
    }
}
