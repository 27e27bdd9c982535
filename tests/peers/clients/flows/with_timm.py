"""timm: checkpoints of a small model, by its loader, by `create_model`, and as it saves them for the hub."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import timm
import torch
from flow import Note, main
from timm.models import load_checkpoint, load_state_dict, save_for_hf

NAME = "test_resnet"
IMAGE = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)


def save(folder: Path, note: Note) -> None:
    model = timm.create_model(NAME, num_classes=10).eval()
    note("result", model(IMAGE))
    safetensors.torch.save_file(model.state_dict(), folder / "plain.safetensors")
    save_for_hf(model, folder / "hub", safe_serialization=True)


def load(folder: Path, note: Note) -> None:
    note("state", load_state_dict(folder / "plain.safetensors"))
    model = timm.create_model(NAME, num_classes=10)
    note("outcome", [list(keys) for keys in load_checkpoint(model, folder / "plain.safetensors")])
    note("loaded", model.eval())
    note("loaded: result", model(IMAGE))
    created = timm.create_model(NAME, num_classes=10, checkpoint_path=str(folder / "plain.safetensors"))
    note("created", created)
    note("from a folder", timm.create_model(f"local-dir:{folder / 'hub'}", pretrained=True))
    # The classifier has another size: it keeps its initial values, and the rest is loaded.
    torch.manual_seed(0)
    overlay = {"file": str(folder / "hub" / "model.safetensors"), "num_classes": 10}
    note("tuned", timm.create_model(NAME, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3))


if __name__ == "__main__":
    main("timm", save, load)
