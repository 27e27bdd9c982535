"""The replacement of a checkpoint by files of parts that several ranks write."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress

from ingot._write.directory.hidden import hidden
from ingot._write.directory.lock import is_held
from ingot._write.directory.parts import MANIFEST, keep, recover
from ingot._write.shards import alone, remove

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingot._base.checks import Existing
    from ingot._write.shards import Place


@contextmanager
def replacing(place: Place, existing: Existing, durable: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield a prefix for temporary names, and a list for the names of the new files."""
    with alone(place) as stale:
        place.check(existing)
        names: list[str] = []
        with hidden() as prefix:
            try:
                yield prefix, names
                stale += _publish(place, prefix, names, durable)
            except BaseException:
                # The child of a fork leaves the files to its parent.
                if is_held(place.directory):
                    _discard(place, prefix)
                raise


def _publish(place: Place, prefix: str, names: list[str], durable: bool) -> list[str]:
    """Rename the new files, and return the names of files that can be removed."""
    old = place.files()
    if os.path.lexists(place.path(place.index)):
        # Readers prefer an index, so the new files can get their names beside it.
        last, extra = place.index, []
        links = [name for name in old if name not in names]
    else:
        last, extra = MANIFEST, [name for name in old if name not in names]
        links = keep(place.directory, old, durable)
    try:
        _flush(place, durable)
        for name in names:
            os.replace(place.path(prefix + name), place.path(name))
        for name in extra:
            os.remove(place.path(name))
        _flush(place, durable)
        os.remove(place.path(last))
    except BaseException:
        if is_held(place.directory):
            with suppress(OSError):
                recover(place.directory)
            if last == place.index and os.path.lexists(place.path(last)):
                remove(place, names)
        raise
    _flush(place, durable, ", though the checkpoint is written")
    return links


def _flush(place: Place, durable: bool, so_far: str = "") -> None:
    if durable:
        place.flush(so_far)


def _discard(place: Place, prefix: str) -> None:
    """Remove the new files that did not get their names, of all ranks."""
    with suppress(OSError):
        remove(place, [name for name in os.listdir(place.directory) if name.startswith(prefix)])
