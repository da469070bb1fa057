//! Snapshot files: the machine's whole state at one log index.
//!
//! ```text
//!   length u32 · envelope(SnapshotHead: log id, membership) · the machine's own stream · crc32c u32
//! ```
//!
//! A file that carries its name is whole: it was written (or received) under another one, synced
//! and renamed. Its checksum is read again at every opening all the same, because a leader whose
//! snapshot is damaged could never bring a follower up.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use super::files::{self, OpenError};
use super::types::{SnapshotFile, SnapshotMeta, TypeConfig};
use crate::codec::{self, Kind};
use crate::machine::{Frozen, LoadError, Machine};

/// A snapshot as openraft passes it around.
pub(crate) type Snapshot = openraft::type_config::alias::SnapshotOf<TypeConfig, SnapshotFile>;

/// The longest head: a membership of a few dozen nodes and room.
const HEAD_BYTES_MAX: usize = 1 << 20;

/// The snapshots of a data directory.
#[derive(Debug)]
pub(crate) struct Snapshots {
    dir: PathBuf,
    /// The newest. Its files is kept, and the one before it: a transfer may be about to open it.
    current: Mutex<Option<Snapshot>>,
}

impl Snapshots {
    /// Finds the newest whole snapshot. What is damaged is set aside under another name.
    pub(crate) fn open(root: &Path) -> Result<Self, OpenError> {
        let dir = root.join("snapshots");
        let list = || {
            files::create_dir(&dir)?;
            let mut whole = Vec::new();
            for entry in fs::read_dir(&dir)? {
                let path = entry?.path();
                match path.extension().and_then(|extension| extension.to_str()) {
                    Some("snap") => whole.push(path),
                    Some("tmp") => fs::remove_file(path)?,
                    _ => {}
                }
            }
            whole.sort();
            Ok(whole)
        };
        let files = list().map_err(OpenError::io(&dir, "listing the snapshots"))?;
        let mut current = None;
        for path in files.into_iter().rev() {
            match verify(&path) {
                Ok(snapshot) => {
                    current = Some(snapshot);
                    break;
                }
                Err(error) => {
                    tracing::error!(%error, path = %path.display(), "damaged snapshot set aside");
                    let aside = path.with_extension("damaged");
                    fs::rename(&path, &aside).map_err(OpenError::io(&path, "setting it aside"))?;
                }
            }
        }
        Ok(Self { dir, current: Mutex::new(current) })
    }

    /// The newest.
    pub(crate) fn current(&self) -> Option<Snapshot> {
        self.current.lock().clone()
    }

    /// Writes a state as the newest snapshot. Blocking.
    pub(crate) fn build(&self, meta: &SnapshotMeta, state: &Frozen) -> io::Result<Snapshot> {
        if let Some(current) = self.current()
            && current.meta.last_log_id == meta.last_log_id
        {
            return Ok(current);
        }
        let beside = files::beside(&self.path(meta));
        let written = write(&beside, meta, state).and_then(|()| self.adopt(&beside, meta));
        if written.is_err() {
            // Half a snapshot is of no use, and may be what fills the disk.
            let _ = fs::remove_file(&beside);
        }
        written
    }

    /// Reads a received snapshot and makes it the newest; the state in it. Blocking.
    pub(crate) fn install(
        &self,
        meta: &SnapshotMeta,
        received: &SnapshotFile,
    ) -> io::Result<Machine> {
        let (found, machine) = load(&received.path)?;
        if found != *meta {
            return Err(invalid("the snapshot is not the one that was announced"));
        }
        let beside = files::beside(&self.path(meta));
        if received.path.parent() != Some(&self.dir) {
            let _ = fs::remove_file(&beside);
            if fs::hard_link(&received.path, &beside).is_err() {
                fs::copy(&received.path, &beside)?;
            }
            File::open(&beside)?.sync_all()?;
            self.adopt(&beside, meta)?;
        }
        Ok(machine)
    }

    /// Gives a synced file its name.
    fn adopt(&self, beside: &Path, meta: &SnapshotMeta) -> io::Result<Snapshot> {
        let path = self.path(meta);
        let bytes = fs::metadata(beside)?.len();
        files::rename(beside, &path)?;
        let snapshot = Snapshot { meta: meta.clone(), snapshot: SnapshotFile { path, bytes } };
        let mut current = self.current.lock();
        if current.as_ref().is_none_or(|current| current.meta.last_log_id < meta.last_log_id) {
            let before = current.replace(snapshot.clone());
            drop(current);
            self.prune(&[Some(&snapshot), before.as_ref()]);
        }
        Ok(snapshot)
    }

    /// Removes all others. What stays by mistake costs space only.
    fn prune(&self, keep: &[Option<&Snapshot>]) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let kept = keep.iter().flatten().any(|snapshot| snapshot.snapshot.path == path);
            if path.extension().is_some_and(|extension| extension == "snap") && !kept {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// Names sort as log ids do.
    fn path(&self, meta: &SnapshotMeta) -> PathBuf {
        let name = meta.last_log_id.map_or("-empty.snap".to_owned(), |last| {
            format!("{:020}-{:020}.snap", last.index, last.leader_id.term)
        });
        self.dir.join(name)
    }
}

/// Writes a state, synced, under that name.
fn write(beside: &Path, meta: &SnapshotMeta, state: &Frozen) -> io::Result<()> {
    let mut out =
        Summed { inner: BufWriter::with_capacity(1 << 18, File::create(beside)?), crc: 0 };
    let head = codec::seal(Kind::SnapshotHead, meta);
    out.write_all(&(head.len() as u32).to_le_bytes())?;
    out.write_all(&head)?;
    state.write(&mut out)?;
    let crc = out.crc;
    out.write_all(&crc.to_le_bytes())?;
    let file = out.inner.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()
}

fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

/// Whether a snapshot was not read because a newer program wrote it.
pub(crate) fn is_newer(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
}

/// The head of an open file.
fn head(from: &mut impl Read) -> io::Result<SnapshotMeta> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > HEAD_BYTES_MAX {
        return Err(invalid("the snapshot's head is longer than any can be"));
    }
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    codec::open(Kind::SnapshotHead, &bytes).map_err(|error| invalid(error.to_string()))
}

/// Reads a file and checks it whole.
pub(crate) fn load(path: &Path) -> io::Result<(SnapshotMeta, Machine)> {
    let file = File::open(path)?;
    let mut from = Summed { inner: BufReader::with_capacity(1 << 18, file), crc: 0 };
    let meta = head(&mut from)?;
    let machine = Machine::read(&mut from).map_err(|error| match error {
        LoadError::Newer(why) => io::Error::new(io::ErrorKind::Unsupported, why),
        error => invalid(error.to_string()),
    })?;
    check_end(from)?;
    Ok((meta, machine))
}

/// Checks a file without taking the state out of it.
fn verify(path: &Path) -> io::Result<Snapshot> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let mut from = Summed { inner: BufReader::with_capacity(1 << 18, file), crc: 0 };
    let meta = head(&mut from)?;
    let mut left = bytes.saturating_sub(4 + from.read_so_far()?);
    let mut buffer = vec![0; 1 << 18];
    while left > 0 {
        let part = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        from.read_exact(&mut buffer[..part])?;
        left -= part as u64;
    }
    check_end(from)?;
    Ok(Snapshot { meta, snapshot: SnapshotFile { path: path.to_owned(), bytes } })
}

fn check_end(mut from: Summed<BufReader<File>>) -> io::Result<()> {
    let expected = from.crc;
    let mut end = Vec::new();
    from.inner.read_to_end(&mut end)?;
    if end != expected.to_le_bytes() {
        return Err(invalid("the snapshot's checksum is wrong, or it is cut off"));
    }
    Ok(())
}

/// Counts the checksum of what passes.
struct Summed<T> {
    inner: T,
    crc: u32,
}

impl Summed<BufReader<File>> {
    fn read_so_far(&mut self) -> io::Result<u64> {
        use std::io::Seek;
        self.inner.stream_position()
    }
}

impl<T: Write> Write for Summed<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.crc = crc32c::crc32c_append(self.crc, &bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T: Read> Read for Summed<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.crc = crc32c::crc32c_append(self.crc, &buffer[..read]);
        Ok(read)
    }
}
