//! Mail that no person wrote, and that is not to be answered (RFC 3834).
//!
//! Two programs that answer each other's mail do so for ever. A mail that says that a program wrote
//! it makes no turn; what says nothing and comes back at once is met by the bound in `thread`.

/// What kind of automatic mail it is, from its header fields, its author and its content type.
pub(super) fn automatic<'a>(
    fields: impl Iterator<Item = (&'a str, &'a str)>,
    from: &str,
    content_type: &str,
) -> Option<&'static str> {
    if content_type.starts_with("multipart/report")
        || content_type.starts_with("message/delivery-status")
    {
        return Some("report");
    }
    if let Some(kind) = fields.into_iter().find_map(|(name, value)| field(name, value)) {
        return Some(kind);
    }
    let user = from.split('@').next().unwrap_or_default();
    match user {
        "mailer-daemon" | "postmaster" => Some("bounce"),
        "noreply" | "no-reply" | "donotreply" | "do-not-reply" => Some("automatic mail"),
        _ if user.starts_with("owner-") || user.ends_with("-request") => Some("list mail"),
        _ => None,
    }
}

fn field(name: &str, value: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase();
    let value = value.trim().to_ascii_lowercase();
    // A comment or a parameter may follow the word.
    let word = value.split([';', '(', ' ', '\t', '\r', '\n']).next().unwrap_or_default();
    match name.as_str() {
        "return-path" if value == "<>" => Some("bounce"),
        "auto-submitted" if word != "no" => Some("automatic mail"),
        "precedence" if matches!(word, "bulk" | "junk" | "auto_reply") => Some("automatic mail"),
        "precedence" if word == "list" => Some("list mail"),
        "x-auto-response-suppress" => {
            let asked = value.split(',').map(str::trim);
            asked
                .into_iter()
                .any(|one| matches!(one, "all" | "autoreply" | "oof"))
                .then_some("automatic mail")
        }
        "x-autoreply"
        | "x-autorespond"
        | "x-autoresponder"
        | "x-auto-reply-from"
        | "x-mail-autoreply"
        | "x-failed-recipients" => Some("automatic mail"),
        _ if name.starts_with("list-") => Some("list mail"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::automatic;

    #[test]
    fn d4_what_a_program_wrote_is_known_by_its_head() {
        let kind =
            |name, value| automatic([(name, value)].into_iter(), "ann@a.example", "text/plain");
        for (name, value) in [
            ("Auto-Submitted", " auto-replied"),
            ("AUTO-SUBMITTED", " auto-generated; owner-email=\"x\""),
            ("Precedence", " bulk"),
            ("Precedence", " list"),
            ("List-Id", " <l.example>"),
            ("List-Unsubscribe", " <mailto:x>"),
            ("Return-Path", " <>"),
            ("X-Auto-Response-Suppress", " DR, OOF, AutoReply"),
            ("X-Autoreply", " yes"),
        ] {
            assert!(kind(name, value).is_some(), "{name}: {value}");
        }
        for (name, value) in [
            ("Auto-Submitted", " no"),
            ("Auto-Submitted", " no (a person)"),
            ("Precedence", " first-class"),
            ("Return-Path", " <ann@a.example>"),
            ("X-Auto-Response-Suppress", " DR, RN"),
            ("Subject", " Auto-Submitted: auto-replied"),
        ] {
            assert_eq!(kind(name, value), None, "{name}: {value}");
        }
        let from = |from, kind| automatic(std::iter::empty(), from, kind);
        assert_eq!(from("mailer-daemon@a.example", "text/plain"), Some("bounce"));
        assert_eq!(from("ann@a.example", "multipart/report; x=y"), Some("report"));
        assert_eq!(from("list-request@a.example", "text/plain"), Some("list mail"));
        assert_eq!(from("ann@a.example", "text/plain"), None);
    }
}
