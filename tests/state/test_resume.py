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
    def look(killed: Path) -> None:
        assert ingot.torch.load_state(killed / "state.safetensors")["step"] == 100

    program = programs("training-state.md")[0]
    assert len(program.splitlines()) <= 30
    check_resume(program, 120, tmp_path, "state.safetensors", look)
