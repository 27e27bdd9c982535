"""The message, the code and the exit status of a failure.

Messages name options of the command instead of arguments of Python, and contain no secrets.
"""

from __future__ import annotations

import os
import re
from errno import errorcode
from typing import NamedTuple

import click

from ingot._native import shown_url
from ingot.errors import OptionError, SafetensorError, SliceError, TensorNotFoundError

from .wording import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# What is wrong is what was typed, not what is in a file.
_TYPED = (TensorNotFoundError, SliceError, OptionError)

# The arguments that messages of `ingot` name. The option is the name with dashes.
_ARGUMENTS = re.compile(
    "dtype|expected_sha256|filename_pattern|keys|drop|max_nbytes|max_shard_size|on_duplicate|overwrite"
    "|replace_read_only|root|source_format|strip_prefix|threads"
)
# Ways out that no option gives.
_PHRASES = {
    " — format=… says it": "",
    " — say which by metadata=": " — make them equal with `ingot meta set`",
    'write_options={"replace_read_only": True}': "replace_read_only=True",
}
# With a value, as in `overwrite=True`; or alone, where no word of English has that form.
_ARGUMENT = re.compile(
    r"\b([a-z_]+)=(?:True|False|…|\.\.\.|(\d+\b|'\w+'))?(?![\w=])|\b([a-z]+(?:_[a-z0-9]+)+)\b"
)
_FUNCTION = re.compile(r"\A\w+\(\): ")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/+[^\s'\"`]*[^\s'\"`.,:;)]")


class Failure(NamedTuple):
    """What a command prints when it fails. With ``--json`` these are the keys of the answer."""

    error: str
    code: str
    exit_status: int


def failure(error: BaseException, typed: Iterable[str]) -> Failure:
    """Return how `error` is reported to a user who typed the words `typed`."""
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return Failure("interrupted", "interrupted", 130)
    if isinstance(error, click.ClickException):
        return Failure(one_line(_usage(error), typed), "usage", 2)
    return Failure(told(error, typed), _code(error), status(error))


def _usage(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        near = (error.possibilities or [])[:1]
        text = no_such("option", error.option_name, near)
    else:
        # click lists choices on lines of their own, and ends sentences.
        text = error.format_message().replace("\n\t", " ").removesuffix(".")
        text = text[:1].lower() + text[1:]
    context = getattr(error, "ctx", None)
    return f"{text} (see `{context.command_path} --help`)" if context else text


def no_such(what: str, word: str, near: Sequence[str]) -> str:
    """Return the message about an unknown `word`, with the nearest one that is known."""
    hint = f": did you mean `{near[0]}`?" if near else ""
    return f"no such {what} `{word}`{hint}"


def _code(error: BaseException) -> str:
    if isinstance(error, ImportError):
        return "missing-package"
    if isinstance(error, MemoryError):
        return "ENOMEM"
    code: str | None = getattr(error, "code", None)
    return code or errorcode.get(getattr(error, "errno", None) or 0, "error")


def told(error: BaseException, typed: Iterable[str]) -> str:
    """What a failure says on one line, escaped. `typed` are the words whose secrets it must not have."""
    if isinstance(error, OSError) and not isinstance(error, SafetensorError) and error.strerror:
        # As the system's own commands say it, without Python's number.
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return one_line(where + in_options(error.strerror), typed)
    return one_line(in_options(str(error)), typed) or type(error).__name__


def one_line(message: str, typed: Iterable[str]) -> str:
    """Return `message` on one line, escaped, without secrets and without the name of a Python function."""
    message = _FUNCTION.sub("", message)
    return shown(without_secrets(" ".join(message.split("\n")), typed))


def status(error: BaseException) -> int:
    """The exit status: 1 where a file is to blame or the work failed, 2 where it could not be begun."""
    if isinstance(error, SafetensorError):
        return 2 if isinstance(error, _TYPED) else 1
    return 1 if isinstance(error, MemoryError) else 2


def in_options(message: str) -> str:
    """`message` with the options of the command in place of the arguments of Python."""
    for phrase, other in _PHRASES.items():
        message = message.replace(phrase, other)
    # What stands between backticks is a name.
    parts = message.split("`")
    parts[::2] = [_ARGUMENT.sub(_option, part) for part in parts[::2]]
    return "`".join(parts)


def _option(found: re.Match[str]) -> str:
    name = found[1] or found[3]
    if not _ARGUMENTS.fullmatch(name):
        return found[0]
    option = f"--{name.replace('_', '-')}"
    return f"{option} {found[2]}" if found[2] else option


def without_secrets(message: str, typed: Iterable[str]) -> str:
    """`message` without the secrets of URLs in it: those that were `typed`, and any other."""
    for word in typed:
        if "://" in word:
            message = message.replace(word, shown_url(word))
    return _URL.sub(lambda found: shown_url(found[0]), message)
