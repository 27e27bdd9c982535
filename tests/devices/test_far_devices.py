"""Loading onto, and saving from, a device that only torch can access, not the extension module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot._adapters import pieces

torch = pytest.importorskip("torch")

from ingot import torch as framework  # noqa: E402  # It is there, as the line above found.
from support.errors import raises  # noqa: E402
from support.progress import Progress  # noqa: E402

from . import far  # noqa: E402

PIECE_NBYTES = 4096
GENERATOR = torch.Generator().manual_seed(5)


def random(*shape: int) -> Any:
    return torch.randn(shape, generator=GENERATOR)


TENSORS: dict[str, Any] = {
    "scalar": torch.tensor(3.5),
    "empty": torch.ones(0, 4),
    "flags": torch.tensor([True, False, True]),
    "half": random(33, 5).bfloat16(),
    "eighth": random(40).to(torch.float8_e4m3fn),
    "scale": torch.arange(3, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "fourth": torch.arange(6, dtype=torch.uint8).view(2, 3).view(torch.float4_e2m1fn_x2),
    "long": torch.arange(7),
    # Tensors of several pieces, which are cut along one dimension, along two, and within rows.
    "matrix": random(300, 20),
    "deep": random(3, 40, 50),
    "wide": random(2, 3000),
}
NBYTES = sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_NBYTES", PIECE_NBYTES)


@pytest.fixture
def path(path: Path) -> Path:
    framework.save_file(TENSORS, path)
    return path


def raw(tensor: Any) -> bytes:
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).tolist())


def same(found: Any, expected: Any) -> bool:
    assert found.device.type == "far"
    is_such = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return is_such and raw(found) == raw(expected)


def all_same(found: dict[str, Any], expected: dict[str, Any] = TENSORS) -> bool:
    return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)


def test_load_file_reads_each_byte_once_in_bounded_pieces(path: Path, backend: str) -> None:
    with far.counted() as copies:
        found = framework.load_file(path, "far", backend=backend)
        assert max(copies["in"]) <= PIECE_NBYTES
        assert sum(copies["in"]) == NBYTES
        assert not copies["out"]
    assert all_same(found)


def test_load_file_allocates_only_the_tensors(path: Path) -> None:
    before = sum(far.allocated.values())
    with far.counted():
        found = framework.load_file(path, "far")
        # An allocation is of a byte at least.
        assert far.most[0] - before <= NBYTES + len(TENSORS)
    del found
    assert sum(far.allocated.values()) == before


def test_load_file_groups_small_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"{number}": torch.full((3,), float(number)) for number in range(500)}
    framework.save_file(many, tmp_path / "many")
    from ingot.torch import _filling

    calls: list[int] = []
    fill = _filling.fill
    monkeypatch.setattr(_filling, "fill", lambda *given: calls.append(1) or fill(*given))
    assert all_same(framework.load_file(tmp_path / "many", "far"), many)
    # Each tensor takes a multiple of 64 bytes.
    assert len(calls) == -(-500 * 64 // PIECE_NBYTES)


def test_load_file_combines_options(path: Path, backend: str) -> None:
    found = framework.load_file(path, "far", backend=backend, keys=["matrix", "half", "long"])
    assert all_same(found, {name: TENSORS[name] for name in ("matrix", "half", "long")})
    found = framework.load_file(path, "far", backend=backend, keys=ingot.glob("w*", "d*"))
    assert all_same(found, {name: TENSORS[name] for name in ("deep", "wide")})
    told = Progress()
    framework.load_file(path, "far", backend=backend, progress=told)
    told.assert_complete(NBYTES)
    assert len(told) > 5


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("matrix", slice(3, 290)),
        ("matrix", (slice(None, None, 7), slice(2, None))),
        ("matrix", (None, slice(1, 299, 2), None, [3, 1, 1])),
        ("matrix", 5),
        ("matrix", -1),
        ("matrix", None),
        ("deep", (..., slice(0, 50, 3))),
        ("deep", (1, [0, -1], slice(None))),
        ("deep", (slice(0, 3), slice(39, None))),
        ("deep", (slice(2, 1),)),
        ("wide", (slice(None), slice(5, 2900))),
        ("scalar", ()),
        ("scalar", None),
        ("fourth", (slice(None), slice(2, 6))),
        # Indices that only torch supports: ingot reads the whole tensor, and torch indexes it.
        ("matrix", torch.tensor([5, 3])),
        ("matrix", ([1, 2], [3, 4])),
    ],
)
def test_get_slice_equals_the_framework(path: Path, backend: str, name: str, index: Any) -> None:
    expected = ingot.safe_open(path, "pt").get_slice(name)[index]
    found = framework.load_file(path, "far", backend=backend, slices={name: index})[name]
    # The index None means the same in `slices` as in brackets.
    assert same(found, expected)
    with ingot.safe_open(path, "pt", "far", backend=backend) as file:
        assert same(file.get_slice(name)[index], expected)


def test_get_slice_names_a_wrong_index(path: Path) -> None:
    with pytest.raises(ingot.SliceError, match="matrix"):
        framework.load_file(path, "far", slices={"matrix": 300})
    with pytest.raises(ingot.SliceError, match="matrix"):
        ingot.safe_open(path, "pt", "far").get_slice("matrix")[:, 20]


def test_handles_read_tensors_and_prefetch(path: Path, backend: str) -> None:
    with ingot.safe_open(path, "pt", "far", backend=backend) as file:
        assert all(same(file[name], TENSORS[name]) for name in file)
        assert all_same(
            file.get_tensors(["deep", "half"]), {name: TENSORS[name] for name in ("deep", "half")}
        )
        assert all_same(file.get_tensors())
        assert all_same(dict(file.prefetch()))
        with file.prefetch({"deep": slice(1, 3), "scalar": None}) as loader:
            assert same(loader.take("deep"), TENSORS["deep"][1:3])
            assert same(loader.take("scalar"), TENSORS["scalar"])
        assert file.get_slice("half").dtype == torch.bfloat16
    with ingot.safe_open(path, "pt", backend=backend) as file:
        assert all_same(dict(file.prefetch(device="far")))


def test_prefetch_copies_in_pieces(path: Path, backend: str) -> None:
    with far.counted() as copies, ingot.safe_open(path, "pt", "far", backend=backend) as file:
        found = dict(file.prefetch())
        assert max(copies["in"]) <= PIECE_NBYTES
        assert sum(copies["in"]) == NBYTES
    assert all_same(found)


def test_load_file_widens_on_the_device_and_narrows_on_the_host(path: Path) -> None:
    floats = {name: TENSORS[name] for name in ("half", "eighth", "matrix")}
    before = sum(far.allocated.values())
    with far.counted() as copies:
        found = framework.load_file(path, "far", keys=list(floats), dtype="F32")
        assert sum(copies["in"]) == sum(tensor.nbytes for tensor in floats.values())
        wide = sum(tensor.nbytes for tensor in found.values())
        assert far.most[0] - before <= wide + PIECE_NBYTES
    assert all_same(found, {name: tensor.float() for name, tensor in floats.items()})
    with far.counted() as copies:
        found = framework.load_file(path, "far", keys=list(floats), dtype="BF16")
        # 8-bit floats are widened on the device, while larger ones are narrowed on the host.
        assert sum(copies["in"]) == 2 * 33 * 5 + 40 + 2 * 300 * 20
    assert all_same(found, {name: tensor.bfloat16() for name, tensor in floats.items()})


def test_load_file_converts_as_on_the_host(tmp_path: Path) -> None:
    from ingot.torch import _filling

    for stored, wider in _filling._WIDER.items():
        dtype = framework._tensors.DTYPES[stored]  # type: ignore[attr-defined]
        if dtype.itemsize == 4:
            values = torch.randn(999, generator=GENERATOR)
        else:
            integer = torch.uint8 if dtype.itemsize == 1 else torch.int16
            values = torch.arange(1 << 8 * dtype.itemsize).to(integer).view(dtype)
        framework.save_file({"all": values}, tmp_path / "all")
        for code in wider:
            ours = framework.load_file(tmp_path / "all", dtype=code)["all"]
            theirs = framework.load_file(tmp_path / "all", "far", dtype=code)["all"].cpu()
            is_none = ours.isnan()
            assert torch.equal(is_none, theirs.isnan()), (stored, code)
            # By their bits, which distinguish the zeros.
            integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.itemsize]
            assert torch.equal(ours[~is_none].view(integers), theirs[~is_none].view(integers)), (stored, code)


def test_load_file_fills_strided_destinations(path: Path, backend: str) -> None:
    out = {
        "matrix": torch.zeros(20, 300, device="far").T,
        "half": torch.zeros(33, 5, dtype=torch.bfloat16, device="far"),
        "long": torch.zeros(7, dtype=torch.int64),
        "eighth": torch.zeros(40, device="far").to(torch.float8_e4m3fn),
    }
    found = framework.load_file(path, "far", backend=backend, out=out)
    assert all(found[name] is tensor for name, tensor in out.items())
    assert torch.equal(out.pop("long"), TENSORS["long"])
    assert all_same(
        {name: tensor for name, tensor in found.items() if name != "long"},
        {name: tensor for name, tensor in TENSORS.items() if name != "long"},
    )
    part = {"deep": torch.zeros(3, 1, 50, device="far")}
    framework.load_file(path, keys=["deep"], slices={"deep": (slice(None), [7])}, out=part)
    assert same(part["deep"], TENSORS["deep"][:, [7]])


def test_load_file_checks_destinations_before_reading(path: Path) -> None:
    here = torch.zeros(3, 40, 50)
    for wrong, code in (
        (torch.zeros(4, 30, device="far"), "destination-shape"),
        (torch.zeros(300, 20, device="far", dtype=torch.float64), "destination-dtype"),
    ):
        with raises(ingot.DestinationError, "matrix", code=code):
            framework.load_file(path, keys=["deep", "matrix"], out={"deep": here, "matrix": wrong})
        assert not here.any()


def test_load_into_fills_and_converts_a_module(path: Path, backend: str) -> None:
    target = {
        "half": torch.zeros(33, 5, device="far"),
        "matrix": torch.nn.Parameter(torch.zeros(300, 20, dtype=torch.bfloat16, device="far")),
        "long": torch.zeros(7, device="far"),
        "deep": torch.zeros(3, 40, 50),
    }
    told = Progress()
    with far.counted() as copies:
        framework.load_into(target, path, strict=False, backend=backend, progress=told)
        assert sum(copies["in"]) == 2 * 33 * 5 + 2 * 300 * 20 + 8 * 7
    assert torch.equal(target.pop("deep"), TENSORS["deep"])
    expected = {"half": torch.float32, "matrix": torch.bfloat16, "long": torch.float32}
    assert all_same(target, {name: TENSORS[name].to(dtype) for name, dtype in expected.items()})
    assert told[-1][0] == told[-1][1]


def test_load_into_patches_tensors_of_several_devices(path: Path) -> None:
    new, patch = path.with_name("new.safetensors"), path.with_name("patch.safetensors")
    changed = {name: tensor.clone() for name, tensor in TENSORS.items()}
    changed["matrix"][::7, ::3] += 1
    changed["deep"][:] = 2
    changed["half"][3:9] *= 2
    changed["flags"] ^= True
    framework.save_file(TENSORS, path, checksums="xxh3")
    framework.save_file(changed, new, checksums="xxh3")
    ingot.delta.diff(path, new, patch)
    target = {
        "half": torch.zeros(33, 5, device="far"),
        "matrix": torch.zeros(20, 300, device="far").t(),
        "flags": torch.zeros(3, dtype=torch.bool, device="far"),
        "deep": torch.zeros(3, 40, 50),
    }
    version = framework.load_into(target, path, strict=False).version
    framework.load_into(target, version, patch=patch, strict=False)
    assert torch.equal(target.pop("deep"), changed["deep"])
    assert all_same(target, {name: changed[name].to(tensor.dtype) for name, tensor in target.items()})


def test_load_file_sends_each_tensor_to_its_device(path: Path, backend: str) -> None:
    for device in (
        {"m*": "far", "d*": "meta", "*": "cpu"},
        lambda info: "far" if info.name == "matrix" else None,
    ):
        found = framework.load_file(path, device, backend=backend)
        assert list(found) == list(framework.load_file(path))
        assert same(found["matrix"], TENSORS["matrix"])
        assert found["wide"].device.type == "cpu"
        assert torch.equal(found["wide"], TENSORS["wide"])
        names = ("matrix", "half")
        found = framework.load_file(
            path, device, backend=backend, keys=names, dtype="F64", slices={"matrix": slice(7)}
        )
        assert same(found["matrix"], TENSORS["matrix"][:7].double())
        assert torch.equal(found["half"], TENSORS["half"].double())
    told = Progress()
    framework.load_file(path, {"m*": "far", "*": "cpu"}, progress=told)
    told.assert_complete(NBYTES)


def test_load_file_keeps_aliases_together(tmp_path: Path) -> None:
    tied = random(5, 6)
    framework.save_file({"a": tied, "b": tied, "row": tied[2]}, tmp_path / "tied", shared="alias")
    found = framework.load_file(tmp_path / "tied", "far")
    assert all_same(found, {"a": tied, "b": tied, "row": tied[2]})
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_load_file_verifies_the_bytes_on_the_device(path: Path, tmp_path: Path) -> None:
    sealed = tmp_path / "sealed"
    framework.save_file(TENSORS, sealed, checksums="sha256")
    told = Progress()
    found = framework.load_file(sealed, "far", verify=True, progress=told)
    assert all_same(found)
    told.assert_complete(NBYTES)
    assert all_same(framework.load_file(sealed, "far", expected_sha256=ingot.hash(sealed, "sha256")))
    spoilt = bytearray(sealed.read_bytes())
    spoilt[-5] ^= 1
    sealed.write_bytes(spoilt)
    with pytest.raises(ingot.IntegrityError):
        framework.load_file(sealed, "far", verify=True)


def test_load_file_reads_shards_buffers_and_open_files(path: Path, tmp_path: Path) -> None:
    ingot.split(path, tmp_path / "sharded", 30_000)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    found = framework.load_file(tmp_path / "sharded", "far")
    assert all_same({name: found[name] for name in TENSORS})
    with path.open("rb") as file:
        assert all_same(framework.load_file(file, "far"))


def test_load_file_raises_the_frameworks_memory_error(path: Path) -> None:
    before = sum(far.allocated.values())
    with far.limited(50), pytest.raises(far.Limit, match="no room for"):
        framework.load_file(path, "far")
    assert sum(far.allocated.values()) == before
    # Converted tensors leave no memory to spare.
    wide = TENSORS["half"].nbytes * 2
    with far.limited(wide + 100), pytest.raises(far.Limit, match="no room for"):
        framework.load_file(path, "far", keys=["half"], dtype="F32")
    assert sum(far.allocated.values()) == before
    assert all_same(framework.load_file(path, "far"))


def test_load_file_ends_when_progress_raises(path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > NBYTES // 2:
            raise LookupError("enough")

    before = sum(far.allocated.values())
    with pytest.raises(LookupError, match="enough"):
        framework.load_file(path, "far", progress=stop)
    assert sum(far.allocated.values()) == before


@pytest.mark.skipif(torch.xpu.is_available(), reason="there is one")
def test_load_file_names_an_unusable_device(path: Path) -> None:
    for load in (
        lambda: framework.load_file(path, "xpu"),
        lambda: ingot.safe_open(path, "pt", "xpu")["half"],
        lambda: dict(ingot.safe_open(path, "pt", "xpu").prefetch()),
    ):
        with raises(ingot.DeviceError, "device xpu: torch cannot use it", code="no-device", found="xpu"):
            load()


def test_load_file_names_the_tensor_of_a_missing_dtype(tmp_path: Path) -> None:
    ingot.serialize_file({"six": {"dtype": "F6_E2M3", "shape": [4], "data": b"abc"}}, tmp_path / "six")
    with pytest.raises(ingot.DtypeError, match="six"):
        framework.load_file(tmp_path / "six", "far")


@pytest.fixture(params=[False, True], ids=["now", "background"])
def background(request: pytest.FixtureRequest) -> bool:
    background: bool = request.param
    return background


def test_save_file_writes_strided_tensors(tmp_path: Path, background: bool) -> None:
    there = {name: tensor.to("far") for name, tensor in TENSORS.items() if tensor.itemsize > 1}
    there |= {
        "turned": TENSORS["matrix"].to("far").T,
        "some": TENSORS["deep"].to("far")[:, 3:30:4],
        "eighth": TENSORS["eighth"].view(torch.uint8).to("far").view(torch.float8_e4m3fn),
    }
    expected = {name: tensor.cpu() for name, tensor in there.items()}
    future = framework.save_file(there, tmp_path / "saved", background=background)
    if background:
        future.result()
    found = framework.load_file(tmp_path / "saved")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert raw(found[name]) == raw(tensor), name


class ByDriver:
    """An open file whose parts a driver reads onto the device, as the driver of a GPU does."""

    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint = checkpoint
        self.nbytes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def parts(
        self, wanted: Any, wrap: Any, *, onto: Any, threads: Any = None, progress: Any = None
    ) -> list[Any]:
        assert onto == "the driver"
        found = self._checkpoint.parts(wanted, wrap, threads=threads)
        self.nbytes.append(sum(tensor.nbytes for tensor in found))
        return [tensor.to("far") for tensor in found]


def test_load_file_widens_driver_reads_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot._read.door import Reads
    from ingot._read.select import Wanted
    from ingot.torch import _devices

    monkeypatch.setattr(_devices, "gpu", lambda device: "the driver")
    checkpoint: Any = ByDriver(ingot._native.Checkpoint.open(path))
    names = ["half", "matrix", "long", "deep"]
    told = Progress()
    before = sum(far.allocated.values())
    with far.counted():
        found = _devices.relay(torch.device("far")).read(
            checkpoint,
            Wanted(names, [slice(20), None, None, (slice(None), slice(5, 40))], "F64"),
            Reads(tell=told),
        )
        # The result, and a piece.
        assert far.most[0] - before <= sum(tensor.nbytes for tensor in found) + PIECE_NBYTES
    floats = [TENSORS["half"][:20], TENSORS["matrix"], TENSORS["deep"][:, 5:40]]
    expected = [tensor.double() for tensor in floats]
    expected.insert(2, TENSORS["long"])
    assert all(map(same, found, expected))
    # Unconverted tensors and the stored floats are read directly.
    assert checkpoint.nbytes[0] == TENSORS["long"].nbytes
    assert max(checkpoint.nbytes[1:]) <= PIECE_NBYTES
    assert sum(checkpoint.nbytes[1:]) == sum(tensor.nbytes for tensor in floats)
