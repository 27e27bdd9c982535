"""Tensors as plain buffers, for whoever has no framework or one that ingot does not know."""

from __future__ import annotations

from os import environ, fsdecode, getcwd
from os.path import join

from . import _native
from ._dtypes import CODES, F4_PACKED
from .errors import OptionError, SaveError, _quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from os import PathLike
    from typing import Any, Literal, TypedDict

    from typing_extensions import Buffer

    from ._native import Export
    from ._progress import Progress

    Format = Literal["safetensors", "bintensors"]
    Align = Literal[8, 64, 4096]
    Path = str | bytes | PathLike[str] | PathLike[bytes]
    Payload = Callable[[str, Any], Any]
    Checksum = Literal["blake3", "sha256", "xxh3", "xxh3_128", "modelspec"]
    Checksums = bool | Checksum | Sequence[Checksum] | None

    class SaveOptions(TypedDict, total=False):
        """What every framework's `save_file` takes, but for what decides what it returns."""

        format: Format | None
        durable: bool | None
        atomic: bool
        force: bool
        progress: Progress
        snapshot: bool
        reserve_header: int
        align: Align
        checksums: Checksums


FORMATS = ("safetensors", "bintensors")
ALIGNMENTS = (8, 64, 4096)
TENSOR_CHECKSUMS = ("blake3", "sha256", "xxh3", "xxh3_128")


def serialize(
    tensor_dict: Mapping[str, Mapping[str, Any]],
    metadata: Mapping[str, str] | None = None,
    *,
    format: Format = "safetensors",
) -> bytes:
    """Give the bytes of a file that holds these buffers.

    Parameters
    ----------
    tensor_dict : dict of str to dict
        Name to ``{"dtype": ..., "shape": ..., "data": ...}``. The dtype is a code of the format (``"F32"``)
        or a framework's name for it (``"float32"``); ``"float4_e2m1fn_x2"`` takes the packed shape, as torch
        gives it, and doubles its last dimension. The data is any C-contiguous buffer, little-endian, of
        exactly the size that dtype and shape ask for; it is read, not kept.
    metadata : dict of str to str, optional
        Text to store beside the tensors. What speaks of the tensors of another file is left out: digests,
        ``modelspec.hash_sha256``, names that share a tensor.
    format : {"safetensors", "bintensors"}
        What to write.

    Returns
    -------
    bytes
        The same for the same input: metadata is sorted by key, tensors by alignment and name (FORMAT.md,
        "Writing").

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
    """
    tensors = named(tensor_dict)
    return _native.serialize(tensors, _spec, texts(metadata), known_format(format))


def serialize_file(
    tensor_dict: Mapping[str, Mapping[str, Any]],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    format: Format | None = None,
    durable: bool | None = None,
    atomic: bool = True,
    force: bool = False,
    checksums: Checksums = None,
) -> None:
    """Write these buffers to a file.

    Parameters
    ----------
    tensor_dict, metadata
        As for `serialize`.
    filename : str, bytes or os.PathLike
        Where to write. A file of that name is replaced.
    format : {"safetensors", "bintensors"}, optional
        What to write. By default ``.bt`` at the end of the file name means bintensors, every other name
        safetensors.
    durable : bool, optional
        Flush the file and its directory to the disk before returning. True by default, unless the environment
        has ``INGOT_DURABLE=0``.
    atomic : bool
        Write beside the file and rename, so that readers see the old file or the new one, whole. False
        overwrites in place.
    force : bool
        Replace a read-only file too.
    checksums : bool, str or sequence of str, optional
        Digests to keep in the metadata, for `ingot.verify` and ``load_file(verify=True)``: of each
        tensor, by ``"blake3"`` (which True means too), ``"sha256"``, ``"xxh3"`` or ``"xxh3_128"``; of the
        data section as ModelSpec wants it, ``"modelspec"``; or one of the former and the latter. They are
        taken of the bytes on their way into the file. What `metadata` has of this is left out: it was made
        for another file.

    Raises
    ------
    OSError
        The file or its directory cannot be opened for writing.
    StorageError
        Writing failed. What stood under that name before still stands there if `atomic`.
    TypeError, SaveError, OptionError
        As for `serialize`, and before the disk is touched.
    """
    write_file(
        filename,
        named(tensor_dict),
        _spec,
        metadata,
        format=format,
        durable=durable,
        atomic=atomic,
        force=force,
        checksums=checksums,
    )


def write_file(
    filename: Path,
    tensors: dict[str, Any],
    payload: Payload,
    metadata: Mapping[str, str] | None,
    *,
    format: Format | None,
    export: Export | None = None,
    shared: str = "copy",
    views: str | None = None,
    durable: bool | None,
    atomic: bool,
    force: bool,
    progress: Progress = False,
    background: bool = False,
    snapshot: bool = True,
    reserve_header: int = 0,
    align: int = 8,
    checksums: Checksums = None,
) -> Future[None] | None:
    """Write a file. The end of every function that does, with tensors of whatever framework.

    Parameters
    ----------
    filename, metadata, format, durable, atomic, force, checksums
        As for `serialize_file`.
    tensors : dict of str to tensor
        As `named` gives it.
    payload, export, shared, views
        As for `_native.prepare`: how the tensors are handed over, and what of those that share memory.
    progress, background, snapshot, reserve_header, align
        As for `ingot.numpy.save_file`.
    """
    path = _native.local_path(filename)
    write = _writer(progress, path)
    file = _native.prepare(
        # Where a relative path leads now, and not when its turn comes.
        join(getcwd(), fsdecode(path)) if background else path,
        tensors,
        payload,
        texts(metadata),
        format_for(path, format),
        export=export,
        shared=shared,
        views=views,
        reserve=room(reserve_header),
        align=alignment(align),
        durable=is_durable(durable),
        atomic=atomic,
        force=force,
        checksums=known_checksums(checksums),
    )
    # What is left of the tensors is in `file`.
    del tensors, payload, export
    if not background:
        return write(file)
    if snapshot:
        file.snapshot()
    from ._background import SAVES

    return SAVES.put(lambda: write(file))


def _writer(progress: Progress, path: str | bytes) -> Callable[[_native.NewFile], None]:
    """What writes a file and tells `progress`. Imported when asked for, since few programs need it."""
    if progress is None or progress is False:
        return _native.NewFile.write
    from ._progress import checked, telling

    progress = checked(progress)

    def write(file: _native.NewFile) -> None:
        with telling(progress, "Saving", path) as tell:
            file.write(tell)

    return write


def deserialize(data: Buffer) -> list[tuple[str, dict[str, Any]]]:
    """Take the tensors out of the bytes of a file.

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
    """
    checkpoint = _native.Checkpoint.from_buffer(data)
    regions = checkpoint.tensors(None, _REGION)
    found = []
    for name in checkpoint.offset_names():
        entry = checkpoint.info(name)
        buffer, offset = regions[name]
        copy = bytearray(memoryview(buffer)[offset : offset + entry.nbytes])
        found.append((name, {"dtype": entry.dtype, "shape": list(entry.shape), "data": copy}))
    return found


def _region(shape: Sequence[int], dtype: str, buffer: Buffer, offset: int) -> tuple[Buffer, int]:
    return buffer, offset


def _as_bytes(code: str) -> str | Callable[[Any, Any], Any]:
    # Any dtype is fine as U8, of which `_region` then gives the place.
    return code if code == "U8" else lambda region, shape: region


_REGION = _native.Wrap.buffer(_region, _as_bytes)


def _spec(name: str, spec: Mapping[str, Any]) -> tuple[str, Sequence[int], Any]:
    try:
        dtype, shape, data = spec["dtype"], spec["shape"], spec["data"]
    except (KeyError, TypeError, IndexError):
        raise TypeError(f'tensor {_quoted(name)}: expected a dict with "dtype", "shape" and "data"') from None
    if dtype == F4_PACKED:
        dtype, shape = "F4", unpacked(name, shape)
    try:
        view = memoryview(data)
    except TypeError:
        raise TypeError(
            f"tensor {_quoted(name)}: data must be bytes or another buffer, found {type(data).__name__}"
        ) from None
    if not view.c_contiguous:
        raise SaveError(
            f"tensor {_quoted(name)}: the buffer is not in C order", code="not-contiguous", tensor=name
        )
    return CODES.get(dtype, dtype), shape, view if view.ndim else view.cast("B")


def unpacked(name: str, shape: Sequence[int]) -> list[int]:
    """The shape in elements of a tensor of F4 whose `shape` counts bytes, each with two of them."""
    if not shape:
        raise SaveError(
            f"tensor {_quoted(name)}: two elements to a byte need a dimension, found a scalar",
            code="partial-byte",
            tensor=name,
        )
    return [*shape[:-1], shape[-1] * 2]


def named(
    tensors: Mapping[str, Any], what: type[Exception] = TypeError, value: str = "dict"
) -> dict[str, Any]:
    """`tensors` as a dict of our own, so that nobody changes it while it is written, with str for its names.

    `what` is raised where it is no mapping: the class that upstream raises for that framework.
    """
    if not hasattr(tensors, "keys"):
        raise what(f"expected a dict of str to {value}, found {type(tensors).__name__}")
    own = dict(tensors)
    if set(map(type, own)) - {str}:
        for name in own:
            if not isinstance(name, str):
                raise TypeError(
                    f"tensor names must be str, found {_quoted(name)} of type {type(name).__name__}"
                )
    return own


def texts(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """`metadata` as a dict of our own, with nothing but str in it that a file can hold."""
    if metadata is None:
        return None
    if not hasattr(metadata, "keys"):
        raise TypeError(f"metadata must be a dict of str to str, found {type(metadata).__name__}")
    own = dict(metadata)
    for key, value in own.items():
        if not isinstance(key, str):
            raise TypeError(f"metadata keys must be str, found {_quoted(key)} of type {type(key).__name__}")
        if not isinstance(value, str):
            raise TypeError(
                f"metadata values must be str, found {type(value).__name__} under key {_quoted(key)}"
            )
        # A lone surrogate, which UTF-8 cannot spell.
        for part in (key, value):
            try:
                part.encode()
            except UnicodeEncodeError as fault:
                raise SaveError(
                    f"metadata key {_quoted(key)}: {part[fault.start]!a} at {fault.start} of the "
                    f"{'key' if part is key else 'value'} is not valid Unicode",
                    code="invalid-unicode",
                ) from None
    return own


def one_of(option: str, value: str, choices: tuple[str, ...]) -> str:
    """`value`, which must be one of the choices for `option`."""
    if value not in choices:
        raise OptionError(
            f"{option} {value!r} is unknown: expected one of {', '.join(choices)}",
            code=f"unknown-{option}",
            expected=choices,
            found=value,
        )
    return value


def known_checksums(checksums: Checksums) -> list[str]:
    """The names in `checksums`: one of the tensors at most, and ModelSpec's."""
    if checksums is True:
        return ["blake3"]
    given = [checksums] if isinstance(checksums, str) else list(checksums or ())
    names = list(dict.fromkeys(one_of("checksums", name, (*TENSOR_CHECKSUMS, "modelspec")) for name in given))
    of_tensors = [name for name in names if name != "modelspec"]
    if len(of_tensors) > 1:
        raise OptionError(
            f"checksums {' and '.join(of_tensors)}: a file keeps one digest of each tensor",
            code="unknown-checksums",
            expected=TENSOR_CHECKSUMS,
            found=tuple(given),
        )
    return names


def alignment(align: int) -> int:
    """`align`, which must be one of the choices."""
    if align not in ALIGNMENTS:
        raise OptionError(
            f"align {align!r} is unknown: expected one of {', '.join(map(str, ALIGNMENTS))}",
            code="unknown-align",
            expected=ALIGNMENTS,
            found=align,
        )
    return align


def room(nbytes: int) -> int:
    """`nbytes` to reserve in a header, which must be a number of bytes."""
    if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
        raise TypeError(f"bytes to reserve must be an int, found {type(nbytes).__name__}")
    if not 0 <= nbytes < 2**63:
        raise OptionError(
            f"cannot reserve {nbytes} bytes: expected 0 or more, and less than 2^63",
            code="invalid-reserve",
            found=nbytes,
        )
    return nbytes


def known_format(format: str) -> str:
    """`format`, which must be one of the two."""
    return one_of("format", format, FORMATS)


def format_for(path: str | bytes, format: str | None) -> str:
    """The format to write under that name."""
    if format is not None:
        return known_format(format)
    return "bintensors" if fsdecode(path).endswith(".bt") else "safetensors"


def is_durable(durable: bool | None) -> bool:
    """Whether to flush: what the caller says, else what the environment says, else yes."""
    return environ.get("INGOT_DURABLE") != "0" if durable is None else durable
