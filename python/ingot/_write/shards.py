"""A checkpoint of several files and an index, as huggingface_hub has them, in a directory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EEXIST
from os import strerror
from typing import Any, TypeVar

from ingot._base.checks import SUFFIX, Existing, checked_pattern
from ingot._base.options import Saving
from ingot._base.text import _quoted, located
from ingot._native import RECORD_KEYS, ShardIndex, local_path, replace_file
from ingot.errors import CheckpointError, StorageError
from ingot.typing import Path

from .directory import (
    MANIFEST,
    PART,
    PREFIX,
    flush_names,
    hidden,
    is_held,
    listed,
    locked,
    new_folders,
    recover,
    restore,
)
from .directory import NAME as LOCK

# Totals of all files in an index. They are computed again for other files.
_TOTALS = ("total_size", "total_parameters")


Shard = TypeVar("Shard")


def split(sizes: Iterable[int], limit: int) -> list[list[int]]:
    """Return the numbers of the tensors of each file: in order, as many as fit.

    Yield a tensor that is too large alone.
    """
    shards: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for number, size in enumerate(sizes):
        if size > limit:
            shards.append([number])
            continue
        if filled + size > limit:
            shards.append(current)
            current, filled = [], 0
        current.append(number)
        filled += size
    if current or not shards:
        shards.append(current)
    return shards


def index(
    files: Mapping[str, Iterable[str]],
    total_size: int,
    metadata: Mapping[str, str],
    records: Mapping[str, str] = {},
) -> dict[str, object]:
    """Return the index of these files, each with the names of its tensors, without metadata of one file.

    `records` are entries that describe these tensors.
    """
    weight_map = {name: file for file, names in files.items() for name in names}
    pairs = {"total_size": total_size, **of_index(metadata), **records}
    return {"metadata": pairs, "weight_map": weight_map}


class Place:
    """A directory, and the names of a checkpoint's files in it."""

    def __init__(self, directory: Path, pattern: str) -> None:
        checked_pattern(pattern)
        self.directory = os.fsdecode(local_path(directory))
        self._pattern = pattern
        self.index = pattern.replace(SUFFIX, "") + ".index.json"
        before, after = map(re.escape, pattern.split(SUFFIX))
        #: The file for tensors of objects that `torch.distributed.checkpoint` saves.
        self.objects = pattern.replace(SUFFIX, "-objects")
        numbered = f"{before}(-[0-9]{{5,}}-of-[0-9]{{5,}})?{after}"
        self._files = re.compile(f"{numbered}|{re.escape(self.objects)}|{PART.pattern}")
        # A save to such a name may have left its own temporary file too, which begins with a dot more.
        self._hidden = re.compile(rf"{PREFIX.pattern}(.+)|\.{PREFIX.pattern}(.+)\.[0-9a-f]{{16}}\.ingot-tmp")

    @classmethod
    def of_index(cls, directory: Path, index: str, names: Iterable[str]) -> Place:
        """Return the names of a checkpoint with this index, which are `names`.

        Raises
        ------
        CheckpointError
            The names are not numbered as huggingface_hub numbers them.
        """
        stem, dot, ending = index.removesuffix(".index.json").rpartition(".")
        place = cls(directory, f"{stem}{SUFFIX}{dot}{ending}")
        wrong = [name for name in (index, *names) if name != place.index and not place._files.fullmatch(name)]
        if wrong:
            reason = f"unexpected name of a file: {_quoted(wrong[0])}"
            raise located(CheckpointError, reason, code="invalid-shard-name", path=place.directory)
        return place

    def names(self, count: int) -> list[str]:
        """Return the names of `count` files."""
        if count == 1:
            return [self._pattern.replace(SUFFIX, "")]
        numbers = range(1, count + 1)
        return [self._pattern.replace(SUFFIX, f"-{number:05d}-of-{count:05d}") for number in numbers]

    def at(self, directory: str) -> Place:
        """Return the same names in another directory."""
        return Place(directory, self._pattern)

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def files(self) -> list[str]:
        """Return the names of all files here that belong to a checkpoint: whole tensors, or parts of them."""
        return [name for name in sorted(os.listdir(self.directory)) if self._files.fullmatch(name)]

    def leftovers(self) -> list[str]:
        """Return the names of the files that interrupted saves left."""
        found = []
        for name in sorted(os.listdir(self.directory)):
            hidden = self._hidden.fullmatch(name)
            of = hidden and (hidden[1] or hidden[2])
            if of and (of in (self.index, MANIFEST) or self._files.fullmatch(of)):
                found.append(name)
        return found

    def needed(self) -> set[str]:
        """Return the names of the files that the index or a replacement of parts needs.

        Raises `OSError` or `CheckpointError` if that cannot be read.
        """
        needed = set(listed(self.directory) or ())
        with suppress(FileNotFoundError):
            index = ShardIndex.read(self.path(self.index))
            needed |= set(index.shards if index else ())
        return needed

    def check(self, existing: Existing) -> None:
        """Raise if the directory contains a file of a checkpoint that must not be replaced."""
        if os.path.isdir(self.directory):
            for name in [*self.files(), self.index]:
                existing.check(self.path(name))

    def flush(self, durable: bool, so_far: str = "") -> None:
        """Flush the directory if `durable`. An error adds `so_far` to its message."""
        if not durable:
            return
        try:
            flush_names(self.directory)
        except OSError as fault:
            reason = f"could not flush the directory{so_far}: {fault.strerror}"
            raise located(
                StorageError, reason, code="write", path=self.directory, errno=fault.errno
            ) from fault


def write(
    place: Place,
    shards: Mapping[str, Shard],
    save: Callable[[str, Shard], None],
    index: dict[str, object] | bytes | None,
    how: Saving,
    prefix: str | None = None,
) -> None:
    """Write all files under temporary names, rename them, the index last, and remove the old files.

    `save` writes one shard to a path. The temporary names begin with `prefix`, by default a new one. If this
    fails, directories that it made are removed.
    """
    with aside(place, shards, index, how, prefix) as paths:
        for name, path in paths.items():
            save(path, shards[name])


@contextmanager
def aside(
    place: Place,
    names: Collection[str],
    index: dict[str, object] | bytes | None,
    how: Saving,
    prefix: str | None = None,
) -> Iterator[dict[str, str]]:
    """Yield temporary paths for files of these names, and rename the files after the block."""
    with alone(place, how.flush) as stale:
        with hidden(prefix) as prefix, _replacing(place, names, index, how, prefix) as kept:
            yield {name: place.path(prefix + name) for name in names}
        stale += kept
        # The new checkpoint is complete. Files that cannot be found or removed now are removed by the next
        # save.
        if how.overwrite:
            with suppress(OSError):
                stale += [name for name in place.files() if name not in names]


@contextmanager
def alone(place: Place, durable: bool) -> Iterator[list[str]]:
    """Hold the lock of a directory, which is made if it is missing, while the block saves a checkpoint to it.

    Yields a list of names. Their files are removed after the block, unless it fails: leftovers of killed
    saves, and the names that the block adds.
    """
    with new_folders(place.directory, durable):
        os.makedirs(place.directory, exist_ok=True)
        with locked(place.directory):
            recover(place.directory)
            # Their writers have ended, since a running save holds the lock.
            stale = place.leftovers()
            yield stale
            remove(place, stale)
    _tidy_siblings(place)


def _tidy_siblings(place: Place) -> None:
    """Remove leftovers of killed saves in directories beside this one whose names differ in numbers."""
    parent, name = os.path.split(os.path.realpath(place.directory))
    alike = re.compile(re.sub(r"\d+", r"\\d+", re.escape(name)))
    if not re.search(r"\d", name):
        return
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            # A save that ends removes the file of its lock.
            is_alike = alike.fullmatch(entry.name) and entry.name != name
            if is_alike and os.path.lexists(os.path.join(entry, LOCK)):
                with suppress(OSError, CheckpointError):
                    _tidy(place.at(entry.path))


def _tidy(place: Place) -> None:
    """Remove leftovers of a killed save, unless a save is running, and the directory if it is then empty."""
    with locked(place.directory, seconds=0):
        needed = place.needed()
        remove(place, [name for name in place.leftovers() if name not in needed])
    os.rmdir(place.directory)


@contextmanager
def _replacing(
    place: Place, names: Collection[str], index: dict[str, object] | bytes | None, how: Saving, prefix: str
) -> Iterator[list[str]]:
    """Rename the files that the block has written under names with `prefix`.

    Yields a list, which has the names of the replaced files after the block. If this fails, the old files
    have their names again.
    """
    # The names of new files, which are removed if this fails.
    made = [prefix + name for name in names]
    kept: list[str] = []
    is_whole = False
    existing, durable = how.existing, how.flush
    rename = os.replace if how.overwrite else _rename_new
    try:
        yield kept
        if index is not None:
            made.append(prefix + place.index)
            replace_file(place.path(prefix + place.index), [rendered(index)], durable=durable)
        # Files that were created in the meantime must stay too.
        place.check(existing)
        kept += _keep_old(place, names, durable)
        for name in names:
            rename(place.path(prefix + name), place.path(name))
            if not how.overwrite:
                made.append(name)
        if index is not None:
            place.flush(durable)
            rename(place.path(prefix + place.index), place.path(place.index))
        elif how.overwrite and os.path.lexists(place.path(place.index)):
            place.flush(durable)
            os.remove(place.path(place.index))
        # The new checkpoint is whole, and stays.
        is_whole = True
        place.flush(durable, ", though the checkpoint is written")
    except BaseException:
        # The child of a fork leaves the files to its parent.
        if not is_whole and is_held(place.directory):
            remove(place, made)
            _undo(place, kept)
        raise


def _rename_new(source: str, destination: str) -> None:
    """Rename a file, if no file has the new name."""
    try:
        # Unlike a rename, a link replaces nothing that was made a moment ago.
        os.link(source, destination)
    except FileExistsError:
        reason = f"{strerror(EEXIST)} — overwrite=True replaces it"
        raise FileExistsError(EEXIST, reason, destination) from None
    except OSError:
        # The file system has no links.
        os.replace(source, destination)
    else:
        # A hidden name that stays is removed by the next save.
        with suppress(OSError):
            os.remove(source)


def _keep_old(place: Place, shards: Iterable[str], durable: bool) -> list[str]:
    """Point the old index to hard links of old files that are about to be replaced. Return their names."""
    try:
        with open(place.path(place.index), encoding="utf-8") as file:
            old = json.load(file)
        weight_map = old["weight_map"]
        replaced = sorted(set(weight_map.values()) & set(shards))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        # Without an index that names them, no reader mixes these files with others.
        return []
    with hidden() as prefix:
        return _link_old(place, old, replaced, durable, prefix)


def _link_old(
    place: Place, old: dict[str, Any], replaced: list[str], durable: bool, prefix: str
) -> list[str]:
    """Link the `replaced` files and the index to names with `prefix`, and point the index to these names."""
    links: list[str] = []
    if not replaced:
        return links
    try:
        for name in [*replaced, place.index]:
            os.link(place.path(name), place.path(prefix + name))
            links.append(prefix + name)
    except OSError:
        # The file system has no hard links, or the old checkpoint is incomplete. Without the index, readers
        # reject the directory while its files belong to two checkpoints.
        remove(place, links)
        os.replace(place.path(place.index), place.path(prefix + place.index))
        return [prefix + place.index]
    weight_map = old["weight_map"].items()
    old["weight_map"] = {name: prefix + file if file in replaced else file for name, file in weight_map}
    with hidden() as another:
        try:
            replace_file(place.path(another + place.index), [rendered(old)], durable=durable)
            os.replace(place.path(another + place.index), place.path(place.index))
            place.flush(durable)
        except BaseException:
            remove(place, [another + place.index])
            _undo(place, links)
            raise
    return links


def _undo(place: Place, links: list[str]) -> None:
    """Rename the old files to their names, the index last, which names `links` until then.

    If that fails, it still names them: the old checkpoint is whole, and the next save cleans up.
    """
    with suppress(OSError):
        restore(place.directory, links)
        remove(place, links)


def rendered(index: dict[str, Any] | bytes) -> bytes:
    """Return the bytes of an index."""
    return index if isinstance(index, bytes) else json.dumps(index, indent=2).encode()


def remove(place: Place, names: Iterable[str]) -> None:
    """Remove these files. Errors are ignored."""
    for name in names:
        with suppress(OSError):
            os.remove(place.path(name))


def of_index(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a file that also holds for an index of several files."""
    return {key: text for key, text in metadata.items() if key not in (*RECORD_KEYS, *_TOTALS)}
