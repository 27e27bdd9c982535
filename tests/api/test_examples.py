"""The examples in docstrings of public functions run, and every function has one."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

import ingot
import ingot.modelspec
import ingot.numpy

NAMES = {"ingot": ingot, "numpy": numpy}
MODULES: list[ModuleType] = [ingot, ingot.numpy, ingot.modelspec]
if find_spec("torch") is not None:
    import torch

    import ingot.torch

    NAMES["torch"] = torch
    MODULES.append(ingot.torch)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in module.__all__
    if inspect.isfunction(getattr(module, name)) or name == "safe_open"
}


def model(path: str, first: int) -> None:
    rows = numpy.arange(first, first + 32, dtype="float32").reshape(8, 4)
    ingot.numpy.save_file({"wte": rows, "lm_head.weight": rows + 1}, path, {"format": "pt"})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example_of_a_function_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model("model.safetensors", 0)
    model("tuned.safetensors", 1)
    example = doctest.DocTestParser().get_doctest(
        inspect.getdoc(FUNCTIONS[name]) or "", dict(NAMES), name, None, None
    )
    assert example.examples, f"{name} has no example"
    printed: list[str] = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(example, out=printed.append)
    assert not failed, "".join(printed)
