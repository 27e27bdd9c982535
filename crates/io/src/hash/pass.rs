//! Reading a file once, for its digests only.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use ingot_format::to_usize;

use super::digests::Digests;
use super::tree::SUBTREE_NBYTES;
use crate::failure::{Failure, read_exactly};
use crate::source::Source;
use crate::watch::Watch;
use crate::workers::share;

/// Bytes that are read at once.
const PIECE_NBYTES: u64 = SUBTREE_NBYTES;

/// Below this, starting a thread takes longer than hashing.
const ALONE_NBYTES: u64 = 1 << 20;

/// More threads than this wait for memory, not for a processor.
const MAX_THREADS: usize = 16;

/// Reads what `all` want of `source`, in the order of the file, and feeds it to each.
///
/// Only one of them may have trees among its runs, and it must be the first.
pub(crate) fn read_through(source: &dyn Source, all: &[&Digests], watch: &dyn Watch) -> Result<(), Failure> {
    let pieces = pieces(source.nbytes(), all);
    let total = pieces.iter().map(|piece| piece.end - piece.start).sum();
    let threads = match total <= ALONE_NBYTES {
        true => 1,
        false => thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MAX_THREADS),
    };
    // Fresh memory for each piece would cost a quarter of the time that hashing it takes.
    let buffers = Mutex::new(Vec::new());
    let work = |piece: Range<u64>| {
        let mut buffer: Vec<u8> = locked(&buffers).pop().unwrap_or_default();
        buffer.resize(to_usize(piece.end - piece.start).unwrap_or(usize::MAX), 0);
        let outcome = read_exactly(source, piece.start, &mut buffer);
        match outcome {
            Ok(()) => all.iter().for_each(|digests| digests.feed(piece.start, &buffer)),
            Err(_) => all.iter().for_each(|digests| digests.end()),
        }
        let nbytes = buffer.len();
        locked(&buffers).push(buffer);
        outcome.map(|()| nbytes)
    };
    share(threads, pieces, total, work, watch)
}

/// What is read at once, in the order of the file.
fn pieces(file_nbytes: u64, all: &[&Digests]) -> Vec<Range<u64>> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < file_nbytes {
        let end = all
            .iter()
            .map(|digests| digests.piece_end(at))
            .fold(file_nbytes.min(at + PIECE_NBYTES), u64::min);
        let piece = at..end;
        if all.iter().any(|digests| digests.wants(&piece)) {
            pieces.push(piece);
        }
        at = end;
    }
    pieces
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
