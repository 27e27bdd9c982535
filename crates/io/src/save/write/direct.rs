//! Direct writes, which bypass the page cache, for files that must be on the disk when the save returns.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use ingot_format::to_u64;

use crate::disk::{self, file_system, write_all_at};

/// The smallest file for direct writes. Smaller files are as fast through the cache.
const WORTH_IT: u64 = 32 << 20;
/// File systems that were tested. Others reject direct writes, or accept them and copy through the cache.
const FILE_SYSTEMS: [u32; 3] = [
    0xEF53,      /* ext4 */
    0x5846_5342, /* XFS */
    0x794C_7630, /* overlayfs */
];

/// The alignment of positions, sizes and addresses: the largest block of disks. Pages of memory are no smaller.
const BLOCK: usize = 4096;

/// A file that is opened a second time, for writing without the page cache.
pub(super) struct DirectWriter {
    file: File,
    refused: AtomicBool,
}

impl DirectWriter {
    /// Open `file` again. `None` if writing `nbytes` through the page cache is as good.
    pub(super) fn open(file: &File, nbytes: u64) -> Option<DirectWriter> {
        let is_worth_it =
            nbytes >= WORTH_IT && file_system(file).is_some_and(|number| FILE_SYSTEMS.contains(&number));
        let file = is_worth_it.then(|| disk::open_direct(file, true)).flatten()?;
        Some(DirectWriter {
            file,
            refused: AtomicBool::new(false),
        })
    }

    /// Write `bytes` at `position` of `cached`, which is the same file: directly as far as the system accepts direct
    /// writes, and the rest through the page cache.
    pub(super) fn write(&self, cached: &File, bytes: &[u8], position: u64) -> io::Result<()> {
        let written = self.write_at(bytes, position)?;
        write_all_at(cached, &bytes[written..], position + to_u64(written))
    }

    /// Write the whole blocks of `bytes`, and return the number of bytes: fewer if the system refuses. `position` and the
    /// address of `bytes` are multiples of [`BLOCK`].
    fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<usize> {
        let whole = bytes.len() / BLOCK * BLOCK;
        let mut written = 0;
        while written < whole && !self.refused.load(Ordering::Relaxed) {
            match disk::write_at(&self.file, &bytes[written..whole], position + to_u64(written)) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    written += count;
                    // The disk is almost full, or the system continued without direct writes.
                    if count % BLOCK != 0 {
                        break;
                    }
                }
                Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
                // The blocks are larger than any known ones, or the file system does not support direct writes any
                // more.
                Err(fault) if disk::refuses_direct(&fault) => self.refused.store(true, Ordering::Relaxed),
                Err(fault) => return Err(fault),
            }
        }
        Ok(written)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::pages::Pages;

    #[test]
    fn whole_blocks_are_written_and_the_rest_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![0; 3 * BLOCK]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        assert!(DirectWriter::open(&file, WORTH_IT - 1).is_none());
        let Some(direct) = DirectWriter::open(&file, WORTH_IT) else {
            eprintln!(
                "not run: the file system of {} has no direct writing, or takes any position",
                path.display()
            );
            return;
        };
        let mut buffer = Pages::allocate(BLOCK + 100).unwrap();
        let bytes = buffer.bytes_mut();
        bytes.fill(7);
        let written = direct.write_at(bytes, to_u64(BLOCK)).unwrap();
        assert!(written == BLOCK || direct.refused.load(Ordering::Relaxed));
        let expected = [vec![0; BLOCK], vec![7; written], vec![0; 2 * BLOCK - written]].concat();
        assert!(std::fs::read(&path).unwrap() == expected);
        // Not a multiple of a block, which every file system refuses.
        assert!(direct.write_at(bytes, 1).is_ok_and(|written| written == 0));
        assert!(direct.refused.load(Ordering::Relaxed));
    }
}
