"""From a file of any format to one of this package's."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from os import fsdecode
from typing import Any, Literal, NamedTuple, Protocol, Unpack

import numpy

from ingot import _native
from ingot._base.checks import checked_shard_size, is_path, one_of
from ingot._base.keys import shared_prefix
from ingot._base.options import Saving, checked, takes
from ingot._base.progress import counted, told
from ingot._base.text import _escaped
from ingot._native import is_url, local_path, shown_url
from ingot._read import door
from ingot._read.source import Reader, shown
from ingot._write.directory import hidden
from ingot._write.download import download
from ingot._write.serialize import _REGION
from ingot.errors import ConversionError, OptionError
from ingot.typing import CopyOptions, Dtype, Keys, Path, Source, SourceFormat, StorageOptions

from .formats import FORMATS, resolved
from .limits import Budget, limits, reading, refused, source_nbytes
from .report import Conversion, LeftOut
from .selection import Choice, Selected, selected
from .source import Options
from .sources import npy
from .values import code_of, nbytes, stored
from .write import (
    KINDS,
    Destination,
    Ending,
    apart,
    check_native,
    check_npz,
    code_in,
    differing,
    parts,
    write_native,
    write_npz,
)
from .zipped import members
from .zipped import opened as opened_member

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._write.shards import Place
    from ingot.typing import Buffer, Tell

    from .source import Contents, Entry
    from .write import Moved


# The comparison of a new file with its source.


_TITLE = "an .npz archive"


class _Written(Protocol):
    """A new file whose pieces are read in file order."""

    def begin(self, name: str) -> tuple[str, tuple[int, ...]]: ...
    def piece(self, name: str, index: Any, size: int) -> memoryview: ...


def compare(path: str, kind: str, entries: Sequence[Entry], code: str | None, moved: Moved) -> None:
    """Raise `ConversionError` if a tensor of the file at `path` differs from the source."""
    with ExitStack() as stack:
        written: _Npz | _Native = _Npz(path, stack) if kind == "npz" else _Native(path, stack)
        if isinstance(written, _Native):
            runs, entries = apart(entries, code)
            for entry in runs:
                _begin(path, written, entry, code)
            name = differing(runs, written.checkpoint, moved)
            if name is not None:
                raise _differs(path, name, "the values of the source", "others")
        for entry in entries:
            _begin(path, written, entry, code)
            for index, part in parts(entry, code):
                held = stored(part)
                if not numpy.array_equal(held, written.piece(entry.name, index, len(held))):
                    raise _differs(path, entry.name, "the values of the source", "others")
                moved(part.nbytes)


def _begin(path: str, written: _Written, entry: Entry, code: str | None) -> None:
    expected = code_in(entry, code), entry.shape
    found = written.begin(entry.name)
    if found != expected:
        raise _differs(path, entry.name, expected, found)


class _Native:
    def __init__(self, path: str, stack: ExitStack) -> None:
        self.checkpoint = _native.Checkpoint.open(path, "pread")
        stack.callback(self.checkpoint.close)

    def begin(self, name: str) -> tuple[str, tuple[int, ...]]:
        info = self.checkpoint.info(name)
        return info.dtype, info.shape

    def piece(self, name: str, index: Any, size: int) -> memoryview:
        buffer, begin = self.checkpoint.select(name, index, _REGION)
        return memoryview(buffer)[begin : begin + size]


class _Npz:
    def __init__(self, path: str, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self._members = members(path)

    def begin(self, name: str) -> tuple[str, tuple[int, ...]]:
        # What fails here is the checksum of the member.
        with reading(self._path, _TITLE):
            self._stream = self._stack.enter_context(opened_member(self._path, self._members[f"{name}.npy"]))
            header = npy.header(self._path, name, self._stream)
        if isinstance(header, LeftOut):
            return "", ()
        return code_of(self._path, name, header.dtype) or "", header.shape

    def piece(self, name: str, index: Any, size: int) -> memoryview:
        with reading(self._path, _TITLE):
            return memoryview(self._stream.read(size))


def _differs(path: str, name: str, expected: object, found: object) -> ConversionError:
    return refused(
        path,
        f"what was written is not what was read: "
        f"expected {expected}, found {found} — the disk or the source is at fault, and nothing was kept",
        code="verification",
        tensor=name,
        expected=expected,
        found=found,
    )


# The temporary copy of a source behind a URL or in an object.


_ENDING = ".fetched"
# Concurrent conversions to one destination whose leftovers are found.
_AT_ONCE = 8
# Characters of a name. File systems have room for 255 bytes.
_LONGEST = 60


@contextmanager
def fetched(
    url: str, beside: str, progress: bool | Tell, storage_options: StorageOptions | None
) -> Iterator[str]:
    """Yield the path of a copy in a new folder beside a destination, and remove the folder at the end."""
    with _folder(beside, shown_url(url)) as folder:
        copy = download(
            url, folder + os.sep, progress=progress, durable=False, storage_options=storage_options
        )
        yield copy.path


@contextmanager
def copied(found: Reader | Buffer, beside: str, progress: bool | Tell) -> Iterator[str]:
    """As `fetched`, for the contents of an object or a buffer."""
    parts, nbytes = (found.parts(), found.nbytes) if isinstance(found, Reader) else _whole(found)
    # The file name extension may decide the format.
    name = os.path.basename(shown(found).partition("?")[0].replace("\0", ""))[-_LONGEST:] or "source"
    with _folder(beside, shown(found)) as folder:
        path = os.path.join(folder, name)
        with open(path, "xb") as file, told(progress, f"Fetching {_escaped(name)}") as tell:
            for part in parts:
                file.write(part)
                if tell is not None:
                    tell(file.tell(), nbytes)
        yield path


def _whole(buffer: Buffer) -> tuple[list[memoryview], int]:
    view = memoryview(buffer)
    return [view], view.nbytes


@contextmanager
def _folder(beside: str, name_of_source: str) -> Iterator[str]:
    """Yield a folder for a copy of the source with this name."""
    # The destination has room for the result; the folder of temporary files may have none.
    prefix, folder = _made(beside)
    with hidden(prefix):
        try:
            with _in_use(folder):
                yield folder
        except ConversionError as error:
            error.add_note(f"fetched from {_escaped(name_of_source)}, and no other file with it")
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _made(beside: str) -> tuple[str, str]:
    """Make a folder, and return the prefix of its name and its path."""
    for number in count():
        prefix, folder = _named(beside, number)
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
            return prefix, folder
    raise AssertionError("one of the names is free")


def _named(beside: str, number: int) -> tuple[str, str]:
    """Return a prefix for hidden names, and the path of a folder beside a destination that begins with it.

    The names are known, so that a directory need not be listed to find what a killed conversion left.
    """
    directory, name = os.path.split(os.path.realpath(beside))
    prefix = f".ingot-{number:08x}."
    return prefix, os.path.join(directory, prefix + name + _ENDING)


def sweep(beside: str) -> None:
    """Remove what conversions to this destination fetched that were killed."""
    for number in range(_AT_ONCE):
        _, folder = _named(beside, number)
        with suppress(OSError):
            with _in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)
            # Windows keeps the folder as long as the lock in it is open.
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _in_use(folder: str) -> Iterator[None]:
    """Lock a folder, until the process ends however it does. `OSError` where another has the lock."""
    if sys.platform == "win32":
        # A folder cannot be locked there, but a file in it, which vanishes when it is closed.
        import msvcrt

        descriptor = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT | os.O_TEMPORARY)
    else:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


# Bytes that an array has fewer of, also where another of its dimensions is 0.
_TOO_LONG = 1 << 63
# Of NumPy's arrays.
_MOST_DIMENSIONS = 64


# How options are checked that have other values here than in other functions.
_OWN: dict[str, Callable[[Any], Any]] = {
    "source_format": lambda word: word if word is None else one_of("source_format", word, tuple(FORMATS)),
    "format": lambda kind: kind if kind is None else one_of("format", kind, KINDS),
    "max_shard_size": lambda size: size if size is None else checked_shard_size(size),
}


@takes(CopyOptions)
def convert(
    source: Source,
    destination: Path,
    *,
    source_format: SourceFormat | None = None,
    format: Literal["safetensors", "bintensors", "npz"] | None = None,
    max_shard_size: int | str | None = None,
    dtype: Dtype | None = None,
    root: str | None = None,
    strip_prefix: str = "",
    keys: Keys | None = None,
    drop: Keys | None = None,
    metadata: Mapping[str, str] | None = None,
    max_nbytes: int | None = None,
    verify: bool = True,
    storage_options: StorageOptions | None = None,
    **options: Unpack[CopyOptions],
) -> Conversion:
    """Convert a file of another format. No code from it is ever run.

    Parameters
    ----------
    source : str, bytes, os.PathLike, or an object to read from
        A file or a folder. Its content decides what it is, and its name only where the content has no mark:
        PyTorch's checkpoints (also in several files with an index), ``.npz``, ``.npy``, HDF5 and Keras, flax
        msgpack, ONNX, TensorFlow's SavedModels and checkpoints, PaddlePaddle, pickles of NumPy arrays, GGUF
        (all parts of a model), Arrow, Parquet, ``.safetensors`` and ``.bt``. Or the URL of one file, or an
        object that holds one, as for `ingot.safe_open`: it is fetched first, beside `destination`, and
        removed afterwards.
    destination : str, bytes or os.PathLike
        The file to write, whose name says the format: ``.safetensors``, ``.bt`` or ``.npz``. A folder, which
        exists or ends in a slash, or `max_shard_size` writes several files with an index, as `ingot.split`.
    source_format : str, optional
        The format of `source`, a word of ``Conversion.source_format``, if it cannot be detected. With it, one
        part of a checkpoint is converted alone, which is refused otherwise.
    format : {"safetensors", "bintensors", "npz"}, optional
        What to write, whatever the name says.
    max_shard_size : int or str, optional
        As for `ingot.split`: the bytes that a file may hold, such as ``"5GB"``.
    dtype : ingot.typing.Dtype, optional
        Convert floating-point tensors to this dtype, with the values that ``load_file(dtype=)`` gives.
        Quantised tensors of GGUF, which are refused otherwise, are dequantised to it.
    root : str, optional
        Take only the tensors below this name, and take it off their names: ``"state_dict"`` of a checkpoint
        that has more than the model in it.
    strip_prefix : str
        Remove this prefix, such as ``"module."``, from the name of each chosen tensor. Each has to have it.
    keys, drop : str, ingot.typing.Glob, iterable of str or callable, optional
        Which tensors the new file has, as for `ingot.rewrite`. With `root` these are the names below it.
    metadata : dict of str to str, optional
        Text to store beside the tensors, added to that of the source.
    max_nbytes : int, optional
        The most bytes of tensors to unpack a source to. By default a hundred times the size of the source, or
        1 GiB where that is more, which no file reaches that was not made to. What a source holds besides its
        tensors, as objects, text and names, may take 64 times its size and 128 MiB of memory, or `max_nbytes`
        where that is more.
    verify : bool
        Read every tensor of the new file and of the source again and compare them, before the new file takes
        its name.
    storage_options : dict, optional
        How a URL is reached (`ingot.StorageOptions`).
    **options
        How the file is written: `ingot.typing.SaveOptions`. `progress` first counts the bytes of a URL, and
        then, from 0 on, the bytes written and compared. An .npz has no place for `metadata`, `checksums`,
        `align` and `reserve_header`.

    Returns
    -------
    Conversion
        What was read, written, shared, cast and left out.

    Raises
    ------
    ConversionError
        The source is damaged, truncated, of an unknown format, one part of several, or becomes too large; or
        a chosen tensor has no dtype in the new file, is an object of a program, or is outside the folder of
        the source. ``code`` and ``tensor`` name the reason and the tensor. Nothing was written.
    FileExistsError
        There is something at `destination`, and `overwrite` is not set.
    OSError
        `source` cannot be opened, or the folder of `destination` cannot be written to. What goes wrong with a
        URL is raised as by `ingot.download`.
    ModuleNotFoundError
        A package that reads the source is not installed. The message has the command that installs it.
    TensorNotFoundError
        A name or pattern of `keys` or `drop` matches nothing.
    SaveError
        The new format lacks a dtype, or cannot have a name.
    StorageError
        Writing failed.
    TypeError, OptionError
        An argument is not what it should be.

    Notes
    -----
    Names in nested dicts and lists are joined by dots, with positions counted from 0:
    ``{"model": {"layers": [w, b]}}`` becomes ``model.layers.0`` and ``model.layers.1``. HDF5 and TensorFlow
    have paths with slashes, which stay. A file with a single tensor without a name calls it ``tensor``.

    Tensors that are one and the same are written once, under the first of their names; the others are kept
    in the metadata, as ``save_file(..., shared="alias")`` of `ingot.torch` keeps them, whose `load_file`
    gives them back. Views of one memory that differ are written each in full. An .npz has every name in full,
    and no metadata.

    One tensor is in memory at a time, where the source allows: not for the tensors inside of ONNX models, and
    Arrow files that are packed.

    Examples
    --------
    >>> ingot.convert("pytorch_model.bin", "model.safetensors").tensors  # doctest: +SKIP
    103
    """
    own = {
        "source_format": source_format,
        "format": format,
        "max_shard_size": max_shard_size,
        "dtype": dtype,
        "root": root,
        "strip_prefix": strip_prefix,
        "keys": keys,
        "drop": drop,
        "metadata": metadata,
        "max_nbytes": max_nbytes,
        "verify": verify,
        "storage_options": storage_options,
    }
    return _converted({"source": source, "destination": destination, **own, **options})


def planned(source: Path, destination: Path, **options: Any) -> Conversion:
    """Return what `convert` would return for a local file, and write nothing."""
    defaults = {"format": None, "metadata": None, "storage_options": None}
    given = {"source": source, "destination": destination, **defaults, **options}
    return _converted(given, dry_run=True)


def _converted(options: Mapping[str, Any], *, dry_run: bool = False) -> Conversion:
    given: Any = checked(convert, options, **_OWN)
    source = given["source"]
    how = Saving.among(convert, {**given, "format": None})
    to = Destination.of(fsdecode(given["destination"]), given["format"], given["max_shard_size"])
    code: str | None = given["dtype"]
    run = _Write(to, code, given["verify"], how)
    if to.kind == "npz":
        run.check_npz()
    choice = Choice(given["root"], given["keys"], given["drop"], given["strip_prefix"])
    source_format, storage_options = given["source_format"], given["storage_options"]

    def converted(path: str, shown: str) -> Conversion:
        found, word = resolved(path, source_format)
        budget = Budget(found, limits(source_nbytes(found, FORMATS[word].is_folder), given["max_nbytes"]))
        to.check(how.existing)
        beside = os.path.dirname(os.path.realpath(to.path))
        reading = Options(
            code is not None, budget, values=not dry_run, source_format=source_format, beside=beside
        )
        with FORMATS[word].opened(found, reading) as contents:
            chosen = selected(found, contents, choice)
            _check(found, contents, chosen, budget)
            if dry_run:
                return run.report(shown, word, contents, chosen)
            with told(how.progress, f"Converting {_escaped(os.path.basename(found))}") as tell:
                return run.run(shown, word, contents, chosen, tell)

    if not dry_run:
        sweep(to.path)
    if isinstance(source, str) and is_url(source):
        # Before hours are spent on fetching it.
        to.check(how.existing)
        with fetched(source, to.path, how.progress, storage_options) as near:
            return converted(near, shown_url(source))
    found: Any = door.resolved(source)
    if not is_path(found):
        to.check(how.existing)
        with copied(found, to.path, how.progress) as near:
            return converted(near, shown(found))
    path = fsdecode(local_path(found))
    return converted(path, path)


class _Write(NamedTuple):
    """What the caller decided about writing."""

    to: Destination
    code: str | None
    verify: bool
    how: Saving

    def check_npz(self) -> None:
        """Raise for options that an .npz cannot keep."""
        options = ("metadata", "checksums", "align", "reserve_header")
        lost = [name for name in options if getattr(self.how, name) != Saving._field_defaults[name]]
        if lost:
            raise OptionError(
                f"an .npz has no place for {', '.join(lost)}", code="npz-metadata", found=tuple(lost)
            )

    def report(self, path: str, word: str, contents: Contents, chosen: Selected) -> Conversion:
        """Return the report of what `run` writes."""
        entries, shared, left_out = chosen.entries, chosen.shared, list(contents.left_out)
        if self.to.kind == "npz":
            entries, shared = chosen.in_full, {}
            left_out += [LeftOut(key, "metadata", value) for key, value in self._metadata(contents).items()]
            check_npz(self.to.path, entries, self.code)
        else:
            check_native(path, entries, self.code)
        return Conversion(
            source=path,
            destination=self.to.path,
            source_format=word,
            format=self.to.kind,
            files=tuple(self._files(entries)),
            tensors=len(entries),
            nbytes=sum(map(self._nbytes, entries)),
            shared=shared,
            cast=tuple(entry.name for entry in entries if code_in(entry, self.code) != entry.code),
            left_out=tuple(left_out),
            dropped=tuple(chosen.dropped),
            verified=self.verify,
            prefix=shared_prefix(entry.name for entry in entries),
        )

    def run(
        self, path: str, word: str, contents: Contents, chosen: Selected, tell: Tell | None
    ) -> Conversion:
        report, metadata = self.report(path, word, contents, chosen), self._metadata(contents)
        entries = chosen.in_full if self.to.kind == "npz" else chosen.entries
        moved = counted(tell, report.nbytes * (2 if self.verify else 1))
        if self.to.place is None:
            self._one(self.to.path, entries, metadata, report.shared, moved)
        else:
            self._shards(self.to.place, entries, metadata, report, moved)
        return report

    def _metadata(self, contents: Contents) -> dict[str, str]:
        return contents.metadata | (self.how.metadata or {})

    def _nbytes(self, entry: Entry) -> int:
        return nbytes(code_in(entry, self.code), entry.shape)

    def _files(self, entries: Sequence[Entry]) -> list[str]:
        place = self.to.place
        if place is None:
            return [self.to.path]
        names = place.names(len(self._split(entries)))
        return [place.path(name) for name in [*names, *([place.index] if len(names) > 1 else [])]]

    def _split(self, entries: Sequence[Entry]) -> list[list[int]]:
        from ingot._write.shards import split

        return split(list(map(self._nbytes, entries)), self.to.shard_nbytes)

    def _shards(
        self,
        place: Place,
        entries: Sequence[Entry],
        metadata: dict[str, str],
        report: Conversion,
        moved: Moved,
    ) -> None:
        from ingot._write.shards import index, write

        shards = self._split(entries)
        names = place.names(len(shards))
        of_file, of_index = {"format": metadata.get("format", "pt")}, {**metadata}
        of_index.pop("format", None)
        if len(shards) == 1:
            of_file |= of_index
        files = {
            name: [entries[number].name for number in shard]
            for name, shard in zip(names, shards, strict=True)
        }
        write(
            place,
            dict(zip(names, shards, strict=True)),
            lambda path, shard: self._one(
                path, [entries[number] for number in shard], of_file, report.shared, moved
            ),
            index(files, report.nbytes, of_index) if len(shards) > 1 else None,
            self.how,
        )

    def _one(
        self,
        path: str,
        entries: Sequence[Entry],
        metadata: dict[str, str],
        shared: dict[str, str],
        moved: Moved,
    ) -> None:
        def check(draft: str) -> None:
            if self.verify:
                compare(draft, self.to.kind, entries, self.code, moved)

        ending = Ending(check, self.how)
        if self.to.kind == "npz":
            write_npz(path, entries, self.code, ending, moved)
        else:
            write_native(path, self.to.kind, entries, self.code, metadata or None, shared, ending, moved)


def _check(path: str, contents: Contents, chosen: Selected, budget: Budget) -> None:
    """Refuse a source without tensors, and one with too many bytes of them."""
    if not chosen.entries:
        others = ", ".join(f"{one.name} ({one.kind})" for one in contents.left_out[:3])
        raise refused(
            path,
            "no tensor in it is to be converted" + (f"; it has {_escaped(others)}" if others else ""),
            code="no-tensors",
        )
    for entry in chosen.entries:
        # A tensor without elements has dimensions too, and no library makes an array of such.
        if len(entry.shape) > _MOST_DIMENSIONS:
            raise refused(
                path,
                f"{len(entry.shape)} dimensions: expected {_MOST_DIMENSIONS} or fewer",
                code="dimensions",
                tensor=entry.name,
                expected=_MOST_DIMENSIONS,
                found=len(entry.shape),
            )
        if nbytes(entry.code, tuple(filter(None, entry.shape))) >= _TOO_LONG:
            raise refused(
                path,
                f"shape {list(entry.shape)} of {entry.code}: its size overflows 63 bits",
                code="size-overflow",
                tensor=entry.name,
            )
    budget.check_tensors(sum(nbytes(entry.code, entry.shape) for entry in chosen.entries))
