//! A provider's way to its bot.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{BadItem, DeliverError, Delivered, Receipt};
use crate::store::{RekeyError, Taken};
use crate::types::{ChatKey, Message};

/// What a provider has to tell besides messages.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// An item of what came in was left out.
    Bad(BadItem),
    /// Something came in of a kind that nobody handles.
    Unknown {
        /// Its kind, as the outside calls it.
        kind: String,
    },
    /// What became of a reply.
    Receipt(Receipt),
    /// A chat goes on under another id.
    Moved {
        /// Its key until now.
        from: ChatKey,
        /// Its key from now on.
        to: ChatKey,
    },
}

/// Where messages go: the bot's inbox.
#[async_trait]
pub trait Inbox: Send + Sync + 'static {
    /// Takes messages in order; returns after the commit that journals them (with durability), one
    /// answer a message. Where one is `Invalid`, none is taken.
    async fn deliver(&self, messages: Vec<Message>) -> Result<Vec<Delivered>, DeliverError>;

    /// As [`Inbox::deliver`], and moves the transport's cursor in the same commit (SPEC D5).
    async fn deliver_past(
        &self,
        provider: &str,
        messages: Vec<Message>,
        cursor: Vec<u8>,
    ) -> Result<Vec<Delivered>, DeliverError>;

    /// Where the transport stands, as the last [`Inbox::deliver_past`] of any replica left it.
    async fn cursor(&self, provider: &str) -> Result<Option<Vec<u8>>, DeliverError>;

    /// Writes rows of the provider's own, by name, in one commit; each is forgotten that long after it
    /// was written last.
    async fn keep(
        &self,
        provider: &str,
        rows: Vec<(String, Vec<u8>)>,
        remembered: Duration,
    ) -> Result<(), DeliverError>;

    /// A row that [`Inbox::keep`] wrote, on whichever replica.
    async fn kept(&self, provider: &str, name: &str) -> Result<Option<Vec<u8>>, DeliverError>;

    /// Writes rows of the provider's own, by name, or deletes them (`None`): in one commit, without an
    /// end, and only while this replica leads the transport. An inbox that keeps none need not have it.
    async fn change(
        &self,
        _provider: &str,
        _rows: Vec<(String, Option<Vec<u8>>)>,
    ) -> Result<(), DeliverError> {
        Err(keeps_nothing())
    }

    /// All rows of the provider's own, by name, and only while this replica leads the transport.
    async fn all_kept(&self, _provider: &str) -> Result<Vec<(String, Vec<u8>)>, DeliverError> {
        Err(keeps_nothing())
    }

    /// A chat goes on under another key (SPEC B2): see
    /// [`Store::rekey`](crate::store::Store::rekey).
    async fn rekey(&self, from: &ChatKey, to: &ChatKey, taken: Taken) -> Result<(), RekeyError>;

    /// Something happened that is no message.
    fn notice(&self, provider: &str, notice: Notice);

    /// Whether the outside has let this replica in.
    fn connected(&self, provider: &str, connected: bool);
}

fn keeps_nothing() -> DeliverError {
    let why = "this inbox keeps no rows for good; use a bot's".to_owned();
    DeliverError::Unavailable { why, retry_after: Duration::from_secs(10) }
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

    /// Hands messages to the bot, and with them where the transport stands after them: both are
    /// committed or neither is (SPEC D5). Without durability the cursor is written after the
    /// messages were taken.
    pub async fn deliver_past(
        &self,
        provider: &str,
        messages: Vec<Message>,
        cursor: Vec<u8>,
    ) -> Result<Vec<Delivered>, DeliverError> {
        self.inbox.deliver_past(provider, messages, cursor).await
    }

    /// Where the transport stands, whichever replica had it before.
    pub async fn cursor(&self, provider: &str) -> Result<Option<Vec<u8>>, DeliverError> {
        self.inbox.cursor(provider).await
    }

    /// Writes rows of the provider's own, by name, in one commit: what it has to know of a chat on
    /// whichever replica, and the bot does not. Each is forgotten that long after it was written last.
    pub async fn keep(
        &self,
        provider: &str,
        rows: Vec<(String, Vec<u8>)>,
        remembered: Duration,
    ) -> Result<(), DeliverError> {
        self.inbox.keep(provider, rows, remembered).await
    }

    /// A row that [`Link::keep`] wrote, on whichever replica.
    pub async fn kept(&self, provider: &str, name: &str) -> Result<Option<Vec<u8>>, DeliverError> {
        self.inbox.kept(provider, name).await
    }

    /// Writes rows of the provider's own, by name, or deletes them (`None`), in one commit: what the
    /// transport's session is made of, and is to outlast every replica (SPEC D5). Unlike those of
    /// [`Link::keep`] they have no end. Refused as [`DeliverError::Deposed`] once the lead is lost, by
    /// the group and not by this replica's opinion alone; where it is not known whether they were
    /// written it says `Unavailable`, and the same may be written again.
    pub async fn change(
        &self,
        provider: &str,
        rows: Vec<(String, Option<Vec<u8>>)>,
    ) -> Result<(), DeliverError> {
        self.inbox.change(provider, rows).await
    }

    /// All rows that [`Link::change`] and [`Link::keep`] wrote, on whichever replica, in the order of
    /// their names; refused like a write once the lead is lost.
    pub async fn all_kept(&self, provider: &str) -> Result<Vec<(String, Vec<u8>)>, DeliverError> {
        self.inbox.all_kept(provider).await
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

    /// Tells what is no message.
    pub fn notice(&self, provider: &str, notice: Notice) {
        self.inbox.notice(provider, notice);
    }

    /// Says whether the outside has let this replica in. An exclusive provider's bot is ready, and
    /// its replica keeps the lead, by this alone.
    pub fn connected(&self, provider: &str, connected: bool) {
        self.inbox.connected(provider, connected);
    }

    /// Resolves when the provider is to stop taking messages.
    pub async fn closing(&self) {
        let mut closing = self.closing.clone();
        // A dropped sender means that the bot is gone: closing as well.
        let _ = closing.wait_for(|closing| *closing).await;
    }
}
