"""The names of `safetensors.mlx`."""

from __future__ import annotations

from typing import Any

from ingot import mlx as _ingot
from ingot._adapters.face import Whole
from ingot.compat._handles import MMAP, chosen, path_only, safe_open
from ingot.compat._wording import reading, writing

from . import numpy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ingot.typing import Path

__all__ = ["load", "load_file", "safe_open", "save", "save_file"]

_whole = Whole(_ingot.wrap, _ingot.narrowing, _ingot.at, _ingot.payload)


@reading("Error while deserializing header")
def load_file(filename: Path, *, backend: str = MMAP) -> dict[str, Any]:
    """Load all tensors of a file, as `ingot.mlx.load_file`, with F32 for F64."""
    return _whole.load_file(path_only(filename), backend=chosen(backend))


@reading("Error while deserializing")
def load(data: Buffer) -> dict[str, Any]:
    """Load all tensors from the bytes of a file, as `ingot.mlx.load`, with F32 for F64."""
    return _whole.load(data)


@writing
def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Give the bytes of a file that holds these tensors, as `ingot.mlx.save`."""
    return _ingot.save(tensors, metadata)


@writing
def save_file(tensors: dict[str, Any], filename: Path, metadata: dict[str, str] | None = None) -> None:
    """Save tensors to a file, as `ingot.mlx.save_file`."""
    _ingot.save_file(tensors, path_only(filename), metadata, format="safetensors")


def _np2mx(numpy_dict: dict[str, Any]) -> dict[str, Any]:
    found = load(numpy.save(numpy_dict))
    return {name: found[name] for name in numpy_dict}


def _mx2np(mx_dict: dict[str, Any]) -> dict[str, Any]:
    # By bytes, since mlx does not hand every dtype to NumPy.
    found = numpy.load(save(mx_dict))
    return {name: found[name] for name in mx_dict}
