"""The names of `bintensors.flax`."""

from __future__ import annotations

from functools import partial

from ingot import flax as _ingot
from ingot.flax import load, load_file

from . import checksummed

__all__ = ["load", "load_file", "save", "save_file", "save_with_checksum"]

save = partial(_ingot.save, format="bintensors")
save_file = partial(_ingot.save_file, format="bintensors")
save_with_checksum = checksummed(save)
