"""The extension module. Everything in it is used through `ingot`, not by hand."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, final

from typing_extensions import Buffer as AnyBuffer

__all__ = [
    "Archive",
    "Buffer",
    "TensorInfo",
    "Wrap",
    "__version__",
    "hash",
    "hashes",
    "serialize",
    "serialize_file",
    "verify",
]

__version__: str

@final
class Buffer:
    """Memory with tensors in it, for `Wrap.buffer`. Of the buffer protocol, and writable."""

    def __len__(self) -> int: ...

@final
class TensorInfo:
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

@final
class Wrap:
    @staticmethod
    def dlpack(make: Callable[[Any], Any], resolve: Callable[[str], Any]) -> Wrap: ...
    @staticmethod
    def buffer(make: Callable[[Any, Any, Any, Any], Any], resolve: Callable[[str], Any]) -> Wrap: ...

@final
class Archive:
    @staticmethod
    def open(
        path: str | bytes | PathLike[str] | PathLike[bytes],
        backend: str = "auto",
        strict: bool = False,
        max_header_size: int | None = None,
    ) -> Archive: ...
    @staticmethod
    def from_buffer(data: AnyBuffer, strict: bool = False, max_header_size: int | None = None) -> Archive: ...
    @property
    def path(self) -> str | None: ...
    @property
    def format(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: object, /) -> bool: ...
    def names(self) -> list[str]: ...
    def offset_names(self) -> list[str]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def info(self, name: str) -> TensorInfo: ...
    def proven(
        self,
        wrap: Wrap,
        kept: bool,
        expected_sha256: str | None,
        *,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> dict[str, Any]: ...
    def tensors(
        self,
        names: Iterable[str] | None,
        wrap: Wrap,
        *,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> dict[str, Any]: ...
    def tensor(self, name: str, wrap: Wrap) -> Any: ...
    def select(self, name: str, index: Any, wrap: Wrap) -> Any: ...
    def share(self) -> Archive: ...
    def close(self) -> None: ...

def hash(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    definition: str,
    progress: Callable[[int, int], object] | None = None,
) -> str | None: ...
def hashes() -> list[str]: ...
def verify(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    expected_sha256: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, Any]: ...
def serialize(
    tensors: Mapping[str, Any],
    payload: Callable[[str, Any], Any],
    metadata: Mapping[str, str] | None,
    format: str,
    *,
    export: Callable[[Any], Any] | None = None,
    shared: str = "copy",
) -> bytes: ...
def serialize_file(
    path: str | bytes | PathLike[str] | PathLike[bytes],
    tensors: Mapping[str, Any],
    payload: Callable[[str, Any], Any],
    metadata: Mapping[str, str] | None,
    format: str,
    *,
    export: Callable[[Any], Any] | None = None,
    shared: str = "copy",
    durable: bool = True,
    atomic: bool = True,
    force: bool = False,
    checksums: Sequence[str] = ...,
) -> None: ...
