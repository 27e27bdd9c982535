"""Saves to a store of S3's protocol, against a model of each store's rules."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot import _native
from ingot.errors import OptionError, StorageError
from support import stores
from support.record import note
from support.stores import MIB, STORES, Fault, Store, Stored

pytest.importorskip("botocore", reason="botocore verifies signatures, and is not installed")

#: Saves of the generator of faults.
ROUNDS = int(os.environ.get("INGOT_UPLOADS", "20"))
SEED = int(os.environ.get("INGOT_SEED", "0")) or random.SystemRandom().randrange(1 << 32)

SMALL = {"a": np.arange(1000), "b": np.ones(3, np.float32)}
#: In parts: the last one is short.
LARGE = {"a": np.arange(17 * MIB // 8, dtype=np.int64), "b": np.ones(5, np.float32)}
URL, PATH = "s3://models/a b/ü+&=.safetensors", "/models/a b/ü+&=.safetensors"
OLD = Stored(b"old", {})


@pytest.fixture
def store() -> Iterator[Store]:
    with stores.running() as store:
        yield store


def save(tensors: dict[str, np.ndarray], store: Store, url: str = URL, **options: object) -> object:
    given = {**store.options, **options.pop("storage_options", {})}  # type: ignore[dict-item]
    return ingot.numpy.save_file(tensors, url, storage_options=given, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("rules", ["s3", "r2", "without checksums"])
def test_save_file_writes_the_bytes_of_a_local_save(rules: str, tensors: dict[str, np.ndarray]) -> None:
    with stores.running(STORES[rules]) as store:
        save(tensors, store)
        assert store.data(PATH) == ingot.numpy.save(tensors)
        assert store.uploads == {}
        loaded = ingot.numpy.load_file(URL, storage_options=store.options)
        assert np.array_equal(loaded["a"], tensors["a"])


def test_save_file_without_credentials_sends_none() -> None:
    with stores.running(is_signed=False) as store:
        save(LARGE, store)
        assert store.data(PATH) == ingot.numpy.save(LARGE)
        assert not any("authorization" in request.headers for request in store.server.requests)


def test_save_file_sends_parts_at_once_and_completes_last(store: Store) -> None:
    arrived = threading.Barrier(3, timeout=60)
    store.watch = lambda kind: kind == "part" and arrived.wait()
    save(LARGE, store)
    assert store.asked == ["begin", "part", "part", "part", "complete"]


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
def test_save_file_with_digests_sends_the_first_part_last(
    store: Store, tensors: dict[str, np.ndarray]
) -> None:
    save(tensors, store, checksums=["blake3", "modelspec"])
    assert store.data(PATH) == bytes_of(tensors, checksums=["blake3", "modelspec"])
    parts = [one.path for one in store.server.requests if "partNumber" in one.path]
    assert not parts or "partNumber=1&" in parts[-1]
    assert ingot.verify(URL, storage_options=store.options).ok


def bytes_of(tensors: dict[str, np.ndarray], **options: object) -> bytes:
    import io

    file = io.BytesIO()
    ingot.numpy.save_file(tensors, file, **options)  # type: ignore[call-overload]
    return file.getvalue()


@pytest.mark.parametrize("kind", ["torch", "flax"])
def test_save_file_of_other_frameworks_writes_to_a_store(store: Store, kind: str) -> None:
    if kind == "torch":
        torch = pytest.importorskip("torch")
        import ingot.torch

        ingot.torch.save_file({"a": torch.arange(10)}, URL, storage_options=store.options)
    else:
        jax = pytest.importorskip("jax")
        import ingot.flax

        ingot.flax.save_file({"a": jax.numpy.arange(10)}, URL, storage_options=store.options)
    assert ingot.numpy.load_file(URL, storage_options=store.options)["a"].tolist() == list(range(10))


@pytest.mark.parametrize("checksums", [[], ["sha256"]], ids=["without digests", "with digests"])
def test_save_file_fetches_tensors_of_a_framework_on_the_calling_thread(
    store: Store, checksums: list[str]
) -> None:
    data, threads = LARGE["a"].tobytes(), set()

    def fetch(begin: int, end: int) -> bytes:
        threads.add(threading.get_ident())
        return data[begin:end]

    file = _native.prepare(
        URL,
        {"a": None},
        lambda name, tensor: ("I64", LARGE["a"].shape, fetch),
        None,
        "safetensors",
        storage_options=store.options,
        checksums=checksums,
    )
    file.write()
    assert threads == {threading.get_ident()}
    assert store.data(PATH) == bytes_of({"a": LARGE["a"]}, checksums=checksums)


def test_save_file_in_background_writes_a_snapshot(store: Store) -> None:
    tensors = {"a": np.zeros(17 * MIB, np.uint8)}
    expected = ingot.numpy.save(tensors)
    going = threading.Event()
    store.watch = lambda kind: going.wait(60)
    saving = save(tensors, store, background=True)
    tensors["a"][:] = 1
    going.set()
    saving.result()  # type: ignore[attr-defined]
    assert store.data(PATH) == expected


def test_save_file_reports_all_bytes(store: Store) -> None:
    told: list[tuple[int, int]] = []
    save(LARGE, store, progress=lambda done, total: told.append((done, total)))
    nbytes = len(ingot.numpy.save(LARGE))
    assert told[-1] == (nbytes, nbytes)


# Objects that exist. ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
def test_overwrite_decides_whether_an_object_is_replaced(
    store: Store, tensors: dict[str, np.ndarray]
) -> None:
    save(tensors, store, overwrite=False)
    assert store.data(PATH) == ingot.numpy.save(tensors)
    store.objects[PATH] = OLD
    with pytest.raises(FileExistsError, match="overwrite=True replaces it") as caught:
        save(tensors, store, overwrite=False)
    assert caught.value.filename == URL
    assert store.objects == {PATH: OLD}
    assert store.uploads == {}
    save(tensors, store)
    assert store.data(PATH) == ingot.numpy.save(tensors)


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("rules", ["unconditional", "unconditional parts"])
def test_overwrite_false_is_an_error_of_a_store_that_ignores_it(
    rules: str, tensors: dict[str, np.ndarray]
) -> None:
    with stores.running(STORES[rules]) as store:
        if rules == "unconditional parts" and tensors is SMALL:
            save(tensors, store, overwrite=False)
            return
        with pytest.raises(StorageError) as caught:
            save(tensors, store, overwrite=False)
        assert caught.value.code == "unconditional-store"
        assert (store.objects, store.uploads) == ({}, {})
        save(tensors, store)


def test_save_file_raises_if_another_writer_came_first(store: Store) -> None:
    store.faults = [Fault("complete", 1, "replaced before")]
    with pytest.raises(FileExistsError):
        save(LARGE, store, overwrite=False)
    assert store.data(PATH) == b"of another writer"


@pytest.mark.parametrize(("tensors", "kind", "first"), [(SMALL, "put", 2), (LARGE, "complete", 1)])
def test_conflict_with_another_writer_is_decided_by_the_next_request(
    store: Store, tensors: dict[str, np.ndarray], kind: str, first: int
) -> None:
    store.faults = [Fault(kind, first, "conflict")]
    save(tensors, store, overwrite=False)
    # The other writer failed.
    assert store.data(PATH) == ingot.numpy.save(tensors)
    store.objects.clear()
    store.asked.clear()
    store.faults = [Fault(kind, first, "conflict after")]
    save(tensors, store, overwrite=False)
    assert store.data(PATH) == ingot.numpy.save(tensors)
    store.objects.clear()
    store.asked.clear()
    store.faults = [Fault(kind, first, "conflict"), Fault(kind, first + 1, "replaced before")]
    with pytest.raises(FileExistsError):
        save(tensors, store, overwrite=False)
    assert store.data(PATH) == b"of another writer"
    assert store.uploads == {}


def test_conflict_that_costs_the_parts_sends_them_once_more(store: Store) -> None:
    store.faults = [Fault("complete", 1, "conflict without parts")]
    save(LARGE, store, overwrite=False)
    assert (store.data(PATH), store.uploads) == (ingot.numpy.save(LARGE), {})


@pytest.mark.parametrize(("tensors", "kind"), [(SMALL, "put"), (LARGE, "complete")], ids=["small", "large"])
def test_conflict_that_stays_advises_to_save_again(
    store: Store, tensors: dict[str, np.ndarray], kind: str
) -> None:
    store.faults = [Fault(kind, {"put": 2, "complete": 1}[kind], "conflict", 99)]
    with pytest.raises(StorageError, match=r"another writer.*: save again") as caught:
        save(tensors, store, overwrite=False, storage_options={"retries": 0})
    assert caught.value.code == "http-status"
    assert (store.objects, store.uploads) == ({}, {})


@pytest.mark.parametrize(("tensors", "kind"), [(SMALL, "put"), (LARGE, "complete")], ids=["small", "large"])
def test_save_that_may_replace_never_raises_file_exists_error(
    store: Store, tensors: dict[str, np.ndarray], kind: str
) -> None:
    store.objects[PATH] = OLD
    store.faults = [Fault(kind, 0, "exists", 9)]
    with pytest.raises(StorageError, match=r"412.*PreconditionFailed") as caught:
        save(tensors, store)
    assert caught.value.code == "http-status"
    assert (store.objects, store.uploads) == ({PATH: OLD}, {})


# Errors. ---------------------------------------------------------------------------------------------------


def test_options_that_need_a_path_are_rejected(store: Store) -> None:
    for options in ({"atomic": False}, {"write_options": {"replace_read_only": True}}):
        with pytest.raises(OptionError) as caught:
            save(SMALL, store, **options)
        assert caught.value.code == "url-for-path"
    assert store.asked == []


@pytest.mark.parametrize("url", ["https://host/a", "hf://me/repo/a", "gs://bucket/a"])
def test_urls_that_are_only_read_are_rejected(url: str) -> None:
    with pytest.raises(OptionError, match="expected a path on this machine") as caught:
        ingot.numpy.save_file(SMALL, url)
    assert caught.value.code == "url-for-path"


def test_a_version_of_an_object_is_not_written(store: Store) -> None:
    with pytest.raises(OptionError, match="a version") as caught:
        save(SMALL, store, f"{URL}?versionId=1")
    assert caught.value.code == "bad-url"
    assert store.asked == []


def test_a_folder_is_not_written(store: Store) -> None:
    with pytest.raises(OptionError, match="found a folder: add a file name") as caught:
        save(SMALL, store, "s3://models/run-1/")
    assert caught.value.code == "bad-url"
    assert store.asked == []


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
def test_refused_save_raises_permission_error_without_secrets(
    store: Store, tensors: dict[str, np.ndarray]
) -> None:
    with pytest.raises(PermissionError, match="SignatureDoesNotMatch") as caught:
        save(tensors, store, storage_options={"secret_access_key": "hunter2"})
    assert caught.value.filename == URL
    assert "hunter2" not in str(caught.value)
    assert store.objects == {}


def test_missing_bucket_is_file_not_found(store: Store) -> None:
    store.faults = [Fault("put", 0, "no bucket")]
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        save(SMALL, store)


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
def test_wrong_clock_is_an_error_that_names_the_clock(store: Store, tensors: dict[str, np.ndarray]) -> None:
    store.faults = [Fault("put", 0, "skewed"), Fault("begin", 0, "skewed")]
    with pytest.raises(PermissionError, match=r"RequestTimeTooSkewed\): .*set the clock of this machine"):
        save(tensors, store)


def test_parts_that_another_process_removed_are_no_missing_file(store: Store) -> None:
    store.watch = lambda kind: store.uploads.clear() if kind == "complete" else None
    with pytest.raises(StorageError, match=r"NoSuchUpload.*: save again") as caught:
        save(LARGE, store)
    assert not isinstance(caught.value, FileNotFoundError)


def test_lost_answer_about_new_parts_leaves_an_upload_without_parts(store: Store) -> None:
    store.faults = [Fault("begin", 0, "cut after")]
    save(LARGE, store)
    assert store.data(PATH) == ingot.numpy.save(LARGE)
    assert [upload.parts for upload in store.uploads.values()] == [{}]


def test_failed_save_removes_its_parts(store: Store) -> None:
    store.objects[PATH] = OLD
    store.faults = [Fault("part", 1, "refused", 9)]
    with pytest.raises(PermissionError, match="AccessDenied"):
        save(LARGE, store)
    assert store.asked[-1] == "abort"
    assert (store.objects, store.uploads) == ({PATH: OLD}, {})


def test_interrupted_save_removes_its_parts(store: Store) -> None:
    class Enough(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        save(LARGE, store, progress=stop)
    assert (store.objects, store.uploads) == ({}, {})


def test_body_is_signed_where_the_connection_does_not_protect_it(store: Store) -> None:
    save(LARGE, store)
    bodies = [
        one.headers["x-amz-content-sha256"] for one in store.server.requests if "partNumber" in one.path
    ]
    # No other program can change bytes between two processes of one machine.
    assert bodies == ["UNSIGNED-PAYLOAD"] * 3


# Azure. ----------------------------------------------------------------------------------------------------

AZURE, BLOB = "az://models/a b/ü+&=.safetensors", "/models/a b/ü+&=.safetensors"


@pytest.fixture
def azure() -> Iterator[Store]:
    pytest.importorskip("azure.storage.blob", reason="Azure's SDK verifies signatures, and is not installed")
    with stores.running(kind=stores.Azure) as store:
        yield store


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
def test_save_file_writes_to_azure_whole_or_not_at_all(azure: Store, tensors: dict[str, np.ndarray]) -> None:
    save(tensors, azure, AZURE, overwrite=False)
    assert azure.data(BLOB) == ingot.numpy.save(tensors)
    azure.objects[BLOB] = OLD
    with pytest.raises(FileExistsError):
        save(tensors, azure, AZURE, overwrite=False)
    assert azure.data(BLOB) == b"old"
    azure.faults = [Fault("part", 1, "refused", 9), Fault("put", 2, "refused", 9)]
    with pytest.raises(PermissionError):
        save(tensors, azure, AZURE)
    assert azure.data(BLOB) == b"old"


@pytest.mark.parametrize("how", ["cut after", "failed after", "twice", "throttled"])
def test_lost_answer_of_azure_is_success_if_the_object_is_ours(azure: Store, how: str) -> None:
    for tensors, kind in ((SMALL, "put"), (LARGE, "complete"), (LARGE, "part")):
        for overwrite in (True, False):
            azure.objects.clear()
            azure.asked.clear()
            azure.faults = [Fault(kind, 0, how)]
            save(tensors, azure, AZURE, overwrite=overwrite)
            assert azure.data(BLOB) == ingot.numpy.save(tensors), (kind, overwrite)


@pytest.mark.parametrize(("tensors", "kind"), [(SMALL, "put"), (LARGE, "complete")], ids=["small", "large"])
def test_leased_object_of_azure_is_a_storage_error(
    azure: Store, tensors: dict[str, np.ndarray], kind: str
) -> None:
    azure.objects[BLOB] = OLD
    azure.faults = [Fault(kind, 0, "leased", 9)]
    with pytest.raises(StorageError, match="LeaseIdMissing"):
        save(tensors, azure, AZURE)
    assert azure.data(BLOB) == b"old"


# Faults. ---------------------------------------------------------------------------------------------------


def test_lost_answer_is_success_if_the_object_is_ours(store: Store) -> None:
    for tensors, kind in ((SMALL, "put"), (LARGE, "complete")):
        for how in ("cut after", "failed after", "twice"):
            for overwrite in (True, False):
                store.objects.clear()
                store.asked.clear()
                # The first request to make an object may be a check of the store.
                number = 0 if overwrite else {"put": 2, "complete": 1}[kind]
                store.faults = [Fault(kind, number, how)]
                save(tensors, store, overwrite=overwrite)
                assert store.data(PATH) == ingot.numpy.save(tensors), (kind, how, overwrite)


def faults(rng: random.Random) -> list[Fault]:
    """Return up to three faults, which may come together or follow each other."""
    found = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(stores.KINDS)
        how = rng.choice([one for one in stores.FAULTS if "in 200" not in one or kind == "complete"])
        found.append(Fault(kind, rng.randint(0, 3), how, rng.choice((1, 1, 2, 9))))
    return found


def test_any_fault_leaves_the_old_object_or_the_new_one_whole() -> None:
    print(f"INGOT_SEED={SEED}")
    rng = random.Random(SEED)
    for number in range(ROUNDS):
        with stores.running(STORES[rng.choice(("s3", "r2", "without checksums"))]) as store:
            tensors = rng.choice((SMALL, SMALL, LARGE))
            overwrite, exists = rng.random() < 0.7, rng.random() < 0.5
            store.faults = faults(rng)
            if exists:
                store.objects[PATH] = OLD
            new, raised = ingot.numpy.save(tensors), None
            try:
                save(tensors, store, overwrite=overwrite, storage_options={"retries": rng.choice((0, 2))})
            except OSError as fault:
                raised = fault
            told = (SEED, number, store.faults, overwrite, exists, store.asked, raised)
            seen = store.data(PATH)
            others = {b"old"} if exists else {None}
            if any(one.how == "replaced before" for one in store.faults):
                others.add(b"of another writer")
            assert seen in {new, *others}, told
            if raised is None:
                # A writer may have replaced it after it was complete.
                assert seen == new or b"of another writer" in others, told
            if exists and not overwrite:
                assert seen != new, told
            # Without a fault of the request itself, no part is left.
            if not any(one.kind in ("abort", "begin") for one in store.faults):
                assert raised is None or store.uploads == {}, told
    note("saves to a store with faults", ROUNDS, 0, seed=SEED)


KILLED = """
    import sys, numpy, ingot.numpy
    endpoint, key, secret, url = sys.argv[1:]
    options = {"endpoint": endpoint, "access_key_id": key, "secret_access_key": secret}
    ingot.numpy.save_file({"a": numpy.zeros(17 << 20, "u1")}, url, storage_options=options)
"""


@pytest.mark.parametrize("kind", ["part", "complete"])
def test_killed_save_leaves_the_old_object_and_invisible_parts(store: Store, kind: str) -> None:
    store.objects[PATH] = OLD
    asked, go_on = threading.Event(), threading.Event()

    def wait(found: str) -> None:
        if found == kind:
            asked.set()
            go_on.wait(60)

    store.watch = wait
    arguments = [str(store.options[name]) for name in ("endpoint", "access_key_id", "secret_access_key")]
    script = textwrap.dedent(KILLED)
    with subprocess.Popen([sys.executable, "-c", script, *arguments, URL]) as process:
        assert asked.wait(60)
        process.kill()
    if kind == "part":
        assert store.objects == {PATH: OLD}
        assert len(store.uploads) == 1
    go_on.set()
    assert store.data(PATH) in (b"old", ingot.numpy.save({"a": np.zeros(17 << 20, "u1")}))


def test_save_file_bounds_memory_beside_the_tensors(store: Store, tmp_path: Path) -> None:
    # Threads have at most 16 parts of 8 MiB.
    save({"a": np.zeros(160 * MIB, np.uint8)}, store)
    assert store.most <= 16
