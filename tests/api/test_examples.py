"""Every public module, function, method and class has an example, and the examples run."""

from __future__ import annotations

import doctest
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import ingot.compat
from support.examples import WITHOUT_OPTIONS, documented, examples, run
from support.public_api import ALIKE, MODULES, imported

DOCUMENTED = documented()
#: Examples that only programs with a network can run, or with a package that no test environment has.
NOT_RUN = {
    "ingot.download": "the network",
    "ingot.Download": "the network",
    "ingot.upload": "the network",
    "ingot.Upload": "the network",
    "ingot.engines.accelerate": "a training loop of accelerate",
    "ingot.engines.accelerate.load_state": "a training loop of accelerate",
    "ingot.engines.accelerate.save_state": "a training loop of accelerate",
    "ingot.engines.lightning": "a training loop of Lightning",
    "ingot.engines.transformers": "a training loop of transformers",
    "ingot.engines.transformers.CheckpointMixin": "a training loop of transformers",
}


def names_for(name: str) -> dict[str, Any]:
    """Return the names that an example uses without importing them."""
    names: dict[str, Any] = {}
    if find_spec("torch") is not None:
        import torch

        names["torch"] = torch
    # The names of `ingot` itself include `open`.
    homes = [module for module in (*MODULES[1:], *WITHOUT_OPTIONS) if f"{name}.".startswith(f"{module}.")]
    home = "ingot.numpy" if name.startswith(ALIKE) else max(homes, key=len, default=None)
    if home is not None:
        module = imported(home)
        names |= {public: getattr(module, public) for public in module.__all__}
    return names


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_name_has_an_example_that_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = [example.options.get(doctest.SKIP, False) for example in examples(DOCUMENTED[name])]
    assert skipped, f"{name} has no example"
    assert all(skipped) == (name in NOT_RUN), f"{name}: no line of the example runs"
    monkeypatch.chdir(tmp_path)
    # `ingot.compat.install` warns if safetensors is imported.
    for module in [module for module in sys.modules if module.partition(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, module)
    try:
        run(name, DOCUMENTED[name], names_for(name))
    finally:
        ingot.compat.uninstall()
