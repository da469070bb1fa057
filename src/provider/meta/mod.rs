//! Meta's three: WhatsApp Cloud API, Messenger, Instagram.
//!
//! They share a way in (one webhook, verified by `GET`, signed, many things in one `POST`) and a way
//! out (the Graph API); what differs is the shape of an entry and of a send. So this is one provider
//! with a [`Surface`], and the shapes stand in files of their own.
//!
//! ```no_run
//! use botmesh::provider::Secret;
//! use botmesh::provider::meta::Meta;
//! let whatsapp = Meta::whatsapp("whatsapp", Secret::new("app secret"), Secret::new("verify token"))
//!     .account("1055512345", "access token");
//! ```
//!
//! | request, at `/webhooks/{id}` | answer |
//! |---|---|
//! | `GET ?hub.mode=subscribe&hub.verify_token=…&hub.challenge=…` | the challenge, or 403 |
//! | `POST`, `X-Hub-Signature-256` over the raw body | 200 after the commit of all of it, 401, 400, 503 |
//!
//! A chat is `account/user`: the number or page that was written to, and who wrote, by number where
//! there is one, else by the id Meta gives (a user may have hidden the number). Several accounts share
//! one webhook; what comes for an account that was not named is counted and left.
//!
//! A turn is made by what a user says: a text, a button, a file, a form. Edits, deletions, reactions
//! and what the business itself wrote make none: in a conversation they would be taken for an answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use super::outward::Outward;
use super::webhook::{ErrorBody, decode, form_pairs};
use super::{
    Capabilities, Closed, Delivery, Link, Provider, ProviderError, Secret, SendError, SentId,
    Webhook, WebhookRequest, WebhookResponse,
};
use crate::store::Store;
use crate::types::ChatKey;

mod graph;
mod messenger;
mod unpack;
mod whatsapp;

/// Where the Graph API is, unless said otherwise.
const GRAPH: &str = "https://graph.facebook.com/v23.0";
/// Where Instagram's is, for accounts that logged in there.
const GRAPH_INSTAGRAM: &str = "https://graph.instagram.com/v23.0";

/// Which of the three.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Surface {
    /// WhatsApp Cloud API.
    WhatsApp,
    /// Messenger.
    Messenger,
    /// Instagram messages.
    Instagram,
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Meta {
    id: String,
    surface: Surface,
    app_secret: Secret,
    verify_token: Secret,
    base_url: String,
    // Access tokens by account: a phone number's id, a page's, an Instagram account's.
    accounts: BTreeMap<String, Token>,
    outward: Outward,
}

/// An access token. Never shown.
#[derive(Clone)]
struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Meta {
    /// WhatsApp Cloud API under that id. `app_secret` signs what comes in; `verify_token` is what was
    /// entered beside the webhook's address.
    pub fn whatsapp(id: impl Into<String>, app_secret: Secret, verify_token: Secret) -> Self {
        Self::new(id.into(), Surface::WhatsApp, app_secret, verify_token)
    }

    /// Messenger under that id.
    pub fn messenger(id: impl Into<String>, app_secret: Secret, verify_token: Secret) -> Self {
        Self::new(id.into(), Surface::Messenger, app_secret, verify_token)
    }

    /// Instagram messages under that id.
    pub fn instagram(id: impl Into<String>, app_secret: Secret, verify_token: Secret) -> Self {
        Self::new(id.into(), Surface::Instagram, app_secret, verify_token)
    }

    fn new(id: String, surface: Surface, app_secret: Secret, verify_token: Secret) -> Self {
        let base_url = match surface {
            Surface::WhatsApp | Surface::Messenger => GRAPH,
            Surface::Instagram => GRAPH_INSTAGRAM,
        };
        let (base_url, accounts) = (base_url.to_owned(), BTreeMap::new());
        let outward = Outward::new();
        Self { id, surface, app_secret, verify_token, base_url, accounts, outward }
    }

    /// Adds an account: the id of a phone number, page or Instagram account, and the token that
    /// may send for it.
    #[must_use]
    pub fn account(mut self, account: impl Into<String>, access_token: impl Into<String>) -> Self {
        self.accounts.insert(account.into(), Token(access_token.into()));
        self
    }

    /// Where the Graph API is, with its version: `https://graph.facebook.com/v23.0`.
    #[must_use]
    pub fn base_url(mut self, url: impl Into<String>) -> Self {
        self.base_url = url.into().trim_end_matches('/').to_owned();
        self
    }

    /// The key of the chat between an account and a user.
    pub fn chat(&self, account: &str, user: &str) -> ChatKey {
        ChatKey::new(&self.id, format!("{account}/{user}"))
    }

    /// Answers Meta's question whether this address is ours.
    fn verify(&self, query: &str) -> WebhookResponse {
        let pairs = form_pairs(query);
        let value = |name: &str| pairs.iter().find(|pair| pair.0 == name).map(|pair| &*pair.1);
        let asked = value("hub.mode") == Some("subscribe");
        let token = value("hub.verify_token").is_some_and(|token| self.verify_token.is(token));
        match value("hub.challenge") {
            Some(challenge) if asked && token => {
                let headers = vec![("content-type".to_owned(), "text/plain".to_owned())];
                WebhookResponse { status: 200, headers, body: challenge.to_owned().into() }
            }
            _ => ErrorBody::new("not_verified", "the verify token is another").at(403),
        }
    }

    async fn take(
        &self,
        request: WebhookRequest,
        link: &Link,
        store: &dyn Store,
    ) -> WebhookResponse {
        let header = request.headers.iter().find(|(name, _)| name == "x-hub-signature-256");
        if !header.is_some_and(|(_, value)| self.app_secret.signed(&request.body, value)) {
            return ErrorBody::new("bad_signature", "X-Hub-Signature-256 is not the app's").at(401);
        }
        match decode::<unpack::Envelope>(&request.body) {
            Ok(envelope) => self.unpack(envelope).answer(&self.id, link, store).await,
            Err(response) => response,
        }
    }
}

#[async_trait]
impl Provider for Meta {
    fn id(&self) -> &str {
        &self.id
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { exclusive_session: false, listed: 0, sends: true }
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        link.closing().await;
        Ok(Closed::Asked)
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        self.send_text(delivery).await
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        Some(Arc::new(self.clone()))
    }
}

#[async_trait]
impl Webhook for Meta {
    async fn handle(
        &self,
        request: WebhookRequest,
        link: &Link,
        store: &dyn Store,
    ) -> WebhookResponse {
        match (request.method.as_str(), request.path.trim_matches('/')) {
            ("GET", "") => self.verify(&request.query),
            ("POST", "") => self.take(request, link, store).await,
            (_, "") => {
                let mut response = ErrorBody::new("method_not_allowed", "see Allow").at(405);
                response.headers.push(("allow".to_owned(), "GET, POST".to_owned()));
                response
            }
            _ => ErrorBody::new("not_found", "there is nothing below the webhook").at(404),
        }
    }
}
