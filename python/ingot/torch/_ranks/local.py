"""What this rank has in its own memory of a DTensor."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch

from .placements import Part, part

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Held(NamedTuple):
    """A part of a tensor, and the memory that it is in."""

    part: Part
    local: torch.Tensor


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor, without an import of what makes them: where nobody did, it is none."""
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def _dtensor() -> Any:
    # Where it was before torch 2.5.
    module = sys.modules.get("torch.distributed.tensor") or sys.modules.get("torch.distributed._tensor")
    return getattr(module, "DTensor", None)


def held(tensor: Any) -> Held:
    """What this rank holds of a DTensor. Nothing, where it is not in the mesh.

    Raises
    ------
    ValueError
        There are no bytes in its memory that are part of the tensor's values. The message says what to call.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            "a DTensor with the placement Partial has values that are still to be summed: "
            "call `.redistribute(placements=…)` with Replicate or Shard in its place first"
        )
    with torch.no_grad():
        local = tensor.to_local()
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError(
            f"a DTensor of {type(local).__name__} keeps its values elsewhere: "
            f"call what takes {type(local).__name__} to plain tensors, such as `.dequantize()`, first"
        )
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        nothing = Part(tuple(tensor.shape), tuple(() for _ in tensor.shape))
        return Held(nothing, local.new_empty(nothing.local_shape))
    found = part(tensor.shape, mesh.shape, coordinate, tensor.placements)
    if found.numel != local.numel():
        raise ValueError(
            f"its placements {tuple(tensor.placements)} give this rank {list(found.local_shape)} of "
            f"{list(tensor.shape)}, and its memory is of {list(local.shape)}"
        )
    # Where a rank holds nothing, torch's own shape of that may differ.
    return Held(found, local if found.numel else local.new_empty(found.local_shape))


def identity(tensor: Any) -> tuple[Any, ...]:
    """Equal for DTensors that are one: of the same memory, and the same part of it."""
    with torch.no_grad():
        local = tensor.to_local()
    place = local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride()
    return (*place, tensor.shape, tuple(tensor.placements), tensor.dtype)
