"""Store and load tensors, in the `.safetensors` and the `.bt` format.

>>> import ingot
>>> with ingot.safe_open("model.safetensors", "np") as file:  # doctest: +SKIP
...     print(file.keys(), file["wte"].shape)

`ingot.numpy`, `ingot.torch`, `ingot.flax` (jax), `ingot.tensorflow`, `ingot.mlx` and `ingot.paddle` load and
save whole files. They are imported when they are first used, so that this package costs nothing to import and
needs nothing but itself.
"""

from __future__ import annotations

from ._hash import Report, hash, verify
from ._native import __version__
from ._open import safe_open
from ._serialize import deserialize, serialize, serialize_file
from .errors import (
    ClosedError,
    DestinationError,
    DtypeError,
    HeaderError,
    IntegrityError,
    OptionError,
    SafetensorError,
    SaveError,
    SharedMemoryError,
    SliceError,
    StorageError,
    TensorNotFoundError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import errors, flax, mlx, modelspec, numpy, paddle, tensorflow, torch

__all__ = [
    "ClosedError",
    "DestinationError",
    "DtypeError",
    "HeaderError",
    "IntegrityError",
    "OptionError",
    "Report",
    "SafetensorError",
    "SaveError",
    "SharedMemoryError",
    "SliceError",
    "StorageError",
    "TensorNotFoundError",
    "__version__",
    "deserialize",
    "errors",
    "flax",
    "hash",
    "mlx",
    "modelspec",
    "numpy",
    "paddle",
    "safe_open",
    "serialize",
    "serialize_file",
    "tensorflow",
    "torch",
    "verify",
]


def __getattr__(name: str) -> object:
    # `import ingot; ingot.torch.load_file(...)` works, and torch is only imported by that line.
    if name in ("flax", "mlx", "modelspec", "numpy", "paddle", "tensorflow", "torch"):
        from importlib import import_module

        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
