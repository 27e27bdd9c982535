"""Opening: a file, a checkpoint of many, what is behind a URL, or what an object holds."""

from __future__ import annotations

from typing import TypeVar

from ingot._base.checks import is_path, one_of
from ingot._native import Checkpoint, is_url
from ingot.errors import CheckpointError, OptionError, StorageError

from .reads import reading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ingot._base.checks import Leniency
    from ingot._base.options import Loading
    from ingot._native import _Heads as Heads
    from ingot.typing import StorageOptions

    from .reads import Reads
    from .source import Source

T = TypeVar("T")

BACKENDS = ("auto", "mmap", "pread")


def again_by(filename: Any, path: str) -> Any:
    """What opens the same again: a URL with its secrets, an object, and else `path`."""
    # What is shown of a URL does not open it again.
    is_shown = isinstance(filename, str) and is_url(filename)
    return filename if is_shown or not is_path(filename) else path


def open_checkpoint(
    filename: Source,
    backend: str,
    leniency: Leniency = "accept",
    max_header_size: int | None = None,
    confine: bool = False,
    storage_options: StorageOptions | None = None,
    *,
    lent: bool = False,
) -> Checkpoint:
    """The open file, the open checkpoint, or what is behind a URL or in an object.

    A file that is `lent` is one of perhaps many, which is closed while nobody reads it and others are read.
    """
    one_of("backend", backend, BACKENDS)
    if isinstance(filename, str) and is_url(filename):
        if backend == "mmap":
            raise OptionError("backend 'mmap' is for files: what is behind a URL cannot be mapped")
        return Checkpoint.open_url(filename, storage_options, leniency, max_header_size)
    path: Any = filename
    if not is_path(filename):
        # Imported here: it takes the modules of threads.
        from .source import open_object

        path = open_object(filename, backend, leniency, max_header_size)
        if isinstance(path, Checkpoint):
            return path
    return Checkpoint.open(path, backend, leniency, max_header_size, confine, lent)


# How often a checkpoint is loaded that a save replaces each time.
TRIES = 20


def loaded(source: Source, how: Loading, work: Callable[[Checkpoint, Reads], T]) -> T:
    """Open `source` and return what `work` makes of it, of one version if a save replaces it meanwhile."""
    for left in reversed(range(TRIES)):
        with reading(open_source(source, how), how) as (checkpoint, reads):
            try:
                return work(checkpoint, reads)
            except (StorageError, CheckpointError, OSError):
                if not left or not checkpoint.is_replaced():
                    raise
    raise AssertionError("the last try returns or raises")


def open_all(source: Source, how: Loading, heads: Heads | None = None) -> Checkpoint:
    """Open `source` and all its files, of one version if a save replaces it meanwhile."""
    for left in reversed(range(TRIES)):
        checkpoint = open_source(source, how, heads)
        try:
            checkpoint.identity()
        except (StorageError, CheckpointError, OSError):
            if not left or not checkpoint.is_replaced():
                raise
        else:
            return checkpoint
    raise AssertionError("the last try returns or raises")


def open_source(source: Source, how: Loading, heads: Heads | None = None) -> Checkpoint:
    """What is loaded from, open. `heads` are what another process has read to open the same."""
    if heads is None:
        return open_checkpoint(
            source,
            how.backend,
            max_header_size=how.max_header_size,
            storage_options=how.storage_options,
        )
    path: Any = source
    if isinstance(path, str) and is_url(path):
        return Checkpoint.open_url_with(path, how.storage_options, heads)
    return Checkpoint.open_with(path, how.backend, heads)
