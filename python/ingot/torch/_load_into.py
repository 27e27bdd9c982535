"""Load into existing tensors, by one process or by many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias, Unpack

import torch

from ingot._base.checks import checked_source, one_of
from ingot._base.options import Loading, argument, checked, takes
from ingot._native import Checkpoint
from ingot._ranks.local import has_group, is_distributed, known_group
from ingot._read import door
from ingot._read.door import Reads, reading
from ingot.errors import OptionError
from ingot.typing import FillOptions, Source

from ._into import IncompatibleKeys, fitting, known_version, load_fitting, slots, tensors_of

ReadOnce: TypeAlias = Literal["auto", "job", "node", False]
Target: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]


@takes(FillOptions)
def load_into(
    into: torch.nn.Module | Mapping[str, torch.Tensor],
    source: Source | None = None,
    *,
    patch: Source | None = None,
    strict: bool = True,
    read_once: ReadOnce = "auto",
    process_group: torch.distributed.ProcessGroup | None = None,
    **options: Unpack[FillOptions],
) -> IncompatibleKeys:
    """Load a file, or the changes in a patch, into the tensors of a module, without a second copy of them.

    Parameters
    ----------
    into : torch.nn.Module or dict of str to torch.Tensor
        What to fill: the module's parameters and persistent buffers, or the tensors of the dict. Objects,
        devices and memory layouts stay the same, and no gradient is recorded. For a DTensor (FSDP2, tensor,
        expert parallel), each rank reads and fills only its part.
    source : str, bytes, os.PathLike, or an object to read from
        As for `load_file`. With `patch`, the version that the tensors have: the ``version`` of the result of
        `load_into`. By default all tensors are compared with the digest of the version that the patch is for.
    patch : str, bytes, os.PathLike, or an object to read from, optional
        A patch (`ingot.delta.diff`, `DeltaWriter`). Only the elements that it changes are written. A tensor
        that the patch adds or removes counts as for the file that it makes. If ranks load together, each
        reads the patch.
    strict : bool
        Refuse a file that lacks a tensor of `into`, or has one that `into` lacks. Tensors of the file that
        `keys` and `drop` leave out count as neither, and `into` keeps its values for them.
    read_once : {"auto", "job", "node", False}
        How ranks share the reading. With ``"job"``, each byte that a rank wants is read by one rank, which
        sends it to the others; with ``"node"``, by one rank on each node; with False, each rank reads its own
        parts and sends nothing. ``"auto"`` is False if no tensor is a DTensor or there is only one rank.
        Otherwise it is ``"job"`` for sources on a network (a URL, an object, a network file system) and more
        than one node; else each rank reads for itself, since ranks of a machine share its page cache. Unless
        it is False, or ``"auto"`` without DTensors, all ranks of `process_group` must call this. With False,
        or without DTensors, ranks do not compare the files that they open: if a save replaces the files
        during the call, ranks may load different versions.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that load together. By default all.
    **options
        Which tensors are loaded and how: `ingot.typing.FillOptions`.

    Returns
    -------
    IncompatibleKeys
        ``missing_keys``, tensors of `into` that the file lacks, and ``unexpected_keys``, tensors of the file
        that `into` lacks, like the result of `torch.nn.Module.load_state_dict`. A name whose tensor is in the
        file under another name is not missing. ``version`` is the id of the version that was loaded.

    Raises
    ------
    DestinationError
        A tensor has another shape than in the file, has no memory (on ``"meta"``: call `to_empty` first), or
        partly overlaps another; a DTensor has a ``Partial`` placement, or is of a class that stores its
        values elsewhere; the module has the flat parameters of ``FullyShardedDataParallel``; a tensor was
        made in `torch.inference_mode` and is filled outside it; or the call is inside `torch.func.grad` or
        another differentiating transform. Nothing has been read.
    RankError
        Another rank failed, was lost, or loads another file: all ranks raise, and the message names the rank
        and its error. The failed rank raises its own error.
    RuntimeError
        `strict` is set and a tensor is missing or unexpected. Nothing has been read.
    TypeError
        A value of the dict is not a tensor.
    OptionError
        `read_once` is not one of the choices, or needs a process group and there is none; or ranks load
        together and `verify` or `expected_sha256` is set. Or `patch` is passed with `dequantize`,
        `expected_sha256` or `read_once`, with a source that is not a version, or without a version and with
        tensors that cannot be compared with the base.
    IntegrityError
        A tensor or the file differs from its digest. The content of the tensors is unspecified then. Or the
        patch is for another version (``code`` is ``"wrong-base"``), or is not intact, as for
        `ingot.delta.apply`. Nothing has changed then.
    OSError, HeaderError, DtypeError, StorageError, OptionError
        As `load_file` does. After a failure, also of `progress`, the tensors may be partly filled.

    Notes
    -----
    Tensors are read directly into CPU memory, and floats are converted to other floats during the read. For
    other devices and other dtypes, they are read in pieces of at most 64 MiB, which torch then copies: onto a
    GPU with a supported driver directly, otherwise through pinned memory if torch has some for the device.
    The device converts to wider floats, the host to others. The copies are in the order of the device's
    current stream. Data that ranks send each other takes up to 128 MiB of a rank's memory. For a URL or a
    network file system, the first rank reads the index and the headers, and sends them to the others. The
    module's own loading hooks do not run: `load_model` runs them.

    With `patch`, `remap` and `dtype` must be those with which the version before was loaded, and `verify`
    compares the tensors with the digest of the base too. All checks are made before the first element
    changes. The patch has absolute values, so that it may be applied again after a failure.

    For autograd, filling a tensor is ``copy_`` under ``torch.no_grad()``: it may require a gradient, and its
    version counter is incremented, so that ``backward`` raises if it needs the values from before.

    Examples
    --------
    >>> model = torch.nn.Linear(4, 8)
    >>> ingot.torch.save_model(model, "linear.safetensors")
    >>> ingot.torch.load_into(model, "linear.safetensors")
    IncompatibleKeys(missing_keys=[], unexpected_keys=[])

    A patch changes tensors that have the version before.

    >>> tensors = ingot.torch.load_file("model.safetensors")
    >>> ingot.delta.diff("model.safetensors", "tuned.safetensors", "patch.safetensors")
    >>> loaded = ingot.torch.load_into(tensors, patch="patch.safetensors")
    >>> loaded.version == ingot.delta.info("patch.safetensors").result
    True
    """
    given = {**locals()}
    if patch is not None or source is None:
        return _patched(given)

    def asked() -> Loading:
        return Loading.among(checked(load_into, given, into=_known_target, **FOR_RANKS))

    # Listed once, since it takes time for many tensors.
    own = tensors_of(into) if isinstance(into, torch.nn.Module) and has_ranks() else None
    if _is_shared(into if own is None else own, read_once):
        return _together(into, own, source, strict, read_once, process_group, asked)

    def work(stored: Checkpoint, reads: Reads) -> IncompatibleKeys:
        version = _version(stored, how)
        checkpoint, reads = _as_asked(source, stored, reads, how)
        found, keys = fitting(into, checkpoint, strict, how, own)
        load_fitting(checkpoint, found, reads, how.dtype)
        keys.version = version
        return keys

    how = asked()
    return door.loaded(source, how.as_stored(), work)


def _version(stored: Checkpoint, how: Loading) -> str | None:
    """Return the id of the version that is loaded; None if it is unknown, or values are not stored ones."""
    return known_version(stored) if how.dequantize is False else None


def _as_asked(source: Source, stored: Checkpoint, reads: Reads, how: Loading) -> tuple[Checkpoint, Reads]:
    """Return the checkpoint of the tensors that are computed from the stored ones, and how to read it."""
    if not how.computes:
        return stored, reads
    # With `remap`, the stored tensors are compared before they are put together.
    return door.computed(source, stored, how), reads._replace(proof=door.PLAIN.proof)


def _patched(given: dict[str, Any]) -> IncompatibleKeys:
    # Imported here: few loads apply a patch.
    from ._load_patch import load_patch

    found: Any = checked(load_into, given, into=_known_target, **FOR_RANKS)
    if found["patch"] is None:
        argument(load_into, "source", None, checked_source)
    if found["read_once"] != "auto":
        message = "load_into(): read_once is not supported with patch, which each rank reads"
        raise OptionError(message, code="not-with-patch", found=found["read_once"])
    how = Loading.among(found)
    return load_patch(found["into"], found["source"], found["patch"], found["strict"], how)


def _is_shared(into: Target, read_once: object) -> bool:
    """Return whether ranks load together. Raises nothing that one rank alone would raise."""
    if read_once in ("job", "node"):
        return has_group()
    if read_once is False or not has_ranks():
        return False
    return isinstance(into, Mapping) and any(map(is_distributed, into.values()))


def _known_target(into: Target) -> Target:
    """Return `into`, which must be a module or a dict."""
    if not isinstance(into, (torch.nn.Module, Mapping)):
        raise TypeError(
            f"into must be a torch.nn.Module or a dict of str to torch.Tensor, found {type(into).__name__}"
        )
    return into


def _known_read_once(read_once: ReadOnce) -> ReadOnce:
    """Return `read_once`, which must be one of the choices and may need a process group."""
    if read_once is not False:
        one_of("read_once", read_once, ("auto", "job", "node"))
    if read_once in ("job", "node") and not has_group():
        way_out = "call `torch.distributed.init_process_group` first"
        message = f"read_once {read_once!r} is for ranks of a process group, and there is none: {way_out}"
        raise OptionError(message, code="no-process-group", found=read_once)
    return read_once


# How the options that concern ranks are checked.
FOR_RANKS = {"read_once": _known_read_once, "process_group": known_group}


def _refuse_by_ranks(how: Loading) -> None:
    """Raise `OptionError` for options that need whole tensors, or change the data that ranks exchange."""
    given = [name for name in ("verify", "expected_sha256", "dtype") if getattr(how, name)]
    if given:
        why = "which read parts of tensors and send them as they are stored: set read_once=False"
        message = f"load_into(): {given[0]} is not supported if ranks load together, {why}"
        raise OptionError(message, code="not-by-ranks", found=given[0])


def has_ranks() -> bool:
    """Return whether there is more than one rank."""
    return has_group() and torch.distributed.get_world_size() > 1


def _together(
    into: Target,
    own: dict[str, torch.Tensor] | None,
    source: Source,
    strict: bool,
    read_once: ReadOnce,
    process_group: torch.distributed.ProcessGroup | None,
    asked: Callable[[], Loading],
) -> IncompatibleKeys:
    # Imported here: most loads are of one process.
    from ingot._ranks.peers import Peers

    from . import _load_by_ranks

    found: list[IncompatibleKeys] = []
    peers = Peers(process_group)
    with peers.step("comparing options"):
        how = asked()
        _refuse_by_ranks(how)

    @contextmanager
    def prepare() -> Iterator[_load_by_ranks.Prepared]:
        stored = _load_by_ranks.open_once(partial(door.open_all, source, how.as_stored()), peers)
        version = _version(stored, how)
        with reading(stored, how) as reads:
            checkpoint, reads = _as_asked(source, stored, reads, how)
            tensors, keys = fitting(into, checkpoint, strict, how, own)
            keys.version = version
            found.append(keys)
            yield _load_by_ranks.Prepared(checkpoint, slots(checkpoint, tensors), reads, source)

    _load_by_ranks.load(prepare, peers, read_once)
    return found[-1]
