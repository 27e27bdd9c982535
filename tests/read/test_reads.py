"""Reads into memory: by many threads, with progress, and with faults."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from contextlib import suppress

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot._native import Checkpoint
from support.errors import raises
from support.processes import python
from support.progress import Stopped, stop


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Write a file of four arrays of 9 MiB and some small ones."""
    arrays = {f"w{i}": np.full((9, 1 << 18), i, np.float32) for i in range(4)}
    arrays |= {f"b{i}": np.full(i, i, np.float64) for i in range(5)}
    path = tmp_path_factory.mktemp("reads") / "large.safetensors"
    ingot.numpy.save_file(arrays, path)
    return path, arrays


def same(found, arrays):
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(found[name], array), name


def read(path, **options):
    return Checkpoint.open(os.fspath(path), "pread").tensors(None, ingot.numpy.wrap, **options)


@pytest.mark.parametrize("threads", [None, 1, 2, 33])
def test_load_file_reads_the_same_with_any_threads(large, threads):
    path, arrays = large
    same(read(path, threads=threads), arrays)


def test_load_file_reads_in_the_caller_if_threads_fail(large):
    path, arrays = large
    program = (
        "import sys, ingot.numpy\n"
        "found = ingot.numpy.load_file(sys.argv[1], backend='pread')\n"
        "print(sum(float(array.sum()) for array in found.values()))"
    )
    # No system has enough memory for such a stack, so that no thread can start.
    done = python("-c", program, path, RUST_MIN_STACK=str(1 << 60))
    assert done.said() == sum(float(array.sum()) for array in arrays.values())


def threads():
    """Return the names of the threads of this process."""
    names = []
    for task in os.listdir("/proc/self/task"):
        # A thread may end after it was listed.
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/comm") as name:
            names.append(name.read().strip())
    return names


def assert_none_left():
    # The system may list a thread for a moment after it was joined.
    for _ in range(1200):
        left = [name for name in threads() if name.startswith("ingot")]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(left)


@pytest.mark.parametrize("ahead", [0, 10 << 20, 1 << 40])
def test_prefetch_returns_the_requested_order(large, backend, ahead):
    path, arrays = large
    with ingot.safe_open(path, "np", backend=backend) as file:
        for keys in (None, file.keys(), ["w2", "b3", "w0"]):
            names = keys or file.offset_keys()
            loader = file.prefetch(keys=keys, ahead=ahead)
            assert loader.names() == names
            found = list(loader)
            assert [name for name, _ in found] == names
            same(dict(found), {name: arrays[name] for name in names})


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
@pytest.mark.parametrize("end", ["close", "drop"])
def test_prefetch_ends_its_threads_when_stopped(large, end):
    with ingot.safe_open(large[0], "np", backend="pread") as file:
        loader = file.prefetch(ahead=1 << 20)
        tensors = iter(loader)
        next(tensors)
        assert "ingot-prefetch" in threads()
        if end == "close":
            loader.close()
            with pytest.raises(ingot.ClosedError):
                next(tensors)
        else:
            del loader, tensors
        assert_none_left()


def test_prefetch_rejects_wrong_options(large):
    with ingot.safe_open(large[0], "np") as file:
        with raises(ingot.OptionError, "found both", code="plan-and-keys"):
            file.prefetch({"w0": None}, keys="w0")
        with pytest.raises(ingot.TensorNotFoundError):
            file.prefetch(keys=["w0", "none"])
        with pytest.raises(ingot.OptionError, match="ahead -1 is out of range"):
            file.prefetch(ahead=-1)


def test_prefetch_names_a_file_that_shrinks(large, tmp_path):
    path = tmp_path / "shrinks.safetensors"
    path.write_bytes(large[0].read_bytes())
    with (
        ingot.safe_open(path, "np", backend="pread") as file,
        file.prefetch(ahead=0) as loader,
    ):
        tensors = iter(loader)
        next(tensors)
        os.truncate(path, 20 << 20)
        with pytest.raises(ingot.StorageError, match="shrank from") as caught:
            dict(tensors)
        assert caught.value.path == os.fspath(path)


def test_prefault_returns_the_bytes(large):
    path, arrays = large
    assert ingot.warm(path) == sum(array.nbytes for array in arrays.values())
    with ingot.safe_open(path, "np") as file:
        assert file.warm(["w1", "b4"]) == arrays["w1"].nbytes + arrays["b4"].nbytes
        with pytest.raises(ingot.TensorNotFoundError):
            file.warm(["none"])


def test_backend_variable_rejects_an_unknown_backend(large, monkeypatch):
    monkeypatch.setenv("INGOT_BACKEND", "mmpa")
    with raises(ingot.OptionError, "expected one of auto, mmap, pread", code="unknown-backend"):
        ingot.numpy.load_file(large[0])
    assert ingot.numpy.load_file(large[0], backend="mmap")


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_load_file_ends_after_a_signal(large):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    def load():
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        # So many loads would take hours.
        deque((read(large[0]) for _ in range(1_000_000)), maxlen=0)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(Stop):
            load()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert_none_left()


class Recorder(list):
    """Records the progress of a load."""

    def __call__(self, done, total):
        self.append((done, total))

    def assert_all(self, total):
        assert self == sorted(self), "never less than before"
        assert {of for _, of in self} == {total}
        assert self[-1] == (total, total)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keys": ["w1", "b3"]},
        {"slices": {"w0": np.s_[:, ::2]}},
        {"dtype": "F16", "keys": ["w0", "w2", "b4"]},
        {"out": {"w3": np.empty((9, 1 << 18), np.float32)}},
    ],
    ids=lambda options: "-".join(options) or "all",
)
def test_load_file_reports_the_bytes_of_its_tensors(large, backend, options):
    recorder = Recorder()
    found = ingot.numpy.load_file(large[0], backend=backend, progress=recorder, **options)
    recorder.assert_all(sum(array.nbytes for array in found.values()))


def test_load_file_ends_when_progress_raises(large, backend):
    with pytest.raises(Stopped):
        ingot.numpy.load_file(large[0], backend=backend, progress=stop)
    assert_none_left()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
@pytest.mark.parametrize("options", [{}, {"threads": 2}])
def test_threads_variable_sets_the_default(tmp_path, monkeypatch, options):
    path, most = tmp_path / "hole.safetensors", 0
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (256 << 20, 256 << 20)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        # Large enough that every thread still reads when threads are counted, even on a busy machine.
        file.truncate(8 + len(header) + (256 << 20))

    def count(done, total):
        nonlocal most
        most = max(most, threads().count("ingot-read"))

    monkeypatch.setenv("INGOT_THREADS", "5")
    for _ in range(20):
        assert not ingot.numpy.load_file(path, backend="pread", progress=count, **options)["a"][-1]
        if most == options.get("threads", 5):
            break
    assert most == options.get("threads", 5)


@pytest.mark.parametrize("found", ["0", "two", "-1", "1.5"])
def test_threads_variable_rejects_invalid_numbers(large, monkeypatch, found):
    monkeypatch.setenv("INGOT_THREADS", found)
    with raises(ingot.OptionError, f"INGOT_THREADS `{found}` is no number", code="invalid-threads"):
        ingot.numpy.load_file(large[0])
    monkeypatch.setenv("INGOT_THREADS", "")
    same(ingot.numpy.load_file(large[0]), large[1])
