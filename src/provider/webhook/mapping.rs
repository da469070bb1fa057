//! Where in another program's JSON the parts of a message stand.
//!
//! Few programs that can post JSON can be told what to post. So the bot is told where to look: by
//! paths like `$.event.room.id` or `data[0]['chat id']`, `$.` optional, from the item. A request holds
//! one item, or a list of them, unpacked whole and in order (SPEC M2).

use std::fmt;

use serde_json::Value;

use crate::provider::{BadItem, Batch};
use crate::types::{ChatKey, Message};

/// A path does not say where to look.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("path {path:?}: {why} at byte {at}; write names and indexes, as in $.event.items[0].id")]
pub struct PathError {
    /// What was given.
    pub path: String,
    /// Where it goes wrong.
    pub at: usize,
    /// What is wrong.
    pub why: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Name(String),
    Index(usize),
}

/// A path into JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Path {
    written: String,
    parts: Vec<Part>,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.written)
    }
}

impl Path {
    fn parse(path: &str) -> Result<Self, PathError> {
        let written = path.to_owned();
        let fault = |rest: &str, why| PathError {
            path: written.clone(),
            at: written.len() - rest.len(),
            why,
        };
        let mut rest = path.strip_prefix('$').unwrap_or(path);
        let mut parts = Vec::new();
        while !rest.is_empty() {
            if let Some(inner) = rest.strip_prefix('[') {
                let Some((inside, after)) = inner.split_once(']') else {
                    return Err(fault(rest, "a bracket is not closed"));
                };
                let quoted = ['\'', '"'].into_iter().find_map(|quote| {
                    inside.strip_prefix(quote).and_then(|inside| inside.strip_suffix(quote))
                });
                parts.push(match (quoted, inside.parse()) {
                    (Some(name), _) => Part::Name(name.to_owned()),
                    (None, Ok(index)) => Part::Index(index),
                    (None, Err(_)) => {
                        return Err(fault(inner, "neither an index nor a quoted name"));
                    }
                });
                rest = after;
                continue;
            }
            let named = match rest.strip_prefix('.') {
                Some(named) => named,
                None if parts.is_empty() && !path.starts_with('$') => rest,
                None => return Err(fault(rest, "a name has to follow a dot")),
            };
            let end = named.find(['.', '[']).unwrap_or(named.len());
            if end == 0 {
                return Err(fault(named, "a name is empty"));
            }
            parts.push(Part::Name(named[..end].to_owned()));
            rest = &named[end..];
        }
        Ok(Self { written, parts })
    }

    fn find<'a>(&self, from: &'a Value) -> Option<&'a Value> {
        self.parts.iter().try_fold(from, |value, part| match part {
            Part::Name(name) => value.get(name),
            Part::Index(index) => value.get(index),
        })
    }

    /// A text, or a number as one.
    fn text(&self, from: &Value) -> Option<String> {
        match self.find(from)? {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        }
    }
}

/// See the module.
///
/// ```
/// use botmesh::provider::webhook::Mapping;
/// # fn main() -> Result<(), botmesh::provider::webhook::PathError> {
/// let mapping = Mapping::new("$.id", "$.room.id", "$.body.text")?
///     .each("$.events")?
///     .participant("$.from.id")?
///     .only("$.type", "message.created")?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    id: Path,
    chat: Path,
    text: Path,
    participant: Option<Path>,
    each: Option<Path>,
    only: Option<(Path, String)>,
}

impl Mapping {
    /// Where an item's id, chat and text stand.
    pub fn new(id: &str, chat: &str, text: &str) -> Result<Self, PathError> {
        let (id, chat, text) = (Path::parse(id)?, Path::parse(chat)?, Path::parse(text)?);
        Ok(Self { id, chat, text, participant: None, each: None, only: None })
    }

    /// Where it stands who speaks, in groups; an item without is of a chat between two.
    pub fn participant(mut self, path: &str) -> Result<Self, PathError> {
        self.participant = Some(Path::parse(path)?);
        Ok(self)
    }

    /// Where the list of items stands, from the request.
    pub fn each(mut self, path: &str) -> Result<Self, PathError> {
        self.each = Some(Path::parse(path)?);
        Ok(self)
    }

    /// Only items with this value there are messages; others are counted and left.
    pub fn only(mut self, path: &str, value: impl Into<String>) -> Result<Self, PathError> {
        self.only = Some((Path::parse(path)?, value.into()));
        Ok(self)
    }

    /// Unpacks a request. Refused, with the path, where it holds no list, or its one item is none.
    pub(super) fn unpack(&self, channel: &str, body: &Value) -> Result<Batch, BadItem> {
        let mut batch = Batch::default();
        let Some(each) = &self.each else {
            self.item(channel, body, "", &mut batch);
            return match batch.bad.pop() {
                Some(bad) => Err(bad),
                None => Ok(batch),
            };
        };
        let Some(Value::Array(items)) = each.find(body) else {
            return Err(BadItem { at: each.to_string(), why: "there is no list".to_owned() });
        };
        for (n, item) in items.iter().enumerate() {
            self.item(channel, item, &format!("{each}[{n}] "), &mut batch);
        }
        Ok(batch)
    }

    fn item(&self, channel: &str, item: &Value, at: &str, batch: &mut Batch) {
        if let Some((path, wanted)) = &self.only {
            let found = path.text(item);
            if found.as_ref() != Some(wanted) {
                return batch.unknown.push(found.unwrap_or_else(|| "item without kind".to_owned()));
            }
        }
        let part = |path: &Path| {
            path.text(item).ok_or_else(|| BadItem {
                at: format!("{at}{path}"),
                why: "there is neither text nor a number".to_owned(),
            })
        };
        let parts = || Ok((part(&self.id)?, part(&self.chat)?, part(&self.text)?));
        let (id, chat, text) = match parts() {
            Ok(parts) => parts,
            Err(bad) => return batch.bad.push(bad),
        };
        let mut chat = ChatKey::new(channel, chat);
        chat.participant = self.participant.as_ref().and_then(|path| path.text(item));
        let mut message = Message::text(id, chat, text);
        message.extra = item.clone();
        batch.messages.push(message);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::codec::hostile;
    use crate::provider::reply::Body;
    use crate::provider::webhook::{Posted, decode, form_pairs};

    #[test]
    fn d4_a_path_finds_what_it_names() {
        let value = json!({ "a": { "b c": [1, { "d": "x" }] }, "n": 7 });
        for (path, found) in [
            ("$.a['b c'][1].d", Some("x")),
            ("a[\"b c\"][0]", Some("1")),
            ("n", Some("7")),
            ("$.a", None),
            ("$.a.b", None),
            ("$['a']['b c'][9]", None),
        ] {
            let text = Path::parse(path).unwrap().text(&value);
            assert_eq!(text.as_deref(), found, "{path}");
        }
        for (bad, at) in
            [("$.a[", 3), ("$.a[x]", 4), ("$a", 1), ("a..b", 2), ("$.", 2), ("a[0]b", 4)]
        {
            assert_eq!(Path::parse(bad).unwrap_err().at, at, "{bad}");
        }
    }

    #[test]
    fn m2_a_list_is_unpacked_whole_and_in_order() {
        let mapping = Mapping::new("id", "room", "text").unwrap();
        let mapping = mapping.each("$.events").unwrap().participant("who").unwrap();
        let mapping = mapping.only("kind", "said").unwrap();
        let batch = mapping.unpack(
            "hook",
            &json!({ "events": [
            { "kind": "said", "id": 1, "room": "r", "who": "ann", "text": "a" },
            { "kind": "said", "id": 2, "room": {}, "text": [] },
            { "kind": "left", "id": 3, "room": "r" },
            { "kind": "said", "id": "4", "room": "r", "text": "b" },
        ] }),
        );
        let batch = batch.unwrap();
        let keys: Vec<String> = batch.messages.iter().map(|m| m.chat.to_string()).collect();
        assert_eq!(keys, ["hook:r:ann", "hook:r"]);
        let texts: Vec<(&str, &str)> = batch.messages.iter().map(|m| (&*m.id, &*m.text)).collect();
        assert_eq!(texts, [("1", "a"), ("4", "b")]);
        assert_eq!(batch.unknown, ["left"]);
        assert_eq!(batch.bad.len(), 1, "one error an item: {:?}", batch.bad);
        assert_eq!(batch.bad[0].at, "$.events[1] room");
        assert_eq!(mapping.unpack("hook", &json!({})).unwrap_err().at, "$.events");
        let one = Mapping::new("id", "room", "text").unwrap();
        assert_eq!(one.unpack("hook", &json!({ "id": 1, "room": "r" })).unwrap_err().at, "text");
    }

    const POSTED: [&str; 2] = [
        r#"{"id":"m1","chat":"ann","participant":"p","text":"hi"}"#,
        r#"{"events":[{"kind":"said","id":1,"room":"r","who":"ann","text":"a"},{"kind":"left"}]}"#,
    ];

    proptest! {
        #[test]
        fn m1_whatever_is_posted_is_taken_or_refused(
            posted in hostile::json_of(&POSTED),
            body in hostile::bytes(POSTED.iter().map(|text| text.as_bytes().to_vec()).collect()),
        ) {
            let plain = Mapping::new("id", "chat", "text").unwrap();
            let listed = Mapping::new("id", "room", "text").unwrap().each("$.events").unwrap();
            let listed = listed.participant("who").unwrap().only("kind", "said").unwrap();
            for mapping in [plain, listed] {
                if let Ok(batch) = mapping.unpack("hook", &posted) {
                    let items = posted["events"].as_array().map_or(1, Vec::len);
                    prop_assert!(batch.messages.len() + batch.bad.len() <= items);
                }
            }
            for body in [posted.to_string().as_bytes(), &body] {
                match decode::<Posted>(body) {
                    Ok(posted) => prop_assert!(serde_json::from_slice::<Value>(body).is_ok(), "{posted:?}"),
                    Err(response) => prop_assert_eq!(response.status, 400),
                }
                let stored = Body::decode(body);
                prop_assert_eq!(Body::decode(&stored.encode()), stored);
            }
        }

        #[test]
        fn m1_whatever_path_or_query_is_written_is_read_or_refused(text in "[$.'\\[\\]a0%+&=é\"]{0,20}") {
            if let Err(fault) = Path::parse(&text) {
                prop_assert!(fault.at <= text.len());
            }
            let _ = form_pairs(&text);
        }
    }
}
