"""Loading by many ranks, so that each byte is read once: one sends the others what they want of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from math import prod
from operator import itemgetter
from typing import NamedTuple

import torch

from ingot._load import Reads, Wanted, fill
from ingot.torch._filling import destinations
from ingot.torch._into import Slot, read
from ingot.torch._tensors import DTYPES

from .peers import this_node
from .placements import Part, in_elements, moved
from .plan import Tensor, Wants, plan, sent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ingot._native import Checkpoint, TensorInfo

    from .peers import Peers
    from .placements import Box
    from .plan import Block, Plan

# What bytes are moved as: values of no dtype are changed by that.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Where a block or a piece begins, so that it may be looked at as any dtype.
_ALIGNMENT = 16


def scope(checkpoint: Checkpoint, asked: str | bool, peers: Peers) -> tuple[str | None, list[int]]:
    """Who reads for whom, "job", "node" or None for nobody; and the number of each rank's node.

    Raises on all ranks where they have different files or were asked for different things.
    """
    mine = asked, fingerprint(checkpoint), this_node(), checkpoint.backend == "mmap"
    facts = peers.gather(mine, "looking at the file")
    for rank, other in enumerate(facts):
        for what, first, found in zip(("read_once", "file"), facts[0], other, strict=False):
            if first != found:
                where = checkpoint.path or "what was given to load from"
                reason = f"has another {what} than rank 0: {where}" + (
                    f": expected {first!r}, found {found!r}" if what == "read_once" else ""
                )
                raise peers.error(rank, reason, "ranks-differ")
    names = [*dict.fromkeys(node for *_, node, _ in facts)]
    nodes = [names.index(node) for *_, node, _ in facts]
    if asked != "auto":
        return (asked if isinstance(asked, str) else None), nodes
    # The ranks of a machine have one cache of what is mapped; all else comes over a network.
    is_far = not all(is_mapped for *_, is_mapped in facts)
    return ("job" if is_far and len(names) > 1 else None), nodes


def fingerprint(checkpoint: Checkpoint) -> str:
    """Equal for files with the same tensors at the same places."""
    digest = sha256()
    for info in checkpoint.infos():
        digest.update(f"{info.name}\0{info.dtype}{info.shape}{info.begin}:{info.end}\0".encode())
    return digest.hexdigest()


def load(
    checkpoint: Checkpoint,
    slots: list[Slot],
    reads: Reads,
    peers: Peers,
    nodes: list[int],
    scope: str,
) -> None:
    """Fill each rank's tensors. All ranks call it, whatever they want."""
    Load(checkpoint, slots, peers, nodes, scope).run(reads)


class _Piece(NamedTuple):
    """Bytes that go from one rank to another."""

    # In a block, or in a tensor of this rank.
    place: Box
    shape: tuple[int, ...]
    nbytes: int


class Load:
    """One load by all ranks of a process group."""

    def __init__(
        self, checkpoint: Checkpoint, slots: list[Slot], peers: Peers, nodes: list[int], scope: str
    ) -> None:
        self._checkpoint, self._peers = checkpoint, peers
        self._infos = checkpoint.infos()
        self._numbers = {info.name: number for number, info in enumerate(self._infos)}
        # Of a tensor that a rank has two places for, the second reads for itself.
        self._own: dict[int, Slot] = {}
        self._alone: list[Slot] = []
        for one in slots:
            number = self._numbers[one.source]
            movable = self._infos[number].dtype in DTYPES and number not in self._own
            if movable:
                self._own[number] = one
            else:
                self._alone.append(one)
        wants = peers.gather(self._wants(), "planning")
        tensors = [_tensor(info) for info in self._infos]
        self._plan: Plan = plan(tensors, wants, nodes, scope, peers.rank)

    def _wants(self) -> Wants:
        known: dict[Part, int] = {}
        kinds = [0] * len(self._infos)
        for number, one in self._own.items():
            part = one.part or Part.whole(_tensor(self._infos[number]).shape)
            kinds[number] = known.setdefault(part, len(known) + 1)
        return Wants([*known], _packed(kinds))

    def run(self, reads: Reads) -> None:
        direct = [self._own[number] for number, _ in self._plan.direct(self._peers.rank)] + self._alone
        alone = sum(one.tensor.nbytes for one in direct)
        nbytes = sum(one.tensor.nbytes for one in [*self._own.values(), *self._alone]) - alone
        by_itself, by_others = reads.shares(lambda: alone, lambda: nbytes)
        self._done, self._nbytes = 0, nbytes
        with ThreadPoolExecutor(1, "ingot-window") as ahead:
            self._rounds(ahead, direct, by_itself, by_others)

    def _rounds(
        self, ahead: ThreadPoolExecutor, direct: list[Slot], by_itself: Reads, by_others: Reads
    ) -> None:
        """Read what is this rank's, then exchange windows: each is read while the one before is sent."""
        peers, doing = self._peers, f"reading {self._checkpoint.path or 'what was given to load from'}"
        fault: BaseException | None = None
        rounds = self._plan.rounds()
        windows = next(rounds, None)
        stage = ahead.submit(self._stage, windows, by_others)
        try:
            read(self._checkpoint, direct, by_itself)
        except BaseException as error:
            fault = error
        while True:
            packed = _Packed([], [], torch.empty(0, dtype=torch.uint8), [])
            following = None
            if fault is None:
                try:
                    staged = stage.result()
                    following = next(rounds, None)
                    # Its buffer is not that which is packed from now.
                    stage = ahead.submit(self._stage, following, by_others)
                    packed = self._pack(windows, staged)
                except BaseException as error:
                    fault = error
            if not peers.agree(fault, doing, more=windows is not None):
                return
            received = peers.exchange(packed.to_each, packed.from_each, packed.data, doing)
            try:
                self._unpack(packed, received)
                self._tell(packed, by_others)
            except BaseException as error:
                fault = error
            windows = following

    def _tell(self, packed: _Packed, reads: Reads) -> None:
        self._done += sum(
            prod(piece.shape) * self._own[number].tensor.itemsize for number, piece in packed.arriving
        )
        if reads.tell is not None:
            reads.tell(self._done, self._nbytes)

    def _stage(
        self, windows: list[tuple[int, list[Block]]] | None, reads: Reads
    ) -> list[tuple[Block, torch.Tensor]]:
        """Read the window of this rank: each block as elements of no dtype."""
        mine = dict(windows or []).get(self._peers.rank, [])
        memory = torch.empty(sum(_padded(block.nbytes) for block in mine), dtype=torch.uint8)
        found: list[tuple[Block, torch.Tensor]] = []
        tensors: dict[str, torch.Tensor] = {}
        indices: list[Box] = []
        at = 0
        for block in mine:
            info = self._infos[block.tensor]
            shape = tuple(side.stop - side.start for side in block.box)
            raw = memory[at : at + block.nbytes].view(_RAW[block.pattern.tensor.itemsize]).view(shape)
            found.append((block, raw))
            tensors[f"{info.name}#{len(tensors)}"] = raw.view(DTYPES[info.dtype])
            indices.append(in_elements(block.box) if info.dtype == "F4" else block.box)
            at += _padded(block.nbytes)
        names = [self._infos[block.tensor].name for block in mine]
        fill(self._checkpoint, Wanted(names, indices), destinations(tensors), Reads(reads.threads))
        return found

    def _pack(
        self, windows: list[tuple[int, list[Block]]] | None, staged: list[tuple[Block, torch.Tensor]]
    ) -> _Packed:
        """What this rank sends of its window, and what comes to it of all."""
        for_each: list[list[tuple[torch.Tensor, int]]] = [[] for _ in range(self._peers.size)]
        for block, raw in staged:
            for rank, part in block.pattern.wanted:
                for box, _ in sent(part, _interval(block.box)):
                    piece = raw[moved(_of(raw), block.box, box)]
                    for_each[rank].append((piece, piece.numel() * piece.element_size()))
        to_each = [sum(_padded(nbytes) for _, nbytes in pieces) for pieces in for_each]
        data = torch.empty(sum(to_each), dtype=torch.uint8)
        at = 0
        for piece, nbytes in (one for pieces in for_each for one in pieces):
            data[at : at + nbytes].view(piece.dtype).view(piece.shape).copy_(piece)
            at += _padded(nbytes)
        from_each = [0] * self._peers.size
        arriving: list[tuple[int, _Piece]] = []
        for rank, blocks in sorted(windows or [], key=itemgetter(0)):
            coming = [*self._arriving(blocks)]
            from_each[rank] += sum(_padded(piece.nbytes) for _, piece in coming)
            arriving += coming
        return _Packed(to_each, from_each, data, arriving)

    def _arriving(self, blocks: list[Block]) -> Iterator[tuple[int, _Piece]]:
        for block in blocks:
            for rank, part in block.pattern.wanted:
                if rank == self._peers.rank:
                    for box, place in sent(part, _interval(block.box)):
                        shape = tuple(side.stop - side.start for side in box)
                        nbytes = prod(shape) * block.pattern.tensor.itemsize
                        yield block.tensor, _Piece(place, shape, nbytes)

    def _unpack(self, packed: _Packed, received: torch.Tensor) -> None:
        at = 0
        with torch.no_grad():
            for number, piece in packed.arriving:
                dtype = DTYPES[self._infos[number].dtype]
                own = self._own[number].tensor
                found = received[at : at + piece.nbytes]
                if own.dtype == dtype:
                    raw = _RAW[dtype.itemsize]
                    own.detach().view(raw)[piece.place].copy_(found.view(raw).view(piece.shape))
                else:
                    own[piece.place].copy_(found.view(dtype).view(piece.shape))
                at += _padded(piece.nbytes)


class _Packed(NamedTuple):
    """The bytes of one round."""

    to_each: list[int]
    from_each: list[int]
    data: torch.Tensor
    # In the order in which they come.
    arriving: list[tuple[int, _Piece]]


def _tensor(info: TensorInfo) -> Tensor:
    """As torch stores it: of F4 two elements are one."""
    dtype = DTYPES.get(info.dtype)
    shape = (*info.shape[:-1], info.shape[-1] // 2) if info.dtype == "F4" and info.shape else info.shape
    return Tensor(tuple(shape), 1 if dtype is None else dtype.itemsize)


def _packed(kinds: list[int]) -> Any:
    """A few bytes for each tensor."""
    from array import array

    return array("I", kinds)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _interval(box: Box) -> tuple[tuple[int, int], ...]:
    """As it may be looked up."""
    return tuple((side.start, side.stop) for side in box)


def _of(tensor: torch.Tensor) -> Box:
    """All of a tensor, as a box."""
    return tuple(slice(0, size) for size in tensor.shape)
