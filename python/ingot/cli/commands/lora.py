"""``ingot lora``: merge, describe and rename adapters of low rank."""

from __future__ import annotations

import click

from ingot import lora
from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, nbytes, plural, printing, shown

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
@click.argument("path", metavar="BASE", callback=arguments.anywhere, shell_complete=arguments.paths)
@click.argument("adapter", metavar="ADAPTER", callback=arguments.anywhere, shell_complete=arguments.paths)
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


@command.command(short_help="Print the kind, the ranks, the alphas and the modules of adapters.")
@arguments.several
@printing
def info(screen: Screen, paths: tuple[str, ...]) -> int:
    """Print the kind, the ranks, the alphas and the modules of adapters."""
    found = [lora.info(path) for path in paths]
    screen.reports(found)
    for one in found:
        screen.table((Column("fact"), Column("value")), _facts(one))
    return 0


def _facts(one: lora.Adapter) -> list[tuple[str, str]]:
    """Return the facts about an adapter, and its modules."""
    alphas = ", ".join(f"{alpha:g}" for alpha in one.alphas) or "not stored"
    facts = [
        ("file", one.path),
        ("kind", one.kind),
        ("names of", one.format),
        ("rank", ", ".join(map(str, one.ranks))),
        ("alpha", alphas),
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
