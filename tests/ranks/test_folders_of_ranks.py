"""Folders of checkpoints that ranks save and load together."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ingot
import ingot.numpy
import ingot.torch
from ingot._ranks.peers import Peers
from ingot.torch import RNG
from support import stores
from support.ranks import GONE, Ranks
from support.record import note


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 10)
        self.second = torch.nn.Linear(10, 3)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(data).relu())
        return found


def built(how: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that is distributed over all ranks, and an optimizer that has not stepped."""
    torch.manual_seed(0)
    model = Net()
    size = dist.get_world_size()
    if how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif how == "fsdp+tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step with the same data on all ranks, so that the world's size does not matter."""
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    loss = model(data).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach().clone()


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The parameters and the moments, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter)
        for key, one in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = whole(one)
    return found


def saved(folder: Path, how: str) -> tuple[dict[str, torch.Tensor], list[float], torch.Tensor]:
    """Train and save. Return the saved values, the later losses, and random numbers."""
    model, optimizer = built(how)
    torch.manual_seed(100 + dist.get_rank())
    state = {"model": model, "optimizer": optimizer, "step": 0, "rng": RNG()}
    with ingot.Checkpoints(folder, keep=2) as checkpoints:
        for step in (1, 2, 3):
            train(model, optimizer, step)
            state["step"] = step
            checkpoints.save(step, state, metrics={"loss": 0.5})
        found = values(model, optimizer)
        numbers = torch.rand(3)
        losses = [train(model, optimizer, step) for step in (4, 5)]
    assert checkpoints.steps() == [2, 3]
    return found, losses, numbers


def resumed(folder: Path, how: str) -> tuple[dict[str, torch.Tensor], list[float], torch.Tensor, Any]:
    model, optimizer = built(how)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    state: Any = {"model": model, "optimizer": optimizer, "step": 0, "rng": RNG()}
    checkpoints = ingot.Checkpoints(folder)
    assert checkpoints.latest(verify=True) == 3
    with pytest.warns(RuntimeWarning, match="rng") if dist.get_world_size() != 4 else nullcontext():
        state = checkpoints.load(into=state)
    assert state["step"] == 3
    assert state["model"] is model
    found = values(model, optimizer)
    numbers = torch.rand(3)
    losses = [train(model, optimizer, step) for step in (4, 5)]
    rng = state["rng"]
    return found, losses, numbers, len(rng) if isinstance(rng, list) else None


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(found[name], one), name


@pytest.mark.parametrize("how", ["fsdp", "fsdp+tp"])
def test_ranks_resume_on_another_number_of_ranks(
    how: str, tmp_path: Path, four: Ranks, two: Ranks, some: Ranks
) -> None:
    outcomes = four.run(saved, tmp_path / "run", how)
    expected, losses, _ = outcomes[0]
    for rank, (found, its_losses, numbers, listed) in enumerate(four.run(resumed, tmp_path / "run", how)):
        assert_same(found, expected)
        assert its_losses == losses
        assert torch.equal(numbers, outcomes[rank][2])
        assert listed is None
    for ranks in (two, some):
        # Three ranks have no mesh of two by two.
        on = how if ranks is two else "fsdp"
        for found, its_losses, _, listed in ranks.run(resumed, tmp_path / "run", on):
            assert_same(found, expected)
            assert its_losses == pytest.approx(losses, rel=1e-6)
            assert listed == 4


def test_pipeline_stages_are_one_checkpoint(tmp_path: Path, two: Ranks) -> None:
    both = two.run(saved_stage, tmp_path / "run")
    expected = both[0] | both[1]
    for rank, found in enumerate(two.run(resumed_stage, tmp_path / "run")):
        assert_same(found, both[rank])
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    state = ingot.Checkpoints(tmp_path / "run").load(into={"model": model, "optimizer": optimizer, "step": 0})
    assert state["step"] == 7
    assert_same(values(model, optimizer), expected)


def stage() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(dist.get_rank())
    name, layer = [("first", torch.nn.Linear(6, 10)), ("second", torch.nn.Linear(10, 3))][dist.get_rank()]
    model = torch.nn.ModuleDict({name: layer})
    return model, torch.optim.AdamW(model.parameters())


def saved_stage(folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = stage()
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.save(7, {"model": model, "optimizer": optimizer, "step": 7})
    return values(model, optimizer)


def resumed_stage(folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = stage()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    state: Any = {"model": model, "optimizer": optimizer, "step": 0}
    assert ingot.Checkpoints(folder).load(7, into=state)["step"] == 7
    return values(model, optimizer)


def resumed_compiled_stage(folder: Path) -> bool:
    model, _ = stage()
    layers: Any = {name: torch.compile(layer, backend="eager") for name, layer in model.named_children()}
    compiled = torch.nn.ModuleDict(layers)
    kept(folder, lambda rank: {"model": compiled})
    before = [whole(one) for one in compiled.parameters()]
    for one in compiled.parameters():
        torch.nn.init.zeros_(one)
    ingot.Checkpoints(folder).load(into={"model": compiled})
    return all(map(torch.equal, before, compiled.parameters()))


def test_compiled_pipeline_stages_are_loaded(tmp_path: Path, two: Ranks) -> None:
    assert two.run(resumed_compiled_stage, tmp_path) == [True, True]


def kept(folder: Path, state: Callable[[int], Any], **options: Any) -> tuple[str, str, str | None]:
    """What one save raises on this rank."""
    rank = dist.get_rank()
    try:
        with ingot.Checkpoints(folder) as checkpoints:
            checkpoints.save(options.get("step", 1), state(rank), metrics=options.get("metrics"))
    except (ingot.SafetensorError, OSError, TypeError, ValueError) as error:
        return type(error).__name__, str(error), getattr(error, "code", None)
    return "", "", None


def alike(rank: int) -> Any:
    return {"model": Net(), "numbers": list(range(1000)), "big": torch.arange(50_000), "rank": Own(rank)}


class Own:
    """An object with a state of its own on each rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "place": torch.full((300,), self.rank)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["place"].tolist() == [state["rank"]] * 300
        self.rank = state["rank"]


def saved_alike(folder: Path) -> None:
    torch.manual_seed(5)
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, alike(dist.get_rank()))


def own_ranks(folder: Path) -> Any:
    own = Own(-1)
    state = ingot.Checkpoints(folder).load(into={"rank": own})
    return own.rank if state["rank"] is own else [one["rank"] for one in state["rank"]]


def test_tensors_of_all_ranks_are_stored_once(tmp_path: Path, two: Ranks) -> None:
    two.run(saved_alike, tmp_path / "run")
    files = [*(tmp_path / "run" / "step-00000001").glob("*.safetensors")]
    assert len(files) == 2
    assert 50_000 * 8 < sum(file.stat().st_size for file in files) < 1.2 * 50_000 * 8
    assert two.run(own_ranks, tmp_path / "run") == [0, 1]
    with pytest.warns(RuntimeWarning, match="rank had a state on each rank"):
        found = ingot.Checkpoints(tmp_path / "run").load()
    assert torch.equal(found["big"], torch.arange(50_000))
    assert found["numbers"] == list(range(1000))
    assert [one["rank"] for one in found["rank"]] == [0, 1]
    weights = ingot.Checkpoints(tmp_path / "run").load(keys="model.*")
    assert [*weights] == ["model"]
    with pytest.raises(ingot.CheckpointError, match="2 ranks have saved") as raised:
        ingot.torch.load_state(next(file for file in files if file.name.count("-") == 1))
    assert raised.value.code == "state-of-ranks"


def test_load_state_loads_a_step_of_ranks_in_one_process(tmp_path: Path, two: Ranks) -> None:
    two.run(saved_alike, tmp_path / "run")
    step = tmp_path / "run" / "step-00000001"
    with pytest.warns(RuntimeWarning, match="rank had a state on each rank") as warned:
        found, report = ingot.torch.load_state(step, return_report=True)
    assert warned[0].filename == __file__
    assert torch.equal(found["big"], torch.arange(50_000))
    assert [one["rank"] for one in found["rank"]] == [0, 1]
    assert report == ingot.StateReport({}, [])
    assert [*ingot.torch.load_state(step, keys="model.*")] == ["model"]
    big = torch.zeros(50_000, dtype=torch.int64)
    with pytest.warns(RuntimeWarning, match="rank had a state"):
        assert ingot.torch.load_state(step, into={"big": big})["big"] is big
    assert torch.equal(big, torch.arange(50_000))
    with pytest.raises(ingot.OptionError, match="expected_sha256 is of one file"):
        ingot.torch.load_state(step, expected_sha256="0" * 64)
    with pytest.raises(
        ingot.CheckpointError, match=r"a directory of the steps 1: .* step-00000001"
    ) as raised:
        ingot.torch.load_state(tmp_path / "run")
    assert raised.value.code == "ambiguous-checkpoint"
    of_numpy = ingot.Checkpoints(tmp_path / "run", framework="numpy")
    for load in (lambda: ingot.numpy.load_state(step), of_numpy.load):
        with pytest.raises(ingot.OptionError, match=r"load the step by ingot.torch.load_state") as refused:
            load()
        assert refused.value.code == "not-by-ranks"
    (step / "checkpoint.json").write_text("{")
    with pytest.raises(ingot.CheckpointError, match="truncated or damaged"):
        ingot.torch.load_state(step)


def part_of(whole: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return rows of a tensor with the attributes of torch's CheckpointableTensor."""
    memory: Any = whole[begin:end].clone()
    memory.global_shape, memory.global_offsets = tuple(whole.shape), ((begin, 0),)
    memory.local_offsets, memory.local_sizes = ((0, 0),), (tuple(memory.shape),)
    return memory  # type: ignore[no-any-return]


def saved_parts(folder: Path) -> list[torch.Tensor]:
    """Save halves of a tensor, and then halves that ranks have exchanged. Returns a loaded part."""
    rank, whole = dist.get_rank(), torch.arange(24.0).view(8, 3)
    with ingot.Checkpoints(folder) as checkpoints:
        for step, begin in ((1, 4 * rank), (2, 4 - 4 * rank)):
            checkpoints.save(step, {"rows": part_of(whole + step, begin, begin + 4), "step": step})
    begin, end = (0, 3) if rank == 0 else (3, 8)
    found = []
    for step in (1, 2):
        own = part_of(torch.zeros(8, 3), begin, end)
        assert ingot.Checkpoints(folder).load(step, into={"rows": own, "step": 0})["rows"] is own
        found.append(own.detach().clone())
    return found


def test_parts_that_attributes_describe_are_saved_and_loaded(tmp_path: Path, two: Ranks) -> None:
    found = two.run(saved_parts, tmp_path / "run")
    whole = torch.arange(24.0).view(8, 3)
    for step in (1, 2):
        assert torch.equal(torch.cat([one[step - 1] for one in found]), whole + step)
        state = ingot.torch.load_state(tmp_path / "run" / f"step-{step:08d}")
        assert torch.equal(state["rows"], whole + step)
        own = part_of(torch.zeros(8, 3), 2, 7)
        ingot.Checkpoints(tmp_path / "run").load(step, into={"rows": own})
        assert torch.equal(own, (whole + step)[2:7])


def normed(wrap: str) -> torch.nn.Module:
    """A replicated model whose statistics of batches differ between the ranks."""
    torch.manual_seed(0)
    parallel = torch.nn.parallel.DistributedDataParallel
    inner: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model = parallel(inner, broadcast_buffers=wrap != "without broadcasts")
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.rand(8, 4)).sum().backward()
    if wrap == "inside":
        return torch.nn.ModuleDict({"body": model})
    return inner if wrap == "its module" else model


def saved_normed(folder: Path, wrap: str) -> tuple[tuple[str, str, str | None], list[float]]:
    model = normed(wrap)
    mean: Any = next(one for name, one in model.named_buffers() if name.endswith("running_mean"))
    return kept(folder, lambda rank: {"model": model, "step": 1}), mean.tolist()


def loaded_normed(folder: Path, wrap: str) -> list[float]:
    model = normed(wrap)
    ingot.Checkpoints(folder).load(into={"model": model, "step": 0})
    mean: Any = next(one for name, one in model.named_buffers() if name.endswith("running_mean"))
    found: list[float] = mean.tolist()
    return found


@pytest.mark.parametrize("wrap", ["", "inside"])
def test_buffers_that_ddp_broadcasts_are_of_the_sending_rank(wrap: str, tmp_path: Path, two: Ranks) -> None:
    found = two.run(saved_normed, tmp_path, wrap)
    assert [raised for raised, _ in found] == [("", "", None)] * 2
    first, second = (mean for _, mean in found)
    assert first != second
    assert two.run(loaded_normed, tmp_path, wrap) == [first, first]


@pytest.mark.parametrize("wrap", ["its module", "without broadcasts"])
def test_other_buffers_that_differ_are_refused_with_a_way_out(wrap: str, tmp_path: Path, two: Ranks) -> None:
    for (kind, message, code), _ in two.run(saved_normed, tmp_path, wrap):
        assert (kind, code) == ("SaveError", "ranks-differ")
        assert "tensor `model.1.running_mean`: ranks 0 and 1 of 2 have different values" in message
        assert "put the DistributedDataParallel that broadcasts it into the state" in message


def tied() -> torch.nn.Module:
    """Two names of a parameter whose only row is on the first rank."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(3, 1, bias=False))
    model[1].weight = model[0].weight
    torch.nn.init.ones_(model[0].weight)
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def resumed_tied(folder: Path) -> tuple[tuple[str, str, str | None], list[list[float]]]:
    raised = kept(folder, lambda rank: {"model": tied()})
    model: Any = tied()
    torch.nn.init.zeros_(model[0].weight)
    ingot.Checkpoints(folder).load(into={"model": model})
    return raised, whole(model[1].weight).tolist()


def test_tied_parameters_with_an_empty_part_are_stored_once(tmp_path: Path, two: Ranks) -> None:
    assert two.run(resumed_tied, tmp_path) == [(("", "", None), [[1.0, 1.0, 1.0]])] * 2


def different(rank: int) -> Any:
    return {"weights": torch.full((5,), float(rank))}


def with_step(rank: int) -> Any:
    return {"step": rank, "weights": torch.ones(5)}


def with_another_name(rank: int) -> Any:
    return {"ab"[rank]: torch.ones(5)}


def with_another_shape(rank: int) -> Any:
    return {"weights": torch.ones(5 + rank)}


def with_a_function(rank: int) -> Any:
    return {"weights": torch.ones(5), "hook": print if rank else 0}


def stage_without_names(rank: int) -> Any:
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.full((3,), 1.0 + rank)
    optimizer.step()
    return {"optimizer": optimizer}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (different, "weights.*ranks 0 and 1 of 2 have different values"),
        (with_step, "`step`.*rank 1 of 2 has another value than rank 0: expected 0, found 1"),
        (with_another_name, "rank 1 of 2 has another value than rank 0"),
        (with_another_shape, r"another tensor `weights`.*\[5\], found F32 of shape \[6\]"),
        (with_a_function, "hook.*only pickle could store"),
        (stage_without_names, "ranks 0 and 1 of 2 have different values"),
    ],
)
def test_ranks_with_other_states_are_refused(
    state: Callable[[int], Any], says: str, tmp_path: Path, two: Ranks
) -> None:
    for kind, message, _ in two.run(kept, tmp_path / "run", state):
        assert kind in ("SaveError", "RankError")
        assert re.search(says, message), message
    assert ingot.Checkpoints(tmp_path / "run").steps() == []
    assert [*(tmp_path / "run").glob("step-*")] == []


def other_arguments(folder: Path, what: str) -> tuple[str, str, str | None]:
    rank = dist.get_rank()
    if what == "directory" and rank:
        folder = folder.with_name("other")
    if what == "step":
        return kept(folder, constant, step=rank)
    if what == "metrics":
        return kept(folder, constant, metrics={"loss": rank})
    return kept(folder, constant, step="1" if rank and what == "type" else 1)


def constant(rank: int) -> Any:
    return {"weights": torch.ones(5)}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("directory", "rank 1 of 2 has another directory than rank 0"),
        ("step", "rank 1 of 2 has another step than rank 0.*expected 0, found 1"),
        ("metrics", "rank 1 of 2 has other metrics than rank 0"),
        ("type", "step must be an int|rank 1 of 2 failed in comparing the arguments of save"),
    ],
)
def test_ranks_with_other_arguments_are_refused(what: str, says: str, tmp_path: Path, two: Ranks) -> None:
    for kind, message, _ in two.run(other_arguments, tmp_path / "run", what):
        assert kind in ("RankError", "TypeError")
        assert re.search(says, message), message
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "other").exists()


# Failures of one rank


def different_calls(folder: Path, calls: tuple[str, str]) -> tuple[str, str | None]:
    """What the ranks raise if each makes a call of its own, or the same after one of the first rank."""
    checkpoints = ingot.Checkpoints(folder)
    call = calls[dist.get_rank()]
    try:
        if call == "signal":
            checkpoints.save_on_signal(signal.SIGUSR1)
            checkpoints.stopping()
        elif call == "load":
            checkpoints.load()
        elif call == "steps":
            checkpoints.steps()
        checkpoints.save(1, {"step": 1})
    except ingot.RankError as error:
        return str(error), error.code
    finally:
        # The end of a block restores the handler.
        with suppress(ingot.RankError), checkpoints:
            pass
    return "", None


@pytest.mark.parametrize(
    ("calls", "other"),
    [
        (("steps", "save"), "is comparing the arguments of save, and rank 0 is listing the steps"),
        (
            ("save", "load"),
            "is comparing the arguments of load, and rank 0 is comparing the arguments of save",
        ),
        (("save", "signal"), "is asking for signals, and rank 0 is comparing the arguments of save"),
    ],
)
def test_ranks_that_make_other_calls_are_refused(
    calls: tuple[str, str], other: str, tmp_path: Path, two: Ranks
) -> None:
    for message, code in two.run(different_calls, tmp_path, calls):
        assert (message.partition(":")[0], code) == (f"rank 1 of 2 {other}", "ranks-differ")
    assert not [*tmp_path.iterdir()]


def saved_to_a_store(options: dict[str, object]) -> tuple[list[int], int, bool]:
    """Save FSDP2's model to a store, and load it into another one."""
    url = "s3://models/run"
    model, optimizer = built("fsdp")
    with ingot.Checkpoints(url, keep=2, storage_options=options) as checkpoints:  # type: ignore[arg-type]
        for step in (1, 2, 3):
            train(model, optimizer, step)
            checkpoints.save(step, {"model": model, "optimizer": optimizer, "step": step})
    expected = values(model, optimizer)
    model, optimizer = built("fsdp")
    state: Any = {"model": model, "optimizer": optimizer, "step": 0}
    other = ingot.Checkpoints(url, storage_options=options)  # type: ignore[arg-type]
    assert other.latest(verify=True) == 3
    step = other.load(into=state)["step"]
    found = values(model, optimizer)
    is_equal = all(torch.equal(found[name], value) for name, value in expected.items())
    return other.steps(), step, is_equal


def test_ranks_save_to_a_store(two: Ranks) -> None:
    with stores.running(is_signed=False) as store:
        assert two.run(saved_to_a_store, store.options) == [([2, 3], 3, True)] * 2
        kept = [path for path in store.objects if "/step-" in path]
    assert sum(path.endswith(".safetensors") for path in kept) == 2 * 2
    assert len(kept) == 2 * 3


def full_disk(*given: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


# The steps of a save and a load: the rank that fails, and the function in which it does.
WRITES = {
    "look": (1, "ingot.torch._save_state_by_ranks.Encoded.node"),
    "lease": (0, "ingot._checkpoints.disk.DiskSteps.take_lease"),
    "directory": (0, "ingot._checkpoints.disk.DiskSteps.making"),
    "write": (1, "ingot.torch._save_state_by_ranks.write_file"),
    "flush": (1, "ingot._state.commit.stored"),
    "commit": (0, "ingot._state.commit.write"),
}


@contextmanager
def failing(where: tuple[int, str]) -> Iterator[None]:
    rank, name = where
    with ExitStack() as patched:
        if dist.get_rank() == rank:
            patched.enter_context(mock.patch(name, full_disk))
        yield


def save_that_fails(folder: Path, where: tuple[int, str], background: bool) -> tuple[Any, ...]:
    """Save step 1, fail to save step 2, and save step 3. Returns the error, its seconds, and the steps."""
    state = {"weights": torch.ones(5), "rank": Own(dist.get_rank())}
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        began = time.monotonic()
        with failing(where):
            try:
                checkpoints.save(2, state, background=background)
                checkpoints.wait()
            except (ingot.SafetensorError, OSError) as error:
                found = type(error).__name__, str(error), time.monotonic() - began
            else:
                found = "", "", 0.0
        after = checkpoints.steps()
        checkpoints.save(3, state)
        checkpoints.wait()
        return *found, after, checkpoints.steps()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("where", WRITES)
def test_failure_of_one_rank_in_a_save_is_raised_on_all(
    where: str, background: bool, tmp_path: Path, two: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = WRITES[where][0]
    found = two.run(save_that_fails, tmp_path / "run", WRITES[where], background)
    for rank, (kind, message, seconds, after, last) in enumerate(found):
        assert "No space left on device" in message
        if rank != bad:
            assert kind == "RankError"
            assert f"rank {bad} of 2 failed in" in message
        assert after == [1]
        assert last == [1, 3]
        with capsys.disabled():
            print(f" {where} {seconds:.2f} s", end="")
    assert [*(tmp_path / "run").glob("step-00000002/*")] == []


@contextmanager
def watched(met: list[str], fails: Callable[[str], bool]) -> Iterator[None]:
    """List the common steps that this rank meets. It fails in those that `fails` returns True for."""
    step, same = Peers.step, Peers.same

    def meet(doing: str) -> None:
        met.append(doing)
        if fails(doing):
            full_disk()

    @contextmanager
    def stepping(self: Peers, doing: str) -> Iterator[None]:
        with step(self, doing):
            meet(doing)
            yield

    def comparing(self: Peers, look: Callable[[], Any], doing: str) -> list[Any]:
        def looking() -> Any:
            meet(doing)
            return look()

        return same(self, looking, doing)

    with mock.patch.object(Peers, "step", stepping), mock.patch.object(Peers, "same", comparing):
        yield


def saves_and_loads(folder: Path) -> dict[str, Callable[[], object]]:
    state = {"weights": torch.ones(5), "rank": Own(dist.get_rank())}

    def save() -> None:
        with ingot.Checkpoints(folder, keep=1) as checkpoints:
            latest = checkpoints.latest()
            if latest is not None:
                checkpoints.load(latest)
            checkpoints.save((latest or 0) + 1, state)

    return {
        "save": save,
        "load": lambda: ingot.Checkpoints(folder).load(into={"rank": Own(0)}),
        "latest": lambda: ingot.Checkpoints(folder).latest(verify=True),
    }


def each_failure(folder: Path, rank: int) -> list[tuple[str, str, str, str, float]]:
    """Fail on `rank` in each common step of each call. Returns the call, the step, the error and seconds."""
    calls = saves_and_loads(folder)
    found = []
    with warnings.catch_warnings():
        # Such as of a background save that failed for no other reason.
        warnings.simplefilter("error", RuntimeWarning)
        for call in calls:
            met: list[str] = []
            with watched(met, lambda _: False):
                calls[call]()
            found += [
                (call, doing, *failed(calls[call], doing, dist.get_rank() == rank))
                for doing in sorted({*map(without_numbers, met)})
            ]
        # What is left can be loaded, and saved to.
        calls["load"]()
        calls["save"]()
    return found


def failed(call: Callable[[], object], doing: str, is_bad: bool) -> tuple[str, str, float]:
    """Return the error of a call, in which a step fails on the bad rank, and its seconds."""
    began = time.monotonic()
    with watched([], lambda one: is_bad and without_numbers(one) == doing):
        try:
            call()
        except (ingot.SafetensorError, OSError) as error:
            return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0


def without_numbers(doing: str) -> str:
    return re.sub(r"[0-9]+", "N", doing)


@pytest.mark.parametrize("bad", [0, 1])
def test_failure_in_each_common_step_is_raised_on_all(bad: int, tmp_path: Path, two: Ranks) -> None:
    found = two.run(each_failure, tmp_path / "run", bad)
    for call, doing, kind, message, _ in found[bad]:
        assert kind == "OSError", (call, doing, kind, message)
        assert "No space left on device" in message
    for call, doing, kind, message, _ in found[1 - bad]:
        assert kind == "RankError", (call, doing, kind, message)
        assert re.search(f"rank {bad} of 2 failed in .*: OSError: .*No space left on device", message)
    steps = [one[:2] for one in found[0]]
    assert steps == [one[:2] for one in found[1]]
    assert len(steps) >= 15
    note("failures of a rank in each step", len(steps), 0, slowest=max(one[4] for of in found for one in of))


def save_beyond(folder: Path, limit: int) -> tuple[str, str, list[int]]:
    """Save on two ranks. The last rank can write files of `limit` bytes only."""
    import resource

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"large": DTensor.from_local(torch.rand(40_000), mesh, [Shard(0)], run_check=False)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"step": 1}, background=False)
        if dist.get_rank():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            checkpoints.save(2, state)
            checkpoints.wait()
        except (ingot.SafetensorError, OSError) as error:
            return type(error).__name__, str(error), checkpoints.steps()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "", "", []


def test_a_rank_that_cannot_write_more_is_named_by_all(tmp_path: Path, two: Ranks) -> None:
    own, other = reversed(two.run(save_beyond, tmp_path / "run", 1 << 16))
    assert own[0] == "StorageError"
    assert other[0] == "RankError"
    assert "rank 1 of 2 failed in writing step 2: StorageError" in other[1]
    assert "File too large" in own[1]
    assert own[2] == other[2] == [1]
    assert [*(tmp_path / "run").glob("step-00000002/*")] == []


def deletes_that_fail(folder: Path) -> tuple[str, str, list[int]]:
    state = {"weights": torch.ones(5)}
    with ingot.Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        with failing((0, "ingot._checkpoints.retention.delete")):
            checkpoints.save(2, state)
            try:
                checkpoints.wait()
            except (ingot.SafetensorError, OSError) as error:
                return type(error).__name__, str(error), checkpoints.steps()
    return "", "", []


def test_failure_to_delete_old_steps_is_raised_on_all(tmp_path: Path, two: Ranks) -> None:
    own, other = two.run(deletes_that_fail, tmp_path / "run")
    assert own[0] == "OSError"
    assert other[0] == "RankError"
    assert "rank 0 of 2 failed in deleting old steps: OSError" in other[1]
    assert own[2] == other[2] == [1, 2]


def saved_steps(folder: Path) -> None:
    with ingot.Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"weights": torch.full((5,), step), "rank": Own(dist.get_rank())})


def load_that_fails(folder: Path, step: int | None, where: tuple[int, str]) -> tuple[str, str]:
    with failing(where):
        try:
            ingot.Checkpoints(folder).load(step, into={"rank": Own(0)})
        except (ingot.SafetensorError, OSError) as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("step", [None, 2])
@pytest.mark.parametrize(
    "name",
    [
        "ingot.torch._load_state_by_ranks.open_checkpoint",
        "ingot.torch._load_state_by_ranks.Files.proven",
        f"{__name__}.Own.load_state_dict",
    ],
)
def test_failure_of_one_rank_in_a_load_is_raised_on_all(
    name: str, step: int | None, tmp_path: Path, two: Ranks
) -> None:
    two.run(saved_steps, tmp_path / "run")
    other, own = two.run(load_that_fails, tmp_path / "run", step, (1, name))
    assert own[0] == "OSError"
    assert other[0] == "RankError"
    assert re.search("rank 1 of 2 failed in (reading|restoring).* step 2: OSError: .*No space", other[1])


def loaded_step(folder: Path, step: int | None) -> tuple[str, str, Any]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = ingot.Checkpoints(folder).load(step)
        except (ingot.SafetensorError, OSError) as error:
            return type(error).__name__, str(error), None
    return "", " ".join(str(one.message) for one in warned), found["weights"].tolist()


def damaged(folder: Path, step: int, rank: int) -> Path:
    """Change a byte of the data of a rank's file."""
    suffix = f"-{rank:05d}" if rank else ""
    (file,) = (
        one
        for one in (folder / f"step-{step:08d}").glob(f"state-*{suffix}.safetensors")
        if one.name.count("-") == 1 + bool(rank)
    )
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_rank_reads_takes_all_back_to_the_step_before(
    rank: int, tmp_path: Path, two: Ranks
) -> None:
    folder = tmp_path / "run"
    two.run(saved_steps, folder)
    file = damaged(folder, 2, rank)
    for kind, message, found in two.run(loaded_step, folder, None):
        assert kind == ""
        assert found == [1] * 5
        assert "step 2 is damaged, so step 1 was loaded" in message
        assert file.name in message
    errors = two.run(loaded_step, folder, 2)
    assert {kind for kind, _, _ in errors} <= {"IntegrityError", "RankError"}
    assert all(file.name in message for _, message, _ in errors)
    assert two.run(latest, folder, True) == [1, 1]
    assert two.run(latest, folder, False) == [2, 2]


def latest(folder: Path, verify: bool) -> int | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ingot.Checkpoints(folder).latest(verify=verify)


def test_bad_directories_are_errors_on_every_rank(tmp_path: Path, two: Ranks) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "checkpoint-500").mkdir(parents=True)
    assert {one[2] for one in two.run(kept, foreign, constant)} == {"foreign-checkpoints"}
    for change, code in (({"version": 9}, "later-checkpoint"), ({}, "invalid-commit")):
        folder = tmp_path / code
        two.run(saved_steps, folder)
        for step in (1, 2):
            file = folder / f"step-{step:08d}" / "checkpoint.json"
            text = file.read_text("utf-8")
            file.write_text(text.replace('"version": 1', '"version": 9') if change else text[:-30], "utf-8")
        first, other = two.run(loaded_step, folder, None)
        says = "found 9: update ingot" if change else "none of the steps 2, 1 is whole"
        assert says in first[1]
        assert says in other[1]


def killed(*given: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies(folder: Path, where: str) -> Any:
    """Save two steps. The last rank is killed during the second save. Returns what the others raise."""
    rank = dist.get_rank()
    state = {"weights": torch.full((5,), 1), "rank": Own(rank)}
    checkpoints = ingot.Checkpoints(folder)
    checkpoints.save(1, state)
    checkpoints.wait()
    if rank == 2:
        mock.patch(where, killed).start()
    began = time.monotonic()
    try:
        checkpoints.save(2, state)
        checkpoints.wait()
    except ingot.RankError as error:
        return str(error), time.monotonic() - began
    return None


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
@pytest.mark.parametrize(
    "where",
    ["ingot.torch._save_state_by_ranks.write_file", "ingot._state.commit.stored"],
)
def test_killed_rank_is_named_by_the_others(where: str, tmp_path: Path, some: Ranks, two: Ranks) -> None:
    folder = tmp_path / "run"
    found = some.outcomes(dies, folder, where)
    assert found[2] == GONE
    for message, _ in found[:2]:
        assert "rank 2 of 3 was lost" in message
    assert ingot.Checkpoints(folder).steps() == [1]
    some.close()
    two.run(saved_after, folder)
    assert ingot.Checkpoints(folder).steps() == [1, 2]
    assert len([*(folder / "step-00000002").glob("*.safetensors")]) == 2


def saved_after(folder: Path) -> None:
    with ingot.Checkpoints(folder) as checkpoints:
        checkpoints.load()
        checkpoints.save(2, {"weights": torch.full((5,), 2), "rank": Own(dist.get_rank())})


def lists_alone(folder: Path) -> str | None:
    """List the steps on the first rank only."""
    if dist.get_rank() == 0:
        with mock.patch("ingot._ranks.peers._CONNECT_SECONDS", 1.0):
            try:
                ingot.Checkpoints(folder).steps()
            except ingot.RankError as error:
                return str(error)
    return None


def test_a_call_of_the_first_rank_alone_names_the_remedy(tmp_path: Path, some: Ranks) -> None:
    message = some.run(lists_alone, tmp_path)[0]
    assert message == (
        "rank 1 of 3 was lost, or did not make the same call within 1 seconds: "
        "all ranks have to make each call, also steps() and latest()"
    )


WITHOUT_A_BLOCK = """
import sys
import torch, torch.distributed as dist
import ingot

rank, store, folder = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
checkpoints = ingot.Checkpoints(folder)
checkpoints.save(1, {"weights": torch.ones(3)})
"""


def test_ranks_without_a_with_block_save_and_exit(tmp_path: Path) -> None:
    own = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", WITHOUT_A_BLOCK]
    facts = [str(tmp_path / "store"), str(tmp_path / "run")]
    ranks = [subprocess.Popen([*command, str(rank), *facts], env=own) for rank in range(2)]
    try:
        assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ingot.Checkpoints(tmp_path / "run").steps() == [1]
