"""``ingot lora``: merge, describe and rename adapters of low rank."""

from __future__ import annotations

from collections.abc import Iterable

import click

from ingot import lora
from ingot.cli import arguments
from ingot.cli.screen import Column, OfEach, Screen, csv, described, nbytes, plural, printing, shown
from ingot.cli.sources import models_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from ingot.typing import Glob


@click.group(
    name="lora", cls=arguments.Commands, short_help="Merge, describe and rename LoRAs and other adapters."
)
def command() -> None:
    """Merge an adapter into a model, describe it, or rename its tensors.

    LoRA, rsLoRA, DoRA, LoCon, LoHa and LoKr, in the names of PEFT, kohya and diffusers.
    """


@command.command(short_help="Write a copy of a model with an adapter added to its weights.")
@arguments.place("path", "BASE")
@arguments.place("adapter", "ADAPTER")
@arguments.destination
@click.option("--scale", type=float, default=1.0, show_default=True, help="How much of ADAPTER is added.")
@click.option(
    "--also",
    nargs=2,
    type=(str, float),
    multiple=True,
    metavar="ADAPTER SCALE",
    help="Add this adapter too. Repeatable.",
)
@arguments.selecting
@arguments.writing
def merge(
    to: arguments.Output,
    path: str,
    adapter: str,
    destination: str,
    scale: float,
    also: tuple[tuple[str, float], ...],
    keys: Glob | None,
    drop: Glob | None,
) -> int:
    """Write BASE with ADAPTER added to its weights to DESTINATION.

    DESTINATION is one file if it ends with .safetensors or .bt, otherwise a directory with the files of BASE.
    --keys and --drop select tensors of the adapters. Weights are rounded once, to the dtype of BASE, and at
    most 256 MiB are in memory.
    """
    adapters = [(adapter, scale), *also]
    if to.dry_run:
        found = lora.planned(path, adapters, destination, to.existing, keys=keys, drop=drop)
    else:
        with to.saving("Merging") as how:
            found = lora.merge(path, adapters, destination, keys=keys, drop=drop, **how)
    to.answer(found)
    changed = f"{plural(len(found.changed), 'tensor')} of {found.tensors:,} changed"
    to.wrote(destination, f"{changed}, {nbytes(found.nbytes)}")
    return 0


_COLUMNS = (
    Column("file", named=True),
    Column("kind"),
    Column("names of", spare=True),
    Column("rank"),
    Column("alpha"),
    Column("base"),
    Column("modules", right=True),
    Column("parameters", right=True, spare=True),
)


@command.command(short_help="Print the kind, the ranks, the alphas and the modules of adapters.")
@arguments.several
@csv
@printing
def info(screen: Screen, paths: tuple[str, ...]) -> int:
    """Print the kind, the ranks, the alphas and the modules of an adapter.

    Several paths, and a directory of several adapters, become a table with a line for each adapter. A file
    that is no adapter is reported, and the command continues.
    """
    read = OfEach(screen, models_of(paths), lora.info)
    found = [one for _, one in read.found]
    screen.answer(described(found[0]) if read.is_single else read.in_order(map(described, found)))
    if read.is_single and not screen.as_csv:
        screen.table((Column("fact"), Column("value")), _facts(found[0]))
    else:
        screen.table(_COLUMNS, map(_row, found))
    return read.status


def _row(one: lora.Adapter) -> tuple[str, ...]:
    ranks, alphas = _listed(one.ranks), _listed(one.alphas)
    counts = str(len(one.modules)), str(one.parameters)
    return one.path, one.kind, one.format, ranks, alphas, one.base or "", *counts


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{one:g}" for one in numbers)


def _facts(one: lora.Adapter) -> list[tuple[str, str]]:
    """Return the facts about an adapter, and its modules."""
    facts = [
        ("file", one.path),
        ("kind", one.kind),
        ("names of", one.format),
        ("rank", _listed(one.ranks)),
        ("alpha", _listed(one.alphas) or "not stored"),
        ("base", one.base or "unknown"),
        ("parameters", f"{one.parameters:,}"),
        *(("module", name) for name in one.modules),
        *(("whole", name) for name in one.whole),
    ]
    return [(name, shown(text)) for name, text in facts]


@command.command(short_help="Write an adapter under the names of PEFT, kohya or diffusers.")
@arguments.source
@arguments.destination
@click.option(
    "--to",
    "library",
    required=True,
    type=click.Choice(["peft", "kohya", "diffusers"]),
    help="The library whose names the new file has.",
)
@arguments.selecting
@arguments.writing
def convert(
    to: arguments.Output,
    path: str,
    destination: str,
    library: Literal["peft", "kohya", "diffusers"],
    keys: Glob | None,
    drop: Glob | None,
) -> int:
    """Write the adapter SOURCE under the names of another library to DESTINATION.

    For PEFT, DESTINATION is a directory, which gets adapter_model.safetensors and adapter_config.json.
    """
    if to.dry_run:
        found = lora.renamed(path, destination, library, to.existing, keys=keys, drop=drop)
    else:
        with to.saving("Converting") as how:
            found = lora.convert(path, destination, library, keys=keys, drop=drop, **how)
    to.answer(found)
    to.wrote(destination, f"{plural(len(found.modules), 'module')} of {found.kind}, for {library}")
    return 0
