//! The log on disk: entries and vote, fsynced before they are acknowledged.
//!
//! Problem: a commit waits for an fsync, so everything that can be is shared by one: appends of
//! many proposals, votes, purges. And a leader should not wait for its own disk before its
//! followers hear of an entry. Idea: two halves.
//!
//! ```text
//!   openraft ──► View (memory) ──► readers: entries are there when `append` returns
//!                  │ same order
//!                  ▼
//!               Writer (a thread): drain the queue → a record of the tail, twice → sync_data
//!                  │                → callbacks, in order
//!                  ▼ behind that
//!               Keeper (a thread): chunks → batches → sled → now and then flush, sync_data, marker
//! ```
//!
//! Invariants:
//! - What is handed to the view and what is queued have the same order: both happen under the
//!   view's lock.
//! - Entries that are not in sled are in the view; older ones may be there, and are in sled.
//! - A callback, and the return of `save_vote`, come after the sync that covers them (SPEC M4).
//! - What survives a crash is a prefix of what was submitted (DESIGN 6), and nothing shorter than
//!   what was acknowledged is ever used: see [`super::marker`] and [`tail`].

mod chunk;
#[cfg(test)]
mod crash;
mod keeper;
mod recover;
mod replay;
#[cfg(feature = "test-util")]
pub(crate) mod simulated;
mod tail;
#[cfg(test)]
mod tail_tests;
#[cfg(test)]
mod tests;
mod view;
mod writer;

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

pub(crate) use recover::{SYNC_BYTES_MAX, guarded, open_sled};

use super::files::{OpenError, fatal};
use super::identity::DataDir;
use super::marker::{Durable, TailFrom};
use super::types::{Entry, LogId, TypeConfig, Vote};
use keeper::Keeper;
use recover::Recovered;
use tail::Tail;
use view::View;
use writer::{KeeperLink, Op, Writer};

/// Where the log starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Base {
    /// The last entry that is gone.
    log_id: LogId,
    /// The chain there.
    hash: u64,
}

/// Settings of a log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogOptions {
    /// Memory for recent entries.
    pub(crate) recent_bytes_max: usize,
    /// sled's cache.
    pub(crate) cache_bytes: u64,
    /// The most one answer to a replication stream holds.
    pub(crate) read_bytes_max: usize,
    /// Each of the tail's halves, of which there are two, twice. What a directory was begun with
    /// stays.
    pub(crate) tail_half_bytes: usize,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self {
            recent_bytes_max: 8 << 20,
            cache_bytes: 8 << 20,
            read_bytes_max: 1 << 20,
            tail_half_bytes: 2 << 20,
        }
    }
}

/// The log. Clones share it; the last one closes it.
#[derive(Clone, Debug)]
pub(crate) struct LogStore {
    shared: Arc<Shared>,
}

/// Syncs whose length is remembered.
const SYNCS_MAX: usize = 16;

/// When the writer began to write what it is writing, and how long that took lately; for whoever
/// watches the disk. Plain mutexes: held for a copy.
#[derive(Clone, Debug, Default)]
struct Stall(Arc<Mutex<Syncs>>);

#[derive(Debug, Default)]
struct Syncs {
    began: Option<Instant>,
    took: VecDeque<Duration>,
}

impl Stall {
    fn begin(&self) {
        self.0.lock().began = Some(Instant::now());
    }

    fn end(&self) {
        let mut syncs = self.0.lock();
        if let Some(began) = syncs.began.take() {
            syncs.took.push_back(began.elapsed());
            if syncs.took.len() > SYNCS_MAX {
                syncs.took.pop_front();
            }
        }
    }

    /// The median, once there are enough to tell a slow disk from a slow moment.
    fn typical(&self) -> Option<Duration> {
        let mut took: Vec<Duration> = self.0.lock().took.iter().copied().collect();
        took.sort_unstable();
        (took.len() >= SYNCS_MAX / 2).then(|| took[took.len() / 2])
    }
}

#[derive(Debug)]
struct Shared {
    stall: Stall,
    view: Arc<Mutex<View>>,
    /// Set to `None` to close.
    queue: Mutex<Option<Queue>>,
    writer: Mutex<Option<JoinHandle<()>>>,
    /// `None` where everything is in the view.
    db: Option<sled::Db>,
    options: LogOptions,
    /// Keeps the directory's lock for as long as something can be read.
    _dir: DataDir,
}

/// The way to whoever makes things durable.
#[derive(Debug)]
enum Queue {
    Writer(mpsc::Sender<Op>),
    #[cfg(feature = "test-util")]
    Simulated(simulated::Queue),
}

impl Queue {
    /// `false` where nobody is there any more.
    fn send(&self, op: Op) -> bool {
        match self {
            Self::Writer(writer) => writer.send(op).is_ok(),
            #[cfg(feature = "test-util")]
            Self::Simulated(writer) => writer.send(op).is_ok(),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.queue.lock().take();
        if let Some(writer) = self.writer.lock().take() {
            // A panic of the writer has ended the process already.
            let _ = writer.join();
        }
    }
}

impl LogStore {
    /// Opens the log of a stamped data directory and checks all of it. Blocking.
    pub(crate) fn open(dir: &DataDir, options: LogOptions) -> Result<Self, OpenError> {
        if let Some(why) = dir.quarantined()? {
            return Err(OpenError::Quarantined { dir: dir.root().to_owned(), why });
        }
        let recovered = recover::recover(dir.root(), options.cache_bytes)?;
        let db = recovered.db.clone();
        let stall = Stall::default();
        let Opened { view, writer } = Opened::new(recovered, dir, &options, stall.clone())?;
        let (queue, ops) = mpsc::channel();
        let writer = std::thread::Builder::new()
            .name("botmesh-log".to_owned())
            .spawn(move || writer.run(&ops))
            .map_err(OpenError::io(dir.root(), "starting the log's thread"))?;
        let shared = Shared {
            stall,
            view,
            queue: Mutex::new(Some(Queue::Writer(queue))),
            writer: Mutex::new(Some(writer)),
            db: Some(db),
            options,
            _dir: dir.clone(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Writes what is queued and closes the log; later calls fail.
    pub(crate) async fn close(&self) {
        self.shared.queue.lock().take();
        let writer = self.shared.writer.lock().take();
        if let Some(writer) = writer {
            let joined = tokio::task::spawn_blocking(move || writer.join()).await;
            if !matches!(joined, Ok(Ok(()))) {
                tracing::error!("the log's thread did not end by itself");
            }
        }
    }

    /// For how long the disk has not answered the write that is under way.
    pub(crate) fn stalled_for(&self) -> Option<Duration> {
        self.shared.stall.0.lock().began.map(|began| began.elapsed())
    }

    /// How long the disk takes to make a record durable, as a rule; `None` where there were few.
    pub(crate) fn sync_takes(&self) -> Option<Duration> {
        self.shared.stall.typical()
    }

    /// Its last entry, and the bytes of all it ever took, as far as that is known since it was opened.
    pub(crate) fn appended(&self) -> (u64, u64) {
        let view = self.shared.view.lock();
        (view.last().map_or(0, |last| last.index), view.appended())
    }

    /// The last entry that was purged.
    pub(crate) fn last_purged(&self) -> Option<LogId> {
        self.shared.view.lock().purged()
    }

    /// The vote and the last entry, durable or about to be.
    pub(crate) fn is_pristine(&self) -> bool {
        let view = self.shared.view.lock();
        view.vote().is_none() && view.last().is_none()
    }

    /// Changes the view and queues what it takes, in one step.
    fn submit<T>(&self, change: impl FnOnce(&mut View) -> io::Result<(Op, T)>) -> io::Result<T> {
        let mut view = self.shared.view.lock();
        let closed = || io::Error::new(io::ErrorKind::BrokenPipe, "the log is closed");
        let queue = self.shared.queue.lock();
        let queue = queue.as_ref().ok_or_else(closed)?;
        let (op, value) = change(&mut view)?;
        queue.send(op).then_some(value).ok_or_else(closed)
    }

    /// Entries of `[start, end)`; at least one where there is one, and then no more than some
    /// `bytes_max`.
    async fn read(&self, start: u64, end: u64, bytes_max: usize) -> io::Result<Vec<Entry>> {
        loop {
            let read = self.shared.view.lock().read(start, end, bytes_max);
            if read.in_sled.is_empty() {
                return Ok(read.entries);
            }
            let Some(db) = self.shared.db.clone() else { return Ok(read.entries) };
            let range = read.in_sled.clone();
            let older = tokio::task::spawn_blocking(move || read_sled(&db, range, bytes_max))
                .await
                .map_err(io::Error::other)?;
            if !self.shared.view.lock().is_current(&read) {
                continue; // Truncated or purged meanwhile: what was read may be of both times.
            }
            // The log was whole when it was opened; a read that fails now is a disk that fails.
            let mut entries = older.unwrap_or_else(|why| fatal("reading the log failed", &why));
            if entries.last().is_some_and(|last| last.log_id.index + 1 == read.in_sled.end) {
                entries.extend(read.entries);
            }
            return Ok(entries);
        }
    }
}

/// A log whose threads are ready.
struct Opened {
    view: Arc<Mutex<View>>,
    writer: Writer,
}

impl Opened {
    /// Gives sled what only the tail had, and begins a generation of the tail of its own.
    fn new(
        mut recovered: Recovered,
        dir: &DataDir,
        options: &LogOptions,
        stall: Stall,
    ) -> Result<Self, OpenError> {
        let replay = std::mem::take(&mut recovered.replay);
        let base = recovered.base.map(|base| base.log_id);
        let (first, committed) = (recovered.first, recovered.committed.max(replay.committed));
        let Recovered { last, hash, vote, bytes, .. } = recovered;
        let mut end = Durable { last, hash, vote };
        let half_bytes = match recovered.marker.tail() {
            Some(from) => from.half_bytes as usize,
            None => {
                tail::unused(dir.root(), options.tail_half_bytes)?;
                Tail::create(dir.root(), options.tail_half_bytes)?;
                options.tail_half_bytes
            }
        };
        let has_tail = recovered.marker.tail().is_some();
        let from = TailFrom { generation: replay.newest, half_bytes: half_bytes as u64 };
        let mut keeper = Keeper::new(recovered, from);
        for (body, after) in replay.bodies {
            keeper.take(&body, &after, committed);
            end = after;
        }
        if has_tail {
            keeper.fold(replay.newest);
        }
        let mut view =
            View::new((base, first, end.last), (end.vote, committed), options.recent_bytes_max);
        view.had(bytes);
        let view = Arc::new(Mutex::new(view));
        keeper.show(view.clone());

        let (work, requests) = mpsc::channel();
        let (told, folded) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("botmesh-sled".to_owned())
            .spawn(move || keeper.run(&requests, &told))
            .map_err(OpenError::io(dir.root(), "starting the log's second thread"))?;
        let keeper = KeeperLink { work, folded, thread };
        let tail = Tail::open(dir.root(), half_bytes, replay.newest)?;
        let writer = Writer::new(tail, keeper, (base, end, committed), dir.clone(), stall);
        Ok(Self { view, writer })
    }
}

/// Reads entries from sled, whole chunks until there are some `bytes_max`.
fn read_sled(
    db: &sled::Db,
    range: std::ops::Range<u64>,
    bytes_max: usize,
) -> Result<Vec<Entry>, String> {
    let mut entries = Vec::new();
    let (mut next, mut bytes) = (range.start, 0);
    while next < range.end && (bytes < bytes_max || entries.is_empty()) {
        let chunk = guarded(|| recover::chunk_at(db, next)).and_then(|found| found)?;
        let chunk = chunk.ok_or_else(|| format!("entry {next} is missing"))?;
        let last = chunk.last();
        for (entry, _) in chunk.entries {
            if (next..range.end).contains(&entry.log_id.index) {
                bytes += view::size(&entry);
                entries.push(entry);
            }
        }
        next = last + 1;
    }
    Ok(entries)
}

fn bounds(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&end) => end.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => u64::MAX,
    };
    (start, end)
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<RB>(&mut self, range: RB) -> io::Result<Vec<Entry>>
    where
        RB: RangeBounds<u64> + Clone + Debug + Send,
    {
        let (start, end) = bounds(&range);
        self.read(start, end, usize::MAX).await
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        self.read(start, end, self.shared.options.read_bytes_max).await
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        Ok(self.shared.view.lock().vote())
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<TypeConfig>> {
        let view = self.shared.view.lock();
        Ok(LogState { last_purged_log_id: view.purged(), last_log_id: view.last() })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        let (durable, saved) = oneshot::channel();
        self.submit(|view| {
            view.set_vote(*vote);
            Ok((Op::Vote(*vote, durable), ()))
        })?;
        saved.await.map_err(|_| io::Error::other("the log closed before the vote was durable"))
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> io::Result<()> {
        self.submit(|view| {
            view.set_committed(committed);
            Ok((Op::Committed(committed), ()))
        })
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogId>> {
        Ok(self.shared.view.lock().committed())
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig>) -> io::Result<()>
    where
        I: IntoIterator<Item = Entry> + Send,
        I::IntoIter: Send,
    {
        let entries: Vec<Entry> = entries.into_iter().collect();
        self.submit(|view| {
            view.append(&entries)?;
            Ok((Op::Append(entries, callback), ()))
        })
    }

    async fn truncate_after(&mut self, keep: Option<LogId>) -> io::Result<()> {
        self.submit(|view| {
            view.truncate(keep);
            Ok((Op::Truncate(keep), ()))
        })
    }

    async fn purge(&mut self, upto: LogId) -> io::Result<()> {
        self.submit(|view| {
            view.purge(upto);
            Ok((Op::Purge(upto), ()))
        })
    }
}

/// A log id for tests.
#[cfg(test)]
pub(crate) fn test_log_id(term: u64, index: u64) -> LogId {
    use openraft::vote::RaftLeaderId;
    type Leader = openraft::impls::leader_id_std::LeaderId<u64, u64>;
    LogId { leader_id: Leader::new(term, 0).to_committed(), index }
}

/// The stored form of a log's base, for the test that holds it still.
#[cfg(test)]
pub(crate) fn test_base(log_id: LogId, hash: u64) -> Vec<u8> {
    crate::codec::seal(crate::codec::Kind::LogBase, &Base { log_id, hash })
}
