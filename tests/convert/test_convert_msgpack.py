"""Conversion of flax's msgpack files, without flax. test_convert_frameworks.py has files of flax."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import msgpack
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot
from ingot._convert.limits import Budget, limits
from ingot._convert.source import Region, Stream
from ingot._convert.sources import flax as ours
from ingot.numpy import load_file

WEIGHT = numpy.arange(6000, dtype=numpy.float32).reshape(60, 100)


def packed_array(array: numpy.ndarray[Any, Any], dtype: str | None = None) -> msgpack.ExtType:
    parts = (array.shape, dtype or array.dtype.name, array.tobytes())
    return msgpack.ExtType(1, msgpack.packb(parts, use_bin_type=True))


def packed(tree: object) -> str:
    Path("in.msgpack").write_bytes(msgpack.packb(tree, use_bin_type=True))
    return "in.msgpack"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(values)
def test_msgpack_reader_equals_msgpack(value: object) -> None:
    packed = msgpack.packb(value, use_bin_type=True)
    stream = Stream("x", BytesIO(packed), end=len(packed), has_spans=False)
    assert ours.load(stream, Budget("x", limits(len(packed), None))) == value


def test_msgpack_reader_leaves_long_bytes_in_the_file() -> None:
    data = bytes(range(256)) * 300
    path = packed({"long": data, "short": b"abc", "wide": "é" * 70_000})
    with open(path, "rb") as file:
        found = ours.load(Stream(path, file), Budget(path, limits(300_000, None)))
    assert isinstance(found["long"], Region)
    assert found["long"].read("long").tobytes() == data
    assert found["short"] == b"abc"
    assert found["wide"] == "é" * 70_000


def test_convert_reads_arrays_of_nested_msgpack_dicts() -> None:
    chunks = {"0": packed_array(WEIGHT.reshape(-1)[:4000]), "1": packed_array(WEIGHT.reshape(-1)[4000:])}
    tree = {
        "params": {"kernel": packed_array(WEIGHT), "half": packed_array(WEIGHT.view("u2")[:1], "bfloat16")},
        "cut": {"__msgpack_chunked_array__": True, "shape": {"0": 60, "1": 100}, "chunks": chunks},
        "step": 5,
    }
    report = ingot.convert(packed(tree), "out.safetensors")
    found = load_file("out.safetensors")
    numpy.testing.assert_array_equal(found["params.kernel"], WEIGHT)
    numpy.testing.assert_array_equal(found["cut"], WEIGHT)
    assert found["params.half"].tobytes() == WEIGHT.view("u2")[:1].tobytes()
    assert [(one.name, one.value) for one in report.left_out] == [("step", "5")]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": msgpack.ExtType(1, msgpack.packb(((3,), "float32", bytes(8))))}, "needs 12 bytes, found 8"),
        ({"a": msgpack.ExtType(1, msgpack.packb(((-2,), "float32", bytes(8))))}, "needs -1 bytes"),
        (
            {"a": msgpack.ExtType(1, msgpack.packb(((2,), "object", bytes(16))))},
            "files of tensors do not support",
        ),
        ({"a": msgpack.ExtType(1, b"\xc0")}, "not a flax checkpoint"),
        ({"a": {"__msgpack_chunked_array__": True, "shape": {}, "chunks": {}}}, "not a flax checkpoint"),
        ({"a": 1}, "no tensor in it"),
    ],
    ids=["short", "negative", "objects", "nothing", "chunks", "empty"],
)
def test_convert_rejects_msgpack_values_that_are_no_arrays(tree: object, words: str) -> None:
    with pytest.raises(ingot.ConversionError, match=f"^in.msgpack: .*{words}"):
        ingot.convert(packed(tree), "out.safetensors")


@pytest.mark.parametrize(
    "data",
    [
        b"\x82\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
        b"\x81\xa1a" + b"\x91" * 5000 + b"\xc0",
        b"\x82\xa1a\xc0\xa1a\xc0",
        b"\x81\xa1a\xc1",
        b"\x81\xa1a\xc0\xc0",
        b"\x81\xa1\xff\xc0",
        b"\x81\x90\xc0",
        b"\x81",
    ],
)
def test_convert_rejects_bytes_that_are_no_msgpack(data: bytes) -> None:
    Path("in.msgpack").write_bytes(data)
    with pytest.raises(
        ingot.ConversionError, match=r"^in.msgpack: (not a flax checkpoint|the file is truncated)"
    ) as caught:
        ingot.convert("in.msgpack", "out.safetensors")
    assert caught.value.code in ("unreadable", "truncated")
