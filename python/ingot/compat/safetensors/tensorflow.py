"""The names of `safetensors.tensorflow`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ingot import tensorflow as _ingot
from ingot.compat._handles import MMAP, chosen, path_only, safe_open
from ingot.compat._wording import reading, writing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ingot.typing import Path

__all__ = ["load", "load_file", "safe_open", "save", "save_file"]


@reading("Error while deserializing header")
def load_file(filename: Path, *, backend: str = MMAP) -> dict[str, Any]:
    """Load all tensors of a file, as `ingot.tensorflow.load_file`."""
    return _ingot.load_file(path_only(filename), backend=chosen(backend))


@reading("Error while deserializing")
def load(data: Buffer) -> dict[str, Any]:
    """Load all tensors from the bytes of a file, as `ingot.tensorflow.load`."""
    return _ingot.load(data)


@writing
def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Give the bytes of a file that holds these tensors, as `ingot.tensorflow.save`."""
    return _ingot.save(tensors, metadata)


@writing
def save_file(tensors: dict[str, Any], filename: Path, metadata: dict[str, str] | None = None) -> None:
    """Save tensors to a file, as `ingot.tensorflow.save_file`."""
    _ingot.save_file(tensors, path_only(filename), metadata, format="safetensors")


def _np2tf(numpy_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: tf.convert_to_tensor(array) for name, array in numpy_dict.items()}


def _tf2np(tf_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tf_dict.items()}
