"""One checkpoint that many ranks write: each element once, by one that has it.

On one machine all ranks fill the same files. Ranks of several machines cannot be sure that a file that two of
them write holds what both wrote, so there each file has one writer, to whom the others send.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

import torch

from ingot._base.progress import counted, telling
from ingot._base.text import _quoted
from ingot._ranks.local import Held, held, identity, is_distributed
from ingot._ranks.peers import Parcels, Run, padded, sides, this_node
from ingot._ranks.placements import Part, in_elements, within
from ingot._ranks.plan import WINDOW_NBYTES, Pattern, Plan, Span, Tensor, cut, sent, spread
from ingot._write import shards
from ingot._write.background import SAVES, SharedSaveFuture
from ingot._write.directory import called
from ingot._write.writer import Writer
from ingot.errors import RankError, SaveError
from ingot.torch._tensors import DTYPES, storable

from ._tensors import as_of_now, copied

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ingot._base.options import Saving
    from ingot._ranks.peers import Peers
    from ingot._ranks.placements import Box
    from ingot._ranks.plan import Block
    from ingot._write.background import SaveFuture
    from ingot._write.shards import Place
    from ingot.typing import Tell


class Spec(NamedTuple):
    """What a tensor is: the code of its dtype, and its shape as torch has it."""

    code: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.itemsize * prod(self.shape)

    def stored(self) -> tuple[str, list[int]]:
        """As a header has it: of F4 torch has two elements in one."""
        shape = [*self.shape]
        if self.code == "F4":
            shape[-1] *= 2
        return self.code, shape


class _Mine(NamedTuple):
    """What this rank tells the others of its tensors."""

    names: list[str] | None
    specs: list[Spec] | None
    # For each tensor the number of its part.
    kinds: Any
    parts: list[Part]
    # Names that share a tensor, each with the one that is kept.
    shared: dict[str, str]


class Looked(NamedTuple):
    """What a rank has in memory of each tensor; and names that share one, each with that which is kept."""

    held: dict[str, Held]
    shared: dict[str, str]


def look(tensors: Mapping[str, torch.Tensor], shared: Callable[..., dict[str, str]]) -> Looked:
    """What this rank has of DTensors, and of plain tensors, of which `shared` says what share one.

    Raises `SaveError` for a DTensor whose values are not there.
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
            raise SaveError(
                f"tensor {_quoted(name)}: {fault}", code="no-values", tensor=name, found=type(tensor).__name__
            ) from None
        ties.setdefault(identity(tensor), []).append(name)
    dropped = shared(plain)
    for names in ties.values():
        kept = min(names)
        dropped |= {name: kept for name in names if name != kept}
    return Looked(found, dropped)


class Together:
    """What all ranks save: the names, in one order, and which rank writes what of each."""

    def __init__(self, look: Callable[[], Looked], peers: Peers) -> None:
        """`look` is called once, where all ranks hear of what it raises."""
        self._peers = peers
        #: This rank's memory.
        self.local: dict[str, torch.Tensor] = {}
        #: Of all ranks.
        self.specs: dict[str, Spec] = {}
        #: Names that need not be written, each with that which is.
        self.shared: dict[str, str] = {}
        #: Called with the bytes of each block that is written.
        self.moved: Callable[[int], None] = lambda nbytes: None
        with peers.step("looking at the tensors"):
            mine = self._look(look())
        told = self._tell(mine)
        self._holders = self._merge(told)
        with peers.step("planning"):
            self.writers = self._writers()

    def keep(self, where: str | None) -> list[torch.Tensor]:
        """Let go of what others write, and copy the rest, unless it stays where it is: what is left of it."""
        mine = {
            name: self.local[name]
            for name, writers in self.writers.items()
            if any(rank == self._peers.rank for rank, _ in writers)
        }
        self.local = mine if where is None else copied(mine, where)
        return [*self.local.values()]

    def write(self, writer: Writer, name: str, box: Box, values: torch.Tensor) -> None:
        """Write a block of a tensor, which is `values`."""
        index = in_elements(box) if self.specs[name].code == "F4" else box
        writer.write(name, values, index or ...)
        self.moved(values.nbytes)

    def _look(self, looked: Looked) -> _Mine:
        """What this rank has. Raises for what cannot be stored."""
        known: dict[Part, int] = {}
        kinds, specs = array("I"), []
        for name, (part, local) in looked.held.items():
            specs.append(Spec(storable(name, local), part.shape, local.itemsize))
            self.local[name] = local
            kinds.append(known.setdefault(part, len(known)))
        return _Mine([*looked.held], specs, kinds, [*known], looked.shared)

    def _tell(self, mine: _Mine) -> list[_Mine]:
        """What each rank has. Names are sent only where they are not the same on all ranks."""
        digest = sha256(repr((mine.names, mine.specs)).encode()).digest()
        is_same = len(set(self._peers.gather(digest, "comparing names"))) == 1
        short = mine._replace(names=None, specs=None) if is_same else mine
        told = self._peers.gather(short, "planning")
        return (
            [mine._replace(kinds=one.kinds, parts=one.parts, shared=one.shared) for one in told]
            if is_same
            else told
        )

    def _merge(self, told: list[_Mine]) -> dict[str, list[tuple[int, Part]]]:
        """Who has what of each tensor, of which all that have it say the same."""
        holders: dict[str, list[tuple[int, Part]]] = {}
        for rank, one in enumerate(told):
            for name, spec, kind in zip(one.names or (), one.specs or (), one.kinds, strict=True):
                first = self.specs.setdefault(name, spec)
                if first != spec:
                    raise self._peers.error(
                        rank,
                        f"has another tensor {_quoted(name)} than the ranks before it: expected {first.code} "
                        f"of shape {list(first.shape)}, found {spec.code} of shape {list(spec.shape)}",
                        "ranks-differ",
                    )
                holders.setdefault(name, []).append((rank, one.parts[kind]))
            for name, kept in one.shared.items():
                self.shared.setdefault(name, kept)
        return holders

    def _writers(self) -> dict[str, tuple[tuple[int, Part], ...]]:
        """The ranks that write each tensor, and their parts: of ranks that have the same the idlest."""
        loads = [0] * self._peers.size
        known: dict[Any, list[tuple[Part, list[int]]]] = {}
        found: dict[str, tuple[tuple[int, Part], ...]] = {}
        for name, holders in self._holders.items():
            if name in self.shared:
                continue
            spec, key = self.specs[name], tuple(holders)
            if key not in known:
                known[key] = self._covering(name, spec, holders)
            chosen = []
            for part, ranks in known[key]:
                rank = min(ranks, key=loads.__getitem__)
                loads[rank] += part.numel * spec.itemsize
                chosen.append((rank, part))
            found[name] = tuple(chosen)
        return found

    def _covering(
        self, name: str, spec: Spec, holders: list[tuple[int, Part]]
    ) -> list[tuple[Part, list[int]]]:
        """Parts that are the tensor together, each with the ranks that have it."""
        parts: dict[Part, list[int]] = {}
        for rank, part in holders:
            if part.numel or part.is_whole():
                parts.setdefault(part, []).append(rank)
        whole = next((part for part in parts if part.is_whole()), None)
        if whole is not None:
            return [(whole, parts[whole])]
        pattern = Pattern(
            Tensor(spec.shape, spec.itemsize), tuple((ranks[0], part) for part, ranks in parts.items())
        )
        there, expected = sum(part.numel for part in parts), prod(spec.shape)
        if there != expected or pattern.overlaps():
            raise SaveError(
                f"tensor {_quoted(name)}: the ranks together do not hold each element once: expected "
                f"{expected} elements, found {there} in {len(parts)} parts of {self._peers.size} ranks",
                code="partly-filled" if there < expected else "filled-twice",
                tensor=name,
                expected=expected,
                found=there,
            )
        return [*parts.items()]


class Files(NamedTuple):
    """What is written: the names of tensors by the names of files, and what stands beside them."""

    tensors: Mapping[str, list[str]]
    metadata: Mapping[str, str]
    weight_map: dict[str, object] | None


def write_later(
    together: Together,
    files: Files,
    place: Place,
    how: Saving,
    peers: Peers,
) -> SaveFuture:
    """Copy what this rank writes, and do as `write` in a thread. When this returns all ranks have agreed.

    The saves of a process follow one another, and what ranks were asked for in one order comes in it on each.
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
        # Ctrl-C. The others do not wait for what is never begun here.
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
    """Write the files by all ranks, put them in place by the first, and raise on all where one fails.

    `stage` is called when no more is read of this rank's tensors.
    """
    fill = _Fill(together, files, how, peers, stage)
    saving = f"saving to {place.directory}"
    if peers.rank:
        with telling(how.progress, "Saving", place.directory) as tell:
            fill(None, tell)
    else:
        try:
            with (
                telling(how.progress, "Saving", place.directory) as tell,
                shards.aside(place, files.tensors, files.weight_map, how.flush, how.existing) as paths,
            ):
                fill(paths, tell)
        except BaseException as fault:
            # What the others have not heard of: while all ranks wrote, each step was agreed on.
            if not isinstance(fault, RankError) and not fill.is_under_way:
                peers.agree(fault, saving)
            raise
    peers.agree(None, saving)


class _Fill:
    """All files under names of their own, written by all ranks. The first has the paths."""

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
        told = peers.gather((this_node(), paths), "preparing the files")
        paths = dict(told[0][1] or {})
        nodes = [node for node, _ in told]
        order = spread([nodes.index(node) for node in nodes])
        owners = {name: order[number % peers.size] for number, name in enumerate(paths)}
        with ExitStack() as opened:
            writers: dict[str, Writer] = {}
            with self._step("making the files", paths):
                for name in self._own(owners):
                    writers[name] = opened.enter_context(self._made(name, paths[name]))
            is_one_node = len(set(nodes)) == 1
            self._together.moved = counted(tell, self._share(writers, is_one_node))
            if is_one_node:
                self._write_all(paths, writers, opened)
            else:
                _Sending(self._together, self._files, owners, writers, peers).run(
                    lambda doing: self._step(doing, paths)
                )
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
        return sum(
            part.numel * together.specs[name].itemsize
            for name, writers in together.writers.items()
            for writer, part in writers
            if writer == rank
        )

    def _own(self, owners: Mapping[str, int]) -> list[str]:
        return [name for name, rank in owners.items() if rank == self._peers.rank]

    def _made(self, name: str, path: str) -> Writer:
        specs = {tensor: self._together.specs[tensor].stored() for tensor in self._files.tensors[name]}
        return Writer(path, specs, self._files.metadata, **self._how.of_writer())

    @contextmanager
    def _step(self, doing: str, paths: Mapping[str, str]) -> Iterator[None]:
        """A step whose failure names the files as they will be called."""
        name, path = next(iter(paths.items()))
        hidden = os.path.basename(path).removesuffix(name)
        with self._peers.step(doing), called(hidden, ""):
            yield

    def _write_all(self, paths: Mapping[str, str], writers: dict[str, Writer], opened: ExitStack) -> None:
        """Write to every file what is this rank's, each rank to another first, since a file has a lock."""
        rank, count = self._peers.rank, len(paths)
        turn = rank * count // self._peers.size
        with self._step("writing", paths):
            for name in [*paths][turn:] + [*paths][:turn]:
                parts = [
                    (tensor, part)
                    for tensor in self._files.tensors[name]
                    for writer, part in self._together.writers[tensor]
                    if writer == rank
                ]
                if parts and name not in writers:
                    writers[name] = opened.enter_context(Writer.join(paths[name], durable=self._how.flush))
                for tensor, part in parts:
                    for box, place in part.boxes():
                        self._together.write(writers[name], tensor, box, self._together.local[tensor][place])


class _Sending:
    """Each file written by one rank, to which the others send what they have of its tensors, in windows."""

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
        spans = [
            [Span(tensor, numbers[tensor], 0, len(cuts[numbers[tensor]].boxes)) for tensor in tensors]
            for tensors in owned
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
        """What this rank sends to each."""
        pieces: list[list[torch.Tensor]] = [[] for _ in range(self._peers.size)]
        for owner, blocks in windows:
            for block in blocks:
                for rank, part in block.pattern.wanted:
                    if rank == self._peers.rank:
                        local = self._together.local[self._names[block.tensor]]
                        pieces[owner] += [local[place] for _, place in sent(part, block.box)]
        return pieces

    def _sizes(self, blocks: list[Block]) -> list[int]:
        """The bytes that come from each rank."""
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
            self._together.write(self._writers[name], name, block.box, whole.view(self._dtype(name)))

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._together.specs[name].code]
