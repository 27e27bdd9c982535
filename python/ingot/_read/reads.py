"""How a file is read: by how many threads, who is told, and what is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypedDict

from ingot._base.progress import telling

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ingot._base.options import Loading
    from ingot._native import Checkpoint
    from ingot.typing import Tell

    class Options(TypedDict):
        """What the functions of the extension module take."""

        threads: int | None
        progress: Tell | None

    # Whether what is read is compared with the digests that its file keeps, and the SHA-256 of the file.
    Proof = tuple[bool, str | None]


class Reads:
    """How many threads read, and what is told ``(bytes done, bytes in all)``. None where nobody cares."""

    __slots__ = ("proof", "tell", "threads")

    def __init__(
        self, threads: int | None = None, tell: Tell | None = None, proof: Proof = (False, None)
    ) -> None:
        self.threads = threads
        self.tell = tell
        self.proof = proof

    def proves(self) -> bool:
        """Whether anything is compared."""
        return self.proof != (False, None)

    def options(self) -> Options:
        """For the functions of the extension module."""
        return {"threads": self.threads, "progress": self.tell}

    def shares(self, *nbytes: Callable[[], int]) -> list[Reads]:
        """One of these for each of several calls, which tell of all that they read together.

        `nbytes` give what each call reads, and are not called where nobody is told.
        """
        tell = self.tell
        if tell is None:
            return [self] * len(nbytes)
        sizes = [size() for size in nbytes]
        return [
            Reads(self.threads, _after(tell, sum(sizes[:rank]), sum(sizes)), self.proof)
            for rank in range(len(sizes))
        ]


def _after(tell: Tell, before: int, total: int) -> Tell:
    """What tells `tell` of a part of the work as what it is of the whole."""
    return lambda done, _: tell(before + done, total)


PLAIN = Reads()


def reading(checkpoint: Checkpoint, how: Loading) -> AbstractContextManager[tuple[Checkpoint, Reads]]:
    """Give `checkpoint` and how it is to be read, and tell of it, or show it, until it has been."""
    if how.progress is not False:
        return _told(checkpoint, how)
    return nullcontext((checkpoint, silently(how)))


def silently(how: Loading) -> Reads:
    """Return how files are read without progress."""
    return Reads(how.threads, None, (how.verify, how.expected_sha256))


@contextmanager
def _told(checkpoint: Checkpoint, how: Loading) -> Iterator[tuple[Checkpoint, Reads]]:
    with telling(how.progress, "Loading", checkpoint.path or "") as tell:
        yield checkpoint, Reads(how.threads, tell, (how.verify, how.expected_sha256))
