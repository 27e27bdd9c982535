"""The contents of a model according to its headers: of one file or of many, local or remote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

from ingot import _native
from ingot._base.checks import is_path
from ingot._base.options import Loading, checked, takes
from ingot._base.report import Report
from ingot._base.text import plural
from ingot._base.waits import settled
from ingot._native import Checkpoint, ShardIndex, TensorInfo, hub_headers, is_url
from ingot.typing import HeaderOptions, Source

from . import parameters as _parameters
from .config import Config, config_beside, parsed
from .door import open_checkpoint, resolved
from .parameters import Counter

if TYPE_CHECKING:
    from ingot._native import _FileHeader as FileHeader


@dataclass(slots=True, repr=False)
class FileMetadata(Report):
    """The header of one file.

    Examples
    --------
    >>> model = ingot.inspect("model.safetensors")
    >>> file = model.files_metadata["model.safetensors"]
    >>> file.metadata, file.parameter_count, file.tensors["wte"].shape
    ({'format': 'pt'}, {'F32': 64}, (8, 4))
    """

    #: The metadata. Empty if the file has none.
    metadata: dict[str, str]
    #: By name, in the order of their data.
    tensors: dict[str, TensorInfo] = field(repr=False)
    #: By dtype.
    parameter_count: dict[str, int]


@dataclass(repr=False)
class RepoMetadata(Report):
    """The headers of a model, in one file or in many. `ingot.inspect` returns it.

    Examples
    --------
    >>> model = ingot.inspect("model.safetensors")
    >>> model.sharded, model.parameter_total, model.weight_map["wte"]
    (False, 64, 'model.safetensors')
    """

    #: The metadata of the file, or of the index, whose values may be any JSON. None if there is none.
    metadata: dict[str, Any] | None = field(repr=False)
    #: Whether the model has an index.
    sharded: bool
    #: The name of the file of each tensor.
    weight_map: dict[str, str] = field(repr=False)
    #: The headers by file name in the index. A single file has its own name.
    files_metadata: dict[str, FileMetadata] = field(repr=False)
    #: The number of parameters by dtype, over all files.
    parameter_count: dict[str, int]
    #: Over all dtypes: the count, or the ``total_parameters`` of the metadata if that is lower.
    parameter_total: int

    @classmethod
    def _counting_later(
        cls, metadata: dict[str, Any] | None, sharded: bool, count: Callable[[], _Counted]
    ) -> RepoMetadata:
        """Return an object that counts when another attribute than these two is first read.

        Programs read only the metadata of many files.
        """
        later = object.__new__(cls)
        later.__dict__.update(metadata=metadata, sharded=sharded, _count=count)
        return later

    def __getattr__(self, name: str) -> Any:
        count = self.__dict__.get("_count")
        if name in _Counted._fields and count is not None:
            self.__dict__.update(count()._asdict())
            self.__dict__.pop("_count", None)
        # Another thread may have counted.
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"RepoMetadata has no attribute {name!r}", name=name, obj=self) from None

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: a folded tree of the tensors with dtype, shape and parameters."""
        # Imported here: it is for notebooks.
        from ingot._base.html import page, tree

        tensors = {name: info for file in self.files_metadata.values() for name, info in file.tensors.items()}
        rows = ((name, tensors[name]) for name in _native.in_natural_order([*tensors]))
        total = plural(self.parameter_total, "parameter")
        facts = [plural(len(self.files_metadata), "file"), plural(len(tensors), "tensor"), total]
        facts += (f"{dtype}: {count:,}" for dtype, count in self.parameter_count.items())
        shown = ((name, (info.dtype, info.shape, f"{info.parameter_count:,}")) for name, info in rows)
        return page("ingot.RepoMetadata", facts, tree(shown))


class _Counted(NamedTuple):
    """The attributes of `RepoMetadata` besides `metadata` and `sharded`."""

    weight_map: dict[str, str]
    files_metadata: dict[str, FileMetadata]
    parameter_count: dict[str, int]
    parameter_total: int


@takes(HeaderOptions)
def inspect(
    source: Source,
    *,
    count: Literal["logical", "stored"] = "logical",
    config: Mapping[str, Any] | None = None,
    shards: bool = True,
    **options: Unpack[HeaderOptions],
) -> RepoMetadata:
    """Return the metadata, the tensors and the parameters of a model. Only headers are read.

    Parameters
    ----------
    source : ingot.typing.Source
        A file, a directory, an index, a repository of the Hub (``hf://owner/repo``), another URL or an
        object, as for `ingot.open`.
    count : {"logical", "stored"}
        How parameters are counted. ``"logical"`` counts the parameters before quantisation, as huggingface.js
        2.17.5 does for the sizes on the Hub. An element into which a quantised model packs several parameters
        counts as several. Scales, zero points, scalars and tensors of ``F8_E8M0`` do not count. ``"stored"``
        counts the elements in the files, a scalar as one, as huggingface_hub does.
    config : mapping, optional
        The content of ``config.json``, which describes the quantisation. By default it is read if it is
        beside a path or a URL; ``{}`` is an empty configuration. Has no effect with ``"stored"``.
    shards : bool
        False reads the index of a sharded checkpoint and no shard, so that these need not exist yet. Only
        `metadata`, `sharded` and `weight_map` of the result are set then. Without effect on a single file.
    **options
        How the headers are read: `ingot.typing.HeaderOptions`.

    Returns
    -------
    RepoMetadata
        The dataclasses `RepoMetadata` and `FileMetadata` have the fields of huggingface_hub's dataclasses,
        and the same values with ``count="stored"``, except that `RepoMetadata.metadata` of a single file is
        the metadata of the file; ``parameter_total`` is added. Each `TensorInfo` equals the result of
        `ingot.safe_open.info`, except for the number of parameters, which is 0 for a tensor without
        parameters. The counts of all tensors add up to the count of the file, and the counts of all files to
        the count of the model.

    Raises
    ------
    OSError, HeaderError, CheckpointError, StorageError
        As `ingot.open` does.
    CheckpointError
        ``config.json`` is not a JSON object, or has more than 10 MB; a `StorageError` if it is remote.
    OptionError
        `count` is not one of the choices.
    TypeError
        `source` cannot be read from, or `config` is not a mapping.

    Notes
    -----
    The Hub has one document with the headers of all shards of an index, for the main branch of models.
    `inspect` requests only this document and, for a repository without a file name, whether it has a
    ``model.safetensors``. If there is no such document, or if it breaks a rule of FORMAT.md, the header of
    each file is requested.

    Examples
    --------
    >>> ingot.inspect("model.safetensors").metadata
    {'format': 'pt'}
    """
    how = Loading.among(checked(inspect, locals()))
    return _inspected(source, count, config, shards, how, None)


@takes(HeaderOptions)
async def inspect_async(
    source: Source,
    *,
    count: Literal["logical", "stored"] = "logical",
    config: Mapping[str, Any] | None = None,
    shards: bool = True,
    **options: Unpack[HeaderOptions],
) -> RepoMetadata:
    """Do the work of `inspect` in a thread, while the event loop runs.

    A cancelled task does not wait for the thread, whose requests end within a tenth of a second.

    Parameters
    ----------
    source, count, config, shards
        As for `inspect`.
    **options
        How the headers are read: `ingot.typing.HeaderOptions`.

    Returns
    -------
    RepoMetadata
        As for `inspect`.

    Raises
    ------
    OSError, HeaderError, CheckpointError, StorageError, OptionError, TypeError
        As for `inspect`.

    Examples
    --------
    >>> import asyncio
    >>> asyncio.run(ingot.inspect_async("model.safetensors")).parameter_total
    64
    """
    stop, how = Event(), Loading.among(checked(inspect_async, locals()))
    from asyncio import to_thread

    try:
        return await to_thread(_inspected, source, count, config, shards, how, stop)
    finally:
        stop.set()


def _inspected(
    source: Source, count: str, config: Config | None, shards: bool, how: Loading, stop: Event | None
) -> RepoMetadata:
    remote = _Remote(source, how, stop or Event()) if isinstance(source, str) and is_url(source) else None
    if not shards:
        index = _index(source) if remote is None else remote.index()
        if index is not None:
            weight_map = index.weight_map
            return RepoMetadata._counting_later(
                index.metadata(), True, lambda: _Counted(weight_map(), {}, {}, 0)
            )
    wants_config = count == "logical" and config is None
    if remote is not None:
        headers, found = remote.headers_and_config() if wants_config else (remote.headers(), None)
    else:
        headers, path = _local(source, how)
        found = parsed(config_beside(path)) if wants_config and path else None
    config = found if config is None else config
    count_later = partial(_counted, headers, count, config)
    return RepoMetadata._counting_later(headers.metadata, headers.is_sharded, count_later)


class _Headers(NamedTuple):
    """The headers of all files. Those of a single file are read from `files` on first use."""

    is_sharded: bool
    #: The metadata of the file or of the index.
    metadata: dict[str, Any] | None
    files: Callable[[], list[FileHeader]]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Headers:
        files = checkpoint.headers()
        return cls(checkpoint.is_sharded, checkpoint.metadata(), lambda: files)


def _counted(headers: _Headers, count: str, config: Mapping[str, Any] | None) -> _Counted:
    read = headers.files()
    counter: Counter = _parameters.stored
    declared = None
    if count == "logical":
        counter = _parameters.logical(config, lambda: [info.name for file in read for info in file[2]])
        declared = _parameters.declared(headers.metadata)
    files: dict[str, FileMetadata] = {}
    weight_map: dict[str, str] = {}
    counts: dict[str, int] = {}
    for name, text, infos in read:
        tensors: dict[str, TensorInfo] = {}
        of_file: dict[str, int] = {}
        for info in infos:
            dtype, parameters = info.dtype, counter(info)
            if parameters is not None:
                of_file[dtype] = of_file.get(dtype, 0) + parameters
            tensors[info.name] = _counting(info, parameters or 0)
        files[name] = FileMetadata(text or {}, tensors, of_file)
        weight_map.update(dict.fromkeys(tensors, name))
        for dtype, parameters in of_file.items():
            counts[dtype] = counts.get(dtype, 0) + parameters
    total = sum(counts.values())
    if declared is not None:
        total = min(total, declared)
    return _Counted(weight_map, files, counts, total)


def _counting(info: TensorInfo, parameters: int) -> TensorInfo:
    """Return `info` with this number of parameters."""
    if parameters == info.parameter_count:
        return info
    return TensorInfo(info.name, info.dtype, info.shape, info.begin, info.end, parameters)


def _local(source: Source, how: Loading) -> tuple[_Headers, str]:
    """Return the headers, and the path of the file or the index, empty for an object."""
    checkpoint = open_checkpoint(source, how._replace(backend="pread"), lent=True)
    if checkpoint.backend == "pread" and not checkpoint.is_sharded:
        # The file may be reopened, so it uses no descriptor until its tensors are counted.
        return _Headers(False, checkpoint.metadata(), checkpoint.headers), checkpoint.path or ""
    try:
        return _Headers.of(checkpoint), checkpoint.path if checkpoint.is_sharded and checkpoint.path else ""
    finally:
        checkpoint.close()


def _index(source: Source) -> ShardIndex | None:
    """Return the index of a sharded checkpoint. None if `source` is a single file."""
    found = resolved(source)
    return ShardIndex.read(found) if is_path(found) else None


class _Remote:
    """A remote model."""

    def __init__(self, url: str, how: Loading, stop: Event) -> None:
        self._url = url
        self._options = how.storage_options
        self._max_header_size = how.max_header_size
        self._stop = stop

    def headers_and_config(self) -> tuple[_Headers, Config | None]:
        """Request both at once, since either takes as long as the other."""
        with ThreadPoolExecutor(1, "ingot-config") as threads:
            config = threads.submit(self._config)
            try:
                return self.headers(), settled(config).result()
            except BaseException:
                # The result of the other request is not used any more.
                self._stop.set()
                raise

    def headers(self) -> _Headers:
        asked = hub_headers(self._url, self._options, self._max_header_size, progress=self._tell)
        if asked is not None:
            metadata, files = asked
            return _Headers(True, metadata, lambda: files)
        with closing(self._opened()) as checkpoint:
            headers = _Headers.of(checkpoint)
        if headers.is_sharded:
            return headers
        # A repository is opened as a file, and the query of a URL is not part of its name.
        [(_, text, tensors)], name = headers.files(), _native.url_file_name(self._url)
        return headers._replace(files=lambda: [(name, text, tensors)])

    def index(self) -> ShardIndex | None:
        """Return the index of a sharded checkpoint. None for a single file."""
        with closing(self._opened()) as checkpoint:
            return checkpoint.index()

    def _opened(self) -> Checkpoint:
        options, most = self._options, self._max_header_size
        return Checkpoint.open_url(self._url, options, "accept", most, progress=self._tell)

    def _config(self) -> Config | None:
        return parsed(config_beside(self._url, self._options, self._tell))

    def _tell(self, done: int, total: int) -> None:
        """Stop a request whose result is not used any more. Called ten times a second during the request."""
        if self._stop.is_set():
            raise CancelledError
