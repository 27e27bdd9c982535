"""Load a model by SGLang alone, or by ingot if its plugins say so, and report the result.

    with_sglang.py JSON

JSON has `folder`, `options` (of the loader), `layers`, `width`, and `report`, where the answer is written.
The loader, the iterators, the plugins and the placeholder layer for other ranks are SGLang's. The
model is a small one whose `load_weights` takes its weights as SGLang's models do.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors
import sglang
import torch
from sglang.srt.plugins import load_plugins

# Before any other module of SGLang is imported, as its server does.
load_plugins()

from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.layers.utils import PPMissingLayer  # noqa: E402
from sglang.srt.model_loader import loader as loaders  # noqa: E402
from sglang.srt.model_loader.weight_utils import default_weight_loader  # noqa: E402
from sglang.srt.runtime_context import publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from ingot.engines import _weights  # noqa: E402


class Model(torch.nn.Module):
    """A model with the second half of the layers, as on the last rank of a pipeline."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        own = [torch.nn.Linear(width, width) for _ in range(layers // 2)]
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([*[PPMissingLayer() for _ in own], *own])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if name in own:
                default_weight_loader(own[name], tensor)


def nbytes_read() -> int:
    """Return the bytes that this process has read by calls. Mapped pages do not count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def noted(module: Any, name: str, opened: set[str]) -> None:
    """Record in `opened` that `module` has opened a file."""
    real = module.safe_open

    def safe_open(*args: Any, **kwargs: Any) -> Any:
        opened.add(name)
        return real(*args, **kwargs)

    module.safe_open = safe_open


def main(asked: dict[str, Any]) -> None:
    publish(ServerArgs(model_path=asked["folder"], device="cpu"), role="scheduler")
    model = Model(asked["layers"], asked["width"])
    config: Any = SimpleNamespace(model_path=asked["folder"], revision=None, hf_config=SimpleNamespace())
    loader = loaders.DefaultModelLoader(LoadConfig(model_loader_extra_config=asked["options"]))
    opened: set[str] = set()
    noted(safetensors, "safetensors", opened)
    noted(_weights, "ingot", opened)
    # The first load imports modules.
    for _ in range(2):
        for parameter in model.parameters():
            # Clear the values, so that old ones cannot pass.
            torch.nn.init.constant_(parameter, 7.0)
        before = nbytes_read()
        loader.load_weights_and_postprocess(
            model, loader._get_all_weights(config, model), torch.device("cpu")
        )
    report = {
        "version": sglang.__version__,
        "nbytes_read": nbytes_read() - before,
        "by": sorted(opened),
        "digests": {
            name: hashlib.sha256(tensor.detach().view(torch.uint8).numpy()).hexdigest()
            for name, tensor in model.named_parameters()
        },
    }
    Path(asked["report"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
