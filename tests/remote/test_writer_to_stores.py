"""Objects that `ingot.Writer` writes tensor by tensor, against models of each store's rules."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot._write import store_writer
from ingot.errors import ClosedError, OptionError, SaveError, SliceError, StorageError, TensorNotFoundError
from support import stores
from support.record import note
from support.stores import MIB, STORES, Fault, Store, Stored

#: Rounds of the generator of faults.
ROUNDS = int(os.environ.get("INGOT_UPLOADS", "4"))
SEED = int(os.environ.get("INGOT_SEED", "0")) or random.SystemRandom().randrange(1 << 32)

URL, PATH = "s3://models/a b/x.safetensors", "/models/a b/x.safetensors"
OLD = Stored(b"old", {})
#: In the order of the file, and in parts.
LARGE = {
    "a": np.arange(3 * MIB // 8, dtype=np.int64),
    "b": np.arange(17 * MIB // 4, dtype=np.float32).reshape(-1, 1024),
    "c": np.zeros((0, 3), np.float32),
    "d": np.array(7, np.float16),
}
SMALL = {"a": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.ones(3, np.int8)}


@pytest.fixture
def store() -> Iterator[Store]:
    with stores.running(is_signed=False) as store:
        yield store


def begun(store: Store, specs: Any, url: str = URL, **options: Any) -> ingot.Writer:
    return ingot.Writer(url, specs, storage_options=store.options, **options)


def fill(writer: ingot.Writer, tensors: Any, rows: int = 1000) -> None:
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            writer.write(name, tensor)
            continue
        for first in range(0, len(tensor), rows):
            writer.write(name, tensor[first : first + rows], index=slice(first, first + rows))


def saved(tensors: Any, metadata: Any = None, **options: Any) -> bytes:
    return ingot.numpy.save(tensors, metadata, **options)


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("rules", ["r2", "without checksums"])
def test_writer_makes_the_file_of_a_save(rules: str, tensors: Any) -> None:
    pytest.importorskip("botocore", reason="botocore verifies signatures, and is not installed")
    with stores.running(STORES[rules]) as store:
        with begun(store, tensors, metadata={"k": "v"}) as writer:
            fill(writer, tensors)
            # An object that tests the conditions of the store may be there.
            assert PATH not in store.objects
            writer.commit()
        assert store.data(PATH) == saved(tensors, {"k": "v"})
        assert store.uploads == {}


def test_writer_makes_the_file_of_a_save_in_azure() -> None:
    pytest.importorskip("azure.storage.blob", reason="Azure's SDK verifies signatures")
    with stores.running(kind=stores.Azure) as store:
        with begun(store, LARGE, "az://models/x.bt") as writer:
            fill(writer, LARGE)
            writer.commit()
        assert store.data("/models/x.bt") == saved(LARGE, format="bintensors")


def test_parts_are_sent_before_the_commit(store: Store) -> None:
    sent = threading.Event()
    store.watch = lambda kind: sent.set() if kind == "part" else None
    with begun(store, LARGE) as writer:
        fill(writer, LARGE)
        assert sent.wait(60)
        writer.commit()
    assert store.data(PATH) == saved(LARGE)


def test_tensors_may_come_a_little_before_their_turn(store: Store) -> None:
    with begun(store, LARGE) as writer:
        fill(writer, dict(reversed(LARGE.items())))
        writer.commit()
    assert store.data(PATH) == saved(LARGE)


def test_tensors_far_before_their_turn_are_rejected(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "_AHEAD_NBYTES", MIB)
    with begun(store, LARGE) as writer:
        writer.write("b", LARGE["b"][:1000], index=slice(0, 1000))
        with pytest.raises(SaveError, match="wait for tensor `a` from its byte 0 on") as caught:
            writer.write("b", LARGE["b"][1000:], index=slice(1000, None))
        assert (caught.value.code, caught.value.expected) == ("out-of-order", "a")
        # Nothing of it counts as written.
        writer.write("a", LARGE["a"])
        writer.write("b", LARGE["b"][1000:], index=slice(1000, None))
        fill(writer, {name: LARGE[name] for name in "cd"})
        writer.commit()
    assert store.data(PATH) == saved(LARGE)


def test_values_are_copied_and_memory_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "_AHEAD_NBYTES", MIB)
    tensors = {f"t{number}": np.full(2 * MIB, number, np.uint8) for number in range(9)}
    own = np.empty(2 * MIB, np.uint8)
    with begun(store, tensors) as writer:
        held = writer._writer
        assert isinstance(held, store_writer.StoreWriter)
        for number, name in enumerate(tensors):
            own[:] = number
            writer.write(name, own)
            assert held._held_nbytes <= 2 * MIB
        own[:] = 99
        writer.commit()
    assert store.data(PATH) == saved(tensors)


def test_rows_are_selected_by_ints_and_slices(store: Store) -> None:
    with begun(store, SMALL) as writer:
        writer.write("a", SMALL["a"][0], index=0)
        writer.write("a", SMALL["a"][1:2], index=(slice(1, 2), ...))
        writer.write("a", SMALL["a"][-1], index=(-1, slice(None)))
        writer.write("b", SMALL["b"], index=...)
        writer.commit()
    assert store.data(PATH) == saved(SMALL)


def test_torch_tensors_and_aliases_are_written(store: Store) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(8).to(torch.bfloat16).reshape(4, 2)
    with begun(store, {"a": tensor}, aliases={"b": "a"}) as writer:
        writer.write("a", tensor)
        writer.commit()
    found = ingot.torch.load_file(URL, storage_options=store.options)
    assert all(torch.equal(found[name], tensor) for name in "ab")


def test_wrong_writes_name_the_tensor_and_count_as_none(store: Store) -> None:
    with begun(store, SMALL) as writer:
        for error, code, name, tensor, index in [
            (TensorNotFoundError, "unknown-tensor", "z", SMALL["a"], ...),
            (SaveError, "mismatch", "a", SMALL["b"], ...),
            (SaveError, "mismatch", "a", SMALL["a"], slice(0, 2)),
            (SliceError, "index-out-of-range", "a", SMALL["a"][0], 3),
            (OptionError, "appended-in-part", "a", SMALL["a"][:, :1], (slice(None), slice(0, 1))),
            (OptionError, "appended-in-part", "a", SMALL["a"][::2], slice(None, None, 2)),
        ]:
            with pytest.raises(error) as caught:
                writer.write(name, tensor, index=index)
            assert caught.value.code == code
        writer.write("a", SMALL["a"][:1], index=slice(0, 1))
        with pytest.raises(SaveError) as caught:
            writer.write("a", SMALL["a"])
        assert caught.value.code == "filled-twice"
        with pytest.raises(
            SaveError, match="tensor `a`: only a part was written: expected 6 elements, found 2"
        ) as caught:
            writer.commit()
        assert caught.value.code == "partly-filled"
        writer.write("a", SMALL["a"][1:], index=slice(1, None))
        with pytest.raises(SaveError) as caught:
            writer.commit()
        assert caught.value.code == "never-filled"
        writer.write("b", SMALL["b"])
        writer.commit()
        with pytest.raises(ClosedError):
            writer.write("b", SMALL["b"])
    assert store.data(PATH) == saved(SMALL)


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
def test_writer_without_commit_makes_no_object(store: Store, tensors: Any) -> None:
    store.objects[PATH] = OLD
    with (
        pytest.warns(RuntimeWarning, match="without commit"),
        begun(store, tensors, overwrite=True) as writer,
    ):
        fill(writer, tensors)
    writer = begun(store, tensors, overwrite=True)
    fill(writer, tensors)
    writer.__exit__(KeyError, KeyError())
    writer = begun(store, tensors, overwrite=True)
    fill(writer, tensors)
    # The cycle of an exception may hold it.
    gc.collect()
    with pytest.warns(RuntimeWarning, match="the writer was deleted"):
        del writer
    assert store.objects == {PATH: OLD}


def test_existing_object_is_an_error_before_and_at_the_commit(store: Store) -> None:
    with begun(store, SMALL) as writer:
        fill(writer, SMALL)
        store.objects[PATH] = OLD
        with pytest.raises(FileExistsError) as caught:
            writer.commit()
        assert caught.value.filename == URL
    with pytest.raises(FileExistsError):
        begun(store, SMALL)
    assert store.objects == {PATH: OLD}


def test_refused_upload_is_raised_by_a_write_or_the_commit(store: Store) -> None:
    store.faults = [Fault("begin", 0, "refused", 9)]

    def write(writer: ingot.Writer) -> None:
        fill(writer, LARGE)
        writer.commit()

    with begun(store, LARGE, overwrite=True) as writer:
        with pytest.raises(PermissionError, match="AccessDenied"):
            write(writer)
        with pytest.raises(PermissionError, match="AccessDenied"):
            writer.write("a", LARGE["a"])


def test_small_file_is_sent_again_to_the_region_of_the_bucket(store: Store) -> None:
    moved = stores.failure(400, "AuthorizationHeaderMalformed")
    moved = stores.Outcome(moved.status, moved.body, {"x-amz-bucket-region": "eu-west-1"})
    original, asked = store._put, []

    def put(request: Any, body: bytes) -> Any:
        asked.append(request)
        return moved if len(asked) == 1 else original(request, body)

    store._put = put  # type: ignore[method-assign]
    options = {name: value for name, value in store.options.items() if name != "region"}
    with ingot.Writer(URL, SMALL, overwrite=True, storage_options=options) as writer:
        fill(writer, SMALL)
        writer.commit()
    assert len(asked) == 2
    assert store.data(PATH) == saved(SMALL)


def test_conflict_that_needs_new_parts_is_an_error(store: Store) -> None:
    # The probe of the store completes parts too.
    store.faults = [Fault("complete", 1, "conflict without parts", 9)]
    with ingot.Writer(URL, LARGE, storage_options={**store.options, "retries": 0}) as writer:  # type: ignore[typeddict-item]
        fill(writer, LARGE)
        with pytest.raises(StorageError, match="write the file once more"):
            writer.commit()
    assert store.data(PATH) is None


@pytest.mark.parametrize("options", [{}, {"write_options": {"reserve_header": 1000}}])
def test_writer_to_a_store_needs_specs(store: Store, options: Any) -> None:
    with pytest.raises(OptionError, match="expected specs") as caught:
        begun(store, None, **options)
    assert caught.value.code == "specs-or-reserve"
    with pytest.raises(OptionError):
        ingot.Writer.join(URL)


def test_program_that_ends_without_commit_makes_no_object(store: Store) -> None:
    program = f"""
import ingot, numpy
writer = ingot.Writer({URL!r}, {{"a": ("U8", (20 << 20,))}}, storage_options={store.options!r})
writer.write("a", numpy.ones(18 << 20, "u1"), index=slice(0, 18 << 20))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended
    assert "the program ended without commit(): the file is not written" in ended.stderr
    assert (store.objects, store.uploads) == ({}, {})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_writer_belongs_to_the_process_that_made_it(store: Store) -> None:
    with begun(store, SMALL) as writer:
        writer.write("a", SMALL["a"])
        child = os.fork()
        if not child:
            status = 1
            try:
                writer.write("b", SMALL["b"])
            except ClosedError as fault:
                status = 0 if fault.code == "forked" else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.write("b", SMALL["b"])
        writer.commit()
    assert store.data(PATH) == saved(SMALL)


def test_any_fault_leaves_the_old_object_or_the_new_one() -> None:
    print(f"INGOT_SEED={SEED}")
    rng = random.Random(SEED)
    hows = [how for how in stores.FAULTS if not how.startswith("replaced")]
    # Only a completion may fail after the status was sent.
    usual = [how for how in hows if "in 200" not in how]
    new = {id(tensors): saved(tensors) for tensors in (SMALL, LARGE)}
    for number in range(ROUNDS):
        with stores.running(is_signed=False) as store:
            exists, overwrite, raised = rng.random() < 0.5, rng.random() < 0.6, None
            store.objects = {PATH: OLD} if exists else {}
            kinds = ("put", "begin", "part", "complete", "head")
            store.faults = [
                Fault(
                    kind,
                    rng.randint(0, 4),
                    rng.choice(hows if kind == "complete" else usual),
                    rng.choice((1, 1, 2, 9)),
                )
                for kind in rng.choices(kinds, k=rng.randint(1, 3))
            ]
            tensors = rng.choice((SMALL, LARGE))
            options = {**store.options, "retries": rng.choice((0, 2))}
            try:
                with ingot.Writer(URL, tensors, overwrite=overwrite, storage_options=options) as writer:
                    fill(writer, tensors)
                    writer.commit()
            except OSError as fault:
                raised = fault
            told = (SEED, number, store.faults, overwrite, exists, store.asked, raised)
            found = store.data(PATH)
            assert found in (b"old" if exists else None, new[id(tensors)]), told
            if raised is None:
                assert found == new[id(tensors)], told
                assert overwrite or not exists, told
    note("writers to stores with faults", ROUNDS, 0, seed=SEED)
