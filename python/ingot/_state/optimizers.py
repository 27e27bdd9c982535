"""States of torch's optimizers, under the names of parameters as torch.distributed.checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from .objects import TreePath
from .wrappers import Naming

#: The names of parameters, by their ids.
Names = dict[int, str]

# The states that torch's optimizers store for each element of a parameter.
_OF_ELEMENTS = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg")
    + ("acc_delta", "sum", "prev", "step_size")
)


# The options that versions of torch have added, and those that schedulers and programs add.
_LATER = frozenset(("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"))
_ADDED = frozenset(
    ("params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum")
    + ("base_momentum",)
)


def is_of_parameters(state: Any) -> bool:
    """Return whether `state` has the form of an optimizer's."""
    return isinstance(state, Mapping) and "state" in state and "param_groups" in state


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in its order."""
    return _of_groups(optimizer.param_groups)


def classes_of(optimizer: torch.optim.Optimizer) -> set[type]:
    """Return the tensor subclasses in the state of an optimizer."""
    kinds = {type(value) for inner in optimizer.state.values() for value in inner.values()}
    return {kind for kind in kinds if hasattr(kind, "__tensor_unflatten__")}


def _of_groups(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [*chain.from_iterable(group["params"] for group in groups)]


def names_in(namings: Mapping[TreePath, Naming]) -> list[tuple[TreePath, Names]]:
    """Return the names of the parameters of each module."""
    found = []
    for path, naming in namings.items():
        tensors = naming.walk.tensors
        # With buffers, which no optimizer has.
        named = naming.module.named_parameters(remove_duplicate=False) if tensors is None else tensors.items()
        pairs = [*named]
        bare = naming.all_bare([name for name, _ in pairs])
        # The first name of a parameter stays.
        last = zip(reversed(pairs), reversed(bare), strict=True)
        found.append((path, {id(one): name for (_, one), name in last}))
    return found


def names_for(optimizer: torch.optim.Optimizer, modules: list[tuple[TreePath, Names]]) -> Names | None:
    """Return the names of an optimizer's parameters, or None if a module lacks one of them.

    The first module that has all parameters names them. If several modules have them together, each name
    begins with the path of its module.
    """
    own = {*map(id, parameters(optimizer))}
    whole = next((names for _, names in modules if own <= names.keys()), None)
    if whole is not None:
        return whole
    joint: Names = {}
    for path, names in modules:
        prefix = ".".join(map(str, path))
        joint = {one: f"{prefix}.{name}" for one, name in names.items()} | joint
    return joint if own <= joint.keys() else None


def by_name(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return the `state_dict` of an optimizer with names in place of integers."""
    own = [*map(names.__getitem__, map(id, parameters(optimizer)))]
    named = dict(zip(_of_groups(state["param_groups"]), own, strict=True))
    groups = [{**group, "params": [named[one] for one in group["params"]]} for group in state["param_groups"]]
    inner = {named.get(one, one): values for one, values in state["state"].items()}
    return {**state, "state": inner, "param_groups": groups}


def by_place(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], names: Names | None
) -> dict[str, Any]:
    """Return a stored state as `load_state_dict` expects it: with integers, in the optimizer's groups.

    Parameters are found by `names`; if these or the stored names are unknown, by their order.

    Raises
    ------
    ValueError
        The optimizer has other parameters, or other parameter groups.
    """
    saved, own = [*state["param_groups"]], optimizer.param_groups
    stored = _of_groups(saved)
    if names is None or not all(isinstance(one, str) for one in stored):
        names = dict(zip(map(id, parameters(optimizer)), stored, strict=False))
    else:
        saved = [_group_of({names[id(one)] for one in group["params"]}, saved) for group in own]
    sizes = [[len(group["params"]) for group in groups] for groups in (own, saved)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"expected groups of {sizes[0]} parameters, found {sizes[1]} in the file")
    places = {names[id(one)]: place for place, one in enumerate(parameters(optimizer))}
    groups = [
        {**group, **_names_in(one), "params": [places[names[id(parameter)]] for parameter in one["params"]]}
        for one, group in zip(own, saved, strict=True)
    ]
    inner = {places.get(one, one): values for one, values in state["state"].items()}
    return {**state, "state": inner, "param_groups": groups}


def _group_of(names: set[str], saved: list[dict[str, Any]]) -> dict[str, Any]:
    found = next((group for group in saved if names == {*group["params"]}), None)
    if found is None:
        lacking = sorted(names - {*_of_groups(saved)})
        if lacking:
            raise ValueError(f"expected the state of parameter {lacking[0]!r}, found none in the file")
        reason = f"expected a group with the same {len(names)} parameters as the group of {min(names)!r}"
        raise ValueError(f"{reason}, found other groups in the file")
    return found


def _names_in(group: Mapping[str, Any]) -> dict[str, Any]:
    # These names are in the order of the parameters.
    return {"param_names": group["param_names"]} if "param_names" in group else {}


def other_options(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Return the options of an optimizer that its stored state lacks, and those that only the state has."""
    stored = {name for group in state["param_groups"] for name in group}
    own = {name for group in optimizer.param_groups for name in group}
    return {*optimizer.defaults} - stored - _LATER, stored - own - _LATER - _ADDED


def misfits(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> Iterator[tuple[int, str, tuple[int, ...], tuple[int, ...]]]:
    """Yield the values in the result of `by_place` that have another shape than the optimizer's.

    Each as the number of its parameter, its key, the expected and the found shape.
    """
    # accelerate wraps optimizers.
    kind = type(getattr(optimizer, "optimizer", optimizer))
    is_of_torch = kind.__module__.startswith("torch.optim.")
    for place, parameter in enumerate(parameters(optimizer)):
        own = optimizer.state.get(parameter, {})
        for key, value in state["state"].get(place, {}).items():
            expected = getattr(own.get(key), "shape", None)
            if expected is None and is_of_torch and key in _OF_ELEMENTS:
                expected = parameter.shape
            found = getattr(value, "shape", None)
            if expected is not None and found is not None and tuple(expected) != tuple(found):
                yield place, key, tuple(expected), tuple(found)
