//! A file of this machine, which is mapped or read by position.
//!
//! A process may have some thousand files open at most, often 1,024, and a checkpoint may have more shards. A single file
//! stays open. One of many is opened when it is read, and only the files that were opened last stay open.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io;
#[cfg(target_os = "linux")]
use std::io::IoSliceMut;
use std::mem;
#[cfg(target_os = "linux")]
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, Weak};

#[cfg(target_os = "linux")]
use ingot_format::Row;
use ingot_format::briefly;
#[cfg(target_os = "linux")]
use memmap2::MmapOptions;

#[cfg(target_os = "linux")]
use super::direct::{self, DirectReader};
#[cfg(target_os = "linux")]
use super::residency;
#[cfg(target_os = "linux")]
use super::rows::RowReader;
use super::source::ReadAt;
use crate::disk::{self, Beneath, Facts, Kind, Refusal, is_out_of_descriptors, remote_file_system};
use crate::error::{Error, Failure, unopened};
use crate::memory::{Memory, mapped_files};
use crate::options::{BACKEND_VARIABLE, Backend};

/// Files that are mapped at once by default; further files are read. A process has 65,530 mappings on Linux, and allocators
/// and thread stacks use some of them.
const MOST_MAPPED: usize = 16_384;

/// Positions of a file that are sampled to estimate whether it is in the page cache.
#[cfg(target_os = "linux")]
const WINDOWS: u64 = 32;

/// Files of checkpoints that stay open between reads. Each may use a second descriptor for direct reads, and each reading
/// thread keeps its own file open: with the 16 threads that open and read local files, that is 128 descriptors.
const MOST_OPEN: usize = 48;

static OPEN_FILES: OpenFiles = OpenFiles::new(MOST_OPEN);

/// Return how many files of checkpoints stay open between reads.
pub(crate) fn most_open() -> usize {
    OPEN_FILES.most()
}

/// A regular file. Any number of threads may read it at once, since reading by position needs no seeking.
#[derive(Debug)]
pub struct LocalFile {
    /// The facts of the file when it was opened first.
    facts: Facts,
    /// The name of the file system if reading from it waits for a network or another process. Unknown until the file was
    /// opened once.
    remote: OnceLock<Option<&'static str>>,
    descriptor: Descriptor,
    /// The whole file, if it is mapped.
    memory: OnceLock<Arc<Memory>>,
    #[cfg(target_os = "linux")]
    rows: RowReader,
}

#[derive(Debug)]
enum Descriptor {
    /// Open as long as the file is in use: a file that is replaced by name stays readable.
    Kept(Opened),
    Reopened(Reopened),
}

impl LocalFile {
    /// Open the file at `path`, which stays open.
    ///
    /// # Errors
    /// [`Failure::Open`].
    pub fn open(path: &Path) -> Result<LocalFile, Error> {
        let file = with_room(&OPEN_FILES, || Ok(disk::open_for_reading(path)?));
        let file = file.map_err(io::Error::from).and_then(LocalFile::of);
        file.map_err(unopened(path))
    }

    /// Take over an open file.
    ///
    /// # Errors
    /// A system error; the file is a directory, a FIFO, a socket or a device.
    pub fn of(file: File) -> io::Result<LocalFile> {
        let facts = regular(&file)?;
        let remote = remote_file_system(&file);
        let kept = LocalFile::new(facts, Descriptor::Kept(Opened::new(file, remote)));
        Ok(LocalFile {
            remote: OnceLock::from(remote),
            ..kept
        })
    }

    fn new(facts: Facts, descriptor: Descriptor) -> LocalFile {
        LocalFile {
            facts,
            remote: OnceLock::new(),
            descriptor,
            memory: OnceLock::new(),
            #[cfg(target_os = "linux")]
            rows: RowReader::default(),
        }
    }

    /// Open the file at `path`, which may be one of many: it may be closed and opened again between reads.
    pub(crate) fn open_one_of_many(path: &Path) -> Result<LocalFile, Error> {
        let file = LocalFile::one_of_many(Place::of(path));
        file.map_err(io::Error::from).map_err(unopened(path))
    }

    /// As [`LocalFile::open_one_of_many`], for the file that has this place now.
    pub(crate) fn one_of_many(place: Place) -> Result<LocalFile, Refusal> {
        LocalFile::among(&OPEN_FILES, place)
    }

    fn among(others: &'static OpenFiles, place: Place) -> Result<LocalFile, Refusal> {
        let file = place.open()?;
        let facts = regular(&file)?;
        let reopened = Reopened::new(others, place);
        let remote = remote_file_system(&file);
        reopened.keep(Opened::new(file, remote));
        Ok(LocalFile {
            remote: OnceLock::from(remote),
            ..LocalFile::new(facts, Descriptor::Reopened(reopened))
        })
    }

    /// Return the file at `place`, which has these `facts` and is opened when it is read.
    pub(crate) fn unopened(place: Place, facts: Facts) -> LocalFile {
        LocalFile::new(facts, Descriptor::Reopened(Reopened::new(&OPEN_FILES, place)))
    }

    /// Return the facts of the file when it was opened first.
    pub(crate) fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Return the name of the file system if reading from it waits for a network or another process.
    pub(crate) fn remote(&self) -> Option<&'static str> {
        self.remote.get().copied().flatten()
    }

    /// Return text that differs between versions, and whether other machines see the same file.
    pub(crate) fn identity(&self) -> (String, bool) {
        // Not the number of the file, which may differ between containers.
        let text = format!("{} bytes, {}", self.facts.nbytes, self.written());
        (text, self.remote().is_some())
    }

    /// Return text that other machines with this file system compare. It omits the number of the file, which may differ
    /// between machines.
    fn written(&self) -> String {
        let (seconds, rest) = self.facts.modified;
        format!("written {seconds} {rest}")
    }

    /// Call `work` with the open file.
    ///
    /// # Errors
    /// The errors of `work`; an error of opening the file again; an error if another file has its place now.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&File) -> io::Result<R>) -> io::Result<R> {
        self.opened(|opened| work(&opened.file))
    }

    fn opened<R>(&self, work: impl FnOnce(&Opened) -> io::Result<R>) -> io::Result<R> {
        match &self.descriptor {
            Descriptor::Kept(opened) => work(opened),
            Descriptor::Reopened(reopened) => match reopened.find() {
                Some(opened) => work(&opened),
                None => work(&reopened.keep(self.open_again(&reopened.place)?)),
            },
        }
    }

    fn open_again(&self, place: &Place) -> io::Result<Opened> {
        let file = place.open()?;
        let now = regular(&file)?;
        let remote = *self.remote.get_or_init(|| remote_file_system(&file));
        // The number of the file is compared too: two saves within one tick of the clock have one time.
        if !is_in_its_place(&self.facts, &now, remote.is_some()) {
            return Err(replaced());
        }
        Ok(Opened::new(file, remote))
    }

    /// Call `work` with the file if it is open.
    fn if_open<R>(&self, work: impl FnOnce(&Opened) -> R) -> Option<R> {
        match &self.descriptor {
            Descriptor::Kept(opened) => Some(work(opened)),
            Descriptor::Reopened(file) => file.find().map(|opened| work(&opened)),
        }
    }

    /// Open the file if it is closed.
    ///
    /// # Errors
    /// As [`LocalFile::with`]; the open file was written to.
    pub(crate) fn ensure_open(&self) -> io::Result<()> {
        let Some(facts) = self.if_open(|opened| disk::facts(&opened.file)) else {
            return self.with(|_| Ok(()));
        };
        if is_unwritten(&self.facts, &facts?) {
            Ok(())
        } else {
            Err(replaced())
        }
    }

    /// Choose the backend if the caller requests `asked`, map the file if that is the backend, and return the choice with its
    /// reason. Errors name `path`.
    pub(super) fn attach(
        &self,
        asked: Backend,
        path: &Path,
    ) -> Result<(&'static str, Cow<'static, str>), Error> {
        let variable = std::env::var(BACKEND_VARIABLE).ok();
        let (backend, why) = choose(asked, variable.as_deref(), self.remote(), mapped_files())?;
        if backend == Backend::Mmap
            && let Err(fault) = self.map()
        {
            if asked != Backend::Auto {
                return Err(unopened(path)(fault));
            }
            // Address space may be limited, or the file system unable to map.
            let why = format!("mapping the file failed: {fault}");
            return Ok((Backend::Pread.name(), why.into()));
        }
        Ok((backend.name(), why))
    }

    /// Map the whole file into memory. The mapping needs no descriptor afterwards.
    pub(crate) fn map(&self) -> io::Result<()> {
        if self.memory.get().is_none() {
            let memory = self.with(Memory::map)?;
            // Another thread may have been first; its mapping is as good.
            drop(self.memory.set(Arc::new(memory)));
        }
        Ok(())
    }
}

/// Choose the backend of a file, with the reason. `remote` is its file system if reading from it waits for a network or another
/// process, `variable` the value of [`BACKEND_VARIABLE`] if that is set, and `mapped` the number of mapped files.
fn choose(
    asked: Backend,
    variable: Option<&str>,
    remote: Option<&'static str>,
    mapped: usize,
) -> Result<(Backend, Cow<'static, str>), Error> {
    let chosen = |backend, why| Ok((backend, why));
    if asked != Backend::Auto {
        return chosen(asked, "asked for by the caller".into());
    }
    match variable {
        None | Some("" | "auto") => {}
        Some(name) => {
            let backend = Backend::from_name(name).ok_or_else(|| Failure::UnknownBackend(name.to_owned()))?;
            return chosen(backend, format!("{BACKEND_VARIABLE}={backend}").into());
        }
    }
    if cfg!(windows) {
        let why = "mapped files on Windows count against the commit limit and cannot be replaced";
        return chosen(Backend::Pread, why.into());
    }
    // The choice does not depend on the page cache: from a disk, both backends take as long (2026-11: 2 GiB in 1.2 to 1.4 s),
    // and a mapping leaves the pages in the cache for the next process.
    match remote {
        Some(name) => chosen(Backend::Pread, format!("{name} is slow to map").into()),
        None if mapped >= MOST_MAPPED => chosen(
            Backend::Pread,
            format!("{mapped} files are mapped already").into(),
        ),
        None => chosen(Backend::Mmap, "local file system".into()),
    }
}

fn replaced() -> io::Error {
    io::Error::other("another file has its place, or the file was written to")
}

impl ReadAt for LocalFile {
    fn nbytes(&self) -> u64 {
        self.facts.nbytes
    }

    fn check_size(&self) -> io::Result<()> {
        self.with(|file| match self.remote() {
            // A server or another process reports the size of such a file system, so that it proves nothing.
            Some(_) => Ok(()),
            None => disk::check_extent(file, self.facts.nbytes),
        })
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        // Reads by position, even if the file is mapped: if another process truncated it, this is a short read, while copying
        // from the mapping would cause SIGBUS.
        self.opened(|opened| {
            #[cfg(target_os = "linux")]
            if dest.len() >= direct::LEAST_NBYTES
                && !self.waits()
                && let Some(count) = opened.direct.read_at(&opened.file, position, dest)
            {
                return Ok(count);
            }
            disk::read_at(&opened.file, dest, position)
        })
    }

    #[cfg(target_os = "linux")]
    fn is_vectored(&self) -> bool {
        true
    }

    #[cfg(target_os = "linux")]
    fn read_vectored_at(&self, position: u64, dests: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.with(|file| Ok(rustix::io::preadv(file, dests, position)?))
    }

    #[cfg(target_os = "linux")]
    fn copy_rows(&self, rows: &[Row], dest: &mut [u8]) -> bool {
        let map = || self.with(|file| MmapOptions::new().map_raw_read_only(file)).ok();
        let is_whole = || matches!(self.nbytes_now(), Ok(Some(now)) if now == self.nbytes());
        self.memory.get().is_some() && self.rows.copy(map, rows, dest, is_whole)
    }

    fn memory(&self) -> Option<&Arc<Memory>> {
        self.memory.get()
    }

    fn waits(&self) -> bool {
        self.remote().is_some()
    }

    #[cfg(target_os = "linux")]
    fn is_cold(&self, span: &Range<u64>) -> bool {
        // Closed files are not checked: the open files of a checkpoint are enough to choose the number of threads.
        self.remote().is_none()
            && self.if_open(|opened| residency::is_cold(&opened.file, span, WINDOWS)) == Some(true)
    }

    #[cfg(target_os = "linux")]
    fn forget(&self, span: Range<u64>) {
        // A closed file is not opened again for advice.
        self.if_open(|opened| residency::forget(&opened.file, &span));
    }

    fn version(&self) -> Option<String> {
        self.waits().then(|| self.written())
    }

    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        let (now, waits) = match (self.if_open(|opened| disk::facts(&opened.file)), &self.descriptor) {
            // An open descriptor still refers to the same file, although its number may change on Windows after its deletion.
            (Some(facts), _) => (Some(facts?), true),
            (None, Descriptor::Reopened(reopened)) => (reopened.place.facts_now()?, self.waits()),
            (None, Descriptor::Kept(_)) => (None, true),
        };
        // The file may have changed without a change of its size.
        let shows = |now: &Facts| now.nbytes != self.facts.nbytes || is_in_its_place(&self.facts, now, waits);
        Ok(now.filter(shows).map(|now| now.nbytes))
    }
}

/// Return whether a file was not written to between `then` and `now`.
fn is_unwritten(then: &Facts, now: &Facts) -> bool {
    // Not the inode's change time or link count: replacing the file by rename alters them, and an open descriptor
    // still reads the old file unharmed.
    now.nbytes == then.nbytes && now.modified == then.modified
}

/// Return whether the file that has the path `now` is the same file as `then`, and unwritten. A file system that `waits` for a
/// network or another process may number a file anew at each opening (FUSE, CIFS): there only size and time count.
pub(crate) fn is_in_its_place(then: &Facts, now: &Facts, waits: bool) -> bool {
    is_unwritten(then, now) && (waits || now.identity == then.identity)
}

/// Return the facts of an open file. Fail if it is a directory, a FIFO, a socket or a device.
fn regular(file: &File) -> io::Result<Facts> {
    let facts = disk::facts(file)?;
    match facts.kind {
        Kind::File => Ok(facts),
        Kind::Directory => Err(disk::is_a_directory()),
        Kind::Link | Kind::Other => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    }
}

/// An open descriptor.
#[derive(Debug)]
struct Opened {
    file: File,
    #[cfg(target_os = "linux")]
    direct: DirectReader,
}

impl Opened {
    #[cfg_attr(
        not(target_os = "linux"),
        allow(unused_variables, reason = "Linux takes advice about reading")
    )]
    fn new(file: File, remote: Option<&'static str>) -> Opened {
        #[cfg(target_os = "linux")]
        if remote.is_some() {
            residency::read_far_ahead(&file);
        }
        Opened {
            file,
            #[cfg(target_os = "linux")]
            direct: DirectReader::default(),
        }
    }
}

/// The place of a file that may be opened several times.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Path(PathBuf),
    /// A name in a directory that the file must not leave.
    Beneath(Arc<Beneath>, OsString),
}

impl Place {
    /// Return the place of `path`, which stays valid when the process changes its directory.
    fn of(path: &Path) -> Place {
        Place::Path(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
    }

    /// Open the file that has this place now.
    pub(crate) fn open(&self) -> Result<File, Refusal> {
        with_room(&OPEN_FILES, || match self {
            Place::Path(path) => Ok(disk::open_for_reading(path)?),
            Place::Beneath(directory, name) => {
                let file = directory.open(name)?;
                let facts = disk::facts(&file)?;
                if facts.kind == Kind::File && facts.names != 1 {
                    return Err(Refusal::Elsewhere(
                        "it has a second name somewhere, which is a hard link",
                    ));
                }
                Ok(file)
            }
        })
    }

    /// Return the facts of the file that has this place now. Only a confined file is opened for that.
    pub(crate) fn facts(&self) -> Result<Facts, Refusal> {
        match self {
            Place::Path(path) => Ok(disk::facts_at(path)?),
            Place::Beneath(..) => Ok(disk::facts(&self.open()?)?),
        }
    }

    /// As [`Place::facts`]; `None` if no file there may be read.
    fn facts_now(&self) -> io::Result<Option<Facts>> {
        match self.facts() {
            Ok(facts) => Ok(Some(facts)),
            Err(Refusal::Elsewhere(_)) => Ok(None),
            Err(Refusal::System(fault)) if fault.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(Refusal::System(fault)) => Err(fault),
        }
    }
}

/// One of many files, which is opened when it is read.
#[derive(Debug)]
struct Reopened {
    place: Place,
    opened: Mutex<Weak<Opened>>,
    others: &'static OpenFiles,
}

impl Reopened {
    fn new(others: &'static OpenFiles, place: Place) -> Reopened {
        Reopened {
            place,
            opened: Mutex::default(),
            others,
        }
    }

    fn find(&self) -> Option<Arc<Opened>> {
        briefly(&self.opened)?.upgrade()
    }

    /// Keep the file open for other reads, and return the descriptor that they use. If two threads opened the file, that is
    /// the descriptor of the first.
    fn keep(&self, opened: Opened) -> Arc<Opened> {
        let opened = Arc::new(opened);
        // In a forked child the lock may stay locked forever. The file is then open for this read only.
        let Some(mut slot) = briefly(&self.opened) else {
            return opened;
        };
        if let Some(first) = slot.upgrade() {
            return first;
        }
        *slot = Arc::downgrade(&opened);
        drop(slot);
        self.others.keep(Arc::clone(&opened));
        opened
    }
}

impl Drop for Reopened {
    fn drop(&mut self) {
        if let Some(opened) = self.find() {
            self.others.release(&opened);
        }
    }
}

/// The files that were opened last. A file that leaves the list is closed when no thread reads it.
/// In a forked child the lock may stay locked forever. Then no file is kept open.
#[derive(Debug)]
struct OpenFiles {
    most: usize,
    files: Mutex<VecDeque<Arc<Opened>>>,
}

impl OpenFiles {
    const fn new(most: usize) -> OpenFiles {
        OpenFiles {
            most,
            files: Mutex::new(VecDeque::new()),
        }
    }

    /// Return how many files stay open: at most a quarter of the descriptors that the process may have.
    fn most(&self) -> usize {
        self.most.min(disk::descriptors_allowed() / 4)
    }

    /// Keep `file` open until as many other files were opened after it.
    fn keep(&self, file: Arc<Opened>) {
        let Some(mut files) = briefly(&self.files) else {
            return;
        };
        files.push_back(file);
        let surplus = files.len().saturating_sub(self.most());
        let closed: Vec<_> = files.drain(..surplus).collect();
        // Closing may take time on a network file system, so the lock is released first.
        drop((files, closed));
    }

    /// Stop keeping `file` open.
    fn release(&self, file: &Arc<Opened>) {
        if let Some(mut files) = briefly(&self.files) {
            files.retain(|kept| !Arc::ptr_eq(kept, file));
        }
    }

    /// Stop keeping files open.
    fn clear(&self) {
        drop(briefly(&self.files).map(|mut files| mem::take(&mut *files)));
    }
}

/// Call `open`. If the process has no descriptor left, close the idle files of `kept` and call `open` again.
fn with_room(kept: &OpenFiles, open: impl Fn() -> Result<File, Refusal>) -> Result<File, Refusal> {
    match open() {
        Err(Refusal::System(fault)) if is_out_of_descriptors(&fault) => {
            kept.clear();
            open()
        }
        opened => opened,
    }
}

#[cfg(test)]
pub(super) mod tests;
