"""Load and save mlx arrays.

>>> import mlx.core as mx
>>> from ingot.mlx import load_file, save_file
>>> save_file({"weight": mx.ones((4, 3))}, "weights.safetensors")
>>> load_file("weights.safetensors")["weight"].shape
(4, 3)

mlx keeps arrays in memory that the CPU and the GPU share, so ``device`` moves nothing: ``"cpu"``, ``"gpu"``
and mlx's own devices are accepted if mlx has them. Arrays are copies, since mlx cannot use memory of others.
It has neither 8-bit nor 4-bit floats, and computes with ``F64`` on the CPU only.
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
    import mlx.core as mx
except ModuleNotFoundError as error:
    raise missing("mlx", error) from None


__all__ = ["load", "load_file", "save", "save_file"]

DTYPES = {code: getattr(mx, name) for code, name in {**NAMES, "BOOL": "bool_"}.items() if hasattr(mx, name)}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
# Integer dtypes by element size: bytes pass as integers, since the buffer protocol has no code for some
# dtypes.
_INTEGERS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def _resolve(code: str) -> Callable[[mx.array, tuple[int, ...]], mx.array] | None:
    """Return None if `mx.array` keeps the dtype, otherwise a function that makes the array from bytes."""
    if code not in DTYPES:
        raise lacks("mlx", code)
    # `mx.array` makes F32 of F64.
    return _doubles if code == "F64" else None


def _doubles(raw: mx.array, shape: tuple[int, ...]) -> mx.array:
    # On the CPU, since GPUs have no F64, and immediately, since mlx would defer it to the first use.
    array = mx.reshape(mx.view(raw, mx.float64, stream=mx.cpu), shape, stream=mx.cpu)
    mx.eval(array)
    return array


wrap: _native.Wrap = _native.Wrap.dlpack(mx.array, _resolve)


def mover(device: Any) -> None:
    """Check `device`, and return None: every device of mlx can use all arrays."""
    there = [kind for kind in (mx.cpu, mx.gpu) if mx.is_available(kind)]
    known = [None, *(one for kind in there for one in (kind, mx.Device(kind), kind.name))]
    if device not in known:
        raise unknown_device("mlx", device, [kind.name for kind in there])


def narrowing(device: Any) -> Callable[[mx.array], mx.array]:
    """Return a mover that converts F64 to F32, as upstream does; for `ingot.compat`."""
    mover(device)
    return _narrowed


def _narrowed(array: mx.array) -> mx.array:
    return array.astype(mx.float32, stream=mx.cpu) if array.dtype == mx.float64 else array


def at(array: mx.array, index: Any) -> mx.array:
    """Return ``array[index]``. mlx does not check the range of numbers in an index array."""
    return array[index]


def payload(name: str, array: Any) -> tuple[str, tuple[int, ...], Any]:
    """Return the code, the shape and a buffer of `array`. Nothing is copied."""
    if not isinstance(array, mx.array):
        raise not_a_tensor(name, array, "an mx.array", "mlx.utils.tree_flatten(tree, destination={})")
    code = _CODES.get(array.dtype)
    if code is None:
        reason = f"the format has no dtype for {array.dtype}"
        raise located(SaveError, reason, code="unsupported-dtype", tensor=name, found=str(array.dtype))
    # On the CPU, since GPUs have no F64.
    plain = array if array.ndim else mx.reshape(array, (1,), stream=mx.cpu)
    try:
        # mlx computes values lazily.
        values = memoryview(mx.view(plain, _INTEGERS[array.itemsize], stream=mx.cpu))
    except RuntimeError as error:
        reason = f"mlx has no values for it, as inside mx.compile and mx.vmap: {error}"
        raise located(SaveError, reason, code="no-values", tensor=name, found=str(error)) from error
    return code, array.shape, values


_whole: Whole[mx.array] = Whole(wrap, mover, at, payload)
load = _whole.load
load_file = _whole.load_file
save = _whole.save
save_file = _whole.save_file


def __dir__() -> list[str]:
    return __all__
