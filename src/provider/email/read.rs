//! Mail as messages.
//!
//! A mail is what its sender's program made of it, right or wrong. Its parser takes everything; what
//! is refused here is what nobody could answer: no author, or more than one.

use lettre::Address;
use mail_parser::decoders::html::html_to_text;
use mail_parser::{HeaderName, HeaderValue, Message as Mail, MessageParser, MimeHeaders, PartType};
use serde_json::json;

use super::identity::is_plain;
use super::{Email, automatic, quoted};
use crate::types::{ChatKey, Message};

/// The longest text that is taken; the rest is cut, and `extra.cut` says so.
pub(super) const TEXT_BYTES_MAX: usize = 128 * 1024;
/// The longest repeated part that is kept.
const QUOTED_BYTES_MAX: usize = 32 * 1024;
/// The longest subject, file name or name.
const LINE_CHARS_MAX: usize = 200;
/// Attachments that are told of.
const ATTACHMENTS_MAX: usize = 32;
/// `References` that are kept: the first, and so many of the last.
const REFERENCES_MAX: usize = 10;

/// What a mail turned out to be.
#[derive(Debug)]
pub(super) enum Read {
    /// Something a person says.
    Said(Box<Said>),
    /// It makes no turn: this kind does not.
    Silent(&'static str),
    /// It cannot be taken.
    Bad(String),
}

#[derive(Debug)]
pub(super) struct Said {
    pub(super) message: Message,
    /// Its `Message-ID`, where it can be referred to.
    pub(super) message_id: Option<String>,
    pub(super) references: Vec<String>,
    pub(super) subject: String,
}

impl Email {
    /// Reads a mail that is known by `id`.
    pub(super) fn read(&self, id: &str, raw: &[u8]) -> Read {
        let Some(mail) = MessageParser::default().parse(raw) else {
            return Read::Bad("it has no header".to_owned());
        };
        let from = match author(&mail) {
            Ok(from) => from,
            // A bounce need not have one.
            Err(why) => {
                let kind = automatic::automatic(mail.headers_raw(), "", &content_type(&mail));
                return kind.map_or_else(|| Read::Bad(why.to_owned()), Read::Silent);
            }
        };
        if self.is_own(&from) || self.is_own_id(id) {
            return Read::Silent("own mail");
        }
        let kind = automatic::automatic(mail.headers_raw(), &from, &content_type(&mail));
        if let Some(kind) = kind {
            return Read::Silent(kind);
        }
        let subject = line(mail.subject().unwrap_or_default());
        let replied = ids(mail.in_reply_to());
        let mut references = ids(mail.references());
        if references.is_empty() {
            references.clone_from(&replied);
        }
        if references.len() > REFERENCES_MAX {
            references.drain(1..references.len() - (REFERENCES_MAX - 1));
        }
        let message = self.message(id, from, &mail, &subject, replied.first());
        let message_id = mail.message_id().filter(|named| *named == id && is_plain(id));
        let message_id = message_id.map(str::to_owned);
        Read::Said(Box::new(Said { message, message_id, references, subject }))
    }

    fn message(
        &self,
        id: &str,
        from: String,
        mail: &Mail<'_>,
        subject: &str,
        in_reply_to: Option<&String>,
    ) -> Message {
        let bodies = (0..mail.text_body_count()).filter_map(|n| mail.body_text(n));
        let bodies: Vec<String> = bodies.map(|text| text.trim().to_owned()).collect();
        let mut whole = bodies.join("\n");
        if whole.is_empty() {
            whole = unclosed(mail).unwrap_or_default();
        }
        let whole = whole.replace("\r\n", "\n");
        let (own, rest) = quoted::split(&whole);
        let text = cut(own, TEXT_BYTES_MAX);
        let is_cut = text.len() < own.len();
        let attachments: Vec<_> = mail
            .attachments()
            .take(ATTACHMENTS_MAX)
            .map(|part| {
                let kind = part.content_type().map(|kind| {
                    line(&format!("{}/{}", kind.ctype(), kind.subtype().unwrap_or_default()))
                });
                json!({
                    "name": part.attachment_name().map(line),
                    "type": kind,
                    "bytes": part.contents().len(),
                })
            })
            .collect();
        let mut taken = Message::text(id, ChatKey::new(&self.id, from), text);
        if taken.text.is_empty() && !attachments.is_empty() {
            taken.kind = "file".to_owned();
        }
        let name = mail.from().and_then(|from| from.first()).and_then(|from| from.name());
        taken.extra = json!({
            "subject": subject,
            "name": name.map(line),
            "at_ms": mail.date().and_then(|date| u64::try_from(date.to_timestamp()).ok())
                .map(|seconds| seconds.saturating_mul(1_000)),
            "reply_to": mail.reply_to().and_then(|to| to.first()).and_then(|to| to.address())
                .map(line),
            "in_reply_to": in_reply_to,
            "quoted": cut(rest, QUOTED_BYTES_MAX),
            "cut": is_cut,
            "attachments": attachments,
        });
        taken
    }
}

/// The text of a mail that was broken off: to its parser a part that is not closed is an attachment.
fn unclosed(mail: &Mail<'_>) -> Option<String> {
    let mut parts = mail.attachments().filter(|part| {
        part.attachment_name().is_none()
            && !part.content_disposition().is_some_and(|kind| kind.is_attachment())
    });
    parts.find_map(|part| match &part.body {
        PartType::Text(text) => Some(text.trim().to_owned()),
        PartType::Html(html) => Some(html_to_text(html).trim().to_owned()),
        _ => None,
    })
}

/// Who wrote it, in lower case.
fn author(mail: &Mail<'_>) -> Result<String, &'static str> {
    let mut fields = mail.headers().iter().filter(|header| header.name == HeaderName::From);
    let (Some(field), None) = (fields.next(), fields.next()) else {
        return Err(match mail.from() {
            None => "it has no From",
            Some(_) => "it has two From fields",
        });
    };
    let from = addresses(&field.value);
    let author = match &from[..] {
        [] => return Err("its From names nobody"),
        [one] => one.clone(),
        // Several authors: one of them sent it.
        several => {
            let sender = mail.sender().map(|sender| HeaderValue::Address(sender.clone()));
            let sender = sender.map(|sender| addresses(&sender)).unwrap_or_default();
            let sent = sender.first().filter(|sender| several.contains(sender));
            sent.cloned().ok_or("its From names several, and no Sender says which")?
        }
    };
    match author.parse::<Address>() {
        Ok(_) => Ok(author),
        Err(_) => Err("its From is no address"),
    }
}

fn addresses(value: &HeaderValue<'_>) -> Vec<String> {
    let list = value.as_address().into_iter().flat_map(|address| address.iter());
    let named = list.filter_map(|one| Some(one.address()?.trim().to_lowercase()));
    named.filter(|address| !address.is_empty()).collect()
}

fn content_type(mail: &Mail<'_>) -> String {
    let kind = mail.content_type();
    let kind = kind.map(|kind| format!("{}/{}", kind.ctype(), kind.subtype().unwrap_or_default()));
    kind.unwrap_or_default().to_ascii_lowercase()
}

/// The ids that a field refers to.
fn ids(value: &HeaderValue<'_>) -> Vec<String> {
    let found: Vec<&str> = match value {
        HeaderValue::Text(one) => vec![one.as_ref()],
        HeaderValue::TextList(many) => many.iter().map(AsRef::as_ref).collect(),
        _ => Vec::new(),
    };
    found.into_iter().filter(|id| is_plain(id)).map(str::to_owned).collect()
}

/// A text that fits into one line.
fn line(text: &str) -> String {
    let text = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    text.take(LINE_CHARS_MAX).collect::<String>().trim().to_owned()
}

/// So many bytes of a text at most, whole characters.
fn cut(text: &str, bytes: usize) -> &str {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
