//! The thread that writes cuts.
//!
//! Applying never touches the disk (DESIGN 7). Every now and then this thread takes what changed,
//! under the machine's lock but without encoding anything, and writes it at its own pace. Between
//! two cuts the log is the truth: a crash costs replaying it from the last cut.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use tokio::sync::oneshot;

use super::Replica;
use super::disk::{CutAt, Disk};
use crate::raft::files::fatal;
use crate::raft::identity::DataDir;
use crate::raft::types::LogId;

/// A request to the saver.
pub(super) enum Ask {
    /// A cut, now.
    Cut(Option<oneshot::Sender<()>>),
    /// A cut, and the end.
    Close(oneshot::Sender<()>),
}

pub(super) struct Saver {
    pub(super) replica: Arc<RwLock<Replica>>,
    pub(super) disk: Disk,
    /// Where the last cut is.
    pub(super) flushed: Arc<Mutex<Option<LogId>>>,
    pub(super) every: Duration,
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
        loop {
            match asks.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(Ask::Cut(done)) => {
                    self.cut();
                    // Whoever asked may have gone.
                    let _ = done.map(|done| done.send(()));
                }
                Ok(Ask::Close(done)) => {
                    self.cut();
                    let _ = done.send(());
                    return;
                }
                Err(RecvTimeoutError::Timeout) => self.cut(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
            due = Instant::now() + self.every;
        }
    }

    fn cut(&mut self) {
        let (at, changes, whole) = {
            let mut replica = self.replica.write();
            let at = CutAt {
                last_applied: replica.last_applied,
                membership: replica.membership.clone(),
            };
            if at.last_applied == *self.flushed.lock() && !replica.detached {
                return;
            }
            replica.bytes_since_cut = 0;
            let changes = replica.machine.cut();
            // The records on disk are not what this machine grew from: they are replaced.
            let whole = std::mem::take(&mut replica.detached).then(|| replica.machine.freeze());
            (at, changes, whole)
        };
        let last_applied = at.last_applied;
        let saved = match whole {
            Some(whole) => self.disk.save_whole(whole.records(), at),
            None => self.disk.save(changes.records(), at),
        };
        if let Err(why) = saved {
            fatal("saving the state failed", &why);
        }
        *self.flushed.lock() = last_applied;
    }
}
