//! JSON lists that are bounded while they are read: a body of fifty megabytes of commas keeps no more than a small one.
#![forbid(unsafe_code)]

use std::fmt;

use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// The first elements of a list, as they were written.
#[derive(Debug)]
pub(super) struct List<'a> {
    pub(super) elements: Vec<&'a RawValue>,
    /// There were more, which were looked at and not kept.
    pub(super) is_longer: bool,
}

impl<'a> List<'a> {
    /// `None` for what is no list.
    pub(super) fn read(raw: &'a RawValue, elements_max: usize) -> Option<List<'a>> {
        let mut json = serde_json::Deserializer::from_str(raw.get());
        json.deserialize_seq(ListVisitor { elements_max }).ok()
    }
}

struct ListVisitor {
    elements_max: usize,
}

impl<'de> Visitor<'de> for ListVisitor {
    type Value = List<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<List<'de>, A::Error> {
        let mut elements = Vec::new();
        while elements.len() < self.elements_max {
            match seq.next_element()? {
                Some(element) => elements.push(element),
                None => return Ok(List { elements, is_longer: false }),
            }
        }
        let mut is_longer = false;
        while seq.next_element::<IgnoredAny>()?.is_some() {
            is_longer = true;
        }
        Ok(List { elements, is_longer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_kept_than_there_may_be() {
        let read = |text: &str, elements_max| {
            let raw = RawValue::from_string(text.to_owned()).expect("JSON");
            List::read(&raw, elements_max).map(|list| {
                let texts: Vec<String> = list.elements.iter().map(|raw| raw.get().to_owned()).collect();
                (texts.join(" "), list.elements.capacity() <= 4, list.is_longer)
            })
        };
        let kept = |text: &str, is_longer| Some((text.to_owned(), true, is_longer));
        assert_eq!(read("[]", 2), kept("", false));
        assert_eq!(read("[1, [2, 3]]", 2), kept("1 [2, 3]", false));
        assert_eq!(read("[1,2,3]", 2), kept("1 2", true));
        assert_eq!(read(&format!("[{}1]", "1,".repeat(4_000_000)), 2), kept("1 1", true));
        for text in ["{}", "\"[]\"", "7", "true"] {
            assert_eq!(read(text, 2), None, "{text}");
        }
    }
}
