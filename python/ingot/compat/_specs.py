"""Tensors by address, as upstream's `serialize` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ingot
from ingot._base.text import _quoted
from ingot._native import local_path
from ingot.errors import SaveError

from ._tensor_spec import TensorSpec
from ._wording import reading, writing

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ingot.typing import Path


@writing
def serialize(tensor_dict: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a file.

    Parameters
    ----------
    tensor_dict : dict of str to TensorSpec
        The tensors. A dict with ``"dtype"``, ``"shape"`` and ``"data"``, as for 0.7, is accepted too.
    metadata : dict of str to str, optional
        Text to store beside them.
    """
    return ingot.serialize(_buffers(tensor_dict), metadata)


@writing
def serialize_file(
    tensor_dict: Mapping[str, Any], filename: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file. Takes the parameters of `serialize`, and the name of the file."""
    ingot.serialize_file(_buffers(tensor_dict), local_path(filename), metadata, format="safetensors")


@reading("Error while deserializing")
def deserialize(bytes: Buffer) -> list[tuple[str, dict[str, Any]]]:
    """Return the tensors in the bytes of a file: pairs of a name and a dict of its dtype, shape and data."""
    return ingot.deserialize(bytes)


def _buffers(tensors: Any) -> Any:
    """Return `tensors` with a buffer for each `TensorSpec`. Values that are not dicts are refused later."""
    if not hasattr(tensors, "items"):
        return tensors
    return {
        name: _buffer(name, tensor) if isinstance(tensor, TensorSpec) else tensor
        for name, tensor in tensors.items()
    }


def _buffer(name: str, spec: TensorSpec) -> dict[str, Any]:
    # Slow to import, and not needed for reading files.
    import ctypes

    if spec.data_len and not spec.data_ptr:
        raise SaveError(f"tensor {_quoted(name)}: its address is 0", code="no-values", tensor=name)
    data = (ctypes.c_char * spec.data_len).from_address(spec.data_ptr) if spec.data_len else b""
    return {"dtype": spec.dtype, "shape": spec.shape, "data": data}
