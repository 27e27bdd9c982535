"""Keras's .keras: a ZIP archive with the weights in an HDF5 file. The configuration is left out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from tempfile import TemporaryFile
from typing import IO

from ingot._convert.limits import reading, refused
from ingot._convert.report import LeftOut
from ingot._convert.source import Contents, Options
from ingot._convert.zipped import Member, Window, members
from ingot._convert.zipped import opened as opened_member

from .hdf5 import datasets

TITLE = "a Keras archive"
WEIGHTS = "model.weights.h5"
_PIECE_NBYTES = 1 << 20


@contextmanager
def opened(path: str, options: Options) -> Iterator[Contents]:
    """The weights, named by their paths in the HDF5 file."""
    found = members(path, options.budget)
    weights = found.pop(WEIGHTS, None)
    if weights is None:
        raise refused(
            path,
            f"not {TITLE} that can be read: it has no member `{WEIGHTS}`",
            code="unreadable",
            expected=WEIGHTS,
        )
    with _weights(path, weights, options) as file, datasets(path, file, options.budget) as contents:
        others = [LeftOut(name, "file", f"{member.nbytes} bytes") for name, member in found.items()]
        yield Contents(contents.entries, [*contents.left_out, *others], {"format": "tf"})


@contextmanager
def _weights(path: str, member: Member, options: Options) -> Iterator[IO[bytes] | Window]:
    """Open a member to be read in any order. If values are wanted, its checksum is compared."""
    if member.is_packed:
        with BytesIO() if options.beside is None else TemporaryFile(dir=options.beside) as file:
            _unpack(path, member, options, file)
            yield file
        return
    if options.values:
        with reading(path, TITLE), opened_member(path, member) as stream:
            while stream.read(_PIECE_NBYTES):
                pass
    with open(path, "rb") as archive:
        yield Window(archive, member)


def _unpack(path: str, member: Member, options: Options, file: IO[bytes]) -> None:
    """Unpack a member into a file where the new one will be, or into memory, within its budget."""
    if options.beside is None:
        options.budget.hold(member.nbytes)
    with reading(path, TITLE), opened_member(path, member) as stream:
        shutil.copyfileobj(stream, file, _PIECE_NBYTES)
    file.seek(0)
