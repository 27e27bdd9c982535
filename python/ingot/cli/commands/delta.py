"""``ingot delta``: what changed between two versions, as a file."""

from __future__ import annotations

import os

import click

from ingot import delta
from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, bar, nbytes, plural, printing, shape, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ingot._base.checks import Existing

_COLUMNS = (
    Column("name"),
    Column("dtype"),
    Column("shape"),
    Column("codec"),
    Column("changed", right=True),
    Column("size", right=True),
)


@click.group(name="delta", cls=arguments.Commands, short_help="Write and apply patches between versions.")
def command() -> None:
    """Write and apply patches: what changed between two versions of a checkpoint.

    A patch has the elements whose bits changed, so it is small if few did, as from step to step of
    reinforcement learning.
    """


_patch = arguments.place("patch", "PATCH")


@command.command()
@arguments.source
@arguments.place("other", "NEW")
@arguments.output("The patch to write.", required=True)
@click.option("--step", type=click.IntRange(min=0), help="The step of the training that made NEW.")
@arguments.existing
@printing
def diff(screen: Screen, path: str, other: str, output: str, step: int | None, existing: Existing) -> int:
    """Write the patch that makes NEW of SOURCE."""
    arguments.target(output, existing)
    with bar(screen, "Comparing") as tell:
        delta.diff(path, other, output, step=step, progress=tell, **existing.options())
    return _wrote(screen, output)


@command.command()
@arguments.source
@_patch
@arguments.file_option(
    "-o",
    "--output",
    metavar="PATH",
    help="Where to write the result: a file, or a directory for several files.",
)
@click.option("--in-place", is_flag=True, help="Change the files of SOURCE.")
@click.option("--verify", is_flag=True, help="Compare the digest of all data of SOURCE first.")
@arguments.existing
@printing
def apply(
    screen: Screen,
    path: str,
    patch: str,
    output: str | None,
    in_place: bool,
    verify: bool,
    existing: Existing,
) -> int:
    """Make the new version of SOURCE with PATCH.

    With --in-place, a killed command leaves files that cannot be opened, and the same command finishes them:
    keep PATCH until then.
    """
    if in_place == (output is not None):
        raise click.UsageError("expected --output or --in-place")
    if in_place and existing.overwrite:
        raise click.UsageError("--overwrite has no effect with --in-place")
    with bar(screen, "Patching") as tell:
        changed = delta.apply(
            path, patch, output, in_place=in_place, verify=verify, progress=tell, **existing.options()
        )
    screen.answer({"destination": output or path, "changed": changed})
    what = "patched" if changed else "was the result already"
    screen.say(f"{shown(output or path)}: {what}")
    return 0


@command.command()
@arguments.place("patches", "PATCH...", nargs=-1, required=True)
@arguments.output("The patch to write.", required=True)
@arguments.existing
@printing
def compose(screen: Screen, patches: tuple[str, ...], output: str, existing: Existing) -> int:
    """Write one patch that does what several PATCHes do in a row."""
    arguments.target(output, existing)
    with bar(screen, "Composing") as tell:
        delta.compose(patches, output, progress=tell, **existing.options())
    return _wrote(screen, output)


@command.command()
@_patch
@printing
def info(screen: Screen, patch: str) -> int:
    """Describe PATCH: versions, step, and the changed tensors."""
    found = delta.info(patch)
    screen.reports([found])
    rows = [
        (name, one.dtype, shape(one.shape), one.codec, f"{one.changed:,}", nbytes(one.nbytes))
        for name, one in found.tensors.items()
    ]
    if screen.quiet:
        return 0
    facts = [
        ("id", found.id),
        ("base", found.base),
        ("base data", found.base_digest),
        ("result", found.result),
        ("result data", found.result_digest),
    ]
    facts += [] if found.step is None else [("step", str(found.step))]
    facts += [
        (what, name) for what, names in (("added", found.added), ("removed", found.removed)) for name in names
    ]
    screen.table((Column("fact"), Column("value")), facts)
    screen.table(_COLUMNS, rows)
    return 0


def _wrote(screen: Screen, patch: str) -> int:
    found = delta.info(patch)
    screen.reports([found])
    size = nbytes(os.stat(patch).st_size)
    screen.say(f"wrote {shown(patch)}: {plural(len(found.tensors), 'tensor')} changed, {size}")
    return 0
