"""The names of `safetensors.mlx`. F64 is loaded as F32."""

from __future__ import annotations

from typing import Any

from ingot import mlx as _ingot
from ingot._adapters.face import Whole
from ingot.compat._face import loaders, savers
from ingot.compat._handles import safe_open

from . import numpy

__all__ = ["load", "load_file", "safe_open", "save", "save_file"]

load_file, load = loaders(__name__, Whole(_ingot.wrap, _ingot.narrowing, _ingot.at, _ingot.payload))
save_file, save = savers(__name__, _ingot)


def _np2mx(numpy_dict: dict[str, Any]) -> dict[str, Any]:
    found = load(numpy.save(numpy_dict))
    return {name: found[name] for name in numpy_dict}


def _mx2np(mx_dict: dict[str, Any]) -> dict[str, Any]:
    # By bytes, since mlx does not convert every dtype to NumPy's.
    found = numpy.load(save(mx_dict))
    return {name: found[name] for name in mx_dict}
