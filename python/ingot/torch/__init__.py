"""Load and save PyTorch tensors.

`ingot.dcp`, `ingot.engines` and `ingot.compat` use it; no other part of the package does.
"""

from __future__ import annotations

from ingot._base.frameworks import missing

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("torch", error) from None

from ._devices import mover as mover
from ._devices import payload as payload
from ._files import load, load_file, save, save_file
from ._into import IncompatibleKeys
from ._load_into import load_into
from ._model import load_model, save_model
from ._sharded import save_sharded
from ._tensors import DTYPES as DTYPES
from ._tensors import at as at
from ._tensors import wrap as wrap

__all__ = [
    "IncompatibleKeys",
    "load",
    "load_file",
    "load_into",
    "load_model",
    "save",
    "save_file",
    "save_model",
    "save_sharded",
]

for _name in __all__:
    # The name by which users know a function. A class has the module in which its source is found.
    if hasattr(globals()[_name], "__code__"):
        globals()[_name].__module__ = __name__


def __dir__() -> list[str]:
    return __all__
