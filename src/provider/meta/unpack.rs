//! A request's entries, one after another, whole and in order (SPEC M2).
//!
//! Only the frame is decoded strictly. Everything inside is looked at as it is: a field that is
//! missing, new or of another type makes one item bad or unknown, and never the request.

use serde::Deserialize;
use serde_json::Value;

use super::{Meta, Surface};
use crate::provider::{BadItem, Batch};

/// The frame of what Meta posts.
#[derive(Debug, Deserialize)]
pub(super) struct Envelope {
    /// What it is about: `page`, `instagram`, `whatsapp_business_account`.
    object: String,
    entry: Vec<Value>,
}

/// What is being unpacked, and where in it.
pub(super) struct Unpacking<'a> {
    pub(super) meta: &'a Meta,
    pub(super) batch: Batch,
}

impl Meta {
    /// Unpacks a request.
    pub(super) fn unpack(&self, envelope: Envelope) -> Batch {
        let mut unpacking = Unpacking { meta: self, batch: Batch::default() };
        let expected = match self.surface {
            Surface::WhatsApp => "whatsapp_business_account",
            Surface::Messenger => "page",
            Surface::Instagram => "instagram",
        };
        if envelope.object != expected {
            unpacking.unknown(format!("object {}", envelope.object));
            return unpacking.batch;
        }
        for (n, entry) in envelope.entry.iter().enumerate() {
            let at = format!("entry[{n}]");
            match self.surface {
                Surface::WhatsApp => unpacking.whatsapp_entry(entry, &at),
                Surface::Messenger | Surface::Instagram => unpacking.messenger_entry(entry, &at),
            }
        }
        unpacking.batch
    }
}

impl Unpacking<'_> {
    pub(super) fn bad(&mut self, at: impl Into<String>, why: impl Into<String>) {
        self.batch.bad.push(BadItem { at: at.into(), why: why.into() });
    }

    pub(super) fn unknown(&mut self, kind: impl Into<String>) {
        self.batch.unknown.push(kind.into());
    }

    /// Whether the account is one of ours; one that is not is counted.
    pub(super) fn ours(&mut self, account: &str) -> bool {
        let ours = self.meta.accounts.contains_key(account);
        if !ours {
            self.unknown("account that was not named");
        }
        ours
    }
}

/// A field that is text and not empty.
pub(super) fn text<'a>(value: &'a Value, field: &str) -> Option<&'a str> {
    value.get(field)?.as_str().filter(|text| !text.is_empty())
}

/// The items of a field that is a list; nothing where it is missing.
pub(super) fn list<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value.get(field).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// An instant in ms since the epoch: from text or number, in seconds or milliseconds. Both units
/// come, also where the other is documented.
pub(super) fn at_ms(value: Option<&Value>) -> Option<u64> {
    /// As seconds this is the year 5138, as milliseconds 1973.
    const SECONDS_BELOW: u64 = 100_000_000_000;
    let value = value?;
    let number = value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())?;
    Some(if number < SECONDS_BELOW { number.saturating_mul(1_000) } else { number })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::codec::hostile;
    use crate::provider::Secret;
    use crate::provider::webhook::decode;

    const POSTED: [&str; 3] = [
        r#"{"object":"whatsapp_business_account","entry":[{"id":"1","changes":[{"field":"messages",
            "value":{"metadata":{"display_phone_number":"+1 (5)","phone_number_id":"a"},"contacts":[
            {"wa_id":"9","profile":{"name":"Ann"}}],"messages":[{"id":"m","from":"9","type":"text",
            "timestamp":"1767225600","text":{"body":"hi"},"context":{"id":"w"}},{"id":"n","from":"9",
            "type":"interactive","interactive":{"nfm_reply":{"body":"b","response_json":"{}"}}},
            {"id":"s","from":"9","type":"system","system":{"type":"user_changed_number",
            "wa_id":"8"}}],"statuses":[{"id":"x","status":"read","timestamp":1767225600000,
            "recipient_id":"9","errors":[{"code":1,"title":"t"}]}],"errors":[{"code":2}]}}]}]}"#,
        r#"{"object":"page","entry":[{"id":"a","messaging":[{"sender":{"id":"9"},"timestamp":1,
            "message":{"mid":"m","text":"hi","quick_reply":{"payload":"p"},"attachments":[
            {"type":"image"}]}},{"sender":{"id":"9"},"postback":{"title":"t","payload":"p"}},
            {"sender":{"id":"9"},"delivery":{"mids":["x"],"watermark":5}},
            {"sender":{"id":"9"},"read":{"watermark":5}},{"sender":{"id":"9"},
            "referral":{"ref":"r"}}]}]}"#,
        r#"{"object":"instagram","entry":[{"id":"a","changes":[{"field":"messages","value":
            {"sender":{"id":"9"},"message":{"mid":"m","is_echo":true}}}]}]}"#,
    ];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        #[test]
        fn m1_whatever_meta_posts_is_unpacked_in_part_or_refused(
            posted in hostile::json_of(&POSTED),
        ) {
            let body = posted.to_string();
            for surface in [Surface::WhatsApp, Surface::Messenger, Surface::Instagram] {
                let (app, verify) = (Secret::new("app secret"), Secret::new("verify token"));
                let meta = Meta::new("meta".to_owned(), surface, app, verify).account("a", "t");
                match decode::<Envelope>(body.as_bytes()) {
                    Ok(envelope) => drop(meta.unpack(envelope)),
                    Err(response) => prop_assert_eq!(response.status, 400),
                }
            }
        }

        #[test]
        fn m1_whatever_bytes_meta_posts_are_taken_or_refused(
            body in hostile::bytes(POSTED.iter().map(|text| text.as_bytes().to_vec()).collect()),
        ) {
            if let Err(response) = decode::<Envelope>(&body) {
                prop_assert_eq!(response.status, 400);
            }
        }
    }
}
