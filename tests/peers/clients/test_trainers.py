"""Trainers of other libraries save and resume by ingot: the programs of the guide, killed half-way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ingot
import ingot.numpy
from support.guides import programs

TRANSFORMERS, ACCELERATE, LIGHTNING = programs("trainers.md")
KILL = f'__import__("os").kill(__import__("os").getpid(), {signal.SIGKILL:d})'
# Programs that read a pickle fail.
NO_PICKLE = """
import pickle, torch
def refuse(*_, **__): raise AssertionError("a pickle was read")
torch.load = pickle.load = refuse
"""


def run(program: str, folder: Path, *launcher: str) -> int:
    """Run a program in a folder, without a network and a GPU. Return its exit status."""
    folder.mkdir(exist_ok=True)
    file = folder / "program.py"
    file.write_text(NO_PICKLE + program)
    around = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    own = {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **around, **own}
    done = subprocess.run(
        [sys.executable, *launcher, str(file)],
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    print(done.stdout, done.stderr)
    return done.returncode


def check_resume(program: str, killed: str, folder: Path, saved: list[str]) -> None:
    """Compare the files of a program with the files of another run, which is killed and run again."""
    assert killed != program
    assert run(program, folder / "whole") == 0
    assert run(killed, folder / "killed") == -signal.SIGKILL
    assert run(program, folder / "killed") == 0
    for name in saved:
        assert_same(folder / "whole" / name, folder / "killed" / name)
    assert_no_pickle(folder)


def assert_same(expected: Path, found: Path) -> None:
    """Compare two files of tensors. Generators of Python and NumPy may begin with other seeds."""
    one, other = (ingot.numpy.load_file(path) for path in (expected, found))
    assert one.keys() == other.keys()
    compared = [name for name in one if not name.startswith(("rng.python", "rng.numpy"))]
    assert all(one[name].tobytes() == other[name].tobytes() for name in compared)
    assert compared


def assert_no_pickle(folder: Path) -> None:
    """Raise if a file is a pickle, or an archive of torch with one."""
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.read_bytes()[:2] not in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05"), path


def losses(folder: Path) -> list[str]:
    return re.findall(r'"loss": (.*),', (folder / "run/checkpoint-20/trainer_state.json").read_text())


def test_trainer_of_transformers_resumes_after_a_kill(tmp_path: Path) -> None:
    callback = f"""
from transformers import TrainerCallback
class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 10: {KILL}
trainer.add_callback(Kill())
"""
    before, train, after = TRANSFORMERS.partition("trainer.train(")
    last = "run/checkpoint-20"
    saved = [f"{last}/model.safetensors"]
    saved += [f"{last}/training_state/{name}.safetensors" for name in ("state", "rng-0")]
    check_resume(TRANSFORMERS, before + callback + train + after, tmp_path, saved)
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")
    assert len(losses(tmp_path / "whole")) == 20
    names = ingot.open(tmp_path / "whole" / saved[1]).keys()
    assert "optimizer.state.transformer.wte.weight.exp_avg" in names


def killed_at(epoch: int, batch: int) -> str:
    """Return the program of accelerate, killed after a batch."""
    step = "progress.batch += 1\n"
    kill = f"        if (progress.epoch, progress.batch) == ({epoch}, {batch}): {KILL}\n"
    return ACCELERATE.replace(step, step + kill)


def test_accelerator_resumes_after_a_kill(tmp_path: Path) -> None:
    check_resume(ACCELERATE, killed_at(1, 6), tmp_path, ["checkpoint/state.safetensors"])


def test_accelerators_of_two_processes_resume_after_a_kill(tmp_path: Path) -> None:
    two = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(ACCELERATE, whole, *two) == 0
    assert run(killed_at(1, 6), killed, *two) != 0
    assert [path.name[:10] for path in sorted((killed / "checkpoint").glob("rank-*"))] == [
        "rank-00000",
        "rank-00001",
    ]
    assert run(ACCELERATE, killed, *two) == 0
    assert_same(*(folder / "checkpoint/state.safetensors" for folder in (whole, killed)))
    ranks = [sorted((folder / "checkpoint").glob("rank-*")) for folder in (whole, killed)]
    assert len(ranks[0]) == 2
    for expected, found in zip(*ranks, strict=True):
        assert_same(expected, found)
    # One process loads the state of two.
    alone = ACCELERATE.replace("range(progress.epoch, 3)", "range(progress.epoch, 4)")
    assert run(alone, killed) == 0


def test_trainer_of_lightning_resumes_after_a_kill(tmp_path: Path) -> None:
    step = "        return loss\n"
    kill = f"        if self.global_step == 10: {KILL}\n"
    check_resume(LIGHTNING, LIGHTNING.replace(step, kill + step), tmp_path, ["run/last.ckpt"])


@pytest.mark.parametrize("text", [TRANSFORMERS, ACCELERATE, LIGHTNING])
def test_programs_of_the_guide_are_short(text: str) -> None:
    assert len(text.splitlines()) <= 60
