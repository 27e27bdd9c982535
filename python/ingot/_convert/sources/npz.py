"""NumPy's .npz: arrays in a ZIP archive. What would have to be unpickled is left out, never loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy

from ingot._convert.limits import reading, refused
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Entry, Options, cut_short, fill, possible
from ingot._convert.values import code_of, nbytes
from ingot._convert.zipped import Member, members
from ingot._convert.zipped import opened as opened_member

from . import npy

if TYPE_CHECKING:
    from ingot.numpy import Array


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The arrays, by the names of their members without ``.npy``."""
    entries: list[Entry] = []
    left_out: list[LeftOut] = []
    for name, member in members(path, options.budget).items():
        if not name.endswith(".npy"):
            left_out.append(LeftOut(name, "file", f"{member.nbytes} bytes"))
            continue
        array = name.removesuffix(".npy")
        found = possible(array, _entry, path, array, member)
        if isinstance(found, LeftOut):
            left_out.append(replace(found, name=name))
        else:
            entries.append(found)
    yield Contents(entries, left_out)


def _entry(path: str, name: str, member: Member) -> Entry | LeftOut:
    with reading(path, "an .npz archive", name), opened_member(path, member) as stream:
        header = npy.header(path, name, stream)
    if isinstance(header, LeftOut):
        return header
    code = code_of(path, name, header.dtype)
    assert code is not None, "numbers only: the header says so"
    expected, found = nbytes(code, header.shape), member.nbytes - header.nbytes
    if expected != found:
        raise refused(
            path,
            f"shape {list(header.shape)} of {code} needs {expected} bytes, and the member has {found}",
            code="size-mismatch",
            tensor=name,
            expected=expected,
            found=found,
        )

    def read() -> Array:
        array = numpy.empty(expected, numpy.uint8)
        with reading(path, "an .npz archive", name), opened_member(path, member) as stream:
            stream.read(header.nbytes)
            fill(stream, array.data, path, name)
            # The checksum is compared at the end of the member.
            if stream.read(1):
                raise cut_short(path, name, expected, expected + 1)
        return array.view(header.dtype).reshape(header.shape, order="F" if header.is_fortran else "C")

    return Entry(name, code, header.shape, read)
