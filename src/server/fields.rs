//! Reads named fields out of a JSON object, with one complaint per field.
//!
//! Deserializing into a struct stops at the first bad field; callers are owed all of them. Only fields
//! that somebody asked for are kept, so a body of two megabytes of brackets costs no memory.
#![forbid(unsafe_code)]

use std::fmt;

use serde::Serialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::files::names;

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

    /// A query value that is missing, or, without a field, one of the wrong type.
    pub(crate) fn in_query(
        field: Option<&'static str>,
        kind: &'static str,
        message: impl Into<String>,
    ) -> FieldError {
        let location = std::iter::once("query").chain(field).collect();
        FieldError { location, message: message.into(), kind }
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
    /// Its strings and numbers; anything else in it is kept as what it is, without content.
    List(Vec<Scalar>),
    /// An object whose values are strings or null.
    TextMap(Vec<(String, Option<String>)>),
    Object,
}

/// Items of a list that are kept; a longer list is refused by whoever asked for it.
const ITEMS_MAX: usize = 1024;

impl Scalar {
    fn noun(&self) -> &'static str {
        match self {
            Scalar::Null => "null",
            Scalar::Bool(_) => "a boolean",
            Scalar::Number(_) => "a number",
            Scalar::Text(_) => "a string",
            Scalar::List(_) => "a list",
            Scalar::TextMap(_) | Scalar::Object => "an object",
        }
    }
}

/// The fields of one body, taken out one by one; what does not fit collects in `errors`.
#[derive(Debug, Default)]
pub(crate) struct Fields {
    values: Vec<(&'static str, Scalar)>,
    errors: Vec<FieldError>,
    /// Whether they came in a query, where everything is text.
    in_query: bool,
    /// A field that nobody asked for.
    unknown: Option<String>,
    refuses_unknown: bool,
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
            Ok((values, unknown)) => Ok(Fields { values, unknown, ..Fields::default() }),
            Err(error) if error.is_data() => {
                Err(FieldError::of_body("type_error.object", "body must be a JSON object".to_owned()))
            }
            Err(error) => Err(FieldError::of_body("json_invalid", format!("invalid JSON: {error}"))),
        }
    }

    /// Keeps the `wanted` values of a URL's query. A value whose bytes are no text is shown as a file's name
    /// would be.
    pub(crate) fn of_query(query: Option<&str>, wanted: &[&'static str]) -> Fields {
        let mut values: Vec<(&'static str, Scalar)> = Vec::new();
        for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = decoded(name);
            let Some(field) = wanted.iter().find(|field| field.as_bytes() == name) else { continue };
            let value = Scalar::Text(names::text(&decoded(value)));
            match values.iter_mut().find(|(known, _)| known == field) {
                Some(known) => known.1 = value,
                None => values.push((field, value)),
            }
        }
        Fields { values, in_query: true, ..Fields::default() }
    }

    /// Refuses a body with fields that nobody asked for.
    pub(crate) fn refuse_unknown(&mut self) {
        self.refuses_unknown = true;
    }

    /// A string that must be there. `None` once an error was noted.
    pub(crate) fn required_text(&mut self, field: &'static str) -> Option<String> {
        let noted = self.errors.len();
        let text = self.text(field);
        if text.is_none() && self.errors.len() == noted {
            let message = format!("missing field `{field}`");
            self.reject(if self.in_query {
                FieldError::in_query(Some(field), "value_error.missing", message)
            } else {
                FieldError::in_body(field, "value_error.missing", message)
            });
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
            Scalar::Text(text) if self.in_query && is_true(&text).is_some() => is_true(&text),
            other => self.mistyped(field, "type_error.bool", "a boolean", &other),
        }
    }

    pub(crate) fn number(&mut self, field: &'static str) -> Option<f64> {
        match self.take(field)? {
            Scalar::Number(value) => Some(value),
            other => self.mistyped(field, "type_error.number", "a number", &other),
        }
    }

    /// A text, or a number as one would write it.
    pub(crate) fn number_or_text(&mut self, field: &'static str) -> Option<String> {
        match self.take(field)? {
            Scalar::Text(text) => Some(text),
            Scalar::Number(number) => Some(number.to_string()),
            other => self.mistyped(field, "type_error", "a number or a string", &other),
        }
    }

    /// A whole number that is not negative.
    pub(crate) fn count(&mut self, field: &'static str) -> Option<u64> {
        let value = self.take(field)?;
        let number = match &value {
            Scalar::Number(number) => Some(*number),
            Scalar::Text(text) if self.in_query => text.parse::<u32>().ok().map(f64::from),
            _ => None,
        };
        match number.filter(|number| number.fract() == 0.0 && (0.0..=COUNT_MAX).contains(number)) {
            Some(number) => Some(number as u64),
            None => self.mistyped(field, "type_error.integer", "a whole number that is not negative", &value),
        }
    }

    /// A list of strings; a string alone is one of one.
    pub(crate) fn texts(&mut self, field: &'static str) -> Option<Vec<String>> {
        let value = self.take(field)?;
        let texts = match &value {
            Scalar::Text(text) => Some(vec![text.clone()]),
            Scalar::List(items) if items.len() <= ITEMS_MAX => items
                .iter()
                .map(|item| match item {
                    Scalar::Text(text) => Some(text.clone()),
                    _ => None,
                })
                .collect(),
            _ => None,
        };
        texts.or_else(|| self.mistyped(field, "type_error.list", "a list of strings, 1024 at most", &value))
    }

    /// A list of whole numbers.
    pub(crate) fn integers(&mut self, field: &'static str) -> Option<Vec<i64>> {
        let value = self.take(field)?;
        let integers = match &value {
            Scalar::List(items) if items.len() <= ITEMS_MAX => items
                .iter()
                .map(|item| match item {
                    Scalar::Number(number) if number.fract() == 0.0 && number.abs() <= COUNT_MAX => {
                        Some(*number as i64)
                    }
                    _ => None,
                })
                .collect(),
            _ => None,
        };
        integers.or_else(|| self.mistyped(field, "type_error.list", "a list of whole numbers", &value))
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
    pub(crate) fn into_errors(mut self) -> Vec<FieldError> {
        if let Some(name) = self.unknown.take().filter(|_| self.refuses_unknown) {
            let message = format!("unknown field `{name}`");
            self.reject(FieldError::of_body("value_error.extra", message));
        }
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
        self.reject(if self.in_query {
            FieldError::in_query(None, kind, format!("query value `{field}` must be {wanted}"))
        } else {
            let message = format!("field `{field}` must be {wanted}, not {}", got.noun());
            FieldError::in_body(field, kind, message)
        });
        None
    }
}

/// Above this a JSON number is not exact.
const COUNT_MAX: f64 = 9_007_199_254_740_991.0;

fn is_true(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" | "" => Some(true),
        "false" | "0" | "no" | "off" => Some(false),
        _ => None,
    }
}

/// A part of a query, as forms write it.
fn decoded(text: &str) -> Vec<u8> {
    let spaced: Vec<u8> = text.bytes().map(|byte| if byte == b'+' { b' ' } else { byte }).collect();
    percent_encoding::percent_decode(&spaced).collect()
}

struct BodyVisitor<'a> {
    wanted: &'a [&'static str],
}

/// Longest name of an unknown field that a message quotes, in characters.
const QUOTED_CHARS_MAX: usize = 80;

impl<'de> Visitor<'de> for BodyVisitor<'_> {
    type Value = (Vec<(&'static str, Scalar)>, Option<String>);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok((Vec::new(), None))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut values: Vec<(&'static str, Scalar)> = Vec::with_capacity(self.wanted.len());
        let mut unknown = None;
        while let Some(wanted) = map.next_key_seed(KeySeed { wanted: self.wanted })? {
            let field = match wanted {
                Ok(field) => field,
                Err(name) => {
                    unknown = unknown.or(Some(name));
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            let value = map.next_value_seed(ScalarSeed { is_item: false })?;
            // A repeated key replaces its value, so nothing grows with the body.
            match values.iter_mut().find(|(name, _)| *name == field) {
                Some(known) => known.1 = value,
                None => values.push((field, value)),
            }
        }
        Ok((values, unknown))
    }
}

struct KeySeed<'a> {
    wanted: &'a [&'static str],
}

/// The field that is wanted, or the beginning of the name of one that is not.
type Key = Result<&'static str, String>;

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = Key;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeySeed<'_> {
    type Value = Key;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a field name")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
        let wanted = self.wanted.iter().copied().find(|field| *field == name);
        Ok(wanted.ok_or_else(|| name.chars().take(QUOTED_CHARS_MAX).collect()))
    }
}

/// A value; of one inside another, what it is, and no more of its content than a text's.
struct ScalarSeed {
    is_item: bool,
}

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
        let mut items = Vec::new();
        while !self.is_item
            && items.len() <= ITEMS_MAX
            && let Some(item) = seq.next_element_seed(ScalarSeed { is_item: true })?
        {
            items.push(item);
        }
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Scalar::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar, A::Error> {
        if self.is_item {
            while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(Scalar::Object);
        }
        let mut entries = Some(Vec::new());
        while let Some(name) = map.next_key::<String>()? {
            match map.next_value_seed(ScalarSeed { is_item: true })? {
                Scalar::Text(text) => drop(entries.as_mut().map(|entries| entries.push((name, Some(text))))),
                Scalar::Null => drop(entries.as_mut().map(|entries| entries.push((name, None)))),
                _ => entries = None,
            }
        }
        Ok(entries.map_or(Scalar::Object, Scalar::TextMap))
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

    #[test]
    fn objects_of_strings_are_read_and_others_are_not() {
        let body = br#"{"b": {"K": "v", "N": null}, "d": {"K": {}}}"#;
        let mut fields = Fields::parse(body, &["b", "d"]).unwrap();
        let entries = vec![("K".to_owned(), Some("v".to_owned())), ("N".to_owned(), None)];
        assert_eq!(fields.text_map("b"), Some(entries));
        assert_eq!(fields.text_map("d"), None);
        let messages: Vec<String> = fields.into_errors().into_iter().map(|error| error.message).collect();
        assert_eq!(messages, ["field `d` must be an object of strings, not an object"]);
    }

    #[test]
    fn lists_are_of_one_kind_and_not_endless() {
        let body = br#"{"a": ["x", "y"], "b": [1, -1], "c": ["x", [1]], "d": "alone", "e": [1.5]}"#;
        let mut fields = Fields::parse(body, &["a", "b", "c", "d", "e"]).unwrap();
        assert_eq!(fields.texts("a"), Some(vec!["x".to_owned(), "y".to_owned()]));
        assert_eq!(fields.integers("b"), Some(vec![1, -1]));
        assert_eq!(fields.texts("c"), None);
        assert_eq!(fields.texts("d"), Some(vec!["alone".to_owned()]));
        assert_eq!(fields.integers("e"), None);
        assert_eq!(fields.into_errors().len(), 2);
        let long = format!("{{\"a\": [{}]}}", vec!["1"; 1_100].join(","));
        assert_eq!(Fields::parse(long.as_bytes(), &["a"]).unwrap().integers("a"), None);
    }

    #[test]
    fn a_query_is_decoded_once_and_keeps_bytes_that_are_no_text() {
        let query = "path=%2Ftmp%2Fa+b%ff&deep=true&n=3&bad=x&path%20=no";
        let mut fields = Fields::of_query(Some(query), &["path", "deep", "n", "bad", "missing"]);
        assert_eq!(fields.required_text("path"), Some(r"/tmp/a b\xff".to_owned()));
        assert_eq!((fields.boolean("deep"), fields.count("n")), (Some(true), Some(3)));
        assert_eq!(fields.boolean("bad"), None);
        assert_eq!(fields.required_text("missing"), None);
        let locations: Vec<_> = fields.into_errors().into_iter().map(|error| error.location).collect();
        assert_eq!(locations, [vec!["query"], vec!["query", "missing"]]);
    }

    #[test]
    fn an_unknown_field_is_refused_where_it_must_be() {
        let mut fields = Fields::parse(br#"{"a": "x", "more": {"deep": 1}}"#, &["a"]).unwrap();
        assert_eq!(fields.text("a"), Some("x".to_owned()));
        fields.refuse_unknown();
        assert_eq!(fields.into_errors()[0].message, "unknown field `more`");
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
