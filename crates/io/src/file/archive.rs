//! An open file of tensors.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ingot_format::{Entry, Header, Index, Selection, SelectionError, StopFlag, saturating_usize, to_usize};

use super::local::LocalFile;
use super::source::{OpenSource, ReadAt, Source, read_exactly, read_header};
use crate::error::{Error, Failure, InFile};
use crate::memory::{Region, alignment};
use crate::options::{OpenOptions, ShardHeader, THREADS_VARIABLE};

/// The path in errors about bytes in memory.
pub(crate) const BUFFER: &str = "<buffer>";

/// An open file. Any number of threads may use it at once.
///
/// ```
/// # let path = std::env::temp_dir().join(format!("ingot-archive-{}.safetensors", std::process::id()));
/// # std::fs::write(&path,
/// b"\x39\0\0\0\0\0\0\0{\"bias\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}12345678").unwrap(); use
/// ingot_io::{Archive, OpenOptions}; let archive = Archive::open(&path, &OpenOptions::default())?; let bias =
/// archive.header().get("bias").unwrap(); assert_eq!(bias.shape, [2]); assert_eq!(archive.read("bias")?.to_vec(), b"12345678");
/// # std::fs::remove_file(&path).unwrap();
/// # Ok::<(), ingot_io::Error>(())
/// ```
#[derive(Debug)]
pub struct Archive {
    pub(crate) path: Option<PathBuf>,
    pub(crate) header: Header,
    pub(crate) origin: Origin,
    pub(crate) backend: &'static str,
    pub(crate) why: Cow<'static, str>,
}

impl Archive {
    /// Opens a file and proves its header. No tensor is read.
    ///
    /// # Errors
    /// [`Failure::Open`] with the system's error, also if the path is a directory or no regular file; [`Failure::Header`]
    /// with the rule that the header breaks; [`Failure::Read`] if reading the header fails; [`Failure::UnknownBackend`] and
    /// [`Failure::InvalidThreads`] if a variable of the environment is invalid.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Archive, Error> {
        let file = Origin::Local(Arc::new(LocalFile::open(path)?));
        Archive::of(file, Some(path), options, None)
    }

    /// Opens the file of a [`Source`], such as bytes in memory ([`MemorySource`](crate::MemorySource)). Only files on this
    /// machine have a choice of backends.
    ///
    /// # Errors
    /// [`Failure::Header`] and [`Failure::Read`], as for [`Archive::open`].
    pub fn from_source(source: impl Source + 'static, options: &OpenOptions) -> Result<Archive, Error> {
        let source = Origin::Other(Box::new(OpenSource::new(source)));
        Archive::of(source, None, options, None)
    }

    /// Open the file of any source of bytes, as [`Archive::open`] does. Errors name `path`. The header is not read if another
    /// process read it from this version of the file.
    ///
    /// # Errors
    /// As [`Archive::open`].
    #[doc(hidden)]
    pub fn of(
        origin: Origin,
        path: Option<&Path>,
        options: &OpenOptions,
        known: Option<&ShardHeader>,
    ) -> Result<Archive, Error> {
        let source = origin.source();
        let is_same = |known: &&ShardHeader| {
            known.nbytes == source.nbytes() && source.version().as_ref() == Some(&known.version)
        };
        let header = match known.filter(is_same) {
            Some(known) => {
                let header = Header::parse(&known.bytes, known.nbytes, &options.limits);
                header.map_err(|fault| Failure::Header(fault).about(path, None))?
            }
            None => read_header(source, path, &options.limits)?,
        };
        let (backend, why) = match &origin {
            Origin::Local(file) => {
                threads_of_environment()?;
                file.attach(options.backend, path.unwrap_or(Path::new(BUFFER)))?
            }
            Origin::Other(source) => {
                let (backend, why) = source.backend();
                (backend, why.into())
            }
        };
        Ok(Archive {
            path: path.map(Path::to_owned),
            header,
            origin,
            backend,
            why,
        })
    }

    /// Return the open file of a source whose header is known. `path` is for the errors.
    pub(crate) fn of_header(origin: Origin, path: Option<&Path>, header: Header) -> Archive {
        let (backend, why) = origin.source().backend();
        Archive {
            path: path.map(Path::to_owned),
            header,
            origin,
            backend,
            why: why.into(),
        }
    }

    /// Returns the path of the file, or the URL without its secrets; `None` for other sources.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Return the path, or `<buffer>` for a source without one.
    #[doc(hidden)]
    #[must_use]
    pub fn path_or_buffer(&self) -> &Path {
        self.path().unwrap_or(Path::new(BUFFER))
    }

    /// Returns the header.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    pub(crate) fn source(&self) -> &dyn ReadAt {
        self.origin.source()
    }

    /// Return the file of this machine that holds the bytes, if there is one.
    pub(crate) fn local(&self) -> Option<&LocalFile> {
        match &self.origin {
            Origin::Local(file) => Some(file),
            Origin::Other(_) => None,
        }
    }

    /// Returns how the bytes are read: `mmap`, `pread` or `source`, or the scheme of a URL.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.backend
    }

    /// Returns the reason for the backend.
    #[must_use]
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Returns the tensor `name`.
    ///
    /// # Errors
    /// [`Failure::UnknownTensor`], with the most similar name; [`Failure::Header`] for a tensor that breaks a rule, in a file
    /// that was opened with [`Leniency::Salvage`](ingot_format::Leniency::Salvage).
    pub fn find(&self, name: &str) -> Result<Tensor<'_>, Error> {
        let found = self.header.find(name).and_then(|number| self.tensor(number));
        found.ok_or_else(|| self.unknown(name))
    }

    /// Return the error for a name that no tensor has.
    pub(crate) fn unknown(&self, name: &str) -> Error {
        match self.header.left_out(name) {
            Some(fault) => Failure::Header(fault.clone()).about(self.path(), None),
            None => {
                let nearest = nearest(self.header.names(), name);
                Failure::UnknownTensor { nearest }.about(self.path(), Some(name))
            }
        }
    }

    /// Returns the tensors in the order of their data.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        let entries = self.header.entries().enumerate();
        entries.map(|(number, entry)| self.alias(number, entry, None))
    }

    /// Returns tensor `number` in the order of the data.
    #[must_use]
    pub fn tensor(&self, number: usize) -> Option<Tensor<'_>> {
        let entry = self.header.entry(number)?;
        Some(self.alias(number, entry, None))
    }

    /// Return the tensor that `entry` describes: stored tensor `number` under any name, or a part of it. Its elements are
    /// `strides` apart, or contiguous if that is `None`.
    pub(crate) fn alias<'a>(
        &'a self,
        number: usize,
        entry: Entry<'a>,
        strides: Option<&'a [u64]>,
    ) -> Tensor<'a> {
        Tensor {
            archive: self,
            number,
            entry,
            strides,
        }
    }

    /// Return bytes `begin..end` of the data section as a view of the mapping, if the file is mapped.
    pub(crate) fn view(&self, begin: u64, end: u64) -> Option<Region> {
        let memory = Arc::clone(self.source().memory()?);
        let at = to_usize(self.header.data_start() + begin)?;
        Some(Region::new(memory, at, to_usize(end - begin)?))
    }

    /// Read the header for other processes. `None` if they read it as fast themselves.
    ///
    /// # Errors
    /// [`Failure::Read`]; [`Failure::Changed`] if the file is no longer the one that was opened; [`Failure::Interrupted`].
    pub(crate) fn shard_header(&self, stop: StopFlag<'_>) -> Result<Option<ShardHeader>, Error> {
        let Some(version) = self.source().version() else {
            return Ok(None);
        };
        let mut bytes = vec![0; saturating_usize(self.header.data_start())];
        read_exactly(self.source(), 0, &mut bytes, stop).map_err(|failure| self.explain(failure))?;
        self.check_unchanged()?;
        Ok(Some(ShardHeader {
            nbytes: self.source().nbytes(),
            version,
            bytes,
        }))
    }

    /// Return text that differs between versions of the file, and whether other machines see the same file. `None` if the
    /// bytes are not in a file of this machine.
    pub(crate) fn identity(&self) -> Option<(String, bool)> {
        self.local().map(LocalFile::identity)
    }

    /// Fail if the file was changed or replaced since it was opened.
    pub(crate) fn check_unchanged(&self) -> Result<(), Error> {
        check_unchanged(self.source(), self.path())
    }

    /// Return the error for a failure of reading, with path and tensor.
    pub(crate) fn explain(&self, failure: Failure) -> Error {
        let tensor = match &failure {
            Failure::Read { position, .. } => match self.check_unchanged() {
                // The most likely reason for a short read, and the more useful message.
                Err(changed) if changed.is_changed() => return changed,
                _ => self.tensor_at(*position),
            },
            _ => None,
        };
        failure.about(self.path(), tensor.map(|entry| entry.name))
    }

    /// Return the tensor with bytes at `position` in the file.
    fn tensor_at(&self, position: u64) -> Option<Entry<'_>> {
        let begin = position.checked_sub(self.header.data_start())?;
        self.header
            .entries()
            .find(|entry| entry.begin <= begin && begin < entry.end)
    }
}

/// Return the value of [`THREADS_VARIABLE`].
pub(crate) fn threads_of_environment() -> Result<Option<NonZeroUsize>, Error> {
    match std::env::var(THREADS_VARIABLE) {
        Ok(found) if !found.is_empty() => found
            .parse()
            .map(Some)
            .map_err(|_| Failure::InvalidThreads(found).into()),
        _ => Ok(None),
    }
}

/// Fail if `source` was changed or replaced since it was opened. `path` is for the errors.
pub(crate) fn check_unchanged(source: &dyn ReadAt, path: Option<&Path>) -> Result<(), Error> {
    let nbytes_at_open = source.nbytes();
    let failure = match source.nbytes_now() {
        Ok(Some(now)) if now == nbytes_at_open => return Ok(()),
        Ok(nbytes_now) => Failure::Changed {
            nbytes_at_open,
            nbytes_now,
        },
        Err(source) => Failure::Read {
            position: 0,
            expected: nbytes_at_open,
            found: 0,
            source: Some(source),
        },
    };
    Err(failure.about(path, None))
}

/// The source of the bytes of an [`Archive`].
#[derive(Debug)]
pub enum Origin {
    /// A file of this machine.
    Local(Arc<LocalFile>),
    /// Any other source.
    Other(Box<dyn ReadAt>),
}

impl Origin {
    fn source(&self) -> &dyn ReadAt {
        match self {
            Origin::Local(file) => &**file,
            Origin::Other(source) => &**source,
        }
    }
}

/// A tensor of an open file.
///
/// ```
/// use ingot_io::{Archive, Dtype, MemorySource, OpenOptions, TensorView, serialize};
///
/// let file = serialize([("bias", TensorView::new(Dtype::U8, vec![2], b"ab")?)], None)?;
/// let archive = Archive::from_source(MemorySource::new(file), &OpenOptions::default())?;
/// let bias = archive.find("bias")?;
/// assert_eq!((bias.entry().dtype, bias.entry().shape), (Dtype::U8, &[2][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    archive: &'a Archive,
    number: usize,
    entry: Entry<'a>,
    /// The distance between neighbours along each dimension, in elements. `None` if they are contiguous in C order.
    strides: Option<&'a [u64]>,
}

impl<'a> Tensor<'a> {
    /// Returns its name, dtype, shape and position.
    #[must_use]
    pub fn entry(&self) -> &Entry<'a> {
        &self.entry
    }

    /// Returns its number in the order of the data.
    #[must_use]
    pub fn number(&self) -> usize {
        self.number
    }

    /// Return the distance between neighbours along each dimension, in elements. `None` if the elements are contiguous in C
    /// order, as in every stored tensor.
    #[doc(hidden)]
    #[must_use]
    pub fn strides(&self) -> Option<&'a [u64]> {
        self.strides
    }

    /// Return whether it has all bytes of a stored tensor, and not a part of them.
    pub(crate) fn is_stored(&self) -> bool {
        let range = |entry: &Entry<'_>| (entry.begin, entry.end);
        let stored = self.archive.header.entry(self.number);
        self.strides.is_none() && stored.is_some_and(|stored| range(&stored) == range(&self.entry))
    }

    /// Returns the file that it is in.
    #[must_use]
    pub fn archive(&self) -> &'a Archive {
        self.archive
    }

    /// Return the tensor as a view of the mapping, if the file is mapped and its elements are aligned there. Check that the
    /// file is unchanged before touching the view.
    pub(crate) fn mapped(&self) -> Option<Region> {
        if self.strides.is_some() {
            return None;
        }
        let view = self.archive.view(self.entry.begin, self.entry.end)?;
        view.aligned_to(alignment(self.entry.dtype)).then_some(view)
    }

    /// Fill `dest` with bytes of the file, counted from `begin` of the tensor's first byte on.
    ///
    /// # Errors
    /// [`Failure::Read`]; [`Failure::Changed`]; [`Failure::Interrupted`].
    pub(crate) fn read_at(&self, begin: u64, dest: &mut [u8], stop: StopFlag<'_>) -> Result<(), Error> {
        let read = read_exactly(self.archive.source(), self.start() + begin, dest, stop);
        read.map_err(|failure| self.archive.explain(failure))
    }

    /// Return the position of its first byte in the file.
    pub(crate) fn start(&self) -> u64 {
        self.archive.header.data_start() + self.entry.begin
    }

    pub(crate) fn selection(&self, index: &[Index]) -> Result<Selection, Error> {
        let entry = &self.entry;
        let selection = match self.strides {
            None => Selection::new(entry.dtype, entry.shape, index),
            Some(strides) => Selection::strided(entry.dtype, entry.shape, strides, index),
        };
        selection.map_err(|fault| self.misindexed(fault))
    }

    /// Return the error for an index that does not fit.
    pub(crate) fn misindexed(&self, fault: SelectionError) -> Error {
        Failure::Slice(fault).about(self.archive.path(), Some(self.entry.name))
    }

    /// Return a selection as a view of the mapping, if it is contiguous and aligned there.
    pub(crate) fn view(&self, selection: &Selection) -> Option<Region> {
        let begin = self.entry.begin;
        let view = match selection.span() {
            Some(_) if !selection.is_contiguous() => return None,
            Some(run) => self.archive.view(begin + run.begin, begin + run.end)?,
            None => self.archive.view(begin, begin)?,
        };
        view.aligned_to(alignment(self.entry.dtype)).then_some(view)
    }
}

/// Return the one of `names` that is most similar to `name`: equal except for case and separators, or with the longest
/// common end, because prefixes such as `model.` differ most often.
pub(crate) fn nearest<'n>(names: impl Iterator<Item = &'n str>, name: &str) -> Option<String> {
    let letters = |text: &str| -> String {
        text.chars()
            .filter(|c| c.is_alphanumeric())
            .flat_map(char::to_lowercase)
            .collect()
    };
    let wanted = letters(name);
    let likeness = |candidate: &str| {
        let candidate = letters(candidate);
        let (ours, theirs) = (wanted.bytes(), candidate.bytes());
        let same_end = ours
            .clone()
            .rev()
            .zip(theirs.clone().rev())
            .take_while(|(a, b)| a == b);
        let same_start = ours.zip(theirs).take_while(|(a, b)| a == b);
        same_end.count().max(same_start.count())
    };
    let best = names
        .map(|name| (likeness(name), name))
        .max_by_key(|pair| pair.0)?;
    // A name with less than half in common does not help.
    (2 * best.0 >= wanted.len().max(1)).then(|| best.1.to_owned())
}

/// One of the tensors of several files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId {
    /// The number of the file.
    pub file: usize,
    /// The number of the tensor in the order of that file's data.
    pub number: usize,
}

/// The archives of some tensors, each of them once, in the order of their first tensors.
#[derive(Debug, Default)]
pub(crate) struct Files<'a> {
    archives: Vec<&'a Archive>,
    /// The number of each archive by its address. Archives do not move while they are borrowed.
    numbers: BTreeMap<usize, usize>,
    /// The number that was returned last.
    last: usize,
}

impl<'a> From<Vec<&'a Archive>> for Files<'a> {
    fn from(archives: Vec<&'a Archive>) -> Files<'a> {
        Files {
            archives,
            ..Files::default()
        }
    }
}

impl<'a> Files<'a> {
    /// Return the files of `tensors`, and the number of each tensor in them.
    pub(crate) fn of(tensors: impl Iterator<Item = Tensor<'a>>) -> (Files<'a>, Vec<TensorId>) {
        let mut files = Files::default();
        let id = |tensor: Tensor<'a>| TensorId {
            file: files.number(tensor.archive()),
            number: tensor.number(),
        };
        let ids = tensors.map(id).collect();
        (files, ids)
    }

    /// Return the number of `archive`, which is added if it is new.
    pub(crate) fn number(&mut self, archive: &'a Archive) -> usize {
        // Most tensors are in the same file as the one before.
        let is_last = |last: &&Archive| std::ptr::eq(*last, archive);
        if !self.archives.get(self.last).is_some_and(is_last) {
            let archives = &mut self.archives;
            let number = self.numbers.entry(std::ptr::from_ref(archive).addr());
            self.last = *number.or_insert_with(|| {
                archives.push(archive);
                archives.len() - 1
            });
        }
        self.last
    }

    pub(crate) fn archives(&self) -> &[&'a Archive] {
        &self.archives
    }

    pub(crate) fn headers(&self) -> Vec<&'a Header> {
        self.archives.iter().map(|archive| archive.header()).collect()
    }

    pub(crate) fn sources(&self) -> Vec<&'a dyn ReadAt> {
        self.archives.iter().map(|archive| archive.source()).collect()
    }

    /// Fail if a file was changed or replaced since it was opened.
    pub(crate) fn check_unchanged(&self) -> Result<(), Error> {
        self.archives
            .iter()
            .try_for_each(|archive| archive.check_unchanged())
    }

    /// Return the error for a failure of reading, with path and tensor.
    pub(crate) fn explain(&self, fault: impl Into<InFile>) -> Error {
        let InFile { file, failure } = fault.into();
        match (file, &*self.archives) {
            (Some(file), archives) if file < archives.len() => archives[file].explain(failure),
            (None, [only]) => only.explain(failure),
            _ => failure.into(),
        }
    }
}
