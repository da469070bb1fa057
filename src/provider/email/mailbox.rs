//! A session with an IMAP server, every step of it within a time.
//!
//! The mailbox is opened for reading only: nothing in it changes, and people may look into it with
//! their own programs.

use std::collections::HashMap;
use std::fmt::Write;
use std::time::Duration;

use async_imap::error::Error as ImapError;
use async_imap::imap_proto::{AttributeValue, MailboxDatum, Response, Status};
use async_imap::types::UnsolicitedResponse;
use async_imap::{Client, Session};

use super::identity::HEAD_BYTES;
use super::server::{Security, Server};
use crate::provider::encrypted::Io;

/// Between two looks, where the server does not tell by itself.
const LOOK_EVERY: Duration = Duration::from_secs(20);

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("{what}: no answer within {patience:?}")]
    Silent { what: &'static str, patience: Duration },
    #[error("not connected: {0}")]
    Connect(#[from] std::io::Error),
    #[error("the login was refused: {0}")]
    Login(ImapError),
    #[error("{0}")]
    Imap(#[from] ImapError),
    #[error("the server refused: {0}")]
    Refused(String),
    #[error("the server said goodbye")]
    Goodbye,
    #[error("the server has no UIDVALIDITY for {0}: it cannot say which mail is new")]
    NoUids(String),
    #[error("the bot takes nothing: {0}")]
    Journal(String),
}

impl Fault {
    /// Whether the account is no longer one, as far as the server says.
    pub(super) fn is_unlinked(&self) -> bool {
        let Self::Login(ImapError::No(said)) = self else { return false };
        said.to_ascii_uppercase().contains("AUTHENTICATIONFAILED")
    }
}

/// A mail as the mailbox lists it.
#[derive(Clone, Debug)]
pub(super) struct Listed {
    pub(super) uid: u32,
    pub(super) size: usize,
    /// When it arrived, ms since the Unix epoch.
    pub(super) at_ms: u64,
    /// It, or its beginning, where that was asked for.
    pub(super) body: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Mailbox {
    /// `None` only while it idles, and after it failed.
    session: Option<Session<Box<dyn Io>>>,
    patience: Duration,
    can_idle: bool,
    pub(super) validity: u32,
    /// Every mail that is there has a UID below.
    pub(super) uid_next: u32,
    exists: u32,
    /// Something came in since it was listed.
    came: bool,
}

async fn within<T, E: Into<Fault>>(
    patience: Duration,
    what: &'static str,
    step: impl Future<Output = Result<T, E>>,
) -> Result<T, Fault> {
    match tokio::time::timeout(patience, step).await {
        Ok(done) => done.map_err(Into::into),
        Err(_elapsed) => Err(Fault::Silent { what, patience }),
    }
}

/// Whether something came in, of what the server said unasked.
fn news(mut next: impl FnMut() -> Option<UnsolicitedResponse>) -> bool {
    let mut found = false;
    while let Some(said) = next() {
        let came = matches!(said, UnsolicitedResponse::Exists(_) | UnsolicitedResponse::Recent(_));
        found |= came;
    }
    found
}

impl Mailbox {
    /// Logs in and opens the mailbox of that name.
    pub(super) async fn open(
        server: &Server,
        name: &str,
        patience: Duration,
    ) -> Result<Self, Fault> {
        let stream = within(patience, "connecting", server.connect()).await?;
        let mut client = Client::new(stream);
        let greeting = within(patience, "the greeting", client.read_response()).await?;
        greeting.ok_or(Fault::Goodbye)?;
        if server.security == Security::StartTls {
            let asked = client.run_command_and_check_ok("STARTTLS", None);
            within(patience, "STARTTLS", asked).await?;
            let plain = client.into_inner();
            let stream = within(patience, "the TLS handshake", server.encrypt(plain)).await?;
            client = Client::new(stream);
        }
        let (user, password) = match &server.login {
            Some((user, password)) => (user.as_str(), &**password),
            None => ("", ""),
        };
        let login = async { client.login(user, password).await.map_err(|(error, _)| error) };
        let mut session = match within(patience, "the login", login).await {
            Err(Fault::Imap(error @ ImapError::No(_))) => return Err(Fault::Login(error)),
            session => session?,
        };
        let can = within(patience, "its capabilities", session.capabilities()).await?;
        let opened = within(patience, "opening the mailbox", session.examine(name)).await?;
        let validity = opened.uid_validity.ok_or_else(|| Fault::NoUids(name.to_owned()))?;
        let mut mailbox = Self {
            session: Some(session),
            patience,
            can_idle: can.has_str("IDLE"),
            validity,
            uid_next: 0,
            exists: opened.exists,
            came: false,
        };
        mailbox.uid_next = match opened.uid_next {
            Some(next) => next,
            // It may leave that out; then the last mail says it.
            None => mailbox.list(1).await?.last().map_or(1, |last| last.uid.saturating_add(1)),
        };
        Ok(mailbox)
    }

    fn session(&mut self) -> Result<&mut Session<Box<dyn Io>>, Fault> {
        self.session.as_mut().ok_or(Fault::Goodbye)
    }

    /// What has that UID or a greater one, by UID.
    pub(super) async fn list(&mut self, from: u32) -> Result<Vec<Listed>, Fault> {
        self.came = false;
        let session = self.session()?;
        news(|| session.unsolicited_responses.try_recv().ok());
        let asked = format!("UID FETCH {from}:* (UID RFC822.SIZE INTERNALDATE)");
        let mut listed = self.fetched(&asked).await?;
        // "n:*" is the last mail, too, where n is beyond it.
        listed.retain(|mail| mail.uid >= from);
        Ok(listed)
    }

    /// The last mails, so many at most, with their beginnings.
    pub(super) async fn last(&mut self, most: u32) -> Result<Vec<Listed>, Fault> {
        if self.exists == 0 {
            return Ok(Vec::new());
        }
        let (first, last) = (self.exists.saturating_sub(most - 1).max(1), self.exists);
        let asked = format!(
            "FETCH {first}:{last} (UID RFC822.SIZE INTERNALDATE BODY.PEEK[]<0.{HEAD_BYTES}>)"
        );
        self.fetched(&asked).await
    }

    /// The mails of these UIDs, whole; without those that are gone.
    pub(super) async fn fetch(
        &mut self,
        uids: impl Iterator<Item = u32>,
    ) -> Result<HashMap<u32, Vec<u8>>, Fault> {
        let mut set = String::new();
        for uid in uids {
            // Writing to a string does not fail.
            let _ = write!(set, "{}{uid}", if set.is_empty() { "" } else { "," });
        }
        if set.is_empty() {
            return Ok(HashMap::new());
        }
        let found = self.fetched(&format!("UID FETCH {set} (UID RFC822.SIZE BODY.PEEK[])")).await?;
        Ok(found.into_iter().map(|mail| (mail.uid, mail.body)).collect())
    }

    /// What the server tells of mails, by UID, where it told it to the end. (The client's own call
    /// takes a refusal, and a connection that ended, for the end of the list; mail that is not in it
    /// would be passed by as deleted.)
    async fn fetched(&mut self, command: &str) -> Result<Vec<Listed>, Fault> {
        let patience = self.patience;
        let session = self.session()?;
        let tag = within(patience, "FETCH", session.run_command(command)).await?;
        let (mut found, mut came) = (Vec::new(), false);
        loop {
            let said = within(patience, "FETCH", session.read_response()).await?;
            let said = said.ok_or(Fault::Goodbye)?;
            match said.parsed() {
                Response::Fetch(_, attributes) => found.extend(listed(attributes)),
                Response::MailboxData(MailboxDatum::Exists(_)) => came = true,
                Response::Done { tag: of, status, outcome } if *of == tag => {
                    if *status != Status::Ok {
                        return Err(Fault::Refused(format!("{status:?} {outcome:?}")));
                    }
                    break;
                }
                _ => {}
            }
        }
        self.came |= came;
        found.sort_by_key(|mail: &Listed| mail.uid);
        found.dedup_by_key(|mail| mail.uid);
        Ok(found)
    }

    /// Waits until something may have come, or so long. The server has to answer after it either
    /// way, so one that fell silent is noticed.
    pub(super) async fn wait(&mut self, probe: Duration) -> Result<(), Fault> {
        let patience = self.patience;
        if !self.can_idle {
            tokio::time::sleep(probe.min(LOOK_EVERY)).await;
            return within(patience, "NOOP", self.session()?.noop()).await;
        }
        let session = self.session.take().ok_or(Fault::Goodbye)?;
        let unsolicited = session.unsolicited_responses.clone();
        let mut idle = session.idle();
        within(patience, "IDLE", idle.init()).await?;
        // What was said between the listing and here is no reason to wait.
        if !self.came && !news(|| unsolicited.try_recv().ok()) {
            // Dropping the second would end the wait.
            let (waiting, _interrupt) = idle.wait_with_timeout(probe);
            if let Ok(woken) = tokio::time::timeout(probe, waiting).await {
                woken?;
            }
        }
        self.session = Some(within(patience, "the end of IDLE", idle.done()).await?);
        Ok(())
    }
}

/// A mail, of what the server says of it; `None` where it only says that a flag changed.
fn listed(attributes: &[AttributeValue<'_>]) -> Option<Listed> {
    let (mut uid, mut size, mut at_ms, mut body) = (None, None, 0, Vec::new());
    for attribute in attributes {
        match attribute {
            AttributeValue::Uid(found) => uid = Some(*found),
            AttributeValue::Rfc822Size(found) => size = usize::try_from(*found).ok(),
            AttributeValue::InternalDate(date) => at_ms = instant(date).unwrap_or_default(),
            AttributeValue::BodySection { section: None, data: Some(data), .. } => {
                body = data.to_vec();
            }
            _ => {}
        }
    }
    Some(Listed { uid: uid?, size: size?, at_ms, body })
}

/// `30-Nov-2026 14:00:00 +0100` as ms since the Unix epoch.
fn instant(date: &str) -> Option<u64> {
    let found = jiff::Timestamp::strptime("%d-%b-%Y %H:%M:%S %z", date.trim()).ok()?;
    u64::try_from(found.as_millisecond()).ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn d5_when_a_mail_arrived_is_read_off_the_list() {
        let at = |date| super::instant(date);
        assert_eq!(at("30-Nov-2026 14:00:00 +0100"), Some(1_796_043_600_000));
        assert_eq!(at(" 1-Jan-1970 00:00:01 +0000"), Some(1_000));
        assert_eq!(at("31-Dec-1969 00:00:00 +0000"), None);
        assert_eq!(at("yesterday"), None);
    }
}
