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
use folder::{Folder, Stamp};
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

/// The shards of a checkpoint as one. Each is opened when it is first needed, and then held against the index: it has to
/// hold just the tensors that the index says. Any number of threads may use it at once.
#[derive(Debug)]
pub struct Checkpoint {
    folder: Folder,
    path: PathBuf,
    options: OpenOptions,
    index: ShardIndex,
    members: OnceLock<Members>,
    shards: Vec<Shard>,
}

/// A shard, perhaps open.
#[derive(Debug)]
struct Shard {
    /// What it was when the checkpoint was opened.
    stamp: Stamp,
    archive: OnceLock<Archive>,
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
            Checkpoint::of_index(folder, &name, index, options).map(Opened::Checkpoint)
        }
    }
}

impl Checkpoint {
    fn of_index(
        folder: Folder,
        name: &OsStr,
        index: ShardIndex,
        options: &CheckpointOptions,
    ) -> Result<Checkpoint, Error> {
        let path = folder.path(name);
        let looked: Vec<_> = index.shards().iter().map(|shard| folder.look(shard)).collect();
        refuse_missing(&path, &index, &looked)?;
        let mut shards = Vec::with_capacity(looked.len());
        for stamp in looked {
            shards.push(Shard {
                stamp: stamp?,
                archive: OnceLock::new(),
            });
        }
        Ok(Checkpoint {
            folder,
            path,
            options: options.open,
            index,
            members: OnceLock::new(),
            shards,
        })
    }

    /// The index.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the index says.
    #[must_use]
    pub fn index(&self) -> &ShardIndex {
        &self.index
    }

    /// The path of shard `number`. They are in the order of their names.
    #[must_use]
    pub fn shard_path(&self, number: usize) -> PathBuf {
        self.folder.path(&self.index.shards()[number])
    }

    /// Shard `number`, opened now if it was not.
    ///
    /// # Errors
    /// What [`Archive::open`] says; [`Error::Changed`] when it is no longer what it was when the checkpoint was opened;
    /// [`Error::Checkpoint`] when it does not hold just what the index says.
    pub fn shard(&self, number: usize) -> Result<&Archive, Error> {
        let shard = &self.shards[number];
        if let Some(archive) = shard.archive.get() {
            return Ok(archive);
        }
        let name = &self.index.shards()[number];
        let (file, path) = (self.folder.open(name)?, self.folder.path(name));
        shard.stamp.check(&file, &path)?;
        let archive = Archive::of_file(file, path, &self.options)?;
        let members = self.members.get_or_init(|| Members::of(&self.index));
        if let Some(found) = differing(&self.index, members.of_shard(number), archive.header()) {
            let path = self.path.clone();
            let fault = self.difference(number, found);
            return Err(Error::Checkpoint { path, fault });
        }
        // Another thread may have been quicker; its archive is as good.
        Ok(shard.archive.get_or_init(|| archive))
    }

    /// Several shards, those that are not open opened in parallel. The first that fails is the error.
    ///
    /// # Errors
    /// As [`Checkpoint::shard`].
    pub fn open_shards(&self, numbers: &[usize]) -> Result<Vec<&Archive>, Error> {
        in_parallel(numbers.len(), |rank| self.shard(numbers[rank]))
            .into_iter()
            .collect()
    }

    /// All shards, in the order of their names.
    ///
    /// # Errors
    /// As [`Checkpoint::shard`].
    pub fn all_shards(&self) -> Result<Vec<&Archive>, Error> {
        self.open_shards(&(0..self.shards.len()).collect::<Vec<_>>())
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

    /// The tensor `name`, in the shard that holds it.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`], with the name that is most like it, and what [`Checkpoint::shard`] says.
    pub fn find(&self, name: &str) -> Result<Tensor<'_>, Error> {
        self.shard(self.shard_number(name)?)?.find(name)
    }

    /// The number of the shard that holds the tensor `name`.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`].
    pub fn shard_number(&self, name: &str) -> Result<usize, Error> {
        match self.index.find(name) {
            Some(number) => Ok(self.index.entry(number).1),
            None => Err(Error::UnknownTensor {
                path: Some(self.path.clone()),
                tensor: name.to_owned(),
                nearest: nearest(self.index.entries().map(|entry| entry.0), name),
            }),
        }
    }

    /// The tensors of these names, their shards opened in parallel.
    ///
    /// # Errors
    /// As [`Checkpoint::find`].
    pub fn find_all(&self, names: &[&str]) -> Result<Vec<Tensor<'_>>, Error> {
        let numbers = names
            .iter()
            .map(|name| self.shard_number(name))
            .collect::<Result<Vec<_>, _>>()?;
        let mut needed = numbers.clone();
        needed.sort_unstable();
        needed.dedup();
        self.open_shards(&needed)?;
        names
            .iter()
            .zip(numbers)
            .map(|(name, number)| self.shard(number)?.find(name))
            .collect()
    }

    /// All tensors in the order of the data, shard after shard.
    ///
    /// # Errors
    /// As [`Checkpoint::shard`].
    pub fn all(&self) -> Result<Vec<Tensor<'_>>, Error> {
        let mut tensors = Vec::with_capacity(self.len());
        for shard in self.all_shards()? {
            tensors.extend((0..shard.header().len()).filter_map(|number| shard.tensor(number)));
        }
        Ok(tensors)
    }

    /// What the index says of all tensors' bytes, and how many there are, where the two differ. `None` as long as a
    /// shard is not open.
    #[must_use]
    pub fn wrong_total(&self) -> Option<(u64, u64)> {
        let total = self.index.total_nbytes()?;
        let mut found = 0_u64;
        for shard in &self.shards {
            found = found.saturating_add(shard.archive.get()?.header().data_nbytes());
        }
        (found != total).then_some((total, found))
    }

    /// Says of a difference between the index and shard `number` where else the tensor is.
    fn difference(&self, number: usize, found: Difference) -> CheckpointFault {
        let Difference { tensor, is_extra } = found;
        let shard = self.index.shards()[number].clone();
        // Whatever can be opened is asked; what is wrong with another one is not the question.
        let holds = |other: usize| {
            let open = || {
                Archive::of_file(
                    self.folder.open(&self.index.shards()[other]).ok()?,
                    PathBuf::new(),
                    &self.options,
                )
                .ok()
            };
            other != number && open().is_some_and(|other| other.header().find(&tensor).is_some())
        };
        let other = in_parallel(self.shards.len(), holds)
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

/// The bytes of tensors, of any shards; the regions come in their order. Views where a shard is mapped. What has to be
/// read is read at once, from all shards in parallel.
///
/// # Errors
/// As [`Archive::regions`].
pub fn read_tensors(
    tensors: &[Tensor<'_>],
    options: &ReadOptions,
    watch: &dyn Watch,
) -> Result<Vec<Region>, Error> {
    read::regions(tensors, options, watch)
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
