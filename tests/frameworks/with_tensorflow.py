"""TensorFlow, bound to the framework suite."""

from __future__ import annotations

from typing import Any

import numpy
import tensorflow as tf

import ingot.tensorflow

from .suite import Binding, Layout, lacking
from .with_numpy import numpy_build, numpy_bytes


def tf_bytes(code: str, tensor: Any) -> bytes:
    assert isinstance(tensor, tf.Tensor)
    return numpy_bytes(code, numpy.asarray(tensor.numpy()))


def tf_build(code: str, data: bytes, shape: tuple[int, ...]) -> tf.Tensor:
    # Reshaped from one dimension: TensorFlow does not convert a scalar of every dtype.
    return tf.reshape(tf.convert_to_tensor(numpy_build(code, data, shape or (1,))), shape)


def variable(tensor: tf.Tensor) -> tf.Variable | tf.Tensor:
    """Return a variable with the value of a tensor, or the tensor if its dtype permits no variable."""
    return tensor if tensor.dtype.name.endswith("fnuz") else tf.Variable(tensor)


def has(name: str) -> bool:
    try:
        return bool(tf.as_dtype(name))
    except TypeError:
        return False


YOUNG = {"F4": "float4_e2m1fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}

BINDING = Binding(
    module=ingot.tensorflow,
    refused={"F6_E2M3": "6-bit", "F6_E3M2": "6-bit", "F8_E8M0": "tensorflow", **lacking(YOUNG, has)},
    build=tf_build,
    bytes_of=tf_bytes,
    shape_of=lambda code, tensor: list(tensor.shape),
    dtype_of=ingot.tensorflow.DTYPES.__getitem__,
    table=ingot.tensorflow.DTYPES,
    layouts={
        # TensorFlow's tensors are always in C order, and TensorFlow computes with few of its smaller dtypes.
        "transposed": Layout(
            (4, 2, 6),
            lambda array: array.swapaxes(0, 1),
            lambda tensor: tf.convert_to_tensor(numpy.asarray(tensor).swapaxes(0, 1)),
        ),
        "strided": Layout(
            (4, 4),
            lambda array: array[::2],
            lambda tensor: tf.convert_to_tensor(numpy.asarray(tensor)[::2]),
        ),
        "one-sized": Layout(
            (1, 4, 1, 2),
            lambda array: array[:, 1:3],
            lambda tensor: tf.convert_to_tensor(numpy.asarray(tensor)[:, 1:3]),
        ),
        "variable": Layout((2, 4), view=variable),
    },
)
