"""Saving arrays outside host memory, or not in C order, without a full copy."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path

import numpy
import pytest

import ingot.numpy
from frameworks import suite
from ingot import _native
from support.processes import run

NBYTES = 160 << 20

measured = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="no way to measure peak memory"
)

# Each program prints the peak memory during the save, and the memory that is not freed after it.
SAVED = """
ingot.{module}.save_file({{"t": tensor}}, sys.argv[1])
forget_peak()
before = memory("VmRSS")
ingot.{module}.save_file({{"t": tensor, "u": tensor}}, sys.argv[1])
say([memory("VmHWM") - before, memory("VmRSS") - before])
"""

JAX = """
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, ingot.flax
mesh = jax.sharding.Mesh(numpy.array(jax.devices()), "x")
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
tensor = jax.device_put(numpy.arange({elements}, dtype="f4").reshape(-1, 1 << 10), sharding)
"""

PADDLE = """
import paddle, ingot.paddle
tensor = paddle.to_tensor(numpy.arange({elements}, dtype="f4").reshape(1 << 10, -1)).t()
"""

MLX = """
import mlx.core as mx, ingot.mlx
tensor = mx.array(numpy.arange({elements}, dtype="f4").reshape(1 << 10, -1))
mx.eval(tensor)
tensor = tensor.T
"""


@measured
@pytest.mark.parametrize(
    ("package", "module", "made"),
    [("jax", "flax", JAX), ("paddle", "paddle", PADDLE), ("mlx.core", "mlx", MLX)],
)
def test_save_file_packs_in_pieces(package: str, module: str, made: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    path = tmp_path / "model.safetensors"
    program = made.format(elements=NBYTES // 4) + SAVED.format(module=module)
    peak, left = run(program, path).said()
    assert peak < 64 << 20
    assert left < 64 << 20
    array = numpy.arange(NBYTES // 4, dtype="f4")
    expected = array.reshape(-1, 1 << 10) if module == "flax" else array.reshape(1 << 10, -1).T
    saved = ingot.numpy.load_file(path)
    for name in "tu":
        numpy.testing.assert_array_equal(saved[name], expected)


def test_save_file_writes_every_jax_dtype_from_many_devices(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    program = """
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, ingot.flax
jax.config.update("jax_enable_x64", True)
mesh = jax.sharding.Mesh(numpy.array(jax.devices()), "x")
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
plain, spread = {}, {}
for code in sorted(ingot.flax.DTYPES):
    for name, count in (("few", 24), ("many", 4 * 2_000_003 // 4)):
        shape = (4, count // 4, 2) if name == "many" else (4, 3, 2)
        values = (numpy.arange(numpy.prod(shape)) % 7).reshape(shape)
        dtype = {**ingot._base.dtypes.NAMES, "BOOL": "bool_", "F4": ingot._base.dtypes.F4_LOOSE}[code]
        array = values.astype(getattr(jax.numpy, dtype))
        plain[f"{code}.{name}"] = array
        spread[f"{code}.{name}"] = jax.device_put(array, sharding)
# The thread that saves in the background has the default of 32 bits.
ingot.numpy.save_file(plain, sys.argv[1] + ".plain")
ingot.flax.save_file(spread, sys.argv[1], background=True).result()
jax.config.update("jax_enable_x64", False)
say(sorted(plain))
"""
    path = tmp_path / "model.safetensors"
    names = run(program, path).said()
    wanted = {"BF16.many", "F64.many", "I64.few", "BOOL.many"}
    wanted |= {"F4.many"} if hasattr(jax.numpy, "float4_e2m1fn") else set()
    assert wanted <= set(names)
    assert path.read_bytes() == Path(f"{path}.plain").read_bytes()


# No GPU is needed: the functions for GPU tensors are called with tensors on the CPU.


def of_every_dtype(codes: Collection[str]) -> bytes:
    """Return a file with a small and a large tensor of each dtype."""
    header, data = {}, b""
    for code in codes:
        for name, shape in (("few", (4, 3, 2)), ("many", (2, 700_001, 3))):
            nbytes = math.prod(shape) * suite.BITS[code] // 8
            values = numpy.arange(nbytes, dtype="u4") * 2654435761 >> 24
            header[f"{code}.{name}"] = {
                "dtype": code,
                "shape": shape,
                "data_offsets": [len(data), len(data) + nbytes],
            }
            data += (values % 2 if code == "BOOL" else values).astype("u1").tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# Paddle first: it crashes when it is imported after TensorFlow.
def test_save_file_writes_every_paddle_dtype_in_pieces() -> None:
    pytest.importorskip("paddle")
    import ingot.paddle as module

    cut = [code for code, dtype in module.DTYPES.items() if dtype in module._CUT]
    tensors = module.load(of_every_dtype(cut))
    assert len(cut) >= 12
    assert _native.serialize(tensors, module._in_pieces, None, "safetensors") == module.save(tensors)


def test_save_file_writes_every_tensorflow_dtype_in_pieces() -> None:
    pytest.importorskip("tensorflow")
    import ingot.tensorflow as module

    cut = [code for code, dtype in module.DTYPES.items() if dtype in module._CUT]
    tensors = module.load(of_every_dtype(cut))
    assert len(cut) >= 14
    assert _native.serialize(tensors, module._in_pieces, None, "safetensors") == module.save(tensors)
