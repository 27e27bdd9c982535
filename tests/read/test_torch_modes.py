"""Loading and saving within torch's modes, default devices and transforms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

import ingot
from support.processes import run

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    # torch warns about its own modules.
    warnings.simplefilter("ignore")
    from torch._subclasses import FakeTensorMode

    import ingot.torch

CODES = sorted(ingot.torch.DTYPES)


def tensors() -> dict[str, Any]:
    return {
        code: torch.arange(8, dtype=torch.uint8).view(dtype) for code, dtype in ingot.torch.DTYPES.items()
    }


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "device": lambda: torch.device("meta"),
    "default-device": lambda: default_device("meta"),
    "no-grad": torch.no_grad,
    "inference": torch.inference_mode,
}

# In a new process: the first load probes each dtype, and the result is cached.
FIRST = """
import torch
import ingot.torch
from contextlib import nullcontext
path, how = sys.argv[1:]
if how == "default-device":
    torch.set_default_device("meta")
with torch.device("meta") if how == "device" else nullcontext():
    first = ingot.torch.load_file(path)
    ingot.torch.save_file(first, path + ".again")
torch.set_default_device(None)
second = ingot.torch.load_file(path)
ingot.torch.save_file(second, path + ".later", shared="copy")
found = [tensor for loaded in (first, second) for tensor in loaded.values()]
say([[str(tensor.device), bytes(tensor.view(torch.uint8).numpy()).hex()] for tensor in found])
"""


@pytest.mark.parametrize("how", ["device", "default-device"])
def test_load_file_is_independent_of_the_default_device(tmp_path: Path, how: str) -> None:
    """Fails if a dtype is probed on the default device: then this load and later ones fail."""
    path = tmp_path / "all.safetensors"
    ingot.torch.save_file(tensors(), path)
    said = run("import warnings; warnings.simplefilter('ignore')" + FIRST, path, how).said()
    assert said == [["cpu", bytes(range(8)).hex()]] * (2 * len(CODES))
    assert all(Path(f"{path}.{name}").read_bytes() == path.read_bytes() for name in ("again", "later"))


@pytest.mark.parametrize("mode", MODES)
def test_load_file_is_independent_of_modes(tmp_path: Path, mode: str) -> None:
    path, again = tmp_path / "all.safetensors", tmp_path / "again.safetensors"
    values = {
        **tensors(),
        "lazy": torch.ones(4, dtype=torch.complex64).conj(),
        "steps": torch.arange(9.0)[::2],
    }
    ingot.torch.save_file(values, path)
    with MODES[mode]():
        ingot.torch.save_file(values, again)
        loaded = ingot.torch.load_file(path)
        with ingot.safe_open(path, "pt") as file:
            part = file.get_slice("steps")[[0, 2]]
        with pytest.raises(ingot.SharedMemoryError):
            ingot.torch.save_file({"a": loaded["F32"], "b": loaded["F32"].t()}, again)
    assert again.read_bytes() == path.read_bytes() == ingot.torch.save(loaded)
    assert part.tolist() == [0.0, 4.0]


def test_load_file_in_fake_mode_returns_fake_tensors(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    ingot.torch.save_file(tensors(), path)
    mode = FakeTensorMode()
    with mode:
        loaded = [
            ingot.torch.load_file(path),
            ingot.torch.load_file(path, "meta"),
            ingot.torch.load_file(path, backend="pread"),
            ingot.torch.load_file(path, slices={"F32": slice(1)}),
            ingot.torch.load(path.read_bytes()),
        ]
        handle = ingot.safe_open(path, "pt")
        loaded += [handle.get_tensors(handle.keys()), {"U8": handle.get_slice("U8")[:2]}]
        with pytest.raises(ingot.DestinationError):
            ingot.torch.load_file(path, out={"F32": torch.ones(2)})
    # A handle that was opened in the mode returns fake tensors after it, too.
    loaded.append({"F32": handle.get_tensor("F32")})
    for found in loaded:
        for code, tensor in found.items():
            assert type(tensor).__name__ == "FakeTensor"
            assert tensor.fake_mode is mode
            assert tensor.dtype is ingot.torch.DTYPES[code]
    assert loaded[0]["F32"].shape == (2,)
    assert loaded[0]["F32"].device.type == "cpu"
    assert loaded[1]["F32"].device.type == "meta"
    assert loaded[3]["F32"].shape == (1,)
    assert loaded[6]["U8"].shape == (2,)
    # A load after the mode returns real tensors.
    assert type(ingot.torch.load_file(path)["F32"]) is torch.Tensor


# torch's transforms import names that torch has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
def test_save_file_writes_outer_tensors_inside_modes(tmp_path: Path) -> None:
    path = tmp_path / "outside.safetensors"
    outside = {
        "plain": torch.ones(1, 3),
        "lazy": torch.ones(4, dtype=torch.complex64).conj(),
        "steps": torch.arange(9.0)[::2],
    }
    expected = ingot.torch.save(outside)

    def check(tensor: Any) -> Any:
        ingot.torch.save_file(outside, path)
        assert path.read_bytes() == expected == ingot.torch.save(outside)
        path.unlink()
        return (tensor * 2).sum()

    torch.vmap(check)(torch.ones(2, 3))
    torch.func.grad(check)(torch.ones(3))
    torch.func.functionalize(check)(torch.ones(3))
    torch.func.jvp(check, (torch.ones(3),), (torch.ones(3),))
    with FakeTensorMode():
        check(torch.ones(3))


def test_save_file_rejects_tensors_of_a_transform() -> None:
    with pytest.raises(
        ingot.SaveError,
        match=r"tensor `a`: a tensor inside of a transform .* the result of the transform",
    ):
        torch.vmap(lambda tensor: ingot.torch.save({"a": tensor}))(torch.ones(2, 3))
