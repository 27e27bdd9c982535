"""Opening checkpoints of many files, whose weights are holes (tests/sparse_models.py)."""

import json
import sys
from pathlib import Path

import safetensors

import ingot
import same
from duel import Duel, Samples
from ingot._native import ShardIndex
from workplace import Workplace

sys.path.append(str(Path(__file__).parents[2] / "tests"))
import sparse_models


def names_of_experts(full: int, shards: int, *, by_name: bool):
    """Open all shards and list the names of all tensors."""

    def measure(place: Workplace, rounds: int) -> Samples:
        count = place.count(full)
        directory = place.directory / f"experts-{count}-{'by-name' if by_name else 'by-shard'}"
        if not directory.exists():
            directory.mkdir()
            sparse_models.write_checkpoint(directory, sparse_models.experts(count, shards), by_name=by_name)
        return Duel(lambda: _names(directory), lambda: _names_by_shard(directory), same.names).run(rounds)

    return measure


def _names(directory: Path) -> list[str]:
    with ingot.safe_open(directory, "pt") as file:
        return file.keys()


def _names_by_shard(directory: Path) -> list[str]:
    names = []
    for path in directory.glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            names += file.keys()
    return names


def index(full: int, *, by_name: bool):
    """Read an index alone."""

    def measure(place: Workplace, rounds: int) -> Samples:
        count = place.count(full)
        path = place.directory / f"{count}-{'by-name' if by_name else 'by-shard'}.safetensors.index.json"
        if not path.exists():
            weight_map = {
                name: file for file, tensors in sparse_models.experts(count).items() for name in tensors
            }
            if by_name:
                weight_map = dict(sorted(weight_map.items()))
            path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
        return Duel(lambda: ShardIndex.read(path), lambda: _loaded(path), _assert_same_index).run(rounds)

    return measure


def _loaded(path: Path) -> dict[str, str]:
    with path.open(encoding="utf-8") as file:
        return json.load(file)["weight_map"]


def _assert_same_index(ours: ShardIndex, theirs: dict[str, str]) -> None:
    assert len(ours) == len(theirs)
    assert all(ours.shard_of(name) == file for name, file in theirs.items())
