"""Saving a state dict as several files and an index, as huggingface_hub does."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from secrets import token_hex

from ._serialize import is_durable, texts
from ._torch_model import duplicate_names, storage_ptr, storage_size
from .errors import OptionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    import torch

    from ._serialize import Path

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SUFFIX = "{suffix}"
_SIZE = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def save_sharded(
    state_dict: Mapping[str, torch.Tensor],
    directory: Path,
    max_shard_size: int | str = "5GB",
    filename_pattern: str = "model{suffix}.safetensors",
    metadata: Mapping[str, str] | None = None,
    *,
    durable: bool | None = None,
) -> None:
    """Save tensors to a directory, in several files where they are too large for one.

    The files, their names and the index are those of huggingface_hub's ``save_torch_state_dict``, byte
    for byte, so that every program that reads its checkpoints reads these.

    Parameters
    ----------
    state_dict : dict of str to torch.Tensor
        What to save. Of tensors that share memory the one that holds all of it is written, and the
        other names are noted in the metadata with the name that stands for them, as `save_model` does.
    directory : str, bytes or os.PathLike
        Where to write. It is made if it is not there. Files of an earlier checkpoint that `filename_pattern`
        fits, and no others, are removed when the new one is in place.
    max_shard_size : int or str
        The bytes of tensors that a file may hold: a number, or one with ``KB``, ``MB``, ``GB`` or
        ``TB``, which are powers of 1000. A tensor that is larger gets a file of its own.
    filename_pattern : str
        The names of the files, with ``{suffix}`` where ``-00001-of-00003`` goes. A single file has no suffix
        and no index. The index has ``.index.json`` after the name without suffix. ``.bt`` at the end writes
        bintensors files, which other programs do not look for.
    metadata : dict of str to str, optional
        Text to store in the index; in the file, where there is only one.
    durable : bool, optional
        Flush the files and the directory to the disk before returning. True by default, unless the
        environment has ``INGOT_DURABLE=0``.

    Raises
    ------
    OSError
        The directory cannot be made or written to.
    StorageError
        Writing a file failed.
    SharedMemoryError
        Tensors share memory, and none of them holds all of it. It is a `RuntimeError` too.
    ValueError, TypeError, SaveError
        As `save_file` does.
    OptionError
        `max_shard_size` is no such size, or `filename_pattern` is no name with one ``{suffix}``.

    Notes
    -----
    The index is written last. If the save fails or the power does, the directory holds the old
    checkpoint or the
    new one, whole: files are written under other names first, and where the old checkpoint has files of
    the same names, its index is pointed to hard links of them meanwhile. Only on a file system without hard
    links is there
    a moment, while files are renamed, in which neither is whole. What an interrupted save left behind,
    the next one removes. Two saves to one directory at the same time are not foreseen.
    """
    from .torch import _tensors

    limit = _nbytes(max_shard_size)
    place = _Place(os.fsdecode(directory), filename_pattern)
    own = _tensors(state_dict)
    shared = {dropped: kept for kept, others in duplicate_names(own).items() for dropped in others}
    tensors = {name: tensor for name, tensor in own.items() if name not in shared}
    shards = _split(tensors, limit)
    texts_of_user = texts(metadata) or {}
    notes = {name: kept for name, kept in shared.items() if name not in texts_of_user}
    names = place.names(len(shards))
    if len(shards) == 1:
        texts_of_file, index = {"format": "pt", **texts_of_user, **notes}, None
    else:
        texts_of_file = {"format": "pt"}
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(map(_size, tensors.values()))
        index = {"metadata": {"total_size": total, **texts_of_user, **notes}, "weight_map": weight_map}
    _write(place, dict(zip(names, shards, strict=True)), texts_of_file, index, is_durable(durable))


def _nbytes(size: int | str) -> int:
    """`size` in bytes."""
    if isinstance(size, int):
        return size
    if not isinstance(size, str):
        raise TypeError(f"max_shard_size must be an int or a str, found {type(size).__name__}")
    match = _SIZE.fullmatch(size)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise OptionError(
            f"max_shard_size {size!r} is no size: expected a number of bytes, or one with {', '.join(UNITS)}",
            code="invalid-size",
            expected=tuple(UNITS),
            found=size,
        )
    return int(float(match[1]) * unit)


def _size(tensor: torch.Tensor) -> int:
    return tensor.nelement() * tensor.itemsize


def _split(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    """The tensors of each file: in their order, as many as fit. One that is too large comes at once, alone.

    A tensor goes where one of the same storage went, after what is there already. At this point these
    are the empty ones, which all have none.
    """
    shards: list[dict[str, torch.Tensor]] = []
    current: dict[str, torch.Tensor] = {}
    filled = 0
    homes: dict[Any, dict[str, torch.Tensor]] = {}
    followers: list[tuple[str, Any]] = []
    for name, tensor in tensors.items():
        storage = tensor.device, storage_ptr(tensor), storage_size(tensor)
        if storage in homes:
            followers.append((name, storage))
            continue
        size = _size(tensor)
        if size > limit:
            homes[storage] = {name: tensor}
            shards.append(homes[storage])
            continue
        if filled + size > limit:
            shards.append(current)
            current, filled = {}, 0
        homes[storage] = current
        current[name] = tensor
        filled += size
    if current or not shards:
        shards.append(current)
    for name, storage in followers:
        homes[storage][name] = tensors[name]
    return shards


class _Place:
    """A directory, and which names in it are those of a checkpoint."""

    def __init__(self, directory: str, pattern: str) -> None:
        if not isinstance(pattern, str):
            raise TypeError(f"filename_pattern must be a str, found {type(pattern).__name__}")
        if pattern.count(_SUFFIX) != 1 or os.path.basename(pattern) != pattern or pattern.startswith("."):
            raise OptionError(
                f"filename_pattern {pattern!r} is not the name of a file with one {_SUFFIX}",
                code="invalid-pattern",
                found=pattern,
            )
        self.directory = directory
        self._pattern = pattern
        self.index = pattern.replace(_SUFFIX, "") + ".index.json"
        before, after = map(re.escape, pattern.split(_SUFFIX))
        self._files = re.compile(f"{before}(-[0-9]{{5,}}-of-[0-9]{{5,}})?{after}")
        self._hidden = re.compile(r"\.ingot-[0-9a-f]{8}\.(.+)")

    def names(self, count: int) -> list[str]:
        """The names of so many files."""
        if count == 1:
            return [self._pattern.replace(_SUFFIX, "")]
        numbers = range(1, count + 1)
        return [self._pattern.replace(_SUFFIX, f"-{number:05d}-of-{count:05d}") for number in numbers]

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def files(self) -> list[str]:
        """The names of all files here that belong to a checkpoint."""
        return [name for name in sorted(os.listdir(self.directory)) if self._files.fullmatch(name)]

    def leftovers(self) -> list[str]:
        """The names of what interrupted saves left here."""
        found = []
        for name in sorted(os.listdir(self.directory)):
            hidden = self._hidden.fullmatch(name)
            if hidden and (hidden[1] == self.index or self._files.fullmatch(hidden[1])):
                found.append(name)
        return found

    def flush(self) -> None:
        """Bring to the disk what was renamed and removed here."""
        if os.name == "nt":
            # Windows flushes no directories.
            return
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _write(
    place: _Place,
    shards: Mapping[str, dict[str, torch.Tensor]],
    metadata: dict[str, str],
    index: dict[str, object] | None,
    durable: bool,
) -> None:
    """Write all files under other names, then put them in place, the index last, and remove the old."""
    from .torch import save_file

    os.makedirs(place.directory, exist_ok=True)
    stale = place.leftovers()
    prefix = f".ingot-{token_hex(4)}."
    aside: list[str] = []
    try:
        for name, tensors in shards.items():
            aside.append(prefix + name)
            # What shares memory has been left out already.
            save_file(tensors, place.path(prefix + name), metadata, shared="copy", durable=durable)
        if index is not None:
            aside.append(prefix + place.index)
            _write_text(place.path(prefix + place.index), json.dumps(index, indent=2), durable)
        stale += _keep_old(place, shards, durable)
        for name in shards:
            os.replace(place.path(prefix + name), place.path(name))
        if durable:
            place.flush()
        if index is not None:
            os.replace(place.path(prefix + place.index), place.path(place.index))
        else:
            _remove(place, [place.index])
        if durable:
            place.flush()
    except BaseException:
        _remove(place, aside)
        raise
    _remove(place, stale + [name for name in place.files() if name not in shards])


def _keep_old(place: _Place, shards: Iterable[str], durable: bool) -> list[str]:
    """Point the old index to hard links of the files that are about to be replaced. Gives their names."""
    try:
        with open(place.path(place.index), encoding="utf-8") as file:
            old = json.load(file)
        weight_map = old["weight_map"]
        replaced = sorted(set(weight_map.values()) & set(shards))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        # Without an index that names them, there is nothing that would be half of one and half of another.
        return []
    prefix = f".ingot-{token_hex(4)}."
    links: list[str] = []
    try:
        for name in replaced:
            os.link(place.path(name), place.path(prefix + name))
            links.append(prefix + name)
    except OSError:
        # The file system has none, or the old checkpoint is not whole.
        _remove(place, links)
        return []
    if links:
        old["weight_map"] = {
            tensor: prefix + file if file in replaced else file for tensor, file in weight_map.items()
        }
        _write_text(place.path(prefix + place.index), json.dumps(old, indent=2), durable)
        os.replace(place.path(prefix + place.index), place.path(place.index))
        if durable:
            place.flush()
    return links


def _write_text(path: str, text: str, durable: bool) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def _remove(place: _Place, names: Iterable[str]) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            os.remove(place.path(name))
