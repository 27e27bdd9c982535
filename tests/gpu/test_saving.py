"""Saving from a real GPU: the bytes, and their order among the caller's work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ingot
import ingot.torch

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

SLOT = 4 << 20
SIZES = [0, 1, 255, 65_536, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT + 5]
BINTENSORS_LACKS = ["C64", "F4", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"]


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
def moved(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.cuda() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "options", [{}, {"durable": False}, {"atomic": False}, {"checksums": "blake3"}, {"format": "bintensors"}]
)
def test_save_file_writes_the_file_of_the_host(
    tmp_path: Path, tensors: dict[str, Any], moved: dict[str, Any], options: Any
) -> None:
    left_out = {f"dtype.{code}" for code in BINTENSORS_LACKS if options.get("format") == "bintensors"}
    for side, held in (("host", tensors), ("device", moved)):
        saved = {name: tensor for name, tensor in held.items() if name not in left_out}
        ingot.torch.save_file(saved, tmp_path / side, **options)
    assert (tmp_path / "device").read_bytes() == (tmp_path / "host").read_bytes()


def test_save_file_writes_strided_and_conjugated_tensors(tmp_path: Path) -> None:
    matrix = torch.randn(3000, 700, device="cuda")
    strange = {
        "transposed": matrix.T,
        "every third": matrix[::3, 1::2],
        "expanded": matrix[:1].expand(50, 700),
        "conjugated": torch.randn(40, dtype=torch.complex64, device="cuda").conj(),
    }
    ingot.torch.save_file(strange, tmp_path / "t", shared="copy")
    found = ingot.torch.load_file(tmp_path / "t")
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in strange.items())


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("snapshot", [None, "host", "device", False])
def test_save_file_has_the_step_at_the_call(tmp_path: Path, snapshot: Any, is_transposed: bool) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        weight = torch.zeros(2000, 3000, device="cuda")
        torch.cuda._sleep(100_000_000)
        weight += 1
        saved = {"weight": weight.T if is_transposed else weight}
        if snapshot is None:
            ingot.torch.save_file(saved, tmp_path / "t")
        else:
            future = ingot.torch.save_file(
                saved, tmp_path / "t", background=True, write_options={"snapshot": snapshot}
            )
            future.staged.result()
        # The next step changes the tensor while the save runs.
        weight += 1
        if snapshot is not None:
            future.result()
    found = ingot.torch.load_file(tmp_path / "t")["weight"]
    assert torch.equal(found, torch.ones(found.shape))


def test_save_sharded_and_save_model_read_the_device(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 100)).cuda()
    state = model.state_dict()
    ingot.torch.save_sharded(state, tmp_path / "sharded", max_shard_size=100_000)
    ingot.torch.save_model(model, tmp_path / "model.safetensors")
    for path in (tmp_path / "sharded", tmp_path / "model.safetensors"):
        found = ingot.torch.load_file(path)
        assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in state.items())
    with ingot.Writer(tmp_path / "written", {"w": ("F32", (200, 300))}) as writer:
        writer.write("w", state["0.weight"])
        writer.commit()
    assert torch.equal(ingot.torch.load_file(tmp_path / "written")["w"], state["0.weight"].cpu())


def test_save_file_rejects_a_captured_stream(tmp_path: Path, moved: dict[str, Any]) -> None:
    ingot.torch.save_file(moved, tmp_path / "before")
    graph, value = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
    with torch.cuda.graph(graph):
        value += 1
        with pytest.raises(ingot.DeviceError) as caught:
            ingot.torch.save_file(moved, tmp_path / "t")
    assert caught.value.code == "device-capturing"
    graph.replay()
    assert value.sum().item() == 3
    assert not (tmp_path / "t").exists()
