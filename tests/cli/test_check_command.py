"""`ingot check` of several paths: it checks all of them and reports on each."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy
import pytest

import ingot
from support.commands import Ended, good, in_a_pipe, in_a_terminal, run
from support.models import save
from support.servers import good as served
from support.servers import serving


def written(path: Path, header: dict[str, object], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a valid file, one with a warning, a truncated one and a valid checkpoint, but no `missing`."""
    sound = save(tmp_path / "sound.safetensors")
    odd = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "extra": 1}}
    odd["b"] = {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}
    written(tmp_path / "odd.safetensors", odd, bytes(5))
    (tmp_path / "cut.safetensors").write_bytes(sound.read_bytes()[:-10])
    ingot.split(sound, tmp_path / "shards", 100_000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


EVERY = ("sound.safetensors", "odd.safetensors", "cut.safetensors", "missing.safetensors", "shards")


def lines(ended: Ended) -> dict[str, list[str]]:
    """Return the output for each path, without the summary."""
    found: dict[str, list[str]] = {}
    for line in ended.out.splitlines()[:-1]:
        path, _, told = line.partition(": ")
        found.setdefault(path, []).append(told)
    return found


def test_check_names_every_path_in_order(folder: Path) -> None:
    ended = run("check", *EVERY)
    assert (ended.code, ended.err) == (2, "")
    found = lines(ended)
    assert tuple(found) == EVERY
    assert found["sound.safetensors"] == ["52 tensors, values not read: all is well"]
    assert found["shards"] == found["sound.safetensors"]
    strict, misaligned = found["odd.safetensors"]
    assert strict.startswith("not-strict: ")
    assert misaligned.startswith("b: misaligned: F32 begins at byte ")
    (cut,) = found["cut.safetensors"]
    assert cut.startswith("error: ")
    assert "cut.safetensors" not in cut
    assert found["missing.safetensors"] == [f"error: {os.strerror(2)}"]
    assert ended.out.splitlines()[-1] == "5 paths: 2 well, 1 with findings, 2 with errors"


@pytest.mark.parametrize(
    ("paths", "code", "summary"),
    [
        (("sound.safetensors", "shards"), 0, "2 paths, values not read: all is well"),
        (("sound.safetensors", "odd.safetensors"), 1, "2 paths: 1 well, 1 with findings, 0 with errors"),
        (("cut.safetensors", "sound.safetensors"), 1, "2 paths: 1 well, 0 with findings, 1 with errors"),
        (("missing.safetensors", "odd.safetensors"), 2, "2 paths: 0 well, 1 with findings, 1 with errors"),
    ],
)
def test_check_exits_with_the_worst(folder: Path, paths: tuple[str, ...], code: int, summary: str) -> None:
    ended = run("check", *paths)
    assert (ended.code, ended.out.splitlines()[-1]) == (code, summary)
    assert code == max(run("check", path).code for path in paths)


def test_check_json_equals_the_answer_for_each_path(folder: Path) -> None:
    answer = run("check", *EVERY, "--json").json()
    assert [entry["source"] for entry in answer] == [*EVERY]
    sound, odd, cut, missing, shards = answer
    assert [sound, odd, shards] == [
        run("check", path, "--json").json() for path in ("sound.safetensors", "odd.safetensors", "shards")
    ]
    for broken, path in ((cut, "cut.safetensors"), (missing, "missing.safetensors")):
        (error,) = broken["problems"]
        assert (error["kind"], error["where"]) == ("error", path)
        # The same message as if this path were checked alone.
        assert run("check", path).err == f"error: {path}: {error['what']}\n"


def test_check_quiet_prints_paths_with_findings(folder: Path) -> None:
    assert run("check", *EVERY, "-q").out.splitlines() == [
        "odd.safetensors",
        "cut.safetensors",
        "missing.safetensors",
    ]
    assert good("check", "sound.safetensors", "shards", "-q").out == ""


def test_check_reads_the_values_of_every_path(folder: Path) -> None:
    save(folder / "nan.safetensors", {"a": numpy.array([1.0, numpy.nan])})
    ended = run("check", "nan.safetensors", "sound.safetensors", "--values")
    assert ended.code == 1
    assert ended.out.splitlines() == [
        "nan.safetensors: a: nan: 1 of 2 values",
        "sound.safetensors: 52 tensors: all is well",
        "2 paths: 1 well, 1 with findings, 0 with errors",
    ]


def test_check_prints_the_same_in_a_terminal(folder: Path) -> None:
    shown = in_a_terminal("check", *EVERY, folder=folder, NO_COLOR="1", columns=40).out
    assert shown == in_a_pipe("check", *EVERY, folder=folder).out


def test_check_escapes_paths_and_names(folder: Path) -> None:
    path = "red\x1b[31m.safetensors"
    save(folder / path, {"bell\x07": numpy.array([numpy.inf])})
    ended = run("check", path, "gone\u202e.safetensors", "--values")
    assert ended.code == 2
    assert ended.out.splitlines()[:2] == [
        r"red\x1b[31m.safetensors: bell\x07: infinity: 1 of 1 value",
        rf"gone\u202e.safetensors: error: {os.strerror(2)}",
    ]


def test_check_takes_urls_and_prints_no_secret(folder: Path) -> None:
    with serving(served((folder / "odd.safetensors").read_bytes())) as server:
        url = server.url("/model.safetensors?token=hidden")
        for form in ([], ["--json"], ["--quiet"]):
            ended = run("check", url, "sound.safetensors", "https://127.0.0.1:1/x?token=hidden", *form)
            assert ended.code in (1, 2)
            assert "model.safetensors" in ended.out
            assert "hidden" not in ended.out + ended.err
