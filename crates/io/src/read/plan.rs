//! Which bytes to read, and where to put them.

use std::fmt;
use std::ops::Range;

use ingot_format::{Entry, Header, to_u64, to_usize};

use crate::failure::Failure;
use crate::read::gather::PAGE_NBYTES;

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

/// Which tensor, of those in several files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId {
    /// The number of the file.
    pub file: usize,
    /// The place of the tensor in the order of that file's data.
    pub number: usize,
}

/// One run of bytes that lies together in a file and in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// The number of the file.
    pub file: usize,
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

impl From<TooLarge> for Failure {
    fn from(TooLarge { nbytes }: TooLarge) -> Failure {
        Failure::OutOfMemory { nbytes, source: None }
    }
}

/// Tensors of this size and above get a block of their own, which goes when they go. Smaller ones share, because
/// a block costs system calls and at least a page.
pub const OWN_BLOCK_NBYTES: usize = 1 << 20;

/// Blocks for small tensors are closed at this size, so that one small tensor kept alive keeps no more than this.
pub const SHARED_BLOCK_NBYTES: usize = 16 << 20;

/// Where tensors begin in memory, in bytes: a cache line, which is what vector units ask for at most.
pub(crate) const ALIGNMENT: usize = 64;

impl Plan {
    /// Plans to read whole tensors of the files with these headers into blocks of their own. The places in memory come
    /// in the order of `tensors`; one given twice has one place.
    ///
    /// Small tensors that are neighbours in a file are read at once and lie in memory as they do in the file, unless
    /// they lie there so that their elements are not aligned. What begins a block lies to a page as it does in the file,
    /// and the rest to a cache line.
    ///
    /// # Errors
    /// When a tensor is larger than memory can be addressed.
    pub fn of_tensors(headers: &[&Header], tensors: &[TensorId]) -> Result<(Plan, Vec<Place>), TooLarge> {
        let mut in_file_order: Vec<usize> = (0..tensors.len()).collect();
        in_file_order.sort_by_key(|&rank| tensors[rank]);
        let mut plan = Plan {
            reads: Vec::new(),
            blocks: Vec::new(),
        };
        let mut shared = None;
        let mut places = vec![
            Place {
                block: 0,
                at: 0,
                nbytes: 0
            };
            tensors.len()
        ];
        let mut last: Option<(TensorId, Place)> = None;
        for rank in in_file_order {
            let TensorId { file, number } = tensors[rank];
            let header = headers.get(file);
            let place = match last {
                Some((tensor, place)) if tensor == tensors[rank] => place,
                _ => match header.and_then(|header| Some((header, header.entry(number)?))) {
                    Some((header, entry)) => {
                        plan.place(file, header.data_start() + entry.begin, &entry, &mut shared)?
                    }
                    // Only tensors of these headers are given; one that is not takes no bytes.
                    None => Place {
                        block: 0,
                        at: 0,
                        nbytes: 0,
                    },
                },
            };
            places[rank] = place;
            last = Some((tensors[rank], place));
        }
        // Small tensors go on filling a shared block after a large one was placed.
        plan.reads.sort_by_key(|read| (read.block, read.at));
        if plan.blocks.is_empty() {
            // Empty tensors need an address too.
            plan.blocks.push(ALIGNMENT);
        }
        Ok((plan, places))
    }

    /// Finds memory for the tensor at `position` in a file. `shared` is the block that takes small ones, if one is open.
    fn place(
        &mut self,
        file: usize,
        position: u64,
        entry: &Entry<'_>,
        shared: &mut Option<usize>,
    ) -> Result<Place, TooLarge> {
        let nbytes = to_usize(entry.nbytes())
            .filter(|&nbytes| nbytes <= usize::MAX / 4)
            .ok_or(TooLarge {
                nbytes: entry.nbytes(),
            })?;
        if nbytes >= OWN_BLOCK_NBYTES {
            let at = level_place(0, position, alignment(entry));
            self.blocks.push(at + nbytes);
            let place = Place {
                block: self.blocks.len() - 1,
                at,
                nbytes,
            };
            self.push(file, position, place);
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
            (read.file, read.block) == (file, block)
                && read.at + read.nbytes == end
                && read.position + to_u64(read.nbytes) == position
        });
        let is_aligned = end.is_multiple_of(alignment(entry));
        let at = match nbytes {
            // Nothing has to be read there, and the block still begins with what comes next.
            0 => end - end % ALIGNMENT,
            _ if follows && is_aligned => end,
            _ => level_place(end, position, alignment(entry)),
        };
        self.blocks[block] = end.max(at + nbytes);
        let place = Place { block, at, nbytes };
        self.push(file, position, place);
        Ok(place)
    }

    /// Adds a read, or lengthens the last one when the new one follows it in the file and in memory.
    fn push(&mut self, file: usize, position: u64, place: Place) {
        match self.reads.last_mut() {
            _ if place.nbytes == 0 => {}
            Some(last)
                if (last.file, last.block) == (file, place.block)
                    && last.at + last.nbytes == place.at
                    && last.position + to_u64(last.nbytes) == position =>
            {
                last.nbytes += place.nbytes;
            }
            _ => self.reads.push(Read {
                file,
                position,
                nbytes: place.nbytes,
                block: place.block,
                at: place.at,
            }),
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

    /// Where in each of so many files what is read of it lies.
    pub(crate) fn spans(&self, files: usize) -> Vec<Range<u64>> {
        let mut spans = vec![None; files];
        for read in &self.reads {
            let end = read.position + to_u64(read.nbytes);
            let span = spans[read.file].get_or_insert(read.position..end);
            *span = span.start.min(read.position)..span.end.max(end);
        }
        spans.into_iter().map(Option::unwrap_or_default).collect()
    }

    /// Bytes that will be read.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.reads.iter().map(|read| to_u64(read.nbytes)).sum()
    }
}

/// The first place in a block, which begins with a page, after the `end` bytes that are taken: as far into a page as
/// `position` is in the file where it is the first, else as far into a cache line. Where elements of this `alignment`
/// do not begin so in the file, a cache line is.
///
/// So whole pages of a file become whole pages of memory, which is what reading past the page cache asks for; and
/// processors copy to an address a few bytes further into a page than the one they copy from at a fifth of their speed
/// (2026-11, pread of 64 KiB: 2 GB/s where the distance is 8 or 16 bytes, 10 GB/s where it is 0, 32 or 64).
pub(crate) fn level_place(end: usize, position: u64, alignment: usize) -> usize {
    let unit = if end == 0 { PAGE_NBYTES } else { ALIGNMENT };
    let into_unit = to_usize(position % to_u64(unit)).unwrap_or(0);
    if !into_unit.is_multiple_of(alignment) {
        return end.next_multiple_of(ALIGNMENT);
    }
    end + (unit + into_unit - end % unit) % unit
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
        writeln!(
            f,
            "{:>6} {:>16} {:>12} {:>6} {:>10}",
            "file", "position", "nbytes", "block", "at"
        )?;
        for read in &self.reads {
            writeln!(
                f,
                "{:>6} {:>16} {:>12} {:>6} {:>10}",
                read.file, read.position, read.nbytes, read.block, read.at
            )?;
        }
        write!(
            f,
            "{} bytes in {} reads into {} blocks",
            self.nbytes(),
            self.reads.len(),
            self.blocks.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ingot_format::{Dtype, Format, Spec, layout};
    use proptest::prelude::*;

    /// A header with a tensor of U8 for each size.
    fn header(sizes: &[u64]) -> Header {
        let names: Vec<String> = (0..sizes.len()).map(|number| format!("{number:04}")).collect();
        let shapes: Vec<[u64; 1]> = sizes.iter().map(|&size| [size]).collect();
        let specs: Vec<Spec<'_>> = names
            .iter()
            .zip(&shapes)
            .map(|(name, shape)| Spec {
                name,
                dtype: Dtype::U8,
                shape,
            })
            .collect();
        layout(&specs, None, Format::Safetensors).unwrap().header
    }

    proptest! {
        /// The obvious plan reads each tensor by itself; the merged one must bring the same bytes to its places.
        #[test]
        fn a_merged_plan_delivers_what_one_read_per_tensor_does(
            sizes in proptest::collection::vec(
                proptest::collection::vec(
                    prop_oneof![0_u64..200, Just(1 << 20), (1_u64 << 20)..(2 << 20)], 1..6),
                1..4),
            picks in proptest::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 0..16),
        ) {
            let owned: Vec<Header> = sizes.iter().map(|sizes| header(sizes)).collect();
            let headers: Vec<&Header> = owned.iter().collect();
            // Bytes that differ from file to file.
            let files: Vec<Vec<u8>> = (1_u64..).zip(&headers).map(|(seed, header)| {
                (0..header.file_nbytes()).map(|at| (at * seed % 251).to_le_bytes()[0]).collect()
            }).collect();
            let tensors: Vec<TensorId> = picks.iter().map(|(file, number)| {
                let file = file.index(sizes.len());
                TensorId { file, number: number.index(sizes[file].len()) }
            }).collect();
            let (plan, places) = Plan::of_tensors(&headers, &tensors).unwrap();
            let mut blocks: Vec<Vec<u8>> = plan.blocks().iter().map(|&nbytes| vec![0xAA; nbytes]).collect();
            let mut written: Vec<Vec<bool>> = plan.blocks().iter().map(|&nbytes| vec![false; nbytes]).collect();
            for read in plan.reads() {
                let from = to_usize(read.position).unwrap();
                let to = read.at..read.at + read.nbytes;
                prop_assert!(written[read.block][to.clone()].iter().all(|&byte| !byte), "read twice\n{plan}");
                written[read.block][to.clone()].fill(true);
                blocks[read.block][to].copy_from_slice(&files[read.file][from..from + read.nbytes]);
            }
            let entry = |tensor: &TensorId| headers[tensor.file].entry(tensor.number).unwrap();
            for (tensor, place) in tensors.iter().zip(&places) {
                let from = to_usize(headers[tensor.file].data_start() + entry(tensor).begin).unwrap();
                let naive = &files[tensor.file][from..from + to_usize(entry(tensor).nbytes()).unwrap()];
                prop_assert_eq!(&blocks[place.block][place.at..place.at + place.nbytes], naive, "{}", plan);
            }
            for read in plan.reads() {
                let unit = if plan.reads().iter().any(|other| other.block == read.block && other.at < read.at) {
                    ALIGNMENT
                } else {
                    PAGE_NBYTES
                };
                prop_assert_eq!(read.position % to_u64(unit), to_u64(read.at % unit), "as in the file\n{}", plan);
            }
            let mut distinct = tensors.clone();
            distinct.sort_unstable();
            distinct.dedup();
            let needed: u64 = distinct.iter().map(|tensor| entry(tensor).nbytes()).sum();
            prop_assert_eq!(plan.nbytes(), needed, "only what is needed is read");
        }
    }

    #[test]
    fn small_neighbours_are_read_at_once_and_large_tensors_have_their_own_block() {
        let header = header(&[10, 20, 30, 3 << 20, 40]);
        let tensors: Vec<_> = (0..5).map(|number| TensorId { file: 0, number }).collect();
        let (plan, places) = Plan::of_tensors(&[&header], &tensors).unwrap();
        let start = header.data_start();
        assert_eq!(
            plan.reads()[0],
            Read {
                file: 0,
                position: start,
                nbytes: 60,
                block: 0,
                at: to_usize(start).unwrap()
            }
        );
        assert_eq!(plan.blocks()[places[3].block], places[3].at + (3 << 20));
        assert_eq!(plan.reads().len(), 3, "{plan}");
    }
}
