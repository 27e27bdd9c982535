//! What does not go together in a checkpoint.

use std::fmt;

use ingot_format::{Escaped, Quoted};

/// Why the files of a checkpoint are not one. Names of files are as the index spells them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckpointFault {
    /// The directory holds neither an index nor a file of tensors.
    NoCheckpoint,
    /// The directory holds several things that could be meant.
    Ambiguous {
        /// Their names.
        found: Vec<String>,
    },
    /// The directory holds shards by their names, and no index.
    MissingIndex {
        /// Their names.
        found: Vec<String>,
    },
    /// Shards that the index names are not there.
    MissingShards {
        /// Their names.
        shards: Vec<String>,
        /// How many shards the index names.
        of: usize,
    },
    /// A shard lacks a tensor that the index says it holds.
    MissingTensor {
        /// The tensor.
        tensor: String,
        /// The shard that the index names.
        shard: String,
        /// The shard that does hold it.
        other: Option<String>,
    },
    /// A shard holds a tensor that the index does not say it holds.
    ExtraTensor {
        /// The tensor.
        tensor: String,
        /// The shard that holds it.
        shard: String,
        /// The shard that the index names.
        indexed: Option<String>,
    },
    /// Two shards hold a tensor of one name.
    TensorInTwoShards {
        /// The tensor.
        tensor: String,
        /// Both.
        shards: (String, String),
    },
    /// A file lies, or may lie, elsewhere, which [`crate::Reach::Confined`] forbids.
    NotConfined {
        /// The file.
        shard: String,
        /// In which way.
        reason: &'static str,
    },
    /// One hash is asked of several files.
    ManyFiles {
        /// How many.
        files: usize,
    },
}

/// Names in a message. The rest are counted.
const SHOWN: usize = 8;

impl CheckpointFault {
    /// A stable name for the fault, in kebab-case; programs may match it.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            CheckpointFault::NoCheckpoint => "no-checkpoint",
            CheckpointFault::Ambiguous { .. } => "ambiguous-checkpoint",
            CheckpointFault::MissingIndex { .. } => "missing-index",
            CheckpointFault::MissingShards { .. } => "missing-shards",
            CheckpointFault::MissingTensor { .. } => "missing-tensor",
            CheckpointFault::ExtraTensor { .. } => "extra-tensor",
            CheckpointFault::TensorInTwoShards { .. } => "tensor-in-two-shards",
            CheckpointFault::NotConfined { .. } => "not-confined",
            CheckpointFault::ManyFiles { .. } => "many-files",
        }
    }

    /// The tensor that the fault concerns, if it is one.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        match self {
            CheckpointFault::MissingTensor { tensor, .. }
            | CheckpointFault::ExtraTensor { tensor, .. }
            | CheckpointFault::TensorInTwoShards { tensor, .. } => Some(tensor),
            _ => None,
        }
    }
}

impl fmt::Display for CheckpointFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(tensor) = self.tensor() {
            write!(f, "tensor {}: ", Quoted(tensor))?;
        }
        match self {
            CheckpointFault::NoCheckpoint => f.write_str(
                "the directory holds no checkpoint: expected a *.safetensors.index.json, or one .safetensors or .bt file",
            ),
            CheckpointFault::Ambiguous { found } => {
                f.write_str("the directory holds more than one checkpoint, and any could be meant: ")?;
                list(f, found)?;
                f.write_str(" — give the path of the one to open")
            }
            CheckpointFault::MissingIndex { found } => {
                f.write_str("the directory holds shards of a checkpoint without their index: ")?;
                list(f, found)?;
                f.write_str(" — fetch the index and all shards, or pass the path of one shard")
            }
            CheckpointFault::MissingShards { shards, of } => {
                write!(f, "{} of the {of} files that the index names are not there: ", shards.len())?;
                list(f, shards)
            }
            CheckpointFault::MissingTensor { shard, other, .. } => {
                write!(f, "the index says that it is in {}, which lacks it", Quoted(shard))?;
                match other {
                    Some(other) => write!(f, "; it is in {}", Quoted(other)),
                    None => Ok(()),
                }
            }
            CheckpointFault::ExtraTensor { shard, indexed, .. } => match indexed {
                Some(indexed) => write!(
                    f,
                    "it is in {}, and the index says that it is in {}, which lacks it",
                    Quoted(shard),
                    Quoted(indexed)
                ),
                None => write!(f, "it is in {}, and the index does not name it", Quoted(shard)),
            },
            CheckpointFault::TensorInTwoShards { shards, .. } => {
                write!(f, "it is in {} and in {}", Quoted(&shards.0), Quoted(&shards.1))
            }
            CheckpointFault::NotConfined { shard, reason } => {
                write!(f, "file {} refused: {reason}", Escaped(shard))
            }
            CheckpointFault::ManyFiles { files } => {
                write!(f, "one hash cannot speak of {files} files: expected a file, found an index")
            }
        }
    }
}

impl std::error::Error for CheckpointFault {}

fn list(f: &mut fmt::Formatter<'_>, names: &[String]) -> fmt::Result {
    for (number, name) in names.iter().take(SHOWN).enumerate() {
        if number > 0 {
            f.write_str(", ")?;
        }
        write!(f, "{}", Quoted(name))?;
    }
    match names.len().saturating_sub(SHOWN) {
        0 => Ok(()),
        more => write!(f, " and {more} more"),
    }
}
