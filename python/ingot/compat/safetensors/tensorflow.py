"""The names of `safetensors.tensorflow`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ingot import tensorflow as _ingot
from ingot.compat._face import loaders, savers
from ingot.compat._handles import safe_open

__all__ = ["load", "load_file", "safe_open", "save", "save_file"]

load_file, load = loaders(__name__, _ingot)
save_file, save = savers(__name__, _ingot)


def _np2tf(numpy_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: tf.convert_to_tensor(array) for name, array in numpy_dict.items()}


def _tf2np(tf_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tf_dict.items()}
