"""Load by `torch.distributed.checkpoint`."""

from __future__ import annotations

import dataclasses
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from math import prod
from typing import Any, Unpack
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ingot._base.checks import is_path
from ingot._base.frameworks import lacks
from ingot._base.options import Loading, checked, takes
from ingot._base.text import _escaped, _quoted, located
from ingot._native import Checkpoint, is_url
from ingot._ranks.alone import ALONE
from ingot._ranks.peers import Peers, this_node
from ingot._ranks.placements import Part
from ingot._read import door
from ingot._read.door import reading
from ingot._read.select import Label
from ingot._state.face import checked_types
from ingot._write.directory import PART, listed
from ingot.errors import CheckpointError, RankError, StorageError
from ingot.torch import _load_by_ranks
from ingot.torch._filling import packed
from ingot.torch._into import Slot, read
from ingot.torch._load_into import FOR_RANKS, ReadOnce, has_ranks
from ingot.torch._tensors import DTYPES
from ingot.typing import ReadOptions, Source

from .objects import Objects
from .parts import Chunk, begins

# The node, the path, and `Checkpoint.identity` with a digest of its text.
Version = tuple[str, str, tuple[str, bool] | None]

# The names that the manifest lists, and each file with its version.
Seen = tuple[list[str] | None, list[tuple[str, int, int, int]]]

# Opening a directory whose files may hold parts of tensors. All files must be of one save.


_PAUSE_SECONDS = 0.005


def settled(folder: str, open_whole: Callable[[], Checkpoint], how: Loading) -> list[Checkpoint]:
    """Open the checkpoint in a directory, again if a save replaces it during the call."""
    for left in reversed(range(door.TRIES)):
        try:
            found = _opened(folder, open_whole, how)
        except FileNotFoundError:
            found = None
            if not left:
                raise
        if found is not None:
            return found
        time.sleep(_PAUSE_SECONDS)
    reason = "no save to it has ended: expected the parts of one save"
    raise located(CheckpointError, reason, code="invalid-parts", path=folder)


def _opened(folder: str, open_whole: Callable[[], Checkpoint], how: Loading) -> list[Checkpoint] | None:
    """Open whole tensors, or all files of parts. None if a save is replacing the files."""
    if listed(folder) is not None:
        return _parts(folder, how)
    try:
        whole = open_whole()
    except (CheckpointError, IsADirectoryError):
        names = _names(folder)
        if len(names) < 2 and not any(map(PART.fullmatch, names)):
            raise
        opened = _parts(folder, how)
        if opened is not None and any(begins(one) is None for one in opened):
            # Several files of whole tensors without an index are not a checkpoint.
            raise
        return opened
    return [whole] if begins(whole) is None else _parts(folder, how)


def _parts(folder: str, how: Loading) -> list[Checkpoint] | None:
    before = _seen(folder)
    if before is None or not before[1]:
        return None
    opened = [door.open_checkpoint(os.path.join(folder, name), how, lent=True) for name, *_ in before[1]]
    return opened if _seen(folder) == before else None


def _seen(folder: str) -> Seen | None:
    """Read the manifest, the names of the files, and the manifest again.

    None if a save began or ended meanwhile.

    Files that are opened between two equal results are of one save, because a save keeps a manifest while it
    renames files.
    """
    before = listed(folder)
    files = []
    for name in _names(folder):
        found = os.stat(os.path.join(folder, name))
        files.append((name, found.st_ino, found.st_size, found.st_mtime_ns))
    return (before, files) if listed(folder) == before else None


def _names(folder: str) -> list[str]:
    """Return the names of the files that are parts of one checkpoint."""
    names = listed(folder)
    if names is not None:
        return names
    found = [name for name in sorted(os.listdir(folder)) if name.endswith(".safetensors") and name[0] != "."]
    # Beside files with names of parts, others are of another checkpoint.
    return [name for name in found if PART.fullmatch(name)] or found


class Reader(StorageReader):
    """Load from ordinary files, as the `storage_reader` of `torch.distributed.checkpoint.load`.

    Parameters
    ----------
    source : ingot.typing.Source
        A file, the index of a sharded checkpoint, a directory with one of these, a URL, or an object that
        holds a file, as for `ingot.open`. Or a directory whose files hold parts of tensors, as torch's
        `HuggingFaceStorageWriter(save_distributed=True)` and ``Writer(whole=False)`` write them. An object
        is not sent to other ranks: each rank opens its own.
    read_once : {"auto", "job", "node", False}
        How ranks share the reading, as for `ingot.torch.load_into`; by default each rank reads its own parts.
        Unless it is False, all ranks of `process_group` load together, and must be the ranks that call
        `load`, without its ``no_dist=True``.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that load together, the same as in the call of `load`. By default all ranks.
    types : iterable of class, optional
        Dataclasses, named tuples and enums in objects, as for `ingot.torch.load_state`. Without its class, an
        object is loaded as a dict.
    **options
        How the files are read: `ingot.typing.ReadOptions`.

    Raises
    ------
    OSError, HeaderError, CheckpointError, DtypeError, StorageError, RankError, OptionError
        Raised by `load`; `CheckpointException` has the errors of all ranks.

    Notes
    -----
    For any placements of the DTensors, each rank reads its own parts of all tensors at once into their
    memory, and converts floats to other floats. Tensors of the checkpoint that the state dict lacks are not
    read. An index decides which files belong to a checkpoint; other files in the directory are ignored.

    Objects that `Writer` has stored are loaded as `ingot.torch.load_state` loads them, and no code of the
    file is run. Planners expect pickles: they get pickles that this process has made of the loaded objects.

    A load reads one version of the files. If a save replaces files after ranks have opened them, all ranks
    open and read the new checkpoint. They raise if the plan of the load does not fit it, or if other
    ranks than `process_group` call `load`.

    Examples
    --------
    >>> import torch.distributed.checkpoint as dcp
    >>> state = {"wte": torch.zeros(8, 4)}
    >>> dcp.load(state, storage_reader=ingot.dcp.Reader("model.safetensors"))
    >>> state["wte"][0]
    tensor([0., 1., 2., 3.])
    """

    @takes(ReadOptions)
    def __init__(
        self,
        source: Source,
        *,
        read_once: ReadOnce = False,
        process_group: ProcessGroup | None = None,
        types: Iterable[type] = (),
        **options: Unpack[ReadOptions],
    ) -> None:
        given = checked(Reader.__init__, locals(), types=checked_types, **FOR_RANKS)
        self._types: tuple[type, ...] = given["types"]
        self._path, self._how = source, Loading.among(given)
        self._read_once, self._group = read_once, process_group
        self._load_id = uuid4().hex
        self._files: list[Checkpoint] = []

    @property
    def checkpoint_id(self) -> Any:
        """The source of the load."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from `checkpoint_id` if it is given."""
        if checkpoint_id is not None:
            self._path = checkpoint_id
        self._load_id = uuid4().hex
        self._files = []

    def read_metadata(self) -> Metadata:
        """Return the tensors of the checkpoint and their parts."""
        self._files = self._opened()
        self._objects = Objects(self._files, self._types)
        chunks: dict[str, list[Chunk]] = {}
        codes: dict[str, str] = {}
        for number, file in enumerate(self._files):
            places = begins(file)
            for info in file.infos():
                if info.name in self._objects.tensors:
                    continue
                shape = packed(info.dtype, info.shape)
                begin = (0,) * len(shape) if places is None else places[info.name]
                if codes.setdefault(info.name, info.dtype) != info.dtype:
                    raise self._misfit(info.name, f"dtype {codes[info.name]}", f"{info.dtype} in {file.path}")
                chunks.setdefault(info.name, []).append(Chunk(number, begin, shape))
        tensors = {name: self._tensor(name, codes[name], found) for name, found in chunks.items()}
        pairs = ((name, chunk) for name, found in chunks.items() for chunk in found)
        places_of = {MetadataIndex(name, chunk.begin): chunk for name, chunk in pairs}
        found_objects = {name: BytesStorageMetadata() for name in self._objects.names()}
        return Metadata(
            {**tensors, **found_objects},
            # No name is nested. Planners look it up when they load some names into an empty dict.
            planner_data={name: (name,) for name in (*tensors, *found_objects)},
            storage_data=places_of,
            storage_meta=StorageMeta(load_id=self._load_id),
        )

    def _opened(self) -> list[Checkpoint]:
        """Return the checkpoint, or the files of a directory that hold parts."""
        path: Any = self._path
        if not is_path(path) or is_url(os.fsdecode(path)) or not os.path.isdir(path):
            return [self._checkpoint()]
        with suppress(CheckpointError, OSError):
            # All ranks take part in this step, and then each finds its parts by itself.
            whole = self._checkpoint()
            if begins(whole) is None and listed(os.fsdecode(path)) is None:
                return [whole]
        return settled(os.fsdecode(path), partial(door.open_all, path, self._how), self._how)

    def _checkpoint(self) -> Checkpoint:
        if self._is_shared():
            return _load_by_ranks.open_once(partial(door.open_all, self._path, self._how), Peers(self._group))
        return door.open_all(self._path, self._how)

    def _is_shared(self) -> bool:
        """Return whether ranks load together."""
        return self._read_once is not False and has_ranks()

    def _tensor(self, name: str, code: str, chunks: list[Chunk]) -> TensorStorageMetadata:
        dtype = DTYPES.get(code)
        if dtype is None:
            raise lacks(f"torch {torch.__version__}", code)
        sides = zip(*(map(sum, zip(chunk.begin, chunk.shape, strict=True)) for chunk in chunks), strict=True)
        size = [max(ends) for ends in sides]
        found, expected = sum(prod(chunk.shape) for chunk in chunks), prod(size)
        if found != expected:
            where = f"{found} in {len(chunks)} parts"
            raise self._misfit(name, f"{expected} elements for shape {size}", where)
        places = ((torch.Size(chunk.begin), torch.Size(chunk.shape)) for chunk in chunks)
        parts = [ChunkStorageMetadata(*place) for place in places]
        return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), parts)

    def _misfit(self, name: str, expected: str, found: str) -> CheckpointError:
        problem = "the files do not have parts of one tensor"
        return self._fault(name, problem, expected, found, "invalid-parts")

    def _fault(self, name: str, problem: str, expected: str, found: str, code: str) -> CheckpointError:
        path: Any = self._path
        where = f"{_escaped(os.fsdecode(path))}: " if is_path(path) else ""
        message = f"{where}tensor {_quoted(name)}: {problem}: expected {expected}, found {found}"
        return CheckpointError(message, code=code, tensor=name, expected=expected, found=found)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Receive the coordinator's message."""
        self._chunks: dict[MetadataIndex, Chunk] = metadata.storage_data
        if not self._files:
            self._files = self._opened()
            self._objects = Objects(self._files, self._types)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Record the version of the files that this rank opened, and whether they stay open."""
        is_held = len(self._files) == 1 and not self._files[0].is_sharded
        return dataclasses.replace(plan, storage_data=(self._versions(), is_held))

    def _versions(self) -> list[Version]:
        """Return the node, the path and the version of each open checkpoint."""
        path: Any = self._path
        place = os.path.realpath(os.fsdecode(path)) if is_path(path) else ""
        return [(this_node(), place, _digest(file.identity())) for file in self._files]

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Record in each plan how many ranks must agree on a version when they read: 0 for none.

        Raise if ranks have opened different versions, and cannot agree.
        """
        versions, held = zip(*(plan.storage_data for plan in plans), strict=True)
        ranks = len(plans)
        if _are_alike(versions):
            ranks = 0 if all(held) else ranks
        elif not self._may_agree(ranks):
            raise _load_by_ranks.several_versions(self._files[0])
        return [dataclasses.replace(plan, storage_data=ranks) for plan in plans]

    def _may_agree(self, ranks: int) -> bool:
        """Return whether as many ranks call `load` as `process_group` has."""
        return self._is_shared() or (ranks > 1 and dist.get_world_size(self._group) == ranks)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items at once, each into the memory that the planner has for it."""
        # A planner may have made a plan of its own.
        ranks = plan.storage_data or 0
        peers = Peers(self._group) if self._may_agree(ranks) else None
        with (peers or ALONE).step("planning"):
            items = [item for item in plan.items if item.type is LoadItemType.TENSOR]
            resolved = [(item, planner.resolve_tensor(item).detach()) for item in items]
        held: list[tuple[ReadItem, io.BytesIO]] = []
        for left in reversed(range(door.TRIES)):
            try:
                self._read(resolved, peers)
                with (peers or ALONE).step("reading objects"):
                    held = self._pickled(plan)
                break
            except BaseException as fault:
                if not left or (peers is None and ranks != 1) or not _is_replaced(fault, peers):
                    raise
            self._open_again(resolved, peers)
        for item, tensor in resolved:
            planner.commit_tensor(item, tensor)
        for item, pickled in held:
            planner.load_bytes(item, pickled)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open_again(self, resolved: list[tuple[ReadItem, torch.Tensor]], peers: Peers | None) -> None:
        """Open the checkpoint that replaced the planned one. Raise if the plan does not fit it."""
        with (peers or ALONE).step("opening"):
            planned, self._chunks = self._chunks, self.read_metadata().storage_data
            for item, _ in resolved:
                index = item.storage_index
                found = self._chunks.get(index)
                if found is None or found.shape != planned[index].shape:
                    there = "no such part" if found is None else f"shape {list(found.shape)}"
                    problem = "a save replaced the files by others during the load: load them again"
                    expected = f"shape {list(planned[index].shape)}"
                    raise self._fault(index.fqn, problem, expected, there, "changed")

    def _read(self, resolved: list[tuple[ReadItem, torch.Tensor]], peers: Peers | None) -> None:
        """Read one version of the files, the same on all ranks."""
        slots = self._slots(resolved)
        if peers is not None and not _are_alike(peers.gather(self._versions(), "opening")):
            raise _load_by_ranks.several_versions(self._files[0])
        if self._is_shared() and peers is not None:
            for number, file in enumerate(self._files):
                # All ranks open each file, even those that read nothing from it.
                self._read_together(file, slots.get(number, []), peers)
            return
        with (peers or ALONE).step("reading"):
            for number, found in slots.items():
                with reading(self._files[number], self._how) as reads:
                    read(self._files[number], reads, found)

    def _read_together(self, file: Checkpoint, slots: list[Slot], peers: Peers) -> None:
        @contextmanager
        def prepare() -> Iterator[_load_by_ranks.Prepared]:
            with reading(file, self._how) as reads:
                yield _load_by_ranks.Prepared(file, slots, reads, self._path)

        # The slots are for the open files: they fit no others.
        _load_by_ranks.load(prepare, peers, self._read_once, tries=1)

    def _pickled(self, plan: LoadPlan) -> list[tuple[ReadItem, io.BytesIO]]:
        """Return the objects of a plan, pickled by this process."""
        items = [item for item in plan.items if item.type is not LoadItemType.TENSOR]
        return [(item, self._objects.pickled(item.storage_index.fqn, self._how)) for item in items]

    def _slots(self, resolved: list[tuple[ReadItem, torch.Tensor]]) -> dict[int, list[Slot]]:
        """Return the slots of each file."""
        # Of several items for one destination, such as tied weights, the last wins, as if each was copied in
        # order.
        by_place: dict[Any, tuple[int, Slot]] = {}
        for item, tensor in resolved:
            chunk = self._chunks[item.storage_index]
            wanted = zip(item.storage_offsets, item.lengths, strict=True)
            part = Part(chunk.shape, tuple(((at, at + size),) if size else () for at, size in wanted))
            name = item.storage_index.fqn
            one = Slot(_label(item), name, None if part.is_whole() else part, tensor)
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            by_place[place if tensor.numel() else id(item)] = chunk.file, one
        slots: dict[int, list[Slot]] = {}
        for file, one in by_place.values():
            slots.setdefault(file, []).append(one)
        return slots

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the checkpoint can be read from `checkpoint_id`."""
        return is_path(checkpoint_id)


def _are_alike(versions: Sequence[list[Version]]) -> bool:
    """Return whether all ranks opened the same versions."""
    is_even = len({len(files) for files in versions}) == 1
    return is_even and all(map(_load_by_ranks.are_one_version, zip(*versions, strict=True)))


def _digest(identity: tuple[str, bool] | None) -> tuple[str, bool] | None:
    """Return the same with a short text, since ranks send it to each other."""
    return None if identity is None else (sha256(identity[0].encode()).hexdigest(), identity[1])


def _is_replaced(fault: BaseException, peers: Peers | None) -> bool:
    """Return whether a rank found files that a save had replaced. If so, all ranks read again.

    Raise on all ranks if one rank raised another error.
    """
    may_pass = isinstance(fault, (StorageError, CheckpointError, RankError))
    is_own = getattr(fault, "code", None) == "changed"
    if peers is None:
        return is_own
    if isinstance(fault, RankError) and fault.code != "rank-failed":
        return False
    return peers.agree(None if may_pass else fault, "reading", is_own)


def _label(item: ReadItem) -> Label:
    """Return the name of the destination in messages, since a tensor may have several."""
    begin = ", ".join(map(str, item.dest_offsets))
    name = item.dest_index.fqn
    return Label(f"{name} at [{begin}]" if any(item.dest_offsets) else name)
