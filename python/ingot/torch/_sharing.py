"""Which tensors of a dict share memory."""

from __future__ import annotations

import torch

from ingot.errors import SharedMemoryError, _quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


def refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `SharedMemoryError` where two of the tensors have a byte in common.

    Views of one storage that only lie between each other, such as the parts of ``weight.chunk(3, dim=1)``,
    share nothing. Upstream refuses those as well, because it refuses every tensor that is not contiguous.
    """
    for names in crowds(tensors):
        pair = first_pair(names, tensors)
        if pair is not None:
            raise shares_memory(pair)


def shares_memory(
    pair: tuple[str, str], hint: str = 'save with shared="alias" or "copy", or save `tensor.clone()`'
) -> SharedMemoryError:
    """The error for two tensors that share memory. It begins as upstream's does."""
    first, second = map(_quoted, pair)
    return SharedMemoryError(
        "Some tensors share memory, this will lead to duplicate memory on disk and potential "
        f"differences when loading them again: {first}, {second} — {hint}",
        code="shared-memory",
        tensor=pair[0],
        found=pair,
    )


def crowds(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Groups of tensors whose extents, first byte to last, overlap. Only these can share a byte."""
    extents = sorted(
        (str(tensor.device), *extent(tensor), name) for name, tensor in tensors.items() if tensor.numel()
    )
    crowd: list[str] = []
    where, reach = "", 0
    for device, begin, end, name in extents:
        if device != where or begin >= reach:
            if len(crowd) > 1:
                yield crowd
            crowd, where, reach = [], device, end
        crowd.append(name)
        reach = max(reach, end)
    if len(crowd) > 1:
        yield crowd


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one after the last. torch has no negative strides."""
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize


def first_pair(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Two tensors with a byte in common. Exact: each marks its bytes on a map of the memory they span."""
    extents = {name: extent(tensors[name]) for name in names}
    start = min(begin for begin, _ in extents.values())
    taken = torch.zeros(max(end for _, end in extents.values()) - start, dtype=torch.bool, device="cpu")
    marks: dict[str, torch.Tensor] = {}
    for name, (begin, _) in extents.items():
        mark = _bytes_of(tensors[name], taken, begin - start)
        if mark.any():
            # Who marked them? Take the map clean again and ask each of those before.
            taken.fill_(False)
            mark.fill_(True)
            return next(other for other, before in marks.items() if before.any()), name
        mark.fill_(True)
        marks[name] = mark
    return None


def _bytes_of(tensor: torch.Tensor, taken: torch.Tensor, first: int) -> torch.Tensor:
    """The part of `taken` that stands for the bytes of `tensor`, whose first is at `first`."""
    nbytes = tensor.itemsize
    # A broadcast dimension is the same bytes again and again: once is enough, and torch fills no tensor
    # twice.
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return taken.as_strided([*sizes, nbytes], [*(stride * nbytes for stride in tensor.stride()), 1], first)
