"""Destinations: many at once, and those that ingot rejects."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from ingot import _native

COUNT = 300
DTYPES = [numpy.dtype(dtype) for dtype in ingot.numpy.DTYPES.values()]


class Tensor(ctypes.Structure):
    """`DLManagedTensor` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


MEMORY = numpy.zeros(64, numpy.uint8)
KEPT: list[Any] = []


def shown(size: int = 4, stride: int = 1, **fields: Any) -> Any:
    """Return a capsule of 32-bit floats on the CPU, with these fields changed."""
    dims = (ctypes.c_int64 * 2)(size, stride)
    usual = {"data": MEMORY.ctypes.data, "device_type": 1, "ndim": 1, "code": 2, "bits": 32, "lanes": 1}
    tensor = Tensor(**usual | fields)
    tensor.shape = ctypes.cast(dims, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(ctypes.byref(dims, 8), ctypes.POINTER(ctypes.c_int64))
    KEPT.append((tensor, dims))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(tensor), b"dltensor", None)


def read_only() -> numpy.ndarray:
    array = MEMORY[:16].view(numpy.float32)
    array.flags.writeable = False
    return array


# Invalid destinations for four elements of a dtype, each with the reason in the error. A read into narrower
# elements would write past their end, into memory that is part of `MEMORY` too.
REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "on a device": ("F32", lambda: shown(device_type=2), "not in CPU memory"),
    "without memory": ("F32", lambda: shown(data=None), "has no memory"),
    "of narrower elements": ("F64", shown, "another size: expected 8 bytes, found 4"),
    "a buffer of narrower elements": (
        "F64",
        lambda: MEMORY[:16].view(numpy.float32),
        "another size: expected 8 bytes, found 4",
    ),
    "for reading": ("F32", read_only, "may not be written to"),
    "of less than nothing": ("F32", lambda: shown(size=-4), "no memory can hold"),
    "of steps past all memory": ("F32", lambda: shown(stride=1 << 62), "no memory can hold"),
    "of one place": ("F32", lambda: shown(stride=0), "share memory with each other"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_load_file_rejects_invalid_memory(tmp_path: Path, what: str) -> None:
    code, make, reason = REFUSED[what]
    ingot.numpy.save_file({"a": numpy.ones(4, ingot.numpy.DTYPES[code])}, tmp_path / "t")
    checkpoint = _native.Checkpoint.open(tmp_path / "t")
    MEMORY[:] = 0
    places = _native.Destinations({"a": None}, lambda name, tensor: (code, make(), False))
    with pytest.raises(ingot.DestinationError, match=reason):
        checkpoint.fill((["a"], None, None), places)
    assert not MEMORY.any()


def test_load_file_fills_the_shown_memory(tmp_path: Path) -> None:
    ingot.numpy.save_file({"a": numpy.ones(4, numpy.float32)}, tmp_path / "t")
    checkpoint = _native.Checkpoint.open(tmp_path / "t")
    for stride, offset in [(1, 0), (2, 4), (3, 8)]:
        MEMORY[:] = 0
        given = "F32", shown(stride=stride, byte_offset=offset), False
        places = _native.Destinations({"a": None}, lambda name, tensor, given=given: given)
        checkpoint.fill((["a"], None, None), places)
        floats = MEMORY.view(numpy.float32)
        assert floats.nonzero()[0].tolist() == [offset // 4 + stride * number for number in range(4)]


class Odd(numpy.ndarray):
    """A subclass of NumPy's arrays."""


def layouts(dtype: numpy.dtype[Any]) -> dict[str, Callable[[], numpy.ndarray]]:
    """Return makers of arrays of zeros with 4 × 6 elements, or with one, in every memory layout."""

    def field() -> numpy.ndarray:
        # Its strides are no multiple of the element size.
        return numpy.zeros((4, 6), numpy.dtype([("before", "u1"), ("here", dtype), ("after", "V2")]))["here"]

    return {
        "plain": lambda: numpy.zeros((4, 6), dtype),
        "turned": lambda: numpy.zeros((6, 4), dtype).T,
        "cut out": lambda: numpy.zeros((8, 12), dtype)[2:6, 3:9],
        "reversed": lambda: numpy.zeros((4, 6), dtype)[::-1, ::-1],
        "a field": field,
        "unaligned": lambda: numpy.zeros(24 * dtype.itemsize + 1, "u1")[1:].view(dtype).reshape(4, 6),
        "a subclass": lambda: numpy.zeros((4, 6), dtype).view(Odd),
        "empty": lambda: numpy.zeros((0, 6), dtype),
        "one": lambda: numpy.zeros((), dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_load_file_and_save_file_take_every_layout(tmp_path: Path, dtype: Any) -> None:
    kinds = list(layouts(dtype).items())
    # Each layout alone among many plain arrays, and all layouts together.
    mixes = [[kind] for kind in kinds] + [kinds]
    for mix in mixes:
        arrays = {f"{number:03}": numpy.zeros((3, number % 4), dtype) for number in range(COUNT)}
        for number, (_, make) in enumerate(mix):
            arrays[f"{30 * number + 7:03}"] = make()
        for number, array in enumerate(arrays.values()):
            array[...] = (numpy.arange(array.size).reshape(array.shape) + number) % 100
        expected = {name: numpy.array(array) for name, array in arrays.items()}
        path = tmp_path / "many.safetensors"
        ingot.numpy.save_file(arrays, path)
        # The expected file is written from one capsule per tensor.
        assert path.read_bytes() == _native.serialize(expected, ingot.numpy.payload, None, "safetensors")
        for array in arrays.values():
            array[...] = 0
        ingot.numpy.load_file(path, out=arrays)
        for name, array in arrays.items():
            numpy.testing.assert_array_equal(array, expected[name])


def test_load_file_checks_plain_arrays_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: str, array: object) -> None:
        raise AssertionError(f"{name} was looked at")

    monkeypatch.setattr(ingot.numpy, "_memory", never)
    monkeypatch.setattr(ingot.numpy, "payload", never)
    arrays = {
        f"{number}": numpy.full((3, number % 4), number % 100, DTYPES[number % len(DTYPES)])
        for number in range(COUNT)
    }
    places = {name: numpy.zeros_like(array) for name, array in arrays.items()}
    ingot.numpy.save_file(arrays, tmp_path / "t")
    found = ingot.numpy.load_file(tmp_path / "t", out=places)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name] is places[name]
        numpy.testing.assert_array_equal(places[name], array)


@pytest.mark.parametrize("spoilt", ["read only", "big-endian", "shape", "overlap", "subclass, read only"])
def test_load_file_names_the_array_that_does_not_fit(tmp_path: Path, spoilt: str) -> None:
    arrays = {f"{number:03}": numpy.full((2, 3), number, numpy.float32) for number in range(COUNT)}
    ingot.numpy.save_file(arrays, tmp_path / "t")
    places = {name: numpy.zeros((2, 3), numpy.float32) for name in arrays}
    places["299"] = {
        "read only": places["299"],
        "big-endian": numpy.zeros((2, 3), ">f4"),
        "shape": numpy.zeros((3, 2), numpy.float32),
        "overlap": places["007"],
        "subclass, read only": places["299"].view(Odd),
    }[spoilt]
    places["299"].flags.writeable = "read only" not in spoilt
    with pytest.raises(ingot.DestinationError, match=r"tensor `(299|007)`"):
        ingot.numpy.load_file(tmp_path / "t", out=places)
    assert not any(place.any() for place in places.values())


class TestTorch:
    """torch tensors with a broken storage, which DLPack does not describe."""

    @pytest.fixture(autouse=True)
    def framework(self) -> None:
        self.torch: Any = pytest.importorskip("torch")

    def spoilt(self, what: str) -> Any:
        torch = self.torch
        if what == "negated":
            return torch._neg_view(torch.zeros(2, dtype=torch.bfloat16))
        if what == "negated bytes":
            return torch._neg_view(torch.zeros(2, dtype=torch.int8))
        if what == "conjugated":
            return torch.zeros(2, dtype=torch.complex64).conj()
        return torch.empty(2, dtype=getattr(torch, what))

    @pytest.mark.parametrize("last", [True, False])
    @pytest.mark.parametrize(
        "what",
        [
            "negated",
            "negated bytes",
            "conjugated",
            *(f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)),
        ],
    )
    def test_load_file_rejects_an_overlapping_array_among_many(
        self, tmp_path: Path, what: str, last: bool
    ) -> None:
        torch, load_file = self.torch, ingot.torch.load_file
        if what.lstrip("u").startswith("int") and not hasattr(torch, what):
            pytest.skip(f"torch {torch.__version__} has no {what}")
        place = self.spoilt(what)
        kinds = {"negated": torch.bfloat16, "conjugated": torch.complex64, "negated bytes": torch.int8}
        beneath = kinds.get(what, torch.uint8 if what[0] == "u" else torch.int8)
        stored = {f"{number:03}": torch.full((2,), 1, dtype=beneath) for number in range(COUNT)}
        ingot.torch.save_file(stored, tmp_path / "t")
        name = f"{COUNT - 1 if last else 0:03}"
        places = {key: torch.zeros_like(tensor) for key, tensor in stored.items()} | {name: place}
        with pytest.raises(ingot.DestinationError, match=f"tensor `{name}`"):
            load_file(tmp_path / "t", out=places)
        assert not any(places[key].any() for key in stored if key != name)
        # Without the broken tensor, all others are filled.
        del places[name]
        load_file(tmp_path / "t", out=places)
        assert all(torch.equal(places[key], stored[key]) for key in places)

    def test_load_file_keeps_destinations_alive(self, tmp_path: Path) -> None:
        torch = self.torch
        stored = {f"{number:03}": torch.full((1 << 12,), number + 1.0) for number in range(COUNT)}
        ingot.torch.save_file(stored, tmp_path / "t")
        places = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
        others: list[Any] = []

        class File:
            """A source that frees the memory of the tensors during the read."""

            def __init__(self, file: Any) -> None:
                self.seek, self.tell = file.seek, file.tell
                self.file, self.reads = file, 0

            def read(self, nbytes: int = -1) -> bytes:
                self.reads += 1
                if self.reads > self.before:
                    for place in places.values():
                        place.data = torch.zeros(1)
                    # The allocator reuses freed memory.
                    others.extend(torch.zeros(1 << 12) for _ in places)
                return bytes(self.file.read(nbytes))

            before = 1 << 30

        with open(tmp_path / "t", "rb") as file:
            source = File(file)
            ingot.torch.load_file(source, keys=[])
            source.before, source.reads = source.reads, 0
            ingot.torch.load_file(source, out=places)
        assert others
        assert not any(other.any() for other in others)
