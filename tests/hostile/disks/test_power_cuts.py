"""The power is cut in each operation of every writer: the files are old or new and whole, and new at the end.

A kill leaves the page cache, and a power cut does not. So all operations of a writer are recorded, and the
folder gets what POSIX allows it to have after a cut in each of them (`support.power_loss`).

``INGOT_CUTS=100000`` sets the number of outcomes in all, ``INGOT_CUTS_SEED`` the seed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from test_every_call import WAYS

from support.processes import run
from support.record import note

pytestmark = pytest.mark.slow

CUTS = int(os.environ.get("INGOT_CUTS", "2000"))
SEED = int(os.environ.get("INGOT_CUTS_SEED", "0")) or random.SystemRandom().randrange(1 << 32)

# See `cut_ways`.
MORE = ["first step", "step", "volatile checksums", "volatile large with checksums"]
MORE += ["in place", "shards in place", "volatile in place", "deltas", "cache", "full cache"]
ALL = [*WAYS, *MORE]
# Files of 36 MB, and outcomes that are read by a program, take longer.
SHARE = {"large": 0.1, "background": 0.1, "large with checksums": 0.1, "volatile large with checksums": 0.1}
SHARE |= {"split": 0.5, "sharded": 0.5, "first split": 0.5, "step": 0.5, "first step": 0.5}

PROGRAM = """
# Tests wait for no disk by default.
os.environ.pop("INGOT_DURABLE", None)
import cut_ways
say(cut_ways.findings(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.fixture
def folder(tmp_path: Path, served: None, stored: None) -> Path:
    import faults

    faults.furnish(tmp_path / "models")
    return tmp_path / "models"


@pytest.mark.parametrize("way", ALL)
def test_writers_survive_a_power_cut_in_any_operation(folder: Path, way: str) -> None:
    count = round(CUTS * SHARE.get(way, 1.0) / sum(SHARE.get(one, 1.0) for one in ALL))
    found = run(PROGRAM, way, count, SEED, folder=folder).said()
    if found is None:
        pytest.skip("the calls of a process cannot be seen here")
    operations, outcomes, wrong = found
    note("power cuts", outcomes, len(wrong), way=way, seed=SEED)
    assert not wrong, f"seed {SEED}:\n" + "\n".join(wrong)
    assert operations > 3
    assert outcomes > operations


def test_ways_are_all_cut() -> None:
    cut_ways = pytest.importorskip("cut_ways")
    assert sorted(cut_ways.MORE) == sorted(MORE)


PLANTED = """
import faults, cuts, cut_ways
faults.ways = lambda durable: cuts.PLANTED
say(cut_ways.findings(sys.argv[1], 200, int(sys.argv[2])))
"""


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        ("without flush", "neither old nor new"),
        ("without flush of directory", "not the new state"),
        ("renamed before flush", "neither old nor new"),
    ],
)
def test_power_cuts_find_a_careless_writer(folder: Path, planted: str, expected: str) -> None:
    found = run(PLANTED, planted, SEED, folder=folder).said()
    if found is None:
        pytest.skip("the calls of a process cannot be seen here")
    assert any(expected in wrong for wrong in found[2]), found


UNSEEN = """
import mmap
from pathlib import Path
from support.file_operations import recorded
from support.supervised import is_possible

def store():
    with open("model.safetensors", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[-1] ^= 1

try:
    say(recorded(store, Path.cwd()) if is_possible() else None)
except AssertionError as error:
    say(str(error))
"""


def test_recorder_fails_for_a_store_that_it_does_not_see(folder: Path) -> None:
    found = run(UNSEEN, folder=folder).said()
    if found is None:
        pytest.skip("the calls of a process cannot be seen here")
    assert "stores to a shared mapping" in found
