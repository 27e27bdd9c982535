"""The bytes of a tensor that does not lie in host memory as it is meant, piece by piece."""

from __future__ import annotations

import torch

from ingot._boxes import boxes

from ._tensors import undisturbed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ingot._boxes import Box


def fetcher(tensor: torch.Tensor) -> Callable[[int, int], Any]:
    """A function that gives the bytes of `tensor` from `begin` to `end`, in C order, as a capsule.

    It takes only those to the CPU, and resolves a lazy conjugation or negation for only those.
    """
    itemsize = tensor.itemsize

    def fetch(begin: int, end: int) -> Any:
        first = begin // itemsize
        with undisturbed():
            part = _elements(tensor, first, -(-end // itemsize))
            # torch copies its rarer dtypes as bytes only, and conjugates none of them.
            if part.itemsize == 1:
                part = part.view(torch.uint8)
            packed = part.resolve_conj().resolve_neg().cpu().contiguous()
            # A single element counts as contiguous whatever its stride; another dtype takes only 1.
            plain = packed.as_strided(packed.shape, (1,)).view(torch.uint8)
            return torch._C._to_dlpack(plain[begin - first * itemsize : end - first * itemsize])

    return fetch


def _elements(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """The elements from `begin` to `end`, flat. Copies only those, and the rest of their rows."""
    if tensor.is_contiguous():
        return tensor.view(-1)[begin:end]
    parts = [_part(tensor, box) for box in boxes(tuple(tensor.shape), begin, end)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    part = tensor[box.slices]
    if part.itemsize == 1:
        part = part.view(torch.uint8)
    return part.reshape(-1)[box.within]
