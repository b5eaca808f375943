//! File names as text. Names are bytes; JSON and URLs carry text, so what is not UTF-8 is spelt out, reversibly.
//!
//! A byte that belongs to no character is written `\xNN` (lower case). So that nothing else reads as that, a
//! backslash that happens to stand before `x80` … `xff` or `x5c` is itself written `\x5c`. Every other name is
//! shown and read as it is.
#![forbid(unsafe_code)]

/// A name or path as clients see it.
pub fn show(name: &[u8]) -> String {
    let mut shown = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        let valid = chunk.valid();
        for (at, character) in valid.char_indices() {
            if character == '\\' && escaped(&valid.as_bytes()[at..]).is_some() {
                shown.push_str("\\x5c");
            } else {
                shown.push(character);
            }
        }
        for byte in chunk.invalid() {
            shown.push_str(&format!("\\x{byte:02x}"));
        }
    }
    shown
}

/// Text in this form that came as bytes, as the parts of a URL do: what it spells out stays spelt out, and a byte
/// that is no text is spelt out now.
pub fn text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
    }
    text
}

/// The bytes that [`show`] made this text of.
pub fn read(shown: &str) -> Vec<u8> {
    let bytes = shown.as_bytes();
    let mut name = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        match escaped(&bytes[at..]) {
            Some(byte) => {
                name.push(byte);
                at += 4;
            }
            None => {
                name.push(bytes[at]);
                at += 1;
            }
        }
    }
    name
}

/// The byte that an escape at the beginning of `text` stands for.
fn escaped(text: &[u8]) -> Option<u8> {
    let [b'\\', b'x', high, low, ..] = *text else { return None };
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let byte = digit(high)? << 4 | digit(low)?;
    (byte >= 0x80 || byte == b'\\').then_some(byte)
}

/// The last component of a path; empty for one that has none.
pub fn last(path: &str) -> &str {
    path.trim_end_matches('/').rsplit('/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ordinary_names_are_shown_as_they_are() {
        for name in ["a b", "größe.txt", r"C:\x41", r"a\b", r"\x", "日本"] {
            assert_eq!(show(name.as_bytes()), name);
            assert_eq!(read(name), name.as_bytes());
        }
    }

    #[test]
    fn what_is_no_text_is_spelt_out_and_cannot_be_confused_with_a_name_that_spells_it() {
        assert_eq!(show(b"a\xff.txt"), r"a\xff.txt");
        assert_eq!(show(br"a\xff.txt"), r"a\x5cxff.txt");
        assert_eq!(read(r"a\xff.txt"), b"a\xff.txt");
        assert_eq!(read(r"a\x5cxff.txt"), br"a\xff.txt");
    }

    #[test]
    fn a_url_may_spell_a_name_or_carry_its_bytes() {
        assert_eq!(text(br"a\xff.txt"), r"a\xff.txt");
        assert_eq!(text(b"a\xff.txt"), r"a\xff.txt");
        assert_eq!(read(&text(br"a\x5cxff.txt")), br"a\xff.txt");
    }

    proptest! {
        #[test]
        fn every_name_comes_back(name in proptest::collection::vec(
            prop_oneof![any::<u8>(), proptest::sample::select(&b"\\x58fc"[..])], 0..60)) {
            prop_assert_eq!(read(&show(&name)), name);
        }
    }
}
