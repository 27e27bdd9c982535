"""Load a training state that many ranks saved, or by many ranks, on any mesh.

Each rank opens all files, reads the stored parts that overlap its own parts of tensors, and compares them
with their digests. Nothing of the caller changes before all ranks have read theirs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from ingot._base import frameworks
from ingot._base.batches import batches
from ingot._base.options import Loading
from ingot._base.text import located
from ingot._native import Checkpoint
from ingot._ranks.local import held, is_distributed, whole_shape
from ingot._ranks.placements import Box, Part, moved
from ingot._read.door import open_checkpoint
from ingot._read.moves import Placement, misfit, placing
from ingot._state import optimizers
from ingot._state.commit import path_in
from ingot._state.decoder import fault
from ingot._state.objects import TreePath, lives_in, spelled
from ingot._state.restoring import Contents, Restoring, selected
from ingot._state.wrappers import Naming, namings_in, unwrapped
from ingot._write.states import tree_of
from ingot.errors import CheckpointError

from ._filling import packed, refuse_destination, writing
from ._save_state_by_ranks import PARTS_KEY
from ._tensors import DTYPES, wrap

# The bytes of stored parts that are read at a time.
_WINDOW_NBYTES = 64 << 20


class Piece(NamedTuple):
    """A stored part of a tensor."""

    file: int
    part: Part


class Info(NamedTuple):
    """The dtype and the whole shape of a tensor, as in a header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Files(Contents):
    """The files of a step. Tensors have their whole shapes."""

    pieces: dict[str, list[Piece]]
    opened: list[Checkpoint]
    infos: dict[str, Info]

    @classmethod
    def of(cls, tree: Checkpoint, others: Iterable[Checkpoint]) -> Files:
        """Return the files of a step, which are open: the one with the tree first."""
        found = cls(tree, tree)
        found.opened = [tree, *others]
        found.pieces, found.infos = defaultdict(list), {}
        for number, checkpoint in enumerate(found.opened):
            parts = _parts(checkpoint)
            for info in checkpoint.infos():
                part = parts.get(info.name)
                whole = Part.whole(packed(info.dtype, info.shape)) if part is None else part
                shape = info.shape if part is None else _unpacked(info.dtype, part.shape)
                found.pieces[info.name].append(Piece(number, whole))
                found.infos.setdefault(info.name, Info(info.name, info.dtype, shape, info.nbytes))
        return found

    def info(self, name: Any, path: TreePath) -> Any:
        if not isinstance(name, str) or name not in self.infos:
            raise fault(self.shown, path, f"the step has no tensor {name!r}")
        return self.infos[name]

    def raw(self, name: Any, path: TreePath) -> tuple[str, memoryview]:
        info = self.info(name, path)
        (piece, *_) = self.pieces[name]
        found = self.proven(piece.file, [name])[name]
        return info.dtype, memoryview(found.contiguous().view(-1).view(torch.uint8).numpy()).cast("B")

    def tree(self) -> Any:
        return tree_of(self.head(), self.shown, lambda name: self.raw(name, ())[1])

    def proven(self, file: int, names: list[str], wrap: Any = wrap) -> dict[str, Any]:
        """Return stored parts in memory of their own, compared with their digests."""
        return self.opened[file].proven(names, wrap, True, None)


def _parts(checkpoint: Checkpoint) -> dict[str, Part]:
    """Return the parts of tensors in a file. Others are whole."""
    text = (checkpoint.metadata() or {}).get(PARTS_KEY)
    if text is None:
        return {}
    try:
        record = json.loads(text)
        parts = [Part(tuple(shape), _intervals(sides)) for shape, sides in record["parts"]]
        found = {name: parts[number] for name, number in record["tensors"].items()}
        for name, part in found.items():
            info = checkpoint.info(name)
            if part.local_shape != packed(info.dtype, info.shape):
                raise ValueError(f"{name!r} has shape {list(info.shape)}, not {list(part.local_shape)}")
        return found
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{PARTS_KEY} in the metadata is invalid: {type(error).__name__}: {error}"
        raise located(CheckpointError, reason, code="invalid-parts", path=checkpoint.path) from None


def _intervals(sides: Any) -> Any:
    return tuple(tuple((int(begin), int(end)) for begin, end in side) for side in sides)


def _unpacked(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape as in a header: torch has two F4 elements in one."""
    return (*shape[:-1], 2 * shape[-1]) if dtype == "F4" and shape else shape


class Loader:
    """Loads steps into the objects of this rank. All ranks make one together.

    Parameters
    ----------
    states : States
        The training states of torch.
    into, types, how, device
        The arguments of the caller.
    ranks : Together
        The ranks.
    """

    def __init__(
        self, states: Any, into: Any, types: Iterable[type], how: Loading, device: Any, ranks: Any
    ) -> None:
        self._states, self._into, self._types = states, into, tuple(types)
        self._how, self._device, self._ranks = how, device, ranks
        with ranks.step("looking at the objects to fill"):
            lives = lives_in(into)
            own = _names_of(lives)
        gathered = ranks.gather(own, "looking at the objects to fill")
        # The names that another rank has, and this one has not: of other pipeline stages.
        self._theirs = {
            path: {name for one in gathered for name in one.get(path, ())} - names
            for path, names in own.items()
        }

    def read(self, folder: str, names: list[str], check: Callable[[Checkpoint], None]) -> Reading:
        """Read what this rank needs of the files with these names. The first has the tree."""
        how = Loading(backend="pread", storage_options=self._how.storage_options)
        opened = [open_checkpoint(path_in(folder, name), how) for name in names]
        for one in opened:
            check(one)
        contents = Files.of(opened[0], opened[1:])
        node = self._own_part(contents.tree())
        is_partial = self._how.keys is not None or self._how.drop is not None
        if is_partial:
            names_of: Any = _Names(contents)
            node = selected(node, Contents(names_of, names_of), self._how)
        restoring = Restoring(contents, self._states, self._into, self._types, is_partial)
        restoring.rank, restoring.ranks = self._ranks.rank, self._ranks.size
        restoring.known = self._states.prepare(restoring, {})
        restoring.planned(node)
        for live in _optimizers_in(restoring, node):
            _plan_distributed(live, restoring, contents)
        return Reading(self._states, contents, restoring, node, _placing(_Names(contents), self._device))

    def _own_part(self, node: Any) -> Any:
        """Return the tree without the names of other pipeline stages."""
        for path, theirs in self._theirs.items():
            inner = _at(node, path) if theirs else None
            if type(inner) is dict:
                _drop(inner, theirs)
        return node


class _Names:
    """The part of `Checkpoint` that selects tensors."""

    def __init__(self, contents: Files) -> None:
        self._infos, self.path = contents.infos, contents.checkpoint.path

    def all_names(self) -> list[str]:
        return [*self._infos]

    offset_names = all_names

    def info(self, name: str) -> Info:
        return self._infos[name]

    def __contains__(self, name: object) -> bool:
        return name in self._infos


def _placing(names: Any, device: Any) -> Callable[[str, torch.Tensor, Mapping[str, Any]], torch.Tensor]:
    """Return a function that moves a tensor to its device in a dict, or to the one of the caller."""
    chosen: Any = placing(lambda one: one, device)

    def place(name: str, tensor: torch.Tensor, devices: Mapping[str, Any]) -> torch.Tensor:
        target = chosen.of(names, name) if isinstance(chosen, Placement) else chosen
        target = devices.get(name, target)
        return tensor if target is None else tensor.to(target)

    return place


def _names_of(lives: Mapping[TreePath, Any]) -> dict[TreePath, set[str]]:
    """Return the names of the tensors of modules, and of the parameters of optimizers."""
    modules = optimizers.names_in(namings_in(lives))
    found: dict[TreePath, set[str]] = {}
    for path, live in lives.items():
        if isinstance(live, torch.nn.Module):
            module = unwrapped(live)
            found[path] = {*Naming(module).without(module.state_dict(keep_vars=True))}
        elif isinstance(live, torch.optim.Optimizer):
            names = optimizers.names_for(live, modules)
            if names is not None:
                found[path] = {names[id(one)] for one in optimizers.parameters(live)}
    return found


def _at(node: Any, path: TreePath) -> Any:
    """Return the node at a path of names of dicts, or None."""
    for step in path:
        if type(node) is dict:
            node = node.get(step)
        else:
            node = node[step] if type(node) is list and type(step) is int else None
    return node


def _drop(node: dict[str, Any], names: set[str]) -> None:
    """Remove names from the state of a module, or parameters from the state of an optimizer."""
    if "$ordered" in node:
        node = node["$ordered"][0]
    if "param_groups" in node and "state" in node:
        for group in node["param_groups"]:
            group["params"] = [name for name in group["params"] if name not in names]
        node = node["state"]
    for name in names:
        node.pop(name, None)


def _optimizers_in(restoring: Restoring, node: Any) -> Iterator[tuple[Any, TreePath, Any]]:
    """Yield the caller's optimizers that the tree has a state for."""
    for path, live in restoring.values.items():
        if isinstance(live, torch.optim.Optimizer):
            inner = _at(node, path)
            if optimizers.is_of_parameters(inner):
                yield live, path, inner


def _plan_distributed(live: tuple[Any, TreePath, Any], restoring: Restoring, contents: Files) -> None:
    """Plan to read the states of DTensors into new ones that are placed as their parameters."""
    optimizer, path, node = live
    keys = _keys(optimizer, node, optimizers.names_for(optimizer, restoring.known))
    for key, parameter in zip(keys, optimizers.parameters(optimizer), strict=False):
        for called, inner in (_state_of(node["state"], key) or {}).items():
            name = inner.get("$tensor") if type(inner) is dict else None
            info = contents.infos.get(name) if isinstance(name, str) else None
            if info is None or not is_distributed(parameter) or called == "step":
                continue
            if packed(info.dtype, info.shape) == whole_shape(parameter):
                with torch.no_grad():
                    made = _empty_like(parameter, DTYPES[info.dtype])
                restoring.filled[(*path, "state", key, called)] = made, info.name


def _keys(optimizer: torch.optim.Optimizer, node: Any, names: optimizers.Names | None) -> list[Any]:
    """Return the keys of an optimizer's parameters in the file."""
    own = optimizers.parameters(optimizer)
    listed = [group["params"] for group in node["param_groups"]]
    stored = [one for params in listed if type(params) is list for one in params]
    if not all(type(one) is str for one in stored) or not stored:
        # Integers in the order of the groups.
        return [*range(len(own))]
    return stored if names is None else [names[id(one)] for one in own]


def _state_of(states: Any, key: Any) -> Any:
    """Return the node of the state of a parameter, by its name or by an integer."""
    if "$dict" in states:
        return next((node for one, node in states["$dict"] if one == key), None)
    return states.get(key)


def _empty_like(parameter: Any, dtype: torch.dtype) -> torch.Tensor:
    made: torch.Tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        # Of a CheckpointableTensor.
        if hasattr(parameter, name) and not hasattr(made, name):
            setattr(made, name, getattr(parameter, name))
    return made


class Target(NamedTuple):
    """A tensor of the caller to fill: the name in the files, the part of this rank, and its memory."""

    name: str
    part: Part
    local: torch.Tensor
    whole: torch.Tensor


class Reading:
    """A state that is in memory, compared with its digests. `finish` changes the caller's objects."""

    def __init__(self, states: Any, contents: Files, restoring: Restoring, node: Any, place: Any) -> None:
        #: How the tree is restored.
        self.restoring = restoring
        self._states, self._node = states, node
        targets = [_target(path, *one) for path, one in restoring.filled.items()]
        groups = restoring.fresh()
        wholes = groups.pop(states.framework, [])
        wanted = {(one.name, one.part): None for one in targets}
        wanted |= {(name, Part.whole(packed(*contents.infos[name][1:3]))): None for name in wholes}
        found = _read(contents, [*wanted])
        self._filled = [(one, found[one.name, one.part]) for one in targets]
        self._loaded: dict[str, Any] = {
            name: place(name, found[name, Part.whole(packed(*contents.infos[name][1:3]))], restoring.devices)
            for name in wholes
        }
        for framework, names in groups.items():
            other = frameworks.adapter(framework).wrap
            for name in names:
                self._loaded |= contents.proven(contents.pieces[name][0].file, [name], other)

    def finish(self) -> tuple[Any, list[str]]:
        """Fill the caller's tensors, and call `load_state_dict`.

        Returns the tree, and the paths of states that each rank had for itself, and other ranks load.
        """
        with torch.no_grad(), writing({id(one.whole): one.whole for one, _ in self._filled}.values()):
            for one, values in self._filled:
                if one.local.numel():
                    one.local.copy_(values)
        found = self.restoring.restored(self._node, self._loaded)
        self._states.apply_all(self.restoring)
        return found, [*self.restoring.unfit]


def _target(path: TreePath, tensor: torch.Tensor, name: str) -> Target:
    place = spelled(path)
    if not is_distributed(tensor):
        refuse_destination(place, tensor)
        return Target(name, Part.whole(tensor.shape), tensor, tensor)
    try:
        part, local = held(tensor)
    except ValueError as error:
        raise misfit(place, str(error)) from None
    refuse_destination(place, local)
    return Target(name, part, local, tensor)


def _read(contents: Files, wanted: list[tuple[str, Part]]) -> dict[tuple[str, Part], torch.Tensor]:
    """Return the wanted parts of tensors, which are put together from the stored parts."""
    found: dict[tuple[str, Part], torch.Tensor] = {}
    by_file: dict[int, dict[str, list[tuple[tuple[str, Part], Part]]]] = defaultdict(dict)
    missing: dict[tuple[str, Part], int] = {}
    for one in wanted:
        name, part = one
        missing[one] = part.numel
        for file, stored in contents.pieces[name]:
            if part == stored or _overlaps(part, stored):
                by_file[file].setdefault(name, []).append((one, stored))
                if part == stored:
                    # A replica may be in another file too.
                    break
    for file, names in by_file.items():
        nbytes = partial(_nbytes, contents.opened[file])
        for batch in batches([*names], nbytes, _WINDOW_NBYTES):
            for name, values in contents.proven(file, batch).items():
                for one, stored in names[name]:
                    missing[one] -= _put(found, one, stored, values)
    for one, count in missing.items():
        if one not in found and not one[1].numel:
            dtype = DTYPES[contents.infos[one[0]].dtype]
            found[one] = torch.empty(one[1].local_shape, dtype=dtype, device="cpu")
        elif count:
            reason = f"the files lack {count} of {one[1].numel} elements of this rank's part"
            raise located(
                CheckpointError, reason, code="changed-step", path=contents.checkpoint.path, tensor=one[0]
            )
    return found


def _nbytes(checkpoint: Checkpoint, name: str) -> int:
    return checkpoint.info(name).nbytes


def _overlaps(one: Part, other: Part) -> bool:
    pairs = zip(one.intervals, other.intervals, strict=True)
    sides = (any(a < d and c < b for a, b in mine for c, d in theirs) for mine, theirs in pairs)
    return one.numel > 0 and other.numel > 0 and all(sides)


def _put(
    found: dict[tuple[str, Part], torch.Tensor], one: tuple[str, Part], stored: Part, values: torch.Tensor
) -> int:
    """Copy the overlap of a stored part, `values`, and a wanted one. Returns the number of elements."""
    part = one[1]
    if part == stored:
        found[one] = values
        return part.numel
    if one not in found:
        found[one] = torch.empty(part.local_shape, dtype=values.dtype, device="cpu")
    raw_of = values.view(torch.uint8) if values.itemsize == 1 else values
    into = found[one].view(torch.uint8) if values.itemsize == 1 else found[one]
    count = 0
    for box, place in part.boxes():
        for other, there in stored.boxes():
            inner = _common(box, other)
            if inner is not None:
                into[moved(place, box, inner)] = raw_of[moved(there, other, inner)]
                sizes = (side.stop - side.start for side in inner)
                count += _product(sizes)
    return count


def _product(sizes: Iterable[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def _common(one: Box, other: Box) -> Box | None:
    pairs = zip(one, other, strict=True)
    sides = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return sides if all(side.start < side.stop for side in sides) else None
