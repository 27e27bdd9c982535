"""Which tensors have bytes that a file can hold, and how torch is asked for them in whatever mode it is."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any


# How many modes are active, and one of them: looked up once, since every handle that is opened asks.
_modes, _mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE

# Those whose values are where torch looks for them.
PLAIN_CLASSES = {torch.Tensor, torch.nn.Parameter}


def not_plain(tensor: torch.Tensor) -> str | None:
    """Why there are no bytes behind this tensor that could be stored; None where there are."""
    if _dispatch(type(tensor)) is not _dispatch(torch.Tensor):
        return _wrapped(tensor)
    if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        return f"{type(tensor).__name__} has no values yet: run the module once before saving"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype}) has no dtype in a file: save `.int_repr()` and its scale"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} cannot be stored: save `.to_dense()`"
    if tensor.is_nested:
        return "a nested tensor has no shape of its own: save what `.unbind()` gives"
    if tensor.is_meta:
        return "a meta tensor has no values: load or initialise it before saving"
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return (
            "a tensor inside of a transform (vmap, grad, jvp, functionalize) has no values of its own: "
            "return it, and save what the transform gives"
        )
    if tensor._is_zerotensor():
        return "an efficient zero tensor has no memory: make a plain one by `+ torch.zeros(())`"
    return _without_memory(tensor)


def _without_memory(tensor: torch.Tensor) -> str | None:
    """Why its storage does not hold the tensor; None where it does: storages can be freed and shrunk."""
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
    return (
        f"its memory is gone: its storage was freed or shrunk, and has {0 if is_null else found} of the "
        f"{needed} bytes that it needs (sharded modules free what is not in use: gather it first)"
    )


def _dispatch(kind: Any) -> object:
    """What a class does with operations: torch's own where its values are where torch looks for them."""
    return kind.__torch_dispatch__


def _wrapped(tensor: Any) -> str:
    """The way out for a tensor whose class keeps its values elsewhere."""
    kind: Any = type(tensor)
    if hasattr(tensor, "full_tensor"):
        return (
            f"{kind.__name__} is one part of a tensor: save `.full_tensor()`, "
            "or `.to_local()` in a file per rank"
        )
    if kind.__module__.startswith("torch._subclasses.fake"):
        return f"{kind.__name__} has no values: leave the mode that made it, and load or initialise it"
    if kind.__module__.partition(".")[0] == "torchao":
        return (
            f"{kind.__name__} of torchao keeps its values elsewhere: save what "
            "`torchao.prototype.safetensors.safetensors_support.flatten_tensor_state_dict` gives, "
            "or `.dequantize()`"
        )
    if hasattr(tensor, "__tensor_flatten__"):
        inner = ", ".join(f"`.{name}`" for name in tensor.__tensor_flatten__()[0])
        return f"{kind.__name__} keeps its values elsewhere: save the tensors that it is made of, {inner}"
    return f"{kind.__name__} keeps its values elsewhere: save the plain tensors that it is made of"


def in_transform() -> bool:
    """Whether a transform (vmap, grad, jvp, functionalize) is active."""
    return _functorch.peek_interpreter_stack() is not None


def undisturbed() -> AbstractContextManager[object]:
    """Has torch do what it does by itself, whatever mode, default device or transform is active."""
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(torch._C._DisableTorchDispatch())
    if in_transform():
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        stack.enter_context(temporarily_clear_interpreter_stack())
    return stack


def fake_mode() -> Any:
    """The `FakeTensorMode` that is active, if one is."""
    # Nearly always no mode is, and their number is asked in half the time.
    return _mode(_FAKE) if _modes() else None


def faked(tensor: torch.Tensor, device: torch.device, mode: Any) -> torch.Tensor:
    """A tensor of `mode` in place of one with values."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
