//! Faults of an index.

use alloc::format;
use alloc::string::String;
use core::fmt;

use crate::metadata::METADATA_KEY;
use crate::quoted::Quoted;

/// A rule of FORMAT.md that an index breaks. Like [`crate::FormatError`], it keeps names unchanged, escapes them in
/// `Display`, and never mentions the path of the index.
///
/// ```
/// use ingot_format::{IndexError, ShardIndex};
///
/// assert_eq!(ShardIndex::parse(b"{}").unwrap_err(), IndexError::MissingWeightMap);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexError {
    /// I1: the index is larger than the limit.
    TooLarge {
        /// Its size in bytes.
        found: u64,
        /// [`crate::ShardIndex::NBYTES`].
        limit: u64,
    },
    /// I2: the index is not UTF-8.
    InvalidUtf8 {
        /// Counted from the start of the file.
        position: u64,
    },
    /// I3: the index is not one JSON object with white space around it.
    InvalidJson {
        /// The fault and its position.
        reason: String,
    },
    /// I3: a value beside the weight map is larger than the limit.
    ValueTooLarge {
        /// The field that holds it.
        field: String,
        /// [`crate::ShardIndex::VALUE_NBYTES`].
        limit: u64,
    },
    /// I4: a field occurs twice.
    DuplicateField {
        /// The field, escapes undone.
        field: String,
    },
    /// I4: an object in the metadata has a key twice.
    DuplicateMetadataKey {
        /// The key, escapes undone.
        key: String,
    },
    /// I4: a tensor occurs twice.
    DuplicateTensor {
        /// The name, escapes undone.
        tensor: String,
        /// The two files given for it, which may be the same.
        shards: (String, String),
    },
    /// I5: `weight_map` is missing.
    MissingWeightMap,
    /// I5: `weight_map` or `metadata` is not an object.
    InvalidField {
        /// The field.
        field: &'static str,
        /// The kind of value found.
        found: &'static str,
    },
    /// I5: a value of the weight map is not a string.
    InvalidShard {
        /// The tensor.
        tensor: String,
        /// The kind of value found.
        found: &'static str,
    },
    /// I5: a tensor has the reserved name `__metadata__`, which no tensor of a shard can have.
    ReservedName,
    /// I6: the name of a shard may lead outside the index's directory.
    InvalidShardName {
        /// The first tensor of that shard.
        tensor: String,
        /// The name, escapes undone.
        shard: String,
        /// The reason.
        fault: ShardNameFault,
    },
    /// I7: there are more shards than the limit.
    TooManyShards {
        /// [`crate::ShardIndex::SHARDS`].
        limit: u64,
    },
    /// I8: two shards are the same file where names ignore case.
    ShardCollision {
        /// Their names.
        shards: (String, String),
    },
}

impl IndexError {
    /// A stable name for the fault, in kebab-case; programs may match it.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            IndexError::TooLarge { .. } => "index-too-large",
            IndexError::InvalidUtf8 { .. } => "invalid-utf8",
            IndexError::InvalidJson { .. } => "invalid-json",
            IndexError::ValueTooLarge { .. } => "value-too-large",
            IndexError::DuplicateField { .. } => "duplicate-field",
            IndexError::DuplicateMetadataKey { .. } => "duplicate-metadata-key",
            IndexError::DuplicateTensor { .. } => "duplicate-tensor",
            IndexError::MissingWeightMap => "missing-weight-map",
            IndexError::InvalidField { .. } => "invalid-field",
            IndexError::InvalidShard { .. } => "invalid-shard",
            IndexError::ReservedName => "reserved-name",
            IndexError::InvalidShardName { .. } => "invalid-shard-name",
            IndexError::TooManyShards { .. } => "too-many-shards",
            IndexError::ShardCollision { .. } => "shard-collision",
        }
    }

    /// Returns the tensor at fault, if there is one.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        match self {
            IndexError::DuplicateTensor { tensor, .. }
            | IndexError::InvalidShard { tensor, .. }
            | IndexError::InvalidShardName { tensor, .. } => Some(tensor),
            IndexError::ReservedName => Some(METADATA_KEY),
            _ => None,
        }
    }

    /// Returns the two sizes that differ: expected, found.
    #[must_use]
    pub const fn expected_found(&self) -> Option<(u64, u64)> {
        match *self {
            IndexError::TooLarge { found, limit } => Some((limit, found)),
            _ => None,
        }
    }
}

/// Returns the fault of an unexpected character at `position` (I3).
pub(super) fn invalid_json(position: u64, expected: &str, found: Option<char>) -> IndexError {
    let found = found.map_or_else(
        || "the end".into(),
        |c| format!("{}", Quoted(c.encode_utf8(&mut [0; 4]))),
    );
    IndexError::InvalidJson {
        reason: format!("expected {expected}, found {found} at byte {position}"),
    }
}

impl fmt::Display for IndexError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(tensor) = self.tensor() {
            write!(f, "tensor {}: ", Quoted(tensor))?;
        }
        match self {
            IndexError::TooLarge { found, limit } => {
                write!(
                    f,
                    "index too large: expected at most {limit} bytes, found {found}"
                )
            }
            IndexError::InvalidUtf8 { position } => {
                write!(f, "invalid UTF-8 at byte {position} of the index")
            }
            IndexError::InvalidJson { reason } => write!(f, "invalid JSON in the index: {reason}"),
            IndexError::ValueTooLarge { field, limit } => write!(
                f,
                "field {}: value too large: expected at most {limit} bytes",
                Quoted(field)
            ),
            IndexError::DuplicateField { field } => write!(f, "field {} occurs twice", Quoted(field)),
            IndexError::DuplicateMetadataKey { key } => {
                write!(f, "metadata key {}: it occurs twice", Quoted(key))
            }
            IndexError::DuplicateTensor { shards, .. } if shards.0 == shards.1 => {
                write!(f, "it occurs twice, in {}", Quoted(&shards.0))
            }
            IndexError::DuplicateTensor { shards, .. } => write!(
                f,
                "it occurs twice, in {} and in {}",
                Quoted(&shards.0),
                Quoted(&shards.1)
            ),
            IndexError::MissingWeightMap => {
                f.write_str("the index has no `weight_map`, which maps tensors to files")
            }
            IndexError::InvalidField { field, found } => {
                write!(f, "field `{field}`: expected an object, found {found}")
            }
            IndexError::InvalidShard { found, .. } => {
                write!(f, "expected the name of a file, found {found}")
            }
            IndexError::ReservedName => f.write_str("the name is reserved for metadata"),
            IndexError::InvalidShardName { shard, fault, .. } => {
                write!(f, "file name {} refused: {fault}", Quoted(shard))
            }
            IndexError::TooManyShards { limit } => {
                write!(f, "the index names more than {limit} files")
            }
            IndexError::ShardCollision { shards } => write!(
                f,
                "files {} and {} are the same if case is ignored",
                Quoted(&shards.0),
                Quoted(&shards.1)
            ),
        }
    }
}

impl core::error::Error for IndexError {}

/// Why a shard's name is rejected: rule I6. An index may come from an untrusted source, so its shards must be beside it
/// on every system, and be plain files there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "Display says each in words")]
pub enum ShardNameFault {
    Empty,
    Absolute,
    Home,
    Parent,
    EmptyPart,
    Backslash,
    Colon,
    Control,
    Device,
    TrailingDot,
    TooLong,
    Encoded,
}

impl ShardNameFault {
    /// Describes the fault.
    #[must_use]
    pub const fn description(self) -> &'static str {
        match self {
            ShardNameFault::Empty => "it is empty",
            ShardNameFault::Absolute => "it is an absolute path",
            ShardNameFault::Home => "it begins with `~`, which shells take for a home directory",
            ShardNameFault::Parent => "it has a part `.` or `..`",
            ShardNameFault::EmptyPart => "it has an empty part",
            ShardNameFault::Backslash => "it has a backslash, which separates directories on Windows",
            ShardNameFault::Colon => "it has a colon, which names a drive or a stream on Windows",
            ShardNameFault::Control => "it has a control character",
            ShardNameFault::Device => "it is the name of a device on Windows",
            ShardNameFault::TrailingDot => "a part of it ends with a dot or a space, which Windows drops",
            ShardNameFault::TooLong => "it is longer than a file's name can be",
            ShardNameFault::Encoded => "percent-decoded, as a server does, it is a name that is refused",
        }
    }
}

impl fmt::Display for ShardNameFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.description())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_duplicate_name_is_reported_with_its_shards() {
        let twice = |first: &str, second: &str| IndexError::DuplicateTensor {
            tensor: "a".to_string(),
            shards: (first.to_string(), second.to_string()),
        };
        assert_eq!(twice("x", "x").to_string(), "tensor `a`: it occurs twice, in `x`");
        assert_eq!(
            twice("x", "y").to_string(),
            "tensor `a`: it occurs twice, in `x` and in `y`"
        );
    }

    #[test]
    fn the_reserved_name_is_a_tensor_s_and_a_field_is_none() {
        let field = IndexError::DuplicateField {
            field: "metadata".to_string(),
        };
        assert_eq!(IndexError::ReservedName.tensor(), Some(METADATA_KEY));
        assert_eq!((field.tensor(), field.expected_found()), (None, None));
        let large = IndexError::TooLarge { found: 9, limit: 8 };
        assert_eq!(large.expected_found(), Some((8, 9)));
    }
}
