//! The names every layer shares.
//!
//! Problem: a fence, an incarnation and a ticket are all integers, and a chat's name reaches us as
//! three strings; mixing two of them up is how a bot answers the wrong chat. So each has a type of
//! its own, and a chat has exactly one text form (its *canonical string*), used as the key of its
//! queue, its checkpoint and its replies, on disk, on the wire and in the HTTP API.

use std::fmt;
use std::str::FromStr;

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize};

/// A member of the Raft group. Allocated by the group, never reused (SPEC K3). The founder is 1.
pub type NodeId = u64;

/// The longest key (chat, lead, lock, row), in bytes of its canonical string (SPEC M3).
pub const KEY_BYTES_MAX: usize = 512;

/// The largest value of one row, journaled body or reply, in bytes (SPEC M3).
pub const VALUE_BYTES_MAX: usize = 1024 * 1024;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// Grows with every grant of any turn, lead or lock in the group; tells a newer owner from an
    /// older one (DESIGN 1).
    Fence
}
number! {
    /// One life of a replica, as the group names it: allocated by the log when the session opens,
    /// never reused (SPEC A3). Over HTTP it is the session's id.
    Incarnation
}
number! {
    /// A place in a queue. Unique per prefix, growing in queue order per key (SPEC K6).
    TicketId
}
number! {
    /// The version of a row. Never used twice for a key, also across a delete (SPEC K6).
    Revision
}

/// Why a name or a key is not acceptable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// The text is empty.
    #[error("{what} is empty; give it at least one character")]
    Empty {
        /// Which name.
        what: &'static str,
    },
    /// The text is longer than allowed.
    #[error("{what} has {len} bytes; at most {max} are allowed")]
    TooLong {
        /// Which name.
        what: &'static str,
        /// Its length in bytes.
        len: usize,
        /// The most that is allowed, in bytes.
        max: usize,
    },
    /// A character that is not allowed.
    #[error("{what} holds {found:?}; {allowed}")]
    Character {
        /// Which name.
        what: &'static str,
        /// The character.
        found: char,
        /// What is allowed, in words.
        allowed: &'static str,
    },
    /// Not the canonical string of a chat key.
    #[error("{text:?} is not a chat key; write channel:chat or channel:chat:participant")]
    NotAChatKey {
        /// What was given, cut to 64 characters.
        text: String,
    },
}

/// Separates bots that share one group (SPEC A4): 1 to 64 of `A–Z a–z 0–9 . _ -`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Prefix(String);

impl Prefix {
    /// Checks and takes a prefix.
    ///
    /// ```
    /// use botmesh::types::Prefix;
    /// assert!(Prefix::new("shop").is_ok());
    /// assert!(Prefix::new("a/b").is_err());
    /// ```
    pub fn new(text: impl Into<String>) -> Result<Self, NameError> {
        let text = text.into();
        check_name("prefix", &text)?;
        Ok(Self(text))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TryFrom<String> for Prefix {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        Self::new(text)
    }
}

impl From<Prefix> for String {
    fn from(prefix: Prefix) -> String {
        prefix.0
    }
}

/// Checks a name of the kind prefixes, node names and replica ids are.
pub fn check_name(what: &'static str, text: &str) -> Result<(), NameError> {
    if text.is_empty() {
        return Err(NameError::Empty { what });
    }
    if text.len() > 64 {
        return Err(NameError::TooLong { what, len: text.len(), max: 64 });
    }
    match text.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))) {
        Some(found) => {
            Err(NameError::Character { what, found, allowed: "only A-Z a-z 0-9 . _ - are allowed" })
        }
        None => Ok(()),
    }
}

/// Checks a key as it comes from outside: 1 to [`KEY_BYTES_MAX`] bytes, no control characters.
pub fn check_key(what: &'static str, text: &str) -> Result<(), NameError> {
    if text.is_empty() {
        return Err(NameError::Empty { what });
    }
    if text.len() > KEY_BYTES_MAX {
        return Err(NameError::TooLong { what, len: text.len(), max: KEY_BYTES_MAX });
    }
    match text.chars().find(|c| c.is_control()) {
        Some(found) => {
            Err(NameError::Character { what, found, allowed: "no control characters are allowed" })
        }
        None => Ok(()),
    }
}

/// What is escaped inside one part of a canonical string.
const PART: &AsciiSet = &CONTROLS.add(b':').add(b'%');

/// One chat, or in a group one participant of it (SPEC B2): the unit that has a queue, a turn, a
/// checkpoint and a conversation.
///
/// Its canonical string is `channel:chat` or `channel:chat:participant`; `:`, `%` and control
/// characters inside a part are percent-escaped, so that two different keys never meet.
///
/// ```
/// use botmesh::types::ChatKey;
/// let key = ChatKey::new("demo", "room:1").participant("ann");
/// assert_eq!(key.to_string(), "demo:room%3A1:ann");
/// assert_eq!(key.to_string().parse::<ChatKey>().unwrap(), key);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ChatKey {
    /// The provider's id: `telegram`, `demo`, …
    pub channel: String,
    /// The chat's id as the provider names it.
    pub chat: String,
    /// In a group, who speaks.
    pub participant: Option<String>,
}

impl ChatKey {
    /// The key of a chat between two.
    pub fn new(channel: impl Into<String>, chat: impl Into<String>) -> Self {
        Self { channel: channel.into(), chat: chat.into(), participant: None }
    }

    /// The key of one participant of a group.
    #[must_use]
    pub fn participant(mut self, participant: impl Into<String>) -> Self {
        self.participant = Some(participant.into());
        self
    }

    /// Checks the parts and the length of the canonical string.
    pub fn check(&self) -> Result<(), NameError> {
        for (what, part) in [("channel", &self.channel), ("chat", &self.chat)] {
            if part.is_empty() {
                return Err(NameError::Empty { what });
            }
        }
        if self.participant.as_deref() == Some("") {
            return Err(NameError::Empty { what: "participant" });
        }
        check_key("chat key", &self.to_string())
    }
}

impl fmt::Display for ChatKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:{}",
            utf8_percent_encode(&self.channel, PART),
            utf8_percent_encode(&self.chat, PART)
        )?;
        match &self.participant {
            Some(who) => write!(f, ":{}", utf8_percent_encode(who, PART)),
            None => Ok(()),
        }
    }
}

impl FromStr for ChatKey {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        let fault = || NameError::NotAChatKey { text: text.chars().take(64).collect() };
        let mut parts = text
            .split(':')
            .map(|part| percent_decode_str(part).decode_utf8().map(|part| part.into_owned()).ok());
        let mut next = || parts.next().map(|part| part.ok_or_else(fault)).transpose();
        let channel = next()?.ok_or_else(fault)?;
        let chat = next()?.ok_or_else(fault)?;
        let participant = next()?;
        if next()?.is_some() {
            return Err(fault());
        }
        let key = Self { channel, chat, participant };
        key.check()?;
        Ok(key)
    }
}

impl TryFrom<String> for ChatKey {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<ChatKey> for String {
    fn from(key: ChatKey) -> String {
        key.to_string()
    }
}

/// Names one life of an operating system process: minted by the parent that waits for it, else by the
/// process itself. Sessions carry it, so that whoever is certain that the process is dead can end
/// all of them at once (DESIGN 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProcessToken(pub u128);

impl ProcessToken {
    /// One that no process ever had.
    pub fn random() -> Self {
        Self(crate::outside::uuid().as_u128())
    }
}

impl fmt::Display for ProcessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for ProcessToken {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        let fault = |found| NameError::Character {
            what: "process token",
            found,
            allowed: "it is 32 hexadecimal digits",
        };
        if let Some(found) = text.chars().find(|c| !c.is_ascii_hexdigit()) {
            return Err(fault(found));
        }
        if text.len() > 32 {
            return Err(NameError::TooLong { what: "process token", len: text.len(), max: 32 });
        }
        if text.is_empty() {
            return Err(NameError::Empty { what: "process token" });
        }
        // Checked above: nothing but digits, and no more of them than fit.
        u128::from_str_radix(text, 16).map(Self).map_err(|_| fault('?'))
    }
}

/// What a replica calls itself (SPEC A3): a random UUID unless the operator named it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReplicaId(pub String);

impl ReplicaId {
    /// A random UUID.
    pub fn random() -> Self {
        Self(crate::outside::uuid().to_string())
    }
}

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A message that reached the bot, as providers hand it over and as the journal keeps it (JSON,
/// because its users own it: DESIGN 8).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// The provider's id of this message; the same id is handled once (SPEC G1).
    pub id: String,
    /// The chat.
    pub chat: ChatKey,
    /// The text, as the user wrote it.
    pub text: String,
    /// What kind of message: `text` unless the provider says otherwise.
    #[serde(rename = "type", default = "text_kind")]
    pub kind: String,
    /// The user's language, as a BCP 47 tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lang: Option<String>,
    /// What else the provider sent, untouched.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub extra: serde_json::Value,
}

fn text_kind() -> String {
    "text".to_owned()
}

impl Message {
    /// A text message.
    pub fn text(id: impl Into<String>, chat: ChatKey, text: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            chat,
            text: text.into(),
            kind: text_kind(),
            lang: None,
            extra: serde_json::Value::Null,
        }
    }
}
