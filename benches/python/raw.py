"""The limits of the machine: plain threads and system calls that read bytes and make no tensors."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pages

CHUNK = 8 << 20
Piece = TypeVar("Piece")


def raw_populated(path: str) -> object:
    """Two threads that populate private huge pages chunk by chunk, and `preadv` into them."""
    return _read(path, 2, 0, True)


def raw_sequential(path: str) -> object:
    """One thread, 4 MiB at a time, into a buffer that it reuses: what the system reads ahead best."""
    file = os.open(path, os.O_RDONLY)
    with mmap.mmap(-1, 4 << 20) as buffer:
        position = 0
        while count := os.preadv(file, [buffer], position):
            position += count
    os.close(file)


def raw_direct_four(path: str) -> object:
    """Read directly, without the page cache, with four threads, each into huge pages that it reuses."""
    return _read(path, 4, os.O_DIRECT, False)


def raw_direct_eight(path: str) -> object:
    """Read directly, without the page cache, with eight threads, each into huge pages that it reuses."""
    return _read(path, 8, os.O_DIRECT, False)


def _read(path: str, threads: int, flags: int, keep: bool) -> object:
    """Reads with `threads` threads: into fresh huge pages if they are kept, else each into its own buffer."""
    file = os.open(path, os.O_RDONLY | flags)
    nbytes = os.fstat(file).st_size
    kept = pages.private(nbytes + CHUNK) if keep else None

    def work(positions: Iterator[int]) -> None:
        view, start = kept or pages.private(CHUNK)
        for at in positions:
            here = at if keep else 0
            if keep:
                pages.populate(start + here, CHUNK)
            os.preadv(file, [view[here : here + CHUNK]], at)

    _shared(threads, range(0, nbytes, CHUNK), work)
    os.close(file)
    return kept


def saved(tensors: dict, path: str) -> None:
    """Two threads that write the same bytes by position into a preallocated file.

    The header is left empty.
    """
    pieces, nbytes = _pieces(tensors)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    os.posix_fallocate(file, 0, nbytes)

    def work(taken: Iterator[tuple[int, memoryview]]) -> None:
        for at, rest in taken:
            while rest:
                count = os.pwrite(file, rest, at)
                at, rest = at + count, rest[count:]

    _shared(2, pieces, work)
    os.close(file)


def _pieces(tensors: dict) -> tuple[list[tuple[int, memoryview]], int]:
    """Return each part of the data with its position, and the size of the file."""
    pieces, at = [], 0
    for tensor in tensors.values():
        nbytes = tensor.nbytes
        view = memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
        pieces += [(at + begin, view[begin : begin + CHUNK]) for begin in range(0, nbytes, CHUNK)]
        at += nbytes
    return pieces, at


def _shared(threads: int, pieces: Iterable[Piece], work: Callable[[Iterator[Piece]], None]) -> None:
    """Threads that work on `pieces`; each takes the next one when it is done with its own."""
    left, taking = iter(pieces), threading.Lock()

    def taken() -> Iterator[Piece]:
        while True:
            with taking:
                piece = next(left, None)
            if piece is None:
                return
            yield piece

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, taken()) for _ in range(threads)]:
            done.result()
