//! How a verb ends when it cannot do what it was asked: one line for people, one code for scripts.

use std::process::ExitCode;

use crate::config;

/// The exit codes and what they mean; printed by `--help`, listed in the README.
pub(super) const EXIT_CODES: &[(u8, &str)] = &[
    (0, "done; for run and up: stopped as asked; for supervise: the command's own code"),
    (1, "failed; the line on stderr says at what"),
    (2, "the command line, a variable or the configuration file is wrong"),
    (3, "a port is taken"),
    (4, "the data directory is in use, damaged or not writable"),
    (5, "no answer: the node cannot be reached, or the group has no quorum"),
    (6, "refused: wrong secret, wrong group, or the change is not allowed"),
    (7, "the group or the data directory needs a newer version of this program"),
    (8, "bench: this machine forbids what the measurement needs; the line on stderr names it"),
    (130, "a second Ctrl-C: everything was killed at once"),
];

/// Why a verb failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// Settings.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// What was asked makes no sense.
    #[error("{0}")]
    Usage(String),
    /// Somebody else listens.
    #[error("{0}")]
    PortTaken(String),
    /// The data directory.
    #[error("{0}")]
    Directory(String),
    /// Nobody answers.
    #[error("{0}")]
    NoAnswer(String),
    /// The group has no leader at the moment; nothing was done.
    #[error("{0}")]
    Leaderless(String),
    /// The group says no.
    #[error("{0}")]
    Refused(String),
    /// A newer version has to be started.
    #[error("{0}")]
    TooOld(String),
    /// The machine does not let it be done.
    #[error("{0}")]
    Forbidden(String),
    /// The supervised command did not end well; its code, or 128 and the signal's number.
    #[error("the command ended ({how})")]
    Child {
        /// The code to pass on.
        code: u8,
        /// In the system's words.
        how: String,
    },
    /// Stopped the hard way.
    #[error("stopped at once; nodes were killed, what they had acknowledged is on disk")]
    Killed,
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl Failure {
    /// The code of [`EXIT_CODES`].
    pub(super) fn code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Other(_) => 1,
            Self::Config(_) | Self::Usage(_) => 2,
            Self::PortTaken(_) => 3,
            Self::Directory(_) => 4,
            Self::NoAnswer(_) | Self::Leaderless(_) => 5,
            Self::Refused(_) => 6,
            Self::TooOld(_) => 7,
            Self::Forbidden(_) => 8,
            Self::Killed => 130,
            Self::Child { code, .. } => *code,
        })
    }
}
