"""``ingot completion``: scripts by which shells complete commands and options."""

from __future__ import annotations

import click

from ingot.cli import arguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from click.shell_completion import FishComplete

_SHELLS = ("bash", "zsh", "fish")


@arguments.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def command(shell: str) -> None:
    """Print a script that makes a shell complete `ingot`.

    For bash: ingot completion bash >> ~/.bashrc
    """
    from click.shell_completion import add_completion_class, get_completion_class

    from ingot.cli.program import program

    add_completion_class(_fish())
    kind = get_completion_class(shell)
    assert kind is not None, "one of click's own"
    click.echo(kind(program, {}, "ingot", "_INGOT_COMPLETE").source())


def _fish() -> type[FishComplete]:
    """Return click's completion for fish, changed to keep the text after a comma."""
    from click.shell_completion import FishComplete

    class WithCommas(FishComplete):
        source_template = FishComplete.source_template.replace('split ","', 'split --max 1 ","')

    return WithCommas
