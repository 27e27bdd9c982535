"""The training program of the guide, killed half-way."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import ingot.torch  # noqa: E402

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md"


def program() -> str:
    match = re.search(r"^```python\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def run(text: str, folder: Path) -> int:
    return subprocess.run([sys.executable, "-c", text], cwd=folder, check=False).returncode


def test_guide_saves_and_resumes_in_eight_statements() -> None:
    about = ("checkpoints", "state")
    statements = [
        one
        for one in ast.walk(ast.parse(program()))
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
    # Without the last, which prints.
    assert 6 <= len(own) - 1 <= 8


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_the_program_of_the_guide_resumes_after_a_kill(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert run(program(), whole) == 0
    step = 'state["step"] += 1\n'
    assert program().count(step) == 1
    dying = program().replace(
        step,
        f'{step}        if state["step"] == 130: __import__("os").kill(__import__("os").getpid(), '
        f"{signal.SIGKILL:d})\n",
    )
    assert run(dying, killed) == -signal.SIGKILL
    # The last save may have been pending.
    assert ingot.Checkpoints(killed / "run").latest(verify=True) in (100, 120)
    assert run(program(), killed) == 0
    # The generators of Python and NumPy began with other seeds.
    found, expected = (
        ingot.torch.load_file(
            folder / "run" / "step-00000200", drop=ingot.glob("rng.python.*", "rng.numpy.*")
        )
        for folder in (killed, whole)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_guide_saves_the_step_at_which_a_signal_arrives(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    first, _, last = snippets
    step = 'state["step"] += 1\n'
    assert last.count(step) == 1
    signalled = last.replace(
        step, f'{step}        if state["step"] == 7: signal.raise_signal(signal.SIGTERM)\n'
    )
    assert run(first.partition("with ingot")[0] + signalled, tmp_path) == 0
    assert ingot.Checkpoints(tmp_path / "run").steps() == [7]
