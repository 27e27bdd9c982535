"""What a source holds besides the tensors that are converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ingot._base.report import Report

from .refusal import refused

if TYPE_CHECKING:
    from ingot.errors import ConversionError

_LONGEST_VALUE = 80
# Python refuses to write out the longest ints, and takes long for long ones.
_MOST_BITS = 256


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


@dataclass(frozen=True, slots=True, repr=False)
class LeftOut(Report):
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

    name: str
    kind: str
    value: str = ""


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
