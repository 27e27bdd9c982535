"""The programs of the guide: an inference process follows a trainer that is killed half-way."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from ingot.torch import load_state  # noqa: E402
from support.guides import at_step, programs, run  # noqa: E402


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_inference_follows_a_trainer_that_is_killed(tmp_path: Path) -> None:
    train, infer = programs("inference.md")
    kill = f'__import__("os").kill(__import__("os").getpid(), {signal.SIGKILL:d})'
    with subprocess.Popen(
        [sys.executable, "-c", infer], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert run(at_step(train, 130, kill), tmp_path) == -signal.SIGKILL
            assert run(train, tmp_path) == 0
            printed, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    steps = [int(line.split()[0]) for line in printed.splitlines()]
    assert steps == sorted({*steps})
    assert steps[-1] == 200
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    load_state(tmp_path / "run" / "step-00000200", into={"model": model}, keys="model.*")
    with torch.inference_mode():
        expected = model(torch.ones(1, 8)).item()
    assert float(printed.split()[-1]) == expected
