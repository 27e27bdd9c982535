"""Load and save PyTorch tensors."""

from __future__ import annotations

from operator import attrgetter

from . import _native, _open
from ._frameworks import lacks, missing
from ._hash import with_digest
from ._serialize import known_format, named, one_of, texts, unpacked, write_file
from .errors import OptionError, SaveError, _escaped, _quoted

try:
    import torch
except ModuleNotFoundError as error:
    raise missing("torch", error) from None

from ._torch_alias import restore, views_among, with_views
from ._torch_model import load_model, save_model
from ._torch_plain import not_plain
from ._torch_sharing import refuse_shared

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Literal

    from typing_extensions import Buffer

    from ._hash import Hasher
    from ._native import Archive
    from ._serialize import Checksums, Format, Path

    Shared = Literal["error", "copy", "alias"]
    Contiguous = Literal["error", "copy"]
    Loaded = Literal["alias", "drop"]

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model", "save_with_checksum"]

SHARED = ("error", "copy", "alias")
CONTIGUOUS = ("error", "copy")
LOADED = ("alias", "drop")

# Header code to the name in torch. An older torch lacks some, which then blocks those tensors only.
_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}

_layout = attrgetter("layout")
_from_dlpack = torch._C._from_dlpack
_to_dlpack = torch._C._to_dlpack


def load_file(
    filename: Path,
    device: Any = "cpu",
    *,
    backend: str = "auto",
    shared: Loaded = "alias",
    verify: bool = False,
    expected_sha256: str | None = None,
) -> dict[str, torch.Tensor]:
    """Load all tensors of a file.

    Parameters
    ----------
    filename : str, bytes or os.PathLike
        A `.safetensors` or a `.bt` file. The content decides which, not the name.
    device : str, int or torch.device
        Where the tensors shall be; whatever `torch.device` takes. ``"meta"`` gives shapes and dtypes and
        reads nothing.
    backend : {"auto", "mmap", "pread"}
        As for `ingot.safe_open`.
    shared : {"alias", "drop"}
        What to do with the names that ``save_file(..., shared="alias")`` did not write tensors for.
        ``"alias"`` gives them back, on the same memory as the tensor that was written; ``"drop"`` gives what
        the file itself holds. Other files have no such names.
    verify : bool
        Compare the tensors with the digests that the file keeps of them (`ingot.verify`), or where it keeps
        none with ModelSpec's, and give nothing when one differs. They are then copies in memory of their own,
        whatever the backend, compared on the way into it.
    expected_sha256 : str, optional
        The SHA-256 of the whole file, to be compared likewise.

    Returns
    -------
    dict of str to torch.Tensor
        In the order of the file. On the CPU with ``"mmap"`` they are views of the mapped file, copy on write:
        they may be written to, the file does not change, and nothing is read before it is touched. ``F4``
        comes packed, as ``float4_e2m1fn_x2``, with half the last dimension of the header.

    Raises
    ------
    OSError
        The file cannot be opened.
    HeaderError
        The file breaks a rule of its format; ``code`` says which.
    DtypeError
        This torch lacks a tensor's dtype. `ingot.safe_open` reads the other tensors.
    StorageError
        Reading failed.
    IntegrityError
        A tensor, or the file, is not what its digest says (``code`` is ``"digest-mismatch"``); the file keeps
        no digest of a tensor (``"no-digest"``), or a record that cannot be used (``"invalid-checksums"``).
    OptionError
        `device`, `backend` or `shared` is not one of the choices.
    SafetensorError
        The record of shared tensors in the metadata is broken (``code`` is ``"invalid-alias"``).
    """
    move = mover(device)
    return _loaded(_open.open_archive(filename, backend), move, shared, (verify, expected_sha256))


def load(data: Buffer, *, shared: Loaded = "alias") -> dict[str, torch.Tensor]:
    """Load all tensors from the bytes of a file.

    Parameters
    ----------
    data : bytes, bytearray, memoryview, mmap or any other C-contiguous buffer
        A whole file, in either format: its content decides.
    shared : {"alias", "drop"}
        As for `load_file`.

    Returns
    -------
    dict of str to torch.Tensor
        As `load_file` gives them, on the CPU, but with memory of their own: `data` is copied and may change
        afterwards.

    Raises
    ------
    TypeError
        `data` is not a buffer.
    HeaderError, DtypeError, OptionError, SafetensorError
        As `load_file` does.
    """
    return _loaded(_native.Archive.from_buffer(data), None, shared)


def _loaded(
    archive: Archive,
    move: Callable[[torch.Tensor], torch.Tensor] | None,
    shared: Loaded,
    proof: _open.Proof = (False, None),
) -> dict[str, torch.Tensor]:
    """All tensors of a file, and those that its record of shared tensors adds."""
    one_of("shared", shared, LOADED)
    found = _open.tensors(archive, None, wrap, move, proof)
    if shared == "alias":
        where = "" if archive.path is None else f"{_escaped(archive.path)}: "
        restore(found, archive.metadata(), where)
    return found


def save(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    format: Format = "safetensors",
    shared: Shared = "error",
    contiguous: Contiguous = "copy",
) -> bytes:
    """Give the bytes of a file that holds these tensors.

    Parameters
    ----------
    tensors : dict of str to torch.Tensor
        Of any layout and on any device. What is stored is the tensor's values in C order; those that are
        strided, conjugated, negated lazily or not on the CPU are copied for it.
    metadata : dict of str to str, optional
        Text to store beside the tensors.
    format : {"safetensors", "bintensors"}
        What to write.
    shared : {"error", "copy", "alias"}
        What to do with tensors that share memory. ``"error"`` refuses them, as upstream. ``"copy"`` writes
        each in full. ``"alias"`` writes the memory once and notes the other names in the metadata, under
        ``ingot.shared``, so that `load_file` gives all of them back on one memory; other readers see the
        tensor that was written only.
    contiguous : {"copy", "error"}
        What to do with tensors that do not lie in C order, such as transposed and ``channels_last`` ones:
        pack a copy, one tensor at a time, or refuse them, as upstream.

    Returns
    -------
    bytes
        The same for the same input (FORMAT.md, "Writing").

    Raises
    ------
    ValueError
        `tensors` is not a dict or a value is not a tensor (both as upstream).
    TypeError
        A name, a key or a value of the metadata is not a str.
    SharedMemoryError
        Two tensors share memory and `shared` is ``"error"``; or it is ``"alias"`` and neither of them holds
        all of it. Two of the names are in the message.
    SaveError
        A tensor has no plain values (sparse, quantised, meta, or a wrapper such as a DTensor), is not
        contiguous while `contiguous` is ``"error"``, the format lacks its dtype, a name is reserved, or no
        header can hold the tensors.
    OptionError
        `format`, `shared` or `contiguous` is not one of the choices.
    """
    own, texts_of_file = _stored(tensors, metadata, shared, contiguous)
    return _native.serialize(
        own,
        _payload(own, shared),
        texts_of_file,
        known_format(format),
        export=_export(own),
        shared=_native_shared(shared),
    )


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    format: Format | None = None,
    shared: Shared = "error",
    contiguous: Contiguous = "copy",
    durable: bool | None = None,
    atomic: bool = True,
    force: bool = False,
    checksums: Checksums = None,
) -> None:
    """Save tensors to a file.

    Parameters
    ----------
    tensors, metadata
        As for `save`. Tensors must not change while they are written.
    filename : str, bytes or os.PathLike
        Where to write. A file of that name is replaced, also when the tensors were loaded from it.
    format : {"safetensors", "bintensors"}, optional
        What to write. By default ``.bt`` at the end of the file name means bintensors, every other name
        safetensors.
    shared, contiguous
        As for `save`.
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
    ValueError, TypeError, SharedMemoryError, SaveError, OptionError
        As `save` does, and before the disk is touched.
    """
    own, texts_of_file = _stored(tensors, metadata, shared, contiguous)
    write_file(
        filename,
        own,
        _payload(own, shared),
        texts_of_file,
        format=format,
        export=_export(own),
        shared=_native_shared(shared),
        durable=durable,
        atomic=atomic,
        force=force,
        checksums=checksums,
    )


def save_with_checksum(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    hasher: Hasher = "sha1",
    *,
    format: Format = "safetensors",
) -> tuple[bytes, bytes]:
    """Give the bytes of a file that holds these tensors, and a digest of all of them.

    Parameters
    ----------
    tensors, metadata, format
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
    ValueError, TypeError, SharedMemoryError, SaveError, OptionError
        As `save` does.
    """
    return with_digest(save(tensors, metadata, format=format), hasher)


def payload(name: str, tensor: torch.Tensor) -> Any:
    """`tensor` as a capsule or a buffer of plain values in C order on the CPU. Copies only if it must."""
    code = _CODES.get(tensor.dtype)
    reason = not_plain(tensor)
    if reason is not None:
        raise SaveError(
            f"tensor {_quoted(name)}: {reason}", code="no-values", tensor=name, found=type(tensor).__name__
        )
    if code is None:
        raise SaveError(
            f"tensor {_quoted(name)}: the format has no dtype for {tensor.dtype}",
            code="unsupported-dtype",
            tensor=name,
            found=str(tensor.dtype),
        )
    shape = unpacked(name, tensor.shape) if code == "F4" else list(tensor.shape)
    plain = tensor.as_subclass(torch.Tensor).detach().resolve_conj().resolve_neg().cpu()
    if plain.is_contiguous() and _crosses_by_dlpack(plain.dtype):
        return _to_dlpack(plain)
    # torch has no copy for its rarer dtypes, but it has one for bytes.
    packed = (plain.view(torch.uint8) if plain.itemsize == 1 else plain).contiguous()
    if _crosses_by_dlpack(plain.dtype):
        return _to_dlpack(packed.view(plain.dtype))
    return code, shape, packed.reshape(-1).view(torch.uint8).numpy()


def _stored(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None,
    shared: Shared,
    contiguous: Contiguous,
) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """The tensors to write and the metadata to write with them."""
    one_of("shared", shared, SHARED)
    one_of("contiguous", contiguous, CONTIGUOUS)
    own, pairs = _tensors(tensors), texts(metadata)
    if contiguous == "error":
        refuse_strided(own)
    if shared == "alias":
        views = views_among(_plain_ones(own))
        own = {name: tensor for name, tensor in own.items() if name not in views}
        pairs = with_views(pairs, views)
    return own, pairs


def refuse_strided(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `SaveError` where a tensor does not lie in C order. It begins as upstream's error does."""
    values = tensors.values()
    # With `map`, so that no Python function runs per tensor where all is well.
    if (
        set(map(type, values)) <= _PLAIN_CLASSES
        and set(map(_layout, values)) <= {torch.strided}
        and all(map(torch.Tensor.is_contiguous, values))
    ):
        return
    for name, tensor in tensors.items():
        if not_plain(tensor) is None and not tensor.is_contiguous():
            raise SaveError(
                f"You are trying to save a non contiguous tensor: {_quoted(name)} of shape "
                f"{list(tensor.shape)} and strides {list(tensor.stride())}: pack it with `.contiguous()`, or "
                'save it by `ingot.torch` with contiguous="copy"',
                code="not-contiguous",
                tensor=name,
                found=tensor.stride(),
            )


def _plain_ones(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that have memory to speak of. The others are refused by `payload`, each with its reason."""
    return {name: tensor for name, tensor in tensors.items() if not_plain(tensor) is None}


def _native_shared(shared: Shared) -> str:
    # What aliases there are has been settled before the extension looks.
    return "copy" if shared == "copy" else "error"


def _tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A dict of our own, which holds tensors and nothing else."""
    own = named(tensors, ValueError, "torch.Tensor")
    for kind in set(map(type, own.values())):
        if not issubclass(kind, torch.Tensor):
            name = next(name for name, value in own.items() if type(value) is kind)
            raise ValueError(f"tensor {_quoted(name)}: expected a torch.Tensor, found {kind.__name__}")
    return own


_PLAIN_CLASSES = {torch.Tensor, torch.nn.Parameter}


def _export(tensors: dict[str, torch.Tensor]) -> Callable[[torch.Tensor], Any] | None:
    """The fast way out, where it gives the right bytes for every one of these tensors.

    It knows nothing of lazy conjugation and negation and of subclasses, and exports what lies beneath.
    Written with `map`, so that no Python function runs per tensor.
    """
    values = tensors.values()
    if (
        set(map(type, values)) <= _PLAIN_CLASSES
        and not any(map(torch.Tensor.is_neg, values))
        and not any(map(torch.Tensor.is_conj, values))
    ):
        return _to_dlpack
    return None


def _payload(tensors: dict[str, torch.Tensor], shared: Shared) -> Callable[[str, torch.Tensor], Any]:
    """`payload`, which before the first copy looks for memory that these tensors share.

    What is copied no longer shares anything, so the extension cannot see it any more.
    """
    looked = shared != "error"

    def packed(name: str, tensor: torch.Tensor) -> Any:
        nonlocal looked
        if not looked:
            refuse_shared(_plain_ones(tensors))
            looked = True
        return payload(name, tensor)

    return packed


def _crosses_by_dlpack(dtype: torch.dtype) -> bool:
    """Whether this torch exports and imports `dtype` by DLPack. It learnt the smaller floats one by one."""
    try:
        return _from_dlpack(_to_dlpack(torch.empty(1, dtype=dtype))).dtype is dtype
    except (RuntimeError, BufferError):
        return False


def _resolve(code: str) -> Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor] | None:
    """None where DLPack has that dtype, else how to make the tensor from its bytes."""
    dtype = DTYPES.get(code)
    if dtype is None:
        raise lacks(f"torch {torch.__version__}", code)
    if _crosses_by_dlpack(dtype):
        return None
    return lambda raw, shape: raw.view(dtype).reshape(shape)


wrap: _native.Wrap = _native.Wrap.dlpack(_from_dlpack, _resolve)


def mover(device: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function that takes a tensor to `device`; None for the CPU, where tensors are already."""
    # The usual answer first: torch takes longer to read a device than opening a small file does.
    if device is None or device == "cpu":
        return None
    try:
        target = torch.device(device)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise OptionError(
            f"device {device!r} is unknown to torch: {_escaped(first)}", code="unknown-device", found=device
        ) from error
    if target.type == "cpu":
        return None
    return lambda tensor: tensor.to(target)


def at(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """`tensor[index]`."""
    if tensor.dtype is DTYPES.get("F4"):
        # A packed tensor would be indexed by bytes, not by elements.
        raise IndexError("F4 can only be indexed by ints, slices, None, ... and one list: expected these")
    return tensor[index]
