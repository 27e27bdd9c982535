"""mypy and pyright find misspelt options and wrong values, in every public function that has them."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import ingot
from support.doors import parameters, public_functions

pytest.importorskip("mypy")
ROOT = Path(__file__).parents[2]

# For each argument a value that is wrong, as code.
WRONG = {
    "algorithm": '"sha255"',
    "align": "9",
    "backend": '"disk"',
    "checksums": '"md5"',
    "contiguous": '"packed"',
    "count": '"logic"',
    "destination": "3.5",
    "drop": "lambda: True",
    "dtype": '"bf17"',
    "filename": "3.5",
    "format": '"safetensor"',
    "framework": '"nump"',
    "how": '"pages"',
    "keys": "3.5",
    "on_duplicate": '"newest"',
    "orphaned": '"kill"',
    "progress": "lambda done: None",
    "read_once": '"always"',
    "shared": '"both"',
    "snapshot": '"hots"',
    "source": "3.5",
    "source_format": '"zip"',
    "storage_options": '{"tokn": "x"}',
}
# Accepts any keyword, as a key of the specification.
OPEN = ("ingot.modelspec.metadata",)
# Classes whose methods are called through an object.
OBJECTS = ("Checkpoints", "safe_open", "Writer", "PrefetchLoader", "TensorSlice", "View")


def called_with(called: str, argument: str, value: str, required: list[str], named: list[str]) -> str:
    arguments = [value if one == argument else "ANY" for one in required]
    if argument not in required:
        arguments.append(f"{argument}={value}")
    return f"{called}({', '.join([*arguments, *(f'{one}=ANY' for one in named)])})"


def calls() -> dict[str, tuple[str, str]]:
    """Return a wrong call for each function and argument, and a right one."""
    found: dict[str, tuple[str, str]] = {}
    for name, function in public_functions().items():
        given = parameters(function)
        required = [
            one.name
            for one in given.values()
            if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
        named = [
            one.name for one in given.values() if one.kind is one.KEYWORD_ONLY and one.default is one.empty
        ]
        called = next(
            (
                name.replace(f"ingot.{kind}.", f"{kind.lower()}_.")
                for kind in OBJECTS
                if f"ingot.{kind}." in name
            ),
            name,
        )
        if any(one.kind is one.KEYWORD_ONLY for one in given.values()) and name not in OPEN:
            plain = ["ANY"] * len(required) + [f"{one}=ANY" for one in named]
            found[f"{name}: a misspelt option"] = (
                f"{called}({', '.join([*plain, 'misspelt=ANY'])})",
                f"{called}({', '.join(plain)})",
            )
        for argument in given.keys() & WRONG.keys():
            wrong, right = (
                called_with(called, argument, value, required, named) for value in (WRONG[argument], "ANY")
            )
            found[f"{name}: {argument}"] = wrong, right
    return dict(sorted(found.items()))


CALLS = calls()
HEAD = """\
from typing import Any

import ingot
import ingot.modelspec
import ingot.numpy
import ingot.torch

def wrong(
    ANY: Any,
    checkpoints_: ingot.Checkpoints,
    safe_open_: ingot.safe_open[Any],
    writer_: ingot.Writer,
    prefetchloader_: ingot.PrefetchLoader[Any],
    tensorslice_: ingot.TensorSlice[Any],
    view_: ingot.View,
) -> None:
"""
FIRST = len(HEAD.splitlines()) + 1


@cache
def lines_with_errors(checker: str, path: Path) -> set[int]:
    """Return the lines in which a checker finds errors."""
    if checker == "mypy":
        command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(path)]
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
        # The cache of mypy may name a file of an earlier run with the same contents.
        places = [line.split(":")[:2] for line in lines if ": error: " in line]
        return {int(number) for name, number in places if Path(name).name == path.name}
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(path)]
    told = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout)
    errors = [one for one in told["generalDiagnostics"] if one["severity"] == "error"]
    return {one["range"]["start"]["line"] + 1 for one in errors}


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_find_wrong_uses(checker: str, tmp_path: Path) -> None:
    pytest.importorskip(checker)
    path = tmp_path / "wrong.py"
    both = [call for pair in CALLS.values() for call in pair]
    path.write_text(HEAD + "".join(f"    {'_ = ' * ('async' in call)}{call}\n" for call in both))
    found = lines_with_errors(checker, path)
    wrong = dict(zip(range(FIRST, FIRST + len(both), 2), CALLS, strict=True))
    assert not [name for line, name in wrong.items() if line not in found]
    assert found <= wrong.keys(), [both[line - FIRST] for line in found - wrong.keys()]


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_find_wrong_names(checker: str, tmp_path: Path) -> None:
    pytest.importorskip(checker)
    path = tmp_path / "names.py"
    names = [name for name in ingot.__all__ if not name.startswith("__")]
    wrong = ["import ingot", "ingot.converts", "from ingot import loads"]
    right = [
        *(f"ingot.{name}" for name in names),
        f"from ingot import {', '.join(names)}",
        "import ingot.torch",
        "ingot.torch.load_file",
    ]
    path.write_text("\n".join([*wrong, *right, ""]))
    assert lines_with_errors(checker, path) == {2, 3}
