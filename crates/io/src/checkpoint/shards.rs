//! The shards that an index names, each held against it.

use std::collections::HashSet;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ingot_format::{Format, Header, ShardIndex, StopFlag};

use crate::error::{CheckpointFault, Error};
use crate::file::Archive;
use crate::workers::Reading;

/// An index, and what it says of each shard. Where they are is for a [`Store`] to know.
#[derive(Debug)]
pub(crate) struct Shards {
    path: PathBuf,
    index: ShardIndex,
    members: OnceLock<Members>,
}

impl Shards {
    /// Those of the index at `path`.
    pub(crate) fn new(path: PathBuf, index: ShardIndex) -> Shards {
        Shards {
            path,
            index,
            members: OnceLock::new(),
        }
    }

    /// The index.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn index(&self) -> &ShardIndex {
        &self.index
    }

    pub(crate) fn len(&self) -> usize {
        self.index.shards().len()
    }

    /// The name of shard `number`, as the index spells it. They are in the order of their names.
    pub(crate) fn name(&self, number: usize) -> &str {
        &self.index.shards()[number]
    }

    /// The format that the name of the first promises.
    pub(crate) fn format(&self) -> Format {
        let is_binary = |name: &String| name.ends_with(".bt");
        if self.index.shards().first().is_some_and(is_binary) {
            Format::Bintensors
        } else {
            Format::Safetensors
        }
    }

    /// The names of the tensors that shard `number` has to hold, in their own order.
    pub(crate) fn tensors(&self, number: usize) -> impl Iterator<Item = &str> {
        let members = self.members.get_or_init(|| Members::of(&self.index));
        let members = members.of_shard(number).iter();
        members.map(|&member| self.index.entry(position(member)).0)
    }

    /// What the difference between the index and shard `number` is, where shard `other` holds the tensor too.
    pub(super) fn fault(&self, number: usize, found: Difference, other: Option<usize>) -> CheckpointFault {
        let Difference { tensor, is_extra } = found;
        let shard = self.name(number).to_owned();
        let other = other.map(|other| self.name(other).to_owned());
        match other {
            Some(other) if is_extra => CheckpointFault::TensorInTwoShards {
                tensor,
                shards: (shard, other),
            },
            _ if is_extra => {
                let indexed = self.index.shard_of(&tensor).map(ToOwned::to_owned);
                CheckpointFault::ExtraTensor {
                    tensor,
                    shard,
                    indexed,
                }
            }
            other => CheckpointFault::MissingTensor { tensor, shard, other },
        }
    }

    /// A tensor that only one has of `header` and of what the index says of shard `number`. One that is not sound is there.
    pub(super) fn differing(&self, number: usize, header: &Header) -> Option<Difference> {
        let left_out: HashSet<&str> = header.all_left_out().map(|left_out| left_out.0).collect();
        let mut said = self.tensors(number).filter(|name| !left_out.contains(name));
        let mut has = header.names_by_name();
        loop {
            let (tensor, is_extra) = match (said.next(), has.next()) {
                (None, None) => return None,
                (Some(said), Some(name)) if said == name => continue,
                // Of two names that differ, the one that comes first is missing on the other side.
                (Some(said), Some(name)) => (said.min(name), name < said),
                (Some(said), None) => (said, false),
                (None, Some(name)) => (name, true),
            };
            return Some(Difference {
                tensor: tensor.to_owned(),
                is_extra,
            });
        }
    }
}

/// Where the shards of an index are, and how they are opened: beside it in a directory, or behind URLs.
pub(crate) trait Store: Debug + Send + Sync {
    /// The path of a shard, or its URL without the secrets.
    fn path(&self, name: &str) -> PathBuf;

    /// Opens shard `number`. Whether it holds what the index says is not asked here.
    fn open(&self, shards: &Shards, number: usize, stop: StopFlag<'_>) -> Result<Archive, Error>;

    /// How many are opened at once.
    fn reading(&self) -> Reading;

    /// Whether another index has the place of the one that was read. Only for files of this machine.
    fn is_replaced(&self) -> bool {
        false
    }

    /// Called when many have been opened.
    fn rest(&self) {}

    /// What backs the shards, where that can be said without opening one of them.
    fn backing(&self, shards: &Shards) -> Option<Backing>;
}

/// What the files of a checkpoint are, and how they are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// The format of the first.
    pub format: Format,
    /// As [`Archive::backend`] has it.
    pub backend: &'static str,
    /// Why so, as a sentence.
    pub why: String,
}

/// The tensors of each shard, in the order of their names.
#[derive(Debug)]
struct Members {
    numbers: Vec<u32>,
    starts: Vec<usize>,
}

impl Members {
    fn of(index: &ShardIndex) -> Members {
        let mut starts = vec![0; index.shards().len() + 1];
        for (_, shard) in index.entries() {
            starts[shard + 1] += 1;
        }
        for shard in 1..starts.len() {
            starts[shard] += starts[shard - 1];
        }
        let mut numbers = vec![0; index.len()];
        let mut next = starts.clone();
        for rank in 0..index.len() {
            let number = index.nth_by_name(rank);
            let place = &mut next[index.entry(number).1];
            // An index has fewer bytes than 32 bits count.
            numbers[*place] = u32::try_from(number).unwrap_or(u32::MAX);
            *place += 1;
        }
        Members { numbers, starts }
    }

    fn of_shard(&self, shard: usize) -> &[u32] {
        &self.numbers[self.starts[shard]..self.starts[shard + 1]]
    }
}

/// A tensor that only one of index and shard has.
#[derive(Debug)]
pub(super) struct Difference {
    pub(super) tensor: String,
    is_extra: bool,
}

fn position(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
