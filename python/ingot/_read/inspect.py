"""What is in a model, from its headers alone: of one file or of many, on this machine or remote."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any, NamedTuple

from ingot._base.checks import one_of
from ingot._base.text import _escaped, plural
from ingot._native import (
    Checkpoint,
    TensorInfo,
    fetch_beside,
    hub_headers,
    in_natural_order,
    is_url,
    url_file_name,
)
from ingot.errors import CheckpointError

from . import parameters as _parameters

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal, TypeAlias

    from ingot.typing import Path, StorageOptions

    from .parameters import Counter

    Count: TypeAlias = Literal["logical", "stored"]
    Config: TypeAlias = Mapping[str, Any]

COUNTS = ("logical", "stored")

CONFIG = "config.json"
# Bytes of it that are read, as the Hub's own reader has it.
CONFIG_NBYTES = 10_000_000


@dataclass(slots=True)
class FileMetadata:
    """The header of one file."""

    __module__ = "ingot"

    #: The text that is stored beside the tensors. Empty where there is none.
    metadata: dict[str, str]
    #: By name, in the order of their data.
    tensors: dict[str, TensorInfo] = field(repr=False)
    #: By dtype.
    parameter_count: dict[str, int]


@dataclass(slots=True)
class RepoMetadata:
    """The headers of a model. What `describe` gives, for one file as for many."""

    __module__ = "ingot"

    #: That of the index, whose values may be any JSON. None where there is no index, or it has none.
    metadata: dict[str, Any] | None
    #: Whether there is an index.
    sharded: bool
    #: For each tensor the file that holds it.
    weight_map: dict[str, str] = field(repr=False)
    #: By what the index calls them; a single file has its own name.
    files_metadata: dict[str, FileMetadata] = field(repr=False)
    #: By dtype, over all files.
    parameter_count: dict[str, int]
    #: Over all dtypes. Where the model says ``total_parameters`` and that is less, that.
    parameter_total: int

    def _repr_html_(self) -> str:
        """What a notebook shows: the tensors as a folded tree, each with its dtype, shape and parameters."""
        # Imported here: it is for notebooks.
        from ingot._base.html import page, tree

        tensors = {name: info for file in self.files_metadata.values() for name, info in file.tensors.items()}
        rows = ((name, tensors[name]) for name in in_natural_order([*tensors]))
        facts = [
            plural(len(self.files_metadata), "file"),
            plural(len(tensors), "tensor"),
            plural(self.parameter_total, "parameter"),
            *(f"{dtype}: {count:,}" for dtype, count in self.parameter_count.items()),
        ]
        shown = ((name, (info.dtype, info.shape, f"{info.parameter_count:,}")) for name, info in rows)
        return page("ingot.RepoMetadata", facts, tree(shown))


def describe(
    source: Path,
    *,
    count: Count = "logical",
    config: Config | None = None,
    max_header_size: int | None = None,
    storage_options: StorageOptions | None = None,
) -> RepoMetadata:
    """Say what is in a model: its tensors, its metadata, its parameters. Only headers are read.

    Parameters
    ----------
    source : str, bytes or os.PathLike
        A file, a directory, an index, a repository of the Hub (``hf://owner/repo``) or another URL: whatever
        `ingot.safe_open` takes.
    count : {"logical", "stored"}
        What counts as a parameter. ``"logical"`` counts as huggingface.js 2.17.5 does, by which the Hub shows
        the size of a model: the parameters that it had before it was quantised. What a quantised model packs
        into one element counts as several; scales, zero points and the like do not count, and neither do
        scalars and tensors of ``F8_E8M0``. ``"stored"`` counts elements as they lie in the files, a scalar as
        one: what huggingface_hub counts.
    config : mapping, optional
        What ``config.json`` says, which is where it stands how a model was quantised. By default that file is
        looked for beside the model; ``{}`` stands for one that says nothing. Nothing for ``"stored"``.
    max_header_size : int, optional
        Refuse longer headers, in bytes. 100,000,000 by default; 25,000,000 for URLs.
    storage_options : dict, optional
        How a URL is reached (`ingot.StorageOptions`).

    Returns
    -------
    RepoMetadata
        The dataclasses `RepoMetadata` and `FileMetadata` have the fields of huggingface_hub's, and with
        ``count="stored"`` the same values in them; ``parameter_total`` is besides. A `TensorInfo` is what
        `ingot.safe_open.info` gives, with the parameters of the tensor as they count here: 0 for what is no
        parameter. The counts of tensors add up to those of files, and these to that of the model.

    Raises
    ------
    OSError, HeaderError, CheckpointError, StorageError
        As `ingot.safe_open` does.
    CheckpointError
        ``config.json`` is no JSON object, or has more than 10 MB; a `StorageError` where it is remote.
    OptionError
        `count` is not one of the choices.

    Notes
    -----
    The Hub gives the headers of all shards of an index in one document, for models as they are on their main
    branch. Where it does, that is the only request for headers, and one more tells that a repository which is
    named without a file has no ``model.safetensors``. Where it does not, or what it gives breaks a rule of
    FORMAT.md, each header is fetched from its file.
    """
    return _described(source, count, config, max_header_size, storage_options, Event())


async def describe_async(
    source: Path,
    *,
    count: Count = "logical",
    config: Config | None = None,
    max_header_size: int | None = None,
    storage_options: StorageOptions | None = None,
) -> RepoMetadata:
    """Do what `describe` does, in a thread, while the event loop goes on.

    A task that is cancelled does not wait for it: requests that are under way end within a tenth of a second.

    Parameters
    ----------
    source, count, config, max_header_size, storage_options
        As for `describe`.

    Returns
    -------
    RepoMetadata
        As `describe` gives it.

    Raises
    ------
    OSError, HeaderError, CheckpointError, StorageError, OptionError
        As `describe` does.
    """
    from asyncio import to_thread

    stop = Event()
    try:
        return await to_thread(_described, source, count, config, max_header_size, storage_options, stop)
    finally:
        stop.set()


def _described(
    source: Path,
    count: Count,
    config: Config | None,
    max_header_size: int | None,
    storage_options: StorageOptions | None,
    stop: Event,
) -> RepoMetadata:
    one_of("count", count, COUNTS)
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"config must be a mapping, found {type(config).__name__}")
    wants_config = count == "logical" and config is None
    if isinstance(source, str) and is_url(source):
        remote = _Remote(source, storage_options, max_header_size, stop)
        headers, found = remote.headers_and_config() if wants_config else (remote.headers(), None)
    else:
        headers, path = _local(source, max_header_size)
        found = _parsed(config_beside(path)) if wants_config else None
    if count == "stored":
        return _counted(headers, _parameters.stored, None)
    counter = _parameters.logical(found if config is None else config, headers.names)
    return _counted(headers, counter, _parameters.declared(headers.said()))


class _Headers(NamedTuple):
    """What was read."""

    is_sharded: bool
    #: That of the index.
    metadata: dict[str, Any] | None
    files: list[tuple[str, dict[str, str] | None, list[TensorInfo]]]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Headers:
        is_sharded = checkpoint.is_sharded
        return cls(is_sharded, checkpoint.metadata() if is_sharded else None, checkpoint.headers())

    def names(self) -> list[str]:
        return [tensor.name for _, _, tensors in self.files for tensor in tensors]

    def said(self) -> Mapping[str, Any] | None:
        """The metadata that speaks for all of the model."""
        return self.metadata if self.is_sharded else self.files[0][1]


def _counted(headers: _Headers, counter: Counter, declared: int | None) -> RepoMetadata:
    files: dict[str, FileMetadata] = {}
    weight_map: dict[str, str] = {}
    counts: dict[str, int] = {}
    for name, text, infos in headers.files:
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
    return RepoMetadata(headers.metadata, headers.is_sharded, weight_map, files, counts, total)


def _counting(info: TensorInfo, parameters: int) -> TensorInfo:
    """`info`, with so many parameters."""
    if parameters == info.parameter_count:
        return info
    return TensorInfo(info.name, info.dtype, info.shape, info.begin, info.end, parameters)


def _local(source: Path, max_header_size: int | None) -> tuple[_Headers, str]:
    """The headers, and the path of the file or the index."""
    checkpoint = Checkpoint.open(source, "pread", "accept", max_header_size)
    try:
        return _Headers.of(checkpoint), checkpoint.path or ""
    finally:
        checkpoint.close()


class ConfigFile(NamedTuple):
    """A ``config.json``, which may be invalid."""

    #: Its path or URL without secrets.
    path: str
    #: At most `CONFIG_NBYTES`, and one more of a larger file.
    data: bytes


def config_beside(
    path: str,
    storage_options: StorageOptions | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> ConfigFile | None:
    """Read ``config.json`` beside the model at `path`, a path or a URL. Return None if it does not exist.

    A URL is requested with `storage_options`. `progress` may raise to stop the request.
    """
    if is_url(path):
        try:
            return ConfigFile(*fetch_beside(path, CONFIG, CONFIG_NBYTES, storage_options, progress=progress))
        except (FileNotFoundError, PermissionError):
            # A store that does not let clients list a bucket answers so if the file does not exist.
            return None
    path = os.path.join(os.path.dirname(path), CONFIG)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _unusable(path, "is no regular file")
        with open(path, "rb", opener=_without_waiting) as file:
            return ConfigFile(path, file.read(CONFIG_NBYTES + 1))
    except FileNotFoundError:
        return None


def _without_waiting(path: str, flags: int) -> int:
    """Open a file that may have become a FIFO, which would wait for its writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _parsed(file: ConfigFile | None) -> Config | None:
    """Return what the configuration says, with JSON as Python's own parser reads it."""
    if file is None:
        return None
    path, data = file
    if len(data) > CONFIG_NBYTES:
        raise _unusable(path, f"is too large: expected at most {CONFIG_NBYTES} bytes")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as fault:
        raise _unusable(path, f"is no JSON: {_escaped(str(fault))}") from fault
    if not isinstance(config, dict):
        raise _unusable(path, f"is no JSON object: found {type(config).__name__}")
    return config


def _unusable(path: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{_escaped(path)}: the configuration {why} — it says how the model was quantised; give config= or "
        'count="stored" to count without it',
        code="invalid-config",
        path=path,
    )


class _Remote:
    """A remote model."""

    def __init__(
        self, url: str, options: StorageOptions | None, max_header_size: int | None, stop: Event
    ) -> None:
        self._url = url
        self._options = options
        self._max_header_size = max_header_size
        self._stop = stop

    def headers_and_config(self) -> tuple[_Headers, Config | None]:
        """Both at once, since both are on their way for as long."""
        with ThreadPoolExecutor(1, "ingot-config") as threads:
            config = threads.submit(self._config)
            try:
                return self.headers(), config.result()
            except BaseException:
                # Nobody wants the other any more.
                self._stop.set()
                raise

    def headers(self) -> _Headers:
        asked = hub_headers(self._url, self._options, self._max_header_size, progress=self._tell)
        if asked is not None:
            return _Headers(True, *asked)
        checkpoint = Checkpoint.open_url(
            self._url, self._options, "accept", self._max_header_size, progress=self._tell
        )
        try:
            headers = _Headers.of(checkpoint)
        finally:
            checkpoint.close()
        if headers.is_sharded:
            return headers
        # A repository stands for a file, and what follows the path of a URL is not of its name.
        (_, text, tensors), name = headers.files[0], url_file_name(self._url)
        return headers._replace(files=[(name, text, tensors)])

    def _config(self) -> Config | None:
        return _parsed(config_beside(self._url, self._options, self._tell))

    def _tell(self, done: int, total: int) -> None:
        """Stop a request that nobody wants any more. Called ten times a second while it is under way."""
        if self._stop.is_set():
            raise CancelledError
