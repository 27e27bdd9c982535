"""Find tensors that share memory, and store them once under several names.

The file contains one tensor of each group that shares memory. The metadata records the positions of the
others in it (FORMAT.md, "Shared tensors").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ingot._base.text import _quoted
from ingot._write.save import Views
from ingot.errors import SharedMemoryError

# Dimensions that a part of a tensor has in a file at most.
_MAX_DIMS = 64


def views_among(
    tensors: Mapping[str, torch.Tensor], way_out: str = 'save with shared="copy", or save `tensor.clone()`'
) -> Views:
    """Return the aliases, each with its position in a stored tensor.

    Raises `SharedMemoryError`, with `way_out`, for tensors that share memory if none of them covers it, since
    the others could not be restored from one of them.
    """
    views: Views = {}
    for names in crowds(tensors):
        views |= _views_in(sorted(names), tensors, way_out)
    return views


def _views_in(names: list[str], tensors: Mapping[str, torch.Tensor], way_out: str) -> Views:
    first: dict[tuple[Any, ...], str] = {}
    twins = {name: first.setdefault(_geometry(tensors[name]), name) for name in names}
    whole = _whole(list(first.values()), tensors)
    views: Views = {}
    for name in first.values():
        if whole is not None and name != whole and _lies_in(tensors[name], tensors[whole]):
            views[name] = _place(name, whole, tensors)
    kept = [name for name in first.values() if name not in views]
    pair = first_pair(kept, tensors) if len(kept) > 1 else None
    if pair is not None:
        raise shares_memory(pair, f"none holds all of it: {way_out}")
    return views | {name: views.get(twin, {"of": twin}) for name, twin in twins.items() if name != twin}


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a value that is equal for tensors with the same memory, geometry and dtype."""
    place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*place, tensor.is_conj(), tensor.is_neg())


def _whole(names: list[str], tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the first of these tensors that covers the memory of all of them in C order."""
    extents = {name: extent(tensors[name]) for name in names}
    span = min(begin for begin, _ in extents.values()), max(end for _, end in extents.values())
    holds_all = (name for name in names if extents[name] == span and tensors[name].is_contiguous())
    return next((name for name in holds_all if not _is_lazy(tensors[name])), None)


def _lies_in(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether a shape, strides and a first element describe the tensor in `whole`."""
    return (
        tensor.dtype == whole.dtype
        and not _is_lazy(tensor)
        and tensor.dim() <= _MAX_DIMS
        # An expanded tensor has more elements than memory, and a file must not describe more than it holds.
        and tensor.numel() <= whole.numel()
        and (tensor.data_ptr() - whole.data_ptr()) % whole.itemsize == 0
    )


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _place(name: str, whole: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    tensor, base = tensors[name], tensors[whole]
    begin = (tensor.data_ptr() - base.data_ptr()) // base.itemsize
    return {"of": whole, "shape": list(tensor.shape), "stride": list(tensor.stride()), "begin": begin}


def restore(tensors: dict[str, torch.Tensor], views: Views) -> None:
    """Add `views` to `tensors`, on the memory of existing tensors."""
    for name, place in views.items():
        tensors[name] = _view(tensors[place["of"]], place)


def _view(base: torch.Tensor, place: dict[str, Any]) -> torch.Tensor:
    if "shape" not in place:
        return base.view(base.shape)
    return base.as_strided(place["shape"], place["stride"], base.storage_offset() + place["begin"])


def refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `SharedMemoryError` if two of the tensors have a byte in common.

    Interleaved views of one storage, such as the parts of ``weight.chunk(3, dim=1)``, share no byte. Upstream
    rejects those as well, because it rejects every tensor that is not contiguous.
    """
    for names in crowds(tensors):
        pair = first_pair(names, tensors)
        if pair is not None:
            raise shares_memory(pair)


def shares_memory(
    pair: tuple[str, str], hint: str = 'save with shared="alias" or "copy", or save `tensor.clone()`'
) -> SharedMemoryError:
    """Return the error for two tensors that share memory. It begins as upstream's does."""
    first, second = map(_quoted, pair)
    start = "Some tensors share memory, this will lead to duplicate memory on disk and potential differences"
    message = f"{start} when loading them again: {first}, {second} — {hint}"
    return SharedMemoryError(message, code="shared-memory", tensor=pair[0], found=pair)


def crowds(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return groups of tensors whose extents overlap. Only these can share a byte."""
    full = (name for name, tensor in tensors.items() if tensor.numel())
    return [names for names in overlapping(full, tensors) if len(names) > 1]


def overlapping(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return all names, in groups whose extents in memory overlap."""
    groups: list[list[str]] = []
    where, reach = "", 0
    extents = ((str(tensors[name].device), *extent(tensors[name]), name) for name in names)
    for device, begin, end, name in sorted(extents):
        if not groups or device != where or begin >= reach:
            groups.append([])
            where, reach = device, end
        groups[-1].append(name)
        reach = max(reach, end)
    return groups


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and after the last. torch has no negative strides."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize


def first_pair(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Return two tensors with a byte in common, or None. Each marks its bytes on a map of the memory."""
    extents = {name: extent(tensors[name]) for name in names}
    start = min(begin for begin, _ in extents.values())
    taken = torch.zeros(max(end for _, end in extents.values()) - start, dtype=torch.bool, device="cpu")
    marks: dict[str, torch.Tensor] = {}
    for name, (begin, _) in extents.items():
        mark = _bytes_of(tensors[name], taken, begin - start)
        if mark.any():
            # Find the tensor that marked them: clear the map, and check the marks of those before.
            taken.fill_(False)
            mark.fill_(True)
            return next(other for other, before in marks.items() if before.any()), name
        mark.fill_(True)
        marks[name] = mark
    return None


def _bytes_of(tensor: torch.Tensor, taken: torch.Tensor, first: int) -> torch.Tensor:
    """Return the part of `taken` that represents the bytes of `tensor` from `first` on."""
    nbytes = tensor.itemsize
    # A broadcast dimension repeats the same bytes, which are marked once. torch does not fill a tensor
    # with overlapping memory.
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return taken.as_strided([*sizes, nbytes], [*(stride * nbytes for stride in tensor.stride()), 1], first)
