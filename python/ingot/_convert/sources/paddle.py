"""PaddlePaddle's .pdparams, which are pickles: read by an unpickler that can name nothing but arrays.

Everything that such a pickle calls is one of the small functions below, which put arrays together; whatever
else it names is refused before anything is called. Bytes of arrays stay in the file until they are read.
"""

from __future__ import annotations

import pickle
import struct
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy

from ingot._convert.flatten import flatten
from ingot._convert.positions import Region, size_of
from ingot._convert.refusal import refused
from ingot._convert.source import Contents, Entry, Options, possible
from ingot._convert.unreadable import reading
from ingot._convert.values import code_of, dtype_of
from ingot.errors import _quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

    from ingot.numpy import Array

TITLE = "a PaddlePaddle checkpoint"
# Bytes that are worth a second visit to the file.
_SPAN_NBYTES = 1 << 16
# What `paddle.save` adds to a dict of tensors.
_NAME_TABLE = "StructuredToParameterName@@"
# Where it says how tensors of more than 4 GiB were cut, and below which name the parts stand.
_CUT = "UnpackBigParamInfor@@"


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The tensors of nested dicts, named as `ingot._convert.flatten` says."""
    with reading(path, TITLE), open(path, "rb") as file:
        tree = _Unpickler(path, file).load()
    if isinstance(tree, dict):
        tree.pop(_NAME_TABLE, None)
    parts = tree.pop(_CUT, {}) if isinstance(tree, dict) else {}
    arrays, left_out = flatten(path, tree, lambda value: isinstance(value, _Array))
    with reading(path, TITLE):
        entries = [possible(_entry, path, name, array) for name, array in _joined(arrays, parts).items()]
    yield Contents(entries, left_out, {"format": "paddle"})


class _Dtype:
    """A pickled `numpy.dtype`."""

    def __init__(self, word: object, align: object = False, copy: object = False) -> None:
        if not isinstance(word, str) or word.lstrip("<>|=")[:1] not in tuple("?biufc"):
            raise pickle.UnpicklingError(f"an array of dtype {word!r} is refused: expected numbers")
        self.dtype = numpy.dtype(word)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        if order not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError("a dtype of records is refused: expected numbers")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """A pickled `numpy.ndarray`, of which the bytes may still be in the file."""

    dtype: numpy.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    parts: list[_Array]

    def __init__(self, *arguments: object) -> None:
        self.raw: Region | bytes = b""
        self.parts = []

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, raw = state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, (bytes, Region)):
            raise pickle.UnpicklingError("an array of objects is refused: expected numbers")
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise pickle.UnpicklingError("an array without a shape")
        found = raw.nbytes if isinstance(raw, Region) else len(raw)
        expected = prod(shape) * dtype.dtype.itemsize
        if expected != found:
            raise pickle.UnpicklingError(
                f"an array of shape {list(shape)} of {dtype.dtype} needs {expected} bytes, found {found}"
            )
        self.dtype, self.shape, self.is_fortran, self.raw = dtype.dtype, shape, bool(is_fortran), raw

    def read(self, name: str) -> Array:
        if self.parts:
            return numpy.concatenate([part.read(name).reshape(-1) for part in self.parts]).reshape(self.shape)
        raw = self.raw.read(name) if isinstance(self.raw, Region) else numpy.frombuffer(self.raw, numpy.uint8)
        # Paddle keeps bfloat16 in NumPy's uint16, and has no uint16 of its own.
        dtype = dtype_of("BF16") if self.dtype == numpy.uint16 else self.dtype
        return raw.view(dtype).reshape(self.shape, order="F" if self.is_fortran else "C")


def _scalar(dtype: _Dtype, raw: bytes) -> _Array:
    array = _Array()
    array.__setstate__((1, (), dtype, False, raw))
    return array


def _data(expression: object, names: object) -> object:
    """In place of `eval`, by which paddle pickles a kind of tensor: ``eval("data", {"data": array})``."""
    if expression != "data" or not isinstance(names, dict) or not isinstance(names.get("data"), _Array):
        raise pickle.UnpicklingError(f"a call of eval is refused: {expression!r}")
    return names["data"]


def _named(items: object) -> object:
    """In place of `tuple`, by which paddle pickles the others: as ``tuple((name, array))``."""
    if isinstance(items, tuple) and len(items) == 2 and isinstance(items[1], _Array):
        return items[1]
    return tuple(items) if isinstance(items, (tuple, list)) else ()


def _encoded(text: object, encoding: object) -> bytes:
    """In place of `_codecs.encode`, by which old protocols pickle bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in encoding {encoding!r} are refused")
    return text.encode("latin1")


class _NdarrayClass:
    """In place of `numpy.ndarray`, which is only ever an argument. It cannot be called."""


_NUMPY: dict[str, Callable[..., Any]] = {
    "multiarray _reconstruct": _Array,
    "multiarray scalar": _scalar,
}
_ADMITTED: dict[str, Any] = {
    "numpy ndarray": _NdarrayClass(),
    "numpy dtype": _Dtype,
    "builtins tuple": _named,
    "__builtin__ tuple": _named,
    "builtins eval": _data,
    "__builtin__ eval": _data,
    "_codecs encode": _encoded,
    "collections OrderedDict": dict,
    **{f"numpy.core.{name}": function for name, function in _NUMPY.items()},
    **{f"numpy._core.{name}": function for name, function in _NUMPY.items()},
}

# Opcodes that make objects in other ways than by a call of one of these, which arrays have no need of.
_NEVER = (
    *(pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.PERSID, pickle.BINPERSID),
    *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)

# The one in Python: that in C makes room for as many values as a pickle says it will have.
_Base: Any = pickle._Unpickler


class _Unpickler(_Base):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Any]] = dict(_Base.dispatch)

    def __init__(self, path: str, file: IO[bytes]) -> None:
        self._path = path
        self._source = _Bounded(path, file)
        super().__init__(self._source)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[f"{module} {name}"]
        except KeyError:
            raise refused(
                self._path,
                f"the pickle in it asks for more than arrays, and is not run: {_quoted(f'{module}.{name}')}",
                code="unsafe-pickle",
                expected="arrays, numbers, text, lists and dicts",
                found=f"{module}.{name}",
            ) from None

    def _load_span(self, nbytes: int) -> None:
        if nbytes < _SPAN_NBYTES or self._unframer.current_frame is not None:
            self.append(self.read(nbytes))
        else:
            self.append(self._source.span(nbytes))

    def load_binbytes(self) -> None:
        self._load_span(struct.unpack("<I", self.read(4))[0])

    def load_binbytes8(self) -> None:
        self._load_span(struct.unpack("<Q", self.read(8))[0])

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], (_Array, _Dtype)):
            raise pickle.UnpicklingError(f"a state for {type(self.stack[-1]).__name__} is refused")
        self.stack[-1].__setstate__(state)

    def load_refused(self) -> None:
        raise pickle.UnpicklingError("an object that is no array is refused")

    dispatch[pickle.BINBYTES[0]] = load_binbytes
    dispatch[pickle.BINBYTES8[0]] = load_binbytes8
    dispatch[pickle.BUILD[0]] = load_build
    for _opcode in _NEVER:
        dispatch[_opcode[0]] = load_refused


class _Bounded:
    """A file of which nothing is read that is not there, whatever a pickle says."""

    def __init__(self, path: str, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._nbytes = size_of(path)

    def read(self, nbytes: int) -> bytes:
        self._check(nbytes)
        return self._file.read(nbytes)

    def readline(self) -> bytes:
        return self._file.readline(1 << 16)

    def span(self, nbytes: int) -> Region:
        self._check(nbytes)
        position = self._file.tell()
        self._file.seek(nbytes, 1)
        return Region(self._path, position, nbytes)

    def _check(self, nbytes: int) -> None:
        there = self._nbytes - self._file.tell()
        if nbytes > there:
            raise refused(
                self._path,
                f"the file is cut short: expected {nbytes} more bytes, found {there}",
                code="truncated",
                expected=nbytes,
                found=there,
            )


def _joined(arrays: dict[str, _Array], cut: dict[str, Any]) -> dict[str, _Array]:
    """Tensors that older protocols had to cut, in one piece again."""
    joined = dict(arrays)
    for name, how in cut.items():
        whole = _Array()
        whole.parts = [joined.pop(part) for part in how["slices"]]
        whole.dtype, whole.shape, whole.is_fortran = whole.parts[0].dtype, tuple(how["OriginShape"]), False
        if prod(whole.shape) != sum(prod(part.shape) for part in whole.parts):
            raise pickle.UnpicklingError(
                f"the parts of {name!r} do not make up its shape {list(whole.shape)}"
            )
        joined[name] = whole
    return joined


def _entry(path: str, name: str, array: _Array) -> Entry:
    code = code_of(path, name, array.dtype)
    assert code is not None, "numbers only: the dtype was checked"
    code = "BF16" if code == "U16" else code
    return Entry(name, code, array.shape, partial(array.read, name), id(array))
