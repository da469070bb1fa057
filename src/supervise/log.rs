//! A log file with a bound: at [`BYTES_MAX`] it becomes `FILE.1` and a new one begins, so a node
//! takes at most twice that, however long it runs.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The most one file holds.
pub(super) const BYTES_MAX: u64 = 8 * 1024 * 1024;

#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl LogFile {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, bytes })
    }

    /// Appends a line. A full disk costs log lines, never the node: errors are passed over.
    pub(super) fn write(&mut self, line: &[u8]) {
        if self.bytes + line.len() as u64 > BYTES_MAX {
            let _ = self.rotate();
        }
        if self.file.write_all(line).is_ok() {
            self.bytes += line.len() as u64;
        }
    }

    fn rotate(&mut self) -> io::Result<()> {
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        std::fs::rename(&self.path, old)?;
        self.file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        self.bytes = 0;
        Ok(())
    }
}
