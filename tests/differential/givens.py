"""What calls are given: odd values for each kind of argument, and the folder of files that they read."""

from __future__ import annotations

import ctypes
import io
import pathlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn


def with_header(header: bytes, data: bytes = b"", nbytes: int | None = None) -> bytes:
    return (len(header) if nbytes is None else nbytes).to_bytes(8, "little") + header + data


def entry(
    dtype: str = '"F32"', shape: str = "[1]", place: str = "[0,4]", name: str = "a", more: str = ""
) -> bytes:
    return f'{{"{name}":{{"dtype":{dtype},"shape":{shape},"data_offsets":{place}{more}}}}}'.encode()


# Files that are none, each by what is wrong with it.
BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "three bytes": b"abc",
    "eight bytes": bytes(8),
    "a long header": with_header(b"{}", nbytes=2**40),
    "a header past the end": with_header(b"{}", nbytes=200),
    "no UTF-8": with_header(b'{"\xff": 1}'),
    "no JSON": with_header(b"{nope"),
    "a list": with_header(b"[]"),
    "a number": with_header(b"3"),
    "an entry that is none": with_header(b'{"a":3}'),
    "an entry without a shape": with_header(b'{"a":{"dtype":"F32","data_offsets":[0,4]}}', bytes(4)),
    "an unknown dtype": with_header(entry(dtype='"F33"'), bytes(4)),
    "a dtype that is no text": with_header(entry(dtype="3"), bytes(4)),
    "a negative dimension": with_header(entry(shape="[-1]"), bytes(4)),
    "a fractional dimension": with_header(entry(shape="[1.5]"), bytes(4)),
    "metadata that is no text": with_header(b'{"__metadata__":{"a":3}}'),
    "metadata that is a list": with_header(b'{"__metadata__":[]}'),
    "a shape too large": with_header(entry(shape="[2]"), bytes(4)),
    "a shape too small": with_header(entry(shape="[]", place="[0,8]"), bytes(8)),
    "a hole": with_header(entry(place="[4,8]"), bytes(8)),
    "a range reversed": with_header(entry(place="[4,0]"), bytes(4)),
    "an overflow": with_header(entry(shape=f"[{2**40},{2**40}]"), bytes(4)),
    "half a byte": with_header(entry(dtype='"F4"', place="[0,1]"), bytes(1)),
    "data cut short": with_header(entry(), b"12"),
    "trailing bytes": with_header(entry(), bytes(9)),
    "a pickle": b"\x80\x02}q\x00." + bytes(40),
    "a zip": b"PK\x03\x04" + bytes(40),
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n",
    "a web page": b"<!DOCTYPE html><html><body>Not found</body></html>",
    "zeros": bytes(64),
}


def furnish(place: pathlib.Path) -> None:
    """Make the files that the calls read."""
    tensors = {
        "a": numpy.arange(3, dtype=numpy.int64),
        "b": numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
        "c": numpy.arange(30, dtype=numpy.float32).reshape(2, 3, 5),
        "s": numpy.array(1, numpy.float32),
        "z": numpy.zeros((0, 2), numpy.float32),
    }
    import safetensors.numpy

    (place / "good").write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    codes = {"F8_E4M3": 8, "BF16": 16, "F8_E8M0": 8, "F6_E2M3": 6, "F4": 4, "C64": 64, "U64": 64}
    for code, nbits in codes.items():
        end = 8 * nbits // 8
        (place / code).write_bytes(with_header(entry(f'"{code}"', "[8]", f"[0,{end}]"), bytes(end)))
    for number, data in enumerate(BROKEN.values()):
        (place / f"broken{number}").write_bytes(data)
    (place / "folder").mkdir()
    state = {"weight": numpy.zeros((2, 2), numpy.float32), "bias": numpy.zeros(2, numpy.float32)}
    (place / "linear").write_bytes(safetensors.numpy.save(state))
    # A module whose state lacks one, and one whose state has one of another shape.
    (place / "short").write_bytes(safetensors.numpy.save({"weight": state["weight"]}))
    (place / "long").write_bytes(safetensors.numpy.save({**state, "more": state["bias"]}))
    (place / "other shape").write_bytes(safetensors.numpy.save({**state, "bias": numpy.zeros(3)}))


class Subclass(torch.Tensor):
    """A tensor of a user's own class."""


class Fspath:
    """A path by protocol, to nothing."""

    def __fspath__(self) -> str:
        return "nope"


class NoFspath:
    """An object that says that it is a path, and is none."""

    def __fspath__(self) -> int:
        return 3


# What is given where a path is expected; a function of the folder where it lies in it.
PATHS: dict[str, Any] = {
    "missing": lambda place: place / "nope",
    "missing, as str": lambda place: str(place / "nope"),
    "missing, as bytes": lambda place: str(place / "nope").encode(),
    "missing, relative": lambda place: "notafile",
    "missing folder": lambda place: place / "nope" / "t",
    "below a file": lambda place: place / "good" / "t",
    "folder": lambda place: place / "folder",
    "empty": lambda place: "",
    "NUL": lambda place: "a\0b",
    "long": lambda place: "a" * 5000,
    "surrogate": lambda place: "nope\udcff",
    "control": lambda place: "no\x1b[31mpe\n",
    "None": None,
    "int": 3,
    "bool": True,
    "list": lambda place: ["good"],
    "BytesIO": lambda place: io.BytesIO(),
    "os.PathLike": lambda place: Fspath(),
    "no os.PathLike": lambda place: NoFspath(),
}

FRAMEWORKS: dict[str, Any] = {
    "foo": "foo",
    "empty": "",
    "PT": "PT",
    "space": "pt ",
    "None": None,
    "int": 3,
    "bytes": b"pt",
    "module": torch,
    "control": "p\nt",
    "quote": 'p"t',
    "numpy ": "Numpy",
    "tuple": ("pt",),
    "newline": "\x1b[31m",
}
MISSING_FRAMEWORKS = ("tf", "tensorflow", "jax", "flax", "mlx", "paddle")

DEVICES: dict[str, Any] = {
    "foo": "foo",
    "empty": "",
    "cuda": "cuda",
    "cuda:0": "cuda:0",
    "cuda:x": "cuda:x",
    "cuda:": "cuda:",
    "cuda:-1": "cuda:-1",
    "CPU": "CPU",
    "cpu:0": "cpu:0",
    "cpu:1": "cpu:1",
    "int": 0,
    "negative": -1,
    "huge": 2**70,
    "None": None,
    "float": 1.5,
    "list": [],
    "bytes": b"cpu",
    "torch cpu": torch.device("cpu"),
    "torch cuda": torch.device("cuda"),
    "torch meta": torch.device("meta"),
    "meta": "meta",
    "mps": "mps",
    "npu": "npu",
    "xpu": "xpu",
    "xpu:0": "xpu:0",
    "hpu": "hpu",
    "mlu": "mlu",
    "musa": "musa",
    "xla": "xla",
    "bool": True,
    "disk": "disk",
    "auto": "auto",
    "privateuseone": "privateuseone",
    "hip": "hip",
    "control": "a\nb",
}
# Those that no machine has.
NO_DEVICES = (
    "foo",
    "empty",
    "cuda:x",
    "cuda:",
    "cuda:-1",
    "CPU",
    "negative",
    "huge",
    "float",
    "list",
    "disk",
    "auto",
)
BACKENDS: dict[str, Any] = {
    "zzz": "zzz",
    "empty": "",
    "None": None,
    "int": 3,
    "MMAP": "MMAP",
    "bytes": b"mmap",
    "auto": "auto",
    "io_uring": "io_uring",
    "list": ["mmap"],
}

DATA: dict[str, Any] = {
    "None": None,
    "str": "text",
    "int": 3,
    "list": [1],
    "list of bytes": [b"a"],
    "BytesIO": io.BytesIO(b"a"),
    "bytearray": bytearray(b"a"),
    "memoryview": memoryview(b"abc"),
    "tensor": torch.ones(3),
    "array": numpy.ones(3),
    "dict": {},
}

METADATA: dict[str, Any] = {
    "int": 3,
    "str": "text",
    "list": [1],
    "pairs": [("a", "b")],
    "int value": {"a": 1},
    "None value": {"a": None},
    "bytes value": {"a": b"b"},
    "dict value": {"a": {}},
    "list value": {"a": []},
    "int key": {1: "a"},
    "None key": {None: "a"},
    "bytes key": {b"a": "b"},
    "bool value": {"a": True},
    "surrogate": {"a": "\udcff"},
    "surrogate key": {"\udcff": "a"},
    "second value": {"a": "b", "c": 3},
    "false": False,
    "empty list": [],
    "zero": 0,
}

# What is given for the plan of `prefetch`.
PLANS: dict[str, Any] = {
    "None": None,
    "empty": {},
    "list": ["b"],
    "str": "b",
    "int": 3,
    "whole": {"b": None},
    "missing": {"nope": None},
    "int key": {3: None},
    "None key": {None: None},
    "int value": {"b": 3},
    "tuple value": {"b": (0, 1)},
    "missing, int value": {"nope": 3},
    "rows": {"b": slice(0, 2)},
    "no rows": {"b": slice(2, 1)},
    "rows from the end": {"b": slice(-2, None)},
    "rows past the end": {"b": slice(0, 4)},
    "rows before the first": {"b": slice(-4, None)},
    "rows with step 2": {"b": slice(0, 2, 2)},
    "rows with step 0": {"b": slice(0, 2, 0)},
    "rows with step -1": {"b": slice(2, 0, -1)},
    "rows by str": {"b": slice("a", 2)},
    "rows by float": {"b": slice(1.0, 2)},
    "rows, huge": {"b": slice(None, 2**70)},
    "rows of a scalar": {"s": slice(0, 1)},
    "rows of none": {"z": slice(None)},
}

# What is given beside it.
PREFETCHING: dict[str, dict[str, Any]] = {
    "nothing": {},
    "device cpu": {"device": "cpu"},
    "device cuda": {"device": "cuda"},
    "device cuda:0": {"device": "cuda:0"},
    "device int": {"device": 0},
    "device -1": {"device": -1},
    "device foo": {"device": "foo"},
    "device float": {"device": 1.5},
    "device list": {"device": ["cuda"]},
    "threads 0": {"threads": 0},
    "threads -1": {"threads": -1},
    "threads huge": {"threads": 2**70},
    "threads str": {"threads": "a"},
    "threads None": {"threads": None},
    "unknown": {"more": 1},
}

NAMES: dict[str, Any] = {
    "missing": "nope",
    "near": "aa",
    "empty": "",
    "int": 3,
    "None": None,
    "bytes": b"a",
    "list": ["a"],
    "slice": slice(1),
    "control": "no\x1b[31m\npe",
    "metadata": "__metadata__",
    "surrogate": "\udcff",
    "long": "n" * 300,
    "quote": 'no"pe',
    "backtick": "no`pe",
}

ONES = torch.ones(2)
WHOLE = torch.arange(6.0).reshape(2, 3)


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)


# What is given for the tensors of `safetensors.torch.save`.
STATES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "list": lambda: [torch.ones(1)],
    "tensor": lambda: torch.ones(1),
    "module": lambda: nn.Linear(1, 1),
    "str": lambda: "text",
    "pairs": lambda: [("a", torch.ones(1))],
    "int": lambda: {"a": 3},
    "float": lambda: {"a": 1.5},
    "None value": lambda: {"a": None},
    "list value": lambda: {"a": [1.0]},
    "nested": lambda: {"a": {"b": torch.ones(1)}},
    "array": lambda: {"a": numpy.ones(1)},
    "second of two": lambda: {"a": torch.ones(1), "b": 3},
    "int key": lambda: {3: torch.ones(1)},
    "None key": lambda: {None: torch.ones(1)},
    "bytes key": lambda: {b"a": torch.ones(1)},
    "tuple key": lambda: {("a",): torch.ones(1)},
    "surrogate key": lambda: {"\udcff": torch.ones(1)},
    "metadata key": lambda: {"__metadata__": torch.ones(1, dtype=torch.uint8)},
    "sparse": lambda: {"test": torch.eye(2).to_sparse()},
    "sparse csr": lambda: {"test": torch.eye(2).to_sparse_csr()},
    "two sparse": lambda: {"b": torch.eye(2).to_sparse(), "a": torch.eye(2).to_sparse()},
    "sparse beside": lambda: {"a": torch.ones(1), "b": torch.eye(2).to_sparse()},
    "meta": lambda: {"test": torch.ones(2, device="meta")},
    "meta beside": lambda: {"a": torch.ones(2), "test": torch.ones(2, device="meta")},
    "two meta": lambda: {"a": torch.ones(2, device="meta"), "b": torch.ones(3, device="meta")},
    "empty meta": lambda: {"a": torch.ones(0, device="meta")},
    "meta parameter": lambda: {"a": nn.Parameter(torch.ones(2, device="meta"))},
    "meta strided": lambda: {"a": torch.ones(2, 3, device="meta").t()},
    "quint8": lambda: {"a": quantised()},
    "qint8": lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)},
    "qint32": lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint32)},
    "complex128": lambda: {"a": torch.ones(2, dtype=torch.complex128)},
    "complex32": lambda: {"a": torch.ones(2, dtype=torch.complex32)},
    "conj": lambda: {"a": torch.ones(2, dtype=torch.complex64).conj()},
    "bits8": lambda: {"a": torch.empty(2, dtype=torch.bits8)},
    "bits16": lambda: {"a": torch.empty(2, dtype=torch.bits16)},
    "strided": lambda: {"layer": torch.ones(2, 3).t()},
    "channels last": lambda: {"a": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)},
    "expanded": lambda: {"a": torch.ones(1).expand(3)},
    "step": lambda: {"a": torch.ones(6)[::2]},
    "column": lambda: {"a": torch.ones(2, 3)[:, 0]},
    "two strided": lambda: {"b": torch.ones(2, 3).t(), "a": torch.ones(2, 3).t()},
    "shared": lambda: {"a": ONES, "b": ONES},
    "shared thrice": lambda: {"c": ONES, "a": ONES, "b": ONES},
    "two crowds": lambda: {"a": ONES, "b": ONES, "c": WHOLE, "d": WHOLE},
    "part and whole": lambda: {"a": WHOLE[:1], "b": WHOLE},
    "overlap": lambda: {"a": WHOLE.view(-1)[:4], "b": WHOLE.view(-1)[2:]},
    "shared and strided": lambda: {"a": WHOLE, "b": WHOLE.t()},
    "shared and sparse": lambda: {"a": ONES, "b": ONES, "c": torch.eye(2).to_sparse()},
    "shared and int": lambda: {"a": ONES, "b": ONES, "c": 3},
    "subclass": lambda: {"a": torch.ones(2).as_subclass(Subclass)},
    "mkldnn": lambda: {"a": torch.ones(2, 2).to_mkldnn()},
    "nested tensor": lambda: {"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])},
    "uninitialized": lambda: {"a": nn.parameter.UninitializedParameter()},
}

STRUCTURED = numpy.dtype([("x", "f4"), ("y", "i4")])
# What is given for those of `safetensors.numpy.save`.
ARRAYS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "list": lambda: [numpy.ones(1)],
    "array": lambda: numpy.ones(1),
    "str": lambda: "text",
    "int": lambda: {"a": 3},
    "float": lambda: {"a": 1.5},
    "None value": lambda: {"a": None},
    "list value": lambda: {"a": [1.0]},
    "nested": lambda: {"a": {"b": numpy.ones(1)}},
    "tensor": lambda: {"a": torch.ones(1)},
    "scalar": lambda: {"a": numpy.float32(1)},
    "bytes": lambda: {"a": b"text"},
    "int key": lambda: {3: numpy.ones(1)},
    "None key": lambda: {None: numpy.ones(1)},
    "bytes key": lambda: {b"a": numpy.ones(1)},
    "surrogate key": lambda: {"\udcff": numpy.ones(1)},
    "metadata key": lambda: {"__metadata__": numpy.ones(1, numpy.uint8)},
    "object": lambda: {"a": numpy.array([object()])},
    "object numbers": lambda: {"a": numpy.array([1, "a", None], object)},
    "text": lambda: {"a": numpy.array(["text"])},
    "byte text": lambda: {"a": numpy.array([b"text"])},
    "datetime": lambda: {"a": numpy.array(["2020-01-01"], "datetime64[D]")},
    "timedelta": lambda: {"a": numpy.array([1], "timedelta64[s]")},
    "structured": lambda: {"a": numpy.zeros(2, STRUCTURED)},
    "void": lambda: {"a": numpy.zeros(2, "V4")},
    "complex128": lambda: {"a": numpy.ones(2, numpy.complex128)},
    "longdouble": lambda: {"a": numpy.ones(2, numpy.longdouble)},
    "clongdouble": lambda: {"a": numpy.ones(2, numpy.clongdouble)},
    "big-endian": lambda: {"a": numpy.ones(2, ">f4")},
    "masked": lambda: {"a": numpy.ma.masked_array([1.0, 2.0], [True, False])},
    "matrix": lambda: {"a": numpy.ones((2, 2)).view(numpy.recarray)},
}

# Indices into tensors of 0 to 3 dimensions.
INDICES: dict[str, Any] = {
    "5": 5,
    "-6": -6,
    "huge": 2**70,
    "-huge": -(2**70),
    "2**63": 2**63,
    "-2**63-1": -(2**63) - 1,
    "0": 0,
    "-1": -1,
    "None": None,
    "...": ...,
    "()": (),
    "True": True,
    "False": False,
    "[0]": [0],
    "[]": [],
    "[9]": [9],
    "[-9]": [-9],
    "[True]": [True],
    "[1.5]": [1.5],
    "['a']": ["a"],
    "[[0]]": [[0]],
    "[None]": [None],
    "1.5": 1.5,
    "'a'": "a",
    "b'a'": b"a",
    "object": object(),
    "{}": {},
    "nan": float("nan"),
    "::-1": slice(None, None, -1),
    "::0": slice(None, None, 0),
    "::-2": slice(None, None, -2),
    "5:": slice(5, None),
    ":9": slice(None, 9),
    "-9:": slice(-9, None),
    ":-9": slice(None, -9),
    "2:1": slice(2, 1),
    "9:9": slice(9, 9),
    "huge:": slice(2**70, None),
    ":huge": slice(None, 2**70),
    "::huge": slice(None, None, 2**70),
    "-huge:": slice(-(2**70), None),
    "'a':": slice("a", None),
    ":'a'": slice(None, "a"),
    "::'a'": slice(None, None, "a"),
    "1.5:": slice(1.5, None),
    "::1.5": slice(None, None, 1.5),
    "(0, 9)": (0, 9),
    "(0, -9)": (0, -9),
    "(9, 0)": (9, 0),
    "(9, 9)": (9, 9),
    "(0, 0)": (0, 0),
    "(0, 0, 0)": (0, 0, 0),
    "(0, 0, 0, 0)": (0, 0, 0, 0),
    "(..., 9)": (..., 9),
    "(..., -9)": (..., -9),
    "(..., ...)": (..., ...),
    "(0, ..., 0, 0, 0)": (0, ..., 0, 0, 0),
    "(None, 9)": (None, 9),
    "(9, None)": (9, None),
    "(:, 9)": (slice(None), 9),
    "(:, -6)": (slice(None), -6),
    "(:, ::-1)": (slice(None), slice(None, None, -1)),
    "(:, ::0)": (slice(None), slice(None, None, 0)),
    "(:, [9])": (slice(None), [9]),
    "([0], [0])": ([0], [0]),
    "([9], [0])": ([9], [0]),
    "([0], [9])": ([0], [9]),
    "([0, 1], [0, 1, 0])": ([0, 1], [0, 1, 0]),
    "(0, [0])": (0, [0]),
    "([0], :, 0)": ([0], slice(None), 0),
    "(9, [0])": (9, [0]),
    "(0, 'a')": (0, "a"),
    "(0, 1.5)": (0, 1.5),
    "(0, object)": (0, object()),
    "(None,)*9": (None,) * 9,
    "(:,)*9": (slice(None),) * 9,
    "(0,)*9": (0,) * 9,
    "(True, 0)": (True, 0),
    "(::-1, 9)": (slice(None, None, -1), 9),
    "(9, ::-1)": (9, slice(None, None, -1)),
    "(9:, 9)": (slice(9, None), 9),
    "int64(9)": numpy.int64(9),
    "array([9])": numpy.array([9]),
    "array([0])": numpy.array([0]),
    "array(9)": numpy.array(9),
    "array([True])": numpy.array([True]),
    "array([1.5])": numpy.array([1.5]),
    "tensor([9])": torch.tensor([9]),
    "tensor(9)": torch.tensor(9),
    "tensor([1.5])": torch.tensor([1.5]),
    "int64(9):": slice(numpy.int64(9), None),
}


def given(value: Any, place: pathlib.Path) -> Any:
    """A value of `PATHS`."""
    return value(place) if callable(value) else value


def model() -> nn.Module:
    return nn.Linear(2, 2)


def holding(**tensors: Any) -> nn.Module:
    made = nn.Module()
    for name, tensor in tensors.items():
        made.register_buffer(name, tensor)
    return made


# What is given where a module is expected.
MODULES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "dict": lambda: {"a": torch.ones(1)},
    "strided": lambda: holding(weight=torch.ones(2, 3).t()),
    "part of a storage": lambda: holding(row=torch.ones(20, 3)[1:2]),
    "two parts": lambda: holding(first=WHOLE[:1], second=WHOLE[1:]),
    "sparse": lambda: holding(a=torch.eye(2).to_sparse()),
    "meta": lambda: nn.Linear(2, 2, device="meta"),
    "complex128": lambda: holding(a=torch.ones(2, dtype=torch.complex128)),
    "quint8": lambda: holding(a=quantised()),
    "extra state": lambda: WithExtraState(),
}


class WithExtraState(nn.Module):
    """A module whose state holds more than tensors."""

    def get_extra_state(self) -> Any:
        return {"a": 3}

    def set_extra_state(self, state: Any) -> None: ...


FILES: dict[str, str] = {
    "linear": "linear",
    "short": "short",
    "long": "long",
    "other shape": "other shape",
    "no state": "good",
}


def opened(m: SimpleNamespace, place: pathlib.Path, framework: str = "pt", name: str = "good") -> Any:
    return m.top.safe_open(place / name, framework)


def closed(m: SimpleNamespace, place: pathlib.Path) -> Any:
    with opened(m, place) as file:
        pass
    return file


# What the addresses lead to, more than any call may take of it.
MEMORY = ctypes.create_string_buffer(64)


def spec(m: SimpleNamespace, **changes: Any) -> Any:
    arguments = {"dtype": "float32", "shape": [2], "data_ptr": ctypes.addressof(MEMORY), "data_len": 8}
    return m.top.TensorSpec(**{**arguments, **changes})


SPECS: dict[str, Mapping[str, Any]] = {
    "dtype zzz": {"dtype": "zzz"},
    "dtype None": {"dtype": None},
    "dtype int": {"dtype": 3},
    "dtype F32": {"dtype": "F32"},
    "dtype torch": {"dtype": torch.float32},
    "dtype float128": {"dtype": "float128"},
    "dtype complex128": {"dtype": "complex128"},
    "shape None": {"shape": None},
    "shape int": {"shape": 3},
    "shape negative": {"shape": [-1]},
    "shape text": {"shape": "ab"},
    "shape of text": {"shape": ["a"]},
    "shape float": {"shape": [1.5]},
    "shape huge": {"shape": [2**70]},
    "ptr None": {"data_ptr": None},
    "ptr negative": {"data_ptr": -1},
    "ptr huge": {"data_ptr": 2**70},
    "ptr text": {"data_ptr": "a"},
    "ptr float": {"data_ptr": 1.5},
    "len None": {"data_len": None},
    "len negative": {"data_len": -1},
    "len huge": {"data_len": 2**70},
    "len text": {"data_len": "a"},
    "unknown": {"more": 1},
    "F4 scalar": {"dtype": "float4_e2m1fn_x2", "shape": []},
}

# What is given for the tensors of `serialize`; a function of the modules.
SERIALIZED: dict[str, Callable[[SimpleNamespace], Any]] = {
    "None": lambda m: None,
    "list": lambda m: [],
    "int": lambda m: 3,
    "str": lambda m: "text",
    "None value": lambda m: {"a": None},
    "int value": lambda m: {"a": 3},
    "bytes value": lambda m: {"a": b"text"},
    "tensor value": lambda m: {"a": torch.ones(1)},
    "array value": lambda m: {"a": numpy.ones(1)},
    "int key": lambda m: {3: spec(m)},
    "None key": lambda m: {None: spec(m)},
    "metadata key": lambda m: {"__metadata__": spec(m, data_len=8)},
    "too short": lambda m: {"a": spec(m, data_len=7)},
    "too long": lambda m: {"a": spec(m, data_len=9)},
    "nothing": lambda m: {"a": spec(m, data_len=0)},
    "second too short": lambda m: {"a": spec(m, data_ptr=0, shape=[0], data_len=0), "b": spec(m, data_len=7)},
    "overflow": lambda m: {"a": spec(m, shape=[2**40, 2**40], data_len=8)},
    "half a byte": lambda m: {"a": spec(m, dtype="float4_e2m1fn_x2", shape=[], data_len=1)},
}
