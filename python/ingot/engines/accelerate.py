"""The state of an Accelerator is saved and loaded by ingot: no pickle in its checkpoints.

>>> from ingot.engines.accelerate import load_state, save_state  # doctest: +SKIP
>>> save_state(accelerator, "checkpoint")  # doctest: +SKIP
>>> load_state(accelerator, "checkpoint")  # doctest: +SKIP
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from secrets import token_hex
from sys import modules
from typing import TYPE_CHECKING, Any
from warnings import warn

import torch

from ingot._base.options import DEFAULT_LOADING, Saving, checked, takes
from ingot._base.text import _escaped, located
from ingot._native import Checkpoint
from ingot._ranks.alone import ALONE, Together
from ingot._ranks.peers import Peers
from ingot.errors import CheckpointError, OptionError
from ingot.torch import RNG
from ingot.torch._load_into import has_ranks
from ingot.torch._state import states

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ingot.typing import Path

__all__ = ["load_state", "save_state"]

_STATE = "state.safetensors"
_OF_RANK = re.compile(r"rank-\d{5}-([0-9a-f]{16})\.safetensors")
# The metadata that has the id of the save, and how many objects of each kind were registered.
_KEY = "ingot.accelerate"
# These save and load their states by themselves.
_SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")


@takes()
def save_state(accelerator: Accelerator, directory: Path) -> None:
    """Save everything that ``Accelerator.save_state`` saves, without pickle.

    All processes call it. Models, optimizers, schedulers, the scaler, objects of
    ``register_for_checkpointing`` and the step go to ``state.safetensors``, written by the main process; the
    random number generators and the positions of data loaders go to a file of each process.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        The accelerator that has prepared the objects.
    directory : str, bytes or os.PathLike
        The directory, which is created if it does not exist. All machines of a job must share it. A state in
        it is replaced once the new one is complete.

    Raises
    ------
    OptionError
        The accelerator uses DeepSpeed, FSDP, Megatron-LM or XLA, which save states by themselves (``code`` is
        ``"sharded-trainer"``); or has hooks about models, which ingot does not call (``"model-hooks"``).
    SaveError, OSError, StorageError
        As for `ingot.torch.save_state`. A state that was there before is unchanged.
    RankError
        Another process failed.

    Examples
    --------
    >>> accelerator = accelerate.Accelerator()  # doctest: +SKIP
    >>> model, optimizer = accelerator.prepare(model, optimizer)  # doctest: +SKIP
    >>> save_state(accelerator, "checkpoint")  # doctest: +SKIP
    """
    given = checked(save_state, locals(), accelerator=_known_accelerator)
    _check(accelerator, accelerator._save_model_state_pre_hook)
    folder, peers = os.fsdecode(given["directory"]), _peers()
    saved = peers.first(lambda: token_hex(8), "saving a state")
    with peers.step("saving the state of each process"):
        os.makedirs(folder, exist_ok=True)
        own = {"rng": RNG(), "dataloaders": [*map(_position, accelerator._dataloaders)]}
        states.saved(own, _path_of_rank(folder, accelerator.process_index, saved), _HOW)
    with peers.step("saving the state"):
        if accelerator.is_main_process:
            registered = _registered(accelerator)
            text = json.dumps({"save": saved, "registered": _counts(accelerator)})
            how = _HOW._replace(metadata={"format": "pt", _KEY: text})
            # The state exists with its files of processes once this file is there.
            states.saved({**registered, "step": accelerator.step}, os.path.join(folder, _STATE), how)
            _remove_others(folder, saved)


@takes()
def load_state(accelerator: Accelerator, directory: Path) -> None:
    """Load what `save_state` saved into the objects of an accelerator. No code in a file is run.

    All processes call it, after ``prepare`` and ``register_for_checkpointing`` of the same objects in the
    same order.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        The accelerator whose objects are filled. Its number of processes may differ.
    directory : str, bytes or os.PathLike
        The directory.

    Raises
    ------
    FileNotFoundError
        The directory has no state.
    CheckpointError
        The accelerator has other numbers of models, optimizers or other objects (``code`` is
        ``"registered-objects"``), or they do not fit the state, as for `ingot.torch.load_state`. Nothing
        has changed.
    OptionError, DestinationError, HeaderError, StorageError, RankError
        As for `save_state` and `ingot.torch.load_state`.

    Warns
    -----
    RuntimeWarning
        More processes load the state than have saved it: the others keep their random number generators.

    Notes
    -----
    The epoch of each data loader, with which accelerate shuffles, is restored, and all of the position of a
    loader with ``use_stateful_dataloader``. Skip batches of other loaders by ``skip_first_batches``.

    Examples
    --------
    >>> model, optimizer = accelerator.prepare(model, optimizer)  # doctest: +SKIP
    >>> load_state(accelerator, "checkpoint")  # doctest: +SKIP
    """
    given = checked(load_state, locals(), accelerator=_known_accelerator)
    _check(accelerator, accelerator._load_model_state_pre_hook)
    folder, peers = os.fsdecode(given["directory"]), _peers()
    move, registered = states.whole.mover(None), _registered(accelerator)
    saved = ""

    def compare(checkpoint: Checkpoint) -> None:
        nonlocal saved
        saved = _compared(checkpoint, _counts(accelerator))

    with peers.step("loading the state"):
        path = os.path.join(folder, _STATE)
        found, _ = states.loaded(path, DEFAULT_LOADING, move, {**registered, "step": 0}, check=compare)
        accelerator.step = found["step"]
    with peers.step("loading the state of each process"):
        path = _path_of_rank(folder, accelerator.process_index, saved)
        if not os.path.exists(path):
            reason = f"no random number generators of process {accelerator.process_index}: fewer were saved"
            warn(f"{_escaped(folder)}: {reason}", RuntimeWarning, stacklevel=2)
            return
        found, _ = states.loaded(path, DEFAULT_LOADING, move, {"rng": RNG()})
        for loader, position in zip(accelerator._dataloaders, found["dataloaders"], strict=True):
            _go_to(loader, position)


_HOW = Saving(metadata={"format": "pt"}, overwrite=True)


def _known_accelerator(accelerator: Any) -> Any:
    """Raise if the argument is not an Accelerator, which only accelerate makes."""
    library = modules.get("accelerate")
    if library is None or not isinstance(accelerator, library.Accelerator):
        found = f"{type(accelerator).__name__} {accelerator!r}"
        raise TypeError(f"accelerator must be an accelerate.Accelerator, found {found:.200}")
    return accelerator


def _check(accelerator: Any, hooks: Mapping[Any, Any]) -> None:
    kind = accelerator.distributed_type.value
    if kind in _SHARDED:
        way_out = "call accelerator.save_state and accelerator.load_state instead"
        message = f"the Accelerator uses {kind}, which saves states by itself: {way_out}"
        raise OptionError(message, code="sharded-trainer", found=kind)
    if hooks:
        reason = "the Accelerator has hooks for saving or loading models, which would not be called"
        message = f"{reason}: remove them, or register other objects by register_for_checkpointing"
        raise OptionError(message, code="model-hooks", found=len(hooks))


def _registered(accelerator: Any) -> dict[str, Any]:
    """Return the objects that the accelerator has prepared or that were registered."""
    found = {
        "models": accelerator._models,
        "optimizers": accelerator._optimizers,
        "schedulers": accelerator._schedulers,
        "custom": accelerator._custom_objects,
    }
    scaler = [] if accelerator.scaler is None else [accelerator.scaler]
    return {**{name: [*objects] for name, objects in found.items()}, "scaler": scaler}


def _counts(accelerator: Any) -> dict[str, int]:
    """Return how many objects of each kind the accelerator has."""
    objects = {**_registered(accelerator), "dataloaders": accelerator._dataloaders}
    return {name: len(some) for name, some in objects.items()}


def _compared(checkpoint: Checkpoint, expected: dict[str, int]) -> str:
    """Return the id of the save. Raise if the file has other numbers of objects."""
    try:
        head = json.loads((checkpoint.metadata() or {})[_KEY])
        saved, found = str(head["save"]), dict(head["registered"])
    except (KeyError, ValueError, TypeError):
        reason = f"expected {_KEY} in the metadata, found none or an invalid one: another program saved it"
        raise located(CheckpointError, reason, code="no-state", path=checkpoint.path) from None
    if found != expected:
        reason = f"the Accelerator has other objects: expected {expected}, found {found} in the file"
        way_out = "prepare and register the same objects in the same order"
        raise located(
            CheckpointError, f"{reason}: {way_out}", code="registered-objects", path=checkpoint.path
        )
    return saved


def _position(loader: Any) -> dict[str, Any]:
    """Return the position of a data loader: its epoch, its generator, and its state if it has one."""
    found: dict[str, Any] = {"epoch": getattr(loader, "iteration", 0)}
    sampler = _sampler(loader)
    if isinstance(getattr(sampler, "initial_seed", None), int):
        found["seed"] = sampler.initial_seed
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        found["generator"] = sampler.generator.get_state()
    if getattr(loader, "use_stateful_dataloader", False):
        found["loader"] = loader.state_dict()
    return found


def _go_to(loader: Any, position: Mapping[str, Any]) -> None:
    """Set a data loader to a position."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(position["epoch"])
    sampler = _sampler(loader)
    if "seed" in position and hasattr(sampler, "initial_seed"):
        sampler.initial_seed = position["seed"]
    if "generator" in position and isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator.set_state(position["generator"])
    if "loader" in position and getattr(loader, "use_stateful_dataloader", False):
        loader.load_state_dict(position["loader"])


def _sampler(loader: Any) -> Any:
    # Loaders of iterable datasets have no sampler.
    with suppress(AttributeError):
        return loader.get_sampler()
    return None


def _path_of_rank(folder: str, rank: int, saved: str) -> str:
    return os.path.join(folder, f"rank-{rank:05d}-{saved}.safetensors")


def _remove_others(folder: str, saved: str) -> None:
    """Remove the files of processes of earlier saves."""
    for name in os.listdir(folder):
        match = _OF_RANK.fullmatch(name)
        if match and match[1] != saved:
            with suppress(FileNotFoundError):
                os.remove(os.path.join(folder, name))


def _peers() -> Together:
    return Peers() if has_ranks() else ALONE
