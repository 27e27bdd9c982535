"""``ingot modelspec``: the ModelSpec 1.0.1 metadata of a model."""

from __future__ import annotations

import os
import re
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import click

from ingot import modelspec
from ingot._base import images
from ingot._base.text import naming
from ingot._native import is_url, shown_url, url_file_name
from ingot.cli import arguments
from ingot.cli.screen import (
    Column,
    OfEach,
    Screen,
    bar,
    csv,
    described,
    nbytes,
    no_such,
    printing,
    shown,
    warn,
)
from ingot.cli.sources import models_of, opened

from .meta import Change, change_all
from .summary import abridged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._base.checks import Existing

_PREFIX = "modelspec."
_KEYS = tuple(field.name for field in fields(modelspec.ModelSpec) if field.name != "other")
_HASH = "hash_sha256"
_THUMBNAIL = f"{_PREFIX}thumbnail"
# In bytes. The viewer shows no larger one.
_MOST_THUMBNAIL = 1_000_000


@click.group(
    name="modelspec", cls=arguments.Commands, short_help="Show and set title, author, licence, … (ModelSpec)."
)
def command() -> None:
    """Show, validate and set the keys of ModelSpec 1.0.1: title, author, licence and others."""


@command.command()
@arguments.several
@csv
@printing
def show(screen: Screen, paths: tuple[str, ...]) -> int:
    """Print the keys of ModelSpec. The exit status is 1 if a model has none."""
    read = OfEach(screen, models_of(paths), _pairs)
    found = [(shown_url(model), pairs) for model, pairs in read.found]
    every = [{"path": model, "modelspec": pairs or None} for model, pairs in found]
    screen.answer({"modelspec": found[0][1] or None} if read.is_single else {"models": read.in_order(every)})
    for model, pairs in found:
        if not pairs:
            warn(f"{shown(model)}: no key begins with {_PREFIX}")
    rows = [(model, key, _shortened(key, text)) for model, pairs in found for key, text in pairs.items()]
    _print_rows(screen, (Column("key"), Column("value")), rows, read.is_single)
    return max(read.status, 0 if all(pairs for _, pairs in found) else 1)


@command.command()
@arguments.several
@csv
@printing
def validate(screen: Screen, paths: tuple[str, ...]) -> int:
    """Print faults in the keys of ModelSpec. The exit status is 1 if there is an error.

    `ingot verify` compares the hash.
    """
    read = OfEach(screen, models_of(paths), lambda model: modelspec.validate(opened(model).metadata()))
    found = [(shown_url(model), findings) for model, findings in read.found]
    every = [{"path": model, "findings": findings} for model, findings in found]
    screen.answer(described(found[0][1] if read.is_single else {"models": read.in_order(every)}))
    rows = [(model, *map(str, one)) for model, findings in found for one in findings]
    _print_rows(screen, (Column("severity"), Column("key"), Column("what", wraps=True)), rows, read.is_single)
    for model, findings in found:
        if not findings:
            screen.say(f"{shown(model)}: all is well")
    has_errors = any(one.severity == "error" for _, findings in found for one in findings)
    return max(read.status, 1 if has_errors else 0)


def _print_rows(
    screen: Screen, columns: tuple[Column, ...], rows: Sequence[tuple[str, ...]], is_single: bool
) -> None:
    """Print rows that begin with the model, which is left out if there is one model."""
    if not is_single:
        screen.table((Column("model"), *columns), rows)
    elif rows:
        screen.table(columns, [row[1:] for row in rows])


@command.command(name="set")
@arguments.paths_and("[KEY=VALUE]...")
@click.option("--hash", "with_hash", is_flag=True, help=f"Compute {_HASH} from the tensors.")
@arguments.file_option(
    "--thumbnail",
    metavar="IMAGE",
    help="Store a JPEG, PNG, WebP or GIF as the thumbnail. A JPEG of 256 × 256 pixels is best.",
)
@arguments.dry_run
@printing
def set_(
    screen: Screen, words: tuple[str, ...], with_hash: bool, thumbnail: str | None, dry_run: bool
) -> int:
    """Set keys, without the prefix: title=Ducks. `ingot meta rm` removes a key.

    A value that `validate` would report as an error is refused, before any model is changed.
    """
    models, pairs = arguments.models_and_words(words)
    if not pairs and not with_hash and thumbnail is None:
        raise arguments.no_word("KEY=VALUE, --hash or --thumbnail", words)
    # Both forms of a key are one key.
    new = arguments.pairs(text.removeprefix(_PREFIX) for text in pairs)
    new = {_PREFIX + key: _checked(key, value) for key, value in new.items()}
    if thumbnail is not None:
        arguments.exclude("thumbnail=", "--thumbnail", _THUMBNAIL in new)
        new[_THUMBNAIL] = _data_url(thumbnail)
    if with_hash:
        arguments.exclude(f"{_HASH}=", "--hash", _PREFIX + _HASH in new)

    def change_of(model: str) -> Change:
        return _completed(screen, model, new, with_hash), ()

    return change_all(screen, OfEach(screen, models, change_of), dry_run)


def _completed(screen: Screen, model: str, new: dict[str, str], with_hash: bool) -> dict[str, str]:
    """Return the keys to set in a model, with its hash and the version. Raises if one is invalid."""
    source = opened(model)
    new = dict(new)
    if with_hash:
        new[_PREFIX + _HASH] = _hash(screen, source.only_file())
    before = source.metadata()
    if not any(key.startswith(_PREFIX) for key in before):
        new.setdefault(f"{_PREFIX}sai_model_spec", modelspec.VERSION)
    for finding in modelspec.validate({**before, **new}):
        if finding.severity == "error" and finding.key in new:
            raise click.UsageError(shown(f"{finding.key}: {finding.message}"))
    return new


@command.command()
@arguments.several
@arguments.output("The image to write. With several models: the directory for their images.", required=True)
@arguments.existing
@printing
def thumbnail(screen: Screen, paths: tuple[str, ...], output: str, existing: Existing) -> int:
    """Write the thumbnail of a model to an image file, or the thumbnails of several models to a directory.

    The thumbnail is written as it is stored, so the name of FILE must have the ending of its type. In a
    directory, an image has the name of its model, and the ending of its type. The exit status is 1 if one of
    several models has no thumbnail.
    """
    models = models_of(paths)
    if len(models) == 1:
        return _thumbnail_of_one(screen, models[0], output, existing)
    _check_stems(models)
    if os.path.exists(output) and not os.path.isdir(output):
        raise click.UsageError(
            f"{shown(output)}: is a file: expected a directory for the thumbnails of {len(models)} models"
        )

    def work(model: str) -> dict[str, object]:
        image = _image(model)
        if isinstance(image, str):
            return {"path": shown_url(model), "error": image}
        os.makedirs(output, exist_ok=True)
        return _written(model, image, os.path.join(output, _file_name(model, image)), existing)

    def report(done: dict[str, object]) -> None:
        if "error" in done:
            warn(shown(f"{done['path']}: {done['error']}"))
        else:
            _tell(screen, done)

    read = OfEach(screen, models, work, report=report)
    found = [done for _, done in read.found]
    screen.answer({"models": read.in_order(found)})
    return max(read.status, int(any("error" in done for done in found)))


def _thumbnail_of_one(screen: Screen, model: str, output: str, existing: Existing) -> int:
    image = _image(model)
    if isinstance(image, str):
        raise click.UsageError(f"{shown(shown_url(model))}: {image}")
    if os.path.isdir(output):
        output = os.path.join(output, _file_name(model, image))
    stem, ending = os.path.splitext(output)
    kind = str(images.type_of(image))
    others = {one for endings in images.ENDINGS.values() for one in endings} - {*images.ENDINGS[kind]}
    if ending.lower() in others:
        better = shown(stem + images.ENDINGS[kind][0])
        raise click.UsageError(f"{shown(output)}: the thumbnail is of type {kind}: did you mean `{better}`?")
    done = _written(model, image, arguments.target(output, existing), existing)
    screen.answer(done)
    _tell(screen, done)
    return 0


def _image(model: str) -> bytes | str:
    """Return the bytes of a thumbnail, or the reason for its absence."""
    text = opened(model).metadata().get(_THUMBNAIL)
    if text is None:
        return "has no thumbnail"
    head, _, data = text.partition(",")
    try:
        image = b64decode(data, validate=True)
    except ValueError:
        image = b""
    if images.type_of(image) is None or not head.endswith(";base64"):
        return f"{_THUMBNAIL} is not a data URL of a JPEG, PNG, WebP or GIF"
    return image


def _written(model: str, image: bytes, target: str, existing: Existing) -> dict[str, object]:
    existing.check(target)
    existing.write(target, [image])
    kind, path = images.type_of(image), shown_url(model)
    return {"path": path, "destination": target, "type": kind, "nbytes": len(image)}


def _tell(screen: Screen, done: dict[str, Any]) -> None:
    screen.say(f"wrote {shown(done['destination'])}: {done['type']}, {nbytes(done['nbytes'])}")


def _check_stems(models: Sequence[str]) -> None:
    """Refuse models whose images would have the same name."""
    stems: dict[str, str] = {}
    for model in models:
        other = stems.setdefault(_stem(model), model)
        if other != model:
            raise click.UsageError(
                f"{shown(other)} and {shown(model)}: their thumbnails would have the same name in a directory"
            )


def _stem(model: str) -> str:
    name = url_file_name(model) if is_url(model) else os.path.basename(os.path.abspath(model))
    return re.sub(r"(\.(safetensors|bt))?(\.index\.json)?$", "", name)


def _file_name(model: str, image: bytes) -> str:
    return _stem(model) + images.ENDINGS[str(images.type_of(image))][0]


def _data_url(file: str) -> str:
    """Return an image as the text of a thumbnail."""
    # Opening a pipe would wait for its writer.
    if os.path.exists(file) and not os.path.isfile(file):
        raise click.UsageError(f"{shown(file)}: is not a regular file")
    with naming(file), open(file, "rb") as opened_file:
        image = opened_file.read(_MOST_THUMBNAIL + 1)
    kind = images.type_of(image)
    if kind is not None and len(image) > _MOST_THUMBNAIL:
        raise click.UsageError(
            f"{shown(file)}: is larger than {nbytes(_MOST_THUMBNAIL)}: a thumbnail is best a JPEG of 256x256"
        )
    try:
        images.size_of(image)
    except ValueError as fault:
        raise click.UsageError(f"{shown(file)}: {fault}") from None
    return f"data:{kind};base64,{b64encode(image).decode('ascii')}"


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
