//! What outlives a turn: posting into chats from anywhere (SPEC G5).

use std::fmt;
use std::sync::Arc;

use super::inbox::{self, KIND_POST};
use super::runtime::Runtime;
use crate::provider::DeliverError;
use crate::store::{Authority, CommitError, Op, RekeyError, Taken};
use crate::types::{ChatKey, Message};

/// A way to a bot from outside its handlers. Cheap to clone.
#[derive(Clone)]
pub struct BotHandle {
    pub(super) runtime: Arc<Runtime>,
}

impl fmt::Debug for BotHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BotHandle").finish_non_exhaustive()
    }
}

/// Why something was not posted.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The chat or the text is not acceptable.
    #[error(transparent)]
    Invalid(DeliverError),
    /// The group did not take it.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// Only a journaling bot can post.
    #[error("posting needs durability; give the bot a store and a coordinator that journal")]
    NotDurable,
}

impl BotHandle {
    /// Says something in a chat, under the chat's turn, from whichever replica gets it. Journaled:
    /// once this returned, it is said, though this process ends.
    pub async fn post(&self, chat: &ChatKey, text: impl Into<String>) -> Result<(), PostError> {
        self.post_as(format!("post-{}", crate::outside::uuid()), chat, text.into()).await
    }

    /// A chat goes on under another key: everything kept of it moves, in one commit (SPEC B2). See
    /// [`Store::rekey`](crate::store::Store::rekey).
    pub async fn rekey(
        &self,
        from: &ChatKey,
        to: &ChatKey,
        taken: Taken,
    ) -> Result<(), RekeyError> {
        self.runtime.store.rekey(from, to, taken).await
    }

    /// Under an id of its own: the same id is posted once.
    pub(super) async fn post_as(
        &self,
        id: String,
        chat: &ChatKey,
        text: String,
    ) -> Result<(), PostError> {
        if !self.runtime.durable {
            return Err(PostError::NotDurable);
        }
        let mut message = Message::text(id, chat.clone(), text);
        message.kind = KIND_POST.to_owned();
        let admit = inbox::admit(&message).map_err(PostError::Invalid)?;
        self.runtime.store.commit(Authority::Nobody, vec![Op::Post(admit)]).await?;
        Ok(())
    }
}
