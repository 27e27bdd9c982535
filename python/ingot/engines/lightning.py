"""Lightning saves and loads its checkpoints by ingot: tensors in ordinary files, and no pickle.

>>> from ingot.engines.lightning import CheckpointIO  # doctest: +SKIP
>>> trainer = lightning.Trainer(plugins=[CheckpointIO()])  # doctest: +SKIP
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from importlib import import_module
from types import new_class
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ingot._base.options import Saving, checked, takes
from ingot._base.waits import wait_for
from ingot.errors import SaveError
from ingot.torch import load_state
from ingot.torch._state import states
from ingot.typing import SaveOptions

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ingot import SaveFuture
    from ingot.typing import Path

    Base: Any = object
else:
    # One library under two names, each with its own base class.
    HOMES = ("lightning.fabric.plugins", "lightning_fabric.plugins")

    def _theirs(home: str) -> list[type]:
        try:
            return [import_module(home).CheckpointIO]
        except ModuleNotFoundError as error:
            if error.name != home.partition(".")[0]:
                raise
            return []

    theirs = [kind for home in HOMES for kind in _theirs(home)]
    if not theirs:
        raise ModuleNotFoundError(
            "ingot.engines.lightning needs lightning, which is not installed: pip install lightning",
            name="lightning",
        )
    Base = new_class("Base", tuple(theirs))

__all__ = ["CheckpointIO"]


@takes(SaveOptions, overwrite=True)
class CheckpointIO(Base):  # type: ignore[misc]
    """Saves and loads checkpoints: a plugin for Lightning's ``Trainer`` and ``Fabric``.

    Parameters
    ----------
    background : bool
        Continue training while a checkpoint is written. Its tensors are copied first, and one checkpoint is
        written at a time: the next save waits for it. Errors are raised by the next save, or at the end of
        training. A checkpoint that Lightning removes stays until the one that is being written is complete.
    **options
        How files are written: `ingot.typing.SaveOptions`.

    Raises
    ------
    TypeError
        An option is unknown.

    Notes
    -----
    A checkpoint is a training state, as `ingot.torch.save_state` writes them: one file of tensors, each named
    after its path (``state_dict.layer.weight``, ``optimizer_states.0.state.0.exp_avg``), and a tree of all
    other values in the metadata. Values that only pickle could store, such as a module or a function among
    the hyperparameters, are rejected with their path. No code in a checkpoint is run when it is loaded.

    On the CPU, one file is for all ranks, which have the same state. Lightning calls no plugin for strategies
    that shard a model (``FSDPStrategy``, ``ModelParallelStrategy``).

    Examples
    --------
    >>> plugin = CheckpointIO(background=True)
    >>> trainer = lightning.Trainer(plugins=[plugin])  # doctest: +SKIP
    >>> plugin.save_checkpoint({"epoch": 1, "weight": torch.ones(4)}, "epoch.ckpt")
    >>> plugin.load_checkpoint("epoch.ckpt")
    {'epoch': 1, 'weight': tensor([1., 1., 1., 1.])}
    """

    def __init__(self, *, background: bool = False, **options: Unpack[SaveOptions]) -> None:
        given = checked(CheckpointIO, locals())
        super().__init__()
        self._how = Saving.among(CheckpointIO, given)._replace(metadata={"format": "pt"})
        self._saving: SaveFuture | None = None
        # Set when a checkpoint has been removed, or stays.
        self._removals: list[threading.Event] = []

    def save_checkpoint(
        self, checkpoint: Mapping[str, Any], path: Path, storage_options: object = None
    ) -> None:
        """Save a checkpoint.

        Parameters
        ----------
        checkpoint : dict
            The checkpoint from Lightning: tensors, and the other values that the class documents.
        path : str or os.PathLike
            The file, whose directory is created if it does not exist, or a URL that fsspec can write to.
        storage_options : None
            Lightning's options, which are not supported.

        Raises
        ------
        SaveError
            Only pickle could store a value (``code`` is ``"not-plain"``), or a tensor cannot be stored.
        TypeError
            `storage_options` are passed.
        OSError, StorageError, OptionError
            As for `ingot.torch.save_state`, and the errors of the previous background save.
        """
        if storage_options is not None:
            reason = "pass options to the constructor of CheckpointIO"
            raise TypeError(f"storage_options are not for ingot's CheckpointIO: {reason}")
        self.teardown()
        files, inner = _place(path)
        try:
            if _is_local(files):
                os.makedirs(os.path.dirname(inner), exist_ok=True)
                # Live objects, such as modules among the hyperparameters, are rejected here instead of
                # replaced by their states.
                self._saving = states.saved_tree(dict(checkpoint), inner, self._how, {})
            else:
                with files.transaction, files.open(inner, "wb") as file:
                    states.saved_tree(dict(checkpoint), file, self._how._replace(background=False), {})
        except SaveError as fault:
            raise _with_way_out(fault) from None

    def load_checkpoint(
        self, path: Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint.

        Parameters
        ----------
        path : str or os.PathLike
            The file, or a URL that fsspec reads.
        map_location : str, int or torch.device, optional
            Where the tensors are placed. On the CPU by default.
        weights_only : bool, optional
            Lightning's, about pickles, which ingot does not use.

        Returns
        -------
        dict
            The saved checkpoint. The tensors have memory of their own.

        Raises
        ------
        CheckpointError
            The file has no state (``code`` is ``"no-state"``: another program wrote it), or a damaged one
            (``"invalid-state"``).
        HeaderError
            It is not a file of tensors, such as a checkpoint that Lightning wrote without this plugin.
        TypeError
            `map_location` is a dict or a function: these are about a pickle's storages.
        OSError, StorageError, DtypeError, OptionError
            As for `ingot.torch.load_state`.
        """
        if map_location is not None and not isinstance(map_location, str | int | torch.device):
            kind = type(map_location).__name__
            why = "it maps the storages of a pickle, and ingot's checkpoints have none"
            raise TypeError(f"map_location must be a device, found {kind}: {why}")
        self.teardown()
        from fsspec.core import OpenFile

        found: dict[str, Any] = load_state(OpenFile(*_place(path)), map_location or "cpu")
        return found

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint, once the one that is being written is complete.

        Parameters
        ----------
        path : str or os.PathLike
            The file. If it does not exist, nothing is removed.

        Raises
        ------
        OSError
            The file cannot be removed. If the removal is deferred, the error is logged.
        """

        def remove(saving: Future[None] | None) -> None:
            if saving is not None and (saving.cancelled() or saving.exception() is not None):
                return
            files, inner = _place(path)
            if files.exists(inner):
                files.rm(inner, recursive=True)

        if self._saving is None or self._saving.done():
            remove(self._saving)
            return
        done = threading.Event()
        self._removals.append(done)

        def remove_later(saving: Future[None]) -> None:
            try:
                remove(saving)
            finally:
                done.set()

        self._saving.add_done_callback(remove_later)

    def teardown(self) -> None:
        """Wait for the checkpoint that is being written, and for removals that depend on it.

        Raises
        ------
        OSError, StorageError
            Writing it failed.
        """
        saving, self._saving = self._saving, None
        removals, self._removals = self._removals, []
        try:
            if saving is not None:
                saving.result()
        finally:
            # A future has its result before its callbacks have run.
            for done in removals:
                wait_for(done.wait)


def _with_way_out(fault: SaveError) -> SaveError:
    """Add to the error about a hyperparameter how to leave it out."""
    # The types of checkpoints of Lightning's modules and data modules.
    place, _, name = (fault.tensor or "").partition(".")
    if fault.code == "not-plain" and place.endswith("hyper_parameters"):
        name = name.partition(".")[0].partition("[")[0]
        fault.args = (f"{fault}, or leave it out by save_hyperparameters(ignore=[{name!r}])",)
    return fault


def _place(path: Path) -> tuple[Any, str]:
    """Return the file system of `path`, and the path in it."""
    # Imported here: Lightning has it imported.
    from fsspec.core import url_to_fs

    files, inner = url_to_fs(os.fspath(path))
    return files, inner


def _is_local(files: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(files, LocalFileSystem)
