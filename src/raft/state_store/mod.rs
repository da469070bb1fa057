//! The machine, fed by the log.
//!
//! Problem: the machine must answer tens of thousands of commands a second, and be there again
//! after a crash. Idea: it lives in memory and is the authority; the log on disk is the truth it
//! can be rebuilt from; and a *cut* of it on disk, written now and then by another thread, and the
//! snapshot file, shorten the rebuilding.
//!
//! ```text
//!   committed entries ──► apply: lock · machine · unlock ──► hook: answers, effects
//!                            │ sometimes                ╲──► applied (watch)
//!                            ▼
//!                  cut → state/      freeze → snapshots/ and the hashes of state marks
//! ```
//!
//! Invariants:
//! - While applying, nothing is read from or written to the disk.
//! - A cut, a snapshot and a mark are of the state between two entries.
//! - A restart begins from the newer of cut and snapshot; openraft purges the log only up to a
//!   snapshot, which is synced before it is announced, so the log reaches back far enough. Where it
//!   does not, the node is quarantined.
//! - The hook hears of every entry this node applies once, in log order, before the next one is
//!   applied.

mod batching;
mod disk;
mod saver;
mod staged;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use openraft::storage::{EntryResponder, RaftSnapshotBuilder, RaftStateMachine};
use openraft::{EntryPayload, OptionalSend};
use parking_lot::{Mutex, RwLock};
use tokio::sync::oneshot;

use super::files::OpenError;
use super::identity::DataDir;
use super::log_store::LogStore;
use super::room::Room;
use super::snapshot::{self, Snapshot, Snapshots};
use super::types::{
    Applied, LogId, Proposal, SnapshotFile, SnapshotMeta, StoredMembership, TypeConfig,
};
use super::{ApplyHook, StateMark};
use crate::codec::{self, Kind};
use crate::machine::{Batch, Effect, Frozen, LEVEL, Machine};
use crate::outside;
use crate::watch;
use batching::Waits;
use disk::{CutAt, Disk};
use saver::{Ask, Saver, Scrubs};

/// State marks kept.
const MARKS_MAX: usize = 8;

/// Settings of a state store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateOptions {
    /// Time between two cuts.
    pub(crate) cut_every: Duration,
    /// Bytes of log between two cuts, where that comes first.
    pub(crate) cut_bytes: u64,
    /// Time between two readings of all that is on disk.
    pub(crate) scrub_every: Duration,
    /// sled's cache.
    pub(crate) cache_bytes: u64,
    /// The level of commands that are understood.
    pub(crate) level: u32,
    /// Whether there are cuts at all; without, a restart begins from the last snapshot.
    pub(crate) cuts: bool,
}

impl Default for StateOptions {
    fn default() -> Self {
        Self {
            cut_every: Duration::from_secs(30),
            cut_bytes: 64 << 20,
            scrub_every: Duration::from_secs(60 * 60),
            cache_bytes: 8 << 20,
            level: LEVEL,
            cuts: true,
        }
    }
}

/// The machine and where in the log it stands.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) machine: Machine,
    pub(crate) last_applied: Option<LogId>,
    pub(crate) membership: StoredMembership,
    /// Log bytes applied since the last cut.
    bytes_since_cut: u64,
    /// The records on disk belong to another state: the next cut writes all of them.
    detached: bool,
}

impl Replica {
    fn empty() -> Self {
        Self {
            machine: Machine::default(),
            last_applied: None,
            membership: StoredMembership::default(),
            bytes_since_cut: 0,
            detached: true,
        }
    }
}

/// A state in memory. It outlives the store and keeps nothing of the directory.
#[derive(Clone, Debug)]
pub(crate) struct Memory(Arc<RwLock<Replica>>);

impl Memory {
    /// The state of a node that belongs to no group.
    pub(crate) fn empty() -> Self {
        Self(Arc::new(RwLock::new(Replica::empty())))
    }

    /// Reads the machine.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&Machine) -> T) -> T {
        look(&self.0.read().machine)
    }
}

/// The state store. Clones share it; the last one closes it.
#[derive(Clone, Debug)]
pub(crate) struct StateStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Read by everybody, written by apply (one entry at a time), by cuts (for an instant) and by
    /// the installation of a snapshot.
    replica: Arc<RwLock<Replica>>,
    applied: watch::Sender<Option<LogId>>,
    /// Whether a session has ended that still leaves something.
    ending: watch::Sender<bool>,
    hook: Arc<dyn ApplyHook>,
    /// The last ones, oldest first.
    marks: Arc<Mutex<VecDeque<StateMark>>>,
    snapshots: Arc<Snapshots>,
    #[cfg(test)]
    flushed: Arc<Mutex<Option<LogId>>>,
    cut_bytes: u64,
    level: u32,
    /// Set once it met what a newer program wrote: from then on it applies nothing.
    halted: watch::Sender<Option<String>>,
    scrubs: Arc<Scrubs>,
    waits: Waits,
    /// Set to `None` to close.
    asks: Mutex<Option<mpsc::Sender<Ask>>>,
    saver: Mutex<Option<JoinHandle<()>>>,
    _dir: DataDir,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.scrubs.stop.store(true, Ordering::Relaxed);
        self.asks.lock().take();
        if let Some(saver) = self.saver.lock().take() {
            // A panic of the saver has ended the process already.
            let _ = saver.join();
        }
    }
}

impl StateStore {
    /// Opens the state of a data directory whose log is open. Blocking.
    pub(crate) fn open(
        dir: &DataDir,
        log: &LogStore,
        options: StateOptions,
        hook: Arc<dyn ApplyHook>,
        room: Option<Arc<Room>>,
    ) -> Result<Self, OpenError> {
        let root = dir.root();
        let snapshots = Snapshots::open(root)?;
        let opened = options.cuts.then(|| open_disk(dir, options.cache_bytes)).transpose()?;
        let (disk, found) = opened.map_or((None, None), |(disk, found)| (Some(disk), found));
        let flushed = found.as_ref().and_then(|(at, _)| at.last_applied);
        let replica = newest(root, found, &snapshots)?;

        let purged = log.last_purged().map(|purged| purged.index);
        if purged > replica.last_applied.map(|applied| applied.index) {
            return Err(OpenError::Quarantined {
                dir: root.to_owned(),
                why: format!(
                    "the state is as of entry {}, and the log begins only after entry {}",
                    replica.last_applied.map_or(0, |applied| applied.index),
                    purged.unwrap_or(0)
                ),
            });
        }

        let (applied, _) = watch::channel(replica.last_applied);
        let (ending, _) = watch::channel(replica.machine.is_ending());
        hook.installed(&replica.machine);
        let replica = Arc::new(RwLock::new(replica));
        let flushed = Arc::new(Mutex::new(flushed));
        let (asks, asked) = mpsc::channel();
        let scrubs = Arc::new(Scrubs::default());
        let waits = Waits { room, closing: scrubs.stop.clone() };
        let saver = disk.map(|mut disk| {
            disk.waits = waits.clone();
            let saver = Saver {
                replica: replica.clone(),
                disk,
                flushed: flushed.clone(),
                every: options.cut_every,
                scrub_every: options.scrub_every,
                scrubs: scrubs.clone(),
                _dir: dir.clone(),
            };
            std::thread::Builder::new()
                .name("botmesh-state".to_owned())
                .spawn(move || saver.run(&asked))
                .map_err(OpenError::io(root, "starting the state's thread"))
        });
        let saver = saver.transpose()?;
        let shared = Shared {
            replica,
            applied,
            ending,
            hook,
            marks: Arc::default(),
            snapshots: Arc::new(snapshots),
            #[cfg(test)]
            flushed,
            cut_bytes: options.cut_bytes,
            level: options.level,
            halted: watch::channel(None).0,
            scrubs,
            waits,
            asks: Mutex::new(saver.is_some().then_some(asks)),
            saver: Mutex::new(saver),
            _dir: dir.clone(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Reads the machine. Short: applies wait meanwhile.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&Machine) -> T) -> T {
        look(&self.shared.replica.read().machine)
    }

    /// Up to where the newest snapshot goes, and how many bytes it has.
    pub(crate) fn snapshot(&self) -> Option<(u64, u64)> {
        let current = self.shared.snapshots.current()?;
        Some((current.meta.last_log_id?.index, current.snapshot.bytes))
    }

    /// The state without the store.
    pub(crate) fn memory(&self) -> Memory {
        Memory(self.shared.replica.clone())
    }

    /// The last entry applied.
    #[cfg(test)]
    pub(crate) fn last_applied(&self) -> Option<LogId> {
        *self.shared.applied.borrow()
    }

    /// Tells whenever entries were applied: what a barrier waits on.
    pub(crate) fn applied(&self) -> watch::Receiver<Option<LogId>> {
        self.shared.applied.subscribe()
    }

    /// Tells whether a session has ended that still leaves something, for entries to come to free.
    pub(crate) fn ending(&self) -> watch::Receiver<bool> {
        self.shared.ending.subscribe()
    }

    fn tell_ending(&self, now: bool) {
        self.shared.ending.send_if_modified(|ending| std::mem::replace(ending, now) != now);
    }

    /// Hashes of the state at recent marks (SPEC N4), oldest first.
    pub(crate) fn marks(&self) -> Vec<StateMark> {
        self.shared.marks.lock().iter().copied().collect()
    }

    /// Up to where the state on disk has come.
    #[cfg(test)]
    pub(crate) fn flushed_cut(&self) -> Option<LogId> {
        *self.shared.flushed.lock()
    }

    /// Cuts now, and returns when the cut is durable.
    #[cfg(test)]
    pub(crate) async fn cut(&self) {
        let (done, cut) = oneshot::channel();
        self.ask(Ask::Cut(Some(done)));
        // A closed store has made its last cut.
        let _ = cut.await;
    }

    /// Makes a last cut and closes.
    pub(crate) async fn close(&self) {
        let (done, closed) = oneshot::channel();
        self.shared.scrubs.stop.store(true, Ordering::Relaxed);
        self.ask(Ask::Close(done));
        let _ = closed.await;
        self.shared.asks.lock().take();
        let saver = self.shared.saver.lock().take();
        if let Some(saver) = saver {
            let joined = tokio::task::spawn_blocking(move || saver.join()).await;
            if !matches!(joined, Ok(Ok(()))) {
                tracing::error!("the state's thread did not end by itself");
            }
        }
    }

    fn ask(&self, ask: Ask) {
        if let Some(asks) = &*self.shared.asks.lock() {
            // The receiver lives until it has answered `Close`.
            let _ = asks.send(ask);
        }
    }

    /// Applies one entry that holds commands.
    fn apply_batch(&self, log_id: LogId, proposal: &Proposal) -> io::Result<()> {
        let batch = self.understand(log_id, proposal)?;
        let mut effects = Vec::new();
        let (reply, marked, ending) = {
            let mut replica = self.shared.replica.write();
            let reply = replica.machine.apply(log_id.index, &batch, &mut effects);
            replica.last_applied = Some(log_id);
            let marked = effects.contains(&Effect::Mark).then(|| replica.machine.freeze());
            self.count(&mut replica, proposal.0.len());
            (reply, marked, replica.machine.is_ending())
        };
        self.tell_ending(ending);
        if let Some(frozen) = marked {
            self.mark(log_id.index, frozen);
        }
        self.shared.hook.applied(log_id.index, &batch, reply, effects);
        Ok(())
    }

    /// Decodes an entry. A committed one that this program does not understand is never passed over,
    /// and nothing here is damaged either: the node halts until it is started as a newer version.
    fn understand(&self, log_id: LogId, proposal: &Proposal) -> io::Result<Batch> {
        let known = self.shared.level;
        let why = match codec::open::<Batch>(Kind::Batch, &proposal.0) {
            Ok(batch) if batch.level() <= known => return Ok(batch),
            Ok(batch) => format!("it needs level {}", batch.level()),
            Err(error) => error.to_string(),
        };
        Err(self.halt(format!(
            "committed entry {} (term {}) is not understood: {why}; this program knows commands up \
             to level {known}. Install the newer version that the rest of the group runs and start \
             it on the same directory: nothing was passed over, and it goes on from there",
            log_id.index, log_id.leader_id.term
        )))
    }

    /// Takes part no longer.
    fn halt(&self, why: String) -> io::Error {
        tracing::error!("halted: {why}");
        self.shared.halted.send_replace(Some(why.clone()));
        io::Error::new(io::ErrorKind::InvalidData, why)
    }

    /// Why it applies nothing any more, where that is so.
    pub(crate) fn halted(&self) -> Option<String> {
        self.shared.halted.borrow().clone()
    }

    /// How often the records on disk were read again, and how often they were not what had been
    /// written.
    pub(crate) fn scrubbed(&self) -> (u64, u64) {
        let Scrubs { done, faults, .. } = &*self.shared.scrubs;
        (done.load(Ordering::Relaxed), faults.load(Ordering::Relaxed))
    }

    /// Tells when it halts.
    pub(crate) fn watch_halted(&self) -> watch::Receiver<Option<String>> {
        self.shared.halted.subscribe()
    }

    /// Counts what was applied, and asks for a cut when it is enough.
    fn count(&self, replica: &mut Replica, bytes: usize) {
        let before = replica.bytes_since_cut;
        replica.bytes_since_cut = before.saturating_add(bytes as u64 + 64);
        if before < self.shared.cut_bytes && replica.bytes_since_cut >= self.shared.cut_bytes {
            self.ask(Ask::Cut(None));
        }
    }

    /// Hashes a state beside the applies that follow.
    fn mark(&self, index: u64, frozen: Frozen) {
        let marks = self.shared.marks.clone();
        // It only writes into memory it shares.
        outside::aside(move || {
            let mark = StateMark { index, hash: frozen.hash() };
            let mut marks = marks.lock();
            let at = marks.partition_point(|known| known.index < index);
            marks.insert(at, mark);
            while marks.len() > MARKS_MAX {
                marks.pop_front();
            }
        });
    }

    fn snapshot_meta(&self) -> (SnapshotMeta, Frozen) {
        let replica = self.shared.replica.read();
        let meta = SnapshotMeta {
            last_log_id: replica.last_applied,
            last_membership: replica.membership.clone(),
        };
        (meta, replica.machine.freeze())
    }
}

/// Opens the records on disk; where they are damaged they are set aside, since snapshot and log may
/// make up for them.
fn open_disk(
    dir: &DataDir,
    cache_bytes: u64,
) -> Result<(Disk, Option<(CutAt, Machine)>), OpenError> {
    let root = dir.root();
    match Disk::open(root, cache_bytes)? {
        Ok(opened) => Ok((opened.disk, opened.state)),
        Err(why) => {
            let state = root.join("state");
            let aside = root.join(format!("state-damaged-{}", dir.boot().counter));
            tracing::error!(why, aside = %aside.display(), "damaged state set aside");
            super::files::rename(&state, &aside)
                .map_err(OpenError::io(&state, "setting it aside"))?;
            let opened = Disk::open(root, cache_bytes)?.map_err(|why| OpenError::Quarantined {
                dir: root.to_owned(),
                why: format!("state/: {why}"),
            })?;
            Ok((opened.disk, opened.state))
        }
    }
}

/// The state to begin from: the newer of cut and snapshot.
fn newest(
    root: &Path,
    cut: Option<(CutAt, Machine)>,
    snapshots: &Snapshots,
) -> Result<Replica, OpenError> {
    let cut_at = cut.as_ref().and_then(|(at, _)| at.last_applied);
    if let Some(snapshot) = snapshots.current()
        && snapshot.meta.last_log_id > cut_at
    {
        match snapshot::load(&snapshot.snapshot.path) {
            Ok((meta, machine)) => {
                return Ok(Replica {
                    machine,
                    last_applied: meta.last_log_id,
                    membership: meta.last_membership,
                    bytes_since_cut: 0,
                    detached: true,
                });
            }
            Err(error) if snapshot::is_newer(&error) => {
                return Err(OpenError::Newer { dir: root.to_owned(), why: error.to_string() });
            }
            Err(error) => tracing::error!(%error, "the snapshot could not be loaded"),
        }
    }
    Ok(match cut {
        Some((at, machine)) => Replica {
            machine,
            last_applied: at.last_applied,
            membership: at.membership,
            bytes_since_cut: 0,
            detached: false,
        },
        None => Replica::empty(),
    })
}

impl RaftStateMachine<TypeConfig> for StateStore {
    type SnapshotData = SnapshotFile;
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> io::Result<(Option<LogId>, StoredMembership)> {
        let replica = self.shared.replica.read();
        Ok((replica.last_applied, replica.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> io::Result<()>
    where
        S: Stream<Item = Result<EntryResponder<TypeConfig>, io::Error>> + Unpin + OptionalSend,
    {
        while let Some(next) = entries.next().await {
            let (entry, responder) = next?;
            let log_id = entry.log_id;
            match entry.payload {
                EntryPayload::Normal(proposal) => self.apply_batch(log_id, &proposal)?,
                EntryPayload::Blank => self.shared.replica.write().last_applied = Some(log_id),
                EntryPayload::Membership(membership) => {
                    let mut replica = self.shared.replica.write();
                    replica.last_applied = Some(log_id);
                    replica.membership = StoredMembership::new(Some(log_id), membership);
                }
            }
            self.shared.applied.send_replace(Some(log_id));
            if let Some(responder) = responder {
                responder.send(Applied);
            }
        }
        Ok(())
    }

    async fn try_create_snapshot_builder(&mut self, _force: bool) -> Option<Builder> {
        Some(self.get_snapshot_builder().await)
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        let (meta, state) = self.snapshot_meta();
        let (snapshots, waits) = (self.shared.snapshots.clone(), self.shared.waits.clone());
        Builder { snapshots, waits, meta, state }
    }

    async fn install_snapshot(
        &mut self,
        meta: &SnapshotMeta,
        snapshot: SnapshotFile,
    ) -> io::Result<()> {
        let (snapshots, waits) = (self.shared.snapshots.clone(), self.shared.waits.clone());
        let installing = meta.clone();
        let install = move || waits.write(|| snapshots.install(&installing, &snapshot));
        let machine = outside::off_thread(install).await.map_err(io::Error::other)?;
        let machine = machine.map_err(|error| match snapshot::is_newer(&error) {
            true => self.halt(format!(
                "the leader's snapshot is not understood: {error}. Install the newer version that \
                 the rest of the group runs and start it on the same directory"
            )),
            false => error,
        })?;
        let ending = machine.is_ending();
        let before = {
            let mut replica = self.shared.replica.write();
            replica.last_applied = meta.last_log_id;
            replica.membership = meta.last_membership.clone();
            // Until the whole of it is on disk, a restart begins from the snapshot file.
            replica.detached = true;
            std::mem::replace(&mut replica.machine, machine)
        };
        // Freeing a large state takes a while, and nobody should wait for it.
        outside::aside(move || drop(before));
        self.tell_ending(ending);
        self.shared.applied.send_replace(meta.last_log_id);
        self.shared.hook.installed(&self.shared.replica.read().machine);
        self.ask(Ask::Cut(None));
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<Snapshot>> {
        Ok(self.shared.snapshots.current())
    }
}

/// A state held still, on its way into a file.
#[derive(Debug)]
pub(crate) struct Builder {
    snapshots: Arc<Snapshots>,
    waits: Waits,
    meta: SnapshotMeta,
    state: Frozen,
}

impl RaftSnapshotBuilder<TypeConfig> for Builder {
    type SnapshotData = SnapshotFile;

    async fn build_snapshot(&mut self) -> io::Result<Snapshot> {
        let (snapshots, waits) = (self.snapshots.clone(), self.waits.clone());
        let (meta, state) = (self.meta.clone(), self.state.clone());
        outside::off_thread(move || waits.write(|| snapshots.build(&meta, &state)))
            .await
            .map_err(io::Error::other)?
    }
}
