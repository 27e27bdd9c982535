//! The files that an index names, each held against it.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ingot_format::{Header, Limits, ShardIndex};

use super::CheckpointFault;
use super::folder::{Folder, Stamp};
use super::index_file::index_in;
use super::parallel::in_parallel;
use crate::error::Error;
use crate::head::read_header;
use crate::source::FileSource;

/// An index, and what its shards were when it was read. Opening one of them is the business of whoever has them.
#[derive(Debug)]
pub(super) struct Shards {
    folder: Folder,
    path: PathBuf,
    index: ShardIndex,
    members: OnceLock<Members>,
    stamps: Vec<Stamp>,
}

impl Shards {
    pub(super) fn of_index(folder: Folder, name: &OsStr) -> Result<Shards, Error> {
        let path = folder.path(name);
        let index = index_in(&folder, name)?;
        let looked: Vec<_> = index.shards().iter().map(|shard| folder.look(shard)).collect();
        refuse_missing(&path, &index, &looked)?;
        Ok(Shards {
            folder,
            path,
            index,
            members: OnceLock::new(),
            stamps: looked.into_iter().collect::<Result<_, _>>()?,
        })
    }

    /// The index.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn index(&self) -> &ShardIndex {
        &self.index
    }

    pub(super) fn into_index(self) -> ShardIndex {
        self.index
    }

    pub(super) fn len(&self) -> usize {
        self.stamps.len()
    }

    /// The path of shard `number`. They are in the order of their names.
    pub(super) fn shard_path(&self, number: usize) -> PathBuf {
        self.folder.path(&self.index.shards()[number])
    }

    /// What `open` makes of shard `number`, whose `header` has to say what the index says.
    pub(super) fn opened<T>(
        &self,
        number: usize,
        open: impl FnOnce(File, PathBuf) -> Result<T, Error>,
        header: impl FnOnce(&T) -> &Header,
    ) -> Result<T, Error> {
        let name = &self.index.shards()[number];
        let (file, path) = (self.folder.open(name)?, self.folder.path(name));
        self.stamps[number].check(&file, &path)?;
        let opened = open(file, path)?;
        let members = self.members.get_or_init(|| Members::of(&self.index));
        match differing(&self.index, members.of_shard(number), header(&opened)) {
            None => Ok(opened),
            Some(found) => Err(Error::Checkpoint {
                path: self.path.clone(),
                fault: self.difference(number, found),
            }),
        }
    }

    /// Says of a difference between the index and shard `number` where else the tensor is.
    fn difference(&self, number: usize, found: Difference) -> CheckpointFault {
        let Difference { tensor, is_extra } = found;
        let shard = self.index.shards()[number].clone();
        // Whatever can be opened is asked; what is wrong with another one is not the question.
        let holds = |other: usize| {
            let header = || {
                let file = self.folder.open(&self.index.shards()[other]).ok()?;
                read_header(&FileSource::new(file).ok()?, None, &Limits::default()).ok()
            };
            other != number && header().is_some_and(|header| header.find(&tensor).is_some())
        };
        let other = in_parallel(self.len(), holds)
            .into_iter()
            .position(|holds| holds)
            .map(|other| self.index.shards()[other].clone());
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
struct Difference {
    tensor: String,
    is_extra: bool,
}

/// A tensor that only one has of `header` and of the tensors `members` of the index, which are in the order of their names.
fn differing(index: &ShardIndex, members: &[u32], header: &Header) -> Option<Difference> {
    let mut said = members.iter().map(|&member| index.entry(position(member)).0);
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

/// Fails when shards are not there, with all their names.
fn refuse_missing(path: &Path, index: &ShardIndex, looked: &[Result<Stamp, Error>]) -> Result<(), Error> {
    let is_missing = |shard: &Result<Stamp, Error>| matches!(shard, Err(Error::Open { source, .. }) if source.kind() == io::ErrorKind::NotFound);
    let missing: Vec<String> = looked
        .iter()
        .zip(index.shards())
        .filter(|pair| is_missing(pair.0))
        .map(|pair| pair.1.clone())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Checkpoint {
        path: path.to_owned(),
        fault: CheckpointFault::MissingShards {
            shards: missing,
            of: looked.len(),
        },
    })
}

fn position(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
