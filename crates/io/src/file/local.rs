//! A file of this machine, read by position.
//!
//! A process may have some thousand files open at most, often 1,024, and a checkpoint may have more shards. A single file
//! stays open. One of many is opened when it is read, and only the files that were opened last stay open.

use std::ffi::OsString;
use std::fs::File;
use std::io;
#[cfg(target_os = "linux")]
use std::io::IoSliceMut;
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
use super::pool::OpenFiles;
#[cfg(target_os = "linux")]
use super::residency;
#[cfg(target_os = "linux")]
use super::rows::RowReader;
use super::source::ReadAt;
use crate::disk::{self, Beneath, Facts, Kind, Refusal, is_out_of_descriptors, remote_file_system};
use crate::error::{Error, unopened};
use crate::memory::Memory;

/// Positions of a file that are sampled to estimate whether it is in the page cache.
#[cfg(target_os = "linux")]
const WINDOWS: u64 = 32;

/// Files of checkpoints that stay open between reads. Each may use a second descriptor for direct reads, and each reading
/// thread keeps its own file open: with the 16 threads that open and read local files, that is 128 descriptors.
const MOST_OPEN: usize = 48;

static OPEN_FILES: OpenFiles<Opened> = OpenFiles::new(MOST_OPEN);

/// Return how many files of checkpoints stay open between reads.
pub(crate) fn most_open() -> usize {
    OPEN_FILES.most()
}

/// The version of a file: its identity, size and time of modification.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamp {
    /// The device, and the number of the file there.
    identity: (u64, u64),
    nbytes: u64,
    modified: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(facts: &Facts) -> Stamp {
        Stamp {
            identity: facts.identity,
            nbytes: facts.nbytes,
            modified: facts.modified,
        }
    }

    pub(crate) fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Return text that other machines with this file system compare. It omits the number of the file, which may differ
    /// between machines.
    fn version(&self) -> String {
        format!("written {} {}", self.modified.0, self.modified.1)
    }

    /// Return text that differs between versions. It omits the number of the file, which may differ between containers.
    pub(crate) fn identity(&self) -> String {
        format!("{} bytes, {}", self.nbytes, self.version())
    }

    /// Return the size in `now`; `None` if the file changed and its size does not show that. The numbers of the files are
    /// compared unless `is_renumbered`.
    fn nbytes_now(&self, now: &Stamp, is_renumbered: bool) -> Option<u64> {
        (now.nbytes != self.nbytes || self.is_in_its_place(now, is_renumbered)).then_some(now.nbytes)
    }

    /// Return whether the file was not written to between this stamp and `now`.
    pub(crate) fn is_unwritten(&self, now: &Stamp) -> bool {
        // Not the inode's change time or link count: replacing the file by rename alters them, and an open descriptor
        // still reads the old file unharmed.
        now.nbytes == self.nbytes && now.modified == self.modified
    }

    /// Return whether `now` belongs to the same file, which may have been written to.
    pub(crate) fn is_same_file(&self, now: &Stamp) -> bool {
        now.identity == self.identity
    }

    /// Return whether the file that now has the path is the same file, and unwritten. A file system that `waits` for a
    /// network or another process may number a file anew at each opening (FUSE, CIFS): there only size and time count.
    pub(crate) fn is_in_its_place(&self, now: &Stamp, waits: bool) -> bool {
        self.is_unwritten(now) && (waits || self.is_same_file(now))
    }
}

/// A regular file. Any number of threads may read it at once, since reading by position needs no seeking.
#[derive(Debug)]
pub struct LocalFile {
    stamp: Stamp,
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
    /// [`Error::Open`].
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
        let (opened, stamp) = Opened::new(file)?;
        Ok(LocalFile::new(stamp, Descriptor::Kept(opened)))
    }

    fn new(stamp: Stamp, descriptor: Descriptor) -> LocalFile {
        LocalFile {
            stamp,
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

    fn among(others: &'static OpenFiles<Opened>, place: Place) -> Result<LocalFile, Refusal> {
        let (opened, stamp) = Opened::new(place.open()?)?;
        let reopened = Reopened::new(others, place);
        reopened.keep(opened);
        Ok(LocalFile::new(stamp, Descriptor::Reopened(reopened)))
    }

    /// Return the file at `place`, which has these `facts` and is opened when it is read.
    pub(crate) fn unopened(place: Place, facts: &Facts) -> LocalFile {
        let reopened = Reopened::new(&OPEN_FILES, place);
        LocalFile::new(Stamp::of(facts), Descriptor::Reopened(reopened))
    }

    /// Return the stamp that the file had when it was opened first.
    pub(crate) fn stamp(&self) -> &Stamp {
        &self.stamp
    }

    /// Return the name of the file system if reading from it waits for a network or another process.
    pub(crate) fn remote(&self) -> Option<&'static str> {
        match &self.descriptor {
            Descriptor::Kept(opened) => opened.remote,
            Descriptor::Reopened(file) => file.remote.get().copied().flatten(),
        }
    }

    /// Return text that differs between versions, and whether other machines see the same file.
    pub(crate) fn identity(&self) -> (String, bool) {
        (self.stamp.identity(), self.remote().is_some())
    }

    /// Call `work` with the open file.
    ///
    /// # Errors
    /// Errors of `work` and of opening the file again; another file has its place.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&File) -> io::Result<R>) -> io::Result<R> {
        self.opened(|opened| work(&opened.file))
    }

    fn opened<R>(&self, work: impl FnOnce(&Opened) -> io::Result<R>) -> io::Result<R> {
        match &self.descriptor {
            Descriptor::Kept(opened) => work(opened),
            Descriptor::Reopened(file) => work(&*file.open(&self.stamp)?),
        }
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
        if self.stamp.is_unwritten(&Stamp::of(&facts?)) {
            Ok(())
        } else {
            Err(replaced())
        }
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

fn replaced() -> io::Error {
    io::Error::other("another file has its place, or the file was written to")
}

impl ReadAt for LocalFile {
    fn nbytes(&self) -> u64 {
        self.stamp.nbytes
    }

    fn check_size(&self) -> io::Result<()> {
        self.opened(|opened| match opened.remote {
            // The size of such a file system is made up by a server or another process.
            Some(_) => Ok(()),
            None => disk::check_extent(&opened.file, self.stamp.nbytes),
        })
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        // Not from the mapping: if another process truncated the file, this is a short read, and copying from the
        // missing pages would be a SIGBUS.
        self.opened(|opened| opened.read_at(position, dest))
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
        // Of many files, the open ones are enough to decide.
        self.remote().is_none()
            && self.if_open(|opened| residency::is_cold(&opened.file, span, WINDOWS)) == Some(true)
    }

    #[cfg(target_os = "linux")]
    fn forget(&self, span: Range<u64>) {
        // A closed file is not opened again for advice.
        self.if_open(|opened| residency::forget(&opened.file, &span));
    }

    fn version(&self) -> Option<String> {
        self.waits().then(|| self.stamp.version())
    }

    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        if let Some(facts) = self.if_open(|opened| disk::facts(&opened.file)) {
            // An open descriptor is of the same file, though Windows may number it otherwise once it is deleted.
            return Ok(self.stamp.nbytes_now(&Stamp::of(&facts?), true));
        }
        let facts = match &self.descriptor {
            Descriptor::Kept(_) => None,
            Descriptor::Reopened(file) => file.facts_at_place()?,
        };
        Ok(facts.and_then(|facts| self.stamp.nbytes_now(&Stamp::of(&facts), self.waits())))
    }
}

/// An open descriptor.
#[derive(Debug)]
struct Opened {
    file: File,
    /// The file system, if reading from it waits for a network or another process.
    remote: Option<&'static str>,
    #[cfg(target_os = "linux")]
    direct: DirectReader,
}

impl Opened {
    /// Take over an open file and return it with its stamp. Fails if it is a directory, a FIFO, a socket or a device.
    fn new(file: File) -> io::Result<(Opened, Stamp)> {
        let facts = disk::facts(&file)?;
        match facts.kind {
            Kind::File => {}
            Kind::Directory => return Err(disk::is_a_directory()),
            Kind::Link | Kind::Other => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
            }
        }
        let remote = remote_file_system(&file);
        #[cfg(target_os = "linux")]
        if remote.is_some() {
            residency::read_far_ahead(&file);
        }
        let opened = Opened {
            file,
            remote,
            #[cfg(target_os = "linux")]
            direct: DirectReader::default(),
        };
        Ok((opened, Stamp::of(&facts)))
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        #[cfg(target_os = "linux")]
        if dest.len() >= direct::LEAST_NBYTES
            && self.remote.is_none()
            && let Some(count) = self.direct.read_at(&self.file, position, dest)
        {
            return Ok(count);
        }
        disk::read_at(&self.file, dest, position)
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
}

/// One of many files, which is opened when it is read.
#[derive(Debug)]
struct Reopened {
    place: Place,
    /// As [`Opened::remote`]; unknown until the file was opened once.
    remote: OnceLock<Option<&'static str>>,
    opened: Mutex<Weak<Opened>>,
    others: &'static OpenFiles<Opened>,
}

impl Reopened {
    fn new(others: &'static OpenFiles<Opened>, place: Place) -> Reopened {
        Reopened {
            place,
            remote: OnceLock::new(),
            opened: Mutex::default(),
            others,
        }
    }

    fn find(&self) -> Option<Arc<Opened>> {
        briefly(&self.opened)?.upgrade()
    }

    fn open(&self, expected: &Stamp) -> io::Result<Arc<Opened>> {
        if let Some(opened) = self.find() {
            return Ok(opened);
        }
        let (opened, now) = Opened::new(self.place.open()?)?;
        // The number of the file is compared too: two saves within one tick of the clock have one time.
        if !expected.is_in_its_place(&now, opened.remote.is_some()) {
            return Err(replaced());
        }
        Ok(self.keep(opened))
    }

    /// Keep the file open for other reads, and return the descriptor that they use. If two threads opened the file, that is
    /// the descriptor of the first.
    fn keep(&self, opened: Opened) -> Arc<Opened> {
        self.remote.get_or_init(|| opened.remote);
        let opened = Arc::new(opened);
        // A fork may have left the lock closed for good: the file is then open for this read only.
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

    /// Return the facts of the file that has the place now; `None` if no file there may be read.
    fn facts_at_place(&self) -> io::Result<Option<Facts>> {
        match self.place.facts() {
            Ok(facts) => Ok(Some(facts)),
            Err(Refusal::Elsewhere(_)) => Ok(None),
            Err(Refusal::System(fault)) if fault.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(Refusal::System(fault)) => Err(fault),
        }
    }
}

impl Drop for Reopened {
    fn drop(&mut self) {
        if let Some(opened) = self.find() {
            self.others.release(&opened);
        }
    }
}

/// Call `open`. If the process has no descriptor left, close the idle files of `kept` and call `open` again.
fn with_room(kept: &OpenFiles<Opened>, open: impl Fn() -> Result<File, Refusal>) -> Result<File, Refusal> {
    match open() {
        Err(Refusal::System(fault)) if is_out_of_descriptors(&fault) => {
            kept.clear();
            open()
        }
        opened => opened,
    }
}

#[cfg(test)]
mod tests;
