"""Files of the formats that ingot parses itself, with randomly changed bytes.

Each file is converted to the values that NumPy, msgpack or torch reads, or rejected with one error and no
output.

`INGOT_FILES` sets the number of files of each format; `make nightly` tries more.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgpack
import numpy
import pytest
import torch

import ingot
from ingot._convert.limits import Budget, limits
from ingot._convert.source import Stream
from ingot._convert.sources import flax as our_msgpack
from ingot.numpy import load_file
from support.mutants import mutant
from support.record import note

pytestmark = pytest.mark.slow

# Files of each format, and files of one test: each test must end in time on a busy machine.
FILES = int(os.environ.get("INGOT_FILES", "1500"))
FILES_OF_ONE_TEST = 500
WEIGHT = numpy.arange(24, dtype=numpy.float32).reshape(4, 6)
TREE: dict[str, Any] = {
    "a": WEIGHT,
    "b": numpy.asfortranarray(WEIGHT[:, :2]),
    "c": numpy.array([1, 2, 3], ">i4"),
    "d": numpy.array([True, False]),
    "e": numpy.float64(2.5),
    "f": numpy.zeros((0, 3), numpy.uint8),
}


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    numpy.lib.format.write_array(file, numpy.asanyarray(array), version)
    return file.getvalue()


def npz(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    save(file, **TREE, o=numpy.array([None, "x"], object))
    return file.getvalue()


def flax(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: flax(value) for key, value in tree.items()}
    array = numpy.ascontiguousarray(tree)
    return msgpack.ExtType(
        1, msgpack.packb((array.shape, array.dtype.name, array.tobytes()), use_bin_type=True)
    )


def torch_file(**options: Any) -> bytes:
    weight = torch.from_numpy(WEIGHT.copy())
    file = io.BytesIO()
    torch.save(
        {
            "a": weight,
            "t": weight.t(),
            "row": weight[1],
            "h": weight.half(),
            "n": {"x": torch.ones(2)},
            "epoch": 3,
        },
        file,
        **options,
    )
    return file.getvalue()


def gguf_file() -> bytes:
    path = Path("seed.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("some.number", 3)
    writer.add_array("some.words", ["a", "bc"])
    writer.add_tensor("a", WEIGHT)
    writer.add_tensor("h", WEIGHT.astype(numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    path.unlink()
    return data


# The name of a file, and files of that format.
SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "in.npy": lambda: [*(npy(array) for array in TREE.values()), npy(WEIGHT, (2, 0)), npy(WEIGHT, (3, 0))],
    "in.npz": lambda: [npz(numpy.savez), npz(numpy.savez_compressed)],
    "in.msgpack": lambda: [
        msgpack.packb({"params": flax(TREE), "step": 3, "names": ["x", None, 1.5]}, use_bin_type=True),
        msgpack.packb(flax({"long": {"w": numpy.zeros(3000, numpy.float32)}}), use_bin_type=True),
    ],
    "in.pdparams": lambda: [pickle.dumps({**TREE, "epoch": 3}, protocol) for protocol in (2, 4)],
    "in.pt": lambda: [torch_file(), torch_file(_use_new_zipfile_serialization=False)],
    "in.gguf": lambda: [gguf_file()],
}


def equal(found: Any, expected: Any) -> bool:
    """Return whether two arrays are equal to the byte, in native byte order."""
    expected = numpy.asarray(expected)
    native = expected.astype(expected.dtype.newbyteorder("="))
    return bool(
        found.dtype == native.dtype and found.shape == native.shape and found.tobytes() == native.tobytes()
    )


def as_numpy_reads_it(data: bytes, found: dict[str, Any]) -> None:
    read = numpy.load(io.BytesIO(data), allow_pickle=False)
    arrays = {"tensor": read} if isinstance(read, numpy.ndarray) else read
    for name, array in found.items():
        assert equal(array, arrays[name]), name


def as_msgpack_reads_it(data: bytes, found: dict[str, Any]) -> None:
    stream = Stream("x", io.BytesIO(data), end=len(data), has_spans=False)
    mine = our_msgpack.load(stream, Budget("x", limits(len(data), None)))
    if "kind=-1," in repr(mine):
        # msgpack decodes extension -1 as a time, or rejects it. ingot leaves it out.
        return
    theirs = msgpack.unpackb(data, strict_map_key=False, ext_hook=our_msgpack.Extension)
    # NaN differs from itself.
    assert repr(mine) == repr(theirs)


def as_torch_reads_it(data: bytes, found: dict[str, Any]) -> None:
    try:
        read = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except ValueError:
        # torch rejects text of Python 2 that is not UTF-8, and an invalid alignment.
        return
    for name, array in found.items():
        tensor = read
        for key in name.split("."):
            tensor = tensor[key]
        assert equal(array, tensor.numpy()), name


ORACLES: dict[str, Callable[[bytes, dict[str, Any]], None]] = {
    "in.npy": as_numpy_reads_it,
    "in.npz": as_numpy_reads_it,
    "in.msgpack": as_msgpack_reads_it,
    "in.pt": as_torch_reads_it,
}


def converted(name: str, data: bytes) -> bool:
    """Return whether a file is converted. Check the result if it is."""
    out = Path("out.safetensors")
    Path(name).write_bytes(data)
    out.write_bytes(b"old")
    try:
        ingot.convert(name, out, overwrite=True)
    except (ingot.ConversionError, ingot.SaveError) as error:
        said = str(error)
        # An error about a limit of the new file names the new file.
        about = name if isinstance(error, ingot.ConversionError) else out.name
        assert about in said
        assert "Cc" not in map(unicodedata.category, said), repr(said)
        assert out.read_bytes() == b"old"
        return False
    finally:
        assert sorted(os.listdir()) == sorted([name, out.name])
    found = load_file(out, backend="pread")
    if check := ORACLES.get(name):
        check(data, found)
    return True


@pytest.mark.parametrize("first", range(0, FILES, FILES_OF_ONE_TEST))
@pytest.mark.parametrize("name", SEEDS)
@pytest.mark.filterwarnings("ignore")
def test_convert_of_changed_bytes_agrees_with_other_readers_or_fails(name: str, first: int) -> None:
    seeds = SEEDS[name]()
    number, wrong, right = first, 1, 0
    try:
        for number in range(first, first + FILES_OF_ONE_TEST):
            right += converted(name, mutant(seeds, random.Random(f"{name} {number}")))
        wrong = 0
    finally:
        note(f"mutants of files, {name.removeprefix('in.')}", number - first + 1, wrong)
    assert 0 < right < FILES_OF_ONE_TEST
