"""Apply a patch to existing tensors, in place and on their devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.utils.dlpack

from ingot._adapters import pieces
from ingot._base.checks import CONVERTED
from ingot._base.frameworks import lacks
from ingot._base.options import Loading
from ingot._base.progress import reporting_on
from ingot._base.text import _escaped, located
from ingot._native import Checkpoint, Patch, hash_object, shown_url
from ingot._ranks.placements import Part
from ingot._read.door import Reads, open_checkpoint
from ingot._read.moves import misfit
from ingot._read.remap import Box, Virtual, applied, remapped
from ingot.errors import IntegrityError, OptionError
from ingot.typing import Source

from ._filling import destinations, packed, writing
from ._into import Fitting, IncompatibleKeys, Slot, fitting, slots, wholes
from ._tensors import DTYPES, fetcher, undisturbed

_VERSION = re.compile("[0-9a-f]{64}")
# Bytes of a chunk in the digest of a version (FORMAT.md, "Patches"). No dtype of torch has 6 bits.
_CHUNK_NBYTES = 2 << 20


def load_patch(
    into: torch.nn.Module | Mapping[str, torch.Tensor],
    version: Any,
    patch: Source,
    strict: bool,
    how: Loading,
) -> IncompatibleKeys:
    """Change the tensors of `into`, which have the version that the patch is for.

    Nothing is changed unless all checks pass. Without a `version`, the tensors are compared with the digest
    of the base.
    """
    _refuse_options(how, version)
    opened = Patch(open_checkpoint(patch, how._replace(backend="pread", remap=None)), True)
    layout = opened.layout()
    made = layout if how.remap is None else remapped(layout, how.remap, (False, None))
    found, keys = fitting(into, made, strict, how)
    places = slots(made, found)
    record = opened.record()
    keys.version = record["result"][0]
    if _is_base(opened, record, layout, version, found if how.remap is None else None, how):
        _write(opened, _changes(opened, layout, made, places, how), how)
    return keys


def _refuse_options(how: Loading, version: Any) -> None:
    given = [name for name in ("dequantize", "expected_sha256") if getattr(how, name)]
    if given:
        message = f"load_into(): {given[0]} is not supported with patch: load the new version as a whole"
        raise OptionError(message, code="not-with-patch", found=given[0])
    if version is not None and not (isinstance(version, str) and _VERSION.fullmatch(version)):
        found = shown_url(version) if isinstance(version, str) else type(version).__name__
        message = (
            "load_into(): with patch, source is the version that the tensors have: expected None or the "
            f"`version` of the result of load_into, 64 hexadecimal digits, found {_escaped(found)} — to load "
            "a file and then the patch, call load_into twice"
        )
        raise OptionError(message, code="not-a-version", found=found)


# The version of the tensors.


def _is_base(
    patch: Patch,
    record: dict[str, Any],
    layout: Checkpoint,
    version: str | None,
    found: Fitting | None,
    how: Loading,
) -> bool:
    """Return whether the tensors have the base of the patch; False if they have the result.

    Raises `IntegrityError` for another version.
    """
    base, result = record["base"], record["result"]
    if version is not None and version not in (base[0], result[0]):
        raise _wrong_base(patch, base[0], version)
    if version is not None and not how.verify:
        return bool(version == base[0])
    digest = _digest(layout, record, found)
    if digest not in (base[1], result[1]):
        raise _wrong_base(patch, base[1], digest)
    return bool(digest == base[1])


def _wrong_base(patch: Patch, expected: str, found: str) -> IntegrityError:
    reason = (
        f"the patch is for another version: expected {expected}, found {found} — apply the patches between "
        "the two first, in order"
    )
    return located(IntegrityError, reason, code="wrong-base", path=patch.path, expected=expected, found=found)


def _digest(layout: Checkpoint, record: dict[str, Any], found: Fitting | None) -> str:
    """Return the digest of the data of a version (FORMAT.md, "Patches"), from the tensors that have it."""
    own = {} if found is None else dict(zip(found.sources, found.tensors.values(), strict=True))
    names = sorted({*layout.offset_names()} - {*record["added"]} | {*record["removed"]})
    all_bytes = bytearray()
    for name in names:
        tensor = own.get(name)
        if tensor is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise _unknown_version(name)
        info = layout.info(name)
        if DTYPES.get(info.dtype) != tensor.dtype or packed(info.dtype, info.shape) != tuple(tensor.shape):
            raise _unknown_version(name)
        digests = [*_chunk_digests(tensor)]
        spelled = name.encode()
        all_bytes += len(spelled).to_bytes(8, "little") + spelled + len(digests).to_bytes(8, "little")
        all_bytes += b"".join(digests)
    return _xxh3(all_bytes).hex()


def _chunk_digests(tensor: torch.Tensor) -> Iterator[bytes]:
    fetch = fetcher(tensor)
    for begin in range(0, tensor.nbytes, _CHUNK_NBYTES):
        chunk = torch.utils.dlpack.from_dlpack(fetch(begin, min(begin + _CHUNK_NBYTES, tensor.nbytes)))
        yield _xxh3(chunk.numpy())


def _xxh3(data: Any) -> bytes:
    return bytes.fromhex(hash_object(data, "a tensor", "xxh3_128") or "")


def _unknown_version(name: str) -> OptionError:
    reason = (
        "without their version, load_into compares all tensors with the digest of the base, and needs whole "
        "tensors with the dtypes and names of the file: pass the `version` that load_into returned"
    )
    return located(OptionError, reason, code="no-version", tensor=name)


# The elements of each tensor that change.


class _Axis(NamedTuple):
    """The elements of a box along one dimension: their number, and their distance in both tensors."""

    size: int
    stored: int
    own: int


class _Change(NamedTuple):
    """Elements of a tensor of the patch, and the memory that has them."""

    name: str
    slot: Slot
    # The dtype in the patch, and those that its elements are converted to first.
    code: str
    casts: tuple[str, ...]
    # The first element, in the flattened tensor and in the memory.
    begin: int
    own_begin: int
    # Outermost first in the stored tensor.
    axes: tuple[_Axis, ...]

    @property
    def is_run(self) -> bool:
        """Whether the elements are one run in both tensors."""
        return all((axis.stored, axis.own) == (1, 1) for axis in self.axes) and len(self.axes) <= 1

    @property
    def nbytes(self) -> int:
        """The bytes of the elements in memory."""
        return prod(axis.size for axis in self.axes) * self.slot.tensor.itemsize

    @property
    def extent(self) -> int:
        """The number of elements of the stored tensor from the first to the last."""
        return 1 + sum((axis.size - 1) * axis.stored for axis in self.axes)

    def is_straight(self) -> bool:
        """Return whether bytes of the patch can be copied to CPU memory as they are."""
        tensor = self.slot.tensor
        return tensor.is_cpu and self.is_run and not self.casts and DTYPES.get(self.code) == tensor.dtype

    def memory(self) -> torch.Tensor:
        """Return the elements of the tensor from the first to the last, flat."""
        reach = 1 + sum((axis.size - 1) * axis.own for axis in self.axes)
        tensor = self.slot.tensor.detach()
        return tensor.as_strided((reach,), (1,), tensor.storage_offset() + self.own_begin)


def _changes(
    patch: Patch, layout: Checkpoint, made: Checkpoint, places: Iterable[Slot], how: Loading
) -> list[_Change]:
    """Return the changes of all tensors. Raises for the first that cannot be changed in place."""
    changed = {info.name: info.dtype for info, *_ in patch.changed()}
    virtual_of = _virtuals(layout, how)
    found: list[_Change] = []
    for slot in places:
        virtual = virtual_of(slot.source)
        boxes = [box for box in virtual.boxes if box.source in changed]
        if not boxes or not slot.tensor.numel():
            continue
        _refuse_overlap(slot)
        stored = {changed[box.source] for box in boxes}
        for code in stored - DTYPES.keys():
            raise lacks(f"torch {torch.__version__}", code)
        if "F4" in stored:
            if slot.tensor.dtype != DTYPES["F4"]:
                reason = f"the destination has another dtype: expected F4, found {slot.tensor.dtype}"
                raise misfit(slot.name, reason, "destination-dtype")
            boxes = _in_bytes(slot, virtual)
        converts = (how.dtype,) if how.dtype is not None and virtual.dtype in CONVERTED else ()
        held = _held(boxes, slot.part)
        found += [_change(slot, box, changed[box.source], converts) for box in held]
    return found


def _virtuals(layout: Checkpoint, how: Loading) -> Callable[[str], Virtual]:
    """Return a function that maps a tensor to the boxes of stored tensors that it consists of."""
    if how.remap is not None:
        return applied(layout, how.remap).tensors.__getitem__
    shared = layout.shared()

    def virtual_of(name: str) -> Virtual:
        of, part = shared.get(name, (name, None))
        info = layout.info(of)
        if part is None:
            return Virtual.stored(of, info.dtype, info.shape)
        shape, strides, begin = part
        return Virtual.stored(of, info.dtype, shape, strides, begin)

    return virtual_of


def _in_bytes(slot: Slot, virtual: Virtual) -> list[Box]:
    """Return the box of a whole tensor of F4, in bytes, as patches and torch count its elements."""
    [box, *others] = virtual.boxes
    plain = Virtual.stored(box.source, virtual.dtype, virtual.shape)
    if others or box.casts or box != plain.boxes[0]:
        raise misfit(
            slot.name, "F4 has two elements in a byte: a patch cannot change parts of a tensor of it"
        )
    return [*Virtual.stored(box.source, "U8", packed("F4", virtual.shape)).boxes]


def _held(boxes: list[Box], part: Part | None) -> list[Box]:
    """Return the boxes within this rank's part, in its own memory."""
    if part is None:
        return boxes
    if not part.numel:
        return []
    for dim, intervals in enumerate(part.intervals):
        cut: list[Box] = []
        at = 0
        for begin, end in intervals:
            for box in boxes:
                cut += box.cut(dim, begin, end, at)
            at += end - begin
        boxes = cut
    return boxes


def _change(slot: Slot, box: Box, code: str, casts: tuple[str, ...]) -> _Change:
    strides = slot.tensor.stride()
    own_begin = sum(side.begin * stride for side, stride in zip(box.sides, strides, strict=True))
    axes = [
        _Axis(side.size, side.stride, side.step * stride)
        for side, stride in zip(box.sides, strides, strict=True)
        if side.size > 1
    ]
    axes.sort(reverse=True, key=lambda axis: axis.stored)
    if not _are_apart([(axis.size, axis.stored) for axis in axes]):
        raise misfit(
            slot.name, "elements of a shared tensor are at several places: load the new version as a whole"
        )
    return _Change(box.source, slot, code, (*box.casts, *casts), box.begin, own_begin, _merged(axes))


def _refuse_overlap(slot: Slot) -> None:
    """Raise `DestinationError` for a tensor whose elements share memory with each other."""
    sides = [pair for pair in zip(slot.tensor.shape, slot.tensor.stride(), strict=True) if pair[0] > 1]
    if not _are_apart(sorted(sides, reverse=True, key=lambda side: side[1])):
        reason = "elements of the destination share memory with each other"
        raise misfit(slot.name, reason, "destination-overlap")


def _are_apart(sides: list[tuple[int, int]]) -> bool:
    """Return whether each dimension, largest stride first, steps over all smaller ones."""
    extent = 1
    for size, stride in reversed(sides):
        if stride < extent:
            return False
        extent += (size - 1) * stride
    return True


def _merged(axes: list[_Axis]) -> tuple[_Axis, ...]:
    """Return the axes, with neighbours joined that are one in both tensors."""
    found: list[_Axis] = []
    for axis in axes:
        if found and (found[-1].stored, found[-1].own) == (axis.size * axis.stored, axis.size * axis.own):
            axis = axis._replace(size=found.pop().size * axis.size)
        found.append(axis)
    return tuple(found)


# Writing.


def _write(patch: Patch, changes: list[_Change], how: Loading) -> None:
    straight = [one for one in changes if one.is_straight()]
    others = [one for one in changes if not one.is_straight()]
    with undisturbed():
        memory = {
            f"{one.name} {number}": one.memory().view(torch.uint8) for number, one in enumerate(straight)
        }
    places = destinations(memory)
    wanted = [(one.name, one.begin * one.slot.tensor.itemsize) for one in straight]
    slots = {id(one.slot): one.slot for one in changes}.values()
    with (
        reporting_on(how.progress, "Patching", patch.path or "") as tell,
        writing([*(slot.tensor for slot in slots), *wholes(slots)]),
    ):
        first, second = Reads(how.threads, tell).shares(
            lambda: sum(one.nbytes for one in straight), lambda: sum(one.nbytes for one in others)
        )
        patch.write_into(wanted, places, **first.options())
        _write_others(patch, others, second)


def _write_others(patch: Patch, changes: list[_Change], reads: Reads) -> None:
    done, total = 0, sum(change.nbytes for change in changes)
    codecs = {info.name: codec for info, codec, *_ in patch.changed()}
    for change in changes:
        with undisturbed(), torch.no_grad():
            for elements in _elements(patch, change, codecs[change.name] == "whole"):
                _put(change, *elements)
        done += change.nbytes
        if reads.tell is not None:
            reads.tell(done, total)


def _elements(patch: Patch, change: _Change, is_whole: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield positions from the first element of the change on, and the new elements, in bounded parts."""
    dtype = DTYPES[change.code]
    step = pieces.PIECE_NBYTES // 8
    for begin in range(0, change.extent, step):
        end = min(begin + step, change.extent)
        positions, values = patch.elements(change.name, change.begin + begin, change.begin + end)
        if not values:
            continue
        elements = torch.frombuffer(bytearray(values), dtype=torch.uint8).view(dtype)
        if is_whole:
            yield torch.arange(begin, end), elements
        else:
            yield torch.frombuffer(bytearray(positions), dtype=torch.int64) - change.begin, elements


# For each element size, the dtype of integers that torch copies in place of any other dtype.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _put(change: _Change, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write the elements of the stored tensor at `positions` that are in the box."""
    tensor = change.slot.tensor
    values = values.to(tensor.device)
    for code in change.casts:
        values = values.to(DTYPES[code])
    values = values.to(tensor.dtype).view(_INTEGERS[tensor.itemsize])
    memory = change.memory().view(_INTEGERS[tensor.itemsize])
    rest = positions.to(tensor.device)
    if change.is_run:
        memory.index_copy_(0, rest, values)
        return
    place, is_inside = torch.zeros_like(rest), torch.ones_like(rest, dtype=torch.bool)
    for size, stored, own in change.axes:
        number = rest.div(stored, rounding_mode="floor")
        rest = rest - number * stored
        is_inside &= number < size
        place += number * own
    is_inside &= rest == 0
    memory.index_copy_(0, place[is_inside], values[is_inside])
