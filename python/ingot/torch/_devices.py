"""Devices of torch: how tensors come to them."""

from __future__ import annotations

from functools import cache, partial

import torch

from ingot._native import Gpu
from ingot._text import _escaped
from ingot.errors import DeviceError, OptionError

from ._tensors import DTYPES, _crosses_by_dlpack, _to_dlpack, fake_mode, faked, undisturbed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def mover(device: Any) -> Callable[[torch.Tensor], torch.Tensor] | Gpu | None:
    """What has tensors read onto `device`, or takes them there; None for the CPU, where they are already."""
    # The usual answer first: torch takes longer to read a device than opening a small file does.
    fake = fake_mode()
    if fake is None and (device is None or device == "cpu"):
        return None
    try:
        target = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        message = f"device {device!r} is unknown to torch: {_first_line(error)}"
        raise OptionError(message, code="unknown-device", found=device) from error
    if fake is not None:
        return lambda tensor: faked(tensor, target, fake)
    if target.type == "cpu":
        return None
    return gpu(target) or (lambda tensor: tensor.to(target))


@cache
def gpu(target: torch.device) -> Gpu | None:
    """What reads onto `target`, where that is a GPU whose driver makes the copies; None for other devices.

    One for each device: a callable that gives each tensor its device names the same few again and again.
    """
    if target.type != "cuda" or torch.version.cuda is None:
        return None
    return Gpu(partial(_current, target), _allocate)


def _current(target: torch.device) -> tuple[int, torch.cuda.Stream, int]:
    """The number of a device, the stream that is the current one of this thread, and its handle."""
    try:
        ordinal = torch.cuda.current_device() if target.index is None else target.index
        stream = torch.cuda.current_stream(ordinal)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(
            f"device {target}: torch cannot use it: {_first_line(error)}", code="no-device", found=str(target)
        ) from error
    return ordinal, stream, stream.cuda_stream


def _allocate(
    stream: torch.cuda.Stream, wanted: list[tuple[str, tuple[int, ...]]]
) -> list[tuple[torch.Tensor, Any]]:
    """Tensors of these dtypes and shapes, for use on `stream`, each with a capsule of its memory."""
    with undisturbed(), torch.cuda.stream(stream):
        return [shown(torch.empty(shape, dtype=DTYPES[code], device=stream.device)) for code, shape in wanted]


def shown(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A tensor, and a capsule of its memory."""
    plain = tensor if _crosses_by_dlpack(tensor.dtype) else tensor.view(torch.uint8)
    return tensor, _to_dlpack(plain)


def _first_line(error: BaseException) -> str:
    return _escaped(str(error).partition("\n")[0])
