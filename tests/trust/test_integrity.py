"""Hashes of files, digests that files keep of their tensors, and loads that compare them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import signal
import struct
import threading
import time
from pathlib import Path

import blake3
import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash
from bintensors.numpy import save_with_checksum as theirs_numpy
from bintensors.torch import save_with_checksum as theirs_torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot
import ingot.numpy
import ingot.torch

ORACLES = {
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "xxh3": lambda data: xxhash.xxh3_64(data).hexdigest(),
    "xxh3_128": lambda data: xxhash.xxh3_128(data).hexdigest(),
}
KEY = "ingot.checksums"


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "large": torch.randn(900_000),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
        "bytes": torch.arange(250, dtype=torch.uint8),
        'nämé " \\ \n': torch.randn(7, 3).to(torch.bfloat16),
    }


def stored(path: Path) -> dict[str, bytes]:
    """The bytes of each tensor, found without ingot."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    start = 8 + length
    return {
        name: data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


# --- hashes of files ---


@given(
    data=st.one_of(
        st.binary(max_size=4000), st.integers(0, 5 << 20).map(lambda n: bytes(range(256)) * (n // 256))
    )
)
@settings(max_examples=30, deadline=None)
def test_hashes_are_those_of_other_programs(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("hash") / "file"
    path.write_bytes(data)
    for name, oracle in ORACLES.items():
        assert ingot.hash(path, name) == oracle(data), name
    for name in ("md5", "sha1", "sha512", "sha3_256", "blake2b"):
        assert ingot.hash(path, name) == hashlib.new(name, data).hexdigest(), name


def test_the_named_hashes_are_what_their_communities_compute(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "adapter.safetensors"
    metadata = {"ss_network_dim": "8", "modelspec.title": "Ducks", "ss_v2": "True", "sshs_model_hash": "00"}
    ingot.torch.save_file(tensors, path, metadata)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    data_section = hashlib.sha256(data[8 + length :]).hexdigest()
    assert ingot.hash(path) == hashlib.sha256(data).hexdigest()
    assert ingot.hash(path, "autov1") == hashlib.sha256(data[0x100000:0x110000]).hexdigest()[:8]
    assert ingot.hash(path, "autov2") == hashlib.sha256(data).hexdigest()[:10]
    assert ingot.hash(path, "autov3") == data_section
    assert ingot.hash(path, "modelspec") == "0x" + data_section
    # As trainers do it: they save in memory with the ss_ keys alone.
    alone = safetensors.torch.save(tensors, {k: v for k, v in metadata.items() if k.startswith("ss_")})
    assert ingot.hash(path, "sshs_legacy") == hashlib.sha256(alone[0x100000:0x110000]).hexdigest()[:8]


@pytest.mark.parametrize("count", [0, 3, 20_000])
def test_the_legacy_hash_reaches_into_long_headers_and_past_short_files(tmp_path: Path, count: int) -> None:
    # With 20,000 tensors the header passes 1 MiB, so that the window lies in it and in the data.
    small = {
        f"model.layers.{i:05}.attention.weight": torch.full((13,), i % 250, dtype=torch.uint8)
        for i in range(count)
    }
    path = tmp_path / "small.safetensors"
    ingot.torch.save_file(small, path, {"other": "x" * 3000})
    alone = safetensors.torch.save(small, {})
    assert ingot.hash(path, "sshs_legacy") == hashlib.sha256(alone[0x100000:0x110000]).hexdigest()[:8]
    data = path.read_bytes()
    assert ingot.hash(path, "autov1") == hashlib.sha256(data[0x100000:0x110000]).hexdigest()[:8]


def test_a_bt_file_has_a_data_section_too(tmp_path: Path) -> None:
    path = tmp_path / "a.bt"
    ingot.numpy.save_file({"a": np.arange(5)}, path)
    assert ingot.hash(path, "autov3") == hashlib.sha256(np.arange(5).tobytes()).hexdigest()


def test_a_hash_that_needs_tensors_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("no tensors here, and longer than eight bytes")
    assert ingot.hash(path, "autov1") == "e3b0c442"
    for name in ("autov3", "modelspec", "sshs_legacy"):
        with pytest.raises(ingot.HeaderError):
            ingot.hash(path, name)


def test_unknown_algorithms_are_refused_with_the_choices(tmp_path: Path) -> None:
    for name in ("crc32", "shake_128", ""):
        with pytest.raises(ingot.OptionError, match="expected one of blake3, sha256") as caught:
            ingot.hash(tmp_path / "x", name)
        assert caught.value.code == "unknown-algorithm"
    with pytest.raises(FileNotFoundError):
        ingot.hash(tmp_path / "x")
    with pytest.raises(IsADirectoryError):
        ingot.hash(tmp_path)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals to threads are a Unix thing")
@pytest.mark.parametrize("algorithm", ["sha256", "blake3"])
def test_ctrl_c_ends_a_hash(tmp_path: Path, algorithm: str) -> None:
    path = tmp_path / "hole"
    with open(path, "wb") as file:
        # Sparse, and longer than any machine hashes before the signal comes.
        file.truncate(1 << 40)
    main = threading.get_ident()
    threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ingot.hash(path, algorithm)
    assert time.monotonic() - start < 30


def test_progress_grows_to_all_and_may_end_the_call(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(9 << 20))
    told: list[tuple[int, int]] = []
    for algorithm in ORACLES:
        told.clear()
        ingot.hash(path, algorithm, progress=lambda *row: told.append(row))
        assert told == sorted(told)
        assert told[-1] == (9 << 20, 9 << 20)

    def stop(_done: int, _total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        ingot.hash(path, "blake3", progress=stop)


# --- digests kept in files ---


@pytest.mark.parametrize("format", ["safetensors", "bintensors"])
@pytest.mark.parametrize("algorithm", sorted(ORACLES))
def test_a_file_keeps_the_digest_of_each_tensor(
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
    report = ingot.verify(path)
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


def test_the_same_input_gives_the_same_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    for atomic in (True, False):
        ingot.torch.save_file(tensors, tmp_path / str(atomic), checksums="blake3", atomic=atomic)
    ingot.torch.save_file(tensors, tmp_path / "False", checksums="blake3", atomic=False)
    assert (tmp_path / "True").read_bytes() == (tmp_path / "False").read_bytes()


def test_digests_of_another_file_are_not_copied_along(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, path, {"a": "b"}, checksums="blake3")
    with ingot.safe_open(path, "pt") as file:
        metadata = file.metadata()
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    ingot.torch.save_file(changed, path, metadata)
    with ingot.safe_open(path, "pt") as file:
        assert file.metadata() == {"a": "b"}
    ingot.torch.save_file(changed, path, metadata, checksums="xxh3")
    assert ingot.verify(path).ok


@pytest.mark.parametrize("checksums", ["md5", ("blake3", "sha256"), ("modelspec", "crc")])
def test_checksums_that_cannot_be_kept_are_refused(tmp_path: Path, checksums: object) -> None:
    with pytest.raises(ingot.OptionError) as caught:
        ingot.numpy.save_file({"a": np.zeros(3)}, tmp_path / "x", checksums=checksums)
    assert caught.value.code == "unknown-checksums"
    assert not (tmp_path / "x").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_takes_no_file_with_checksums(tmp_path: Path) -> None:
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
def test_saves_in_the_background_keep_digests(
    tmp_path: Path, durable: bool, snapshot: bool, checksums: object
) -> None:
    tensors = {
        "large": torch.randn(40 << 18),
        "turned": torch.randn(3000, 500).T,
        "half": torch.ones(7).half(),
    }
    path = tmp_path / "file.safetensors"
    save = ingot.torch.save_file(
        tensors, path, background=True, snapshot=snapshot, durable=durable, checksums=checksums
    )
    save.result()
    report = ingot.verify(path)
    assert report.ok, str(report)
    assert report.checked == 3
    assert torch.equal(ingot.torch.load_file(path, verify=True)["turned"], tensors["turned"])


@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        ("safetensors", {"atomic": False}),
        ("safetensors", {"align": 4096}),
        ("safetensors", {"reserve_header": 5000}),
        ("bt", {"atomic": False}),
    ],
)
def test_digests_go_with_the_other_options(
    tmp_path: Path, tensors: dict[str, torch.Tensor], suffix: str, options: dict[str, int]
) -> None:
    path = tmp_path / f"file.{suffix}"
    path.write_bytes(b"what was there before, and longer than nothing")
    ingot.torch.save_file(tensors, path, checksums=True, **options)
    assert ingot.verify(path).algorithm == "blake3"
    assert ingot.verify(path).ok
    if "align" in options:
        (length,) = struct.unpack("<Q", path.read_bytes()[:8])
        assert (8 + length) % 4096 == 0


def test_metadata_is_edited_and_a_tensor_replaced_and_the_file_still_verifies(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    for suffix, algorithm in [("safetensors", "blake3"), ("bt", "xxh3")]:
        path = tmp_path / f"file.{suffix}"
        ingot.torch.save_file(tensors, path, checksums=algorithm)
        ingot.update_metadata(path, set={"step": "7" * 300})
        assert ingot.verify(path).ok
        ingot.replace_tensor(path, "large", torch.full((900_000,), 2.5))
        report = ingot.verify(path)
        assert report.ok, str(report)
        assert report.checked == len(tensors)
        assert ingot.torch.load_file(path, verify=True)["large"][0] == 2.5
        assert ingot.read_metadata(path)["step"] == "7" * 300


def record(path: Path) -> dict[str, str]:
    """The digests that a file keeps, by tensor."""
    found: dict[str, str] = json.loads((ingot.read_metadata(path) or {})[KEY])["tensors"]
    return found


def assert_whole(path: Path, count: int) -> None:
    """The digests of a file are of all of its tensors, true, and of nothing else."""
    report = ingot.verify(path)
    assert report.ok, str(report)
    assert report.checked == count
    assert report.missing == report.unchecked == []


@pytest.mark.parametrize("algorithm", list(ORACLES))
@pytest.mark.parametrize("suffix", ["safetensors", "bt"])
def test_digests_go_with_tensors_that_are_renamed_dropped_and_converted(
    tmp_path: Path, tensors: dict[str, torch.Tensor], algorithm: str, suffix: str
) -> None:
    source, path = tmp_path / "source.safetensors", tmp_path / f"file.{suffix}"
    ingot.torch.save_file(tensors, source, {"a": "b"}, checksums=algorithm)
    # Two change places.
    ingot.rewrite(source, path, rename={"bytes": "large", "large": "bytes"}, drop="scalar")
    assert_whole(path, len(tensors) - 1)
    names = {"bytes": "large", "large": "bytes"}
    old = {names.get(name, name): digest for name, digest in record(source).items() if name != "scalar"}
    assert record(path) == old
    # It is the file that a save with digests makes.
    moved = {names.get(name, name): tensor for name, tensor in tensors.items() if name != "scalar"}
    ingot.torch.save_file(moved, tmp_path / f"saved.{suffix}", {"a": "b"}, checksums=algorithm)
    assert path.read_bytes() == (tmp_path / f"saved.{suffix}").read_bytes()


def test_digests_go_with_tensors_that_are_split_and_merged(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    source, folder, path = tmp_path / "source.safetensors", tmp_path / "folder", tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, source, {"a": "b"}, checksums=["blake3", "modelspec"])
    ingot.split(source, folder, 1000)
    with ingot.safe_open(folder, "pt") as checkpoint:
        assert len(checkpoint.shards) > 1
    assert_whole(folder, len(tensors))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
    assert set(index) == {"total_size", "a"}
    for merged in ([folder], sorted(folder.glob("*.safetensors"))):
        ingot.merge(merged, path)
        assert_whole(path, len(tensors))
        assert record(path) == record(source)
        assert "modelspec.hash_sha256" not in (ingot.read_metadata(path) or {})
    ingot.rewrite(path, folder / "again.bt", keep="large")
    assert_whole(folder / "again.bt", 1)


def test_of_two_tensors_of_one_name_the_digest_of_the_one_that_is_taken_stays(tmp_path: Path) -> None:
    for number in range(3):
        arrays = {"same": np.full(3, number), f"own{number}": np.full(2, number)}
        ingot.numpy.save_file(arrays, tmp_path / f"{number}.safetensors", checksums="xxh3")
    paths, out = sorted(tmp_path.iterdir()), tmp_path / "out.bt"
    for which, source in (("first", paths[0]), ("last", paths[2])):
        ingot.merge(paths, out, on_duplicate=which)
        assert_whole(out, 4)
        assert record(out)["same"] == record(source)["same"]


def test_of_several_algorithms_that_of_the_most_tensors_is_kept(tmp_path: Path) -> None:
    for name, algorithm in (("a", "sha256"), ("b", "xxh3"), ("c", "xxh3"), ("d", None)):
        ingot.numpy.save_file({name: np.ones(3)}, tmp_path / f"{name}.safetensors", checksums=algorithm)
    out = tmp_path / "out.safetensors"
    ingot.merge(sorted(tmp_path.iterdir()), out)
    report = ingot.verify(out)
    assert (report.algorithm, report.checked, report.bad, report.missing) == ("xxh3", 2, [], [])
    assert report.unchecked == ["a", "d"]


def test_a_record_that_cannot_be_used_does_not_go_along(tmp_path: Path) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    for broken in (
        "no record",
        '{"algorithm":"crc","tensors":{"a":"00"}}',
        '{"algorithm":"xxh3","tensors":{"a":"00"}}',
        '{"algorithm":"xxh3","tensors":{"other":"0123456789abcdef"}}',
    ):
        ingot.numpy.save_file({"a": np.ones(3)}, source)
        ingot.update_metadata(source, set={KEY: broken, "k": "v"})
        ingot.rewrite(source, out)
        assert ingot.read_metadata(out) == {"k": "v"}


def test_a_byte_that_was_bad_before_is_found_after(tmp_path: Path) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out.bt"
    ingot.numpy.save_file({"a": np.zeros(3), "b": np.zeros(3)}, source, checksums="xxh3")
    data = bytearray(source.read_bytes())
    data[-1] ^= 1
    source.write_bytes(data)
    ingot.rewrite(source, out, rename={"b": "c"})
    assert [row.tensor for row in ingot.verify(out).bad] == ["c"]


def test_the_hash_of_all_data_stays_only_where_all_data_does(tmp_path: Path) -> None:
    source, out = tmp_path / "source.safetensors", tmp_path / "out.bt"
    arrays = {"a": np.zeros(3), "b": np.ones(3), "c": np.ones(0)}
    ingot.numpy.save_file(arrays, source, {"k": "v"}, checksums="modelspec")
    kept = ingot.read_metadata(source)
    ingot.rewrite(source, out)
    assert ingot.read_metadata(out) == kept
    assert ingot.verify(out).modelspec.same
    for change in ({"rename": {"a": "z"}}, {"drop": "b"}, {"keep": "c"}):
        ingot.rewrite(source, out, **change)
        assert ingot.read_metadata(out) == {"k": "v"}
    ingot.numpy.save_file({"d": np.ones(3)}, tmp_path / "other.safetensors", {}, checksums="modelspec")
    ingot.merge([source, tmp_path / "other.safetensors"], out)
    assert ingot.read_metadata(out) == {"k": "v"}
    ingot.replace_tensor(source, "b", np.full(3, 2.0))
    assert ingot.read_metadata(source) == {"k": "v"}


def test_metadata_that_is_given_is_all_that_a_file_made_of_others_has(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    source, path = tmp_path / "source.safetensors", tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, source, {"a": "b"}, checksums="blake3")
    for pairs in (None, {}, {"c": "d"}, ingot.read_metadata(source)):
        ingot.rewrite(source, path, metadata=pairs)
        expected = None if pairs is None else {key: text for key, text in pairs.items() if key != KEY}
        assert ingot.read_metadata(path) == expected
    written = io.BytesIO()
    ingot.write_to(written, tensors, ingot.read_metadata(source))
    path.write_bytes(written.getvalue())
    assert ingot.read_metadata(path) == {"a": "b"}
    writer = ingot.Writer(path, {"x": ("F32", [1])}, metadata=ingot.read_metadata(source))
    with writer:
        writer.write("x", np.ones(1, np.float32))
        writer.commit()
    assert ingot.read_metadata(path) == {"a": "b"}


def test_digests_are_of_the_bytes_in_the_file_also_when_tensors_change_meanwhile(tmp_path: Path) -> None:
    array = np.zeros(12 << 20, np.uint64)
    stop = threading.Event()

    def scribble() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            array[:] = number

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for name, durable in [("cached", False), ("flushed", True)]:
            ingot.numpy.save_file({"a": array}, tmp_path / name, durable=durable, checksums="blake3")
    finally:
        stop.set()
        thread.join()
    assert ingot.verify(tmp_path / "cached").ok
    assert ingot.verify(tmp_path / "flushed").ok


def test_some_tensors_are_verified_and_parts_of_tensors_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, path, checksums="blake3")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    for options in ({"verify": True}, {"verify": True, "expected_sha256": sha256}):
        found = ingot.torch.load_file(path, keys=["bytes", "large"], **options)
        assert list(found) == ["bytes", "large"]
        assert torch.equal(found["large"], tensors["large"])
    data = bytearray(path.read_bytes())
    data[data.rindex(tensors["bytes"].numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert list(ingot.torch.load_file(path, prefix="lar", verify=True)) == ["large"]
    with pytest.raises(ingot.IntegrityError) as caught:
        ingot.torch.load_file(path, keys=["large", "bytes"], verify=True)
    assert (caught.value.code, caught.value.tensor) == ("digest-mismatch", "bytes")
    with pytest.raises(ingot.IntegrityError, match="the file's bytes"):
        ingot.torch.load_file(path, keys=["large"], expected_sha256=sha256)
    for options in ({"slices": {"large": slice(3)}}, {"dtype": "F16"}, {"out": tensors}):
        for proof in ({"verify": True}, {"expected_sha256": sha256}):
            with pytest.raises(ingot.OptionError, match="whole tensors") as refused:
                ingot.torch.load_file(path, **options, **proof)
            assert refused.value.code == "not-provable"


def test_names_that_share_memory_are_verified_by_what_is_stored(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file({"whole": whole, "half": whole[:6]}, path, shared="alias", checksums="blake3")
    found = ingot.torch.load_file(path, keys=["half"], verify=True)
    assert list(found) == ["half"]
    assert torch.equal(found["half"], whole[:6])
    flip(path, path.stat().st_size - 1)
    with pytest.raises(ingot.IntegrityError) as caught:
        ingot.torch.load_file(path, keys=["half"], verify=True)
    assert caught.value.tensor == "whole"


@pytest.mark.parametrize("algorithm", sorted(ORACLES))
def test_a_flipped_byte_is_found_and_its_tensor_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], algorithm: str
) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, path, checksums=algorithm)
    good = path.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + length])
    for name in tensors:
        begin, end = header[name]["data_offsets"]
        for at in {begin, (begin + end) // 2, end - 1} if begin < end else ():
            path.write_bytes(good)
            flip(path, 8 + length + at)
            report = ingot.verify(path)
            assert not report.ok
            assert [row.tensor for row in report.bad] == [name]
            (row,) = report.bad
            assert row.expected == ORACLES[algorithm](good[8 + length + begin : 8 + length + end])
            assert row.found == ORACLES[algorithm](stored(path)[name])
            assert row.found in str(report)
            with pytest.raises(ingot.IntegrityError) as caught:
                ingot.torch.load_file(path, verify=True)
            assert (caught.value.code, caught.value.tensor) == ("digest-mismatch", name)
            assert (caught.value.expected, caught.value.found) == (row.expected, row.found)
            assert str(path) in str(caught.value)


def test_a_truncated_file_is_named_as_such(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, path, checksums="blake3")
    os.truncate(path, path.stat().st_size - 1)
    for act in (ingot.verify, lambda path: ingot.torch.load_file(path, verify=True)):
        with pytest.raises(ingot.HeaderError) as caught:
            act(path)
        assert caught.value.code == "truncated"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("", "EOF"),
        ("{}", "missing field"),
        ('{"algorithm":"blake3","tensors":{"a":1}}', "expected a string"),
        ('{"algorithm":"crc32","tensors":{}}', "unknown algorithm `crc32`"),
        ('{"algorithm":"blake3","tensors":{"a":"00"}}', "tensor `a`: `00` is no digest of blake3"),
        (
            '{"algorithm":"xxh3","tensors":{"a":"0000000000000000","\\u0061":"0000000000000000"}}',
            "comes twice",
        ),
        ("[" * 200_000, "expected an object"),
        ('{"x":' + "[" * 200_000, "EOF"),
    ],
    ids=range(8),
)
def test_a_broken_record_is_an_error_with_its_reason(tmp_path: Path, record: str, words: str) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(safetensors.torch.save({"a": torch.zeros(3)}, {KEY: record}))
    for act in (ingot.verify, lambda path: ingot.torch.load_file(path, verify=True)):
        with pytest.raises(ingot.IntegrityError, match=words) as caught:
            act(path)
        assert caught.value.code == "invalid-checksums"
        assert len(str(caught.value)) < 1000
    assert "a" in ingot.torch.load_file(path)


def test_a_record_of_a_hundred_megabytes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    names = ",".join(f'\\"{i:08}\\":\\"0123456789abcdef\\"' for i in range(2_900_000))
    header = (
        f'{{"__metadata__":{{"{KEY}":"{{\\"algorithm\\":\\"xxh3\\",\\"tensors\\":{{{names}}}}}"}}}}'.encode()
    )
    assert 90_000_000 < len(header) < 100_000_000
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    report = ingot.verify(path)
    assert not report.ok
    assert len(report.missing) == 2_900_000


def test_names_of_other_tensors_and_tensors_without_digest_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    zeros = ORACLES["xxh3"](bytes(12))
    record = json.dumps({"algorithm": "xxh3", "tensors": {"a": zeros, "gone": zeros}})
    path.write_bytes(safetensors.torch.save({"a": torch.zeros(3), "new": torch.zeros(1)}, {KEY: record}))
    report = ingot.verify(path)
    assert (report.ok, report.checked, report.bad) == (False, 1, [])
    assert (report.unchecked, report.missing) == (["new"], ["gone"])
    assert "tensor `gone`: has a digest and is not there" in str(report)
    with pytest.raises(ingot.IntegrityError) as caught:
        ingot.torch.load_file(path, verify=True)
    assert (caught.value.code, caught.value.tensor) == ("no-digest", "new")


def test_a_file_without_digests_is_not_vouched_for(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, path)
    report = ingot.verify(path)
    assert (report.ok, report.algorithm, report.checked) == (False, None, 0)
    assert len(report.unchecked) == len(tensors)
    with pytest.raises(ingot.IntegrityError, match="keeps no digest"):
        ingot.torch.load_file(path, verify=True)
    whole = hashlib.sha256(path.read_bytes()).hexdigest()
    assert ingot.verify(path, expected_sha256=whole).ok
    assert ingot.verify(path, expected_sha256="0x" + whole.upper()).ok
    report = ingot.verify(path, expected_sha256="0" * 64)
    assert (report.ok, report.file.found, report.file.same) == (False, whole, False)
    for wrong in ("", "abc", whole[:-1] + "g"):
        with pytest.raises(ingot.OptionError):
            ingot.verify(path, expected_sha256=wrong)


# --- loads that compare ---


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("algorithm", [*sorted(ORACLES), "modelspec"])
def test_a_load_that_verifies_gives_what_one_that_does_not_gives(
    tmp_path: Path, tensors: dict[str, torch.Tensor], algorithm: str, backend: str
) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, path, checksums=algorithm)
    whole = hashlib.sha256(path.read_bytes()).hexdigest()
    for options in ({"verify": True}, {"expected_sha256": whole}, {"verify": True, "expected_sha256": whole}):
        loaded = ingot.torch.load_file(path, backend=backend, **options)
        assert list(loaded) == list(ingot.torch.load_file(path))
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        # Of its own memory: the file may change.
    before = loaded["large"].clone()
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(loaded["large"], before)


def test_a_load_compares_the_whole_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, path)
    whole = hashlib.sha256(path.read_bytes()).hexdigest()
    flip(path, path.stat().st_size - 1)
    with pytest.raises(ingot.IntegrityError) as caught:
        ingot.torch.load_file(path, expected_sha256=whole)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.code, error.tensor, error.expected) == ("digest-mismatch", None, whole)
    assert error.found == hashlib.sha256(path.read_bytes()).hexdigest()
    # A change of the metadata alone is one of the file too.
    ingot.torch.save_file(tensors, path, {"a": "b"})
    with pytest.raises(ingot.IntegrityError):
        ingot.torch.load_file(path, expected_sha256=whole)


def test_every_framework_verifies(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    ingot.numpy.save_file({"a": np.arange(5.0)}, path, checksums="blake3")
    assert np.array_equal(ingot.numpy.load_file(path, verify=True)["a"], np.arange(5.0))
    flip(path, path.stat().st_size - 1)
    with pytest.raises(ingot.IntegrityError, match="tensor `a`"):
        ingot.numpy.load_file(path, verify=True)


def test_many_small_and_large_tensors_in_one_file_verify(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = [int(n) for n in rng.integers(0, 9000, 3000)] + [3 << 20, (1 << 20) + 1, 1 << 20, (9 << 20) - 3]
    rng.shuffle(sizes)
    arrays = {f"t{i:04}": rng.integers(0, 255, n, np.uint8) for i, n in enumerate(sizes)}
    path = tmp_path / "many.safetensors"
    for algorithm in ORACLES:
        ingot.numpy.save_file(arrays, path, checksums=algorithm)
        assert ingot.verify(path).ok
        loaded = ingot.numpy.load_file(path, verify=True)
        assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())


# --- save_with_checksum ---


@pytest.mark.parametrize("hasher", [hashlib.sha1, hashlib.sha256, hashlib.md5, hashlib.blake2b])
def test_save_with_checksum_gives_what_bintensors_gives(hasher: object) -> None:
    metadata = {"a": "b"}
    some = {"x": torch.randn(3, 4), "y": torch.arange(5)}
    assert ingot.torch.save_with_checksum(some, metadata, hasher, format="bintensors") == theirs_torch(
        some, metadata, hasher
    )
    arrays = {name: tensor.numpy() for name, tensor in some.items()}
    assert ingot.numpy.save_with_checksum(arrays, metadata, hasher, format="bintensors") == theirs_numpy(
        arrays, metadata, hasher
    )


def test_save_with_checksum_takes_names_and_both_formats() -> None:
    arrays = {"x": np.arange(4)}
    for module, some in ((ingot.numpy, arrays), (ingot.torch, {"x": torch.arange(4)})):
        digest, file = module.save_with_checksum(some)
        assert file == module.save(some)
        assert digest == hashlib.sha1(file).digest()
        digest, file = module.save_with_checksum(some, hasher="sha3_512", format="bintensors")
        assert digest == hashlib.sha3_512(file).digest()
        with pytest.raises(ingot.OptionError):
            module.save_with_checksum(some, hasher="crc32")


def test_a_checkpoint_of_several_files_is_verified_as_one(tmp_path: Path) -> None:
    state = {f"layers.{i}": torch.arange(1000.0) + i for i in range(6)}
    ingot.torch.save_sharded(state, tmp_path, 9000, checksums="blake3")
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) == 3
    told: list[tuple[int, int]] = []
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        told.clear()
        report = ingot.verify(path, progress=lambda *pair: told.append(pair))
        assert report.ok
        assert (report.checked, report.algorithm) == (6, "blake3")
        assert list(report.shards) == shards
        assert all(shard.checked == 2 for shard in report.shards.values())
        assert str(report) == "ok: 6 tensors checked by blake3 in 3 files"
        whole = sum((tmp_path / shard).stat().st_size for shard in shards)
        assert told[-1] == (whole, whole)
        assert told == sorted(told)

    damaged = tmp_path / shards[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    report = ingot.verify(tmp_path)
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
