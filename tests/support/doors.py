"""Every public function and method, found in the public modules."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ingot._base.frameworks import FRAMEWORKS

# In this order: paddle crashes in a process that has imported tensorflow before.
MODULES = (
    "ingot",
    "ingot.delta",
    "ingot.modelspec",
    *(f"ingot.{name}" for name in sorted(set(FRAMEWORKS.values()))),
)
# Classes that users call.
CLASSES = ("ingot.Checkpoints", "ingot.Ranges", "ingot.Writer", "ingot.safe_open")


def public_functions() -> dict[str, Any]:
    """Return each function, class and method that users call, by its full name.

    Without the modules of frameworks that are not installed, and without classes that users do not make:
    errors, results, and the objects that a handle returns.
    """
    return {
        name: found
        for module in MODULES
        for public, value in _members(module)
        for name, found in _called(f"{module}.{public}", value)
    }


def _members(module: str) -> Iterator[tuple[str, Any]]:
    try:
        with warnings.catch_warnings():
            # Warnings of frameworks at import.
            warnings.simplefilter("ignore")
            found = import_module(module)
    except ImportError:
        return
    for name in found.__all__:
        value = getattr(found, name)
        if callable(value) and not (isinstance(value, type) and issubclass(value, Exception)):
            yield name, value


def _called(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, type):
        yield name, value
        return
    if name in CLASSES:
        yield name, value
    for method, found in vars(value).items():
        if not method.startswith("_") and inspect.isfunction(found):
            yield f"{name}.{method}", found


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    """The parameters that callers pass, by name."""
    given = inspect.signature(function).parameters
    return {name: one for name, one in given.items() if name != "self"}
