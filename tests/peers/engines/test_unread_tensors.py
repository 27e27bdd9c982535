"""Tensors that an engine receives before they are read: only the used parts are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ingot
import ingot.torch
from ingot.engines._weights import UnreadTensor

VALUES = torch.arange(7 * 5 * 6, dtype=torch.float32).view(7, 5, 6)


class Counting:
    """A part of a file that records its reads."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.shape = tuple(values.shape)
        self.elements_read = 0
        self.readings = 0

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self.values[index].clone()
        self.elements_read += found.numel()
        self.readings += 1
        return found


def unread(values: torch.Tensor = VALUES) -> tuple[Any, Counting]:
    part = Counting(values)
    return UnreadTensor(part, values.dtype, values.device), part  # type: ignore[arg-type]


def test_unread_tensor_has_facts_without_reading() -> None:
    tensor, part = unread()
    assert (tensor.shape, tensor.dtype, tensor.device) == (VALUES.shape, VALUES.dtype, VALUES.device)
    assert (tensor.size(1), tensor.dim(), tensor.ndim, len(tensor)) == (5, 3, 3, 7)
    assert (tensor.numel(), tensor.nbytes, tensor.element_size()) == (VALUES.numel(), VALUES.nbytes, 4)
    assert tensor.is_contiguous()
    assert tensor.is_floating_point()
    assert not tensor.requires_grad
    assert isinstance(tensor, torch.Tensor)
    assert "unread" in repr(tensor)
    assert tensor.data is tensor
    assert tensor.detach() is tensor
    assert part.readings == 0


# Each returns one or more parts of a tensor.
PARTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "narrow": lambda t: t.narrow(0, 2, 3),
    "narrow from the end": lambda t: torch.narrow(t, -1, -4, 2),
    "narrow to nothing": lambda t: t.narrow(1, 5, 0),
    "narrow twice": lambda t: t.narrow(0, 1, 4).narrow(2, 3, 2),
    "row": lambda t: t[3],
    "last row": lambda t: t[-1],
    "element": lambda t: t[1, 2, 3],
    "slices": lambda t: t[1:6:2, ..., 2:],
    "after a row": lambda t: t[2][1:3],
    "dots": lambda t: t[..., 0],
    "all": lambda t: t[:],
    "select": lambda t: t.select(1, -2),
    "chunk": lambda t: t.chunk(3, 0),
    "more chunks than rows": lambda t: torch.chunk(t, 9, dim=1),
    "split by a size": lambda t: t.split(4, dim=0),
    "split by sizes": lambda t: torch.split(t, [1, 0, 4], dim=1),
}


@pytest.mark.parametrize("name", PARTS)
def test_unread_tensor_reads_a_part_when_used(name: str) -> None:
    tensor, part = unread()
    expected, found = PARTS[name](VALUES), PARTS[name](tensor)
    assert part.readings == 0
    one = isinstance(expected, torch.Tensor)
    expected, found = ([expected], [found]) if one else (expected, found)
    assert [each.shape for each in found] == [each.shape for each in expected]
    for theirs, ours in zip(expected, found, strict=True):
        destination = torch.empty_like(theirs)
        destination.copy_(ours)
        assert torch.equal(destination, theirs)
    assert part.elements_read == sum(each.numel() for each in expected)


# Operations other than parts: the values are read once, and torch does the rest.
USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "sum with a plain one": lambda t: VALUES + t,
    "in a list": lambda t: torch.cat([t, VALUES]),
    "transpose": lambda t: t.transpose(0, 1),
    "matrix": lambda t: t.flatten(1).t(),
    "dtype": lambda t: t.to(torch.bfloat16),
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "positions": lambda t: t[torch.tensor([1, 3])],
    "list": lambda t: t[[1, 3]],
    "mask": lambda t: t[VALUES > 3],
    "new dimension": lambda t: t[None],
    "view": lambda t: t.view(torch.int32),
    "contiguous": lambda t: t.contiguous(),
    "clone": lambda t: t.clone(),
}


@pytest.mark.parametrize("name", USES)
def test_unread_tensor_runs_other_operations_on_values(name: str) -> None:
    tensor, part = unread()
    expected = USES[name](VALUES)
    for _ in range(2):
        found = USES[name](tensor)
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
    assert part.readings == 1


def test_unread_tensor_has_values_below_python() -> None:
    tensor, _ = unread()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(torch.ops.aten.add.Tensor(tensor, 1), VALUES + 1)


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "narrow too far": lambda t: t.narrow(0, 5, 3),
    "narrow of no dimension": lambda t: t.narrow(3, 0, 1),
    "row too far": lambda t: t[7],
    "too many indices": lambda t: t[0, 0, 0, 0],
    "negative step": lambda t: t[::-1],
    "sizes that miss some": lambda t: t.split([1, 2], 0),
    "negative size": lambda t: t.split(-1),
    "no chunks": lambda t: t.chunk(0),
    "select too far": lambda t: t.select(0, 7),
    "item of many": lambda t: t.item(),
}


@pytest.mark.parametrize("name", WRONG)
def test_unread_tensor_raises_the_errors_of_torch(name: str) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError)) as theirs:
        WRONG[name](VALUES)
    with pytest.raises(theirs.type) as ours:
        WRONG[name](unread()[0])
    assert str(ours.value) == str(theirs.value)


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[str, tuple[Any, ...]]]:
    found: list[tuple[str, tuple[Any, ...]]] = []
    shape = list(VALUES.shape)
    for _ in range(draw(st.integers(1, 4))):
        kinds = ["narrow", "slice", "select"] if len(shape) > 1 else ["narrow", "slice"]
        kind = draw(st.sampled_from(kinds))
        dim = draw(st.integers(0, len(shape) - 1))
        if kind == "narrow":
            begin = draw(st.integers(0, shape[dim]))
            shape[dim] = draw(st.integers(0, shape[dim] - begin))
            found.append((kind, (dim, begin, shape[dim])))
        elif kind == "slice":
            bounds = st.none() | st.integers(-9, 9)
            index = slice(draw(bounds), draw(bounds), draw(st.none() | st.integers(1, 3)))
            shape[dim] = len(range(shape[dim])[index])
            found.append((kind, (*[slice(None)] * dim, index)))
        elif shape[dim]:
            found.append((kind, (dim, draw(st.integers(-shape[dim], shape[dim] - 1)))))
            del shape[dim]
    return found


@given(cuts())
def test_unread_tensor_parts_of_parts_equal_the_tensors(steps: list[tuple[str, tuple[Any, ...]]]) -> None:
    expected: torch.Tensor = VALUES
    found, part = unread()
    for kind, step in steps:
        if kind == "slice":
            expected, found = expected[step], found[step]
        else:
            expected, found = getattr(expected, kind)(*step), getattr(found, kind)(*step)
    assert part.readings == 0
    assert found.shape == expected.shape
    assert torch.equal(found.clone(), expected)
    assert part.elements_read == expected.numel()


def test_unread_tensor_returns_the_values_of_the_file(path: Path, backend: str) -> None:
    ingot.torch.save_file({"a": VALUES, "scalar": torch.tensor(3.5)}, path)
    with ingot.safe_open(path, "torch", backend=backend) as file:
        tensor: Any = UnreadTensor(file.get_slice("a"), torch.float32, torch.device("cpu"))
        scalar: Any = UnreadTensor(file.get_slice("scalar"), torch.float32, torch.device("cpu"))
    # They outlive the handle, as slices do.
    assert torch.equal(tensor.narrow(1, 2, 2) * 1, VALUES.narrow(1, 2, 2))
    assert torch.equal(tensor[1:6:2, ..., 2:] * 1, VALUES[1:6:2, ..., 2:])
    assert scalar.item() == 3.5
    assert scalar.shape == ()
