"""Read into existing tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import filterfalse
from typing import Any, NamedTuple

import torch

from ingot._base.checks import CONVERTED, FLOATS
from ingot._base.dtypes import PACKED
from ingot._base.keys import shared_prefix
from ingot._base.options import Loading
from ingot._base.report import restored
from ingot._base.text import _escaped, _quoted, brief
from ingot._native import Checkpoint, Destinations, Gpu, has_digests, version_id
from ingot._ranks.local import are_distributed, held, identity, is_distributed, whole_shape
from ingot._ranks.placements import Box, Joined, Part, in_elements
from ingot._read.door import Reads
from ingot._read.load import fill, proven
from ingot._read.moves import in_file, misfit
from ingot._read.select import OF_DESTINATIONS, Label, Selected, Wanted
from ingot._state.wrappers import walked
from ingot._write.save import recorded
from ingot.errors import DestinationError, DtypeError

from ._devices import gpu
from ._filling import (
    Filling,
    destinations,
    packed,
    refuse_captured,
    refuse_destination,
    refuse_shapeless,
    writing,
)
from ._tensors import _CODES, PLAIN_CLASSES, _dtype, not_plain, undisturbed, wrap


class _Names(NamedTuple):
    missing_keys: list[str]
    unexpected_keys: list[str]


class IncompatibleKeys(_Names):
    """The names that one side has and the other lacks.

    Attributes
    ----------
    missing_keys : list of str
        The names of tensors to fill that the file lacks.
    unexpected_keys : list of str
        The names of tensors of the file that were not filled.
    version : str or None
        The id of the version that the tensors have now, for `load_into` with ``patch``. None if the file was
        saved without ``checksums``, or was dequantised.

    Examples
    --------
    >>> into = {"wte": torch.zeros(8, 4), "bias": torch.zeros(4)}
    >>> ingot.torch.load_into(into, "model.safetensors", strict=False)
    IncompatibleKeys(missing_keys=['bias'], unexpected_keys=['lm_head.weight'])
    """

    version: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, ("torch.IncompatibleKeys", tuple(self)), self.__dict__

    def __repr__(self) -> str:
        return f"IncompatibleKeys(missing_keys={brief(self[0])}, unexpected_keys={brief(self[1])})"


def known_version(checkpoint: Checkpoint) -> str | None:
    """Return the id of a version if it is known without reading the tensors, otherwise None."""
    return version_id(checkpoint) if has_digests(checkpoint) else None


class Fitting(NamedTuple):
    """The tensors to fill, and the name in the file of each. Two names may have one tensor."""

    tensors: dict[str, torch.Tensor]
    sources: list[str]
    # All tensors of the target, in its order.
    own: Mapping[str, torch.Tensor]

    def each_once(self) -> Fitting:
        """Keep the last name of each tensor in the order of the target: its value would be copied last."""
        ties = _ties(self.tensors)
        last = {ties[name]: name for name in self.own if name in self.tensors}
        kept = set(last.values())
        pairs = zip(self.tensors.items(), self.sources, strict=True)
        sources = {name: source for (name, _), source in pairs if name in kept}
        return Fitting({name: self.tensors[name] for name in sources}, [*sources.values()], self.own)


def fitting(
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
    strict: bool,
    how: Loading,
    own: dict[str, torch.Tensor] | None = None,
) -> tuple[Fitting, IncompatibleKeys]:
    """Return the tensors of `target` that the file has, and the names that only one side has.

    `keys` and `drop` of `how` select tensors of the file; the others are neither missing nor unexpected.
    `own` are the tensors of `target`, if the caller has them: a module with many takes time to list them.
    """
    own = tensors_of(target) if own is None else own
    views = recorded(checkpoint.shared())
    aliases = {name: name if "shape" in place else place["of"] for name, place in views.items()}
    stored = selected = dict.fromkeys([*checkpoint.offset_names([*own]), *aliases])
    if how.keys is not None or how.drop is not None:
        chosen = Selected(how.keys, how.drop).names(checkpoint, aliases=bool(views))
        # In file order, in which names are found without a search.
        selected = dict.fromkeys(filter(chosen.__contains__, stored))
    taken = _common(selected, own)
    for name in [name for name in views if name in taken and _is_filled_with(views[name], name, taken)]:
        del taken[name]
    unexpected = [*filterfalse(own.__contains__, selected)] if len(taken) < len(selected) else []
    missing = [*filterfalse(stored.__contains__, own)] if len(taken) < len(own) else []
    if missing:
        ties = _ties(own)
        filled = {ties[name] for name in own if name in stored}
        missing = [name for name in missing if ties[name] not in filled]
    if strict and (missing or unexpected):
        lists = {"missing in the file": missing, "unexpected in the file": unexpected}
        kind = type(target).__name__
        first = f"{in_file(checkpoint)}the tensors of the file and the {kind} differ:"
        raise RuntimeError("\n".join([first, *differences(lists, stored, own)]))
    refuse_captured(name for name in own if name in taken)
    found = Fitting(taken, [*map(aliases.get, taken, taken)] if aliases else [*taken], own)
    # Tensors that the file stores under several names are mostly tied in the target too.
    return found.each_once() if aliases else found, IncompatibleKeys(missing, unexpected)


def _common(names: Mapping[str, None], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of `own` that have one of these names, in the order of `names`."""
    try:
        # There may be many tensors, so no Python code runs for each.
        return dict(zip(names, map(own.__getitem__, names), strict=True))
    except KeyError:
        return {name: own[name] for name in names if name in own}


def _is_filled_with(place: dict[str, Any], name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether filling another tensor fills this one: it is the same view as in the file."""
    whole, part = tensors.get(place["of"]), tensors[name]
    if "shape" not in place or whole is None or not _are_plain({"": whole, name: part}):
        return False
    begin = whole.data_ptr() + place["begin"] * whole.itemsize
    is_same = (part.data_ptr(), [*part.shape], [*part.stride()]) == (begin, place["shape"], place["stride"])
    return is_same and part.dtype == whole.dtype and whole.is_contiguous()


def load_fitting(checkpoint: Checkpoint, found: Fitting, reads: Reads, dtype: str | None = None) -> None:
    """Fill the tensors: all at once if they are whole and in CPU memory, otherwise one by one.

    Floats of the file are first converted to `dtype`, if it is not None.
    """
    if not _read_at_once(checkpoint, found, reads, dtype):
        places = slots(checkpoint, found)
        read(*proven(checkpoint, [one.source for one in places], reads), places, dtype)


def _read_at_once(checkpoint: Checkpoint, found: Fitting, reads: Reads, dtype: str | None) -> bool:
    """Fill the tensors by one plan. Returns False, with nothing read, if `slots` has to look at each."""
    tensors = found.tensors
    if not _are_plain(tensors):
        return False
    if dtype is not None:
        codes = {_CODES.get(kind) for kind in set(map(_dtype, tensors.values()))}
        if not codes.isdisjoint({*CONVERTED, *PACKED} - {dtype}):
            return False
    try:
        places = destinations(tensors)
        if len(places) < len(tensors):
            return False
        with writing(tensors.values()):
            fill(checkpoint, Wanted(found.sources, dtypes=OF_DESTINATIONS), places, reads)
    except (DestinationError, DtypeError):
        # Both are raised before the first byte is read. Reading one by one then names the tensor, or converts
        # it.
        return False
    return True


def _are_plain(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether all are ordinary tensors, and none is the local part of a distributed one."""
    return set(map(type, tensors.values())) <= PLAIN_CLASSES and not are_distributed(tensors.values())


def slots(checkpoint: Checkpoint, found: Fitting) -> list[Slot]:
    """Return a slot for each tensor. Raises `DestinationError` for the first that cannot be filled."""
    found = found.each_once()
    pairs = [*zip(found.tensors.items(), found.sources, strict=True)]
    for (name, tensor), source in pairs:
        refuse_shapeless(name, tensor)
        _refuse_shape(checkpoint, source, name, tensor)
    joins = {name: (dim, (*sizes,)) for name, (dim, sizes) in checkpoint.joins().items()}
    return [slot(name, source, tensor, joins.get(source)) for (name, tensor), source in pairs]


class Slot(NamedTuple):
    """A tensor to fill with a whole tensor of the file, or with this rank's part of one."""

    name: str
    # The name in the file.
    source: str
    # The index; None for the whole tensor.
    part: Part | None
    tensor: torch.Tensor
    # The DTensor whose local part is `tensor`. It has a version counter of its own.
    whole: torch.Tensor | None = None


def slot(name: str, source: str, tensor: torch.Tensor, joined: Joined | None = None) -> Slot:
    """Return the part of `tensor` to fill: of a DTensor the part of this rank. Raises without one.

    `joined` describes the parts of the tensor if ranks slice them one by one.
    """
    if not is_distributed(tensor):
        refuse_destination(name, tensor)
        return Slot(name, source, None, tensor)
    try:
        part, local = held(tensor, joined)
    except ValueError as fault:
        raise misfit(name, str(fault)) from None
    refuse_destination(name, local)
    return Slot(name, source, None if part.is_whole() else part, local, None if local is tensor else tensor)


def tensors_of(target: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a dict, or those that a module's `state_dict` has, under the same names."""
    if isinstance(target, torch.nn.Module):
        state = _state(target)
        if state is not None:
            return state
        _refuse_flat(target)
        # The tensors are not detached, since detached copies lack the attributes of a CheckpointableTensor.
        state = target.state_dict(keep_vars=True)
        _refuse_copies(target, state)
        # Extra state may be any object; no file of tensors has it.
        return {name: value for name, value in state.items() if _is_tensor(name, value)}
    own = dict(target)
    for kind in set(map(type, own.values())):
        if not issubclass(kind, torch.Tensor):
            name = next(name for name, value in own.items() if type(value) is kind)
            raise TypeError(f"{name!r}: expected a torch.Tensor, found {kind.__name__}")
    return own


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """Return the parameters and persistent buffers by name, in the order of `state_dict`.

    None if a module in it has a hook or a method that may change what `state_dict` returns. `state_dict`
    makes a view of each tensor, which takes as long as loading many small ones twice.
    """
    found = walked(module).tensors
    return found if found is not None and set(map(type, found.values())) <= PLAIN_CLASSES else None


def _is_tensor(name: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and name.rpartition(".")[2] != "_extra_state"


def _refuse_copies(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Raise if `state_dict` returned a tensor that is not the module's: filling it would change nothing."""
    own = [*module.parameters(), *module.buffers()]
    known = set(map(id, own))
    returned = {name: value for name, value in state.items() if _is_tensor(name, value)}
    others = {name: value for name, value in returned.items() if id(value) not in known}
    storages = set(map(_storage, own)) if others else set()
    for name, tensor in others.items():
        if tensor.numel() and not tensor.is_meta and _storage(tensor) not in storages:
            why = "filling a copy does not change the module: call `load_model`"
            reason = f"`state_dict()` of the module returns a copy, and {why}"
            raise misfit(name, reason)


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, or a unique value if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def _refuse_flat(module: torch.nn.Module) -> None:
    """Raise for FSDP of the first kind: its `state_dict` returns copies, and filling them changes nothing."""
    for name, inner in module.named_modules():
        if type(inner).__name__ == "FullyShardedDataParallel":
            advice = "wrap it by `torch.distributed.fsdp.fully_shard` instead, or call"
            setter = "torch.distributed.checkpoint.state_dict.set_model_state_dict"
            kept = "keeps its values in flat parameters, which cannot be filled in place"
            message = f"module {_quoted(name)}: FullyShardedDataParallel {kept}: {advice} `{setter}`"
            message = f"{message} with the result of `load_file`"
            raise DestinationError(message, code="flat-parameters", tensor=name)


def _ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return a number for each name, equal for names of one tensor."""
    numbers: dict[Any, int] = defaultdict(lambda: len(numbers))
    ties = {}
    for name, tensor in tensors.items():
        plain = tensor.device.type != "meta" and not_plain(tensor) is None and tensor.numel()
        place: Any = name
        if is_distributed(tensor):
            place = identity(tensor)
        elif plain:
            place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        ties[name] = numbers[place]
    return ties


def _refuse_shape(checkpoint: Checkpoint, source: str, name: str, tensor: torch.Tensor) -> None:
    info = checkpoint.info(source)
    shape = [*packed(info.dtype, info.shape)]
    if shape != (found := list(whole_shape(tensor))):
        reason = f"the destination has another shape: expected {shape}, found {found}"
        raise misfit(name, reason, "destination-shape")


def read(checkpoint: Checkpoint, reads: Reads, slots: list[Slot], dtype: str | None = None) -> None:
    """Fill each: straight from the file, or in pieces that torch copies.

    Floats of the file are first converted to `dtype`, if it is not None.
    """
    straight, elsewhere = _Requests(), _Requests()
    for one in slots:
        code = _CODES.get(one.tensor.dtype)
        stored = checkpoint.info(one.source).dtype
        converts = dtype is None and stored in CONVERTED and code in FLOATS
        if dtype is not None and stored in (*CONVERTED, *PACKED):
            # Reading fails if the tensor is packed.
            stored = dtype
        read_as = code if code is not None and converts else stored
        requests = straight if read_as == code and one.tensor.is_cpu else elsewhere
        requests.add(one, read_as)
    fillings = _by_device(checkpoint, elsewhere.wanted(), [*elsewhere.tensors.values()])
    places = destinations(straight.tensors)
    with writing([*straight.tensors.values(), *wholes(slots)]):
        _fill(checkpoint, straight.wanted(), places, fillings, reads)


def wholes(slots: Iterable[Slot]) -> list[torch.Tensor]:
    """Return the DTensors among the slots."""
    return [one.whole for one in slots if one.whole is not None]


class _Requests:
    """The parts to read and their destinations, in the columns of `Wanted`."""

    def __init__(self) -> None:
        #: The destinations by their names in messages.
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: list[str] = []
        self._codes: list[str] = []
        self._indices: list[Any] = []

    def add(self, one: Slot, code: str) -> None:
        """Add the requests that fill a tensor, block by block for a part."""
        if one.part is None:
            self._add(one, None, one.name, one.tensor, code)
            return
        with undisturbed():
            for index, place in one.part.boxes():
                self._add(one, index, _spelled(one.name, index), one.tensor.detach()[place], code)

    def _add(self, one: Slot, index: Box | None, label: str, tensor: torch.Tensor, code: str) -> None:
        self.tensors[label] = tensor
        self._names.append(one.source)
        self._codes.append(code)
        self._indices.append(index if index is None or code != "F4" else in_elements(index))

    def wanted(self) -> Wanted:
        # No indices if all tensors are whole.
        indices = self._indices if any(index is not None for index in self._indices) else None
        return Wanted(self._names, indices, self._codes)


def _spelled(name: str, block: Box) -> Label:
    return Label(f"{name}[{', '.join(f'{side.start}:{side.stop}' for side in block)}]")


def _by_device(
    checkpoint: Checkpoint, wanted: Wanted, tensors: list[torch.Tensor]
) -> list[tuple[Gpu | None, Filling]]:
    """Return a `Filling` for the tensors of each device, with the GPU if ingot can read onto it.

    Raises for a tensor that cannot be filled, before anything is read.
    """
    devices: dict[torch.device, list[int]] = defaultdict(list)
    for rank, tensor in enumerate(tensors):
        devices[tensor.device].append(rank)
    fillings = (
        Filling(checkpoint, wanted.some(of), [tensors[rank] for rank in of]) for of in devices.values()
    )
    return [*zip(map(gpu, devices), fillings, strict=True)]


def _fill(
    checkpoint: Checkpoint,
    wanted: Wanted,
    places: Destinations,
    fillings: list[tuple[Gpu | None, Filling]],
    reads: Reads,
) -> None:
    """Read the wanted parts straight into `places`, and then the others in pieces."""
    sizes = (filling.nbytes for _, filling in fillings)
    first, *others = reads.shares(lambda: checkpoint.parts_nbytes(wanted), *sizes)
    fill(checkpoint, wanted, places, first)
    for (device, filling), share in zip(fillings, others, strict=True):
        filling.read(device, share)


def fill_tensors(
    checkpoint: Checkpoint, wanted: Wanted, tensors: Mapping[str, torch.Tensor], reads: Reads
) -> None:
    """Read the wanted parts into `tensors`, one for each."""
    places = destinations(tensors)
    if len(places) == len(tensors):
        with writing(tensors.values()):
            fill(checkpoint, wanted, places, reads)
        return
    # Compared before anything is filled: other devices are filled in pieces.
    checkpoint, reads = proven(checkpoint, wanted.names, reads)
    here = [rank for rank, tensor in enumerate(tensors.values()) if tensor.is_cpu]
    others = [rank for rank, tensor in enumerate(tensors.values()) if not tensor.is_cpu]
    elsewhere = [tensor for tensor in tensors.values() if not tensor.is_cpu]
    part = wanted.some(others)
    for name, tensor, (code, _) in zip(part.names, elsewhere, checkpoint.outlines(part, wrap), strict=True):
        if _CODES.get(tensor.dtype) != code:
            reason = f"the destination has another dtype: expected {code}, found {tensor.dtype}"
            raise misfit(name, reason, "destination-dtype")
    fillings = _by_device(checkpoint, part, elsewhere)
    with writing(tensor for tensor in tensors.values() if tensor.is_cpu):
        _fill(checkpoint, wanted.some(here), places, fillings, reads)


def differences(
    lists: Mapping[str, Iterable[str]], stored: Collection[str], own: Collection[str]
) -> list[str]:
    """Return lines for a message: the first names of each list, and what to do about a prefix of all names.

    `stored` are the names in the file, `own` the names of the tensors to fill.
    """
    lines = [f"    {what}: {_first(list(names))}" for what, names in lists.items() if names]
    in_file, here = shared_prefix(stored), shared_prefix(own)
    if (extra := in_file.removesuffix(here)) and _are_alike(stored, extra, own):
        lines.append(
            f"    every name of the file begins with `{extra}`: remove it, as in `load_state_dict({{"
            f'name.removeprefix("{extra}"): tensor for name, tensor in load_file(filename).items()}})`'
        )
    if (extra := here.removesuffix(in_file)) and _are_alike(own, extra, stored):
        way_out = (
            f"load into the module inside, `{extra[:-1]}`, or remove the prefix from the names of the dict"
        )
        lines.append(f"    every name to fill begins with `{extra}`: {way_out}")
    return lines


# Characters of the names in one line of a message.
_LISTED = 700


def _are_alike(names: Iterable[str], prefix: str, others: Collection[str]) -> bool:
    """Return whether one of the others is like one of the names without the prefix."""
    return any(name.removeprefix(prefix) in others for name in names)


def _first(names: list[str]) -> str:
    """Return the first names in quotes, and how many more there are."""
    shown: list[str] = []
    left = _LISTED
    for name in names:
        text = f'"{_escaped(name if len(name) <= _LISTED else name[:_LISTED] + "…")}"'
        left -= len(text) + 2
        if shown and left < 0:
            break
        shown.append(text)
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")
