"""What a source format gives: tensors that are read one at a time, and what it holds besides."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ingot.errors import ConversionError

from .refusal import refused

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
    fault: ConversionError | ModuleNotFoundError | None = None
    """Why it cannot be converted, if it cannot. It may still be left out."""
    stored: tuple[str, int] | None = None
    """The source's word for its dtype, and the bytes of its values, where FORMAT.md has no such dtype."""
    file: str | None = None
    """The path of the file that holds it, where the source is several."""


Made = TypeVar("Made", bound="Entry | LeftOut | None")


def possible(name: str, make: Callable[..., Made], *arguments: Any) -> Made | Entry:
    """Return the entry `name` that `make` returns, or one with the fault that it raises.

    A fault is raised only if the entry is chosen. Limits apply to the whole source and are raised at once.
    """
    try:
        return make(*arguments)
    except ConversionError as error:
        if error.code == "too-large":
            raise
        return faulty(name, error)
    except ModuleNotFoundError as error:
        return faulty(name, error)


def faulty(name: str, fault: ConversionError | ModuleNotFoundError) -> Entry:
    """Return an entry that cannot be converted."""
    return Entry(name, "", (), _never, fault=fault)


def _never() -> Any:
    raise AssertionError("an entry with a fault is not read")


class Unusable:
    """A value that cannot be converted, with the reason."""

    def __init__(self, reason: str, code: str, found: object = None) -> None:
        self.reason, self.code, self.found = reason, code, found

    def fault(self, path: str, name: str) -> ConversionError:
        """Return the error for the entry `name` that holds this value."""
        return refused(path, self.reason, code=self.code, tensor=name, found=self.found)


class Plain:
    """A value that is no tensor and has no Python object here."""

    __slots__ = ("kind", "text")

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text


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
    source_format: str | None = None
    """The format that the caller named."""
    beside: str | None = None
    """The folder of the new file, which has room for temporary ones."""


_LONGEST_VALUE = 80
# Python refuses to write out the longest ints, and takes long for long ones.
_MOST_BITS = 256


def left_out(name: str, value: Any) -> LeftOut:
    """The note of a value that is no tensor."""
    if isinstance(value, Plain):
        return LeftOut(name, value.kind, value.text[:_LONGEST_VALUE])
    kind = type(value).__name__
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return LeftOut(name, kind, f"{value.bit_length()} bits")
    if isinstance(value, (str, int, float, complex, bool, bytes)):
        text = repr(value[:_LONGEST_VALUE] if isinstance(value, (str, bytes)) else value)
        return LeftOut(name, kind, text[:_LONGEST_VALUE])
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return LeftOut(name, kind, f"{len(value)} items")
    return LeftOut(name, kind)
