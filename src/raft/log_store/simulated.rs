//! A log in memory, for simulations: what was not synced is lost in a crash.
//!
//! It stands where the writer's thread and sled stand otherwise, below everything that openraft sees
//! of the log. A [`Disk`] outlives the node that writes to it, as a disk does. What it was given and
//! has not synced is a queue; a crash keeps as much of its beginning as the seed says, for what
//! survives a crash of the real log is a prefix of what was submitted.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::view::View;
use super::writer::Op;
use super::{Entry, LogId, LogOptions, LogStore, Shared, Stall, Vote};
use crate::outside::seeded;
use crate::raft::identity::DataDir;

pub(super) type Queue = mpsc::UnboundedSender<Op>;

/// A disk with a log on it.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// What a crash leaves.
    synced: Image,
    /// What it may take.
    unsynced: VecDeque<Change>,
    /// What a sync takes longer than usual.
    slow: Duration,
    /// It says that it has synced what it has not.
    lies: bool,
}

#[derive(Debug, Default)]
struct Image {
    entries: BTreeMap<u64, Entry>,
    vote: Option<Vote>,
    committed: Option<LogId>,
    base: Option<LogId>,
}

#[derive(Debug)]
enum Change {
    Entry(Entry),
    Vote(Vote),
    Committed(Option<LogId>),
    Truncate(Option<LogId>),
    Purge(LogId),
}

impl Image {
    fn take(&mut self, change: Change) {
        match change {
            Change::Entry(entry) => drop(self.entries.insert(entry.log_id.index, entry)),
            Change::Vote(vote) => self.vote = Some(vote),
            Change::Committed(committed) => self.committed = committed,
            Change::Truncate(keep) => {
                drop(self.entries.split_off(&keep.map_or(0, |keep| keep.index + 1)));
            }
            Change::Purge(upto) => {
                if self.base.is_none_or(|base| base.index < upto.index) {
                    self.entries = self.entries.split_off(&(upto.index + 1));
                    self.base = Some(upto);
                }
            }
        }
    }
}

impl Disk {
    /// What was not synced is gone, but for a part of its beginning; how many changes were lost.
    pub(crate) fn crash(&self) -> usize {
        let mut inner = self.inner.lock();
        let unsynced = std::mem::take(&mut inner.unsynced);
        let all = unsynced.len();
        let kept = seeded::draw(|chance| rand::Rng::random_range(chance, 0..=all)).unwrap_or(0);
        for change in unsynced.into_iter().take(kept) {
            inner.synced.take(change);
        }
        all - kept
    }

    /// From here on a sync takes so much longer.
    pub(crate) fn slow(&self, by: Duration) {
        self.inner.lock().slow = by;
    }

    /// From here on it says that it has synced what it has not: what a test has to notice.
    pub(crate) fn lie(&self) {
        self.inner.lock().lies = true;
    }

    fn write(&self, change: Change) {
        self.inner.lock().unsynced.push_back(change);
    }

    fn sync(&self) {
        let inner = &mut *self.inner.lock();
        if inner.lies {
            return;
        }
        for change in inner.unsynced.drain(..) {
            inner.synced.take(change);
        }
    }

    fn sync_takes(&self) -> Duration {
        let slow = self.inner.lock().slow;
        // Mostly fast, now and then a hiccup.
        let ms = seeded::draw(|chance| match rand::Rng::random_range(chance, 0..100) {
            0..70 => 1,
            70..95 => 2,
            _ => rand::Rng::random_range(chance, 3..15),
        });
        Duration::from_millis(ms.unwrap_or(1)) + slow
    }
}

/// Writes to a disk what it is told, in order, and tells who waits once it is synced.
async fn write(mut ops: mpsc::UnboundedReceiver<Op>, disk: Arc<Disk>) {
    while let Some(first) = ops.recv().await {
        let mut told: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
        let mut next = Some(first);
        while let Some(op) = next {
            match op {
                Op::Append(entries, callback) => {
                    entries.into_iter().for_each(|entry| disk.write(Change::Entry(entry)));
                    told.push(Box::new(move || callback.io_completed(Ok(()))));
                }
                Op::Vote(vote, durable) => {
                    disk.write(Change::Vote(vote));
                    // Whoever saved the vote may have been cancelled.
                    told.push(Box::new(move || {
                        let _ = durable.send(());
                    }));
                }
                Op::Committed(committed) => disk.write(Change::Committed(committed)),
                Op::Truncate(keep) => disk.write(Change::Truncate(keep)),
                Op::Purge(upto) => disk.write(Change::Purge(upto)),
            }
            next = ops.try_recv().ok();
        }
        if !told.is_empty() {
            tokio::time::sleep(disk.sync_takes()).await;
            disk.sync();
        }
        told.into_iter().for_each(|tell| tell());
    }
}

impl LogStore {
    /// Opens the log of a simulated disk.
    pub(crate) fn simulated(dir: &DataDir, disk: Arc<Disk>) -> Self {
        let view = {
            let inner = disk.inner.lock();
            let Image { entries, vote, committed, base } = &inner.synced;
            let first = base.map_or(0, |base| base.index + 1);
            let mut view = View::new((*base, first, *base), (*vote, *committed), usize::MAX);
            let entries: Vec<Entry> = entries.values().cloned().collect();
            view.append(&entries).expect("a log without holes");
            view
        };
        let (queue, ops) = mpsc::unbounded_channel();
        // It ends with the queue, or with the runtime of the simulated process.
        tokio::spawn(write(ops, disk));
        let shared = Shared {
            stall: Stall::default(),
            view: Arc::new(Mutex::new(view)),
            queue: Mutex::new(Some(super::Queue::Simulated(queue))),
            writer: Mutex::new(None),
            db: None,
            options: LogOptions::default(),
            _dir: dir.clone(),
        };
        Self { shared: Arc::new(shared) }
    }
}
