"""A program as users write it. Checkers look at it (`make lint-types`), and a test runs it."""

# pyright: strict
from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from typing import Any, assert_type

import numpy
import torch

import ingot
import ingot.torch
from ingot.typing import Framework

Array = numpy.ndarray[Any, numpy.dtype[Any]]


def with_torch(path: str) -> float:
    with ingot.safe_open(path, "pt") as file:
        assert_type(file, ingot.safe_open[torch.Tensor])
        assert_type(file["w"], torch.Tensor)
        assert_type(file.get_tensor("w"), torch.Tensor)
        assert_type(file.get("w"), torch.Tensor | None)
        assert_type(file.get("w", 0), torch.Tensor | int)
        assert_type(file.get_tensors(["w"]), dict[str, torch.Tensor])
        assert_type(file.keys(), list[str])
        assert_type(file.items(), ItemsView[str, torch.Tensor])
        assert_type(file.get_slice("w"), ingot.TensorSlice[torch.Tensor])
        assert_type(file.get_slice("w")[:1], torch.Tensor)
        assert_type(file.get_slice("w").shape, tuple[int, ...])
        assert_type(file.get_slice("w").ndim, int)
        assert_type(file.prefetch(keys="w"), ingot.PrefetchLoader[torch.Tensor])
        assert_type(file.prefetch({"w": slice(0, 1)}).take("w"), torch.Tensor)
        for name, tensor in file.prefetch(keys=sorted(file)):
            assert_type(name, str)
            assert_type(tensor, torch.Tensor)
        return float(total(file))


def total(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A function of mappings accepts a handle."""
    found = torch.zeros(())
    for tensor in tensors.values():
        found = found + tensor.sum()
    return found


def with_numpy(path: str) -> float:
    file = ingot.safe_open(path, framework="np", device="cpu", backend="pread", strict=True)
    assert_type(file, ingot.safe_open[Array])
    assert_type(file["w"], Array)
    numpy.asarray(file.get_slice("w"))
    return float(file["w"].sum())


def with_any(path: str, framework: Framework) -> None:
    file = ingot.safe_open(path, framework)
    assert_type(file, ingot.safe_open[Any])
    assert_type(iter(file), Iterator[str])
    bare: ingot.safe_open = file
    assert_type(bare["w"], Any)


def devices(path: str) -> None:
    assert_type(ingot.torch.load_file(path, {"w": "meta", "*": "cpu"}), dict[str, torch.Tensor])
    ingot.torch.load_file(path, lambda info: "meta" if info.nbytes > 100 else "cpu")


def saving(path: str) -> None:
    ingot.torch.save_file({"w": torch.ones(2, 3)}, path, durable=False, write_options={"align": 64})
    ingot.torch.save_file({"w": torch.ones(2, 3)}, path, background=True, durable=False).result()


def mistakes(path: str) -> None:
    """Calls that checkers reject: mypy reports an unneeded `ignore`. Never called."""
    number: int = ingot.safe_open(path, "pt")["w"]  # type: ignore[assignment]
    del number
    ingot.torch.save_file({"w": torch.ones(2, 3)}, path, durable="yes")  # type: ignore[call-overload]


def main(path: str) -> None:
    saving(path)
    assert with_torch(path) == with_numpy(path) == 6
    with_any(path, "np")
    devices(path)
