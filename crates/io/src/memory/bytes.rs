//! Memory as the source of a save: contiguous, transposed, sliced with steps, reversed or broadcast.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::{self, NonNull};

use super::footprint::{Dim, Footprint, folded, offset};

/// The elements of a tensor in memory that stays readable for `'a`, as a sequence of bytes in C order. Others may change
/// them.
///
/// Any thread of the program may write to a framework's memory, so this is not a `&[u8]`, and lends one only for the
/// duration of a call.
#[derive(Clone)]
pub struct Bytes<'a> {
    start: NonNull<u8>,
    /// Contiguous bytes: all of them, a row of elements, or one element.
    unit: usize,
    /// The loops over units, outermost first, folded as far as possible and without dimensions of one element. Empty if
    /// the bytes are contiguous.
    dims: Vec<Dim>,
    len: usize,
    /// The dimension along which units are neighbours, if it is not the last.
    along: Option<usize>,
    owner: PhantomData<&'a [u8]>,
}

/// Bytes of a cache line. Tiles are this wide in both directions, so that all bytes of a line are used at once.
const LINE: usize = 64;

impl<'a> Bytes<'a> {
    /// Create a source of `len` contiguous bytes at `start`. `None` if `start` is null, as for tensors whose memory was
    /// freed, unless `len` is 0, as for the empty arrays of some frameworks.
    ///
    /// # Safety
    /// As for [`Bytes::strided`], with elements of one byte.
    #[must_use]
    pub unsafe fn new(start: *const u8, len: usize) -> Option<Bytes<'a>> {
        // SAFETY: the contract is the same.
        unsafe { Bytes::strided(start, len, &[]) }
    }

    /// Elements of `itemsize` bytes, the first at `start`.
    ///
    /// `None` if the size overflows an address, or if `start` is null and there are elements.
    ///
    /// # Safety
    /// - If `start` is not null, every element to which `dims` lead from `start` is initialised memory of one region, which is
    ///   mapped for reading for all of `'a` and no larger than `isize::MAX`. A dimension with a count of 0 leads to no element.
    /// - They may change at any time. The file then gets some of the old bytes and some of the new.
    #[must_use]
    pub unsafe fn strided(start: *const u8, itemsize: usize, dims: &[Dim]) -> Option<Bytes<'a>> {
        let len = dims
            .iter()
            .try_fold(itemsize, |len, dim| len.checked_mul(dim.count))?;
        let start = match NonNull::new(start.cast_mut()) {
            None if len > 0 => return None,
            start => start.unwrap_or(NonNull::dangling()),
        };
        // Without elements, the dimensions may be of any size.
        let dims = if len == 0 { &[] } else { dims };
        let (dims, unit) = folded(dims.iter().copied(), itemsize);
        let along = dims
            .iter()
            .position(|dim| usize::try_from(dim.stride) == Ok(unit))
            .filter(|_| matches!(unit, 1 | 2 | 4 | 8));
        Some(Bytes {
            start,
            unit,
            dims,
            len,
            along,
            owner: PhantomData,
        })
    }

    /// The size in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Return whether the bytes are contiguous, so that they can be lent.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.dims.is_empty()
    }

    /// The memory that the elements take.
    #[must_use]
    pub fn footprint(&self) -> Footprint {
        let run = self.unit.min(self.len);
        Footprint::new(self.start.as_ptr().addr(), run, &self.dims)
    }

    /// Call `write` with the bytes of `range`. `write` passes them to the operating system and keeps no reference.
    ///
    /// # Errors
    /// The error of `write`; there are fewer bytes, or they are not contiguous, and `write` is not called.
    pub(crate) fn lend<E: From<io::Error>>(
        &self,
        range: Range<usize>,
        write: impl FnOnce(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Range { start: begin, end } = range;
        if begin > end || end > self.len || !self.is_contiguous() {
            return Err(ended(self.len, end).into());
        }
        // SAFETY: `add` requires an offset within the same allocation that does not pass `isize::MAX`:
        // `begin <= end <= self.len`, and `strided` was promised `self.len` readable bytes in one region: there are no
        // dimensions, so all of them are one element.
        let start = unsafe { self.start.add(begin) };
        // SAFETY: `from_raw_parts` requires
        // - a non-null pointer, aligned for u8: `NonNull`, and every address is aligned for bytes;
        // - `end - begin` initialised, readable bytes in one allocation, at most `isize::MAX`: `end <= self.len`, for
        //   which `strided` was promised all of this, for `'a`, which outlives this call because `self` has it;
        // - no write to them while the slice lives. This cannot be proven where Python code holds the same memory.
        //   The slice lives for one system call, through which no compiler sees the bytes, so that the consequence is
        //   the one in the contract of `strided`: a file with bytes from before and after the write. Tried: without the
        //   check above, `a_range_past_the_end_is_refused` fails.
        let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), end - begin) };
        write(bytes)
    }

    /// Fill `into` with the bytes from `begin` on.
    ///
    /// # Errors
    /// There are fewer.
    pub(crate) fn read(&self, begin: usize, into: &mut [u8]) -> io::Result<()> {
        if self.copy_into(begin, into) == into.len() {
            Ok(())
        } else {
            Err(ended(self.len, begin.saturating_add(into.len())))
        }
    }

    /// Copy the bytes from `begin` on into `into`, as many as both have, and return their number.
    pub fn copy_into(&self, begin: usize, into: &mut [u8]) -> usize {
        let begin = begin.min(self.len);
        let count = into.len().min(self.len - begin);
        let mut rest = &mut into[..count];
        if rest.is_empty() {
            return 0;
        }
        // A piece of a file may begin and end within a unit.
        let (mut number, past) = (begin / self.unit, begin % self.unit);
        if past != 0 {
            let (part, after) = rest.split_at_mut((self.unit - past).min(rest.len()));
            self.copy_part(number, past, part);
            number += 1;
            rest = after;
        }
        let (whole, part) = rest.split_at_mut(rest.len() / self.unit * self.unit);
        let last = number + whole.len() / self.unit;
        self.copy_units(number, whole);
        if !part.is_empty() {
            self.copy_part(last, 0, part);
        }
        count
    }

    /// Copy bytes of the unit `number` from `past` on; `into` ends within it.
    fn copy_part(&self, number: usize, past: usize, into: &mut [u8]) {
        let from = self.address(number).wrapping_add(past);
        // SAFETY: `copy`, for which both sides may overlap, requires
        // - `into.len()` readable bytes at `from`: unit `number` is one to which the dimensions lead, since the callers
        //   cut at `self.len`, and `past + into.len()` is at most `self.unit`; `strided` was promised that they are mapped;
        // - as many writable bytes at `into`, which is borrowed mutably;
        // - alignment: bytes have none.
        // Not provable: that no thread writes to the source meanwhile. The consequence is the one in the contract of
        // `strided`. Tried: without the `min` in `copy_into`, `a_range_past_the_end_is_refused` fails.
        unsafe { ptr::copy(from, into.as_mut_ptr(), into.len()) };
    }

    /// The address of unit `number`, counted in C order.
    fn address(&self, number: usize) -> *const u8 {
        let start = self.start.as_ptr().cast_const();
        start.wrapping_offset(offset(&self.dims, number))
    }

    /// Copy whole units from `number` on, as many as fit into `into`.
    fn copy_units(&self, mut number: usize, mut into: &mut [u8]) {
        let Some(last) = self.dims.last().copied() else {
            return into
                .chunks_exact_mut(self.unit)
                .for_each(|unit| self.copy_part(0, 0, unit));
        };
        let Some(along) = self.along else {
            return self.copy_rows(number, last, into);
        };
        let below: usize = self.dims[along + 1..].iter().map(|dim| dim.count).product();
        while !into.is_empty() {
            let (past, units) = (number % below, into.len() / self.unit);
            let rows = self.dims[along].count - number / below % self.dims[along].count;
            let rows = rows.min(units / below);
            if past != 0 || rows == 0 {
                let count = units.min(below - past);
                let (part, after) = into.split_at_mut(count * self.unit);
                self.copy_rows(number, last, part);
                (number, into) = (number + count, after);
            } else {
                let (block, after) = into.split_at_mut(rows * below * self.unit);
                self.copy_block(number, rows, below, last, block);
                (number, into) = (number + rows * below, after);
            }
        }
    }

    /// Copy units from `number` on, along the last dimension.
    fn copy_rows(&self, mut number: usize, last: Dim, mut into: &mut [u8]) {
        while !into.is_empty() {
            let count = (last.count - number % last.count).min(into.len() / self.unit);
            let (row, after) = into.split_at_mut(count * self.unit);
            let from = self.address(number);
            // SAFETY: `copy_units` requires units at `from` and `last.stride` bytes apart, as many as `row` has room for:
            // they are those from `number` on, no more than the last dimension has left; see `copy_part`.
            unsafe { copy_units(from, last.stride, self.unit, row) };
            (number, into) = (number + count, after);
        }
    }

    /// Copy `rows` steps along the dimension where units are neighbours, each with all `below` units below it.
    fn copy_block(&self, number: usize, rows: usize, below: usize, last: Dim, into: &mut [u8]) {
        for middle in 0..below / last.count {
            let first = middle * last.count;
            let from = self.address(number + first);
            let matrix = StridedMatrix {
                from,
                rows,
                columns: last.count,
                stride: last.stride,
                pitch: below * self.unit,
            };
            let into = &mut into[first * self.unit..];
            let copy = match self.unit {
                1 => transpose::<1, 64>,
                2 => transpose::<2, 32>,
                4 => transpose::<4, 16>,
                _ => transpose::<8, 8>,
            };
            // SAFETY: `transpose` requires `rows` units side by side at `from` and at each of the `columns` places that
            // are `stride` bytes apart: `along` is a dimension with just this stride that has `rows` steps left, and
            // the last dimension is walked from its start.
            unsafe { copy(&matrix, into) };
        }
    }
}

/// Copy units of `unit` bytes that are `stride` bytes apart.
///
/// # Safety
/// - There are as many readable units from `from` on as `into` has room for, and none of them overlaps `into`.
pub(crate) unsafe fn copy_units(from: *const u8, stride: isize, unit: usize, into: &mut [u8]) {
    let copy = match unit {
        1 => gather::<1>,
        2 => gather::<2>,
        4 => gather::<4>,
        8 => gather::<8>,
        _ => gather_long,
    };
    // SAFETY: `gather` requires what this function asks for.
    unsafe { copy(from, stride, unit, into) };
}

/// Copy units of `UNIT` bytes that are `stride` bytes apart.
///
/// # Safety
/// There are as many readable units as `into` has room for.
unsafe fn gather<const UNIT: usize>(from: *const u8, stride: isize, _: usize, into: &mut [u8]) {
    let mut from = from.cast::<[u8; UNIT]>();
    let (units, _) = into.as_chunks_mut::<UNIT>();
    for unit in units {
        // SAFETY: `read` requires a readable unit, which the contract promises; an array of bytes has no alignment.
        *unit = unsafe { from.read() };
        from = from.wrapping_byte_offset(stride);
    }
}

/// As [`gather`], for units of any size.
///
/// # Safety
/// As for [`gather`].
unsafe fn gather_long(from: *const u8, stride: isize, unit: usize, into: &mut [u8]) {
    let mut from = from;
    for into in into.chunks_exact_mut(unit) {
        // SAFETY: `copy_nonoverlapping` requires `unit` readable bytes, which the contract promises, and as many writable
        // ones, which are borrowed mutably.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), unit) };
        from = from.wrapping_offset(stride);
    }
}

/// A matrix whose columns are contiguous in memory.
struct StridedMatrix {
    from: *const u8,
    rows: usize,
    columns: usize,
    /// Bytes from one column to the next.
    stride: isize,
    /// Bytes from one row to the next in the copy.
    pitch: usize,
}

/// Copy `matrix` in tiles of `SIDE` times `SIDE` units, whose columns fill a cache line. Twice as fast as row by row
/// (8192 × 8192 F32, November 2026).
///
/// # Safety
/// There are `rows` readable units side by side at `from` and at each of the other `columns - 1` places.
unsafe fn transpose<const UNIT: usize, const SIDE: usize>(matrix: &StridedMatrix, into: &mut [u8]) {
    let column = |column: usize| {
        let offset = isize::try_from(column).unwrap_or(0).wrapping_mul(matrix.stride);
        matrix.from.wrapping_offset(offset)
    };
    for first in (0..matrix.columns).step_by(SIDE) {
        let wide = SIDE.min(matrix.columns - first);
        for top in (0..matrix.rows).step_by(SIDE) {
            let high = SIDE.min(matrix.rows - top);
            let mut tile = [[[0; UNIT]; SIDE]; SIDE];
            for number in 0..wide {
                let from = column(first + number).wrapping_add(top * UNIT);
                let line: [[u8; UNIT]; SIDE] = if high == SIDE {
                    // SAFETY: `read` requires `SIDE` units: `top + SIDE <= rows`, and the contract promises `rows`; an
                    // array of bytes has no alignment.
                    unsafe { from.cast::<[[u8; UNIT]; SIDE]>().read() }
                } else {
                    let mut line = [0; LINE];
                    // SAFETY: `copy_nonoverlapping` requires `high` readable units, `top + high <= rows`, and for as much
                    // room: `high < SIDE`, and `SIDE` units are a line.
                    unsafe { ptr::copy_nonoverlapping(from, line.as_mut_ptr(), high * UNIT) };
                    let (units, _) = line.as_chunks::<UNIT>();
                    std::array::from_fn(|unit| units[unit])
                };
                for (row, unit) in tile.iter_mut().zip(line) {
                    row[number] = unit;
                }
            }
            for (row, units) in tile.iter().take(high).enumerate() {
                let at = (top + row) * matrix.pitch + first * UNIT;
                into[at..at + wide * UNIT].copy_from_slice(units[..wide].as_flattened());
            }
        }
    }
}

/// The error if bytes up to `expected` were requested of a payload that has `nbytes`.
fn ended(nbytes: usize, expected: usize) -> io::Error {
    let message = format!("a tensor has {nbytes} bytes, expected {expected}");
    io::Error::new(io::ErrorKind::UnexpectedEof, message)
}

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(bytes: &'a [u8]) -> Bytes<'a> {
        Bytes {
            start: NonNull::from(bytes).cast(),
            unit: bytes.len(),
            dims: Vec::new(),
            len: bytes.len(),
            along: None,
            owner: PhantomData,
        }
    }
}

impl fmt::Debug for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({} bytes)", self.len)
    }
}

// SAFETY: a `Bytes` only reads. `strided` was promised that the memory is readable for `'a`, which holds from every thread,
// and that writers accept mixed bytes.
unsafe impl Send for Bytes<'_> {}
// SAFETY: as for `Send`; nothing in it changes.
unsafe impl Sync for Bytes<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const _: fn() = || {
        fn crosses_threads<T: Send + Sync>() {}
        crosses_threads::<Bytes<'_>>();
    };

    /// Places of the elements in C order, as bytes from the first.
    fn naive_places(dims: &[Dim]) -> Vec<isize> {
        dims.iter().fold(vec![0], |places, dim| {
            let steps = || (0..dim.count).map(|index| isize::try_from(index).unwrap() * dim.stride);
            places
                .iter()
                .flat_map(|place| steps().map(move |step| place + step))
                .collect()
        })
    }

    /// A view of dense memory: dimensions in any order, some reversed, some with steps, some broadcast.
    fn view() -> impl Strategy<Value = (usize, Vec<Dim>)> {
        let dim = (0..40usize, 1..4isize, 0..6u8);
        let order = Just(vec![0usize, 1, 2, 3]).prop_shuffle();
        (
            prop::sample::select(vec![1usize, 2, 3, 4, 8, 16]),
            prop::collection::vec(dim, 0..4),
            order,
        )
            .prop_map(|(itemsize, dims, order)| {
                let mut stride = isize::try_from(itemsize).unwrap();
                let mut made: Vec<Dim> = dims
                    .iter()
                    .map(|&(count, step, kind)| {
                        let step = if kind < 4 { 1 } else { step };
                        let dim = Dim {
                            count,
                            stride: stride * step,
                        };
                        stride *= isize::try_from(count.max(1)).unwrap() * step;
                        match kind {
                            2 => Dim {
                                stride: -dim.stride,
                                ..dim
                            },
                            3 => Dim { stride: 0, ..dim },
                            _ => dim,
                        }
                    })
                    .collect();
                let rank = made.len();
                made = order
                    .into_iter()
                    .filter(|&at| at < rank)
                    .map(|at| made[at])
                    .collect();
                (itemsize, made)
            })
    }

    proptest! {
        #[test]
        fn any_part_of_any_view_is_what_a_loop_copies((itemsize, dims) in view(), begin in 0..5000usize, len in 0..5000usize) {
            let places = naive_places(&dims);
            let lowest = places.iter().copied().min().unwrap_or(0);
            let extent = places.iter().map(|place| place - lowest).max().unwrap_or(0);
            let memory: Vec<u8> = (0..usize::try_from(extent).unwrap() + itemsize)
                .map(|n| u8::try_from(n * 7 % 251).unwrap())
                .collect();
            let naive: Vec<u8> = places
                .iter()
                .flat_map(|place| memory[usize::try_from(place - lowest).unwrap()..][..itemsize].to_vec())
                .collect();
            let start = memory.as_ptr().wrapping_offset(-lowest);
            // SAFETY: `strided` asks that all elements are readable: `memory` reaches from the lowest place to the end of
            // the highest.
            let strided = unsafe { Bytes::strided(start, itemsize, &dims) }.unwrap();
            prop_assert_eq!(strided.len(), naive.len());
            let begin = begin.min(naive.len());
            let end = (begin + len).min(naive.len());
            let mut found = vec![0; end - begin];
            prop_assert_eq!(strided.copy_into(begin, &mut found), end - begin);
            prop_assert!(found == naive[begin..end]);
        }
    }

    #[test]
    fn bytes_past_the_end_are_left_alone() {
        // SAFETY: two elements, 2 bytes apart, in three bytes.
        let strided =
            unsafe { Bytes::strided([1, 9, 2].as_ptr(), 1, &[Dim { count: 2, stride: 2 }]) }.unwrap();
        let mut into = [7; 4];
        strided.copy_into(1, &mut into);
        strided.copy_into(5, &mut into[1..]);
        assert_eq!(into, [2, 7, 7, 7]);
        assert!(strided.read(1, &mut into[..1]).is_ok());
        assert!(strided.read(1, &mut into[..2]).is_err() && strided.read(usize::MAX, &mut into).is_err());
        assert!(
            strided.lend(0..1, |_| Ok::<(), io::Error>(())).is_err(),
            "it is not contiguous"
        );
    }

    #[test]
    fn a_size_that_no_address_counts_is_refused() {
        let dims = [Dim {
            count: usize::MAX,
            stride: 0,
        }; 2];
        // SAFETY: all strides are 0, and the one element is readable.
        assert!(unsafe { Bytes::strided([1].as_ptr(), 1, &dims) }.is_none());
    }

    #[test]
    fn null_is_refused_unless_there_is_nothing() {
        let dims = |count| [Dim { count, stride: 2 }];
        // SAFETY: null is allowed.
        assert!(unsafe { Bytes::strided(ptr::null(), 1, &dims(2)) }.is_none());
        // SAFETY: as above.
        assert!(unsafe { Bytes::strided(ptr::null(), 1, &dims(0)) }.is_some_and(|none| none.len() == 0));
    }

    #[test]
    fn a_range_past_the_end_is_refused() {
        let bytes = [1, 2, 3];
        let payload = Bytes::from(&bytes[..2]);
        for range in [1..9, 7..9, 2..3] {
            let lent = payload.lend(range.clone(), |_| Err::<(), _>(io::Error::other("lent")));
            let refused = lent.unwrap_err().to_string();
            assert_eq!(refused, format!("a tensor has 2 bytes, expected {}", range.end));
        }
        assert!(
            payload
                .lend(1..2, |lent| if lent == [2] {
                    Ok(())
                } else {
                    Err(io::Error::other("others"))
                })
                .is_ok()
        );
        let mut into = [0; 4];
        assert!(payload.read(1, &mut into).is_err() && payload.read(8, &mut into).is_err());
        assert_eq!(payload.copy_into(1, &mut into), 1);
        assert_eq!(payload.copy_into(8, &mut into), 0);
        assert_eq!(into, [2, 0, 0, 0]);
    }

    #[test]
    fn null_is_an_empty_payload() {
        // SAFETY: `new` accepts null with a length of 0.
        let payload = unsafe { Bytes::new(std::ptr::null(), 0) }.unwrap();
        assert!(payload.len() == 0);
        assert!(
            payload
                .lend(0..0, |lent| if lent.is_empty() {
                    Ok(())
                } else {
                    Err(io::Error::other("some"))
                })
                .is_ok()
        );
        // SAFETY: `new` accepts null with any length.
        assert!(unsafe { Bytes::new(std::ptr::null(), 1) }.is_none());
    }

    // Here and not in tests/save.rs because only this file may turn a mapping into a payload. Tried: when the in-place
    // way writes without a second file, this fails.
    #[test]
    fn a_payload_may_lie_in_the_file_that_it_replaces() {
        use crate::save::{Pieces, save_pieces};
        use crate::{Payload, Replace, SaveOptions, Unwatched};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let old: Vec<u8> = (0..9_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
        for replace in [Replace::Atomic, Replace::InPlace] {
            std::fs::write(&path, &old).unwrap();
            let file = std::fs::File::open(&path).unwrap();
            // SAFETY: `map_copy_read_only` asks that no process shortens the file while the mapping is used. Only the save
            // below touches it, and writes more bytes than it had.
            let mapped = unsafe { memmap2::MmapOptions::new().map_copy_read_only(&file).unwrap() };
            // SAFETY: `new` requires `len` readable bytes: the mapping has them, until it is dropped after the save.
            let bytes = unsafe { Bytes::new(mapped.as_ptr(), mapped.len()) }.unwrap();
            let payload = Payload::Bytes(bytes);
            let options = SaveOptions {
                durable: false,
                replace,
                ..SaveOptions::default()
            };
            // The head moves all bytes on, so that writing straight into the file would overwrite unread ones.
            let head = vec![b'h'; 2_000_000];
            let (payloads, nbytes) = ([payload.clone(), payload], 2 * ingot_format::to_u64(old.len()));
            save_pieces(
                &path,
                Pieces::of_data(&head, nbytes, &payloads),
                &options,
                &Unwatched,
            )
            .unwrap();
            assert!(
                std::fs::read(&path).unwrap() == [&head[..], &old, &old].concat(),
                "{replace:?}"
            );
        }
    }
}
