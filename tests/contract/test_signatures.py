"""Saves and edits leave out signatures and hashes of another file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy

TENSORS = {"a": numpy.ones(4, "f4"), "b": numpy.zeros(4, "f4")}
OF_FILE = ["c2pa:manifest", "c2pa:manifest.uri", "__signature__", "sigstore"]
OF_DATA = "vouch_credential"
SIGNED = {**dict.fromkeys([*OF_FILE, OF_DATA], "signed"), "title": "old"}


def signed(path: Path, name: str = "signed.safetensors") -> Path:
    """Return a file that a tool has signed."""
    ingot.numpy.save_file(TENSORS, path / name, {"title": "old"}, write_options={"reserve_header": 600})
    ingot.update_metadata(path / name, SIGNED)
    assert ingot.inspect(path / name).metadata == SIGNED
    return path / name


HASHES = {"sshs_model_hash": "of the data", "sshs_legacy_hash": "of the data too"}


def use_writer(source: Path, out: Path) -> None:
    with ingot.Writer(out, {"a": ("F32", (4,))}, ingot.inspect(source).metadata) as writer:
        writer.write("a", TENSORS["a"])
        writer.commit()


def append(source: Path, out: Path) -> None:
    with ingot.Writer(
        out, metadata=ingot.inspect(source).metadata, write_options={"reserve_header": 2000}
    ) as writer:
        writer.write("a", TENSORS["a"])
        writer.commit()


SAVES: dict[str, Callable[[Path, Path], Any]] = {
    "save_file": lambda source, out: ingot.numpy.save_file(TENSORS, out, ingot.inspect(source).metadata),
    "rewrite": lambda source, out: ingot.rewrite(source, out),
    "rewrite_drop": lambda source, out: ingot.rewrite(source, out, drop="a"),
    "rename": lambda source, out: ingot.rewrite(source, out, rename={"a": "c"}),
    "metadata": lambda source, out: ingot.rewrite(source, out, metadata=ingot.inspect(source).metadata),
    "merge": lambda source, out: ingot.merge([source], out),
    "repair": lambda source, out: ingot.repair(source, out),
    "convert": lambda source, out: ingot.convert(source, out, dtype="F16"),
    "Writer": use_writer,
    "Writer_without_specs": append,
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_save_leaves_out_signatures_of_another_file(save: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    save(signed(tmp_path), out)
    assert (ingot.inspect(out).metadata or {}) == {"title": "old"}


@pytest.mark.parametrize("name", ["rewrite", "rewrite_drop", "rename", "merge", "repair", "convert"])
def test_writers_leave_out_hashes_of_another_file(name: str, tmp_path: Path) -> None:
    source, out = tmp_path / "trained.safetensors", tmp_path / "out.safetensors"
    ingot.numpy.save_file(TENSORS, source, {"title": "old", **HASHES})
    SAVES[name](source, out)
    assert (ingot.inspect(out).metadata or {}) == {"title": "old"}


@pytest.mark.parametrize("name", ["save_file", "metadata", "Writer", "Writer_without_specs"])
def test_save_keeps_the_hashes_of_a_training_script(name: str, tmp_path: Path) -> None:
    source, out = tmp_path / "trained.safetensors", tmp_path / "out.safetensors"
    ingot.numpy.save_file(TENSORS, source, {"title": "old", **HASHES})
    SAVES[name](source, out)
    assert (ingot.inspect(out).metadata or {}) == {"title": "old", **HASHES}


def test_merge_does_not_compare_hashes(tmp_path: Path) -> None:
    for name, tensor in TENSORS.items():
        hashes = dict.fromkeys(HASHES, name)
        ingot.numpy.save_file({name: tensor}, tmp_path / f"{name}.safetensors", hashes)
    ingot.merge([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], tmp_path / "out.safetensors")
    assert not ingot.inspect(tmp_path / "out.safetensors").metadata


def test_merge_does_not_compare_signatures(tmp_path: Path) -> None:
    first, second = signed(tmp_path), tmp_path / "second.safetensors"
    ingot.numpy.save_file({"c": TENSORS["a"]}, second)
    ingot.update_metadata(second, dict.fromkeys(OF_FILE, "others"))
    ingot.merge([first, second], tmp_path / "out.safetensors")
    assert ingot.inspect(tmp_path / "out.safetensors").metadata == {"title": "old"}


def test_split_leaves_signatures_out(tmp_path: Path) -> None:
    ingot.split(signed(tmp_path), tmp_path / "out", 16)
    for path in (tmp_path / "out").iterdir():
        assert b"signed" not in path.read_bytes()


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("change", [{"title": "new"}, {"title": None}, {"x": "y"}])
def test_update_metadata_removes_signatures_of_the_whole_file(
    change: dict[str, Any], atomic: bool, tmp_path: Path
) -> None:
    path = signed(tmp_path)
    assert ingot.update_metadata(path, change, atomic=atomic) != "unchanged"
    found = ingot.inspect(path).metadata
    assert found is not None
    assert found.pop(OF_DATA) == "signed"
    assert not found.keys() & set(OF_FILE)


def test_update_metadata_keeps_the_signatures_that_it_sets(tmp_path: Path) -> None:
    path = signed(tmp_path)
    ingot.update_metadata(path, {"title": "new", "c2pa:manifest": "signed again"})
    assert ingot.inspect(path).metadata == {
        "title": "new",
        "c2pa:manifest": "signed again",
        OF_DATA: "signed",
    }


def test_update_metadata_without_a_change_keeps_signatures(tmp_path: Path) -> None:
    path = signed(tmp_path)
    assert ingot.update_metadata(path, {"title": "old"}) == "unchanged"
    assert ingot.inspect(path).metadata == SIGNED


def test_replace_tensor_removes_signatures(tmp_path: Path) -> None:
    path = signed(tmp_path)
    ingot.replace_tensor(path, "a", numpy.zeros(4, "f4"))
    assert ingot.inspect(path).metadata == {"title": "old"}


def test_replace_tensor_removes_hashes_and_an_edit_of_other_metadata_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "trained.safetensors"
    ingot.numpy.save_file(TENSORS, path, HASHES, write_options={"reserve_header": 600})
    ingot.update_metadata(path, {"title": "new"})
    assert ingot.inspect(path).metadata == {"title": "new", **HASHES}
    ingot.replace_tensor(path, "a", numpy.zeros(4, "f4"))
    assert ingot.inspect(path).metadata == {"title": "new"}
