"""The steps of a folder of checkpoints, which is on a disk or in a store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from typing import Protocol

from ingot._state.commit import Commit, StoredFile
from ingot.errors import CheckpointError, HeaderError, IntegrityError, SafetensorError
from ingot.typing import StorageOptions

from .retention import Rules

# Codes of a `CheckpointError` about a damaged step. The others are about the caller's objects, or a version.
_DAMAGES = ("invalid-commit", "changed-step")


class Held(Protocol):
    """A lease, which one process at a time has."""

    def is_held(self) -> bool:
        """Return whether this object still has the lease that it took."""
        ...

    def release(self) -> None:
        """Release the lease, if this object and this process hold it."""
        ...


class Steps(ABC):
    """The steps of a folder of checkpoints. The argument `folder` is the path or the URL of one step.

    Attributes
    ----------
    directory : str
        The path, or the URL without secrets.
    options : dict, optional
        The `storage_options` of requests.
    setting_aside : str
        What `set_aside` does, for messages.
    """

    directory: str
    options: StorageOptions | None = None
    setting_aside: str

    @property
    @abstractmethod
    def lease(self) -> Held:
        """The lease of the directory."""

    @abstractmethod
    def identity(self) -> str:
        """Return a text that is equal for all ranks that use the same directory."""

    @abstractmethod
    def check_directory(self) -> None:
        """Raise if the directory cannot be one, or contains checkpoints of another program."""

    @abstractmethod
    def take_lease(self) -> None:
        """Take the lease, and remove what an earlier process has left."""

    @abstractmethod
    def numbers(self) -> list[int]:
        """Return the numbers of the steps in ascending order."""

    @abstractmethod
    def folder(self, step: int) -> str:
        """Return the folder of a step, which `numbers` has returned."""

    @abstractmethod
    def find(self, step: int) -> str | None:
        """Return the folder of a step, or None if there is no such step."""

    @abstractmethod
    def new_folder(self, step: int, save: str) -> str:
        """Return the folder for a new save of a step."""

    @abstractmethod
    def path(self, folder: str, name: str) -> str:
        """Return the path or the URL of a file of a step."""

    @abstractmethod
    def making(self, folder: str) -> AbstractContextManager[None]:
        """Return a context that makes the folder of a step, and removes it at an error in the block."""

    @abstractmethod
    def enter(self, folder: str) -> None:
        """Make the folder of a step visible to this machine, after another one has made it."""

    @abstractmethod
    def has(self, folder: str) -> bool:
        """Return whether the folder has a commit file."""

    @abstractmethod
    def read(self, folder: str) -> Commit:
        """Return the content of the commit file.

        Raises
        ------
        CheckpointError
            The file is damaged (``code`` is ``"invalid-commit"``), another program's
            (``"foreign-checkpoints"``), or of a later version of ingot (``"later-checkpoint"``).
        OSError
            The file cannot be opened.
        """

    @abstractmethod
    def stored(self, folder: str, name: str) -> StoredFile:
        """Return the facts about a file that the commit file records."""

    @abstractmethod
    def check(self, folder: str, commit: Commit, names: Iterable[str] | None = None) -> None:
        """Compare files of a step, by default all, with its commit file. Raises as `commit.check` does."""

    @abstractmethod
    def write_commit(self, folder: str, commit: Commit) -> None:
        """Write the commit file, which makes the folder a step, if the lease is held."""

    @abstractmethod
    def may_have(self, folder: str, commit: Commit) -> bool:
        """Return whether the step exists after `write_commit` has failed, or may exist later."""

    @abstractmethod
    def discard(self, folder: str, save: str) -> None:
        """Remove the files of a save that is not committed. Errors are ignored."""

    def pin(self, folder: str) -> bool:
        """Mark a step, so that retention keeps it. Returns False if the step is gone."""
        self.mark_pinned(folder)
        # The saving process may have deleted it meanwhile.
        if self.has(folder):
            return True
        self.unpin(folder)
        return False

    @abstractmethod
    def mark_pinned(self, folder: str) -> None:
        """Write the mark of a pinned step."""

    @abstractmethod
    def unpin(self, folder: str) -> None:
        """Remove the mark of a pinned step."""

    @abstractmethod
    def delete(self, folder: str) -> None:
        """Delete a step that is not pinned: the commit file first, and then the files that it names.

        Another process may pin the step at any time. It looks for the commit file afterwards, so a mark
        that is made after the commit file is gone was refused.
        """

    @abstractmethod
    def set_aside(self, folder: str) -> str:
        """Abandon a step that training has gone back from, and return the name of its folder."""

    @abstractmethod
    def put_back(self, names: Iterable[str]) -> None:
        """Undo `set_aside`, whose results are `names`, since no other step was saved."""

    def is_damage(self, error: Exception) -> bool:
        """Return whether an error is about the bytes of a step."""
        if isinstance(error, CheckpointError):
            return error.code in _DAMAGES
        return isinstance(error, HeaderError | IntegrityError | FileNotFoundError)

    def is_there(self, folder: str, commit: Commit | None) -> bool:
        """Return whether a step is the one that was read, and has not been deleted or replaced meanwhile."""
        if commit is None:
            return self.has(folder)
        try:
            return self.read(folder).save == commit.save
        except FileNotFoundError:
            return False
        except CheckpointError:
            return True

    def known(self, folder: str) -> Commit | None:
        """Return the commit of a step. None if it is damaged.

        Raises
        ------
        CheckpointError
            A later version of ingot or another program wrote it.
        """
        try:
            return self.read(folder)
        except CheckpointError as error:
            if error.code != "invalid-commit":
                raise
            return None

    def commits(self) -> dict[int, Commit]:
        """Return the commits by step, without damaged ones and later versions."""
        found = {}
        for step in self.numbers():
            with suppress(SafetensorError, FileNotFoundError):
                found[step] = self.read(self.folder(step))
        return found

    def apply(self, rules: Rules) -> None:
        """Delete the steps that no rule keeps. The last step that is whole stays in any case."""
        if rules.keep is None:
            return
        commits = self.commits()
        kept = rules.kept(commits)
        surplus = [step for step in commits if step not in kept]
        if not surplus:
            return
        last = next((step for step in sorted(commits, reverse=True) if self._is_whole(commits[step])), None)
        for step in surplus:
            if step != last:
                self.delete(self.folder(step))

    def _is_whole(self, commit: Commit) -> bool:
        try:
            self.check(self.folder(commit.step), commit)
        except (SafetensorError, OSError):
            return False
        return True
