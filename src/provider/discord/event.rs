//! Events as messages.

use serde_json::{Value, json};

use super::Discord;
use super::interaction::Asked;
use super::rest::is_id;
use crate::provider::{BadItem, Batch};
use crate::types::{ChatKey, Message};

/// When Discord began to count, ms since the Unix epoch: an id holds when it was made.
const EPOCH_MS: u64 = 1_420_070_400_000;

/// What events were unpacked into.
#[derive(Default)]
pub(super) struct Unpacked {
    pub(super) batch: Batch,
    /// Interactions among the messages, which are to be acknowledged.
    pub(super) asked: Vec<Asked>,
}

impl Discord {
    /// Unpacks one event.
    pub(super) fn unpack(&self, kind: &str, data: &Value, at: &str, to: &mut Unpacked) {
        let taken = match kind {
            "MESSAGE_CREATE" => self.message(data),
            "INTERACTION_CREATE" => self.interaction(data, &mut to.asked),
            // An edit is of what was answered already; what members do is no saying.
            _ => Err(Not::Handled(kind.to_owned())),
        };
        match taken {
            Ok(message) => to.batch.messages.push(message),
            Err(Not::Said) => {}
            Err(Not::Handled(kind)) => to.batch.unknown.push(kind),
            Err(Not::Good(why)) => {
                let at = format!("{at}.{kind}");
                to.batch.bad.push(BadItem { at, why: why.to_owned() });
            }
        }
    }

    fn message(&self, data: &Value) -> Result<Message, Not> {
        let author = data.get("author").ok_or(Not::Good("it does not say who wrote"))?;
        let by_program = |field: &str| author.get(field).and_then(Value::as_bool) == Some(true);
        if by_program("bot") || by_program("system") || text(data, "webhook_id").is_some() {
            return Err(Not::Said);
        }
        match data.get("type").and_then(Value::as_u64).unwrap_or_default() {
            // A message, and one that answers another.
            0 | 19 => {}
            other => return Err(Not::Handled(format!("message of type {other}"))),
        }
        let id = id(data, "id").ok_or(Not::Good("it has no id"))?;
        let chat = self.key(data, author).ok_or(Not::Good("it does not say in which channel"))?;
        let said = text(data, "content").unwrap_or_default();
        let filled = |field: &str| {
            data.get(field).is_some_and(|part| match part {
                Value::Array(items) => !items.is_empty(),
                part => part.is_object(),
            })
        };
        let kinds = [("attachments", "attachment"), ("sticker_items", "sticker"), ("poll", "poll")];
        let held = kinds.into_iter().find(|(field, _)| filled(field));
        let kind = match (said, held) {
            ("", Some((_, kind))) => kind,
            // Kept from a bot that may not see it (`intents::MESSAGE_CONTENT`).
            ("", None) => return Err(Not::Handled("message without content".to_owned())),
            _ => "text",
        };
        let mut taken = Message::text(id, chat, said);
        taken.kind = kind.to_owned();
        let mentions = data.get("mentions").and_then(Value::as_array).into_iter().flatten();
        taken.extra = json!({
            "at_ms": made_ms(id),
            "name": name(author),
            "guild": data.get("guild_id"),
            "in_reply_to": data.pointer("/message_reference/message_id"),
            "mentions": mentions.filter_map(|user| user.get("id")).collect::<Vec<&Value>>(),
            "content": held.map(|(field, _)| json!({ field: data.get(field) })),
        });
        Ok(taken)
    }

    /// A command, a button, a form.
    fn interaction(&self, data: &Value, asked: &mut Vec<Asked>) -> Result<Message, Not> {
        let payload = data.get("data").unwrap_or(&Value::Null);
        let (kind, said, answers) = match data.get("type").and_then(Value::as_u64) {
            Some(2) => ("command", command(payload), true),
            Some(3) => ("callback", pressed(payload), false),
            Some(5) => ("form", filled_in(payload), true),
            Some(other) => return Err(Not::Handled(format!("interaction of type {other}"))),
            None => return Err(Not::Good("it has no type")),
        };
        let user = data.pointer("/member/user").or_else(|| data.get("user"));
        let user = user.ok_or(Not::Good("it does not say whose it is"))?;
        let id = id(data, "id").ok_or(Not::Good("it has no id"))?;
        let chat = self.key(data, user).ok_or(Not::Good("it does not say in which channel"))?;
        let token = text(data, "token").ok_or(Not::Good("it has no token"))?;
        let application = self::id(data, "application_id");
        let application = application.ok_or(Not::Good("it does not name the application"))?;
        asked.push(Asked::new(id, application, token, answers));
        let mut taken = Message::text(id, chat, said);
        taken.kind = kind.to_owned();
        taken.lang = text(data, "locale").map(str::to_owned);
        taken.extra = json!({
            "at_ms": made_ms(id),
            "name": name(user),
            "guild": data.get("guild_id"),
            "message_id": data.pointer("/message/id"),
            "data": payload,
        });
        Ok(taken)
    }

    /// The channel; in a guild, with who speaks in it.
    fn key(&self, data: &Value, user: &Value) -> Option<ChatKey> {
        let channel = id(data, "channel_id").or_else(|| id(data.get("channel")?, "id"))?;
        let key = self.chat(channel);
        match text(data, "guild_id") {
            Some(_) => Some(key.participant(id(user, "id")?)),
            None => Some(key),
        }
    }
}

/// Why something makes no turn.
enum Not {
    /// A program said it.
    Said,
    /// It is of a kind that nobody handles.
    Handled(String),
    /// Something is missing.
    Good(&'static str),
}

fn text<'a>(value: &'a Value, field: &str) -> Option<&'a str> {
    value.get(field)?.as_str()
}

fn id<'a>(value: &'a Value, field: &str) -> Option<&'a str> {
    text(value, field).filter(|text| is_id(text))
}

fn name(user: &Value) -> Option<&str> {
    text(user, "global_name").or_else(|| text(user, "username"))
}

/// When an id was made, ms since the Unix epoch.
pub(super) fn made_ms(id: &str) -> Option<u64> {
    Some((id.parse::<u64>().ok()? >> 22).saturating_add(EPOCH_MS))
}

/// `/name` with what was given, in order; a part of a command stands before what was given to it.
fn command(payload: &Value) -> String {
    let mut words = vec![format!("/{}", text(payload, "name").unwrap_or_default())];
    let mut options = payload.get("options");
    while let Some(Value::Array(given)) = options {
        options = None;
        for option in given {
            match option.get("value") {
                Some(value) => words.push(plain(value)),
                None => {
                    words.extend(text(option, "name").map(str::to_owned));
                    options = option.get("options");
                }
            }
        }
    }
    // What a command from a menu was chosen for.
    words.extend(text(payload, "target_id").map(str::to_owned));
    words.join(" ")
}

/// What was chosen, else what the button is called.
fn pressed(payload: &Value) -> String {
    let chosen = payload.get("values").and_then(Value::as_array).filter(|all| !all.is_empty());
    match chosen {
        Some(values) => values.iter().map(plain).collect::<Vec<_>>().join(", "),
        None => text(payload, "custom_id").unwrap_or_default().to_owned(),
    }
}

/// What was written into a form, a line each.
fn filled_in(payload: &Value) -> String {
    let mut lines = Vec::new();
    // The last is looked at first: what it holds goes before what comes after it.
    let mut todo: Vec<&Value> = payload.get("components").into_iter().collect();
    while let Some(part) = todo.pop() {
        match part {
            Value::Array(parts) => todo.extend(parts.iter().rev()),
            Value::Object(fields) => {
                if let Some(value) = fields.get("value") {
                    lines.push(plain(value));
                }
                if let Some(Value::Array(values)) = fields.get("values") {
                    lines.push(values.iter().map(plain).collect::<Vec<_>>().join(", "));
                }
                todo.extend(fields.get("component"));
                todo.extend(fields.get("components"));
            }
            _ => {}
        }
    }
    lines.join("\n")
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::codec::hostile;

    const MESSAGE: &str = r#"{"id":"1300000000000000001","channel_id":"20","guild_id":"30","type":0,
        "author":{"id":"9","username":"ann","global_name":"Ann"},"content":"hi <@4>",
        "mentions":[{"id":"4"}],"attachments":[],"message_reference":{"message_id":"5"}}"#;
    const COMMAND: &str = r#"{"id":"7","application_id":"4","type":2,"token":"t","channel_id":"20",
        "user":{"id":"9"},"locale":"de","data":{"name":"order","options":[{"name":"tea",
        "options":[{"name":"cups","value":3},{"name":"kind","value":"green"}]}]}}"#;
    const BUTTON: &str = r#"{"id":"8","application_id":"4","type":3,"token":"t","channel_id":"20",
        "guild_id":"30","member":{"user":{"id":"9"}},"data":{"custom_id":"yes","values":[]}}"#;
    const FORM: &str = r#"{"id":"8","application_id":"4","type":5,"token":"t","channel":{"id":"20"},
        "user":{"id":"9"},"data":{"components":[{"components":[{"custom_id":"a","value":"one"}]},
        {"component":{"custom_id":"b","values":["x","y"]}}]}}"#;

    fn unpack(kind: &str, data: &Value) -> Unpacked {
        let mut unpacked = Unpacked::default();
        Discord::new("dc", "token").unpack(kind, data, "event 1", &mut unpacked);
        unpacked
    }

    fn message(kind: &str, data: &str) -> Message {
        unpack(kind, &serde_json::from_str(data).unwrap()).batch.messages.remove(0)
    }

    #[test]
    fn d4_events_are_taken_for_what_they_are() {
        let said = message("MESSAGE_CREATE", MESSAGE);
        assert_eq!((said.id.as_str(), said.text.as_str()), ("1300000000000000001", "hi <@4>"));
        assert_eq!(said.chat.to_string(), "dc:20:9");
        assert_eq!(said.extra["at_ms"], 1_730_014_552_832_u64);
        assert_eq!(said.extra["mentions"], json!(["4"]));
        assert_eq!(said.extra["in_reply_to"], "5");
        let command = message("INTERACTION_CREATE", COMMAND);
        assert_eq!((command.text.as_str(), &*command.kind), ("/order tea 3 green", "command"));
        assert_eq!((command.chat.to_string(), command.lang), ("dc:20".into(), Some("de".into())));
        let button = message("INTERACTION_CREATE", BUTTON);
        assert_eq!((button.text.as_str(), &*button.kind), ("yes", "callback"));
        assert_eq!(button.chat.to_string(), "dc:20:9");
        let form = message("INTERACTION_CREATE", FORM);
        assert_eq!((form.text.as_str(), &*form.kind), ("one\nx, y", "form"));
    }

    #[test]
    fn m1_what_is_no_saying_makes_no_turn() {
        let with = |field: &str, value: Value| {
            let mut data: Value = serde_json::from_str(MESSAGE).unwrap();
            *data.pointer_mut(field).unwrap() = value;
            unpack("MESSAGE_CREATE", &data).batch
        };
        for (field, value) in [
            ("/author", json!({ "id": "9", "bot": true })),
            ("/author", json!({ "id": "9", "system": true })),
        ] {
            assert_eq!(with(field, value), Batch::default());
        }
        let mut hook: Value = serde_json::from_str(MESSAGE).unwrap();
        hook["webhook_id"] = "6".into();
        assert_eq!(unpack("MESSAGE_CREATE", &hook).batch, Batch::default());
        assert_eq!(with("/type", 7.into()).unknown, ["message of type 7"]);
        assert_eq!(with("/content", "".into()).unknown, ["message without content"]);
        for (field, value) in [("/author", json!(null)), ("/id", 7.into()), ("/id", "x".into())] {
            assert_eq!(with(field, value).bad.len(), 1, "{field}");
        }
        let data = serde_json::from_str(MESSAGE).unwrap();
        for kind in ["MESSAGE_UPDATE", "MESSAGE_DELETE", "THREAD_CREATE", "SOMETHING_NEW"] {
            assert_eq!(unpack(kind, &data).batch.unknown, [kind]);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        #[test]
        fn m1_whatever_an_event_of_discord_holds_it_is_one_thing_or_nothing(
            data in hostile::json_of(&[MESSAGE, COMMAND, BUTTON, FORM]),
            kind in prop::sample::select(vec!["MESSAGE_CREATE", "INTERACTION_CREATE", "?"]),
        ) {
            let Unpacked { batch, asked } = unpack(kind, &data);
            let Batch { messages, receipts, bad, unknown, moved } = batch;
            let all = messages.len() + receipts.len() + bad.len() + unknown.len() + moved.len();
            prop_assert!(all <= 1 && asked.len() <= messages.len());
        }
    }
}
