"""The formats that can be converted, in one table, and the detection of a file's format."""

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
from ingot._base.text import _escaped, _quoted, naming
from ingot.errors import ConversionError, HeaderError, SafetensorError

from .limits import refused
from .source import Contents, Options

# Files of this package's formats, recognised by their whole header.
#
# They begin with the length of the header, and this number may equal the first bytes of any other format. So
# these files are recognised first, and by more than their first bytes.


# The longest header.
_MAX_HEADER_NBYTES = 100_000_000


def proven(path: str) -> str:
    """Return the format of a file whose header breaks no rule of the format. Else raise `HeaderError`."""
    if path.endswith(".json"):
        # Every function of this package reads a file with such a name as an index.
        reason = "the file is named like the index of a checkpoint, but is not an index"
        raise HeaderError(reason, code="index-name")
    with closing(_native.Checkpoint.open(path, "pread")) as checkpoint:
        return checkpoint.format


def begun(path: str, head: bytes) -> str | None:
    """Return the format of a file that has a broken header, if it starts like one of this package's formats.

    Its first 8 bytes are the length of the header. The length is so small that bytes 5 to 8 are zero; other
    formats have no zeros there, unless a file was crafted.
    """
    if len(head) < 8 or not 2 <= int.from_bytes(head[:8], "little") <= _MAX_HEADER_NBYTES:
        return None
    if head[8:].lstrip()[:1] == b"{" or path.lower().endswith(".safetensors"):
        return "safetensors"
    return "bintensors" if path.lower().endswith(".bt") else None


def is_ours(path: str) -> bool:
    """Return whether the file has one of this package's formats, even if its header is broken."""
    try:
        proven(path)
    except HeaderError:
        with open(path, "rb") as file:
            return begun(path, file.read(512)) is not None
    return True


# References from a file to other files, which must be inside its folder.


# The most characters of a path in a file. Systems allow 4,096 at most.
_LONGEST_LOCATION = 4096
# Characters that no file name has: zero, and surrogates outside the range for undecodable bytes.
_UNNAMABLE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
# A file name with the number of the part and the number of parts.
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.(?P<ending>\w+)", re.DOTALL)


def inside(path: str, location: object, key: str, *, may_leave_by_link: bool = False) -> str:
    """Return the path of the file that the file at `path` refers to by `location` under `key`.

    The file may not be a link out of the folder. If `path` is a link itself, the file may be a link into the
    folder of its target: download caches store the files of all models in one folder, and link to them.
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
        raise refused(path, f"{words}, and there is no such file", "missing-file", key, found=location)
    return found


def _fault(location: object) -> str | None:
    """Return why `location` is not a path inside the folder, the same on every system. None if it is."""
    if not isinstance(location, str):
        return "is not text"
    if len(location) > _LONGEST_LOCATION:
        return f"has more than {_LONGEST_LOCATION:,} characters"
    if _UNNAMABLE.search(location) or "\\" in location or ":" in location:
        return "contains a character that is not allowed"
    parts = location.split("/")
    if location.startswith(("/", "~")) or ".." in parts:
        return "leaves the folder"
    return "is not a plain path" if "" in parts or "." in parts else None


class Format(NamedTuple):
    """One source format."""

    title: str
    reader: str
    """The module of `ingot._convert.sources`, and the function in it."""
    suffixes: tuple[str, ...]
    """The suffixes of file names, for formats that cannot be detected by content."""
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


# To add a format, add a row here, a test in `_BY_CONTENT` or `_FIRST_BYTES` below, and the reader function.
FORMATS = {
    "safetensors": Format("a safetensors file", "native.read", (".safetensors",)),
    "bintensors": Format("a bintensors file", "native.read", (".bt",)),
    "sharded": Format("a checkpoint in several files", "sharded.read", (".index.json",), is_folder=True),
    "distcp": Format("a distributed checkpoint", "distributed.read", (".metadata",), is_folder=True),
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

# The number of bytes at the start and the end of a file that the tests below need.
_HEAD_NBYTES = 512
# The formats of sharded checkpoints, and the formats that `load_file` reads.
_SHARDS = ("torch", "safetensors", "bintensors")
_LOADED = ("safetensors", "bintensors", "sharded")
# The last bytes of a LevelDB table, which is the format of TensorFlow's index files.
_TABLE_MAGIC = bytes.fromhex("57fb808b247547db")
_HDF5 = b"\x89HDF\r\n\x1a\n"
# The first bytes of other formats. Such files may contain an HDF5 signature further on.
_MARKS = (b"PK\3\4", b"GGUF", b"ARROW1", b"\xff\xff\xff\xff", b"PAR1", b"\x80", b"{")
# The first bytes of a file in the legacy format of `torch.save`: a pickle of a magic number.
_DISTRIBUTED = b"torch.distributed.checkpoint.metadata"
_LEGACY_TORCH = bytes.fromhex("8a0a6cfc9c46f9206aa850192e")


@dataclass(frozen=True)
class _Start:
    """The parts of a file that decide its format."""

    path: str
    head: bytes
    tail: bytes

    @classmethod
    def of(cls, path: str) -> _Start:
        """Read the start and the end of a file."""
        with open(path, "rb") as file:
            head = file.read(_HEAD_NBYTES)
            file.seek(max(file.seek(0, os.SEEK_END) - _HEAD_NBYTES, 0))
            return cls(path, head, file.read(_HEAD_NBYTES))

    def begins(self, *marks: bytes) -> bool:
        return self.head.startswith(marks)

    def ends(self, word: str) -> bool:
        """Return whether the file has a suffix of the format."""
        return self.path.lower().endswith(FORMATS[word].suffixes)

    @property
    def has_user_block(self) -> bool:
        """Return whether the HDF5 signature is at position 512, 1024, 2048 or another power of two."""
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
        """The names of the members of a ZIP archive; empty for any other file."""
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


# Tested in this order, for files that do not have one of this package's formats.
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
        # Protocols 4 and 5 put the length of a frame before the number.
        or (_is_pickle(start) and _LEGACY_TORCH in (start.head[2:15], start.head[11:24]))
    ),
    "distcp": lambda start: _is_pickle(start) and (_DISTRIBUTED in start.head or start.ends("distcp")),
    "npz": lambda start: any(name.endswith(".npy") for name in start.members),
    "paddle": lambda start: _is_pickle(start) and start.ends("paddle"),
    "pickle": _is_pickle,
    "sharded": lambda start: start.head.lstrip()[:1] == b"{" and b"weight_map" in start.head + start.tail,
}
# For formats without a signature: the suffix decides if the first byte is possible.
_FIRST_BYTES: dict[str, Callable[[int], bool]] = {
    "flax": lambda first: 0x80 < first < 0x90 or first in (0xDE, 0xDF),
    # The tag of the field `ir_version`.
    "onnx": lambda first: first == 0x08,
    "sharded": lambda first: first in b"{ \t\r\n",
    # Protocols 0 and 1 begin with an opcode.
    "pickle": lambda first: first in b"(cdl}])",
    "savedmodel": lambda first: True,
}


def recognised(path: str, source: str | None, is_whole: bool = True) -> str:
    """Return the key in `FORMATS` of the format of the file at `path`, or `source` if the caller passed it.

    If `is_whole`, raise for a file whose name marks it as one part of a checkpoint.

    Raises
    ------
    OSError
        The file is missing, or cannot be opened.
    ConversionError
        The format is unknown. The message describes the file.
    """
    if source is not None:
        return one_of("source_format", source, tuple(FORMATS))
    if os.path.isdir(path):
        raise IsADirectoryError(f"a folder is resolved first: {path}")
    if path.endswith(".distcp"):
        reason = "a file of a distributed checkpoint: expected its directory, which has the file .metadata"
        raise refused(path, reason, "part", expected="a directory", found=os.path.basename(path))
    with naming(path):
        word = _by_content(path)
    part = PART.fullmatch(os.path.basename(path))
    # A GGUF file lists its parts itself.
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
    # A broken file of this package's formats is passed to its reader, whose error names the fault.
    if ours := begun(path, start.head):
        return ours
    for word, is_it in _BY_CONTENT.items():
        if is_it(start):
            return word
    for word, fits in _FIRST_BYTES.items():
        if start.ends(word) and start.head and fits(start.head[0]):
            return word
    raise _unknown(start, fault) from fault


# File name suffixes in folders and their formats, in order of preference.
_IN_FOLDERS = (
    (".metadata", "distcp"),
    ("saved_model.pb", "savedmodel"),
    (".bin.index.json", "sharded"),
    (".index.json", "sharded"),
)
# Files that trainers write beside a model. They are converted only if the folder contains nothing else.
_BESIDE = re.compile(
    r"(optimizer|scheduler|scaler)\.(pt|bin|safetensors)|rng_state\w*\.pth|training_args\.bin"
)


def resolved(path: str, source: str | None, is_whole: bool = True) -> tuple[str, str]:
    """Return the file or folder to read, and its format. In a folder, prefer the choice of `load_file`."""
    if not os.path.isdir(path):
        return path, recognised(path, source, is_whole)
    loaded = _as_loaded(path) if source in (None, *_LOADED) else None
    if loaded is not None:
        return loaded
    names = sorted(os.listdir(path))
    for ending, word in _IN_FOLDERS:
        found = [name for name in names if name.endswith(ending) and os.path.isfile(os.path.join(path, name))]
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
    """Return the candidates: only the first part of a GGUF file, and no files from beside a model."""
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


# Files that cannot be converted, by their first bytes.
_OTHERS = {
    b"PK\3\4": "a ZIP archive of an unknown kind, or a truncated one",
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
    # The message of `error` identifies Git LFS pointers, web pages and so on.
    looks = looks or str(error).removeprefix(f"{_escaped(start.path)}: ")
    titles = ", ".join(format.title for format in FORMATS.values())
    known = f"known formats are {titles}; set source_format=… to choose one"
    reason = f"not a file of a known format: {looks} — {known}"
    return refused(start.path, reason, "unknown-format", expected=tuple(FORMATS), found=looks)
