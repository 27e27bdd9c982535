"""Convert a file of any format to one of this package's, or list its contents."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from math import prod
from os import fsdecode
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

from ingot._base.checks import checked_shard_size, is_path, one_of
from ingot._base.keys import shared_prefix
from ingot._base.options import Saving, checked, takes
from ingot._base.progress import counted, reporting
from ingot._base.text import _escaped
from ingot._native import is_url, local_path, shown_url
from ingot._read import door
from ingot._read.source import Reader, shown
from ingot._write.directory import hidden, locked
from ingot._write.download import download
from ingot._write.shards import index, split, write
from ingot.errors import ConversionError, OptionError
from ingot.typing import CopyOptions, Dtype, Keys, Path, Source, SourceFormat, StorageOptions

from .formats import FORMATS, resolved
from .limits import Budget, limits, source_nbytes
from .report import Conversion, LeftOut
from .selection import Choice, Selected, selected
from .source import Options
from .values import nbytes
from .write import KINDS, Destination, Task, check_native, check_npz

if TYPE_CHECKING:
    from ingot.typing import Buffer, Tell

    from .source import Contents, Entry


# The temporary copy of a source behind a URL or in an object.


_ENDING = ".fetched"
# The most names of temporary folders, so at most this many conversions to one destination leave leftovers.
_AT_ONCE = 8
# Characters of a name. File systems allow 255 bytes.
_LONGEST = 60


@contextmanager
def fetched(
    url: str, beside: str, progress: bool | Tell, storage_options: StorageOptions | None
) -> Iterator[str]:
    """Yield the path of a copy in a new folder beside a destination, and remove the folder afterwards."""
    with _folder(beside, shown_url(url)) as folder:
        copy = download(
            url, folder + os.sep, progress=progress, durable=False, storage_options=storage_options
        )
        yield copy.path


@contextmanager
def copied(found: Reader | Buffer, beside: str, progress: bool | Tell) -> Iterator[str]:
    """Yield as `fetched`, for the contents of an object or a buffer."""
    parts, nbytes = (found.parts(), found.nbytes) if isinstance(found, Reader) else _whole(found)
    # The file name extension may decide the format.
    name = os.path.basename(shown(found).partition("?")[0].replace("\0", ""))[-_LONGEST:] or "source"
    with _folder(beside, shown(found)) as folder:
        path = os.path.join(folder, name)
        with open(path, "xb") as file, reporting(progress, f"Fetching {_escaped(name)}") as tell:
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
    # The folder of the destination has room for the result; the folder of temporary files may have less.
    prefix, folder = _made(beside)
    with hidden(prefix):
        try:
            with locked(folder):
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

    The names are fixed, so that the leftovers of a killed conversion are found without listing a directory.
    """
    directory, name = os.path.split(os.path.realpath(beside))
    prefix = f".ingot-{number:08x}."
    return prefix, os.path.join(directory, prefix + name + _ENDING)


def sweep(beside: str) -> None:
    """Remove the copies of conversions to this destination that were killed."""
    for number in range(_AT_ONCE):
        _, folder = _named(beside, number)
        # Another conversion has the lock of its folder.
        with suppress(OSError):
            if os.path.isdir(folder) and not os.path.islink(folder):
                with locked(folder, seconds=0):
                    shutil.rmtree(folder, ignore_errors=True)
                # Windows keeps the folder while the lock in it is open.
                shutil.rmtree(folder, ignore_errors=True)


# A listing makes no tensor, so tensors may have any size.
_ANY_NBYTES = 1 << 63


class Listed(NamedTuple):
    """A tensor of another format."""

    name: str
    dtype: str
    """The code in a header, or the source's name if no code fits."""
    shape: tuple[int, ...] | None
    nbytes: int | None
    """The size as stored. None, like the shape, if the tensor cannot be converted."""
    file: str
    """The path of the file that holds it."""
    begin: None = None
    end: None = None
    """Always None: only files of this package have positions."""

    @property
    def parameter_count(self) -> int | None:
        """The number of elements."""
        return None if self.shape is None else prod(self.shape)


class Listing(NamedTuple):
    """The contents of one source."""

    path: str
    format: str
    """A key of `FORMATS`."""
    files: tuple[str, ...]
    tensors: list[Listed]
    left_out: tuple[LeftOut, ...]
    metadata: dict[str, str]


def listed(path: str) -> Listing:
    """Return the contents of the file or folder at `path`, by its header or index. No value is read.

    Raises
    ------
    ConversionError, OSError, ModuleNotFoundError
        As `ingot.convert`, except errors that are only found while values are read.
    """
    found, word = resolved(path, None, is_whole=False)
    held = limits(source_nbytes(found, FORMATS[word].is_folder), None)._replace(tensors=_ANY_NBYTES)
    with FORMATS[word].opened(found, Options(Budget(found, held), True, values=False)) as contents:
        tensors = [_listed(found, entry) for entry in contents.entries]
        named = {found: None} if os.path.isfile(found) else {}
        files = tuple(named | dict.fromkeys(tensor.file for tensor in tensors))
        return Listing(found, word, files, tensors, tuple(contents.left_out), contents.metadata)


def _listed(path: str, entry: Entry) -> Listed:
    file = entry.file or path
    if entry.fault is not None:
        if getattr(entry.fault, "code", None) == "unsafe-pickle":
            # A conversion can leave this entry out, a listing cannot: report that the pickle is unsafe.
            raise entry.fault
        return Listed(entry.name, str(getattr(entry.fault, "found", None) or "?"), None, None, file)
    code, size = entry.stored or (entry.code, nbytes(entry.code, entry.shape))
    return Listed(entry.name, code, entry.shape, size, file)


# The checks of options that have other values here than in other functions.
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
    """Convert a file from another format. No code in it is ever run.

    Parameters
    ----------
    source : str, bytes, os.PathLike, or an object to read from
        A file or a folder. The format is detected from the contents, and from the name only if the contents
        have no mark: PyTorch's checkpoints (also in several files with an index), directories of
        torch.distributed.checkpoint (``.metadata`` and ``.distcp``), ``.npz``, ``.npy``, HDF5 and Keras,
        flax msgpack, ONNX, TensorFlow's SavedModels and checkpoints, PaddlePaddle, pickles of NumPy arrays,
        GGUF (all parts of a model), Arrow, Parquet, ``.safetensors`` and ``.bt``. Or the URL of one file, or
        an object that holds one, as for `ingot.safe_open`: it is first copied to a temporary folder beside
        `destination`.
    destination : str, bytes or os.PathLike
        The file to write. Its ending decides the format: ``.safetensors``, ``.bt`` or ``.npz``. A folder,
        which exists or ends in a slash, or `max_shard_size` writes several files with an index, as
        `ingot.split`.
    source_format : str, optional
        The format of `source`, a value of ``Conversion.source_format``, for files whose format cannot be
        detected. It also allows to convert one part of a checkpoint alone.
    format : {"safetensors", "bintensors", "npz"}, optional
        The format to write, for a `destination` with another ending.
    max_shard_size : int or str, optional
        As for `ingot.split`: the most bytes per file, such as ``"5GB"``.
    dtype : ingot.typing.Dtype, optional
        Convert floating-point tensors to this dtype, as ``load_file(dtype=)`` does. Quantised tensors of
        GGUF, which are refused otherwise, are dequantised to it.
    root : str, optional
        Convert only the tensors below this name, and remove it from their names: ``"state_dict"`` of a
        checkpoint that holds more than the model.
    strip_prefix : str
        Remove this prefix, such as ``"module."``, from the name of each chosen tensor. Each must have it.
    keys, drop : str, ingot.typing.Glob, iterable of str or callable, optional
        The tensors of the new file, as for `ingot.rewrite`. With `root` these are the names below it.
    metadata : dict of str to str, optional
        Text to store beside the tensors, added to the metadata of the source.
    max_nbytes : int, optional
        The most bytes that a source may unpack to. By default a hundred times the size of the source, or 1
        GiB if that is more; only files made to exhaust memory exceed it. Other values, such as objects, text
        and names, may take 64 times the size of the source plus 128 MiB of memory, or `max_nbytes` if that is
        more. The limit of a pickle depends on its own size.
    verify : bool
        Read every tensor of the new file and of the source again and compare them, before the new file gets
        its name.
    storage_options : dict, optional
        The options of a URL (`ingot.StorageOptions`).
    **options
        The options of writing: `ingot.typing.SaveOptions`. `progress` first counts the bytes of a URL, and
        then, starting from 0 again, the bytes written and compared. `metadata`, `checksums`, `align` and
        `reserve_header` do not apply to an .npz.

    Returns
    -------
    Conversion
        The tensors and values that were converted, shared, cast and left out.

    Raises
    ------
    ConversionError
        The source is damaged, truncated, of an unknown format, one part of several, or becomes too large; or
        a chosen tensor has no dtype in the new file, is an object of a program, or is outside the folder of
        the source. ``code`` and ``tensor`` name the reason and the tensor. Nothing was written.
    FileExistsError
        `destination` exists, and `overwrite` is not set.
    OSError
        `source` cannot be opened, or the folder of `destination` cannot be written to. Errors of a URL are
        raised as by `ingot.download`.
    ModuleNotFoundError
        A package that reads the source is not installed. The message has the command that installs it.
    TensorNotFoundError
        A name or pattern of `keys` or `drop` matches nothing.
    SaveError
        The new format lacks a dtype, or cannot have a name.
    StorageError
        Writing failed.
    TypeError, OptionError
        An argument has a wrong type or value.

    Notes
    -----
    Names in nested dicts and lists are joined by dots, and positions are counted from 0:
    ``{"model": {"layers": [w, b]}}`` becomes ``model.layers.0`` and ``model.layers.1``. Paths of HDF5 and
    TensorFlow keep their slashes. A single tensor without a name is called ``tensor``.

    Aliases of a tensor are recorded in the metadata, as by ``save_file(..., shared="alias")`` of
    `ingot.torch`, and its `load_file` restores them. The tensor is written once, under the first of its
    names. Different views of the same memory are each written in full. An .npz stores every name in full, and
    no metadata.

    One tensor is in memory at a time if the source allows it. Tensors inside ONNX models and compressed Arrow
    files are all in memory at once.

    Examples
    --------
    >>> numpy.savez("weights.npz", wte=numpy.zeros((8, 4)))
    >>> ingot.convert("weights.npz", "weights.safetensors").tensors
    1
    """
    return _converted(locals())


def planned(source: Path, destination: Path, **options: Any) -> Conversion:
    """Return the result of `convert` for a local file, without writing."""
    defaults = {"format": None, "metadata": None, "storage_options": None}
    given = {"source": source, "destination": destination, **defaults, **options}
    return _converted(given, dry_run=True)


def _converted(options: Mapping[str, Any], *, dry_run: bool = False) -> Conversion:
    given: Any = checked(convert, options, **_OWN)
    source = given["source"]
    how = Saving.among(convert, {**given, "format": None})
    to = Destination.of(fsdecode(given["destination"]), given["format"], given["max_shard_size"])
    dtype, source_format = given["dtype"], given["source_format"]
    run = _Run(to, given["verify"], how)
    if to.kind == "npz":
        run.check_npz()
    choice = Choice(given["root"], given["keys"], given["drop"], given["strip_prefix"], dtype)

    def converted(path: str, shown: str) -> Conversion:
        found, word = resolved(path, source_format)
        budget = Budget(found, limits(source_nbytes(found, FORMATS[word].is_folder), given["max_nbytes"]))
        to.check(how.existing)
        beside = os.path.dirname(os.path.realpath(to.path))
        reading = Options(budget, dtype is not None, not dry_run, source_format, beside)
        with FORMATS[word].opened(found, reading) as contents:
            chosen = selected(contents, choice)
            report = run.report(shown, word, contents, chosen)
            if not dry_run:
                with reporting(how.progress, f"Converting {_escaped(os.path.basename(found))}") as tell:
                    run.write(contents, chosen, report, tell)
            return report

    if not dry_run:
        sweep(to.path)
    if isinstance(source, str) and is_url(source):
        # Check the options before a download that may take hours.
        to.check(how.existing)
        with fetched(source, to.path, how.progress, given["storage_options"]) as near:
            return converted(near, shown_url(source))
    found: Any = door.resolved(source)
    if not is_path(found):
        to.check(how.existing)
        with copied(found, to.path, how.progress) as near:
            return converted(near, shown(found))
    path = fsdecode(local_path(found))
    return converted(path, path)


class _Run(NamedTuple):
    """The caller's options for writing."""

    to: Destination
    verify: bool
    how: Saving

    def check_npz(self) -> None:
        """Raise for options that an .npz cannot keep."""
        options = ("metadata", "checksums", "align", "reserve_header")
        lost = tuple(name for name in options if getattr(self.how, name) != Saving._field_defaults[name])
        if lost:
            reason = f"an .npz cannot store {', '.join(lost)}"
            raise OptionError(reason, code="npz-metadata", found=lost)

    def report(self, path: str, word: str, contents: Contents, chosen: Selected) -> Conversion:
        """Return the report of the files that `write` writes."""
        entries, shared, left_out = chosen.entries, chosen.shared, list(contents.left_out)
        if self.to.kind == "npz":
            entries, shared = chosen.in_full, {}
            left_out += [LeftOut(key, "metadata", value) for key, value in self._metadata(contents).items()]
            check_npz(self.to.path, entries)
        else:
            check_native(path, entries)
        return Conversion(
            source=path,
            destination=self.to.path,
            source_format=word,
            format=self.to.kind,
            files=tuple(self._files(entries)),
            tensors=len(entries),
            nbytes=sum(entry.nbytes for entry in entries),
            shared=shared,
            cast=tuple(entry.name for entry in entries if entry.target != entry.code),
            left_out=tuple(left_out),
            dropped=tuple(chosen.dropped),
            verified=self.verify,
            prefix=shared_prefix(entry.name for entry in entries),
        )

    def write(self, contents: Contents, chosen: Selected, report: Conversion, tell: Tell | None) -> None:
        """Write the files of a report."""
        metadata, place = self._metadata(contents), self.to.place
        entries = chosen.in_full if self.to.kind == "npz" else chosen.entries
        moved = counted(tell, report.nbytes * (2 if self.verify else 1))
        task = Task(self.to.kind, self.how, self.verify, report.shared, moved)
        if place is None:
            task.write_file(self.to.path, entries, metadata or None)
            return
        shards = [[entries[number] for number in shard] for shard in self._split(entries)]
        of_file, of_index = {"format": metadata.get("format", "pt")}, {**metadata}
        of_index.pop("format", None)
        if len(shards) == 1:
            of_file |= of_index
        files = dict(zip(place.names(len(shards)), shards, strict=True))
        names = {file: [entry.name for entry in shard] for file, shard in files.items()}
        write(
            place,
            files,
            lambda path, shard: task.write_file(path, shard, of_file),
            index(names, report.nbytes, of_index) if len(shards) > 1 else None,
            self.how,
        )

    def _metadata(self, contents: Contents) -> dict[str, str]:
        return contents.metadata | (self.how.metadata or {})

    def _files(self, entries: Sequence[Entry]) -> list[str]:
        place = self.to.place
        if place is None:
            return [self.to.path]
        names = place.names(len(self._split(entries)))
        return [place.path(name) for name in [*names, *([place.index] if len(names) > 1 else [])]]

    def _split(self, entries: Sequence[Entry]) -> list[list[int]]:
        return split([entry.nbytes for entry in entries], self.to.shard_nbytes)
