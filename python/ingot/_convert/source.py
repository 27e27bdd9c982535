"""The contents of a source: tensors, which are read one at a time, and other values."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy

from ingot._base.frameworks import installing
from ingot.errors import ConversionError

from .limits import RECORD_NBYTES, reading, refused
from .report import LeftOut, Plain
from .values import dtype_of, nbytes

if TYPE_CHECKING:
    from ingot.numpy import Array

    from .limits import Budget


class Region(Plain):
    """A run of bytes in a file, which is opened when they are read."""

    __slots__ = ("nbytes", "path", "position")

    def __init__(self, path: str, position: int, nbytes: int) -> None:
        super().__init__("bytes", f"{nbytes} bytes")
        self.path = path
        self.position = position
        self.nbytes = nbytes

    def read(self, name: str) -> Array:
        """Return the bytes, for tensor `name`."""
        found = numpy.empty(self.nbytes, numpy.uint8)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.position)
            fill(file, found.data, self.path, name)
        return found


# Bytes of a file, which may be in memory already.
Raw = Region | bytes | bytearray


def raw_nbytes(raw: Raw) -> int:
    """Return how many bytes these are."""
    return raw.nbytes if isinstance(raw, Region) else len(raw)


def raw_bytes(raw: Raw, name: str) -> Array:
    """Return the bytes as an array, for tensor `name`."""
    return raw.read(name) if isinstance(raw, Region) else numpy.frombuffer(raw, numpy.uint8)


def fill(file: Any, memory: memoryview, path: str, name: str) -> None:
    """Fill `memory` from a file. Raises `ConversionError` if the file ends first."""
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])
        if not count:
            raise truncated(path, len(memory), done, name)
        done += count


def truncated(path: str, expected: int, found: int, name: str | None = None) -> ConversionError:
    """Return the error for a file that ends too early, inside tensor `name` if it is given."""
    reason = f"the file is truncated: expected {expected} bytes, found {found}"
    return refused(path, reason, "truncated", name, expected, found)


def size_of(path: str) -> int:
    """Return the bytes of a file."""
    return os.stat(path).st_size


# Bytes of the longest line: protocol 0 of pickles has the values of an array in one.
_LONGEST_LINE = 1 << 28


class Stream:
    """The part of a file from `begin` to `end`. No number in the file makes a read pass the end."""

    def __init__(
        self, path: str, file: IO[bytes], begin: int = 0, end: int | None = None, *, has_spans: bool = True
    ) -> None:
        self.path = path
        self.end = size_of(path) if end is None else end
        self.has_spans = has_spans
        """Whether positions in the stream are positions in the file at `path`."""
        self._file = file
        self.tell = file.tell
        file.seek(begin)

    def left(self) -> int:
        """Return how many bytes follow."""
        return self.end - self._file.tell()

    def check(self, nbytes: int) -> None:
        """Raise `ConversionError` if fewer than `nbytes` bytes follow."""
        if nbytes > self.left():
            raise truncated(self.path, nbytes, self.left())

    def read(self, nbytes: int) -> bytes:
        """Read exactly `nbytes` bytes."""
        self.check(nbytes)
        return self._file.read(nbytes)

    def readline(self) -> bytes:
        """Read a line, or the first bytes of a very long one."""
        return self._file.readline(min(_LONGEST_LINE, self.left()))

    def skip(self, nbytes: int) -> None:
        """Skip `nbytes` bytes."""
        self.check(nbytes)
        self._file.seek(nbytes, os.SEEK_CUR)

    def number(self, form: str) -> Any:
        """Read one number in a format of `struct`."""
        return struct.unpack(form, self.read(struct.calcsize(form)))[0]

    def span(self, nbytes: int) -> Region:
        """Return the next bytes as a region, and skip them."""
        position = self._file.tell()
        self.skip(nbytes)
        return Region(self.path, position, nbytes)

    def part(self, region: Region) -> Stream:
        """Return a stream of a region of this stream's file. Only one stream may be read at a time."""
        return Stream(self.path, self._file, region.position, region.position + region.nbytes)

    def expect_end(self) -> None:
        """Raise `ValueError` if bytes follow."""
        if self.left():
            raise ValueError(f"{self.left()} bytes follow")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a source, which has not been read yet."""

    name: str
    code: str
    """Its dtype in a header, as in FORMAT.md."""
    shape: tuple[int, ...]
    values: Callable[[], Array] | None = None
    """A function that reads the values, in any layout.

    May be called more than once. None if `region` has them.
    """
    memory: Hashable = None
    """A key that is equal for all names of one tensor. None if the format has no aliases."""
    region: Region | None = None
    """The bytes, if the source has them as a file of tensors has: little-endian, in C order."""
    fault: ConversionError | ModuleNotFoundError | None = None
    """The reason why it cannot be converted. It may still be left out."""
    stored: tuple[str, int] | None = None
    """The source's name for its dtype and the bytes of its values, if FORMAT.md has no such dtype."""
    file: str | None = None
    """The path of the file that holds it, if the source consists of several."""
    cast: str = ""
    """The dtype in the new file, if it is another."""
    span: Callable[[int, int], Array] | None = None
    """A function that reads the bytes between two positions in the tensor, as `region` has them.

    None if the format cannot read a part of `values`.
    """

    @property
    def target(self) -> str:
        """The dtype in the new file."""
        return self.cast or self.code

    @property
    def is_copied(self) -> bool:
        """Whether the new file contains the bytes of the region unchanged."""
        return self.region is not None and self.target == self.code

    @property
    def nbytes(self) -> int:
        """The bytes in the new file."""
        return nbytes(self.target, self.shape)

    def read(self) -> Array:
        """Return the values, in any layout."""
        if self.values is None:
            assert self.region is not None
            return self.region.read(self.name).view(dtype_of(self.code)).reshape(self.shape)
        return self.values()


class Options(NamedTuple):
    """The caller's options for reading a source."""

    budget: Budget
    dequantize: bool
    values: bool = True
    """Whether values are needed. Otherwise no entry is read, and the source may be opened without them."""
    source_format: str | None = None
    """The format that the caller named."""
    beside: str | None = None
    """The folder of the new file, which has room for temporary files."""
    objects: bool = True
    """Whether values that are not tensors are needed, if they have to be read one by one."""


class Contents(ExitStack):
    """The contents of one source, which a reader of `sources` adds. Entries can be read until it is closed.

    The reader enters the files that it opens as contexts.
    """

    def __init__(self, path: str, title: str, options: Options, file: str | None = None) -> None:
        super().__init__()
        self.path = path
        self.title = title
        self.options = options
        self.budget = options.budget
        self.entries: list[Entry] = []
        self.left_out: list[LeftOut] = []
        self.metadata: dict[str, str] = {}
        self.files: set[str] = set()
        """The other files that hold parts of the tensors, if the format has them."""
        self._file = file

    def add(self, name: str, make: Callable[..., Entry | LeftOut], *arguments: Any) -> None:
        """Add the entry `name` that `make` returns, or one with the error that it raises.

        Such an error is raised only if the entry is chosen. Limits apply to the whole source and are raised
        at once. Errors of reading the values name the entry.
        """
        self.budget.hold(RECORD_NBYTES + len(name))
        try:
            found = make(*arguments)
        except (ConversionError, ModuleNotFoundError) as error:
            if getattr(error, "code", None) == "too-large":
                raise
            found = Entry(name, "", (), fault=error)
        if isinstance(found, LeftOut):
            self.left_out.append(found)
            return
        values = None if found.values is None else partial(self._values, found)
        self.entries.append(replace(found, values=values, file=found.file or self._file))

    def _values(self, entry: Entry) -> Array:
        with self.reading(entry.name):
            array = entry.read()
        expected, found = dtype_of(entry.code).newbyteorder("="), array.dtype.newbyteorder("=")
        if (found, array.shape) != (expected, entry.shape):
            reason = f"expected {expected} {list(entry.shape)}, found {found} {list(array.shape)}"
            raise self.refusal(
                reason, "mismatch", entry.name, (entry.code, entry.shape), (str(found), array.shape)
            )
        return array

    def leave_out(self, name: str, kind: str, value: str = "") -> None:
        """Add a value that is not a tensor."""
        self.budget.hold(RECORD_NBYTES + len(name))
        self.left_out.append(LeftOut(name, kind, value))

    def part(self, path: str, title: str = "") -> Contents:
        """Return the contents of another file of the source, whose tensors and values are added to these."""
        part = self.enter_context(Contents(path, title or self.title, self.options, path))
        part.entries, part.left_out = self.entries, self.left_out
        return part

    def reading(self, tensor: str | None = None) -> AbstractContextManager[None]:
        """Turn any exception into a `ConversionError` that names the source, and the tensor if given."""
        return reading(self.path, self.title, tensor)

    def refusal(
        self, reason: str, code: str, tensor: str | None = None, expected: Any = None, found: Any = None
    ) -> ConversionError:
        """Return an error that names the source and the tensor, if there is one. `reason` is escaped."""
        return refused(self.path, reason, code, tensor, expected, found)

    def expect(self, name: str, code: str, shape: Sequence[int], found: int) -> None:
        """Raise `ConversionError` if a tensor of this shape does not take `found` bytes."""
        expected = nbytes(code, tuple(shape)) if all(size >= 0 for size in shape) else -1
        if expected != found:
            reason = f"shape {list(shape)} of {code} needs {expected} bytes, found {found}"
            raise self.refusal(reason, "size-mismatch", name, expected, found)

    def library(self, package: str, purpose: str = "") -> Any:
        """Import the package that reads the source. The error has the command that installs it."""
        try:
            return import_module(package)
        except ModuleNotFoundError as error:
            extra, name = "tensorflow" if package == "tensorflow" else "convert", package.partition(".")[0]
            reason = f"converting {purpose or self.title} needs {name}, which is not installed"
            raise ModuleNotFoundError(f"{reason}: {installing(extra)}", name=name) from error
