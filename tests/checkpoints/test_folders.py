"""A folder of checkpoints: saving, finding, keeping and refusing."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from ingot._checkpoints import lease as leases
from ingot._state import commit as commits
from ingot._write.background import SAVES, SaveFuture
from support.processes import run
from support.small_disk import small_disk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def state(step: int, size: int = 4) -> dict[str, Any]:
    return {"weights": numpy.full(size, step, "f4"), "step": step}


def name(step: int) -> str:
    return f"step-{step:08d}"


def save(folder: Path, *steps: int, **options: Any) -> None:
    with ingot.Checkpoints(folder, **options) as checkpoints:
        if checkpoints.latest() is not None:
            checkpoints.load()
        for step in steps:
            checkpoints.save(step, state(step))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def file(step: Path) -> Path:
    """Return the file of a step's state."""
    return next(step.glob("state-*.safetensors"))


def damage_data(step: Path) -> None:
    flip(file(step), -1)


def damage_header(step: Path) -> None:
    data = file(step).read_bytes()
    assert data.count(b'"step":') == 0
    file(step).write_bytes(data.replace(b'\\"step\\":', b'\\"stop\\":', 1))


def truncate(step: Path) -> None:
    os.truncate(file(step), 100)


def truncate_commit(step: Path) -> None:
    os.truncate(step / "checkpoint.json", 50)


def remove(step: Path) -> None:
    file(step).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], None], type[Exception], str | None]] = {
    "data": (damage_data, ingot.IntegrityError, "digest-mismatch"),
    "header": (damage_header, ingot.IntegrityError, "digest-mismatch"),
    "truncated": (truncate, ingot.CheckpointError, "changed-step"),
    "commit": (truncate_commit, ingot.CheckpointError, "invalid-commit"),
    "removed": (remove, FileNotFoundError, None),
}


def test_checkpoints_save_find_and_load(folder: Path) -> None:
    with ingot.Checkpoints(folder) as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.steps() == []
        for step in (100, 200):
            checkpoints.save(step, state(step))
    other = ingot.Checkpoints(folder)
    assert other.steps() == [100, 200]
    assert other.latest() == other.latest(verify=True) == 200
    assert other.load()["step"] == 200
    assert (other.load(100)["weights"] == 100).all()
    assert sorted(os.listdir(folder)) == [name(100), name(200)]
    assert sorted(os.listdir(folder / name(100))) == ["checkpoint.json", file(folder / name(100)).name]
    # The file of a step is one that other functions read.
    assert ingot.numpy.load_state(folder / name(100))["step"] == 100
    assert ingot.verify(file(folder / name(100)))


def test_save_is_visible_after_wait_and_without_background_at_once(folder: Path) -> None:
    checkpoints = ingot.Checkpoints(folder)
    checkpoints.save(1, state(1), background=False)
    assert checkpoints.steps() == [1]
    checkpoints.save(2, state(2))
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]


def test_save_copies_the_state_before_it_returns(folder: Path) -> None:
    live = state(1, 1_000_000)
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, live)
        live["weights"][:] = 2
    assert (ingot.Checkpoints(folder).load()["weights"] == 1).all()


def test_load_fills_torch_objects_and_finds_the_framework(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"model": model, "optimizer": optimizer, "step": 1})
    assert json.loads((folder / name(1) / "checkpoint.json").read_text("utf-8"))["framework"] == "torch"
    other = torch.nn.Linear(2, 2)
    fresh = torch.optim.AdamW(other.parameters())
    found = ingot.Checkpoints(folder).load(into={"model": other, "optimizer": fresh, "step": 0})
    assert found["model"] is other
    assert found["step"] == 1
    assert torch.equal(other.weight, model.weight)
    moments = [one.state_dict()["state"][0]["exp_avg"] for one in (fresh, optimizer)]
    assert torch.equal(*moments)
    for into in (None, {"step": 0}):
        found = ingot.Checkpoints(folder).load(into=into)
        assert isinstance(found["model"]["weight"], torch.Tensor)
    arrays = ingot.Checkpoints(folder, framework="numpy").load()
    assert isinstance(arrays["model"]["weight"], torch.Tensor | numpy.ndarray)


def test_checkpoints_do_not_import_torch(folder: Path) -> None:
    pytest.importorskip("torch")
    save_torch = """
import torch
with ingot.Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(1, {"weights": torch.ones(3)})
"""
    assert run(save_torch, folder).code == 0
    load = """
found = ingot.Checkpoints(sys.argv[1]).load()
say(["torch" in sys.modules, type(found["weights"]).__name__])
"""
    assert run(load, folder).said() == [False, "ndarray"]


def test_retention_keeps_the_last_multiples_pinned_and_best_steps(folder: Path) -> None:
    losses = {1: 0.1, 2: 5.0, 3: 4.0, 4: 3.0, 5: float("nan"), 6: 0.2, 7: 6.0, 8: 7.0, 9: 8.0}
    with ingot.Checkpoints(folder, keep=2, keep_every=4, best=("loss", "min", 2)) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, state(step), metrics={"loss": loss})
            if step == 3:
                checkpoints.pin(3)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3, 4, 6, 8, 9]
        assert checkpoints.best() == 1
        checkpoints.delete(3)
        checkpoints.delete(1)
        assert checkpoints.steps() == [4, 6, 8, 9]
        assert checkpoints.best() == 6


def test_retention_keeps_all_with_none(folder: Path) -> None:
    save(folder, *range(6), keep=None)
    assert ingot.Checkpoints(folder).steps() == [*range(6)]


def test_retention_keeps_a_pin_of_another_process(folder: Path) -> None:
    with ingot.Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        ingot.Checkpoints(folder).pin(1)
        checkpoints.save(2, state(2))
        checkpoints.save(3, state(3))
    assert ingot.Checkpoints(folder).steps() == [1, 3]


def test_retention_keeps_the_last_step_that_is_whole(folder: Path) -> None:
    save(folder, 1, 2, 3)
    for step in (2, 3):
        truncate(folder / name(step))
    from ingot._checkpoints.disk import DiskSteps
    from ingot._checkpoints.retention import Rules

    DiskSteps(str(folder)).apply(Rules(1, None, None))
    assert ingot.Checkpoints(folder).steps() == [1, 3]


def test_retention_keeps_files_of_the_user(folder: Path) -> None:
    save(folder, 1)
    (folder / name(1) / "notes.txt").write_text("mine")
    save(folder, 2, keep=1)
    assert os.listdir(folder / name(1)) == ["notes.txt"]
    assert ingot.Checkpoints(folder).steps() == [2]


def test_a_renamed_step_is_damaged_and_does_not_count(folder: Path) -> None:
    with ingot.Checkpoints(folder, keep=1, best=("loss", "min", 1)) as checkpoints:
        checkpoints.save(90, state(90), metrics={"loss": 0.2})
        checkpoints.save(100, state(100), metrics={"loss": 0.1})
        checkpoints.save(110, state(110), metrics={"loss": 0.3})
        checkpoints.wait()
        assert checkpoints.steps() == [100, 110]
        (folder / name(100)).rename(folder / name(50))
        assert checkpoints.best() == 110
        checkpoints.save(120, state(120), metrics={"loss": 0.4})
    assert checkpoints.steps() == [50, 110, 120]
    with pytest.raises(
        ingot.CheckpointError, match=f"the directory is {name(50)}, the commit file is of step 100"
    ) as raised:
        checkpoints.load(50)
    assert raised.value.code == "invalid-commit"


def test_delete_removes_a_step_with_a_damaged_commit_file(folder: Path) -> None:
    save(folder, 1, 2)
    truncate_commit(folder / name(1))
    ingot.Checkpoints(folder).delete(1)
    assert name(1) not in os.listdir(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights on Windows")
def test_retention_deletes_a_step_behind_a_link(folder: Path) -> None:
    save(folder, 1)
    elsewhere = folder.parent / "elsewhere"
    (folder / name(1)).rename(elsewhere)
    (folder / name(1)).symlink_to(elsewhere)
    (folder / name(7)).symlink_to(folder.parent / "nothing")
    save(folder, 2, 3, 4, keep=1)
    assert ingot.Checkpoints(folder).steps() == [4]
    assert os.listdir(elsewhere) == []


def test_metrics_may_be_tensors_that_require_gradients(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    with ingot.Checkpoints(folder, best=("loss", "min", 1)) as checkpoints, warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.save(1, state(1), metrics={"loss": torch.ones(1, requires_grad=True) / 2})
        checkpoints.wait()
        assert checkpoints.best() == 1
        with pytest.raises(TypeError, match="metrics must be a dict of str to float"):
            checkpoints.save(2, state(2), metrics={"loss": torch.ones(2)})


def test_load_of_a_step_that_is_deleted_meanwhile_raises_no_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1, 2)
    check = commits.check

    def delete_and_check(path: str, commit: commits.Commit, names: list[str]) -> None:
        shutil.rmtree(path)
        check(path, commit, names)

    monkeypatch.setattr(commits, "check", delete_and_check)
    with pytest.raises(ingot.CheckpointError, match="no step 1") as raised:
        ingot.Checkpoints(folder).load(1)
    assert raised.value.code == "no-step"


@pytest.mark.parametrize("kind", DAMAGES)
def test_load_falls_back_to_the_previous_step(folder: Path, kind: str) -> None:
    spoil, error, code = DAMAGES[kind]
    save(folder, 700, 800, 900)
    for step in (800, 900):
        spoil(folder / name(step))
    checkpoints = ingot.Checkpoints(folder)
    with pytest.warns(RuntimeWarning, match="steps 900, 800 are damaged, so step 700 was loaded") as told:
        assert checkpoints.load()["step"] == 700
    assert [one.filename for one in told] == [__file__]
    with pytest.raises(error) as raised:
        checkpoints.load(900)
    assert getattr(raised.value, "code", None) == code
    assert name(900) in str(raised.value)


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "data"])
def test_latest_skips_damaged_steps(folder: Path, kind: str) -> None:
    save(folder, 1, 2)
    DAMAGES[kind][0](folder / name(2))
    with pytest.warns(RuntimeWarning, match="step 1 is the latest that is whole"):
        assert ingot.Checkpoints(folder).latest() == 1


def test_latest_with_verify_reads_all_bytes(folder: Path) -> None:
    save(folder, 1, 2)
    damage_data(folder / name(2))
    checkpoints = ingot.Checkpoints(folder)
    assert checkpoints.latest() == 2
    with pytest.warns(RuntimeWarning, match="`weights`"):
        assert checkpoints.latest(verify=True) == 1


def test_load_without_a_whole_step_raises(folder: Path) -> None:
    save(folder, 1, 2)
    for step in (1, 2):
        damage_data(folder / name(step))
    for call in (ingot.Checkpoints(folder).load, partial(ingot.Checkpoints(folder).latest, verify=True)):
        with pytest.raises(ingot.CheckpointError, match=r"steps 2, 1 is whole.*choose another") as raised:
            call()
        assert raised.value.code == "no-valid-step"
    assert isinstance(raised.value.__cause__, ingot.IntegrityError)


def test_load_does_not_fall_back_for_objects_that_do_not_fit(folder: Path) -> None:
    save(folder, 1, 2)
    other = {"weights": numpy.zeros(5, "f4"), "step": 0}
    with pytest.raises(ingot.DestinationError) as raised:
        ingot.Checkpoints(folder).load(into=other)
    assert raised.value.code == "destination-shape"


def test_load_rejects_the_file_of_another_save(folder: Path) -> None:
    save(folder, 1, 2)
    one, two = (folder / name(step) for step in (1, 2))
    found = commits.read(str(two))
    file(two).write_bytes(file(one).read_bytes())
    # A commit file that describes that file.
    facts = commits.stored(str(file(two)))
    commits.replace_file(
        str(two / "checkpoint.json"),
        [found._replace(files={found.tree: facts}).text()],
        overwrite=True,
    )
    with pytest.raises(ingot.CheckpointError, match="expected the file of save") as raised:
        ingot.Checkpoints(folder).load(2)
    assert raised.value.code == "changed-step"
    with pytest.warns(RuntimeWarning):
        assert ingot.Checkpoints(folder).load()["step"] == 1


def test_save_sets_later_steps_aside_after_falling_back(folder: Path) -> None:
    save(folder, 700, 800, 900)
    damage_data(folder / name(900))
    damage_header(folder / name(800))
    with ingot.Checkpoints(folder) as checkpoints:
        with pytest.warns(RuntimeWarning):
            checkpoints.load()
        with pytest.warns(
            RuntimeWarning, match="renamed to abandoned-00000800-.*, abandoned-00000900-"
        ) as told:
            checkpoints.save(1000, state(1000))
        assert [one.filename for one in told] == [__file__]
        checkpoints.wait()
        assert checkpoints.steps() == [700, 1000]
        checkpoints.load(700)
        # The caller goes back to an earlier step on purpose.
        with pytest.warns(RuntimeWarning, match="renamed to abandoned-00001000-"):
            checkpoints.save(1000, {**state(1000), "again": True})
    assert ingot.Checkpoints(folder).load()["again"]
    aside = sorted(one for one in os.listdir(folder) if not one.startswith("step"))
    assert [one[:-16] for one in aside] == [
        "abandoned-00000800-",
        "abandoned-00000900-",
        "abandoned-00001000-",
    ]


def test_save_sets_later_steps_aside_after_loading_an_earlier_one(folder: Path) -> None:
    save(folder, 1, 2, 3)
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.load(1)
        with pytest.warns(RuntimeWarning, match="renamed to abandoned-00000002-.*, abandoned-00000003-"):
            checkpoints.save(4, state(4))
    assert checkpoints.steps() == [1, 4]


def test_save_of_a_state_that_cannot_be_stored_leaves_all_steps(folder: Path) -> None:
    save(folder, 1, 2, 3)
    before = sorted(path.name for path in folder.rglob("*"))
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.load(1)
        with pytest.raises(ingot.SaveError):
            checkpoints.save(2, {"hook": lambda: None})
    assert sorted(path.name for path in folder.rglob("*")) == before
    assert checkpoints.latest(verify=True) == 3


def test_save_of_the_same_step_again_does_nothing(folder: Path) -> None:
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state(1), metrics={"loss": 1.0, "nan": numpy.nan})
        checkpoints.wait()
        before = (folder / name(1) / "checkpoint.json").stat()
        checkpoints.save(1, state(1))
        checkpoints.save(1, state(1), metrics={"nan": numpy.nan, "loss": 1})
        assert (folder / name(1) / "checkpoint.json").stat() == before
        with pytest.raises(ingot.CheckpointError, match=r"metrics \{'loss': 1\.0, ") as raised:
            checkpoints.save(1, state(1), metrics={"loss": 2.0})
    assert raised.value.code == "step-exists"


def test_save_by_processes_without_a_group_names_the_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1)
    with ingot.Checkpoints(folder) as checkpoints:
        with pytest.raises(ingot.CheckpointError) as alone:
            checkpoints.save(1, state(1))
        assert "torchrun" not in str(alone.value)
        # As torchrun sets it.
        monkeypatch.setenv("WORLD_SIZE", "4")
        with pytest.raises(ingot.CheckpointError, match=r"the 4 processes .*init_process_group") as raised:
            checkpoints.save(1, state(1))
        assert raised.value.code == "not-resumed"


@pytest.mark.parametrize("first", [1, 6, 1000])
def test_save_refuses_to_begin_anew_in_a_used_directory(folder: Path, first: int) -> None:
    save(folder, 5, 6)
    with (
        ingot.Checkpoints(folder) as checkpoints,
        pytest.raises(ingot.CheckpointError, match="this program has saved or loaded none") as raised,
    ):
        checkpoints.save(first, state(first))
    assert raised.value.code == "not-resumed"
    assert ingot.Checkpoints(folder).steps() == [5, 6]


def test_save_refuses_to_set_aside_what_another_process_saved(folder: Path) -> None:
    save(folder, 1)
    late = ingot.Checkpoints(folder)
    late.load()
    save(folder, 2)
    with (
        late,
        pytest.raises(
            ingot.CheckpointError, match="saved step 2, and this program has saved or loaded step 1 last"
        ) as raised,
    ):
        late.save(3, state(3))
    assert raised.value.code == "not-resumed"


def test_load_chooses_again_while_steps_vanish(folder: Path) -> None:
    ends = threading.Event()
    faults: list[BaseException] = []
    seen: list[int] = []

    def read() -> None:
        while not ends.is_set():
            try:
                found = ingot.Checkpoints(folder).load()
                assert (found["weights"] == found["step"]).all()
                seen.append(found["step"])
            except BaseException as fault:
                faults.append(fault)
                return

    with ingot.Checkpoints(folder, keep=1) as checkpoints, warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.save(0, state(0), background=False)
        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for step in range(1, 200):
            checkpoints.save(step, state(step, 1000))
        ends.set()
        for reader in readers:
            reader.join()
    assert not faults, faults
    assert len(set(seen)) > 2


def test_a_full_disk_is_a_clear_error_and_leaves_the_steps(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        checkpoints = ingot.Checkpoints(disk / "run")
        checkpoints.save(1, state(1), background=False)
        checkpoints.save(2, state(2, 2_000_000))
        with pytest.raises(ingot.StorageError, match=f"{name(2)}/state-.*No space") as raised:
            checkpoints.wait()
        assert (raised.value.code, raised.value.errno) == ("write", errno.ENOSPC)
        with pytest.raises(ingot.StorageError, match="No space"):
            checkpoints.save(2, state(2, 2_000_000), background=False)
        assert not (disk / "run" / name(2)).exists()
        checkpoints.save(2, state(2))
        checkpoints.wait()
        assert checkpoints.latest(verify=True) == 2


@pytest.mark.filterwarnings("ignore:.*training continues from an earlier step:RuntimeWarning")
@pytest.mark.parametrize("step", [2, 3])
def test_failed_background_save_puts_back_the_steps_that_were_set_aside(step: int, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        save(disk / "run", 1, 2, 3)
        with ingot.Checkpoints(disk / "run") as checkpoints:
            checkpoints.load(1)
            checkpoints.save(step, state(step, 2_000_000))
            with pytest.raises(ingot.StorageError, match="No space"):
                checkpoints.wait()
            assert checkpoints.steps() == [1, 2, 3]
            assert checkpoints.latest(verify=True) == 3
            checkpoints.save(step, state(step))
            checkpoints.wait()
            assert checkpoints.steps() == [1, step]
            checkpoints.load()
        assert ingot.Checkpoints(disk / "run").latest(verify=True) == step


@pytest.mark.skipif(sys.platform == "win32", reason="Windows may not let users make links")
def test_a_link_to_nowhere_is_named_as_missing(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone", target_is_directory=True)
    with pytest.raises(FileNotFoundError, match="run"):
        ingot.Checkpoints(tmp_path / "run")


def test_delete_on_a_full_disk_names_a_way_out(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        save(disk / "run", 1, 2)
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while filler.write(bytes(512)):
                pass
        with pytest.raises(ingot.StorageError, match="remove the directory of a step") as raised:
            ingot.Checkpoints(disk / "run").delete(1)
    assert (raised.value.code, raised.value.errno) == ("lease", errno.ENOSPC)


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are texts elsewhere")
def test_a_directory_with_a_name_that_is_not_utf_8_has_steps(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff"))
    save(folder, 1, 2)
    assert ingot.Checkpoints(folder).latest(verify=True) == 2
    damage_data(folder / name(2))
    with pytest.warns(RuntimeWarning, match="step 1 was loaded"):
        assert ingot.Checkpoints(folder).load()["step"] == 1


def test_a_background_failure_is_raised_by_the_next_save(folder: Path) -> None:
    checkpoints = ingot.Checkpoints(folder)
    checkpoints.save(1, state(1), background=False)
    fail_in_background(checkpoints, folder)
    with pytest.raises(OSError, match=name(2)):
        checkpoints.save(3, state(3))
    assert not list((folder / name(2)).glob("state-*"))
    # The error was raised once; the next save works.
    checkpoints.save(3, state(3))
    with pytest.raises(OSError, match=name(4)), checkpoints:
        fail_in_background(checkpoints, folder, 4)
    assert checkpoints.steps() == [1, 3]


def fail_in_background(checkpoints: ingot.Checkpoints, folder: Path, step: int = 2) -> None:
    """Save a step whose commit file cannot be written, since its name is a directory's."""
    gate = threading.Event()
    SAVES.put(gate.wait, SaveFuture())
    try:
        checkpoints.save(step, state(step))
        (folder / name(step) / "checkpoint.json").mkdir()
        (folder / name(step) / "checkpoint.json" / "x").touch()
    finally:
        gate.set()
    while checkpoints._pending and not checkpoints._pending[0].done():
        time.sleep(0.01)
    (folder / name(step) / "checkpoint.json" / "x").unlink()
    (folder / name(step) / "checkpoint.json").rmdir()


def test_pending_saves_end_before_the_program_and_failures_are_printed(folder: Path) -> None:
    program = """
checkpoints = ingot.Checkpoints(sys.argv[1])
checkpoints.save(1, {"weights": numpy.ones(5_000_000)})
"""
    ended = run(program, folder)
    assert (ended.code, ended.err) == (0, "")
    assert ingot.Checkpoints(folder).latest(verify=True) == 1
    assert [one for one in os.listdir(folder) if "lease" in one] == []
    failing = (
        program.replace("save(1,", "load(); checkpoints.save(2,")
        + """
os.makedirs(sys.argv[1] + "/step-00000002/checkpoint.json/x")
"""
    )
    ended = run(failing, folder)
    assert "a background save failed" in ended.err
    assert str(folder / name(2)) in ended.err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no interval timers")
def test_the_end_of_the_block_keeps_pending_saves_when_a_signal_interrupts_it(folder: Path) -> None:
    def leave(number: int, frame: Any) -> None:
        raise SystemExit(143)

    gate = threading.Event()
    # Opens the gate if the signal comes too early to do so.
    backstop = threading.Timer(5, gate.set)
    backstop.start()
    before = signal.signal(signal.SIGALRM, leave)
    try:
        checkpoints = ingot.Checkpoints(folder)
        SAVES.put(gate.wait, SaveFuture())
        checkpoints.save(1, state(1))
        with pytest.raises(SystemExit), checkpoints:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
    finally:
        signal.signal(signal.SIGALRM, before)
        gate.set()
        backstop.cancel()
    checkpoints.wait()
    assert checkpoints.steps() == [1]
    assert os.listdir(folder) == [name(1)]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM to itself")
def test_the_end_of_the_block_in_another_thread_releases_the_lease(folder: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    checkpoints = ingot.Checkpoints(folder)
    checkpoints.save_on_signal(signal.SIGTERM)
    faults: list[BaseException] = []

    def end() -> None:
        try:
            with checkpoints:
                checkpoints.save(1, state(1))
        except ValueError as fault:
            faults.append(fault)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    signal.signal(signal.SIGTERM, before)
    assert len(faults) == 1
    assert os.listdir(folder) == [name(1)]


def test_threads_may_share_an_object(folder: Path) -> None:
    faults: list[BaseException] = []

    with ingot.Checkpoints(folder, keep=2) as checkpoints:

        def work() -> None:
            try:
                checkpoints.wait()
                checkpoints.load()
                checkpoints.pin(1)
            except BaseException as fault:
                faults.append(fault)

        gate = threading.Event()
        SAVES.put(gate.wait, SaveFuture())
        checkpoints.save(1, state(1))
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        gate.set()
        for thread in threads:
            thread.join()
    assert not faults, faults
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(checkpoints)


def test_an_error_in_the_block_is_not_replaced_by_a_failed_save(folder: Path) -> None:
    def fail() -> None:
        with ingot.Checkpoints(folder) as checkpoints:
            checkpoints.save(1, state(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert ingot.Checkpoints(folder).latest() == 1


def test_a_state_that_cannot_be_stored_leaves_nothing(folder: Path) -> None:
    with ingot.Checkpoints(folder) as checkpoints, pytest.raises(ingot.SaveError) as raised:
        checkpoints.save(1, {"hook": lambda: None})
    assert raised.value.code == "not-plain"
    assert os.listdir(folder) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM to itself")
def test_save_on_signal_remembers_and_restores(folder: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.save_on_signal(signal.SIGTERM)
        assert not checkpoints.stopping()
        for step in range(1000):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            is_last = checkpoints.stopping()
            if is_last:
                checkpoints.save(step, state(step))
                break
    assert signal.getsignal(signal.SIGTERM) is before
    assert 3 <= checkpoints.steps()[0] <= 4


@pytest.mark.parametrize("other", ["checkpoint-500", "500", "epoch=1-step=4.ckpt", "global_step10", "step-7"])
def test_a_directory_of_another_program_is_refused(folder: Path, other: str) -> None:
    (folder / other).mkdir(parents=True)
    with pytest.raises(
        ingot.CheckpointError, match=f"`{other}` is a checkpoint of another program"
    ) as raised:
        ingot.Checkpoints(folder)
    assert raised.value.code == "foreign-checkpoints"


def test_files_beside_the_steps_do_not_matter(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.yaml").touch()
    (folder / "logs").mkdir()
    save(folder, 1)
    assert ingot.Checkpoints(folder).steps() == [1]


def test_a_commit_file_of_another_program_is_refused(folder: Path) -> None:
    (folder / name(1)).mkdir(parents=True)
    (folder / name(1) / "checkpoint.json").write_text('{"step": 1}')
    checkpoints = ingot.Checkpoints(folder)
    for call in (checkpoints.latest, checkpoints.load):
        with pytest.raises(ingot.CheckpointError, match="another program wrote it") as raised:
            call()
        assert raised.value.code == "foreign-checkpoints"


def test_a_step_is_saved_beside_files_of_the_user(folder: Path) -> None:
    save(folder, 1)
    (folder / name(1) / "eval.json").write_text("{}")
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.load()
        checkpoints.delete(1)
        assert os.listdir(folder / name(1)) == ["eval.json"]
        checkpoints.save(1, state(1))
    assert checkpoints.latest(verify=True) == 1
    assert (folder / name(1) / "eval.json").read_text() == "{}"


def test_a_later_schema_is_refused(folder: Path) -> None:
    save(folder, 1, 2)
    path = folder / name(2) / "checkpoint.json"
    path.write_text(path.read_text("utf-8").replace('"version": 1', '"version": 2'))
    checkpoints = ingot.Checkpoints(folder)
    for call in (checkpoints.latest, checkpoints.load):
        with pytest.raises(ingot.CheckpointError, match="update ingot") as raised:
            call()
        assert raised.value.code == "later-checkpoint"
    # No call deletes it either.
    with ingot.Checkpoints(folder, keep=1) as other:
        other.load(1)
        with pytest.raises(ingot.CheckpointError, match="update ingot"):
            other.save(3, state(3))
        other.pin(2)
        with pytest.raises(ingot.CheckpointError, match="update ingot"):
            other.delete(2)
        assert (folder / name(2) / "pinned").exists()
    assert other.steps() == [1, 2]


FILES = '"files": {'
INVALID = {
    "a path": (FILES, FILES + '"../x.safetensors": {"nbytes": 1, "header_nbytes": 1, "header_blake3": ""},'),
    "itself": (FILES, FILES + '"checkpoint.json": {"nbytes": 1, "header_nbytes": 1, "header_blake3": ""},'),
    "no save": ('"save":', '"saved":'),
    "no tree": ('"tree": "state', '"tree": "other'),
    "a text as version": ('"version": 1', '"version": "1"'),
    "a negative size": ('"nbytes": ', '"nbytes": -'),
    "a header longer than the file": ('"header_nbytes": ', '"header_nbytes": 999'),
    "a list of metrics": ('"metrics": {}', '"metrics": []'),
    "a fraction as step": ('"step": 1', '"step": 1.5'),
}


@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_commit_file_is_refused(folder: Path, kind: str) -> None:
    save(folder, 1)
    path = folder / name(1) / "checkpoint.json"
    text = path.read_text("utf-8")
    assert INVALID[kind][0] in text
    path.write_text(text.replace(*INVALID[kind]))
    with pytest.raises(ingot.CheckpointError) as raised:
        ingot.Checkpoints(folder).load(1)
    assert raised.value.code == "invalid-commit"
    assert str(path) in str(raised.value)


def test_steps_that_do_not_exist_raise(folder: Path) -> None:
    checkpoints = ingot.Checkpoints(folder)
    for call in (
        checkpoints.load,
        lambda: checkpoints.load(7),
        lambda: checkpoints.pin(7),
        lambda: checkpoints.delete(7),
    ):
        with pytest.raises(ingot.CheckpointError) as raised:
            call()
        assert raised.value.code == "no-step"
    assert not folder.exists()
    save(folder, 1)
    with pytest.raises(ingot.CheckpointError, match="no step 7: the last of 1 is 1"):
        checkpoints.load(7)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"keep": 0}, ingot.OptionError, "keep 0 is out of range"),
        ({"keep_every": 0}, ingot.OptionError, "keep_every 0"),
        ({"keep": "3"}, TypeError, "keep must be an int or None, found str"),
        ({"best": "loss"}, TypeError, r"best must be a tuple such as \(\"loss\", \"min\", 2\)"),
        ({"best": ("loss", "least", 1)}, ingot.OptionError, "'least' is unknown: expected one of min, max"),
        ({"best": ("loss", "min", 0)}, ingot.OptionError, "best 0 is out of range"),
        ({"framework": "mlx"}, ingot.OptionError, "no training states: expected one of torch, flax, numpy"),
        ({"kep": 1}, TypeError, "did you mean 'keep'"),
    ],
)
def test_wrong_options_are_named(
    folder: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        ingot.Checkpoints(folder, **options)


def test_wrong_arguments_are_named(folder: Path) -> None:
    checkpoints: Any = ingot.Checkpoints(folder)
    with pytest.raises(TypeError, match=r"save\(\): step must be an int, found str"):
        checkpoints.save("1", state(1))
    with pytest.raises(TypeError, match=r"save\(\): metrics must be a dict or None, found list"):
        checkpoints.save(1, state(1), metrics=[1])
    for value in ("1", 10**400, numpy.ones(2), None):
        with pytest.raises(TypeError, match="metrics must be a dict of str to float"):
            checkpoints.save(1, state(1), metrics={"loss": value})
    with pytest.raises(TypeError, match=r"latest\(\): verify"):
        checkpoints.latest(verify=1)
    with pytest.raises(ingot.OptionError, match="best") as raised:
        checkpoints.best()
    assert raised.value.code == "no-metric"
    (folder.parent / "file").touch()
    with pytest.raises(NotADirectoryError):
        ingot.Checkpoints(folder.parent / "file")
    with pytest.raises(ingot.OptionError):
        ingot.Checkpoints("gs://bucket/run")


# The lease.


def test_a_second_writer_is_refused_while_the_first_one_lives(folder: Path) -> None:
    with ingot.Checkpoints(folder) as first:
        first.save(1, state(1))
        first.wait()
        second = ingot.Checkpoints(folder)
        second.load()
        with pytest.raises(ingot.StorageError, match="another Checkpoints of this program") as raised:
            second.save(2, state(2))
        assert raised.value.code == "busy"
        with pytest.raises(ingot.StorageError):
            second.delete(1)
    second.save(2, state(2))
    second.wait()
    assert second.steps() == [1, 2]


def test_the_lease_ends_with_its_object(folder: Path) -> None:
    ingot.Checkpoints(folder).save(1, state(1), background=False)
    ended = time.monotonic() + 60
    # The thread of background work may hold the object for a moment.
    while "lease" in str(os.listdir(folder)) and time.monotonic() < ended:
        gc.collect()
        time.sleep(0.01)
    assert "lease" not in str(os.listdir(folder))


def other_lease(folder: Path, **facts: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / ".ingot-lease-1.json"
    holder = leases.Holder("a" * 16, "elsewhere", "", 7, "", 0.3)._replace(**facts)
    path.write_text(json.dumps(holder._asdict()))
    return path


def test_the_lease_of_another_machine_is_refused_while_it_is_renewed(folder: Path) -> None:
    path = other_lease(folder, seconds=60.0)
    ends = threading.Event()

    def renew() -> None:
        while not ends.wait(0.2):
            os.utime(path)

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        with pytest.raises(ingot.StorageError, match="process 7 on elsewhere") as raised:
            ingot.Checkpoints(folder).save(1, state(1))
    finally:
        ends.set()
        renewing.join()
    assert raised.value.code == "busy"


def test_the_lease_of_another_machine_expires(folder: Path) -> None:
    other_lease(folder)
    save(folder, 1)
    assert os.listdir(folder) == [name(1)]
    hour_ago = time.time() - 3600
    os.utime(other_lease(folder, seconds=float("inf")), (hour_ago, hour_ago))
    save(folder, 2)
    assert sorted(os.listdir(folder)) == [name(1), name(2)]


def test_the_lease_of_a_dead_process_is_taken_at_once(folder: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    facts = {"host": leases.gethostname(), "boot": leases._boot(), "process": done.pid, "started": "1"}
    other_lease(folder, seconds=1e9, **facts)
    save(folder, 1)
    assert os.listdir(folder) == [name(1)]


def test_a_lost_lease_stops_the_first_writer(folder: Path) -> None:
    with ingot.Checkpoints(folder) as first:
        first.save(1, state(1), background=False)
        # As if it had been suspended for a minute.
        for path in folder.glob(".ingot-lease-*"):
            path.unlink()
        save(folder, 2)
        with pytest.raises(ingot.StorageError, match="the file of the lease is gone") as raised:
            first.save(2, state(2))
        assert raised.value.code == "lease-lost"
        other_lease(folder)
        with pytest.raises(ingot.StorageError, match="another process has taken the lease"):
            first.save(2, state(2))
    assert first.steps() == [1, 2]


def test_a_writer_that_was_suspended_leaves_the_step_of_its_successor(folder: Path) -> None:
    gate = threading.Event()
    with ingot.Checkpoints(folder) as first:
        first.save(1, state(1), background=False)
        SAVES.put(gate.wait, SaveFuture())
        first.save(2, state(2))
        # As if it had been suspended for a minute. Another process saves the same step.
        for path in folder.glob(".ingot-lease-*"):
            path.unlink()
        program = """
checkpoints = ingot.Checkpoints(sys.argv[1])
checkpoints.load()
checkpoints.save(2, {"step": "other"}, background=False)
"""
        assert run(program, folder).code == 0
        gate.set()
        with pytest.raises(ingot.StorageError) as raised:
            first.wait()
        assert raised.value.code == "lease-lost"
    assert ingot.Checkpoints(folder).load()["step"] == "other"
    assert len(os.listdir(folder / name(2))) == 2


def test_a_save_does_not_commit_without_the_lease(folder: Path) -> None:
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state(1), background=False)
        checkpoints.save(2, state(2, 20_000_000))
        for path in folder.glob(".ingot-lease-*"):
            path.unlink()
        with pytest.raises(ingot.StorageError, match="lease"):
            checkpoints.wait()
    assert checkpoints.steps() == [1]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, FileExistsError])
def test_the_lease_does_not_lock_out_its_own_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    link = leases._link

    def link_and_fail(new: str, path: str) -> None:
        monkeypatch.setattr(leases, "_link", link)
        link(new, path)
        raise fault

    monkeypatch.setattr(leases, "_link", link_and_fail)
    with ingot.Checkpoints(folder) as checkpoints:
        with contextlib.suppress(KeyboardInterrupt):
            checkpoints.save(1, state(1))
        checkpoints.save(1, state(1))
    assert checkpoints.steps() == [1]
    assert os.listdir(folder) == [name(1)]


@pytest.mark.skipif(sys.platform != "linux", reason="hidepid is an option of /proc")
def test_the_lease_of_a_process_that_proc_hides_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_others(path: str, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith("/stat"):
            raise FileNotFoundError(errno.ENOENT, "hidden", path)
        return open(path, *arguments, **options)

    facts = {"host": leases.gethostname(), "boot": leases._boot(), "process": os.getpid(), "started": "1"}
    other_lease(folder, seconds=1e9, **facts)
    monkeypatch.setattr(leases, "open", open_others, raising=False)
    with pytest.raises(ingot.StorageError) as raised:
        ingot.Checkpoints(folder).save(1, state(1))
    assert raised.value.code == "busy"


def test_the_lease_is_renewed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.01)
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state(1))
        path = next(folder.glob(".ingot-lease-*"))
        os.utime(path, (0, 0))
        until = time.monotonic() + 60
        while path.stat().st_mtime == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0


def test_a_directory_that_cannot_be_locked_is_a_clear_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        save(disk, 1)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        checkpoints = ingot.Checkpoints(disk)
        assert checkpoints.load()["step"] == 1
        with pytest.raises(ingot.StorageError, match=r"could not take the lease .*Read-only file") as raised:
            checkpoints.save(2, state(2))
    assert (raised.value.code, raised.value.errno) == ("lease", errno.EROFS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_the_child_of_a_fork_does_not_have_the_lease(folder: Path) -> None:
    program = """
checkpoints = ingot.Checkpoints(sys.argv[1])
checkpoints.save(1, {"step": 1}, background=False)
checkpoints.wait()
child = os.fork()
if child == 0:
    try:
        checkpoints.save(2, {"step": 2}, background=False)
    except ingot.StorageError as error:
        os._exit(7 if error.code == "busy" else 8)
    os._exit(9)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
checkpoints.save(3, {"step": 3}, background=False)
say([code, checkpoints.steps()])
"""
    assert run(program, folder).said() == [7, [1, 3]]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports zombies")
def test_the_lease_of_a_zombie_is_taken_at_once(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    facts = {"host": leases.gethostname(), "boot": leases._boot(), "started": leases._started(child.pid)}
    other_lease(folder, seconds=500.0, process=child.pid, **facts)
    assert child.stdin is not None
    child.stdin.close()
    until = time.monotonic() + 60
    while leases._started(child.pid) != "dead" and time.monotonic() < until:
        time.sleep(0.01)
    save(folder, 1)
    assert os.listdir(folder) == [name(1)]
    child.wait()


def test_save_of_tensors_that_share_memory_names_a_way_out(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(6.0)
    with ingot.Checkpoints(folder) as checkpoints, pytest.raises(ingot.SharedMemoryError) as raised:
        checkpoints.save(1, {"a": base[:4], "b": base[2:]})
    assert "none holds all of it: save `tensor.clone()` of one of them" in str(raised.value)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_save_leaves_the_garbage_collector_as_it_was(is_enabled: bool, folder: Path) -> None:
    before = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with ingot.Checkpoints(folder) as checkpoints:
            checkpoints.save(1, {"step": 1})
            with pytest.raises(ingot.SaveError):
                checkpoints.save(2, {"step": object()})
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_load_of_a_step_itself_names_a_way_out(folder: Path) -> None:
    save(folder, 1)
    with pytest.raises(ingot.CheckpointError, match="it is a step itself, so pass the directory"):
        ingot.Checkpoints(folder / name(1)).load()
