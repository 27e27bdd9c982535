//! Reading a file once, for those only who look at its bytes.

use std::ops::Range;
use std::sync::Mutex;
use std::thread;

use ingot_format::{to_u64, to_usize};

use crate::digest::{Digests, SUBTREE_NBYTES};
use crate::error::Failure;
use crate::lock::locked;
use crate::options::ReadOptions;
use crate::read::input::{Witness, level};
use crate::source::{Source, read_exactly};
use crate::stop::StopFlag;
use crate::watch::Watch;
use crate::workers::{Reading, share, watched};

/// Bytes that one thread reads before it takes more.
const PIECE_NBYTES: u64 = 1 << 20;

/// Below this, starting a thread takes longer than hashing.
const ALONE_NBYTES: u64 = 1 << 20;

/// More threads than this wait for memory, not for a processor.
const MAX_THREADS: usize = 16;

/// What pieces that wait for a network, or for earlier ones to be hashed, take of memory at most, all together.
const WAITING_NBYTES: u64 = 128 << 20;

/// Reads what `all` want of `source`, in the order of the file, and feeds it to each.
pub(crate) fn read_through(source: &dyn Source, all: &[&Digests], watch: &dyn Watch) -> Result<(), Failure> {
    let (reading, piece_nbytes) = reading(source);
    let pieces = pieces(source.nbytes(), piece_nbytes, all);
    let all = all.to_vec();
    show(source, reading, pieces, &Feeding { source, all }, watch)
}

/// Fills `dest` from `position` on.
pub(crate) fn read_watched(
    source: &dyn Source,
    position: u64,
    dest: &mut [u8],
    watch: &dyn Watch,
) -> Result<(), Failure> {
    let reading = match source.waits() {
        true => Reading::waiting(1),
        false => Reading::on(1),
    };
    watched(reading, |stop| read_exactly(source, position, dest, stop), watch)?
}

/// Reads these pieces of `source`, which are begun in their order, and shows them to `witness`.
pub(super) fn show(
    source: &dyn Source,
    mut reading: Reading,
    pieces: Vec<Range<u64>>,
    witness: &dyn Witness,
    watch: &dyn Watch,
) -> Result<(), Failure> {
    let total = pieces.iter().map(|piece| piece.end - piece.start).sum();
    if total <= ALONE_NBYTES {
        reading.threads = 1;
    }
    // Fresh memory for each piece would cost a quarter of the time that hashing it takes.
    let buffers = Mutex::new(Vec::new());
    let work = |piece: Range<u64>, stop: StopFlag<'_>| {
        let mut buffer: Vec<u8> = locked(&buffers).pop().unwrap_or_default();
        let outcome = read_piece(source, witness, &piece, &mut buffer, stop);
        locked(&buffers).push(buffer);
        if outcome.is_err() {
            witness.end();
        }
        outcome.map(|()| size(&piece))
    };
    share(reading, pieces, total, work, watch)
}

/// Feeds what is read of a source to digests.
pub(super) struct Feeding<'a> {
    pub(super) source: &'a dyn Source,
    pub(super) all: Vec<&'a Digests>,
}

impl Witness for Feeding<'_> {
    fn step_end(&self, position: u64, most: u64) -> u64 {
        step_end(self.source, &self.all, position, most)
    }

    fn see(&self, position: u64, bytes: &[u8]) {
        self.all.iter().for_each(|digests| digests.feed(position, bytes));
    }

    fn end(&self) {
        self.all.iter().for_each(|digests| digests.end());
    }
}

/// On how many threads a source is read through, and how much of it each of them takes at once.
pub(super) fn reading(source: &dyn Source) -> (Reading, u64) {
    if !source.waits() {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        return (Reading::on(cores.min(MAX_THREADS)), PIECE_NBYTES);
    }
    let all = 0..source.nbytes();
    let reading = Reading::of(source.nbytes(), &[(source, all)], &ReadOptions::default());
    let each = (WAITING_NBYTES / to_u64(reading.threads)).max(PIECE_NBYTES);
    (reading, to_u64(reading.chunk_nbytes).min(each))
}

fn read_piece(
    source: &dyn Source,
    witness: &dyn Witness,
    piece: &Range<u64>,
    buffer: &mut Vec<u8>,
    stop: StopFlag<'_>,
) -> Result<(), Failure> {
    let mut at = piece.start;
    while at < piece.end {
        let end = witness.step_end(at, piece.end - at);
        let bytes = level(buffer, at, size(&(at..end)));
        read_exactly(source, at, bytes, stop)?;
        witness.see(at, bytes);
        at = end;
    }
    Ok(())
}

/// Where the bytes end that are best read at once from `at` on, of the next `most`. For trees they are as many as stay in
/// a core's own cache until they are hashed. What is hashed in order is read in full, while another thread hashes, and so
/// is what each read has to wait for.
fn step_end(source: &dyn Source, all: &[&Digests], at: u64, most: u64) -> u64 {
    let step = match source.waits() || all.iter().any(|digests| digests.in_order()) {
        true => most,
        false => most.min(SUBTREE_NBYTES),
    };
    cut(all, at, step)
}

/// Where a piece from `at` on, of at most `most` bytes, is best cut for all of them.
fn cut(all: &[&Digests], at: u64, most: u64) -> u64 {
    all.iter()
        .fold(at + most, |end, digests| digests.cut(at, end - at))
}

/// What is read before anybody else begins with it, in the order of the file.
fn pieces(file_nbytes: u64, piece_nbytes: u64, all: &[&Digests]) -> Vec<Range<u64>> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < file_nbytes {
        let end = cut(all, at, piece_nbytes.min(file_nbytes - at));
        let piece = at..end;
        if all.iter().any(|digests| digests.wants(&piece)) {
            pieces.push(piece);
        }
        at = end;
    }
    pieces
}

fn size(range: &Range<u64>) -> usize {
    to_usize(range.end - range.start).unwrap_or(usize::MAX)
}
