"""Dicts of many tensors are encoded as a whole, and their JSON is kept for the next save."""

from __future__ import annotations

import cProfile
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ingot
import ingot.torch
from ingot._state import encoder
from ingot._state.encoder import Encoder
from ingot._state.sections import Section
from ingot.torch import load_state, save_state

Sections = dict[tuple[Any, ...], Section]

ONE = torch.arange(3.0)


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(number)) for number in range(count)]


def moments(names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: dict(zip(("step", "exp_avg"), tensors(2), strict=True)) for name in names}


def versioned() -> OrderedDict[str, torch.Tensor]:
    found = OrderedDict(zip("abc", tensors(3), strict=True))
    found._metadata = OrderedDict((name, {"version": 2}) for name in "abc")  # type: ignore[attr-defined]
    return found


TREES: dict[str, Callable[[], Any]] = {
    "a model": lambda: {"model": versioned(), "step": 3},
    "an optimizer": lambda: {"state": moments(["a.weight", "b.weight"]), "groups": [{"params": ["a", "b"]}]},
    "other keys": lambda: {"state": {"a": {"x": ONE}, "b": {"y": ONE + 1, "z": ONE + 2}, "c": {}}},
    "the root": lambda: dict(zip("abc", tensors(3), strict=True)),
    "tied": lambda: {"first": {"a": ONE, "b": ONE + 1}, "second": {"c": ONE, "d": ONE + 2}, "last": ONE},
    "tied within": lambda: {"state": {"a": {"x": ONE}, "b": {"x": ONE}}},
    "names to escape": lambda: {'q"\\': {"ü\n": ONE, "\ud800": ONE + 1}, "state": moments(['"', "é"])},
    "equal names": lambda: {"a.b": {"c": ONE, "d": ONE + 1}, "a": {"b.c": ONE + 2, "b.d": ONE + 3}},
    "equal names within": lambda: {"state": {"a": {"b.c": ONE}, "a.b": {"c": ONE + 1}}},
    "reserved": lambda: {"__metadata__": ONE, "b": ONE + 1},
    "others": lambda: {"state": {"a": {"x": ONE, "n": 1}, "b": {"x": ONE, "n": None}}},
    "tags": lambda: {
        "state": {"a": {"$tensor": ONE}, "b": {"x": ONE}},
        "more": {"$x": {"y": 1}, "z": {"y": 2}},
    },
    "texts": lambda: {
        "names": ["a", '{"$section":0}', "b"],
        "large": [1, 2**63, "x"],
        "of": {"a": {"n": 1}, "b": {}},
    },
    "floats": lambda: {"of": {"a": {"n": 0.5}, "b": {"n": float("nan")}}, "flags": [True, None, "x"]},
}


def encoded(tree: Any, known: Sections | None) -> tuple[Any, dict[str, Any], Sections]:
    one = Encoder("torch", {}, known)
    text = one.text(one.tree(tree))
    return json.loads(text), one.tensors, one.sections


@pytest.mark.parametrize("name", TREES)
def test_sections_are_what_values_one_by_one_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = TREES[name]()
    plain, own, _ = encoded(tree, None)
    monkeypatch.setattr(encoder, "_MANY", 2)
    for known in (None, {}):
        found, stored, sections = encoded(tree, known)
        assert (found, [*stored]) == (plain, [*own])
        assert all(stored[key] is own[key] for key in own)
    again, stored, kept = encoded(tree, sections)
    assert (again, [*stored]) == (plain, [*own])
    assert {path: id(one) for path, one in kept.items()} == {path: id(one) for path, one in sections.items()}


def test_sections_of_another_structure_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = [{"x": tree()} for tree in TREES.values()]
    plain = [encoded(tree, None)[:2] for tree in trees]
    monkeypatch.setattr(encoder, "_MANY", 2)
    known: Sections = {}
    for tree, expected in zip(trees, plain, strict=True):
        *found, known = encoded(tree, known)
        assert (found[0], [*found[1]]) == (expected[0], [*expected[1]])


def test_sections_follow_tensors_that_become_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_MANY", 2)
    tree = {"a": {"x": ONE, "y": ONE + 1}, "b": {"x": ONE + 2, "y": ONE + 3}}
    *_, known = encoded(tree, {})
    tree["b"]["x"] = ONE
    found, stored, known = encoded(tree, known)
    assert found["b"]["x"] == {"$tensor": "a.x"}
    assert "b.x" not in stored
    tree["b"]["x"] = ONE + 4
    found, stored, _ = encoded(tree, known)
    assert found["b"]["x"] == {"$tensor": "b.x"}
    assert stored["b.x"] is tree["b"]["x"]


def test_encoder_makes_few_calls_for_a_known_structure() -> None:
    """The training loop waits for the encoder, also if a state has 100,000 tensors."""
    names = [f"layers.{number}.weight" for number in range(2_000)]
    tree = {"model": dict(zip(names, tensors(2_000), strict=True)), "state": moments(names), "params": names}
    *_, known = encoded(tree, {})
    one, profile = Encoder("torch", {}, known), cProfile.Profile()
    text = profile.runcall(lambda: one.text(one.tree(tree)))
    assert json.loads(text)["state"][names[3]]["exp_avg"] == {"$tensor": f"state.{names[3]}.exp_avg"}
    assert len(one.tensors) == 6_000
    assert sum(entry.callcount for entry in profile.getstats()) < 500


def test_trees_of_many_tensors_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_MANY", 2)
    monkeypatch.setattr(encoder, "MAX_NODES", 9)
    for tree in (
        {"state": moments(["a", "b", "c"])},
        {"x": [*"abcdefghij"]},
        dict.fromkeys("abcdefghij", ONE),
    ):
        with pytest.raises(ingot.SaveError, match="the tree has more than 9 values"):
            encoded(tree, {})


def test_checkpoints_save_structures_that_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_MANY", 2)
    with ingot.Checkpoints(tmp_path, keep=None) as checkpoints:
        # A file has no such name.
        trees = [{"x": TREES[name]()} for name in TREES if name != "names to escape" for _ in range(2)]
        for step, tree in enumerate(trees):
            checkpoints.save(step, tree)
            checkpoints.wait()
            save_state(tree, tmp_path / "alone")
            assert repr(checkpoints.load(step)) == repr(load_state(tmp_path / "alone"))
