"""A training loop with kills, a slow disk and a flaky server reads no wrong bytes and leaves no files behind.

`INGOT_SOAK` sets the duration in seconds.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support import slow_disk
from support.processes import run
from support.record import note
from support.servers import Handler, Request, serving

pytestmark = pytest.mark.slow

MOST_GROWTH = 2 << 20
#: One arena of malloc: a new arena would count as growth, although malloc reuses its memory.
ARENAS = {"MALLOC_ARENA_MAX": "1"}
SECONDS = os.environ.get("INGOT_SOAK", "20")

PROGRAM = """
import soak
say(soak.train(*sys.argv[1:]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


@pytest.fixture
def slow(tmp_path: Path, folder: Path) -> Iterator[Path | str]:
    """Yield the same folder on a slow disk, or an empty text if this machine cannot mount one."""
    with ExitStack() as ending:
        place = tmp_path / "slow"
        if slow_disk.missing() is None:
            ending.enter_context(slow_disk.mounted(folder, place, delay=0.002))
        yield place if place.exists() else ""


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    """Yield the URL of a server with the same folder. A third of its answers fail."""
    dice = random.Random(0)

    def answer(handler: Handler, request: Request) -> None:
        data = (folder / request.path.lstrip("/")).read_bytes()
        fault = dice.choice(["busy", "gone", "short", "slow"] + [""] * 8)
        if fault == "busy":
            handler.head(503, Content_Length=0)
        elif fault == "gone":
            handler.raw(b"")
        elif fault == "short":
            begin, end = request.range
            whole = f"bytes {begin}-{min(end, len(data)) - 1}/{len(data)}"
            length = min(end, len(data)) - begin
            head = f"HTTP/1.1 206 x\r\nContent-Range: {whole}\r\nContent-Length: {length}\r\n\r\n"
            handler.raw(head.encode() + data[begin : begin + length // 2])
        else:
            time.sleep(0.5 if fault == "slow" else 0)
            handler.part(data, request, ETag=f'"{request.path}"')

    with serving(answer) as server:
        yield server.url("")


def test_training_loop_leaves_nothing(folder: Path, slow: Path | str, url: str) -> None:
    found = run(PROGRAM, folder, slow, url, SECONDS, 0, **ARENAS).said()
    wrong = found["wrong bytes"] + len(found["left"])
    wrong += abs(found["descriptors"]) + abs(found["threads"]) + (found["grown by"] > MOST_GROWTH)
    grown = f"{found['grown by'] / (1 << 20):+.1f} MiB"
    note("soak, steps", found["steps"], wrong, seconds=float(SECONDS), memory=grown)
    print(found)
    assert found["wrong bytes"] == 0
    assert found["left"] == []
    assert (found["descriptors"], found["threads"]) == (0, 0)
    assert found["grown by"] <= MOST_GROWTH
    # The loop has used every way to load and to save.
    tried = {"loaded", "loaded from a server", "held", "killed", "saved staged", "saved sharded"}
    assert tried <= found["counts"].keys()


PLANTED = """
import ingot.torch, soak

load_file, kept = ingot.torch.load_file, []

def careless(path, **options):
    "Keeps a descriptor and memory, leaves a file, and a byte is wrong."
    found = load_file(path, **options)
    if "storage_options" not in options:
        kept.append((os.open(".", os.O_RDONLY), bytearray(b"x" * (1 << 20))))
        open(os.path.join(sys.argv[1], ".left.tmp"), "w").close()
        found["layer.bias"][3] += 1
    return found

ingot.torch.load_file = careless
say(soak.train(*sys.argv[1:]))
"""


def test_training_loop_check_finds_a_careless_loop(folder: Path, url: str) -> None:
    found = run(PLANTED, folder, "", url, 0, 0, **ARENAS).said()
    assert found["wrong bytes"] > 0
    assert found["descriptors"] > 0
    assert found["grown by"] > MOST_GROWTH
    assert ".left.tmp" in found["left"]
