"""The weights of a model for an engine: pairs of name and tensor, read ahead or where they are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_map_only

from ingot._base.checks import checked_backend, counted, one_of
from ingot._base.text import _escaped, _quoted, located
from ingot._native import in_natural_order
from ingot._read.handle import TensorSlice, safe_open
from ingot._read.loader import AHEAD
from ingot.errors import CheckpointError, OptionError
from ingot.torch import DTYPES
from ingot.typing import Backend

Weights: TypeAlias = Iterator[tuple[str, torch.Tensor]]
Says: TypeAlias = Callable[[str], bool]

# For each dimension of the stored tensor its selected positions, or one position if it is removed.
Box: TypeAlias = tuple[range | int, ...]


class UnreadTensor(torch.Tensor):
    """A tensor of a file, or a part of one, that is read on first use.

    It has the shape, dtype and device of the tensor. Its parts (`narrow`, `chunk`, `split`, `select` and
    indices of ints and slices) are unread tensors too, and nothing is read for them. Every other operation
    reads the selected part, once, and continues with a plain tensor; so do operations that torch performs
    below Python.
    """

    _part: TensorSlice[torch.Tensor]
    _box: Box
    _found: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, part: TensorSlice[torch.Tensor], dtype: torch.dtype, device: torch.device, box: Box | None = None
    ) -> UnreadTensor:
        sides = tuple(map(range, part.shape)) if box is None else box
        shape = [len(side) for side in sides if isinstance(side, range)]
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._part, made._box, made._found = part, sides, None
        return made

    def values_read(self) -> torch.Tensor:
        """Return the values, which the first call reads."""
        if self._found is None:
            sides = [
                one if isinstance(one, int) else slice(one.start, one.stop, one.step) for one in self._box
            ]
            self._found = self._part[tuple(sides)]
        return self._found

    def cut(self, cuts: Iterable[slice | int]) -> UnreadTensor:
        """Return the part that `cuts` select, one for each dimension; further dimensions stay whole."""
        of_each = iter(cuts)
        whole = slice(None)
        sides = [side if isinstance(side, int) else side[next(of_each, whole)] for side in self._box]
        with torch._C.DisableTorchFunctionSubclass():
            return UnreadTensor(self._part, self.dtype, self.device, tuple(sides))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"<unread tensor: {self.dtype}, {list(self.shape)}, {self.device}>"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        parts = _PARTS.get(func)
        if parts is not None and isinstance(args[0], UnreadTensor):
            found = parts(*args, **given)
            if found is not None:
                return found
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTS:
                return func(*args, **given)
            return _on_values(func, args, given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _on_values(func, args, kwargs or {})


def _on_values(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    read = tree_map_only(UnreadTensor, UnreadTensor.values_read, (tuple(args), kwargs))
    return func(*read[0], **read[1])


def _detach(tensor: UnreadTensor) -> UnreadTensor:
    return tensor


# The functions below return None if torch has to compute or reject the result on the values.


def _at(tensor: UnreadTensor, index: Any) -> UnreadTensor | None:
    cuts = list(index) if isinstance(index, tuple) else [index]
    # By identity: a tensor among them would compare its elements.
    dots = [at for at, cut in enumerate(cuts) if cut is Ellipsis]
    if dots:
        left = _ndim(tensor) - (len(cuts) - 1)
        cuts[dots[0] : dots[0] + 1] = [slice(None)] * left
    if len(cuts) > _ndim(tensor) or not all(map(_is_plain, cuts)):
        return None
    for cut, size in zip(cuts, _shape(tensor), strict=False):
        if isinstance(cut, int) and not -size <= cut < size:
            return None
    return tensor.cut(cuts)


def _is_plain(cut: object) -> bool:
    if isinstance(cut, slice):
        bounds = all(bound is None or type(bound) is int for bound in (cut.start, cut.stop, cut.step))
        return bounds and (cut.step is None or cut.step > 0)
    return type(cut) is int


def _narrow(tensor: UnreadTensor, dim: int, start: Any, length: int) -> UnreadTensor | None:
    at, size = _side(tensor, dim)
    if at is None or type(start) is not int or type(length) is not int:
        return None
    begin = start + size if start < 0 else start
    if not (length >= 0 and begin >= 0 and begin + length <= size):
        return None
    return _cut_at(tensor, at, slice(begin, begin + length))


def _select(tensor: UnreadTensor, dim: int, index: int) -> UnreadTensor | None:
    at, size = _side(tensor, dim)
    if at is None or type(index) is not int or not -size <= index < size:
        return None
    return _cut_at(tensor, at, index)


def _split(
    tensor: UnreadTensor, split_size: int | list[int] | tuple[int, ...], dim: int = 0
) -> tuple[UnreadTensor, ...] | None:
    at, size = _side(tensor, dim)
    if at is None or size == 0:
        return None
    if type(split_size) is int:
        if split_size <= 0:
            return None
        return _divided(tensor, at, [split_size] * ceil(size / split_size))
    if not isinstance(split_size, list | tuple) or not all(
        type(one) is int and one >= 0 for one in split_size
    ):
        return None
    return _divided(tensor, at, split_size) if sum(split_size) == size else None


def _chunk(tensor: UnreadTensor, chunks: int, dim: int = 0) -> tuple[UnreadTensor, ...] | None:
    at, size = _side(tensor, dim)
    if at is None or size == 0 or type(chunks) is not int or chunks < 1:
        return None
    each = ceil(size / chunks)
    return _divided(tensor, at, [each] * ceil(size / each))


def _divided(tensor: UnreadTensor, at: int, sizes: Sequence[int]) -> tuple[UnreadTensor, ...]:
    """Return consecutive parts of these sizes. The last may be shorter than its size."""
    begins = [sum(sizes[:part]) for part in range(len(sizes))]
    pairs = zip(begins, sizes, strict=True)
    return tuple(_cut_at(tensor, at, slice(begin, begin + size)) for begin, size in pairs)


def _cut_at(tensor: UnreadTensor, at: int, cut: slice | int) -> UnreadTensor:
    return tensor.cut([*[slice(None)] * at, cut])


def _side(tensor: UnreadTensor, dim: Any) -> tuple[int | None, int]:
    """Return the dimension `dim` from the front and its size, or None if it is missing."""
    ndim = _ndim(tensor)
    if type(dim) is not int or not -ndim <= dim < ndim:
        return None, 0
    return dim % ndim, _shape(tensor)[dim]


def _shape(tensor: UnreadTensor) -> list[int]:
    return [len(side) for side in tensor._box if isinstance(side, range)]


def _ndim(tensor: UnreadTensor) -> int:
    return len(_shape(tensor))


_PARTS: dict[Any, Callable[..., Any]] = {
    getattr(home, cut.__name__[1:]): cut
    for home in (torch.Tensor, torch)
    for cut in (_narrow, _select, _split, _chunk, _detach)
}
_PARTS |= {torch.Tensor.__getitem__: _at, torch.Tensor.data.__get__: _detach}  # type: ignore[attr-defined]
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
        counted("threads", how.threads, least=1, code="invalid-threads", or_none=True)
        for name, value, kind in (("ahead", how.ahead, int), ("device", how.device, str)):
            if type(value) is not kind:
                raise TypeError(f"{where}: {name} must be {kind.__name__}, found {type(value).__name__}")
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
        With ``read`` one of "ahead" and "used".
    is_used : callable
        Says of a name whether its tensor is expected to be used: then it is read ahead. One that is not is
        read as soon as it is used after all.
    is_left_out : callable, optional
        Says of a name whether its tensor is not handed out.
    """
    opened = (_File(file, how, is_used, is_left_out) for file in files)
    # The next one is read while the last tensors of this one are used.
    after = next(opened, None)
    while after is not None:
        file, after = after, next(opened, None)
        with file:
            yield from file.tensors()


class _File:
    """A file that is open, whose tensors are being read."""

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
        # A mapped file is read where it is touched. A tensor that torch counts otherwise than the file, or
        # lacks, is read, or refused, as a whole.
        if self._handle.backend == "mmap" or dtype is None or dtype == DTYPES.get("F4"):
            return self._handle.get_tensor(name)
        return UnreadTensor(self._handle.get_slice(name), dtype, torch.device(self._device))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._loader.close()
        self._handle.close()


def has_place_for(model: torch.nn.Module, name: str, missing: tuple[type, ...]) -> bool:
    """Return whether a weight of that name may have a place in `model`. `missing` are other ranks' layers.

    It has none where its layer is of another rank, or where a list of layers lacks it. Models call much
    otherwise than checkpoints do, so nothing else is taken for a sign.
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
