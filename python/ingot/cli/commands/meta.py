"""``ingot meta``: the text beside the tensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

import click

from ingot._base.checks import is_durable
from ingot._native import replace_file, shown_url
from ingot._write import edit as _edit
from ingot._write import rearrange
from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, plural, printing, shown
from ingot.cli.sources import opened

from .summary import abridged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._base.checks import Existing
    from ingot.cli.sources import Source

_COLUMNS = (Column("key"), Column("value"))
# The key that transformers requires.
_KEPT = "format"
_every_file: arguments.Decorator = click.option(
    "--files", "every_file", is_flag=True, help="Change each file of a sharded checkpoint, not its index."
)


@click.group(name="meta", cls=arguments.Commands, short_help="Read and change metadata.")
def command() -> None:
    """Read and change the metadata, which is text beside the tensors.

    The file is changed in place if the header has room. For a sharded checkpoint, these commands use the
    metadata of its index. Each file has metadata of its own, such as the `format` that transformers reads:
    `set --files` and `rm --files` change those.
    """


@command.command()
@arguments.path
@click.argument("key", required=False)
@printing
def get(screen: Screen, path: str, key: str | None) -> int:
    """Print the metadata, or the value of KEY. A missing KEY is an error.

    A terminal shows the beginning of long values.
    """
    pairs = opened(path).metadata()
    if key is None:
        screen.answer({"metadata": pairs})
        human = screen.is_terminal
        screen.table(_COLUMNS, [(name, abridged(text) if human else text) for name, text in pairs.items()])
        return 0
    _check_keys(path, pairs, key)
    screen.answer({"key": key, "value": pairs[key]})
    screen.result(shown(pairs[key]))
    return 0


@command.command(name="set")
@arguments.own
@click.argument("pairs", metavar="KEY=VALUE...", nargs=-1, required=True)
@_every_file
@arguments.dry_run
@printing
def set_(screen: Screen, path: str, pairs: tuple[str, ...], every_file: bool, dry_run: bool) -> int:
    """Set keys of the metadata. Other keys keep their values."""
    new = arguments.pairs(pairs)
    if every_file:
        return _of_files(screen, path, new, (), dry_run)
    return change(screen, path, new, (), dry_run)


@command.command()
@arguments.own
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@_every_file
@arguments.dry_run
@printing
def rm(screen: Screen, path: str, keys: tuple[str, ...], every_file: bool, dry_run: bool) -> int:
    """Remove keys. A missing key is an error, except with --files."""
    if every_file:
        return _of_files(screen, path, {}, keys, dry_run)
    _check_keys(path, opened(path).metadata(), *keys)
    return change(screen, path, {}, keys, dry_run)


@command.command()
@arguments.own
@arguments.dry_run
@printing
def edit(screen: Screen, path: str, dry_run: bool) -> int:
    """Edit the metadata as JSON in $VISUAL or $EDITOR."""
    before = opened(path).texts()
    text = click.edit(json.dumps(before, indent=2, ensure_ascii=True) + "\n", extension=".json")
    if text is None:
        screen.say("unchanged")
        return 0
    return _replace(screen, path, before, _parsed(text, "what the editor left"), dry_run)


@command.command(name="import")
@arguments.own
@click.argument("json_file", metavar="JSON_FILE", shell_complete=arguments.paths)
@click.option("--replace", is_flag=True, help="Remove the keys that are not in JSON_FILE.")
@arguments.dry_run
@printing
def import_(screen: Screen, path: str, json_file: str, replace: bool, dry_run: bool) -> int:
    """Set the keys of a JSON object in JSON_FILE, or in standard input (-)."""
    pairs = _parsed(_read(json_file), shown(json_file))
    if replace:
        return _replace(screen, path, opened(path).texts(), pairs, dry_run)
    return change(screen, path, pairs, (), dry_run)


@command.command()
@arguments.path
@click.argument(
    "json_file",
    metavar="[JSON_FILE]",
    required=False,
    callback=arguments.local,
    shell_complete=arguments.paths,
)
@arguments.existing
def export(path: str, json_file: str | None, existing: Existing) -> int:
    """Write the metadata as a JSON object, to standard output or to JSON_FILE."""
    text = json.dumps(opened(path).texts(), indent=2, ensure_ascii=True) + "\n"
    if json_file is None or json_file == "-":
        arguments.needs("--overwrite", "JSON_FILE", not existing.overwrite)
        sys.stdout.write(text)
        return 0
    target = arguments.target(json_file, existing)
    replace_file(target, [text.encode()], durable=is_durable(None), **existing._asdict())
    return 0


@command.command()
@arguments.own
@arguments.output("Write a copy to FILE, and do not change PATH.")
@click.option("--all", "everything", is_flag=True, help="Also remove `format`, which transformers needs.")
@arguments.writing
def clean(to: arguments.Output, path: str, output: str | None, everything: bool) -> int:
    """Remove all metadata except `format`."""
    before = opened(path).texts()
    kept = {key: text for key, text in before.items() if key == _KEPT and not everything}
    if output is None:
        arguments.needs("--overwrite", "--output", not to.existing.overwrite)
        return _replace(to.screen, path, before, kept, to.dry_run)
    arguments.target(output, to.existing)
    if not to.dry_run:
        with to.saving("Writing") as how:
            rearrange.rewrite(path, output, metadata=kept or None, **how)
    to.answer({"destination": output, "metadata": kept})
    to.wrote(output, f"{plural(len(kept), 'key')} left")
    return 0


def _check_keys(path: str, pairs: Mapping[str, str], *keys: str) -> None:
    for key in keys:
        if key not in pairs:
            raise click.UsageError(f"{shown(shown_url(path))}: metadata has no key `{shown(key)}`")


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    with open(path, "rb") as file:
        return file.read()


def _parsed(text: str | bytes, where: str) -> dict[str, str]:
    """Return the pairs of a JSON object, whose values must be text."""
    try:
        found = json.loads(text, object_pairs_hook=_distinct)
    # UnicodeDecodeError is a ValueError; deeply nested brackets raise RecursionError.
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{where}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.UsageError(f"{where}: expected a JSON object, found {type(found).__name__}")
    for key, value in found.items():
        if not isinstance(value, str):
            raise click.UsageError(
                f"{where}: metadata values are text: `{shown(key)}` is of type {type(value).__name__}"
            )
    return found


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _replace(
    screen: Screen, path: str, before: Mapping[str, str], after: dict[str, str], dry_run: bool
) -> int:
    return change(screen, path, after, [key for key in before if key not in after], dry_run)


def change(screen: Screen, path: str, pairs: dict[str, str], gone: Sequence[str], dry_run: bool) -> int:
    """Set and remove metadata keys, and print the changes."""
    source = opened(path)
    before, texts = source.metadata(), source.texts()
    for key in before.keys() - texts.keys():
        if key in gone or pairs.get(key, before[key]) != before[key]:
            raise click.UsageError(f"{shown(path)}: `{shown(key)}` is not text, but must be")
    new = {key: text for key, text in pairs.items() if before.get(key) != text}
    removed = [key for key in gone if key in before]
    outcome = "dry-run" if dry_run else "unchanged"
    if not dry_run and (new or removed):
        outcome = _changed(source, new, removed)
    screen.answer({"outcome": outcome, "set": sorted(new), "removed": removed})
    for key, text in new.items():
        screen.say(f"{'+' if key not in before else '~'} {shown(key)} = {shown(abridged(text))}")
    for key in removed:
        screen.say(f"- {shown(key)}")
    screen.say({"dry-run": "nothing was written"}.get(outcome, outcome))
    return 0


def _changed(source: Source, new: dict[str, str], removed: list[str]) -> str:
    if source.index is None:
        return _edit.update_metadata(source.only_file(), new, removed)
    _edit.update_index(source.index, new, removed)
    return "rewritten"


def _of_files(screen: Screen, path: str, new: dict[str, str], gone: Sequence[str], dry_run: bool) -> int:
    """Change the metadata of each file of a checkpoint, one after the other."""
    files = opened(path).files
    outcomes = {file: "dry-run" if dry_run else _edit.update_metadata(file, new, gone) for file in files}
    described = [{"file": file, "outcome": outcome} for file, outcome in outcomes.items()]
    screen.answer({"files": described, "set": sorted(new), "removed": list(gone)})
    for file, outcome in outcomes.items():
        screen.say(f"{shown(file)}: {outcome}")
    return 0
