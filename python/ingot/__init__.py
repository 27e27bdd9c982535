"""Store and load tensors, in the `.safetensors` and the `.bt` format.

>>> import ingot
>>> with ingot.open("model.safetensors") as file:  # doctest: +SKIP
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

# For jedi, which reads it as False without the annotation.
TYPE_CHECKING: bool = False
if TYPE_CHECKING:
    from typing import Any

    from . import errors, modelspec
    from . import flax as flax
    from . import mlx as mlx
    from . import numpy as numpy
    from . import paddle as paddle
    from . import tensorflow as tensorflow
    from . import torch as torch
    from ._base.keys import glob
    from ._convert import Conversion, convert
    from ._native import TensorInfo
    from ._read.check import Check, check
    from ._read.diff import Diff, diff
    from ._read.digest import Verification, hash, verify
    from ._read.handle import open, safe_open, warm
    from ._read.inspect import FileMetadata, RepoMetadata, inspect, inspect_async
    from ._read.loader import PrefetchLoader
    from ._read.part import TensorSlice
    from ._read.source import Ranges
    from ._read.stats import Stats, stats
    from ._view.notebook import View, view
    from ._write.background import SaveFuture
    from ._write.cast import Cast, cast
    from ._write.download import Download, download
    from ._write.edit import replace_tensor, update_metadata
    from ._write.rearrange import merge, rewrite, split
    from ._write.repair import Repair, repair
    from ._write.serialize import deserialize, serialize, serialize_file
    from ._write.writer import Writer
    from .typing import StorageOptions, WriteOptions

# Without the modules for frameworks: what asks for all names, as `help` and `import *` do, would import them.
__all__ = [
    "Cast",
    "Check",
    "CheckpointError",
    "ClosedError",
    "Conversion",
    "ConversionError",
    "DestinationError",
    "DeviceError",
    "Diff",
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
    "SharedMemoryError",
    "SliceError",
    "Stats",
    "StorageError",
    "StorageOptions",
    "TensorInfo",
    "TensorNotFoundError",
    "TensorSlice",
    "Verification",
    "View",
    "WriteOptions",
    "Writer",
    "__version__",
    "cast",
    "check",
    "convert",
    "deserialize",
    "diff",
    "download",
    "errors",
    "glob",
    "hash",
    "inspect",
    "inspect_async",
    "merge",
    "modelspec",
    "open",
    "repair",
    "replace_tensor",
    "rewrite",
    "safe_open",
    "serialize",
    "serialize_file",
    "split",
    "stats",
    "update_metadata",
    "verify",
    "view",
    "warm",
]

# Imported when they are first used. `import ingot` alone takes nothing of the standard library.
_LATER = {
    "Cast": "_write.cast",
    "Check": "_read.check",
    "Conversion": "_convert",
    "Diff": "_read.diff",
    "Download": "_write.download",
    "FileMetadata": "_read.inspect",
    "PrefetchLoader": "_read.loader",
    "Ranges": "_read.source",
    "Repair": "_write.repair",
    "RepoMetadata": "_read.inspect",
    "SaveFuture": "_write.background",
    "Verification": "_read.digest",
    "View": "_view.notebook",
    "Stats": "_read.stats",
    "StorageOptions": "typing",
    "TensorInfo": "_native",
    "TensorSlice": "_read.part",
    "WriteOptions": "typing",
    "Writer": "_write.writer",
    "cast": "_write.cast",
    "check": "_read.check",
    "convert": "_convert",
    "deserialize": "_write.serialize",
    "diff": "_read.diff",
    "download": "_write.download",
    "glob": "_base.keys",
    "hash": "_read.digest",
    "inspect": "_read.inspect",
    "inspect_async": "_read.inspect",
    "merge": "_write.rearrange",
    "open": "_read.handle",
    "repair": "_write.repair",
    "replace_tensor": "_write.edit",
    "rewrite": "_write.rearrange",
    "safe_open": "_read.handle",
    "serialize": "_write.serialize",
    "serialize_file": "_write.serialize",
    "split": "_write.rearrange",
    "stats": "_read.stats",
    "update_metadata": "_write.edit",
    "verify": "_read.digest",
    "view": "_view.notebook",
    "warm": "_read.handle",
    # Parts of what others give, under the names by which they are pickled.
    "Compared": "_read.digest",
    "Distance": "_read.diff",
    "Finding": "_write.repair",
    "LeftOut": "_convert",
    "Mismatch": "_read.digest",
    "ModelDownload": "_write.download",
    "Problem": "_read.check",
    "TensorStats": "_read.stats",
    "restored": "_base.report",
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
