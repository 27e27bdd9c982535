"""What goes wrong with safetensors and bintensors while a file is read, and does not with ingot.

One test for each defect. Its docstring says what upstream does; `#N` is an issue of safetensors.
"""

from __future__ import annotations

import io
import mmap
import os
from pathlib import Path

import ml_dtypes
import numpy
import pytest
import torch
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


@pytest.mark.parametrize("index", SLICES)
@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_a_slice_is_what_numpy_says(path: Path, index: str, backend: str, framework: str) -> None:
    """0.8.0: OverflowError, SystemError, a panic, another part; 0.7.0 ignores the step (#439, #560, #561)."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    with ingot.safe_open(path, framework, backend=backend) as file:
        found = eval(f"part{index}", {"part": file.get_slice("a")})
    expected = eval(f"array{index}", {"array": ARRAY})
    assert tuple(found.shape) == expected.shape
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "index", ["[6]", "[-7]", "[0, 4]", "[0, 0, 0]", "[::-1]", "[::0]", "[..., ...]", f"[{2**70}]"]
)
def test_an_index_that_does_not_fit_is_an_index_error(path: Path, index: str) -> None:
    """0.8.0: SafetensorError, ValueError or OverflowError."""
    ingot.numpy.save_file({"layer.a": ARRAY}, path)
    with ingot.safe_open(path, "np") as file, pytest.raises(IndexError, match=r"`layer\.a`") as caught:
        eval(f"part{index}", {"part": file.get_slice("layer.a")})
    assert isinstance(caught.value, ingot.SliceError)
    assert str(path) in str(caught.value)


def test_a_slice_of_four_bit_floats_is_read(path: Path) -> None:
    """0.8.0: RuntimeError, shape '[4, 4]' is invalid for input of size 8 (#783)."""
    path.write_bytes(file_of({"a": entry("F4", [4, 4], 0, 8)}, bytes(range(8))))
    with ingot.safe_open(path, "pt") as file:
        part = file.get_slice("a")
        assert part[1].view(torch.uint8).tolist() == [2, 3]
        assert part[:, 2:].view(torch.uint8).tolist() == [[1], [3], [5], [7]]
        assert part[...].dtype is torch.float4_e2m1fn_x2
        with pytest.raises(ingot.SliceError) as caught:
            part[:, 1:]
        assert caught.value.code == "partial-byte"


SMALL = {"BF16": 2, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}


@pytest.mark.parametrize("code", SMALL)
def test_bytes_and_files_have_the_same_dtypes(path: Path, code: str) -> None:
    """0.8.0 reads them from a file by torch only, and not at all from bytes by numpy (#682, #839)."""
    data = file_of({"a": entry(code, [2], 0, 2 * SMALL[code])}, bytes(range(2 * SMALL[code])))
    path.write_bytes(data)
    for module in (ingot.numpy, ingot.torch):
        loaded = [module.load(data)["a"], module.load_file(path)["a"], ingot.safe_open(path, "np")["a"]]
        assert len({str(tensor.dtype).removeprefix("torch.") for tensor in loaded}) == 1
        assert all(module.save({"a": tensor}) == module.save({"a": loaded[0]}) for tensor in loaded[:2])
        assert ingot.deserialize(module.save({"a": loaded[0]}))[0][1]["data"] == data[-2 * SMALL[code] :]


def test_four_bit_floats_are_read_from_bytes() -> None:
    """0.8.0: KeyError 'F4' (#840)."""
    data = file_of({"a": entry("F4", [4], 0, 2)}, b"\x21\x43")
    assert ingot.torch.load(data)["a"].view(torch.uint8).tolist() == [0x21, 0x43]
    assert ingot.numpy.load(data)["a"].view(numpy.uint8).tolist() == [1, 2, 3, 4]
    assert ingot.numpy.save(ingot.numpy.load(data)) == ingot.torch.save(ingot.torch.load(data))


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


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_one_unknown_dtype_does_not_block_the_file(path: Path, framework: str) -> None:
    """0.8.0 opens nothing of it."""
    header = {
        "good": entry("F32", [1], 0, 4),
        "bad": entry("F6_E2M3", [4], 4, 7),
        "b": entry("U8", [1], 7, 8),
    }
    path.write_bytes(file_of(header, bytes(8)))
    with ingot.safe_open(path, framework) as file:
        assert file.get_tensors(["b", "good"])["good"].tolist() == [0]
        assert file.get_slice("b")[:].tolist() == [0]
        assert file.info("bad").dtype == "F6_E2M3"
        for read in (lambda: file["bad"], file.get_tensors, lambda: file.get_slice("bad")[:]):
            with pytest.raises(ingot.DtypeError, match=r"`bad`.*F6_E2M3") as caught:
                read()
            assert (caught.value.tensor, caught.value.path) == ("bad", str(path))
    module = ingot.numpy if framework == "np" else ingot.torch
    with pytest.raises(ingot.DtypeError, match="`bad`"):
        module.load_file(path)


def test_a_shape_that_numpy_cannot_hold_blocks_only_its_tensor(path: Path) -> None:
    """0.8.0: a ValueError of numpy's, which says neither where nor what."""
    path.write_bytes(
        file_of({"deep": entry("F32", [1] * 65, 0, 4), "flat": entry("F32", [1], 4, 8)}, bytes(8))
    )
    with ingot.safe_open(path, "np") as file:
        assert file["flat"].tolist() == [0]
        assert file.info("deep").shape == (1,) * 65
        for read in (lambda: file["deep"], file.get_tensors, lambda: file.get_slice("deep")[...]):
            with pytest.raises(ingot.SafetensorError, match=r"`deep`.*64") as caught:
                read()
            assert caught.value.tensor == "deep"
            assert caught.value.path == str(path)
    assert ingot.torch.load_file(path)["deep"].ndim == 65


def test_any_buffer_is_loaded(path: Path) -> None:
    """0.8.0 takes bytes only (#529)."""
    data = ingot.numpy.save({"a": ARRAY})
    path.write_bytes(data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        buffers = [
            bytearray(data),
            memoryview(data),
            mapped,
            io.BytesIO(data).getbuffer(),
            numpy.frombuffer(data, "u1"),
        ]
        for buffer in buffers:
            assert (ingot.numpy.load(buffer)["a"] == ARRAY).all()
            assert (ingot.torch.load(buffer)["a"].numpy() == ARRAY).all()
            assert ingot.deserialize(buffer)[0][1]["data"] == ARRAY.tobytes()
            if isinstance(buffer, memoryview):
                buffer.release()


def test_a_buffer_that_changes_after_loading_changes_nothing() -> None:
    """What was checked is a copy."""
    data = bytearray(ingot.numpy.save({"a": ARRAY}))
    loaded, torch_loaded = ingot.numpy.load(data), ingot.torch.load(data)
    data[:] = b"\xff" * len(data)
    # And it is not held: a bytearray that is exported could not be emptied.
    data.clear()
    assert (loaded["a"] == ARRAY).all()
    assert (torch_loaded["a"].numpy() == ARRAY).all()


def test_an_open_file_is_a_mapping(path: Path) -> None:
    """0.8.0: no `in`, `len`, iteration, `[name]`, `items()` and `close()` (#328)."""
    ingot.numpy.save_file({"b": ARRAY, "a": ARRAY + 1}, path)
    with ingot.safe_open(path, "np") as file:
        assert "a" in file
        assert "c" not in file
        assert len(file) == 2
        assert list(file) == ["a", "b"]
        assert (file["b"] == ARRAY).all()
        assert {name: array[0, 0] for name, array in file.items()} == {"a": 1, "b": 0}
        assert set(dict(file)) == {"a", "b"}
    file.close()


def test_slices_and_arrays_outlive_the_file(path: Path) -> None:
    """As upstream: closing the file takes nothing from whoever holds a part of it."""
    ingot.numpy.save_file({"a": ARRAY}, path)
    for backend in ("mmap", "pread"):
        with ingot.safe_open(path, "np", backend=backend) as file:
            part, array = file.get_slice("a"), file["a"]
        with pytest.raises(ingot.ClosedError, match="closed"):
            file.get_tensor("a")
        assert (part[2] == ARRAY[2]).all()
        assert (array == ARRAY).all()
