"""A sharded checkpoint as bytes, and servers of such files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

import numpy as np

import ingot.numpy

from .servers import Answer, Handler, Request

INDEX = "model.safetensors.index.json"
#: One is in a folder, and has a name that URLs must encode.
NAMES = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "more/b ü%2F+?#.safetensors"]


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Return two tensors for each shard. The first is larger than the bytes that come with a header."""
    random = np.random.default_rng(seed)
    return {
        f"layers.{number}.{name}": random.integers(0, 255, shape, np.uint8)
        for number in range(len(NAMES))
        for name, shape in [("weight", (512, 1024)), ("bias", (7,))]
    }


def checkpoint(seed: int = 0, names: list[str] = NAMES) -> dict[str, bytes]:
    """The index and the shards, by their names."""
    files, weight_map, all_ = {}, {}, tensors(seed)
    for number, name in enumerate(names):
        members = {key: array for key, array in all_.items() if key.startswith(f"layers.{number}.")}
        files[name] = ingot.numpy.save(members)
        weight_map |= dict.fromkeys(members, name)
    total = sum(array.nbytes for array in all_.values())
    index = {"metadata": {"total_size": total, "seed": seed}, "weight_map": weight_map}
    return {INDEX: json.dumps(index).encode(), **files}


def folder(files: Mapping[str, bytes], at: str = "/model/") -> Answer:
    """A server that has these files below `at`, and knows no queries."""

    def answer(handler: Handler, request: Request) -> None:
        name = unquote(request.path.partition("?")[0]).removeprefix(at)
        if name in files:
            handler.part(files[name], request, ETag=f'"{name.encode().hex()}"')
        else:
            handler.head(404, Content_Length=0)

    return answer


def files_in(place: Path) -> dict[str, bytes]:
    """Return all files below a directory, including hidden ones."""
    return {
        os.path.relpath(os.path.join(root, name), place): Path(root, name).read_bytes()
        for root, _, names in os.walk(place)
        for name in names
    }


def same(found: Mapping[str, np.ndarray], seed: int = 0) -> bool:
    expected = tensors(seed)
    return found.keys() == expected.keys() and all(
        np.array_equal(found[name], expected[name]) for name in expected
    )
