//! The log as its readers see it: as of the last call, whatever the disk has of it.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;

use openraft::EntryPayload;

use super::{Entry, LogId, Vote};

/// The view. Its indices:
///
/// ```text
///   purged │ in sled only │ recent, in sled │ recent, not in sled │
///          └──────────────┴─────────────────┴─────────────────────┘
///                         recent_first      stored_next            last
/// ```
#[derive(Debug)]
pub(super) struct View {
    vote: Option<Vote>,
    committed: Option<LogId>,
    purged: Option<LogId>,
    /// Index of the first entry there is (openraft's own first one is 0 or 1).
    first: u64,
    last: Option<LogId>,
    /// Consecutive entries up to `last`.
    recent: VecDeque<Entry>,
    /// Index of the first of them, or of the next entry.
    recent_first: u64,
    recent_bytes: usize,
    recent_bytes_max: usize,
    /// Bytes of all entries that were ever in it, as far as that is known here.
    appended: u64,
    /// Entries below this can be read from sled.
    stored_next: u64,
    /// Raised by truncations and purges: what was read before may not fit what is read after.
    epoch: u64,
    /// Truncations so far; the keeper's news from before one says nothing about what came after.
    truncations: u64,
}

/// What a read found in the view, and what it has to look up in sled.
#[derive(Debug)]
pub(super) struct Read {
    /// Entries before those in `entries`.
    pub(super) in_sled: Range<u64>,
    pub(super) entries: Vec<Entry>,
    epoch: u64,
}

/// Roughly what an entry takes in memory and on the wire.
pub(super) fn size(entry: &Entry) -> usize {
    128 + match &entry.payload {
        EntryPayload::Normal(proposal) => proposal.0.len(),
        _ => 128,
    }
}

fn next_of(log_id: Option<LogId>) -> u64 {
    log_id.map_or(0, |log_id| log_id.index + 1)
}

impl View {
    /// `last` and all before it are in sled.
    pub(super) fn new(
        (purged, first, last): (Option<LogId>, u64, Option<LogId>),
        (vote, committed): (Option<Vote>, Option<LogId>),
        recent_bytes_max: usize,
    ) -> Self {
        Self {
            vote,
            committed,
            purged,
            first,
            last,
            recent: VecDeque::new(),
            recent_first: next_of(last),
            recent_bytes: 0,
            recent_bytes_max,
            appended: 0,
            stored_next: next_of(last),
            epoch: 0,
            truncations: 0,
        }
    }

    pub(super) fn vote(&self) -> Option<Vote> {
        self.vote
    }

    pub(super) fn committed(&self) -> Option<LogId> {
        self.committed
    }

    pub(super) fn purged(&self) -> Option<LogId> {
        self.purged
    }

    pub(super) fn last(&self) -> Option<LogId> {
        self.last
    }

    /// Bytes of all entries it ever took.
    pub(super) fn appended(&self) -> u64 {
        self.appended
    }

    /// Counts what was there before.
    pub(super) fn had(&mut self, bytes: u64) {
        self.appended += bytes;
    }

    pub(super) fn set_vote(&mut self, vote: Vote) {
        self.vote = Some(vote);
    }

    pub(super) fn set_committed(&mut self, committed: Option<LogId>) {
        self.committed = committed;
    }

    /// Takes entries that follow the last one.
    pub(super) fn append(&mut self, entries: &[Entry]) -> io::Result<()> {
        let Some(first) = entries.first() else { return Ok(()) };
        let expected = match self.last {
            Some(last) => last.index + 1,
            None => first.log_id.index,
        };
        if self.last.is_none() {
            self.first = expected;
            self.recent_first = expected;
            self.stored_next = expected;
        }
        for (expected, entry) in (expected..).zip(entries) {
            if entry.log_id.index != expected {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("entry {} cannot follow entry {:?}", entry.log_id, self.last),
                ));
            }
            self.recent_bytes += size(entry);
            self.appended += size(entry) as u64;
            self.recent.push_back(entry.clone());
            self.last = Some(entry.log_id);
        }
        Ok(())
    }

    pub(super) fn truncate(&mut self, keep: Option<LogId>) {
        let next = next_of(keep).max(next_of(self.purged));
        self.truncations += 1; // The keeper counts every one.
        if self.last.is_none_or(|last| last.index < next) {
            return;
        }
        while self.recent_first + self.recent.len() as u64 > next {
            let Some(entry) = self.recent.pop_back() else { break };
            self.recent_bytes -= size(&entry);
        }
        self.recent_first = self.recent_first.min(next);
        self.stored_next = self.stored_next.min(next);
        self.last = match keep {
            Some(keep) if next_of(self.purged) <= keep.index => Some(keep),
            _ => self.purged,
        };
        self.epoch += 1;
    }

    pub(super) fn purge(&mut self, upto: LogId) {
        if self.purged.is_some_and(|purged| purged.index >= upto.index) {
            return;
        }
        self.purged = Some(upto);
        self.first = upto.index + 1;
        while self.recent_first <= upto.index {
            let Some(entry) = self.recent.pop_front() else { break };
            self.recent_bytes -= size(&entry);
            self.recent_first += 1;
        }
        if self.last.is_none_or(|last| last.index <= upto.index) {
            self.last = Some(upto);
            self.recent_first = upto.index + 1;
            self.stored_next = self.stored_next.max(upto.index + 1);
        }
        self.epoch += 1;
    }

    /// The keeper's news: everything below `next` is in sled, as of `truncations`.
    pub(super) fn stored(&mut self, next: u64, truncations: u64) {
        if truncations != self.truncations {
            return;
        }
        self.stored_next = self.stored_next.max(next);
        while self.recent_bytes > self.recent_bytes_max && self.recent_first < self.stored_next {
            let Some(entry) = self.recent.pop_front() else { break };
            self.recent_bytes -= size(&entry);
            self.recent_first += 1;
        }
    }

    /// Reads `[start, end)`, as far as there is any.
    pub(super) fn read(&self, start: u64, end: u64, bytes_max: usize) -> Read {
        let start = start.max(self.first);
        let end = end.min(next_of(self.last));
        let mut read = Read { in_sled: 0..0, entries: Vec::new(), epoch: self.epoch };
        if start >= end {
            return read;
        }
        if start < self.recent_first {
            read.in_sled = start..end.min(self.recent_first);
        }
        let skip = start.saturating_sub(self.recent_first);
        let take = end.saturating_sub(self.recent_first.max(start));
        let (skip, take) = (skip as usize, take as usize);
        let mut bytes = 0;
        for entry in self.recent.iter().skip(skip).take(take) {
            if bytes > bytes_max && !read.entries.is_empty() {
                break;
            }
            bytes += size(entry);
            read.entries.push(entry.clone());
        }
        read
    }

    /// Whether nothing was truncated or purged since.
    pub(super) fn is_current(&self, read: &Read) -> bool {
        self.epoch == read.epoch
    }
}
