"""Save and load whole modules, and select the names to keep of tensors that share memory."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch

import ingot
from ingot._base.checks import one_of
from ingot._base.options import Saving, checked, takes
from ingot._base.text import _quoted
from ingot._read import moves
from ingot.errors import SharedMemoryError
from ingot.typing import Device, LoadOptions, Path, SaveOptions, Source, Writable

from ._devices import mover
from ._files import Contiguous, load_file, write_tensors
from ._into import differences
from ._shared import overlapping
from ._tensors import _tensors, not_plain

if TYPE_CHECKING:
    from ingot._base.options import AtOnce, InBackground

Duplicates = Literal["drop", "error", "copy", "alias"]


def _known_model(model: Any) -> Any:
    """Return `model`, which must be a module."""
    if not hasattr(model, "state_dict") or not hasattr(model, "load_state_dict"):
        raise TypeError(f"model must be a torch.nn.Module, found {type(model).__name__}")
    return model


_duplicates_as = partial(one_of, "shared", choices=("drop", "error", "copy", "alias"))

# Names in a message. The rest are counted.
_SHOWN = 3


@overload
def save_model(
    model: torch.nn.Module,
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    shared: Duplicates = "drop",
    **options: Unpack[InBackground],
) -> ingot.SaveFuture: ...


@overload
def save_model(
    model: torch.nn.Module,
    filename: Path | Writable,
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    shared: Duplicates = "drop",
    **options: Unpack[AtOnce],
) -> None: ...


@takes(SaveOptions, overwrite=True)
def save_model(
    model: torch.nn.Module,
    filename: Path | Writable,
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    shared: Duplicates = "drop",
    background: bool = False,
    **options: Unpack[SaveOptions],
) -> ingot.SaveFuture | None:
    """Save the tensors of a module, those that share memory once.

    Parameters
    ----------
    model : torch.nn.Module
        The module, whose `state_dict` is saved.
    filename : str, bytes, os.PathLike, or an object with a ``write``
        As for `save_file`.
    metadata : dict of str to str, optional
        Text to store beside the tensors. For each omitted name, the name of its stored tensor is added, as
        upstream does. Unlike upstream, the dict itself is not changed.
    force_contiguous : bool
        Pack tensors that are not contiguous in C order. False refuses them.
    shared : {"drop", "error", "copy", "alias"}
        What to do with tensors that share memory. ``"drop"``, as upstream, writes one of them, and records
        the other names in the metadata. The other values mean the same as for `save_file`.
    background : bool
        Return an `ingot.SaveFuture` and write in a thread, as `save_file` does.
    **options
        How the file is written: `ingot.typing.SaveOptions`.

    Returns
    -------
    None or ingot.SaveFuture
        The future of a background save. Its result is None.

    Raises
    ------
    SharedMemoryError
        Tensors share memory, and no tensor covers all of it. It is a `RuntimeError` too.
    OSError, ValueError, TypeError, SaveError, StorageError
        As `save_file` does.

    Notes
    -----
    Upstream's rule decides which names are kept: the first by name of the tensors that cover a whole storage.

    Examples
    --------
    >>> model = torch.nn.Linear(4, 8)
    >>> ingot.torch.save_model(model, "linear.safetensors")
    """
    given = checked(save_model, locals(), shared=_duplicates_as, model=_known_model)
    how = Saving.among(save_model, given)
    state = _tensors(model.state_dict())
    contiguous: Contiguous = "copy" if force_contiguous else "error"
    if shared != "drop":
        return write_tensors(state, filename, how, shared, contiguous)
    kept = {dropped: name for name, others in duplicate_names(state).items() for dropped in others}
    if kept or metadata is not None:
        how = how._replace(metadata={**kept, **(how.metadata or {})})
    tensors = {name: tensor for name, tensor in state.items() if name not in kept}
    return write_tensors(tensors, filename, how, contiguous=contiguous)


@takes(LoadOptions)
def load_model(
    model: torch.nn.Module,
    filename: Source,
    strict: bool = True,
    device: Device = "cpu",
    **options: Unpack[LoadOptions],
) -> tuple[set[str], list[str]]:
    """Load a file into a module.

    Parameters
    ----------
    model : torch.nn.Module
        The module to load into, by its `load_state_dict`, so that its hooks run.
    filename : str, bytes, os.PathLike, or an object to read from
        As for `load_file`.
    strict : bool
        Refuse a file that lacks a tensor of the module, or has one that the module lacks.
    device : str, int, torch.device, dict or callable
        Where the file's tensors are placed first, as for `load_file`.
    **options
        Which tensors are loaded and how: `ingot.typing.LoadOptions`.

    Returns
    -------
    missing : set of str
        The tensors of the module that the file lacks. A tensor is not missing if it shares memory with one in
        the file.
    unexpected : list of str
        The tensors of the file that the module lacks, or has under another name already.

    Raises
    ------
    RuntimeError
        A shape differs; or `strict` is set and a tensor is missing or unexpected.
    OSError, HeaderError, DtypeError, StorageError, OptionError
        As `load_file` does.

    Warns
    -----
    UserWarning
        Tensors of the file were converted to the dtype that the module has. The message names them.

    Notes
    -----
    A patch is applied to a module by `load_into` (``patch=``), which returns the version of the tensors. The
    result of this function has no place for it, and hooks of `load_state_dict` need whole tensors.

    Examples
    --------
    >>> model = torch.nn.Linear(4, 8)
    >>> ingot.torch.save_model(model, "linear.safetensors")
    >>> ingot.torch.load_model(model, "linear.safetensors")
    (set(), [])
    """
    given = checked(load_model, locals(), model=_known_model)
    moves.placed(load_model, mover, device)
    chosen: Any = {name: given[name] for name in options}
    state = load_file(filename, device, shared="drop", **chosen)
    own = model.state_dict()
    # The names whose tensor has another dtype in the module.
    converted = sorted(name for name, one in state.items() if name in own and own[name].dtype != one.dtype)
    result = into_model(model, state, strict, own)
    if converted:
        way_out = "to keep the file's dtype, call `model.to(dtype)` first"
        count = f"{len(converted)} tensors to the dtype of the module"
        warnings.warn(f"load_model converted {count}: {_few(converted)} — {way_out}", stacklevel=2)
    return result


def into_model(
    model: torch.nn.Module,
    state: dict[str, torch.Tensor],
    strict: bool,
    own: dict[str, torch.Tensor] | None = None,
) -> tuple[set[str], list[str]]:
    """Load these tensors into `model`, and return the missing and the unexpected names.

    `own` is the model's `state_dict`, if the caller has it.
    """
    own = model.state_dict() if own is None else own
    drops = duplicate_names(own, preferred_names=state, partial="keep")
    dropped = [name for others in drops.values() for name in others]
    found = model.load_state_dict(state, strict=False)
    missing, unexpected = set(found.missing_keys), list(found.unexpected_keys)
    for name in dropped:
        missing.discard(name)
        # Both names are in the file, but the module has only one tensor for them, so one value was lost.
        if name in state and name not in unexpected:
            unexpected.append(name)
    if strict and (missing or unexpected):
        lists = {
            "Missing key(s) in state_dict": sorted(missing),
            "Unexpected key(s) in state_dict": sorted(unexpected),
        }
        first = f"Error(s) in loading state_dict for {type(model).__name__}:"
        raise RuntimeError("\n".join([first, *differences(lists, state, own)]))
    return missing, unexpected


def duplicate_names(
    tensors: Mapping[str, torch.Tensor],
    *,
    preferred_names: Iterable[str] | None = None,
    discard_names: Iterable[str] | None = None,
    partial: str = "error",
) -> dict[str, list[str]]:
    """Return the names to drop for each name to keep, by upstream's rule.

    A tensor can be kept if it covers the storage that it shares: the first by name, among `preferred_names`
    if possible, otherwise not in `discard_names` if possible. If no tensor covers the storage,
    ``partial="error"`` raises, and ``"keep"`` drops none.
    """
    preferred, discard = set(preferred_names or ()), set(discard_names or ())
    drop: dict[str, list[str]] = defaultdict(list)
    for names in shared_storages(tensors):
        whole = {name for name in names if is_complete(tensors[name])}
        if not whole:
            if partial == "keep":
                continue
            raise _none_is_whole(names)
        keep = min((whole & preferred) or (whole - discard) or whole)
        for name in sorted(names - {keep}):
            drop[keep].append(name)
    return drop


def shared_storages(tensors: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """Group names by storage, and by overlap within a storage."""
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        # A state dict may contain any value. Saving rejects values that are not tensors.
        if not isinstance(tensor, torch.Tensor) or not_plain(tensor) is not None:
            continue
        place = storage_ptr(tensor), storage_size(tensor)
        if all(place):
            groups[(tensor.device, *place)].append(name)
    return [{*crowd} for names in groups.values() for crowd in overlapping(names, tensors)]


def storage_ptr(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage, or 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def storage_size(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's storage, or of its elements if it has none."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.nelement() * tensor.itemsize


def is_complete(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's elements are the whole of its storage."""
    begins = tensor.data_ptr() == storage_ptr(tensor)
    return begins and tensor.nelement() * tensor.itemsize == storage_size(tensor)


def _none_is_whole(names: set[str]) -> SharedMemoryError:
    few = _few(sorted(names))
    message = (
        "Error while trying to find names to remove to save state dict, but found no suitable name to keep "
        f"for saving amongst: {few}: none of them covers its storage, which may be much larger — "
        "replace each by its `.clone()` before saving"
    )
    return SharedMemoryError(message, code="shared-memory", tensor=min(names), found=tuple(sorted(names)))


def _few(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(map(_quoted, names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
