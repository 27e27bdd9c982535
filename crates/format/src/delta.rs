//! The record of a patch in its metadata. FORMAT.md, "Patches".

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::codec::json::string;
use crate::quoted::{Escaped, Quoted};

/// The metadata key of the record of a patch.
pub const DELTA_KEY: &str = "ingot.delta";

/// The version of the format of patches.
pub const DELTA_VERSION: u64 = 1;

/// A version of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Version {
    /// The id: a digest of the headers, and of the data too if the headers lack digests of some tensors, in hexadecimal
    /// digits.
    pub id: String,
    /// The digest of the data of all tensors, in hexadecimal digits.
    pub digest: String,
}

/// A description of a patch: the versions before and after it, and the files of the result.
///
/// ```
/// use ingot_format::{DeltaRecord, Version};
/// let version = Version { id: "0".repeat(64), digest: "0".repeat(32) };
/// let (base, result) = (version.clone(), version);
/// let record = DeltaRecord { base, result, step: Some(7), nbytes: vec![96], ..DeltaRecord::default() };
/// assert_eq!(DeltaRecord::parse(&record.render())?, record);
/// # Ok::<(), ingot_format::DeltaError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeltaRecord {
    /// The version to which the patch is applied.
    pub base: Version,
    /// The version after it.
    pub result: Version,
    /// The step of the training that made the result.
    pub step: Option<u64>,
    /// The size of each file of the result.
    pub nbytes: Vec<u64>,
    /// The name of each file of the result, in their order; empty if the result is one file without an index.
    pub files: Vec<String>,
    /// The name of the index of the result.
    pub index: Option<String>,
    /// Names of tensors that the base lacks.
    pub added: Vec<String>,
    /// Names of tensors that the result lacks.
    pub removed: Vec<String>,
}

/// The reason why a text is not the record of a patch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeltaError {
    /// It is not a JSON object of this form.
    Invalid(String),
    /// A member is missing, or has another value than expected.
    Member {
        /// The name of the member.
        key: String,
        /// What the member must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// It has a later version.
    Later(u64),
}

impl fmt::Display for DeltaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeltaError::Invalid(reason) => {
                write!(
                    f,
                    "metadata {} is not the record of a patch: {reason}",
                    Quoted(DELTA_KEY)
                )
            }
            DeltaError::Member { key, expected, found } => {
                write!(
                    f,
                    "metadata {} is not the record of a patch: {}: expected {expected}, found {found}",
                    Quoted(DELTA_KEY),
                    Quoted(key)
                )
            }
            DeltaError::Later(found) => {
                write!(
                    f,
                    "expected version {DELTA_VERSION} of a patch, found {found} — update ingot"
                )
            }
        }
    }
}

impl core::error::Error for DeltaError {}

impl DeltaRecord {
    /// Reads a record. Members with other names are ignored.
    ///
    /// # Errors
    /// If the text is not JSON of this form, has a member twice, or has a later version.
    pub fn parse(text: &str) -> Result<DeltaRecord, DeltaError> {
        let members = Members::parse(text)?;
        match members.number("version")? {
            Some(DELTA_VERSION) => {}
            Some(found) if found > DELTA_VERSION => return Err(DeltaError::Later(found)),
            found => {
                let found = found.map_or_else(|| NOTHING.to_owned(), |found| found.to_string());
                return Err(member("version", "a version of 1 or more", found));
            }
        }
        let record = DeltaRecord {
            base: members.version("base", "base_digest")?,
            result: members.version("result", "result_digest")?,
            step: members.number("step")?,
            nbytes: members
                .read("nbytes", "a list of sizes in bytes")?
                .unwrap_or_default(),
            files: members.texts("files")?,
            index: members.read("index", "a text")?,
            added: members.texts("added")?,
            removed: members.texts("removed")?,
        };
        record.check_counts()?;
        Ok(record)
    }

    /// Fail if the record does not have a size for each file.
    fn check_counts(&self) -> Result<(), DeltaError> {
        let expected = if self.index.is_some() {
            self.files.len()
        } else if self.files.is_empty() {
            1
        } else {
            return Err(member(
                "index",
                "the name of the index of the files",
                NOTHING.to_owned(),
            ));
        };
        if self.nbytes.len() == expected {
            return Ok(());
        }
        let found = format!("{} sizes", self.nbytes.len());
        Err(member(
            "nbytes",
            &format!("the size of each of {expected} files"),
            found,
        ))
    }

    /// Renders the record as it is stored in a file: members sorted, no white space.
    #[must_use]
    pub fn render(&self) -> String {
        let mut out = Vec::new();
        let mut separator = b'{';
        let mut member = |name: &str, out: &mut Vec<u8>| {
            out.push(separator);
            separator = b',';
            string(name, out);
            out.push(b':');
        };
        member("added", &mut out);
        list(&self.added, &mut out);
        member("base", &mut out);
        string(&self.base.id, &mut out);
        member("base_digest", &mut out);
        string(&self.base.digest, &mut out);
        if let Some(index) = &self.index {
            member("files", &mut out);
            list(&self.files, &mut out);
            member("index", &mut out);
            string(index, &mut out);
        }
        member("nbytes", &mut out);
        let sizes: Vec<String> = self.nbytes.iter().map(ToString::to_string).collect();
        out.extend_from_slice(format!("[{}]", sizes.join(",")).as_bytes());
        member("removed", &mut out);
        list(&self.removed, &mut out);
        member("result", &mut out);
        string(&self.result.id, &mut out);
        member("result_digest", &mut out);
        string(&self.result.digest, &mut out);
        if let Some(step) = self.step {
            member("step", &mut out);
            out.extend_from_slice(step.to_string().as_bytes());
        }
        member("version", &mut out);
        out.extend_from_slice(DELTA_VERSION.to_string().as_bytes());
        out.push(b'}');
        // Built from text and ASCII, so no byte is ever replaced.
        String::from_utf8_lossy(&out).into_owned()
    }
}

fn list(texts: &[String], out: &mut Vec<u8>) {
    out.push(b'[');
    for (place, text) in texts.iter().enumerate() {
        if place > 0 {
            out.push(b',');
        }
        string(text, out);
    }
    out.push(b']');
}

/// The value of a member that is missing, in an error.
const NOTHING: &str = "nothing";

/// The most characters of a value in an error.
const SHOWN_LEN: usize = 40;

fn member(key: &str, expected: &str, found: String) -> DeltaError {
    DeltaError::Member {
        key: key.to_owned(),
        expected: expected.to_owned(),
        found,
    }
}

/// The members of a record, whose values are not parsed yet: so an error shows the value, and its depth and the range of
/// its numbers do not matter before.
struct Members<'t>(Vec<(String, &'t RawValue)>);

impl<'t> Members<'t> {
    fn parse(text: &'t str) -> Result<Members<'t>, DeltaError> {
        let mut json = serde_json::Deserializer::from_str(text);
        let members = json
            .deserialize_map(MembersVisitor)
            .and_then(|members| json.end().map(|()| members));
        let members = members.map_err(|fault| {
            let found = if fault.is_eof() {
                "its end"
            } else {
                "something else"
            };
            let (line, column) = (fault.line(), fault.column());
            let reason = format!("expected a JSON object, found {found} at line {line}, column {column}");
            DeltaError::Invalid(reason)
        })?;
        let mut names: Vec<&String> = members.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(member(pair[0], "one member of this name", "two".to_owned())),
            None => Ok(Members(members)),
        }
    }

    /// Return the value of a member, if it is there. `expected` is for the error.
    fn read<T: Deserialize<'t>>(&self, key: &str, expected: &str) -> Result<Option<T>, DeltaError> {
        let Some((_, value)) = self.0.iter().find(|(name, _)| name == key) else {
            return Ok(None);
        };
        let text = value.get();
        serde_json::from_str(text).map(Some).map_err(|_| {
            let mut found: String = text.chars().take(SHOWN_LEN).collect();
            if found.len() < text.len() {
                found.push('…');
            }
            member(key, expected, Escaped(&found).to_string())
        })
    }

    fn number(&self, key: &str) -> Result<Option<u64>, DeltaError> {
        self.read(key, "an integer from 0 to 18446744073709551615")
    }

    fn texts(&self, key: &str) -> Result<Vec<String>, DeltaError> {
        Ok(self.read(key, "a list of texts")?.unwrap_or_default())
    }

    fn version(&self, id: &str, digest: &str) -> Result<Version, DeltaError> {
        Ok(Version {
            id: self.digits(id, 64)?,
            digest: self.digits(digest, 32)?,
        })
    }

    /// Return a text of this many lowercase hexadecimal digits.
    fn digits(&self, key: &str, len: usize) -> Result<String, DeltaError> {
        let expected = format!("{len} lowercase hexadecimal digits");
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        match self.read::<String>(key, &expected)? {
            Some(text) if text.len() == len && text.bytes().all(is_digit) => Ok(text),
            Some(text) => {
                let text: String = text.chars().take(len + 1).collect();
                Err(member(key, &expected, Quoted(&text).to_string()))
            }
            None => Err(member(key, &expected, NOTHING.to_owned())),
        }
    }
}

struct MembersVisitor;

impl<'t> Visitor<'t> for MembersVisitor {
    type Value = Vec<(String, &'t RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'t>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut all = Vec::new();
        while let Some(member) = members.next_entry()? {
            all.push(member);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> DeltaRecord {
        let version = |digit: &str| Version {
            id: digit.repeat(64),
            digest: digit.repeat(32),
        };
        DeltaRecord {
            base: version("a"),
            result: version("b"),
            step: Some(7),
            nbytes: [3, 4].to_vec(),
            files: ["a\"", "ö"].map(ToOwned::to_owned).to_vec(),
            index: Some("i".to_owned()),
            added: ["x"].map(ToOwned::to_owned).to_vec(),
            removed: Vec::new(),
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let whole = record();
        let single = DeltaRecord {
            index: None,
            files: Vec::new(),
            nbytes: [9].to_vec(),
            step: None,
            ..record()
        };
        for record in [whole, single] {
            assert_eq!(DeltaRecord::parse(&record.render()), Ok(record));
        }
    }

    #[test]
    fn rejects_records_of_another_form_and_of_later_versions() {
        let text = record().render();
        for (old, new) in [
            ("\"version\":1", "\"version\":0"),
            ("\"version\":1", "\"other\":1"),
            ("\"version\":1", "\"version\":1,\"version\":1"),
            ("\"nbytes\":[3,4]", "\"nbytes\":[3]"),
            ("\"nbytes\":[3,4]", "\"nbytes\":[3,-4]"),
            ("\"base\":\"a", "\"base\":\""),
            ("\"base\":\"a", "\"base\":\"A"),
            ("\"index\":\"i\",", ""),
        ] {
            let broken = text.replace(old, new);
            assert_ne!(broken, text);
            assert!(
                matches!(DeltaRecord::parse(&broken), Err(DeltaError::Member { .. })),
                "{broken}"
            );
        }
        let later = text.replace("\"version\":1", "\"version\":2");
        assert_eq!(DeltaRecord::parse(&later), Err(DeltaError::Later(2)));
    }

    #[test]
    fn a_fault_names_the_member_and_what_was_expected_and_found() {
        let text = record().render();
        let deep = format!("\"added\":{}{}", "[".repeat(500), "]".repeat(500));
        for (old, new, expected) in [
            (
                "\"step\":7",
                "\"step\":1e999",
                "`step`: expected an integer from 0 to 18446744073709551615, found 1e999",
            ),
            (
                "\"step\":7",
                "\"step\":18446744073709551616",
                "found 18446744073709551616",
            ),
            ("\"step\":7", "\"step\":-1", "found -1"),
            ("\"step\":7", "\"step\":\"a\\nb\"", "found \"a\\nb\""),
            (
                "\"version\":1",
                "\"version\":null",
                "`version`: expected an integer",
            ),
            (
                "\"version\":1",
                "\"other\":1",
                "`version`: expected a version of 1 or more, found nothing",
            ),
            (
                "\"nbytes\":[3,4]",
                "\"nbytes\":[3,4.5]",
                "`nbytes`: expected a list of sizes in bytes, found [3,4.5]",
            ),
            (
                "\"nbytes\":[3,4]",
                "\"nbytes\":[3]",
                "`nbytes`: expected the size of each of 2 files, found 1 sizes",
            ),
            (
                "\"added\":[\"x\"]",
                &*deep,
                "`added`: expected a list of texts, found [[[[",
            ),
            (
                "\"base\":\"a",
                "\"base\":\"A",
                "`base`: expected 64 lowercase hexadecimal digits, found `Aaa",
            ),
            (
                "\"base\":",
                "\"no\":",
                "`base`: expected 64 lowercase hexadecimal digits, found nothing",
            ),
            (
                "\"step\":7",
                "\"step\":7,\"step\":7",
                "`step`: expected one member of this name, found two",
            ),
            (
                "\"version\":1}",
                "\"version\":1",
                "expected a JSON object, found its end at line 1, column ",
            ),
        ] {
            let broken = text.replace(old, new);
            assert_ne!(broken, text);
            let found = DeltaRecord::parse(&broken).unwrap_err().to_string();
            assert!(
                found.starts_with("metadata `ingot.delta` is not the record of a patch: "),
                "{found}"
            );
            assert!(found.contains(expected), "{found}");
        }
        // Other members are ignored, of any depth.
        let other = text.replace(
            "\"step\":7",
            &format!("\"step\":7,\"other\":{}{}", "[".repeat(500), "]".repeat(500)),
        );
        assert_eq!(DeltaRecord::parse(&other), Ok(record()));
    }
}
