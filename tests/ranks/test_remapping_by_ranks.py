"""`load_into(remap=…)` of DTensors: each rank has the slices of fused tensors that it would cut itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ingot import DestinationError
from ingot.remap import concat, select, stack, transpose, unwrap
from ingot.torch import load_into, save_file

# Grouped-query attention: k and v have fewer rows than q.
PARTS = {
    "q": torch.arange(0.0, 48).view(16, 3),
    "k": torch.arange(100.0, 124).view(8, 3),
    "v": torch.arange(200.0, 224).view(8, 3),
    "gate": torch.arange(300.0, 336).view(12, 3),
    "up": torch.arange(400.0, 436).view(12, 3),
}
EXPERTS = {f"experts.{e}.w": torch.full((4, 2), float(e)) for e in range(8)}
QKV = concat("qkv", ["q", "k", "v"], shard="each")
GATE_UP = concat("gate_up", ["gate", "up"], shard="each")
SHAPES = {"qkv": (32, 3), "gate_up": (24, 3), "experts": (8, 4, 2)}


@pytest.fixture
def path(tmp_path):
    save_file(PARTS | EXPERTS, tmp_path / "parts.safetensors")
    return tmp_path / "parts.safetensors"


def empty(shapes, mesh, placements):
    """Return DTensors of these shapes with other values."""
    found = {}
    for name, shape in shapes.items():
        local = list(shape)
        for size, placement in zip(mesh.shape, placements, strict=True):
            if not placement.is_replicate():
                local[placement.dim] //= size
        found[name] = DTensor.from_local(
            torch.full(local, -1.0), mesh, placements, shape=torch.Size(shape), stride=contiguous(shape)
        )
    return found


def contiguous(shape):
    return torch.empty(shape, device="meta").stride()


def chunks(names, rank):
    return torch.cat([PARTS[name].chunk(4)[rank] for name in names])


def fuse(path, read_once):
    """Load on this rank and compare with load-and-slice."""
    rank = torch.distributed.get_rank()
    target = empty(SHAPES, init_device_mesh("cpu", (4,)), [Shard(0)])
    rules = [QKV, GATE_UP, stack("experts", "experts.{e}.w")]
    load_into(target, path, remap=rules, read_once=read_once)
    assert torch.equal(target["qkv"].to_local(), chunks(["q", "k", "v"], rank))
    assert torch.equal(target["gate_up"].to_local(), chunks(["gate", "up"], rank))
    whole = torch.stack([*EXPERTS.values()])
    assert torch.equal(target["experts"].to_local(), whole.chunk(4)[rank])


@pytest.mark.parametrize("read_once", [False, "job"])
def test_load_into_slices_each_part_of_fused_tensors(path, four, read_once):
    four.run(fuse, path, read_once)


def test_load_into_slices_joined_tensors_without_each(path, as_rank):
    whole = torch.cat([PARTS["q"], PARTS["k"], PARTS["v"]])
    for rank in range(4):
        with as_rank(rank, 4):
            target = empty({"qkv": (32, 3)}, init_device_mesh("cpu", (4,)), [Shard(0)])
            rules = [concat("qkv", ["q", "k", "v"]), select("qkv")]
            load_into(target, path, remap=rules, read_once=False)
            assert torch.equal(target["qkv"].to_local(), whole.chunk(4)[rank])


def test_parts_follow_transposed_dimensions(path, as_rank):
    with as_rank(1, 4):
        target = empty({"qkv": (3, 32)}, init_device_mesh("cpu", (4,)), [Shard(1)])
        load_into(target, path, remap=[QKV, select("qkv"), transpose("qkv")], read_once=False)
        assert torch.equal(target["qkv"].to_local(), chunks(["q", "k", "v"], 1).T)


def test_two_shards_of_one_dimension_divide_the_parts_twice(path, as_rank):
    with as_rank(3, 4):
        target = empty({"qkv": (32, 3)}, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(0)])
        load_into(target, path, remap=[QKV, select("qkv")], read_once=False)
        assert torch.equal(target["qkv"].to_local(), chunks(["q", "k", "v"], 3))


def test_replicas_have_all_parts(path, as_rank):
    with as_rank(0, 4):
        target = empty({"qkv": (32, 3)}, init_device_mesh("cpu", (4,)), [Replicate()])
        load_into(target, path, remap=[QKV, select("qkv")], read_once=False)
        assert torch.equal(target["qkv"].to_local(), torch.cat([PARTS[name] for name in "qkv"]))


@pytest.mark.parametrize(
    ("mesh", "placements", "reason"),
    [((16,), [Shard(0)], "not divisible by 16 ranks"), ((4,), [_StridedShard(0, split_factor=2)], "strided")],
)
def test_parts_that_ranks_cannot_slice_are_refused(path, as_rank, mesh, placements, reason):
    with as_rank(0, mesh[0]):
        target = empty({"qkv": (32, 3)}, init_device_mesh("cpu", mesh), placements)
        with pytest.raises(DestinationError, match=reason) as caught:
            load_into(target, path, remap=[QKV, select("qkv")], read_once=False)
        assert caught.value.tensor == "qkv"


class Model(nn.Module):
    """A small model, a part of which has the name that DDP adds."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.module(x)


def compiled(model):
    model.layers[1] = torch.compile(model.layers[1])
    return torch.compile(model).state_dict()


def in_ddp(model):
    return nn.parallel.DistributedDataParallel(model).state_dict()


def in_fsdp(model):
    whole = torch.distributed.fsdp.FullyShardedDataParallel
    sharding = torch.distributed.fsdp.ShardingStrategy.NO_SHARD
    options = {"sharding_strategy": sharding, "use_orig_params": True, "device_id": torch.device("cpu")}
    model.layers[0] = whole(model.layers[0], **options)
    parameters = dict(whole(model, **options).named_parameters())
    return {name: one.detach().clone() for name, one in parameters.items()}


@pytest.mark.parametrize(
    ("wrap", "wrapper", "part"),
    [
        (compiled, "torch.compile", "_orig_mod"),
        (in_ddp, "ddp", "module"),
        (in_fsdp, "fsdp", "_fsdp_wrapped_module"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_unwrap_restores_the_outputs_of_the_model(tmp_path, as_rank, wrap, wrapper, part):
    torch.manual_seed(0)
    model, x = Model(), torch.rand(3, 4)
    expected = model(x)
    with as_rank(0, 1):
        state = wrap(model)
        assert all(part in name.split(".") for name in state)
        save_file(state, tmp_path / "wrapped.safetensors")
    new = Model()
    load_into(new, tmp_path / "wrapped.safetensors", remap=[unwrap(wrapper)])
    assert torch.equal(new(x), expected)
