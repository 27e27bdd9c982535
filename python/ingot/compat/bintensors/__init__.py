"""The names of bintensors 0.2, for programs that import ``ingot.compat.bintensors`` instead.

>>> from ingot.compat.bintensors.numpy import save_with_checksum
>>> digest, file = save_with_checksum({"a": numpy.arange(4)})

Files are written in the bintensors format, byte for byte as bintensors writes them. Loading accepts both
formats. `ingot.compat.install` does not change ``import bintensors``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha1
from typing import TYPE_CHECKING, Any

import ingot
from ingot import deserialize, safe_open
from ingot.errors import SafetensorError as BintensorError

if TYPE_CHECKING:
    from ingot.typing import Path

__all__ = ["BintensorError", "deserialize", "safe_open", "serialize", "serialize_file"]


def serialize(
    tensor_dict: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str] | None = None
) -> bytes:
    r"""Return the bytes of a file that holds these buffers, as `ingot.serialize`.

    Examples
    --------
    >>> from ingot.compat.bintensors import serialize
    >>> data = serialize({"ids": {"dtype": "uint8", "shape": [2], "data": b"\x01\x02"}})
    >>> ingot.open(bytearray(data)).format
    'bintensors'
    """
    return ingot.serialize(tensor_dict, metadata, format="bintensors")


def serialize_file(
    filename: Path,
    tensor_dict: Mapping[str, Mapping[str, Any]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    r"""Write these buffers to a file, as `ingot.serialize_file`. The name of the file comes first.

    Examples
    --------
    >>> from ingot.compat.bintensors import serialize_file
    >>> serialize_file("ids.bt", {"ids": {"dtype": "uint8", "shape": [2], "data": b"\x01\x02"}})
    >>> ingot.open("ids.bt").format
    'bintensors'
    """
    ingot.serialize_file(tensor_dict, filename, metadata, format="bintensors")


def checksummed(save: Callable[..., bytes]) -> Callable[..., tuple[bytes, bytes]]:
    """Return the function ``save_with_checksum`` of a framework that has this ``save``."""

    def save_with_checksum(
        tensor_dict: Mapping[str, Any],
        metadata: Mapping[str, str] | None = None,
        hasher: Callable[[bytes], Any] = sha1,
    ) -> tuple[bytes, bytes]:
        """Return the digest of a file, which the file does not hold, and the bytes of the file."""
        file = save(tensor_dict, metadata)
        return hasher(file).digest(), file

    return save_with_checksum
