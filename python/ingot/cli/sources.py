"""Open the files that users name in commands.

`opened` opens all that `ingot.safe_open` opens, for every command.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import click

from ingot._base.keys import NamedTensors, select
from ingot._base.options import Loading
from ingot._native import Checkpoint, ShardIndex, in_natural_order, is_url, shown_url, url_file_name
from ingot._read import door
from ingot.errors import ConversionError, HeaderError, SafetensorError

from .screen import shown, warn

if TYPE_CHECKING:
    import numpy

    from ingot._convert import LeftOut
    from ingot._convert.conversion import Listed, Listing
    from ingot._native import TensorInfo
    from ingot.typing import Glob

    class _HasName(Protocol):
        @property
        def name(self) -> str: ...

    Named = TypeVar("Named", bound=_HasName)
    Array = numpy.ndarray[Any, numpy.dtype[Any]]

    Opened: TypeAlias = "Source | Foreign"
    Row: TypeAlias = "TensorInfo | Listed"


_INDEX = ".index.json"
_MODELS = (_INDEX, ".safetensors", ".bt")


class Source:
    """An open file, or the open files of a checkpoint. Only their headers have been read."""

    def __init__(self, path: str, handle: Checkpoint) -> None:
        # Without secrets, since it is printed.
        self.path = shown_url(path)
        self.handle = handle
        self.format = handle.format
        # One file unless this is a sharded checkpoint. The URL is stored to open it again.
        self.files = [path] if is_url(path) and not handle.is_sharded else handle.shards
        self._file_names = {file: _name(file) for file in self.files}

    def file_of(self, name: str) -> str:
        """Return the path of the file that holds a tensor."""
        if len(self.files) == 1:
            return self.files[0]
        return self.handle.shard_of(name) or self.path

    def file_name_of(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._file_names[self.file_of(name)]

    def nbytes_of_files(self) -> int:
        """Return the bytes of the files."""
        return self.handle.nbytes

    def metadata(self) -> dict[str, str]:
        """Return the metadata. Values of an index that are not text are JSON."""
        return {key: text_of(value) for key, value in (self.handle.metadata() or {}).items()}

    def others(self) -> tuple[LeftOut, ...]:
        """Return the values that are not tensors. Files of this package have none."""
        return ()

    def texts(self) -> dict[str, str]:
        """Return the metadata that is text: all of it except in an index."""
        pairs = self.handle.metadata() or {}
        return {key: value for key, value in pairs.items() if isinstance(value, str)}

    @property
    def index(self) -> str | None:
        """The path of the index of a checkpoint of many files."""
        return self.handle.path if self.handle.is_sharded else None

    def infos(self) -> list[TensorInfo]:
        """Return the entry of every tensor in the order of the data."""
        return self.handle.infos()

    def in_natural_order(self) -> list[TensorInfo]:
        """Return the tensors in natural order of the names."""
        return self.handle.infos(natural=True)

    def aliases(self) -> list[TensorInfo]:
        """Return the dtype, shape and position of each alias."""
        return [*map(self.handle.info, self.handle.shared())]

    def values(self, name: str) -> Array:
        """Return a tensor as a NumPy array, a view if the file is mapped."""
        from ingot import numpy

        array: Array = self.handle.tensor(name, numpy.wrap)
        return array

    def selected(self, name: str, index: Any) -> Array:
        """Return a part of a tensor, and read only that part."""
        from ingot import numpy

        part: Array = self.handle.select(name, index, numpy.wrap)
        return part

    def only_file(self) -> str:
        """Return the path of the file. Raises if there are several."""
        if len(self.files) == 1:
            return self.files[0]
        raise click.UsageError(
            f"{shown(self.path)}: is a checkpoint of {len(self.files)} files: "
            "expected one file, which `ingot merge` makes of it"
        )


def chosen(source: Opened, infos: Sequence[Named], keys: Glob | None, drop: Glob | None) -> Sequence[Named]:
    """Return the infos that `keys` and `drop` select, in order, and then the selected aliases."""
    if keys is None and drop is None:
        return infos
    aliases: Any = source.aliases()
    stored = (info.name for info in infos)
    tensors = NamedTensors(source.path, stored, tuple, aliases=[info.name for info in aliases])
    names = {*select(tensors, keys, drop)}
    return [info for info in (*infos, *aliases) if info.name in names]


def opened(path: str, *, backend: str = "auto") -> Source:
    """Open a file, a checkpoint or a URL that a user typed, as `ingot.safe_open` does."""
    return Source(path, door.open_checkpoint(path, Loading(backend)))


def models_of(paths: Sequence[str]) -> list[str]:
    """Return the models at the paths that a user typed, each once.

    A directory of several models becomes their files and indexes, in natural order.
    """
    found: dict[str, str] = {}
    for path in paths:
        for model in _models_in(path):
            found.setdefault(model if is_url(model) else os.path.abspath(model), model)
    return [*found.values()]


def _models_in(path: str) -> list[str]:
    if is_url(path) or not os.path.isdir(path):
        return [path]
    try:
        opened(path).handle.close()
        return [path]
    except (SafetensorError, OSError) as error:
        # The command reports other errors, or reads the directory as another format.
        if getattr(error, "code", None) != "ambiguous-checkpoint":
            return [path]
    names = os.listdir(path)
    _warn_of_folders(path, names)
    indexes = [name for name in names if name.endswith(_INDEX)]
    read = (ShardIndex.read(os.path.join(path, name)) for name in indexes)
    shards = {shard for index in read if index for shard in index.weight_map().values()}
    models = [name for name in names if name.endswith(_MODELS) and name not in shards]
    return [os.path.join(path, name) for name in _in_order(models)]


def _warn_of_folders(path: str, names: Sequence[str]) -> None:
    """Warn that the models in the directories of a directory are not read."""
    folders = [name for name in _in_order(names) if _has_models(os.path.join(path, name))]
    if folders:
        some = ", ".join(folders[:3]) + ", …" * (len(folders) > 3)
        what = "directory" if len(folders) == 1 else f"{len(folders)} directories"
        warn(shown(f"{path}: left out the {what} in it: {some}"))


def _has_models(folder: str) -> bool:
    with suppress(OSError):
        return any(name.endswith(_MODELS) for name in os.listdir(folder))
    return False


def _in_order(names: Sequence[str]) -> list[str]:
    """Return names of files in natural order. Bytes that are not UTF-8 are ordered by their escapes."""
    texts = {name: name.encode(errors="backslashreplace").decode() for name in names}
    ranks = {text: rank for rank, text in enumerate(in_natural_order([*texts.values()]))}
    return sorted(names, key=lambda name: ranks[texts[name]])


def is_model(word: str) -> bool:
    """Return whether a word after the first path is a path too, and not a key or a pair of the metadata."""
    if is_url(word) or os.path.isdir(word):
        return True
    return word.endswith(_MODELS) and ("=" not in word or os.path.lexists(word))


def _name(file: str) -> str:
    return url_file_name(file) if is_url(file) else os.path.basename(file)


def size_on_disk(file: str) -> int:
    """Return the bytes of a local file, or 0 for a URL, whose size would take a request."""
    return 0 if is_url(file) else os.path.getsize(file)


def text_of(value: object) -> str:
    """Return a metadata value as text."""
    if isinstance(value, str):
        return value
    import json

    return json.dumps(value)


# A source that may have another format. Only its header is read.


class Foreign:
    """A file of another format, or several. No value has been read."""

    index: str | None = None

    def __init__(self, path: str, listing: Listing) -> None:
        self.path = path
        self.files = listing.files
        self.format = listing.format
        self._listing = listing
        self._file_names = {tensor.name: os.path.basename(tensor.file) for tensor in listing.tensors}

    def file_name_of(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._file_names[name]

    def nbytes_of_files(self) -> int:
        """Return the bytes of the files."""
        return sum(os.path.getsize(file) for file in self.files if os.path.isfile(file))

    def metadata(self) -> dict[str, str]:
        """Return the metadata."""
        return self._listing.metadata

    def others(self) -> tuple[LeftOut, ...]:
        """Return the values that are not tensors."""
        return self._listing.left_out

    def aliases(self) -> tuple[Listed, ...]:
        """Return no names, since only files of this package have aliases."""
        return ()

    def infos(self) -> list[Listed]:
        """Return the facts of every tensor in the order of the source."""
        return self._listing.tensors

    def in_natural_order(self) -> list[Listed]:
        """Return the tensors in natural order of the names."""
        infos = self.infos()
        ranks = {name: rank for rank, name in enumerate(in_natural_order([info.name for info in infos]))}
        # A source may have two tensors of one name.
        return sorted(infos, key=lambda info: ranks[info.name])


def open_model(path: str) -> Source | Foreign:
    """Open a source of `opened`. If that fails, use the reader that converts its format.

    Raises
    ------
    SafetensorError, OSError
        As `opened`, if the source has no other known format.
    ConversionError
        It has another format, and is damaged or refused.
    ModuleNotFoundError
        A package other than NumPy that reads it is not installed.
    """
    try:
        return opened(path)
    except (HeaderError, IsADirectoryError, FileNotFoundError) as error:
        # A TensorFlow checkpoint is given by the prefix of its files.
        if is_url(path) or not (os.path.exists(path) or os.path.exists(path + ".index")):
            raise
        # Imported here: it imports NumPy, which files of this package do not need.
        from ingot import _convert

        try:
            return Foreign(path, _convert.listed(path))
        except ConversionError as refusal:
            if refusal.code in ("unknown-format", "ambiguous"):
                raise error from None
            raise
        except ModuleNotFoundError as lacking:
            # Detecting the format needs NumPy. Without it, the file may be a damaged file of ours.
            if lacking.name == "numpy":
                raise error from None
            raise
