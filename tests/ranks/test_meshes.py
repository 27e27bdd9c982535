"""A model saved on one mesh and loaded on another: FSDP2, tensor parallel, both, HSDP, strided shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import ingot.dcp
from ingot.torch import load_into, save_sharded
from support.ranks import Ranks, contents

LAYOUTS = {
    1: ["fsdp", "tensor"],
    2: ["fsdp", "tensor", "tensor the other way", "strided"],
    # The two meshes of "fsdp and tensor" are 2 × 2 and 4 × 2, and of "hsdp" 2 × 2 and 2 × 4.
    4: ["fsdp", "tensor", "tensor the other way", "fsdp and tensor", "hsdp", "strided"],
    8: ["fsdp", "tensor", "tensor the other way", "fsdp and tensor", "hsdp", "strided"],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 40)
        self.down = nn.Linear(40, 24)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The size is a multiple of neither four nor eight.
        self.embed = nn.Embedding(27, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(24, 27, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(0))


def values():
    torch.manual_seed(0)
    model = Model()
    model.steps.fill_(12)
    return model


def tensor_parallel(model, mesh, other_way=False):
    first, second = (RowwiseParallel, ColwiseParallel) if other_way else (ColwiseParallel, RowwiseParallel)
    plan = {"up": first(), "down": second()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def sharded(layout):
    """Return a sharded model without values, to load into."""
    size = dist.get_world_size()
    with torch.device("meta"):
        model = Model()
    if layout == "fsdp":
        over = {"mesh": init_device_mesh("cpu", (size,))}
    elif layout.startswith("tensor"):
        tensor_parallel(model, init_device_mesh("cpu", (size,)), layout == "tensor the other way")
        over = None
    elif layout == "hsdp":
        over = {"mesh": init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards"))}
    elif layout == "fsdp and tensor":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        tensor_parallel(model, mesh["tensor"])
        over = {"mesh": mesh["data"]}
    else:
        mesh = init_device_mesh("cpu", (size,))
        for block in model.blocks:
            fused = distribute_tensor(
                block.up.weight.data, mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None
            )
            block.up.weight = nn.Parameter(fused)
            columns = distribute_tensor(block.down.weight.data, mesh, [Shard(1)], src_data_rank=None)
            block.down.weight = nn.Parameter(columns)
        over = None
    if over is not None:
        for block in model.blocks:
            fully_shard(block, **over)
        fully_shard(model, **over)
    model.to_empty(device="cpu")
    if over is None:
        # `to_empty` allocates memory for each name.
        model.head.weight = model.embed.weight
    empty(model)
    return model


def empty(model):
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            local(tensor).zero_()


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part(whole, like):
    """Return the part of this rank, as torch distributes the tensor."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def check(model):
    found = model.state_dict()
    for name, expected in values().state_dict().items():
        assert torch.equal(local(found[name]), part(expected, found[name])), name


def filled(path, layout, read_once="auto"):
    model = sharded(layout)
    assert load_into(model, path, read_once=read_once) == ([], [])
    check(model)
    return model


def saves(one, folder, layout):
    save_sharded(filled(one, layout).state_dict(), folder, max_shard_size="5KB")


def saves_parts(one, folder, layout):
    dcp.save(filled(one, layout).state_dict(), storage_writer=ingot.dcp.Writer(folder, whole=False))


def loads(paths, layout):
    model = sharded(layout)
    for number, path in enumerate(paths):
        empty(model)
        assert load_into(model, path, read_once=("auto", "job", "node", False)[number % 4]) == ([], [])
        check(model)


def loads_parts(paths, layout):
    model = sharded(layout)
    for path in paths:
        empty(model)
        dcp.load(model.state_dict(), storage_reader=ingot.dcp.Reader(path))
        check(model)


def on_each_mesh(meshes, work, *given, but=()):
    """Call `work` on all ranks of each mesh with each layout of that mesh. Yield a name for each call."""
    for ranks in meshes:
        for layout in LAYOUTS[ranks.size]:
            if layout not in but:
                name = f"{layout} of {ranks.size}"
                ranks.run(work, *(one(name) if callable(one) else one for one in given), layout, seconds=300)
                yield name


@pytest.fixture(scope="module")
def meshes(tmp_path_factory, four, eight):
    """Return sets of one, two, four and eight ranks."""
    few = [Ranks(size, tmp_path_factory.mktemp(f"{size} ranks")) for size in (1, 2)]
    yield [*few, four, eight]
    for ranks in few:
        ranks.close()


@pytest.mark.slow
def test_meshes_save_the_same_files_and_load_each_others(meshes, tmp_path):
    one = tmp_path / "one"
    save_sharded(values().state_dict(), one, max_shard_size="5KB")
    expected = contents(one)
    assert len(expected) > 4
    saved = [*on_each_mesh(meshes, saves, one, lambda name: tmp_path / name)]
    assert len(saved) == sum(map(len, LAYOUTS.values()))
    for name in saved:
        assert contents(tmp_path / name) == expected, name
    loaded = [*on_each_mesh(meshes, loads, [tmp_path / name for name in saved])]
    assert loaded == saved


@pytest.mark.slow
def test_meshes_load_the_parts_of_every_other(meshes, tmp_path):
    one = tmp_path / "one"
    save_sharded(values().state_dict(), one)
    # With every storage, torch's planner wrongly reports overlapping parts of a strided shard.
    but = ("strided",)
    saved = [*on_each_mesh(meshes, saves_parts, one, lambda name: tmp_path / name, but=but)]
    loaded = [*on_each_mesh(meshes, loads_parts, [tmp_path / name for name in saved], but=but)]
    assert loaded == saved


@pytest.mark.parametrize("layout", LAYOUTS[4])
def test_meshes_of_four_ranks_load_and_save(four, tmp_path, layout):
    save_sharded(values().state_dict(), tmp_path / "one", max_shard_size="5KB")
    four.run(saves, tmp_path / "one", tmp_path / "all", layout)
    assert contents(tmp_path / "all") == contents(tmp_path / "one")
