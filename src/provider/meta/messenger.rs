//! Messenger's and Instagram's entries: events between a user and an account.

use serde_json::{Value, json};

use super::unpack::{Unpacking, at_ms, list, text};
use crate::provider::{Receipt, ReceiptState};
use crate::types::Message;

impl Unpacking<'_> {
    pub(super) fn messenger_entry(&mut self, entry: &Value, at: &str) {
        let Some(account) = text(entry, "id") else {
            return self.bad(at, "it does not say of which account");
        };
        if !self.ours(account) {
            return;
        }
        let fields = entry.as_object().into_iter().flatten();
        if !fields.clone().any(|(_, value)| value.is_array()) {
            return self.unknown("entry without events");
        }
        // An entry of another kind (a page's feed, what another app handles) has other lists.
        for (field, value) in fields {
            let items = value.as_array().map_or(&[][..], Vec::as_slice);
            for (n, item) in items.iter().enumerate() {
                let at = format!("{at}.{field}[{n}]");
                match field.as_str() {
                    "messaging" => self.messenger_event(item, account, &at),
                    "changes" => match (text(item, "field"), item.get("value")) {
                        (Some("messages" | "messaging_postbacks"), Some(event)) => {
                            self.messenger_event(event, account, &at);
                        }
                        (other, _) => self.unknown(format!("field {}", other.unwrap_or("?"))),
                    },
                    _ => self.unknown(format!("entry with {field}")),
                }
            }
        }
    }

    fn messenger_event(&mut self, event: &Value, account: &str, at: &str) {
        let side = |field| event.get(field).and_then(|side| text(side, "id"));
        let Some(sender) = side("sender") else {
            return self.bad(at, "it does not say who wrote");
        };
        let message = event.get("message").unwrap_or(&Value::Null);
        let flag = |name| message.get(name).and_then(Value::as_bool) == Some(true);
        // Not all echoes carry the flag: what the account itself says comes back from its own id.
        if flag("is_echo") || sender == account || self.meta.accounts.contains_key(sender) {
            return;
        }
        let at_ms = at_ms(event.get("timestamp"));
        if !message.is_null() {
            if flag("is_deleted") || flag("is_unsupported") {
                return self.unknown("message deleted or unsupported");
            }
            return self.messenger_message(message, account, sender, (at_ms, at));
        }
        if let Some(postback) = event.get("postback") {
            return self.postback(postback, account, sender, at_ms);
        }
        if let Some(referral) = event.get("referral") {
            let id = format!("referral:{account}:{sender}:{}", at_ms.unwrap_or_default());
            let said = text(referral, "ref").unwrap_or_default();
            let mut taken = Message::text(id, self.meta.chat(account, sender), said);
            taken.kind = "referral".to_owned();
            taken.extra = json!({ "at_ms": at_ms, "referral": referral });
            return self.batch.messages.push(taken);
        }
        if let Some(delivery) = event.get("delivery") {
            return self.received(delivery, account, sender, ReceiptState::Delivered);
        }
        if let Some(read) = event.get("read") {
            return self.received(read, account, sender, ReceiptState::Read);
        }
        let known = ["sender", "recipient", "timestamp"];
        let fields = event.as_object().into_iter().flatten().map(|(field, _)| field.as_str());
        let kinds: Vec<&str> = fields.filter(|field| !known.contains(field)).collect();
        self.unknown(format!("event {}", kinds.join(" ")));
    }

    fn messenger_message(
        &mut self,
        message: &Value,
        account: &str,
        sender: &str,
        (at_ms, at): (Option<u64>, &str),
    ) {
        let Some(id) = text(message, "mid") else { return self.bad(at, "its message has no id") };
        let attachments = list(message, "attachments");
        let kind = match attachments.first() {
            Some(attachment) => text(attachment, "type").unwrap_or("attachment"),
            None => "text",
        };
        let said = text(message, "text").unwrap_or_default();
        let mut taken = Message::text(id, self.meta.chat(account, sender), said);
        taken.kind = kind.to_owned();
        let inside = |field: &str, part: &str| message.get(field).and_then(|it| it.get(part));
        taken.extra = json!({
            "at_ms": at_ms,
            "payload": inside("quick_reply", "payload"),
            "referral": message.get("referral"),
            "in_reply_to": inside("reply_to", "mid"),
            "content": attachments,
        });
        self.batch.messages.push(taken);
    }

    fn postback(&mut self, postback: &Value, account: &str, sender: &str, at_ms: Option<u64>) {
        // Older ones have no id of their own.
        let id = text(postback, "mid").map(str::to_owned).unwrap_or_else(|| {
            format!("postback:{account}:{sender}:{}", at_ms.unwrap_or_default())
        });
        let said = text(postback, "title").unwrap_or_default();
        let mut taken = Message::text(id, self.meta.chat(account, sender), said);
        taken.kind = "postback".to_owned();
        taken.extra = json!({
            "at_ms": at_ms,
            "payload": postback.get("payload"),
            "referral": postback.get("referral"),
        });
        self.batch.messages.push(taken);
    }

    /// What arrived or was read: by message, or all up to an instant.
    fn received(&mut self, what: &Value, account: &str, user: &str, state: ReceiptState) {
        let chat = self.meta.chat(account, user);
        let watermark = at_ms(what.get("watermark"));
        let mids = list(what, "mids").iter().filter_map(Value::as_str);
        let mids: Vec<&str> = mids.chain(text(what, "mid")).collect();
        for mid in &mids {
            self.batch.receipts.push(Receipt {
                chat: chat.clone(),
                sent: (*mid).to_owned(),
                state,
                at_ms: watermark.unwrap_or_default(),
                why: None,
                watermark: false,
            });
        }
        match watermark {
            Some(at_ms) if mids.is_empty() => self.batch.receipts.push(Receipt {
                sent: chat.chat.clone(),
                chat,
                state,
                at_ms,
                why: None,
                watermark: true,
            }),
            None if mids.is_empty() => self.unknown("receipt of nothing"),
            _ => {}
        }
    }
}
