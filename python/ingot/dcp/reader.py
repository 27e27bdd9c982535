"""Loading by `torch.distributed.checkpoint`."""

from __future__ import annotations

import dataclasses
import os
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from uuid import uuid4

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ingot._base.checks import is_path
from ingot._base.frameworks import lacks
from ingot._base.options import Loading, checked, takes
from ingot._base.text import _escaped, _quoted
from ingot._native import is_url
from ingot._ranks.peers import Peers, this_node
from ingot._ranks.placements import Part
from ingot._read import door
from ingot._read.reads import reading
from ingot._read.select import Label
from ingot._write.directory.parts import listed
from ingot.errors import CheckpointError
from ingot.torch import _load_by_ranks
from ingot.torch._into import Slot, read
from ingot.torch._load_into import FOR_RANKS, has_ranks
from ingot.torch._tensors import DTYPES
from ingot.typing import ReadOptions, Source

from .opening import settled
from .parts import Chunk, begins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
    from typing_extensions import Unpack

    from ingot._native import Checkpoint
    from ingot.torch._load_into import ReadOnce


class Reader(StorageReader):
    """Loads from ordinary files: what `torch.distributed.checkpoint.load` takes as its `storage_reader`.

    Parameters
    ----------
    source : ingot.typing.Source
        A file, the index of a sharded checkpoint, a directory with one of these, a URL, or an object that
        holds a file, as for `ingot.open`. Or a directory whose files hold parts of tensors, as torch's
        `HuggingFaceStorageWriter(save_distributed=True)` and ``Writer(whole=False)`` write them. An object
        is not sent to other ranks: each rank opens its own.
    read_once : {"auto", "job", "node", False}
        How ranks share the reading, as for `ingot.torch.load_into`; here by default each reads its own parts.
        But for False all ranks of `process_group` load together, and have to be those that `load` is called
        by: not with its ``no_dist=True``.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that load together, as `load` is given it. By default all.
    **options
        How the files are read: `ingot.typing.ReadOptions`.

    Raises
    ------
    OSError, HeaderError, CheckpointError, DtypeError, StorageError, RankError, OptionError
        In `load`, of which `CheckpointException` has those of all ranks.

    Notes
    -----
    Whatever the placements of the DTensors are, each rank reads its own parts, of all tensors at once, into
    their memory, and converts where both dtypes are floating point. Tensors of a checkpoint that the state
    dict lacks are not read. An index decides which files belong to a checkpoint: others in the directory are
    not looked at.

    A load reads one version of the files. If a save replaces them after some ranks have opened them, or while
    more files than the process holds open are read (`ingot.safe_open` has the number), all ranks raise, and
    the load can be repeated.
    """

    @takes(ReadOptions)
    def __init__(
        self,
        source: Source,
        *,
        read_once: ReadOnce = False,
        process_group: ProcessGroup | None = None,
        **options: Unpack[ReadOptions],
    ) -> None:
        own = {"read_once": read_once, "process_group": process_group}
        given = checked(Reader.__init__, {**own, **options}, **FOR_RANKS)
        self._path, self._how = source, Loading.among(given)
        self._read_once, self._group = read_once, process_group
        self._load_id = uuid4().hex
        self._files: list[Checkpoint] = []

    @property
    def checkpoint_id(self) -> Any:
        """What is loaded from."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to load from `checkpoint_id`, or from the same again."""
        if checkpoint_id is not None:
            self._path = checkpoint_id
        self._load_id = uuid4().hex
        self._files = []

    def read_metadata(self) -> Metadata:
        """Say which tensors there are, and in which parts."""
        self._files = self._opened()
        chunks: dict[str, list[Chunk]] = {}
        codes: dict[str, str] = {}
        for number, file in enumerate(self._files):
            places = begins(file)
            for info in file.infos():
                shape = (*info.shape[:-1], info.shape[-1] // 2) if info.dtype == "F4" else info.shape
                begin = (0,) * len(shape) if places is None else places[info.name]
                if codes.setdefault(info.name, info.dtype) != info.dtype:
                    raise self._misfit(info.name, f"dtype {codes[info.name]}", f"{info.dtype} in {file.path}")
                chunks.setdefault(info.name, []).append(Chunk(number, begin, tuple(shape)))
        tensors = {name: self._tensor(name, codes[name], found) for name, found in chunks.items()}
        places_of = {
            MetadataIndex(name, chunk.begin): chunk for name, found in chunks.items() for chunk in found
        }
        return Metadata(
            {**tensors},
            # No name is nested. Planners ask for it where they load some names into an empty dict.
            planner_data={name: (name,) for name in tensors},
            storage_data=places_of,
            storage_meta=StorageMeta(load_id=self._load_id),
        )

    def _opened(self) -> list[Checkpoint]:
        """The checkpoint, or each of the files in a directory that hold parts."""
        path: Any = self._path
        if not is_path(path) or is_url(os.fsdecode(path)) or not os.path.isdir(path):
            return [self._checkpoint()]
        with suppress(CheckpointError, OSError):
            # All ranks take part in this, and then each looks for parts by itself.
            whole = self._checkpoint()
            if begins(whole) is None and listed(os.fsdecode(path)) is None:
                return [whole]
        return settled(os.fsdecode(path), partial(door.open_all, path, self._how), self._how.backend)

    def _checkpoint(self) -> Checkpoint:
        if self._is_shared():
            return _load_by_ranks.open_once(partial(door.open_all, self._path, self._how), Peers(self._group))
        return door.open_all(self._path, self._how)

    def _is_shared(self) -> bool:
        """Whether ranks load together."""
        return self._read_once is not False and has_ranks()

    def _tensor(self, name: str, code: str, chunks: list[Chunk]) -> TensorStorageMetadata:
        dtype = DTYPES.get(code)
        if dtype is None:
            raise lacks(f"torch {torch.__version__}", code)
        sides = zip(*(map(sum, zip(chunk.begin, chunk.shape, strict=True)) for chunk in chunks), strict=True)
        size = [max(ends) for ends in sides]
        found, expected = sum(prod(chunk.shape) for chunk in chunks), prod(size)
        if found != expected:
            raise self._misfit(
                name, f"{expected} elements for shape {size}", f"{found} in {len(chunks)} parts"
            )
        return TensorStorageMetadata(
            TensorProperties(dtype=dtype),
            torch.Size(size),
            [ChunkStorageMetadata(torch.Size(chunk.begin), torch.Size(chunk.shape)) for chunk in chunks],
        )

    def _misfit(self, name: str, expected: str, found: str) -> CheckpointError:
        path: Any = self._path
        where = f"{_escaped(os.fsdecode(path))}: " if is_path(path) else ""
        return CheckpointError(
            f"{where}tensor {_quoted(name)}: the files do not have parts of one tensor: expected {expected}, "
            f"found {found}",
            code="invalid-parts",
            tensor=name,
            expected=expected,
            found=found,
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take what the coordinator read."""
        self._chunks: dict[MetadataIndex, Chunk] = metadata.storage_data
        if not self._files:
            self._files = self._opened()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which version of the files this rank has opened."""
        path: Any = self._path
        place = os.path.realpath(os.fsdecode(path)) if is_path(path) else ""
        versions = [(this_node(), place, file.identity()) for file in self._files]
        return dataclasses.replace(plan, storage_data=versions)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise if ranks have opened different versions of the files."""
        if self._is_shared():
            # They compare more than this before they read.
            return plans
        versions = [plan.storage_data for plan in plans]
        if len({len(files) for files in versions}) > 1 or not all(
            map(_load_by_ranks.are_one_version, zip(*versions, strict=True))
        ):
            raise _load_by_ranks.several_versions(self._files[0])
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items at once, each into the memory that the planner has for it."""
        if self._is_shared():
            resolved = self._read_together(plan, planner)
        else:
            slots, resolved = self._resolved(plan, planner)
            for number, found in slots.items():
                with reading(self._files[number], self._how) as (checkpoint, reads):
                    read(checkpoint, reads, found)
        for item, tensor in resolved:
            planner.commit_tensor(item, tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_together(self, plan: LoadPlan, planner: LoadPlanner) -> list[tuple[ReadItem, torch.Tensor]]:
        """Read with all ranks, who come to each file, of which some may want nothing."""
        peers = Peers(self._group)
        with peers.step("planning"):
            slots, resolved = self._resolved(plan, planner)
        peers.same(lambda: ({"number of files": len(self._files)}, None), "opening")
        for number, file in enumerate(self._files):
            self._read_one(file, slots.get(number, []), peers)
        return resolved

    def _read_one(self, file: Checkpoint, slots: list[Slot], peers: Peers) -> None:
        @contextmanager
        def look() -> Iterator[_load_by_ranks.Looked]:
            with reading(file, self._how) as (checkpoint, reads):
                yield _load_by_ranks.Looked(checkpoint, slots, reads, self._path)

        # The plan is for the files that are open: it fits no others.
        _load_by_ranks.load(look, peers, self._read_once, tries=1)

    def _resolved(
        self, plan: LoadPlan, planner: LoadPlanner
    ) -> tuple[dict[int, list[Slot]], list[tuple[ReadItem, torch.Tensor]]]:
        """What is read of each file, and the memory that the planner has for each item."""
        # Of items that go to one place, as those of tied weights, the last, as where each is copied in turn.
        by_place: dict[Any, tuple[int, Slot]] = {}
        resolved: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is not LoadItemType.TENSOR:
                raise self._misfit(name, "a tensor", "an object, which the files have none of")
            chunk = self._chunks[item.storage_index]
            tensor = planner.resolve_tensor(item).detach()
            wanted = zip(item.storage_offsets, item.lengths, strict=True)
            part = Part(chunk.shape, tuple(((at, at + size),) if size else () for at, size in wanted))
            one = Slot(_label(item), name, None if part.is_whole() else part, tensor)
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            by_place[place if tensor.numel() else id(item)] = chunk.file, one
            resolved.append((item, tensor))
        slots: dict[int, list[Slot]] = {}
        for file, one in by_place.values():
            slots.setdefault(file, []).append(one)
        return slots, resolved

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether it can be read from."""
        return is_path(checkpoint_id)


def _label(item: ReadItem) -> Label:
    """What messages call the memory that it is for: a tensor may have several."""
    begin = ", ".join(map(str, item.dest_offsets))
    name = item.dest_index.fqn
    return Label(f"{name} at [{begin}]" if any(item.dest_offsets) else name)
