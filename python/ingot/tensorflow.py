"""Load and save TensorFlow tensors.

>>> import tensorflow as tf
>>> from ingot.tensorflow import load_file, save_file
>>> save_file({"weight": tf.ones([4, 3])}, "weights.safetensors")
>>> load_file("weights.safetensors")["weight"].shape
TensorShape([4, 3])

``device`` is a name such as ``"cpu"``, ``"/GPU:0"`` or ``"/device:GPU:0"``, a `tf.config.LogicalDevice`, or
None for TensorFlow's default device. Tensors are copied from the file directly to the device. They are not
views of the file, because TensorFlow crashes if it computes with memory that does not start at a multiple of
64 bytes. ``F4`` is unpacked, one element to a byte.

Variables, of TensorFlow and of Keras, are saved as their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ingot._base.text import located

from . import _native
from ._adapters.face import Whole
from ._base.dtypes import F4_LOOSE, NAMES
from ._base.frameworks import lacks, missing, not_a_tensor, unknown_device
from .errors import SaveError

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    raise missing("tensorflow", error) from None

import numpy

from . import numpy as arrays
from ._write.save import Box

__all__ = ["load", "load_file", "save", "save_file"]


def _dtype(name: str) -> Any:
    """Return the dtype of that name, or None if this TensorFlow lacks it."""
    try:
        return tf.as_dtype(name)
    except TypeError:
        return None


# A missing dtype only affects tensors of that dtype.
DTYPES = {
    code: dtype for code, name in {**NAMES, "F4": F4_LOOSE}.items() if (dtype := _dtype(name)) is not None
}
# The dtypes that TensorFlow can slice. On other devices than the CPU, tensors of other dtypes are copied
# whole.
_CUT = {dtype for code, dtype in DTYPES.items() if not code.startswith(("F4", "F8"))}


def _resolve(code: str) -> Any:
    """Return NumPy's dtype if TensorFlow has it too. A tensor begins as a NumPy view of the file."""
    if code not in DTYPES:
        raise lacks(f"tensorflow {tf.__version__}", code)
    return arrays._resolve(code)


wrap: _native.Wrap = _native.Wrap.buffer(numpy.ndarray, _resolve)


def mover(device: Any) -> Callable[[arrays.Array], tf.Tensor]:
    """Return a function that makes a tensor on `device` from a NumPy view."""
    if device is None:
        return _tensor
    target = _target(device)

    def put(array: arrays.Array) -> tf.Tensor:
        with tf.device(target):
            return _tensor(array)

    return put


def _tensor(array: arrays.Array) -> tf.Tensor:
    if array.ndim:
        return tf.convert_to_tensor(array)
    # TensorFlow takes no single elements of the dtypes of ml_dtypes.
    return tf.reshape(tf.convert_to_tensor(array.reshape(1)), ())


def _target(device: Any) -> str:
    """Return the full name of `device`. TensorFlow itself would use the CPU for an unknown one."""
    there = {_kind_and_number(one.name): one.name for one in tf.config.list_logical_devices()}
    try:
        return str(there[_kind_and_number(getattr(device, "name", device))])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise unknown_device("tensorflow", device, list(there.values())) from error


def _kind_and_number(name: str) -> tuple[str, int]:
    spec = tf.DeviceSpec.from_string(name)
    return spec.device_type, spec.device_index or 0


def at(array: arrays.Array, index: Any) -> arrays.Array:
    """Return ``array[index]`` by NumPy's rules, since TensorFlow's lack masks and arrays."""
    return arrays.at(array, index)


def payload(name: str, tensor: Any) -> tuple[str, tuple[int, ...], Any]:
    """Return NumPy's `payload` of a tensor's or a variable's values.

    Tensors that are not on the CPU have a function that returns the bytes.
    """
    # A variable of Keras is a wrapper of another class around one of TensorFlow's.
    plain = tensor if isinstance(tensor, (tf.Tensor, tf.Variable)) else getattr(tensor, "value", None)
    if not isinstance(plain, (tf.Tensor, tf.Variable)):
        raise not_a_tensor(name, tensor, "a tf.Tensor")
    if tf.is_symbolic_tensor(plain):
        reason = "inside tf.function tensors have no values: save outside of it"
        raise located(SaveError, reason, code="no-values", tensor=name, found=type(tensor).__name__)
    if plain.dtype.is_quantized:
        # NumPy would treat them as the integers that represent them.
        reason = f"the format has no dtype for {plain.dtype.name}"
        raise located(SaveError, reason, code="unsupported-dtype", tensor=name, found=plain.dtype.name)
    if plain.shape.rank and ":CPU:" not in plain.device and plain.dtype in _CUT:
        return _in_pieces(name, plain)
    # `asarray` shares the memory. It does not know single elements of ml_dtypes, which `numpy()` does.
    return arrays.payload(name, numpy.asarray(plain if plain.shape.rank else plain.numpy()))


def _in_pieces(name: str, tensor: tf.Tensor | tf.Variable) -> tuple[str, tuple[int, ...], Any]:
    """Return the code, the shape, and a function that copies the bytes to the CPU."""
    # For type checkers, for which a size may be unknown, as it is inside tf.function.
    shape: Any = tuple(tensor.shape)

    def pull(box: Box) -> arrays.Array:
        part: arrays.Array = tf.slice(tensor, box.starts, box.sizes).numpy()
        return part

    return arrays.payload_in_parts(name, tensor.dtype.as_numpy_dtype, shape, pull)


_whole: Whole[tf.Tensor] = Whole(wrap, mover, at, payload)
load = _whole.load
load_file = _whole.load_file
save = _whole.save
save_file = _whole.save_file


def __dir__() -> list[str]:
    return __all__
