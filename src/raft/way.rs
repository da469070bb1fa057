//! How a request leaves a node, and what it means when no answer comes.
//!
//! Every request of a node goes through [`Clients::send`](super::peers::Clients::send): over HTTP, or
//! in a simulation to another node in the same thread. What went wrong is put into words of our own
//! there, so that whoever asked need not know which of the two it was.

use std::io;

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    /// Nobody listens at the address: certainly not executed.
    Refused(String),
    /// No connection for another reason: certainly not executed.
    Connect(String),
    /// No answer in time.
    Timeout(String),
    /// The connection broke, or what came is no answer.
    Broken(String),
}

impl Lost {
    /// In words.
    pub(crate) fn why(&self) -> &str {
        match self {
            Self::Refused(why) | Self::Connect(why) | Self::Timeout(why) | Self::Broken(why) => why,
        }
    }
}

impl From<reqwest::Error> for Lost {
    fn from(error: reqwest::Error) -> Self {
        // reqwest's own text only names the URL.
        let mut cause: &dyn std::error::Error = &error;
        let mut refused = false;
        loop {
            refused |= cause
                .downcast_ref::<io::Error>()
                .is_some_and(|io| io.kind() == io::ErrorKind::ConnectionRefused);
            match cause.source() {
                Some(source) => cause = source,
                None => break,
            }
        }
        let why = cause.to_string();
        match () {
            () if error.is_connect() && refused => Self::Refused(why),
            () if error.is_connect() => Self::Connect(why),
            () if error.is_timeout() => Self::Timeout(why),
            () => Self::Broken(why),
        }
    }
}
