"""Slices that are pickled for other processes, as a `DataLoader` does for its workers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ingot
import ingot.compat.safetensors
import ingot.numpy
from support.processes import python

ARRAY = numpy.arange(60, dtype="f4").reshape(12, 5)

KINDS: dict[str, Callable[..., Any]] = {
    "ingot": ingot.safe_open,
    "compat": ingot.compat.safetensors.safe_open,
}


class Opened(ingot.safe_open):
    """A subclass, such as a program may define."""


KINDS["derived"] = Opened


@pytest.fixture
def path(path: Path) -> Path:
    ingot.numpy.save_file({"a": ARRAY, "b": ARRAY * 2}, path)
    return path


def again(part: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> Any:
    return pickle.loads(pickle.dumps(part, protocol))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_slice_is_pickled_like_its_handle(path: Path, kind: str, framework: str, backend: str) -> None:
    with KINDS[kind](path, framework, backend=backend) as file:
        part, handle = file.get_slice("b"), again(file)
    # The slice can be used and pickled after the handle is gone.
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        sent = again(part, protocol)
        assert type(sent) is type(part) is type(handle.get_slice("b"))
        assert (sent.get_shape(), sent.get_dtype()) == ([12, 5], "F32")
        assert type(sent[2:4]) is type(part[2:4])
        assert numpy.array_equal(numpy.asarray(sent[2:9:3, 1]), ARRAY[2:9:3, 1] * 2)
        assert sent._checkpoint.backend == backend
    for copied in (copy.copy(part), copy.deepcopy(part), again(again(part))):
        assert numpy.array_equal(numpy.asarray(copied[0]), ARRAY[0] * 2)


def test_slice_is_pickled_with_the_options_of_its_handle(path: Path) -> None:
    file = ingot.safe_open(path, "pt", "meta", backend="pread", confine=True)
    assert again(file.get_slice("a"))[1:].device == torch.device("meta")
    confined = pickle.dumps(file.get_slice("a"))
    (path.parent / "second").hardlink_to(path)
    with pytest.raises(ingot.CheckpointError, match="second name"):
        pickle.loads(confined)


def test_slice_unpickled_without_its_file_or_tensor_is_an_error(path: Path) -> None:
    sent = pickle.dumps(ingot.safe_open(path, "np").get_slice("b"))
    ingot.numpy.save_file({"a": ARRAY}, path)
    with pytest.raises(ingot.TensorNotFoundError, match="`b`"):
        pickle.loads(sent)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        pickle.loads(sent)


def test_slice_of_an_open_file_cannot_be_pickled(path: Path) -> None:
    with path.open("rb") as opened:
        file = ingot.compat.safetensors._safe_open_handle(opened, "np")
        for held in (file, file.get_slice("a")):
            with pytest.raises(TypeError, match="pickle"):
                pickle.dumps(held)


PROGRAM = """
import json, sys
import torch
from torch.utils.data import DataLoader, Dataset
import ingot, ingot.compat.safetensors

class Rows(Dataset):
    def __init__(self, parts):
        self.parts = parts

    def __len__(self):
        return self.parts["ingot"].get_shape()[0]

    def __getitem__(self, row):
        return {kind: part[row] for kind, part in self.parts.items()}

if __name__ == "__main__":
    parts = {}
    for kind, opens in {"ingot": ingot.safe_open, "compat": ingot.compat.safetensors.safe_open}.items():
        with opens("model.safetensors", "pt") as file:
            parts[kind] = file.get_slice("b")
    batches = list(DataLoader(Rows(parts), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1]))
    read = {kind: torch.cat([batch[kind] for batch in batches]).flatten().int().tolist() for kind in parts}
    print(json.dumps(read))
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver", "fork"])
def test_slice_is_read_by_data_loader_workers(path: Path, context: str) -> None:
    (path.parent / "program.py").write_text(PROGRAM)
    ended = python("program.py", context, folder=path.parent)
    rows = (ARRAY * 2).astype(int).ravel().tolist()
    assert ended.said() == {"ingot": rows, "compat": rows}
