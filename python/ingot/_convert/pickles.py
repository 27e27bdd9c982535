"""Read pickles without importing or calling the names in them.

A pickle names classes and functions and calls them. Here a name stays a name. `Machine.calls` has a function
of this package for each that files of tensors need; any other makes a `Foreign` object, which can be left out
but not converted. Every step is paid for before it is taken.
"""

from __future__ import annotations

import pickle
import re
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from codecs import escape_decode
from collections.abc import Callable, Mapping
from typing import IO, Any, ClassVar, Literal

import numpy

from ingot._base.text import _quoted

from .limits import OBJECT_NBYTES, VALUE_NBYTES, refused
from .report import Plain, Unusable
from .source import Entry, Region
from .values import code_of, dtype_of, elements

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot.errors import ConversionError
    from ingot.numpy import Array

    from .limits import Budget


# The one in Python: that in C makes room for as many values as a pickle says it will have.
_Base: Any = pickle._Unpickler

# Opcodes that make an object. All others push a value that stands in the file, name one, or move some.
_OBJECTS = (
    *(pickle.EMPTY_LIST, pickle.LIST, pickle.EMPTY_DICT, pickle.DICT, pickle.EMPTY_SET, pickle.FROZENSET),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.REDUCE, pickle.NEWOBJ),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID, pickle.BYTEARRAY8),
    # Another stack.
    pickle.MARK,
)
# Opcodes that make objects in other ways, which files of tensors have no need of. DUP, which no pickler
# writes, would be the shortest way to make work.
_NEVER = (
    pickle.DUP,
    *(pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.PERSID),
    *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)


# Bytes of the longest line: protocol 0 has the values of an array in one.
_LONGEST_LINE = 1 << 28


class Named(Plain):
    """The name of a class, a function or a constant, which is not imported."""

    def __init__(self, name: str) -> None:
        super().__init__("name", name)
        self.name = name


class Foreign(Unusable):
    """A class or function that is never called, or what a call of it would make."""

    def __init__(self, name: str, expected: str) -> None:
        self._name, self._expected = name, expected

    def fault(self, path: str, name: str) -> ConversionError:
        return refused(
            path,
            f"the pickle in it asks for more than {self._expected}, and is not run: {_quoted(self._name)} — "
            "drop=[…] leaves it out",
            code="unsafe-pickle",
            tensor=name,
            found=self._name,
        )

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Ignore what the pickle adds."""

    extend = add = update = append


class Bounded:
    """A stream of `nbytes`, of which nothing is read that is not there, whatever a pickle says."""

    def __init__(self, path: str, stream: IO[bytes], nbytes: int, *, has_spans: bool = True) -> None:
        self.has_spans = has_spans
        """Whether positions of the stream are those of the file."""
        self._path = path
        self._stream = stream
        self._nbytes = nbytes

    def read(self, nbytes: int) -> bytes:
        self._check(nbytes)
        return self._stream.read(nbytes)

    def readline(self) -> bytes:
        return self._stream.readline(_LONGEST_LINE)

    def span(self, nbytes: int) -> Region:
        """The next bytes, which stay where they are. Of a file only."""
        self._check(nbytes)
        position = self._stream.tell()
        self._stream.seek(nbytes, 1)
        return Region(self._path, position, nbytes)

    def left(self) -> int:
        """Return how many bytes follow."""
        return self._nbytes - self._stream.tell()

    def _check(self, nbytes: int) -> None:
        there = self.left()
        if nbytes > there:
            raise refused(
                self._path,
                f"the file is cut short: expected {nbytes} more bytes, found {there}",
                code="truncated",
                expected=nbytes,
                found=there,
            )


class Machine(_Base):  # type: ignore[misc]
    """Build what a pickle describes, as far as the budget reaches.

    Text of Python 2, which may be bytes too, becomes str if it is UTF-8.
    """

    dispatch: ClassVar[dict[int, Any]] = {}
    calls: Mapping[str, Callable[..., Any]]
    """By the name in Python 3; called with the machine and the arguments."""
    expected = "tensors"
    """What the pickle may ask for, in messages."""

    def __init__(self, source: Bounded, budget: Budget) -> None:
        self.source = source
        self.budget = budget
        super().__init__(source)

    def expect_end(self) -> None:
        """Raise if anything follows the pickle, such as another."""
        frame = self._unframer.current_frame
        unread = 0 if frame is None else len(frame.getbuffer()) - frame.tell()
        if following := unread + self.source.left():
            raise pickle.UnpicklingError(f"{following} bytes follow the pickle, which would be lost")

    def knows(self, name: str) -> bool:
        """Return whether the name of a class or function is harmless and means something."""
        return name in self.calls

    def find_class(self, module: str, name: str) -> Named | Foreign:
        full = modern(module, name)
        return Named(full) if self.knows(full) else Foreign(full, self.expected)

    def called(self, function: Any, arguments: Any) -> Any:
        """Return what a call makes. Foreign is what anything foreign is part of."""
        if not isinstance(arguments, tuple):
            raise pickle.UnpicklingError("a call without a tuple of arguments")
        for one in (function, *arguments):
            if isinstance(one, Foreign):
                return one
        self.pay(arguments)
        if not isinstance(function, Named):
            raise pickle.UnpicklingError(f"a call of {type(function).__name__}, which is no function")
        if function.name not in self.calls:
            return Foreign(function.name, self.expected)
        return self.calls[function.name](self, *arguments)

    def _decode_string(self, value: bytes) -> str | bytes:
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value

    def load_string(self) -> None:
        line = self.readline()
        self.budget.hold(len(line))
        text = line[:-1].strip()
        if len(text) < 2 or text[0] != text[-1] or text[:1] not in (b"'", b'"'):
            raise pickle.UnpicklingError("text without quotes")
        self.append(self._decode_string(escape_decode(text[1:-1])[0]))

    def pay(self, value: Any) -> None:
        """Pay for going through all of `value`, as hashing it and copying it do.

        A list that stands in it several times is gone through as often: a few bytes stand for any number.
        """
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, (list, tuple, set, frozenset, dict)):
                self.budget.hold(VALUE_NBYTES * len(one))
                waiting.extend(one)
                waiting.extend(one.values() if isinstance(one, dict) else ())
            elif isinstance(one, (str, bytes, bytearray)):
                self.budget.hold(len(one))

    def _pay_keys(self, keys: list[Any]) -> None:
        for key in keys:
            # A number is hashed at once, and a text only once.
            if not isinstance(key, (str, bytes, int)):
                self.pay(key)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.called(self.stack[-1], arguments)

    load_newobj = load_reduce

    def load_build(self) -> None:
        self.pay(self.stack[-1])
        state = self.stack.pop()
        # Attributes of dicts and of tensors hold nothing that is converted.
        if hasattr(self.stack[-1], "build"):
            self.stack[-1].build(state)

    # Above a mark, the stack has what stands there and nothing else.

    def load_setitem(self) -> None:
        self._pay_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._pay_keys(self.stack[::2])
        super().load_setitems()

    def load_dict(self) -> None:
        self._pay_keys(self.stack[::2])
        super().load_dict()

    def load_additems(self) -> None:
        self._pay_keys(self.stack)
        super().load_additems()

    def load_frozenset(self) -> None:
        self._pay_keys(self.stack)
        super().load_frozenset()

    def load_refused(self) -> None:
        raise pickle.UnpicklingError("an object that is no tensor is refused")


def modern(module: str, name: str) -> str:
    """Return the name that Python 3 and today's NumPy have for what a pickle names."""
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    if module == "numpy.core" or module.startswith("numpy.core."):
        module = "numpy._core" + module.removeprefix("numpy.core")
    return f"{module}.{name}"


def _dict(_: Machine, values: Any = ()) -> dict[Any, Any]:
    return dict(values)


def _set(_: Machine, values: Any = ()) -> set[Any]:
    return set(values)


def _complex(_: Machine, *parts: Any) -> complex:
    return complex(*parts)


def _bytes(machine: Machine, value: Any = b"", encoding: Any = None) -> Any:
    if isinstance(value, int):
        # Not bytes of the file.
        machine.budget.hold(max(value, 0))
        return Plain("bytes", f"{value} bytes")
    if isinstance(value, Region):
        return value
    if isinstance(value, (bytes, bytearray, list, tuple)) and encoding is None:
        return bytes(value)
    return _encoded(machine, value, encoding)


def _encoded(_: Machine, text: Any, encoding: Any = "utf-8") -> bytes:
    if not isinstance(text, str) or encoding not in _ENCODINGS:
        raise pickle.UnpicklingError(f"text in encoding {encoding!r} is refused")
    return text.encode(encoding)


# How protocols 0 to 2 have bytes.
_ENCODINGS = ("latin1", "latin-1", "utf-8")
# What any pickle may have besides tensors.
PLAIN_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "builtins.set": _set,
    "builtins.complex": _complex,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "_codecs.encode": _encoded,
}


def _paid(code: int, name: str) -> Callable[[Machine], None]:
    """The step of this name, which is paid for."""
    price = OBJECT_NBYTES if any(code == one[0] for one in _OBJECTS) else VALUE_NBYTES

    def step(machine: Machine) -> None:
        machine.budget.hold(price)
        getattr(machine, name)()

    return step


def _unknown(code: int) -> Callable[[Machine], None]:
    def step(_: Machine) -> None:
        raise pickle.UnpicklingError(f"the pickle in it has the unknown opcode 0x{code:02x}")

    return step


_REFUSED = {code[0] for code in _NEVER}
Machine.dispatch = {code: _unknown(code) for code in range(256)} | {
    code: _paid(code, "load_refused" if code in _REFUSED else step.__name__)
    for code, step in _Base.dispatch.items()
}


# NumPy's arrays in pickles, whose bytes may stay in the file.


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
