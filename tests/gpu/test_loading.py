"""Loading onto a real GPU: the bytes, their order among the caller's work, and the memory."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import ingot
import ingot.torch

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

SLOT = 4 << 20
SIZES = [0, 1, 255, 256, 257, 65_535, 65_536, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT + 5]


def random(nbytes: int, seed: int) -> Any:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def tensors() -> dict[str, Any]:
    found = {f"bytes.{size}": random(size, size) for size in SIZES}
    for code, dtype in ingot.torch.DTYPES.items():
        values = random(48, 5)
        found[f"dtype.{code}"] = values > 127 if code == "BOOL" else values.view(dtype)
    found["matrix"] = torch.randn(1000, 777)
    return found


@pytest.fixture
def path(path: Path, tensors: dict[str, Any]) -> Path:
    ingot.torch.save_file(tensors, path)
    return path


def same(found: Any, expected: Any) -> bool:
    assert found.device.type == "cuda"
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    found, expected = (one.cpu().contiguous().reshape(-1).view(torch.uint8) for one in (found, expected))
    return bool(torch.equal(found, expected))


def test_load_file_loads_every_dtype_and_size(path: Path, tensors: dict[str, Any]) -> None:
    found = ingot.torch.load_file(path, device="cuda")
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert same(found[name], expected), name


def test_load_file_loads_many_small_tensors(tmp_path: Path) -> None:
    whole = random(75_000 * 40, 1).view(75_000, 40)
    path = tmp_path / "small.safetensors"
    ingot.torch.save_file({f"{row:05}": whole[row].clone() for row in range(75_000)}, path)
    found = ingot.torch.load_file(path, device="cuda")
    assert torch.equal(torch.stack([found[name] for name in sorted(found)]).cpu(), whole)


def test_load_file_waits_for_the_stream(path: Path, tensors: dict[str, Any]) -> None:
    for _ in range(20):
        old = torch.empty(8 * SLOT, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(20_000_000)
        old.fill_(0x99)
        # The allocator reuses this memory while the kernels above still run.
        del old
        found = ingot.torch.load_file(path, device="cuda")
        for name in (f"bytes.{3 * SLOT + 5}", "matrix"):
            assert same(found[name], tensors[name])


def test_load_file_on_two_streams_is_ordered(path: Path, tensors: dict[str, Any]) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    loaded = []
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)
            loaded.append(ingot.torch.load_file(path, device="cuda"))
    for stream, found in zip(streams, loaded, strict=True):
        with torch.cuda.stream(stream):
            assert all(same(found[name], expected) for name, expected in tensors.items())


def test_load_options_equal_those_on_the_host(path: Path, tensors: dict[str, Any]) -> None:
    matrix = tensors["matrix"]
    with ingot.safe_open(path, "pt", device="cuda") as file:
        part = file.get_slice("matrix")
        assert same(part[3:9], matrix[3:9])
        assert same(part[:, 5::7], matrix[:, 5::7])
        assert all(same(tensor, tensors[name]) for name, tensor in file.prefetch())
        with file.prefetch({"matrix": slice(10, 20)}) as loader, torch.cuda.stream(torch.cuda.Stream()):
            assert same(loader.take("matrix"), matrix[10:20])
    half = ingot.torch.load_file(path, device="cuda", keys=["matrix"], dtype="BF16")["matrix"]
    assert same(half, matrix.bfloat16())
    out = {"matrix": torch.zeros(777, 1000, device="cuda").T}
    ingot.torch.load_file(path, keys=["matrix"], out=out)
    assert same(out["matrix"].contiguous(), matrix)


@pytest.mark.parametrize(("stored", "wanted"), [("BF16", "F32"), ("F16", "F64"), ("F8_E4M3", "BF16")])
def test_load_file_widens_floats_as_on_the_host(tmp_path: Path, stored: str, wanted: str) -> None:
    dtype, wide = ingot.torch.DTYPES[stored], ingot.torch.DTYPES[wanted]
    path = tmp_path / "narrow.safetensors"
    values = torch.randn(70_000_001, generator=torch.Generator().manual_seed(3)).to(dtype)
    rows = torch.randn(999, 1001, generator=torch.Generator().manual_seed(4)).to(dtype)
    ingot.torch.save_file({"large": values, "rows": rows, "ids": torch.arange(9)}, path)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = ingot.torch.load_file(path, device="cuda", dtype=wanted, slices={"rows": (slice(3, 900, 2),)})
    nbytes = sum(tensor.nbytes for tensor in found.values())
    # A piece of 64 MiB, and the allocator's overhead.
    assert torch.cuda.max_memory_allocated() - before <= nbytes + (66 << 20)
    expected = {"large": values.to(wide), "rows": rows[3:900:2].to(wide), "ids": torch.arange(9)}
    assert all(same(found[name], tensor) for name, tensor in expected.items())
    target = {name: torch.zeros_like(tensor) for name, tensor in found.items() if name != "rows"}
    ingot.torch.load_into(target, path, strict=False)
    assert all(same(target[name], expected[name]) for name in target)


def test_save_file_writes_strided_tensors_after_the_stream(tmp_path: Path) -> None:
    path, side = tmp_path / "strided.safetensors", torch.cuda.Stream()
    weight = torch.zeros(2000, 3000, device="cuda").T
    torch.cuda.synchronize()
    for background in (False, True):
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            weight.fill_(7)
            future = ingot.torch.save_file({"weight": weight}, path, background=background)
            if future is not None:
                future.result()
            weight.zero_()
        assert (ingot.torch.load_file(path)["weight"] == 7).all()
    side.synchronize()


def test_load_file_and_save_file_use_pinned_memory_of_torch(
    path: Path, tensors: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The path for accelerators without a driver in ingot.
    monkeypatch.setattr(ingot.torch._devices, "gpu", lambda target: None)
    monkeypatch.setattr(ingot.torch._into, "gpu", lambda target: None)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found = ingot.torch.load_file(path, device="cuda")
        assert all(same(found[name], expected) for name, expected in tensors.items())
        out = {"matrix": torch.zeros(777, 1000, device="cuda").T}
        ingot.torch.load_file(path, keys=["matrix"], out=out)
        assert same(out["matrix"].contiguous(), tensors["matrix"])
        with ingot.safe_open(path, "pt", device="cuda") as file:
            assert all(same(tensor, tensors[name]) for name, tensor in file.prefetch())


def test_load_file_returns_memory_to_the_allocator(path: Path) -> None:
    ingot.torch.load_file(path, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = ingot.torch.load_file(path, device="cuda")
    nbytes = sum(tensor.nbytes for tensor in found.values())
    assert torch.cuda.max_memory_allocated() - before <= nbytes + (64 << 20)
    del found
    assert torch.cuda.memory_allocated() == before


def test_load_file_raises_the_memory_error_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    ingot.torch.save_file({"large": torch.zeros(256 << 20, dtype=torch.uint8)}, path)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((128 << 20) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            ingot.torch.load_file(path, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert ingot.torch.load_file(path, device="cuda")["large"].sum().item() == 0


def test_load_file_rejects_a_captured_stream(path: Path) -> None:
    ingot.torch.load_file(path, device="cuda")
    graph, value = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
    with torch.cuda.graph(graph):
        value += 1
        with pytest.raises(ingot.DeviceError) as caught:
            ingot.torch.load_file(path, device="cuda")
    assert caught.value.code == "device-capturing"
    graph.replay()
    assert value.sum().item() == 3


def _load(path: Path, codes: Any) -> None:
    try:
        ingot.torch.load_file(path, device="cuda")
        codes.put("loaded")
    except ingot.DeviceError as error:
        codes.put(error.code)


def test_load_file_rejects_a_forked_child(path: Path) -> None:
    ingot.torch.load_file(path, device="cuda")
    context = multiprocessing.get_context("fork")
    codes = context.Queue()
    child = context.Process(target=_load, args=(path, codes))
    child.start()
    assert codes.get(timeout=60) in ("device-forked", "no-device")
    child.join()


def test_load_file_names_a_missing_device(path: Path) -> None:
    with pytest.raises(ingot.DeviceError, match="cuda:77"):
        ingot.torch.load_file(path, device="cuda:77")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_load_file_serves_several_devices(path: Path, tensors: dict[str, Any]) -> None:
    found = ingot.torch.load_file(path, device={"bytes.*": "cuda:1", "*": "cuda:0"})
    for name, expected in tensors.items():
        assert same(found[name], expected)
        assert found[name].device.index == int(name.startswith("bytes."))
