"""Load and save NumPy arrays."""

from __future__ import annotations

from sys import modules

from . import _native, _open
from ._frameworks import missing
from ._hash import with_digest
from ._serialize import CODES, known_format, named, texts, write_file
from .errors import DtypeError, OptionError, SaveError, _quoted

try:
    import numpy
except ModuleNotFoundError as error:
    raise missing("numpy", error) from None

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from typing_extensions import Buffer

    from ._hash import Hasher
    from ._serialize import Checksums, Format, Path

    Array = numpy.ndarray[Any, numpy.dtype[Any]]

__all__ = ["load", "load_file", "save", "save_file", "save_with_checksum"]

# Header code to NumPy's dtype. Files are little-endian whatever the machine is.
DTYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "C64": "<c8",
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
}
# Header code to the name in ml_dtypes, which is imported when a file needs it.
ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn",
}
_PLAIN = {numpy.dtype(dtype): code for code, dtype in DTYPES.items()}


def load_file(
    filename: Path, *, backend: str = "auto", verify: bool = False, expected_sha256: str | None = None
) -> dict[str, Array]:
    """Load all arrays of a file.

    Parameters
    ----------
    filename : str, bytes or os.PathLike
        A `.safetensors` or a `.bt` file. The content decides which, not the name.
    backend : {"auto", "mmap", "pread"}
        As for `ingot.safe_open`.
    verify : bool
        Compare the tensors with the digests that the file keeps of them (`ingot.verify`), or where it keeps
        none with ModelSpec's, and give nothing when one differs. They are then copies in memory of their own,
        whatever the backend, compared on the way into it.
    expected_sha256 : str, optional
        The SHA-256 of the whole file, to be compared likewise.

    Returns
    -------
    dict of str to numpy.ndarray
        In the order of the file, with the shape of the header. With ``"mmap"`` they are views of the mapped
        file, copy on write: they may be written to, the file does not change, and nothing is read before it
        is touched. ``BF16``, ``F8_…`` and ``F4`` are the dtypes of ml_dtypes; ``F4`` is unpacked, one element
        to a byte.

    Raises
    ------
    OSError
        The file cannot be opened.
    HeaderError
        The file breaks a rule of its format; ``code`` says which.
    DtypeError
        NumPy lacks a tensor's dtype or has fewer dimensions, or ml_dtypes is not installed. `ingot.safe_open`
        reads the other tensors.
    StorageError
        Reading failed.
    IntegrityError
        A tensor, or the file, is not what its digest says (``code`` is ``"digest-mismatch"``); the file keeps
        no digest of a tensor (``"no-digest"``), or a record that cannot be used (``"invalid-checksums"``).
    OptionError
        `backend` is not one of the choices.
    """
    return _open.tensors(_open.open_archive(filename, backend), None, wrap, None, (verify, expected_sha256))


def load(data: Buffer) -> dict[str, Array]:
    """Load all arrays from the bytes of a file.

    Parameters
    ----------
    data : bytes, bytearray, memoryview, mmap or any other C-contiguous buffer
        A whole file, in either format: its content decides.

    Returns
    -------
    dict of str to numpy.ndarray
        As `load_file` gives them, but with memory of their own: `data` is copied and may change afterwards.

    Raises
    ------
    TypeError
        `data` is not a buffer.
    HeaderError, DtypeError
        As `load_file` does.
    """
    return _open.tensors(_native.Archive.from_buffer(data), None, wrap, None)


def save(
    tensor_dict: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    format: Format = "safetensors",
) -> bytes:
    """Give the bytes of a file that holds these arrays.

    Parameters
    ----------
    tensor_dict : dict of str to numpy.ndarray
        Arrays and NumPy scalars of any layout: Fortran order, strided, reversed, broadcast, big-endian. What
        is stored is always ``numpy.ascontiguousarray(array)``, little-endian; only arrays that are not so
        already are copied.
    metadata : dict of str to str, optional
        Text to store beside the tensors.
    format : {"safetensors", "bintensors"}
        What to write.

    Returns
    -------
    bytes
        The same for the same input (FORMAT.md, "Writing").

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
    """
    return _native.serialize(
        named(tensor_dict, value="array"), payload, texts(metadata), known_format(format)
    )


def save_file(
    tensor_dict: Mapping[str, Any],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    format: Format | None = None,
    durable: bool | None = None,
    atomic: bool = True,
    force: bool = False,
    checksums: Checksums = None,
) -> None:
    """Save arrays to a file.

    Parameters
    ----------
    tensor_dict, metadata
        As for `save`. Arrays must not change while they are written.
    filename : str, bytes or os.PathLike
        Where to write. A file of that name is replaced, also when the arrays were loaded from it.
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
    checksums : str or sequence of str, optional
        Digests to keep in the metadata, for `ingot.verify` and ``load_file(verify=True)``: of each tensor, by
        ``"blake3"``, ``"sha256"``, ``"xxh3"`` or ``"xxh3_128"``; of the data section as ModelSpec wants it,
        ``"modelspec"``; or one of the former and the latter. They are taken of what is in the file before it
        gets its name. Digests of tensors in `metadata` are left out: they were made for another file.

    Raises
    ------
    OSError
        The file or its directory cannot be opened for writing.
    StorageError
        Writing failed. What stood under that name before still stands there if `atomic`.
    TypeError, DtypeError, SaveError, OptionError
        As `save` does, and before the disk is touched.
    """
    write_file(
        filename,
        named(tensor_dict, value="array"),
        payload,
        metadata,
        format=format,
        durable=durable,
        atomic=atomic,
        force=force,
        checksums=checksums,
    )


def save_with_checksum(
    tensor_dict: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    hasher: Hasher = "sha1",
    *,
    format: Format = "safetensors",
) -> tuple[bytes, bytes]:
    """Give the bytes of a file that holds these arrays, and a digest of all of them.

    Parameters
    ----------
    tensor_dict, metadata, format
        As for `save`.
    hasher : str or callable
        A name that `hashlib.new` takes, or what is in `hashlib`: called with the bytes, it gives an object
        that has ``digest()``. SHA-1 by default, as in bintensors.

    Returns
    -------
    tuple of (bytes, bytes)
        The digest, which the file does not hold, and the file.

    Raises
    ------
    TypeError, DtypeError, SaveError, OptionError
        As `save` does.
    """
    return with_digest(save(tensor_dict, metadata, format=format), hasher)


def payload(name: str, array: Any) -> tuple[str, tuple[int, ...], Any]:
    """The code, the shape and the bytes of `array` in C order, little-endian. Copies only if it must."""
    if not isinstance(array, (numpy.ndarray, numpy.generic)):
        raise TypeError(f"tensor {_quoted(name)}: expected a numpy.ndarray, found {type(array).__name__}")
    # Not imported for this: whoever made a masked array has done so.
    masked = modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise TypeError(
            f"tensor {_quoted(name)}: a masked array would lose its mask: save `.filled()`, or data and mask"
        )
    # `asarray` and not `ascontiguousarray`, which makes a 0-dimensional array 1-dimensional.
    packed = numpy.asarray(array, order="C")
    code = _PLAIN.get(packed.dtype)
    if code is not None:
        return code, packed.shape, packed if packed.ndim else packed.reshape(1)
    # Those of ml_dtypes are of kind V, as records are; 2 stands for a dtype that is registered and no record.
    if packed.dtype.kind in "OSUMmTV" and packed.dtype.isbuiltin != 2:
        raise DtypeError(
            f"tensor {_quoted(name)}: an array of dtype {packed.dtype} cannot be stored: expected numbers",
            code="unsupported-dtype",
            tensor=name,
            found=str(packed.dtype),
        )
    little = packed.dtype.newbyteorder("<")
    if little != packed.dtype:
        return payload(name, packed.astype(little))
    return _ml_payload(name, packed)


def _ml_payload(name: str, array: Array) -> tuple[str, tuple[int, ...], Any]:
    """As `payload`, for C-contiguous arrays of the dtypes that NumPy itself does not have."""
    dtype = array.dtype
    # By name, because ml_dtypes need not be imported: whoever made the array has done so.
    code = CODES.get(dtype.name)
    if code is not None:
        # The buffer protocol has no letter for these dtypes, so the bytes go as bytes.
        return code, array.shape, array.reshape(-1).view(numpy.uint8)
    if dtype.name == ML_DTYPES["F4"]:
        return "F4", array.shape, _pack_nibbles(name, array)
    reason = ": how 6-bit values are packed is not settled" if dtype.name.startswith("float6") else ""
    raise SaveError(
        f"tensor {_quoted(name)}: the format has no dtype for {dtype}{reason}",
        code="unsupported-dtype",
        tensor=name,
        found=str(dtype),
    )


def _pack_nibbles(name: str, array: Array) -> Array:
    """Two elements to a byte, the first in the low half."""
    nibbles = array.reshape(-1).view(numpy.uint8) & 0xF
    if nibbles.size % 2:
        raise SaveError(
            f"tensor {_quoted(name)}: {nibbles.size} 4-bit elements end inside a byte: expected an even size",
            code="partial-byte",
            tensor=name,
            found=nibbles.size,
        )
    return nibbles[0::2] | (nibbles[1::2] << 4)


def _unpack_nibbles(dtype: numpy.dtype[Any]) -> Callable[[Array, tuple[int, ...]], Array]:
    def unpack(packed: Array, shape: tuple[int, ...]) -> Array:
        nibbles = numpy.empty(packed.size * 2, numpy.uint8)
        numpy.bitwise_and(packed, 0xF, out=nibbles[0::2])
        numpy.right_shift(packed, 4, out=nibbles[1::2])
        return nibbles.view(dtype).reshape(shape)

    return unpack


def _resolve(code: str) -> numpy.dtype[Any] | Callable[[Array, tuple[int, ...]], Array]:
    """What arrays of this code are made with."""
    plain = DTYPES.get(code)
    if plain is not None:
        return numpy.dtype(plain)
    name = ML_DTYPES.get(code)
    if name is None:
        raise DtypeError(
            f"numpy has no dtype for {code}, and how 6-bit values are packed is not settled",
            code="dtype-not-in-framework",
            found=code,
        )
    try:
        import ml_dtypes
    except ImportError:
        raise DtypeError(
            f"numpy reads {code} by ml_dtypes, which is not installed: pip install ingot[numpy]",
            code="dtype-not-in-framework",
            found=code,
        ) from None
    scalar = getattr(ml_dtypes, name, None)
    if scalar is None:
        raise DtypeError(
            f"numpy reads {code} by ml_dtypes, and {ml_dtypes.__version__} has no {name}: "
            "pip install --upgrade ml_dtypes",
            code="dtype-not-in-framework",
            found=code,
        )
    dtype = numpy.dtype(scalar)
    return _unpack_nibbles(dtype) if code == "F4" else dtype


wrap: _native.Wrap = _native.Wrap.buffer(numpy.ndarray, _resolve)


def mover(device: object) -> None:
    """NumPy's arrays stay where they are."""
    if device is None or str(device) in ("cpu", "cpu:0"):
        return
    raise OptionError(
        f"device {device!r} is unknown to numpy: expected 'cpu'",
        code="unknown-device",
        expected=("cpu",),
        found=device,
    )


def at(array: Array, index: Any) -> Array:
    """`array[index]`, where a single element stays a 0-dimensional array."""
    return numpy.asarray(array[index])
