//! A destination of reads in memory: contiguous or strided.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use super::footprint::{Dim, Footprint, folded, offset};
use crate::pages::populate;

/// The elements of a tensor in memory that stays writable for `'a`, or a contiguous part of them. Positions are counted
/// in bytes in C order, even if the memory has another order. Only the owner of the `Dest` writes to it.
///
/// The memory may belong to a framework, and any thread of the program may read it during a write. So a `Dest` is not a
/// `&mut [u8]`, and lends one only for the duration of a call.
pub struct Dest<'a> {
    /// The first byte. In strided memory, the first element of the whole tensor.
    start: NonNull<u8>,
    len: usize,
    /// Whether the system has not yet allocated pages for the memory. Strided memory belongs to the caller, so its
    /// pages exist.
    is_untouched: bool,
    /// `None` if the bytes are contiguous. Boxed to keep `Dest` small, since nearly all destinations are contiguous.
    strided: Option<Box<StridedPart>>,
    owner: PhantomData<&'a mut [u8]>,
}

/// The positions of a destination's bytes in strided memory.
#[derive(Clone)]
struct StridedPart {
    /// The loops over the blocks, outermost first.
    dims: Arc<[Dim]>,
    /// The size of a block of contiguous bytes.
    block: usize,
    /// The first byte of the destination, counted in C order from the first byte of the tensor.
    begin: usize,
}

impl<'a> Dest<'a> {
    /// Create a destination of `len` contiguous bytes at `start`. `None` if `start` is null and `len` is not 0.
    ///
    /// # Safety
    /// As for [`Dest::strided`], for all bytes.
    #[must_use]
    pub unsafe fn new(start: *mut u8, len: usize) -> Option<Dest<'a>> {
        let start = NonNull::new(start);
        (start.is_some() || len == 0).then(|| Dest::contiguous(start.unwrap_or(NonNull::dangling()), len))
    }

    /// Create a destination of elements of `itemsize` bytes, the first at `start`. `strides` are in bytes. `None` if
    /// `start` is null and there are elements, or if the strides do not prove that elements do not overlap: each
    /// dimension must fit into one step of the next larger one, as in slices, transpositions and views.
    ///
    /// # Safety
    /// - If the shape has elements and `start` is not null, all of them are initialised memory, mapped for reading and
    ///   writing during `'a`, in one allocation that is no larger than `isize::MAX`.
    /// - No other code writes to them during `'a`. Concurrent readers see a mixture of old and new bytes.
    #[must_use]
    pub unsafe fn strided(
        start: *mut u8,
        itemsize: usize,
        shape: &[usize],
        strides: &[isize],
    ) -> Option<Dest<'a>> {
        let len = shape
            .iter()
            .try_fold(itemsize, |product, &count| product.checked_mul(count))?;
        let Some(start) = NonNull::new(start).filter(|_| len > 0) else {
            return (len == 0).then(|| Dest::contiguous(NonNull::dangling(), 0));
        };
        let dims = shape.iter().zip(strides);
        let (dims, block) = folded(dims.map(|(&count, &stride)| Dim { count, stride }), itemsize);
        let strides = StridedPart {
            dims: dims.into(),
            block,
            begin: 0,
        };
        are_apart(&strides.dims, block).then(|| Dest {
            strided: (!strides.dims.is_empty()).then(|| Box::new(strides)),
            ..Dest::contiguous(start, len)
        })
    }

    fn contiguous(start: NonNull<u8>, len: usize) -> Dest<'a> {
        Dest {
            start,
            len,
            is_untouched: false,
            strided: None,
            owner: PhantomData,
        }
    }

    /// Create a destination of elements in `memory`, which must contain all of them.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn over(
        memory: &'a mut [u8],
        itemsize: usize,
        shape: &[usize],
        strides: &[isize],
    ) -> Option<Dest<'a>> {
        let reach = shape
            .iter()
            .zip(strides)
            .map(|(&count, &stride)| count.saturating_sub(1) * usize::try_from(stride).unwrap_or(usize::MAX));
        assert!(
            reach.sum::<usize>() + itemsize <= memory.len(),
            "the elements must be in the memory"
        );
        // SAFETY: `strided` requires elements in one allocation that no other code writes to: the line above has
        // checked that they are in `memory`, which is borrowed mutably.
        unsafe { Dest::strided(memory.as_mut_ptr(), itemsize, shape, strides) }
    }

    /// Create a destination in fresh memory, which is faster to fill if its pages are requested at once.
    pub(crate) fn untouched(bytes: &'a mut [u8]) -> Dest<'a> {
        Dest {
            is_untouched: true,
            ..Dest::from(bytes)
        }
    }

    /// Return the size in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Return whether the bytes are contiguous in memory.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.strided.is_none()
    }

    /// Return the address of the first byte of contiguous memory.
    pub(crate) fn addr(&self) -> usize {
        self.start.addr().get()
    }

    /// Split after `at` bytes, or at the end if there are fewer.
    pub(crate) fn split_at(self, at: usize) -> (Dest<'a>, Dest<'a>) {
        let at = at.min(self.len);
        let is_untouched = self.is_untouched;
        let part = |start, len, strided| Dest {
            start,
            len,
            is_untouched,
            strided,
            owner: PhantomData,
        };
        if let Some(first) = self.strided {
            let mut rest = first.clone();
            rest.begin += at;
            return (
                part(self.start, at, Some(first)),
                part(self.start, self.len - at, Some(rest)),
            );
        }
        // SAFETY: `add` requires an offset within the same allocation that does not exceed `isize::MAX`: `at` is at
        // most `self.len`, and the caller of the constructor guarantees `self.len` contiguous bytes in one allocation.
        // Without the `min` above, `a_dest_is_cut_where_it_ends` fails.
        let middle = unsafe { self.start.add(at) };
        (part(self.start, at, None), part(middle, self.len - at, None))
    }

    /// Request pages for the memory from the system if it is fresh.
    pub(crate) fn populate(&mut self) {
        if self.is_untouched {
            // SAFETY: requires `len` bytes from `start` on that are writable, zero, and not used by other code. The
            // caller of the constructor guarantees the first and the last of these, and `is_untouched` means that no
            // code has written to them since the system mapped them.
            unsafe { populate(self.start.as_ptr(), self.len) };
            self.is_untouched = false;
        }
    }

    /// Call `write` with the contiguous bytes to fill. `write` passes them to the operating system or copies into them,
    /// and keeps no reference.
    ///
    /// # Panics
    /// The memory is strided.
    pub(crate) fn fill<R>(&mut self, write: impl FnOnce(&mut [u8]) -> R) -> R {
        write(self.lent())
    }

    /// Call `write` with the bytes of all destinations, in order, to fill them as in [`Dest::fill`].
    pub(crate) fn fill_all<R>(dests: &mut [Dest<'_>], write: impl FnOnce(Vec<&mut [u8]>) -> R) -> R {
        write(dests.iter_mut().map(Dest::lent).collect())
    }

    fn lent(&mut self) -> &mut [u8] {
        assert!(self.is_contiguous(), "callers copy into strided memory");
        self.is_untouched = false;
        // SAFETY: `from_raw_parts_mut` requires
        // - a non-null pointer, aligned for u8: `NonNull`, and every address is aligned for bytes;
        // - `self.len` initialised bytes, readable and writable, in one allocation, at most `isize::MAX`: the caller of
        // the constructor guarantees all of this for `'a`, which outlives the slice because `self` has it, and the
        // bytes are contiguous;
        // - no other access to them while the slice lives. The caller of the constructor guarantees that no other code
        // writes, `self` is borrowed mutably, and no two destinations share a byte (`split_at`). If Python code holds
        // the same memory, another thread may read it during the write; the contract of the constructor states the
        // consequence.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Write the first bytes of `bytes` to all elements.
    pub(crate) fn copy_from(&mut self, bytes: &[u8]) {
        let mut rest = &bytes[..bytes.len().min(self.len)];
        let Some(StridedPart { dims, block, begin }) = self.strided.as_deref() else {
            return self.fill(|dest| dest[..rest.len()].copy_from_slice(rest));
        };
        let last = dims[dims.len() - 1];
        let mut at = *begin;
        while !rest.is_empty() {
            let (number, inside) = (at / block, at % block);
            let mut place = self
                .start
                .as_ptr()
                .wrapping_offset(offset(dims, number))
                .wrapping_add(inside);
            // To the end of the innermost dimension, or to the end of the current block if a part of it has been
            // filled.
            let blocks = if inside == 0 {
                last.count - number % last.count
            } else {
                1
            };
            let (row, later) = rest.split_at(rest.len().min(blocks * block - inside));
            for now in row.chunks(*block) {
                // SAFETY: `copy_nonoverlapping` requires
                // - `now.len()` readable bytes: `now` is a slice;
                // - as many writable bytes at `place`: `place` is `inside` a block, and `now` does not extend past the
                // block. Each block is a number of elements, for which the caller of `strided` guarantees this;
                // - no overlap: `now` is borrowed, and the caller of `strided` guarantees that no other code writes to
                // the elements. Two parts of one tensor never overlap: `split_at` divides the bytes, and `are_apart`
                // has checked that blocks do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), place, now.len()) };
                place = place.wrapping_offset(last.stride);
            }
            at += row.len();
            rest = later;
        }
    }

    /// Return the memory of the elements. The destination must not have been split.
    pub(crate) fn footprint(&self) -> Footprint {
        let (dims, run) = match self.strided.as_deref() {
            Some(part) => (&*part.dims, part.block),
            None => (&[][..], self.len),
        };
        Footprint::new(self.addr(), run, dims)
    }
}

/// Return whether the strides prove that blocks do not overlap: in order of stride, each dimension steps over the whole
/// extent of the smaller dimensions.
fn are_apart(dims: &[Dim], block: usize) -> bool {
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

impl<'a> From<&'a mut [u8]> for Dest<'a> {
    fn from(bytes: &'a mut [u8]) -> Dest<'a> {
        let len = bytes.len();
        Dest::contiguous(NonNull::from(bytes).cast(), len)
    }
}

impl fmt::Debug for Dest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dest({} bytes)", self.len)
    }
}

// SAFETY: a `Dest` is the only way to write to its memory, as a `&mut [u8]` is, and the memory is writable from every
// thread: the caller of the constructor guarantees both.
unsafe impl Send for Dest<'_> {}
// SAFETY: a shared `Dest` gives access to numbers only, not to the memory.
unsafe impl Sync for Dest<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::overlapping;
    use proptest::prelude::*;

    const _: fn() = || {
        fn crosses_threads<T: Send + Sync>() {}
        crosses_threads::<Dest<'_>>();
    };

    #[test]
    fn a_dest_is_cut_where_it_ends() {
        let mut bytes = [0; 4];
        let (mut first, rest) = Dest::from(&mut bytes[..3]).split_at(2);
        let (mut second, mut nothing) = rest.split_at(9);
        assert_eq!((first.len(), second.len(), nothing.len()), (2, 1, 0));
        first.fill(|part| part.fill(1));
        second.fill(|part| part.fill(2));
        nothing.fill(|part| assert!(part.is_empty()));
        assert_eq!(bytes, [1, 1, 2, 0]);
    }

    #[test]
    fn null_is_an_empty_dest() {
        // SAFETY: `new` accepts null with a length of 0.
        let mut dest = unsafe { Dest::new(std::ptr::null_mut(), 0) }.unwrap();
        assert!(dest.len() == 0);
        dest.fill(|bytes| assert!(bytes.is_empty()));
        // SAFETY: `new` accepts null with any other length, and returns `None`.
        assert!(unsafe { Dest::new(std::ptr::null_mut(), 1) }.is_none());
    }

    /// A shape, and how its dimensions are ordered, stretched and reversed in memory.
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

    /// The naive way: one element after another.
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
            // SAFETY: `strided` requires elements in one allocation that no other code writes to: `size` is the size of
            // all elements.
            let whole = unsafe { Dest::strided(start, itemsize, &shape, &strides) }.unwrap();
            prop_assert_eq!(whole.len(), nbytes);
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(nbytes + 1)).collect();
            ends.sort_unstable();
            let (mut rest, mut at) = (whole, 0);
            for end in ends {
                let (mut part, after) = rest.split_at(end - at);
                part.copy_from(&bytes[at..end]);
                (rest, at) = (after, end);
            }
            rest.copy_from(&bytes[at..]);
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
            // SAFETY: the elements are in `memory`, which no other code uses.
            let refused = unsafe { Dest::strided(start, 4, shape, strides) }.is_none();
            assert!(refused, "{shape:?} {strides:?}");
        }
    }

    #[test]
    fn tensors_that_share_memory_are_found_and_columns_of_one_matrix_do_not() {
        let mut memory = [0_u8; 64];
        let mut place = |at: usize, shape: &[usize], strides: &[isize]| {
            let start = memory.as_mut_ptr().wrapping_add(at);
            // SAFETY: the elements are in `memory`, which no other code uses or fills.
            unsafe { Dest::strided(start, 1, shape, strides) }.unwrap()
        };
        let left = place(0, &[8, 4], &[8, 1]);
        let right = place(4, &[8, 4], &[8, 1]);
        let row = place(8, &[8], &[1]);
        let empty = place(0, &[0], &[1]);
        let overlap = |tensors: &[&Dest<'_>]| {
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
        let empty = unsafe { Dest::strided(std::ptr::null_mut(), 4, &[2, 0], &[4, 4]) }.unwrap();
        assert!(empty.len() == 0);
        // SAFETY: null is allowed.
        assert!(unsafe { Dest::strided(std::ptr::null_mut(), 4, &[2, 1], &[4, 4]) }.is_none());
    }
}
