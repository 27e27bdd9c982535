"""``ingot completion``: what a shell needs to complete commands and options."""

from __future__ import annotations

import click

_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def command(shell: str) -> None:
    """Print the lines that make a shell complete `ingot`.

    For bash: ingot completion bash >> ~/.bashrc
    """
    from click.shell_completion import get_completion_class

    from .program import program

    kind = get_completion_class(shell)
    assert kind is not None, "one of click's own"
    click.echo(kind(program, {}, "ingot", "_INGOT_COMPLETE").source())
