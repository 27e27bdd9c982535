"""The formats that are converted from, in one table, and the detection of a file's format."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import NamedTuple

from ingot import _native
from ingot._base.checks import one_of
from ingot._base.text import _escaped, _quoted
from ingot.errors import ConversionError, HeaderError, SafetensorError

from .limits import refused
from .source import Contents, Options

# Files of this package, recognised by their whole framing.
#
# They begin with a number, the length of the header, which may spell the first bytes of any other format. So
# they are looked for first, and the first bytes alone decide nothing.


# The longest header.
_MAX_HEADER_NBYTES = 100_000_000


def proven(path: str) -> str:
    """Return the format of a file whose header keeps all its rules. Else raises `HeaderError`."""
    if path.endswith(".json"):
        # Every function of this package reads a file of that name as an index.
        raise HeaderError("not an index of a checkpoint, although its name is that of one", code="index-name")
    with closing(_native.Checkpoint.open(path, "pread")) as checkpoint:
        return checkpoint.format


def begun(path: str, head: bytes) -> str | None:
    """Return the format of a file of this package with a broken header, by its first bytes.

    No other format has so small a number there, unless it is made to: its fifth to eighth byte are zero.
    """
    if len(head) < 8 or not 2 <= int.from_bytes(head[:8], "little") <= _MAX_HEADER_NBYTES:
        return None
    if head[8:].lstrip()[:1] == b"{" or path.lower().endswith(".safetensors"):
        return "safetensors"
    return "bintensors" if path.lower().endswith(".bt") else None


def is_ours(path: str) -> bool:
    """Return whether it is a file of this package, even a broken one."""
    try:
        proven(path)
    except HeaderError:
        with open(path, "rb") as file:
            return begun(path, file.read(512)) is not None
    return True


# Names of other files that belong to a file: they stay inside its folder.


# The name of a file with its number and the number of parts.
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.(?P<ending>\w+)", re.DOTALL)


def inside(path: str, location: object, key: str, *, may_leave_by_link: bool = False) -> str:
    """Return the path of the file that `path` calls `location`, under `key`.

    A link may not lead out of the folder. If the file at `path` is a link itself, others may lead to the
    same folder: caches of downloads have the files of all models in one folder, and links to them.
    """
    reason = _fault(location)
    if reason:
        words = f"{_quoted(key)} names the file {_quoted(location)}, which {reason}"
        raise refused(path, f"{words}: expected a path inside the folder", "outside", found=location)
    assert isinstance(location, str)
    found = os.path.join(os.path.dirname(path), *location.split("/"))
    real = os.path.realpath(found)
    folders = (os.path.realpath(os.path.dirname(path)), os.path.dirname(os.path.realpath(path)))
    words = f"{_quoted(key)} is in {_quoted(location)}"
    if not may_leave_by_link and not any(real.startswith(os.path.join(folder, "")) for folder in folders):
        words = f"{words}, which is a link out of the folder: expected a file inside it"
        raise refused(path, words, "outside", key, found=location)
    if not os.path.isfile(real):
        raise refused(path, f"{words}, and there is no such file", "missing-file", found=location)
    return found


def _fault(location: object) -> str | None:
    """Return why it is not a path inside the folder, the same on every system."""
    if not isinstance(location, str):
        return "is no text"
    if "\0" in location or "\\" in location or ":" in location:
        return "has a character that paths do not have"
    parts = location.split("/")
    if location.startswith(("/", "~")) or ".." in parts:
        return "leaves the folder"
    return "is no plain path" if "" in parts or "." in parts else None


class Format(NamedTuple):
    """One source format."""

    title: str
    reader: str
    """The module of `ingot._convert.sources`, and the function in it."""
    suffixes: tuple[str, ...]
    """The ends of names, for formats that have no mark of their own."""
    is_folder: bool = False
    """Whether tensors may be in other files of the same folder."""

    def read(self, contents: Contents) -> None:
        """Add the contents of a file of this format."""
        module, _, function = self.reader.partition(".")
        getattr(import_module(f"{__package__}.sources.{module}"), function)(contents)

    @contextmanager
    def opened(self, path: str, options: Options) -> Iterator[Contents]:
        """Yield the contents of the file or folder at `path`."""
        with Contents(path, self.title, options) as contents:
            self.read(contents)
            yield contents


# A format is added here, in `_BY_CONTENT` or `_FIRST_BYTES` below, and as a function.
FORMATS = {
    "safetensors": Format("a safetensors file", "native.read", (".safetensors",)),
    "bintensors": Format("a bintensors file", "native.read", (".bt",)),
    "sharded": Format("a checkpoint in several files", "sharded.read", (".index.json",), is_folder=True),
    "torch": Format("a PyTorch checkpoint", "torch.read", (".bin", ".pt", ".pth", ".ckpt")),
    "npz": Format("an .npz archive", "numpy.npz", (".npz",)),
    "npy": Format("an .npy file", "numpy.npy", (".npy",)),
    "hdf5": Format("an HDF5 file", "hdf5.read", (".h5", ".hdf5")),
    "keras": Format("a Keras archive", "hdf5.keras", (".keras",)),
    "flax": Format("a flax checkpoint", "flax.read", (".msgpack",)),
    "onnx": Format("an ONNX model", "onnx.read", (".onnx",), is_folder=True),
    "savedmodel": Format("a SavedModel", "tensorflow.saved_model", ("saved_model.pb",), is_folder=True),
    "tensorflow": Format("a TensorFlow checkpoint", "tensorflow.read", (".index",), is_folder=True),
    "paddle": Format("a PaddlePaddle file", "paddle.read", (".pdparams", ".pdopt")),
    "pickle": Format("a pickle of arrays", "paddle.read", (".pkl", ".pickle")),
    "gguf": Format("a GGUF file", "gguf.read", (".gguf",)),
    "arrow": Format("an Arrow file", "arrow.read", (".arrow", ".feather", ".arrows")),
    "parquet": Format("a Parquet file", "arrow.parquet", (".parquet",)),
}

# Bytes of a file's begin and end that the marks below need.
_HEAD_NBYTES = 512
# The formats of checkpoints in several files, and of the files that `load_file` reads.
_SHARDS = ("torch", "safetensors", "bintensors")
_LOADED = ("safetensors", "bintensors", "sharded")
# The very end of LevelDB's tables, which index files of TensorFlow are.
_TABLE_MAGIC = bytes.fromhex("57fb808b247547db")
_HDF5 = b"\x89HDF\r\n\x1a\n"
# The first bytes of other formats, which may hold HDF5 files.
_MARKS = (b"PK\3\4", b"GGUF", b"ARROW1", b"\xff\xff\xff\xff", b"PAR1", b"\x80", b"{")
# The begin of a file that `torch.save` wrote before it wrote archives: a pickle of this number.
_LEGACY_TORCH = bytes.fromhex("8a0a6cfc9c46f9206aa850192e")


@dataclass(frozen=True)
class _Start:
    """The parts of a file that decide its format."""

    path: str
    head: bytes
    tail: bytes

    @classmethod
    def of(cls, path: str) -> _Start:
        """Read the begin and the end of a file."""
        with open(path, "rb") as file:
            head = file.read(_HEAD_NBYTES)
            file.seek(max(file.seek(0, os.SEEK_END) - _HEAD_NBYTES, 0))
            return cls(path, head, file.read(_HEAD_NBYTES))

    def begins(self, *marks: bytes) -> bool:
        return self.head.startswith(marks)

    def ends(self, word: str) -> bool:
        """Return whether the name ends as the names of a format do."""
        return self.path.lower().endswith(FORMATS[word].suffixes)

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
        """The names in a ZIP archive; empty for any other file."""
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


# Tested in this order, for files that are not this package's own.
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
    "paddle": lambda start: _is_pickle(start) and start.ends("paddle"),
    "pickle": _is_pickle,
    "sharded": lambda start: start.head.lstrip()[:1] == b"{" and b"weight_map" in start.head + start.tail,
}
# For files without a mark: the name decides, if the first byte allows it.
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
        The file is missing, or cannot be opened.
    ConversionError
        The format is unknown. The message says what the file looks like.
    """
    if source is not None:
        return one_of("source_format", source, tuple(FORMATS))
    if os.path.isdir(path):
        raise IsADirectoryError(f"a folder is resolved first: {path}")
    word = _by_content(path)
    part = PART.fullmatch(os.path.basename(path))
    # A GGUF file knows its parts itself.
    if is_whole and part is not None and int(part["count"]) > 1 and word in _SHARDS:
        number, count = int(part["number"]), int(part["count"])
        reason = f"part {number} of {count} of a checkpoint: expected its index or the folder of all parts"
        way_out = f"source_format={word!r} converts this part alone"
        raise refused(
            path, f"{reason} — {way_out}", "part", expected="an index", found=os.path.basename(path)
        )
    return word


def _by_content(path: str) -> str:
    if not os.path.exists(path) and os.path.exists(path + ".index"):
        return "tensorflow"
    try:
        return proven(path)
    except HeaderError as error:
        fault = error
    start = _Start.of(path)
    # A broken file of this package goes to its reader, whose error names the fault.
    if ours := begun(path, start.head):
        return ours
    for word, is_it in _BY_CONTENT.items():
        if is_it(start):
            return word
    for word, fits in _FIRST_BYTES.items():
        if start.ends(word) and start.head and fits(start.head[0]):
            return word
    raise _unknown(start, fault) from fault


# Files that a folder may hold, the first one found: the end of a name, and the word.
_IN_FOLDERS = (
    ("saved_model.pb", "savedmodel"),
    (".bin.index.json", "sharded"),
    (".index.json", "sharded"),
)
# Files that trainers write beside a model. They are converted if the folder has nothing else.
_BESIDE = re.compile(
    r"(optimizer|scheduler|scaler)\.(pt|bin|safetensors)|rng_state\w*\.pth|training_args\.bin"
)


def resolved(path: str, source: str | None, is_whole: bool = True) -> tuple[str, str]:
    """Return the file or folder to read, and its format. In a folder, `load_file`'s choice comes first."""
    if not os.path.isdir(path):
        return path, recognised(path, source, is_whole)
    loaded = _as_loaded(path) if source in (None, *_LOADED) else None
    if loaded is not None:
        return loaded
    names = sorted(os.listdir(path))
    for ending, word in _IN_FOLDERS:
        found = [name for name in names if name.endswith(ending)]
        if found and source in (None, word):
            return _only(path, found), word
    if source == "tensorflow" or (source is None and any(name.endswith(".index") for name in names)):
        return path, "tensorflow"
    endings = tuple(ending for format in FORMATS.values() for ending in format.suffixes)
    files = [
        name for name in names if name.lower().endswith(endings) and os.path.isfile(os.path.join(path, name))
    ]
    one = _only(path, _of_one_model(files))
    return one, recognised(one, source, is_whole)


def _as_loaded(folder: str) -> tuple[str, str] | None:
    """Return the file or the index that `load_file` reads in a folder, and its format."""
    try:
        with closing(_native.Checkpoint.open(folder, "pread")) as checkpoint:
            assert checkpoint.path is not None
            return checkpoint.path, "sharded" if checkpoint.is_sharded else checkpoint.format
    except IsADirectoryError:
        # The folder holds no checkpoint.
        return None
    except SafetensorError as error:
        raise refused(folder, str(error).removeprefix(f"{_escaped(folder)}: "), error.code) from error


def _of_one_model(names: list[str]) -> list[str]:
    """Return the files that may be meant: of a GGUF in parts the first, and no file beside a model."""
    names = [name for name in names if not _BESIDE.fullmatch(name)] or names
    parts = [PART.fullmatch(name) for name in names]
    stems = {part["stem"] if part and part["ending"] == "gguf" else None for part in parts}
    return names[:1] if len(stems) == 1 and None not in stems else names


def _only(folder: str, names: list[str]) -> str:
    if len(names) == 1:
        return os.path.join(folder, names[0])
    some = ": " + ", ".join(_escaped(name) for name in names[:5]) if names else ""
    reason = f"a folder with {len(names)} files that could be converted{some}: expected one, or an index"
    raise refused(folder, reason, "ambiguous", expected=1, found=len(names))


# Files of other kinds, by their first bytes.
_OTHERS = {
    b"PK\3\4": "a ZIP archive of nothing that is converted, or a truncated one",
    b"PAR1": "a truncated Parquet file",
    b"\x1f\x8b": "packed by gzip: unpack it first",
    b"BZh": "packed by bzip2: unpack it first",
    b"\xfd7zXZ": "packed by xz: unpack it first",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it first",
}


def _unknown(start: _Start, error: HeaderError) -> ConversionError:
    looks = next((words for mark, words in _OTHERS.items() if start.begins(mark)), None)
    if looks is None and start.head[257:262] == b"ustar":
        looks = "a tar archive: unpack it first"
    # The message of `error` names pointers of Git LFS, web pages and the like.
    looks = looks or str(error).removeprefix(f"{_escaped(start.path)}: ")
    titles = ", ".join(format.title for format in FORMATS.values())
    reason = f"not a file of a known format: {looks} — known are {titles}; source_format=… says which"
    return refused(start.path, reason, "unknown-format", expected=tuple(FORMATS), found=looks)
