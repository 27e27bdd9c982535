"""A checkpoint of several objects and an index in a store, which cannot rename objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from secrets import token_hex
from typing import Any

from ingot._base.checks import SUFFIX, checked_pattern
from ingot._base.options import Saving
from ingot._base.text import _escaped
from ingot._native import check_upload, fetch_beside, is_url, remove_objects, replace_object, shown_url
from ingot.typing import StorageOptions

from .shards import Place, rendered

# The most bytes of an index that are read. No index is larger.
_MOST_NBYTES = 1 << 28


class Folder:
    """A folder of a store, and the names of a new checkpoint's objects in it.

    The index has a fixed name. The shards of each save have names that no other save uses, so that a late
    request of a dead writer replaces nothing.
    """

    def __init__(self, url: str, pattern: str) -> None:
        checked_pattern(pattern)
        self.directory = url.removesuffix("/")
        self._pattern = pattern
        self._save = token_hex(8)
        self.index = pattern.replace(SUFFIX, "") + ".index.json"

    def names(self, count: int) -> list[str]:
        """Return the names of `count` shards."""
        return [self._named(f"{number:05d}-of-{count:05d}") for number in range(1, count + 1)]

    def path(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self.directory}/{name}"

    def all_shards(self) -> str:
        """Return a pattern for the URLs of the shards of this save, for messages."""
        return _escaped(shown_url(self.path(self._named("*"))))

    def _named(self, number: str) -> str:
        return self._pattern.replace(SUFFIX, f"-{number}-{self._save}")


def place_at(destination: str | bytes, pattern: str) -> Place | Folder:
    """Return the directory or the folder of a store where a checkpoint is written."""
    if isinstance(destination, str) and is_url(destination):
        return Folder(destination, pattern)
    return Place(destination, pattern)


def write_objects(
    folder: Folder,
    names: Collection[str],
    save: Callable[[str], None],
    index: Mapping[str, Any],
    how: Saving,
) -> None:
    """Write the shards of these names with `save`, and then the index.

    If this fails, the old index and its shards are as they were. The shards of this save are removed, unless
    the store may still write the index that names them. A note of the error names the remaining ones.
    """
    contents = rendered({**index})
    if not how.overwrite:
        # The condition of the last request decides, but most conflicts exist before the first shard is sent.
        check_upload(folder.path(folder.index), len(contents), how.storage_options)
    begun: list[str] = []
    try:
        for name in names:
            begun.append(name)
            save(name)
    except BaseException as fault:
        _remove(folder, begun, how, fault)
        raise
    _write_index(folder, names, contents, how)


def _write_index(folder: Folder, names: Collection[str], contents: bytes, how: Saving) -> None:
    url, options = folder.path(folder.index), how.storage_options
    try:
        replace_object(url, [contents], overwrite=how.overwrite, storage_options=options)
    except FileExistsError as fault:
        # An earlier attempt may have written it, if its answer and the check of its result were lost.
        found = _found(url, folder.index, options)
        if found == contents:
            return
        if found is None:
            _keep(folder, fault)
        else:
            _remove(folder, names, how, fault)
        raise
    except BaseException as fault:
        _keep(folder, fault)
        raise


def _found(url: str, name: str, options: StorageOptions | None) -> bytes | None:
    """Return the bytes of an object, or None if it cannot be read."""
    with suppress(OSError):
        return fetch_beside(url, name, _MOST_NBYTES, options)[1]
    return None


def _remove(folder: Folder, names: Collection[str], how: Saving, fault: BaseException) -> None:
    """Remove the shards of a failed save, and add a note to `fault` if some remain."""
    removed = 0
    # The error of the save matters more, even if removing is interrupted.
    with suppress(BaseException):
        removed = remove_objects([folder.path(name) for name in names], how.storage_options)
    if removed < len(names):
        fault.add_note(f"shards of this save remain, and no index names them: {folder.all_shards()}")


def _keep(folder: Folder, fault: BaseException) -> None:
    fault.add_note(f"the store may still write the index, and its shards remain: {folder.all_shards()}")
