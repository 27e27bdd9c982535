//! Which bytes to read, and where to put them.

use std::fmt;

use ingot_format::{Entry, Header, to_u64, to_usize};

/// Reads to be made, and the blocks of memory that they fill.
///
/// A plan is numbers only: it can be made, merged, split, printed and tested without a file. Whatever reads less
/// or differently (some tensors, slices, shards) is another plan, not another way of reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// In the order of the blocks, and of the places within each. No two overlap in a block.
    reads: Vec<Read>,
    /// Sizes of the blocks.
    blocks: Vec<usize>,
}

/// One run of bytes that lies together in the file and in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Where it begins in the file.
    pub position: u64,
    /// Bytes to read.
    pub nbytes: usize,
    /// The block they go to.
    pub block: usize,
    /// Where in the block they begin.
    pub at: usize,
}

/// Where a tensor's bytes will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The block.
    pub block: usize,
    /// Where in the block they begin.
    pub at: usize,
    /// How many there are.
    pub nbytes: usize,
}

/// A plan that cannot be made: the memory it needs is more than an address can count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// Bytes that one tensor takes.
    pub nbytes: u64,
}

/// Tensors of this size and above get a block of their own, which goes when they go. Smaller ones share, because
/// a block costs system calls and at least a page.
pub const OWN_BLOCK_NBYTES: usize = 1 << 20;

/// Blocks for small tensors are closed at this size, so that one small tensor kept alive keeps no more than this.
pub const SHARED_BLOCK_NBYTES: usize = 16 << 20;

/// Where tensors begin in memory, in bytes: a cache line, which is what vector units ask for at most.
const ALIGNMENT: usize = 64;

impl Plan {
    /// Plans to read whole tensors, given as places in the header's order of data, into blocks of their own. The
    /// places in memory come in the order of `numbers`; a number given twice has one place.
    ///
    /// Small tensors that are neighbours in the file are read at once and lie in memory as they do in the file,
    /// unless they lie there so that their elements are not aligned.
    ///
    /// # Errors
    /// When a tensor is larger than memory can be addressed.
    pub fn of_tensors(header: &Header, numbers: &[usize]) -> Result<(Plan, Vec<Place>), TooLarge> {
        let mut in_file_order: Vec<usize> = (0..numbers.len()).collect();
        in_file_order.sort_by_key(|&rank| numbers[rank]);
        let mut plan = Plan { reads: Vec::new(), blocks: Vec::new() };
        let mut shared = None;
        let mut places = vec![Place { block: 0, at: 0, nbytes: 0 }; numbers.len()];
        let mut last: Option<(usize, Place)> = None;
        for rank in in_file_order {
            let place = match last {
                Some((number, place)) if number == numbers[rank] => place,
                _ => match header.entry(numbers[rank]) {
                    Some(entry) => plan.place(header, &entry, &mut shared)?,
                    // Only numbers of this header are given; one that is not takes no bytes.
                    None => Place { block: 0, at: 0, nbytes: 0 },
                },
            };
            places[rank] = place;
            last = Some((numbers[rank], place));
        }
        if plan.blocks.is_empty() {
            // Empty tensors need an address too.
            plan.blocks.push(ALIGNMENT);
        }
        Ok((plan, places))
    }

    /// Finds memory for one tensor. `shared` is the block that takes small ones, if one is open.
    fn place(&mut self, header: &Header, entry: &Entry<'_>, shared: &mut Option<usize>) -> Result<Place, TooLarge> {
        let nbytes = to_usize(entry.nbytes())
            .filter(|&nbytes| nbytes <= usize::MAX / 4)
            .ok_or(TooLarge { nbytes: entry.nbytes() })?;
        let position = header.data_start() + entry.begin;
        if nbytes >= OWN_BLOCK_NBYTES {
            self.blocks.push(nbytes);
            let place = Place { block: self.blocks.len() - 1, at: 0, nbytes };
            self.push(position, place);
            return Ok(place);
        }
        let block = match *shared {
            Some(block) if self.blocks[block] + ALIGNMENT + nbytes <= SHARED_BLOCK_NBYTES => block,
            _ => {
                self.blocks.push(0);
                *shared.insert(self.blocks.len() - 1)
            }
        };
        let end = self.blocks[block];
        let follows = self.reads.last().is_some_and(|read| {
            read.block == block && read.at + read.nbytes == end && read.position + to_u64(read.nbytes) == position
        });
        let is_aligned = end.is_multiple_of(alignment(entry));
        let at = if follows && is_aligned { end } else { end.next_multiple_of(ALIGNMENT) };
        self.blocks[block] = at + nbytes;
        let place = Place { block, at, nbytes };
        self.push(position, place);
        Ok(place)
    }

    /// Adds a read, or lengthens the last one when the new one follows it in the file and in memory.
    fn push(&mut self, position: u64, place: Place) {
        match self.reads.last_mut() {
            _ if place.nbytes == 0 => {}
            Some(last)
                if last.block == place.block
                    && last.at + last.nbytes == place.at
                    && last.position + to_u64(last.nbytes) == position =>
            {
                last.nbytes += place.nbytes;
            }
            _ => self.reads.push(Read { position, nbytes: place.nbytes, block: place.block, at: place.at }),
        }
    }

    /// The reads, in the order of the blocks.
    #[must_use]
    pub fn reads(&self) -> &[Read] {
        &self.reads
    }

    /// Sizes of the blocks, in bytes.
    #[must_use]
    pub fn blocks(&self) -> &[usize] {
        &self.blocks
    }

    /// Bytes that will be read.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.reads.iter().map(|read| to_u64(read.nbytes)).sum()
    }
}

/// Where elements of this tensor have to begin: at a multiple of their own size.
pub(crate) fn alignment(entry: &Entry<'_>) -> usize {
    match entry.dtype.bits() {
        64 => 8,
        32 => 4,
        16 => 2,
        _ => 1,
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>16} {:>12} {:>6} {:>10}", "position", "nbytes", "block", "at")?;
        for read in &self.reads {
            writeln!(f, "{:>16} {:>12} {:>6} {:>10}", read.position, read.nbytes, read.block, read.at)?;
        }
        write!(f, "{} bytes in {} reads into {} blocks", self.nbytes(), self.reads.len(), self.blocks.len())
    }
}
