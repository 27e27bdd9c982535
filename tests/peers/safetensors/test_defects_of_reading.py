"""What goes wrong with safetensors and bintensors while a file is read, and does not with ingot.

One test for each defect. Its docstring says what upstream does; `#N` is an issue of safetensors.
"""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy
import pytest
from defects import ARRAY, entry, file_of

import ingot
import ingot.numpy
import ingot.torch
from support.processes import run


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_a_file_cut_short_after_opening_is_an_error(path: Path, backend: str, framework: str) -> None:
    """0.8.0: SIGBUS ends the process."""
    ingot.numpy.save_file({"a": numpy.ones(1 << 20, numpy.uint8)}, path)
    nbytes = path.stat().st_size
    with ingot.safe_open(path, framework, backend=backend) as file:
        part = file.get_slice("a")
        os.truncate(path, 4096)
        for read in (
            lambda: file.get_tensor("a"),
            file.get_tensors,
            lambda: part[-5:],
            lambda: part[::2],
            lambda: part[[0, -1]],
        ):
            with pytest.raises(ingot.StorageError, match=f"{nbytes}.*4096") as caught:
                read()
            assert caught.value.path == str(path)
            assert caught.value.code == "changed"


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_what_pread_has_loaded_is_the_callers(path: Path, framework: str) -> None:
    """0.8.0: torch tensors are the mapped file, and a file cut short later is a SIGBUS."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    with ingot.safe_open(path, framework, backend="pread") as file:
        tensor, part = file["a"], file.get_slice("a")[2:4]
    os.truncate(path, 0)
    assert tensor.tolist() == ARRAY.tolist()
    assert part.tolist() == ARRAY[2:4].tolist()


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_a_file_replaced_after_opening_is_read_as_it_was(path: Path, backend: str) -> None:
    """As upstream."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    with ingot.safe_open(path, "np", backend=backend) as file:
        ingot.numpy.save_file({"b": ARRAY + 1}, path)
        assert (file["a"] == ARRAY).all()
        path.unlink()
        assert (file["a"] == ARRAY).all()


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_a_file_overwritten_after_opening_is_noticed(path: Path, backend: str) -> None:
    """0.8.0 gives old and new bytes together."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    with ingot.safe_open(path, "np", backend=backend) as file:
        data = path.read_bytes()
        os.utime(path, ns=(0, 0))
        path.write_bytes(data[:-4] + b"\xff" * 4)
        with pytest.raises(ingot.StorageError) as caught:
            file.get_tensor("a")
        assert caught.value.code == "changed"


SLICES = [
    "[-2:]",
    "[:-1]",
    "[1:100]",
    "[2:1]",
    "[4:2]",
    "[4:2, 0]",
    "[:, ::2]",
    "[...]",
    "[None]",
    "[[0, 2]]",
]


SLICES += [
    "[True]",
    "[:, -1]",
    "[..., 0]",
    "[-6]",
    "[6:2]",
    "[4:2:2]",
    "[5:4, 3:1]",
    f"[{2**70}:]",
    f"[:{-(2**70)}]",
]


BFLOAT = """
open("t", "wb").write(bytes.fromhex(sys.argv[1]))
assert "ml_dtypes" not in sys.modules
"""


def test_bfloat16_needs_no_import_by_the_caller(tmp_path: Path) -> None:
    """0.8.0: numpy reads it only when the caller has imported ml_dtypes."""
    data = file_of({"a": entry("BF16", [2], 0, 4)}, numpy.array([1, 2], ml_dtypes.bfloat16).tobytes())
    program = """
found = [ingot.numpy.load_file("t")["a"], ingot.safe_open("t", "np").get_slice("a")[:]]
say([[str(array.dtype), array.astype("f4").tolist()] for array in found])
"""
    assert run(BFLOAT + program, data.hex(), folder=tmp_path).said() == [["bfloat16", [1, 2]]] * 2


def test_a_buffer_that_changes_after_loading_changes_nothing() -> None:
    """What was checked is a copy."""
    data = bytearray(ingot.numpy.save({"a": ARRAY}))
    loaded, torch_loaded = ingot.numpy.load(data), ingot.torch.load(data)
    data[:] = b"\xff" * len(data)
    # And it is not held: a bytearray that is exported could not be emptied.
    data.clear()
    assert (loaded["a"] == ARRAY).all()
    assert (torch_loaded["a"].numpy() == ARRAY).all()
