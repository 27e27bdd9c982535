"""The files that a viewer may read: found once, held open, known to the page by their numbers only."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from contextlib import suppress
from stat import S_ISREG
from threading import Lock

from ingot import _open
from ingot._native import ShardIndex, Wrap, fetch_beside, is_url, local_path, shown_url
from ingot.errors import CheckpointError, SafetensorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import FileIO

    from ingot._native import Checkpoint, TensorInfo

# Bytes of a remote file that are in memory at a time.
_PIECE = 4 << 20
# Of a `config.json`, as the reader in JavaScript has it.
_MAX_CONFIG = 10_000_000
_KINDS = (".safetensors", ".bt", ".index.json")
# Of a header, as every reader has it.
_MAX_HEADER = 100_000_000
# Of a header that the list of files brings along, so that the page need not ask for it.
_SHORT_HEAD = 1 << 16
# A pipe must not be waited for. Windows has no such flags, and translates line ends unless told not to.
_OPENING = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


class LocalFile:
    """A file of this machine. It is opened here, and never by name again."""

    def __init__(self, path: str, name: str) -> None:
        self.name = name
        self.stream: FileIO = os.fdopen(os.open(path, _OPENING), "rb", buffering=0)
        # The place in the file is that of all threads.
        self._lock = Lock()
        if not S_ISREG(os.fstat(self.stream.fileno()).st_mode):
            self.stream.close()
            raise CheckpointError(f"{path}: is no regular file", path=path)

    @property
    def size(self) -> int:
        """Bytes in the file, as it is now."""
        return os.fstat(self.stream.fileno()).st_size

    @property
    def version(self) -> str:
        """What tells the file from itself after it was changed."""
        found = os.fstat(self.stream.fileno())
        return f"{found.st_mtime_ns:x}-{found.st_size:x}"

    @property
    def head_nbytes(self) -> int | None:
        """Bytes up to the end of the header, so that the page is given just these; None where nobody knows.

        The page reads the length again, and judges it. Of JSON all of it is wanted.
        """
        if self.name.endswith(".json"):
            return min(_MAX_CONFIG, self.size)
        length = int.from_bytes(b"".join(self.pieces(0, 8)), "little")
        return 8 + length if 2 <= length <= min(_MAX_HEADER, self.size - 8) else None

    def pieces(self, begin: int, end: int) -> Iterator[bytes]:
        """The bytes from `begin` to before `end`, or to the end of a file that is shorter by now."""
        while begin < end:
            with self._lock:
                self.stream.seek(begin)
                piece = self.stream.read(min(_PIECE, end - begin))
            if not piece:
                return
            begin += len(piece)
            yield piece

    def close(self) -> None:
        self.stream.close()


class ReadFile:
    """A file that is read through a handle, as one behind a URL is: credentials stay here.

    The page gets the header that was proven, written anew as `.safetensors`, and after it the bytes of the
    tensors.
    """

    def __init__(
        self, name: str, handle: Checkpoint, metadata: dict[str, str] | None, infos: list[TensorInfo]
    ) -> None:
        self.name = name
        self.version = os.urandom(8).hex()
        self._handle = handle
        self._infos = infos
        # All that comes before the tensors.
        self.head = _rendered(metadata, infos)
        self.size = len(self.head) + (infos[-1].end if infos else 0)

    @property
    def head_nbytes(self) -> int:
        return len(self.head)

    def pieces(self, begin: int, end: int) -> Iterator[bytes | memoryview]:
        """The bytes from `begin` to before `end`."""
        if begin < len(self.head):
            yield self.head[begin:end]
        begin, end = (max(position - len(self.head), 0) for position in (begin, end))
        for info in _overlapping(self._infos, begin, end):
            within = max(begin, info.begin) - info.begin, min(end, info.end) - info.begin
            yield from _bytes_of(self._handle, info, *within)

    def close(self) -> None:
        """Nothing: the handle is that of all files of its model."""


class Document:
    """A short text that the page reads as a file."""

    def __init__(self, name: str, text: bytes) -> None:
        self.name, self.head, self.size = name, text, len(text)
        self.head_nbytes = self.size
        self.version = os.urandom(8).hex()

    def pieces(self, begin: int, end: int) -> Iterator[bytes | memoryview]:
        """The bytes from `begin` to before `end`."""
        yield self.head[begin:end]

    def close(self) -> None:
        """Nothing."""


File = LocalFile | ReadFile | Document


class Model:
    """The files of one path, and what people call it."""

    def __init__(self, label: str, files: Sequence[File], format: str | None = None) -> None:
        self.label, self.files = label, files
        # That of files that are read through a handle, which the page cannot see.
        self.format = format


class Shelf:
    """The models that are looked at, one or two. Close it to close their files."""

    def __init__(self, sources: Sequence[str | Checkpoint]) -> None:
        self.models: list[Model] = []
        try:
            for source in sources:
                self.models.append(_found(source))
        except BaseException:
            self.close()
            raise
        self.files = [file for model in self.models for file in model.files]

    def listed(self) -> dict[str, object]:
        """What the page is told: models, their files by number and version, and headers that are short."""
        numbers = iter(range(len(self.files)))
        return {
            "models": [
                {
                    "label": model.label,
                    "format": model.format,
                    "files": [
                        {
                            "number": next(numbers),
                            "name": file.name,
                            "size": file.size,
                            "etag": f'"{file.version}"',
                            "headNbytes": file.head_nbytes,
                            "head": _short_head(file),
                        }
                        for file in model.files
                    ],
                }
                for model in self.models
            ]
        }

    def close(self) -> None:
        for model in self.models:
            for file in model.files:
                file.close()


def _short_head(file: File) -> str | None:
    nbytes = file.head_nbytes
    if nbytes is None or nbytes > _SHORT_HEAD:
        return None
    return b64encode(b"".join(file.pieces(0, nbytes))).decode()


def _found(source: str | Checkpoint) -> Model:
    if not isinstance(source, str) or is_url(source):
        return read_through(*opened(source))
    path = os.fsdecode(local_path(source))
    named = _in_folder(path) if os.path.isdir(path) else _with_neighbours(path)
    files: list[File] = []
    try:
        for place, name in named:
            files.append(LocalFile(place, name))
    except BaseException:
        for file in files:
            file.close()
        raise
    return Model(path, files)


def _in_folder(folder: str) -> list[tuple[str, str]]:
    """The files of a folder, by path and name, that a page may want. Which of them it opens, it says."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(_KINDS) or name == "config.json")
    if names in ([], ["config.json"]):
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
    """A file with what belongs to it: the shards of an index, and how a model was quantised."""
    folder, name = os.path.split(path)
    # A file of another name is opened as the only one there is.
    config = ["config.json"] if name.endswith(_KINDS) else []
    names = [name, *(_shards(path) if name.endswith(".json") else []), *config]
    others = [(os.path.join(folder, other), other) for other in names[1:]]
    return [(path, name), *(place for place in others if os.path.isfile(place[0]))]


def _shards(index: str) -> list[str]:
    # What is wrong with an index, the page shows.
    with suppress(SafetensorError, OSError):
        return ShardIndex.read(index).shards
    return []


# Through a handle. --------------------------------------------------------------------------------------


def opened(source: str | Checkpoint) -> tuple[Checkpoint, str]:
    """The handle of a model, and what it was opened by."""
    if not isinstance(source, str):
        return source, source.path or "bytes in memory"
    place = source if is_url(source) else os.fsdecode(local_path(source))
    return _open.open_checkpoint(place, "auto"), place


def read_through(handle: Checkpoint, path: str) -> Model:
    """The files of an open checkpoint, which was opened at `path`."""
    shown = shown_url(path)
    files: list[ReadFile | Document] = []
    index = handle.index()
    if index is not None:
        text = json.dumps({"metadata": index.metadata() or {}, "weight_map": index.weight_map()}).encode()
        files.append(Document("model.safetensors.index.json", text))
    for name, metadata, infos in handle.headers():
        # The page goes by the ending, which an address or bytes in memory may lack.
        files.append(ReadFile(name if index is not None else "model.safetensors", handle, metadata, infos))
    config = _config_beside(path)
    if config is not None:
        files.append(Document("config.json", config))
    return Model(shown, files, handle.format)


def _config_beside(path: str) -> bytes | None:
    """How a model was quantised, where a file says so."""
    with suppress(SafetensorError, OSError):
        if is_url(path):
            return fetch_beside(path, "config.json", _MAX_CONFIG)[1]
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        with open(os.path.join(folder, "config.json"), "rb") as file:
            return file.read(_MAX_CONFIG)
    return None


def _rendered(metadata: dict[str, str] | None, infos: list[TensorInfo]) -> bytes:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    for info in infos:
        header[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [info.begin, info.end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # To a multiple of 8 bytes, as every writer does.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _overlapping(infos: list[TensorInfo], begin: int, end: int) -> Iterator[TensorInfo]:
    from bisect import bisect_right

    for number in range(bisect_right(infos, begin, key=lambda info: info.end), len(infos)):
        if infos[number].begin >= end:
            return
        if infos[number].nbytes:
            yield infos[number]


def _bytes_of(handle: Checkpoint, info: TensorInfo, begin: int, end: int) -> Iterator[memoryview]:
    """The bytes of a tensor from `begin` on: by slices of it, which are what a handle reads."""
    if not info.shape or info.nbytes % _elements(info):
        # A scalar; and elements of less than a byte, of which a slice may not begin everywhere.
        yield _raw(handle, info.name, ())[begin:end]
        return
    # Down to the first dimension of which a slice fits, or one that holds but a part of what is wanted.
    index: tuple[int, ...] = ()
    start, inner = 0, info.nbytes
    for at, dim in enumerate(info.shape):
        inner //= dim
        first, last = (begin - start) // inner, (end - 1 - start) // inner
        if inner <= _PIECE or at == len(info.shape) - 1:
            break
        if first != last:
            for row in range(first, last + 1):
                from_row = start + row * inner
                yield from _bytes_of(handle, info, max(begin, from_row), min(end, from_row + inner))
            return
        index, start = (*index, first), start + first * inner
    for at in range(begin - start, end - start, _PIECE):
        upto = min(end - start, at + _PIECE)
        first, last = at // inner, -(-upto // inner)
        part = _raw(handle, info.name, (*index, slice(first, last)))
        yield part[at - first * inner : upto - first * inner]


def _elements(info: TensorInfo) -> int:
    from math import prod

    return prod(info.shape)


def _raw(handle: Checkpoint, name: str, index: tuple[int | slice, ...]) -> memoryview:
    if index:
        found: memoryview = handle.select(name, index, bytes_wrap)
    else:
        found = handle.tensor(name, bytes_wrap)
    return found


def _memory(shape: object, dtype: object, buffer: memoryview, offset: int = 0) -> memoryview:
    # More may follow: whoever asks knows how many bytes are theirs.
    return memoryview(buffer).cast("B")[offset:]


def _itself(code: str) -> str:
    return code


bytes_wrap = Wrap.buffer(_memory, _itself)
