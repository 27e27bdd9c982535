"""``ingot repair``: the intact tensors of a damaged file as a new file."""

from __future__ import annotations

from ingot._write import edit
from ingot.cli import arguments
from ingot.cli.screen import Column, plural

_COLUMNS = (Column("rule"), Column("tensor"), Column("found", wraps=True), Column("done"))


@arguments.command(short_help="Write the intact tensors of a damaged file to a new file.")
@arguments.source
@arguments.destination
@arguments.writing
def command(to: arguments.Output, path: str, destination: str) -> int:
    """Write the intact tensors of SOURCE to DESTINATION, and list the faults.

    The new file lacks tensors that are truncated, overlap, or have an unreadable entry, and bytes that belong
    to no tensor. Metadata values that are not text are kept as JSON. The exit status is 0 even if tensors
    were left out.
    """
    arguments.target(destination, to.existing)
    if to.dry_run:
        done = edit.planned(path, destination)
    else:
        with to.saving("Repairing") as how:
            done = edit.repair(path, destination, **how)
    to.answer(done)
    to.screen.table(_COLUMNS, list(map(_row, done.findings)))
    if to.screen.is_terminal:
        to.wrote(destination, f"{plural(done.tensors, 'tensor')}; {_summary(done)}")
    return 0


def _row(finding: edit.Finding) -> tuple[str, str, str, str]:
    return finding.code, finding.tensor or "", finding.found, finding.done.replace("-", " ")


def _summary(done: edit.Repair) -> str:
    if not done.findings:
        return "the source breaks no rule"
    return f"{plural(len(done.findings), 'finding')}, {plural(len(done.left_out), 'tensor')} left out"
