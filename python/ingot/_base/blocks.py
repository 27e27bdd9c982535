"""Blocks of an array, by their size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product


def blocks(shape: Sequence[int], limit: int, multiple: int = 1) -> Iterator[tuple[slice, ...]]:
    """Yield the places of blocks of at most `limit` elements that make up an array, in C order.

    Cuts along the last dimension are at multiples of `multiple`. A block may have that many above the limit.
    """
    # The dimensions from `cut` on are whole in each block.
    row, cut = 1, len(shape)
    while cut and row * shape[cut - 1] <= limit:
        cut -= 1
        row *= shape[cut]
    steps = [1] * cut
    if cut:
        fitting = limit // row
        steps[-1] = max(fitting // multiple, 1) * multiple if cut == len(shape) else max(fitting, 1)
    along = ([*_stretches(size, step)] for size, step in zip(shape, steps, strict=False))
    rest = tuple(slice(0, size) for size in shape[cut:])
    for leading in product(*along):
        yield (*leading, *rest)


def _stretches(size: int, step: int) -> Iterator[slice]:
    for begin in range(0, size, step):
        yield slice(begin, min(begin + step, size))
