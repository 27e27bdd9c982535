"""Which steps stay, and how steps of a disk are deleted, set aside and cleaned up, by the lease's holder."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isnan
from typing import Literal, NamedTuple

from ingot._base.checks import is_durable
from ingot._state.commit import (
    COMMIT,
    DELETING,
    PINNED,
    STATE,
    Commit,
    folder_of,
    is_committed,
    numbers,
    read,
)
from ingot._write.directory import flush_names
from ingot.errors import SafetensorError

# Temporary files of a save that was killed.
_TEMPORARY = re.compile(rf"\.({STATE.pattern}|{re.escape(COMMIT)}|{PINNED})\.[0-9a-f]+\.ingot-(tmp|old)")
# A link of the user to another directory stays too.
_STAYS = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class Best(NamedTuple):
    """The steps with the best values of a metric.

    Attributes
    ----------
    metric : str
        The name of the metric.
    mode : {"min", "max"}
        Whether small or large values are better.
    most : int
        The number of steps that stay.
    """

    metric: str
    mode: Literal["min", "max"]
    most: int

    def ranked(self, commits: Iterable[Commit]) -> list[int]:
        """Return the steps that have the metric, the best first, and the later of two equal ones."""
        sign = 1 if self.mode == "min" else -1
        known = [one for one in commits if not isnan(one.metrics.get(self.metric, float("nan")))]
        return [
            one.step for one in sorted(known, key=lambda one: (sign * one.metrics[self.metric], -one.step))
        ]


class Rules(NamedTuple):
    """The steps that stay: the last `keep`, multiples of `keep_every`, and the best. None means no rule."""

    keep: int | None
    keep_every: int | None
    best: Best | None

    def kept(self, commits: Mapping[int, Commit]) -> set[int]:
        """Return which of these steps stay."""
        if self.keep is None:
            return {*commits}
        found = {*sorted(commits)[-self.keep :]}
        if self.keep_every is not None:
            found |= {step for step in commits if step % self.keep_every == 0}
        if self.best is not None:
            found |= {*self.best.ranked(commits.values())[: self.best.most]}
        return found


def is_pinned(folder: str) -> bool:
    """Return whether a step is pinned."""
    return os.path.exists(os.path.join(folder, PINNED))


def delete(folder: str) -> None:
    """Delete a step that is not pinned: the commit file first, and then the files that it names.

    Another process may pin the step at any time. It looks for the commit file afterwards, so a mark
    that is made after the commit file is gone was refused.
    """
    if is_pinned(folder):
        return
    commit, deleting = os.path.join(folder, COMMIT), os.path.join(folder, DELETING)
    os.replace(commit, deleting)
    if is_pinned(folder):
        os.replace(deleting, commit)
        return
    if is_durable(None):
        # Otherwise a power cut may leave the commit file without the files that it names.
        flush_names(folder)
    _end_deletion(folder)


def unpin(folder: str) -> None:
    """Remove the mark of a pinned step."""
    _remove(folder, (PINNED,))


def _end_deletion(folder: str) -> None:
    # The file of the state, also if the commit file is damaged.
    _remove(folder, filter(STATE.fullmatch, os.listdir(folder)))
    with suppress(SafetensorError):
        _remove(folder, read(folder, DELETING).files)
    _remove(folder, (PINNED, DELETING))
    _remove_folder(folder)


def _remove(folder: str, names: Iterable[str]) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            os.remove(os.path.join(folder, name))


def _remove_folder(folder: str) -> None:
    """Remove the directory of a step, unless the user has put files into it."""
    try:
        os.rmdir(folder)
    except OSError as fault:
        if fault.errno not in _STAYS:
            raise


def clean(directory: str) -> None:
    """Finish deletions that were interrupted, and remove the files of saves that were."""
    for step in numbers(directory):
        clean_step(folder_of(directory, step))


def clean_step(folder: str) -> None:
    """Remove what an interrupted save or deletion has left in a directory without a commit file."""
    if is_committed(folder) or not os.path.isdir(folder):
        return
    if os.path.exists(os.path.join(folder, DELETING)):
        if is_pinned(folder):
            os.replace(os.path.join(folder, DELETING), os.path.join(folder, COMMIT))
        else:
            _end_deletion(folder)
        return
    left = [name for name in os.listdir(folder) if STATE.fullmatch(name) or _TEMPORARY.fullmatch(name)]
    discard(folder, (PINNED, *left))


def discard(folder: str, names: Iterable[str]) -> None:
    """Remove files of a step that is not committed, and its directory if nothing else is in it."""
    _remove(folder, names)
    with suppress(OSError):
        os.rmdir(folder)


def put_back(directory: str, names: Iterable[str]) -> None:
    """Undo `set_aside`, whose results are `names`, since no other step was saved."""
    for name in names:
        number = int(name.split("-")[1])
        os.rename(os.path.join(directory, name), folder_of(directory, number))


def set_aside(directory: str, folder: str, commit: Commit | None) -> str:
    """Rename the folder of a step that training has gone back from, and return its new name."""
    # A damaged commit file has no id.
    called = f"{os.stat(folder).st_mtime_ns:x}" if commit is None else commit.save
    name = f"abandoned-{os.path.basename(folder).removeprefix('step-')}-{called}"
    os.rename(folder, os.path.join(directory, name))
    return name
