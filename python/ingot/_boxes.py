"""Where in a tensor the elements of a piece of its bytes are."""

from __future__ import annotations

from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor, and what of it is meant.

    Attributes
    ----------
    starts, sizes : tuple of int
        Where it begins and how much it takes, of each dimension.
    within : slice
        The elements that are meant, among those of the part in C order.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    within: slice

    @property
    def slices(self) -> tuple[slice, ...]:
        """What the tensor is indexed with."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))


def boxes(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """The elements from `begin` to `end` in C order: one box or two, of at most three times as many elements.

    The number of rows in a box depends on the number of elements alone, not on where they begin: jax compiles
    anew for every other size.
    """
    if not shape:
        return [Box((), (), slice(begin, end))]
    row, count = prod(shape[1:]), end - begin
    if count < row:
        # In one row, or across the border of two.
        border = min((begin // row + 1) * row, end)
        parts = [(begin, border), (border, end)]
        return [box for part in parts if part[0] < part[1] for box in _in_a_row(shape, row, *part)]
    rows = min((count + row - 2) // row + 1, shape[0])
    first = min(begin // row, shape[0] - rows)
    skipped = begin - first * row
    return [Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:]), slice(skipped, skipped + count))]


def _in_a_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> list[Box]:
    number = begin // row
    inner = boxes(shape[1:], begin - number * row, end - number * row)
    return [Box((number, *box.starts), (1, *box.sizes), box.within) for box in inner]
