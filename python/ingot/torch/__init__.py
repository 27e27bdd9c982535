"""Load and save PyTorch tensors.

>>> import torch
>>> from ingot.torch import load_file, save_file
>>> save_file({"weight": torch.ones(4, 3)}, "weights.safetensors")
>>> load_file("weights.safetensors")["weight"].shape
torch.Size([4, 3])
"""

# `ingot.dcp`, `ingot.engines` and `ingot.compat` use it; no other part of the package does.

from __future__ import annotations

from ingot._base.frameworks import missing

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("torch", error) from None

from ._delta_writer import DeltaWriter
from ._devices import mover as mover
from ._devices import payload as payload
from ._files import load, load_file, save, save_file
from ._into import IncompatibleKeys
from ._load_into import load_into
from ._model import load_model, save_model
from ._sharded import save_sharded
from ._state import RNG, load_state, save_state
from ._state import states as states
from ._tensors import DTYPES as DTYPES
from ._tensors import at as at
from ._tensors import wrap as wrap

__all__ = [
    "RNG",
    "DeltaWriter",
    "IncompatibleKeys",
    "load",
    "load_file",
    "load_into",
    "load_model",
    "load_state",
    "save",
    "save_file",
    "save_model",
    "save_sharded",
    "save_state",
]

for _name in __all__:
    # The public module of a function. Classes and methods keep the module of their source.
    if hasattr(globals()[_name], "__code__") and not hasattr(globals()[_name], "__self__"):
        globals()[_name].__module__ = __name__


def __dir__() -> list[str]:
    return __all__
