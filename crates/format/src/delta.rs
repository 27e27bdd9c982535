//! The record of a patch in its metadata. FORMAT.md, "Patches".

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, Visitor};

use crate::codec::json::string;
use crate::quoted::Quoted;

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
    /// It is not a record of this form.
    Invalid(String),
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
        let mut json = serde_json::Deserializer::from_str(text);
        let (version, record) = json
            .deserialize_map(RecordVisitor)
            .and_then(|record| json.end().map(|()| record))
            .map_err(|fault| DeltaError::Invalid(fault.to_string()))?;
        match version {
            Some(DELTA_VERSION) => record.proven(),
            Some(found) if found > DELTA_VERSION => Err(DeltaError::Later(found)),
            _ => Err(DeltaError::Invalid("expected a version of 1 or more".to_owned())),
        }
    }

    fn proven(self) -> Result<DeltaRecord, DeltaError> {
        let fault = |reason: &str| Err(DeltaError::Invalid(reason.to_owned()));
        let is_hex = |text: &str, len: usize| {
            text.len() == len && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        if [&self.base, &self.result]
            .iter()
            .any(|version| !is_hex(&version.id, 64) || !is_hex(&version.digest, 32))
        {
            return fault("expected an id of 64 and a digest of 32 hexadecimal digits");
        }
        let counted = if self.index.is_some() {
            self.files.len() == self.nbytes.len()
        } else {
            self.files.is_empty() && self.nbytes.len() == 1
        };
        if !counted {
            return fault("expected the size of each file");
        }
        Ok(self)
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

/// The whole record, with its version.
struct RecordVisitor;

impl<'de> Visitor<'de> for RecordVisitor {
    type Value = (Option<u64>, DeltaRecord);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let (mut version, mut record, mut seen) = (None, DeltaRecord::default(), Vec::<String>::new());
        while let Some(member) = members.next_key::<String>()? {
            match &*member {
                "version" => version = Some(members.next_value()?),
                "added" => record.added = members.next_value()?,
                "base" => record.base.id = members.next_value()?,
                "base_digest" => record.base.digest = members.next_value()?,
                "files" => record.files = members.next_value()?,
                "index" => record.index = Some(members.next_value()?),
                "nbytes" => record.nbytes = members.next_value()?,
                "removed" => record.removed = members.next_value()?,
                "result" => record.result.id = members.next_value()?,
                "result_digest" => record.result.digest = members.next_value()?,
                "step" => record.step = Some(members.next_value()?),
                _ => drop(members.next_value::<IgnoredAny>()?),
            }
            if seen.contains(&member) {
                return Err(Error::custom(format_args!("{} occurs twice", Quoted(&member))));
            }
            // Other members are few in a file of a good writer, and a hostile one must not make this slow.
            if seen.len() == 64 {
                return Err(Error::custom("more than 64 members"));
            }
            seen.push(member);
        }
        Ok((version, record))
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
                matches!(DeltaRecord::parse(&broken), Err(DeltaError::Invalid(_))),
                "{broken}"
            );
        }
        let later = text.replace("\"version\":1", "\"version\":2");
        assert_eq!(DeltaRecord::parse(&later), Err(DeltaError::Later(2)));
    }
}
