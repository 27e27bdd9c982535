"""``ingot meta``: the text beside the tensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import click

from ingot._base.keys import is_pattern, matcher
from ingot._base.text import naming
from ingot._native import shown_url
from ingot._write import edit as _edit
from ingot._write import rearrange
from ingot.cli import arguments
from ingot.cli.screen import Column, OfEach, Screen, csv, plural, printing, shown
from ingot.cli.sources import opened
from ingot.errors import SafetensorError

from .summary import abridged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._base.checks import Existing
    from ingot.cli.sources import Source

# The pairs to set and the keys to remove.
Change: TypeAlias = "tuple[dict[str, str], Sequence[str]]"

_COLUMNS = (Column("key"), Column("value"))
# What people read for an outcome.
_OUTCOMES = {"dry-run": "nothing was written"}
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
@arguments.paths_and("[KEY]...")
@csv
@printing
def get(screen: Screen, words: tuple[str, ...]) -> int:
    """Print the metadata, or the values of keys. A missing KEY is an error.

    A KEY may be a pattern with * and ?. A terminal shows the beginning of long values. With several models,
    the first column is the model.
    """
    models, keys = arguments.models_and_words(words, is_local=False)
    read = OfEach(screen, models, lambda model: opened(model).metadata())
    found = read.found
    matching = _matches(found, keys)
    if len(models) == 1 and len(keys) == 1 and keys[0] in found[0][1] and not screen.as_csv:
        screen.answer({"key": keys[0], "value": found[0][1][keys[0]]})
        screen.result(shown(found[0][1][keys[0]]))
        return 0
    shown_pairs = [
        (model, {key: pairs[key] for key in (matches if keys else pairs)})
        for (model, pairs), matches in zip(found, matching, strict=True)
    ]
    if read.is_single:
        screen.answer({"metadata": shown_pairs[0][1]})
    else:
        every = [{"path": shown_url(model), "metadata": pairs} for model, pairs in shown_pairs]
        screen.answer({"models": read.in_order(every)})
    _print_pairs(screen, shown_pairs, read.is_single)
    return read.status


def _print_pairs(screen: Screen, found: Sequence[tuple[str, Mapping[str, str]]], is_single: bool) -> None:
    """Print the metadata of models: of one without its name."""
    text = abridged if screen.is_terminal and not screen.as_csv else str
    rows = [(shown_url(model), key, text(value)) for model, pairs in found for key, value in pairs.items()]
    if is_single:
        screen.table(_COLUMNS, [row[1:] for row in rows])
    else:
        screen.table((Column("model"), *_COLUMNS), rows)


@command.command(name="set")
@arguments.paths_and("KEY=VALUE...")
@_every_file
@arguments.dry_run
@printing
def set_(screen: Screen, words: tuple[str, ...], every_file: bool, dry_run: bool) -> int:
    """Set keys of the metadata. Other keys keep their values."""
    models, pairs = arguments.models_and_words(words)
    if not pairs:
        raise arguments.no_word("KEY=VALUE", words)
    new = arguments.pairs(pairs)
    if every_file:
        return _of_files(screen, models, new, (), dry_run)
    return change_all(screen, OfEach(screen, models, lambda _: (new, ())), dry_run)


@command.command()
@arguments.paths_and("KEY...")
@_every_file
@arguments.dry_run
@printing
def rm(screen: Screen, words: tuple[str, ...], every_file: bool, dry_run: bool) -> int:
    """Remove keys. A KEY may be a pattern with * and ?: 'ss_*'.

    A key that no model has is an error, except with --files.
    """
    models, keys = arguments.models_and_words(words)
    if not keys:
        raise arguments.no_word("a KEY", words)
    if every_file:
        return _of_files(screen, models, {}, keys, dry_run)
    read = OfEach(screen, models, lambda model: opened(model).metadata())
    gone = _matches(read.found, keys)
    return change_all(screen, read.replaced([({}, one) for one in gone]), dry_run)


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
@arguments.place("json_file", "[JSON_FILE]", is_local=True, required=False)
@arguments.existing
def export(path: str, json_file: str | None, existing: Existing) -> int:
    """Write the metadata as a JSON object, to standard output or to JSON_FILE."""
    text = json.dumps(opened(path).texts(), indent=2, ensure_ascii=True) + "\n"
    if json_file is None or json_file == "-":
        arguments.needs("--overwrite", "JSON_FILE", not existing.overwrite)
        sys.stdout.write(text)
        return 0
    existing.write(arguments.target(json_file, existing), [text.encode()])
    return 0


@command.command()
@arguments.paths_and("")
@arguments.output("Write a copy to FILE, and do not change PATH. For one model.")
@click.option("--all", "everything", is_flag=True, help="Also remove `format`, which transformers needs.")
@click.option(
    "--training", is_flag=True, help="Only remove what training programs wrote: captions, folders, settings."
)
@arguments.writing
def clean(
    to: arguments.Output, words: tuple[str, ...], output: str | None, everything: bool, training: bool
) -> int:
    """Remove all metadata except `format`.

    With --training, title, licence, thumbnail and all other keys stay. The keys that loaders of adapters read
    stay too: base model, module, rank and alpha.
    """
    if everything:
        arguments.exclude("--training", "--all", training)
    models, rest = arguments.models_and_words(words)
    if rest:
        raise click.UsageError(f"{shown(rest[0])}: is not a model or a directory")
    if output is None:
        arguments.needs("--overwrite", "--output", not to.existing.overwrite)

        def change_of(model: str) -> Change:
            return {}, _cleaned(opened(model).texts(), everything, training)

        return change_all(to.screen, OfEach(to.screen, models, change_of), to.dry_run)
    if len(models) > 1:
        raise click.UsageError(f"--output is for one model, found {len(models)}")
    before = opened(models[0]).texts()
    removed = _cleaned(before, everything, training)
    kept = {key: text for key, text in before.items() if key not in removed}
    arguments.target(output, to.existing)
    if not to.dry_run:
        with to.saving("Writing") as how:
            rearrange.rewrite(models[0], output, metadata=kept or None, **how)
    to.answer({"destination": output, "metadata": kept})
    to.wrote(output, f"{plural(len(kept), 'key')} left")
    return 0


# Keys of kohya's scripts, OneTrainer and AI Toolkit about the training.
_TRAINING = ("ss_*", "ot_*", "training_info")
# The least metadata that kohya's scripts write, which describes the network.
_NETWORK = (
    "ss_v2",
    "ss_base_model_version",
    "ss_network_module",
    "ss_network_dim",
    "ss_network_alpha",
    "ss_network_args",
)


def _cleaned(pairs: Mapping[str, str], everything: bool, training: bool) -> list[str]:
    """Return the keys that `clean` removes."""
    if not training:
        return [key for key in pairs if key != _KEPT or everything]
    return [key for pattern in _TRAINING for key in _matching(pairs, pattern) if key not in _NETWORK]


def _matches(found: Sequence[tuple[str, Mapping[str, str]]], keys: Sequence[str]) -> list[list[str]]:
    """Return the keys of each model that match. Raises if a key matches in no model."""
    for key in keys if found else ():
        if not any(_matching(pairs, key) for _, pairs in found):
            where = shown(shown_url(found[0][0])) if len(found) == 1 else plural(len(found), "model")
            raise click.UsageError(f"{where}: metadata has no key `{shown(key)}`")
    return [[*_all_matching(pairs, keys)] for _, pairs in found]


def _all_matching(pairs: Mapping[str, str], keys: Sequence[str]) -> dict[str, None]:
    """Return the keys that match one of `keys`, each once."""
    return dict.fromkeys(found for key in keys for found in _matching(pairs, key))


def _matching(pairs: Mapping[str, str], pattern: str) -> list[str]:
    """Return the keys that match a key, or a pattern with * and ?."""
    if pattern in pairs or not is_pattern(pattern):
        return [pattern] if pattern in pairs else []
    return [*filter(matcher(pattern), pairs)]


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    with naming(path), open(path, "rb") as file:
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
    before = source.metadata()
    outcome, new, removed = _applied(source, pairs, gone, dry_run)
    screen.answer({"outcome": outcome, "set": sorted(new), "removed": removed})
    for key, text in new.items():
        screen.say(f"{'+' if key not in before else '~'} {shown(key)} = {shown(abridged(text))}")
    for key in removed:
        screen.say(f"- {shown(key)}")
    screen.say(_OUTCOMES.get(outcome, outcome))
    return 0


def change_all(screen: Screen, changes: OfEach[Change], dry_run: bool) -> int:
    """Set and remove keys of one model or of several, and print the changes.

    A model that fails does not keep the next ones from being changed.
    """
    if changes.is_single:
        model, (pairs, gone) = changes.found[0]
        return change(screen, model, pairs, gone, dry_run)
    for model, (pairs, gone) in changes.found:
        # Before any model is changed. The work on the model reports other errors.
        with suppress(SafetensorError, OSError):
            _check_texts(opened(model), pairs, gone)
    rest = iter(changes.found)

    def work(model: str) -> dict[str, Any]:
        pairs, gone = next(rest)[1]
        outcome, new, removed = _applied(opened(model), pairs, gone, dry_run)
        return {"path": model, "outcome": outcome, "set": sorted(new), "removed": removed}

    def report(done: dict[str, Any]) -> None:
        new, gone = plural(len(done["set"]), "key"), len(done["removed"])
        counts = f"{new} to set, {gone} to remove" if dry_run else f"{new} set, {gone} removed"
        screen.say(f"{shown(done['path'])}: {_OUTCOMES.get(done['outcome'], done['outcome'])}: {counts}")

    done = OfEach(screen, [model for model, _ in changes.found], work, is_single=False, report=report)
    every = changes.in_order(done.in_order(answer for _, answer in done.found))
    screen.answer({"models": every})
    return max(changes.status, done.status)


def _applied(
    source: Source, pairs: dict[str, str], gone: Sequence[str], dry_run: bool
) -> tuple[str, dict[str, str], list[str]]:
    """Change the metadata. Return the outcome, the pairs that were new, and the keys that were removed."""
    before = source.metadata()
    _check_texts(source, pairs, gone)
    new = {key: text for key, text in pairs.items() if before.get(key) != text}
    removed = [key for key in gone if key in before]
    outcome = "dry-run" if dry_run else "unchanged"
    if not dry_run and (new or removed):
        outcome = _changed(source, new, removed)
    return outcome, new, removed


def _check_texts(source: Source, pairs: Mapping[str, str], gone: Sequence[str]) -> None:
    """Refuse to change the values of an index that are not text."""
    before, texts = source.metadata(), source.texts()
    for key in before.keys() - texts.keys():
        if key in gone or pairs.get(key, before[key]) != before[key]:
            raise click.UsageError(f"{shown(source.path)}: `{shown(key)}` is not text, but must be")


def _changed(source: Source, new: dict[str, str], removed: list[str]) -> str:
    changes = {**new, **dict.fromkeys(removed)}
    if source.index is None:
        return _edit.update_metadata(source.only_file(), changes)
    _edit.update_index(source.index, changes)
    return "rewritten"


def _of_files(
    screen: Screen, models: Sequence[str], new: dict[str, str], gone: Sequence[str], dry_run: bool
) -> int:
    """Change the metadata of each file of checkpoints, one after the other."""

    def work(path: str) -> dict[str, Any]:
        files = opened(path).files
        keys = {file: _all_matching(opened(file).texts(), gone) for file in files}
        described = []
        for file in files:
            outcome = "dry-run" if dry_run else _edit.update_metadata(file, {**new, **keys[file]})
            described.append({"file": file, "outcome": outcome})
        return {"files": described, "set": sorted(new), "removed": list(gone)}

    def report(done: dict[str, Any]) -> None:
        for one in done["files"]:
            screen.say(f"{shown(one['file'])}: {_OUTCOMES.get(one['outcome'], one['outcome'])}")

    done = OfEach(screen, models, work, report=report)
    answers = [{"path": model, **answer} for model, answer in done.found]
    screen.answer(done.found[0][1] if done.is_single else {"models": done.in_order(answers)})
    return done.status
