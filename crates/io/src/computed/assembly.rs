//! Tensors that are put together from boxes of other tensors.
//!
//! A [`Piece`] copies a box of elements. Along each dimension of the new tensor it has a position, a count and a step, and the
//! distance in the input between one element and the next. Stacks, slices, permutations of dimensions and interleaved
//! groups are all pieces of this form.

use std::ops::Range;

use ingot_format::{Dtype, StopFlag, saturating_usize, to_u64};

use super::source::Make;
use crate::checkpoint::Checkpoint;
use crate::convert::{convert, converts};
use crate::error::{Error, Failure};
use crate::file::{Tensor, TensorId};

/// Bytes that are read together before they are scattered to their places: few enough to stay in the cache of a core.
const SCRATCH_NBYTES: usize = 512 << 10;

/// Runs of at least this size are read one by one, directly into their places.
const LONG_RUN_NBYTES: usize = 16 << 10;

/// Runs that are at most this far apart are read together, with the gaps.
const CLOSE_NBYTES: u64 = 4 << 10;

/// A box of elements of an input tensor, and its place in the new tensor. All numbers count elements.
#[derive(Debug)]
pub struct Piece {
    /// The input tensor.
    pub input: TensorId,
    /// The first element in the input.
    pub input_begin: u64,
    /// The box along each dimension of the new tensor.
    pub sides: Vec<Side>,
    /// The dtypes that the elements are converted to, one after the other.
    pub casts: Vec<Dtype>,
}

/// The extent of a [`Piece`] along one dimension of the new tensor.
#[derive(Clone, Copy, Debug)]
pub struct Side {
    /// The position of the first element.
    pub begin: u64,
    /// The number of elements.
    pub count: u64,
    /// The distance from one element to the next in the new tensor.
    pub step: u64,
    /// The distance from one element to the next in the input.
    pub stride: u64,
}

/// One loop over elements: their number, and the distances in the new tensor and in the input.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Axis {
    count: u64,
    dest: u64,
    input: u64,
}

/// A piece in numbers. Elements of less than a byte are counted in bytes.
#[derive(Debug)]
struct Loops {
    input: TensorId,
    input_begin: u64,
    dest_begin: u64,
    /// The outermost first: their distances in the new tensor descend.
    axes: Vec<Axis>,
    /// The dtype in the input, and then the dtypes of the conversions.
    dtypes: Vec<Dtype>,
    /// Bytes of an element in the input.
    width: usize,
}

/// A tensor that is put together from pieces.
#[derive(Debug)]
pub(super) struct Assembly {
    /// In the order of their first elements.
    pieces: Vec<Loops>,
    /// For each piece, the end of the elements of all pieces up to it.
    ends: Vec<u64>,
    /// Bytes of an element of the new tensor.
    width: usize,
}

impl Assembly {
    /// Return the tensor of this dtype and shape. Each element must be in one of the `pieces`.
    ///
    /// # Errors
    /// [`Failure::Pieces`] if the pieces do not fit the tensor or the inputs; [`Failure::Conversion`].
    pub(super) fn new(
        inputs: &Checkpoint,
        dtype: Dtype,
        shape: &[u64],
        pieces: &[Piece],
    ) -> Result<Assembly, Error> {
        let strides = strides(shape);
        let mut loops = Vec::with_capacity(pieces.len());
        let mut total = 0_u64;
        for piece in pieces {
            total = total.saturating_add(piece.numel());
            if piece.numel() > 0 {
                let input = inputs.tensor(piece.input)?;
                loops.push(Loops::new(&input, piece, dtype, shape, &strides)?);
            }
        }
        let expected = shape.iter().copied().fold(1, u64::saturating_mul);
        if total != expected {
            return Err(Failure::Pieces(format!("expected {expected} elements, found {total}")).into());
        }
        loops.sort_by_key(|piece| piece.dest_begin);
        let ends = loops.iter().scan(0, |end, piece| {
            *end = piece.dest_end().max(*end);
            Some(*end)
        });
        Ok(Assembly {
            ends: ends.collect(),
            pieces: loops,
            width: width(dtype).0,
        })
    }
}

/// Return the bytes of an element. For elements of less than a byte, positions count bytes: return 1, and the bits of
/// an element.
fn width(dtype: Dtype) -> (usize, Option<u64>) {
    let bits = dtype.bits();
    if bits.is_multiple_of(8) {
        (saturating_usize(bits / 8), None)
    } else {
        (1, Some(bits))
    }
}

/// Return the distance between neighbours along each dimension of a contiguous tensor.
fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1_u64; shape.len()];
    for dim in (1..shape.len()).rev() {
        // A proven shape: the product fits.
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim].max(1));
    }
    strides
}

impl Piece {
    fn numel(&self) -> u64 {
        let counts = self.sides.iter().map(|side| side.count);
        counts.fold(1, u64::saturating_mul)
    }
}

impl Loops {
    fn new(
        input: &Tensor<'_>,
        piece: &Piece,
        dtype: Dtype,
        shape: &[u64],
        strides: &[u64],
    ) -> Result<Loops, Error> {
        let (path, name) = (input.archive().path(), input.entry().name);
        let stored = input.entry().dtype;
        let mut dtypes = vec![stored];
        for &next in &piece.casts {
            let last = dtypes[dtypes.len() - 1];
            if !converts(last, next) {
                let failure = Failure::Conversion {
                    stored: last,
                    wanted: next,
                };
                return Err(failure.about(path, Some(name)));
            }
            dtypes.push(next);
        }
        let misfit = |reason: &str| Failure::Pieces(reason.to_owned()).about(path, Some(name));
        if dtypes[dtypes.len() - 1] != dtype || piece.sides.len() != shape.len() {
            return Err(misfit("a piece has another dtype or number of dimensions"));
        }
        let (mut last, mut dest_begin, mut axes) = (piece.input_begin, 0_u64, Vec::new());
        for ((side, &size), &stride) in piece.sides.iter().zip(shape).zip(strides) {
            let end = (side.count - 1)
                .checked_mul(side.step)
                .and_then(|reach| reach.checked_add(side.begin));
            let is_repeated = side.count > 1 && (side.step == 0 || side.stride == 0);
            if is_repeated || end.is_none_or(|end| end >= size) {
                return Err(misfit("a piece exceeds the tensor"));
            }
            last = last.saturating_add((side.count - 1).saturating_mul(side.stride));
            dest_begin += side.begin * stride;
            axes.push(Axis {
                count: side.count,
                dest: side.step * stride,
                input: side.stride,
            });
        }
        let numel: u64 = input.entry().shape.iter().product();
        if last >= numel {
            return Err(misfit("a piece exceeds its input"));
        }
        let loops = Loops {
            input: piece.input,
            input_begin: piece.input_begin,
            dest_begin,
            axes: merged(axes),
            dtypes,
            width: width(stored).0,
        };
        match width(stored).1 {
            None => Ok(loops),
            Some(bits) => loops.in_bytes(bits).ok_or_else(|| {
                misfit(&format!(
                    "elements of {stored} share bytes, and are moved only with their byte"
                ))
            }),
        }
    }

    /// Return the same piece of elements of `bits` bits, counted in bytes. `None` if an element would be split.
    fn in_bytes(mut self, bits: u64) -> Option<Loops> {
        let bytes = |elements: u64| {
            let found = elements.checked_mul(bits)?;
            found.is_multiple_of(8).then_some(found / 8)
        };
        let run = match self.axes.last() {
            Some(axis) if (axis.dest, axis.input) == (1, 1) => self.axes.pop()?.count,
            _ => 1,
        };
        for axis in &mut self.axes {
            (axis.dest, axis.input) = (bytes(axis.dest)?, bytes(axis.input)?);
        }
        self.axes.push(Axis {
            count: bytes(run)?,
            dest: 1,
            input: 1,
        });
        (self.dest_begin, self.input_begin) = (bytes(self.dest_begin)?, bytes(self.input_begin)?);
        (self.dtypes.len() == 1).then_some(self)
    }

    /// Return the position after its last element in the new tensor.
    fn dest_end(&self) -> u64 {
        self.dest_begin + reach(&self.axes, |axis| axis.dest)
    }
}

/// Remove the axes of one element, and merge neighbours that are one axis in both tensors.
fn merged(axes: Vec<Axis>) -> Vec<Axis> {
    let mut found: Vec<Axis> = Vec::with_capacity(axes.len());
    for axis in axes.into_iter().filter(|axis| axis.count != 1) {
        match found.last_mut() {
            Some(outer)
                if outer.dest == axis.count.saturating_mul(axis.dest)
                    && outer.input == axis.count.saturating_mul(axis.input) =>
            {
                *outer = Axis {
                    count: outer.count * axis.count,
                    ..axis
                };
            }
            _ => found.push(axis),
        }
    }
    found
}

/// Return the number of elements from the first one of a box to the last, in one of the tensors.
fn reach(axes: &[Axis], distance: impl Fn(&Axis) -> u64) -> u64 {
    1 + axes
        .iter()
        .map(|axis| (axis.count - 1) * distance(axis))
        .sum::<u64>()
}

impl Make for Assembly {
    fn unit_nbytes(&self) -> usize {
        self.width
    }

    fn fill(
        &self,
        inputs: &Checkpoint,
        begin: u64,
        dest: &mut [u8],
        stop: StopFlag<'_>,
    ) -> Result<(), Error> {
        let width = to_u64(self.width);
        let (begin, end) = (begin / width, (begin + to_u64(dest.len())) / width);
        let mut copy = Copy {
            inputs,
            dest,
            begin,
            dest_width: self.width,
            stop,
            scratch: Scratch::default(),
        };
        let first = self.ends.partition_point(|&reached| reached <= begin);
        for piece in &self.pieces[first..] {
            if piece.dest_begin >= end {
                break;
            }
            copy.clip(
                piece,
                &piece.axes,
                piece.dest_begin,
                piece.input_begin,
                begin..end,
            )?;
        }
        Ok(())
    }
}

/// Memory that one call reuses.
#[derive(Default)]
struct Scratch {
    read: Vec<u8>,
    packed: Vec<u8>,
    converted: Vec<u8>,
}

/// The destination of one call: elements of the new tensor from `begin` on.
struct Copy<'c> {
    inputs: &'c Checkpoint,
    dest: &'c mut [u8],
    begin: u64,
    dest_width: usize,
    stop: StopFlag<'c>,
    scratch: Scratch,
}

impl Copy<'_> {
    /// Copy the elements of the box `axes` that are in `range` of the new tensor.
    fn clip(
        &mut self,
        piece: &Loops,
        axes: &[Axis],
        dest_at: u64,
        input_at: u64,
        range: Range<u64>,
    ) -> Result<(), Error> {
        let end = dest_at + reach(axes, |axis| axis.dest);
        if end <= range.start || dest_at >= range.end {
            return Ok(());
        }
        let Some((&outer, inner)) = axes
            .split_first()
            .filter(|_| dest_at < range.start || end > range.end)
        else {
            return self.copy_box(piece, axes, dest_at, input_at);
        };
        let inner_reach = reach(inner, |axis| axis.dest);
        // Steps `first..last` of the outer axis touch the range, and steps `inside..after` are wholly in it.
        let first = match range.start.checked_sub(dest_at + inner_reach) {
            Some(before) => before / outer.dest + 1,
            None => 0,
        };
        let inside = range.start.saturating_sub(dest_at).div_ceil(outer.dest);
        let after = match range.end.checked_sub(dest_at + inner_reach) {
            Some(room) => (room / outer.dest + 1).min(outer.count),
            None => 0,
        };
        let last = (range.end - dest_at).div_ceil(outer.dest).min(outer.count);
        let place = |step: u64| (dest_at + step * outer.dest, input_at + step * outer.input);
        let mut step = first;
        while step < last {
            let (dest, input) = place(step);
            if (inside..after).contains(&step) {
                let mut whole = axes.to_vec();
                whole[0].count = after - step;
                self.copy_box(piece, &merged(whole), dest, input)?;
                step = after;
            } else {
                self.clip(piece, inner, dest, input, range.clone())?;
                step += 1;
            }
        }
        Ok(())
    }

    /// Copy a box that is wholly in the destination.
    fn copy_box(&mut self, piece: &Loops, axes: &[Axis], dest_at: u64, input_at: u64) -> Result<(), Error> {
        let input = self.inputs.tensor(piece.input)?;
        let mut ordered = axes.to_vec();
        ordered.sort_by_key(|axis| std::cmp::Reverse(axis.input));
        self.take(&input, piece, &ordered, dest_at - self.begin, input_at)
    }

    /// Read a box, whose axes are in the order of the input, and put its elements into their places.
    fn take(
        &mut self,
        input: &Tensor<'_>,
        piece: &Loops,
        axes: &[Axis],
        dest_at: u64,
        input_at: u64,
    ) -> Result<(), Error> {
        if self.stop.is_set() {
            return Err(Failure::Interrupted.into());
        }
        let width = to_u64(piece.width);
        let is_run = axes.iter().all(|axis| (axis.dest, axis.input) == (1, 1));
        if is_run && axes.len() <= 1 && piece.dtypes.len() == 1 {
            let count = reach(axes, |axis| axis.dest);
            let at = saturating_usize(dest_at * width);
            let dest = &mut self.dest[at..at + saturating_usize(count * width)];
            return input.read_at(input_at * width, dest, self.stop);
        }
        let Some((&outer, inner)) = axes.split_first() else {
            return self.scatter(input, piece, axes, dest_at, input_at);
        };
        let span = reach(inner, |axis| axis.input);
        let most = most_together(piece, &outer, inner, span);
        if most >= outer.count {
            return self.scatter(input, piece, axes, dest_at, input_at);
        }
        let mut step = 0;
        while step < outer.count {
            let count = most.clamp(1, outer.count - step);
            let (dest, input_at) = (dest_at + step * outer.dest, input_at + step * outer.input);
            if count == 1 {
                self.take(input, piece, inner, dest, input_at)?;
            } else {
                let mut some = axes.to_vec();
                some[0].count = count;
                self.scatter(input, piece, &some, dest, input_at)?;
            }
            step += count;
        }
        Ok(())
    }

    /// Read the span of a box, convert its elements, and put them into their places.
    fn scatter(
        &mut self,
        input: &Tensor<'_>,
        piece: &Loops,
        axes: &[Axis],
        dest_at: u64,
        input_at: u64,
    ) -> Result<(), Error> {
        let width = to_u64(piece.width);
        let Scratch {
            read,
            packed,
            converted,
        } = &mut self.scratch;
        let span = saturating_usize(reach(axes, |axis| axis.input) * width);
        let read = sized(read, span);
        input.read_at(input_at * width, read, self.stop)?;
        let dest = &mut self.dest[saturating_usize(dest_at) * self.dest_width..];
        if piece.dtypes.len() == 1 {
            copy(axes, read, dest, piece.width);
            return Ok(());
        }
        let counts: Vec<u64> = axes.iter().map(|axis| axis.count).collect();
        let compact = strides(&counts);
        let to_packed: Vec<Axis> = axes
            .iter()
            .zip(&compact)
            .map(|(axis, &dest)| Axis { dest, ..*axis })
            .collect();
        let from_packed: Vec<Axis> = axes
            .iter()
            .zip(&compact)
            .map(|(axis, &input)| Axis { input, ..*axis })
            .collect();
        let count = saturating_usize(counts.iter().product());
        copy(&to_packed, read, sized(packed, count * piece.width), piece.width);
        for pair in piece.dtypes.windows(2) {
            let (from, to) = (pair[0], pair[1]);
            let source = count * width_of(from);
            convert(
                from,
                to,
                &packed[..source],
                sized(converted, count * width_of(to)),
            );
            std::mem::swap(packed, converted);
        }
        copy(&from_packed, packed, dest, self.dest_width);
        Ok(())
    }
}

/// Return how many steps of the axis `outer` are read together, each of `span` elements. 1 or less if each is read by itself.
fn most_together(piece: &Loops, outer: &Axis, inner: &[Axis], span: u64) -> u64 {
    let width = to_u64(piece.width);
    let widest = piece
        .dtypes
        .iter()
        .map(|&dtype| width_of(dtype))
        .max()
        .unwrap_or(1);
    let room = to_u64(SCRATCH_NBYTES / widest.max(1));
    let gap = outer.input.saturating_sub(span).saturating_mul(width);
    let is_long = piece.dtypes.len() == 1
        && matches!(inner, [only] if (only.dest, only.input) == (1, 1) && only.count * width >= to_u64(LONG_RUN_NBYTES));
    let elements = inner.iter().map(|axis| axis.count).fold(1, u64::saturating_mul);
    let is_dense = elements >= span / 2 || span.saturating_mul(width) <= CLOSE_NBYTES;
    let is_close = gap <= CLOSE_NBYTES && (gap <= CLOSE_NBYTES / 4 || gap <= span.saturating_mul(width));
    if is_long || !is_dense || !is_close || span > room {
        return 1;
    }
    (room - span) / outer.input.max(1) + 1
}

/// Return the bytes of an element.
fn width_of(dtype: Dtype) -> usize {
    width(dtype).0
}

/// Return `nbytes` bytes of `buffer`, which grows if needed.
fn sized(buffer: &mut Vec<u8>, nbytes: usize) -> &mut [u8] {
    if buffer.len() < nbytes {
        buffer.resize(nbytes, 0);
    }
    &mut buffer[..nbytes]
}

/// Copy the elements of a box, of `width` bytes each.
fn copy(axes: &[Axis], from: &[u8], to: &mut [u8], width: usize) {
    match axes {
        [] => to[..width].copy_from_slice(&from[..width]),
        [
            Axis {
                count,
                dest: 1,
                input: 1,
            },
        ] => {
            let nbytes = saturating_usize(*count) * width;
            to[..nbytes].copy_from_slice(&from[..nbytes]);
        }
        [only] => match width {
            1 => copy_each::<1>(only, from, to),
            2 => copy_each::<2>(only, from, to),
            4 => copy_each::<4>(only, from, to),
            _ => copy_each::<8>(only, from, to),
        },
        [outer, inner @ ..] => {
            for step in 0..saturating_usize(outer.count) {
                let (at, place) = (saturating_usize(outer.input), saturating_usize(outer.dest));
                copy(
                    inner,
                    &from[step * at * width..],
                    &mut to[step * place * width..],
                    width,
                );
            }
        }
    }
}

/// Copy elements of `N` bytes along one axis.
fn copy_each<const N: usize>(axis: &Axis, from: &[u8], to: &mut [u8]) {
    let (from, _) = from.as_chunks::<N>();
    let (to, _) = to.as_chunks_mut::<N>();
    let from = from.iter().step_by(saturating_usize(axis.input.max(1)));
    let to = to.iter_mut().step_by(saturating_usize(axis.dest.max(1)));
    for (from, to) in from.zip(to).take(saturating_usize(axis.count)) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ingot_format::{Format, Spec, layout};
    use proptest::prelude::*;

    use super::*;
    use crate::computed::{Assembled, remapped};
    use crate::file::{Archive, MemorySource, read_exactly};
    use crate::options::OpenOptions;

    /// The input has this many elements, whose values are their positions.
    const INPUT: u64 = 1 << 15;

    fn input(dtype: Dtype) -> Arc<Checkpoint> {
        let shape = [INPUT];
        let spec = Spec {
            name: "x",
            dtype,
            shape: &shape,
        };
        let mut file = layout(&[spec], None, Format::Safetensors).unwrap().head;
        let values = (0..u16::try_from(INPUT).unwrap()).map(|n| match dtype {
            Dtype::BF16 => u16::try_from(f32::from(n).to_bits() >> 16).unwrap().to_le_bytes(),
            _ => n.to_le_bytes(),
        });
        file.extend(values.flatten());
        let archive = Archive::from_source(MemorySource::new(file), &OpenOptions::default()).unwrap();
        Arc::new(archive.into())
    }

    /// A tensor of two pieces along dimension `dim`, each a box of the input with dimensions in another order.
    #[derive(Clone, Debug)]
    struct Case {
        shape: Vec<u64>,
        dim: usize,
        order: Vec<usize>,
        padding: u64,
        is_interleaved: bool,
    }

    fn cases() -> impl Strategy<Value = Case> {
        let shapes = prop::collection::vec(1..9_u64, 1..4);
        shapes.prop_flat_map(|shape| {
            let dims: Vec<usize> = (0..shape.len()).collect();
            let order = Just(dims).prop_shuffle();
            (
                Just(shape.clone()),
                0..shape.len(),
                order,
                0..3_u64,
                any::<bool>(),
            )
                .prop_map(|(mut shape, dim, order, padding, is_interleaved)| {
                    shape[dim] *= 2;
                    Case {
                        shape,
                        dim,
                        order,
                        padding,
                        is_interleaved,
                    }
                })
        })
    }

    impl Case {
        fn pieces(&self, inputs: &Checkpoint, casts: &[Dtype]) -> Vec<Piece> {
            let mut strides = vec![0; self.shape.len()];
            let mut numel = 1;
            for &dim in &self.order {
                strides[dim] = numel;
                numel *= self.shape[dim] + self.padding;
            }
            let piece = |number: u64| {
                let sides = self
                    .shape
                    .iter()
                    .zip(&strides)
                    .enumerate()
                    .map(|(dim, (&size, &stride))| {
                        let half = size / 2;
                        let (begin, count, step) = match (dim == self.dim, self.is_interleaved) {
                            (false, _) => (0, size, 1),
                            (true, false) => (number * half, half, 1),
                            (true, true) => (number, half, 2),
                        };
                        Side {
                            begin,
                            count,
                            step,
                            stride,
                        }
                    });
                Piece {
                    input: inputs.id("x").unwrap(),
                    input_begin: number * numel,
                    sides: sides.collect(),
                    casts: casts.to_vec(),
                }
            };
            vec![piece(0), piece(1)]
        }

        /// Return the position in the input of each element.
        fn naive(&self, pieces: &[Piece]) -> Vec<u64> {
            let strides = strides(&self.shape);
            let numel: u64 = self.shape.iter().product();
            let mut found = vec![0; saturating_usize(numel)];
            for piece in pieces {
                for number in 0..piece.numel() {
                    let (mut rest, mut at, mut from) = (number, 0, piece.input_begin);
                    for (side, stride) in piece.sides.iter().zip(&strides) {
                        let step = rest % side.count;
                        rest /= side.count;
                        at += (side.begin + step * side.step) * stride;
                        from += step * side.stride;
                    }
                    found[saturating_usize(at)] = from;
                }
            }
            found
        }
    }

    proptest! {
        #[test]
        fn any_range_of_an_assembled_tensor_equals_a_naive_copy(
            case in cases(), from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>(), is_cast in any::<bool>(),
        ) {
            let dtypes: &[Dtype] = if is_cast { &[Dtype::BF16, Dtype::F64, Dtype::F32] } else { &[Dtype::U16] };
            let inputs = input(dtypes[0]);
            let pieces = case.pieces(&inputs, &dtypes[1..]);
            let expected: Vec<u8> = case.naive(&pieces).into_iter().flat_map(|value| {
                let value = u16::try_from(value).unwrap();
                // BF16 has 8 bits of precision: the rest is cut off.
                let rounded = f32::from_bits(f32::from(value).to_bits() & 0xFFFF_0000);
                if is_cast { rounded.to_le_bytes().to_vec() } else { value.to_le_bytes().to_vec() }
            }).collect();
            let dtype = dtypes[dtypes.len() - 1];
            let made = Assembled { name: "y".to_owned(), dtype, shape: case.shape.clone(), pieces };
            let made = remapped(inputs, vec![made], &[]).unwrap();
            let tensor = made.find("y").unwrap();
            let (from, to) = (from.index(expected.len()), to.index(expected.len() + 1));
            for range in [0..expected.len(), from.min(to)..from.max(to)] {
                let mut found = vec![0; range.len()];
                let begin = tensor.start() + to_u64(range.start);
                read_exactly(tensor.archive().source(), begin, &mut found, StopFlag::never()).unwrap();
                prop_assert_eq!(&found, &expected[range]);
            }
        }
    }

    fn refused(pieces: impl FnOnce(&Checkpoint) -> Vec<Piece>) -> &'static str {
        let inputs = input(Dtype::U16);
        let pieces = pieces(&inputs);
        let made = Assembled {
            name: "y".to_owned(),
            dtype: Dtype::U16,
            shape: vec![4],
            pieces,
        };
        remapped(inputs, vec![made], &[]).unwrap_err().code()
    }

    fn run(inputs: &Checkpoint, input_begin: u64, begin: u64, count: u64, step: u64, stride: u64) -> Piece {
        Piece {
            input: inputs.id("x").unwrap(),
            input_begin,
            sides: vec![Side {
                begin,
                count,
                step,
                stride,
            }],
            casts: Vec::new(),
        }
    }

    #[test]
    fn pieces_that_do_not_fit_are_refused() {
        for (begin, at, count, step, stride) in [
            (0, 0, 3, 1, 1),
            (0, 1, 4, 1, 1),
            (INPUT - 3, 0, 4, 1, 1),
            (0, 0, 4, 0, 1),
            (0, 0, 4, 1, 0),
            (0, 0, 4, 1, u64::MAX),
        ] {
            let code = refused(|inputs| vec![run(inputs, begin, at, count, step, stride)]);
            assert_eq!(code, "invalid-pieces");
        }
        let cast = refused(|inputs| {
            let casts = vec![Dtype::F32];
            vec![Piece {
                casts,
                ..run(inputs, 0, 0, 4, 1, 1)
            }]
        });
        assert_eq!(cast, "no-conversion");
    }

    #[test]
    fn wide_boxes_are_read_in_several_parts() {
        let inputs = input(Dtype::U16);
        // A stack of transposed matrices of 128 × 128, which exceeds the scratch memory.
        let shape = vec![40, 128, 128];
        let pieces = (0..40).map(|number| Piece {
            input: inputs.id("x").unwrap(),
            input_begin: number,
            sides: vec![
                Side {
                    begin: number,
                    count: 1,
                    step: 1,
                    stride: 0,
                },
                Side {
                    begin: 0,
                    count: 128,
                    step: 1,
                    stride: 1,
                },
                Side {
                    begin: 0,
                    count: 128,
                    step: 1,
                    stride: 128,
                },
            ],
            casts: vec![],
        });
        let case = Case {
            shape: shape.clone(),
            dim: 0,
            order: vec![],
            padding: 0,
            is_interleaved: false,
        };
        let pieces: Vec<_> = pieces.collect();
        let expected: Vec<u8> = case
            .naive(&pieces)
            .into_iter()
            .flat_map(|value| u16::try_from(value).unwrap().to_le_bytes())
            .collect();
        let made = Assembled {
            name: "y".to_owned(),
            dtype: Dtype::U16,
            shape,
            pieces,
        };
        let made = remapped(inputs, vec![made], &[]).unwrap();
        assert!(made.file(0).unwrap().read("y").unwrap().to_vec() == expected);
    }
}
