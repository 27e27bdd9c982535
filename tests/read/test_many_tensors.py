"""Thousands of tensors: passed to torch without capsules and without garbage collections."""

from __future__ import annotations

import ctypes
import gc
import random
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch

import ingot
import ingot.numpy
import ingot.torch
from ingot import _native

EXCHANGE = torch.Tensor.__dict__.get("__dlpack_c_exchange_api__")
NAME = b"dlpack_exchange_api"
COUNT = 3000


@pytest.fixture
def path(path: Path) -> Path:
    tensors = {f"layers.{number:04}": numpy.full((2, 3), number, numpy.float32) for number in range(COUNT)}
    ingot.numpy.save_file(tensors, path)
    return path


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


class Table(ctypes.Structure):
    """`DLPackExchangeAPI` of dlpack.h 1.3."""

    To = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("prev_api", ctypes.c_void_p),
        ("managed_tensor_allocator", ctypes.c_void_p),
        ("managed_tensor_from_py_object_no_sync", ctypes.c_void_p),
        ("managed_tensor_to_py_object_no_sync", To),
    )


class Managed(ctypes.Structure):
    """The first fields of `DLManagedTensorVersioned`."""

    Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", Deleter),
    )


def capsule(table: Table, name: bytes = NAME) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(table), name, None)


CALLED: list[int] = []


def refuse(managed: int, made: Any) -> int:
    """Fail without freeing the tensor."""
    CALLED.append(managed)
    return -1


def free_and_refuse(managed: int, made: Any) -> int:
    """Free the tensor, and fail."""
    CALLED.append(managed)
    Managed.from_address(managed).deleter(managed)
    return -1


OTHERS: list[torch.Tensor] = []


def free_with_others_and_refuse(managed: int, made: Any) -> int:
    """Free the tensor and then another one, and fail."""
    OTHERS.pop()
    code = free_and_refuse(managed, made)
    OTHERS.pop()
    return code


class TestExchange:
    """Tensors pass to torch through its C exchange functions, if torch has them."""

    def test_lending_makes_all_torch_tensors(self, path: Path) -> None:
        if EXCHANGE is None:
            pytest.skip(f"torch {torch.__version__} has no such functions")

        def never(capsule: object) -> None:
            raise AssertionError("a capsule was made")

        wrap = _native.Wrap.dlpack(never, lambda code: None, EXCHANGE)
        made = _native.Checkpoint.open(path).tensors(None, wrap)
        expected = safetensors.torch.load_file(path)
        assert list(made) == sorted(expected)
        assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
        assert {type(tensor) for tensor in made.values()} == {torch.Tensor}
        assert {tensor.dtype for tensor in made.values()} == {torch.float32}

    def test_lending_keeps_the_file_until_tensors_are_freed(self, path: Path) -> None:
        tensors = ingot.torch.load_file(path, backend="mmap")
        last = tensors.popitem()[1]
        del tensors
        assert is_mapped(path)
        assert last.flatten().tolist() == [COUNT - 1] * 6
        last += 1
        del last
        assert not is_mapped(path)

    def test_lending_survives_threads_that_free_in_any_order(self, tmp_path: Path, backend: str) -> None:
        path = tmp_path / "mixed.safetensors"
        # Shapes with many dimensions, and tensors large enough for memory of their own.
        shapes = [(2, 3), (1, 2, 1, 3, 1, 1), (0, 4), ()] * 800 + [(1 << 10, 1, 1 << 10, 1, 1, 1)] * 3
        arrays = {f"t{i:04}": numpy.full(shape, i % 251, numpy.uint8) for i, shape in enumerate(shapes)}
        ingot.numpy.save_file(arrays, path)
        tensors = list(ingot.torch.load_file(path, backend=backend).items())
        random.Random(7).shuffle(tensors)
        kept = [tensors.pop() for _ in range(40)]
        freeing = [threading.Thread(target=share.clear) for share in (tensors[::2], tensors[1::2])]
        del tensors
        for thread in freeing:
            thread.start()
        for thread in freeing:
            thread.join()
        for name, tensor in kept:
            assert tensor.shape == arrays[name].shape
            assert tensor.is_contiguous()
            assert (tensor.numpy() == arrays[name]).all()
        assert is_mapped(path) == (backend == "mmap")
        del kept, tensor
        assert not is_mapped(path)

    def test_lending_frees_each_tensor_once(self, path: Path) -> None:
        others = ingot.torch.load_file(path)
        OTHERS.extend(others.values())
        OTHERS.extend(ingot.torch.load_file(path).values())
        del others
        wrap = _native.Wrap.dlpack(
            torch._C._from_dlpack, lambda code: None, capsule(keep(failing(free_with_others_and_refuse)))
        )
        tensors = _native.Checkpoint.open(path, "mmap").tensors(None, wrap)
        assert not OTHERS
        assert [tensor[0, 0].item() for tensor in tensors.values()] == list(range(COUNT))
        del tensors
        assert not is_mapped(path), "memory that nobody frees"

    def test_lending_returns_its_memory(self, path: Path) -> None:
        def load() -> int:
            for _ in range(20):
                ingot.torch.load_file(path)
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

        before = load()
        # A leak of all 3000 tensors would be 0.5 MB a load, and there are 60 loads.
        assert max(load() for _ in range(3)) - before < 8 << 20

    @pytest.mark.parametrize(
        ("other", "calls"),
        [
            pytest.param(lambda: None, 0, id="nothing"),
            pytest.param(lambda: 17, 0, id="a number"),
            pytest.param(lambda: capsule(keep(failing(refuse)), b"another"), 0, id="another capsule"),
            pytest.param(lambda: capsule(keep(failing(refuse, major=2))), 0, id="another version"),
            pytest.param(lambda: capsule(keep(Table(1, 3))), 0, id="no function"),
            pytest.param(lambda: capsule(keep(failing(refuse))), COUNT, id="one that fails"),
            pytest.param(
                lambda: capsule(keep(failing(free_and_refuse))), COUNT, id="one that frees and fails"
            ),
        ],
    )
    def test_lending_falls_back_to_capsules(self, path: Path, other: Callable[[], Any], calls: int) -> None:
        CALLED.clear()
        wrap = _native.Wrap.dlpack(torch._C._from_dlpack, lambda code: None, other())
        checkpoint = _native.Checkpoint.open(path, "mmap")
        tensors = checkpoint.tensors(None, wrap)
        assert [tensor[0, 0].item() for tensor in tensors.values()] == list(range(COUNT))
        assert len(CALLED) == calls
        del checkpoint, tensors
        assert not is_mapped(path), "memory that nobody frees"


TABLES: list[Table] = []


def keep(table: Table) -> Table:
    """Keep a table alive as long as the process, as a framework does, and return it."""
    TABLES.append(table)
    return table


def failing(function: Callable[[int, Any], int], major: int = 1) -> Table:
    table = Table(major, 3)
    table.managed_tensor_to_py_object_no_sync = Table.To(function)
    return table


class TestCollector:
    @pytest.fixture(autouse=True)
    def as_it_was(self) -> Iterator[None]:
        yield
        gc.enable()

    @pytest.fixture
    def collections(self) -> Iterator[list[int]]:
        """Yield a list that receives the generation of each garbage collection."""
        begun: list[int] = []

        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                begun.append(info["generation"])

        gc.callbacks.append(note)
        yield begun
        gc.callbacks.remove(note)

    @pytest.mark.parametrize("sliced", [False, True])
    def test_collector_runs_at_most_once(self, path: Path, collections: list[int], sliced: bool) -> None:
        checkpoint = _native.Checkpoint.open(path)
        wanted = (checkpoint.names(), [0] * len(checkpoint), None)

        def load() -> list[torch.Tensor]:
            if sliced:
                return checkpoint.parts(wanted, ingot.torch.wrap)
            return list(checkpoint.tensors(None, ingot.torch.wrap).values())

        load()
        gc.collect()
        collections.clear()
        tensors = load()
        found = len(collections)
        assert gc.is_tracked(tensors[0])
        assert len(tensors) > gc.get_threshold()[0], "enough for it to start of itself"
        assert found <= 1

    @pytest.mark.parametrize("asked", ["out", "dtype"])
    def test_collector_runs_for_no_probe(self, path: Path, collections: list[int], asked: str) -> None:
        places = ingot.torch.load_file(path)
        options = {"out": {"out": places}, "dtype": {"dtype": torch.float64}}[asked]
        ingot.torch.load_file(path, **options)
        gc.collect()
        collections.clear()
        tensors = ingot.torch.load_file(path, **options)
        found = len(collections)
        assert len(tensors) > 4 * gc.get_threshold()[0], "enough for it to start of itself"
        assert found <= 2

    def test_collector_stays_off_if_disabled(self, path: Path) -> None:
        gc.disable()
        ingot.torch.load_file(path)
        assert not gc.isenabled()

    def test_collector_is_enabled_after_a_failure(self, path: Path) -> None:
        made: list[bool] = []

        def make(capsule: object) -> None:
            made.append(gc.isenabled())
            if len(made) > COUNT // 2:
                raise KeyboardInterrupt

        wrap = _native.Wrap.dlpack(make, lambda code: None)
        with pytest.raises(KeyboardInterrupt):
            _native.Checkpoint.open(path).tensors(None, wrap)
        assert set(made) == {False}
        assert gc.isenabled()


class Name(str):
    """A string that need not be equal to one with the same text."""


def test_offset_names_returns_known_strings_where_names_are_equal(path: Path) -> None:
    with ingot.safe_open(path, "np") as file:
        names = file.offset_keys()
    checkpoint = _native.Checkpoint.open(path)
    known = ["".join(name) for name in names[:5]]
    assert not any(own is name for own, name in zip(known, names, strict=False))
    known[2:4] = ["layers.9999", Name(known[3])]
    found = checkpoint.offset_names(known)
    assert found == names
    assert [any(own is name for own in known) for name in found[:6]] == [
        True,
        True,
        False,
        False,
        True,
        False,
    ]
    assert checkpoint.offset_names([*names, "more"]) == checkpoint.offset_names() == names
