//! The clock of a group, as what a coordinator hands out.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use crate::clock::{BootInstant, Clock};
use crate::group::Group;

/// A group's clock as a handle of its own.
pub(super) struct GroupClock(pub(super) Arc<dyn Group>);

impl fmt::Debug for GroupClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.clock().fmt(f)
    }
}

impl Clock for GroupClock {
    fn now(&self) -> BootInstant {
        self.0.clock().now()
    }
    fn wall_ms(&self) -> u64 {
        self.0.clock().wall_ms()
    }
    fn sleep_until(&self, at: BootInstant) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.0.clock().sleep_until(at)
    }
}
