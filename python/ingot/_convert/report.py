"""The report of a conversion, and values of a source that are not tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ingot._base.report import Report
from ingot._base.text import _quoted

from .limits import refused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ingot.errors import ConversionError


_LONGEST_VALUE = 80
# Python refuses to format the longest ints, and takes long for long ones.
_MOST_BITS = 256


class Unusable:
    """A value that cannot be converted, with the reason."""

    def __init__(self, reason: str, code: str, found: object = None) -> None:
        self.reason, self.code, self.found = reason, code, found

    def fault(self, path: str, name: str) -> ConversionError:
        """Return the error for the entry `name` that holds this value."""
        return refused(path, self.reason, self.code, name, found=self.found)


class Plain:
    """A value that is not a tensor and has no Python object here."""

    __slots__ = ("kind", "text")

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text


class Placeholder(Plain):
    """An object of an unknown class, or the class itself: a name and the values that were given to it.

    The class is never imported, called or built.
    """

    __slots__ = ("held",)

    def __init__(self, name: str, held: Iterable[object] | None = None) -> None:
        super().__init__("class" if held is None else "object", name)
        self.held = [*(held or ())]

    def __setitem__(self, key: object, value: object) -> None:
        self.held += (key, value)

    def append(self, value: object) -> None:
        """Keep a value that the pickle adds."""
        self.held.append(value)

    extend = add = update = build = append

    def fault(self, path: str, name: str) -> ConversionError:
        """Return the error for an object that contains tensors."""
        reason = f"the pickle in it refers to more than tensors, and is not run: {_quoted(self.text)}"
        return refused(path, f"{reason} — drop=[…] leaves it out", "unsafe-pickle", name, found=self.text)


@dataclass(frozen=True, slots=True, repr=False)
class LeftOut(Report):
    """A value in the source that is not a tensor. The new file does not have it.

    Attributes
    ----------
    name : str
        Its path in the source, in the form of a tensor name.
    kind : str
        Its type, such as ``"int"``.
    value : str
        The value as text, truncated if it is long; empty if it has no short form.
    """

    name: str
    kind: str
    value: str = ""


def left_out(name: str, value: Any) -> LeftOut:
    """Return the note of a value that is not a tensor."""
    kind, text = type(value).__name__, ""
    if isinstance(value, Plain):
        kind, text = value.kind, value.text
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        text = f"{value.bit_length()} bits"
    elif isinstance(value, (str, bytes)):
        text = repr(value[:_LONGEST_VALUE])
    elif isinstance(value, (int, float, complex)):
        text = repr(value)
    elif isinstance(value, (list, tuple, dict, set, frozenset)):
        text = f"{len(value)} items"
    return LeftOut(name, kind, text[:_LONGEST_VALUE])


@dataclass(frozen=True, slots=True, repr=False)
class Conversion(Report):
    """The result of `ingot.convert`.

    Attributes
    ----------
    source, destination : str
        The source, and the destination.
    source_format, format : str
        The formats of both: one of ``"safetensors"``, ``"torch"``, ``"npz"``, ….
    files : tuple of str
        The files that were written, including an index.
    tensors : int
        The number of tensors in the new file.
    nbytes : int
        Bytes of their values.
    shared : dict of str to str
        The stored tensor of each alias. The aliases are recorded in the metadata, as by ``save_file(...,
        shared="alias")``.
    cast : tuple of str
        Tensors that have another dtype now.
    left_out : tuple of LeftOut
        Values that are not tensors, each with ``name``, ``kind`` and ``value``.
    dropped : tuple of str
        Tensors that `keys`, `drop` or `root` left out.
    verified : bool
        Whether every tensor was read back and compared.
    prefix : str
        The prefix that programs put before all names of the new file, such as ``module.``, or an empty str.
        `strip_prefix` removes it.

    Examples
    --------
    >>> numpy.savez("weights.npz", wte=numpy.zeros((8, 4), "float32"))
    >>> report = ingot.convert("weights.npz", "weights.safetensors")
    >>> report.source_format, report.tensors, report.nbytes, report.left_out
    ('npz', 1, 128, ())
    """

    source: str
    destination: str
    source_format: str
    format: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    shared: dict[str, str]
    cast: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    dropped: tuple[str, ...]
    verified: bool
    prefix: str
