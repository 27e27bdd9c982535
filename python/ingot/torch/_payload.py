"""What is handed over of a tensor that is saved."""

from __future__ import annotations

import torch

from ingot._base.checks import unpacked

from ._devices import gpu
from ._tensors import _crosses_by_dlpack, _to_dlpack, fetcher, storable, undisturbed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def payload(name: str, tensor: torch.Tensor) -> Any:
    """`tensor` as a capsule, as a buffer, as memory of a GPU, or as a function that gives its bytes.

    Copies nothing.
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
