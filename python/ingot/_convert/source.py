"""What a source format gives: tensors that are read one at a time, and what it holds besides."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy

from ingot.errors import ConversionError

from .limits import refused
from .report import LeftOut, Plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot.numpy import Array

    from .limits import Budget


# Bytes at some position of a file.


class Region(Plain):
    """A run of bytes in a file, which is opened when they are read and not before."""

    __slots__ = ("nbytes", "path", "position")

    def __init__(self, path: str, position: int, nbytes: int) -> None:
        super().__init__("bytes", f"{nbytes} bytes")
        self.path = path
        self.position = position
        self.nbytes = nbytes

    def read(self, name: str) -> Array:
        """The bytes, for tensor `name`."""
        found = numpy.empty(self.nbytes, numpy.uint8)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.position)
            fill(file, found.data, self.path, name)
        return found

    def array(self, name: str, dtype: numpy.dtype[Any], shape: tuple[int, ...]) -> Array:
        """The bytes as an array in C order, for tensor `name`."""
        return self.read(name).view(dtype).reshape(shape)


def fill(file: Any, memory: memoryview, path: str, name: str) -> None:
    """Read so many bytes, or say that the file ends."""
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])
        if not count:
            raise cut_short(path, name, len(memory), done)
        done += count


def cut_short(path: str, name: str, expected: int, found: int) -> ConversionError:
    """The refusal of a file that ends within a tensor."""
    return refused(
        path,
        f"the file is cut short: expected {expected} bytes, found {found}",
        code="truncated",
        tensor=name,
        expected=expected,
        found=found,
    )


def size_of(path: str) -> int:
    """The bytes of a file."""
    return os.stat(path).st_size


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a source, which has not been read yet."""

    name: str
    code: str
    """Of the header, as in FORMAT.md."""
    shape: tuple[int, ...]
    read: Callable[[], Array]
    """Gives the values, in any layout. May be called more than once."""
    memory: Hashable = None
    """Equal for tensors that are one and the same. None where the format has no such thing."""
    region: Region | None = None
    """Where its bytes stand just as a file of tensors has them, if they do: little-endian, in C order."""
    fault: ConversionError | ModuleNotFoundError | None = None
    """Why it cannot be converted, if it cannot. It may still be left out."""
    stored: tuple[str, int] | None = None
    """The source's word for its dtype, and the bytes of its values, where FORMAT.md has no such dtype."""
    file: str | None = None
    """The path of the file that holds it, where the source is several."""


Made = TypeVar("Made", bound="Entry | LeftOut | None")


def possible(name: str, make: Callable[..., Made], *arguments: Any) -> Made | Entry:
    """Return the entry `name` that `make` returns, or one with the fault that it raises.

    A fault is raised only if the entry is chosen. Limits apply to the whole source and are raised at once.
    """
    try:
        return make(*arguments)
    except ConversionError as error:
        if error.code == "too-large":
            raise
        return faulty(name, error)
    except ModuleNotFoundError as error:
        return faulty(name, error)


def faulty(name: str, fault: ConversionError | ModuleNotFoundError) -> Entry:
    """Return an entry that cannot be converted."""
    return Entry(name, "", (), _never, fault=fault)


def _never() -> Any:
    raise AssertionError("an entry with a fault is not read")


@dataclass(frozen=True, slots=True)
class Contents:
    """All that one source holds."""

    entries: Sequence[Entry]
    left_out: Sequence[LeftOut] = ()
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller decided about reading."""

    dequantize: bool
    budget: Budget
    """Of all that is made of the source."""
    values: bool = True
    """Whether they are wanted. Otherwise no entry is read, and the source may be opened without them."""
    source_format: str | None = None
    """The format that the caller named."""
    beside: str | None = None
    """The folder of the new file, which has room for temporary ones."""
