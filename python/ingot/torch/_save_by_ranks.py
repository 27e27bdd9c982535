"""Write one checkpoint by many ranks: each element once, by a rank that holds it.

On one machine all ranks fill the same files. If two machines write to one file, one of the writes may be
lost. So on several machines each file has one writer, and the other ranks send it their parts.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

from ingot._base.options import Saving
from ingot._base.progress import counted, reporting_on
from ingot._base.text import _quoted, located
from ingot._ranks.local import Held, held, identity, is_distributed
from ingot._ranks.peers import Parcels, Peers, Run, padded, sides, this_node
from ingot._ranks.placements import Box, Part, in_elements, within
from ingot._ranks.plan import WINDOW_NBYTES, Block, Pattern, Plan, Span, Tensor, cut, sent, spread
from ingot._write import shards
from ingot._write.background import SAVES, SaveFuture, SharedSaveFuture
from ingot._write.directory import called
from ingot._write.shards import Place
from ingot._write.writer import Writer
from ingot.errors import RankError, SaveError
from ingot.torch._tensors import DTYPES, storable
from ingot.typing import Tell

from ._tensors import as_of_now, copied


class Spec(NamedTuple):
    """The dtype code of a tensor, and its shape in torch."""

    code: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.itemsize * prod(self.shape)

    def stored(self) -> tuple[str, list[int]]:
        """Return the code and the shape for a header: torch has two F4 elements in one."""
        shape = [*self.shape]
        if self.code == "F4":
            shape[-1] *= 2
        return self.code, shape


#: The ranks that hold a tensor, and their parts. Tensors with equal holders have the same tuple.
Holders: TypeAlias = tuple[tuple[int, Part], ...]


class _Mine(NamedTuple):
    """The facts about a rank's tensors that it sends to the others."""

    names: list[str] | None
    specs: list[Spec] | None
    # The number of the part of each tensor.
    kinds: Any
    parts: list[Part]
    # The aliases, each with the name that is kept.
    shared: dict[str, str]


class Collected(NamedTuple):
    """The parts of tensors that a rank holds, and the aliases, each with the name that is kept."""

    held: dict[str, Held]
    shared: dict[str, str]


def collect(tensors: Mapping[str, torch.Tensor], shared: Callable[..., dict[str, str]]) -> Collected:
    """Return this rank's parts of DTensors, and its plain tensors; `shared` finds aliases.

    Raises `SaveError` for a DTensor whose memory does not have its values.
    """
    found: dict[str, Held] = {}
    ties: dict[Any, list[str]] = {}
    plain = {}
    for name, tensor in tensors.items():
        if not is_distributed(tensor):
            found[name] = Held(Part.whole(tensor.shape), tensor)
            plain[name] = tensor
            continue
        try:
            found[name] = held(tensor)
        except ValueError as fault:
            found_kind = type(tensor).__name__
            raise located(SaveError, str(fault), code="no-values", tensor=name, found=found_kind) from None
        ties.setdefault(identity(tensor), []).append(name)
    dropped = shared(plain)
    for names in ties.values():
        kept = min(names)
        dropped |= {name: kept for name in names if name != kept}
    return Collected(found, dropped)


class _Covering(NamedTuple):
    """Parts that cover a tensor, with the ranks that hold each and the number of its elements.

    Attributes
    ----------
    only : tuple of (int, Part), optional
        The ranks that write the parts, if one rank holds each.
    """

    parts: list[tuple[Part, list[int], int]]
    only: Holders | None

    @classmethod
    def of(cls, parts: list[tuple[Part, list[int]]]) -> _Covering:
        is_only = all(len(ranks) == 1 for _, ranks in parts)
        only = tuple((ranks[0], part) for part, ranks in parts) if is_only else None
        return cls([(part, ranks, part.numel) for part, ranks in parts], only)

    def chosen(self, loads: list[int], itemsize: int) -> Holders:
        """Return the least loaded of the ranks that hold each part, and add the bytes to its load."""
        if self.only is not None:
            for _, ranks, numel in self.parts:
                loads[ranks[0]] += numel * itemsize
            return self.only
        found = []
        for part, ranks, numel in self.parts:
            rank = min(ranks, key=loads.__getitem__)
            loads[rank] += numel * itemsize
            found.append((rank, part))
        return tuple(found)


class Together:
    """The tensors that all ranks save: the names in one order, and the part of each that a rank writes."""

    def __init__(self, collect: Callable[[], Collected], peers: Peers) -> None:
        """`collect` is called once, in a step in which all ranks raise if it raises on one."""
        self._peers = peers
        #: This rank's memory.
        self.local: dict[str, torch.Tensor] = {}
        #: The specs of all ranks.
        self.specs: dict[str, Spec] = {}
        #: The names that are not written, each with the name of the tensor that is.
        self.shared: dict[str, str] = {}
        #: Called with the number of bytes after each block is written.
        self.moved: Callable[[int], None] = lambda nbytes: None
        with peers.step("looking at the tensors"):
            mine = self._collect(collect())
        gathered = self._tell(mine)
        self._holders = self._merge(gathered)
        with peers.step("planning"):
            self.writers = self._writers()

    def keep(self, where: str | None) -> list[torch.Tensor]:
        """Drop tensors that other ranks write, copy the rest if `where` is not None, and return the rest."""
        rank = self._peers.rank
        mine = {name: self.local[name] for name, writers in self.writers.items() if rank in dict(writers)}
        self.local = mine if where is None else copied(mine, where)
        return [*self.local.values()]

    def write(self, writer: Writer, name: str, box: Box, values: torch.Tensor) -> None:
        """Write a block of a tensor, which is `values`."""
        index = in_elements(box) if self.specs[name].code == "F4" else box
        writer.write(name, values, index or ...)
        self.moved(values.nbytes)

    def _collect(self, collected: Collected) -> _Mine:
        """Return the tensors of this rank. Raises for tensors that cannot be stored."""
        known: dict[Part, int] = {}
        kinds, specs = array("I"), []
        for name, (part, local) in collected.held.items():
            specs.append(Spec(storable(name, local), part.shape, local.itemsize))
            self.local[name] = local
            kinds.append(known.setdefault(part, len(known)))
        return _Mine([*collected.held], specs, kinds, [*known], collected.shared)

    def _tell(self, mine: _Mine) -> list[_Mine]:
        """Return the tensors of each rank. Names are sent only if they differ between ranks."""
        # Many tensors have equal specs, which are slow to print.
        numbers: dict[Spec, int] = {}
        of_each = array("I", [numbers.setdefault(spec, len(numbers)) for spec in mine.specs or ()])
        digest = sha256(repr((mine.names, [*numbers], of_each.tobytes())).encode()).digest()
        is_same = len(set(self._peers.gather(digest, "comparing names"))) == 1
        short = mine._replace(names=None, specs=None) if is_same else mine
        gathered = self._peers.gather(short, "planning")
        if not is_same:
            return gathered
        return [mine._replace(kinds=one.kinds, parts=one.parts, shared=one.shared) for one in gathered]

    def _merge(self, gathered: list[_Mine]) -> dict[str, Holders]:
        """Return the holders of each tensor. Raise if they disagree about its dtype or shape."""
        for one in gathered:
            for name, kept in one.shared.items():
                self.shared.setdefault(name, kept)
        if all(one.names is gathered[0].names for one in gathered):
            return self._merge_same(gathered)
        holders: dict[str, Holders] = {}
        for rank, one in enumerate(gathered):
            for name, spec, kind in zip(one.names or (), one.specs or (), one.kinds, strict=True):
                first = self.specs.setdefault(name, spec)
                if first != spec:
                    expected, found = (f"{of.code} of shape {list(of.shape)}" for of in (first, spec))
                    others = f"than the ranks before it: expected {expected}, found {found}"
                    reason = f"has another tensor {_quoted(name)} {others}"
                    raise self._peers.error(rank, reason, "ranks-differ")
                holders[name] = (*holders.get(name, ()), (rank, one.parts[kind]))
        known: dict[Holders, Holders] = {}
        return {name: known.setdefault(of, of) for name, of in holders.items()}

    def _merge_same(self, gathered: list[_Mine]) -> dict[str, Holders]:
        """Return the holders of tensors that all ranks have."""
        names, specs = gathered[0].names or [], gathered[0].specs or []
        self.specs = dict(zip(names, specs, strict=True))
        numbers = [*zip(*(one.kinds for one in gathered), strict=True)]
        parts = [one.parts for one in gathered]
        known = {of: tuple((rank, parts[rank][kind]) for rank, kind in enumerate(of)) for of in {*numbers}}
        return {name: known[of] for name, of in zip(names, numbers, strict=True)}

    def _writers(self) -> dict[str, Holders]:
        """Return the ranks that write each tensor, with their parts: the least loaded of the holders."""
        loads = [0] * self._peers.size
        # By identity, since parts are slow to compare.
        known: dict[int, _Covering] = {}
        found: dict[str, Holders] = {}
        for name, holders in self._holders.items():
            if name in self.shared:
                continue
            spec, covering = self.specs[name], known.get(id(holders))
            if covering is None:
                covering = known[id(holders)] = _Covering.of(self._covering(name, spec, holders))
            found[name] = covering.chosen(loads, spec.itemsize)
        return found

    def _covering(self, name: str, spec: Spec, holders: Holders) -> list[tuple[Part, list[int]]]:
        """Return parts that cover the tensor, each with the ranks that hold it."""
        parts: dict[Part, list[int]] = {}
        for rank, part in holders:
            if part.numel or part.is_whole():
                parts.setdefault(part, []).append(rank)
        whole = next((part for part in parts if part.is_whole()), None)
        if whole is not None:
            return [(whole, parts[whole])]
        firsts = tuple((ranks[0], part) for part, ranks in parts.items())
        pattern = Pattern(Tensor(spec.shape, spec.itemsize), firsts)
        there, expected = sum(part.numel for part in parts), prod(spec.shape)
        if there != expected or pattern.overlaps():
            held_by = f"found {there} in {len(parts)} parts of {self._peers.size} ranks"
            reason = (
                f"the ranks together do not hold each element once: expected {expected} elements, {held_by}"
            )
            raise located(
                SaveError,
                reason,
                code="partly-filled" if there < expected else "filled-twice",
                tensor=name,
                expected=expected,
                found=there,
            )
        return [*parts.items()]


class Files(NamedTuple):
    """The files to write: the names of their tensors, their metadata and the weight map."""

    tensors: Mapping[str, list[str]]
    metadata: Mapping[str, str]
    weight_map: dict[str, object] | None


def write_later(together: Together, files: Files, place: Place, how: Saving, peers: Peers) -> SaveFuture:
    """Copy this rank's parts, and run `write` in a thread. All ranks have agreed when this returns.

    The saves of a process run in order, so the ranks run them in the same order.
    """
    snapshot = how.snapshot_of()
    with peers.step("copying the tensors"):
        in_order = as_of_now(together.keep(snapshot))
    apart, future = peers.apart(), SharedSaveFuture(place.directory)
    if snapshot is not None:
        future._stage()

    def work() -> None:
        with ExitStack() as streams:
            streams.callback(apart.done)
            with apart.step("waiting for the device"):
                streams.enter_context(in_order())
            write(together, files, place, how, apart, future._stage)

    try:
        return SAVES.put(work, future)
    except BaseException:
        # After Ctrl-C the others must not wait for a save that never begins here.
        apart.leave()
        raise


def write(
    together: Together,
    files: Files,
    place: Place,
    how: Saving,
    peers: Peers,
    stage: Callable[[], None] = lambda: None,
) -> None:
    """Write the files by all ranks, rename them on the first, and raise on all ranks if one fails.

    `stage` is called when no more is read of this rank's tensors.
    """
    fill = _Fill(together, files, how, peers, stage)
    saving = f"saving to {place.directory}"
    if peers.rank:
        with reporting_on(how.progress, "Saving", place.directory) as tell:
            fill(None, tell)
    else:
        try:
            with (
                reporting_on(how.progress, "Saving", place.directory) as tell,
                shards.aside(place, files.tensors, files.weight_map, how) as paths,
            ):
                fill(paths, tell)
        except BaseException as fault:
            # A failure that the other ranks do not know of, since it was outside a common step.
            if not isinstance(fault, RankError) and not fill.is_under_way:
                peers.agree(fault, saving)
            raise
    peers.agree(None, saving)


class _Fill:
    """Write all files under temporary names by all ranks. The first rank has the paths."""

    def __init__(
        self, together: Together, files: Files, how: Saving, peers: Peers, stage: Callable[[], None]
    ) -> None:
        self._together, self._files, self._how, self._peers = together, files, how, peers
        self._stage = stage
        self.is_under_way = False

    def __call__(self, paths: Mapping[str, str] | None, tell: Tell | None) -> None:
        peers = self._peers
        peers.agree(None, "preparing the directory")
        self.is_under_way = True
        gathered = peers.gather((this_node(), paths), "preparing the files")
        paths = dict(gathered[0][1] or {})
        nodes = [node for node, _ in gathered]
        order = spread([nodes.index(node) for node in nodes])
        owners = {name: order[number % peers.size] for number, name in enumerate(paths)}
        with ExitStack() as opened:
            writers: dict[str, Writer] = {}
            with self._step("making the files", paths):
                for name in self._own(owners):
                    specs: dict[str, Any] = {
                        tensor: self._together.specs[tensor].stored() for tensor in self._files.tensors[name]
                    }
                    made = Writer(paths[name], specs, self._files.metadata, **self._how.of_writer())
                    writers[name] = opened.enter_context(made)
            is_one_node = len(set(nodes)) == 1
            self._together.moved = counted(tell, self._share(writers, is_one_node))
            if is_one_node:
                self._write_all(paths, writers, opened)
            else:
                sending = _Sending(self._together, self._files, owners, writers, peers)
                sending.run(lambda doing: self._step(doing, paths))
            self._stage()
            with self._step("flushing", paths):
                for name in self._own(owners):
                    writers[name].commit()
        self.is_under_way = False

    def _share(self, files: Iterable[str], is_one_node: bool) -> int:
        """Return the bytes that this rank writes: of all files its parts, or all of its `files`."""
        together, rank = self._together, self._peers.rank
        if not is_one_node:
            return sum(together.specs[name].nbytes for file in files for name in self._files.tensors[file])
        parts = ((name, dict(writers).get(rank)) for name, writers in together.writers.items())
        return sum(part.numel * together.specs[name].itemsize for name, part in parts if part is not None)

    def _own(self, owners: Mapping[str, int]) -> list[str]:
        return [name for name, rank in owners.items() if rank == self._peers.rank]

    @contextmanager
    def _step(self, doing: str, paths: Mapping[str, str]) -> Iterator[None]:
        """Run a step. Its errors name the files by their final names."""
        name, path = next(iter(paths.items()))
        hidden = os.path.basename(path).removesuffix(name)
        with self._peers.step(doing), called(hidden, ""):
            yield

    def _write_all(self, paths: Mapping[str, str], writers: dict[str, Writer], opened: ExitStack) -> None:
        """Write this rank's parts to all files. Ranks begin with different files: each has a lock."""
        rank, count = self._peers.rank, len(paths)
        turn = rank * count // self._peers.size
        with self._step("writing", paths):
            for name in [*paths][turn:] + [*paths][:turn]:
                own = ((tensor, dict(self._together.writers[tensor])) for tensor in self._files.tensors[name])
                parts = [(tensor, writers[rank]) for tensor, writers in own if rank in writers]
                if parts and name not in writers:
                    writers[name] = opened.enter_context(Writer.join(paths[name], durable=self._how.flush))
                for tensor, part in parts:
                    for box, place in part.boxes():
                        self._together.write(writers[name], tensor, box, self._together.local[tensor][place])


class _Sending:
    """Send the parts of tensors to the rank that writes their file, in windows."""

    def __init__(
        self,
        together: Together,
        files: Files,
        owners: Mapping[str, int],
        writers: Mapping[str, Writer],
        peers: Peers,
    ) -> None:
        self._together, self._peers = together, peers
        self._names: list[str] = []
        self._writers: dict[str, Writer] = {}
        patterns: list[Pattern] = []
        known: dict[Pattern, int] = {}
        numbers: list[int] = []
        owned: list[list[int]] = [[] for _ in range(peers.size)]
        for file, names in files.tensors.items():
            for name in names:
                spec = together.specs[name]
                pattern = Pattern(Tensor(spec.shape, spec.itemsize), together.writers[name])
                number = known.setdefault(pattern, len(patterns))
                patterns += [pattern] if number == len(patterns) else []
                owned[owners[file]].append(len(self._names))
                self._names.append(name)
                numbers.append(number)
                if file in writers:
                    self._writers[name] = writers[file]
        cuts = [cut(pattern, peers.size, WINDOW_NBYTES) for pattern in patterns]
        counts = [len(cuts[number].boxes) for number in numbers]
        spans = [
            [Span(tensor, numbers[tensor], 0, counts[tensor]) for tensor in tensors] for tensors in owned
        ]
        self._plan = Plan([*range(peers.size)], [*numbers], patterns, [*cuts], spans)

    def run(self, step: Callable[[str], AbstractContextManager[None]]) -> None:
        """Exchange and write window after window."""
        peers, rounds = self._peers, self._plan.rounds()
        while windows := next(rounds, None):
            with step("sending"):
                blocks = dict(windows).get(peers.rank, [])
                parcels = Parcels.of(self._pieces(windows), self._sizes(blocks))
            peers.exchange(parcels, "sending")
            with step("writing"):
                self._write_blocks(blocks, parcels)

    def _pieces(self, windows: list[tuple[int, list[Block]]]) -> list[list[torch.Tensor]]:
        """Return the pieces that this rank sends to each."""
        pieces: list[list[torch.Tensor]] = [[] for _ in range(self._peers.size)]
        for owner, blocks in windows:
            for block in blocks:
                for rank, part in block.pattern.wanted:
                    if rank == self._peers.rank:
                        local = self._together.local[self._names[block.tensor]]
                        pieces[owner] += [local[place] for _, place in sent(part, block.box)]
        return pieces

    def _sizes(self, blocks: list[Block]) -> list[int]:
        """Return the bytes that arrive from each rank."""
        sizes = [0] * self._peers.size
        for block in blocks:
            for rank, part in block.pattern.wanted:
                for box, _ in sent(part, block.box):
                    sizes[rank] += padded(sides(box), block.pattern.tensor.itemsize)
        return sizes

    def _write_blocks(self, blocks: list[Block], parcels: Parcels) -> None:
        runs = [Run(memory) for memory in torch.split(parcels.received, parcels.from_each)]
        for block in blocks:
            itemsize = block.pattern.tensor.itemsize
            whole = Run(torch.empty(block.nbytes, dtype=torch.uint8)).take(sides(block.box), itemsize)
            for rank, part in block.pattern.wanted:
                for box, _ in sent(part, block.box):
                    whole[within(block.box, box)].copy_(runs[rank].take(sides(box), itemsize))
            name = self._names[block.tensor]
            self._together.write(
                self._writers[name], name, block.box, whole.view(DTYPES[self._together.specs[name].code])
            )
