"""The elements that a rank holds, compared with torch's own distribution."""

from functools import partial
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ingot._ranks.placements import Part, in_elements, part
from ingot._ranks.placements import product as joined


def held_by_torch(tensor, mesh_shape, coordinate, placements):
    """Return the part of `distribute_tensor` for the rank: each placement cuts the remaining part."""
    for size, place, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if not placement.is_replicate():
            chunks, _ = placement._split_tensor(tensor, size, with_padding=False, contiguous=True)
            tensor = chunks[place]
    return tensor


def held(tensor, of):
    found = torch.full(of.local_shape, -1, dtype=tensor.dtype)
    for index, place in of.boxes():
        found[place] = tensor[index]
    return found


@st.composite
def cases(draw):
    shape = draw(st.lists(st.integers(0, 13), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dims = st.integers(0, len(shape) - 1)
    placement = st.one_of(
        st.builds(Shard, dims),
        st.builds(lambda dim, split: _StridedShard(dim, split_factor=split), dims, st.integers(1, 5)),
        st.just(Replicate()),
    )
    return shape, mesh, [draw(placement) for _ in mesh]


@settings(max_examples=1500, deadline=None)
@given(cases())
def test_part_equals_the_part_of_torch(case):
    shape, mesh, placements = case
    tensor = torch.arange(prod(shape)).view(shape)
    for coordinate in product(*map(range, mesh)):
        of = part(shape, mesh, coordinate, placements)
        expected = held_by_torch(tensor, mesh, coordinate, placements)
        assert of.numel == expected.numel()
        if expected.numel():
            assert torch.equal(held(tensor, of), expected)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_part_covers_each_element_once_without_replicas(case):
    shape, mesh, placements = case
    found = torch.zeros(shape, dtype=torch.int64)
    for coordinate in product(*map(range, mesh)):
        of = part(shape, mesh, coordinate, placements)
        for index, _ in of.boxes():
            found[index] += 1
    replicas = prod(size for size, one in zip(mesh, placements, strict=True) if one.is_replicate())
    assert (found == replicas).all()


@settings(max_examples=300, deadline=None)
@given(cases())
def test_run_is_the_shortest_contiguous_stretch(case):
    shape, mesh, placements = case
    tensor = torch.arange(prod(shape)).view(shape)
    for coordinate in product(*map(range, mesh)):
        of = part(shape, mesh, coordinate, placements)
        flat = held(tensor, of).reshape(-1)
        if not flat.numel():
            assert of.run() == 0
            continue
        breaks = (flat.diff() != 1).nonzero().reshape(-1) + 1
        runs = torch.tensor([0, *breaks.tolist(), flat.numel()]).diff()
        # Two runs may be adjacent by chance, at the end of one row and the start of the next.
        assert of.run() <= runs.min()


def distributed(mesh, rank):
    """Return the parts that `distribute_tensor` assigns to this rank, for some tensors and placements."""
    cases = [
        ((9, 6), [Shard(0), *[Replicate()] * (len(mesh) - 1)]),
        ((9, 6), [*[Replicate()] * (len(mesh) - 1), Shard(1)]),
        ((5, 2), [Shard(0)] * len(mesh)),
        ((3, 7, 4), [Shard(2), *[Shard(1)] * (len(mesh) - 1)]),
        ((16, 3), [_StridedShard(0, split_factor=2), *[Shard(1)] * (len(mesh) - 1)]),
        ((10, 3), [_StridedShard(0, split_factor=mesh[-1]), *[Shard(0)] * (len(mesh) - 1)]),
    ]
    distributed_tensor = partial(distribute_tensor, src_data_rank=None)
    over = init_device_mesh("cpu", mesh)
    for shape, placements in cases:
        tensor = torch.arange(prod(shape)).view(shape)
        yield tensor, placements, distributed_tensor(tensor, over, placements)


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (4, 2), (2, 2, 2)], ids=str)
def test_part_equals_that_of_distribute_tensor(mesh):
    for rank in range(prod(mesh)):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=prod(mesh))
        try:
            for tensor, placements, found in distributed(mesh, rank):
                of = part(tensor.shape, mesh, found.device_mesh.get_coordinate(), placements)
                assert torch.equal(held(tensor, of), found.to_local())
        finally:
            torch.distributed.destroy_process_group()


def test_part_of_fsdp_over_tensor_parallel_is_one_stretch():
    placements = _StridedShard(0, split_factor=2), Shard(0)
    rows = [part([10], [2, 2], place, placements).intervals for place in product(range(2), range(2))]
    assert rows == [(((0, 3),),), (((5, 8),),), (((3, 5),),), (((8, 10),),)]


def test_part_of_a_strided_shard_has_two_stretches():
    of = part([8, 6], [4], [1], [_StridedShard(0, split_factor=2)])
    assert of.intervals == (((1, 2), (5, 6)), ((0, 6),))
    assert [*of.boxes()] == [
        ((slice(1, 2), slice(0, 6)), (slice(0, 1), slice(0, 6))),
        ((slice(5, 6), slice(0, 6)), (slice(1, 2), slice(0, 6))),
    ]


@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_part_counts_negative_dimensions_from_the_end(dim):
    assert part([4, 6, 8], [2], [1], [Shard(dim)]) == part([4, 6, 8], [2], [1], [Shard(dim + 3)])


@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_part_nothing_holds_no_element(shape):
    assert Part.nothing(shape).numel == 0


def test_product_refuses_boxes_that_differ_in_two_dimensions():
    corners = [(slice(0, 2), slice(0, 2)), (slice(2, 4), slice(2, 4))]
    assert joined((4, 4), [(corner, corner) for corner in corners]) is None
    rows = [(slice(0, 2), slice(0, 4)), (slice(2, 4), slice(0, 4))]
    assert joined((4, 4), [(row, row) for row in rows]) == (Part.whole((4, 4)), (slice(0, 4), slice(0, 4)))


def test_in_elements_doubles_both_ends_of_the_last_dimension():
    assert in_elements((slice(1, 2), slice(3, 5))) == (slice(1, 2), slice(6, 10))
    assert in_elements(()) == ()


def test_part_of_a_scalar_is_whole_on_each_rank():
    assert part([], [4], [3], [Replicate()]) == Part.whole([])
    assert [*Part.whole([]).boxes()] == [((), ())]


def test_part_rejects_pending_sums():
    with pytest.raises(ValueError, match=r"Partial\(sum\)"):
        part([4], [2], [0], [Partial()])
