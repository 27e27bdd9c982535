"""Saving a state dict as several files and an index, as huggingface_hub does."""

from __future__ import annotations

from ingot._options import Existing, is_durable, texts
from ingot._shards import Place, index, nbytes, split, write

from ._files import save_file
from ._model import duplicate_names, storage_ptr, storage_size
from ._tensors import _tensors, storable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import torch

    from ingot.typing import Checksums, Path


def save_sharded(
    state_dict: Mapping[str, torch.Tensor],
    destination: Path,
    max_shard_size: int | str = "5GB",
    *,
    filename_pattern: str = "model{suffix}.safetensors",
    metadata: Mapping[str, str] | None = None,
    durable: bool | None = None,
    overwrite: bool = False,
    replace_read_only: bool = False,
    checksums: Checksums = None,
) -> None:
    """Save tensors to a directory, in several files where they are too large for one.

    The files, their names and the index are those of huggingface_hub's ``save_torch_state_dict``, byte
    for byte, so that every program that reads its checkpoints reads these.

    Parameters
    ----------
    state_dict : dict of str to torch.Tensor
        What to save. Of tensors that share memory the one that holds all of it is written, and the
        other names are noted in the metadata with the name that stands for them, as `save_model` does.
    destination : str, bytes or os.PathLike
        Where to write: a directory, which is made if it is not there.
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
    overwrite : bool
        Replace the checkpoint that is at `destination`: its files that `filename_pattern` fits, and no
        others, are removed when the new one is in place. Otherwise it is an error that it is there.
    replace_read_only : bool
        Replace read-only files of it too.
    checksums : {"blake3", "sha256", "xxh3", "xxh3_128"}, optional
        As for `save_file`: each file keeps a digest of every tensor in it, which `ingot.verify` and
        ``load_file(destination, verify=True)`` compare. Without it the files are those of huggingface_hub.

    Raises
    ------
    FileExistsError
        A file of a checkpoint is at `destination`, and `overwrite` is not set.
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
    The index is written last. If the save fails or the power does, the directory holds the old checkpoint or
    the new one, whole: files are written under other names first, and where the old checkpoint has files of
    the same names, its index is pointed to hard links of them meanwhile. Only on a file system without hard
    links is there a moment, while files are renamed, in which neither is whole. What an interrupted save left
    behind, the next one removes. Two saves to one directory at the same time are not foreseen.
    """
    limit = nbytes(max_shard_size)
    place, flush = Place(destination, filename_pattern), is_durable(durable)
    existing = Existing(overwrite, replace_read_only)
    place.check(existing)
    own = _tensors(state_dict)
    # All of them before the first file is written.
    for name, tensor in own.items():
        storable(name, tensor)
    shared = {dropped: kept for kept, others in duplicate_names(own).items() for dropped in others}
    tensors = {name: tensor for name, tensor in own.items() if name not in shared}
    shards = _split(tensors, limit)
    of_user = texts(metadata) or {}
    notes = {name: kept for name, kept in shared.items() if name not in of_user}
    files = dict(zip(place.names(len(shards)), shards, strict=True))
    of_file, of_index = {"format": "pt"}, None
    if len(shards) == 1:
        of_file |= of_user | notes
    else:
        of_index = index(files, sum(map(_size, tensors.values())), of_user | notes)

    def save(path: str, shard: dict[str, torch.Tensor]) -> None:
        # What shares memory has been left out already.
        save_file(shard, path, of_file, shared="copy", durable=flush, checksums=checksums)

    write(place, files, save, of_index, flush, existing)


def _size(tensor: torch.Tensor) -> int:
    return tensor.nelement() * tensor.itemsize


def _split(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    """The tensors of each file.

    A tensor goes where one of the same storage went, after what is there already. At this point these are the
    empty ones, which all have none.
    """
    homes: dict[Any, str] = {}
    followers = []
    for name, tensor in tensors.items():
        storage = tensor.device, storage_ptr(tensor), storage_size(tensor)
        if homes.setdefault(storage, name) != name:
            followers.append((name, homes[storage]))
    names = list(homes.values())
    shards = [
        {names[number]: tensors[names[number]] for number in numbers}
        for numbers in split((_size(tensors[name]) for name in names), limit)
    ]
    for name, first in followers:
        next(shard for shard in shards if first in shard)[name] = tensors[name]
    return shards
