"""The package that ``import safetensors`` finds after `ingot.compat.install`."""

from __future__ import annotations

from ._safetensors_rust import (
    PrefetchLoader,
    PySafeSlice,
    SafetensorError,
    TensorMeta,
    TensorSpec,
    _safe_open_handle,
    deserialize,
    safe_open,
    serialize,
    serialize_file,
)

__all__ = [
    "PrefetchLoader",
    "PySafeSlice",
    "SafetensorError",
    "TensorMeta",
    "TensorSpec",
    "__version__",
    "_safe_open_handle",
    "deserialize",
    "safe_open",
    "serialize",
    "serialize_file",
]

__version__: str


def __getattr__(name: str) -> str:
    # Looked up at the first use, which takes longer than the import of this package.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ingot.compat._distribution import version

    globals()["__version__"] = found = version()
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), "__version__"})
