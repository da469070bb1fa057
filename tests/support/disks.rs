//! Disks that fill, fail and hang. They need root; where the machine forbids it, the reason comes
//! back and the test says SKIPPED.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

const MIB: u64 = 1 << 20;

/// A file system of its own in a file.
pub struct SmallDisk {
    /// Where it is mounted.
    pub at: PathBuf,
}

impl SmallDisk {
    /// Makes and mounts one below `root`, or says why that cannot be.
    pub fn mount(root: &Path, bytes: u64) -> Result<Self, String> {
        let (image, at) = (root.join("disk.image"), root.join("disk"));
        fs::File::create(&image).and_then(|file| file.set_len(bytes)).unwrap();
        fs::create_dir_all(&at).unwrap();
        let run = |command: &mut Command| {
            let done = command.output().map_err(|error| format!("{command:?}: {error}"))?;
            let said = String::from_utf8_lossy(&done.stderr).into_owned();
            if done.status.success() { Ok(()) } else { Err(format!("{command:?}: {said}")) }
        };
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&at))?;
        Ok(Self { at })
    }

    /// Writes until nothing more goes in; the file that does it.
    pub fn fill(&self) -> PathBuf {
        let path = self.at.join("junk");
        let file = fs::File::create(&path).unwrap();
        for piece in [8 * MIB, MIB, 4096] {
            loop {
                let at = file.metadata().unwrap().len();
                let flags = rustix::fs::FallocateFlags::empty();
                if rustix::fs::fallocate(&file, flags, at, piece).is_err() {
                    break;
                }
            }
        }
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
    }
}

/// `strace` that makes calls of a process fail or hang, until it is dropped.
pub struct Tampering {
    child: Child,
}

impl Tampering {
    /// Begins; `inject` is strace's own word for what is done to `fdatasync`.
    pub async fn attach(pid: u32, inject: &str, said: &Path) -> Result<Self, String> {
        let child = Command::new("strace")
            .args(["-f", "-qq", "-e", "trace=fdatasync", "-e", inject, "-o", "/dev/null"])
            .args(["-p", &pid.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(said).unwrap())
            .spawn()
            .map_err(|error| error.to_string())?;
        let mut tampering = Self { child };
        let tracer = || {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let line = status.lines().find(|line| line.starts_with("TracerPid:"));
            line.is_some_and(|line| !line.ends_with("\t0"))
        };
        let end = Instant::now() + Duration::from_secs(10);
        while !tracer() {
            if tampering.child.try_wait().unwrap().is_some() || Instant::now() > end {
                return Err(fs::read_to_string(said).unwrap_or_default());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(tampering)
    }
}

impl Drop for Tampering {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            let _ = kill_process(pid, Signal::INT);
        }
        let _ = self.child.wait();
    }
}
