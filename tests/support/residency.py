"""How much of a file the system holds in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

PAGE = mmap.PAGESIZE


def resident_pages(path: Path) -> int:
    """The pages of a file that are in the page cache. Looking at it brings none of them in."""
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
    """Write a file to its disk, and have the system forget it; whether it did, which one in memory cannot."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return resident_pages(path) == 0
