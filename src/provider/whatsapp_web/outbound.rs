//! What the bot says, on its way to WhatsApp.
//!
//! A message goes out under an id made of the reply's own, so the same reply has the same one however
//! often and from whichever replica it is sent; WhatsApp shows messages of one sender and id once.
//! The server answers each with an `ack`, which is what counts as sent: without one nobody knows.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;
use whatsapp_rust::send::SendError as ClientSendError;
use whatsapp_rust::wacore::proto_helpers::MessageBuilderExt;
use whatsapp_rust::wacore_binary::{Jid, JidExt};
use whatsapp_rust::waproto::whatsapp as wa;
use whatsapp_rust::{Client, ClientError, SendOptions};

use crate::provider::{Delivery, SendError, SentId};

/// The longest a send may take, from its keys to the server's answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// A pause where the server asks for one and does not say how long.
const RATE_PAUSE: Duration = Duration::from_secs(5);

/// The connection there is, and who waits for the server's answers.
#[derive(Default)]
pub(super) struct Outbound {
    client: Mutex<Option<Arc<Client>>>,
    waiting: Mutex<HashMap<String, oneshot::Sender<Option<String>>>>,
}

/// No longer waits, whatever became of it.
struct Waiting<'a> {
    outbound: &'a Outbound,
    id: &'a str,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.outbound.waiting.lock().remove(self.id);
    }
}

/// The id that a reply goes out under, in the form WhatsApp's own clients use.
fn stanza_id(delivery: &str) -> String {
    let digest = Sha256::digest(delivery);
    let hex: String = digest.iter().take(9).map(|byte| format!("{byte:02X}")).collect();
    format!("3EB0{hex}")
}

impl Outbound {
    /// This client sends from now on.
    pub(super) fn by(&self, client: Arc<Client>) {
        *self.client.lock() = Some(client);
    }

    /// This client sends no more; another may already.
    pub(super) fn gone(&self, client: &Arc<Client>) {
        let mut sends = self.client.lock();
        if sends.as_ref().is_some_and(|sends| Arc::ptr_eq(sends, client)) {
            *sends = None;
            drop(sends);
            self.lost();
        }
    }

    /// The connection is lost: whoever waits for an answer hears that none will come.
    pub(super) fn lost(&self) {
        self.waiting.lock().clear();
    }

    /// The server answered: taken, or refused with this code.
    pub(super) fn answered(&self, id: &str, refused: Option<String>) {
        if let Some(waiting) = self.waiting.lock().remove(id) {
            // It may have given up waiting.
            let _ = waiting.send(refused);
        }
    }

    pub(super) async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        let to = delivery.chat.chat.parse::<Jid>().ok();
        let Some(to) = to.filter(|to| to.is_pn() || to.is_lid() || to.is_group()) else {
            let why = format!("{} is no chat of WhatsApp's", delivery.chat);
            return Err(SendError::Refused { why });
        };
        let Some(client) = self.client.lock().clone() else {
            return Err(SendError::Transport { why: "not connected".to_owned() });
        };
        let id = stanza_id(&delivery.id);
        let (answer, answered) = oneshot::channel();
        self.waiting.lock().insert(id.clone(), answer);
        let _waiting = Waiting { outbound: self, id: &id };
        let options = SendOptions::default().with_message_id(id.clone());
        let sending = async {
            let message = wa::Message::text(delivery.text.clone());
            client.send_message_with_options(to, message, options).await.map_err(fault)?;
            let gone = || SendError::OutcomeUnknown { why: "the connection ended".to_owned() };
            match answered.await.map_err(|_| gone())? {
                None => Ok(SentId(id.clone())),
                Some(code) => Err(refused(&code)),
            }
        };
        match tokio::time::timeout(PATIENCE, sending).await {
            Ok(sent) => sent,
            Err(_elapsed) => {
                let why = format!("WhatsApp did not answer within {PATIENCE:?}");
                Err(SendError::OutcomeUnknown { why })
            }
        }
    }
}

/// What the client could not do, by whether it may have left.
fn fault(error: ClientSendError) -> SendError {
    let why = error.to_string();
    match error {
        ClientSendError::InvalidRequest(_) => SendError::Refused { why },
        // The frame is on its way, or was; the connection says no more.
        ClientSendError::Client(ClientError::Socket(_) | ClientError::EncryptSend(_)) => {
            SendError::OutcomeUnknown { why }
        }
        // Before that: not logged in, keys or devices that could not be asked for, a ratchet that
        // could not be stored.
        _ => SendError::Transport { why },
    }
}

fn refused(code: &str) -> SendError {
    match code {
        "429" => SendError::RateLimited { retry_after: RATE_PAUSE },
        // An error of its own: it does not say how far it came.
        "500" | "503" => SendError::OutcomeUnknown { why: format!("WhatsApp answered {code}") },
        // 463: it wants a token that only somebody who has written lately gives.
        "463" => SendError::WindowClosed { why: format!("WhatsApp answered {code}") },
        _ => SendError::Refused { why: format!("WhatsApp answered {code}") },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn g3_the_same_reply_has_the_same_id() {
        let id = stanza_id("wa:1@s.whatsapp.net/order/2/0");
        assert_eq!(id, stanza_id("wa:1@s.whatsapp.net/order/2/0"));
        assert_ne!(id, stanza_id("wa:1@s.whatsapp.net/order/2/1"));
        assert!(id.len() == 22 && id.starts_with("3EB0"), "{id}");
        assert!(id.chars().all(|c| c.is_ascii_digit() || c.is_ascii_uppercase()), "{id}");
    }

    #[test]
    fn g3_what_a_refusal_means_is_told_apart() {
        assert!(matches!(refused("429"), SendError::RateLimited { .. }));
        assert!(matches!(refused("503"), SendError::OutcomeUnknown { .. }));
        assert!(matches!(refused("463"), SendError::WindowClosed { .. }));
        assert!(matches!(refused("479"), SendError::Refused { .. }));
        assert!(matches!(fault(ClientSendError::NotLoggedIn), SendError::Transport { .. }));
        let invalid = ClientSendError::InvalidRequest("no".to_owned());
        assert!(matches!(fault(invalid), SendError::Refused { .. }));
    }
}
