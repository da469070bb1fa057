//! The stored form of log entries.
//!
//! A key of sled's costs far more than a byte of a value, so consecutive entries share one: a
//! *chunk*, up to [`CHUNK_BYTES`]. An entry larger than that is split over several *parts*, because
//! sled moves what is too large for its log into files that it never syncs (DESIGN 7).
//!
//! ```text
//!   key     'e' · index of the first entry (BE u64) · part (BE u16)
//!   value   envelope( first u64 · count u32 · parts u16 · part u16 · hash before u64 · body )
//!   body    one after another: length u32 · entry        (parts: a slice of that)
//! ```
//!
//! Each entry's hash takes in the one before it: the *chain*. A chunk states the hash before its
//! first entry, so a chunk that is missing, stale or out of order does not fit its neighbour.

use super::{Entry, LogId};
use crate::codec::{self, DecodeError, HEADER_BYTES, Kind};

/// The largest body of a chunk or part.
pub(super) const CHUNK_BYTES: usize = 32 << 10;
/// Bytes of a chunk before its body, the envelope left out.
const HEAD_BYTES: usize = 24;
/// The hash before the first entry of a log.
pub(super) const SEED: u64 = 0x626f_746d_6573_6800;

/// Keys of records that are no chunks.
pub(super) mod key {
    pub(in super::super) const VOTE: &[u8] = b"v";
    pub(in super::super) const COMMITTED: &[u8] = b"c";
    pub(in super::super) const BASE: &[u8] = b"b";
    pub(in super::super) const TRUNCATION: &[u8] = b"t";

    /// Of a part of the chunk that begins with this entry.
    pub(in super::super) fn chunk(first: u64, part: u16) -> [u8; 11] {
        let mut key = [b'e'; 11];
        key[1..9].copy_from_slice(&first.to_be_bytes());
        key[9..].copy_from_slice(&part.to_be_bytes());
        key
    }

    /// Behind all chunks.
    pub(in super::super) const CHUNKS_END: &[u8] = b"f";
}

/// The hash of an entry whose predecessor has hash `before`.
pub(super) fn chain(before: u64, entry: &[u8]) -> u64 {
    // A checksum says whether the bytes are right, the mixing (splitmix64) that they are here.
    let own = u64::from(crc32c::crc32c(entry)) << 32 | entry.len() as u64 & 0xffff_ffff;
    let mut hash = (before ^ own).wrapping_add(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

/// The stored form of an entry.
pub(super) fn encode(entry: &Entry) -> Vec<u8> {
    let mut bytes = Vec::new();
    codec::encode_onto(entry, &mut bytes);
    bytes
}

/// Of an encoded entry.
pub(super) fn log_id(entry: &[u8]) -> Result<LogId, String> {
    // The first field of an entry.
    codec::decode_from(&mut &entry[..]).map_err(|error| error.to_string())
}

/// The hash a log begins with when it was purged beyond its end, at `base`.
pub(super) fn jump(base: &LogId) -> u64 {
    let mut bytes = Vec::new();
    codec::encode_onto(base, &mut bytes);
    chain(SEED, &bytes)
}

/// What a chunk says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) first: u64,
    pub(super) count: u32,
    pub(super) parts: u16,
    pub(super) part: u16,
    pub(super) before: u64,
}

/// A stored record: its key and value.
pub(super) type Stored = ([u8; 11], Vec<u8>);

fn seal(head: Head, body: &[u8]) -> Stored {
    let mut bytes = codec::begin(Kind::LogChunk, HEAD_BYTES + body.len());
    bytes.extend_from_slice(&head.first.to_le_bytes());
    bytes.extend_from_slice(&head.count.to_le_bytes());
    bytes.extend_from_slice(&head.parts.to_le_bytes());
    bytes.extend_from_slice(&head.part.to_le_bytes());
    bytes.extend_from_slice(&head.before.to_le_bytes());
    bytes.extend_from_slice(body);
    (key::chunk(head.first, head.part), codec::finish(bytes))
}

/// Opens a stored record.
pub(super) fn open(bytes: &[u8]) -> Result<(Head, &[u8]), DecodeError> {
    let payload = codec::open_raw(Kind::LogChunk, bytes)?;
    let short = || DecodeError::Short { len: bytes.len() };
    let (head, body) = payload.split_first_chunk::<HEAD_BYTES>().ok_or_else(short)?;
    let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| head[at + i]));
    let u16_at = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    let head = Head {
        first: u64_at(0),
        count: u32::from_le_bytes(std::array::from_fn(|i| head[8 + i])),
        parts: u16_at(12),
        part: u16_at(14),
        before: u64_at(16),
    };
    Ok((head, body))
}

/// Entries on their way into chunks.
#[derive(Debug)]
pub(super) struct Builder {
    head: Head,
    /// The chain after the last entry.
    hash: u64,
    body: Vec<u8>,
}

impl Builder {
    /// Goes on behind an entry with hash `before`.
    pub(super) fn new(before: u64) -> Self {
        let head = Head { first: 0, count: 0, parts: 1, part: 0, before };
        Self { head, hash: before, body: Vec::new() }
    }

    /// The chain after the last entry taken.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    /// Index of the first entry that was not handed out yet.
    pub(super) fn pending(&self) -> Option<u64> {
        (self.head.count > 0).then_some(self.head.first)
    }

    /// Takes the next entry, encoded; hands finished records to `out`.
    pub(super) fn push(&mut self, index: u64, entry: &[u8], out: &mut impl FnMut(Stored)) {
        if self.body.len() + 4 + entry.len() > CHUNK_BYTES {
            self.finish(out);
        }
        if self.head.count == 0 {
            self.head.first = index;
        }
        self.head.count += 1;
        self.body.extend_from_slice(&(entry.len() as u32).to_le_bytes());
        self.body.extend_from_slice(entry);
        self.hash = chain(self.hash, entry);
        if self.body.len() >= CHUNK_BYTES {
            self.finish(out);
        }
    }

    /// Hands what has been taken to `out`.
    pub(super) fn finish(&mut self, out: &mut impl FnMut(Stored)) {
        if self.head.count == 0 {
            return;
        }
        let parts = self.body.len().div_ceil(CHUNK_BYTES);
        for (part, body) in self.body.chunks(CHUNK_BYTES).enumerate() {
            let (parts, part) = (parts as u16, part as u16);
            out(seal(Head { parts, part, ..self.head }, body));
        }
        self.body.clear();
        self.head = Head { first: 0, count: 0, parts: 1, part: 0, before: self.hash };
    }
}

/// A chunk, read and whole.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) first: u64,
    /// The chain before the first entry.
    pub(super) before: u64,
    /// The entries, and the chain after each.
    pub(super) entries: Vec<(Entry, u64)>,
}

impl Chunk {
    /// Index of the last entry.
    pub(super) fn last(&self) -> u64 {
        self.first + self.entries.len() as u64 - 1
    }

    /// The entry and its hash at an index of this chunk.
    pub(super) fn at(&self, index: u64) -> Option<&(Entry, u64)> {
        self.entries.get(usize::try_from(index.checked_sub(self.first)?).ok()?)
    }
}

/// Why records are no chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// Parts are missing at the end; all before are there.
    Incomplete,
    /// Anything else.
    Damaged(String),
}

impl From<DecodeError> for Fault {
    fn from(error: DecodeError) -> Self {
        Self::Damaged(error.to_string())
    }
}

/// Puts a chunk together from the stored records of its parts, the first of which has the key
/// `(first, 0)`. `next` gives the record after the one given, with its key.
pub(super) fn assemble<E>(
    first: u64,
    value: &[u8],
    mut next: impl FnMut() -> Result<Option<(sled::IVec, sled::IVec)>, E>,
) -> Result<Result<Chunk, Fault>, E> {
    let parsed = match open(value) {
        Ok((head, body)) if head.part == 0 && head.first == first => (head, body.to_vec()),
        Ok((head, _)) => {
            return Ok(Err(Fault::Damaged(format!("entry {first}'s record says {head:?}"))));
        }
        Err(error) => return Ok(Err(error.into())),
    };
    let (head, mut body) = parsed;
    for part in 1..head.parts {
        let Some((key, value)) = next()? else { return Ok(Err(Fault::Incomplete)) };
        if key[..] != key::chunk(first, part) {
            let after = u64::from_be_bytes(std::array::from_fn(|i| *key.get(i + 1).unwrap_or(&0)));
            let fault = format!("entry {first} lacks part {part}; entry {after} follows");
            return Ok(Err(Fault::Damaged(fault)));
        }
        match open(&value) {
            Ok((found, more)) if found == (Head { part, ..head }) => body.extend_from_slice(more),
            Ok((found, _)) => {
                let fault = format!("part {part} of entry {first} says {found:?}");
                return Ok(Err(Fault::Damaged(fault)));
            }
            Err(error) => return Ok(Err(error.into())),
        }
    }
    Ok(decode(head, &body))
}

fn decode(head: Head, mut body: &[u8]) -> Result<Chunk, Fault> {
    let damaged = |why: &str| Fault::Damaged(format!("the chunk at entry {}: {why}", head.first));
    let mut hash = head.before;
    let mut entries = Vec::with_capacity(head.count.min(4096) as usize);
    for index in (head.first..).take(head.count as usize) {
        let (len, rest) = body.split_first_chunk::<4>().ok_or_else(|| damaged("is cut off"))?;
        let len = u32::from_le_bytes(*len) as usize;
        let (bytes, rest) = rest.split_at_checked(len).ok_or_else(|| damaged("is cut off"))?;
        body = rest;
        let entry: Entry = codec::decode(bytes)?;
        if entry.log_id.index != index {
            return Err(damaged("holds an entry of another index"));
        }
        hash = chain(hash, bytes);
        entries.push((entry, hash));
    }
    if !body.is_empty() || entries.is_empty() {
        return Err(damaged("has a length of its own"));
    }
    Ok(Chunk { first: head.first, before: head.before, entries })
}

/// Bytes of the largest record a chunk can make.
pub(super) const RECORD_BYTES_MAX: usize = HEADER_BYTES + HEAD_BYTES + CHUNK_BYTES;

#[cfg(test)]
mod tests {
    use openraft::EntryPayload;
    use proptest::prelude::*;

    use super::*;
    use crate::codec::hostile;
    use crate::raft::log_store::test_log_id;
    use crate::raft::types::Proposal;

    fn chunk_of(entries: &[Entry]) -> Vec<Stored> {
        let mut builder = Builder::new(SEED);
        let mut records = Vec::new();
        for entry in entries {
            let encoded = encode(entry);
            builder.push(entry.log_id.index, &encoded, &mut |stored| records.push(stored));
        }
        builder.finish(&mut |stored| records.push(stored));
        records
    }

    /// Format 1 for ever: a change here makes stored logs unreadable.
    #[test]
    fn golden_bytes_of_a_chunk() {
        let normal = EntryPayload::Normal(Proposal(bytes::Bytes::from_static(b"hi")));
        let entries = [
            Entry { log_id: test_log_id(3, 7), payload: EntryPayload::Blank },
            Entry { log_id: test_log_id(3, 8), payload: normal },
        ];
        let records = chunk_of(&entries);
        let [(key, value)] = &records[..] else { panic!("{records:?}") };
        assert_eq!(key[..], *b"e\0\0\0\0\0\0\0\x07\0\0");
        assert_eq!(hex(value), GOLDEN);
    }

    const GOLDEN: &str = "626d01015f59bc4007000000000000000200000001000000006873656d746f62\
         0300000003070006000000030801026869";

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn each_flipped_bit_of_a_chunk_is_noticed() {
        let entries: Vec<Entry> = (1..4)
            .map(|index| Entry { log_id: test_log_id(1, index), payload: EntryPayload::Blank })
            .collect();
        let records = chunk_of(&entries);
        let (_, value) = &records[0];
        for bit in 0..value.len() * 8 {
            let mut bad = value.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let found = assemble(1, &bad, || Ok::<_, ()>(None)).unwrap();
            assert!(found.is_err(), "bit {bit}");
        }
    }

    fn samples() -> Vec<Entry> {
        let normal = EntryPayload::Normal(Proposal(bytes::Bytes::from_static(b"hi")));
        let large = EntryPayload::Normal(Proposal(vec![7; CHUNK_BYTES].into()));
        vec![
            Entry { log_id: test_log_id(3, 7), payload: EntryPayload::Blank },
            Entry { log_id: test_log_id(3, 8), payload: normal },
            Entry { log_id: test_log_id(4, 9), payload: large },
        ]
    }

    /// The chunk again, and the stored records it was read from.
    fn assembled(first: u64, records: &[Stored]) -> Result<Chunk, Fault> {
        let mut rest = records[1..].iter().map(|(key, value)| (key.into(), value[..].into()));
        assemble(first, &records[0].1, || Ok::<_, ()>(rest.next())).unwrap()
    }

    proptest! {
        #[test]
        fn m4_whatever_a_chunk_holds_is_read_as_it_was_written_or_refused(
            payload in hostile::bytes(
                chunk_of(&samples()).into_iter().map(|(_, value)| value[HEADER_BYTES..].to_vec()).collect()
            ),
            first in prop_oneof![Just(7u64), Just(9), Just(u64::MAX), any::<u64>()],
        ) {
            let sealed = codec::seal_raw(Kind::LogChunk, &payload);
            let records = vec![(key::chunk(first, 0), sealed)];
            if let Ok(chunk) = assembled(first, &records) {
                let entries: Vec<Entry> = chunk.entries.iter().map(|one| one.0.clone()).collect();
                let mut builder = Builder::new(chunk.before);
                let mut again = Vec::new();
                for entry in &entries {
                    let index = entry.log_id.index;
                    builder.push(index, &encode(entry), &mut |stored| again.push(stored));
                }
                builder.finish(&mut |stored| again.push(stored));
                let same = assembled(first, &again).unwrap();
                prop_assert_eq!(same.entries[0].0.log_id, entries[0].log_id);
            }
        }
    }

    #[test]
    fn m3_a_chunks_length_that_lies_claims_no_memory() {
        for (_, value) in chunk_of(&samples()[..2]) {
            hostile::lies_claim_no_memory(&value[HEADER_BYTES..], |payload| {
                let sealed = codec::seal_raw(Kind::LogChunk, payload);
                let _ = assemble(7, &sealed, || Ok::<_, ()>(None));
            });
        }
    }

    proptest! {
        #[test]
        fn garbage_never_panics(first: u64, bytes: Vec<u8>) {
            let _ = assemble(first, &bytes, || Ok::<_, ()>(None));
            let sealed = codec::seal_raw(Kind::LogChunk, &bytes);
            let _ = assemble(first, &sealed, || Ok::<_, ()>(None));
            // A true head before a body of garbage.
            let head = Head { first, count: 3, parts: 1, part: 0, before: SEED };
            let (_, value) = seal(head, &bytes);
            let _ = assemble(first, &value, || Ok::<_, ()>(None));
        }
    }
}
