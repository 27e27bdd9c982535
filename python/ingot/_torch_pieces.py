"""The bytes of a tensor that does not lie in host memory as it is meant, piece by piece."""

from __future__ import annotations

from math import prod

import torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def fetcher(tensor: torch.Tensor) -> Callable[[int, int], Any]:
    """A function that gives the bytes of `tensor` from `begin` to `end`, in C order, as a capsule.

    It takes only those to the CPU, and resolves a lazy conjugation or negation for only those.
    """
    itemsize = tensor.itemsize

    def fetch(begin: int, end: int) -> Any:
        first = begin // itemsize
        part = _elements(tensor, first, -(-end // itemsize))
        # torch copies its rarer dtypes as bytes only, and conjugates none of them.
        if part.itemsize == 1:
            part = part.view(torch.uint8)
        plain = part.resolve_conj().resolve_neg().cpu().contiguous().view(torch.uint8)
        return torch._C._to_dlpack(plain[begin - first * itemsize : end - first * itemsize])

    return fetch


def _elements(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """The elements from `begin` to `end`, flat. Copies only those, and the rest of their rows."""
    if tensor.is_contiguous():
        return tensor.view(-1)[begin:end]
    # Down to the first dimension that has to be cut.
    while tensor.shape[0] == 1:
        tensor = tensor[0]
    row = prod(tensor.shape[1:])
    first, last = begin // row, -(-end // row)
    if last - first == 1 and tensor.dim() > 1:
        return _elements(tensor[first], begin - first * row, end - first * row)
    rows = tensor[first:last]
    if rows.itemsize == 1:
        rows = rows.view(torch.uint8)
    return rows.reshape(-1)[begin - first * row : end - first * row]
