//! Writes to sled in portions it bears (DESIGN 7).

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::disk::{Failed, sled, sync};
use crate::raft::log_store::SYNC_BYTES_MAX;
use crate::raft::room::Room;

/// Keys inserted in one batch.
pub(super) const INSERTS_MAX: usize = 300;
/// Keys removed in one batch.
pub(super) const REMOVALS_MAX: usize = 100;
/// Bytes of one batch.
pub(super) const BYTES_MAX: usize = 256 << 10;
/// What a key weighs beside its value.
const KEY_BYTES: usize = 64;

/// Between two tries on a full disk.
const FULL_AGAIN: Duration = Duration::from_millis(500);

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// What a writer of the state waits for: it is in no hurry, and sled must not meet a full disk (SPEC
/// M4).
#[derive(Clone, Debug, Default)]
pub(super) struct Waits {
    pub(super) room: Option<Arc<Room>>,
    /// Set once nothing is waited for any more.
    pub(super) closing: Arc<AtomicBool>,
}

impl Waits {
    fn for_room(&self) {
        if let Some(room) = &self.room {
            room.wait(|| self.closing.load(Ordering::Relaxed));
        }
    }

    /// Does what writes a file, again once there is room where the disk was full: to openraft such an
    /// error would be the end.
    pub(super) fn write<T>(&self, mut work: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        loop {
            self.for_room();
            match work() {
                Err(error) if is_full(&error) && !self.closing.load(Ordering::Relaxed) => {
                    tracing::warn!(%error, "the disk is full: a snapshot waits for room");
                    std::thread::sleep(FULL_AGAIN);
                }
                done => return done,
            }
        }
    }

    /// Whether there is no room now.
    pub(super) fn is_short(&self) -> bool {
        self.room.as_ref().is_some_and(|room| room.look())
    }
}

/// Collects changes into batches of bearable size.
pub(super) struct Batching {
    db: ::sled::Db,
    sync: Arc<File>,
    waits: Waits,
    batch: ::sled::Batch,
    inserts: usize,
    removals: usize,
    bytes: usize,
    unsynced_bytes: usize,
}

impl Batching {
    pub(super) fn new(db: &::sled::Db, sync: &Arc<File>, waits: &Waits) -> Self {
        Self {
            db: db.clone(),
            sync: sync.clone(),
            waits: waits.clone(),
            batch: ::sled::Batch::default(),
            inserts: 0,
            removals: 0,
            bytes: 0,
            unsynced_bytes: 0,
        }
    }

    pub(super) fn insert(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), Failed> {
        self.bytes += value.len() + KEY_BYTES;
        self.batch.insert(key, value);
        self.inserts += 1;
        if self.inserts >= INSERTS_MAX || self.bytes >= BYTES_MAX {
            return self.apply();
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, key: Vec<u8>) -> Result<(), Failed> {
        self.bytes += KEY_BYTES;
        self.batch.remove(key);
        self.removals += 1;
        if self.removals >= REMOVALS_MAX || self.bytes >= BYTES_MAX {
            return self.apply();
        }
        Ok(())
    }

    /// Removes a key with a value that counts: what it leaves is written anew with its neighbours.
    pub(super) fn remove_large(&mut self, key: Vec<u8>, len: usize) -> Result<(), Failed> {
        self.bytes += len;
        self.remove(key)
    }

    pub(super) fn apply(&mut self) -> Result<(), Failed> {
        if self.inserts + self.removals > 0 {
            self.waits.for_room();
            let batch = std::mem::take(&mut self.batch);
            self.unsynced_bytes += self.bytes;
            (self.inserts, self.removals, self.bytes) = (0, 0, 0);
            sled(|| self.db.apply_batch(batch))?;
        }
        if self.unsynced_bytes >= SYNC_BYTES_MAX {
            self.unsynced_bytes = 0;
            return sync(&self.db, &self.sync);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn m4_what_meets_a_full_disk_is_tried_again_until_the_store_closes() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let (waits, mut tries) = (Waits::default(), 0);
        let written = waits.write(|| {
            tries += 1;
            if tries < 3 { Err(full()) } else { Ok(7) }
        });
        assert_eq!((written.unwrap(), tries), (7, 3));
        let broken = || io::Error::from(io::ErrorKind::InvalidData);
        let told = waits.write(|| Err::<(), _>(broken())).unwrap_err();
        assert_eq!(told.kind(), io::ErrorKind::InvalidData, "that is no matter of room");
        waits.closing.store(true, Ordering::Relaxed);
        let told = waits.write(|| Err::<(), _>(full())).unwrap_err();
        assert_eq!(told.kind(), io::ErrorKind::StorageFull);
    }
}
