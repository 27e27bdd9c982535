"""Store and load tensors, in the `.safetensors` and the `.bt` format.

>>> import ingot
>>> with ingot.open("model.safetensors") as file:
...     print(file.keys(), file["wte"].shape)
['lm_head.weight', 'wte'] (8, 4)

`ingot.numpy`, `ingot.torch`, `ingot.flax` (jax), `ingot.tensorflow`, `ingot.mlx` and `ingot.paddle` load and
save whole files. They are imported when they are first used, so that this package costs nothing to import and
needs nothing but itself.
"""

from __future__ import annotations

import sys

# Files are little-endian, and tensors are views of them, so all numbers would have their bytes reversed.
if sys.byteorder != "little":
    raise ImportError("ingot runs on little-endian machines only: this one is big-endian")

from . import errors
from ._native import __version__
from .errors import *  # noqa: F403 - its `__all__`

# Needed for jedi, which without the annotation takes the name for False.
TYPE_CHECKING: bool = False
if TYPE_CHECKING:
    from . import dcp as dcp
    from . import delta as delta
    from . import flax as flax
    from . import lora as lora
    from . import mlx as mlx
    from . import modelspec, remap
    from . import numpy as numpy
    from . import paddle as paddle
    from . import tensorflow as tensorflow
    from . import torch as torch
    from . import typing as typing
    from ._base.keys import glob
    from ._checkpoints.checkpoints import Checkpoints
    from ._convert import Conversion, convert
    from ._native import TensorInfo
    from ._read.check import Check, check
    from ._read.diff import Diff, diff
    from ._read.digest import Verification, hash, verify
    from ._read.handle import TensorSlice, open, safe_open, warm
    from ._read.inspect import FileMetadata, RepoMetadata, inspect, inspect_async
    from ._read.loader import PrefetchLoader
    from ._read.source import Ranges
    from ._read.stats import Stats, stats
    from ._state.face import StateReport
    from ._view.notebook import View, view
    from ._write.background import SaveFuture
    from ._write.cast import Cast, cast
    from ._write.download import Download, download
    from ._write.edit import Repair, repair, replace_tensor, update_metadata
    from ._write.rearrange import merge, rewrite, split
    from ._write.serialize import deserialize, serialize, serialize_file
    from ._write.upload import Upload, upload
    from ._write.writer import Writer
    from .typing import StorageOptions, WriteOptions

# Without the modules for frameworks, which `help` and `import *` would import.
__all__ = [
    "Cast",
    "Check",
    "Checkpoints",
    "Conversion",
    "Diff",
    "Download",
    "FileMetadata",
    "PrefetchLoader",
    "Ranges",
    "Repair",
    "RepoMetadata",
    "SaveFuture",
    "StateReport",
    "Stats",
    "StorageOptions",
    "TensorInfo",
    "TensorSlice",
    "Upload",
    "Verification",
    "View",
    "WriteOptions",
    "Writer",
    "__version__",
    "cast",
    "check",
    "convert",
    "delta",
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
    "remap",
    "repair",
    "replace_tensor",
    "rewrite",
    "safe_open",
    "serialize",
    "serialize_file",
    "split",
    "stats",
    "update_metadata",
    "upload",
    "verify",
    "view",
    "warm",
]
__all__ += errors.__all__

# The lazily imported names of each module: `import ingot` alone imports nothing of the standard library.
# Classes of parts of results are listed too, under the names by which they are pickled.
_LATER = {
    name: module
    for module, names in {
        "_base.keys": "glob",
        "_base.report": "restored",
        "_checkpoints.checkpoints": "Checkpoints",
        "_convert": "Conversion LeftOut convert",
        "_native": "TensorInfo",
        "_read.check": "Check Problem check",
        "_read.diff": "Diff Distance diff",
        "_read.digest": "Compared Mismatch Verification hash verify",
        "_read.handle": "TensorSlice open safe_open warm",
        "_read.inspect": "FileMetadata RepoMetadata inspect inspect_async",
        "_read.loader": "PrefetchLoader",
        "_read.source": "Ranges",
        "_read.stats": "Stats TensorStats stats",
        "_state.face": "StateReport",
        "_view.notebook": "View view",
        "_write.background": "SaveFuture",
        "_write.cast": "Cast cast",
        "_write.download": "Download download",
        "_write.edit": "Finding Repair repair replace_tensor update_metadata",
        "_write.rearrange": "merge rewrite split",
        "_write.serialize": "deserialize serialize serialize_file",
        "_write.upload": "Upload upload",
        "_write.writer": "Writer",
        "typing": "StorageOptions WriteOptions",
    }.items()
    for name in names.split()
}

# Modules, each with the package that it imports. `import ingot; ingot.torch.load_file(...)` works, and torch
# is only imported by that line.
_MODULES = {
    "dcp": "torch",
    "delta": "ingot",
    "flax": "jax",
    "lora": "numpy",
    "mlx": "mlx.core",
    "modelspec": "ingot",
    "remap": "ingot",
    "numpy": "numpy",
    "paddle": "paddle",
    "tensorflow": "tensorflow",
    "torch": "torch",
    "typing": "ingot",
}


# Hidden from type checkers, which give every name of a module with `__getattr__` the type Any.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            try:
                return import_module(f".{name}", __name__)
            except ImportError as error:
                # An AttributeError, which `hasattr` and `getattr` with a default expect. The message says
                # what to install.
                raise AttributeError(
                    f"module {__name__!r} has no attribute {name!r}: {error}", name=name
                ) from error
        module = _LATER.get(name)
        if module is not None:
            from importlib import import_module

            found = getattr(import_module(f".{module}", __name__), name)
            # The public name of the module, for tracebacks, pickles and `help`.
            if hasattr(found, "__code__"):
                found.__module__ = __name__
            globals()[name] = found
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    # `help` and completion get each name of these: a module is among them once its framework is imported.
    return sorted({*__all__, *(name for name, package in _MODULES.items() if sys.modules.get(package))})
