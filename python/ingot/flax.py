"""Load and save jax arrays.

>>> from jax import numpy as jnp
>>> from ingot.flax import load_file, save_file
>>> save_file({"weight": jnp.ones((4, 3))}, "weights.safetensors")
>>> load_file("weights.safetensors")["weight"].shape
(4, 3)

``device`` is a `jax.Device`, a `jax.sharding.Sharding`, a platform such as ``"cpu"``, one of its devices
such as ``"gpu:1"``, the number of a device, or None for jax's default device. Tensors go there straight
from the file. Of a sharding each device is given its own part, and what several devices have is read once;
of a sharding over many processes each reads the parts of its devices. On the CPU, tensors at a
multiple of 64 bytes in a mapped file are views of it, as jax requires; the others are copied.

64-bit dtypes (``F64``, ``I64``, ``U64``) need ``jax_enable_x64``. Without it jax would convert them to 32
bits, so each such tensor is rejected. ``F4`` is unpacked, one element to a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from math import prod
from typing import Any

from ingot._base.text import located

from . import _native
from ._adapters.face import Whole
from ._adapters.pieces import Piece, batches, taken, within
from ._base.dtypes import F4_LOOSE, NAMES
from ._base.frameworks import lacks, missing, not_a_tensor, unknown_device
from ._base.text import _escaped
from ._read.door import Reads
from ._read.moves import Carrier, about
from ._read.select import Wanted
from ._state.face import States
from ._write import save as _save
from .errors import DtypeError, OptionError, SaveError

try:
    import jax
except ModuleNotFoundError as error:
    raise missing("jax", error, "flax") from None

import numpy
from jax import numpy as jnp

from . import numpy as arrays
from ._adapters.pieces import Box
from ._native import Checkpoint
from ._read.moves import Move

# The module in newer and in older releases of jax.
if hasattr(jax, "enable_x64"):
    _64_bits = jax.enable_x64
else:
    from jax.experimental import enable_x64 as _64_bits  # type: ignore[no-redef]


__all__ = ["load", "load_file", "load_state", "save", "save_file", "save_state"]

Dtype = numpy.dtype[Any]
Boxes = dict[jax.Device, Box]

# The dtypes of the installed jax. A missing dtype only affects tensors of that dtype.
DTYPES = {code for code, name in {**NAMES, "BOOL": "bool_", "F4": F4_LOOSE}.items() if hasattr(jnp, name)}


def _resolve(code: str) -> Any:
    """Return NumPy's dtype if jax has it too. A jax array begins as a NumPy view of the file."""
    if code not in DTYPES:
        raise lacks(f"jax {jax.__version__}", code)
    return arrays._resolve(code)


wrap: _native.Wrap = _native.Wrap.buffer(numpy.ndarray, _resolve, strided=True)


def mover(device: Any) -> Move:
    """Return a mover that makes jax arrays on `device`."""
    return _placed(device, _keep_64_bits)


def narrowing(device: Any) -> Move:
    """Return `mover` with 32 bits for 64 if jax has 64 bits off, as upstream does; for `ingot.compat`."""
    return _placed(device, None)


def _placed(device: Any, check: Callable[[Dtype], None] | None) -> Move:
    target = _target(device)
    if target is None or (isinstance(target, jax.Device) and _is_host(target)):
        # Arrays on the host are used in place, so no copy is made.
        return partial(_put, target, check)
    if isinstance(target, jax.sharding.Sharding):
        return Spread(target, check)
    return Spread(jax.sharding.SingleDeviceSharding(target), check)


def _put(target: Any, check: Callable[[Dtype], None] | None, array: arrays.Array) -> jax.Array:
    if check is not None:
        check(array.dtype)
    moved: jax.Array = jax.device_put(array, target)
    return moved


def _keep_64_bits(dtype: Dtype) -> None:
    # Checked each time, since 64 bits can be switched at any time, also for a `with` block.
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        way_out = 'jax.config.update("jax_enable_x64", True) keeps it'
        message = f"jax without 64 bits would make {dtype} a 32-bit dtype: {way_out}"
        raise DtypeError(message, code="dtype-not-in-framework")


def _is_host(device: jax.Device) -> bool:
    return bool(device.platform == "cpu")


class Spread(Carrier):
    """Reads arrays onto the devices of a sharding. Each device gets only its own part."""

    __slots__ = ("_check", "_sharding")

    def __init__(self, sharding: jax.sharding.Sharding, check: Callable[[Dtype], None] | None) -> None:
        self._sharding = sharding
        self._check = check

    def __call__(self, array: arrays.Array) -> jax.Array:
        return _put(self._sharding, self._check, array)

    def read(self, checkpoint: Checkpoint, wanted: Wanted, reads: Reads) -> list[jax.Array]:
        """Return the wanted arrays. Host memory holds each part once, and at most two batches."""
        outlines = checkpoint.outlines(wanted, wrap)
        dtypes = [_dtype(code) for code, _ in outlines]
        facts = zip(wanted.names, dtypes, (shape for _, shape in outlines), strict=True)
        homes = [self._homes(checkpoint, *of_one) for of_one in facts]
        ranks = range(len(homes))
        each = (
            _cut(checkpoint, wanted, rank, outlines[rank][1], dtypes[rank], homes[rank]) for rank in ranks
        )
        cut = [*chain.from_iterable(each)]
        report = _reporting(reads, checkpoint.parts_nbytes(wanted), sum(piece.nbytes for piece in cut))
        shards: list[dict[jax.Device, jax.Array]] = [{} for _ in outlines]
        under_way: list[jax.Array] = []
        for batch in batches(cut):
            found = _values(checkpoint, wanted, batch, dtypes, reads.threads, self._is_host())
            # Only now, so that the copies of one batch run while the next is read.
            jax.block_until_ready(under_way)
            under_way = []
            for piece, values in zip(batch, found, strict=True):
                for device, box in homes[piece.rank].items():
                    if box == piece.place:
                        shard = jax.device_put(values, self._alone(device))
                        shards[piece.rank][device] = shard
                        under_way.append(shard)
            report(batch)
        jax.block_until_ready(under_way)
        rows = zip((shape for _, shape in outlines), shards, homes, dtypes, strict=True)
        ready = ((shape, [own[device] for device in boxes], dtype) for shape, own, boxes, dtype in rows)
        return [self._assembled(*row) for row in ready]

    def _assembled(self, shape: tuple[int, ...], shards: list[jax.Array], dtype: Any) -> jax.Array:
        # Without a shard only the argument has the dtype. Older versions of jax need a shard, and have no
        # dtype argument.
        lacking = {} if shards else {"dtype": dtype}
        return jax.make_array_from_single_device_arrays(shape, self._sharding, shards, **lacking)

    def _homes(self, checkpoint: Checkpoint, name: str, dtype: Dtype, shape: tuple[int, ...]) -> Boxes:
        """Return the box of one array for each device of this process."""
        try:
            if self._check is not None:
                self._check(dtype)
            indices = self._sharding.addressable_devices_indices_map(shape)
        except DtypeError as error:
            raise about(checkpoint, name, error) from None
        except ValueError as error:
            line = _escaped(str(error).partition("\n")[0])
            reason = f"its shape {list(shape)} does not fit the sharding: {line}"
            raise located(
                OptionError, reason, code="no-device", path=checkpoint.path, tensor=name, found=self._sharding
            ) from error
        whole = [slice(None)] * len(shape)
        found = {}
        for device, index in indices.items():
            pairs = zip(index or whole, shape, strict=True)
            found[device] = tuple(slice(*part.indices(size)[:2]) for part, size in pairs)
        return found

    def _is_host(self) -> bool:
        return all(map(_is_host, self._sharding.addressable_devices))

    def _alone(self, device: jax.Device) -> jax.sharding.Sharding:
        return jax.sharding.SingleDeviceSharding(device, memory_kind=self._sharding.memory_kind)


def _cut(
    checkpoint: Checkpoint, wanted: Wanted, rank: int, shape: tuple[int, ...], dtype: Dtype, boxes: Boxes
) -> Iterator[Piece]:
    """Return the parts of one array, each once for all devices that hold it."""
    asked = None if wanted.indices is None else wanted.indices[rank]
    along = taken(asked, checkpoint.info(wanted.names[rank]).shape)
    # Slices cannot be looked up in a set before Python 3.12.
    seen: list[Box] = []
    for box in boxes.values():
        if box in seen:
            continue
        seen.append(box)
        sizes = tuple(cut.stop - cut.start for cut in box)
        # Dimensions of size 1 are taken whole, and may be those that the index adds.
        cuts = iter([cut for cut, size in zip(box, shape, strict=True) if size != 1])
        left = (one for one in along if not isinstance(one, int))
        of_file = tuple(slice(0, 1) if len(one) == 1 else next(cuts) for one in left)
        index = None if asked is None and sizes == shape else within(along, of_file)
        yield Piece(rank, index, box, sizes, shape, prod(sizes) * dtype.itemsize)


def _values(
    checkpoint: Checkpoint,
    wanted: Wanted,
    batch: list[Piece],
    dtypes: list[Dtype],
    threads: int | None,
    is_host: bool,
) -> list[arrays.Array]:
    """Return the parts of a batch in host memory: views of a mapped file if they stay there."""
    part = wanted.some([piece.rank for piece in batch])._replace(indices=[piece.index for piece in batch])
    if is_host or any(dtypes[piece.rank].name == F4_LOOSE for piece in batch):
        found = checkpoint.parts(part, wrap, threads=threads)
        return [values.reshape(piece.shape) for values, piece in zip(found, batch, strict=True)]
    fresh = [numpy.empty(piece.shape, dtypes[piece.rank]) for piece in batch]
    # By the shapes that are read, without the dimensions that an index adds.
    shapes = [shape for _, shape in checkpoint.outlines(part, wrap)]
    rows = enumerate(zip(part.names, fresh, shapes, strict=True))
    places = {f"{name} {number}": values.reshape(shape) for number, (name, values, shape) in rows}
    arrays._fill(checkpoint, part, places, Reads(threads))
    return fresh


def _dtype(code: str) -> Dtype:
    """Return NumPy's dtype for a code."""
    return numpy.dtype(getattr(jnp, F4_LOOSE)) if code == "F4" else _resolve(code)  # type: ignore[no-any-return]


def _reporting(reads: Reads, total: int, nbytes: int) -> Callable[[list[Piece]], None]:
    """Return a function that reports how much of `total` has been read. This process reads `nbytes` of it."""
    done = 0

    def report(batch: list[Piece]) -> None:
        nonlocal done
        done += sum(piece.nbytes for piece in batch)
        if reads.tell is not None:
            reads.tell(total * done // max(nbytes, 1), total)

    return report


def _target(device: Any) -> Any:
    """Return the argument of `jax.device_put` for `device`."""
    if device is None or isinstance(device, (jax.Device, jax.sharding.Sharding)):
        return device
    platform, _, number = device.partition(":") if isinstance(device, str) else (None, "", str(device))
    try:
        # As text, so that -1 and True do not count as numbers of devices.
        there = {str(place): one for place, one in enumerate(jax.local_devices(backend=platform))}
        # jax takes "" for its default platform.
        return there["" if platform == "" else number or "0"]
    except (RuntimeError, KeyError) as error:
        choices = [f"{one.platform}:{place}" for place, one in enumerate(jax.local_devices())]
        raise unknown_device("jax", device, ["cpu", *choices]) from error


def at(array: arrays.Array, index: Any) -> arrays.Array:
    """Return `array[index]` by NumPy's rules: for a missing element jax's own return the nearest one."""
    return arrays.at(array, index)


def payload(name: str, array: Any) -> tuple[str, tuple[int, ...], Any]:
    """Return NumPy's `payload` of a jax array, or a function for bytes that are not on one CPU."""
    if isinstance(array, jax.Array):
        reason = _not_plain(array)
        if reason is not None:
            raise located(SaveError, f"{reason}", code="no-values", tensor=name, found=str(array.dtype))
        devices = array.devices()
        if len(devices) > 1 or next(iter(devices)).platform != "cpu":
            return arrays.payload_in_parts(name, array.dtype, array.shape, _puller(array))
    elif not isinstance(array, (numpy.ndarray, numpy.generic)):
        raise not_a_tensor(name, array, "a jax.Array", 'flax.traverse_util.flatten_dict(tree, sep=".")')
    return arrays.payload(name, numpy.asarray(array))


def _puller(array: jax.Array) -> Callable[[_save.Box], arrays.Array]:
    """Return a function that copies a box of `array` to the CPU.

    The array itself is not converted, since jax keeps the NumPy copy as long as the array. Each device's part
    is copied by itself, because a slice of the whole array would gather it on every device first.
    """
    # If several devices have the same values, one copy is enough.
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]

    def pull(box: _save.Box) -> arrays.Array:
        pulled = numpy.empty(box.sizes, array.dtype)
        for shard in shards:
            _pull(shard, box, pulled)
        return pulled

    return pull


def _pull(shard: jax.Shard, box: _save.Box, into: arrays.Array) -> None:
    """Copy the overlap of `shard` and `box`."""
    offsets = [part.start or 0 for part in shard.index]
    begins = [max(pair) for pair in zip(offsets, box.starts, strict=True)]
    sides = zip(offsets, shard.data.shape, box.starts, box.sizes, strict=True)
    ends = [min(offset + size, start + taken) for offset, size, start, taken in sides]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    if any(size <= 0 for size in sizes):
        return
    place = tuple(slice(b - s, e - s) for b, e, s in zip(begins, ends, box.starts, strict=True))
    starts = [begin - offset for begin, offset in zip(begins, offsets, strict=True)]
    # The thread that calls this has the default of 32 bits, unlike the thread that saves.
    with _64_bits(True):
        # NumPy takes a scalar of ml_dtypes from an array of its own only.
        into[place] = numpy.asarray(jax.lax.dynamic_slice(shard.data, starts, sizes))


def _not_plain(array: jax.Array) -> str | None:
    """Return why `array` has no values to store and the remedy, or None if it has."""
    if isinstance(array, jax.core.Tracer):
        return "inside jax.jit, jax.grad and the like arrays have no values: save outside of them"
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return f"{array.dtype} is not a dtype of numbers: save jax.random.key_data(key)"
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
states = States("flax", _whole)
load_state = states.load_state
save_state = states.save_state


def __dir__() -> list[str]:
    return __all__
