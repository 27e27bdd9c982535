"""Results and errors of `ingot.compat`, compared with the wheel of safetensors in the same calls.

Both return and write the same. The same `except` clauses catch the errors of both, and the messages contain
the words that programs search for. MESSAGES.toml lists all differences, and only differences.

The installed wheel is compared: 0.8.0 in `.venv`, and 0.9.0rc1 in `make test-rc`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import safetensors.numpy
import safetensors.torch

import ingot.compat
from peers.safetensors.calls import GROUPS, Call, are_there
from peers.safetensors.givens import furnish
from peers.safetensors.results import seen, written
from vectors.measure_upstream import VERSIONS

TABLE = tomllib.loads((Path(__file__).parent / "MESSAGES.toml").read_text("utf-8"))
REAL = SimpleNamespace(top=safetensors, torch=safetensors.torch, numpy=safetensors.numpy)
WHEEL = version("safetensors")
LISTED = [one for one in TABLE["difference"] if WHEEL in one.get("upstream", WHEEL)]
KINDS = ("ours-accepts", "ours-refuses", "class", "words", "result")
# Words that the tests of upstream compare, and words that programs search for.
WORDS = re.compile(
    "|".join(
        (
            r"^No such file or directory: ",
            r"^File does not contain tensor ",
            r"^File is closed",
            r"^Error while (?:de)?serializing(?: header)?: [\w ]+",
            r"^(?:backend|device|framework) .* is invalid",
            r"^You are trying to save a sparse tensors?: .*",
            r"^You are trying to save a non contiguous tensor",
            r"^Key `\w+` is invalid, expected torch.Tensor but received .*",
            r"^Expected a dict of \[str, torch.Tensor\] but received .*",
            r"^Some tensors share memory, this will lead to duplicate memory on disk",
            r"use save_model\(\.\.\., force_contiguous=True\)",
            r"(?:Missing|Unexpected) key\(s\) in state_dict: ",
            r"out of bounds|[Ss]tep must be|Only one ellipsis|Invalid index",
        )
    )
)

pytestmark = pytest.mark.skipif(
    any(map(importlib.util.find_spec, ("tensorflow", "jax", "mlx", "paddle"))),
    reason="the calls need a missing framework, but one is installed",
)


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Return the calls that differ, with both results."""
    place = tmp_path_factory.mktemp("calls")
    furnish(place)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(place)
        ingot.compat.install()
        try:
            names = {"top": "safetensors", "torch": "safetensors.torch", "numpy": "safetensors.numpy"}
            ours = SimpleNamespace(**{key: importlib.import_module(name) for key, name in names.items()})
            found = {}
            for group, calls in GROUPS.items():
                for name, call in calls.items() if are_there(group, REAL) else ():
                    said = outcome(call, REAL, place), outcome(call, ours, place)
                    kind = compared(*said)
                    if kind is not None:
                        found[name] = kind, "\n  ".join(map(described, said))
        finally:
            ingot.compat.uninstall()
    # The output file of a call is in the folder of its inputs.
    assert {path.name for path in place.iterdir() if path.suffix} == set()
    return found


@dataclass(frozen=True)
class Result:
    """The result of a call, and the file that it wrote."""

    value: Any
    file: Any


Outcome = Result | BaseException


def outcome(call: Call, modules: SimpleNamespace, place: Path) -> Outcome:
    try:
        value = seen(call(modules, place))
    except BaseException as error:  # PyO3's panics are not subclasses of `Exception`.
        written(place)
        return error
    return Result(value, written(place))


def described(one: Outcome) -> str:
    return f"{one!r:.300}" if isinstance(one, Result) else f"{type(one).__name__}: {one!s:.300}"


def compared(theirs: Outcome, ours: Outcome) -> str | None:
    """Return how the two results differ, or None if they are equal."""
    if isinstance(theirs, Result):
        if not isinstance(ours, Result):
            return "ours-refuses"
        return None if ours == theirs else "result"
    if isinstance(ours, Result):
        return "ours-accepts"
    if not isinstance(ours, type(theirs)):
        return "class"
    return None if all(words in str(ours) for words in WORDS.findall(str(theirs))) else "words"


def pattern(text: str) -> re.Pattern[str]:
    """Return a regular expression for names of calls, in which ``*`` matches any text."""
    return re.compile(".*".join(map(re.escape, text.split("*"))))


def listed(name: str) -> list[dict[str, Any]]:
    return [one for one in LISTED if any(pattern(text).fullmatch(name) for text in one["calls"])]


@pytest.mark.parametrize("group", GROUPS)
def test_errors_have_the_class_and_words_of_upstream(
    differences: dict[str, tuple[str, str]], group: str
) -> None:
    wrong = [
        f"{name}: {kind}\n  {said}"
        for name, (kind, said) in differences.items()
        if name in GROUPS[group] and kind not in [one["kind"] for one in listed(name)]
    ]
    assert not wrong, "differences that MESSAGES.toml does not list:\n" + "\n".join(wrong)


@pytest.mark.parametrize("one", LISTED, ids=lambda one: f"{one['kind']} {one['calls'][0]}")
def test_listed_differences_exist(differences: dict[str, tuple[str, str]], one: dict[str, Any]) -> None:
    names = [name for group, calls in GROUPS.items() if are_there(group, REAL) for name in calls]
    for text in one["calls"]:
        matched = [name for name in names if pattern(text).fullmatch(name)]
        assert matched, f"{text}: no such call"
        gone = [name for name in matched if differences.get(name, ("none", ""))[0] != one["kind"]]
        assert not gone, f"{text}: the difference is not there for {gone}"


def test_differences_of_messages_are_well_kept() -> None:
    for one in TABLE["difference"]:
        assert one["kind"] in KINDS
        assert one["reason"].strip()
        assert set(one.get("upstream", [])) <= set(VERSIONS["safetensors"])


def test_calls_have_distinct_names() -> None:
    names = [name for calls in GROUPS.values() for name in calls]
    assert len(names) == len(set(names)) > 1000


def test_comparison_finds_a_difference() -> None:
    error = safetensors.SafetensorError("Error while serializing: I/O error: x")
    one, other = Result(("int", "3"), None), Result(("int", "3"), b"3")
    assert compared(one, one) is None
    assert compared(one, other) == "result"
    assert compared(error, one) == "ours-accepts"
    assert compared(one, error) == "ours-refuses"
    assert compared(error, ValueError(str(error))) == "class"
    assert compared(error, safetensors.SafetensorError("Error while serializing")) == "words"
    assert compared(error, safetensors.SafetensorError("Error while serializing: I/O error; more")) is None
