"""Reading into tensors that are there already."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from ingot._base.checks import FLOATS
from ingot._base.text import _escaped, _quoted
from ingot._ranks.local import held, identity, is_distributed, whole_shape
from ingot._ranks.placements import Part, in_elements
from ingot._read.faults import in_file, misfit
from ingot._read.load import fill
from ingot._read.select import Label, Wanted
from ingot.errors import DestinationError

from ._devices import gpu
from ._filling import Filling, destinations, refuse_captured, refuse_destination, writing
from ._shared import recorded
from ._tensors import _CODES, not_plain, undisturbed, wrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from ingot._native import Checkpoint, Destinations, Gpu
    from ingot._ranks.placements import Box
    from ingot._read.reads import Reads


class IncompatibleKeys(NamedTuple):
    """The names that one side has and the other lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]


# A body of a named tuple holds fields only.
IncompatibleKeys.__module__ = "ingot.torch"


def slots(
    target: torch.nn.Module | Mapping[str, torch.Tensor], checkpoint: Checkpoint, strict: bool
) -> tuple[list[Slot], IncompatibleKeys]:
    """What is filled of the tensors of `target`, and which names did not fit."""
    where = in_file(checkpoint)
    views = recorded(checkpoint)
    stored = {name: name for name in checkpoint.offset_names()}
    stored |= {name: place["of"] for name, place in views.items() if "shape" not in place}
    own = tensors_of(target)
    taken = {name: tensor for name, tensor in own.items() if name in stored}
    ties = _ties(own)
    filled = {ties[name] for name in taken}
    missing = [name for name in own if ties[name] not in filled]
    unexpected = [name for name in stored if name not in own]
    if strict and (missing or unexpected):
        raise RuntimeError(_strict_message(where, target, missing, unexpected))
    refuse_captured(taken)
    for name, tensor in taken.items():
        _refuse_shape(checkpoint, stored[name], name, tensor)
    found = {name: slot(name, stored[name], tensor) for name, tensor in taken.items()}
    # The last of those that share one tensor, as where each is copied in turn.
    last = {ties[name]: name for name in taken}
    return [found[name] for name in last.values()], IncompatibleKeys(missing, unexpected)


class Slot(NamedTuple):
    """A tensor that is to be filled: with all of one of the file, or with this rank's part of that."""

    name: str
    # In the file.
    source: str
    # None for all of it.
    part: Part | None
    tensor: torch.Tensor
    # The DTensor whose local part `tensor` is. It has a version counter of its own.
    whole: torch.Tensor | None = None


def slot(name: str, source: str, tensor: torch.Tensor) -> Slot:
    """What is filled of `tensor`: of a DTensor the part that this rank has. Raises where nothing can be."""
    if not is_distributed(tensor):
        refuse_destination(name, tensor)
        return Slot(name, source, None, tensor)
    try:
        part, local = held(tensor)
    except ValueError as fault:
        raise misfit(name, str(fault)) from None
    refuse_destination(name, local)
    return Slot(name, source, None if part.is_whole() else part, local, None if local is tensor else tensor)


def tensors_of(target: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if isinstance(target, torch.nn.Module):
        _refuse_flat(target)
        # Extra state is whatever a module says it is; no file of tensors has it.
        # Without a detached copy of each, which lacks the attributes of a CheckpointableTensor.
        state = target.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, value in target.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name!r}: expected a torch.Tensor, found {type(value).__name__}")
    return dict(target)


def _refuse_flat(module: torch.nn.Module) -> None:
    """Raise for FSDP of the first kind: its `state_dict` gives copies, and filling them changes nothing."""
    for name, inner in module.named_modules():
        if type(inner).__name__ == "FullyShardedDataParallel":
            raise DestinationError(
                f"module {_quoted(name)}: FullyShardedDataParallel keeps its values in flat parameters, "
                "which cannot be filled in place: wrap it by `torch.distributed.fsdp.fully_shard` instead, "
                "or call `torch.distributed.checkpoint.state_dict.set_model_state_dict` with what "
                "`load_file` gives",
                code="flat-parameters",
                tensor=name,
            )


def _ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A number for each name, equal for names of one tensor."""
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
    shape = [*info.shape]
    if info.dtype == "F4" and shape:
        shape[-1] //= 2
    if shape != (found := list(whole_shape(tensor))):
        raise misfit(
            name,
            f"the destination has another shape: expected {shape}, found {found}",
            "destination-shape",
        )


def read(checkpoint: Checkpoint, slots: list[Slot], reads: Reads) -> None:
    """Fill each: straight from the file, or in pieces that torch copies."""
    straight, elsewhere = _Requests(), _Requests()
    for one in slots:
        code = _CODES.get(one.tensor.dtype)
        stored = checkpoint.info(one.source).dtype
        converts = stored == code or (stored in (*FLOATS, "F8_E8M0") and code in FLOATS)
        read_as = code if code is not None and converts else stored
        requests = straight if read_as == code and one.tensor.is_cpu else elsewhere
        requests.add(one, read_as)
    places, wanted = destinations(straight.tensors), straight.wanted()
    first, second = reads.shares(lambda: checkpoint.parts_nbytes(wanted), elsewhere.nbytes)
    fillings = _by_device(checkpoint, elsewhere.wanted(), [*elsewhere.tensors.values()])
    with writing([*straight.tensors.values(), *wholes(slots)]):
        fill(checkpoint, wanted, places, first)
        _fill(fillings, second)


def wholes(slots: Iterable[Slot]) -> list[torch.Tensor]:
    """Return the DTensors among the slots."""
    return [one.whole for one in slots if one.whole is not None]


class _Requests:
    """What is read of a file, and memory for it: a column for each, as `Wanted` has them."""

    def __init__(self) -> None:
        #: Each by what messages call it.
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: list[str] = []
        self._codes: list[str] = []
        self._indices: list[Any] = []

    def add(self, one: Slot, code: str) -> None:
        """All that fills a tensor, a part of one block by block."""
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
        # Where all come whole none is asked of each.
        indices = self._indices if any(index is not None for index in self._indices) else None
        return Wanted(self._names, indices, self._codes)

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def _spelled(name: str, block: Box) -> Label:
    return Label(f"{name}[{', '.join(f'{side.start}:{side.stop}' for side in block)}]")


def _by_device(
    checkpoint: Checkpoint, wanted: Wanted, tensors: list[torch.Tensor]
) -> list[tuple[Gpu | None, Filling]]:
    """What is wanted for the tensors of each device, and the device where it can be read onto."""
    devices: dict[torch.device, list[int]] = defaultdict(list)
    for rank, tensor in enumerate(tensors):
        devices[tensor.device].append(rank)
    return [
        (gpu(device), Filling(checkpoint, wanted.some(ranks), [tensors[rank] for rank in ranks]))
        for device, ranks in devices.items()
    ]


def _fill(fillings: list[tuple[Gpu | None, Filling]], reads: Reads) -> None:
    shares = reads.shares(*(filling.nbytes for _, filling in fillings))
    for (device, filling), share in zip(fillings, shares, strict=True):
        filling.read(device, share)


def fill_tensors(
    places: Destinations,
    checkpoint: Checkpoint,
    wanted: Wanted,
    tensors: Mapping[str, torch.Tensor],
    reads: Reads,
) -> None:
    """Read what is wanted into `tensors`, of which those of the CPU are `places`."""
    if len(places) == len(tensors):
        with writing(tensors.values()):
            fill(checkpoint, wanted, places, reads)
        return
    here = [rank for rank, tensor in enumerate(tensors.values()) if tensor.is_cpu]
    others = [rank for rank, tensor in enumerate(tensors.values()) if not tensor.is_cpu]
    elsewhere = [tensor for tensor in tensors.values() if not tensor.is_cpu]
    part = wanted.some(others)
    for name, tensor, (code, _) in zip(part.names, elsewhere, checkpoint.outlines(part, wrap), strict=True):
        if _CODES.get(tensor.dtype) != code:
            reason = f"the destination has another dtype: expected {code}, found {tensor.dtype}"
            raise misfit(name, reason, "destination-dtype")
    # All refusals come before the first byte is read.
    fillings = _by_device(checkpoint, part, elsewhere)
    first, second = reads.shares(
        lambda: checkpoint.parts_nbytes(wanted.some(here)), lambda: sum(tensor.nbytes for tensor in elsewhere)
    )
    with writing(tensor for tensor in tensors.values() if tensor.is_cpu):
        fill(checkpoint, wanted.some(here), places, first)
        _fill(fillings, second)


def _strict_message(where: str, target: object, missing: list[str], unexpected: list[str]) -> str:
    lines = [f"{where}the file and the {type(target).__name__} do not have the same tensors:"]
    for what, names in (("missing in the file", missing), ("unexpected in the file", unexpected)):
        if names:
            listed = ", ".join(f'"{_escaped(name)}"' for name in names)
            lines.append(f"    {what}: {listed}")
    return "\n".join(lines)
