"""Files made from tensors of other files, written to a store of S3's protocol and to Azure's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot.errors import OptionError, StorageError
from support import stores
from support.stores import MIB, Fault, Store, Stored

pytest.importorskip("botocore", reason="botocore verifies signatures, and is not installed")

SMALL = {"b": np.arange(7, dtype=np.float32), "c": np.arange(500)}
#: In parts: the last one is short.
LARGE = {"a": np.arange(17 * MIB // 8), **SMALL}
OLD = Stored(b"old", {})


@pytest.fixture(params=["s3", "azure"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "azure":
        pytest.importorskip("azure.storage.blob", reason="Azure's SDK verifies signatures")
    with stores.running(kind=stores.Azure if request.param == "azure" else Store) as store:
        yield store


def url(store: Store, name: str = "") -> str:
    return f"{'az' if isinstance(store, stores.Azure) else 's3'}://models/run/{name}"


def merge(source: Path | str, destination: object, **options: object) -> None:
    ingot.merge([source], destination, **options)  # type: ignore[arg-type]


def rewrite(source: Path | str, destination: object, **options: object) -> None:
    ingot.rewrite(source, destination, rename={"b": "bias"}, **options)  # type: ignore[arg-type]


MAKING = pytest.mark.parametrize("make", [merge, rewrite])
SIZES = pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])


@MAKING
@SIZES
@pytest.mark.parametrize("checksums", [None, "sha256"], ids=["without digests", "with digests"])
def test_file_in_a_store_equals_a_local_one(
    store: Store,
    tmp_path: Path,
    make: Callable[..., None],
    tensors: dict[str, np.ndarray],
    checksums: str | None,
) -> None:
    source, local = tmp_path / "a.safetensors", tmp_path / "b.bt"
    ingot.numpy.save_file(tensors, source, {"who": "me"})
    make(source, local, checksums=checksums)
    make(source, url(store, "b.bt"), checksums=checksums, storage_options=store.options)
    assert store.data("/models/run/b.bt") == local.read_bytes()
    assert store.uploads == {}


def test_object_of_a_store_is_the_source_and_the_destination(store: Store, tmp_path: Path) -> None:
    ingot.numpy.save_file(LARGE, tmp_path / "a.bt")
    rewrite(tmp_path / "a.bt", tmp_path / "b.bt")
    ingot.upload(tmp_path / "a.bt", url(store, "a.bt"), storage_options=store.options)
    rewrite(url(store, "a.bt"), url(store, "a.bt"), overwrite=True, storage_options=store.options)
    assert store.data("/models/run/a.bt") == (tmp_path / "b.bt").read_bytes()


@MAKING
@SIZES
def test_existing_object_stays_without_overwrite(
    store: Store, tmp_path: Path, make: Callable[..., None], tensors: dict[str, np.ndarray]
) -> None:
    ingot.numpy.save_file(tensors, tmp_path / "a.bt")
    store.objects["/models/run/b.bt"] = OLD
    with pytest.raises(FileExistsError, match="overwrite=True") as caught:
        make(tmp_path / "a.bt", url(store, "b.bt"), storage_options=store.options)
    assert caught.value.filename == url(store, "b.bt")
    assert store.asked == ["head"]
    assert store.objects == {"/models/run/b.bt": OLD}


@MAKING
@SIZES
def test_refused_request_leaves_the_old_object(
    store: Store, tmp_path: Path, make: Callable[..., None], tensors: dict[str, np.ndarray]
) -> None:
    ingot.numpy.save_file(tensors, tmp_path / "a.bt")
    store.objects["/models/run/b.bt"] = OLD
    store.faults = [Fault("put", 0, "refused", 9), Fault("part", 1, "refused", 9)]
    with pytest.raises(PermissionError):
        make(tmp_path / "a.bt", url(store, "b.bt"), overwrite=True, storage_options=store.options)
    assert store.objects == {"/models/run/b.bt": OLD}
    assert isinstance(store, stores.Azure) or store.uploads == {}


@SIZES
def test_source_that_changes_makes_no_object(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    path = tmp_path / "a.safetensors"
    ingot.numpy.save_file(tensors, path)
    original = path.stat().st_mtime_ns

    def change(kind: str) -> None:
        # Before the object, or before its parts.
        if kind in ("begin", "delete") and path.stat().st_mtime_ns == original:
            os.utime(path, ns=(original + 10**9, original + 10**9))

    with stores.running() as store:
        store.watch = change
        with pytest.raises(StorageError) as caught:
            ingot.merge([path], url(store, "b.safetensors"), storage_options=store.options)
    assert caught.value.code == "overtaken"
    assert caught.value.path == str(path)
    assert (store.objects, store.uploads) == ({}, {})


# Sharded checkpoints. --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1500, "5GB"], ids=["several", "one"])
def test_split_writes_shards_and_then_the_index(store: Store, tmp_path: Path, size: int | str) -> None:
    many = {f"{number}": np.arange(100.0) + number for number in range(5)}
    ingot.numpy.save_file(many, tmp_path / "a.safetensors", {"who": "me"})
    ingot.split(tmp_path / "a.safetensors", url(store), size, storage_options=store.options)
    index = json.loads(store.data("/models/run/model.safetensors.index.json") or b"")
    assert index["metadata"]["who"] == "me"
    assert store.server.requests[-1].path.endswith("model.safetensors.index.json")
    names = set(index["weight_map"].values())
    assert {f"/models/run/{name}" for name in names} == set(store.objects) - {
        "/models/run/model.safetensors.index.json"
    }
    found = ingot.numpy.load_file(url(store), storage_options=store.options)
    assert all(np.array_equal(found[name], many[name]) for name in many)


def test_split_replaces_the_index_only(store: Store, tmp_path: Path) -> None:
    ingot.numpy.save_file(SMALL, tmp_path / "a.safetensors")
    ingot.split(tmp_path / "a.safetensors", url(store), 100, storage_options=store.options)
    before = dict(store.objects)
    with pytest.raises(FileExistsError):
        ingot.split(tmp_path / "a.safetensors", url(store), 100, storage_options=store.options)
    assert store.objects == before
    ingot.numpy.save_file({"new": np.ones(3)}, tmp_path / "b.safetensors")
    store.asked.clear()
    store.faults = [Fault("put", 0, "refused")]
    with pytest.raises(PermissionError):
        ingot.split(tmp_path / "b.safetensors", url(store), overwrite=True, storage_options=store.options)
    assert store.objects == before
    store.faults = []
    # The source is the checkpoint that is replaced.
    ingot.split(url(store), url(store), "5GB", overwrite=True, storage_options=store.options)
    found = ingot.numpy.load_file(url(store), storage_options=store.options)
    assert sorted(found) == sorted(SMALL)
    assert len(store.objects) == len(before) + 1


def test_options_that_need_a_path_are_rejected(store: Store, tmp_path: Path) -> None:
    ingot.numpy.save_file(SMALL, tmp_path / "a.bt")
    options = {"write_options": {"replace_read_only": True}, "storage_options": store.options}
    for make in (merge, rewrite, ingot.split):
        with pytest.raises(OptionError, match="replace_read_only") as caught:
            make(tmp_path / "a.bt", url(store, "b.bt"), **options)  # type: ignore[operator]
        assert caught.value.code == "url-for-path"
    assert store.asked == []
