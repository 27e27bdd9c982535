"""Sharded saves to a store of S3's protocol and to Azure's, against models of their rules."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import ingot
from ingot.errors import OptionError, StorageError
from support import stores
from support.record import note
from support.servers import Request
from support.stores import STORES, Fault, Store, Stored

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("botocore", reason="botocore verifies signatures, and is not installed")

import ingot.torch  # noqa: E402

#: Saves of the generator of faults.
ROUNDS = int(os.environ.get("INGOT_UPLOADS", "10"))
SEED = int(os.environ.get("INGOT_SEED", "0")) or random.SystemRandom().randrange(1 << 32)

FOLDER, INDEX = "/models/run 1/", "/models/run 1/model.safetensors.index.json"
OLD = {name: torch.full((100,), value) for value, name in enumerate("abc")}
NEW = {name: tensor + 10 for name, tensor in OLD.items()}
COUNT = len(OLD)


@pytest.fixture
def store() -> Iterator[Store]:
    with stores.running() as store:
        yield store


@pytest.fixture(params=["s3", "azure"])
def either(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "azure":
        pytest.importorskip("azure.storage.blob", reason="Azure's SDK verifies signatures")
    with stores.running(kind=stores.Azure if request.param == "azure" else Store) as store:
        yield store


def url(store: Store) -> str:
    return f"{'az' if isinstance(store, stores.Azure) else 's3'}:/{FOLDER}"


def index_put(store: Store, overwrite: bool) -> int:
    """Return the number of the request that writes the index among requests of its kind."""
    # The store is probed before the first shard and before the index.
    probes = 0 if overwrite or isinstance(store, stores.Azure) else 4
    return COUNT + probes


def save(tensors: dict[str, torch.Tensor], store: Store, **options: object) -> object:
    given = {"max_shard_size": 800, **options}
    given["storage_options"] = {**store.options, **options.get("storage_options", {})}  # type: ignore[dict-item]
    return ingot.torch.save_sharded(tensors, url(store), **given)  # type: ignore[call-overload]


def save_old(store: Store) -> dict[str, Stored]:
    """Write the old checkpoint, and return its objects."""
    save(OLD, store)
    store.asked.clear()
    return dict(store.objects)


def load(store: Store, name: str = "") -> dict[str, torch.Tensor]:
    return ingot.torch.load_file(url(store) + name, storage_options=store.options)


def are_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def shards(store: Store) -> set[str]:
    return {path for path in store.objects if path != INDEX}


def notes_of(fault: BaseException) -> str:
    return "\n".join(getattr(fault, "__notes__", []))


# Checkpoints. ----------------------------------------------------------------------------------------------


def test_save_sharded_writes_the_bytes_of_a_local_save(either: Store, tmp_path: Path) -> None:
    save(OLD, either)
    ingot.torch.save_sharded(OLD, tmp_path, max_shard_size=800)
    local = [path.read_bytes() for path in sorted(tmp_path.glob("*.safetensors"))]
    assert [either.data(path) for path in sorted(shards(either))] == local
    assert are_equal(load(either), OLD)
    assert are_equal(load(either, "model.safetensors.index.json"), OLD)


def test_save_sharded_writes_the_index_last_and_names_all_shards(store: Store) -> None:
    save(OLD, store)
    assert store.server.requests[-1].path.endswith("model.safetensors.index.json")
    named = set(json.loads(store.data(INDEX) or b"")["weight_map"].values())
    assert {FOLDER + name for name in named} == shards(store)
    assert len(named) == COUNT


def test_save_sharded_of_one_shard_has_an_index_too(store: Store) -> None:
    save(OLD, store, max_shard_size="5GB")
    assert INDEX in store.objects
    assert len(shards(store)) == 1
    assert are_equal(load(store), OLD)


def test_second_save_replaces_the_index_and_no_shard(either: Store) -> None:
    before = save_old(either)
    save(NEW, either, overwrite=True)
    assert {path: either.objects[path] for path in before if path != INDEX} == {
        path: stored for path, stored in before.items() if path != INDEX
    }
    assert len(shards(either)) == 2 * COUNT
    assert are_equal(load(either), NEW)


def test_background_save_writes_a_snapshot(store: Store) -> None:
    tensors = {name: tensor.clone() for name, tensor in OLD.items()}
    saving = save(tensors, store, background=True)
    for tensor in tensors.values():
        tensor.zero_()
    saving.result()  # type: ignore[attr-defined]
    assert are_equal(load(store), OLD)


# A checkpoint that exists. ---------------------------------------------------------------------------------


def test_existing_index_is_an_error_before_a_shard_is_sent(either: Store) -> None:
    before = save_old(either)
    with pytest.raises(FileExistsError, match="overwrite=True") as caught:
        save(NEW, either)
    assert caught.value.filename == url(either) + "model.safetensors.index.json"
    assert either.objects == before
    assert either.asked == ["head"]


def test_index_of_another_writer_stays_and_the_shards_are_removed(either: Store) -> None:
    either.faults = [Fault("put", index_put(either, overwrite=False), "replaced before")]
    with pytest.raises(FileExistsError) as caught:
        save(NEW, either)
    assert notes_of(caught.value) == ""
    assert {path: stored.data for path, stored in either.objects.items()} == {INDEX: b"of another writer"}


def test_store_without_conditions_is_rejected_before_a_shard_is_sent() -> None:
    with stores.running(STORES["unconditional"]) as store:
        with pytest.raises(StorageError) as caught:
            save(OLD, store)
        assert caught.value.code == "unconditional-store"
        assert store.objects == {}
        save(OLD, store, overwrite=True)


def test_store_that_forbids_to_look_is_written_to(store: Store) -> None:
    store.faults = [Fault("head", 0, "refused", 9)]
    save(OLD, store)
    assert are_equal(load(store), OLD)


# Failures. -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(COUNT))
def test_refused_shard_leaves_the_old_checkpoint_and_no_shard(either: Store, number: int) -> None:
    before = save_old(either)
    either.faults = [Fault("put", number, "refused")]
    with pytest.raises(PermissionError) as caught:
        save(NEW, either, overwrite=True)
    assert notes_of(caught.value) == ""
    assert either.objects == before


def test_refused_index_leaves_the_old_checkpoint_and_names_the_new_shards(store: Store) -> None:
    before = save_old(store)
    store.faults = [Fault("put", COUNT, "refused")]
    with pytest.raises(PermissionError) as caught:
        save(NEW, store, overwrite=True)
    [name] = {path.rpartition("-")[2] for path in shards(store) - set(before)}
    assert notes_of(caught.value) == (
        f"the store may still write the index, and its shards remain: {url(store)}model-*-{name}"
    )
    assert are_equal(load(store), OLD)


def test_shards_that_cannot_be_removed_are_named(store: Store) -> None:
    store.faults = [Fault("put", 1, "refused"), Fault("delete", 0, "refused", 9)]
    with pytest.raises(PermissionError) as caught:
        save(NEW, store, overwrite=True)
    [path] = store.objects
    assert "shards of this save remain" in notes_of(caught.value)
    assert notes_of(caught.value).endswith(path.rpartition("-")[2])


@pytest.mark.parametrize("how", ["cut after", "failed after", "twice", "throttled"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_lost_answer_about_the_index_is_success(either: Store, how: str, overwrite: bool) -> None:
    either.faults = [Fault("put", index_put(either, overwrite), how)]
    save(OLD, either, overwrite=overwrite)
    assert are_equal(load(either), OLD)


def test_index_that_cannot_be_proven_is_read_back(store: Store) -> None:
    # The index is written, but its response is lost, and so are the responses of the requests that check it.
    store.faults = [Fault("put", index_put(store, False), "cut after"), Fault("head", 1, "cut before", 9)]
    save(OLD, store)
    assert are_equal(load(store), OLD)


def test_interrupted_save_removes_its_shards(store: Store) -> None:
    class Enough(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Enough

    with pytest.raises(Enough):
        save(OLD, store, progress=stop)
    assert store.objects == {}


SAVING = """
    import sys, torch, ingot.torch
    endpoint, key, secret, url = sys.argv[1:]
    options = {"endpoint": endpoint, "access_key_id": key, "secret_access_key": secret}
    new = {name: torch.full((100,), 10 + value) for value, name in enumerate("abc")}
    ingot.torch.save_sharded(new, url, 800, overwrite=True, storage_options=options)
"""


def saving(store: Store) -> list[str]:
    """Return the command that saves the new checkpoint."""
    arguments = [str(store.options[name]) for name in ("endpoint", "access_key_id", "secret_access_key")]
    return [sys.executable, "-c", textwrap.dedent(SAVING), *arguments, url(store)]


def test_killed_save_leaves_the_old_checkpoint(store: Store) -> None:
    save_old(store)
    # The request has no effect, and its process dies before it can know.
    store.faults = [Fault("put", COUNT, "cut before")]
    started: list[subprocess.Popen[bytes]] = []

    def kill(kind: str) -> None:
        if store.asked.count("put") == COUNT + 1:
            started[0].kill()

    store.watch = kill
    with subprocess.Popen(saving(store)) as process:
        started.append(process)
        assert process.wait(120) != 0
    store.watch, store.faults = lambda kind: None, []
    assert are_equal(load(store), OLD)
    save(NEW, store, overwrite=True)
    assert are_equal(load(store), NEW)


def test_save_that_ctrl_c_ends_removes_its_shards(store: Store) -> None:
    before = save_old(store)
    waiting, go_on = threading.Event(), threading.Event()

    def wait(kind: str) -> None:
        if kind == "put" and store.asked.count("put") == COUNT:
            waiting.set()
            go_on.wait(60)

    store.watch = wait
    with subprocess.Popen(saving(store), stderr=subprocess.PIPE, text=True) as process:
        assert waiting.wait(60)
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    # The request that was interrupted makes a shard that no index names.
    go_on.set()
    late = {path: stored for path, stored in store.objects.items() if f"-{COUNT:05d}-of" not in path}
    assert late == {path: stored for path, stored in before.items() if f"-{COUNT:05d}-of" not in path}
    assert are_equal(load(store), OLD)


def test_late_request_of_a_failed_save_leaves_a_whole_checkpoint(store: Store) -> None:
    save_old(store)
    go_on = threading.Event()

    def wait(kind: str) -> None:
        if kind == "put" and store.asked.count("put") == COUNT + 1:
            go_on.wait(60)

    store.watch = wait
    with pytest.raises(StorageError) as caught:
        save(NEW, store, overwrite=True, storage_options={"stall_timeout": 0.3, "retries": 0})
    assert "the store may still write the index" in notes_of(caught.value)
    assert are_equal(load(store), OLD)
    store.watch = lambda kind: None
    newest = {name: tensor + 20 for name, tensor in OLD.items()}
    save(newest, store, overwrite=True)
    applied, put = threading.Event(), store._put

    def apply(request: Request, body: bytes) -> stores.Outcome:
        outcome = put(request, body)
        applied.set()
        return outcome

    store._put = apply  # type: ignore[method-assign]
    assert are_equal(load(store), newest)
    go_on.set()
    assert applied.wait(60)
    assert are_equal(load(store), NEW)


def faults(rng: random.Random) -> list[Fault]:
    kinds = ("put", "put", "put", "head", "delete", "get")
    hows = [how for how in stores.FAULTS if "in 200" not in how and not how.startswith("replaced")]
    return [
        Fault(rng.choice(kinds), rng.randint(0, 2 * COUNT + 2), rng.choice(hows), rng.choice((1, 1, 2, 9)))
        for _ in range(rng.randint(1, 3))
    ]


def test_any_fault_leaves_the_old_checkpoint_or_the_new_one_whole() -> None:
    print(f"INGOT_SEED={SEED}")
    rng = random.Random(SEED)
    for number in range(ROUNDS):
        with stores.running() as store:
            exists, overwrite, raised = rng.random() < 0.5, rng.random() < 0.6, None
            before = save_old(store) if exists else {}
            store.faults = faults(rng)
            try:
                save(NEW, store, overwrite=overwrite, storage_options={"retries": rng.choice((0, 2))})
            except OSError as fault:
                raised = fault
            told = (SEED, number, store.faults, overwrite, exists, store.asked, raised)
            store.faults = []
            found = load(store) if INDEX in store.objects else None
            if raised is None:
                assert found is not None, told
                assert are_equal(found, NEW), told
                assert overwrite or not exists, told
            elif found is not None:
                assert exists or notes_of(raised), told
                is_old = exists and are_equal(found, OLD)
                assert is_old or ((overwrite or not exists) and are_equal(found, NEW)), told
            # Probes of stores are removed unless that is refused.
            new = {path for path in store.objects if path not in before and "probe" not in path}
            if raised is not None and not notes_of(raised):
                assert new == set(), told
    note("sharded saves to a store with faults", ROUNDS, 0, seed=SEED)


# Folders. --------------------------------------------------------------------------------------------------


def test_folder_means_the_index_or_the_file_in_it(either: Store) -> None:
    options = {"storage_options": either.options}
    with pytest.raises(FileNotFoundError, match=r"nor is there a file model\.safetensors"):
        load(either)
    ingot.torch.save_file({"a": torch.ones(3)}, url(either) + "model.safetensors", **options)
    assert load(either)["a"].tolist() == [1, 1, 1]
    assert ingot.hash(url(either), storage_options=either.options)
    # As in a directory, the index comes first.
    save(OLD, either)
    assert are_equal(load(either), OLD)
    assert ingot.inspect(url(either), storage_options=either.options).parameter_total == 300
    with ingot.safe_open(url(either), "pt", storage_options=either.options) as file:
        assert sorted(file.keys()) == sorted(OLD)


def test_folder_is_downloaded(store: Store, tmp_path: Path) -> None:
    save(OLD, store)
    done = ingot.download(url(store), f"{tmp_path}/copy/", storage_options=store.options)
    assert done.path.endswith("model.safetensors.index.json")
    assert are_equal(ingot.torch.load_file(tmp_path / "copy"), OLD)


def test_folder_is_read_by_an_identity_that_may_not_list(store: Store) -> None:
    ingot.torch.save_file(OLD, url(store) + "model.safetensors", storage_options=store.options)
    original = store._get

    def get(request: Request, body: bytes) -> stores.Outcome:
        if request.path.endswith("index.json"):
            raise stores.Answered(403, "AccessDenied")
        return original(request, body)

    store._get = get  # type: ignore[method-assign]
    assert are_equal(load(store), OLD)


# Arguments. ------------------------------------------------------------------------------------------------


def test_options_that_need_a_path_are_rejected(store: Store) -> None:
    with pytest.raises(OptionError, match="replace_read_only"):
        save(OLD, store, write_options={"replace_read_only": True})
    assert store.asked == []


def test_ranks_that_save_together_need_a_directory(store: Store) -> None:
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(OptionError, match="a directory that all of them see") as caught:
            save(OLD, store, process_group=distributed.group.WORLD)
    finally:
        distributed.destroy_process_group()
    assert caught.value.code == "url-for-path"
    assert store.asked == []
