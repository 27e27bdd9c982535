"""Plans of shared reading, compared with the obvious plan: each element has one reader."""

from __future__ import annotations

import time
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ingot._ranks import plan as planning
from ingot._ranks.placements import Part, part
from ingot._ranks.plan import Tensor, Wants, plan, sent


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Reduce the sizes of windows, so that few bytes are planned like many."""
    monkeypatch.setattr(planning, "WINDOW_NBYTES", 256)
    monkeypatch.setattr(planning, "_LEAST_NBYTES", 32)
    monkeypatch.setattr(planning, "DIRECT_NBYTES", 48)


@st.composite
def jobs(draw):
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    ranks = [*product(*map(range, mesh))]
    tensors, held = [], [[] for _ in ranks]
    for _ in range(draw(st.integers(0, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        tensors.append(Tensor(shape, draw(st.sampled_from([1, 2, 8]))))
        placement = st.just(Replicate())
        if shape:
            dims = st.integers(0, len(shape) - 1)
            strided = st.builds(
                lambda dim, split: _StridedShard(dim, split_factor=split), dims, st.integers(1, 3)
            )
            placement = st.one_of(st.builds(Shard, dims), strided, placement)
        placements = [draw(placement) for _ in mesh]
        for rank, coordinate in enumerate(ranks):
            wanted = draw(st.integers(0, 5))
            held[rank].append(part(shape, mesh, coordinate, placements) if wanted else None)
    nodes = [draw(st.integers(0, 2)) for _ in ranks]
    return tensors, held, nodes


def wants(parts):
    known: dict[Part, int] = {}
    kinds = [0 if one is None else known.setdefault(one, len(known) + 1) for one in parts]
    return Wants([*known], kinds)


def elements(box):
    return product(*(range(side.start, side.stop) for side in box))


def wanted_elements(of):
    return {element for box, _ in of.boxes() for element in elements(box)}


def naive(held, ranks):
    """Return the elements that each rank needs, and those that any rank needs."""
    each = {
        rank: {
            (number, element)
            for number, of in enumerate(held[rank])
            if of is not None
            for element in wanted_elements(of)
        }
        for rank in ranks
    }
    return each, set().union(*each.values())


@settings(max_examples=400, deadline=None)
@given(jobs(), st.sampled_from(["job", "node"]))
def test_plan_reads_each_element_once(job, scope):
    tensors, held, nodes = job
    asked = [wants(parts) for parts in held]
    for node in set(nodes) if scope == "node" else [None]:
        ranks = [rank for rank, of in enumerate(nodes) if node in (None, of)]
        each, union = naive(held, ranks)
        found = plan(tensors, asked, nodes, scope, ranks[0])
        assert found == plan(tensors, asked, nodes, scope, ranks[-1])
        read = Counter()
        got = {rank: Counter() for rank in ranks}
        for rank in ranks:
            for number, of in found.direct(rank):
                mine = [(number, element) for element in wanted_elements(of)]
                read.update(mine)
                got[rank].update(mine)
        for windows in found.rounds():
            assert len({rank for rank, _ in windows}) == len(windows)
            received = Counter()
            for _, blocks in windows:
                assert len(blocks) == 1 or sum(block.nbytes for block in blocks) <= planning.WINDOW_NBYTES
                for block in blocks:
                    read.update((block.tensor, element) for element in elements(block.box))
                    for rank, of in block.pattern.wanted:
                        for inner, _ in sent(of, block.box):
                            some = [(block.tensor, element) for element in elements(inner)]
                            got[rank].update(some)
                            received[rank] += len(some) * block.pattern.tensor.itemsize
            single = max((tensor.itemsize for tensor in tensors), default=0) * len(ranks)
            assert all(nbytes <= planning.WINDOW_NBYTES + single for nbytes in received.values())
        assert max(read.values(), default=1) == 1
        assert union <= read.keys()
        for rank in ranks:
            assert got[rank] == Counter(each[rank])


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_plan_puts_received_blocks_into_their_part(job):
    tensors, held, _ = job
    for tensor, of in zip(tensors, (parts for parts in zip(*held, strict=True)), strict=True):
        for one in filter(None, of):
            whole = tuple(slice(0, size) for size in tensor.shape)
            if one.numel:
                assert sent(one, whole) == tuple(one.boxes())


@pytest.mark.parametrize("inner", [(0, 4), (2, 5), (6, 10)])
def test_plan_reads_all_of_a_part_that_contains_another(inner):
    parts = [Part.whole((10, 1)), Part((10, 1), ((inner,), ((0, 1),)))]
    found = plan([Tensor((10, 1), 8)], [wants([one]) for one in parts], [0, 0], "job", 0)
    rows = [
        row
        for windows in found.rounds()
        for _, blocks in windows
        for one in blocks
        for row in elements(one.box)
    ]
    assert sorted(rows) == [*elements((slice(0, 10), slice(0, 1)))]


@pytest.mark.parametrize("inner", [(0, 10), (2, 8)])
def test_plan_reads_long_parts_once_if_they_overlap(inner):
    parts = [Part.whole((10, 8)), Part((10, 8), ((inner,), ((0, 8),)))]
    found = plan([Tensor((10, 8), 1)], [wants([one]) for one in parts], [0, 0], "job", 0)
    assert [[*found.direct(rank)] for rank in range(2)] == [[], []]


def model(count):
    """Return a model of `count` tensors on 8 nodes of 8 ranks."""
    shapes = [(2048, 1024), (1024, 2048), (4096,), (512, 512), (128,), (4096, 4096)]
    placements = [[Shard(0), Shard(0)], [Replicate(), Shard(0)], [Replicate(), Replicate()]]
    kinds = [(shapes[number % 6], placements[number % 3]) for number in range(6)]
    tensors = [Tensor(kinds[number % 6][0], 2) for number in range(count)]
    asked = [
        Wants(
            [part(shape, [8, 8], divmod(rank, 8), over) for shape, over in kinds],
            [number % 6 + 1 for number in range(count)],
        )
        for rank in range(64)
    ]
    return tensors, asked, [rank // 8 for rank in range(64)]


@pytest.mark.parametrize("scope", ["job", "node"])
def test_plan_balances_the_owners(monkeypatch, scope):
    monkeypatch.undo()
    tensors, asked, nodes = model(3000)
    found = plan(tensors, asked, nodes, scope, 0)
    read = Counter()
    for windows in found.rounds():
        read.update({rank: sum(block.nbytes for block in blocks) for rank, blocks in windows})
    for rank in found.ranks:
        read[rank] += sum(of.numel * tensors[number].itemsize for number, of in found.direct(rank))
    assert len(read) == len(found.ranks)
    assert max(read.values()) <= 1.1 * min(read.values())


def test_plan_reads_few_bytes_by_few_ranks(monkeypatch):
    monkeypatch.undo()
    tensors = [Tensor((1 << 20,), 2)]
    asked = [Wants([Part.whole((1 << 20,))], [1]) for _ in range(6)]
    found = plan(tensors, asked, [0, 0, 0, 1, 1, 1], "job", 0)
    assert {rank for windows in found.rounds() for rank, _ in windows} == {0, 3}


def test_plan_reads_long_parts_by_their_rank(monkeypatch):
    monkeypatch.undo()
    parts = [part((4096, 1024), [4], [rank], [Shard(0)]) for rank in range(4)]
    found = plan([Tensor((4096, 1024), 2)], [Wants([one], [1]) for one in parts], [0] * 4, "job", 0)
    assert [*found.rounds()] == []
    assert [[*found.direct(rank)] for rank in range(4)] == [[(0, one)] for one in parts]


@pytest.mark.slow
def test_plan_of_many_tensors_takes_linear_time(monkeypatch):
    monkeypatch.undo()
    tensors, asked, nodes = model(100_000)
    took = []
    for _ in range(3):
        began = time.process_time()
        plan(tensors, asked, nodes, "job", 0)
        took.append(time.process_time() - began)
    # It takes about a second. This measures CPU time, since other processes may use the machine.
    assert min(took) < 5, took
