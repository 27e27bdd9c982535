"""Save a state dict as several files and an index, as huggingface_hub does."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch

import ingot
from ingot._base.options import Saving, argument, checked, takes
from ingot._base.progress import Several, reporting_on
from ingot._base.text import located
from ingot._native import NewFile, shown_url
from ingot._native import destination as destination_of
from ingot._ranks.local import has_group, is_distributed, known_group
from ingot._write.directory import new_prefix
from ingot._write.save import new_file, put_later
from ingot._write.shards import Place, index, split, write
from ingot._write.stores import Folder, place_at, write_objects
from ingot.errors import OptionError, SaveError
from ingot.typing import CopyOptions, Path, StorageOptions

from ._devices import payload
from ._model import duplicate_names, storage_ptr, storage_size
from ._tensors import _export, _tensors, copied, storable


@overload
def save_sharded(
    tensors: Mapping[str, torch.Tensor],
    destination: Path,
    max_shard_size: int | str = "5GB",
    *,
    filename_pattern: str = "model{suffix}.safetensors",
    metadata: Mapping[str, str] | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    background: Literal[True],
    storage_options: StorageOptions | None = None,
    **options: Unpack[CopyOptions],
) -> ingot.SaveFuture: ...


@overload
def save_sharded(
    tensors: Mapping[str, torch.Tensor],
    destination: Path,
    max_shard_size: int | str = "5GB",
    *,
    filename_pattern: str = "model{suffix}.safetensors",
    metadata: Mapping[str, str] | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    background: Literal[False] = False,
    storage_options: StorageOptions | None = None,
    **options: Unpack[CopyOptions],
) -> None: ...


@takes(CopyOptions)
def save_sharded(
    tensors: Mapping[str, torch.Tensor],
    destination: Path,
    max_shard_size: int | str = "5GB",
    *,
    filename_pattern: str = "model{suffix}.safetensors",
    metadata: Mapping[str, str] | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    background: bool = False,
    storage_options: StorageOptions | None = None,
    **options: Unpack[CopyOptions],
) -> ingot.SaveFuture | None:
    """Save tensors to a directory, in several files if they are too large for one.

    The files, their names and the index equal huggingface_hub's ``save_torch_state_dict``, byte
    for byte, so that every program that reads its checkpoints reads these.

    Parameters
    ----------
    tensors : dict of str to torch.Tensor
        What to save, such as a state dict. Of tensors that share memory, the one that covers all of it is
        written, and the metadata records the other names with the name of that tensor, as `save_model` does.
    destination : str, bytes or os.PathLike
        Where to write: a directory, which is created if it does not exist, or a folder of a store, as
        ``"s3://bucket/run/"`` or ``"az://container/run/"``.
    max_shard_size, filename_pattern
        How many bytes a file may hold, and its name: `ingot.typing.ShardOptions`.
    metadata : dict of str to str, optional
        Text to store in the index, or in the file if there is only one.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that save together if tensors are DTensors or have the attributes of torch's
        ``CheckpointableTensor``: by default all ranks. All of them call this, with the same options. If a
        group is passed, they save together for tensors of any kind.
    background : bool
        Return an `ingot.SaveFuture` and write in a thread, as `save_file` does. For a `snapshot`, a rank
        copies only the parts of DTensors and the replicas that it writes.
    storage_options : dict of str to str, optional
        How the store is reached: `ingot.typing.StorageOptions`.
    **options
        How the files are written: `ingot.typing.SaveOptions`. `overwrite` replaces the checkpoint at
        `destination`: its files that match `filename_pattern`, and files of parts that
        ``ingot.dcp.Writer(whole=False)`` wrote, are removed when the new ones are in place. Without
        `checksums` the files are byte for byte as huggingface_hub writes them. `progress` counts the bytes
        that this rank writes.

    Returns
    -------
    None or ingot.SaveFuture
        The future of a background save, whose result is None. If ranks save together, it raises on all of
        them if one fails, and cannot be cancelled.

    Raises
    ------
    RankError
        Another rank failed, was lost, or has another dtype or shape for a name. The old checkpoint is
        unchanged.
    FileExistsError
        A file of a checkpoint is at `destination`, and `overwrite` is not set.
    OSError
        The directory cannot be made or written to.
    StorageError
        Writing a file failed, or another save to the directory is in progress (``code`` is ``"busy"``).
    SharedMemoryError
        Tensors share memory, and no tensor covers all of it. It is a `RuntimeError` too.
    ValueError, TypeError, SaveError
        As `save_file` does.
    OptionError
        `max_shard_size` is not a valid size, or `filename_pattern` is not a name with one ``{suffix}``.
        `destination` is a folder of a store, and ranks save together.

    Notes
    -----
    **Stores** cannot rename objects. Each save writes shards with names that no other save uses, and then the
    index, also for a single shard. The index is the only object that is replaced: readers find the old
    checkpoint or the new one, whole. `overwrite=False` is a condition of the request that writes the index;
    an index that exists before the save is an error before the first shard is sent. A save that fails
    removes its shards, or adds a note to the error that names the remaining ones. Shards of a replaced
    checkpoint stay, since another process may be reading them.

    **DTensors** (FSDP2, tensor and expert parallel) are written by the ranks that hold them, each element by
    one rank, and the files are byte for byte those that one process would write for the whole tensors. Names
    that only some ranks have, as for pipeline stages, are saved too. On one machine all ranks write to all
    files. On several machines each file is written by one rank, to which the others send their parts, at most
    96 MiB at a time. The first rank renames the files after each has been flushed by its writer. In the
    background the ranks use connections of their own (gloo), so that the program's collectives may continue.
    They agree on the plan before the call returns, and the call raises if they cannot.

    The index is written last. If the save fails or power is lost, the directory holds the whole old
    checkpoint or the whole new one: files are written under temporary names first, and if the old checkpoint
    has files of the same names, its index is pointed to hard links of them during the save. On a file system
    without hard links, neither checkpoint is complete while files are renamed. The next save removes
    leftovers of an interrupted one, also in directories beside this one whose names differ in numbers. A save
    locks the directory: a second one waits for up to a minute.

    Examples
    --------
    >>> ingot.torch.save_sharded(torch.nn.Linear(4, 8).state_dict(), "linear", max_shard_size="5GB")
    >>> sorted(ingot.torch.load_file("linear"))
    ['bias', 'weight']
    """
    arguments = {**locals()}
    checked(save_sharded, {"process_group": process_group}, process_group=known_group)
    together = process_group is not None or _are_distributed(tensors)

    def asked() -> _Asked:
        given: Any = checked(save_sharded, arguments, destination=destination_of)
        how, limit = Saving.among(save_sharded, given), given["max_shard_size"]
        place = place_at(given["destination"], filename_pattern)
        if isinstance(place, Folder):
            how.check_url(place.directory)
        elif background or together:
            # The absolute path now, on this rank.
            place = place.at(os.path.join(os.getcwd(), place.directory))
        return _Asked(argument(save_sharded, "tensors", tensors, _tensors), place, limit, how)

    if together:
        _check_has_ranks(tensors)
        return _save_together(asked, process_group)
    return _save_alone(asked())


class _Asked(NamedTuple):
    """The arguments of `save_sharded`, checked."""

    tensors: dict[str, torch.Tensor]
    place: Place | Folder
    limit: int
    how: Saving

    def options(self) -> dict[str, object]:
        """Return the options that must be equal on all ranks."""
        own = {"directory": os.path.realpath(self.place.directory), "filename_pattern": self.place.index}
        # Credentials are not sent to other ranks, which save to a directory.
        how = self.how._replace(durable=self.how.flush, progress=False, storage_options=None)
        return {**own, "max_shard_size": self.limit, **how._asdict()}


def _are_distributed(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether ranks hold parts of these tensors. Raises nothing that one rank alone would raise."""
    return isinstance(tensors, Mapping) and any(map(is_distributed, tensors.values()))


def _check_has_ranks(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise for parts of tensors if no other ranks could have the rest."""
    if has_group():
        return
    name = next((name for name, tensor in tensors.items() if is_distributed(tensor)), "")
    way_out = "call `torch.distributed.init_process_group` first"
    reason = f"it is a part of a tensor, and there are no other ranks for the rest: {way_out}"
    raise located(SaveError, reason, code="no-values", tensor=name)


def _save_alone(asked: _Asked) -> ingot.SaveFuture | None:
    own, place, limit, how = asked
    where = how.snapshot_of()
    if isinstance(place, Place):
        place.check(how.existing)
    # All tensors are checked before the first file is written.
    for name, tensor in own.items():
        storable(name, tensor)
    shared = _shared(own)
    tensors = {name: tensor for name, tensor in own.items() if name not in shared}
    homes = {
        name: (tensor.device, storage_ptr(tensor), storage_size(tensor)) for name, tensor in tensors.items()
    }
    sizes = {name: tensor.nelement() * tensor.itemsize for name, tensor in tensors.items()}
    names, of_file, of_index = planned(place, sizes, homes, limit, how.metadata or {}, shared)
    if how.background and where == "device":
        tensors = copied(tensors, where)
    # Aliases have been left out already.
    prefix = new_prefix() if isinstance(place, Place) else ""
    new = how._replace(overwrite=True, metadata=of_file)
    inner = {file: {name: tensors[name] for name in inside} for file, inside in names.items()}
    files = {
        file: new_file(place.path(prefix + file), own, payload, new, export=_export)
        for file, own in inner.items()
    }

    def put(write_last: Callable[..., None] = NewFile.write) -> None:
        last = [*files][-1]

        def save(path: str, file: str) -> None:
            nbytes = sum(sizes[name] for name in names[file])
            (write_last if file == last else NewFile.write)(files[file], steps.step(nbytes))

        with reporting_on(how.progress, "Saving", place.directory) as tell:
            steps = Several(tell, sum(sizes.values()))
            if isinstance(place, Folder):
                write_objects(place, files, lambda file: save(place.path(file), file), of_index or {}, how)
            else:
                write(place, {file: file for file in files}, save, of_index, how, prefix)

    if not how.background:
        put()
        return None
    return put_later(put, shown_url(place.directory), [*files.values()], where)


def _save_together(
    asked: Callable[[], _Asked], process_group: torch.distributed.ProcessGroup | None
) -> ingot.SaveFuture | None:
    """Save tensors of which ranks hold parts. All ranks call this. `asked` checks a rank's arguments."""
    # Imported here: most saves are of one process.
    from ingot._ranks.peers import Peers

    from ._save_by_ranks import Files, Together, collect, write, write_later

    peers = Peers(process_group)
    arguments: list[tuple[_Asked, Place]] = []

    def check() -> tuple[dict[str, object], None]:
        one = asked()
        if isinstance(one.place, Folder):
            reason = "ranks save together to a directory that all of them see, found a URL"
            raise located(OptionError, reason, code="url-for-path", path=shown_url(one.place.directory))
        if one.how.checksums:
            message = "checksums: a digest is of a whole tensor, and each rank has parts: save without"
            raise OptionError(message, code="parts-have-no-digest", found=one.how.checksums)
        arguments.append((one, one.place))
        return one.options(), None

    peers.same(check, "comparing options")
    (own, _, limit, how), place = arguments[0]
    with peers.step(f"looking at {place.directory}"):
        if not peers.rank:
            place.check(how.existing)
    together = Together(partial(collect, own, _shared), peers)
    specs = {name: spec for name, spec in together.specs.items() if name not in together.shared}
    # In one process the storages of empty tensors are equal.
    homes = {name: name if spec.nbytes else None for name, spec in specs.items()}
    sizes = {name: spec.nbytes for name, spec in specs.items()}
    files = Files(*planned(place, sizes, homes, limit, how.metadata or {}, together.shared))
    if how.background:
        return write_later(together, files, place, how, peers)
    write(together, files, place, how, peers)
    return None


def _shared(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names that are not written, each with the name of its written tensor."""
    return {dropped: kept for kept, others in duplicate_names(tensors).items() for dropped in others}


def planned(
    place: Place | Folder,
    sizes: Mapping[str, int],
    homes: Mapping[str, Hashable],
    limit: int,
    of_user: dict[str, str],
    shared: Mapping[str, str],
) -> tuple[dict[str, list[str]], dict[str, str], dict[str, object] | None]:
    """Return the names of the tensors of each file, the files' metadata, and the index, if any."""
    shards = _split(sizes, homes, limit)
    files = dict(zip(place.names(len(shards)), shards, strict=True))
    notes = {name: kept for name, kept in shared.items() if name not in of_user}
    # A store has an index always, since the name of a shard there is new.
    if len(shards) == 1 and isinstance(place, Place):
        return files, {"format": "pt"} | of_user | notes, None
    return files, {"format": "pt"}, index(files, sum(sizes.values()), of_user | notes)


def _split(sizes: Mapping[str, int], homes: Mapping[str, Hashable], limit: int) -> list[list[str]]:
    """Return the names of the tensors of each file.

    Tensors with an equal storage in `homes` go to the same file. Aliases are already removed, so that only
    empty tensors, which have no storage, are equal here.
    """
    first: dict[Hashable, str] = {}
    followers = []
    for name, home in homes.items():
        if first.setdefault(home, name) != name:
            followers.append((name, first[home]))
    names = [*first.values()]
    groups = split((sizes[name] for name in names), limit)
    shards = [[names[number] for number in numbers] for numbers in groups]
    for name, leader in followers:
        next(shard for shard in shards if leader in shard).append(name)
    return shards
