"""The names of `safetensors.flax`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ingot import flax as _ingot
from ingot._adapters.face import Whole
from ingot.compat._handles import MMAP, chosen, path_only, safe_open
from ingot.compat._wording import reading, writing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ingot.typing import Path

__all__ = ["load", "load_file", "safe_open", "save", "save_file"]

_whole = Whole(_ingot.wrap, _ingot.narrowing, _ingot.at, _ingot.payload)


@reading("Error while deserializing header")
def load_file(filename: Path, *, backend: str = MMAP) -> dict[str, Any]:
    """Load all tensors of a file, as `ingot.flax.load_file`, but as narrow as jax is."""
    return _whole.load_file(path_only(filename), backend=chosen(backend))


@reading("Error while deserializing")
def load(data: Buffer) -> dict[str, Any]:
    """Load all tensors from the bytes of a file, as `ingot.flax.load`, but as narrow as jax is."""
    return _whole.load(data)


@writing
def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Give the bytes of a file that holds these tensors, as `ingot.flax.save`."""
    return _ingot.save(tensors, metadata)


@writing
def save_file(tensors: dict[str, Any], filename: Path, metadata: dict[str, str] | None = None) -> None:
    """Save tensors to a file, as `ingot.flax.save_file`."""
    _ingot.save_file(tensors, path_only(filename), metadata, format="safetensors")


def _np2jnp(numpy_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(array) for name, array in numpy_dict.items()}


def _jnp2np(jnp_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(array) for name, array in jnp_dict.items()}
