"""NumPy's .npy: one array."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ingot._convert import npy
from ingot._convert.flatten import LONE
from ingot._convert.limits import refused
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Options, Region, cut_short, size_of
from ingot._convert.values import code_of, nbytes

if TYPE_CHECKING:
    from ingot.numpy import Array


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The array, which is called ``tensor``."""
    with open(path, "rb") as file:
        header = npy.header(path, LONE, file)
    if isinstance(header, LeftOut):
        yield Contents([], [header])
        return
    code = code_of(path, LONE, header.dtype)
    assert code is not None, "numbers only: the header says so"
    region = Region(path, header.nbytes, nbytes(code, header.shape))
    there = size_of(path) - header.nbytes
    if there < region.nbytes:
        raise cut_short(path, LONE, region.nbytes, there)
    if there > region.nbytes:
        raise refused(
            path,
            f"{there - region.nbytes} bytes follow the array",
            code="trailing",
            expected=region.nbytes,
            found=there,
        )

    def read() -> Array:
        array = region.read(LONE).view(header.dtype)
        return array.reshape(header.shape, order="F" if header.is_fortran else "C")

    is_little = header.dtype == header.dtype.newbyteorder("<")
    stands = is_little and code != "F4" and not (header.is_fortran and len(header.shape) > 1)
    yield Contents([Entry(LONE, code, header.shape, read, region=region if stands else None)])
