"""The machine that reads pickles, with every step paid for before it is taken."""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any, ClassVar

from .limits import OBJECT_NBYTES, VALUE_NBYTES
from .positions import Region
from .refusal import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO

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
# Opcodes that make objects in other ways, which files of tensors have no need of.
_NEVER = (
    *(pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.PERSID),
    *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)


class Bounded:
    """A stream of `nbytes`, of which nothing is read that is not there, whatever a pickle says."""

    def __init__(self, path: str, stream: IO[bytes], nbytes: int) -> None:
        self._path = path
        self._stream = stream
        self._nbytes = nbytes

    def read(self, nbytes: int) -> bytes:
        self._check(nbytes)
        return self._stream.read(nbytes)

    def readline(self) -> bytes:
        return self._stream.readline(1 << 16)

    def span(self, nbytes: int) -> Region:
        """The next bytes, which stay where they are. Of a file only."""
        self._check(nbytes)
        position = self._stream.tell()
        self._stream.seek(nbytes, 1)
        return Region(self._path, position, nbytes)

    def _check(self, nbytes: int) -> None:
        there = self._nbytes - self._stream.tell()
        if nbytes > there:
            raise refused(
                self._path,
                f"the file is cut short: expected {nbytes} more bytes, found {there}",
                code="truncated",
                expected=nbytes,
                found=there,
            )


class Machine(_Base):  # type: ignore[misc]
    """Builds what a pickle says, as far as the budget reaches. What may be called, subclasses say."""

    dispatch: ClassVar[dict[int, Any]] = {}

    def __init__(self, source: Bounded, budget: Budget, encoding: str = "ASCII") -> None:
        self.source = source
        self.budget = budget
        super().__init__(source, encoding=encoding)

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

    def load_bytearray8(self) -> None:
        # Only what is there: the standard library makes room for as much as the pickle says.
        (nbytes,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(nbytes)))

    def load_reduce(self) -> None:
        self.pay(self.stack[-1])
        super().load_reduce()

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
