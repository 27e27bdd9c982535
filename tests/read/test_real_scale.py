"""Checkpoints of real size on any disk: their headers are real, and their weights are sparse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ingot
from support.sparse_models import INDEX, bloom, experts, gpt2, write_checkpoint, write_file

RANKS = 8


@pytest.fixture(autouse=True)
def _holes(tmp_path: Path) -> None:
    path = tmp_path / "hole"
    with path.open("wb") as file:
        try:
            file.truncate(1 << 36)
        except OSError:
            pytest.skip("the file system has no files of this size")
    if path.stat().st_blocks > 8:
        pytest.skip("the file system has no sparse files")
    path.unlink()


def eighths(file: ingot.safe_open) -> tuple[int, int]:
    """Return the number and the bytes of one rank's parts of all matrices, without reading the values."""
    count = nbytes = 0
    for name in file.keys():  # noqa: SIM118
        info = file.info(name)
        if len(info.shape) == 2 and info.shape[0] % RANKS == 0:
            rows = info.shape[0] // RANKS
            part = file.get_slice(name)[3 * rows : 4 * rows]
            assert part.shape == (rows, info.shape[1])
            count, nbytes = count + 1, nbytes + part.nbytes
    return count, nbytes


def test_gpt2_with_masks_is_read(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", gpt2())
    with ingot.safe_open(tmp_path, "np") as file:
        assert file.parameter_count() == {"F32": 137_022_720}
        assert len(file) == 160
        part = file.get_slice("h.11.attn.bias")[0, 0, 1000:, :5]
        assert part.shape == (24, 5)
        assert not part.any()


def test_bloom_in_72_shards_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, bloom())
    with ingot.safe_open(tmp_path, "torch", backend="mmap") as file:
        assert file.parameter_count() == {"BF16": 176_247_271_424}
        assert file.metadata() == {"total_size": 352_494_542_848}
        assert len(file.shards) == 72
        assert len(file) == len(file.keys()) == 845
        # These are views of 44 GB, whose values are not read.
        count, nbytes = eighths(file)
        assert (count, nbytes) == (281, 44_058_542_080)
        whole = file.get_tensors()
        assert sum(tensor.nbytes for tensor in whole.values()) == 352_494_542_848


@pytest.mark.parametrize("by_name", [True, False])
def test_mixture_of_experts_with_91_000_tensors_is_read(by_name: bool, tmp_path: Path) -> None:
    shards = experts()
    write_checkpoint(tmp_path, shards, by_name=by_name)
    names = sorted(name for tensors in shards.values() for name in tensors)
    with ingot.safe_open(tmp_path, "np", backend="mmap") as file:
        assert file.keys() == names
        assert len(names) == 91_000
        counts = file.parameter_count()
        assert list(counts) == ["F8_E4M3", "BF16", "F32"]
        assert counts["F8_E4M3"] == sum(
            shape[0] * shape[1]
            for tensors in shards.values()
            for dtype, shape in tensors.values()
            if dtype == "F8_E4M3"
        )
        for name in names[::9_000]:
            dtype, shape = next(tensors[name] for tensors in shards.values() if name in tensors)
            assert (file.info(name).dtype, file.info(name).shape) == (dtype, shape)


def test_check_finds_one_tensor_of_91_000_in_the_wrong_shard(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, experts())
    index: dict[str, Any] = json.loads(path.read_text())
    name = "model.layers.30.mlp.experts.77.up_proj.weight"
    wrong = "model-00001-of-000163.safetensors"
    assert index["weight_map"][name] != wrong
    right, index["weight_map"][name] = index["weight_map"][name], wrong
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ingot.CheckpointError) as caught:
        ingot.safe_open(tmp_path, "np").parameter_count()
    assert caught.value.tensor == name
    assert wrong in str(caught.value)
    assert right in str(caught.value)
