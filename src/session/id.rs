//! Names of sessions.
#![forbid(unsafe_code)]

use std::fmt;

use crate::engine::Refusal;

/// Longest id, in characters.
const ID_CHARS_MAX: usize = 256;
/// Length of an id that we make up, in characters of the URL-safe alphabet.
const GENERATED_CHARS: usize = 21;

/// Invariant: 1 to 256 printable characters without `/`. What a caller may write; never a file name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(String);

impl SessionId {
    pub fn parse(raw: &str) -> Result<SessionId, Refusal> {
        if raw.is_empty() {
            return Err(Refusal::InvalidSessionId("session_id must not be empty".to_owned()));
        }
        if raw.chars().nth(ID_CHARS_MAX).is_some() {
            let text = format!("session_id is longer than {ID_CHARS_MAX} characters");
            return Err(Refusal::InvalidSessionId(text));
        }
        match raw.chars().find(|c| *c == '/' || !is_printable(*c)) {
            None => Ok(SessionId(raw.to_owned())),
            Some(found) => Err(Refusal::InvalidSessionId(format!(
                "session_id must not contain {found:?}; any printable character except '/' will do"
            ))),
        }
    }

    /// A new id that nobody can guess.
    pub fn generate() -> SessionId {
        SessionId(nanoid::nanoid!(GENERATED_CHARS))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// No control characters, line separators, or the marks that turn the direction of text in a log.
fn is_printable(c: char) -> bool {
    !c.is_control() && !matches!(c, '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}' | '\u{FEFF}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ids_are_what_the_contract_allows() {
        for id in ["a", "ünï 1", "javascript:s1", ".", "a?b#c", &"x".repeat(256), &"ß".repeat(256)] {
            assert!(SessionId::parse(id).is_ok(), "{id:?}");
        }
        for id in ["", "a/b", "a\nb", "\0", "\u{7f}", "\u{202e}x", &"x".repeat(257)] {
            assert!(matches!(SessionId::parse(id), Err(Refusal::InvalidSessionId(_))), "{id:?}");
        }
    }

    #[test]
    fn generated_ids_differ_and_are_valid() {
        let (one, two) = (SessionId::generate(), SessionId::generate());
        assert_ne!(one, two);
        assert!(SessionId::parse(one.as_str()).is_ok());
    }

    proptest! {
        #[test]
        fn an_id_is_kept_as_it_was_written(raw in any::<String>()) {
            if let Ok(id) = SessionId::parse(&raw) {
                prop_assert_eq!(id.as_str(), raw.as_str());
                prop_assert!(!raw.contains('/') && !raw.is_empty());
            }
        }
    }
}
