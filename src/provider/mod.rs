//! Chat transports.
//!
//! A [`Provider`] receives messages and hands them to a [`Link`]; `link.deliver(..).await` returns
//! after the commit that journals them, so that is when to acknowledge to the outside (SPEC G1). It
//! sends what the outbox holds when asked to, one at a time per chat, in order. Providers whose
//! replies are *listed* (web chat, generic webhook without a reply URL) have nothing to send: the
//! commit is the delivery.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::clock::BootInstant;
use crate::store::{RekeyError, Taken};
use crate::types::{ChatKey, Fence, Message};

mod reply;
#[cfg(feature = "test-util")]
pub mod scripted;
pub mod webchat;
pub mod webhook;

pub use reply::{Body, Reply, replies, room};

/// What a provider can do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Only one replica may be connected (SPEC D1).
    pub exclusive_session: bool,
    /// Replies stay listed in the store, this many a chat; 0 = not listed.
    pub listed: u32,
    /// Replies have to be sent with [`Provider::send`]; `false` = being listed is all.
    pub sends: bool,
}

/// One reply on its way out.
#[derive(Clone, Debug, PartialEq)]
pub struct Delivery {
    /// Stable: the same reply keeps it over retries, crashes and replicas.
    pub id: String,
    /// The chat.
    pub chat: ChatKey,
    /// Id of the message that caused it.
    pub in_reply_to: String,
    /// The text.
    pub text: String,
    /// The fence it was written under.
    pub fence: Fence,
    /// Orders the sends of one fence.
    pub turn_seq: u64,
    /// Not to be sent after this instant.
    pub deadline: BootInstant,
}

/// What the outside world called it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SentId(pub String);

/// Why a send did not happen, or may not have.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// Asked to wait; order is kept meanwhile.
    #[error("rate limited; again in {retry_after:?}")]
    RateLimited {
        /// How long.
        retry_after: Duration,
    },
    /// This transport allows one session, and another replica has it (SPEC D3).
    #[error(
        "this replica does not lead the transport, {} does; send there, or wait for Bot::ready()",
        leader.as_deref().unwrap_or("nobody")
    )]
    ProviderNotLeader {
        /// The replica that leads it, if one does.
        leader: Option<String>,
    },
    /// The other side will not have it; it is not tried again.
    #[error("refused: {why}")]
    Refused {
        /// Why.
        why: String,
    },
    /// It may have arrived.
    #[error("whether it arrived is unknown: {why}")]
    OutcomeUnknown {
        /// Why.
        why: String,
    },
    /// It did not arrive; it is tried again.
    #[error("not sent: {why}")]
    Transport {
        /// Why.
        why: String,
    },
}

/// Why messages could not be taken.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DeliverError {
    /// Not taken; the outside should send it again.
    #[error("not taken: {why}; again in {retry_after:?}")]
    Unavailable {
        /// Why.
        why: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// A message is not acceptable, and will not be later.
    #[error("message {id} is not acceptable: {why}")]
    Invalid {
        /// Its id.
        id: String,
        /// Why.
        why: String,
    },
    /// This replica no longer leads the transport.
    #[error("this replica no longer leads the transport")]
    Deposed,
}

/// What became of one delivered message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivered {
    /// Seen before: handled already, or about to be.
    pub duplicate: bool,
}

/// Where messages go: the bot's inbox.
#[async_trait]
pub trait Inbox: Send + Sync + 'static {
    /// Takes messages in order; returns after the commit that journals them (with durability), one
    /// answer a message.
    async fn deliver(&self, messages: Vec<Message>) -> Result<Vec<Delivered>, DeliverError>;

    /// A chat goes on under another key (SPEC B2): see
    /// [`Store::rekey`](crate::store::Store::rekey).
    async fn rekey(&self, from: &ChatKey, to: &ChatKey, taken: Taken) -> Result<(), RekeyError>;
}

/// A provider's way to its bot. Cheap to clone.
#[derive(Clone)]
pub struct Link {
    inbox: Arc<dyn Inbox>,
    closing: tokio::sync::watch::Receiver<bool>,
}

impl Link {
    /// A link to an inbox that closes when `closing` becomes true.
    pub fn new(inbox: Arc<dyn Inbox>, closing: tokio::sync::watch::Receiver<bool>) -> Self {
        Self { inbox, closing }
    }

    /// Hands messages to the bot. Acknowledge to the outside after this returned `Ok`.
    pub async fn deliver(&self, messages: Vec<Message>) -> Result<Vec<Delivered>, DeliverError> {
        self.inbox.deliver(messages).await
    }

    /// Says that a chat goes on under another key, before any message under that is delivered: a
    /// group that became a supergroup, a number that changed (SPEC B2). See
    /// [`Store::rekey`](crate::store::Store::rekey).
    pub async fn rekey(
        &self,
        from: &ChatKey,
        to: &ChatKey,
        taken: Taken,
    ) -> Result<(), RekeyError> {
        self.inbox.rekey(from, to, taken).await
    }

    /// Resolves when the provider is to stop taking messages.
    pub async fn closing(&self) {
        let mut closing = self.closing.clone();
        // A dropped sender means that the bot is gone: closing as well.
        let _ = closing.wait_for(|closing| *closing).await;
    }
}

/// Why a provider's `run` returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Closed {
    /// It was asked to.
    Asked,
    /// The outside closed it.
    ByPeer,
}

/// What ends a provider.
#[derive(Debug, thiserror::Error)]
#[error("provider {provider}: {why}")]
pub struct ProviderError {
    /// Its id.
    pub provider: String,
    /// Why, and what to do.
    pub why: String,
}

/// A chat transport.
#[async_trait]
pub trait Provider: Send + Sync + 'static {
    /// Its id: the `channel` of its chats.
    fn id(&self) -> &str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Receives until `link.closing()`. Providers that only receive webhooks keep the link for
    /// [`Provider::webhook`] and wait.
    async fn run(&self, link: Link) -> Result<Closed, ProviderError>;

    /// Sends one reply.
    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError>;

    /// Routes it wants on the public listener, under `/webhooks/{id}` (nested by the bot's router).
    fn webhook(&self) -> Option<Arc<dyn Webhook>>;
}

#[async_trait]
impl<P: Provider + ?Sized> Provider for Arc<P> {
    fn id(&self) -> &str {
        (**self).id()
    }

    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        (**self).run(link).await
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        (**self).send(delivery).await
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        (**self).webhook()
    }
}

/// A request to a provider's webhook, body read and bounded.
#[derive(Debug, Clone)]
pub struct WebhookRequest {
    /// `GET`, `POST`, …
    pub method: String,
    /// The path below the provider's own.
    pub path: String,
    /// The query string, without `?`.
    pub query: String,
    /// Headers, names in lower case.
    pub headers: Vec<(String, String)>,
    /// The raw body.
    pub body: bytes::Bytes,
}

/// Its answer.
#[derive(Debug, Clone)]
pub struct WebhookResponse {
    /// The status.
    pub status: u16,
    /// Further headers.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: bytes::Bytes,
}

/// What answers a provider's webhook. Free of any HTTP framework, so that a provider can be used
/// with each.
#[async_trait]
pub trait Webhook: Send + Sync + 'static {
    /// Answers one request; `link` leads to the bot, `store` to its data.
    async fn handle(
        &self,
        request: WebhookRequest,
        link: &Link,
        store: &dyn crate::store::Store,
    ) -> WebhookResponse;
}
