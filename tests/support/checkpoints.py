"""Checkpoints of several files, as the tests of reading and of saving make them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ingot
import ingot.numpy

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


LEFT = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "c": np.array(7, np.int64)}


RIGHT = {"b": np.arange(4, dtype=np.int8), "d": np.zeros((0, 2), np.float32)}


def write(directory: Path, shards: Mapping[str, Mapping[str, Any]], **changes: Any) -> Path:
    """Write a checkpoint with these shards. `changes` replace fields of the index."""
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    for file, tensors in shards.items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        ingot.numpy.save_file(tensors, directory / file, {"format": "np"})
        index["weight_map"] |= dict.fromkeys(tensors, file)
    index |= changes
    (directory / INDEX).write_text(json.dumps(index))
    return directory


def opened(path: Any, **options: Any) -> ingot.safe_open:
    return ingot.safe_open(path, "np", **options)


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name]), array, err_msg=name)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path, {A: LEFT, B: RIGHT})


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    return {
        "large": torch.randn(900_000),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
        "bytes": torch.arange(250, dtype=torch.uint8),
        'nämé " \\ \n': torch.randn(7, 3).to(torch.bfloat16),
    }
