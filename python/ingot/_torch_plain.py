"""Which tensors have bytes that a file can hold."""

from __future__ import annotations

import torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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
    return None


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
