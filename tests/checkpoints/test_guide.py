"""The training program of the guide, killed half-way."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
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
    def look(killed: Path) -> None:
        # The last save may have been pending.
        assert ingot.Checkpoints(killed / "run").latest(verify=True) in (100, 120)

    check_resume(programs(GUIDE)[0], 130, tmp_path, "run/step-00000200", look)


def test_the_guide_saves_the_step_at_which_a_signal_arrives(tmp_path: Path) -> None:
    first, _, last = programs(GUIDE)
    signalled = at_step(last, 7, "signal.raise_signal(signal.SIGTERM)")
    assert run(first.partition("with ingot")[0] + signalled, tmp_path) == 0
    assert ingot.Checkpoints(tmp_path / "run").steps() == [7]
