//! The child's side: it does not outlive its parent, and shows it signs of life.
//!
//! `kill -9` of the parent runs no code of the parent, so the child has to see to it: it asks the
//! kernel for SIGKILL at its parent's death. Between the parent's `spawn` and that request the
//! parent may already have died, in which case no signal ever comes; comparing the parent's pid
//! with the one passed at spawn closes that gap (comparing with 1 would not: under a subreaper an
//! orphan's new parent is somebody else). Where the two differ, a shell may stand in between: then
//! the supervisor still answers its socket, and says that this is not the process it waits for.

use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream as StdStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::watch;

use super::link::{self, Answer, Contacts, SOCKET_VARIABLE, Said};
use crate::types::ProcessToken;

/// The variable in which a parent passes its pid to its child.
pub const PARENT_VARIABLE: &str = "BOTMESH__PARENT";

/// How long the parent may take to say whom it waits for.
const ANSWER: Duration = Duration::from_secs(5);

/// Why the child must not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OrphanError {
    /// The parent has ended already.
    #[error("the parent process {parent} has ended; start again with `botmesh up`")]
    ParentGone {
        /// Its pid.
        parent: String,
    },
    /// The kernel refused.
    #[error("cannot tie this process to its parent: {why}")]
    Refused {
        /// The system's word.
        why: String,
    },
}

/// The connection of this process to the supervisor that waits for it.
#[derive(Debug)]
pub struct Link {
    token: ProcessToken,
    beat: Option<Duration>,
    contacts: watch::Sender<Option<Contacts>>,
    /// Until [`Link::start`] takes it.
    stream: Mutex<Option<StdStream>>,
}

static LINK: OnceLock<Result<Option<Arc<Link>>, OrphanError>> = OnceLock::new();

/// Ties this process's life to its parent's, if a parent asked for it, and fetches its token. To be
/// called first thing, on the main thread; opening a node does it where the program did not. `None`
/// where nobody supervises this process, or waits for another than this one, which is then logged.
pub fn attach() -> Result<Option<Arc<Link>>, OrphanError> {
    let variable = |name| std::env::var(name).ok();
    let enter = || tie(variable(PARENT_VARIABLE), variable(SOCKET_VARIABLE));
    LINK.get_or_init(enter).clone()
}

fn tie(parent: Option<String>, socket: Option<String>) -> Result<Option<Arc<Link>>, OrphanError> {
    let Some(parent) = parent else { return Ok(None) };
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| OrphanError::Refused { why: error.to_string() })?;
    let expected = parent.parse().ok().and_then(Pid::from_raw);
    let direct = expected.is_some() && getppid() == expected;
    let gone = OrphanError::ParentGone { parent };
    match socket.map(|name| Link::fetch(&name)) {
        Some(Ok(Ok(link))) => Ok(Some(Arc::new(link))),
        Some(Ok(Err(why))) => {
            tracing::warn!(
                "death reports are off: {why}; let the supervised command replace its shell \
                 (`exec`), or supervise the bot itself"
            );
            Ok(None)
        }
        Some(Err(error)) if direct => {
            tracing::warn!(%error, "death reports are off: the supervisor's socket does not answer");
            Ok(None)
        }
        None if direct => Ok(None),
        Some(Err(_)) | None => Err(gone),
    }
}

impl Link {
    /// Asks the supervisor for the token. The inner error is its refusal.
    fn fetch(name: &str) -> io::Result<Result<Self, String>> {
        let stream = StdStream::connect_addr(&link::address(name)?)?;
        stream.set_read_timeout(Some(ANSWER))?;
        let mut line = Vec::new();
        BufReader::new((&stream).take(4_096)).read_until(b'\n', &mut line)?;
        let (token, beat_ms) = match serde_json::from_slice(&line)? {
            Answer::Token { token, beat_ms } => (token, beat_ms),
            Answer::Refused { why } => return Ok(Err(why)),
        };
        let token = token.parse().map_err(io::Error::other)?;
        stream.set_read_timeout(None)?;
        Ok(Ok(Self {
            token,
            beat: beat_ms.map(|ms| Duration::from_millis(ms.max(1))),
            contacts: watch::channel(None).0,
            stream: Mutex::new(Some(stream)),
        }))
    }

    /// The token of this process: its sessions are to carry it.
    pub fn token(&self) -> ProcessToken {
        self.token
    }

    /// Says whom to tell when this process has died.
    pub fn introduce(&self, contacts: Contacts) {
        self.contacts.send_if_modified(|known| {
            let news = known.as_ref() != Some(&contacts);
            *known = Some(contacts);
            news
        });
    }

    /// Starts to talk to the supervisor, on the runtime of whoever calls: the signs of life say that
    /// this runtime still runs its tasks. Only the first call does anything. The task ends with the
    /// runtime, or with the supervisor and then this process.
    pub fn start(self: &Arc<Self>) {
        let Some(stream) = self.stream.lock().take() else { return };
        let link = self.clone();
        tokio::spawn(async move {
            if let Err(error) = link.keep(stream).await {
                tracing::debug!(%error, "the supervisor's socket has ended");
            }
        });
    }

    async fn keep(&self, stream: StdStream) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        let mut stream = UnixStream::from_std(stream)?;
        let mut contacts = self.contacts.subscribe();
        contacts.mark_changed();
        loop {
            let said = tokio::select! {
                // `self` keeps the sender.
                _ = contacts.changed() => contacts.borrow_and_update().clone().map(Said::Contacts),
                () = next(self.beat) => Some(Said::Beat),
            };
            if let Some(said) = said {
                stream.write_all(&link::line(&said)).await?;
            }
        }
    }
}

async fn next(beat: Option<Duration>) {
    match beat {
        Some(beat) => tokio::time::sleep(beat).await,
        None => std::future::pending().await,
    }
}
