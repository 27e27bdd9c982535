"""Opening a directory whose files may hold parts of tensors: all files of one save."""

from __future__ import annotations

import os
import time

from ingot._base.text import _escaped
from ingot._read import door
from ingot._write.directory.parts import PART, listed
from ingot.errors import CheckpointError

from .parts import begins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ingot._native import Checkpoint

    # The names that the manifest lists, and each file with its version.
    Seen = tuple[list[str] | None, list[tuple[str, int, int, int]]]

_PAUSE_SECONDS = 0.005


def settled(folder: str, open_whole: Callable[[], Checkpoint], backend: str) -> list[Checkpoint]:
    """Open the checkpoint in a directory, again if a save replaces it meanwhile."""
    for left in reversed(range(door.TRIES)):
        try:
            found = _opened(folder, open_whole, backend)
        except FileNotFoundError:
            found = None
            if not left:
                raise
        if found is not None:
            return found
        time.sleep(_PAUSE_SECONDS)
    raise CheckpointError(
        f"{_escaped(folder)}: no save to it has ended: expected the parts of one save",
        code="invalid-parts",
        path=folder,
    )


def _opened(folder: str, open_whole: Callable[[], Checkpoint], backend: str) -> list[Checkpoint] | None:
    """Open whole tensors, or all files of parts. None if a save is replacing these."""
    if listed(folder) is not None:
        return _parts(folder, backend)
    try:
        whole = open_whole()
    except (CheckpointError, IsADirectoryError):
        names = _names(folder)
        if len(names) < 2 and not any(map(PART.fullmatch, names)):
            raise
        opened = _parts(folder, backend)
        if opened is not None and any(begins(one) is None for one in opened):
            # Of whole tensors: an index would have to say which of them are a checkpoint.
            raise
        return opened
    return [whole] if begins(whole) is None else _parts(folder, backend)


def _parts(folder: str, backend: str) -> list[Checkpoint] | None:
    before = _seen(folder)
    if before is None or not before[1]:
        return None
    opened = [door.open_checkpoint(os.path.join(folder, name), backend, lent=True) for name, *_ in before[1]]
    return opened if _seen(folder) == before else None


def _seen(folder: str) -> Seen | None:
    """Look at the manifest, at the files, and at the manifest again. None if a save began or ended meanwhile.

    Files that are opened between two looks that find the same are of one save: a save has a manifest in place
    as long as it gives files their names.
    """
    before = listed(folder)
    files = []
    for name in _names(folder):
        found = os.stat(os.path.join(folder, name))
        files.append((name, found.st_ino, found.st_size, found.st_mtime_ns))
    return (before, files) if listed(folder) == before else None


def _names(folder: str) -> list[str]:
    """Return the names of the files that are parts of one checkpoint."""
    names = listed(folder)
    if names is not None:
        return names
    found = [name for name in sorted(os.listdir(folder)) if name.endswith(".safetensors") and name[0] != "."]
    # Beside files with names of parts, others are of another checkpoint.
    return [name for name in found if PART.fullmatch(name)] or found
