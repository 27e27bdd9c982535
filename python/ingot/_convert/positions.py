"""Bytes at some position of a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy

from ingot.errors import ConversionError

from .others import Plain
from .refusal import refused

if TYPE_CHECKING:
    from ingot.numpy import Array


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
