//! The small parent process: starts nodes, waits for them, starts them again.
//!
//! Problem: a parent must leave no orphan, whatever ends it, and must not turn a node that dies at
//! once into a busy loop. Idea: it is one loop a child (spawn → wait → back off), all on one
//! thread. The thread matters: a child asks the kernel to be killed with its parent
//! ([`die_with_parent`]), and the kernel means the *thread* that spawned it. So [`run`] has to be
//! polled on the main thread, which lives as long as the process.
//!
//! Invariants: a pid is signalled only while its process has not been waited for, so never a
//! stranger's; a child's output is read until it ends and kept in a bounded file; after [`run`]
//! returns no child is left.

mod log;
mod orphan;

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use log::LogFile;

pub use orphan::{OrphanError, PARENT_VARIABLE, die_with_parent};

/// One child.
#[derive(Clone, Debug)]
pub struct Spec {
    /// What its lines are prefixed with.
    pub name: String,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Where its output goes; rotated once to `FILE.1`.
    pub log: PathBuf,
    /// The file in which the child keeps its pid; removed when the child has ended.
    pub pid_file: PathBuf,
}

/// What to supervise, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The children.
    pub children: Vec<Spec>,
    /// Whether an ended child is started again.
    pub restart: bool,
    /// How long a child may take to end by itself before it is killed.
    pub grace: Duration,
}

/// What the parent is told to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// Keep them running.
    Run,
    /// SIGTERM, and SIGKILL after the grace.
    Stop,
    /// SIGKILL.
    Kill,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A child runs.
    Started {
        /// Its name.
        name: String,
        /// Its pid.
        pid: u32,
    },
    /// A child could not be started.
    Failed {
        /// Its name.
        name: String,
        /// Why.
        why: String,
    },
    /// A child ended.
    Ended {
        /// Its name.
        name: String,
        /// How.
        status: ExitStatus,
        /// When it is started again; `None` = never.
        again_in: Option<Duration>,
    },
    /// A child wrote a warning, an error or a panic.
    Warned {
        /// Its name.
        name: String,
        /// The line.
        line: String,
    },
}

/// The first pause before a restart; doubled at each early end.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// The longest pause before a restart.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A child that ran this long is well again: its next pause is the first one.
const WELL_AFTER: Duration = Duration::from_secs(10);

/// Runs the children until ordered to stop, or until all have ended for good. Poll it on the main
/// thread (see the module).
pub async fn run(options: Options, orders: watch::Receiver<Order>, events: mpsc::Sender<Event>) {
    let keepers = options.children.iter().map(|spec| {
        let keeper = Keeper {
            spec,
            restart: options.restart,
            grace: options.grace,
            orders: orders.clone(),
            events: events.clone(),
        };
        keeper.keep()
    });
    join_all(keepers).await;
}

struct Keeper<'a> {
    spec: &'a Spec,
    restart: bool,
    grace: Duration,
    orders: watch::Receiver<Order>,
    events: mpsc::Sender<Event>,
}

impl Keeper<'_> {
    async fn keep(mut self) {
        let mut pause = PAUSE_MIN;
        while *self.orders.borrow() == Order::Run {
            let started = Instant::now();
            let ended = self.once().await;
            if started.elapsed() >= WELL_AFTER {
                pause = PAUSE_MIN;
            }
            let goes_on = self.restart && *self.orders.borrow() == Order::Run;
            let name = self.spec.name.clone();
            self.tell(match ended {
                Ok(status) => Event::Ended { name, status, again_in: goes_on.then_some(pause) },
                Err(why) => Event::Failed { name, why },
            });
            if !goes_on {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = self.orders.wait_for(|order| *order != Order::Run) => return,
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// One life of the child.
    async fn once(&mut self) -> Result<ExitStatus, String> {
        let mut child = self.spawn()?;
        if let Some(pid) = child.id() {
            self.tell(Event::Started { name: self.spec.name.clone(), pid });
        }
        let out = child.stdout.take();
        let err = child.stderr.take();
        let log = LogFile::open(&self.spec.log)
            .map_err(|error| format!("cannot write {}: {error}", self.spec.log.display()))?;
        let log = Mutex::new(log);
        let orders = self.orders.clone();
        // Output is read to its end before the child counts as ended: its last words are the ones
        // that say why.
        let (status, (), ()) = tokio::join!(
            wait(&mut child, orders, self.grace),
            self.copy(out, &log),
            self.copy(err, &log)
        );
        let status = status.map_err(|error| format!("cannot wait for it: {error}"))?;
        // Nobody else may be taken for this process once its number is used again.
        let _ = std::fs::remove_file(&self.spec.pid_file);
        Ok(status)
    }

    fn spawn(&self) -> Result<Child, String> {
        Command::new(&self.spec.program)
            .args(&self.spec.arguments)
            .env(PARENT_VARIABLE, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own: Ctrl-C of the terminal reaches the parent only, which stops its
            // children in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", self.spec.program.display()))
    }

    async fn copy(&self, from: Option<impl AsyncRead + Unpin>, log: &Mutex<LogFile>) {
        let Some(from) = from else { return };
        let mut reader = BufReader::new(from);
        let mut line = Vec::new();
        loop {
            line.clear();
            // A read error of a pipe means that nothing more comes.
            match reader.read_until(b'\n', &mut line).await {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            log.lock().write(&line);
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end();
            if is_warning(text) {
                self.tell(Event::Warned { name: self.spec.name.clone(), line: text.to_owned() });
            }
        }
    }

    /// Events are for people to read; when nobody keeps up, the log file has it all.
    fn tell(&self, event: Event) {
        let _ = self.events.try_send(event);
    }
}

/// Waits for the child's end, and brings it about where ordered.
async fn wait(
    child: &mut Child,
    mut orders: watch::Receiver<Order>,
    grace: Duration,
) -> std::io::Result<ExitStatus> {
    tokio::select! {
        status = child.wait() => return status,
        // A closed channel means that whoever gives orders is gone: stop.
        _ = orders.wait_for(|order| *order != Order::Run) => {}
    }
    if *orders.borrow() == Order::Stop {
        signal(child, Signal::TERM);
        tokio::select! {
            status = child.wait() => return status,
            _ = orders.wait_for(|order| *order == Order::Kill) => {}
            () = tokio::time::sleep(grace) => {}
        }
    }
    signal(child, Signal::KILL);
    child.wait().await
}

/// `id()` is there only until the child was waited for, so the pid is still this child's.
fn signal(child: &Child, signal: Signal) {
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    if let Some(pid) = pid {
        // It may have ended this instant; then there is nothing to signal.
        let _ = kill_process(pid, signal);
    }
}

/// Whether a line is worth the console: levels of `tracing`, a panic, or the closing error line.
/// openraft warns at every failed attempt to reach a peer; those stay in the log.
fn is_warning(line: &str) -> bool {
    let head: String = line.chars().take(48).collect();
    head.contains(" WARN ") && !head.contains(" WARN openraft")
        || head.contains(" ERROR ")
        || head.starts_with("error: ")
        || head.contains("panicked at")
}

#[cfg(test)]
mod tests;
