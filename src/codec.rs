//! The envelope and limits of every record on disk and every body between nodes.
//!
//! Problem: bytes outlive the program that wrote them. A record may be damaged, written by a newer
//! version, or not be what its place promises; a body may come from anybody who reaches the port.
//! Idea: one envelope for all of them,
//!
//! ```text
//!   0        2         3      4               8
//!   ┌────────┬─────────┬──────┬───────────────┬─────────────┐
//!   │ 62 6d  │ version │ kind │ crc32c (LE)   │ payload …   │
//!   └────────┴─────────┴──────┴───────────────┴─────────────┘
//! ```
//!
//! where the checksum covers version, kind and payload, and the payload is bincode (variable
//! integers) unless the kind says otherwise.
//!
//! Invariants: decoding never panics, never allocates beyond [`DECODE_BYTES_MAX`], and takes a
//! payload whole or not at all. Kinds and the enums inside payloads only grow at their end; the
//! golden bytes in the tests keep each written form readable (DESIGN 8).

use std::cell::Cell;

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};

#[cfg(test)]
pub(crate) mod hostile;

/// The first bytes of everything.
pub const MAGIC: [u8; 2] = *b"bm";
/// The format this program writes, and the newest it reads.
pub const FORMAT: u8 = 1;
/// Bytes before the payload.
pub const HEADER_BYTES: usize = 8;
/// The most a decoded value may claim, whatever its bytes say.
pub const DECODE_BYTES_MAX: usize = 64 << 20;

/// How deep values that hold another of their own type may stand in one another. Two is what is
/// ever written.
const NESTED_MAX: u32 = 8;

/// What a record or body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Kind {
    /// Consecutive log entries, or a part of a large one.
    LogChunk = 1,
    /// The vote.
    Vote = 2,
    /// The last committed log id this node had heard of.
    Committed = 3,
    /// Where the log starts.
    LogBase = 4,
    /// A truncation that is under way.
    LogTruncation = 5,
    /// The last durable position of the log, kept beside it.
    Marker = 6,
    /// Who this data directory is.
    Identity = 7,
    /// How often this data directory has been opened.
    Boot = 8,
    /// Why this data directory must not be used.
    Quarantine = 9,
    /// A record of the machine's state.
    StateRecord = 10,
    /// Up to where the machine's records on disk have it.
    StateCut = 11,
    /// The head of a snapshot file.
    SnapshotHead = 12,
    /// The boots of other nodes this one has met.
    PeerBoots = 14,
    /// The process that has this data directory open, and dead ones before it.
    Process = 15,
    /// What was acknowledged and may not be in the log's chunks yet.
    LogTail = 16,
    /// The last position of the log that is in its chunks, and from where on its tail counts.
    MarkerWithTail = 17,
    /// Changes of the machine's records that are not in their places yet.
    StateBlock = 18,
    /// A large cut that counts, though its records are in blocks still.
    StateCutPacked = 19,
    /// A proposal: the commands of one log entry.
    Batch = 32,
    /// A question to another node.
    Request = 64,
    /// The answer to it.
    Response = 65,
}

/// Why bytes were not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Shorter than an envelope.
    #[error("{len} bytes are too few for a record")]
    Short {
        /// How many there are.
        len: usize,
    },
    /// Another program's, or damaged.
    #[error("this is no record of ours")]
    Magic,
    /// Written by a newer program.
    #[error("format {found} is newer than this program reads ({FORMAT}); use a newer one")]
    Version {
        /// The record's format.
        found: u8,
    },
    /// In a place where another kind belongs.
    #[error("a record of kind {expected:?} was expected, kind {found} is there")]
    Kind {
        /// What belongs here.
        expected: Kind,
        /// What is here.
        found: u8,
    },
    /// Damaged.
    #[error("the checksum does not match: {expected:08x} is stored, the bytes have {found:08x}")]
    Checksum {
        /// The stored one.
        expected: u32,
        /// The computed one.
        found: u32,
    },
    /// The checksum is right and the payload is not: written by a program that knew more.
    #[error("the record does not decode: {why}")]
    Payload {
        /// What the decoder says.
        why: String,
    },
    /// More bytes than the value has.
    #[error("{left} bytes are left over behind the record")]
    Trailing {
        /// How many.
        left: usize,
    },
}

fn limits() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<DECODE_BYTES_MAX>()
}

/// Puts a value into its envelope.
///
/// # Panics
///
/// Where a value cannot be encoded at all; the types that go through here can.
pub fn seal<T: Serialize + ?Sized>(kind: Kind, value: &T) -> Vec<u8> {
    let mut bytes = begin(kind, 64);
    encode_onto(value, &mut bytes);
    finish(bytes)
}

/// Puts a raw payload into an envelope.
pub fn seal_raw(kind: Kind, payload: &[u8]) -> Vec<u8> {
    let mut bytes = begin(kind, payload.len());
    bytes.extend_from_slice(payload);
    finish(bytes)
}

/// Begins an envelope whose payload the caller appends; [`finish`] completes it.
pub(crate) fn begin(kind: Kind, payload_hint: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload_hint);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&[FORMAT, kind as u8, 0, 0, 0, 0]);
    bytes
}

/// Completes what [`begin`] began.
pub(crate) fn finish(mut bytes: Vec<u8>) -> Vec<u8> {
    let crc = checksum(&bytes);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Appends a value's bare encoding.
pub(crate) fn encode_onto<T: Serialize + ?Sized>(value: &T, bytes: &mut Vec<u8>) {
    bincode::serde::encode_into_std_write(value, bytes, bincode::config::standard())
        .expect("writing to memory does not fail, and all our types have an encoding");
}

/// Opens an envelope and decodes the value in it, all of it.
pub fn open<T: DeserializeOwned>(kind: Kind, bytes: &[u8]) -> Result<T, DecodeError> {
    decode(open_raw(kind, bytes)?)
}

/// Opens an envelope and returns its payload.
pub fn open_raw(kind: Kind, bytes: &[u8]) -> Result<&[u8], DecodeError> {
    if bytes.len() < HEADER_BYTES {
        return Err(DecodeError::Short { len: bytes.len() });
    }
    if bytes[..2] != MAGIC {
        return Err(DecodeError::Magic);
    }
    // The version is judged first: a newer format may compute its checksum in another way.
    if bytes[2] > FORMAT || bytes[2] == 0 {
        return Err(DecodeError::Version { found: bytes[2] });
    }
    let expected = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
    let found = checksum(bytes);
    if expected != found {
        return Err(DecodeError::Checksum { expected, found });
    }
    if bytes[3] != kind as u8 {
        return Err(DecodeError::Kind { expected: kind, found: bytes[3] });
    }
    Ok(&bytes[HEADER_BYTES..])
}

/// Decodes a bare value that fills `payload`.
pub(crate) fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, DecodeError> {
    let mut rest = payload;
    let value = decode_from(&mut rest)?;
    if !rest.is_empty() {
        return Err(DecodeError::Trailing { left: rest.len() });
    }
    Ok(value)
}

/// Decodes a bare value from the front of `bytes` and moves past it.
pub(crate) fn decode_from<T: DeserializeOwned>(bytes: &mut &[u8]) -> Result<T, DecodeError> {
    let (value, read) = bincode::serde::decode_from_slice(bytes, limits())
        .map_err(|error| DecodeError::Payload { why: error.to_string() })?;
    // The decoder cannot have read more than it was given.
    *bytes = bytes.get(read..).unwrap_or_default();
    Ok(value)
}

thread_local! {
    /// How deep in one another the values are that this thread decodes.
    static NESTED: Cell<u32> = const { Cell::new(0) };
}

/// Decodes a field that may hold a value of its own type, to a bounded depth: a few kilobytes that
/// say "another within" over and over would otherwise end the process, for a stack has an end.
/// For `#[serde(deserialize_with)]`.
pub(crate) fn nested<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Level;
    impl Drop for Level {
        fn drop(&mut self) {
            NESTED.set(NESTED.get() - 1);
        }
    }
    if NESTED.get() >= NESTED_MAX {
        return Err(D::Error::custom("values stand too deep in one another"));
    }
    NESTED.set(NESTED.get() + 1);
    let _level = Level;
    T::deserialize(from)
}

/// Over version, kind and payload; the stored checksum itself is left out.
fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&bytes[2..4]), &bytes[HEADER_BYTES..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn golden_bytes_of_the_envelope() {
        // Format 1 for ever: a change here makes every stored record unreadable.
        let bytes = seal(Kind::Committed, &(7u64, "x"));
        assert_eq!(bytes, [0x62, 0x6d, 1, 3, 0x7c, 0x60, 0x52, 0x83, 7, 1, b'x'], "{bytes:02x?}");
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let good = seal(Kind::Vote, &(1u64, 2u64, String::from("three")));
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            open::<(u64, u64, String)>(Kind::Vote, &bad).unwrap_err();
        }
    }

    #[test]
    fn each_fault_has_its_error() {
        let good = seal(Kind::Vote, &5u64);
        assert_eq!(open::<u64>(Kind::Vote, &good), Ok(5));
        assert_eq!(open::<u64>(Kind::Vote, &good[..7]), Err(DecodeError::Short { len: 7 }));
        assert_eq!(
            open::<u64>(Kind::Marker, &good),
            Err(DecodeError::Kind { expected: Kind::Marker, found: 2 })
        );
        let mut newer = good.clone();
        newer[2] = FORMAT + 1;
        assert_eq!(
            open::<u64>(Kind::Vote, &newer),
            Err(DecodeError::Version { found: FORMAT + 1 })
        );
        let longer = seal(Kind::Vote, &(5u64, 6u64));
        assert_eq!(open::<u64>(Kind::Vote, &longer), Err(DecodeError::Trailing { left: 1 }));
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_without_its_memory() {
        // A vector that claims 2^60 bytes.
        let mut bytes = begin(Kind::Batch, 16);
        bytes.push(253);
        bytes.extend_from_slice(&(1u64 << 60).to_le_bytes());
        let bytes = finish(bytes);
        open::<serde_bytes::ByteBuf>(Kind::Batch, &bytes).unwrap_err();
        open::<Vec<u64>>(Kind::Batch, &bytes).unwrap_err();
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes: Vec<u8>) {
            let _ = open::<crate::machine::Batch>(Kind::Batch, &bytes);
            let _ = open::<crate::machine::Batch>(Kind::Batch, &seal_raw(Kind::Batch, &bytes));
            let _ = decode::<Vec<String>>(&bytes);
        }
    }
}
