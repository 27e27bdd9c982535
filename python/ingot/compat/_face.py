"""Upstream's functions of a framework, made from the functions of ingot's module for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._handles import MMAP, chosen, path_only
from ._wording import reading, writing

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ingot.typing import Path

    Function = Callable[..., Any]


def loaders(module: str, ours: Any) -> tuple[Function, Function]:
    """Return `load_file` and `load` for a module of upstream's with this name."""

    @reading("Error while deserializing header")
    def load_file(filename: Path, *, backend: str = MMAP) -> dict[str, Any]:
        """Load all tensors of a file."""
        return ours.load_file(path_only(filename), backend=chosen(backend))  # type: ignore[no-any-return]

    @reading("Error while deserializing")
    def load(data: Buffer) -> dict[str, Any]:
        """Load all tensors from the bytes of a file."""
        return ours.load(data)  # type: ignore[no-any-return]

    return _named(module, load_file), _named(module, load)


def savers(module: str, ours: Any) -> tuple[Function, Function]:
    """Return `save_file` and `save` for a module of upstream's with this name."""

    @writing
    def save_file(tensors: dict[str, Any], filename: Path, metadata: dict[str, str] | None = None) -> None:
        """Save tensors to a file."""
        ours.save_file(tensors, path_only(filename), metadata, format="safetensors")

    @writing
    def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
        """Return the bytes of a file that holds these tensors."""
        return ours.save(tensors, metadata)  # type: ignore[no-any-return]

    return _named(module, save_file), _named(module, save)


def _named(module: str, function: Function) -> Function:
    """Return the function with the names by which a pickle finds it."""
    function.__module__, function.__qualname__ = module, function.__name__
    return function
