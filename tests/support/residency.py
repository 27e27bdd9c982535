"""The pages of a file in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

PAGE = mmap.PAGESIZE


def resident_pages(path: Path) -> int:
    """Return the number of pages of a file in the page cache, without reading any."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    nbytes = path.stat().st_size
    count = -(-nbytes // PAGE)
    flags = (ctypes.c_ubyte * count)()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        start = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        assert start != ctypes.c_void_p(-1).value
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), flags) == 0
        libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(nbytes))
    finally:
        os.close(descriptor)
    return sum(flag & 1 for flag in flags)


def dropped(path: Path) -> bool:
    """Flush a file and drop it from the page cache. Return False if it stays there, as on a tmpfs."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return resident_pages(path) == 0
