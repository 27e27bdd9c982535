//! Which bytes to read, where to put them, and what happens to them on the way.

use std::fmt;
use std::ops::Range;

use ingot_format::{Dtype, Selection, to_u64, to_usize};

use super::input::PAGE_NBYTES;
use crate::error::{Failure, size};

/// Pieces to be read, and the blocks of memory that they fill.
///
/// A plan is numbers only: it can be made, merged, printed and tested without a file. Whatever reads less or differently
/// (some tensors, slices, other dtypes, shards) is another plan, not another way of reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan<'p> {
    /// In the order of the blocks, and of the places within each. No two overlap in a block.
    pieces: Vec<Piece<'p>>,
    /// Sizes of the blocks.
    blocks: Vec<usize>,
}

/// Bytes of one file, and the memory that they fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<'p> {
    /// The number of the file.
    pub file: usize,
    /// Where the bytes begin in the file, or where those that are gathered are counted from.
    pub position: u64,
    /// Which bytes from there on; `None` where they lie together.
    pub gathered: Option<&'p Selection>,
    /// The dtypes in the file and in memory, where these differ.
    pub converted: Option<(Dtype, Dtype)>,
    /// What the address of the first byte has to be a multiple of.
    pub alignment: usize,
    /// Where in memory they go.
    pub place: Place,
}

/// Some bytes of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The block.
    pub block: usize,
    /// Where in the block they begin.
    pub at: usize,
    /// How many there are.
    pub nbytes: usize,
}

/// How fresh memory is cut into blocks, and where in them tensors begin.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    /// Tensors of so many bytes and above get a block of their own, which goes when they go. Smaller ones share, because
    /// a block costs calls of the system or of an allocator, and rounds up.
    own_nbytes: usize,
    /// Blocks for small tensors are closed at this size, so that one small tensor kept alive keeps no more than this.
    shared_nbytes: usize,
    /// Where tensors begin, in bytes: what vector units ask for at most.
    alignment: usize,
    /// Whether they begin as far into a page or a unit of that alignment as they do in their file.
    is_level: bool,
    /// Whether tensors without a byte get a block too: a framework then makes them as it makes its own.
    owns_empty: bool,
}

impl Blocks {
    pub(crate) const HOST: Blocks = Blocks {
        own_nbytes: 1 << 20,
        shared_nbytes: 16 << 20,
        alignment: ALIGNMENT,
        is_level: true,
        owns_empty: false,
    };
    /// Nothing is read straight into them, so that how a file has its tensors decides nothing.
    pub(crate) const DEVICE: Blocks = Blocks {
        own_nbytes: 64 << 10,
        shared_nbytes: 2 << 20,
        alignment: 256,
        is_level: false,
        owns_empty: true,
    };

    /// Whether a tensor of so many bytes gets a block of its own.
    pub(crate) fn is_own(&self, nbytes: usize) -> bool {
        nbytes >= self.own_nbytes || (nbytes == 0 && self.owns_empty)
    }
}

/// Where tensors begin in the memory of the host, in bytes: a cache line.
const ALIGNMENT: usize = 64;

impl Piece<'_> {
    /// Bytes that lie together, as they are, without a place.
    pub(crate) fn run(file: usize, run: Range<u64>) -> Result<Piece<'static>, Failure> {
        Ok(Piece::straight(file, run.start, size(run.end - run.start)?))
    }

    /// The same for so many bytes from `position` on.
    pub(crate) fn straight(file: usize, position: u64, nbytes: usize) -> Piece<'static> {
        Piece {
            file,
            position,
            gathered: None,
            converted: None,
            alignment: 1,
            place: Place {
                nbytes,
                ..Place::default()
            },
        }
    }

    /// Where the first of its bytes is in the file.
    pub(super) fn begin(&self) -> u64 {
        let first = self.gathered.and_then(Selection::span);
        self.position + first.map_or(0, |run| run.begin)
    }

    /// Where the last of its bytes ends in the file.
    fn end(&self) -> u64 {
        match self.gathered {
            Some(selection) => self.position + selection.span().map_or(0, |run| run.end),
            None => self.position + to_u64(self.stored_nbytes()),
        }
    }

    /// Bytes in the file.
    pub(super) fn stored_nbytes(&self) -> usize {
        let (stored, wanted) = widths(self.converted);
        self.place.nbytes / wanted * stored
    }

    /// Whether its bytes lie in memory as they do in the file.
    fn is_straight(&self) -> bool {
        self.gathered.is_none() && self.converted.is_none()
    }

    /// Whether `next` goes on where this ends, in the file and in memory.
    fn goes_on_in(&self, next: &Piece<'_>) -> bool {
        self.is_straight()
            && next.is_straight()
            && (self.file, self.place.block) == (next.file, next.place.block)
            && self.place.at + self.place.nbytes == next.place.at
            && self.position + to_u64(self.place.nbytes) == next.position
    }
}

impl<'p> Plan<'p> {
    /// Plans to read `wanted` into fresh memory of the host. Where each goes comes in their order; what their own places
    /// say, but for the number of bytes, is not looked at.
    ///
    /// Small tensors that are neighbours in a file are read at once and lie in memory as they do in the file, unless
    /// they lie there so that their elements are not aligned. What begins a block lies to a page as it does in the file,
    /// and the rest to a cache line.
    #[must_use]
    pub fn fresh(wanted: &[Piece<'p>]) -> (Plan<'p>, Vec<Place>) {
        let (plan, places, _) = Plan::fresh_in(&[Blocks::HOST], wanted, |_| 0);
        (plan, places)
    }

    /// The same, into pools of such blocks, and for each block which pool it is of. `pool` says it of each piece.
    pub(crate) fn fresh_in(
        pools: &[Blocks],
        wanted: &[Piece<'p>],
        pool: impl Fn(usize) -> usize,
    ) -> (Plan<'p>, Vec<Place>, Vec<usize>) {
        let mut in_file_order: Vec<usize> = (0..wanted.len()).collect();
        in_file_order.sort_by_key(|&rank| (wanted[rank].file, wanted[rank].begin()));
        let mut plan = Plan {
            pieces: Vec::new(),
            blocks: Vec::new(),
        };
        let mut shared = vec![None; pools.len()];
        let mut places = vec![Place::default(); wanted.len()];
        let mut pool_of = Vec::new();
        for rank in in_file_order {
            let number = pool(rank);
            places[rank] = plan.place(pools[number], wanted[rank], &mut shared[number]);
            pool_of.resize(plan.blocks.len(), number);
        }
        // Small tensors go on filling a shared block after a large one was placed.
        plan.pieces
            .sort_by_key(|piece| (piece.place.block, piece.place.at));
        (plan, places, pool_of)
    }

    /// Plans to read `wanted` into memory that is there: each into a block of its own, in their order.
    #[must_use]
    pub fn into_each(mut wanted: Vec<Piece<'p>>) -> Plan<'p> {
        let blocks = wanted.iter().map(|piece| piece.place.nbytes).collect();
        for (block, piece) in wanted.iter_mut().enumerate() {
            (piece.place.block, piece.place.at) = (block, 0);
        }
        wanted.retain(|piece| piece.place.nbytes > 0);
        Plan {
            pieces: wanted,
            blocks,
        }
    }

    /// Finds memory for a piece. `shared` is the block that takes small ones, if one is open.
    fn place(&mut self, kind: Blocks, mut piece: Piece<'p>, shared: &mut Option<usize>) -> Place {
        let nbytes = piece.place.nbytes;
        let block = match *shared {
            _ if kind.is_own(nbytes) => self.open(),
            Some(block) if self.blocks[block] + kind.alignment + nbytes <= kind.shared_nbytes => block,
            _ => *shared.insert(self.open()),
        };
        let end = self.blocks[block];
        piece.place = Place {
            block,
            at: end,
            nbytes,
        };
        let follows = self.pieces.last().is_some_and(|last| last.goes_on_in(&piece));
        piece.place.at = match nbytes {
            // Nothing has to be read there, and the block still begins with what comes next.
            0 => end - end % kind.alignment,
            _ if !kind.is_level => end.next_multiple_of(kind.alignment),
            _ if follows && end.is_multiple_of(piece.alignment) => end,
            // It does not lie in memory as it does in the file.
            _ if piece.converted.is_some() => end.next_multiple_of(kind.alignment),
            _ => level_place(end, piece.begin(), piece.alignment),
        };
        self.blocks[block] = end.max(piece.place.at + nbytes);
        self.push(piece);
        piece.place
    }

    fn open(&mut self) -> usize {
        self.blocks.push(0);
        self.blocks.len() - 1
    }

    /// Adds a piece, or lengthens the last one when the new one follows it in the file and in memory.
    fn push(&mut self, piece: Piece<'p>) {
        match self.pieces.last_mut() {
            _ if piece.place.nbytes == 0 => {}
            Some(last) if last.goes_on_in(&piece) => last.place.nbytes += piece.place.nbytes,
            _ => self.pieces.push(piece),
        }
    }

    /// The pieces, in the order of the blocks.
    #[must_use]
    pub fn pieces(&self) -> &[Piece<'p>] {
        &self.pieces
    }

    /// Sizes of the blocks, in bytes.
    #[must_use]
    pub fn blocks(&self) -> &[usize] {
        &self.blocks
    }

    /// Where in each of so many files what is read of it lies.
    pub(crate) fn spans(&self, files: usize) -> Vec<Range<u64>> {
        let mut spans = vec![None; files];
        for piece in &self.pieces {
            let (begin, end) = (piece.begin(), piece.end());
            let span = spans[piece.file].get_or_insert(begin..end);
            *span = span.start.min(begin)..span.end.max(end);
        }
        spans.into_iter().map(Option::unwrap_or_default).collect()
    }

    /// The bytes that are read, each stretch that lies together with the number of its file.
    pub(super) fn stretches(&self) -> Vec<(usize, Range<u64>)> {
        let of_piece = |piece: &Piece<'_>| (piece.file, piece.begin()..piece.end());
        let mut pieces: Vec<_> = self.pieces.iter().map(of_piece).collect();
        pieces.sort_unstable_by_key(|(file, span)| (*file, span.start));
        let mut joined: Vec<(usize, Range<u64>)> = Vec::new();
        for (file, span) in pieces {
            match joined.last_mut() {
                Some((last, reached)) if *last == file && span.start <= reached.end => {
                    reached.end = reached.end.max(span.end);
                }
                _ => joined.push((file, span)),
            }
        }
        joined
    }

    /// Bytes of memory that will be filled.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.pieces.iter().map(|piece| to_u64(piece.place.nbytes)).sum()
    }
}

/// The first place in a block, which begins with a page, after the `end` bytes that are taken: as far into a page as
/// `position` is in the file where it is the first, else as far into a cache line. Where elements of this `alignment`
/// do not begin so in the file, a cache line is.
///
/// So whole pages of a file become whole pages of memory, which is what reading past the page cache asks for; and
/// processors copy to an address a few bytes further into a page than the one they copy from at a fifth of their speed
/// (2026-11, pread of 64 KiB: 2 GB/s where the distance is 8 or 16 bytes, 10 GB/s where it is 0, 32 or 64).
fn level_place(end: usize, position: u64, alignment: usize) -> usize {
    let unit = if end == 0 { PAGE_NBYTES } else { ALIGNMENT };
    let into_unit = to_usize(position % to_u64(unit)).unwrap_or(0);
    if !into_unit.is_multiple_of(alignment) {
        return end.next_multiple_of(ALIGNMENT);
    }
    end + (unit + into_unit - end % unit) % unit
}

/// Bytes of an element in the file and in memory: of one byte where they are the same in both.
pub(super) fn widths(converted: Option<(Dtype, Dtype)>) -> (usize, usize) {
    let width = |dtype: Dtype| to_usize(dtype.bits().div_ceil(8)).unwrap_or(1);
    converted.map_or((1, 1), |(stored, wanted)| (width(stored), width(wanted)))
}

/// A table, with a line for each piece: what is gathered has a number of runs, and what is converted two dtypes.
impl fmt::Display for Plan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>6} {:>16} {:>8} {:>12} {:>6} {:>10} on the way",
            "file", "position", "runs", "nbytes", "block", "at"
        )?;
        for piece in &self.pieces {
            let Place { block, at, nbytes } = piece.place;
            let runs = piece.gathered.map_or(1, Selection::block_count);
            let change = piece
                .converted
                .map(|(stored, wanted)| format!("{stored} to {wanted}"));
            let change = change.unwrap_or_else(|| "-".to_owned());
            writeln!(
                f,
                "{:>6} {:>16} {runs:>8} {nbytes:>12} {block:>6} {at:>10} {change}",
                piece.file,
                piece.begin(),
            )?;
        }
        write!(
            f,
            "{} bytes in {} pieces into {} blocks",
            self.nbytes(),
            self.pieces.len(),
            self.blocks.len()
        )
    }
}

#[cfg(test)]
mod tests;
