"""The examples of each framework's module and of its functions run."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from frameworks.test_frameworks import PACKAGES
from support.examples import examples, run

#: `ingot.numpy` and `ingot.torch` have functions of their own, whose examples run elsewhere.
FOUND = [
    import_module(f"ingot.{name}")
    for name, package in PACKAGES.items()
    if name not in ("numpy", "torch") and find_spec(package)
]
if not FOUND:
    pytest.skip("neither jax, mlx, paddle nor tensorflow is installed", allow_module_level=True)
NAMES = [(module, name) for module in FOUND for name in ("__doc__", *module.__all__)]


@pytest.mark.parametrize(
    ("module", "name"), NAMES, ids=[f"{module.__name__}.{name}" for module, name in NAMES]
)
def test_name_of_a_framework_has_an_example_that_runs(
    module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    thing = module if name == "__doc__" else getattr(module, name)
    assert examples(thing), f"{module.__name__}.{name} has no example"
    run(f"{module.__name__}.{name}", thing, {public: getattr(module, public) for public in module.__all__})
