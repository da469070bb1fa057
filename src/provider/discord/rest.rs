//! Calls of the REST API, and what their failures mean.

use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Discord;
use crate::provider::outward::OutwardError;
use crate::provider::{Delivery, SendError, SentId};

/// The longest a call may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// What Discord asks every client to call itself; without it, it may be shut out.
const USER_AGENT: &str = concat!("DiscordBot (botmesh, ", env!("CARGO_PKG_VERSION"), ")");
/// Hexadecimal digits of a nonce, which has 25 characters at most.
const NONCE_BYTES: usize = 12;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// No answer came.
    #[error(transparent)]
    Outward(#[from] OutwardError),
    /// It is to be made again, and later.
    #[error("rate limited; again in {0:?}")]
    Wait(Duration),
    /// Discord said no.
    #[error("{status}, code {code}: {said}")]
    Said { status: u16, code: u64, said: String },
    /// What answered was not Discord.
    #[error("status {0} without an answer of Discord's API")]
    Foreign(u16),
}

/// What a call counts towards.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route<'a> {
    /// What its own limit is by: a channel, an interaction's token.
    pub(super) by: &'a str,
    /// Whether it counts towards the limit of the whole bot, too.
    pub(super) shared: bool,
}

impl Discord {
    /// Makes a call; what was answered.
    pub(super) async fn call(
        &self,
        method: Method,
        path: &str,
        route: Route<'_>,
        body: Option<&Value>,
        patience: Duration,
    ) -> Result<Value, Fault> {
        if let Some(wait) = self.limits.wait(route.by, route.shared, Instant::now()) {
            return Err(Fault::Wait(wait));
        }
        let url = format!("{}{path}", self.base_url);
        let authorization = format!("Bot {}", self.token);
        let headers = [("authorization", authorization.as_str()), ("user-agent", USER_AGENT)];
        let answer = self.outward.call(method, &url, &headers, body, patience).await?;
        let said = answer.json();
        if let Some(wait) = self.limits.learn(route.by, &answer, &said, Instant::now()) {
            return Err(Fault::Wait(wait));
        }
        if (200..300).contains(&answer.status) {
            return Ok(said);
        }
        let text = said.get("message").and_then(Value::as_str);
        let code = said.get("code").and_then(Value::as_u64);
        if text.is_none() && code.is_none() {
            // A proxy's page, or what shuts out whole addresses: no word of what was asked.
            return Err(Fault::Foreign(answer.status));
        }
        Err(Fault::Said {
            status: answer.status,
            code: code.unwrap_or_default(),
            said: text.unwrap_or("without message").to_owned(),
        })
    }

    /// Where the gateway is, and how many identifies are left.
    pub(super) async fn gateway_bot(&self) -> Result<Value, Fault> {
        let route = Route { by: "gateway", shared: true };
        self.call(Method::GET, "/gateway/bot", route, None, PATIENCE).await
    }

    /// Sends one text, as a message of its own.
    pub(super) async fn send_text(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        let channel = delivery.chat.chat.as_str();
        if !is_id(channel) {
            let why = format!("{} is no channel of Discord's", delivery.chat);
            return Err(SendError::Refused { why });
        }
        let mut body = content(&delivery.text);
        body["nonce"] = nonce(&delivery.id).into();
        body["enforce_nonce"] = true.into();
        let path = format!("/channels/{channel}/messages");
        let route = Route { by: channel, shared: true };
        let sent = self.call(Method::POST, &path, route, Some(&body), PATIENCE).await;
        sent_id(&sent.map_err(send_error)?)
    }
}

/// A text as it is sent. It may call users by name, and never all at once: what users write may be in
/// it.
pub(super) fn content(text: &str) -> Value {
    json!({ "content": text, "allowed_mentions": { "parse": ["users"] } })
}

/// What Discord calls a message that was made. Where it does not say, something else may have answered.
pub(super) fn sent_id(message: &Value) -> Result<SentId, SendError> {
    let id = message.get("id").and_then(Value::as_str).map(|id| SentId(id.to_owned()));
    let why = || "the answer to it names no message".to_owned();
    id.ok_or_else(|| SendError::OutcomeUnknown { why: why() })
}

/// What a reply is called when it is sent, so that it is made once.
fn nonce(id: &str) -> String {
    Sha256::digest(id).iter().take(NONCE_BYTES).map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a text is an id of Discord's.
pub(super) fn is_id(text: &str) -> bool {
    (1..=20).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
}

pub(super) fn send_error(fault: Fault) -> SendError {
    let why = fault.to_string();
    match fault {
        Fault::Outward(error) => error.into(),
        Fault::Wait(retry_after) => SendError::RateLimited { retry_after },
        // A token that somebody has to renew: the reply keeps its place.
        Fault::Said { status: 401, .. } => SendError::Transport { why },
        // The message may have been made. Where it is sent again soon, it is under the same nonce.
        Fault::Said { status: 500.., .. } | Fault::Foreign(500..) => {
            SendError::OutcomeUnknown { why }
        }
        // Whatever stands between: it did not get as far as Discord.
        Fault::Foreign(_) => SendError::Transport { why },
        Fault::Said { .. } => SendError::Refused { why },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn g3_a_reply_keeps_its_nonce_and_it_fits() {
        let one = nonce("discord:1/0/4/1");
        assert_eq!(one, nonce("discord:1/0/4/1"));
        assert_ne!(one, nonce("discord:1/0/4/2"));
        assert!(one.len() <= 25, "{one}");
    }

    #[test]
    fn g3_what_a_refusal_of_discords_means() {
        let error = |status| send_error(Fault::Said { status, code: 0, said: "no".to_owned() });
        for status in [400, 403, 404] {
            assert!(matches!(error(status), SendError::Refused { .. }), "{status}");
        }
        for status in [500, 502, 503, 504] {
            assert!(matches!(error(status), SendError::OutcomeUnknown { .. }), "{status}");
        }
        assert!(matches!(error(401), SendError::Transport { .. }));
        for status in [302, 400, 403, 404] {
            let error = send_error(Fault::Foreign(status));
            assert!(matches!(error, SendError::Transport { .. }), "{status}");
        }
        let error = send_error(Fault::Foreign(502));
        assert!(matches!(error, SendError::OutcomeUnknown { .. }));
        assert_eq!(sent_id(&json!({ "id": "7" })).unwrap(), SentId("7".to_owned()));
        for odd in [json!(null), json!({}), json!({ "id": 7 })] {
            assert!(matches!(sent_id(&odd), Err(SendError::OutcomeUnknown { .. })), "{odd}");
        }
        let wait = Duration::from_millis(250);
        let limited = send_error(Fault::Wait(wait));
        assert!(matches!(limited, SendError::RateLimited { retry_after } if retry_after == wait));
    }
}
