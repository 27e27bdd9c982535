"""Tensors that are stored once and have several names.

The file holds one tensor of each group that shares memory. Where the others lie in it stands in the metadata,
under `KEY`, as JSON: ``{"b": {"of": "a"}}`` for the same tensor under another name, and
``{"row": {"of": "a", "shape": [1, 4], "stride": [4, 1], "begin": 4}}`` for a view, in elements of ``a``.
"""

from __future__ import annotations

import json
from math import prod

import torch

from ._torch_sharing import crowds, extent, first_pair, shares_memory
from .errors import SafetensorError, _quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ._native import Archive

    Views = dict[str, dict[str, Any]]

KEY = "ingot.shared"


def views_among(tensors: Mapping[str, torch.Tensor]) -> Views:
    """The tensors that need not be stored, each with where it lies in one that is.

    Raises `SharedMemoryError` for tensors that share memory while none of them holds it all: no one of them
    could give the others back.
    """
    views: Views = {}
    for names in crowds(tensors):
        views |= _views_in(sorted(names), tensors)
    return views


def _views_in(names: list[str], tensors: Mapping[str, torch.Tensor]) -> Views:
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
        raise shares_memory(pair, 'none holds all of it: save with shared="copy", or save `tensor.clone()`')
    return views | {name: views.get(twin, {"of": twin}) for name, twin in twins.items() if name != twin}


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one and the same to whoever reads or writes them."""
    place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*place, tensor.is_conj(), tensor.is_neg())


def _whole(names: list[str], tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The first of these tensors that holds the memory of all of them, in C order."""
    extents = {name: extent(tensors[name]) for name in names}
    span = min(begin for begin, _ in extents.values()), max(end for _, end in extents.values())
    holds_all = (name for name in names if extents[name] == span and tensors[name].is_contiguous())
    return next((name for name in holds_all if not _is_lazy(tensors[name])), None)


def _lies_in(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether shape, strides and a first element say it all."""
    return (
        tensor.dtype == whole.dtype
        and not _is_lazy(tensor)
        # An expanded tensor has more elements than memory. A file shall not ask for more than it holds.
        and tensor.numel() <= whole.numel()
        and (tensor.data_ptr() - whole.data_ptr()) % whole.itemsize == 0
    )


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _place(name: str, whole: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    tensor, base = tensors[name], tensors[whole]
    begin = (tensor.data_ptr() - base.data_ptr()) // base.itemsize
    return {"of": whole, "shape": list(tensor.shape), "stride": list(tensor.stride()), "begin": begin}


def with_views(metadata: dict[str, str] | None, views: Views) -> dict[str, str] | None:
    """`metadata` with the record of `views`, and without one that was made for other tensors."""
    others = {key: text for key, text in (metadata or {}).items() if key != KEY}
    if views:
        others[KEY] = json.dumps(views, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return others if others or metadata is not None else None


def recorded(archive: Archive, where: str) -> Views:
    """The names that the records in the files' metadata add to those of their tensors.

    A name that the file itself has stays what it is, and one whose base is not there is left out: the record
    may have been copied along with other metadata.
    """
    views: Views = {}
    # An index says nothing of memory: each file speaks for its own tensors.
    for metadata in archive.shard_metadata().values():
        if metadata is not None and KEY in metadata:
            views |= _record(metadata[KEY], where)
    return {name: place for name, place in views.items() if name not in archive and place["of"] in archive}


def restore(tensors: dict[str, torch.Tensor], views: Views, where: str) -> None:
    """Add `views` to `tensors`, on the memory of those that are there."""
    for name, place in views.items():
        tensors[name] = _view(name, tensors[place["of"]], place, where)


def _record(text: str, where: str) -> Views:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not all(_is_place(place) for place in record.values()):
        raise SafetensorError(f"{where}metadata `{KEY}` is no record of shared tensors", code="invalid-alias")
    return record


def _is_place(place: Any) -> bool:
    if not isinstance(place, dict) or not isinstance(place.get("of"), str):
        return False
    if set(place) == {"of"}:
        return True
    shape, stride, begin = (place.get(key) for key in ("shape", "stride", "begin"))
    if not isinstance(shape, list) or not isinstance(stride, list) or len(shape) != len(stride):
        return False
    return all(type(number) is int and 0 <= number < 2**63 for number in [*shape, *stride, begin])


def _view(name: str, base: torch.Tensor, place: dict[str, Any], where: str) -> torch.Tensor:
    if "shape" not in place:
        return base.view(base.shape)
    shape, stride, begin = place["shape"], place["stride"], place["begin"]
    last = begin + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if prod(shape) > base.numel() or (prod(shape) and last >= base.numel()):
        raise SafetensorError(
            f"{where}tensor {_quoted(name)}: metadata `{KEY}` puts it outside of {_quoted(place['of'])}",
            code="invalid-alias",
            tensor=name,
        )
    return base.as_strided(shape, stride, base.storage_offset() + begin)
