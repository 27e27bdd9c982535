"""Run the examples of docstrings, in a folder with two small models."""

from __future__ import annotations

import doctest
import inspect
import re
from importlib.util import find_spec
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from support.public_api import MODULES, imported, public_api

#: Modules whose functions have no options, so that they have no rows in the table of options.
WITHOUT_OPTIONS = ("ingot.compat", "ingot.compat.bintensors")
#: The modules that import torch.
OF_TORCH = (
    "ingot.torch",
    "ingot.dcp",
    *(f"ingot.engines.{name}" for name in ("accelerate", "lightning", "transformers")),
)


def documented() -> dict[str, Any]:
    """Return each module, function, method and class that needs an example, by its full name."""
    has_torch = find_spec("torch") is not None
    modules = [name for name in (*MODULES, *WITHOUT_OPTIONS) if has_torch or name not in OF_TORCH]
    found = public_api(modules)
    for module in modules:
        loaded = imported(module)
        found[module] = loaded
        for name in loaded.__all__:
            value = getattr(loaded, name)
            # The options page documents dicts of options, and the page of errors exceptions.
            if inspect.isclass(value) and not issubclass(value, (dict, Exception)):
                found[f"{module}.{name}"] = value
    return found


def examples(thing: object) -> list[doctest.Example]:
    """Return the examples in a docstring."""
    return doctest.DocTestParser().get_examples(inspect.getdoc(thing) or "")


def run(name: str, thing: object, names: dict[str, Any]) -> None:
    """Run the examples of `thing` in the current directory, after an import of `names`."""
    found = examples(thing)
    for package in re.findall(r"^from (obstore)\b", "".join(one.source for one in found), re.MULTILINE):
        pytest.importorskip(package)
    _save_model("model.safetensors", 0)
    _save_model("tuned.safetensors", 1)
    _save_adapter("adapter.safetensors")
    test = doctest.DocTest(found, {"ingot": ingot, "numpy": numpy, **names}, name, None, None, None)
    printed: list[str] = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert not failed, "".join(printed)


def _save_model(path: str, first: int) -> None:
    rows = numpy.arange(first, first + 32, dtype="float32").reshape(8, 4)
    ingot.numpy.save_file({"wte": rows, "lm_head.weight": rows + 1}, path, {"format": "pt"})


def _save_adapter(path: str) -> None:
    name = "lora_te_lm_head"
    factors = {
        "lora_up.weight": numpy.ones((8, 2), "float32"),
        "lora_down.weight": numpy.ones((2, 4), "float32"),
    }
    tensors = {f"{name}.{part}": factor for part, factor in factors.items()}
    ingot.numpy.save_file({**tensors, f"{name}.alpha": numpy.array(4, "float32")}, path)
