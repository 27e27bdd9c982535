"""The formats that are converted from, in one table, and which of them a file is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

from ingot import _native
from ingot._base.checks import one_of
from ingot._base.text import _escaped, _quoted
from ingot.errors import ConversionError, HeaderError, SafetensorError

from .limits import refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from .source import Contents, Options


# Whether a file is of a format of this package, by all of its framing.
#
# Files of these formats begin with a number, the length of the header. It may spell what any other format
# begins with, so they are asked for first, and of the first bytes alone nothing is concluded.


# The longest header.
_MAX_HEADER_NBYTES = 100_000_000


def proven(path: str) -> str:
    """The format, if the header keeps all its rules. Else `HeaderError`."""
    if path.endswith(".json"):
        # Every function of this package reads a file of that name as an index.
        raise HeaderError(
            "no index of a checkpoint, as which it would be read by its name", code="index-name"
        )
    checkpoint = _native.Checkpoint.open(path, "pread")
    try:
        return checkpoint.format
    finally:
        checkpoint.close()


def begun(path: str, head: bytes) -> str | None:
    """The format that a file with this begin was to be, where its header is broken.

    No other format has so small a number there, unless it is made to: its fifth to eighth byte are zero.
    """
    if len(head) < 8 or not 2 <= int.from_bytes(head[:8], "little") <= _MAX_HEADER_NBYTES:
        return None
    if head[8:].lstrip()[:1] == b"{" or path.lower().endswith(".safetensors"):
        return "safetensors"
    return "bintensors" if path.lower().endswith(".bt") else None


def is_ours(path: str) -> bool:
    """Whether it is a file of this package, even a broken one."""
    try:
        proven(path)
    except HeaderError:
        with open(path, "rb") as file:
            return begun(path, file.read(512)) is not None
    return True


# Names of other files that belong to a file: they stay inside its folder.


# The name of a file that says which part of how many it is.
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.(?P<ending>\w+)", re.DOTALL)


def inside(path: str, location: object, key: str, *, may_leave_by_link: bool = False) -> str:
    """Return the path of the file that `path` calls `location`, under `key`.

    A link may not lead out of the folder. If the file at `path` is a link itself, others may lead to where it
    does: caches of downloads have the files of all models in one folder, and links to them.
    """
    reason = _fault(location)
    if reason:
        raise refused(
            path,
            f"{_quoted(key)} names the file {_quoted(location)}, which {reason}: expected a path "
            "inside the folder",
            code="outside",
            found=location,
        )
    assert isinstance(location, str)
    found = os.path.join(os.path.dirname(path), *location.split("/"))
    real = os.path.realpath(found)
    folders = (os.path.realpath(os.path.dirname(path)), os.path.dirname(os.path.realpath(path)))
    if not may_leave_by_link and not any(real.startswith(os.path.join(folder, "")) for folder in folders):
        raise refused(
            path,
            f"{_quoted(key)} is in {_quoted(location)}, which is a link out of the folder: "
            "expected a file inside it",
            code="outside",
            tensor=key,
            found=location,
        )
    if not os.path.isfile(real):
        raise refused(
            path,
            f"{_quoted(key)} is in {_quoted(location)}, and there is no such file",
            code="missing-file",
            found=location,
        )
    return found


def _fault(location: object) -> str | None:
    """Why it is no path inside the folder, the same on every system."""
    if not isinstance(location, str):
        return "is no text"
    if "\0" in location or "\\" in location or ":" in location:
        return "has a character that paths do not have"
    parts = location.split("/")
    if location.startswith(("/", "~")) or ".." in parts:
        return "leaves the folder"
    if "" in parts or "." in parts:
        return "is no plain path"
    return None


class Format(NamedTuple):
    """One source format."""

    title: str
    module: str
    """Of `ingot._convert.sources`."""
    suffixes: tuple[str, ...]
    """What names end with, for those that have no mark of their own."""
    is_folder: bool = False
    """Whether tensors may be in other files of the same folder."""

    def opened(self, path: str, options: Options) -> AbstractContextManager[Contents]:
        """The contents of the file or folder at `path`."""
        open_it: Any = import_module(f"{__package__}.sources.{self.module}").opened
        contents: AbstractContextManager[Contents] = open_it(path, options)
        return contents


# A format is added here, in `_BY_CONTENT` or `_BY_SUFFIX` below, and as a module.
FORMATS = {
    "safetensors": Format("safetensors", "native", (".safetensors",)),
    "bintensors": Format("bintensors", "native", (".bt",)),
    "sharded": Format("checkpoint in several files", "sharded", (".index.json",), is_folder=True),
    "torch": Format("PyTorch", "torch", (".bin", ".pt", ".pth", ".ckpt")),
    "npz": Format("NumPy, several arrays", "npz", (".npz",)),
    "npy": Format("NumPy, one array", "npy", (".npy",)),
    "hdf5": Format("HDF5, as Keras 1 and 2 wrote", "hdf5", (".h5", ".hdf5")),
    "keras": Format("Keras 3", "keras", (".keras",)),
    "flax": Format("flax msgpack", "flax", (".msgpack",)),
    "onnx": Format("ONNX initializers", "onnx", (".onnx",), is_folder=True),
    "savedmodel": Format("TensorFlow SavedModel", "savedmodel", ("saved_model.pb",), is_folder=True),
    "tensorflow": Format("TensorFlow checkpoint", "tensorflow", (".index",), is_folder=True),
    "paddle": Format("PaddlePaddle", "paddle", (".pdparams", ".pdopt")),
    "pickle": Format("pickle of NumPy arrays", "paddle", (".pkl", ".pickle")),
    "gguf": Format("GGUF", "gguf", (".gguf",)),
    "arrow": Format("Arrow", "arrow", (".arrow", ".feather", ".arrows")),
    "parquet": Format("Parquet", "parquet", (".parquet",)),
}

# As long a begin of a file as any mark below needs.
_HEAD_NBYTES = 512
# What checkpoints in several files consist of, and what `load_file` reads.
_SHARDS = ("torch", "safetensors", "bintensors")
_LOADED = ("safetensors", "bintensors", "sharded")
# Of LevelDB's tables, which index files of TensorFlow are, at their very end.
_TABLE_MAGIC = bytes.fromhex("57fb808b247547db")
_HDF5 = b"\x89HDF\r\n\x1a\n"
# What begins files of other formats, which may hold HDF5 files.
_MARKS = (b"PK\3\4", b"GGUF", b"ARROW1", b"\xff\xff\xff\xff", b"PAR1", b"\x80", b"{")
# What `torch.save` wrote before it wrote archives: a pickle of this number.
_LEGACY_TORCH = bytes.fromhex("8a0a6cfc9c46f9206aa850192e")


@dataclass(frozen=True)
class _Start:
    """What is looked at of a file."""

    path: str
    head: bytes
    tail: bytes

    def begins(self, *marks: bytes) -> bool:
        return self.head.startswith(marks)

    @property
    def has_user_block(self) -> bool:
        """Return whether the mark of HDF5 comes after 512 bytes, or 1024, and so on."""
        with open(self.path, "rb") as file:
            end, position = file.seek(0, os.SEEK_END), 512
            while position < end:
                file.seek(position)
                if file.read(len(_HDF5)) == _HDF5:
                    return True
                position *= 2
        return False

    @cached_property
    def members(self) -> frozenset[str]:
        """The names in a ZIP archive; none in any other file."""
        import zipfile

        if not self.begins(b"PK\3\4"):
            return frozenset()
        try:
            with zipfile.ZipFile(self.path) as archive:
                return frozenset(archive.namelist())
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
            return frozenset()


def _is_pickle(start: _Start) -> bool:
    return start.begins(b"\x80") and start.head[1:2] in (b"\2", b"\3", b"\4", b"\5")


# Asked in this order, of files that are not this package's own.
_BY_CONTENT: dict[str, Callable[[_Start], bool]] = {
    "npy": lambda start: start.begins(b"\x93NUMPY"),
    "hdf5": lambda start: start.begins(_HDF5) or (not start.begins(*_MARKS) and start.has_user_block),
    "gguf": lambda start: start.begins(b"GGUF"),
    "arrow": lambda start: start.begins(b"ARROW1", b"\xff\xff\xff\xff"),
    "parquet": lambda start: start.begins(b"PAR1") and start.tail.endswith(b"PAR1"),
    "tensorflow": lambda start: start.tail.endswith(_TABLE_MAGIC),
    "keras": lambda start: "config.json" in start.members,
    "torch": lambda start: (
        any(name.endswith("/data.pkl") for name in start.members)
        # Protocols 4 and 5 have the length of a frame before it.
        or (_is_pickle(start) and _LEGACY_TORCH in (start.head[2:15], start.head[11:24]))
    ),
    "npz": lambda start: any(name.endswith(".npy") for name in start.members),
    "paddle": lambda start: _is_pickle(start) and start.path.lower().endswith(FORMATS["paddle"].suffixes),
    "pickle": _is_pickle,
    "sharded": lambda start: start.head.lstrip()[:1] == b"{" and b"weight_map" in start.head + start.tail,
}
# For what has no mark of its own: the name says it, where the first byte allows it.
_FIRST_BYTES: dict[str, Callable[[int], bool]] = {
    "flax": lambda first: 0x80 < first < 0x90 or first in (0xDE, 0xDF),
    # The number of the field `ir_version`.
    "onnx": lambda first: first == 0x08,
    "sharded": lambda first: first in b"{ \t\r\n",
    # Protocols 0 and 1 begin with an opcode.
    "pickle": lambda first: first in b"(cdl}])",
    "savedmodel": lambda first: True,
}


def recognised(path: str, source: str | None, is_whole: bool = True) -> str:
    """Return the word of `FORMATS` for the file at `path`; `source`, if the caller named it.

    If `is_whole`, a file that is one part of a checkpoint by its name is refused.

    Raises
    ------
    OSError
        There is nothing, or it cannot be opened.
    ConversionError
        It is none of them. The message says what it looks like.
    """
    if source is not None:
        return one_of("source_format", source, tuple(FORMATS))
    if os.path.isdir(path):
        raise IsADirectoryError(f"a folder is resolved first: {path}")
    word = _by_content(path)
    part = PART.fullmatch(os.path.basename(path))
    # A GGUF file knows its parts itself.
    if is_whole and part is not None and int(part["count"]) > 1 and word in _SHARDS:
        raise refused(
            path,
            f"part {int(part['number'])} of {int(part['count'])} of a checkpoint: expected its index, or the "
            f"folder of all — source_format={word!r} converts this part alone",
            code="part",
            expected="an index",
            found=os.path.basename(path),
        )
    return word


def _by_content(path: str) -> str:
    if not os.path.exists(path) and os.path.exists(path + ".index"):
        return "tensorflow"
    try:
        return proven(path)
    except HeaderError as error:
        return _other(_start(path), error)


def _other(start: _Start, error: HeaderError) -> str:
    """What a file is that is no whole one of this package's, by `error`."""
    path = start.path
    ours = begun(path, start.head)
    if ours is not None:
        # What is wrong with it, its reader says.
        return ours
    for word, is_it in _BY_CONTENT.items():
        if is_it(start):
            return word
    for word, fits in _FIRST_BYTES.items():
        if path.lower().endswith(FORMATS[word].suffixes) and start.head and fits(start.head[0]):
            return word
    raise _unknown(path, start, error) from error


# What a folder may hold, the first that is there: pattern of names, and the word.
_IN_FOLDERS = (
    ("saved_model.pb", "savedmodel"),
    (".bin.index.json", "sharded"),
    (".index.json", "sharded"),
)
# What trainers write beside a model, which is meant if nothing else is there.
_BESIDE = re.compile(
    r"(optimizer|scheduler|scaler)\.(pt|bin|safetensors)|rng_state\w*\.pth|training_args\.bin"
)


def resolved(path: str, source: str | None, is_whole: bool = True) -> tuple[str, str]:
    """Return the file or folder to read, and its format. In a folder, what `load_file` finds comes first."""
    if not os.path.isdir(path):
        return path, recognised(path, source, is_whole)
    loaded = _as_loaded(path) if source in (None, *_LOADED) else None
    if loaded is not None:
        return loaded
    for ending, word in _IN_FOLDERS:
        found = sorted(name for name in os.listdir(path) if name.endswith(ending))
        if found and source in (None, word):
            return _only(path, found), word
    if source == "tensorflow" or (
        source is None and any(name.endswith(".index") for name in os.listdir(path))
    ):
        return path, "tensorflow"
    one = _only(path, _of_one_model(sorted(_files(path))))
    return one, recognised(one, source, is_whole)


def _as_loaded(folder: str) -> tuple[str, str] | None:
    """Return the file or the index that `load_file` reads in a folder, and its format."""
    try:
        checkpoint = _native.Checkpoint.open(folder, "pread")
    except IsADirectoryError:
        # The folder holds no checkpoint.
        return None
    except SafetensorError as error:
        said = str(error).removeprefix(f"{_escaped(folder)}: ")
        raise refused(folder, said, code=error.code) from error
    try:
        assert checkpoint.path is not None
        return checkpoint.path, "sharded" if checkpoint.is_sharded else checkpoint.format
    finally:
        checkpoint.close()


def _of_one_model(names: list[str]) -> list[str]:
    """Return the files that may be meant: of a GGUF in parts the first, and none beside a model."""
    names = [name for name in names if not _BESIDE.fullmatch(name)] or names
    parts = [PART.fullmatch(name) for name in names]
    stems = {part["stem"] if part and part["ending"] == "gguf" else None for part in parts}
    return names[:1] if len(stems) == 1 and None not in stems else names


def _files(folder: str) -> Iterator[str]:
    """The names of files here that end as those of a format do."""
    endings = tuple(ending for format in FORMATS.values() for ending in format.suffixes)
    for name in os.listdir(folder):
        if name.lower().endswith(endings) and os.path.isfile(os.path.join(folder, name)):
            yield name


def _only(folder: str, names: list[str]) -> str:
    if len(names) == 1:
        return os.path.join(folder, names[0])
    some = ": " + ", ".join(_escaped(name) for name in names[:5]) if names else ""
    raise refused(
        folder,
        f"a folder with {len(names)} files that could be converted{some}: expected one, or an index",
        code="ambiguous",
        expected=1,
        found=len(names),
    )


def _start(path: str) -> _Start:
    with open(path, "rb") as file:
        head = file.read(_HEAD_NBYTES)
        file.seek(max(file.seek(0, os.SEEK_END) - _HEAD_NBYTES, 0))
        return _Start(path, head, file.read(_HEAD_NBYTES))


# What files turn out to be that are none of the formats, by their first bytes.
_OTHERS = {
    b"PK\3\4": "a ZIP archive of nothing that is converted, or one that is cut short",
    b"PAR1": "a Parquet file that is cut short",
    b"\x1f\x8b": "packed by gzip: unpack it first",
    b"BZh": "packed by bzip2: unpack it first",
    b"\xfd7zXZ": "packed by xz: unpack it first",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it first",
}


def _unknown(path: str, start: _Start, error: HeaderError) -> ConversionError:
    looks = next((words for mark, words in _OTHERS.items() if start.begins(mark)), None)
    if looks is None and start.head[257:262] == b"ustar":
        looks = "a tar archive: unpack it first"
    # Its own words name pointers of Git LFS, web pages and the like.
    looks = looks or str(error).removeprefix(f"{_escaped(path)}: ")
    titles = ", ".join(format.title for format in FORMATS.values())
    return refused(
        path,
        f"not a file of a format that is known: {looks} — known are {titles}; source_format=… says which",
        code="unknown-format",
        expected=tuple(FORMATS),
        found=looks,
    )
