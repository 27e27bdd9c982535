"""Changing files, merging and splitting them. The wheel of safetensors reads every result."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bintensors.torch
import numpy
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import ingot
import ingot.numpy
import ingot.torch
from ingot import CheckpointError
from support.checkpoints import INDEX, LEFT, RIGHT, A, B, assert_equal, opened
from support.errors import raises
from support.processes import run
from support.progress import Progress, Stopped, stop

BOTH = pytest.mark.parametrize("suffix", [".safetensors", ".bt"])


def tensors() -> dict[str, torch.Tensor]:
    return {
        "encoder.0.weight": torch.arange(600.0).reshape(20, 30),
        "encoder.0.bias": torch.arange(30, dtype=torch.float64),
        "head.weight": torch.arange(300, dtype=torch.bfloat16).reshape(3, 100),
        "head.mask": torch.tensor([True, False, True]),
        "step": torch.tensor(7),
        "nothing": torch.zeros(0, 4),
    }


def save(path: Path, metadata: dict[str, str] | None = None, **options: Any) -> Path:
    ingot.torch.save_file(tensors(), path, metadata, **options)
    return path


def upstream(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    if path.suffix == ".bt":
        with bintensors.safe_open(str(path), "pt") as file:
            return bintensors.torch.load_file(str(path)), file.metadata()
    with safetensors.safe_open(path, "pt") as file:
        return safetensors.torch.load_file(path), file.metadata()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


# --- reserved space and alignment


@pytest.mark.parametrize("reserve", [0, 1, 100, 5000, 200_000])
@pytest.mark.parametrize("align", [8, 64, 4096])
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "a": 'x"\n'}])
def test_save_file_reserves_and_aligns_the_header(
    tmp_path: Path, reserve: int, align: Any, metadata: dict[str, str] | None
) -> None:
    path = save(
        tmp_path / "t.safetensors", metadata, write_options={"reserve_header": reserve, "align": align}
    )
    found, pairs = upstream(path)
    assert_same(found, tensors())
    assert (pairs or {}) == (metadata or {})
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert (8 + length) % align == 0
    # huggingface_hub and readers in JavaScript parse the header like this.
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__", None) == metadata
    assert header.keys() == tensors().keys()
    usual = save(tmp_path / "usual.safetensors", metadata).stat().st_size
    assert reserve <= len(raw) - usual < reserve + align
    with ingot.safe_open(path, "pt", strict=True) as file:
        assert file.metadata() == metadata


def test_save_file_with_default_layout_equals_upstream(tmp_path: Path) -> None:
    path = save(tmp_path / "t.safetensors", {"k": "v"}, write_options={"reserve_header": 0, "align": 8})
    assert path.read_bytes() == safetensors.torch.save(tensors(), {"k": "v"})


@pytest.mark.parametrize("options", [{"reserve_header": 1}, {"align": 64}])
def test_save_file_rejects_reserve_and_align_for_bintensors(tmp_path: Path, options: dict[str, Any]) -> None:
    with raises(ingot.SaveError, "bintensors", code="no-room"):
        save(tmp_path / "t.bt", write_options=options)
    assert names_in(tmp_path) == []


# --- metadata


@BOTH
def test_load_file_returns_metadata(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path / f"t{suffix}", {"k": "v"})
    found, metadata = ingot.torch.load_file(path, return_metadata=True)
    assert_same(found, tensors())
    assert metadata == ingot.inspect(path).metadata == {"k": "v"}
    arrays = {"a": numpy.zeros(3)}
    ingot.numpy.save_file(arrays, path)
    assert ingot.numpy.load_file(path, return_metadata=True)[1] is None
    assert ingot.inspect(path).metadata is None


@BOTH
def test_update_metadata_changes_only_the_metadata(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path / f"t{suffix}", {"a": "1", "b": "2", "c": "3"})
    done = ingot.update_metadata(path, {"b": "two", "d": "\u00fc" * 3000, "c": None, "absent": None})
    assert done == "rewritten"
    found, metadata = upstream(path)
    assert_same(found, tensors())
    assert metadata == {"a": "1", "b": "two", "d": "\u00fc" * 3000}
    assert ingot.update_metadata(path, {"a": "1", "absent": None}) == "unchanged"
    assert names_in(tmp_path) == [path.name]


def test_update_metadata_edits_in_place_with_room(tmp_path: Path) -> None:
    path = save(tmp_path / "t.safetensors", write_options={"reserve_header": 1000})
    inode = path.stat().st_ino
    expected = {}
    for step in range(12):
        expected[f"key {step}"] = "x" * step
        assert ingot.update_metadata(path, expected) == "in-place"
        found, metadata = upstream(path)
        assert_same(found, tensors())
        assert metadata == expected
    assert path.stat().st_ino == inode
    assert ingot.update_metadata(path, dict.fromkeys(expected)) == "in-place"
    assert upstream(path)[1] in ({}, None)
    assert ingot.inspect(path).metadata == {}


@pytest.mark.parametrize(
    "options", [{"rename": str}, {"rename": {}}, {"drop": lambda name: False}, {"rename": {"a": "a"}}]
)
def test_rewrite_warns_if_it_renames_and_drops_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    ingot.numpy.save_file({"a": numpy.zeros(2), "b": numpy.ones(2)}, source)
    with pytest.warns(UserWarning, match=r"rewrite\(\): .*source\.safetensors: no tensor is renamed"):
        ingot.rewrite(source, out, **options)
    assert out.read_bytes() == source.read_bytes()


def test_update_metadata_leaves_room_for_the_next_change(tmp_path: Path) -> None:
    path = save(tmp_path / "t.safetensors")
    assert ingot.update_metadata(path, {"a": "x" * 100}) == "rewritten"
    assert ingot.update_metadata(path, {"a": "x" * 400}) == "in-place"
    assert ingot.update_metadata(path, {"a": "y"}, atomic=True) == "rewritten"


def test_update_metadata_uses_spaces_of_a_foreign_header(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    raw = safetensors.numpy.save({"w": numpy.arange(5.0)})
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length] + b" " * 200
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])
    assert ingot.update_metadata(path, {"k": "v"}) == "in-place"
    assert upstream(path)[1] == {"k": "v"}
    assert torch.equal(upstream(path)[0]["w"], torch.arange(5.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"step": 3}, "`step`"),
        ({"step": b"3"}, "`step`"),
        ({3: "x"}, "`3`"),
        ({b"step": None}, "b'step'"),
        ([("a", "b")], "dict"),
        ("step", "found str"),
    ],
)
def test_update_metadata_names_keys_that_are_no_text(tmp_path: Path, metadata: Any, word: str) -> None:
    path = save(tmp_path / "t.safetensors", {"step": "1"}, write_options={"reserve_header": 100})
    before = path.read_bytes()
    with pytest.raises(TypeError, match=word):
        ingot.update_metadata(path, metadata)
    assert path.read_bytes() == before


def test_update_metadata_rejects_files_that_cannot_be_edited(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ingot.update_metadata(tmp_path / "none", {"a": "b"})
    with pytest.raises(IsADirectoryError):
        ingot.update_metadata(tmp_path, {"a": "b"})
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><html></html>")
    with pytest.raises(ingot.HeaderError):
        ingot.update_metadata(page, {"a": "b"})
    assert page.read_text().startswith("<!doctype")


# --- one tensor


@BOTH
def test_replace_tensor_replaces_one_tensor(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path / f"t{suffix}", {"k": "v"})
    new = torch.full((3, 100), 0.5, dtype=torch.bfloat16)
    ingot.replace_tensor(path, "head.weight", new.t().contiguous().t())
    found, metadata = upstream(path)
    assert_same(found, {**tensors(), "head.weight": new})
    assert metadata == {"k": "v"}


def test_replace_tensor_rejects_another_shape_or_dtype(tmp_path: Path) -> None:
    path = save(tmp_path / "t.safetensors")
    before = path.read_bytes()
    for value in (torch.zeros(100, 3, dtype=torch.bfloat16), torch.zeros(3, 100)):
        with raises(ingot.SaveError, r"`head\.weight`", code="mismatch"):
            ingot.replace_tensor(path, "head.weight", value)
    with pytest.raises(ingot.TensorNotFoundError):
        ingot.replace_tensor(path, "head", torch.zeros(1))
    with pytest.raises(TypeError, match="tensor must be an array or a tensor, found str"):
        ingot.replace_tensor(path, "step", "7")
    assert path.read_bytes() == before


# --- merge, split, rewrite


@pytest.mark.parametrize("out", ["out.safetensors", "out.bt"])
def test_merge_equals_save_file(tmp_path: Path, out: str) -> None:
    every = {name: tensor for name, tensor in tensors().items() if name != "nothing"}
    sources = []
    for number, name in enumerate(every):
        path = tmp_path / f"{number}{('.safetensors', '.bt')[number % 2]}"
        metadata = {"format": "pt", f"k{number}": "v"} if number else None
        ingot.torch.save_file({name: every[name]}, path, metadata)
        sources.append(path)
    ingot.merge(sources, tmp_path / out, overwrite=True)
    together = {"format": "pt"} | {f"k{number}": "v" for number in range(1, len(sources))}
    ingot.torch.save_file(every, tmp_path / f"saved{out}", together)
    assert (tmp_path / out).read_bytes() == (tmp_path / f"saved{out}").read_bytes()
    assert_same(upstream(tmp_path / out)[0], every)
    # The destination is one of the sources.
    ingot.merge(sources, sources[0], metadata=None, overwrite=True)
    assert_same(upstream(sources[0])[0], every)
    assert ingot.inspect(sources[0]).metadata is None


def test_merge_rejects_or_selects_duplicate_names(tmp_path: Path) -> None:
    paths = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for value, path in enumerate(paths):
        ingot.torch.save_file({"w": torch.full((2,), float(value))}, path)
    out = tmp_path / "out.safetensors"
    with pytest.raises(ingot.SaveError, match=r"`w`.*first\.safetensors.*second\.safetensors") as caught:
        ingot.merge(paths, out, overwrite=True)
    assert (caught.value.code, caught.value.tensor) == ("duplicate-tensor", "w")
    assert not out.exists()
    for choice, value in (("first", 0.0), ("last", 1.0)):
        ingot.merge(paths, out, on_duplicate=choice, overwrite=True)  # type: ignore[arg-type]
        assert upstream(out)[0]["w"].tolist() == [value, value]
    with pytest.raises(ingot.OptionError):
        ingot.merge(paths, out, on_duplicate="both", overwrite=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ingot.merge(paths[0], out, overwrite=True)  # type: ignore[arg-type]


def test_merge_rejects_conflicting_metadata(tmp_path: Path) -> None:
    paths = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for value, path in enumerate(paths):
        ingot.torch.save_file({path.stem: torch.zeros(1)}, path, {"step": str(value)})
    with raises(ingot.SaveError, r"`step`.*first.*second", code="metadata-conflict"):
        ingot.merge(paths, tmp_path / "out")
    ingot.merge(paths, tmp_path / "out", metadata={"step": "2"})
    assert ingot.inspect(tmp_path / "out").metadata == {"step": "2"}


# Options of a rewrite, with the old name of each tensor in the result by its new name.
REWRITES: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {name: name for name in tensors()}),
    ({"keys": "encoder.*"}, {name: name for name in ("encoder.0.weight", "encoder.0.bias")}),
    (
        {"keys": ingot.glob("step", "head.*"), "drop": "*.mask"},
        {name: name for name in ("step", "head.weight")},
    ),
    ({"drop": lambda info: "." in info.name}, {name: name for name in ("step", "nothing")}),
    ({"keys": "step", "rename": {"step": "global step"}}, {"global step": "step"}),
    ({"rename": str.upper}, {name.upper(): name for name in tensors()}),
]


@pytest.mark.parametrize(("options", "old_names"), REWRITES)
@BOTH
def test_rewrite_equals_save_file(
    tmp_path: Path, options: dict[str, Any], old_names: dict[str, str], suffix: str
) -> None:
    expected = {new: tensors()[old] for new, old in old_names.items()}
    source = save(tmp_path / "t.safetensors", {"a": "1"})
    out = tmp_path / f"out{suffix}"
    ingot.rewrite(source, out, **options, overwrite=True)
    saved = tmp_path / f"saved{suffix}"
    ingot.torch.save_file(expected, saved, {"a": "1"})
    assert out.read_bytes() == saved.read_bytes()
    ingot.rewrite(out, source, format="safetensors", metadata={"b": "2"}, overwrite=True)
    assert upstream(source)[1] == {"b": "2"}
    assert_same(upstream(source)[0], expected)


def test_rewrite_rejects_names_that_match_nothing(tmp_path: Path) -> None:
    path = save(tmp_path / "t.safetensors")
    before = path.read_bytes()
    for options in ({"keys": "decoder.*"}, {"drop": ["step", "stop"]}, {"rename": {"stop": "x"}}):
        with pytest.raises(ingot.TensorNotFoundError):
            ingot.rewrite(path, path, **options)
    with raises(ingot.SaveError, code="duplicate-tensor"):
        ingot.rewrite(path, path, rename=lambda name: "same")
    with pytest.raises(TypeError):
        ingot.rewrite(path, path, rename=lambda name: 3)  # type: ignore[arg-type, return-value]
    ingot.torch.save_file({"c": torch.zeros(1, dtype=torch.complex64)}, tmp_path / "c.safetensors")
    with raises(ingot.SaveError, code="unsupported-dtype"):
        ingot.rewrite(tmp_path / "c.safetensors", tmp_path / "c.bt")
    assert path.read_bytes() == before
    assert not (tmp_path / "c.bt").exists()


@pytest.mark.parametrize(("size", "limit"), [(100, 100), ("1KB", 1000), ("2.5KB", 2500), ("5GB", 5 * 10**9)])
def test_split_writes_a_checkpoint_of_shards(tmp_path: Path, size: Any, limit: int) -> None:
    source, directory = tmp_path / "whole.safetensors", tmp_path / "shards"
    every = {f"layer.{n}.weight": torch.full((n, 10), float(n)) for n in range(12)}
    ingot.torch.save_file(every, source, {"format": "pt", "note": "x"})
    ingot.split(source, directory, size, overwrite=True)
    files = sorted(directory.glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for number, file in enumerate(files, 1):
        shard, metadata = upstream(file)
        if len(files) == 1:
            assert (file.name, metadata) == ("model.safetensors", {"format": "pt", "note": "x"})
        else:
            assert file.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
            assert metadata == {"format": "pt"}
        assert len(shard) == 1 or sum(4 * tensor.numel() for tensor in shard.values()) <= limit
        found |= shard
    assert_same(found, every)
    index = directory / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1) == (limit < 2640)
    if index.exists():
        read = json.loads(index.read_text())
        assert read["metadata"] == {"total_size": 2640, "note": "x"}
        for name, file_name in read["weight_map"].items():
            assert name in upstream(directory / file_name)[0]
    again = tmp_path / "again.safetensors"
    ingot.merge(files, again, metadata={"format": "pt", "note": "x"}, overwrite=True)
    assert again.read_bytes() == source.read_bytes()
    # Shards that no longer belong to it are removed.
    ingot.split(source, directory, "5GB", overwrite=True)
    assert names_in(directory) == ["model.safetensors"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no way to measure peak memory")
def test_merge_takes_little_memory(tmp_path: Path) -> None:
    paths = []
    for number in range(4):
        path = tmp_path / f"{number}.safetensors"
        arrays = {f"{number}.{part}": numpy.full(4 << 20, number, numpy.float32) for part in range(4)}
        ingot.numpy.save_file(arrays, path)
        paths.append(path)
    program = """
import ingot._write.rearrange
forget_peak()
before = memory("VmRSS")
ingot.merge(sys.argv[2:], sys.argv[1], durable=os.environ["FLUSH"] == "1", overwrite=True)
say(memory("VmHWM") - before)
"""
    for flush in "01":
        ended = run(program, tmp_path / "out", *paths, FLUSH=flush)
        assert ended.said() < 64 << 20
        assert (tmp_path / "out").stat().st_size > 256 << 20


def test_safe_open_notices_an_edit_in_place(tmp_path: Path) -> None:
    path = save(tmp_path / "t.safetensors", write_options={"reserve_header": 100})
    with ingot.safe_open(path, "pt") as file:
        before = file.get_tensor("step")
        assert ingot.update_metadata(path, {"a": "b"}) == "in-place"
        with raises(ingot.StorageError, code="changed"):
            file.get_tensor("head.weight")
        assert before.item() == 7
    with ingot.safe_open(path, "pt") as file:
        assert ingot.update_metadata(path, {"a": "c"}, atomic=True) == "rewritten"
        assert_same(file.get_tensors(), tensors())


@pytest.mark.parametrize("how", ["merge", "split", "rewrite"])
def test_copies_report_progress_and_can_be_stopped(tmp_path: Path, how: str) -> None:
    source, out = tmp_path / "in.safetensors", tmp_path / "out"
    arrays = {f"t{number}": numpy.full(100_000, number, "f4") for number in range(4)}
    ingot.numpy.save_file(arrays, source)

    def copied(progress: Any) -> None:
        if how == "merge":
            ingot.merge([source], out, progress=progress)
        elif how == "rewrite":
            ingot.rewrite(source, out, progress=progress)
        else:
            ingot.split(source, out, 900_000, progress=progress)

    with pytest.raises(Stopped):
        copied(stop)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path != source]
    told = Progress()
    copied(told)
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] >= 1_600_000
    assert {total for _, total in told} == {told[-1][1]}


def test_merge_selects_names_of_all_sources(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    for name in ("a", "b", "c"):
        ingot.numpy.save_file({name: numpy.ones(3), f"{name}.bias": numpy.zeros(1)}, tmp_path / name)
    sources = [tmp_path / name for name in ("a", "b", "c")]
    ingot.merge(sources, out, keys=["a", "b", "b.bias"], drop="*.bias")
    assert ingot.open(out).keys() == ["a", "b"]
    ingot.merge(sources, out, keys=lambda info: info.shape == (1,), overwrite=True)
    assert ingot.open(out).keys() == ["a.bias", "b.bias", "c.bias"]
    with pytest.raises(ingot.TensorNotFoundError, match=r"did you mean `a\.bias`"):
        ingot.merge(sources, out, keys="a.biaz", overwrite=True)
    with pytest.raises(ingot.OptionError, match="sources is empty"):
        ingot.merge([], out, overwrite=True)


MKFS = shutil.which("mkfs.xfs", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
# Larger than the smallest XFS: blocks are shared although a copy would fit.
IMAGE_NBYTES = 600 << 20

# About 100 MiB, which takes several calls. The tensors do not end at page boundaries.
ARRAYS = {
    "odd": numpy.arange(3, dtype="u1"),
    "large": numpy.arange(70 << 18, dtype="<u4"),
    "small": numpy.arange(1001, dtype="<u2"),
    "last": numpy.arange((33 << 18) + 5, dtype="<u4"),
}
NBYTES = sum(array.nbytes for array in ARRAYS.values())


@pytest.fixture(scope="module")
def xfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if MKFS is None or os.geteuid() != 0:
        pytest.skip("making XFS takes root and xfsprogs")
    folder = tmp_path_factory.mktemp("xfs")
    image, place = folder / "image", folder / "mount"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_NBYTES)
    subprocess.run([MKFS, "-q", "-m", "reflink=1", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, place], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"XFS cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
        image.unlink()


@pytest.fixture
def path(xfs: Path) -> Iterator[Path]:
    path = xfs / "model.safetensors"
    ingot.numpy.save_file(ARRAYS, path)
    yield path
    for file in xfs.iterdir():
        file.unlink()


def used(path: Path) -> int:
    """Return the used bytes of the file system."""
    os.sync()
    stat = os.statvfs(path)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def same(path: Path, arrays: dict[str, numpy.ndarray]) -> None:
    found = safetensors.numpy.load_file(path)
    assert found.keys() == arrays.keys()
    assert all((found[name] == arrays[name]).all() for name in arrays)


@pytest.mark.parametrize("durable", [True, False])
def test_update_metadata_shares_blocks_with_the_old_file(path: Path, durable: bool) -> None:
    before = used(path)
    # The open file keeps the old blocks, so that the blocks of the new file are counted beside them.
    with path.open("rb"):
        text = "long" * 10_000
        assert ingot.update_metadata(path, {"note": text}, durable=durable) == "rewritten"
        assert used(path) - before < 2 << 20
    same(path, ARRAYS)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"note": text}


def test_replace_tensor_shares_the_blocks_of_other_tensors(path: Path) -> None:
    before = used(path)
    new = ARRAYS["small"][::-1]
    with path.open("rb"):
        ingot.replace_tensor(path, "small", new)
        assert used(path) - before < 4 << 20
    same(path, {**ARRAYS, "small": new})


def test_rewrite_copies_misaligned_data(path: Path) -> None:
    before = used(path)
    out = path.with_name("out.safetensors")
    ingot.rewrite(path, out, drop=["odd"], rename={"large": "renamed"})
    kept = {"renamed" if name == "large" else name: array for name, array in ARRAYS.items() if name != "odd"}
    same(out, kept)
    assert used(path) - before >= NBYTES - 8
    with path.open("rb") as old, out.open("rb") as new:
        at_in_page = [len(file.read()) % 4096 for file in (old, new)]
    assert at_in_page[0] != at_in_page[1]


def test_rewrite_that_is_stopped_keeps_the_old_file(path: Path) -> None:
    before = path.read_bytes()

    with pytest.raises(Stopped):
        ingot.rewrite(path, path, rename={"large": "renamed"}, progress=stop, overwrite=True)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


import ingot.torch  # noqa: E402


def test_split_and_merge_are_inverse(tmp_path: Path) -> None:
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


def test_split_takes_a_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("out")
    ingot.split(checkpoint, out, 8)
    with opened(out) as file:
        assert len(file.shards) == 3
        assert file.metadata() == {"total_size": 36}
        assert set(map(str, file.shard_metadata().values())) == {"{'format': 'np'}"}
    assert_equal(ingot.numpy.load_file(out, keys=list("abcd")), dict(sorted((LEFT | RIGHT).items())))


def test_merge_takes_checkpoints_and_files(
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


def test_inspect_reads_an_index_without_shards(tmp_path: Path) -> None:
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
def test_copies_compute_the_requested_digests(name: str, tmp_path: Path) -> None:
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
