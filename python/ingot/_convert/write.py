"""The tensors of a source into one file, one at a time."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from errno import EEXIST
from io import BufferedWriter, FileIO
from math import prod
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy

from ingot import _native
from ingot._base.checks import FLOATS, Existing, checked_shard_size
from ingot._base.options import Loading
from ingot._base.text import _escaped, _quoted
from ingot._write.directory import called
from ingot._write.rearrange import Writing, opened, together
from ingot._write.shards import Place
from ingot._write.writer import Writer, native
from ingot.errors import ConversionError, OptionError, SaveError, StorageError

from .limits import refused
from .source import cut_short, size_of
from .values import PIECE_NBYTES, cast, dtype_of, elements, nbytes, pieces, stored

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._base.options import Saving
    from ingot.numpy import Array

    from .source import Entry, Region

    Kind = Literal["safetensors", "bintensors", "npz"]

    Moved = Callable[[int], None]

# The destination of a conversion: an existing file stays until the new one is complete.


KINDS = ("safetensors", "bintensors", "npz")
_ENDINGS = {"safetensors": ".safetensors", "bintensors": ".bt", "npz": ".npz"}
# What transformers writes, so that it is read without more being said.
_DEFAULT_SHARD_NBYTES = "5GB"


def _kind(path: str) -> str | None:
    """Return the format that the ending of a name says, or None."""
    return next((kind for kind, ending in _ENDINGS.items() if path.lower().endswith(ending)), None)


class Destination(NamedTuple):
    """A file, or a folder of shards."""

    path: str
    kind: str
    place: Place | None
    """None for a file."""
    shard_nbytes: int

    @classmethod
    def of(cls, path: str, format: str | None, max_shard_size: int | str | None) -> Destination:
        """Return the destination of this name. Its ending decides the format if `format` is None."""
        is_folder = max_shard_size is not None or path.endswith(("/", os.sep)) or os.path.isdir(path)
        if is_folder:
            kind = format or "safetensors"
            if kind == "npz":
                raise OptionError(
                    "convert(): max_shard_size is for safetensors and bintensors, and an .npz is one file",
                    code="npz-shards",
                )
            is_new_folder = path.endswith(("/", os.sep)) or not (_kind(path) or os.path.exists(path))
            if not is_new_folder and not os.path.isdir(path):
                raise OptionError(
                    f"convert(): max_shard_size writes several files: destination must be a folder, found "
                    f"{_escaped(path)}, the name of a file",
                    code="unknown-destination",
                    expected="a folder",
                    found=path,
                )
            limit = checked_shard_size(_DEFAULT_SHARD_NBYTES if max_shard_size is None else max_shard_size)
            return cls(path, kind, Place(path, "model{suffix}" + _ENDINGS[kind]), limit)
        found = format or _kind(path)
        if found is not None:
            return cls(path, found, None, 0)
        raise OptionError(
            f"{_escaped(path)}: the name does not say what to write: expected "
            f"{', '.join(_ENDINGS.values())}, or a folder with max_shard_size=… — format=… says it",
            code="unknown-destination",
            expected=KINDS,
            found=path,
        )

    def check(self, existing: Existing) -> None:
        """Raise where something would be replaced that has to stay."""
        if self.place is not None:
            self.place.check(existing)
            return
        existing.check(self.path)
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise FileExistsError(EEXIST, "it is no regular file, and is not replaced", self.path)


@contextmanager
def drafted(path: str, draft: str) -> Iterator[str]:
    """Yield `draft`, the temporary file for `path`. Errors that name it name `path` instead."""
    # Messages have the escaped name only.
    with called(os.path.basename(draft), os.path.basename(path)), called(draft, path):
        yield draft


# Tensors whose bytes a source holds just as the new file is to: copied and compared as they are.


# More threads in one file wait for each other in the kernel.
_THREADS = 4


class _Piece(NamedTuple):
    """A part of a tensor, and where its bytes stand."""

    file: _native.ForeignFile
    position: int
    name: str
    part: object
    begin: int
    """In the tensor."""
    nbytes: int


def copy(entries: Sequence[Entry], writer: _native.Writer, moved: Moved) -> None:
    """Copy the bytes of these tensors into a new file."""

    def copied(piece: _Piece) -> None:
        piece.file.copy(piece.position, writer, piece.name, piece.part)

    for _ in _each(entries, copied, moved):
        pass


def differing(entries: Sequence[Entry], checkpoint: _native.Checkpoint, moved: Moved) -> str | None:
    """The name of a tensor that is not the same in the source and in the new file; None where all are."""

    def differs(piece: _Piece) -> str | None:
        same = piece.file.agrees(piece.position, checkpoint, piece.name, piece.begin, piece.nbytes)
        return None if same else piece.name

    return next((name for name in _each(entries, differs, moved) if name is not None), None)


def _each(
    entries: Sequence[Entry], work: Callable[[_Piece], str | None], moved: Moved
) -> Iterator[str | None]:
    """Yield the result of `work` for every piece of these tensors, computed by several threads."""

    def all_of(batch: list[_Piece]) -> list[str | None]:
        return [work(piece) for piece in batch]

    batches = list(_batches(_pieces(entries)))
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1, len(batches) or 1))
    try:
        for batch, found in zip(batches, pool.map(all_of, batches), strict=True):
            yield from found
            moved(sum(piece.nbytes for piece in batch))
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(entries: Iterable[Entry]) -> Iterator[_Piece]:
    files: dict[str, _native.ForeignFile] = {}
    for entry in entries:
        region = entry.region
        assert region is not None
        if region.path not in files:
            files[region.path] = _native.ForeignFile.open(region.path)
        _check(entry, region)
        begin = 0
        for index in pieces(entry.shape, max(nbytes(entry.code, (1,)), 1)):
            size = nbytes(entry.code, _shape(entry.shape, index))
            yield _Piece(files[region.path], region.position + begin, entry.name, index or ..., begin, size)
            begin += size


def _shape(shape: tuple[int, ...], index: tuple[int | slice, ...]) -> tuple[int, ...]:
    """What an index of `pieces` leaves of a shape."""
    if not index:
        return shape
    rows = index[-1]
    assert isinstance(rows, slice)
    return (rows.stop - rows.start, prod(shape[len(index) :]))


def _check(entry: Entry, region: Region) -> None:
    there = size_of(region.path) - region.position
    if there < region.nbytes:
        raise cut_short(region.path, entry.name, region.nbytes, max(there, 0))


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that are worth handing to a thread together."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.nbytes
        if size >= PIECE_NBYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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
    specs: dict[str, Any] = {entry.name: (code_in(entry, code), entry.shape) for entry in entries}
    names = {other: name for other, name in shared.items() if name in specs}
    how = ending.how
    with closing(Writer(path, specs, metadata, format=format, aliases=names, **how.of_writer())) as writer:
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


_DROP = "drop=[…] leaves it out"


def check_native(path: str, entries: Sequence[Entry], code: str | None) -> None:
    """Refuse what neither .safetensors nor .bt can hold, before anything is written. `path` is the source."""
    for entry in entries:
        if entry.name == "__metadata__":
            reason = "the name is reserved for metadata"
            raise refused(path, f"{reason} — {_DROP}", code="reserved-name", tensor=entry.name)
        if code_in(entry, code) == "F4" and elements(entry.shape) % 2:
            reason = f"{list(entry.shape)} of F4 ends inside a byte: expected an even number of elements"
            raise refused(path, f"shape {reason} — {_DROP}", code="partial-byte", tensor=entry.name)


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
