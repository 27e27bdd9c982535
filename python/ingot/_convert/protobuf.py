"""ONNX models without the values of their tensors, which the package onnx would read into memory first.

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .flatten import MAX_DEPTH
from .limits import OBJECT_NBYTES

if TYPE_CHECKING:
    from typing import IO

    from .limits import Budget

# The messages within a message, by the numbers of their fields in onnx.proto.
_WITHIN = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
# The fields of a tensor that hold values: of each kind, and raw.
_VALUES = (4, 5, 6, 7, 9, 10, 11)
_VARINT, _EIGHT, _SIZED, _FOUR = 0, 1, 2, 5
_LONGEST_VARINT = 10


def without_values(file: IO[bytes], nbytes: int, budget: Budget) -> bytes:
    """The message in `file`, which has so many bytes, but for the values."""
    return _Skimmer(file, budget).message("model", nbytes, 0)


class _Skimmer:
    def __init__(self, file: IO[bytes], budget: Budget) -> None:
        self._file = file
        self._budget = budget

    def message(self, kind: str, end: int, depth: int) -> bytes:
        """The message from here to `end`, a position of the file."""
        if depth > 4 * MAX_DEPTH:
            raise ValueError("messages stand in each other too deep")
        self._budget.hold(OBJECT_NBYTES)
        kept = bytearray()
        while self._file.tell() < end:
            tag = self._varint()
            kept += self._field(kind, tag, end, depth)
        if self._file.tell() > end:
            raise ValueError("a number passes the end of its message")
        return bytes(kept)

    def _field(self, kind: str, tag: int, end: int, depth: int) -> bytes:
        number, wire = tag >> 3, tag & 7
        is_value = kind == "tensor" and number in _VALUES
        if wire == _VARINT:
            body = _encoded(self._varint())
        elif wire in (_EIGHT, _FOUR):
            body = self._take(8 if wire == _EIGHT else 4, end)
        elif wire == _SIZED:
            length = self._varint()
            stop = self._file.tell() + length
            if stop > end:
                raise ValueError(f"cut short: expected {length} more bytes, found {end - self._file.tell()}")
            if is_value:
                self._file.seek(stop)
                return b""
            within = _WITHIN[kind].get(number)
            body = self._take(length, end) if within is None else self.message(within, stop, depth + 1)
            body = _encoded(len(body)) + body
        else:
            raise ValueError(f"a field of the unknown kind {wire}")
        return b"" if is_value else _encoded(tag) + body

    def _take(self, nbytes: int, end: int) -> bytes:
        there = end - self._file.tell()
        if nbytes > there:
            raise ValueError(f"cut short: expected {nbytes} more bytes, found {there}")
        self._budget.hold(nbytes)
        return self._file.read(nbytes)

    def _varint(self) -> int:
        number = 0
        for place in range(_LONGEST_VARINT):
            byte = self._file.read(1)
            if not byte:
                raise ValueError("cut short within a number")
            number |= (byte[0] & 0x7F) << (7 * place)
            if byte[0] < 0x80:
                return number
        raise ValueError(f"a number of more than {_LONGEST_VARINT} bytes")


def _encoded(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
