"""Every tensor of a new file, compared with the source once more."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from ingot import _native
from ingot._write.serialize import _REGION
from ingot.errors import ConversionError

from . import npy
from .others import LeftOut
from .refusal import reading, refused
from .runs import differing
from .values import code_of, stored
from .write import apart, code_in, parts
from .zipped import members
from .zipped import opened as opened_member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .runs import Moved
    from .source import Entry

_TITLE = "an .npz archive"


class _Written(Protocol):
    """A new file, of which pieces are read in their order."""

    def begin(self, name: str) -> tuple[str, tuple[int, ...]]: ...
    def piece(self, name: str, index: Any, size: int) -> memoryview: ...


def verify(path: str, kind: str, entries: Sequence[Entry], code: str | None, moved: Moved) -> None:
    """Raise `ConversionError` where a tensor of the file at `path` is not that of the source."""
    with ExitStack() as stack:
        written: _Npz | _Native = _Npz(path, stack) if kind == "npz" else _Native(path, stack)
        if isinstance(written, _Native):
            runs, entries = apart(entries, code)
            for entry in runs:
                _begin(path, written, entry, code)
            name = differing(runs, written.checkpoint, moved)
            if name is not None:
                raise _differs(path, name, "the values of the source", "others")
        for entry in entries:
            _begin(path, written, entry, code)
            for index, part in parts(entry, code):
                held = stored(part)
                if not numpy.array_equal(held, written.piece(entry.name, index, len(held))):
                    raise _differs(path, entry.name, "the values of the source", "others")
                moved(part.nbytes)


def _begin(path: str, written: _Written, entry: Entry, code: str | None) -> None:
    expected = code_in(entry, code), entry.shape
    found = written.begin(entry.name)
    if found != expected:
        raise _differs(path, entry.name, expected, found)


class _Native:
    def __init__(self, path: str, stack: ExitStack) -> None:
        self.checkpoint = _native.Checkpoint.open(path, "pread")
        stack.callback(self.checkpoint.close)

    def begin(self, name: str) -> tuple[str, tuple[int, ...]]:
        info = self.checkpoint.info(name)
        return info.dtype, info.shape

    def piece(self, name: str, index: Any, size: int) -> memoryview:
        buffer, begin = self.checkpoint.select(name, index, _REGION)
        return memoryview(buffer)[begin : begin + size]


class _Npz:
    def __init__(self, path: str, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self._members = members(path)

    def begin(self, name: str) -> tuple[str, tuple[int, ...]]:
        # What fails here is the checksum of the member.
        with reading(self._path, _TITLE):
            self._stream = self._stack.enter_context(opened_member(self._path, self._members[f"{name}.npy"]))
            header = npy.header(self._path, name, self._stream)
        if isinstance(header, LeftOut):
            return "", ()
        return code_of(self._path, name, header.dtype) or "", header.shape

    def piece(self, name: str, index: Any, size: int) -> memoryview:
        with reading(self._path, _TITLE):
            return memoryview(self._stream.read(size))


def _differs(path: str, name: str, expected: object, found: object) -> ConversionError:
    return refused(
        path,
        f"what was written is not what was read: "
        f"expected {expected}, found {found} — the disk or the source is at fault, and nothing was kept",
        code="verification",
        tensor=name,
        expected=expected,
        found=found,
    )
