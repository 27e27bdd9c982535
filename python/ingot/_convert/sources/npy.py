"""NumPy's .npy: one array."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import numpy

from ingot._base.dtypes import CODES
from ingot._base.text import _escaped, _quoted
from ingot._convert.flatten import LONE
from ingot._convert.limits import refused
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Options, Region, cut_short, size_of
from ingot._convert.values import code_of, dtype_of, nbytes
from ingot.errors import ConversionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot.numpy import Array


# The header of a .npy file, which is a Python literal: read by its grammar, never evaluated.


MAGIC = b"\x93NUMPY"
# NumPy's own limit, in bytes. Headers of arrays take about a hundred.
MAX_HEADER_NBYTES = 10_000
_LONGEST_DESCR = 80
# White space of Python's grammar, which is not all that text has.
_S = r"[ \t\n\r\f]*"
# One of its numbers, or a long one of Python 2, and a tuple of them.
_N = rf"(?:0+|[1-9][0-9]*)L?{_S}"
_TUPLE = rf"\({_S}(?P<shape>(?:{_N},{_S}(?:{_N}(?:,{_S}{_N})*,?{_S})?)?)\)"
_HEADER = re.compile(
    rf"\{{{_S}(?:'descr'{_S}:{_S}(?P<descr>'[^'\\]{{1,20}}'|[\[(].*){_S},{_S})"
    rf"'fortran_order'{_S}:{_S}(?P<order>True|False){_S},{_S}"
    rf"'shape'{_S}:{_S}{_TUPLE}{_S},?{_S}\}}{_S}",
    re.DOTALL,
)
_DTYPE = re.compile(r"[<>|=]?[?biufcSUVOmMa][0-9]*(\[[0-9a-zA-Z]+\])?")
# NumPy writes the size of a dtype of another package, and not its name. Of these sizes there is one each.
# Voids of NumPy's own have no order of bytes and begin with "|".
_OF_ML_DTYPES = {"<V2": "bfloat16", "<f1": "float8_e5m2"}


class Header(NamedTuple):
    """What an array is, and where in its stream the values begin."""

    dtype: numpy.dtype[Any]
    is_fortran: bool
    shape: tuple[int, ...]
    nbytes: int
    """Of the header."""


def header(path: str, name: str, stream: IO[bytes]) -> Header | LeftOut:
    """Read the header at the begin of `stream`. Arrays of records, text or objects are left out."""
    head = stream.read(8)
    if len(head) < 8 or not head.startswith(MAGIC):
        raise _damaged(path, name, "it has no header of NumPy's")
    major, minor = head[6], head[7]
    if major not in (1, 2, 3) or minor:
        raise _damaged(path, name, f"expected version 1.0, 2.0 or 3.0, found {major}.{minor}")
    width = struct.Struct("<H" if major == 1 else "<I")
    field = stream.read(width.size)
    if len(field) < width.size:
        raise _damaged(path, name, "the file is cut short")
    (length,) = width.unpack(field)
    if length > MAX_HEADER_NBYTES:
        raise _damaged(path, name, f"a header of {length} bytes, and the limit is {MAX_HEADER_NBYTES}")
    raw = stream.read(length)
    match = _HEADER.fullmatch(raw.decode("utf-8" if major == 3 else "latin-1", "replace"))
    if len(raw) < length or match is None:
        raise _damaged(path, name, "the header is no description of an array")
    descr = match["descr"].strip("'")
    known = _OF_ML_DTYPES.get(descr)
    if known is None and (not _DTYPE.fullmatch(descr) or descr.lstrip("<>|=")[0] in "SUVOmMa"):
        is_void = re.fullmatch(r"[<>]V\d+", descr)
        kind = "array of a dtype without a name" if is_void else "array of objects, records or text"
        return LeftOut(name, kind, _escaped(descr)[:_LONGEST_DESCR])
    try:
        dtype = numpy.dtype(descr) if known is None else dtype_of(CODES[known])
    except TypeError as error:
        raise _damaged(path, name, f"its dtype is none: {_quoted(descr)}") from error
    dims = [dim.strip().rstrip("L") for dim in match["shape"].split(",")]
    shape = tuple(int(dim) for dim in dims if dim)
    return Header(dtype, match["order"] == "True", shape, 8 + width.size + length)


def _damaged(path: str, name: str, reason: str) -> ConversionError:
    return refused(
        path,
        f"not an array that can be read: {reason}",
        code="npy-header",
        tensor=name,
    )


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The array, which is called ``tensor``."""
    with open(path, "rb") as file:
        found = header(path, LONE, file)
    if isinstance(found, LeftOut):
        yield Contents([], [found])
        return
    code = code_of(path, LONE, found.dtype)
    assert code is not None, "numbers only: the header says so"
    region = Region(path, found.nbytes, nbytes(code, found.shape))
    there = size_of(path) - found.nbytes
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
        array = region.read(LONE).view(found.dtype)
        return array.reshape(found.shape, order="F" if found.is_fortran else "C")

    is_little = found.dtype == found.dtype.newbyteorder("<")
    stands = is_little and code != "F4" and not (found.is_fortran and len(found.shape) > 1)
    yield Contents([Entry(LONE, code, found.shape, read, region=region if stands else None)])
