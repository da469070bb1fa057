//! Small files that survive a power cut, and the errors of the disk.
//!
//! A file appears under its name complete or not at all: written beside it, synced, renamed over
//! it, and the directory synced, because a rename too lives in a page of its own (DESIGN 7).

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Why a data directory could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The file system refused.
    #[error("{}: {doing} failed: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// Another process, or an earlier node of this one, has it open.
    #[error(
        "{} is in use by process {pid} ({holder}); stop that one, or give this one a data \
         directory of its own",
        dir.display()
    )]
    InUse {
        /// The data directory.
        dir: PathBuf,
        /// The process that holds it; 0 where it did not say.
        pid: u32,
        /// What that process calls itself.
        holder: String,
    },
    /// It cannot be trusted: damaged, or behind what this node has acknowledged. A node must
    /// neither vote nor serve from it.
    #[error(
        "{} is quarantined: {why}; the node can rejoin under a new id, and the old state is kept \
         aside",
        dir.display()
    )]
    Quarantined {
        /// The data directory.
        dir: PathBuf,
        /// What was found.
        why: String,
    },
    /// A newer program wrote it; nothing of it is damaged.
    #[error(
        "{} holds the state of a newer version: {why}; install that version and start it here, it \
         goes on where that one stopped",
        dir.display()
    )]
    Newer {
        /// The data directory.
        dir: PathBuf,
        /// How that shows.
        why: String,
    },
    /// A file that tells who this node is cannot be read.
    #[error(
        "{}: {why}; restore the file, or move the directory away and join as a new node",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// It is another node's or another group's.
    #[error("{} belongs to {found}, not to {expected}; use the directory of {expected}", dir.display())]
    Foreign {
        /// The data directory.
        dir: PathBuf,
        /// Whose it is.
        found: String,
        /// Whose it should be.
        expected: String,
    },
}

impl OpenError {
    /// For `map_err`: names the path and what was tried.
    pub(crate) fn io(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, doing, source }
    }
}

/// Ends the process: what this node holds in memory and what is on its disk may differ from here
/// on, and a failed sync must not be tried again (the kernel has dropped the pages, DESIGN 7).
pub(crate) fn fatal(what: &str, error: &dyn std::fmt::Display) -> ! {
    tracing::error!(%error, "{what}; the process ends here rather than acknowledge what may be lost");
    eprintln!("botmesh: {what}: {error}; ending the process, nothing after this was acknowledged");
    std::process::abort()
}

/// Makes names in a directory durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Creates a directory and makes its name durable.
pub(crate) fn create_dir(dir: &Path) -> io::Result<()> {
    match fs::create_dir(dir) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => return Ok(()),
        Err(error) => return Err(error),
    }
    sync_dir(dir)?;
    dir.parent().map_or(Ok(()), |parent| {
        sync_dir(if parent.as_os_str().is_empty() { Path::new(".") } else { parent })
    })
}

/// Replaces a file's whole content, durably.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = beside(path);
    let mut file = File::create(&beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    rename(&beside, path)
}

/// Moves a synced file to its name, durably.
pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    sync_dir(to.parent().unwrap_or(Path::new(".")))
}

/// The name a file has while it is written.
pub(crate) fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    PathBuf::from(name)
}

/// Reads a file; `None` where there is none.
pub(crate) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
