//! Tensors and parts of them, in any order.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ingot_format::{
    Dtype, Entry, Format, Header, Index, LayoutOptions, Limits, Selection, Spec, StopFlag, layout_with,
    to_u64, to_usize,
};

use super::journal::{End, Journal, JournalFault, Verdict};
use super::preamble;
use crate::disk::{Lock, Locked};
use crate::error::{EditError, Error, Stop, step};
use crate::options::SaveOptions;
use crate::payload::{FileRange, Payload};
use crate::save::{Temp, journal_fault};
use crate::watch::{Asked, Watch};
use crate::workers::watched;

/// Bytes of a tensor that pass through memory at a time, where they do not lie there as the file is to have them.
pub(super) const PIECE: u64 = 4 << 20;
/// How often, and after what time, one tries again to finish a file that others have open.
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
    draft: Mutex<Temp>,
    /// The same file, for writing without the lock.
    pub(super) filling: Filling,
    options: SaveOptions,
    pub(super) membership: Membership,
    pub(super) process: u32,
    /// Whether it was to commit, and never learned what became of that.
    is_unanswered: AtomicBool,
}

/// What becomes of a file whose writer was killed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Orphan {
    /// Nobody joins it.
    #[default]
    Refuse,
    /// Whoever joins it takes the place of that writer, and what was written stays. It is the caller who knows that all of
    /// it belongs together.
    Finish,
}

/// Whether leaving takes the file away.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Membership {
    Founder,
    Guest,
}

pub(super) struct Filling {
    path: PathBuf,
    file: File,
    header: Header,
    pub(super) journal: Journal,
    nbytes: u64,
}

impl Writer {
    /// Begins the file at `path` that holds tensors of these `specs`.
    ///
    /// # Errors
    /// [`Error::Unstorable`] for what the format cannot hold; [`Error::Write`]; [`Error::Edit`] with
    /// [`EditError::Busy`] when somebody else fills this file, or [`EditError::NoPlace`].
    pub fn create(
        path: &Path,
        specs: &[Spec<'_>],
        metadata: Option<&[(&str, &str)]>,
        format: Format,
        layout_options: &LayoutOptions,
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<Writer, Error> {
        let layout =
            layout_with(specs, metadata, format, layout_options).map_err(|fault| Error::Unstorable {
                path: Some(path.to_owned()),
                fault,
            })?;
        let draft = Temp::create(path, layout.header.file_nbytes(), options, watch)?;
        let filling = Writer::begin(&draft, &layout.head, layout.header)?;
        draft.keep();
        Ok(Writer {
            draft: Mutex::new(draft),
            filling,
            options: *options,
            membership: Membership::Founder,
            process: std::process::id(),
            is_unanswered: AtomicBool::new(false),
        })
    }

    fn begin(draft: &Temp, head: &[u8], header: Header) -> Result<Filling, Error> {
        draft.write(head, 0)?;
        let notes = draft.journal()?;
        let preamble = preamble::render(header.file_nbytes(), draft.name());
        let preamble = preamble.ok_or_else(|| broken(draft.path()))?;
        io::Write::write_all(&mut &notes, &preamble).map_err(|fault| journal_fault(draft.path(), fault))?;
        Filling::new(draft, header, notes)
    }

    /// Takes part in filling the file at `path`, which a writer in this or another process began. `orphan` says what
    /// happens when that one was killed: [`Orphan::Finish`] makes this one the writer that began it, once all are gone who
    /// had a part in it.
    ///
    /// # Errors
    /// [`Error::Edit`] with [`EditError::NothingToJoin`], [`EditError::Orphaned`] or [`EditError::BrokenJournal`];
    /// [`Error::Write`] when the temporary file or the notes cannot be opened, locked or read.
    pub fn join(
        path: &Path,
        orphan: Orphan,
        options: &SaveOptions,
        watch: &dyn Watch,
    ) -> Result<Writer, Error> {
        for _ in 0..TRIES {
            if watch.interrupted() {
                return Err(Error::Interrupted);
            }
            if orphan == Orphan::Finish
                && let Some(writer) = Writer::take_over(path, options, watch)?
            {
                return Ok(writer);
            }
            match Writer::join_living(path, options, watch) {
                // Several who finish the same file are in each other's way, until one of them has it.
                Err(Error::Edit {
                    fault: EditError::Orphaned { .. },
                    ..
                }) if orphan == Orphan::Finish => std::thread::sleep(PAUSE),
                joined => return joined,
            }
        }
        Err(EditError::Orphaned { held: true }.about(path))
    }

    fn join_living(path: &Path, options: &SaveOptions, watch: &dyn Watch) -> Result<Writer, Error> {
        let notes = Temp::journal_of(path, Lock::Shared, watch)?;
        let notes = notes.ok_or_else(|| EditError::NothingToJoin.about(path))?;
        let writer = Writer::open(path, notes, options, watch)?;
        writer.check_owner()?;
        Ok(writer)
    }

    /// A writer in place of the one that began the file. `None` where that is not this one's to do: nobody began one, or
    /// somebody has it open.
    fn take_over(path: &Path, options: &SaveOptions, watch: &dyn Watch) -> Result<Option<Writer>, Error> {
        let Some(notes) = Temp::journal_of(path, Lock::Exclusive, watch)? else {
            return Ok(None);
        };
        let mut writer = Writer::open(path, notes, options, watch)?;
        if !writer.draft().own()? {
            return Ok(None);
        }
        let taken = writer.filling.journal.take_over();
        writer.filling.judge(writer.noted(taken)?, "")?;
        writer.membership = Membership::Founder;
        if !writer.draft().admit()? {
            return Err(EditError::NothingToJoin.about(path));
        }
        Ok(Some(writer))
    }

    /// A guest of the file whose notes these are.
    fn open(path: &Path, notes: Locked, options: &SaveOptions, watch: &dyn Watch) -> Result<Writer, Error> {
        let (nbytes, name) = preamble::read(&notes)
            .map_err(|fault| explain(path, fault))?
            .ok_or_else(|| EditError::NothingToJoin.about(path))?;
        let draft = Temp::join(path, &name, notes, watch)?;
        let draft = draft.ok_or_else(|| EditError::NothingToJoin.about(path))?;
        let read = |bytes: &mut [u8]| {
            let range = FileRange::new(draft.file(), 0, to_u64(bytes.len()));
            let read = range.read(0, bytes).map_err(JournalFault::from);
            read.map_err(|fault| explain(path, fault))
        };
        let mut start = [0; 8];
        read(&mut start)?;
        let head_nbytes =
            Header::head_nbytes(&start, nbytes, &Limits::default()).map_err(|_| broken(path))?;
        let mut head = vec![0; to_usize(head_nbytes).unwrap_or(usize::MAX)];
        read(&mut head)?;
        let header = Header::parse(&head, nbytes, &Limits::default()).map_err(|_| broken(path))?;
        let notes = draft.journal()?;
        let filling = Filling::new(&draft, header, notes)?;
        Ok(Writer {
            draft: Mutex::new(draft),
            filling,
            options: *options,
            membership: Membership::Guest,
            process: std::process::id(),
            is_unanswered: AtomicBool::new(false),
        })
    }

    /// What the file will hold.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.filling.header
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.filling.path
    }

    /// The path of the temporary file, which exists until the commit.
    #[must_use]
    pub fn draft_path(&self) -> PathBuf {
        self.draft().draft_path()
    }

    /// Writes the elements of the tensor `name` that `index` takes: all by an empty one. `payload` has those bytes, of a
    /// tensor of `dtype` and `shape`.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`]; [`Error::Slice`] when the index does not fit the tensor; [`Error::Edit`] with
    /// [`EditError::Mismatch`] when the payload does not fit the index, [`EditError::FilledTwice`], or how the file
    /// ended; [`Error::Write`]. Nothing counts as written then.
    pub fn write(
        &self,
        name: &str,
        index: &[Index],
        dtype: Dtype,
        shape: &[u64],
        payload: &Payload<'_>,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        self.check_process()?;
        self.check_owner()?;
        let filling = &self.filling;
        let entry = filling.entry(name)?;
        let selection = filling.select(&entry, index, dtype, shape, payload)?;
        let ranges: Vec<Range<u64>> = selection
            .runs()
            .map(|run| entry.begin + run.begin..entry.begin + run.end)
            .collect();
        if ranges.is_empty() {
            return filling.check_open();
        }
        let (claim, verdict) = self.noted(filling.journal.claim(&ranges))?;
        filling.judge(verdict, name)?;
        if let Err(fault) = filling.fill(&ranges, payload, watch) {
            // What it says first is the better reason.
            let _ = filling.journal.failed(claim);
            return Err(fault);
        }
        filling.judge(self.noted(filling.journal.done(claim))?, name)
    }

    /// As [`Writer::write`], of bytes that stand in `file` from `position` on.
    pub(crate) fn copy(
        &self,
        name: &str,
        index: &[Index],
        file: &File,
        position: u64,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        let selection = self.selected(name, index)?;
        let dtype = self.filling.entry(name)?.dtype;
        let payload = Payload::File(FileRange::new(file, position, selection.nbytes()));
        self.write(name, index, dtype, selection.shape(), &payload, watch)
    }

    /// What `index` takes of the tensor `name`.
    pub(crate) fn selected(&self, name: &str, index: &[Index]) -> Result<Selection, Error> {
        self.filling.selected(&self.filling.entry(name)?, index)
    }

    /// Gives the file its name, once every byte was written, by whomever.
    ///
    /// # Errors
    /// [`Error::Edit`] with [`EditError::NotFilled`], after which writing may go on. [`Error::Open`] if a file has the name by
    /// now and the options keep it, [`Error::Write`], [`Error::Interrupted`]: the new file is removed.
    pub fn commit(&self, watch: &dyn Watch) -> Result<(), Error> {
        self.check_process()?;
        self.check_owner()?;
        let filling = &self.filling;
        let found = filling.journal.commit();
        self.is_unanswered.store(found.is_err(), Ordering::Relaxed);
        let verdict = self.noted(found)?;
        if verdict == Verdict::Incomplete {
            return Err(filling.refuse(filling.missing()));
        }
        filling.judge(verdict, "")?;
        let draft = self.draft();
        let published = draft.publish(self.options.existing(), self.options.durable, watch);
        if published.is_err() {
            draft.discard();
        }
        published
    }

    /// Nobody adds to a file whose writer was killed: what that one had written may be of another run.
    fn check_owner(&self) -> Result<(), Error> {
        if self.membership == Membership::Founder || self.draft().has_owner()? {
            return Ok(());
        }
        // It may have left as one should, and said so; or been killed between saying so and doing it.
        match self.noted(self.filling.journal.end_now())? {
            Some(End::Committed) if self.draft().is_unnamed() => {}
            Some(end) => return self.filling.judge(Verdict::Ended(end), ""),
            None => {}
        }
        Err(self.filling.refuse(EditError::Orphaned { held: false }))
    }

    fn draft(&self) -> MutexGuard<'_, Temp> {
        self.draft.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the journal gave.
    fn noted<T>(&self, found: Result<T, JournalFault>) -> Result<T, Error> {
        found.map_err(|fault| explain(self.path(), fault))
    }

    /// A fork has the same files open, and the same place in them.
    fn check_process(&self) -> Result<(), Error> {
        if self.process == std::process::id() {
            Ok(())
        } else {
            Err(self.filling.refuse(EditError::Forked))
        }
    }
}

/// Whoever began the file takes it away by leaving, unless it was committed.
impl Drop for Writer {
    fn drop(&mut self) {
        if self.membership == Membership::Guest || self.check_process().is_err() {
            return;
        }
        let is_committed = matches!(self.filling.journal.abandon(), Ok(Verdict::Ended(End::Committed)));
        // A commit of this one that stands there, without its having been read, is one that nobody acts on.
        if is_committed && !*self.is_unanswered.get_mut() {
            return;
        }
        self.draft().discard();
    }
}

impl Filling {
    fn new(draft: &Temp, header: Header, notes: File) -> Result<Filling, Error> {
        let file = draft
            .file()
            .try_clone()
            .map_err(|fault| draft.write_fault(fault))?;
        Ok(Filling {
            path: draft.path().to_owned(),
            file,
            journal: Journal::new(notes, preamble::NBYTES, header.data_nbytes()),
            nbytes: header.file_nbytes(),
            header,
        })
    }

    fn entry(&self, name: &str) -> Result<Entry<'_>, Error> {
        self.header.get(name).ok_or_else(|| Error::UnknownTensor {
            path: Some(self.path.clone()),
            tensor: name.to_owned(),
            nearest: None,
        })
    }

    fn selected(&self, entry: &Entry<'_>, index: &[Index]) -> Result<Selection, Error> {
        Selection::new(entry.dtype, entry.shape, index).map_err(|fault| Error::Slice {
            path: Some(self.path.clone()),
            tensor: entry.name.to_owned(),
            shape: entry.shape.to_owned(),
            fault,
        })
    }

    fn select(
        &self,
        entry: &Entry<'_>,
        index: &[Index],
        dtype: Dtype,
        shape: &[u64],
        payload: &Payload<'_>,
    ) -> Result<Selection, Error> {
        let selection = self.selected(entry, index)?;
        if (entry.dtype, selection.shape()) != (dtype, shape) || payload.nbytes() != selection.nbytes() {
            return Err(self.refuse(EditError::Mismatch {
                tensor: entry.name.to_owned(),
                expected: (entry.dtype, selection.shape().to_owned()),
                found: (dtype, shape.to_owned()),
            }));
        }
        Ok(selection)
    }

    /// Writes the bytes of `payload` to these ranges of the data, one after the other.
    fn fill(&self, ranges: &[Range<u64>], payload: &Payload<'_>, watch: &dyn Watch) -> Result<(), Error> {
        let mut done = 0;
        let mut buffer = Vec::new();
        for range in ranges {
            let mut begin = range.start;
            while begin < range.end {
                if watch.interrupted() {
                    return Err(Error::Interrupted);
                }
                let count = (range.end - begin).min(PIECE);
                let position = self.header.data_start() + begin;
                put(payload, done, count, &self.file, position, &mut buffer, watch)
                    .map_err(|source| Stop::of(step::WRITE, source).about(&self.path, self.nbytes))?;
                begin += count;
                done += count;
            }
        }
        Ok(())
    }

    fn check_open(&self) -> Result<(), Error> {
        match self.journal.end() {
            Some(end) => self.judge(Verdict::Ended(end), ""),
            None => Ok(()),
        }
    }

    fn judge(&self, verdict: Verdict, name: &str) -> Result<(), Error> {
        let fault = match verdict {
            Verdict::Accepted => return Ok(()),
            Verdict::Taken(_) => EditError::FilledTwice {
                tensor: name.to_owned(),
            },
            Verdict::Incomplete => self.missing(),
            Verdict::Ended(End::Committed) => EditError::Committed,
            Verdict::Ended(End::Abandoned) => EditError::Abandoned,
        };
        Err(self.refuse(fault))
    }

    /// The first tensor that has bytes which were not written.
    fn missing(&self) -> EditError {
        let found = |entry: &Entry<'_>| self.journal.written(&(entry.begin..entry.end));
        let missing = self.header.entries().find(|entry| found(entry) < entry.nbytes());
        match missing {
            Some(entry) => EditError::NotFilled {
                tensor: entry.name.to_owned(),
                expected: entry.nbytes(),
                found: found(&entry),
            },
            None => EditError::BrokenJournal,
        }
    }

    fn refuse(&self, fault: EditError) -> Error {
        fault.about(&self.path)
    }
}

/// Writes `count` bytes of `payload` from `begin` on at `position`.
pub(super) fn put(
    payload: &Payload<'_>,
    begin: u64,
    count: u64,
    file: &File,
    position: u64,
    buffer: &mut Vec<u8>,
    watch: &dyn Watch,
) -> io::Result<()> {
    let range = || Some(to_usize(begin)?..to_usize(begin + count)?);
    if let (Payload::Bytes(bytes), Some(range)) = (payload, range()) {
        return bytes.lend(range, |bytes| crate::disk::write_all_at(file, bytes, position));
    }
    if let (Payload::Device(bytes), Some(range)) = (payload, range()) {
        let mut position = position;
        let write = |stop: StopFlag<'_>| {
            bytes.each(range, stop, |bytes| {
                crate::disk::write_all_at(file, bytes, position)?;
                position += to_u64(bytes.len());
                Ok(())
            })
        };
        return watched(false, write, &Asked(watch)).map_err(|_| io::Error::other(Error::Interrupted))?;
    }
    if let Payload::File(range) = payload {
        return range.copy(begin..begin + count, file, position, buffer);
    }
    buffer.resize(to_usize(count).unwrap_or(usize::MAX), 0);
    payload.read_watched(begin, buffer, watch)?;
    crate::disk::write_all_at(file, buffer, position)
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
