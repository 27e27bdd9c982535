"""Read and write the metadata of files with parts of tensors, as torch's Hugging Face storage has it.

Each file is an ordinary file of tensors. ``DCP_SHARDING_INFO`` in its metadata has the position of each part
in its whole tensor. The shape of the whole tensor is not stored: it is the extent of the parts in all files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ingot._base.text import _quoted, located
from ingot._native import Checkpoint
from ingot.errors import CheckpointError

KEY = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


class Chunk(NamedTuple):
    """A part of a tensor, a box, and the number of the file that has it."""

    file: int
    begin: tuple[int, ...]
    shape: tuple[int, ...]


def metadata(begins: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the metadata of a file of parts, from the position of each part in its whole tensor."""
    info = {name: {_OFFSETS: [*begin]} for name, begin in begins.items()}
    return {KEY: json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}


def begins(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]] | None:
    """Return the position of each part of a file in its whole tensor. None if the file has whole tensors."""
    text = (checkpoint.metadata() or {}).get(KEY)
    if not isinstance(text, str):
        return None
    try:
        info = json.loads(text)
        found = {name: tuple(map(int, info[name][_OFFSETS])) for name in checkpoint.offset_names()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as fault:
        raise _broken(checkpoint, f"it cannot be read ({type(fault).__name__}: {fault})") from None
    for name, begin in found.items():
        if len(begin) != len(checkpoint.info(name).shape) or min(begin, default=0) < 0:
            raise _broken(checkpoint, f"tensor {_quoted(name)} cannot begin at {[*begin]}")
    return found


def _broken(checkpoint: Checkpoint, reason: str) -> CheckpointError:
    reason = f"{KEY} in the metadata: {reason}"
    return located(CheckpointError, reason, code="invalid-parts", path=checkpoint.path)
