"""What a source format gives: tensors that are read one at a time, and what it holds besides."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ingot.errors import ConversionError

from .others import LeftOut

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
