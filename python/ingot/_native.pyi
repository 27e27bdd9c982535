"""The extension module. Everything in it is used through `ingot`, not by hand."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, final

from typing_extensions import Buffer as AnyBuffer

from ._base.checks import Leniency
from ._read.moves import Onto
from ._read.select import Wanted
from ._read.source import Reader
from .errors import HeaderError

__all__ = [
    "CHECKSUMS_KEY",
    "DELTA_KEY",
    "MODEL_SPEC_KEY",
    "RECORD_KEYS",
    "SHARED_KEY",
    "STALE_KEYS",
    "STATE_KEY",
    "Appender",
    "Buffer",
    "Checkpoint",
    "Destinations",
    "Export",
    "Expression",
    "ForeignFile",
    "Gpu",
    "NewFile",
    "Patch",
    "ShardIndex",
    "Sources",
    "Stream",
    "TemporaryFile",
    "TensorInfo",
    "Wrap",
    "Writer",
    "__version__",
    "blob_digest",
    "check_destination",
    "check_storage_options",
    "check_upload",
    "compose_patches",
    "destination",
    "diff_versions",
    "distances",
    "download",
    "fetch_beside",
    "fetch_start",
    "has_digests",
    "hash",
    "hash_object",
    "hashes",
    "hub_headers",
    "identity",
    "in_natural_order",
    "is_url",
    "list_objects",
    "local_path",
    "module_tensors",
    "planned_download",
    "prepare",
    "read_url",
    "release_pinned",
    "remove_objects",
    "replace_file",
    "replace_object",
    "replace_tensor",
    "serialize",
    "shown_url",
    "statistics",
    "stream",
    "update_metadata",
    "upload_file",
    "url_file_name",
    "version_id",
    "why_pageable",
    "why_uncached",
]

__version__: str
CHECKSUMS_KEY: str
DELTA_KEY: str
MODEL_SPEC_KEY: str
RECORD_KEYS: list[str]
SHARED_KEY: str
STALE_KEYS: list[str]
STATE_KEY: str

@final
class Buffer:
    """Memory with tensors, for `Wrap.buffer`. It supports the buffer protocol, and is writable."""

    def __len__(self) -> int: ...

@final
class Stream:
    def next(self, wrap: Wrap) -> tuple[str, Any] | None: ...
    def take(self, name: str, wrap: Wrap) -> Any | None: ...
    def close(self) -> None: ...

def statistics(
    checkpoint: Checkpoint,
    names: Iterable[str] | None = None,
    *,
    bins: int = 0,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[dict[str, Any] | None]:
    """Return the fields of `TensorStats` except `dtype`. None for dtypes of 6 bits."""

def distances(
    one: Checkpoint,
    two: Checkpoint,
    names: Sequence[str],
    *,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[tuple[int | None, int | float | None, float | None, float | None] | None]:
    """Return the fields of the `Distance` between two tensors of each name. None if all values are equal."""

def diff_versions(
    base: Checkpoint,
    new: Checkpoint,
    path: str | bytes | PathLike[str] | PathLike[bytes],
    *,
    index: bytes | None = None,
    step: int | None = None,
    durable: bool = True,
    overwrite: bool = False,
    replace_read_only: bool = False,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write the patch from `base` to `new`. `index` is the text of the index of `new`, if it has one."""

def compose_patches(
    patches: Sequence[Patch],
    path: str | bytes | PathLike[str] | PathLike[bytes],
    *,
    durable: bool = True,
    overwrite: bool = False,
    replace_read_only: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write one patch for several in a row."""

def version_id(checkpoint: Checkpoint) -> str:
    """Return the id of a version: a digest of the headers, and of the data if they lack digests."""

def has_digests(checkpoint: Checkpoint) -> bool:
    """Return whether the headers have a digest of each tensor, so that their id is an id of the data too."""

@final
class Patch:
    """An open patch (FORMAT.md, "Patches")."""

    def __new__(
        cls,
        checkpoint: Checkpoint,
        prove: bool,
        *,
        progress: Callable[[int, int], object] | None = None,
    ) -> Patch:
        """Take the file of an open checkpoint, which is closed afterwards.

        If `prove`, all its bytes are compared with their digests, and all positions are checked.
        """

    @property
    def path(self) -> str | None: ...
    def record(self) -> dict[str, Any]:
        """Return the record of the patch, and its id. Versions are pairs of id and digest."""

    def index(self) -> bytes | None:
        """Return the text of the index of the result."""

    def changed(self) -> list[tuple[TensorInfo, str, int, int]]:
        """Return the changed tensors by name: info, codec, number of elements, and bytes in the patch."""

    def elements(self, name: str, begin: int, end: int) -> tuple[bytes, bytes]:
        """Return the positions, as 64-bit integers, and the bytes of changed elements from `begin` to `end`.

        A tensor that the patch has as a whole has no positions.
        """

    def check_base(
        self,
        base: Checkpoint,
        verify: bool,
        *,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Fail if `base` is not the version that the patch is for."""

    def apply(
        self,
        base: Checkpoint,
        number: int,
        path: str | bytes | PathLike[str] | PathLike[bytes],
        *,
        durable: bool = True,
        overwrite: bool = False,
        replace_read_only: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write one file of the result."""

    def layout(self) -> Checkpoint:
        """Return the result with names, dtypes, shapes and metadata, without the data of tensors."""

    def write_into(
        self,
        wanted: Sequence[tuple[str, int]],
        destinations: Destinations,
        *,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write new elements into memory of the base.

        `wanted` has a name for each destination, and the first byte of the tensor that it holds. Destinations
        are bytes (U8). All are checked before the first byte changes.
        """

    def apply_in_place(
        self,
        path: str | bytes | PathLike[str] | PathLike[bytes],
        verify: bool,
        *,
        durable: bool = True,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> bool:
        """Change the files at `path`. Return false if they were the result already."""

@final
class TensorInfo:
    """The entry of a header for one tensor."""

    def __new__(
        cls,
        name: str,
        dtype: str,
        shape: Sequence[int],
        begin: int,
        end: int,
        parameter_count: int | None = None,
    ) -> TensorInfo: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def parameter_count(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[TensorInfo], tuple[object, ...]]: ...

@final
class Wrap:
    @staticmethod
    def dlpack(
        make: Callable[[Any], Any],
        resolve: Callable[[str], Any],
        exchange: Any = None,
        *,
        strided: bool = False,
    ) -> Wrap: ...
    @staticmethod
    def buffer(make: Callable[..., Any], resolve: Callable[[str], Any], *, strided: bool = False) -> Wrap: ...

@final
class Gpu:
    """A GPU that tensors are read onto and saved from by its driver, through pinned memory.

    ``current()`` returns the number of the device among the visible ones, the caller's current stream, and
    the handle of the stream. ``allocate(stream, wanted)`` receives dtype codes, each with a shape in storage
    units, and returns for each a tensor for use on that stream, with a DLPack capsule of its memory.
    ``stream(ordinal)`` returns the caller's current stream on a device, and its handle, so that a prefetch
    keeps its device if the current device changes. Without `stream`, the stream at the beginning of the
    prefetch is used. `driver` is the path of a library that replaces the driver, for tests.
    """

    def __new__(
        cls,
        current: Callable[[], tuple[int, Any, int]],
        allocate: Callable[[Any, list[tuple[str, tuple[int, ...]]]], list[tuple[Any, Any]]],
        *,
        stream: Callable[[int], tuple[Any, int]] | None = None,
        driver: str | PathLike[str] | None = None,
    ) -> Gpu: ...

def release_pinned() -> None:
    """Free pinned memory that no copy uses now, on a thread. Otherwise it is freed after some idle time."""

def why_pageable() -> str | None:
    """Return the reason why memory for copies to GPUs is not pinned. None if it is."""

def why_uncached() -> str | None:
    """Return why the cache of URLs was not used in this process, the last time that it was not."""

@final
class Export:
    @staticmethod
    def dlpack(
        plain: list[type],
        places: Callable[[list[Any]], tuple[list[Any], list[int]] | None],
        stored: Callable[[list[Any]], bool],
        capsule: Callable[[Any], Any],
        exchange: Any = None,
    ) -> Export: ...
    @staticmethod
    def buffer(plain: list[type], code: Callable[[Any], str | None]) -> Export: ...

@final
class Destinations:
    """Memory of the tensors of a mapping, in its order, to be read into once.

    `memory(name, tensor)` returns the dtype code, a DLPack capsule or a writable buffer, and whether the
    buffer is of a tensor without dimensions; or None for a tensor to leave out. It is called for tensors that
    `export` cannot export.
    """

    def __new__(
        cls,
        tensors: Mapping[str, Any],
        memory: Callable[[str, Any], tuple[str, Any, bool] | None],
        export: Export | None = None,
    ) -> Destinations: ...
    def __len__(self) -> int: ...

# The index, and for each file its size, its version and its header.
_ShardHeaders: TypeAlias = tuple[bytes | None, list[tuple[int, str, bytes]]]
# The name of a file, its metadata, and its tensors in the order of their data.
_FileHeader: TypeAlias = tuple[str, dict[str, str] | None, list[TensorInfo]]

# The name of the input, its first element, the sides (begin, count, step, stride), the dtypes of casts.
_Piece: TypeAlias = tuple[str, int, Sequence[tuple[int, int, int, int]], Sequence[str]]

@final
class Checkpoint:
    @staticmethod
    def open(
        path: str | bytes | PathLike[str] | PathLike[bytes],
        backend: str = "auto",
        leniency: Leniency = "accept",
        max_header_size: int | None = None,
        confine: bool = False,
        lent: bool = False,
    ) -> Checkpoint: ...
    @staticmethod
    def open_with(
        path: str | bytes | PathLike[str] | PathLike[bytes], backend: str, headers: _ShardHeaders
    ) -> Checkpoint: ...
    @staticmethod
    def open_url_with(
        url: str, storage_options: Mapping[str, Any] | None, headers: _ShardHeaders
    ) -> Checkpoint: ...
    @staticmethod
    def open_url(
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        leniency: Leniency = "accept",
        max_header_size: int | None = None,
        *,
        progress: Callable[[int, int], object] | None = None,
    ) -> Checkpoint: ...
    @staticmethod
    def from_buffer(
        data: AnyBuffer, leniency: Leniency = "accept", max_header_size: int | None = None
    ) -> Checkpoint: ...
    @staticmethod
    def from_object(
        reader: Reader, leniency: Leniency = "accept", max_header_size: int | None = None
    ) -> Checkpoint: ...
    def dequantized(self, config: str | None, dtype: str | None) -> tuple[Checkpoint, list[str]] | None:
        """Return the checkpoint with its weights dequantised as they are read, and the names that it lacks.

        `config` is the text of the ``config.json`` beside the model. None if no tensor is quantised.
        """

    def remapped(
        self,
        tensors: Sequence[tuple[str, str, Sequence[int], Sequence[_Piece]]],
        metadata: Sequence[tuple[str, str]],
        joins: Mapping[str, tuple[int, Sequence[int]]],
    ) -> Checkpoint:
        """Return a checkpoint of tensors that are put together from parts of these.

        Each has a name, a dtype, a shape and pieces. `joins` has the tensors whose parts ranks slice one by
        one: the dimension and the sizes of the parts.
        """

    def joins(self) -> dict[str, tuple[int, list[int]]]:
        """Return the tensors whose parts ranks slice one by one: the dimension and the sizes of the parts."""

    @property
    def path(self) -> str | None: ...
    @property
    def at(self) -> str | None:
        """The absolute path of a local file or index. A relative path was resolved when it was opened."""

    @property
    def shards(self) -> list[str]:
        """The paths of all files, in the order of their names; none for bytes in memory."""

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""

    @property
    def format(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: object, /) -> bool: ...
    def names(self) -> list[str]: ...
    def offset_names(self, known: list[str] | None = None) -> list[str]:
        """Return the names of the stored tensors in the order of the data.

        A name that `known` has at the same position is that string, which has a hash already, and is found
        equal without a comparison. Strings of a subclass of str are not used.
        """

    def all_names(self) -> list[str]:
        """Return the names of the stored tensors in the order of their data, and then the aliases."""

    def metadata(self) -> dict[str, Any] | None:
        """Return the metadata of the file, or of the index, whose values may be any JSON."""

    def shard_metadata(self) -> dict[str, dict[str, str] | None]:
        """Return the metadata of each file, by its name in the index or its file name."""

    def shared(self) -> dict[str, tuple[str, tuple[list[int], list[int], int] | None]]:
        """Return the aliases, each with the name of its tensor.

        An alias of a part of a tensor also has shape, strides and first element, counted in elements.
        """

    def shard_of(self, name: str) -> str | None:
        """Return the path of the file that contains the tensor."""

    def wrong_total(self) -> tuple[int, int] | None:
        """Return the total size in the index and the real total, if the two differ."""

    def parameter_count(self) -> dict[str, int]: ...
    def info(self, name: str) -> TensorInfo: ...
    def infos(self, *, natural: bool = False) -> list[TensorInfo]:
        """Return the infos of all tensors, in data order or in the natural order of their names."""

    def unsound(self) -> dict[str, HeaderError]:
        """Return the tensors that a lenient reader left out, each with its exception."""

    @property
    def is_sharded(self) -> bool: ...
    def index(self) -> ShardIndex | None:
        """Return the index by itself, or None for a single file."""

    def headers(self) -> list[_FileHeader]:
        """Return the header of each file."""

    def verify(
        self,
        expected_sha256: str | None = None,
        *,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[tuple[str, dict[str, Any]]]:
        """Compare each file with its digests. Return its name, and arguments for `ingot.Verification`."""

    def proven(
        self,
        names: Iterable[str] | None,
        wrap: Wrap,
        kept: bool,
        expected_sha256: str | None,
        *,
        onto: Onto | None = None,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> dict[str, Any]:
        """Return the result of `tensors`, after its bytes were compared with their digests."""

    def tensors(
        self,
        names: Iterable[str] | None,
        wrap: Wrap,
        *,
        onto: Onto | None = None,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> dict[str, Any]: ...
    def tensor(self, name: str, wrap: Wrap, *, onto: Onto | None = None) -> Any: ...
    def select(self, name: str, index: Any, wrap: Wrap, *, onto: Onto | None = None) -> Any: ...
    def tensor_bytes(self, name: str, begin: int, end: int) -> memoryview:
        """Return the bytes of a tensor from `begin` to before `end`, counted from its first byte."""

    def stream(
        self,
        requests: Sequence[tuple[str, Any]],
        ahead: int,
        threads: int | None = None,
        *,
        onto: Onto | None = None,
    ) -> Stream: ...
    def warm(
        self,
        names: Iterable[str] | None = None,
        *,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> int: ...
    def parts(
        self,
        wanted: Wanted,
        wrap: Wrap,
        *,
        onto: Onto | None = None,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[Any]: ...
    def parts_nbytes(self, wanted: Wanted) -> int: ...
    def outlines(self, wanted: Wanted, wrap: Wrap) -> list[tuple[str, tuple[int, ...]]]:
        """Return the dtype code and the shape of each result, in the form of a header.

        Raises if `wrap` would.
        """

    def fill(
        self,
        wanted: Wanted,
        destinations: Destinations,
        *,
        kept: bool = False,
        expected_sha256: str | None = None,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Read the wanted parts. With digests, tensors must be whole, and each may be requested once."""

    def fill_on(
        self,
        wanted: Wanted,
        gpu: Gpu,
        memory: Sequence[Any],
        *,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Read the wanted parts into the contiguous tensors in these DLPack capsules, which are on `gpu`.

        They are filled in the order of the caller's current stream. No two may share memory.
        """

    def proven_copy(
        self,
        names: Iterable[str],
        kept: bool,
        expected_sha256: str | None,
        *,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Checkpoint:
        """Return these tensors in memory, if they match their digests."""

    def share(self) -> Checkpoint: ...
    def shard_headers(self) -> _ShardHeaders | None: ...
    def is_replaced(self) -> bool: ...
    def identity(self) -> tuple[str, bool] | None: ...
    def close(self) -> None: ...

def in_natural_order(names: list[str]) -> list[str]:
    """Return the names in natural order: ``layer.2`` before ``layer.10``."""

def is_url(text: str) -> bool:
    """Return whether a text begins like a URL with any scheme except ``file:``, which is a path."""

def shown_url(url: str) -> str:
    """Return a URL without its secrets. Other texts are returned unchanged."""

def local_path(given: str | bytes | PathLike[str] | PathLike[bytes]) -> str | bytes:
    """Return a local path as str or bytes, also for a ``file:`` URL. Raises for other URLs.

    Every path that is read from or written to is converted here.
    """

def destination(given: str | bytes | PathLike[str] | PathLike[bytes]) -> str | bytes:
    """Return a URL of a store that files are written to, or otherwise a path as `local_path` does."""

def url_file_name(url: str) -> str:
    """Return the name of the file behind a URL."""

def fetch_beside(
    url: str,
    name: str,
    most: int,
    storage_options: Mapping[str, Any] | None = None,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[str, bytes]:
    """Return the contents of the file `name` in the folder of `url`, which may have at most `most` bytes.

    Its URL is returned too, without secrets.
    """

def fetch_start(url: str, most: int, storage_options: Mapping[str, Any] | None = None) -> tuple[bytes, int]:
    """Return the first bytes of the file behind a URL, at most `most`, and its size."""

def list_objects(
    url: str, storage_options: Mapping[str, Any] | None = None
) -> list[tuple[str, int, str, float]]:
    """Return the objects of a store whose keys begin with the key of `url`.

    Each is its name after the last slash of `url`, its size, its `ETag`, and the seconds since it was written
    by the clock of the store.
    """

def hub_headers(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    max_header_size: int | None = None,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[dict[str, Any] | None, list[tuple[str, dict[str, str] | None, list[TensorInfo]]]] | None:
    """Return the metadata of an index and the `Checkpoint.headers` of its shards, by one request to the Hub.

    None if the Hub's answer cannot be used. The caller then reads the files, which shows faults of the model.
    """

def serialize(
    tensors: Mapping[str, Any],
    payload: Callable[[str, Any], Any],
    metadata: Mapping[str, str] | None,
    format: str,
    *,
    export: Export | None = None,
    shared: str = "copy",
    records: Mapping[str, str] = ...,
) -> bytes: ...

@final
class NewFile:
    """A file to write: its header, and its tensors, which must not change before `write` or `snapshot`."""

    def snapshot(self) -> None:
        """Copy the tensors, so that they may change."""

    def write(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Write the file. `progress` receives the bytes done and the total."""

def prepare(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    tensors: Mapping[str, Any],
    payload: Callable[[str, Any], Any],
    metadata: Mapping[str, str] | None,
    format: str,
    *,
    export: Export | None = None,
    shared: str = "copy",
    records: Mapping[str, str] = ...,
    reserve: int = 0,
    align: int = 8,
    durable: bool = True,
    overwrite: bool = True,
    atomic: bool = True,
    replace_read_only: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    checksums: Sequence[str] = ...,
) -> NewFile:
    """Collect the contents of a new file. Nothing is written yet.

    `path` may be a URL of a store (`destination`), which `storage_options` reach.

    `payload(name, tensor)` returns a DLPack capsule, ``(code, shape, buffer)``, ``(code, shape, fetch)``,
    where ``fetch(begin, end)`` returns these bytes as a capsule or a buffer, or, for a tensor in C order on a
    GPU, ``(code, shape, (gpu, capsule))``: the values are those after the work that is queued on the caller's
    current stream. `export` is tried first, for a few hundred tensors at once: its `places` returns the
    storages of the tensors, and the position of each tensor's first element in its storage. If it raises or
    returns None, or if DLPack's description of a tensor is unusable or reaches past its storage, `payload` is
    called. `records` are entries of the metadata that describe these tensors; entries with the same keys in
    `metadata` are dropped.
    """

def download(
    url: str,
    path: str | bytes | PathLike[str] | PathLike[bytes],
    *,
    storage_options: Mapping[str, Any] | None,
    expected_sha256: str | None,
    overwrite: bool,
    replace_read_only: bool,
    durable: bool,
    threads: int | None,
    progress: Callable[[int, int], object] | None,
) -> tuple[tuple[str, int, int, str | None], list[tuple[str, int, int, str | None]]]:
    """Download a file or model. Return path, size, downloaded bytes, and the SHA-256 if it was compared.

    The list has the same for each file of a model of many files, the index last. It is empty for a single
    file.
    """

def planned_download(
    url: str,
    path: str | bytes | PathLike[str] | PathLike[bytes],
    *,
    storage_options: Mapping[str, Any] | None,
    expected_sha256: str | None,
    overwrite: bool,
    replace_read_only: bool,
) -> list[tuple[str, int]]:
    """Return the files that `download` would write, with their sizes, the index last. Nothing is written."""

def replace_object(
    url: str,
    pieces: Sequence[AnyBuffer],
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write an object of a store, of any content. `pieces` are its bytes, in order."""

def upload_file(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    url: str,
    *,
    overwrite: bool,
    storage_options: Mapping[str, Any] | None,
    progress: Callable[[int, int], object] | None = None,
) -> int:
    """Write an object of a store with the bytes of a file of any content. Return its size.

    Raises if the file is written to meanwhile, and makes no object then.
    """

def check_upload(url: str, nbytes: int, storage_options: Mapping[str, Any] | None = None) -> None:
    """Raise if an object of this size could not be written later without replacing another one."""

def remove_objects(urls: Sequence[str], storage_options: Mapping[str, Any] | None = None) -> int:
    """Remove objects of a store in this order, until the store refuses one. Return how many are removed.

    Raises if the store refuses to remove the first. An object that does not exist counts as removed.
    """

def hash(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    definition: str,
    progress: Callable[[int, int], object] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> str | None: ...
def hash_object(
    object: Any, name: str, definition: str, progress: Callable[[int, int], object] | None = None
) -> str | None:
    """Return the hash of a buffer, or of a `Reader` of `_read/source.py`. `name` is for errors."""

def blob_digest(path: str | bytes | PathLike[str] | PathLike[bytes]) -> str | None:
    """Return the digest that is the name of a blob of a content-addressed store. None for other files."""

def hashes() -> list[str]: ...
def read_url(
    url: str, take: Callable[[bytes], object], storage_options: Mapping[str, Any] | None = None
) -> None:
    """Call `take` with all bytes behind a URL, a few MiB at a time, in order."""

def replace_file(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    pieces: Sequence[AnyBuffer],
    *,
    durable: bool = True,
    overwrite: bool = False,
    replace_read_only: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write a file of any content in the way of a save. `pieces` are its bytes, in order."""

def check_destination(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    *,
    overwrite: bool = False,
    replace_read_only: bool = False,
) -> None:
    """Raise the error that a write to `path` would raise because of the existing file.

    Nothing is opened or created.
    """

def stream(
    write: Callable[[bytes], object],
    tensors: Mapping[str, Any],
    payload: Callable[[str, Any], Any],
    metadata: Mapping[str, str] | None,
    format: str,
    *,
    export: Export | None = None,
    shared: str = "copy",
    records: Mapping[str, str] = ...,
    reserve: int = 0,
    align: int = 8,
    checksums: Sequence[str] = ...,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Pass the bytes of a file to `write`, a few MiB at a time. Other arguments as for `prepare`.

    For `checksums` the tensors are read twice, since the digests precede them.
    """

def module_tensors(
    module: Any, is_ordinary: Callable[[type[Any]], bool], versions: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the parameters and persistent buffers of a module of torch, in the order of its `state_dict`.

    `versions` gets the versions of all modules, as `state_dict` has them in its `_metadata`.

    None if a module in it has hooks of `state_dict`, an attribute in place of a method that makes it, or a
    class for which `is_ordinary` returns False, and if names or attributes are not as torch makes them.
    """

def update_metadata(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    set: Mapping[str, str],
    remove: Sequence[str],
    in_place: bool,
    durable: bool,
    progress: Callable[[int, int], object] | None = None,
) -> Literal["unchanged", "in-place", "rewritten"]: ...
def replace_tensor(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    name: str,
    tensor: Any,
    payload: Callable[[str, Any], Any],
    durable: bool,
    progress: Callable[[int, int], object] | None = None,
) -> None: ...
def identity(
    url: str, storage_options: Mapping[str, Any] | None = None
) -> (
    tuple[
        str,
        tuple[str | None, str | None, str | None, str | None, float | None, str | None, str | None] | None,
    ]
    | None
):
    """Return the setting that contains the identity of requests for `url`, and the identity.

    None if there is none.

    The identity has the fields of `ingot.typing.Identity`, in order. It is None for a signed query, a key of
    Azure, a password, and a token for the Hub or a URL.
    """

def check_storage_options(given: Mapping[str, Any]) -> None:
    """Raise `OptionError` or `TypeError` for options that are unknown or have a value of the wrong kind."""

@final
class ShardIndex:
    @staticmethod
    def read(source: str | bytes | PathLike[str] | PathLike[bytes]) -> ShardIndex | None:
        """Read the index at a path or in a directory, without its shards. None for a single file."""

    @property
    def shards(self) -> list[str]: ...
    def weight_map(self) -> dict[str, str]: ...
    def metadata(self) -> dict[str, Any] | None: ...

@final
class Sources:
    """Open files and checkpoints whose tensors are copied to other files."""

    def __new__(cls, checkpoints: Sequence[Checkpoint], leniency: Leniency = "accept") -> Sources:
        """Take the files of open checkpoints, which are closed afterwards."""

    def __len__(self) -> int: ...
    def path(self, source: int) -> str:
        """Return the path of the index, or of the only file."""

    def findings(self, source: int) -> list[tuple[str, str | None, str, str]]:
        """Return the findings of a lenient reader: code, tensor, fault, and remedy."""

    def names(self, source: int) -> list[str]:
        """Return the tensor names of one source, in data order, file after file.

        The aliases follow.
        """

    def infos(self, source: int) -> list[TensorInfo]:
        """Return the info of the same tensors. An alias has its own name and the info of its tensor."""

    def shared(self, source: int) -> list[int]:
        """Return the number of the tensor of each alias."""

    def sizes(self, source: int) -> list[int]:
        """Return the sizes of the tensors in bytes."""

    def tensor_bytes(self, source: int, number: int) -> memoryview:
        """Return the bytes of a tensor of one source."""

    def metadata(self, source: int) -> dict[str, dict[str, str] | None]:
        """Return the metadata of each file of a source, by path."""

    def index_metadata(self, source: int) -> dict[str, Any] | None:
        """Return the metadata of the index, if there is one. Its values may be any JSON."""

    def write(
        self,
        path: str | bytes | PathLike[str] | PathLike[bytes],
        picks: Sequence[tuple[int, int, str]],
        metadata: Mapping[str, str] | None,
        format: str,
        *,
        inherit: bool = False,
        checksums: Sequence[str] = ...,
        reserve: int = 0,
        align: int = 8,
        durable: bool = True,
        overwrite: bool = False,
        replace_read_only: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write a file or an object of `picks`: a source, the number of a tensor in it, the new name.

        Aliases are kept. If `inherit`, digests of tensors are copied; otherwise `checksums` are computed.
        ModelSpec's hash in `metadata`, if there is one, must be of the source with the same data. A training
        state in `metadata` is written as it is.
        """

@final
class Writer:
    @staticmethod
    def create(
        path: str | bytes | PathLike[str] | PathLike[bytes],
        specs: Sequence[tuple[str, str, Sequence[int]]],
        metadata: Mapping[str, str] | None,
        format: str,
        *,
        records: Mapping[str, str] = ...,
        reserve: int = 0,
        align: int = 8,
        durable: bool = True,
        overwrite: bool = False,
        replace_read_only: bool = False,
    ) -> Writer: ...
    @staticmethod
    def join(
        path: str | bytes | PathLike[str] | PathLike[bytes], *, finish: bool = False, durable: bool = True
    ) -> Writer: ...
    def names(self) -> list[str]: ...
    def write(self, name: str, tensor: Any, index: Any, payload: Callable[[str, Any], Any]) -> None: ...
    @property
    def temporary_path(self) -> str:
        """The name of the file before the commit, in the directory of the destination."""

    def commit(self) -> None:
        """Rename the file to its path. Raises `FileExistsError` if a file is there and is not replaced."""

    def close(self) -> None: ...
    def disown(self) -> None:
        """In a child after a fork: close the parent's file, so that its lock does not outlive the parent
        here.
        """

@final
class TemporaryFile:
    """A temporary file that callers fill before it is renamed. Later saves remove it if it is left behind."""

    @staticmethod
    def create(
        path: str | bytes | PathLike[str] | PathLike[bytes],
        *,
        durable: bool = True,
        overwrite: bool = False,
        replace_read_only: bool = False,
    ) -> TemporaryFile: ...
    @property
    def temporary_path(self) -> str: ...
    def commit(self) -> None: ...
    def close(self) -> None: ...

@final
class Expression:
    """A regular expression without look-around and references to groups, which matches in linear time."""

    def __new__(cls, pattern: str) -> Expression:
        """Compile an expression. Raises `ValueError` if it is not supported or too large."""

    def matches(self, text: str) -> bool:
        """Return whether it matches any part of the text."""

@final
class ForeignFile:
    """An open file of any format that contains the bytes of tensors in the form of a file of tensors."""

    @staticmethod
    def open(path: str | bytes | PathLike[str] | PathLike[bytes]) -> ForeignFile: ...
    def copy(self, position: int, writer: Writer, name: str, index: Any) -> None:
        """Copy the bytes from `position` on to the selection of `index` in a tensor."""

    def agrees(self, position: int, checkpoint: Checkpoint, name: str, begin: int, nbytes: int) -> bool:
        """Return whether the bytes from `position` on equal the tensor's bytes from `begin` on."""

@final
class Appender:
    @staticmethod
    def create(
        path: str | bytes | PathLike[str] | PathLike[bytes],
        reserve: int,
        metadata: Mapping[str, str] | None,
        *,
        durable: bool = True,
        overwrite: bool = False,
        replace_read_only: bool = False,
    ) -> Appender: ...
    def append(self, name: str, tensor: Any, payload: Callable[[str, Any], Any]) -> None: ...
    def commit(self) -> None: ...
    def close(self) -> None: ...
    def disown(self) -> None:
        """As for `Writer`."""
