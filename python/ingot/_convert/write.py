"""The tensors of a source into one file, one at a time."""

from __future__ import annotations

import zipfile
from contextlib import closing
from io import BufferedWriter, FileIO
from typing import TYPE_CHECKING, NamedTuple

import numpy

from ingot import _native
from ingot._base.checks import FLOATS
from ingot._base.options import Loading
from ingot._base.text import _escaped, _quoted
from ingot._write.assemble import Writing, opened, together
from ingot._write.writer import Writer, native
from ingot.errors import ConversionError, SaveError, StorageError

from .destination import drafted
from .runs import copy
from .values import cast, dtype_of, nbytes, pieces, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any, BinaryIO

    from ingot._base.options import Saving
    from ingot.numpy import Array

    from .runs import Moved
    from .source import Entry


# The time of every member of an archive: the oldest there is, so that the same input gives the same bytes.
_EPOCH = (1980, 1, 1, 0, 0, 0)


class Ending(NamedTuple):
    """How a file that was written gets its name."""

    check: Callable[[str], None]
    """Told the path that it has until then; raises where it may not have the other."""
    how: Saving


def code_in(entry: Entry, code: str | None) -> str:
    """The code of the tensor in the new file, where floats are to become `code`."""
    return code if code is not None and entry.code in FLOATS else entry.code


def apart(entries: Sequence[Entry], code: str | None) -> tuple[list[Entry], list[Entry]]:
    """The tensors whose bytes are copied as they stand in the source, and the others."""
    runs: list[Entry] = []
    others: list[Entry] = []
    for entry in entries:
        stays = entry.region is not None and code_in(entry, code) == entry.code
        (runs if stays else others).append(entry)
    return runs, others


def parts(entry: Entry, code: str | None) -> Iterator[tuple[Any, Array]]:
    """The values as the new file has them: pieces, each with its index."""
    array = read(entry)
    target = code_in(entry, code)
    for index in pieces(entry.shape, array.dtype.itemsize):
        part = numpy.asarray(array[index])
        yield index or ..., part if target == entry.code else cast(part, target)


def read(entry: Entry) -> Array:
    """The values, which are what the source said they would be."""
    array = entry.read()
    if array.shape != entry.shape or array.dtype.newbyteorder("=") != dtype_of(entry.code).newbyteorder("="):
        raise ConversionError(
            f"tensor {_quoted(entry.name)}: expected {entry.code} {list(entry.shape)}, "
            f"found {array.dtype} {list(array.shape)}",
            code="mismatch",
            tensor=entry.name,
            expected=(entry.code, entry.shape),
            found=(str(array.dtype), array.shape),
        )
    return array


def write_native(
    path: str,
    format: Any,
    entries: Sequence[Entry],
    code: str | None,
    metadata: Mapping[str, str] | None,
    shared: Mapping[str, str],
    ending: Ending,
    moved: Moved,
) -> None:
    """Write a .safetensors or a .bt file. Of `shared` it gets the names of its own tensors."""
    specs = {entry.name: (code_in(entry, code), entry.shape) for entry in entries}
    names = {other: name for other, name in shared.items() if name in specs}
    how = ending.how
    with Writer(path, specs, metadata, format=format, aliases=names, **how.of_writer()) as writer:
        runs, others = apart(entries, code)
        copy(runs, native(writer), moved)
        for entry in others:
            if code_in(entry, code) == entry.code:
                writer.write(entry.name, read(entry))
                moved(nbytes(entry.code, entry.shape))
            else:
                for index, part in parts(entry, code):
                    writer.write(entry.name, part, index)
                    moved(part.nbytes)
        filling = native(writer)
        with drafted(path, filling.draft_path) as draft:
            ending.check(draft)
            if how.checksums:
                _copy(draft, path, format, how)
            else:
                writer.commit()


def _copy(draft: str, path: str, format: Any, how: Saving) -> None:
    """Copy the finished file `draft` to `path`, and compute the digests of its tensors on the way."""
    held = opened([draft], Loading())
    picks = [(0, number, name) for number, name in enumerate(held.names(0))]
    writing = Writing(how._replace(format=format), is_inherited=True)
    writing.write(held, path, picks, together(held), None)


def write_npz(path: str, entries: Sequence[Entry], code: str | None, ending: Ending, moved: Moved) -> None:
    """Write an archive that `numpy.load` reads."""
    how = ending.how
    aside = _native.Aside.create(path, durable=how.flush, **how.existing._asdict())
    with closing(aside), drafted(path, aside.draft_path) as draft:
        with BufferedWriter(_Storage(draft, "w")) as file:
            _archive(file, entries, code, moved)
        ending.check(draft)
        aside.commit()


class _Storage(FileIO):
    """A file whose failure to write is a `StorageError`. A buffer writes to it, again after a short write."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as fault:
            path = str(self.name)
            raise StorageError(
                f"{_escaped(path)}: could not write: {fault.strerror}",
                errno=fault.errno,
                code="write",
                path=path,
            ) from fault


def _archive(file: BinaryIO, entries: Sequence[Entry], code: str | None, moved: Moved) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for entry in entries:
            header = {
                "descr": dtype_of(code_in(entry, code)).str,
                "fortran_order": False,
                "shape": entry.shape,
            }
            info = zipfile.ZipInfo(f"{entry.name}.npy", _EPOCH)
            # What regular files have that all may read.
            info.external_attr = 0o100644 << 16
            with archive.open(info, "w", force_zip64=True) as member:
                numpy.lib.format.write_array_header_1_0(member, header)
                for _, part in parts(entry, code):
                    member.write(stored(part))
                    moved(part.nbytes)


def check_npz(path: str, entries: Sequence[Entry], code: str | None) -> None:
    """Refuse what an .npz cannot hold, before anything is written."""
    from ingot.numpy import DTYPES

    names = {entry.name for entry in entries}
    for entry in entries:
        target = code_in(entry, code)
        if target not in DTYPES:
            raise SaveError(
                f"{_escaped(path)}: tensor {_quoted(entry.name)}: an .npz has no dtype for {target} — "
                "dtype='F32' converts it",
                code="unsupported-dtype",
                path=path,
                tensor=entry.name,
                expected=tuple(DTYPES),
                found=target,
            )
        if entry.name.removesuffix(".npy") != entry.name and entry.name.removesuffix(".npy") in names:
            raise _unsafe(path, entry.name, "`numpy.load` gives another tensor for this name")
        # Other programs unpack archives to paths that the names of members are.
        levels = entry.name.split("/")
        if ".." in levels or "" in levels or "\\" in entry.name or "\0" in entry.name or ":" in levels[0]:
            reason = "a member with this name would be a path out of the folder that it is unpacked in"
            raise _unsafe(path, entry.name, reason)


def _unsafe(path: str, name: str, reason: str) -> SaveError:
    return SaveError(
        f"{_escaped(path)}: tensor {_quoted(name)}: {reason}", code="unsafe-name", path=path, tensor=name
    )
