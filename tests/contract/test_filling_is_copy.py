"""Filling a tensor in place has the same effect on autograd as `copy_` under `torch.no_grad()`.

`copy_` itself is the oracle: each kind of destination is filled by it and by each function of ingot, and the
version counters, the values, the gradients and the errors must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.autograd import forward_ad

import ingot.dcp
import ingot.torch

# torch's transforms import names that torch has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class Made(NamedTuple):
    """A destination, tensors whose version counters are compared, and operations around the filling."""

    tensor: torch.Tensor
    watched: list[torch.Tensor]
    # Called after the filling: uses the tensors that autograd has saved, or the tangents.
    after: Callable[[], Any] = lambda: None
    # Calls the function that fills the tensor, maybe in a transform.
    around: Callable[[Callable[[], None]], Any] = lambda fill: fill()


def leaf(*shape: int) -> torch.Tensor:
    return torch.full(shape, 3.0, requires_grad=True)


def gradient(loss: torch.Tensor, *inputs: torch.Tensor) -> Callable[[], Any]:
    return lambda: [found.tolist() for found in torch.autograd.grad(loss, inputs)]


def saved_leaf() -> Made:
    tensor = leaf(2, 3)
    return Made(tensor, [tensor], gradient((tensor**2).sum(), tensor))


def saved_inner() -> Made:
    start = leaf(2, 3)
    inner = start * 2
    return Made(inner, [inner, start], gradient((inner**2).sum(), start))


def unsaved_inner() -> Made:
    start = leaf(2, 3)
    inner = start * 2
    return Made(inner, [inner, start], gradient(inner.sum(), start))


def view_of_saved() -> Made:
    base = leaf(4, 3)
    loss = (base**2).sum()
    return Made(base.detach()[1:3], [base], gradient(loss, base))


def grad_view_of_saved() -> Made:
    base = leaf(4, 3)
    middle = base * 1
    return Made(middle[1:3], [middle, base], gradient((middle**2).sum(), base))


def base_of_saved_view() -> Made:
    base = leaf(2, 3)
    view = base[0]
    return Made(base, [base, view], gradient((view**2).sum(), base))


def multi_output_view() -> Made:
    base = leaf(2, 2, 3)
    first = (base * 1).unbind()[0]
    return Made(first, [first, base], gradient((first**2).sum(), base))


def chunk_of_leaf() -> Made:
    base = leaf(4, 3)
    first = base.chunk(2)[0]
    return Made(first, [first, base], gradient((first**2).sum(), base))


def detached_alias() -> Made:
    tensor = leaf(2, 3)
    return Made(tensor.detach(), [tensor], gradient((tensor**2).sum(), tensor))


def data_alias() -> Made:
    tensor = leaf(2, 3)
    alias = tensor.data
    return Made(alias, [tensor, alias], gradient((tensor**2).sum(), tensor))


def transposed() -> Made:
    base = leaf(3, 2)
    return Made(base.detach().t(), [base], gradient((base**2).sum(), base))


def strided() -> Made:
    base = leaf(2, 6)
    return Made(base.detach()[:, ::2], [base], gradient((base**2).sum(), base))


def parameter() -> Made:
    tensor = torch.nn.Parameter(torch.ones(2, 3))
    return Made(tensor, [tensor], gradient((tensor**2).sum(), tensor))


def buffer_saved_by_another() -> Made:
    tensor, weight = torch.ones(2, 3), leaf(2, 3)
    return Made(tensor, [tensor, weight], gradient((tensor * weight).sum(), weight))


def inference() -> Made:
    with torch.inference_mode():
        return Made(torch.ones(2, 3), [])


def view_of_inference() -> Made:
    with torch.inference_mode():
        base = torch.ones(4, 3)
    return Made(base[1:3], [])


def in_inference(make: Callable[[], Made]) -> Callable[[], Made]:
    def made() -> Made:
        def around(fill: Callable[[], None]) -> None:
            with torch.inference_mode():
                fill()

        return make()._replace(around=around)

    return made


def dual() -> Made:
    level = forward_ad.dual_level()
    level.__enter__()
    tensor = forward_ad.make_dual(torch.ones(2, 3), torch.full((2, 3), 5.0))

    def after() -> Any:
        try:
            return [part.tolist() for part in forward_ad.unpack_dual(tensor * tensor)]
        finally:
            level.__exit__(None, None, None)

    return Made(tensor, [tensor], after)


def captured(transform: Callable[..., Any]) -> Callable[[], Made]:
    def made() -> Made:
        tensor = torch.ones(2, 3)
        found: list[Any] = []

        def around(fill: Callable[[], None]) -> None:
            def inner(x: torch.Tensor) -> torch.Tensor:
                fill()
                return (x * tensor).sum()

            found.append(transform(inner))

        return Made(tensor, [tensor], lambda: str(found), around)

    return made


ONES = torch.ones(2, 3)
KINDS: dict[str, Callable[[], Made]] = {
    "plain": lambda: Made(tensor := torch.ones(2, 3), [tensor]),
    "saved leaf": saved_leaf,
    "saved inner": saved_inner,
    "unsaved inner": unsaved_inner,
    "view of saved": view_of_saved,
    "grad view of saved": grad_view_of_saved,
    "base of saved view": base_of_saved_view,
    "multi-output view": multi_output_view,
    "chunk of leaf": chunk_of_leaf,
    "detached alias": detached_alias,
    "data alias": data_alias,
    "transposed": transposed,
    "strided": strided,
    "parameter": parameter,
    "saved by another": buffer_saved_by_another,
    "expanded": lambda: Made(tensor := torch.ones(3).expand(2, 3), [tensor]),
    "another shape": lambda: Made(tensor := torch.ones(2, 4), [tensor]),
    "inference": inference,
    "view of inference": view_of_inference,
    "inference inside": in_inference(inference),
    "leaf inside": in_inference(saved_leaf),
    "view inside": in_inference(view_of_saved),
    "dual": dual,
    "vmap": captured(lambda inner: torch.vmap(inner)(torch.ones(2, 2, 3))),
    "grad": captured(lambda inner: torch.func.grad(inner)(ONES)),
    "jvp": captured(lambda inner: torch.func.jvp(inner, (ONES,), (ONES,))),
    "functionalize": captured(lambda inner: torch.func.functionalize(inner)(ONES)),
    "vmap in grad": captured(lambda inner: torch.func.grad(lambda x: torch.vmap(inner)(x).sum())(ONES[None])),
}


def by_module(tensor: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("w", tensor)
    return module


def parts(path: Path, tensor: torch.Tensor, **options: Any) -> None:
    """Fill by rows, through the list of destinations that `out` takes."""
    rows = [tensor.detach()[:1], tensor.detach()[1:]]
    ingot.torch.load_file(path, out={"w": rows}, slices={"w": [slice(0, 1), slice(1, 2)]}, **options)


WAYS: dict[str, Callable[[Path, torch.Tensor], Any]] = {
    "load_into": lambda path, tensor: ingot.torch.load_into({"w": tensor}, path),
    "load_into, pread": lambda path, tensor: ingot.torch.load_into({"w": tensor}, path, backend="pread"),
    "load_into, converted": lambda path, tensor: ingot.torch.load_into(
        {"w": tensor}, path.with_name("float64.safetensors")
    ),
    # Copied by torch, one piece at a time.
    "load_into, copied": lambda path, tensor: ingot.torch.load_into(
        {"w": tensor}, path.with_name("int32.safetensors")
    ),
    "load_into, module": lambda path, tensor: ingot.torch.load_into(by_module(tensor), path),
    "load_model": lambda path, tensor: ingot.torch.load_model(by_module(tensor), path),
    "out": lambda path, tensor: ingot.torch.load_file(path, out={"w": tensor}),
    "out, sliced": lambda path, tensor: ingot.torch.load_file(
        path, out={"w": tensor}, slices={"w": (slice(None), slice(None))}
    ),
    "out, parts": parts,
    "dcp": lambda path, tensor: dcp.load({"w": tensor}, storage_reader=ingot.dcp.Reader(path), no_dist=True),
}


def outcome(made: Made, fill: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    before = [tensor._version for tensor in made.watched]
    try:
        made.around(lambda: fill(made.tensor))
        refused = False
    except (RuntimeError, ingot.DestinationError, dcp.CheckpointException):
        refused = True
    bumped = [tensor._version > old for tensor, old in zip(made.watched, before, strict=True)]
    try:
        after = made.after()
    except RuntimeError:
        # "one of the variables needed for gradient computation has been modified by an inplace operation"
        after = "raises"
    # `copy_` may write before it fails.
    values = None if refused else made.tensor.tolist()
    return {"refused": refused, "bumped": bumped, "after": after, "values": values}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name, dtype in (("model", torch.float32), ("float64", torch.float64), ("int32", torch.int32)):
        ingot.torch.save_file({"w": VALUES.to(dtype)}, tmp_path / f"{name}.safetensors")
    return tmp_path / "model.safetensors"


VALUES = torch.arange(6.0).view(2, 3)


@torch.no_grad()
def copied(tensor: torch.Tensor) -> None:
    if tensor.shape != VALUES.shape:
        raise RuntimeError("another shape")
    tensor.copy_(VALUES)


# These fill what `.detach()` returns, which shares the version counter but has no tangent.
DETACHING = {"out, parts", "dcp"}


@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in KINDS for way in WAYS if not (kind == "dual" and way in DETACHING)],
)
def test_filling_has_the_outcome_of_copy(path: Path, kind: str, way: str) -> None:
    expected = outcome(KINDS[kind](), copied)
    found = outcome(KINDS[kind](), lambda tensor: WAYS[way](path, tensor))
    assert found == expected
