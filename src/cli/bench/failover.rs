//! How long a chat is mute when its replica goes: from the instant to the next holder *acting*.
//!
//! Problem: the instant at which a dead replica's chat goes on shows only where somebody outside
//! sees the bot act. Idea: real processes, and an address that the demo bot POSTs its replies to. A
//! message is given to one node; its reply comes and is not answered, so that node owns the chat's
//! outbox and waits. It is killed, or frozen. The sample ends when *another* node POSTs that reply: it
//! was told of the death, got the outbox, and sent. Under a supervisor the lease is a minute: whatever
//! takes less was told. At the same instant another message is given to a survivor: when it is taken,
//! the group commits again (`writes back`).
//!
//! What is measured has the whole way in it: the kernel's burial, the parent's `waitpid`, the report,
//! its commit (after an election, where the dead one led), the hand-over, the new connection.
//!
//! A replica that is asked to stop leaves nothing to wait for. There, one message after another goes
//! through it, and through a survivor once it takes none, each when the reply to the last one has
//! come; the sample is the longest of these round trips.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use super::group::{Group, Mode};
use super::phases;
use super::report::{Checks, Report};
use super::sink::{Came, Sink};
use crate::cli::failure::Failure;

/// A reply that comes later than this is lost: the lease has long ended.
const LOST_AFTER: Duration = Duration::from_secs(150);
/// How long what does not depend on a death may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Chats, in turn.
const CHATS: usize = 10;
/// Round trips before and after a stop.
const AROUND: usize = 20;

/// Whom to strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kill {
    /// A holder that does not lead the Raft group.
    Holder,
    /// A holder that leads it.
    Leader,
    /// The two in turn.
    Both,
    /// These, and with five nodes a holder and the leader at one instant.
    All,
}

/// One way to strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blow {
    Holder,
    Leader,
    Pair,
}

impl Blow {
    fn name(self) -> &'static str {
        match self {
            Self::Holder => "holder",
            Self::Leader => "holder that leads",
            Self::Pair => "holder and leader",
        }
    }
}

impl Kill {
    fn blow(self, run: usize, nodes: usize) -> Blow {
        let turns: &[Blow] = match self {
            Self::Holder => &[Blow::Holder],
            Self::Leader => &[Blow::Leader],
            // A majority of three does not survive two.
            Self::All if nodes >= 5 => &[Blow::Holder, Blow::Leader, Blow::Pair],
            Self::Both | Self::All => &[Blow::Holder, Blow::Leader],
        };
        turns[run % turns.len()]
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The `botmesh` binary.
    pub(crate) program: PathBuf,
    /// How many times.
    pub(crate) runs: usize,
    /// Whom.
    pub(crate) kill: Kill,
    /// How.
    pub(crate) mode: Mode,
    /// Of how many nodes.
    pub(crate) nodes: usize,
}

/// Samples by figure, in milliseconds.
type Samples = BTreeMap<String, Vec<f64>>;

/// Measures. Progress goes to stderr.
pub(crate) async fn run(options: &Options) -> Result<Report, Failure> {
    let Options { program, runs, kill, mode, nodes } = options;
    let mut sink = Sink::open().await?;
    let mut group = Group::start(program, sink.url(), *nodes, *mode).await?;
    let mut seen = Seen::default();
    let mut samples = Samples::new();
    for run in 0..*runs {
        let blow = kill.blow(run, *nodes);
        let victims = pick(&group, blow, run).await?;
        let name = blow.name();
        if *mode == Mode::Graceful {
            let longest = stop(&mut group, &mut sink, &mut seen, victims[0], run).await?;
            add(&mut samples, format!("{name}: longest round trip"), longest);
        } else {
            strike(&mut group, &mut sink, &mut seen, &mut samples, (name, &victims, run)).await?;
        }
        group.revive(&victims).await?;
        eprint!("\r{} of {runs}", run + 1);
    }
    eprintln!();
    let way = format!("{mode:?}").to_lowercase();
    let command = format!("botmesh bench failover --mode {way} --nodes {nodes} --runs {runs}");
    let mut report = Report::new(command, *runs);
    for (name, samples) in samples {
        report.add(name, "ms", samples);
    }
    seen.drain(&mut sink);
    report.checked(seen.checks);
    group.stop().await;
    Ok(report)
}

fn add(samples: &mut Samples, name: String, sample: Duration) {
    samples.entry(name).or_default().push(sample.as_secs_f64() * 1_000.0);
}

/// Whom to strike; the first one holds.
async fn pick(group: &Group, blow: Blow, run: usize) -> Result<Vec<usize>, Failure> {
    let leader = group.leader().await?;
    let others: Vec<usize> = (0..group.len()).filter(|i| *i != leader).collect();
    let other = others[run % others.len()];
    Ok(match blow {
        Blow::Holder => vec![other],
        Blow::Leader => vec![leader],
        Blow::Pair => vec![other, leader],
    })
}

/// What came, over all runs.
#[derive(Default)]
struct Seen {
    checks: Checks,
    /// Where the last reply of each chat stands: its fence, and its number under that.
    places: BTreeMap<String, (u64, u64)>,
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
        // A fence goes on where the same replica has the next turn (SPEC N5, B10).
        let place = (came.fence, came.turn_seq);
        let last = self.places.insert(came.chat.clone(), place);
        if *times == 1 && last.is_some_and(|last| place <= last) {
            self.checks.out_of_order += 1;
        }
    }

    fn drain(&mut self, sink: &mut Sink) {
        while let Some(came) = sink.try_next() {
            self.take(&came);
        }
    }
}

/// One strike that leaves a reply unsent.
async fn strike(
    group: &mut Group,
    sink: &mut Sink,
    seen: &mut Seen,
    samples: &mut Samples,
    (name, victims, run): (&str, &[usize], usize),
) -> Result<(), Failure> {
    seen.drain(sink);
    sink.hold();
    let (message, chat) = (format!("m{run}"), format!("c{}", run % CHATS));
    group.post(victims[0], &message, &chat).await?;
    let held = sink.next(&message, PATIENCE).await.ok_or_else(|| {
        Failure::Other(format!("the reply to {message} did not come: see {}", group.logs()))
    })?;
    let survivors: Vec<usize> = (0..group.len()).filter(|i| !victims.contains(i)).collect();
    let (died, died_at) = (Instant::now(), SystemTime::now());
    for &victim in victims {
        group.strike(victim)?;
    }
    let written = async {
        let taken = group.post_to(&survivors[..1], &format!("w{run}"), "writes").await;
        taken.map(|()| died.elapsed())
    };
    let (next, written) =
        futures_util::future::join(sink.next(&message, LOST_AFTER), written).await;
    sink.answer();
    add(samples, format!("{name}: writes back"), written?);
    match &next {
        Some(next) => {
            // A reply keeps its id, by which a provider tells that it is the same one.
            seen.checks.doubled += u64::from(held.id != next.id);
            seen.take(next);
            add(samples, name.to_owned(), next.at.saturating_duration_since(died));
        }
        None => seen.checks.lost += 1,
    }
    let logged = group.logged();
    let of_survivors: Vec<String> = survivors.into_iter().map(|i| logged[i].clone()).collect();
    for (point, after) in phases::since(died_at, &of_survivors) {
        add(samples, format!("{name}: {point}"), after);
    }
    Ok(())
}

/// One stop under a stream of messages; the longest round trip.
async fn stop(
    group: &mut Group,
    sink: &mut Sink,
    seen: &mut Seen,
    victim: usize,
    run: usize,
) -> Result<Duration, Failure> {
    let chat = format!("c{}", run % CHATS);
    let nodes = [victim, (victim + 1) % group.len()];
    let (mut longest, mut left, mut number) = (Duration::ZERO, AROUND, 0);
    while left > 0 {
        if number == AROUND {
            group.strike(victim)?;
        }
        let message = format!("s{run}-{number}");
        let asked = Instant::now();
        group.post_to(&nodes, &message, &chat).await?;
        match sink.next(&message, PATIENCE).await {
            Some(came) => {
                seen.take(&came);
                longest = longest.max(came.at.saturating_duration_since(asked));
            }
            None => seen.checks.lost += 1,
        }
        number += 1;
        // What comes after the end of the process is counted down.
        left -= usize::from(number > AROUND && group.ended(victim));
    }
    Ok(longest)
}
