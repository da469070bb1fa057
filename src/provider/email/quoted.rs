//! What the author of a mail wrote, apart from what their program repeated below it.
//!
//! An answer by mail carries the mail it answers, and a signature. A question that waits for "yes"
//! would get all of it. Idea: cut what stands at the *end* and is surely repeated; what stands between
//! quoted lines is the author's and stays with them, and where nothing else is left nothing is cut.

/// The author's own text, and the rest.
pub(super) fn split(text: &str) -> (&str, &str) {
    let mut end = text.len();
    let mut at = 0;
    let mut lines = Vec::new();
    for line in text.split_inclusive('\n') {
        lines.push((at, line.trim_end_matches(['\r', '\n'])));
        at += line.len();
    }
    let cut = (0..lines.len()).find(|n| begins_the_rest(&lines[*n..]));
    if let Some(cut) = cut {
        end = lines[cut].0;
        lines.truncate(cut);
    }
    end = end.min(before_the_quote(&lines).unwrap_or(end));
    let own = text[..end].trim();
    if own.is_empty() {
        return (text.trim(), "");
    }
    (own, text[end..].trim())
}

/// Whether a signature or a repeated mail without marks begins here.
fn begins_the_rest(lines: &[(usize, &str)]) -> bool {
    let line = lines[0].1;
    if line == "-- " {
        return true;
    }
    let rule = line.trim();
    if let Some(title) = rule.strip_prefix("-----").and_then(|rest| rest.strip_suffix("-----")) {
        return title.chars().any(char::is_alphabetic);
    }
    // Outlook: the head of the mail that is answered.
    let head = |line: &str, names: [&str; 2]| names.iter().any(|name| line.starts_with(name));
    head(rule.trim_start_matches('*'), ["From:", "Von:"])
        && lines.iter().skip(1).take(3).any(|(_, line)| {
            let line = line.trim().trim_start_matches('*');
            head(line, ["Sent:", "Gesendet:"]) || head(line, ["Date:", "Datum:"])
        })
}

/// Where the quoted lines at the end begin, with the line that says whose they are.
fn before_the_quote(lines: &[(usize, &str)]) -> Option<usize> {
    let is_blank = |n: usize| lines[n].1.trim().is_empty();
    let is_quoted = |n: usize| lines[n].1.starts_with('>');
    let mut start = lines.len();
    while start > 0 && (is_blank(start - 1) || is_quoted(start - 1)) {
        start -= 1;
    }
    let first = (start..lines.len()).find(|n| is_quoted(*n))?;
    // "On …, … wrote:", broken in two where it is long.
    let said = |n: usize| lines[n].1;
    let names_somebody = |text: &str| text.chars().any(|c| c == '@' || c.is_ascii_digit());
    let mut cut = first.min(start);
    if start > 0 && said(start - 1).trim_end().ends_with(':') {
        let whole = (start.saturating_sub(3)..start - 1).rev().take_while(|n| !is_blank(*n));
        let above: Vec<usize> = whole.collect();
        match above[..] {
            [line] if names_somebody(said(line)) || names_somebody(said(start - 1)) => cut = line,
            _ if names_somebody(said(start - 1)) => cut = start - 1,
            _ => {}
        }
    }
    Some(lines.get(cut)?.0)
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn d4_the_authors_own_words_are_told_from_what_is_repeated() {
        let cases = [
            ("yes\r\n", "yes", false),
            ("yes\n\nOn Mon, 30 Nov 2026, Bot <bot@b.example> wrote:\n> Sure?\n", "yes", true),
            (
                "yes\n\nOn Mon, 30 Nov 2026 at 10:00 Bot <\nbot@b.example> wrote:\n\n> Sure?",
                "yes",
                true,
            ),
            ("> Sure?\nyes\n> And?\nno\n", "> Sure?\nyes\n> And?\nno", false),
            ("yes\n-- \nAnn\nAcme Inc.\n\n> Sure?\n", "yes", true),
            ("yes\n\n-----Original Message-----\nFrom: Bot\n\nSure?", "yes", true),
            ("yes\n\nFrom: Bot <bot@b.example>\nSent: Monday\nTo: Ann\n\nSure?", "yes", true),
            ("> only\n> quoted\n", "> only\n> quoted", false),
            ("From: me to you, with love\nxxx\n", "From: me to you, with love\nxxx", false),
            ("I want three things:\n> one\n", "I want three things:", true),
            ("a --- b\n-----\nc", "a --- b\n-----\nc", false),
            ("", "", false),
        ];
        for (text, own, rest) in cases {
            let found = split(text);
            assert_eq!((found.0, !found.1.is_empty()), (own, rest), "{text:?}");
        }
    }
}
