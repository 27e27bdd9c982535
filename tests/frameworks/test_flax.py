"""Behaviour that only jax has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

import ingot
import ingot.numpy

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402  # It is there, as the line above found.

import ingot.flax  # noqa: E402
from support.errors import raises  # noqa: E402

from .jax_of_any_age import enable_x64  # noqa: E402

WIDE = ("F64", "I64", "U64")


@pytest.fixture
def path(path: Path) -> Path:
    """Write a file with an F32 tensor at a multiple of 64 bytes, unaligned tensors, and 64-bit tensors."""
    arrays = {code: numpy.ones(8, ingot.numpy.DTYPES[code]) for code in WIDE}
    arrays |= {
        "aligned": numpy.arange(16, dtype="f4"),
        "off": numpy.arange(15, dtype="f4"),
        "z": numpy.ones(3, "f4"),
    }
    # The data section begins where the header ends, which the metadata moves to a multiple of 64.
    for length in range(64):
        data = ingot.numpy.save(arrays, {"pad": "x" * length})
        if (8 + int.from_bytes(data[:8], "little")) % 64 == 0:
            break
    path.write_bytes(data)
    return path


@pytest.fixture(params=[False, True], ids=["32-bit", "64-bit"])
def wide(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", request.param)
    yield request.param
    jax.config.update("jax_enable_x64", before)


def address(array: Any) -> int:
    return int(array.unsafe_buffer_pointer())


@pytest.mark.parametrize("code", WIDE)
def test_load_file_keeps_or_rejects_64_bit_dtypes(wide: bool, path: Path, code: str) -> None:
    with ingot.safe_open(path, "jax") as file:
        reads = (lambda: file[code], lambda: file.get_tensors([code])[code], lambda: file.get_slice(code)[:4])
        for read in reads:
            if wide:
                assert read().dtype == numpy.dtype(ingot.numpy.DTYPES[code])
                continue
            with pytest.raises(ingot.DtypeError, match="jax_enable_x64") as caught:
                read()
            assert (caught.value.tensor, caught.value.found) == (code, code)
            assert caught.value.code == "dtype-not-in-framework"
            assert str(caught.value).startswith(f"{path}: tensor `{code}`: ")
        assert file["aligned"].dtype == jnp.float32
    if not wide:
        with pytest.raises(ingot.DtypeError, match="jax_enable_x64"):
            ingot.flax.load_file(path)
        with pytest.raises(ingot.DtypeError, match="jax_enable_x64"):
            ingot.flax.load(path.read_bytes())


def test_load_file_follows_a_switch_of_64_bits(path: Path) -> None:
    with enable_x64(True):
        assert ingot.flax.load_file(path)["I64"].dtype == jnp.int64
    with enable_x64(False), pytest.raises(ingot.DtypeError):
        ingot.flax.load_file(path)


def test_load_file_maps_an_aligned_tensor(path: Path) -> None:
    views = {}
    with ingot.safe_open(path, "np", backend="mmap") as file:
        move = ingot.flax.mover("cpu")
        for name in ("aligned", "off", "z"):
            view = file[name]
            views[name] = move(view), view.ctypes.data
    for array, where in views.values():
        assert (address(array) == where) == (where % 64 == 0)
    array, where = views["aligned"]
    assert address(array) == where
    assert array.tolist() == list(range(16))


def test_load_file_takes_every_spelling_of_a_device(path: Path) -> None:
    device = jax.local_devices(backend="cpu")[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    for word in ("cpu", "cpu:0", 0, device, sharding, None):
        with ingot.safe_open(path, "flax", device=word) as file:
            assert file["aligned"].devices() == {device}
            assert file.get_slice("aligned")[2:4].devices() == {device}


@pytest.mark.parametrize("device", ["cpu:99", "nope", "nope:0", "cpu:x", 99, "", 1.5])
def test_load_file_names_the_choices_for_an_unknown_device(path: Path, device: Any) -> None:
    for use in (lambda: ingot.safe_open(path, "jax", device), lambda: ingot.flax.load_file(path, device)):
        with raises(ingot.OptionError, "cpu:0", code="unknown-device", found=device) as caught:
            use()
        assert "cpu" in caught.value.expected  # type: ignore[operator]


def test_load_file_sends_each_part_of_a_sharding_to_its_device(path: Path) -> None:
    mesh = jax.sharding.Mesh(numpy.array(jax.local_devices(backend="cpu")), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with ingot.safe_open(path, "jax", device=sharding) as file:
        array = file["aligned"]
    assert array.sharding == sharding
    assert ingot.flax.save({"t": array}) == ingot.numpy.save({"t": numpy.arange(16, dtype="f4")})


def test_save_file_rejects_arrays_without_values(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    deleted = jnp.ones(3) + 1
    deleted.delete()
    for tensor, word in ((jax.random.key(0), "key_data"), (deleted, "deleted")):
        with raises(ingot.SaveError, word, code="no-values", tensor="odd"):
            ingot.flax.save_file({"odd": tensor}, path)
    with pytest.raises(ingot.SaveError, match="outside"):
        jax.jit(lambda tensor: ingot.flax.save({"odd": tensor}) and tensor)(jnp.ones(3))
    for tensor in (jnp.ones(4, jnp.int4), numpy.ones(4, ml_dtypes.uint4)):
        with pytest.raises(ingot.SaveError, match=r"the format has no dtype for u?int4"):
            ingot.flax.save_file({"odd": tensor}, path)
    assert not path.exists()


def test_save_file_rejects_a_tree_with_a_hint() -> None:
    with pytest.raises(TypeError, match="flatten_dict"):
        ingot.flax.save({"params": {"bias": jnp.ones(3)}})


def test_get_slice_rejects_an_index_out_of_range(path: Path) -> None:
    # jax itself clamps such an index to the nearest element.
    with ingot.safe_open(path, "jax") as file:
        for index in (16, numpy.array([16]), jnp.array([16])):
            with pytest.raises(ingot.SliceError):
                file.get_slice("aligned")[index]
        assert file.get_slice("aligned")[jnp.array([1, 3])].tolist() == [1, 3]
        mask = numpy.arange(16) % 5 == 0
        assert file.get_slice("aligned")[mask].tolist() == [0, 5, 10, 15]
