//! The Graph API: one call sends, and its errors say what is to be done.

use std::time::Duration;

use hyper::Method;
use serde_json::{Value, json};

use super::{Meta, Surface};
use crate::provider::outward::Answer;
use crate::provider::{Delivery, SendError, SentId};

/// The longest a call may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A user who has not written for 24 hours (7 days with a tag) is not written to.
const WINDOW_CLOSED: [(u64, u64); 4] = [(131_047, 0), (10, 2_018_278), (10, 2_534_022), (470, 0)];

/// Codes that ask to wait, and how long where nothing is said.
const TOO_FAST: [(u64, u64); 9] = [
    (4, 60),
    (17, 60),
    (32, 60),
    (613, 60),
    (80_006, 60),
    (80_007, 60),
    (130_429, 5),
    (131_048, 60),
    (131_056, 6),
];

/// Codes that pass: the service's own trouble, and a token that has to be renewed.
const PASSES: [u64; 6] = [1, 2, 131_000, 131_016, 133_004, 190];

impl Meta {
    /// Sends one text.
    pub(super) async fn send_text(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        let Some((account, user)) = delivery.chat.chat.split_once('/') else {
            let why = format!("{} is no chat of the form account/user", delivery.chat);
            return Err(SendError::Refused { why });
        };
        let Some(token) = self.accounts.get(account) else {
            let why = format!("no token was given for account {account}; add .account(..)");
            return Err(SendError::Refused { why });
        };
        let body = self.body(delivery, user);
        let url = format!("{}/{account}/messages", self.base_url);
        let bearer = format!("Bearer {}", token.0);
        let headers = [("authorization", bearer.as_str())];
        let call = self.outward.call(Method::POST, &url, &headers, Some(&body), PATIENCE);
        let answer = call.await?;
        let said = answer.json();
        if (200..300).contains(&answer.status) {
            let id = said.pointer("/messages/0/id").or_else(|| said.get("message_id"));
            return Ok(SentId(id.and_then(Value::as_str).unwrap_or_default().to_owned()));
        }
        Err(fault(&answer, &said))
    }

    fn body(&self, delivery: &Delivery, user: &str) -> Value {
        if self.surface != Surface::WhatsApp {
            let kind = match self.surface {
                Surface::Messenger => Value::from("RESPONSE"),
                _ => Value::Null,
            };
            let mut body = json!({
                "recipient": { "id": user },
                "message": { "text": delivery.text },
            });
            if !kind.is_null() {
                body["messaging_type"] = kind;
            }
            return body;
        }
        // A number is written to as such, an id of one who hides it by another field.
        let field = if user.bytes().all(|b| b.is_ascii_digit()) { "to" } else { "recipient" };
        json!({
            "messaging_product": "whatsapp",
            "recipient_type": "individual",
            field: user,
            "type": "text",
            "text": { "body": delivery.text, "preview_url": false },
            "biz_opaque_callback_data": delivery.id,
        })
    }
}

/// What an answer that is no success means.
fn fault(answer: &Answer, said: &Value) -> SendError {
    let error = said.get("error").unwrap_or(&Value::Null);
    let number = |field| error.get(field).and_then(Value::as_u64).unwrap_or_default();
    let (code, subcode) = (number("code"), number("error_subcode"));
    let message = error.get("message").and_then(Value::as_str).unwrap_or("no message");
    let why = format!("status {}, code {code}.{subcode}: {message}", answer.status);
    if WINDOW_CLOSED.contains(&(code, subcode)) || code == 131_047 {
        return SendError::WindowClosed { why };
    }
    let too_fast = TOO_FAST.iter().find(|known| known.0 == code).map(|known| known.1);
    if answer.status == 429 || too_fast.is_some() {
        let usual = Duration::from_secs(too_fast.unwrap_or(5));
        return SendError::RateLimited { retry_after: answer.retry_after().unwrap_or(usual) };
    }
    let transient = error.get("is_transient").and_then(Value::as_bool) == Some(true);
    match answer.status {
        _ if PASSES.contains(&code) || transient => SendError::Transport { why },
        // What stands between us and Meta answered: whether Meta took it is not known.
        500.. if error.is_null() => SendError::OutcomeUnknown { why },
        500.. => SendError::Transport { why },
        _ => SendError::Refused { why },
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use hyper::header::HeaderMap;

    use super::*;

    fn fault_of(status: u16, body: &'static str) -> SendError {
        let body = Bytes::from_static(body.as_bytes());
        let answer = Answer { status, headers: HeaderMap::new(), body };
        fault(&answer, &answer.json())
    }

    /// A proxy may answer after Meta has taken the message.
    #[test]
    fn g3_what_a_proxy_answers_leaves_the_outcome_open_and_what_meta_answers_does_not() {
        for status in [500, 502, 503, 504] {
            let found = fault_of(status, "<html>upstream</html>");
            assert!(matches!(found, SendError::OutcomeUnknown { .. }), "{status}: {found}");
            let found = fault_of(status, r#"{"error":{"code":2,"message":"busy"}}"#);
            assert!(matches!(found, SendError::Transport { .. }), "{status}: {found}");
        }
    }
}
