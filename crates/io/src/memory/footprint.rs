//! The bytes of memory that a tensor covers, and whether two tensors overlap.

use std::ops::Range;

/// One dimension: the number of elements, and the distance from one to the next in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dim {
    /// Elements along it.
    pub count: usize,
    /// Bytes from one to the next; may be negative, or 0.
    pub stride: isize,
}

/// Fold dimensions, outermost first, into as few as possible, and leave out those with a single element. Return them with the
/// number of contiguous bytes: an element of `itemsize` bytes, or a row of them.
pub(super) fn folded(dims: impl DoubleEndedIterator<Item = Dim>, itemsize: usize) -> (Vec<Dim>, usize) {
    let mut unit = itemsize;
    // Innermost first.
    let mut folded: Vec<Dim> = Vec::new();
    for dim in dims.rev().filter(|dim| dim.count != 1) {
        let steps_over = |inner: &Dim| {
            let count = isize::try_from(inner.count);
            count.is_ok_and(|count| inner.stride.checked_mul(count) == Some(dim.stride))
        };
        match folded.last_mut() {
            None if usize::try_from(dim.stride) == Ok(unit) => unit *= dim.count,
            Some(inner) if steps_over(inner) => inner.count *= dim.count,
            _ => folded.push(dim),
        }
    }
    folded.reverse();
    (folded, unit)
}

/// Return the position of unit `number` in C order, in bytes from the first.
pub(super) fn offset(dims: &[Dim], number: usize) -> isize {
    let (mut left, mut offset) = (number, 0_isize);
    for dim in dims.iter().rev() {
        // Less than `count`, which is a number of places in memory, as the offset is.
        let index = isize::try_from(left % dim.count).unwrap_or(0);
        offset = offset.wrapping_add(index.wrapping_mul(dim.stride));
        left /= dim.count;
    }
    offset
}

/// The bytes of memory that a tensor takes: runs of equal length at regular distances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    start: usize,
    /// Length of a run.
    run: usize,
    /// Counts and strides. The largest stride first, so that neighbours in memory are found together; strides are positive.
    dims: Vec<(usize, usize)>,
}

/// The number of bytes of memory in one window. Each byte is a bit of a map, which takes 4 MiB.
const WINDOW: usize = 32 << 20;

impl Footprint {
    /// Runs of `run` bytes at the positions of `dims`, from address `start`.
    #[must_use]
    pub fn new(start: usize, run: usize, dims: &[Dim]) -> Footprint {
        let mut footprint = Footprint {
            start,
            run: if dims.iter().any(|dim| dim.count == 0) {
                0
            } else {
                run
            },
            dims: Vec::with_capacity(dims.len()),
        };
        // Elements at the same address count once, in any order.
        for dim in dims.iter().filter(|dim| dim.stride != 0 && dim.count > 1) {
            let stride = dim.stride.unsigned_abs();
            if dim.stride < 0 {
                footprint.start = footprint.start.wrapping_sub(stride.wrapping_mul(dim.count - 1));
            }
            footprint.dims.push((dim.count, stride));
        }
        footprint.dims.sort_unstable_by_key(|&(_, stride)| stride);
        // A dimension whose elements are adjacent makes longer runs.
        while let Some(&(count, stride)) = footprint.dims.first()
            && stride <= footprint.run
        {
            footprint.run = footprint.run.saturating_add(stride.saturating_mul(count - 1));
            footprint.dims.remove(0);
        }
        footprint.dims.reverse();
        footprint
    }

    /// Return whether it has no gaps.
    #[must_use]
    pub fn is_one_run(&self) -> bool {
        self.dims.is_empty()
    }

    /// Return the range from the first byte to the last.
    #[must_use]
    pub fn extent(&self) -> Range<usize> {
        self.start..self.start.saturating_add(self.span(0))
    }

    /// Bytes from the first to the last of one step along the dimensions from `depth` on.
    fn span(&self, depth: usize) -> usize {
        if self.run == 0 {
            return 0;
        }
        self.dims[depth..]
            .iter()
            .fold(self.run, |span, &(count, stride)| {
                span.saturating_add(stride.saturating_mul(count - 1))
            })
    }

    /// Call `found` with the runs that overlap `window`, clipped to it, until it returns true. Return whether it did.
    fn runs_in(&self, window: &Range<usize>, found: &mut dyn FnMut(Range<usize>) -> bool) -> bool {
        self.run > 0 && self.runs_from(0, self.start, window, found)
    }

    fn runs_from(
        &self,
        depth: usize,
        start: usize,
        window: &Range<usize>,
        found: &mut dyn FnMut(Range<usize>) -> bool,
    ) -> bool {
        let Some(&(count, stride)) = self.dims.get(depth) else {
            let run = start.max(window.start)..start.saturating_add(self.run).min(window.end);
            return !run.is_empty() && found(run);
        };
        // Only the steps that can reach the window.
        let span = self.span(depth + 1);
        let first = (window.start + 1)
            .saturating_sub(start.saturating_add(span))
            .div_ceil(stride);
        let end = window.end.saturating_sub(start).div_ceil(stride).min(count);
        (first..end).any(|step| self.runs_from(depth + 1, start + step * stride, window, found))
    }
}

/// Return two of these that have a byte in common, as positions in the list. Exact.
#[must_use]
pub fn overlapping(footprints: &[Footprint]) -> Option<(usize, usize)> {
    crowds(footprints)
        .iter()
        .find_map(|crowd| overlapping_in(footprints, crowd))
}

/// Return the groups whose extents overlap, since only their members can share bytes: sorted positions in the list, of
/// groups with at least two members.
#[must_use]
pub fn crowds(footprints: &[Footprint]) -> Vec<Vec<usize>> {
    let mut extents: Vec<(Range<usize>, usize)> = footprints
        .iter()
        .map(Footprint::extent)
        .zip(0..)
        .filter(|(extent, _)| !extent.is_empty())
        .collect();
    extents.sort_unstable_by_key(|(extent, number)| (extent.start, *number));
    let mut reach = 0;
    let crowds = extents.chunk_by(|(extent, _), (next, _)| {
        reach = reach.max(extent.end);
        next.start < reach
    });
    let sorted = |crowd: &[(Range<usize>, usize)]| {
        let mut numbers: Vec<usize> = crowd.iter().map(|(_, number)| *number).collect();
        numbers.sort_unstable();
        numbers
    };
    crowds.filter(|crowd| crowd.len() > 1).map(sorted).collect()
}

/// As [`overlapping`], for the footprints with these numbers: each marks its bytes on a map of the memory, window by
/// window.
fn overlapping_in(footprints: &[Footprint], numbers: &[usize]) -> Option<(usize, usize)> {
    let extents = || numbers.iter().map(|&number| footprints[number].extent());
    let end = extents().map(|extent| extent.end).max()?;
    let mut begin = extents().map(|extent| extent.start).min()?;
    let mut map = Map::new(WINDOW.min(end - begin));
    while begin < end {
        let window = begin..end.min(begin.saturating_add(WINDOW));
        map.clear();
        for (rank, &number) in numbers.iter().enumerate() {
            let mut shared = None;
            footprints[number].runs_in(&window, &mut |run| {
                shared = map.first_marked(run.start - begin..run.end - begin);
                shared.is_some()
            });
            if let Some(at) = shared {
                let byte = begin + at..begin + at + 1;
                let takes = |&&other: &&usize| footprints[other].runs_in(&byte, &mut |_| true);
                return numbers[..rank].iter().find(takes).map(|&other| (other, number));
            }
            footprints[number].runs_in(&window, &mut |run| {
                map.mark(run.start - begin..run.end - begin);
                false
            });
        }
        begin = window.end;
    }
    None
}

/// A bit for each byte.
struct Map(Vec<u64>);

impl Map {
    fn new(len: usize) -> Map {
        Map(vec![0; len.div_ceil(64)])
    }

    fn clear(&mut self) {
        self.0.fill(0);
    }

    /// Return the words of the map that `run` overlaps, each with its bits.
    fn words(run: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
        (run.start / 64..run.end.div_ceil(64)).map(move |word| {
            let begin = run.start.saturating_sub(word * 64).min(63);
            let end = (run.end - word * 64).min(64);
            (word, (u64::MAX << begin) & (u64::MAX >> (64 - end)))
        })
    }

    fn mark(&mut self, run: Range<usize>) {
        for (word, bits) in Map::words(run) {
            self.0[word] |= bits;
        }
    }

    fn first_marked(&self, run: Range<usize>) -> Option<usize> {
        Map::words(run).find_map(|(word, bits)| match self.0[word] & bits {
            0 => None,
            marked => Some(word * 64 + usize::try_from(marked.trailing_zeros()).unwrap_or(0)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn naive_bytes(start: usize, run: usize, dims: &[Dim]) -> HashSet<isize> {
        let start = isize::try_from(start).unwrap();
        let places = dims.iter().fold(vec![start], |places, dim| {
            let steps = || (0..dim.count).map(|index| isize::try_from(index).unwrap() * dim.stride);
            places
                .iter()
                .flat_map(|place| steps().map(move |step| place + step))
                .collect()
        });
        let run = isize::try_from(run).unwrap();
        places.into_iter().flat_map(|place| place..place + run).collect()
    }

    type Parts = (usize, usize, Vec<Dim>);

    fn parts() -> impl Strategy<Value = Parts> {
        let dim = (0..5usize, -40..40isize).prop_map(|(count, stride)| Dim { count, stride });
        (1000..1100usize, 0..9usize, prop::collection::vec(dim, 0..3))
    }

    proptest! {
        #[test]
        fn shares_a_byte_just_when_the_sets_of_bytes_do(all in prop::collection::vec(parts(), 0..4)) {
            let sets: Vec<_> = all.iter().map(|(start, run, dims)| naive_bytes(*start, *run, dims)).collect();
            let made: Vec<_> = all.iter().map(|(start, run, dims)| Footprint::new(*start, *run, dims)).collect();
            for (set, footprint) in sets.iter().zip(&made) {
                let extent = footprint.extent();
                prop_assert_eq!(extent.is_empty(), set.is_empty());
                if let (Some(&first), Some(&last)) = (set.iter().min(), set.iter().max()) {
                    prop_assert_eq!(extent, usize::try_from(first).unwrap()..usize::try_from(last).unwrap() + 1);
                }
            }
            let any = (0..sets.len()).any(|b| (0..b).any(|a| !sets[a].is_disjoint(&sets[b])));
            match overlapping(&made) {
                Some((a, b)) => prop_assert!(a < b && !sets[a].is_disjoint(&sets[b])),
                None => prop_assert!(!any),
            }
        }
    }

    #[test]
    fn parts_of_rows_that_lie_between_each_other_share_nothing() {
        const ROW: usize = 3 << 20;
        let rows = |start: usize, run: usize| {
            let dims = [Dim {
                count: 40,
                stride: isize::try_from(ROW).unwrap(),
            }];
            Footprint::new(4096 + start, run, &dims)
        };
        let third = ROW / 3;
        assert_eq!(
            overlapping(&[rows(0, third), rows(third, third), rows(2 * third, third)]),
            None
        );
        // In the last window of several.
        let last = Footprint::new(4096 + 39 * ROW + third - 1, 1, &[]);
        assert_eq!(
            overlapping(&[rows(third, third), rows(0, third), last]),
            Some((1, 2))
        );
    }
}
