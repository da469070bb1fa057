//! The generic webhook: JSON in by `POST`, replies out by `POST` to a URL and listed (SPEC N5).
//!
//! | request, below `/webhooks/{id}` | answer |
//! |---|---|
//! | `POST` `{id, chat, participant?, text}` | 200 `{accepted: true, duplicate}` after the commit |
//! | `GET replies?chat=C[&participant=P]` | the last 1,000 replies of the chat, in the order sent |
//!
//! Programs that sign what they post, or show a token, are held to it ([`WebhookProvider::signed`],
//! [`WebhookProvider::token`]); those that post JSON of their own are understood by a [`Mapping`].
//!
//! Without `participant` the list holds the whole chat, all participants; with it, only the replies
//! to that one.

mod mapping;
mod post;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{
    BadItem, Capabilities, Closed, DeliverError, Delivery, Link, Provider, ProviderError, Secret,
    SendError, SentId, Webhook, WebhookRequest, WebhookResponse,
};
use crate::store::Store;
use crate::types::ChatKey;

pub use mapping::{Mapping, PathError};
pub use post::{ErrorBody, Posted, take_post};
pub(crate) use post::{decode, unavailable};

/// Replies listed a chat.
pub const LISTED: u32 = 1000;

/// Where replies are posted to is not a URL this can post to.
#[derive(Debug, Clone, thiserror::Error)]
#[error("reply URL {url:?}: {why}; write http://host:port/path")]
pub struct ReplyUrlError {
    /// What was given.
    pub url: String,
    /// What is wrong.
    pub why: String,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct WebhookProvider {
    id: String,
    reply: Option<(reqwest::Url, reqwest::Client)>,
    check: Option<Check>,
    mapping: Option<Mapping>,
}

/// How a request shows who sent it.
#[derive(Debug, Clone)]
enum Check {
    /// HMAC-SHA256 of the raw body in this header.
    Signed { secret: Secret, header: String },
    /// The secret itself, as bearer token.
    Token(Secret),
}

impl WebhookProvider {
    /// The webhook of that id; replies are listed.
    pub fn new(id: impl Into<String>) -> Self {
        Self { id: id.into(), reply: None, check: None, mapping: None }
    }

    /// Takes only what is signed: HMAC-SHA256 of the raw body, in hexadecimal digits, in this
    /// header, `sha256=` before it or not. Without a signature, or with another: 401.
    #[must_use]
    pub fn signed(mut self, secret: Secret, header: &str) -> Self {
        self.check = Some(Check::Signed { secret, header: header.to_ascii_lowercase() });
        self
    }

    /// Takes only what shows this token: `Authorization: Bearer TOKEN`, else 401. The list of replies
    /// asks for it as well.
    #[must_use]
    pub fn token(mut self, token: Secret) -> Self {
        self.check = Some(Check::Token(token));
        self
    }

    /// Understands JSON of another shape. The answer counts: `{accepted: true, taken, duplicates}`.
    #[must_use]
    pub fn mapping(mut self, mapping: Mapping) -> Self {
        self.mapping = Some(mapping);
        self
    }

    /// Replies are posted to this URL too, in order per chat, again until the answer is 2xx.
    pub fn reply_url(mut self, url: &str) -> Result<Self, ReplyUrlError> {
        let fault = |why: String| ReplyUrlError { url: url.to_owned(), why };
        let parsed = reqwest::Url::parse(url).map_err(|error| fault(error.to_string()))?;
        if parsed.scheme() != "http" {
            return Err(fault(format!("the scheme {:?} is not supported", parsed.scheme())));
        }
        let client = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(Duration::from_secs(2))
            .timeout(Duration::from_secs(10))
            .pool_idle_timeout(Duration::from_secs(10))
            .build()
            .map_err(|error| fault(error.to_string()))?;
        self.reply = Some((parsed, client));
        Ok(self)
    }
}

#[async_trait]
impl Provider for WebhookProvider {
    fn id(&self) -> &str {
        &self.id
    }

    fn capabilities(&self) -> Capabilities {
        let sends = self.reply.is_some();
        Capabilities { exclusive_session: false, listed: LISTED, sends }
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        link.closing().await;
        Ok(Closed::Asked)
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        let Some((url, client)) = &self.reply else { return Ok(SentId::default()) };
        post::reply(url, client, delivery).await
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        Some(Arc::new(self.clone()))
    }
}

#[async_trait]
impl Webhook for WebhookProvider {
    async fn handle(
        &self,
        request: WebhookRequest,
        link: &Link,
        store: &dyn Store,
    ) -> WebhookResponse {
        if !self.admits(&request) {
            return ErrorBody::new("bad_signature", "signature or token is another").at(401);
        }
        match (request.method.as_str(), request.path.trim_matches('/')) {
            ("POST", "") => match &self.mapping {
                None => post::take_post(&self.id, &request.body, link).await,
                Some(mapping) => self.take_mapped(mapping, &request.body, link, store).await,
            },
            ("GET", "replies") => self.list(&request.query, store).await,
            (_, "" | "replies") => {
                let allow = if request.path.trim_matches('/').is_empty() { "POST" } else { "GET" };
                let mut response = ErrorBody::new("method_not_allowed", "see Allow").at(405);
                response.headers.push(("allow".to_owned(), allow.to_owned()));
                response
            }
            _ => ErrorBody::new("not_found", "POST here, or GET replies?chat=C").at(404),
        }
    }
}

impl WebhookProvider {
    /// Whether a request comes from whom it should; asked before anything of it is parsed.
    fn admits(&self, request: &WebhookRequest) -> bool {
        let header = |wanted: &str| {
            let found = request.headers.iter().find(|(name, _)| name == wanted);
            found.map(|(_, value)| value.as_str())
        };
        match &self.check {
            None => true,
            Some(Check::Token(token)) => {
                let shown = header("authorization").and_then(|value| value.split_once(' '));
                shown.is_some_and(|(scheme, shown)| {
                    scheme.eq_ignore_ascii_case("bearer") && token.is(shown.trim())
                })
            }
            // A question has no body to sign; it is asked by whoever is let through to the listener.
            Some(Check::Signed { .. }) if request.method == "GET" => true,
            Some(Check::Signed { secret, header: name }) => {
                header(name).is_some_and(|signature| secret.signed(&request.body, signature))
            }
        }
    }

    async fn take_mapped(
        &self,
        mapping: &Mapping,
        body: &[u8],
        link: &Link,
        store: &dyn Store,
    ) -> WebhookResponse {
        let body: serde_json::Value = match decode(body) {
            Ok(body) => body,
            Err(response) => return response,
        };
        let batch = match mapping.unpack(&self.id, &body) {
            Ok(batch) => batch,
            Err(BadItem { at, why }) => {
                return ErrorBody::new("undecodable", format!("at {at}: {why}")).at(400);
            }
        };
        match batch.take(&self.id, link, store).await {
            Ok(delivered) => {
                let duplicates = delivered.iter().filter(|one| one.duplicate).count();
                let counted =
                    post::Taken { accepted: true, taken: delivered.len() - duplicates, duplicates };
                post::json(200, &counted)
            }
            Err(DeliverError::Unavailable { why, retry_after }) => unavailable(why, retry_after),
            Err(error) => unavailable(error.to_string(), Duration::from_secs(1)),
        }
    }

    async fn list(&self, query: &str, store: &dyn Store) -> WebhookResponse {
        let (mut chat, mut participant) = (None, None);
        for (name, value) in form_pairs(query) {
            match name.as_str() {
                "chat" => chat = Some(value),
                "participant" => participant = Some(value),
                _ => {}
            }
        }
        let Some(chat) = chat else {
            return ErrorBody::new("chat_missing", "say which: replies?chat=C").at(400);
        };
        if let Err(error) = ChatKey::new(&self.id, &chat).check() {
            return ErrorBody::new("bad_chat", error.to_string()).at(400);
        }
        let keep = LISTED as usize;
        let found = super::replies(store, &self.id, &chat, participant.as_deref(), keep).await;
        match found {
            Ok(replies) => post::json(200, &replies),
            Err(error) => post::unavailable(error.to_string(), Duration::from_secs(1)),
        }
    }
}

/// The pairs of a query string.
pub(crate) fn form_pairs(query: &str) -> Vec<(String, String)> {
    let decode = |text: &str| {
        let text = text.replace('+', " ");
        percent_encoding::percent_decode_str(&text).decode_utf8_lossy().into_owned()
    };
    query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(name, value)| (decode(name), decode(value)))
        .collect()
}
