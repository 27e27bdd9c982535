"""A map from tensor names to devices has the same rules in every function that loads tensors."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

import ingot
import ingot.numpy
import ingot.torch
from support.errors import raises

TENSORS = {f"layers.{number}.{kind}": torch.ones(2, 3) for number in range(3) for kind in ("w", "b")} | {
    "Head[0]": torch.ones(2, 3)
}


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """Return one backend instead of each: devices are chosen before anything is read."""
    return ("mmap", "pread")[crc32(request.node.name.encode()) % 2]


@pytest.fixture
def path(path: Path) -> Path:
    ingot.torch.save_file(TENSORS, path)
    return path


def one_by_one(path: Path, device: Any, backend: str) -> dict[str, torch.Tensor]:
    with ingot.safe_open(path, "pt", device, backend=backend) as file:
        return {name: file[name] for name in file}


def at_once(path: Path, device: Any, backend: str) -> dict[str, torch.Tensor]:
    with ingot.safe_open(path, "pt", device, backend=backend) as file:
        return file.get_tensors(name for name in TENSORS)


def ahead(path: Path, device: Any, backend: str) -> dict[str, torch.Tensor]:
    with ingot.safe_open(path, "pt", device, backend=backend).prefetch() as tensors:
        return dict(tensors)


def sliced(path: Path, device: Any, backend: str) -> dict[str, torch.Tensor]:
    with ingot.safe_open(path, "pt", device, backend=backend) as file:
        return {name: file.get_slice(name)[:1] for name in file}


def whole(path: Path, device: Any, backend: str) -> dict[str, torch.Tensor]:
    return ingot.torch.load_file(path, device, backend=backend)


def chosen(path: Path, device: Any, backend: str) -> dict[str, torch.Tensor]:
    return ingot.torch.load_file(path, device, backend=backend, keys=TENSORS)


def in_parts(path: Path, device: Any, backend: str) -> dict[str, torch.Tensor]:
    slices = {name: slice(1) for name in TENSORS}
    return ingot.torch.load_file(path, device, backend=backend, slices=slices)


def cast(path: Path, device: Any, backend: str) -> dict[str, torch.Tensor]:
    return ingot.torch.load_file(path, device, backend=backend, dtype="BF16")


def from_an_object(path: Path, device: Any, backend: str) -> dict[str, torch.Tensor]:
    return ingot.torch.load_file(BytesIO(path.read_bytes()), device)


DOORS = [one_by_one, at_once, ahead, sliced, whole, chosen, in_parts, cast, from_an_object]
every_door = pytest.mark.parametrize("door", DOORS)
Door = Callable[[Path, Any, str], dict[str, torch.Tensor]]


@every_door
@pytest.mark.parametrize(
    ("device", "on_meta"),
    [
        ({"*": "meta"}, set(TENSORS)),
        ({"layers.0.*": "meta", "*": "cpu"}, {"layers.0.w", "layers.0.b"}),
        # The first matching pattern applies, not the most specific one.
        ({"layers.*": "cpu", "layers.0.*": "meta", "*": torch.device("meta")}, {"Head[0]"}),
        ({"*.?.w": "meta", "*": None}, {"layers.0.w", "layers.1.w", "layers.2.w"}),
        # Brackets are part of names.
        ({"Head[0]": "meta", "*": "cpu"}, {"Head[0]"}),
        (lambda info: "meta" if info.name.endswith("w") else "cpu", {f"layers.{n}.w" for n in range(3)}),
        (lambda info: torch.device("meta" if info.begin == 0 else "cpu"), {"Head[0]"}),
    ],
)
def test_load_file_sends_each_tensor_to_its_device(
    path: Path, backend: str, door: Door, device: Any, on_meta: set[str]
) -> None:
    found = door(path, device, backend)
    assert found.keys() == TENSORS.keys()
    assert {name for name, tensor in found.items() if tensor.is_meta} == on_meta
    for name in found.keys() - on_meta:
        assert (found[name] == 1).all()


@every_door
@pytest.mark.parametrize("device", [{}, {"layers.*": "cpu"}, {"layers.?.w": "cpu", "layers.*": "meta"}])
def test_load_file_names_a_tensor_without_a_pattern(
    path: Path, backend: str, door: Door, device: Any
) -> None:
    with raises(ingot.OptionError, "no pattern of device matches", code="no-device") as caught:
        door(path, device, backend)
    assert caught.value.tensor in TENSORS
    assert caught.value.tensor in str(caught.value)
    assert caught.value.expected == tuple(device)
    if device:
        assert caught.value.tensor == "Head[0]"


@every_door
@pytest.mark.parametrize("pattern", ["head*", "layer.0.*", "Head[[]0]"])
def test_device_rejects_an_unmatched_pattern(path: Path, backend: str, door: Door, pattern: str) -> None:
    with raises(ingot.TensorNotFoundError, r"did you mean `", tensor=pattern):
        door(path, {pattern: "cpu", "*": "cpu"}, backend)


def test_load_file_checks_devices_before_reading(path: Path) -> None:
    told: list[tuple[int, int]] = []
    for options in ({}, {"dtype": "BF16"}, {"slices": {"layers.0.w": 0}}, {"verify": True}):
        with pytest.raises(ingot.OptionError, match="no pattern"):
            ingot.torch.load_file(
                path,
                {"layers.*": "meta"},
                backend="pread",
                progress=lambda done, total: told.append((done, total)),
                **options,  # type: ignore[arg-type]
            )
    assert [done for done, _ in told if done] == []


def test_get_tensor_and_get_slice_check_devices_before_reading(path: Path) -> None:
    class Counting(BytesIO):
        reads = 0

        def read(self, size: int | None = -1, /) -> bytes:
            self.reads += 1
            return super().read(size)

        def readinto(self, buffer: Any, /) -> int:
            self.reads += 1
            return super().readinto(buffer)

        # Read as a file, and not as a buffer.
        getbuffer = None  # type: ignore[assignment]

    source = Counting(path.read_bytes())
    file = ingot.safe_open(source, "pt", {"layers.*": "cpu"})
    part, before = file.get_slice("Head[0]"), source.reads
    for read in (lambda: file["Head[0]"], lambda: file.get_tensor("Head[0]"), lambda: part[:1]):
        with pytest.raises(ingot.OptionError, match="no pattern"):
            read()
    assert source.reads == before
    assert (file["layers.0.w"] == 1).all()
    assert source.reads > before


def test_get_tensor_of_an_unknown_name_ignores_devices(path: Path) -> None:
    file = ingot.safe_open(path, "pt", {"layers.*": "cpu"})
    for read in (lambda: file["nope"], lambda: file.get_tensors(["nope"])):
        with pytest.raises(ingot.TensorNotFoundError):
            read()


def test_load_file_needs_no_device_for_unread_or_given_tensors(path: Path) -> None:
    assert len(ingot.torch.load_file(path, {"layers.*": "cpu"}, keys="layers*")) == 6
    out = {"Head[0]": torch.zeros(2, 3)}
    found = ingot.torch.load_file(path, {"layers.*": "meta"}, out=out)
    assert found["Head[0]"] is out["Head[0]"]
    assert out["Head[0]"].sum() == 6
    assert found["layers.0.w"].is_meta


def test_load_file_keeps_aliases_on_one_device(tmp_path: Path) -> None:
    tied = torch.ones(4)
    path = tmp_path / "tied"
    ingot.torch.save_file({"a": tied, "b": tied, "c": torch.ones(1)}, path, shared="alias")
    found = ingot.torch.load_file(path, {"a": "meta", "c": "cpu"})
    assert found["a"].is_meta
    assert found["b"].is_meta
    assert not found["c"].is_meta


def test_load_model_takes_devices_by_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    ingot.torch.save_model(model, tmp_path / "m", None)
    other = torch.nn.Linear(2, 2)
    ingot.torch.load_model(other, tmp_path / "m", device={"*": "cpu"})
    assert torch.equal(model.weight, other.weight)


def test_devices_by_name_are_checked_on_entry(path: Path) -> None:
    with pytest.raises(ingot.OptionError, match="nope"):
        ingot.torch.load_file(path, {"unused": "nope", "*": "cpu"})
    with pytest.raises(ingot.OptionError, match="nope"):
        ingot.safe_open(path, "pt", {"unused": "nope"})
    with pytest.raises(ingot.OptionError, match="nope"):
        ingot.torch.load_file(path, lambda info: "nope")
    with pytest.raises(TypeError, match=r"device takes names, patterns and ingot\.glob"):
        ingot.torch.load_file(path, {3: "cpu"})
    with pytest.raises(ZeroDivisionError):
        ingot.torch.load_file(path, lambda info: 1 // 0)


def test_safe_open_with_devices_by_name_is_pickled(path: Path) -> None:
    import pickle

    file = pickle.loads(pickle.dumps(ingot.safe_open(path, "pt", {"layers.*": "meta", "*": "cpu"})))
    assert file["layers.0.w"].is_meta
    assert not file["Head[0]"].is_meta
