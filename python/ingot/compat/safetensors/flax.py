"""The names of `safetensors.flax`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ingot.compat._handles import MMAP, safe_open

from . import numpy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from typing_extensions import Buffer

    from ingot._serialize import Path

__all__ = ["load", "load_file", "safe_open", "save", "save_file"]


def load_file(filename: Path, *, backend: str = MMAP) -> dict[str, Any]:
    """Load all tensors of a file."""
    return _np2jnp(numpy.load_file(filename, backend=backend))


def load(data: Buffer) -> dict[str, Any]:
    """Load all tensors from the bytes of a file."""
    return _np2jnp(numpy.load(data))


def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Give the bytes of a file that holds these tensors."""
    return numpy.save(_jnp2np(tensors), metadata)


def save_file(tensors: dict[str, Any], filename: Path, metadata: dict[str, str] | None = None) -> None:
    """Save tensors to a file."""
    numpy.save_file(_jnp2np(tensors), filename, metadata)


def _np2jnp(numpy_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(array) for name, array in numpy_dict.items()}


def _jnp2np(jnp_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(array) for name, array in jnp_dict.items()}
