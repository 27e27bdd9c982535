"""Reading into tensors that are there already."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from ingot import _open
from ingot._load import Wanted, fill, misfit
from ingot._options import FLOATS, Loading, takes_read_options
from ingot._text import _escaped
from ingot.typing import ReadOptions

from ._devices import gpu
from ._filling import Filling, destinations, refuse_destination
from ._shared import recorded
from ._tensors import _CODES, not_plain, wrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from typing_extensions import Unpack

    from ingot._load import Reads
    from ingot._native import Checkpoint, Destinations, Gpu
    from ingot._objects import Source


class IncompatibleKeys(NamedTuple):
    """The names that one side has and the other lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]


# A body of a named tuple holds fields only.
IncompatibleKeys.__module__ = "ingot.torch"


def into(
    target: torch.nn.Module | Mapping[str, torch.Tensor], checkpoint: Checkpoint, strict: bool, reads: Reads
) -> IncompatibleKeys:
    """Fill the tensors of `target`, and say which names did not fit."""
    where = "" if checkpoint.path is None else f"{_escaped(checkpoint.path)}: "
    views = recorded(checkpoint)
    stored = {name: name for name in checkpoint.offset_names()}
    stored |= {name: place["of"] for name, place in views.items() if "shape" not in place}
    own = _tensors(target)
    taken = {name: tensor for name, tensor in own.items() if name in stored}
    ties = _ties(own)
    filled = {ties[name] for name in taken}
    missing = [name for name in own if ties[name] not in filled]
    unexpected = [name for name in stored if name not in own]
    if strict and (missing or unexpected):
        raise RuntimeError(_strict_message(where, target, missing, unexpected))
    for name, tensor in taken.items():
        refuse_destination(name, tensor)
        _refuse_shape(checkpoint, stored[name], name, tensor)
    # The last of those that share one tensor, as where each is copied in turn.
    last = {ties[name]: name for name in taken}
    _read(checkpoint, [(name, stored[name], taken[name]) for name in last.values()], reads)
    return IncompatibleKeys(missing, unexpected)


def _tensors(target: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if isinstance(target, torch.nn.Module):
        # Extra state is whatever a module says it is; no file of tensors has it.
        state = target.state_dict()
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, value in target.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name!r}: expected a torch.Tensor, found {type(value).__name__}")
    return dict(target)


def _ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A number for each name, equal for names of one tensor."""
    numbers: dict[Any, int] = defaultdict(lambda: len(numbers))
    ties = {}
    for name, tensor in tensors.items():
        plain = tensor.device.type != "meta" and not_plain(tensor) is None and tensor.numel()
        place = (
            (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if plain else name
        )
        ties[name] = numbers[place]
    return ties


def _refuse_shape(checkpoint: Checkpoint, source: str, name: str, tensor: torch.Tensor) -> None:
    info = checkpoint.info(source)
    shape = [*info.shape]
    if info.dtype == "F4" and shape:
        shape[-1] //= 2
    if shape != list(tensor.shape):
        raise misfit(
            name,
            f"the destination has another shape: expected {shape}, found {list(tensor.shape)}",
            "destination-shape",
        )


def _read(checkpoint: Checkpoint, wanted: list[tuple[str, str, torch.Tensor]], reads: Reads) -> None:
    """Read each tensor, given with its name and that in the file, straight or in pieces."""
    straight: dict[str, torch.Tensor] = {}
    elsewhere: list[torch.Tensor] = []
    # The names in the file, each with the dtype that it is read as.
    here: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    for name, source, tensor in wanted:
        code = _CODES.get(tensor.dtype)
        stored = checkpoint.info(source).dtype
        converts = stored == code or (stored in (*FLOATS, "F8_E8M0") and code in FLOATS)
        if code is not None and converts and tensor.is_cpu:
            straight[name] = tensor
            here.append((source, code))
        else:
            elsewhere.append(tensor)
            others.append((source, code if code is not None and converts else stored))
    places, requests = destinations(straight), _wanted(here)
    first, second = reads.shares(
        lambda: checkpoint.parts_nbytes(requests), lambda: sum(tensor.nbytes for tensor in elsewhere)
    )
    fillings = _by_device(checkpoint, _wanted(others), elsewhere)
    fill(checkpoint, requests, places, first)
    _fill(fillings, second)


def _wanted(pairs: list[tuple[str, str]]) -> Wanted:
    return Wanted([source for source, _ in pairs], None, [code for _, code in pairs])


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
    fill(checkpoint, wanted.some(here), places, first)
    _fill(fillings, second)


def _strict_message(where: str, target: object, missing: list[str], unexpected: list[str]) -> str:
    lines = [f"{where}the file and the {type(target).__name__} do not have the same tensors:"]
    for what, names in (("missing in the file", missing), ("unexpected in the file", unexpected)):
        if names:
            listed = ", ".join(f'"{_escaped(name)}"' for name in names)
            lines.append(f"    {what}: {listed}")
    return "\n".join(lines)


@takes_read_options
def load_into(
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    source: Source,
    *,
    strict: bool = True,
    **options: Unpack[ReadOptions],
) -> IncompatibleKeys:
    """Load a file into the tensors of a module, without a second copy of them.

    Parameters
    ----------
    target : torch.nn.Module or dict of str to torch.Tensor
        What to fill: the module's parameters and persistent buffers, or the tensors of the dict. They stay
        the objects that they are, on the device where they are, laid out in memory as they are; no gradient
        is recorded.
    source : str, bytes, os.PathLike, or an object to read from
        As for `load_file`.
    strict : bool
        Refuse a file that lacks a tensor of `target`, or has one that `target` lacks.
    **options
        How the file is read: `ingot.typing.ReadOptions`.

    Returns
    -------
    IncompatibleKeys
        ``missing_keys``, tensors of `target` that the file lacks, and ``unexpected_keys``, those of the file
        that `target` lacks: as `torch.nn.Module.load_state_dict` gives them. A name that shares its tensor
        with one that the file has is not missing.

    Raises
    ------
    DestinationError
        A tensor has another shape than in the file, no memory (on ``"meta"``), or memory that it shares with
        another in part. Nothing has been read.
    RuntimeError
        `strict` is set and a tensor is missing or unexpected. Nothing has been read.
    TypeError
        A value of the dict is not a tensor.
    OSError, HeaderError, DtypeError, StorageError, OptionError
        As `load_file` does. What was read before a failure, of `progress` too, stays in the tensors.

    Notes
    -----
    Tensors are read straight into the memory of the CPU, and converted on the way where both dtypes are
    floating point. For other devices and other dtypes they are read in pieces of 64 MiB at most, which torch
    then copies: onto a GPU where that has a driver that is called, else through pinned memory where torch has
    some for the device. To wider floats a device converts them, else the host. The copies are ordered by the
    device's current stream. The module's own loading hooks do not run: `load_model` runs them.
    """
    with _open.loading(source, Loading.of(options, ReadOptions)) as (checkpoint, reads):
        return into(target, checkpoint, strict, reads)
