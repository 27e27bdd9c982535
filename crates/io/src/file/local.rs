//! A file of this machine, read by position.
//!
//! A process may open some thousand files at most, often 1,024, and a checkpoint may have more shards. A file that is
//! alone stays open. One of many is opened when it is read, and only the files that were opened last stay open.

use std::fs::File;
use std::io;
#[cfg(target_os = "linux")]
use std::io::IoSliceMut;
#[cfg(target_os = "linux")]
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, Weak};

#[cfg(target_os = "linux")]
use ingot_format::Row;
use ingot_format::briefly;

use super::mapping::Mapping;
use super::open::{OPEN_FILES, OpenFiles, Opened, Place};
use super::read_at::ReadAt;
#[cfg(target_os = "linux")]
use super::residency;
use super::stamp::Stamp;
use crate::disk::{self, Facts, Refusal};
use crate::error::{Error, unopened};
use crate::memory::Memory;

/// Places of a file that are examined to learn whether it is in the page cache.
#[cfg(target_os = "linux")]
const WINDOWS: u64 = 32;

/// A regular file. Any number of threads may read it at once, since reading by position needs no seeking.
#[derive(Debug)]
pub struct LocalFile {
    stamp: Stamp,
    descriptor: Descriptor,
    mapping: OnceLock<Mapping>,
}

#[derive(Debug)]
enum Descriptor {
    /// Open as long as the file is in use: a file that is replaced by name stays readable.
    Kept(Opened),
    Reopened(Reopened),
}

/// One of many files, which is opened when it is read.
#[derive(Debug)]
struct Reopened {
    place: Place,
    /// As [`Opened::remote`]; unknown until the file was opened once.
    remote: OnceLock<Option<&'static str>>,
    opened: Mutex<Weak<Opened>>,
    others: &'static OpenFiles,
}

impl LocalFile {
    /// Open the file at `path`, which stays open.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn open(path: &Path) -> Result<LocalFile, Error> {
        let open = || Ok(disk::open_for_reading(path)?);
        let file = OPEN_FILES.with_room(open).map_err(io::Error::from);
        file.and_then(LocalFile::of).map_err(unopened(path))
    }

    /// Take over an open file.
    ///
    /// # Errors
    /// A system error; the file is a directory, a FIFO, a socket or a device.
    pub fn of(file: File) -> io::Result<LocalFile> {
        let (opened, stamp) = Opened::new(file)?;
        Ok(LocalFile {
            stamp,
            descriptor: Descriptor::Kept(opened),
            mapping: OnceLock::new(),
        })
    }

    /// Open the file at `path`, which may be one of many: it may be closed and opened again between reads.
    pub(crate) fn open_one_of_many(path: &Path) -> Result<LocalFile, Error> {
        let place = Place::of(path);
        let file = place.open().map_err(io::Error::from);
        let file = file.and_then(|file| LocalFile::one_of_many(place, file));
        file.map_err(unopened(path))
    }

    /// As [`LocalFile::open_one_of_many`], for the `file` that was opened at `place`.
    pub(crate) fn one_of_many(place: Place, file: File) -> io::Result<LocalFile> {
        LocalFile::among(&OPEN_FILES, place, file)
    }

    fn among(others: &'static OpenFiles, place: Place, file: File) -> io::Result<LocalFile> {
        let (opened, stamp) = Opened::new(file)?;
        let reopened = Reopened::new(others, place);
        reopened.keep(opened);
        Ok(LocalFile::reopened(stamp, reopened))
    }

    /// Return the file at `place`, which has these `facts` and is opened when it is read.
    pub(crate) fn unopened(place: Place, facts: &Facts) -> LocalFile {
        LocalFile::reopened(Stamp::of(facts), Reopened::new(&OPEN_FILES, place))
    }

    fn reopened(stamp: Stamp, reopened: Reopened) -> LocalFile {
        LocalFile {
            stamp,
            descriptor: Descriptor::Reopened(reopened),
            mapping: OnceLock::new(),
        }
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
        if self.mapping.get().is_none() {
            let mapping = self.with(Mapping::new)?;
            // Another thread may have been first; its mapping is as good.
            drop(self.mapping.set(mapping));
        }
        Ok(())
    }
}

impl Reopened {
    fn new(others: &'static OpenFiles, place: Place) -> Reopened {
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
        // Two saves within one tick of the clock give files of one time.
        if !expected.is_in_its_place(&now, opened.remote.is_some()) {
            return Err(replaced());
        }
        Ok(self.keep(opened))
    }

    /// Keep the file open for other reads, and return the descriptor that they use: of two threads that opened the file,
    /// the first one's.
    fn keep(&self, opened: Opened) -> Arc<Opened> {
        self.remote.get_or_init(|| opened.remote);
        let opened = Arc::new(opened);
        // A lock that a fork left closed stays closed: the file is then open for this read only.
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

fn replaced() -> io::Error {
    io::Error::other("another file has its place, or the file was written to")
}

impl ReadAt for LocalFile {
    fn nbytes(&self) -> u64 {
        self.stamp.nbytes()
    }

    fn check_size(&self) -> io::Result<()> {
        self.opened(|opened| match opened.remote {
            // A network or another process makes up the size of its file system.
            Some(_) => Ok(()),
            None => disk::check_extent(&opened.file, self.stamp.nbytes()),
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
        let map = || self.with(Mapping::unwritten).ok();
        let is_whole = || matches!(self.nbytes_now(), Ok(Some(now)) if now == self.nbytes());
        let mapping = self.mapping.get();
        mapping.is_some_and(|mapping| mapping.copy_rows(map, rows, dest, is_whole))
    }

    fn memory(&self) -> Option<&Arc<Memory>> {
        self.mapping.get().map(Mapping::memory)
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

#[cfg(test)]
mod tests {
    use super::super::read_at::read_exactly;
    use super::*;
    use crate::memory::Block;
    use ingot_format::{StopFlag, to_u64};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Files that share a list of open files.
    struct ManyFiles {
        folder: tempfile::TempDir,
        open: &'static OpenFiles,
        files: Vec<LocalFile>,
    }

    impl ManyFiles {
        fn new(most: usize, count: u8) -> ManyFiles {
            let folder = tempfile::tempdir().unwrap();
            let open: &'static OpenFiles = Box::leak(Box::new(OpenFiles::new(most)));
            let files = Vec::new();
            let mut made = ManyFiles { folder, open, files };
            for number in 0..count {
                std::fs::write(made.path(number), [number; 9]).unwrap();
                made.files.push(made.open(number));
            }
            made
        }

        fn open(&self, number: u8) -> LocalFile {
            let path = self.path(number);
            let file = File::open(&path).unwrap();
            LocalFile::among(self.open, Place::of(&path), file).unwrap()
        }

        fn path(&self, number: u8) -> PathBuf {
            self.folder.path().join(number.to_string())
        }

        fn read(&self, number: u8) -> io::Result<u8> {
            let mut byte = [0];
            let count = self.files[usize::from(number)].read_at(3, &mut byte)?;
            assert_eq!(count, 1);
            Ok(byte[0])
        }

        fn is_open(&self, number: u8) -> bool {
            self.files[usize::from(number)].if_open(|_| ()).is_some()
        }

        /// The files that are open, in order.
        fn all_open(&self, count: u8) -> Vec<u8> {
            (0..count).filter(|&number| self.is_open(number)).collect()
        }

        fn slot(&self, number: usize) -> &Mutex<Weak<Opened>> {
            match &self.files[number].descriptor {
                Descriptor::Reopened(file) => &file.opened,
                Descriptor::Kept(_) => panic!("it is one of many"),
            }
        }
    }

    fn replace(path: &Path, with: &[u8]) {
        let other = path.with_extension("new");
        std::fs::write(&other, with).unwrap();
        if cfg!(windows) {
            // Not every version of Windows replaces a file that is open, but all rename it.
            std::fs::rename(path, path.with_extension("old")).unwrap();
        }
        std::fs::rename(other, path).unwrap();
    }

    #[test]
    fn what_fits_stays_open() {
        let files = ManyFiles::new(4, 4);
        let opened = files.slot(3).lock().unwrap().clone();
        for number in [0, 1, 2, 3, 3, 0] {
            assert_eq!(files.read(number).unwrap(), number);
        }
        assert_eq!(files.all_open(4), [0, 1, 2, 3]);
        assert!(
            opened.ptr_eq(&files.slot(3).lock().unwrap()),
            "it was opened once"
        );
    }

    #[test]
    fn the_file_that_was_opened_first_is_closed_and_opened_again_when_it_is_read() {
        let files = ManyFiles::new(2, 3);
        assert_eq!(files.all_open(3), [1, 2]);
        assert_eq!(files.read(0).unwrap(), 0);
        assert_eq!(files.all_open(3), [0, 2]);
    }

    #[test]
    fn a_file_that_is_read_is_not_closed() {
        let files = ManyFiles::new(1, 2);
        let outcome = files.files[0].with(|_| {
            assert_eq!(files.read(1).unwrap(), 1);
            Ok(files.is_open(0))
        });
        assert!(outcome.unwrap());
        assert_eq!(files.all_open(2), [1]);
    }

    #[test]
    fn a_file_that_was_not_opened_yet_is_opened_when_it_is_read() {
        let files = ManyFiles::new(1, 1);
        let path = files.path(0);
        let file = LocalFile::unopened(Place::of(&path), &disk::facts_at(&path).unwrap());
        assert!(file.if_open(|_| ()).is_none());
        assert_eq!(file.nbytes_now().unwrap(), Some(9));
        file.ensure_open().unwrap();
        assert!(file.if_open(|_| ()).is_some());
    }

    #[test]
    fn a_file_that_was_replaced_while_it_was_closed_is_refused() {
        for (bytes, nbytes_now) in [(&[7; 9][..], None), (&[7; 5], Some(5))] {
            let files = ManyFiles::new(1, 2);
            assert!(!files.is_open(0));
            let modified = std::fs::metadata(files.path(0)).unwrap().modified().unwrap();
            replace(&files.path(0), bytes);
            // As a tool does that keeps the times of what it copies.
            let other = File::options().write(true).open(files.path(0)).unwrap();
            other.set_modified(modified).unwrap();
            assert!(files.read(0).is_err());
            assert_eq!(files.files[0].nbytes_now().unwrap(), nbytes_now);
        }
    }

    #[test]
    fn a_file_that_was_replaced_while_it_was_open_is_read_as_it_was() {
        let files = ManyFiles::new(1, 1);
        replace(&files.path(0), &[7; 9]);
        assert_eq!(files.read(0).unwrap(), 0);
        assert_eq!(files.files[0].nbytes_now().unwrap(), Some(9));
    }

    #[test]
    fn a_file_that_is_gone_says_so() {
        let files = ManyFiles::new(1, 2);
        std::fs::remove_file(files.path(0)).unwrap();
        assert_eq!(files.read(0).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(files.files[0].nbytes_now().unwrap(), None);
    }

    #[test]
    fn a_lock_that_a_fork_left_closed_stops_no_read() {
        let files = ManyFiles::new(2, 2);
        {
            let _slot = files.slot(0).lock().unwrap();
            assert_eq!(files.read(0).unwrap(), 0);
        }
        let _open = files.open.lock();
        assert_eq!(files.read(1).unwrap(), 1);
        let late = files.open(1);
        assert!(late.if_open(|_| ()).is_none(), "no later file would close it");
    }

    #[test]
    fn many_threads_read_many_files_through_few_descriptors() {
        let files = ManyFiles::new(3, 20);
        std::thread::scope(|scope| {
            for start in 0..8_u8 {
                let files = &files;
                scope.spawn(move || {
                    for step in 0..200 {
                        let number = (5 * start + step) % 20;
                        let mut all = [0; 9];
                        read_exactly(&files.files[usize::from(number)], 0, &mut all, StopFlag::never())
                            .unwrap();
                        assert_eq!(all, [number; 9]);
                    }
                });
            }
        });
        assert_eq!(files.all_open(20).len(), 3);
    }

    #[test]
    fn descriptors_of_dropped_files_are_closed() {
        let mut files = ManyFiles::new(2, 6);
        assert_eq!(files.open.lock().len(), 2);
        files.files.clear();
        assert_eq!(files.open.lock().len(), 0);
    }

    #[test]
    fn a_process_that_has_no_descriptor_left_closes_idle_files() {
        let files = ManyFiles::new(4, 4);
        let tries = AtomicUsize::new(0);
        let opened = files
            .open
            .with_room(|| match tries.fetch_add(1, Ordering::Relaxed) {
                0 => Err(disk::out_of_descriptors().into()),
                _ => Ok(File::open(files.path(0))?),
            });
        assert!(opened.is_ok());
        assert_eq!(files.all_open(4), [0; 0]);
        assert_eq!(files.read(2).unwrap(), 2);
    }

    const NBYTES: usize = (5 << 20) + 1234;
    /// A block of a disk, and a page of memory.
    const BLOCK: usize = 4096;

    /// A file of which the system holds nothing in memory, where it can give that up.
    fn cold() -> (tempfile::NamedTempFile, LocalFile, Vec<u8>) {
        let mixed = |n: usize| n.to_le_bytes()[1] ^ n.to_le_bytes()[0];
        let bytes: Vec<u8> = (0..NBYTES).map(mixed).collect();
        let folder = std::env::var_os("CARGO_TARGET_TMPDIR").unwrap_or_else(|| ".".into());
        let named = tempfile::NamedTempFile::new_in(folder).unwrap();
        disk::write_all_at(named.as_file(), &bytes, 0).unwrap();
        named.as_file().sync_all().unwrap();
        let source = LocalFile::of(File::open(named.path()).unwrap()).unwrap();
        source.forget(0..to_u64(NBYTES));
        (named, source, bytes)
    }

    /// Memory that begins `at` bytes into a page.
    fn placed(at: usize, nbytes: usize, work: impl FnOnce(&mut [u8])) {
        let mut block = Block::allocate(at + nbytes).unwrap();
        let (_, mut dest) = block.dest().split_at(at);
        dest.fill(work);
    }

    #[test]
    fn a_loop_of_reads_fills_everything_and_never_reads_a_wrong_end() {
        let (_named, source, bytes) = cold();
        for position in [0, 8, 4096, 5000] {
            for (at, nbytes) in [
                (0, NBYTES),
                (position % BLOCK, NBYTES),
                (0, 2 << 20),
                (8, (1 << 20) + 1),
            ] {
                let expected = &bytes[position..NBYTES.min(position + nbytes)];
                placed(at, expected.len() + 1, |dest| {
                    let (dest, after) = dest.split_at_mut(expected.len());
                    read_exactly(&source, to_u64(position), dest, StopFlag::never()).unwrap();
                    assert!(dest == expected, "{position} to {at}");
                    assert_eq!(after, [0], "not a byte more");
                });
            }
        }
    }

    #[test]
    fn a_file_that_was_shortened_gives_what_is_there_and_then_ends() {
        let (named, source, bytes) = cold();
        let left = 3 * BLOCK + 7;
        named.as_file().set_len(to_u64(left)).unwrap();
        let mut dest = vec![0; NBYTES];
        let mut found = 0;
        loop {
            match source.read_at(to_u64(found), &mut dest[found..]).unwrap() {
                0 => break,
                count => found += count,
            }
        }
        assert_eq!(found, left);
        assert!(dest[..left] == bytes[..left]);
        let fault = read_exactly(&source, 0, &mut dest, StopFlag::never()).unwrap_err();
        assert!(
            matches!(fault, crate::error::Failure::Read { found, .. } if found == left),
            "{fault:?}"
        );
    }
}
