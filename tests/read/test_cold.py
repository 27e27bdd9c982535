"""Files that are not in the page cache: the way they are read, and equal bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy
import pytest

import ingot
import ingot.numpy

# The number of the system call `cachestat`, which Python does not have.
CACHESTAT = 451


def cached(path: Path) -> int | None:
    """Return the number of the file's pages in the cache. None before Linux 6.5, which cannot report it."""
    everything, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    with path.open("rb") as file:
        failed = ctypes.CDLL(None).syscall(CACHESTAT, file.fileno(), everything, counts, 0)
    return None if failed else counts[0]


if sys.platform != "linux" or cached(Path(__file__)) is None:
    pytest.skip("nothing says what is in the page cache here", allow_module_level=True)

# Tensors that take many reads, several, and a part of one. Their sizes are no multiple of a disk's block.
ARRAYS = {
    "large": numpy.arange(12 << 20, dtype=numpy.uint32),
    "wide": numpy.arange(5 << 20, dtype=numpy.uint32).reshape(5, -1),
    "odd": numpy.arange(1_000_003, dtype=numpy.uint8),
    **{f"small{n}": numpy.full(n, n, numpy.float64) for n in range(50)},
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cold") / "model.safetensors"
    ingot.numpy.save_file(ARRAYS, path)
    return path


@pytest.fixture
def cold(stored: Path) -> Path:
    drop(stored)
    if is_cached(stored):
        pytest.skip("this file system keeps its files in memory")
    return stored


def drop(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def is_cached(path: Path) -> bool:
    """Return whether most of the file is in the cache."""
    return 2 * (cached(path) or 0) * mmap.PAGESIZE > path.stat().st_size


def same(found: dict[str, numpy.ndarray]) -> None:
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert numpy.array_equal(found[name], array), name


def takes_direct_reads(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_load_file_reads_cold_files_past_the_cache(cold: Path, threads: int | None) -> None:
    same(ingot.numpy.load_file(cold, backend="pread", threads=threads))
    assert not takes_direct_reads(cold) or not is_cached(cold)


def test_load_file_fills_destinations_past_the_cache(cold: Path) -> None:
    out = {name: numpy.empty_like(array) for name, array in ARRAYS.items()}
    ingot.numpy.load_file(cold, backend="pread", out=out)
    same(out)
    assert not takes_direct_reads(cold) or not is_cached(cold)


def test_load_file_slices_and_converts_cold_files(cold: Path) -> None:
    slices = {"large": numpy.s_[12345:-54321], "wide": numpy.s_[1:4], "odd": numpy.s_[7:]}
    found = ingot.numpy.load_file(cold, backend="pread", slices=slices)
    same(found | {name: ARRAYS[name] for name in slices})
    for name, index in slices.items():
        assert numpy.array_equal(found[name], ARRAYS[name][index]), name
    half = ingot.numpy.load_file(cold, backend="pread", keys="small*", dtype="F16")
    assert all(half[name].dtype == numpy.float16 for name in half)


def test_load_file_reads_half_cached_files(cold: Path) -> None:
    with cold.open("rb") as file:
        for begin in range(0, cold.stat().st_size, 4 << 20):
            file.seek(begin)
            file.read(2 << 20)
    same(ingot.numpy.load_file(cold, backend="pread"))


def test_auto_maps_cold_files(cold: Path) -> None:
    with ingot.safe_open(cold, "np") as file:
        assert (file.backend, file.why) == ("mmap", "local file system")
        same(file.get_tensors())
    assert is_cached(cold)


def test_prefault_fills_the_cache(cold: Path) -> None:
    ingot.warm(cold)
    assert is_cached(cold)
