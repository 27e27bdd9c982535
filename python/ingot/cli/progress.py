"""A bar on standard error, for what takes longer than a second."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress, TaskID

    from ingot.typing import Tell

    from .screen import Screen

# Seconds. What is done sooner needs no bar.
_PATIENCE = 1.0


class Bar:
    """Told ``(bytes done, bytes in all)`` now and then. It is shown when that has gone on for a second."""

    def __init__(self, title: str, silent: bool) -> None:
        self._title = title
        self._silent = silent or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb"
        self._begun = time.monotonic()
        self._shown: tuple[Progress, TaskID] | None = None

    def tell(self, done: int, total: int) -> None:
        """Take note of how far it is."""
        if self._silent or (self._shown is None and time.monotonic() - self._begun < _PATIENCE):
            return
        if self._shown is None:
            self._shown = _shown(self._title)
        progress, task = self._shown
        progress.update(task, completed=done, total=total)

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._shown is not None:
            self._shown[0].stop()


def _shown(title: str) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.start()
    return progress, progress.add_task(title, total=None)


@contextmanager
def bar(screen: Screen, title: str) -> Iterator[Tell]:
    """What is to be told how far it is, while something long goes on."""
    shown = Bar(title, screen.quiet)
    try:
        yield shown.tell
    finally:
        shown.close()


class Several:
    """Steps that each tell of themselves, told of as one."""

    def __init__(self, tell: Tell, total: int) -> None:
        self._tell = tell
        self._total = total
        self._before = 0

    def step(self, nbytes: int) -> None:
        """A step of so many bytes is done."""
        self._before += nbytes
        self._tell(self._before, self._total)

    @contextmanager
    def within(self, nbytes: int) -> Iterator[Tell]:
        """A step of so many bytes, and what is to be told how much of itself it has done."""

        def tell(done: int, total: int) -> None:
            # It may read its bytes twice, or not all of them.
            if self._total:
                self._tell(self._before + (nbytes * done // total if total else 0), self._total)
            else:
                # How many bytes there are was not known.
                self._tell(done, total)

        yield tell
        self.step(nbytes)
