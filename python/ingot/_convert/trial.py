"""A pickle of torch's, gone through without torch, to see what `torch.load` would make of it.

What `torch.load(weights_only=True)` calls is harmless and still knows no measure: ``bytearray(5 << 30)`` is a
line of a pickle. Here every call is paid for by what it would make, and nothing is called. What torch refuses
is no concern of this, except where it cannot be told what it would make.
"""

from __future__ import annotations

import pickle
import re
from typing import TYPE_CHECKING, Any

from .pickles import Bounded, Machine
from .values import elements

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .limits import Budget

# Makes a tensor of a storage that is there, or of tensors that are.
_REBUILT = re.compile(r"torch\.(_utils\._rebuild_\w+|nn\.parameter\.Parameter)")
# Bytes of an element of a storage, by what its class is called.
_WIDTHS = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Untyped": 1,
    "Short": 2,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "Float": 4,
    "Long": 8,
    "Double": 8,
    "ComplexFloat": 8,
    "ComplexDouble": 16,
}
# Of the widest element, for what is not known.
_WIDEST = 16


class Made:
    """In place of an object, which is not made."""

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        pass

    extend = add = append


class Named:
    """In place of a class or a function."""

    def __init__(self, name: str) -> None:
        self.name = name


class Trial(Machine):
    """`storage` is told the key and the bytes of each storage that the pickle names."""

    def __init__(self, source: Bounded, budget: Budget, storage: Callable[[str, int], None]) -> None:
        # Old pickles have text of Python 2, in any encoding.
        super().__init__(source, budget, "bytes")
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        return Named(f"{module}.{name}")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], arguments)

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], arguments)

    def load_build(self) -> None:
        self.pay(self.stack.pop())

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, count, *_ = pid
        if not isinstance(kind, Named) or not isinstance(key, str) or type(count) is not int or count < 0:
            raise pickle.UnpicklingError("a storage without a type, a key and a size")
        word = kind.name.rpartition(".")[2].removesuffix("Storage")
        self._storage(key, count * _WIDTHS.get(word, _WIDEST))
        return Made()

    def _called(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Named) or not isinstance(arguments, tuple):
            raise pickle.UnpicklingError("a call of what is no function")
        self.pay(arguments)
        name = function.name
        if name == "torch._tensor._rebuild_from_type_v2":
            # It calls the first with the third.
            return self._called(arguments[0], arguments[2])
        if name in _MAKERS:
            return _MAKERS[name](self, *arguments)
        if name == "torch._utils._rebuild_qtensor":
            self.budget.unpack(elements(_ints(arguments[2])) * _WIDEST)
        elif name.startswith(("torch.", "builtins.")) and not _REBUILT.fullmatch(name):
            # As many elements as its numbers multiply to, whatever it is.
            self.budget.hold(elements([size for size in _ints(arguments) if size > 0]) * _WIDEST)
        return Made()

    def _list(self, values: Any = ()) -> Any:
        return list(values) if isinstance(values, (list, tuple, set, dict)) else Made()

    def _dict(self, values: Any = ()) -> Any:
        return dict(values) if isinstance(values, (list, tuple, dict)) else Made()

    def _bytes(self, value: Any = b"", *_: object) -> Any:
        nbytes = value if isinstance(value, int) else getattr(value, "nbytes", None)
        # A character is up to four bytes.
        nbytes = len(value) * 4 if isinstance(value, (str, bytes, list, tuple)) else nbytes or 0
        self.budget.hold(max(nbytes, 0))
        return Made(nbytes)

    def _plain(self, *_: object) -> Any:
        return Made()


# What makes as much as it is given, or says how much.
_MAKERS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": Trial._dict,
    "collections.Counter": Trial._dict,
    "builtins.set": Trial._list,
    "torch.Size": Trial._list,
    "_codecs.encode": Trial._bytes,
    "builtins.bytearray": Trial._bytes,
    "builtins.complex": Trial._plain,
    "torch.device": Trial._plain,
    "torch.serialization._get_layout": Trial._plain,
}


def _ints(value: Any) -> list[int]:
    """All numbers in tuples and lists. To be paid for before."""
    found: list[int] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (list, tuple)):
            waiting.extend(one)
        elif isinstance(one, int):
            found.append(one)
    return found
