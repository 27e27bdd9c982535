"""The contents that POSIX allows a folder to have after a power cut.

What was not flushed may be missing. A write may be torn at 512 or 4,096 bytes. The length of a file may be
one of its lengths since the last flush, with zeros in place of missing bytes. Names that were not flushed
with their directory may be old or new, each independently of the others: only the two names of a rename
change together. A flush that was not over guarantees nothing. Some file systems promise more, but writers
must not rely on it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from support.file_operations import Flush, Folder, Names, Operation, Recording, Resize, Write, apply

SECTORS = 512, 4096
# A write is torn into fewer pieces than this.
PIECES = 8


@dataclass(frozen=True)
class Outcome:
    """The folder after a power cut."""

    #: The number of operations that had begun. The last one may be incomplete, unless `returned`.
    begun: int
    returned: bool
    files: dict[str, bytes]

    def __str__(self) -> str:
        return f"cut in operation {self.begun}" if not self.returned else "cut after the return"


def outcomes(recording: Recording, count: int, seed: int) -> Iterator[Outcome]:
    """Yield `count` outcomes of a cut in each operation, and of a cut after the last one.

    The first two of each lack everything, and nothing, that was not flushed.
    """
    operations = recording.operations
    for begun in range(len(operations) + 2):
        returned = begun > len(operations)
        done = operations[:begun]
        pending = _pending(done, over=len(done) if returned else len(done) - 1)
        for number in range(count):
            chance = random.Random(f"{seed} {begun} {number}")
            share = (0.0, 1.0)[number] if number < 2 else chance.choice((0.1, 0.5, 0.9))
            files = _outcome(recording, done, pending, share, chance)
            yield Outcome(begun, returned, files)


def _pending(done: list[Operation], over: int) -> list[bool]:
    """Return for each operation whether a flush after it has not made it durable. `over` of them are over."""
    everything = -1
    flushed: dict[int, int] = {}
    for at, operation in enumerate(done[:over]):
        if isinstance(operation, Flush):
            if operation.node is None:
                everything = at
            else:
                flushed[operation.node] = at

    def is_pending(at: int, operation: Operation) -> bool:
        if isinstance(operation, (Write, Resize)):
            last = flushed.get(operation.file, -1)
        elif isinstance(operation, Names):
            last = max(flushed.get(directory, -1) for directory, _, _ in operation.changes)
        else:
            return False
        return max(last, everything) < at

    return [is_pending(at, operation) for at, operation in enumerate(done)]


def _outcome(
    recording: Recording, done: list[Operation], pending: list[bool], share: float, chance: random.Random
) -> dict[str, bytes]:
    folder = recording.before.copy()
    for operation, unsure in zip(done, pending, strict=True):
        if not unsure:
            _persist(operation, folder)
        elif isinstance(operation, Write):
            _persist_partly(operation, folder, share, chance)
        elif chance.random() < share:
            _persist(operation, folder)
    return folder.contents()


def _persist(operation: Operation, folder: Folder) -> None:
    if not isinstance(operation, Names):
        apply(operation, folder)
        return
    # A rename removes its source only if that is still the same file.
    moved = {node for _, _, node in operation.changes if node is not None}
    for directory, name, node in operation.changes:
        kept = folder.directories[directory].get(name)
        if node is None and len(operation.changes) > 1 and kept not in moved:
            continue
        apply(Names(((directory, name, node),)), folder)


def _persist_partly(write: Write, folder: Folder, share: float, chance: random.Random) -> None:
    """Write none, all or some of its sectors, and either extend the file to its end or not."""
    if share in (0.0, 1.0) or chance.random() < 0.5:
        if chance.random() < share:
            apply(write, folder)
        return
    size, end = chance.choice(SECTORS), write.position + len(write.data)
    data = folder.opened(write.file)
    length = end if chance.random() < 0.5 else chance.choice(_torn(write, size, chance))
    data.extend(bytes(max(length - len(data), 0)))
    for first, last in pairwise([write.position, *_torn(write, size, chance), end]):
        last = min(last, len(data))
        if chance.random() < share and first < last:
            data[first:last] = write.data[first - write.position : last - write.position]


def _torn(write: Write, size: int, chance: random.Random) -> list[int]:
    """Return ends of sectors within a write, in their order, or its end if it is within one sector."""
    begin, end = write.position, write.position + len(write.data)
    ends = range(begin - begin % size + size, end, size)
    return sorted(chance.sample(ends, min(len(ends), chance.randrange(1, PIECES)))) or [end]
