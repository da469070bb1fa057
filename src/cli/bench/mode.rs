//! Whom a measurement strikes, and how.

use std::time::Duration;

use rustix::process::Signal;

use super::net::{Cut, Net};
use crate::cli::failure::Failure;

/// Whom to strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kill {
    /// A holder that does not lead the Raft group.
    Holder,
    /// A holder that leads it.
    Leader,
    /// The two in turn.
    Both,
    /// The replica that leads an exclusive transport, until another one polls.
    Transport,
    /// A holder and the leader at one instant. Of three nodes the leader is started again at once: one
    /// alone decides nothing.
    Pair,
    /// The replica that leads the exclusive transport and the Raft group, which is handed to it first.
    Leads,
    /// All of these in turn.
    All,
}

/// One way to strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blow {
    Holder,
    Leader,
    Transport,
    Pair,
    Leads,
}

impl Blow {
    /// Whether it strikes the one that polls.
    pub(super) fn polls(self) -> bool {
        matches!(self, Self::Transport | Self::Leads)
    }

    /// What its figures are called.
    pub(super) fn name(self, nodes: usize) -> &'static str {
        match self {
            Self::Holder => "holder",
            Self::Leader => "holder that leads",
            Self::Transport => "transport leader",
            Self::Leads => "transport and Raft leader",
            Self::Pair if nodes < 5 => "pair, one started again",
            Self::Pair => "pair",
        }
    }
}

impl Kill {
    /// The blows that are struck in turn, or why they cannot be.
    pub(super) fn blows(self, mode: Mode, nodes: usize) -> Result<Vec<Blow>, Failure> {
        // Where two of three do not die, there is nothing to start again.
        let pairs = nodes >= 5 || matches!(mode, Mode::Supervised | Mode::Unsupervised);
        match self {
            Self::Holder => Ok(vec![Blow::Holder]),
            Self::Leader => Ok(vec![Blow::Leader]),
            Self::Both => Ok(vec![Blow::Holder, Blow::Leader]),
            Self::Transport => Ok(vec![Blow::Transport]),
            Self::Leads => Ok(vec![Blow::Leads]),
            Self::Pair if pairs => Ok(vec![Blow::Pair]),
            Self::Pair => Err(Failure::Usage(format!(
                "--kill pair --mode {}: of three nodes the one that is left decides nothing; \
                 measure it with --nodes 5",
                mode.name()
            ))),
            Self::All => {
                let mut all = vec![Blow::Holder, Blow::Leader, Blow::Transport, Blow::Leads];
                all.extend(pairs.then_some(Blow::Pair));
                Ok(all)
            }
        }
    }
}

/// How a replica goes, and who watches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Mode {
    /// Killed under a supervisor that reports its death; the lease is a minute.
    Supervised,
    /// Killed, and nobody knows: its lease of a second decides.
    Unsupervised,
    /// Stopped (SIGSTOP) under a supervisor with `--hang-kill 1s`.
    Freeze,
    /// Asked to stop (SIGTERM).
    Graceful,
    /// What it says to the other nodes is dropped; it hears them, and its provider hears it. Its lease
    /// of a second decides. Needs namespaces.
    #[value(alias = "cut")]
    OneWayCut,
    /// All its packets are dropped, both ways, and nothing is refused. Its lease of a second decides.
    /// Needs namespaces.
    #[value(alias = "vanished")]
    VanishedHost,
}

impl Mode {
    /// As it is typed.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Supervised => "supervised",
            Self::Unsupervised => "unsupervised",
            Self::Freeze => "freeze",
            Self::Graceful => "graceful",
            Self::OneWayCut => "one-way-cut",
            Self::VanishedHost => "vanished-host",
        }
    }

    /// The lease where none is asked for.
    pub(super) fn lease(self) -> Duration {
        Duration::from_secs(match self {
            Self::Supervised | Self::Freeze | Self::Graceful => 60,
            Self::Unsupervised | Self::OneWayCut | Self::VanishedHost => 1,
        })
    }

    /// Where the nodes have to be, or may be.
    pub(super) fn net(self, asked: Option<Net>) -> Result<Net, Failure> {
        match (self.blow(), asked) {
            (Strike::Cut(_), Some(Net::Loopback)) => Err(Failure::Usage(format!(
                "--mode {}: no packets are dropped on loopback; leave --net out",
                self.name()
            ))),
            (Strike::Cut(_), _) => Ok(Net::Namespaces),
            (Strike::Signal(_), asked) => Ok(asked.unwrap_or(Net::Loopback)),
        }
    }

    /// What goes before the bot's own command line.
    pub(super) fn watched_by(self) -> &'static [&'static str] {
        match self {
            Self::Unsupervised | Self::OneWayCut | Self::VanishedHost => &[],
            Self::Freeze => &["supervise", "--no-restart", "--hang-kill", "1s", "--"],
            Self::Supervised | Self::Graceful => &["supervise", "--no-restart", "--"],
        }
    }

    pub(super) fn blow(self) -> Strike {
        match self {
            Self::Supervised | Self::Unsupervised => Strike::Signal(Signal::KILL),
            Self::Freeze => Strike::Signal(Signal::STOP),
            Self::Graceful => Strike::Signal(Signal::TERM),
            Self::OneWayCut => Strike::Cut(Cut::ToTheOthers),
            Self::VanishedHost => Strike::Cut(Cut::Whole),
        }
    }
}

/// What is done to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strike {
    /// Its process gets a signal, of which it ends.
    Signal(Signal),
    /// Its packets are dropped until the network is healed; its process goes on.
    Cut(Cut),
}
