"""Load and save PyTorch tensors."""

from __future__ import annotations

from ingot._frameworks import missing

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("torch", error) from None

from ._files import (
    DTYPES,
    at,
    load,
    load_file,
    load_into,
    mover,
    payload,
    save,
    save_file,
    save_with_checksum,
    wrap,
)
from ._into import Incompatible
from ._model import load_model, save_model
from ._sharded import save_sharded

__all__ = [
    "Incompatible",
    "load",
    "load_file",
    "load_into",
    "load_model",
    "save",
    "save_file",
    "save_model",
    "save_sharded",
    "save_with_checksum",
]

# What `ingot.safe_open` and tests take besides.
_ADAPTER = (DTYPES, at, mover, payload, wrap)

for _name in __all__:
    # The name by which users know it: a pickle and `help` say no private one.
    globals()[_name].__module__ = __name__


def __dir__() -> list[str]:
    return __all__
