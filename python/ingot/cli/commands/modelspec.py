"""``ingot modelspec``: the ModelSpec 1.0.1 metadata of a model."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches

import click

from ingot import modelspec
from ingot._native import shown_url
from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, bar, described, nbytes, no_such, printing, shown, warn
from ingot.cli.sources import opened

from .meta import change
from .summary import abridged

_PREFIX = "modelspec."
_KEYS = tuple(field.name for field in fields(modelspec.ModelSpec) if field.name != "other")
_HASH = "hash_sha256"


@click.group(
    name="modelspec", cls=arguments.Commands, short_help="Show and set title, author, licence, … (ModelSpec)."
)
def command() -> None:
    """Show, validate and set the keys of ModelSpec 1.0.1: title, author, licence and others."""


@command.command()
@arguments.path
@printing
def show(screen: Screen, path: str) -> int:
    """Print the keys of ModelSpec. The exit status is 1 if the file has none."""
    pairs = _pairs(path)
    screen.answer({"modelspec": pairs or None})
    if not pairs:
        warn(f"{shown(shown_url(path))}: no key begins with {_PREFIX}")
        return 1
    screen.table(
        (Column("key"), Column("value")), [(key, _shortened(key, text)) for key, text in pairs.items()]
    )
    return 0


@command.command()
@arguments.path
@printing
def validate(screen: Screen, path: str) -> int:
    """Print faults in the keys of ModelSpec. The exit status is 1 if there is an error.

    `ingot verify` compares the hash.
    """
    found = modelspec.validate(opened(path).metadata())
    errors = [finding for finding in found if finding.severity == "error"]
    screen.answer(described(found))
    if found:
        columns = (Column("severity"), Column("key"), Column("what"))
        screen.table(columns, [tuple(map(str, finding)) for finding in found])
    else:
        screen.say(f"{shown(shown_url(path))}: all is well")
    return 1 if errors else 0


@command.command(name="set")
@arguments.own
@click.argument("pairs", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--hash", "with_hash", is_flag=True, help=f"Compute {_HASH} from the tensors.")
@arguments.dry_run
@printing
def set_(screen: Screen, path: str, pairs: tuple[str, ...], with_hash: bool, dry_run: bool) -> int:
    """Set keys, without the prefix: title=Ducks. `ingot meta rm` removes a key.

    A value that `validate` would report as an error is refused.
    """
    if not pairs and not with_hash:
        raise click.UsageError("expected KEY=VALUE or --hash")
    # Both forms of a key are one key.
    new = arguments.pairs(text.removeprefix(_PREFIX) for text in pairs)
    new = {_PREFIX + key: _checked(key, value) for key, value in new.items()}
    source = opened(path)
    if with_hash:
        arguments.exclude(f"{_HASH}=", "--hash", _PREFIX + _HASH in new)
        new[_PREFIX + _HASH] = _hash(screen, source.only_file())
    before = source.metadata()
    if not any(key.startswith(_PREFIX) for key in before):
        new.setdefault(f"{_PREFIX}sai_model_spec", modelspec.VERSION)
    for finding in modelspec.validate({**before, **new}):
        if finding.severity == "error" and finding.key in new:
            raise click.UsageError(shown(f"{finding.key}: {finding.message}"))
    return change(screen, path, new, (), dry_run)


def _pairs(path: str) -> dict[str, str]:
    return {key: text for key, text in opened(path).metadata().items() if key.startswith(_PREFIX)}


def _checked(key: str, value: str) -> str:
    if key not in _KEYS:
        raise click.UsageError(no_such("key of ModelSpec", shown(key), get_close_matches(key, _KEYS, 1)))
    if not value:
        raise click.UsageError(
            f"{key}: expected a value: `ingot meta rm PATH {_PREFIX}{key}` removes the key"
        )
    return value


def _hash(screen: Screen, file: str) -> str:
    from ingot._read import digest as hashes

    with bar(screen, "Hashing") as tell:
        return hashes.hash(file, "modelspec", progress=tell)


def _shortened(key: str, text: str) -> str:
    """Return a value for a terminal: the kind and the size of a picture."""
    head, comma, data = text.partition(",")
    if key == f"{_PREFIX}thumbnail" and comma and head.startswith("data:"):
        return f"{abridged(head.removeprefix('data:'))}, {nbytes(len(data) * 3 // 4)}"
    return abridged(text)
