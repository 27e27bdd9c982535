"""The lock of a directory: one save at a time, and no file of a running save is removed."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ingot
import ingot.dcp
from ingot._ranks import peers
from ingot._write import directory as lock
from ingot.torch import load_file, load_into, save_sharded
from support.ranks import PROMPT, contents

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {name: torch.arange(4.0) for name in "abc"}


def test_locked_raises_with_the_directory_and_the_process(tmp_path: Path) -> None:
    with (
        lock.locked(str(tmp_path)),
        pytest.raises(ingot.StorageError, match=f"process {os.getpid()} on") as raised,
    ):
        threads_save(tmp_path, 0.1)
    assert raised.value.code == "busy"
    assert str(tmp_path) in str(raised.value)
    assert os.listdir(tmp_path) == []


def threads_save(folder, seconds):
    with lock.locked(str(folder), seconds):
        pass


def test_save_sharded_waits_for_another_save(tmp_path: Path) -> None:
    began = threading.Event()

    def hold():
        with lock.locked(str(tmp_path)):
            began.set()
            time.sleep(0.3)
            (tmp_path / "model.safetensors").write_bytes(b"")

    thread = threading.Thread(target=hold)
    thread.start()
    began.wait()
    save_sharded(STATE, tmp_path, overwrite=True)
    thread.join()
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert load_file(tmp_path).keys() == STATE.keys()


def test_locked_finds_other_spellings_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model", target_is_directory=True)
    with lock.locked(str(tmp_path / "model")), pytest.raises(ingot.StorageError, match="another save"):
        threads_save(tmp_path / "link", 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_fork_holds_no_lock(tmp_path: Path) -> None:
    read, write = os.pipe()
    with lock.locked(str(tmp_path)):
        child = os.fork()
        if not child:
            os.read(read, 1)
            os._exit(lock.is_held(str(tmp_path)))
    with lock.locked(str(tmp_path), 0):
        pass
    os.write(write, b".")
    assert os.waitpid(child, 0)[1] == 0


def killed_holder(folder):
    with lock.locked(str(folder)):
        (folder / ".ingot-01234567.model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def left_by_killed(folder):
    folder.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=killed_holder, args=(folder,))
    process.start()
    process.join()
    assert sorted(os.listdir(folder)) == [".ingot-01234567.model.safetensors", lock.NAME]


@pytest.mark.skipif(sys.platform == "win32", reason="processes are not forked")
def test_save_removes_leftovers_in_sibling_directories(tmp_path: Path) -> None:
    for name in ("step-100", "step-300", "other-100"):
        left_by_killed(tmp_path / name)
    (tmp_path / "step-300" / "mine").write_text("stays")
    (tmp_path / "step-400").mkdir()
    with lock.locked(str(tmp_path / "step-400")):
        (tmp_path / "step-400" / ".ingot-76543210.model.safetensors").write_bytes(b"live")
        save_sharded(STATE, tmp_path / "step-200")
        assert len(os.listdir(tmp_path / "step-400")) == 2
    assert not (tmp_path / "step-100").exists()
    assert os.listdir(tmp_path / "step-300") == ["mine"]
    assert len(os.listdir(tmp_path / "other-100")) == 2
    assert os.listdir(tmp_path / "step-200") == ["model.safetensors"]


def test_save_keeps_indexed_files_in_sibling_directories(tmp_path: Path) -> None:
    save_sharded(STATE, tmp_path / "step-1", 16)
    hidden = ".ingot-01234567.model-00001-of-00003.safetensors"
    (tmp_path / "step-1" / "model-00001-of-00003.safetensors").rename(tmp_path / "step-1" / hidden)
    path = tmp_path / "step-1" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["a"] = hidden
    path.write_text(json.dumps(index))
    (tmp_path / "step-1" / lock.NAME).write_text("")
    (tmp_path / "step-1" / ".ingot-01234567.model.safetensors.index.json").write_text("{}")
    save_sharded(STATE, tmp_path / "step-2")
    assert load_file(tmp_path / "step-1").keys() == STATE.keys()
    assert len(os.listdir(tmp_path / "step-1")) == 4


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)


@pytest.mark.usefixtures("without_locks")
def test_save_rejects_a_live_owner_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from socket import gethostname

    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.1)
    save_sharded(STATE, tmp_path)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    for owner in (f"process {os.getppid()} on {gethostname()}", "process 1 on elsewhere", ""):
        (tmp_path / lock.NAME).write_text(owner)
        with pytest.raises(ingot.StorageError, match=f"remove {lock.NAME}"):
            save_sharded(STATE, tmp_path, overwrite=True)
    # No process has this id.
    (tmp_path / lock.NAME).write_text(f"process {2**22 + 1} on {gethostname()}")
    save_sharded(STATE, tmp_path, overwrite=True)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def save_parts(state, folder, **options):
    dcp.save(
        state, storage_writer=ingot.dcp.Writer(folder, overwrite=True, whole=False), no_dist=True, **options
    )


def save_whole(state, folder, **options):
    dcp.save(state, storage_writer=ingot.dcp.Writer(folder, 16, overwrite=True, **options), no_dist=True)


def loaded(folder):
    found = {name: torch.full((4,), -1.0) for name in STATE}
    dcp.load(found, storage_reader=ingot.dcp.Reader(folder), no_dist=True)
    return {float(value) for tensor in found.values() for value in tensor}


def loaded_or_none(folder):
    """Return the values of a checkpoint. None if it is refused."""
    with suppress(CheckpointException):
        return loaded(folder)
    return None


def state(value):
    return {name: torch.full((4,), float(value)) for name in STATE}


@pytest.mark.parametrize("pattern", ["model{suffix}.safetensors", "other{suffix}.safetensors"])
def test_save_sharded_replaces_checkpoints_of_parts_and_of_tensors(tmp_path: Path, pattern: str) -> None:
    save_whole(state(1), tmp_path)
    save_parts(state(2), tmp_path)
    assert loaded(tmp_path) == {2}
    assert os.listdir(tmp_path) == ["shard-00001-model-00001-of-00001.safetensors"]
    save_sharded(state(3), tmp_path, filename_pattern=pattern, overwrite=True)
    assert loaded(tmp_path) == {3}
    assert len(os.listdir(tmp_path)) == 1
    with pytest.raises((CheckpointException, FileExistsError), match="overwrite=True"):
        dcp.save(
            state(4),
            storage_writer=ingot.dcp.Writer(tmp_path, whole=False, filename_pattern=pattern),
            no_dist=True,
        )
    assert loaded(tmp_path) == {3}


class PowerFailureError(BaseException):
    """Simulates a power failure: no code of the save runs after it."""


@pytest.mark.parametrize("old", [None, "parts", "whole", "single"])
def test_stopped_save_leaves_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str | None
) -> None:
    steps = {step: getattr(os, step) for step in ("replace", "link", "remove")}
    for stop in range(1, 60):
        folder, count = tmp_path / f"{stop}th", 0
        if old == "parts":
            save_parts(state(1) | {"old": torch.zeros(3)}, folder)
        elif old is not None:
            save_sharded(state(1), folder, 16 if old == "whole" else "1GB")

        def counted(step, stop=stop):
            def call(*arguments, **keywords):
                nonlocal count
                count += 1
                if count >= stop:
                    raise PowerFailureError(step)
                return steps[step](*arguments, **keywords)

            return call

        with monkeypatch.context() as patch:
            for step in steps:
                patch.setattr(os, step, counted(step))
            try:
                save_parts(state(2), folder)
            except BaseException:
                finished = False
            else:
                finished = True
        allowed = [{2}] if finished else [{2}, {1} if old else None]
        assert loaded_or_none(folder) in allowed, f"stopped at step {stop}"
        save_parts(state(3), folder)
        assert loaded(folder) == {3}
        assert os.listdir(folder) == ["shard-00001-model-00001-of-00001.safetensors"]
        if finished:
            return
    pytest.fail("a save takes more steps than the test looks at")


class Full(DefaultSavePlanner):
    def resolve_data(self, item):
        raise OSError(28, "No space left on device")


def saves_parts(folder, value, collectives, full_on=None, other=None):
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    tensor = distribute_tensor(torch.full((8,), value), mesh, [Shard(0)], src_data_rank=None)
    writer = ingot.dcp.Writer(other if rank == 1 and other else folder, overwrite=True, whole=False)
    planner = Full() if rank == full_on else None
    began = time.monotonic()
    try:
        dcp.save({"w": tensor}, storage_writer=writer, planner=planner, use_collectives=collectives)
    except BaseException as error:
        assert time.monotonic() - began < PROMPT
        return f"{type(error).__name__}: {error}"
    return ""


def value_in(folder):
    found = {"w": torch.zeros(8)}
    dcp.load(found, storage_reader=ingot.dcp.Reader(folder), no_dist=True)
    return set(found["w"].tolist())


@pytest.mark.parametrize("collectives", [True, False], ids=["collectives", "no collectives"])
def test_save_sharded_stores_parts_of_one_save(four, tmp_path: Path, collectives: bool) -> None:
    folder = tmp_path / "model"
    assert four.run(saves_parts, folder, 1.0, collectives) == [""] * 4
    assert len(os.listdir(folder)) == 4
    for found in four.run(saves_parts, folder, 2.0, collectives, 2):
        assert "No space left" in found
    assert value_in(folder) == {1.0}
    for found in four.run(saves_parts, folder, 2.0, collectives, None, tmp_path / "other"):
        assert "rank 1 of 4 has another directory" in found
    assert value_in(folder) == {1.0}
    assert not (tmp_path / "other").exists()
    assert four.run(saves_parts, folder, 3.0, collectives) == [""] * 4
    assert value_in(folder) == {3.0}
    assert sorted(os.listdir(folder)) == [
        f"shard-0000{n}-model-00001-of-00001.safetensors" for n in range(1, 5)
    ]


def saves_whole_alone(folder):
    try:
        dcp.save({"w": torch.zeros(3)}, storage_writer=ingot.dcp.Writer(folder), use_collectives=False)
    except ingot.OptionError as error:
        return str(error)
    return ""


def test_save_sharded_stores_tensors_by_the_common_plan(four, tmp_path: Path) -> None:
    for found in four.run(saves_whole_alone, tmp_path / "model"):
        assert "whole=False" in found
    assert not (tmp_path / "model").exists()


def whole(number):
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(30 + number, 40, generator=generator) for name in ("a", "b")}


def works(folder, sends_cpu):
    """Save two models at once: ranks 0 and 2 save one, ranks 1 and 3 the other."""
    takes_cpu = peers._takes_cpu
    if not sends_cpu:
        peers._takes_cpu = lambda group: False
    try:
        rank = dist.get_rank()
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        number = rank % 2
        mesh = DeviceMesh.from_group(groups[number], "cpu")
        tensors = {
            name: distribute_tensor(tensor, mesh, [Shard(1)], src_data_rank=None)
            for name, tensor in whole(number).items()
        }
        path = folder / str(number)
        save_sharded(tensors, path, process_group=groups[number])
        target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        load_into(target, path, read_once="job", process_group=groups[number])
        assert all(torch.equal(target[name].to_local(), tensors[name].to_local()) for name in tensors)
    finally:
        peers._takes_cpu = takes_cpu


@pytest.mark.parametrize("sends_cpu", [True, False], ids=["gloo", "a backend without the CPU"])
def test_groups_load_and_save_at_the_same_time(four, tmp_path, sends_cpu):
    four.run(works, tmp_path, sends_cpu)
    for number in range(2):
        save_sharded(whole(number), tmp_path / "one", overwrite=True)
        assert contents(tmp_path / str(number)) == contents(tmp_path / "one")
        assert all(
            torch.equal(tensor, whole(number)[name])
            for name, tensor in load_file(tmp_path / str(number)).items()
        )
