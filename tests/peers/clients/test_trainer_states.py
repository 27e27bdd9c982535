"""Checkpoints of transformers' Trainer and of an Accelerator that do not fit, are damaged, or are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from transformers import Trainer, TrainingArguments

import ingot
from ingot.engines import accelerate as ours
from ingot.engines import transformers as mixin
from ingot.torch import save_file
from support.errors import raises

# Of the libraries.
pytestmark = pytest.mark.filterwarnings("ignore")


class MyTrainer(mixin.CheckpointMixin, Trainer):  # type: ignore[misc]
    """A Trainer that saves by ingot."""


class Model(nn.Module):
    """A model as transformers calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).pow(2).mean()}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget the accelerator of other tests."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def trainer(folder: Path, **options: Any) -> Any:
    args = TrainingArguments(
        str(folder), max_steps=2, save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, **options
    )
    return MyTrainer(Model(), args, train_dataset=[{"x": torch.ones(2)}] * 8)


def test_trainer_leaves_out_incomplete_checkpoints(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    last = tmp_path / "checkpoint-2"
    (last / "trainer_state.json").write_text("{")
    with pytest.warns(RuntimeWarning, match="checkpoint-2 is not complete: trainer_state.json"):
        assert mixin._newest(str(tmp_path)) == str(tmp_path / "checkpoint-1")
    state = tmp_path / "checkpoint-1" / "training_state" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="checkpoint-1 is not complete"):
        assert mixin._newest(str(tmp_path)) is None


def test_trainer_without_checkpoints_raises_its_own_error(tmp_path: Path) -> None:
    assert mixin._newest(str(tmp_path)) is True
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_trainer_rejects_a_checkpoint_without_states(tmp_path: Path) -> None:
    trainer(tmp_path, save_only_model=True).train()
    with raises(ingot.CheckpointError, "save_only_model=True: load the model", code="no-state"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-2" / "optimizer.pt").touch()
    with raises(ingot.CheckpointError, "the Trainer saved optimizer.pt without ingot", code="no-state"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_trainer_writes_arguments_on_the_rank_that_saves(tmp_path: Path) -> None:
    # On another rank the directory may not exist yet, which depends on the timing of real ranks.
    with mock.patch.object(TrainingArguments, "should_save", False):
        trainer(tmp_path / "run").save_model(str(tmp_path / "weights"))
    assert not (tmp_path / "weights").exists()
    trainer(tmp_path / "run").save_model(str(tmp_path / "weights"))
    names = {path.name for path in (tmp_path / "weights").iterdir()}
    assert "training_args.json" in names
    assert "training_args.bin" not in names


def test_trainer_restores_the_scaler(tmp_path: Path) -> None:
    first, second = trainer(tmp_path), trainer(tmp_path)
    for one, scale in ((first, 64.0), (second, 2.0)):
        one.create_optimizer_and_scheduler(2)
        one.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    first._save_optimizer_and_scheduler(str(tmp_path))
    second._load_optimizer_and_scheduler(str(tmp_path))
    assert second.accelerator.scaler.get_scale() == 64.0


@pytest.mark.parametrize(
    ("name", "found"), [("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")]
)
def test_trainer_with_sharded_states_is_refused(tmp_path: Path, name: str, found: str) -> None:
    # These modes do not run in one process without a GPU.
    one = trainer(tmp_path)
    setattr(one, name, True)
    with raises(ingot.OptionError, f"the Trainer uses {found}", code="sharded-trainer"):
        mixin._check(one)


def accelerator(layers: int = 1) -> Any:
    one = Accelerator(cpu=True)
    for _ in range(layers):
        model = nn.Linear(2, 2)
        one.prepare(model, torch.optim.AdamW(model.parameters()))
    return one


def test_accelerator_with_other_objects_is_rejected(tmp_path: Path) -> None:
    ours.save_state(accelerator(), tmp_path)
    with raises(ingot.CheckpointError, "prepare and register the same objects", code="registered-objects"):
        ours.load_state(accelerator(2), tmp_path)


def test_accelerator_restores_the_scaler_and_the_step(tmp_path: Path) -> None:
    first, second = accelerator(), accelerator()
    first.scaler, second.scaler = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (64.0, 2.0))
    first.step = 5
    ours.save_state(first, tmp_path)
    ours.load_state(second, tmp_path)
    assert (second.scaler.get_scale(), second.step) == (64.0, 5)
    assert torch.equal(first._models[0].weight, second._models[0].weight)


def test_accelerator_with_hooks_is_refused(tmp_path: Path) -> None:
    one = accelerator()
    one.register_save_state_pre_hook(lambda models, weights, folder: None)
    with raises(ingot.OptionError, "would not be called", code="model-hooks"):
        ours.save_state(one, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_accelerator_rejects_files_of_other_programs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ours.load_state(accelerator(), tmp_path)
    save_file({"weight": torch.ones(2)}, tmp_path / "state.safetensors")
    with raises(ingot.CheckpointError, "another program saved it", code="no-state"):
        ours.load_state(accelerator(), tmp_path)


def test_accelerator_keeps_the_state_of_the_last_save(tmp_path: Path) -> None:
    one = accelerator()
    for step in (1, 2):
        one.step = step
        ours.save_state(one, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    saved = json.loads(ingot.open(tmp_path / "state.safetensors").metadata()["ingot.accelerate"])["save"]  # type: ignore[index]
    assert names == [f"rank-00000-{saved}.safetensors", "state.safetensors"]
    (tmp_path / names[0]).unlink()
    with pytest.warns(RuntimeWarning, match="no random number generators of process 0"):
        ours.load_state(one, tmp_path)


@pytest.mark.parametrize("call", [ours.save_state, ours.load_state])
def test_wrong_directory_of_an_accelerator_is_named(call: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{call.__name__}\(\): directory: expected a path, .*found int"):
        call(Accelerator(cpu=True), 5)
