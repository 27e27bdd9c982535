//! The shards of an index, each compared with it when it is opened.

use std::collections::HashSet;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ingot_format::{Format, Header, ShardIndex, StopFlag};

use crate::error::{CheckpointFault, Error};
use crate::file::Archive;
use crate::watch::{Unwatched, Watch};
use crate::workers::{Reading, in_parallel};

/// The shards of an index. Some of them are open.
#[derive(Debug)]
pub(crate) struct Shards {
    path: PathBuf,
    index: ShardIndex,
    members: OnceLock<Members>,
    pub(super) store: Box<dyn Store>,
    archives: Vec<OnceLock<Archive>>,
}

impl Shards {
    /// Return the shards of the index at `path`, which `store` opens.
    pub(crate) fn new(path: PathBuf, index: ShardIndex, store: Box<dyn Store>) -> Shards {
        Shards {
            archives: index.shards().iter().map(|_| OnceLock::new()).collect(),
            path,
            index,
            members: OnceLock::new(),
            store,
        }
    }

    /// Return the path of the index.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn index(&self) -> &ShardIndex {
        &self.index
    }

    pub(crate) fn len(&self) -> usize {
        self.index.shards().len()
    }

    /// Return the name of shard `number`, as the index spells it. Shards are in the order of their names.
    pub(crate) fn name(&self, number: usize) -> &str {
        &self.index.shards()[number]
    }

    /// Return the format by the name of the first shard.
    pub(crate) fn format(&self) -> Format {
        let is_binary = |name: &String| name.ends_with(".bt");
        if self.index.shards().first().is_some_and(is_binary) {
            Format::Bintensors
        } else {
            Format::Safetensors
        }
    }

    /// Return the names of the tensors that shard `number` must hold, in byte order.
    pub(crate) fn tensors(&self, number: usize) -> impl Iterator<Item = &str> {
        let members = self.members.get_or_init(|| Members::of(&self.index));
        let members = members.of_shard(number).iter();
        members.map(|&member| self.index.entry(position(member)).0)
    }

    /// Return the fault for a difference between the index and shard `number`. `other` is another shard that holds the
    /// tensor, if there is one.
    fn fault(&self, number: usize, found: &Difference, other: Option<usize>) -> CheckpointFault {
        let shard = self.name(number).to_owned();
        let other = other.map(|other| self.name(other).to_owned());
        match other {
            Some(other) if found.is_extra => CheckpointFault::TensorInTwoShards {
                shards: (shard, other),
            },
            _ if found.is_extra => {
                let indexed = self.index.shard_of(&found.tensor).map(ToOwned::to_owned);
                CheckpointFault::ExtraTensor { shard, indexed }
            }
            other => CheckpointFault::MissingTensor { shard, other },
        }
    }

    /// Return the first tensor that only one of `header` and the index has for shard `number`. A tensor that breaks a rule
    /// counts as present.
    fn differing(&self, number: usize, header: &Header) -> Option<Difference> {
        let left_out: HashSet<&str> = header.all_left_out().map(|left_out| left_out.0).collect();
        let mut expected = self.tensors(number).filter(|name| !left_out.contains(name));
        let mut found = header.names_by_name();
        loop {
            let (tensor, is_extra) = match (expected.next(), found.next()) {
                (None, None) => return None,
                (Some(expected), Some(name)) if expected == name => continue,
                // Both lists are sorted: of two names that differ, the lesser one is missing from the other list.
                (Some(expected), Some(name)) => (expected.min(name), name < expected),
                (Some(expected), None) => (expected, false),
                (None, Some(name)) => (name, true),
            };
            return Some(Difference {
                tensor: tensor.to_owned(),
                is_extra,
            });
        }
    }

    /// Return the path of shard `number`, or its URL without the secrets.
    pub(super) fn shard_path(&self, number: usize) -> PathBuf {
        self.store.path(self.name(number))
    }

    /// Return shard `number`, and open it if it is not open.
    pub(super) fn shard(&self, number: usize) -> Result<&Archive, Error> {
        loop {
            match self.archives[number].get() {
                Some(archive) => return Ok(archive),
                None => self.open(&[number], &Unwatched)?,
            }
        }
    }

    /// Return the shards that are open.
    pub(super) fn opened(&self) -> impl Iterator<Item = &Archive> {
        self.archives.iter().filter_map(OnceLock::get)
    }

    /// Return the bytes of all data sections; `None` until all shards are open.
    pub(super) fn data_nbytes(&self) -> Option<u64> {
        let mut total = 0_u64;
        for archive in &self.archives {
            total = total.saturating_add(archive.get()?.header().data_nbytes());
        }
        Some(total)
    }

    /// Open the shards of these numbers that are not open.
    pub(super) fn open(&self, numbers: &[usize], watch: &dyn Watch) -> Result<(), Error> {
        let is_closed = |number: &usize| self.archives[*number].get().is_none();
        let numbers: Vec<usize> = numbers.iter().copied().filter(is_closed).collect();
        if numbers.is_empty() {
            return Ok(());
        }
        let outcome = self.open_all(&numbers, watch);
        self.store.rest();
        outcome
    }

    fn open_all(&self, numbers: &[usize], watch: &dyn Watch) -> Result<(), Error> {
        let compared = |number: usize, stop: StopFlag<'_>| {
            let archive = self.store.open(self, number, stop)?;
            let difference = self.differing(number, archive.header());
            Ok(difference.map_or(Ok(archive), Err))
        };
        let opened = in_parallel(self.store.reading(), numbers, compared, watch)?;
        for (&number, archive) in numbers.iter().zip(opened) {
            match archive {
                // Another thread may have been first; its archive is as good.
                Ok(archive) => drop(self.archives[number].set(archive)),
                Err(difference) => return Err(self.misplaced(number, difference, watch)?),
            }
        }
        Ok(())
    }

    /// Return the error for the `difference` between the index and shard `number`. All other shards are searched for the
    /// tensor.
    fn misplaced(&self, number: usize, difference: Difference, watch: &dyn Watch) -> Result<Error, Error> {
        let others: Vec<usize> = (0..self.len()).filter(|&other| other != number).collect();
        let asked = |other: usize, stop: StopFlag<'_>| Ok(self.holds(other, &difference.tensor, stop));
        let held = in_parallel(self.store.reading(), &others, asked, watch)?;
        let other = held.iter().position(|&holds| holds).map(|rank| others[rank]);
        let fault = self.fault(number, &difference, other);
        Ok(fault.about(self.path()).of(&difference.tensor))
    }

    /// Return whether a shard holds `tensor`, even if the shard differs from the index.
    fn holds(&self, number: usize, tensor: &str, stop: StopFlag<'_>) -> bool {
        let holds = |archive: &Archive| archive.header().find(tensor).is_some();
        match self.archives[number].get() {
            Some(archive) => holds(archive),
            None => {
                let opened = self.store.open(self, number, stop);
                opened.as_ref().is_ok_and(holds)
            }
        }
    }
}

/// The place of the shards of an index: beside it in a directory, or behind URLs.
pub(crate) trait Store: Debug + Send + Sync {
    /// Return the path of a shard, or its URL without the secrets.
    fn path(&self, name: &str) -> PathBuf;

    /// Open shard `number`, without comparing it with the index.
    fn open(&self, shards: &Shards, number: usize, stop: StopFlag<'_>) -> Result<Archive, Error>;

    /// Return how many shards to open at once.
    fn reading(&self) -> Reading;

    /// Return whether another index has replaced the index that was read. Only for files of this machine.
    fn is_replaced(&self) -> bool {
        false
    }

    /// Free resources after many shards were opened.
    fn rest(&self) {}

    /// Return the backend and the reason for it, if they are known without opening a shard.
    fn backend(&self) -> Option<(&'static str, &'static str)>;
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
struct Difference {
    tensor: String,
    is_extra: bool,
}

fn position(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
