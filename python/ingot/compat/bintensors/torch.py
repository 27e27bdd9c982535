"""The names of `bintensors.torch`."""

from __future__ import annotations

from functools import partial

from ingot import torch as _ingot
from ingot.torch import load, load_file, load_model

from . import checksummed

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model", "save_with_checksum"]

save = partial(_ingot.save, format="bintensors")
save_file = partial(_ingot.save_file, format="bintensors")
save_with_checksum = checksummed(save)
save_model = partial(_ingot.save_model, format="bintensors")
