"""Jax, bound to the framework suite, with 64 bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy

import ingot.flax

from .suite import Binding, Layout, lacking
from .with_numpy import numpy_build, numpy_bytes, numpy_dtype

jax.config.update("jax_enable_x64", True)

YOUNG = {"F4": "float4_e2m1fn", "F8_E8M0": "float8_e8m0fnu"}


def jax_build(code: str, data: bytes, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(numpy_build(code, data, shape))


def jax_bytes(code: str, array: Any) -> bytes:
    assert isinstance(array, jax.Array)
    return numpy_bytes(code, numpy.asarray(array))


BINDING = Binding(
    module=ingot.flax,
    refused={"F6_E2M3": "6-bit", "F6_E3M2": "6-bit", **lacking(YOUNG, partial(hasattr, jnp))},
    build=jax_build,
    bytes_of=jax_bytes,
    shape_of=lambda code, array: list(array.shape),
    dtype_of=numpy_dtype,
    table=ingot.flax.DTYPES,
    layouts={
        "reversed": Layout((4, 3, 2), lambda array: array[::-1]),
        "numpy": Layout((4, 3, 2), lambda array: numpy.asarray(array).swapaxes(0, 1)),
    },
)
