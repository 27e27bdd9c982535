"""`safe_open` as upstream has it."""

from __future__ import annotations

import mmap
import os

import ingot
from ingot import _open
from ingot._frameworks import adapter
from ingot._native import Archive
from ingot._serialize import one_of
from ingot.errors import SafetensorError, SliceError

from ._prefetch import PrefetchLoader
from ._wording import StepError, begin_as_upstream, reading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import IO, Any, Self

    from ingot._frameworks import Adapter
    from ingot._serialize import Path

_OPENING = "Error while deserializing header"
_opening = reading(_OPENING)


class Unsaid(str):
    """A default that looks like upstream's, for parameters where ingot's own choice is the better one.

    On a local file system that is a mapping too. A network file system is read instead (`ingot.safe_open`).
    """

    __slots__ = ()


MMAP = Unsaid("mmap")


def chosen(backend: Any) -> Any:
    """The backend for ingot, which says which there are."""
    return "auto" if backend is ... or backend is MMAP else backend


def mover(module: Adapter, device: Any) -> Callable[[Any], Any] | None:
    """What takes a tensor to `device`, which narrows 64 bits where the framework does so of itself.

    Upstream leaves that to the framework, and programs count on it. ingot's own modules keep all bits, or
    refuse.
    """
    move: Callable[[Any], Any] | None = getattr(module, "narrowing", module.mover)(device)
    return move


class TensorMeta:
    """A tensor's entry in the header."""

    __slots__ = ("_data_offsets", "_dtype", "_shape")

    def __init__(self, dtype: str, shape: list[int], data_offsets: tuple[int, int]) -> None:
        self._dtype = dtype
        self._shape = shape
        self._data_offsets = data_offsets

    @property
    def dtype(self) -> str:
        """The code in the header, such as ``"F32"``."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """The shape in the header."""
        return list(self._shape)

    @property
    def data_offsets(self) -> tuple[int, int]:
        """The first byte and the one after the last, counted from the start of the data section."""
        return self._data_offsets

    def __repr__(self) -> str:
        place = f"shape: {self.shape}, data_offsets: {self.data_offsets}"
        return f'TensorMeta {{ dtype: "{self.dtype}", {place} }}'


class PySafeSlice(_open.TensorSlice):
    """A tensor of an open file, to be read in part."""

    __slots__ = ()

    @_opening
    def __getitem__(self, key: Any) -> Any:
        """Read the part that `key` selects."""
        try:
            return super().__getitem__(key)
        except SliceError as error:
            if error.code in ("negative-step", "zero-step"):
                raise StepError(
                    f"step must be greater than zero: {error}",
                    code=error.code,
                    path=error.path,
                    tensor=error.tensor,
                ) from None
            raise


class safe_open(ingot.safe_open):
    """Open a file and read tensors from it one by one.

    What `ingot.safe_open` is, with upstream's parameters and the beginnings of upstream's messages.
    """

    __slots__ = ()

    @_opening
    def __init__(self, filename: Path, framework: str, device: Any = ..., *, backend: Any = ...) -> None:
        super().__init__(filename, framework, _device(device), backend=chosen(backend))
        self._move = mover(self._adapter, _device(device))

    def _again(self) -> _open.Again | None:
        framework, device, backend, *_ = self._arguments
        return _reopened, (self._url or self.path, framework, device, backend)

    def __enter__(self) -> Self:
        # Upstream lets a closed file be entered, and refuses what is asked of it then.
        return self

    @_opening
    def keys(self) -> list[str]:
        """Give the names of all tensors, sorted."""
        return super().keys()

    @_opening
    def offset_keys(self) -> list[str]:
        """Give the names of all tensors in the order of their data."""
        return super().offset_keys()

    @_opening
    def metadata(self) -> dict[str, str] | None:
        """Give the text that is stored beside the tensors, None where there is none."""
        return super().metadata()

    def get_tensor(self, name: str) -> Any:
        """Read one tensor."""
        # Written out: programs call this a hundred thousand times, and each call of Python counts.
        try:
            tensor = self._archive.tensor(name, self._adapter.wrap)
            if self._move is not None:
                tensor = _open.moved(self._archive, name, tensor, self._move)
        except SafetensorError as error:
            begin_as_upstream(error, _OPENING)
            raise
        return tensor

    @_opening
    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Read all tensors, or those of these names."""
        return super().get_tensors(names)

    @_opening
    def get_slice(self, name: str) -> PySafeSlice:
        """Prepare to read a part of a tensor."""
        archive = self._archive.share()
        return PySafeSlice(archive, archive.info(name), self._adapter, self._move, self._again())

    @_opening
    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Say what a tensor is without reading it."""
        info = self.info(name)
        return TensorMeta(info.dtype, list(info.shape), (info.begin, info.end))

    @_opening
    def prefetch(
        self, plan: dict[str, slice | None] | None = None, *, device: Any = None, threads: int = 8
    ) -> PrefetchLoader:
        """Start to read tensors in the background.

        Parameters
        ----------
        plan : dict of str to slice or None, optional
            The tensors to read: whole, or the rows that a slice of step 1 selects. All of them by default.
        device : optional
            Where the tensors shall be, also the CPU. That of the handle by default.
        threads : int
            How many threads read.
        """
        move = self._move if device is None else mover(self._adapter, device)
        return PrefetchLoader(self._archive.share(), self._adapter.wrap, move, plan, threads)


class _safe_open_handle(safe_open):
    """As `safe_open`, for a file object: the file that it has open, whatever its name stands for by now."""

    __slots__ = ()

    @_opening
    def __init__(self, f: IO[bytes], framework: str, device: Any = ..., *, backend: Any = ...) -> None:
        one_of("backend", chosen(backend), _open.BACKENDS)
        self._adapter = adapter(framework)
        self._move = mover(self._adapter, _device(device))
        self._archive = Archive.from_buffer(_mapped(f.fileno()))
        self._url = None
        self._arguments = (framework, _device(device), "auto", False, None, False, None)

    def _again(self) -> None:
        return None


def _mapped(fd: int) -> mmap.mmap | bytes:
    # An empty file cannot be mapped. It is no tensor file either, which the parser shall say.
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if os.fstat(fd).st_size else b""


def _device(device: Any) -> Any:
    return "cpu" if device is ... else device


def _reopened(path: Path, framework: str, device: Any, backend: str) -> safe_open:
    return safe_open(path, framework, device, backend=backend)
