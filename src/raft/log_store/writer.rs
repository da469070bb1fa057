//! The thread that owns the log's disk.
//!
//! sled's concurrent flushes do not group, so one thread writes: it takes everything that is
//! queued, turns it into batches, flushes, syncs, raises the marker, and only then calls back, in
//! order. What follows an error is unknown, so every error ends the process (DESIGN 7).

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use openraft::storage::IOFlushed;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::chunk::{self, Builder, key};
use super::recover::{self, Recovered};
use super::view::View;
use super::{Base, Entry, LogId, TypeConfig, Vote, guarded};
use crate::codec::{self, Kind};
use crate::raft::files::fatal;
use crate::raft::identity::DataDir;
use crate::raft::marker::{Durable, Marker};

/// Keys inserted in one batch (DESIGN 7: large batches cost memory and disk out of proportion).
const INSERTS_MAX: usize = 300;
/// Bytes of one batch.
const BATCH_BYTES_MAX: usize = 256 << 10;
/// Requests that one sync may serve.
const DRAIN_OPS_MAX: usize = 4096;
/// Bytes of entries that one sync may serve.
const DRAIN_BYTES_MAX: usize = 512 << 10;
/// Keys removed between two syncs while sweeping.
const SWEEP_KEYS_MAX: usize = 32;

/// A request to the writer.
pub(super) enum Op {
    /// Entries that follow the last ones.
    Append(Vec<Entry>, IOFlushed<TypeConfig>),
    /// A new vote.
    Vote(Vote, oneshot::Sender<()>),
    /// What is known to be committed; written when something else is.
    Committed(Option<LogId>),
    /// Entries behind this one go.
    Truncate(Option<LogId>),
    /// Entries up to this one go.
    Purge(LogId),
}

/// Whom to tell after the sync.
enum Waiting {
    Append(IOFlushed<TypeConfig>),
    Vote(oneshot::Sender<()>),
}

pub(super) struct Writer {
    db: sled::Db,
    /// A second handle of sled's file: its flush does not reach the disk's own cache (DESIGN 7).
    sync: File,
    marker: Marker,
    view: Arc<Mutex<View>>,
    base: Option<Base>,
    /// The last entry taken.
    last: Option<LogId>,
    vote: Option<Vote>,
    committed: Option<LogId>,
    committed_dirty: bool,
    /// Entries on their way into chunks; its hash is the chain at `last`.
    builder: Builder,
    batch: sled::Batch,
    batch_keys: usize,
    batch_bytes: usize,
    drained_bytes: usize,
    /// Bytes handed to sled since the last sync.
    unsynced_bytes: usize,
    truncations: u64,
    /// Chunks that end at or below the base wait to be removed.
    sweeping: bool,
    waiting: Vec<Waiting>,
    /// Something was written that has to be durable.
    unsynced: bool,
    _dir: DataDir,
}

/// Every failure of the disk ends here.
fn or_die<T>(what: &str, result: Result<T, String>) -> T {
    result.unwrap_or_else(|why| fatal(what, &why))
}

impl Writer {
    pub(super) fn new(recovered: Recovered, view: Arc<Mutex<View>>, dir: DataDir) -> Self {
        let Recovered { base, last, hash, vote, committed, marker, db, sync, .. } = recovered;
        Self {
            db,
            sync,
            marker,
            view,
            base,
            last,
            vote,
            committed,
            committed_dirty: false,
            builder: Builder::new(hash),
            batch: sled::Batch::default(),
            batch_keys: 0,
            batch_bytes: 0,
            drained_bytes: 0,
            unsynced_bytes: 0,
            truncations: 0,
            sweeping: base.is_some(),
            waiting: Vec::new(),
            unsynced: false,
            _dir: dir,
        }
    }

    /// Serves until every sender is gone.
    pub(super) fn run(mut self, ops: &Receiver<Op>) {
        // A panic in here (sled's, or ours) leaves requests unanswered for ever.
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            while let Some(op) = self.next(ops) {
                self.take(op);
                for _ in 1..DRAIN_OPS_MAX {
                    if self.drained_bytes > DRAIN_BYTES_MAX {
                        break;
                    }
                    match ops.try_recv() {
                        Ok(op) => self.take(op),
                        Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
                    }
                }
                self.commit(false);
                // Under load the sweep gets its share too, or purging would never reclaim.
                self.sweep();
            }
            self.commit(true);
        }));
        if ended.is_err() {
            fatal("the log's thread panicked", &"see above");
        }
    }

    fn next(&mut self, ops: &Receiver<Op>) -> Option<Op> {
        while self.sweeping {
            match ops.recv_timeout(Duration::from_millis(1)) {
                Ok(op) => return Some(op),
                Err(RecvTimeoutError::Timeout) => self.sweep(),
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        ops.recv().ok()
    }

    fn take(&mut self, op: Op) {
        match op {
            Op::Append(entries, callback) => {
                for entry in &entries {
                    self.push(entry);
                }
                self.unsynced = true;
                self.waiting.push(Waiting::Append(callback));
            }
            Op::Vote(vote, durable) => {
                self.vote = Some(vote);
                let bytes = codec::seal(Kind::Vote, &vote);
                self.insert(key::VOTE, &bytes);
                self.unsynced = true;
                self.waiting.push(Waiting::Vote(durable));
            }
            Op::Committed(committed) => {
                self.committed = committed;
                self.committed_dirty = true;
            }
            Op::Truncate(keep) => self.truncate(keep),
            Op::Purge(upto) => self.purge(upto),
        }
    }

    fn push(&mut self, entry: &Entry) {
        let mut out = Vec::new();
        self.builder.push(entry.log_id.index, entry, &mut |stored| out.push(stored));
        self.last = Some(entry.log_id);
        self.drained_bytes += super::view::size(entry);
        self.store(out);
    }

    fn finish_chunk(&mut self) {
        let mut out = Vec::new();
        self.builder.finish(&mut |stored| out.push(stored));
        self.store(out);
    }

    /// Records of one chunk; those of one entry go into one batch as far as it holds them.
    fn store(&mut self, records: Vec<chunk::Stored>) {
        if records.is_empty() {
            return;
        }
        if self.batch_keys + records.len() > INSERTS_MAX || self.batch_bytes > BATCH_BYTES_MAX {
            self.apply_some();
        }
        for (key, value) in records {
            assert!(value.len() <= chunk::RECORD_BYTES_MAX, "a chunk is larger than it may be");
            self.insert(&key, &value);
            if self.batch_keys >= INSERTS_MAX {
                self.apply_some();
            }
        }
    }

    fn insert(&mut self, key: &[u8], value: &[u8]) {
        self.batch.insert(key, value);
        self.batch_keys += 1;
        self.batch_bytes += value.len();
    }

    fn apply_batch(&mut self) {
        if self.batch_keys > 0 {
            let batch = std::mem::take(&mut self.batch);
            self.unsynced_bytes += self.batch_bytes;
            (self.batch_keys, self.batch_bytes) = (0, 0);
            or_die("writing the log failed", guarded(|| self.db.apply_batch(batch)));
        }
    }

    /// Applies, and syncs where it is due: see [`recover::SYNC_BYTES_MAX`].
    fn apply_some(&mut self) {
        self.apply_batch();
        if self.unsynced_bytes >= recover::SYNC_BYTES_MAX {
            self.flush();
        }
    }

    /// Everything taken so far, into sled; not durable yet.
    fn write(&mut self) {
        self.finish_chunk();
        self.apply_batch();
    }

    /// Makes durable what was taken, and tells who waits for it.
    fn commit(&mut self, closing: bool) {
        let dirty = self.unsynced || (closing && self.committed_dirty);
        if !dirty {
            return;
        }
        self.finish_chunk();
        if std::mem::take(&mut self.committed_dirty)
            && let Some(committed) = &self.committed
        {
            let bytes = codec::seal(Kind::Committed, committed);
            self.insert(key::COMMITTED, &bytes);
        }
        self.apply_batch();
        self.flush();
        let durable = Durable { last: self.last, hash: self.builder.hash(), vote: self.vote };
        self.mark(durable);
        self.unsynced = false;
        self.drained_bytes = 0;
        self.view.lock().durable(self.last.map_or(0, |last| last.index + 1), self.truncations);
        for waiting in self.waiting.drain(..) {
            match waiting {
                Waiting::Append(callback) => callback.io_completed(Ok(())),
                // Whoever saved the vote may have been cancelled.
                Waiting::Vote(durable) => drop(durable.send(())),
            }
        }
    }

    fn flush(&mut self) {
        or_die("flushing the log failed", guarded(|| self.db.flush()));
        or_die("syncing the log failed", self.sync.sync_data().map_err(|error| error.to_string()));
        self.unsynced_bytes = 0;
    }

    fn mark(&mut self, durable: Durable) {
        let set = self.marker.set(durable).map_err(|error| error.to_string());
        or_die("syncing the log's marker failed", set);
    }

    fn truncate(&mut self, keep: Option<LogId>) {
        self.truncations += 1;
        let base_next = self.base.map_or(0, |base| base.log_id.index + 1);
        let keep = keep.filter(|keep| keep.index >= base_next);
        let next = keep.map_or(base_next, |keep| keep.index + 1);
        if self.last.is_none_or(|last| last.index < next) {
            return;
        }
        self.write();
        let plan_to = next.checked_sub(1);
        let plan = or_die(
            "reading the log failed",
            guarded(|| recover::plan_truncation(&self.db, plan_to)).and_then(|plan| plan),
        );
        let (last, hash) = match (keep, plan.last) {
            (Some(keep), None) => fatal("truncating the log failed", &format!("no entry {keep}")),
            (Some(_), Some((last, hash))) => (Some(last), hash),
            (None, _) => {
                (self.base.map(|base| base.log_id), self.base.map_or(chunk::SEED, |base| base.hash))
            }
        };
        // Lowered first: a crash in between must not find a marker beyond the log.
        let marked = self.marker.durable();
        if marked.last.map(|last| last.index) > last.map(|last| last.index) {
            let lowered = Durable { last, hash, vote: marked.vote };
            self.mark(lowered);
        }
        or_die(
            "truncating the log failed",
            guarded(|| recover::run_truncation(&self.db, &plan, last, false, &self.sync)),
        );
        self.last = last;
        self.builder = Builder::new(hash);
        self.unsynced = true;
    }

    fn purge(&mut self, upto: LogId) {
        if self.base.is_some_and(|base| base.log_id.index >= upto.index) {
            return;
        }
        self.write();
        let found = or_die(
            "reading the log failed",
            guarded(|| recover::chunk_at(&self.db, upto.index)).and_then(|chunk| chunk),
        );
        let hash = found.and_then(|chunk| chunk.at(upto.index).cloned());
        let inside = self.last.is_some_and(|last| last.index > upto.index);
        let hash = match hash {
            Some((entry, hash)) if entry.log_id == upto || inside => hash,
            // The log begins after it: there is nothing to remove, and the chain begins where it did.
            None if inside && self.base.is_none() && self.begins_after(upto.index) => chunk::SEED,
            None if inside => fatal("purging the log failed", &format!("no entry {upto}")),
            // Beyond the log's end, after a snapshot was installed: the chain begins anew.
            _ => chunk::jump(&upto),
        };
        let base = Base { log_id: upto, hash };
        let bytes = codec::seal(Kind::LogBase, &base);
        self.insert(key::BASE, &bytes);
        self.base = Some(base);
        if !inside {
            self.last = Some(upto);
            self.builder = Builder::new(hash);
        }
        self.sweeping = true;
        self.unsynced = true;
    }

    fn begins_after(&self, index: u64) -> bool {
        let first = or_die("reading the log failed", guarded(|| recover::first_index(&self.db)));
        first.is_some_and(|first| first > index)
    }

    /// Removes some of the chunks that the base has left behind.
    fn sweep(&mut self) {
        let Some(base) = self.base.filter(|_| self.sweeping) else { return };
        let index = base.log_id.index;
        let sweep = || {
            // The chunk that holds the entry after the base stays; all before it go.
            let next = recover::chunk_at(&self.db, index + 1)?;
            let keep_from = match next {
                Ok(Some(chunk)) => chunk.first,
                Ok(None) => index + 1,
                Err(why) => return Ok(Err(why)),
            };
            let mut batch = sled::Batch::default();
            let mut removed = 0;
            let range = key::chunk(0, 0).to_vec()..key::chunk(keep_from, 0).to_vec();
            for key in self.db.range(range).keys().take(SWEEP_KEYS_MAX) {
                batch.remove(key?);
                removed += 1;
            }
            self.db.apply_batch(batch)?;
            Ok(Ok(removed))
        };
        let removed: usize =
            or_die("purging the log failed", guarded(sweep).and_then(|removed| removed));
        self.flush();
        self.sweeping = removed == SWEEP_KEYS_MAX;
    }
}
