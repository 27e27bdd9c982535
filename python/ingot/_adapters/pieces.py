"""Reading in pieces of bounded size, for devices that frameworks reach and the extension module does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from operator import index as integer
from typing import Any, NamedTuple

from ingot._base import batches as _batches
from ingot._base.blocks import blocks

# An index along one dimension: an int, a slice with a step, or a list of positions.
Taken = int | range | list[int]
Box = tuple[slice, ...]

# The size of a piece in bytes: eight threads have work, and a load may pin two pieces.
PIECE_NBYTES = 64 << 20
# Alignment of pieces in memory, in bytes: a multiple of every element, and a line of the cache.
ALIGNMENT = 64


class Piece(NamedTuple):
    """A part of a requested tensor.

    Attributes
    ----------
    rank : int
        The number of the tensor in the request.
    index : object
        The index of the request into the tensor; None for the whole tensor.
    place : tuple of slice
        The position of the piece in the request, without the dimensions of size 1 that an index adds.
    shape, whole : tuple of int
        The shape of the piece and the shape of the whole request, both without these dimensions.
    nbytes : int
        The size of the piece in bytes as stored in the file.
    """

    rank: int
    index: Any
    place: Box
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    nbytes: int


def pieces(rank: int, index: Any, shape: tuple[int, ...], nbits: int) -> Iterator[Piece]:
    """Cut the selection of `index` into pieces in C order. The tensor has this shape and elements of `nbits`.

    Yields nothing for tensors without elements.
    """
    along = taken(index, shape)
    lengths = tuple(len(one) for one in along if not isinstance(one, int))
    if not all(lengths):
        return
    # Two elements of F4 share a byte.
    for box in blocks(lengths, 8 * PIECE_NBYTES // nbits, 2):
        sizes = tuple(cut.stop - cut.start for cut in box)
        # Whole dimensions need no index, which is the fastest way to read them.
        asked = None if index is None and sizes == lengths else within(along, box)
        yield Piece(rank, asked, box, sizes, lengths, (prod(sizes) * nbits + 7) // 8)


def batches(some: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield batches of these pieces that fit into `PIECE_NBYTES` at multiples of `ALIGNMENT`."""
    return _batches.batches(some, lambda piece: aligned(piece.nbytes), PIECE_NBYTES)


def room(some: Iterable[Piece]) -> int:
    """Return the bytes of memory that no batch of these pieces exceeds."""
    return min(sum(aligned(piece.nbytes) for piece in some), PIECE_NBYTES)


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def taken(index: Any, shape: tuple[int, ...]) -> list[Taken]:
    """Return the selection of `index` along each dimension. Files can be read by `index`, and it fits."""
    given = () if index is None else index if isinstance(index, tuple) else (index,)
    parts = [part for part in given if part is not None]
    rest = next((place for place, part in enumerate(parts) if part is ...), len(parts))
    others = len(parts) - (rest < len(parts))
    parts[rest : rest + 1] = [slice(None)] * (len(shape) - others)
    return [_along(part, size) for part, size in zip(parts, shape, strict=True)]


def _along(part: Any, size: int) -> Taken:
    if isinstance(part, slice):
        return range(*part.indices(size))
    if isinstance(part, list | range):
        runs = [part] if isinstance(part, range) else part
        return [place for run in runs for place in (run if isinstance(run, range) else (integer(run),))]
    return integer(part)


def within(along: list[Taken], box: Box) -> tuple[Any, ...]:
    """Return the index that selects the part in `box` of the selection `along`."""
    cuts = iter(box)
    return tuple(one if isinstance(one, int) else _cut(one[next(cuts)]) for one in along)


def _cut(some: range | list[int]) -> slice | list[int]:
    return slice(some.start, some.stop, some.step) if isinstance(some, range) else some
