"""A valid file of what is sound in a broken one."""

from __future__ import annotations

from dataclasses import dataclass
from os import fsdecode
from typing import Any, NamedTuple

from ingot._base.checks import format_for
from ingot._base.options import Loading, Saving, checked, takes
from ingot._base.progress import telling
from ingot._base.report import Report, reduced
from ingot._base.text import _escaped, _quoted, nbytes, plural
from ingot._native import local_path
from ingot.errors import HeaderError
from ingot.typing import Format, Path, RewriteOptions, Source

from .assemble import Writing, opened, together

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ingot._native import Sources


# How a source is read by default.
DEFAULT = Loading()


class Finding(NamedTuple):
    """A rule that a file breaks, and what was done about it."""

    #: The code of the rule (FORMAT.md), such as ``"trailing-bytes"``.
    code: str
    #: The tensor that it concerns; None for the file.
    tensor: str | None
    #: What is wrong, as a sentence.
    found: str
    #: What was done, as the table in `repair` has it.
    done: str

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


@dataclass(frozen=True, slots=True, repr=False)
class Repair(Report):
    """What `ingot.repair` did.

    Attributes
    ----------
    source, destination : str
        The file that was read, and the one that was written.
    format : str
        That of the new file: ``"safetensors"`` or ``"bintensors"``.
    tensors : int
        How many it has.
    nbytes : int
        Bytes of their values.
    findings : tuple of Finding
        What was wrong, each with ``code``, ``tensor``, ``found`` and ``done``. Empty where the source breaks
        no rule; the new file holds the same then.
    """

    source: str
    destination: str
    format: str
    tensors: int
    nbytes: int
    findings: tuple[Finding, ...]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of the tensors that the new file lacks."""
        return tuple(finding.tensor or "" for finding in self.findings if finding.done == "tensor-left-out")

    def _repr_html_(self) -> str:
        """What a notebook shows: what was written, and a row for each finding."""
        # Imported here: it is for notebooks.
        from ingot._base.html import page, table

        facts = [
            self.format,
            plural(self.tensors, "tensor"),
            nbytes(self.nbytes),
            plural(len(self.findings), "finding"),
        ]
        rows = [(one.code, one.tensor or "", one.found, one.done) for one in self.findings]
        return page(f"{self.source} → {self.destination}", facts, table(rows))


@takes(RewriteOptions)
def repair(
    source: Source,
    destination: Path,
    *,
    format: Format | None = None,
    **options: Unpack[RewriteOptions],
) -> Repair:
    """Write a valid file of what is sound in a broken one, and report each change.

    The new file holds the tensors that ``ingot.safe_open(source, framework, lenient=True)`` gives. Their
    bytes are copied as they are, and less than 64 MiB of memory are taken beside the header. Nothing is
    guessed: a tensor whose dtype, shape or bytes are in doubt is left out.

    Parameters
    ----------
    source : ingot.typing.Source
        The file, in either format, as for `ingot.open`. All shards of a sharded checkpoint, whose index must
        be sound, become one file.
    destination : str, bytes or os.PathLike
        Where to write; it may be `source`. What is there stays until the new file is whole.
    format : {"safetensors", "bintensors"}, optional
        As for `save_file`: by default the name of `destination` decides.
    **options
        How headers are read and the file is written: `ingot.typing.RewriteOptions`.

    Returns
    -------
    Repair
        What was wrong, and what was done:

        ``"tensor-left-out"``
            The tensor is cut off by the end of the file, shares bytes with another, has a dtype that is none,
            bytes that do not fit its shape, an entry that cannot be read, or a name that another one has too.
            Of two entries that say the same one is kept, and so is the first of two names for one tensor.
        ``"bytes-left-out"``
            Bytes between the tensors, or after the last, that belong to none.
        ``"made-text"``
            A value of the metadata that is no text is kept as its JSON; bytes of the header that are not
            UTF-8 become U+FFFD.
        ``"last-kept"``
            Of several values for one key of the metadata the last, which is what other readers see.
        ``"value-left-out"``
            Metadata that is no object of values, or a record of ingot's own that is broken.
        ``"rewritten"``
            What is clear in its meaning and not as it should be: padding, unknown fields, the order of the
            entries.

    Raises
    ------
    FileExistsError
        There is something at `destination`, and `overwrite` is not set.
    HeaderError
        Nothing can be understood: the length of the header is wrong, or it is not JSON, or the file is of
        another kind. Or the file has tensors, and none of them is sound.
    SaveError
        The format lacks a dtype, or has no room for a name.
    OSError, CheckpointError, StorageError, TypeError, OptionError
        As for `merge`.

    Notes
    -----
    By default the digests that the source keeps of its tensors go along and are not compared: `ingot.verify`
    of the new file does that. ``modelspec.hash_sha256`` stays where all data is the same, as for `merge`.
    Names that share a tensor go along with it, and are left out where it is.
    """
    given = checked(repair, {"format": format, **options})
    how, destination = Saving.among(repair, given), local_path(destination)
    held, findings = examined(source, Loading.among(given))
    names, path = held.names(0), held.path(0)
    with telling(how.progress, "Repairing", destination) as tell:
        picks = [(0, number, name) for number, name in enumerate(names)]
        Writing(how, is_inherited=True).write(held, destination, picks, together(held), tell)
    sizes = held.sizes(0)
    return Repair(
        source=path,
        destination=fsdecode(destination),
        format=format_for(destination, format),
        tensors=len(sizes),
        nbytes=sum(sizes),
        findings=findings,
    )


def examined(source: Source, how: Loading = DEFAULT) -> tuple[Sources, tuple[Finding, ...]]:
    """Return the tensors that are sound in a file, and the rules that it breaks.

    Raises
    ------
    HeaderError
        The file has tensors, and none of them is sound.
    """
    held = opened([source], how, "salvage")
    path = held.path(0)
    findings = tuple(
        Finding(code, tensor, _of(path, tensor, found), done)
        for code, tensor, found, done in held.findings(0)
    )
    left_out = [finding for finding in findings if finding.done == "tensor-left-out"]
    if left_out and not held.names(0):
        first = left_out[0]
        raise HeaderError(
            f"{_escaped(path)}: none of {plural(len(left_out), 'tensor')} is sound: tensor "
            f"{_quoted(first.tensor)}: {first.found}",
            code=first.code,
            path=path,
            tensor=first.tensor,
        )
    return held, findings


def _of(path: str, tensor: str | None, found: str) -> str:
    """`found` without the file and the tensor that it begins with."""
    found = found.removeprefix(f"{_escaped(path)}: ")
    return found if tensor is None else found.removeprefix(f"tensor {_quoted(tensor)}: ")
