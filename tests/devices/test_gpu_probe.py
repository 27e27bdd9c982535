"""The bench of the parts of a load onto a GPU, on the simulated driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.commands import environment

from .simulator import ROOT, built

PROBE = ROOT / "benches" / "gpu" / "probe.py"
PLANT = """
import ctypes, runpy, sys
ctypes.CDLL(sys.argv[1]).fake_cuda_mistake(ctypes.c_size_t(int(sys.argv[2])))
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
#: Threads do not wait for events.
NO_HOST_WAIT = 1

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads past the page cache as Linux does")


def probed(tmp_path: Path, sections: str, *, mistake: int = 0) -> tuple[int, list[dict[str, Any]]]:
    """Run the probe without a GPU, and return its exit code and its rows."""
    record = tmp_path / "probe.json"
    command = [sys.executable, "-c", PLANT, str(built()), str(mistake), str(PROBE), "--dry-run", "--mib=16"]
    command += [f"--only={sections}", f"--dir={tmp_path}", f"--json={record}"]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert not ended.stderr
    return ended.returncode, json.loads(record.read_text())["rows"]


def test_probe_measures_its_sections_without_a_gpu(tmp_path: Path) -> None:
    code, rows = probed(tmp_path, "C,F,I")
    assert code == 0
    units = {(row["section"], row["unit"]) for row in rows if row["section"] != "B"}
    assert units == {("C", "ms"), ("F", "GB/s"), ("I", "")}
    assert all(row["value"] > 0 for row in rows if row["unit"])
    values = {row["what"]: row["value"] for row in rows}
    assert "ingot" in values
    assert values["cuEventQuery, relaxed mode"] == "kept"
    assert values["cuEventQuery, global mode"] == "lost"


def test_probe_finds_wrong_bytes(tmp_path: Path) -> None:
    code, rows = probed(tmp_path, "F", mistake=NO_HOST_WAIT)
    assert code == 1
    assert any(row["value"] == "failed" and "wrong bytes" in row["note"] for row in rows)
