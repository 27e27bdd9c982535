"""Read pickles of arrays without importing or calling the names in them.

A pickle names classes and functions and calls them. Here nothing is imported or called by name.
`Machine.calls` has a function of this package for each call that files of tensors need. Any other call
creates a `Placeholder`, or a `Foreign` object if its name is one of the interpreter or of the system, which
no checkpoint needs, or may make tensors. Every step is paid for before it runs.
"""

from __future__ import annotations

import builtins
import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from codecs import escape_decode
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy

from ingot._base.text import _quoted
from ingot.numpy import ML_DTYPES

from .limits import OBJECT_NBYTES, VALUE_NBYTES, refused
from .report import Placeholder, Plain, Unusable
from .source import Entry, Raw, Region, Stream, raw_bytes, raw_nbytes
from .values import code_of, dtype_of, elements

if TYPE_CHECKING:
    from ingot.errors import ConversionError
    from ingot.numpy import Array

    from .limits import Budget


# Python's own class: the one in C allocates as many values as a pickle claims.
_Base: Any = pickle._Unpickler

# Opcodes that make an object or a stack. All others push a value of the file, name one, or move some.
_OBJECTS = (
    *(pickle.EMPTY_LIST, pickle.LIST, pickle.EMPTY_DICT, pickle.DICT, pickle.EMPTY_SET, pickle.FROZENSET),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.REDUCE, pickle.NEWOBJ),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID, pickle.BYTEARRAY8, pickle.MARK),
)
# Opcodes that create objects in ways that files of tensors do not need. DUP, which no pickler writes, would
# be the cheapest way to cause work.
_NEVER = (
    *(pickle.DUP, pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.PERSID),
    *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)
# Steps that hash values, and the part of the stack with them. Above a mark, the stack has the values only.
_KEYS = {
    "load_setitem": slice(-2, -1),
    "load_setitems": slice(0, None, 2),
    "load_dict": slice(0, None, 2),
    "load_additems": slice(None),
    "load_frozenset": slice(None),
}

# The number of remaining bytes of the file, if at least this many remain.
_SPAN_NBYTES = 1 << 16
# The encodings of bytes in protocols 0 to 2.
_ENCODINGS = ("latin1", "latin-1", "utf-8")


class Named(Plain):
    """The name of a class, a function or a constant, which is not imported."""

    def __init__(self, name: str) -> None:
        super().__init__("name", name)
        self.name = name


class Foreign(Unusable):
    """A function that may run programs or make tensors, or the result of its call, which is never made."""

    def __init__(self, name: str, expected: str) -> None:
        self.name, self._expected = name, expected

    def fault(self, path: str, name: str) -> ConversionError:
        return refused(
            path,
            f"the pickle in it refers to more than {self._expected}, and is not run: {_quoted(self.name)} — "
            "drop=[…] leaves it out",
            "unsafe-pickle",
            name,
            found=self.name,
        )

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Ignore a value that the pickle adds."""

    extend = add = update = append


# Nothing is ever called. These names show that a file was made to run programs, or that it has tensors in an
# unknown form.
_NOTED = re.compile(
    r"(os|posix|nt|sys|subprocess|shutil|socket|runpy|importlib|imp|pkgutil|pty|ctypes|cffi|code|codeop|types"
    r"|_?pickle|dill|cloudpickle|marshal|_?operator|webbrowser|timeit|c?[pP]rofile|pdb|bdb|trace|signal|threading"
    r"|_thread|multiprocessing|asyncio|tempfile|io|_io|pip|setuptools|distutils|urllib|http|requests|httpx|ftplib"
    r"|smtplib|platform|commands|numpy(?!\.random\.)|torch\.(hub|jit|serialization|ops|classes|storage|cuda|_\w+)"
    r"|torch\.nn\.parameter|torch(?=\.\w+$))\..*",
    re.DOTALL,
)


def _is_noted(name: str) -> bool:
    """Return whether a name is a function of the interpreter, or one of `_NOTED`."""
    module, _, function = name.partition(".")
    if module == "builtins":
        return not isinstance(getattr(builtins, function, None), type)
    return _NOTED.fullmatch(name) is not None


class Machine(_Base):  # type: ignore[misc]
    """Build the arrays of a pickle, as far as the budget reaches. Their bytes may stay in the file.

    Text of Python 2, which may be bytes too, becomes str if it is UTF-8.
    """

    dispatch: ClassVar[dict[int, Any]] = {}
    expected = "arrays"
    """A description for messages of the objects that the pickle may refer to."""
    classes = re.compile(r"numpy\.(ndarray|bool_?|u?int\d+|float\d+|complex\d+)|ml_dtypes\.\w+")
    """Classes that occur as arguments or as values."""

    def __init__(self, source: Stream, budget: Budget) -> None:
        self.source = source
        self.budget = budget
        # By the name in Python 3.
        self.calls: dict[str, Callable[..., Any]] = {
            **CALLS,
            "builtins.bytes": self._bytes,
            "builtins.bytearray": self._bytes,
        }
        super().__init__(source)

    def expect_end(self) -> None:
        """Raise if anything follows the pickle, such as another."""
        frame = self._unframer.current_frame
        unread = 0 if frame is None else len(frame.getbuffer()) - frame.tell()
        if following := unread + self.source.left():
            raise pickle.UnpicklingError(f"{following} bytes follow the pickle, which would be lost")

    def knows(self, name: str) -> bool:
        """Return whether the name of a class or function is harmless and has a meaning."""
        return name in self.calls or self.classes.fullmatch(name) is not None

    def find_class(self, module: str, name: str) -> Named | Foreign | Placeholder:
        full = modern(module, name)
        if self.knows(full):
            return Named(full)
        return Foreign(full, self.expected) if _is_noted(full) else Placeholder(full)

    def called(self, function: Any, arguments: Any) -> Any:
        """Return the result of a call. If any part of the call is unknown, the result is."""
        if not isinstance(arguments, tuple):
            raise pickle.UnpicklingError("a call without a tuple of arguments")
        for one in (function, *arguments):
            if isinstance(one, Foreign):
                return one
        self.pay(arguments)
        for one in (function, *arguments):
            if isinstance(one, Placeholder):
                return Placeholder(one.text, arguments)
        if not isinstance(function, Named):
            raise pickle.UnpicklingError(f"a call of {type(function).__name__}, which is not a function")
        if function.name not in self.calls:
            # A class of tensors or storages. Its objects would have memory outside of the file.
            return Foreign(function.name, self.expected)
        return self.calls[function.name](*arguments)

    def pay(self, value: Any) -> None:
        """Pay for a visit to every part of `value`, as hashing and copying do.

        A list that occurs several times is visited as often, so a few bytes can cause any number of visits.
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

    def pay_keys(self, keys: list[Any]) -> None:
        """Pay for hashing these values. Numbers are hashed at once, and text only once."""
        for key in keys:
            if not isinstance(key, (str, bytes, int)):
                self.pay(key)

    def _bytes(self, value: Any = b"", encoding: Any = None) -> Any:
        if isinstance(value, int):
            # These are not bytes of the file.
            self.budget.hold(max(value, 0))
            return Plain("bytes", f"{value} bytes")
        if isinstance(value, Region):
            return value
        if isinstance(value, (bytes, bytearray, list, tuple)) and encoding is None:
            return bytes(value)
        return _encoded(value, encoding)

    def _decode_string(self, value: bytes) -> str | bytes:
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value

    def _load_span(self, nbytes: int) -> None:
        if nbytes < _SPAN_NBYTES or not self.source.has_spans or self._unframer.current_frame is not None:
            self.append(self.read(nbytes))
        else:
            self.append(self.source.span(nbytes))

    def load_binbytes(self) -> None:
        self._load_span(int.from_bytes(self.read(4), "little"))

    def load_binbytes8(self) -> None:
        self._load_span(int.from_bytes(self.read(8), "little"))

    load_bytearray8 = load_binbytes8

    def load_string(self) -> None:
        line = self.readline()
        self.budget.hold(len(line))
        text = line[:-1].strip()
        if len(text) < 2 or text[0] != text[-1] or text[:1] not in (b"'", b'"'):
            raise pickle.UnpicklingError("text without quotes")
        self.append(self._decode_string(escape_decode(text[1:-1])[0]))

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.called(self.stack[-1], arguments)

    load_newobj = load_reduce

    def load_build(self) -> None:
        self.pay(self.stack[-1])
        state = self.stack.pop()
        # Attributes of dicts and of tensors have nothing to convert.
        if hasattr(self.stack[-1], "build"):
            self.stack[-1].build(state)

    def load_refused(self) -> None:
        raise pickle.UnpicklingError("an object that is not a tensor is refused")


def modern(module: str, name: str) -> str:
    """Return the name in Python 3 and today's NumPy for a name in a pickle."""
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    if module == "numpy.core" or module.startswith("numpy.core."):
        module = "numpy._core" + module.removeprefix("numpy.core")
    return f"{module}.{name}"


def _paid(code: int, name: str) -> Callable[[Machine], None]:
    """Return the step of this name, which is paid for."""
    price = OBJECT_NBYTES if any(code == one[0] for one in _OBJECTS) else VALUE_NBYTES
    keys = _KEYS.get(name)

    def step(machine: Machine) -> None:
        machine.budget.hold(price)
        if keys is not None:
            machine.pay_keys(machine.stack[keys])
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


class Dtype:
    """A pickled `numpy.dtype`."""

    def __init__(self, word: object, align: object = False, copy: object = False) -> None:
        word = word.name.removeprefix("ml_dtypes.") if isinstance(word, Named) else word
        if not isinstance(word, str):
            raise pickle.UnpicklingError(f"a dtype of {type(word).__name__}")
        self.word = word
        self._order: Literal["<", ">", "|", "="] = "="

    def build(self, state: tuple[Any, ...]) -> None:
        """Set the byte order. The state of a dtype of records has more."""
        self._order = state[1]
        if self._order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"the byte order {self._order!r}")
        if any(part is not None for part in state[2:5]):
            self.word = "V"

    def resolved(self) -> numpy.dtype[Any]:
        """Return the dtype. Raises `TypeError` if the name is unknown."""
        kind = self.word.lstrip("<>|=")[:1]
        if kind in ("O", "V", "S", "a", "U", "M", "m", "T"):
            return numpy.dtype(kind.replace("a", "S").replace("T", "U"))
        code = next((code for code, name in ML_DTYPES.items() if name == self.word), None)
        return (numpy.dtype(self.word) if code is None else dtype_of(code)).newbyteorder(self._order)


class PickledArray(Plain):
    """A pickled `numpy.ndarray`. An array of text or times is not a tensor."""

    def __init__(self) -> None:
        super().__init__("array of text or times", "")
        self.raw: Raw = b""
        self.dtype: numpy.dtype[Any] = numpy.dtype("V")
        self.shape: tuple[int, ...] = ()
        self.is_fortran = False
        self.fault: Unusable | None = Unusable("an array without values", "unreadable")

    def build(self, state: tuple[Any, ...]) -> None:
        """Set the shape, the dtype and the values."""
        _, shape, dtype, is_fortran, raw = state
        self.fill(raw, dtype, shape, bool(is_fortran))

    def fill(self, raw: Any, dtype: Any, shape: Any, is_fortran: bool) -> None:
        """Set the values and their description, or the fault in it."""
        if not isinstance(dtype, Dtype):
            raise pickle.UnpicklingError("an array without a dtype")
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise pickle.UnpicklingError("an array without a shape")
        self.shape, self.is_fortran = shape, is_fortran
        # Text of Python 2 that happens to be UTF-8.
        self.raw = raw.encode() if isinstance(raw, str) else raw
        self.fault = self._described(dtype)

    def _described(self, dtype: Dtype) -> Unusable | None:
        """Set the dtype, and return the fault in the description."""
        try:
            self.dtype = dtype.resolved()
        except TypeError:
            reason = f"an array of the dtype {dtype.word!r}: expected numbers"
            return Unusable(reason, "unsupported-dtype", dtype.word)
        if self.dtype.kind in "OV" and self.dtype.isbuiltin != 2:
            reason = "an array of objects or records: expected numbers — drop=[…] leaves it out"
            return Unusable(reason, "unsupported-dtype", "object")
        if self.dtype.kind in "SUMm":
            self.text = f"shape {list(self.shape)}"
            return None
        expected = elements(self.shape) * self.dtype.itemsize
        found = raw_nbytes(self.raw) if isinstance(self.raw, Raw) else -1
        if expected == found:
            return None
        reason = f"an array of shape {list(self.shape)} of {self.dtype} needs {expected} bytes, found {found}"
        return Unusable(reason, "size-mismatch", found)

    @property
    def is_text(self) -> bool:
        """Whether the array contains text or times instead of numbers."""
        return self.fault is None and self.dtype.kind in "SUMm"

    def read(self, name: str, dtype: numpy.dtype[Any]) -> Array:
        """Return the values as `dtype`, which has the size of the array's own."""
        order: Literal["F", "C"] = "F" if self.is_fortran else "C"
        return raw_bytes(self.raw, name).view(dtype).reshape(self.shape, order=order)


def is_array(value: Any) -> bool:
    """Return whether it is an array of numbers, or a faulty one."""
    return isinstance(value, PickledArray) and not value.is_text


def entry(path: str, name: str, array: PickledArray, dtype: numpy.dtype[Any] | None = None) -> Entry:
    """Return the entry of an array, or raise its fault. With `dtype`, its bytes are values of that dtype."""
    if array.fault is not None:
        raise array.fault.fault(path, name)
    dtype = dtype or array.dtype
    code = code_of(path, name, dtype)
    assert code is not None, "numbers only: the dtype was checked"
    return Entry(name, code, array.shape, lambda: array.read(name, dtype), id(array))


def _encoded(text: Any, encoding: Any = "utf-8") -> bytes:
    if not isinstance(text, str) or encoding not in _ENCODINGS:
        raise pickle.UnpicklingError(f"text in encoding {encoding!r} is refused")
    return text.encode(encoding)


def _reconstructed(*arguments: Any) -> PickledArray:
    return PickledArray()


def _reconstructor(*arguments: object) -> Placeholder:
    return Placeholder("object", arguments)


def _filled(raw: Any, dtype: Any, shape: Any, order: Any) -> PickledArray:
    array = PickledArray()
    array.fill(raw, dtype, shape, order == "F")
    return array


def _scalar(dtype: Any, raw: Any = None) -> PickledArray:
    return _filled(raw, dtype, (), "C")


CALLS: dict[str, Callable[..., Any]] = {
    # Objects of unknown classes, which are arguments, become placeholders.
    "copyreg._reconstructor": _reconstructor,
    "collections.OrderedDict": dict,
    "collections.Counter": dict,
    "builtins.set": set,
    "builtins.complex": complex,
    "_codecs.encode": _encoded,
    "numpy.dtype": Dtype,
    "numpy._core.multiarray._reconstruct": _reconstructed,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _filled,
}
