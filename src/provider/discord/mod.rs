//! Discord: the gateway to listen, REST to speak.
//!
//! ```no_run
//! use botmesh::provider::discord::Discord;
//! let discord = Discord::new("discord", "token"); // one replica listens, the others stand by
//! ```
//!
//! Problem of the gateway: whoever connects anew has to *identify*, which Discord allows a bot a thousand
//! times a day (after that it resets the token), and hears nothing of what was said before. What
//! replaces that is a *resume*: a session's id and the number of the last event that was handled. Idea: both
//! are the cursor, which moves in the commit that journals the messages it covers (SPEC D5). So
//! whichever replica is elected resumes where the last one stopped; events come again until they are
//! journaled, and their ids make each one turn. A heartbeat, too, tells Discord no more than what is
//! stored: what it still has to be able to say again is what no majority has.
//!
//! An identify is asked for before it is made, and paced by how many are left (`pace`), so that no
//! loop, on however many replicas, uses them up.
//!
//! A turn is made by what a user says, or does with a command, a button or a form; edits and deletions make
//! none, nor does what bots and webhooks say. In a guild the chat is the channel (or thread) and each
//! participant has their own key; a private channel is a chat of its own. A thread's id may be that of
//! the message it began with; it is a chat's and no message's, so the two never meet.
//!
//! *Interactions* are acknowledged after the commit that journals them, which promises the user an answer
//! within three seconds. The first reply to a command or form *becomes* that answer, by an edit: an edit
//! made twice is made once, which a follow-up message is not. Other replies are messages under a
//! nonce, which Discord makes once, too, for some minutes. A command that is handled without a reply
//! stays "thinking" until its token ends, a quarter of an hour later. A replica that dies between the two
//! leaves an interaction that Discord shows as failed; its reply comes as a message.
//!
//! The protocol is spoken here, over `tokio-tungstenite`, and not by `twilight-gateway`: a shard of that
//! counts an event as received when it has read it, acknowledges that number by heartbeat and resumes from
//! it, which is before it is journaled. Events are read as JSON: a field that nobody needs and that is
//! not what it was must not cost a message. The tests check both sides against twilight.
//! `tungstenite` logs whole frames at `trace`, and the token is in one of them: whoever sets up the log keeps
//! it and `tokio_tungstenite` below that, as the command line does.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;

use super::outward::Outward;
use super::{
    Capabilities, Closed, Delivery, Link, Provider, ProviderError, SendError, SentId, Webhook,
};
use crate::types::ChatKey;

mod event;
mod gateway;
mod interaction;
mod limits;
mod pace;
mod rest;
mod session;
mod socket;

use interaction::Interactions;
use limits::Limits;

/// Where the API is, unless said otherwise.
const API: &str = "https://discord.com/api/v10";
/// Between two identifies, at least: what Discord asks for.
const IDENTIFY_EVERY: Duration = Duration::from_secs(5);

/// What a bot may ask to be told of ([`Discord::intents`]).
pub mod intents {
    /// Guilds, their channels and threads.
    pub const GUILDS: u64 = 1;
    /// Messages in the channels of guilds.
    pub const GUILD_MESSAGES: u64 = 1 << 9;
    /// Private messages.
    pub const DIRECT_MESSAGES: u64 = 1 << 12;
    /// What messages say; to be granted in Discord's developer portal. Without it a bot in a guild is
    /// told the content of those messages only that mention it.
    pub const MESSAGE_CONTENT: u64 = 1 << 15;
}

/// See the module. Cheap to clone; clones are the same provider.
#[derive(Clone)]
pub struct Discord {
    id: String,
    token: Arc<str>,
    base_url: String,
    intents: u64,
    identify_every: Duration,
    outward: Outward,
    limits: Arc<Limits>,
    interactions: Arc<Interactions>,
    /// The link of the last run, for what is sent.
    link: Arc<Mutex<Option<Link>>>,
}

impl fmt::Debug for Discord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token is a secret, and whoever has it is the bot.
        f.debug_struct("Discord").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Discord {
    /// A bot of that token under that id.
    pub fn new(id: impl Into<String>, token: impl Into<Arc<str>>) -> Self {
        Self {
            id: id.into(),
            token: token.into(),
            base_url: API.to_owned(),
            intents: intents::GUILD_MESSAGES | intents::DIRECT_MESSAGES | intents::MESSAGE_CONTENT,
            identify_every: IDENTIFY_EVERY,
            outward: Outward::new(),
            limits: Arc::default(),
            interactions: Arc::default(),
            link: Arc::default(),
        }
    }

    /// What it is told of: [`intents`], added together. By default, messages in guilds, private
    /// messages, and what they say. Other intents begin another session.
    #[must_use]
    pub fn intents(mut self, intents: u64) -> Self {
        self.intents = intents;
        self
    }

    /// Where the API is, with its version: `https://discord.com/api/v10`. It says where the gateway
    /// is, which is only then talked to in plain text where this address is plain, too.
    #[must_use]
    pub fn base_url(mut self, url: impl Into<String>) -> Self {
        self.base_url = url.into().trim_end_matches('/').to_owned();
        self
    }

    /// How long to leave between two identifies at least (default 5 s, as Discord asks; less is for
    /// other servers).
    #[must_use]
    pub fn identify_every(mut self, pause: Duration) -> Self {
        self.identify_every = pause;
        self
    }

    /// The key of a channel: a private chat, or a guild's channel without its participants.
    pub fn chat(&self, channel: &str) -> ChatKey {
        ChatKey::new(&self.id, channel)
    }
}

#[async_trait]
impl Provider for Discord {
    fn id(&self) -> &str {
        &self.id
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { exclusive_session: true, listed: 0, sends: true }
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        *self.link.lock() = Some(link.clone());
        self.interactions.begin();
        gateway::Gateway::new(self, link).run().await
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        match self.answer(delivery).await? {
            Some(sent) => Ok(sent),
            None => self.send_text(delivery).await,
        }
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        None
    }
}
