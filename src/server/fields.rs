//! Reads named fields out of a JSON object, with one complaint per field.
//!
//! Deserializing into a struct stops at the first bad field; callers are owed all of them. Only fields
//! that somebody asked for are kept, so a body of two megabytes of brackets costs no memory.
#![forbid(unsafe_code)]

use std::fmt;

use serde::Serialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// One rejected field, as 422 bodies list it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(crate) struct FieldError {
    /// Such as `["body", "code"]`.
    pub(crate) location: Vec<&'static str>,
    pub(crate) message: String,
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
}

impl FieldError {
    pub(crate) fn in_body(field: &'static str, kind: &'static str, message: impl Into<String>) -> FieldError {
        FieldError { location: vec!["body", field], message: message.into(), kind }
    }

    fn of_body(kind: &'static str, message: String) -> FieldError {
        FieldError { location: vec!["body"], message, kind }
    }
}

/// A field's value, as far as any route needs it.
#[derive(Clone, Debug, PartialEq)]
enum Scalar {
    Null,
    Bool(bool),
    Number(f64),
    Text(String),
    /// A list of strings.
    Texts(Vec<String>),
    List,
    /// An object whose values are strings or null.
    TextMap(Vec<(String, Option<String>)>),
    Object,
}

impl Scalar {
    fn noun(&self) -> &'static str {
        match self {
            Scalar::Null => "null",
            Scalar::Bool(_) => "a boolean",
            Scalar::Number(_) => "a number",
            Scalar::Text(_) => "a string",
            Scalar::Texts(_) | Scalar::List => "a list",
            Scalar::TextMap(_) | Scalar::Object => "an object",
        }
    }
}

/// The fields of one body, taken out one by one; what does not fit collects in `errors`.
#[derive(Debug, Default)]
pub(crate) struct Fields {
    values: Vec<(&'static str, Scalar)>,
    errors: Vec<FieldError>,
}

impl Fields {
    /// Keeps the `wanted` fields of a JSON object. No body at all is an empty object.
    pub(crate) fn parse(body: &[u8], wanted: &[&'static str]) -> Result<Fields, FieldError> {
        if body.trim_ascii().is_empty() {
            return Ok(Fields::default());
        }
        let mut json = serde_json::Deserializer::from_slice(body);
        let parsed =
            json.deserialize_any(BodyVisitor { wanted }).and_then(|values| json.end().map(|()| values));
        match parsed {
            Ok(values) => Ok(Fields { values, errors: Vec::new() }),
            Err(error) if error.is_data() => {
                Err(FieldError::of_body("type_error.object", "body must be a JSON object".to_owned()))
            }
            Err(error) => Err(FieldError::of_body("json_invalid", format!("invalid JSON: {error}"))),
        }
    }

    /// A string that must be there. `None` once an error was noted.
    pub(crate) fn required_text(&mut self, field: &'static str) -> Option<String> {
        let noted = self.errors.len();
        let text = self.text(field);
        if text.is_none() && self.errors.len() == noted {
            let message = format!("missing field `{field}`");
            self.reject(FieldError::in_body(field, "value_error.missing", message));
        }
        text
    }

    pub(crate) fn text(&mut self, field: &'static str) -> Option<String> {
        match self.take(field)? {
            Scalar::Text(text) => Some(text),
            other => self.mistyped(field, "type_error.string", "a string", &other),
        }
    }

    pub(crate) fn boolean(&mut self, field: &'static str) -> Option<bool> {
        match self.take(field)? {
            Scalar::Bool(value) => Some(value),
            other => self.mistyped(field, "type_error.bool", "a boolean", &other),
        }
    }

    pub(crate) fn number(&mut self, field: &'static str) -> Option<f64> {
        match self.take(field)? {
            Scalar::Number(value) => Some(value),
            other => self.mistyped(field, "type_error.number", "a number", &other),
        }
    }

    /// A list of strings.
    pub(crate) fn texts(&mut self, field: &'static str) -> Option<Vec<String>> {
        match self.take(field)? {
            Scalar::Texts(texts) => Some(texts),
            other => self.mistyped(field, "type_error.list", "a list of strings", &other),
        }
    }

    /// An object of strings; null stands for no value. In the order in which they were written.
    pub(crate) fn text_map(&mut self, field: &'static str) -> Option<Vec<(String, Option<String>)>> {
        match self.take(field)? {
            Scalar::TextMap(entries) => Some(entries),
            other => self.mistyped(field, "type_error.dict", "an object of strings", &other),
        }
    }

    pub(crate) fn reject(&mut self, error: FieldError) {
        self.errors.push(error);
    }

    /// What was rejected, in the order it was asked for.
    pub(crate) fn into_errors(self) -> Vec<FieldError> {
        self.errors
    }

    /// The last value of the field; null reads as absent.
    fn take(&mut self, field: &'static str) -> Option<Scalar> {
        let at = self.values.iter().rposition(|(name, _)| *name == field)?;
        Some(self.values.swap_remove(at).1).filter(|value| *value != Scalar::Null)
    }

    fn mistyped<T>(
        &mut self,
        field: &'static str,
        kind: &'static str,
        wanted: &str,
        got: &Scalar,
    ) -> Option<T> {
        let message = format!("field `{field}` must be {wanted}, not {}", got.noun());
        self.reject(FieldError::in_body(field, kind, message));
        None
    }
}

struct BodyVisitor<'a> {
    wanted: &'a [&'static str],
}

impl<'de> Visitor<'de> for BodyVisitor<'_> {
    type Value = Vec<(&'static str, Scalar)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut values: Self::Value = Vec::with_capacity(self.wanted.len());
        while let Some(wanted) = map.next_key_seed(KeySeed { wanted: self.wanted })? {
            let Some(field) = wanted else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let value = map.next_value_seed(ScalarSeed)?;
            // A repeated key replaces its value, so nothing grows with the body.
            match values.iter_mut().find(|(name, _)| *name == field) {
                Some(known) => known.1 = value,
                None => values.push((field, value)),
            }
        }
        Ok(values)
    }
}

struct KeySeed<'a> {
    wanted: &'a [&'static str],
}

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = Option<&'static str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeySeed<'_> {
    type Value = Option<&'static str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a field name")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
        Ok(self.wanted.iter().copied().find(|field| *field == name))
    }
}

struct ScalarSeed;

impl<'de> DeserializeSeed<'de> for ScalarSeed {
    type Value = Scalar;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Scalar, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ScalarSeed {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Scalar, E> {
        Ok(Scalar::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Scalar, E> {
        Ok(Scalar::Bool(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value as f64))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value as f64))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(value.to_owned()))
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Scalar, E> {
        Ok(Scalar::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Scalar, A::Error> {
        let mut texts = Some(Vec::new());
        while let Some(item) = seq.next_element_seed(ItemSeed)? {
            match item {
                Item::Text(text) => drop(texts.as_mut().map(|texts| texts.push(text))),
                Item::Null | Item::Other => texts = None,
            }
        }
        Ok(texts.map_or(Scalar::List, Scalar::Texts))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar, A::Error> {
        let mut entries = Some(Vec::new());
        while let Some(name) = map.next_key::<String>()? {
            match map.next_value_seed(ItemSeed)? {
                Item::Text(text) => drop(entries.as_mut().map(|entries| entries.push((name, Some(text))))),
                Item::Null => drop(entries.as_mut().map(|entries| entries.push((name, None)))),
                Item::Other => entries = None,
            }
        }
        Ok(entries.map_or(Scalar::Object, Scalar::TextMap))
    }
}

/// What a list or an object holds, as far as any route needs it.
enum Item {
    Null,
    Text(String),
    Other,
}

struct ItemSeed;

impl<'de> DeserializeSeed<'de> for ItemSeed {
    type Value = Item;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Item, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ItemSeed {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Item, E> {
        Ok(Item::Null)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Item, E> {
        Ok(Item::Other)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Item, E> {
        Ok(Item::Other)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Item, E> {
        Ok(Item::Other)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Item, E> {
        Ok(Item::Other)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Item, E> {
        Ok(Item::Text(value.to_owned()))
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Item, E> {
        Ok(Item::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Item, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Item::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Item, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Item::Other)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_bad_field_is_named_once() {
        let body = br#"{"a": 5, "b": [1, {"x": 2}], "c": "later", "c": true, "z": {"deep": [[]]}}"#;
        let mut fields = Fields::parse(body, &["a", "b", "c", "d"]).unwrap();
        assert_eq!(fields.text("a"), None);
        assert_eq!(fields.number("b"), None);
        assert_eq!(fields.boolean("c"), Some(true));
        assert_eq!(fields.required_text("d"), None);
        let messages: Vec<String> = fields.into_errors().into_iter().map(|error| error.message).collect();
        assert_eq!(
            messages,
            [
                "field `a` must be a string, not a number",
                "field `b` must be a number, not a list",
                "missing field `d`"
            ]
        );
    }

    #[test]
    fn lists_and_objects_of_strings_are_read_and_others_are_not() {
        let body = br#"{"a": ["x", ""], "b": {"K": "v", "N": null}, "c": ["x", 1], "d": {"K": {}}, "e": []}"#;
        let mut fields = Fields::parse(body, &["a", "b", "c", "d", "e"]).unwrap();
        assert_eq!(fields.texts("a"), Some(vec!["x".to_owned(), String::new()]));
        let entries = vec![("K".to_owned(), Some("v".to_owned())), ("N".to_owned(), None)];
        assert_eq!(fields.text_map("b"), Some(entries));
        assert_eq!(fields.texts("c"), None);
        assert_eq!(fields.text_map("d"), None);
        assert_eq!(fields.texts("e"), Some(Vec::new()));
        let messages: Vec<String> = fields.into_errors().into_iter().map(|error| error.message).collect();
        assert_eq!(
            messages,
            [
                "field `c` must be a list of strings, not a list",
                "field `d` must be an object of strings, not an object"
            ]
        );
    }

    #[test]
    fn nothing_and_null_read_as_an_empty_object() {
        for body in [&b""[..], b"  \n", b"null", b"{}"] {
            let mut fields = Fields::parse(body, &["a"]).unwrap();
            assert_eq!(fields.text("a"), None);
            assert!(fields.into_errors().is_empty());
        }
        let mut fields = Fields::parse(br#"{"a": null}"#, &["a"]).unwrap();
        assert_eq!(fields.text("a"), None);
        assert!(fields.into_errors().is_empty());
    }

    #[test]
    fn what_is_no_object_is_refused_as_a_body() {
        for (body, kind) in [
            (&b"{nope"[..], "json_invalid"),
            (b"[]", "type_error.object"),
            (b"\"a\"", "type_error.object"),
            (b"{} {}", "json_invalid"),
            (br#"{"a": "\ud800"}"#, "json_invalid"),
            (b"{\"a\": \"\xff\"}", "json_invalid"),
        ] {
            let error = Fields::parse(body, &["a"]).unwrap_err();
            assert_eq!((error.location.as_slice(), error.kind), (&["body"][..], kind), "{body:?}");
        }
        let deep = "[".repeat(100_000);
        assert!(Fields::parse(format!("{{\"z\": {deep}").as_bytes(), &["a"]).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Fields::parse(&body, &["a"]);
        }

        #[test]
        fn every_string_survives(text in any::<String>()) {
            let body = serde_json::to_vec(&serde_json::json!({ "a": text })).unwrap();
            let mut fields = Fields::parse(&body, &["a"]).unwrap();
            prop_assert_eq!(fields.text("a"), Some(text));
        }
    }
}
