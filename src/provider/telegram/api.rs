//! Calls of the Bot API, and what their failures mean.

use std::time::Duration;

use hyper::Method;
use serde_json::{Value, json};

use super::Telegram;
use crate::provider::outward::OutwardError;
use crate::provider::{Delivery, SendError, SentId};

/// The longest a call may take that does not wait for updates.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// A wait that is asked for is kept to, up to this.
const RETRY_MAX: Duration = Duration::from_secs(3_600);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// No answer came.
    #[error(transparent)]
    Outward(#[from] OutwardError),
    /// Telegram said no.
    #[error("{code}: {said}")]
    Said {
        code: u64,
        said: String,
        /// After how long to ask again.
        retry_after: Option<Duration>,
        /// The chat's new id.
        moved_to: Option<i64>,
    },
    /// What answered was not Telegram.
    #[error("status {0} without an answer of the Bot API")]
    Foreign(u16),
}

impl Telegram {
    /// Makes a call; its `result`.
    pub(super) async fn call(
        &self,
        method: &str,
        body: Option<&Value>,
        patience: Duration,
    ) -> Result<Value, Fault> {
        let url = format!("{}/bot{}/{method}", self.base_url, self.token);
        let answer = self.outward.call(Method::POST, &url, &[], body, patience).await?;
        let mut said = answer.json();
        match said.get("ok").and_then(Value::as_bool) {
            Some(true) => Ok(said.get_mut("result").map(Value::take).unwrap_or_default()),
            Some(false) => {
                let parameter = |name| said.pointer(&format!("/parameters/{name}"));
                let seconds = parameter("retry_after").and_then(Value::as_u64);
                let description = said.get("description").and_then(Value::as_str);
                Err(Fault::Said {
                    code: said.get("error_code").and_then(Value::as_u64).unwrap_or_default(),
                    said: description.unwrap_or("without description").to_owned(),
                    retry_after: seconds.map(|s| Duration::from_secs(s).min(RETRY_MAX)),
                    moved_to: parameter("migrate_to_chat_id").and_then(Value::as_i64),
                })
            }
            None => Err(Fault::Foreign(answer.status)),
        }
    }

    /// Sends one text; to the new id, where the chat moved.
    pub(super) async fn send_text(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        let Ok(chat) = delivery.chat.chat.parse::<i64>() else {
            let why = format!("{} is no chat of Telegram's", delivery.chat);
            return Err(SendError::Refused { why });
        };
        let sent = match self.send_to(chat, &delivery.text).await {
            Err(Fault::Said { moved_to: Some(to), .. }) => self.send_to(to, &delivery.text).await,
            sent => sent,
        };
        let message = sent.map_err(send_error)?;
        let id = message.get("message_id").and_then(Value::as_i64).unwrap_or_default();
        Ok(SentId(id.to_string()))
    }

    async fn send_to(&self, chat: i64, text: &str) -> Result<Value, Fault> {
        let body = json!({ "chat_id": chat, "text": text });
        self.call("sendMessage", Some(&body), PATIENCE).await
    }
}

fn send_error(fault: Fault) -> SendError {
    match fault {
        Fault::Outward(error) => error.into(),
        // A proxy's or a load balancer's answer: what Telegram made of it is not known.
        Fault::Foreign(status @ 500..) => SendError::OutcomeUnknown {
            why: format!("status {status} without an answer of the Bot API"),
        },
        Fault::Foreign(status) => SendError::Transport {
            why: format!("status {status} without an answer of the Bot API"),
        },
        Fault::Said { retry_after: Some(retry_after), .. } => {
            SendError::RateLimited { retry_after }
        }
        Fault::Said { code: 429, .. } => {
            SendError::RateLimited { retry_after: Duration::from_secs(1) }
        }
        // Its own trouble, or a token that somebody has to renew: the reply keeps its place.
        Fault::Said { code: code @ (401 | 404 | 500..), said, .. } => {
            SendError::Transport { why: format!("{code}: {said}") }
        }
        Fault::Said { code, said, .. } => SendError::Refused { why: format!("{code}: {said}") },
    }
}
