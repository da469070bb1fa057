//! Email: read by IMAP or handed in, answered by SMTP.
//!
//! ```no_run
//! # fn main() -> Result<(), botmesh::provider::email::AddressError> {
//! use botmesh::provider::email::{Email, Server};
//! let email = Email::new("mail", "shop@example.org")?
//!     .imap(Server::tls("imap.example.org", 993).login("shop", "secret"), "INBOX")
//!     .smtp(Server::starttls("smtp.example.org", 587).login("shop", "secret"));
//! # Ok(())
//! # }
//! ```
//!
//! A chat is a correspondent: their address in lower case. Replies go to it, in the thread of the mail
//! that they answer (`Reply-To` is told in `extra.reply_to` and not followed: whoever forges a `From` would
//! have the answers sent to themselves). The text is what the author wrote, without what their program
//! repeated below it, which is `extra.quoted`.
//!
//! Problem of reading: a mailbox remembers for nobody what they have read, a connection that died looks
//! like a quiet one, and a rebuilt mailbox numbers its mails anew. Idea: one replica reads
//! ([`Capabilities::exclusive_session`]) and keeps (UIDVALIDITY, UID) as its cursor, which moves in the
//! commit that journals what it covers (SPEC D5); it idles for [`Email::probe_every`] at most and looks
//! again, so a silent server is noticed within that and an answer's time; and after a rebuild it
//! looks through the mailbox by arrival and `Message-ID`. Without [`Email::imap`] mail comes by
//! [`Email::ingest`], at any replica.
//!
//! What a program wrote makes no turn: bounces, lists, absence notes (RFC 3834). One that does not say so
//! is stopped by [`Email::turns_max`]. Replies say that a program wrote them.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use lettre::Address;
use parking_lot::Mutex;

use super::{
    BadItem, Capabilities, Closed, DeliverError, Delivery, Link, Notice, Provider, ProviderError,
    SendError, SentId, Webhook,
};
use crate::types::ChatKey;

mod automatic;
mod identity;
mod mailbox;
mod poll;
mod quoted;
mod read;
mod send;
mod server;
mod thread;

pub use server::Server;

use identity::{Identity, identity};
use read::{Read, Said};
use thread::{Bound, Rows};

/// How the ids of this library's own mails begin.
const OWN_IDS: &str = "botmesh-";
/// The longest wait for an answer, unless said otherwise.
const PATIENCE: Duration = Duration::from_secs(30);
/// Idling is ended and begun anew this often, unless said otherwise.
const PROBE: Duration = Duration::from_secs(240);
/// A server may end a session that idles for half an hour (RFC 2177).
const PROBE_MAX: Duration = Duration::from_secs(25 * 60);

/// Not an address of a mailbox.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no address ({why}); write name@domain")]
pub struct AddressError {
    text: String,
    why: String,
}

/// What became of a mail that was handed in.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ingested {
    /// It is taken: there is a turn for it.
    Taken,
    /// It was taken before.
    Duplicate,
    /// It makes no turn, being of this kind: `bounce`, `list mail`, `automatic mail`, …
    Silent {
        /// Its kind.
        kind: String,
    },
}

/// Where mail is read.
#[derive(Clone, Debug)]
struct Source {
    server: Server,
    name: String,
    from_the_beginning: bool,
}

/// See the module. Cheap to clone; clones are the same provider.
#[derive(Clone)]
pub struct Email {
    id: String,
    address: Address,
    /// Further addresses of its own, in lower case.
    aliases: Vec<String>,
    name: Option<String>,
    /// Of a mail that answers none.
    subject: String,
    source: Option<Source>,
    smtp: Option<Server>,
    probe: Duration,
    patience: Duration,
    bytes_max: usize,
    bound: Bound,
    /// The link of the last run, for what comes from elsewhere and for what is sent.
    link: Arc<Mutex<Option<Link>>>,
}

impl fmt::Debug for Email {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, address, source, smtp, .. } = self;
        let mut out = f.debug_struct("Email");
        out.field("id", id).field("address", &address.to_string());
        out.field("source", source).field("smtp", smtp).finish_non_exhaustive()
    }
}

impl Email {
    /// A bot of that address, under that id.
    pub fn new(id: impl Into<String>, address: impl AsRef<str>) -> Result<Self, AddressError> {
        let text = address.as_ref();
        let address: Address = text.parse().map_err(|error: lettre::address::AddressError| {
            AddressError { text: text.chars().take(64).collect(), why: error.to_string() }
        })?;
        Ok(Self {
            id: id.into(),
            address,
            aliases: Vec::new(),
            name: None,
            subject: "A message for you".to_owned(),
            source: None,
            smtp: None,
            probe: PROBE,
            patience: PATIENCE,
            bytes_max: 10 * 1024 * 1024,
            bound: Bound { most: 3, within: Duration::from_secs(120) },
            link: Arc::default(),
        })
    }

    /// Reads this mailbox of that server, from what comes after the first start on. One replica reads,
    /// the others stand by. The mailbox is opened for reading only; nothing in it changes.
    #[must_use]
    pub fn imap(mut self, server: Server, mailbox: impl Into<String>) -> Self {
        self.source = Some(Source { server, name: mailbox.into(), from_the_beginning: false });
        self
    }

    /// At the first start, what is in the mailbox already is answered, too.
    #[must_use]
    pub fn from_the_beginning(mut self) -> Self {
        if let Some(source) = &mut self.source {
            source.from_the_beginning = true;
        }
        self
    }

    /// Sends replies by that server.
    #[must_use]
    pub fn smtp(mut self, server: Server) -> Self {
        self.smtp = Some(server);
        self
    }

    /// What it is called in its mails.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The subject of a mail that answers none.
    #[must_use]
    pub fn subject(mut self, subject: impl Into<String>) -> Self {
        self.subject = subject.into();
        self
    }

    /// A further address of its own: what comes from it is its own mail and makes no turn.
    #[must_use]
    pub fn alias(mut self, address: impl AsRef<str>) -> Self {
        self.aliases.push(address.as_ref().to_lowercase());
        self
    }

    /// How often it looks, also where the server tells of new mail by itself (default 4 minutes, at
    /// most 25): so long may mail lie unread behind a connection that fell silent.
    #[must_use]
    pub fn probe_every(mut self, interval: Duration) -> Self {
        self.probe = interval.min(PROBE_MAX);
        self
    }

    /// How long a server may take for one answer (default 30 s).
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The largest mail that is read, in bytes with all attachments (default 10 MiB). A larger one is
    /// passed by and told of as an error.
    #[must_use]
    pub fn bytes_max(mut self, bytes: usize) -> Self {
        self.bytes_max = bytes;
        self
    }

    /// How many mails of one correspondent within how long make turns (default 3 in two minutes, by
    /// when they arrived): more are taken for those of a program that answers replies, passed by and
    /// told of as an error. In a day it is at most 100, or as many as this.
    #[must_use]
    pub fn turns_max(mut self, most: usize, within: Duration) -> Self {
        self.bound = Bound { most, within };
        self
    }

    /// The key of a correspondent.
    pub fn chat(&self, address: &str) -> ChatKey {
        ChatKey::new(&self.id, address.trim().to_lowercase())
    }

    /// Takes a mail that came another way: from a mail server's pipe, or from a provider's API. `raw` is
    /// all of it, header and text. After `Ok` it is journaled; after an error it is to be handed in
    /// again, but for [`DeliverError::Invalid`].
    pub async fn ingest(&self, raw: &[u8]) -> Result<Ingested, DeliverError> {
        let link = self.link.lock().clone();
        let link = link.ok_or_else(|| DeliverError::Unavailable {
            why: "the bot has not started".to_owned(),
            retry_after: Duration::from_secs(1),
        })?;
        let id = match identity(raw, raw.len()) {
            Identity::Named(id) => id,
            // There is no mailbox to count its equals in: the same bytes are the same mail.
            Identity::Unnamed(digest) => format!("{digest}.1"),
        };
        if raw.len() > self.bytes_max {
            let why = format!("{} bytes, at most {} are read", raw.len(), self.bytes_max);
            return Err(DeliverError::Invalid { id, why });
        }
        let said = match self.read(&id, raw) {
            Read::Said(said) => said,
            Read::Silent(kind) => {
                link.notice(&self.id, Notice::Unknown { kind: kind.to_owned() });
                return Ok(Ingested::Silent { kind: kind.to_owned() });
            }
            Read::Bad(why) => return Err(DeliverError::Invalid { id, why }),
        };
        let mut rows = Rows::new(&link, &self.id);
        if !rows.note(&said, now_ms(), self.bound).await? {
            link.notice(&self.id, Notice::Bad(self.looped(format!("mail {id:?}"), &said)));
            return Ok(Ingested::Silent { kind: "mail loop".to_owned() });
        }
        rows.keep().await?;
        let delivered = link.deliver(vec![said.message]).await?;
        match delivered.first() {
            Some(delivered) if delivered.duplicate => Ok(Ingested::Duplicate),
            _ => Ok(Ingested::Taken),
        }
    }

    fn looped(&self, at: String, said: &Said) -> BadItem {
        let Bound { most, within } = self.bound;
        let from = &said.message.chat.chat;
        let why = format!(
            "{from} had {most} turns within {within:?} or too many in a day; this is taken for a \
             program's answer to a reply (Email::turns_max)"
        );
        BadItem { at, why }
    }

    fn is_own(&self, address: &str) -> bool {
        self.address.to_string().eq_ignore_ascii_case(address)
            || self.aliases.iter().any(|alias| alias == address)
    }

    /// Whether a mail of that id is one of this bot's, under whatever name it came back.
    fn is_own_id(&self, id: &str) -> bool {
        let rest = id.strip_prefix(OWN_IDS).and_then(|rest| rest.split_once('@'));
        rest.is_some_and(|(_, domain)| domain.eq_ignore_ascii_case(self.address.domain()))
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[async_trait]
impl Provider for Email {
    fn id(&self) -> &str {
        &self.id
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { exclusive_session: self.source.is_some(), listed: 0, sends: true }
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        *self.link.lock() = Some(link.clone());
        match &self.source {
            Some(mailbox) => poll::Reader { email: self, mailbox, link }.run().await,
            None => {
                link.connected(&self.id, true);
                link.closing().await;
                Ok(Closed::Asked)
            }
        }
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        self.send_reply(delivery).await
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        None
    }
}
