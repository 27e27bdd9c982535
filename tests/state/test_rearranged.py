"""Training states in files whose tensors are renamed, dropped, merged, split or cast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch
from ingot._native import STATE_KEY
from ingot.errors import CheckpointError
from ingot.torch import load_state, save_state
from support.errors import raises

SHORT: dict[str, Any] = {
    "model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)},
    "losses": [0.1 * place for place in range(200)],
    "blob": bytes(2000),
    "array": np.arange(3),
    "step": 7,
    3: [torch.zeros(2, dtype=torch.int64)],
}
# The tree of this state is so long that it is stored as a tensor.
LONG = {**SHORT, "text": "x" * 1_100_000}
TREES = {"short": SHORT, "long": LONG}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=TREES)
def tree(request: pytest.FixtureRequest) -> dict[Any, Any]:
    """Save a state in the file "state", and return it."""
    found = TREES[request.param]
    save_state(found, "state", {"title": "t"})
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def metadata(path: str) -> dict[str, Any]:
    return dict(ingot.inspect(path).metadata or {})


def assert_no_state(path: str) -> None:
    assert metadata(path) == {"title": "t"}
    assert STATE_KEY not in ingot.open(path)
    with raises(CheckpointError, code="no-state"):
        load_state(path)


@pytest.mark.parametrize("given", [{}, {"metadata": None}, {"metadata": {STATE_KEY: "{}", "a": "b"}}])
def test_rewrite_keeps_a_state_with_new_names(tree: Any, given: dict[str, Any]) -> None:
    ingot.rewrite("state", "new", rename=lambda name: f"{name}.saved", **given)
    assert same(load_state("new"), tree)
    # The new file stores its tree as text, even a long one.
    names = {f"{name}.saved" for name in ingot.open("state") if name != STATE_KEY}
    assert {*ingot.open("new")} == names
    kept = given.get("metadata", {"title": "t"}) or {}
    assert {key: one for key, one in metadata("new").items() if key != STATE_KEY} == {
        key: one for key, one in kept.items() if key != STATE_KEY
    }
    model = torch.nn.Linear(3, 2)
    load_state("new", into={"model": model}, keys="model.*")
    assert torch.equal(model.weight, tree["model"]["weight"])
    # Two names can be swapped, also in a renamed file.
    swap = {"model.bias.saved": "3.0.saved", "3.0.saved": "model.bias.saved"}
    ingot.rewrite("new", "again.bt", rename=swap)
    assert same(load_state("again.bt"), tree)


def test_rewrite_keeps_a_state_byte_for_byte_if_no_name_changes(tree: Any) -> None:
    ingot.rewrite("state", "new")
    assert Path("new").read_bytes() == Path("state").read_bytes()
    ingot.rewrite("state", "new.bt")
    assert same(load_state("new.bt"), tree)


@pytest.mark.parametrize("given", [{"keys": "model.*"}, {"drop": "losses"}, {"drop": "array"}])
def test_rewrite_removes_the_state_of_tensors_that_are_left_out(tree: Any, given: dict[str, str]) -> None:
    ingot.rewrite("state", "new", **given)
    assert_no_state("new")
    assert torch.equal(ingot.torch.load_file("new")["model.bias"], torch.ones(2))


def test_rewrite_renames_tied_tensors_of_a_state() -> None:
    weight = torch.arange(4.0)
    save_state({"whole": weight, "part": weight[1:3], "twin": weight}, "state")
    ingot.rewrite("state", "new", rename=lambda name: f"a.{name}")
    found = load_state("new")
    found["whole"][1] = 5
    assert found["part"][0] == found["twin"][1] == 5
    ingot.rewrite("state", "new", drop="part", overwrite=True)
    assert STATE_KEY not in metadata("new")


def test_merge_keeps_the_state_of_one_source(tree: Any) -> None:
    ingot.torch.save_file({"more": torch.ones(1)}, "more")
    for sources in (["state", "more"], ["more", "state"]):
        ingot.merge(sources, "new", overwrite=True)
        assert same(load_state("new"), tree)
    # Tensors that are not part of the state can be dropped.
    ingot.rewrite("new", "without", drop="more")
    assert same(load_state("without"), tree)
    ingot.torch.save_file({"model.bias": torch.zeros(2)}, "more")
    ingot.merge(["state", "more"], "new", on_duplicate="first", overwrite=True)
    assert same(load_state("new"), tree)
    ingot.merge(["state", "more"], "new", on_duplicate="last", overwrite=True)
    assert_no_state("new")
    save_state({"other": torch.ones(1), "text": "y" * 1_100_000}, "other")
    ingot.merge(["state", "other"], "new", overwrite=True)
    assert_no_state("new")


@pytest.mark.parametrize("size", [40, "1GB"])
def test_split_keeps_a_state(tree: Any, size: int | str) -> None:
    ingot.split("state", "shards", size)
    assert same(load_state("shards"), tree)
    ingot.merge(["shards"], "again")
    assert same(load_state("again"), tree)
    ingot.rewrite("shards", "new", rename={"model.bias": "b"})
    assert same(load_state("new"), tree)
    ingot.cast("shards", "half", "F16")
    assert load_state("half")["losses"] == tree["losses"]


def test_cast_keeps_a_state_and_its_lists_of_numbers(tree: Any) -> None:
    report = ingot.cast("state", "half", "BF16", metadata={"a": "b", STATE_KEY: "{}"})
    assert report.cast == ("model.bias", "model.weight")
    found = load_state("half")
    assert found["model"]["weight"].dtype == torch.bfloat16
    found["model"] = {name: one.float() for name, one in found["model"].items()}
    assert same(found, tree)
    assert metadata("half")["a"] == "b"


def test_convert_removes_a_state(tree: Any) -> None:
    ingot.convert("state", "new.safetensors", drop=STATE_KEY if tree is LONG else None)
    assert STATE_KEY not in metadata("new.safetensors")


def test_replace_tensor_keeps_a_state(tree: Any) -> None:
    ingot.replace_tensor("state", "model.bias", torch.zeros(2))
    found = load_state("state")
    assert not found["model"]["bias"].any()
    assert found["step"] == 7


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version":1}', '{"version":1,"tree":{"$tensor":"gone"}}'])
@pytest.mark.parametrize("is_whole", [False, True])
def test_update_metadata_rejects_the_state_of_another_file(tree: Any, text: str, is_whole: bool) -> None:
    save_state({"model": {"other": torch.ones(1)}}, "other")
    new = {**metadata("state"), STATE_KEY: text} if is_whole else metadata("other")
    before = Path("state").read_bytes()
    with raises(CheckpointError, code="invalid-state") as caught:
        ingot.update_metadata("state", new)
    assert "state" in str(caught.value)
    assert Path("state").read_bytes() == before
    assert ingot.update_metadata("state", metadata("state")) == "unchanged"
    ingot.update_metadata("state", {"a": "b"})
    assert same(load_state("state"), tree)
    ingot.update_metadata("state", {STATE_KEY: None})
    with raises(CheckpointError, code="no-state"):
        load_state("state")


def test_update_metadata_rejects_a_later_state() -> None:
    save_state({"a": torch.ones(1)}, "state")
    with raises(CheckpointError, code="later-state"):
        ingot.update_metadata("state", {STATE_KEY: '{"version":2}'})


def test_save_with_loaded_metadata_has_its_own_state(tree: Any) -> None:
    pairs = metadata("state")
    ingot.torch.save_file({"model.bias": torch.ones(1)}, "new", pairs)
    assert metadata("new") == {"title": "t"}
    ingot.torch.save_sharded({"a": torch.ones(9), "b": torch.ones(9)}, "shards", 40, metadata=pairs)
    assert STATE_KEY not in metadata("shards")
    save_state({"b": torch.ones(1)}, "new", pairs)
    assert load_state("new")["b"] == 1
    ingot.numpy.save_state({"b": np.ones(1)}, "new", pairs)
    assert ingot.numpy.load_state("new")["b"] == 1


def damaged(name: str) -> None:
    """Cut the last byte of "state", and with it a tensor."""
    data = Path("state").read_bytes()
    Path(name).write_bytes(data[:-1])


def test_repair_removes_and_reports_the_state_of_tensors_that_are_left_out(tree: Any) -> None:
    assert ingot.repair("state", "whole").findings == ()
    assert same(load_state("whole"), tree)
    damaged("broken")
    report = ingot.repair("broken", "repaired")
    last = report.findings[-1]
    assert (last.code, last.tensor, last.done) == ("invalid-state", None, "value-left-out")
    assert report.left_out
    assert_no_state("repaired")


@pytest.mark.parametrize("text", ["{", '{"version":2,"tree":[]}'])
def test_rewrite_keeps_a_state_of_unknown_form_only_if_nothing_changes(text: str) -> None:
    save_state({"a": torch.ones(1)}, "state")
    data = Path("state").read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    head["__metadata__"][STATE_KEY] = text
    new = json.dumps(head).encode()
    Path("state").write_bytes(len(new).to_bytes(8, "little") + new + data[8 + length :])
    ingot.rewrite("state", "new")
    assert metadata("new") == {STATE_KEY: text}
    ingot.rewrite("state", "new", rename={"a": "b"}, overwrite=True)
    assert metadata("new") == {}
