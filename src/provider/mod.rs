//! Chat transports.
//!
//! A [`Provider`] receives messages and hands them to a [`Link`]; `link.deliver(..).await` returns
//! after the commit that journals them, so that is when to acknowledge to the outside (SPEC G1). It
//! sends what the outbox holds when asked to, one at a time per chat, in order. Providers whose
//! replies are *listed* (web chat, generic webhook without a reply URL) have nothing to send: the
//! commit is the delivery.
//!
//! What several providers need exists once:
//!
//! | need | here |
//! |---|---|
//! | who signed a request | [`Secret`] |
//! | many things in one request | [`Batch`] |
//! | what became of a reply | [`Receipt`], which only ever advances |
//! | where a transport stands | [`Link::deliver_past`]: a cursor moves in the commit of what it covers |
//! | what a provider remembers besides | [`Link::keep`] and [`Link::kept`] |
//! | what its session is made of | [`Link::change`] and [`Link::all_kept`] |
//!
//! # Writing a provider
//!
//! Duties of a [`Provider`], in order:
//! 1. Give each message the id the outside knows it by: the same id is handled once.
//! 2. Acknowledge to the outside (answer 200, move the offset) after [`Link::deliver`] returned `Ok`,
//!    and in no other case. `Unavailable` means: later, the same again.
//! 3. With [`Capabilities::exclusive_session`]: say [`Link::connected`] when the outside lets this
//!    replica in and when it no longer does. `run` is started on the elected replica only, and dropped
//!    the moment it is no longer that; what it delivers after that is refused as `Deposed`.
//! 4. Keep where the transport stands with [`Link::deliver_past`], and begin with [`Link::cursor`].
//! 5. Send what [`Provider::send`] is given once, by `delivery.id` where the outside takes an id; say
//!    `OutcomeUnknown` where it may have arrived, `RateLimited` where it is to wait, `Refused` or
//!    `WindowClosed` where trying again is of no use. Whatever else keeps its place and is tried again.
//!
//! `conformance` (feature `test-util`) has tests that hold a provider to this.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::clock::BootInstant;
use crate::types::{ChatKey, Fence};

mod batch;
#[cfg(any(test, feature = "test-util"))]
pub mod conformance;
#[cfg(feature = "discord")]
pub mod discord;
#[cfg(feature = "email")]
pub mod email;
#[cfg(any(feature = "discord", feature = "email", feature = "whatsapp-web"))]
mod encrypted;
mod link;
#[cfg(feature = "meta")]
pub mod meta;
#[cfg(any(feature = "discord", feature = "meta", feature = "telegram", feature = "whatsapp-web"))]
mod outward;
mod receipt;
mod reply;
#[cfg(feature = "test-util")]
pub mod scripted;
mod signature;
#[cfg(feature = "telegram")]
pub mod telegram;
pub mod webchat;
pub mod webhook;
#[cfg(feature = "whatsapp-web")]
pub mod whatsapp_web;

pub use batch::{BadItem, Batch};
pub use link::{Inbox, Link, Notice};
pub use receipt::{Receipt, ReceiptState};
pub use reply::{Body, Reply, replies, room};
pub use signature::Secret;

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
    /// The other side takes no message of one's own accord from here: the user has not written for
    /// too long. It is not tried again.
    #[error(
        "the time to answer in is over: {why}; it needs a template, or the user's next message"
    )]
    WindowClosed {
        /// What the other side said.
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

/// Why a provider's `run` returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Closed {
    /// It was asked to.
    Asked,
    /// The outside closed it; the same replica opens it again.
    ByPeer,
    /// Another session took its place: this replica steps down.
    Replaced,
    /// The outside no longer knows the account: a token was revoked, a device unlinked. This replica
    /// steps down; a person has to see to it.
    Unlinked,
    /// The outside knows the account and will not have it as it is set up, for this reason: a right
    /// was not granted there, or something here is wrong. This replica steps down; a person has to see
    /// to it.
    Refused(&'static str),
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
