//! The small parent process: starts programs, waits for them, tells the group when one is dead,
//! starts them again.
//!
//! Problem: a dead replica looks like a slow one until its lease ends. But its parent *knows*: it has
//! waited for the process. It must not be mistaken, ever; it must leave no orphan, whatever ends it;
//! and it must not turn a program that dies at once into a busy loop. Idea: one loop a child (spawn
//! → wait → report → back off), all on one thread. The thread matters: a child asks the kernel to be
//! killed with its parent ([`attach`]), and the kernel means the *thread* that spawned it. So
//! [`run`] has to be polled on the main thread, which lives as long as the process.
//!
//! ```text
//!   parent ──spawn──► child ──connects──► parent: is it the process I wait for? ──► its token
//!                       └─ opens its sessions in the group under the token, says who the others are
//!   parent ──waited──► POST /cluster/declare-dead {token} ──► all the others at once
//! ```
//!
//! Invariants: a death is reported only after `waitpid` has told it, and only of a process that was
//! given its token by the kernel's word that it is this one; a pid is signalled only while its
//! process has not been waited for; a child's output is kept in a bounded file; after [`run`]
//! returns no child is left.
//!
//! | file | holds |
//! |---|---|
//! | `children` | waiting, stops, orphans |
//! | `keeper` | one child, life after life |
//! | `link` | what the two say to each other, and the parent's end |
//! | `attach` | the child's end |
//! | `report` | telling the survivors |
//! | `log` | the output file |

mod attach;
mod children;
mod keeper;
mod link;
mod log;
mod report;

use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{mpsc, watch};

use children::Children;
use keeper::Keeper;
use report::Reporter;

pub use attach::{Link, OrphanError, PARENT_VARIABLE, attach};
pub use link::{Contacts, SOCKET_VARIABLE};
pub use report::DEATH_PATH;

/// Where a child's output goes.
#[derive(Clone, Debug)]
pub enum Output {
    /// To this file; rotated once to `FILE.1`. Warnings in it are told as events too.
    Log(PathBuf),
    /// Where the parent's own goes.
    Inherited,
}

/// One child.
#[derive(Clone, Debug)]
pub struct Spec {
    /// What its lines are prefixed with.
    pub name: String,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Where its output goes.
    pub output: Output,
    /// The file in which the child keeps its pid, if it does; removed when the child has ended.
    pub pid_file: Option<PathBuf>,
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
    /// Whether deaths are reported to the group.
    pub report: bool,
    /// A child that is stopped, or silent after it gave signs of life, for so long is killed.
    pub hang_kill: Option<Duration>,
}

/// What the parent is told to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// Keep them running.
    Run,
    /// SIGINT, and SIGKILL after the grace.
    Interrupt,
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
    /// A process that is not the one waited for asked for the child's token and was refused: what
    /// it does in the group is not known to end with the child.
    Stranger {
        /// The child's name.
        name: String,
        /// Who asked.
        pid: u32,
        /// Who is waited for.
        child: u32,
    },
    /// A child hangs and is killed.
    Hangs {
        /// Its name.
        name: String,
        /// How that shows.
        why: &'static str,
    },
    /// The group has committed that a child is dead.
    Reported {
        /// Its name.
        name: String,
        /// How long that took.
        took: Duration,
    },
    /// The group could not be told; the child's lease decides.
    Unreported {
        /// Its name.
        name: String,
        /// Why.
        why: String,
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
    let reporter = options.report.then(Reporter::new).transpose().unwrap_or_else(|why| {
        tracing::warn!(why, "death reports are off");
        None
    });
    let children = Children::new();
    let keepers = options.children.iter().map(|spec| {
        let keeper = Keeper {
            spec,
            options: &options,
            children: &children,
            orders: orders.clone(),
            events: events.clone(),
            reporter: reporter.clone(),
        };
        keeper.keep()
    });
    let keepers = join_all(keepers);
    tokio::select! {
        // First, so that the signal is caught before the first child is started.
        biased;
        error = children.watch() => tracing::error!(%error, "children cannot be waited for"),
        _ = keepers => {}
    }
}

#[cfg(test)]
mod tests;
