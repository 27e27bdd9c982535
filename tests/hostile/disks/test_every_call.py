"""Every system call of every writer: it fails, it is interrupted, and the process is killed before it.

`test_failing_calls` makes whole kinds of calls fail, and tests the messages. Here each call
fails alone. Afterwards the files must be complete, old or new as the writer reported, without leftovers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.processes import run
from support.record import note

pytestmark = pytest.mark.slow

PROGRAM = """
import faults
say(faults.findings(sys.argv[1]))
"""
WAYS = ["small", "large", "background", "background without snapshot", "checksums", "large with checksums"]
WAYS += ["bintensors", "buffers", "merge", "rewrite", "writer", "joined", "appender", "metadata", "tensor"]
WAYS += ["split", "sharded", "convert", "repair", "patched", "download"]
WAYS += ["first save", "first merge", "first split"]


@pytest.fixture
def folder(tmp_path: Path, served: None) -> Path:
    import faults

    faults.furnish(tmp_path / "models")
    return tmp_path / "models"


@pytest.mark.parametrize("way", WAYS)
def test_writers_survive_a_fault_in_any_call(folder: Path, way: str) -> None:
    found = run(PROGRAM, way, folder=folder).said()
    if found is None:
        pytest.skip("the calls of a process cannot be seen here")
    assert found.keys() == {"fail", "interrupted", "killed"}
    for what, (count, wrong) in found.items():
        note(f"system calls: {what}", count, len(wrong))
    # Record all counts, and report all failures at once.
    assert not any(wrong for _, wrong in found.values()), found
    assert min(count for count, _ in found.values()) > 3


def test_writers_are_all_tested(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import faults

    monkeypatch.chdir(folder)
    assert sorted(faults.ways(durable=True)) == sorted(WAYS)


PLANTED = """
import faults
from pathlib import Path

def careless():
    "Writes in place, and takes no notice of what goes wrong."
    try:
        with open("model.safetensors", "wb") as file:
            file.write(b"new")
            os.fsync(file.fileno())
    except OSError:
        pass

faults.ways = lambda durable: {"careless": careless}
say(faults.findings("careless"))
"""


def test_watcher_finds_a_careless_writer(folder: Path) -> None:
    found = run(PLANTED, folder=folder).said()
    if found is None:
        pytest.skip("the calls of a process cannot be seen here")
    assert any("false success" in wrong for wrong in found["fail"][1])
    assert any("neither" in wrong for wrong in found["killed"][1])


MOMENTS = """
import faults
say(faults.killed_at_random(int(sys.argv[1]), int(sys.argv[2])))
"""


KILLS_OF_ONE_SEED = 200


@pytest.mark.parametrize("seed", range(int(os.environ.get("INGOT_KILLS", "200")) // KILLS_OF_ONE_SEED))
def test_writers_killed_at_any_moment_leave_old_or_new(folder: Path, seed: int) -> None:
    done, wrong = run(MOMENTS, KILLS_OF_ONE_SEED, seed, folder=folder).said()
    note("kills at random moments", done, len(wrong))
    assert not wrong, f"seed {seed}:\n" + "\n".join(wrong)
    assert done == KILLS_OF_ONE_SEED
