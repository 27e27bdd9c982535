"""ingot against the wheels of safetensors and bintensors.

The wheels accept every file that ingot accepts, and all bytes of all tensors are equal. DIFFERENCES.toml
lists every difference, and nothing else.
"""

from __future__ import annotations

import ctypes
import json
import tomllib
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import bintensors
import bintensors.numpy
import ml_dtypes
import numpy
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import ingot
import ingot.numpy
from ingot._native import Checkpoint
from vectors.case import Vector, from_hex, vectors, writings
from vectors.measure_upstream import VERSIONS, deserialize

DIFFERENCES = tomllib.loads((Path(__file__).parent / "DIFFERENCES.toml").read_text("utf-8"))["difference"]
LISTED = {name: difference for difference in DIFFERENCES for name in difference["vectors"]}
FORMATS = ["safetensors", "bintensors"]
FORMAT_OF = {vector.name: vector.format for vector in vectors()}


def ours(file: bytes, limit: int | None = None) -> tuple[str, list[tuple[str, dict[str, Any]]] | None]:
    """Return the code of ingot's error, or an empty code and the tensors."""
    try:
        Checkpoint.from_buffer(file, max_header_size=limit)
    except ingot.HeaderError as fault:
        return str(fault.code), None
    return "", ingot.deserialize(file)


def by_name(tensors: list[tuple[str, dict[str, Any]]]) -> dict[str, tuple[str, list[int], bytes]]:
    # Each library lists tensors in an order of its own, which has no meaning (FORMAT.md).
    return {name: (tensor["dtype"], list(tensor["shape"]), bytes(tensor["data"])) for name, tensor in tensors}


def metadata_upstream(format: str, path: Path) -> dict[str, str] | None:
    with (bintensors if format == "bintensors" else safetensors).safe_open(path, "np") as file:
        return file.metadata()


def test_differences_name_the_installed_wheels() -> None:
    for package, versions in VERSIONS.items():
        assert version(package) in versions


@pytest.mark.parametrize("vector", [pytest.param(vector, id=vector.name) for vector in vectors()])
def test_vectors_are_judged_as_stated(vector: Vector, tmp_path: Path) -> None:
    code, mine = ours(vector.file(), vector.limit)
    theirs = deserialize(vector.format, vector.file())
    assert vector.accepted_upstream == (theirs is not None), "`upstream` is not what was measured"
    difference = LISTED.get(vector.name)
    if difference is not None:
        assert (difference["ours"], difference["upstream"]) == (
            "reject" if mine is None else "accept",
            "reject" if theirs is None else "accept",
        ), "the difference in DIFFERENCES.toml is not there"
        assert difference["ours"] != difference["upstream"]
        assert code in difference["codes"]
        return
    assert (mine is None) == (theirs is None), "a difference that DIFFERENCES.toml does not list"
    if mine is not None and theirs is not None:
        assert by_name(mine) == by_name(theirs)
        path = tmp_path / "file"
        path.write_bytes(vector.file())
        assert Checkpoint.from_buffer(vector.file()).metadata() == metadata_upstream(vector.format, path)


def test_differences_are_well_kept() -> None:
    names = [name for difference in DIFFERENCES for name in difference["vectors"]]
    assert len(set(names)) == len(names)
    assert set(names) <= {vector.name for vector in vectors()} | {case["name"] for case in writings()}
    assert all(difference["reason"].strip() for difference in DIFFERENCES)


def codes_of_differences(format: str) -> set[str]:
    return {
        code
        for difference in DIFFERENCES
        for name in difference["vectors"]
        if FORMAT_OF.get(name) == format
        for code in difference.get("codes", [])
    }


def agree(format: str, file: bytes) -> None:
    """Check that the wheels agree with ingot to the byte, except for the listed codes."""
    code, mine = ours(file)
    theirs = deserialize(format, file)
    if mine is not None:
        if Checkpoint.from_buffer(file).format != format:
            return
        assert theirs is not None, file
        assert by_name(mine) == by_name(theirs), file
    elif theirs is not None:
        assert code in codes_of_differences(format), file


# Bytes with a meaning in a header, and their neighbours.
TELLING = b'\x00\x01\x02\n\x0f "+,-.019:[\\]_aeU{}\x80\xed\xfa\xfb\xfc\xfd\xfe\xff'
SHORT = [vector for vector in vectors() if len(vector.file()) < 200]


@pytest.mark.parametrize("vector", [pytest.param(vector, id=vector.name) for vector in SHORT])
def test_vectors_with_one_byte_changed_agree(vector: Vector) -> None:
    file = vector.file()
    nbytes = int.from_bytes(file[:8], "little")
    # The stored length is adjusted if a byte is inserted or removed, so that the change stays in the header.
    shorter, longer = (((nbytes + by) % 2**64).to_bytes(8, "little") for by in (-1, 1))
    for at in range(len(file)):
        agree(vector.format, file[:at])
        agree(vector.format, file[:at] + file[at + 1 :])
        agree(vector.format, shorter + file[8:at] + file[max(at, 8) + 1 :])
        for byte in TELLING:
            agree(vector.format, file[:at] + bytes([byte]) + file[at + 1 :])
            agree(vector.format, longer + file[8:at] + bytes([byte]) + file[max(at, 8) :])


DTYPES = {
    "safetensors": ["bool", "u1", "i1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<c8", "<f8", "<i8", "<u8"],
    "bintensors": ["bool", "u1", "i1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<f8", "<i8", "<u8"],
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def tensors(format: str) -> st.SearchStrategy[dict[str, Any]]:
    shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    plain = st.sampled_from(DTYPES[format]).flatmap(lambda dtype: arrays.arrays(dtype, shapes))
    brain = arrays.arrays("<u2", shapes).map(lambda array: array.view(ml_dtypes.bfloat16))
    reserved = {"__metadata__"} if format == "safetensors" else set()
    names = TEXT.filter(lambda name: name not in reserved)
    return st.dictionaries(names, plain | brain, max_size=6)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def upstream(format: str) -> Any:
    return bintensors.numpy if format == "bintensors" else safetensors.numpy


def header_and_data(file: bytes) -> tuple[Any, bytes]:
    begin = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:begin]), file[begin:]


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_files_agree(format: str, data: st.DataObject) -> None:
    given_tensors = data.draw(tensors(format))
    metadata = data.draw(st.none() | st.dictionaries(TEXT, TEXT, max_size=3))
    if metadata is not None and not metadata and not given_tensors and format == "safetensors":
        return  # DIFFERENCES.toml, write-empty-metadata.
    theirs = upstream(format).save(given_tensors, metadata)
    mine = ingot.numpy.save(given_tensors, metadata, format=format)
    if format == "bintensors" or len(metadata or {}) < 2:
        assert mine == theirs
    else:  # DIFFERENCES.toml, write-metadata-sorted-and-escaped.
        assert header_and_data(mine) == header_and_data(theirs)
        assert len(mine) == len(theirs)
    same(ingot.numpy.load(theirs), given_tensors)
    assert Checkpoint.from_buffer(theirs).metadata() == metadata
    expected = {name: (array.shape, array.tobytes()) for name, array in given_tensors.items()}
    tensors_upstream = deserialize(format, mine)
    assert tensors_upstream is not None
    assert {name: (tuple(t["shape"]), bytes(t["data"])) for name, t in tensors_upstream} == expected


# The wheels' names of the dtypes that they can write, and the bytes of an element.
SPELLED = {
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
}


def written_upstream(writing: dict[str, Any]) -> bytes:
    metadata = writing.get("metadata")
    zeros = ctypes.create_string_buffer(64)
    tensors: dict[str, Any] = {}
    for name, code, shape in writing["tensors"]:
        dtype, nbytes = SPELLED[code]
        nbytes *= prod(shape)
        assert nbytes <= len(zeros)
        if writing.get("format") == "bintensors":
            tensors[name] = {"dtype": dtype, "shape": shape, "data": bytes(nbytes)}
        else:
            address = ctypes.addressof(zeros)
            tensors[name] = safetensors.TensorSpec(
                dtype=dtype, shape=shape, data_ptr=address, data_len=nbytes
            )
    package = bintensors if writing.get("format") == "bintensors" else safetensors
    return bytes(package.serialize(tensors, metadata))


WRITTEN = [
    case
    for case in writings()
    if "code" not in case and {code for _, code, _ in case["tensors"]} <= set(SPELLED)
]


@pytest.mark.parametrize("writing", [pytest.param(case, id=case["name"]) for case in WRITTEN])
def test_written_files_agree(writing: dict[str, Any]) -> None:
    head = from_hex(writing["head_hex"])
    difference = LISTED.get(writing["name"])
    if difference is None:
        assert written_upstream(writing)[: len(head)] == head
    elif difference["upstream"] == "writes-what-it-cannot-read":
        assert deserialize("safetensors", written_upstream(writing)) is None
    else:
        # Three keys have six orders. Twenty files in ingot's order by chance are practically impossible.
        found = {written_upstream(writing) for _ in range(20)}
        assert found != {head + b"\0"}
        assert all(header_and_data(file) == header_and_data(head + b"\0") for file in found)


def test_upstream_writes_a_tensor_named_like_the_metadata() -> None:
    assert LISTED["refuse-name-of-the-metadata"]["upstream"] == "writes-what-it-cannot-read"
    file = safetensors.numpy.save({"__metadata__": numpy.zeros(1, numpy.uint8)})
    assert deserialize("safetensors", file) is None
    with pytest.raises(ingot.SaveError):
        ingot.numpy.save({"__metadata__": numpy.zeros(1, numpy.uint8)})
