"""Load and save files of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch

import ingot
from ingot import _native
from ingot._base.checks import known_format, one_of
from ingot._base.options import Loading, Saving, argument, checked, takes
from ingot._native import Checkpoint
from ingot._read import door, moves, select
from ingot._read import load as _load
from ingot._read.door import PLAIN, Reads
from ingot._read.moves import Moving
from ingot._read.select import Selected
from ingot._write.save import Views, recorded, rendered, write_file
from ingot.typing import Buffer, Device, Format, LoadOptions, NoOptions, Path, SaveOptions, Source, Writable

from ._devices import mover, payload, widening
from ._filling import refuse_captured
from ._into import fill_tensors
from ._shared import refuse_shared, restore, views_among
from ._tensors import _export, _plain_ones, _tensors, at, copied, is_here, refuse_strided, wrap

_NO_RECORDS: Mapping[str, str] = {}
Shared = Literal["error", "copy", "alias"]
Contiguous = Literal["error", "copy"]
Loaded = Literal["alias", "drop"]

if TYPE_CHECKING:
    from ingot._base.options import WithMetadata, WithoutMetadata

    class TorchSaveOptions(SaveOptions, total=False):
        shared: Shared
        contiguous: Contiguous


# The checks of the option `shared`, of functions that save and of functions that load.
shared_as = partial(one_of, "shared", choices=("error", "copy", "alias"))
_loaded_as = partial(one_of, "shared", choices=("alias", "drop"))


@overload
def load_file(
    filename: Source,
    device: Device = "cpu",
    *,
    shared: Loaded = "alias",
    out: Mapping[str, torch.Tensor | list[torch.Tensor]] | None = None,
    **options: Unpack[WithMetadata],
) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]: ...


@overload
def load_file(
    filename: Source,
    device: Device = "cpu",
    *,
    shared: Loaded = "alias",
    out: Mapping[str, torch.Tensor | list[torch.Tensor]] | None = None,
    **options: Unpack[WithoutMetadata],
) -> dict[str, torch.Tensor]: ...


@takes(LoadOptions)
def load_file(
    filename: Source,
    device: Device = "cpu",
    *,
    shared: Loaded = "alias",
    out: Mapping[str, torch.Tensor | list[torch.Tensor]] | None = None,
    return_metadata: bool = False,
    **options: Unpack[LoadOptions],
) -> dict[str, torch.Tensor] | tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """Load the tensors of a file, or some of them, or parts of them.

    Parameters
    ----------
    filename : str, bytes, os.PathLike, or an object to read from
        A `.safetensors` or a `.bt` file, the index of a sharded checkpoint, a directory with one of these,
        a URL, or an object that holds a file, such as an open file, a buffer or `ingot.Ranges`: as for
        `ingot.safe_open`.
    device : str, int, torch.device, dict or callable
        Where the tensors are placed: any argument of `torch.device`. ``"meta"`` makes empty tensors and reads
        nothing. Tensors on a GPU (``"cuda"``) and other accelerators are read through pinned memory, into
        memory of torch's own allocator; work that is queued on the current stream after the call sees their
        values. A dict has patterns of names, each with a device, such as
        ``{"layers.0.*": "cuda:0", "*": "cpu"}``. ``*`` is any text and ``?`` one character. The first that
        matches decides, and each has to match a tensor. A callable is called with the `TensorInfo` of each
        tensor and returns its device. Aliases are placed on the same device as the stored tensor.
        Tensors of `out` stay where they are. torch's default device has no effect. Inside a
        ``FakeTensorMode`` the tensors are fake tensors of that mode, on this device.
    shared : {"alias", "drop"}
        What to do with aliases, which ``save_file(..., shared="alias")`` records. ``"alias"`` restores them,
        on the memory of the stored tensor. ``"drop"`` returns only the tensors in the file; aliases that
        `keys` selects get memory of their own. Other files have no aliases.
    out : dict of str to torch.Tensor, or to a list of these, optional
        Existing tensors to read into, without a second copy; the result has the same objects. They may have
        any strides and be on any device. They need the shape and the dtype of the values that are read, and
        must not overlap. To read several parts of one tensor, pass a list of destinations here and a list of
        as many indices in `slices`.
    return_metadata : bool
        Return the metadata too, read from the same version of the file.
    **options
        Which tensors are loaded and how: `ingot.typing.LoadOptions`.

    Returns
    -------
    dict of str to torch.Tensor
        In the order of `keys`, else of the file. On the CPU with ``"mmap"`` they are views of the mapped
        file, copy on write: writes do not change the file, and data is read when it is first touched. Slices
        that are not contiguous in the file, and converted tensors, are copies. ``F4`` is packed: its dtype is
        ``float4_e2m1fn_x2``, and the last dimension is half of the header's. With `return_metadata`, a tuple
        of the dict and the metadata of the file.

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
        An index does not fit its tensor.
    DtypeError
        This torch lacks a tensor's dtype, or it cannot be converted. `ingot.safe_open` reads the other
        tensors.
    DestinationError
        A tensor of `out` has another shape or dtype, has no memory, overlaps another or itself, or may not be
        filled because of autograd, as for `load_into`. Nothing has been read.
    StorageError
        Reading failed. The tensors of `out` may be partly filled.
    IntegrityError
        A tensor, or the file, differs from its digest (``code`` is ``"digest-mismatch"``); the file
        keeps no digest of a tensor (``"no-digest"``), or a record that cannot be used
        (``"invalid-checksums"``).
    DeviceError
        The device cannot be used: no driver, no such device, a child after a fork, a capture into a graph, a
        failed call of the driver. Out of memory is `torch.OutOfMemoryError`.
    OptionError
        `device`, `backend`, `shared`, `dtype` or `threads` is not one of the choices, no pattern of `device`
        matches a name, or the other options leave out a tensor of `slices` or `out`.
    SafetensorError
        The record of shared tensors in the metadata is broken (``code`` is ``"invalid-alias"``).

    Examples
    --------
    >>> tensors = ingot.torch.load_file("model.safetensors", device="cpu", dtype="BF16")
    >>> tensors["wte"].dtype
    torch.bfloat16
    """
    how = Loading.of(load_file, options, filename)
    if out is not None or return_metadata is not False or shared != "alias":
        own = {"out": out, "return_metadata": return_metadata, "shared": shared}
        checked(load_file, own, shared=_loaded_as)
    move = None
    if not is_here(device):
        move = moves.placed(load_file, mover if how.dtype is None else widening, device)
    selected = Selected.by(how, out) if out is not None or how.selects else None

    def work(
        checkpoint: Checkpoint, reads: Reads
    ) -> dict[str, torch.Tensor] | tuple[dict[str, torch.Tensor], dict[str, str] | None]:
        found = _loaded(checkpoint, move, shared, selected, reads)
        return (found, checkpoint.metadata()) if return_metadata else found

    return door.loaded(filename, how, work)


@takes()
def load(data: Buffer, *, shared: Loaded = "alias", **options: Unpack[NoOptions]) -> dict[str, torch.Tensor]:
    """Load all tensors from the bytes of a file.

    Parameters
    ----------
    data : bytes, bytearray, memoryview, mmap or any other C-contiguous buffer
        A whole file. The format is detected from its contents.
    shared : {"alias", "drop"}
        As for `load_file`.

    Returns
    -------
    dict of str to torch.Tensor
        As for `load_file`, on the CPU, with memory of their own: `data` is copied and may change afterwards.

    Raises
    ------
    TypeError
        `data` is not a buffer.
    HeaderError, DtypeError, OptionError, SafetensorError
        As `load_file` does.

    Examples
    --------
    >>> ingot.torch.load(ingot.torch.save({"bias": torch.arange(3)}))
    {'bias': tensor([0, 1, 2])}
    """
    checked(load, locals(), shared=_loaded_as)
    checkpoint = argument(load, "data", data, _native.Checkpoint.from_buffer)
    return _loaded(checkpoint, mover(None), shared, None, PLAIN)


def _loaded(
    checkpoint: Checkpoint, move: Moving, shared: Loaded, selected: Selected[torch.Tensor] | None, how: Reads
) -> dict[str, torch.Tensor]:
    """Return the selected tensors, and those that the file's record of aliases adds."""
    aliases = checkpoint.shared() if shared == "alias" else {}
    views = recorded(aliases) if aliases else {}
    if selected is None:
        found = _load.tensors(checkpoint, None, wrap, move, how)
        if views:
            restore(found, views)
        return found
    names = selected.names(checkpoint, aliases=bool(views))
    # The stored tensor of each alias.
    bases = {name: views[of]["of"] if of in views else of for name, of in names.items()} if views else names
    if selected.is_plain():
        found = _load.tensors(checkpoint, dict.fromkeys(bases.values()), wrap, move, how)
        restore(found, {name: views[name] for name in names if name in views})
        return {name: found[name] for name in names}
    moves.settled(
        checkpoint, map(bases.__getitem__, filterfalse((selected.out or {}).__contains__, names)), move
    )
    if not selected.only_fills(names):
        checkpoint, how = _load.proven(checkpoint, [*bases.values(), *names.values()], how)
    return _parts(checkpoint, move, selected, names, views, how)


def _parts(
    checkpoint: Checkpoint,
    move: Moving,
    selected: Selected[torch.Tensor],
    names: dict[str, str],
    views: Views,
    how: Reads,
) -> dict[str, torch.Tensor]:
    out = selected.out or {}

    def is_cut(name: str) -> bool:
        return name in out or selected.of(name) is not None

    # Aliases are views of whole stored tensors, which are read even if only the aliases are selected. This is
    # skipped for files without aliases, since nearly all have none and some have many tensors.
    restored = {name: views[name] for name in names if name in views and not is_cut(name)} if views else {}
    sources = {name: names[name] for name in names if name not in restored} if restored else names
    refuse_captured(out)
    bases = dict.fromkeys(place["of"] for place in restored.values())
    lacking = {base: base for base in bases if base not in sources or is_cut(base)}
    whole: Selected[torch.Tensor] = Selected(dtype=selected.dtype)
    first, second = how.shares(
        lambda: checkpoint.parts_nbytes(select.wanted(checkpoint, selected, sources, sources)),
        lambda: checkpoint.parts_nbytes(select.wanted(checkpoint, whole, lacking, lacking)),
    )
    found = _load.load(checkpoint, selected, sources, wrap, move, first, at, fill_tensors)
    others = _load.load(checkpoint, whole, lacking, wrap, move, second, at)
    shared = {base: others[base] if base in lacking else found[base] for base in bases}
    restore(shared, restored)
    if restored:
        found = {name: shared[name] if name in restored else found[name] for name in names}
    return selected.grouped(found)


@takes()
def save(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    format: Format = "safetensors",
    shared: Shared = "error",
    contiguous: Contiguous = "copy",
    **options: Unpack[NoOptions],
) -> bytes:
    """Return the bytes of a file that holds these tensors.

    Parameters
    ----------
    tensors : dict of str to torch.Tensor
        With any layout, on any device. The values are stored in C order. Tensors that are strided,
        conjugated, lazily negated or not on the CPU are packed or copied to the CPU in pieces of a few MiB.
    metadata : dict of str to str, optional
        Text to store beside the tensors. Keys that describe the tensors of another file are left out:
        ``ingot.checksums``, ``modelspec.hash_sha256``, ``ingot.shared``, and signatures (``c2pa:manifest``,
        ``c2pa:manifest.uri``, ``__signature__``, ``sigstore``, ``vouch_credential``).
    format : {"safetensors", "bintensors"}
        The file format.
    shared : {"error", "copy", "alias"}
        What to do with tensors that share memory. ``"error"`` refuses them, as upstream. ``"copy"`` writes
        each in full. ``"alias"`` writes the memory once and records the other names in the metadata, under
        ``ingot.shared``, so that `load_file` restores the sharing; other readers see only the tensor that was
        written.
    contiguous : {"copy", "error"}
        What to do with tensors that are not contiguous in C order, such as transposed and ``channels_last``
        ones: ``"copy"`` packs them, a few MiB at a time, and ``"error"`` rejects them, as upstream.

    Returns
    -------
    bytes
        The same bytes for the same input (FORMAT.md, "Writing").

    Raises
    ------
    ValueError
        `tensors` is not a dict or a value is not a tensor (both as upstream).
    TypeError
        A name, a key or a value of the metadata is not a str.
    SharedMemoryError
        Two tensors share memory and `shared` is ``"error"``; or it is ``"alias"`` and no tensor covers all of
        the shared memory. The message has two of the names.
    SaveError
        A tensor has no plain values (sparse, quantised, meta, a wrapper such as a DTensor, made inside of a
        transform such as vmap, or with a storage that was freed or shrunk), is not contiguous while
        `contiguous` is ``"error"``, the format lacks its dtype, a name is reserved, or no header can hold the
        tensors.
    OptionError
        `format`, `shared` or `contiguous` is not one of the choices.

    Examples
    --------
    >>> data = ingot.torch.save({"bias": torch.arange(3)}, {"format": "pt"})
    >>> ingot.torch.load(data)
    {'bias': tensor([0, 1, 2])}
    """
    given = checked(save, locals(), format=known_format, shared=shared_as)
    own, views = _stored(argument(save, "tensors", tensors, _tensors), shared, contiguous)
    packed, known = _payload(own, shared), _shown(shared, views)
    return _native.serialize(own, packed, metadata=given["metadata"], format=format, **known)


@overload
def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    background: Literal[True],
    **options: Unpack[TorchSaveOptions],
) -> ingot.SaveFuture: ...


@overload
def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: Path | Writable,
    metadata: Mapping[str, str] | None = None,
    *,
    background: Literal[False] = False,
    **options: Unpack[TorchSaveOptions],
) -> None: ...


@takes(SaveOptions, overwrite=True)
def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: Path | Writable,
    metadata: Mapping[str, str] | None = None,
    *,
    shared: Shared = "error",
    contiguous: Contiguous = "copy",
    background: bool = False,
    **options: Unpack[SaveOptions],
) -> ingot.SaveFuture | None:
    """Save tensors to a file.

    Parameters
    ----------
    tensors, metadata
        As for `save`. Tensors must not change while they are written.
    filename : str, bytes, os.PathLike, or an object with a ``write``
        Where to write. An existing file is replaced, even if the tensors were loaded from it. An object, such
        as an open binary file or `io.BytesIO`, gets the bytes of the file in pieces
        (`ingot.typing.Writable`).
    shared, contiguous
        As for `save`.
    background : bool
        Write in a thread and return an `ingot.SaveFuture` early. Errors while writing are raised by its
        ``result()``; once its ``staged`` is done, the tensors may change. Background saves run in the order
        of the calls. The interpreter waits for pending saves at exit. If nothing asks for the result of a
        failed save, the next save warns (`RuntimeWarning`), and the error is printed on standard error at
        exit.
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
    ValueError, TypeError, SharedMemoryError, SaveError, OptionError
        As `save` does, before anything is written to the disk.

    Examples
    --------
    >>> weight = torch.zeros(8, 4)
    >>> ingot.torch.save_file({"wte": weight, "lm_head": weight}, "tied.safetensors", shared="alias")
    >>> tensors = ingot.torch.load_file("tied.safetensors")
    >>> tensors["wte"].data_ptr() == tensors["lm_head"].data_ptr()
    True
    """
    how = Saving.among(save_file, checked(save_file, locals(), shared=shared_as))
    own_tensors = argument(save_file, "tensors", tensors, _tensors)
    return write_tensors(own_tensors, filename, how, shared, contiguous)


def write_tensors(
    tensors: dict[str, torch.Tensor],
    filename: Path | Writable,
    how: Saving,
    shared: Shared = "error",
    contiguous: Contiguous = "copy",
    records: Mapping[str, str] = _NO_RECORDS,
) -> ingot.SaveFuture | None:
    """Write a file of tensors, as `save_file` does. `records` are entries of metadata about the tensors."""
    own, views = _stored(tensors, shared, contiguous)
    packed, known = _payload(own, shared), _shown(shared, views)
    known["records"] = {**records, **known["records"]}
    return write_file(filename, own, packed, how, copies=partial(_copies, shared), **known)


def _shown(shared: Shared, views: Views) -> dict[str, Any]:
    """Return the options of the extension module for shared memory. Aliases are resolved before this call."""
    return {"export": _export, "shared": "copy" if shared == "copy" else "error", "records": rendered(views)}


def _payload(tensors: dict[str, torch.Tensor], shared: Shared) -> Callable[[str, torch.Tensor], Any]:
    """Return `payload`, which is first checked for shared memory.

    The extension checks too, but tensors that were copied here no longer share memory there.
    """
    looked = shared != "error"

    def packed(name: str, tensor: torch.Tensor) -> Any:
        nonlocal looked
        if not looked:
            refuse_shared(_plain_ones(tensors))
            looked = True
        return payload(name, tensor)

    return packed


def _copies(shared: Shared, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors on their devices. Tensors that cannot be stored are rejected later."""
    if shared == "error":
        # Copies do not share memory.
        refuse_shared(_plain_ones(tensors))
    return copied(tensors, "device")


def _stored(
    own: dict[str, torch.Tensor], shared: Shared, contiguous: Contiguous
) -> tuple[dict[str, torch.Tensor], Views]:
    """Return the tensors to write, and the positions of the aliases in them."""
    if contiguous == "error":
        refuse_strided(own)
    if shared != "alias":
        return own, {}
    views = views_among(_plain_ones(own))
    return {name: tensor for name, tensor in own.items() if name not in views}, views
