"""``ingot convert`` calls `ingot.convert`, which tests/convert tests for every format."""

from __future__ import annotations

import os
from pathlib import Path

import numpy
import pytest

import ingot.numpy
from support.commands import good, run
from support.models import minilm, save

torch = pytest.importorskip("torch", reason="this environment has no torch")


@pytest.fixture(autouse=True)
def within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_convert_command_converts_there_and_back() -> None:
    good("convert", minilm(), "a.npz")
    good("convert", "a.npz", "b.bt")
    good("convert", "b.bt", "c.safetensors")
    # An .npz has no metadata.
    found = run("diff", minilm(), "c.safetensors", "--values", "--json").json()
    assert (found["tensors"], found["values"]) == ({}, {})


def test_convert_command_lists_what_it_left_out() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"state_dict": {"w": weight, "tied": weight}, "epoch": 3}, "model.pt")
    answer = good("convert", "model.pt", "model.safetensors", "--json").json()
    assert (answer["source_format"], answer["tensors"], answer["verified"]) == ("torch", 1, True)
    assert [one["name"] for one in answer["left_out"]] == ["epoch"]
    assert len(answer["shared"]) == 1
    good("convert", "model.pt", "half.safetensors", "--root", "state_dict", "--dtype", "bf16")
    assert ingot.safe_open("half.safetensors", "np").info("tied").dtype == "BF16"


def test_convert_command_replaces_nothing_without_force() -> None:
    save(Path("a.safetensors"), {"a": numpy.zeros(1)})
    Path("b.npz").write_text("precious")
    assert run("convert", "a.safetensors", "b.npz").code == 2
    assert run("convert", "a.safetensors", "b.npz", "--dry-run").code == 2
    assert Path("b.npz").read_text() == "precious"
    assert "would write c.npz" in good("convert", "a.safetensors", "c.npz", "--dry-run").out
    assert not Path("c.npz").exists()
    good("convert", "a.safetensors", "b.npz", "--overwrite")
    assert numpy.load("b.npz")["a"].tolist() == [0.0]


@pytest.mark.parametrize(
    "words", [["nothing.bin", "x.bt"], ["a.safetensors", "x.unknown"], ["a.safetensors"]]
)
def test_convert_command_exits_with_2_on_impossible_requests(words: list[str]) -> None:
    save(Path("a.safetensors"), {"a": numpy.zeros(1)})
    ended = run("convert", *words)
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended
    assert os.listdir() == ["a.safetensors"]
