"""The models that a viewer shows, and their files, which the page knows by number only."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from itertools import chain
from stat import S_ISREG
from typing import TYPE_CHECKING, NamedTuple

from ingot._base.text import _escaped
from ingot._native import ShardIndex, is_url, local_path, shown_url, url_file_name
from ingot._read import door
from ingot._read.config import CONFIG, CONFIG_NBYTES, config_beside, file_beside
from ingot._read.kind import ADAPTER_CONFIG
from ingot.errors import CheckpointError, SafetensorError, StorageError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from io import FileIO
    from socket import socket

    from ingot._native import Checkpoint, TensorInfo
    from ingot.typing import StorageOptions

# The number of bytes of a remote file that are in memory at a time.
_PIECE = 4 << 20
_KINDS = (".safetensors", ".bt", ".index.json")
_CONFIGS = (CONFIG, ADAPTER_CONFIG)
# The largest header, in bytes: the limit of every reader.
_MAX_HEADER = 100_000_000
# Headers up to this size come with the list of files, so that the page need not request them.
_SHORT_HEAD = 1 << 16
# Opening a FIFO must not wait for its writer. Windows has no such flags, and translates line ends by default.
_OPENING = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


class LocalFile:
    """A file on this machine.

    Each answer opens the file by its path and has a descriptor of its own, so that any number of files can be
    shown and no answer depends on another. If another file has replaced it, it is refused.
    """

    def __init__(self, path: str, name: str) -> None:
        self.name = name
        # A relative path would follow the working directory of the process.
        self._path = os.path.abspath(path)
        self._identity: tuple[int, int] | None = None
        with self.open() as file:
            self._identity = file.identity

    @contextmanager
    def open(self) -> Iterator[OpenLocalFile]:
        """Open the file for one answer.

        Raises
        ------
        OSError
            The file cannot be opened.
        CheckpointError
            The path leads to a directory or a special file.
        StorageError
            The file was replaced.
        """
        with os.fdopen(os.open(self._path, _OPENING), "rb", buffering=0) as stream:
            file = OpenLocalFile(self.name, stream)
            if not S_ISREG(file.facts.st_mode):
                raise CheckpointError(f"{_escaped(self._path)}: is not a regular file", path=self._path)
            if self._identity not in (None, file.identity):
                why = "the file was replaced — start the viewer again to see the new one"
                raise StorageError(f"{_escaped(self._path)}: {why}", code="changed", path=self._path)
            yield file


class OpenLocalFile:
    """A local file, open for one answer. Size, version and bytes are of the same descriptor."""

    def __init__(self, name: str, stream: FileIO) -> None:
        self.name, self._stream = name, stream
        self.facts = os.fstat(stream.fileno())
        self.size = self.facts.st_size
        # Differs after the file was changed.
        self.version = f"{self.facts.st_mtime_ns:x}-{self.size:x}"
        self.identity = self.facts.st_dev, self.facts.st_ino

    @cached_property
    def head_nbytes(self) -> int | None:
        """The bytes up to the end of the header, or None if it has no possible length.

        The page reads and checks the length itself. For a JSON file the page needs all bytes.
        """
        if self.name.endswith(".json"):
            return min(CONFIG_NBYTES, self.size)
        length = int.from_bytes(self.read(0, 8), "little")
        return 8 + length if 2 <= length <= min(_MAX_HEADER, self.size - 8) else None

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to before `end`, or to the end of a file that was shortened."""
        self._stream.seek(begin)
        parts = []
        while begin < end and (part := self._stream.read(end - begin)):
            parts.append(part)
            begin += len(part)
        return b"".join(parts)

    def sender(self, begin: int, end: int) -> Callable[[socket], int]:
        """Return a function that sends the bytes from `begin` to before `end`, and returns their number."""
        return lambda connection: connection.sendfile(self._stream, begin, end - begin)


class ReadFile:
    """A file that is read through a handle, such as a remote one. Credentials stay in this process.

    The page gets the header in the form of a `.safetensors` header, even for other formats, followed by the
    bytes of the tensors. An index or a configuration is sent as a header without tensors.
    """

    def __init__(self, name: str, head: bytes, handle: Checkpoint, infos: Sequence[TensorInfo] = ()) -> None:
        self.name, self.head = name, head
        self.version = os.urandom(8).hex()
        self._handle = handle
        self._infos = infos
        self.head_nbytes = len(head)
        self.size = self.head_nbytes + (infos[-1].end if infos else 0)

    def open(self) -> AbstractContextManager[ReadFile]:
        """Return the file itself: the handle serves all answers."""
        return nullcontext(self)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to before `end`."""
        return b"".join(self._pieces(begin, end))

    def sender(self, begin: int, end: int) -> Callable[[socket], int]:
        """Return a function that sends the bytes from `begin` to before `end`, and returns their number.

        The first piece is read now, so that the answer can be an error.
        """
        pieces = self._pieces(begin, end)
        first = next(pieces, b"")

        def send(connection: socket) -> int:
            sent = 0
            for piece in chain([first], pieces):
                connection.sendall(piece)
                sent += len(piece)
            return sent

        return send

    def _pieces(self, begin: int, end: int) -> Iterator[bytes | memoryview]:
        if begin < self.head_nbytes:
            yield self.head[begin:end]
        begin, end = (max(position - self.head_nbytes, 0) for position in (begin, end))
        for info in _overlapping(self._infos, begin, end):
            first, last = max(begin, info.begin) - info.begin, min(end, info.end) - info.begin
            for at in range(first, last, _PIECE):
                yield self._handle.tensor_bytes(info.name, at, min(last, at + _PIECE))


File = LocalFile | ReadFile
OpenFile = OpenLocalFile | ReadFile


class Opened(NamedTuple):
    """An open checkpoint, with its path or URL and the options that opened it."""

    handle: Checkpoint
    #: The path or the URL. None for an object.
    place: str | None
    storage_options: StorageOptions | None = None


class Model:
    """The files of one path, and the label that the page shows."""

    def __init__(self, label: str, files: Sequence[File], format: str | None = None) -> None:
        self.label, self.files = label, files
        # The format of files that are read through a handle, which the page cannot see.
        self.format = format


class Shelf:
    """The displayed models, one or two: local paths, URLs or open checkpoints.

    `close` closes the handles that the shelf opened.
    """

    def __init__(self, sources: Sequence[str | Opened]) -> None:
        self._handles: list[Checkpoint] = []
        try:
            self.models = [self._model(source) for source in sources]
        except BaseException:
            self.close()
            raise
        self.files = [file for model in self.models for file in model.files]

    def _model(self, source: str | Opened) -> Model:
        if isinstance(source, str) and not is_url(source):
            return _local(source)
        if isinstance(source, str):
            source = opened(source)
            self._handles.append(source.handle)
        return read_through(source)

    def listed(self) -> dict[str, object]:
        """Return the facts for a new page: models, their files by number and version, and short headers."""
        numbers = iter(range(len(self.files)))
        return {
            "models": [
                {
                    "label": model.label,
                    "format": model.format,
                    "files": [{"number": next(numbers), **_entry(file)} for file in model.files],
                }
                for model in self.models
            ]
        }

    def close(self) -> None:
        for handle in self._handles:
            handle.close()


def _entry(file: File) -> dict[str, object]:
    with file.open() as found:
        nbytes = found.head_nbytes
        head = None if nbytes is None or nbytes > _SHORT_HEAD else b64encode(found.read(0, nbytes)).decode()
        return {
            "name": file.name,
            "size": found.size,
            "etag": f'"{found.version}"',
            "headNbytes": nbytes,
            "head": head,
        }


def _local(source: str) -> Model:
    path = os.fsdecode(local_path(source))
    named = _in_folder(path) if os.path.isdir(path) else _with_neighbours(path)
    return Model(path, [LocalFile(place, name) for place, name in named])


def _in_folder(folder: str) -> list[tuple[str, str]]:
    """Return the files of a folder that a page may request, by path and name."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(_KINDS) or name in _CONFIGS)
    if not set(names).difference(_CONFIGS):
        raise CheckpointError(
            f"{folder}: the directory holds no checkpoint: expected a .safetensors or .bt file, or an index",
            path=folder,
            code="no-checkpoint",
        )
    for index in [name for name in names if name.endswith(".index.json")]:
        names += [shard for shard in _shards(os.path.join(folder, index)) if shard not in names]
    places = [(os.path.join(folder, name), name) for name in names]
    return [place for place in places if os.path.isfile(place[0])]


def _with_neighbours(path: str) -> list[tuple[str, str]]:
    """Return a file, the shards that it names as an index, and the configurations."""
    folder, name = os.path.split(path)
    # The page opens a file of another name only if there is no other.
    configs = _CONFIGS if name.endswith(_KINDS) else ()
    names = [name, *(_shards(path) if name.endswith(".json") else []), *configs]
    others = [(os.path.join(folder, other), other) for other in names[1:]]
    return [(path, name), *(place for place in others if os.path.isfile(place[0]))]


def _shards(index: str) -> list[str]:
    # The page shows faults of the index.
    with suppress(SafetensorError, OSError):
        found = ShardIndex.read(index)
        return found.shards if found else []
    return []


# Through a handle. --------------------------------------------------------------------------------------


def opened(source: str) -> Opened:
    """Open a path or a URL."""
    place = source if is_url(source) else os.fsdecode(local_path(source))
    return Opened(door.open_checkpoint(place), place)


def read_through(source: Opened) -> Model:
    """Return the files of an open checkpoint."""
    handle = source.handle
    files: list[ReadFile] = []
    index = handle.index()
    if index is not None:
        text = json.dumps({"metadata": index.metadata() or {}, "weight_map": index.weight_map()}).encode()
        files.append(ReadFile("model.safetensors.index.json", text, handle))
    for name, metadata, infos in handle.headers():
        shown = name if index is not None else _file_name(source)
        files.append(ReadFile(shown, _rendered(metadata, infos), handle, infos))
    files.extend(ReadFile(name, data, handle) for name, data in _configs(source))
    return Model(_label(source), files, handle.format)


def _label(source: Opened) -> str:
    return shown_url(source.place or source.handle.path or "bytes in memory")


def _file_name(source: Opened) -> str:
    """Return the name of the only file, with an ending that the page knows."""
    place = source.place or ""
    name = os.path.basename(url_file_name(place) if is_url(place) else source.handle.path or place)
    return name if name.endswith((".safetensors", ".bt")) else f"{name or 'model'}.safetensors"


def _configs(source: Opened) -> Iterator[tuple[str, bytes]]:
    """Yield the configurations beside the model by name: of the quantisation, and of a local adapter.

    An object has none.
    """
    if source.place is None:
        return
    # The working directory may have changed.
    path = source.place if is_url(source.place) else source.handle.at or source.place
    with suppress(SafetensorError, OSError):
        if found := config_beside(path, source.storage_options):
            yield CONFIG, found.data
    with suppress(SafetensorError, OSError):
        if not is_url(path) and (found := file_beside(path, ADAPTER_CONFIG)):
            yield ADAPTER_CONFIG, found.data


def _rendered(metadata: dict[str, str] | None, infos: list[TensorInfo]) -> bytes:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    for info in infos:
        header[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [info.begin, info.end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Every writer pads to a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _overlapping(infos: Sequence[TensorInfo], begin: int, end: int) -> Iterator[TensorInfo]:
    from bisect import bisect_right

    for number in range(bisect_right(infos, begin, key=lambda info: info.end), len(infos)):
        if infos[number].begin >= end:
            return
        if infos[number].nbytes:
            yield infos[number]
