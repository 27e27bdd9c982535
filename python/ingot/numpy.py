"""Load and save NumPy arrays.

>>> import numpy
>>> from ingot.numpy import load_file, save_file
>>> save_file({"weight": numpy.ones((4, 3))}, "weights.safetensors")
>>> load_file("weights.safetensors")["weight"].shape
(4, 3)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from sys import modules
from typing import TYPE_CHECKING, Any, Unpack, overload

import ingot
from ingot._base.text import located

from . import _native
from ._adapters.face import Whole
from ._base.dtypes import ANOTHER_COMPLEX, CODES, F4_LOOSE, NAMES, TYPE_STRINGS
from ._base.frameworks import installing, missing
from ._base.options import Loading, Saving, checked, takes
from ._base.text import _quoted
from ._native import Checkpoint
from ._read import load as _load
from ._read import moves
from ._read.door import Reads
from ._read.load import Memory
from ._read.moves import misfit
from ._read.select import Wanted
from ._state.face import States
from ._write.save import Box, boxes
from .errors import DtypeError, OptionError, SaveError
from .typing import Buffer, Format, LoadOptions, NoOptions, Path, SaveOptions, Source, Writable

try:
    import numpy
except ModuleNotFoundError as error:
    raise missing("numpy", error) from None

if TYPE_CHECKING:
    from ._base.options import AtOnce, InBackground, WithMetadata, WithoutMetadata


__all__ = ["load", "load_file", "load_state", "save", "save_file", "save_state"]

# Header code to NumPy's format of the dtype.
DTYPES = TYPE_STRINGS
Array = numpy.ndarray[Any, numpy.dtype[Any]]

# Header code to the name in ml_dtypes, which has the others and is imported when a file needs it.
ML_DTYPES = {code: name for code, name in NAMES.items() if code not in DTYPES} | {"F4": F4_LOOSE}
_PLAIN = {numpy.dtype(dtype): code for code, dtype in DTYPES.items()}


@overload
def load_file(
    filename: Source, *, out: Mapping[str, Array | list[Array]] | None = None, **options: Unpack[WithMetadata]
) -> tuple[dict[str, Array], dict[str, str] | None]: ...


@overload
def load_file(
    filename: Source,
    *,
    out: Mapping[str, Array | list[Array]] | None = None,
    **options: Unpack[WithoutMetadata],
) -> dict[str, Array]: ...


@takes(LoadOptions)
def load_file(
    filename: Source,
    *,
    out: Mapping[str, Array | list[Array]] | None = None,
    return_metadata: bool = False,
    **options: Unpack[LoadOptions],
) -> dict[str, Array] | tuple[dict[str, Array], dict[str, str] | None]:
    """Load the arrays of a file, or some of them, or parts of them.

    Parameters
    ----------
    filename : str, bytes, os.PathLike, or an object to read from
        A `.safetensors` or a `.bt` file, the index of a sharded checkpoint, a directory with one of these,
        a URL, or an object that holds a file, such as an open file, a buffer or `ingot.Ranges`: as for
        `ingot.safe_open`.
    out : dict of str to numpy.ndarray, or to a list of these, optional
        Read these arrays into existing memory, without a second copy, and return the same objects. They may
        have any strides. They need the shape and the dtype of the values that are read, and must not overlap.
        To read several parts of one array, pass a list of destinations here and a list of as many indices in
        `slices`.
    return_metadata : bool
        Return the metadata too, read from the same version of the file.
    **options
        Which arrays are loaded and how: `ingot.typing.LoadOptions`.

    Returns
    -------
    dict of str to numpy.ndarray
        In the order of `keys`, else of the file, with the shape of the header. With ``"mmap"`` they are views
        of the mapped file, copy on write: writes do not change the file, and data is read when it is first
        touched. Slices that are not contiguous in the file, and converted arrays, are copies. ``BF16``,
        ``F8_…`` and ``F4`` are the dtypes of ml_dtypes; ``F4`` is unpacked, one element to a byte. With
        `return_metadata`, a tuple of the dict and the metadata of the file.

    Raises
    ------
    OSError
        The file cannot be opened.
    HeaderError
        The file breaks a rule of its format; ``code`` says which.
    CheckpointError
        The index breaks a rule, or the shards differ from the index.
    TensorNotFoundError
        A name or pattern of `keys`, `drop`, `slices` or `out` matches nothing. The message has the nearest
        name.
    SliceError
        An index does not fit its array.
    DtypeError
        NumPy lacks a tensor's dtype or has fewer dimensions, ml_dtypes is not installed, or a dtype cannot be
        converted. `ingot.safe_open` reads the other tensors.
    DestinationError
        An array of `out` has another shape or dtype, is read-only, or overlaps another or itself. Nothing has
        been read.
    StorageError
        Reading failed. The arrays of `out` may be partly filled.
    IntegrityError
        A tensor, or the file, differs from its digest (``code`` is ``"digest-mismatch"``); the file
        keeps no digest of a tensor (``"no-digest"``), or a record that cannot be used
        (``"invalid-checksums"``).
    OptionError
        `backend`, `dtype` or `threads` is not one of the choices, or the other options leave out an array of
        `slices` or `out`.

    Examples
    --------
    >>> tensors = ingot.numpy.load_file("model.safetensors", keys="wte")
    >>> tensors["wte"].shape
    (8, 4)
    >>> rows = ingot.numpy.load_file("model.safetensors", keys="wte", slices={"wte": slice(0, 2)})
    >>> rows["wte"].shape
    (2, 4)
    """
    if out is not None or return_metadata is not False:
        checked(load_file, {"out": out, "return_metadata": return_metadata})
    return _whole.loaded(filename, None, Loading.of(load_file, options, filename), return_metadata, out)


def load(data: Buffer) -> dict[str, Array]:
    """Load all arrays from the bytes of a file.

    Parameters
    ----------
    data : bytes, bytearray, memoryview, mmap or any other C-contiguous buffer
        A whole file, in either format: its content decides.

    Returns
    -------
    dict of str to numpy.ndarray
        As for `load_file`, with memory of their own: `data` is copied and may change afterwards.

    Raises
    ------
    TypeError
        `data` is not a buffer.
    HeaderError, DtypeError
        As `load_file` does.

    Examples
    --------
    >>> data = ingot.numpy.save({"bias": numpy.arange(3)})
    >>> ingot.numpy.load(data)
    {'bias': array([0, 1, 2])}
    """
    return _whole.load(data)


@takes()
def save(
    tensor_dict: Mapping[str, Array | numpy.generic],
    metadata: Mapping[str, str] | None = None,
    *,
    format: Format = "safetensors",
    **options: Unpack[NoOptions],
) -> bytes:
    """Return the bytes of a file that holds these arrays.

    Parameters
    ----------
    tensor_dict : dict of str to numpy.ndarray
        Arrays and NumPy scalars with any layout: Fortran order, strided, reversed, broadcast, big-endian. The
        stored values are those of ``numpy.ascontiguousarray(array)``, little-endian; other arrays are packed
        a few MiB at a time.
    metadata : dict of str to str, optional
        Text to store beside the tensors. Keys that describe the tensors of another file are left out:
        ``ingot.checksums``, ``modelspec.hash_sha256``, ``ingot.shared``, and signatures (``c2pa:manifest``,
        ``c2pa:manifest.uri``, ``__signature__``, ``sigstore``, ``vouch_credential``).
    format : {"safetensors", "bintensors"}
        The file format.

    Returns
    -------
    bytes
        The same bytes for the same input (FORMAT.md, "Writing").

    Raises
    ------
    TypeError
        A value is not an array, or a name, a key or a value of the metadata is not a str.
    DtypeError
        An array of objects, records, dates or strings. It is a `TypeError` too.
    SaveError
        The format lacks an array's dtype, a name is reserved, or no header can hold the tensors.
    OptionError
        `format` is not one of the two.

    Examples
    --------
    >>> data = ingot.numpy.save({"bias": numpy.arange(3)}, {"title": "Tiny"})
    >>> ingot.numpy.load(data)
    {'bias': array([0, 1, 2])}
    """
    return _whole.saved_bytes(save, tensor_dict, {"metadata": metadata, "format": format, **options})


@overload
def save_file(
    tensor_dict: Mapping[str, Array | numpy.generic],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[InBackground],
) -> ingot.SaveFuture: ...


@overload
def save_file(
    tensor_dict: Mapping[str, Array | numpy.generic],
    filename: Path | Writable,
    metadata: Mapping[str, str] | None = None,
    **options: Unpack[AtOnce],
) -> None: ...


@takes(SaveOptions, overwrite=True)
def save_file(
    tensor_dict: Mapping[str, Array | numpy.generic],
    filename: Path | Writable,
    metadata: Mapping[str, str] | None = None,
    *,
    background: bool = False,
    **options: Unpack[SaveOptions],
) -> ingot.SaveFuture | None:
    """Save arrays to a file.

    Parameters
    ----------
    tensor_dict, metadata
        As for `save`. Arrays must not change while they are written.
    filename : str, bytes, os.PathLike, or an object with a ``write``
        Where to write. An existing file is replaced, even if the arrays were loaded from it. An object, such
        as an open binary file or `io.BytesIO`, gets the bytes of the file in pieces
        (`ingot.typing.Writable`).
    background : bool
        Write in a thread and return an `ingot.SaveFuture` early. Errors while writing are raised by its
        ``result()``; once its ``staged`` is done, the arrays may change. Background saves run in the order of
        the calls. The interpreter waits for pending saves at exit. If nothing asks for the result of a failed
        save, the next save warns (`RuntimeWarning`), and the error is printed on standard error at exit.
    **options
        How the file is written: `ingot.typing.SaveOptions`.

    Returns
    -------
    None or ingot.SaveFuture
        The future of a save in the background, whose result is None.

    Raises
    ------
    OSError
        The file or its directory cannot be opened for writing. `FileExistsError` if the file exists and
        `overwrite` is False.
    StorageError
        Writing failed. An existing file is unchanged unless `atomic` is False.
    TypeError, DtypeError, SaveError, OptionError
        As `save` does, before anything is written to the disk.

    Examples
    --------
    >>> ingot.numpy.save_file({"bias": numpy.arange(3)}, "bias.safetensors", checksums=True)
    >>> saving = ingot.numpy.save_file({"bias": numpy.arange(3)}, "bias.safetensors", background=True)
    >>> saving.result()
    """
    return _whole.saved(save_file, tensor_dict, filename, Saving.of(save_file, locals()))


def payload(name: str, array: Any) -> tuple[str, tuple[int, ...], Any]:
    """Return the code, the shape, and the array or a function that returns its bytes. Copies nothing."""
    if not isinstance(array, (numpy.ndarray, numpy.generic)):
        raise TypeError(f"tensor {_quoted(name)}: expected a numpy.ndarray, found {type(array).__name__}")
    # `numpy.ma` is not imported for this check: a masked array exists only after an import.
    masked = modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):
        way_out = "save `.filled()`, or data and mask"
        raise TypeError(f"tensor {_quoted(name)}: a masked array would lose its mask: {way_out}")
    plain = numpy.asarray(array)
    code = _PLAIN.get(plain.dtype)
    if code is not None:
        return code, plain.shape, plain if plain.ndim else plain.reshape(1)
    # Dtypes of ml_dtypes have kind V, like records; 2 means a registered dtype that is not a record.
    if plain.dtype.kind in "OSUMmTV" and plain.dtype.isbuiltin != 2:
        reason = f"an array of dtype {plain.dtype} cannot be stored: expected numbers"
        raise located(DtypeError, reason, code="unsupported-dtype", tensor=name, found=str(plain.dtype))
    little = plain.dtype.newbyteorder("<")
    if little in _PLAIN:
        return _PLAIN[little], plain.shape, _fetcher(plain, little)
    return _ml_payload(name, plain)


def _ml_payload(name: str, array: Array) -> tuple[str, tuple[int, ...], Any]:
    """Do as `payload` does, for the dtypes that NumPy itself lacks."""
    dtype = array.dtype
    # Compared by name, because ml_dtypes need not be imported: such an array exists only after an import.
    code = CODES.get(dtype.name)
    if code is not None:
        # The buffer protocol has no letter for these dtypes: they go as integers of their size and order.
        integer = numpy.dtype(f"u{dtype.itemsize}")
        integers = numpy.atleast_1d(array).view(integer if dtype.isnative else integer.newbyteorder())
        little = integer.newbyteorder("<")
        return code, array.shape, integers if integers.dtype == little else _fetcher(integers, little)
    if dtype.name == F4_LOOSE:
        return "F4", array.shape, _nibbles_fetcher(name, array)
    reason = ANOTHER_COMPLEX if dtype.kind == "c" else ""
    if dtype.name.startswith("float6"):
        reason = ": how 6-bit values are packed is not settled"
    reason = f"the format has no dtype for {dtype}{reason}"
    raise located(SaveError, reason, code="unsupported-dtype", tensor=name, found=str(dtype))


def _fetcher(array: Array, little: numpy.dtype[Any]) -> Callable[[int, int], Array]:
    """Return a function that returns bytes of `array`, converted to the little-endian dtype."""
    size = little.itemsize

    def fetch(begin: int, end: int) -> Array:
        first = begin // size
        part = _elements(array, first, -(-end // size)).astype(little)
        return part.view(numpy.uint8)[begin - first * size : end - first * size]

    return fetch


def _nibbles_fetcher(name: str, array: Array) -> Callable[[int, int], Array]:
    """Return a function that returns bytes with two elements each, the first in the low half."""
    if array.size % 2:
        reason = f"{array.size} 4-bit elements end inside a byte: expected an even size"
        raise located(SaveError, reason, code="partial-byte", tensor=name, found=array.size)

    def fetch(begin: int, end: int) -> Array:
        nibbles = _elements(array, 2 * begin, 2 * end).view(numpy.uint8) & 0xF
        return nibbles[0::2] | (nibbles[1::2] << 4)

    return fetch


def _elements(array: Array, begin: int, end: int) -> Array:
    """Return the elements from `begin` to `end` in C order, flat. At most their rows are copied."""
    if array.flags.c_contiguous:
        return array.reshape(-1)[begin:end]
    return gathered(array.shape, begin, end, lambda box: array[box.slices])


def gathered(shape: tuple[int, ...], begin: int, end: int, part: Callable[[Box], Array]) -> Array:
    """Return the elements of an array that `part` returns a box at a time."""
    parts = [part(box).reshape(-1)[box.within] for box in boxes(shape, begin, end)]
    return parts[0] if len(parts) == 1 else numpy.concatenate(parts)


def payload_in_parts(
    name: str, dtype: Any, shape: tuple[int, ...], part: Callable[[Box], Array]
) -> tuple[str, tuple[int, ...], Callable[[int, int], Array]]:
    """Return the payload of an array of `dtype` and `shape` that `part` returns, a box at a time."""
    # An array of that dtype and shape, without memory, raises here if it cannot be stored.
    code, shape, _ = payload(name, numpy.broadcast_to(numpy.zeros((), dtype), shape))
    size = numpy.dtype(dtype).itemsize

    def fetch(begin: int, end: int) -> Array:
        # Two elements of F4 make a byte.
        first, last = (2 * begin, 2 * end) if code == "F4" else (begin // size, -(-end // size))
        _, _, data = payload(name, gathered(shape, first, last, part))
        if callable(data):
            return data(0, end - begin)  # type: ignore[no-any-return]
        skipped = begin - first * size
        return numpy.ascontiguousarray(data).view(numpy.uint8)[skipped : skipped + end - begin]

    return code, shape, fetch


def _unpack_nibbles(dtype: numpy.dtype[Any]) -> Callable[[Array, tuple[int, ...]], Array]:
    def unpack(packed: Array, shape: tuple[int, ...]) -> Array:
        nibbles = numpy.empty(packed.size * 2, numpy.uint8)
        numpy.bitwise_and(packed, 0xF, out=nibbles[0::2])
        numpy.right_shift(packed, 4, out=nibbles[1::2])
        return nibbles.view(dtype).reshape(shape)

    return unpack


def _resolve(code: str) -> numpy.dtype[Any] | Callable[[Array, tuple[int, ...]], Array]:
    """Return the dtype for a code, or a function that makes the array from bytes."""
    plain = DTYPES.get(code)
    if plain is not None:
        return numpy.dtype(plain)
    name = ML_DTYPES.get(code)
    if name is None:
        message = f"numpy has no dtype for {code}, and how 6-bit values are packed is not settled"
        raise DtypeError(message, code="dtype-not-in-framework", found=code)
    try:
        import ml_dtypes
    except ImportError:
        message = f"numpy reads {code} by ml_dtypes, which is not installed: {installing('numpy')}"
        raise DtypeError(message, code="dtype-not-in-framework", found=code) from None
    scalar = getattr(ml_dtypes, name, None)
    if scalar is None:
        version = f"ml_dtypes {ml_dtypes.__version__}"
        message = f"numpy with {version} has no dtype for {code}: pip install --upgrade ml_dtypes"
        raise DtypeError(message, code="dtype-not-in-framework", found=code)
    dtype = numpy.dtype(scalar)
    return _unpack_nibbles(dtype) if code == "F4" else dtype


wrap: _native.Wrap = _native.Wrap.buffer(numpy.ndarray, _resolve, strided=True)


def _fill(checkpoint: Checkpoint, wanted: Wanted, arrays: Mapping[str, Any], how: Reads) -> None:
    """Read the wanted parts into `arrays`."""
    _load.fill(checkpoint, wanted, _native.Destinations(arrays, _memory, _export), how)


def _memory(name: str, array: Any) -> Memory:
    """Return the code of the array's dtype, and its memory as a buffer.

    Called for arrays that `_export` cannot export.
    """
    if not isinstance(array, numpy.ndarray):
        raise moves.no_destination(name, "numpy.ndarray", array)
    code, lettered = _stored(array.dtype)
    if code is None:
        reason = f"no file has tensors of the destination's dtype, {array.dtype!r}"
        raise misfit(name, reason, "destination-dtype")
    shown = array if lettered is None else array.view(lettered)
    # The buffer protocol has no shape without dimensions.
    return code, shown if array.ndim else shown.reshape(1), not array.ndim


@lru_cache(maxsize=64)
def _stored(dtype: numpy.dtype[Any]) -> tuple[str | None, numpy.dtype[Any] | None]:
    """Return the code of a dtype, and the dtype to export as if the buffer protocol lacks it.

    Cached, since there may be many arrays of few dtypes.
    """
    code = _PLAIN.get(dtype) or (CODES.get(dtype.name) if dtype.isnative else None)
    # The buffer protocol has no letter for the dtypes of ml_dtypes.
    return code, numpy.dtype(f"V{dtype.itemsize}") if dtype.kind == "V" else None


def _shown(dtype: numpy.dtype[Any]) -> str | None:
    """Return the code of a dtype that the buffer protocol exports unchanged, or None."""
    code, lettered = _stored(dtype)
    return code if lettered is None else None


_export = _native.Export.buffer([numpy.ndarray], _shown)


def mover(device: object) -> None:
    """Check `device`, and return None: NumPy's arrays stay on the CPU."""
    if device is None or str(device) in ("cpu", "cpu:0"):
        return
    message = f"device {device!r} is unknown to numpy: expected 'cpu'"
    raise OptionError(message, code="unknown-device", expected=("cpu",), found=device)


def at(array: Array, index: Any) -> Array:
    """Return ``array[index]``, with a 0-dimensional array for a single element."""
    return numpy.asarray(array[index])


_whole: Whole[Array] = Whole(wrap, mover, at, payload, value="array", export=_export, into=_fill)
states = States("numpy", _whole)
load_state = states.load_state
save_state = states.save_state


def __dir__() -> list[str]:
    return __all__
