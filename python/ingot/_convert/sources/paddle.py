"""PaddlePaddle's .pdparams, which are pickles: read by an unpickler that can name nothing but arrays.

Everything that such a pickle calls is one of the small functions below, which put arrays together; whatever
else it names is refused before anything is called. Bytes of arrays stay in the file until they are read.
"""

from __future__ import annotations

import pickle
import struct
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from ingot._convert.flatten import flatten, twice
from ingot._convert.pickles import Bounded, Machine
from ingot._convert.positions import Region, size_of
from ingot._convert.refusal import reading, refused
from ingot._convert.source import Contents, Entry, Options, possible
from ingot._convert.values import code_of, dtype_of, elements
from ingot._text import _quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

    from ingot._convert.limits import Budget
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
        tree = _Unpickler(path, file, options.budget).load()
        parts = _taken_out(tree)
    arrays, left_out = flatten(path, tree, lambda value: isinstance(value, _Array), options.budget)
    with reading(path, TITLE):
        joined = _joined(path, arrays, parts)
        entries = [possible(_entry, path, name, array) for name, array in joined.items()]
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
        expected = elements(shape) * dtype.dtype.itemsize
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
    if expression != "data" or not isinstance(names, dict) or names.keys() != {"data"}:
        raise pickle.UnpicklingError(f"a call of eval is refused: {expression!r}")
    if not isinstance(names["data"], _Array):
        raise pickle.UnpicklingError(f"a call of eval is refused: {expression!r}")
    return names["data"]


def _named(items: object) -> object:
    """In place of `tuple`, by which paddle pickles the others: as ``tuple((name, array))``."""
    if isinstance(items, tuple) and [type(item) for item in items] == [str, _Array]:
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


class _Unpickler(Machine):
    def __init__(self, path: str, file: IO[bytes], budget: Budget) -> None:
        self._path = path
        super().__init__(Bounded(path, file, size_of(path)), budget)

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
            self.append(self.source.span(nbytes))

    def load_binbytes(self) -> None:
        self._load_span(struct.unpack("<I", self.read(4))[0])

    def load_binbytes8(self) -> None:
        self._load_span(struct.unpack("<Q", self.read(8))[0])

    def load_build(self) -> None:
        self.pay(self.stack[-1])
        state = self.stack.pop()
        if not isinstance(self.stack[-1], (_Array, _Dtype)):
            raise pickle.UnpicklingError(f"a state for {type(self.stack[-1]).__name__} is refused")
        self.stack[-1].__setstate__(state)

    # Arrays are made by calls alone.
    load_newobj = load_binpersid = Machine.load_refused


def _taken_out(tree: Any) -> dict[str, Any]:
    """How tensors were cut, which `paddle.save` adds to a dict of them, as it does a table of their names."""
    if not isinstance(tree, dict):
        return {}
    table = tree.get(_NAME_TABLE)
    # A tensor of that name is a tensor.
    if isinstance(table, dict) and all(isinstance(name, str) for name in table.values()):
        del tree[_NAME_TABLE]
    return tree.pop(_CUT) if isinstance(tree.get(_CUT), dict) else {}


def _joined(path: str, arrays: dict[str, _Array], cut: dict[str, Any]) -> dict[str, _Array]:
    """Tensors that older protocols had to cut, in one piece again."""
    joined = dict(arrays)
    for name, how in cut.items():
        if name in joined:
            raise twice(path, name)
        whole = _Array()
        whole.parts = [joined.pop(part) for part in how["slices"]]
        whole.dtype, whole.shape, whole.is_fortran = whole.parts[0].dtype, tuple(how["OriginShape"]), False
        if elements(whole.shape) != sum(elements(part.shape) for part in whole.parts):
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
