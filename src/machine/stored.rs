//! The stored form: records, the snapshot stream, cuts.
//!
//! One encoding for both uses. A record is (tag byte + bincode of the key, bincode of the value). A
//! snapshot is all records in order between a header and a checksum; a cut is the records that
//! changed. So the records of all cuts laid over each other are a snapshot (a test holds that).
//!
//! ```text
//! "BOTMESHS"  version u16  count u64  { key_len u32  value_len u32  key  value } × count  crc32c u32
//! ```
//! Integers are little-endian; the checksum covers everything before it.

use std::io::{Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::LEVEL;
use super::endings::Progress;
use super::index::Index;
use super::state::{Limits, LoadError, Machine};
use super::tables::{CutTables, FrozenTables, Tables};
use super::{digest, tables::Meta};

const MAGIC: &[u8; 8] = b"BOTMESHS";
const VERSION: u16 = 1;
/// The longest key of a record: a caller's idempotency key with its prefix, and room.
const KEY_LEN_MAX: u32 = 16 * 1024;
/// The longest value of a record: the answers of one batch, or a row.
const VALUE_LEN_MAX: u32 = 64 * 1024 * 1024;

/// A state held still: cheap to take (shared shards), independent of later applies.
#[derive(Debug, Clone)]
pub struct Frozen {
    tables: FrozenTables,
}

/// What changed since the last cut, held still.
#[derive(Debug)]
pub struct Cut {
    tables: CutTables,
}

/// One changed record: its key, and its new value or `None` where it was deleted.
pub type Change = (Vec<u8>, Option<Vec<u8>>);

fn config() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<{ VALUE_LEN_MAX as usize }>()
}

pub(super) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // Fails only on types bincode has no form for, which the golden test would meet.
    bincode::serde::encode_to_vec(value, config()).expect("every stored type has a bincode form")
}

pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, LoadError> {
    let (value, read) = bincode::serde::decode_from_slice(bytes, config())
        .map_err(|error| LoadError::Corrupt(error.to_string()))?;
    if read != bytes.len() {
        return Err(LoadError::Corrupt(format!("{} bytes too many", bytes.len() - read)));
    }
    Ok(value)
}

impl Machine {
    /// Holds the state still (O(shards), no copying of data).
    pub fn freeze(&self) -> Frozen {
        Frozen { tables: self.tables.freeze() }
    }

    /// Takes what changed since the last cut (or since loading). Cheap; encode off the runtime.
    pub fn cut(&mut self) -> Cut {
        Cut { tables: self.tables.cut() }
    }

    /// The state that the records of earlier cuts make together.
    pub fn from_records<I>(records: I) -> Result<Self, LoadError>
    where
        I: IntoIterator<Item = (Vec<u8>, Vec<u8>)>,
    {
        let mut loading = Loading::new();
        for (key, value) in records {
            loading.take(&key, &value);
        }
        loading.finish()
    }

    /// Reads what [`Frozen::write`] wrote.
    pub fn read(from: &mut dyn Read) -> Result<Self, LoadError> {
        let mut from = Checked { inner: from, crc: 0 };
        if &from.bytes::<8>()? != MAGIC {
            return Err(LoadError::Corrupt("it does not begin like a state".into()));
        }
        let version = u16::from_le_bytes(from.bytes()?);
        if version != VERSION {
            let why = format!("it has format version {version}; this program reads {VERSION}");
            return Err(if version > VERSION {
                LoadError::Newer(why)
            } else {
                LoadError::Corrupt(why)
            });
        }
        let count = u64::from_le_bytes(from.bytes()?);
        let mut loading = Loading::new();
        let (mut key, mut value) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let key_len = u32::from_le_bytes(from.bytes()?);
            let value_len = u32::from_le_bytes(from.bytes()?);
            if key_len > KEY_LEN_MAX || value_len > VALUE_LEN_MAX {
                return Err(LoadError::Corrupt("a record is longer than any can be".into()));
            }
            from.fill(&mut key, key_len)?;
            from.fill(&mut value, value_len)?;
            loading.take(&key, &value);
        }
        let crc = from.crc;
        if u32::from_le_bytes(from.bytes()?) != crc {
            return Err(LoadError::Corrupt("its checksum is wrong".into()));
        }
        loading.finish()
    }
}

/// A state being read.
struct Loading {
    tables: Tables,
    meta: Option<Meta>,
    /// The first fault. It is told at the end, for the agreed level may say what it means.
    fault: Option<LoadError>,
}

impl Loading {
    fn new() -> Self {
        Self { tables: Tables::new(Meta::new(Limits::default())), meta: None, fault: None }
    }

    fn take(&mut self, key: &[u8], value: &[u8]) {
        match self.tables.load(key, value) {
            Ok(Some(meta)) => self.meta = Some(meta),
            Ok(None) => {}
            Err(fault) if self.fault.is_none() => self.fault = Some(fault),
            Err(_) => {}
        }
    }

    fn finish(mut self) -> Result<Machine, LoadError> {
        let level = self.tables.level();
        if level > LEVEL {
            let why = format!("its group has agreed on level {level}; this program knows {LEVEL}");
            return Err(LoadError::Newer(why));
        }
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        let no_counters = || LoadError::Corrupt("it has no record of its counters".into());
        self.tables.meta = self.meta.ok_or_else(no_counters)?;
        let index = Index::build(&mut self.tables)?;
        self.tables.mark_clean();
        Ok(Machine { tables: self.tables, index, progress: Progress::default() })
    }
}

impl Frozen {
    /// Writes the whole state in its canonical form: equal states write equal bytes.
    pub fn write(&self, to: &mut dyn Write) -> std::io::Result<()> {
        let mut crc = 0;
        let mut put = |bytes: &[u8]| {
            crc = crc32c::crc32c_append(crc, bytes);
            to.write_all(bytes)
        };
        put(MAGIC)?;
        put(&VERSION.to_le_bytes())?;
        put(&self.tables.len().to_le_bytes())?;
        for (key, value) in self.tables.records() {
            put(&length(&key).to_le_bytes())?;
            put(&length(&value).to_le_bytes())?;
            put(&key)?;
            put(&value)?;
        }
        to.write_all(&crc.to_le_bytes())
    }

    /// All records in order, as [`Machine::from_records`] takes them.
    pub fn records(&self) -> Box<dyn Iterator<Item = (Vec<u8>, Vec<u8>)> + '_> {
        self.tables.records()
    }

    /// Hash of the logical state: equal states on all nodes have equal hashes.
    pub fn hash(&self) -> u64 {
        hash_of(self.tables.records_unordered())
    }
}

/// The hash of the state that these records are of, in whatever order they come.
pub fn hash_of(records: impl Iterator<Item = (Vec<u8>, Vec<u8>)>) -> u64 {
    // A sum does not depend on the order of its terms, so nothing needs sorting.
    records.fold(0, |sum: u64, (key, value)| {
        let record = digest::of_parts(&[&key, &value]);
        let (low, high) = record.split_at(8);
        let word = |half: &[u8]| half.iter().fold(0, |word: u64, b| word << 8 | u64::from(*b));
        sum.wrapping_add(word(low) ^ word(high))
    })
}

fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).expect("a record is bounded far below 4 GiB by its commands")
}

impl Cut {
    /// The changed records: key, and the new value or `None` where deleted.
    pub fn records(&self) -> Box<dyn Iterator<Item = Change> + '_> {
        self.tables.records()
    }

    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }
}

/// Counts the checksum of what is read.
struct Checked<'a> {
    inner: &'a mut dyn Read,
    crc: u32,
}

impl Checked<'_> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], LoadError> {
        let mut bytes = [0; N];
        self.inner.read_exact(&mut bytes)?;
        self.crc = crc32c::crc32c_append(self.crc, &bytes);
        Ok(bytes)
    }

    /// Fills a buffer without believing the length before the bytes are there.
    fn fill(&mut self, buffer: &mut Vec<u8>, len: u32) -> Result<(), LoadError> {
        buffer.clear();
        let read = (&mut *self.inner).take(u64::from(len)).read_to_end(buffer)?;
        if read as u64 != u64::from(len) {
            return Err(LoadError::Io(std::io::ErrorKind::UnexpectedEof.into()));
        }
        self.crc = crc32c::crc32c_append(self.crc, buffer);
        Ok(())
    }
}
