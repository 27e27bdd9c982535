"""Checks that two results are equal. A difference stops the bench."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch


def names(ours: list[str], theirs: list[str]) -> None:
    assert sorted(ours) == sorted(theirs), "the names differ"
    assert len(set(ours)) == len(ours), "a name occurs twice"


def tensors(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys(), "the names differ"
    for name, tensor in theirs.items():
        tensor_(ours[name], tensor, name)


def tensor_(ours: torch.Tensor, theirs: torch.Tensor, name: str = "") -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), f"{name}: dtype or shape differs"
    # As bytes: NaNs are then equal, and -0.0 is not 0.0.
    assert torch.equal(_raw(ours), _raw(theirs)), f"{name}: bytes differ"


def arrays(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys(), "the names differ"
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (array.dtype, array.shape), f"{name}: dtype or shape"
        assert np.array_equal(_raw_array(ours[name]), _raw_array(array)), f"{name}: bytes differ"


def files(ours: Path, theirs: Path) -> None:
    assert ours.read_bytes() == theirs.read_bytes(), f"{ours} and {theirs} differ"


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """For results of two processes: equal if the names and the bytes are."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(_raw(tensors[name]).numpy())
    return found.hexdigest()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _raw_array(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
