"""Errors with the words of upstream's messages that programs search for, and of upstream's classes too.

ingot's own message follows them. If programs compare upstream's message as a whole, ingot's is a note of the
error instead, which tracebacks show. The names in brackets are from safetensors up to 0.5; programs still
search for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from errno import ENOENT
from functools import wraps
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from operator import index as integer
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ingot import errors
from ingot._base import text
from ingot._native import is_url
from ingot.errors import SafetensorError, StorageError

if TYPE_CHECKING:
    P = ParamSpec("P")
    R = TypeVar("R")

# Upstream's messages for an invalid index: torch's for torch, else its slicer's.


SUBBYTES = (
    "The slice is slicing for subbytes dtypes, and the slice does not end up at a byte boundary, "
    "this is invalid."
)


def refusal_of_torch(shape: Sequence[int], key: Any) -> Exception | None:
    """Return the error that torch raises for `tensor[key]`, or None if it accepts the index."""
    import torch

    # A tensor of this shape over one byte of memory.
    stand_in = torch.zeros((), dtype=torch.uint8).expand(tuple(shape))
    try:
        stand_in[key]
    except (IndexError, TypeError, ValueError) as error:
        return error
    return None


def words_of_slicer(shape: Sequence[int], key: Any) -> str | None:
    """Return the message of upstream's slicer; None if it accepts the index, or fails by accident.

    It rejects lists, None, masks and bounds past the end. If it raises `OverflowError` or `SystemError`, or
    the tensor has no elements, the result is NumPy's.
    """
    if isinstance(key, list) and not key:
        key = slice(0, 0)
    parts = [*key] if isinstance(key, tuple) else [key]
    if sum(part is ... for part in parts) > 1:
        return "Only one ellipsis (...) is allowed in slice index"
    whole = max(len(shape) - len(parts) + 1, 0)
    normal: list[int | slice] = []
    for part in parts:
        if part is ...:
            normal += [slice(None)] * whole
        elif isinstance(part, slice):
            bounds = [bound for bound in (part.start, part.stop, part.step) if bound is not None]
            if any(_number(bound) is None for bound in bounds):
                return None
            if part.step is not None and part.step <= 0:
                return f"Slice step must be a positive integer, got {part.step}"
            normal.append(part)
        else:
            number, axis = _number(part), len(normal)
            size = shape[axis] if axis < len(shape) else 0
            if number is None:
                return "Unsupported slice index: expected slice, int, or ellipsis"
            if number + size < 0:
                return f"Invalid index {number} for dimension {axis} of size {size}"
            normal.append(number if number >= 0 else number + size)
    if len(normal) > len(shape):
        return during_slicing(shape, normal, "more slicing indexes than dimensions in tensor")
    beyond = [_beyond(*one) for one in zip(normal, shape, strict=False)]
    what = next((f"index {one} out of bounds" for one in beyond if one is not None), None)
    return None if what is None else during_slicing(shape, normal, what)


def _number(part: Any) -> int | None:
    try:
        number = integer(part)
    except TypeError:
        return None
    return number if -(2**63) <= number < 2**63 else None


def _beyond(part: int | slice, size: int) -> int | None:
    """Return the position past the end that the message names, or None."""
    if isinstance(part, int):
        return part if part >= size else None
    bounds = (part.start, None if part.stop is None else part.stop - 1)
    return next((int(bound) for bound in bounds if size and bound is not None and bound >= size), None)


def during_slicing(shape: Sequence[int], parts: Any, what: str) -> str:
    """Return the message for an index that does not fit the shape."""
    return f"Error during slicing {parts} with shape {[*shape]}: {what}"


_JSON_CODES = (
    *("invalid-json", "invalid-metadata", "invalid-entry", "missing-field", "unknown-dtype"),
    *("duplicate-tensor", "duplicate-metadata-key", "duplicate-field"),
)
_HEADER = {
    "too-short": "header too small [HeaderTooSmall]",
    "header-too-large": "header too large [HeaderTooLarge]",
    # Upstream reads the first bytes of any file as the length of a header.
    "foreign-file": "header too large [HeaderTooLarge]",
    "header-past-end": "invalid header length [InvalidHeaderLength]",
    "invalid-utf8": "invalid UTF-8 in header [InvalidHeader]",
    **dict.fromkeys(_JSON_CODES, "invalid JSON in header [InvalidHeaderDeserialization]"),
    "size-mismatch": "invalid shape, data type, or offset for tensor [TensorInvalidInfo]",
    "size-overflow": "overflow computing buffer size from shape and/or element type [ValidationOverflow]",
    "partial-byte": f"{SUBBYTES} [MisalignedSlice]",
    **dict.fromkeys(
        ("reversed-range", "hole", "overlap"), "invalid offset for tensor {tensor} [InvalidOffset]"
    ),
    "truncated": "incomplete metadata, file not fully covered [MetadataIncompleteBuffer]",
    "trailing-bytes": "incomplete metadata, file not fully covered [MetadataIncompleteBuffer]",
}


class StepError(errors.SliceError, ValueError):
    """An index, such as one with a step of zero, for which torch has a `ValueError`."""


class NoValuesError(errors.SaveError, NotImplementedError):
    """A meta tensor, for which torch has a `NotImplementedError`."""


class NoDtypeError(errors.SaveError, KeyError):
    """A dtype that the format lacks, which upstream looks up in a dict."""


class _Unopened(FileNotFoundError):
    """A file that cannot be opened, which is a `FileNotFoundError` upstream for every reason."""

    def __str__(self) -> str:
        words = f"No such file or directory: {os.fsdecode(self.filename)}"
        # Programs compare it for missing files.
        return words if self.errno == ENOENT else f"{words}: {super().__str__()}"


class _NoFolder(_Unopened, NotADirectoryError):
    """A part of its path is not a folder."""


class _NotPermitted(_Unopened, PermissionError):
    """Reading it is not permitted."""


def unopened(error: OSError) -> OSError:
    """Return upstream's error in place of `error`.

    Errors of a folder are not changed: upstream opens one, and fails later. Neither are errors of a URL and
    of a checkpoint of many files, which upstream does not support.
    """
    if error.filename is None or isinstance(error, (SafetensorError, IsADirectoryError, _Unopened)):
        return error
    if (
        error.errno is None
        or error.strerror != os.strerror(error.errno)
        or is_url(os.fsdecode(error.filename))
    ):
        return error
    kinds = {NotADirectoryError: _NoFolder, PermissionError: _NotPermitted}
    kind = kinds.get(type(error), _Unopened)
    return kind(error.errno, error.strerror, error.filename)


def reading(doing: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make the errors of a function begin with upstream's words. `doing` begins the words for a header."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except SafetensorError as error:
                begin_as_upstream(error, doing)
                raise
            except OSError as error:
                other = unopened(error)
                if other is error:
                    raise
                cause = error
            raise other from cause

        return call

    return decorate


def begin_as_upstream(error: SafetensorError, doing: str) -> None:
    """Put upstream's words before the message of `error`, if upstream has such an error."""
    words = _beginning(error, doing)
    if words is not None:
        reword(error, words)


def writing(function: Callable[P, R]) -> Callable[P, R]:
    """Make the errors of a function begin with upstream's words, and system errors its class."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except StorageError as error:
            reword(error, f"Error while serializing: I/O error{_of_system(error)}")
            raise
        except OSError as error:
            raise StorageError(
                f"Error while serializing: I/O error{_of_system(error)}: {error}",
                code="write",
                path=error.filename,
                errno=error.errno,
            ) from error
        except errors.SaveError as error:
            if error.code in ("size-mismatch", "size-overflow", "partial-byte"):
                reword(error, f"Error while serializing: {_HEADER[error.code]}")
            raise

    return call


def _beginning(error: SafetensorError, doing: str) -> str | None:
    if isinstance(error, errors.HeaderError):
        words = _HEADER.get(error.code or "", "invalid header [InvalidHeader]")
        if error.code == "foreign-file" and "(header passes the end" in str(error):
            words = _HEADER["header-past-end"]
        elif error.code == "foreign-file" and "(invalid JSON" in str(error):
            # Zeros only: a header of no bytes.
            words = _HEADER["invalid-json"]
        return f"{doing}: {words.format(tensor=text._quoted(error.tensor))}"
    if isinstance(error, errors.TensorNotFoundError):
        return f"File does not contain tensor {text._escaped(error.tensor or '')}"
    if isinstance(error, errors.ClosedError):
        return "File is closed"
    if isinstance(error, errors.OptionError) and (error.code or "").startswith("unknown-"):
        option = (error.code or "").removeprefix("unknown-")
        if option == "backend":
            return f'backend "{error.found}" is invalid (expected one of: "mmap", "pread")'
        return f"{option} {error.found} is invalid"
    return None


def _of_system(error: OSError) -> str:
    return "" if error.errno is None else f": {os.strerror(error.errno)} (os error {error.errno})"


def reword(error: Exception, words: str) -> None:
    """Put `words` before the message."""
    error.args = (f"{words}: {error}",)


def restate(error: Exception, words: str) -> None:
    """Replace the message by `words`, and keep it as a note."""
    error.add_note(str(error))
    error.args = (words,)


def join() -> type[Exception]:
    """Return the class to call `SafetensorError`: upstream's if it is installed, else ingot's.

    If it is upstream's, all errors of ingot become instances of it. So a clause that names either class, in a
    library that imported upstream before or after, catches the errors of both.
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
    """Return the class in upstream's extension module, which is loaded without its package."""
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
        # Built for another Python or machine. Then no library has the class either.
        return None
    found: type[Exception] = module.SafetensorError
    return found
