//! The lenient reader: each item of the header is read on its own, so that a broken item does not affect the others.

use alloc::borrow::{Cow, ToOwned};
use alloc::format;
use alloc::string::{String, ToString};

use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess};
use serde_json::value::RawValue;

use super::value::{At, Key, Node, OneEntry, OneValue, Reader};
use crate::error::FormatError;
use crate::extent::to_u64;
use crate::finding::{Remedy, Understood, Unread};
use crate::metadata::{METADATA_KEY, Metadata};
use crate::raw::PREFIX_NBYTES;

/// Reads the valid items of a header.
///
/// Bytes that are not UTF-8 become U+FFFD, and NUL after the JSON counts as padding. JSON that ends early or has text
/// after its end is rejected: then the length before it is wrong, and the position of the data is unknown.
pub(crate) fn salvage(header: &[u8]) -> Result<Understood, FormatError> {
    let mut lenient = Lenient::default();
    let text = String::from_utf8_lossy(header);
    if let Err(fault) = core::str::from_utf8(header) {
        let position = to_u64(PREFIX_NBYTES + fault.valid_up_to());
        lenient.add(FormatError::InvalidUtf8 { position }, Remedy::MadeText);
    }
    let trimmed = text.trim_end_matches('\0');
    if trimmed.len() < text.len() {
        let reason = "padded with NUL, not spaces".to_owned();
        lenient.add(FormatError::InvalidJson { reason }, Remedy::Rewritten);
    }
    let mut json = serde_json::Deserializer::from_str(trimmed);
    let outcome = At(Items(&mut lenient))
        .deserialize(&mut json)
        .and_then(|()| json.end());
    match outcome {
        Ok(()) => Ok(lenient.finish()),
        Err(fault) => Err(FormatError::InvalidJson {
            reason: fault.to_string(),
        }),
    }
}

/// The result so far.
#[derive(Default)]
struct Lenient {
    /// Holds the entries, and the fault of the item that is being read.
    reader: Reader,
    metadata: Option<Metadata>,
    /// Whether `__metadata__` occurred, even as null.
    has_metadata: bool,
    understood: Understood,
}

impl Lenient {
    fn add(&mut self, fault: FormatError, remedy: Remedy) -> bool {
        self.understood.findings.add(fault, remedy)
    }

    fn finish(mut self) -> Understood {
        self.understood.raw = self.reader.raw;
        self.understood.keep_last_of_each(self.metadata);
        self.understood
    }

    /// Reads one item with the strict reader for its kind.
    fn read<'t, P: Node<'t>>(text: &'t str, node: P) -> Result<P::Value, serde_json::Error> {
        At(node).deserialize(&mut serde_json::Deserializer::from_str(text))
    }

    fn entry(&mut self, name: &str, text: &str) {
        self.reader.raw.names.push_str(name);
        let reader = &mut self.reader;
        let outcome = Lenient::read(text, OneEntry { reader, name });
        let fault = self.reader.fault.take();
        let unusual = self.reader.unusual.take();
        let Err(reason) = outcome else {
            if let Some(found) = unusual {
                self.add(FormatError::NotStrict { found }, Remedy::Rewritten);
            }
            return;
        };
        self.reader.raw.drop_open_entry();
        let fault = fault.unwrap_or_else(|| FormatError::InvalidEntry {
            tensor: name.to_owned(),
            field: "",
            expected: "an object with dtype, shape and data_offsets",
            found: reason.to_string(),
        });
        if !self.add(fault, Remedy::TensorLeftOut) {
            return;
        }
        // Without a valid claim, the claim is 0 bytes at position 0, which hides no hole.
        let (begin, end) = Lenient::read(text, Claim).ok().flatten().unwrap_or_default();
        let tensor = name.to_owned();
        self.understood.unread.push(Unread { tensor, begin, end });
    }

    fn metadata(&mut self, text: &str) {
        if core::mem::replace(&mut self.has_metadata, true) {
            let key = METADATA_KEY.to_owned();
            self.add(FormatError::DuplicateMetadataKey { key }, Remedy::LastKept);
        }
        if text == "null" {
            let found = "`__metadata__` is null".to_owned();
            self.add(FormatError::NotStrict { found }, Remedy::Rewritten);
            return;
        }
        let pairs = self.metadata.take().unwrap_or_default();
        let mut reading = Pairs { lenient: self, pairs };
        let outcome = Lenient::read(text, &mut reading);
        let pairs = reading.pairs;
        self.metadata = (outcome.is_ok() || !pairs.is_empty()).then_some(pairs);
        if let Err(fault) = outcome {
            let (key, found) = (None, fault.to_string());
            self.add(FormatError::InvalidMetadata { key, found }, Remedy::ValueLeftOut);
        }
    }
}

/// The whole header.
struct Items<'l>(&'l mut Lenient);

impl<'de> Node<'de> for Items<'_> {
    type Value = ();

    fn wrong<E: Error>(self, found: String) -> Result<(), E> {
        Err(E::custom(format!("expected an object of tensors, found {found}")))
    }

    fn object<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key_seed(At(Key))? {
            // Kept as text: each item is parsed later, on its own.
            let value: &RawValue = map.next_value()?;
            if name == METADATA_KEY {
                self.0.metadata(value.get());
            } else {
                self.0.entry(&name, value.get());
            }
        }
        Ok(())
    }
}

/// The pairs of the metadata. A value that is not a string is kept as its JSON.
struct Pairs<'l> {
    lenient: &'l mut Lenient,
    pairs: Metadata,
}

impl<'de> Node<'de> for &mut Pairs<'_> {
    type Value = ();

    fn wrong<E: Error>(self, found: String) -> Result<(), E> {
        Err(E::custom(found))
    }

    fn object<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key_seed(At(Key))? {
            let value: &RawValue = map.next_value()?;
            self.pairs.push(&key);
            let (reader, metadata) = (&mut self.lenient.reader, &mut self.pairs);
            let key = &*key;
            let node = OneValue {
                reader,
                metadata,
                key,
            };
            if let Err(reason) = Lenient::read(value.get(), node) {
                let fault = self.lenient.reader.fault.take();
                let fault = fault.unwrap_or_else(|| FormatError::InvalidMetadata {
                    key: Some(key.to_owned()),
                    found: reason.to_string(),
                });
                self.pairs.push(value.get());
                self.lenient.add(fault, Remedy::MadeText);
            }
        }
        Ok(())
    }
}

/// The byte range that an unreadable entry claims.
struct Claim;

impl<'de> Node<'de> for Claim {
    type Value = Option<(u64, u64)>;

    fn wrong<E: Error>(self, _: String) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn object<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut claim = None;
        while let Some(key) = map.next_key_seed(At(Key))? {
            match &*key {
                "data_offsets" => claim = map.next_value_seed(At(Range))?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(claim)
    }
}

/// Two numbers.
struct Range;

impl<'de> Node<'de> for Range {
    type Value = Option<(u64, u64)>;

    fn wrong<E: Error>(self, _: String) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn text<E: Error>(self, _: Cow<'de, str>) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn array<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let pair = (seq.next_element::<u64>()?, seq.next_element::<u64>()?);
        match (pair, seq.next_element::<u64>()?) {
            ((Some(begin), Some(end)), None) => Ok(Some((begin, end))),
            _ => Err(A::Error::custom("expected two numbers")),
        }
    }
}
