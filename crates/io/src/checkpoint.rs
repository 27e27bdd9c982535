//! A checkpoint of one file or of many, as one handle.

pub(crate) mod aliases;
pub(crate) mod copied;
pub(crate) mod folder;
mod locate;
mod replacement;
mod shards;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ingot_format::{Dtype, Header, ShardIndex, StopFlag, natural_order};

pub(crate) use folder::read_index;
pub use shards::Backing;
pub(crate) use shards::{Shards, Store};

use crate::error::Error;
use crate::file::{Archive, BUFFER, ShardHeader, ShardHeaders, Tensor, TensorId, nearest};
use crate::options::CheckpointOptions;
use crate::watch::{Unwatched, Watch};
use crate::workers::{Reading, in_parallel};
use aliases::{Alias, Aliases};
use folder::Beside;
pub use locate::OpenWith;
use locate::{Located, locate};
use replacement::Replacement;
use shards::Difference;

/// One file, or the shards of an index, as one. Any number of threads may use it at once.
///
/// The header of each shard is read when the shard is first needed, and then compared with the index: it has to hold
/// exactly the tensors that the index names. Whatever needs many shards opens them at once. [`Checkpoint::prepare`] does so
/// in a way that can be watched.
///
/// The shards of a directory are opened with the index, so that they are read as they were then. Of more than 48 shards,
/// each is opened when it is read, and the shards that were opened last stay open. Reading a shard is
/// [`Error::Changed`] if another file has its name by then, or the file was written to. The only file of a checkpoint
/// stays open.
///
/// ```
/// use ingot_io::{Checkpoint, CheckpointOptions, Dtype, TensorView, serialize_to_file};
///
/// let folder = tempfile::tempdir()?;
/// let two = TensorView::new(Dtype::F32, vec![2], b"12345678")?;
/// serialize_to_file([("wte", &two)], None, &folder.path().join("a.safetensors"))?;
/// serialize_to_file([("wpe", &two)], None, &folder.path().join("b.safetensors"))?;
/// let index = r#"{"weight_map": {"wte": "a.safetensors", "wpe": "b.safetensors"}}"#;
/// std::fs::write(folder.path().join("model.safetensors.index.json"), index)?;
///
/// let model = Checkpoint::open(folder.path(), &CheckpointOptions::default())?;
/// assert_eq!((model.len(), model.files()), (2, 2));
/// assert_eq!(model.find("wpe")?.entry().shape, [2]);
/// assert_eq!(model.parameter_count()?, [(Dtype::F32, 4)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    files: Contents,
    /// The names that are not stored. They are looked for in all files when a name is not found among the stored ones.
    aliases: OnceLock<Aliases>,
    /// Why these files are read, before the reason for how.
    reason: Option<&'static str>,
}

#[derive(Debug)]
enum Contents {
    File(Box<Archive>),
    Shards(Box<OpenShards>),
}

/// Shards, of which some are open.
#[derive(Debug)]
struct OpenShards {
    shards: Shards,
    store: Box<dyn Store>,
    archives: Vec<OnceLock<Archive>>,
}

impl From<Archive> for Checkpoint {
    fn from(archive: Archive) -> Checkpoint {
        Checkpoint {
            files: Contents::File(Box::new(archive)),
            aliases: OnceLock::new(),
            reason: None,
        }
    }
}

impl Checkpoint {
    /// Opens a file, the shards of an index, or whatever of these a directory holds. The content decides, not the name:
    /// but a name that ends in `.json` is always that of an index.
    ///
    /// # Errors
    /// What [`Archive::open`] says; [`Error::Index`] with the rule that the index breaks; [`Error::Checkpoint`] where
    /// index, shards and directory do not go together.
    pub fn open(path: &Path, options: &CheckpointOptions) -> Result<Checkpoint, Error> {
        Checkpoint::open_with(path, options, &OpenWith::default())
    }

    /// Reads the index at `path`, or the index of the directory `path`, and opens none of its shards. `None` if `path` leads
    /// to a single file.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn index_at(path: &Path) -> Result<Option<ShardIndex>, Error> {
        match locate(path, &CheckpointOptions::default(), &OpenWith::default())? {
            Located::File(_) => Ok(None),
            Located::Index { folder, name } => read_index(&folder.path(name)).map(Some),
        }
    }

    /// As [`Checkpoint::open`], with headers that another process read, or for one of many checkpoints.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    #[doc(hidden)]
    pub fn open_with(path: &Path, options: &CheckpointOptions, with: &OpenWith) -> Result<Checkpoint, Error> {
        let mut replacement = Replacement::of(path);
        loop {
            match Checkpoint::located(path, options, with) {
                // A save replaced the checkpoint meanwhile.
                Err(fault) if replacement.explains(&fault) => {}
                opened => return opened,
            }
        }
    }

    fn located(path: &Path, options: &CheckpointOptions, with: &OpenWith) -> Result<Checkpoint, Error> {
        match locate(path, options, with)? {
            Located::File(archive) => Ok((*archive).into()),
            Located::Index { folder, name } => {
                let (shards, beside) = Beside::index(folder, &name, &options.open, with.headers.clone())?;
                let checkpoint = Checkpoint::of_shards(shards, Box::new(beside));
                // Callers ask for the backing of every checkpoint, and only here it is tried again.
                checkpoint.backing()?;
                Ok(checkpoint)
            }
        }
    }

    /// Return the checkpoint with a reason why these files are read.
    #[cfg(feature = "remote")]
    pub(crate) fn because(self, reason: &'static str) -> Checkpoint {
        Checkpoint {
            reason: Some(reason),
            ..self
        }
    }

    /// The shards of an index, wherever they are.
    pub(crate) fn of_shards(shards: Shards, store: Box<dyn Store>) -> Checkpoint {
        let opened = OpenShards {
            archives: (0..shards.len()).map(|_| OnceLock::new()).collect(),
            shards,
            store,
        };
        Checkpoint {
            files: Contents::Shards(Box::new(opened)),
            aliases: OnceLock::new(),
            reason: None,
        }
    }

    /// Return the headers and the index, for other processes that open the same files. `None` if they read the headers as
    /// fast themselves (from a disk, from memory, from an object), or could not tell whether they have the same files.
    ///
    /// # Errors
    /// As [`Checkpoint::file`]; [`Error::Read`]; [`Error::Interrupted`].
    #[doc(hidden)]
    pub fn shard_headers(&self, watch: &dyn Watch) -> Result<Option<ShardHeaders>, Error> {
        if self.files() == 0 || self.file(0)?.source().version().is_none() {
            return Ok(None);
        }
        let (files, numbers) = (self.all_files()?, (0..self.files()).collect::<Vec<_>>());
        let reading = match &self.files {
            Contents::File(_) => Reading::waiting(1),
            Contents::Shards(opened) => opened.store.reading(),
        };
        let header = |number: usize, stop: StopFlag<'_>| files[number].shard_header(stop);
        let headers = in_parallel(reading, &numbers, header, watch)?.into_iter();
        let files = headers.collect::<Option<Vec<ShardHeader>>>();
        let index = self.index().map(ShardIndex::render);
        Ok(files.map(|files| ShardHeaders { index, files }))
    }

    /// What the files are, as the first of them says. Of an index behind a URL none is asked: what they are is then what
    /// the first of their names says.
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    #[doc(hidden)]
    pub fn backing(&self) -> Result<Backing, Error> {
        let first = match &self.files {
            Contents::File(archive) => archive,
            Contents::Shards(opened) => match opened.store.backing(&opened.shards) {
                Some(backing) => return Ok(backing),
                None => opened.shard(0)?,
            },
        };
        Ok(Backing {
            format: first.header().format(),
            backend: first.backend(),
            why: match self.reason {
                Some(reason) => format!("{reason}: {}", first.why()),
                None => first.why().to_owned(),
            },
        })
    }

    /// Whether a save has replaced the index since it was read: other files may then have the names of the shards.
    /// False for one file, which stays open, and for what is not in a directory of this machine.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        match &self.files {
            Contents::File(_) => false,
            Contents::Shards(opened) => opened.store.is_replaced(),
        }
    }

    /// Text that differs for other versions of the files, and whether other machines see the same files. `None` for what
    /// is no file of this machine.
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    #[doc(hidden)]
    pub fn identity(&self) -> Result<Option<(String, bool)>, Error> {
        let files = self.all_files()?;
        let identities: Option<Vec<_>> = files.into_iter().map(Archive::identity).collect();
        Ok(identities.map(|all| {
            let is_shared = all.iter().all(|(_, is_shared)| *is_shared);
            let texts: Vec<_> = all.into_iter().map(|(text, _)| text).collect();
            (texts.join("\n"), is_shared)
        }))
    }

    /// The file, or the index; `None` for what is no file.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match &self.files {
            Contents::File(archive) => archive.path(),
            Contents::Shards(opened) => Some(opened.shards.path()),
        }
    }

    /// The index, where there is one.
    #[must_use]
    pub fn index(&self) -> Option<&ShardIndex> {
        match &self.files {
            Contents::File(_) => None,
            Contents::Shards(opened) => Some(opened.shards.index()),
        }
    }

    /// How many files there are.
    #[must_use]
    pub fn files(&self) -> usize {
        match &self.files {
            Contents::File(_) => 1,
            Contents::Shards(opened) => opened.shards.len(),
        }
    }

    /// The path of file `number`. Those of an index are in the order of their names. `None` for what is no file, and
    /// where there are fewer.
    #[must_use]
    pub fn file_path(&self, number: usize) -> Option<PathBuf> {
        match &self.files {
            _ if number >= self.files() => None,
            Contents::File(archive) => archive.path().map(Path::to_owned),
            Contents::Shards(opened) => Some(opened.path(number)),
        }
    }

    /// What each file is called: as the index spells it, else by the end of its path.
    pub fn file_names(&self) -> impl Iterator<Item = Cow<'_, str>> {
        (0..self.files()).map(|number| match &self.files {
            Contents::File(archive) => {
                let path = archive.path().unwrap_or(Path::new(BUFFER));
                let name = path.file_name().unwrap_or_default();
                name.to_string_lossy()
            }
            Contents::Shards(opened) => Cow::Borrowed(opened.shards.name(number)),
        })
    }

    /// File `number`, opened now if it was not.
    ///
    /// # Errors
    /// What [`Archive::open`] says, and that there are fewer files; [`Error::Changed`] when it is no longer what it was
    /// when the checkpoint was opened; [`Error::Checkpoint`] when it does not hold just what the index says.
    pub fn file(&self, number: usize) -> Result<&Archive, Error> {
        match &self.files {
            _ if number >= self.files() => {
                let fault = format!("it has no file {number}: expected less than {}", self.files());
                Err(Error::Open {
                    path: self.path().map(Path::to_owned).unwrap_or_default(),
                    source: io::Error::new(io::ErrorKind::InvalidInput, fault),
                })
            }
            Contents::File(archive) => Ok(archive),
            Contents::Shards(opened) => opened.shard(number),
        }
    }

    /// All files, those that are not open opened in parallel. The first that fails is the error.
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    pub fn all_files(&self) -> Result<Vec<&Archive>, Error> {
        self.prepare_all(&Unwatched)?;
        (0..self.files()).map(|number| self.file(number)).collect()
    }

    /// Opens in parallel whatever files are not open, so that nothing that is asked of them afterwards waits for that.
    ///
    /// # Errors
    /// As [`Checkpoint::file`]; [`Error::Interrupted`].
    pub fn prepare_all(&self, watch: &dyn Watch) -> Result<(), Error> {
        self.open_files(&(0..self.files()).collect::<Vec<_>>(), watch)
    }

    /// As [`Checkpoint::prepare_all`], for the files that hold the tensors of these names.
    ///
    /// # Errors
    /// As [`Checkpoint::find`]; [`Error::Interrupted`].
    pub fn prepare(&self, names: &[&str], watch: &dyn Watch) -> Result<(), Error> {
        self.files_of(names, watch).map(drop)
    }

    /// The numbers of the files that hold these tensors, all of them opened.
    fn files_of(&self, names: &[&str], watch: &dyn Watch) -> Result<Vec<usize>, Error> {
        let files = names.iter().map(|name| self.file_of(name, watch));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let mut needed = files.clone();
        needed.sort_unstable();
        needed.dedup();
        self.open_files(&needed, watch)?;
        Ok(files)
    }

    fn open_files(&self, numbers: &[usize], watch: &dyn Watch) -> Result<(), Error> {
        match &self.files {
            Contents::File(_) => Ok(()),
            Contents::Shards(opened) => opened.open(numbers, watch),
        }
    }

    /// How many tensors there are.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.files {
            Contents::File(archive) => archive.header().len(),
            Contents::Shards(opened) => opened.shards.index().len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return whether a tensor is stored under this name. [`Checkpoint::find`] also finds aliases.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        match &self.files {
            Contents::File(archive) => archive.header().find(name).is_some(),
            Contents::Shards(opened) => opened.shards.index().find(name).is_some(),
        }
    }

    /// Return the aliases: names in the metadata of the files (`ingot.shared`) of tensors that are stored under another
    /// name, or are parts of stored tensors.
    ///
    /// # Errors
    /// As [`Checkpoint::file`]; [`Error::Shared`]; [`Error::Interrupted`].
    #[doc(hidden)]
    pub fn aliases(&self, watch: &dyn Watch) -> Result<&[Alias], Error> {
        Ok(self.table(watch)?.all())
    }

    /// Return whether this is an alias. A broken record has none; reading by a name that is not stored reports it.
    ///
    /// # Errors
    /// As [`Checkpoint::file`]; [`Error::Interrupted`].
    #[doc(hidden)]
    pub fn is_alias(&self, name: &str, watch: &dyn Watch) -> Result<bool, Error> {
        match self.table(watch) {
            Err(Error::Shared { .. }) => Ok(false),
            table => Ok(table?.id(name).is_some()),
        }
    }

    fn table(&self, watch: &dyn Watch) -> Result<&Aliases, Error> {
        if let Some(known) = self.aliases.get() {
            return Ok(known);
        }
        self.prepare_all(watch)?;
        let found = Aliases::of(&self.all_files()?)?;
        Ok(self.aliases.get_or_init(|| found))
    }

    /// All names in their own order, byte by byte.
    #[must_use]
    pub fn names_by_name(&self) -> Vec<&str> {
        match &self.files {
            Contents::File(archive) => archive.header().names_by_name().collect(),
            Contents::Shards(opened) => opened.shards.index().names_by_name().collect(),
        }
    }

    /// All tensors in the order of the data, file after file.
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    pub fn all(&self) -> Result<Vec<Tensor<'_>>, Error> {
        let mut tensors = Vec::with_capacity(self.len());
        for file in self.all_files()? {
            tensors.extend(file.tensors());
        }
        Ok(tensors)
    }

    /// All tensors in the [natural order](natural_order) of their names.
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    pub fn all_in_natural_order(&self) -> Result<Vec<Tensor<'_>>, Error> {
        let mut tensors = self.all()?;
        tensors.sort_by(|one, other| natural_order(one.entry().name, other.entry().name));
        Ok(tensors)
    }

    /// Return the tensor `name`. An alias (the metadata key `ingot.shared`) is the tensor, or the part of one, that it
    /// stands for.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`], with the name that is most like it, and what [`Checkpoint::file`] says. If no tensor is
    /// stored under the name, all files are opened, and [`Error::Shared`] reports a broken record of aliases.
    pub fn find(&self, name: &str) -> Result<Tensor<'_>, Error> {
        self.tensor(self.id(name)?)
    }

    /// The tensors of these names, their files opened in parallel.
    ///
    /// # Errors
    /// As [`Checkpoint::find`]; [`Error::Interrupted`].
    pub fn find_all(&self, names: &[&str], watch: &dyn Watch) -> Result<Vec<Tensor<'_>>, Error> {
        // Without an index there is only one file.
        let files = match self.index() {
            Some(_) => self.files_of(names, watch)?,
            None => Vec::new(),
        };
        let mut found = Vec::with_capacity(names.len());
        // Many names are nearly always in the order of the data: then none is searched for.
        let mut next = 0;
        for (rank, &name) in names.iter().enumerate() {
            let file = self.file(files.get(rank).copied().unwrap_or(0))?;
            let tensor = match file.tensor(next).filter(|tensor| tensor.entry().name == name) {
                Some(tensor) => tensor,
                None => self.find(name)?,
            };
            next = tensor.number() + 1;
            found.push(tensor);
        }
        Ok(found)
    }

    /// Return the number of the file that holds the tensor `name`. If no tensor is stored under the name, all files are
    /// opened. The only file of a checkpoint without an index may lack the tensor.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`] of a checkpoint with an index, and as [`Checkpoint::aliases`].
    pub fn file_of(&self, name: &str, watch: &dyn Watch) -> Result<usize, Error> {
        let Some(index) = self.index() else {
            return Ok(0);
        };
        match index.find(name) {
            Some(number) => Ok(index.entry(number).1),
            None => Ok(self.alias(name, watch)?.file),
        }
    }

    fn alias(&self, name: &str, watch: &dyn Watch) -> Result<TensorId, Error> {
        self.table(watch)?.id(name).ok_or_else(|| self.unknown(name))
    }

    /// The error for a name that is neither stored nor an alias.
    fn unknown(&self, name: &str) -> Error {
        let index = match &self.files {
            Contents::File(archive) => return archive.unknown(name),
            Contents::Shards(opened) => opened.shards.index(),
        };
        Error::UnknownTensor {
            path: self.path().map(Path::to_owned),
            tensor: name.to_owned(),
            nearest: nearest(index.entries().map(|entry| entry.0), name),
        }
    }

    /// Which tensor has this name.
    ///
    /// # Errors
    /// As [`Checkpoint::find`].
    #[doc(hidden)]
    pub fn id(&self, name: &str) -> Result<TensorId, Error> {
        let stored = match &self.files {
            Contents::File(archive) => archive.header().find(name).map(|number| (0, number)),
            Contents::Shards(opened) => match opened.shards.index().find(name) {
                Some(at) => {
                    let file = opened.shards.index().entry(at).1;
                    Some((file, self.file(file)?.find(name)?.number()))
                }
                None => None,
            },
        };
        match stored {
            Some((file, number)) => Ok(TensorId { file, number }),
            None => self.alias(name, &Unwatched),
        }
    }

    /// The tensor that [`Checkpoint::id`] named.
    ///
    /// # Errors
    /// As [`Checkpoint::file`]; [`Error::UnknownTensor`] for a number that the file has not; [`Error::Shared`] for an alias
    /// that cannot be read by itself.
    #[doc(hidden)]
    pub fn tensor(&self, id: TensorId) -> Result<Tensor<'_>, Error> {
        let file = self.file(id.file)?;
        if let Some(tensor) = file.tensor(id.number) {
            return Ok(tensor);
        }
        let alias = self.aliases.get().and_then(|known| known.tensor(file, id.number));
        alias.unwrap_or_else(|| {
            Err(Error::UnknownTensor {
                path: file.path().map(Path::to_owned),
                tensor: format!("#{}", id.number),
                nearest: None,
            })
        })
    }

    /// What the index says of all tensors' bytes, and how many there are, where the two differ. `None` as long as a
    /// shard is not open.
    #[must_use]
    pub fn wrong_total(&self) -> Option<(u64, u64)> {
        let Contents::Shards(opened) = &self.files else {
            return None;
        };
        let total = opened.shards.index().total_nbytes()?;
        let mut found = 0_u64;
        for archive in &opened.archives {
            found = found.saturating_add(archive.get()?.header().data_nbytes());
        }
        (found != total).then_some((total, found))
    }

    /// Elements of each dtype, as they are stored: a scalar is one. In the order of [`Dtype::ALL`], and without the
    /// dtypes that no tensor has.
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    pub fn parameter_count(&self) -> Result<Vec<(Dtype, u128)>, Error> {
        Ok(count(self.all_files()?.into_iter().map(Archive::header)))
    }
}

impl OpenShards {
    fn path(&self, number: usize) -> PathBuf {
        self.store.path(self.shards.name(number))
    }

    fn shard(&self, number: usize) -> Result<&Archive, Error> {
        loop {
            match self.archives[number].get() {
                Some(archive) => return Ok(archive),
                None => self.open(&[number], &Unwatched)?,
            }
        }
    }

    /// Opens those of these shards that are not open.
    fn open(&self, numbers: &[usize], watch: &dyn Watch) -> Result<(), Error> {
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
            let archive = self.store.open(&self.shards, number, stop)?;
            let difference = self.shards.differing(number, archive.header());
            Ok(difference.map_or(Ok(archive), Err))
        };
        let opened = in_parallel(self.store.reading(), numbers, compared, watch)?;
        for (&number, archive) in numbers.iter().zip(opened) {
            match archive {
                // Another thread may have been quicker; its archive is as good.
                Ok(archive) => drop(self.archives[number].set(archive)),
                Err(difference) => return Err(self.misplaced(number, difference, watch)?),
            }
        }
        Ok(())
    }

    /// What the `difference` between the index and shard `number` is, as all others show.
    fn misplaced(&self, number: usize, difference: Difference, watch: &dyn Watch) -> Result<Error, Error> {
        let others: Vec<usize> = (0..self.shards.len()).filter(|&other| other != number).collect();
        let asked = |other: usize, stop: StopFlag<'_>| Ok(self.holds(other, &difference.tensor, stop));
        let held = in_parallel(self.store.reading(), &others, asked, watch)?;
        let other = held.iter().position(|&holds| holds).map(|rank| others[rank]);
        let fault = self.shards.fault(number, difference, other);
        Ok(fault.about(self.shards.path()))
    }

    /// Whether a shard, whatever else is wrong with it, holds `tensor`.
    fn holds(&self, number: usize, tensor: &str, stop: StopFlag<'_>) -> bool {
        let holds = |archive: &Archive| archive.header().find(tensor).is_some();
        match self.archives[number].get() {
            Some(archive) => holds(archive),
            None => {
                let opened = self.store.open(&self.shards, number, stop);
                opened.as_ref().is_ok_and(holds)
            }
        }
    }
}

fn count<'h>(headers: impl IntoIterator<Item = &'h Header>) -> Vec<(Dtype, u128)> {
    // Dtypes are ordered as they are in `Dtype::ALL`.
    let mut counts = BTreeMap::new();
    for header in headers {
        for entry in header.entries() {
            // A header is proven: the product fits into 64 bits.
            let count: u64 = entry.shape.iter().product();
            *counts.entry(entry.dtype).or_default() += u128::from(count);
        }
    }
    counts.into_iter().collect()
}
