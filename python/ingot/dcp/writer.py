"""Saving by `torch.distributed.checkpoint`."""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple
from uuid import uuid4

import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ingot import _writer
from ingot._options import Existing, is_durable, is_path, texts
from ingot._shards import Place, aside, called, nbytes
from ingot._text import _quoted
from ingot.errors import OptionError, SaveError
from ingot.torch._files import save_file
from ingot.torch._ranks.local import Held
from ingot.torch._ranks.peers import Peers, this_node
from ingot.torch._ranks.placements import Part
from ingot.torch._ranks.saving import Files, Looked, Together, write
from ingot.torch._sharded import planned
from ingot.torch._tensors import storable

from . import parts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    from ingot.typing import Path

_SHARD = "shard-{rank:05d}-model-{number:05d}-of-{count:05d}.safetensors"


class _Local(NamedTuple):
    """What a rank tells the coordinator: its machine, and its names in their order."""

    node: str
    names: list[str]


class _Global(NamedTuple):
    """What the coordinator tells all: where to write, and which file each tensor is in."""

    paths: dict[str, str]
    files: dict[str, str]
    rank: int
    # Of ranks of several machines, who send what they have: the names in their order.
    names: list[str] | None = None


class Writer(StorageWriter):
    """Saves ordinary files: what `torch.distributed.checkpoint.save` takes as its `storage_writer`.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A directory, which is made if it is not there.
    max_shard_size, filename_pattern, metadata, durable, overwrite, replace_read_only
        As for `ingot.torch.save_sharded`.
    whole : bool
        Write whole tensors, as every program reads them: all ranks of a machine write to the same files, and
        of several machines each file has one writer, as in `ingot.torch.save_sharded`. With False each rank
        writes a file of its own, of the parts that it has, with ``DCP_SHARDING_INFO`` in its metadata as
        torch's `HuggingFaceStorageWriter(save_distributed=True)` has it: `Reader` and torch's
        `HuggingFaceStorageReader` read these, other programs do not. Of the options above
        only `durable`, `overwrite` and `replace_read_only` go with that.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that save together, as `save` is given it. By default all.

    Raises
    ------
    FileExistsError, OSError, StorageError, SaveError, RankError, OptionError
        In `save`, of which `CheckpointException` has those of all ranks. The old checkpoint is whole.

    Notes
    -----
    The files of whole tensors are those of `ingot.torch.save_sharded`, byte for byte, in one pass: there is
    no consolidation. They get their names when all ranks have written, the index last. `async_save` works
    with either, and writing holds the GIL for no longer than it takes to hand tensors over.

    A state dict holds tensors only. Objects that are none, as the ``param_groups`` of an optimizer, are
    refused by name.
    """

    def __init__(
        self,
        path: Path,
        max_shard_size: int | str = "5GB",
        *,
        filename_pattern: str = "model{suffix}.safetensors",
        metadata: Mapping[str, str] | None = None,
        durable: bool | None = None,
        overwrite: bool = False,
        replace_read_only: bool = False,
        whole: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._limit = nbytes(max_shard_size)
        self._pattern, self._durable = filename_pattern, is_durable(durable)
        self._metadata = texts(metadata) or {}
        self._existing = Existing(overwrite, replace_read_only)
        self._whole, self._group = whole, process_group
        self._save_id = uuid4().hex
        self._place = Place(path, filename_pattern)
        self._saving: ExitStack | None = None
        self._writers: dict[str, _writer.Writer] = {}

    @property
    def checkpoint_id(self) -> str:
        """The directory that is saved to."""
        return self._place.directory

    def storage_meta(self) -> StorageMeta:
        """Give what planners are told of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save to `checkpoint_id`, or to the same directory again."""
        self._give_up()
        if checkpoint_id is not None:
            self._place = Place(checkpoint_id, self._pattern)
        self._save_id = uuid4().hex

    def _give_up(self) -> None:
        """Take away what a save that did not come to its end has written."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self._writers = {}
            error = SaveError("the save was given up", code="abandoned")
            saving.__exit__(type(error), error, None)

    def __del__(self) -> None:
        if getattr(self, "_saving", None) is not None:
            self._give_up()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take a role; the coordinator makes the files, and puts them in place."""
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is no tensor, and note the order of the names."""
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
                raise SaveError(
                    f"{_quoted(item.index.fqn)}: files of tensors cannot hold an object that is none: save "
                    "the tensors of the state dict only, and the rest by torch.save",
                    code="no-tensor",
                    tensor=item.index.fqn,
                )
        if not getattr(plan, "usable", True):
            # It stands for the one that the planner has kept, with what was noted there.
            return plan
        names = [item.index.fqn for item in plan.items]
        return dataclasses.replace(plan, storage_data=_Local(this_node(), names))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Plan the files, and make them."""
        if not self._whole:
            self._refuse_other_shards()
            return [
                dataclasses.replace(plan, storage_data=_Global({}, {}, rank))
                for rank, plan in enumerate(plans)
            ]
        plans = _complete(plans)
        specs = _specs(plans)
        nodes = {plan.storage_data.node for plan in plans if plan.items}
        if len(nodes) > 1:
            self._place.check(self._existing)
            return [
                dataclasses.replace(plan, storage_data=_Global({}, {}, rank, [*specs]))
                for rank, plan in enumerate(plans)
            ]
        tensors, of_file, index = self._files({name: spec.nbytes for name, spec in specs.items()})
        with ExitStack() as saving:
            self._place.check(self._existing)
            paths = saving.enter_context(aside(self._place, tensors, index, self._durable, self._existing))
            for name, own in tensors.items():
                of_own = {tensor: specs[tensor].stored() for tensor in own}
                made = _writer.Writer(paths[name], of_own, of_file, durable=self._durable)
                self._writers[name] = saving.enter_context(made)
            self._saving = saving.pop_all()
        files = {tensor: name for name, own in tensors.items() for tensor in own}
        return [
            dataclasses.replace(plan, storage_data=_Global(paths, files, rank))
            for rank, plan in enumerate(plans)
        ]

    def _files(self, sizes: dict[str, int]) -> Files:
        """What is written of tensors of so many bytes, in their order."""
        homes = {name: name if nbytes else None for name, nbytes in sizes.items()}
        return Files(*planned(self._place, sizes, homes, self._limit, self._metadata, {}))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items."""
        where = plan.storage_data
        if not isinstance(where, _Global):
            raise _other_plans()
        whole = self._write_whole if where.names is None else self._send
        work = whole if self._whole else self._write_parts
        try:
            results = work(plan, planner, where)
        except BaseException:
            # Of the coordinator: nobody will put the files in place.
            self._give_up()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_whole(self, plan: SavePlan, planner: SavePlanner, where: _Global) -> list[WriteResult]:
        results = []
        with ExitStack() as joined:
            writers = dict(self._writers)
            for item in plan.items:
                file = where.files[item.index.fqn]
                hidden = os.path.basename(where.paths[file]).removesuffix(file)
                with called(hidden, ""):
                    if file not in writers:
                        writer = _writer.Writer.join(where.paths[file], durable=self._durable)
                        writers[file] = joined.enter_context(writer)
                    tensor = _values(planner, item)
                    begin = _begin(item)
                    box = tuple(slice(at, at + size) for at, size in zip(begin, tensor.shape, strict=True))
                    if storable(item.index.fqn, tensor) == "F4":
                        box = (*box[:-1], slice(2 * box[-1].start, 2 * box[-1].stop))
                    writers[file].write(item.index.fqn, tensor, box or ...)
                results.append(WriteResult(item.index, tensor.nbytes, file))
        return results

    def _send(self, plan: SavePlan, planner: SavePlanner, where: _Global) -> list[WriteResult]:
        """Save with ranks of other machines: a rank writes each file, and the first puts all in place."""
        peers = Peers(self._group)
        together = Together(partial(_looked, plan, planner), peers)
        files = self._files({name: together.specs[name].nbytes for name in where.names or ()})
        write(together, files, self._place, self._durable, self._existing, peers)
        homes = {tensor: name for name, own in files.tensors.items() for tensor in own}
        return [
            WriteResult(item.index, together.local[item.index.fqn].nbytes, homes[item.index.fqn])
            for item in plan.items
        ]

    def _write_parts(self, plan: SavePlan, planner: SavePlanner, where: _Global) -> list[WriteResult]:
        # A file has one tensor of a name: a second part of it goes to another file.
        shards: list[dict[str, WriteItem]] = []
        for item in plan.items:
            free = next((shard for shard in shards if item.index.fqn not in shard), None)
            if free is None:
                shards.append(free := {})
            free[item.index.fqn] = item
        results = []
        os.makedirs(self._place.directory, exist_ok=True)
        for number, shard in enumerate(shards, 1):
            name = _SHARD.format(rank=where.rank + 1, number=number, count=len(shards))
            tensors = {tensor: _values(planner, item) for tensor, item in shard.items()}
            noted = parts.metadata({tensor: _begin(item) for tensor, item in shard.items()})
            path = self._place.path(name)
            save_file(
                tensors,
                path,
                noted,
                shared="copy",
                durable=self._durable,
                replace_read_only=self._existing.replace_read_only,
            )
            results += [
                WriteResult(item.index, tensors[tensor].nbytes, name) for tensor, item in shard.items()
            ]
        return results

    def _refuse_other_shards(self) -> None:
        """Raise where parts of another save are in the directory, and have to stay."""
        for name in self._shards():
            self._existing.check(self._place.path(name))

    def _shards(self) -> list[str]:
        folder = self._place.directory
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        return [name for name in names if name.startswith("shard-") and name.endswith(".safetensors")]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put the files in place."""
        if not self._whole:
            written = {result.storage_data for some in results for result in some}
            # Of an earlier save by more ranks: they would be taken for parts of this one.
            for name in set(self._shards()) - written:
                os.remove(self._place.path(name))
            return
        saving, self._saving = self._saving, None
        if saving is None:
            # Ranks of several machines have agreed that all is in place.
            return
        with saving:
            for writer in self._writers.values():
                writer.commit()
        self._writers = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether it can be written to."""
        return is_path(checkpoint_id)


def _complete(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks, where the planner keeps them and gives only those that are others than before.

    The files have other names in each save, so that each rank needs a plan that says them.
    """
    if all(getattr(plan, "usable", True) for plan in plans):
        return plans
    kept = [one for one in SavePlanner._cached_global_plan.values() if len(one) == len(plans)]
    if len(kept) != 1 or not all(isinstance(plan.storage_data, _Local) for plan in kept[0]):
        raise _other_plans()
    return kept[0]


def _other_plans() -> OptionError:
    return OptionError(
        "enable_plan_caching: torch has kept plans of another planner or writer in this process, and these "
        "are not among them: use one of each with it, or DefaultSavePlanner(enable_plan_caching=False)",
        code="other-kept-plans",
    )


class _Spec(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def stored(self) -> tuple[torch.dtype, list[int]]:
        return self.dtype, [*self.shape]


def _specs(plans: list[SavePlan]) -> dict[str, _Spec]:
    """What the tensors are that ranks write, in the order in which they have them."""
    found: dict[str, _Spec] = {}
    for plan in plans:
        for item in plan.items:
            assert item.tensor_data is not None
            spec = _Spec(item.tensor_data.properties.dtype, tuple(item.tensor_data.size))
            if found.setdefault(item.index.fqn, spec) != spec:
                raise SaveError(
                    f"tensor {_quoted(item.index.fqn)}: ranks do not have the same: expected "
                    f"{found[item.index.fqn]}, found {spec}",
                    code="mismatch",
                    tensor=item.index.fqn,
                )
    # A replica is written by any rank, and stands where it stood before that was decided.
    order = dict.fromkeys(name for plan in plans for name in plan.storage_data.names)
    return {name: found[name] for name in order if name in found}


def _looked(plan: SavePlan, planner: SavePlanner) -> Looked:
    """What this rank has of each tensor that it was given to write."""
    found: dict[str, Held] = {}
    for item in plan.items:
        assert item.tensor_data is not None
        name, sizes = item.index.fqn, item.tensor_data.chunk.sizes
        if name in found:
            raise SaveError(
                f"tensor {_quoted(name)}: a rank has several parts of it, and ranks of several machines send "
                "each other one: write parts by ingot.dcp.Writer(…, whole=False)",
                code="several-parts",
                tensor=name,
            )
        sides = zip(_begin(item), sizes, strict=True)
        intervals = tuple(((at, at + size),) if size else () for at, size in sides)
        found[name] = Held(Part(tuple(item.tensor_data.size), intervals), _values(planner, item))
    return Looked(found, {})


def _values(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    data = planner.resolve_data(item)
    assert isinstance(data, torch.Tensor)
    return data.detach()


def _begin(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.offsets)
