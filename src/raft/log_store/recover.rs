//! Opening the log: everything in it is read and checked before anything is believed.
//!
//! What a crash may leave, and is put right: a truncation that had begun (its intent is stored
//! first), chunks below the base (purged, not yet removed), and, beyond what had been
//! acknowledged, a large entry some of whose parts are missing. Everything else is damage, and the
//! log is quarantined; a bad record is never cut off.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use super::chunk::{self, Chunk, Fault, key};
use super::replay::{self, Replay};
use super::{Base, LogId, Vote, tail};
use crate::codec::{self, Kind};
use crate::raft::files::{self, OpenError};
use crate::raft::marker::{Durable, Marker};

/// sled's pages of leaves hold up to some 20 of our values; a quarter of a segment must hold one
/// whole, else sled writes it into a file of its own, which it never syncs.
const SEGMENT_BYTES: usize = 4 << 20;

/// Bytes handed to sled between two syncs of its file.
///
/// sled frees a segment once what replaced its content was written and a further segment begun, but
/// it writes with `sync_file_range`, which is no barrier: cut off from power, the disk may have the
/// new use of the freed segment and not yet the replacement. With a sync well within each segment's
/// worth of writes (sled writes up to three times what it is given), the replacement comes first.
pub(crate) const SYNC_BYTES_MAX: usize = 512 << 10;

/// How long sled's own lock is waited for: it is let go by a task of its, some time after the drop.
const SLED_LOCK_WAIT: Duration = Duration::from_secs(10);

/// Opens a sled database the way both stores need it, with the handle that syncs it.
pub(crate) fn open_sled(
    dir: &Path,
    cache_bytes: u64,
) -> Result<Result<(sled::Db, File), String>, OpenError> {
    let prepare = || {
        files::create_dir(dir)?;
        // sled writes its page table there and renames it; a torn one under this name makes every
        // later opening fail, and it is never needed: the rename is the commit.
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "generating") {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    };
    prepare().map_err(OpenError::io(dir, "preparing the directory"))?;

    let config = sled::Config::new()
        .path(dir)
        .segment_size(SEGMENT_BYTES)
        .cache_capacity(cache_bytes)
        .mode(sled::Mode::HighThroughput)
        .flush_every_ms(None);
    let began = Instant::now();
    let db = loop {
        match guarded(|| config.open()) {
            Ok(db) => break db,
            Err(why) if why.contains("lock") && began.elapsed() < SLED_LOCK_WAIT => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(why) => return Ok(Err(why)),
        }
    };
    let sync = || {
        let file = File::options().read(true).write(true).open(dir.join("db"))?;
        file.sync_all()?;
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            if path.is_dir() {
                files::sync_dir(&path)?;
            } else {
                File::open(&path)?.sync_all()?;
            }
        }
        files::sync_dir(dir)?;
        Ok(file)
    };
    let file = sync().map_err(OpenError::io(dir, "syncing the new database"))?;
    Ok(Ok((db, file)))
}

/// sled answers some damage with an error and some with a panic; both mean the same to us.
pub(crate) fn guarded<T>(work: impl FnOnce() -> sled::Result<T>) -> Result<T, String> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(format!("sled: {error}")),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("sled panicked: {}", text.unwrap_or("without a message")))
        }
    }
}

/// A log that was read whole; but for `replay`, as sled has it.
#[derive(Debug)]
pub(super) struct Recovered {
    pub(super) base: Option<Base>,
    /// Index of the first entry.
    pub(super) first: u64,
    pub(super) last: Option<LogId>,
    /// The chain at `last`.
    pub(super) hash: u64,
    pub(super) vote: Option<Vote>,
    pub(super) committed: Option<LogId>,
    /// Bytes of the entries.
    pub(super) bytes: u64,
    /// What the tail has beyond it.
    pub(super) replay: Replay,
    pub(super) marker: Marker,
    pub(super) db: sled::Db,
    pub(super) sync: File,
}

/// Opens and checks the log of a data directory.
pub(super) fn recover(root: &Path, cache_bytes: u64) -> Result<Recovered, OpenError> {
    let quarantined = |why: String| OpenError::Quarantined { dir: root.to_owned(), why };
    let dir = root.join("log");
    let marker = match Marker::open(root)? {
        Some(Ok(marker)) => marker,
        Some(Err(why)) => return Err(quarantined(why)),
        None => {
            return Err(quarantined(
                "log.marker is missing, so nothing shows that the log is whole".to_owned(),
            ));
        }
    };
    let is_new = marker.tail().is_none() && *marker.durable() == Durable::default();
    if !dir.join("db").exists() && !is_new {
        return Err(quarantined(format!(
            "log/ is missing or empty, though entries up to {} were acknowledged",
            marker.durable().last.map_or(0, |last| last.index)
        )));
    }
    let (db, sync) = open_sled(&dir, cache_bytes)?.map_err(quarantined)?;
    let read = guarded(|| read(&db, &sync, marker.durable())).and_then(|checked| checked);
    let Read { base, first, last, hash, vote, committed, bytes } = read.map_err(quarantined)?;
    let replay = match marker.tail() {
        None => Replay::default(),
        Some(from) => {
            let found = tail::read(root, from.half_bytes as usize)?.map_err(quarantined)?;
            replay::join(&Durable { last, hash, vote }, from, found).map_err(quarantined)?
        }
    };
    let first = if last.is_none() { replay.first.unwrap_or(first) } else { first };
    Ok(Recovered { base, first, last, hash, vote, committed, bytes, replay, marker, db, sync })
}

struct Read {
    base: Option<Base>,
    first: u64,
    last: Option<LogId>,
    hash: u64,
    vote: Option<Vote>,
    committed: Option<LogId>,
    bytes: u64,
}

fn meta<T: serde::de::DeserializeOwned>(
    db: &sled::Db,
    key: &[u8],
    kind: Kind,
) -> sled::Result<Result<Option<T>, String>> {
    let Some(bytes) = db.get(key)? else { return Ok(Ok(None)) };
    Ok(codec::open(kind, &bytes).map(Some).map_err(|error| format!("{kind:?}: {error}")))
}

/// Gives up with a finding: the outer error is sled's, the inner one ours.
macro_rules! found {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(why) => return Ok(Err(why)),
        }
    };
}

fn read(db: &sled::Db, sync: &File, durable: &Durable) -> sled::Result<Result<Read, String>> {
    let vote: Option<Vote> = found!(meta(db, key::VOTE, Kind::Vote)?);
    let committed = found!(meta(db, key::COMMITTED, Kind::Committed)?);
    let base: Option<Base> = found!(meta(db, key::BASE, Kind::LogBase)?);
    let truncation: Option<Option<LogId>> = found!(meta(db, key::TRUNCATION, Kind::LogTruncation)?);
    if let Some(keep) = truncation {
        found!(redo_truncation(db, keep, sync)?);
    }

    let mut walk = Walk {
        base,
        first: base.map_or(0, |base| base.log_id.index + 1),
        last: base.map(|base| base.log_id),
        hash: base.map_or(chunk::SEED, |base| base.hash),
        marked: None,
        bytes: 0,
    };
    // Whatever lies before the chunk with the first entry is purged, and perhaps half removed.
    let from = match base {
        Some(_) => found!(chunk_at(db, walk.first)?).map_or(walk.first, |chunk| chunk.first),
        None => 0,
    };
    // It is not believed, but it will be removed, and must not turn out damaged then.
    for left in db.range(key::chunk(0, 0).to_vec()..key::chunk(from, 0).to_vec()) {
        left?;
    }
    let mut records = db.range(key::chunk(from, 0).to_vec()..key::CHUNKS_END.to_vec());
    while let Some((stored_key, value)) = records.next().transpose()? {
        let Some(first) = first_of(&stored_key) else {
            return Ok(Err(format!("a record lies where none belongs: {stored_key:02x?}")));
        };
        match chunk::assemble(first, &value, || records.next().transpose())? {
            Ok(chunk) => found!(walk.take(&chunk, durable)),
            Err(Fault::Incomplete) if durable.last.is_none_or(|last| last.index < first) => {
                // The end of a batch that was cut off; nobody was told it was there.
                tracing::info!(entry = first, "removing an entry that was never whole");
                for part in db.range(key::chunk(first, 0).to_vec()..key::CHUNKS_END.to_vec()) {
                    db.remove(part?.0)?;
                }
            }
            Err(Fault::Incomplete) => return Ok(Err(format!("entry {first} is cut off"))),
            Err(Fault::Damaged(why)) => return Ok(Err(why)),
        }
    }
    found!(walk.compare(durable, vote.as_ref()));
    let Walk { first, last, hash, bytes, .. } = walk;
    Ok(Ok(Read { base, first, last, hash, vote, committed, bytes }))
}

/// The index a chunk's first record is stored under.
fn first_of(stored_key: &[u8]) -> Option<u64> {
    let bytes: [u8; 11] = stored_key.try_into().ok()?;
    let first = u64::from_be_bytes(std::array::from_fn(|i| bytes[i + 1]));
    (bytes == key::chunk(first, 0)).then_some(first)
}

/// The check, chunk by chunk.
struct Walk {
    base: Option<Base>,
    first: u64,
    last: Option<LogId>,
    hash: u64,
    /// The log id and the chain at the marker's index, once passed.
    marked: Option<(LogId, u64)>,
    /// Bytes of what was passed.
    bytes: u64,
}

impl Walk {
    fn take(&mut self, chunk: &Chunk, durable: &Durable) -> Result<(), String> {
        let first = chunk.first;
        let base_index = self.base.map(|base| base.log_id.index);
        match (self.last, base_index) {
            // The base lies inside this chunk: its entries below it are purged.
            (Some(last), Some(base)) if last.index == base && first <= base => {
                let hash = chunk.at(base).map(|(_, hash)| *hash);
                if hash != Some(self.hash) {
                    return Err(format!("the log does not fit its base at entry {base}"));
                }
            }
            (Some(last), _) if first != last.index + 1 => {
                return Err(format!("entries {} to {} are missing", last.index + 1, first - 1));
            }
            _ if chunk.before != self.hash => {
                return Err(format!("entry {first} does not follow the entry before it"));
            }
            _ => {}
        }
        for (entry, hash) in &chunk.entries {
            if self.last.is_some_and(|last| last.index >= entry.log_id.index) {
                continue;
            }
            if self.last.is_none() {
                self.first = entry.log_id.index;
            }
            if self.last.is_some_and(|last| last > entry.log_id) {
                return Err(format!("entry {} is of an older term", entry.log_id.index));
            }
            self.last = Some(entry.log_id);
            self.bytes += super::view::size(entry) as u64;
            self.hash = *hash;
            if durable.last.is_some_and(|last| last.index == entry.log_id.index) {
                self.marked = Some((entry.log_id, *hash));
            }
        }
        Ok(())
    }

    /// Log ≥ marker, in its entries and its vote.
    fn compare(&self, durable: &Durable, vote: Option<&Vote>) -> Result<(), String> {
        if !replay::is_as_new(vote, durable.vote.as_ref()) {
            let text = |vote: Option<&Vote>| vote.map_or("none".to_owned(), ToString::to_string);
            return Err(format!(
                "the vote is {}, older than {}, which this node had given",
                text(vote),
                text(durable.vote.as_ref())
            ));
        }
        let Some(marked) = durable.last else { return Ok(()) };
        if let Some(base) = &self.base {
            if base.log_id.index > marked.index {
                return Ok(()); // Purged beyond it since.
            }
            if base.log_id.index == marked.index {
                let fits = base.log_id == marked && base.hash == durable.hash;
                return fits.then_some(()).ok_or_else(|| {
                    format!("the log's base {} is not the one acknowledged", base.log_id)
                });
            }
        }
        match self.marked {
            None => Err(format!(
                "the log ends at entry {}, but entries up to {} were acknowledged",
                self.last.map_or("none".to_owned(), |last| last.index.to_string()),
                marked.index
            )),
            Some(found) if found != (marked, durable.hash) => {
                Err(format!("entry {} is not the one that was acknowledged", marked.index))
            }
            Some(_) => Ok(()),
        }
    }
}

/// Finishes a truncation whose intent was stored.
fn redo_truncation(
    db: &sled::Db,
    keep: Option<LogId>,
    sync: &File,
) -> sled::Result<Result<(), String>> {
    tracing::info!("finishing a truncation that was cut off");
    let plan = found!(plan_truncation(db, keep.map(|keep| keep.index))?);
    run_truncation(db, &plan, keep, true, sync)?;
    db.flush()?;
    sync.sync_data()?;
    Ok(Ok(()))
}

/// What a truncation removes and rewrites.
#[derive(Debug)]
pub(super) struct Truncation {
    /// Keys to remove, last first.
    remove: Vec<sled::IVec>,
    /// The chunk that is cut: its records, new.
    rewrite: Vec<chunk::Stored>,
    /// The entry kept last and the chain there; `None` where no chunk holds it.
    pub(super) last: Option<(LogId, u64)>,
}

/// Keys removed in one batch (DESIGN 7).
const REMOVALS_MAX: usize = 100;

/// Looks up what keeping the entries up to `keep` takes.
pub(super) fn plan_truncation(
    db: &sled::Db,
    keep: Option<u64>,
) -> sled::Result<Result<Truncation, String>> {
    let after = keep.map_or(0, |keep| keep + 1);
    let remove: sled::Result<Vec<_>> =
        db.range(key::chunk(after, 0).to_vec()..key::CHUNKS_END.to_vec()).keys().rev().collect();
    let mut plan = Truncation { remove: remove?, rewrite: Vec::new(), last: None };
    let Some(keep) = keep else { return Ok(Ok(plan)) };
    let Some(chunk) = found!(chunk_at(db, keep)?) else { return Ok(Ok(plan)) };
    let Some((entry, hash)) = chunk.at(keep) else { return Ok(Ok(plan)) };
    plan.last = Some((entry.log_id, *hash));
    if chunk.last() > keep {
        let mut builder = chunk::Builder::new(chunk.before);
        let mut out = |stored| plan.rewrite.push(stored);
        for (index, (entry, _)) in (chunk.first..=keep).zip(&chunk.entries) {
            builder.push(index, &chunk::encode(entry), &mut out);
        }
        builder.finish(&mut out);
    }
    Ok(Ok(plan))
}

/// Index of the first stored entry.
pub(super) fn first_index(db: &sled::Db) -> sled::Result<Option<u64>> {
    let first = db.range(key::chunk(0, 0).to_vec()..key::CHUNKS_END.to_vec()).next().transpose()?;
    let index =
        |key: &[u8]| u64::from_be_bytes(std::array::from_fn(|i| *key.get(i + 1).unwrap_or(&0)));
    Ok(first.map(|(key, _)| index(&key)))
}

/// The chunk that holds an entry, if one does.
pub(super) fn chunk_at(db: &sled::Db, index: u64) -> sled::Result<Result<Option<Chunk>, String>> {
    let end = key::chunk(index, u16::MAX).to_vec();
    let Some((last_key, _)) = db.range(key::chunk(0, 0).to_vec()..=end).next_back().transpose()?
    else {
        return Ok(Ok(None));
    };
    let first = u64::from_be_bytes(std::array::from_fn(|i| *last_key.get(i + 1).unwrap_or(&0)));
    let mut records = db.range(key::chunk(first, 0).to_vec()..key::CHUNKS_END.to_vec());
    let Some((found, value)) = records.next().transpose()? else { return Ok(Ok(None)) };
    if found != key::chunk(first, 0) {
        return Ok(Ok(None)); // What a sweep that was cut off has left of a purged entry.
    }
    match chunk::assemble(first, &value, || records.next().transpose())? {
        Ok(chunk) if chunk.last() < index => Ok(Ok(None)),
        Ok(chunk) => Ok(Ok(Some(chunk))),
        Err(fault) => Ok(Err(format!("entry {first}: {fault:?}"))),
    }
}

/// Does it. A truncation of more than one batch states its intent first, because one that was cut
/// off in between would look like damage.
pub(super) fn run_truncation(
    db: &sled::Db,
    plan: &Truncation,
    keep: Option<LogId>,
    stated: bool,
    sync: &File,
) -> sled::Result<()> {
    let one_batch = plan.remove.len() <= REMOVALS_MAX;
    if !one_batch && !stated {
        db.insert(key::TRUNCATION, codec::seal(Kind::LogTruncation, &keep))?;
        db.flush()?;
        sync.sync_data()?;
    }
    let mut batches = plan.remove.chunks(REMOVALS_MAX).peekable();
    loop {
        let mut batch = sled::Batch::default();
        for key in batches.next().unwrap_or_default() {
            batch.remove(key);
        }
        let is_last = batches.peek().is_none();
        if is_last {
            for (key, value) in &plan.rewrite {
                batch.insert(&key[..], &value[..]);
            }
            if stated || !one_batch {
                batch.remove(key::TRUNCATION);
            }
        }
        db.apply_batch(batch)?;
        if is_last {
            return Ok(());
        }
        db.flush()?;
        sync.sync_data()?;
    }
}
