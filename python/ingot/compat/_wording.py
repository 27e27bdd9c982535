"""Errors that begin with upstream's words, and are upstream's too.

ingot's own message follows, so nothing is lost. The names in brackets are what safetensors up to 0.5 printed;
programs still look for them.
"""

from __future__ import annotations

from functools import wraps
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

from ingot import errors
from ingot.errors import SafetensorError, StorageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")

_HEADER = {
    "too-short": "header too small [HeaderTooSmall]",
    "header-too-large": "header too large [HeaderTooLarge]",
    # Upstream takes the first bytes of whatever it is for the length of a header.
    "foreign-file": "header too large [HeaderTooLarge]",
    "header-past-end": "invalid header length [InvalidHeaderLength]",
    "invalid-utf8": "invalid UTF-8 in header [InvalidHeader]",
    "invalid-json": "invalid JSON in header [InvalidHeaderDeserialization]",
    "invalid-metadata": "invalid JSON in header [InvalidHeaderDeserialization]",
    "invalid-entry": "invalid JSON in header [InvalidHeaderDeserialization]",
    "missing-field": "invalid JSON in header [InvalidHeaderDeserialization]",
    "unknown-dtype": "invalid JSON in header [InvalidHeaderDeserialization]",
    "duplicate-tensor": "invalid JSON in header [InvalidHeaderDeserialization]",
    "duplicate-metadata-key": "invalid JSON in header [InvalidHeaderDeserialization]",
    "duplicate-field": "invalid JSON in header [InvalidHeaderDeserialization]",
    "size-mismatch": "invalid shape, data type, or offset for tensor [TensorInvalidInfo]",
    "size-overflow": "overflow computing buffer size from shape and/or element type [ValidationOverflow]",
    "partial-byte": "a tensor does not end at a byte boundary [MisalignedSlice]",
    "reversed-range": "invalid offset for tensor {tensor} [InvalidOffset]",
    "hole": "invalid offset for tensor {tensor} [InvalidOffset]",
    "overlap": "invalid offset for tensor {tensor} [InvalidOffset]",
    "truncated": "incomplete metadata, file not fully covered [MetadataIncompleteBuffer]",
    "trailing-bytes": "incomplete metadata, file not fully covered [MetadataIncompleteBuffer]",
}


class StepError(errors.SliceError, ValueError):
    """A step that is zero or negative, which upstream reports as a `ValueError`."""


def reading(doing: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make what a function raises begin with upstream's words. `doing` is how these begin for a header."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except SafetensorError as error:
                begin_as_upstream(error, doing)
                raise

        return call

    return decorate


def begin_as_upstream(error: SafetensorError, doing: str) -> None:
    """Put upstream's words before those of `error`, where upstream has the like of it."""
    words = _beginning(error, doing)
    if words is not None:
        _reword(error, words)


def writing(function: Callable[P, R]) -> Callable[P, R]:
    """Make what a function raises begin with upstream's words, and errors of the system of its class."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except StorageError as error:
            _reword(error, "Error while serializing: I/O error")
            raise
        except OSError as error:
            raise StorageError(
                f"Error while serializing: I/O error: {error}",
                code="write",
                path=error.filename,
                errno=error.errno,
            ) from error
        except errors.SaveError as error:
            if error.code in ("size-mismatch", "partial-byte"):
                _reword(error, f"Error while serializing: {_HEADER['size-mismatch']}")
            raise

    return call


def _beginning(error: SafetensorError, doing: str) -> str | None:
    if isinstance(error, errors.HeaderError):
        words = _HEADER.get(error.code or "", "invalid header [InvalidHeader]")
        return f"{doing}: {words.format(tensor=errors._quoted(error.tensor))}"
    if isinstance(error, errors.TensorNotFoundError):
        return f"File does not contain tensor {errors._escaped(error.tensor or '')}"
    if isinstance(error, errors.ClosedError):
        return "File is closed"
    if isinstance(error, errors.OptionError):
        option = (error.code or "").removeprefix("unknown-")
        quoted = f'"{error.found}"' if option == "backend" else error.found
        return f"{option} {quoted} is invalid"
    return None


def _reword(error: SafetensorError, words: str) -> None:
    error.args = (f"{words}: {error}",)


def join() -> type[Exception]:
    """The class to call `SafetensorError`: upstream's where it is installed, else ingot's.

    Where it is upstream's, all errors of ingot are made instances of it. So a clause that names either class,
    in a library that imported upstream before or after, catches the errors of both.
    """
    upstream = _upstream()
    if upstream is None:
        return SafetensorError
    SafetensorError.__bases__ = (upstream, errors._Error)
    return upstream


def part() -> None:
    """Undo `join`."""
    SafetensorError.__bases__ = (errors._Error,)


def _upstream() -> type[Exception] | None:
    """The class in upstream's extension module, which is loaded without the package around it."""
    package = PathFinder.find_spec("safetensors")
    if package is None or package.submodule_search_locations is None:
        return None
    name = "safetensors._safetensors_rust"
    spec = PathFinder.find_spec(name, package.submodule_search_locations)
    if spec is None or spec.loader is None:
        return None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:
        # Built for another Python or machine. Then nobody else has the class either.
        return None
    found: type[Exception] = module.SafetensorError
    return found
