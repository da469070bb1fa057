//! Many things in one request: unpacked whole and in order (SPEC M2).
//!
//! A provider unpacks a request into a [`Batch`] and lets it be taken: the messages in one commit, in
//! their order; an item that is not acceptable is told of, and the others are handled (case w2). The
//! request is answered 200 after that commit, and 503 where there was none: the other side sends it
//! again, and what had been taken of it is known by its ids.

use std::time::Duration;

use super::webhook::{ErrorBody, unavailable};
use super::{DeliverError, Delivered, Link, Notice, Receipt, WebhookResponse, receipt};
use crate::store::{CommitError, RekeyError, Store, Taken};
use crate::types::{ChatKey, Message};

/// An item that was left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadItem {
    /// Where it stood: a path into the request, or its id.
    pub at: String,
    /// What is wrong with it, without its content.
    pub why: String,
}

/// What a request was unpacked into.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The messages, in order.
    pub messages: Vec<Message>,
    /// What became of replies, in order.
    pub receipts: Vec<Receipt>,
    /// What was left out.
    pub bad: Vec<BadItem>,
    /// Kinds of event that nobody handles, one for each that came.
    pub unknown: Vec<String>,
    /// Chats that go on under another id: (until now, from now on).
    pub moved: Vec<(ChatKey, ChatKey)>,
}

impl Batch {
    /// Lets the bot take it, and answers the request: 200 or 503.
    pub async fn answer(self, provider: &str, link: &Link, store: &dyn Store) -> WebhookResponse {
        match self.take(provider, link, store).await {
            Ok(_) => WebhookResponse { status: 200, headers: Vec::new(), body: "OK".into() },
            Err(DeliverError::Unavailable { why, retry_after }) => unavailable(why, retry_after),
            Err(error @ DeliverError::Invalid { .. }) => {
                ErrorBody::new("bad_message", error.to_string()).at(400)
            }
            Err(error) => unavailable(error.to_string(), Duration::from_secs(1)),
        }
    }

    /// Lets the bot take it. What is told besides is told after the commit, so a request that comes
    /// again after a failure is not told of twice.
    pub async fn take(
        mut self,
        provider: &str,
        link: &Link,
        store: &dyn Store,
    ) -> Result<Vec<Delivered>, DeliverError> {
        self.move_chats(link).await?;
        let messages = std::mem::take(&mut self.messages);
        let (delivered, bad) = leaving_out_bad(link, messages, None).await?;
        self.bad.extend(bad);
        let receipts = std::mem::take(&mut self.receipts);
        if !receipts.is_empty() {
            for receipt in receipt::advance(store, receipts).await? {
                link.notice(provider, Notice::Receipt(receipt));
            }
        }
        self.tell(provider, link);
        Ok(delivered)
    }

    /// As [`Batch::take`], for a transport that stands elsewhere after it.
    pub async fn take_past(
        mut self,
        provider: &str,
        link: &Link,
        cursor: &[u8],
    ) -> Result<Vec<Delivered>, DeliverError> {
        self.move_chats(link).await?;
        let messages = std::mem::take(&mut self.messages);
        let past = Some((provider, cursor));
        let (delivered, bad) = leaving_out_bad(link, messages, past).await?;
        self.bad.extend(bad);
        self.tell(provider, link);
        Ok(delivered)
    }

    /// As [`Batch::take`], for a transport whose other side remembers where it stands.
    #[cfg(feature = "whatsapp-web")]
    pub(super) async fn take_in(mut self, provider: &str, link: &Link) -> Result<(), DeliverError> {
        self.move_chats(link).await?;
        let messages = std::mem::take(&mut self.messages);
        let (_, bad) = leaving_out_bad(link, messages, None).await?;
        self.bad.extend(bad);
        self.tell(provider, link);
        Ok(())
    }

    /// Moves what is kept of chats that go on under another id, before a message under that comes.
    async fn move_chats(&mut self, link: &Link) -> Result<(), DeliverError> {
        for (from, to) in &self.moved {
            match link.rekey(from, to, Taken::KeepNew).await {
                Ok(()) | Err(RekeyError::Commit(CommitError::Unsupported { .. })) => {}
                Err(RekeyError::Commit(error)) => {
                    let (why, retry_after) = (error.to_string(), Duration::from_secs(1));
                    return Err(DeliverError::Unavailable { why, retry_after });
                }
                Err(error) => {
                    self.bad.push(BadItem { at: format!("chat {from}"), why: error.to_string() });
                }
            }
        }
        Ok(())
    }

    /// Tells what is no message.
    pub(super) fn tell(self, provider: &str, link: &Link) {
        for bad in self.bad {
            link.notice(provider, Notice::Bad(bad));
        }
        for kind in self.unknown {
            link.notice(provider, Notice::Unknown { kind });
        }
        for (from, to) in self.moved {
            link.notice(provider, Notice::Moved { from, to });
        }
    }
}

/// Delivers messages, without those that would be refused for good.
async fn leaving_out_bad(
    link: &Link,
    mut messages: Vec<Message>,
    past: Option<(&str, &[u8])>,
) -> Result<(Vec<Delivered>, Vec<BadItem>), DeliverError> {
    let mut bad = Vec::new();
    loop {
        let taken = match past {
            None => link.deliver(messages.clone()).await,
            Some((provider, cursor)) => {
                link.deliver_past(provider, messages.clone(), cursor.to_vec()).await
            }
        };
        match taken {
            // Nothing was taken: each round leaves at least one message out.
            Err(DeliverError::Invalid { id, why })
                if messages.iter().any(|message| message.id == id) =>
            {
                messages.retain(|message| message.id != id);
                // Long ids are bad for being long.
                let id: String = id.chars().take(64).collect();
                bad.push(BadItem { at: format!("message {id:?}"), why });
            }
            taken => return Ok((taken?, bad)),
        }
    }
}
