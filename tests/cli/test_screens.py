"""Output in a real terminal, compared with the files in golden/.

Renew them after an intended change, and review it with `git diff`::

    INGOT_RENEW_GOLDEN=1 python -m pytest tests/cli/test_screens.py
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot
from ingot._native import in_natural_order
from ingot.cli.screen import count, nbytes
from ingot.cli.table import Column, aligned, boxed, cell_width, cut
from support.commands import good, in_a_pipe, in_a_terminal
from support.models import save, transformer

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


KEYS = [word for layer in (0, 1, 10, 11) for word in ("--keys", f"*.{layer}.*_proj.weight")] + [
    "--keys",
    "lm_head*",
]


@pytest.mark.parametrize(
    ("screen", "arguments"),
    [
        ("summary", ["model.safetensors"]),
        ("ls", ["ls", "-l", "model.safetensors", *KEYS]),
        ("tree", ["tree", "model.safetensors"]),
        ("diff", ["diff", "model.safetensors", "other.safetensors", "--values"]),
    ],
)
@pytest.mark.parametrize("place", ["terminal", "pipe"])
def test_screens_equal_the_golden_files(screen: str, arguments: list[str], place: str, folder: Path) -> None:
    ran = in_a_terminal if place == "terminal" else in_a_pipe
    printed = ran(*arguments, folder=folder, NO_COLOR="1", TERM="dumb").out
    known = GOLDEN / f"{screen}-{place}.txt"
    if os.environ.get("INGOT_RENEW_GOLDEN"):
        known.write_text(printed, encoding="utf-8")
    assert printed == known.read_text(encoding="utf-8")


def test_screens_cut_names_and_no_numbers(folder: Path) -> None:
    for columns in (40, 60, 80):
        lines = in_a_terminal(
            "ls", "-l", "model.safetensors", folder=folder, columns=columns, NO_COLOR="1"
        ).out
        assert ("…" in lines) == (columns > 40)
        note = " ".join(lines.partition("left out: ")[2].split())
        assert note.partition(";")[0] == {40: "begin, end", 60: "begin, end", 80: ""}[columns]
        sizes = re.findall(r"(\d+(?:\.\d+)? k?B)\b", lines)
        assert len(sizes) == 4 + 4 * 12
    wide = in_a_terminal("ls", "model.safetensors", folder=folder, columns=80, NO_COLOR="1").out
    assert max(map(len, wide.splitlines())) <= 80


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize(
    "command", ["ls", "ls -l", "tree", "params", "layers", "stats --all", "meta get", "check", "mem"]
)
def test_screens_fit_the_terminal(folder: Path, command: str, columns: int) -> None:
    words = [*command.split(), "model.safetensors"]
    printed = in_a_terminal(*words, folder=folder, columns=columns, NO_COLOR="1").out
    assert [line for line in printed.splitlines() if cell_width(line) > columns] == []


@pytest.mark.parametrize("columns", [40, 80])
def test_screens_cut_nothing_that_is_copied(folder: Path, columns: int) -> None:
    printed = in_a_terminal("hash", "model.safetensors", folder=folder, columns=columns, NO_COLOR="1").out
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() in printed


@pytest.mark.parametrize("words", [[], ["meta"], ["modelspec"]])
def test_command_without_arguments_prints_help(folder: Path, words: list[str]) -> None:
    ended = in_a_pipe(*words, folder=folder)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == in_a_pipe(*words, "--help", folder=folder).out
    assert ended.err.startswith(" ".join(["Usage: ingot", *words]))
    assert len(ended.err.splitlines()) > 10


def test_diff_in_a_pipe_labels_each_line(folder: Path) -> None:
    rows = in_a_pipe("diff", "model.safetensors", "other.safetensors", "--values", folder=folder).rows()
    cells = {"-": 4, "+": 4, "~": 4, "*": 6}
    assert {row[0] for row in rows} == set(cells)
    assert all(len(row) == cells[row[0]] for row in rows)


def test_verify_of_a_file_without_digests_prints_one_line(folder: Path) -> None:
    ended = in_a_pipe("verify", "model.safetensors", folder=folder)
    assert ended.code == 1
    tensors = len(transformer())
    line = f"NOT ok: 0 tensors checked, the file keeps no digest of its {tensors} tensors"
    assert ended.out == f"model.safetensors: {line}\n"


def test_screens_have_colours_in_terminals_that_want_them(folder: Path) -> None:
    assert "\x1b[1m" in in_a_terminal("ls", "model.safetensors", folder=folder).out
    assert "\x1b" not in in_a_terminal("ls", "model.safetensors", folder=folder, NO_COLOR="1").out
    assert "\x1b" not in in_a_terminal("ls", "model.safetensors", folder=folder, TERM="dumb").out
    assert "\x1b" not in in_a_pipe("ls", "model.safetensors", folder=folder).out


def test_summary_fits_on_a_screen(folder: Path) -> None:
    assert len(in_a_terminal("model.safetensors", folder=folder).out.splitlines()) <= 24


def test_stats_draws_a_histogram(folder: Path) -> None:
    printed = in_a_terminal("stats", "model.safetensors", "lm_head.weight", folder=folder, NO_COLOR="1").out
    assert printed.count("█") > 40
    counts = [int(line.split()[-1].replace(",", "")) for line in printed.splitlines()[-16:]]
    assert sum(counts) == 500 * 64


def test_ls_sorts_numbers_by_value() -> None:
    names = ["h.2", "h.10", "h.1", "h", "h.1.b", "h.01", "head", "h.9999999999999999999999", "a10b", "a9b"]
    expected = ["a9b", "a10b", "h", "h.01", "h.1", "h.1.b", "h.2", "h.10", "h.9999999999999999999999", "head"]
    for _ in range(10):
        random.shuffle(names)
        assert in_natural_order(names) == expected


def test_ls_sorts_names_across_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    names = [
        f"h.{layer}.{part}{number}" for layer in (0, 2, 10, 100) for part in "wb" for number in (1, 10, 2)
    ]
    path = save(tmp_path / "model.safetensors", {name: numpy.zeros(4, "f4") for name in names})
    ingot.split(path, tmp_path / "shards", 48)
    expected = in_natural_order(names[::-1])
    assert expected[:4] == ["h.0.b1", "h.0.b2", "h.0.b10", "h.0.w1"]
    for model in (path, tmp_path / "shards"):
        assert good("ls", "-q", model).out.splitlines() == expected


def test_tree_merges_equal_neighbours_only(tmp_path) -> None:  # type: ignore[no-untyped-def]
    sizes = {"0": 4, "1": 4, "2": 4, "3": 5, "4": 4, "6": 4, "7": 4, "07": 4, "x": 4}
    arrays = {f"h.{number}.w": numpy.zeros(size, "f4") for number, size in sizes.items()}
    path = save(tmp_path / "model.safetensors", arrays)
    rows = good("tree", path).rows()
    assert [row[0] for row in rows] == [
        "h",
        "h.0-2.w",
        "h.3.w",
        "h.4.w",
        "h.6.w",
        "h.07.w",
        "h.7.w",
        "h.x.w",
    ]
    assert [row[1] for row in rows] == ["9", "3", "1", "1", "1", "1", "1", "1"]


def test_tree_totals_add_up(tmp_path) -> None:  # type: ignore[no-untyped-def]
    arrays = {
        f"model.{layer}.experts.{expert}.{name}": numpy.zeros(3, "f4")
        for layer in range(3)
        for expert in range(4)
        for name in ("up", "down")
    }
    path = save(tmp_path / "model.safetensors", arrays | {"model.norm": numpy.zeros(2, "f4")})

    def check(module: dict[str, object]) -> None:
        children = module["modules"]
        assert isinstance(children, list)
        if children and module["shape"] is None:
            for field in ("tensors", "parameters", "nbytes"):
                assert module[field] == sum(child[field] for child in children)
        for child in children:
            check(child)

    for form in ([], ["--expand"]):
        for module in good("tree", path, "--json", *form).json()["modules"]:
            assert module["tensors"] == 25
            check(module)


def test_screens_write_sizes_in_three_digits() -> None:
    written = [
        nbytes(size) for size in (0, 999, 1000, 1005, 9994, 9995, 99_949, 99_950, 999_499, 999_500, 10**30)
    ]
    assert written[:4] == ["0 B", "999 B", "1.00 kB", "1.00 kB"]
    assert written[4:10] == ["9.99 kB", "10.0 kB", "99.9 kB", "100 kB", "999 kB", "1.00 MB"]
    assert count(22_713_728) == "22.7M"
    assert count(7_000_000_000) == "7.00B"


@settings(max_examples=50)
@given(st.text(), st.integers(2, 30))
def test_screens_fit_after_cutting(text: str, width: int) -> None:
    found = cut(text, width)
    assert cell_width(found) <= width
    assert found == text or "…" in found


PARTS = [
    "lora",
    "unet",
    "transformer",
    "h",
    "0",
    "1",
    "10",
    "attn1",
    "to_q",
    "up",
    "weight",
    "模型",
    "e\u0301",
]
NAMES = st.lists(st.sampled_from(PARTS), min_size=1, max_size=12).map("_".join) | st.text(
    "ab._日", max_size=90
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Column], list[list[str]]]:
    """Return a table as commands print it: names between marks, then text, sentences and numbers."""
    kinds = [
        Column("text"),
        Column("text", spare=True),
        Column("file", named=True),
        Column("what", wraps=True),
        *(Column("number", right=True, spare=spare) for spare in (True, False)),
    ]
    more = draw(st.lists(st.sampled_from(kinds), max_size=6))
    texts = [st.integers(0, 10**12).map(str) if column.right else NAMES for column in more]
    names = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    columns = [Column("", whole=True), Column("name"), Column("", whole=True), *more]
    return columns, [["<", name, ">", *map(draw, texts)] for name in names]


@settings(max_examples=150, deadline=None)
@given(tables(), st.integers(40, 120))
def test_tables_fit_and_names_never_look_alike(
    table: tuple[list[Column], list[list[str]]], width: int
) -> None:
    columns, rows = table
    for layout in (aligned, boxed):
        lines = [*layout(columns, rows, width, str)]
        assert [line for line in lines if cell_width(line) > width] == []
    lines = [*aligned(columns, rows, width, str)]
    heads = [line.partition(">")[0] for line in lines if line.lstrip().startswith("<")]
    assert len({*map(cell_width, heads)}) == 1
    if {head.split("<")[1].strip() for head in heads} == {""}:
        # The names are whole, on lines of their own.
        text = "".join("".join(lines).split())
        assert all(row[1] in text for row in rows)
    else:
        names = [head.split("<")[1].strip() for head in heads]
        assert len({*names}) == len(rows)
        assert all(name == row[1] or "…" in name for name, row in zip(names, rows, strict=True))


def test_summary_wraps_the_kind_and_long_names(tmp_path: Path) -> None:
    parts = {"lora_A.weight": (4, 64), "lora_B.weight": (64, 4)}
    prefix = "base_model.model.transformer.h.0.attn.q_proj"
    save(
        tmp_path / "adapter_model.safetensors",
        {f"{prefix}.{part}": numpy.zeros(shape, "f4") for part, shape in parts.items()},
    )
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "gpt"}'
    )
    plain = "".join(good(tmp_path).out.split()).removeprefix(f"{tmp_path.parent}/")
    for columns in (40, 60, 80):
        lines = in_a_terminal(
            tmp_path.name, folder=tmp_path.parent, columns=columns, NO_COLOR="1"
        ).out.splitlines()
        assert max(map(cell_width, lines)) <= columns
        assert "…" not in "".join(lines)
        # Names break at dots.
        assert "".join("".join(lines).split()) == plain
