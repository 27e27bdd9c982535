"""Export and make torch's tensors, and refuse tensors that files cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
import torch.utils.dlpack
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from ingot import _native
from ingot._adapters import pieces
from ingot._base.checks import named
from ingot._base.dtypes import ANOTHER_COMPLEX, F4_PACKED, NAMES
from ingot._base.frameworks import lacks, not_a_tensor
from ingot._base.text import _quoted, located
from ingot._write.save import Box, boxes
from ingot.errors import SaveError

from ._link import link

# The dtypes of this torch. A missing dtype affects only its tensors.
DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in {**NAMES, "F4": F4_PACKED}.items() if hasattr(torch, name)
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_layout, _dtype = attrgetter("layout"), attrgetter("dtype")
# Type checkers see a possible symbol, but tensors with values have none.
_storage_offset: Any = torch.Tensor.storage_offset
_from_dlpack = torch._C._from_dlpack
_to_dlpack = torch._C._to_dlpack
# C functions, if this torch has them: they need no capsule, and no call of Python, for each tensor.
_exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


# Functions that return the number of active modes, and one mode. Every opened handle calls them.
_modes, _mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE

# The classes whose memory has the tensor's values.
PLAIN_CLASSES = {torch.Tensor, torch.nn.Parameter}


def not_plain(tensor: torch.Tensor) -> str | None:
    """Return why a tensor has no bytes to store, and after a colon the remedy. None if it has bytes."""
    if _dispatch(type(tensor)) is not _dispatch(torch.Tensor):
        return _wrapped(tensor)
    if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        return f"{type(tensor).__name__} has no values yet: run the module once before saving"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype}) has no dtype in a file: save `.int_repr()` and its scale"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} has no plain memory: save `.to_dense()`"
    if tensor.is_nested:
        return "a nested tensor has no shape of its own: save the results of `.unbind()`"
    if tensor.is_meta:
        return "a meta tensor has no values: load or initialise it before saving"
    if _functorch.is_functorch_wrapped_tensor(tensor):
        kind = "a tensor inside of a transform (vmap, grad, jvp, functionalize)"
        return f"{kind} has no values of its own: return it, and save the result of the transform"
    if tensor._is_zerotensor():
        return "an efficient zero tensor has no memory: make a plain one by `+ torch.zeros(())`"
    return _without_memory(tensor)


def _without_memory(tensor: torch.Tensor) -> str | None:
    """Return why the storage does not hold the tensor, or None. Storages can be freed and shrunk."""
    is_cpu = tensor.device.type == "cpu"
    if tensor.numel() == 0:
        return None
    try:
        storage = tensor.untyped_storage()
        found, is_null = storage.nbytes(), is_cpu and storage.data_ptr() == 0
    except (NotImplementedError, RuntimeError):
        # Tensors of some devices have no storage. Their values are fetched as torch fetches them.
        return "it has no storage, so there are no values" if is_cpu else None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    if found >= needed and not is_null:
        return None
    nbytes = f"has {0 if is_null else found} of the {needed} bytes that it needs"
    why = "sharded modules free what is not in use: gather it first"
    return f"its memory is gone: its storage was freed or shrunk, and {nbytes} ({why})"


def _dispatch(kind: Any) -> object:
    """Return a class's handler of operations: torch's own if the tensor's memory has its values."""
    return kind.__torch_dispatch__


def _wrapped(tensor: Any) -> str:
    """Return the remedy for a tensor whose class stores its values elsewhere."""
    kind: Any = type(tensor)
    if hasattr(tensor, "full_tensor"):
        way_out = "or save `.full_tensor()`, or `.to_local()` in a file per rank"
        return f"{kind.__name__} is one part of a tensor: call `save_sharded` on all ranks, {way_out}"
    if kind.__module__.startswith("torch._subclasses.fake"):
        return f"{kind.__name__} has no values: leave the mode that made it, and load or initialise it"
    if kind.__module__.partition(".")[0] == "torchao":
        flattening = "torchao.prototype.safetensors.safetensors_support.flatten_tensor_state_dict"
        way_out = f"save what `{flattening}` gives, or `.dequantize()`"
        return f"{kind.__name__} of torchao keeps its values elsewhere: {way_out}"
    if hasattr(tensor, "__tensor_flatten__"):
        inner = ", ".join(f"`.{name}`" for name in tensor.__tensor_flatten__()[0])
        return f"{kind.__name__} keeps its values elsewhere: save the tensors that it is made of, {inner}"
    return f"{kind.__name__} keeps its values elsewhere: save the plain tensors that it is made of"


def in_transform() -> bool:
    """Return whether a transform (vmap, grad, jvp, functionalize) is active."""
    return _functorch.peek_interpreter_stack() is not None


def is_differentiated() -> bool:
    """Return whether a transform is active in which torch refuses writes to tensors from outside."""
    kinds = _functorch.TransformType.Grad, _functorch.TransformType.Jvp
    return in_transform() and any(level.key() in kinds for level in _functorch.get_interpreter_stack())


def undisturbed() -> AbstractContextManager[object]:
    """Return a context in which no mode, default device or transform changes torch's operations."""
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(torch._C._DisableTorchDispatch())
    if in_transform():
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        stack.enter_context(temporarily_clear_interpreter_stack())
    return stack


def fake_mode() -> Any:
    """Return the active `FakeTensorMode`, or None."""
    # Counted first: usually no mode is active, and the count takes half the time of the search.
    return _mode(_FAKE) if _modes() else None


def is_here(device: Any) -> bool:
    """Return whether `device` is the CPU, where tensors are read, and no `FakeTensorMode` is active."""
    return (device is None or (isinstance(device, str) and device == "cpu")) and fake_mode() is None


def faked(tensor: torch.Tensor, device: torch.device, mode: Any) -> torch.Tensor:
    """Return a tensor of `mode` in place of one with values."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def fetcher(tensor: torch.Tensor) -> Callable[[int, int], Any]:
    """Return a function that copies the bytes of `tensor` from `begin` to `end`, in C order, into a capsule.

    Only these bytes are copied to the CPU, and only for them a lazy conjugation or negation is resolved. Any
    thread may call the function. The values include the work that is queued on the caller's current stream
    now, and no later work.
    """
    itemsize = tensor.itemsize
    with undisturbed():
        way = link(tensor.device)
        since = None if way is None else way.mark()

    def fetch(begin: int, end: int) -> Any:
        first = begin // itemsize
        elements = partial(_packed, tensor, first, -(-end // itemsize))
        with undisturbed():
            packed = elements().cpu() if way is None else way.pull(since, elements)
            plain = packed.view(torch.uint8)
            return torch._C._to_dlpack(plain[begin - first * itemsize : end - first * itemsize])

    return fetch


def _packed(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return the elements from `begin` to `end`, contiguous, as they are stored."""
    part = _elements(tensor, begin, end)
    # torch copies its rarer dtypes as bytes only, and conjugates none of them.
    if part.itemsize == 1:
        part = part.view(torch.uint8)
    packed = part.resolve_conj().resolve_neg().contiguous()
    # A single element counts as contiguous with any stride, but only with stride 1 can it be viewed as
    # another dtype.
    return packed.as_strided(packed.shape, (1,))


def _elements(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return the elements from `begin` to `end`, flat. At most their rows are copied."""
    if tensor.is_contiguous():
        return tensor.view(-1)[begin:end]
    parts = [_part(tensor, box) for box in boxes(tuple(tensor.shape), begin, end)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    part = tensor[box.slices]
    if part.itemsize == 1:
        part = part.view(torch.uint8)
    return part.reshape(-1)[box.within]


def storable(name: str, tensor: torch.Tensor) -> str:
    """Return the code of the tensor's dtype. Raises `SaveError` if it cannot be stored."""
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor(name, tensor, "a torch.Tensor")
    reason = not_plain(tensor)
    if reason is not None:
        raise located(SaveError, f"{reason}", code="no-values", tensor=name, found=type(tensor).__name__)
    code = _CODES.get(tensor.dtype)
    if code is None:
        reason = f"the format has no dtype for {tensor.dtype}{ANOTHER_COMPLEX if tensor.is_complex() else ''}"
        raise located(SaveError, reason, code="unsupported-dtype", tensor=name, found=str(tensor.dtype))
    return code


def refuse_strided(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `SaveError` if a tensor is not contiguous in C order. The message begins like upstream's."""
    values = tensors.values()
    # With `map`, so that no Python function runs per tensor if all are contiguous.
    if (
        set(map(type, values)) <= PLAIN_CLASSES
        and set(map(_layout, values)) <= {torch.strided}
        and all(map(torch.Tensor.is_contiguous, values))
    ):
        return
    for name, tensor in tensors.items():
        if not_plain(tensor) is None and not tensor.is_contiguous():
            message = (
                f"You are trying to save a non contiguous tensor: {_quoted(name)} of shape "
                f"{list(tensor.shape)} and strides {list(tensor.stride())}: pack it with `.contiguous()`, or "
                'save it by `ingot.torch` with contiguous="copy"'
            )
            raise SaveError(message, code="not-contiguous", tensor=name, found=tensor.stride())


def _plain_ones(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with memory of their own. `payload` refuses the others with a reason."""
    return {name: tensor for name, tensor in tensors.items() if not_plain(tensor) is None}


def _tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a new dict, whose values must be tensors."""
    own = named(tensors, ValueError, "torch.Tensor")
    for kind in set(map(type, own.values())):
        if not issubclass(kind, torch.Tensor):
            name = next(name for name, value in own.items() if type(value) is kind)
            raise ValueError(f"tensor {_quoted(name)}: expected a torch.Tensor, found {kind.__name__}")
    return own


def _places(tensors: list[torch.Tensor]) -> tuple[list[Any], list[int]] | None:
    """Return the storages and positions of these tensors, or None if one is a lazy negation.

    The position is the number of elements in the storage before the tensor. The storage is needed because it
    may have been freed or shrunk, which DLPack does not report; nor does it report lazy negation. Uses `map`,
    so that no Python function runs per tensor.
    """
    if any(map(torch.Tensor.is_neg, tensors)):
        return None
    return list(map(torch.Tensor.untyped_storage, tensors)), list(map(_storage_offset, tensors))


def _are_stored(tensors: list[torch.Tensor]) -> bool:
    """Return whether files have the dtypes of these tensors, and none is a lazy conjugate."""
    return set(map(_dtype, tensors)) <= _CODES.keys() and not any(map(torch.Tensor.is_conj, tensors))


@cache
def _crosses_by_dlpack(dtype: torch.dtype) -> bool:
    """Return whether this torch exports and imports `dtype` by DLPack.

    The result is cached, so it must not depend on the context: a default device, a mode.
    """
    with undisturbed():
        try:
            return _from_dlpack(_to_dlpack(torch.empty(1, dtype=dtype, device="cpu"))).dtype is dtype
        except (RuntimeError, BufferError):
            return False


def _resolve(code: str) -> Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor] | None:
    """Return None if DLPack has the dtype, otherwise a function that makes the tensor from bytes."""
    dtype = DTYPES.get(code)
    if dtype is None:
        raise lacks(f"torch {torch.__version__}", code)
    if _crosses_by_dlpack(dtype):
        return None

    def finish(raw: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        with undisturbed():
            return raw.view(dtype).reshape(shape)

    return finish


_export = _native.Export.dlpack([*PLAIN_CLASSES], _places, _are_stored, _to_dlpack, _exchange)


wrap: _native.Wrap = _native.Wrap.dlpack(_from_dlpack, _resolve, _exchange, strided=True)


def at(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Return ``tensor[index]``."""
    if tensor.dtype is DTYPES.get("F4"):
        # A packed tensor would be indexed by bytes, not by elements.
        raise IndexError("F4 can only be indexed by ints, slices, None, ... and one list: expected these")
    with undisturbed():
        return tensor[index]


# Copies for background saves.


def copied(tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """Return copies in C order, on their devices or on the ``"host"``; unstorable tensors as they are."""
    with undisturbed(), torch.no_grad():
        kept = {name for name, tensor in tensors.items() if not_plain(tensor) is not None}
        copies = (
            (name, tensor if name in kept else _copy(tensor.detach(), where))
            for name, tensor in tensors.items()
        )
        return dict(copies)


def _copy(tensor: torch.Tensor, where: str) -> torch.Tensor:
    if tensor.is_cpu or where == "device":
        return tensor.clone(memory_format=torch.contiguous_format)
    # Through pinned memory for one piece at a time.
    memory, fetch = torch.empty(tensor.nbytes, dtype=torch.uint8), fetcher(tensor)
    for begin in range(0, tensor.nbytes, pieces.PIECE_NBYTES):
        end = min(begin + pieces.PIECE_NBYTES, tensor.nbytes)
        memory[begin:end] = torch.utils.dlpack.from_dlpack(fetch(begin, end))
    return memory.view(tensor.dtype).view(tensor.shape)


def as_of_now(tensors: Iterable[torch.Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager in which a thread waits for the work queued so far, and no later work."""
    ways = [link(device) for device in {tensor.device for tensor in tensors}]
    marks = [(way, way.mark()) for way in ways if way is not None]

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as streams:
            for way, since in marks:
                streams.enter_context(way.aside(since))
            yield

    return entered
