//! The headers of all shards of a model in one document, as the Hub's API returns them.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::str;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::value::{Kind, Value};
use super::{ShardIndex, shard_name};
use crate::header::Header;
use crate::limits::Limits;

/// The headers of a model's shards and the metadata of its index, read without the files. Every header is proven, every
/// shard has a valid name, and no tensor is in two shards.
#[derive(Clone, Debug)]
pub struct ShardHeaders {
    metadata: Option<String>,
    headers: Vec<(String, Header)>,
}

impl ShardHeaders {
    /// Largest document that is read, in bytes; the limit of an index. The document of the largest known model, with
    /// 497,000 tensors, would have some 75 MB.
    pub const NBYTES: u64 = ShardIndex::NBYTES;

    /// Parses `{"index": {"metadata": {…}}, "headers": {"model-00001-of-00002.safetensors": {…}, …}}`. `None` for any
    /// other document, or if a header in it breaks a rule of FORMAT.md; reading the model's files reports the fault.
    ///
    /// ```
    /// use ingot_format::{Limits, ShardHeaders};
    /// let text = br#"{"headers":{"a.safetensors":{"wte":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}"#;
    /// let headers = ShardHeaders::parse(text, &Limits::default()).unwrap();
    /// let (shard, header) = headers.iter().next().unwrap();
    /// assert_eq!((shard, header.names().next()), ("a.safetensors", Some("wte")));
    /// ```
    #[must_use]
    pub fn parse(document: &[u8], limits: &Limits) -> Option<ShardHeaders> {
        let document = object(str::from_utf8(document).ok()?)?;
        let metadata = match only(&document, "index") {
            Some(index) => metadata_of(&object(index)?)?,
            None => None,
        };
        let proven = |(shard, text): (String, &RawValue)| {
            shard_name::check(&shard).ok()?;
            let header = Header::parse_json(text.get().as_bytes(), limits).ok()?;
            Some((shard, header))
        };
        let shards = object(only(&document, "headers")?)?;
        let mut headers: Vec<_> = shards.into_iter().map(proven).collect::<Option<_>>()?;
        headers.sort_by(|one, other| one.0.cmp(&other.0));
        let headers = ShardHeaders { metadata, headers };
        headers.is_consistent().then_some(headers)
    }

    /// Iterates over the shards, sorted by name, each with its header.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Header)> {
        self.headers
            .iter()
            .map(|(shard, header)| (shard.as_str(), header))
    }

    /// Returns the metadata of the index as JSON.
    #[must_use]
    pub fn metadata(&self) -> Option<&str> {
        self.metadata.as_deref()
    }

    /// Checks rules I4, I7 and I8, as an index of these shards would have to keep them.
    fn is_consistent(&self) -> bool {
        let shards: Vec<String> = self.headers.iter().map(|(shard, _)| shard.clone()).collect();
        let mut names: Vec<&str> = self
            .headers
            .iter()
            .flat_map(|(_, header)| header.names())
            .collect();
        names.sort_unstable();
        !names.is_empty()
            && shards.len() <= ShardIndex::SHARDS
            && shard_name::refuse_collisions(&shards).is_ok()
            && names.is_sorted_by(|one, other| one < other)
    }
}

/// The fields of an object, each with its value in the spelling of the document.
type Fields<'d> = Vec<(String, &'d RawValue)>;

fn object(text: &str) -> Option<Fields<'_>> {
    serde_json::from_str::<Object<'_>>(text)
        .ok()
        .map(|object| object.0)
}

/// Returns the value of a field that occurs exactly once.
fn only<'d>(fields: &Fields<'d>, name: &str) -> Option<&'d str> {
    let mut values = fields.iter().filter(|field| field.0 == name);
    let value = values.next()?.1.get();
    values.next().is_none().then_some(value)
}

/// Returns the metadata among the fields of an index, by rules I3 to I5.
fn metadata_of(index: &Fields<'_>) -> Option<Option<String>> {
    if index.iter().all(|field| field.0 != "metadata") {
        return Some(None);
    }
    // With a byte after it, so that the value is known to have ended.
    let mut text = only(index, "metadata")?.to_owned();
    text.push('\n');
    let (value, nbytes) = Value::at_start_of(&text)?.ok()?;
    match value.kind {
        _ if nbytes > ShardIndex::VALUE_NBYTES || value.duplicate.is_some() => None,
        Kind::Object => Some(Some(value.text)),
        Kind::Null => Some(None),
        _ => None,
    }
}

struct Object<'d>(Fields<'d>);

impl<'de> Deserialize<'de> for Object<'de> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Object<'de>, D::Error> {
        json.deserialize_map(InOrder).map(Object)
    }
}

/// Keeps every field, including duplicates.
struct InOrder;

impl<'de> Visitor<'de> for InOrder {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = map.next_entry()? {
            fields.push(field);
        }
        Ok(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;
    use std::vec;

    const ENTRY: &str = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;

    fn read(document: &str) -> Option<Vec<(String, usize)>> {
        let headers = ShardHeaders::parse(document.as_bytes(), &Limits::default())?;
        let row = |(shard, header): (&str, &Header)| (shard.to_owned(), header.len());
        Some(headers.iter().map(row).collect())
    }

    #[test]
    fn headers_and_the_metadata_of_the_index_are_read() {
        let text = format!(
            r#"{{ "headers": {{"b.safetensors": {{"__metadata__": {{"format": "pt"}}, "y": {ENTRY}}},
                "a.safetensors": {{"x": {ENTRY}}}, "none.safetensors": {{}}}},
                "index": {{"metadata": {{"total_size": 16, "by": [null, {{}}]}}, "more": 1}}}}"#
        );
        let headers = ShardHeaders::parse(text.as_bytes(), &Limits::default()).unwrap();
        let shards: Vec<&str> = headers.iter().map(|row| row.0).collect();
        assert_eq!(shards, vec!["a.safetensors", "b.safetensors", "none.safetensors"]);
        assert_eq!(
            headers.metadata(),
            Some(r#"{"total_size": 16, "by": [null, {}]}"#)
        );
        let of_b = headers.iter().nth(1).unwrap().1;
        assert_eq!(of_b.metadata().unwrap().iter().next(), Some(("format", "pt")));
        assert_eq!(of_b.get("y").unwrap().end, 8);
    }

    #[test]
    fn an_index_without_metadata_has_none() {
        for index in [r#""index":{},"#, r#""index":{"metadata":null},"#, ""] {
            let text = format!(r#"{{{index}"headers":{{"a":{{"x":{ENTRY}}}}}}}"#);
            let headers = ShardHeaders::parse(text.as_bytes(), &Limits::default()).unwrap();
            assert_eq!(headers.metadata(), None, "{index}");
        }
    }

    #[test]
    fn rejects_invalid_indexes_and_headers() {
        let good = format!(r#"{{"a":{{"x":{ENTRY}}}}}"#);
        assert_eq!(
            read(&format!(r#"{{"headers":{good}}}"#)).map(|read| read.len()),
            Some(1)
        );
        for headers in [
            "null".to_owned(),
            "[]".to_owned(),
            "{}".to_owned(),
            // A name that leads elsewhere, a duplicate, and two names that are the same file on some systems.
            format!(r#"{{"../a":{{"x":{ENTRY}}}}}"#),
            format!(r#"{{"a":{{"x":{ENTRY}}},"a":{{"y":{ENTRY}}}}}"#),
            format!(r#"{{"a":{{"x":{ENTRY}}},"A":{{"y":{ENTRY}}}}}"#),
            // A tensor in two shards, and twice in one.
            format!(r#"{{"a":{{"x":{ENTRY}}},"b":{{"x":{ENTRY}}}}}"#),
            format!(r#"{{"a":{{"x":{ENTRY},"x":{ENTRY}}}}}"#),
            // Rules F5, F8, F10 and F11.
            r#"{"a":null}"#.to_owned(),
            r#"{"a":{"x":{"dtype":"Q9","shape":[2],"data_offsets":[0,8]}}}"#.to_owned(),
            r#"{"a":{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}}}"#.to_owned(),
            r#"{"a":{"x":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}}"#.to_owned(),
        ] {
            assert_eq!(read(&format!(r#"{{"headers":{headers}}}"#)), None, "{headers}");
        }
        for index in [
            "1",
            r#"{"metadata":[]}"#,
            r#"{"metadata":{"a":1,"a":2}}"#,
            r#"{"metadata":{},"metadata":{}}"#,
        ] {
            let text = format!(r#"{{"index":{index},"headers":{good}}}"#);
            assert_eq!(read(&text), None, "{index}");
        }
        for text in [
            "",
            "<html>",
            "[]",
            &format!(r#"{{"headers":{good}"#),
            &format!(r#"{{"headers":{good},"headers":{good}}}"#),
            &format!(r#"{{"headers":{good}}} x"#),
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn metadata_may_be_as_large_as_a_value_may() {
        let text = |nbytes: usize| {
            let filler = "x".repeat(nbytes - r#"{"a":""}"#.len());
            format!(r#"{{"index":{{"metadata":{{"a":"{filler}"}}}},"headers":{{"a":{{"x":{ENTRY}}}}}}}"#)
        };
        assert!(read(&text(ShardIndex::VALUE_NBYTES)).is_some());
        assert!(read(&text(ShardIndex::VALUE_NBYTES + 1)).is_none());
    }

    #[test]
    fn a_header_over_the_limit_is_refused() {
        let limits = Limits {
            header_nbytes: 10,
            ..Limits::default()
        };
        let text = format!(r#"{{"headers":{{"a":{{"x":{ENTRY}}}}}}}"#);
        assert!(ShardHeaders::parse(text.as_bytes(), &limits).is_none());
    }
}
