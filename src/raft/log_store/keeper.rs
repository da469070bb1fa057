//! The thread that owns sled.
//!
//! sled's concurrent flushes do not group, so one thread writes. Nobody waits for it but where the
//! tail is full of what it has not taken yet, and for what is done in sled alone: it gets what the
//! [`Writer`](super::writer::Writer) has acknowledged, turns it into chunks and batches, and, when
//! a generation of the tail is to be given up, flushes, syncs and raises the marker. What follows
//! an error is unknown, so every error ends the process (DESIGN 7).

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use parking_lot::Mutex;

use super::chunk::{self, Builder, key};
use super::recover::{self, Recovered};
use super::tail;
use super::view::View;
use super::{Base, LogId, Vote, guarded};
use crate::codec::{self, Kind};
use crate::raft::files::fatal;
use crate::raft::marker::{Durable, Marker, TailFrom};

/// Keys inserted in one batch (DESIGN 7: large batches cost memory and disk out of proportion).
const INSERTS_MAX: usize = 300;
/// Bytes of one batch.
const BATCH_BYTES_MAX: usize = 256 << 10;
/// Keys removed between two syncs while sweeping.
const SWEEP_KEYS_MAX: usize = 32;

/// A request to the keeper.
pub(super) enum Work {
    /// Entries that follow the last ones, as a body of the tail's; and the log's end behind them.
    Entries { body: Vec<u8>, after: Durable, committed: Option<LogId> },
    /// What is known to be committed; written with what comes next.
    Committed(Option<LogId>),
    /// Entries behind this one go.
    Truncate(Option<LogId>),
    /// Nothing had to be truncated.
    Truncated,
    /// Entries up to this one go.
    Purge(LogId),
    /// Everything before this generation of the tail is to be durable.
    Fold(u64),
    /// Everything is to be durable; the answer says where the log ends.
    Sync(Sender<Durable>),
}

pub(super) struct Keeper {
    db: sled::Db,
    /// A second handle of sled's file: its flush does not reach the disk's own cache (DESIGN 7).
    sync: File,
    marker: Marker,
    tail: TailFrom,
    view: Option<Arc<Mutex<View>>>,
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
    /// Entries below this are in the batch or in sled, whole.
    batched_next: u64,
    /// Bytes handed to sled since the last sync.
    unsynced_bytes: usize,
    /// Chunks' records inserted since the last fold.
    inserted: usize,
    /// Whether sled or the marker may be behind what was taken.
    dirty: bool,
    truncations: u64,
    /// Chunks that end at or below the base wait to be removed.
    sweeping: bool,
}

/// Every failure of the disk ends here.
pub(super) fn or_die<T>(what: &str, result: Result<T, String>) -> T {
    result.unwrap_or_else(|why| fatal(what, &why))
}

impl Keeper {
    /// Goes on where sled ends; what the tail has beyond it is to be given to [`Keeper::take`].
    pub(super) fn new(recovered: Recovered, tail: TailFrom) -> Self {
        let Recovered { base, last, hash, vote, committed, marker, db, sync, .. } = recovered;
        Self {
            db,
            sync,
            marker,
            tail,
            view: None,
            base,
            last,
            vote,
            committed,
            committed_dirty: false,
            builder: Builder::new(hash),
            batch: sled::Batch::default(),
            batch_keys: 0,
            batch_bytes: 0,
            batched_next: last.map_or(0, |last| last.index + 1),
            unsynced_bytes: 0,
            inserted: 0,
            dirty: false,
            truncations: 0,
            sweeping: base.is_some(),
        }
    }

    /// From here on it tells the view what sled has.
    pub(super) fn show(&mut self, view: Arc<Mutex<View>>) {
        self.view = Some(view);
    }

    /// Serves until the sender is gone; `folded` hears of each generation the marker has reached.
    pub(super) fn run(mut self, work: &Receiver<Work>, folded: &Sender<u64>) {
        // A panic in here (sled's, or ours) leaves requests unanswered for ever.
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            while let Some(work) = self.next(work) {
                match work {
                    Work::Entries { body, after, committed } => {
                        self.take(&body, &after, committed);
                    }
                    Work::Committed(committed) => self.set_committed(committed),
                    Work::Truncate(keep) => self.truncate(keep),
                    Work::Truncated => self.truncations += 1,
                    Work::Purge(upto) => self.purge(upto),
                    Work::Fold(generation) => {
                        self.fold(generation);
                        // Nobody hears it where the log is being closed.
                        let _ = folded.send(generation);
                        // Under load the sweep gets its share too, or purging would never reclaim.
                        let inserted = std::mem::take(&mut self.inserted);
                        let mut removed = 0;
                        while self.sweeping && removed <= inserted {
                            removed += self.sweep();
                        }
                    }
                    Work::Sync(done) => {
                        self.commit();
                        let _ = done.send(self.end());
                    }
                }
            }
            self.dirty |= self.committed_dirty;
            self.commit();
        }));
        if ended.is_err() {
            fatal("the log's thread panicked", &"see above");
        }
    }

    fn next(&mut self, work: &Receiver<Work>) -> Option<Work> {
        while self.sweeping {
            match work.recv_timeout(Duration::from_millis(1)) {
                Ok(work) => return Some(work),
                Err(RecvTimeoutError::Timeout) => drop(self.sweep()),
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        work.recv().ok()
    }

    /// Where the log ends.
    fn end(&self) -> Durable {
        Durable { last: self.last, hash: self.builder.hash(), vote: self.vote }
    }

    fn set_committed(&mut self, committed: Option<LogId>) {
        self.committed_dirty |= committed != self.committed;
        self.committed = committed;
    }

    /// Takes the entries that follow, and the vote.
    pub(super) fn take(&mut self, body: &[u8], after: &Durable, committed: Option<LogId>) {
        self.dirty = true;
        for entry in tail::entries(body) {
            let entry = or_die("taking up the log's tail failed", entry);
            let log_id = or_die("taking up the log's tail failed", chunk::log_id(entry));
            let mut out = Vec::new();
            self.builder.push(log_id.index, entry, &mut |stored| out.push(stored));
            self.last = Some(log_id);
            self.store(out);
        }
        if after.vote != self.vote
            && let Some(vote) = after.vote
        {
            self.vote = Some(vote);
            let bytes = codec::seal(Kind::Vote, &vote);
            self.insert(key::VOTE, &bytes);
        }
        self.set_committed(committed);
        if self.end() != *after {
            let why = format!("it is at {:?}, what it was given at {after:?}", self.end());
            fatal("the log and its tail have parted", &why);
        }
    }

    /// Makes durable what was taken, and gives the tail up to `generation` free.
    pub(super) fn fold(&mut self, generation: u64) {
        self.tail.generation = generation;
        self.dirty = true;
        self.commit();
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
        self.batched_next = self.builder.pending().unwrap_or_else(|| self.next_index());
    }

    fn next_index(&self) -> u64 {
        self.last.map_or(0, |last| last.index + 1)
    }

    fn insert(&mut self, key: &[u8], value: &[u8]) {
        self.batch.insert(key, value);
        self.batch_keys += 1;
        self.inserted += 1;
        self.batch_bytes += value.len();
    }

    fn apply_batch(&mut self) {
        if self.batch_keys > 0 {
            let batch = std::mem::take(&mut self.batch);
            self.unsynced_bytes += self.batch_bytes;
            (self.batch_keys, self.batch_bytes) = (0, 0);
            or_die("writing the log failed", guarded(|| self.db.apply_batch(batch)));
            if let Some(view) = &self.view {
                view.lock().stored(self.batched_next, self.truncations);
            }
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

    /// Makes durable what was taken.
    fn commit(&mut self) {
        if !std::mem::take(&mut self.dirty) {
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
        self.mark(self.end());
    }

    fn flush(&mut self) {
        or_die("flushing the log failed", guarded(|| self.db.flush()));
        or_die("syncing the log failed", self.sync.sync_data().map_err(|error| error.to_string()));
        self.unsynced_bytes = 0;
    }

    fn mark(&mut self, durable: Durable) {
        let set = self.marker.set(durable, Some(self.tail)).map_err(|error| error.to_string());
        or_die("syncing the log's marker failed", set);
    }

    fn truncate(&mut self, keep: Option<LogId>) {
        self.cut_behind(keep);
        // Only now: what is said of sled before it is of the entries before it.
        self.truncations += 1;
    }

    fn cut_behind(&mut self, keep: Option<LogId>) {
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
        self.batched_next = self.next_index();
        self.dirty = true;
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
        // Before the first removal: a hole that no base explains is damage.
        self.apply_batch();
        self.base = Some(base);
        if !inside {
            self.last = Some(upto);
            self.builder = Builder::new(hash);
            self.batched_next = self.next_index();
        }
        self.sweeping = true;
        self.dirty = true;
    }

    fn begins_after(&self, index: u64) -> bool {
        let first = or_die("reading the log failed", guarded(|| recover::first_index(&self.db)));
        first.is_some_and(|first| first > index)
    }

    /// Removes some of the chunks that the base has left behind; how many.
    fn sweep(&mut self) -> usize {
        let Some(base) = self.base.filter(|_| self.sweeping) else { return 0 };
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
        removed
    }
}
