//! A checkpoint of one or many files, as one handle.

mod fault;
mod folder;
mod locate;
mod read;

use std::ffi::OsStr;
use std::io;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use ingot_format::{Dtype, Header, IndexReader, ShardIndex, to_u64};

pub use fault::CheckpointFault;

use crate::archive::{Archive, OpenOptions, Tensor, nearest};
use crate::error::Error;
use crate::execute::ReadOptions;
use crate::region::Region;
use crate::watch::Watch;
use folder::Folder;
use locate::{Located, locate};

/// How to open a checkpoint.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckpointOptions {
    /// How each of its files is opened.
    pub open: OpenOptions,
    /// Whether files may lie elsewhere.
    pub reach: Reach,
}

/// Where the files of a checkpoint may lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// Symbolic links are followed, because the cache of the Hub is made of them.
    #[default]
    FollowLinks,
    /// A symbolic link anywhere below the directory is refused, and so is a file that has another name somewhere.
    Confined,
}

/// What was found where a checkpoint was asked for.
#[derive(Debug)]
pub enum Opened {
    /// A single file.
    File(Archive),
    /// The shards that an index names.
    Checkpoint(Checkpoint),
}

/// All shards of a checkpoint, open, and held against its index: every tensor is in just the shard that the index
/// says. Any number of threads may use it at once.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    index: ShardIndex,
    shards: Vec<Archive>,
    /// For each tensor, in the order of the index, its place in its shard's order of data.
    places: Vec<u32>,
}

/// Where a tensor of a checkpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardPlace {
    /// The number of the shard.
    pub shard: usize,
    /// The tensor's place in that shard's order of data.
    pub number: usize,
}

/// Opens a file, the shards of an index, or whatever of these a directory holds. The content decides, not the name:
/// but a name that ends in `.json` is always that of an index.
///
/// # Errors
/// What [`Archive::open`] says, of every shard; [`Error::Index`] with the rule that the index breaks;
/// [`Error::Checkpoint`] where index, shards and directory do not go together.
pub fn open(path: &Path, options: &CheckpointOptions) -> Result<Opened, Error> {
    match locate(path, options)? {
        Located::File(file) => Ok(Opened::File(file)),
        Located::Index { folder, name } => {
            let index = index_in(&folder, &name)?;
            Checkpoint::of_index(&folder, &name, index, options).map(Opened::Checkpoint)
        }
    }
}

impl Checkpoint {
    fn of_index(
        folder: &Folder,
        name: &OsStr,
        index: ShardIndex,
        options: &CheckpointOptions,
    ) -> Result<Checkpoint, Error> {
        let path = folder.path(name);
        let members = Members::of(&index);
        let opened = in_parallel(index.shards().len(), |number| {
            open_shard(folder, &index, &members, number, options)
        });
        refuse_missing(&path, &index, &opened)?;
        let mut shards = Vec::with_capacity(opened.len());
        let mut outcomes = Vec::with_capacity(opened.len());
        for shard in opened {
            let (archive, outcome) = shard?;
            shards.push(archive);
            outcomes.push(outcome);
        }
        let mut places = vec![0; index.len()];
        for (number, outcome) in outcomes.into_iter().enumerate() {
            match outcome {
                Ok(found) => {
                    for (&member, place) in members.of_shard(number).iter().zip(found) {
                        places[position(member)] = place;
                    }
                }
                Err(Difference { tensor, is_extra }) => {
                    let fault = difference(&index, &shards, number, tensor, is_extra);
                    return Err(Error::Checkpoint { path, fault });
                }
            }
        }
        Ok(Checkpoint {
            path,
            index,
            shards,
            places,
        })
    }

    /// The index.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the index says. It has been held against the shards.
    #[must_use]
    pub fn index(&self) -> &ShardIndex {
        &self.index
    }

    /// The shards, in the order of their names.
    #[must_use]
    pub fn shards(&self) -> &[Archive] {
        &self.shards
    }

    /// How many tensors there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// All names in their own order, byte by byte.
    pub fn names_by_name(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|rank| self.index.entry(self.index.nth_by_name(rank)).0)
    }

    /// All names in the order of the data, shard after shard.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.shards.iter().flat_map(|shard| shard.header().names())
    }

    /// The tensor `name`, in the shard that holds it.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`], with the name that is most like it.
    pub fn find(&self, name: &str) -> Result<Tensor<'_>, Error> {
        let place = self.index.find(name).map(|number| self.place_of(number));
        place
            .and_then(|place| self.tensor(place))
            .ok_or_else(|| Error::UnknownTensor {
                path: Some(self.path.clone()),
                tensor: name.to_owned(),
                nearest: nearest(self.index.entries().map(|entry| entry.0), name),
            })
    }

    /// Where the tensor is that stands at `number` in the order of the index.
    fn place_of(&self, number: usize) -> ShardPlace {
        ShardPlace {
            shard: self.index.entry(number).1,
            number: position(self.places[number]),
        }
    }

    /// Where the tensor `name` is.
    #[must_use]
    pub fn place(&self, name: &str) -> Option<ShardPlace> {
        self.index.find(name).map(|number| self.place_of(number))
    }

    /// The tensor at `place`.
    #[must_use]
    pub fn tensor(&self, place: ShardPlace) -> Option<Tensor<'_>> {
        self.shards.get(place.shard)?.tensor(place.number)
    }

    /// The places of all tensors in the order of the data, shard after shard.
    pub fn all_places(&self) -> impl Iterator<Item = ShardPlace> {
        self.shards.iter().enumerate().flat_map(|(shard, archive)| {
            (0..archive.header().len()).map(move |number| ShardPlace { shard, number })
        })
    }

    /// The bytes of many tensors; the regions come in the order of `wanted`. Views where a shard is mapped. What has to
    /// be read is read at once, from all shards in parallel.
    ///
    /// # Errors
    /// As [`Archive::regions`].
    pub fn regions(
        &self,
        wanted: &[ShardPlace],
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<Vec<Region>, Error> {
        read::regions(&self.shards, wanted, options, watch)
    }

    /// Bytes of all tensors, as the headers of the shards say. They may pass what 64 bits count only where the files
    /// are sparse.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.shards
            .iter()
            .fold(0, |sum, shard| sum.saturating_add(shard.header().data_nbytes()))
    }

    /// What the index says of all tensors' bytes, where it is not so.
    #[must_use]
    pub fn wrong_total(&self) -> Option<u64> {
        self.index.total_nbytes().filter(|&total| total != self.nbytes())
    }
}

/// Elements of each dtype in these headers, as they are stored: a scalar is one. In the order of [`Dtype::ALL`], and
/// without the dtypes that no tensor has.
#[must_use]
pub fn parameter_count<'h>(headers: impl IntoIterator<Item = &'h Header>) -> Vec<(Dtype, u128)> {
    let mut counts = [None; Dtype::ALL.len()];
    let place = |dtype: Dtype| Dtype::ALL.iter().position(|&known| known == dtype).unwrap_or(0);
    for header in headers {
        for entry in header.entries() {
            // A header is proven: the product fits into 64 bits.
            let count: u64 = entry.shape.iter().product();
            *counts[place(entry.dtype)].get_or_insert(0) += u128::from(count);
        }
    }
    Dtype::ALL
        .iter()
        .zip(counts)
        .filter_map(|(&dtype, count)| Some((dtype, count?)))
        .collect()
}

/// Reads an index, and none of its shards.
///
/// # Errors
/// [`Error::Open`], and [`Error::Index`] with the rule that it breaks.
pub fn read_index(path: &Path) -> Result<ShardIndex, Error> {
    let folder = Folder::new(path.parent().unwrap_or(Path::new("")), Reach::FollowLinks)?;
    index_in(&folder, path.file_name().unwrap_or_default())
}

/// Reads an index through a window, so that 60 MB of it cost no more memory than the names in it.
fn index_in(folder: &Folder, name: &OsStr) -> Result<ShardIndex, Error> {
    const WINDOW_NBYTES: usize = 128 << 10;
    let path = || folder.path(name);
    let index_fault = |fault| Error::Index { path: path(), fault };
    let mut file = folder.open(name)?;
    let open_fault = |source| Error::Open { path: path(), source };
    let metadata = file.metadata().map_err(open_fault)?;
    if !metadata.is_file() {
        return Err(open_fault(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        )));
    }
    let nbytes = metadata.len();
    let mut reader = IndexReader::new(nbytes).map_err(index_fault)?;
    let mut window = vec![0; WINDOW_NBYTES];
    let (mut position, mut filled) = (0, 0);
    while position < nbytes {
        let found = io::Read::read(&mut file, &mut window[filled..]).map_err(open_fault)?;
        if found == 0 {
            return Err(Error::Changed {
                path: Some(path()),
                nbytes_at_open: nbytes,
                nbytes_now: Some(position),
            });
        }
        position += to_u64(found);
        filled += found;
        let taken = reader.feed(&window[..filled]).map_err(index_fault)?;
        window.copy_within(taken..filled, 0);
        filled -= taken;
        if filled == window.len() {
            // One item is longer than the window. Rule I3 and the size of the whole bound what this may come to.
            window.resize(2 * filled, 0);
        }
    }
    reader.finish().map_err(index_fault)
}

/// The tensors of each shard, in the order of their names.
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

type Shard = (Archive, Result<Vec<u32>, Difference>);

/// Opens one shard, and finds the index's tensors in it.
fn open_shard(
    folder: &Folder,
    index: &ShardIndex,
    members: &Members,
    number: usize,
    options: &CheckpointOptions,
) -> Result<Shard, Error> {
    let name = &index.shards()[number];
    let archive = Archive::of_file(folder.open(name)?, folder.path(name), &options.open)?;
    let found = places_of(index, members.of_shard(number), archive.header());
    Ok((archive, found))
}

/// Where `header` has the tensors `members` of the index, both in the order of their names.
fn places_of(index: &ShardIndex, members: &[u32], header: &Header) -> Result<Vec<u32>, Difference> {
    let mut said = members.iter().map(|&member| index.entry(position(member)).0);
    let mut places = Vec::with_capacity(members.len());
    for rank in 0..header.len().max(members.len()) {
        let has = (rank < header.len()).then(|| header.nth_by_name(rank));
        let name = has.and_then(|place| header.entry(place)).map(|entry| entry.name);
        match (said.next(), name, has) {
            (Some(said), Some(name), Some(place)) if said == name => {
                // A header counts in 32 bits.
                places.push(u32::try_from(place).unwrap_or(u32::MAX));
            }
            // Of two names that differ, the one that comes first is missing on the other side.
            (Some(said), name, _) if name.is_none_or(|name| said < name) => {
                return Err(Difference {
                    tensor: said.to_owned(),
                    is_extra: false,
                });
            }
            (_, name, _) => {
                return Err(Difference {
                    tensor: name.unwrap_or_default().to_owned(),
                    is_extra: true,
                });
            }
        }
    }
    Ok(places)
}

/// Says of a tensor that shard `number` lacks, or has too many, where else it is.
fn difference(
    index: &ShardIndex,
    shards: &[Archive],
    number: usize,
    tensor: String,
    is_extra: bool,
) -> CheckpointFault {
    let shard = index.shards()[number].clone();
    let holders = || {
        shards
            .iter()
            .zip(index.shards())
            .filter(|pair| pair.0.header().find(&tensor).is_some())
    };
    let other = holders()
        .map(|pair| pair.1)
        .find(|&other| *other != shard)
        .cloned();
    match other {
        Some(other) if is_extra => CheckpointFault::TensorInTwoShards {
            tensor,
            shards: (shard, other),
        },
        _ if is_extra => {
            let indexed = index.shard_of(&tensor).map(ToOwned::to_owned);
            CheckpointFault::ExtraTensor {
                tensor,
                shard,
                indexed,
            }
        }
        other => CheckpointFault::MissingTensor { tensor, shard, other },
    }
}

/// Fails when shards are not there, with all their names.
fn refuse_missing(path: &Path, index: &ShardIndex, opened: &[Result<Shard, Error>]) -> Result<(), Error> {
    let is_missing = |shard: &Result<Shard, Error>| matches!(shard, Err(Error::Open { source, .. }) if source.kind() == io::ErrorKind::NotFound);
    let missing: Vec<String> = opened
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
            of: opened.len(),
        },
    })
}

/// Threads that open shards. More than there are cores, because they mostly wait where the disk is far.
const MAX_OPENERS: usize = 16;

/// What `work` makes of each number below `count`.
fn in_parallel<T: Send + Sync>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let workers = (2 * cores).min(MAX_OPENERS).min(count);
    let done: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let run = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(slot) = done.get(number) else { break };
            // Each number is given out once, so the slot is free.
            let _ = slot.set(work(number));
        }
    };
    thread::scope(|scope| {
        for _ in 1..workers {
            scope.spawn(run);
        }
        run();
    });
    done.into_iter().filter_map(OnceLock::into_inner).collect()
}

fn position(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
