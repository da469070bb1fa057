//! The public side: webhooks of the providers, and the chat page.
//!
//! A provider's webhook knows no HTTP framework: it is given a request whose body is read and
//! bounded, and answers with status, headers and body. What it answers 200 was committed before
//! (SPEC G1); that is the provider's and the link's business, not this layer's.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::{RawPathParams, Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use tokio_util::sync::CancellationToken;

use super::gate::{self, Gate};
use super::webchat as chat_page;
use super::{ApiError, body};
use crate::bot::Bot;
use crate::provider::{Link, Webhook, WebhookRequest, webchat};
use crate::store::Store;

impl Bot {
    /// The webhooks of its providers, under `/webhooks/{id}`, and, where it has the web chat
    /// provider, the chat page at `/` and `/chat`: to be nested into the user's own app (SPEC L9).
    /// It binds nothing.
    ///
    /// ```
    /// # fn mount(bot: botmesh::bot::Bot) -> axum::Router {
    /// axum::Router::new().nest("/bot", bot.router())
    /// # }
    /// ```
    pub fn router<S: Clone + Send + Sync + 'static>(&self) -> Router<S> {
        let hooks = webhooks(Webhooks {
            hooks: self.webhooks().into_iter().collect(),
            link: self.link(),
            store: self.store(),
        });
        if !self.has_provider(webchat::CHANNEL) {
            return hooks;
        }
        let (channel, stop) = (webchat::CHANNEL.to_owned(), CancellationToken::new());
        let options = chat_page::Options { channel, nodes: Vec::new(), stop };
        hooks.merge(chat_page::router(self.store(), options))
    }
}

/// The whole public listener of a bot: webhooks, and the chat page, which knows the other nodes
/// and may be used from theirs.
pub fn router(bot: &Bot, page: chat_page::Options) -> Router {
    let hooks = webhooks(Webhooks {
        hooks: bot.webhooks().into_iter().collect(),
        link: bot.link(),
        store: bot.store(),
    });
    let cors = chat_page::cors(page.nodes.clone());
    hooks
        .merge(chat_page::router(bot.store(), page))
        .fallback(async || ApiError::NoRoute)
        .method_not_allowed_fallback(async || ApiError::Method)
        .layer(cors)
}

/// The largest webhook body, in bytes (SPEC M3).
pub const WEBHOOK_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Webhook requests under way; further ones are refused with 503 and come again.
pub const WEBHOOKS_IN_FLIGHT_MAX: usize = 2_048;

/// Webhooks of one bot, and what they work with.
pub struct Webhooks {
    /// By provider's id.
    pub hooks: HashMap<String, Arc<dyn Webhook>>,
    /// The way to the bot.
    pub link: Link,
    /// The bot's store.
    pub store: Arc<dyn Store>,
}

/// `/webhooks/{id}` and everything below it, for each provider.
pub fn webhooks<S: Clone + Send + Sync + 'static>(webhooks: Webhooks) -> Router<S> {
    Router::new()
        .route("/webhooks/{provider}", any(handle))
        .route("/webhooks/{provider}/", any(handle))
        .route("/webhooks/{provider}/{*path}", any(handle))
        .layer(from_fn_with_state(Gate::new(WEBHOOKS_IN_FLIGHT_MAX), gate::admit))
        .with_state(Arc::new(webhooks))
}

async fn handle(
    State(webhooks): State<Arc<Webhooks>>,
    params: RawPathParams,
    request: Request,
) -> Result<Response, ApiError> {
    let part = |name| params.iter().find(|(found, _)| *found == name).map(|(_, text)| text);
    let hook = part("provider").and_then(|id| webhooks.hooks.get(id)).ok_or(ApiError::NoRoute)?;
    let path = part("path").unwrap_or_default().to_owned();
    let (parts, raw) = request.into_parts();
    let body = body::read(raw, WEBHOOK_BYTES_MAX).await?;
    let headers = parts.headers.iter().filter_map(|(name, value)| {
        // A header that is not text is none a signature or an event type comes in.
        Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned()))
    });
    let asked = WebhookRequest {
        method: parts.method.as_str().to_owned(),
        path,
        query: parts.uri.query().unwrap_or_default().to_owned(),
        headers: headers.collect(),
        body,
    };
    let answer = hook.handle(asked, &webhooks.link, &*webhooks.store).await;
    let status = StatusCode::from_u16(answer.status).map_err(|_| ApiError::Defect)?;
    let mut response = (status, answer.body).into_response();
    let headers = response.headers_mut();
    // Bytes have a content type of their own here; the provider says what it is, or nothing.
    headers.remove(axum::http::header::CONTENT_TYPE);
    for (name, value) in answer.headers {
        let name = HeaderName::try_from(name).map_err(|_| ApiError::Defect)?;
        let value = HeaderValue::try_from(value).map_err(|_| ApiError::Defect)?;
        headers.append(name, value);
    }
    Ok(response)
}
