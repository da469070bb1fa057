//! WhatsApp, as a linked device: the account of a phone, without the business API.
//!
//! ```no_run
//! use botmesh::provider::whatsapp_web::WhatsAppWeb;
//! let whatsapp = WhatsAppWeb::new("wa"); // one replica is connected, the others stand by
//! ```
//!
//! **Terms of service.** WhatsApp allows automated use by its business API alone (see
//! [`meta`](crate::provider)). It may ban an account that a bot speaks from, and does. Use one that
//! you can lose, write to nobody who did not write first, and use this for what you would do by hand.
//!
//! **Licence.** The client (`whatsapp-rust`) is published under MIT. Some thirty files of its
//! `wacore-libsignal` still say `AGPL-3.0-only`, by Signal: they are ported from Signal's library. Settle
//! what that means for you before you give away, or serve others with, a program built with this feature.
//!
//! **Rust.** This feature alone needs Rust 1.94, as the client does.
//!
//! Problem: a linked device *is* its keys. They change with every message, in small steps that must
//! not be lost or taken twice: a step lost makes messages unreadable, a counter used twice breaks
//! their encryption, and keys lost need a person with the phone. WhatsApp lets one connection in for a
//! device and evicts the older; a replica that does not know it was replaced writes old keys over new
//! ones.
//!
//! Idea: the keys are rows of the replicated store ([`Storage`]), written in the name of the lead. The
//! replica that leads `provider:<id>` reads them once and has them in memory, since nobody else may
//! write them; the group refuses what a deposed one still writes (SPEC D5, D6). So a standby that is
//! elected logs in as the same device, goes on with the same ratchets, and asks nobody to scan a code.
//!
//! A message is acknowledged to WhatsApp after the commit that journals it (SPEC G1): until then it stays
//! in the server's queue and comes again on the next connection, whichever replica makes that. Its id
//! is the sender's and the chat's with it, as ids are told apart within those only. What it costs: the
//! commit of the journal and one for the ratchet; most of what the client stores besides goes along.
//! A reply is sent under an id made of its own and counts as sent when the server has answered.
//!
//! | what happens | what this does |
//! |---|---|
//! | connection lost | connects again, ever more seldom; steps down after `provider_down` |
//! | replaced by another login | steps down, and comes back ever more seldom (case w11) |
//! | unlinked on the phone | remembers it, deletes nothing, stays down: [`AfterUnlinked`] (case w12) |
//! | account locked or banned, client too old | steps down and says so |
//!
//! A turn is made by what others say or send, in private or in a group, where each participant has their
//! own chat key. Chats and participants are named by phone number where that is known
//! (`15550001@s.whatsapp.net`), else by the anonymous id (`…@lid`); a chat moves when its number becomes known
//! or changes (SPEC B2). Media come without their content, as a
//! kind and a caption. Edits, reactions, votes, status posts and what the account itself says make none.
//!
//! # Linking
//! With no session stored, the elected replica shows a QR code on its terminal, and [`Pairing`] steps
//! to [`WhatsAppWeb::on_pairing`]; [`WhatsAppWeb::link_number`] has it show a code to type in instead.
//! It is not connected meanwhile, so after `provider_down` (a minute) another replica shows one: link with one
//! replica at work, or set that longer. Once linked, no replica asks again.
//!
//! # Limits
//! * A reply whose answer from WhatsApp got lost is sent again under the same id, encrypted anew. Clients
//!   show messages of one id once; that is theirs to keep.
//! * A crash between sending and storing that it was sent skips message counters, which the protocol allows.
//! * Rows are in the memory of every node: a few hundred bytes a contact and device, up to some
//!   thousands where there is a session, and 812 one-time keys.
//! * Whoever can read the store's disk has the keys. The log of `whatsapp_rust` and `wacore` is to stay above
//!   `debug` where addresses must not be in it.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use whatsapp_rust::wacore::net::WHATSAPP_WEB_WS_URL;

use super::{
    Capabilities, Closed, Delivery, Link, Provider, ProviderError, SendError, SentId, Webhook,
};
use crate::types::ChatKey;

mod account;
mod connection;
mod inbound;
mod outbound;
mod pairing;
mod protocol;
mod signal;
mod socket;
mod storage;

use outbound::Outbound;
use pairing::OnPairing;
pub use pairing::{Pairing, qr};
pub use storage::Storage;

/// What is done at a start once the phone has unlinked this device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AfterUnlinked {
    /// Nothing: it stays down and says why (default). A server's mistake costs no keys so.
    #[default]
    StayDown,
    /// The stored session is tried once more.
    TryAgain,
    /// The stored session is deleted, and the bot linked anew.
    LinkAnew,
}

/// See the module. Cheap to clone; clones are the same provider.
#[derive(Clone)]
pub struct WhatsAppWeb {
    id: String,
    url: String,
    version: Option<(u32, u32, u32)>,
    prekeys: Option<usize>,
    number: Option<String>,
    after_unlinked: AfterUnlinked,
    on_pairing: OnPairing,
    outbound: Arc<Outbound>,
}

impl fmt::Debug for WhatsAppWeb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WhatsAppWeb").field("id", &self.id).finish_non_exhaustive()
    }
}

impl WhatsAppWeb {
    /// The device that is stored under that id; to be linked where there is none.
    pub fn new(id: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            url: WHATSAPP_WEB_WS_URL.to_owned(),
            version: None,
            prekeys: None,
            number: None,
            after_unlinked: AfterUnlinked::default(),
            on_pairing: Arc::new(pairing::on_terminal),
            outbound: Arc::default(),
        }
    }

    /// Where WhatsApp is: `wss://…`, or `ws://…` for a fake.
    #[must_use]
    pub fn base_url(mut self, url: impl Into<String>) -> Self {
        self.url = url.into();
        self
    }

    /// Which version of WhatsApp's web client it claims to be; by default the one that WhatsApp serves, asked
    /// for once a day.
    #[must_use]
    pub fn version(mut self, version: (u32, u32, u32)) -> Self {
        self.version = Some(version);
        self
    }

    /// How many one-time keys the server is given at once (default 812, as WhatsApp's own client).
    #[must_use]
    pub fn one_time_keys(mut self, count: usize) -> Self {
        self.prekeys = Some(count);
        self
    }

    /// Links by a code that is typed in on the phone of this number (digits, with the country's code)
    /// besides the QR code.
    #[must_use]
    pub fn link_number(mut self, number: impl Into<String>) -> Self {
        self.number = Some(number.into());
        self
    }

    /// Tells this of the steps of linking, instead of the terminal.
    #[must_use]
    pub fn on_pairing(mut self, told: impl Fn(&Pairing) + Send + Sync + 'static) -> Self {
        self.on_pairing = Arc::new(told);
        self
    }

    /// What to do once the phone has unlinked this device.
    #[must_use]
    pub fn after_unlinked(mut self, what: AfterUnlinked) -> Self {
        self.after_unlinked = what;
        self
    }

    /// The key of a chat: with a number (digits), or with whatever an address names.
    pub fn chat(&self, with: &str) -> ChatKey {
        match with.contains('@') {
            true => ChatKey::new(&self.id, with),
            false => ChatKey::new(&self.id, format!("{with}@s.whatsapp.net")),
        }
    }

    fn fault(&self, why: impl fmt::Display) -> ProviderError {
        ProviderError { provider: self.id.clone(), why: why.to_string() }
    }
}

#[async_trait]
impl Provider for WhatsAppWeb {
    fn id(&self) -> &str {
        &self.id
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { exclusive_session: true, listed: 0, sends: true }
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        connection::run(self, link).await
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        self.outbound.send(delivery).await
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        None
    }
}
