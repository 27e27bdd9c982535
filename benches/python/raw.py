"""What the machine can do: plain threads and calls of the system, and nothing made of the bytes."""

import ctypes
import mmap
import os
import threading

CHUNK = 8 << 20
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23


def raw_populated(path: str) -> object:
    """Two threads that populate private huge pages chunk by chunk, and `preadv` into them."""
    return _raw(path, 2, 0, True)


def raw_sequential(path: str) -> object:
    """One thread, 4 MiB at a time, into a buffer that it reuses: what the system reads ahead best."""
    file = os.open(path, os.O_RDONLY)
    with mmap.mmap(-1, 4 << 20) as buffer:
        position = 0
        while count := os.preadv(file, [buffer], position):
            position += count
    os.close(file)


def raw_direct_four(path: str) -> object:
    """Four threads past the page cache, each into huge pages that it reuses."""
    return _raw(path, 4, os.O_DIRECT, False)


def raw_direct_eight(path: str) -> object:
    """Eight threads past the page cache, each into huge pages that it reuses."""
    return _raw(path, 8, os.O_DIRECT, False)


def _raw(path: str, threads: int, flags: int, keep: bool) -> object:
    """Reads with `threads` threads: into fresh huge pages if they are kept, else each into its own buffer."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(path, os.O_RDONLY | flags)
    nbytes = os.fstat(file).st_size
    chunks = iter(range(0, nbytes, CHUNK))
    taking = threading.Lock()
    pages = huge_pages(nbytes + CHUNK, libc) if keep else None

    def work() -> None:
        own = pages or huge_pages(CHUNK, libc)
        while True:
            with taking:
                at = next(chunks, None)
            if at is None:
                return
            view, start = own
            here = at if keep else 0
            if keep:
                libc.madvise(ctypes.c_void_p(start + here), ctypes.c_size_t(CHUNK), MADV_POPULATE_WRITE)
            os.preadv(file, [view[here : here + CHUNK]], at)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(file)
    return pages


def huge_pages(nbytes: int, libc: ctypes.CDLL) -> tuple[memoryview, int]:
    """Private memory on the border of a huge page, and its address."""
    page = 2 << 20
    view = memoryview(mmap.mmap(-1, nbytes + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    skip = -address % page
    libc.madvise(ctypes.c_void_p(address + skip), ctypes.c_size_t(nbytes), MADV_HUGEPAGE)
    return view[skip : skip + nbytes], address + skip
