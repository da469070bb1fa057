//! What is said on WhatsApp, as messages.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use whatsapp_rust::types::durability_hook::{InboundDurabilityHook, InboundMessage};
use whatsapp_rust::wacore::proto_helpers::MessageExt;
use whatsapp_rust::wacore::types::message::{EditAttribute, MessageInfo, MessageSource};
use whatsapp_rust::wacore_binary::{Jid, JidExt};
use whatsapp_rust::waproto::whatsapp as wa;
use whatsapp_rust::{Client, anyhow, async_trait};

use super::storage::{Over, Row, Storage, named};
use crate::provider::{BadItem, Batch, DeliverError, Link};
use crate::types::{ChatKey, KEY_BYTES_MAX, Message};

/// Says that a chat, or participant, was one by its anonymous id.
const BY_ID: &str = "by-id";
/// Between two tries to hand over what the bot could not take, at least.
const AGAIN: Duration = Duration::from_millis(100);

/// Hands what comes in to the bot, and lets it be acknowledged after that.
pub(super) struct Intake {
    pub(super) id: String,
    pub(super) link: Link,
    pub(super) storage: Storage,
}

/// What a message holds.
enum Content<'a> {
    /// Something a user says: its kind and text.
    Said(&'static str, &'a str),
    /// Something else.
    Other(&'static str),
}

#[async_trait]
impl InboundDurabilityHook for Intake {
    /// Returns after the commit that journals all of them. WhatsApp sends again what is not
    /// acknowledged, but on a new connection only; so it is tried here until it is taken or this
    /// connection is over. Meanwhile nothing further is read of the chat, which is as it should be.
    async fn on_messages(
        &self,
        client: Arc<Client>,
        batch: &[InboundMessage],
    ) -> anyhow::Result<()> {
        let batch = self.unpack(&client, batch).await?;
        let moved: Vec<ChatKey> = batch.moved.iter().map(|(from, _)| from.clone()).collect();
        let taking = async {
            loop {
                match batch.clone().take_in(&self.id, &self.link).await {
                    Err(DeliverError::Unavailable { why, retry_after }) => {
                        tracing::debug!(provider = %self.id, %why, "messages wait");
                        tokio::time::sleep(retry_after.max(AGAIN)).await;
                    }
                    taken => return taken,
                }
            }
        };
        tokio::select! {
            biased;
            over = self.storage.over() => anyhow::bail!("not taken: {over:?}"),
            taken = taking => {
                if let Err(DeliverError::Deposed) = &taken {
                    self.storage.end(Over::Deposed);
                }
                taken?;
                let forget = |chat: &ChatKey| (by_id(chat), None);
                Ok(self.storage.stage(moved.iter().map(forget).collect())?)
            }
        }
    }
}

impl Intake {
    async fn unpack(&self, client: &Client, messages: &[InboundMessage]) -> anyhow::Result<Batch> {
        let mut batch = Batch::default();
        for InboundMessage { message, info, .. } in messages {
            let MessageSource { chat, is_from_me, .. } = &info.source;
            if *is_from_me {
                continue; // said by this account, here or on its phone
            }
            if chat.is_status_broadcast() {
                batch.unknown.push("status".to_owned());
                continue;
            }
            if info.edit != EditAttribute::Empty {
                // What was answered already is answered.
                batch.unknown.push("edit".to_owned());
                continue;
            }
            match content(message.get_base_message()) {
                Content::Other(kind) => batch.unknown.push(kind.to_owned()),
                Content::Said(kind, text) => {
                    let key = self.key(client, &info.source, &mut batch).await?;
                    match said(key, info, message, kind, text) {
                        Ok(message) => batch.messages.push(message),
                        Err(bad) => batch.bad.push(bad),
                    }
                }
            }
        }
        Ok(batch)
    }

    /// The chat; in a group, with who speaks in it. One that was by anonymous id until now moves.
    async fn key(
        &self,
        client: &Client,
        source: &MessageSource,
        batch: &mut Batch,
    ) -> anyhow::Result<ChatKey> {
        let key = |sender: &Jid| match source.chat.is_group() {
            true => ChatKey::new(&self.id, source.chat.to_non_ad_string())
                .participant(sender.to_non_ad_string()),
            // What is said to a list of recipients is said to each of them.
            false => ChatKey::new(&self.id, sender.to_non_ad_string()),
        };
        let (number, id) = addresses(client, source).await?;
        let Some(number) = number else {
            let key = key(&source.sender);
            self.storage.stage(vec![(by_id(&key), Some(Row::raw(Vec::new())))])?;
            return Ok(key);
        };
        let now = key(&number);
        let before = id.map(|id| key(&id)).filter(|before| {
            let known = batch.moved.iter().any(|(from, _)| from == before);
            !known && self.storage.get(&by_id(before)).is_some()
        });
        batch.moved.extend(before.map(|before| (before, now.clone())));
        Ok(now)
    }
}

/// The row that says so of this chat.
fn by_id(chat: &ChatKey) -> String {
    named(BY_ID, &[&chat.to_string()])
}

/// A sender by number and by anonymous id (LID), as far as they are known. Both stand for the same
/// person, and which one a message bears comes and goes with the settings of chats.
async fn addresses(
    client: &Client,
    source: &MessageSource,
) -> anyhow::Result<(Option<Jid>, Option<Jid>)> {
    let said = || [Some(&source.sender), source.sender_alt.as_ref()].into_iter().flatten();
    let mut number = said().find(|jid| jid.is_pn()).cloned();
    let mut id = said().find(|jid| jid.is_lid()).cloned();
    if let (None, _) | (_, None) = (&number, &id)
        && let Some(entry) = client.get_lid_pn_entry(&source.sender).await?
    {
        number.get_or_insert_with(|| Jid::pn(&*entry.phone_number));
        id.get_or_insert_with(|| Jid::lid(&*entry.lid));
    }
    Ok((number, id))
}

/// Ids are told apart within one sender's messages of one chat only.
fn id(info: &MessageInfo) -> String {
    let MessageSource { chat, sender, .. } = &info.source;
    let (chat, sender) = (chat.to_non_ad_string(), sender.to_non_ad_string());
    match chat == sender {
        true => format!("{sender}/{}", info.id),
        false => format!("{chat}/{sender}/{}", info.id),
    }
}

fn said(
    chat: ChatKey,
    info: &MessageInfo,
    message: &wa::Message,
    kind: &'static str,
    text: &str,
) -> Result<Message, BadItem> {
    let id = id(info);
    if id.len() > KEY_BYTES_MAX {
        let at = format!("message {:?}", info.id.chars().take(64).collect::<String>());
        return Err(BadItem { at, why: "its id is too long".to_owned() });
    }
    let mut taken = Message::text(id, chat, text);
    taken.kind = kind.to_owned();
    let extended = message.get_base_message().extended_text_message.as_option();
    let context = extended.and_then(|extended| extended.context_info.as_option());
    taken.extra = json!({
        "at_ms": info.timestamp.timestamp_millis(),
        "name": info.push_name,
        "message_id": info.id,
        "sender": info.source.sender.to_non_ad_string(),
        "in_reply_to": context.and_then(|context| context.stanza_id.as_deref()),
    });
    Ok(taken)
}

fn content(message: &wa::Message) -> Content<'_> {
    if let Some(text) = message.text_content() {
        return Content::Said("text", text);
    }
    let caption = message.get_caption().unwrap_or_default();
    let said = |kind| Content::Said(kind, caption);
    if message.image_message.is_set() {
        said("image")
    } else if message.video_message.is_set() || message.ptv_message.is_set() {
        said("video")
    } else if message.audio_message.is_set() {
        said("audio")
    } else if message.document_message.is_set() {
        said("document")
    } else if message.sticker_message.is_set() {
        said("sticker")
    } else if message.location_message.is_set() {
        said("location")
    } else if message.contact_message.is_set() || message.contacts_array_message.is_set() {
        said("contact")
    } else if message.reaction_message.is_set() || message.enc_reaction_message.is_set() {
        Content::Other("reaction")
    } else if message.protocol_message.is_set() {
        Content::Other("protocol")
    } else if message.poll_update_message.is_set() {
        Content::Other("poll vote")
    } else if message.sender_key_distribution_message.is_set() {
        Content::Other("sender key")
    } else {
        Content::Other("message of an unknown kind")
    }
}
