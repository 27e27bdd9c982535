"""``ingot repair``: a valid file of what is sound in a broken one."""

from __future__ import annotations

import click

from ingot._write import repair
from ingot.cli import arguments
from ingot.cli.progress import bar
from ingot.cli.screen import Screen, printing
from ingot.cli.tables import Column
from ingot.cli.wording import plural, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingot._base.checks import Existing
    from ingot._write.repair import Finding

_COLUMNS = (Column("rule"), Column("tensor"), Column("found"), Column("done"))


@click.command(short_help="Write a valid file of what is sound in a broken one.")
@arguments.source
@arguments.destination
@arguments.writing
@printing
def command(screen: Screen, path: str, destination: str, existing: Existing, dry_run: bool) -> int:
    """Write what is sound in SOURCE to DESTINATION, and say what was wrong.

    Tensors that are cut off, overlap, or have entries that cannot be read are left out, and so are bytes that
    belong to no tensor; metadata that is no text is kept as its JSON. Exits with 0 also where tensors were
    left out.
    """
    arguments.target(destination, existing)
    if dry_run:
        opened, findings = repair.examined(path)
        tensors = len(opened.sizes(0))
    else:
        with bar(screen, "Repairing") as tell:
            done = repair.repair(path, destination, **existing.options(), progress=tell)
        tensors, findings = done.tensors, done.findings
    named = [finding._asdict() for finding in findings]
    screen.answer({"dry_run": dry_run, "file": destination, "tensors": tensors, "findings": named})
    screen.table(_COLUMNS, list(map(_row, findings)))
    if screen.is_terminal:
        verb = "would write" if dry_run else "wrote"
        screen.say(f"{verb} {shown(destination)}: {plural(tensors, 'tensor')}; {_summary(findings)}")
    return 0


def _row(finding: Finding) -> tuple[str, str, str, str]:
    return finding.code, finding.tensor or "", finding.found, finding.done.replace("-", " ")


def _summary(findings: Sequence[Finding]) -> str:
    if not findings:
        return "the source breaks no rule"
    left_out = sum(finding.done == "tensor-left-out" for finding in findings)
    return f"{plural(len(findings), 'finding')}, {plural(left_out, 'tensor')} left out"
