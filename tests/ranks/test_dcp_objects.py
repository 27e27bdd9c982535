"""Objects beside the tensors of a state dict, saved and loaded by `torch.distributed.checkpoint`."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ingot
import ingot.dcp
from ingot._ranks import peers
from ingot.dcp import writer as writing
from ingot.torch import _save_by_ranks, load_state

# torch warns of each save and load without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class TrainState:
    """As torchtitan's."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.losses = step, [0.5 / (number + 1) for number in range(step * 100)]

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step), "losses": self.losses, "name": f"run {self.step}"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.losses = int(state["step"]), state["losses"]


class Loader:
    """A data loader, with another state on each rank and bytes that a user has pickled."""

    def __init__(self, rank: int, epoch: int = 0) -> None:
        self.key, self.state = f"dp_rank_{rank}", {"epoch": epoch, "rng": (rank, bytes(epoch * 3000))}

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.state, "world_size": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state[self.key]


class Application:
    """A model and its optimizer, as the tutorial of torch has them."""

    def __init__(self, seed: int, sharded: bool) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        if sharded:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * (seed + 1))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def train(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(3, 4)).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def made(seed: int, rank: int, sharded: bool) -> dict[str, Any]:
    application = Application(seed, sharded)
    return {
        "app": application,
        "lr_scheduler": application.scheduler,
        "train_state": TrainState(seed * 3),
        "dataloader": Loader(rank, seed),
    }


def resumes(path: Path, whole: bool, background: bool, nodes: list[int] | None = None) -> Any:
    """Save and load by all ranks, and return the losses of the first and the second training."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    alone = {} if dist.is_initialized() else {"no_dist": True}
    for module in (writing, peers, _save_by_ranks):
        module.this_node = lambda: f"node {nodes[rank] if nodes else 0}"  # type: ignore[attr-defined]
    try:
        state = made(1, rank, not alone)
        state["app"].train()
        writer = ingot.dcp.Writer(path, whole=whole, overwrite=True)
        if background:
            dcp.async_save(state, storage_writer=writer).result()
        else:
            dcp.save(state, storage_writer=writer, **alone)
    finally:
        for module in (writing, peers, _save_by_ranks):
            module.this_node = peers.this_node  # type: ignore[attr-defined]
    losses = [state["app"].train() for _ in range(3)]
    fresh = made(0, rank, not alone)
    dcp.load(fresh, storage_reader=ingot.dcp.Reader(path), **alone)
    found = [fresh["app"].train() for _ in range(3)]
    assert (fresh["train_state"].step, fresh["train_state"].losses) == (3, TrainState(3).losses)
    assert fresh["dataloader"].state == Loader(rank, 1).state
    assert fresh["lr_scheduler"].last_epoch == 4
    return losses, found


@pytest.mark.parametrize("whole", [True, False])
def test_process_without_ranks_resumes(path: Path, whole: bool) -> None:
    for _ in range(2):
        losses, found = resumes(path, whole, background=False)
        assert found == losses


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("whole", "nodes"), [(True, None), (True, [0, 0, 1, 1]), (False, None), (False, [0, 0, 1, 1])]
)
def test_ranks_resume(four: Any, path: Path, whole: bool, background: bool, nodes: Any) -> None:
    for losses, found in four.run(resumes, path, whole, background, nodes):
        assert found == losses
    assert not any(name.startswith(".") for name in os.listdir(path))
    no_pickle(path)


def no_pickle(folder: Path) -> None:
    for file in folder.iterdir():
        assert file.read_bytes()[:2] not in (b"PK", b"\x80\x02", b"\x80\x05")


def save(state: Any, path: Path, planner: Any = None, **options: Any) -> None:
    dcp.save(state, storage_writer=ingot.dcp.Writer(path, **options), planner=planner, no_dist=True)


def load(state: Any, path: Path, **options: Any) -> Any:
    dcp.load(state, storage_reader=ingot.dcp.Reader(path, **options), no_dist=True)
    return state


class Pair(NamedTuple):
    first: int
    second: tuple[int, ...]


VALUES: dict[str, Any] = {
    "none": None,
    "float": -0.0,
    "long": [*range(1000)],
    "bytes": bytes(range(256)) * 9,
    "ordered": OrderedDict(),
    "tuple": (1, torch.arange(3), {"a": {2}}),
    "array": numpy.arange(6, dtype="int16").reshape(2, 3),
    "dtype": torch.bfloat16,
    "$odd": "name",
    "step.losses": [0.5],
}


@pytest.mark.parametrize("whole", [True, False])
def test_objects_come_back_with_their_types(path: Path, whole: bool) -> None:
    save({"weight": torch.ones(3), **VALUES}, path, whole=whole)
    into = {"weight": torch.zeros(3), **dict.fromkeys(VALUES, 0)}
    into["ordered"] = OrderedDict()
    found = load(into, path)
    assert found["weight"].tolist() == [1, 1, 1]
    assert repr({name: found[name] for name in VALUES}) == repr(VALUES)
    assert found["array"].dtype == VALUES["array"].dtype


def test_objects_are_a_training_state_of_the_checkpoint(path: Path) -> None:
    save({"weight": torch.ones(3), "step": 7, "order": [*range(1000)]}, path)
    assert sorted(os.listdir(path)) == [
        "model-objects.safetensors",
        "model.safetensors",
        "model.safetensors.index.json",
    ]
    found = load_state(path)
    assert (found["step"], found["order"], found["weight"].tolist()) == (7, [*range(1000)], [1, 1, 1])
    # The next save of fewer objects removes the file.
    save({"weight": torch.ones(3)}, path, overwrite=True)
    assert os.listdir(path) == ["model.safetensors"]


def test_objects_alone_are_saved(path: Path) -> None:
    for whole in (True, False):
        save({"step": 7}, path / f"{whole}", whole=whole)
        assert load({"step": 0}, path / f"{whole}") == {"step": 7}


def test_many_objects_have_a_short_index(path: Path) -> None:
    names = [f"loader.{number:06}" for number in range(30_000)]
    save({"weight": torch.ones(3), **{name: name * 3 for name in names}}, path)
    assert (path / "model.safetensors.index.json").stat().st_size < 10_000
    assert load({names[7]: ""}, path) == {names[7]: names[7] * 3}


def test_classes_come_from_the_caller(path: Path) -> None:
    save({"pair": Pair(1, (2,))}, path)
    assert load({"pair": 0}, path)["pair"] == {"first": 1, "second": (2,)}
    assert load({"pair": 0}, path, types=[Pair])["pair"] == Pair(1, (2,))


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_bytes_of_a_file_are_not_unpickled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    text = pickle.dumps(Evil())
    save({"loader": text}, path)
    assert load({"loader": b""}, path) == {"loader": text}
    assert not Path("evil").exists()


def test_invalid_trees_are_rejected(path: Path) -> None:
    save({"step": 7}, path)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    for tree in ([], 3, {"step": {"$tensor": ["gone", "torch"]}}, {"$dict": 3}):
        index["metadata"]["ingot.state"] = json.dumps({"version": 1, "flat": True, "tree": tree})
        file.write_text(json.dumps(index))
        with pytest.raises((CheckpointException, ingot.CheckpointError)):
            load({"step": 0}, path)


class Blind(DefaultSavePlanner):
    """A planner that returns other objects."""

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index) if index.fqn == "weight" else "replaced"


def test_objects_come_from_the_planner(path: Path) -> None:
    save({"weight": torch.ones(2), "step": 3}, path, Blind())
    assert load({"step": 0}, path) == {"step": "replaced"}


class Bare(SavePlanner):
    """A planner with the methods of torch's base class only."""

    def __init__(self) -> None:
        inner = DefaultSavePlanner()
        for name in ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"):
            setattr(self, name, getattr(inner, name))
        self.resolve_data = inner.resolve_data  # type: ignore[method-assign]

    set_up_planner = create_local_plan = create_global_plan = finish_plan = None  # type: ignore[assignment]
    resolve_data = None  # type: ignore[assignment]


def test_planner_without_objects_is_named(path: Path) -> None:
    with pytest.raises(CheckpointException, match="Bare has no lookup_object"):
        save({"step": 3}, path, Bare())
    assert not path.exists() or not os.listdir(path)
