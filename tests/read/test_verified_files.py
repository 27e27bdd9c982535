"""Verification of files and of loads by digests."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import ingot
import ingot.numpy
import ingot.torch
from support.digests import KEY, ORACLES, flip
from support.errors import raises


def stored(path: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor, found without ingot."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    start = 8 + length
    return {
        name: data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def test_digests_cover_the_written_bytes(tmp_path: Path) -> None:
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


def test_verify_covers_selected_tensors(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
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
    assert list(ingot.torch.load_file(path, keys="lar*", verify=True)) == ["large"]
    with raises(ingot.IntegrityError, code="digest-mismatch", tensor="bytes"):
        ingot.torch.load_file(path, keys=["large", "bytes"], verify=True)
    with raises(ingot.IntegrityError, "the bytes have another digest", code="digest-mismatch", tensor=None):
        ingot.torch.load_file(path, keys=["large"], expected_sha256=sha256)


PROOFS = ["verify", "expected_sha256", "both"]


def proof_of(path: Path, kind: str) -> dict[str, Any]:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"verify": {"verify": True}, "expected_sha256": {"expected_sha256": sha256}}.get(
        kind, {"verify": True, "expected_sha256": sha256}
    )


def few() -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(60, dtype=torch.float32).reshape(12, 5) / 7,
        "brain": torch.arange(4, dtype=torch.bfloat16),
        "count": torch.tensor(3),
        "none": torch.zeros(0, 2),
        "small": torch.arange(6, dtype=torch.float32).reshape(2, 3).to(torch.float8_e4m3fn),
    }


def empty(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name].double(), theirs[name].double())
        for name in theirs
    )


# Loads that slice, convert or fill memory while they verify.
LOADS: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "slices": lambda path, **how: ingot.torch.load_file(path, slices={"rows": (slice(2, 5), 0)}, **how),
    "dtype": lambda path, **how: ingot.torch.load_file(path, dtype="F16", **how),
    "out": lambda path, **how: ingot.torch.load_file(path, out=empty(few()), **how),
    "some of out": lambda path, **how: ingot.torch.load_file(path, out={"rows": torch.zeros(12, 5)}, **how),
    "out, transposed": lambda path, **how: ingot.torch.load_file(
        path, keys=["rows"], out={"rows": torch.zeros(5, 12).T}, **how
    ),
    "several of out": lambda path, **how: dict(
        zip(
            "ab",
            ingot.torch.load_file(
                path,
                keys=["rows"],
                slices={"rows": [slice(0, 1), slice(3, None)]},
                out={"rows": [torch.zeros(1, 5), torch.zeros(9, 5)]},
                **how,
            )["rows"],
            strict=True,
        )
    ),
    "load_into": lambda path, **how: into(path, empty(few()), **how),
    "load_into, converted": lambda path, **how: into(
        path, empty(few()) | {"rows": torch.zeros(12, 5, dtype=torch.bfloat16)}, **how
    ),
    "load_into, converted by torch": lambda path, **how: into(
        path, empty(few()) | {"rows": torch.zeros(12, 5, dtype=torch.int64)}, **how
    ),
    "load_into, by way of dtype": lambda path, **how: into(path, empty(few()), dtype="BF16", **how),
    "load_model": lambda path, **how: modelled(path, **how),
}


def into(path: Path, tensors: dict[str, torch.Tensor], **how: Any) -> dict[str, torch.Tensor]:
    ingot.torch.load_into(tensors, path, **how)
    return tensors


def modelled(path: Path, **how: Any) -> dict[str, torch.Tensor]:
    model = torch.nn.Module()
    for name, tensor in empty(few()).items():
        model.register_buffer(name, tensor)
    ingot.torch.load_model(model, path, **how)
    return model.state_dict()


@pytest.mark.parametrize("kind", PROOFS)
@pytest.mark.parametrize("load", LOADS)
def test_verify_covers_every_load(tmp_path: Path, load: str, backend: str, kind: str) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(few(), path, checksums="blake3")
    proof = proof_of(path, kind)
    expected = LOADS[load](path)
    assert equal(LOADS[load](path, backend=backend, **proof), expected)
    # Change a byte that no slice selects.
    data = path.read_bytes()
    at = data.index(few()["rows"].numpy().tobytes()) + few()["rows"].nbytes - 1
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    told: list[int] = []
    with raises(ingot.IntegrityError, code="digest-mismatch") as caught:
        LOADS[load](path, backend=backend, progress=lambda done, total: told.append(done), **proof)
    assert caught.value.tensor == (None if kind == "expected_sha256" else "rows") or kind == "both"
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("load", ["out", "out, transposed", "load_into", "load_into, converted"])
def test_verify_error_warns_of_filled_destinations(tmp_path: Path, load: str) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(few(), path, checksums="sha256")
    data = path.read_bytes()
    at = data.index(few()["rows"].numpy().tobytes())
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(ingot.IntegrityError, match="have unspecified content"):
        LOADS[load](path, verify=True)


def test_verify_covers_modelspec_and_shards_when_filling(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(few(), path, checksums="modelspec")
    assert equal(into(path, empty(few()), verify=True), few())
    ingot.torch.save_sharded(few(), tmp_path / "shards", max_shard_size=100, checksums=True)
    assert equal(into(tmp_path / "shards", empty(few()), verify=True), few())
    ingot.torch.save_file(few(), path)
    with raises(ingot.IntegrityError, code="no-digest"):
        into(path, empty(few()), verify=True)
    array = np.zeros((12, 5), "f4")
    ingot.torch.save_file(few(), path, checksums=True)
    ingot.numpy.load_file(path, keys=["rows"], out={"rows": array}, verify=True)
    assert array[1, 0] == np.float32(5 / 7)


@pytest.mark.parametrize("algorithm", sorted(ORACLES))
def test_verify_names_the_tensor(tmp_path: Path, tensors: dict[str, torch.Tensor], algorithm: str) -> None:
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
            report = ingot.verify(path, raises=False)
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


def test_verify_names_a_truncated_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, path, checksums="blake3")
    os.truncate(path, path.stat().st_size - 1)
    for act in (ingot.verify, lambda path: ingot.torch.load_file(path, verify=True)):
        with raises(ingot.HeaderError, code="truncated"):
            act(path)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("", "EOF"),
        ("{}", "missing field"),
        ('{"algorithm":"blake3","tensors":{"a":1}}', "expected a string"),
        ('{"algorithm":"crc32","tensors":{}}', "unknown algorithm `crc32`"),
        ('{"algorithm":"blake3","tensors":{"a":"00"}}', "tensor `a`: `00` is not a digest of blake3"),
        (
            '{"algorithm":"xxh3","tensors":{"a":"0000000000000000","\\u0061":"0000000000000000"}}',
            "occurs twice",
        ),
        ("[" * 200_000, "expected an object"),
        ('{"x":' + "[" * 200_000, "EOF"),
    ],
    ids=range(8),
)
def test_verify_explains_a_broken_record(tmp_path: Path, record: str, words: str) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(safetensors.torch.save({"a": torch.zeros(3)}, {KEY: record}))
    for act in (ingot.verify, lambda path: ingot.torch.load_file(path, verify=True)):
        with raises(ingot.IntegrityError, words, code="invalid-checksums") as caught:
            act(path)
        assert len(str(caught.value)) < 1000
    assert "a" in ingot.torch.load_file(path)


def test_verify_reads_a_record_of_100_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    names = ",".join(f'\\"{i:08}\\":\\"0123456789abcdef\\"' for i in range(2_900_000))
    header = (
        f'{{"__metadata__":{{"{KEY}":"{{\\"algorithm\\":\\"xxh3\\",\\"tensors\\":{{{names}}}}}"}}}}'.encode()
    )
    assert 90_000_000 < len(header) < 100_000_000
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    report = ingot.verify(path, raises=False)
    assert not report.ok
    assert len(report.missing) == 2_900_000


@pytest.mark.parametrize("algorithm", [*sorted(ORACLES), "modelspec"])
def test_verify_does_not_change_the_result(
    tmp_path: Path, tensors: dict[str, torch.Tensor], algorithm: str, backend: str
) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, path, checksums=algorithm)
    whole = hashlib.sha256(path.read_bytes()).hexdigest()
    for options in ({"verify": True}, {"expected_sha256": whole}, {"verify": True, "expected_sha256": whole}):
        loaded = ingot.torch.load_file(path, backend=backend, **options)
        assert list(loaded) == list(ingot.torch.load_file(path))
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        # The tensors have memory of their own: the file may change.
    before = loaded["large"].clone()
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(loaded["large"], before)


def test_verify_of_a_hash_compares_the_whole_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "file.safetensors"
    ingot.torch.save_file(tensors, path)
    whole = hashlib.sha256(path.read_bytes()).hexdigest()
    flip(path, path.stat().st_size - 1)
    with pytest.raises(ingot.IntegrityError) as caught:
        ingot.torch.load_file(path, expected_sha256=whole)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.code, error.tensor, error.expected) == ("digest-mismatch", None, whole)
    assert error.found == hashlib.sha256(path.read_bytes()).hexdigest()
    # The digest of the file covers its metadata.
    ingot.torch.save_file(tensors, path, {"a": "b"})
    with pytest.raises(ingot.IntegrityError):
        ingot.torch.load_file(path, expected_sha256=whole)


def test_verify_works_in_every_framework(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    ingot.numpy.save_file({"a": np.arange(5.0)}, path, checksums="blake3")
    assert np.array_equal(ingot.numpy.load_file(path, verify=True)["a"], np.arange(5.0))
    flip(path, path.stat().st_size - 1)
    with pytest.raises(ingot.IntegrityError, match="tensor `a`"):
        ingot.numpy.load_file(path, verify=True)


def test_verify_covers_small_and_large_tensors(tmp_path: Path) -> None:
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
