"""Checkpoints that are split, merged and cut anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ingot
import ingot.numpy
from ingot import CheckpointError
from support.checkpoints import INDEX, LEFT, RIGHT, A, B, assert_equal, opened

torch = pytest.importorskip("torch")
import ingot.torch  # noqa: E402


def test_split_and_merge_are_each_others_undoing(tmp_path: Path) -> None:
    one, many, again = tmp_path / "one.safetensors", tmp_path / "many", tmp_path / "again.safetensors"
    ingot.numpy.save_file(LEFT | RIGHT, one, {"format": "pt", "k": "ö"})
    ingot.split(one, many, 20, overwrite=True)
    assert len(opened(many).shards) == 2
    assert ingot.inspect(many).metadata == {"total_size": 36, "k": "ö"}
    for source in (many, many / INDEX):
        ingot.merge([source], again, overwrite=True)
        assert again.read_bytes() == one.read_bytes()
        ingot.rewrite(source, again, overwrite=True)
        assert again.read_bytes() == one.read_bytes()


def test_a_checkpoint_is_cut_anew(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("out")
    ingot.split(checkpoint, out, 8)
    with opened(out) as file:
        assert len(file.shards) == 3
        assert file.metadata() == {"total_size": 36}
        assert set(map(str, file.shard_metadata().values())) == {"{'format': 'np'}"}
    assert_equal(ingot.numpy.load_file(out, keys=list("abcd")), dict(sorted((LEFT | RIGHT).items())))


def test_checkpoints_and_files_merge_and_a_name_in_both_names_the_shard(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    other, out = outside / "other.safetensors", outside / "out.safetensors"
    ingot.numpy.save_file({"e": LEFT["a"]}, other)
    ingot.merge([checkpoint, other], out)
    assert opened(out).keys() == list("abcde")
    assert opened(out).metadata() == {"format": "np"}
    ingot.numpy.save_file({"b": LEFT["a"]}, other)
    with pytest.raises(ingot.SaveError, match=f"{B}.*other|other.*{B}"):
        ingot.merge([checkpoint, other], out)
    (checkpoint / B).unlink()
    with pytest.raises(FileNotFoundError, match=B):
        ingot.merge([checkpoint], out)


def test_an_index_is_read_before_its_shards_are_there(tmp_path: Path) -> None:
    path = tmp_path / INDEX
    weight_map = {"b": B, "a": A}
    path.write_text(json.dumps({"metadata": {"total_size": 3}, "weight_map": weight_map}))
    for source in (path, tmp_path):
        index = ingot.inspect(source, shards=False)
        assert list(index.weight_map.items()) == list(weight_map.items())
        assert (index.metadata, index.sharded, index.files_metadata) == ({"total_size": 3}, True, {})
    path.write_text('{"weight_map":{"a":"../a"}}')
    with pytest.raises(CheckpointError, match=r"tensor `a`.*refused"):
        ingot.inspect(path, shards=False)
    with pytest.raises(FileNotFoundError):
        ingot.inspect(tmp_path / "absent.json", shards=False)
