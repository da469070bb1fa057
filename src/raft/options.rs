//! What a node is opened with.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Clock, SystemClock};
use crate::machine::{LEVEL, Limits};

use super::Secret;

/// How a data directory that holds no member yet becomes one. A member that restarts ignores it
/// (SPEC N2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// It has to be a member already.
    Member,
    /// Founds a group of one.
    Bootstrap,
    /// Joins a group by one of these cluster addresses.
    Join(Vec<String>),
    /// Symmetric replicas (SPEC K2): nobody founds before all of them were seen.
    Expect {
        /// How many; as many as `peers`.
        count: usize,
        /// Cluster addresses, the own included.
        peers: Vec<String>,
    },
}

/// The beat of the group. One unit scales all of it (DESIGN 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Distance of two heartbeats.
    pub heartbeat: Duration,
    /// The election timeout is random between this …
    pub election_min: Duration,
    /// … and this.
    pub election_max: Duration,
    /// How long one append may take, the follower's fsync included.
    pub append: Duration,
    /// How long a connect may take.
    pub connect: Duration,
}

impl Timing {
    /// With this time between two heartbeats.
    pub fn of(beat: Duration) -> Self {
        Self {
            heartbeat: beat,
            election_min: beat * 3,
            election_max: beat * 6,
            append: beat * 20,
            connect: beat * 10,
        }
    }

    /// The default beat, slowed by `factor` (for slow disks).
    pub fn scaled(factor: u32) -> Self {
        Self::of(Duration::from_millis(50) * factor.max(1))
    }

    /// The beat for a disk that takes so long for a sync: a vote costs one on either side, and an
    /// election must not begin anew before it can be won.
    pub(crate) fn beat_for(sync: Duration) -> Duration {
        const STEP_MS: u64 = 100;
        let wanted_ms = u64::try_from(sync.as_millis()).unwrap_or(u64::MAX / 10) * 10 / 3;
        Duration::from_millis(wanted_ms.div_ceil(STEP_MS) * STEP_MS)
    }

    /// Whether a sync that takes so long disturbs elections.
    pub(crate) fn is_too_fast_for(&self, sync: Duration) -> bool {
        sync * 3 > self.election_min
    }
}

impl Default for Timing {
    fn default() -> Self {
        Self::scaled(1)
    }
}

/// The bounds of a node that are its own, not the group's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeLimits {
    /// Commands waiting for a batch, over all lanes (SPEC M3).
    pub commands_waiting_max: usize,
    /// Log entries after which a snapshot is built.
    pub snapshot_every: u64,
    /// Bytes of log after which a snapshot is built, or as many as the last one has where that is more;
    /// 0 = entries alone decide.
    pub snapshot_every_bytes: u64,
    /// Log entries kept behind a snapshot, so that a follower slightly behind needs none.
    pub entries_kept: u64,
    /// Free bytes of the disk below which the node takes no entries and leads no longer; 0 = it is
    /// not looked at (SPEC M4).
    pub disk_low_water: u64,
    /// The largest snapshot that is taken from a leader, in bytes.
    pub snapshot_bytes_max: u64,
}

impl NodeLimits {
    /// The usual ones, with a snapshot after every so many entries.
    pub fn snapshots_every(entries: u64) -> Self {
        Self {
            commands_waiting_max: 16_384,
            snapshot_every: entries,
            snapshot_every_bytes: 64 << 20,
            entries_kept: entries / 5 * 2,
            disk_low_water: 64 << 20,
            snapshot_bytes_max: 16 << 30,
        }
    }
}

impl Default for NodeLimits {
    fn default() -> Self {
        Self::snapshots_every(50_000)
    }
}

/// What a node is opened with. `..NodeOptions::new(name, dir, advertise, secret)` fills the rest.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// The operator's name for it, unique in the group.
    pub name: String,
    /// Its data directory; created if absent, locked while open.
    pub dir: PathBuf,
    /// `host:port` by which the others reach its cluster listener.
    pub advertise: String,
    /// Host names of peers and what they are, as in a hosts file: these are not looked up.
    pub hosts: Vec<(String, IpAddr)>,
    /// The cluster secret.
    pub secret: Secret,
    /// What an empty directory does.
    pub start: Start,
    /// By what it judges leases.
    pub clock: Arc<dyn Clock>,
    /// The beat.
    pub timing: Timing,
    /// Its own bounds.
    pub limits: NodeLimits,
    /// The group's bounds, to be given to all nodes alike: those of the node that leads hold. They
    /// are agreed by the log; a group that was founded by a program which knew no `SetLimits`, with
    /// others than the default, is to build a snapshot before a node joins it.
    pub machine: Limits,
    /// The level of commands the node announces and applies (SPEC M5); less than all makes it behave
    /// like an older program, for tests of groups of mixed versions.
    #[doc(hidden)]
    pub command_level: u32,
    /// Where in a simulation the node is, if it is in one.
    #[cfg(feature = "test-util")]
    #[doc(hidden)]
    pub simulated: Option<super::simulated::Place>,
}

impl NodeOptions {
    /// Options for a member that restarts, everything else by default.
    pub fn new(
        name: impl Into<String>,
        dir: impl Into<PathBuf>,
        advertise: impl Into<String>,
        secret: Secret,
    ) -> Self {
        Self {
            name: name.into(),
            dir: dir.into(),
            advertise: advertise.into(),
            hosts: Vec::new(),
            secret,
            start: Start::Member,
            clock: SystemClock::shared(),
            timing: Timing::default(),
            limits: NodeLimits::default(),
            machine: Limits::default(),
            command_level: LEVEL,
            #[cfg(feature = "test-util")]
            simulated: None,
        }
    }

    /// Whether the node is in a simulation.
    #[cfg(feature = "test-util")]
    pub(crate) fn is_simulated(&self) -> bool {
        self.simulated.is_some()
    }

    /// Whether the node is in a simulation.
    #[cfg(not(feature = "test-util"))]
    pub(crate) fn is_simulated(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beat_that_is_advised_for_a_disk_is_slow_enough_for_it() {
        let ms = Duration::from_millis;
        assert_eq!(Timing::default(), Timing::of(ms(50)));
        assert!(!Timing::default().is_too_fast_for(ms(40)));
        for sync in [51, 150, 152, 500, 1_499] {
            assert!(Timing::default().is_too_fast_for(ms(sync)), "{sync} ms");
            let advised = Timing::of(Timing::beat_for(ms(sync)));
            assert!(!advised.is_too_fast_for(ms(sync)), "{advised:?} for {sync} ms");
        }
        assert_eq!(Timing::beat_for(ms(150)), ms(500));
    }
}
