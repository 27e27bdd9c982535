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
    "MODEL_SPEC_KEY",
    "RECORD_KEYS",
    "SHARED_KEY",
    "STALE_KEYS",
    "Appender",
    "Aside",
    "Buffer",
    "Checkpoint",
    "Destinations",
    "Distance",
    "Export",
    "ForeignFile",
    "Gpu",
    "NewFile",
    "ShardIndex",
    "Sources",
    "Statistics",
    "Stream",
    "TensorInfo",
    "Wrap",
    "Writer",
    "__version__",
    "blob_digest",
    "check_destination",
    "check_storage_options",
    "distances",
    "download",
    "fetch_beside",
    "hash",
    "hash_object",
    "hashes",
    "hub_headers",
    "identity",
    "in_natural_order",
    "is_url",
    "local_path",
    "planned_download",
    "prepare",
    "read_url",
    "release_pinned",
    "replace_file",
    "replace_tensor",
    "serialize",
    "shown_url",
    "statistics",
    "stream",
    "update_metadata",
    "url_file_name",
    "why_pageable",
]

__version__: str
CHECKSUMS_KEY: str
MODEL_SPEC_KEY: str
RECORD_KEYS: list[str]
SHARED_KEY: str
STALE_KEYS: list[str]

@final
class Buffer:
    """Memory with tensors in it, for `Wrap.buffer`. Of the buffer protocol, and writable."""

    def __len__(self) -> int: ...

@final
class Stream:
    def next(self, wrap: Wrap) -> tuple[str, Any] | None: ...
    def take(self, name: str, wrap: Wrap) -> Any | None: ...
    def close(self) -> None: ...

@final
class Statistics:
    """What the values of one tensor are. Those that are not finite only count as such."""

    @property
    def count(self) -> int:
        """Elements; for C64 their real and imaginary parts."""

    @property
    def zeros(self) -> int: ...
    @property
    def nans(self) -> int: ...
    @property
    def infinities(self) -> int: ...
    @property
    def malformed(self) -> int:
        """Elements of BOOL that are neither 0 nor 1."""

    @property
    def min(self) -> int | float | None:
        """An int for an integer dtype. None, as all below, where no value is finite."""

    @property
    def max(self) -> int | float | None: ...
    @property
    def mean(self) -> float | None: ...
    @property
    def std(self) -> float | None: ...
    @property
    def bins(self) -> list[int]:
        """How many values lie in each of the equal parts of the range."""

def statistics(
    checkpoint: Checkpoint,
    names: Iterable[str] | None = None,
    *,
    bins: int = 0,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[Statistics | None]:
    """Say what the values of tensors are; None for those of 6 bits, whose packing is not settled."""

@final
class Distance:
    """How far apart two tensors are whose values are not all equal; a NaN equals every other.

    None in every field where there is nothing to compare: the shapes are not the same, or bytes differ whose
    values are not known, as those of 6 bits.
    """

    @property
    def different(self) -> int | None:
        """Values that are not equal: elements; for C64 their real and imaginary parts."""

    @property
    def max_abs(self) -> int | float | None:
        """The greatest absolute difference. An int, and exact, where both dtypes are of integers."""

    @property
    def relative_l2(self) -> float | None:
        """The norm of the difference over that of the first tensor; None where that is zero.

        As below, pairs of NaN and of equal infinities count for nothing, and others that are not finite make
        it NaN.
        """

    @property
    def cosine(self) -> float | None:
        """Of the angle between the two; None where one is zero."""

def distances(
    one: Checkpoint,
    two: Checkpoint,
    names: Sequence[str],
    *,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[Distance | None]:
    """Say how far apart the tensors of these names are in two files; None where all values are equal."""

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

    ``current()`` gives the number of the device among the visible ones, the caller's current stream, and the
    handle of that. ``allocate(stream, wanted)`` is given codes of dtypes, each with a shape in what the
    framework stores, and gives for each a tensor for use on that stream, with a DLPack capsule of its memory.
    ``stream(ordinal)`` returns the caller's current stream on a device, and its handle: a prefetch keeps its
    device when another one becomes the current one. Without it, that is the stream which was current when the
    prefetch began. `driver` is a library that does as the driver does, for tests.
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
    """Have pinned memory that no copy uses given back now, by a thread; else that is when it is idle."""

def why_pageable() -> str | None:
    """Give why memory that GPUs are reached through is not pinned; None where it is."""

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

    `memory(name, tensor)` gives the code of the dtype, a DLPack capsule or a writable buffer, and whether the
    buffer is of a tensor without dimensions; or None for a tensor to leave out. It is asked about those that
    `export` does not show.
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
    @property
    def path(self) -> str | None: ...
    @property
    def at(self) -> str | None:
        """The path from the root of a file or an index of this machine, as of when it was opened."""

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
    def offset_names(self) -> list[str]: ...
    def all_names(self) -> list[str]:
        """Return the names of the stored tensors in the order of their data, and then the aliases."""

    def metadata(self) -> dict[str, Any] | None:
        """Give that of the file; that of the index, of any JSON, where there is one."""

    def shard_metadata(self) -> dict[str, dict[str, str] | None]:
        """Give the metadata of each file, by what the index calls it, or by its name."""

    def shared(self) -> dict[str, tuple[str, tuple[list[int], list[int], int] | None]]:
        """Give the names that share a tensor, each with the name of that.

        For a part of it also shape, strides and first element, counted in elements of the tensor.
        """

    def shard_of(self, name: str) -> str | None:
        """Give the path of the file that the tensor is in."""

    def wrong_total(self) -> tuple[int, int] | None:
        """Give what the index says of all tensors' bytes, and how many there are, where the two differ."""

    def parameter_count(self) -> dict[str, int]: ...
    def info(self, name: str) -> TensorInfo: ...
    def infos(self, *, natural: bool = False) -> list[TensorInfo]:
        """Give those of all tensors, in the order of the data or in the natural one of their names."""

    def unsound(self) -> dict[str, HeaderError]:
        """Give the tensors that a lenient reader left out, each with what reading it raises."""

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
        """Give what `tensors` gives, if its bytes are those that digests were taken of."""

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
        """Give of each the code of its dtype and its shape, as a header would. Refuses what `wrap` does."""

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
        """Read the wanted parts. With digests, tensors have to be whole, and each be wanted once."""

    def proven_copy(
        self,
        names: Iterable[str],
        kept: bool,
        expected_sha256: str | None,
        *,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Checkpoint:
        """Return these tensors in memory, if they are what their digests say."""

    def share(self) -> Checkpoint: ...
    def shard_headers(self) -> _ShardHeaders | None: ...
    def is_replaced(self) -> bool: ...
    def identity(self) -> tuple[str, bool] | None: ...
    def close(self) -> None: ...

def in_natural_order(names: list[str]) -> list[str]:
    """Give the names as people order them: ``layer.2`` before ``layer.10``."""

def is_url(text: str) -> bool:
    """Say whether a text begins as a URL does that is asked for, of whatever scheme; ``file:`` is a path."""

def shown_url(url: str) -> str:
    """Give a URL without what may be secret in it; what is none as it is."""

def local_path(given: str | bytes | PathLike[str] | PathLike[bytes]) -> str | bytes:
    """Give a path of this machine as a str or as bytes, that of a URL of ``file:`` too; refuse other URLs.

    Every path that is written to comes through here, and so does every one that is read.
    """

def url_file_name(url: str) -> str:
    """Say what the file behind a URL is called."""

def fetch_beside(
    url: str,
    name: str,
    most: int,
    storage_options: Mapping[str, Any] | None = None,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[str, bytes]:
    """Fetch all of the file `name` in the folder of the one behind `url`, `most` bytes at most.

    Its URL comes with it, without the secrets in it.
    """

def hub_headers(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    max_header_size: int | None = None,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[dict[str, Any] | None, list[tuple[str, dict[str, str] | None, list[TensorInfo]]]] | None:
    """Ask the Hub for the metadata of an index and for `Checkpoint.headers` of its shards, with one request.

    None where the Hub gives nothing that can be used. What is wrong with the model, its files tell.
    """

def serialize(
    tensors: Mapping[str, Any],
    payload: Callable[[str, Any], Any],
    metadata: Mapping[str, str] | None,
    format: str,
    *,
    export: Export | None = None,
    shared: str = "copy",
    views: str | None = None,
) -> bytes: ...

@final
class NewFile:
    """A file that is yet to be written: header, and tensors that must stay as they are until then."""

    def snapshot(self) -> None:
        """Copy the tensors, so that they may change."""

    def write(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Write the file. `progress` is told bytes done and bytes in all."""

def prepare(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    tensors: Mapping[str, Any],
    payload: Callable[[str, Any], Any],
    metadata: Mapping[str, str] | None,
    format: str,
    *,
    export: Export | None = None,
    shared: str = "copy",
    views: str | None = None,
    reserve: int = 0,
    align: int = 8,
    durable: bool = True,
    overwrite: bool = True,
    atomic: bool = True,
    replace_read_only: bool = False,
    checksums: Sequence[str] = ...,
) -> NewFile:
    """Take over all that goes into a file. Nothing is written yet.

    `payload(name, tensor)` gives a DLPack capsule, ``(code, shape, buffer)``, ``(code, shape, fetch)``, of
    which ``fetch(begin, end)`` gives those bytes as a capsule or a buffer, or, of a tensor in C order on a
    GPU, ``(code, shape, (gpu, capsule))``: it is saved as what is queued on the caller's current stream
    leaves it. `export` comes first, with a few
    hundred tensors at once: its `places` gives the storages that they lie in, and how many elements come
    before the first of each there. Where it raises or gives None, or what DLPack shows of a tensor is of no
    use or reaches past its storage, `payload` is called. `views` is the record of names that share one of the
    tensors; what `metadata` has of this kind is left out.
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
    """Fetch what is behind a URL: path, size, bytes that were fetched, SHA-256 if that was compared.

    Then the same of each file of a model of many files, the index last; of a single file an empty list.
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
    """The files that `download` would make, with their sizes, the index last. Nothing is written."""

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
    """Return the digest that a blob of a content-addressed store has as its name, or None for other files."""

def hashes() -> list[str]: ...
def read_url(
    url: str, take: Callable[[bytes], object], storage_options: Mapping[str, Any] | None = None
) -> None:
    """Call `take` with all bytes behind a URL, a few MiB at a time, in their order."""

def replace_file(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    pieces: Sequence[AnyBuffer],
    *,
    durable: bool = True,
    overwrite: bool = False,
    replace_read_only: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write a file of any content as a save writes one of tensors. `pieces` are its bytes, in order."""

def check_destination(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    *,
    overwrite: bool = False,
    replace_read_only: bool = False,
) -> None:
    """Raise what writing to `path` would raise for the file that is there. Nothing is opened or made."""

def stream(
    write: Callable[[bytes], object],
    tensors: Mapping[str, Any],
    payload: Callable[[str, Any], Any],
    metadata: Mapping[str, str] | None,
    format: str,
    *,
    export: Export | None = None,
    shared: str = "copy",
    views: str | None = None,
    reserve: int = 0,
    align: int = 8,
    checksums: Sequence[str] = ...,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Hand the bytes of a file to `write`, a few MiB at a time. The rest as for `prepare`.

    For `checksums` the tensors are read once before, since the digests come first.
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
    """Return the setting that holds the identity of requests for `url`, and the identity; None without one.

    The identity has the fields of `ingot.typing.Identity` in their order. It is None for a signed query, a
    key of Azure, a password and a token for the Hub or a URL.
    """

def check_storage_options(given: Mapping[str, Any]) -> None:
    """Raise `OptionError` or `TypeError` for options that are unknown or have a value of the wrong kind."""

@final
class ShardIndex:
    @staticmethod
    def read(source: str | bytes | PathLike[str] | PathLike[bytes]) -> ShardIndex | None:
        """Read the index at a path or in a directory, and none of its shards. None for a single file."""

    @property
    def shards(self) -> list[str]: ...
    def weight_map(self) -> dict[str, str]: ...
    def metadata(self) -> dict[str, Any] | None: ...

@final
class Sources:
    """Files, and checkpoints of many, whose tensors go into others."""

    def __new__(cls, checkpoints: Sequence[Checkpoint], leniency: Leniency = "accept") -> Sources:
        """Take the files of open checkpoints, which are closed afterwards."""

    def __len__(self) -> int: ...
    def path(self, source: int) -> str:
        """Give the path of its index, or of its only file."""

    def findings(self, source: int) -> list[tuple[str, str | None, str, str]]:
        """Give what a lenient reader found wrong: code, tensor, what was found, and what was done."""

    def names(self, source: int) -> list[str]:
        """Give the names of the tensors of one source, in the order of the data, file after file.

        After them stand the names that share one of them.
        """

    def infos(self, source: int) -> list[TensorInfo]:
        """Return the info of the same tensors. An alias has its own name and the info of its tensor."""

    def shared(self, source: int) -> list[int]:
        """Give for each of these the number of the tensor."""

    def sizes(self, source: int) -> list[int]:
        """Give the sizes of the tensors in bytes."""

    def metadata(self, source: int) -> dict[str, dict[str, str] | None]:
        """Give the metadata of each file of a source, by its path."""

    def index_metadata(self, source: int) -> dict[str, Any] | None:
        """Give that of its index, of any JSON, where it has one."""

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
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write a file of `picks`: a source, the number of a tensor in it, the name in the new file.

        Names that share a tensor share it again. `inherit` says that digests of tensors go with them, else
        `checksums` are computed; ModelSpec's hash, where `metadata` has one, is that of the source whose data
        this is.
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
        views: str | None = None,
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
    def draft_path(self) -> str:
        """The name that the file has until the commit, in the directory that it is to be in."""

    def commit(self) -> None:
        """Rename the file to its path. Raises `FileExistsError` if a file is there and is not replaced."""

    def close(self) -> None: ...
    def disown(self) -> None:
        """In a forked child: close what belongs to its parent, whose locks would else outlive it here."""

@final
class Aside:
    """A file that others fill before it gets its name. Later saves sweep up a draft that was left behind."""

    @staticmethod
    def create(
        path: str | bytes | PathLike[str] | PathLike[bytes],
        *,
        durable: bool = True,
        overwrite: bool = False,
        replace_read_only: bool = False,
    ) -> Aside: ...
    @property
    def draft_path(self) -> str: ...
    def commit(self) -> None: ...
    def close(self) -> None: ...

@final
class ForeignFile:
    """An open file of any format, in which bytes of tensors stand as a file of tensors has them."""

    @staticmethod
    def open(path: str | bytes | PathLike[str] | PathLike[bytes]) -> ForeignFile: ...
    def copy(self, position: int, writer: Writer, name: str, index: Any) -> None:
        """Copy the bytes from `position` on to what `index` takes of a tensor."""

    def agrees(self, position: int, checkpoint: Checkpoint, name: str, begin: int, nbytes: int) -> bool:
        """Whether the bytes from `position` on are those of the tensor from its byte `begin` on."""

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
        """As that of a `Writer`."""
