//! What a bot tells (SPEC H1): closed enums, each value raised somewhere and tested there.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::Stream;
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;

use super::error::RuntimeError;
use super::handover::HandoverOutcome;
use super::metrics::Counts;
use crate::coordinator::LostReason;
use crate::provider::Receipt;
use crate::types::{ChatKey, Fence, Incarnation, TicketId};

/// Why this replica does not lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FollowReason {
    /// Another replica leads, and this one waits.
    Waiting,
    /// The lease was lost.
    Expired,
    /// It stepped down on purpose.
    SteppedDown,
}

/// Something happened. The same facts are traced, with the same fields.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// This replica leads a transport or job.
    Leader {
        /// Its name, `provider:telegram`.
        name: String,
        /// The fence.
        fence: Fence,
    },
    /// This replica stands by.
    Follower {
        /// The lead's name.
        name: String,
        /// Why.
        reason: FollowReason,
    },
    /// The right to act was lost.
    LeaseLost {
        /// The chat's canonical string, the lead's name, or `session`.
        key: String,
        /// Why.
        reason: LostReason,
    },
    /// A conversation changed hands.
    Handover {
        /// The chat's canonical string.
        key: String,
        /// The flow's or conversation's name.
        name: String,
        /// What became of it.
        outcome: HandoverOutcome,
    },
    /// Whether a reply arrived is unknown: its answer was lost, or its sender died over it. What
    /// follows is up to [`OnUnknown`](super::OnUnknown).
    SendUnknown {
        /// The chat's canonical string.
        key: String,
        /// The reply's id.
        id: String,
    },
    /// A message was given up after its last attempt.
    DeadLetter {
        /// The chat's canonical string.
        key: String,
        /// The ticket it had.
        ticket: TicketId,
        /// The message's id.
        id: String,
    },
    /// Another live process runs under this replica id.
    ReplicaIdShared {
        /// The other one.
        other: Incarnation,
    },
    /// An occurrence of a job was given up after its last attempt; its next one comes in time.
    JobGivenUp {
        /// The job's id.
        id: String,
        /// The instant it was due, ms since the Unix epoch.
        due_ms: u64,
        /// How often it was run.
        attempts: u32,
    },
    /// A reply came further: sent, delivered, read. Each step is told of once, by one replica, and
    /// none after a later one.
    Receipt {
        /// Of which reply, and how far it came.
        receipt: Receipt,
    },
    /// A chat goes on under another id, as its provider says.
    ChatMoved {
        /// Its key until now.
        from: ChatKey,
        /// Its key from now on.
        to: ChatKey,
    },
    /// Something failed; the bot goes on.
    Error {
        /// The chat's canonical string, where there is one.
        key: Option<String>,
        /// What.
        error: Arc<RuntimeError>,
    },
}

/// Where events come from inside the bot.
#[derive(Clone, Debug)]
pub(crate) struct Emitter {
    sender: broadcast::Sender<Event>,
    pub(crate) counts: Arc<Counts>,
}

impl Emitter {
    pub(crate) fn new() -> Self {
        Self { sender: broadcast::channel(1024).0, counts: Arc::new(Counts::new()) }
    }

    pub(crate) fn subscribe(&self) -> Events {
        Events { stream: BroadcastStream::new(self.sender.subscribe()) }
    }

    /// Traces the event and hands it to whoever listens.
    pub(crate) fn emit(&self, event: Event) {
        self.counts.count(&event);
        match &event {
            Event::Leader { name, fence } => tracing::info!(%name, %fence, "leads"),
            Event::Follower { name, reason } => tracing::info!(%name, ?reason, "stands by"),
            Event::LeaseLost { key, reason } => tracing::warn!(%key, ?reason, "lease lost"),
            Event::Handover { key, name, outcome } => {
                tracing::info!(%key, flow = %name, ?outcome, "conversation handed over");
            }
            Event::SendUnknown { key, id } => {
                tracing::warn!(%key, %id, "whether a reply arrived is unknown");
            }
            Event::DeadLetter { key, ticket, id } => {
                tracing::error!(%key, %ticket, %id, "message given up");
            }
            Event::ReplicaIdShared { other } => {
                tracing::error!(%other, "another live process runs under this replica id");
            }
            Event::JobGivenUp { id, due_ms, attempts } => {
                tracing::error!(job = %id, due_ms, attempts, "occurrence of a job given up");
            }
            Event::Receipt { receipt } => tracing::debug!(
                chat = %receipt.chat, sent = %receipt.sent, state = ?receipt.state, "receipt"
            ),
            Event::ChatMoved { from, to } => tracing::info!(%from, %to, "chat has another id"),
            Event::Error { key, error } => {
                let key = key.as_deref().unwrap_or("");
                tracing::error!(%key, %error, "error");
            }
        }
        // Nobody listens: the trace has it.
        let _ = self.sender.send(event);
    }

    pub(crate) fn error(&self, key: Option<String>, error: impl Into<RuntimeError>) {
        self.emit(Event::Error { key, error: Arc::new(error.into()) });
    }
}

/// A bot's events from the moment of the call on. A listener that falls 1,024 behind misses the
/// oldest (a trace says so).
#[derive(Debug)]
pub struct Events {
    stream: BroadcastStream<Event>,
}

impl Stream for Events {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        loop {
            match Pin::new(&mut self.stream).poll_next(cx) {
                Poll::Ready(Some(Ok(event))) => return Poll::Ready(Some(event)),
                Poll::Ready(Some(Err(missed))) => tracing::warn!(%missed, "a listener lags"),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

impl Events {
    /// The next event; `None` once the bot is gone.
    pub async fn next(&mut self) -> Option<Event> {
        std::future::poll_fn(|cx| Pin::new(&mut *self).poll_next(cx)).await
    }
}
