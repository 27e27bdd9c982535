"""The vectors of `tests/vectors` through the Python package, and the Python program of FORMAT.md."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

import ingot
from ingot._native import Checkpoint
from vectors.case import Vector, from_hex, vectors, writings

FORMAT_MD = Path(__file__).parents[2] / "crates" / "format" / "FORMAT.md"
ACCEPTED = [pytest.param(vector, id=vector.name) for vector in vectors() if vector.accepted]
REJECTED = [pytest.param(vector, id=vector.name) for vector in vectors() if not vector.accepted]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a path whose name has no extension of a format."""
    return tmp_path / "file.bin"


def options(vector: Vector) -> dict[str, Any]:
    return {} if vector.limit is None else {"max_header_size": vector.limit}


def backend_of(vector: Vector) -> Any:
    """Return one of the backends, which read all headers in the same way."""
    return ("auto", "mmap", "pread")[crc32(vector.name.encode()) % 3]


def rows(checkpoint: Any, names: Iterable[str]) -> list[list[Any]]:
    """Return the tensors of a checkpoint or a handle in the form of a vector."""
    entries = [checkpoint.info(name) for name in names]
    return [[entry.name, entry.dtype, list(entry.shape), entry.begin, entry.end] for entry in entries]


@pytest.mark.parametrize("vector", ACCEPTED)
def test_vectors_that_are_accepted_are_read(vector: Vector, path: Path) -> None:
    file = vector.file()
    checkpoint = Checkpoint.from_buffer(file, **options(vector))
    assert checkpoint.format == vector.format
    assert checkpoint.path is None
    found = rows(checkpoint, checkpoint.offset_names())
    assert found == vector.keys.get("tensors", found)
    assert checkpoint.names() == sorted(checkpoint.offset_names(), key=str.encode)
    metadata = checkpoint.metadata()
    assert metadata == vector.keys.get("metadata", metadata)
    # The data section is the rest of the file, and every byte of it belongs to one tensor, in this order.
    data = file[8 + int.from_bytes(file[:8], "little") :]
    assert b"".join(tensor["data"] for _, tensor in ingot.deserialize(file)) == data
    path.write_bytes(file)
    with ingot.safe_open(path, "np", backend=backend_of(vector), **options(vector)) as opened:
        assert opened.format == vector.format
        assert rows(opened, opened.offset_keys()) == found
        assert opened.metadata() == metadata
        assert len(opened) == len(found)
    if vector.strictly_accepted:
        Checkpoint.from_buffer(file, leniency="refuse", **options(vector))
        return
    with pytest.raises(ingot.HeaderError) as caught:
        Checkpoint.from_buffer(file, leniency="refuse", **options(vector))
    assert caught.value.code == "not-strict"


@pytest.mark.parametrize("buffer", [bytearray, memoryview])
def test_vectors_are_read_from_any_buffer(buffer: Any) -> None:
    for vector in vectors():
        if vector.accepted and vector.limit is None:
            assert ingot.deserialize(buffer(vector.file())) == ingot.deserialize(vector.file())


@pytest.mark.parametrize("vector", REJECTED)
def test_vectors_that_are_rejected_are_refused(vector: Vector, path: Path) -> None:
    for leniency in ("accept", "refuse"):
        with pytest.raises(ingot.HeaderError) as caught:
            Checkpoint.from_buffer(vector.file(), leniency, **options(vector))
        assert caught.value.code == vector.code
        assert caught.value.path is None
        assert isinstance(caught.value, ValueError)
        assert str(caught.value).isprintable()
    path.write_bytes(vector.file())
    opening = partial(ingot.safe_open, path, "np", backend=backend_of(vector), **options(vector))
    if vector.name == "index-json":
        # The contents decide the format, not the name. The error is for the missing shard.
        with pytest.raises(FileNotFoundError, match=r"model-00001-of-00002\.safetensors"):
            opening()
        return
    with pytest.raises(ingot.HeaderError) as caught:
        opening()
    assert caught.value.code == vector.code
    assert caught.value.path == str(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).isprintable()
    # A name of 100 MB must not fill the screen.
    assert len(str(caught.value)) < 1000 + len(str(path))


@pytest.mark.parametrize("leniency", ["accept", "refuse"])
def test_vectors_that_are_rejected_have_tensor_and_numbers(leniency: Any) -> None:
    def fault(name: str) -> ingot.HeaderError:
        (vector,) = (vector for vector in vectors() if vector.name == name)
        with pytest.raises(ingot.HeaderError) as caught:
            Checkpoint.from_buffer(vector.file(), leniency=leniency)
        return caught.value

    mismatch = fault("range-too-short")
    assert (mismatch.tensor, mismatch.expected, mismatch.found) == ("a", 24, 20)
    assert (mismatch.begin, mismatch.end) == (0, 20)
    hole = fault("hole-in-the-middle")
    assert (hole.tensor, hole.begin, hole.end) == ("b", 1, 2)
    truncated = fault("data-one-byte-short")
    assert (truncated.tensor, truncated.expected, truncated.found) == ("a", 2, 1)
    past_end = fault("header-far-past-the-end")
    assert (past_end.expected, past_end.found) == (100_000_007, 10)
    assert "Git LFS" in str(fault("git-lfs-pointer"))
    assert "NUL" in str(fault("nul-padding"))


def zeros(shape: list[int], dtype: str) -> bytes:
    """Return zeros for a tensor to write, or no bytes if the tensor fits into no memory."""
    bits = 8 if dtype == "BOOL" else int(re.findall(r"\d+", dtype)[0])
    nbytes = prod(shape) * bits // 8
    return bytes(nbytes) if nbytes < 1000 else b""


# A dict cannot hold a name twice, and no memory holds tensors whose sizes only overflow when they are added.
IN_RUST_ONLY = {"refuse-name-twice", "refuse-bt-name-twice", "refuse-sum-overflow"}
WRITINGS = [case for case in writings() if case["name"] not in IN_RUST_ONLY]


@pytest.mark.parametrize("writing", [pytest.param(case, id=case["name"]) for case in WRITINGS])
def test_vectors_are_written_as_stated(writing: dict[str, Any]) -> None:
    names = [name for name, _, _ in writing["tensors"]]
    tensors = {
        name: {"dtype": dtype, "shape": shape, "data": zeros(shape, dtype)}
        for name, dtype, shape in writing["tensors"]
    }
    format = writing.get("format", "safetensors")
    if "code" in writing:
        with pytest.raises(ingot.SaveError) as caught:
            ingot.serialize(tensors, writing.get("metadata"), format=format)
        assert caught.value.code == writing["code"]
        return
    head = from_hex(writing["head_hex"])
    file = ingot.serialize(tensors, writing.get("metadata"), format=format)
    assert file[: len(head)] == head
    assert not any(file[len(head) :])
    assert ingot.serialize(dict(reversed(tensors.items())), writing.get("metadata"), format=format) == file
    assert [name for name, _ in ingot.deserialize(file)] == [names[at] for at in writing["order"]]


def python_program() -> str:
    (program,) = re.findall(r"(?s)```python\n(.*?)```", FORMAT_MD.read_text("utf-8"))
    return program


@pytest.fixture
def read_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Vector], dict[str, Any]]:
    """Run the Python program of FORMAT.md on a vector's file, and return its variables."""
    program = tmp_path / "read_header.py"
    program.write_text(python_program(), "utf-8")
    path = tmp_path / "model.safetensors"
    monkeypatch.setattr(sys, "argv", [str(program), str(path)])

    def run(vector: Vector) -> dict[str, Any]:
        path.write_bytes(vector.file())
        return runpy.run_path(str(program))

    return run


JSON = [vector for vector in vectors() if vector.format == "safetensors" and vector.limit is None]


def test_format_md_program_prints_the_tensors(
    read_header: Callable[[Vector], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    (vector,) = (vector for vector in JSON if vector.name == "range-fits")
    read_header(vector)
    assert capsys.readouterr().out == "a F32 [2, 3] 24 bytes\n"


def test_format_md_program_reads_accepted_vectors(
    read_header: Callable[[Vector], dict[str, Any]],
) -> None:
    for vector in JSON:
        # FORMAT.md states that its program rejects this file.
        if not vector.accepted or vector.name == "unknown-field-twice":
            continue
        found = read_header(vector)
        checkpoint = Checkpoint.from_buffer(vector.file())
        assert found["metadata"] == (checkpoint.metadata() or {}), vector.name
        ranges = {name: entry["data_offsets"] for name, entry in found["entries"].items()}
        assert ranges == {
            name: [begin, end] for name, _, _, begin, end in rows(checkpoint, checkpoint.names())
        }


def test_format_md_program_checks_its_rules(
    read_header: Callable[[Vector], dict[str, Any]],
) -> None:
    for vector in JSON:
        if not vector.accepted and vector.keys["rule"] in {"F1", "F2", "F3", "F4", "F6", "F7"}:
            with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
                read_header(vector)
