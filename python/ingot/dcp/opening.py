"""Opening the files of parts in a directory, all of one save."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from ingot import _open
from ingot._parts import PART, listed
from ingot._text import _escaped
from ingot.errors import CheckpointError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._native import Checkpoint

_PAUSE_SECONDS = 0.005


class _Seen(NamedTuple):
    """The files of a directory that are a checkpoint, and their versions."""

    is_replaced: bool
    files: list[tuple[str, int, int, int]]


def parts_in(folder: str) -> list[str]:
    """Return the names of the files that are parts of one checkpoint."""
    names = listed(folder)
    if names is not None:
        return names
    found = [name for name in sorted(os.listdir(folder)) if name.endswith(".safetensors") and name[0] != "."]
    # Beside files with names of parts, others are of another checkpoint.
    return [name for name in found if PART.fullmatch(name)] or found


def open_parts(folder: str, backend: str) -> list[Checkpoint]:
    """Open the files of parts in a directory, again if a save replaces them meanwhile."""
    for left in reversed(range(_open.TRIES)):
        try:
            before = _seen(folder)
            if before.files:
                opened = [
                    _open.open_checkpoint(os.path.join(folder, name), backend, lent=True)
                    for name, *_ in before.files
                ]
                if _seen(folder) == before:
                    return opened
            reason = "no file in it is complete" if before.is_replaced else "its files change all the time"
        except FileNotFoundError:
            reason = "its files change all the time"
            if not left:
                raise
        time.sleep(_PAUSE_SECONDS)
    raise CheckpointError(
        f"{_escaped(folder)}: {reason}: expected the parts of one save", code="invalid-parts", path=folder
    )


def _seen(folder: str) -> _Seen:
    """Look at the manifest, at the files, and at the manifest again.

    What two such looks find alike is of one save, and so are files that are opened between the looks: a save
    has a manifest in place as long as it gives files their names.
    """
    before = listed(folder)
    files = []
    for name in parts_in(folder):
        found = os.stat(os.path.join(folder, name))
        files.append((name, found.st_ino, found.st_size, found.st_mtime_ns))
    if listed(folder) != before:
        raise FileNotFoundError(folder)
    return _Seen(before is not None, files)
