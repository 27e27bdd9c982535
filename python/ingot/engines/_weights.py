"""The weights of a model for an engine: pairs of name and tensor, read ahead or where they are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from ingot._base.checks import counted, one_of
from ingot._base.text import _escaped, _quoted
from ingot._native import in_natural_order
from ingot._read.door import BACKENDS
from ingot._read.handle import safe_open
from ingot._read.loader import AHEAD
from ingot.errors import CheckpointError, OptionError
from ingot.torch import DTYPES
from ingot.typing import Backend

from ._unread import UnreadTensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    Weights: TypeAlias = Iterator[tuple[str, torch.Tensor]]
    Says: TypeAlias = Callable[[str], bool]

READ = ("auto", "ahead", "used")


class Reading(NamedTuple):
    """The options of an engine's loader, each with its default. docs/guides/engines.md explains them."""

    read: str = "auto"
    device: str = "cpu"
    backend: Backend = "auto"
    threads: int | None = None
    ahead: int = AHEAD

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str, others: Collection[str] = ()) -> Reading:
        """What a user gave, of whose names `others` are not ours and were taken out already."""
        for name in given:
            if name not in cls._fields:
                raise OptionError(
                    f"{where}: unknown option {_quoted(name)}: expected one of "
                    f"{', '.join((*cls._fields, *others))}",
                    code="unknown-loader-option",
                    expected=(*cls._fields, *others),
                    found=name,
                )
        how = cls(**given)
        one_of("read", how.read, READ)
        one_of("backend", how.backend, BACKENDS)
        counted("threads", how.threads, least=1, code="invalid-threads", or_none=True)
        for name, value, kind in (("ahead", how.ahead, int), ("device", how.device, str)):
            if type(value) is not kind:
                raise TypeError(f"{where}: {name} must be {kind.__name__}, found {type(value).__name__}")
        counted("ahead", how.ahead)
        return how

    def decided(self, ranks: int) -> Reading:
        """The same without "auto": where several `ranks` share each tensor, each uses a part of it."""
        if self.read != "auto":
            return self
        return self._replace(read="used" if ranks > 1 else "ahead")


def weights(files: Iterable[str], how: Reading, is_used: Says, is_left_out: Says | None = None) -> Weights:
    """Give the tensors of `files`, in their order and in that of the data in each.

    Parameters
    ----------
    files : iterable of str
        The files.
    how : Reading
        With ``read`` one of "ahead" and "used".
    is_used : callable
        Says of a name whether its tensor is expected to be used: then it is read ahead. One that is not is
        read as soon as it is used after all.
    is_left_out : callable, optional
        Says of a name whether its tensor is not handed out.
    """
    opened = (_File(file, how, is_used, is_left_out) for file in files)
    # The next one is read while the last tensors of this one are used.
    after = next(opened, None)
    while after is not None:
        file, after = after, next(opened, None)
        with file:
            yield from file.tensors()


class _File:
    """A file that is open, whose tensors are being read."""

    def __init__(self, path: str, how: Reading, is_used: Says, is_left_out: Says | None) -> None:
        self._handle = safe_open(path, "torch", how.device, backend=how.backend)
        names = self._handle.offset_keys()
        self._names = [name for name in names if is_left_out is None or not is_left_out(name)]
        self._ahead = {name for name in self._names if how.read == "ahead" and is_used(name)}
        plan = dict.fromkeys(self._ahead)
        self._loader = self._handle.prefetch(plan, threads=how.threads, ahead=how.ahead)
        self._device = how.device

    def tensors(self) -> Weights:
        for name in self._names:
            yield name, self._loader.take(name) if name in self._ahead else self._unread(name)

    def _unread(self, name: str) -> torch.Tensor:
        dtype = DTYPES.get(self._handle.info(name).dtype)
        # A mapped file is read where it is touched. A tensor that torch counts otherwise than the file, or
        # lacks, is read, or refused, as a whole.
        if self._handle.backend == "mmap" or dtype is None or dtype == DTYPES.get("F4"):
            return self._handle.get_tensor(name)
        return UnreadTensor(self._handle.get_slice(name), dtype, torch.device(self._device))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._loader.close()
        self._handle.close()


def has_place_for(model: torch.nn.Module, name: str, missing: tuple[type, ...]) -> bool:
    """Whether a weight of that name may have a place in `model`; `missing` stand for layers of other ranks.

    It has none where its layer is of another rank, or where a list of layers lacks it. Models call much
    otherwise than checkpoints do, so nothing else is taken for a sign.
    """
    module = model
    for word in name.split("."):
        if isinstance(module, missing):
            return False
        child = dict(module.named_children()).get(word)
        if child is None:
            return not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
        module = child
    return not isinstance(module, missing)


def without_files(folder: str) -> CheckpointError:
    """The refusal of a folder that has no file of tensors."""
    others = in_natural_order([name for name in os.listdir(folder) if name.endswith((".bin", ".pt", ".pth"))])
    found = f"found {', '.join(map(_escaped, others[:3]))}: make files of tensors by `ingot convert`"
    return CheckpointError(
        f"{_escaped(folder)}: expected *.safetensors, {found if others else 'found none'}",
        code="no-weights",
        path=folder,
    )
