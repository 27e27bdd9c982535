"""`safe_open`: its results, its behaviour as a mapping, and closing."""

from __future__ import annotations

import gc
import io
import mmap
import pickle
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch
from support.errors import raises

TENSORS = {
    "b": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
    "a": numpy.arange(4, dtype=numpy.int8),
    "c": numpy.array(2.5),
}


@pytest.fixture(params=["model.safetensors", "model.bt"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    ingot.numpy.save_file(TENSORS, path, {"format": "np"})
    return path


def test_safe_open_lists_the_file(path: Path) -> None:
    with ingot.safe_open(path, "np") as file:
        assert file.keys() == ["a", "b", "c"]
        assert file.offset_keys() == ["c", "b", "a"]
        assert file.format == ("bintensors" if path.suffix == ".bt" else "safetensors")
        assert file.path == str(path)
        assert file.backend in ("mmap", "pread")
        assert file.why
        assert repr(file) == f"<ingot.safe_open {path}: {file.format}, {file.backend}, 3 tensors>"
        info = file.info("b")
        assert (info.name, info.dtype, info.shape) == ("b", "F32", (2, 3))
        assert (info.begin, info.end, info.nbytes) == (8, 32, 24)


def test_metadata_is_a_fresh_dict(path: Path) -> None:
    with ingot.safe_open(path, "np") as file:
        metadata = file.metadata()
        assert metadata == {"format": "np"}
        metadata.pop("format")
        assert file.metadata() == {"format": "np"}


def test_metadata_may_be_none(tmp_path: Path) -> None:
    ingot.numpy.save_file(TENSORS, tmp_path / "t")
    with ingot.safe_open(tmp_path / "t", "np") as file:
        assert file.metadata() is None


def test_get_tensors_returns_the_tensors_in_order(path: Path) -> None:
    with ingot.safe_open(path, "np") as file:
        assert list(file.get_tensors()) == ["c", "b", "a"]
        assert list(file.get_tensors(name for name in ("c", "a"))) == ["c", "a"]
        assert file.get_tensors([]) == {}
        assert list(file.get_tensors("a", drop="b")) == ["a"]
        with pytest.raises(TypeError):
            file.get_tensor(3)  # type: ignore[arg-type]


def test_safe_open_has_the_keywords_of_upstream(path: Path) -> None:
    with ingot.safe_open(filename=str(path), framework="pt", device="cpu") as file:
        assert torch.equal(file.get_tensor(name="a"), torch.arange(4, dtype=torch.int8))


def test_closed_handle_raises_closed_error(path: Path) -> None:
    file = ingot.safe_open(path, "np")
    file.close()
    file.close()
    questions: list[Callable[[], Any]] = [
        file.keys,
        file.offset_keys,
        file.metadata,
        file.get_tensors,
        file.__enter__,
        lambda: file.get_tensor("a"),
        lambda: file.get_slice("a"),
        lambda: file.info("a"),
        lambda: file["a"],
        lambda: len(file),
        lambda: "a" in file,
        lambda: list(file),
        lambda: list(file.items()),
        lambda: pickle.dumps(file),
    ]
    for ask in questions:
        with raises(ingot.ClosedError, "file is closed", code="closed", path=str(path)):
            ask()
    assert repr(file).endswith("closed>")
    assert file.path == str(path)


def test_slices_and_tensors_outlive_the_handle(path: Path, backend: str) -> None:
    with ingot.safe_open(path, "np", backend=backend) as file:
        part, tensor = file.get_slice("b"), file["b"]
    del file
    gc.collect()
    assert (part[:, 1] == TENSORS["b"][:, 1]).all()
    assert part.get_shape() == [2, 3]
    assert part.get_dtype() == "F32"
    assert (part[[[True, False, True]] * 2] == TENSORS["b"][:, [0, 2]].reshape(-1)).all()
    assert (tensor == TENSORS["b"]).all()


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_tensors_are_writable_and_the_file_stays(path: Path, backend: str, framework: str) -> None:
    before = path.read_bytes()
    with ingot.safe_open(path, framework, backend=backend) as file:
        tensor = file["b"]
        tensor[:] = -1
        assert (file.get_slice("a")[...] == tensor.sum() * 0 + file["a"]).all()
    assert (tensor == -1).all()
    assert path.read_bytes() == before


def test_load_copies_the_bytes() -> None:
    data = bytearray(ingot.numpy.save(TENSORS))
    original = bytes(data)
    from_numpy, from_torch = ingot.numpy.load(data), ingot.torch.load(data)
    data[-len(data) // 2 :] = b"\xff" * (len(data) // 2)
    assert (from_numpy["b"] == TENSORS["b"]).all()
    assert torch.equal(from_torch["b"], torch.from_numpy(TENSORS["b"]))
    frozen = ingot.torch.load(original)
    frozen["b"].zero_()
    assert original == ingot.numpy.save(TENSORS)


def test_load_reads_any_buffer(tmp_path: Path) -> None:
    data = ingot.numpy.save(TENSORS)
    file = tmp_path / "t"
    file.write_bytes(data)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for buffer in (data, bytearray(data), memoryview(data), numpy.frombuffer(data, numpy.uint8), mapped):
            assert list(ingot.numpy.load(buffer)) == ["c", "b", "a"]
            assert [name for name, _ in ingot.deserialize(buffer)] == ["c", "b", "a"]
    for no_buffer in ("text", 3, None):
        for read in (ingot.numpy.load, ingot.torch.load, ingot.deserialize):
            with pytest.raises(TypeError):
                read(no_buffer)  # type: ignore[operator]


def test_deserialize_returns_bytearrays_in_file_order() -> None:
    tensors = {
        "x": {"dtype": "F32", "shape": [1], "data": b"abcd"},
        "y": {"dtype": "float64", "shape": (1,), "data": bytearray(8)},
        "z": {"dtype": "float4_e2m1fn_x2", "shape": [2, 1], "data": memoryview(b"ab")},
        "f6": {"dtype": "F6_E2M3", "shape": [4], "data": b"abc"},
        "0d": {"dtype": "int16", "shape": [], "data": numpy.array(513, numpy.int16)},
    }
    found = ingot.deserialize(ingot.serialize(tensors, {"k": "v"}))
    assert found == [
        ("y", {"dtype": "F64", "shape": [1], "data": bytearray(8)}),
        ("x", {"dtype": "F32", "shape": [1], "data": bytearray(b"abcd")}),
        ("0d", {"dtype": "I16", "shape": [], "data": bytearray(b"\1\2")}),
        ("f6", {"dtype": "F6_E2M3", "shape": [4], "data": bytearray(b"abc")}),
        ("z", {"dtype": "F4", "shape": [2, 2], "data": bytearray(b"ab")}),
    ]
    assert all(type(entry["data"]) is bytearray for _, entry in found)


def test_safe_open_is_pickled_by_path(path: Path) -> None:
    with ingot.safe_open(path, "pt", backend="pread") as file:
        other = pickle.loads(pickle.dumps(file))
    assert other.backend == "pread"
    assert torch.equal(other["b"], torch.from_numpy(TENSORS["b"]))


def at_once(work: Callable[[int], object], count: int = 16) -> None:
    """Run `work` on `count` threads that start together, and raise the error of one of them."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(begin, number) for number in range(count)]:
            done.result()


def test_safe_open_serves_sixteen_threads(path: Path, backend: str) -> None:
    file = ingot.safe_open(path, "np", backend=backend)

    def right(found: Iterable[tuple[str, Any]]) -> bool:
        tensors = dict(found)
        return all((tensors.pop(name) == array).all() for name, array in TENSORS.items()) and not tensors

    def pickled() -> bool:
        with pickle.loads(pickle.dumps(file)) as other:
            return bool((other["b"] == TENSORS["b"]).all())

    def prefetched() -> bool:
        with file.prefetch() as loader:
            return right(loader)

    questions: list[Callable[[], bool]] = [
        lambda: (file["b"] == TENSORS["b"]).all(),
        lambda: file.get_slice("b")[1, 2] == 5,
        lambda: right(file.get_tensors().items()),
        lambda: right(file.items()),
        lambda: file.keys() == ["a", "b", "c"] and file.metadata() == {"format": "np"},
        lambda: file.info("c").shape == () and "d" not in file and file.get("d") is None,
        pickled,
        prefetched,
    ]

    def ask(number: int) -> None:
        for turn in range(50):
            # Each thread requests in another order.
            question = (number + turn * (1 + number % 4)) % len(questions)
            assert questions[question](), question

    at_once(ask)
    file.close()


def test_safe_open_lists_choices_for_an_unknown_one(path: Path) -> None:
    with pytest.raises(ingot.OptionError, match="numpy, np, torch, pt, pytorch"):
        ingot.safe_open(path, "nope")
    with pytest.raises(TypeError):
        ingot.safe_open(path, 3)  # type: ignore[arg-type]
    with pytest.raises(ingot.OptionError, match="cpu"):
        ingot.safe_open(path, "np", device="cuda:0")
    for call in (ingot.torch.load_file, lambda path, device: ingot.safe_open(path, "pt", device)):
        with pytest.raises(ingot.OptionError, match="nope"):
            call(path, device="nope")
        with pytest.raises(TypeError):
            call(path, device=1.5)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", None, torch.device("cpu")])
def test_safe_open_takes_every_name_of_the_cpu(path: Path, device: object) -> None:
    assert ingot.torch.load_file(path, device)["a"].device.type == "cpu"


def test_safe_open_on_meta_has_shapes_and_dtypes(path: Path) -> None:
    loaded = ingot.torch.load_file(path, device="meta")
    assert {name: (tensor.device.type, tuple(tensor.shape)) for name, tensor in loaded.items()} == {
        name: ("meta", array.shape) for name, array in TENSORS.items()
    }
    with ingot.safe_open(path, "pt", device="meta") as file:
        assert file["b"].is_meta
        assert file.get_slice("b")[0].is_meta
        assert file.get_slice("b")[torch.tensor([0])].is_meta


@pytest.mark.parametrize(
    "source", [lambda path: path, lambda path: io.BytesIO(path.read_bytes())], ids=["path", "object"]
)
def test_safe_open_passes_strict_and_the_limit(tmp_path: Path, source: Callable[[Path], Any]) -> None:
    path = tmp_path / "t"
    ingot.numpy.save_file(TENSORS, path)
    with raises(ingot.HeaderError, code="header-too-large"):
        ingot.safe_open(source(path), "np", max_header_size=10)
    path.write_bytes(b"\x0a\0\0\0\0\0\0\0" + b" {}".ljust(10))
    assert len(ingot.safe_open(source(path), "np")) == 0
    with raises(ingot.HeaderError, code="not-strict"):
        ingot.safe_open(source(path), "np", strict=True)
