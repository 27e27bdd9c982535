"""The ranks that use a folder of checkpoints together: a process group of torch, or this process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from sys import modules
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import finalize

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

T = TypeVar("T")

# The number of `Ranks` that have met, which is the same on all ranks.
_MET = [0]


class Together(Protocol):
    """What `Peers` does for several ranks, and `Alone` for one process."""

    rank: int
    size: int

    @property
    def is_lost(self) -> bool:
        """Whether a rank was lost, so that the others cannot be reached."""
        ...

    def gather(self, mine: Any, doing: str) -> list[Any]:
        """Return the objects of all ranks."""
        ...

    def same(self, look: Callable[[], tuple[Mapping[str, Any], Any]], doing: str) -> list[Any]:
        """Compare the options that `look` returns on all ranks, and return the facts of all ranks."""
        ...

    def first(self, look: Callable[[], T], doing: str) -> T:
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

    def same(self, look: Callable[[], tuple[Mapping[str, Any], Any]], doing: str) -> list[Any]:
        """Return the only fact."""
        return [look()[1]]

    def first(self, look: Callable[[], T], doing: str) -> T:
        """Return the result of this process."""
        return look()

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        """Run a block."""
        yield


ALONE = Alone()


class Ranks:
    """The connections of the ranks, which are made when they are first needed.

    The calls of the program and the saves in the background have connections of their own, and neither uses
    the program's process group.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        The ranks. By default all.
    """

    def __init__(self, process_group: Any) -> None:
        self._process_group = process_group
        # Both, or none while there are no ranks.
        self._made: list[Any] = []
        # Connections that are released otherwise wait for the other ranks to release theirs. At exit, the
        # system closes them: an interpreter that ends starts no threads.
        finalize(self, _close, self._made).atexit = False
        self._name = ""
        self._times = 0

    def calls(self) -> Together:
        """Return the ranks, for the calls of the program. All ranks make the same calls."""
        return self._peers()[0]

    def background(self) -> Together:
        """Return the ranks, for the saves in the background."""
        return self._peers()[1]

    def end(self, is_failed: bool) -> None:
        """Close the connections. Ranks that wait for one that has failed raise."""
        if is_failed:
            for peers in self._made:
                peers.leave()
            self._made.clear()
        _close(self._made)

    def _peers(self) -> tuple[Together, Together]:
        if not self._made or any(peers.is_lost for peers in self._made):
            self._made[:] = self._connected()
        return (ALONE, ALONE) if not self._made else (self._made[0], self._made[1])

    def _connected(self) -> list[Any]:
        """Return new connections. None if this process is alone."""
        torch: Any = modules.get("torch")
        # A program without torch has no ranks.
        if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return []
        if torch.distributed.get_world_size(self._process_group) < 2:
            return []
        from ingot._ranks.peers import Peers

        if not self._name:
            _MET[0] += 1
            self._name = f"checkpoints/{_MET[0]}"
        self._times += 1
        name = f"{self._name}/{self._times}"
        return [Peers.separate(self._process_group, f"{name}/{use}") for use in ("calls", "background")]


def _close(made: list[Any]) -> None:
    for peers in made:
        peers.close()
    made.clear()
