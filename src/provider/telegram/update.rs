//! Updates as messages.

use serde_json::{Value, json};

use super::Telegram;
use super::entities::marked;
use crate::provider::{BadItem, Batch};
use crate::types::{ChatKey, Message};

/// What Telegram is asked to send: what makes a turn, and nothing to be thrown away.
pub(super) const ALLOWED: [&str; 4] =
    ["message", "channel_post", "callback_query", "business_message"];

impl Telegram {
    /// Unpacks one update.
    pub(super) fn unpack(&self, update: &Value, at: &str, batch: &mut Batch) {
        let Some(number) = update.get("update_id").and_then(Value::as_i64) else {
            let why = "it has no update_id".to_owned();
            return batch.bad.push(BadItem { at: at.to_owned(), why });
        };
        let id = number.to_string();
        let fields = update.as_object().into_iter().flatten();
        let Some((kind, body)) = fields.into_iter().find(|(field, _)| *field != "update_id") else {
            return batch.unknown.push("empty update".to_owned());
        };
        let taken = match kind.as_str() {
            "message" | "channel_post" | "business_message" => {
                if let Some(moved) = self.moved(body) {
                    return batch.moved.push(moved);
                }
                if body.get("migrate_from_chat_id").is_some() {
                    return; // the other half of the same news
                }
                if self.is_own(body) {
                    return;
                }
                if content(body).is_none() {
                    return batch.unknown.push("service message".to_owned());
                }
                self.message(id, kind, body)
            }
            "callback_query" => self.callback(id, body),
            // An edit is of what was answered already; what members do is no saying.
            _ => return batch.unknown.push(kind.clone()),
        };
        match taken {
            Ok(message) => batch.messages.push(message),
            Err(why) => batch.bad.push(BadItem { at: format!("{at}.{kind}"), why: why.to_owned() }),
        }
    }

    /// Whether this bot itself wrote it.
    fn is_own(&self, message: &Value) -> bool {
        let own = self.token.split(':').next().and_then(|id| id.parse::<i64>().ok());
        own.is_some() && message.pointer("/from/id").and_then(Value::as_i64) == own
    }

    fn moved(&self, message: &Value) -> Option<(ChatKey, ChatKey)> {
        let to = message.get("migrate_to_chat_id")?.as_i64()?;
        let from = message.pointer("/chat/id")?.as_i64()?;
        Some((self.chat(from), self.chat(to)))
    }

    fn message(&self, id: String, kind: &str, message: &Value) -> Result<Message, &'static str> {
        let chat = self.key(message, message.get("from")).ok_or("it does not say in which chat")?;
        let part = |field: &str| message.get(field).and_then(Value::as_str);
        let (text, list) = match (part("text"), part("caption")) {
            (Some(text), _) => (text, "entities"),
            (None, Some(caption)) => (caption, "caption_entities"),
            (None, None) => ("", "entities"),
        };
        let mut taken = Message::text(id, chat, text);
        taken.kind = match (part("text"), kind) {
            (Some(_), "message") => "text".to_owned(),
            (Some(_), kind) => kind.to_owned(),
            (None, _) => content(message).unwrap_or_default().to_owned(),
        };
        taken.lang = language(message.get("from"));
        let entities = message.get(list).and_then(Value::as_array);
        let entities = entities.into_iter().flatten().map(|entity| {
            let mut entity = entity.clone();
            let marks = Value::from(marked(text, &entity));
            if let Value::Object(fields) = &mut entity {
                // What it marks, so that nobody has to count.
                fields.insert("text".to_owned(), marks);
            }
            entity
        });
        taken.extra = json!({
            "at_ms": at_ms(message),
            "name": message.pointer("/from/first_name"),
            "message_id": message.get("message_id"),
            "thread": message.get("message_thread_id"),
            "in_reply_to": message.pointer("/reply_to_message/message_id"),
            "entities": entities.collect::<Vec<Value>>(),
            "content": if part("text").is_some() { &Value::Null } else { message },
        });
        Ok(taken)
    }

    /// A button was pressed.
    fn callback(&self, id: String, callback: &Value) -> Result<Message, &'static str> {
        let from = callback.get("from");
        let message = callback.get("message").unwrap_or(&Value::Null);
        let chat = self.key(message, from).ok_or("its message is of no chat")?;
        let data = callback.get("data").and_then(Value::as_str).unwrap_or_default();
        let mut taken = Message::text(id, chat, data);
        taken.kind = "callback".to_owned();
        taken.lang = language(from);
        taken.extra = json!({
            "callback_id": callback.get("id"),
            "message_id": message.get("message_id"),
            "name": callback.pointer("/from/first_name"),
        });
        Ok(taken)
    }

    /// The chat; in a group, with who speaks in it.
    fn key(&self, message: &Value, from: Option<&Value>) -> Option<ChatKey> {
        let chat = message.get("chat")?;
        let key = self.chat(chat.get("id")?.as_i64()?);
        let group = matches!(chat.get("type")?.as_str()?, "group" | "supergroup");
        // One that speaks in the group's or a channel's name is that.
        let speaker = message.pointer("/sender_chat/id").filter(|_| from.is_none());
        let speaker = from.and_then(|from| from.get("id")).or(speaker).and_then(Value::as_i64);
        match speaker {
            Some(speaker) if group => Some(key.participant(speaker.to_string())),
            _ => Some(key),
        }
    }
}

fn language(from: Option<&Value>) -> Option<String> {
    Some(from?.get("language_code")?.as_str()?.to_owned())
}

/// Seconds, says Telegram; milliseconds do no harm.
fn at_ms(message: &Value) -> Option<u64> {
    let date = message.get("date")?.as_u64()?;
    Some(if date < 100_000_000_000 { date.saturating_mul(1_000) } else { date })
}

/// What a message holds; nothing that was said, where it only tells what members did.
fn content(message: &Value) -> Option<&'static str> {
    const KINDS: [&str; 13] = [
        "text",
        "photo",
        "document",
        "voice",
        "audio",
        "video",
        "video_note",
        "sticker",
        "animation",
        "location",
        "contact",
        "poll",
        "dice",
    ];
    KINDS.into_iter().find(|kind| message.get(kind).is_some())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::codec::hostile;

    const UPDATES: [&str; 3] = [
        r#"{"update_id":7,"message":{"message_id":1,"date":1767225600,"chat":{"id":-5,
            "type":"supergroup"},"from":{"id":9,"first_name":"Ann","language_code":"de"},
            "text":"/order \ud83e\udd80","entities":[{"type":"bot_command","offset":0,"length":6}],
            "reply_to_message":{"message_id":4},"message_thread_id":3}}"#,
        r#"{"update_id":8,"callback_query":{"id":"c","from":{"id":9},"data":"yes",
            "message":{"message_id":2,"chat":{"id":5,"type":"private"}}}}"#,
        r#"{"update_id":9,"message":{"chat":{"id":-5,"type":"group"},"migrate_to_chat_id":-100}}"#,
    ];

    #[test]
    fn m1_an_entity_that_is_no_object_stays_what_it_is() {
        let mut batch = Batch::default();
        let chat = json!({ "id": 5, "type": "private" });
        let message = json!({ "chat": chat, "text": "hi", "entities": [true, { "offset": 0 }] });
        let update = json!({ "update_id": 7, "message": message });
        Telegram::new("telegram", "123:token").unpack(&update, "update", &mut batch);
        let entities = &batch.messages[0].extra["entities"];
        assert_eq!(*entities, json!([true, { "offset": 0, "text": null }]));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        #[test]
        fn m1_whatever_an_update_holds_it_is_one_thing_or_nothing(
            update in hostile::json_of(&UPDATES),
        ) {
            let mut batch = Batch::default();
            Telegram::new("telegram", "123:token").unpack(&update, "update", &mut batch);
            let Batch { messages, receipts, bad, unknown, moved } = batch;
            let all = messages.len() + receipts.len() + bad.len() + unknown.len() + moved.len();
            prop_assert!(all <= 1);
        }
    }
}
