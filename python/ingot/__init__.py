"""Store and load tensors, in the `.safetensors` and the `.bt` format.

>>> import ingot
>>> with ingot.safe_open("model.safetensors", "np") as file:  # doctest: +SKIP
...     print(file.keys(), file["wte"].shape)

`ingot.numpy`, `ingot.torch`, `ingot.flax` (jax), `ingot.tensorflow`, `ingot.mlx` and `ingot.paddle` load and
save whole files. They are imported when they are first used, so that this package costs nothing to import and
needs nothing but itself.
"""

from __future__ import annotations

import sys

# Files are little-endian, and tensors are views of them: all numbers would have their bytes reversed.
if sys.byteorder != "little":
    raise ImportError("ingot runs on little-endian machines only: this one is big-endian")

from ._native import __version__
from .errors import (
    CheckpointError,
    ClosedError,
    ConversionError,
    DestinationError,
    DeviceError,
    DtypeError,
    HeaderError,
    IntegrityError,
    OptionError,
    RankError,
    SafetensorError,
    SaveError,
    SharedMemoryError,
    SliceError,
    StorageError,
    TensorNotFoundError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from . import errors, modelspec
    from . import flax as flax
    from . import mlx as mlx
    from . import numpy as numpy
    from . import paddle as paddle
    from . import tensorflow as tensorflow
    from . import torch as torch
    from ._background import SaveFuture
    from ._convert import Conversion, convert
    from ._describe import FileMetadata, RepoMetadata, describe, describe_async
    from ._download import Download, download
    from ._edit import replace_tensor, update_metadata
    from ._hash import Verification, hash, verify
    from ._native import ShardIndex, TensorInfo
    from ._objects import Ranges
    from ._open import (
        PrefetchLoader,
        TensorIterator,
        TensorSlice,
        read_index,
        read_metadata,
        safe_open,
        warm,
    )
    from ._rearrange import Repair, merge, repair, rewrite, split
    from ._serialize import deserialize, serialize, serialize_file
    from ._view.notebook import View, view
    from ._writer import Writer
    from .typing import StorageOptions

# Without the modules for frameworks: what asks for all names, as `help` and `import *` do, would import them.
__all__ = [
    "CheckpointError",
    "ClosedError",
    "Conversion",
    "ConversionError",
    "DestinationError",
    "DeviceError",
    "Download",
    "DtypeError",
    "FileMetadata",
    "HeaderError",
    "IntegrityError",
    "OptionError",
    "PrefetchLoader",
    "Ranges",
    "RankError",
    "Repair",
    "RepoMetadata",
    "SafetensorError",
    "SaveError",
    "SaveFuture",
    "ShardIndex",
    "SharedMemoryError",
    "SliceError",
    "StorageError",
    "StorageOptions",
    "TensorInfo",
    "TensorIterator",
    "TensorNotFoundError",
    "TensorSlice",
    "Verification",
    "View",
    "Writer",
    "__version__",
    "convert",
    "describe",
    "describe_async",
    "deserialize",
    "download",
    "errors",
    "hash",
    "merge",
    "modelspec",
    "read_index",
    "read_metadata",
    "repair",
    "replace_tensor",
    "rewrite",
    "safe_open",
    "serialize",
    "serialize_file",
    "split",
    "update_metadata",
    "verify",
    "view",
    "warm",
]

# Imported when they are first used. `import ingot` alone takes nothing of the standard library.
_LATER = {
    "Conversion": "_convert",
    "Download": "_download",
    "FileMetadata": "_describe",
    "PrefetchLoader": "_open",
    "Ranges": "_objects",
    "Repair": "_rearrange",
    "RepoMetadata": "_describe",
    "SaveFuture": "_background",
    "Verification": "_hash",
    "View": "_view.notebook",
    "ShardIndex": "_native",
    "StorageOptions": "typing",
    "TensorInfo": "_native",
    "TensorIterator": "_open",
    "TensorSlice": "_open",
    "Writer": "_writer",
    "convert": "_convert",
    "describe": "_describe",
    "describe_async": "_describe",
    "deserialize": "_serialize",
    "download": "_download",
    "hash": "_hash",
    "merge": "_rearrange",
    "read_index": "_open",
    "read_metadata": "_open",
    "repair": "_rearrange",
    "replace_tensor": "_edit",
    "rewrite": "_rearrange",
    "safe_open": "_open",
    "serialize": "_serialize",
    "serialize_file": "_serialize",
    "split": "_rearrange",
    "update_metadata": "_edit",
    "verify": "_hash",
    "view": "_view.notebook",
    "warm": "_open",
    # Parts of what others give, under the names by which they are pickled.
    "Compared": "_hash",
    "LeftOut": "_convert",
    "Mismatch": "_hash",
    "ModelDownload": "_download",
}


# Modules. `import ingot; ingot.torch.load_file(...)` works, and torch is only imported by that line.
_MODULES = ("flax", "mlx", "modelspec", "numpy", "paddle", "tensorflow", "torch")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        try:
            return import_module(f".{name}", __name__)
        except ImportError as error:
            # The answer that `hasattr` and `getattr` with a default know. Its words say what to install.
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}: {error}", name=name
            ) from error
    module = _LATER.get(name)
    if module is not None:
        from importlib import import_module

        found: Any = getattr(import_module(f".{module}", __name__), name)
        # The name by which users know it: a traceback, a pickle and `help` say no private one.
        if hasattr(found, "__code__"):
            found.__module__ = __name__
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
