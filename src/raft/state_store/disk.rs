//! The machine's records on disk, as of the last cut.
//!
//! The authority is the machine in memory; this is what a restart begins from, so that it need not
//! replay the whole log. A *cut* brings the changed records up to one log index, all or none:
//!
//! ```text
//!   small   one batch: records and "cut = index"
//!   large   stage in batches → sync → "committed = index" → sync → move → "cut = index" → clear
//!   whole   write all records as a new generation beside the old one → sync → switch → remove the
//!           old one            (the first cut, and after a snapshot was installed)
//! ```
//!
//! Opening finishes what had been committed and forgets what had not. Keys:
//!
//! ```text
//!   d · generation u32 · length u16 · key · part u16      a record, or a part of a large one
//!   p · number u32                                        staged changes, packed ([`super::staged`])
//!   m · name                                              the cut, the committed cut
//! ```

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use super::batching::{BYTES_MAX, Batching, INSERTS_MAX, REMOVALS_MAX, Waits};
use super::staged::{BLOCKS, Form, Packing, SINGLES, staged};
use crate::codec::{self, Kind};
use crate::machine::{self, LoadError, Machine};
use crate::raft::files::OpenError;
use crate::raft::log_store::{guarded, open_sled};
use crate::raft::types::{LogId, StoredMembership};

/// Bytes of a record in one value: sled's leaves hold up to some 20 of them, and must stay small
/// enough to be written into its log (see [`crate::raft::log_store`]).
const PART_BYTES: usize = 24 << 10;

const CUT: &[u8] = b"mcut";
/// What is staged counts: in blocks ([`Kind::StateCutPacked`]), or each record by itself, as earlier
/// programs staged it ([`Kind::StateCut`]). One name for both, so that only one form ever counts, and
/// an earlier program that finds blocks here takes nothing for whole that is not.
const COMMITTED: &[u8] = b"mcommitted";

/// Up to where the records are, and how the group looked there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CutAt {
    pub(crate) last_applied: Option<LogId>,
    pub(crate) membership: StoredMembership,
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredCut {
    generation: u32,
    at: CutAt,
}

#[derive(Debug, Serialize, Deserialize)]
struct PackedCut {
    cut: StoredCut,
    /// How many it takes.
    blocks: u32,
}

/// A record's key and value; `None` removes it.
pub(crate) type Change = (Vec<u8>, Option<Vec<u8>>);

/// The open database. One thread writes it.
#[derive(Debug)]
pub(crate) struct Disk {
    db: sled::Db,
    /// A second handle of sled's file: its flush does not reach the disk's own cache (DESIGN 7).
    sync: Arc<File>,
    pub(super) waits: Waits,
    generation: u32,
    /// Keys of records that have more than one part, and how many.
    large: HashMap<Vec<u8>, u16>,
}

/// What an opening found.
pub(crate) struct Opened {
    pub(crate) disk: Disk,
    /// The machine as of the cut; `None` before the first one.
    pub(crate) state: Option<(CutAt, Machine)>,
}

/// Why an operation failed: sled's words or ours.
pub(super) type Failed = String;

/// Why the records were not taken.
#[derive(Debug)]
enum Fault {
    Damaged(Failed),
    /// They are whole, and a newer program's.
    Newer(String),
}

impl From<Failed> for Fault {
    fn from(why: Failed) -> Self {
        Self::Damaged(why)
    }
}

pub(super) fn sled<T>(work: impl FnOnce() -> sled::Result<T>) -> Result<T, Failed> {
    guarded(work)
}

impl Disk {
    /// Opens the database in `root/state` and loads the machine. The inner error says what is
    /// damaged.
    pub(crate) fn open(root: &Path, cache_bytes: u64) -> Result<Result<Opened, String>, OpenError> {
        let (db, sync) = match open_sled(&root.join("state"), cache_bytes)? {
            Ok(opened) => opened,
            Err(why) => return Ok(Err(why)),
        };
        let disk = Self {
            db,
            sync: Arc::new(sync),
            waits: Waits::default(),
            generation: 0,
            large: HashMap::new(),
        };
        match disk.recover() {
            Ok(opened) => Ok(Ok(opened)),
            Err(Fault::Damaged(why)) => Ok(Err(why)),
            Err(Fault::Newer(why)) => Err(OpenError::Newer { dir: root.to_owned(), why }),
        }
    }

    fn recover(mut self) -> Result<Opened, Fault> {
        let cut: Option<StoredCut> = self.meta(CUT)?;
        self.generation = cut.as_ref().map_or(0, |cut| cut.generation);
        let cut = match self.committed()? {
            Some((committed, form)) => {
                if committed.generation != self.generation {
                    return Err(Fault::Damaged("a committed cut is of other records".to_owned()));
                }
                self.move_staged(&committed, form)?;
                Some(committed)
            }
            None => cut,
        };
        self.clear_staged()?;
        // Another generation: a whole cut that was not switched to, or the one before it.
        let own = [&b"d"[..], &self.generation.to_be_bytes()].concat();
        let next = [&b"d"[..], &(self.generation + 1).to_be_bytes()].concat();
        self.tidy(b"d", &own);
        self.tidy(&next, b"e");
        let Some(cut) = cut else {
            self.clear(b"d", b"e")?;
            return Ok(Opened { disk: self, state: None });
        };
        let machine = self.load(own, next)?;
        Ok(Opened { disk: self, state: Some((cut.at, machine)) })
    }

    fn load(&mut self, from: Vec<u8>, to: Vec<u8>) -> Result<Machine, Fault> {
        let mut records =
            Records { stored: self.db.range(from..to), large: &mut self.large, fault: None };
        // sled may panic where a page is damaged, so the whole walk is guarded.
        let loaded = sled(|| Ok(Machine::from_records(&mut records)));
        if let Some(fault) = records.fault {
            return Err(fault.into());
        }
        loaded?.map_err(|error| match error {
            LoadError::Newer(why) => Fault::Newer(why),
            error => Fault::Damaged(error.to_string()),
        })
    }

    /// Reads all records; their hash is that of the state they are of. An error says what is damaged.
    /// `None` where it was told to stop.
    pub(crate) fn hash(&self, stop: &AtomicBool) -> Result<Option<u64>, Failed> {
        let own = [&b"d"[..], &self.generation.to_be_bytes()].concat();
        let next = [&b"d"[..], &(self.generation + 1).to_be_bytes()].concat();
        let mut large = HashMap::new();
        let stored = self.db.range(own..next);
        let mut records = Records { stored, large: &mut large, fault: None };
        let going_on = (&mut records).take_while(|_| !stop.load(Ordering::Relaxed));
        let hash = sled(|| Ok(machine::hash_of(going_on)))?;
        match records.fault {
            Some(fault) => Err(fault),
            None => Ok((!stop.load(Ordering::Relaxed)).then_some(hash)),
        }
    }

    fn meta(&self, name: &[u8]) -> Result<Option<StoredCut>, Failed> {
        let Some(bytes) = sled(|| self.db.get(name))? else { return Ok(None) };
        codec::open(Kind::StateCut, &bytes).map(Some).map_err(|error| error.to_string())
    }

    /// A cut that counts and is not in its place yet, and how it is staged.
    fn committed(&self) -> Result<Option<(StoredCut, Form)>, Failed> {
        let Some(bytes) = sled(|| self.db.get(COMMITTED))? else { return Ok(None) };
        let packed = codec::open::<PackedCut>(Kind::StateCutPacked, &bytes);
        let found = match packed {
            Ok(PackedCut { cut, blocks }) => Ok((cut, Form::Blocks(blocks))),
            Err(_) => codec::open(Kind::StateCut, &bytes).map(|cut| (cut, Form::Singles)),
        };
        found.map(Some).map_err(|error| error.to_string())
    }

    /// Brings the records up to a cut. All or none of it survives a crash.
    pub(crate) fn save(
        &mut self,
        changes: impl Iterator<Item = Change>,
        at: CutAt,
    ) -> Result<(), Failed> {
        let cut = StoredCut { generation: self.generation, at };
        let mut changes = changes.peekable();
        let (mut few, mut removals, mut bytes) = (Vec::new(), 0, 0);
        while few.len() < INSERTS_MAX && removals < REMOVALS_MAX && bytes < BYTES_MAX {
            let Some((key, value)) = changes.next() else { break };
            let mut take = |suffix, value: Option<Vec<u8>>| {
                removals += usize::from(value.is_none());
                bytes += value.as_ref().map_or(0, Vec::len);
                few.push((suffix, value));
            };
            self.split(key, value, &mut take);
        }
        if changes.peek().is_none() && few.len() <= INSERTS_MAX && removals <= REMOVALS_MAX {
            let mut batch = sled::Batch::default();
            for (suffix, value) in few {
                let key = self.data_key(self.generation, &suffix);
                match value {
                    Some(value) => batch.insert(key, value),
                    None => batch.remove(key),
                }
            }
            batch.insert(CUT, codec::seal(Kind::StateCut, &cut));
            sled(|| self.db.apply_batch(batch))?;
            return self.flush();
        }
        let blocks = self.stage(few, changes)?;
        let packed = PackedCut { cut, blocks };
        sled(|| self.db.insert(COMMITTED, codec::seal(Kind::StateCutPacked, &packed)))?;
        self.flush()?;
        self.move_staged(&packed.cut, Form::Blocks(blocks))?;
        self.clear_staged()
    }

    /// Answers how many blocks it took.
    fn stage(
        &mut self,
        few: Vec<Change>,
        changes: impl Iterator<Item = Change>,
    ) -> Result<u32, Failed> {
        let mut batch = Batching::new(&self.db, &self.sync, &self.waits);
        let mut packing = Packing::new();
        let mut full = Vec::new();
        for change in few {
            full.extend(packing.add(change));
        }
        for (key, value) in changes {
            self.split(key, value, &mut |suffix, value| full.extend(packing.add((suffix, value))));
            for (key, block) in full.drain(..) {
                batch.insert(key, block)?;
            }
        }
        full.push(packing.close());
        for (key, block) in full {
            batch.insert(key, block)?;
        }
        batch.apply()?;
        self.flush()?;
        Ok(packing.blocks())
    }

    /// A large cut that stops before it is moved.
    #[cfg(test)]
    pub(super) fn stage_for_test(
        &mut self,
        changes: impl Iterator<Item = Change>,
        at: CutAt,
        committed: bool,
    ) {
        let blocks = self.stage(Vec::new(), changes).unwrap();
        if committed {
            let cut = StoredCut { generation: self.generation, at };
            let cut = codec::seal(Kind::StateCutPacked, &PackedCut { cut, blocks });
            self.db.insert(COMMITTED, cut).unwrap();
        }
        self.flush().unwrap();
    }

    /// The same as programs before the blocks staged it: each change under a key of its own.
    #[cfg(test)]
    pub(super) fn stage_singly_for_test(
        &mut self,
        changes: impl Iterator<Item = Change>,
        at: CutAt,
        committed: bool,
    ) {
        for (key, value) in changes {
            let mut parts = Vec::new();
            self.split(key, value, &mut |suffix, value| parts.push((suffix, value)));
            for (suffix, value) in parts {
                let key = [SINGLES[0], &suffix].concat();
                self.db.insert(key, value.unwrap_or_default()).unwrap();
            }
        }
        if committed {
            let cut = StoredCut { generation: self.generation, at };
            self.db.insert(COMMITTED, codec::seal(Kind::StateCut, &cut)).unwrap();
        }
        self.flush().unwrap();
    }

    #[cfg(test)]
    pub(super) fn lose_block_for_test(&self, number: u32) {
        let key = [BLOCKS[0], &number.to_be_bytes()].concat();
        assert!(self.db.remove(key).unwrap().is_some());
    }

    /// What a disk may do to a stored part that holds these bytes.
    #[cfg(test)]
    pub(super) fn damage_for_test(&self, bytes: &[u8], how: impl Fn(&mut Vec<u8>) -> bool) {
        let all = self.db.range(&b"d"[..]..&b"e"[..]);
        let holds = |part: &sled::IVec| part.windows(bytes.len()).any(|found| found == bytes);
        let it = |(key, value): &(sled::IVec, sled::IVec)| holds(key) || holds(value);
        let (stored, value) = all.map(Result::unwrap).find(it).unwrap();
        let mut value = value.to_vec();
        match how(&mut value) {
            true => self.db.insert(stored, value).unwrap(),
            false => self.db.remove(stored).unwrap(),
        };
    }

    /// Moves what is staged and states the cut. Done twice, it is the same.
    fn move_staged(&mut self, cut: &StoredCut, form: Form) -> Result<(), Failed> {
        let mut batch = Batching::new(&self.db, &self.sync, &self.waits);
        for change in staged(&self.db, form) {
            let (suffix, value) = change?;
            let key = self.data_key(cut.generation, &suffix);
            match value {
                Some(value) => batch.insert(key, value)?,
                None => batch.remove(key)?,
            }
        }
        batch.apply()?;
        // Synced before the statement goes that it is still to be done.
        self.flush()?;
        let mut done = sled::Batch::default();
        done.insert(CUT, codec::seal(Kind::StateCut, cut));
        done.remove(COMMITTED);
        sled(|| self.db.apply_batch(done))?;
        self.flush()
    }

    fn clear_staged(&mut self) -> Result<(), Failed> {
        [BLOCKS, SINGLES].into_iter().try_for_each(|[from, to]| self.clear(from, to))
    }

    /// Writes all records beside the old ones, and switches to them.
    pub(crate) fn save_whole(
        &mut self,
        records: impl Iterator<Item = (Vec<u8>, Vec<u8>)>,
        at: CutAt,
    ) -> Result<(), Failed> {
        let generation = self.generation + 1;
        self.large.clear();
        let mut batch = Batching::new(&self.db, &self.sync, &self.waits);
        for (key, value) in records {
            let mut parts = Vec::new();
            self.split(key, Some(value), &mut |suffix, value| parts.push((suffix, value)));
            for (suffix, value) in parts {
                let key = self.data_key(generation, &suffix);
                batch.insert(key, value.unwrap_or_default())?;
            }
        }
        batch.apply()?;
        self.flush()?;
        let cut = StoredCut { generation, at };
        sled(|| self.db.insert(CUT, codec::seal(Kind::StateCut, &cut)))?;
        self.flush()?;
        self.generation = generation;
        self.tidy(b"d", &[&b"d"[..], &generation.to_be_bytes()].concat());
        Ok(())
    }

    /// Removes records of other generations. They are of no use, so where a damaged page keeps them from
    /// being read, they stay.
    fn tidy(&mut self, from: &[u8], to: &[u8]) {
        // sled may panic where a page is damaged.
        let cleared = sled(|| Ok(self.clear(from, to)));
        if let Err(why) | Ok(Err(why)) = cleared {
            tracing::warn!(why, "old records of the state cannot be removed");
        }
    }

    /// A record's stored parts, and the removal of parts it no longer has.
    fn split(
        &mut self,
        key: Vec<u8>,
        value: Option<Vec<u8>>,
        out: &mut impl FnMut(Vec<u8>, Option<Vec<u8>>),
    ) {
        let had = self.large.get(&key).copied().unwrap_or(1);
        let mut has = 0;
        if let Some(value) = &value {
            let parts = value.len().div_ceil(PART_BYTES).max(1) as u16;
            for (part, body) in (0..parts).zip(value.chunks(PART_BYTES).chain([&[][..]])) {
                let mut bytes = codec::begin(Kind::StateRecord, 2 + body.len());
                bytes.extend_from_slice(&parts.to_le_bytes());
                bytes.extend_from_slice(body);
                out(suffix(&key, part), Some(codec::finish(bytes)));
            }
            has = parts;
        }
        for part in has..had {
            out(suffix(&key, part), None);
        }
        if has > 1 {
            self.large.insert(key, has);
        } else {
            self.large.remove(&key);
        }
    }

    fn data_key(&self, generation: u32, suffix: &[u8]) -> Vec<u8> {
        [&b"d"[..], &generation.to_be_bytes(), suffix].concat()
    }

    /// Removes a range, in small batches.
    fn clear(&mut self, from: &[u8], to: &[u8]) -> Result<(), Failed> {
        let mut batch = Batching::new(&self.db, &self.sync, &self.waits);
        for stored in self.db.range(from..to) {
            let (key, value) = sled(|| stored)?;
            batch.remove_large(key.to_vec(), value.len())?;
        }
        batch.apply()
    }

    fn flush(&mut self) -> Result<(), Failed> {
        sync(&self.db, &self.sync)
    }
}

pub(super) fn sync(db: &sled::Db, file: &File) -> Result<(), Failed> {
    sled(|| db.flush())?;
    file.sync_data().map_err(|error| error.to_string())
}

fn suffix(key: &[u8], part: u16) -> Vec<u8> {
    // The machine's keys are bounded far below this (SPEC M3).
    let len = u16::try_from(key.len()).expect("a record's key is shorter than 64 KiB");
    [&len.to_be_bytes(), key, &part.to_be_bytes()].concat()
}

/// A stored part of a record: the record's key, which part, of how many, its bytes.
type Part = (Vec<u8>, u16, u16, Vec<u8>);
/// A record: key and value.
type Record = (Vec<u8>, Vec<u8>);

/// The stored records, whole ones. Ends at the first fault.
struct Records<'a> {
    stored: sled::Iter,
    large: &'a mut HashMap<Vec<u8>, u16>,
    fault: Option<String>,
}

impl Records<'_> {
    fn next_part(&mut self) -> Result<Option<Part>, String> {
        let Some(stored) = self.stored.next() else { return Ok(None) };
        let (stored_key, value) = stored.map_err(|error| format!("sled: {error}"))?;
        let malformed = || format!("a record of the state has the key {stored_key:02x?}");
        let rest = stored_key.get(5..).ok_or_else(malformed)?;
        let (len, rest) = rest.split_first_chunk::<2>().ok_or_else(malformed)?;
        let len = u16::from_be_bytes(*len) as usize;
        let (key, part) = rest.split_at_checked(len).ok_or_else(malformed)?;
        let part = u16::from_be_bytes(part.try_into().map_err(|_| malformed())?);
        let payload =
            codec::open_raw(Kind::StateRecord, &value).map_err(|error| error.to_string())?;
        let (parts, body) = payload.split_first_chunk::<2>().ok_or_else(malformed)?;
        Ok(Some((key.to_vec(), part, u16::from_le_bytes(*parts), body.to_vec())))
    }

    fn next_record(&mut self) -> Result<Option<Record>, String> {
        let Some((key, part, parts, mut value)) = self.next_part()? else { return Ok(None) };
        if part != 0 || parts == 0 {
            return Err("a record of the state lacks its beginning".to_owned());
        }
        for expected in 1..parts {
            match self.next_part()? {
                Some((same, part, _, body)) if same == key && part == expected => {
                    value.extend_from_slice(&body);
                }
                _ => return Err("a record of the state is cut off".to_owned()),
            }
        }
        if parts > 1 {
            self.large.insert(key.clone(), parts);
        }
        Ok(Some((key, value)))
    }
}

impl Iterator for &mut Records<'_> {
    type Item = (Vec<u8>, Vec<u8>);

    fn next(&mut self) -> Option<Self::Item> {
        if self.fault.is_some() {
            return None;
        }
        self.next_record().unwrap_or_else(|fault| {
            self.fault = Some(fault);
            None
        })
    }
}

#[cfg(test)]
mod tests {
    use openraft::Membership;
    use proptest::prelude::*;

    use super::*;
    use crate::raft::log_store::test_log_id;

    /// Format 1 for ever: a change here makes stored states unreadable.
    #[test]
    fn golden_bytes_of_records_and_cuts() {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let dir = tempfile::tempdir().unwrap();
        let mut disk = Disk::open(dir.path(), 1 << 20).unwrap().unwrap().disk;
        let mut parts = Vec::new();
        disk.split(b"key".to_vec(), Some(b"value".to_vec()), &mut |suffix, value| {
            parts.push((hex(&suffix), hex(&value.unwrap_or_default())));
        });
        assert_eq!(
            parts,
            [("00036b65790000".to_owned(), "626d010ae1190953010076616c7565".to_owned())]
        );
        let members = Membership::new_with_defaults(vec![[1, 2].into()], []);
        let last = Some(test_log_id(2, 5));
        let at = CutAt { last_applied: last, membership: StoredMembership::new(last, members) };
        let cut = codec::seal(Kind::StateCut, &StoredCut { generation: 3, at });
        assert_eq!(hex(&cut), "626d010baff6b45803010205010205010201020201000000000200000000");
        let cut = codec::open(Kind::StateCut, &cut).unwrap();
        let packed = codec::seal(Kind::StateCutPacked, &PackedCut { cut, blocks: 7 });
        assert_eq!(hex(&packed[8..]), "0301020501020501020102020100000000020000000007");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn garbage_never_panics(
            records in proptest::collection::vec((any::<Vec<u8>>(), any::<Vec<u8>>()), 1..8),
            sealed: bool,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let disk = Disk::open(dir.path(), 1 << 20).unwrap().unwrap().disk;
            let at = CutAt { last_applied: None, membership: StoredMembership::default() };
            let cut = StoredCut { generation: 0, at };
            disk.db.insert(CUT, codec::seal(Kind::StateCut, &cut)).unwrap();
            for (key, value) in records {
                let key = [&[b'd', 0, 0, 0, 0][..], &key].concat();
                let value = if sealed { codec::seal_raw(Kind::StateRecord, &value) } else { value };
                disk.db.insert(key, value).unwrap();
            }
            prop_assert!(disk.recover().is_err());
        }
    }
}
