"""The names of upstream's extension module."""

from __future__ import annotations

from ingot._read.loader import PrefetchLoader, TensorStream
from ingot.compat._handles import PySafeSlice, TensorMeta, _safe_open_handle, safe_open
from ingot.compat._specs import deserialize, serialize, serialize_file
from ingot.compat._tensor_spec import TensorSpec
from ingot.compat._wording import join

__all__ = [
    "PrefetchLoader",
    "PySafeSlice",
    "SafetensorError",
    "TensorMeta",
    "TensorSpec",
    "TensorStream",
    "_safe_open_handle",
    "deserialize",
    "safe_open",
    "serialize",
    "serialize_file",
]

SafetensorError: type[Exception] = join()
