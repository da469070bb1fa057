//! The far end of the benched bots: takes their replies, and is what their exclusive transport polls.
//!
//! Every node has addresses of its own here, `/reply/{node}` and `/poll/{node}`, so that it is known who
//! acts. The reply to one message may be *held*: it is noted, and answered when it is let go.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::ledger::{Came, Ledger};
use super::net::Network;
use crate::cli::failure::Failure;

/// How long a poll waits for something to come.
const POLL: Duration = Duration::from_secs(1);

/// A message of the polled transport.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Update {
    pub(super) id: String,
    pub(super) chat: String,
}

/// What a poll answers: what stands from the offset on.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Updates {
    pub(super) updates: Vec<Update>,
}

/// What a poll asks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Poll {
    /// How many updates are taken.
    pub(super) offset: usize,
    /// Whether to wait for more.
    pub(super) wait: bool,
}

#[derive(Deserialize)]
struct Body {
    id: String,
    in_reply_to: String,
    chat: String,
    fence: u64,
    turn_seq: u64,
}

struct Shared {
    ledger: Mutex<Ledger>,
    /// Polls since the last blow: by whom, when.
    polls: Mutex<Vec<(usize, Instant)>>,
    /// Told after every change of the two.
    changed: watch::Sender<()>,
    /// The message whose reply is held.
    held: watch::Sender<Option<String>>,
    updates: watch::Sender<Vec<Update>>,
}

/// The far end; it ends with the last clone's drop of what serves it.
#[derive(Clone)]
pub(super) struct Sink {
    base: String,
    shared: Arc<Shared>,
    _serving: Arc<Serving>,
}

struct Serving(JoinHandle<()>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Sink {
    pub(super) async fn open(network: &Network) -> Result<Self, Failure> {
        let fault = |error: std::io::Error| Failure::Other(format!("cannot listen: {error}"));
        let address = network.far_end().to_string();
        let listener = tokio::net::TcpListener::bind(address).await.map_err(fault)?;
        let base = format!("http://{}", listener.local_addr().map_err(fault)?);
        let shared = Arc::new(Shared {
            ledger: Mutex::default(),
            polls: Mutex::default(),
            changed: watch::Sender::new(()),
            held: watch::Sender::new(None),
            updates: watch::Sender::new(Vec::new()),
        });
        let app = Router::new()
            .route("/reply/{node}", post(take))
            .route("/poll/{node}", get(poll))
            .with_state(shared.clone());
        let limits = crate::http::listen::Limits::default();
        let stop = tokio_util::sync::CancellationToken::new();
        let serving = tokio::spawn(async move {
            // Ends with the measurement.
            let _ = crate::http::listen::serve(listener, app, limits, stop).await;
        });
        Ok(Self { base, shared, _serving: Arc::new(Serving(serving)) })
    }

    /// Where a node sends its replies.
    pub(super) fn reply_url(&self, node: usize) -> String {
        format!("{}/reply/{node}", self.base)
    }

    /// Where a node polls.
    pub(super) fn poll_url(&self, node: usize) -> String {
        format!("{}/poll/{node}", self.base)
    }

    /// From now on the reply to this message is not answered.
    pub(super) fn hold(&self, message: &str) {
        self.shared.held.send_replace(Some(message.to_owned()));
    }

    /// What was held is answered, also what waits.
    pub(super) fn let_go(&self) {
        self.shared.held.send_replace(None);
    }

    /// What came, judged.
    pub(super) fn ledger<T>(&self, look: impl FnOnce(&mut Ledger) -> T) -> T {
        look(&mut self.shared.ledger.lock())
    }

    /// These nodes are struck.
    pub(super) fn struck(&self, nodes: &[usize], at: Instant) {
        self.shared.polls.lock().clear();
        self.ledger(|ledger| nodes.iter().for_each(|node| ledger.struck(*node, at)));
    }

    /// They are back.
    pub(super) fn revived(&self, nodes: &[usize]) {
        let now = Instant::now();
        self.ledger(|ledger| nodes.iter().for_each(|node| ledger.revived(*node, now)));
    }

    /// The first reply to this message that is as wanted.
    pub(super) async fn reply(
        &self,
        message: &str,
        within: Duration,
        wanted: impl Fn(&Came) -> bool,
    ) -> Option<Came> {
        self.seen(within, || self.ledger(|ledger| ledger.reply(message, &wanted))).await
    }

    /// The first poll since the blow by a node that was not struck.
    pub(super) async fn poll_but(&self, struck: &[usize], within: Duration) -> Option<Instant> {
        let first = || {
            let polls = self.shared.polls.lock();
            polls.iter().find(|(node, _)| !struck.contains(node)).map(|(_, at)| *at)
        };
        self.seen(within, first).await
    }

    /// Waits until every message that was taken is answered.
    pub(super) async fn drained(&self, within: Duration) {
        let none_open = || (self.ledger(|ledger| ledger.open()) == 0).then_some(());
        // What does not come is counted.
        let _ = self.seen(within, none_open).await;
    }

    async fn seen<T>(&self, within: Duration, look: impl Fn() -> Option<T>) -> Option<T> {
        let mut changed = self.shared.changed.subscribe();
        let until = tokio::time::Instant::now() + within;
        loop {
            changed.mark_unchanged();
            if let Some(found) = look() {
                return Some(found);
            }
            // The sender is this one's own.
            let _ = tokio::time::timeout_at(until, changed.changed()).await.ok()?;
        }
    }

    /// Something for the polled transport.
    pub(super) fn update(&self, id: &str, chat: &str) {
        let update = Update { id: id.to_owned(), chat: chat.to_owned() };
        self.shared.updates.send_modify(|all| all.push(update));
    }
}

async fn take(
    State(shared): State<Arc<Shared>>,
    Path(node): Path<usize>,
    Json(body): Json<Body>,
) -> StatusCode {
    let at = Instant::now();
    let Body { id, in_reply_to, chat, fence, turn_seq } = body;
    let mut held = shared.held.subscribe();
    let message = in_reply_to.clone();
    shared.ledger.lock().take(Came { id, in_reply_to, chat, fence, turn_seq, node, at });
    shared.changed.send_replace(());
    // Whoever measures may have ended.
    let _ = held.wait_for(|held| held.as_ref() != Some(&message)).await;
    StatusCode::OK
}

async fn poll(
    State(shared): State<Arc<Shared>>,
    Path(node): Path<usize>,
    Query(asked): Query<Poll>,
) -> Json<Updates> {
    let mut updates = shared.updates.subscribe();
    shared.polls.lock().push((node, Instant::now()));
    shared.changed.send_replace(());
    if asked.wait {
        // After that time there is nothing, which is an answer as well.
        let more = updates.wait_for(|all| all.len() > asked.offset);
        let _ = tokio::time::timeout(POLL, more).await;
    }
    let updates = updates.borrow().iter().skip(asked.offset).cloned().collect();
    Json(Updates { updates })
}
