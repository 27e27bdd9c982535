//! What is known of a file that is being fetched: which parts of it are there.
//!
//! It stands behind the bytes in the same file, so that the two cannot be taken for those of different files, and is cut
//! off when the file gets its name. Of each part it holds the XXH3 of its bytes. A part counts as fetched only where the
//! bytes have that hash when they are read again: so it does not matter in which order a disk wrote things down, nor who
//! else was at the file.

use std::fs::File;
use std::ops::Range;

use ingot_format::{to_u64, to_usize};

use crate::digest::{Algorithm, Digest};
use crate::payload::FileRange;

/// What notes begin with, and the version of the rest.
const MAGIC: [u8; 8] = *b"ingot-d1";
/// Bytes before the hashes: those, and the digest of what names the version.
const HEAD_NBYTES: u64 = 8 + 32;
/// Bytes of a hash.
pub(super) const PART_HASH_NBYTES: usize = 16;

const MIB: u64 = 1 << 20;
/// Bytes of a part at most: what one request takes.
const PART_NBYTES: u64 = 8 * MIB;
/// A file is cut into so many parts, where they do not become too small or too large.
const PARTS: u64 = 64;

/// The hash of a part; zero where it is not there.
pub(super) type PartHash = [u8; PART_HASH_NBYTES];

/// Where notes stand, and of what file they are.
pub(super) struct PartTable {
    file_nbytes: u64,
    part_nbytes: u64,
    version: Digest,
}

impl PartTable {
    /// Of a file of so many bytes, whose `version` no other has.
    pub(super) fn new(file_nbytes: u64, version: &str) -> PartTable {
        let part_nbytes = (file_nbytes / PARTS)
            .clamp(MIB, PART_NBYTES)
            .next_multiple_of(MIB);
        let text = format!("{version}\n{file_nbytes}\n{part_nbytes}");
        PartTable {
            file_nbytes,
            part_nbytes,
            version: Algorithm::Sha256.digest(text.as_bytes()),
        }
    }

    /// Of a file that comes in one part or not at all.
    pub(super) fn of_one_part(file_nbytes: u64, version: &str) -> PartTable {
        PartTable {
            part_nbytes: file_nbytes.max(1),
            ..PartTable::new(file_nbytes, version)
        }
    }

    /// Bytes of file and notes.
    pub(super) fn nbytes(&self) -> u64 {
        self.position(self.count())
    }

    /// How many parts there are.
    pub(super) fn count(&self) -> usize {
        to_usize(self.file_nbytes.div_ceil(self.part_nbytes)).unwrap_or(usize::MAX)
    }

    /// Where a part lies in the file.
    pub(super) fn part(&self, number: usize) -> Range<u64> {
        let begin = to_u64(number)
            .saturating_mul(self.part_nbytes)
            .min(self.file_nbytes);
        begin..self.file_nbytes.min(begin.saturating_add(self.part_nbytes))
    }

    /// Where the hash of a part stands.
    pub(super) fn position(&self, number: usize) -> u64 {
        let head_end = self.file_nbytes.saturating_add(HEAD_NBYTES);
        head_end.saturating_add(to_u64(number).saturating_mul(to_u64(PART_HASH_NBYTES)))
    }

    /// What stands before the hashes, directly behind the file.
    pub(super) fn head(&self) -> Vec<u8> {
        [&MAGIC, self.version.as_bytes()].concat()
    }

    /// Bytes of the notes.
    pub(super) fn notes_nbytes(&self) -> usize {
        to_usize(self.nbytes() - self.file_nbytes).unwrap_or(usize::MAX)
    }

    /// The notes of a file whose parts have these hashes.
    pub(super) fn notes(&self, hashes: &[PartHash]) -> Vec<u8> {
        [&*self.head(), hashes.as_flattened()].concat()
    }

    /// The hashes that `notes` hold of this version of this file; `None` where they are of another.
    pub(super) fn hashes_in(&self, notes: &[u8]) -> Option<Vec<PartHash>> {
        let hashes = notes.strip_prefix(&*self.head())?;
        Some(hashes.as_chunks().0.to_vec())
    }

    /// The hashes that `file` holds of this version of this file; `None` where it holds none.
    pub(super) fn hashes(&self, file: &File) -> Option<Vec<PartHash>> {
        if file.metadata().ok()?.len() != self.nbytes() {
            return None;
        }
        let mut notes = vec![0; self.notes_nbytes()];
        let range = FileRange::new(file, self.file_nbytes, to_u64(notes.len()));
        range.read(0, &mut notes).ok()?;
        self.hashes_in(&notes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn parts_cover_the_file() {
        for nbytes in [0, 1, MIB, MIB + 1, 100 * MIB, (1 << 40) + 5] {
            let table = PartTable::new(nbytes, "v");
            let mut end = 0;
            for number in 0..table.count().min(300_000) {
                let part = table.part(number);
                assert_eq!(part.start, end);
                assert!(part.end > part.start && part.end - part.start <= PART_NBYTES);
                end = part.end;
            }
            assert_eq!(end, nbytes);
            assert_eq!(table.nbytes(), nbytes + 40 + 16 * to_u64(table.count()));
        }
    }

    #[test]
    fn a_size_that_no_file_has_is_counted_as_any_other() {
        // A server may claim it. There is no room for the file, which is said when room is made.
        for nbytes in [1 << 63, u64::MAX - 40, u64::MAX - 39, u64::MAX] {
            let table = PartTable::new(nbytes, "v");
            assert!(table.nbytes() > nbytes || table.nbytes() == u64::MAX);
            assert_eq!(table.part(table.count() - 1).end, nbytes);
        }
    }

    #[test]
    fn notes_of_another_version_are_none() {
        let mut file = tempfile::tempfile().unwrap();
        let table = PartTable::new(3, "one");
        file.write_all(b"abc").unwrap();
        file.write_all(&table.head()).unwrap();
        file.write_all(&[7; PART_HASH_NBYTES]).unwrap();
        assert_eq!(table.hashes(&file), Some(vec![[7; PART_HASH_NBYTES]]));
        assert_eq!(PartTable::new(3, "two").hashes(&file), None);
        assert_eq!(PartTable::new(2, "one").hashes(&file), None);
        file.set_len(table.nbytes() - 1).unwrap();
        assert_eq!(table.hashes(&file), None);
    }
}
