"""Directories that ranks saved by torch.distributed.checkpoint, loaded and converted by one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ingot
from ingot.torch import load_file, load_into

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": (torch.randn(103, 16, generator=generator), [Shard(0), Replicate()]),
        "columns": (torch.randn(9, 130, generator=generator).bfloat16(), [Replicate(), Shard(1)]),
        "both": (torch.arange(7 * 9 * 5).view(7, 9, 5), [Shard(1), Shard(2)]),
        "same": (torch.arange(10.0), [Shard(0), Shard(0)]),
        "few": (torch.arange(3, dtype=torch.int32), [Shard(0), Shard(0)]),
        "replica": (torch.randn(30, generator=generator), [Replicate(), Replicate()]),
        "scalar": (torch.tensor(3.5), [Replicate(), Replicate()]),
    }


def save_placed(folder):
    mesh = init_device_mesh("cpu", (2, 2))
    state = {name: distribute_tensor(one, mesh, places) for name, (one, places) in tensors().items()}
    dcp.save({"model": state, "rank": 0}, checkpoint_id=folder)


def save_trained(folder):
    """Save a model under FSDP2 and tensor parallelism, and its optimizer, after one step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 14), torch.nn.ReLU(), torch.nn.Linear(14, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 10)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder)


def fill_from(folder):
    """Fill DTensors of other placements than the saved ones, on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        f"model.{name}": distribute_tensor(torch.zeros_like(one), mesh, [Shard(one.dim() - 1)])
        for name, (one, _) in tensors().items()
        if one.dim() > 0
    }
    load_into(state, folder, strict=False)
    expected = {f"model.{name}": one for name, (one, _) in tensors().items()}
    return all(torch.equal(one.full_tensor(), expected[name]) for name, one in state.items())


def flat(tree, *keys):
    if isinstance(tree, torch.Tensor):
        return {".".join(keys): tree}
    pairs = tree.items() if isinstance(tree, dict) else ()
    return {name: one for key, inner in pairs for name, one in flat(inner, *keys, str(key)).items()}


def check(folder, out):
    """Compare both ways of reading with torch's own loader, which needs the whole model in one process."""
    dcp_to_torch_save(folder, out / "whole.pt")
    expected = flat(torch.load(out / "whole.pt", weights_only=False))
    report = ingot.convert(folder, out / "whole.safetensors")
    for found in (load_file(folder), load_file(out / "whole.safetensors")):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(found[name], tensor), name
    return report


def test_load_file_and_convert_join_the_boxes_of_all_placements(four, tmp_path):
    folder = tmp_path / "step_1"
    four.run(save_placed, str(folder))
    report = check(folder, tmp_path)
    assert report.tensors == len(tensors())
    assert [(one.name, one.value) for one in report.left_out] == [("rank", "0")]
    with ingot.safe_open(folder, "pt") as file:
        for name, (whole, _) in tensors().items():
            if whole.dim() > 1:
                assert torch.equal(file.get_slice(f"model.{name}")[2:5, 1:7], whole[2:5, 1:7])
    assert four.run(fill_from, str(folder)) == [True] * 4


def test_load_file_and_convert_read_a_trained_model_of_fsdp_and_tensor_parallelism(four, tmp_path):
    folder = tmp_path / "step_1"
    four.run(save_trained, str(folder))
    report = check(folder, tmp_path)
    assert report.tensors == 4 + 3 * 4
    assert any(one.name.startswith("optim.param_groups") for one in report.left_out)


def test_convert_names_the_missing_file_of_a_rank(four, tmp_path):
    folder = tmp_path / "step_1"
    four.run(save_placed, str(folder))
    (folder / "__3_0.distcp").unlink()
    with pytest.raises(
        ingot.ConversionError, match=r"`model\.\w+` is in `__3_0.distcp`.*no such file"
    ) as caught:
        ingot.convert(folder, tmp_path / "out.safetensors")
    assert caught.value.code == "missing-file"
