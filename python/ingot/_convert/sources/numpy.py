"""NumPy's .npy and .npz. Arrays that would have to be unpickled are left out, never loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy

from ingot._base.dtypes import CODES
from ingot._base.text import _escaped, _quoted
from ingot._convert.flatten import LONE
from ingot._convert.limits import refused
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Region, fill, size_of, truncated
from ingot._convert.values import code_of, dtype_of, nbytes
from ingot._convert.zipped import Member, members
from ingot._convert.zipped import opened as opened_member
from ingot.errors import ConversionError

if TYPE_CHECKING:
    from ingot.numpy import Array


# The header of a .npy file, which is a Python literal: parsed by its grammar, never evaluated.


MAGIC = b"\x93NUMPY"
# NumPy's own limit, in bytes. Headers of arrays take about a hundred.
MAX_HEADER_NBYTES = 10_000
_LONGEST_DESCR = 80
# White space in Python's grammar, which is less than in text.
_S = r"[ \t\n\r\f]*"
# A number, which may be a long of Python 2, and a tuple of numbers.
_N = rf"(?:0+|[1-9][0-9]*)L?{_S}"
_TUPLE = rf"\({_S}(?P<shape>(?:{_N},{_S}(?:{_N}(?:,{_S}{_N})*,?{_S})?)?)\)"
_HEADER = re.compile(
    rf"\{{{_S}(?:'descr'{_S}:{_S}(?P<descr>'[^'\\]{{1,20}}'|[\[(].*){_S},{_S})"
    rf"'fortran_order'{_S}:{_S}(?P<order>True|False){_S},{_S}"
    rf"'shape'{_S}:{_S}{_TUPLE}{_S},?{_S}\}}{_S}",
    re.DOTALL,
)
_DTYPE = re.compile(r"[<>|=]?[?biufcSUVOmMa][0-9]*(\[[0-9a-zA-Z]+\])?")
# For a dtype of another package, NumPy writes the size and not the name. Each size has one such dtype here.
# NumPy's own voids have no byte order and begin with "|".
_OF_ML_DTYPES = {"<V2": "bfloat16", "<f1": "float8_e5m2"}


class Header(NamedTuple):
    """The description of an array, and the position of its values in its stream."""

    dtype: numpy.dtype[Any]
    code: str
    is_fortran: bool
    shape: tuple[int, ...]
    nbytes: int
    """The size of the header."""

    @property
    def nbytes_of_values(self) -> int:
        """The bytes of the values."""
        return nbytes(self.code, self.shape)

    def array(self, raw: Array) -> Array:
        """Return the array with these bytes."""
        return raw.view(self.dtype).reshape(self.shape, order="F" if self.is_fortran else "C")


def header(path: str, name: str, stream: IO[bytes]) -> Header | LeftOut:
    """Read the header at the start of `stream`. Arrays of records, text or objects are left out."""
    head = stream.read(8)
    if len(head) < 8 or not head.startswith(MAGIC):
        raise _damaged(path, name, "it has no header of NumPy's")
    major, minor = head[6], head[7]
    if major not in (1, 2, 3) or minor:
        raise _damaged(path, name, f"expected version 1.0, 2.0 or 3.0, found {major}.{minor}")
    width = 2 if major == 1 else 4
    field = stream.read(width)
    if len(field) < width:
        raise _damaged(path, name, "the file is truncated")
    length = int.from_bytes(field, "little")
    if length > MAX_HEADER_NBYTES:
        raise _damaged(path, name, f"a header of {length} bytes, and the limit is {MAX_HEADER_NBYTES}")
    raw = stream.read(length)
    match = _HEADER.fullmatch(raw.decode("utf-8" if major == 3 else "latin-1", "replace"))
    if len(raw) < length or match is None:
        raise _damaged(path, name, "the header does not describe an array")
    descr = match["descr"].strip("'")
    known = _OF_ML_DTYPES.get(descr)
    if known is None and (not _DTYPE.fullmatch(descr) or descr.lstrip("<>|=")[0] in "SUVOmMa"):
        is_void = re.fullmatch(r"[<>]V\d+", descr)
        kind = "array of a dtype without a name" if is_void else "array of objects, records or text"
        return LeftOut(name, kind, _escaped(descr)[:_LONGEST_DESCR])
    try:
        dtype = numpy.dtype(descr) if known is None else dtype_of(CODES[known])
    except TypeError as error:
        raise _damaged(path, name, f"its dtype is unknown: {_quoted(descr)}") from error
    dims = [dim.strip().rstrip("L") for dim in match["shape"].split(",")]
    shape = tuple(int(dim) for dim in dims if dim)
    code = code_of(path, name, dtype)
    assert code is not None, "numbers only: the dtype was checked"
    return Header(dtype, code, match["order"] == "True", shape, 8 + width + length)


def _damaged(path: str, name: str, reason: str) -> ConversionError:
    return refused(path, f"not an array that can be read: {reason}", "npy-header", name)


def npy(contents: Contents) -> None:
    """Add the one array of a .npy file, which is called ``tensor``."""
    with open(contents.path, "rb") as file:
        found = header(contents.path, LONE, file)
    if isinstance(found, Header):
        there, expected = size_of(contents.path) - found.nbytes, found.nbytes_of_values
        if there < expected:
            raise truncated(contents.path, expected, there, LONE)
        if there > expected:
            reason = f"{there - expected} bytes follow the array"
            raise contents.refusal(reason, "trailing", expected=expected, found=there)
    contents.add(LONE, lambda: found if isinstance(found, LeftOut) else _entry(contents.path, found))


def _entry(path: str, found: Header) -> Entry:
    region = Region(path, found.nbytes, found.nbytes_of_values)
    is_little = found.dtype == found.dtype.newbyteorder("<")
    if is_little and found.code != "F4" and (not found.is_fortran or len(found.shape) < 2):
        return Entry(LONE, found.code, found.shape, region=region)
    return Entry(LONE, found.code, found.shape, lambda: found.array(region.read(LONE)))


def npz(contents: Contents) -> None:
    """Add the arrays of a .npz archive, by the names of their members without ``.npy``."""
    for name, member in members(contents.path, contents.budget).items():
        if name.endswith(".npy"):
            contents.add(name.removesuffix(".npy"), _member, contents, name.removesuffix(".npy"), member)
        else:
            contents.leave_out(name, "file", f"{member.nbytes} bytes")


def _member(contents: Contents, name: str, member: Member) -> Entry | LeftOut:
    path = contents.path
    with contents.reading(name), opened_member(path, member) as stream:
        found = header(path, name, stream)
    if isinstance(found, LeftOut):
        return replace(found, name=member.name)
    contents.expect(name, found.code, found.shape, member.nbytes - found.nbytes)

    def values() -> Array:
        raw = numpy.empty(found.nbytes_of_values, numpy.uint8)
        with opened_member(path, member) as stream:
            stream.read(found.nbytes)
            fill(stream, raw.data, path, name)
            # The checksum is compared at the end of the member.
            if stream.read(1):
                raise truncated(path, len(raw), len(raw) + 1, name)
        return found.array(raw)

    return Entry(name, found.code, found.shape, values)
