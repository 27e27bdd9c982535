"""The ranks that use a folder of checkpoints together: a process group of torch, or this process alone."""

from __future__ import annotations

from sys import modules
from typing import Any
from weakref import finalize

from ingot._ranks.alone import ALONE, Together

# The number of `Ranks` that have met, which is the same on all ranks.
_MET = [0]


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
        # Other ways to release connections wait until the other ranks release theirs. At exit, the system
        # closes them: an interpreter that ends starts no threads.
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
