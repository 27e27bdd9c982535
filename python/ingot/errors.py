"""What can go wrong, as classes.

Every class is a `SafetensorError`, and also the builtin that a Python user would expect at that place, so
that both ``except ingot.SafetensorError`` and ``except KeyError`` do what they say::

    SafetensorError             Exception     everything below
    ├── HeaderError             ValueError    the file breaks a rule of its format (FORMAT.md)
    ├── CheckpointError         ValueError    an index breaks a rule, or the shards are not what it says
    ├── TensorNotFoundError     KeyError      no tensor of that name
    ├── SliceError              IndexError    an index that does not fit the tensor
    ├── StorageError            OSError       reading or writing failed, or the file changed while it was open
    ├── IntegrityError          ValueError    bytes that are not those that a digest was taken of
    ├── DestinationError        BufferError   a buffer that is too small, read-only or not contiguous
    ├── SaveError               ValueError    tensors that the format cannot hold
    │   └── SharedMemoryError   RuntimeError  tensors that share memory
    ├── DtypeError              TypeError     a dtype or a shape that the framework cannot hold
    ├── ConversionError         ValueError    a file of another format that cannot be converted
    ├── DeviceError             RuntimeError  a GPU that cannot be used
    ├── RankError               RuntimeError  another rank of the job failed, or is gone
    ├── OptionError             ValueError    an argument that is not one of the choices
    └── ClosedError             ValueError    the file was closed

A file that cannot be opened is none of these but the operating system's own error: `FileNotFoundError`,
`PermissionError`, `IsADirectoryError`, with ``errno`` and ``filename``. An argument of the wrong type is a
plain `TypeError`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
else:
    # For `typing.get_type_hints`: this module imports nothing.
    Any = object

__all__ = [
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
    "SafetensorError",
    "SaveError",
    "SharedMemoryError",
    "SliceError",
    "StorageError",
    "TensorNotFoundError",
]


class _Error(Exception):
    """Here so that `ingot.compat` can put upstream's class among the bases of the one below.

    Python exchanges the bases of a class only where they are laid out alike, and `Exception` is laid out
    differently from every class that is written in Python.
    """


class SafetensorError(_Error):
    """Something is wrong with a file or with the tensors for one.

    Parameters
    ----------
    message : str
        The whole sentence, as ``str(error)`` gives it. Names from files are escaped in it.
    code : str, optional
        A stable word for the cause, such as ``"hole"`` or ``"unknown-dtype"``. Compare this, not the message.
    path : str or bytes, optional
        The file, as the caller spelled it.
    tensor : str, optional
        The name of the tensor, not escaped.
    expected, found : optional
        What the rule asks for and what was there.
    begin, end : int, optional
        The bytes in question, counted from the start of the data section.

    Notes
    -----
    All parameters are attributes. Errors survive pickling, so they cross process boundaries whole.
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
    """The index of a checkpoint breaks a rule of FORMAT.md, or its files do not fit; ``code`` says how.

    Shards that are missing are the builtin `FileNotFoundError` instead, which names them, and a directory
    without a checkpoint is `IsADirectoryError`.
    """


class TensorNotFoundError(SafetensorError, KeyError):
    """The file holds no tensor of that name. The message gives the nearest name that it does hold."""


class SliceError(SafetensorError, IndexError):
    """The index does not fit the tensor, or is of a kind that a file cannot be sliced by."""


class StorageError(SafetensorError, OSError):
    """Reading or writing failed, or the file changed while it was open.

    ``errno`` is set where the system gave one.
    """

    filename: Any

    def __init__(self, message: str = "", *, errno: int | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.errno = errno
        self.filename = self.path

    def __reduce__(self) -> tuple[Any, ...]:
        # `OSError` keeps `errno` outside of `__dict__`, where pickling does not look.
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
    """A buffer cannot take the bytes, or cannot give them: too small, read-only, not contiguous."""


class SaveError(SafetensorError, ValueError):
    """The tensors cannot be stored: a dtype the format lacks, a reserved name, a tensor without values."""


class SharedMemoryError(SaveError, RuntimeError):
    """Some tensors share memory, so that a file would hold it twice and loading would part them."""


class DtypeError(SafetensorError, TypeError):
    """The framework lacks the tensor's dtype or cannot hold its shape, or an array to save holds no numbers.

    Other tensors are not affected.
    """


class ConversionError(SafetensorError, ValueError):
    """A file of another format cannot be converted: it is damaged, hostile, or holds what no tensor file can.

    Nothing has been written.
    """


class OptionError(SafetensorError, ValueError):
    """An argument is of the right type but not one of the choices. The message lists them."""


class RankError(SafetensorError, RuntimeError):
    """Another rank of the job failed, and told the others; or it is gone, and they found out.

    ``code`` is ``"rank-failed"``, with what that rank raised in the message, ``"rank-lost"``, or
    ``"ranks-differ"`` where it was given something else than the others. `rank` is its number in the process
    group.
    """

    rank: int | None

    def __init__(self, message: str = "", *, rank: int | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.rank = rank


class DeviceError(SafetensorError, RuntimeError):
    """A GPU cannot be used: no driver, no such device, a call of the driver that fails. `code` says which.

    Where an earlier operation on the device has failed, every later one does, and the message says so. Memory
    that the framework does not give is the framework's own error, such as `torch.OutOfMemoryError`.
    """


class ClosedError(SafetensorError, ValueError):
    """The file was closed. Tensors and slices that were taken from it before remain good."""


def __dir__() -> list[str]:
    return __all__
