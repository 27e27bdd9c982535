"""jax arrays that are sharded over devices: each device gets its shard, and each shard is read once."""

from __future__ import annotations

from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

import ingot
import ingot.numpy
from ingot._adapters import pieces

jax = pytest.importorskip("jax")
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding  # noqa: E402

import ingot.flax  # noqa: E402
from support.progress import Progress  # noqa: E402

from .jax_of_any_age import enable_x64  # noqa: E402

RANDOM = numpy.random.default_rng(2)
ARRAYS: dict[str, Any] = {
    "matrix": RANDOM.normal(size=(8, 12)).astype("f4"),
    "deep": RANDOM.normal(size=(4, 6, 8)).astype(ml_dtypes.bfloat16),
    "flags": numpy.array([[True, False], [False, True]] * 2),
    "empty": numpy.zeros((4, 0), "f4"),
}
if hasattr(jax.numpy, "float4_e2m1fn"):
    ARRAYS["fourth"] = numpy.arange(16, dtype="u1").astype(ml_dtypes.float4_e2m1fn).reshape(4, 4)

pytestmark = pytest.mark.skipif(
    len(jax.local_devices(backend="cpu")) < 4, reason="jax was used before it could have four devices"
)


@pytest.fixture
def path(path: Path) -> Path:
    ingot.numpy.save_file(ARRAYS, path)
    return path


def sharding(*spec: Any) -> Any:
    devices = numpy.array(jax.local_devices(backend="cpu")[:4]).reshape(2, 2)
    return NamedSharding(jax.sharding.Mesh(devices, ("a", "b")), PartitionSpec(*spec))


SPECS = [(), ("a",), ("b", None), (None, "a"), ("a", "b"), (("a", "b"),)]


def same(found: Any, expected: Any, where: Any) -> bool:
    assert found.sharding == where
    for shard in found.addressable_shards:
        assert numpy.array_equal(numpy.asarray(shard.data), expected[shard.index])
    return found.dtype == expected.dtype and numpy.array_equal(numpy.asarray(found), expected)


@pytest.fixture(params=["views", "copies"])
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with views of the file on the CPU, and with copies as for other devices."""
    if request.param == "copies":
        monkeypatch.setattr(ingot.flax, "_is_host", lambda device: False)


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_load_file_gives_each_device_its_shard(path: Path, spec: tuple[Any, ...], backend: str) -> None:
    where = sharding(*spec)
    names = [name for name, array in ARRAYS.items() if name != "empty" or len(spec) < 2]
    found = ingot.flax.load_file(path, where, keys=names, backend=backend)
    assert list(found) == names
    assert all(same(found[name], ARRAYS[name], where) for name in names)
    with ingot.safe_open(path, "jax", where, backend=backend) as file:
        assert same(file["matrix"], ARRAYS["matrix"], where)
        assert same(file.get_slice("matrix")[::2, 4:], ARRAYS["matrix"][::2, 4:], where)
        assert all(same(array, ARRAYS[name], where) for name, array in file.prefetch(keys=names))


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize(
    "index",
    [slice(0, 8, 2), (slice(None), [0, 5, 7, 2]), (None, slice(4)), (..., None), ([1, 1, 0, 7],), None],
    ids=str,
)
def test_load_file_spreads_slices(path: Path, index: Any) -> None:
    expected = ARRAYS["matrix"][index].astype(ml_dtypes.bfloat16)
    spec = ("a",) if expected.shape[0] % 2 == 0 else (None, "b")
    where = sharding(*spec)
    found = ingot.flax.load_file(path, where, keys=["matrix"], slices={"matrix": index}, dtype="BF16")
    assert same(found["matrix"], expected, where)


def test_load_file_spreads_a_framework_index(path: Path) -> None:
    where, mask = sharding("a"), numpy.array([True, False] * 4)
    found = ingot.flax.load_file(path, where, keys=["matrix"], slices={"matrix": mask})["matrix"]
    assert same(found, ARRAYS["matrix"][mask], where)


class Counting(BytesIO):
    """A file that counts the bytes read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.nbytes = 0

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer)
        self.nbytes += count
        return count

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.nbytes += len(data)
        return data

    # Read as a file, and not as a buffer.
    getbuffer = None  # type: ignore[assignment]


@pytest.mark.parametrize("spec", [(), ("a",), ("a", "b")], ids=str)
def test_load_file_reads_a_replicated_part_once(spec: tuple[Any, ...]) -> None:
    array = numpy.arange(1 << 20, dtype="f4").reshape(4, -1)
    source = Counting(ingot.numpy.save({"large": array}))
    found = ingot.flax.load_file(source, sharding(*spec))["large"]
    assert numpy.array_equal(numpy.asarray(found), array)
    # The rest is the header.
    assert array.nbytes <= source.nbytes < array.nbytes + (1 << 17)


def test_load_file_reads_shardings_in_batches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    values = ingot.flax._values

    def counting(checkpoint: Any, wanted: Any, batch: Any, *given: Any) -> Any:
        calls.append(sum(piece.nbytes for piece in batch))
        return values(checkpoint, wanted, batch, *given)

    monkeypatch.setattr(ingot.flax, "_values", counting)
    ingot.flax.load_file(path, sharding("a"))
    assert len(calls) == 1
    calls.clear()
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 200)
    found = ingot.flax.load_file(path, sharding("a"))
    assert len(calls) > 3
    assert max(calls) <= 200
    assert same(found["deep"], ARRAYS["deep"], sharding("a"))


def test_load_file_takes_shardings_by_name(path: Path) -> None:
    rows, everywhere = sharding("a"), sharding()
    found = ingot.flax.load_file(path, {"ma*": rows, "d*": everywhere, "*": "cpu:1"})
    assert same(found["matrix"], ARRAYS["matrix"], rows)
    assert same(found["deep"], ARRAYS["deep"], everywhere)
    assert found["flags"].devices() == {jax.local_devices(backend="cpu")[1]}
    found = ingot.flax.load_file(path, lambda info: rows if info.shape[0] % 4 == 0 else None)
    assert found["matrix"].sharding == rows


def test_load_file_of_a_sharding_reports_progress_and_verifies(path: Path, tmp_path: Path) -> None:
    told = Progress()
    ingot.flax.load_file(path, sharding("a"), progress=told)
    with ingot.safe_open(path, "np") as file:
        nbytes = sum(file.info(name).nbytes for name in file)
    told.assert_complete(nbytes)
    sealed = tmp_path / "sealed"
    ingot.numpy.save_file(ARRAYS, sealed, checksums="sha256")
    found = ingot.flax.load_file(sealed, sharding("a"), verify=True)
    assert same(found["matrix"], ARRAYS["matrix"], sharding("a"))


def test_load_file_names_a_shape_that_the_sharding_does_not_divide(tmp_path: Path) -> None:
    ingot.numpy.save_file({"odd": numpy.ones((3, 2), "f4")}, tmp_path / "odd")
    with pytest.raises(ingot.OptionError, match=r"tensor `odd`: its shape \[3, 2\] does not fit") as caught:
        ingot.flax.load_file(tmp_path / "odd", sharding("a"))
    assert caught.value.tensor == "odd"


def test_load_file_names_a_dtype_that_jax_would_narrow(tmp_path: Path) -> None:
    ingot.numpy.save_file({"wide": numpy.ones(4)}, tmp_path / "wide")
    with (
        enable_x64(False),
        pytest.raises(ingot.DtypeError, match="`wide`: jax without 64 bits") as caught,
    ):
        ingot.flax.load_file(tmp_path / "wide", sharding("a"))
    assert caught.value.found == "F64"
    with enable_x64(True):
        found = ingot.flax.load_file(tmp_path / "wide", sharding("a"))["wide"]
        assert same(found, numpy.ones(4), sharding("a"))


def test_load_file_keeps_a_sharding_of_one_device(path: Path) -> None:
    device = jax.local_devices(backend="cpu")[2]
    # The oldest supported jax has one kind of memory on the CPU, and rejects its name.
    kinds = [memory.kind for memory in device.addressable_memories()]
    where = SingleDeviceSharding(device, memory_kind="pinned_host" if "pinned_host" in kinds else None)
    found = ingot.flax.load_file(path, where, keys=["matrix"])["matrix"]
    assert found.devices() == {device}
    assert found.sharding.memory_kind == where.memory_kind
    assert numpy.array_equal(numpy.asarray(found), ARRAYS["matrix"])


DTYPES = {
    **ingot.numpy.DTYPES,
    **{code: getattr(ml_dtypes, name) for code, name in ingot.numpy.ML_DTYPES.items()},
}
SHAPES = [(), (0,), (4, 0), (0, 4), (2, 0, 3), (8,), (4, 6), (8, 4, 2)]


def divides(shape: tuple[int, ...], spec: tuple[Any, ...]) -> bool:
    """Return whether all devices have parts of one shape."""
    ways = [2 ** (2 if isinstance(axis, tuple) else axis is not None) for axis in spec]
    return len(spec) <= len(shape) and all(size % way == 0 for size, way in zip(shape, ways, strict=False))


@pytest.mark.parametrize("code", sorted(DTYPES.keys() & ingot.flax.DTYPES))
def test_save_file_writes_every_shape_from_several_devices(path: Path, code: str) -> None:
    values = 2 ** (numpy.arange(64) % 3)
    with enable_x64(True):
        for spec in [(), ("a",), ("a", "b")]:
            # Tensors are stored in the order of their names, so that the first and the last are empty.
            arrays = {
                f"{place} {number}": values[: prod(shape)].reshape(shape).astype(DTYPES[code])
                for number, shape in enumerate(shape for shape in SHAPES if divides(shape, spec))
                for place in "az"
                # Two elements of F4 share a byte.
                if code != "F4" or prod(shape) % 2 == 0
            }
            ingot.flax.save_file(
                {name: jax.device_put(array, sharding(*spec)) for name, array in arrays.items()}, path
            )
            found = ingot.numpy.load_file(path)
            assert found.keys() == arrays.keys()
            for name, array in arrays.items():
                numpy.testing.assert_array_equal(found[name], array, strict=True)
