"""Pieces of tensors on their way from rank to rank: packed one after the other, as bytes of no dtype."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .placements import Box

# What bytes are moved as: values of no dtype are changed by that.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Where a piece begins, so that it may be looked at as any dtype.
_ALIGNMENT = 16


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as integers of the size of its elements."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(_RAW[tensor.itemsize])


def padded(shape: Sequence[int], itemsize: int) -> int:
    """The bytes that a piece takes among others."""
    nbytes: int = prod(shape) * itemsize
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def sides(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(side.stop - side.start for side in box)


class Parcels(NamedTuple):
    """What a rank sends to each other and receives from each: bytes, one rank's after the other's."""

    to_each: list[int]
    sent: torch.Tensor
    from_each: list[int]
    received: torch.Tensor

    @classmethod
    def of(cls, for_each: Sequence[Sequence[torch.Tensor]], from_each: list[int]) -> Parcels:
        """Pieces that are sent, packed, and memory for so many bytes that come."""
        sizes = [sum(padded(piece.shape, piece.itemsize) for piece in pieces) for pieces in for_each]
        run = Run(torch.empty(sum(sizes), dtype=torch.uint8))
        for pieces in for_each:
            for piece in pieces:
                run.take(tuple(piece.shape), piece.itemsize).copy_(raw(piece))
        return cls(sizes, run.memory, from_each, torch.empty(sum(from_each), dtype=torch.uint8))


class Run:
    """Memory that is taken from the beginning on, piece by piece, in the order in which it was packed."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._at = 0

    def take(self, shape: tuple[int, ...], itemsize: int) -> torch.Tensor:
        """The next piece."""
        nbytes = prod(shape) * itemsize
        piece = self.memory[self._at : self._at + nbytes]
        self._at += padded(shape, itemsize)
        return piece.view(_RAW[itemsize]).view(shape)
