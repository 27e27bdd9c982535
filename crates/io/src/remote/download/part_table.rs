//! The table of the parts of a file that have been fetched.
//!
//! The table follows the data in the same file and is cut off when the file is renamed. It contains the XXH3 of each part.
//! A resumed download reads a part again and keeps it if it has that hash. A bit in place of the hash would need a flush of
//! the data before each bit, and would not notice that another program changed the data. A hash needs no order: it proves
//! its part after a kill, after a power loss and after a foreign write.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;

use ingot_format::{to_u64, to_usize};

use crate::digest::{Algorithm, Digest};
use crate::payload::FileRange;

/// The first bytes of a table, which include the version of the format.
const MAGIC: [u8; 8] = *b"ingot-d1";
/// Bytes before the hashes: the magic, and the digest of the version of the file.
const HEAD_NBYTES: usize = 8 + 32;
/// Bytes of a hash.
const PART_HASH_NBYTES: usize = 16;
/// Bytes of a seal: the head of a table, and a hash of its hashes.
pub(super) const SEAL_NBYTES: usize = HEAD_NBYTES + PART_HASH_NBYTES;

const MIB: u64 = 1 << 20;
/// Most bytes of a part, which one request fetches.
const PART_NBYTES: u64 = 8 * MIB;
/// Number of parts of a file, within the limits for the size of a part.
const PARTS: u64 = 64;

/// The XXH3 of a part.
pub(super) type PartHash = [u8; PART_HASH_NBYTES];

/// The hashes of the parts that have been fetched, by the number of the part.
pub(super) type PartHashes = BTreeMap<usize, PartHash>;

/// Identifies a whole file: its version, and the hashes of all its parts.
pub(super) type Seal = [u8; SEAL_NBYTES];

/// The layout of a file with its table, and the version of the file.
pub(super) struct PartTable {
    file_nbytes: u64,
    part_nbytes: u64,
    version: Digest,
}

impl PartTable {
    /// Return the table of a file of this size, whose `version` no other version has.
    pub(super) fn new(file_nbytes: u64, version: &str) -> PartTable {
        let part_nbytes = (file_nbytes / PARTS).clamp(MIB, PART_NBYTES);
        let part_nbytes = part_nbytes.next_multiple_of(MIB);
        let text = format!("{version}\n{file_nbytes}\n{part_nbytes}");
        PartTable {
            file_nbytes,
            part_nbytes,
            version: Algorithm::Sha256.digest(text.as_bytes()),
        }
    }

    /// Return the table of a file that can only be fetched whole.
    pub(super) fn of_one_part(file_nbytes: u64, version: &str) -> PartTable {
        PartTable {
            part_nbytes: file_nbytes.max(1),
            ..PartTable::new(file_nbytes, version)
        }
    }

    /// Return the bytes of file and table.
    pub(super) fn nbytes(&self) -> u64 {
        self.position(self.count())
    }

    /// Return the number of parts.
    pub(super) fn count(&self) -> usize {
        to_usize(self.file_nbytes.div_ceil(self.part_nbytes)).unwrap_or(usize::MAX)
    }

    /// Return the range of a part in the file.
    pub(super) fn part(&self, number: usize) -> Range<u64> {
        let begin = to_u64(number).saturating_mul(self.part_nbytes);
        let end = begin.saturating_add(self.part_nbytes);
        begin.min(self.file_nbytes)..end.min(self.file_nbytes)
    }

    /// Return the position of the hash of a part.
    pub(super) fn position(&self, number: usize) -> u64 {
        let head_end = self.file_nbytes.saturating_add(to_u64(HEAD_NBYTES));
        head_end.saturating_add(to_u64(number).saturating_mul(to_u64(PART_HASH_NBYTES)))
    }

    /// Return the bytes between the file and the hashes.
    pub(super) fn head(&self) -> Vec<u8> {
        [&MAGIC, self.version.as_bytes()].concat()
    }

    /// Read the hashes in `file`; `None` if it has no table of this version of this file.
    pub(super) fn hashes(&self, file: &File) -> Option<PartHashes> {
        if file.metadata().ok()?.len() != self.nbytes() {
            return None;
        }
        let mut table = vec![0; to_usize(self.nbytes() - self.file_nbytes)?];
        let range = FileRange::new(file, self.file_nbytes, to_u64(table.len()));
        range.read(0, &mut table).ok()?;
        let hashes = table.strip_prefix(&*self.head())?.as_chunks().0;
        let hashes = hashes.iter().copied().enumerate();
        Some(hashes.filter(|(_, hash)| *hash != PartHash::default()).collect())
    }

    /// Return the seal of the file whose parts have these hashes.
    pub(super) fn seal(&self, hashes: &PartHashes) -> Seal {
        let hashes: Vec<PartHash> = hashes.values().copied().collect();
        let hash = Algorithm::Xxh3Wide.digest(hashes.as_flattened());
        let seal = [&*self.head(), hash.as_bytes()].concat();
        seal.first_chunk().copied().unwrap_or([0; SEAL_NBYTES])
    }

    /// Whether `seal` is a seal of this version of this file.
    pub(super) fn is_sealed_by(&self, seal: &Seal) -> bool {
        seal.starts_with(&self.head())
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
    fn impossible_sizes_do_not_overflow() {
        // A server may claim them. Allocating the file fails later.
        for nbytes in [1 << 63, u64::MAX - 40, u64::MAX - 39, u64::MAX] {
            let table = PartTable::new(nbytes, "v");
            assert!(table.nbytes() > nbytes || table.nbytes() == u64::MAX);
            assert_eq!(table.part(table.count() - 1).end, nbytes);
        }
    }

    #[test]
    fn tables_of_other_versions_are_rejected() {
        let mut file = tempfile::tempfile().unwrap();
        let table = PartTable::new(2 * MIB, "one");
        file.write_all(&vec![1; 2 << 20]).unwrap();
        file.write_all(&table.head()).unwrap();
        file.write_all(&[[0; PART_HASH_NBYTES], [7; PART_HASH_NBYTES]].concat())
            .unwrap();
        assert_eq!(table.hashes(&file), Some([(1, [7; PART_HASH_NBYTES])].into()));
        assert_eq!(PartTable::new(2 * MIB, "two").hashes(&file), None);
        assert_eq!(PartTable::new(2 * MIB - 1, "one").hashes(&file), None);
        file.set_len(table.nbytes() - 1).unwrap();
        assert_eq!(table.hashes(&file), None);
    }

    #[test]
    fn seals_depend_on_version_size_and_parts() {
        let (one, two) = ([1; PART_HASH_NBYTES], [2; PART_HASH_NBYTES]);
        let table = PartTable::new(2 * MIB, "one");
        let seal = table.seal(&[(0, one), (1, two)].into());
        assert!(table.is_sealed_by(&seal));
        assert!(!table.is_sealed_by(&[0; SEAL_NBYTES]));
        assert!(!PartTable::new(2 * MIB, "two").is_sealed_by(&seal));
        assert!(!PartTable::new(2 * MIB - 1, "one").is_sealed_by(&seal));
        assert_eq!(table.seal(&[(1, two), (0, one)].into()), seal);
        assert_ne!(table.seal(&[(0, two), (1, one)].into()), seal);
    }
}
