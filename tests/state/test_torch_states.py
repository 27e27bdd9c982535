"""Modules, optimizers and other objects of torch are saved as their state dicts, and loaded in place."""

from __future__ import annotations

import ast
import cProfile
import inspect
import json
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import ingot
import ingot.numpy
import ingot.torch
from ingot._state.encoder import Encoder
from ingot.torch import RNG, load_state, save_state
from support.errors import raises

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.1),
    "Rprop": torch.optim.Rprop,
    "Adamax": torch.optim.Adamax,
}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    data = torch.rand(16, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(data) - 1).pow(2).mean()
        loss.backward()
        return loss

    return float(optimizer.step(closure).detach())  # type: ignore[arg-type,union-attr]


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumes_as_if_it_had_not_stopped(name: str, has_stepped: bool, path: Path) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(2):
        step(model, optimizer)
    save_state({"model": model, "optimizer": optimizer, "rng": RNG()}, path)
    losses = [step(model, optimizer) for _ in range(3)]
    other = network(1)
    fresh = OPTIMIZERS[name](other.parameters())
    if has_stepped:
        step(other, fresh)
    load_state(path, into={"model": other, "optimizer": fresh, "rng": RNG()})
    assert [step(other, fresh) for _ in range(3)] == losses
    assert_equal(other.state_dict(), model.state_dict())
    assert_equal(fresh.state_dict(), optimizer.state_dict())


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3]),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 100),
    "CyclicLR": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.5),
    "ReduceLROnPlateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)],
        [3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_come_back(name: str, path: Path) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(network().parameters(), lr=0.2, momentum=0.5)
        return optimizer, SCHEDULERS[name](optimizer)

    def run(optimizer: Any, scheduler: Any) -> list[float]:
        rates = []
        for _ in range(4):
            optimizer.step()
            scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = made()
    run(optimizer, scheduler)
    save_state({"optimizer": optimizer, "scheduler": scheduler}, path)
    other, second = made()
    load_state(path, into={"optimizer": other, "scheduler": second})
    assert_equal(second.state_dict(), scheduler.state_dict())
    assert run(other, second) == run(optimizer, scheduler)


class Loader:
    """A data loader with a state, as torchdata's StatefulDataLoader has."""

    def __init__(self) -> None:
        self.order = torch.randperm(20_000).tolist()
        self.at = 0
        self.sampler = torch.Generator().manual_seed(4)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at, "sampler": self.sampler.get_state(), "more": [("x", 1)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]
        self.sampler.set_state(state["sampler"])


def test_scalers_and_loaders_come_back(path: Path) -> None:
    loader, scaler = Loader(), torch.amp.GradScaler("cpu", init_scale=128.0)
    loader.at = 7
    save_state({"loader": loader, "scaler": scaler, "epochs": [loader.state_dict()]}, path)
    other, fresh = Loader(), torch.amp.GradScaler("cpu")
    found = load_state(path, into={"loader": other, "scaler": fresh})
    assert (found["loader"], found["scaler"]) == (other, fresh)
    assert_equal(other.state_dict(), loader.state_dict())
    assert fresh.get_scale() == 128
    assert found["epochs"][0]["at"] == 7


def test_arrays_of_numpy_come_back_beside_tensors_of_torch(path: Path) -> None:
    model, losses = network(), np.array([0.5, 0.25, 0.125])
    save_state({"model": model, "losses": losses, "best": [np.array(0.125)]}, path)
    fresh = {"model": network(1), "losses": np.array([]), "best": [np.array(9.0)]}
    found = load_state(path, into=fresh)
    assert_equal(found["model"].state_dict(), model.state_dict())
    np.testing.assert_array_equal(found["losses"], losses)
    assert found["best"] == [0.125]
    with raises(ingot.CheckpointError, "`losses`: expected a tensor, found none", code="state-missing"):
        load_state(path, into={**fresh, "losses": torch.ones(3)})


def test_a_module_alone_is_a_file_of_its_tensors(path: Path) -> None:
    model, other = network(), network(1)
    save_state(model, path)
    assert ingot.open(path).keys() == sorted(model.state_dict())
    assert load_state(path, into=other) is other
    assert_equal(other.state_dict(), model.state_dict())


def test_load_state_fills_modules_in_place(path: Path) -> None:
    model, other = network(), network(1)
    save_state({"model": model}, path)
    before = {name: (id(tensor), tensor.data_ptr()) for name, tensor in other.named_parameters()}
    load_state(path, into={"model": other})
    assert before == {name: (id(tensor), tensor.data_ptr()) for name, tensor in other.named_parameters()}
    half = network(1).to(torch.bfloat16)
    load_state(path, into={"model": half})
    assert_equal(half.state_dict(), network().to(torch.bfloat16).state_dict())


def packed(begin: int) -> torch.Tensor:
    return torch.arange(begin, begin + 12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2)


def test_load_state_fills_tensors_of_four_bits_in_place(path: Path) -> None:
    def made(begin: int) -> dict[str, Any]:
        model = nn.Module()
        model.register_buffer("weight", packed(begin))
        return {"model": model, "plain": packed(begin + 100)}

    save_state(made(1), path)
    into = made(20)
    before = into["model"].weight.data_ptr(), into["plain"].data_ptr()
    load_state(path, into=into)
    assert before == (into["model"].weight.data_ptr(), into["plain"].data_ptr())
    for found, expected in ((into["model"].weight, packed(1)), (into["plain"], packed(101))):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    into["plain"] = packed(1).view(torch.uint8)[:2].view(torch.float4_e2m1fn_x2)
    with pytest.raises(ingot.DestinationError, match=r"`plain`: expected shape \[2, 4\], found \[3, 4\]"):
        load_state(path, into=into)
    # NumPy has one element per byte, and the file has two.
    array = np.zeros((3, 8), ml_dtypes.float4_e2m1fn)
    with pytest.raises(
        ingot.DestinationError, match="`plain`: no file has tensors of the destination's dtype"
    ) as caught:
        ingot.numpy.load_state(path, into={"plain": array}, keys="plain")
    assert caught.value.tensor == "plain"


def test_load_state_ties_tied_parameters(path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)
            self.outer.weight = self.inner.weight

    model, other = Tied(), Tied()
    optimizers = [torch.optim.Adam(one.parameters()) for one in (model, other)]
    model.outer(model.inner(torch.ones(1, 3))).sum().backward()
    optimizers[0].step()
    save_state({"model": model, "optimizer": optimizers[0]}, path)
    names = ingot.open(path).keys()
    assert [name for name in names if name.startswith("model.") and "weight" in name] == [
        "model.inner.weight"
    ]
    load_state(path, into={"model": other, "optimizer": optimizers[1]})
    assert_equal(other.state_dict(), model.state_dict())
    assert other.outer.weight is other.inner.weight
    assert_equal(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_optimizer_states_have_names_of_parameters(path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.5}]
    )  # type: ignore[index]
    step(model, optimizer)
    save_state({"model": model, "optimizer": optimizer}, path)
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    found = load_state(path)["optimizer"]
    expected = get_optimizer_state_dict(model, optimizer)
    assert [group["params"] for group in found["param_groups"]] == [
        ["0.weight", "0.bias"],
        ["3.weight", "3.bias"],
    ]
    assert_equal(found["state"], expected["state"])
    # Groups in another order, and parameters in another order within them.
    other = network(1)
    groups = [{"params": [*other[3].parameters()][::-1]}, {"params": [*other[0].parameters()]}]  # type: ignore[index]
    reordered = torch.optim.AdamW(groups)
    load_state(path, into={"model": other, "optimizer": reordered})
    assert [group["lr"] for group in reordered.param_groups] == [0.5, 0.001]
    state = reordered.state[other[3].weight]  # type: ignore[index]
    assert torch.equal(state["exp_avg"], optimizer.state[model[3].weight]["exp_avg"])  # type: ignore[index]


def test_optimizer_of_several_modules_has_paths_in_names(path: Path) -> None:
    encoder, decoder = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    save_state({"parts": [encoder, decoder], "optimizer": optimizer}, path)
    (group,) = load_state(path)["optimizer"]["param_groups"]
    assert group["params"] == ["parts.0.weight", "parts.0.bias", "parts.1.weight", "parts.1.bias"]
    load_state(path, into={"parts": [encoder, decoder], "optimizer": optimizer})


def test_optimizers_of_stages_need_their_modules(path: Path) -> None:
    stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.Adam(one.parameters()) for one in stages]
    with pytest.raises(
        ingot.SaveError, match=r"`optimizers\[0\]` and `optimizers\[1\]`.*same tree"
    ) as caught:
        save_state({"optimizers": optimizers}, path)
    assert caught.value.code == "equal-keys"
    save_state({"stages": stages, "optimizers": optimizers}, path)
    save_state({"first": optimizers[0], "second": optimizers[1]}, path)


def test_wrappers_leave_no_trace_in_names(path: Path) -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    save_state({"model": compiled, "optimizer": optimizer}, path)
    assert "model.0.weight" in ingot.open(path)
    assert load_state(path)["optimizer"]["param_groups"][0]["params"][0] == "0.weight"
    other = network(1)
    load_state(path, into={"model": other, "optimizer": torch.optim.SGD(other.parameters(), lr=1)})
    assert_equal(other.state_dict(), model.state_dict())


class Renaming(nn.Module):
    """A module that accepts names of its older version in `load_state_dict`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(2)))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}new"] = state.pop(f"{prefix}old") * 2
        super()._load_from_state_dict(state, prefix, *rest)


def test_hooks_of_modules_run_with_other_names(path: Path) -> None:
    save_state({"model": Renaming("old")}, path)
    other = Renaming("new")
    load_state(path, into={"model": other})
    assert other.new.tolist() == [2, 2]  # type: ignore[operator,union-attr]


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_extra_state_comes_back(path: Path) -> None:
    save_state({"model": Extra(2, 2)}, path)
    other = Extra(2, 2)
    load_state(path, into={"model": other})
    assert other.calls == 3


def test_load_state_selects_weights(path: Path) -> None:
    model, other = network(), network(1)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    save_state({"model": model, "optimizer": optimizer, "step": 1}, path)
    fresh = torch.optim.AdamW(other.parameters())
    found = load_state(path, into={"model": other, "optimizer": fresh}, keys="model.*")
    assert_equal(other.state_dict(), model.state_dict())
    assert (found["optimizer"], fresh.state) == (fresh, {})
    third = network(1)
    bias = third[0].bias.clone()  # type: ignore[index,operator,union-attr]
    load_state(path, into={"model": third}, keys="*.weight", drop="optimizer.*")
    assert torch.equal(third[0].weight, model[0].weight)  # type: ignore[index]
    assert torch.equal(third[0].bias, bias)  # type: ignore[index]
    with pytest.raises(ingot.OptionError, match="select a part of the state of a AdamW") as caught:
        load_state(path, into={"optimizer": fresh}, keys="optimizer.*")
    assert caught.value.code == "partial-state"


def grown(groups: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return what `network` returns, with the momentum of an optimizer that has another shape or groups."""
    model = network(1)
    parameters = [*model.parameters()]
    if groups:
        return model, torch.optim.AdamW([{"params": [one]} for one in parameters])
    optimizer = torch.optim.AdamW(parameters)
    optimizer.state[parameters[0]] = {"exp_avg": torch.ones(7)}
    return model, optimizer


UNFIT: dict[str, tuple[Callable[[], Any], str, str]] = {
    "shape": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        "destination-shape",
        r"`model\.3\.weight`: expected shape \[3, 8\], found \[2, 8\] in the file",
    ),
    "more": (
        lambda: nn.Sequential(*network(1).children(), nn.Linear(2, 2)),
        "state-names",
        r'`model`: the Sequential and its state(.|\n)*missing in the file: "4.weight", "4.bias"',
    ),
    "fewer": (lambda: network(1)[:3], "state-names", '(.|\\n)*unexpected in the file: "3.weight"'),  # type: ignore[index]
    "groups": (
        lambda: grown(1),
        "optimizer-state",
        r"`optimizer`: expected a group with the same 1 parameters as the group of '0\.weight'",
    ),
    "state": (
        lambda: grown(0),
        "destination-shape",
        r"`optimizer\.state\.0\.weight\.exp_avg`: expected shape \[7\], found \[8, 4\]",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_load_state_changes_nothing_if_something_does_not_fit(name: str, path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    save_state({"first": network(), "model": model, "optimizer": optimizer}, path)
    make, code, words = UNFIT[name]
    made = make()
    other, fresh = made if isinstance(made, tuple) else (made, torch.optim.AdamW(network().parameters()))
    first = network(2)
    before = {key: value.clone() for key, value in first.state_dict().items()}
    with pytest.raises(ingot.SafetensorError, match=rf"model\.safetensors: .*{words}") as caught:
        load_state(path, into={"first": first, "model": other, "optimizer": fresh})
    assert caught.value.code == code
    assert_equal(dict(first.state_dict()), before)


def test_load_state_rejects_an_optimizer_of_other_parameters(path: Path) -> None:
    model = network()
    save_state({"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "n": 1}, path)
    other = network(1)
    some = torch.optim.AdamW(other[0].parameters())  # type: ignore[index]
    with pytest.raises(
        ingot.CheckpointError, match="`optimizer`: expected a group with the same 2 parameters"
    ):
        load_state(path, into={"model": other, "optimizer": some})
    # Without the model, the names of the parameters are unknown.
    with pytest.raises(ingot.CheckpointError, match=r"expected groups of \[2\] parameters, found \[6\]"):
        load_state(path, into={"optimizer": some})
    with pytest.raises(
        ingot.CheckpointError, match="`other`: expected the state of a AdamW, found none"
    ) as caught:
        load_state(path, into={"other": some})
    assert caught.value.code == "state-missing"


def test_errors_of_load_state_dict_name_the_path(path: Path) -> None:
    class Broken(Loader):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("at")

    save_state({"data": [Loader()]}, path)
    with pytest.raises(KeyError) as caught:
        load_state(path, into={"data": [Broken()]})
    assert caught.value.__notes__ == ["ingot: in load_state_dict of `data[0]`"]


class Halves(torch.Tensor):
    """A tensor subclass that stores its values in two tensors, as in quantised optimizers."""

    whole: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, whole: torch.Tensor, scale: torch.Tensor, block: int) -> Halves:
        made = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.whole, made.scale, made.block = whole, scale, block
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], list[int]]:
        return ["whole", "scale"], [self.block]  # type: ignore[attr-defined]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any = None, stride: Any = None) -> Halves:
        return cls(inner["whole"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0].whole, args[0].scale, args[0].block)
        raise NotImplementedError(function)


class Opaque(torch.Tensor):
    @staticmethod
    def __new__(cls) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


def halves(value: float) -> Halves:
    return Halves(torch.full((1, 3), value).to(torch.int8), torch.tensor([value]), 16)


def test_tensor_subclasses_are_flattened(path: Path) -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = halves(2)
    save_state({"model": model, "optimizer": optimizer}, path)
    names = [name for name in ingot.open(path) if "momentum" in name]
    assert names == [f"optimizer.state.weight.momentum_buffer.{part}" for part in ("scale", "whole")]

    other = nn.Linear(3, 1, bias=False)
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    into = {"model": other, "optimizer": fresh}
    with pytest.raises(ingot.CheckpointError, match="the state of a SGD needs the class Halves") as caught:
        load_state(path, into=into)
    assert caught.value.code == "unknown-class"
    load_state(path, into=into, types=[Halves])
    found = fresh.state[other.weight]["momentum_buffer"]
    assert isinstance(found, Halves)
    assert (found.whole.tolist(), found.scale.tolist(), found.block) == ([[2, 2, 2]], [2], 16)  # type: ignore[attr-defined]
    # After a step, the optimizer's own state has this class.
    fresh.state[other.weight]["momentum_buffer"] = halves(1)
    load_state(path, into=into)
    assert isinstance(fresh.state[other.weight]["momentum_buffer"], Halves)


def test_tensor_subclasses_without_the_protocol_are_rejected(path: Path) -> None:
    with pytest.raises(ingot.SaveError, match=r"`optimizer\.hook`: Opaque keeps its values elsewhere"):
        save_state({"optimizer": {"hook": Opaque()}}, path)


def test_rng_restores_all_generators(path: Path) -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    save_state({"rng": RNG()}, path)

    def drawn() -> list[float]:
        return [random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))]

    expected = [drawn() for _ in range(3)]
    load_state(path, into={"rng": RNG()})
    assert [drawn() for _ in range(3)] == expected


def test_rng_is_restored_last(path: Path) -> None:
    class Drawing(Loader):
        def load_state_dict(self, state: Any) -> None:
            torch.rand(3)

    save_state({"rng": RNG(), "loader": Drawing()}, path)
    expected = torch.rand(3)
    load_state(path, into={"rng": RNG(), "loader": Drawing()})
    assert torch.equal(torch.rand(3), expected)


def test_rng_leaves_out_devices_without_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 1)
    monkeypatch.setattr(torch, torch._C._get_privateuse1_backend_name(), module, raising=False)
    assert set(RNG().state_dict()) == {"python", "torch", "numpy"}


def test_rng_sets_generators_of_a_device_that_is_not_used_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[torch.Tensor, int]] = []
    module = SimpleNamespace(
        is_initialized=lambda: False,
        device_count=lambda: 2,
        get_rng_state=lambda: None,
        get_rng_state_all=lambda: None,
        set_rng_state=lambda state, device: kept.append((state, device)),
    )
    name = torch._C._get_privateuse1_backend_name()
    monkeypatch.setattr(torch, name, module, raising=False)
    state = RNG().state_dict()
    assert name not in state
    RNG().load_state_dict({**state, name: [torch.ones(1), torch.zeros(1)]})
    assert kept == [(torch.ones(1), 0), (torch.zeros(1), 1)]


def test_rng_warns_of_devices_that_are_not_here() -> None:
    state = {**RNG().state_dict(), "cuda": [torch.get_rng_state()]}
    with pytest.warns(
        UserWarning, match="cuda: the state has generators of 1 devices, and this process has 0"
    ):
        RNG().load_state_dict(state)


def program(path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    # [save and resume
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "rng": RNG()}
    save_state(state, path)
    state = load_state(path, into=state)
    # ]
    assert state["step"] == 0


def test_saving_and_resuming_takes_few_statements(path: Path) -> None:
    program(path)
    source = inspect.getsource(program)
    part = source.partition("# [save and resume\n")[2].partition("# ]")[0]
    tree = ast.parse(inspect.cleandoc(part))
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) <= 5


def test_the_guide_names_every_tag() -> None:
    from ingot._state import decoder, kinds

    page = Path(__file__).parents[2] / "crates" / "format" / "FORMAT.md"
    section = page.read_text("utf-8").partition("## Training state")[2].partition("\n## ")[0]
    tags = {*kinds.TOGETHER, *decoder.OF_CALLER}
    assert {tag for tag in tags if f"`{tag}`" not in section} == set()


def test_a_model_of_many_tensors_has_a_short_header(path: Path) -> None:
    """100,000 tensors, with their groups and the order of a data loader."""
    state = {
        "model": {
            f"layers.{number // 8}.part{number % 8}.weight": torch.zeros(1) for number in range(25_000)
        },
        "optimizer": {
            "state": {
                f"layers.{number // 8}.part{number % 8}.weight": {
                    "step": torch.tensor(1.0),
                    "exp_avg": torch.zeros(1),
                    "exp_avg_sq": torch.zeros(1),
                }
                for number in range(25_000)
            },
            "param_groups": [{"lr": 0.1, "params": [f"layers.{number}" for number in range(25_000)]}],
        },
        "loader": {"order": [*range(1_250_000)], "names": [f"shard-{number}" for number in range(10_000)]},
    }
    save_state(state, path)
    with path.open("rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
    assert nbytes <= 20_000_000
    head = json.loads(ingot.open(path).metadata()["ingot.state"])  # type: ignore[index]
    assert head["tensor"] == "ingot.state"
    found = load_state(path)
    assert found["loader"] == state["loader"]
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]  # type: ignore[index]
    assert len(found["optimizer"]["state"]) == 25_000


class Counted(nn.Module):
    """A layer with a buffer of integers in place of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(2, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    "into",
    [{"own": {"weight": torch.zeros(2, 2, dtype=torch.int64)}}, {"own": Counted()}],
    ids=["tensor", "module"],
)
def test_floats_are_not_loaded_into_integers(into: Any, path: Path) -> None:
    save_state({"own": nn.Linear(2, 2, bias=False)}, path)
    with pytest.raises(ingot.DestinationError, match=r"`own.weight`: expected dtype torch.int64") as raised:
        load_state(path, into=into)
    assert raised.value.code == "destination-dtype"
    half = load_state(path, into={"own": {"weight": torch.zeros(2, 2, dtype=torch.bfloat16)}})
    assert half["own"]["weight"].dtype == torch.bfloat16


def test_encoder_makes_few_calls_for_each_tensor() -> None:
    """The training loop waits for the encoder, also if a state has 100,000 tensors."""
    state = {f"layers.{number}.weight": torch.zeros(1) for number in range(1_000)}
    encoder, profile = Encoder("torch", {}), cProfile.Profile()
    profile.runcall(encoder.metadata, {"model": state})
    assert [*encoder.tensors] == [f"model.{name}" for name in state]
    # The key, its type, the name, the place and the store of the tensor.
    assert sum(entry.callcount for entry in profile.getstats()) < 10 * len(state)


@pytest.mark.slow
def test_a_tree_of_100_000_nodes_comes_back(
    path: Path, record_property: Callable[[str, object], None]
) -> None:
    made = random.Random(4)

    def grown(count: int) -> Any:
        if count <= 1:
            return made.choice(
                [None, 1, -0.0, "text", b"bytes", 2**80, True, np.float32(1), (1, 2), Path("a")]
            )
        sizes = [count // 4] * 4
        inner = [grown(size) for size in sizes]
        shapes: list[Callable[[list[Any]], Any]] = [list, tuple, lambda values: dict(enumerate(values))]
        return made.choice(shapes)(inner)

    tree = [grown(4**8) for _ in range(2)]

    def count(value: Any) -> int:
        inner = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        )
        return 1 + sum(map(count, inner))

    record_property("nodes", count(tree))
    assert count(tree) >= 100_000
    save_state(tree, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(load_state(path), tree)


def test_save_state_takes_what_state_dict_returns(tmp_path: Path) -> None:
    """Methods may take no arguments, and hooks may compute values that require gradients."""

    class Plain(nn.Linear):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return super().state_dict()

    def double(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        state.update({name: 2 * value for name, value in state.items()})

    hooked, plain = nn.Linear(3, 2), Plain(3, 2)
    hooked.register_state_dict_post_hook(double)
    save_state({"hooked": hooked, "plain": plain}, tmp_path / "s")
    found = load_state(tmp_path / "s")
    assert torch.equal(found["hooked"]["weight"], 2 * hooked.weight)
    assert torch.equal(found["plain"]["weight"], plain.weight)
    assert not found["hooked"]["weight"].requires_grad


def test_load_state_refuses_the_state_of_another_class(tmp_path: Path) -> None:
    """``load_state_dict`` of torch takes both without a word."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    save_state({"model": model, "optimizer": optimizer, "scheduler": cosine}, tmp_path / "s")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    says = (
        r"`optimizer`: expected the state of a SGD with dampening, momentum, nesterov, found one with amsgrad"
    )
    with raises(ingot.CheckpointError, says, code="optimizer-state"):
        load_state(tmp_path / "s", into={"model": model, "optimizer": sgd})
    steps = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    says = "`scheduler`: expected the state of a StepLR with gamma, step_size, found one with T_max, eta_min"
    with raises(ingot.CheckpointError, says, code="state-names"):
        load_state(tmp_path / "s", into={"model": model, "scheduler": steps})
    other = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    assert load_state(tmp_path / "s", into=other)["optimizer"] is other["optimizer"]


Schedulers = torch.optim.lr_scheduler
# The saved scheduler, the other scheduler, and the error. For most pairs, torch raises KeyError half-way.
OTHER_SCHEDULERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "StepLR in SequentialLR": (
        lambda optimizer: Schedulers.StepLR(optimizer, 2),
        SCHEDULERS["SequentialLR"],
        "`scheduler`: expected the state of a SequentialLR with _milestones, _schedulers, "
        "found one with base_lrs, gamma, step_size in the file",
    ),
    "SequentialLR in StepLR": (
        SCHEDULERS["SequentialLR"],
        lambda optimizer: Schedulers.StepLR(optimizer, 2),
        "`scheduler`: expected the state of a StepLR with base_lrs, gamma, step_size, "
        "found one with _milestones, _schedulers in the file",
    ),
    "ConstantLR in LambdaLR": (
        Schedulers.ConstantLR,
        SCHEDULERS["LambdaLR"],
        "`scheduler`: expected the state of a LambdaLR with lr_lambdas, found one with factor, total_iters",
    ),
    "SequentialLR in ChainedScheduler": (
        SCHEDULERS["SequentialLR"],
        lambda optimizer: Schedulers.ChainedScheduler([Schedulers.StepLR(optimizer, 2)]),
        "`scheduler`: expected the state of a ChainedScheduler, found one with _milestones, last_epoch in",
    ),
    "StepLR in ExponentialLR": (
        lambda optimizer: Schedulers.StepLR(optimizer, 2),
        lambda optimizer: Schedulers.ExponentialLR(optimizer, 0.9),
        "`scheduler`: expected the state of a ExponentialLR, found one with step_size in the file",
    ),
    "ExponentialLR in StepLR": (
        lambda optimizer: Schedulers.ExponentialLR(optimizer, 0.9),
        lambda optimizer: Schedulers.StepLR(optimizer, 2),
        "`scheduler`: expected the state of a StepLR with step_size, found one without them in the file",
    ),
    "others within": (
        SCHEDULERS["SequentialLR"],
        lambda optimizer: Schedulers.SequentialLR(
            optimizer, [Schedulers.ConstantLR(optimizer), Schedulers.ExponentialLR(optimizer, 0.9)], [3]
        ),
        "`scheduler._schedulers[1]`: expected the state of a ExponentialLR, found one with step_size",
    ),
    "fewer within": (
        SCHEDULERS["SequentialLR"],
        lambda optimizer: Schedulers.SequentialLR(optimizer, [Schedulers.ConstantLR(optimizer)], []),
        "`scheduler`: expected 1 schedulers of the SequentialLR, found 2 in the file",
    ),
    "fewer groups": (
        lambda optimizer: Schedulers.StepLR(
            torch.optim.SGD([{"params": [one]} for one in network().parameters()], lr=0.1), 2
        ),
        lambda optimizer: Schedulers.StepLR(optimizer, 2),
        "`scheduler`: expected 1 parameter groups of the StepLR, found 6 in the file",
    ),
}


@pytest.mark.parametrize("name", OTHER_SCHEDULERS)
def test_load_state_refuses_the_state_of_another_scheduler(name: str, path: Path) -> None:
    save, load, says = OTHER_SCHEDULERS[name]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_state({"model": model, "scheduler": save(optimizer)}, path)
    assert_refused(path, "scheduler", load(optimizer), says, "state-names")


def assert_refused(path: Path, key: str, own: Any, says: str, code: str) -> None:
    """Load into `own`, which is refused before the model changes."""
    model = network(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with raises(ingot.CheckpointError, re.escape(says), code=code):
        load_state(path, into={"model": model, key: own})
    assert_equal(dict(model.state_dict()), before)


def test_load_state_refuses_the_states_of_other_objects(path: Path) -> None:
    """They have changed places, or the scaler was disabled when it was saved."""
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    scheduler, scaler = Schedulers.StepLR(optimizer, 2), torch.amp.GradScaler("cpu")
    save_state({"model": network(), "optimizer": scheduler, "scaler": optimizer, "scheduler": 3}, path)
    says = "`optimizer`: expected the state of a SGD with param_groups, state, found one with "
    assert_refused(path, "optimizer", optimizer, says, "optimizer-state")
    says = "`scaler`: expected the state of a GradScaler with _growth_tracker, backoff_factor, growth_factor"
    assert_refused(path, "scaler", scaler, says, "state-names")
    says = "`scheduler`: expected the state of a StepLR, found a int"
    assert_refused(path, "scheduler", scheduler, says, "state-names")
    says = "`optimizer`: expected the state of a RNG with python, torch, found one with "
    assert_refused(path, "optimizer", RNG(), says, "state-names")
    save_state({"model": network(), "scaler": torch.amp.GradScaler("cpu", enabled=False)}, path)
    says = "found one without them in the file"
    assert_refused(path, "scaler", scaler, says, "state-names")
