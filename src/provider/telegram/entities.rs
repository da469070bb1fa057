//! Where an entity stands in a text.
//!
//! Telegram counts in UTF-16 code units and Rust in bytes: an emoji is two of the one and four of
//! the other. A range taken over as it is cuts a letter in two, or is of another place.

use std::ops::Range;

use serde_json::Value;

/// The range in bytes of a range in UTF-16 code units; `None` where it ends outside of the text or
/// inside a character.
pub fn byte_range(text: &str, offset: usize, length: usize) -> Option<Range<usize>> {
    let end = offset.checked_add(length)?;
    let mut units = 0;
    let mut start_at = None;
    for (at, letter) in text.char_indices().map(|(at, c)| (at, c.len_utf16())) {
        if units == offset && start_at.is_none() {
            start_at = Some(at);
        }
        if units == end {
            return Some(start_at?..at);
        }
        units += letter;
    }
    if units == offset && start_at.is_none() {
        start_at = Some(text.len());
    }
    (units == end).then_some(start_at?..text.len())
}

/// The part of a text that an entity marks.
pub fn marked<'a>(text: &'a str, entity: &Value) -> Option<&'a str> {
    let number = |field| usize::try_from(entity.get(field)?.as_u64()?).ok();
    text.get(byte_range(text, number("offset")?, number("length")?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d4_entities_are_counted_in_utf_16() {
        let text = "👍🏽 /order für 🦀!";
        let units: Vec<u16> = text.encode_utf16().collect();
        for start in 0..=units.len() {
            for end in start..=units.len() {
                let wanted = String::from_utf16(&units[start..end]).ok();
                let before = String::from_utf16(&units[..start]).is_ok();
                let found = byte_range(text, start, end - start).map(|range| &text[range]);
                let wanted = wanted.as_deref().filter(|_| before);
                assert_eq!(found, wanted, "{start}..{end}");
            }
        }
        assert_eq!(byte_range(text, units.len(), 1), None);
        assert_eq!(byte_range(text, usize::MAX, 1), None);
        let command = serde_json::json!({ "type": "bot_command", "offset": 5, "length": 6 });
        assert_eq!(marked(text, &command), Some("/order"));
        assert_eq!(marked(text, &serde_json::json!({ "offset": -1, "length": 2 })), None);
    }
}
