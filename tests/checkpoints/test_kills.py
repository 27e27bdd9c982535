"""Processes that save checkpoints are killed at random moments: no step is lost or mixed.

``INGOT_CHECKPOINTS_KILLS=1000`` sets the number of kills, ``INGOT_CHECKPOINTS_SEED`` the seed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("Windows has no SIGKILL", allow_module_level=True)

KILLS = int(os.environ.get("INGOT_CHECKPOINTS_KILLS", "40"))
SEED = int(os.environ.get("INGOT_CHECKPOINTS_SEED", "0")) or random.SystemRandom().randrange(1 << 32)

# Forks a saver for each line that it reads: importing NumPy takes longer than a saver lives.
NURSERY = r'''
import json, os, random, signal, sys, time, warnings
import numpy
import ingot, ingot.numpy
from ingot import Checkpoints

warnings.simplefilter("error")


def state(step, random):
    sizes = [random.choice([1, 300, 5_000, 300_000]) for _ in range(random.randint(1, 4))]
    return {"arrays": [numpy.full(size, step, "i8") for size in sizes], "step": step}


def resumed(checkpoints):
    """Return the step that is loaded, after looking for arrays of other steps."""
    if checkpoints.latest() is None:
        return 0
    found = checkpoints.load()
    assert all((array == found["step"]).all() for array in found["arrays"]), "mixed"
    return found["step"]


def saver(folder, seed, report):
    dice = random.Random(seed)
    pinned = []
    while True:
        checkpoints = Checkpoints(folder, dice.choice([1, 2, 3]), dice.choice([None, 5]), ("loss", "min", 2))
        step = resumed(checkpoints)
        try:
            while True:
                step += dice.randint(1, 3)
                report("begins", step)
                in_background = dice.random() < 0.5
                metrics = {"loss": dice.random()}
                checkpoints.save(step, state(step, dice), background=in_background, metrics=metrics)
                if dice.random() < 0.3:
                    checkpoints.wait()
                    in_background = False
                if not in_background:
                    report("saved", step)
                others = checkpoints.steps()[:-1]
                what = dice.random()
                if others and what < 0.1:
                    one = dice.choice(others)
                    try:
                        checkpoints.pin(one)
                        report("pinned", one)
                    except ingot.CheckpointError:
                        pass
                elif others and what < 0.2:
                    # A pending save may end, and its retention delete the step first.
                    one = dice.choice(others)
                    report("deletes", one)
                    try:
                        checkpoints.delete(one)
                    except ingot.CheckpointError:
                        pass
        except (ingot.StorageError, ingot.CheckpointError) as error:
            # Another saver is alive, or has saved since.
            if error.code not in ("busy", "not-resumed"):
                raise
            report(error.code, step)
            time.sleep(0.005)


def forked(folder, seed):
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    os.close(read)
    try:
        saver(folder, seed, lambda what, step: os.write(write, f"{what} {step}\n".encode()))
    except BaseException:
        import traceback
        os.write(write, ("fault " + json.dumps(traceback.format_exc()) + "\n").encode())
    os._exit(1)


for line in sys.stdin:
    folder, seeds, delays = json.loads(line)
    children = [forked(folder, seed) for seed in seeds]
    said = []
    for (child, read), delay in zip(children, delays):
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for _, read in children:
        with open(read, "rb") as pipe:
            said.append(pipe.read().decode().splitlines())
    print(json.dumps(said), flush=True)
'''


@contextmanager
def nursery() -> Iterator[Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", NURSERY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def killed(folder: Path, seeds: list[int], delays: list[float]) -> list[list[str]]:
        """Kill savers after these seconds each. Returns their reports."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([str(folder), seeds, delays]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())  # type: ignore[no-any-return]

    try:
        yield killed
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


class Known:
    """What the killed savers reported, for the comparison with the directory."""

    def __init__(self) -> None:
        self.newest = self.begun = 0
        self.pinned: set[int] = set()
        self.counts: dict[str, int] = {}

    def hear(self, lines: list[str]) -> None:
        for line in lines:
            what, _, rest = line.partition(" ")
            assert what != "fault", json.loads(rest)
            step = int(rest)
            self.counts[what] = self.counts.get(what, 0) + 1
            if what == "saved":
                self.newest = max(self.newest, step)
            elif what == "begins":
                self.begun = max(self.begun, step)
            elif what == "pinned":
                self.pinned.add(step)
            elif what == "deletes":
                self.pinned.discard(step)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("savers", [1, 2])
def test_savers_that_are_killed_lose_and_mix_nothing(
    savers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import ingot
    import ingot.numpy

    with capsys.disabled():
        print(f"\nINGOT_CHECKPOINTS_SEED={SEED}", end=" ")
    dice, known, kills = random.Random(SEED + savers), Known(), 0
    folder = tmp_path / "run"
    with nursery() as killed:
        while kills < KILLS // 2:
            delays = [dice.uniform(0.0, 0.15) for _ in range(savers)]
            reports = killed(folder, [dice.randrange(1 << 32) for _ in range(savers)], delays)
            kills += savers
            for lines in reports:
                known.hear(lines)
            checkpoints = ingot.Checkpoints(folder)
            latest = checkpoints.latest(verify=True)
            assert latest == checkpoints.latest()
            assert known.newest <= (latest or 0) <= known.begun
            known.newest = latest or 0
            steps = checkpoints.steps()
            for step in steps:
                found = checkpoints.load(step)
                assert found["step"] == step
                assert all((array == step).all() for array in found["arrays"])
            assert known.pinned <= {*steps}
    with ingot.Checkpoints(folder) as checkpoints:
        if checkpoints.latest() is not None:
            checkpoints.load()
        checkpoints.save(known.begun + 1, {"step": known.begun + 1})
    assert checkpoints.latest(verify=True) == known.begun + 1
    left = {name for name in os.listdir(folder) if not name.startswith("step-")}
    assert left == set()
    for step in checkpoints.steps():
        path = folder / f"step-{step:08d}"
        content = json.loads((path / "checkpoint.json").read_text("utf-8"))
        names = {*os.listdir(path)} - {"pinned"}
        assert names == {"checkpoint.json", f"state-{content['save']}.safetensors"}
    assert len(os.listdir(folder)) == len(checkpoints.steps())
    with capsys.disabled():
        print(f"{kills} kills of {savers} savers, {known.counts}", end=" ")
