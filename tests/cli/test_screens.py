"""What a person sees, in a real terminal, held against the files in golden/.

To renew them after a change that is meant, and then look at what `git diff` says of it::

    INGOT_RENEW_GOLDEN=1 python -m pytest tests/cli/test_screens.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy
import pytest
from commands import in_a_pipe, in_a_terminal
from models import save, transformer

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    save(made / "model.safetensors", metadata={"format": "pt", "title": "模型 \x1b[31m", "notes": "x" * 5000})
    other = transformer()
    other["model.norm.weight"] = other["model.norm.weight"].astype(numpy.float32)
    other["lm_head.weight"] = other["lm_head.weight"] * 2
    other["extra\u202e.bias"] = numpy.zeros(3)
    del other["rotary.positions"]
    save(made / "other.safetensors", other, {"format": "np"})
    return made


@pytest.mark.parametrize(
    ("screen", "arguments"),
    [
        ("summary", ["model.safetensors"]),
        ("ls", ["ls", "-l", "model.safetensors", "--grep", "layers.1?[01].(mlp|self)|lm_head"]),
        ("tree", ["tree", "model.safetensors"]),
        ("diff", ["diff", "model.safetensors", "other.safetensors", "--values"]),
    ],
)
@pytest.mark.parametrize("place", ["terminal", "pipe"])
def test_the_screen_is_the_one_that_is_known(
    screen: str, arguments: list[str], place: str, folder: Path
) -> None:
    ran = in_a_terminal if place == "terminal" else in_a_pipe
    printed = ran(*arguments, folder=folder, NO_COLOR="1", TERM="dumb").out
    known = GOLDEN / f"{screen}-{place}.txt"
    if os.environ.get("INGOT_RENEW_GOLDEN"):
        known.write_text(printed, encoding="utf-8")
    assert printed == known.read_text(encoding="utf-8")


def test_a_narrow_terminal_cuts_names_and_never_numbers(folder: Path) -> None:
    for columns in (40, 60, 80):
        lines = in_a_terminal(
            "ls", "-l", "model.safetensors", folder=folder, columns=columns, NO_COLOR="1"
        ).out
        assert "…" in lines
        sizes = re.findall(r"(\d+(?:\.\d+)? k?B)\b", lines)
        assert len(sizes) == 4 + 4 * 12
    wide = in_a_terminal("ls", "model.safetensors", folder=folder, columns=80, NO_COLOR="1").out
    assert max(map(len, wide.splitlines())) <= 80


def test_colours_are_for_terminals_that_want_them(folder: Path) -> None:
    assert "\x1b[1m" in in_a_terminal("ls", "model.safetensors", folder=folder).out
    assert "\x1b" not in in_a_terminal("ls", "model.safetensors", folder=folder, NO_COLOR="1").out
    assert "\x1b" not in in_a_terminal("ls", "model.safetensors", folder=folder, TERM="dumb").out
    assert "\x1b" not in in_a_pipe("ls", "model.safetensors", folder=folder).out


def test_the_summary_fits_on_a_screen(folder: Path) -> None:
    assert len(in_a_terminal("model.safetensors", folder=folder).out.splitlines()) <= 24


def test_a_histogram_is_drawn(folder: Path) -> None:
    printed = in_a_terminal("stats", "model.safetensors", "lm_head.weight", folder=folder, NO_COLOR="1").out
    assert printed.count("█") > 40
    counts = [int(line.split()[-1].replace(",", "")) for line in printed.splitlines()[-16:]]
    assert sum(counts) == 500 * 64
