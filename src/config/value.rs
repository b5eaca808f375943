//! Reads one setting out of text: a variable is a string, the key behind it may be a number or a list.
#![forbid(unsafe_code)]

use serde::de::value::{Error, MapDeserializer, SeqDeserializer};
use serde::de::{Error as _, IntoDeserializer, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, forward_to_deserialize_any};

use super::raw::RawLayer;

/// One variable's text on its way to the type of its key. Lists are separated by commas.
struct Text<'a>(&'a str);

impl<'a> IntoDeserializer<'a, Error> for Text<'a> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Text<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_borrowed_str(self.0)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0.trim() {
            "1" | "true" | "yes" | "on" => visitor.visit_bool(true),
            "0" | "false" | "no" | "off" => visitor.visit_bool(false),
            other => Err(Error::invalid_value(Unexpected::Str(other), &"true or false")),
        }
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0.trim().parse() {
            Ok(number) => visitor.visit_u64(number),
            Err(_) => Err(Error::invalid_value(Unexpected::Str(self.0), &"a whole number, 0 or more")),
        }
    }

    fn deserialize_u16<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0.trim().parse() {
            Ok(number) => visitor.visit_u16(number),
            Err(_) => Err(Error::invalid_value(Unexpected::Str(self.0), &"a number from 0 to 65535")),
        }
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0.trim().parse() {
            Ok(number) => visitor.visit_f64(number),
            Err(_) => Err(Error::invalid_value(Unexpected::Str(self.0), &"a number")),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let items = self.0.split(',').map(str::trim).filter(|item| !item.is_empty());
        visitor.visit_seq(SeqDeserializer::new(items.map(Text)))
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u32 u128 f32 char str string bytes byte_buf unit unit_struct
        newtype_struct tuple tuple_struct map struct enum identifier ignored_any
    }
}

/// A layer that holds nothing but the setting at `path`, read from `text`.
pub(super) fn layer_of(path: &[&'static str], text: &str) -> Result<RawLayer, String> {
    let layer = match path {
        [key] => RawLayer::deserialize(MapDeserializer::new([(*key, Text(text))].into_iter())),
        [table, key] => {
            let inner = MapDeserializer::new([(*key, Text(text))].into_iter());
            RawLayer::deserialize(MapDeserializer::new([(*table, inner)].into_iter()))
        }
        _ => Err(Error::custom("settings are nested one level deep")),
    };
    layer.map_err(|error| error.to_string())
}
