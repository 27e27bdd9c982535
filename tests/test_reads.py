"""How files are read into memory: by many threads, watched, and under faults."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot._native import Archive


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A file of four arrays of 9 MiB and some small ones."""
    arrays = {f"w{i}": np.full((9, 1 << 18), i, np.float32) for i in range(4)}
    arrays |= {f"b{i}": np.full(i, i, np.float64) for i in range(5)}
    path = tmp_path_factory.mktemp("reads") / "large.safetensors"
    ingot.numpy.save_file(arrays, path, durable=False)
    return path, arrays


def same(found, arrays):
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(found[name], array), name


def read(path, **options):
    return Archive.open(os.fspath(path), "pread").tensors(None, ingot.numpy.wrap, **options)


@pytest.mark.parametrize("threads", [None, 1, 2, 33])
def test_any_number_of_threads_reads_the_same(large, threads):
    path, arrays = large
    same(read(path, threads=threads), arrays)


def test_no_threads_are_no_reads(large):
    with pytest.raises((ValueError, OverflowError)):
        read(large[0], threads=0)


def test_where_the_system_refuses_threads_the_caller_reads(large):
    path, arrays = large
    program = (
        "import sys, ingot.numpy\n"
        "found = ingot.numpy.load_file(sys.argv[1], backend='pread')\n"
        "print(sum(float(array.sum()) for array in found.values()))"
    )
    # No system has so much memory for a thread's stack, so it starts none.
    environment = os.environ | {"RUST_MIN_STACK": str(1 << 60)}
    done = subprocess.run(
        [sys.executable, "-c", program, os.fspath(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == sum(float(array.sum()) for array in arrays.values())


def test_progress_is_told_never_less_and_at_last_all(large):
    path, arrays = large
    told = []
    same(read(path, progress=lambda done, total: told.append((done, total))), arrays)
    total = sum(array.nbytes for array in arrays.values())
    assert told == sorted(told)
    assert told[-1] == (total, total)


@pytest.mark.parametrize("threads", [1, 4])
def test_what_progress_raises_stops_the_load_and_comes_out(large, threads):
    class Enough(Exception):
        pass

    def stop(done, total):
        raise Enough

    with pytest.raises(Enough):
        read(large[0], threads=threads, progress=stop)
