"""Load and save jax arrays.

``device`` is a `jax.Device`, a `jax.sharding.Sharding`, a platform such as ``"cpu"``, one of its devices
such as ``"gpu:1"``, the number of a device, or None for jax's default device. Tensors go there straight
from the file. On the CPU, those that start at a multiple of 64 bytes in memory, as jax asks, are views of
the file where it is mapped; the others are copied.

64-bit dtypes (``F64``, ``I64``, ``U64``) need ``jax_enable_x64``. Without it jax would make them 32-bit
ones, so they are refused, each tensor by itself. ``F4`` is unpacked, one element to a byte.
"""

from __future__ import annotations

from . import _native
from ._dtypes import F4_LOOSE, NAMES
from ._face import Whole
from ._frameworks import lacks, missing, not_a_tensor, unknown_device
from ._text import _quoted
from .errors import DtypeError, SaveError

try:
    import jax
except ModuleNotFoundError as error:
    raise missing("jax", error, "flax") from None

import numpy
from jax import numpy as jnp

from . import numpy as arrays

# Where newer releases of jax have it, and where older ones do.
if hasattr(jax, "enable_x64"):
    _64_bits = jax.enable_x64
else:
    from jax.experimental import enable_x64 as _64_bits  # type: ignore[no-redef]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ._save import Box

__all__ = ["load", "load_file", "save", "save_file"]

# Those that this jax has. One that it lacks blocks the tensors of that dtype only.
DTYPES = {code for code, name in {**NAMES, "BOOL": "bool_", "F4": F4_LOOSE}.items() if hasattr(jnp, name)}


def _resolve(code: str) -> Any:
    """NumPy's dtype where jax has it too: every jax array begins as a NumPy view of the file."""
    if code not in DTYPES:
        raise lacks(f"jax {jax.__version__}", code)
    return arrays._resolve(code)


wrap: _native.Wrap = _native.Wrap.buffer(numpy.ndarray, _resolve, strided=True)


def mover(device: Any) -> Callable[[arrays.Array], jax.Array]:
    """The function that makes a jax array on `device` of a NumPy view."""
    put = narrowing(device)

    def put_whole(array: arrays.Array) -> jax.Array:
        # Asked each time, since 64 bits can be switched at any time, and for a `with` block only.
        if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            raise DtypeError(
                f"jax without 64 bits would make {array.dtype} a 32-bit dtype: "
                'jax.config.update("jax_enable_x64", True) keeps it',
                code="dtype-not-in-framework",
            )
        return put(array)

    return put_whole


def narrowing(device: Any) -> Callable[[arrays.Array], jax.Array]:
    """As `mover`, with 32 bits for 64 where jax has no more. For `ingot.compat`: upstream does so."""
    target = _target(device)

    def put(array: arrays.Array) -> jax.Array:
        moved: jax.Array = jax.device_put(array, target)
        return moved

    return put


def _target(device: Any) -> Any:
    """What `jax.device_put` takes for `device`."""
    if device is None or isinstance(device, (jax.Device, jax.sharding.Sharding)):
        return device
    platform, _, number = device.partition(":") if isinstance(device, str) else (None, "", str(device))
    try:
        # By text, so that -1 and True are no numbers of devices.
        there = {str(place): one for place, one in enumerate(jax.local_devices(backend=platform))}
        # jax takes "" for its default platform.
        return there["" if platform == "" else number or "0"]
    except (RuntimeError, KeyError) as error:
        choices = [f"{one.platform}:{place}" for place, one in enumerate(jax.local_devices())]
        raise unknown_device("jax", device, ["cpu", *choices]) from error


def at(array: arrays.Array, index: Any) -> arrays.Array:
    """`array[index]` by NumPy's rules: jax's own give the nearest element for one that is not there."""
    return arrays.at(array, index)


def payload(name: str, array: Any) -> tuple[str, tuple[int, ...], Any]:
    """As NumPy's `payload`, for what jax holds: of what is not on one CPU, with a function for the bytes."""
    if isinstance(array, jax.Array):
        reason = _not_plain(array)
        if reason is not None:
            raise SaveError(
                f"tensor {_quoted(name)}: {reason}", code="no-values", tensor=name, found=str(array.dtype)
            )
        devices = array.devices()
        if len(devices) > 1 or next(iter(devices)).platform != "cpu":
            return arrays.payload_in_parts(name, array.dtype, array.shape, _puller(array))
    elif not isinstance(array, (numpy.ndarray, numpy.generic)):
        raise not_a_tensor(name, array, "a jax.Array", 'flax.traverse_util.flatten_dict(tree, sep=".")')
    return arrays.payload(name, numpy.asarray(array))


def _puller(array: jax.Array) -> Callable[[Box], arrays.Array]:
    """The function that takes a box of `array` to the CPU.

    Not the array itself: jax keeps the copy that it makes of one for NumPy as long as it keeps the array. And
    each device's part by itself: a slice of all of them would gather the array on every device first.
    """
    # Of what is on several devices, once.
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]

    def pull(box: Box) -> arrays.Array:
        pulled = numpy.empty(box.sizes, array.dtype)
        for shard in shards:
            _pull(shard, box, pulled)
        return pulled

    return pull


def _pull(shard: jax.Shard, box: Box, into: arrays.Array) -> None:
    """Copy what `shard` has of `box`."""
    offsets = [part.start or 0 for part in shard.index]
    begins = [max(pair) for pair in zip(offsets, box.starts, strict=True)]
    ends = [
        min(offset + size, start + taken)
        for offset, size, start, taken in zip(offsets, shard.data.shape, box.starts, box.sizes, strict=True)
    ]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    if any(size <= 0 for size in sizes):
        return
    place = tuple(slice(b - s, e - s) for b, e, s in zip(begins, ends, box.starts, strict=True))
    starts = [begin - offset for begin, offset in zip(begins, offsets, strict=True)]
    # The thread that asks has the default of 32 bits, whatever the one that saves has chosen.
    with _64_bits(True):
        into[place] = jax.lax.dynamic_slice(shard.data, starts, sizes)


def _not_plain(array: jax.Array) -> str | None:
    """Why `array` has no values to store, with the way out."""
    if isinstance(array, jax.core.Tracer):
        return "inside jax.jit, jax.grad and the like arrays have no values: save outside of them"
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return f"{array.dtype} is no dtype of numbers: save jax.random.key_data(key)"
    if array.is_deleted():
        return "the array was deleted or donated"
    if not array.is_fully_addressable:
        return "parts of it are with other processes: save one file per process, or gather it first"
    return None


_whole: Whole[jax.Array] = Whole(wrap, mover, at, payload)
load = _whole.load
load_file = _whole.load_file
save = _whole.save
save_file = _whole.save_file


def __dir__() -> list[str]:
    return __all__
