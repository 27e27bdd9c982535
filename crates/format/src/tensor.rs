//! The names of the safetensors crate's module `tensor`, for programs that are ported from it.
//!
//! [`Metadata`] is a header in the form of that crate. [`Header`] has the same contents and more, and costs a few
//! allocations instead of several per tensor.
//!
//! ```
//! use ingot_format::tensor::{Dtype, SafeTensors, TensorView, serialize};
//!
//! let bias = TensorView::new(Dtype::F32, vec![2], b"12345678")?;
//! let file = serialize([("bias", &bias)], None)?;
//! let (header_nbytes, metadata) = SafeTensors::read_metadata(&file)?;
//! assert_eq!(header_nbytes + 8 + metadata.data_len(), file.len());
//! assert_eq!(metadata.info("bias").map(|info| info.data_offsets), Some((0, 8)));
//! # Ok::<(), ingot_format::FormatError>(())
//! ```

use alloc::borrow::ToOwned;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use std::collections::HashMap;

use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, SerializeStruct, Serializer};

use crate::error::FormatError;
use crate::extent::{to_u64, to_usize};
use crate::format::Format;
use crate::header::Header;
use crate::metadata::METADATA_KEY;
use crate::raw::RawHeader;

pub use crate::safetensors::serialize;
pub use crate::{Dtype, SafeTensorError, SafeTensors, TensorView, View};

/// A header's description of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Elements along each dimension, outermost first. Empty for a scalar.
    pub shape: Vec<usize>,
    /// First byte, and byte after the last, counted from the start of the data section.
    pub data_offsets: (usize, usize),
}

/// A header: the description of each tensor, and the metadata. Proven like a [`Header`].
///
/// ```
/// use ingot_format::tensor::{Dtype, Metadata, TensorInfo};
/// let bias = TensorInfo { dtype: Dtype::F32, shape: vec![2], data_offsets: (0, 8) };
/// let metadata = Metadata::new(None, vec![("bias".to_string(), bias)])?;
/// assert_eq!(metadata.info("bias").unwrap().shape, [2]);
/// assert_eq!(metadata.data_len(), 8);
/// # Ok::<(), ingot_format::FormatError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Metadata {
    header: Header,
    /// In the order of the header's entries.
    tensors: Vec<TensorInfo>,
    text: Option<HashMap<String, String>>,
}

impl Metadata {
    /// Creates the header of these tensors, which may be in any order.
    ///
    /// # Errors
    /// Like [`Header::parse`]: two tensors with one name, a size that does not fit shape and dtype, bytes that belong
    /// to two tensors or to none.
    pub fn new(
        metadata: Option<HashMap<String, String>>,
        tensors: Vec<(String, TensorInfo)>,
    ) -> Result<Metadata, FormatError> {
        let mut raw = RawHeader::default();
        for (name, info) in &tensors {
            raw.names.push_str(name);
            raw.dims.extend(info.shape.iter().copied().map(to_u64));
            let (begin, end) = info.data_offsets;
            raw.close_entry(info.dtype, to_u64(begin), to_u64(end));
        }
        let data_nbytes = tensors.iter().map(|(_, info)| info.data_offsets.1).max();
        let header = Header::prove(raw, Format::Safetensors, 0, to_u64(data_nbytes.unwrap_or(0)))?;
        Ok(Metadata::of(header, metadata))
    }

    /// Converts a header whose sizes all fit into memory.
    pub(crate) fn of_header(header: Header) -> Metadata {
        let own = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        let text = header.metadata().map(|pairs| pairs.iter().map(own).collect());
        Metadata::of(header, text)
    }

    fn of(header: Header, text: Option<HashMap<String, String>>) -> Metadata {
        // Never saturates: the callers have made sure that all sizes fit.
        let fit = |n: u64| to_usize(n).unwrap_or(usize::MAX);
        let tensors = header
            .entries()
            .map(|entry| TensorInfo {
                dtype: entry.dtype,
                shape: entry.shape.iter().map(|&dim| fit(dim)).collect(),
                data_offsets: (fit(entry.begin), fit(entry.end)),
            })
            .collect();
        Metadata {
            header,
            tensors,
            text,
        }
    }

    /// Returns the description of the tensor `name`.
    #[must_use]
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.find(name).and_then(|number| self.tensors.get(number))
    }

    /// Returns all tensors by name.
    #[must_use]
    pub fn tensors(&self) -> HashMap<String, &TensorInfo> {
        self.named().map(|(name, info)| (name.to_owned(), info)).collect()
    }

    /// Returns the names of all tensors in data order.
    #[must_use]
    pub fn offset_keys(&self) -> Vec<String> {
        self.header.names().map(ToOwned::to_owned).collect()
    }

    /// Returns the size of the data section in bytes.
    #[must_use]
    pub fn data_len(&self) -> usize {
        self.tensors.last().map_or(0, |info| info.data_offsets.1)
    }

    /// Returns the metadata of the header.
    #[must_use]
    pub fn metadata(&self) -> &Option<HashMap<String, String>> {
        &self.text
    }

    fn named(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.header.names().zip(&self.tensors)
    }
}

/// Serializes to the JSON of a header: metadata keys sorted, tensors in data order.
impl Serialize for Metadata {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if let Some(text) = &self.text {
            map.serialize_entry(METADATA_KEY, &text.iter().collect::<BTreeMap<_, _>>())?;
        }
        for (name, info) in self.named() {
            map.serialize_entry(name, info)?;
        }
        map.end()
    }
}

/// Fails like [`Metadata::new`], and if `__metadata__` is there twice. For programs that have only the start of a file.
impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Metadata, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Metadata;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a safetensors header")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Metadata, M::Error> {
        let mut text: Option<HashMap<String, String>> = None;
        let mut tensors = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name != METADATA_KEY {
                tensors.push((name, map.next_value()?));
            } else if text.is_none() {
                text = map
                    .next_value::<Option<StringPairs>>()?
                    .map(|StringPairs(pairs)| pairs);
            } else {
                return Err(de::Error::duplicate_field(METADATA_KEY));
            }
        }
        Metadata::new(text, tensors).map_err(de::Error::custom)
    }
}

/// Pairs of strings, each key once.
struct StringPairs(HashMap<String, String>);

impl<'de> Deserialize<'de> for StringPairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<StringPairs, D::Error> {
        deserializer.deserialize_map(TextVisitor)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = StringPairs;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from strings to strings")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<StringPairs, M::Error> {
        let mut pairs = HashMap::new();
        while let Some((key, value)) = map.next_entry::<String, String>()? {
            if pairs.contains_key(&key) {
                return Err(de::Error::custom(format_args!("two values for {key:?}")));
            }
            pairs.insert(key, value);
        }
        Ok(StringPairs(pairs))
    }
}

const DTYPE: &str = "dtype";
const SHAPE: &str = "shape";
const DATA_OFFSETS: &str = "data_offsets";

impl Serialize for TensorInfo {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("TensorInfo", 3)?;
        fields.serialize_field(DTYPE, &self.dtype)?;
        fields.serialize_field(SHAPE, &self.shape)?;
        fields.serialize_field(DATA_OFFSETS, &self.data_offsets)?;
        fields.end()
    }
}

impl<'de> Deserialize<'de> for TensorInfo {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TensorInfo, D::Error> {
        deserializer.deserialize_map(InfoVisitor)
    }
}

struct InfoVisitor;

impl<'de> Visitor<'de> for InfoVisitor {
    type Value = TensorInfo;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("dtype, shape and data_offsets of a tensor")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<TensorInfo, M::Error> {
        let (mut dtype, mut shape, mut data_offsets) = (None, None, None);
        while let Some(field) = map.next_key::<String>()? {
            match &*field {
                DTYPE => set(&mut dtype, DTYPE, map.next_value()?)?,
                SHAPE => set(&mut shape, SHAPE, map.next_value()?)?,
                DATA_OFFSETS => set(&mut data_offsets, DATA_OFFSETS, map.next_value()?)?,
                _ => drop(map.next_value::<de::IgnoredAny>()?),
            }
        }
        Ok(TensorInfo {
            dtype: dtype.ok_or_else(|| de::Error::missing_field(DTYPE))?,
            shape: shape.ok_or_else(|| de::Error::missing_field(SHAPE))?,
            data_offsets: data_offsets.ok_or_else(|| de::Error::missing_field(DATA_OFFSETS))?,
        })
    }
}

fn set<T, E: de::Error>(field: &mut Option<T>, name: &'static str, value: T) -> Result<(), E> {
    match field.replace(value) {
        None => Ok(()),
        Some(_) => Err(E::duplicate_field(name)),
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.code())
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Dtype, D::Error> {
        let code = String::deserialize(deserializer)?;
        Dtype::from_code(&code).ok_or_else(|| de::Error::custom(format_args!("unknown dtype `{code}`")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use alloc::vec;

    const HEADER: &str = r#"{"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}"#;

    #[test]
    fn the_json_of_a_header_is_read_and_written_as_it_was() {
        let metadata: Metadata = serde_json::from_str(HEADER).unwrap();
        assert_eq!(metadata.data_len(), 9);
        assert_eq!(metadata.offset_keys(), ["a", "b"]);
        let info = TensorInfo {
            dtype: Dtype::F32,
            shape: vec![2],
            data_offsets: (0, 8),
        };
        assert_eq!(metadata.info("a"), Some(&info));
        let tensors = metadata.tensors();
        assert_eq!((tensors.len(), tensors["a"]), (2, &info));
        assert_eq!(serde_json::to_string(&metadata).unwrap(), HEADER);
        let none: Metadata = serde_json::from_str(r#"{"__metadata__":null}"#).unwrap();
        assert_eq!((none.data_len(), none.metadata()), (0, &None));
    }

    #[test]
    fn json_of_another_form_is_refused_with_its_reason() {
        let entry = |fields: &str| alloc::format!(r#"{{"a":{{{fields}}}}}"#);
        for (text, reason) in [
            ("[]".to_string(), "expected a safetensors header"),
            (
                r#"{"a":[]}"#.to_string(),
                "expected dtype, shape and data_offsets of a tensor",
            ),
            (
                r#"{"__metadata__":[]}"#.to_string(),
                "expected a map from strings to strings",
            ),
            (
                r#"{"__metadata__":{"k":"v","k":"w"}}"#.to_string(),
                "two values for \"k\"",
            ),
            (
                r#"{"__metadata__":{},"__metadata__":{}}"#.to_string(),
                "duplicate field `__metadata__`",
            ),
            (
                entry(r#""shape":[1],"data_offsets":[0,1]"#),
                "missing field `dtype`",
            ),
            (
                entry(r#""dtype":"U8","data_offsets":[0,1]"#),
                "missing field `shape`",
            ),
            (
                entry(r#""dtype":"U8","shape":[1]"#),
                "missing field `data_offsets`",
            ),
            (entry(r#""dtype":"U8","dtype":"U8""#), "duplicate field `dtype`"),
            (entry(r#""dtype":"U3""#), "unknown dtype `U3`"),
        ] {
            let fault = serde_json::from_str::<Metadata>(&text).unwrap_err().to_string();
            assert!(fault.contains(reason), "{text}: {fault}");
        }
        // Unknown fields are ignored.
        let more = entry(r#""more":[1,{}],"dtype":"U8","shape":[1],"data_offsets":[0,1]"#);
        assert!(serde_json::from_str::<Metadata>(&more).is_ok());
    }
}
