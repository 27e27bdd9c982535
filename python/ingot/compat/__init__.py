"""Stand in for `safetensors`, so that programs which import it run on ingot unchanged.

>>> import ingot.compat
>>> ingot.compat.install()
>>> from safetensors.numpy import load_file  # ingot's

or, with nothing changed at all::

    python -m ingot.compat script.py args…
    python -m ingot.compat -m pytest …

After `install`, ``import safetensors`` finds the package beside this file. It has the names, signatures and
behaviour of safetensors 0.8 and 0.9, and the names of 0.7 that are still in use. Errors contain the words
that programs search for, and are caught by ``except`` clauses for either package's `SafetensorError`.

For every process of a program, including its children, put one line into a file ``ingot-compat.pth`` in the
``site-packages`` directory::

    import os; os.environ.get("INGOT_COMPAT") == "1" and __import__("ingot.compat").compat.install()

Python runs it when it starts. Without ``INGOT_COMPAT=1`` in the environment, it costs one lookup in a dict.
"""

# No other part of the package uses this one.

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution, DistributionFinder
    from types import ModuleType

__all__ = ["install", "uninstall"]

NAME = "safetensors"


class _Finder:
    """Finds `safetensors` in this package. Python finds its submodules by itself."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, list(__path__)) if name == NAME else None

    @staticmethod
    def find_distributions(context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Return a distribution of that name if none is installed, because programs ask for its version."""
        if context.name is None or context.name.lower() != NAME:
            return ()
        from . import _distribution

        return _distribution.stand_in(context)


# The modules that had the name before, which `uninstall` restores. None while ingot is not installed.
_before: dict[str, ModuleType] | None = None


def install() -> None:
    """Make ``import safetensors`` find ingot from now on.

    May be called more than once.

    Warns
    -----
    RuntimeWarning
        `safetensors` was imported already. Libraries keep the names that they imported from it; the message
        lists these libraries.

    Examples
    --------
    >>> import ingot.compat
    >>> ingot.compat.install()
    >>> from safetensors.numpy import load_file
    >>> load_file("model.safetensors")["wte"].shape
    (8, 4)
    """
    global _before
    if _before is not None:
        return
    _before = _take_modules()
    sys.meta_path.insert(0, _Finder)
    if _before:
        import warnings

        holders = ", ".join(_holders(_before)) or "unknown code"
        warnings.warn(
            f"safetensors was imported before ingot.compat.install(), by {holders}: what they took from it "
            "is not ingot's. Install first, or start the program with `python -m ingot.compat`",
            RuntimeWarning,
            stacklevel=2,
        )


def uninstall() -> None:
    """Undo `install`: import safetensors itself again.

    Modules that were imported in between keep their names. May be called more than once.

    Examples
    --------
    >>> import ingot.compat
    >>> ingot.compat.install()
    >>> ingot.compat.uninstall()
    """
    global _before
    if _before is None:
        return
    sys.meta_path.remove(_Finder)
    _take_modules()
    sys.modules.update(_before)
    _before = None
    wording = sys.modules.get(f"{__name__}._wording")
    if wording is not None:
        wording.part()


def _take_modules() -> dict[str, ModuleType]:
    """Remove the modules with the name from `sys.modules`, and return them."""
    names = [name for name in sys.modules if name == NAME or name.startswith(NAME + ".")]
    return {name: sys.modules.pop(name) for name in names}


def _holders(modules: dict[str, ModuleType]) -> list[str]:
    """Return the top-level names of the libraries that hold one of these modules, or an object from one."""
    made = {id(module) for module in modules.values()}
    for name, module in modules.items():
        # Classes of the extension module have the module `builtins`.
        native = name.endswith("._safetensors_rust")
        for key, value in vars(module).items():
            if not key.startswith("__") and (native or getattr(value, "__module__", None) in modules):
                made.add(id(value))
    holders = set()
    for name, module in list(sys.modules.items()):
        if any(id(value) in made for value in list(getattr(module, "__dict__", {}).values())):
            holders.add(name.partition(".")[0])
    return sorted(holders)
