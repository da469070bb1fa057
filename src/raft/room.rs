//! Room on the disk (SPEC M4, case r15).
//!
//! Problem: sled poisons itself at the first ENOSPC, and a node that found out that way can only
//! die. Idea: look at the free space before it is gone. Below a low-water mark the node is *short*:
//! it takes no entries and proposes none, and hands leadership on; when there is room again it goes
//! on where it was, without a restart. A *ballast* file keeps some room back for what is under way
//! when others fill the disk faster than this is looked at: it is removed as soon as the node is
//! short, and made anew when there is room for it and for the mark.
//!
//! A disk that hangs is the other kind: what the leader wrote is committed by the others, and what it
//! has to answer for itself (a vote, its own part of a majority) never comes. Such a leader hands
//! leadership on too.
//!
//! Invariants: a short node still answers heartbeats and votes, so it costs the group no election;
//! it never leads by choice; what it had taken before is written in the room that the mark left.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate, statvfs};

use super::member::{Leader, Member};
use super::{Timing, membership};
use crate::clock::BootInstant;
use crate::group::Unavailable;

/// Between two looks at the disk.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Between two warnings of a slow disk.
const SLOW_AGAIN: Duration = Duration::from_secs(60);
/// The ballast's part of the mark.
const BALLAST_PART: u64 = 4;

/// What is known of the disk below a data directory.
#[derive(Debug)]
pub(crate) struct Room {
    root: PathBuf,
    /// Free bytes below which the node is short; 0 = it never is.
    low_water: u64,
    /// Free bytes at the last look while it is short; `u64::MAX` while it is not.
    short: AtomicU64,
    /// Held while the ballast is made or removed.
    ballast: Mutex<()>,
}

impl Room {
    /// Looks once: a directory on a full disk is opened short. Blocking.
    pub(crate) fn new(root: &Path, low_water: u64) -> Self {
        let room = Self {
            root: root.to_owned(),
            low_water,
            short: AtomicU64::new(u64::MAX),
            ballast: Mutex::new(()),
        };
        room.look();
        room
    }

    fn ballast_path(&self) -> PathBuf {
        self.root.join("ballast")
    }

    fn ballast_bytes(&self) -> u64 {
        self.low_water / BALLAST_PART
    }

    /// Free bytes, for one without privileges.
    fn free(&self) -> io::Result<u64> {
        let stat = statvfs(&self.root)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// What has to be free: out of it again only with some to spare, or a node on the edge would do
    /// nothing else.
    fn enough(&self) -> u64 {
        if self.is_short() { self.low_water / 2 * 3 } else { self.low_water }
    }

    /// Looks at the disk and says whether the node is short. Blocking, briefly.
    pub(crate) fn look(&self) -> bool {
        if self.low_water == 0 {
            return false;
        }
        let free = match self.free() {
            Ok(free) => free,
            Err(error) => {
                tracing::warn!(%error, "the free space of {} is not known", self.root.display());
                return self.is_short();
            }
        };
        let is_short = free < self.enough();
        let was_short = self.is_short();
        self.short.store(if is_short { free } else { u64::MAX }, Ordering::Release);
        if is_short && !was_short {
            tracing::error!(
                free, needed = self.enough(), dir = %self.root.display(),
                "the disk is nearly full: this node takes no entries and leads no longer; free \
                 some space, it goes on by itself"
            );
        } else if was_short && !is_short {
            tracing::info!(free, dir = %self.root.display(), "there is room on the disk again");
        }
        self.keep_ballast(is_short, free);
        is_short
    }

    fn keep_ballast(&self, is_short: bool, free: u64) {
        let _one = self.ballast.lock();
        let path = self.ballast_path();
        let is_there = fs::metadata(&path).is_ok_and(|found| found.len() == self.ballast_bytes());
        let kept = if is_short {
            match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                removed => removed,
            }
        } else if !is_there && free > self.low_water / 2 * 3 + self.ballast_bytes() {
            self.make_ballast(&path)
        } else {
            Ok(())
        };
        if let Err(error) = kept {
            tracing::warn!(%error, "the ballast of {} is not as it should be", path.display());
        }
    }

    fn make_ballast(&self, path: &Path) -> io::Result<()> {
        let file = File::create(path)?;
        let made = fallocate(&file, FallocateFlags::empty(), 0, self.ballast_bytes());
        if made.is_err() {
            // A file system that reserves nothing: a file with holes would keep nothing back.
            fs::remove_file(path)?;
        }
        Ok(())
    }

    /// Returns once there is room, or `or` says that this no longer matters. For what can wait: each
    /// look is at the disk itself, which others may fill between two of the node's. Blocking.
    pub(crate) fn wait(&self, or: impl Fn() -> bool) {
        while !or() && self.look() {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Whether it takes no entries now.
    pub(crate) fn is_short(&self) -> bool {
        self.short.load(Ordering::Acquire) != u64::MAX
    }

    /// Why this node does not serve, where its disk is the reason.
    pub(crate) fn hindrance(&self) -> Option<Unavailable> {
        let free = self.short.load(Ordering::Acquire);
        (free != u64::MAX).then(|| Unavailable::NotServing {
            why: format!(
                "its disk is nearly full: {} MiB are free at {}, {} MiB have to be; free some \
                 space, it goes on by itself",
                free >> 20,
                self.root.display(),
                self.enough() >> 20
            ),
        })
    }
}

/// How long the disk may take for one write before the node hands leadership on: as long as the
/// others would wait for a leader that says nothing (case r16).
fn stall_max(member: &Member) -> Duration {
    member.timing.election_max * 2
}

/// Says so where the disk is too slow for the beat of the group (case r21), and which would do.
fn warn_of_slow(member: &Member) -> bool {
    let Some(sync) = member.log.sync_takes() else { return false };
    let timing = &member.timing;
    if !timing.is_too_fast_for(sync) {
        return false;
    }
    let beat = Timing::beat_for(sync).as_millis();
    tracing::warn!(
        "the disk takes {} ms for a sync, and an election may begin after {} ms: leaders will \
         change without need; set beat = \"{beat}ms\" (--beat {beat}ms) on all nodes",
        sync.as_millis(),
        timing.election_min.as_millis(),
    );
    true
}

/// Looks at the disk for as long as the node runs.
pub(crate) async fn watch(member: Arc<Member>) {
    let mut was_short = false;
    let mut said_slow: Option<BootInstant> = None;
    loop {
        let looking = member.room.clone();
        let Ok(is_short) = crate::outside::off_thread(move || looking.look()).await else {
            return; // The runtime is going away.
        };
        if is_short != was_short {
            member.raft.runtime_config().elect(!is_short);
            was_short = is_short;
        }
        let now = member.clock.now();
        if said_slow.is_none_or(|at| now - at >= SLOW_AGAIN) && warn_of_slow(&member) {
            said_slow = Some(now);
        }
        let stalled = member.log.stalled_for().filter(|stalled| *stalled > stall_max(&member));
        if let Some(stalled) = stalled {
            tracing::warn!(?stalled, "the disk does not answer");
        }
        if (is_short || stalled.is_some()) && member.leader() == Leader::Here {
            let within = member.timing.election_max * 3;
            if let Err(error) = membership::yield_leader(&member, None, within).await {
                tracing::debug!(%error, "leadership was not handed on");
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn m4_a_node_is_short_below_the_mark_and_gives_its_ballast_up() {
        let dir = tempfile::tempdir().unwrap();
        let room = Room::new(dir.path(), 1 << 20);
        assert!(!room.is_short());
        assert_eq!(room.hindrance(), None);
        let ballast = fs::metadata(dir.path().join("ballast")).unwrap();
        assert_eq!(ballast.len(), 1 << 18);

        // No disk has as much.
        let room = Room::new(dir.path(), 1 << 60);
        assert!(room.is_short());
        assert!(!dir.path().join("ballast").exists());
        let why = room.hindrance().unwrap().to_string();
        assert!(why.contains("nearly full") && why.contains("free some space"), "{why}");

        let room = Room::new(dir.path(), 0);
        assert!(!room.is_short());
        assert!(!dir.path().join("ballast").exists());
    }
}
