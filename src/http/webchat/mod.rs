//! The chat page and the stream of replies it lives on (SPEC D4, issue *the spine*).
//!
//! Problem: the node a page is connected to dies, and the page must go on at another without
//! missing a reply or showing one twice. Idea: a chat's replies are numbered in the replicated
//! outbox, so a number means the same on every node. The stream carries it as the event's id; the
//! page asks any node for what comes after the last one it showed, and passes over what it has.
//!
//! Invariants:
//! - Replies are pushed: the stream sleeps in [`Store::outbox_beyond`] until this node applied more.
//! - The page tells other nodes by `GET webchat/nodes`; their origins, and no others, may use the
//!   stream and the webhook from a page of this one (CORS).
//! - The page is one file, loads nothing else, and writes text only as text.

mod origins;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderMap, Method, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures_util::stream::{self, Stream, StreamExt};
use serde::Deserialize;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tower_http::cors::{AllowOrigin, CorsLayer};

use super::ApiError;
use crate::store::{OutboxEntry, Store};
use crate::types::ChatKey;

pub use origins::{Origin, OriginError};

/// The page.
const PAGE: &str = include_str!("page.html");

/// Entries read from the outbox at once.
const READ_MAX: usize = 100;

/// How often a silent stream says that it lives. The page goes elsewhere after three missed.
const PING_EVERY: Duration = Duration::from_secs(4);

/// Browsers do not hand on an event without data.
const SOMETHING: &str = "-";

/// What the page is served with.
#[derive(Clone)]
pub struct Options {
    /// The provider whose chats the page shows: it posts to `/webhooks/{channel}`.
    pub channel: String,
    /// Where the page finds the nodes, this one included: the public addresses.
    pub nodes: Vec<Origin>,
    /// Ends open streams, so that pages go elsewhere at once when this node stops.
    pub stop: CancellationToken,
}

#[derive(Clone)]
struct Chat {
    store: Arc<dyn Store>,
    options: Arc<Options>,
}

/// `/`, `/chat`, `/webchat/events` and `/webchat/nodes`.
pub fn router<S: Clone + Send + Sync + 'static>(
    store: Arc<dyn Store>,
    options: Options,
) -> Router<S> {
    let chat = Chat { store, options: Arc::new(options) };
    Router::new()
        .route("/", get(page))
        .route("/chat", get(page))
        .route("/webchat/events", get(events))
        .route("/webchat/nodes", get(nodes))
        .with_state(chat)
}

/// Lets pages of the other nodes use this one.
pub fn cors(nodes: Vec<Origin>) -> CorsLayer {
    let allowed = AllowOrigin::predicate(move |origin, _| {
        let origin = origin.to_str().ok().and_then(|text| text.parse::<Origin>().ok());
        origin.is_some_and(|origin| nodes.iter().any(|node| node.is_same_node(&origin)))
    });
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers([header::CONTENT_TYPE])
        .max_age(Duration::from_secs(600))
}

async fn page(State(chat): State<Chat>) -> Response {
    let others: String = chat
        .options
        .nodes
        .iter()
        .flat_map(Origin::spellings)
        .map(|url| format!(" {url}"))
        .collect();
    let policy = format!(
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
         img-src data:; connect-src 'self'{others}; base-uri 'none'; form-action 'none'"
    );
    let headers = [
        (CONTENT_SECURITY_POLICY, policy),
        (X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (CACHE_CONTROL, "no-cache".to_owned()),
    ];
    (headers, Html(PAGE)).into_response()
}

async fn nodes(State(chat): State<Chat>) -> impl IntoResponse {
    let nodes: Vec<String> = chat.options.nodes.iter().map(Origin::to_string).collect();
    Json(json!({ "channel": chat.options.channel, "nodes": nodes }))
}

#[derive(Debug, Deserialize)]
struct Subscribe {
    chat: String,
    #[serde(default)]
    after: u64,
}

/// `GET /webchat/events?chat=C&after=N`: the replies of the chat with a number above `after`, those
/// there are and those to come. A browser that reconnects by itself says the last one it had in
/// `Last-Event-ID`, which then counts.
async fn events(
    State(chat): State<Chat>,
    query: Result<Query<Subscribe>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let Query(Subscribe { chat: name, after }) =
        query.map_err(|error| ApiError::Query { why: error.body_text() })?;
    let key = ChatKey::new(&chat.options.channel, name);
    key.check()?;
    let resumed = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
    let after = resumed.map_or(after, |resumed: u64| resumed.max(after));
    let stop = chat.options.stop.clone();
    let replies = replies(chat.store, key.to_string(), after);
    let hello = Event::default().event("hello").retry(Duration::from_millis(500)).data(SOMETHING);
    let events = stream::once(async { Ok::<_, Infallible>(hello) }).chain(replies);
    let alive =
        KeepAlive::new().interval(PING_EVERY).event(Event::default().event("ping").data(SOMETHING));
    let sse = Sse::new(events.take_until(stop.cancelled_owned())).keep_alive(alive);
    // Proxies that gather output would hold replies back.
    Ok(([("x-accel-buffering", "no")], sse).into_response())
}

/// The replies after a number, for ever. Ends where the store cannot be read: the page asks again,
/// here or elsewhere.
fn replies(
    store: Arc<dyn Store>,
    chat: String,
    after: u64,
) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold((store, chat, after), |(store, chat, after)| async move {
        loop {
            let page = store.outbox(&chat, after, READ_MAX).await.ok()?;
            match page.last() {
                Some(last) => {
                    let after = last.number;
                    let events: Vec<_> = page.iter().map(|entry| Ok(event(entry))).collect();
                    return Some((stream::iter(events), (store, chat, after)));
                }
                None => store.outbox_beyond(&chat, after).await.ok()?,
            }
        }
    })
    .flatten()
}

fn event(entry: &OutboxEntry) -> Event {
    let text = serde_json::from_slice::<serde_json::Value>(&entry.body).ok();
    let text = text.as_ref().and_then(|body| body.get("text")).and_then(|text| text.as_str());
    let data = json!({
        "number": entry.number,
        "id": entry.id,
        "in_reply_to": entry.in_reply_to,
        "text": text.unwrap_or_default(),
        "fence": entry.fence,
        "turn_seq": entry.turn_seq,
    });
    Event::default().id(entry.number.to_string()).event("reply").data(data.to_string())
}
