"""Folders of checkpoints in stores, against models of their rules: lost answers, kills, second writers.

``INGOT_UPLOADS=2000`` sets the number of rounds of the generator of faults, ``INGOT_SEED`` the seed.
"""

from __future__ import annotations

import json
import os
import random
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot._checkpoints import lease, store_lease
from ingot.errors import CheckpointError, IntegrityError, OptionError, StorageError
from support import stores
from support.record import note
from support.servers import Handler, Request, Server, serving
from support.stores import STORES, Fault, Store, Stored

#: Rounds of the generator of faults.
ROUNDS = int(os.environ.get("INGOT_UPLOADS", "2"))
SEED = int(os.environ.get("INGOT_SEED", "0")) or random.SystemRandom().randrange(1 << 32)

URL, AT = "s3://models/a run", "/models/a run/"


@pytest.fixture
def store() -> Iterator[Store]:
    with stores.running(is_signed=False) as store:
        yield store


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_lease, "PAUSE_SECONDS", 0.01)


def state(step: int, saver: int = 0, size: int = 4) -> dict[str, Any]:
    return {"weights": np.full(size, step, "f4"), "step": step, "saver": saver}


def opened(store: Store, url: str = URL, **options: Any) -> ingot.Checkpoints:
    return ingot.Checkpoints(url, storage_options=store.options, **options)


def save(store: Store, *steps: int, **options: Any) -> None:
    with opened(store, **options) as checkpoints:
        if checkpoints.latest() is not None:
            checkpoints.load()
        for step in steps:
            checkpoints.save(step, state(step))


def names(store: Store, step: int | None = None) -> list[str]:
    """Return the names of all objects, or of the objects of a step, in the folder."""
    start = AT if step is None else f"{AT}step-{step:08d}"
    return sorted(path.removeprefix(AT) for path in store.objects if path.startswith(start))


def object_of(store: Store, step: int, name: str) -> str:
    """Return the path of an object of a step, whose name ends with `name`."""
    return next(AT + one for one in names(store, step) if one.endswith(name))


def leases(store: Store) -> list[str]:
    return [one for one in names(store) if one.startswith(".ingot-lease/")]


# Saving, finding and loading. ------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", ["s3", "without checksums"])
def test_checkpoints_save_find_and_load_in_s3(rules: str) -> None:
    pytest.importorskip("botocore", reason="botocore verifies signatures, and is not installed")
    with stores.running(STORES[rules]) as store:
        check_round_trip(store, URL)
        assert store.uploads == {}


def test_checkpoints_save_find_and_load_in_azure() -> None:
    pytest.importorskip("azure.storage.blob", reason="Azure's SDK verifies signatures")
    with stores.running(kind=stores.Azure) as store:
        check_round_trip(store, "az://models/a run")


def check_round_trip(store: Store, url: str) -> None:
    store.page = 3
    with opened(store, f"{url}/") as checkpoints:
        assert (checkpoints.latest(), checkpoints.steps()) == (None, [])
        checkpoints.save(100, state(100), background=False)
        checkpoints.save(200, state(200))
    other = opened(store, url)
    assert repr(other) == f"ingot.Checkpoints({url!r})"
    assert other.steps() == [100, 200]
    assert other.latest() == other.latest(verify=True) == 200
    assert other.load()["step"] == 200
    assert (other.load(100)["weights"] == 100).all()
    with pytest.raises(CheckpointError, match="no step 300: the last of 2 is 200") as caught:
        other.load(300)
    assert caught.value.code == "no-step"
    assert [len(names(store, step)) for step in (100, 200)] == [2, 2]


def test_step_is_a_folder_with_the_lease_and_the_save_in_its_name(store: Store) -> None:
    save(store, 100)
    commit = json.loads(store.objects[object_of(store, 100, "checkpoint.json")].data)
    folder = f"step-00000100-1-{commit['save']}"
    assert names(store, 100) == [f"{folder}/checkpoint.json", f"{folder}/state-{commit['save']}.safetensors"]
    # The file of a step is one that other functions read.
    url = f"s3://models/a run/{folder}/{commit['tree']}"
    assert ingot.numpy.load_state(url, storage_options=store.options)["step"] == 100
    assert ingot.verify(url, storage_options=store.options)


def test_commit_file_is_written_last_and_removed_first(store: Store) -> None:
    with opened(store, keep=1) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        written = [
            one.path for one in store.server.requests if "step-" in one.path and "list-type" not in one.path
        ]
        assert "checkpoint.json" in written[-1]
        seen: list[set[str]] = []
        store.watch = lambda kind: seen.append({one.rpartition("/")[2] for one in names(store, 1)})
        checkpoints.save(2, state(2))
    assert names(store, 1) == []
    without = [found for found in seen if "checkpoint.json" not in found]
    assert without[0] >= {"deleting.json"}
    assert all(found <= {"deleting.json", *without[0]} for found in without)


def test_background_save_copies_the_state(store: Store) -> None:
    live = state(1, size=1_000_000)
    with opened(store) as checkpoints:
        checkpoints.save(1, live)
        live["weights"][:] = 2
    assert (opened(store).load()["weights"] == 1).all()


def test_retention_keeps_the_last_the_best_multiples_and_pinned_steps(store: Store) -> None:
    with opened(store, keep=1, keep_every=4, best=("loss", "min", 1)) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, state(step), metrics={"loss": abs(step - 2.2)})
            if step == 3:
                checkpoints.pin(3)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3, 4, 7]
        assert checkpoints.best() == 2
        checkpoints.delete(3)
        assert checkpoints.steps() == [2, 4, 7]
    assert len([one for one in names(store) if one.startswith("step-")]) == 2 * 3


def test_many_commits_are_read_once(store: Store) -> None:
    with opened(store, keep=3) as checkpoints:
        for step in range(6):
            checkpoints.save(step, state(step))
            checkpoints.wait()
        store.asked.clear()
        checkpoints.save(6, state(6))
        checkpoints.wait()
    assert store.asked.count("get") <= 8


def test_objects_of_the_user_stay(store: Store) -> None:
    save(store, 1)
    mine = f"{AT}{names(store, 1)[0].partition('/')[0]}/notes.txt"
    store.objects[mine] = Stored(b"mine", {})
    with opened(store) as checkpoints:
        checkpoints.delete(1)
    assert [path for path in store.objects if "step-" in path] == [mine]


def test_directory_that_was_copied_from_a_disk_is_continued(store: Store, tmp_path: Path) -> None:
    with ingot.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state(1))
    for path in (tmp_path / "run").rglob("*.*"):
        store.objects[AT + path.relative_to(tmp_path / "run").as_posix()] = Stored(path.read_bytes(), {})
    with opened(store, keep=1) as checkpoints:
        assert checkpoints.load()["step"] == 1
        checkpoints.save(2, state(2))
    assert opened(store).steps() == [2]
    assert names(store, 1) == []


# Refusals. -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["gs://bucket/run", "https://host/run", "hf://me/repo/run"])
def test_stores_that_are_not_written_are_rejected(url: str) -> None:
    with pytest.raises(OptionError, match="s3://"):
        ingot.Checkpoints(url)


def test_folder_of_another_program_is_rejected(store: Store) -> None:
    store.objects[f"{AT}checkpoint-500/model.safetensors"] = Stored(b"", {})
    with pytest.raises(
        CheckpointError, match="`checkpoint-500` is a checkpoint of another program"
    ) as caught:
        opened(store)
    assert caught.value.code == "foreign-checkpoints"


def test_store_that_ignores_conditions_is_rejected_before_a_step_is_written(store: Store) -> None:
    store.rules = STORES["unconditional"]
    with pytest.raises(StorageError) as caught, opened(store) as checkpoints:
        checkpoints.save(1, state(1))
    assert caught.value.code == "unconditional-store"
    assert store.objects == {}


def test_list_that_is_refused_is_an_error_with_the_url(store: Store) -> None:
    store.faults = [Fault("list", 0, "refused", 99)]
    with pytest.raises(PermissionError, match="AccessDenied") as caught:
        opened(store)
    assert caught.value.filename == f"{URL}/"


# Damage. ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["removed", "truncated", "data", "commit"])
def test_load_goes_back_from_a_damaged_step(store: Store, damage: str) -> None:
    save(store, 1, 2)
    path = object_of(store, 2, "checkpoint.json" if damage == "commit" else ".safetensors")
    if damage == "removed":
        del store.objects[path]
    elif damage == "data":
        data = bytearray(store.objects[path].data)
        data[-1] ^= 1
        store.objects[path] = Stored(bytes(data), {})
    else:
        store.objects[path] = Stored(store.objects[path].data[:-20], {})
    checkpoints = opened(store)
    with pytest.warns(RuntimeWarning, match="step 2 is damaged, so step 1 is the latest"):
        assert checkpoints.latest(verify=True) == 1
    with pytest.warns(RuntimeWarning, match="step 2 is damaged, so step 1 was loaded"):
        assert checkpoints.load()["step"] == 1
    with pytest.raises((IntegrityError, CheckpointError, FileNotFoundError)):
        checkpoints.load(2)


def test_store_that_cannot_be_reached_is_no_damage(store: Store) -> None:
    save(store, 1, 2)
    checkpoints = opened(store)
    store.faults = [Fault("get", store.asked.count("get"), "failed", 99)]
    checkpoints._steps.options = {**store.options, "retries": 0}  # type: ignore[typeddict-item]
    with pytest.raises(StorageError):
        checkpoints.latest()


# Going back. -----------------------------------------------------------------------------------------------


def test_steps_that_training_has_gone_back_from_are_marked(store: Store) -> None:
    save(store, 1, 2, 3)
    with opened(store) as checkpoints:
        checkpoints.load(1)
        with pytest.warns(RuntimeWarning, match="later ones were marked as abandoned: step-00000002-1-"):
            checkpoints.save(2, state(2, saver=1))
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.load()["saver"] == 1
    assert len(names(store, 2)) == 3 + 2
    assert names(store, 3)[0].endswith("/abandoned")


def test_failed_save_gives_abandoned_steps_back(store: Store) -> None:
    save(store, 1, 2)
    with opened(store) as checkpoints:
        checkpoints.load(1)
        # Two writes of the probe, the lease and the mark are answered, and the state is refused.
        store.faults = [Fault("put", store.asked.count("put") + 4, "refused")]
        with pytest.raises(PermissionError):
            checkpoints.save(2, state(2, saver=1), background=False)
    assert opened(store).load()["saver"] == 0
    assert not any("abandoned" in one for one in names(store))


# One writer. -----------------------------------------------------------------------------------------------


def test_second_writer_is_refused_and_readers_are_not(store: Store) -> None:
    with opened(store) as first:
        first.save(1, state(1))
        first.wait()
        other = opened(store)
        other.load()
        with pytest.raises(StorageError, match="another Checkpoints of this program") as caught:
            other.save(2, state(2))
        assert caught.value.code == "busy"
        assert other.load()["step"] == 1
    # The lease has ended.
    save(store, 2)
    assert leases(store) == [".ingot-lease/2.json"]


def test_writer_on_another_machine_is_busy_while_it_renews(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store) as first:
        first.save(1, state(1), background=False)
        second, ages = opened(store), iter([20, 20, 21, 1])
        with monkeypatch.context() as patch:
            patch.setattr(store_lease, "is_alive", lambda holder: None)
            patch.setattr(store_lease, "_ages", lambda folder, options: {1: next(ages)})
            with pytest.raises(StorageError) as caught:
                second.delete(1)
        assert caught.value.code == "busy"
        assert next(ages, None) is None


@pytest.mark.parametrize("end", ["killed here", "silent elsewhere"])
def test_lease_of_a_dead_writer_is_taken(store: Store, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    first = opened(store)
    first.save(1, state(1), background=False)
    monkeypatch.setattr(store_lease, "is_alive", lambda holder: False if end == "killed here" else None)
    if end == "silent elsewhere":
        store.objects[AT + leases(store)[0]].modified -= lease.EXPIRE_SECONDS
    save(store, 2)
    with pytest.raises(StorageError, match="another process has taken the lease") as caught:
        first.save(3, state(3), background=False)
    assert caught.value.code == "lease-lost"
    assert opened(store).steps() == [1, 2]


def test_save_whose_lease_is_lost_meanwhile_makes_no_step(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_lease, "is_alive", lambda holder: False)
    first, taken = opened(store), []

    def take(kind: str) -> None:
        if kind == "put" and not taken and names(store, 1):
            taken.append(kind)
            store.objects[f"{AT}.ingot-lease/2.json"] = Stored(b"{}", {})

    store.watch = take
    first.save(1, state(1), background=False)
    store.watch = take
    taken.clear()
    with pytest.raises(StorageError) as caught:
        first.save(2, state(2), background=False)
    assert caught.value.code == "lease-lost"


def test_lease_is_renewed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    with opened(store) as checkpoints:
        checkpoints.save(1, state(1), background=False)
        lease_at = AT + leases(store)[0]
        renewed = threading.Event()
        store.watch = lambda kind: renewed.set() if kind == "put" else None
        assert renewed.wait(60)
    content = json.loads(store.objects[lease_at].data)
    assert content["seconds"] == 0.0


def test_leftovers_of_killed_savers_are_removed_when_they_are_old(store: Store) -> None:
    save(store, 1)
    left = f"{AT}step-00000009-1-{'a' * 16}/state-{'a' * 16}.safetensors"
    deleted = f"{AT}step-00000008-1-{'b' * 16}/"
    commit = store.objects[object_of(store, 1, "checkpoint.json")].data
    store.objects |= {
        left: Stored(b"", {}),
        f"{deleted}deleting.json": Stored(commit, {}),
        f"{deleted}state-{'b' * 16}.safetensors": Stored(b"", {}),
    }
    save(store, 2)
    assert left in store.objects
    assert not any(path.startswith(deleted) for path in store.objects)
    store.objects[left].modified -= 1000
    save(store, 3)
    assert left not in store.objects


def test_interrupted_deletion_of_a_pinned_step_is_undone(store: Store) -> None:
    save(store, 1, 2)
    path = object_of(store, 1, "checkpoint.json")
    store.objects[path.replace("checkpoint", "deleting")] = store.objects.pop(path)
    store.objects[path.replace("checkpoint.json", "pinned")] = Stored(b"", {})
    assert opened(store).steps() == [2]
    # A process that takes the lease finishes or undoes interrupted deletions.
    with opened(store) as checkpoints:
        checkpoints.delete(2)
    assert opened(store).steps() == [1]


# Lost and late answers. ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut before", "cut after", "failed after", "twice"])
def test_lost_answer_changes_nothing(store: Store, how: str) -> None:
    kinds = ("put", "list", "get", "delete")
    store.faults = [Fault(kind, number, how) for kind in kinds for number in (0, 7)]
    save(store, 1, 2, keep=1)
    assert opened(store).steps() == [2]
    assert opened(store).load()["step"] == 2


def test_step_whose_commit_is_written_although_its_answer_is_lost_exists(store: Store) -> None:
    with ingot.Checkpoints(URL, storage_options={**store.options, "retries": 0}) as checkpoints:
        checkpoints.save(1, state(1), background=False)
        # The state, and then the commit file, whose check is lost too.
        put, head = store.asked.count("put"), store.asked.count("head")
        store.faults = [Fault("put", put + 1, "cut after"), Fault("head", head, "cut before", 9)]
        checkpoints.save(2, state(2), background=False)
    assert opened(store).load()["step"] == 2


def test_step_whose_commit_may_still_be_written_keeps_its_files(store: Store) -> None:
    with opened(store) as checkpoints:
        checkpoints.save(1, state(1), background=False)
        checkpoints._steps.options = {**store.options, "retries": 0}  # type: ignore[typeddict-item]
        store.faults = [Fault("put", store.asked.count("put") + 1, "late")]
        with pytest.raises(StorageError) as caught:
            checkpoints.save(2, state(2), background=False)
        assert "the step exists then" in "".join(caught.value.__notes__)
        assert checkpoints.steps() == [1]
        store.carry_out(*store.late.pop())
        assert checkpoints.steps() == [1, 2]
        # Saving it again does nothing.
        checkpoints.save(2, state(2), background=False)
    assert opened(store).load()["step"] == 2


@dataclass
class Wire:
    """A saver's way to the store. After it is cut, requests arrive late: when `store.carry_out` gets them."""

    store: Store
    #: Requests until it is cut.
    left: float = float("inf")
    late: list[tuple[str, Request, bytes]] = field(default_factory=list)
    server: Server = field(default_factory=lambda: Server(0))

    def answer(self, handler: Handler, request: Request) -> None:
        self.left -= 1
        if self.left >= 0:
            self.store.answer(handler, request)
            return
        body = handler.rfile.read(int(request.headers.get("content-length", 0)))
        self.late.append((handler.command, request, body))
        handler.close_connection = True

    @property
    def options(self) -> Any:
        return {**self.store.options, "endpoint": self.server.url(""), "retries": 0}


@contextmanager
def wired(store: Store) -> Iterator[Wire]:
    wire = Wire(store)
    with serving(wire.answer) as wire.server:
        yield wire


def test_late_requests_of_a_dead_saver_harm_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_lease, "is_alive", lambda holder: False)
    with wired(store) as wire:
        dead = ingot.Checkpoints(URL, keep=1, storage_options=wire.options)
        for step in (1, 2):
            dead.save(step, state(step, saver=1), background=False)
        dead.wait()
        store.faults = [Fault("put", store.asked.count("put") + 1, "late")]
        with pytest.raises(StorageError):
            dead.save(3, state(3, saver=1), background=False)
        wire.left = 0
        with opened(store, keep=2) as checkpoints:
            assert checkpoints.load()["step"] == 2
            for step in (3, 4):
                checkpoints.save(step, state(step, saver=2), background=False)
            checkpoints.wait()
            # The same step of the dead saver, with the lower lease.
            store.carry_out(*store.late.pop())
            assert len(names(store, 3)) == 4
            assert opened(store).load(3)["saver"] == 2
            checkpoints.save(5, state(5, saver=2))
    assert opened(store).load()["saver"] == 2


def test_any_faults_and_kills_lose_and_mix_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"INGOT_SEED={SEED}")
    rng = random.Random(SEED)
    monkeypatch.setattr(store_lease, "is_alive", lambda holder: False)
    hows = [how for how in stores.FAULTS if "in 200" not in how and not how.startswith("replaced")]
    for number in range(ROUNDS):
        with stores.running(is_signed=False) as store, ExitStack() as wires:
            keep = rng.choice((None, None, 1, 2))
            told: list[Any] = [SEED, number, keep]
            known: dict[int, int] = {}
            late: list[tuple[str, Request, bytes]] = []
            for saver in range(1, 4):
                wire = wires.enter_context(wired(store))
                wire.left = rng.randint(5, 120)
                store.faults = [
                    Fault(
                        rng.choice(("put", "list", "get", "delete", "head")),
                        rng.randint(0, 200),
                        rng.choice([*hows, "late"]),
                        rng.choice((1, 1, 2, 9)),
                    )
                    for _ in range(rng.randint(0, 4))
                ]
                told += [saver, wire.left, store.faults]
                run_saver(wire, saver, keep, rng, known, told)
                store.faults = []
                late += wire.late + store.late
                store.late.clear()
                rng.shuffle(late)
                for _ in range(rng.randint(0, len(late))):
                    store.carry_out(*late.pop())
                check_known(store, known, keep, told)
            for one in late:
                store.carry_out(*one)
            check_known(store, known, keep, told)
    note("folders of checkpoints in stores with faults and kills", ROUNDS, 0, seed=SEED)


def run_saver(
    wire: Wire, saver: int, keep: int | None, rng: random.Random, known: dict[int, int], told: list[Any]
) -> None:
    """Save steps until the wire is cut, or a few. `known` gets the saver of each acknowledged step."""
    with suppress(OSError, CheckpointError), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        checkpoints = ingot.Checkpoints(URL, keep, storage_options=wire.options)
        newest = checkpoints.latest()
        if newest is not None:
            found = checkpoints.load()
            assert (found["weights"] == found["step"]).all(), told
        step = newest or 0
        for _ in range(rng.randint(1, 6)):
            step += 1
            try:
                checkpoints.save(step, state(step, saver), background=rng.random() < 0.5)
                checkpoints.wait()
            except OSError as fault:
                told.append((saver, step, fault))
                continue
            known[step] = saver
            told.append((saver, step))
        checkpoints._steps.lease.release()
        while checkpoints._pending:
            with suppress(OSError):
                checkpoints.wait()


def check_known(store: Store, known: dict[int, int], keep: int | None, told: list[Any]) -> None:
    """Check that every acknowledged step that stays is there, and that each step is whole and of one save."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints = opened(store)
        steps = checkpoints.steps()
        # A deletion after the save may have failed, so that a later step exists too.
        assert max(steps, default=0) >= max(known, default=0), (told, steps)
        assert keep is not None or {*known} <= {*steps}, (told, steps)
        assert checkpoints.latest(verify=True) == (steps[-1] if steps else None), told
        for step in steps:
            found = checkpoints.load(step)
            assert found["step"] == step, told
            assert (found["weights"] == step).all(), told
            # After the deletion of a step, a late one with the same number may appear until the next one.
            if keep is None or step == steps[-1]:
                assert found["saver"] == known.get(step, found["saver"]), told
