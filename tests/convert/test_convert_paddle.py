"""Conversion of PaddlePaddle's pickles, which contain NumPy's arrays, without PaddlePaddle.

test_convert_frameworks.py tests files that PaddlePaddle wrote.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

import ingot
from ingot.numpy import load_file

from .conftest import Payload

WEIGHT = numpy.arange(40_000, dtype=numpy.float32).reshape(100, 400)


class Named:
    """An object that is pickled like a tensor of paddle."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = call, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


def pickled(tree: object, protocol: int = 4) -> str:
    Path("in.pdparams").write_bytes(pickle.dumps(tree, protocol))
    return "in.pdparams"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_convert_reads_arrays_and_tensors_of_paddle(protocol: int) -> None:
    state: dict[str, Any] = OrderedDict(
        weight=WEIGHT,
        tensor=Named(tuple, ("linear_0.w_0", WEIGHT + 1)),
        dense=Named(eval, "data", {"data": WEIGHT + 2}),
        fortran=numpy.asfortranarray(WEIGHT[:3, :2]),
        half=numpy.array([0x3F80, 0x4000], numpy.uint16),
        scalar=numpy.float64(2.5),
        bool=numpy.array([True, False]),
    )
    table = {"weight": "linear_0.w_0", "half": "linear_0.b_0"}
    report = ingot.convert(
        pickled({**state, "StructuredToParameterName@@": table, "epoch": 3}, protocol),
        "out.safetensors",
    )
    found = load_file("out.safetensors")
    numpy.testing.assert_array_equal(found["weight"], WEIGHT)
    numpy.testing.assert_array_equal(found["tensor"], WEIGHT + 1)
    numpy.testing.assert_array_equal(found["dense"], WEIGHT + 2)
    numpy.testing.assert_array_equal(found["fortran"], WEIGHT[:3, :2])
    assert found["half"].dtype == ml_dtypes.bfloat16
    assert found["half"].tolist() == [1.0, 2.0]
    assert found["scalar"] == 2.5
    assert [(one.name, one.value) for one in report.left_out] == [("epoch", "3")]


def test_convert_joins_the_parts_of_a_paddle_tensor() -> None:
    state = {
        "weight@@.0": WEIGHT.reshape(-1)[:25_000],
        "weight@@.1": WEIGHT.reshape(-1)[25_000:],
        "UnpackBigParamInfor@@": {
            "weight": {"OriginShape": WEIGHT.shape, "slices": ["weight@@.0", "weight@@.1"]}
        },
    }
    ingot.convert(pickled(state, 2), "out.safetensors")
    found = load_file("out.safetensors")
    assert set(found) == {"weight"}
    numpy.testing.assert_array_equal(found["weight"], WEIGHT)
    state["UnpackBigParamInfor@@"]["weight"]["OriginShape"] = (3, 3)  # type: ignore[index]
    with pytest.raises(ingot.ConversionError, match="do not make up its shape"):
        ingot.convert(pickled(state, 2), "other.safetensors")


def test_convert_writes_a_paddle_tensor_of_two_names_once() -> None:
    report = ingot.convert(pickled({"b": WEIGHT, "a": WEIGHT}), "out.safetensors")
    assert report.shared == {"b": "a"}
    assert ingot.inspect("out.safetensors").metadata == {
        "ingot.shared": '{"b":{"of":"a"}}',
        "format": "paddle",
    }


@pytest.mark.parametrize("protocol", [2, 4])
def test_convert_rejects_a_paddle_payload(protocol: int, payload: Payload) -> None:
    with pytest.raises(ingot.ConversionError, match=r"in.pdparams: .*not run: `\w+.mkdir`") as caught:
        ingot.convert(pickled({"weight": WEIGHT, "more": payload}, protocol), "out.safetensors")
    assert caught.value.code == "unsafe-pickle"


@pytest.mark.parametrize(
    "names",
    [{}, {"data": 1}, {"data": WEIGHT, "__builtins__": {}}, ["data"]],
    ids=["none", "number", "more", "list"],
)
def test_convert_admits_one_expression_for_eval(names: object, payload: Payload) -> None:
    code = f"__import__('os').mkdir({str(payload._mark)!r})"
    with pytest.raises(ingot.ConversionError, match="eval is refused"):
        ingot.convert(pickled({"weight": Named(eval, code, names)}), "out.safetensors")


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02(S'true'\nios\nsystem\n.",
        b"\x80\x02cnumpy\ndtype\n)\x81.",
        b"\x80\x02cbuiltins\neval\n}X\x01\x00\x00\x00aK\x01sb.",
        b"\x80\x02P1\n.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02r\xff\xff\xff\x7f.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02cnumpy\nload\n.",
        b"\x80\x02.",
        b"\x80\x02}",
        b"\x80\x04" + bytes(range(256)),
    ],
)
def test_convert_rejects_any_other_paddle_program(program: bytes) -> None:
    Path("in.pdparams").write_bytes(program)
    with pytest.raises(ingot.ConversionError, match=r"^in.pdparams: "):
        ingot.convert("in.pdparams", "out.safetensors")


def test_convert_rejects_every_cut_of_a_paddle_file() -> None:
    data = Path(pickled({"a": WEIGHT[:2], "b": WEIGHT})).read_bytes()
    for end in [*range(2, 200, 7), 5_000, 100_000, len(data) - 1]:
        Path("cut.pdparams").write_bytes(data[:end])
        with pytest.raises(ingot.ConversionError, match=r"^cut.pdparams: "):
            ingot.convert("cut.pdparams", "out.safetensors")


def test_convert_rejects_a_paddle_array_of_objects() -> None:
    with pytest.raises(ingot.ConversionError, match="expected numbers"):
        ingot.convert(pickled({"a": numpy.array([{}], object)}), "out.safetensors")


def test_convert_allocates_nothing_for_missing_bytes() -> None:
    for nbytes in (1 << 40, 1 << 62, 2**64 - 1):
        Path("in.pdparams").write_bytes(
            b"\x80\x05" + pickle.BYTEARRAY8 + nbytes.to_bytes(8, "little") + b"ab."
        )
        with pytest.raises(ingot.ConversionError, match=f"expected {nbytes} bytes, found 3"):
            ingot.convert("in.pdparams", "out.safetensors")
    Path("in.pdparams").write_bytes(pickle.dumps({"a": WEIGHT, "b": bytearray(b"ab")}, 5))
    report = ingot.convert("in.pdparams", "out.safetensors")
    assert [(one.name, one.kind) for one in report.left_out] == [("b", "bytes")]
