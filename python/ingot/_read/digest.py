"""Hashes of files, and comparisons with the digests in files."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Unpack

from ingot import _native
from ingot._base.checks import checked_text, is_path, one_of
from ingot._base.options import Loading, checked, takes
from ingot._base.progress import reporting_on
from ingot._base.report import Report, reduced
from ingot._base.text import _escaped, _quoted, first_lines, located, plural
from ingot.errors import IntegrityError
from ingot.typing import Algorithm, HeaderOptions, NoOptions, Path, Progress, Source, StorageOptions

from .door import open_source, resolved


@takes()
def hash(
    source: Source,
    algorithm: Algorithm = "sha256",
    *,
    progress: Progress = False,
    storage_options: StorageOptions | None = None,
    **options: Unpack[NoOptions],
) -> str:
    """Return the hash of a file.

    Parameters
    ----------
    source : ingot.typing.Source
        Any file, URL or object, or a file of tensors if the table requires one. An index has a hash of its
        own. Directories are not accepted.
    algorithm : str
        The hash to compute:

        ``"sha256"``, ``"blake3"``, ``"xxh3"``, ``"xxh3_128"``
            The hash of the whole file. BLAKE3 uses all processors. XXH3 detects accidents, not attacks.
        ``"autov1"``
            The first 8 digits of the SHA-256 of the 64 KiB that begin at 1 MiB: A1111's old model hash.
        ``"autov2"``
            The first 10 digits of the SHA-256 of the file: Civitai's AutoV2.
        ``"autov3"``
            The SHA-256 of the data section, which does not change with the metadata: Civitai's AutoV3 (some
            pages show its first 12 digits), and the ``sshs_model_hash`` of adapters. Needs a file of tensors.
        ``"autov3_short"``
            The first 12 digits of ``"autov3"``, as A1111 and Civitai print them. Needs a file of tensors.
        ``"sshs_legacy"``
            ``"autov1"`` of a safetensors file with the same tensors and only the metadata keys that begin
            with ``ss_``: the ``sshs_legacy_hash`` of adapters. Needs a file of tensors.
        ``"modelspec"``
            ``"autov3"`` after ``0x``: ModelSpec's ``modelspec.hash_sha256``. A file of tensors.
        ``"crc32"``
            The CRC-32 of the whole file, as 8 digits: Civitai's CRC32. Detects accidents, not attacks.
        any name that `hashlib.new` takes, such as ``"md5"``, ``"sha1"`` or ``"sha512"``
            The hash of the whole file.
    progress : bool, None or callable
        As for `load_file`: True shows a bar; a callable receives the bytes done and the total, and may raise
        to end the call. Not for ``"crc32"`` and the algorithms of hashlib.
    storage_options : dict, optional
        How a URL is reached (`ingot.StorageOptions`).

    Returns
    -------
    str
        Hexadecimal digits in lower case.

    Raises
    ------
    OSError
        The file cannot be opened.
    StorageError
        Reading failed, or the file was written to during the call.
    TypeError
        `source` cannot be read from.
    HeaderError
        The file holds no tensors, and `algorithm` is defined for files of tensors only.
    OptionError
        `algorithm` is not one of the choices.

    Notes
    -----
    The file is read by position, so truncating it during the call is an error, not a crash. A remote file is
    fetched in parts, several at once, with at most 128 MiB in memory.

    Examples
    --------
    >>> len(ingot.hash("model.safetensors"))
    64
    >>> ingot.hash("model.safetensors", "autov3") == ingot.hash("tuned.safetensors", "autov3")
    False
    """
    given = checked(hash, locals(), algorithm=known_algorithm)
    if algorithm == _SHORT:
        return hash(source, "autov3", progress=progress, storage_options=storage_options)[:_SHORT_DIGITS]
    opened = resolved(source)
    if is_path(opened):
        with reporting_on(given["progress"], "Hashing", opened) as tell:
            found = _native.hash(opened, algorithm, tell, storage_options)
        return _of_path(opened, algorithm, storage_options) if found is None else found
    # Imported here: it imports the modules of threads.
    from .source import Reader, shown

    name = shown(opened)
    with reporting_on(given["progress"], "Hashing", name) as tell:
        found = _native.hash_object(opened, name, algorithm, tell)
    if found is not None:
        return found
    hasher = _hasher(algorithm)
    for part in opened.parts() if isinstance(opened, Reader) else [opened]:
        hasher.update(part)
    return str(hasher.hexdigest())


_SHORT = "autov3_short"
_SHORT_DIGITS = 12
#: The names of all hashes but hashlib's.
HASHES = (*_native.hashes(), _SHORT, "crc32")


def _of_path(path: Path, algorithm: str, storage_options: StorageOptions | None) -> str:
    """Return the hash of a file or a URL by hashlib."""
    hasher = _hasher(algorithm)
    if isinstance(path, str) and _native.is_url(path):
        _native.read_url(path, hasher.update, storage_options)
        return str(hasher.hexdigest())
    from hashlib import file_digest

    with open(_native.local_path(path), "rb", buffering=0) as file:
        return str(file_digest(file, lambda: hasher).hexdigest())


def _hasher(algorithm: str) -> Any:
    if algorithm == "crc32":
        return _Crc32()
    # Imported here, because it takes as long as the rest of this package.
    import hashlib

    return hashlib.new(known_algorithm(algorithm))


class _Crc32:
    """CRC-32 with the methods of a hash of hashlib."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        from zlib import crc32

        self._value = crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def known_algorithm(algorithm: str) -> str:
    """Return `algorithm`, which must be one of ingot's, or one of hashlib's with a fixed length."""
    checked_text("algorithm", algorithm)
    if algorithm in HASHES:
        return algorithm
    import hashlib

    # The shakes have no length of their own.
    names = {name for name in hashlib.algorithms_available if not name.startswith("shake")}
    return one_of("algorithm", algorithm, (*HASHES, *sorted(names - {"sha256"})))


class Mismatch(NamedTuple):
    """A tensor whose bytes differ from their digest."""

    tensor: str
    expected: str
    found: str

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


class Compared(NamedTuple):
    """An expected digest and the computed one."""

    expected: str
    found: str
    same: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


@dataclass(frozen=True, repr=False)
class Verification(Report):
    """The result of comparing a file with its digests. `verify` returns it.

    Attributes
    ----------
    ok : bool
        True if every byte of every tensor was compared with a digest, of the tensor, of the data section or
        of the file, and all digests match. False for a file without digests, unless `expected_sha256` was
        passed or the file is in the Hugging Face cache.
    algorithm : str or None
        The algorithm of the tensors' digests. None if the file has none.
    checked : int
        How many tensors were compared with their digest.
    bad : list of Mismatch
        Tensors that differ, in the order of the file, each with ``tensor``, ``expected`` and ``found``.
    unchecked : list of str
        Tensors without a digest, in the order of the file.
    missing : list of str
        Names that have a digest and no tensor.
    modelspec : Compared or None
        The data section against ``modelspec.hash_sha256``: ``expected``, ``found``, ``same``.
    file : Compared or None
        The whole file against `expected_sha256`, or against the SHA-256 in its name in the Hugging Face
        cache.
    shards : dict of str to Verification
        For a checkpoint of several files, the report of each. The other attributes then combine these
        reports: tensors in the order of the files, `algorithm` None if the files have several, and
        `modelspec` None. Empty for one file.

    Examples
    --------
    >>> report = ingot.verify("model.safetensors", raises=False)
    >>> report.ok, report.checked, report.unchecked
    (False, 0, ['lm_head.weight', 'wte'])
    """

    ok: bool
    algorithm: str | None = None
    checked: int = 0
    bad: list[Mismatch] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    modelspec: Compared | None = None
    file: Compared | None = None
    shards: dict[str, Verification] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.ok

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the lines of `str`."""
        # Imported here: it is for notebooks.
        from ingot._base.html import page, table

        first, *rest = self._lines()
        return page(first, (), table([line] for line in rest))

    def __str__(self) -> str:
        """Return a line with the verdict, and one for each of the first faults."""
        return first_lines(self._lines())

    def _lines(self) -> list[str]:
        """Return a line with the result, and a line for each fault."""
        lines = [f"{'ok' if self.ok else 'NOT ok'}: {plural(self.checked, 'tensor')} checked"]
        if self.algorithm is not None:
            lines[0] += f" by {self.algorithm}"
        if self.shards:
            lines[0] += f" in {len(self.shards)} files"
            for name, report in self.shards.items():
                lines += [f"{_escaped(name)}: {line}" for line in report._lines()[report.ok :]]
            return lines
        for what, pair in (("modelspec.hash_sha256", self.modelspec), ("the file", self.file)):
            if pair is not None and pair.same:
                lines[0] += f", {what} is as expected"
        lines += self._faults()
        if self.unchecked and self.algorithm is None and not self.ok:
            lines[0] += f", the file keeps no digest of its {len(self.unchecked)} tensors"
        else:
            lines += [f"tensor {_quoted(name)}: has no digest" for name in self.unchecked]
        return lines

    def _faults(self) -> list[str]:
        """Return a sentence for each digest that differs and for each missing tensor."""
        if self.shards:
            named = self.shards.items()
            return [f"{_escaped(name)}: {fault}" for name, report in named for fault in report._faults()]
        pairs = (("modelspec.hash_sha256", self.modelspec), ("the file", self.file))
        wrong = ((what, pair) for what, pair in pairs if pair is not None and not pair.same)
        faults = [f"{what}: expected {_escaped(pair.expected)}, found {pair.found}" for what, pair in wrong]
        bad = ((_quoted(row.tensor), row.expected, row.found) for row in self.bad)
        faults += [f"tensor {tensor}: expected {expected}, found {found}" for tensor, expected, found in bad]
        return faults + [f"tensor {_quoted(name)}: has a digest and is not there" for name in self.missing]


@takes(HeaderOptions)
def verify(
    source: Source,
    *,
    expected_sha256: str | None = None,
    raises: bool = True,
    progress: Progress = False,
    **options: Unpack[HeaderOptions],
) -> Verification:
    """Compare the bytes of a file, or of all files of a checkpoint, with their recorded digests.

    Parameters
    ----------
    source : ingot.typing.Source
        A file that was saved with ``checksums=...`` or has ``modelspec.hash_sha256`` in its metadata, or a
        sharded checkpoint of such files, as for `ingot.open`. A URL is fetched in parts, which are not
        stored.
    expected_sha256 : str, optional
        The SHA-256 of the whole file, as 64 hexadecimal digits, from another source than the file. Not for an
        index. By default the one in the name of the file, if it is in the Hugging Face cache.
    raises : bool
        Raise `IntegrityError` if a byte differs or has no digest. False returns the report in every case.
    progress : bool, None or callable
        As for `hash`.
    **options
        How the headers are read: `ingot.typing.HeaderOptions`.

    Returns
    -------
    Verification
        True if every byte has a digest and all match; ``print(report)`` names each tensor that differs.

    Raises
    ------
    OSError
        The file cannot be opened.
    HeaderError
        The file breaks a rule of its format; a truncated one does.
    CheckpointError
        The index and the files do not match, or one hash was requested for several files.
    IntegrityError
        A digest differs, or the tensor of a digest is missing (``code`` is ``"digest-mismatch"``); a tensor
        has no digest (``"no-digest"``). ``report`` is the `Verification`. Or the record of digests in the
        metadata is broken, or of an unknown algorithm (``"invalid-checksums"``).
    StorageError
        Reading failed, or the file was written to during the call.
    OptionError
        `expected_sha256` is not a SHA-256.

    Notes
    -----
    The digests detect accidental changes. An attacker who changes a file can change its digests too;
    `expected_sha256` from a trusted source detects that as well.

    Examples
    --------
    >>> tensors = ingot.numpy.load_file("model.safetensors")
    >>> ingot.numpy.save_file(tensors, "checked.safetensors", checksums=True)
    >>> ingot.verify("checked.safetensors").checked
    2
    """
    how = Loading.among(checked(verify, locals()))
    opened = open_source(source, how._replace(backend="pread"))
    with closing(opened), reporting_on(how.progress, "Verifying", opened.path or "<buffer>") as tell:
        found = opened.verify(expected_sha256, progress=tell)
    reports = {name: _report(facts) for name, facts in found}
    report = _together(reports) if len(reports) != 1 else next(iter(reports.values()))
    if raises and not report:
        raise _failed(opened.path or "<buffer>", report)
    return report


# Faults that the message of an error names.
_NAMED_FAULTS = 3


def _failed(path: str, report: Verification) -> IntegrityError:
    faults = report._faults()
    if not faults:
        bare = len(report.unchecked)
        way_out = 'save with checksums="blake3", or give expected_sha256'
        reason = f"{bare:,} of {plural(report.checked + bare, 'tensor')} without a digest: {way_out}"
        return located(IntegrityError, reason, code="no-digest", path=path, report=report)
    more = len(faults) - _NAMED_FAULTS
    shown = [*faults[:_NAMED_FAULTS], *([f"and {more:,} more"] if more > 0 else [])]
    pairs = [pair for one in (report, *report.shards.values()) for pair in (one.modelspec, one.file)]
    first: Any = next(iter([*report.bad, *(pair for pair in pairs if pair and not pair.same)]), None)
    facts = {name: getattr(first, name, None) for name in ("tensor", "expected", "found")}
    message = f"{_escaped(path)}: {'; '.join(shown)}"
    return IntegrityError(message, code="digest-mismatch", path=path, report=report, **facts)


def _report(facts: dict[str, Any]) -> Verification:
    facts["bad"] = [Mismatch(*row) for row in facts["bad"]]
    for of_all in ("modelspec", "file"):
        facts[of_all] = None if facts[of_all] is None else Compared(*facts[of_all])
    return Verification(**facts)


def _together(shards: dict[str, Verification]) -> Verification:
    reports = shards.values()
    algorithms = {report.algorithm for report in reports}
    algorithm = algorithms.pop() if len(algorithms) == 1 else None
    rows: dict[str, Any] = {}
    for name in ("bad", "unchecked", "missing"):
        rows[name] = [row for report in reports for row in getattr(report, name)]
    checked = sum(report.checked for report in reports)
    return Verification(all(reports), algorithm, checked, **rows, shards=shards)
