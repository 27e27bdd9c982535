"""The types of arguments, for annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from ._base.layouts import Rule, Rules
from ._native import TensorInfo

if TYPE_CHECKING:
    from datetime import datetime

__all__ = [
    "Algorithm",
    "Align",
    "Backend",
    "CastOptions",
    "CheckOptions",
    "Checksum",
    "Checksums",
    "CopyOptions",
    "Device",
    "Dtype",
    "DtypeName",
    "EditOptions",
    "FillOptions",
    "Format",
    "Framework",
    "Glob",
    "HeaderOptions",
    "Identity",
    "Keys",
    "LayoutOptions",
    "LoadOptions",
    "NoOptions",
    "OpenOptions",
    "Path",
    "Progress",
    "ReadOptions",
    "ReplaceOptions",
    "RewriteOptions",
    "SaveOptions",
    "SelectOptions",
    "ShardOptions",
    "Snapshot",
    "Source",
    "SourceFormat",
    "Spec",
    "StateOptions",
    "StorageOptions",
    "Tell",
    "Writable",
    "WriteOptions",
]

#: A file or a directory by its path, or a URL where the function takes one.
Path = str | bytes | PathLike[str] | PathLike[bytes]
#: Called with the bytes done and the total.
Tell = Callable[[int, int], object]
#: If True, show a progress bar. If callable, call it with ``(bytes done, bytes in all)``. False and None show
#: nothing. Anything else is a `TypeError`.
Progress = bool | Tell | None

#: A device in any form that the framework takes; for each tensor by patterns of names, or by a callable.
Device = object | Mapping[str, object] | Callable[[TensorInfo], object]


class Glob:
    """Several patterns of tensor names. `ingot.glob` returns one.

    Objects with equal patterns are equal. They can be pickled, and be keys of a dict.

    Attributes
    ----------
    patterns : tuple of str
        The names and patterns.
    """

    __slots__ = ("patterns",)

    patterns: tuple[str, ...]

    def __init__(self, *patterns: str) -> None:
        wrong = [type(one).__name__ for one in patterns if not isinstance(one, str)]
        if wrong:
            raise TypeError(f"glob() takes names and patterns as str, found {wrong[0]}")
        if not patterns:
            raise TypeError("glob() takes one name or pattern, or more: found none")
        self.patterns = patterns

    def __eq__(self, other: object) -> bool:
        return self.patterns == other.patterns if isinstance(other, Glob) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.patterns)

    def __reduce__(self) -> tuple[type[Glob], tuple[str, ...]]:
        return Glob, self.patterns

    def __repr__(self) -> str:
        shown = ", ".join(repr(one if len(one) <= 60 else one[:60] + "…") for one in self.patterns[:3])
        rest = len(self.patterns) - 3
        return f"ingot.glob({shown}{f', … {rest:,} more' if rest > 0 else ''})"


#: Which tensors: the name of one; a pattern, in which ``*`` is any text and ``?`` one character; `ingot.glob`
#: for several patterns; exact names, in the order of the result; or a callable that returns whether a tensor
#: is selected.
Keys = str | Glob | Iterable[str] | Callable[[TensorInfo], object]

#: A dtype by its code in a file or by its name.
DtypeName = Literal[
    "BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32", "F64", "C64", "F4",
    "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "bool", "u16", "i16", "u32", "i32", "u64", "i64", "f16", "bf16", "f32", "f64", "c64",
    "f6_e2m3", "f6_e3m2", "f8_e4m3", "f8_e5m2", "f8_e8m0", "f8_e4m3fnuz", "f8_e5m2fnuz",
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "half", "double",
    "float16", "bfloat16", "float32", "float64", "complex64", "float4_e2m1fn", "float4_e2m1fn_x2",
    "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "torch.float16", "torch.bfloat16", "torch.float32", "torch.float64",
    "torch.float8_e4m3fn", "torch.float8_e5m2", "torch.float8_e4m3fnuz", "torch.float8_e5m2fnuz",
]  # fmt: skip


class _HasItemsize(Protocol):
    """A dtype of torch or NumPy."""

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        ...


class _HasSize(Protocol):
    """A dtype of mlx or TensorFlow."""

    @property
    def size(self) -> int:
        """The bytes of an element."""
        ...


#: A dtype by its code in a file or by its name, in large letters or small (``"BF16"``, ``"bf16"``,
#: ``"bfloat16"``, ``"torch.bfloat16"``); or a dtype object of torch, NumPy, ml_dtypes, jax, TensorFlow, mlx
#: or paddle. At run time other spellings are accepted too, such as ``"<f4"`` and ``"BFloat16"``.
Dtype = DtypeName | type | _HasItemsize | _HasSize


class _HasDtypeAndShape(Protocol):
    """An array, a tensor, or a `TensorInfo`."""

    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> Any: ...


#: A tensor to be written: its dtype and its shape, or an object that has both.
Spec = tuple[Dtype, Sequence[int]] | _HasDtypeAndShape

#: The location of a background save's copies of its tensors. True means ``"host"``, False means no copy.
Snapshot = bool | Literal["host", "device"]
#: The format to write.
Format = Literal["safetensors", "bintensors"]
#: The alignment of the data section in a file, in bytes.
Align = Literal[8, 64, 4096]
#: A digest in a file: of each tensor, or ModelSpec's digest of the whole data section.
Checksum = Literal["blake3", "sha256", "xxh3", "xxh3_128", "modelspec"]
#: The digests to record in a file: one or several. True means ``"blake3"``; False and None mean no digest.
Checksums = bool | Checksum | Sequence[Checksum] | None


#: How a file is read, as for `ingot.safe_open`.
Backend = Literal["auto", "mmap", "pread"]
_OwnFormat = Literal["safetensors", "bintensors", "sharded"]
_ModelFormat = Literal[
    "torch", "distcp", "keras", "flax", "onnx", "savedmodel", "tensorflow", "paddle", "gguf"
]
_ArrayFormat = Literal["npz", "npy", "hdf5", "pickle", "arrow", "parquet"]
#: A format that `ingot.convert` reads.
SourceFormat = Literal[_OwnFormat, _ModelFormat, _ArrayFormat]
#: The name of a framework, as for `ingot.safe_open`.
Framework = Literal[
    "numpy", "np", "torch", "pt", "pytorch", "flax", "jax", "tensorflow", "tf", "mlx", "paddle"
]
_OwnHash = Literal[
    "sha256",
    "blake3",
    "xxh3",
    "xxh3_128",
    "autov1",
    "autov2",
    "autov3",
    "autov3_short",
    "sshs_legacy",
    "modelspec",
    "crc32",
]
_Sha = Literal["sha1", "sha224", "sha384", "sha512", "sha3_224", "sha3_256", "sha3_384", "sha3_512"]
#: A hash of `ingot.hash`; others are names of `hashlib.new`.
Algorithm = Literal[_OwnHash, _Sha, "md5", "blake2b", "blake2s"]


class Writable(Protocol):
    """An object that `save_file` writes to instead of a file with a name.

    A binary file, `io.BytesIO`, ``sys.stdout.buffer``, a pipe, a socket's ``makefile("wb")``, a
    `gzip.GzipFile`, a member of an archive, a file of fsspec, an upload. Its ``write`` is called with the
    bytes of the file in order, at most 4 MiB at a time; at most one such piece is in memory beside the
    tensors. It is neither flushed nor closed. Its exceptions are passed on, and bytes that it has taken
    remain written.

    Options that need a file name raise `OptionError`: ``overwrite=False``, `durable`, `atomic`,
    `replace_read_only`, `snapshot`, and ``background=True``. With `checksums`, which precede the data in the
    file, the tensors are read twice, and must not change in between. A text file raises `TypeError`.
    """

    def write(self, data: Any, /) -> object:
        """Take the bytes of a bytes or memoryview.

        Returns
        -------
        int, None or other
            The number of bytes written, as for raw files: ``write`` is called again for the rest, and
            `StorageError` is raised if the number is 0 or too large. A result that is not an int means all
            bytes; None from an `io.RawIOBase` means that it is full and does not block, and raises
            `BlockingIOError`.
        """


class Buffer(Protocol):
    """An object with the buffer protocol: `bytearray`, `memoryview`, `mmap.mmap`, an array. Not `bytes`."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class BinaryFile(Protocol):
    """A file that is open for reading bytes: `open(path, "rb")`, `io.BytesIO`, a member of a zip."""

    def read(self, size: int, /) -> Any: ...
    def seek(self, position: int, whence: int = ..., /) -> Any: ...
    def tell(self) -> int: ...


class FsspecFile(Protocol):
    """A file of fsspec: the result of ``fsspec.open`` or of the ``open`` of a file system."""

    @property
    def fs(self) -> Any: ...
    @property
    def path(self) -> str: ...


class StoreFile(Protocol):
    """A file in a store of obstore, fsspec or the caller: `ingot.Ranges`."""

    @property
    def store(self) -> Any: ...
    @property
    def path(self) -> str: ...
    @property
    def nbytes(self) -> int | None: ...


#: Everything that can be read from: a path, a URL, a directory (also of torch.distributed.checkpoint), an
#: index, or an object that holds one file.
Source = Path | Buffer | BinaryFile | FsspecFile | StoreFile


class NoOptions(TypedDict):
    """The options of functions that have only parameters of their own."""


class HeaderOptions(TypedDict, total=False):
    """How a header is read: the part of `ReadOptions` for functions that read no tensor."""

    storage_options: StorageOptions | None
    max_header_size: int | None


class LayoutOptions(TypedDict, total=False):
    """The layout in which tensors are read.

    Attributes
    ----------
    dequantize : bool or ingot.typing.Dtype
        Dequantise quantised weights while they are read (docs/guides/dequantising.md). The tensors have the
        names and shapes that the model had before, such as ``x.weight``, and scales, zero points and other
        parts of quantised weights are left out. Values are computed in float32 and rounded once: to the dtype
        of the model in the ``config.json`` beside it, or else to BF16; or to the dtype that is passed here:
        F16, BF16, F32 or F64. Tensors that are not quantised are unchanged. Not together with `verify` and
        `expected_sha256`. The tensors are never views of a mapped file.
    remap : list of rules of `ingot.remap`, or ingot.remap.Rules, optional
        Rename, stack, join, split, permute or convert tensors while they are read. All other options see the
        new names. The tensors are never views of a mapped file.
    """

    dequantize: bool | Dtype
    remap: Rules | Iterable[Rule] | None


class OpenOptions(HeaderOptions, LayoutOptions, total=False):
    """How `ingot.open` and `ingot.safe_open` open a source.

    Attributes
    ----------
    strict : bool
        Reject headers that are valid but not in the form that writers should use (FORMAT.md, "Lenient and
        strict").
    lenient : bool
        Open a broken file with its sound tensors, as `ingot.repair` does; `safe_open.unsound` has the others.
        For a sharded checkpoint, `safe_open.keys` lists the tensors of the index, and `safe_open.offset_keys`
        the sound ones.
    confine : bool
        Reject symbolic links below the directory of the source, and files with a second name (hard links).
        By default links are followed, because the cache of the Hub consists of links. An index that names
        files outside of its directory is always rejected. Without effect on URLs and objects.
    """

    backend: Backend
    strict: bool
    lenient: bool
    confine: bool


class ReadOptions(TypedDict, total=False):
    """How a source is read.

    Attributes
    ----------
    backend : {"auto", "mmap", "pread"}
        As for `ingot.safe_open`.
    threads : int, optional
        The number of threads that read at once. By default ``INGOT_THREADS`` in the environment, else one for
        each core; eight if the file is not in the page cache, and 64 over a network, since waiting threads
        need no core.
    progress : bool, None or callable
        If True, show a bar: tqdm's if it is installed, else a line on standard error. A callable is called
        with ``(bytes done, bytes in all)`` about twenty times a second and at the end, and may raise to stop
        the load. Views of a mapped file count as done at once, or after they were moved to a device.
    storage_options : dict, optional
        How a URL is reached (`ingot.StorageOptions`).
    max_header_size : int, optional
        Reject longer headers, in bytes. 100,000,000 by default, as upstream; 25,000,000 for URLs.
    """

    backend: Backend
    threads: int | None
    progress: Progress
    storage_options: StorageOptions | None
    max_header_size: int | None


class SelectOptions(TypedDict, total=False):
    """Which tensors are loaded, which part of each, and with which dtype.

    Attributes
    ----------
    keys : str, ingot.typing.Glob, iterable of str or callable, optional
        Only these tensors, all by default. A str is the name of a tensor, or else a pattern: ``*`` is any
        text and ``?`` one character; brackets are literal. `ingot.glob` takes several patterns. Any other
        iterable has exact names, and the result has their order. A callable is called with the `TensorInfo`
        of each tensor, and returns whether to load it. Each name and pattern must match a tensor. An alias
        has the `TensorInfo` of its tensor, under its own name.
    drop : str, ingot.typing.Glob, iterable of str or callable, optional
        None of these tensors, as for `keys`. They are not read.
    slices : dict of str to index, optional
        For some of these tensors, the part to read: an index as in ``tensor[...]``, as for
        `ingot.safe_open.get_slice`. A list may contain a `range` among its ints, which stands for all its
        numbers: ``[range(0, 4), range(8, 12)]`` selects eight rows. Row slices read exactly the selected
        bytes. Column slices of a file read at most twice as many if a row of the tensor has 2 KiB or more.
        From a URL, gaps of up to 128 KiB are read too, which is faster than another request.
    dtype : ingot.typing.Dtype, optional
        Convert floating-point tensors to this dtype while they are read, chunk by chunk: ``"BF16"``,
        ``"bfloat16"``, or the framework's own dtype. The values equal PyTorch's ``tensor.to(dtype)``, and
        the tensors in the dtype of the file are never in memory. F8_E8M0 is converted too. Integers, bools
        and complex numbers are unchanged. A tensor of the packed dtypes F4 and F6 is an error.
    """

    keys: Keys | None
    drop: Keys | None
    slices: Mapping[str, Any] | None
    dtype: Dtype | None


class CheckOptions(TypedDict, total=False):
    """The comparison with digests while a source is read.

    Attributes
    ----------
    verify : bool
        Compare the tensors with their digests in the file (`ingot.verify`) or, if there are none, with
        ModelSpec's digest, and return nothing if one differs. With any backend, the tensors are then copies
        in their own memory, which are compared while they are read. With `slices` or `dtype`, the whole
        tensors are read and compared before they are sliced or converted, which takes memory for them besides
        the result. Existing tensors (``out``, ``load_into``) are filled while they are compared: after an
        `IntegrityError` their content is unspecified.
    expected_sha256 : str, optional
        The expected SHA-256 of the whole file, which is then read whole and compared in the same way.
    """

    verify: bool
    expected_sha256: str | None


class FillOptions(ReadOptions, CheckOptions, LayoutOptions, total=False):
    """How a file is loaded into a model or a dict: `LoadOptions` without `slices`."""

    keys: Keys | None
    drop: Keys | None
    dtype: Dtype | None


class LoadOptions(ReadOptions, SelectOptions, CheckOptions, LayoutOptions, total=False):
    """How a file is loaded: the options of every `load_file` besides those of its framework."""


class StateOptions(ReadOptions, CheckOptions, total=False):
    """How a training state is loaded.

    With `keys` and `drop` the result has only the selected tensors and the containers around them. Without a
    `backend`, tensors are read into memory of their own.
    """

    keys: Keys | None
    drop: Keys | None


class WriteOptions(TypedDict, total=False):
    """The rarely needed options of writing: the value of `write_options`.

    A function raises `OptionError` for a key that it does not take.

    Attributes
    ----------
    align : {8, 64, 4096}
        Start the data at a multiple of this many bytes. The header ends with spaces, which every reader skips
        (FORMAT.md, "Room for later edits, and alignment"). Not for bintensors.
    reserve_header : int
        Add this many bytes of such spaces, so that `ingot.update_metadata` can change the header in place.
        Not for bintensors.
    replace_read_only : bool
        Replace a read-only file too.
    snapshot : bool, "host" or "device"
        With ``background=True``: copy the tensors before the call returns, so that they may change during the
        save. True and ``"host"`` copy them to host memory. ``"device"`` copies torch tensors on their own
        device, which is faster and takes as much device memory until they are written. False copies nothing:
        the tensors must not change until ``future.staged`` is done. The saved values are those after the work
        that is queued on the current stream.
    """

    align: Align
    reserve_header: int
    replace_read_only: bool
    snapshot: Snapshot


class EditOptions(TypedDict, total=False):
    """The options of `SaveOptions` for functions that change an existing file."""

    durable: bool | None
    progress: Progress


class ReplaceOptions(TypedDict, total=False):
    """The options of `SaveOptions` for all functions that write a new file."""

    overwrite: bool
    durable: bool | None
    write_options: WriteOptions | None


class CopyOptions(ReplaceOptions, total=False):
    """The options of `SaveOptions` for functions that copy tensors of other files."""

    progress: Progress
    checksums: Checksums


class RewriteOptions(HeaderOptions, CopyOptions, total=False):
    """How tensors of other files are copied into new files."""


class CastOptions(ReadOptions, ReplaceOptions, total=False):
    """How tensors of a file are read, converted and written to a new file."""


class SaveOptions(CopyOptions, total=False):
    """How a file is written: the options of every `save_file`, except `metadata` and `background`.

    Attributes
    ----------
    format : {"safetensors", "bintensors"}, optional
        The format to write. By default bintensors if the file name ends with ``.bt``, else safetensors.
    overwrite : bool
        Replace an existing file. If False, `FileExistsError` is raised for an existing file, even if another
        process creates it during the save.
    atomic : bool
        Write a temporary file in the same directory and rename it, so that readers see the whole old file or
        the whole new one. If False, overwrite the existing file in place: a process that has mapped the old
        file, such as one that loaded it, then crashes with SIGBUS if the new file is shorter, and otherwise
        sees mixed data.
    durable : bool, optional
        Flush the file and its directory to the disk before returning. True by default, unless the environment
        has ``INGOT_DURABLE=0``.
    progress : bool, None or callable
        If True, show a bar: tqdm's if it is installed, else a line on standard error. If callable, call it
        with ``(bytes done, bytes in all)`` about twenty times a second and at the end. It may raise to stop
        the call; an existing file then stays.
    checksums : bool, str or sequence of str, optional
        Digests to record in the metadata, for `ingot.verify` and ``load_file(verify=True)``: of each tensor
        with ``"blake3"`` (also True), ``"sha256"``, ``"xxh3"`` or ``"xxh3_128"``; of the data section as
        ModelSpec defines it with ``"modelspec"``; or one of the former and ``"modelspec"``. They are computed
        while the bytes are written. Digests in `metadata` are removed, since they describe another file. By
        default none; functions that copy tensors of other files copy their digests by default.
    write_options : dict, optional
        Rarely needed options: `ingot.WriteOptions`.
    """

    format: Format | None
    atomic: bool
    storage_options: StorageOptions | None


class ShardOptions(TypedDict, total=False):
    """How tensors are distributed over several files.

    Attributes
    ----------
    max_shard_size : int or str
        The bytes of tensors that a file may hold: a number, or a number with ``KB``, ``MB``, ``GB`` or
        ``TB``, which are powers of 1000. A larger tensor gets a file of its own.
    filename_pattern : str
        The names of the files, with ``{suffix}`` in place of ``-00001-of-00003``. A single file has no suffix
        and no index. The index has ``.index.json`` after the name without suffix. A pattern that ends with
        ``.bt`` writes bintensors files, which other programs do not find.
    """

    max_shard_size: int | str
    filename_pattern: str


class Identity(TypedDict, total=False):
    """The result of the callable in ``storage_options={"credentials": …}``.

    A dict of these keys, or an object with them as attributes: keys for S3, a token for every other store.
    The providers of obstore return such a dict.
    """

    #: Keys of S3, or HMAC keys of Google's store. Requests are signed with them.
    access_key_id: str
    secret_access_key: str
    #: The session of temporary keys. `token` has the same meaning if there are keys.
    session_token: str | None
    #: Sent as ``Authorization: Bearer …``.
    token: str | None
    #: When it expires: a datetime with a time zone, or seconds since 1970. The callable is called again five
    #: minutes before. Without it, the answer is used for an hour.
    expires_at: datetime | float | None
    #: The region and the endpoint of S3, unless `storage_options` names them.
    region: str | None
    endpoint: str | None


class StorageOptions(TypedDict, total=False):
    """The keys of `storage_options`, all optional.

    Errors show no value of it. Tokens, headers and keys are sent only to the host in the URL, also after
    redirects. A line end at the end of a value, as in files, is removed; any other control character in it
    raises `OptionError`.
    """

    #: Sent as ``Authorization: Bearer …``; with an `access_key_id` of S3, its `session_token`. By default,
    #: and with True, the token in the environment for the kind of URL (docs/guides/credentials.md). False:
    #: none.
    token: str | bool | None
    #: A callable without arguments that returns keys or a token (`Identity`), for every kind of URL. It is
    #: called on a thread of its own: before the first request, again before the identity expires, after a
    #: store rejected it as expired or unknown, and in a child after a fork. A handle can only be pickled if
    #: its callable can. No other identity may be set besides it.
    credentials: Callable[[], Identity | object]
    #: Headers to send besides.
    headers: dict[str, str]
    #: Seconds to connect, also through a proxy; 10 by default.
    connect_timeout: float
    #: Seconds after which a request fails if the server sends nothing, or less than `min_rate`; 30 by
    #: default.
    stall_timeout: float
    #: Seconds for one request of up to 8 MiB, including retries; 600 by default. Each MiB that arrives
    #: renews it.
    timeout: float
    #: Bytes per second, 1,024 by default.
    min_rate: int
    #: How often a request is repeated after a temporary failure; 4 times by default.
    retries: int
    #: Certificates in PEM to trust instead of the system's, for servers and for proxies of ``https:``.
    ca_file: str | PathLike[str]
    #: A directory on this machine for a cache of blocks of 8 MiB, which the processes of one user share;
    #: ``INGOT_CACHE`` by default. False: no cache.
    cache_dir: str | PathLike[str] | Literal[False]
    #: The most bytes of the cache, as an int or as ``"500GB"``; ``INGOT_CACHE_SIZE``, or no limit by default.
    #: The least recently used blocks are removed.
    cache_size: int | str
    #: Send no request for files, and read only from the cache; ``INGOT_OFFLINE`` by default.
    offline: bool
    #: Follow redirects to other hosts and ports outside of the public internet too: on this machine, in
    #: private networks, the services of a cloud. False by default.
    allow_private_redirects: bool
    #: The URL of the service: S3 (by default the endpoint of `credentials` or of the profile,
    #: ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``), the Hub (``HF_ENDPOINT``), Google
    #: (``STORAGE_EMULATOR_HOST``) or Azure (``AZURE_STORAGE_ENDPOINT``).
    endpoint: str
    #: The region of the bucket; ``AWS_REGION``, ``AWS_DEFAULT_REGION``, the profile's or ``us-east-1``.
    region: str
    #: Whether the bucket is in the path of the URL, as MinIO requires, or in the host. In the path by
    #: default if there is an endpoint.
    path_style: bool
    #: Send no credentials, even if the environment has some.
    anonymous: bool
    #: The keys of S3, or HMAC keys of Google's store.
    access_key_id: str
    secret_access_key: str
    session_token: str
    #: The profile of ``~/.aws/config`` and ``~/.aws/credentials`` to use instead of the environment's
    #: keys; ``AWS_PROFILE`` by default. botocore reads it (extra ``s3``).
    profile: str
    #: Pay for requests, as requester-pays buckets of S3 require; ``AWS_REQUEST_PAYER`` by default.
    request_payer: bool
    #: A JSON file of credentials of Google: of a service account, a person, an external account. google-auth
    #: reads it (extra ``gcs``).
    credentials_file: str | PathLike[str]
    #: The account of Azure (``AZURE_STORAGE_ACCOUNT_NAME``), and its key, a signed query, or a connection
    #: string with all of these.
    account: str
    account_key: str
    sas_token: str
    connection_string: str
    #: The application of Azure that reads, with its directory and its secret; `client_id` alone names a
    #: managed identity. azure-identity requests its token (extra ``azure``).
    client_id: str
    tenant_id: str
    client_secret: str


def __dir__() -> list[str]:
    return __all__
