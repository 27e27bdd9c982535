//! An open file: its header, and its bytes when they are asked for.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ingot_format::{
    Entry, Header, HeaderWindow, Index, Limits, Selection, SelectionError, StopFlag, to_u64, to_usize,
};

use super::backend::{Choice, choose, threads_of_environment};
use super::file::FileSource;
use super::given::{Given, Source};
use super::headers::Head;
use super::local::{LocalFile, Reopen, with_room};
use super::mapped::MappedSource;
use super::read_at::{ReadAt, read_exactly};
use crate::disk::{Facts, facts_at, open_for_reading};
use crate::error::{Error, Failure, InFile, unopened};
use crate::memory::{Region, alignment, mapped_files};
use crate::options::{BACKEND_VARIABLE, Backend, OpenOptions};

/// The name of bytes in memory where a file has its path.
pub(crate) const BUFFER: &str = "<buffer>";

/// An open file. Any number of threads may use it at once.
///
/// ```
/// # let path = std::env::temp_dir().join(format!("ingot-archive-{}.safetensors", std::process::id()));
/// # std::fs::write(&path, b"\x39\0\0\0\0\0\0\0{\"bias\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}12345678").unwrap();
/// use ingot_io::{Archive, OpenOptions};
/// let archive = Archive::open(&path, &OpenOptions::default())?;
/// let bias = archive.header().get("bias").unwrap();
/// assert_eq!(bias.shape, [2]);
/// assert_eq!(archive.read("bias")?.to_vec(), b"12345678");
/// # std::fs::remove_file(&path).unwrap();
/// # Ok::<(), ingot_io::Error>(())
/// ```
#[derive(Debug)]
pub struct Archive {
    path: Option<PathBuf>,
    header: Header,
    bytes: Storage,
    backend: &'static str,
    why: Cow<'static, str>,
}

/// Where the bytes of an archive are.
#[derive(Debug)]
enum Storage {
    File(LocalFile),
    Mapped(MappedSource),
    Elsewhere(Box<dyn ReadAt>),
}

impl Archive {
    /// Opens a file and proves its header. No tensor is read.
    ///
    /// # Errors
    /// [`Error::Open`] with the system's error; that the path is a directory, or no regular file; [`Error::Header`]
    /// with the rule that the header breaks; [`Error::Read`] when reading the header fails;
    /// [`Error::UnknownBackend`] and [`Error::InvalidThreads`] when the environment asks for what there is not.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Archive, Error> {
        Archive::open_as(path, options, false, None)
    }

    /// As [`Archive::open`], for one of perhaps many.
    pub(crate) fn open_lent(path: &Path, options: &OpenOptions) -> Result<Archive, Error> {
        Archive::open_as(path, options, true, None)
    }

    /// As [`Archive::open`], for one of perhaps many that `is_lent`, and for one of which the `head` may be known.
    pub(crate) fn open_as(
        path: &Path,
        options: &OpenOptions,
        is_lent: bool,
        head: Option<&Head>,
    ) -> Result<Archive, Error> {
        let file = if is_lent {
            lent_source(path)?
        } else {
            LocalFile::kept(open_source(path)?)
        };
        Archive::of_file(file, path.to_owned(), options, head)
    }

    /// As [`Archive::open`], for a file that is open. `path` is for the errors. The header is not read if `head` is known and
    /// is of this version.
    pub(crate) fn of_file(
        file: LocalFile,
        path: PathBuf,
        options: &OpenOptions,
        head: Option<&Head>,
    ) -> Result<Archive, Error> {
        let header = match head.filter(|head| head.is_of(&file)) {
            Some(head) => {
                let header = Header::parse(&head.bytes, head.nbytes, &options.limits);
                header.map_err(|fault| Error::Header {
                    path: Some(path.clone()),
                    fault,
                })?
            }
            None => read_header(&file, Some(&path), &options.limits)?,
        };
        threads_of_environment()?;
        let variable = std::env::var(BACKEND_VARIABLE).ok();
        let choice = choose(
            options.backend,
            variable.as_deref(),
            file.remote(),
            mapped_files(),
        )?;
        let (bytes, choice) = attach(file, options.backend, choice).map_err(unopened(&path))?;
        Ok(Archive {
            path: Some(path),
            header,
            bytes,
            backend: choice.backend.name(),
            why: choice.why,
        })
    }

    /// Opens the file that a [`Source`] reads, such as bytes in memory ([`MemorySource`](crate::MemorySource)).
    ///
    /// # Errors
    /// [`Error::Header`] and [`Error::Read`], as for [`Archive::open`].
    pub fn from_source(source: impl Source + 'static, limits: &Limits) -> Result<Archive, Error> {
        let source = Box::new(Given::new(source));
        Archive::from_reader(source, None, "source", "bytes that a `Source` reads", limits)
    }

    /// As [`Archive::from_source`], for readers that can do more. Errors name `path`; the archive reports `backend` and
    /// `why`.
    ///
    /// # Errors
    /// As [`Archive::from_source`].
    #[doc(hidden)]
    pub fn from_reader(
        source: Box<dyn ReadAt>,
        path: Option<PathBuf>,
        backend: &'static str,
        why: &'static str,
        limits: &Limits,
    ) -> Result<Archive, Error> {
        let header = read_header(&*source, path.as_deref(), limits)?;
        Ok(Archive::elsewhere(path, header, source, backend, why))
    }

    /// An open source that is no file of this machine, and its header.
    pub(crate) fn elsewhere(
        path: Option<PathBuf>,
        header: Header,
        source: Box<dyn ReadAt>,
        backend: &'static str,
        why: &'static str,
    ) -> Archive {
        Archive {
            path,
            header,
            bytes: Storage::Elsewhere(source),
            backend,
            why: Cow::Borrowed(why),
        }
    }

    /// The same, with a reason before that for how it is read.
    #[cfg(feature = "remote")]
    pub(crate) fn because(self, reason: &str) -> Archive {
        Archive {
            why: format!("{reason}: {}", self.why).into(),
            ..self
        }
    }

    /// The file, or the URL without its secrets; `None` for other sources.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// What the file holds.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    pub(crate) fn source(&self) -> &dyn ReadAt {
        match &self.bytes {
            Storage::File(file) => file,
            Storage::Mapped(mapped) => mapped,
            Storage::Elsewhere(source) => &**source,
        }
    }

    /// The file of this machine that the bytes are in, if they are in one.
    pub(crate) fn local(&self) -> Option<&LocalFile> {
        match &self.bytes {
            Storage::File(file) => Some(file),
            Storage::Mapped(mapped) => Some(mapped.file()),
            Storage::Elsewhere(_) => None,
        }
    }

    /// Returns how the bytes are read: `mmap`, `pread` or `source`, or the scheme of a URL.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.backend
    }

    /// Why they are read like this.
    #[must_use]
    pub fn why(&self) -> &str {
        &self.why
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`], with the name that is most like it; [`Error::Header`] of a tensor that is not sound, where
    /// the file was opened with [`Leniency::Salvage`](ingot_format::Leniency::Salvage).
    pub fn find(&self, name: &str) -> Result<Tensor<'_>, Error> {
        let found = self.header.find(name).and_then(|number| self.tensor(number));
        found.ok_or_else(|| match self.header.left_out(name) {
            Some(fault) => Error::Header {
                path: self.path.clone(),
                fault: fault.clone(),
            },
            None => Error::UnknownTensor {
                path: self.path.clone(),
                tensor: name.to_owned(),
                nearest: nearest(self.header.names(), name),
            },
        })
    }

    /// The tensors, in the order of the data.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        let entries = self.header.entries().enumerate();
        entries.map(|(number, entry)| Tensor {
            archive: self,
            number,
            entry,
        })
    }

    /// The tensor at this place in the header's order of data.
    #[must_use]
    pub fn tensor(&self, number: usize) -> Option<Tensor<'_>> {
        let entry = self.header.entry(number)?;
        Some(Tensor {
            archive: self,
            number,
            entry,
        })
    }

    /// The bytes `begin..end` of the data section where they lie in the mapping, if the file is mapped.
    fn view(&self, begin: u64, end: u64) -> Option<Region> {
        let memory = Arc::clone(self.source().memory()?);
        let at = to_usize(self.header.data_start() + begin)?;
        Some(Region::new(memory, at, to_usize(end - begin)?))
    }

    /// What another process needs to open the file without reading it. `None` where that reads it as fast.
    ///
    /// # Errors
    /// [`Error::Read`]; [`Error::Changed`] when it is no longer what was opened; [`Error::Interrupted`].
    pub(crate) fn head(&self, stop: StopFlag<'_>) -> Result<Option<Head>, Error> {
        let source = self.source();
        let Some(version) = source.version() else {
            return Ok(None);
        };
        let mut bytes = vec![0; size(self.header.data_start())];
        read_exactly(source, 0, &mut bytes, stop).map_err(|failure| self.explain(failure))?;
        self.check_unchanged()?;
        Ok(Some(Head {
            nbytes: source.nbytes(),
            version,
            bytes,
        }))
    }

    /// The version of the file that was opened, and whether other machines see the file too; `None` for what is no file
    /// of this machine.
    pub(crate) fn identity(&self) -> Option<(String, bool)> {
        match &self.bytes {
            Storage::File(file) => Some(file.identity()),
            Storage::Mapped(mapped) => Some(mapped.file().identity()),
            Storage::Elsewhere(_) => None,
        }
    }

    /// Fails when the file is no longer what was opened.
    pub(crate) fn check_unchanged(&self) -> Result<(), Error> {
        check_unchanged(self.source(), self.path())
    }

    /// Adds path and tensor to what went wrong below.
    pub(crate) fn explain(&self, failure: Failure) -> Error {
        let tensor = match &failure {
            Failure::Read { position, .. } => match self.check_unchanged() {
                // The likeliest reason for a short read, and the more useful thing to say.
                Err(changed @ Error::Changed { .. }) => return changed,
                _ => self.tensor_at(*position),
            },
            _ => None,
        };
        failure.about(self.path(), tensor.map(|entry| entry.name))
    }

    /// The tensor that has bytes at `position` in the file.
    fn tensor_at(&self, position: u64) -> Option<Entry<'_>> {
        let begin = position.checked_sub(self.header.data_start())?;
        self.header
            .entries()
            .find(|entry| entry.begin <= begin && begin < entry.end)
    }
}

/// The file at `path`, to be read by position.
pub(crate) fn open_source(path: &Path) -> Result<FileSource, Error> {
    let source = with_room(|| open_for_reading(path)).and_then(FileSource::new);
    source.map_err(unopened(path))
}

/// The same of one of perhaps many.
pub(crate) fn lent_source(path: &Path) -> Result<LocalFile, Error> {
    Ok(LocalFile::lent(open_source(path)?, Box::new(ByPath::new(path))))
}

/// A file that is opened again by its path, wherever the process has gone since.
#[derive(Debug)]
struct ByPath(PathBuf);

impl ByPath {
    fn new(path: &Path) -> ByPath {
        ByPath(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
    }
}

impl Reopen for ByPath {
    fn reopen(&self) -> io::Result<File> {
        open_for_reading(&self.0)
    }

    fn look(&self) -> io::Result<Facts> {
        facts_at(&self.0)
    }
}

/// Fails when `source` is no longer what was opened. `path` is for the errors.
pub(crate) fn check_unchanged(source: &dyn ReadAt, path: Option<&Path>) -> Result<(), Error> {
    let nbytes_at_open = source.nbytes();
    match source.nbytes_now() {
        Ok(Some(now)) if now == nbytes_at_open => Ok(()),
        Ok(nbytes_now) => Err(Error::Changed {
            path: path.map(Path::to_owned),
            nbytes_at_open,
            nbytes_now,
        }),
        Err(source) => Err(Error::Read {
            path: path.map(Path::to_owned),
            tensor: None,
            position: 0,
            expected: nbytes_at_open,
            found: 0,
            source: Some(source),
        }),
    }
}

/// A tensor of an open file.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    archive: &'a Archive,
    number: usize,
    entry: Entry<'a>,
}

impl<'a> Tensor<'a> {
    /// What the header says of it.
    #[must_use]
    pub fn entry(&self) -> &Entry<'a> {
        &self.entry
    }

    /// Its place in the header's order of data.
    #[must_use]
    pub fn number(&self) -> usize {
        self.number
    }

    /// The file that it is in.
    #[must_use]
    pub fn archive(&self) -> &'a Archive {
        self.archive
    }

    /// All of it where it lies in the mapping, if the file is mapped and its elements are aligned there. Whoever touches
    /// it has to have found the file unchanged before.
    pub(crate) fn mapped(&self) -> Option<Region> {
        let view = self.archive.view(self.entry.begin, self.entry.end)?;
        view.aligned_to(alignment(self.entry.dtype)).then_some(view)
    }

    /// Where it begins in the file.
    pub(crate) fn start(&self) -> u64 {
        self.archive.header.data_start() + self.entry.begin
    }

    pub(crate) fn selection(&self, index: &[Index]) -> Result<Selection, Error> {
        let entry = &self.entry;
        Selection::new(entry.dtype, entry.shape, index).map_err(|fault| self.misindexed(fault))
    }

    /// That an index does not fit.
    pub(crate) fn misindexed(&self, fault: SelectionError) -> Error {
        Error::Slice {
            path: self.archive.path.clone(),
            tensor: self.entry.name.to_owned(),
            shape: self.entry.shape.to_owned(),
            fault,
        }
    }

    /// Where a selection of it lies in the mapping, if it lies together there, on an address for its elements.
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

/// Makes it so that `file` is read as was chosen, where `asked` is what the caller wants.
fn attach(file: LocalFile, asked: Backend, choice: Choice) -> io::Result<(Storage, Choice)> {
    if choice.backend == Backend::Pread {
        return Ok((Storage::File(file), choice));
    }
    match MappedSource::new(file) {
        Ok(mapped) => Ok((Storage::Mapped(mapped), choice)),
        // Address space may be limited, or the file system unable to map.
        Err((file, fault)) if asked == Backend::Auto => {
            let why = format!("mapping the file failed: {fault}").into();
            Ok((
                Storage::File(file),
                Choice {
                    backend: Backend::Pread,
                    why,
                },
            ))
        }
        Err((_, fault)) => Err(fault),
    }
}

/// The one of `names` that is most like `name`: equal but for case and separators, or with the longest
/// common end, because prefixes such as `model.` are what most often differs.
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
        let same_end = candidate
            .bytes()
            .rev()
            .zip(wanted.bytes().rev())
            .take_while(|(a, b)| a == b)
            .count();
        let same_start = candidate
            .bytes()
            .zip(wanted.bytes())
            .take_while(|(a, b)| a == b)
            .count();
        same_end.max(same_start)
    };
    let best = names
        .map(|name| (likeness(name), name))
        .max_by_key(|pair| pair.0)?;
    // Less than half in common is no help.
    (2 * best.0 >= wanted.len().max(1)).then(|| best.1.to_owned())
}

/// Bytes that the first read takes, and those of a long header that lie in memory at a time. Most headers are shorter,
/// so that it is the only read; and it is little enough to stay in a core's cache.
const START_NBYTES: u64 = 64 << 10;

/// Bytes of the length before the header.
const PREFIX_NBYTES: usize = 8;

/// Reads the header into memory of our own, never from a mapping: what was checked cannot change afterwards.
/// `path` is for the errors.
pub(crate) fn read_header(
    source: &dyn ReadAt,
    path: Option<&Path>,
    limits: &Limits,
) -> Result<Header, Error> {
    let in_file = |fault| Error::Header {
        path: path.map(Path::to_owned),
        fault,
    };
    let unread = |failure: Failure| failure.about(path, None);
    let mut start = vec![0; size(source.nbytes().min(START_NBYTES))];
    read_exactly(source, 0, &mut start, StopFlag::never()).map_err(unread)?;
    let head_nbytes = Header::head_nbytes(&start, source.nbytes(), limits).map_err(in_file)?;
    if head_nbytes > to_u64(start.len()) {
        // Each window is a read, and where it is beginning one that costs, one more read for all of it costs less.
        if source.gap_nbytes() == 0
            && let Some(header) = read_through_window(source, head_nbytes, &mut start).map_err(unread)?
        {
            return Ok(header);
        }
        // The window was written over.
        start.resize(size(head_nbytes), 0);
        read_exactly(source, 0, &mut start, StopFlag::never()).map_err(unread)?;
    }
    Header::parse(&start, source.nbytes(), limits).map_err(in_file)
}

/// Reads a header that is as common writers write it, without ever holding all of it: half of the time that opening
/// 100,000 tensors took went into fresh pages for its 13 MB. `window` holds the start of the file, and then one part
/// of the header after the other. `None` means that the header has to be read whole.
fn read_through_window(
    source: &dyn ReadAt,
    head_nbytes: u64,
    window: &mut [u8],
) -> Result<Option<Header>, Failure> {
    let mut header = HeaderWindow::new(head_nbytes, source.nbytes());
    let (mut position, mut begin, mut end) = (to_u64(window.len()), PREFIX_NBYTES, window.len());
    loop {
        match header.feed(&window[begin..end]) {
            None | Some(0) => return Ok(None),
            Some(taken) => begin += taken,
        }
        if begin == end && position == head_nbytes {
            return Ok(header.finish());
        }
        window.copy_within(begin..end, 0);
        (begin, end) = (0, end - begin);
        let more = size(head_nbytes - position).min(window.len() - end);
        read_exactly(source, position, &mut window[end..end + more], StopFlag::never())?;
        position += to_u64(more);
        end += more;
    }
}

/// A size that memory can have; one that it cannot have fails when it is asked for.
fn size(nbytes: u64) -> usize {
    to_usize(nbytes).unwrap_or(usize::MAX)
}

/// Which tensor, of those in several files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId {
    /// The number of the file.
    pub file: usize,
    /// The place of the tensor in the order of that file's data.
    pub number: usize,
}

/// Archives, each of them once, in the order in which tensors of them come.
#[derive(Debug, Default)]
pub(crate) struct Files<'a> {
    archives: Vec<&'a Archive>,
}

impl<'a> From<Vec<&'a Archive>> for Files<'a> {
    fn from(archives: Vec<&'a Archive>) -> Files<'a> {
        Files { archives }
    }
}

impl<'a> Files<'a> {
    /// The files of `tensors`, and which tensor each of them is.
    pub(crate) fn of(tensors: impl Iterator<Item = Tensor<'a>>) -> (Files<'a>, Vec<TensorId>) {
        let mut files = Files::default();
        // Archives do not move while tensors of them are there.
        let mut numbers: BTreeMap<*const Archive, usize> = BTreeMap::new();
        let mut last: Option<(&Archive, usize)> = None;
        let mut id = |tensor: Tensor<'a>| {
            let archive = tensor.archive();
            let file = match last {
                Some((same, file)) if std::ptr::eq(same, archive) => file,
                _ => *numbers.entry(std::ptr::from_ref(archive)).or_insert_with(|| {
                    files.archives.push(archive);
                    files.archives.len() - 1
                }),
            };
            last = Some((archive, file));
            let number = tensor.number();
            TensorId { file, number }
        };
        let ids = tensors.map(&mut id).collect();
        (files, ids)
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

    /// Fails when one is no longer what was opened.
    pub(crate) fn check_unchanged(&self) -> Result<(), Error> {
        self.archives
            .iter()
            .try_for_each(|archive| archive.check_unchanged())
    }

    /// Adds path and tensor to what went wrong below.
    pub(crate) fn explain(&self, fault: impl Into<InFile>) -> Error {
        let InFile { file, failure } = fault.into();
        match (file, &*self.archives) {
            (Some(file), archives) if file < archives.len() => archives[file].explain(failure),
            (None, [only]) => only.explain(failure),
            _ => failure.into(),
        }
    }
}
