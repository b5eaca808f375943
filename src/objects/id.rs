//! Ids of sessions and files: 21 characters that nobody can guess and that are never given out twice.
#![forbid(unsafe_code)]

/// Characters of an id.
const ID_CHARS: usize = 21;

/// A new id, from the system's generator.
pub(super) fn new() -> String {
    nanoid::nanoid!(ID_CHARS)
}

/// Whether this is the whole of an id. A part of one, or one with something behind it, is none.
pub fn is_id(text: &str) -> bool {
    text.len() == ID_CHARS && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_matched_as_a_whole() {
        let id = new();
        assert!(is_id(&id), "{id}");
        assert_ne!(id, new());
        for wrong in ["", "short", "../../../etc/passwd.x", "ääääääääääa", &format!("{id}x"), &id[1..]]
        {
            assert!(!is_id(wrong), "{wrong}");
        }
    }
}
