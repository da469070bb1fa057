//! Where the demo bot's replies go: notes when they come, and answers when it is told to.

use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use serde::Deserialize;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::cli::failure::Failure;

/// A reply that came.
#[derive(Clone, Debug)]
pub(super) struct Came {
    /// Its id, the same at every attempt.
    pub(super) id: String,
    pub(super) in_reply_to: String,
    pub(super) chat: String,
    pub(super) fence: u64,
    /// How many replies came before it under this fence.
    pub(super) turn_seq: u64,
    pub(super) at: Instant,
}

#[derive(Deserialize)]
struct Body {
    id: String,
    in_reply_to: String,
    chat: String,
    fence: u64,
    turn_seq: u64,
}

#[derive(Clone)]
struct Shared {
    came: mpsc::UnboundedSender<Came>,
    answers: watch::Receiver<bool>,
}

pub(super) struct Sink {
    url: String,
    came: mpsc::UnboundedReceiver<Came>,
    answers: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Sink {
    pub(super) async fn open() -> Result<Self, Failure> {
        let fault = |error: std::io::Error| Failure::Other(format!("cannot listen: {error}"));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.map_err(fault)?;
        let url = format!("http://{}/", listener.local_addr().map_err(fault)?);
        let (sender, came) = mpsc::unbounded_channel();
        let (answers, receiver) = watch::channel(true);
        let shared = Shared { came: sender, answers: receiver };
        let app = Router::new().route("/", post(take)).with_state(shared);
        let limits = crate::http::listen::Limits::default();
        let stop = tokio_util::sync::CancellationToken::new();
        let serving = tokio::spawn(async move {
            // Ends with the measurement.
            let _ = crate::http::listen::serve(listener, app, limits, stop).await;
        });
        Ok(Self { url, came, answers, serving })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// From now on nothing is answered.
    pub(super) fn hold(&self) {
        self.answers.send_replace(false);
    }

    /// From now on everything is, also what waits.
    pub(super) fn answer(&self) {
        self.answers.send_replace(true);
    }

    /// The next reply to this message.
    pub(super) async fn next(&mut self, message: &str, within: Duration) -> Option<Came> {
        let next = async {
            loop {
                let came = self.came.recv().await?;
                if came.in_reply_to == message {
                    return Some(came);
                }
            }
        };
        tokio::time::timeout(within, next).await.ok().flatten()
    }

    /// What came and nobody waited for.
    pub(super) fn try_next(&mut self) -> Option<Came> {
        self.came.try_recv().ok()
    }
}

async fn take(State(mut shared): State<Shared>, Json(body): Json<Body>) -> StatusCode {
    let at = Instant::now();
    let Body { id, in_reply_to, chat, fence, turn_seq } = body;
    // Whoever measures may have ended.
    let _ = shared.came.send(Came { id, in_reply_to, chat, fence, turn_seq, at });
    let _ = shared.answers.wait_for(|answers| *answers).await;
    StatusCode::OK
}
