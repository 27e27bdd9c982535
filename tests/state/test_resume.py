"""The training program of the guide, killed half-way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import ingot.torch  # noqa: E402
from support.guides import check_resume, programs  # noqa: E402


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_the_program_of_the_guide_resumes_after_a_kill(tmp_path: Path) -> None:
    def check(killed: Path) -> None:
        assert ingot.torch.load_state(killed / "state.safetensors")["step"] == 100

    program = programs("training-state.md")[0]
    assert len(program.splitlines()) <= 30
    check_resume(program, 120, tmp_path, "state.safetensors", check)


OLD = """
import os, torch
if not os.path.exists("run.pt"):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 20}, "run.pt")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_the_program_that_leaves_torch_save_resumes_after_a_kill(tmp_path: Path) -> None:
    def check(killed: Path) -> None:
        assert ingot.torch.load_state(killed / "run.safetensors")["step"] == 100

    program = next(text for text in programs("../start/from-torch-save.md") if "run.pt" in text)
    check_resume(OLD + program, 120, tmp_path, "run.safetensors", check)
