"""Plan the reading of a file that many ranks load, so that each byte is read once.

Every rank makes the same plan from the same facts: the tensors of the file, the wanted parts of each rank,
and the ranks' nodes. A plan opens no file and moves no data.

If the parts of a tensor are long runs and no two ranks want the same bytes, each rank reads its own part. All
other tensors are *owned*: they are split into blocks of whole rows, which are assigned to owners in file
order, so that each owner reads long runs and about the same number of bytes. In each round, an owner reads a
window of its blocks and sends every rank its parts of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, combinations
from math import prod
from typing import NamedTuple

from .placements import Box, Interval, Part, joined, moved, pieces

#: The least length in bytes of the runs of a part that a rank reads by itself.
DIRECT_NBYTES = 128 << 10
#: The most bytes that a rank reads, that it sends, and that it receives in a round.
WINDOW_NBYTES = 32 << 20
# A smaller share does not justify the requests of another owner.
_LEAST_NBYTES = 1 << 20
# A share has at least about this many blocks, so that shares are even.
_SHARES = 16


class Tensor(NamedTuple):
    """The shape of a stored tensor, and the bytes of an element."""

    shape: tuple[int, ...]
    itemsize: int


class Wants(NamedTuple):
    """The wanted parts of one rank: for each tensor of the file 0 for nothing, or a number of a part."""

    parts: list[Part]
    kinds: Sequence[int]


class Block(NamedTuple):
    """Rows of a tensor that one rank reads."""

    tensor: int
    pattern: Pattern
    box: Box
    nbytes: int


class Span(NamedTuple):
    """Consecutive blocks of one tensor that one rank owns: the first, and the one after the last."""

    tensor: int
    pattern: int
    first: int
    last: int


class Plan(NamedTuple):
    """The plan of some ranks, which read for no others: all ranks, or the ranks of a node."""

    ranks: list[int]
    #: The pattern of each tensor; None if no rank wants any of it.
    numbers: list[int | None]
    patterns: list[Pattern]
    #: The blocks of each pattern; empty if each rank reads its part by itself.
    cuts: list[Cuts | None]
    #: The spans of each rank.
    owned: list[list[Span]]

    def direct(self, rank: int) -> Iterator[tuple[int, Part]]:
        """Yield the tensors whose parts a rank reads by itself, each with its part."""
        pairs = zip(self.patterns, self.cuts, strict=True)
        wanted = [None if cuts else dict(one.wanted).get(rank) for one, cuts in pairs]
        for tensor, number in enumerate(self.numbers):
            if number is not None and (part := wanted[number]):
                yield tensor, part

    def rounds(self) -> Iterator[list[tuple[int, list[Block]]]]:
        """Yield the windows to exchange together: one window of each owner that has one left."""
        turns = [(rank, self._windows(spans)) for rank, spans in zip(self.ranks, self.owned, strict=True)]
        while found := [(rank, window) for rank, windows in turns if (window := next(windows, None))]:
            yield found

    def _windows(self, spans: list[Span]) -> Iterator[list[Block]]:
        most_held = WINDOW_NBYTES // len(self.ranks)
        window: list[Block] = []
        nbytes = most = 0
        for block, share in self._blocks(spans):
            if window and (nbytes + block.nbytes > WINDOW_NBYTES or most + share > most_held):
                yield window
                window, nbytes, most = [], 0, 0
            window.append(block)
            nbytes, most = nbytes + block.nbytes, most + share
        if window:
            yield window

    def _blocks(self, spans: list[Span]) -> Iterator[tuple[Block, int]]:
        for tensor, number, first, last in spans:
            cuts = self.cuts[number]
            if cuts is not None:
                for box, nbytes, most in zip(
                    cuts.boxes[first:last], cuts.sizes[first:last], cuts.most[first:last], strict=True
                ):
                    yield Block(tensor, self.patterns[number], box, nbytes), most


class Cuts(NamedTuple):
    """The blocks of the tensors of one pattern, as columns."""

    boxes: list[Box]
    sizes: list[int]
    #: The most bytes of each block that one rank wants.
    most: list[int]
    #: The bytes before each block, and the total.
    before: list[int]


class Pattern(NamedTuple):
    """Tensors of one shape whose wanted parts are the same on the same ranks."""

    tensor: Tensor
    wanted: tuple[tuple[int, Part], ...]

    def is_direct(self) -> bool:
        """Return whether each rank reads its own part."""
        if len(self.wanted) == 1:
            return True
        if any(part.run() * self.tensor.itemsize < DIRECT_NBYTES for _, part in self.wanted):
            return False
        return not self.overlaps()

    def overlaps(self) -> bool:
        """Return whether two ranks want the same element."""
        parts = [part for _, part in self.wanted]
        return len(set(parts)) < len(parts) or any(_overlap(*pair) for pair in combinations(parts, 2))

    def boxes(self) -> list[Box]:
        """Return the boxes around all wanted parts, whole in all dimensions but the first."""
        if not self.tensor.shape:
            return [()]
        if 0 in self.tensor.shape:
            return []
        dims = range(len(self.tensor.shape))
        wanted = [{side for _, part in self.wanted for side in part.intervals[dim]} for dim in dims]
        sides = [joined(sorted(of_all)) for of_all in wanted]
        within = [slice(side[0][0], side[-1][1]) for side in sides[1:]]
        return [(slice(begin, end), *within) for begin, end in sides[0]]

    def nbytes(self, box: Box) -> int:
        count: int = prod(side.stop - side.start for side in box)
        return self.tensor.itemsize * count

    def most(self, box: Box) -> int:
        """Return the largest number of bytes of the box that one rank wants."""
        return self.tensor.itemsize * max(shared(part, box) for _, part in self.wanted)


def shared(part: Part, box: Box) -> int:
    """Count the elements of `box` that belong to `part`."""
    sides = ((side.start, side.stop, along) for along, side in zip(part.intervals, box, strict=True))
    return prod(sum(max(0, min(b, end) - max(a, begin)) for a, b in along) for begin, end, along in sides)


def _overlap(one: Part, other: Part) -> bool:
    pairs = zip(one.intervals, other.intervals, strict=True)
    return all(any(max(a, c) < min(b, d) for a, b in mine for c, d in theirs) for mine, theirs in pairs)


def plan(
    tensors: Sequence[Tensor], wants: Sequence[Wants], nodes: Sequence[int], scope: str, rank: int
) -> Plan:
    """Return the plan of reading that `rank` takes part in.

    Parameters
    ----------
    tensors
        The tensors of the file, in file order.
    wants
        The parts that each rank wants.
    nodes
        The number of each rank's node.
    scope : {"job", "node"}
        Whether a byte is read once by all ranks together, or once on each node with a rank that wants it.
    rank
        The rank for which the plan is made.
    """
    of_node = [one for one, node in enumerate(nodes) if node == nodes[rank]]
    ranks = spread(nodes) if scope == "job" else of_node
    return _plan_for(tensors, wants, ranks)


def spread(nodes: Sequence[int]) -> list[int]:
    """Return the ranks, taking one of each node in turn, so that a few owners are on many nodes."""
    turns: dict[int, int] = {}
    keys = []
    for rank, node in enumerate(nodes):
        turns[node] = turns.get(node, -1) + 1
        keys.append((turns[node], node, rank))
    return [rank for *_, rank in sorted(keys)]


def _plan_for(tensors: Sequence[Tensor], wants: Sequence[Wants], ranks: list[int]) -> Plan:
    """Return the plan by which these ranks read for each other."""
    numbers, patterns = _patterns(tensors, wants, ranks)
    counts = Counter(numbers)
    owned = [not pattern.is_direct() for pattern in patterns]
    read = dict.fromkeys(ranks, 0)
    for number, pattern in enumerate(patterns):
        for rank, part in pattern.wanted:
            if not owned[number]:
                read[rank] += counts[number] * part.numel * pattern.tensor.itemsize
    covered = (sum(map(pattern.nbytes, pattern.boxes())) for pattern in patterns)
    total = sum(counts[number] * nbytes for number, nbytes in enumerate(covered) if owned[number])
    shares = _shares(total, [*read.values()])
    finest = max(_LEAST_NBYTES, max(shares, default=0) // _SHARES)
    pairs = zip(patterns, owned, strict=True)
    cuts = [cut(pattern, len(ranks), finest) if is_owned else None for pattern, is_owned in pairs]
    return Plan(ranks, numbers, patterns, cuts, _dealt(numbers, cuts, len(ranks), shares))


def _patterns(
    tensors: Sequence[Tensor], wants: Sequence[Wants], ranks: list[int]
) -> tuple[list[int | None], list[Pattern]]:
    """Return the number of each tensor's pattern, and the few distinct patterns."""
    patterns: list[Pattern] = []
    known: dict[tuple[Tensor, tuple[int, ...]], int | None] = {}
    numbers: list[int | None] = []
    for key in zip(tensors, zip(*(wants[rank].kinds for rank in ranks), strict=True), strict=True):
        if key not in known:
            tensor, kinds = key
            pairs = zip(ranks, kinds, strict=True)
            parts = [(rank, wants[rank].parts[kind - 1]) for rank, kind in pairs if kind]
            wanted = tuple((rank, part) for rank, part in parts if part.numel)
            known[key] = len(patterns) if wanted else None
            patterns += [Pattern(tensor, wanted)] if wanted else []
        numbers.append(known[key])
    return numbers, patterns


def cut(pattern: Pattern, ranks: int, finest: int) -> Cuts:
    """Return blocks of at most `finest` bytes, each with a limited size for every rank.

    In a round, a rank then receives at most a window from all owners together.
    """
    cuts = Cuts([], [], [], [0])
    for box in pattern.boxes():
        whole, most = pattern.nbytes(box), pattern.most(box)
        limit = min(WINDOW_NBYTES, finest, WINDOW_NBYTES // ranks * whole // max(1, most))
        for block in pieces(box, max(1, limit // pattern.tensor.itemsize)):
            if most := pattern.most(block):
                cuts.boxes.append(block)
                cuts.sizes.append(pattern.nbytes(block))
                cuts.most.append(most)
                cuts.before.append(cuts.before[-1] + cuts.sizes[-1])
    return cuts


def _dealt(
    numbers: list[int | None], cuts: list[Cuts | None], ranks: int, shares: list[int]
) -> list[list[Span]]:
    """Return the blocks of each owner, dealt in order."""
    owned: list[list[Span]] = [[] for _ in range(ranks)]
    ends = [*accumulate(shares)]
    turn = at = 0
    for tensor, number in enumerate(numbers):
        if number is None or (cuts_of := cuts[number]) is None:
            continue
        first, count = 0, len(cuts_of.boxes)
        while first < count:
            last = count
            if turn + 1 < len(ends) and at + cuts_of.before[count] > ends[turn]:
                # Up to the block whose end is nearest to the end of the share.
                last = bisect_right(cuts_of.before, ends[turn] - at + cuts_of.sizes[0] // 2) - 1
            if last > first:
                owned[turn].append(Span(tensor, number, first, last))
                first = last
            if first < count:
                turn += 1
        at += cuts_of.before[count]
    return owned


def _shares(total: int, read: list[int]) -> list[int]:
    """Return the share of `total` bytes that each rank owns, so that all read alike if possible.

    `read` has the bytes that each rank reads by itself. If there are few bytes, the first ranks own all.
    """
    owners = min(len(read), -(-total // _LEAST_NBYTES))
    levels = sorted(read[:owners])
    level, below = 0, 0
    # The level up to which the ranks that read least are filled.
    for count, one in enumerate(levels, 1):
        below += one
        level = -(-(total + below) // count)
        if count == len(levels) or level <= levels[count]:
            break
    return [max(0, level - one) for one in read[:owners]]


def sent(part: Part, block: Box) -> tuple[tuple[Box, Box], ...]:
    """Return the overlap of a block and `part`: boxes in the tensor, and their positions in the part."""
    return _sent(part, tuple((side.start, side.stop) for side in block))


@lru_cache(maxsize=1 << 16)
def _sent(part: Part, block: tuple[Interval, ...]) -> tuple[tuple[Box, Box], ...]:
    found = []
    for index, place in part.boxes():
        pairs = zip(index, block, strict=True)
        inner = tuple(slice(max(side.start, begin), min(side.stop, end)) for side, (begin, end) in pairs)
        if all(side.start < side.stop for side in inner):
            found.append((inner, moved(place, index, inner)))
    return tuple(found)
