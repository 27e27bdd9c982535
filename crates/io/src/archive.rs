//! An open file: its header, and its bytes when they are asked for.

use std::borrow::Cow;
use std::fs::{File, OpenOptions as FileOptions};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ingot_format::{Entry, Header, Index, Limits, Selection, to_usize};

use crate::backend::{BACKEND_VARIABLE, Backend, Choice, choose};
use crate::block::Block;
use crate::error::Error;
use crate::execute::{ReadOptions, execute, execute_owned};
use crate::failure::{Failure, size};
use crate::head::read_header;
use crate::part::Part;
use crate::plan::{self, Place, Plan};
use crate::region::Region;
use crate::source::{FileSource, MappedSource, Memory, Source};
use crate::warm::warm;
use crate::watch::{Unwatched, Watch};

/// How to open a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// How its bytes are read.
    pub backend: Backend,
    /// What headers are taken.
    pub limits: Limits,
}

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
    source: Box<dyn Source>,
    backend: &'static str,
    why: Cow<'static, str>,
}

impl Archive {
    /// Opens a file and proves its header. No tensor is read.
    ///
    /// # Errors
    /// [`Error::Open`] with the system's error; that the path is a directory, or no regular file; [`Error::Header`]
    /// with the rule that the header breaks; [`Error::Read`] when reading the header fails;
    /// [`Error::UnknownBackend`] when the environment asks for one that is none.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Archive, Error> {
        let file = open_source(path)?;
        let header = read_header(&file, Some(path), &options.limits)?;
        let variable = std::env::var(BACKEND_VARIABLE).ok();
        let choice = choose(options.backend, variable.as_deref(), file.remote())?;
        let (source, choice) = attach(file, options.backend, choice).map_err(|source| Error::Open {
            path: path.to_owned(),
            source,
        })?;
        let path = Some(path.to_owned());
        Ok(Archive {
            path,
            header,
            source,
            backend: choice.backend.name(),
            why: choice.why,
        })
    }

    /// Opens a source of another kind, such as bytes in memory.
    ///
    /// # Errors
    /// [`Error::Header`] and [`Error::Read`], as for [`Archive::open`].
    pub fn from_source(source: Box<dyn Source>, limits: &Limits) -> Result<Archive, Error> {
        let header = read_header(&*source, None, limits)?;
        Ok(Archive {
            path: None,
            header,
            source,
            backend: "memory",
            why: Cow::Borrowed("bytes in memory"),
        })
    }

    /// The file; `None` for other sources.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// What the file holds.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    pub(crate) fn source(&self) -> &dyn Source {
        &*self.source
    }

    /// How the bytes are read: `mmap`, `pread` or `memory`.
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
    /// [`Error::UnknownTensor`], with the name that is most like it.
    pub fn find(&self, name: &str) -> Result<Tensor<'_>, Error> {
        let found = self.header.find(name).and_then(|number| self.tensor(number));
        found.ok_or_else(|| Error::UnknownTensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
            nearest: nearest(&self.header, name),
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

    /// The bytes of the tensor `name`.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`], and what [`Tensor::read`] says.
    pub fn read(&self, name: &str) -> Result<Region, Error> {
        self.find(name)?.read(&ReadOptions::default(), &Unwatched)
    }

    /// The bytes of many tensors, given as places in the header's order of data; the regions come in the order
    /// of `numbers`.
    ///
    /// Where the file is mapped these are views of the mapping, and nothing is read. A tensor whose elements are
    /// not aligned in the file is copied to where they are. Elsewhere all are read at once, in parallel.
    ///
    /// # Errors
    /// [`Error::Read`] and [`Error::Changed`] when the bytes cannot be had, [`Error::OutOfMemory`],
    /// [`Error::Interrupted`].
    pub fn regions(
        &self,
        numbers: &[usize],
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<Vec<Region>, Error> {
        let Some(memory) = self.source.memory() else {
            let regions = self.read_regions(self.source(), numbers, options, watch)?;
            self.check_unchanged()?;
            return Ok(regions);
        };
        // Before anything is handed out, because touching what is no longer there is fatal.
        self.check_unchanged()?;
        let mut ranks = Vec::new();
        let view = |(rank, &number): (usize, &usize)| {
            // Only numbers of this header are given; one that is not has no bytes.
            let Some(entry) = self.header.entry(number) else {
                return Region::new(Arc::clone(memory), 0, 0);
            };
            let region = self.view(memory, entry.begin, entry.end);
            if !region.aligned_to(plan::alignment(&entry)) {
                ranks.push(rank);
            }
            region
        };
        let mut regions: Vec<_> = numbers.iter().enumerate().map(view).collect();
        if !ranks.is_empty() {
            let numbers: Vec<usize> = ranks.iter().map(|&rank| numbers[rank]).collect();
            let copies = self.read_regions(self.source(), &numbers, options, watch)?;
            for (rank, copy) in ranks.into_iter().zip(copies) {
                regions[rank] = copy;
            }
        }
        Ok(regions)
    }

    /// Brings the bytes of these tensors into the system's cache, and keeps none: what is read or touched next is
    /// there. Gives their number.
    ///
    /// # Errors
    /// As [`Archive::regions`].
    pub fn warm(&self, numbers: &[usize], options: &ReadOptions, watch: &dyn Watch) -> Result<u64, Error> {
        let runs = self.runs(numbers);
        let nbytes = runs.iter().map(|run| run.end - run.start).sum();
        warm(runs, nbytes, &*self.source, options, watch).map_err(|failure| self.explain(failure))?;
        self.check_unchanged()?;
        Ok(nbytes)
    }

    /// As [`Archive::warm`] where the file is mapped. Elsewhere tensors have memory of their own, and warming it would
    /// be reading it twice.
    pub(crate) fn warm_behind_mapping(
        &self,
        numbers: &[usize],
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        match self.source.memory() {
            Some(_) => self.warm(numbers, options, watch).map(drop),
            None => Ok(()),
        }
    }

    /// Where in the file the bytes of these tensors are: in its order, and neighbours as one.
    fn runs(&self, numbers: &[usize]) -> Vec<Range<u64>> {
        let mut numbers = numbers.to_vec();
        numbers.sort_unstable();
        numbers.dedup();
        let start = self.header.data_start();
        let mut runs: Vec<Range<u64>> = Vec::new();
        for entry in numbers.iter().filter_map(|&number| self.header.entry(number)) {
            let run = start + entry.begin..start + entry.end;
            match runs.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end,
                _ => runs.push(run),
            }
        }
        runs
    }

    /// The bytes of these tensors in memory of their own, from `source`: that of this archive, or one over it.
    pub(crate) fn read_regions(
        &self,
        source: &dyn Source,
        numbers: &[usize],
        options: &ReadOptions,
        watch: &dyn Watch,
    ) -> Result<Vec<Region>, Error> {
        let read = || {
            let (plan, places) = Plan::of_tensors(&self.header, numbers)?;
            Ok((execute_owned(&plan, source, options, watch)?, places))
        };
        let (blocks, places) = read().map_err(|failure| self.explain(failure))?;
        let blocks: Vec<_> = blocks
            .into_iter()
            .map(|block| Arc::new(Memory::from(block)))
            .collect();
        let region = |place: Place| Region::new(Arc::clone(&blocks[place.block]), place.at, place.nbytes);
        Ok(places.into_iter().map(region).collect())
    }

    /// The bytes `begin..end` of the data section where they lie in the mapping.
    fn view(&self, memory: &Arc<Memory>, begin: u64, end: u64) -> Region {
        // The mapping is as long as the file, so what lies in the file can be addressed in it.
        let at = to_usize(self.header.data_start() + begin).unwrap_or(usize::MAX);
        let nbytes = to_usize(end - begin).unwrap_or(0);
        Region::new(Arc::clone(memory), at, nbytes)
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
    let source = open_file(path).and_then(FileSource::new);
    source.map_err(|source| Error::Open {
        path: path.to_owned(),
        source,
    })
}

/// Fails when `source` is no longer what was opened. `path` is for the errors.
pub(crate) fn check_unchanged(source: &dyn Source, path: Option<&Path>) -> Result<(), Error> {
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

    /// Its place in the header's order of data, as [`Archive::regions`] takes it.
    #[must_use]
    pub fn number(&self) -> usize {
        self.number
    }

    /// Its bytes: a view where the file is mapped, else read into memory of their own.
    ///
    /// # Errors
    /// As [`Archive::regions`].
    pub fn read(&self, options: &ReadOptions, watch: &dyn Watch) -> Result<Region, Error> {
        let archive = self.archive;
        // Before anything is handed out, because touching what is no longer there is fatal.
        if let Some(memory) = archive.source.memory() {
            archive.check_unchanged()?;
            let view = archive.view(memory, self.entry.begin, self.entry.end);
            if view.aligned_to(plan::alignment(&self.entry)) {
                return Ok(view);
            }
        }
        let read = || {
            let mut block = Block::allocate(size(self.entry.nbytes())?)?;
            let plan = Plan::of_one(archive.header.data_start() + self.entry.begin, block.len());
            execute(&plan, &*archive.source, vec![block.dest()], options, watch)?;
            Ok(block)
        };
        let block = read().map_err(|failure| archive.explain(failure))?;
        archive.check_unchanged()?;
        Ok(Region::from(block))
    }

    /// What `index` takes of it: its shape, and its bytes in C order. A view of the mapping where the bytes lie
    /// together in it, else a copy; only the bytes needed are read, or little more.
    ///
    /// # Errors
    /// [`Error::Slice`] when the index does not fit, and what [`Archive::regions`] says.
    pub fn select(&self, index: &[Index], watch: &dyn Watch) -> Result<(Vec<u64>, Region), Error> {
        let part = [Part::new(*self, index, None)?];
        let mut regions = self.archive.parts(&part, &ReadOptions::default(), watch)?;
        // One part gives one region.
        let region = regions.pop().ok_or_else(|| Error::Closed {
            path: self.archive.path.clone(),
        })?;
        Ok((part[0].shape().to_owned(), region))
    }

    pub(crate) fn archive(&self) -> &'a Archive {
        self.archive
    }

    /// Where it begins in the file.
    pub(crate) fn start(&self) -> u64 {
        self.archive.header.data_start() + self.entry.begin
    }

    pub(crate) fn selection(&self, index: &[Index]) -> Result<Selection, Error> {
        let entry = &self.entry;
        Selection::new(entry.dtype, entry.shape, index).map_err(|fault| Error::Slice {
            path: self.archive.path.clone(),
            tensor: entry.name.to_owned(),
            shape: entry.shape.to_owned(),
            fault,
        })
    }

    /// Where a selection of it lies in the mapping, if it lies together there, on an address for its elements.
    pub(crate) fn view(&self, selection: &Selection) -> Option<Region> {
        let memory = self.archive.source.memory()?;
        let begin = self.entry.begin;
        let view = match selection.span() {
            Some(_) if !selection.is_contiguous() => return None,
            Some(run) => self.archive.view(memory, begin + run.begin, begin + run.end),
            None => self.archive.view(memory, begin, begin),
        };
        view.aligned_to(plan::alignment(&self.entry)).then_some(view)
    }
}

/// Opens without waiting: a FIFO nobody writes to would otherwise hang the program. That it is none is checked
/// on the open file, so that nobody can put another in its place between a look and the opening.
fn open_file(path: &Path) -> io::Result<File> {
    let mut options = FileOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    }
    options.open(path)
}

/// Makes it so that `file` is read as was chosen, where `asked` is what the caller wants.
fn attach(file: FileSource, asked: Backend, choice: Choice) -> io::Result<(Box<dyn Source>, Choice)> {
    if choice.backend == Backend::Pread {
        return Ok((Box::new(file), choice));
    }
    match MappedSource::new(file) {
        Ok(mapped) => Ok((Box::new(mapped), choice)),
        // Address space may be limited, or the file system unable to map.
        Err((file, fault)) if asked == Backend::Auto => {
            let why = format!("mapping the file failed: {fault}").into();
            Ok((
                Box::new(file),
                Choice {
                    backend: Backend::Pread,
                    why,
                },
            ))
        }
        Err((_, fault)) => Err(fault),
    }
}

/// The name in the header that is most like `name`: equal but for case and separators, or with the longest
/// common end, because prefixes such as `model.` are what most often differs.
fn nearest(header: &Header, name: &str) -> Option<String> {
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
    let best = header
        .entries()
        .map(|entry| (likeness(entry.name), entry.name))
        .max_by_key(|pair| pair.0)?;
    // Less than half in common is no help.
    (2 * best.0 >= wanted.len().max(1)).then(|| best.1.to_owned())
}
