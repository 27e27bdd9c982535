"""Some of the ranks: each group of them loads and saves on its own, whatever its backend sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ingot._ranks import peers
from ingot.torch import load_file, load_into, save_sharded
from support.ranks import contents


def whole(number):
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(30 + number, 40, generator=generator) for name in ("a", "b")}


def works(folder, sends_cpu):
    """Ranks 0 and 2 have a model, and ranks 1 and 3 another."""
    takes_cpu = peers._takes_cpu
    if not sends_cpu:
        peers._takes_cpu = lambda group: False
    try:
        rank = dist.get_rank()
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        number = rank % 2
        mesh = DeviceMesh.from_group(groups[number], "cpu")
        tensors = {
            name: distribute_tensor(tensor, mesh, [Shard(1)], src_data_rank=None)
            for name, tensor in whole(number).items()
        }
        path = folder / str(number)
        save_sharded(tensors, path, process_group=groups[number])
        target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        load_into(target, path, read_once="job", process_group=groups[number])
        assert all(torch.equal(target[name].to_local(), tensors[name].to_local()) for name in tensors)
    finally:
        peers._takes_cpu = takes_cpu


@pytest.mark.parametrize("sends_cpu", [True, False], ids=["gloo", "a backend without the CPU"])
def test_two_groups_load_and_save_at_the_same_time(four, tmp_path, sends_cpu):
    four.run(works, tmp_path, sends_cpu)
    for number in range(2):
        save_sharded(whole(number), tmp_path / "one", overwrite=True)
        assert contents(tmp_path / str(number)) == contents(tmp_path / "one")
        assert all(
            torch.equal(tensor, whole(number)[name])
            for name, tensor in load_file(tmp_path / str(number)).items()
        )
