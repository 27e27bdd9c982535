"""What goes wrong with safetensors and bintensors while a file is read, and does not with ingot.

One test for each defect; its docstring says what upstream does. Where the wheel can be made to show it, a
function marked `defect` does so beside it, and test_upstream_still_does_this.py asserts what it gives. `#N`
is an issue of safetensors.
"""

from __future__ import annotations

import io
import mmap
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from defects import ARRAY, defect, entry, file_of, raised

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


CUT = """
import safetensors.numpy, safetensors.torch
safetensors.numpy.save_file({"a": numpy.ones(1 << 20, numpy.uint8)}, "t")
"""


@defect(["SIGBUS", "SIGBUS"])
def reading_a_file_cut_short(folder: Path) -> list[str | None]:
    opened = """
with safetensors.safe_open("t", "np") as file:
    os.truncate("t", 4096)
    file.get_tensor("a")
"""
    loaded = """
tensor = safetensors.torch.load_file("t")["a"]
os.truncate("t", 4096)
tensor.sum()
"""
    return [run(CUT + opened, folder=folder).signal, run(CUT + loaded, folder=folder).signal]


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


@defect("nothing")
def reading_a_file_overwritten(folder: Path) -> str:
    path = folder / "t"
    safetensors.numpy.save_file({"a": ARRAY}, path)
    with safetensors.safe_open(path, "np") as file:
        path.write_bytes(path.read_bytes()[:-4] + b"\xff" * 4)
        return raised(lambda: file.get_tensor("a"))


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


@defect(
    {
        "[-2:]": "OverflowError: can't convert negative int to unsigned",
        "[:-1]": "OverflowError: can't convert negative int to unsigned",
        "[1:100]": "SafetensorError: Error during slicing [1:100] with shape [6,",
        "[2:1]": "SystemError: Negative size passed to PyByteArray_FromStringA",
        "[4:2]": "SystemError: Negative size passed to PyByteArray_FromStringA",
        "[4:2, 0]": "PanicException: capacity overflow",
        "[5:4, 3:1]": "PanicException: capacity overflow",
        "[4:2:2]": "ValueError: cannot reshape array of size 24 into shape (9223",
        "[True]": [4.0, 5.0, 6.0, 7.0],
        "[None]": "SafetensorError: Unsupported slice index at position 0: expe",
        "[[0, 2]]": "SafetensorError: Non empty lists are not implemented",
    }
)
def slices(folder: Path) -> dict[str, Any]:
    path, found = folder / "t", {}
    safetensors.numpy.save_file({"a": ARRAY}, path)
    with safetensors.safe_open(path, "np") as file:
        part = file.get_slice("a")
        for index in SLICES:
            try:
                value = eval(f"part{index}", {"part": part}).tolist()
            except BaseException as error:
                value = f"{type(error).__name__}: {error}"[:60].rstrip()
            if value != eval(f"array{index}", {"array": ARRAY}).tolist():
                found[index] = value
    return {index: value for index, value in found.items() if index not in ("[6:2]", SLICES[-1], SLICES[-2])}


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


@defect("RuntimeError: shape '[4, 4]' is invalid for input of size 8")
def slicing_four_bit_floats(folder: Path) -> str:
    path = folder / "t"
    path.write_bytes(file_of({"a": entry("F4", [4, 4], 0, 8)}, bytes(8)))
    with safetensors.safe_open(path, "pt") as file:
        return raised(lambda: file.get_slice("a")[0])


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


@defect([f"KeyError: '{code}'" for code in SMALL])
def loading_small_floats_from_bytes_by_numpy(folder: Path) -> list[str]:
    files = [file_of({"a": entry(code, [2], 0, 2 * size)}, bytes(2 * size)) for code, size in SMALL.items()]
    return [raised(lambda file=file: safetensors.numpy.load(file)) for file in files]


@defect(["KeyError: 'F8_E8M0'", "KeyError: 'F4'"])
def loading_small_floats_from_bytes_by_torch(folder: Path) -> list[str]:
    files = [
        file_of({"a": entry(code, [2], 0, size)}, bytes(size)) for code, size in (("F8_E8M0", 2), ("F4", 1))
    ]
    return [raised(lambda file=file: safetensors.torch.load(file)) for file in files]


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


@defect("TypeError")
def reading_bfloat16_without_an_import(folder: Path) -> str:
    data = file_of({"a": entry("BF16", [2], 0, 4)}, bytes(4))
    program = """
import safetensors.numpy
try:
    safetensors.numpy.load_file("t")
except Exception as error:
    say(type(error).__name__)
"""
    return run(BFLOAT + program, data.hex(), folder=folder).said()


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


@defect("SafetensorError: Dtype not understood: F6_E2M3")
def loading_a_file_with_one_unknown_dtype(folder: Path) -> str:
    path = folder / "t"
    path.write_bytes(file_of({"b": entry("U8", [1], 0, 1), "c": entry("F6_E2M3", [4], 1, 4)}, bytes(4)))
    return raised(lambda: safetensors.numpy.load_file(path))


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


@defect("ValueError: maximum supported dimension for an ndarray is cu")
def loading_a_shape_that_numpy_cannot_hold(folder: Path) -> str:
    return raised(lambda: safetensors.numpy.load(file_of({"deep": entry("F32", [1] * 65, 0, 4)}, bytes(4))))


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


@defect(["TypeError"] * 2)
def loading_other_buffers(folder: Path) -> list[str]:
    data = safetensors.numpy.save({"a": ARRAY})
    return [
        raised(lambda kind=kind: safetensors.numpy.load(kind(data)))[:9] for kind in (bytearray, memoryview)
    ]


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


@defect(["TypeError"] * 4 + ["AttributeError"] * 2)
def an_open_file_as_a_mapping(folder: Path) -> list[str]:
    safetensors.numpy.save_file({"a": ARRAY}, folder / "t")
    file: Any = safetensors.safe_open(folder / "t", "np")
    attempts = [lambda: "a" in file, lambda: len(file), lambda: list(file), lambda: file["a"]]
    attempts += [lambda: file.items(), lambda: file.close()]
    return [raised(attempt).partition(":")[0] for attempt in attempts]


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
