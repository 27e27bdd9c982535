"""`load_into` of DTensors: each rank fills its part. An error names a tensor whose parts are unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from ingot import DestinationError
from ingot._adapters import pieces
from ingot.torch import IncompatibleKeys, load_into, save_file

WHOLE = {
    "rows": torch.arange(60.0).view(10, 6),
    "columns": torch.arange(60, dtype=torch.bfloat16).view(6, 10),
    "fused": torch.arange(40, dtype=torch.int32).view(8, 5),
    "few": torch.arange(6.0).view(3, 2),
    "scalar": torch.tensor(3.5),
    "nothing": torch.zeros(0, 4),
    "packed": torch.arange(24, dtype=torch.uint8).view(4, 6),
    "plain": torch.arange(3.0),
}
PLACEMENTS = {
    "rows": [_StridedShard(0, split_factor=2), Shard(0)],
    "columns": [Replicate(), Shard(1)],
    "fused": [_StridedShard(0, split_factor=4), Replicate()],
    "few": [Shard(0), Shard(0)],
    "scalar": [Replicate(), Replicate()],
    "nothing": [Shard(0), Replicate()],
    "packed": [Shard(0), Shard(-1)],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(WHOLE, tmp_path / "whole.safetensors")
    return tmp_path / "whole.safetensors"


def distributed(change=lambda tensor: tensor):
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = {
        name: distribute_tensor(change(WHOLE[name]), mesh, placements, src_data_rank=None)
        for name, placements in PLACEMENTS.items()
    }
    return tensors | {"plain": change(WHOLE["plain"])}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("piece", [16, 64 << 20], ids=["in small pieces", "at once"])
@pytest.mark.parametrize(
    "dtype", [None, torch.float64, torch.int16], ids=["as stored", "converted", "copied"]
)
def test_load_into_fills_the_part_of_each_rank(path, as_rank, backend, piece, dtype, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_NBYTES", piece)
    for rank in range(4):
        with as_rank(rank, 4):
            expected = distributed(lambda tensor: tensor.to(dtype))
            target = distributed(lambda tensor: torch.full_like(tensor, 1, dtype=dtype))
            assert load_into(target, path, backend=backend, read_once=False) == IncompatibleKeys([], [])
            for name, tensor in expected.items():
                assert torch.equal(local(target[name]), local(tensor)), name


def test_load_into_fills_a_module_after_to_empty(path, as_rank):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            mesh = init_device_mesh("cpu", (4,))
            rows = distribute_tensor(torch.empty(10, 6, device="meta"), mesh, [Shard(0)], src_data_rank=None)
            self.rows = nn.Parameter(rows)
            self.again = self.rows

    with as_rank(1, 4):
        model = Model()
        with pytest.raises(
            DestinationError, match=r"`rows`: a meta .* call `model\.to_empty\(device=…\)` first"
        ):
            load_into(model, path, strict=False, read_once=False)
        model.to_empty(device="cpu")
        model.again = model.rows
        found = load_into(model, path, strict=False, read_once=False)
        # The parameter has two names, and the file has one of them.
        assert found.missing_keys == []
        assert torch.equal(model.rows.to_local(), WHOLE["rows"][3:6])


def test_load_into_does_nothing_on_a_rank_outside_the_mesh(path, as_rank):
    with as_rank(3, 4):
        rows = DTensor.from_local(
            torch.zeros(0), DeviceMesh("cpu", [0, 1]), [Shard(0)], shape=(10, 6), stride=(6, 1)
        )
        load_into({"rows": rows}, path, strict=False, read_once=False)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            lambda mesh: DTensor.from_local(torch.zeros(10, 6), mesh, [Partial()]),
            r"`rows`: .*Partial.* call `\.redistribute",
        ),
        (
            lambda mesh: DTensor.from_local(
                TwoTensor(torch.zeros(3, 6), torch.zeros(3, 6)),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=(10, 6),
                stride=(6, 1),
            ),
            r"`rows`: a DTensor of TwoTensor .*plain tensors",
        ),
    ],
    ids=["partial", "subclass"],
)
def test_load_into_names_tensors_without_bytes(path, as_rank, tensor, message):
    with as_rank(0, 4), pytest.raises(DestinationError, match=message):
        load_into({"rows": tensor(init_device_mesh("cpu", (4,)))}, path, strict=False, read_once=False)


def test_load_into_rejects_flat_parameters_with_a_hint(path, as_rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with as_rank(0, 2):
        inner = FullyShardedDataParallel(nn.Linear(6, 10), device_id=torch.device("cpu"))
        with pytest.raises(DestinationError, match=r"module `0`: .*fully_shard.*set_model_state_dict"):
            load_into(nn.Sequential(inner), path, strict=False)


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as stored", "converted"])
def test_load_into_marks_dtensors_as_modified_for_autograd(path, as_rank, dtype):
    with as_rank(1, 4):
        target = distributed(lambda tensor: tensor.to(dtype))
        leaves = [tensor.requires_grad_() for tensor in target.values() if tensor.is_floating_point()]
        losses = [(tensor * tensor).sum() for tensor in leaves]
        load_into(target, path, read_once=False)
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_load_into_fills_a_tensor_named_like_a_part_of_another(tmp_path, as_rank):
    named = {"w": WHOLE["rows"], "w[3:6, 0:6]": WHOLE["plain"]}
    save_file(named, tmp_path / "named.safetensors")
    with as_rank(1, 4):
        target = {
            "w": distribute_tensor(
                torch.zeros(10, 6), init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None
            ),
            "w[3:6, 0:6]": torch.zeros(3),
        }
        load_into(target, tmp_path / "named.safetensors", read_once=False)
        assert torch.equal(target["w"].to_local(), WHOLE["rows"][3:6])
        assert torch.equal(target["w[3:6, 0:6]"], WHOLE["plain"])
