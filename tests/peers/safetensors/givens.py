"""Arguments of calls: odd values of each kind, and the folder of files that they read."""

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


# Invalid files by their fault.
BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "three bytes": b"abc",
    "a long header": with_header(b"{}", nbytes=2**40),
    "a header past the end": with_header(b"{}", nbytes=200),
    "no UTF-8": with_header(b'{"\xff": 1}'),
    "no JSON": with_header(b"{nope"),
    "an entry without a shape": with_header(b'{"a":{"dtype":"F32","data_offsets":[0,4]}}', bytes(4)),
    "an unknown dtype": with_header(entry(dtype='"F33"'), bytes(4)),
    "a negative dimension": with_header(entry(shape="[-1]"), bytes(4)),
    "metadata that is no text": with_header(b'{"__metadata__":{"a":3}}'),
    "a shape too large": with_header(entry(shape="[2]"), bytes(4)),
    "a hole": with_header(entry(place="[4,8]"), bytes(8)),
    "a range reversed": with_header(entry(place="[4,0]"), bytes(4)),
    "an overflow": with_header(entry(shape=f"[{2**40},{2**40}]"), bytes(4)),
    "half a byte": with_header(entry(dtype='"F4"', place="[0,1]"), bytes(1)),
    "data cut short": with_header(entry(), b"12"),
    "trailing bytes": with_header(entry(), bytes(9)),
    "a pickle": b"\x80\x02}q\x00." + bytes(40),
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n",
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
    # A module whose state lacks a tensor, and one whose state has a tensor of another shape.
    (place / "short").write_bytes(safetensors.numpy.save({"weight": state["weight"]}))
    (place / "long").write_bytes(safetensors.numpy.save({**state, "more": state["bias"]}))
    (place / "other shape").write_bytes(safetensors.numpy.save({**state, "bias": numpy.zeros(3)}))


class Subclass(torch.Tensor):
    """A tensor of a user's own class."""


class Fspath:
    """An object with `__fspath__` whose path does not exist."""

    def __fspath__(self) -> str:
        return "nope"


class NoFspath:
    """An object that claims to be a path."""

    def __fspath__(self) -> int:
        return 3


# Arguments in place of a path. A function returns an argument for a given folder.
PATHS: dict[str, Any] = {
    "missing": lambda place: place / "nope",
    "missing, as bytes": lambda place: str(place / "nope").encode(),
    "missing folder": lambda place: place / "nope" / "t",
    "below a file": lambda place: place / "good" / "t",
    "folder": lambda place: place / "folder",
    "empty": lambda place: "",
    "NUL": lambda place: "a\0b",
    "long": lambda place: "a" * 5000,
    "None": None,
    "int": 3,
    "BytesIO": lambda place: io.BytesIO(),
    "os.PathLike": lambda place: Fspath(),
    "no os.PathLike": lambda place: NoFspath(),
}

FRAMEWORKS: dict[str, Any] = {
    "foo": "foo",
    "None": None,
    "int": 3,
    "bytes": b"pt",
    "module": torch,
}
MISSING_FRAMEWORKS = ("tf", "tensorflow", "jax", "flax", "mlx", "paddle")

DEVICES: dict[str, Any] = {
    "foo": "foo",
    "cuda": "cuda",
    "cuda:0": "cuda:0",
    "cuda:x": "cuda:x",
    "cpu:0": "cpu:0",
    "int": 0,
    "negative": -1,
    "huge": 2**70,
    "None": None,
    "float": 1.5,
    "list": [],
    "bytes": b"cpu",
    "torch cpu": torch.device("cpu"),
    "torch meta": torch.device("meta"),
    "meta": "meta",
    "mps": "mps",
    "npu": "npu",
    "bool": True,
    "disk": "disk",
}
# Devices that no machine has.
NO_DEVICES = ("foo", "cuda:x", "negative", "huge", "float", "list", "disk")
BACKENDS: dict[str, Any] = {
    "zzz": "zzz",
    "None": None,
    "int": 3,
    "bytes": b"mmap",
    "auto": "auto",
}

DATA: dict[str, Any] = {
    "None": None,
    "str": "text",
    "int": 3,
    "list": [1],
    "BytesIO": io.BytesIO(b"a"),
    "bytearray": bytearray(b"a"),
    "memoryview": memoryview(b"abc"),
    "array": numpy.ones(3),
}

METADATA: dict[str, Any] = {
    "int": 3,
    "list": [1],
    "pairs": [("a", "b")],
    "int value": {"a": 1},
    "None value": {"a": None},
    "bytes value": {"a": b"b"},
    "int key": {1: "a"},
    "bytes key": {b"a": "b"},
    "surrogate": {"a": "\udcff"},
    "surrogate key": {"\udcff": "a"},
    "second value": {"a": "b", "c": 3},
    "false": False,
    "empty list": [],
}

# Plans for `prefetch`.
PLANS: dict[str, Any] = {
    "None": None,
    "empty": {},
    "int": 3,
    "whole": {"b": None},
    "missing": {"nope": None},
    "int key": {3: None},
    "rows": {"b": slice(0, 2)},
    "no rows": {"b": slice(2, 1)},
    "rows from the end": {"b": slice(-2, None)},
    "rows past the end": {"b": slice(0, 4)},
    "rows with step 2": {"b": slice(0, 2, 2)},
    "rows with step -1": {"b": slice(2, 0, -1)},
    "rows by str": {"b": slice("a", 2)},
    "rows, huge": {"b": slice(None, 2**70)},
    "rows of a scalar": {"s": slice(0, 1)},
}

# Other arguments of `prefetch`.
PREFETCHING: dict[str, dict[str, Any]] = {
    "nothing": {},
    "device cpu": {"device": "cpu"},
    "device cuda:0": {"device": "cuda:0"},
    "device int": {"device": 0},
    "device foo": {"device": "foo"},
    "device float": {"device": 1.5},
    "threads 0": {"threads": 0},
    "threads -1": {"threads": -1},
    "threads str": {"threads": "a"},
    "unknown": {"more": 1},
}

NAMES: dict[str, Any] = {
    "missing": "nope",
    "empty": "",
    "int": 3,
    "None": None,
    "bytes": b"a",
    "list": ["a"],
    "metadata": "__metadata__",
    "surrogate": "\udcff",
}

ONES = torch.ones(2)
WHOLE = torch.arange(6.0).reshape(2, 3)


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)


# Tensors for `safetensors.torch.save`.
STATES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "list": lambda: [torch.ones(1)],
    "tensor": lambda: torch.ones(1),
    "module": lambda: nn.Linear(1, 1),
    "str": lambda: "text",
    "int": lambda: {"a": 3},
    "nested": lambda: {"a": {"b": torch.ones(1)}},
    "second of two": lambda: {"a": torch.ones(1), "b": 3},
    "int key": lambda: {3: torch.ones(1)},
    "surrogate key": lambda: {"\udcff": torch.ones(1)},
    "metadata key": lambda: {"__metadata__": torch.ones(1, dtype=torch.uint8)},
    "sparse": lambda: {"test": torch.eye(2).to_sparse()},
    "two sparse": lambda: {"b": torch.eye(2).to_sparse(), "a": torch.eye(2).to_sparse()},
    "meta": lambda: {"test": torch.ones(2, device="meta")},
    "empty meta": lambda: {"a": torch.ones(0, device="meta")},
    "meta strided": lambda: {"a": torch.ones(2, 3, device="meta").t()},
    "quint8": lambda: {"a": quantised()},
    "complex128": lambda: {"a": torch.ones(2, dtype=torch.complex128)},
    "conj": lambda: {"a": torch.ones(2, dtype=torch.complex64).conj()},
    "bits8": lambda: {"a": torch.empty(2, dtype=torch.bits8)},
    "strided": lambda: {"layer": torch.ones(2, 3).t()},
    "channels last": lambda: {"a": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)},
    "expanded": lambda: {"a": torch.ones(1).expand(3)},
    "step": lambda: {"a": torch.ones(6)[::2]},
    "shared": lambda: {"a": ONES, "b": ONES},
    "two crowds": lambda: {"a": ONES, "b": ONES, "c": WHOLE, "d": WHOLE},
    "part and whole": lambda: {"a": WHOLE[:1], "b": WHOLE},
    "overlap": lambda: {"a": WHOLE.view(-1)[:4], "b": WHOLE.view(-1)[2:]},
    "shared and strided": lambda: {"a": WHOLE, "b": WHOLE.t()},
    "shared and sparse": lambda: {"a": ONES, "b": ONES, "c": torch.eye(2).to_sparse()},
    "subclass": lambda: {"a": torch.ones(2).as_subclass(Subclass)},
    "mkldnn": lambda: {"a": torch.ones(2, 2).to_mkldnn()},
    "nested tensor": lambda: {"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])},
    "uninitialized": lambda: {"a": nn.parameter.UninitializedParameter()},
}

# Tensors that share memory in every way, and choices of names.
SHARED: dict[str, Callable[[], Any]] = {
    "twins": lambda: {"a": WHOLE, "b": WHOLE, "c": WHOLE.view(-1)},
    "two groups": lambda: {"c": WHOLE, "b": WHOLE, "z": ONES, "y": ONES, "x": torch.ones(1)},
    "halves": lambda: {"a": WHOLE[:1], "b": WHOLE[1:]},
    "halves and whole": lambda: {"a": WHOLE[:1], "b": WHOLE[1:], "c": WHOLE},
    "two meta": lambda: {"a": torch.ones(2, device="meta"), "b": torch.ones(2, device="meta")},
    "two empty": lambda: {"a": torch.ones(0), "b": torch.ones(0)},
    **{name: STATES[name] for name in ("shared", "part and whole", "overlap")},
}
CHOICES: tuple[dict[str, Any], ...] = (
    {"preferred_names": ["x"]},
    {"preferred_names": ["b"]},
    {"preferred_names": ["c", "b"]},
    {"preferred_names": ["a"], "discard_names": ["a"]},
    {"preferred_names": 3},
    {"discard_names": ["a"]},
    {"discard_names": ["a", "b"]},
    {"discard_names": ["b", "c"]},
)

STRUCTURED = numpy.dtype([("x", "f4"), ("y", "i4")])
# Arguments for `safetensors.numpy.save`.
ARRAYS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "list": lambda: [numpy.ones(1)],
    "array": lambda: numpy.ones(1),
    "int": lambda: {"a": 3},
    "tensor": lambda: {"a": torch.ones(1)},
    "scalar": lambda: {"a": numpy.float32(1)},
    "int key": lambda: {3: numpy.ones(1)},
    "surrogate key": lambda: {"\udcff": numpy.ones(1)},
    "metadata key": lambda: {"__metadata__": numpy.ones(1, numpy.uint8)},
    "object": lambda: {"a": numpy.array([object()])},
    "text": lambda: {"a": numpy.array(["text"])},
    "datetime": lambda: {"a": numpy.array(["2020-01-01"], "datetime64[D]")},
    "structured": lambda: {"a": numpy.zeros(2, STRUCTURED)},
    "void": lambda: {"a": numpy.zeros(2, "V4")},
    "complex128": lambda: {"a": numpy.ones(2, numpy.complex128)},
    "longdouble": lambda: {"a": numpy.ones(2, numpy.longdouble)},
    "big-endian": lambda: {"a": numpy.ones(2, ">f4")},
    "masked": lambda: {"a": numpy.ma.masked_array([1.0, 2.0], [True, False])},
}

# Indices into tensors of 0 to 3 dimensions.
INDICES: dict[str, Any] = {
    "5": 5,
    "-6": -6,
    "huge": 2**70,
    "0": 0,
    "-1": -1,
    "None": None,
    "...": ...,
    "()": (),
    "True": True,
    "[0]": [0],
    "[]": [],
    "[9]": [9],
    "[1.5]": [1.5],
    "['a']": ["a"],
    "1.5": 1.5,
    "object": object(),
    "::-1": slice(None, None, -1),
    "::0": slice(None, None, 0),
    "5:": slice(5, None),
    ":9": slice(None, 9),
    ":-9": slice(None, -9),
    "huge:": slice(2**70, None),
    "::huge": slice(None, None, 2**70),
    "::1.5": slice(None, None, 1.5),
    "(0, 9)": (0, 9),
    "(9, 0)": (9, 0),
    "(0, 0)": (0, 0),
    "(0, 0, 0, 0)": (0, 0, 0, 0),
    "(..., 9)": (..., 9),
    "(..., ...)": (..., ...),
    "(0, ..., 0, 0, 0)": (0, ..., 0, 0, 0),
    "(:, 9)": (slice(None), 9),
    "(:, ::-1)": (slice(None), slice(None, None, -1)),
    "([0], [0])": ([0], [0]),
    "([0], [9])": ([0], [9]),
    "(0, [0])": (0, [0]),
    "([0], :, 0)": ([0], slice(None), 0),
    "(0, 1.5)": (0, 1.5),
    "(0,)*9": (0,) * 9,
    "(True, 0)": (True, 0),
    "(::-1, 9)": (slice(None, None, -1), 9),
    "int64(9)": numpy.int64(9),
    "array([0])": numpy.array([0]),
    "array([True])": numpy.array([True]),
    "tensor([9])": torch.tensor([9]),
}


def given(value: Any, place: pathlib.Path) -> Any:
    """Return a value of `PATHS` for a folder."""
    return value(place) if callable(value) else value


def model() -> nn.Module:
    return nn.Linear(2, 2)


def holding(**tensors: Any) -> nn.Module:
    made = nn.Module()
    for name, tensor in tensors.items():
        made.register_buffer(name, tensor)
    return made


# Arguments in place of a module.
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


# The memory behind the addresses, larger than any call may read.
MEMORY = ctypes.create_string_buffer(64)


def spec(m: SimpleNamespace, **changes: Any) -> Any:
    arguments = {"dtype": "float32", "shape": [2], "data_ptr": ctypes.addressof(MEMORY), "data_len": 8}
    return m.top.TensorSpec(**{**arguments, **changes})


SPECS: dict[str, Mapping[str, Any]] = {
    "dtype zzz": {"dtype": "zzz"},
    "dtype F32": {"dtype": "F32"},
    "dtype torch": {"dtype": torch.float32},
    "dtype complex128": {"dtype": "complex128"},
    "shape negative": {"shape": [-1]},
    "shape text": {"shape": "ab"},
    "shape float": {"shape": [1.5]},
    "shape huge": {"shape": [2**70]},
    "ptr None": {"data_ptr": None},
    "ptr negative": {"data_ptr": -1},
    "ptr huge": {"data_ptr": 2**70},
    "len negative": {"data_len": -1},
    "len huge": {"data_len": 2**70},
    "unknown": {"more": 1},
    "F4 scalar": {"dtype": "float4_e2m1fn_x2", "shape": []},
}

# Tensors for `serialize`. A function returns tensors for given modules.
SERIALIZED: dict[str, Callable[[SimpleNamespace], Any]] = {
    "None": lambda m: None,
    "list": lambda m: [],
    "int value": lambda m: {"a": 3},
    "tensor value": lambda m: {"a": torch.ones(1)},
    "int key": lambda m: {3: spec(m)},
    "metadata key": lambda m: {"__metadata__": spec(m, data_len=8)},
    "too short": lambda m: {"a": spec(m, data_len=7)},
    "too long": lambda m: {"a": spec(m, data_len=9)},
    "nothing": lambda m: {"a": spec(m, data_len=0)},
    "overflow": lambda m: {"a": spec(m, shape=[2**40, 2**40], data_len=8)},
    "half a byte": lambda m: {"a": spec(m, dtype="float4_e2m1fn_x2", shape=[], data_len=1)},
}
