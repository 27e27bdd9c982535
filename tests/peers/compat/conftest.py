"""Fixtures of the tests of `ingot.compat`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from modules import REAL

import ingot
import ingot.compat
import ingot.torch
from support.compat import installed


@pytest.fixture
def compat() -> Iterator[SimpleNamespace]:
    """The modules as a program sees them after `install`."""
    with installed():
        top = importlib.import_module("safetensors")
        assert top is not REAL.top
        yield SimpleNamespace(
            top=top,
            rust=importlib.import_module("safetensors._safetensors_rust"),
            torch=importlib.import_module("safetensors.torch"),
            numpy=importlib.import_module("safetensors.numpy"),
        )


@pytest.fixture
def path(path: Path) -> Path:
    tensors = {"b": torch.arange(12.0).reshape(3, 4), "a": torch.arange(3), "s": torch.tensor(1.0)}
    ingot.torch.save_file(tensors, path, {"format": "pt"})
    return path
