"""What a source format gives: tensors that are read one at a time, and what it holds besides."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ingot.errors import ConversionError

if TYPE_CHECKING:
    from ingot.numpy import Array

    from .limits import Budget
    from .positions import Region


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a source, which has not been read yet."""

    name: str
    code: str
    """Of the header, as in FORMAT.md."""
    shape: tuple[int, ...]
    read: Callable[[], Array]
    """Gives the values, in any layout. May be called more than once."""
    memory: Hashable = None
    """Equal for tensors that are one and the same. None where the format has no such thing."""
    region: Region | None = None
    """Where its bytes stand just as a file of tensors has them, if they do: little-endian, in C order."""
    fault: ConversionError | None = None
    """Why it cannot be converted, if it cannot. It may still be left out."""
    stored: tuple[str, int] | None = None
    """The source's word for its dtype, and the bytes of its values, where FORMAT.md has no such dtype."""
    file: str | None = None
    """The path of the file that holds it, where the source is several."""


# What is wrong with one tensor and not with the file.
_OF_ONE_TENSOR = ("unsupported-dtype", "quantized")

Made = TypeVar("Made", bound="Entry | None")


def possible(make: Callable[..., Made], *arguments: Any) -> Made | Entry:
    """What `make` gives, or an entry with the fault for which it gives nothing."""
    try:
        return make(*arguments)
    except ConversionError as error:
        if error.code not in _OF_ONE_TENSOR or error.tensor is None:
            raise
        return Entry(error.tensor, "", (), _never, fault=error)


def _never() -> Any:
    raise AssertionError("an entry with a fault is not read")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something in the source that is no tensor, and that the new file does not have.

    Attributes
    ----------
    name : str
        Where it stands, named as a tensor there would be.
    kind : str
        What it is, such as ``"int"``.
    value : str
        What it says, cut where it is long; empty for what has no short form.
    """

    __module__ = "ingot"

    name: str
    kind: str
    value: str = ""


@dataclass(frozen=True, slots=True)
class Contents:
    """All that one source holds."""

    entries: Sequence[Entry]
    left_out: Sequence[LeftOut] = ()
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller decided about reading."""

    dequantize: bool
    budget: Budget
    """Of all that is made of the source."""
    values: bool = True
    """Whether they are wanted. Otherwise no entry is read, and the source may be opened without them."""


_LONGEST_VALUE = 80
# Python refuses to write out the longest ints, and takes long for long ones.
_MOST_BITS = 256


def left_out(name: str, value: Any) -> LeftOut:
    """The note of a value that is no tensor."""
    kind = type(value).__name__
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return LeftOut(name, kind, f"{value.bit_length()} bits")
    if isinstance(value, (str, int, float, complex, bool, bytes)):
        text = repr(value[:_LONGEST_VALUE] if isinstance(value, (str, bytes)) else value)
        return LeftOut(name, kind, text[:_LONGEST_VALUE])
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return LeftOut(name, kind, f"{len(value)} items")
    return LeftOut(name, kind)
