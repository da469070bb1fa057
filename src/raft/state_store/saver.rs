//! The thread that writes cuts.
//!
//! Applying never touches the disk (DESIGN 7). Every now and then this thread takes what changed,
//! under the machine's lock but without encoding anything, and writes it at its own pace. Between
//! two cuts the log is the truth: a crash costs replaying it from the last cut.
//!
//! It writes in the background also to the scheduler: a cut of a busy node is a second of work, which
//! would be taken from the turns. What holds the machine's lock runs as everything else does.
//!
//! On a disk that is nearly full it waits, between two batches too: a cut can be done without, and the
//! room that is left is for the log.
//!
//! Nothing reads those records until a restart, so what a disk does to them meanwhile would be found
//! when they are needed. Hence the *scrub*: now and then they are all read again and compared with
//! the machine they were written from. What differs is written anew, from memory, which is the
//! authority.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use rustix::process::nice;
use tokio::sync::oneshot;

use super::Replica;
use super::disk::{CutAt, Disk};
use crate::machine::Frozen;
use crate::raft::files::fatal;
use crate::raft::identity::DataDir;
use crate::raft::types::LogId;

/// How much nicer what writes the state is: it gets a tenth of the share of what serves.
const BACKGROUND: i32 = 10;

/// A request to the saver.
pub(super) enum Ask {
    /// A cut, now.
    Cut(Option<oneshot::Sender<()>>),
    /// A cut, and the end.
    Close(oneshot::Sender<()>),
}

/// What scrubs have found.
#[derive(Debug, Default)]
pub(crate) struct Scrubs {
    /// How often all records were read.
    pub(crate) done: AtomicU64,
    /// How often they were not what had been written.
    pub(crate) faults: AtomicU64,
    /// The store is being closed: one that is under way is given up.
    pub(super) stop: Arc<AtomicBool>,
}

pub(super) struct Saver {
    pub(super) replica: Arc<RwLock<Replica>>,
    pub(super) disk: Disk,
    /// Where the last cut is.
    pub(super) flushed: Arc<Mutex<Option<LogId>>>,
    pub(super) every: Duration,
    pub(super) scrub_every: Duration,
    pub(super) scrubs: Arc<Scrubs>,
    pub(super) _dir: DataDir,
}

impl Saver {
    pub(super) fn run(mut self, asks: &Receiver<Ask>) {
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.serve(asks)));
        if ended.is_err() {
            fatal("the thread that saves the state panicked", &"see above");
        }
    }

    fn serve(&mut self, asks: &Receiver<Ask>) {
        let mut due = Instant::now() + self.every;
        let mut scrub_due = Instant::now() + self.scrub_every;
        loop {
            match asks.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(Ask::Cut(done)) => {
                    drop(self.cut(false, done.is_some()));
                    // Whoever asked may have gone.
                    let _ = done.map(|done| done.send(()));
                }
                Ok(Ask::Close(done)) => {
                    drop(self.cut(false, true));
                    let _ = done.send(());
                    return;
                }
                Err(RecvTimeoutError::Timeout) => drop(self.cut(false, false)),
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if Instant::now() >= scrub_due {
                self.scrub();
                scrub_due = Instant::now() + self.scrub_every;
            }
            due = Instant::now() + self.every;
        }
    }

    /// Brings the disk up to the machine, at once where somebody waits. To `scrub`, also answers the
    /// machine as it is there now.
    fn cut(&mut self, scrub: bool, hurry: bool) -> Option<(CutAt, Frozen)> {
        if self.disk.waits.is_short() {
            // What room is left is for the log. A restart replays more of it.
            return None;
        }
        let (at, changes, whole, frozen) = {
            let mut replica = self.replica.write();
            let at = CutAt {
                last_applied: replica.last_applied,
                membership: replica.membership.clone(),
            };
            if at.last_applied == *self.flushed.lock() && !replica.detached {
                return scrub.then(|| (at, replica.machine.freeze()));
            }
            replica.bytes_since_cut = 0;
            let changes = replica.machine.cut();
            // The records on disk are not what this machine grew from: they are replaced.
            let whole = std::mem::take(&mut replica.detached);
            let frozen = (whole || scrub).then(|| replica.machine.freeze());
            (at, changes, whole, frozen)
        };
        let last_applied = at.last_applied;
        let saved = self.writing(hurry, |disk| match &frozen {
            Some(frozen) if whole => disk.save_whole(frozen.records(), at.clone()),
            _ => disk.save(changes.records(), at.clone()),
        });
        if let Err(why) = saved {
            fatal("saving the state failed", &why);
        }
        *self.flushed.lock() = last_applied;
        frozen.map(|frozen| (at, frozen))
    }

    /// Works on the disk, behind everything else unless somebody waits for it. A thread of its own,
    /// because who has stepped back may not step forward again without privileges.
    fn writing<T: Send>(&mut self, hurry: bool, work: impl FnOnce(&mut Disk) -> T + Send) -> T {
        if hurry {
            return work(&mut self.disk);
        }
        // Where no thread can be had, it stays here to be done.
        let work = Mutex::new(Some(work));
        let disk = Mutex::new(&mut self.disk);
        let run = || work.lock().take().map(|work| work(&mut disk.lock()));
        let written = std::thread::scope(|scope| {
            let builder = std::thread::Builder::new().name("botmesh-save".to_owned());
            let behind = || {
                if let Err(error) = nice(BACKGROUND) {
                    tracing::debug!(%error, "the state is written at the usual priority");
                }
                run()
            };
            match builder.spawn_scoped(scope, behind).map(|thread| thread.join()) {
                Ok(Ok(written)) => written,
                Ok(Err(panic)) => std::panic::resume_unwind(panic),
                Err(error) => {
                    tracing::warn!(%error, "no thread to write the state behind everything else");
                    run()
                }
            }
        });
        written.expect("it is taken by the thread, or where there is none, here")
    }

    /// Reads all records again; what is not as it was written is written anew.
    pub(super) fn scrub(&mut self) {
        let Some((at, frozen)) = self.cut(true, false) else { return };
        let closing = self.scrubs.clone();
        let compared = self.writing(false, |disk| {
            let found = disk.hash(&closing.stop)?;
            Ok(found.map(|hash| hash == frozen.hash()))
        });
        let why = match compared {
            // Nobody waits for the end of a scrub.
            Ok(None) => return,
            Ok(Some(true)) => {
                self.scrubs.done.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Ok(_) => "records are missing, or older than what was written".to_owned(),
            Err(why) => why,
        };
        self.scrubs.done.fetch_add(1, Ordering::Relaxed);
        self.scrubs.faults.fetch_add(1, Ordering::Relaxed);
        tracing::error!(
            why,
            "the state on disk is not what this node wrote: it is written anew from memory; look at \
             the disk"
        );
        if let Err(why) = self.writing(false, |disk| disk.save_whole(frozen.records(), at)) {
            fatal("saving the state failed", &why);
        }
    }
}
