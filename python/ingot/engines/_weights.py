"""The weights of a model for an engine: pairs of name and tensor, prefetched or read on first use."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_map_only

from ingot._base.checks import checked_backend, checked_text, counted, one_of
from ingot._base.text import _escaped, _quoted, located
from ingot._native import in_natural_order
from ingot._read.handle import TensorSlice, safe_open
from ingot._read.loader import AHEAD
from ingot.errors import CheckpointError, OptionError
from ingot.torch import DTYPES
from ingot.typing import Backend

Weights: TypeAlias = Iterator[tuple[str, torch.Tensor]]
Says: TypeAlias = Callable[[str], bool]

# There is one view for each dimension of the stored tensor. It has the shape of the part and no memory. Along
# its own dimension it has a stride, and 0 along all others, so that it shows which positions torch selected.
Sides: TypeAlias = tuple[torch.Tensor, ...]


class UnreadTensor(torch.Tensor):
    """A tensor of a file, or a part of one, that is read on first use.

    It has the shape, dtype and device of the tensor. Its parts (`narrow`, `chunk`, `split`, `select` and
    indices of ints and slices) are unread tensors too, and nothing is read for them. Every other operation
    reads the selected part, once, and continues with a plain tensor; so do operations that torch performs
    below Python.
    """

    _part: TensorSlice[torch.Tensor]
    _sides: Sides
    _found: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        part: TensorSlice[torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        sides: Sides | None = None,
    ) -> UnreadTensor:
        sides = _whole(part.shape) if sides is None else sides
        shape = sides[0].shape if sides else ()
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._part, made._sides, made._found = part, sides, None
        return made

    def values_read(self) -> torch.Tensor:
        """Return the values, which the first call reads."""
        if self._found is None:
            self._found = self._part[tuple(map(_selected, self._sides))]
        return self._found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"<unread tensor: {self.dtype}, {list(self.shape)}, {self.device}>"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTS:
                return func(*args, **given)
            if func in _DETACHING:
                return args[0]
            if func in _SELECTING and isinstance(args[0], UnreadTensor):
                found = _parts(func, args[0], args[1:], given)
                if found is not None:
                    return found
            return _on_values(func, args, given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _on_values(func, args, kwargs or {})


def _on_values(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    read = tree_map_only(UnreadTensor, UnreadTensor.values_read, (tuple(args), kwargs))
    return func(*read[0], **read[1])


def _whole(shape: Sequence[int]) -> Sides:
    """Return the sides of a whole tensor."""
    places = range(len(shape))
    strides = ([int(place == own) for place in places] for own in places)
    return tuple(torch.empty_strided(shape, one, dtype=torch.uint8, device="meta") for one in strides)


def _selected(side: torch.Tensor) -> slice | int:
    """Return the selected positions along the dimension of a side, or the one position if it is removed."""
    first = int(side.storage_offset())
    for size, step in zip(side.shape, side.stride(), strict=True):
        if step:
            return slice(first, first + size * step, step)
    return first


def _parts(
    func: Callable[..., Any], tensor: UnreadTensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Return the parts that `func` selects. None if torch has to compute or reject them on the values."""
    try:
        found = [func(side, *args, **kwargs) for side in tensor._sides]
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    is_one = all(isinstance(one, torch.Tensor) for one in found)
    rows: list[Sides] = [tuple(found)] if is_one else [*zip(*found, strict=True)]
    if not tensor._sides or not all(_are_views(row, tensor._sides) for row in rows):
        return None
    parts = tuple(UnreadTensor(tensor._part, tensor.dtype, tensor.device, row) for row in rows)
    return parts[0] if is_one else parts


def _are_views(sides: Sides, wholes: Sides) -> bool:
    """Return whether all are views of the wholes, and each dimension that is left belongs to one side."""
    homes, own = ([one.untyped_storage()._cdata for one in each] for each in (wholes, sides))
    strides = [sum(step != 0 for step in one.stride()) for one in sides]
    return own == homes and max(strides) <= 1 and sum(strides) == sides[0].ndim


# What selects a part of a tensor, and what returns the tensor itself.
_SELECTING: set[Any] = {
    getattr(home, name) for home in (torch.Tensor, torch) for name in ("narrow", "select", "split", "chunk")
} | {torch.Tensor.__getitem__}
_DETACHING = {torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
# What is known of a tensor that was not read.
_FACTS = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta",
        "is_sparse", "is_quantized", "is_nested", "requires_grad", "is_leaf", "grad", "grad_fn",
    )
} | {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.numel,
    torch.Tensor.nelement, torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.is_floating_point,
    torch.Tensor.is_complex, torch.is_complex, torch.Tensor.stride, torch.Tensor.storage_offset,
    torch.Tensor.is_contiguous, torch.Tensor.get_device, torch.Tensor.__len__, torch.Tensor.__hash__,
}  # fmt: skip


READ = ("auto", "ahead", "used")


class Reading(NamedTuple):
    """The options of an engine's loader, each with its default. docs/guides/engines.md explains them."""

    read: str = "auto"
    device: str = "cpu"
    backend: Backend = "auto"
    threads: int | None = None
    ahead: int = AHEAD

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str, others: Collection[str] = ()) -> Reading:
        """Return the checked options of a user. `others` are valid names that are not ours."""
        for name in given:
            if name not in cls._fields:
                known = (*cls._fields, *others)
                message = f"{where}: unknown option {_quoted(name)}: expected one of {', '.join(known)}"
                raise OptionError(message, code="unknown-loader-option", expected=known, found=name)
        how = cls(**given)
        one_of("read", how.read, READ)
        checked_backend(how.backend)
        checked_text("device", how.device)
        counted("threads", how.threads, least=1, code="invalid-threads", or_none=True)
        counted("ahead", how.ahead)
        return how

    def decided(self, ranks: int) -> Reading:
        """Return the options with "auto" resolved for a number of ranks that share each tensor."""
        if self.read != "auto":
            return self
        return self._replace(read="used" if ranks > 1 else "ahead")


def weights(files: Iterable[str], how: Reading, is_used: Says, is_left_out: Says | None = None) -> Weights:
    """Yield the tensors of `files`, in their order and in the order of the data in each.

    Parameters
    ----------
    files : iterable of str
        The files.
    how : Reading
        The options, with ``read`` as "ahead" or "used".
    is_used : callable
        Returns whether the tensor of a name is expected to be used and therefore prefetched. Any other tensor
        is read when it is used after all.
    is_left_out : callable, optional
        Returns whether the tensor of a name is skipped.
    """
    opened = (_File(file, how, is_used, is_left_out) for file in files)
    # The next one is read while the last tensors of this one are used.
    after = next(opened, None)
    while after is not None:
        file, after = after, next(opened, None)
        with file:
            yield from file.tensors()


class _File:
    """An open file whose tensors are being read."""

    def __init__(self, path: str, how: Reading, is_used: Says, is_left_out: Says | None) -> None:
        self._handle = safe_open(path, "torch", how.device, backend=how.backend)
        names = self._handle.offset_keys()
        self._names = [name for name in names if is_left_out is None or not is_left_out(name)]
        self._ahead = {name for name in self._names if how.read == "ahead" and is_used(name)}
        plan = dict.fromkeys(self._ahead)
        self._loader = self._handle.prefetch(plan, threads=how.threads, ahead=how.ahead)
        self._device = how.device

    def tensors(self) -> Weights:
        for name in self._names:
            yield name, self._loader.take(name) if name in self._ahead else self._unread(name)

    def _unread(self, name: str) -> torch.Tensor:
        dtype = DTYPES.get(self._handle.info(name).dtype)
        # A mapped file is read on access. A tensor is read or rejected as a whole if torch has no such dtype,
        # or counts its elements in other units.
        if self._handle.backend == "mmap" or dtype is None or dtype == DTYPES.get("F4"):
            return self._handle.get_tensor(name)
        return UnreadTensor(self._handle.get_slice(name), dtype, torch.device(self._device))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._loader.close()
        self._handle.close()


def has_place_for(model: torch.nn.Module, name: str, missing: tuple[type, ...]) -> bool:
    """Return whether a weight of that name may belong to `model`. `missing` are the layers of other ranks.

    A weight does not belong to the model if its layer is on another rank, or if a list of layers lacks it.
    Checkpoints and models often use different names, so no other rule is applied.
    """
    module = model
    for word in name.split("."):
        if isinstance(module, missing):
            return False
        child = dict(module.named_children()).get(word)
        if child is None:
            return not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
        module = child
    return not isinstance(module, missing)


def without_files(folder: str) -> CheckpointError:
    """Return the error for a folder without files of tensors."""
    others = in_natural_order([name for name in os.listdir(folder) if name.endswith((".bin", ".pt", ".pth"))])
    found = f"found {', '.join(map(_escaped, others[:3]))}: make files of tensors by `ingot convert`"
    reason = f"expected *.safetensors, {found if others else 'found none'}"
    return located(CheckpointError, reason, code="no-weights", path=folder)
