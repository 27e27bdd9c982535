"""Checkpoints that are split, merged and cut anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
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


COPIES: dict[str, Callable[..., Any]] = {
    "merge": lambda source, out, **options: ingot.merge([source], out, **options),
    "rewrite": ingot.rewrite,
    "repair": ingot.repair,
    "convert": ingot.convert,
    "split": lambda source, out, **options: ingot.split(source, out.parent / "split", 40, **options),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_compute_the_digests_that_the_caller_wants(name: str, tmp_path: Path) -> None:
    source, out, saved = (tmp_path / f"{stem}.safetensors" for stem in ("source", "out", "saved"))
    arrays = {"a": numpy.arange(10, dtype="f4"), "b": numpy.arange(6, dtype="f4")}
    ingot.numpy.save_file(arrays, source, {"format": "pt"}, checksums="blake3", durable=False)
    ingot.numpy.save_file(arrays, saved, {"format": "pt"}, checksums="xxh3", durable=False)
    COPIES[name](source, out, checksums="xxh3", durable=False)
    made = tmp_path / "split" if name == "split" else out
    report = ingot.verify(made)
    assert report
    assert report.checked == 2
    if name != "split":
        assert out.read_bytes() == saved.read_bytes()
    COPIES[name](source, out, checksums=False, overwrite=True, durable=False)
    with pytest.raises(ingot.IntegrityError, match="without a digest"):
        ingot.verify(made)
