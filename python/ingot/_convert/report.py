"""What a conversion did."""

from __future__ import annotations

from dataclasses import dataclass

from ingot._base.report import Report
from ingot._base.text import nbytes, plural

from .others import LeftOut


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
