"""What upstream says of an index that does not fit: by torch's rules for torch, else by its slicer's."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as integer
from typing import Any

SUBBYTES = (
    "The slice is slicing for subbytes dtypes, and the slice does not end up at a byte boundary, "
    "this is invalid."
)


def refusal_of_torch(shape: Sequence[int], key: Any) -> Exception | None:
    """What torch raises for `tensor[key]`; None where it takes the index."""
    import torch

    # Checked as a whole tensor is, over one byte of memory.
    stand_in = torch.zeros((), dtype=torch.uint8).expand(tuple(shape))
    try:
        stand_in[key]
    except (IndexError, TypeError, ValueError) as error:
        return error
    return None


def words_of_slicer(shape: Sequence[int], key: Any) -> str | None:
    """What upstream's slicer says; None where it takes the index, or fails by accident.

    It has neither lists, None nor masks, and takes no bounds past the end. Where it ends in an
    `OverflowError` or a `SystemError`, and of tensors without elements, the part is what NumPy would give.
    """
    if isinstance(key, list):
        if key:
            return "Non empty lists are not implemented"
        key = slice(0, 0)
    parts = [*key] if isinstance(key, tuple) else [key]
    if sum(part is ... for part in parts) > 1:
        return "Only one ellipsis (...) is allowed in slice index"
    whole = max(len(shape) - len(parts) + 1, 0)
    normal: list[int | slice] = []
    for position, part in enumerate(parts):
        if part is ...:
            normal += [slice(None)] * whole
        elif isinstance(part, slice):
            bounds = [bound for bound in (part.start, part.stop, part.step) if bound is not None]
            if any(_number(bound) is None for bound in bounds):
                return None
            if part.step is not None and part.step <= 0:
                return f"Slice step must be a positive integer, got {part.step}"
            normal.append(part)
        else:
            number = _number(part)
            if number is None:
                return f"Unsupported slice index at position {position}: expected slice, int, or ellipsis"
            size = shape[len(normal)] if len(normal) < len(shape) else 0
            if number + size < 0:
                return f"Invalid index {number} for dimension {len(normal)} of size {size}"
            normal.append(number if number >= 0 else number + size)
    return _words_of_parts(shape, normal)


def _number(part: Any) -> int | None:
    try:
        number = integer(part)
    except TypeError:
        return None
    return number if -(2**63) <= number < 2**63 else None


def _words_of_parts(shape: Sequence[int], parts: list[int | slice]) -> str | None:
    """What it says of ints that are counted from the front, and slices."""
    what = None
    if len(parts) > len(shape):
        what = "more slicing indexes than dimensions in tensor"
    else:
        # From the last dimension to the first.
        for axis in range(len(parts) - 1, -1, -1):
            beyond = _beyond(parts[axis], shape[axis])
            if beyond is not None:
                what = f"index {beyond} out of bounds for tensor dimension #{axis} of size {shape[axis]}"
                break
    if what is None:
        return None
    return f"{_during(shape, parts)}: {what}"


def _beyond(part: int | slice, size: int) -> int | None:
    """The position past the end that it names, if there is one."""
    if isinstance(part, int):
        return part if part >= size else None
    bounds = (part.start, None if part.stop is None else part.stop - 1)
    return next((int(bound) for bound in bounds if size and bound is not None and bound >= size), None)


def words_of_a_part_of_a_byte(shape: Sequence[int], key: Any) -> str:
    """What it says where a run of elements does not end at a byte."""
    parts = [*key] if isinstance(key, tuple) else [key]
    return f"{_during(shape, parts)}: {SUBBYTES}"


def _during(shape: Sequence[int], parts: Sequence[Any]) -> str:
    return f"Error during slicing [{', '.join(map(_shown, parts))}] with shape {[*shape]}"


def _shown(part: Any) -> str:
    if not isinstance(part, slice):
        return "..." if part is ... else str(part)
    start, stop, step = ("" if bound is None else str(bound) for bound in (part.start, part.stop, part.step))
    return f"{start}:{stop}" + (f":{step}" if step not in ("", "1") else "")
