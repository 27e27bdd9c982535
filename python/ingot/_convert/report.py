"""What a conversion did, and what a source holds besides the tensors that are converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot._base.report import Report
from ingot._base.text import nbytes, plural

from .limits import refused

TYPE_CHECKING = False
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
        The value as text, truncated if it is long; empty if it has no short form.
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


@dataclass(frozen=True, slots=True, repr=False)
class Conversion(Report):
    """What `ingot.convert` did.

    Attributes
    ----------
    source, destination : str
        The file or folder that was read, and the one that was written.
    source_format, format : str
        What they are: one of ``"safetensors"``, ``"torch"``, ``"npz"``, ….
    files : tuple of str
        The files that were written, an index among them.
    tensors : int
        How many the new file has.
    nbytes : int
        Bytes of their values.
    shared : dict of str to str
        For each tensor that was another name of one, that one. Only it was written, and the metadata has the
        other name, as ``save_file(..., shared="alias")`` does it.
    cast : tuple of str
        Tensors that have another dtype now.
    left_out : tuple of LeftOut
        What was no tensor, each with ``name``, ``kind`` and ``value``.
    dropped : tuple of str
        Tensors that `keys`, `drop` or `root` left out.
    verified : bool
        Whether every tensor was read again and compared.
    prefix : str
        The prefix that programs put before all names of the new file, such as ``module.``, or an empty str.
        `strip_prefix` removes it.
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

    def _repr_html_(self) -> str:
        """What a notebook shows: what was written, and a row for each tensor that is not as it was."""
        # Imported here: it is for notebooks.
        from ingot._base.html import page, table

        facts = [
            f"{self.source_format} → {self.format}",
            plural(len(self.files), "file"),
            plural(self.tensors, "tensor"),
            nbytes(self.nbytes),
            "verified" if self.verified else "not verified",
            *([f"all names begin with {self.prefix}"] if self.prefix else []),
        ]
        rows = [
            *(("left out", item.name, f"{item.kind} {item.value}") for item in self.left_out),
            *(("dropped", name, "") for name in self.dropped),
            *(("shared", name, of) for name, of in self.shared.items()),
            *(("cast", name, "") for name in self.cast),
        ]
        return page(f"{self.source} → {self.destination}", facts, table(rows))
