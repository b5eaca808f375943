//! A switch as the code interpreter images read it: off for `0`, `false`, `no` and `off`, on for anything else.
#![forbid(unsafe_code)]

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const OFF: [&str; 4] = ["0", "false", "no", "off"];

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct Flag(pub(crate) bool);

impl Flag {
    fn of(text: &str) -> Flag {
        Flag(!OFF.iter().any(|word| word.eq_ignore_ascii_case(text.trim())))
    }
}

impl Serialize for Flag {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bool(self.0)
    }
}

impl<'de> Deserialize<'de> for Flag {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Flag, D::Error> {
        struct FlagVisitor;

        impl Visitor<'_> for FlagVisitor {
            type Value = Flag;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true or false")
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<Flag, E> {
                Ok(Flag(value))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Flag, E> {
                Ok(Flag::of(text))
            }
        }

        deserializer.deserialize_any(FlagVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::Flag;

    #[test]
    fn four_words_mean_off_and_anything_else_means_on() {
        for text in ["0", "false", "no", "off", "False", "OFF", " no "] {
            assert_eq!(Flag::of(text), Flag(false), "{text:?}");
        }
        for text in ["1", "true", "yes", "on", "y", "2", "offf"] {
            assert_eq!(Flag::of(text), Flag(true), "{text:?}");
        }
    }
}
