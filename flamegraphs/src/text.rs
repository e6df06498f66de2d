//! What happens to strings from outside before they enter a picture.
//!
//! Request ids, thread names and symbols are chosen by others. [`clean`] takes what XML cannot hold and what would
//! reorder or hide the text around it; [`shorten`] bounds the length. Markup is escaped where it is written.

use std::borrow::Cow;

/// Stands where a character was taken out.
const REPLACEMENT: char = '\u{FFFD}';

/// The text without characters that XML 1.0 forbids, terminal escapes, or marks that change writing direction.
///
/// Line breaks and tabs become spaces. Everything else stays, letters of right-to-left scripts included.
#[must_use]
pub fn clean(text: &str) -> Cow<'_, str> {
    if text.chars().all(|c| replaced(c).is_none()) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().map(|c| replaced(c).unwrap_or(c)).collect())
}

/// The first `max` characters, the last of them `…` when something was cut.
#[must_use]
pub fn shorten(text: &str, max: usize) -> Cow<'_, str> {
    if text.chars().nth(max).is_none() {
        return Cow::Borrowed(text);
    }
    let mut kept: String = text.chars().take(max.saturating_sub(1)).collect();
    kept.push('…');
    Cow::Owned(kept)
}

/// What stands for `c`; `None` when `c` itself may stay.
fn replaced(c: char) -> Option<char> {
    match c {
        '\n' | '\r' | '\t' | '\u{2028}' | '\u{2029}' => Some(' '),
        '\u{061C}' | '\u{200E}' | '\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}' => {
            Some(REPLACEMENT)
        }
        '\u{FFFE}' | '\u{FFFF}' => Some(REPLACEMENT),
        c if c.is_control() => Some(REPLACEMENT),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_what_xml_forbids_and_keeps_the_rest() {
        assert_eq!(clean("plain ünï"), "plain ünï");
        assert_eq!(clean("a\nb\tc"), "a b c");
        assert_eq!(clean("\u{1b}[31mred\0"), "\u{FFFD}[31mred\u{FFFD}");
        assert_eq!(clean("abc\u{202E}gpj.exe"), "abc\u{FFFD}gpj.exe");
        assert_eq!(clean("\u{FFFF}"), "\u{FFFD}");
        assert_eq!(clean("שלום"), "שלום");
    }

    #[test]
    fn shortens_by_characters() {
        assert_eq!(shorten("ééé", 3), "ééé");
        assert_eq!(shorten("éééé", 3), "éé…");
        assert_eq!(shorten("ab", 0), "…");
        assert_eq!(shorten("", 0), "");
    }
}
