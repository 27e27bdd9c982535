"""A model saved on one mesh and loaded on another: FSDP2, tensor parallel, both, HSDP, strided shards."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from ingot.torch import load_into, save_sharded
from support.ranks import contents

LAYOUTS = {
    4: ["fsdp", "tensor", "fsdp and tensor", "hsdp", "strided"],
    8: ["fsdp", "tensor", "fsdp and tensor", "hsdp", "strided"],
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
        # Neither a multiple of four nor of eight.
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


def tensor_parallel(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def sharded(layout):
    """A model without values, as it is made before it is loaded."""
    size = dist.get_world_size()
    with torch.device("meta"):
        model = Model()
    if layout == "fsdp":
        over = {"mesh": init_device_mesh("cpu", (size,))}
    elif layout == "tensor":
        tensor_parallel(model, init_device_mesh("cpu", (size,)))
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
        # `to_empty` gives each name memory of its own.
        model.head.weight = model.embed.weight
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            getattr(tensor, "to_local", lambda tensor=tensor: tensor)().zero_()
    return model


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def filled(path, layout, read_once="auto"):
    model = sharded(layout)
    assert load_into(model, path, read_once=read_once) == ([], [])
    found = model.state_dict()
    for name, expected in values().state_dict().items():
        # That of a strided shard alone torch does not put together as it was.
        if layout != "strided" or not name.endswith("up.weight"):
            assert torch.equal(whole(found[name]), expected), name
    return model


def loads(path, layout, read_once):
    filled(path, layout, read_once)


def saves(one, folder, layout):
    save_sharded(filled(one, layout).state_dict(), folder, max_shard_size="5KB")


def over(ranks, one, folder):
    for layout in LAYOUTS[ranks.size]:
        path = folder / f"{layout} of {ranks.size}"
        ranks.run(saves, one, path, layout)
        yield path


@pytest.mark.slow
def test_every_layout_saves_the_same_files_and_loads_those_of_every_other(four, eight, tmp_path):
    one = tmp_path / "one"
    save_sharded(values().state_dict(), one, max_shard_size="5KB")
    expected = contents(one)
    assert len(expected) > 4
    saved = [*over(four, one, tmp_path), *over(eight, one, tmp_path)]
    for path in saved:
        assert contents(path) == expected, path.name
    # The files are the same, so that one of each number of ranks stands for all.
    for ranks, path in product((four, eight), (saved[0], saved[-1])):
        for layout in LAYOUTS[ranks.size]:
            ranks.run(loads, path, layout, "job")


@pytest.mark.parametrize("layout", LAYOUTS[4])
def test_four_ranks_load_and_save_each_layout(four, tmp_path, layout):
    save_sharded(values().state_dict(), tmp_path / "one", max_shard_size="5KB")
    four.run(saves, tmp_path / "one", tmp_path / "all", layout)
    assert contents(tmp_path / "all") == contents(tmp_path / "one")
