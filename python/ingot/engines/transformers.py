"""The Trainer of transformers saves and resumes by ingot: no pickle in its checkpoints.

>>> from ingot.engines.transformers import CheckpointMixin  # doctest: +SKIP
>>> class Trainer(CheckpointMixin, transformers.Trainer): ...  # doctest: +SKIP
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from warnings import warn

import ingot
from ingot._base.options import DEFAULT_LOADING, Saving
from ingot._base.text import _escaped, located
from ingot.errors import CheckpointError, OptionError, SafetensorError
from ingot.torch import RNG, load_state
from ingot.torch._state import states

__all__ = ["CheckpointMixin"]

# A directory of its own, since engines load all files of tensors that are beside the weights.
_FOLDER = "training_state"
_STATE = os.path.join(_FOLDER, "state.safetensors")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_HOW = Saving(metadata={"format": "pt"}, overwrite=True)


class CheckpointMixin:
    """Saves and loads the training state of a ``transformers.Trainer`` without pickle.

    Name it first: ``class Trainer(CheckpointMixin, transformers.Trainer)``. It also fits subclasses of the
    Trainer, such as trl's trainers.

    Raises
    ------
    OptionError
        The Trainer uses DeepSpeed, FSDP, SageMaker's model parallelism or XLA, which save states by
        themselves (``code`` is ``"sharded-trainer"``).

    Notes
    -----
    A checkpoint directory has ``training_state/state.safetensors`` in place of ``optimizer.pt``,
    ``scheduler.pt`` and ``scaler.pt``, ``training_state/rng-0.safetensors`` of each rank in place of
    ``rng_state.pth``, and ``training_args.json`` in place of ``training_args.bin``. The Trainer itself writes
    the weights and ``trainer_state.json``. The optimizer's state is stored under the names of parameters.

    ``train(resume_from_checkpoint=True)`` takes the newest checkpoint that is complete, and warns of newer
    ones that a kill has interrupted. A checkpoint that has no state of ingot is rejected.

    ``push_to_hub`` and searches for hyperparameters by Ray write files of their own, with pickles.

    Examples
    --------
    >>> class Trainer(CheckpointMixin, transformers.Trainer): ...  # doctest: +SKIP
    >>> trainer = Trainer(model, args, train_dataset=dataset)  # doctest: +SKIP
    >>> trainer.train(resume_from_checkpoint=True)  # doctest: +SKIP
    """

    # Of the Trainer.
    args: Any
    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from the newest complete checkpoint if `resume_from_checkpoint` is True.

        Raises
        ------
        CheckpointError
            The checkpoint has no training state of ingot (``code`` is ``"no-state"``), or one that does not
            fit.
        OSError, HeaderError, StorageError
            As for `ingot.torch.load_state`.

        Warns
        -----
        RuntimeWarning
            A newer checkpoint is not complete.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest(self.args.output_dir)
        inner: Any = super()
        return inner.train(resume_from_checkpoint, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        inner: Any = super()
        inner._save(output_dir, state_dict)
        # Every rank calls this, and the directory may be made by another one.
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        (folder / "training_args.json").write_text(self.args.to_json_string(), "utf-8")
        (folder / "training_args.bin").unlink(missing_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.should_save:
            return
        path = os.path.join(output_dir, _STATE)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        states.saved(self._training_state(), path, _HOW, self._named_by())

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the state of the optimizer has it."""

    def _save_rng_state(self, output_dir: str) -> None:
        path = self._rng_path(output_dir)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        states.saved({"rng": RNG()}, path, _HOW)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, _STATE)
        if not os.path.isfile(path):
            raise _without_state(checkpoint)
        move = states.whole.mover(None)
        states.loaded(path, DEFAULT_LOADING, move, self._training_state(), named_by=self._named_by())

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: it was loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = self._rng_path(checkpoint)
        if os.path.isfile(path):
            load_state(path, into={"rng": RNG()})
            return
        reason = (
            f"no random number generators of rank {self.args.process_index}: saved by another number of ranks"
        )
        warn(f"{_escaped(checkpoint)}: {reason}", RuntimeWarning, stacklevel=2)

    def _training_state(self) -> dict[str, Any]:
        found = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        scaler = getattr(self.accelerator, "scaler", None)
        return found if scaler is None else {**found, "scaler": scaler}

    def _named_by(self) -> Mapping[tuple[Any, ...], Any]:
        """Return the modules whose names the parameters of the optimizer have."""
        return {("model",): self.model}

    def _rng_path(self, checkpoint: str) -> str:
        return os.path.join(checkpoint, _FOLDER, f"rng-{self.args.process_index}.safetensors")


def _check(trainer: Any) -> None:
    """Raise for the ways of training whose states are in other places than the optimizer."""
    from transformers.utils import is_sagemaker_mp_enabled, is_torch_xla_available

    used = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "SageMaker's model parallelism": is_sagemaker_mp_enabled(),
        "XLA": is_torch_xla_available(),
    }
    for name, is_used in used.items():
        if is_used:
            message = f"the Trainer uses {name}, which saves states by itself: leave CheckpointMixin out"
            raise OptionError(message, code="sharded-trainer", found=name)


def _newest(folder: str) -> str | bool | None:
    """Return the newest complete checkpoint. None if all are incomplete, and True without any checkpoint."""
    matches = map(_CHECKPOINT.fullmatch, os.listdir(folder) if os.path.isdir(folder) else ())
    numbers = sorted((int(match[1]) for match in matches if match), reverse=True)
    for number in numbers:
        checkpoint = os.path.join(folder, f"checkpoint-{number}")
        reason = _lacks(checkpoint)
        if reason is None:
            return checkpoint
        warn(f"{_escaped(checkpoint)} is not complete: {reason}", RuntimeWarning, stacklevel=3)
    # For True the Trainer raises its own error.
    return None if numbers else True


def _lacks(checkpoint: str) -> str | None:
    """Return what a checkpoint lacks. The Trainer writes its own state last."""
    try:
        with open(os.path.join(checkpoint, "trainer_state.json"), encoding="utf-8") as file:
            json.load(file)
    except (OSError, ValueError) as fault:
        return f"trainer_state.json cannot be read ({fault})"
    path = os.path.join(checkpoint, _STATE)
    # A checkpoint of another program is rejected later, with the reason.
    if os.path.isdir(os.path.dirname(path)):
        try:
            ingot.open(path).close()
        except (OSError, SafetensorError) as fault:
            return f"{fault}"
    return None


def _without_state(checkpoint: str) -> CheckpointError:
    found = [name for name in ("optimizer.pt", "optimizer.bin") if name in os.listdir(checkpoint)]
    anew = "load the model by from_pretrained and train without resume_from_checkpoint"
    if found:
        saved = f"the Trainer saved {found[0]} without ingot"
        way_out = f"resume once without CheckpointMixin, or {anew}"
    else:
        saved = "it has weights only, as the Trainer saves them with save_only_model=True"
        way_out = f"{anew}; checkpoints to resume from need save_only_model=False"
    reason = f"expected {_STATE}, found none: {saved}: {way_out}"
    return located(CheckpointError, reason, code="no-state", path=checkpoint)
