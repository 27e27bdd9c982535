//! Many files through few descriptors, files that change, and files that are mapped.
#![allow(unsafe_code)]

use super::super::source::read_exactly;
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
        let file = LocalFile::among(self.open, Place::of(&self.path(number)));
        file.map_err(io::Error::from).unwrap()
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
        // Not every version of Windows can replace an open file, but all can rename it.
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
    let file = LocalFile::unopened(Place::of(&path), disk::facts_at(&path).unwrap());
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
        // Some tools copy the time stamps of a file too.
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
    let _open = files.open.files.lock().unwrap();
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
                    read_exactly(&files.files[usize::from(number)], 0, &mut all, StopFlag::never()).unwrap();
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
    assert_eq!(files.open.files.lock().unwrap().len(), 2);
    files.files.clear();
    assert_eq!(files.open.files.lock().unwrap().len(), 0);
}

#[test]
fn a_process_that_has_no_descriptor_left_closes_idle_files() {
    let files = ManyFiles::new(4, 4);
    let tries = AtomicUsize::new(0);
    let opened = with_room(files.open, || match tries.fetch_add(1, Ordering::Relaxed) {
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

/// A file outside the page cache, on systems that can drop a file from it.
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
        matches!(fault, crate::error::Failure::Read { found, .. } if found == to_u64(left)),
        "{fault:?}"
    );
}

pub(crate) fn mapped(bytes: &[u8]) -> (tempfile::NamedTempFile, LocalFile) {
    let named = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(named.path(), bytes).unwrap();
    let file = LocalFile::of(File::open(named.path()).unwrap()).unwrap();
    file.map().unwrap();
    (named, file)
}

#[test]
fn reads_are_of_the_file_and_not_of_what_was_written_to_its_tensors_and_end_with_it() {
    let (_file, source) = mapped(b"0123456789");
    let first = source.memory().unwrap().as_ptr();
    // SAFETY: the mapping is writable for ten bytes, and no other code uses it.
    unsafe { first.write(b'x') };
    let mut dest = [0; 20];
    assert_eq!(source.read_at(0, &mut dest).unwrap(), 10);
    assert_eq!(&dest[..11], b"0123456789\0");
    assert_eq!(source.read_at(9, &mut dest).unwrap(), 1);
    assert_eq!(source.read_at(10, &mut dest).unwrap(), 0);
}

#[test]
fn a_mapped_file_that_is_shortened_is_read_to_its_end_or_cannot_be_shortened() {
    let (file, source) = mapped(&[7; 20_000]);
    let shortened = file.as_file().set_len(5000);
    let left = if shortened.is_ok() { 5000 } else { 20_000 };
    assert_eq!(source.nbytes_now().unwrap(), Some(left));
    let mut dest = vec![0; 20_000];
    assert_eq!(
        source.read_at(0, &mut dest).unwrap(),
        usize::try_from(left).unwrap()
    );
    assert_eq!(shortened.is_err(), cfg!(windows), "{shortened:?}");
}

fn chosen(asked: Backend, variable: Option<&str>) -> (Backend, Cow<'static, str>) {
    choose(asked, variable, None, 0).unwrap()
}

#[test]
fn the_caller_comes_before_the_environment_and_that_before_the_file() {
    assert_eq!(chosen(Backend::Mmap, Some("pread")).0, Backend::Mmap);
    assert_eq!(chosen(Backend::Auto, Some("pread")).0, Backend::Pread);
    assert_eq!(chosen(Backend::Auto, Some("pread")).1, "INGOT_BACKEND=pread");
    assert_eq!(chosen(Backend::Auto, Some("auto")), chosen(Backend::Auto, None));
    assert_eq!(chosen(Backend::Auto, Some("")), chosen(Backend::Auto, None));
}

#[test]
fn a_backend_that_is_none_is_refused_with_the_choices() {
    let refusal = choose(Backend::Auto, Some("mmpa"), None, 0).unwrap_err();
    assert_eq!(refusal.code(), "unknown-backend");
    assert_eq!(
        refusal.to_string(),
        "INGOT_BACKEND `mmpa` is unknown: expected one of auto, mmap, pread"
    );
    assert!(
        choose(Backend::Mmap, Some("mmpa"), None, 0).is_ok(),
        "the caller has said which"
    );
}

#[test]
#[cfg(not(windows))]
fn no_more_files_are_mapped_by_default_than_a_process_has_mappings_for() {
    let chosen = |asked, mapped| choose(asked, None, None, mapped).unwrap().0;
    assert_eq!(chosen(Backend::Auto, MOST_MAPPED - 1), Backend::Mmap);
    assert_eq!(chosen(Backend::Auto, MOST_MAPPED), Backend::Pread);
    assert_eq!(chosen(Backend::Mmap, MOST_MAPPED), Backend::Mmap);
}

#[test]
fn what_comes_over_a_network_is_read_and_what_does_not_is_mapped() {
    if cfg!(windows) {
        let choice = choose(Backend::Auto, None, None, 0).unwrap();
        assert_eq!(choice.0, Backend::Pread, "{}", choice.1);
        return;
    }
    for name in ["NFS", "FUSE"] {
        let choice = choose(Backend::Auto, None, Some(name), 0).unwrap();
        assert_eq!(
            (choice.0, &*choice.1),
            (Backend::Pread, &*format!("{name} is slow to map"))
        );
        assert_eq!(
            choose(Backend::Mmap, None, Some(name), 0).unwrap().0,
            Backend::Mmap
        );
    }
    assert_eq!(remote_file_system(&tempfile::tempfile().unwrap()), None);
}
