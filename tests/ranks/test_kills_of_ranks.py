"""Ranks that save checkpoints are killed at random moments, one or all: no step is lost or mixed.

``INGOT_CHECKPOINTS_KILLS=1000`` sets the number of kills, ``INGOT_CHECKPOINTS_SEED`` the seed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import ingot

if sys.platform == "win32":
    pytest.skip("Windows has no SIGKILL", allow_module_level=True)

KILLS = int(os.environ.get("INGOT_CHECKPOINTS_KILLS", "8"))
SEED = int(os.environ.get("INGOT_CHECKPOINTS_SEED", "0")) or random.SystemRandom().randrange(1 << 32)

# Forks two ranks for each line that it reads: importing torch takes longer than they live.
NURSERY = r"""
import json, os, random, signal, sys, time
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
import ingot, ingot.torch

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.set_num_threads(1)


class Own:
    def __init__(self, step): self.step = step
    def state_dict(self): return {"rank": dist.get_rank(), "step": self.step}
    def load_state_dict(self, state): self.step = state["step"]


def state(mesh, step):
    part = DTensor.from_local(torch.full((3000, 3), step), mesh, [Shard(0)])
    return {"part": part, "replica": torch.full((2000,), step), "own": Own(step), "step": step}


def save(folder, seed, rank, report):
    store = dist.FileStore(f"{folder}.store-{seed}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    dice = random.Random(seed)
    checkpoints = ingot.Checkpoints(folder, dice.choice([1, 2, 3]))
    into = state(mesh, 0)
    step = checkpoints.load(into=into)["step"] if checkpoints.latest() is not None else 0
    assert (into["part"].to_local() == step).all() and into["own"].step == step, "mixed"
    report(f"loaded {step}")
    while True:
        step += dice.randint(1, 3)
        report(f"begins {step}")
        background = dice.random() < 0.5
        checkpoints.save(step, state(mesh, step), background=background)
        if background and dice.random() < 0.5:
            checkpoints.wait()
            background = False
        if not background:
            report(f"saved {step}")


def forked(folder, seed, rank):
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    os.close(read)
    try:
        save(folder, seed, rank, lambda text: os.write(write, f"{text}\n".encode()))
    except ingot.RankError as error:
        os.write(write, b"lost 0\n")
    except BaseException:
        import traceback
        os.write(write, ("fault " + json.dumps(traceback.format_exc()) + "\n").encode())
    os._exit(1)


for line in sys.stdin:
    folder, seed, first, delays = json.loads(line)
    children = [forked(folder, seed, rank) for rank in range(2)]
    pipes = [open(read, "rb") for _, read in children]
    said = [[pipe.readline().decode().strip()] for pipe in pipes]
    for rank, delay in zip((first, 1 - first), delays):
        time.sleep(delay)
        os.kill(children[rank][0], signal.SIGKILL)
    for (child, _), pipe, lines in zip(children, pipes, said):
        os.waitpid(child, 0)
        with pipe:
            lines += pipe.read().decode().splitlines()
    print(json.dumps(said), flush=True)
"""


def test_ranks_that_are_killed_lose_and_mix_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(SEED)
    folder, newest, begun, counts = tmp_path / "run", 0, 0, dict.fromkeys(("begins", "saved", "loaded"), 0)
    process = subprocess.Popen(
        [sys.executable, "-c", NURSERY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for _ in range(max(1, KILLS // 2)):
            # The second rank is killed at once, or when it has found out that the first is gone.
            delays = [dice.uniform(0.0, 0.5), dice.choice([0.0, dice.uniform(0.0, 0.5)])]
            order = [str(folder), dice.randrange(1 << 32), dice.randrange(2), delays]
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            for line in [line for said in json.loads(process.stdout.readline()) for line in said]:
                what, _, rest = line.partition(" ")
                assert what != "fault", json.loads(rest)
                counts[what] = counts.get(what, 0) + 1
                newest = max(newest, int(rest)) if what == "saved" else newest
                begun = max(begun, int(rest)) if what == "begins" else begun
            newest = checked(folder, newest, begun)
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
    with capsys.disabled():
        print(f"\nINGOT_CHECKPOINTS_SEED={SEED}, {counts}", end=" ")


def checked(folder: Path, newest: int, begun: int) -> int:
    """Compare the directory with what the ranks reported, and return its newest step."""
    checkpoints = ingot.Checkpoints(folder)
    latest = checkpoints.latest(verify=True) or 0
    assert newest <= latest <= begun
    for step in checkpoints.steps():
        with warnings.catch_warnings():
            # The states of two ranks are loaded by one.
            warnings.simplefilter("ignore", RuntimeWarning)
            found = checkpoints.load(step)
        assert found["step"] == step
        assert torch.equal(found["part"], torch.full((6000, 3), step))
        assert torch.equal(found["replica"], torch.full((2000,), step))
        assert found["own"] == [{"rank": 0, "step": step}, {"rank": 1, "step": step}]
    return latest
