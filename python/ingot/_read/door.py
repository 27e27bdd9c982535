"""Open a file, a checkpoint of many files, a URL or an object."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ingot._base.checks import Leniency, is_path, no_source
from ingot._base.options import DEFAULT_LOADING, Loading
from ingot._base.progress import Several, reporting_on
from ingot._native import Checkpoint, is_url
from ingot.errors import CheckpointError, OptionError, StorageError
from ingot.typing import Source, Tell

from .config import Config, config_beside, parsed

if TYPE_CHECKING:
    from ingot._native import _ShardHeaders as ShardHeaders


class Reads(NamedTuple):
    """The number of threads, the function for progress, and the digests to check."""

    threads: int | None = None
    tell: Tell | None = None
    # Whether tensors are compared with the digests in their file, and the expected SHA-256 of the file.
    proof: tuple[bool, str | None] = (False, None)

    def proves(self) -> bool:
        """Return whether a digest is compared."""
        return self.proof != (False, None)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for the functions of the extension module."""
        return {"threads": self.threads, "progress": self.tell}

    def shares(self, *nbytes: Callable[[], int]) -> list[Reads]:
        """Return `Reads` for several calls that report their progress as one.

        Each of `nbytes` returns the bytes that one call reads. They are called only if progress is reported.
        """
        if self.tell is None:
            return [self] * len(nbytes)
        sizes = [size() for size in nbytes]
        steps = Several(self.tell, sum(sizes))
        return [self._replace(tell=steps.step(size)) for size in sizes]


PLAIN = Reads()


@contextmanager
def reading(checkpoint: Checkpoint, how: Loading) -> Iterator[Reads]:
    """Yield the function that reads from `checkpoint`, and show progress until the end of the block."""
    with reporting_on(how.progress, "Loading", checkpoint.path or "") as tell:
        yield _reads(how, tell)


def _reads(how: Loading, tell: Tell | None) -> Reads:
    # With `remap`, the stored tensors were compared before they were put together.
    proof = (how.verify, how.expected_sha256) if how.remap is None else PLAIN.proof
    return Reads(how.threads, tell, proof)


T = TypeVar("T")


def again_by(filename: Any, path: str) -> Any:
    """Return an argument that opens the source again: a URL with its secrets, an object, or `path`."""
    # The path of a handle of a URL lacks its secrets.
    is_of_url = isinstance(filename, str) and is_url(filename)
    return filename if is_of_url or not is_path(filename) else path


def resolved(source: Source) -> Any:
    """Return the path or the URL that `source` is, or a `Reader` or the buffer that its bytes are read from.

    Raises
    ------
    TypeError
        `source` cannot be read from.
    """
    if is_path(source):
        return source
    # Imported here: it imports the modules of threads.
    from .source import resolved as of_object

    found = of_object(source)
    if found is None:
        raise no_source(source)
    return found


def open_checkpoint(
    source: Source,
    how: Loading = DEFAULT_LOADING,
    leniency: Leniency = "accept",
    *,
    confine: bool = False,
    lent: bool = False,
) -> Checkpoint:
    """Open a file, a checkpoint, a URL or an object, whose tensors may be computed as they are read.

    If `lent`, the file may be closed and opened again between reads.
    """
    checkpoint = _stored(source, how, leniency, confine, lent)
    return computed(source, checkpoint, how) if how.computes else checkpoint


def computed(source: Source, checkpoint: Checkpoint, how: Loading) -> Checkpoint:
    """Return the checkpoint of the tensors that are computed from the stored ones."""
    if how.dequantize is not False:
        checkpoint = _dequantized(source, checkpoint, how)
    if how.remap is not None:
        # Imported here: few loads have rules.
        from .remap import remapped

        checkpoint = remapped(checkpoint, how.remap, (how.verify, how.expected_sha256))
    return checkpoint


def _dequantized(source: Source, checkpoint: Checkpoint, how: Loading) -> Checkpoint:
    if how.proves:
        reason = (
            "verify and expected_sha256 compare stored bytes, not dequantised ones: verify the file first"
        )
        raise OptionError(reason, code="verify-computed")
    config = config_of(source, checkpoint.path, how)
    text = None if config is None else json.dumps(config)
    found = checkpoint.dequantized(text, how.dequantize if isinstance(how.dequantize, str) else None)
    return checkpoint if found is None else found[0]


def config_of(source: Source, path: str | None, how: Loading) -> Config | None:
    """Return the contents of ``config.json`` beside a source."""
    found: Any = again_by(source, path or "")
    file = config_beside(found, how.storage_options) if is_path(found) and found else None
    return parsed(file, "correct it, or move it away to dequantise by the tensors alone")


def _stored(source: Source, how: Loading, leniency: Leniency, confine: bool, lent: bool) -> Checkpoint:
    """Open the tensors as they are stored."""
    backend = how.backend
    found: Any = source
    if isinstance(found, str) and is_url(found):
        if backend == "mmap":
            raise OptionError("backend 'mmap' is for files: a URL cannot be mapped")
        return Checkpoint.open_url(found, how.storage_options, leniency, how.max_header_size)
    # Nearly all paths are of this type.
    if isinstance(found, str) or is_path(found) or is_path(found := resolved(source)):
        try:
            return Checkpoint.open(found, backend, leniency, how.max_header_size, confine, lent)
        except IsADirectoryError:
            if not is_distributed(found):
                raise
        found = _served(found)
    if backend == "mmap":
        kind = "distributed checkpoint" if is_path(source) else type(source).__name__
        message = f"backend 'mmap' is for files: a {kind} cannot be mapped"
        raise OptionError(message, code="unmappable")
    open_object: Any = Checkpoint.from_object if hasattr(found, "ask") else Checkpoint.from_buffer
    checkpoint: Checkpoint = open_object(found, leniency, how.max_header_size)
    return checkpoint


def is_distributed(path: Any) -> bool:
    """Return whether a directory has the metadata of torch.distributed.checkpoint."""
    return os.path.isfile(os.path.join(os.fsdecode(path), ".metadata"))


def _served(path: Any) -> Any:
    """Return the reader of a directory of torch.distributed.checkpoint."""
    # By its name: the readers of other formats are in a higher layer, and import NumPy.
    return import_module("ingot._convert.served").Directory(os.fsdecode(path))


# The most attempts to load a checkpoint while saves replace it.
TRIES = 20


def loaded(
    source: Source,
    how: Loading,
    work: Callable[[Checkpoint, Reads], T],
    headers: ShardHeaders | None = None,
) -> T:
    """Open `source` and return what `work` makes of it, of one version if a save replaces it meanwhile."""
    for left in reversed(range(TRIES)):
        checkpoint = open_source(source, how, headers)
        try:
            if how.progress is False:
                # A context manager would add a twentieth to the time to load a small file.
                return work(checkpoint, _reads(how, None))
            with reading(checkpoint, how) as reads:
                return work(checkpoint, reads)
        except (StorageError, CheckpointError, OSError):
            if not left or not checkpoint.is_replaced():
                raise
    raise AssertionError("the last try returns or raises")


def open_all(source: Source, how: Loading, headers: ShardHeaders | None = None) -> Checkpoint:
    """Open `source` and all its files, of one version if a save replaces it meanwhile."""

    def opened(checkpoint: Checkpoint, _: Reads) -> Checkpoint:
        checkpoint.identity()
        return checkpoint

    return loaded(source, how._replace(progress=False), opened, headers)


def open_source(source: Source, how: Loading, headers: ShardHeaders | None = None) -> Checkpoint:
    """Open the source of a load, with the `headers` that another process read."""
    if headers is None:
        return open_checkpoint(source, how)
    path: Any = source
    if isinstance(path, str) and is_url(path):
        checkpoint = Checkpoint.open_url_with(path, how.storage_options, headers)
    else:
        checkpoint = Checkpoint.open_with(path, how.backend, headers)
    return computed(source, checkpoint, how) if how.computes else checkpoint
