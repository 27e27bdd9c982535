"""Upstream's `safe_open`."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Self, Unpack

import ingot
from ingot._base.checks import checked_backend
from ingot._base.frameworks import adapter, module_of
from ingot._base.options import Loading, takes
from ingot._base.text import _quoted
from ingot._native import Checkpoint, local_path
from ingot._read import door, handle, load, loader, moves
from ingot.errors import OptionError, SafetensorError, SliceError

from . import _wording
from ._tensor_spec import not_an_instance, number
from ._wording import StepError, begin_as_upstream, reading, restate

if TYPE_CHECKING:
    from ingot._base.frameworks import Adapter
    from ingot._native import TensorInfo
    from ingot.typing import Keys, NoOptions, Path


def refuse_bad_plan(checkpoint: Checkpoint, plan: dict[str, slice | None] | None) -> None:
    """Raise an error of upstream's class for `plan`, before `ingot.safe_open.prefetch` checks it."""
    if plan is None:
        return
    if not isinstance(plan, dict):
        raise TypeError(not_an_instance(plan, "dict"))
    if not plan:
        raise SafetensorError("prefetch plan selects no tensors", code="invalid-plan")
    try:
        loader.planned(checkpoint, plan, None, None)
    except TypeError as error:
        raise SafetensorError(str(error), code="invalid-plan") from None


_OPENING = "Error while deserializing header"
_opening = reading(_OPENING)


class Unsaid(str):
    """Upstream's default for a parameter, which ingot replaces by its own default.

    On a local file system this is a mapping too. Files of a network file system are read (`ingot.safe_open`).
    """

    __slots__ = ()


MMAP = Unsaid("mmap")


def chosen(backend: Any) -> Any:
    """Return the backend for ingot, which checks its name."""
    if backend is not ... and not isinstance(backend, str):
        raise TypeError(not_an_instance(backend, "str"))
    return "auto" if backend is ... or backend is MMAP else backend


def path_only(filename: Any) -> Any:
    """Return `filename`, which upstream requires to be a path."""
    return filename if isinstance(filename, str) else local_path(filename)


def mover(framework: str, device: Any) -> moves.Move | None:
    """Return the function that moves a tensor to `device`, and narrows 64 bits if the framework does.

    Upstream leaves that to the framework, and programs rely on it. ingot's own modules keep all bits, or
    raise.
    """
    module = adapter(framework)
    try:
        move: moves.Move | None = getattr(module, "narrowing", module.mover)(device)
    except OptionError as error:
        error.found = device if isinstance(device, str) else repr(device)
        raise
    except (TypeError, ValueError, RuntimeError, ModuleNotFoundError) as error:
        # torch raises these for numbers, lists and the names of backends that are not compiled in.
        raise OptionError(
            f"{framework} does not accept it: {error}", code="unknown-device", found=device
        ) from error
    return move


class _Lent:
    """The adapter of a framework, imported for the first tensor: a file can be listed without the framework.

    Python calls `__getattr__`, which imports it, only while the slot is empty. So later uses cost nothing.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        _adapter: Adapter
        _move: moves.Move | moves.Placement | None

    def _lender(self) -> tuple[str, Any]:
        """Return the framework and the device."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name not in ("_adapter", "_move"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        framework, device = self._lender()
        try:
            # Slots of the other base, which mypy does not find.
            self._move = mover(framework, device)  # type: ignore[misc]
            self._adapter = adapter(framework)  # type: ignore[misc]
        except ModuleNotFoundError as error:
            if "which is not installed" in str(error):
                words = f"No module named {error.name!r}: {error}"
                raise ModuleNotFoundError(words, name=error.name) from error.__cause__
            raise
        return getattr(self, name)


@dataclass(frozen=True, slots=True, repr=False)
class TensorMeta:
    """A tensor's entry in the header."""

    dtype: str
    """The code in the header, such as ``"F32"``."""
    shape: list[int]
    """The shape in the header."""
    data_offsets: tuple[int, int]
    """The first byte and the one after the last, counted from the start of the data section."""

    def __repr__(self) -> str:
        place = f"shape: {self.shape}, data_offsets: {self.data_offsets}"
        return f'TensorMeta {{ dtype: "{self.dtype}", {place} }}'


class PySafeSlice(_Lent, handle.TensorSlice[Any]):
    """A tensor of an open file that can be read in part."""

    __slots__ = ("_arguments",)

    def __init__(
        self,
        checkpoint: Checkpoint,
        info: TensorInfo,
        framework: str,
        device: Any,
        again: Callable[[], handle.Again | None],
    ) -> None:
        self._checkpoint = checkpoint
        self._info = info
        self._arguments = (framework, device)
        self._again = again

    def _lender(self) -> tuple[str, Any]:
        return self._arguments

    @_opening
    def __getitem__(self, key: Any) -> Any:
        """Read the part that `key` selects."""
        if module_of(self._arguments[0]) == "numpy":
            words = _wording.words_of_slicer(self._info.shape, key)
            if words is not None:
                raise self._refusal(words)
        try:
            return super().__getitem__(key)
        except (SliceError, TypeError) as error:
            refusal = self._as_upstream(error, key)
        raise refusal

    def _refusal(self, words: str) -> SliceError:
        path, name = self._checkpoint.path, self._info.name
        error = SliceError(words, code="index", path=path, tensor=name)
        error.add_note(f"{path}: tensor {_quoted(name)}: `ingot.safe_open` supports NumPy's indices")
        return error

    def _as_upstream(self, error: Exception, key: Any) -> Exception:
        """Return `error` with upstream's message and class, if upstream refuses `key`."""
        by_torch = module_of(self._arguments[0]) == "torch"
        theirs = _wording.refusal_of_torch(self._info.shape, key) if by_torch else None
        if isinstance(error, SliceError):
            words = str(theirs) if theirs is not None else None if by_torch else self._words(error, key)
            if isinstance(theirs, ValueError) or error.code in ("negative-step", "zero-step"):
                error = StepError(str(error), code=error.code, path=error.path, tensor=error.tensor)
        else:
            words = str(theirs) if isinstance(theirs, TypeError) else None
        if words is not None:
            restate(error, words)
        return error

    def _words(self, error: SliceError, key: Any) -> str | None:
        if error.code == "partial-byte":
            return _wording.during_slicing(self._info.shape, [key], _wording.SUBBYTES)
        return _wording.words_of_slicer(self._info.shape, key)


class safe_open(_Lent, ingot.safe_open[Any]):
    """Open a file and read tensors from it one by one.

    As `ingot.safe_open`, with upstream's parameters and the beginnings of upstream's messages.
    """

    __slots__ = ()

    @_opening
    def __init__(self, filename: Path, framework: str, device: Any = ..., *, backend: Any = ...) -> None:
        backend = chosen(backend)
        self._lend(framework, _device(device), backend)
        self._checkpoint = door.open_checkpoint(path_only(filename), Loading(checked_backend(backend)))
        self._given = filename

    def _lend(self, framework: Any, device: Any, backend: Any) -> None:
        module_of(framework)
        self._arguments = (framework, device, {"backend": backend})
        if device not in HERE:
            # An unknown device raises before the file is opened.
            self._move  # noqa: B018

    def _lender(self) -> tuple[str, Any]:
        return self._arguments[:2]

    def _again(self) -> handle.Again | None:
        framework, device, options = self._arguments
        return _reopened, (door.again_by(self._given, self.path), framework, device, options["backend"])

    def __enter__(self) -> Self:
        # Upstream allows a closed file to be entered, and raises for later calls.
        return self

    @_opening
    def keys(self) -> list[str]:  # type: ignore[override]
        """Return the names of all tensors in sorted order."""
        return super().keys()

    @_opening
    def offset_keys(self) -> list[str]:
        """Return the names of all tensors in the order of their data."""
        return super().offset_keys()

    @_opening
    def metadata(self) -> dict[str, str] | None:
        """Return the text stored beside the tensors, or None if the file has no metadata."""
        return super().metadata()

    def get_tensor(self, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read one tensor."""
        # Inlined: programs call this a hundred thousand times, and each Python call costs time.
        try:
            if self._move is None:
                tensor = self._checkpoint.tensor(name, self._adapter.wrap)
            else:
                tensor = load.tensor(self._checkpoint, name, self._adapter.wrap, self._move)
        except SafetensorError as error:
            begin_as_upstream(error, _OPENING)
            raise
        return tensor

    @takes()
    @_opening
    def get_tensors(
        self, keys: Keys | None = None, *, drop: Keys | None = None, **options: Unpack[NoOptions]
    ) -> dict[str, Any]:
        """Read all tensors, or those that `keys` and `drop` select."""
        return super().get_tensors(keys, drop=drop, **options)

    @_opening
    def get_slice(self, name: str) -> PySafeSlice:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Prepare to read a part of a tensor."""
        checkpoint = self._checkpoint.share()
        return PySafeSlice(checkpoint, checkpoint.info(name), *self._lender(), self._again)

    @_opening
    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Return a tensor's dtype, shape and offsets without reading its data."""
        info = self.info(name)
        return TensorMeta(info.dtype, list(info.shape), (info.begin, info.end))

    @_opening
    def prefetch(  # type: ignore[override]
        self, plan: dict[str, slice | None] | None = None, *, device: Any = None, threads: int = 8
    ) -> loader.PrefetchLoader[Any]:
        """Start reading tensors in the background.

        Parameters
        ----------
        plan : dict of str to slice or None, optional
            The tensors to read: whole, or the rows that a slice of step 1 selects. All of them by default.
        device : optional
            The device of the tensors, which may be the CPU. By default the device of the handle.
        threads : int
            The number of threads that read. 0 is treated as 1.
        """
        threads = number(threads)
        refuse_bad_plan(self._checkpoint, plan)
        if device is not None:
            self._mover(device)
        return super().prefetch(plan, device=device, threads=max(threads, 1))

    def _mover(self, device: Any) -> moves.Move | None:
        return mover(self._arguments[0], device)


class _safe_open_handle(safe_open):
    """Open a file object like `safe_open`.

    It reads the open file, even if the file's name now belongs to another file.
    """

    __slots__ = ()

    @_opening
    def __init__(self, f: IO[bytes], framework: str, device: Any = ..., *, backend: Any = ...) -> None:
        checked_backend(chosen(backend))
        self._lend(framework, _device(device), "auto")
        self._checkpoint = Checkpoint.from_buffer(_mapped(f.fileno()))

    def _again(self) -> None:
        return None


def _mapped(fd: int) -> mmap.mmap | bytes:
    # An empty file cannot be mapped. The parser raises for it.
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if os.fstat(fd).st_size else b""


# Devices that need no move in any framework.
HERE = ("cpu", None)


def _device(device: Any) -> Any:
    return "cpu" if device is ... else device


def _reopened(path: Path, framework: str, device: Any, backend: str) -> safe_open:
    return safe_open(path, framework, device, backend=backend)
