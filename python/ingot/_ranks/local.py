"""The part of a distributed tensor in this rank's own memory."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from .placements import Joined, Part, part, product

# The attributes of torch's CheckpointableTensor (2.15), which is an ordinary tensor.
_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
# The methods by which other tensors describe their parts to torch.
_HOOKS = ("__create_write_items__", "__create_chunk_list__")


class Held(NamedTuple):
    """A part of a tensor, and the memory that it is in."""

    part: Part
    local: torch.Tensor


def has_group() -> bool:
    """Return whether this process is a rank of a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def known_group(group: object) -> object:
    """Return `group`, which must be a process group or None."""
    if group is not None and not (has_group() and isinstance(group, torch.distributed.ProcessGroup)):
        found = type(group).__name__
        raise TypeError(f"process_group must be a ProcessGroup of torch or None, found {found}")
    return group


def is_distributed(tensor: object) -> bool:
    """Return whether `tensor` is a part of a tensor that ranks hold together."""
    if is_dtensor(tensor):
        return True
    return isinstance(tensor, torch.Tensor) and (_is_annotated(tensor) or _is_hooked(tensor))


def are_distributed(tensors: Collection[torch.Tensor]) -> bool:
    """Return whether `is_distributed` may return True for one of these tensors of torch's own classes."""
    # A list, since there may be many: a generator takes twice as long.
    return any(True in [hasattr(tensor, name) for tensor in tensors] for name in (_ATTRIBUTES[0], *_HOOKS))


def is_dtensor(tensor: object) -> bool:
    """Return whether it is a DTensor."""
    return isinstance(tensor, dtensor_class())


def dtensor_class() -> Any:
    """Return the class of DTensors, without importing its module: if there is none, an empty tuple."""
    # The second is its module before torch 2.5.
    module = sys.modules.get("torch.distributed.tensor") or sys.modules.get("torch.distributed._tensor")
    return getattr(module, "DTensor", ())


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor. `tensor` may be a part of it."""
    annotated: Any = tensor
    return tuple(annotated.global_shape if _is_annotated(tensor) else tensor.shape)


def _is_annotated(tensor: Any) -> bool:
    return all(hasattr(tensor, name) for name in _ATTRIBUTES)


def _is_hooked(tensor: Any) -> bool:
    return any(hasattr(tensor, name) for name in _HOOKS)


def held(tensor: Any, joined: Joined | None = None) -> Held:
    """Return the part of a distributed tensor that this rank holds, which is empty outside of the mesh.

    The parts of a `joined` tensor are divided one by one.

    Raises
    ------
    ValueError
        The memory of the tensor has none of its values. The message names the call that helps.
    """
    if is_dtensor(tensor):
        return _of_mesh(tensor, joined)
    if _is_hooked(tensor):
        what = f"{type(tensor).__name__} describes its parts by `{_HOOKS[0]}`"
        way_out = "use `ingot.dcp.Writer` and `ingot.dcp.Reader`"
        raise ValueError(f"{what}, which only torch.distributed.checkpoint calls: {way_out}")
    if joined is not None:
        kind = type(tensor).__name__
        raise ValueError(f"a {kind} has slices of the whole tensor, not of parts joined with shard='each'")
    return _annotated(tensor)


def _of_mesh(tensor: Any, joined: Joined | None) -> Held:
    if any(placement.is_partial() for placement in tensor.placements):
        way_out = "call `.redistribute(placements=…)` with Replicate or Shard in its place first"
        raise ValueError(
            f"a DTensor with the placement Partial has values that have not been summed yet: {way_out}"
        )
    with torch.no_grad():
        local = tensor.to_local()
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        kind = type(local).__name__
        way_out = f"convert {kind} to plain tensors first, such as by `.dequantize()`"
        raise ValueError(f"a DTensor of {kind} keeps its values elsewhere: {way_out}")
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return _nothing(tensor.shape, local)
    found = part(tensor.shape, mesh.shape, coordinate, tensor.placements, joined)
    if found.numel != local.numel():
        given = f"{list(found.local_shape)} of {list(tensor.shape)}, and its memory is of {list(local.shape)}"
        raise ValueError(f"its placements {tuple(tensor.placements)} give this rank {given}")
    # torch's own shape of an empty part may differ.
    return Held(found, local if found.numel else local.new_empty(found.local_shape))


def _nothing(shape: Any, local: torch.Tensor) -> Held:
    found = Part.nothing(shape)
    return Held(found, local.new_empty(found.local_shape))


def _annotated(tensor: Any) -> Held:
    """Return the part that the attributes of a CheckpointableTensor describe."""
    try:
        whole, *shards = (getattr(tensor, name) for name in _ATTRIBUTES)
        full = ((begin, at, size) for begin, at, size in zip(*shards, strict=True) if 0 not in size)
        boxes = [(_box(whole, begin, size), _box(tensor.shape, at, size)) for begin, at, size in full]
    except (TypeError, ValueError) as fault:
        names = ", ".join(_ATTRIBUTES)
        raise ValueError(f"its attributes {names} do not describe parts of it: {fault}") from None
    if not boxes:
        return _nothing(whole, tensor)
    found = product(tuple(whole), boxes)
    if found is None:
        what = f"its {len(boxes)} shards are not blocks along one dimension, in the order of the whole tensor"
        raise ValueError(f"{what}: use `ingot.dcp.Writer` and `ingot.dcp.Reader`")
    part_held, place = found
    return Held(part_held, tensor.detach()[place])


def _box(shape: Any, begin: Any, size: Any) -> tuple[slice, ...]:
    """Return the box of this size at `begin`. Raises `ValueError` if it is not within `shape`."""
    sides = [*zip(shape, begin, size, strict=True)]
    if not all(0 <= at <= at + length <= limit for limit, at, length in sides):
        raise ValueError(f"a shard of {list(size)} at {list(begin)} is outside of {list(shape)}")
    return tuple(slice(at, at + length) for _, at, length in sides)


def identity(tensor: Any) -> tuple[Any, ...]:
    """Return a value that is equal for distributed tensors with the same memory and the same part."""
    if not is_dtensor(tensor) and _is_hooked(tensor):
        # The tensor's memory may be in another object.
        return (id(tensor),)
    local, where = tensor, tuple(getattr(tensor, name, None) for name in _ATTRIBUTES)
    if is_dtensor(tensor):
        with torch.no_grad():
            local = tensor.to_local()
        where = tensor.shape, tuple(tensor.placements)
    place = local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride()
    return (*place, *where, tensor.dtype)
