"""The memory of the system, and its page cache."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HUGE = 2 << 20
MADV_POPULATE_WRITE = 23
LIBC = ctypes.CDLL(None, use_errno=True)


def private(nbytes: int, kind: int = mmap.MADV_HUGEPAGE) -> tuple[memoryview, int]:
    """Return untouched memory that begins at a huge page, and its address."""
    view = memoryview(mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    skip = -address % HUGE
    _advise(address + skip, nbytes, kind)
    return view[skip : skip + nbytes], address + skip


def populate(address: int, nbytes: int) -> None:
    """Write to every page, in one call instead of a fault for each."""
    _advise(address, nbytes, MADV_POPULATE_WRITE)


def _advise(address: int, nbytes: int, advice: int) -> None:
    if LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice):
        error = ctypes.get_errno()
        raise OSError(error, f"madvise({advice}): {os.strerror(error)}")


def touch(nbytes: int, kinds: Iterable[int] = (mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE)) -> None:
    """Touch memory and free it, so that the host of a virtual machine provides it.

    In small pages and then in huge ones: the system keeps freed pages of both kinds separate, and each side
    should find the kind that it uses. On every core, since a host takes a while for each page.
    """
    cores = len(os.sched_getaffinity(0))
    # Of whole huge pages, so that no two threads want the same one.
    step = -(-nbytes // cores // HUGE) * HUGE
    for kind in kinds:
        memory, start = private(step * cores, kind)
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(lambda core, start=start: populate(start + core * step, step), range(cores)))
        del memory


def flush(path: str | Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def drop(path: str | Path) -> None:
    """Drop a file from the page cache."""
    flush(path)
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def warm(path: str | Path, nbytes: int) -> None:
    """Touch memory as `touch` does, and bring all of a file into the page cache.

    A host may take back unused memory and unread files within seconds.
    """
    touch(nbytes)
    for _ in range(3):
        if (kept := cached(path)) > 0.999:
            return
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(HUGE)
            while file.readinto(buffer):
                pass
    raise RuntimeError(f"{path}: the page cache keeps {kept:.1%} of it only")


def cached(path: str | Path) -> float:
    """Return the fraction of a file that is in the page cache."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapping:
        count = -(-len(mapping) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * count)()
        start = ctypes.c_char.from_buffer(mapping)
        answer = LIBC.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapping)), found)
        # The mapping cannot be closed while something points into it.
        del start
    if answer:
        error = ctypes.get_errno()
        raise OSError(error, f"mincore: {os.strerror(error)}")
    return sum(page & 1 for page in found) / count
