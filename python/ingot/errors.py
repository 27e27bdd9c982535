"""The exceptions of ingot.

Every class is a `SafetensorError`, and also the builtin exception that fits, so that both
``except ingot.SafetensorError`` and ``except KeyError`` catch a missing name::

    SafetensorError             Exception     everything below
    ├── HeaderError             ValueError    the file breaks a rule of its format (FORMAT.md)
    ├── CheckpointError         ValueError    an index breaks a rule, or the shards differ from it
    ├── TensorNotFoundError     KeyError      no tensor of that name
    ├── SliceError              IndexError    an index that does not fit the tensor
    ├── StorageError            OSError       reading or writing failed, or the file changed
    ├── IntegrityError          ValueError    bytes that differ from their digest
    ├── DestinationError        BufferError   a buffer that is too small, read-only or not contiguous
    ├── SaveError               ValueError    tensors that the format cannot hold
    │   └── SharedMemoryError   RuntimeError  tensors that share memory
    ├── DtypeError              TypeError     a dtype or a shape that the framework cannot hold
    ├── ConversionError         ValueError    a file of another format that cannot be converted
    ├── AdapterError            ValueError    an adapter (LoRA) that cannot be merged or converted
    ├── DeviceError             RuntimeError  a GPU that cannot be used
    ├── RankError               RuntimeError  another rank of the job failed, or is gone
    ├── RemapError              ValueError    rules of ingot.remap that do not fit the tensors
    ├── OptionError             ValueError    an argument that is not one of the choices
    └── ClosedError             ValueError    the file was closed

A file that cannot be opened raises the builtin exception of the operating system, such as
`FileNotFoundError`, `PermissionError` or `IsADirectoryError`, with ``errno`` and ``filename``. An argument of
the wrong type raises `TypeError`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
else:
    # For `typing.get_type_hints`: this module imports nothing.
    Any = object

__all__ = [
    "AdapterError",
    "CheckpointError",
    "ClosedError",
    "ConversionError",
    "DestinationError",
    "DeviceError",
    "DtypeError",
    "HeaderError",
    "IntegrityError",
    "OptionError",
    "RankError",
    "RemapError",
    "SafetensorError",
    "SaveError",
    "SharedMemoryError",
    "SliceError",
    "StorageError",
    "TensorNotFoundError",
]


class _Error(Exception):
    """A base by which `ingot.compat` can make `SafetensorError` a subclass of upstream's class.

    Python changes the bases of a class only if the old and the new ones have the same memory layout, and the
    layout of `Exception` differs from all classes that are written in Python.
    """


class SafetensorError(_Error):
    """A fault of a file, or of tensors that are saved.

    Parameters
    ----------
    message : str
        The whole message, as in ``str(error)``. Names from files are escaped in it.
    code : str, optional
        A stable word for the cause, such as ``"hole"`` or ``"unknown-dtype"``. Compare this, not the message.
    path : str or bytes, optional
        The file, as the caller spelled it.
    tensor : str, optional
        The name of the tensor, not escaped.
    expected, found : optional
        The values that the rule requires and that were found.
    begin, end : int, optional
        The range of the bytes, counted from the start of the data section.

    Notes
    -----
    All parameters are attributes. Errors can be pickled with all attributes.
    """

    code: str | None
    path: str | bytes | None
    tensor: str | None
    expected: Any
    found: Any
    begin: int | None
    end: int | None

    def __init__(
        self,
        message: str = "",
        *,
        code: str | None = None,
        path: str | bytes | None = None,
        tensor: str | None = None,
        expected: Any = None,
        found: Any = None,
        begin: int | None = None,
        end: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.path = path
        self.tensor = tensor
        self.expected = expected
        self.found = found
        self.begin = begin
        self.end = end

    # `KeyError` would put quotes round the message, and `OSError` would print only its errno.
    def __str__(self) -> str:
        return Exception.__str__(self)


class HeaderError(SafetensorError, ValueError):
    """The file breaks a rule of its format. ``code`` is the rule's word in FORMAT.md."""


class CheckpointError(SafetensorError, ValueError):
    """The index of a checkpoint breaks a rule of FORMAT.md, or its files differ from it.

    ``code`` names the fault.

    A missing shard raises the builtin `FileNotFoundError` instead, which names the file, and a directory
    without a checkpoint raises `IsADirectoryError`.
    """


class TensorNotFoundError(SafetensorError, KeyError):
    """The file has no tensor of that name. The message has the nearest name in the file."""


class SliceError(SafetensorError, IndexError):
    """The index does not fit the tensor, or files cannot be sliced by an index of its type."""


class StorageError(SafetensorError, OSError):
    """Reading or writing failed, or the file changed while it was open.

    ``errno`` is set if the system reported one.
    """

    filename: Any

    def __init__(self, message: str = "", *, errno: int | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.errno = errno
        self.filename = self.path

    def __reduce__(self) -> tuple[Any, ...]:
        # `OSError` keeps `errno` outside `__dict__`, so pickling does not find it there.
        return _storage_error, (type(self), self.args, self.errno, self.__dict__)


def _storage_error(
    kind: type[StorageError], args: tuple[Any, ...], errno: int | None, fields: dict[str, Any]
) -> StorageError:
    error = kind(*args, errno=errno)
    error.__dict__.update(fields)
    error.filename = error.path
    return error


class IntegrityError(SafetensorError, ValueError):
    """A digest does not match, or the digests in a file's metadata cannot be used.

    ``code`` is ``"digest-mismatch"``, with the two digests as `expected` and `found`, ``"no-digest"``, or
    ``"invalid-checksums"``. If `ingot.verify` raises it, `report` is the `ingot.Verification`.
    """

    report: Any

    def __init__(self, message: str = "", *, report: Any = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.report = report


class DestinationError(SafetensorError, BufferError):
    """A buffer cannot be written to, or read: it is too small, read-only or not contiguous."""


class SaveError(SafetensorError, ValueError):
    """The tensors cannot be stored: a dtype the format lacks, a reserved name, a tensor without values."""


class SharedMemoryError(SaveError, RuntimeError):
    """Some tensors share memory: a file would store it twice, and loading would separate the tensors."""


class DtypeError(SafetensorError, TypeError):
    """The framework lacks the tensor's dtype or cannot hold its shape, or an array to save holds no numbers.

    Other tensors are not affected.
    """


class ConversionError(SafetensorError, ValueError):
    """A file of another format cannot be converted: it is damaged or hostile, or has values without a dtype.

    Nothing has been written.
    """


class AdapterError(SafetensorError, ValueError):
    """An adapter cannot be merged or converted: it is incomplete, of an unknown kind, or of another base.

    Nothing has been written.
    """


class OptionError(SafetensorError, ValueError):
    """An argument is of the right type but not one of the choices. The message lists them."""


class RemapError(SafetensorError, ValueError):
    """Rules of `ingot.remap` do not fit the tensors. The message names the rule and the tensor."""


class RankError(SafetensorError, RuntimeError):
    """Another rank of the job failed, or does not answer.

    ``code`` is ``"rank-failed"``, with the error of that rank in the message, ``"rank-lost"``, or
    ``"ranks-differ"`` if its arguments differ from the others'. `rank` is its number in the process group.
    """

    rank: int | None

    def __init__(self, message: str = "", *, rank: int | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.rank = rank


class DeviceError(SafetensorError, RuntimeError):
    """A GPU cannot be used: no driver, no such device, a call of the driver that fails. `code` says which.

    After a failed operation on the device every later one fails too, and the message says so. If the
    framework cannot allocate memory, its own error is raised, such as `torch.OutOfMemoryError`.
    """


class ClosedError(SafetensorError, ValueError):
    """The file was closed. Tensors and slices that were read before remain valid."""


def __dir__() -> list[str]:
    return __all__
