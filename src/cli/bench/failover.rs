//! How long a chat is mute when its replica goes: from the instant to the next holder *acting*.
//!
//! Problem: the instant at which a dead replica's chat goes on shows only where somebody outside
//! sees the bot act. Idea: real processes, and an address that the bot POSTs its replies to. A
//! message is given to one node; its reply comes and is not answered, so that node owns the chat's
//! outbox and waits. It is killed, frozen or cut off. The sample ends when *another* node POSTs that
//! reply: it was told of the death, or the lease ended, it got the outbox, and sent. Under a supervisor
//! the lease is a minute: whatever takes less was told. At the same instant another message is given to
//! a survivor: when it is taken, the group commits again (`writes back`).
//!
//! What is measured has the whole way in it: the kernel's burial, the parent's `waitpid`, the report,
//! its commit (after an election, where the dead one led), the hand-over, the new connection.
//!
//! The leader of an exclusive transport has to be seen from outside too: its bots poll the far end, one
//! at a time, and the sample ends with the first poll by another one. What was put there at the instant
//! of the blow is answered through it (`transport answers`).
//!
//! A replica that is asked to stop leaves nothing to wait for. There, one message after another goes
//! through it, and through a survivor once it takes none, each when the reply to the last one has
//! come; the samples are the longest of these round trips from the stop on (`gap`), and how long it took
//! until another node had answered one.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use super::args::FailoverArgs;
use super::group::{Group, Setup, View};
use super::load::{Load, Plan};
use super::mode::{Blow, Mode};
use super::net::Network;
use super::phases;
use super::report::Report;
use super::sink::Sink;
use crate::cli::failure::Failure;

/// A reply that comes later than this is lost: the lease has long ended.
const LOST_AFTER: Duration = Duration::from_secs(150);
/// How long what does not depend on a death may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// A node that was cut off does not answer: so long it is waited for.
const ATTEMPT: Duration = Duration::from_secs(2);
/// Chats, in turn.
const CHATS: usize = 10;
/// Chats of the load.
const LOAD_CHATS: u32 = 20;
/// Round trips before and after a stop.
const AROUND: usize = 20;
/// Whoever acts may be faster than the one who says what it did: so long its line is waited for.
const LOGGED_WITHIN: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(10);
/// Attempts to have a reply on the wire of the node that is to be struck.
const ATTEMPTS: usize = 10;

/// Samples by figure, in milliseconds.
type Samples = BTreeMap<String, Vec<f64>>;

/// Measures. Progress goes to stderr.
pub(super) async fn run(program: &Path, args: &FailoverArgs) -> Result<Report, Failure> {
    let FailoverArgs { runs, kill, mode, nodes, load: spread, rate, .. } = *args;
    let blows = kill.blows(mode, nodes)?;
    let net = mode.net(args.net)?;
    let network = Network::open(net, nodes)?;
    let sink = Sink::open(&network).await?;
    let lease = args.lease.unwrap_or(mode.lease());
    let (watched_by, polls) = (mode.watched_by(), blows.iter().any(|blow| blow.polls()));
    let setup = Setup { program, nodes, lease, watched_by, polls, handlers_sleep: None };
    let group = Group::start(&setup, &sink, network).await?;
    let doors = group.doors().clone().impatient(ATTEMPT);
    let load = Load::start(&doors, &sink, Plan { spread, rate, chats: LOAD_CHATS });
    let view = group.well().await?;
    let mut bench = Bench { group, sink, view, mode, samples: Samples::new(), said: 0 };
    for run in 0..runs {
        bench.once(blows[run % blows.len()], run).await?;
        eprint!("\r{} of {runs}", run + 1);
    }
    eprintln!();
    let answers = load.stop().await?;
    bench.sink.drained(PATIENCE).await;
    let command = format!(
        "botmesh bench failover --mode {} --kill {} --nodes {nodes} --net {} --load {} --runs {runs}",
        mode.name(),
        typed(kill),
        net.name(),
        spread.name()
    );
    let mut report = Report::new(command, runs);
    for (name, samples) in bench.samples {
        report.add(name, "ms", samples);
    }
    report.add("webhook answers the load", "ms", answers);
    let again = bench.sink.ledger(|ledger| ledger.again());
    report.add("sent again under its id", "1", vec![again as f64]);
    report.checked(bench.sink.ledger(|ledger| ledger.checks()));
    bench.group.stop().await;
    Ok(report)
}

/// As it is typed.
fn typed(value: impl clap::ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// A measurement at work.
struct Bench {
    group: Group,
    sink: Sink,
    /// The group as it was before the blow.
    view: View,
    mode: Mode,
    samples: Samples,
    /// Messages said so far; each has a number of its own.
    said: usize,
}

impl Bench {
    async fn once(&mut self, blow: Blow, run: usize) -> Result<(), Failure> {
        let victims = self.pick(blow, run)?;
        if blow == Blow::Leads && self.view.leader != victims[0] {
            self.view = self.group.lead(victims[0]).await?;
        }
        if self.mode == Mode::Graceful {
            self.stop(blow, &victims, run).await?;
        } else {
            self.strike(blow, &victims, run).await?;
        }
        let left = if self.is_started_again(blow) { &victims[..1] } else { &victims[..] };
        self.view = self.group.revive(left, self.mode.blow()).await?;
        self.sink.revived(&victims);
        Ok(())
    }

    /// Whom to strike; the first one holds.
    fn pick(&self, blow: Blow, run: usize) -> Result<Vec<usize>, Failure> {
        let leader = self.view.leader;
        let others: Vec<usize> = (0..self.group.len()).filter(|node| *node != leader).collect();
        let other = others[run % others.len()];
        Ok(match blow {
            Blow::Holder => vec![other],
            Blow::Leader => vec![leader],
            Blow::Pair => vec![other, leader],
            Blow::Transport | Blow::Leads => {
                let polls = self.view.polls;
                vec![polls.ok_or_else(|| Failure::Other("nobody polls".to_owned()))?]
            }
        })
    }

    /// Whether the group needs one of the struck before it decides anything.
    fn is_started_again(&self, blow: Blow) -> bool {
        blow == Blow::Pair && self.group.len() < 5
    }

    fn name(&self, blow: Blow) -> &'static str {
        blow.name(self.group.len())
    }

    fn add(&mut self, name: String, sample: Duration) {
        self.samples.entry(name).or_default().push(sample.as_secs_f64() * 1_000.0);
    }

    /// The id of the next message.
    fn message(&mut self) -> String {
        self.said += 1;
        format!("m-{}", self.said)
    }

    /// A message whose reply is on the wire of this node, unanswered. What another node answers (it has
    /// the chat's outbox still, or this one's lease just ended) is let through.
    async fn hold(&mut self, node: usize, chat: &str) -> Result<String, Failure> {
        for _ in 0..ATTEMPTS {
            let message = self.message();
            self.sink.hold(&message);
            self.group.doors().post(&[node], &message, chat).await?;
            self.sink.ledger(|ledger| ledger.taken(&message));
            let reply = self.sink.reply(&message, PATIENCE, |_| true).await;
            let reply = reply.ok_or_else(|| {
                let words = self.group.last_words();
                Failure::Other(format!("the reply to {message} did not come\n{words}"))
            })?;
            if reply.node == node {
                return Ok(message);
            }
            self.sink.let_go();
        }
        Err(Failure::Other(format!("n{} answers none of its messages itself", node + 1)))
    }

    /// One blow that leaves a reply unsent.
    async fn strike(&mut self, blow: Blow, victims: &[usize], run: usize) -> Result<(), Failure> {
        let name = self.name(blow);
        let message = self.hold(victims[0], &format!("c{}", run % CHATS)).await?;
        let writes = self.message();
        let mut seeing: Vec<usize> =
            (0..self.group.len()).filter(|node| !victims.contains(node)).collect();
        let again = self.is_started_again(blow);
        let (died, died_at) = (Instant::now(), SystemTime::now());
        self.group.strike(victims, self.mode.blow())?;
        self.sink.struck(victims, died);
        let polled = blow.polls().then(|| self.message());
        if let Some(update) = &polled {
            self.sink.update(update, "polled");
            self.sink.ledger(|ledger| ledger.taken(update));
        }
        let doors = self.group.doors().clone();
        let written = async {
            doors.post(&seeing[..1], &writes, "writes").await?;
            Ok::<_, Failure>(died.elapsed())
        };
        let acted = self.sink.reply(&message, LOST_AFTER, |came| !victims.contains(&came.node));
        // The one that is started again may act as well: it is another process.
        let restarted =
            self.sink.reply(&message, LOST_AFTER, |came| again && came.node == victims[1]);
        let acted = async {
            tokio::select! {
                Some(came) = acted => Some(came),
                Some(came) = restarted, if again => Some(came),
                else => None,
            }
        };
        let started =
            async { if again { self.group.restart_at_once(victims[1]).await } else { Ok(()) } };
        let (acted, written, started) = futures_util::join!(acted, written, started);
        started?;
        self.sink.let_go();
        self.sink.ledger(|ledger| ledger.taken(&writes));
        self.add(format!("{name}: writes back"), written?);
        match acted {
            Some(came) => {
                let acted = if polled.is_some() { "chat acted" } else { "acted" };
                self.add(format!("{name}: {acted}"), came.at.saturating_duration_since(died));
            }
            None => self.sink.ledger(|ledger| ledger.lose()),
        }
        if let Some(update) = polled {
            self.polled(name, victims, died, &update).await;
        }
        if again {
            seeing.push(victims[1]);
        }
        for (point, after) in self.phases(died_at, &seeing).await {
            self.add(format!("{name}: {point}"), after);
        }
        Ok(())
    }

    /// The turning points since then, as these nodes have logged them.
    async fn phases(&self, died_at: SystemTime, seeing: &[usize]) -> Vec<(&'static str, Duration)> {
        let until = Instant::now() + LOGGED_WITHIN;
        loop {
            let points = phases::since(died_at, &self.group.logged(seeing));
            if phases::are_whole(&points) || Instant::now() >= until {
                return points;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// When the far end saw another poller, and when what was put there was answered.
    async fn polled(&mut self, name: &str, victims: &[usize], died: Instant, update: &str) {
        match self.sink.poll_but(victims, LOST_AFTER).await {
            Some(at) => self.add(format!("{name}: acted"), at.saturating_duration_since(died)),
            None => self.sink.ledger(|ledger| ledger.lose()),
        }
        // One that does not come stays open, and is lost in the end.
        let answered = self.sink.reply(update, LOST_AFTER, |_| true).await;
        if let Some(came) = answered {
            let after = came.at.saturating_duration_since(died);
            self.add(format!("{name}: transport answers"), after);
        }
    }

    /// One stop under a stream of messages: the longest round trip from then on, and how long it took
    /// until another node had answered.
    async fn stop(&mut self, blow: Blow, victims: &[usize], run: usize) -> Result<(), Failure> {
        let (name, chat, victim) = (self.name(blow), format!("c{}", run % CHATS), victims[0]);
        let next = (0..self.group.len()).find(|node| !victims.contains(node)).unwrap_or_default();
        let (mut stopped, mut acted): (Option<Instant>, Option<Duration>) = (None, None);
        let (mut longest, mut left, mut number) = (Duration::ZERO, AROUND, 0);
        while left > 0 {
            if number == AROUND {
                // Nothing is struck as far as the ledger goes: a stop excuses no repetition.
                self.sink.struck(&[], Instant::now());
                stopped = Some(Instant::now());
                self.group.strike(victims, self.mode.blow())?;
            }
            let message = self.message();
            let asked = Instant::now();
            self.group.doors().post(&[victim, next], &message, &chat).await?;
            self.sink.ledger(|ledger| ledger.taken(&message));
            let Some(came) = self.sink.reply(&message, LOST_AFTER, |_| true).await else { break };
            number += 1;
            let Some(stopped) = stopped else { continue };
            let took = came.at.saturating_duration_since(asked);
            if took > longest {
                longest = took;
                let (after, by) = (asked.saturating_duration_since(stopped), came.node + 1);
                tracing::debug!(run, ?took, ?after, by, "the longest round trip so far");
            }
            if !victims.contains(&came.node) {
                acted.get_or_insert(came.at.saturating_duration_since(stopped));
            }
            // What comes after the end of the processes is counted down.
            let ended = number > AROUND && victims.iter().all(|node| self.group.ended(*node));
            left -= usize::from(ended);
        }
        if let Some(acted) = acted {
            self.add(format!("{name}: another answers"), acted);
        }
        self.add(format!("{name}: gap"), longest);
        if blow.polls()
            && let Some(stopped) = stopped
        {
            match self.sink.poll_but(victims, LOST_AFTER).await {
                Some(at) => {
                    let after = at.saturating_duration_since(stopped);
                    self.add(format!("{name}: acted"), after);
                }
                None => self.sink.ledger(|ledger| ledger.lose()),
            }
        }
        Ok(())
    }
}
