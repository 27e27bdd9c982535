//! A checkpoint of one file or of many, as one handle.

pub(crate) mod aliases;
pub(crate) mod copied;
pub(crate) mod folder;
mod open;
mod shards;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use ingot_format::{Dtype, Format, Header, SHARED_KEY, ShardIndex, natural_order};

pub(crate) use shards::{Shards, Store};

use crate::error::{Error, Failure};
use crate::file::{Archive, BUFFER, Tensor, TensorId, nearest};
use crate::watch::{Unwatched, Watch};
use aliases::{Alias, Aliases};

/// One file, or the shards of an index, as one handle. Any number of threads may use it at once.
///
/// The header of each shard is read when the shard is first needed, and is compared with the index: the shard must hold
/// exactly the tensors that the index names. Calls that need many shards open them in parallel. [`Checkpoint::prepare_all`]
/// opens all of them, and can be cancelled.
///
/// The shards of a directory are opened with the index, so that they are read as they were then. If there are more than 48,
/// each is opened when it is read, and the shards that were opened last stay open. Reading a shard fails with
/// [`Failure::Changed`] if another file has its name by then, or if the file was written to. The only file of a checkpoint
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
    /// The names that are not stored. They are read from all files when a name is not found among the stored names.
    aliases: OnceLock<Aliases>,
    /// The reason for reading these files, before the reason for the backend.
    reason: Option<&'static str>,
    /// The checkpoint that the tensors are computed from.
    inputs: Option<Arc<Checkpoint>>,
}

#[derive(Debug)]
enum Contents {
    File(Box<Archive>),
    Shards(Box<Shards>),
}

impl From<Archive> for Checkpoint {
    fn from(archive: Archive) -> Checkpoint {
        Checkpoint::of(Contents::File(Box::new(archive)))
    }
}

impl Checkpoint {
    /// Return the checkpoint with the reason why these files are read, such as a cache that has them.
    #[cfg(feature = "remote")]
    pub(crate) fn with_reason(self, reason: &'static str) -> Checkpoint {
        Checkpoint {
            reason: Some(reason),
            ..self
        }
    }

    /// Return the checkpoint, whose tensors are computed from `inputs`.
    pub(crate) fn computed_from(self, inputs: Arc<Checkpoint>) -> Checkpoint {
        Checkpoint {
            inputs: Some(inputs),
            ..self
        }
    }

    /// Return the checkpoint of an index.
    pub(crate) fn of_shards(shards: Shards) -> Checkpoint {
        Checkpoint::of(Contents::Shards(Box::new(shards)))
    }

    fn of(files: Contents) -> Checkpoint {
        Checkpoint {
            files,
            aliases: OnceLock::new(),
            reason: None,
            inputs: None,
        }
    }

    /// Return the format of the first file. The format of an index behind a URL is detected from the name of the first shard,
    /// and no shard is opened.
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    #[doc(hidden)]
    pub fn format(&self) -> Result<Format, Error> {
        match &self.files {
            Contents::Shards(shards) if shards.store.backend().is_some() => Ok(shards.format()),
            _ => Ok(self.file(0)?.header().format()),
        }
    }

    /// Return the backend of the first file, and the reason for it. No shard behind a URL is opened.
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    #[doc(hidden)]
    pub fn backend(&self) -> Result<(&'static str, Cow<'_, str>), Error> {
        let known = match &self.files {
            Contents::File(_) => None,
            Contents::Shards(shards) => shards.store.backend(),
        };
        let (backend, why) = match known {
            Some(known) => known,
            None => {
                let first = self.file(0)?;
                (first.backend(), first.why())
            }
        };
        let why = match self.reason {
            Some(reason) => format!("{reason}: {why}").into(),
            None => why.into(),
        };
        Ok((backend, why))
    }

    /// Returns whether a save has replaced the index since it was read: other files may then have the names of the shards.
    /// False for a single file, which stays open, and for files that are not in a directory of this machine.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        if let Some(inputs) = &self.inputs {
            return inputs.is_replaced();
        }
        match &self.files {
            Contents::File(_) => false,
            Contents::Shards(shards) => shards.store.is_replaced(),
        }
    }

    /// Return text that differs between versions of the files, and whether other machines see the same files. `None` if the
    /// bytes are not in files of this machine.
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    #[doc(hidden)]
    pub fn identity(&self) -> Result<Option<(String, bool)>, Error> {
        if let Some(inputs) = &self.inputs {
            return inputs.identity();
        }
        let files = self.all_files()?;
        let identities: Option<Vec<_>> = files.into_iter().map(Archive::identity).collect();
        Ok(identities.map(|all| {
            let is_shared = all.iter().all(|(_, is_shared)| *is_shared);
            let texts: Vec<_> = all.into_iter().map(|(text, _)| text).collect();
            (texts.join("\n"), is_shared)
        }))
    }

    /// Returns the path of the file or the index; `None` for bytes in memory and other sources without a path.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match &self.files {
            Contents::File(archive) => archive.path(),
            Contents::Shards(shards) => Some(shards.path()),
        }
    }

    /// Returns the index, if there is one.
    #[must_use]
    pub fn index(&self) -> Option<&ShardIndex> {
        match &self.files {
            Contents::File(_) => None,
            Contents::Shards(shards) => Some(shards.index()),
        }
    }

    /// Returns the number of files.
    #[must_use]
    pub fn files(&self) -> usize {
        match &self.files {
            Contents::File(_) => 1,
            Contents::Shards(shards) => shards.len(),
        }
    }

    /// Returns the path of file `number`. The files of an index are in the order of their names. `None` for sources without a
    /// path, and if there are fewer files.
    #[must_use]
    pub fn file_path(&self, number: usize) -> Option<PathBuf> {
        match &self.files {
            _ if number >= self.files() => None,
            Contents::File(archive) => archive.path().map(Path::to_owned),
            Contents::Shards(shards) => Some(shards.shard_path(number)),
        }
    }

    /// Returns the name of each file: as the index spells it, or else the last part of its path.
    pub fn file_names(&self) -> impl Iterator<Item = Cow<'_, str>> {
        (0..self.files()).map(|number| match &self.files {
            Contents::File(archive) => {
                let path = archive.path().unwrap_or(Path::new(BUFFER));
                let name = path.file_name().unwrap_or_default();
                name.to_string_lossy()
            }
            Contents::Shards(shards) => Cow::Borrowed(shards.name(number)),
        })
    }

    /// Returns file `number`, and opens it if it is not open.
    ///
    /// # Errors
    /// As [`Archive::open`]; [`Failure::Open`] if there are fewer files; [`Failure::Changed`] if the file was changed or
    /// replaced since the checkpoint was opened; [`Failure::Checkpoint`] if it does not hold exactly the tensors that the
    /// index names.
    pub fn file(&self, number: usize) -> Result<&Archive, Error> {
        match &self.files {
            _ if number >= self.files() => {
                let fault = format!("it has no file {number}: expected less than {}", self.files());
                let fault = io::Error::new(io::ErrorKind::InvalidInput, fault);
                Err(Failure::Open(fault).about(self.path(), None))
            }
            Contents::File(archive) => Ok(archive),
            Contents::Shards(shards) => shards.shard(number),
        }
    }

    /// Returns all files. Files that are not open are opened in parallel, and the first failure is returned.
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    pub fn all_files(&self) -> Result<Vec<&Archive>, Error> {
        self.prepare_all(&Unwatched)?;
        (0..self.files()).map(|number| self.file(number)).collect()
    }

    /// Opens all files in parallel, so that later calls do not wait for it.
    ///
    /// # Errors
    /// As [`Checkpoint::file`]; [`Failure::Interrupted`].
    pub fn prepare_all(&self, watch: &dyn Watch) -> Result<(), Error> {
        self.open_files(&(0..self.files()).collect::<Vec<_>>(), watch)
    }

    /// Open the files that hold these tensors, and return their numbers.
    fn files_of(&self, names: &[&str], watch: &dyn Watch) -> Result<Vec<usize>, Error> {
        let files = names.iter().map(|name| self.file_of(name, watch));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let mut needed = files.clone();
        needed.sort_unstable();
        needed.dedup();
        self.open_files(&needed, watch)?;
        Ok(files)
    }

    /// Return the files that are open.
    pub(crate) fn opened(&self) -> Vec<&Archive> {
        match &self.files {
            Contents::File(archive) => vec![archive],
            Contents::Shards(shards) => shards.opened().collect(),
        }
    }

    fn open_files(&self, numbers: &[usize], watch: &dyn Watch) -> Result<(), Error> {
        match &self.files {
            Contents::File(_) => Ok(()),
            Contents::Shards(shards) => shards.open(numbers, watch),
        }
    }

    /// Returns the number of stored tensors.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.files {
            Contents::File(archive) => archive.header().len(),
            Contents::Shards(shards) => shards.index().len(),
        }
    }

    /// Returns whether no tensor is stored.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return whether a tensor is stored under this name. [`Checkpoint::find`] also finds aliases.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        match &self.files {
            Contents::File(archive) => archive.header().find(name).is_some(),
            Contents::Shards(shards) => shards.index().find(name).is_some(),
        }
    }

    /// Return the aliases: names in the metadata of the files (`ingot.shared`) of tensors that are stored under another
    /// name, or are parts of stored tensors.
    ///
    /// # Errors
    /// As [`Checkpoint::file`]; [`Failure::Shared`]; [`Failure::Interrupted`].
    #[doc(hidden)]
    pub fn aliases(&self, watch: &dyn Watch) -> Result<&[Alias], Error> {
        Ok(&self.table(watch)?.all)
    }

    /// Return whether this is an alias. A broken record has none; reading by a name that is not stored reports it.
    ///
    /// # Errors
    /// As [`Checkpoint::file`]; [`Failure::Interrupted`].
    #[doc(hidden)]
    pub fn is_alias(&self, name: &str, watch: &dyn Watch) -> Result<bool, Error> {
        match self.table(watch) {
            Err(fault) if matches!(fault.failure(), Failure::Shared(_)) => Ok(false),
            table => Ok(table?.id(name).is_some()),
        }
    }

    fn table(&self, watch: &dyn Watch) -> Result<&Aliases, Error> {
        if let Some(known) = self.aliases.get() {
            return Ok(known);
        }
        self.prepare_all(watch)?;
        let files = self.all_files()?;
        let has_record = |file: &&Archive| file.header().text(SHARED_KEY).is_some();
        let found = if files.iter().any(has_record) {
            Aliases::of(&files)?
        } else {
            Aliases::default()
        };
        Ok(self.aliases.get_or_init(|| found))
    }

    /// Returns the names of the stored tensors in byte order.
    #[must_use]
    pub fn names_by_name(&self) -> Vec<&str> {
        match &self.files {
            Contents::File(archive) => archive.header().names_by_name().collect(),
            Contents::Shards(shards) => shards.index().names_by_name().collect(),
        }
    }

    /// Returns all tensors in the order of the data, file after file.
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

    /// Returns all tensors in the [natural order](natural_order) of their names.
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    pub fn all_in_natural_order(&self) -> Result<Vec<Tensor<'_>>, Error> {
        let mut tensors = self.all()?;
        tensors.sort_by(|one, other| natural_order(one.entry().name, other.entry().name));
        Ok(tensors)
    }

    /// Returns the tensor `name`. An alias (the metadata key `ingot.shared`) returns its tensor, or its part of a tensor.
    ///
    /// # Errors
    /// [`Failure::UnknownTensor`], with the most similar name, and as [`Checkpoint::file`]. If no tensor is stored under the
    /// name, all files are opened, and [`Failure::Shared`] reports a broken record of aliases.
    pub fn find(&self, name: &str) -> Result<Tensor<'_>, Error> {
        self.tensor(self.id(name)?)
    }

    /// Returns the tensors of these names, and opens their files in parallel.
    ///
    /// # Errors
    /// As [`Checkpoint::find`]; [`Failure::Interrupted`].
    pub fn find_all(&self, names: &[&str], watch: &dyn Watch) -> Result<Vec<Tensor<'_>>, Error> {
        // A checkpoint without an index has only one file.
        let files = match self.index() {
            Some(_) => self.files_of(names, watch)?,
            None => Vec::new(),
        };
        let mut found = Vec::with_capacity(names.len());
        // Names are usually in the order of the data, and need no search then.
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

    /// Returns the number of the file that holds the tensor `name`. If no tensor is stored under the name, all files are opened.
    /// The only file of a checkpoint without an index may lack the tensor.
    ///
    /// # Errors
    /// [`Failure::UnknownTensor`] of a checkpoint with an index, and as [`Checkpoint::aliases`].
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

    /// Return the error for a name that is neither stored nor an alias.
    fn unknown(&self, name: &str) -> Error {
        let index = match &self.files {
            Contents::File(archive) => return archive.unknown(name),
            Contents::Shards(shards) => shards.index(),
        };
        let nearest = nearest(index.entries().map(|entry| entry.0), name);
        Failure::UnknownTensor { nearest }.about(self.path(), Some(name))
    }

    /// Return the file and the number of the tensor `name`.
    ///
    /// # Errors
    /// As [`Checkpoint::find`].
    #[doc(hidden)]
    pub fn id(&self, name: &str) -> Result<TensorId, Error> {
        let stored = match &self.files {
            Contents::File(archive) => archive.header().find(name).map(|number| (0, number)),
            Contents::Shards(shards) => match shards.index().find(name) {
                Some(at) => {
                    let file = shards.index().entry(at).1;
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

    /// Return the tensor that [`Checkpoint::id`] found.
    ///
    /// # Errors
    /// As [`Checkpoint::file`]; [`Failure::UnknownTensor`] if the file has no tensor of this number; [`Failure::Shared`] for
    /// an alias that cannot be read by itself.
    #[doc(hidden)]
    pub fn tensor(&self, id: TensorId) -> Result<Tensor<'_>, Error> {
        let file = self.file(id.file)?;
        if let Some(tensor) = file.tensor(id.number) {
            return Ok(tensor);
        }
        let alias = self.aliases.get().and_then(|known| known.tensor(file, id.number));
        alias.unwrap_or_else(|| {
            let name = format!("#{}", id.number);
            Err(Failure::UnknownTensor { nearest: None }.about(file.path(), Some(&name)))
        })
    }

    /// Returns the total of bytes in the index and the real total, if they differ. `None` until all shards are open.
    #[must_use]
    pub fn wrong_total(&self) -> Option<(u64, u64)> {
        let Contents::Shards(shards) = &self.files else {
            return None;
        };
        let (total, found) = (shards.index().total_nbytes()?, shards.data_nbytes()?);
        (found != total).then_some((total, found))
    }

    /// Returns the number of stored elements of each dtype; a scalar counts as one. In the order of [`Dtype::ALL`], without
    /// the dtypes that no tensor has.
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    pub fn parameter_count(&self) -> Result<Vec<(Dtype, u128)>, Error> {
        Ok(count(self.all_files()?.into_iter().map(Archive::header)))
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
