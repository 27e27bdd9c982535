"""Problems of files that can be read."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

from ingot import _native
from ingot._base.checks import Leniency
from ingot._base.keys import select
from ingot._base.options import Loading, checked, takes
from ingot._base.progress import reporting_on
from ingot._base.report import Report, reduced
from ingot._base.text import _escaped, plural
from ingot._native import Checkpoint, is_url, shown_url
from ingot.errors import HeaderError
from ingot.typing import Keys, Path, ReadOptions, Source

from .digest import hash
from .door import open_checkpoint, open_source
from .stats import measured

# The number of bytes of elements that are read at addresses aligned to their size. Others have no alignment.
_ALIGNMENT = {2: ("I16", "U16", "F16", "BF16"), 4: ("I32", "U32", "F32", "C64"), 8: ("F64", "I64", "U64")}
_ALIGNMENT_OF = {dtype: size for size, dtypes in _ALIGNMENT.items() for dtype in dtypes}

# Hexadecimal digits of a SHA-1.
_GIT_DIGITS = 40


class Problem(NamedTuple):
    """A problem of a file.

    Attributes
    ----------
    kind : str
        ``"not-strict"`` for a rule of the format that readers do not enforce (FORMAT.md, "Leniency");
        ``"misaligned"`` for a tensor whose first byte is not at a multiple of its element's size;
        ``"total-size"`` for an index with a wrong total; ``"blob"`` for a file of the Hugging Face cache
        whose digest is not its name. Of values: ``"nan"``, ``"infinity"``, ``"malformed-bool"``, and
        ``"unread"`` for a dtype whose values have no settled layout.
    where : str
        The path of the file, or the name of the tensor.
    what : str
        A sentence.
    """

    kind: str
    where: str
    what: str

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


@dataclass(frozen=True, slots=True, repr=False)
class Check(Report):
    """The problems of a file or a checkpoint. `check` returns one. It is true if there are no problems.

    Attributes
    ----------
    source : str
        The path or the URL, without secrets.
    tensors : int
        The number of tensors.
    problems : tuple of Problem
        Each with ``kind``, ``where`` and ``what``.

    Examples
    --------
    >>> report = ingot.check("model.safetensors")
    >>> report.ok, report.tensors, report.problems
    (True, 2, ())
    """

    source: str
    tensors: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok


@takes(ReadOptions)
def check(
    source: Source,
    *,
    values: bool = False,
    keys: Keys | None = None,
    drop: Keys | None = None,
    **options: Unpack[ReadOptions],
) -> Check:
    """Find mistakes and oddities in a file that can be read.

    The header is checked by all rules of the format, including those that readers do not enforce (FORMAT.md,
    "Leniency"). Tensors have to be aligned to their elements. Files of the Hugging Face cache are compared
    with the digests in their names.

    Parameters
    ----------
    source : ingot.typing.Source
        A file, a sharded checkpoint, a URL, an open file or a buffer, as for `ingot.safe_open`.
    values : bool
        Also read the tensors: NaN, infinities, and ``BOOL`` that is neither 0 nor 1 are problems.
    keys, drop : ingot.typing.Keys, optional
        Which tensors to check, all by default, as for `load_file`. Headers, the index and digests are
        checked in any case.
    **options
        How to read.

    Returns
    -------
    Check
        True if there are no problems.

    Raises
    ------
    TensorNotFoundError
        A name or a pattern of `keys` or `drop` matches no tensor.
    OSError, HeaderError, CheckpointError, StorageError
        As for `ingot.safe_open`: a file that breaks a rule that readers enforce cannot be opened.
    TypeError, OptionError
        An argument has a wrong type or value.

    Examples
    --------
    >>> for problem in ingot.check("model.safetensors", values=True).problems:
    ...     print(problem.where, problem.what)
    """
    given = checked(check, locals())
    how, chosen, dropped = Loading.among(given), given["keys"], given["drop"]
    with closing(open_source(source, how)) as checkpoint:
        names = select(checkpoint, chosen, dropped)
        whole = _Checked(source, how, checkpoint)
        problems = [*whole.headers({*names}), *whole.index(), *whole.blobs()]
        if values:
            problems += whole.values(names)
        return Check(whole.path, len(checkpoint), tuple(problems))


class _Checked:
    """A file or a checkpoint to check."""

    def __init__(self, source: Source, how: Loading, checkpoint: Checkpoint) -> None:
        self.how = how
        self.checkpoint = checkpoint
        # The shown URL lacks secrets, so it cannot be used to open the source again.
        self.files: list[Source] = [*checkpoint.shards] if checkpoint.is_sharded else [source]
        name = checkpoint.path or f"<{type(source).__name__}>"
        self.path = shown_url(source) if isinstance(source, str) else name

    def headers(self, names: Container[str]) -> Iterator[Problem]:
        """Yield broken rules that readers do not enforce, and tensors that are not aligned."""
        for file in self.files:
            try:
                opened = self._open(file, "refuse")
            except HeaderError as error:
                if error.code != "not-strict":
                    raise
                name = self._name(file)
                yield Problem("not-strict", name, str(error).removeprefix(f"{_escaped(name)}: "))
                opened = self._open(file, "accept")
            with closing(opened):
                yield from _alignment(opened, names)

    def _open(self, file: Source, leniency: Leniency) -> Checkpoint:
        backend = "pread" if self.how.backend == "auto" else self.how.backend
        return open_checkpoint(file, self.how._replace(backend=backend), leniency)

    def _name(self, file: Source) -> str:
        return shown_url(file) if isinstance(file, str) else self.path

    def index(self) -> Iterator[Problem]:
        """Yield a wrong total of an index."""
        totals = self.checkpoint.wrong_total()
        if totals is not None:
            what = f"the index gives {totals[0]} bytes, the tensors have {totals[1]}"
            yield Problem("total-size", self.path, what)

    def blobs(self) -> Iterator[Problem]:
        """Yield files of a content-addressed store whose name is not their digest."""
        index = self.checkpoint.path if self.checkpoint.is_sharded else None
        for file in (index, *self.files):
            if isinstance(file, (str, bytes, os.PathLike)) and not (isinstance(file, str) and is_url(file)):
                yield from self._blob(file)

    def _blob(self, file: Path) -> Iterator[Problem]:
        expected = _native.blob_digest(file)
        if expected is None:
            return
        is_git = len(expected) == _GIT_DIGITS
        found = _git_digest(file) if is_git else hash(file, progress=self.how.progress)
        if found != expected.lower():
            what = f"its name in the cache is {expected}, its contents have {found}"
            yield Problem("blob", os.fsdecode(file), what)

    def values(self, names: list[str]) -> Iterator[Problem]:
        """Yield tensors with values that are not finite, or not valid for the dtype."""
        with reporting_on(self.how.progress, "Reading", self.path) as tell:
            found = measured(self.checkpoint, names, 0, self.how.threads, tell)
        for name in found.unread:
            yield Problem("unread", name, "how 6-bit values are packed is not settled")
        for name, one in found.tensors.items():
            values = plural(one.count, "value")
            if one.nans:
                yield Problem("nan", name, f"{one.nans:,} of {values}")
            if one.infinities:
                yield Problem("infinity", name, f"{one.infinities:,} of {values}")
            if one.malformed:
                yield Problem("malformed-bool", name, f"{one.malformed:,} of {values} are neither 0 nor 1")


def _alignment(checkpoint: Checkpoint, names: Container[str]) -> Iterator[Problem]:
    infos = checkpoint.infos()
    # The data ends at the end of the file.
    start = checkpoint.nbytes - max((info.end for info in infos), default=0)
    for info in infos:
        size = _ALIGNMENT_OF.get(info.dtype, 1)
        if info.name in names and (start + info.begin) % size:
            what = f"{info.dtype} begins at byte {start + info.begin}, which {size} does not divide"
            yield Problem("misaligned", info.name, what)


def _git_digest(file: Path) -> str:
    """Return the SHA-1 by which Git names a file, as the Hub does for files outside of large file storage."""
    # Imported here: only files of the Hub's cache need it.
    from hashlib import sha1

    with open(file, "rb") as opened:
        found = sha1(b"blob %d\0" % os.fstat(opened.fileno()).st_size, usedforsecurity=False)
        while piece := opened.read(1 << 20):
            found.update(piece)
    return found.hexdigest()
