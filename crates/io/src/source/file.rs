//! An open file, read by position.

use std::fs::File;
use std::io;
#[cfg(target_os = "linux")]
use std::io::IoSliceMut;
#[cfg(target_os = "linux")]
use std::ops::Range;

use super::ReadAt;
#[cfg(target_os = "linux")]
use super::direct::DirectReader;
use crate::disk::{self, Facts, Kind, remote_file_system};
#[cfg(target_os = "linux")]
use crate::residency::{self, is_cold};

/// A regular file. Reading by position needs no seeking, so any number of threads may do it.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    stamp: Stamp,
    /// The file system, where reading from it waits for a network or another process.
    remote: Option<&'static str>,
    #[cfg(target_os = "linux")]
    direct: DirectReader,
}

/// Places of a file that are looked at to learn whether it is in the cache.
#[cfg(target_os = "linux")]
const WINDOWS: u64 = 32;

impl FileSource {
    /// Takes over an open file, and notes its size and time of modification.
    ///
    /// # Errors
    /// What the system says of the file; that it is a directory, a FIFO, a socket or a device.
    pub fn new(file: File) -> io::Result<FileSource> {
        let facts = disk::facts(&file)?;
        match facts.kind {
            Kind::File => {}
            Kind::Directory => return Err(disk::is_a_directory()),
            Kind::Link | Kind::Other => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
            }
        }
        let remote = remote_file_system(&file);
        if remote.is_some() {
            read_far_ahead(&file);
        }
        Ok(FileSource {
            stamp: Stamp::of(&facts),
            remote,
            #[cfg(target_os = "linux")]
            direct: DirectReader::default(),
            file,
        })
    }

    /// The name of its file system, where reading from that waits for a network or another process.
    pub(crate) fn remote(&self) -> Option<&'static str> {
        self.remote
    }

    /// The file, for mapping it.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// What it was when it was opened.
    pub(crate) fn stamp(&self) -> &Stamp {
        &self.stamp
    }
}

/// What tells whether a file is the one that it was, and as it was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamp {
    /// Its device, and its number there.
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

    /// What the file's machine says of the version. Another machine may number the file otherwise.
    pub(crate) fn version(&self) -> String {
        format!("written {} {}", self.modified.0, self.modified.1)
    }

    /// Text that differs for other versions. Without the number of the file, which may differ between containers.
    pub(crate) fn identity(&self) -> String {
        format!("{} bytes, {}", self.nbytes, self.version())
    }

    /// Whether nobody wrote to it until `now`.
    pub(crate) fn is_unwritten(&self, now: &Stamp) -> bool {
        // Neither the inode's change time nor its link count: replacing the file by rename alters those, and
        // whoever opened the old file goes on reading it unharmed.
        now.nbytes == self.nbytes && now.modified == self.modified
    }

    /// Whether `now` is of the same file, written to or not.
    pub(crate) fn is_same_file(&self, now: &Stamp) -> bool {
        now.identity == self.identity
    }

    /// Whether `now`, of what has the path now, is of the same file as it was. What a network or another process gives, for
    /// which a read `waits`, may have another number each time it is opened (FUSE, CIFS): there size and time alone have
    /// to do.
    pub(crate) fn is_in_its_place(&self, now: &Stamp, waits: bool) -> bool {
        self.is_unwritten(now) && (waits || self.is_same_file(now))
    }
}

/// Has the kernel ask for twice as much at once where a read goes on where the last one ended. Each answer takes as long,
/// whatever its size, and of a mount through a process the kernel asks for no more than 128 KiB of itself. What is read
/// here and there is not read ahead of, with this or without.
#[cfg(target_os = "linux")]
fn read_far_ahead(file: &File) {
    // Advice: where it is refused, all goes on as before.
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Sequential);
}

#[cfg(not(target_os = "linux"))]
fn read_far_ahead(_: &File) {}

impl ReadAt for FileSource {
    fn nbytes(&self) -> u64 {
        self.stamp.nbytes
    }

    fn check_size(&self) -> io::Result<()> {
        match self.remote {
            // A network or another process makes up the size of its file system.
            Some(_) => Ok(()),
            None => disk::check_extent(&self.file, self.stamp.nbytes),
        }
    }

    fn read_at(&self, position: u64, dest: &mut [u8]) -> io::Result<usize> {
        #[cfg(target_os = "linux")]
        if self.remote.is_none()
            && let Some(count) = self.direct.read_at(&self.file, position, dest)
        {
            return Ok(count);
        }
        disk::read_at(&self.file, dest, position)
    }

    #[cfg(target_os = "linux")]
    fn is_vectored(&self) -> bool {
        true
    }

    #[cfg(target_os = "linux")]
    fn read_vectored_at(&self, position: u64, dests: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(rustix::io::preadv(&self.file, dests, position)?)
    }

    fn waits(&self) -> bool {
        self.remote.is_some()
    }

    fn version(&self) -> Option<String> {
        self.waits().then(|| self.stamp.version())
    }

    #[cfg(target_os = "linux")]
    fn is_cold(&self, span: &Range<u64>) -> bool {
        self.remote.is_none() && is_cold(&self.file, span, WINDOWS)
    }

    #[cfg(target_os = "linux")]
    fn forget(&self, span: Range<u64>) {
        residency::forget(&self.file, &span);
    }

    fn nbytes_now(&self) -> io::Result<Option<u64>> {
        let now = Stamp::of(&disk::facts(&self.file)?);
        let is_told_by_size = now.nbytes != self.stamp.nbytes;
        Ok((is_told_by_size || self.stamp.is_unwritten(&now)).then_some(now.nbytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Block;
    use crate::source::read_exactly;
    use ingot_format::{StopFlag, to_u64};

    const NBYTES: usize = (5 << 20) + 1234;
    /// A block of a disk, and a page of memory.
    const BLOCK: usize = 4096;

    /// A file of which the system holds nothing in memory, where it can give that up.
    fn cold() -> (tempfile::NamedTempFile, FileSource, Vec<u8>) {
        let mixed = |n: usize| n.to_le_bytes()[1] ^ n.to_le_bytes()[0];
        let bytes: Vec<u8> = (0..NBYTES).map(mixed).collect();
        let folder = std::env::var_os("CARGO_TARGET_TMPDIR").unwrap_or_else(|| ".".into());
        let named = tempfile::NamedTempFile::new_in(folder).unwrap();
        disk::write_all_at(named.as_file(), &bytes, 0).unwrap();
        named.as_file().sync_all().unwrap();
        let source = FileSource::new(File::open(named.path()).unwrap()).unwrap();
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
