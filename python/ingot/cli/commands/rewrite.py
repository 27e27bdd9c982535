"""``ingot rewrite``: the same tensors in another layout."""

from __future__ import annotations

import click

from ingot._base.keys import NamedTensors, select
from ingot._write import rearrange
from ingot.cli import arguments
from ingot.cli.screen import Column, plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot.typing import Glob

_COLUMNS = (Column("name"), Column("dtype"), Column("shape"))


@arguments.command(short_help="Copy a file with its tensors stacked, joined, split, renamed or converted.")
@arguments.source
@arguments.destination
@click.option(
    "--remap",
    "rules",
    required=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="The rules: a JSON file.",
)
@arguments.selecting
@arguments.writing
def command(
    to: arguments.Output,
    path: str,
    destination: str,
    rules: str,
    keys: Glob | None,
    drop: Glob | None,
) -> int:
    """Copy SOURCE to DESTINATION with its tensors in another layout.

    FILE has a list of rules, such as [{"stack": "w1", "old": "experts.{e}.w1.weight"}, {"select": "*"}]. They
    are named and documented in `ingot.remap`. --keys and --drop take the new names.
    """
    from ingot import remap

    given = remap.read(rules)
    plan = remap.plan(path, given)
    arguments.target(destination, to.existing)
    if not to.dry_run:
        with to.saving("Writing") as how:
            rearrange.rewrite(path, destination, remap=given, keys=keys, drop=drop, **how)
    names = [one.name for one in plan.tensors]
    # Patterns select by name only.
    kept = set(select(NamedTensors(path, names, list), keys, drop))
    made = [one for one in plan.tensors if one.name in kept]
    tensors = [{"name": one.name, "dtype": one.dtype, "shape": [*one.shape]} for one in made]
    unmatched = [str(rule) for rule in plan.unmatched]
    to.answer(
        {"destination": destination, "tensors": tensors, "unmatched": unmatched, "untaken": plan.untaken}
    )
    to.screen.table(_COLUMNS, [(one.name, one.dtype, str([*one.shape])) for one in made])
    for rule in unmatched:
        to.screen.say(f"no tensor: {rule}")
    for name in plan.untaken:
        to.screen.say(f"unchanged: {name}")
    to.wrote(destination, plural(len(made), "tensor"))
    return 0
