"""Calls of safetensors that go wrong, or nearly: every public function with odd values for each argument.

Each takes the modules to call, the wheel's or ours, and a folder that `furnish` has filled.
"""

from __future__ import annotations

import ctypes
import io
import pathlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn

Call = Callable[[SimpleNamespace, pathlib.Path], Any]


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


def _opening() -> Iterator[tuple[str, Call]]:
    for title, value in PATHS.items():
        for framework in ("pt", "np"):
            yield (
                f"safe_open(filename={title}, {framework})",
                lambda m, place, v=value, f=framework: m.top.safe_open(given(v, place), f),
            )
        yield (
            f"safe_open(filename={title}, backend=pread)",
            lambda m, place, v=value: m.top.safe_open(given(v, place), "pt", backend="pread"),
        )
    for title, value in FRAMEWORKS.items():
        yield (
            f"safe_open(framework={title})",
            lambda m, place, v=value: m.top.safe_open(place / "good", v),
        )
        yield (
            f"safe_open(filename=missing, framework={title})",
            lambda m, place, v=value: m.top.safe_open(place / "nope", v),
        )
    for title, value in DEVICES.items():
        for framework in ("pt", "np"):
            yield (
                f"safe_open(device={title}, {framework})",
                lambda m, place, v=value, f=framework: m.top.safe_open(place / "good", f, v),
            )
    for title, value in BACKENDS.items():
        yield (
            f"safe_open(backend={title})",
            lambda m, place, v=value: m.top.safe_open(place / "good", "pt", backend=v),
        )
    for number, title in enumerate(BROKEN):
        for framework in ("pt", "np"):
            for backend in ("mmap", "pread"):
                yield (
                    f"safe_open({title}, {framework}, {backend})",
                    lambda m, place, n=number, f=framework, b=backend: m.top.safe_open(
                        place / f"broken{n}", f, backend=b
                    ),
                )
        yield (
            f"_safe_open_handle({title})",
            lambda m, place, n=number: _by_handle(m, place / f"broken{n}"),
        )
    for title, value in {"None": None, "int": 3, "path": "good", "BytesIO": io.BytesIO(b"abc")}.items():
        yield (
            f"_safe_open_handle(f={title})",
            lambda m, place, v=value: m.top._safe_open_handle(v, "pt"),
        )
    for framework in MISSING_FRAMEWORKS:
        for title, use in HANDLE_USES.items():
            yield (
                f"safe_open({framework}).{title}",
                lambda m, place, f=framework, u=use: u(m.top.safe_open(place / "good", f)),
            )
        yield (
            f"safe_open({framework}, device=cuda)",
            lambda m, place, f=framework: m.top.safe_open(place / "good", f, "cuda:0"),
        )


def _by_handle(m: SimpleNamespace, path: pathlib.Path) -> Any:
    with path.open("rb") as file:
        return m.top._safe_open_handle(file, "pt")


HANDLE_USES: dict[str, Callable[[Any], Any]] = {
    "keys": lambda file: file.keys(),
    "offset_keys": lambda file: file.offset_keys(),
    "metadata": lambda file: file.metadata(),
    "get_tensor": lambda file: file.get_tensor("a"),
    "get_tensors": lambda file: file.get_tensors(),
    "get_slice": lambda file: file.get_slice("a").get_shape(),
    "get_slice.get_dtype": lambda file: file.get_slice("a").get_dtype(),
    "get_slice[:]": lambda file: file.get_slice("a")[:],
    "missing": lambda file: file.get_tensor("nope"),
}


def _loading() -> Iterator[tuple[str, Call]]:
    for module in ("torch", "numpy"):
        for title, value in PATHS.items():
            yield (
                f"{module}.load_file(filename={title})",
                lambda m, place, v=value, k=module: getattr(m, k).load_file(given(v, place)),
            )
        for title, value in BACKENDS.items():
            yield (
                f"{module}.load_file(backend={title})",
                lambda m, place, v=value, k=module: getattr(m, k).load_file(place / "good", backend=v),
            )
        for number, (title, data) in enumerate(BROKEN.items()):
            yield (
                f"{module}.load_file({title})",
                lambda m, place, n=number, k=module: getattr(m, k).load_file(place / f"broken{n}"),
            )
            yield (
                f"{module}.load({title})",
                lambda m, place, d=data, k=module: getattr(m, k).load(d),
            )
        for title, value in DATA.items():
            yield (
                f"{module}.load(data={title})",
                lambda m, place, v=value, k=module: getattr(m, k).load(v),
            )
        for code in ("F8_E4M3", "BF16", "F8_E8M0", "F6_E2M3", "F4", "C64", "U64"):
            yield (
                f"{module}.load_file({code})",
                lambda m, place, c=code, k=module: getattr(m, k).load_file(place / c),
            )
            yield (
                f"{module}.load({code})",
                lambda m, place, c=code, k=module: getattr(m, k).load((place / c).read_bytes()),
            )
            yield (
                f"{module}.get_slice({code})[1:]",
                lambda m, place, c=code, k=module: opened(m, place, FRAMEWORK_OF[k], c).get_slice("a")[1:],
            )
    for title in NO_DEVICES:
        yield (
            f"torch.load_file(device={title})",
            lambda m, place, v=DEVICES[title]: m.torch.load_file(place / "good", v),
        )
    for title, data in {**BROKEN, **DATA}.items():
        yield f"deserialize({title})", lambda m, place, d=data: m.top.deserialize(d)


FRAMEWORK_OF = {"torch": "pt", "numpy": "np"}


def _saving() -> Iterator[tuple[str, Call]]:
    for module, states in (("torch", STATES), ("numpy", ARRAYS)):
        for title, make in states.items():
            yield (
                f"{module}.save({title})",
                lambda m, place, v=make, k=module: getattr(m, k).save(v()),
            )
            yield (
                f"{module}.save_file({title})",
                lambda m, place, v=make, k=module: getattr(m, k).save_file(v(), place / "out"),
            )
        tensor = {"torch": torch.ones(1), "numpy": numpy.ones(1)}[module]
        for title, value in METADATA.items():
            yield (
                f"{module}.save(metadata={title})",
                lambda m, place, v=value, k=module, t=tensor: getattr(m, k).save({"t": t}, v),
            )
            yield (
                f"{module}.save_file(metadata={title})",
                lambda m, place, v=value, k=module, t=tensor: getattr(m, k).save_file(
                    {"t": t}, place / "out", v
                ),
            )
        for title, value in PATHS.items():
            if title not in ("missing", "missing, as str", "missing, as bytes", *LEFT_BEHIND):
                yield (
                    f"{module}.save_file(filename={title})",
                    lambda m, place, v=value, k=module, t=tensor: getattr(m, k).save_file(
                        {"t": t}, given(v, place)
                    ),
                )
    for title, make_arguments in SPECS.items():
        yield f"TensorSpec({title})", lambda m, place, a=make_arguments: spec(m, **a)
    for title, make_dict in SERIALIZED.items():
        yield f"serialize({title})", lambda m, place, v=make_dict: m.top.serialize(v(m))
        yield (
            f"serialize_file({title})",
            lambda m, place, v=make_dict: m.top.serialize_file(v(m), place / "out"),
        )
    for title, value in METADATA.items():
        yield f"serialize(metadata={title})", lambda m, place, v=value: m.top.serialize({}, v)
        yield (
            f"serialize_file(metadata={title})",
            lambda m, place, v=value: m.top.serialize_file({}, place / "out", v),
        )


# They name files of the working directory, which would stay.
LEFT_BEHIND = ("missing, relative", "os.PathLike", "surrogate", "control")


def _handles() -> Iterator[tuple[str, Call]]:
    for framework in ("pt", "np"):
        for title, name in NAMES.items():
            for method in ("get_tensor", "get_slice"):
                yield (
                    f"{method}({title}, {framework})",
                    lambda m, place, v=name, f=framework, k=method: getattr(opened(m, place, f), k)(v),
                )
    for title, use in HANDLE_USES.items():
        yield f"closed.{title}", lambda m, place, u=use: u(closed(m, place))
    for title, use in CLOSING.items():
        yield f"closed: {title}", lambda m, place, u=use: u(closed(m, place))
    for title, use in CLOSING.items():
        yield f"open: {title}", lambda m, place, u=use: u(opened(m, place))


CLOSING: dict[str, Callable[[Any], Any]] = {
    "enter": lambda file: file.__enter__(),
    "exit": lambda file: file.__exit__(None, None, None),
    "exit without": lambda file: file.__exit__(),
    "keys(1)": lambda file: file.keys(1),
    "metadata(1)": lambda file: file.metadata(1),
    "get_tensor()": lambda file: file.get_tensor(),
    "get_tensor(2)": lambda file: file.get_tensor("a", "b"),
    "get_slice()": lambda file: file.get_slice(),
    "get_tensors(1)": lambda file: file.get_tensors(1),
    "nope": lambda file: file.nope,
    "nope()": lambda file: file.nope(),
    "set": lambda file: setattr(file, "nope", 1),
    "iter": lambda file: iter(file),
    "len": lambda file: len(file),
    "index": lambda file: file["a"],
    "int index": lambda file: file[0],
}


def _slices() -> Iterator[tuple[str, Call]]:
    for framework in ("pt", "np"):
        for name in ("a", "b", "c", "s", "z"):
            for title, index in INDICES.items():
                yield (
                    f"get_slice({name})[{title}], {framework}",
                    lambda m, place, i=index, f=framework, n=name: opened(m, place, f).get_slice(n)[i],
                )
        for title, use in {
            "set": lambda part: part.__setitem__(0, 1),
            "nope": lambda part: part.nope,
            "get_shape(1)": lambda part: part.get_shape(1),
            "len": lambda part: len(part),
            "iter": lambda part: list(part),
        }.items():
            yield (
                f"get_slice.{title}, {framework}",
                lambda m, place, f=framework, u=use: u(opened(m, place, f).get_slice("b")),
            )


def _models() -> Iterator[tuple[str, Call]]:
    for title, make in MODULES.items():
        for force in (True, False):
            yield (
                f"save_model({title}, force_contiguous={force})",
                lambda m, place, v=make, f=force: m.torch.save_model(v(), place / "out", force_contiguous=f),
            )
        yield (
            f"load_model({title})",
            lambda m, place, v=make: m.torch.load_model(v(), place / "linear"),
        )
    for title, value in METADATA.items():
        yield (
            f"save_model(metadata={title})",
            lambda m, place, v=value: m.torch.save_model(model(), place / "out", v),
        )
    for title, value in PATHS.items():
        yield (
            f"load_model(filename={title})",
            lambda m, place, v=value: m.torch.load_model(model(), given(v, place)),
        )
        if title not in ("missing", "missing, as str", "missing, as bytes", *LEFT_BEHIND):
            yield (
                f"save_model(filename={title})",
                lambda m, place, v=value: m.torch.save_model(model(), given(v, place)),
            )
    for title, file in FILES.items():
        for strict in (True, False):
            yield (
                f"load_model({title}, strict={strict})",
                lambda m, place, n=file, s=strict: m.torch.load_model(model(), place / n, s),
            )
    for title, value in {"foo": "foo", "float": 1.5, "None": None}.items():
        yield (
            f"load_model(device={title})",
            lambda m, place, v=value: m.torch.load_model(model(), place / "linear", device=v),
        )


def _privates() -> Iterator[tuple[str, Call]]:
    for module in ("torch", "numpy"):
        for code in ("F33", "f32", "", None, 3, "F4", "F8_E8M0", "F6_E2M3", "BF16", "F8_E4M3", "C64", "U64"):
            yield (
                f"{module}._getdtype({code})",
                lambda m, place, c=code, k=module: getattr(m, k)._getdtype(c),
            )
    for title, make in STATES.items():
        for function in (
            "_find_shared_tensors",
            "_remove_duplicate_names",
            "_evaluate_tensors_for_save",
        ):
            yield (
                f"torch.{function}({title})",
                lambda m, place, v=make, f=function: getattr(m.torch, f)(v()),
            )
        yield (
            f"torch._flatten_as_ptr({title})",
            lambda m, place, v=make: m.torch._flatten_as_ptr(v(), []),
        )
        for function in ("storage_ptr", "storage_size", "_is_complete", "_end_ptr", "_to_ndarray"):
            yield (
                f"torch.{function}({title})",
                lambda m, place, v=make, f=function: getattr(m.torch, f)(_first(v())),
            )
    for title, make in ARRAYS.items():
        yield (
            f"numpy._is_little_endian({title})",
            lambda m, place, v=make: m.numpy._is_little_endian(_first(v())),
        )
    for choice in ({"preferred_names": ["x"]}, {"discard_names": ["a", "b"]}, {"preferred_names": 3}):
        for title in ("shared", "part and whole", "overlap"):
            yield (
                f"torch._remove_duplicate_names({title}, {choice})",
                lambda m, place, v=STATES[title], c=choice: m.torch._remove_duplicate_names(v(), **c),
            )


def _first(state: Any) -> Any:
    return next(iter(state.values())) if isinstance(state, dict) else state


SIGNATURES: dict[str, tuple[str, str]] = {
    f"{module}.{function}": (module, function)
    for module, functions in {
        "top": ("safe_open", "serialize", "serialize_file", "deserialize", "TensorSpec", "_safe_open_handle"),
        "torch": ("load", "load_file", "save", "save_file", "save_model", "load_model", "storage_ptr"),
        "numpy": ("load", "load_file", "save", "save_file"),
    }.items()
    for function in functions
}


def _signatures() -> Iterator[tuple[str, Call]]:
    for title, (module, function) in SIGNATURES.items():
        for arguments, options in (((), {}), ((1, 2, 3, 4, 5, 6), {}), ((), {"nope": 1})):
            yield (
                f"{title}(*{arguments}, **{options})",
                lambda m, place, k=module, f=function, a=arguments, o=options: getattr(getattr(m, k), f)(
                    *a, **o
                ),
            )


# All of them, each with its name.
GROUPS: dict[str, dict[str, Call]] = {
    "opening": dict(_opening()),
    "loading": dict(_loading()),
    "saving": dict(_saving()),
    "handles": dict(_handles()),
    "slices": dict(_slices()),
    "models": dict(_models()),
    "privates": dict(_privates()),
    "signatures": dict(_signatures()),
}
