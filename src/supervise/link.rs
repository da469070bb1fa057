//! What parent and child say to each other, and the parent's end of it.
//!
//! Problem: the parent waits for one process, but which processes act in the group? With
//! `supervise -- sh -c 'bot & wait'` it waits for a shell, and reporting the shell's death would end
//! the sessions of a bot that lives. Idea: the process token is not passed but fetched. A process
//! that is to act under the token connects to a socket, and the kernel says which process did
//! (`SO_PEERCRED`). Only the one that is waited for is given the token; another is refused, runs
//! without reports, and both sides say so.
//!
//! The socket has a name in the abstract namespace, new at each spawn, passed in a variable. So it
//! leaves no file, needs no descriptor of a known number, and a process that replaced itself
//! (`exec`) finds it again.
//!
//! ```text
//!   child   connects
//!   parent  {"token":{"token":"8f…","beat_ms":250}}    or   {"refused":{"why":"…"}}
//!   child   {"contacts":{"secret":"…","own":"h:1","peers":["h:2","h:3"]}}    at every change
//!   child   "beat"                                      every beat_ms, from its executor
//! ```

use std::fmt;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::Instant;

use crate::types::ProcessToken;

/// The variable in which a parent passes the name of its socket.
pub const SOCKET_VARIABLE: &str = "BOTMESH__SUPERVISOR";

/// Longest line; a peer list is far below.
const LINE_MAX: u64 = 64 * 1024;
/// Connections of one child at a time.
const TALKS_MAX: usize = 16;

/// How the survivors of a process are told of its death.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contacts {
    /// The cluster secret.
    pub secret: String,
    /// The process's own cluster address: not to be told, it is dead.
    pub own: String,
    /// Cluster addresses of the other members.
    pub peers: Vec<String>,
}

impl fmt::Debug for Contacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Contacts").field("own", &self.own).field("peers", &self.peers).finish()
    }
}

/// What the parent answers a process that connects.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Token {
        /// In hexadecimal digits: JSON has no number of this size.
        token: String,
        /// How often a sign of life is wanted; never where absent.
        beat_ms: Option<u64>,
    },
    Refused {
        why: String,
    },
}

/// What the child says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Said {
    Contacts(Contacts),
    Beat,
}

pub(super) fn address(name: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name.as_bytes())
}

/// A message as it goes over the socket.
pub(super) fn line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("plain structs have a JSON form");
    line.push(b'\n');
    line
}

/// What is known of one life of a child.
#[derive(Debug, Default)]
pub(super) struct Acquaintance {
    /// Whether it was given the token: only then does its death mean anything to the group.
    pub(super) has_token: bool,
    pub(super) contacts: Option<Contacts>,
    /// Its last sign of life; none where it never gave one.
    pub(super) beat: Option<Instant>,
}

/// The parent's socket, for one life of a child.
pub(super) struct Desk {
    listener: UnixListener,
    name: String,
    token: ProcessToken,
    beat: Option<Duration>,
}

impl Desk {
    /// Opens a socket and mints a token.
    pub(super) fn open(beat: Option<Duration>) -> io::Result<Self> {
        // Not the token: the name is seen by every process of the machine.
        let name = format!("botmesh-{}", ProcessToken::random());
        let listener = StdListener::bind_addr(&address(&name)?)?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        Ok(Self { listener, name, token: ProcessToken::random(), beat })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn token(&self) -> ProcessToken {
        self.token
    }

    /// Answers whoever connects. `stranger` is told the pid of the first one that is not the child.
    pub(super) async fn serve(
        &self,
        child: u32,
        known: &Mutex<Acquaintance>,
        stranger: impl Fn(u32),
    ) -> std::convert::Infallible {
        let mut talks = FuturesUnordered::new();
        let mut refused = false;
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                Some(()) = talks.next(), if !talks.is_empty() => continue,
            };
            let Ok((stream, _)) = accepted else {
                // For want of descriptors or memory: only time helps.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
            match pid.map(i32::unsigned_abs) {
                Some(pid) if pid == child && talks.len() < TALKS_MAX => {
                    known.lock().has_token = true;
                    let beat_ms = self.beat.map(|beat| beat.as_millis() as u64);
                    let answer = Answer::Token { token: self.token.to_string(), beat_ms };
                    talks.push(talk(stream, answer, known));
                }
                other => {
                    let other = other.unwrap_or(0);
                    if !std::mem::replace(&mut refused, true) {
                        stranger(other);
                    }
                    let why = format!("process {child} is waited for, not {other}");
                    talks.push(talk(stream, Answer::Refused { why }, known));
                }
            }
        }
    }
}

/// One connection, to its end.
async fn talk(mut stream: UnixStream, answer: Answer, known: &Mutex<Acquaintance>) {
    let answered = stream.write_all(&line(&answer)).await;
    if answered.is_err() || matches!(answer, Answer::Refused { .. }) {
        return;
    }
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut reader).take(LINE_MAX).read_until(b'\n', &mut line).await;
        if read.is_err() || line.last() != Some(&b'\n') {
            // It has ended, or says what it cannot mean. Either way its silence tells nothing from
            // here on: a program that replaced itself, or let its runtime go, is not hung.
            known.lock().beat = None;
            return;
        }
        match serde_json::from_slice(&line) {
            Ok(Said::Beat) => known.lock().beat = Some(Instant::now()),
            Ok(Said::Contacts(contacts)) => known.lock().contacts = Some(contacts),
            // A newer program says more.
            Err(error) => tracing::debug!(%error, "a child said what is not understood"),
        }
    }
}
