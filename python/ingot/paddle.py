"""Load and save Paddle tensors.

>>> import paddle
>>> from ingot.paddle import load_file, save_file
>>> save_file({"weight": paddle.ones([4, 3])}, "weights.safetensors")
>>> list(load_file("weights.safetensors")["weight"].shape)
[4, 3]

``device`` is what `paddle.Tensor.to` takes: ``"cpu"``, ``"gpu:0"`` and the like, or a place such as
`paddle.CPUPlace`; None is the CPU. On the CPU, tensors of a mapped file are
copy-on-write views: you may write to them, and the file does not change. Paddle has no dtype for ``U16``, and
few operations for ``U32`` and ``U64``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ingot._base.text import located

from . import _native
from ._adapters.face import Whole
from ._base.dtypes import NAMES
from ._base.frameworks import lacks, missing, not_a_tensor, unknown_device
from .errors import SaveError

try:
    import paddle
except ModuleNotFoundError as error:
    raise missing("paddle", error) from None

from paddle.utils.dlpack import from_dlpack, to_dlpack
from paddle.version import full_version as VERSION

from . import numpy as arrays
from ._write.save import Box
from .numpy import Array

__all__ = ["load", "load_file", "save", "save_file"]

# The dtypes of the installed Paddle. A missing dtype only affects tensors of that dtype. U16 is always
# missing: Paddle's uint16 is bfloat16.
DTYPES = {
    code: getattr(paddle, name) for code, name in NAMES.items() if code != "U16" and hasattr(paddle, name)
}
_STORED = {dtype: code for code, dtype in DTYPES.items()}
# The dtypes that Paddle can slice. On other devices than the CPU, tensors of other dtypes are copied whole.
_CUT = {dtype for code, dtype in DTYPES.items() if code not in ("U32", "U64")}
# By element size.
_INTEGERS = {1: paddle.uint8, 2: paddle.int16, 4: paddle.int32, 8: paddle.int64}


def _resolve(code: str) -> None:
    """Return None: Paddle imports all its dtypes by DLPack."""
    if code not in DTYPES:
        raise lacks(f"paddle {VERSION}", code)


wrap: _native.Wrap = _native.Wrap.dlpack(from_dlpack, _resolve)


def mover(device: Any) -> Callable[[paddle.Tensor], paddle.Tensor] | None:
    """Return a function that moves a tensor to `device`, or None for the CPU."""
    if device is None:
        return None
    try:
        place = paddle.empty([0]).to(device).place
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise unknown_device("paddle", device, ["cpu", *paddle.device.get_available_device()]) from error
    return None if place.is_cpu_place() else lambda tensor: tensor.to(device)


def at(tensor: paddle.Tensor, index: Any) -> paddle.Tensor:
    """Return ``tensor[index]``."""
    return tensor[index]


def payload(name: str, tensor: Any) -> Any:
    """Return `tensor` as a capsule, or a function for its bytes if it is not on the CPU. Copies nothing."""
    if not isinstance(tensor, paddle.Tensor):
        raise not_a_tensor(name, tensor, "a paddle.Tensor")
    reason = _not_plain(tensor)
    if reason is not None:
        raise located(SaveError, f"{reason}", code="no-values", tensor=name, found=type(tensor).__name__)
    if tensor.dtype not in _STORED:
        reason = f"the format has no dtype for {tensor.dtype}"
        raise located(SaveError, reason, code="unsupported-dtype", tensor=name, found=str(tensor.dtype))
    plain = tensor.detach()
    if plain.place.is_cpu_place():
        return to_dlpack(plain)
    if plain.dtype not in _CUT:
        return to_dlpack(plain.cpu().contiguous())
    return _in_pieces(name, plain)


def _in_pieces(name: str, tensor: paddle.Tensor) -> tuple[str, tuple[int, ...], Any]:
    """Return the code, the shape, and a function that copies the bytes to the CPU."""
    size = tensor.element_size()
    # Few kernels know every dtype.
    integer = _INTEGERS[size]

    def pull(box: Box) -> Array:
        part: Array = tensor[box.slices].contiguous().cpu().view(integer).numpy()
        return part

    _, shape, fetch = arrays.payload_in_parts(name, f"u{size}", tuple(tensor.shape), pull)
    return _STORED[tensor.dtype], shape, fetch


def _not_plain(tensor: paddle.Tensor) -> str | None:
    """Return why `tensor` has no values to store and the remedy, or None if it has."""
    # An empty tensor needs no values.
    if not tensor._is_initialized() and 0 not in tensor.shape:
        return "it was never initialised"
    if tensor.is_dist():
        return "it is a part of one tensor on many devices: save `paddle.distributed.unshard_dtensor(tensor)`"
    if not tensor.is_dense():
        return "it is sparse: save `.to_dense()`, or its parts"
    return None


_whole: Whole[paddle.Tensor] = Whole(wrap, mover, at, payload)
load = _whole.load
load_file = _whole.load_file
save = _whole.save
save_file = _whole.save_file


def __dir__() -> list[str]:
    return __all__
