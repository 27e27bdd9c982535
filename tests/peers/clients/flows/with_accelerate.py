"""accelerate: sharded saves, dispatching a checkpoint, offloading to disk, the state of a training run."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate import Accelerator, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import load_checkpoint_in_model, load_state_dict
from flow import Note, main
from torch import nn

INPUT = torch.linspace(-1, 1, 16).reshape(1, 16)


class Layers(nn.Module):
    """A module with three layers, of which the last is the first one again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.third.weight = self.first.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(values)).relu())


def empty() -> Layers:
    """Return `Layers` on the meta device, without memory."""
    with init_empty_weights():
        layers = Layers()
    layers.third.weight = layers.first.weight
    return layers


def save(folder: Path, note: Note) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(Layers(), folder / "whole")
    accelerator.save_model(Layers(), folder / "sharded", max_shard_size=1200)
    note("shards", sorted(path.name for path in (folder / "sharded").glob("*.safetensors")))
    accelerator.save(Layers().second.state_dict(), folder / "second.safetensors", safe_serialization=True)
    model = accelerator.prepare(Layers())
    accelerator.save_state(folder / "state", safe_serialization=True)
    note("result", model(INPUT))
    # Holds the states of random generators. The state of Python's differs between processes.
    (folder / "state" / "random_states_0.pkl").unlink()


def load(folder: Path, note: Note) -> None:
    for name in ("whole", "sharded"):
        model = load_checkpoint_and_dispatch(empty(), folder / name, device_map={"": "cpu"})
        note(name, model)
        note(f"{name}: tied", model.first.weight is model.third.weight)
        note(f"{name}: result", model(INPUT))

        model = Layers()
        load_checkpoint_in_model(model, folder / name, dtype=torch.bfloat16)
        note(f"{name}, converted", model)

    places = {"first": "cpu", "second": "disk", "third": "cpu"}
    with TemporaryDirectory() as offloaded:
        model = load_checkpoint_and_dispatch(
            empty(), folder / "sharded", device_map=places, offload_folder=offloaded
        )
        note("dispatched to disk", model)
        note("dispatched to disk: result", model(INPUT))
    with TemporaryDirectory() as offloaded:
        note("offloaded: result", disk_offload(Layers(), offloaded)(INPUT))

    note("second", load_state_dict(str(folder / "second.safetensors")))
    note("second, by device", load_state_dict(str(folder / "second.safetensors"), device_map={"": "cpu"}))

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = accelerator.prepare(Layers())
    accelerator.load_state(folder / "state")
    note("state", model)


if __name__ == "__main__":
    main("accelerate", save, load)
