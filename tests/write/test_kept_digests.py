"""Digests that files store for their tensors: stored, copied and verified."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import ingot
import ingot.numpy
import ingot.torch
from support.digests import KEY, ORACLES, flip, record
from support.errors import raises
from support.progress import Progress


def test_verify_raises_for_each_kind_of_failure(tmp_path: Path) -> None:
    arrays = {f"t{number}": np.full(8, number, "f4") for number in range(6)}
    path, bare = tmp_path / "file", tmp_path / "bare"
    ingot.numpy.save_file(arrays, path, checksums=True)
    ingot.numpy.save_file(arrays, bare)
    assert ingot.verify(path).ok
    data = bytearray(path.read_bytes())
    data[-8 * 4 * 5 :] = bytes(8 * 4 * 5)
    path.write_bytes(data)
    with pytest.raises(ingot.IntegrityError, match=r"file: tensor `t1`: expected .*; and 2 more$") as caught:
        ingot.verify(path)
    error = caught.value
    assert (error.code, error.path, error.tensor) == ("digest-mismatch", str(path), "t1")
    assert error.report == ingot.verify(path, raises=False)
    assert [row.tensor for row in error.report.bad] == [f"t{number}" for number in range(1, 6)]
    assert (error.expected, error.found) == (error.report.bad[0].expected, error.report.bad[0].found)
    assert pickle.loads(pickle.dumps(error)).report == error.report
    with pytest.raises(ingot.IntegrityError, match="bare: 6 of 6 tensors without a digest") as caught:
        ingot.verify(bare)
    assert (caught.value.code, caught.value.report.unchecked) == ("no-digest", [*arrays])
    with pytest.raises(ingot.IntegrityError, match=f"the file: expected {'0' * 64}") as caught:
        ingot.verify(bare, expected_sha256="0" * 64)
    assert caught.value.found == ingot.hash(bare)


@pytest.mark.parametrize("format", ["safetensors", "bintensors"])
@pytest.mark.parametrize("algorithm", sorted(ORACLES))
def test_save_file_stores_a_digest_of_each_tensor(
    tmp_path: Path, tensors: dict[str, torch.Tensor], algorithm: str, format: str
) -> None:
    path = tmp_path / "file"
    ingot.torch.save_file(tensors, path, {"a": "b"}, checksums=algorithm, format=format)
    with ingot.safe_open(path, "pt") as file:
        metadata = file.metadata()
    record = json.loads(metadata.pop(KEY))
    assert metadata == {"a": "b"}
    raw = {
        name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()
    }
    assert record == {
        "algorithm": algorithm,
        "tensors": {name: ORACLES[algorithm](raw[name]) for name in sorted(tensors)},
    }
    report = ingot.verify(path, raises=False)
    assert report.ok
    assert bool(report)
    assert (report.algorithm, report.checked, report.bad) == (algorithm, len(tensors), [])
    assert str(report) == f"ok: {len(tensors)} tensors checked by {algorithm}"


def test_upstream_reads_a_file_with_digests(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, path, checksums=("blake3", "modelspec"))
    theirs = safetensors.torch.load_file(path)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())
    assert path.stat().st_size % 8 == (sum(t.nbytes for t in tensors.values())) % 8


def test_save_file_with_digests_is_deterministic(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    for atomic in (True, False):
        ingot.torch.save_file(tensors, tmp_path / str(atomic), checksums="blake3", atomic=atomic)
    ingot.torch.save_file(tensors, tmp_path / "False", checksums="blake3", atomic=False)
    assert (tmp_path / "True").read_bytes() == (tmp_path / "False").read_bytes()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_save_file_rejects_digests_for_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(ingot.StorageError, match="what is streamed keeps no checksums"):
            ingot.numpy.save_file({"a": np.zeros(3)}, pipe, checksums="blake3")
    finally:
        os.close(reader)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("checksums", ["blake3", ["xxh3", "modelspec"]])
def test_background_save_stores_digests(
    tmp_path: Path, durable: bool, snapshot: bool, checksums: object
) -> None:
    tensors = {
        "large": torch.randn(40 << 18),
        "turned": torch.randn(3000, 500).T,
        "half": torch.ones(7).half(),
    }
    path = tmp_path / "file.safetensors"
    save = ingot.torch.save_file(
        tensors,
        path,
        background=True,
        write_options={"snapshot": snapshot},
        durable=durable,
        checksums=checksums,
    )
    save.result()
    report = ingot.verify(path, raises=False)
    assert report.ok, str(report)
    assert report.checked == 3
    assert torch.equal(ingot.torch.load_file(path, verify=True)["turned"], tensors["turned"])


@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        ("safetensors", {"atomic": False}),
        ("safetensors", {"write_options": {"align": 4096}}),
        ("safetensors", {"write_options": {"reserve_header": 5000}}),
        ("bt", {"atomic": False}),
    ],
)
def test_checksums_combine_with_other_options(
    tmp_path: Path, tensors: dict[str, torch.Tensor], suffix: str, options: dict[str, Any]
) -> None:
    path = tmp_path / f"file.{suffix}"
    path.write_bytes(b"what was there before, and longer than nothing")
    ingot.torch.save_file(tensors, path, checksums=True, **options)
    assert ingot.verify(path).algorithm == "blake3"
    assert ingot.verify(path).ok
    if "align" in options.get("write_options", {}):
        (length,) = struct.unpack("<Q", path.read_bytes()[:8])
        assert (8 + length) % 4096 == 0


def test_verify_accepts_an_edited_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    for suffix, algorithm in [("safetensors", "blake3"), ("bt", "xxh3")]:
        path = tmp_path / f"file.{suffix}"
        ingot.torch.save_file(tensors, path, checksums=algorithm)
        ingot.update_metadata(path, {"step": "7" * 300})
        assert ingot.verify(path).ok
        ingot.replace_tensor(path, "large", torch.full((900_000,), 2.5))
        report = ingot.verify(path, raises=False)
        assert report.ok, str(report)
        assert report.checked == len(tensors)
        assert ingot.torch.load_file(path, verify=True)["large"][0] == 2.5
        assert ingot.inspect(path).metadata["step"] == "7" * 300


def assert_whole(path: Path, count: int) -> None:
    """Check that a file has correct digests of all its tensors, and no other digests."""
    report = ingot.verify(path, raises=False)
    assert report.ok, str(report)
    assert report.checked == count
    assert report.missing == report.unchecked == []


@pytest.mark.parametrize("algorithm", list(ORACLES))
@pytest.mark.parametrize("suffix", ["safetensors", "bt"])
def test_rewrite_keeps_digests(
    tmp_path: Path, tensors: dict[str, torch.Tensor], algorithm: str, suffix: str
) -> None:
    source, path = tmp_path / "source.safetensors", tmp_path / f"file.{suffix}"
    ingot.torch.save_file(tensors, source, {"a": "b"}, checksums=algorithm)
    # Two names are swapped.
    ingot.rewrite(source, path, rename={"bytes": "large", "large": "bytes"}, drop="scalar")
    assert_whole(path, len(tensors) - 1)
    names = {"bytes": "large", "large": "bytes"}
    old = {names.get(name, name): digest for name, digest in record(source).items() if name != "scalar"}
    assert record(path) == old
    # The file equals one that is saved with digests.
    moved = {names.get(name, name): tensor for name, tensor in tensors.items() if name != "scalar"}
    ingot.torch.save_file(moved, tmp_path / f"saved.{suffix}", {"a": "b"}, checksums=algorithm)
    assert path.read_bytes() == (tmp_path / f"saved.{suffix}").read_bytes()


def test_split_and_merge_keep_digests(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    source, folder, path = tmp_path / "source.safetensors", tmp_path / "folder", tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, source, {"a": "b"}, checksums=["blake3", "modelspec"])
    ingot.split(source, folder, 1000, overwrite=True)
    with ingot.safe_open(folder, "pt") as checkpoint:
        assert len(checkpoint.shards) > 1
    assert_whole(folder, len(tensors))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
    assert set(index) == {"total_size", "a"}
    for merged in ([folder], sorted(folder.glob("*.safetensors"))):
        ingot.merge(merged, path, overwrite=True)
        assert_whole(path, len(tensors))
        assert record(path) == record(source)
        assert "modelspec.hash_sha256" not in (ingot.inspect(path).metadata or {})
    ingot.rewrite(path, folder / "again.bt", keys="large", overwrite=True)
    assert_whole(folder / "again.bt", 1)


def test_merge_keeps_the_digest_of_the_selected_duplicate(tmp_path: Path) -> None:
    for number in range(3):
        arrays = {"same": np.full(3, number), f"own{number}": np.full(2, number)}
        ingot.numpy.save_file(arrays, tmp_path / f"{number}.safetensors", checksums="xxh3")
    paths, out = sorted(tmp_path.iterdir()), tmp_path / "out.bt"
    for which, source in (("first", paths[0]), ("last", paths[2])):
        ingot.merge(paths, out, on_duplicate=which, overwrite=True)
        assert_whole(out, 4)
        assert record(out)["same"] == record(source)["same"]


def test_merge_keeps_the_most_common_algorithm(tmp_path: Path) -> None:
    for name, algorithm in (("a", "sha256"), ("b", "xxh3"), ("c", "xxh3"), ("d", None)):
        ingot.numpy.save_file({name: np.ones(3)}, tmp_path / f"{name}.safetensors", checksums=algorithm)
    out = tmp_path / "out.safetensors"
    ingot.merge(sorted(tmp_path.iterdir()), out)
    report = ingot.verify(out, raises=False)
    assert (report.algorithm, report.checked, report.bad, report.missing) == ("xxh3", 2, [], [])
    assert report.unchecked == ["a", "d"]


def test_rewrite_drops_an_invalid_record(tmp_path: Path) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    for broken in (
        "no record",
        '{"algorithm":"crc","tensors":{"a":"00"}}',
        '{"algorithm":"xxh3","tensors":{"a":"00"}}',
        '{"algorithm":"xxh3","tensors":{"other":"0123456789abcdef"}}',
    ):
        header = json.dumps(
            {
                "__metadata__": {KEY: broken, "k": "v"},
                "a": {"dtype": "F64", "shape": [3], "data_offsets": [0, 24]},
            }
        )
        data = np.ones(3).tobytes()
        source.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)
        ingot.rewrite(source, out, overwrite=True)
        assert ingot.inspect(out).metadata == {"k": "v"}


def test_verify_finds_a_bad_byte_after_a_rewrite(tmp_path: Path) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out.bt"
    ingot.numpy.save_file({"a": np.zeros(3), "b": np.zeros(3)}, source, checksums="xxh3")
    data = bytearray(source.read_bytes())
    data[-1] ^= 1
    source.write_bytes(data)
    ingot.rewrite(source, out, rename={"b": "c"})
    assert [row.tensor for row in ingot.verify(out, raises=False).bad] == ["c"]


def test_rewrite_keeps_the_hash_of_all_data_if_it_is_true(tmp_path: Path) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out.bt"
    arrays = {"a": np.zeros(3), "b": np.ones(3), "c": np.ones(0)}
    ingot.numpy.save_file(arrays, source, {"k": "v"}, checksums="modelspec")
    kept = ingot.inspect(source).metadata
    ingot.rewrite(source, out, overwrite=True)
    assert ingot.inspect(out).metadata == kept
    assert ingot.verify(out).modelspec.same
    for change in ({"rename": {"a": "z"}}, {"drop": "b"}, {"keys": "c"}):
        ingot.rewrite(source, out, **change, overwrite=True)
        assert ingot.inspect(out).metadata == {"k": "v"}
    ingot.numpy.save_file({"d": np.ones(3)}, tmp_path / "other.safetensors", {}, checksums="modelspec")
    ingot.merge([source, tmp_path / "other.safetensors"], out, overwrite=True)
    assert ingot.inspect(out).metadata == {"k": "v"}
    ingot.replace_tensor(source, "b", np.full(3, 2.0))
    assert ingot.inspect(source).metadata == {"k": "v"}


def test_metadata_option_replaces_the_digests_of_sources(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    source, path = tmp_path / "source.safetensors", tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, source, {"a": "b"}, checksums="blake3")
    for pairs in (None, {}, {"c": "d"}, ingot.inspect(source).metadata):
        ingot.rewrite(source, path, metadata=pairs, overwrite=True)
        expected = None if pairs is None else {key: text for key, text in pairs.items() if key != KEY}
        assert ingot.inspect(path).metadata == expected
    written = io.BytesIO()
    ingot.torch.save_file(tensors, written, ingot.inspect(source).metadata)
    path.write_bytes(written.getvalue())
    assert ingot.inspect(path).metadata == {"a": "b"}
    writer = ingot.Writer(path, {"x": ("F32", [1])}, metadata=ingot.inspect(source).metadata, overwrite=True)
    with writer:
        writer.write("x", np.ones(1, np.float32))
        writer.commit()
    assert ingot.inspect(path).metadata == {"a": "b"}


def test_verify_reads_the_stored_tensor_of_aliases(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file({"whole": whole, "half": whole[:6]}, path, shared="alias", checksums="blake3")
    found = ingot.torch.load_file(path, keys=["half"], verify=True)
    assert list(found) == ["half"]
    assert torch.equal(found["half"], whole[:6])
    flip(path, path.stat().st_size - 1)
    with raises(ingot.IntegrityError, tensor="whole"):
        ingot.torch.load_file(path, keys=["half"], verify=True)


def test_verify_reports_missing_and_unchecked_names(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    zeros = ORACLES["xxh3"](bytes(12))
    record = json.dumps({"algorithm": "xxh3", "tensors": {"a": zeros, "gone": zeros}})
    path.write_bytes(safetensors.torch.save({"a": torch.zeros(3), "new": torch.zeros(1)}, {KEY: record}))
    report = ingot.verify(path, raises=False)
    assert (report.ok, report.checked, report.bad) == (False, 1, [])
    assert (report.unchecked, report.missing) == (["new"], ["gone"])
    assert "tensor `gone`: has a digest and is not there" in str(report)
    with raises(ingot.IntegrityError, code="no-digest", tensor="new"):
        ingot.torch.load_file(path, verify=True)


def test_verify_rejects_a_file_without_digests(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, path)
    report = ingot.verify(path, raises=False)
    assert (report.ok, report.algorithm, report.checked) == (False, None, 0)
    assert len(report.unchecked) == len(tensors)
    with pytest.raises(ingot.IntegrityError, match="keeps no digest"):
        ingot.torch.load_file(path, verify=True)
    whole = hashlib.sha256(path.read_bytes()).hexdigest()
    assert ingot.verify(path, expected_sha256=whole).ok
    assert ingot.verify(path, expected_sha256="0x" + whole.upper()).ok
    report = ingot.verify(path, expected_sha256="0" * 64, raises=False)
    assert (report.ok, report.file.found, report.file.same) == (False, whole, False)
    for wrong in ("", "abc", whole[:-1] + "g"):
        with pytest.raises(ingot.OptionError):
            ingot.verify(path, expected_sha256=wrong)


def test_verify_covers_a_sharded_checkpoint(tmp_path: Path) -> None:
    state = {f"layers.{i}": torch.arange(1000.0) + i for i in range(6)}
    ingot.torch.save_sharded(state, tmp_path, 9000, checksums="blake3")
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) == 3
    told = Progress()
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        told.clear()
        report = ingot.verify(path, progress=told, raises=False)
        assert report.ok
        assert (report.checked, report.algorithm) == (6, "blake3")
        assert list(report.shards) == shards
        assert all(shard.checked == 2 for shard in report.shards.values())
        assert str(report) == "ok: 6 tensors checked by blake3 in 3 files"
        whole = sum((tmp_path / shard).stat().st_size for shard in shards)
        told.assert_complete(whole)

    damaged = tmp_path / shards[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    report = ingot.verify(tmp_path, raises=False)
    assert not report
    (bad,) = report.bad
    assert bad in report.shards[shards[1]].bad
    assert [shard.ok for shard in report.shards.values()] == [True, False, True]
    assert f"{shards[1]}: tensor `{bad.tensor}`: expected {bad.expected}, found {bad.found}" in str(report)

    with pytest.raises(ingot.CheckpointError, match="one hash cannot speak of 3 files"):
        ingot.verify(tmp_path, expected_sha256="0" * 64)
    with pytest.raises(ingot.IntegrityError, match=bad.tensor):
        ingot.torch.load_file(tmp_path, verify=True)
    (tmp_path / shards[2]).unlink()
    with pytest.raises(FileNotFoundError, match=shards[2]):
        ingot.verify(tmp_path)
