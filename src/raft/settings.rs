//! openraft's settings, and why each.

use std::sync::Arc;
use std::time::Duration;

use openraft::{Config, SnapshotPolicy};

use super::{NodeLimits, Timing};

/// Entries of one append. An entry is a batch of up to 256 KiB, or one command of up to a megabyte:
/// this many stay below what a body may have.
const APPEND_ENTRIES_MAX: u64 = 40;

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The settings of a node.
pub(crate) fn settings(timing: &Timing, limits: &NodeLimits) -> Result<Arc<Config>, String> {
    let config = Config {
        cluster_name: "botmesh".to_owned(),
        heartbeat_interval: ms(timing.heartbeat),
        election_timeout_min: ms(timing.election_min),
        election_timeout_max: ms(timing.election_max),
        enable_pre_vote: Some(true),
        // A leader that resumes after a restart without an election would confirm reads at an
        // index from before entries it had itself acknowledged: its first entry of the term is an
        // old one, and what was committed since is not known yet. An election costs 0.3 s.
        enable_leader_restore: Some(false),
        // The default of 200 ms would cut off any real snapshot; transfers have a deadline that
        // grows with their size.
        install_snapshot_timeout: 3_600_000,
        max_payload_entries: APPEND_ENTRIES_MAX,
        // Followers get entries while the leader syncs its own (DESIGN 6).
        broadcast_submitted_on_append: Some(true),
        snapshot_policy: SnapshotPolicy::LogsSinceLast(limits.snapshot_every),
        max_in_snapshot_log_to_keep: limits.entries_kept,
        replication_lag_threshold: limits.snapshot_every.max(limits.entries_kept) + 10_000,
        purge_batch_size: 256,
        ..Config::default()
    };
    config.validate().map(Arc::new).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_settings_are_valid_at_every_scale() {
        for factor in [1, 2, 10, 100] {
            let settings = settings(&Timing::scaled(factor), &NodeLimits::default()).unwrap();
            assert_eq!(settings.heartbeat_interval, 50 * u64::from(factor));
        }
    }
}
