//! Replies as mail, by SMTP.
//!
//! What a server says before it has the text means that nothing was sent; what it does not say after
//! it had the text leaves the outcome open. A reply is the same mail however often it is sent: its
//! `Message-ID` is made of the reply's own id, so a mailbox that got it twice can tell.

use std::time::{Duration, SystemTime};

use lettre::message::header::{HeaderName, HeaderValue};
use lettre::message::{Mailbox, SinglePart};
use lettre::transport::smtp::Error as SmtpError;
use lettre::transport::smtp::authentication::{Credentials, Mechanism};
use lettre::transport::smtp::client::AsyncSmtpConnection;
use lettre::transport::smtp::commands::{Data, Mail, Rcpt};
use lettre::transport::smtp::extension::{ClientId, Extension, MailParameter};
use lettre::{Address, Message};

use super::identity::digest;
use super::server::{Security, Server};
use super::thread::{Answerable, Thread, load};
use super::{Email, OWN_IDS};
use crate::provider::{DeliverError, Delivery, SendError, SentId};

/// How long the server may think about a mail that it has.
const VERDICT_MAX: Duration = Duration::from_secs(120);
/// When a server that said "later" is asked again: those that put off what they do not know want
/// minutes, and those that are busy want seconds.
const LATER: Duration = Duration::from_secs(30);

const MECHANISMS: [Mechanism; 2] = [Mechanism::Plain, Mechanism::Login];

/// Where a send stood when it failed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Before the server knew of any mail.
    Hello,
    /// It knew from whom and to whom.
    Envelope,
    /// It had the text.
    Text,
}

impl Email {
    /// Sends one reply.
    pub(super) async fn send_reply(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        let Some(server) = &self.smtp else {
            let why = "no server to send by is set (Email::smtp)".to_owned();
            return Err(SendError::Refused { why });
        };
        let to =
            delivery.chat.chat.parse::<Address>().map_err(|_| SendError::Refused {
                why: format!("{} is no address", delivery.chat),
            })?;
        let thread = self.thread(&delivery.chat.chat).await?;
        let answered = thread.answered(&delivery.in_reply_to);
        let id = self.message_id(&delivery.id);
        let mail = self.compose(delivery, to.clone(), &id, answered)?;
        self.hand_over(server, to, &mail).await.map(|()| SentId(id))
    }

    /// The `Message-ID` of a reply, without brackets.
    pub(super) fn message_id(&self, reply: &str) -> String {
        let of = format!("{}\n{}\n{reply}", self.id, self.address);
        format!("{OWN_IDS}{}@{}", digest(&of), self.address.domain())
    }

    async fn thread(&self, address: &str) -> Result<Thread, SendError> {
        let link = self.link.lock().clone();
        let not_yet = |why: String| SendError::Transport { why };
        let link = link.ok_or_else(|| not_yet("the provider does not run yet".to_owned()))?;
        let row = Thread::row(address);
        let thread: Result<Thread, DeliverError> = load(&link, &self.id, &row).await;
        thread.map_err(|error| not_yet(error.to_string()))
    }

    fn compose(
        &self,
        delivery: &Delivery,
        to: Address,
        id: &str,
        answered: Option<&Answerable>,
    ) -> Result<Vec<u8>, SendError> {
        let subject = answered.map_or(self.subject.clone(), |mail| reply_subject(&mail.subject));
        let mut mail = Message::builder()
            .from(Mailbox::new(self.name.clone(), self.address.clone()))
            .to(Mailbox::new(None, to))
            .subject(subject)
            .date(SystemTime::now())
            .message_id(Some(format!("<{id}>")));
        if let Some((message_id, mail_answered)) =
            answered.and_then(|mail| Some((mail.message_id.as_ref()?, mail)))
        {
            let above = mail_answered.references.iter().chain([message_id]);
            let references: Vec<String> = above.map(|id| format!("<{id}>")).collect();
            mail = mail.in_reply_to(format!("<{message_id}>")).references(references.join(" "));
        }
        // So that no program answers it (RFC 3834; the second is what Exchange asks for).
        let by = if answered.is_some() { "auto-replied" } else { "auto-generated" };
        for (name, value) in
            [("Auto-Submitted", by), ("X-Auto-Response-Suppress", "OOF, AutoReply")]
        {
            let name = HeaderName::new_from_ascii_str(name);
            mail = mail.raw_header(HeaderValue::new(name, value.to_owned()));
        }
        let mail = mail.singlepart(SinglePart::plain(delivery.text.clone()));
        let mail = mail.map_err(|error| SendError::Refused { why: error.to_string() })?;
        Ok(mail.formatted())
    }

    async fn hand_over(&self, server: &Server, to: Address, mail: &[u8]) -> Result<(), SendError> {
        let ready = tokio::time::timeout(self.patience, self.ready(server, to)).await;
        let mut connection = match ready {
            Ok(ready) => ready?,
            Err(_elapsed) => {
                let why = format!("no answer within {:?}", self.patience);
                return Err(SendError::Transport { why });
            }
        };
        let verdict = tokio::time::timeout(VERDICT_MAX, connection.message(mail)).await;
        match verdict {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(failed(&error, Stage::Text)),
            Err(_elapsed) => {
                let why = format!("it was given the mail and said nothing for {VERDICT_MAX:?}");
                return Err(SendError::OutcomeUnknown { why });
            }
        }
        // It is sent, whatever becomes of the goodbye.
        let _ = tokio::time::timeout(Duration::from_secs(1), connection.quit()).await;
        Ok(())
    }

    /// A connection that takes the text next.
    async fn ready(&self, server: &Server, to: Address) -> Result<AsyncSmtpConnection, SendError> {
        let hello = |error: SmtpError| failed(&error, Stage::Hello);
        let envelope = |error: SmtpError| failed(&error, Stage::Envelope);
        let addresses = server.addresses().await;
        let addresses = addresses.map_err(|e| SendError::Transport { why: e.to_string() })?;
        let name = ClientId::Domain(self.address.domain().to_owned());
        let parameters = match server.security {
            Security::Tls => Some(server.parameters().map_err(hello)?),
            Security::StartTls | Security::Plain => None,
        };
        let patience = Some(self.patience);
        let opened =
            AsyncSmtpConnection::connect_tokio1(&addresses[..], patience, &name, parameters, None);
        let mut connection = opened.await.map_err(hello)?;
        if server.security == Security::StartTls {
            let parameters = server.parameters().map_err(hello)?;
            connection.starttls(parameters, &name).await.map_err(hello)?;
        }
        if let Some((user, password)) = &server.login {
            let credentials = Credentials::new(user.clone(), password.to_string());
            connection.auth(&MECHANISMS, &credentials).await.map_err(hello)?;
        }
        let mut with = Vec::new();
        if !AsRef::<str>::as_ref(&to).is_ascii() {
            if !connection.server_info().supports_feature(Extension::SmtpUtfEight) {
                let why = format!("{to} has letters that the server does not take");
                return Err(SendError::Refused { why });
            }
            with.push(MailParameter::SmtpUtfEight);
        }
        let from = Mail::new(Some(self.address.clone()), with);
        connection.command(from).await.map_err(envelope)?;
        connection.command(Rcpt::new(to, Vec::new())).await.map_err(envelope)?;
        connection.command(Data).await.map_err(envelope)?;
        Ok(connection)
    }
}

/// `Re: ` once, however the subject begins.
fn reply_subject(subject: &str) -> String {
    let mut rest = subject.trim();
    while let Some(head) = rest.get(..3).filter(|head| head.eq_ignore_ascii_case("re:")) {
        rest = rest[head.len()..].trim_start();
    }
    format!("Re: {rest}").trim().to_owned()
}

fn failed(error: &SmtpError, stage: Stage) -> SendError {
    let mut why = error.to_string();
    if let Some(cause) = std::error::Error::source(error) {
        why = format!("{why}: {cause}");
    }
    match error.status().map(u16::from) {
        Some(400..500) => SendError::RateLimited { retry_after: LATER },
        // It will not have this bot: a password that somebody has to renew.
        Some(530 | 534 | 535 | 538) => SendError::Transport { why },
        Some(_) if stage != Stage::Hello => SendError::Refused { why },
        Some(_) => SendError::Transport { why },
        None if stage == Stage::Text => SendError::OutcomeUnknown { why },
        None => SendError::Transport { why },
    }
}

#[cfg(test)]
mod tests {
    use super::reply_subject;

    #[test]
    fn d4_a_reply_says_so_once() {
        for (subject, reply) in [
            ("Order 7", "Re: Order 7"),
            ("Re: Order 7", "Re: Order 7"),
            ("RE: re:Order 7", "Re: Order 7"),
            ("Rest", "Re: Rest"),
            ("", "Re:"),
            ("é", "Re: é"),
        ] {
            assert_eq!(reply_subject(subject), reply);
        }
    }
}
