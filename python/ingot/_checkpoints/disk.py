"""The steps of a directory of a disk: FORMAT.md, "Folders of checkpoints"."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from ingot._base.checks import is_durable
from ingot._base.text import located
from ingot._native import replace_file
from ingot._state import commit as commits
from ingot._state.commit import PINNED, Commit, StoredFile
from ingot._write.directory import flush_names, make, new_folders
from ingot.errors import StorageError

from . import retention
from .lease import Lease
from .steps import Steps


class DiskSteps(Steps):
    """The steps of a directory.

    Parameters
    ----------
    directory : str
        An absolute path.
    """

    setting_aside = "renamed to"

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._lease = Lease(directory)

    @property
    def lease(self) -> Lease:
        return self._lease

    def identity(self) -> str:
        return os.path.realpath(self.directory)

    def check_directory(self) -> None:
        commits.check_directory(self.directory)

    def take_lease(self) -> None:
        make(self.directory, is_durable(None))
        if self._lease.acquire():
            retention.clean(self.directory)

    def numbers(self) -> list[int]:
        return commits.committed(self.directory)

    def folder(self, step: int) -> str:
        return commits.folder_of(self.directory, step)

    def find(self, step: int) -> str | None:
        folder = self.folder(step)
        return folder if self.has(folder) else None

    def new_folder(self, step: int, save: str) -> str:
        return self.folder(step)

    def path(self, folder: str, name: str) -> str:
        return os.path.join(folder, name)

    @contextmanager
    def making(self, folder: str) -> Iterator[None]:
        # An error removes new folders only: the user may have put files into an existing one.
        with new_folders(folder, durable=False):
            if os.path.lexists(folder):
                # A save of this process has failed.
                retention.clean_step(folder)
            os.makedirs(folder, exist_ok=True)
            yield

    def enter(self, folder: str) -> None:
        # The file server may show the directory to this machine later.
        os.makedirs(folder, exist_ok=True)

    def has(self, folder: str) -> bool:
        return commits.is_committed(folder)

    def read(self, folder: str) -> Commit:
        return commits.read(folder)

    def stored(self, folder: str, name: str) -> StoredFile:
        return commits.stored(self.path(folder, name))

    def check(self, folder: str, commit: Commit, names: Iterable[str] | None = None) -> None:
        commits.check(folder, commit, names)

    def write_commit(self, folder: str, commit: Commit) -> None:
        for name, known in commit.files.items():
            path = self.path(folder, name)
            if not os.path.isfile(path) or os.path.getsize(path) != known.nbytes:
                raise not_shared(path, known)
        durable = is_durable(None)
        if durable:
            flush_names(folder)
            flush_names(self.directory)
        self._lease.check()
        commits.write(folder, commit, durable)

    def may_have(self, folder: str, commit: Commit) -> bool:
        # Without the lease, the directory may be the step of another process.
        return self.has(folder) and self.is_there(folder, commit)

    def discard(self, folder: str, save: str) -> None:
        with suppress(OSError):
            retention.discard(folder, [name for name in os.listdir(folder) if save in name])

    def mark_pinned(self, folder: str) -> None:
        replace_file(self.path(folder, PINNED), [], durable=is_durable(None), overwrite=True)

    def unpin(self, folder: str) -> None:
        retention.unpin(folder)

    def delete(self, folder: str) -> None:
        retention.delete(folder)

    def set_aside(self, folder: str) -> str:
        return retention.set_aside(self.directory, folder, self.known(folder))

    def put_back(self, names: Iterable[str]) -> None:
        retention.put_back(self.directory, names)

    def is_damage(self, error: Exception) -> bool:
        return isinstance(error, StorageError) or super().is_damage(error)


def not_shared(path: str, known: StoredFile) -> StorageError:
    """Return the error for a file of another rank that this rank cannot see."""
    reason = f"another rank has written {known.nbytes:,} bytes, which this one cannot see"
    way_out = "choose a directory that all machines share"
    return located(StorageError, f"{reason}: {way_out}", code="not-shared", path=path)
