//! Which bytes to read, where to put them, and which conversion happens on the way.

use std::ops::Range;

use ingot_format::{Dtype, Selection, to_u64, to_usize};

use super::input::PAGE_NBYTES;
use crate::error::{Failure, size};

/// Pieces to read, and the blocks of memory that they fill.
///
/// A plan is numbers only: it can be made, merged, printed and tested without a file. Reading less or differently (some
/// tensors, slices, other dtypes, shards) is another plan, not another way of reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan<'p> {
    /// The pieces in the order of the blocks, and by position in each block. No two overlap in a block.
    pieces: Vec<Piece<'p>>,
    blocks: Vec<BlockPlan>,
}

/// Bytes of one file, and the memory that they fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece<'p> {
    /// The number of the file.
    pub(crate) file: usize,
    /// The position of the bytes in the file; for a selection, the position that it is relative to.
    pub(crate) position: u64,
    /// The selected bytes; `None` if they are contiguous.
    pub(crate) gathered: Option<&'p Selection>,
    /// The dtypes in the file and in memory, if they differ.
    pub(crate) converted: Option<(Dtype, Dtype)>,
    /// The alignment of the address of the first byte.
    pub(crate) alignment: usize,
    /// The memory of the destination: 0 is the host, other numbers are devices.
    pub(crate) pool: usize,
    /// The number of the block.
    pub(crate) block: usize,
    /// The position of the bytes in the block.
    pub(crate) at: usize,
    /// The number of bytes in memory.
    pub(crate) nbytes: usize,
}

/// A block of memory that a plan needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockPlan {
    pub(crate) nbytes: usize,
    /// The memory of the block, as in [`Piece::pool`].
    pub(crate) pool: usize,
    /// The piece that has the block for itself, by its position in the list of wanted pieces.
    pub(crate) job: Option<usize>,
}

/// How fresh memory is divided into blocks, and the alignment of tensors in them.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    /// Tensors of this size and above get a block of their own, which is freed with them. Smaller ones share, because a
    /// block costs calls of the system or of an allocator, and rounds up.
    own_nbytes: usize,
    /// Blocks for small tensors are closed at this size, so that one small tensor kept alive keeps no more than this.
    shared_nbytes: usize,
    /// The alignment of tensors in bytes: the largest one that vector units need.
    alignment: usize,
    /// Whether tensors have the same offset in a page, or in a unit of that alignment, as in their file.
    is_level: bool,
    /// Whether empty tensors get a block too, so that a framework can create them in its own way.
    owns_empty: bool,
}

impl Blocks {
    const HOST: Blocks = Blocks {
        own_nbytes: 1 << 20,
        shared_nbytes: 16 << 20,
        alignment: ALIGNMENT,
        is_level: true,
        owns_empty: false,
    };
    /// No read goes straight to a device, so the position in the file does not matter.
    const DEVICE: Blocks = Blocks {
        own_nbytes: 64 << 10,
        shared_nbytes: 2 << 20,
        alignment: 256,
        is_level: false,
        owns_empty: true,
    };

    /// Return whether a tensor of this size gets a block of its own.
    fn is_own(&self, nbytes: usize) -> bool {
        nbytes >= self.own_nbytes || (nbytes == 0 && self.owns_empty)
    }
}

/// The alignment of tensors in host memory, in bytes: a cache line.
const ALIGNMENT: usize = 64;

impl<'p> Piece<'p> {
    /// Return a piece of contiguous bytes without a destination.
    pub(crate) fn run(file: usize, run: Range<u64>) -> Result<Piece<'static>, Failure> {
        Ok(Piece::straight(file, run.start, size(run.end - run.start)?))
    }

    /// The same, for `nbytes` bytes from `position` on.
    pub(crate) fn straight(file: usize, position: u64, nbytes: usize) -> Piece<'p> {
        Piece {
            file,
            position,
            gathered: None,
            converted: None,
            alignment: 1,
            pool: 0,
            block: 0,
            at: 0,
            nbytes,
        }
    }

    /// Return the position of its first byte in the file.
    pub(super) fn begin(&self) -> u64 {
        let first = self.gathered.and_then(Selection::span);
        self.position + first.map_or(0, |run| run.begin)
    }

    /// Return the range from its first byte in the file to the last.
    fn span(&self) -> Range<u64> {
        let end = match self.gathered {
            Some(selection) => selection.span().map_or(0, |run| run.end),
            None => to_u64(self.stored_nbytes()),
        };
        self.begin()..self.position + end
    }

    /// The number of bytes in the file.
    pub(super) fn stored_nbytes(&self) -> usize {
        let (stored, wanted) = widths(self.converted);
        self.nbytes / wanted * stored
    }

    /// Return whether its bytes are the same in memory as in the file.
    pub(super) fn is_straight(&self) -> bool {
        self.gathered.is_none() && self.converted.is_none()
    }

    /// Return whether `next` follows this piece in the file and in memory.
    fn goes_on_in(&self, next: &Piece<'_>) -> bool {
        self.is_straight()
            && next.is_straight()
            && (self.file, self.block) == (next.file, next.block)
            && self.at + self.nbytes == next.at
            && self.position + to_u64(self.nbytes) == next.position
    }
}

impl<'p> Plan<'p> {
    /// Plan to read `wanted` into fresh memory, and set the position of each.
    ///
    /// Small tensors that are neighbours in a file are read at once and are neighbours in memory, unless their elements would
    /// not be aligned. On the host the first of a block begins as far into a page as it does in its file, and the others
    /// as far into a cache line.
    pub(crate) fn fresh(wanted: &mut [Piece<'p>]) -> Plan<'p> {
        Plan::fresh_in(Blocks::HOST, wanted)
    }

    /// The same, with another division of host memory.
    fn fresh_in(host: Blocks, wanted: &mut [Piece<'p>]) -> Plan<'p> {
        let mut in_file_order: Vec<usize> = (0..wanted.len()).collect();
        in_file_order.sort_by_key(|&rank| (wanted[rank].file, wanted[rank].begin()));
        let mut plan = Plan {
            pieces: Vec::new(),
            blocks: Vec::new(),
        };
        // The block of each pool that takes small pieces, if one is open.
        let mut shared = Vec::new();
        for rank in in_file_order {
            let piece = &mut wanted[rank];
            shared.resize(shared.len().max(piece.pool + 1), None);
            let kind = if piece.pool == 0 { host } else { Blocks::DEVICE };
            piece.block = match shared[piece.pool] {
                _ if kind.is_own(piece.nbytes) => plan.open(piece.pool, Some(rank)),
                Some(block) if plan.has_room(block, kind, piece.nbytes) => block,
                _ => *shared[piece.pool].insert(plan.open(piece.pool, None)),
            };
            plan.place(kind, piece);
        }
        // Small tensors continue to fill a shared block after a large one was placed.
        plan.pieces.sort_by_key(|piece| (piece.block, piece.at));
        plan
    }

    /// Plan to read `wanted` into existing memory: each into a block of its own, in order.
    pub(crate) fn into_each(mut wanted: Vec<Piece<'p>>) -> Plan<'p> {
        let block = |(number, piece): (usize, &mut Piece<'_>)| {
            (piece.block, piece.at) = (number, 0);
            BlockPlan {
                nbytes: piece.nbytes,
                pool: piece.pool,
                job: None,
            }
        };
        let blocks = wanted.iter_mut().enumerate().map(block).collect();
        wanted.retain(|piece| piece.nbytes > 0);
        Plan {
            pieces: wanted,
            blocks,
        }
    }

    fn has_room(&self, block: usize, kind: Blocks, nbytes: usize) -> bool {
        self.blocks[block].nbytes + kind.alignment + nbytes <= kind.shared_nbytes
    }

    /// Place a piece in its block, after the previous pieces.
    fn place(&mut self, kind: Blocks, piece: &mut Piece<'p>) {
        let end = self.blocks[piece.block].nbytes;
        piece.at = end;
        let follows = self.pieces.last().is_some_and(|last| last.goes_on_in(piece));
        piece.at = match piece.nbytes {
            // An empty piece reads nothing, so the next piece still begins the block.
            0 => end - end % kind.alignment,
            _ if !kind.is_level => end.next_multiple_of(kind.alignment),
            _ if follows && end.is_multiple_of(piece.alignment) => end,
            // The bytes differ between memory and the file.
            _ if piece.converted.is_some() => end.next_multiple_of(kind.alignment),
            _ => level_place(end, piece.begin(), piece.alignment),
        };
        self.blocks[piece.block].nbytes = end.max(piece.at + piece.nbytes);
        match self.pieces.last_mut() {
            _ if piece.nbytes == 0 => {}
            Some(last) if last.goes_on_in(piece) => last.nbytes += piece.nbytes,
            _ => self.pieces.push(*piece),
        }
    }

    fn open(&mut self, pool: usize, job: Option<usize>) -> usize {
        self.blocks.push(BlockPlan { nbytes: 0, pool, job });
        self.blocks.len() - 1
    }

    /// The pieces, in the order of the blocks.
    pub(crate) fn pieces(&self) -> &[Piece<'p>] {
        &self.pieces
    }

    pub(crate) fn blocks(&self) -> &[BlockPlan] {
        &self.blocks
    }

    /// Return the span that is read of each of this many files.
    pub(crate) fn spans(&self, files: usize) -> Vec<Range<u64>> {
        let mut spans = vec![None; files];
        for piece in &self.pieces {
            let Range { start, end } = piece.span();
            let span = spans[piece.file].get_or_insert(start..end);
            *span = span.start.min(start)..span.end.max(end);
        }
        spans.into_iter().map(Option::unwrap_or_default).collect()
    }

    /// Return the contiguous ranges that are read, each with the number of its file.
    pub(super) fn stretches(&self) -> Vec<FileRun> {
        let mut pieces: Vec<FileRun> = self
            .pieces
            .iter()
            .map(|piece| (piece.file, piece.span()))
            .collect();
        pieces.sort_unstable_by_key(|(file, span)| (*file, span.start));
        joined(pieces)
    }

    /// The number of bytes of memory to fill.
    pub(crate) fn nbytes(&self) -> u64 {
        self.pieces.iter().map(|piece| to_u64(piece.nbytes)).sum()
    }
}

/// Contiguous bytes, with the number of their file.
pub(crate) type FileRun = (usize, Range<u64>);

/// Join ordered runs that overlap or follow one another.
pub(crate) fn joined(runs: impl IntoIterator<Item = FileRun>) -> Vec<FileRun> {
    let mut joined: Vec<FileRun> = Vec::new();
    for (file, run) in runs {
        match joined.last_mut() {
            Some((same, last)) if *same == file && run.start <= last.end => last.end = last.end.max(run.end),
            _ => joined.push((file, run)),
        }
    }
    joined
}

/// Return the first position from `end` on in a block that begins at a page. For the first bytes of a block, the
/// position has the same offset in a page as `position` in the file; for later bytes, the same offset in a cache line.
/// If that offset does not have this `alignment`, the position is a multiple of a cache line.
///
/// So whole pages of a file become whole pages of memory, as reads past the page cache need it. And processors copy at
/// a fifth of their speed if the destination begins a few bytes further into a page than the source (2026-11, pread of
/// 64 KiB: 2 GB/s at a distance of 8 or 16 bytes, 10 GB/s at 0, 32 or 64).
fn level_place(end: usize, position: u64, alignment: usize) -> usize {
    let unit = if end == 0 { PAGE_NBYTES } else { ALIGNMENT };
    let into_unit = to_usize(position % to_u64(unit)).unwrap_or(0);
    if !into_unit.is_multiple_of(alignment) {
        return end.next_multiple_of(ALIGNMENT);
    }
    end + (unit + into_unit - end % unit) % unit
}

/// Return the size of an element in the file and in memory; a byte for both if they are the same.
pub(super) fn widths(converted: Option<(Dtype, Dtype)>) -> (usize, usize) {
    let width = |dtype: Dtype| to_usize(dtype.bits().div_ceil(8)).unwrap_or(1);
    converted.map_or((1, 1), |(stored, wanted)| (width(stored), width(wanted)))
}

#[cfg(test)]
#[path = "tests/plan.rs"]
mod tests;
