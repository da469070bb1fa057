//! What goes over the wire: one message in, one reply out.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::provider::{DeliverError, Delivery, Link, Reply, SendError, SentId, WebhookResponse};
use crate::types::{ChatKey, Message};

/// A message as it is posted.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Posted {
    /// The caller's id; the same id is handled once.
    pub id: String,
    /// The chat.
    pub chat: String,
    /// In a group, who speaks.
    #[serde(default)]
    pub participant: Option<String>,
    /// The text.
    pub text: String,
}

/// The answer to a message that was taken.
#[derive(Serialize)]
struct Accepted {
    accepted: bool,
    duplicate: bool,
}

/// The answer to a request of another shape.
#[derive(Serialize)]
pub(super) struct Taken {
    pub(super) accepted: bool,
    pub(super) taken: usize,
    pub(super) duplicates: usize,
}

/// The body of an error (the shape of SPEC K6).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// A name for programs.
    pub error: String,
    /// A sentence for people.
    pub message: String,
    /// When to ask again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

impl ErrorBody {
    /// An error of that name.
    pub fn new(error: impl Into<String>, message: impl Into<String>) -> Self {
        Self { error: error.into(), message: message.into(), retry_after_ms: None }
    }

    /// As a response of that status.
    pub fn at(&self, status: u16) -> WebhookResponse {
        json(status, self)
    }
}

pub(crate) fn json(status: u16, body: &impl Serialize) -> WebhookResponse {
    // The bodies here are strings, numbers and flags: they always serialise.
    let body = serde_json::to_vec(body).unwrap_or_default();
    let headers = vec![("content-type".to_owned(), "application/json".to_owned())];
    WebhookResponse { status, headers, body: body.into() }
}

/// 503 with `Retry-After`: nothing was taken, or whether it was is unknown; the same id may be
/// posted again either way.
pub(crate) fn unavailable(why: String, retry_after: Duration) -> WebhookResponse {
    let mut body = ErrorBody::new("unavailable", why);
    body.retry_after_ms = Some(retry_after.as_millis() as u64);
    let mut response = body.at(503);
    let seconds = retry_after.as_secs_f64().ceil().max(1.0) as u64;
    response.headers.push(("retry-after".to_owned(), seconds.to_string()));
    response
}

/// Takes one posted message of a channel: 200 after the commit, 400 with the JSON path where it does
/// not decode, 413 where it is too large, 503 where the group cannot commit.
pub async fn take_post(channel: &str, body: &[u8], link: &Link) -> WebhookResponse {
    let posted: Posted = match decode(body) {
        Ok(posted) => posted,
        Err(response) => return response,
    };
    let mut chat = ChatKey::new(channel, posted.chat);
    chat.participant = posted.participant;
    let message = Message::text(posted.id, chat, posted.text);
    match link.deliver(vec![message]).await {
        Ok(delivered) => {
            let duplicate = delivered.first().is_some_and(|delivered| delivered.duplicate);
            json(200, &Accepted { accepted: true, duplicate })
        }
        Err(DeliverError::Invalid { why, .. }) => ErrorBody::new("bad_message", why).at(400),
        Err(DeliverError::Unavailable { why, retry_after }) => unavailable(why, retry_after),
        Err(error) => unavailable(error.to_string(), Duration::from_secs(1)),
    }
}

/// Decodes a body; where it is not what it should be, the answer 400 that says where.
pub(crate) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, WebhookResponse> {
    let mut json_body = serde_json::Deserializer::from_slice(body);
    let decoded = serde_path_to_error::deserialize(&mut json_body)
        .map_err(|error| undecodable(&error.path().to_string(), error.inner()))?;
    json_body.end().map_err(|error| undecodable(".", &error))?;
    Ok(decoded)
}

/// Says where the fault is and of what kind, and nothing of the content (SPEC M1).
fn undecodable(path: &str, error: &serde_json::Error) -> WebhookResponse {
    let kind = match error.classify() {
        serde_json::error::Category::Data => "has the wrong type or lacks a field",
        serde_json::error::Category::Eof => "ends too early",
        _ => "is not JSON",
    };
    let place = format!("line {}, column {}", error.line(), error.column());
    ErrorBody::new("undecodable", format!("the body {kind} at {path} ({place})")).at(400)
}

/// Posts one reply.
pub(super) async fn reply(
    url: &reqwest::Url,
    client: &reqwest::Client,
    delivery: &Delivery,
) -> Result<SentId, SendError> {
    let reply = Reply {
        id: delivery.id.clone(),
        chat: delivery.chat.chat.clone(),
        participant: delivery.chat.participant.clone(),
        in_reply_to: delivery.in_reply_to.clone(),
        text: delivery.text.clone(),
        fence: delivery.fence.0,
        turn_seq: delivery.turn_seq,
    };
    let response = client.post(url.clone()).json(&reply).send().await;
    let response = response.map_err(|error| {
        let never_left = error.is_connect() || error.is_builder();
        let why = error.without_url().to_string();
        match never_left {
            true => SendError::Transport { why },
            // Whoever listens there may have read it before it fell silent.
            false => SendError::OutcomeUnknown { why },
        }
    })?;
    if response.status().is_success() {
        return Ok(SentId(reply.id));
    }
    let header = response.headers().get("retry-after").and_then(|value| value.to_str().ok());
    if let Some(seconds) = header.and_then(|value| value.trim().parse().ok()) {
        let retry_after = Duration::from_secs(seconds).min(Duration::from_secs(60));
        return Err(SendError::RateLimited { retry_after });
    }
    // Anything but 2xx is tried again, whatever it is (SPEC N5).
    Err(SendError::Transport { why: format!("the reply URL answered {}", response.status()) })
}
