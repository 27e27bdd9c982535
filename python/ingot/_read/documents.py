"""What stands in a file beside its tensors: its metadata, and the index of a checkpoint of many."""

from __future__ import annotations

from ingot._base.text import _escaped
from ingot._native import ShardIndex, is_url
from ingot.errors import CheckpointError

from .door import open_checkpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot.typing import Path, StorageOptions

    from .source import Source


def read_metadata(source: Source, *, storage_options: StorageOptions | None = None) -> dict[str, str] | None:
    """Give the text that is stored beside the tensors of a file. No tensor is read.

    Parameters
    ----------
    source : str, bytes, os.PathLike, or an object to read from
        A `.safetensors` or a `.bt` file, a URL or an object, as for `ingot.safe_open`. The content decides
        which, not the name.
    storage_options : dict, optional
        How a URL is reached (`ingot.StorageOptions`).

    Returns
    -------
    dict of str to str, or None
        As ``safe_open(...).metadata()`` gives it: None where the file has none, which is not the same as an
        empty one.

    Raises
    ------
    OSError
        The file cannot be opened.
    HeaderError
        The file breaks a rule of its format; ``code`` says which.
    """
    return open_checkpoint(source, "pread", storage_options=storage_options).metadata()


def read_index(source: Path, *, storage_options: StorageOptions | None = None) -> ShardIndex:
    """Read the index of a sharded checkpoint, and look at none of its shards.

    Use it before the shards are there, to know which of them to fetch. `ingot.safe_open` reads both.

    Parameters
    ----------
    source : str, bytes or os.PathLike
        The index, such as ``model.safetensors.index.json``, or its URL; ``hf://owner/repo`` is the
        repository's.
    storage_options : dict, optional
        How a URL is reached (`ingot.StorageOptions`).

    Returns
    -------
    ShardIndex
        With ``shards`` (the names of the files, sorted), ``keys()`` (the names of the tensors, sorted),
        ``shard_of(name)`` (the name of a tensor's file; None where there is no such tensor),
        ``name in index``, ``len(index)``, ``weight_map()`` (all of it as a dict, in the order of the index)
        and ``metadata()`` (any JSON, or None).

    Raises
    ------
    OSError
        The index cannot be opened.
    CheckpointError
        It breaks a rule (FORMAT.md, I1 to I8): a name of a file that leads out of its directory is one. Or a
        file of tensors is behind the URL (``code`` is ``"not-an-index"``).
    StorageError
        The server fails, or stops while it is read.
    OptionError
        The scheme of the URL, or one of `storage_options`, is unknown.
    """
    if not (isinstance(source, str) and is_url(source)):
        return ShardIndex.read(source)
    checkpoint = open_checkpoint(source, "auto", storage_options=storage_options)
    try:
        index = checkpoint.index()
        if index is None:
            raise CheckpointError(
                f"{_escaped(checkpoint.path or '')}: expected the index of a checkpoint, "
                "found a file of tensors",
                code="not-an-index",
                path=checkpoint.path,
            )
        return index
    finally:
        checkpoint.close()
