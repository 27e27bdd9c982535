"""``ingot info``: one tensor."""

from __future__ import annotations

import click

from ingot.cli import arguments
from ingot.cli.screen import Column, Screen, nbytes, printing, shape, shown
from ingot.cli.sources import opened

from .ls import described


@arguments.command()
@arguments.path
@click.argument("name", shell_complete=arguments.tensor_names)
@printing
def command(screen: Screen, path: str, name: str) -> int:
    """Print dtype, shape, size and position of one tensor."""
    source = opened(path)
    info = source.handle.info(name)
    facts = described(source, info)
    if screen.as_json:
        screen.answer(facts)
        return 0
    size = nbytes(info.nbytes)
    lines = {
        "dtype": info.dtype,
        "shape": shape(info.shape),
        "parameters": f"{facts['parameters']:,}",
        "size": size if info.nbytes < 1000 else f"{size} ({info.nbytes:,} B)",
        **{key: facts[key] for key in ("begin", "end", "file")},
    }
    if screen.is_terminal:
        screen.say(screen.strong(shown(name)))
        for label, text in lines.items():
            screen.say(f"  {label:<12}{shown(str(text))}")
    else:
        plain = {**facts, "shape": shape(info.shape)}
        screen.table((Column("field"), Column("value")), [(key, str(value)) for key, value in plain.items()])
    return 0
