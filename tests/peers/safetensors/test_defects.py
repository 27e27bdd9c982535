"""Defects of safetensors and bintensors that ingot does not have.

One test for each defect. Its docstring describes upstream; `#N` is an issue of safetensors.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy
import pytest

import ingot
import ingot.numpy
import ingot.torch
from support.processes import run


def test_save_file_is_deterministic() -> None:
    """0.8.0 writes metadata in the order of a seeded hash: five saves, five hashes (#584)."""
    metadata = {str(number): str(number * number) for number in range(16)}
    tensors = dict.fromkeys("abc", numpy.arange(24, dtype=numpy.float32).reshape(6, 4))
    files = {
        ingot.numpy.save(dict(order(tensors.items())), dict(order(metadata.items())))
        for order in (list, reversed)
        for _ in range(4)
    }
    assert len(files) == 1
    program = """
import hashlib
array = numpy.arange(24, dtype=numpy.float32).reshape(6, 4)
metadata = {str(number): str(number * number) for number in range(16)}
say(hashlib.sha256(ingot.numpy.save({name: array for name in set("abc")}, metadata)).hexdigest())
"""
    digest = hashlib.sha256(files.pop()).hexdigest()
    assert [run(program, PYTHONHASHSEED=seed).said() for seed in ("1", "2")] == [digest, digest]


def test_save_file_takes_no_memory_by_address() -> None:
    """0.8.0 accepts a number as an address and reads there. A wrong number ends in SIGSEGV."""
    for data in (0, 4096, None, "text"):
        with pytest.raises(TypeError, match="`a`"):
            ingot.serialize({"a": {"dtype": "F32", "shape": [1024], "data": data}})
    for nbytes in (0, 4095, 4097):
        with pytest.raises(ingot.SaveError, match="`a`") as caught:
            ingot.serialize({"a": {"dtype": "F32", "shape": [1024], "data": bytes(nbytes)}})
        assert f"needs 4096 bytes, the buffer has {nbytes}" in str(caught.value)


def test_save_holds_the_tensors_once_more() -> None:
    """0.8.0 needs memory for two more copies of the tensors."""
    grown = run("""
array = numpy.ones(64 << 20, numpy.uint8)
forget_peak()
before = memory("VmRSS")
data = ingot.numpy.save({"a": array})
say((memory("VmHWM") - before) / array.nbytes)
""").said()
    assert grown < 1.25


def test_save_file_lets_other_threads_run(tmp_path: Path) -> None:
    """0.7.0 holds the GIL while it writes, so no other thread can empty the FIFO."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    received: list[int] = []

    def drain() -> None:
        with fifo.open("rb") as file:
            while part := file.read(1 << 16):
                received.append(len(part))

    reader = threading.Thread(target=drain)
    reader.start()
    ingot.numpy.save_file({"a": numpy.zeros(8 << 20, numpy.uint8)}, fifo)
    reader.join()
    # 0.8.0 replaces the FIFO by a file.
    assert fifo.is_fifo()
    assert sum(received) > 8 << 20


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_load_file_lets_other_threads_run(path: Path, framework: str) -> None:
    """0.8.0 holds the GIL while it reads: other threads stall for 53 ms with a tensor of 64 MiB."""
    ingot.numpy.save_file({"a": numpy.zeros(16 << 20, numpy.uint8)}, path)
    before = sys.getswitchinterval()
    ran = threading.Event()
    go = threading.Lock()
    go.acquire()

    def other() -> None:
        go.acquire()
        ran.set()

    thread = threading.Thread(target=other)
    with ingot.safe_open(path, framework, backend="pread") as file:
        thread.start()
        # From here on another thread runs only if this one releases the GIL, which only reading does.
        sys.setswitchinterval(1e6)
        try:
            go.release()
            for _ in range(1000):
                file.get_tensors()
                if ran.is_set():
                    break
            assert ran.is_set()
        finally:
            sys.setswitchinterval(before)
    thread.join()


BFLOAT = """
open("t", "wb").write(bytes.fromhex(sys.argv[1]))
assert "ml_dtypes" not in sys.modules
"""


def test_load_file_of_bfloat16_needs_no_import(tmp_path: Path) -> None:
    """In 0.8.0, `numpy.load_file` reads bfloat16 only if the caller has imported ml_dtypes."""
    data = ingot.numpy.save({"a": numpy.array([1, 2], ml_dtypes.bfloat16)})
    program = """
found = [ingot.numpy.load_file("t")["a"], ingot.safe_open("t", "np").get_slice("a")[:]]
say([[str(array.dtype), array.astype("f4").tolist()] for array in found])
"""
    assert run(BFLOAT + program, data.hex(), folder=tmp_path).said() == [["bfloat16", [1, 2]]] * 2
