//! What a mail is known by.
//!
//! By its `Message-ID`. A mail without one is known by a digest of its beginning and its size, so
//! that it is the same mail under another UID; and because two such mails may be equal to the byte and
//! both meant, by the how-manieth of its kind it is in the mailbox (case w21, see `thread`).

use sha2::{Digest, Sha256};

/// How far into a mail its identity is looked for: as much as is read of mails that are old already.
pub(super) const HEAD_BYTES: usize = 64 * 1024;
/// The longest `Message-ID` that is taken as it is.
const ID_BYTES_MAX: usize = 255;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Identity {
    /// By its `Message-ID`.
    Named(String),
    /// By this digest.
    Unnamed(String),
}

/// The identity of a mail of that size, which begins so.
pub(super) fn identity(raw: &[u8], size: usize) -> Identity {
    let head = &raw[..raw.len().min(HEAD_BYTES)];
    match named(head) {
        Some(id) => Identity::Named(id),
        None => {
            let mut hash = Sha256::new();
            hash.update(head);
            hash.update((size as u64).to_be_bytes());
            Identity::Unnamed(hex(&hash.finalize()))
        }
    }
}

/// Hexadecimal digits of a digest; 128 bits of it.
pub(super) fn hex(digest: &[u8]) -> String {
    digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// A digest of a text, for the name of a row.
pub(super) fn digest(text: &str) -> String {
    hex(&Sha256::digest(text))
}

/// 64 bits of it, to be remembered in number.
pub(super) fn mark(id: &str) -> u64 {
    let digest = Sha256::digest(id);
    digest.iter().take(8).fold(0, |mark, byte| mark << 8 | u64::from(*byte))
}

/// What the first `Message-ID` says.
fn named(head: &[u8]) -> Option<String> {
    let mut lines = head.split(|byte| *byte == b'\n');
    let mut value = Vec::new();
    loop {
        let line = lines.next()?;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            return None;
        }
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        if line[..colon].trim_ascii().eq_ignore_ascii_case(b"message-id") {
            value.extend_from_slice(&line[colon + 1..]);
            break;
        }
    }
    for line in lines {
        let folded = line.first().is_some_and(|first| matches!(first, b' ' | b'\t'));
        if !folded {
            break;
        }
        value.extend_from_slice(line.trim_ascii());
    }
    let value = String::from_utf8_lossy(&value);
    let value = value.trim();
    let inner = value.split_once('<').map_or(value, |(_, rest)| rest);
    let inner = inner.split_once('>').map_or(inner, |(inner, _)| inner).trim();
    match inner {
        "" => None,
        _ if is_plain(inner) => Some(inner.to_owned()),
        _ => Some(format!("digest-{}", digest(inner))),
    }
}

/// Whether it can stand in a header field again, and be a key.
pub(super) fn is_plain(id: &str) -> bool {
    let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '<' | '>');
    !id.is_empty() && id.len() <= ID_BYTES_MAX && id.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d4_a_mail_is_known_by_its_message_id_or_by_its_bytes() {
        let named = |raw: &[u8]| match identity(raw, raw.len()) {
            Identity::Named(id) => Some(id),
            Identity::Unnamed(_) => None,
        };
        assert_eq!(named(b"From: a\r\nMessage-ID: <x@y>\r\n\r\n").as_deref(), Some("x@y"));
        assert_eq!(named(b"message-id:\r\n <x@y>\r\n\r\nhi").as_deref(), Some("x@y"));
        assert_eq!(named(b"Message-Id: x@y\n\n").as_deref(), Some("x@y"));
        assert_eq!(named(b"Message-ID: <x@y> (said)\r\n\r\n").as_deref(), Some("x@y"));
        assert_eq!(named(b"From: a\r\n\r\nMessage-ID: <x@y>\r\n"), None, "that is its text");
        assert_eq!(named(b"Message-ID: <>\r\n\r\n"), None);
        let long = [b"Message-ID: <".to_vec(), vec![b'x'; 9_000], b"@y>\r\n\r\n".to_vec()].concat();
        assert!(named(&long).unwrap().starts_with("digest-"));
        assert!(named(b"Message-ID: <a b\xff@y>\r\n\r\n").unwrap().starts_with("digest-"));
        let (one, two) = (identity(b"From: a\r\n\r\n1", 12), identity(b"From: a\r\n\r\n2", 12));
        assert_ne!(one, two);
        assert_eq!(one, identity(b"From: a\r\n\r\n1", 12));
        // Only the beginning counts, so it is the same before the rest is read.
        let whole = [b"From: a\r\n\r\n".to_vec(), vec![b'x'; 3 * HEAD_BYTES]].concat();
        let size = whole.len();
        assert_eq!(identity(&whole, size), identity(&whole[..HEAD_BYTES], size));
    }
}
