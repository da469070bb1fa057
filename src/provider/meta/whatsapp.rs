//! WhatsApp's entries: changes with messages and statuses.

use serde_json::{Value, json};

use super::unpack::{Unpacking, at_ms, list, text};
use crate::provider::{Receipt, ReceiptState};
use crate::types::Message;

/// Types of message that are no saying of the user's.
const NOT_SAID: [&str; 5] = ["edit", "ephemeral", "reaction", "revoke", "deleted"];

impl Unpacking<'_> {
    pub(super) fn whatsapp_entry(&mut self, entry: &Value, at: &str) {
        let Some(changes) = entry.get("changes").and_then(Value::as_array) else {
            return self.bad(at, "it has no list of changes");
        };
        for (n, change) in changes.iter().enumerate() {
            let at = format!("{at}.changes[{n}]");
            match (text(change, "field"), change.get("value")) {
                (Some("messages"), Some(value)) => self.whatsapp_value(value, &at),
                (Some(field), _) => self.unknown(format!("field {field}")),
                (None, _) => self.bad(at, "it names no field"),
            }
        }
    }

    fn whatsapp_value(&mut self, value: &Value, at: &str) {
        let metadata = value.get("metadata").unwrap_or(&Value::Null);
        let Some(account) = text(metadata, "phone_number_id") else {
            return self.bad(format!("{at}.value.metadata"), "it names no phone number's id");
        };
        if !self.ours(account) {
            return;
        }
        let own = digits(text(metadata, "display_phone_number").unwrap_or_default());
        for (n, message) in list(value, "messages").iter().enumerate() {
            let at = format!("{at}.value.messages[{n}]");
            let sender = sender(value, message);
            match (text(message, "id"), text(message, "type"), sender) {
                (Some(id), Some(kind), Some(sender)) => {
                    if sender == account || (!own.is_empty() && digits(sender) == own) {
                        continue; // what the business itself wrote
                    }
                    self.whatsapp_message(value, account, (message, id, kind, sender));
                }
                (None, ..) => self.bad(at, "it has no id"),
                (_, None, _) => self.bad(at, "it has no type"),
                (.., None) => self.bad(at, "it does not say who wrote"),
            }
        }
        for (n, status) in list(value, "statuses").iter().enumerate() {
            self.whatsapp_status(status, account, &format!("{at}.value.statuses[{n}]"));
        }
        for (n, error) in list(value, "errors").iter().enumerate() {
            self.bad(format!("{at}.value.errors[{n}]"), format!("Meta reports {}", said(error)));
        }
    }

    fn whatsapp_message(
        &mut self,
        value: &Value,
        account: &str,
        (message, id, kind, sender): (&Value, &str, &str, &str),
    ) {
        if kind == "system" {
            return self.whatsapp_system(message, account, sender);
        }
        if NOT_SAID.contains(&kind) {
            return self.unknown(format!("message {kind}"));
        }
        let part = message.get(kind).unwrap_or(&Value::Null);
        let (said, payload) = match kind {
            "text" => (text(part, "body"), None),
            "button" => (text(part, "text"), text(part, "payload").map(Value::from)),
            "interactive" => interactive(part),
            _ => (text(part, "caption"), None),
        };
        let mut taken =
            Message::text(id, self.meta.chat(account, sender), said.unwrap_or_default());
        taken.kind = kind.to_owned();
        taken.extra = json!({
            "at_ms": at_ms(message.get("timestamp")),
            "name": name(value, sender),
            "payload": payload,
            "referral": message.get("referral"),
            "in_reply_to": message.get("context").and_then(|context| context.get("id")),
            "content": if kind == "text" { &Value::Null } else { part },
        });
        self.batch.messages.push(taken);
    }

    /// A user has another number, or another id.
    fn whatsapp_system(&mut self, message: &Value, account: &str, sender: &str) {
        let system = message.get("system").unwrap_or(&Value::Null);
        let to = match text(system, "type") {
            Some("user_changed_number") => text(system, "wa_id").or(text(system, "new_wa_id")),
            Some("user_changed_user_id") => text(system, "user_id"),
            _ => None,
        };
        match to {
            Some(to) if to != sender => {
                let (from, to) = (self.meta.chat(account, sender), self.meta.chat(account, to));
                self.batch.moved.push((from, to));
            }
            _ => self.unknown("message system"),
        }
    }

    fn whatsapp_status(&mut self, status: &Value, account: &str, at: &str) {
        let user = text(status, "recipient_id").or_else(|| text(status, "recipient_user_id"));
        let (Some(sent), Some(user)) = (text(status, "id"), user) else {
            return self.bad(at, "it does not say of which message, or to whom");
        };
        let state = match text(status, "status") {
            Some("sent") => ReceiptState::Sent,
            Some("delivered") => ReceiptState::Delivered,
            Some("read") => ReceiptState::Read,
            Some("played") => ReceiptState::Played,
            Some("failed") => ReceiptState::Failed,
            other => return self.unknown(format!("status {}", other.unwrap_or("without name"))),
        };
        self.batch.receipts.push(Receipt {
            chat: self.meta.chat(account, user),
            sent: sent.to_owned(),
            state,
            at_ms: at_ms(status.get("timestamp")).unwrap_or_default(),
            why: list(status, "errors").first().map(said),
            watermark: false,
        });
    }
}

/// Who wrote: the number, else the id of one who hides it.
fn sender<'a>(value: &'a Value, message: &'a Value) -> Option<&'a str> {
    let own = text(message, "from").or_else(|| text(message, "from_user_id"));
    own.or_else(|| match list(value, "contacts") {
        [contact] => text(contact, "wa_id").or_else(|| text(contact, "user_id")),
        _ => None,
    })
}

/// How the sender is called.
fn name<'a>(value: &'a Value, sender: &str) -> Option<&'a str> {
    let is = |contact: &&Value| {
        text(contact, "wa_id") == Some(sender) || text(contact, "user_id") == Some(sender)
    };
    text(list(value, "contacts").iter().find(is)?.get("profile")?, "name")
}

/// What was pressed, chosen or filled in, and what stands behind it.
fn interactive(part: &Value) -> (Option<&str>, Option<Value>) {
    for chosen in ["button_reply", "list_reply"] {
        if let Some(reply) = part.get(chosen) {
            return (text(reply, "title"), text(reply, "id").map(Value::from));
        }
    }
    let Some(form) = part.get("nfm_reply") else { return (None, None) };
    // JSON inside a string; mostly an object, but nobody keeps a form from answering otherwise.
    let answers = match form.get("response_json") {
        Some(Value::String(inner)) => {
            serde_json::from_str(inner).unwrap_or_else(|_| Value::from(inner.as_str()))
        }
        Some(other) => other.clone(),
        None => Value::Null,
    };
    (text(form, "body"), Some(answers))
}

/// An error as Meta describes it: number and title, which hold nothing a user wrote.
fn said(error: &Value) -> String {
    let code = error.get("code").and_then(Value::as_u64).unwrap_or_default();
    format!("error {code}: {}", text(error, "title").unwrap_or("without title"))
}

fn digits(number: &str) -> String {
    number.chars().filter(char::is_ascii_digit).collect()
}
