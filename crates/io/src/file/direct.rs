//! Direct reads, which bypass the page cache.
//!
//! A read of bytes that are not in the cache copies them there first, page by page, on the core that reads. Direct reads of 2 GiB
//! into huge pages take 1.2 s, on a disk from which threads read through the cache in 2 to 4 s, and one sequential reader in 1.6
//! s (2026-11; two busy cores).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use ingot_format::{to_u64, to_usize};

use super::residency::is_cold;
use crate::disk;
use crate::memory::Block;
use crate::pages::HUGE_PAGE_NBYTES;

/// Positions, sizes and addresses of direct reads are multiples of this: the largest block that disks have.
const BLOCK: usize = 4096;

/// The smallest direct read. Smaller reads take as long through the cache.
pub(super) const LEAST_NBYTES: usize = 1 << 20;

/// Positions of a read that are sampled to estimate whether it is in the cache.
const WINDOWS: u64 = 4;

/// A second descriptor of a file on a local disk, for direct reads. It is opened when it is first needed.
#[derive(Debug, Default)]
pub(super) struct DirectReader {
    file: OnceLock<Option<File>>,
    refused: AtomicBool,
}

impl DirectReader {
    /// Fill the front of `dest`, which has [`LEAST_NBYTES`] or more, from `position` on, and return the number of bytes. The
    /// end of `dest` is not filled if it is a part of a block. `None` if the bytes are in the cache, if the system has no direct
    /// reads, and if the read failed: the caller then reads through the cache, which reports an error.
    pub(super) fn read_at(&self, file: &File, position: u64, dest: &mut [u8]) -> Option<usize> {
        if self.refused.load(Ordering::Relaxed) {
            return None;
        }
        let range = position..position + to_u64(dest.len());
        if !is_cold(file, &range, WINDOWS) {
            return None;
        }
        let direct = self
            .file
            .get_or_init(|| disk::open_direct(file, false))
            .as_ref()?;
        let into_block = to_usize(position % to_u64(BLOCK))?;
        if dest.as_ptr().addr() % BLOCK != into_block {
            return self.staged(direct, &range, dest);
        }
        if into_block != 0 {
            // The rest of a block; whole blocks follow.
            return std::os::unix::fs::FileExt::read_at(file, &mut dest[..BLOCK - into_block], position).ok();
        }
        let whole = dest.len() - dest.len() % BLOCK;
        self.read(direct, position, &mut dest[..whole])
    }

    /// Read through a huge page of our own, if `dest` is not aligned to the blocks of the disk.
    fn staged(&self, direct: &File, range: &Range<u64>, dest: &mut [u8]) -> Option<usize> {
        let mut stage = Block::allocate(HUGE_PAGE_NBYTES).ok()?;
        let skip = to_usize(range.start % to_u64(BLOCK))?;
        let wanted = (skip + dest.len()).next_multiple_of(BLOCK).min(HUGE_PAGE_NBYTES);
        stage.dest().fill(|stage| {
            let found = self.read(direct, range.start - to_u64(skip), &mut stage[..wanted])?;
            let count = found.checked_sub(skip)?.min(dest.len());
            dest[..count].copy_from_slice(&stage[skip..skip + count]);
            (count > 0).then_some(count)
        })
    }

    /// Read whole blocks.
    fn read(&self, direct: &File, position: u64, dest: &mut [u8]) -> Option<usize> {
        loop {
            match disk::read_at(direct, dest, position) {
                // Less than a block is the end of the file.
                Ok(count) => return Some(count - count % BLOCK).filter(|&count| count > 0),
                Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
                Err(fault) => {
                    // The disk needs larger blocks, or the file system stopped supporting this.
                    self.refused
                        .fetch_or(disk::refuses_direct(&fault), Ordering::Relaxed);
                    return None;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Dest;

    const NBYTES: usize = (5 << 20) + 1234;

    /// Return a file that is not in the cache, unless its file system keeps it in memory.
    fn cold() -> (tempfile::NamedTempFile, File, Vec<u8>) {
        let bytes: Vec<u8> = (0..NBYTES)
            .map(|n| n.to_le_bytes()[1] ^ n.to_le_bytes()[0])
            .collect();
        let folder = std::env::var_os("CARGO_TARGET_TMPDIR").unwrap_or_else(|| ".".into());
        let named = tempfile::NamedTempFile::new_in(folder).unwrap();
        std::fs::write(named.path(), &bytes).unwrap();
        let file = File::open(named.path()).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        (named, file, bytes)
    }

    /// Call `work` with memory that begins `at` bytes into a page.
    fn placed<R>(at: usize, nbytes: usize, work: impl FnOnce(&mut [u8]) -> R) -> R {
        let mut block = Block::allocate(at + nbytes).unwrap();
        let (_, mut dest): (Dest<'_>, Dest<'_>) = block.dest().split_at(at);
        dest.fill(work)
    }

    #[test]
    fn any_part_of_a_file_comes_to_any_place_in_memory() {
        let (_named, file, bytes) = cold();
        let direct = DirectReader::default();
        let Some(opened) = disk::open_direct(&file, false) else {
            eprintln!("not run: this file system has no direct reading");
            return;
        };
        for position in [0, 8, 4096, 4104, 1 << 20, (3 << 20) + 17] {
            for at in [0, 8, position % BLOCK] {
                let rest = &bytes[position..];
                placed(at, rest.len(), |dest| {
                    let range = to_u64(position)..to_u64(NBYTES);
                    let found = direct.staged(&opened, &range, dest);
                    let refused = direct.refused.load(Ordering::Relaxed);
                    let found = found.unwrap_or(if refused { 0 } else { usize::MAX });
                    assert!(found > 0 || refused);
                    assert!(dest[..found] == rest[..found], "{position} to {at}");
                });
            }
        }
    }

    #[test]
    fn what_the_disk_refuses_is_left_to_the_cache() {
        let (_named, file, bytes) = cold();
        let Some(opened) = disk::open_direct(&file, false) else {
            eprintln!("not run: this file system has no direct reading");
            return;
        };
        let direct = DirectReader::default();
        // No disk has blocks of one byte. A file system that accepts such reads copies the bytes through the cache, which is also
        // correct.
        let found = placed(1, 100, |dest| direct.read(&opened, 1, dest));
        assert!(found.is_none());
        let mut dest = vec![0; 2 << 20];
        let again = direct.read_at(&file, 0, &mut dest);
        assert!(again.is_none() || dest[..again.unwrap_or(0)] == bytes[..again.unwrap_or(0)]);
    }

    #[test]
    fn a_file_that_ends_early_gives_what_is_there() {
        let (named, file, bytes) = cold();
        let Some(opened) = disk::open_direct(&file, false) else {
            eprintln!("not run: this file system has no direct reading");
            return;
        };
        named.as_file().set_len(3 * 4096 + 7).unwrap();
        let found = placed(0, 4 << 20, |dest| {
            let found = DirectReader::default().read(&opened, 0, dest);
            assert!(found.is_none_or(|count| dest[..count] == bytes[..count]));
            found
        });
        // Whole blocks only, or nothing if the file system has no direct reads.
        assert!(found.is_none_or(|count| count == 3 * 4096), "{found:?}");
    }
}
