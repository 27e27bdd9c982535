"""Which elements of a tensor a rank holds: placements of DTensor as intervals along each dimension.

A rank's part is the product of a list of intervals for each dimension. An offset and a shape do not describe
it, since a strided shard has several intervals along one dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from itertools import product as combinations
from math import prod
from typing import Any, NamedTuple

from ingot._base.blocks import blocks

# The first position, and the one after the last.
Interval = tuple[int, int]
# A list of intervals for each dimension.
Intervals = tuple[tuple[Interval, ...], ...]
Box = tuple[slice, ...]


class Part(NamedTuple):
    """The part of a tensor that a rank holds."""

    #: The shape of the whole tensor.
    shape: tuple[int, ...]
    intervals: Intervals

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Part:
        """Return the whole of a tensor with this shape."""
        return cls(tuple(shape), tuple(((0, size),) if size else () for size in shape))

    @classmethod
    def nothing(cls, shape: Sequence[int]) -> Part:
        """Return an empty part of the tensor."""
        # A tensor without dimensions has one element, so a dimension of length 0 is added to make the part
        # empty.
        return cls(tuple(shape), tuple(() for _ in shape) or ((),))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part in the rank's own memory."""
        return tuple(map(_length, self.intervals))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.local_shape)

    def is_whole(self) -> bool:
        """Return whether the part is the whole tensor."""
        return self.local_shape == self.shape

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Yield the boxes of the part: each in the tensor, and in the rank's own memory."""
        along = [[*_placed(intervals)] for intervals in self.intervals]
        for sides in combinations(*along):
            yield tuple(side[0] for side in sides), tuple(side[1] for side in sides)

    def run(self) -> int:
        """Return the length in elements of the shortest contiguous run in the part."""
        if not self.numel:
            return 0
        length = 1
        for size, intervals in zip(reversed(self.shape), reversed(self.intervals), strict=True):
            length *= min(end - begin for begin, end in intervals)
            if intervals != ((0, size),):
                break
        return length


def _length(intervals: Sequence[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def _placed(intervals: Sequence[Interval]) -> Iterator[tuple[slice, slice]]:
    """Yield each interval and its position in the rank's own memory."""
    at = 0
    for begin, end in intervals:
        yield slice(begin, end), slice(at, at + end - begin)
        at += end - begin


def pieces(box: Box, limit: int) -> Iterator[Box]:
    """Yield blocks of a box in C order, each of at most `limit` elements."""
    for block in blocks([side.stop - side.start for side in box], limit):
        yield tuple(slice(of.start + at.start, of.start + at.stop) for of, at in zip(box, block, strict=True))


def moved(box: Box, origin: Box, inner: Box) -> Box:
    """Return the box `inner`, which is inside `origin`, after `origin` has been moved to `box`."""
    return tuple(
        slice(to.start + side.start, to.start + side.stop)
        for to, side in zip(box, within(origin, inner), strict=True)
    )


def within(origin: Box, inner: Box) -> Box:
    """Return the box `inner`, which is inside `origin`, relative to the start of `origin`."""
    pairs = zip(origin, inner, strict=True)
    return tuple(slice(side.start - of.start, side.stop - of.start) for of, side in pairs)


def in_elements(box: Box) -> Box:
    """Convert a box in bytes of two elements each, such as of F4, to elements."""
    return (*box[:-1], slice(2 * box[-1].start, 2 * box[-1].stop)) if box else box


def product(shape: tuple[int, ...], boxes: Sequence[tuple[Box, Box]]) -> tuple[Part, Box] | None:
    """Merge several boxes. Return the resulting part, and the box of local memory that contains it.

    Each item of `boxes` is a box of the tensor and the box of local memory with the same elements. Returns
    None if the boxes differ in several dimensions, overlap, or are not consecutive in memory.
    """
    ordered = sorted(boxes, key=lambda pair: [side.start for side in pair[0]])
    (box, place), last = ordered[0], ordered[-1][1]
    across = [dim for dim in range(len(box)) if any(other[dim] != box[dim] for other, _ in ordered)]
    if len(across) > 1:
        return None
    intervals: list[tuple[Interval, ...]] = [((side.start, side.stop),) for side in box]
    memory = [*place]
    for dim in across:
        sides = [(other[dim], at[dim]) for other, at in ordered]
        if any(
            after.start < before.stop or behind.start != ahead.stop
            for (before, ahead), (after, behind) in pairwise(sides)
        ):
            return None
        intervals[dim] = joined((side.start, side.stop) for side, _ in sides)
        memory[dim] = slice(place[dim].start, last[dim].stop)
    if any(at[dim] != side for _, at in ordered for dim, side in enumerate(place) if dim not in across):
        return None
    return Part(shape, tuple(intervals)), tuple(memory)


# The dimension along which a tensor is joined from parts that ranks slice one by one, and their sizes.
Joined = tuple[int, tuple[int, ...]]


def part(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
    joined: Joined | None = None,
) -> Part:
    """Return the part of a tensor that the rank at `coordinate` of a mesh holds.

    `placements` are the placements of a DTensor, one for each dimension of the mesh, outermost first. Each
    divides the result of the previous ones. The parts of a `joined` tensor are divided one by one.

    Raises
    ------
    ValueError
        A placement is unknown, or is `Partial`, whose local values are not values of the tensor; or a part of
        a joined tensor cannot be divided evenly.
    """
    cuts = (_step(placement, len(shape)) for placement in placements)
    facts = zip(cuts, mesh_shape, coordinate, strict=True)
    steps = tuple((step, size, place) for step, size, place in facts if step is not None)
    return _cut(tuple(shape), steps, joined)


def _step(placement: Any, rank: int) -> tuple[int, int | None] | None:
    """Return the dimension that a placement divides and its split factor, or None for a replica."""
    split = getattr(placement, "split_factor", None)
    if split is not None or placement.is_shard():
        dim = placement.dim if placement.dim >= 0 else placement.dim + rank
        if not 0 <= dim < rank:
            raise ValueError(f"{placement} for a tensor of {rank} dimensions")
        return dim, split
    if placement.is_replicate():
        return None
    raise ValueError(f"the placement {placement!r} has no values that could be stored")


@lru_cache(maxsize=4096)
def _cut(
    shape: tuple[int, ...],
    steps: tuple[tuple[tuple[int, int | None], int, int], ...],
    joined_from: Joined | None,
) -> Part:
    """Return the part, cached because a model has many tensors but few shapes and placements."""
    whole = Part.whole(shape)
    intervals = [*whole.intervals]
    sizes = () if joined_from is None else joined_from[1]
    for (dim, split), count, place in steps:
        if joined_from is not None and dim == joined_from[0]:
            _check_divisible(dim, split, sizes, count)
            chunks = [*zip(accumulate(sizes, initial=0), sizes, strict=False)]
            sizes = tuple(size // count for size in sizes)
        else:
            chunks = [*_chunks(_length(intervals[dim]), split or 1)]
        cut = ((first, _chunk(size, count, place)) for first, size in chunks)
        stretches = [(first + begin, first + end) for first, (begin, end) in cut]
        before = intervals[dim]
        intervals[dim] = joined(piece for stretch in stretches for piece in _taken(before, *stretch))
    return Part(shape, tuple(intervals))


def _check_divisible(dim: int, split: int | None, sizes: tuple[int, ...], count: int) -> None:
    """Raise `ValueError` unless `count` ranks have slices of one size of each part."""
    if split is not None:
        raise ValueError(f"a strided shard of parts that were joined along dimension {dim} with shard='each'")
    uneven = next((size for size in sizes if size % count), None)
    if uneven is not None:
        message = f"a part of {uneven} rows along dimension {dim}, joined with shard='each'"
        raise ValueError(f"{message}, is not divisible by {count} ranks")


def _chunk(length: int, count: int, place: int) -> Interval:
    """Return chunk `place` of `count`, as `torch.chunk` divides: the last ones are shorter or empty."""
    size = -(-length // count)
    return min(place * size, length), min((place + 1) * size, length)


def _chunks(length: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the length of each chunk."""
    for place in range(count):
        begin, end = _chunk(length, count, place)
        yield begin, end - begin


def _taken(intervals: Sequence[Interval], begin: int, end: int) -> Iterator[Interval]:
    """Yield the elements from `begin` to `end` of the concatenated intervals."""
    at = 0
    for first, last in intervals:
        low, high = max(begin, at), min(end, at + last - first)
        if low < high:
            yield first + low - at, first + high - at
        at += last - first


def joined(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the intervals, which are in order, with touching and overlapping ones merged."""
    found: list[Interval] = []
    for begin, end in intervals:
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return tuple(found)
