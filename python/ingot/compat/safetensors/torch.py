"""The names of `safetensors.torch`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ingot import torch as _ingot
from ingot._base.text import _quoted
from ingot.compat._handles import HERE, MMAP, chosen, mover, path_only, safe_open
from ingot.compat._specs import deserialize, serialize, serialize_file
from ingot.compat._tensor_spec import TensorSpec
from ingot.compat._wording import NoDtypeError, NoValuesError, reading, restate, writing
from ingot.errors import SaveError, SharedMemoryError
from ingot.torch._model import (
    duplicate_names,
    into_model,
    shared_storages,
    storage_ptr,
    storage_size,
)
from ingot.torch._model import is_complete as _is_complete
from ingot.torch._model import save_model as _save_model
from ingot.torch._shared import extent, overlapping
from ingot.torch._tensors import refuse_strided

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ingot.typing import Path

    View = Iterable[tuple[str, Mapping[str, Any]]]

__all__ = [
    "TensorSpec",
    "_is_complete",
    "deserialize",
    "load",
    "load_file",
    "load_model",
    "safe_open",
    "save",
    "save_file",
    "save_model",
    "serialize",
    "serialize_file",
    "storage_ptr",
    "storage_size",
]

# Programs read these two, build tables from them, and add to them. So they have upstream's keys: the first
# lacks two dtypes. Changes here have an effect on `load`, as they do upstream.
_SAVED_ONLY = {code: dtype for code, dtype in _ingot.DTYPES.items() if code in ("F4", "F8_E8M0")}
_TYPES = {code: dtype for code, dtype in _ingot.DTYPES.items() if code not in _SAVED_ONLY}
_SIZE = {dtype: dtype.itemsize for dtype in _ingot.DTYPES.values()}

_FRESH = dict(_TYPES)
_CODES = {dtype: code for code, dtype in _ingot.DTYPES.items()}

_float4_e2m1_x2 = getattr(torch, "float4_e2m1fn_x2", None)
_float8_e4m3fn = getattr(torch, "float8_e4m3fn", None)
_float8_e4m3fnuz = getattr(torch, "float8_e4m3fnuz", None)
_float8_e5m2 = getattr(torch, "float8_e5m2", None)
_float8_e5m2fnuz = getattr(torch, "float8_e5m2fnuz", None)
_float8_e8m0 = getattr(torch, "float8_e8m0fnu", None)


@reading("Error while deserializing header")
def load_file(filename: Path, device: Any = "cpu", *, backend: str = MMAP) -> dict[str, torch.Tensor]:
    """Load all tensors of a file, as `ingot.torch.load_file`."""
    how = chosen(backend)
    if device not in HERE:
        # Raises with upstream's message if torch has no such device.
        mover("pt", device)
    tensors: dict[str, torch.Tensor] = _ingot.load_file(
        path_only(filename), device, backend=how, shared="drop"
    )
    return tensors


@reading("Error while deserializing")
def load(data: Buffer) -> dict[str, torch.Tensor]:
    """Load all tensors from the bytes of a file, as `ingot.torch.load`."""
    if _TYPES != _FRESH:
        return _view2torch(deserialize(data))
    return _ingot.load(data, shared="drop")


@writing
def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a file that holds these tensors, each contiguous and with memory of its own."""
    _refuse_non_tensors(tensors)
    try:
        return _ingot.save(tensors, metadata, contiguous="error")
    except SaveError as error:
        refusal = error
    raise _as_upstream(refusal, tensors)


@writing
def save_file(
    tensors: dict[str, torch.Tensor], filename: Path, metadata: dict[str, str] | None = None
) -> None:
    """Save tensors to a file, each contiguous and with memory of its own."""
    _refuse_non_tensors(tensors)
    try:
        return _ingot.save_file(
            tensors, path_only(filename), metadata, format="safetensors", contiguous="error"
        )
    except SaveError as error:
        refusal = error
    raise _as_upstream(refusal, tensors)


@writing
def save_model(
    model: torch.nn.Module,
    filename: Path,
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Save the tensors of a module, shared memory once, as `ingot.torch.save_model`."""
    if metadata is not None and not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict of str to str, found {type(metadata).__name__}")
    try:
        return _save_model(model, path_only(filename), metadata, force_contiguous)
    except SaveError as error:
        refusal = error
    if refusal.tensor is not None:
        refusal = _restated(refusal, model.state_dict().get(refusal.tensor))
    if not isinstance(refusal, (SharedMemoryError, NoDtypeError, NoValuesError)):
        refusal.args = (
            f"{refusal} Or use save_model(..., force_contiguous=True), read the docs for potential caveats.",
        )
    raise refusal


def load_model(
    model: torch.nn.Module, filename: Path, strict: bool = True, device: Any = "cpu", *, backend: str = MMAP
) -> tuple[set[str], list[str]]:
    """Load a file into a module, as `ingot.torch.load_model`, which also reports conversions."""
    return into_model(model, load_file(filename, device, backend=backend), strict)


def _getdtype(dtype_str: str) -> torch.dtype:
    return _TYPES[dtype_str] if dtype_str in _TYPES else _SAVED_ONLY[dtype_str]


def _view2torch(safeview: View) -> dict[str, torch.Tensor]:
    found = {}
    for name, view in safeview:
        dtype, shape = _getdtype(view["dtype"]), list(view["shape"])
        if dtype is _float4_e2m1_x2:
            shape[-1] //= 2
        data = view["data"]
        # torch makes no tensor from an empty buffer.
        raw = (
            torch.frombuffer(data, dtype=torch.uint8)
            if len(data)
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        found[name] = raw.view(dtype).reshape(shape)
    return found


def _to_ndarray(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return the bytes of the tensor in C order as an array, and the tensor that owns them."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy(), plain


def _tobytes(tensor: torch.Tensor, name: str) -> bytes:
    if tensor.layout is not torch.strided:
        raise SaveError(
            f"You are trying to save a sparse tensor: {_quoted(name)}: save its `.to_dense()`",
            code="no-values",
            tensor=name,
        )
    _refuse_strided({name: tensor})
    data: bytes = _to_ndarray(tensor)[0].tobytes()
    return data


def _flatten(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Return the tensors by their bytes, as 0.7 passed them to `serialize`."""
    _evaluate_tensors_for_save(tensors)
    return {
        name: {"dtype": _dtype_name(name, tensor), "shape": tensor.shape, "data": _tobytes(tensor, name)}
        for name, tensor in tensors.items()
    }


def _flatten_as_ptr(tensors: dict[str, torch.Tensor], keep_alive_buffer: list[Any]) -> dict[str, TensorSpec]:
    """Return the tensors by address, as 0.8 passes them to `serialize`. The list keeps their memory alive."""
    _evaluate_tensors_for_save(tensors)
    _refuse_strided(tensors)
    specs = {}
    for name, tensor in tensors.items():
        array, owner = _to_ndarray(tensor)
        keep_alive_buffer.append((array, owner))
        specs[name] = TensorSpec(
            dtype=_dtype_name(name, tensor),
            shape=tensor.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
    return specs


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in _CODES:
        raise NoDtypeError(
            f"{tensor.dtype}: tensor {_quoted(name)}: the format has no dtype for it",
            code="unsupported-dtype",
            tensor=name,
            found=str(tensor.dtype),
        )
    return str(tensor.dtype).removeprefix("torch.")


def _evaluate_tensors_for_save(tensors: dict[str, torch.Tensor]) -> None:
    """Raise upstream's errors, in its order, for non-tensors, sparse tensors and shared memory."""
    _refuse_non_tensors(tensors)
    sparse = [name for name, tensor in tensors.items() if tensor.layout is not torch.strided]
    if sparse:
        raise _sparse(sparse, sparse[0])
    # If the extents of two overlap, one of them is not contiguous, or they share a byte.
    if crowded := [names for names in _find_shared_tensors(tensors) if len(names) > 1]:
        _refuse_strided({name: tensors[name] for names in crowded for name in sorted(names)})
        listed = ", ".join(f"{{{', '.join(map(repr, sorted(names)))}}}" for names in crowded)
        raise SharedMemoryError(
            "\n            Some tensors share memory, this will lead to duplicate memory on disk and "
            f"potential differences when loading them again: [{listed}].\n            A potential way to "
            "correctly save your model is to use `save_model`, or `ingot.torch.save_file` with "
            'shared="alias"',
            code="shared-memory",
            tensor=min(crowded[0]),
            found=tuple(sorted(crowded[0])),
        )


def _refuse_non_tensors(tensors: dict[str, torch.Tensor]) -> None:
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    for kind in set(map(type, tensors.values())):
        if not issubclass(kind, torch.Tensor):
            name = next(name for name, value in tensors.items() if type(value) is kind)
            raise ValueError(f"Key {_quoted(name)} is invalid, expected torch.Tensor but received {kind}")


def _as_upstream(refusal: SaveError, tensors: dict[str, torch.Tensor]) -> SaveError:
    """Return the error that upstream raises first, or `refusal` itself.

    ingot checks for the same faults first, since its checks are much faster, but in another order.
    """
    try:
        _evaluate_tensors_for_save(tensors)
    except SaveError as error:
        return error
    return refusal if refusal.tensor is None else _restated(refusal, tensors.get(refusal.tensor))


def _refuse_strided(tensors: Mapping[str, torch.Tensor]) -> None:
    try:
        refuse_strided(tensors)
    except SaveError as error:
        restate(error, _PACKED.format(error.tensor))
        raise


def _restated(refusal: SaveError, tensor: object) -> SaveError:
    """Return the error for `tensor` with upstream's message and torch's class."""
    name = refusal.tensor
    if not isinstance(tensor, torch.Tensor) or name is None or isinstance(refusal, SharedMemoryError):
        return refusal
    facts = {"code": refusal.code, "path": refusal.path, "tensor": name, "found": refusal.found}
    if tensor.layout is not torch.strided:
        other: SaveError = _sparse([name], name)
    elif not tensor.is_contiguous():
        restate(refusal, _PACKED.format(name))
        return refusal
    elif tensor.is_meta:
        other = NoValuesError("Cannot copy out of meta tensor; no data!", **facts)
    elif tensor.dtype not in _CODES:
        other = NoDtypeError(str(tensor.dtype), **facts)
    else:
        return refusal
    other.add_note(str(refusal))
    return other


_PACKED = (
    "You are trying to save a non contiguous tensor: `{}` which is not allowed. It either means you are "
    "trying to save tensors which are reference of each other in which case it's recommended to save only "
    "the full tensors, and reslice at load time, or simply call `.contiguous()` on your tensor to pack it "
    "before saving."
)


def _sparse(names: list[str], name: str) -> SaveError:
    return SaveError(
        f"You are trying to save a sparse tensors: `{names}` which this library does not support. You can "
        "make it a dense tensor before saving with `.to_dense()` but be aware this might make a much larger "
        "file than needed.",
        code="no-values",
        tensor=name,
    )


def _end_ptr(tensor: torch.Tensor) -> int:
    return extent(tensor)[1]


def _find_shared_tensors(state_dict: dict[str, torch.Tensor]) -> list[set[str]]:
    return shared_storages(state_dict)


def _filter_shared_not_shared(tensors: list[set[str]], state_dict: dict[str, torch.Tensor]) -> list[set[str]]:
    return [{*crowd} for names in tensors for crowd in overlapping(names, state_dict)]


def _remove_duplicate_names(
    state_dict: dict[str, torch.Tensor],
    *,
    preferred_names: list[str] | None = None,
    discard_names: list[str] | None = None,
) -> dict[str, list[str]]:
    found = duplicate_names(state_dict, preferred_names=preferred_names, discard_names=discard_names)
    return defaultdict(list, found)
