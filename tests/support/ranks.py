"""Ranks of a process group, each a process of its own, that run functions of tests."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Ranks are forked from a process that has imported torch and the other modules that each rank needs, since
# these imports take seconds: torch._dynamo for the first distributed tensor, and pytest for the functions of
# tests.
_context = get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo", "ingot.torch", "pytest"]
)


GONE = "gone"

#: Seconds that the group waits for a rank.
TIMEOUT = 60
#: Seconds after which all ranks have heard of a failure, even on a busy machine. Fewer than the timeout.
PROMPT = 50


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Counting:
    """A store that counts the requested bytes, and calls `happens` for each request."""

    def __init__(self, path: Path, happens: Any = None) -> None:
        self.path, self.happens, self.nbytes = path, happens, 0

    def head(self, path: str) -> dict[str, int]:
        return {"size": os.stat(self.path).st_size}

    def get_ranges(self, path: str, *, starts: list[int], ends: list[int]) -> list[bytes]:
        # The header is read by each rank, as it opens the file.
        if min(starts) > 0:
            self.nbytes += sum(ends) - sum(starts)
            if self.happens is not None:
                self.happens()
        with open(self.path, "rb") as file:
            return [
                os.pread(file.fileno(), end - start, start) for start, end in zip(starts, ends, strict=True)
            ]


def _work(rank: int, size: int, store: str, path: list[str], calls: Connection) -> None:
    # Garbage collections skip the modules imported before the fork, so their memory stays shared.
    gc.freeze()
    sys.path[:] = path
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    while True:
        call = calls.recv()
        if call is None:
            break
        function, arguments = call
        try:
            calls.send(("gave", function(*arguments)))
        except BaseException as error:
            error.add_note("".join(traceback.format_exception(error)))
            calls.send(("raised", error))
    if dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """`size` ranks. `run` makes all of them call a function of a test module."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self._calls, self._processes = [], []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_work, args=(rank, size, str(folder / "store"), sys.path, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._calls.append(ours)
            self._processes.append(process)

    def run(self, function: Any, *arguments: Any, seconds: float = 120) -> list[Any]:
        """Return the result of each rank."""
        found = self.outcomes(function, *arguments, seconds=seconds)
        for rank, one in enumerate(found):
            if isinstance(one, BaseException):
                one.add_note(f"on rank {rank}")
                raise one
        return found

    def outcomes(self, function: Any, *arguments: Any, seconds: float = 120) -> list[Any]:
        """Return the result or the error of each rank; `GONE` for a rank that was killed."""
        for calls in self._calls:
            calls.send((function, arguments))
        found: list[Any] = [GONE] * self.size
        waiting = {calls: rank for rank, calls in enumerate(self._calls)}
        while waiting:
            ready = wait(list(waiting), timeout=seconds)
            assert ready, f"ranks {sorted(waiting.values())} did not come back from {function.__name__}"
            for calls in ready:
                rank = waiting.pop(calls)
                with suppress(EOFError, ConnectionResetError):
                    _, found[rank] = calls.recv()
        return found

    def close(self) -> None:
        for calls in self._calls:
            with suppress(OSError):
                calls.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
