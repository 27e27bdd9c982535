//! A part of another file.

use std::fs::File;
use std::io;

use ingot_format::to_u64;

/// Bytes of a file that goes into another one, as when shards are merged.
#[derive(Clone, Copy, Debug)]
pub struct FileRange<'a> {
    file: &'a File,
    begin: u64,
    nbytes: u64,
}

impl<'a> FileRange<'a> {
    /// `nbytes` bytes of `file` from `begin` on. It is an error of the save when there are fewer by then.
    #[must_use]
    pub fn new(file: &'a File, begin: u64, nbytes: u64) -> FileRange<'a> {
        FileRange { file, begin, nbytes }
    }

    pub(super) fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Fills `into` with the bytes from `begin` of the range on.
    pub(crate) fn read(&self, begin: u64, into: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < into.len() {
            let position = self.begin + begin + to_u64(filled);
            match read_at(self.file, &mut into[filled..], position) {
                Ok(0) => return Err(self.ended(position)),
                Ok(count) => filled += count,
                Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
                Err(fault) => return Err(fault),
            }
        }
        Ok(())
    }

    /// Copies as many of the `count` bytes from `begin` of the range on to `position` of `to` as the system does by
    /// itself, and says how many: 0 where it cannot, or takes longer than whoever reads and writes. Where the file system
    /// can, both files then share the blocks.
    #[cfg(target_os = "linux")]
    pub(crate) fn copy_to(&self, begin: u64, count: u64, to: &File, position: u64) -> io::Result<u64> {
        match copies_slowly(to) {
            true => Ok(0),
            false => self.copied_by_the_system(begin, count, to, position),
        }
    }

    #[cfg(target_os = "linux")]
    fn copied_by_the_system(&self, begin: u64, count: u64, to: &File, position: u64) -> io::Result<u64> {
        use rustix::io::Errno;
        let (mut from, mut onto, mut copied) = (self.begin + begin, position, 0);
        while copied < count {
            let rest = ingot_format::to_usize(count - copied).unwrap_or(usize::MAX);
            match rustix::fs::copy_file_range(self.file, Some(&mut from), to, Some(&mut onto), rest) {
                Ok(0) => return Err(self.ended(from)),
                Ok(more) => copied += to_u64(more),
                Err(Errno::INTR) => {}
                Err(fault @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG | Errno::IO)) => {
                    return Err(fault.into());
                }
                // Two file systems, a file without positions, a kernel or a sandbox without the call.
                Err(_) => break,
            }
        }
        Ok(copied)
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn copy_to(&self, _: u64, _: u64, _: &File, _: u64) -> io::Result<u64> {
        Ok(0)
    }

    fn ended(&self, position: u64) -> io::Error {
        let message = format!(
            "the file that is copied from ended at byte {position}, expected {} bytes from {} on",
            self.nbytes, self.begin
        );
        io::Error::new(io::ErrorKind::UnexpectedEof, message)
    }
}

/// Whether the system, asked to copy to this file, does so by 64 KiB at a time: on file systems that neither let files
/// share blocks nor lie behind a network. Two threads that read and write 4 MiB at a time take two thirds of the time
/// (2026-11, 2 GiB in the cache, ext4: 0.25 to 0.34 s against 0.39 to 0.45). Any other, one over others among them, may
/// know better.
#[cfg(target_os = "linux")]
fn copies_slowly(to: &File) -> bool {
    const EXT: u32 = 0xEF53;
    const TMPFS: u32 = 0x0102_1994;
    crate::backend::file_system(to).is_some_and(|number| [EXT, TMPFS].contains(&number))
}

#[cfg(unix)]
fn read_at(file: &File, into: &mut [u8], position: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, into, position)
}

#[cfg(windows)]
fn read_at(file: &File, into: &mut [u8], position: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, into, position)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_the_system_copies_is_what_was_asked_for() {
        let (mut from, mut to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        from.write_all(b"0123456789").unwrap();
        to.write_all(b"--------").unwrap();
        let range = FileRange::new(&from, 2, 6);
        let copied = range.copied_by_the_system(1, 4, &to, 3).unwrap();
        let mut found = [0; 8];
        FileRange::new(&to, 0, 8).read(0, &mut found).unwrap();
        assert_eq!(&found[3..], if copied == 4 { b"3456-" } else { b"-----" });
        let mut all = [0; 4];
        range.read(1, &mut all).unwrap();
        assert_eq!(&all, b"3456");
        assert!(
            FileRange::new(&from, 8, 6)
                .copied_by_the_system(0, 6, &to, 0)
                .is_err()
                || copied == 0
        );
    }

    #[test]
    fn where_the_system_cannot_copy_it_says_so() {
        let from = File::open("/proc/self/maps").unwrap();
        let to = tempfile::tempfile().unwrap();
        assert_eq!(
            FileRange::new(&from, 0, 4)
                .copied_by_the_system(0, 4, &to, 0)
                .ok(),
            Some(0)
        );
        let pipe = File::open("/dev/zero").unwrap();
        assert_eq!(
            FileRange::new(&pipe, 0, 4)
                .copied_by_the_system(0, 4, &to, 0)
                .ok(),
            Some(0)
        );
    }
}
