//! Telegram, by the Bot API: long polling or a webhook.
//!
//! ```no_run
//! use botmesh::provider::Secret;
//! use botmesh::provider::telegram::Telegram;
//! let polling = Telegram::new("telegram", "123:token"); // one replica polls, the others stand by
//! let webhook = Telegram::new("telegram", "123:token") // every replica receives
//!     .webhook("https://bot.example/webhooks/telegram", Secret::new("of_its_own"));
//! ```
//!
//! Problem of polling: asking for updates from an offset on *is* the acknowledgement of all before
//! it, and Telegram serves one poller at a time. Idea: the offset is a cursor, written in the commit
//! that journals the updates before it (SPEC D5), and the next question is asked after that commit.
//! So an update is asked for again until it is journaled, and its id makes it one turn however often
//! it comes, by whichever way.
//!
//! A poller that finds another one at work (409: its predecessor's last question is still open)
//! asks again at short intervals and is not connected meanwhile: not ready, and after `provider_down`
//! it steps down.
//!
//! A turn is made by what a user says or presses; edits, and what members do, make none. In a group
//! each participant has their own chat key. A group that becomes a supergroup has another id: the
//! event [`ChatMoved`](crate::bot::Event) tells of it, and what is sent to the old id goes to the new.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use hyper::Method;
use serde_json::Value;

use super::outward::Outward;
use super::webhook::{ErrorBody, decode};
use super::{
    Batch, Capabilities, Closed, Delivery, Link, Provider, ProviderError, Secret, SendError,
    SentId, Webhook, WebhookRequest, WebhookResponse,
};
use crate::store::Store;
use crate::types::ChatKey;

mod api;
pub mod entities;
mod poll;
mod update;

/// Where the Bot API is, unless said otherwise.
const API: &str = "https://api.telegram.org";

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct Telegram {
    id: String,
    token: Arc<str>,
    base_url: String,
    /// Its address and secret token, where updates come by webhook.
    webhook: Option<(String, Secret)>,
    /// How long a question for updates may stay open, in seconds.
    poll_s: u64,
    outward: Outward,
}

impl fmt::Debug for Telegram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token is a secret, and whoever has it is the bot.
        f.debug_struct("Telegram").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Telegram {
    /// A bot of that token under that id, by long polling.
    pub fn new(id: impl Into<String>, token: impl Into<Arc<str>>) -> Self {
        Self {
            id: id.into(),
            token: token.into(),
            base_url: API.to_owned(),
            webhook: None,
            poll_s: 50,
            outward: Outward::new(),
        }
    }

    /// By webhook instead: Telegram is told this address, at which `/webhooks/{id}` is reached, and
    /// the secret token that it is to show (1 to 256 of `A–Z a–z 0–9 _ -`).
    #[must_use]
    pub fn webhook(mut self, url: impl Into<String>, secret_token: Secret) -> Self {
        self.webhook = Some((url.into(), secret_token));
        self
    }

    /// Where the Bot API is: a local server, or a fake.
    #[must_use]
    pub fn base_url(mut self, url: impl Into<String>) -> Self {
        self.base_url = url.into().trim_end_matches('/').to_owned();
        self
    }

    /// How long one question for updates may stay open (default 50 s). It is also how long a poller
    /// that froze may stand in its successor's way.
    #[must_use]
    pub fn poll_seconds(mut self, seconds: u64) -> Self {
        self.poll_s = seconds;
        self
    }

    /// The key of a private chat, or of a group without its participants.
    pub fn chat(&self, chat: i64) -> ChatKey {
        ChatKey::new(&self.id, chat.to_string())
    }

    /// Tells Telegram where the webhook is.
    async fn set_webhook(&self, url: &str, secret: &Secret) -> Result<(), ProviderError> {
        let asked = serde_json::json!({
            "url": url,
            "secret_token": secret.text(),
            "allowed_updates": update::ALLOWED,
        });
        match self.call("setWebhook", Some(&asked), api::PATIENCE).await {
            Ok(_) => Ok(()),
            Err(fault) => Err(ProviderError { provider: self.id.clone(), why: fault.to_string() }),
        }
    }
}

#[async_trait]
impl Provider for Telegram {
    fn id(&self) -> &str {
        &self.id
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { exclusive_session: self.webhook.is_none(), listed: 0, sends: true }
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        match &self.webhook {
            None => poll::Poller { telegram: self, link }.run().await,
            Some((url, secret)) => {
                self.set_webhook(url, secret).await?;
                link.connected(&self.id, true);
                link.closing().await;
                Ok(Closed::Asked)
            }
        }
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        self.send_text(delivery).await
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        self.webhook.is_some().then(|| Arc::new(self.clone()) as Arc<dyn Webhook>)
    }
}

#[async_trait]
impl Webhook for Telegram {
    async fn handle(
        &self,
        request: WebhookRequest,
        link: &Link,
        store: &dyn Store,
    ) -> WebhookResponse {
        if request.method != Method::POST.as_str() || !request.path.trim_matches('/').is_empty() {
            return ErrorBody::new("not_found", "Telegram posts updates here").at(404);
        }
        let shown = |name: &str| request.headers.iter().find(|header| header.0 == name);
        let shown = shown("x-telegram-bot-api-secret-token");
        let secret = self.webhook.as_ref().map(|(_, secret)| secret);
        if !secret.is_some_and(|secret| shown.is_some_and(|(_, token)| secret.is(token))) {
            return ErrorBody::new("bad_token", "the secret token is another").at(401);
        }
        match decode::<Value>(&request.body) {
            Ok(update) => {
                let mut batch = Batch::default();
                self.unpack(&update, "update", &mut batch);
                batch.answer(&self.id, link, store).await
            }
            Err(response) => response,
        }
    }
}
