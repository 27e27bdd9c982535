"""How a load is carried out, and whom it tells how far it is."""

from __future__ import annotations

from .errors import OptionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypedDict

    from ._progress import Tell

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
            Reads(self.threads, _after(tell, sum(sizes[:rank]), sum(sizes))) for rank in range(len(sizes))
        ]


PLAIN = Reads()


def _after(tell: Tell, before: int, total: int) -> Tell:
    """What tells `tell` of a part of the work as what it is of the whole."""
    return lambda done, _: tell(before + done, total)


def checked_threads(threads: int | None) -> int | None:
    """`threads`, which must be a number of them or None."""
    if threads is None:
        return None
    if not isinstance(threads, int) or isinstance(threads, bool):
        raise TypeError(f"threads must be an int or None, found {type(threads).__name__}")
    if threads < 1:
        raise OptionError(
            f"threads {threads} is no number of threads: expected 1 or more",
            code="invalid-threads",
            expected="1 or more",
            found=threads,
        )
    return threads
