//! Reading a mailbox: list from the cursor on, journal, move, wait.
//!
//! The cursor is a UID, which is worth something under one UIDVALIDITY only. Where the mailbox was
//! rebuilt every mail has another UID, and the old ones would look new. So the cursor also says how late
//! the latest mail it covers arrived, and marks the last ones by their ids: what arrived well before that
//! is old, what is marked is old, and what else is told twice has an id that the journal knows.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Email;
use super::identity::{HEAD_BYTES, Identity, identity, mark};
use super::mailbox::{Fault, Listed, Mailbox};
use super::read::{Read, TEXT_BYTES_MAX};
use super::thread::Rows;
use crate::provider::{BadItem, Batch, Closed, DeliverError, Link, ProviderError};

/// Between two tries to connect, at first and at most.
const TROUBLE_WAIT: Duration = Duration::from_millis(250);
const TROUBLE_WAIT_MAX: Duration = Duration::from_secs(30);
/// Mails of one commit, and what they may hold: of text, and in memory.
const BATCH_MAX: usize = 32;
const BATCH_TEXT_BYTES_MAX: usize = 768 * 1024;
const BATCH_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Mails that are marked in the cursor.
const MARKED_MAX: usize = 128;
/// Mails that were there before the first start and are marked.
const FIRST_MARKED: u32 = 64;
/// How much earlier than the latest one a mail of a rebuilt mailbox may have arrived and not be old: as
/// long as the journal surely knows ids.
const SLACK_MS: u64 = 3_600_000;

/// Where the reader stands, as it is stored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Cursor {
    validity: u32,
    /// The last UID that is journaled.
    uid: u32,
    /// When the latest mail it covers arrived.
    at_ms: u64,
    /// The last mails it covers.
    marks: VecDeque<u64>,
    /// Up to this UID a mailbox that was rebuilt is looked through for what is new, from then on.
    rebuilt: Option<(u32, u64)>,
}

pub(super) struct Reader<'a> {
    pub(super) email: &'a Email,
    pub(super) mailbox: &'a super::Source,
    pub(super) link: Link,
}

/// Why a session is over.
enum End {
    Fault(Fault),
    Closed(Closed),
    Failed(ProviderError),
}

impl From<Fault> for End {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl Reader<'_> {
    pub(super) async fn run(&self) -> Result<Closed, ProviderError> {
        tokio::select! {
            biased;
            () = self.link.closing() => Ok(Closed::Asked),
            closed = self.sessions() => closed,
        }
    }

    /// One session after another.
    async fn sessions(&self) -> Result<Closed, ProviderError> {
        let mut trouble = TROUBLE_WAIT;
        loop {
            match self.session(&mut trouble).await {
                Err(End::Closed(closed)) => return Ok(closed),
                Err(End::Failed(error)) => return Err(error),
                Err(End::Fault(fault)) => {
                    self.connected(false);
                    tracing::warn!(provider = %self.email.id, %fault, "the mailbox is out of reach");
                    if fault.is_unlinked() {
                        return Ok(Closed::Unlinked);
                    }
                }
                Ok(never) => match never {},
            }
            tokio::time::sleep(trouble).await;
            trouble = (trouble * 2).min(TROUBLE_WAIT_MAX);
        }
    }

    async fn session(&self, trouble: &mut Duration) -> Result<std::convert::Infallible, End> {
        let Self { email, mailbox: source, .. } = self;
        let mut mailbox = Mailbox::open(&source.server, &source.name, email.patience).await?;
        let mut cursor = self.begin(&mut mailbox).await?;
        self.connected(true);
        *trouble = TROUBLE_WAIT;
        loop {
            cursor = self.catch_up(&mut mailbox, cursor).await?;
            mailbox.wait(email.probe).await?;
        }
    }

    /// Where to begin: where the last one stopped, whichever replica that was.
    async fn begin(&self, mailbox: &mut Mailbox) -> Result<Cursor, End> {
        let stored = self.link.cursor(&self.email.id).await;
        let stored = stored.map_err(|error| self.refused(error))?;
        let known = stored.and_then(|bytes| serde_json::from_slice::<Cursor>(&bytes).ok());
        let before = mailbox.uid_next.saturating_sub(1);
        match known {
            Some(cursor) if cursor.validity == mailbox.validity => Ok(cursor),
            Some(old) => {
                tracing::warn!(
                    provider = %self.email.id, was = old.validity, is = mailbox.validity,
                    "the mailbox was rebuilt; looking it through for what is new"
                );
                // A second time before the first was looked through: from where that began.
                let floor = old.at_ms.saturating_sub(SLACK_MS);
                let floor = old.rebuilt.map_or(floor, |(_, before)| before.min(floor));
                let rebuilt = Some((before, floor));
                Ok(Cursor { validity: mailbox.validity, uid: 0, rebuilt, ..old })
            }
            None if self.mailbox.from_the_beginning => {
                Ok(Cursor { validity: mailbox.validity, ..Cursor::default() })
            }
            None => {
                let mut cursor =
                    Cursor { validity: mailbox.validity, uid: before, ..Cursor::default() };
                let last = mailbox.last(FIRST_MARKED).await?;
                let mut rows = Rows::new(&self.link, &self.email.id);
                for mail in last {
                    cursor.uid = cursor.uid.max(mail.uid);
                    let id = self.id(&mut rows, &mail, &mail.body, &cursor).await;
                    let id = id.map_err(|error| self.refused(error))?;
                    cursor.cover(mail.at_ms, &id);
                }
                rows.keep().await.map_err(|error| self.refused(error))?;
                let begun = self.move_to(Batch::default(), &cursor).await;
                begun.map_err(|error| self.refused(error))?;
                Ok(cursor)
            }
        }
    }

    /// Takes what came, until there is no more.
    async fn catch_up(&self, mailbox: &mut Mailbox, mut cursor: Cursor) -> Result<Cursor, End> {
        loop {
            let listed = mailbox.list(cursor.uid.saturating_add(1)).await?;
            if listed.is_empty() {
                return Ok(cursor);
            }
            let mut rest = &listed[..];
            while !rest.is_empty() {
                let (batch, after) = rest.split_at(self.batch(rest));
                rest = after;
                let wanted = batch.iter().filter(|mail| self.is_wanted(mail, &cursor));
                let mails = mailbox.fetch(wanted.map(|mail| mail.uid)).await?;
                cursor = loop {
                    match self.take(batch, &mails, &cursor).await {
                        Ok(next) => break next,
                        // Nothing was taken, and the mails are at hand.
                        Err(DeliverError::Unavailable { retry_after, .. }) => {
                            tokio::time::sleep(retry_after).await;
                        }
                        Err(error) => return Err(self.refused(error)),
                    }
                };
            }
        }
    }

    /// How many of these go together.
    fn batch(&self, listed: &[Listed]) -> usize {
        let (mut text, mut bytes) = (0, 0);
        let fits = |mail: &&Listed| {
            text += mail.size.min(TEXT_BYTES_MAX);
            bytes += if mail.size > self.email.bytes_max { 0 } else { mail.size };
            text <= BATCH_TEXT_BYTES_MAX && bytes <= BATCH_BYTES_MAX
        };
        listed.iter().take(BATCH_MAX).take_while(fits).count().max(1)
    }

    /// Whether it is to be read: it is not too large, and not surely old.
    fn is_wanted(&self, mail: &Listed, cursor: &Cursor) -> bool {
        mail.size <= self.email.bytes_max && !cursor.is_before(mail)
    }

    /// Journals mails and moves past them, in one commit.
    async fn take(
        &self,
        listed: &[Listed],
        mails: &std::collections::HashMap<u32, Vec<u8>>,
        cursor: &Cursor,
    ) -> Result<Cursor, DeliverError> {
        let email = self.email;
        let mut next = cursor.clone();
        let mut batch = Batch::default();
        let mut rows = Rows::new(&self.link, &email.id);
        for mail in listed {
            next.uid = mail.uid;
            if cursor.is_before(mail) {
                continue;
            }
            let at = || format!("mail {} of {}", mail.uid, cursor.validity);
            if mail.size > email.bytes_max {
                let why = format!("{} bytes, at most {} are read", mail.size, email.bytes_max);
                batch.bad.push(BadItem { at: at(), why });
                continue;
            }
            // It was deleted meanwhile.
            let Some(raw) = mails.get(&mail.uid) else { continue };
            let id = self.id(&mut rows, mail, raw, cursor).await?;
            let old = cursor.is_rebuilt(mail.uid) && cursor.marks.contains(&mark(&id));
            next.cover(mail.at_ms, &id);
            if old {
                continue;
            }
            match email.read(&id, raw) {
                Read::Said(said) => match rows.note(&said, mail.at_ms, email.bound).await? {
                    true => batch.messages.push(said.message),
                    false => batch.bad.push(email.looped(at(), &said)),
                },
                Read::Silent(kind) => batch.unknown.push(kind.to_owned()),
                Read::Bad(why) => batch.bad.push(BadItem { at: at(), why }),
            }
        }
        if !next.is_rebuilt(next.uid.saturating_add(1)) {
            next.rebuilt = None;
        }
        // First: a mail that is in there and not in the journal comes again and changes nothing.
        rows.keep().await?;
        self.move_to(batch, &next).await?;
        Ok(next)
    }

    async fn move_to(&self, batch: Batch, cursor: &Cursor) -> Result<(), DeliverError> {
        // Numbers always serialise.
        let stored = serde_json::to_vec(cursor).unwrap_or_default();
        batch.take_past(&self.email.id, &self.link, &stored).await.map(drop)
    }

    /// What a mail is called.
    async fn id(
        &self,
        rows: &mut Rows<'_>,
        mail: &Listed,
        raw: &[u8],
        cursor: &Cursor,
    ) -> Result<String, DeliverError> {
        match identity(&raw[..raw.len().min(HEAD_BYTES)], mail.size) {
            Identity::Named(id) => Ok(id),
            Identity::Unnamed(digest) => {
                let rebuilt = cursor.is_rebuilt(mail.uid);
                let number = rows.number(&digest, cursor.validity, mail.uid, rebuilt).await?;
                Ok(format!("{digest}.{number}"))
            }
        }
    }

    fn connected(&self, connected: bool) {
        self.link.connected(&self.email.id, connected);
    }

    fn refused(&self, error: DeliverError) -> End {
        match error {
            DeliverError::Deposed => End::Closed(Closed::ByPeer),
            DeliverError::Unavailable { why, .. } => End::Fault(Fault::Journal(why)),
            error => End::Failed(self.fault(error.to_string())),
        }
    }

    fn fault(&self, why: String) -> ProviderError {
        ProviderError { provider: self.email.id.clone(), why }
    }
}

impl Cursor {
    /// Whether this mail of a rebuilt mailbox is surely old.
    fn is_before(&self, mail: &Listed) -> bool {
        self.rebuilt.is_some_and(|(up_to, since)| mail.uid <= up_to && mail.at_ms < since)
    }

    fn is_rebuilt(&self, uid: u32) -> bool {
        self.rebuilt.is_some_and(|(up_to, _)| uid <= up_to)
    }

    fn cover(&mut self, at_ms: u64, id: &str) {
        self.at_ms = self.at_ms.max(at_ms);
        let mark = mark(id);
        if !self.marks.contains(&mark) {
            self.marks.push_back(mark);
        }
        while self.marks.len() > MARKED_MAX {
            self.marks.pop_front();
        }
    }
}
