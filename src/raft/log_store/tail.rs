//! The tail: what was acknowledged last, kept twice until sled has it.
//!
//! Problem: a commit waits for the disk, and sled makes it wait four times: two writes that it waits
//! for, the sync of a file that grows, and the sync of the marker that shows whether sled has lost
//! its end. Idea: a small file whose pages are all written beforehand. What is to be acknowledged
//! goes there as one *record*, synced once; sled gets the same entries later, in large chunks, from
//! a thread nobody waits for. The file holds two halves in turn, and everything twice:
//!
//! ```text
//!   ┌────────────┬────────────┬────────────┬────────────┐
//!   │ even half  │ odd half   │ even, copy │ odd, copy  │   a record begins on a page of its own
//!   └────────────┴────────────┴────────────┴────────────┘
//!   generation g fills half g mod 2; when it is full, g + 1 begins in the other
//! ```
//!
//! A record of which neither copy is readable had not been synced, so it was not acknowledged: a
//! single damage, wherever it is, is repaired from the other copy.
//!
//! Invariants:
//! - The marker names a generation `G`: what came before it is in sled, synced. Record 0 of `G` is
//!   in the tail, synced before the marker said so.
//! - Generation `n` begins only when the marker's is at least `n - 1`: the half it takes over is no
//!   longer needed. Nothing is acknowledged in generation 1 before the marker names it: until then
//!   the directory is one without a tail.
//! - Records follow one another without a gap: each states the log's end before and after it.
//! - A [`Begin::Fresh`] generation needs nothing before it. After a [`Begin::Direct`] one sled alone
//!   counts: what cannot go through the tail (a truncation, a jump, an entry larger than a half) is
//!   done in sled between one and the next fresh one, and acknowledged after that.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::LogId;
use crate::codec::{self, Kind};
use crate::raft::files::{self, OpenError};
use crate::raft::marker::Durable;

/// Records begin on such a boundary, so that no write touches a page of an earlier record.
pub(super) const PAGE: usize = 4096;

/// What a generation's first record says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Begin {
    /// It goes on where the one before ends.
    Continues,
    /// Everything before it is in sled, synced.
    Fresh,
    /// So it is, and sled may be changed without the tail until the next generation.
    Direct,
}

/// What a record says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Head {
    pub(super) generation: u64,
    /// Of the opening of the log that wrote it: content that looks like a record is none.
    pub(super) nonce: u64,
    /// Of the record in its generation, from 0.
    pub(super) sequence: u64,
    pub(super) begin: Begin,
    /// The log's end before it.
    pub(super) before: Durable,
    /// And after it.
    pub(super) after: Durable,
    pub(super) committed: Option<LogId>,
    /// Entries in its body.
    pub(super) count: u32,
}

/// A record: consecutive entries, each as length u32 and encoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) head: Head,
    pub(super) body: Vec<u8>,
}

/// The encoded entries of a record's body.
pub(super) fn entries(mut body: &[u8]) -> impl Iterator<Item = Result<&[u8], String>> {
    std::iter::from_fn(move || {
        if body.is_empty() {
            return None;
        }
        let split = body
            .split_first_chunk::<4>()
            .and_then(|(len, rest)| rest.split_at_checked(u32::from_le_bytes(*len) as usize));
        Some(match split {
            Some((entry, rest)) => {
                body = rest;
                Ok(entry)
            }
            None => {
                body = &[];
                Err("a record of log.tail is cut off inside".to_owned())
            }
        })
    })
}

fn padded(bytes: usize) -> usize {
    bytes.div_ceil(PAGE) * PAGE
}

fn path(root: &Path) -> PathBuf {
    root.join("log.tail")
}

/// The open tail. One thread writes it.
#[derive(Debug)]
pub(super) struct Tail {
    file: File,
    half_bytes: usize,
    nonce: u64,
    generation: u64,
    sequence: u64,
    /// Where the next record goes, in the half.
    at: usize,
    buffer: Vec<u8>,
}

impl Tail {
    /// Creates it, every page written: its syncs never have to change what the file system says
    /// about it.
    pub(super) fn create(root: &Path, half_bytes: usize) -> Result<(), OpenError> {
        let path = path(root);
        let bytes = vec![0; 4 * half_bytes];
        files::replace(&path, &bytes).map_err(OpenError::io(&path, "creating the log's tail"))
    }

    /// Opens it for the generation after `generation`, which [`Tail::begin`] begins.
    pub(super) fn open(root: &Path, half_bytes: usize, generation: u64) -> Result<Self, OpenError> {
        let path = path(root);
        let file = File::options()
            .write(true)
            .open(&path)
            .map_err(OpenError::io(&path, "opening the log's tail"))?;
        let nonce = rand::random();
        let (sequence, at) = (0, half_bytes);
        Ok(Self { file, half_bytes, nonce, generation, sequence, at, buffer: Vec::new() })
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Encodes the next record of the current generation, or of the one after it.
    fn encode(&mut self, head: &Head, body: &[u8]) {
        let sealed = {
            let mut bytes = codec::begin(Kind::LogTail, 96 + body.len());
            codec::encode_onto(head, &mut bytes);
            bytes.extend_from_slice(body);
            codec::finish(bytes)
        };
        self.buffer.clear();
        self.buffer.extend_from_slice(&(sealed.len() as u32).to_le_bytes());
        self.buffer.extend_from_slice(&sealed);
        self.buffer.resize(padded(self.buffer.len()), 0);
    }

    /// Bytes a record of such a body may take at most.
    fn room_for(body: usize) -> usize {
        padded(body + 256)
    }

    /// Whether the current generation has room for it.
    pub(super) fn fits(&self, body: usize) -> bool {
        self.at + Self::room_for(body) <= self.half_bytes
    }

    /// Whether any generation has.
    pub(super) fn fits_at_all(&self, body: usize) -> bool {
        Self::room_for(body) <= self.half_bytes
    }

    /// Begins the next generation; its first record has to follow.
    pub(super) fn begin(&mut self) -> u64 {
        self.generation += 1;
        self.sequence = 0;
        self.at = 0;
        self.generation
    }

    /// Writes the next record and syncs it.
    pub(super) fn write(
        &mut self,
        begin: Begin,
        before: Durable,
        after: Durable,
        committed: Option<LogId>,
        (count, body): (u32, &[u8]),
    ) -> io::Result<()> {
        let Self { nonce, generation, sequence, .. } = *self;
        let head = Head { generation, nonce, sequence, begin, before, after, committed, count };
        self.encode(&head, body);
        assert!(self.at + self.buffer.len() <= self.half_bytes, "a record outgrew its half");
        let at = (generation % 2) as usize * self.half_bytes + self.at;
        self.file.write_all_at(&self.buffer, at as u64)?;
        self.file.write_all_at(&self.buffer, (2 * self.half_bytes + at) as u64)?;
        self.file.sync_data()?;
        self.sequence += 1;
        self.at += self.buffer.len();
        Ok(())
    }
}

/// A generation as it was found.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) number: u64,
    pub(super) records: Vec<Record>,
    /// A later record is there: what is missing before it had been synced.
    pub(super) has_hole: bool,
}

/// Refuses to make a tail anew where one holds something: the marker has forgotten it.
pub(super) fn unused(root: &Path, half_bytes: usize) -> Result<(), OpenError> {
    let used = |found: &Generation| found.has_hole || found.records.len() > 1;
    match read(root, half_bytes)? {
        Ok(found) if found.iter().any(used) => Err(OpenError::Quarantined {
            dir: root.to_owned(),
            why: "log.tail holds entries that log.marker does not know of".to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Reads what is readable, the older generation first; or says what the whole file lacks.
pub(super) fn read(
    root: &Path,
    half_bytes: usize,
) -> Result<Result<Vec<Generation>, String>, OpenError> {
    let path = path(root);
    let Some(bytes) = read_synced(&path).map_err(OpenError::io(&path, "reading"))? else {
        let why = "log.tail is missing, so nothing shows that the log is whole";
        return Ok(Err(why.to_owned()));
    };
    if bytes.len() < 4 * half_bytes {
        // Both copies of what was written last may be gone, and nothing else would show it.
        let (len, whole) = (bytes.len(), 4 * half_bytes);
        return Ok(Err(format!("log.tail is cut off: {len} bytes of {whole} are there")));
    }
    let part = |index: usize| &bytes[index * half_bytes..(index + 1) * half_bytes];
    let mut found: Vec<Generation> =
        (0..2).filter_map(|half| read_half(half as u64, part(half), part(half + 2))).collect();
    found.sort_by_key(|generation| generation.number);
    Ok(Ok(found))
}

/// The whole file, as it is on the disk; what cannot be read is zeroes, of which the other copy may
/// know better.
fn read_synced(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::options().read(true).write(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // A process that was killed may have left in the system's cache what is not on the disk; it is
    // about to go into sled, and must not be there and not here.
    file.sync_data()?;
    let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    let mut bytes = vec![0; len];
    for (number, page) in bytes.chunks_mut(PAGE).enumerate() {
        if let Err(error) = file.read_exact_at(page, (number * PAGE) as u64) {
            tracing::warn!(%error, page = number, "a page of {} is not readable", path.display());
            page.fill(0);
        }
    }
    Ok(Some(bytes))
}

fn read_half(half: u64, first: &[u8], second: &[u8]) -> Option<Generation> {
    let at = |copy: &[u8], at: usize| copy.get(at..).and_then(decode);
    let ours = |record: &Record| record.head.generation % 2 == half;
    let begins = [at(first, 0), at(second, 0)].into_iter().flatten().map(|(record, _)| record);
    let begins = begins.filter(ours).max_by_key(|record| record.head.generation);
    let Some(begins) = begins else {
        // Neither copy of the first record: where others are there, it had been synced.
        let pages = (0..first.len()).step_by(PAGE);
        let any = pages.flat_map(|offset| [at(first, offset), at(second, offset)]).flatten();
        let number = any.map(|(record, _)| record).filter(ours).map(|it| it.head.generation).max();
        return number.map(|number| Generation { number, records: Vec::new(), has_hole: true });
    };
    let (number, nonce) = (begins.head.generation, begins.head.nonce);
    let mut records: Vec<Record> = Vec::new();
    let mut offset = 0;
    let mut repaired = 0;
    loop {
        let sequence = records.len() as u64;
        let fits = |(record, _): &(Record, usize)| {
            let Head { generation, nonce: of, sequence: nth, .. } = record.head;
            (generation, of, nth) == (number, nonce, sequence)
        };
        let copies = [at(first, offset).filter(fits), at(second, offset).filter(fits)];
        repaired += usize::from(copies.iter().flatten().count() == 1);
        let Some((record, len)) = copies.into_iter().flatten().next() else { break };
        records.push(record);
        offset += len;
    }
    if repaired > 0 {
        tracing::warn!(generation = number, records = repaired, "one of two copies was readable");
    }
    let expected = records.len() as u64;
    let is_later = |(record, _): (Record, usize)| {
        let Head { generation, nonce: of, sequence, .. } = record.head;
        (generation, of) == (number, nonce) && sequence > expected
    };
    let has_hole = (offset..first.len().max(second.len())).step_by(PAGE).any(|offset| {
        [first, second].into_iter().filter_map(|copy| at(copy, offset)).any(is_later)
    });
    Some(Generation { number, records, has_hole })
}

/// The record that begins here, and the bytes it takes.
fn decode(bytes: &[u8]) -> Option<(Record, usize)> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    let len = u32::from_le_bytes(*len) as usize;
    let mut payload = codec::open_raw(Kind::LogTail, rest.get(..len)?).ok()?;
    let head = codec::decode_from(&mut payload).ok()?;
    Some((Record { head, body: payload.to_vec() }, padded(4 + len)))
}
