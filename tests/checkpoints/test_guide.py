"""The training program of the guide, killed half-way."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from socket import socket

import pytest

pytest.importorskip("torch")
import torch

import ingot
from support.guides import at_step, check_resume, programs, run

GUIDE = "checkpoints.md"


def test_guide_saves_and_resumes_in_eight_statements() -> None:
    about = ("checkpoints", "state")
    statements = [
        one
        for one in ast.walk(ast.parse(programs(GUIDE)[0]))
        if isinstance(one, ast.stmt) and not isinstance(one, ast.FunctionDef)
    ]
    own = [
        one
        for one in statements
        # The names in the statement itself, and not in those within it.
        if any(
            isinstance(name, ast.Name) and name.id in about
            for part in ast.iter_child_nodes(one)
            if not isinstance(part, ast.stmt)
            for name in ast.walk(part)
        )
    ]
    # The last statement prints, and does not count.
    assert 6 <= len(own) - 1 <= 8


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_the_program_of_the_guide_resumes_after_a_kill(tmp_path: Path) -> None:
    def check(killed: Path) -> None:
        # The last save may have been pending.
        assert ingot.Checkpoints(killed / "run").latest(verify=True) in (100, 120)

    check_resume(programs(GUIDE)[0], 130, tmp_path, "run/step-00000200", check)


def on_ranks(program: str, folder: Path, count: int) -> list[int]:
    """Run a program as ranks, and return their exit statuses."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    own = {**os.environ, **place, "TORCHELASTIC_RUN_ID": "test", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", program], cwd=folder, env={**own, "RANK": str(rank)})
        for rank in range(count)
    ]
    return [rank.wait(120) for rank in ranks]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_the_program_for_ranks_resumes_after_a_kill_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    program = programs(GUIDE)[2]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert on_ranks(program, whole, 2) == [0, 0]
    kill = f'__import__("os").kill(__import__("os").getpid(), {signal.SIGKILL:d})'
    assert -signal.SIGKILL in on_ranks(at_step(program, 13, f"dist.get_rank() and {kill}"), killed, 2)
    assert ingot.Checkpoints(killed / "run-of-ranks").latest(verify=True) in (5, 10)
    assert on_ranks(program, killed, 2) == [0, 0]
    expected, found = (weights(place) for place in (whole, killed))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoints = ingot.Checkpoints(folder / "run-of-ranks")
    assert checkpoints.steps() == [10, 15, 20]
    loaded = checkpoints.load(keys="model.*")["model"]
    assert isinstance(loaded, dict)
    return loaded


def test_the_guide_saves_the_step_at_which_a_signal_arrives(tmp_path: Path) -> None:
    first, _, _, last = programs(GUIDE)
    signalled = at_step(last, 7, "signal.raise_signal(signal.SIGTERM)")
    assert run(first.partition("with ingot")[0] + signalled, tmp_path) == 0
    assert ingot.Checkpoints(tmp_path / "run").steps() == [7]
