//! A value of an index other than a tensor: checked to be JSON, and kept in the spelling of the file.

use alloc::borrow::ToOwned;
use alloc::collections::BTreeSet;
use alloc::string::String;
use core::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// A value beside the weight map.
#[derive(Clone, Debug)]
pub(super) struct Value {
    /// The JSON text.
    pub(super) text: String,
    pub(super) kind: Kind,
    /// A key that occurs twice in one of its objects.
    pub(super) duplicate: Option<String>,
    /// The value of `total_size`, if the value is an object with such a number.
    pub(super) total_size: Option<u64>,
}

/// Kinds of JSON values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Null,
    Truth,
    Number,
    Text,
    Array,
    Object,
}

impl Kind {
    /// The kind's name in messages.
    pub(super) const fn words(self) -> &'static str {
        match self {
            Kind::Null => "null",
            Kind::Truth => "true or false",
            Kind::Number => "a number",
            Kind::Text => "a string",
            Kind::Array => "an array",
            Kind::Object => "an object",
        }
    }
}

impl Value {
    /// Reads the value at the start of `text`, and its length in bytes; `None` if it continues after `text`.
    pub(super) fn at_start_of(text: &str) -> Option<Result<(Value, usize), serde_json::Error>> {
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<Facts>();
        match values.next()? {
            // A number may continue, and in every index a value is followed by another byte.
            Ok(_) if values.byte_offset() == text.len() => None,
            Ok(facts) => {
                let nbytes = values.byte_offset();
                let value = Value {
                    text: text[..nbytes].trim_start().to_owned(),
                    kind: facts.kind,
                    duplicate: facts.duplicate,
                    total_size: facts.total_size,
                };
                Some(Ok((value, nbytes)))
            }
            Err(fault) if fault.is_eof() => None,
            Err(fault) => Some(Err(fault)),
        }
    }
}

/// Facts recorded while a value is read; the value itself is not kept.
struct Facts {
    kind: Kind,
    duplicate: Option<String>,
    total_size: Option<u64>,
    number: Option<u64>,
}

impl Facts {
    fn of<E>(kind: Kind) -> Result<Facts, E> {
        Ok(Facts {
            kind,
            duplicate: None,
            total_size: None,
            number: None,
        })
    }
}

impl<'de> Deserialize<'de> for Facts {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Facts, D::Error> {
        json.deserialize_any(Any)
    }
}

struct Any;

impl<'de> Visitor<'de> for Any {
    type Value = Facts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Facts, E> {
        Facts::of(Kind::Text)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Facts, E> {
        let facts = Facts::of(Kind::Number)?;
        Ok(Facts {
            number: Some(number),
            ..facts
        })
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Facts, E> {
        Facts::of(Kind::Number)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Facts, E> {
        Facts::of(Kind::Number)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Facts, E> {
        Facts::of(Kind::Truth)
    }

    fn visit_unit<E: Error>(self) -> Result<Facts, E> {
        Facts::of(Kind::Null)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Facts, A::Error> {
        let mut facts = Facts::of(Kind::Object)?;
        let mut keys = BTreeSet::new();
        while let Some(key) = map.next_key::<String>()? {
            let inner = map.next_value::<Facts>()?;
            facts.duplicate = facts.duplicate.take().or(inner.duplicate);
            if key == "total_size" {
                facts.total_size = inner.number;
            }
            if keys.contains(&key) {
                facts.duplicate.get_or_insert(key);
            } else {
                keys.insert(key);
            }
        }
        Ok(facts)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Facts, A::Error> {
        let mut facts = Facts::of(Kind::Array)?;
        while let Some(inner) = seq.next_element::<Facts>()? {
            facts.duplicate = facts.duplicate.take().or(inner.duplicate);
        }
        Ok(facts)
    }
}
