//! One block of a remote file on the disk: its bytes, and then a digest of each piece of them.
//!
//! A digest depends on the file, its version and the position of the piece, so that a block under the name of another one
//! is found out. Pieces are verified whenever they are read, while the processor's cache holds them, so that no wrong byte
//! leaves the cache and a read passes over the memory once.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use ingot_format::{saturating_usize, to_u64, to_usize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::disk;

/// Bytes of a block. One request brings them in about a tenth of a second, and a model of 100 GB is 12,000 files.
pub(super) const BLOCK_NBYTES: u64 = 8 << 20;

/// Bytes of a piece, which fit into the second-level cache of a core.
const PIECE_NBYTES: usize = 128 << 10;

const DIGEST_NBYTES: usize = 8;

/// A block: its file, the seed of its digests, and its range in the remote file.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) path: PathBuf,
    pub(super) seed: u64,
    pub(super) span: Range<u64>,
}

/// Why a block could not be written.
pub(super) enum Unwritten {
    Disk(io::Error),
    Store(io::Error),
}

/// A piece whose digest differs.
#[derive(Debug)]
pub(super) struct Damaged;

impl Place {
    fn pieces(&self) -> usize {
        self.nbytes().div_ceil(PIECE_NBYTES)
    }

    fn nbytes(&self) -> usize {
        saturating_usize(self.span.end - self.span.start)
    }

    /// Return the size of the file.
    pub(super) fn file_nbytes(&self) -> u64 {
        to_u64(self.nbytes() + self.pieces() * DIGEST_NBYTES)
    }

    fn digest(&self, piece: usize, bytes: &[u8]) -> [u8; DIGEST_NBYTES] {
        let position = self.span.start + to_u64(piece * PIECE_NBYTES);
        xxh3_64_with_seed(bytes, self.seed.wrapping_add(position)).to_le_bytes()
    }

    /// Write the block to the new file `path`, from a reader of its bytes.
    pub(super) fn write(&self, path: &Path, bytes: &mut dyn Read) -> Result<(), Unwritten> {
        let mut file = File::create(path).map_err(Unwritten::Disk)?;
        let mut table = Vec::with_capacity(self.pieces() * DIGEST_NBYTES);
        let mut buffer = vec![0; PIECE_NBYTES.min(self.nbytes())];
        for piece in 0..self.pieces() {
            let nbytes = PIECE_NBYTES.min(self.nbytes() - piece * PIECE_NBYTES);
            let buffer = &mut buffer[..nbytes];
            bytes.read_exact(buffer).map_err(Unwritten::Store)?;
            table.extend(self.digest(piece, buffer));
            file.write_all(buffer).map_err(Unwritten::Disk)?;
        }
        file.write_all(&table).map_err(Unwritten::Disk)
    }
}

/// A block that is open for reading.
#[derive(Debug)]
pub(super) struct Block {
    place: Place,
    file: File,
    table: Vec<u8>,
}

/// The last piece that was not read into its destination as a whole.
#[derive(Debug, Default)]
pub(super) struct Piece {
    /// The position of its first byte in the remote file.
    begin: u64,
    bytes: Vec<u8>,
}

impl Block {
    /// Open a block and record its use, unless it was used after `since`. `None` if it is missing, or has another
    /// size.
    pub(super) fn open(place: Place, since: SystemTime) -> Option<Block> {
        let file = disk::open_for_reading(&place.path).ok()?;
        let facts = file.metadata().ok()?;
        let mut table = vec![0; place.pieces() * DIGEST_NBYTES];
        if !facts.is_file() || facts.len() != place.file_nbytes() {
            return None;
        }
        fill(&file, &mut table, to_u64(place.nbytes())).ok()?;
        record_use(&file, since).ok()?;
        Some(Block { place, file, table })
    }

    pub(super) fn span(&self) -> &Range<u64> {
        &self.place.span
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    /// Copy verified bytes from `position` on, up to the end of a piece, and return how many.
    pub(super) fn read(&self, position: u64, dest: &mut [u8], last: &mut Piece) -> Result<usize, Damaged> {
        let at = to_usize(position - self.place.span.start).ok_or(Damaged)?;
        let (piece, within) = (at / PIECE_NBYTES, at % PIECE_NBYTES);
        let begin = piece * PIECE_NBYTES;
        let nbytes = PIECE_NBYTES.min(self.place.nbytes() - begin);
        if within == 0 && dest.len() >= nbytes {
            self.read_piece(piece, &mut dest[..nbytes])?;
            return Ok(nbytes);
        }
        let position = self.place.span.start + to_u64(begin);
        if last.begin != position || last.bytes.len() != nbytes {
            last.bytes.clear();
            last.bytes.resize(nbytes, 0);
            let read = self.read_piece(piece, &mut last.bytes);
            if read.is_err() {
                last.bytes.clear();
            }
            read?;
            last.begin = position;
        }
        let count = dest.len().min(nbytes - within);
        dest[..count].copy_from_slice(&last.bytes[within..within + count]);
        Ok(count)
    }

    fn read_piece(&self, piece: usize, dest: &mut [u8]) -> Result<(), Damaged> {
        fill(&self.file, dest, to_u64(piece * PIECE_NBYTES)).map_err(|_| Damaged)?;
        let digest = self.table.chunks_exact(DIGEST_NBYTES).nth(piece);
        if digest == Some(&self.place.digest(piece, dest)) {
            Ok(())
        } else {
            Err(Damaged)
        }
    }
}

/// Record the use of a file, unless it was used after `since`.
pub(super) fn record_use(file: &File, since: SystemTime) -> io::Result<()> {
    if file.metadata()?.modified()? < since {
        // A cache that is only readable has no order of use.
        let _ = file.set_modified(SystemTime::now());
    }
    Ok(())
}

/// Fill `dest` from a position of a file.
fn fill(file: &File, dest: &mut [u8], position: u64) -> io::Result<()> {
    let mut done = 0;
    while done < dest.len() {
        match disk::read_at(file, &mut dest[done..], position + to_u64(done)) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
            Err(fault) => return Err(fault),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block_of(folder: &Path, seed: u64, span: Range<u64>, bytes: &[u8]) -> Place {
        let path = folder.join(format!("{seed}-{}", span.start));
        let place = Place { path, seed, span };
        assert!(place.write(&place.path, &mut &*bytes).is_ok());
        place
    }

    fn open(place: Place) -> Option<Block> {
        Block::open(place, SystemTime::UNIX_EPOCH)
    }

    fn pattern(nbytes: usize) -> Vec<u8> {
        (0..nbytes).map(|at| u8::try_from(at % 251).unwrap()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20))]
        #[test]
        fn reads_of_any_length_return_the_bytes(
            nbytes in 1..3 * PIECE_NBYTES, from in 0..3 * PIECE_NBYTES, step in 1..3 * PIECE_NBYTES,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let bytes = pattern(nbytes);
            let span = BLOCK_NBYTES..BLOCK_NBYTES + to_u64(nbytes);
            let block = open(block_of(folder.path(), 7, span, &bytes)).unwrap();
            let (mut found, mut last) = (Vec::<u8>::new(), Piece::default());
            let from = from % nbytes;
            while from + found.len() < nbytes {
                let mut dest = vec![0; step.min(nbytes - from - found.len())];
                let position = BLOCK_NBYTES + to_u64(from + found.len());
                let count = block.read(position, &mut dest, &mut last).unwrap();
                found.extend(&dest[..count]);
            }
            prop_assert!(found == bytes[from..]);
        }
    }

    #[test]
    fn changed_bytes_and_changed_digests_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let nbytes = PIECE_NBYTES + 100;
        let place = block_of(folder.path(), 7, 0..to_u64(nbytes), &pattern(nbytes));
        let good = std::fs::read(&place.path).unwrap();
        for at in [PIECE_NBYTES, nbytes - 1, nbytes + DIGEST_NBYTES] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&place.path, bad).unwrap();
            let block = open(place.clone()).unwrap();
            let mut dest = vec![0; PIECE_NBYTES];
            assert!(block.read(0, &mut dest, &mut Piece::default()).is_ok());
            let position = to_u64(PIECE_NBYTES);
            for dest in [&mut dest[..], &mut [0; 3]] {
                assert!(block.read(position, dest, &mut Piece::default()).is_err(), "{at}");
            }
        }
    }

    #[test]
    fn a_truncated_block_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let place = block_of(folder.path(), 7, 0..1000, &pattern(1000));
        let file = File::options().write(true).open(&place.path).unwrap();
        for nbytes in [1007, 1000, 0] {
            file.set_len(nbytes).unwrap();
            assert!(open(place.clone()).is_none());
        }
    }

    #[test]
    fn a_block_of_another_file_or_position_is_found_out() {
        let folder = tempfile::tempdir().unwrap();
        let place = block_of(folder.path(), 7, 0..1000, &pattern(1000));
        for other in [
            Place {
                seed: 8,
                ..place.clone()
            },
            Place {
                span: BLOCK_NBYTES..BLOCK_NBYTES + 1000,
                ..place.clone()
            },
        ] {
            let position = other.span.start;
            let block = open(other).unwrap();
            assert!(
                block
                    .read(position, &mut [0; 1000], &mut Piece::default())
                    .is_err()
            );
        }
    }
}
