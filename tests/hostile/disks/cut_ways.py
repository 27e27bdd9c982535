"""All writers whose power is cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cuts import Cut, CutCheckpoints, CutVolatile
from cuts_of_caches import CutCache
from cuts_of_patches import CutDeltaWriter, CutInPlace, CutVolatileInPlace

from support.supervised import is_possible

#: Those that are not in `faults.ways`, by name.
MORE: dict[str, Callable[[str], Cut]] = {
    "first step": partial(CutCheckpoints, steps=0),
    "step": partial(CutCheckpoints, steps=2),
    "volatile checksums": lambda name: CutVolatile("checksums"),
    "volatile large with checksums": lambda name: CutVolatile("large with checksums"),
    "in place": CutInPlace,
    "shards in place": partial(CutInPlace, path="shards", checksums="xxh3"),
    "volatile in place": CutVolatileInPlace,
    "deltas": CutDeltaWriter,
    "cache": CutCache,
    "full cache": partial(CutCache, is_full=True),
}


def findings(name: str, count: int, seed: int) -> tuple[int, int, list[str]] | None:
    """Return the number of operations and of outcomes, and the failures. None if calls cannot be seen."""
    if not is_possible():
        return None
    way = MORE.get(name, Cut)(name)
    way.cut(count, seed)
    return len(way.recording.operations), way.count, way.wrong
