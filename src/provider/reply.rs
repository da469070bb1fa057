//! Replies as the outbox keeps them and as the outside reads them (SPEC N5).
//!
//! A *room* is a chat with its participants left out. Turns and conversations are one per
//! participant (SPEC B2), but what was said in a room has one order, so it has one outbox, under
//! the room's key; each entry says which participant it answers.

use serde::{Deserialize, Serialize};

use crate::store::{Consistency, OutboxEntry, RowKey, Store, StoreError, Table};
use crate::types::ChatKey;

/// The key of the outbox of a chat.
pub fn room(chat: &ChatKey) -> String {
    ChatKey::new(&chat.channel, &chat.chat).to_string()
}

/// What an outbox entry holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Body {
    /// The text.
    pub text: String,
    /// In a group, whom it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub participant: Option<String>,
}

impl Body {
    /// As it is stored.
    pub fn encode(&self) -> Vec<u8> {
        // Two strings always serialise.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// As it was stored. An entry in another format is shown as it is, so that it is not lost.
    pub fn decode(bytes: &[u8]) -> Self {
        serde_json::from_slice(bytes).unwrap_or_else(|_| Self {
            text: String::from_utf8_lossy(bytes).into_owned(),
            participant: None,
        })
    }
}

/// One reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// Stable: the same reply keeps it over retries, crashes and replicas.
    pub id: String,
    /// The chat, as its provider names it.
    pub chat: String,
    /// In a group, whom it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub participant: Option<String>,
    /// Id of the message that caused it.
    pub in_reply_to: String,
    /// The text.
    pub text: String,
    /// The fence it was written under.
    pub fence: u64,
    /// Orders the replies of one fence.
    pub turn_seq: u64,
}

impl Reply {
    /// An outbox entry of this chat.
    pub fn from_entry(chat: &str, entry: &OutboxEntry) -> Self {
        let body = Body::decode(&entry.body);
        Self {
            id: entry.id.clone(),
            chat: chat.to_owned(),
            participant: body.participant,
            in_reply_to: entry.in_reply_to.clone(),
            text: body.text,
            fence: entry.fence,
            turn_seq: entry.turn_seq,
        }
    }
}

/// Entries asked for at once.
const PAGE: usize = 256;

/// The last `keep` replies of a chat, in the order sent: all that were committed before the call.
pub async fn replies(
    store: &dyn Store,
    channel: &str,
    chat: &str,
    participant: Option<&str>,
    keep: usize,
) -> Result<Vec<Reply>, StoreError> {
    let room = ChatKey::new(channel, chat).to_string();
    // The outbox is read from this node; a linearizable read before it brings the node up to now.
    store.read(&RowKey::new(Table::Chat, &room), Consistency::Linearizable).await?;
    let mut found = std::collections::VecDeque::new();
    let mut after = 0;
    loop {
        let page = store.outbox(&room, after, PAGE).await?;
        let Some(last) = page.last() else { return Ok(found.into()) };
        after = last.number;
        for reply in page.iter().map(|entry| Reply::from_entry(chat, entry)) {
            if participant.is_some() && reply.participant.as_deref() != participant {
                continue;
            }
            if found.len() == keep {
                found.pop_front();
            }
            found.push_back(reply);
        }
    }
}
