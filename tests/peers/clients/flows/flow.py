"""Shared code of the flows. A flow uses a library to save to folders and to load from them, and reports the
results.

    python [-m ingot.compat] with_some_library.py REPORT STEP=FOLDER …

Each step is ``save`` or ``load``. A load waits until its folder is complete, since another process may save
it. The report is a file, since libraries print to stdout.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# Seconds for the other process to import its library and save.
PATIENCE = 250

Note = Callable[[str, Any], None]
Step = Callable[[Path, Note], None]


def main(library: str, save: Step, load: Step) -> None:
    """Run the steps of the command line, and write the report."""
    report, *steps = sys.argv[1:]
    noted: dict[str, dict[str, Any]] = {}
    for step in steps:
        verb, _, path = step.partition("=")
        folder = Path(path).resolve()
        found: dict[str, Any] = {}
        # Each step starts from the same state.
        torch.manual_seed(0)
        saved = folder.with_name(f"{folder.name}.saved")
        if verb == "save":
            folder.mkdir()
        else:
            wait_for(saved)
        with torch.no_grad():
            take = {"save": save, "load": load}[verb]
            take(folder, lambda name, value, found=found: found.update(described(name, value)))
        if verb == "save":
            saved.touch()
        noted[f"{verb} {folder.name}"] = found
    content = {
        "library": importlib.metadata.version(library),
        "safetensors": {name: module.__file__ for name, module in stand_ins().items()},
        "version": sys.modules["safetensors"].__version__,
        "holders": holders(),
        "steps": noted,
    }
    Path(report).write_text(json.dumps(content))


def wait_for(file: Path) -> None:
    """Return when `file` exists."""
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file}: nobody made it")
        time.sleep(0.05)


def described(name: str, value: Any) -> dict[str, Any]:
    """Return `value` for the report: a digest for each tensor, everything else unchanged."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        return {name: digest(value)}
    if isinstance(value, Mapping):
        lines: dict[str, Any] = {name: sorted(value)}
        for key in value:
            lines |= described(f"{name}/{key}", value[key])
        return lines
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    return {name: value}


def digest(tensor: torch.Tensor) -> list[Any]:
    """Return the dtype, the shape and a digest of a tensor, or its device if it has no values."""
    kind = [str(tensor.dtype), list(tensor.shape)]
    if tensor.is_meta:
        return [*kind, "meta"]
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [*kind, hashlib.sha256(values.numpy()).hexdigest()]


# --- the modules in use: the wheel's or ingot's ---


def stand_ins() -> dict[str, ModuleType]:
    """Return the modules that have the name `safetensors` in this process."""
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "safetensors"}


def holders() -> list[str]:
    """Return the names of safetensors that libraries have imported, each with the library's module."""
    made = {}
    for name, module in stand_ins().items():
        made[id(module)] = name
        # Classes of the wheel's extension module have the module `builtins`.
        native = name.endswith("._safetensors_rust")
        for key, value in vars(module).items():
            if callable(value) and (native or top(value.__module__) in ("safetensors", "ingot")):
                made[id(value)] = key
    found = set()
    with warnings.catch_warnings():
        # Some modules warn when they are looked at.
        warnings.simplefilter("ignore")
        for holder, module in list(sys.modules.items()):
            if top(holder) not in ("safetensors", "ingot", "__main__"):
                values = list(getattr(module, "__dict__", {}).values())
                found |= {f"{holder}: {made[id(value)]}" for value in values if id(value) in made}
    return sorted(found)


def top(module: str | None) -> str:
    """The package that a module is in."""
    return (module or "").partition(".")[0]
