"""Hashes of files."""

from __future__ import annotations

import hashlib
import inspect
import signal
import struct
import threading
import time
import zlib
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from bintensors.numpy import load_file as theirs_load_file
from bintensors.numpy import save_file as theirs_save_file
from bintensors.numpy import save_with_checksum as theirs_numpy
from bintensors.torch import save_with_checksum as theirs_torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot
import ingot.numpy
import ingot.torch
from ingot.compat.bintensors import numpy as of_numpy
from ingot.compat.bintensors import torch as of_torch
from support.digests import ORACLES
from support.progress import Progress


@given(
    data=st.one_of(
        st.binary(max_size=4000), st.integers(0, 5 << 20).map(lambda n: bytes(range(256)) * (n // 256))
    )
)
@settings(max_examples=30, deadline=None)
def test_hash_equals_other_programs(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("hash") / "file"
    path.write_bytes(data)
    for name, oracle in ORACLES.items():
        assert ingot.hash(path, name) == oracle(data), name
    for name in ("md5", "sha1", "sha512", "sha3_256", "blake2b"):
        assert ingot.hash(path, name) == hashlib.new(name, data).hexdigest(), name


def test_hash_equals_those_of_other_tools(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
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
    assert ingot.hash(path, "autov3_short") == data_section[:12]
    assert ingot.hash(path, "crc32") == f"{zlib.crc32(data):08x}"
    assert ingot.hash(path, "modelspec") == "0x" + data_section
    # Trainers hash an in-memory file whose metadata has only the keys that begin with `ss_`.
    alone = safetensors.torch.save(tensors, {k: v for k, v in metadata.items() if k.startswith("ss_")})
    assert ingot.hash(path, "sshs_legacy") == hashlib.sha256(alone[0x100000:0x110000]).hexdigest()[:8]


@pytest.mark.parametrize("count", [0, 3, 20_000])
def test_hash_legacy_covers_long_headers_and_short_files(tmp_path: Path, count: int) -> None:
    # With 20,000 tensors the header passes 1 MiB, so that the window covers header and data.
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


def test_hash_reads_the_data_section_of_bt(tmp_path: Path) -> None:
    path = tmp_path / "a.bt"
    ingot.numpy.save_file({"a": np.arange(5)}, path)
    assert ingot.hash(path, "autov3") == hashlib.sha256(np.arange(5).tobytes()).hexdigest()


def test_hash_of_tensors_rejects_other_files(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("no tensors here, and longer than eight bytes")
    assert ingot.hash(path, "autov1") == "e3b0c442"
    for name in ("autov3", "modelspec", "sshs_legacy"):
        with pytest.raises(ingot.HeaderError):
            ingot.hash(path, name)


def test_hash_lists_algorithms_for_an_unknown_one(tmp_path: Path) -> None:
    for name in ("crc64", "shake_128", ""):
        with pytest.raises(ingot.OptionError, match="expected one of blake3, sha256") as caught:
            ingot.hash(tmp_path / "x", name)
        assert caught.value.code == "unknown-algorithm"
    with pytest.raises(FileNotFoundError):
        ingot.hash(tmp_path / "x")
    with pytest.raises(IsADirectoryError):
        ingot.hash(tmp_path)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals to threads are a Unix thing")
@pytest.mark.parametrize("algorithm", ["sha256", "blake3"])
def test_hash_ends_after_ctrl_c(tmp_path: Path, algorithm: str) -> None:
    path = tmp_path / "hole"
    with open(path, "wb") as file:
        # A sparse file, too long to be hashed before the signal comes.
        file.truncate(1 << 40)
    main = threading.get_ident()

    def interrupted_hash() -> None:
        threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        ingot.hash(path, algorithm)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted_hash()
    assert time.monotonic() - start < 30


def test_hash_reports_progress_and_may_be_stopped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(9 << 20))
    told = Progress()
    for algorithm in ORACLES:
        told.clear()
        ingot.hash(path, algorithm, progress=told)
        told.assert_complete(9 << 20)

    def stop(_done: int, _total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        ingot.hash(path, "blake3", progress=stop)


@pytest.mark.parametrize("hasher", [hashlib.sha1, hashlib.sha256, hashlib.md5, hashlib.blake2b])
def test_save_with_checksum_equals_bintensors(hasher: object) -> None:
    metadata = {"a": "b"}
    some = {"x": torch.randn(3, 4), "y": torch.arange(5)}
    assert of_torch.save_with_checksum(some, metadata, hasher) == theirs_torch(some, metadata, hasher)
    arrays = {name: tensor.numpy() for name, tensor in some.items()}
    assert of_numpy.save_with_checksum(arrays, metadata, hasher) == theirs_numpy(arrays, metadata, hasher)


@pytest.mark.parametrize("module", ["", ".numpy", ".torch"])
def test_compat_bintensors_has_names_and_parameters(module: str) -> None:
    theirs, ours = (import_module(f"{package}{module}") for package in ("bintensors", of_numpy.__package__))
    names = theirs.__all__ if module else ["deserialize", "serialize", "serialize_file", "safe_open"]
    for name in names:
        taken, expected = ([*inspect.signature(getattr(one, name)).parameters] for one in (ours, theirs))
        if name not in ("deserialize", "load_model", "safe_open"):
            assert taken[: len(expected)] == expected, name
    assert issubclass(ours.BintensorError if not module else ingot.SafetensorError, Exception)


def test_compat_bintensors_writes_what_bintensors_reads(tmp_path: Path) -> None:
    arrays = {"x": np.arange(4)}
    for save_file in (of_numpy.save_file, theirs_save_file):
        save_file(arrays, tmp_path / "file", {"k": "v"})
        assert (of_numpy.load_file(tmp_path / "file")["x"] == arrays["x"]).all()
        assert (theirs_load_file(tmp_path / "file")["x"] == arrays["x"]).all()
    assert ingot.open(tmp_path / "file").format == "bintensors"
