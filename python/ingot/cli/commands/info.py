"""``ingot info``: one tensor."""

from __future__ import annotations

import click

from ingot.cli import arguments
from ingot.cli.screen import Screen, printing
from ingot.cli.sources import opened
from ingot.cli.tables import Column
from ingot.cli.wording import nbytes, shape, shown

from .ls import described


@arguments.command()
@arguments.path
@click.argument("name", shell_complete=arguments.tensor_names)
@printing
def command(screen: Screen, path: str, name: str) -> int:
    """Print dtype, shape, size and position of one tensor."""
    source = opened(path)
    facts = described(source, source.handle.info(name))
    if screen.as_json:
        screen.answer(facts)
        return 0
    dims, size = facts["shape"], facts["nbytes"]
    assert isinstance(dims, tuple)
    assert isinstance(size, int)
    told = {
        "dtype": facts["dtype"],
        "shape": shape(dims),
        "parameters": f"{facts['parameters']:,}",
        "size": nbytes(size) if size < 1000 else f"{nbytes(size)} ({size:,} B)",
        "begin": facts["begin"],
        "end": facts["end"],
        "file": facts["file"],
    }
    if screen.is_terminal:
        screen.say(screen.strong(shown(name)))
        for label, text in told.items():
            screen.say(f"  {label:<12}{shown(str(text))}")
    else:
        plain = {**facts, "shape": shape(dims)}
        screen.table((Column("field"), Column("value")), [(key, str(value)) for key, value in plain.items()])
    return 0
