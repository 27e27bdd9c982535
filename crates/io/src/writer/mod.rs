//! Filling a file tensor by tensor, by threads and processes, without ever holding all of it.
//!
//! [`Writer`] needs all names, dtypes and shapes first, and takes tensors and slices of them in any order. It writes into a
//! temporary file, which [`Writer::commit`] renames when every byte was written once. Until then the path leads to the previous
//! file. Another process fills the same file after [`Writer::join`]. [`Appender`] takes each tensor with its bytes, and reserves
//! space for the header.

mod append;
mod coverage;
mod fill;
mod foreign;
mod journal;
#[cfg(any(test, feature = "fuzzing"))]
#[path = "tests/journal_model.rs"]
pub(crate) mod journal_model;
#[cfg(test)]
#[path = "tests/model.rs"]
mod model;
mod preamble;
mod temporary_file;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ingot_format::{
    Dtype, Entry, Format, Header, Index, LayoutOptions, Limits, Selection, Spec, layout_with,
};

use self::fill::Filler;
use self::journal::{End, Journal, JournalFault, Verdict};
use crate::disk::{Lock, Locked};
use crate::error::{EditError, Error, Failure, size, unstorable};
use crate::options::SaveOptions;
use crate::payload::{FileRange, Payload};
use crate::save::{Temp, journal_fault};
use crate::watch::Watch;

pub use append::Appender;
pub use foreign::ForeignFile;
pub use temporary_file::TemporaryFile;

/// How often, and after what pause, [`Writer::join`] tries to finish a file that other processes have open.
const TRIES: usize = 100;
const PAUSE: Duration = Duration::from_millis(10);

/// A file that is filled in any order. Any number of threads may do it at once.
///
/// ```
/// use ingot_format::{Dtype, Format, Index, LayoutOptions, Spec};
/// use ingot_io::{Archive, OpenOptions, Payload, SaveOptions, Unwatched, Writer};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("large.safetensors");
/// let rows = Spec { name: "rows", dtype: Dtype::U8, shape: &[4, 2] };
/// let (layout, options) = (LayoutOptions::default(), SaveOptions::default());
/// let writer = Writer::create(&path, &[rows], None, Format::Safetensors, &layout, &options, &Unwatched)?;
/// for (first, bytes) in [(2, b"5678"), (0, b"1234")] {
///     let two = Index::from(first..first + 2);
///     writer.write("rows", &[two], Dtype::U8, &[2, 2], &Payload::from(&bytes[..]), &Unwatched)?;
/// }
/// writer.commit(&Unwatched)?; // until then, nothing has the name
/// assert_eq!(Archive::open(&path, &OpenOptions::default())?.read("rows")?.to_vec(), b"12345678");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Writer {
    temp: Temp,
    header: Header,
    journal: Journal,
    /// Whether it created the file, or took it over. Dropping it then removes the file.
    is_founder: bool,
    /// Whether a commit was recorded but its outcome could not be read.
    is_unanswered: AtomicBool,
}

impl Writer {
    /// Begin the file at `path`, which will hold tensors of these `specs`.
    ///
    /// # Errors
    /// [`Failure::Unstorable`] for a tensor that the format cannot store; [`Failure::Write`]; [`Failure::Edit`] with
    /// [`EditError::Busy`] if another writer fills this file, or [`EditError::NoPlace`].
    pub fn create(
        path: &Path,
        specs: &[Spec<'_>],
        metadata: Option<&[(&str, &str)]>,
        format: Format,
        layout_options: &LayoutOptions,
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<Writer, Error> {
        let layout = layout_with(specs, metadata, format, layout_options).map_err(unstorable(path))?;
        let nbytes = layout.header.file_nbytes();
        let temp = Temp::create(path, nbytes, options, watch)?;
        temp.write(&layout.head, 0)?;
        let journal = temp.journal()?;
        let preamble = preamble::render(nbytes, temp.name()).ok_or_else(|| broken(path))?;
        io::Write::write_all(&mut &journal, &preamble).map_err(|fault| journal_fault(path, fault))?;
        temp.keep();
        Ok(Writer::of(temp, layout.header, journal, true))
    }

    fn of(temp: Temp, header: Header, journal: File, is_founder: bool) -> Writer {
        Writer {
            temp,
            journal: Journal::new(journal, preamble::NBYTES, header.data_nbytes()),
            header,
            is_founder,
            is_unanswered: AtomicBool::new(false),
        }
    }

    /// Join the file at `path`, which a writer in this or another process began. If that writer was killed, joining fails,
    /// unless the caller wants to `finish` its file: this writer then takes it over with the bytes written so far, as soon as
    /// no other process has the file open. The caller has to know that all bytes belong together.
    ///
    /// # Errors
    /// [`Failure::Edit`] with [`EditError::NothingToJoin`], [`EditError::Orphaned`] or [`EditError::BrokenJournal`];
    /// [`Failure::Write`] if the temporary file or the journal cannot be opened, locked or read.
    pub fn join(
        path: &Path,
        finish: bool,
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<Writer, Error> {
        for _ in 0..TRIES {
            if watch.interrupted() {
                return Err(Failure::Interrupted.into());
            }
            if finish && let Some(writer) = Writer::take_over(path, options, watch)? {
                return Ok(writer);
            }
            match Writer::join_living(path, options, watch) {
                // If several processes try to finish the same file at once, all may fail: try again after a pause.
                Err(fault) if finish && fault.code() == "orphaned" => std::thread::sleep(PAUSE),
                joined => return joined,
            }
        }
        Err(EditError::Orphaned { held: true }.about(path))
    }

    fn join_living(path: &Path, options: &SaveOptions, watch: &dyn Watch) -> Result<Writer, Error> {
        let journal = Temp::journal_of(path, Lock::Shared, watch)?;
        let journal = journal.ok_or_else(|| EditError::NothingToJoin.about(path))?;
        let writer = Writer::open(path, journal, options, watch)?;
        writer.check_owner()?;
        Ok(writer)
    }

    /// Replace the writer that began the file. `None` if there is no such file, or another process has it open.
    fn take_over(path: &Path, options: &SaveOptions, watch: &dyn Watch) -> Result<Option<Writer>, Error> {
        let Some(journal) = Temp::journal_of(path, Lock::Exclusive, watch)? else {
            return Ok(None);
        };
        let mut writer = Writer::open(path, journal, options, watch)?;
        if !writer.temp.own()? {
            return Ok(None);
        }
        writer.judge(writer.noted(writer.journal.take_over())?, "")?;
        writer.is_founder = true;
        if !writer.temp.admit()? {
            return Err(EditError::NothingToJoin.about(path));
        }
        Ok(Some(writer))
    }

    /// Open the file that has this journal, as a guest.
    fn open(path: &Path, journal: Locked, options: &SaveOptions, watch: &dyn Watch) -> Result<Writer, Error> {
        let nothing = || EditError::NothingToJoin.about(path);
        let preamble = preamble::read(&journal).map_err(|fault| explain(path, fault))?;
        let (nbytes, name) = preamble.ok_or_else(nothing)?;
        let temp = Temp::join(path, &name, journal, options, watch)?.ok_or_else(nothing)?;
        let read = |nbytes: u64| -> Result<Vec<u8>, Error> {
            let mut bytes = vec![0; size(nbytes)?];
            let read = FileRange::new(temp.file(), 0, nbytes).read(0, &mut bytes);
            read.map_err(|fault| explain(path, fault.into()))?;
            Ok(bytes)
        };
        let limits = Limits::default();
        let head_nbytes = Header::head_nbytes(&read(8)?, nbytes, &limits).map_err(|_| broken(path))?;
        let header = Header::parse(&read(head_nbytes)?, nbytes, &limits).map_err(|_| broken(path))?;
        let journal = temp.journal()?;
        Ok(Writer::of(temp, header, journal, false))
    }

    /// The header of the file.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.temp.path()
    }

    /// The path of the temporary file, which exists until the commit.
    #[must_use]
    pub fn temporary_path(&self) -> PathBuf {
        self.temp.temporary_path()
    }

    /// Write the elements of the tensor `name` that `index` selects; an empty index selects all. `payload` holds their bytes,
    /// of a tensor of `dtype` and `shape`.
    ///
    /// # Errors
    /// [`Failure::UnknownTensor`]; [`Failure::Slice`] if the index does not fit the tensor; [`Failure::Edit`] with
    /// [`EditError::Mismatch`] if the payload does not fit the index, [`EditError::FilledTwice`], or the reason why the file
    /// ended; [`Failure::Write`]. Nothing counts as written then.
    pub fn write(
        &self,
        name: &str,
        index: &[Index],
        dtype: Dtype,
        shape: &[u64],
        payload: &Payload<'_>,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        self.temp.check_process()?;
        self.check_owner()?;
        let (entry, selection) = self.select(name, index)?;
        if (entry.dtype, selection.shape()) != (dtype, shape) || payload.nbytes() != selection.nbytes() {
            let mismatch = EditError::Mismatch {
                expected: (entry.dtype, selection.shape().to_owned()),
                found: (dtype, shape.to_owned()),
            };
            return Err(self.refuse(mismatch).of(name));
        }
        let ranges: Vec<Range<u64>> = selection
            .runs()
            .map(|run| entry.begin + run.begin..entry.begin + run.end)
            .collect();
        if ranges.is_empty() {
            let end = self.journal.end();
            return end.map_or(Ok(()), |end| self.judge(Verdict::Ended(end), ""));
        }
        let (claim, verdict) = self.noted(self.journal.claim(&ranges))?;
        self.judge(verdict, name)?;
        if let Err(fault) = self.fill(&ranges, payload, watch) {
            // The first error is the reason.
            let _ = self.journal.failed(claim);
            return Err(fault);
        }
        self.judge(self.noted(self.journal.done(claim))?, name)
    }

    /// Write the bytes of `payload` to these ranges of the data, one after the other.
    fn fill(&self, ranges: &[Range<u64>], payload: &Payload<'_>, watch: &dyn Watch) -> Result<(), Error> {
        let mut filler = Filler::new(&self.temp, watch);
        let mut done = 0;
        for range in ranges {
            let end = done + (range.end - range.start);
            filler.put(payload, done..end, self.header.data_start() + range.start)?;
            done = end;
        }
        Ok(())
    }

    /// Return the tensor `name`, and the part that `index` selects.
    fn select(&self, name: &str, index: &[Index]) -> Result<(Entry<'_>, Selection), Error> {
        let about = |failure: Failure| failure.about(Some(self.path()), Some(name));
        let entry = self.header.get(name);
        let entry = entry.ok_or_else(|| about(Failure::UnknownTensor { nearest: None }))?;
        let selection = Selection::new(entry.dtype, entry.shape, index);
        let selection = selection.map_err(|fault| about(Failure::Slice(fault)))?;
        Ok((entry, selection))
    }

    /// Rename the file, once every byte was written by any of its writers.
    ///
    /// # Errors
    /// [`Failure::Edit`] with [`EditError::NotFilled`], after which writing may go on. [`Failure::Open`] if a file has the
    /// name by now and the options keep it, [`Failure::Write`], [`Failure::Interrupted`]: the new file is removed.
    pub fn commit(&self, watch: &dyn Watch) -> Result<(), Error> {
        self.temp.check_process()?;
        self.check_owner()?;
        let found = self.journal.commit();
        self.is_unanswered.store(found.is_err(), Ordering::Relaxed);
        self.judge(self.noted(found)?, "")?;
        self.temp.publish(watch).inspect_err(|_| self.temp.discard())
    }

    /// Fail if the writer that began the file was killed: its bytes may be of another run.
    fn check_owner(&self) -> Result<(), Error> {
        if self.is_founder || self.temp.has_owner()? {
            return Ok(());
        }
        // The process may have recorded the end of the file before it ended, or been killed between the record and the action.
        match self.noted(self.journal.end_now())? {
            Some(End::Committed) if self.temp.is_unnamed() => {}
            Some(end) => return self.judge(Verdict::Ended(end), ""),
            None => {}
        }
        Err(self.refuse(EditError::Orphaned { held: false }))
    }

    /// Add the path to a fault of the journal.
    fn noted<T>(&self, found: Result<T, JournalFault>) -> Result<T, Error> {
        found.map_err(|fault| explain(self.path(), fault))
    }

    fn judge(&self, verdict: Verdict, name: &str) -> Result<(), Error> {
        let fault = match verdict {
            Verdict::Accepted => return Ok(()),
            Verdict::Taken(_) => return Err(self.refuse(EditError::FilledTwice).of(name)),
            Verdict::Incomplete => return Err(self.missing()),
            Verdict::Ended(End::Committed) => EditError::Committed,
            Verdict::Ended(End::Abandoned) => EditError::Abandoned,
        };
        Err(self.refuse(fault))
    }

    /// Find the first tensor with bytes that were not written.
    fn missing(&self) -> Error {
        let found = |entry: &Entry<'_>| self.journal.written(&(entry.begin..entry.end));
        let missing = self.header.entries().find(|entry| found(entry) < entry.nbytes());
        match missing {
            Some(entry) => {
                let not_filled = EditError::NotFilled {
                    expected: entry.nbytes(),
                    found: found(&entry),
                };
                self.refuse(not_filled).of(entry.name)
            }
            None => self.refuse(EditError::BrokenJournal),
        }
    }

    fn refuse(&self, fault: EditError) -> Error {
        fault.about(self.path())
    }
}

/// Dropping the writer that began the file removes it, unless it was committed.
impl Drop for Writer {
    fn drop(&mut self) {
        if !self.is_founder || self.temp.check_process().is_err() {
            return;
        }
        let is_committed = matches!(self.journal.abandon(), Ok(Verdict::Ended(End::Committed)));
        // A recorded commit whose outcome could not be read is not carried out by any process, so that the file is removed.
        if !is_committed || *self.is_unanswered.get_mut() {
            self.temp.discard();
        }
    }
}

fn broken(path: &Path) -> Error {
    EditError::BrokenJournal.about(path)
}

fn explain(path: &Path, fault: JournalFault) -> Error {
    match fault {
        JournalFault::Broken => broken(path),
        JournalFault::System(source) => journal_fault(path, source),
    }
}
