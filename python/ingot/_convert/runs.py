"""Tensors whose bytes a source holds just as the new file is to: copied and compared as they are."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ingot import _native

from .positions import cut_short, size_of
from .values import PIECE_NBYTES, nbytes, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .positions import Region
    from .source import Entry

    Moved = Callable[[int], None]

# More threads in one file wait for each other in the kernel.
_THREADS = 4


class _Piece(NamedTuple):
    """A part of a tensor, and where its bytes stand."""

    file: _native.ForeignFile
    position: int
    name: str
    part: object
    begin: int
    """In the tensor."""
    nbytes: int


def copy(entries: Sequence[Entry], writer: _native.Writer, moved: Moved) -> None:
    """Copy the bytes of these tensors into a new file."""

    def copied(piece: _Piece) -> None:
        piece.file.copy(piece.position, writer, piece.name, piece.part)

    for _ in _each(entries, copied, moved):
        pass


def differing(entries: Sequence[Entry], checkpoint: _native.Checkpoint, moved: Moved) -> str | None:
    """The name of a tensor that is not the same in the source and in the new file; None where all are."""

    def differs(piece: _Piece) -> str | None:
        same = piece.file.agrees(piece.position, checkpoint, piece.name, piece.begin, piece.nbytes)
        return None if same else piece.name

    return next((name for name in _each(entries, differs, moved) if name is not None), None)


def _each(
    entries: Sequence[Entry], work: Callable[[_Piece], str | None], moved: Moved
) -> Iterator[str | None]:
    """What `work` gives for every piece of these tensors, in several threads."""

    def all_of(batch: list[_Piece]) -> list[str | None]:
        return [work(piece) for piece in batch]

    batches = list(_batches(_pieces(entries)))
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1, len(batches) or 1))
    try:
        for batch, found in zip(batches, pool.map(all_of, batches), strict=True):
            yield from found
            moved(sum(piece.nbytes for piece in batch))
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(entries: Iterable[Entry]) -> Iterator[_Piece]:
    files: dict[str, _native.ForeignFile] = {}
    for entry in entries:
        region = entry.region
        assert region is not None
        if region.path not in files:
            files[region.path] = _native.ForeignFile.open(region.path)
        _check(entry, region)
        begin = 0
        for index in pieces(entry.shape, max(nbytes(entry.code, (1,)), 1)):
            size = nbytes(entry.code, _shape(entry.shape, index))
            yield _Piece(files[region.path], region.position + begin, entry.name, index or ..., begin, size)
            begin += size


def _shape(shape: tuple[int, ...], index: tuple[int | slice, ...]) -> tuple[int, ...]:
    """What an index of `pieces` leaves of a shape."""
    if not index:
        return shape
    rows = index[-1]
    assert isinstance(rows, slice)
    return (rows.stop - rows.start, prod(shape[len(index) :]))


def _check(entry: Entry, region: Region) -> None:
    there = size_of(region.path) - region.position
    if there < region.nbytes:
        raise cut_short(region.path, entry.name, region.nbytes, max(there, 0))


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that are worth handing to a thread together."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.nbytes
        if size >= PIECE_NBYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
