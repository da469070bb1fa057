//! How long a chat is mute when its replica dies: from the kill to the next holder *acting*.
//!
//! Problem: the instant at which a dead replica's chat goes on shows only where somebody outside
//! sees the bot act. Idea: three real processes under `botmesh supervise`, and an address that the
//! demo bot POSTs its replies to. A message is given to one node; its reply comes and is not
//! answered, so that node owns the chat's outbox and waits. It is killed (`kill -9`). The sample ends
//! when *another* node POSTs that reply: it was told of the death, got the outbox, and sent. The
//! lease is a minute; whatever takes less was told.
//!
//! What is measured has the whole way in it: the kernel's burial, the parent's `waitpid`, the report,
//! its commit (after an election, where the dead one led), the hand-over, the new connection.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::group::Group;
use super::report::{Checks, Report};
use super::sink::{Came, Sink};
use crate::cli::failure::Failure;

/// A reply that comes later than this is lost: the lease has long ended.
const LOST_AFTER: Duration = Duration::from_secs(150);
/// How long what does not depend on a death may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Chats, in turn.
const CHATS: usize = 10;

/// Whom to kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kill {
    /// A holder that does not lead the Raft group.
    Holder,
    /// A holder that leads it.
    Leader,
    /// In turn.
    Both,
}

/// What to measure.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The `botmesh` binary.
    pub(crate) program: PathBuf,
    /// How many kills.
    pub(crate) runs: usize,
    /// Of whom.
    pub(crate) kill: Kill,
}

/// Measures. Progress goes to stderr.
pub(crate) async fn run(options: &Options) -> Result<Report, Failure> {
    let mut sink = Sink::open().await?;
    let mut group = Group::start(&options.program, sink.url()).await?;
    let mut report = Report::new("botmesh bench failover", options.runs);
    let mut seen = Seen::default();
    let mut samples: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    for run in 0..options.runs {
        let leader = match options.kill {
            Kill::Holder => false,
            Kill::Leader => true,
            Kill::Both => run % 2 == 1,
        };
        let victim = group.pick(leader, run).await?;
        let took = once(&mut group, &mut sink, &mut seen, victim, run).await?;
        let name = if leader { "holder_that_leads" } else { "holder" };
        match took {
            Some(took) => samples.entry(name).or_default().push(took.as_secs_f64() * 1_000.0),
            None => seen.checks.lost += 1,
        }
        eprint!("\r{} of {} kills", run + 1, options.runs);
    }
    eprintln!();
    for (name, samples) in samples {
        report.add(name, "ms", samples);
    }
    seen.drain(&mut sink);
    report.checked(seen.checks);
    group.stop().await;
    Ok(report)
}

/// What came, over all runs.
#[derive(Default)]
struct Seen {
    checks: Checks,
    /// The last fence of each chat.
    fences: BTreeMap<String, u64>,
    /// Replies that a living node has sent.
    sent: BTreeMap<String, usize>,
}

impl Seen {
    /// A reply of a node that lives.
    fn take(&mut self, came: &Came) {
        let times = self.sent.entry(came.id.clone()).or_default();
        *times += 1;
        if *times > 1 {
            self.checks.doubled += 1;
        }
        let last = self.fences.insert(came.chat.clone(), came.fence).unwrap_or(0);
        if *times == 1 && came.fence <= last {
            self.checks.out_of_order += 1;
        }
    }

    fn drain(&mut self, sink: &mut Sink) {
        while let Some(came) = sink.try_next() {
            self.take(&came);
        }
    }
}

/// One kill. `None`: nobody took over.
async fn once(
    group: &mut Group,
    sink: &mut Sink,
    seen: &mut Seen,
    victim: usize,
    run: usize,
) -> Result<Option<Duration>, Failure> {
    seen.drain(sink);
    sink.hold();
    let (message, chat) = (format!("m{run}"), format!("c{}", run % CHATS));
    group.post(victim, &message, &chat).await?;
    let held = sink.next(&message, PATIENCE).await.ok_or_else(|| {
        Failure::Other(format!("the reply to {message} did not come: see {}", group.logs()))
    })?;
    let died = Instant::now();
    group.kill(victim)?;
    let next = sink.next(&message, LOST_AFTER).await;
    sink.answer();
    if let Some(next) = &next {
        // A reply keeps its id, by which a provider tells that it is the same one.
        seen.checks.doubled += u64::from(held.id != next.id);
        seen.take(next);
    }
    group.revive(victim).await?;
    Ok(next.map(|next| next.at.saturating_duration_since(died)))
}
