//! This node's process, its predecessor, and the parent that watches it (SPEC E6).
//!
//! A process that opens a data directory holds a lock on it until it ends. So the next one to get
//! the lock knows that the process before it is dead, and with it the bot that opened sessions in
//! that process: it says so to the group, and after a cold restart no chat is mute for a lease.
//! Sessions that other programs opened through this node carry no token and are left alone.
//!
//! "Knows" has conditions, because a false report would let two replicas act. The lock tells nothing
//! where the directory is a copy (its original may be in use elsewhere), where it moved to another
//! machine, or where the process let it go without ending. Hence the record names the machine's
//! boot and the lock file itself, a copy of which is another file, and it is removed before the lock
//! is let go.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use openraft::async_runtime::WatchReceiver;
use serde::{Deserialize, Serialize};

use super::files::OpenError;
use super::identity::{load, store};
use super::member::Member;
use super::node::Inner;
use crate::codec::Kind;
use crate::group::{ExecuteError, Unavailable};
use crate::machine::Command;
use crate::supervise::Contacts;
use crate::types::ProcessToken;

/// Dead processes named at one start: those whose successors, too, died before the group had a
/// quorum to hear of them.
const PREDECESSORS_MAX: usize = 8;
/// How long one report of a death is waited for before it is made again.
const DECLARE_WITHIN: Duration = Duration::from_secs(5);
/// Between two such attempts.
const AGAIN: Duration = Duration::from_millis(200);

/// Which lock: on which machine, since when it runs, which file. Equal only where the lock that is
/// held now is the very lock that was held then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    machine_boot: String,
    device: u64,
    inode: u64,
}

/// What the file `process` holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    place: Place,
    /// The process that has the directory open, last, and before it dead ones the group may not
    /// have heard of.
    tokens: Vec<ProcessToken>,
}

/// The processes of a data directory.
#[derive(Debug)]
pub(crate) struct Occupancy {
    path: PathBuf,
    place: Place,
    own: ProcessToken,
    /// Dead for certain.
    pub(crate) predecessors: Vec<ProcessToken>,
}

impl Occupancy {
    /// Records this process as the one that has the directory open. `lock` is held by it.
    pub(crate) fn begin(root: &Path, lock: &File, own: ProcessToken) -> Result<Self, OpenError> {
        let path = root.join("process");
        let place = place(lock).map_err(OpenError::io(&path, "finding out which lock is held"))?;
        // Damaged, it proves nothing; that is no reason not to start.
        let before: Option<Record> = load(&path, Kind::Process).unwrap_or_else(|error| {
            tracing::warn!(%error, "the process before this one is not known");
            None
        });
        let mut predecessors = match before {
            Some(record) if record.place == place && !place.machine_boot.is_empty() => {
                record.tokens
            }
            _ => Vec::new(),
        };
        predecessors.retain(|token| *token != own);
        let surplus = predecessors.len().saturating_sub(PREDECESSORS_MAX);
        predecessors.drain(..surplus);
        let occupancy = Self { path, place, own, predecessors };
        occupancy.store()?;
        Ok(occupancy)
    }

    fn store(&self) -> Result<(), OpenError> {
        let tokens = self.predecessors.iter().copied().chain([self.own]).collect();
        let record = Record { place: self.place.clone(), tokens };
        store(&self.path, Kind::Process, &record)
    }

    /// The group knows of the dead.
    pub(crate) fn declared(&mut self) -> Result<(), OpenError> {
        self.predecessors.clear();
        self.store()
    }

    /// This process lets the directory go and lives on: nobody may take it for dead. Fails where
    /// the record is still there; then the lock must stay.
    pub(crate) fn end(&self) -> io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

fn place(lock: &File) -> io::Result<Place> {
    let file = lock.metadata()?;
    // Where it cannot be read, nothing is certain.
    let machine_boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let machine_boot = machine_boot.trim().to_owned();
    Ok(Place { machine_boot, device: file.dev(), inode: file.ino() })
}

/// Starts what a member does about processes.
pub(crate) fn spawn(inner: &Arc<Inner>, member: &Arc<Member>) {
    let declare = declare_predecessors(inner.clone(), member.clone());
    let introduce = introduce(inner.clone(), member.clone());
    let stop = inner.stop.clone();
    inner.tasks.spawn(async move {
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            _ = futures_util::future::join(declare, introduce) => {}
        }
    });
}

/// Declares the processes dead that had this directory open, until the group has heard it.
async fn declare_predecessors(inner: Arc<Inner>, member: Arc<Member>) {
    let Ok(dir) = inner.dir() else { return };
    let predecessors = dir.predecessors();
    for process in &predecessors {
        while let Err(error) = declare(&member, *process, DECLARE_WITHIN).await {
            tracing::debug!(%process, %error, "its death is not committed yet");
            tokio::time::sleep(AGAIN).await;
        }
        tracing::info!(%process, "the process before this one is dead; the group knows");
    }
    if !predecessors.is_empty()
        && let Ok(Err(error)) =
            crate::outside::off_thread(move || dir.predecessors_declared()).await
    {
        tracing::debug!(%error, "the dead will be declared once more");
    }
}

/// Returns once the group has committed that a process is dead. Where the outcome is unknown, asking
/// again does no harm.
pub(crate) async fn declare(
    member: &Member,
    process: ProcessToken,
    within: Duration,
) -> Result<(), Unavailable> {
    let deadline = member.clock.now() + within;
    let command = Command::DeclareDead { process };
    let asked = member.proposals.execute(command, None, deadline, || member.hindrance());
    match asked.await {
        Ok(_) => Ok(()),
        Err(ExecuteError::NotExecuted(why) | ExecuteError::OutcomeUnknown(why)) => Err(why),
    }
}

/// Keeps the supervisor informed of whom to tell when this process has died.
async fn introduce(inner: Arc<Inner>, member: Arc<Member>) {
    let Some(link) = inner.link.clone() else { return };
    let mut metrics = member.raft.server_metrics();
    loop {
        link.introduce(Contacts {
            secret: inner.options.secret.reveal().to_owned(),
            own: inner.options.advertise.clone(),
            peers: member.known_peers().into_iter().map(|peer| peer.address).collect(),
        });
        if metrics.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;
    use crate::raft::DataDir;

    const ONE: ProcessToken = ProcessToken(1);
    const TWO: ProcessToken = ProcessToken(2);

    /// A directory whose process was killed: its record stays behind. The next opening of the same
    /// lock file finds it.
    fn killed(root: &Path, token: ProcessToken) -> Vec<u8> {
        let dir = DataDir::open(root, "n1").unwrap();
        dir.occupy(token).unwrap();
        let record = fs::read(root.join("process")).unwrap();
        drop(dir);
        fs::write(root.join("process"), &record).unwrap();
        record
    }

    #[test]
    fn e6_the_next_process_on_a_directory_knows_the_dead_one() {
        let root = tempfile::tempdir().unwrap();
        killed(root.path(), ONE);
        let dir = DataDir::open(root.path(), "n1").unwrap();
        dir.occupy(TWO).unwrap();
        assert_eq!(dir.predecessors(), [ONE]);

        // Killed before the group heard of it, its successor still says so; afterwards no more.
        let record = fs::read(root.path().join("process")).unwrap();
        drop(dir);
        fs::write(root.path().join("process"), record).unwrap();
        let dir = DataDir::open(root.path(), "n1").unwrap();
        dir.occupy(ProcessToken(3)).unwrap();
        assert_eq!(dir.predecessors(), [ONE, TWO]);
        dir.predecessors_declared().unwrap();
        assert_eq!(dir.predecessors(), []);
        let record = fs::read(root.path().join("process")).unwrap();
        drop(dir);
        fs::write(root.path().join("process"), record).unwrap();
        let dir = DataDir::open(root.path(), "n1").unwrap();
        dir.occupy(ProcessToken(4)).unwrap();
        assert_eq!(dir.predecessors(), [ProcessToken(3)]);
    }

    #[test]
    fn e6_who_let_the_directory_go_and_lives_is_not_taken_for_dead() {
        let root = tempfile::tempdir().unwrap();
        let dir = DataDir::open(root.path(), "n1").unwrap();
        dir.occupy(ONE).unwrap();
        drop(dir);
        let dir = DataDir::open(root.path(), "n1").unwrap();
        dir.occupy(TWO).unwrap();
        assert_eq!(dir.predecessors(), []);
    }

    #[test]
    fn e6_a_copied_directory_or_another_machine_proves_nothing() {
        let (root, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let record = killed(root.path(), ONE);
        for name in ["lock", "boot", "process"] {
            fs::copy(root.path().join(name), copy.path().join(name)).unwrap();
        }
        let dir = DataDir::open(copy.path(), "n1").unwrap();
        dir.occupy(TWO).unwrap();
        assert_eq!(dir.predecessors(), [], "the original may be in use");

        let mut moved: Record = codec::open(Kind::Process, &record).unwrap();
        moved.place.machine_boot = "00000000-0000-0000-0000-000000000000".to_owned();
        fs::write(root.path().join("process"), codec::seal(Kind::Process, &moved)).unwrap();
        let dir = DataDir::open(root.path(), "n1").unwrap();
        dir.occupy(TWO).unwrap();
        assert_eq!(dir.predecessors(), []);
    }

    /// Format 1 for ever: a change here makes data directories unreadable.
    #[test]
    fn golden_bytes_of_the_process_file() {
        let place = Place { machine_boot: "b".into(), device: 1, inode: 2 };
        let bytes = codec::seal(Kind::Process, &Record { place, tokens: vec![ONE, TWO] });
        let hex: String = bytes[codec::HEADER_BYTES..].iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!((bytes[3], hex.as_str()), (15, "01620102020102"));
    }
}
