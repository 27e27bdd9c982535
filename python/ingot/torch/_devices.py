"""Move tensors to torch's devices, or read them onto devices."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from ingot._adapters.pieces import pieces, room
from ingot._base.checks import unpacked
from ingot._base.text import _escaped, brief
from ingot._native import Checkpoint, Gpu
from ingot._read.door import Reads
from ingot._read.moves import Carrier, Move
from ingot._read.select import Wanted
from ingot.errors import DeviceError, OptionError

from . import _tensors
from ._filling import Filling, is_widened, packed
from ._link import Ring, link
from ._tensors import (
    DTYPES,
    _crosses_by_dlpack,
    _to_dlpack,
    fake_mode,
    fetcher,
    is_here,
    storable,
    undisturbed,
    wrap,
)


def mover(device: Any) -> Move | None:
    """Return a mover that reads tensors onto `device` or moves them there, or None for the CPU."""
    # The usual answer first: torch takes longer to read a device than opening a small file does.
    if is_here(device):
        return None
    fake = fake_mode()
    try:
        target = torch.device("cpu" if device is None else device)
    except TypeError as error:
        found = type(device).__name__
        raise TypeError(f"device must be a str, an int or a torch.device, found {found}") from error
    except (RuntimeError, ValueError, OverflowError) as error:
        message = f"device {brief(device)} is unknown to torch: {_first_line(error)}"
        raise OptionError(message, code="unknown-device", found=device) from error
    if fake is not None:
        return lambda tensor: _tensors.faked(tensor, target, fake)
    if target.type == "cpu":
        return None
    if target.type == "meta":
        # A meta tensor has no values, so nothing is read.
        return lambda tensor: tensor.to(target)
    return gpu(target) or relay(target)


def widening(device: Any) -> Move | None:
    """Return the mover for converted tensors: wider floats are converted on the device, if it is a GPU."""
    move = mover(device)
    return relay(torch.device(device)) if isinstance(move, Gpu) else move


@cache
def gpu(target: torch.device) -> Gpu | None:
    """Return the destination for reads onto a GPU by its driver, or None for other devices.

    Cached: a callable that returns a device for each tensor returns the same few many times.
    """
    if target.type != "cuda" or torch.version.cuda is None:
        return None
    return Gpu(partial(_current, target), _allocate, stream=_stream)


def _current(target: torch.device) -> tuple[int, torch.cuda.Stream, int]:
    """Return the number of a device, this thread's current stream on it, and the stream's handle."""
    try:
        ordinal = torch.cuda.current_device() if target.index is None else target.index
        stream, handle = _stream(ordinal)
    except (RuntimeError, AssertionError) as error:
        message = f"device {target}: torch cannot use it: {_first_line(error)}"
        raise DeviceError(message, code="no-device", found=str(target)) from error
    return ordinal, stream, handle


def _stream(ordinal: int) -> tuple[torch.cuda.Stream, int]:
    """Return the current stream of this thread on a device, and its handle."""
    stream = torch.cuda.current_stream(ordinal)
    return stream, stream.cuda_stream


def _allocate(
    stream: torch.cuda.Stream, wanted: list[tuple[str, tuple[int, ...]]]
) -> list[tuple[torch.Tensor, Any]]:
    """Allocate tensors of these dtypes and shapes for use on `stream`, each with a capsule."""
    with undisturbed(), torch.cuda.stream(stream):
        return [shown(torch.empty(shape, dtype=DTYPES[code], device=stream.device)) for code, shape in wanted]


class Relay(Carrier):
    """A carrier that reads tensors in pieces, which torch copies to a device. `relay` makes one."""

    __slots__ = ("_target",)

    def __init__(self, target: torch.device) -> None:
        self._target = target

    def read(self, checkpoint: Checkpoint, wanted: Wanted, reads: Reads) -> list[torch.Tensor]:
        """Return the wanted tensors on the device, in the order of its current stream."""
        outlines = checkpoint.outlines(wanted, wrap)
        driver = gpu(self._target)
        facts = enumerate(zip(wanted.names, (code for code, _ in outlines), strict=True))
        passed = [
            rank
            for rank, (name, code) in facts
            if driver is None or is_widened(checkpoint.info(name).dtype, code)
        ]
        straight = sorted(set(range(len(outlines))).difference(passed))
        sizes = (partial(checkpoint.parts_nbytes, wanted.some(ranks)) for ranks in (straight, passed))
        first, second = reads.shares(*sizes)
        found: dict[int, torch.Tensor] = {}
        if straight:
            parts = checkpoint.parts(wanted.some(straight), wrap, onto=driver, **first.options())
            found.update(zip(straight, parts, strict=True))
        if passed:
            fresh = self._allocate([outlines[rank] for rank in passed])
            Filling(checkpoint, wanted.some(passed), fresh).read(driver, second)
            found.update(zip(passed, fresh, strict=True))
        return [found[rank] for rank in range(len(outlines))]

    def _allocate(self, outlines: list[tuple[str, tuple[int, ...]]]) -> list[torch.Tensor]:
        device = _usable(self._target)
        with undisturbed():
            made = partial(torch.empty, device=device)
            return [made(packed(code, shape), dtype=DTYPES[code]) for code, shape in outlines]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` from host memory to the device."""
        device = _usable(self._target)
        with undisturbed(), torch.no_grad():
            found = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            # torch copies its rarer dtypes as bytes only.
            plain = torch.uint8 if tensor.itemsize == 1 else tensor.dtype
            given, place = tensor.view(plain), found.view(plain)
            cut = list(pieces(0, None, tuple(tensor.shape), 8 * tensor.itemsize))
            with Ring(link(device), room(cut)) as ring:
                for piece in cut:
                    # A piece may be in a mapping, whose pages may have to be read first. So the host copies
                    # it before the device.
                    memory = ring.take()
                    values = memory[: piece.nbytes].view(plain).view(piece.shape)
                    values.copy_(given[piece.place])
                    ring.copy(place[piece.place], values)
                    ring.put(memory)
        return found


@cache
def relay(target: torch.device) -> Relay:
    """Return the relay of a device. There is one for each device, as for `gpu`."""
    return Relay(target)


def _usable(target: torch.device) -> torch.device:
    """Return the device with its number. Raises if torch cannot use it."""
    try:
        with undisturbed():
            return torch.empty(0, device=target).device
    except (RuntimeError, AssertionError) as error:
        message = f"device {target}: torch cannot use it: {_first_line(error)}"
        raise DeviceError(message, code="no-device", found=str(target)) from error


def shown(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return a tensor and a capsule of its memory."""
    plain = tensor if _crosses_by_dlpack(tensor.dtype) else tensor.view(torch.uint8)
    return tensor, _to_dlpack(plain)


def _first_line(error: BaseException) -> str:
    return _escaped(str(error).partition("\n")[0])


def payload(name: str, tensor: torch.Tensor) -> Any:
    """Return `tensor` as a capsule, a buffer, memory of a GPU, or a function that returns its bytes.

    Nothing is copied.
    """
    code = storable(name, tensor)
    with undisturbed():
        shape = unpacked(name, tensor.shape) if code == "F4" else list(tensor.shape)
        plain = tensor.as_subclass(torch.Tensor).detach()
        lies_there = not plain.is_conj() and not plain.is_neg()
        if plain.is_cpu and lies_there:
            if _crosses_by_dlpack(plain.dtype):
                return _to_dlpack(plain)
            if plain.is_contiguous():
                return code, shape, plain.reshape(-1).view(torch.uint8).numpy()
        elif lies_there and plain.is_contiguous() and (device := gpu(plain.device)) is not None:
            return code, shape, (device, _to_dlpack(plain.view(-1).view(torch.uint8)))
        return code, shape, fetcher(plain)
