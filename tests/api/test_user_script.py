"""The program that checkers look at runs."""

from __future__ import annotations

import runpy
from pathlib import Path


def test_user_script_runs(tmp_path: Path) -> None:
    program = runpy.run_path(str(Path(__file__).with_name("user_script.py")))
    program["main"](str(tmp_path / "w.safetensors"))
