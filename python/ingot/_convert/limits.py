"""What a source may become, so that a small file fills neither a disk nor the memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from ingot._base.frameworks import installing
from ingot._base.text import _escaped, _quoted
from ingot.errors import ConversionError, SafetensorError

_LONGEST = 300


def refused(
    path: str,
    reason: str,
    *,
    code: str | None,
    tensor: str | None = None,
    expected: Any = None,
    found: Any = None,
) -> ConversionError:
    """The error that names the file, the tensor if it is about one, and `reason`, escaped already."""
    where = _escaped(path) if tensor is None else f"{_escaped(path)}: tensor {_quoted(tensor)}"
    return ConversionError(
        f"{where}: {reason}", code=code, path=path, tensor=tensor, expected=expected, found=found
    )


@contextmanager
def reading(path: str, title: str, tensor: str | None = None) -> Iterator[None]:
    """Turn any exception into a `ConversionError`: `path` is no whole `title`."""
    try:
        yield
    except (SafetensorError, ImportError, MemoryError):
        raise
    except Exception as error:
        said = _escaped(" ".join(str(error).split())[:_LONGEST])
        raise refused(
            path,
            f"not {title} that can be read: {said or type(error).__name__}",
            code="unreadable",
            tensor=tensor,
            expected=title,
        ) from error


def lacks(package: str, title: str, extra: str) -> ModuleNotFoundError:
    """What to install so that `title` can be read."""
    return ModuleNotFoundError(
        f"converting {title} needs {package}, which is not installed: {installing(extra)}",
        name=package,
    )


# The tensors of a source may always take as much as this, in bytes.
ALWAYS_NBYTES = 1 << 30
# And as many times its own size. Weights compress to a half; masks and tables of zeros to a hundredth.
GROWTH = 100

# What is held in memory beside them may always take as much as this,
ALWAYS_HELD_NBYTES = 128 << 20
# and as many times the size of the source: a number takes two bytes of a pickle and 8 to 40 of memory.
HELD_GROWTH = 64

# The prices of what is held, which readers pay before they make it: round numbers above what Python takes.
# A number, a text beside its characters, another name of something that is there already.
VALUE_NBYTES = 64
# A list, a dict, an object, a call.
OBJECT_NBYTES = 256
# What is known of a tensor, or of something that is left out, from its being found to the end: the entry, its
# place in the header, the line in the report.
RECORD_NBYTES = 2048

# Files of a folder that are counted: checkpoints have fewer.
_MOST_FILES = 10_000


class Limits(NamedTuple):
    """What one source may become, in bytes."""

    tensors: int
    """Of those that are written, and of what is unpacked for them."""
    held: int
    """Of objects, text and records that are held meanwhile."""


class Budget:
    """What one source, in one file or many, has used of its limits.

    Whatever makes something of a file pays here. The work of reading is bound by it too, as each step
    makes something.
    """

    def __init__(self, path: str, limits: Limits) -> None:
        self._path = path
        self._limits = limits
        self._unpacked = 0
        self._held = 0

    def hold(self, nbytes: int) -> None:
        """Pay for so much memory."""
        self._held += nbytes
        limit = self._limits.held
        if self._held > limit:
            raise refused(
                self._path,
                f"unpacks to more than {limit:,} bytes of objects beside its tensors, which is the limit "
                f"({HELD_GROWTH} times the size of the file, and 128 MiB) — a larger max_nbytes admits it",
                code="too-large",
                expected=limit,
                found=self._held,
            )

    def unpack(self, nbytes: int) -> None:
        """Pay for so many bytes that stood in the file in a shorter form."""
        self._unpacked += nbytes
        self.check_tensors(self._unpacked)

    def check_tensors(self, total: int) -> None:
        """Refuse so many bytes of tensors, if that is too much."""
        limit = self._limits.tensors
        if total > limit:
            raise refused(
                self._path,
                f"holds {total:,} bytes when it is unpacked, and the limit is {limit:,} "
                f"({GROWTH} times the size of the file, or 1 GiB where that is more) — "
                f"max_nbytes={total} admits it",
                code="too-large",
                expected=limit,
                found=total,
            )


def source_nbytes(path: str, is_folder: bool) -> int:
    """The bytes of a source: of one file, or of all in its folder, where its tensors may be in these."""
    if not is_folder:
        return os.stat(path).st_size
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    files = (os.path.join(where, name) for where, _, names in os.walk(folder) for name in names)
    return sum(os.stat(file).st_size for file in islice(files, _MOST_FILES) if os.path.isfile(file))


def limits(source_nbytes: int, max_nbytes: int | None) -> Limits:
    """What a source of that size may become."""
    held = ALWAYS_HELD_NBYTES + HELD_GROWTH * source_nbytes
    if max_nbytes is None:
        return Limits(max(ALWAYS_NBYTES, GROWTH * source_nbytes), held)
    # It speaks of tensors: a small one is no reason to read less of what stands around them.
    return Limits(max_nbytes, max(held, max_nbytes))
