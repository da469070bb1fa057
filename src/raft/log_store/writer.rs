//! The thread that acknowledges.
//!
//! It takes everything that is queued, writes it to the tail as one record, syncs, and only then
//! calls back, in order; behind that it hands the same to the [`Keeper`](super::keeper::Keeper). It
//! waits for that one only where the tail's other half is not free yet, and for what cannot go
//! through the tail. What follows an error is unknown, so every error ends the process (DESIGN 7).

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use openraft::storage::IOFlushed;
use tokio::sync::oneshot;

use super::chunk;
use super::keeper::{Work, or_die};
use super::tail::{Begin, Tail};
use super::{Entry, LogId, Stall, TypeConfig, Vote};
use crate::raft::files::fatal;
use crate::raft::identity::DataDir;
use crate::raft::marker::Durable;

/// Requests that one sync may serve.
const DRAIN_OPS_MAX: usize = 4096;
/// Bytes of entries that one sync may serve.
const DRAIN_BYTES_MAX: usize = 512 << 10;

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

/// The keeper's end of the line.
pub(super) struct KeeperLink {
    pub(super) work: Sender<Work>,
    /// The generations that the marker has reached.
    pub(super) folded: Receiver<u64>,
    pub(super) thread: JoinHandle<()>,
}

pub(super) struct Writer {
    tail: Tail,
    keeper: KeeperLink,
    /// The newest generation that the marker has reached.
    marked: u64,
    /// Where the log starts.
    base: Option<LogId>,
    /// The log's end as of the last record.
    before: Durable,
    /// With what was taken since.
    after: Durable,
    committed: Option<LogId>,
    /// Entries taken since the last record, as its body will hold them.
    body: Vec<u8>,
    count: u32,
    waiting: Vec<Waiting>,
    /// Something was taken that has to be durable.
    unsynced: bool,
    stall: Stall,
    _dir: DataDir,
}

impl Writer {
    /// `tail` has begun no generation yet, and the marker is at the one before.
    pub(super) fn new(
        tail: Tail,
        keeper: KeeperLink,
        (base, end, committed): (Option<LogId>, Durable, Option<LogId>),
        dir: DataDir,
        stall: Stall,
    ) -> Self {
        let mut writer = Self {
            marked: tail.generation(),
            tail,
            keeper,
            base,
            before: end.clone(),
            after: end,
            committed,
            body: Vec::new(),
            count: 0,
            waiting: Vec::new(),
            unsynced: false,
            stall,
            _dir: dir,
        };
        writer.begin(Begin::Fresh);
        // The first generation of all counts only once the marker names it.
        writer.wait_until_marked();
        writer
    }

    /// Serves until every sender is gone.
    pub(super) fn run(mut self, ops: &Receiver<Op>) {
        // A panic in here leaves requests unanswered for ever.
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            while let Ok(op) = ops.recv() {
                self.take(op);
                for _ in 1..DRAIN_OPS_MAX {
                    if self.body.len() > DRAIN_BYTES_MAX {
                        break;
                    }
                    match ops.try_recv() {
                        Ok(op) => self.take(op),
                        Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
                    }
                }
                self.commit();
            }
            self.commit();
            self.send(Work::Committed(self.committed));
        }));
        if ended.is_err() {
            fatal("the log's thread panicked", &"see above");
        }
        drop(self.keeper.work);
        // A panic of the keeper has ended the process already.
        let _ = self.keeper.thread.join();
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
                self.after.vote = Some(vote);
                self.unsynced = true;
                self.waiting.push(Waiting::Vote(durable));
            }
            Op::Committed(committed) => self.committed = committed,
            Op::Truncate(keep) => {
                self.commit();
                let next = [keep, self.base].iter().flatten().map(|id| id.index + 1).max();
                if self.after.last.is_some_and(|last| last.index >= next.unwrap_or(0)) {
                    self.directly(Work::Truncate(keep));
                } else {
                    self.send(Work::Truncated);
                }
            }
            Op::Purge(upto) => self.purge(upto),
        }
    }

    fn push(&mut self, entry: &Entry) {
        let encoded = chunk::encode(entry);
        self.body.extend_from_slice(&(encoded.len() as u32).to_le_bytes());
        self.body.extend_from_slice(&encoded);
        self.count += 1;
        self.after.last = Some(entry.log_id);
        self.after.hash = chunk::chain(self.after.hash, &encoded);
    }

    fn purge(&mut self, upto: LogId) {
        if self.base.is_some_and(|base| base.index >= upto.index) {
            return;
        }
        self.commit();
        self.base = Some(upto);
        if self.after.last.is_some_and(|last| last.index > upto.index) {
            // It removes what nobody reads again; that it is done later than it is told harms nobody.
            self.send(Work::Purge(upto));
        } else {
            self.directly(Work::Purge(upto));
        }
    }

    /// Makes durable what was taken, and tells who waits for it.
    fn commit(&mut self) {
        if !std::mem::take(&mut self.unsynced) {
            return;
        }
        self.stall.begin();
        let (body, count) = (std::mem::take(&mut self.body), std::mem::take(&mut self.count));
        let (after, committed) = (self.after.clone(), self.committed);
        if self.tail.fits_at_all(body.len()) {
            let fold = (!self.tail.fits(body.len())).then(|| self.next_generation());
            self.record(Begin::Continues, (count, &body));
            if let Some(generation) = fold {
                self.send(Work::Fold(generation));
            }
            self.send(Work::Entries { body, after, committed });
        } else {
            self.directly(Work::Entries { body, after, committed });
        }
        self.stall.end();
        for waiting in self.waiting.drain(..) {
            match waiting {
                Waiting::Append(callback) => callback.io_completed(Ok(())),
                // Whoever saved the vote may have been cancelled.
                Waiting::Vote(durable) => drop(durable.send(())),
            }
        }
    }

    fn send(&self, work: Work) {
        if self.keeper.work.send(work).is_err() {
            fatal("the log's second thread is gone", &"see above");
        }
    }

    /// Begins the next generation as soon as its half is free.
    fn next_generation(&mut self) -> u64 {
        self.wait_until_marked();
        self.tail.begin()
    }

    /// Waits until the marker has reached the current generation.
    fn wait_until_marked(&mut self) {
        while self.marked < self.tail.generation() {
            match self.keeper.folded.recv() {
                Ok(generation) => self.marked = generation,
                Err(_) => fatal("the log's second thread is gone", &"see above"),
            }
        }
    }

    fn record(&mut self, begin: Begin, entries: (u32, &[u8])) {
        let (before, after) = (self.before.clone(), self.after.clone());
        let written = self.tail.write(begin, before, after, self.committed, entries);
        or_die("syncing the log failed", written.map_err(|error| error.to_string()));
        self.before = self.after.clone();
    }

    /// A generation that does not need the one before; everything has to be in sled, synced.
    fn begin(&mut self, begin: Begin) {
        let generation = self.next_generation();
        self.record(begin, (0, &[]));
        self.send(Work::Fold(generation));
    }

    fn synced(&self) -> Durable {
        let (done, synced) = channel();
        self.send(Work::Sync(done));
        match synced.recv() {
            Ok(end) => end,
            Err(_) => fatal("the log's second thread is gone", &"see above"),
        }
    }

    /// What cannot go through the tail is done in sled alone, and waited for.
    fn directly(&mut self, work: Work) {
        let vote = self.after.vote;
        let after = std::mem::replace(&mut self.after, self.before.clone());
        self.synced();
        self.begin(Begin::Direct);
        self.after = after;
        self.send(work);
        let end = self.synced();
        if end.vote != vote {
            fatal("the log and its tail have parted", &format!("votes {:?}, {vote:?}", end.vote));
        }
        self.after = end.clone();
        self.before = end;
        self.begin(Begin::Fresh);
    }
}
