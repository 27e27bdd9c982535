"""The index of a sharded checkpoint, without its shards."""

from __future__ import annotations

from ._native import ShardIndex

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._serialize import Path

__all__ = ["ShardIndex", "read_index"]


def read_index(path: Path) -> ShardIndex:
    """Read the index of a sharded checkpoint, and look at none of its shards.

    Use it before the shards are there, to know which of them to fetch. `ingot.safe_open` reads both.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The index, such as ``model.safetensors.index.json``.

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
        It breaks a rule (FORMAT.md, I1 to I8): a name of a file that leads out of its directory is one.
    """
    return ShardIndex.read(path)
