//! The chat page's channel: messages by `POST`, replies listed in the store and pushed to the page.
//!
//! The page keeps the number of the last reply it showed; whichever node it is connected to goes on
//! from there (an outbox number means the same on every node), so it misses none and shows none
//! twice. Serving the page and the stream is the public listener's; see `http`.

use std::sync::Arc;

use async_trait::async_trait;

use super::webhook::{ErrorBody, take_post};
use super::{
    Capabilities, Closed, Delivery, Link, Provider, ProviderError, SendError, SentId, Webhook,
    WebhookRequest, WebhookResponse,
};
use crate::store::Store;
use crate::types::ChatKey;

/// The provider's id, the `channel` of its chats.
pub const CHANNEL: &str = "webchat";

/// Replies listed a chat.
pub const LISTED: u32 = 1000;

/// The key of a chat's outbox.
pub fn room(chat: &str) -> String {
    ChatKey::new(CHANNEL, chat).to_string()
}

/// See the module.
#[derive(Debug, Clone, Copy, Default)]
pub struct Webchat;

#[async_trait]
impl Provider for Webchat {
    fn id(&self) -> &str {
        CHANNEL
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { exclusive_session: false, listed: LISTED, sends: false }
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        link.closing().await;
        Ok(Closed::Asked)
    }

    async fn send(&self, _delivery: &Delivery) -> Result<SentId, SendError> {
        // Being listed is being delivered.
        Ok(SentId::default())
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        Some(Arc::new(*self))
    }
}

#[async_trait]
impl Webhook for Webchat {
    async fn handle(
        &self,
        request: WebhookRequest,
        link: &Link,
        _store: &dyn Store,
    ) -> WebhookResponse {
        match (request.method.as_str(), request.path.trim_matches('/')) {
            ("POST", "" | "messages") => take_post(CHANNEL, &request.body, link).await,
            _ => ErrorBody::new("not_found", "POST {id, chat, text} here").at(404),
        }
    }
}
