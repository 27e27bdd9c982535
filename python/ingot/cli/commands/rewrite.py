"""``ingot rewrite``: the same tensors in another layout."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import click

from ingot._base.checks import DEQUANTISED
from ingot._base.keys import NamedTensors, select
from ingot._base.layouts import Rules
from ingot._base.options import Loading
from ingot._read.door import open_checkpoint
from ingot._write import rearrange
from ingot.cli import arguments
from ingot.cli.screen import Column, plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._read.remap import Found
    from ingot.typing import Glob

_COLUMNS = (Column("name"), Column("dtype"), Column("shape"))


@arguments.command(short_help="Copy a file with its tensors stacked, joined, renamed or dequantised.")
@arguments.source
@arguments.destination
@click.option(
    "--remap",
    "rules",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="The rules: a JSON file.",
)
@click.option("--dequantize", is_flag=True, help="Write quantised weights as floats.")
@click.option(
    "--dtype",
    type=arguments.FloatDtype(DEQUANTISED),
    help="With --dequantize: the dtype of the weights. By default the one in config.json, or BF16.",
)
@arguments.selecting
@arguments.writing
def command(
    to: arguments.Output,
    path: str,
    destination: str,
    rules: str | None,
    dequantize: bool,
    dtype: str | None,
    keys: Glob | None,
    drop: Glob | None,
) -> int:
    """Copy SOURCE to DESTINATION with its tensors in another layout, or as plain floats.

    FILE has a list of rules, such as [{"stack": "w1", "old": "experts.{e}.w1.weight"}, {"select": "*"}]. They
    are named and documented in `ingot.remap`. --keys and --drop take the new names.
    """
    from ingot import remap

    if rules is None and not dequantize:
        raise click.UsageError("nothing to do without --remap or --dequantize")
    if dtype is not None:
        arguments.needs("--dtype", "--dequantize", dequantize)
    given = None if rules is None else remap.read(rules)
    weights: Any = dtype or dequantize
    reading = Loading(dequantize=weights)
    plan, removed = _plan(path, given, reading), rearrange.packed_parts(path, reading)
    arguments.target(destination, to.existing)
    if not to.dry_run:
        with to.saving("Writing") as how:
            own = {"remap": given, "dequantize": weights, "keys": keys, "drop": drop}
            rearrange.rewrite(path, destination, **own, **how)
    # Patterns select by name only.
    kept = set(select(NamedTensors(path, [*plan.tensors], list), keys, drop))
    made = {name: one for name, one in plan.tensors.items() if name in kept}
    tensors = [{"name": name, "dtype": one.dtype, "shape": [*one.shape]} for name, one in made.items()]
    unmatched = [str(rule) for rule in plan.unmatched]
    untaken = [] if given is None else plan.untaken
    lists = {"unmatched": unmatched, "untaken": untaken, "removed": removed}
    to.answer({"destination": destination, "tensors": tensors, **lists})
    to.screen.table(_COLUMNS, [(name, one.dtype, str([*one.shape])) for name, one in made.items()])
    for what, names in (("no tensor", unmatched), ("unchanged", untaken), ("removed", removed)):
        for name in names:
            to.screen.say(f"{what}: {name}")
    to.wrote(destination, plural(len(made), "tensor"))
    return 0


def _plan(path: str, rules: Rules | None, reading: Loading) -> Found:
    """Return the tensors that the rules make of plain weights."""
    from ingot._read.remap import applied

    with closing(open_checkpoint(path, reading)) as checkpoint:
        return applied(checkpoint, rules or Rules([], strict=False))
