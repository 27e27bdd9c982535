"""The interface of ranks that work together, and its implementation for one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

T = TypeVar("T")


class Together(Protocol):
    """The steps that ranks make together: `Peers` for several ranks, and `Alone` for one process."""

    rank: int
    size: int

    @property
    def is_lost(self) -> bool:
        """Whether a rank was lost, so that the others cannot be reached."""
        ...

    def gather(self, mine: Any, doing: str) -> list[Any]:
        """Return the objects of all ranks."""
        ...

    def same(self, prepare: Callable[[], tuple[Mapping[str, Any], Any]], doing: str) -> list[Any]:
        """Compare the options that `prepare` returns on all ranks, and return the facts of all ranks."""
        ...

    def first(self, prepare: Callable[[], T], doing: str) -> T:
        """Return the result of the first rank on all ranks."""
        ...

    def step(self, doing: str) -> AbstractContextManager[None]:
        """Run a block on each rank. If one raises, all raise."""
        ...


class Alone:
    """One process without other ranks."""

    rank, size, is_lost = 0, 1, False

    def gather(self, mine: Any, doing: str) -> list[Any]:
        """Return the only object."""
        return [mine]

    def same(self, prepare: Callable[[], tuple[Mapping[str, Any], Any]], doing: str) -> list[Any]:
        """Return the only fact."""
        return [prepare()[1]]

    def first(self, prepare: Callable[[], T], doing: str) -> T:
        """Return the result of this process."""
        return prepare()

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        """Run a block."""
        yield


ALONE = Alone()
