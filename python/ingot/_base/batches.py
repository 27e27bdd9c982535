"""Batches of items, by their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield consecutive items in lists of at most `limit` bytes. A larger item is alone."""
    batch: list[T] = []
    filled = 0
    for item in items:
        size = nbytes(item)
        if batch and filled + size > limit:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += size
    if batch:
        yield batch
