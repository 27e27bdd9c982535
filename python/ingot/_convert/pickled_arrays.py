"""NumPy's arrays in pickles, whose bytes may stay in the file."""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy

from .pickles import PLAIN_CALLS, Machine, Named
from .report import Plain, Unusable
from .source import Entry, Region
from .values import code_of, dtype_of, elements

if TYPE_CHECKING:
    from ingot.numpy import Array

# Bytes that are worth a second visit to the file.
_SPAN_NBYTES = 1 << 16
_ML_DTYPES = "ml_dtypes."


class Dtype:
    """A pickled `numpy.dtype`."""

    def __init__(self, word: object, align: object = False, copy: object = False) -> None:
        if isinstance(word, Named) and word.name.startswith(_ML_DTYPES):
            word = word.name.removeprefix(_ML_DTYPES)
        if not isinstance(word, str):
            raise pickle.UnpicklingError(f"a dtype of {type(word).__name__}")
        self.word = word
        self._order: Literal["<", ">", "|", "="] = "="

    def build(self, state: tuple[Any, ...]) -> None:
        """Take the byte order; a dtype of records has more."""
        self._order = state[1]
        if self._order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"the byte order {self._order!r}")
        if any(part is not None for part in state[2:5]):
            self.word = "V"

    def resolved(self) -> numpy.dtype[Any]:
        """Return the dtype; `TypeError` if the name is unknown."""
        if self.word.lstrip("<>|=")[:1] in ("O", "V", "S", "a", "U", "M", "m", "T"):
            return numpy.dtype(self.word.lstrip("<>|=")[:1].replace("a", "S").replace("T", "U"))
        try:
            found = numpy.dtype(self.word)
        except TypeError:
            found = dtype_of(code_in(self.word))
        return found.newbyteorder(self._order)


def code_in(word: str) -> str:
    """Return the code of a dtype of ml_dtypes; `TypeError` if the name is unknown."""
    from ingot.numpy import ML_DTYPES

    for code, name in ML_DTYPES.items():
        if name == word:
            return code
    raise TypeError(f"the dtype {word!r}")


class PickledArray(Plain):
    """A pickled `numpy.ndarray`. Text and times are no tensor."""

    def __init__(self) -> None:
        super().__init__("array of text or times", "")
        self.raw: Region | bytes | bytearray = b""
        self.dtype: numpy.dtype[Any] = numpy.dtype("V")
        self.shape: tuple[int, ...] = ()
        self.is_fortran = False
        self.fault: Unusable | None = Unusable("an array without values", "unreadable")

    def build(self, state: tuple[Any, ...]) -> None:
        """Take the shape, the dtype and the values."""
        _, shape, dtype, is_fortran, raw = state
        self.fill(raw, dtype, shape, bool(is_fortran))

    def fill(self, raw: Any, dtype: Any, shape: Any, is_fortran: bool) -> None:
        """Take what describes the array, or the fault in it."""
        self.fault = None
        if not isinstance(dtype, Dtype):
            raise pickle.UnpicklingError("an array without a dtype")
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise pickle.UnpicklingError("an array without a shape")
        # Text of Python 2 that happens to be UTF-8.
        raw = raw.encode() if isinstance(raw, str) else raw
        try:
            self.dtype = dtype.resolved()
        except TypeError:
            self.fault = Unusable(
                f"an array of the dtype {dtype.word!r}: expected numbers", "unsupported-dtype", dtype.word
            )
            return
        self.shape, self.is_fortran = shape, is_fortran
        if self.dtype.kind in "OV" and self.dtype.isbuiltin != 2:
            self.fault = Unusable(
                "an array of objects or records: expected numbers — drop=[…] leaves it out",
                "unsupported-dtype",
                "object",
            )
            return
        if self.is_text:
            self.text = f"shape {list(shape)}"
            return
        found = (
            raw.nbytes if isinstance(raw, Region) else len(raw) if isinstance(raw, (bytes, bytearray)) else -1
        )
        expected = elements(shape) * self.dtype.itemsize
        if expected != found:
            self.fault = Unusable(
                f"an array of shape {list(shape)} of {self.dtype} needs {expected} bytes, found {found}",
                "size-mismatch",
                found,
            )
            return
        self.raw = raw

    @property
    def is_text(self) -> bool:
        """Whether it has text or times instead of numbers."""
        return self.fault is None and self.dtype.kind in "SUMm"

    def read(self, name: str, dtype: numpy.dtype[Any] | None = None) -> Array:
        """Return the values, of another dtype of the same size if it is given."""
        raw = self.raw.read(name) if isinstance(self.raw, Region) else numpy.frombuffer(self.raw, numpy.uint8)
        return raw.view(dtype or self.dtype).reshape(self.shape, order="F" if self.is_fortran else "C")


def is_array(value: Any) -> bool:
    """Return whether it is an array of numbers, or a faulty one."""
    return isinstance(value, PickledArray) and not value.is_text


def entry(path: str, name: str, array: PickledArray, dtype: numpy.dtype[Any] | None = None) -> Entry:
    """Return the entry of an array, or raise its fault. With `dtype`, its bytes are values of that."""
    if array.fault is not None:
        raise array.fault.fault(path, name)
    code = code_of(path, name, dtype or array.dtype)
    assert code is not None, "numbers only: the dtype was checked"
    return Entry(name, code, array.shape, lambda: array.read(name, dtype), id(array))


def _reconstructed(_: Machine, *arguments: Any) -> PickledArray:
    return PickledArray()


def _scalar(_: Machine, dtype: Any, raw: Any = None) -> PickledArray:
    array = PickledArray()
    array.fill(raw, dtype, (), False)
    return array


def _from_buffer(_: Machine, raw: Any, dtype: Any, shape: Any, order: Any) -> PickledArray:
    array = PickledArray()
    array.fill(raw, dtype, shape, order == "F")
    return array


def _dtype(_: Machine, *arguments: Any) -> Dtype:
    return Dtype(*arguments)


ARRAY_CALLS: dict[str, Callable[..., Any]] = {
    **PLAIN_CALLS,
    "numpy.dtype": _dtype,
    "numpy._core.multiarray._reconstruct": _reconstructed,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _from_buffer,
}
# Classes that are arguments, or values of their own.
_CLASSES = re.compile(r"numpy\.(ndarray|bool_?|u?int\d+|float\d+|complex\d+)|ml_dtypes\.\w+")


class ArrayMachine(Machine):
    """Build arrays, and leave their bytes in the file if they are many."""

    calls = ARRAY_CALLS
    expected = "arrays"

    def knows(self, name: str) -> bool:
        return super().knows(name) or _CLASSES.fullmatch(name) is not None

    def _load_span(self, nbytes: int) -> None:
        if nbytes < _SPAN_NBYTES or not self.source.has_spans or self._unframer.current_frame is not None:
            self.append(self.read(nbytes))
        else:
            self.append(self.source.span(nbytes))

    def load_binbytes(self) -> None:
        self._load_span(struct.unpack("<I", self.read(4))[0])

    def load_binbytes8(self) -> None:
        self._load_span(struct.unpack("<Q", self.read(8))[0])

    load_bytearray8 = load_binbytes8
