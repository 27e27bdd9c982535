"""Random sequences of all functions that write and read files. `machine` must find planted faults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import Files, helpers

import ingot
import ingot.numpy
from support.record import note

STEPS_OF_ONE_SEED = 5000
STEPS_OF_ONE_MACHINE = 50
# Some machines end early.
MACHINES = 115
# `make nightly` runs other machines each night.
FIRST = int(os.environ.get("INGOT_SEED", "0"))
COUNT = int(os.environ.get("INGOT_STEPS", "10000")) // STEPS_OF_ONE_SEED


@pytest.fixture(scope="module", autouse=True)
def two_helpers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    Files.root = tmp_path_factory.mktemp("machines")
    with helpers(2) as Files.helpers:
        yield


def run(number: int) -> None:
    how = settings(
        max_examples=MACHINES,
        stateful_step_count=STEPS_OF_ONE_MACHINE,
        suppress_health_check=list(HealthCheck),
        database=None,
        # A failing machine prints its few steps. To shrink them further takes many minutes: add
        # `Phase.shrink` here.
        phases=[Phase.generate],
    )
    run_state_machine_as_test(seed(number)(Files), settings=how)


def run_many(count: int) -> None:
    for number in range(count):
        run(number)


# A rewrite of all tensors under their names changes nothing.
@pytest.mark.filterwarnings("ignore:rewrite")
@pytest.mark.parametrize("number", range(FIRST, FIRST + COUNT))
def test_files_and_handles_are_right_in_any_order(number: int) -> None:
    before = Files.steps
    fault: dict[str, object] = {}
    try:
        run(number)
    except BaseException as error:
        # Recorded now: if the process is killed later, it prints nothing.
        fault = {"seed": number, "fault": repr(error)}
        raise
    finally:
        note("state machine, steps", Files.steps - before, int(bool(fault)), **fault)
    assert Files.steps - before > STEPS_OF_ONE_SEED // 2


@pytest.mark.filterwarnings("ignore:rewrite")
@pytest.mark.parametrize("fault", ["lost edit", "other bytes", "left behind"])
def test_machine_finds_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    merge, get_tensors = ingot.merge, ingot.safe_open.get_tensors

    def other_bytes(handle: ingot.safe_open[numpy.ndarray]) -> dict[str, numpy.ndarray]:
        # Reads the file that has the path now, not the opened one.
        fresh = ingot.safe_open(handle.path, "np")
        return get_tensors(fresh) if fresh.keys() == handle.keys() else get_tensors(handle)

    def left_behind(sources: list[Path], path: Path, **options: object) -> None:
        merge(sources, path, **options)  # type: ignore[arg-type]
        path.with_name(f".{path.name}.tmp").touch()

    if fault == "lost edit":
        monkeypatch.setattr(ingot, "replace_tensor", lambda *given: None)
    elif fault == "other bytes":
        monkeypatch.setattr(ingot.safe_open, "get_tensors", other_bytes)
    else:
        monkeypatch.setattr(ingot, "merge", left_behind)
    with pytest.raises((AssertionError, FileNotFoundError)):
        run_many(6)
