"""Load by many ranks such that each byte is read once: one rank sends the others their parts."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from hashlib import sha256
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ingot._base.checks import is_path
from ingot._base.text import located
from ingot._base.waits import settled
from ingot._native import Checkpoint, TensorInfo
from ingot._ranks.peers import Parcels, Peers, Run, buffer, padded, raw, sides, this_node
from ingot._ranks.placements import Box, Part, in_elements, within
from ingot._ranks.plan import Block, Plan, Tensor, Wants, plan, sent
from ingot._read.door import TRIES, Reads
from ingot._read.load import fill
from ingot._read.select import Wanted
from ingot.errors import CheckpointError, RankError, StorageError
from ingot.torch._filling import destinations, packed, writing
from ingot.torch._into import Slot, read, wholes
from ingot.torch._tensors import DTYPES

if TYPE_CHECKING:
    from ingot._native import _ShardHeaders as ShardHeaders


class Prepared(NamedTuple):
    """The source that a rank opened, the tensors to fill, how it is read, and the path of the caller."""

    checkpoint: Checkpoint
    slots: list[Slot]
    reads: Reads
    source: object


def open_once(open_with: Callable[[ShardHeaders | None], Checkpoint], peers: Peers) -> Checkpoint:
    """Open the source on all ranks. The first reads the headers for all.

    All ranks call it. If it raises on the first rank, the others detect that.
    """
    if peers.rank != 0:
        return open_with(peers.broadcast(None, "opening"))
    headers = None
    try:
        checkpoint = open_with(None)
        headers = checkpoint.shard_headers()
        return checkpoint
    finally:
        peers.broadcast(headers, "opening")


class Opened(NamedTuple):
    """The machine of a rank, whether its files are mapped, and their version."""

    node: str
    is_mapped: bool
    identity: tuple[str, bool] | None


def load(
    prepare: Callable[[], AbstractContextManager[Prepared]],
    peers: Peers,
    asked: str | bool,
    tries: int = TRIES,
) -> None:
    """Fill the tensors of all ranks, from one version of the files. All ranks call it.

    Raises on all ranks if `prepare` raises on one, or if files or options differ between ranks. If a save
    replaces the files during this step, all ranks repeat it.
    """
    for left in reversed(range(tries)):
        with ExitStack() as stack:
            prepared = _prepare(partial(_enter, stack, prepare), peers, asked, left)
            if prepared is None:
                continue
            one, facts = prepared
            try:
                _read(one, facts, peers, asked)
            except BaseException as fault:
                is_lost = isinstance(fault, RankError) and fault.code != "rank-failed"
                if is_lost or not left or not _is_replaced(one, fault, peers):
                    raise
            else:
                return


def _enter(stack: ExitStack, prepare: Callable[[], AbstractContextManager[Prepared]]) -> Prepared:
    return stack.enter_context(prepare())


def _is_replaced(prepared: Prepared, fault: BaseException, peers: Peers) -> bool:
    """Return whether a rank's files were replaced. Raise on all ranks if one rank raised another error."""
    may_pass = isinstance(fault, (StorageError, CheckpointError, OSError, RankError))
    is_own = may_pass and not isinstance(fault, RankError) and prepared.checkpoint.is_replaced()
    return peers.agree(None if may_pass else fault, "reading", is_own)


def _prepare(
    prepare: Callable[[], Prepared], peers: Peers, asked: str | bool, left: int
) -> tuple[Prepared, list[Opened]] | None:
    """Return the result of this rank, and the files that each rank opened.

    None if a save replaced the files in between.
    """
    prepared: list[Prepared] = []

    def met() -> tuple[dict[str, object], tuple[Opened, str]]:
        one = prepare()
        prepared.append(one)
        opened = one.checkpoint.identity()
        facts = Opened(this_node(), one.checkpoint.backend == "mmap", opened)
        path: Any = one.source
        place = "an object" if opened is None or not is_path(path) else os.path.realpath(os.fsdecode(path))
        return {"read_once": asked, "file": place}, (facts, fingerprint(one.checkpoint))

    facts = peers.same(met, "opening")
    opened, prints = [one for one, _ in facts], [one for _, one in facts]
    if len(set(prints)) == 1 and are_one_version((one.node, "", one.identity) for one in opened):
        return prepared[0], opened
    if left and any(identity is not None for *_, identity in opened):
        return None
    peers.alike("file", prints, "opening")
    raise several_versions(prepared[0].checkpoint)


def several_versions(checkpoint: Checkpoint) -> CheckpointError:
    """Return the error of ranks that opened different versions."""
    reason = "ranks opened different versions of it: a save replaced the files: load again"
    return located(CheckpointError, reason, code="changed", path=checkpoint.path)


def are_one_version(opened: Iterable[tuple[str, str, tuple[str, bool] | None]]) -> bool:
    """Return whether all ranks that see the same disk or network opened the same version.

    `opened` has the node, the path and `Checkpoint.identity` of each rank.
    """
    versions: dict[tuple[str, str], str] = {}
    for node, path, identity in opened:
        if identity is not None:
            text, is_shared = identity
            if versions.setdefault(("" if is_shared else node, path), text) != text:
                return False
    return True


def _read(prepared: Prepared, opened: list[Opened], peers: Peers, asked: str | bool) -> None:
    checkpoint, slots, reads, _ = prepared
    whose, nodes = scope(asked, [(one.node, one.is_mapped) for one in opened])
    if whose is not None:
        Load(checkpoint, slots, peers, nodes, whose).run(reads)
        return
    with peers.step(f"reading {checkpoint.path or 'the source'}"):
        read(checkpoint, reads, slots)


def scope(asked: str | bool, facts: list[tuple[str, bool]]) -> tuple[str | None, list[int]]:
    """Return which ranks read for each other ("job", "node" or None), and the node number of each rank.

    `facts` are each rank's node, and whether the file is mapped there.
    """
    names = [*dict.fromkeys(node for node, _ in facts)]
    nodes = [names.index(node) for node, _ in facts]
    if asked != "auto":
        return (asked if isinstance(asked, str) else None), nodes
    # The ranks of a machine share the page cache of a mapped file; all other reads are remote.
    is_far = not all(is_mapped for _, is_mapped in facts)
    return ("job" if is_far and len(names) > 1 else None), nodes


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a text that is equal for files with the same tensors at the same positions."""
    digest, infos = sha256(), checkpoint.infos()
    for info in infos:
        digest.update(f"{info.name}\0{info.dtype}{info.shape}{info.begin}:{info.end}\0".encode())
    return f"{len(infos)} tensors, digest {digest.hexdigest()[:16]}"


class _Piece(NamedTuple):
    """A piece that this rank receives: the number of a tensor, and its position in this rank's part."""

    tensor: int
    place: Box
    shape: tuple[int, ...]
    itemsize: int


class Load:
    """One load by all ranks of a process group."""

    def __init__(
        self, checkpoint: Checkpoint, slots: list[Slot], peers: Peers, nodes: list[int], scope: str
    ) -> None:
        self._checkpoint, self._peers = checkpoint, peers
        self._infos = checkpoint.infos()
        self._numbers = {info.name: number for number, info in enumerate(self._infos)}
        # If a rank has two destinations for a tensor, the second is read separately.
        self._own: dict[int, Slot] = {}
        self._alone: list[Slot] = []
        for one in slots:
            # An alias of a part of a tensor has no digest.
            number = self._numbers.get(one.source)
            if number is not None and self._infos[number].dtype in DTYPES and number not in self._own:
                self._own[number] = one
            else:
                self._alone.append(one)
        wants = peers.gather(self._wants(), "planning")
        with peers.step("planning"):
            tensors = [_tensor(info) for info in self._infos]
            self._plan: Plan = plan(tensors, wants, nodes, scope, peers.rank)

    def _wants(self) -> Wants:
        known: dict[Part, int] = {}
        kinds = [0] * len(self._infos)
        for number, one in self._own.items():
            part = one.part or Part.whole(_tensor(self._infos[number]).shape)
            kinds[number] = known.setdefault(part, len(known) + 1)
        return Wants([*known], array("I", kinds))

    def run(self, reads: Reads) -> None:
        direct = [self._own[number] for number, _ in self._plan.direct(self._peers.rank)] + self._alone
        alone = sum(one.tensor.nbytes for one in direct)
        nbytes = sum(one.tensor.nbytes for one in [*self._own.values(), *self._alone]) - alone
        by_itself, by_others = reads.shares(lambda: alone, lambda: nbytes)
        self._done, self._nbytes = 0, nbytes
        with ThreadPoolExecutor(1, "ingot-window") as ahead, writing(wholes(self._own.values())):
            self._rounds(ahead, direct, by_itself, by_others)

    def _rounds(
        self, ahead: ThreadPoolExecutor, direct: list[Slot], by_itself: Reads, by_others: Reads
    ) -> None:
        """Read this rank's own parts, then exchange windows: each is read while the one before is sent."""
        peers, doing = self._peers, f"reading {self._checkpoint.path or 'the source'}"
        fault: BaseException | None = None
        rounds = self._plan.rounds()
        windows = next(rounds, None)
        stage = ahead.submit(self._stage, windows, by_others)
        try:
            read(self._checkpoint, by_itself, direct)
        except BaseException as error:
            fault = error
        while True:
            window: tuple[Parcels, list[_Piece]] | None = None
            following = None
            if fault is None:
                try:
                    staged = settled(stage).result()
                    following = next(rounds, None)
                    # It reads into another buffer than the one that is being packed.
                    stage = ahead.submit(self._stage, following, by_others)
                    window = self._pack(windows, staged)
                    # Each buffer is freed after its last use: a rank has three windows in memory.
                    del staged
                except BaseException as error:
                    fault = error
            if not peers.agree(fault, doing, more=windows is not None) or window is None:
                return
            parcels, arriving = window
            peers.exchange(parcels, doing)
            received = parcels.received
            del window, parcels
            try:
                self._unpack(arriving, received)
                self._tell(arriving, by_others)
            except BaseException as error:
                fault = error
            del received
            windows = following

    def _tell(self, pieces: list[_Piece], reads: Reads) -> None:
        self._done += sum(prod(piece.shape) * self._own[piece.tensor].tensor.itemsize for piece in pieces)
        if reads.tell is not None:
            reads.tell(self._done, self._nbytes)

    def _stage(
        self, windows: list[tuple[int, list[Block]]] | None, reads: Reads
    ) -> list[tuple[Block, torch.Tensor]]:
        """Read the window of this rank: each block as integers of the element's size."""
        mine = dict(windows or []).get(self._peers.rank, [])
        shapes = [(sides(block.box), block.pattern.tensor.itemsize) for block in mine]
        memory = Run(buffer(sum(padded(*one) for one in shapes)))
        found = [(block, memory.take(*one)) for block, one in zip(mine, shapes, strict=True)]
        infos = [self._infos[block.tensor] for block in mine]
        rows = enumerate(zip(infos, (elements for _, elements in found), strict=True))
        tensors = {f"{info.name}#{number}": raw.view(DTYPES[info.dtype]) for number, (info, raw) in rows}
        pairs = zip(infos, (block.box for block in mine), strict=True)
        indices = [in_elements(box) if info.dtype == "F4" else box for info, box in pairs]
        wanted = Wanted([info.name for info in infos], indices)
        fill(self._checkpoint, wanted, destinations(tensors), Reads(reads.threads))
        return found

    def _pack(
        self, windows: list[tuple[int, list[Block]]] | None, staged: list[tuple[Block, torch.Tensor]]
    ) -> tuple[Parcels, list[_Piece]]:
        """Return the parcels that this rank sends, and the pieces that it receives."""
        for_each: list[list[torch.Tensor]] = [[] for _ in range(self._peers.size)]
        for block, elements in staged:
            for rank, part in block.pattern.wanted:
                for box, _ in sent(part, block.box):
                    for_each[rank].append(elements[within(block.box, box)])
        from_each = [0] * self._peers.size
        arriving: list[_Piece] = []
        for rank, blocks in sorted(windows or [], key=itemgetter(0)):
            coming = [*self._arriving(blocks)]
            from_each[rank] += sum(padded(piece.shape, piece.itemsize) for piece in coming)
            arriving += coming
        return Parcels.of(for_each, from_each), arriving

    def _arriving(self, blocks: list[Block]) -> Iterator[_Piece]:
        for block in blocks:
            for rank, part in block.pattern.wanted:
                if rank == self._peers.rank:
                    for box, place in sent(part, block.box):
                        yield _Piece(block.tensor, place, sides(box), block.pattern.tensor.itemsize)

    def _unpack(self, pieces: list[_Piece], received: torch.Tensor) -> None:
        run = Run(received)
        with torch.no_grad():
            for piece in pieces:
                dtype = DTYPES[self._infos[piece.tensor].dtype]
                own, found = self._own[piece.tensor].tensor, run.take(piece.shape, piece.itemsize)
                if own.dtype == dtype:
                    raw(own)[piece.place].copy_(found)
                else:
                    own[piece.place].copy_(found.view(dtype))


def _tensor(info: TensorInfo) -> Tensor:
    """Return shape and element size as torch stores them: F4 has two elements in one."""
    dtype = DTYPES.get(info.dtype)
    return Tensor(packed(info.dtype, info.shape), 1 if dtype is None else dtype.itemsize)
