"""Every callable of the public Python API, for the tests that read the table of options."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

from ingot._adapters.face import Whole

MODULES = (
    "ingot",
    "ingot.lora",
    "ingot.delta",
    "ingot.modelspec",
    "ingot.numpy",
    "ingot.torch",
    "ingot.dcp",
    "ingot.engines.accelerate",
    "ingot.engines.lightning",
    "ingot.engines.transformers",
)
#: The modules of the frameworks that have the functions of `Whole`. Most are not installed where tests run.
ALIKE = "ingot.<framework>"
#: The classes that users make objects of, by calling them.
MADE = (
    "ingot.Checkpoints",
    "ingot.Ranges",
    "ingot.Writer",
    "ingot.safe_open",
    "ingot.dcp.Reader",
    "ingot.dcp.Writer",
    "ingot.engines.lightning.CheckpointIO",
)
#: Classes whose methods implement interfaces of torch and of trainers.
OF_OTHERS = (
    "ingot.dcp.Reader",
    "ingot.dcp.Writer",
    "ingot.engines.lightning.CheckpointIO",
    "ingot.engines.transformers.CheckpointMixin",
    "ingot.torch.RNG",
)


def public_api(modules: Iterable[str] = MODULES) -> dict[str, Any]:
    """Return each function, method and constructor that users call, by its full name."""
    found: dict[str, Any] = {}
    for module in modules:
        loaded = imported(module)
        for name in loaded.__all__:
            value = getattr(loaded, name)
            if inspect.isroutine(value):
                found[f"{module}.{name}"] = value
            elif inspect.isclass(value) and not issubclass(value, Exception):
                found |= _of_class(f"{module}.{name}", value)
    for name in ("load", "load_file", "save", "save_file"):
        found[f"{ALIKE}.{name}"] = getattr(Whole, name)
    return found


def _of_class(name: str, kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {name: kind} if name in MADE else {}
    if name not in OF_OTHERS:
        for method, value in vars(kind).items():
            function = getattr(value, "__func__", value)
            if not method.startswith("_") and inspect.isroutine(function):
                found[f"{name}.{method}"] = function
    return found


def imported(module: str) -> ModuleType:
    """Import a module, with a stand-in for Lightning, whose class ours extends."""
    home = "lightning.fabric.plugins"
    stands_in = module.endswith("lightning") and home not in sys.modules
    if stands_in:
        plugins = ModuleType(home)
        plugins.CheckpointIO = object  # type: ignore[attr-defined]
        sys.modules |= {"lightning": plugins, "lightning.fabric": plugins, home: plugins}
    try:
        return import_module(module)
    finally:
        if stands_in:
            for name in ("lightning", "lightning.fabric", home, module):
                sys.modules.pop(name, None)


def parameters(function: Any) -> list[str]:
    """Return the names of the parameters that a caller can name."""
    given = inspect.signature(function).parameters.values()
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in given if one.name not in ("self", "cls") and one.kind not in unnamed]


def is_method(name: str) -> bool:
    """Return whether it is a method of a class, and no function of a module."""
    return name not in MADE and name.rpartition(".")[0] not in (*MODULES, ALIKE)
