"""Folders of checkpoints that ranks save and load together."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ingot
import ingot.torch
from ingot.torch import RNG
from support.ranks import Ranks

NAMES = ("in", "out")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 10)
        self.second = torch.nn.Linear(10, 3)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(data).relu())
        return found


def built(how: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that is distributed over all ranks, and an optimizer that has not stepped."""
    torch.manual_seed(0)
    model = Net()
    size = dist.get_world_size()
    if how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif how == "fsdp+tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step with the same data on all ranks, so that the world's size does not matter."""
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    loss = model(data).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach().clone()


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The parameters and the moments, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter)
        for key, one in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = whole(one)
    return found


def saved(folder: Path, how: str) -> tuple[dict[str, torch.Tensor], list[float], torch.Tensor]:
    """Train two steps and save, one step more. Returns what is saved, the losses after it, and random numbers."""
    model, optimizer = built(how)
    torch.manual_seed(100 + dist.get_rank())
    state = {"model": model, "optimizer": optimizer, "step": 0, "rng": RNG()}
    with ingot.Checkpoints(folder, keep=2) as checkpoints:
        for step in (1, 2, 3):
            train(model, optimizer, step)
            state["step"] = step
            checkpoints.save(step, state, metrics={"loss": 0.5})
        found = values(model, optimizer)
        numbers = torch.rand(3)
        losses = [train(model, optimizer, step) for step in (4, 5)]
    assert checkpoints.steps() == [2, 3]
    return found, losses, numbers


def resumed(folder: Path, how: str) -> tuple[dict[str, torch.Tensor], list[float], torch.Tensor, Any]:
    model, optimizer = built(how)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    state: Any = {"model": model, "optimizer": optimizer, "step": 0, "rng": RNG()}
    checkpoints = ingot.Checkpoints(folder)
    assert checkpoints.latest(verify=True) == 3
    with pytest.warns(RuntimeWarning, match="rng") if dist.get_world_size() != 4 else unwarned():
        state = checkpoints.load(into=state)
    assert state["step"] == 3
    assert state["model"] is model
    found = values(model, optimizer)
    numbers = torch.rand(3)
    losses = [train(model, optimizer, step) for step in (4, 5)]
    rng = state["rng"]
    return found, losses, numbers, len(rng) if isinstance(rng, list) else None


def unwarned() -> Any:
    import contextlib

    return contextlib.nullcontext()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(found[name], one), name


@pytest.mark.parametrize("how", ["fsdp", "fsdp+tp"])
def test_ranks_resume_on_another_number_of_ranks(
    how: str, tmp_path: Path, four: Ranks, two: Ranks, some: Ranks
) -> None:
    outcomes = four.run(saved, tmp_path / "run", how)
    expected, losses, _ = outcomes[0]
    for rank, (found, its_losses, numbers, listed) in enumerate(four.run(resumed, tmp_path / "run", how)):
        assert_same(found, expected)
        assert its_losses == losses
        assert torch.equal(numbers, outcomes[rank][2])
        assert listed is None
    for ranks in (two, some):
        # Three ranks have no mesh of two by two.
        on = how if ranks is two else "fsdp"
        for found, its_losses, _, listed in ranks.run(resumed, tmp_path / "run", on):
            assert_same(found, expected)
            assert its_losses == pytest.approx(losses, rel=1e-6)
            assert listed == 4
