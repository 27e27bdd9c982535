"""State stored without pickle: every value comes back or is rejected by name."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ingot
from ingot.engines._tree import put_together, taken_apart
from support.errors import raises


def again(tree: dict[str, Any]) -> dict[str, Any]:
    tensors, text = taken_apart(tree)
    # Return the state as a file stores it: text and tensors only.
    assert json.dumps(json.loads(text), separators=(",", ":")) == text
    return put_together(text, tensors, "file")


def versioned() -> OrderedDict[str, Any]:
    made = OrderedDict(b=1, a=2)
    made._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    return made


VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "numbers": [0, -1, 2**70, 0.1, -0.0, 1e300],
    "infinite": [math.inf, -math.inf],
    "complex": complex(1, -math.inf),
    "text": "a\n\u20ac\ud800 $ \U0001f600",
    "bytes": bytes(range(256)),
    "tuple": (1, (2, []), [(3,)]),
    "sets": [{1, "a", (2, 3)}, frozenset({1})],
    "dicts": [{}, {"a": {"b": 1}}, {1: "one", None: 0, (1, 2): 3, 2.5: False}],
    "dollars": {"$tuple": [1], "a": {"$tensor": "b"}},
    "ordered": OrderedDict([("z", 1), (0, 2)]),
    "counter": Counter({4: 2, 7: 1}),
    "default": [defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2})],
    "path": Path("a") / "b",
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), torch.device("cpu")],
}


@pytest.mark.parametrize("name", VALUES)
def test_tree_returns_every_value(name: str) -> None:
    found = again({"state": VALUES[name]})["state"]
    assert found == VALUES[name]
    assert type(found) is type(VALUES[name])
    assert repr(found) == repr(VALUES[name])


def test_tree_returns_nan() -> None:
    assert math.isnan(again({"a": math.nan})["a"])


def test_tree_keeps_the_order_of_dicts_and_state_metadata() -> None:
    found = again({"state": versioned(), "plain": {"b": 1, "a": 2}})
    assert list(found["state"]) == list(found["plain"]) == ["b", "a"]
    assert found["state"]._metadata == versioned()._metadata  # type: ignore[attr-defined]


def test_tree_names_tensors_by_position() -> None:
    tree = {
        "state_dict": {"layer.weight": torch.ones(2)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}}],
    }
    tensors, text = taken_apart(tree)
    assert list(tensors) == ["state_dict.layer.weight", "optimizer_states.0.state.0.step"]
    assert tensors["state_dict.layer.weight"] is tree["state_dict"]["layer.weight"]  # type: ignore[call-overload]
    found = put_together(text, tensors, "file")
    assert found["optimizer_states"][0]["state"][0]["step"] == 3


def test_tree_distinguishes_positions_spelt_alike() -> None:
    tree = {"a": {"b.c": torch.tensor(1), "b": {"c": torch.tensor(2)}}, "a.b": {"c": torch.tensor(3)}}
    found = again(tree)
    assert [found["a"]["b.c"], found["a"]["b"]["c"], found["a.b"]["c"]] == [1, 2, 3]


def test_tree_returns_numpy_values() -> None:
    tree = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "number": np.float64(0.1),
        "bool": np.bool_(True),
    }
    found = again(tree)
    assert np.array_equal(found["array"], tree["array"])
    assert found["array"].dtype == np.int16
    assert (found["number"], type(found["number"])) == (0.1, np.float64)
    assert (found["bool"], type(found["bool"])) == (True, np.bool_)


class Own:
    """A class of a user's."""


class Named(dict[str, int]):
    """A dict of a user's, whose class would be lost."""


REFUSED: dict[str, tuple[Any, str]] = {
    "object": (Own(), "test_trees.Own"),
    "class": (Own, "the class Own"),
    "function": (math.sqrt, "builtins.builtin_function_or_method"),
    "module": (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    "dict": (Named(a=1), "test_trees.Named"),
    "factory": (defaultdict(Own), "collections.defaultdict"),
    "texts of numpy": (np.array(["a"]), "numpy.ndarray"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tree_names_a_value_that_needs_pickle(name: str) -> None:
    value, called = REFUSED[name]
    with raises(ingot.SaveError, code="not-plain", tensor="callbacks.mine.1.deep") as caught:
        taken_apart({"callbacks": {"mine": [1, {"deep": value}]}})
    assert f"only pickle could store {called}" in str(caught.value)


def test_tree_names_the_option_that_leaves_out_a_hyperparameter() -> None:
    with pytest.raises(ingot.SaveError, match=r"save_hyperparameters\(ignore=\['loss'\]\)"):
        taken_apart({"hyper_parameters": {"lr": 0.1, "loss": torch.nn.MSELoss()}})


def test_tree_rejects_a_cycle() -> None:
    tree: dict[str, Any] = {"a": []}
    tree["a"].append(tree["a"])
    with pytest.raises(ingot.SaveError, match="contains itself"):
        taken_apart(tree)


BROKEN = [
    "",
    "[]",
    "1",
    "{",
    '{"a": {"$tensor": "no"}}',
    '{"a": {"$tensor": ["no"]}}',
    '{"a": {"$os": 1}}',
    '{"a": {"$tuple": [], "$set": []}}',
    '{"a": {"$tuple": 3}}',
    '{"a": {"$dict": [[[], 1]]}}',
    '{"a": {"$dtype": "save"}}',
    '{"a": {"$device": "nowhere"}}',
    '{"a": {"$bytes": 3}}',
    '{"a": {"$default": ["eval", []]}}',
    '{"a": {"$set": [{}]}}',
    '{"a": {"$path": 3}}',
    '{"a": {"$float": "one"}}',
    '{"a": {"$ordered": []}}',
    '{"a": {"$size": ["b"]}}',
    '{"a": ' + "9" * 5000 + "}",
    '{"a":' * 100_000 + "1" + "}" * 100_000,
    '{"a": {"$array": "no"}}',
]


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:40])
def test_tree_rejects_an_invalid_text(text: str) -> None:
    with raises(ingot.CheckpointError, r"^model.ckpt: ingot.tree in the metadata", code="invalid-tree"):
        put_together(text, {}, "model.ckpt")


def test_tree_imports_and_calls_nothing() -> None:
    before = set(sys.modules)
    for name in ("os.system", "antigravity", "__import__"):
        for tag in ("$tensor", "$dtype", "$default", f"${name}"):
            with pytest.raises(ingot.CheckpointError):
                put_together(json.dumps({"a": {tag: [name, []]}}), {}, "file")
    assert set(sys.modules) == before


plain: Callable[..., Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(alphabet="$ab.", max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers() | st.tuples(st.text(max_size=2)), inner, max_size=3)
    ),
    max_leaves=12,
)  # type: ignore[assignment]


@given(st.dictionaries(st.text(max_size=4), plain, max_size=4))  # type: ignore[arg-type]
def test_tree_returns_random_trees(tree: dict[str, Any]) -> None:
    assert repr(again(tree)) == repr(tree)
