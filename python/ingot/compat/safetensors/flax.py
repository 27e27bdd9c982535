"""The names of `safetensors.flax`. Arrays are as narrow as jax makes them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ingot import flax as _ingot
from ingot._adapters.face import Whole
from ingot.compat._face import loaders, savers
from ingot.compat._handles import safe_open

__all__ = ["load", "load_file", "safe_open", "save", "save_file"]

load_file, load = loaders(__name__, Whole(_ingot.wrap, _ingot.narrowing, _ingot.at, _ingot.payload))
save_file, save = savers(__name__, _ingot)


def _np2jnp(numpy_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(array) for name, array in numpy_dict.items()}


def _jnp2np(jnp_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(array) for name, array in jnp_dict.items()}
