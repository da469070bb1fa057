//! Waiting for children: who runs, who is stopped, who has ended.
//!
//! Problem: a parent has to hear of stops too, which waiting for a child's end does not tell, and as
//! the first process of a container it inherits every orphan there and has to bury it. Idea: one
//! look at all of them whenever the kernel says that something happened to a child (SIGCHLD), in
//! one place, because whoever waits for a process takes the news from everybody else.
//!
//! Invariants: a pid is signalled only while its process has not been waited for, so never a
//! stranger's; what [`Children::spawn`] gave is dead when it is dropped.

use std::collections::HashMap;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStderr, ChildStdout, Command, ExitStatus};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process, wait, waitpid};
use tokio::signal::unix::SignalKind;
use tokio::sync::watch;

/// Where a child is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// It may run.
    Running,
    /// A signal stopped it.
    Stopped,
    /// It is certainly dead: it has been waited for.
    Ended(ExitStatus),
}

/// The children of this process.
pub(super) struct Children {
    /// Those that have not been waited for. A plain mutex: held for a map access.
    waited_for: Mutex<HashMap<i32, watch::Sender<Life>>>,
    /// Whether orphans come to this process, which is then the only one to wait for them.
    adopts: bool,
}

/// One child.
pub(super) struct Running<'a> {
    children: &'a Children,
    pid: Pid,
    life: watch::Receiver<Life>,
    /// Its output, where it is piped.
    pub(super) stdout: Option<ChildStdout>,
    pub(super) stderr: Option<ChildStderr>,
}

impl Children {
    pub(super) fn new() -> Self {
        Self { waited_for: Mutex::default(), adopts: getpid().is_init() }
    }

    /// Starts a child, on the thread that polls this (see [`super`]).
    pub(super) fn spawn(&self, command: &mut Command) -> io::Result<Running<'_>> {
        let mut child = command.spawn()?;
        let pid = Pid::from_child(&child);
        let (sender, life) = watch::channel(Life::Running);
        self.waited_for.lock().insert(pid.as_raw_nonzero().get(), sender);
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        Ok(Running { children: self, pid, life, stdout, stderr })
    }

    /// Looks whenever something happened to a child. Returns only where signals cannot be caught.
    pub(super) async fn watch(&self) -> io::Error {
        let mut news = match tokio::signal::unix::signal(SignalKind::child()) {
            Ok(news) => news,
            Err(error) => return error,
        };
        loop {
            // First, for a child may have ended before the signal was caught.
            self.look();
            if news.recv().await.is_none() {
                return io::Error::other("no more signals are delivered");
            }
        }
    }

    fn look(&self) {
        let options = WaitOptions::NOHANG | WaitOptions::UNTRACED | WaitOptions::CONTINUED;
        if self.adopts {
            while let Ok(Some((pid, status))) = wait(options) {
                self.saw(pid, status);
            }
            return;
        }
        let pids: Vec<i32> = self.waited_for.lock().keys().copied().collect();
        for pid in pids.into_iter().filter_map(Pid::from_raw) {
            while let Ok(Some((pid, status))) = waitpid(Some(pid), options) {
                if let Life::Ended(_) = self.saw(pid, status) {
                    break;
                }
            }
        }
    }

    fn saw(&self, pid: Pid, status: WaitStatus) -> Life {
        let life = if status.stopped() {
            Life::Stopped
        } else if status.continued() {
            Life::Running
        } else {
            Life::Ended(ExitStatus::from_raw(status.as_raw()))
        };
        let raw = pid.as_raw_nonzero().get();
        let mut waited_for = self.waited_for.lock();
        let known = match life {
            Life::Ended(_) => waited_for.remove(&raw),
            _ => waited_for.get(&raw).cloned(),
        };
        match known {
            Some(child) => drop(child.send_replace(life)),
            None => tracing::debug!(pid = raw, "buried an orphan"),
        }
        life
    }
}

impl Running<'_> {
    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Where it is, to be followed.
    pub(super) fn life(&self) -> watch::Receiver<Life> {
        self.life.clone()
    }

    /// Returns once it is certainly dead.
    pub(super) async fn ended(&self) -> ExitStatus {
        let mut life = self.life.clone();
        loop {
            if let Life::Ended(status) = *life.borrow_and_update() {
                return status;
            }
            if life.changed().await.is_err() {
                // The sender goes only after it said how the child ended, which is seen above.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Sends it a signal, unless it has been waited for.
    pub(super) fn signal(&self, signal: Signal) {
        let waited_for = self.children.waited_for.lock();
        if waited_for.contains_key(&self.pid.as_raw_nonzero().get()) {
            // It may be ending this instant; then there is nobody to signal, and no harm.
            let _ = kill_process(self.pid, signal);
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let known = self.children.waited_for.lock().remove(&self.pid.as_raw_nonzero().get());
        if known.is_some() {
            let _ = kill_process(self.pid, Signal::KILL);
            let _ = waitpid(Some(self.pid), WaitOptions::empty());
        }
    }
}
