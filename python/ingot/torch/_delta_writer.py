"""Write the changes of live tensors, step by step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch

from ingot import _native
from ingot._base.checks import counted, is_durable
from ingot._base.options import checked, takes
from ingot._base.text import _escaped, located
from ingot._base.waits import settled
from ingot._native import Checkpoint
from ingot._ranks.local import identity, is_dtensor, known_group
from ingot._write.background import Line, SaveFuture
from ingot._write.directory import make
from ingot.errors import SaveError
from ingot.typing import NoOptions, Path

from ._files import save_file
from ._model import duplicate_names
from ._tensors import _tensors

if TYPE_CHECKING:
    import torch.distributed

    from ingot._ranks.peers import Peers

_LINE = Line("ingot-deltas")


class _Copy(bytearray):
    """The bytes of a file in memory, which `save_file` writes to."""

    def write(self, data: Any) -> None:
        """Append bytes."""
        self += data


class _Pending(NamedTuple):
    """A file that is being written, and the version that it makes."""

    future: SaveFuture
    new: _Copy


@takes()
class DeltaWriter:
    """Write what changed in live tensors since the step before, for servers that have that step.

    The first `save` writes all tensors to ``whole-00000007.safetensors`` in the directory, with the number of
    the step. Each later one writes a patch, ``patch-00000008.safetensors``, from the step before. `load_file`
    and `load_into` read the first, ``load_into(..., patch=)`` and `ingot.delta.apply` apply the others.

    Parameters
    ----------
    tensors : torch.nn.Module or dict of str to torch.Tensor
        The tensors, on any device. Of a module, the tensors of its `state_dict`, tied ones once.
    directory : str, bytes or os.PathLike
        Where to write. It is made if it does not exist. Files of the same steps are replaced.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that have the parts of DTensors. The default is all ranks.

    Raises
    ------
    TypeError
        `tensors` is neither a module nor a dict, `directory` is no path, or `process_group` is no group.
    OSError
        The directory cannot be made.

    Attributes
    ----------
    version : str or None
        The id of the version that the next patch is for. None if the next file has all tensors.

    Notes
    -----
    The writer has a copy of the version before in the memory of the host, and a second one while it writes.
    `save` returns when the tensors are copied; comparing and writing follow in a thread. The error of a
    failed write is raised by the next call, and by the end of the ``with`` block.

    A patch has the id of its base, and the base moves only after a patch is durable. So a server that missed
    a patch finds out: ``load_into`` raises `IntegrityError` with the code ``"wrong-base"``. A writer that is
    made again, such as after a crash, begins with all tensors.

    **DTensors** (FSDP2, tensor and expert parallel) are written as whole tensors by the first rank of
    `process_group`, which alone has the copies. All ranks make each call. `save` gathers one tensor at a
    time by ``full_tensor()``, so that each device needs memory for one whole tensor. If the first rank fails,
    all ranks raise. Without DTensors and without `process_group`, no rank waits for another: one rank makes
    the calls.

    Examples
    --------
    >>> tensors = {"weight": torch.zeros(1000)}
    >>> with ingot.torch.DeltaWriter(tensors, "weights") as writer:
    ...     for step in range(3):
    ...         tensors["weight"][step] += 1
    ...         writer.save(step)
    >>> server = ingot.torch.load_file("weights/whole-00000000.safetensors")
    >>> for step in (1, 2):
    ...     _ = ingot.torch.load_into(server, patch=f"weights/patch-{step:08}.safetensors")
    >>> torch.equal(server["weight"], tensors["weight"])
    True
    """

    def __init__(
        self,
        tensors: torch.nn.Module | Mapping[str, torch.Tensor],
        directory: Path,
        *,
        process_group: torch.distributed.ProcessGroup | None = None,
        **options: Unpack[NoOptions],
    ) -> None:
        given = checked(DeltaWriter, locals(), tensors=_known_tensors, process_group=known_group)
        self._tensors = tensors
        # The program may change the current directory.
        self._directory = os.path.join(os.getcwd(), os.fsdecode(given["directory"]))
        self._base: _Copy | None = None
        self._pending: _Pending | None = None
        self._group = process_group
        # None if ranks do not write together.
        self._peers: Peers | None = None
        self.version: str | None = None
        make(self._directory, is_durable(None))

    def __enter__(self) -> DeltaWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.commit()
        elif self._pending is not None:
            # A failure is printed at exit, so that it does not replace this error.
            settled(self._pending.future)

    @takes()
    def save(self, step: int, **options: Unpack[NoOptions]) -> None:
        """Copy the tensors, and write what changed in the background.

        First the base moves to the step that was saved last, as `commit` does.

        Parameters
        ----------
        step : int
            The number of the step, for the name of the file and for `ingot.delta.info`.

        Raises
        ------
        OSError, StorageError
            The file of the step before could not be written. The base has not moved, and the next call
            writes a patch from it.
        SaveError
            A tensor cannot be stored, or a DTensor is on a mesh without this rank.
        RankError
            Another rank failed or was lost, or has other tensors.
        TypeError, OptionError
            `step` is not a number of 0 or more.

        Examples
        --------
        >>> writer = ingot.torch.DeltaWriter({"weight": torch.zeros(4)}, "weights")
        >>> writer.save(0)
        >>> writer.commit()
        """
        step = checked(self.save, locals(), step=partial(counted, "step"))["step"]
        self.commit()
        new = self._copied()
        if new is None:
            return
        kind = "whole" if self._base is None else "patch"
        path = os.path.join(self._directory, f"{kind}-{step:08}.safetensors")
        future = _LINE.put(partial(_write, self._base, new, path, step), SaveFuture(path))
        self._pending = _Pending(future, new)

    def commit(self) -> None:
        """Wait until the last file is durable, and make the next patch from that step.

        `save` and the end of the ``with`` block do it.

        Raises
        ------
        OSError, StorageError
            The file could not be written. The base has not moved.
        RankError
            The first rank could not write the file, or a rank was lost.

        Examples
        --------
        >>> writer = ingot.torch.DeltaWriter({"weight": torch.zeros(4)}, "weights")
        >>> writer.save(0)
        >>> writer.commit()
        >>> writer.version is None
        False
        """
        if self._peers is None:
            self._settle()
        else:
            self.version = self._peers.first(self._settle, "committing a step")

    def _settle(self) -> str | None:
        """Wait for the file that is being written, if any, and return the version after it."""
        if self._pending is not None:
            future, new = self._pending
            try:
                future.result()
            finally:
                # Ctrl-C ends the wait and not the write.
                if future.done():
                    self._pending = None
            self._base, self.version = new, _native.version_id(Checkpoint.from_buffer(new))
        return self.version

    def _copied(self) -> _Copy | None:
        """Return a file of the tensors in memory; None on ranks that do not write."""
        state, aliases = _named(self._tensors)
        if self._peers is None:
            if self._group is None and not any(map(is_dtensor, state.values())):
                return _file(state, aliases)
            # Imported here: most writers are of one process.
            from ingot._ranks.peers import Peers

            self._peers = Peers(self._group)
        state = _gathered(state, self._peers)
        with self._peers.step("copying tensors"):
            return _file(state, aliases) if self._peers.rank == 0 else None

    def reset(self) -> None:
        """Write all tensors at the next step, for servers that have lost a patch.

        A file that is being written is completed first, and its failure has no effect.

        Examples
        --------
        >>> writer = ingot.torch.DeltaWriter({"weight": torch.zeros(4)}, "weights")
        >>> writer.save(0)
        >>> writer.reset()
        >>> writer.save(1)
        >>> writer.commit()
        >>> list(ingot.torch.load_file("weights/whole-00000001.safetensors"))
        ['weight']
        """
        if self._pending is not None:
            self._pending.future.exception()
        self._pending = self._base = self.version = None


def _known_tensors(given: Any) -> Any:
    if not isinstance(given, (torch.nn.Module, Mapping)):
        kind = type(given).__name__
        raise TypeError(f"tensors must be a torch.nn.Module or a dict of str to torch.Tensor, found {kind}")
    return given


def _named(
    tensors: torch.nn.Module | Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors to write, and the names of tied ones that are left out, with the name to keep."""
    if not isinstance(tensors, torch.nn.Module):
        return dict(tensors), {}
    state = _tensors(tensors.state_dict())
    plain = {name: tensor for name, tensor in state.items() if not is_dtensor(tensor)}
    aliases = {one: name for name, others in duplicate_names(plain).items() for one in others}
    kept: dict[Any, str] = {}
    for name, tensor in sorted(state.items()):
        if is_dtensor(tensor):
            first = kept.setdefault(identity(tensor), name)
            aliases |= {name: first} if name != first else {}
    return {name: tensor for name, tensor in state.items() if name not in aliases}, aliases


def _file(state: dict[str, torch.Tensor], aliases: dict[str, str]) -> _Copy:
    """Return a file as `save_model` or `save_file` would write it, in memory."""
    copy = _Copy()
    save_file(state, copy, aliases or None, checksums="xxh3")
    return copy


def _gathered(state: dict[str, torch.Tensor], peers: Peers) -> dict[str, torch.Tensor]:
    """Return the whole tensors on the first rank, and none on the others. All ranks call it."""
    with peers.step("comparing tensors"):
        for name, tensor in state.items():
            if is_dtensor(tensor):
                _check_mesh(name, tensor)
    _check_alike([f"{name} {tensor.dtype} {[*tensor.shape]}" for name, tensor in state.items()], peers)
    found: dict[str, torch.Tensor] = {}
    fault: Exception | None = None
    with torch.no_grad():
        for name, tensor in state.items():
            part: Any = tensor
            whole = part.full_tensor() if is_dtensor(part) else part
            if peers.rank or fault is not None:
                continue
            try:
                found[name] = whole.cpu() if is_dtensor(part) else whole
            # Raised after the collectives, in which the other ranks wait.
            except Exception as error:
                fault = error
    peers.agree(fault, "gathering tensors")
    return found


def _check_mesh(name: str, tensor: Any) -> None:
    if tensor.device_mesh.get_coordinate() is None:
        reason = "this rank is not in the mesh of the DTensor: pass its ranks as process_group"
        raise located(SaveError, reason, code="no-values", tensor=name)


def _check_alike(mine: list[str], peers: Peers) -> None:
    """Raise on all ranks if one has other tensors than the first."""
    first, *others = peers.gather(mine, "comparing tensors")
    for rank, other in enumerate(others, 1):
        for expected, found in zip_longest(first, other, fillvalue="no more tensors"):
            if expected != found:
                reason = f"has other tensors than rank 0: expected {expected}, found {found}"
                raise peers.error(rank, _escaped(reason), "ranks-differ")


def _write(base: _Copy | None, new: _Copy, path: str, step: int) -> None:
    if base is None:
        _native.replace_file(path, [new], overwrite=True)
        return
    versions = Checkpoint.from_buffer(base), Checkpoint.from_buffer(new)
    _native.diff_versions(*versions, path, step=step, overwrite=True)
