//! Memory of others that a tensor is read into, in whatever order its elements lie there.
//!
//! One of the files in which `unsafe` is allowed, because the memory belongs to a framework.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use super::dest::Dest;
use super::footprint::{Dim, Footprint, folded, offset};

/// The elements of a tensor in memory that stays writable for `'a`, or some of them that follow each other.
///
/// They are counted in bytes and in C order, whatever their order in memory is.
pub struct StridedDest<'a> {
    start: NonNull<u8>,
    /// Outermost first; `None` where all elements lie together, as in nearly all of many tensors.
    dims: Option<Arc<[Dim]>>,
    /// Bytes that lie together.
    block: usize,
    begin: usize,
    end: usize,
    owner: PhantomData<&'a mut [u8]>,
}

impl<'a> StridedDest<'a> {
    /// Elements of `itemsize` bytes from `start` on. `strides` are in bytes. `None` where `start` is null, unless there are
    /// no elements; and where two elements share memory, or may: each dimension has to lie between the places of another, as in any slice, transposition or view.
    ///
    /// # Safety
    /// - When the shape has elements and `start` is not null, each of them is initialised memory, mapped for reading and writing for all of
    ///   `'a`, of one allocation that is no larger than `isize::MAX`.
    /// - Nobody else writes to them for `'a`. Whoever reads them meanwhile gets some of the old bytes and some of the
    ///   new.
    #[must_use]
    pub unsafe fn new(
        start: *mut u8,
        itemsize: usize,
        shape: &[usize],
        strides: &[isize],
    ) -> Option<StridedDest<'a>> {
        let nbytes = shape
            .iter()
            .try_fold(itemsize, |product, &count| product.checked_mul(count))?;
        let Some(start) = NonNull::new(start).filter(|_| nbytes > 0) else {
            return (nbytes == 0).then(|| StridedDest::of(NonNull::dangling(), Vec::new(), 0, 0));
        };
        let dims = shape.iter().zip(strides);
        let (dims, block) = folded(dims.map(|(&count, &stride)| Dim { count, stride }), itemsize);
        if !lie_apart(&dims, block) {
            return None;
        }
        Some(StridedDest::of(start, dims, block, nbytes))
    }

    /// `nbytes` bytes that lie together. `None` if `start` is null and there are some.
    ///
    /// # Safety
    /// As for [`StridedDest::new`].
    #[must_use]
    pub unsafe fn together(start: *mut u8, nbytes: usize) -> Option<StridedDest<'a>> {
        let start = NonNull::new(start).filter(|_| nbytes > 0);
        (start.is_some() || nbytes == 0)
            .then(|| StridedDest::of(start.unwrap_or(NonNull::dangling()), Vec::new(), nbytes, nbytes))
    }

    /// The same over all of `memory`, of which none is left over but what the strides step over.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn over(
        memory: &'a mut [u8],
        itemsize: usize,
        shape: &[usize],
        strides: &[isize],
    ) -> Option<StridedDest<'a>> {
        let reach = shape
            .iter()
            .zip(strides)
            .map(|(&count, &stride)| count.saturating_sub(1) * usize::try_from(stride).unwrap_or(usize::MAX));
        assert!(
            reach.sum::<usize>() + itemsize <= memory.len(),
            "they have to lie in it"
        );
        // SAFETY: `new` asks for elements in one allocation that nobody else writes to: the line above has found that they
        // lie in `memory`, which is borrowed mutably.
        unsafe { StridedDest::new(memory.as_mut_ptr(), itemsize, shape, strides) }
    }

    fn of(start: NonNull<u8>, dims: Vec<Dim>, block: usize, nbytes: usize) -> StridedDest<'a> {
        StridedDest {
            start,
            dims: (!dims.is_empty()).then(|| dims.into()),
            block,
            begin: 0,
            end: nbytes,
            owner: PhantomData,
        }
    }

    /// The size in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.end - self.begin
    }

    /// Whether there is nothing to fill.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `at` bytes, or all where there are no more, and the rest.
    #[must_use]
    pub fn split_at(self, at: usize) -> (StridedDest<'a>, StridedDest<'a>) {
        let middle = self.begin + at.min(self.len());
        let rest = StridedDest {
            dims: self.dims.clone(),
            begin: middle,
            ..self
        };
        (StridedDest { end: middle, ..self }, rest)
    }

    /// The memory as one piece, where it is one.
    ///
    /// # Errors
    /// Gives the elements back where they do not lie together.
    pub fn into_dest(self) -> Result<Dest<'a>, StridedDest<'a>> {
        if self.dims.is_some() || self.is_empty() {
            return Err(self);
        }
        let start = self.start.as_ptr().wrapping_add(self.begin);
        // SAFETY: `Dest::new` asks for bytes of one region that are writable for `'a`, and that nobody else writes to:
        // `new` was promised both of the elements, which lie together, because no dimension is left.
        unsafe { Dest::new(start, self.len()) }.ok_or(self)
    }

    /// Writes `bytes` to the elements, as many as there are.
    pub fn fill(&mut self, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(self.len())];
        let last = self.dims().last().copied().unwrap_or(Dim { count: 1, stride: 0 });
        let mut at = self.begin;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (number, inside) = (at / self.block, at % self.block);
            let mut place = self
                .start
                .as_ptr()
                .wrapping_offset(offset(self.dims(), number))
                .wrapping_add(inside);
            // To the end of the innermost dimension, or of its first block where a part of that is filled already.
            let blocks = if inside == 0 {
                last.count - number % last.count
            } else {
                1
            };
            let (row, later) = rest.split_at(rest.len().min(blocks * self.block - inside));
            for now in row.chunks(self.block) {
                // SAFETY: `copy_nonoverlapping` asks for
                // - `now.len()` readable bytes: `now` is a slice;
                // - as many writable bytes at `place`: it lies `inside` a block, and `now` ends where the block does, or
                //   before. Each block is a number of elements, for which `new` was promised this;
                // - no overlap: `now` is borrowed, and `new` was promised that nobody else writes to the elements. Two
                //   parts of one tensor never share any: `split_at` parts them, and `lie_apart` their memory.
                unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), place, now.len()) };
                place = place.wrapping_offset(last.stride);
            }
            at += row.len();
            rest = later;
        }
    }

    /// Which bytes of memory the elements take, of one that has not been split.
    pub(crate) fn footprint(&self) -> Footprint {
        Footprint::new(self.start.addr().get(), self.block.min(self.len()), self.dims())
    }

    fn dims(&self) -> &[Dim] {
        self.dims.as_deref().unwrap_or_default()
    }
}

/// Whether no two blocks share memory, as far as strides can tell: ordered by stride, each dimension steps over all
/// that lies inside it.
fn lie_apart(dims: &[Dim], block: usize) -> bool {
    let mut inside = block;
    let mut by_stride: Vec<&Dim> = dims.iter().collect();
    by_stride.sort_by_key(|dim| dim.stride.unsigned_abs());
    by_stride.into_iter().all(|dim| {
        let step = dim.stride.unsigned_abs();
        let reaches = step
            .checked_mul(dim.count - 1)
            .and_then(|reach| reach.checked_add(inside));
        let is_apart = step >= inside;
        inside = reaches.unwrap_or(usize::MAX);
        is_apart && reaches.is_some()
    })
}

impl fmt::Debug for StridedDest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StridedDest({} bytes in blocks of {})", self.len(), self.block)
    }
}

// SAFETY: a `StridedDest` is the only way to write to its memory, as a `&mut [u8]` is, and the memory is writable from every
// thread: `new` was promised both.
unsafe impl Send for StridedDest<'_> {}
// SAFETY: a shared `StridedDest` gives nothing but its length.
unsafe impl Sync for StridedDest<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::overlapping;
    use proptest::prelude::*;

    const _: fn() = || {
        fn crosses_threads<T: Send + Sync>() {}
        crosses_threads::<StridedDest<'_>>();
    };

    /// A shape, and how its dimensions are ordered, stretched and turned round in memory.
    fn layouts() -> impl Strategy<Value = (Vec<usize>, Vec<isize>, usize)> {
        let dims = prop::collection::vec((1_usize..5, 1_usize..3, any::<bool>()), 0..4);
        (dims, any::<prop::sample::Index>(), 1_usize..5).prop_map(|(dims, turn, itemsize)| {
            let mut order: Vec<usize> = (0..dims.len()).collect();
            if !order.is_empty() {
                let turn = turn.index(order.len());
                order.rotate_left(turn);
            }
            let mut strides = vec![0; dims.len()];
            let mut step = itemsize;
            for axis in order {
                let (count, stretch, is_turned) = dims[axis];
                let stride = isize::try_from(step * stretch).unwrap();
                strides[axis] = if is_turned { -stride } else { stride };
                step *= stretch * count;
            }
            (dims.iter().map(|dim| dim.0).collect(), strides, itemsize)
        })
    }

    /// The obvious way: one element after another.
    fn naive_fill(
        memory: &mut [u8],
        origin: usize,
        itemsize: usize,
        shape: &[usize],
        strides: &[isize],
        bytes: &[u8],
    ) {
        let count: usize = shape.iter().product();
        for number in 0..count {
            let (mut left, mut at) = (number, isize::try_from(origin).unwrap());
            for (&dim, &stride) in shape.iter().zip(strides).rev() {
                at += isize::try_from(left % dim).unwrap() * stride;
                left /= dim;
            }
            let at = usize::try_from(at).unwrap();
            memory[at..at + itemsize].copy_from_slice(&bytes[number * itemsize..(number + 1) * itemsize]);
        }
    }

    proptest! {
        #[test]
        fn parts_of_any_layout_are_filled_as_element_by_element(
            (shape, strides, itemsize) in layouts(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        ) {
            let reach = |wanted: fn(isize) -> bool| -> usize {
                shape.iter().zip(&strides).filter(|pair| wanted(*pair.1)).map(|(count, stride)| (count - 1) * stride.unsigned_abs()).sum()
            };
            let origin = reach(|stride| stride < 0);
            let size = origin + reach(|stride| stride > 0) + itemsize;
            let nbytes = itemsize * shape.iter().product::<usize>();
            let bytes: Vec<u8> = (0..nbytes).map(|at| u8::try_from(at % 255 + 1).unwrap()).collect();
            let (mut memory, mut naive) = (vec![0; size], vec![0; size]);
            naive_fill(&mut naive, origin, itemsize, &shape, &strides, &bytes);
            let start = memory.as_mut_ptr().wrapping_add(origin);
            // SAFETY: `new` asks for elements in one allocation that nobody else writes to: `size` was made for them.
            let whole = unsafe { StridedDest::new(start, itemsize, &shape, &strides) }.unwrap();
            prop_assert_eq!(whole.len(), nbytes);
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(nbytes + 1)).collect();
            ends.sort_unstable();
            let (mut rest, mut at) = (whole, 0);
            for end in ends {
                let (mut part, after) = rest.split_at(end - at);
                part.fill(&bytes[at..end]);
                (rest, at) = (after, end);
            }
            match rest.into_dest() {
                Ok(mut dest) => dest.fill(|dest| dest.copy_from_slice(&bytes[at..])),
                Err(mut rest) => rest.fill(&bytes[at..]),
            }
            prop_assert_eq!(memory, naive);
        }
    }

    #[test]
    fn elements_that_share_memory_are_refused() {
        let mut memory = [0_u8; 64];
        let start = memory.as_mut_ptr();
        for (shape, strides) in [
            (&[2, 3][..], &[0, 4][..]),
            (&[3, 3], &[4, 4]),
            (&[4], &[2]),
            (&[2, 2], &[6, 4]),
        ] {
            // SAFETY: the elements lie in `memory`, which nobody else uses.
            let refused = unsafe { StridedDest::new(start, 4, shape, strides) }.is_none();
            assert!(refused, "{shape:?} {strides:?}");
        }
    }

    #[test]
    fn tensors_that_share_memory_are_found_and_columns_of_one_matrix_do_not() {
        let mut memory = [0_u8; 64];
        let mut place = |at: usize, shape: &[usize], strides: &[isize]| {
            let start = memory.as_mut_ptr().wrapping_add(at);
            // SAFETY: the elements lie in `memory`, which nobody else uses and nobody fills.
            unsafe { StridedDest::new(start, 1, shape, strides) }.unwrap()
        };
        let left = place(0, &[8, 4], &[8, 1]);
        let right = place(4, &[8, 4], &[8, 1]);
        let row = place(8, &[8], &[1]);
        let empty = place(0, &[0], &[1]);
        let overlap = |tensors: &[&StridedDest<'_>]| {
            let footprints: Vec<Footprint> = tensors.iter().map(|tensor| tensor.footprint()).collect();
            overlapping(&footprints)
        };
        assert_eq!(overlap(&[&left, &empty, &right]), None);
        assert_eq!(overlap(&[&right, &left, &row]).map(|pair| pair.1), Some(2));
        assert_eq!(overlap(&[&row, &row]), Some((0, 1)));
    }

    #[test]
    fn a_shape_without_elements_needs_no_memory() {
        // SAFETY: there are no elements.
        let empty = unsafe { StridedDest::new(std::ptr::null_mut(), 4, &[2, 0], &[4, 4]) }.unwrap();
        assert!(empty.is_empty());
        // SAFETY: null is allowed.
        assert!(unsafe { StridedDest::new(std::ptr::null_mut(), 4, &[2, 1], &[4, 4]) }.is_none());
        // SAFETY: there are no elements.
        assert!(unsafe { StridedDest::together(std::ptr::null_mut(), 0) }.is_some());
        // SAFETY: null is allowed.
        assert!(unsafe { StridedDest::together(std::ptr::null_mut(), 4) }.is_none());
    }
}
