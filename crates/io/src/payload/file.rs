//! A part of another file.

use std::fs::File;
use std::io;
use std::ops::Range;

use ingot_format::to_u64;

use crate::disk::{read_at, write_all_at};
use crate::file::LocalFile;

/// The number of bytes that are read and written at a time.
const PASSED: u64 = 4 << 20;
/// The block size of file systems that share blocks. Larger blocks are rare, and then the bytes are copied.
const BLOCK: u64 = 4096;

/// A range of a file that is copied into another file, as when shards are merged.
#[derive(Clone, Copy, Debug)]
pub struct FileRange<'a> {
    from: Opened<'a>,
    begin: u64,
    nbytes: u64,
}

#[derive(Clone, Copy, Debug)]
enum Opened<'a> {
    File(&'a File),
    /// Open while it is copied from.
    Local(&'a LocalFile),
}

impl<'a> FileRange<'a> {
    /// `nbytes` bytes of `file` from `begin` on. The save fails if there are fewer by then.
    #[must_use]
    pub fn new(file: &'a File, begin: u64, nbytes: u64) -> FileRange<'a> {
        FileRange {
            from: Opened::File(file),
            begin,
            nbytes,
        }
    }

    /// As [`FileRange::new`], for a file that may be closed between reads.
    pub(crate) fn of_local(file: &'a LocalFile, begin: u64, nbytes: u64) -> FileRange<'a> {
        FileRange {
            from: Opened::Local(file),
            begin,
            nbytes,
        }
    }

    fn with<R>(&self, work: impl FnOnce(&File) -> io::Result<R>) -> io::Result<R> {
        match self.from {
            Opened::File(file) => work(file),
            Opened::Local(local) => local.with(work),
        }
    }

    pub(super) fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Return whether it begins at the same offset in a block as the byte at `position` of another file.
    pub(crate) fn has_blocks_at(&self, position: u64) -> bool {
        self.begin % BLOCK == position % BLOCK
    }

    /// Fills `into` with the bytes from `begin` of the range on.
    pub(crate) fn read(&self, begin: u64, into: &mut [u8]) -> io::Result<()> {
        self.with(|file| {
            let mut filled = 0;
            while filled < into.len() {
                let position = self.begin + begin + to_u64(filled);
                match read_at(file, &mut into[filled..], position) {
                    Ok(0) => return Err(self.ended(file, position)),
                    Ok(count) => filled += count,
                    Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
                    Err(fault) => return Err(fault),
                }
            }
            Ok(())
        })
    }

    /// Copy the bytes of `range`, relative to this range, to `position` of `to`: by the system if both files can share
    /// the blocks or if that is the fastest way, otherwise through `buffer`.
    pub(crate) fn copy(
        &self,
        range: Range<u64>,
        to: &File,
        position: u64,
        buffer: &mut Vec<u8>,
    ) -> io::Result<()> {
        let asked = match Copying::to(to) {
            Copying::ReadAndWrite => range.start..range.start,
            Copying::Blocks => whole_blocks(&range, self.begin, position),
            Copying::System => range.clone(),
        };
        let onto = |begin: u64| position + (begin - range.start);
        self.pass(range.start..asked.start, to, position, buffer)?;
        let copied =
            self.copied_by_the_system(asked.start, asked.end - asked.start, to, onto(asked.start))?;
        let rest = asked.start + copied..range.end;
        self.pass(rest.clone(), to, onto(rest.start), buffer)
    }

    /// Reads the bytes of `range` into `buffer` and writes them from there.
    fn pass(&self, range: Range<u64>, to: &File, mut position: u64, buffer: &mut Vec<u8>) -> io::Result<()> {
        let mut begin = range.start;
        while begin < range.end {
            let count = PASSED.min(range.end - begin);
            buffer.resize(ingot_format::saturating_usize(count), 0);
            self.read(begin, buffer)?;
            write_all_at(to, buffer, position)?;
            begin += count;
            position += count;
        }
        Ok(())
    }

    /// Let the system copy as many as possible of the `count` bytes from `begin` of the range to `position` of `to`,
    /// and return their number: 0 if it cannot copy.
    #[cfg(target_os = "linux")]
    fn copied_by_the_system(&self, begin: u64, count: u64, to: &File, position: u64) -> io::Result<u64> {
        use rustix::io::Errno;
        self.with(|file| {
            let (mut from, mut onto, mut copied) = (self.begin + begin, position, 0);
            while copied < count {
                let rest = ingot_format::saturating_usize(count - copied);
                match rustix::fs::copy_file_range(file, Some(&mut from), to, Some(&mut onto), rest) {
                    Ok(0) => return Err(self.ended(file, from)),
                    Ok(more) => copied += to_u64(more),
                    Err(Errno::INTR) => {}
                    Err(fault @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG | Errno::IO)) => {
                        return Err(fault.into());
                    }
                    // The files are on two file systems, one of them has no positions, or the kernel or a sandbox lacks
                    // the call.
                    Err(_) => break,
                }
            }
            Ok(copied)
        })
    }

    #[cfg(not(target_os = "linux"))]
    fn copied_by_the_system(&self, _: u64, _: u64, _: &File, _: u64) -> io::Result<u64> {
        Ok(0)
    }

    /// `file` has nothing at `position`. Where threads read from several, it may have ended before this one.
    fn ended(&self, file: &File, position: u64) -> io::Error {
        let end = file
            .metadata()
            .map_or(position, |facts| facts.len().min(position));
        let message = format!(
            "the file that is copied from ended at byte {end}, expected {} bytes from {} on",
            self.nbytes, self.begin
        );
        io::Error::new(io::ErrorKind::UnexpectedEof, message)
    }
}

/// The fastest way to copy bytes from one file to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copying {
    /// Threads that read and write.
    ReadAndWrite,
    /// By the system, which can let both files share whole blocks, so that nothing is copied.
    Blocks,
    /// The system: on a network the server copies, and a file system may have another one below it.
    System,
}

impl Copying {
    /// Choose by the file system of `to`.
    fn to(to: &File) -> Copying {
        const EXT: u32 = 0xEF53;
        const TMPFS: u32 = 0x0102_1994;
        const XFS: u32 = 0x5846_5342;
        const BTRFS: u32 = 0x9123_683E;
        match crate::disk::file_system(to) {
            // The system copies 64 KiB at a time there. Two threads that read and write 4 MiB take two thirds of the
            // time (2026-11, 2 GiB in the cache, ext4: 0.25 to 0.34 s against 0.39 to 0.45).
            Some(EXT | TMPFS) => Copying::ReadAndWrite,
            Some(XFS | BTRFS) => Copying::Blocks,
            _ => Copying::System,
        }
    }
}

/// Return whether files on the file system of `file` can share blocks.
pub(crate) fn shares_blocks(file: &File) -> bool {
    Copying::to(file) == Copying::Blocks
}

/// Return the part of `range` that consists of whole blocks in both files, for bytes that go from `begin` of one to
/// `position` of the other; empty if the two have different offsets in a block. Only such bytes can be shared, and a
/// request that contains others fails as a whole.
fn whole_blocks(range: &Range<u64>, begin: u64, position: u64) -> Range<u64> {
    let lead = position.next_multiple_of(BLOCK) - position;
    let length = range.end - range.start;
    if (begin + range.start) % BLOCK != position % BLOCK || lead >= length {
        return range.start..range.start;
    }
    let start = range.start + lead;
    start..range.end - (length - lead) % BLOCK
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
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

    proptest! {
        #[test]
        fn blocks_that_are_shared_are_whole_in_both_files_and_all_there_are(
            begin in 0..9000u64, start in 0..9000u64, length in 0..20_000u64, position in 0..9000u64, same in any::<bool>(),
        ) {
            // Two random positions hardly ever have the same offset in a block.
            let position = if same { (begin + start) % 4096 + 4096 * (position % 3) } else { position };
            let blocks = whole_blocks(&(start..start + length), begin, position);
            prop_assert!(start <= blocks.start && blocks.start <= blocks.end && blocks.end <= start + length);
            let is_one = |at: u64| (begin + at).is_multiple_of(4096) && (position + at - start).is_multiple_of(4096);
            let whole = (start..(start + length).saturating_sub(4095)).filter(|&at| is_one(at)).count();
            prop_assert_eq!(blocks.end - blocks.start, 4096 * to_u64(whole));
            prop_assert!(whole == 0 || is_one(blocks.start));
        }
    }

    proptest! {
        #[test]
        fn a_range_is_copied_wherever_it_stands(
            begin in 0..9000u64, skipped in 0..9000u64, count in 0..20_000u64, position in 0..9000u64,
        ) {
            let whole: Vec<u8> = (0..251).cycle().take(40_000).collect();
            let (mut from, mut to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
            from.write_all(&whole).unwrap();
            to.write_all(&[7; 40_000]).unwrap();
            let range = FileRange::new(&from, begin, skipped + count);
            range.copy(skipped..skipped + count, &to, position, &mut Vec::new()).unwrap();
            let mut found = vec![0; 40_000];
            FileRange::new(&to, 0, 40_000).read(0, &mut found).unwrap();
            let (start, end) = (usize::try_from(position).unwrap(), usize::try_from(position + count).unwrap());
            let first = usize::try_from(begin + skipped).unwrap();
            prop_assert!(found[start..end] == whole[first..first + end - start]);
            prop_assert!(found[..start].iter().chain(&found[end..]).all(|&byte| byte == 7));
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests_of_linux {
    use super::*;

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
