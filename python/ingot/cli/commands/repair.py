"""``ingot repair``: a valid file of what is sound in a broken one."""

from __future__ import annotations

from ingot._write import repair
from ingot.cli import arguments
from ingot.cli.progress import bar
from ingot.cli.screen import Screen, described, printing
from ingot.cli.tables import Column
from ingot.cli.wording import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingot._base.checks import Existing
    from ingot._write.repair import Finding

_COLUMNS = (Column("rule"), Column("tensor"), Column("found"), Column("done"))


@arguments.command(short_help="Write the intact tensors of a damaged file to a new file.")
@arguments.source
@arguments.destination
@arguments.writing
@printing
def command(screen: Screen, path: str, destination: str, existing: Existing, dry_run: bool) -> int:
    """Write the intact tensors of SOURCE to DESTINATION, and list what is wrong.

    The new file lacks tensors that are truncated, overlap, or have an unreadable entry, and bytes that belong
    to no tensor. Metadata values that are not text are kept as JSON. The exit status is 0 even if tensors
    were left out.
    """
    arguments.target(destination, existing)
    if dry_run:
        opened, findings = repair.examined(path)
        tensors = len(opened.sizes(0))
    else:
        with bar(screen, "Repairing") as tell:
            done = repair.repair(path, destination, **existing.options(), progress=tell)
        tensors, findings = done.tensors, done.findings
    answer = {"dry_run": dry_run, "destination": destination, "tensors": tensors}
    screen.answer({**answer, "findings": described(findings)})
    screen.table(_COLUMNS, list(map(_row, findings)))
    if screen.is_terminal:
        screen.wrote(dry_run, destination, f"{plural(tensors, 'tensor')}; {_summary(findings)}")
    return 0


def _row(finding: Finding) -> tuple[str, str, str, str]:
    return finding.code, finding.tensor or "", finding.found, finding.done.replace("-", " ")


def _summary(findings: Sequence[Finding]) -> str:
    if not findings:
        return "the source breaks no rule"
    left_out = sum(finding.done == "tensor-left-out" for finding in findings)
    return f"{plural(len(findings), 'finding')}, {plural(left_out, 'tensor')} left out"
