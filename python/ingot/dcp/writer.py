"""Saving by `torch.distributed.checkpoint`."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Unpack, cast
from uuid import uuid4

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ingot._base.checks import is_path
from ingot._base.options import Saving, checked, takes
from ingot._base.text import located
from ingot._ranks.local import Held, known_group
from ingot._ranks.peers import Peers, this_node
from ingot._ranks.placements import Part, in_elements
from ingot._write import writer as _writer
from ingot._write.directory import MANIFEST, called, hidden, is_held, keep, recover
from ingot._write.shards import Place, alone, aside, index, remove
from ingot.errors import OptionError, RankError, SaveError
from ingot.torch._files import write_tensors
from ingot.torch._load_into import has_ranks
from ingot.torch._save_by_ranks import Collected, Files, Together, write
from ingot.torch._sharded import planned
from ingot.torch._tensors import storable
from ingot.typing import Path, ReplaceOptions

from . import objects, parts

# Saves that never finish because another rank failed. torch does not report such a failure to the
# coordinator's storage.
#
# torch 2.15 calls no method of a writer after another rank has failed, so a thread polls whether torch's call
# is still running. Alternatives that were considered:
#
# - A finalizer on the list that `Writer.write_data` returns runs when torch's call ends, but not while the
# traceback of its exception is referenced. A save that is repeated in the ``except`` block would wait for the
# directory's lock.
# - Synchronising with the other ranks in `Writer.write_data` needs the process group of the save, which torch
# does not pass, and hangs with ``no_dist=True``.
# - The coordinator could read the failure in pickled exceptions of other ranks, but planners fail too, in
# `finish_plan`, with exceptions that are not ours.
# - `sys.monitoring` (Python 3.12) reports unwinding for all code or for none.


# The function of torch that calls all methods of a writer for one save.
_CALLER = "_save_state_dict"
# The interval between polls. After torch's call has ended, its frame keeps its variables alive until the next
# poll.
_LOOK_SECONDS = 0.05


def give_up(saving: ExitStack) -> None:
    """Remove the files of a save that will not finish."""
    error = SaveError("the save was abandoned", code="abandoned")
    saving.__exit__(type(error), error, None)


def watch(pending: list[ExitStack]) -> None:
    """Start a thread that abandons the pending save if torch's call ends before the save has finished."""
    call: FrameType | None = sys._getframe()
    while call is not None and call.f_code.co_name != _CALLER:
        call = call.f_back
    if call is not None:
        given = pending, pending[0], call
        threading.Thread(target=_watch, args=given, name="ingot-pending-save", daemon=True).start()


def _watch(pending: list[ExitStack], saving: ExitStack, call: FrameType) -> None:
    while saving in pending and _is_running(call):
        time.sleep(_LOOK_SECONDS)
    with suppress(ValueError):
        pending.remove(saving)
        give_up(saving)


def _is_running(call: FrameType) -> bool:
    """Return whether a call is still running. If it has ended, clear its local variables.

    The stack of the other thread is not searched, because in CPython 3.11 its frames may be freed during the
    search.
    """
    try:
        call.clear()
    except RuntimeError:
        return True
    return False


# Replacing a checkpoint by files that contain parts of tensors, written by several ranks.


@contextmanager
def replacing(place: Place, how: Saving) -> Iterator[tuple[str, list[str]]]:
    """Yield a prefix for temporary names, and a list to which the names of the new files are added."""
    with alone(place, how.flush) as stale:
        place.check(how.existing)
        names: list[str] = []
        with hidden() as prefix:
            try:
                yield prefix, names
                stale += _publish(place, prefix, names, how.flush)
            except BaseException:
                # In a child after a fork, the files belong to the parent.
                if is_held(place.directory):
                    with suppress(OSError):
                        names = os.listdir(place.directory)
                        remove(place, [name for name in names if name.startswith(prefix)])
                raise


def _publish(place: Place, prefix: str, names: list[str], durable: bool) -> list[str]:
    """Rename the new files, and return the names of files that can be removed."""
    old = place.files()
    if os.path.lexists(place.path(place.index)):
        # Readers prefer an index, so the new files can be renamed while the index still exists.
        last, extra = place.index, []
        links = [name for name in old if name not in names]
    else:
        last, extra = MANIFEST, [name for name in old if name not in names]
        links = keep(place.directory, old, durable)
    try:
        place.flush(durable)
        for name in names:
            os.replace(place.path(prefix + name), place.path(name))
        for name in extra:
            os.remove(place.path(name))
        place.flush(durable)
        os.remove(place.path(last))
    except BaseException:
        if is_held(place.directory):
            with suppress(OSError):
                recover(place.directory)
            if last == place.index and os.path.lexists(place.path(last)):
                remove(place, names)
        raise
    place.flush(durable, ", though the checkpoint is written")
    return links


_SHARD = "shard-{rank:05d}-model-{number:05d}-of-{count:05d}.safetensors"


class _Local(NamedTuple):
    """A rank's message to the coordinator: its machine, its directory, and its tensor names in order."""

    node: str
    directory: str
    names: list[str]


class _Global(NamedTuple):
    """The coordinator's answer to all ranks: where to write, and which file each tensor is in."""

    paths: dict[str, str]
    files: dict[str, str]
    rank: int
    # The names in order, if ranks of several machines send their parts to each other.
    names: list[str] | None = None
    # The prefix of the paths of files that contain parts of tensors.
    prefix: str = ""


@takes(ReplaceOptions)
class Writer(StorageWriter):
    """Writer of ordinary files, for the `storage_writer` of `torch.distributed.checkpoint.save`.

    Parameters
    ----------
    destination : str, bytes or os.PathLike
        A directory, which is created if it does not exist.
    max_shard_size, filename_pattern, metadata
        As for `ingot.torch.save_sharded`.
    whole : bool
        Write whole tensors, which every program can read. All ranks of a machine write to the same files;
        with ranks on several machines, each file has one writer, as in `ingot.torch.save_sharded`. If False,
        each rank writes its parts of tensors to a file of its own, with ``DCP_SHARDING_INFO`` in the metadata
        like torch's `HuggingFaceStorageWriter(save_distributed=True)`: only `Reader` and torch's
        `HuggingFaceStorageReader` read these files. `max_shard_size`, `filename_pattern` and `metadata` have
        no effect then.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that save together, the same as in the call of `save`. By default all ranks.
    **options
        How the files are written: `ingot.typing.SaveOptions`. `overwrite` replaces a checkpoint in the
        directory, as `ingot.torch.save_sharded` does.

    Raises
    ------
    FileExistsError, OSError, StorageError, SaveError, RankError, OptionError
        Raised by `save`; `CheckpointException` has the errors of all ranks. The old checkpoint is unchanged.

    Notes
    -----
    The files of whole tensors are byte for byte those of `ingot.torch.save_sharded`, written in one pass
    without a consolidation step. The files are renamed when all ranks have written, the index last. A save
    locks the directory from planning to the end. ``use_collectives=False`` needs ``whole=False``.
    `async_save` works with both. Writing holds the GIL only while tensors are handed over.

    Objects that are not tensors, such as the ``param_groups`` of an optimizer, are stored as a training state
    (`ingot.torch.save_state`) in the index, or in the files of parts, and long ones as tensors. No pickle is
    written: objects that only pickle could store are refused by their path. They come from the
    ``lookup_object`` of the planner, which `DefaultSavePlanner` has.

    Examples
    --------
    >>> import torch.distributed.checkpoint as dcp
    >>> state = {"weight": torch.ones(4, 3)}
    >>> saved = dcp.save(state, storage_writer=ingot.dcp.Writer("checkpoint"))
    >>> ingot.open("checkpoint").keys()
    ['weight']
    """

    def __init__(
        self,
        destination: Path,
        max_shard_size: int | str = "5GB",
        *,
        filename_pattern: str = "model{suffix}.safetensors",
        metadata: Mapping[str, str] | None = None,
        whole: bool = True,
        process_group: ProcessGroup | None = None,
        **options: Unpack[ReplaceOptions],
    ) -> None:
        given: Any = checked(Writer, locals(), process_group=known_group)
        self._limit: int = given["max_shard_size"]
        self._pattern, self._how = filename_pattern, Saving.among(Writer, given)
        self._whole, self._group = whole, process_group
        self._save_id = uuid4().hex
        self._place = Place(destination, filename_pattern)
        # The save in progress, on the coordinator. It is in a list because `pop` is atomic: only one thread
        # finishes it.
        self._saving: list[ExitStack] = []
        # The names of files of parts, once all are written.
        self._names: list[str] = []
        # The files of whole tensors and their index, until they are renamed.
        self._files: Files | None = None
        self._prefix = ""
        self._writers: dict[str, _writer.Writer] = {}

    @property
    def checkpoint_id(self) -> str:
        """The directory of the checkpoint."""
        return self._place.directory

    def storage_meta(self) -> StorageMeta:
        """Return the identifiers of this save for planners."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save to `checkpoint_id`, or another save to the same directory."""
        self._give_up()
        if checkpoint_id is not None:
            self._place = Place(checkpoint_id, self._pattern)
        self._save_id = uuid4().hex

    def _give_up(self) -> None:
        """Remove the files of a save that did not finish."""
        self._writers, self._files = {}, None
        with suppress(IndexError):
            give_up(self._saving.pop())

    def __del__(self) -> None:
        if getattr(self, "_saving", None):
            self._give_up()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store this rank's role. The coordinator creates the files and renames them."""
        self._rank: int = kwargs.get("rank", 0)
        # Without torch's collectives, every rank plans and finishes by itself, and the ranks synchronise in
        # this class.
        self._plans_alone = not kwargs.get("use_collectives", True) and has_ranks()
        if self._plans_alone and self._whole:
            way_out = "save parts by ingot.dcp.Writer(…, whole=False)"
            why = "each rank plans its own tensors, and whole tensors need one plan"
            message = f"use_collectives=False: {why}: {way_out}"
            raise OptionError(message, code="parts-only", found=False)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Record the order of the names of tensors."""
        if not getattr(plan, "usable", True):
            # The planner cached an equal plan, which already has this data.
            return plan
        names = [item.index.fqn for item in plan.items if not objects.is_object(item)]
        directory = os.path.realpath(self._place.directory)
        return dataclasses.replace(plan, storage_data=_Local(this_node(), directory, names))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Plan the files, and create them."""
        self._give_up()
        self._check_directories(plans)
        plans = _complete(plans)
        if not self._whole:
            prefix = self._begin_parts_together() if self._plans_alone else self._begin_parts()
            first = self._rank if self._plans_alone else 0
            noted = (_Global({}, {}, rank, prefix=prefix) for rank in range(first, first + len(plans)))
            return [*map(_with_data, plans, noted)]
        specs = _specs(plans)
        nodes = {plan.storage_data.node for plan in plans if plan.items}
        if len(nodes) > 1:
            self._place.check(self._how.existing)
            noted = (_Global({}, {}, rank, [*specs]) for rank in range(len(plans)))
            return [*map(_with_data, plans, noted)]
        has_objects = any(objects.is_object(item) for plan in plans for item in plan.items)
        made = self._planned({name: spec.nbytes for name, spec in specs.items()}, has_objects)
        with ExitStack() as saving:
            self._place.check(self._how.existing)
            paths = saving.enter_context(aside(self._place, made.tensors, made.weight_map, self._how))
            for name, own in made.tensors.items():
                of_own = {tensor: specs[tensor] for tensor in own}
                writer = _writer.Writer(paths[name], of_own, made.metadata, **self._how.of_writer())
                self._writers[name] = saving.enter_context(writer)
            self._saving.append(saving.pop_all())
        self._files = made
        file, path = next(iter(paths.items()))
        self._prefix = os.path.basename(path).removesuffix(file)
        files = {tensor: name for name, own in made.tensors.items() for tensor in own}
        noted = (_Global(paths, files, rank) for rank in range(len(plans)))
        return [*map(_with_data, plans, noted)]

    def _check_directories(self, plans: list[SavePlan]) -> None:
        """Raise if a rank saves to another directory. Skips cached plans, which are of earlier saves."""
        own = os.path.realpath(self._place.directory)
        for rank, plan in enumerate(plans):
            local = plan.storage_data
            if getattr(plan, "usable", True) and isinstance(local, _Local) and local.directory != own:
                found = f"another directory than the coordinator: expected {own!r}, found {local.directory!r}"
                message = f"rank {rank} of {len(plans)} has {found}"
                raise RankError(message, code="ranks-differ", rank=rank)

    def _begin_parts(self) -> str:
        """Prepare the directory for files of parts. Return the prefix of their paths."""
        with ExitStack() as saving:
            prefix, self._names = saving.enter_context(replacing(self._place, self._how))
            self._saving.append(saving.pop_all())
        return os.path.join(os.path.abspath(self._place.directory), prefix)

    def _begin_parts_together(self) -> str:
        """Prepare the directory on rank 0 for all ranks."""
        peers, prefix = Peers(self._group), ""
        own = os.path.realpath(self._place.directory)
        peers.same(lambda: ({"directory": own}, None), "comparing options")
        with peers.step("preparing the directory"):
            if not peers.rank:
                prefix = self._begin_parts()
        shared: str = peers.broadcast(prefix, "preparing the directory")
        return shared

    def _planned(self, sizes: dict[str, int], has_objects: bool) -> Files:
        """Return the files for tensors of these sizes, in order. Objects need an index."""
        homes = {name: name if nbytes else None for name, nbytes in sizes.items()}
        metadata = self._how.metadata or {}
        found = Files(*planned(self._place, sizes, homes, self._limit, metadata, {}))
        if not has_objects or found.weight_map is not None:
            return found
        return found._replace(weight_map=index(found.tensors, sum(sizes.values()), metadata))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items."""
        where = plan.storage_data
        if not isinstance(where, _Global):
            raise _other_plans()
        try:
            results = self._written(plan, planner, where)
        except BaseException:
            # On the coordinator: without it, no other rank renames the files.
            self._give_up()
            raise
        if self._saving:
            watch(self._saving)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _written(self, plan: SavePlan, planner: SavePlanner, where: _Global) -> list[WriteResult]:
        """Write this rank's items. If each rank plans alone, a failure of one rank is raised on all."""
        if where.names is not None:
            return self._send(plan, planner, where)
        with Peers(self._group).step("writing") if self._plans_alone else nullcontext():
            work = self._write_whole if self._whole else self._write_parts
            return work(plan, planner, where)

    def _write_whole(self, plan: SavePlan, planner: SavePlanner, where: _Global) -> list[WriteResult]:
        held = objects.stored(plan, planner, where.files)
        results = _results_of(plan, held)
        with ExitStack() as joined:
            writers = dict(self._writers)
            for item in filter(_is_tensor, plan.items):
                file = where.files[item.index.fqn]
                hidden = os.path.basename(where.paths[file]).removesuffix(file)
                with called(hidden, ""):
                    if file not in writers:
                        writer = _writer.Writer.join(where.paths[file], durable=self._how.flush)
                        writers[file] = joined.enter_context(writer)
                    tensor = _values(planner, item)
                    begin = _begin(item)
                    box = tuple(slice(at, at + size) for at, size in zip(begin, tensor.shape, strict=True))
                    index = in_elements(box) if storable(item.index.fqn, tensor) == "F4" else box
                    writers[file].write(item.index.fqn, tensor, index or ...)
                results.append(WriteResult(item.index, tensor.nbytes, file))
        return results

    def _send(self, plan: SavePlan, planner: SavePlanner, where: _Global) -> list[WriteResult]:
        """Save with ranks of other machines: one rank writes each file, and rank 0 renames all files."""
        peers, names = Peers(self._group), where.names or []
        found: dict[str, objects.Stored] = {}
        with peers.step("encoding objects"):
            found = objects.stored(plan, planner, names)
        gathered = {
            name: one for some in peers.gather(found, "encoding objects") for name, one in some.items()
        }
        notes, extra = objects.record(gathered, names) if gathered else ({}, {})
        own = {} if peers.rank else extra
        together = Together(partial(_collected, plan, planner, own), peers)
        sizes = {name: together.specs[name].nbytes for name in (*names, *extra)}
        files = self._planned(sizes, bool(gathered))
        _note(files, notes)
        write(together, files, self._place, self._how, peers)
        homes = {tensor: name for name, own in files.tensors.items() for tensor in own}
        local = {name: tensor.nbytes for name, tensor in together.local.items()}
        indices = [item.index for item in filter(_is_tensor, plan.items)]
        # Rank 0 has stored the objects.
        return [WriteResult(index, local[index.fqn], homes[index.fqn]) for index in indices]

    def _write_parts(self, plan: SavePlan, planner: SavePlanner, where: _Global) -> list[WriteResult]:
        # A file has at most one tensor of each name, so a second part of a tensor goes to another file.
        shards: list[dict[str, WriteItem]] = []
        for item in filter(_is_tensor, plan.items):
            free = next((shard for shard in shards if item.index.fqn not in shard), None)
            if free is None:
                shards.append(free := {})
            free[item.index.fqn] = item
        names = [item.index.fqn for item in filter(_is_tensor, plan.items)]
        held = objects.stored(plan, planner, names)
        if held and not shards:
            shards.append({})
        results = []
        for number, shard in enumerate(shards, 1):
            name = _SHARD.format(rank=where.rank + 1, number=number, count=len(shards))
            tensors = {tensor: _values(planner, item) for tensor, item in shard.items()}
            begins = {tensor: _begin(item) for tensor, item in shard.items()}
            notes: dict[str, str] = {}
            if held and number == 1:
                # The first file of a rank has its objects.
                notes, extra = objects.record(held, shard)
                tensors |= extra
                begins |= {other: (0,) * tensor.ndim for other, tensor in extra.items()}
                indices = (item.index for item in filter(objects.is_object, plan.items))
                results += [WriteResult(index, held[index.fqn].nbytes, name) for index in indices]
            how = self._how._replace(metadata=parts.metadata(begins), progress=False)
            with called(os.path.basename(where.prefix), ""):
                write_tensors(tensors, where.prefix + name, how, "copy", records=notes)
            sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
            results += [WriteResult(item.index, sizes[tensor], name) for tensor, item in shard.items()]
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rename the files to their final names."""
        found = [result for some in results for result in some]
        held = {
            one.index.fqn: one.storage_data for one in found if isinstance(one.storage_data, objects.Stored)
        }
        if held:
            self._write_objects(held)
        written = {result.storage_data for result in found if isinstance(result.storage_data, str)}
        if self._plans_alone:
            peers = Peers(self._group)
            written = {name for names in peers.gather(written, "finishing") for name in names}
            with peers.step("finishing"):
                self._put_in_place(written)
        else:
            self._put_in_place(written)

    def _write_objects(self, held: dict[str, objects.Stored]) -> None:
        """Add the objects of all ranks to the index of whole tensors, and their tensors as a file."""
        if self._files is None or not self._saving:
            return
        try:
            self._add_objects(held, self._files)
        except BaseException:
            self._give_up()
            raise

    def _add_objects(self, held: dict[str, objects.Stored], files: Files) -> None:
        names = [name for own in files.tensors.values() for name in own]
        notes, extra = objects.record(held, names)
        twice = next((name for name in extra if name in {*names}), None)
        if twice is not None:
            raise located(SaveError, "an object has a tensor of this name too", code="mismatch", tensor=twice)
        _note(files, notes)
        if extra:
            name = self._place.objects
            # The directory's files get their names from this dict when the save ends.
            cast("dict[str, list[str]]", files.tensors)[name] = [*extra]
            weight_map: Any = cast("dict[str, Any]", files.weight_map)["weight_map"]
            weight_map |= dict.fromkeys(extra, name)
            with called(self._prefix, ""):
                how = self._how._replace(metadata={"format": "pt"}, progress=False)
                write_tensors(extra, self._place.path(self._prefix + name), how, "copy")

    def _put_in_place(self, written: set[str]) -> None:
        if not self._saving:
            # Another rank renames the files, or ranks of several machines have already agreed that all are
            # renamed.
            return
        with self._saving.pop():
            if not self._whole:
                self._names += sorted(written)
            for writer in self._writers.values():
                writer.commit()
        self._writers, self._files = {}, None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can be written to `checkpoint_id`."""
        return is_path(checkpoint_id)


def _with_data(plan: SavePlan, data: object) -> SavePlan:
    return dataclasses.replace(plan, storage_data=data)


def _complete(plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans of all ranks. A caching planner passes only the plans that have changed.

    The cached plans must be completed, since each rank's plan has the new names of the temporary files.
    """
    if all(getattr(plan, "usable", True) for plan in plans):
        return plans
    kept = [one for one in SavePlanner._cached_global_plan.values() if len(one) == len(plans)]
    if len(kept) != 1 or not all(isinstance(plan.storage_data, _Local) for plan in kept[0]):
        raise _other_plans()
    return kept[0]


def _other_plans() -> OptionError:
    kept = "torch has cached plans of another planner or writer in this process, and none of this one"
    way_out = "use only one planner and one writer, or DefaultSavePlanner(enable_plan_caching=False)"
    return OptionError(f"enable_plan_caching: {kept}: {way_out}", code="other-kept-plans")


class _Spec(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def _specs(plans: list[SavePlan]) -> dict[str, _Spec]:
    """Return the specs of the tensors that ranks write, in the ranks' order."""
    found: dict[str, _Spec] = {}
    for plan in plans:
        for item in filter(_is_tensor, plan.items):
            assert item.tensor_data is not None
            spec = _Spec(item.tensor_data.properties.dtype, tuple(item.tensor_data.size))
            if found.setdefault(item.index.fqn, spec) != spec:
                reason = f"its dtype or shape differs by rank: expected {found[item.index.fqn]}, found {spec}"
                raise located(SaveError, reason, code="mismatch", tensor=item.index.fqn)
    # Any rank may write a replica. The tensor keeps its position in the order before the writer was chosen.
    order = dict.fromkeys(name for plan in plans for name in plan.storage_data.names)
    return {name: found[name] for name in order if name in found}


def _is_tensor(item: WriteItem) -> bool:
    return not objects.is_object(item)


def _results_of(plan: SavePlan, held: Mapping[str, objects.Stored]) -> list[WriteResult]:
    """Return the results that send a rank's objects to the coordinator."""
    indices = (item.index for item in filter(objects.is_object, plan.items))
    return [WriteResult(index, held[index.fqn].nbytes, held[index.fqn]) for index in indices]


def _note(files: Files, notes: Mapping[str, str]) -> None:
    """Add entries to the metadata of the index, which is written last."""
    if notes:
        metadata: Any = cast("dict[str, Any]", files.weight_map)["metadata"]
        metadata |= notes


def _collected(plan: SavePlan, planner: SavePlanner, extra: Mapping[str, torch.Tensor]) -> Collected:
    """Return the part of each tensor that this rank writes, and whole tensors of objects."""
    found = {name: Held(Part.whole(tensor.shape), tensor) for name, tensor in extra.items()}
    for item in filter(_is_tensor, plan.items):
        assert item.tensor_data is not None
        name, sizes = item.index.fqn, item.tensor_data.chunk.sizes
        if name in found:
            why = "but ranks of several machines exchange one part per tensor"
            reason = f"a rank has several parts of it, {why}: write parts by ingot.dcp.Writer(…, whole=False)"
            raise located(SaveError, reason, code="several-parts", tensor=name)
        sides = zip(_begin(item), sizes, strict=True)
        intervals = tuple(((at, at + size),) if size else () for at, size in sides)
        found[name] = Held(Part(tuple(item.tensor_data.size), intervals), _values(planner, item))
    return Collected(found, {})


def _values(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    data = planner.resolve_data(item)
    assert isinstance(data, torch.Tensor)
    return data.detach()


def _begin(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.offsets)
