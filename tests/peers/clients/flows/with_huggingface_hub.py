"""huggingface_hub: models and state dicts, whole and sharded, the mixin, and DDUF archives."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from flow import Note, main
from huggingface_hub import (
    PyTorchModelHubMixin,
    export_entries_as_dduf,
    load_state_dict_from_file,
    load_torch_model,
    read_dduf_file,
    save_torch_model,
    save_torch_state_dict,
)
from torch import nn


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight


class OnTheHub(Tied, PyTorchModelHubMixin):
    """The same, with the methods of the mixin."""


def save(folder: Path, note: Note) -> None:
    for name in ("whole", "sharded", "state"):
        (folder / name).mkdir()
    save_torch_model(Tied(), folder / "whole", metadata={"made by": "a test"})
    save_torch_model(Tied(), folder / "sharded", max_shard_size=600)
    note("shards", sorted(path.name for path in (folder / "sharded").glob("*.safetensors")))
    state = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.arange(5),
        "c": torch.ones(3, dtype=torch.bfloat16),
    }
    # Two names for one memory.
    save_torch_state_dict({**state, "d": state["a"]}, folder / "state", max_shard_size=40)
    OnTheHub().save_pretrained(folder / "mixin")
    entries = [
        ("model_index.json", b'{"unet": ["diffusers", "UNet"]}'),
        ("unet/model.safetensors", safetensors.torch.save(state)),
        ("unet/config.json", b"{}"),
    ]
    export_entries_as_dduf(folder / "archive.dduf", entries)


def load(folder: Path, note: Note) -> None:
    for name in ("whole", "sharded"):
        model = Tied()
        outcome = load_torch_model(model, folder / name, strict=False)
        note(f"{name}: outcome", [sorted(keys) for keys in outcome])
        note(name, model)
    for file in sorted((folder / "state").glob("*.safetensors")):
        note(file.name, load_state_dict_from_file(file))
        note(f"{file.name}, safe", load_state_dict_from_file(file, safe=True, map_location="cpu"))
    model = OnTheHub.from_pretrained(folder / "mixin")
    note("mixin", model)
    note("mixin: tied", model.first.weight is model.second.weight)
    with read_dduf_file(folder / "archive.dduf")["unet/model.safetensors"].as_mmap() as mapped:
        note("archive", safetensors.torch.load(mapped))


if __name__ == "__main__":
    main("huggingface_hub", save, load)
