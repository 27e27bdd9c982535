"""The training program of the guide, killed half-way."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import ingot.torch  # noqa: E402

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "training-state.md"


def program() -> str:
    match = re.search(r"^```python\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def run(text: str, folder: Path) -> int:
    return subprocess.run([sys.executable, "-c", text], cwd=folder, check=False).returncode


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_the_program_of_the_guide_resumes_after_a_kill(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert run(program(), whole) == 0
    step = 'state["step"] += 1\n'
    assert program().count(step) == 1
    dying = program().replace(
        step, f'{step}    if state["step"] == 120: os.kill(os.getpid(), {signal.SIGKILL:d})\n'
    )
    assert run(dying, killed) == -signal.SIGKILL
    assert ingot.torch.load_state(killed / "state.safetensors")["step"] == 100
    assert run(program(), killed) == 0
    # The generators of Python and NumPy began with other seeds.
    found, expected = (
        ingot.torch.load_file(folder / "state.safetensors", drop=ingot.glob("rng.python.*", "rng.numpy.*"))
        for folder in (killed, whole)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(program().splitlines()) <= 30
