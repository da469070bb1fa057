//! The data directory: whose it is, who has it open, and whether it may be used.
//!
//! Problem: Raft is safe only while a node remembers its vote and what it acknowledged. Two
//! processes on one directory, a directory restored from a backup, a wiped disk under an old id
//! and a damaged log all break that silently. Idea: the directory itself says no.
//!
//! ```text
//!   lock         flock of the process that has it open; its pid is the content
//!   process      tokens of that process and of dead ones before it (see `process`)
//!   identity     cluster, node id, name, peers: written once the group has admitted the node
//!   boot         how often it has been opened, and a nonce of this opening (DESIGN 2)
//!   quarantine   why it must not be used; there until the state was set aside
//!   peer-boots   the boots of other nodes, recorded before they are answered
//!   log.marker   how far sled has the log (see `marker`)
//!   log.tail     what was acknowledged last (see `log_store::tail`)
//!   log/ state/  sled: the log, and the last cut of the machine
//!   snapshots/   the current snapshot
//!   aside-N/     state that was set aside at boot N
//! ```
//!
//! Invariants: the boot counter is raised, and durable, before anything can be sent; `identity`
//! exists only if `log.marker` does, so a log that vanished is noticed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use uuid::Uuid;

use super::files::{self, OpenError};
use super::marker::Marker;
use super::process::Occupancy;
use crate::codec::{self, Kind};
use crate::outside;
use crate::types::{NodeId, ProcessToken};

/// How long an opening waits for an earlier node of the same process to let go: its last task may
/// outlive its shutdown by a moment.
const SAME_PROCESS_WAIT: Duration = Duration::from_secs(3);

/// Another member, as the identity file remembers it: whom a quarantined node asks to be taken in
/// again (SPEC K3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownPeer {
    /// Its id.
    pub node_id: NodeId,
    /// Its name.
    pub name: String,
    /// `host:port` of its cluster listener.
    pub address: String,
}

/// Who a data directory is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Minted once per group (SPEC K2).
    pub cluster_id: Uuid,
    /// Allocated by the group, never reused (SPEC K3).
    pub node_id: NodeId,
    /// The operator's name for the node.
    pub name: String,
    /// The other members, as last known.
    pub peers: Vec<KnownPeer>,
}

/// One opening of a data directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// How often it has been opened, this time included.
    pub counter: u64,
    /// Random, new at each opening: two copies of one directory differ in it.
    pub nonce: Uuid,
    /// Random, kept until the node has been admitted: a join that is asked twice is one join.
    pub join_nonce: Uuid,
}

/// A boot of another node that contradicts what this one has seen of it: its directory was
/// restored from a backup or copied, so it may have forgotten its vote.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "node {node_id} came with boot {found} after boot {known} was seen: its data directory was \
     restored or copied; wipe it and join as a new node"
)]
pub struct RestoredDirectory {
    /// The node.
    pub node_id: NodeId,
    /// The boot this node had recorded.
    pub known: u64,
    /// The boot that came.
    pub found: u64,
}

/// An open data directory. Clones share it; it is let go with the last one.
#[derive(Clone, Debug)]
pub struct DataDir {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    /// What `boot` holds. Setting state aside changes the join nonce of a running process.
    boot: Mutex<Boot>,
    /// What `identity` holds.
    identity: Mutex<Option<Identity>>,
    /// What `peer-boots` holds: (boot, nonce) by node.
    peer_boots: Mutex<BTreeMap<NodeId, (u64, Uuid)>>,
    /// Who has it open; there once a node runs on it.
    occupancy: Mutex<Option<Occupancy>>,
    /// Holds the flock for as long as anything of this directory is open.
    lock: Option<File>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let ended = self.occupancy.get_mut().take().map_or(Ok(()), |occupancy| occupancy.end());
        if let Err(error) = ended {
            // The next process would take this one for dead while it lives. It must not get in.
            tracing::error!(%error, dir = %self.root.display(), "the directory stays locked");
            std::mem::forget(self.lock.take());
        }
    }
}

impl DataDir {
    /// Opens, and where needed creates, a data directory, and raises its boot counter. `holder` is
    /// what another process that tries the same is told.
    ///
    /// A quarantined directory opens too: see [`DataDir::quarantined`]. Its log does not.
    pub fn open(root: &Path, holder: &str) -> Result<Self, OpenError> {
        fs::create_dir_all(root).map_err(OpenError::io(root, "creating the data directory"))?;
        files::create_dir(root).map_err(OpenError::io(root, "creating the data directory"))?;
        let lock = take_lock(root, holder)?;

        let boot_path = root.join("boot");
        let before: Option<Boot> = load(&boot_path, Kind::Boot)?;
        let identity: Option<Identity> = load(&root.join("identity"), Kind::Identity)?;
        if before.is_none() && identity.is_some() {
            return Err(OpenError::Damaged {
                path: boot_path,
                why: "the file is missing, so peers cannot tell this directory from an older \
                      copy of it"
                    .to_owned(),
            });
        }
        // While a state is being set aside the quarantine stamp is the last to go.
        if identity.is_none() && root.join("log").exists() && !root.join("quarantine").exists() {
            return Err(OpenError::Damaged {
                path: root.join("identity"),
                why: "the file is missing and the directory holds a log: a member's, which must \
                      neither found a group nor join one as if it were new"
                    .to_owned(),
            });
        }
        let boot = Boot {
            counter: before.map_or(1, |boot| boot.counter + 1),
            nonce: outside::uuid(),
            join_nonce: before.map_or_else(outside::uuid, |boot| boot.join_nonce),
        };
        store(&boot_path, Kind::Boot, &boot)?;

        let peer_boots = load(&root.join("peer-boots"), Kind::PeerBoots)?.unwrap_or_default();
        let inner = Inner {
            root: root.to_owned(),
            boot: Mutex::new(boot),
            identity: Mutex::new(identity),
            peer_boots: Mutex::new(peer_boots),
            occupancy: Mutex::new(None),
            lock: Some(lock),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.inner.root
    }

    /// This opening.
    pub fn boot(&self) -> Boot {
        *self.inner.boot.lock()
    }

    /// Opens it for a node that runs in this process.
    pub(crate) fn occupied(
        root: &Path,
        holder: &str,
        process: ProcessToken,
    ) -> Result<Self, OpenError> {
        let dir = Self::open(root, holder)?;
        dir.occupy(process)?;
        Ok(dir)
    }

    /// Records the process that has it open, which its successor will know to be dead.
    pub(crate) fn occupy(&self, process: ProcessToken) -> Result<(), OpenError> {
        let mut occupancy = self.inner.occupancy.lock();
        if let Some(lock) = &self.inner.lock {
            *occupancy = Some(Occupancy::begin(&self.inner.root, lock, process)?);
        }
        Ok(())
    }

    /// Processes that had it open, are certainly dead, and may not be known to be.
    pub(crate) fn predecessors(&self) -> Vec<ProcessToken> {
        let occupancy = self.inner.occupancy.lock();
        occupancy.as_ref().map_or_else(Vec::new, |occupancy| occupancy.predecessors.clone())
    }

    /// The group knows of their death.
    pub(crate) fn predecessors_declared(&self) -> Result<(), OpenError> {
        self.inner.occupancy.lock().as_mut().map_or(Ok(()), Occupancy::declared)
    }

    /// Who this was before its state was set aside, until a group has taken it in again. Such a
    /// directory is empty and yet not a new node's: it must not found a group (SPEC K2), and the
    /// group is to let its former self go.
    pub fn former(&self) -> Result<Option<Identity>, OpenError> {
        load(&self.inner.root.join("former"), Kind::Identity)
    }

    /// Who it is; `None` before a group has admitted it.
    pub fn identity(&self) -> Option<Identity> {
        self.inner.identity.lock().clone()
    }

    /// Why it must not be used, where that is so.
    pub fn quarantined(&self) -> Result<Option<String>, OpenError> {
        load(&self.inner.root.join("quarantine"), Kind::Quarantine)
    }

    /// Makes this the directory of a node that a group has admitted (or that founds one). The
    /// empty log's marker comes first: from the moment the identity is there, a missing log means
    /// a lost one.
    pub fn stamp(&self, identity: Identity) -> Result<(), OpenError> {
        let mut known = self.inner.identity.lock();
        if let Some(known) = known.as_ref()
            && (known.cluster_id, known.node_id) != (identity.cluster_id, identity.node_id)
        {
            return Err(OpenError::Foreign {
                dir: self.inner.root.clone(),
                found: format!("node {} of group {}", known.node_id, known.cluster_id),
                expected: format!("node {} of group {}", identity.node_id, identity.cluster_id),
            });
        }
        Marker::create(&self.inner.root)?;
        let root = &self.inner.root;
        store(&root.join("identity"), Kind::Identity, &identity)?;
        *known = Some(identity);
        // Afterwards only: in between it is a member already, and a member is not asked who it was.
        let former = root.join("former");
        match fs::remove_file(&former) {
            Ok(()) => files::sync_dir(root).map_err(OpenError::io(root, "syncing the directory")),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(OpenError::io(&former, "removing it")(error)),
        }
    }

    /// Records the other members, for the day this node has to ask them for help.
    pub fn remember_peers(&self, peers: Vec<KnownPeer>) -> Result<(), OpenError> {
        let mut known = self.inner.identity.lock();
        let Some(identity) = known.as_mut() else { return Ok(()) };
        if identity.peers == peers {
            return Ok(());
        }
        identity.peers = peers;
        store(&self.inner.root.join("identity"), Kind::Identity, identity)
    }

    /// Checks the boot another node shows against the ones seen of it, and records it durably:
    /// only then may that node be answered (DESIGN 2).
    pub fn meet(
        &self,
        node_id: NodeId,
        boot: u64,
        nonce: Uuid,
    ) -> Result<Result<(), RestoredDirectory>, OpenError> {
        let mut boots = self.inner.peer_boots.lock();
        if let Some(&(known, known_nonce)) = boots.get(&node_id) {
            if (boot, nonce) == (known, known_nonce) {
                return Ok(Ok(()));
            }
            if boot <= known {
                return Ok(Err(RestoredDirectory { node_id, known, found: boot }));
            }
        }
        boots.insert(node_id, (boot, nonce));
        store(&self.inner.root.join("peer-boots"), Kind::PeerBoots, &*boots)?;
        Ok(Ok(()))
    }

    /// Stamps the directory as not to be used. The stamp stays until [`DataDir::set_aside`].
    pub fn quarantine(&self, why: &str) -> Result<(), OpenError> {
        tracing::error!(dir = %self.inner.root.display(), why, "data directory quarantined");
        store(&self.inner.root.join("quarantine"), Kind::Quarantine, why)
    }

    /// Moves log, state, snapshots and identity out of the way, so that this directory can become
    /// a new node's; returns who it was. Nothing is deleted: an operator may want to look. Log and
    /// state must not be open.
    pub fn set_aside(&self) -> Result<Option<Identity>, OpenError> {
        let root = &self.inner.root;
        let mut boot = self.inner.boot.lock();
        let aside = root.join(format!("aside-{}", boot.counter));
        files::create_dir(&aside).map_err(OpenError::io(&aside, "creating the directory"))?;
        let was = self.inner.identity.lock().take();
        // Who it was is written down first, the quarantine stamp goes last and the identity before
        // the log: wherever this is cut off, the next opening is still quarantined, or sees no
        // identity and no log, and knows in either case that it is not a new node's.
        if let Some(was) = &was {
            store(&root.join("former"), Kind::Identity, was)?;
        }
        // The old nonce is the old member's: asking under it again would be answered with its id.
        boot.join_nonce = outside::uuid();
        store(&root.join("boot"), Kind::Boot, &*boot)?;
        for name in
            ["identity", "log", "state", "snapshots", "log.marker", "log.tail", "quarantine"]
        {
            let from = root.join(name);
            match fs::rename(&from, aside.join(name)) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(OpenError::io(&from, "setting it aside")(error)),
            }
            files::sync_dir(root).map_err(OpenError::io(root, "syncing the directory"))?;
        }
        Ok(was)
    }
}

/// Takes the flock, or says who has it.
fn take_lock(root: &Path, holder: &str) -> Result<File, OpenError> {
    let path = root.join("lock");
    let mut file = File::options()
        .create(true)
        .read(true)
        .write(true)
        .truncate(false)
        .open(&path)
        .map_err(OpenError::io(&path, "opening the lock"))?;
    let began = Instant::now();
    while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if error != rustix::io::Errno::WOULDBLOCK {
            return Err(OpenError::io(&path, "locking")(error.into()));
        }
        let text = fs::read_to_string(&path).unwrap_or_default();
        let (pid, who) = text.trim().split_once(' ').unwrap_or(("0", "unknown"));
        let pid = pid.parse().unwrap_or(0);
        if pid != std::process::id() || began.elapsed() > SAME_PROCESS_WAIT {
            return Err(OpenError::InUse { dir: root.to_owned(), pid, holder: who.to_owned() });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut write = || {
        file.set_len(0)?;
        file.write_all(format!("{} {holder}\n", std::process::id()).as_bytes())
    };
    write().map_err(OpenError::io(&path, "writing the lock"))?;
    Ok(file)
}

pub(super) fn load<T: DeserializeOwned>(path: &Path, kind: Kind) -> Result<Option<T>, OpenError> {
    let bytes = files::read(path).map_err(OpenError::io(path, "reading"))?;
    bytes
        .map(|bytes| codec::open(kind, &bytes))
        .transpose()
        .map_err(|error| OpenError::Damaged { path: path.to_owned(), why: error.to_string() })
}

pub(super) fn store<T: Serialize + ?Sized>(
    path: &Path,
    kind: Kind,
    value: &T,
) -> Result<(), OpenError> {
    files::replace(path, &codec::seal(kind, value)).map_err(OpenError::io(path, "writing"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(node_id: NodeId) -> Identity {
        Identity { cluster_id: Uuid::from_u128(7), node_id, name: "n1".into(), peers: Vec::new() }
    }

    /// Format 1 for ever: a change here makes data directories unreadable.
    #[test]
    fn golden_bytes_of_the_small_files() {
        let hex = |bytes: Vec<u8>| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let peer = KnownPeer { node_id: 9, name: "n9".into(), address: "h:1".into() };
        let known = Identity { peers: vec![peer], ..identity(4) };
        let boot = Boot { counter: 3, nonce: Uuid::from_u128(1), join_nonce: Uuid::from_u128(2) };
        let boots = BTreeMap::from([(2u64, (5u64, Uuid::from_u128(1)))]);
        let found = [
            hex(codec::seal(Kind::Identity, &known)),
            hex(codec::seal(Kind::Boot, &boot)),
            hex(codec::seal(Kind::PeerBoots, &boots)),
            hex(codec::seal(Kind::Quarantine, "why")),
        ];
        assert_eq!(
            found,
            [
                "626d01072c63e84e1000000000000000000000000000000007\
                 04026e310109026e3903683a31",
                "626d0108236347920310000000000000000000000000000000\
                 011000000000000000000000000000000002",
                "626d010e548264440102051000000000000000000000000000000001",
                "626d0109c6f19f1103776879",
            ]
        );
    }

    #[test]
    fn case_r14_a_second_opening_is_refused_and_names_the_holder() {
        let dir = tempfile::tempdir().unwrap();
        let first = DataDir::open(dir.path(), "n1").unwrap();
        // From another process it is refused at once; from this one, after a moment's patience.
        let error = DataDir::open(dir.path(), "n1").unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, OpenError::InUse { pid, .. } if pid == std::process::id()),
            "{text}"
        );
        assert!(text.contains(&format!("process {} (n1)", std::process::id())), "{text}");
        drop(first);
        DataDir::open(dir.path(), "n1").unwrap();
    }

    #[test]
    fn k3_every_opening_raises_the_boot_counter_and_changes_the_nonce() {
        let dir = tempfile::tempdir().unwrap();
        let mut before = DataDir::open(dir.path(), "n1").unwrap().boot();
        assert_eq!(before.counter, 1);
        for _ in 0..3 {
            let boot = DataDir::open(dir.path(), "n1").unwrap().boot();
            assert_eq!(boot.counter, before.counter + 1);
            assert_ne!(boot.nonce, before.nonce);
            assert_eq!(boot.join_nonce, before.join_nonce);
            before = boot;
        }
    }

    #[test]
    fn k3_an_identity_is_kept_and_not_overwritten_by_another() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::open(dir.path(), "n1").unwrap();
        assert_eq!(data.identity(), None);
        data.stamp(identity(4)).unwrap();
        let peer = KnownPeer { node_id: 9, name: "n9".into(), address: "h:1".into() };
        data.remember_peers(vec![peer.clone()]).unwrap();
        drop(data);

        let data = DataDir::open(dir.path(), "n1").unwrap();
        let known = data.identity().unwrap();
        assert_eq!((known.node_id, known.peers), (4, vec![peer]));
        assert!(matches!(data.stamp(identity(5)), Err(OpenError::Foreign { .. })));
    }

    #[test]
    fn k3_a_restored_or_copied_directory_shows_itself() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let data = DataDir::open(dir.path(), "n1").unwrap();
        data.meet(2, 5, one).unwrap().unwrap();
        data.meet(2, 5, one).unwrap().unwrap();
        data.meet(2, 5, two).unwrap().unwrap_err();
        data.meet(2, 4, one).unwrap().unwrap_err();
        data.meet(2, 6, two).unwrap().unwrap();
        drop(data);
        // It is remembered across a restart.
        let data = DataDir::open(dir.path(), "n1").unwrap();
        let refused = data.meet(2, 5, one).unwrap().unwrap_err();
        assert_eq!(refused, RestoredDirectory { node_id: 2, known: 6, found: 5 });
    }

    #[test]
    fn m4_a_quarantine_stays_until_the_state_was_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::open(dir.path(), "n1").unwrap();
        data.stamp(identity(4)).unwrap();
        let join_nonce = data.boot().join_nonce;
        data.quarantine("short log").unwrap();
        drop(data);

        let data = DataDir::open(dir.path(), "n1").unwrap();
        assert_eq!(data.quarantined().unwrap().as_deref(), Some("short log"));
        assert_eq!(data.set_aside().unwrap().unwrap().node_id, 4);
        let rejoining = data.boot().join_nonce;
        assert_ne!(rejoining, join_nonce, "at once, not only after the next opening");
        drop(data);

        // Until a group has taken it in, it knows who it was, and asks under the same nonce.
        let data = DataDir::open(dir.path(), "n1").unwrap();
        assert_eq!((data.quarantined().unwrap(), data.identity()), (None, None));
        assert_eq!(data.former().unwrap(), Some(identity(4)));
        assert_eq!(data.boot().join_nonce, rejoining);
        data.stamp(identity(11)).unwrap();
        assert_eq!(data.former().unwrap(), None);
    }

    #[test]
    fn a_damaged_identity_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::open(dir.path(), "n1").unwrap();
        data.stamp(identity(4)).unwrap();
        drop(data);
        let path = dir.path().join("identity");
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        let error = DataDir::open(dir.path(), "n1").unwrap_err();
        assert!(matches!(&error, OpenError::Damaged { path: named, .. } if *named == path));
    }
}
