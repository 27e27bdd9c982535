//! The reference reader: strict, slow, and obviously right. It accepts any key order, escape and white space, and
//! rejects everything ambiguous.

use alloc::borrow::{Cow, ToOwned};
use alloc::format;
use alloc::string::String;
use core::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::dtype::Dtype;
use crate::error::FormatError;
use crate::limits::Leniency;
use crate::metadata::{METADATA_KEY, Metadata};
use crate::quoted::Quoted;
use crate::raw::RawHeader;

/// Reads a header. Rules F5 to F8.
pub(crate) fn read(text: &str, leniency: Leniency) -> Result<RawHeader, FormatError> {
    let mut reader = Reader::default();
    if !text.starts_with('{') {
        reader.unusual(|| "white space before the JSON".into());
    }
    if text.trim_end_matches(' ').ends_with(['\t', '\n', '\r']) {
        reader.unusual(|| "padding other than spaces".into());
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let outcome = At(Whole(&mut reader))
        .deserialize(&mut json)
        .and_then(|()| json.end());
    match (reader.fault.take(), outcome) {
        (Some(fault), _) => Err(fault),
        (None, Err(fault)) => Err(FormatError::InvalidJson {
            reason: reason(text, &fault),
        }),
        (None, Ok(())) => match reader.unusual {
            Some(found) if leniency == Leniency::Refuse => Err(FormatError::NotStrict { found }),
            _ => Ok(reader.raw),
        },
    }
}

/// Returns the JSON parser's message, with a hint for a common mistake.
fn reason(text: &str, fault: &serde_json::Error) -> String {
    let hint = match text.trim_end_matches('\0') {
        trimmed if trimmed.len() < text.len() && trimmed.ends_with('}') => {
            " — the header is padded with NUL, not spaces"
        }
        _ => "",
    };
    format!("{fault}{hint}")
}

/// The part read so far, and the first broken rule. serde's errors carry only text, so the fault is kept here while one
/// of them propagates.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) raw: RawHeader,
    pub(super) fault: Option<FormatError>,
    /// The first deviation that a strict reader rejects.
    pub(super) unusual: Option<String>,
}

impl Reader {
    fn fail<T, E: Error>(&mut self, fault: FormatError) -> Result<T, E> {
        self.fault.get_or_insert(fault);
        Err(E::custom("a rule is broken"))
    }

    fn unusual(&mut self, found: impl FnOnce() -> String) {
        self.unusual.get_or_insert_with(found);
    }
}

/// A node of a header's JSON: handles the kinds of values that it accepts, and reports the others.
pub(super) trait Node<'de>: Sized {
    /// The result of reading the node.
    type Value;

    /// Reports that `found`, a description of a value, is not allowed here.
    fn wrong<E: Error>(self, found: String) -> Result<Self::Value, E>;

    fn text<E: Error>(self, text: Cow<'de, str>) -> Result<Self::Value, E> {
        self.wrong(format!("the string {}", Quoted(&text)))
    }

    fn number<E: Error>(self, number: u64) -> Result<Self::Value, E> {
        self.wrong(format!("the number {number}"))
    }

    fn null<E: Error>(self) -> Result<Self::Value, E> {
        self.wrong("null".into())
    }

    fn object<A: MapAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
        self.wrong("an object".into())
    }

    fn array<A: SeqAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
        self.wrong("an array".into())
    }
}

/// Reads any JSON value and passes it to the node.
pub(super) struct At<P>(pub(super) P);

impl<'de, P: Node<'de>> DeserializeSeed<'de> for At<P> {
    type Value = P::Value;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<P::Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de, P: Node<'de>> Visitor<'de> for At<P> {
    type Value = P::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<P::Value, E> {
        self.0.text(Cow::Borrowed(text))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<P::Value, E> {
        self.0.text(Cow::Owned(text.to_owned()))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<P::Value, E> {
        self.0.number(number)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<P::Value, E> {
        self.0.wrong(format!("the number {number}"))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<P::Value, E> {
        self.0.wrong(format!(
            "the number {number:?}, which is not an integer below 2^64"
        ))
    }

    fn visit_bool<E: Error>(self, truth: bool) -> Result<P::Value, E> {
        self.0.wrong(format!("{truth}"))
    }

    fn visit_unit<E: Error>(self) -> Result<P::Value, E> {
        self.0.null()
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<P::Value, A::Error> {
        self.0.object(map)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<P::Value, A::Error> {
        self.0.array(seq)
    }
}

/// A key; JSON allows only a string.
pub(super) struct Key;

impl<'de> Node<'de> for Key {
    type Value = Cow<'de, str>;

    fn wrong<E: Error>(self, found: String) -> Result<Cow<'de, str>, E> {
        Err(E::custom(format!("expected a key, found {found}")))
    }

    fn text<E: Error>(self, text: Cow<'de, str>) -> Result<Cow<'de, str>, E> {
        Ok(text)
    }
}

/// The whole header: an object of entries, with `__metadata__` among them.
struct Whole<'r>(&'r mut Reader);

impl<'de> Node<'de> for Whole<'_> {
    type Value = ();

    fn wrong<E: Error>(self, found: String) -> Result<(), E> {
        self.0.fail(FormatError::InvalidJson {
            reason: format!("expected an object of tensors, found {found}"),
        })
    }

    fn object<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let reader = self.0;
        let mut has_metadata = false;
        while let Some(name) = map.next_key_seed(At(Key))? {
            if name != METADATA_KEY {
                reader.raw.names.push_str(&name);
                map.next_value_seed(At(OneEntry { reader, name: &name }))?;
            } else if has_metadata {
                return reader.fail(FormatError::DuplicateMetadataKey {
                    key: name.into_owned(),
                });
            } else {
                has_metadata = true;
                map.next_value_seed(At(AllMetadata(reader)))?;
            }
        }
        Ok(())
    }
}

/// Rule F6: an object of strings, or null.
struct AllMetadata<'r>(&'r mut Reader);

impl<'de> Node<'de> for AllMetadata<'_> {
    type Value = ();

    fn wrong<E: Error>(self, found: String) -> Result<(), E> {
        self.0.fail(FormatError::InvalidMetadata { key: None, found })
    }

    fn null<E: Error>(self) -> Result<(), E> {
        self.0.unusual(|| "`__metadata__` is null".into());
        Ok(())
    }

    fn object<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut metadata = Metadata::default();
        while let Some(key) = map.next_key_seed(At(Key))? {
            metadata.push(&key);
            map.next_value_seed(At(OneValue {
                reader: self.0,
                metadata: &mut metadata,
                key: &key,
            }))?;
        }
        if let Some(key) = metadata.duplicate() {
            return self
                .0
                .fail(FormatError::DuplicateMetadataKey { key: key.to_owned() });
        }
        self.0.raw.metadata = Some(metadata);
        Ok(())
    }
}

/// The value of one metadata key.
pub(super) struct OneValue<'r> {
    pub(super) reader: &'r mut Reader,
    pub(super) metadata: &'r mut Metadata,
    pub(super) key: &'r str,
}

impl<'de> Node<'de> for OneValue<'_> {
    type Value = ();

    fn wrong<E: Error>(self, found: String) -> Result<(), E> {
        self.reader.fail(FormatError::InvalidMetadata {
            key: Some(self.key.to_owned()),
            found,
        })
    }

    fn text<E: Error>(self, text: Cow<'de, str>) -> Result<(), E> {
        self.metadata.push(&text);
        Ok(())
    }
}

/// Rule F8: an object with dtype, shape and data_offsets.
pub(super) struct OneEntry<'r> {
    pub(super) reader: &'r mut Reader,
    pub(super) name: &'r str,
}

impl OneEntry<'_> {
    /// Fails when `field` was read before: rule F7.
    fn once<T, E: Error>(&mut self, read: Option<&T>, field: &'static str) -> Result<(), E> {
        match read {
            None => Ok(()),
            Some(_) => self.reader.fail(FormatError::DuplicateField {
                tensor: self.name.to_owned(),
                field,
            }),
        }
    }

    fn required<T, E: Error>(&mut self, read: Option<T>, field: &'static str) -> Result<T, E> {
        match read {
            Some(value) => Ok(value),
            None => self.reader.fail(FormatError::MissingField {
                tensor: self.name.to_owned(),
                field,
            }),
        }
    }

    fn field(&mut self, field: &'static str, expected: &'static str) -> Field<'_> {
        Field {
            reader: self.reader,
            name: self.name,
            field,
            expected,
        }
    }
}

impl<'de> Node<'de> for OneEntry<'_> {
    type Value = ();

    fn wrong<E: Error>(mut self, found: String) -> Result<(), E> {
        self.field("", "an object with dtype, shape and data_offsets")
            .wrong(found)
    }

    fn object<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(key) = map.next_key_seed(At(Key))? {
            match &*key {
                "dtype" => {
                    self.once(dtype.as_ref(), "dtype")?;
                    dtype = Some(map.next_value_seed(At(Code(self.field("dtype", "a string"))))?);
                }
                "shape" => {
                    self.once(shape.as_ref(), "shape")?;
                    let field = self.field("shape", "an array of integers");
                    shape = Some(map.next_value_seed(At(Dims(field)))?);
                }
                "data_offsets" => {
                    self.once(offsets.as_ref(), "data_offsets")?;
                    let field = self.field("data_offsets", "an array of two integers");
                    offsets = Some(map.next_value_seed(At(Offsets(field)))?);
                }
                _ => {
                    map.next_value_seed(At(Unknown))?;
                    let name = self.name;
                    self.reader.unusual(|| {
                        format!("tensor {} has the unknown field {}", Quoted(name), Quoted(&key))
                    });
                }
            }
        }
        let dtype = self.required(dtype, "dtype")?;
        self.required(shape, "shape")?;
        let ([begin, end], count) = self.required(offsets, "data_offsets")?;
        if count != 2 {
            return self
                .field("data_offsets", "an array of two integers")
                .wrong(format!("{count} of them"));
        }
        self.reader.raw.close_entry(dtype, begin, end);
        Ok(())
    }
}

/// A value that is ignored. It is parsed all the same: `IgnoredAny` would accept lone surrogates, numbers out of range
/// and any depth, which other readers reject.
struct Unknown;

impl<'de> Node<'de> for Unknown {
    type Value = ();

    fn wrong<E: Error>(self, _: String) -> Result<(), E> {
        Ok(())
    }

    fn text<E: Error>(self, _: Cow<'de, str>) -> Result<(), E> {
        Ok(())
    }

    fn object<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_key_seed(At(Key))?.is_some() {
            map.next_value_seed(At(Unknown))?;
        }
        Ok(())
    }

    fn array<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(At(Unknown))?.is_some() {}
        Ok(())
    }
}

/// A field of an entry, with the data for its errors.
struct Field<'r> {
    reader: &'r mut Reader,
    name: &'r str,
    field: &'static str,
    expected: &'static str,
}

impl Field<'_> {
    /// Returns the same field, for a value inside it.
    fn again(&mut self) -> Field<'_> {
        Field {
            reader: self.reader,
            name: self.name,
            field: self.field,
            expected: self.expected,
        }
    }

    fn wrong<T, E: Error>(self, found: String) -> Result<T, E> {
        let Field {
            reader,
            name,
            field,
            expected,
        } = self;
        reader.fail(FormatError::InvalidEntry {
            tensor: name.to_owned(),
            field,
            expected,
            found,
        })
    }
}

/// A dtype's code.
struct Code<'r>(Field<'r>);

impl<'de> Node<'de> for Code<'_> {
    type Value = Dtype;

    fn wrong<E: Error>(self, found: String) -> Result<Dtype, E> {
        self.0.wrong(found)
    }

    fn text<E: Error>(self, text: Cow<'de, str>) -> Result<Dtype, E> {
        match Dtype::from_code(&text) {
            Some(dtype) => Ok(dtype),
            None => {
                let tensor = self.0.name.to_owned();
                self.0.reader.fail(FormatError::UnknownDtype {
                    tensor,
                    dtype: text.into_owned(),
                })
            }
        }
    }
}

/// An array of dimensions. They go directly to the header's dimensions: a separate list would need the same memory
/// again, four times the size of a header whose dimensions all have one digit.
struct Dims<'r>(Field<'r>);

impl<'de> Node<'de> for Dims<'_> {
    type Value = ();

    fn wrong<E: Error>(self, found: String) -> Result<(), E> {
        self.0.wrong(found)
    }

    fn array<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        while let Some(dim) = seq.next_element_seed(At(Number(self.0.again())))? {
            self.0.reader.raw.dims.push(dim);
        }
        Ok(())
    }
}

/// An array of two numbers, and the number of elements found.
struct Offsets<'r>(Field<'r>);

impl<'de> Node<'de> for Offsets<'_> {
    type Value = ([u64; 2], usize);

    fn wrong<E: Error>(self, found: String) -> Result<Self::Value, E> {
        self.0.wrong(found)
    }

    fn array<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Self::Value, A::Error> {
        let (mut pair, mut count) = ([0; 2], 0);
        while let Some(number) = seq.next_element_seed(At(Number(self.0.again())))? {
            if let Some(place) = pair.get_mut(count) {
                *place = number;
            }
            count += 1;
        }
        Ok((pair, count))
    }
}

/// One unsigned integer.
struct Number<'r>(Field<'r>);

impl<'de> Node<'de> for Number<'_> {
    type Value = u64;

    fn wrong<E: Error>(self, found: String) -> Result<u64, E> {
        self.0.wrong(format!("in it {found}"))
    }

    fn number<E: Error>(self, number: u64) -> Result<u64, E> {
        Ok(number)
    }
}
