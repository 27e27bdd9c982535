//! The digests of tensors in the metadata. FORMAT.md, "Checksums".

use alloc::borrow::{Cow, ToOwned};
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, Visitor};

use crate::codec::json::string;
use crate::quoted::Quoted;

/// The metadata key for the digests of a file's tensors.
pub const CHECKSUMS_KEY: &str = "ingot.checksums";

/// The metadata key under which ModelSpec stores the SHA-256 of the data section, after `0x`.
pub const MODEL_SPEC_KEY: &str = "modelspec.hash_sha256";

/// A record of digests: the algorithm's name and one digest per tensor. Neither the algorithm nor the form of a digest
/// is checked here; the code that computes digests does that.
///
/// ```
/// use ingot_format::Checksums;
/// let text = r#"{"algorithm":"xxh3","tensors":{"bias":"2d06800538d394c2"}}"#;
/// let record = Checksums::parse(text)?;
/// assert_eq!(record.get("bias"), Some("2d06800538d394c2"));
/// assert_eq!(record.render(), text);
/// # Ok::<(), ingot_format::ChecksumsError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksums<'a> {
    algorithm: Cow<'a, str>,
    /// Names and digests, sorted by name.
    digests: Vec<(Cow<'a, str>, Cow<'a, str>)>,
}

/// The reason why a text is not a record of digests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChecksumsError {
    reason: String,
}

impl fmt::Display for ChecksumsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "metadata {} is not a record of checksums: {}",
            Quoted(CHECKSUMS_KEY),
            self.reason
        )
    }
}

impl core::error::Error for ChecksumsError {}

impl<'a> Checksums<'a> {
    /// Creates a record of `algorithm` with these names and digests.
    ///
    /// # Errors
    /// If a name occurs twice.
    pub fn new(
        algorithm: &'a str,
        digests: impl IntoIterator<Item = (&'a str, Cow<'a, str>)>,
    ) -> Result<Checksums<'a>, ChecksumsError> {
        let digests = digests
            .into_iter()
            .map(|(name, digest)| (Cow::Borrowed(name), digest))
            .collect();
        Checksums {
            algorithm: Cow::Borrowed(algorithm),
            digests,
        }
        .sorted()
    }

    /// Reads a record.
    ///
    /// # Errors
    /// If the text is not JSON of this form, or has a name twice, even if one is escaped.
    pub fn parse(text: &'a str) -> Result<Checksums<'a>, ChecksumsError> {
        let mut json = serde_json::Deserializer::from_str(text);
        json.deserialize_map(ChecksumsVisitor)
            .and_then(|record| json.end().map(|()| record))
            .map_err(|fault| ChecksumsError {
                reason: fault.to_string(),
            })?
            .sorted()
    }

    fn sorted(mut self) -> Result<Checksums<'a>, ChecksumsError> {
        self.digests.sort_by(|a, b| a.0.cmp(&b.0));
        match self.digests.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(pair) => Err(ChecksumsError {
                reason: alloc::format!("the name {} occurs twice", Quoted(&pair[0].0)),
            }),
            None => Ok(self),
        }
    }

    /// The algorithm's name in the record.
    #[must_use]
    pub fn algorithm(&self) -> &str {
        &self.algorithm
    }

    /// Returns the digest of the tensor `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        let place = self.digests.binary_search_by(|pair| (*pair.0).cmp(name)).ok()?;
        Some(&self.digests[place].1)
    }

    /// Iterates over all names and digests, sorted by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.digests.iter().map(|(name, digest)| (&**name, &**digest))
    }

    /// Renders the record as it is stored in a file. Its length depends only on the names and on the lengths of the
    /// digests, so that a header can be laid out before the digests are known.
    #[must_use]
    pub fn render(&self) -> String {
        let mut out = Vec::new();
        out.extend_from_slice(b"{\"algorithm\":");
        string(&self.algorithm, &mut out);
        out.extend_from_slice(b",\"tensors\":{");
        for (place, (name, digest)) in self.digests.iter().enumerate() {
            if place > 0 {
                out.push(b',');
            }
            string(name, &mut out);
            out.push(b':');
            string(digest, &mut out);
        }
        out.extend_from_slice(b"}}");
        // Built from text and ASCII, so no byte is ever replaced.
        String::from_utf8_lossy(&out).into_owned()
    }
}

/// The whole record. Members with other names are ignored, as in a header's entries (F8).
struct ChecksumsVisitor;

impl<'de> Visitor<'de> for ChecksumsVisitor {
    type Value = Checksums<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `algorithm` and `tensors`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Checksums<'de>, A::Error> {
        let (mut algorithm, mut digests) = (None, None);
        while let Some(Text(member)) = members.next_key()? {
            let twice = match &*member {
                "algorithm" => algorithm.replace(members.next_value::<Text<'de>>()?.0).is_some(),
                "tensors" => digests.replace(members.next_value::<Digests<'de>>()?.0).is_some(),
                _ => {
                    members.next_value::<IgnoredAny>()?;
                    false
                }
            };
            if twice {
                return Err(Error::custom(format_args!("{} occurs twice", Quoted(&member))));
            }
        }
        match (algorithm, digests) {
            (Some(algorithm), Some(digests)) => Ok(Checksums { algorithm, digests }),
            (None, _) => Err(Error::missing_field("algorithm")),
            (_, None) => Err(Error::missing_field("tensors")),
        }
    }
}

/// The object from names to digests. [`Checksums::sorted`] rejects duplicate names.
struct Digests<'de>(Vec<(Cow<'de, str>, Cow<'de, str>)>);

impl<'de> serde::Deserialize<'de> for Digests<'de> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Digests<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from names to digests")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut pairs: A) -> Result<Digests<'de>, A::Error> {
                let mut digests = Vec::new();
                while let Some((Text(name), Text(digest))) = pairs.next_entry()? {
                    digests.push((name, digest));
                }
                Ok(Digests(digests))
            }
        }
        json.deserialize_map(Pairs)
    }
}

/// A string, borrowed if it has no escapes: serde's own `Cow` always copies.
pub(crate) struct Text<'de>(pub(crate) Cow<'de, str>);

impl<'de> serde::Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Str;
        impl<'de> Visitor<'de> for Str {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        json.deserialize_str(Str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fault(text: &str) -> String {
        Checksums::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn a_text_of_another_form_is_refused_with_its_reason() {
        for (text, reason) in [
            ("", "EOF"),
            ("[]", "expected an object with `algorithm` and `tensors`"),
            (r#"{"tensors":{}}"#, "missing field `algorithm`"),
            (r#"{"algorithm":"blake3"}"#, "missing field `tensors`"),
            (r#"{"algorithm":3,"tensors":{}}"#, "expected a string"),
            (
                r#"{"algorithm":"a","tensors":[]}"#,
                "expected an object from names to digests",
            ),
            (r#"{"algorithm":"a","tensors":{"x":1}}"#, "expected a string"),
            (
                r#"{"algorithm":"a","algorithm":"a","tensors":{}}"#,
                "`algorithm` occurs twice",
            ),
            (
                r#"{"algorithm":"a","tensors":{"a":"1","\u0061":"2"}}"#,
                "the name `a` occurs twice",
            ),
            (r#"{"algorithm":"a","tensors":{}} x"#, "trailing characters"),
        ] {
            let found = fault(text);
            assert!(found.contains(reason), "{text}: {found}");
        }
    }

    #[test]
    fn deep_nesting_takes_no_stack() {
        let deep = alloc::format!(r#"{{"x":{}"#, "[".repeat(100_000));
        assert!(fault(&deep).contains("EOF"), "{}", fault(&deep));
    }

    #[test]
    fn members_with_other_names_are_passed_over() {
        let record = Checksums::parse(r#"{"made":[1,{}],"algorithm":"a","tensors":{"x":"00"}}"#).unwrap();
        assert_eq!(record.iter().collect::<Vec<_>>(), [("x", "00")]);
    }

    proptest! {
        #[test]
        fn what_is_rendered_is_read_again(
            names in prop::collection::btree_set(any::<String>(), 0..8),
            algorithm in any::<String>(),
        ) {
            let record = Checksums::new(
                &algorithm,
                names.iter().rev().map(|name| (name.as_str(), Cow::Borrowed("0123456789abcdef"))),
            ).unwrap();
            let text = record.render();
            let again = Checksums::parse(&text).unwrap();
            prop_assert_eq!(&again, &record);
            prop_assert_eq!(again.algorithm(), algorithm);
            prop_assert!(names.iter().all(|name| again.get(name) == Some("0123456789abcdef")));
        }
    }
}
