"""States of torch's learning rate schedulers, whose names differ between classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .objects import TreePath

#: The states of the schedulers within a scheduler.
_INNER = "_schedulers"
# Lists with a value for each parameter group of the optimizer.
_OF_GROUPS = ("base_lrs", "lr_lambdas")
# Names that the states of a class have in every version of torch, and the states of other classes lack.
_MARKS = frozenset(("step_size", "milestones", "T_max", "T_0", "lr_lambdas", "_milestones", _INNER))


class OtherState(NamedTuple):
    """A scheduler for which the file has the state of another class.

    Attributes
    ----------
    path : tuple
        The path of the scheduler, which may be within another one.
    kind : type
        The class of the scheduler.
    lacking, unknown : set of str
        The names that the stored state lacks, and those that only the stored state has.
    """

    path: TreePath
    kind: type
    lacking: set[str]
    unknown: set[str]


def others(scheduler: Any, state: Any, path: TreePath) -> Iterator[OtherState]:
    """Yield the scheduler at `path`, and each scheduler within it, whose stored state is another class's.

    Raises
    ------
    ValueError
        A scheduler has another number of schedulers within it, or of parameter groups.
    """
    kind: Any = type(scheduler)
    mine = scheduler.state_dict()
    own, stored = _names(mine), _names(state)
    lacking, unknown = own - stored, stored - own
    # Versions of one class differ too, but rarely by names on both sides.
    if (lacking and unknown) or (kind.__module__.startswith("torch.") and (own ^ stored) & _MARKS):
        yield OtherState(path, kind, lacking, unknown)
        return
    for name, what in ((_INNER, "schedulers"), *((one, "parameter groups") for one in _OF_GROUPS)):
        if name in own & stored and len(mine[name]) != len(state[name]):
            expected = f"expected {len(mine[name])} {what} of the {kind.__name__}"
            raise ValueError(f"{expected}, found {len(state[name])} in the file")
    if _INNER in own:
        for place, (one, inner) in enumerate(zip(scheduler._schedulers, state[_INNER], strict=True)):
            if is_of_torch(one):
                yield from others(one, inner, (*path, _INNER, place))


def is_of_torch(live: Any) -> bool:
    """Return whether torch's own code loads the state of an object."""
    return bool(type(live).load_state_dict.__module__.startswith("torch."))


def _names(state: Mapping[str, Any]) -> set[str]:
    """Return the names in a state, except for the names of the base class, which differ between versions."""
    return {name for name in state if not name.startswith("_") or name in _MARKS}
