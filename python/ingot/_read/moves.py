"""Move tensors to devices, or read them onto devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from ingot._base.frameworks import is_of_framework
from ingot._base.keys import matching
from ingot._base.options import checked
from ingot._base.text import _escaped, _quoted, located
from ingot._native import Checkpoint, Gpu
from ingot.errors import DestinationError, DtypeError, OptionError
from ingot.typing import Device, Glob

from .door import Reads
from .select import Wanted

# A function that moves a tensor to a device, or an object that reads it onto one.
Move: TypeAlias = "Callable[[Any], Any] | Gpu | Carrier"
# The movers to one device, or to a device for each tensor; None if tensors stay on the host.
Moving: TypeAlias = "Move | Placement | None"
# The names that each carrier has to read; None for tensors that the extension reads.
Groups: TypeAlias = "dict[Carrier | None, list[str]]"
# The GPU that tensors are read onto: one for all, or for each tensor one or the host.
Onto: TypeAlias = "Gpu | list[Gpu | None]"

# The errors for tensors that are loaded.


def in_file(checkpoint: Checkpoint) -> str:
    """Return the start of a message about a file."""
    return "" if checkpoint.path is None else f"{_escaped(checkpoint.path)}: "


def misfit(name: str, reason: str, code: str = "destination") -> DestinationError:
    """Return the error for a tensor that cannot be read into the caller's memory."""
    return DestinationError(f"tensor {_quoted(name)}: {reason}", code=code, tensor=str(name))


def no_destination(name: str, expected: str, found: object) -> TypeError:
    """Return the error for an object in `out` that is not a tensor."""
    hint = ": several destinations need a list of as many indices in slices" if type(found) is list else ""
    return TypeError(f"tensor {_quoted(name)}: expected a {expected}, found {type(found).__name__}{hint}")


def about(checkpoint: Checkpoint, name: str, error: DtypeError) -> DtypeError:
    """Return a framework's error about a dtype, with the file and the tensor."""
    found = checkpoint.info(name).dtype if error.found is None else error.found
    path = checkpoint.path
    return located(DtypeError, f"{error}", code=error.code, path=path, tensor=name, found=found)


class Carrier:
    """Reads tensors onto a device, or spreads them over several, with the framework's own functions.

    Called with a tensor of the host, it takes that one there.
    """

    __slots__ = ()

    def read(self, checkpoint: Checkpoint, wanted: Wanted, reads: Reads) -> list[Any]:
        """Return the wanted tensors on the device. Host memory holds only a few pieces at a time."""
        raise NotImplementedError

    def __call__(self, tensor: Any) -> Any:
        raise NotImplementedError


class Placement:
    """A device for each tensor, by its name. `placing` makes them."""

    __slots__ = ("_choose", "_moves")

    def __init__(self, choose: Callable[[Checkpoint, str], Move | None]) -> None:
        self._choose = choose
        self._moves: dict[str, Move | None] = {}

    def of(self, checkpoint: Checkpoint, name: str) -> Move | None:
        """Return the mover of the tensor `name`, or None if it may stay."""
        if name not in self._moves:
            self._moves[name] = self._choose(checkpoint, name)
        return self._moves[name]


def placing(mover: Callable[[Any], Move | None], device: Device) -> Moving:
    """Return the move to `device`: one device, or a dict of patterns or a callable for each tensor.

    Devices of frameworks may be callables too: a `torch.device` is.
    """
    if device is None or isinstance(device, str):
        return mover(device)
    if isinstance(device, Mapping):
        return Placement(_by_pattern({_pattern(given): mover(one) for given, one in device.items()}))
    if callable(device) and not is_of_framework(type(device)):
        return Placement(lambda checkpoint, name: mover(device(checkpoint.info(name))))
    return mover(device)


def placed(function: Callable[..., Any], mover: Callable[[Any], Move | None], device: Device) -> Moving:
    """Return the result of `placing`. An error names `function`, whose option is `device`."""
    # The usual answer first: programs load thousands of small files.
    if device is None or (isinstance(device, str) and device == "cpu"):
        return mover(device)
    checking: Any = checked(function, {"device": device}, device=partial(placing, mover))
    return checking["device"]  # type: ignore[no-any-return]


def _pattern(given: object) -> str | Glob:
    if not isinstance(given, str | Glob):
        found = type(given).__name__
        raise TypeError(
            f"device takes names, patterns and ingot.glob(...) as the keys of a dict, found {found}"
        )
    return given


def _by_pattern(moves: dict[str | Glob, Move | None]) -> Callable[[Checkpoint, str], Move | None]:
    by_name: dict[str, Move | None] = {}

    def choose(checkpoint: Checkpoint, name: str) -> Move | None:
        if name not in by_name:
            by_name.update(_matched(checkpoint, moves))
        if name in by_name:
            return by_name[name]
        # A name of no tensor is the other error.
        checkpoint.info(name)
        some = ", ".join(map(_shown, islice(moves, 3))) + (", …" if len(moves) > 3 else "")
        reason = f"no pattern of device matches its name: found {some or 'none'} — `*` matches every name"
        raise located(
            OptionError, reason, code="no-device", path=checkpoint.path, tensor=name, expected=tuple(moves)
        )

    return choose


def _shown(pattern: str | Glob) -> str:
    return _quoted(pattern if isinstance(pattern, str) else repr(pattern))


def _matched(checkpoint: Checkpoint, moves: dict[str | Glob, Move | None]) -> dict[str, Move | None]:
    """Return the move of each tensor that a pattern matches. The first pattern decides.

    Raises `TensorNotFoundError` for a pattern that matches no tensor.
    """
    names = dict.fromkeys(checkpoint.all_names())
    groups = [(matching(names, pattern, checkpoint.path), move) for pattern, move in moves.items()]
    found: dict[str, Move | None] = {}
    for matched, move in reversed(groups):
        found.update(dict.fromkeys(matched, move))
    return found


def settled(checkpoint: Checkpoint, names: Iterable[str] | None, move: Moving) -> Iterable[str] | None:
    """Return these names, or None for all. Raise before anything is read if one has no device."""
    if not isinstance(move, Placement) or isinstance(names, str):
        return names
    known = checkpoint.offset_names() if names is None else list(names)
    for name in known:
        move.of(checkpoint, name)
    return None if names is None else known


def landing(checkpoint: Checkpoint, names: Iterable[str] | None, move: Moving) -> Onto | None:
    """Return the GPUs for these tensors, or one for all; None if all are read to the host."""
    if not isinstance(move, Placement):
        return move if isinstance(move, Gpu) else None
    known = checkpoint.offset_names() if names is None else names
    gpus = [on(checkpoint, name, move) for name in known]
    return gpus if any(gpus) else None


def on(checkpoint: Checkpoint, name: str, move: Moving) -> Gpu | None:
    """Return the GPU for the tensor `name`; None if it is read to the host."""
    if isinstance(move, Placement):
        move = move.of(checkpoint, name)
    return move if isinstance(move, Gpu) else None


def carrier(checkpoint: Checkpoint, name: str, move: Moving) -> Carrier | None:
    """Return the carrier with which a framework reads the tensor `name`, or None."""
    if isinstance(move, Placement):
        move = move.of(checkpoint, name)
    return move if isinstance(move, Carrier) else None


def carried(checkpoint: Checkpoint, names: Iterable[str] | None, move: Moving) -> Groups:
    """Return these names, or all, by carrier. Return nothing if no carrier reads any."""
    if not isinstance(move, (Carrier, Placement)) or isinstance(names, str):
        return {}
    groups: Groups = {}
    for name in checkpoint.offset_names() if names is None else dict.fromkeys(names):
        groups.setdefault(carrier(checkpoint, name, move), []).append(name)
    return groups if any(groups) else {}


def moved(checkpoint: Checkpoint, name: str, tensor: Any, move: Moving) -> Any:
    """Return `tensor` on the device of `move`. A tensor that was read onto it stays."""
    # The common case first: programs read a hundred thousand tensors.
    if move is None or isinstance(move, Gpu):
        return tensor
    if isinstance(move, Placement):
        return moved(checkpoint, name, tensor, move.of(checkpoint, name))
    try:
        return move(tensor)
    except DtypeError as error:
        raise about(checkpoint, name, error) from error.__cause__
