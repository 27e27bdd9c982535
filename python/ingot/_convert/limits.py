"""Limits on the size of a source, so that a small file fills neither the disk nor the memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from ingot._base.text import _escaped, located
from ingot.errors import ConversionError, SafetensorError

_LONGEST = 300


def refused(
    path: str,
    reason: str,
    code: str | None,
    tensor: str | None = None,
    expected: Any = None,
    found: Any = None,
) -> ConversionError:
    """Return an error that names the file and the tensor, if given. `reason` is escaped."""
    return located(
        ConversionError, reason, path=path, tensor=tensor, code=code, expected=expected, found=found
    )


@contextmanager
def reading(path: str, title: str, tensor: str | None = None) -> Iterator[None]:
    """Turn any exception into a `ConversionError`: `path` does not have the format `title`, or is damaged."""
    try:
        yield
    except (SafetensorError, ImportError, MemoryError):
        raise
    except Exception as error:
        words = _escaped(" ".join(str(error).split())[:_LONGEST]) or type(error).__name__
        raise refused(
            path, f"not {title} that can be read: {words}", "unreadable", tensor, expected=title
        ) from error


# The tensors of a source may always take this many bytes,
ALWAYS_NBYTES = 1 << 30
# and this many times its own size. Weights compress to a half; masks and tables of zeros to a hundredth.
GROWTH = 100

# Other objects in memory may always take this many bytes,
ALWAYS_HELD_NBYTES = 128 << 20
# and this many times the size of the source: a number takes two bytes of a pickle and 8 to 40 of memory.
HELD_GROWTH = 64

# Prices that readers pay before they make an object: round numbers above the cost in Python.
# A number, a text without its characters, another reference to an object.
VALUE_NBYTES = 64
# A list, a dict, an object, a call.
OBJECT_NBYTES = 256
# The cost of a tensor or value that is left out: its entry, its share of the header, and its line in the
# report.
RECORD_NBYTES = 2048

# The most files of a folder that are counted. Checkpoints have fewer.
_MOST_FILES = 10_000


class Limits(NamedTuple):
    """The limits of one source, in bytes."""

    tensors: int
    """Tensors that are written, and data that is unpacked for them."""
    held: int
    """Objects, text and records in memory."""
    max_nbytes: int | None
    """The caller's option."""


class Budget:
    """The bytes that one source, in one file or several, has used of its limits.

    Every reader pays here before it creates an object. This bounds its work too, because each step creates
    one.
    """

    def __init__(self, path: str, limits: Limits, whole: Budget | None = None) -> None:
        self._path = path
        self._limits = limits
        self._whole = whole
        self._unpacked = 0
        self._held = 0

    def part(self, path: str, nbytes: int) -> Budget:
        """Return the budget of a pickle of `nbytes` bytes, which this budget pays for too.

        The tensors around a pickle may be any number of times larger than it, and admit no larger objects.
        """
        return Budget(path, limits(nbytes, self._limits.max_nbytes), self)

    def hold(self, nbytes: int) -> None:
        """Pay for memory."""
        if self._whole is not None:
            self._whole.hold(nbytes)
        self._held += nbytes
        limit = self._limits.held
        if self._held > limit:
            raise refused(
                self._path,
                f"unpacks to more than {limit:,} bytes of objects beside its tensors, which is the limit "
                f"({HELD_GROWTH} times its size, and 128 MiB) — a larger max_nbytes admits it",
                "too-large",
                expected=limit,
                found=self._held,
            )

    def unpack(self, nbytes: int) -> None:
        """Pay for bytes that are compressed in the file."""
        self._unpacked += nbytes
        self.check_tensors(self._unpacked)

    def check_tensors(self, total: int) -> None:
        """Raise if tensors of `total` bytes exceed the limit."""
        limit = self._limits.tensors
        if total > limit:
            raise refused(
                self._path,
                f"holds {total:,} bytes when it is unpacked, and the limit is {limit:,} "
                f"({GROWTH} times the size of the file, or 1 GiB if that is more) — "
                f"max_nbytes={total} admits it",
                "too-large",
                expected=limit,
                found=total,
            )


def source_nbytes(path: str, is_folder: bool) -> int:
    """Return the bytes of a file, or of all files in its folder if the source may consist of several."""
    if not is_folder:
        return os.stat(path).st_size
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    files = (os.path.join(where, name) for where, _, names in os.walk(folder) for name in names)
    return sum(os.stat(file).st_size for file in islice(files, _MOST_FILES) if os.path.isfile(file))


def limits(source_nbytes: int, max_nbytes: int | None) -> Limits:
    """Return the limits of a source of that size."""
    held = ALWAYS_HELD_NBYTES + HELD_GROWTH * source_nbytes
    if max_nbytes is None:
        return Limits(max(ALWAYS_NBYTES, GROWTH * source_nbytes), held, None)
    # `max_nbytes` limits tensors: a small value does not limit the objects around them.
    return Limits(max_nbytes, max(held, max_nbytes), max_nbytes)
