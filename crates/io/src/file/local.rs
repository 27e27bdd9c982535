//! A file of this machine, and the descriptor that it is read by.
//!
//! A process may have some thousand descriptors at most, often 1,024, and a model may have more shards. So a file that
//! can be opened again is closed while nobody reads it and others are read: the least recently used first. When it is
//! opened again it is proven to be the one that it was.

use std::fmt::Debug;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use ingot_format::briefly;

use super::{FileSource, ReadAt, Stamp};
use crate::disk::{self, Facts, is_out_of_descriptors};

/// Files that are held open at once, of those that can be opened again. Each may take a second descriptor, for reading
/// past the cache, and a thread that reads keeps what it reads open: with the 16 threads that open and read local files
/// that is 128 at most. Where a process is allowed few, it is a quarter of them.
const MOST: usize = 48;

static POOL: Pool = Pool::of(MOST);

/// The way to a file that was closed.
pub(crate) trait Reopen: Debug + Send + Sync {
    /// Opens it, or whatever is in its place now.
    fn reopen(&self) -> io::Result<File>;

    /// What is there now.
    fn look(&self) -> io::Result<Facts> {
        disk::facts(&self.reopen()?)
    }
}

/// A regular file of this machine. Clones share the descriptor.
#[derive(Clone, Debug)]
pub(crate) struct LocalFile {
    descriptor: Descriptor,
}

#[derive(Clone, Debug)]
enum Descriptor {
    /// Open as long as this is.
    Kept(Arc<FileSource>),
    /// Others may have it while nobody reads.
    Lent(Arc<Lent>),
}

#[derive(Debug)]
struct Lent {
    slot: Arc<Slot>,
    pool: &'static Pool,
    again: Box<dyn Reopen>,
    stamp: Stamp,
    /// The file system, as [`FileSource::remote`] has it.
    remote: Option<&'static str>,
}

impl LocalFile {
    /// A file that stays open. One that is replaced by name goes on to be read as it was.
    pub(crate) fn kept(file: FileSource) -> LocalFile {
        LocalFile {
            descriptor: Descriptor::Kept(Arc::new(file)),
        }
    }

    /// A file that is closed when its descriptor is needed, and opened `again` when it is read.
    pub(crate) fn lent(file: FileSource, again: Box<dyn Reopen>) -> LocalFile {
        LocalFile::lent_to(&POOL, file, again)
    }

    fn lent_to(pool: &'static Pool, file: FileSource, again: Box<dyn Reopen>) -> LocalFile {
        let lent = Lent {
            slot: Arc::default(),
            pool,
            again,
            stamp: *file.stamp(),
            remote: file.remote(),
        };
        pool.admit(&lent.slot, &Arc::new(file));
        LocalFile {
            descriptor: Descriptor::Lent(Arc::new(lent)),
        }
    }

    /// How many lent files stay open at once.
    pub(crate) fn most_held() -> usize {
        POOL.most_held()
    }

    /// The name of its file system if reading from that waits for a network or another process.
    pub(crate) fn remote(&self) -> Option<&'static str> {
        match &self.descriptor {
            Descriptor::Kept(file) => file.remote(),
            Descriptor::Lent(lent) => lent.remote,
        }
    }

    /// The version of the file that was opened, and whether other machines see the file too.
    pub(crate) fn identity(&self) -> (String, bool) {
        match &self.descriptor {
            Descriptor::Kept(file) => (file.stamp().identity(), file.waits()),
            Descriptor::Lent(lent) => (lent.stamp.identity(), lent.remote.is_some()),
        }
    }

    /// Does `work` with the file, which is open as long as that takes.
    ///
    /// # Errors
    /// Those of `work`, and of opening the file again; that another one is in its place.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&FileSource) -> io::Result<R>) -> io::Result<R> {
        match &self.descriptor {
            Descriptor::Kept(file) => work(file),
            Descriptor::Lent(lent) => {
                let file = lent.open()?;
                work(&file)
            }
        }
    }
}

impl Lent {
    fn open(&self) -> io::Result<Arc<FileSource>> {
        if let Some(file) = self.pool.find(&self.slot) {
            return Ok(file);
        }
        let file = FileSource::new(self.pool.opened(|| self.again.reopen())?)?;
        if !self.is_same(file.stamp()) {
            return Err(io::Error::other(
                "another file is in its place, or it was written to",
            ));
        }
        let file = Arc::new(file);
        self.pool.admit(&self.slot, &file);
        Ok(file)
    }

    /// Whether this is the file that was opened, as it was then.
    fn is_same(&self, now: &Stamp) -> bool {
        self.stamp.is_in_its_place(now, self.remote.is_some())
    }

    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        if let Some(file) = self.pool.find(&self.slot) {
            return file.nbytes_now();
        }
        let now = match self.again.look() {
            Err(fault) if fault.kind() == io::ErrorKind::NotFound => return Ok(None),
            facts => Stamp::of(&facts?),
        };
        let is_told_by_size = now.nbytes() != self.stamp.nbytes();
        Ok((is_told_by_size || self.is_same(&now)).then_some(now.nbytes()))
    }
}

impl ReadAt for LocalFile {
    fn nbytes(&self) -> u64 {
        match &self.descriptor {
            Descriptor::Kept(file) => file.nbytes(),
            Descriptor::Lent(lent) => lent.stamp.nbytes(),
        }
    }

    fn check_size(&self) -> io::Result<()> {
        self.with(FileSource::check_size)
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        self.with(|file| file.read_at(position, dest))
    }

    fn is_vectored(&self) -> bool {
        cfg!(target_os = "linux")
    }

    fn read_vectored_at(&self, position: u64, dests: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.with(|file| file.read_vectored_at(position, dests))
    }

    fn waits(&self) -> bool {
        self.remote().is_some()
    }

    fn version(&self) -> Option<String> {
        match &self.descriptor {
            Descriptor::Kept(file) => file.version(),
            Descriptor::Lent(lent) => lent.remote.map(|_| lent.stamp.version()),
        }
    }

    fn is_cold(&self, span: &Range<u64>) -> bool {
        match &self.descriptor {
            Descriptor::Kept(file) => file.is_cold(span),
            // Of many files those that are open say enough.
            Descriptor::Lent(lent) => lent.pool.find(&lent.slot).is_some_and(|file| file.is_cold(span)),
        }
    }

    fn forget(&self, span: Range<u64>) {
        match &self.descriptor {
            Descriptor::Kept(file) => file.forget(span),
            // One that was closed meanwhile is not opened again for advice.
            Descriptor::Lent(lent) => {
                lent.pool.find(&lent.slot).inspect(|file| file.forget(span));
            }
        }
    }

    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        match &self.descriptor {
            Descriptor::Kept(file) => file.nbytes_now(),
            Descriptor::Lent(lent) => lent.nbytes_now(),
        }
    }
}

/// Opens a file. Where this process has no descriptor left for it, those that are lent and not in use are closed first.
pub(crate) fn with_room(open: impl Fn() -> io::Result<File>) -> io::Result<File> {
    POOL.opened(open)
}

/// The place of a file that is open or not.
#[derive(Debug, Default)]
struct Slot {
    file: Mutex<Option<Arc<FileSource>>>,
    /// When it was used last, as the pool counts.
    used: AtomicU64,
}

impl Slot {
    /// Closes the file where nobody reads it: gives it, to be dropped when no lock is held.
    fn close(&self) -> Option<Arc<FileSource>> {
        let mut file = briefly(&self.file)?;
        let is_idle = file.as_ref().is_some_and(|file| Arc::strong_count(file) == 1);
        if is_idle { file.take() } else { None }
    }
}

/// Files that are open.
#[derive(Debug)]
struct Pool {
    most: usize,
    clock: AtomicU64,
    open: Mutex<Vec<Weak<Slot>>>,
}

impl Pool {
    const fn of(most: usize) -> Pool {
        Pool {
            most,
            clock: AtomicU64::new(0),
            open: Mutex::new(Vec::new()),
        }
    }

    fn most_held(&self) -> usize {
        self.most.min(disk::descriptors_allowed() / 4)
    }

    /// The file, where it is open.
    fn find(&self, slot: &Slot) -> Option<Arc<FileSource>> {
        let file = briefly(&slot.file)?.clone();
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        slot.used.store(now, Ordering::Relaxed);
        file
    }

    /// Keeps `file` open in `slot`, and as many others as fit. Of two threads that opened one file, the first is the one
    /// whose it is. Where it cannot be noted as open it is not kept, since nothing would close it.
    fn admit(&self, slot: &Arc<Slot>, file: &Arc<FileSource>) {
        let Some(mut open) = briefly(&self.open) else {
            return;
        };
        let is_new = briefly(&slot.file)
            .is_some_and(|mut open| open.is_none() && open.replace(Arc::clone(file)).is_none());
        if !is_new {
            return;
        }
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        slot.used.store(now, Ordering::Relaxed);
        open.push(Arc::downgrade(slot));
        let closed = close_all_but(&mut open, self.most_held());
        // Closing may take its time on a network.
        drop((open, closed));
    }

    fn opened(&self, open: impl Fn() -> io::Result<File>) -> io::Result<File> {
        match open() {
            Err(fault) if is_out_of_descriptors(&fault) => {
                let Some(mut others) = briefly(&self.open) else {
                    return Err(fault);
                };
                let closed = close_all_but(&mut others, 0);
                drop((others, closed));
                open()
            }
            opened => opened,
        }
    }
}

/// Takes those out that are longest unused, until there are `most` or the others are being read.
fn close_all_but(open: &mut Vec<Weak<Slot>>, most: usize) -> Vec<Arc<FileSource>> {
    let mut closed = Vec::new();
    if open.len() <= most {
        return closed;
    }
    open.retain(|slot| slot.strong_count() > 0);
    open.sort_by_cached_key(|slot| slot.upgrade().map(|slot| slot.used.load(Ordering::Relaxed)));
    let mut surplus = open.len().saturating_sub(most);
    open.retain(|slot| {
        if surplus == 0 {
            return true;
        }
        let file = slot.upgrade().and_then(|slot| slot.close());
        let is_closed = file.is_some();
        closed.extend(file);
        surplus -= usize::from(is_closed);
        !is_closed
    });
    closed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::read_exactly;
    use ingot_format::StopFlag;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::AtomicUsize;

    /// Counts how often it opens.
    #[derive(Debug)]
    struct Counting(PathBuf, Arc<AtomicUsize>);

    impl Reopen for Counting {
        fn reopen(&self) -> io::Result<File> {
            self.1.fetch_add(1, Ordering::Relaxed);
            File::open(&self.0)
        }
    }

    struct PooledFiles {
        folder: tempfile::TempDir,
        pool: &'static Pool,
        files: Vec<LocalFile>,
        opened: Vec<Arc<AtomicUsize>>,
    }

    impl PooledFiles {
        fn new(most: usize, count: u8) -> PooledFiles {
            let folder = tempfile::tempdir().unwrap();
            let pool: &'static Pool = Box::leak(Box::new(Pool::of(most)));
            let mut made = PooledFiles {
                folder,
                pool,
                files: Vec::new(),
                opened: Vec::new(),
            };
            for number in 0..count {
                std::fs::write(made.path(number), [number; 9]).unwrap();
                let (file, opened) = made.lend(number);
                made.files.push(file);
                made.opened.push(opened);
            }
            made
        }

        /// A file, open, and how often it is opened again.
        fn lend(&self, number: u8) -> (LocalFile, Arc<AtomicUsize>) {
            let path = self.path(number);
            let file = FileSource::new(File::open(&path).unwrap()).unwrap();
            let opened = Arc::default();
            let again = Box::new(Counting(path, Arc::clone(&opened)));
            (LocalFile::lent_to(self.pool, file, again), opened)
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
            match &self.files[usize::from(number)].descriptor {
                Descriptor::Kept(_) => true,
                Descriptor::Lent(lent) => lent.slot.file.lock().unwrap().is_some(),
            }
        }

        fn opened(&self) -> Vec<usize> {
            let counts = self.opened.iter();
            counts.map(|count| count.load(Ordering::Relaxed)).collect()
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
    fn what_fits_is_opened_once() {
        let files = PooledFiles::new(4, 4);
        for number in [0, 1, 2, 3, 3, 0] {
            assert_eq!(files.read(number).unwrap(), number);
        }
        assert_eq!(files.opened(), [0; 4]);
    }

    #[test]
    fn the_least_recently_used_is_closed_and_opened_again_when_it_is_read() {
        let files = PooledFiles::new(2, 2);
        assert_eq!(files.read(0).unwrap(), 0);
        let _third = files.lend(0);
        assert!(files.is_open(0) && !files.is_open(1), "1 was not used since");
        assert_eq!(files.read(1).unwrap(), 1);
        assert_eq!(files.opened(), [0, 1]);
        assert!(!files.is_open(0));
    }

    #[test]
    fn a_file_that_is_read_is_not_closed() {
        let files = PooledFiles::new(1, 2);
        let outcome = files.files[0].with(|_| {
            assert_eq!(files.read(1).unwrap(), 1);
            Ok(files.is_open(0))
        });
        assert!(outcome.unwrap());
    }

    #[test]
    fn a_file_that_was_replaced_while_it_was_closed_is_refused() {
        for (bytes, nbytes_now) in [(&[7; 9][..], None), (&[7; 5], Some(5))] {
            let files = PooledFiles::new(1, 2);
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
        let files = PooledFiles::new(1, 1);
        replace(&files.path(0), &[7; 9]);
        assert_eq!(files.read(0).unwrap(), 0);
        assert_eq!(files.files[0].nbytes_now().unwrap(), Some(9));
    }

    #[test]
    fn a_file_that_is_gone_says_so() {
        let files = PooledFiles::new(1, 2);
        std::fs::remove_file(files.path(0)).unwrap();
        assert_eq!(files.read(0).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(files.files[0].nbytes_now().unwrap(), None);
    }

    #[test]
    fn a_lock_that_a_fork_left_closed_keeps_nobody_from_reading() {
        let files = PooledFiles::new(2, 2);
        let Descriptor::Lent(lent) = &files.files[0].descriptor else {
            panic!("it is lent");
        };
        let _slot = lent.slot.file.lock().unwrap();
        let _pool = files.pool.open.lock().unwrap();
        assert_eq!(files.read(0).unwrap(), 0);
        assert_eq!(files.opened(), [1, 0]);
        assert_eq!(files.read(1).unwrap(), 1);
        // What the pool cannot note it would never close.
        let (late, _) = files.lend(1);
        assert!(
            matches!(&late.descriptor, Descriptor::Lent(lent) if lent.slot.file.lock().unwrap().is_none())
        );
    }

    #[test]
    fn many_threads_read_many_files_through_few_descriptors() {
        let files = PooledFiles::new(3, 20);
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
        // What was kept open because it was being read is closed when the next one comes.
        let _another = files.lend(0);
        let open = (0..20).filter(|&number| files.is_open(number)).count();
        assert_eq!(open, 2);
    }

    #[test]
    fn descriptors_of_closed_files_are_given_back() {
        let mut files = PooledFiles::new(2, 6);
        assert_eq!(files.pool.open.lock().unwrap().len(), 2);
        files.files.clear();
        let _one = files.lend(0);
        assert_eq!(files.pool.open.lock().unwrap().len(), 1);
    }

    #[test]
    fn a_process_that_has_none_left_closes_those_that_are_idle() {
        let files = PooledFiles::new(4, 4);
        let tries = AtomicUsize::new(0);
        let opened = files.pool.opened(|| match tries.fetch_add(1, Ordering::Relaxed) {
            0 => Err(disk::out_of_descriptors()),
            _ => File::open(files.path(0)),
        });
        assert!(opened.is_ok());
        assert!((0..4).all(|number| !files.is_open(number)));
        assert_eq!(files.read(2).unwrap(), 2);
    }
}
