"""The steps of a folder of a store: FORMAT.md, "Folders of checkpoints".

A store cannot rename objects, and may carry out a late request after others. So no name of an object has two
contents over time, except for leases: each save has a folder of its own, whose name has the number of the
lease and the id of the save. A late request of a process that has lost its lease meets no newer object.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

from ingot._base.options import Loading
from ingot._base.text import _escaped
from ingot._native import fetch_beside, fetch_start, list_objects, remove_objects, replace_object, shown_url
from ingot._read.door import open_checkpoint
from ingot._state import commit as commits
from ingot._state.commit import COMMIT, DELETING, MAX_NBYTES, PINNED, STATE, Commit, StoredFile
from ingot.errors import OptionError, SafetensorError
from ingot.typing import StorageOptions

from .disk import not_shared
from .steps import Steps
from .store_lease import StoreLease

#: An empty object beside the commit file: training has gone back from the step.
ABANDONED = "abandoned"
#: Seconds for which a request of a killed process may still be carried out. Its files stay as long.
LATE_SECONDS = 900.0
# A directory that was copied from a disk has no lease and no save in its name.
_FOLDER = re.compile(r"step-([0-9]{8,19})(?:-([0-9]{1,18})-([0-9a-f]{16}))?")


class Listed(NamedTuple):
    """An object: its name in the listed folder, its size, its ETag, and the seconds since it was written."""

    name: str
    nbytes: int
    tag: str
    age: float


class StoreSteps(Steps):
    """The steps of a folder of a store.

    Parameters
    ----------
    url : str
        The URL of the folder.
    options : dict, optional
        The `storage_options` of requests.
    """

    setting_aside = "marked as abandoned:"

    def __init__(self, url: str, options: StorageOptions | None) -> None:
        self._url, self.options = url.rstrip("/"), options
        self.directory = shown_url(self._url)
        if "?" in url:
            # Requests that list it would contain a signature that the caller takes for a query.
            reason = f"Checkpoints(): {_escaped(self.directory)}: expected the URL of a folder, found a query"
            raise OptionError(reason, code="bad-url")
        self._lease = StoreLease(self._url, options)
        # The folders of the steps, as they were listed last.
        self._folders: dict[int, str] = {}
        # Commits by their folders, which never change.
        self._commits: dict[str, Commit] = {}
        # The commit that was sent last.
        self._sent = ""

    @property
    def lease(self) -> StoreLease:
        return self._lease

    def identity(self) -> str:
        return self.directory

    def check_directory(self) -> None:
        names = {one.name.partition("/")[0] for one in self._objects(self._url)}
        commits.check_names(self.directory, names, _FOLDER)

    def take_lease(self) -> None:
        if self._lease.acquire():
            self._clean()

    def numbers(self) -> list[int]:
        found: dict[int, tuple[int, float, str]] = {}
        for folder, objects in self._listed().items():
            step, lease = _facts(folder)
            if COMMIT in objects and ABANDONED not in objects:
                # A process that has lost its lease may have saved the same step: the later lease counts.
                found[step] = max(found.get(step, (-1, 0.0, "")), (lease, -objects[COMMIT].age, folder))
        self._folders = {step: f"{self._url}/{folder}" for step, (_, _, folder) in found.items()}
        known = {*self._folders.values()}
        self._commits = {folder: commit for folder, commit in self._commits.items() if folder in known}
        return sorted(found)

    def folder(self, step: int) -> str:
        # Another thread may have listed them again, after the step was deleted.
        return self._folders.get(step, commits.folder_of(self._url, step))

    def find(self, step: int) -> str | None:
        return self.folder(step) if step in self.numbers() else None

    def new_folder(self, step: int, save: str) -> str:
        return f"{self._url}/step-{step:08d}-{self._lease.number}-{save}"

    def path(self, folder: str, name: str) -> str:
        return f"{folder}/{name}"

    def making(self, folder: str) -> AbstractContextManager[None]:
        return nullcontext()

    def enter(self, folder: str) -> None:
        """Do nothing: an object needs no folder."""

    def has(self, folder: str) -> bool:
        return COMMIT in self._names(folder)

    def read(self, folder: str) -> Commit:
        return self._parsed(folder, self._content(folder, COMMIT))

    def stored(self, folder: str, name: str) -> StoredFile:
        url = self.path(folder, name)
        infos = open_checkpoint(url, Loading(storage_options=self.options)).infos()
        _, nbytes = fetch_start(url, 1, self.options)
        header, _ = fetch_start(url, nbytes - max((info.end for info in infos), default=0), self.options)
        return StoredFile(nbytes, len(header), commits.digest_of(header, shown_url(url)))

    def check(self, folder: str, commit: Commit, names: Iterable[str] | None = None) -> None:
        for name in commit.files if names is None else names:
            url, known = self.path(folder, name), commit.files[name]
            header, nbytes = fetch_start(url, known.header_nbytes, self.options)
            shown = shown_url(url)
            commits.check_size(shown, known, nbytes)
            commits.check_header(shown, known, commits.digest_of(header, shown))

    def write_commit(self, folder: str, commit: Commit) -> None:
        sizes = {one.name: one.nbytes for one in self._objects(folder)}
        for name, known in commit.files.items():
            if sizes.get(name) != known.nbytes:
                raise not_shared(self._shown(folder, name), known)
        self._lease.check()
        self._sent, content = commit.save, commit.text()
        try:
            self._write(folder, COMMIT, content)
        except OSError as fault:
            with suppress(OSError):
                # The answer may have been lost.
                if self._content(folder, COMMIT) == content:
                    return
            shown = self._shown(folder, COMMIT)
            fault.add_note(f"the store may still write {shown}, and the step exists then")
            raise

    def may_have(self, folder: str, commit: Commit) -> bool:
        return self._sent == commit.save

    def discard(self, folder: str, save: str) -> None:
        with suppress(OSError):
            self._remove(folder, [name for name in self._names(folder) if save in name])

    def mark_pinned(self, folder: str) -> None:
        self._write(folder, PINNED, b"")

    def unpin(self, folder: str) -> None:
        self._remove(folder, [PINNED])

    def delete(self, folder: str) -> None:
        if PINNED in self._names(folder):
            return
        content = self._content(folder, COMMIT)
        self._write(folder, DELETING, content)
        self._remove(folder, [COMMIT])
        self._end_deletion(folder, content, self._names(folder))

    def _end_deletion(self, folder: str, content: bytes, names: Iterable[str]) -> None:
        """Remove the files of a step without a commit file, or write that file again if it is pinned."""
        if PINNED in names:
            self._write(folder, COMMIT, content)
            self._remove(folder, [DELETING])
            return
        surplus = {name for name in names if STATE.fullmatch(name)}
        with suppress(SafetensorError):
            surplus |= {*self._parsed(folder, content).files}
        self._remove(folder, [*surplus, PINNED, DELETING])

    def set_aside(self, folder: str) -> str:
        self.known(folder)
        self._write(folder, ABANDONED, b"")
        return _name_of(folder)

    def put_back(self, names: Iterable[str]) -> None:
        for name in names:
            self._remove(f"{self._url}/{name}", [ABANDONED])

    def is_damage(self, error: Exception) -> bool:
        # A store that cannot be reached is no damage.
        return getattr(error, "code", None) == "document-too-large" or super().is_damage(error)

    def commits(self) -> dict[int, Commit]:
        found = {}
        for step in self.numbers():
            folder = self.folder(step)
            with suppress(SafetensorError, FileNotFoundError):
                found[step] = self._commits.get(folder) or self.read(folder)
                self._commits[folder] = found[step]
        return found

    def _clean(self) -> None:
        """Finish deletions that were interrupted, and remove the files of saves that were."""
        for name, objects in self._listed().items():
            folder = f"{self._url}/{name}"
            if COMMIT in objects:
                self._remove(folder, [one for one in objects if one == DELETING])
            elif DELETING in objects:
                self._end_deletion(folder, self._content(folder, DELETING), objects)
            elif all(one.age > LATE_SECONDS for one in objects.values()):
                left = [one for one in objects if STATE.fullmatch(one) or one in (PINNED, ABANDONED)]
                self._remove(folder, left)

    # Requests.

    def _objects(self, folder: str) -> list[Listed]:
        return [Listed(*facts) for facts in list_objects(f"{folder}/", self.options)]

    def _names(self, folder: str) -> set[str]:
        return {one.name for one in self._objects(folder)}

    def _listed(self) -> dict[str, dict[str, Listed]]:
        """Return the objects of each folder of a step by their names."""
        found: dict[str, dict[str, Listed]] = defaultdict(dict)
        for one in self._objects(self._url):
            folder, _, name = one.name.partition("/")
            match = _FOLDER.fullmatch(folder)
            # A name with more zeros is another program's.
            if match and f"step-{int(match[1]):08d}" == _step_of(folder):
                found[folder][name] = one
        return found

    def _content(self, folder: str, name: str) -> bytes:
        return fetch_beside(f"{folder}/", name, MAX_NBYTES, self.options)[1]

    def _parsed(self, folder: str, content: bytes) -> Commit:
        return commits.parsed(content, self._shown(folder, COMMIT), _step_of(_name_of(folder)))

    def _write(self, folder: str, name: str, content: bytes) -> None:
        url = self.path(folder, name)
        replace_object(url, [content], overwrite=True, storage_options=self.options)

    def _remove(self, folder: str, names: Iterable[str]) -> None:
        urls = [self.path(folder, name) for name in names]
        while urls:
            # It raises the error of the first.
            del urls[: remove_objects(urls, self.options)]

    def _shown(self, folder: str, name: str) -> str:
        return shown_url(self.path(folder, name))


def _name_of(folder: str) -> str:
    return folder.rpartition("/")[2]


def _step_of(name: str) -> str:
    """Return the part of the name of a folder that a directory of a disk has."""
    return "-".join(name.split("-")[:2])


def _facts(name: str) -> tuple[int, int]:
    """Return the step and the lease in the name of a folder."""
    match = _FOLDER.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)
