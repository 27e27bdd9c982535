"""Training states of torch: modules are filled in place, optimizer states have names of parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

import ingot
from ingot._adapters.face import Whole
from ingot._base.options import Loading, Saving
from ingot._base.text import _quoted
from ingot._native import Checkpoint, TensorInfo
from ingot._ranks.local import is_distributed, is_dtensor, whole_shape
from ingot._read.door import Reads
from ingot._read.load import tensors
from ingot._read.moves import Moving
from ingot._read.select import Label
from ingot._state import optimizers, schedulers
from ingot._state.decoder import fault
from ingot._state.face import Prepared, States, other_shape, payload
from ingot._state.objects import TreePath, is_live, spelled, within
from ingot._state.restoring import Contents, Live, Restoring, Stored
from ingot._state.rng import RNG as RNG
from ingot._state.sections import Kept
from ingot._state.wrappers import Naming, namings_in, unwrapped
from ingot._write.save import recorded, rendered, write_file
from ingot.errors import DestinationError, SaveError
from ingot.typing import Path, Writable

from ._devices import mover
from ._devices import payload as tensor_payload
from ._filling import packed
from ._into import Fitting, differences, fill_tensors, load_fitting, tensors_of
from ._shared import restore, views_among
from ._tensors import DTYPES, _export, _plain_ones, at, copied, wrap


class _States(States):
    last = (RNG,)

    def states_of(self, lives: Mapping[TreePath, Any]) -> dict[int, Any]:
        namings = namings_in(lives)
        modules = optimizers.names_in(namings)
        states: dict[int, Any] = {}
        numbered: dict[TreePath, list[TreePath]] = defaultdict(list)
        for path, live in lives.items():
            if isinstance(live, torch.nn.Module):
                states[id(live)] = namings[path].state()
                continue
            state = states[id(live)] = live.state_dict()
            if not isinstance(live, torch.optim.Optimizer) or not optimizers.is_of_parameters(state):
                continue
            names = optimizers.names_for(live, modules)
            if names is not None:
                states[id(live)] = optimizers.by_name(live, state, names)
            elif path and isinstance(path[-1], int):
                numbered[path[:-1]].append(path)
        for paths in numbered.values():
            _refuse_equal_keys(paths)
        return states

    def prepared(self, state: Any, ranks: Any, kept: Kept) -> Prepared:
        if ranks.size == 1:
            return super().prepared(state, ranks, kept)
        # Imported here: most saves are of one process.
        from ._save_state_by_ranks import prepared

        return prepared(self, state, ranks, kept)

    def loader(self, into: Any, types: Iterable[type], how: Loading, device: Any, ranks: Any) -> Any:
        from ._load_state_by_ranks import Loader

        return Loader(self, into, types, how, device, ranks)

    def has_parts(self, tree: Any) -> bool:
        for _, value in within(tree):
            tensors = value.parameters() if isinstance(value, torch.nn.Module) else [value]
            if any(map(is_distributed, tensors)):
                return True
        return False

    def place(self, own: Any, stored: Stored, path: TreePath, restoring: Restoring) -> None:
        if whole_shape(own) != stored.shape:
            raise other_shape(restoring.shown, path, whole_shape(own), stored.shape)
        if not _takes(own, stored):
            raise _other_dtype(restoring.shown, path, own, stored)
        restoring.filled[path] = own, stored.name

    def write(
        self, stored: dict[str, Any], record: dict[str, str], destination: Path | Writable, how: Saving
    ) -> ingot.SaveFuture | None:
        stored = {name: _whole(one) for name, one in stored.items()}
        own = {name: one for name, one in stored.items() if isinstance(one, torch.Tensor)}
        views = views_among(_plain_ones(own), "save `tensor.clone()` of one of them")
        stored = {name: one for name, one in stored.items() if name not in views}
        known = {"export": _export, "shared": "copy", "records": {**record, **rendered(views)}}
        return write_file(destination, stored, payload, how, copies=_copied, **known)

    def load(self, contents: Contents, names: list[str], move: Moving, reads: Reads) -> dict[str, Any]:
        views = recorded(contents.checkpoint.shared())
        bases = dict.fromkeys(views[name]["of"] if name in views else name for name in names)
        found = tensors(contents.source, bases, wrap, move, reads)
        restore(found, {name: views[name] for name in names if name in views})
        return found

    def fill(self, checkpoint: Checkpoint, filled: Mapping[TreePath, tuple[Any, str]], reads: Reads) -> None:
        own: dict[str, torch.Tensor] = {Label(spelled(path)): one for path, (one, _) in filled.items()}
        found = Fitting(own, [name for _, name in filled.values()], own)
        load_fitting(checkpoint, found.each_once(), reads)

    def shape_of(self, info: TensorInfo) -> tuple[int, ...]:
        return packed(info.dtype, info.shape)

    def prepare(self, restoring: Restoring, named_by: Mapping[TreePath, Any]) -> Any:
        lives = {path: value for path, value in restoring.values.items() if is_live(value)}
        for live in lives.values():
            if isinstance(live, torch.optim.Optimizer):
                restoring.add_classes(optimizers.classes_of(live))
        return optimizers.names_in(namings_in({**lives, **named_by}))

    def plan(self, live: Live, restoring: Restoring) -> None:
        if isinstance(live.value, torch.nn.Module):
            _plan_module(live, unwrapped(live.value), restoring)
            return
        super().plan(live, restoring)
        if isinstance(live.value, torch.optim.Optimizer):
            _plan_optimizer(live, restoring)
        elif isinstance(live.value, torch.optim.lr_scheduler.LRScheduler):
            _plan_scheduler(live, restoring)
        elif isinstance(live.value, torch.amp.GradScaler) and schedulers.is_of_torch(live.value):
            _plan_names(live, {*live.value.state_dict()}, restoring)
        elif type(live.value) is RNG:
            _plan_names(live, {"python", "torch"}, restoring)

    def state_for(self, live: Live, restoring: Restoring) -> Any:
        if isinstance(live.value, torch.nn.Module):
            return _module_state(live, unwrapped(live.value), restoring.is_partial)
        if isinstance(live.value, torch.optim.Optimizer) and optimizers.is_of_parameters(live.state):
            return optimizers.by_place(live.value, live.state, _names(live, restoring))
        return live.state

    def apply(self, live: Live) -> None:
        is_module = isinstance(live.value, torch.nn.Module)
        value = unwrapped(live.value) if is_module else live.value
        value.load_state_dict(live.state)


def _whole(tensor: Any) -> Any:
    """Return the plain tensor of a DTensor on a mesh of one rank, which has all of its values."""
    return tensor.to_local() if is_dtensor(tensor) and tensor.device_mesh.size() == 1 else tensor


def _module_state(live: Live, module: torch.nn.Module, is_partial: bool) -> Mapping[str, Any]:
    """Return the argument for `load_state_dict`: of a part of the tensors, with the module's others."""
    own = module.state_dict(keep_vars=True)
    found = Naming(module).within(live.state, own)
    return {**own, **found} if is_partial else found


def _names(live: Live, restoring: Restoring) -> optimizers.Names | None:
    return optimizers.names_for(live.value, restoring.known)


def _plan_module(live: Live, module: torch.nn.Module, restoring: Restoring) -> None:
    """Plan to fill the tensors of a module in place, if the names and shapes in the file match."""
    if not isinstance(live.state, Mapping):
        reason = f"expected the state of a {type(module).__name__}, found a {type(live.state).__name__}"
        raise fault(restoring.shown, live.path, reason, "state-names")
    own = _own_tensors(module)
    state = Naming(module).within(live.state, own)
    names = dict(zip(state, live.state, strict=True))
    stored = {name: one for name, one in state.items() if isinstance(one, Stored)}
    lists = {
        "missing in the file": [name for name in own if name not in stored and not restoring.is_partial],
        "unexpected in the file": [name for name in stored if name not in own],
    }
    shapes = [name for name in own if name in stored and whole_shape(own[name]) != stored[name].shape]
    dtypes = [name for name in own if name in stored and not _takes(own[name], stored[name])]
    if not shapes and not dtypes and not any(lists.values()):
        for name, one in stored.items():
            restoring.filled[(*live.path, names[name])] = own[name], one.name
        return
    if _changes_states(module):
        # `load_state_dict` gets new tensors, and decides.
        return
    if shapes:
        expected, found = whole_shape(own[shapes[0]]), stored[shapes[0]].shape
        raise other_shape(restoring.shown, (*live.path, shapes[0]), expected, found)
    if dtypes:
        raise _other_dtype(restoring.shown, (*live.path, dtypes[0]), own[dtypes[0]], stored[dtypes[0]])
    lines = differences(lists, stored, own)
    reason = f"the {type(module).__name__} and its state in the file have other tensors:"
    raise fault(restoring.shown, live.path, "\n".join([reason, *lines]), "state-names")


def _takes(own: torch.Tensor, stored: Stored) -> bool:
    """Return whether a tensor can be filled: with its dtype, or with other floats, which are converted."""
    found = DTYPES.get(stored.dtype)
    return found in (None, own.dtype) or (found.is_floating_point and own.dtype.is_floating_point)


def _other_dtype(shown: str, path: TreePath, own: torch.Tensor, stored: Stored) -> DestinationError:
    place, found = spelled(path), DTYPES[stored.dtype]
    message = f"{shown}: {_quoted(place)}: expected dtype {own.dtype}, found {found} in the file"
    return DestinationError(
        message, code="destination-dtype", tensor=place, expected=str(own.dtype), found=str(found)
    )


def _own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module by name; empty if its `state_dict` returns copies."""
    try:
        return tensors_of(module)
    except DestinationError:
        return {}


def _changes_states(module: torch.nn.Module) -> bool:
    """Return whether `load_state_dict` of a module may take other names and shapes than it has.

    The hooks of torch's own modules only add values that older versions did not store.
    """
    return any(map(_has_hooks, module.modules())) or not _own_tensors(module)


def _has_hooks(module: torch.nn.Module) -> bool:
    methods = (type(module)._load_from_state_dict, type(module).load_state_dict)
    is_of_torch = all(method.__module__.startswith("torch.") for method in methods)
    return not is_of_torch or bool(module._load_state_dict_pre_hooks)


def _refuse_other_class(
    restoring: Restoring, path: TreePath, kind: type, lacking: set[str], unknown: set[str], code: str
) -> None:
    """Raise for the state of another class, which torch takes without a word or fails over half-way."""
    expected = f"expected the state of a {kind.__name__}"
    if lacking:
        expected += f" with {', '.join(sorted(lacking))}"
    found = f"one with {', '.join(sorted(unknown))}" if unknown else "one without them"
    way_out = "make an object of the class that was saved, or leave it out of `into` to begin anew"
    raise fault(restoring.shown, path, f"{expected}, found {found} in the file: {way_out}", code)


def _names_in(live: Live, restoring: Restoring, code: str) -> set[str]:
    """Return the names in the state of an object."""
    if not isinstance(live.state, Mapping):
        reason = f"expected the state of a {type(live.value).__name__}, found a {type(live.state).__name__}"
        raise fault(restoring.shown, live.path, reason, code)
    return {*live.state}


def _plan_scheduler(live: Live, restoring: Restoring) -> None:
    """Compare the state of a scheduler, and of the schedulers within it, with their classes."""
    if not schedulers.is_of_torch(live.value):
        return
    _names_in(live, restoring, "state-names")
    try:
        others = [*schedulers.others(live.value, live.state, live.path)]
    except ValueError as error:
        raise fault(restoring.shown, live.path, f"{error}", "state-names") from None
    for path, kind, lacking, unknown in others:
        _refuse_other_class(restoring, path, kind, lacking, unknown, "state-names")


def _plan_names(live: Live, own: set[str], restoring: Restoring) -> None:
    """Raise for a state without the names that an object needs. The state of a disabled scaler is empty."""
    stored = _names_in(live, restoring, "state-names")
    if own - stored:
        kind = type(live.value)
        _refuse_other_class(restoring, live.path, kind, own - stored, stored - own, "state-names")


def _plan_optimizer(live: Live, restoring: Restoring) -> None:
    """Compare the state of an optimizer with its parameters, and plan its destinations."""
    optimizer, is_of_torch = live.value, schedulers.is_of_torch(live.value)
    if not optimizers.is_of_parameters(live.state):
        if is_of_torch:
            stored, own = _names_in(live, restoring, "optimizer-state"), {"param_groups", "state"}
            kind = type(optimizer)
            _refuse_other_class(restoring, live.path, kind, own - stored, stored - own, "optimizer-state")
        return
    names = _names(live, restoring)
    lacking, unknown = optimizers.other_options(optimizer, live.state)
    # Versions of one class differ too, but rarely by names on both sides.
    if is_of_torch and lacking and unknown:
        _refuse_other_class(restoring, live.path, type(optimizer), lacking, unknown, "optimizer-state")
    try:
        state = optimizers.by_place(optimizer, live.state, names)
    except ValueError as error:
        raise fault(restoring.shown, live.path, f"{error}", "optimizer-state") from None
    parameters = optimizers.parameters(optimizer)
    for place, key, expected, found in optimizers.misfits(optimizer, state):
        called = place if names is None else names[id(parameters[place])]
        raise other_shape(restoring.shown, (*live.path, "state", called, key), expected, found)
    for place, parameter in enumerate(parameters):
        for key, value in state["state"].get(place, {}).items():
            # The number of steps stays on the host, unless the optimizer moves it.
            if isinstance(value, Stored) and key != "step" and not parameter.is_cpu:
                restoring.devices[value.name] = parameter.device


def _refuse_equal_keys(paths: list[TreePath]) -> None:
    if len(paths) > 1:
        first, second = (spelled(path) for path in paths[:2])
        reason = f"`{first}` and `{second}` have states under equal integers"
        message = f"{reason}: put the modules of their parameters into the same tree, for their names"
        raise SaveError(message, code="equal-keys", tensor=first, found=second)


def _copied(stored: dict[str, Any]) -> dict[str, Any]:
    """Return copies of the tensors of torch on their devices, and the others as they are."""
    own = {name: one for name, one in stored.items() if isinstance(one, torch.Tensor)}
    return {**stored, **copied(own, "device")}


states = _States("torch", Whole(wrap, mover, at, tensor_payload, export=_export, into=fill_tensors))
save_state = states.save_state
load_state = states.load_state
