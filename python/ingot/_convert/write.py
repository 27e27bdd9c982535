"""Write the tensors of a source into one file, one at a time, and compare them with the source."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from errno import EEXIST
from io import BufferedWriter, FileIO
from operator import attrgetter
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy

from ingot import _native
from ingot._base.batches import batches
from ingot._base.checks import Existing, checked_shard_size
from ingot._base.options import Loading
from ingot._base.text import _escaped, located
from ingot._write.directory import called
from ingot._write.rearrange import Writing, opened, together
from ingot._write.serialize import _REGION
from ingot._write.shards import Place
from ingot._write.writer import Writer, native
from ingot.errors import ConversionError, OptionError, SaveError, StorageError
from ingot.numpy import DTYPES

from .limits import reading, refused
from .report import LeftOut
from .source import size_of, truncated
from .sources.numpy import header
from .values import PIECE_NBYTES, cast, dtype_of, elements, nbytes, pieces, stored
from .zipped import members
from .zipped import opened as opened_member

if TYPE_CHECKING:
    from ingot._base.options import Saving
    from ingot.numpy import Array

    from .source import Entry

    Moved = Callable[[int], None]

KINDS = ("safetensors", "bintensors", "npz")
_ENDINGS = {"safetensors": ".safetensors", "bintensors": ".bt", "npz": ".npz"}
# The default of transformers.
_DEFAULT_SHARD_NBYTES = "5GB"
# More threads that write to one file wait for each other in the kernel.
_THREADS = 4
# The time of every member of an archive: the oldest possible, so that the same input makes the same bytes.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_ARCHIVE = "an .npz archive"


class Destination(NamedTuple):
    """A file, or a folder of shards."""

    path: str
    kind: str
    place: Place | None = None
    """None for a file."""
    shard_nbytes: int = 0

    @classmethod
    def of(cls, path: str, format: str | None, max_shard_size: int | str | None) -> Destination:
        """Return the destination of this name. If `format` is None, the suffix decides the format."""
        kind = next((kind for kind, ending in _ENDINGS.items() if path.lower().endswith(ending)), None)
        is_slashed = path.endswith(("/", os.sep))
        if max_shard_size is None and not is_slashed and not os.path.isdir(path):
            if format or kind:
                return cls(path, format or kind or "")
            endings = ", ".join(_ENDINGS.values())
            reason = f"the ending names no format: expected {endings}, or a folder with max_shard_size=…"
            raise OptionError(
                f"{_escaped(path)}: {reason} — format=… names it",
                code="unknown-destination",
                expected=KINDS,
                found=path,
            )
        if format == "npz":
            raise OptionError(
                "convert(): max_shard_size is for safetensors and bintensors, and an .npz is one file",
                code="npz-shards",
            )
        if not is_slashed and not os.path.isdir(path) and (kind or os.path.exists(path)):
            raise OptionError(
                f"convert(): max_shard_size writes several files: destination must be a folder, found "
                f"{_escaped(path)}, the name of a file",
                code="unknown-destination",
                expected="a folder",
                found=path,
            )
        limit = checked_shard_size(_DEFAULT_SHARD_NBYTES if max_shard_size is None else max_shard_size)
        kind = format or "safetensors"
        return cls(path, kind, Place(path, "model{suffix}" + _ENDINGS[kind]), limit)

    def check(self, existing: Existing) -> None:
        """Raise if a file is there that must not be replaced."""
        if self.place is not None:
            self.place.check(existing)
            return
        existing.check(self.path)
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise FileExistsError(EEXIST, "not a regular file, and is not replaced", self.path)


class Task(NamedTuple):
    """The options of one conversion that writes, and its progress."""

    kind: str
    how: Saving
    verify: bool
    shared: Mapping[str, str]
    """The aliases, with the names of their tensors."""
    moved: Moved
    """Called with the bytes of each step."""

    def write_file(self, path: str, entries: Sequence[Entry], metadata: Mapping[str, str] | None) -> None:
        """Write one file and compare it with the source before it is renamed."""
        if self.kind == "npz":
            self._arrays(path, entries)
        else:
            self._tensors(path, entries, metadata)

    def _tensors(self, path: str, entries: Sequence[Entry], metadata: Mapping[str, str] | None) -> None:
        """Write a .safetensors or a .bt file, with the aliases of its own tensors."""
        specs: dict[str, Any] = {entry.name: (entry.target, entry.shape) for entry in entries}
        names = {alias: name for alias, name in self.shared.items() if name in specs}
        kind: Any = self.kind
        options = {"format": kind, "aliases": names, **self.how.of_writer()}
        with closing(Writer(path, specs, metadata, **options)) as writer:
            filling = native(writer)
            self._copy([entry for entry in entries if entry.is_copied], filling)
            for entry in [entry for entry in entries if not entry.is_copied]:
                for index, part in _parts(entry):
                    writer.write(entry.name, part, index)
                    self.moved(part.nbytes)
            with _filled(path, filling.temporary_path) as temporary_path:
                if self.verify:
                    self.compare(temporary_path, entries)
                if not self.how.checksums:
                    writer.commit()
                    return
                # The digests of the tensors are computed while the finished file is copied.
                held = opened([temporary_path], Loading())
                picks = [(0, number, name) for number, name in enumerate(held.names(0))]
                writing = Writing(self.how._replace(format=kind), is_inherited=True)
                writing.write(held, path, picks, together(held), None)

    def _arrays(self, path: str, entries: Sequence[Entry]) -> None:
        """Write an archive that `numpy.load` reads."""
        temporary = _native.TemporaryFile.create(path, durable=self.how.flush, **self.how.existing._asdict())
        with closing(temporary), _filled(path, temporary.temporary_path) as temporary_path:
            with BufferedWriter(_Storage(temporary_path, "w")) as file:
                self._archive(file, entries)
            if self.verify:
                self.compare(temporary_path, entries)
            temporary.commit()

    def _archive(self, file: BinaryIO, entries: Sequence[Entry]) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for entry in entries:
                descr = dtype_of(entry.target).str
                info = zipfile.ZipInfo(f"{entry.name}.npy", _EPOCH)
                # The mode of a regular file that all may read.
                info.external_attr = 0o100644 << 16
                with archive.open(info, "w", force_zip64=True) as member:
                    numpy.lib.format.write_array_header_1_0(
                        member, {"descr": descr, "fortran_order": False, "shape": entry.shape}
                    )
                    for _, part in _parts(entry):
                        member.write(stored(part))
                        self.moved(part.nbytes)

    def _copy(self, entries: Sequence[Entry], writer: _native.Writer) -> None:
        """Copy the bytes of these tensors, which are the same in the source and in the new file."""
        self._each(entries, lambda piece: piece.file.copy(piece.position, writer, piece.name, piece.part))

    def compare(self, temporary_path: str, entries: Sequence[Entry]) -> None:
        """Raise `ConversionError` if a tensor of the file differs from the source."""
        with ExitStack() as stack:
            written = (_Npz if self.kind == "npz" else _Native)(temporary_path, stack)
            copied: list[Entry] = []
            for entry in entries:
                expected, found = (entry.target, entry.shape), written.begin(entry.name)
                if found != expected:
                    raise _differs(temporary_path, entry.name, expected, found)
                if isinstance(written, _Native) and entry.is_copied:
                    copied.append(entry)
                    continue
                for index, part in _parts(entry):
                    held = stored(part)
                    if not numpy.array_equal(held, written.piece(entry.name, index, len(held))):
                        raise _differs(temporary_path, entry.name)
                    self.moved(part.nbytes)

            def check(piece: _Piece) -> None:
                assert isinstance(written, _Native)
                if not piece.file.agrees(
                    piece.position, written.checkpoint, piece.name, piece.begin, piece.nbytes
                ):
                    raise _differs(temporary_path, piece.name)

            self._each(copied, check)

    def _each(self, entries: Sequence[Entry], work: Callable[[_Piece], None]) -> None:
        """Call `work` for every piece of these tensors, in several threads."""

        def all_of(batch: list[_Piece]) -> None:
            for piece in batch:
                work(piece)

        some = [*batches(_pieces(entries), attrgetter("nbytes"), PIECE_NBYTES)]
        pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1, len(some) or 1))
        try:
            for batch, _ in zip(some, pool.map(all_of, some), strict=True):
                self.moved(sum(piece.nbytes for piece in batch))
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _filled(path: str, temporary_path: str) -> Iterator[str]:
    """Yield `temporary_path`, the temporary file for `path`. Errors that name it name `path` instead."""
    # Messages have the escaped name only.
    with called(os.path.basename(temporary_path), os.path.basename(path)), called(temporary_path, path):
        yield temporary_path


class _Piece(NamedTuple):
    """A part of a tensor, and the position of its bytes."""

    file: _native.ForeignFile
    position: int
    name: str
    part: object
    begin: int
    """The position in the tensor."""
    nbytes: int


def _pieces(entries: Iterable[Entry]) -> Iterator[_Piece]:
    files: dict[str, _native.ForeignFile] = {}
    for entry in entries:
        region, begin = entry.region, 0
        assert region is not None
        if region.path not in files:
            files[region.path] = _native.ForeignFile.open(region.path)
        there = size_of(region.path) - region.position
        if there < region.nbytes:
            raise truncated(region.path, region.nbytes, max(there, 0), entry.name)
        for index in pieces(entry.shape, max(nbytes(entry.code, (1,)), 1)):
            size = nbytes(entry.code, tuple(side.stop - side.start for side in index))
            yield _Piece(files[region.path], region.position + begin, entry.name, index or ..., begin, size)
            begin += size


def _parts(entry: Entry) -> Iterator[tuple[Any, Array]]:
    """Yield the values in the new file: pieces, each with its index."""
    array = entry.read()
    for index in pieces(entry.shape, array.dtype.itemsize):
        part = numpy.asarray(array[index])
        yield index or ..., cast(part, entry.cast) if entry.target != entry.code else part


class _Storage(FileIO):
    """A file that raises `StorageError` if writing fails. A buffer repeats its short writes."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as fault:
            reason = f"could not write: {fault.strerror}"
            raise located(
                StorageError, reason, path=str(self.name), errno=fault.errno, code="write"
            ) from fault


class _Native:
    """A new .safetensors or .bt file, which is read in pieces."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        self.checkpoint = stack.enter_context(closing(_native.Checkpoint.open(path, "pread")))

    def begin(self, name: str) -> tuple[str, tuple[int, ...]]:
        info = self.checkpoint.info(name)
        return info.dtype, info.shape

    def piece(self, name: str, index: Any, size: int) -> memoryview:
        buffer, begin = self.checkpoint.select(name, index, _REGION)
        return memoryview(buffer)[begin : begin + size]


class _Npz:
    """A new .npz, whose members are written in pieces from start to end."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self._members = members(path)

    def begin(self, name: str) -> tuple[str, tuple[int, ...]]:
        self._stack.close()
        # The checksum of the member may fail here.
        with reading(self._path, _ARCHIVE):
            self._stream = self._stack.enter_context(opened_member(self._path, self._members[f"{name}.npy"]))
            found = header(self._path, name, self._stream)
        return ("", ()) if isinstance(found, LeftOut) else (found.code, found.shape)

    def piece(self, name: str, index: Any, size: int) -> memoryview:
        with reading(self._path, _ARCHIVE):
            return memoryview(self._stream.read(size))


def _differs(
    path: str, name: str, expected: object = "the values of the source", found: object = "others"
) -> ConversionError:
    reason = f"the written data differs from the source: expected {expected}, found {found}"
    cause = "the disk or the source is faulty, and no file was kept"
    return refused(path, f"{reason} — {cause}", "verification", name, expected, found)


def check_native(path: str, entries: Sequence[Entry]) -> None:
    """Raise for tensors that neither .safetensors nor .bt can hold. `path` is the source."""
    way_out = "drop=[…] leaves it out"
    for entry in entries:
        if entry.name == "__metadata__":
            reason = f"the name is reserved for metadata — {way_out}"
            raise refused(path, reason, "reserved-name", entry.name)
        if entry.target == "F4" and elements(entry.shape) % 2:
            reason = f"shape {list(entry.shape)} of F4 ends inside a byte: expected an even size"
            raise refused(path, f"{reason} — {way_out}", "partial-byte", entry.name)


def check_npz(path: str, entries: Sequence[Entry]) -> None:
    """Raise for tensors that an .npz cannot hold. `path` is the destination."""
    names = {entry.name for entry in entries}
    for entry in entries:
        if entry.target not in DTYPES:
            reason = f"an .npz has no dtype for {entry.target}"
            raise located(
                SaveError,
                f"{reason} — dtype='F32' converts it",
                path=path,
                tensor=entry.name,
                code="unsupported-dtype",
                expected=tuple(DTYPES),
                found=entry.target,
            )
        reason, levels = "", entry.name.split("/")
        # Other programs unpack archives to the paths in the names of members.
        if ".." in levels or "" in levels or "\\" in entry.name or "\0" in entry.name or ":" in levels[0]:
            reason = "a member with this name would be a path out of the folder that it is unpacked in"
        if entry.name.endswith(".npy") and entry.name.removesuffix(".npy") in names:
            reason = "`numpy.load` returns another tensor for this name"
        if reason:
            raise located(SaveError, reason, path=path, tensor=entry.name, code="unsafe-name")
