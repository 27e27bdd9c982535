"""The steps of a folder of checkpoints, and their commit files: FORMAT.md, "Folders of checkpoints"."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, NamedTuple

from ingot._base.text import _escaped, _quoted, located
from ingot._native import Checkpoint, hash_object, is_url, replace_file
from ingot._read.door import open_checkpoint
from ingot.errors import CheckpointError, IntegrityError

#: The file that makes a directory a step.
COMMIT = "checkpoint.json"
#: The commit file of a step that is being deleted.
DELETING = "deleting.json"
#: An empty file beside the commit file: retention keeps the step.
PINNED = "pinned"
#: A file of the state. The name has the id of the save, so two processes never write to the same file, and
#: the number of the rank that wrote it, except for the first.
STATE = re.compile(r"state-[0-9a-f]{16}(-[0-9]{5,})?\.safetensors")
#: The key of the save id in the metadata of each file of a step.
SAVE_KEY = "ingot.save"
FORMAT = "ingot.checkpoint"
#: The version of the schema.
VERSION = 1

#: The most bytes of a commit file, which has some 200 bytes for each file of the step.
MAX_NBYTES = 1 << 24
_STEP = re.compile(r"step-([0-9]{8,19})")
# A commit file names the files that are deleted with it: only files of tensors beside it.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
# Checkpoints of other programs: Lightning, transformers, torchtitan, Orbax, DeepSpeed, Megatron.
_FOREIGN = re.compile(r"(?:(?:checkpoint|ckpt|epoch|global_?step|iter|step)[-_=]?)?[0-9]+|epoch=.*\.ckpt")


class StoredFile(NamedTuple):
    """The sizes of a file and of its header in bytes, and the digest of the header.

    The header has a digest of each tensor.
    """

    nbytes: int
    header_nbytes: int
    header_blake3: str


class Commit(NamedTuple):
    """What a commit file contains.

    Attributes
    ----------
    step : int
        The number of the step.
    save : str
        The id of the save, which the files of the step have in their metadata.
    framework : str
        The module of the framework that saved the state.
    tree : str
        The file with the tree of the state.
    metrics : dict of str to float
        The metrics that the caller gave.
    files : dict of str to StoredFile
        All files of the step by name.
    """

    step: int
    save: str
    framework: str
    tree: str
    metrics: dict[str, float]
    files: dict[str, StoredFile]

    def text(self) -> bytes:
        """Return the content of the commit file."""
        files = {name: stored._asdict() for name, stored in self.files.items()}
        # JSON has no NaN and no infinities.
        metrics = {name: value if isfinite(value) else repr(value) for name, value in self.metrics.items()}
        head = {"format": FORMAT, "version": VERSION}
        content = {**head, **self._asdict(), "metrics": metrics, "files": files}
        return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def folder_of(directory: str, step: int) -> str:
    """Return the path of a step."""
    return os.path.join(directory, f"step-{step:08d}")


def path_in(folder: str, name: str) -> str:
    """Return the path or the URL of a file of a step."""
    return f"{folder}/{name}" if is_url(folder) else os.path.join(folder, name)


def numbers(directory: str) -> list[int]:
    """Return the numbers of all directories of steps in ascending order, with and without a commit file."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = [int(match[1]) for name in names if (match := _STEP.fullmatch(name))]
    # A name with more zeros is another program's.
    return sorted(step for step in found if os.path.basename(folder_of("", step)) in names)


def committed(directory: str) -> list[int]:
    """Return the numbers of the steps in ascending order."""
    while True:
        listed = numbers(directory)
        found = [step for step in listed if is_committed(folder_of(directory, step))]
        # If the list changed meanwhile, a step may have been deleted, and the step that replaces it is not in
        # `found`: list again.
        if numbers(directory) == listed:
            return found


def is_committed(folder: str) -> bool:
    """Return whether the directory is a step."""
    return os.path.isfile(os.path.join(folder, COMMIT))


def check_directory(directory: str) -> None:
    """Raise if `directory` is a file, a broken link, or contains checkpoints of another program."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        if os.path.lexists(directory):
            # The path is a broken link, so no directory can be made there.
            raise
        return
    check_names(directory, names, _STEP)


def check_names(directory: str, names: Iterable[str], step: re.Pattern[str]) -> None:
    """Raise if one of the names in a directory is of another program, and none is of a `step`."""
    others = sorted(name for name in names if not step.fullmatch(name))
    foreign = next(filter(_FOREIGN.fullmatch, others), None)
    if foreign is not None and not any(map(step.fullmatch, names)):
        raise is_foreign(directory, f"{_quoted(foreign)} is a checkpoint of another program")


def is_foreign(path: str, reason: str) -> CheckpointError:
    """Return the error for a directory that another program uses."""
    return located(
        CheckpointError, f"{reason}: choose another directory", code="foreign-checkpoints", path=path
    )


def read(folder: str, name: str = COMMIT) -> Commit:
    """Return the content of a commit file.

    Raises
    ------
    CheckpointError
        The file is damaged (``code`` is ``"invalid-commit"``), another program's
        (``"foreign-checkpoints"``), or of a later version of ingot (``"later-checkpoint"``).
    OSError
        The file cannot be opened.
    """
    path = os.path.join(folder, name)
    with open(path, "rb") as file:
        return parsed(file.read(MAX_NBYTES), path, os.path.basename(folder))


def parsed(text: bytes, path: str, directory: str) -> Commit:
    """Return the content of a commit file, which is in the directory of this name.

    Raises
    ------
    CheckpointError
        As for `read`.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"it is truncated or damaged ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise is_foreign(path, "another program wrote it")
    version = content.get("version")
    if type(version) is int and version > VERSION:
        reason = f"expected version {VERSION} of the commit file, found {version}: update ingot"
        raise located(
            CheckpointError, reason, code="later-checkpoint", path=path, expected=VERSION, found=version
        )
    try:
        if version != VERSION:
            raise ValueError(f"expected version {VERSION}, found {version!r}")
        found = _commit(content)
        if directory != folder_of("", found.step):
            raise ValueError(f"the directory is {directory}, the commit file is of step {found.step}")
        return found
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _invalid(path, f"{error}") from None


def _invalid(path: str, reason: str) -> CheckpointError:
    way_out = "restore the file, or remove it to abandon the step"
    return located(
        CheckpointError, f"the commit file is invalid: {reason}: {way_out}", code="invalid-commit", path=path
    )


def _commit(content: Mapping[str, Any]) -> Commit:
    files = {_named(name): _stored(facts) for name, facts in content["files"].items()}
    metrics = {_text(name): float(value) for name, value in content["metrics"].items()}
    tree = _text(content["tree"])
    if tree not in files:
        raise ValueError(f"its tree is in {tree!r}, which is not among its files")
    texts = (_text(content["save"]), _text(content["framework"]))
    return Commit(_count(content["step"]), *texts, tree, metrics, files)


def _stored(facts: Mapping[str, Any]) -> StoredFile:
    nbytes, header_nbytes = _count(facts["nbytes"]), _count(facts["header_nbytes"])
    if header_nbytes > nbytes:
        raise ValueError(f"a header of {header_nbytes:,} bytes in a file of {nbytes:,}")
    return StoredFile(nbytes, header_nbytes, _text(facts["header_blake3"]))


def _named(name: str) -> str:
    if not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file of a step")
    return name


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {value!r}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a count, found {value!r}")
    return value


def stored(path: str) -> StoredFile:
    """Return the facts about a file that the commit file records."""
    infos = open_checkpoint(path).infos()
    nbytes = os.path.getsize(path)
    header_nbytes = nbytes - max((info.end for info in infos), default=0)
    return StoredFile(nbytes, header_nbytes, _header_digest(path, header_nbytes))


def _header_digest(path: str, nbytes: int) -> str:
    with open(path, "rb") as file:
        return digest_of(file.read(nbytes), path)


def digest_of(header: bytes, path: str) -> str:
    """Return the digest of the header of a file of a step."""
    return str(hash_object(header, _escaped(path), "blake3"))


def write(folder: str, commit: Commit, durable: bool) -> None:
    """Write the commit file, which makes the directory a step."""
    replace_file(os.path.join(folder, COMMIT), [commit.text()], durable=durable)


def check(folder: str, commit: Commit, names: Iterable[str] | None = None) -> None:
    """Compare the sizes and the headers of files of a step, by default all, with its commit file.

    Raises
    ------
    CheckpointError
        A file has another size (``code`` is ``"changed-step"``).
    IntegrityError
        A header differs (``"digest-mismatch"``).
    OSError
        A file is missing or cannot be read.
    """
    for name in commit.files if names is None else names:
        path, known = os.path.join(folder, name), commit.files[name]
        check_size(path, known, os.path.getsize(path))
        check_header(path, known, _header_digest(path, known.header_nbytes))


def check_size(path: str, known: StoredFile, nbytes: int) -> None:
    """Raise if a file of a step has another size than in the commit file."""
    if nbytes != known.nbytes:
        reason = f"expected {known.nbytes:,} bytes as in {COMMIT}, found {nbytes:,}"
        facts: dict[str, Any] = {"expected": known.nbytes, "found": nbytes}
        raise located(CheckpointError, reason, code="changed-step", path=path, **facts)


def check_header(path: str, known: StoredFile, digest: str) -> None:
    """Raise if the header of a file has another digest than in the commit file."""
    if digest != known.header_blake3:
        reason = f"the header differs from its digest in {COMMIT}"
        facts: dict[str, Any] = {"expected": known.header_blake3, "found": digest}
        raise located(IntegrityError, reason, code="digest-mismatch", path=path, **facts)


def check_save(commit: Commit, checkpoint: Checkpoint) -> None:
    """Raise if a file of a step has another save id than the commit file."""
    found = (checkpoint.metadata() or {}).get(SAVE_KEY)
    if found != commit.save:
        reason = f"expected the file of save {commit.save}, found {found}"
        facts: dict[str, Any] = {"expected": commit.save, "found": found, "path": checkpoint.path}
        raise located(CheckpointError, reason, code="changed-step", **facts)
