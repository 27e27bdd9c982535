"""Read into existing tensors: directly, or in pieces that torch copies.

For autograd this is equivalent to ``copy_`` under ``torch.no_grad()``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from ingot._adapters.pieces import Piece, aligned, batches, pieces, room
from ingot._base.checks import FLOATS
from ingot._native import Checkpoint, Destinations, Export, Gpu
from ingot._read.door import Reads
from ingot._read.load import Memory, fill
from ingot._read.moves import misfit, no_destination
from ingot._read.select import Wanted
from ingot.errors import DestinationError, DtypeError

from . import _tensors
from ._link import Ring, link
from ._tensors import (
    _CODES,
    DTYPES,
    PLAIN_CLASSES,
    _crosses_by_dlpack,
    _to_dlpack,
    not_plain,
    undisturbed,
    wrap,
)


def destinations(tensors: Mapping[str, torch.Tensor]) -> Destinations:
    """Return the tensors of the CPU as destinations. Raises for a tensor without writable memory."""
    with undisturbed():
        return Destinations(tensors, _memory, _export)


def _writable_places(tensors: list[torch.Tensor]) -> tuple[list[Any], list[int]] | None:
    """Return the result of `_places`, or None if `refuse_destination` has to check each tensor."""
    if not torch.is_inference_mode_enabled() and any(map(torch.Tensor.is_inference, tensors)):
        return None
    return _tensors._places(tensors)


_export = Export.dlpack(
    [*PLAIN_CLASSES], _writable_places, _tensors._are_stored, _to_dlpack, _tensors._exchange
)


@contextmanager
def writing(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Record a write to `tensors` in autograd's version counters, also if the block fails halfway.

    A `DestinationError` or a `DtypeError` is raised before anything is written, so that it leaves the
    counters unchanged.
    """
    is_refused = False
    try:
        yield
    except (DestinationError, DtypeError):
        is_refused = True
        raise
    finally:
        if not is_refused:
            _record(list(tensors))


def _record(tensors: list[torch.Tensor]) -> None:
    if _BUMPS_MANY:
        increment_version(tensors)
    else:
        for tensor in tensors:
            increment_version(tensor)
    # A constant has the tangent 0.
    with torch.no_grad():
        for tensor in tensors if forward_ad._current_level >= 0 else ():
            tangent = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
            if tangent is not None:
                tangent.zero_()


def _bumps_many() -> bool:
    """Return whether this torch takes a list: before 2.6 it takes one tensor."""
    try:
        increment_version([])
    except (RuntimeError, TypeError):
        return False
    return True


# One call for 20,000 tensors takes 0.9 ms, one for each 3.5 ms.
_BUMPS_MANY = _bumps_many()


def refuse_captured(names: Iterable[str]) -> None:
    """Raise `DestinationError` for the first name inside a transform that differentiates.

    The transform does not see a write to a tensor from outside, so its gradients would be wrong.
    """
    name = next(iter(names), None) if _tensors.is_differentiated() else None
    if name is not None:
        reason = "a transform that differentiates (grad, vjp, jvp) does not see the change: load before it"
        raise misfit(name, reason)


def _memory(name: str, tensor: torch.Tensor) -> Memory | None:
    """Return the code of a tensor's dtype and a capsule of its memory, or None off the CPU.

    Called for tensors that `_export` cannot export.
    """
    refuse_destination(name, tensor)
    if not tensor.is_cpu:
        return None
    code = _CODES.get(tensor.dtype)
    if code is None:
        reason = f"no file has tensors of the destination's dtype, {tensor.dtype}"
        raise misfit(name, reason, "destination-dtype")
    # The elements of dtypes that DLPack of this torch lacks are of one byte.
    plain = tensor if _crosses_by_dlpack(tensor.dtype) else tensor.detach().view(torch.uint8)
    return code, _to_dlpack(plain), False


def refuse_destination(name: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor without memory of its own that can be written to."""
    if not isinstance(tensor, torch.Tensor):
        raise no_destination(name, "torch.Tensor", tensor)
    refuse_shapeless(name, tensor)
    if tensor.is_meta:
        raise misfit(name, "a meta tensor has no memory to be filled: call `model.to_empty(device=…)` first")
    reason = not_plain(tensor)
    if reason is not None:
        # The rest of the message is advice for saving.
        fact = reason.partition(": ")[0]
        raise misfit(name, f"{fact}: expected a plain tensor with memory of its own")
    if tensor.is_conj() or tensor.is_neg():
        raise misfit(name, "the destination is a lazy view of other values: resolve it first")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        way_out = "load there, or fill its `.clone()`"
        reason = f"an inference tensor can only be filled inside `torch.inference_mode()`: {way_out}"
        raise misfit(name, reason)


def refuse_shapeless(name: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor without a shape, which torch reports by a bare `RuntimeError`."""
    if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        kind = type(tensor).__name__
        raise misfit(name, f"the destination is an {kind} without memory: run the module once before loading")
    if tensor.is_nested:
        raise misfit(name, "a nested tensor cannot be filled: fill the tensors that `.unbind()` returns")


# Floats, with the wider dtypes that hold them exactly. They are copied to a device in the stored dtype, which
# has fewer bytes, and converted there: both libraries return the same values.
_SMALL = dict.fromkeys(FLOATS[4:], ("F16", "BF16", "F32", "F64"))
_WIDER = {"F32": ("F64",), **dict.fromkeys(("F16", "BF16"), ("F32", "F64")), **_SMALL}


def is_widened(stored: str, code: str) -> bool:
    """Return whether `stored` is converted to `code` on the device that it is copied to."""
    return code in _WIDER.get(stored, ())


class Filling:
    """The wanted parts of a file, and the tensors of one device that torch fills with them.

    Raises `DestinationError` for the first that has another shape, before anything is read.
    """

    def __init__(self, checkpoint: Checkpoint, wanted: Wanted, tensors: list[torch.Tensor]) -> None:
        self._checkpoint = checkpoint
        self._tensors = tensors
        outlines = checkpoint.outlines(wanted, wrap)
        if any(not tensor.is_cpu for tensor in tensors):
            kept = [checkpoint.info(name).dtype for name in wanted.names]
            pairs = zip(kept, outlines, strict=True)
            codes = [stored if is_widened(stored, code) else code for stored, (code, _) in pairs]
            wanted = wanted._replace(dtypes=codes)
            outlines = [(code, shape) for code, (_, shape) in zip(codes, outlines, strict=True)]
        self._wanted = wanted
        self._outlines = outlines
        for name, tensor, (code, shape) in zip(wanted.names, tensors, outlines, strict=True):
            expected = packed(code, shape)
            if tuple(tensor.shape) != expected:
                shapes = f"expected {list(expected)}, found {list(tensor.shape)}"
                reason = f"the destination has another shape: {shapes}"
                raise misfit(name, reason, "destination-shape")

    def read(self, gpu: Gpu | None, reads: Reads) -> None:
        """Fill the tensors in batches of pieces. `gpu` is their device if it can be read onto."""
        if not self._tensors:
            return
        straight = [] if gpu is None else self._straight()
        if gpu is not None and straight:
            rest = sorted(set(range(len(self._tensors))).difference(straight))
            sizes = (partial(self._nbytes, ranks) for ranks in (straight, rest))
            first, reads = reads.shares(*sizes)
            with undisturbed():
                memory = [_to_dlpack(_bytes(self._tensors[rank])) for rank in straight]
            self._checkpoint.fill_on(self._wanted.some(straight), gpu, memory, **first.options())
            self._keep(rest)
        self._read_in_pieces(gpu, reads)

    def _straight(self) -> list[int]:
        """Return the ranks of the tensors that are filled as they are in the file.

        They are contiguous, of the dtype that is read, and share no memory.
        """
        plain = (
            rank
            for rank, (tensor, (code, _)) in enumerate(zip(self._tensors, self._outlines, strict=True))
            if _CODES.get(tensor.dtype) == code and tensor.is_contiguous() and tensor.nbytes > 0
        )
        found: list[int] = []
        end = 0
        for rank in sorted(plain, key=lambda rank: self._tensors[rank].data_ptr()):
            tensor = self._tensors[rank]
            if tensor.data_ptr() < end:
                return []
            end = tensor.data_ptr() + tensor.nbytes
            found.append(rank)
        return sorted(found)

    def _keep(self, ranks: list[int]) -> None:
        """Drop all tensors but these."""
        self._wanted = self._wanted.some(ranks)
        self._tensors = [self._tensors[rank] for rank in ranks]
        self._outlines = [self._outlines[rank] for rank in ranks]

    def _nbytes(self, ranks: list[int]) -> int:
        return sum(self._tensors[rank].nbytes for rank in ranks)

    def _read_in_pieces(self, gpu: Gpu | None, reads: Reads) -> None:
        if not self._tensors:
            return
        device = self._tensors[0].device
        is_readable = gpu is not None or device.type == "cpu"
        steps = self._convert(gpu, reads.threads) if is_readable else self._pass(device, reads.threads)
        total, done = self.nbytes(), 0
        with closing(steps):
            for nbytes in steps:
                done += nbytes
                if reads.tell is not None:
                    reads.tell(done, total)

    def nbytes(self) -> int:
        """Return the bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def _convert(self, gpu: Gpu | None, threads: int | None) -> Generator[int]:
        """Read the pieces to the tensors' device, and convert them there.

        Yields the bytes that each batch fills.
        """
        for batch in batches(self._cut()):
            # A function of its own, so that its tensors are freed before the next batch.
            yield self._convert_some(batch, gpu, threads)

    def _convert_some(self, batch: list[Piece], gpu: Gpu | None, threads: int | None) -> int:
        found = self._checkpoint.parts(self._part(batch), wrap, onto=gpu, threads=threads)
        places = [self._place(piece) for piece in batch]
        with undisturbed(), torch.no_grad():
            for place, values in zip(places, found, strict=True):
                into, given = _plainly(place, values)
                into.copy_(given)
        return sum(place.nbytes for place in places)

    def _pass(self, device: torch.device, threads: int | None) -> Generator[int]:
        """Read the pieces into host memory, pinned if torch can pin it for the device, and copy them."""
        with undisturbed():
            way = link(device)
        with Ring(way, room(self._cut())) as ring:
            for batch in batches(self._cut()):
                with undisturbed():
                    memory = ring.take()
                    laid = self._laid(batch, memory)
                fill(self._checkpoint, self._part(batch), destinations(laid), Reads(threads))
                places = [self._place(piece) for piece in batch]
                with undisturbed(), torch.no_grad():
                    for place, values in zip(places, laid.values(), strict=True):
                        cross(ring, place, values)
                    ring.put(memory)
                yield sum(place.nbytes for place in places)

    def _cut(self) -> Iterator[Piece]:
        indices = self._wanted.indices or [None] * len(self._tensors)
        codes = (code for code, _ in self._outlines)
        for rank, (name, index, code) in enumerate(zip(self._wanted.names, indices, codes, strict=True)):
            nbits = 4 if code == "F4" else 8 * DTYPES[code].itemsize
            yield from pieces(rank, index, self._checkpoint.info(name).shape, nbits)

    def _part(self, batch: list[Piece]) -> Wanted:
        """Return the wanted parts of a batch."""
        some = self._wanted.some([piece.rank for piece in batch])
        return some._replace(indices=[piece.index for piece in batch])

    def _laid(self, batch: list[Piece], memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a tensor in `memory` for each piece."""
        laid, begin = {}, 0
        for number, piece in enumerate(batch):
            code, _ = self._outlines[piece.rank]
            own = memory[begin : begin + piece.nbytes].view(DTYPES[code])
            laid[f"{self._wanted.names[piece.rank]} {number}"] = own.view(packed(code, piece.shape))
            begin += aligned(piece.nbytes)
        return laid

    def _place(self, piece: Piece) -> torch.Tensor:
        """Return the part of its tensor that a piece fills."""
        tensor, (code, _) = self._tensors[piece.rank], self._outlines[piece.rank]
        with undisturbed(), torch.no_grad():
            # Without the dimensions of size 1 that an index adds. For any strides this is a view.
            whole = tensor.reshape(packed(code, piece.whole))
            if piece.shape == piece.whole:
                return whole
            *outer, last = piece.place
            if code == "F4":
                last = slice(last.start // 2, last.stop // 2)
            return whole[(*outer, last)]


def packed(code: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return torch's shape of a tensor with this shape in the header: a byte of F4 is one element."""
    return (*shape[:-1], shape[-1] // 2) if code == "F4" and shape else tuple(shape)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)


def cross(ring: Ring, place: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` from a piece of the ring to another device, and convert them there."""
    if values.dtype != place.dtype:
        # torch would convert on the host, and copy more bytes from memory that is not pinned.
        raw = torch.empty(values.shape, dtype=values.dtype, device=place.device)
        cross(ring, raw, values)
        place.copy_(raw)
    else:
        ring.copy(*_plainly(place, values))


def _plainly(place: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as bytes if they share a one-byte dtype, since torch cannot copy rare dtypes otherwise."""
    if place.dtype == values.dtype and values.itemsize == 1:
        return place.view(torch.uint8), values.view(torch.uint8)
    return place, values
