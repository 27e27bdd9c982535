"""Copies of tensors that are saved later, and the order in which a device gives what is not copied."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import torch
import torch.utils.dlpack

from ingot._adapters import pieces

from ._link import link
from ._tensors import fetcher, not_plain, undisturbed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager


def copied(tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """Copies in C order, on the device of each or on the ``"host"``, but of what cannot be stored."""
    with undisturbed(), torch.no_grad():
        return {
            name: tensor if not_plain(tensor) is not None else _copy(tensor.detach(), where)
            for name, tensor in tensors.items()
        }


def _copy(tensor: torch.Tensor, where: str) -> torch.Tensor:
    if tensor.is_cpu or where == "device":
        return tensor.clone(memory_format=torch.contiguous_format)
    # Through pinned memory, of which only a piece is taken.
    memory, fetch = torch.empty(tensor.nbytes, dtype=torch.uint8), fetcher(tensor)
    for begin in range(0, tensor.nbytes, pieces.PIECE_NBYTES):
        end = min(begin + pieces.PIECE_NBYTES, tensor.nbytes)
        memory[begin:end] = torch.utils.dlpack.from_dlpack(fetch(begin, end))
    return memory.view(tensor.dtype).view(tensor.shape)


def as_of_now(tensors: Iterable[torch.Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """What another thread enters to find on their devices what is queued there by now, and nothing later."""
    ways = [link(device) for device in {tensor.device for tensor in tensors}]
    marks = [(way, way.mark()) for way in ways if way is not None]

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as streams:
            for way, since in marks:
                streams.enter_context(way.aside(since))
            yield

    return entered
