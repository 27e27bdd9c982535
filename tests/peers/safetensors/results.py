"""Results of calls as plain values, which are equal if a caller sees no difference."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy
import torch


def seen(value: Any) -> Any:
    """Return a plain value that describes `value`."""
    if isinstance(value, torch.Tensor):
        return type(value).__name__, str(value.dtype), tuple(value.shape), str(value.device), bytes_of(value)
    if isinstance(value, numpy.ndarray):
        return "ndarray", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return type(value).__name__, file_of(bytes(value))
    if isinstance(value, torch.nn.Module):
        return {name: seen(tensor) for name, tensor in value.state_dict().items()}
    if hasattr(value, "offset_keys"):
        return "handle", value.keys(), value.offset_keys(), value.metadata()
    if hasattr(value, "get_shape"):
        return "slice", value.get_shape(), value.get_dtype()
    if isinstance(value, Mapping):
        return "dict", {key: seen(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [seen(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return "set", sorted(map(repr, value))
    if isinstance(value, int) and value > 1 << 32:
        return "an address"
    if value is None or isinstance(value, (str, int, float, type, torch.dtype, numpy.dtype)):
        return type(value).__name__, str(value)
    return f"a {type(value).__name__}"


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return its values, or the reason for their absence: some kinds do not show their values."""
    try:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return bytes(plain.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    except (RuntimeError, NotImplementedError) as fault:
        return type(fault).__name__


def file_of(data: bytes) -> Any:
    """Return a file's contents without the order of its metadata, or any other bytes unchanged."""
    begin = 8 + int.from_bytes(data[:8], "little")
    if not 10 <= begin <= len(data):
        return data
    try:
        header = json.loads(data[8:begin])
    except ValueError:
        return data
    return header, list(header), data[begin:]


def written(place: pathlib.Path) -> Any:
    """Return the contents of the file that the call wrote, and remove it."""
    path = place / "out"
    if not path.exists():
        return None
    data = path.read_bytes()
    path.unlink()
    return file_of(data)
