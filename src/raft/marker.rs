//! How far sled has the log, kept beside the log.
//!
//! Problem: where sled meets a damaged page at its end, it takes that for the end of its log and
//! goes on with what came before; no checksum of ours ever sees the entries that went missing, and
//! a node that votes with such a log can elect a leader that lacks acknowledged writes. Idea: a
//! second witness. Before the tail (see `log_store::tail`) gives up what it holds, sled's last
//! position is written into this small file and synced with it; a sled that is behind the marker
//! has lost something, and so has a tail without the generation that the marker names.
//!
//! Both of its slots are written, one after the other, each with a checksum and a sequence number: a
//! write that was cut off costs one slot, and so does a bad sector, at any time.
//!
//! Invariant: sled ≥ marker. Sled is synced before the marker is raised, and the marker is lowered
//! before sled is truncated.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::{self, OpenError};
use super::types::{LogId, Vote};
use crate::codec::{self, Kind};

/// One slot fills one sector of any disk, so the two never share a torn write.
const SLOT_BYTES: usize = 4096;

/// What was last acknowledged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Durable {
    /// The log's last entry (where the log is empty, its base).
    pub(crate) last: Option<LogId>,
    /// The chain's hash there.
    pub(crate) hash: u64,
    /// The vote.
    pub(crate) vote: Option<Vote>,
}

/// From where on the tail counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TailFrom {
    /// The first generation that sled may not have whole.
    pub(crate) generation: u64,
    /// The size of the tail's halves.
    pub(crate) half_bytes: u64,
}

/// Without a tail: a directory that is new, or was written before there were tails.
#[derive(Serialize, Deserialize)]
struct Slot {
    sequence: u64,
    durable: Durable,
}

#[derive(Serialize, Deserialize)]
struct SlotWithTail {
    sequence: u64,
    durable: Durable,
    tail: TailFrom,
}

/// The open marker file. One thread writes it.
#[derive(Debug)]
pub(crate) struct Marker {
    path: PathBuf,
    file: File,
    sequence: u64,
    durable: Durable,
    tail: Option<TailFrom>,
}

impl Marker {
    fn path(root: &Path) -> PathBuf {
        root.join("log.marker")
    }

    /// Creates the marker of an empty log, unless there is one. Preallocated: raising it never
    /// changes the file's size, so its sync is one write.
    pub(crate) fn create(root: &Path) -> Result<(), OpenError> {
        let path = Self::path(root);
        if path.exists() {
            return Ok(());
        }
        let mut bytes = vec![0; 2 * SLOT_BYTES];
        let slot = encode(0, &Durable::default(), None);
        bytes[..slot.len()].copy_from_slice(&slot);
        files::replace(&path, &bytes).map_err(OpenError::io(&path, "creating the marker"))
    }

    /// Opens it; `None` where there is none. With neither slot readable, why.
    pub(crate) fn open(root: &Path) -> Result<Option<Result<Self, String>>, OpenError> {
        let path = Self::path(root);
        let Some(bytes) = files::read(&path).map_err(OpenError::io(&path, "reading"))? else {
            return Ok(None);
        };
        let slots = [0, 1].map(|slot| decode(bytes.get(slot * SLOT_BYTES..).unwrap_or_default()));
        let newest = slots.into_iter().flatten().max_by_key(|(sequence, ..)| *sequence);
        let Some((sequence, durable, tail)) = newest else {
            return Ok(Some(Err("neither slot of log.marker is readable".to_owned())));
        };
        let open = || {
            let file = File::options().write(true).open(&path)?;
            // What was read may be in the system's cache alone, and is about to be relied on.
            file.sync_data()?;
            Ok(file)
        };
        let file = open().map_err(OpenError::io(&path, "opening the marker"))?;
        Ok(Some(Ok(Self { path, file, sequence, durable, tail })))
    }

    /// Where sled is.
    pub(crate) fn durable(&self) -> &Durable {
        &self.durable
    }

    /// From where on the tail counts; `None` where there was none yet.
    pub(crate) fn tail(&self) -> Option<TailFrom> {
        self.tail
    }

    /// Replaces what it says, durably.
    pub(crate) fn set(&mut self, durable: Durable, tail: Option<TailFrom>) -> io::Result<()> {
        if durable == self.durable && tail == self.tail {
            return Ok(());
        }
        for _slot in 0..2 {
            self.sequence += 1;
            let bytes = encode(self.sequence, &durable, tail);
            let path = self.path.display();
            assert!(bytes.len() <= SLOT_BYTES, "{path}: a slot outgrew its sector");
            let at = (self.sequence % 2) * SLOT_BYTES as u64;
            self.file.write_all_at(&bytes, at)?;
            self.file.sync_data()?;
        }
        (self.durable, self.tail) = (durable, tail);
        Ok(())
    }
}

/// A length, because a slot is padded with whatever was there before.
fn encode(sequence: u64, durable: &Durable, tail: Option<TailFrom>) -> Vec<u8> {
    let durable = durable.clone();
    let sealed = match tail {
        None => codec::seal(Kind::Marker, &Slot { sequence, durable }),
        Some(tail) => codec::seal(Kind::MarkerWithTail, &SlotWithTail { sequence, durable, tail }),
    };
    let mut bytes = (sealed.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(&sealed);
    bytes
}

fn decode(bytes: &[u8]) -> Option<(u64, Durable, Option<TailFrom>)> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    let sealed = rest.get(..u32::from_le_bytes(*len) as usize)?;
    if let Ok(slot) = codec::open::<SlotWithTail>(Kind::MarkerWithTail, sealed) {
        return Some((slot.sequence, slot.durable, Some(slot.tail)));
    }
    let slot: Slot = codec::open(Kind::Marker, sealed).ok()?;
    Some((slot.sequence, slot.durable, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn durable(index: u64) -> Durable {
        Durable {
            last: Some(super::super::log_store::test_log_id(3, index)),
            hash: index * 31,
            vote: Some(Vote::new_committed(3, 1)),
        }
    }

    fn tail(generation: u64) -> Option<TailFrom> {
        Some(TailFrom { generation, half_bytes: 1 << 20 })
    }

    fn open(dir: &Path) -> Marker {
        Marker::open(dir).unwrap().unwrap().unwrap()
    }

    /// Format 1 for ever: a change here makes every log quarantine itself.
    #[test]
    fn golden_bytes_of_the_records_beside_the_chunks() {
        let hex = |bytes: Vec<u8>| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let log_id = durable(9).last.unwrap();
        let vote = Vote::new_committed(3, 1);
        let base = super::super::log_store::test_base(log_id, 77);
        let found = [
            hex(encode(5, &durable(9), None)),
            hex(encode(5, &durable(9), tail(6))),
            hex(codec::seal(Kind::Vote, &vote)),
            hex(codec::seal(Kind::Committed, &log_id)),
            hex(codec::seal(Kind::LogTruncation, &Some(log_id))),
            base.iter().map(|byte| format!("{byte:02x}")).collect(),
        ];
        assert_eq!(
            found,
            [
                "14000000626d010678a221b905010309fb17010103010101",
                "1a000000626d0111e462d9d905010309fb1701010301010106fc00001000",
                "626d0102f8c892ee03010101",
                "626d0103595259330309",
                "626d0105f9631032010309",
                "626d0104b9e28a9c03094d",
            ]
        );
    }

    #[test]
    fn it_says_what_was_set_last() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Marker::open(dir.path()).unwrap().is_none());
        Marker::create(dir.path()).unwrap();
        assert_eq!(*open(dir.path()).durable(), Durable::default());
        for index in 1..5 {
            // The second one begins to have a tail.
            let tail = (index > 1).then(|| tail(index)).flatten();
            open(dir.path()).set(durable(index), tail).unwrap();
            assert_eq!(*open(dir.path()).durable(), durable(index));
            assert_eq!(open(dir.path()).tail(), tail);
        }
        // Creating again changes nothing.
        Marker::create(dir.path()).unwrap();
        assert_eq!(*open(dir.path()).durable(), durable(4));
    }

    #[test]
    fn a_write_cut_off_anywhere_leaves_the_value_before_it_or_after() {
        let dir = tempfile::tempdir().unwrap();
        Marker::create(dir.path()).unwrap();
        let mut marker = open(dir.path());
        marker.set(durable(1), tail(1)).unwrap();
        marker.set(durable(2), tail(2)).unwrap();
        let path = Marker::path(dir.path());
        let before = std::fs::read(&path).unwrap();
        marker.set(durable(3), tail(3)).unwrap();
        let after = std::fs::read(&path).unwrap();

        let changed: Vec<usize> = (0..after.len()).filter(|&i| before[i] != after[i]).collect();
        let all = changed.len();
        let mut found = Vec::new();
        // The newer slot is the one of the odd sequence numbers here, and written first.
        let (first, second): (Vec<usize>, Vec<usize>) =
            changed.into_iter().partition(|at| *at >= SLOT_BYTES);
        let order: Vec<usize> = first.into_iter().chain(second).collect();
        for cut in 0..=all {
            let mut torn = before.clone();
            for &at in &order[..cut] {
                torn[at] = after[at];
            }
            std::fs::write(&path, &torn).unwrap();
            found.push(open(dir.path()).durable().clone());
        }
        found.dedup();
        assert_eq!(found, [durable(2), durable(3)]);
    }

    #[test]
    fn either_slot_says_it_alone() {
        let dir = tempfile::tempdir().unwrap();
        Marker::create(dir.path()).unwrap();
        open(dir.path()).set(durable(1), tail(1)).unwrap();
        let path = Marker::path(dir.path());
        let good = std::fs::read(&path).unwrap();
        for slot in 0..2 {
            let mut bad = good.clone();
            bad[slot * SLOT_BYTES..(slot + 1) * SLOT_BYTES].fill(0);
            std::fs::write(&path, &bad).unwrap();
            assert_eq!(
                (open(dir.path()).durable(), open(dir.path()).tail()),
                (&durable(1), tail(1))
            );
        }
    }

    #[test]
    fn with_both_slots_damaged_it_says_so() {
        let dir = tempfile::tempdir().unwrap();
        Marker::create(dir.path()).unwrap();
        open(dir.path()).set(durable(1), None).unwrap();
        let path = Marker::path(dir.path());
        let len = std::fs::read(&path).unwrap().len();
        for bytes in [vec![], vec![0; len], vec![0xff; len]] {
            std::fs::write(&path, bytes).unwrap();
            Marker::open(dir.path()).unwrap().unwrap().unwrap_err();
        }
    }

    proptest::proptest! {
        #[test]
        fn m4_whatever_a_marker_holds_is_read_without_a_panic(
            bytes in crate::codec::hostile::bytes(vec![
                encode(5, &durable(9), None),
                encode(5, &durable(9), tail(6)),
            ]),
        ) {
            if let Some((sequence, durable, tail)) = decode(&bytes) {
                let again = decode(&encode(sequence, &durable, tail)).unwrap();
                assert_eq!(again.0, sequence);
                assert_eq!(again.1, durable);
            }
        }
    }
}
