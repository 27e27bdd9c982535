"""Valid tensors of a broken file: read by a lenient handle, and rewritten by `ingot.repair`."""

from __future__ import annotations

import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

import ingot
import ingot.numpy
import ingot.torch
from support.errors import raises
from support.hostile_files import file_of
from support.processes import run
from vectors.case import Vector, vectors

# Rejected vectors that are files of tensors and need no special limit.
REJECTED = [
    vector
    for vector in vectors()
    if not vector.accepted and vector.limit is None and vector.name != "index-json"
]


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def broken(path: Path) -> Path:
    """Write a file with a valid tensor and one with each kind of fault."""
    header = {
        "__metadata__": {"format": "pt", "step": 1000, "config": {"layers": 2}},
        "sound": entry("F32", [2], 4, 12),
        "unknown": entry("F17", [2], 12, 16),
        "large": entry("F32", [5], 16, 20),
        "one": entry("U8", [4], 20, 24),
        "other": entry("U8", [4], 22, 26),
        "cut": entry("F32", [4], 28, 44),
    }
    return write(path, header, bytes(4) + numpy.array([1.5, -2.5], "<f4").tobytes() + bytes(20))


LEFT_OUT = {
    "unknown": "unknown-dtype",
    "large": "size-mismatch",
    "one": "overlap",
    "other": "overlap",
    "cut": "truncated",
}


def test_safe_open_lenient_reads_sound_tensors_and_lists_the_others(broken: Path, backend: str) -> None:
    with pytest.raises(ingot.HeaderError):
        ingot.safe_open(broken, "np", backend=backend)
    with ingot.safe_open(broken, "np", backend=backend, lenient=True) as file:
        assert file.keys() == file.offset_keys() == ["sound"]
        assert file["sound"].tolist() == [1.5, -2.5]
        assert file.metadata() == {"format": "pt", "step": "1000", "config": '{"layers": 2}'}
        unsound = file.unsound
        assert {name: error.code for name, error in unsound.items()} == LEFT_OUT
        assert "cut" not in file
        for name, error in unsound.items():
            for read in (file.get_tensor, file.get_slice, file.info):
                with pytest.raises(ingot.HeaderError) as caught:
                    read(name)
                assert (str(caught.value), caught.value.code) == (str(error), error.code)
            assert (error.tensor, error.path) == (name, str(broken))
        with pytest.raises(ingot.TensorNotFoundError):
            file.get_tensor("absent")


def test_safe_open_lenient_is_pickled(broken: Path) -> None:
    with ingot.safe_open(broken, "np", lenient=True) as file:
        again = pickle.loads(pickle.dumps(file))
    assert set(again.unsound) == set(LEFT_OUT)
    assert again["sound"].tolist() == [1.5, -2.5]


def test_safe_open_lenient_reads_buffers_and_open_files(broken: Path) -> None:
    with broken.open("rb") as opened:
        for source in (bytearray(broken.read_bytes()), opened):
            with ingot.safe_open(source, "np", lenient=True) as file:
                assert file["sound"].tolist() == [1.5, -2.5]
                assert set(file.unsound) == set(LEFT_OUT)


def test_safe_open_lenient_reads_a_sound_file_as_usual(path: Path) -> None:
    ingot.numpy.save_file({"a": numpy.arange(3)}, path)
    with ingot.safe_open(path, "np", lenient=True) as file:
        assert file.unsound == {}
        assert file["a"].tolist() == [0, 1, 2]
    with ingot.safe_open(path, "np") as file:
        assert file.unsound == {}


def test_safe_open_rejects_strict_with_lenient(path: Path) -> None:
    ingot.numpy.save_file({"a": numpy.arange(3)}, path)
    with raises(ingot.errors.OptionError, "strict and lenient", code="strict-and-lenient"):
        ingot.safe_open(path, "np", strict=True, lenient=True)


def test_safe_open_lenient_reads_a_truncated_shard(tmp_path: Path) -> None:
    tensors = {f"layer.{number}": numpy.full(1000, number, "f4") for number in range(6)}
    whole = tmp_path / "whole.safetensors"
    ingot.numpy.save_file(tensors, whole)
    ingot.split(whole, tmp_path / "shards", 8000)
    shard = tmp_path / "shards" / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    with ingot.safe_open(tmp_path / "shards", "np", lenient=True) as file:
        assert list(file.unsound) == ["layer.3"]
        assert file.unsound["layer.3"].path == str(shard)
        assert file.offset_keys() == [f"layer.{number}" for number in (0, 1, 2, 4, 5)]
        for name in file.offset_keys():
            assert numpy.array_equal(file[name], tensors[name])
    done = ingot.repair(tmp_path / "shards", tmp_path / "mended.safetensors")
    assert done.left_out == ("layer.3",)
    assert sorted(ingot.numpy.load_file(done.destination)) == sorted(tensors.keys() - {"layer.3"})


def test_repair_writes_sound_tensors_and_reports_changes(broken: Path, tmp_path: Path) -> None:
    before = broken.read_bytes()
    done = ingot.repair(broken, tmp_path / "mended.safetensors")
    assert broken.read_bytes() == before
    assert (done.source, done.destination) == (str(broken), str(tmp_path / "mended.safetensors"))
    assert (done.format, done.tensors, done.nbytes) == ("safetensors", 1, 8)
    assert [(one.code, one.tensor, one.done) for one in done.findings] == [
        ("invalid-metadata", None, "made-text"),
        ("invalid-metadata", None, "made-text"),
        ("unknown-dtype", "unknown", "tensor-left-out"),
        ("size-mismatch", "large", "tensor-left-out"),
        ("truncated", "cut", "tensor-left-out"),
        ("overlap", "other", "tensor-left-out"),
        ("overlap", "one", "tensor-left-out"),
        ("hole", "sound", "bytes-left-out"),
        ("hole", "cut", "bytes-left-out"),
    ]
    found = {one.tensor: one.found for one in done.findings}
    assert found["unknown"] == "unknown dtype `F17`"
    assert found["large"] == "shape [5] of F32 needs 20 bytes, header gives 16..20"
    assert sorted(done.left_out) == sorted(LEFT_OUT)
    assert "unknown dtype" in done._repr_html_()
    theirs = safetensors.numpy.load_file(done.destination)
    assert {name: array.tolist() for name, array in theirs.items()} == {"sound": [1.5, -2.5]}
    with ingot.safe_open(done.destination, "np", strict=True) as file:
        assert file.metadata() == {"format": "pt", "step": "1000", "config": '{"layers": 2}'}


@pytest.mark.parametrize("vector", REJECTED, ids=str)
def test_repair_fixes_or_explains_every_rejected_vector(vector: Vector, tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "mended.safetensors"
    source.write_bytes(vector.file())
    try:
        done = ingot.repair(source, destination)
    except ingot.SafetensorError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert str(refusal).isprintable()
        assert refusal.path in (str(source), str(destination))
        assert os.listdir(tmp_path) == ["source"]
        return
    # Invalid JSON within an entry is a fault of this entry.
    codes = {one.code for one in done.findings}
    assert vector.code in codes or (vector.code == "invalid-json" and codes)
    assert all(one.found.isprintable() for one in done.findings)
    # The repaired file is valid for all readers, and has the tensors of the lenient handle.
    theirs = safetensors.safe_open(destination, "np")
    with ingot.safe_open(source, "np", lenient=True) as lenient:
        ours = ingot.safe_open(destination, "np", strict=True)
        assert ours.keys() == sorted(theirs.keys()) == lenient.keys()
        assert ours.metadata() == lenient.metadata()
        for name in lenient:
            was, now = lenient.info(name), ours.info(name)
            assert (was.dtype, was.shape) == (now.dtype, now.shape)
            data = source.read_bytes()[8 + int.from_bytes(source.read_bytes()[:8], "little") :]
            assert bytes_of(destination, name) == data[was.begin : was.end]
    assert ingot.repair(destination, tmp_path / "again.safetensors").findings == ()


def bytes_of(path: Path, name: str) -> bytes:
    found: bytes = dict(ingot.deserialize(path.read_bytes()))[name]["data"]
    return found


# Codes of files without a usable header: its length is wrong, or the file has another format.
HOPELESS = {"too-short", "header-too-large", "header-past-end", "foreign-file", "invalid-option"}


def is_understood(path: Path) -> bool:
    try:
        with ingot.safe_open(path, "np", lenient=True) as file:
            file.keys()
    except ingot.HeaderError:
        return False
    return True


def test_repair_fails_for_few_vectors(tmp_path: Path) -> None:
    source, outcome = tmp_path / "source", dict[bool, set[str]]()
    for vector in REJECTED:
        source.write_bytes(vector.file())
        outcome.setdefault(is_understood(source), set()).add(str(vector.code))
    assert outcome[True].isdisjoint(HOPELESS)
    assert outcome[True] >= {
        "duplicate-field",
        "duplicate-metadata-key",
        "duplicate-tensor",
        "hole",
        "invalid-entry",
        "invalid-metadata",
        "invalid-padding",
        "invalid-utf8",
        "missing-field",
        "overlap",
        "partial-byte",
        "reversed-range",
        "size-mismatch",
        "size-overflow",
        "trailing-bytes",
        "truncated",
        "unknown-dtype",
    }


names = st.text("abc", min_size=1, max_size=2)
offsets = st.integers(0, 40)
entries = st.builds(
    lambda dtype, shape, begin, nbytes: entry(dtype, shape, begin, begin + nbytes),
    st.sampled_from(["U8", "F32", "F17"]),
    st.lists(st.integers(0, 6), max_size=2),
    offsets,
    offsets,
)
sound_entries = st.builds(
    lambda begin, nbytes: entry("U8", [nbytes], begin, begin + nbytes), offsets, offsets
)
values = st.one_of(st.text(max_size=3), st.integers(), st.none(), st.lists(st.booleans(), max_size=2))


@given(
    tensors=st.dictionaries(names, st.one_of(sound_entries, entries), max_size=6),
    metadata=st.one_of(st.none(), st.dictionaries(st.text(max_size=3), values, max_size=3)),
    data=st.binary(max_size=60),
)
def test_repair_keeps_the_bytes_of_undamaged_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, dict[str, Any]],
    metadata: dict[str, Any] | None,
    data: bytes,
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    source = write(folder / "source", {"__metadata__": metadata, **tensors}, data)
    alone = {
        name: data[slice(*one["data_offsets"])]
        for name, one in tensors.items()
        if is_sound(one, len(data))
        and not any(meet(one, other) for key, other in tensors.items() if key != name)
    }
    try:
        done = ingot.repair(source, folder / "mended.safetensors")
    except ingot.HeaderError:
        assert not alone
        return
    mended = {
        name: bytes(one["data"]) for name, one in ingot.deserialize(Path(done.destination).read_bytes())
    }
    assert mended.items() >= alone.items()
    assert set(mended) | set(done.left_out) == set(tensors)
    assert Path(done.destination).stat().st_size <= source.stat().st_size + 1000
    theirs = safetensors.safe_open(done.destination, "np")
    assert sorted(theirs.keys()) == sorted(mended)


def is_sound(one: dict[str, Any], nbytes: int) -> bool:
    begin, end = one["data_offsets"]
    return one["dtype"] == "U8" and one["shape"] == [end - begin] and begin < end <= nbytes


def meet(one: dict[str, Any], other: dict[str, Any]) -> bool:
    (begin, end), (start, stop) = one["data_offsets"], other["data_offsets"]
    return bool(begin < stop and start < end)


def test_repair_without_sound_tensors_writes_nothing(path: Path, tmp_path: Path) -> None:
    write(path, {"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 16, 32)}, bytes(8))
    with raises(
        ingot.HeaderError,
        "none of 2 tensors is sound: tensor `a`: the file is 8",
        code="truncated",
        tensor="a",
    ):
        ingot.repair(path, tmp_path / "mended.safetensors")
    assert os.listdir(tmp_path) == [path.name]


def test_repair_writes_the_format_of_the_name(broken: Path, tmp_path: Path) -> None:
    done = ingot.repair(broken, tmp_path / "mended.bt")
    assert done.format == "bintensors"
    assert ingot.numpy.load_file(done.destination)["sound"].tolist() == [1.5, -2.5]


def test_repair_drops_a_broken_alias_record(path: Path, tmp_path: Path) -> None:
    write(path, {"__metadata__": {"ingot.shared": "{", "k": "v"}, "a": entry("U8", [4], 0, 4)}, bytes(4))
    with raises(ingot.SafetensorError, code="invalid-alias"):
        ingot.rewrite(path, tmp_path / "other.safetensors")
    done = ingot.repair(path, tmp_path / "mended.safetensors")
    assert [(one.code, one.done) for one in done.findings] == [("invalid-alias", "value-left-out")]
    assert ingot.safe_open(done.destination, "np").metadata() == {"k": "v"}


def test_repair_reports_both_names_of_a_truncated_tensor(path: Path, tmp_path: Path) -> None:
    record = {"b": {"of": "a"}}
    header = {
        "__metadata__": {"ingot.shared": json.dumps(record)},
        "z": entry("U8", [4], 0, 4),
        "a": entry("U8", [4], 4, 8),
    }
    write(path, header, bytes(6))
    done = ingot.repair(path, tmp_path / "mended.safetensors")
    assert done.left_out == ("a", "b")
    assert done.findings[1].found.endswith("gives it `a`, which is left out")
    assert list(ingot.torch.load_file(done.destination)) == ["z"]


def test_repair_drops_a_broken_digest_record(path: Path, tmp_path: Path) -> None:
    write(path, {"__metadata__": {"ingot.checksums": "{"}, "a": entry("U8", [4], 0, 4)}, bytes(4))
    done = ingot.repair(path, tmp_path / "mended.safetensors")
    assert [(one.code, one.done) for one in done.findings] == [("invalid-checksums", "value-left-out")]
    assert ingot.safe_open(done.destination, "np").metadata() in (None, {})


def test_repair_keeps_digests_and_aliases(path: Path, tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    tensors = {"a": shared, "b": shared, "c": torch.ones(4)}
    ingot.torch.save_file(tensors, path, shared="alias", checksums="xxh3")
    with path.open("ab") as file:
        file.write(b"trailing")
    done = ingot.repair(path, tmp_path / "mended.safetensors")
    assert [(one.code, one.done) for one in done.findings] == [("trailing-bytes", "bytes-left-out")]
    assert sorted(ingot.torch.load_file(done.destination)) == ["a", "b", "c"]
    assert ingot.verify(done.destination).ok


def test_repair_leaves_no_file_if_the_source_shrinks(path: Path, tmp_path: Path) -> None:
    nbytes = 64 << 20
    header = json.dumps({"a": entry("U8", [nbytes], 0, nbytes), "b": entry("U8", [9], nbytes, nbytes + 9)})
    file_of(header.encode(), nbytes, path)
    shortened = threading.Event()

    def tell(done: int, total: int) -> None:
        if not shortened.is_set():
            os.truncate(path, 1000)
            shortened.set()

    with pytest.raises(ingot.StorageError):
        ingot.repair(path, tmp_path / "mended.safetensors", progress=tell)
    assert shortened.is_set()
    assert os.listdir(tmp_path) == [path.name]


HOSTILE = """
before = memory("VmHWM")
try:
    ingot.repair("hostile.safetensors", "mended.safetensors")
except ingot.HeaderError as error:
    say([error.code, memory("VmHWM") - before])
"""


@pytest.mark.slow
def test_repair_of_a_faulty_header_takes_bounded_memory(tmp_path: Path) -> None:
    # Ten million faults. ingot keeps a million of them.
    header = b"{" + b",".join(b'"":1' for _ in range(10_000_000)) + b"}"
    file_of(header, 0, tmp_path / "hostile.safetensors")
    code, nbytes = run(HOSTILE, folder=tmp_path).said()
    assert code == "invalid-entry"
    assert nbytes < 500_000_000
    assert os.listdir(tmp_path) == ["hostile.safetensors"]
