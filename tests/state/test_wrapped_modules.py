"""States of modules that DistributedDataParallel and torch.compile wrap, on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ingot
from ingot._state.wrappers import Naming
from ingot.torch import RNG, load_state, save_state
from support.ranks import Ranks


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda module: module,
    "parallel": DistributedDataParallel,
    "compiled": compiled,
    "compiled parallel": lambda module: compiled(DistributedDataParallel(module)),
    "parallel compiled": lambda module: DistributedDataParallel(compiled(module)),
}


def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    data = torch.rand(16, 4)
    optimizer.zero_grad()
    loss = (model(data) - 1).pow(2).mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def made(kind: str, seed: int) -> dict[str, Any]:
    model = WRAPPERS[kind](network(seed))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "rng": RNG(), "step": 0}


def resumes(path: Path, kind: str, other: str) -> tuple[list[float], list[float]]:
    """Save by the first rank, load on both into a module with another wrapper, and train on."""
    state = made(kind, 0)
    step(state["model"], state["optimizer"])
    if dist.get_rank() == 0:
        save_state({**state, "step": 1}, path)
    losses = [step(state["model"], state["optimizer"]) for _ in range(2)]
    dist.barrier()
    fresh = load_state(path, into=made(other, 1))
    assert fresh["step"] == 1
    found = [step(fresh["model"], fresh["optimizer"]) for _ in range(2)]
    dist.barrier()
    return losses, found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_save_state_by_one_rank_resumes_both(kind: str, two: Ranks, path: Path) -> None:
    for other in ("none", kind):
        found = two.run(resumes, path, kind, other)
        losses, resumed = found[0]
        assert resumed == losses
    names = ingot.open(path).keys()
    assert {name for name in names if name.startswith("model.0")} == {"model.0.weight", "model.0.bias"}
    assert not any("module" in name or "_orig_mod" in name for name in names)


class Inside(nn.Module):
    """Layers that a wrapper has been put around, one within the other."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.body = WRAPPERS[kind](network(seed))
        self.head = nn.Sequential(compiled(nn.Linear(2, 2)) if kind != "none" else nn.Linear(2, 2))

    def forward(self, data: torch.Tensor) -> Any:
        return self.head(self.body(data))


def resumes_inside(path: Path, kind: str, other: str) -> tuple[list[float], list[float], list[str]]:
    """Save by the first rank, load on both into a module with other wrappers inside, and train on."""
    state = {"model": Inside(kind, 0), "step": 0, "rng": RNG()}
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
    step(state["model"], state["optimizer"])
    if dist.get_rank() == 0:
        save_state(state, path)
    losses = [step(state["model"], state["optimizer"]) for _ in range(2)]
    dist.barrier()
    into = {"model": Inside(other, 1), "step": 1, "rng": RNG()}
    into["optimizer"] = torch.optim.AdamW(into["model"].parameters())
    fresh = load_state(path, into=into)
    found = [step(fresh["model"], fresh["optimizer"]) for _ in range(2)]
    names = [*load_state(path)["model"]]
    dist.barrier()
    return losses, found, names


@pytest.mark.parametrize("kind", WRAPPERS)
def test_names_of_wrapped_layers_are_those_of_the_layers(kind: str, two: Ranks, path: Path) -> None:
    plain = [*Inside("none", 0).state_dict()]
    for saved, loaded in ((kind, "none"), ("none", kind), (kind, kind)):
        for losses, found, names in two.run(resumes_inside, path, saved, loaded):
            assert found == losses
            assert names == plain


def test_versions_of_wrapped_layers_are_those_of_the_layers(path: Path) -> None:
    model = nn.Sequential(compiled(nn.BatchNorm1d(3)))
    save_state({"model": model}, path)
    versions = load_state(path)["model"]._metadata
    assert versions == nn.Sequential(nn.BatchNorm1d(3)).state_dict()._metadata  # type: ignore[attr-defined]


def test_keys_select_a_part_of_a_model_with_wrapped_layers(path: Path) -> None:
    save_state({"model": network(0)}, path)
    model = nn.Sequential(compiled(nn.Linear(4, 8)), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    load_state(path, into={"model": model}, keys="model.0.*")
    assert torch.equal(model[0]._orig_mod.weight, network(0)[0].weight)  # type: ignore[union-attr, arg-type, index]


def test_names_that_differ_by_a_wrapper_only_are_kept(path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "_orig_mod": nn.ModuleDict({"a": nn.Linear(1, 1)})})
    save_state({"root": {"model": model}, "step": 1}, path)
    assert [*load_state(path)["root"]["model"]] == ["a.weight", "a.bias"]


def test_walked_states_are_what_state_dict_returns() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    model[2][0].weight = model[0].weight  # type: ignore[index]
    model.register_buffer("passing", torch.ones(1), persistent=False)
    model.register_buffer("kept", torch.ones(1))
    naming = Naming(model)
    assert naming.walk.tensors is not None
    found, expected = naming.state(), model.state_dict(keep_vars=True)
    assert type(found) is type(expected)
    assert [*found] == [*expected]
    assert all(found[name] is one for name, one in expected.items())
    assert [*found._metadata.items()] == [*expected._metadata.items()]  # type: ignore[attr-defined]
    model.register_state_dict_post_hook(lambda *_: None)
    assert Naming(model).walk.tensors is None
    assert [*Naming(model).state()] == [*expected]
