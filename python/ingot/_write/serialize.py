"""Saving and loading plain buffers, without a framework or with one that ingot does not support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

import ingot
from ingot import _native
from ingot._base.checks import known_format, named, stored
from ingot._base.options import Saving, argument, checked, takes
from ingot._base.text import _quoted, located
from ingot.errors import SaveError
from ingot.typing import Buffer, Format, NoOptions, Path, SaveOptions, Writable

from .save import write_file

if TYPE_CHECKING:
    from ingot._base.options import AtOnce, InBackground


@takes()
def serialize(
    tensor_dict: Mapping[str, Mapping[str, Any]],
    metadata: Mapping[str, str] | None = None,
    *,
    format: Format = "safetensors",
    **options: Unpack[NoOptions],
) -> bytes:
    r"""Return the bytes of a file that holds these buffers.

    Parameters
    ----------
    tensor_dict : dict of str to dict
        Name to ``{"dtype": ..., "shape": ..., "data": ...}``. The dtype is one of `ingot.typing.Dtype`, such
        as ``"F32"`` or ``"float32"``; for ``"float4_e2m1fn_x2"``, the shape is the packed one, as in torch,
        and its last dimension is doubled. The data is any C-contiguous little-endian buffer of exactly the
        size that dtype and shape require. It is not kept.
    metadata : dict of str to str, optional
        Text to store beside the tensors. Keys that describe the tensors of another file are left out, as for
        `ingot.numpy.save`.
    format : {"safetensors", "bintensors"}
        The file format.

    Returns
    -------
    bytes
        The same bytes for the same input: metadata is sorted by key, tensors by alignment and name
        (FORMAT.md, "Writing").

    Raises
    ------
    TypeError
        A name, a key or a value of the metadata is not a str; an entry is not such a dict; data is not a
        buffer.
    SaveError
        A dtype is unknown or not in that format, a buffer is not contiguous or not of the right size, a name
        is reserved, or no header can hold the tensors.
    OptionError
        `format` is not one of the two.

    Examples
    --------
    >>> data = ingot.serialize({"ids": {"dtype": "uint8", "shape": [2], "data": b"\x01\x02"}})
    >>> type(data).__name__
    'bytes'
    """
    given = checked(serialize, {"metadata": metadata, "format": format, **options}, format=known_format)
    return _native.serialize(argument(serialize, "tensor_dict", tensor_dict, named), _spec, **given)


@overload
def serialize_file(
    tensor_dict: Mapping[str, Mapping[str, Any]],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[InBackground],
) -> ingot.SaveFuture: ...


@overload
def serialize_file(
    tensor_dict: Mapping[str, Mapping[str, Any]],
    filename: Path | Writable,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[AtOnce],
) -> None: ...


@takes(SaveOptions, overwrite=True)
def serialize_file(
    tensor_dict: Mapping[str, Mapping[str, Any]],
    filename: Path | Writable,
    metadata: Mapping[str, str] | None = None,
    *,
    background: bool = False,
    **options: Unpack[SaveOptions],
) -> ingot.SaveFuture | None:
    r"""Write these buffers to a file.

    Parameters
    ----------
    tensor_dict, metadata
        As for `serialize`.
    filename : str, bytes, os.PathLike, or an object with a ``write``
        Where to write. An existing file is replaced. An object, such as an open binary file or `io.BytesIO`,
        gets the bytes of the file in pieces (`ingot.typing.Writable`).
    background : bool
        Return an `ingot.SaveFuture` and write in a thread, as `ingot.numpy.save_file` does.
    **options
        How the file is written: `ingot.typing.SaveOptions`.

    Returns
    -------
    None or ingot.SaveFuture
        The future of a background save. Its result is None.

    Raises
    ------
    OSError
        The file or its directory cannot be opened for writing. `FileExistsError` if the file exists and
        `overwrite` is False.
    StorageError
        Writing failed. An existing file is unchanged unless `atomic` is False.
    TypeError, SaveError, OptionError
        As for `serialize`, before anything is written to the disk.

    Examples
    --------
    >>> spec = {"dtype": "uint8", "shape": [2], "data": b"\x01\x02"}
    >>> ingot.serialize_file({"ids": spec}, "ids.safetensors")
    """
    how = Saving.of(serialize_file, locals())
    return write_file(filename, argument(serialize_file, "tensor_dict", tensor_dict, named), _spec, how)


def deserialize(data: Buffer) -> list[tuple[str, dict[str, Any]]]:
    r"""Take the tensors out of the bytes of a file.

    Parameters
    ----------
    data : bytes, bytearray, memoryview, mmap or any other C-contiguous buffer
        A whole file, in either format: its content decides.

    Returns
    -------
    list of (str, dict)
        In the order of the file, each with ``"dtype"`` (a code such as ``"F32"``), ``"shape"`` (a list) and
        ``"data"``, a bytearray that is a copy of the tensor's bytes.

    Raises
    ------
    TypeError
        `data` is not a buffer.
    HeaderError
        The bytes are not such a file.

    Examples
    --------
    >>> data = ingot.serialize({"ids": {"dtype": "uint8", "shape": [2], "data": b"\x01\x02"}})
    >>> ingot.deserialize(data)
    [('ids', {'dtype': 'U8', 'shape': [2], 'data': bytearray(b'\x01\x02')})]
    """
    checkpoint = argument(deserialize, "data", data, _native.Checkpoint.from_buffer)
    regions = checkpoint.tensors(None, _REGION)
    found = []
    for name in checkpoint.offset_names():
        entry = checkpoint.info(name)
        buffer, offset = regions[name]
        copy = bytearray(memoryview(buffer)[offset : offset + entry.nbytes])
        found.append((name, {"dtype": entry.dtype, "shape": list(entry.shape), "data": copy}))
    return found


# Any dtype is read as U8.
_REGION = _native.Wrap.buffer(
    lambda shape, dtype, buffer, offset: (buffer, offset),
    lambda code: code if code == "U8" else lambda region, shape: region,
)


def _spec(name: str, spec: Mapping[str, Any]) -> tuple[str, Sequence[int], Any]:
    try:
        dtype, shape, data = spec["dtype"], spec["shape"], spec["data"]
    except (KeyError, TypeError, IndexError):
        raise TypeError(f'tensor {_quoted(name)}: expected a dict with "dtype", "shape" and "data"') from None
    try:
        view = memoryview(data)
    except TypeError:
        found = type(data).__name__
        raise TypeError(f"tensor {_quoted(name)}: data must be bytes or a buffer, found {found}") from None
    if not view.c_contiguous:
        raise located(SaveError, "the buffer is not in C order", code="not-contiguous", tensor=name)
    return *stored(name, dtype, shape), view if view.ndim else view.cast("B")
