"""The names of frameworks, and the modules that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from sys import modules
from typing import TYPE_CHECKING, Any, Protocol

from ingot._native import Wrap
from ingot.errors import DtypeError, OptionError

from .text import _quoted

if TYPE_CHECKING:

    class Adapter(Protocol):
        """The interface of modules such as `ingot.torch` for `safe_open`."""

        wrap: Wrap

        def mover(self, device: object) -> Any:
            """Return a `moves.Move`, which moves a tensor to `device` or reads it there; or None."""

        def at(self, tensor: Any, index: Any) -> Any:
            """Return ``tensor[index]`` by the framework's rules."""


# The name of this package on the package index, where `ingot` is another package.
DISTRIBUTION = "ingot-tensors"

# Upstream's names, each with the module of this package. To add a framework, add a line here.
FRAMEWORKS = {"numpy": "numpy", "np": "numpy", "torch": "torch", "pt": "torch", "pytorch": "torch"}
FRAMEWORKS |= {"flax": "flax", "jax": "flax", "tensorflow": "tensorflow", "tf": "tensorflow"}
FRAMEWORKS |= {"mlx": "mlx", "paddle": "paddle"}


def module_of(framework: str) -> str:
    """Return the name of the module for `framework`."""
    if not isinstance(framework, str):
        raise TypeError(f"framework must be a str, not {type(framework).__name__}")
    module = FRAMEWORKS.get(framework)
    if module is None:
        message = f"framework {framework!r} is unknown: expected one of {', '.join(FRAMEWORKS)}"
        raise OptionError(message, code="unknown-framework", expected=tuple(FRAMEWORKS), found=framework)
    return module


def adapter(framework: str) -> Adapter:
    """Import and return the module for `framework`."""
    name = f"ingot.{module_of(framework)}"
    # A module with the names of an `Adapter`, which checkers cannot see.
    imported: Any = modules.get(name)
    if imported is None:
        from importlib import import_module

        imported = import_module(name)
    found: Adapter = imported
    return found


# The packages whose tensors these modules accept. jax's arrays are created by jaxlib.
_OWNERS = {name: name for name in ("numpy", "torch", "tensorflow", "mlx", "paddle")}
_OWNERS |= {"ml_dtypes": "numpy", "jax": "flax", "jaxlib": "flax"}


def is_of_framework(kind: type) -> bool:
    """Return whether a framework defines this class."""
    return kind.__module__.partition(".")[0] in _OWNERS


def payload(name: str, tensor: Any) -> Any:
    """Return the payload that the module of the tensor's framework makes."""
    module = owner(tensor)
    if module is None:
        raise not_a_tensor(name, tensor, "an array or a tensor")
    made: Any = adapter(module)
    return made.payload(name, tensor)


def checked_tensor(tensor: Any) -> Any:
    """Return `tensor`, which must be of a framework."""
    if owner(tensor) is None:
        raise TypeError(f"tensor must be an array or a tensor, found {type(tensor).__name__}")
    return tensor


def owner(tensor: Any) -> str | None:
    """Return the module for the framework of a tensor, whose class may be a subclass of the framework's."""
    owners = (_OWNERS.get(kind.__module__.partition(".")[0]) for kind in type(tensor).__mro__)
    return next(filter(None, owners), None)


def installing(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    # In quotes, because zsh treats brackets as a pattern.
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def missing(package: str, error: ImportError, module: str | None = None) -> ImportError:
    """Return `error` with the install command, for a failed import of `package` by `module`.

    If `module` is not given, it is the name of the package.
    """
    # Only `mlx.core` is imported of mlx.
    if error.name not in (package, f"{package}.core"):
        # The package is installed, but one of its dependencies is not: its own message is better.
        return error
    message = f"ingot.{module or package} needs {package}, which is not installed: {installing(package)}"
    return ModuleNotFoundError(message, name=package)


def lacks(framework: str, code: str) -> DtypeError:
    """Return the error for a dtype that `framework`, a name with a version, lacks."""
    reason = ", and how 6-bit values are packed is not settled" if code.startswith("F6") else ""
    message = f"{framework} has no dtype for {code}{reason}"
    return DtypeError(message, code="dtype-not-in-framework", found=code)


def unknown_device(framework: str, device: object, choices: Sequence[str]) -> OptionError:
    """Return the error for a device that `framework` does not have."""
    message = f"device {device!r} is unknown to {framework}: expected one of {', '.join(choices)}"
    return OptionError(message, code="unknown-device", expected=tuple(choices), found=device)


def not_a_tensor(name: str, value: object, expected: str, flatten: str = "") -> TypeError:
    """Return the error for saving `value`. `flatten` is the framework's call that flattens nested dicts."""
    way_out = f": {flatten} makes one dict of them" if flatten and hasattr(value, "keys") else ""
    return TypeError(f"tensor {_quoted(name)}: expected {expected}, found {type(value).__name__}{way_out}")
