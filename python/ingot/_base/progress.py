"""Report progress to a bar or to a function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import fsdecode
from os.path import basename
from typing import TextIO

from ingot._native import shown_url
from ingot.typing import Path, Tell

from .text import _escaped


def reporting(progress: bool | Tell, title: str) -> AbstractContextManager[Tell | None]:
    """Return a context with a callable for ``(bytes done, bytes in all)``, or None without progress.

    `progress` is a result of `checked_progress`. True shows a bar: tqdm's if it is installed, else a line on
    standard error.
    """
    if progress is True:
        return _shown(title)
    # No generator, which takes three times as long.
    return nullcontext(None if progress is False else progress)


@contextmanager
def _shown(title: str) -> Iterator[Tell]:
    bar = _bar(title)
    try:
        yield bar.tell
    finally:
        bar.close()


def reporting_on(progress: bool | Tell, verb: str, path: Path) -> AbstractContextManager[Tell | None]:
    """Do as `reporting` does, for work on the file at `path`, which may be a URL."""
    if progress is not True:
        return reporting(progress, verb)
    # The end of the URL, without secrets.
    shown = shown_url(fsdecode(path)).removesuffix("?…").rstrip("/")
    return reporting(progress, f"{verb} {_escaped(basename(shown))}")


def counted(tell: Tell | None, total: int) -> Callable[[int], None]:
    """Return a function to call with the bytes of each step of `total`."""
    done = 0

    def moved(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if tell is not None:
            tell(min(done, total), total)

    return moved


class Several:
    """The progress of several steps as one, with the bytes of all of them."""

    def __init__(self, tell: Tell | None, total: int) -> None:
        self._tell = tell
        self._total = total
        self._begin = 0

    def step(self, nbytes: int) -> Tell | None:
        """Return a callable for the progress of the next step, which has `nbytes` of the total."""
        begin, tell, total = self._begin, self._tell, self._total
        self._begin += nbytes
        if tell is None or not total:
            return tell

        def report(done: int, of: int) -> None:
            # A step also counts headers, or bytes that it reads twice.
            tell(begin + (nbytes * done // of if of else nbytes), total)

        return report


def _bar(title: str) -> _Tqdm | _Line:
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return _Line(title, sys.stderr)
    return _Tqdm(tqdm(desc=title, unit="B", unit_scale=True, unit_divisor=1024))


class _Tqdm:
    """A bar of tqdm."""

    def __init__(self, bar: object) -> None:
        self._bar = bar

    def tell(self, done: int, total: int) -> None:
        bar = self._bar
        bar.total = total  # type: ignore[attr-defined]
        bar.update(done - bar.n)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._bar.close()  # type: ignore[attr-defined]


class _Line:
    """A line of text. On a terminal it is updated; elsewhere, as in a log, it is written once, at the end."""

    def __init__(self, title: str, out: TextIO | None) -> None:
        self._title = title
        # None if the program has no standard error, as without a console.
        self._out = out
        self._grows = out is not None and out.isatty()
        self._shown = ""

    def tell(self, done: int, total: int) -> None:
        percent = 100 * done // total if total else 100
        line = f"{self._title}: {percent:3d} % of {_size(total)}"
        if line != self._shown:
            self._shown = line
            if self._grows:
                self._write("\r" + line)

    def close(self) -> None:
        if self._shown:
            self._write("\n" if self._grows else self._shown + "\n")

    def _write(self, text: str) -> None:
        if self._out is not None:
            self._out.write(text)
            self._out.flush()


def _size(nbytes: int) -> str:
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{nbytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
