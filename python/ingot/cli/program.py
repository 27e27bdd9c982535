"""The commands of `ingot` by name, and the reports of their failures."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from ingot import __version__
from ingot.errors import SafetensorError

from . import arguments
from .screen import discard_output, fail, failure, in_options, one_line, warn

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Each command is in the module of its name, and is imported when it is used.
SECTIONS = {
    "Look": ("summary", "ls", "tree", "info", "params", "layers", "stats", "cat", "mem", "view"),
    "Check": ("check", "verify", "hash", "diff", "doctor"),
    "Metadata": ("meta", "modelspec"),
    "Make other files": (
        "convert",
        "export",
        "split",
        "merge",
        "lora",
        "rename",
        "rewrite",
        "cast",
        "delta",
        "repair",
    ),
    "Transfer": ("download", "upload", "credentials"),
    "Shell": ("completion",),
}
COMMANDS = tuple(name for names in SECTIONS.values() for name in names)
_OWN_OPTIONS = ("-h", "--help", "--version")
# The variable by which shells request completions.
_COMPLETE = "_INGOT_COMPLETE"


class Program(arguments.Commands):
    """The commands. A word that is not a command is a path to summarise."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = import_module(f"{__package__}.commands.{cmd_name}").command
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take ``ingot PATH`` for ``ingot summary PATH``."""
        if args and args[0] not in COMMANDS and args[0] not in _OWN_OPTIONS:
            _refuse_misspelt(ctx, args[0])
            args = ["summary", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands, and paths, since ``ingot PATH`` is a command too."""
        from click.shell_completion import CompletionItem

        commands = super().shell_complete(ctx, incomplete)
        if not commands:
            return [CompletionItem(incomplete, type="file")]
        # A shell that receives words does not complete paths itself, so paths must be among the words.
        return commands + arguments.matching_paths(incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, kind by kind."""
        for title, names in SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [(name, found.get_short_help_str(90)) for name, found in commands if found]
                )


def _refuse_misspelt(ctx: click.Context, word: str) -> None:
    """Raise if `word` looks like a command and is not a path."""
    if word.startswith("-") or not word.replace("-", "").isalpha() or os.path.lexists(word):
        return
    raise arguments.no_such_command(ctx, "file or command", word, COMMANDS)


@click.group(
    cls=Program,
    name="ingot",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="ingot", message="%(prog)s %(version)s")
def program() -> None:
    """Inspect, check, compare, change and convert files of tensors.

    `ingot PATH` prints a summary. A PATH is a .safetensors or .bt file, the index or the directory of a
    sharded checkpoint, or a URL. `ingot PATH`, `ingot ls` and `ingot convert` also read other formats. Type
    ./ls for a file that has the name of a command.

    Tables on a terminal have titles and fit its width. In a pipe, as with `ls` and `gh`, they have no titles:
    each line is a row with tabs between its cells, and nothing is cut. --json and --csv print titles and all
    facts for programs.

    \b
    Exit status:
      0    success
      1    a file is invalid or differs, a check found a problem, or reading or writing failed
      2    wrong usage: an unknown option, a missing file, tensor or package, an existing destination
      130  interrupted by Ctrl-C
      141  the reader of the output closed the pipe
    """  # noqa: D301 - click needs the character


def run(given: Sequence[str]) -> int:
    """Run a command and return its exit status. A failure is printed on one line."""
    _never_fail_to_encode()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_warned, given)
            return _carried_out(_expanded(given))
    except BrokenPipeError:
        discard_output()
        return 141


def _warned(given: Sequence[str], message: Warning | str, *place: Any, **rest: Any) -> None:
    """Print a warning as errors are printed, without a line of Python."""
    warn(one_line(in_options(str(message)), given))


def _expanded(given: Sequence[str]) -> list[str]:
    """Expand words with `*` and `?` to file names, because shells of Windows do not."""
    if os.name != "nt":
        return list(given)
    from glob import glob

    from ingot._base.keys import is_pattern
    from ingot._native import is_url

    expanded = []
    for word in given:
        # A URL may have a query, and a pattern for names of tensors has no path.
        may_match = is_pattern(word) and not is_url(word)
        expanded += (sorted(glob(word)) if may_match else []) or [word]
    return expanded


def _carried_out(given: list[str]) -> int:
    try:
        code = _invoked(given)
        # The last bytes may fail to be written, too.
        sys.stdout.flush()
        return code
    except click.exceptions.NoArgsIsHelpError as error:
        # The message of this error is the help.
        sys.stderr.write(error.format_message() + "\n")
        return 2
    except BrokenPipeError:
        raise
    except _FAULTS as error:
        # `main` reports that the packages of the command are missing.
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "click":
            raise
        options = given[: given.index("--")] if "--" in given else given
        return fail(failure(error, given), "--json" in options)


def _invoked(given: list[str]) -> int:
    # Not click's own `main`: it turns a closed pipe into exit status 1.
    instruction = os.environ.get(_COMPLETE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(program, {}, "ingot", _COMPLETE, instruction)
    try:
        with program.make_context("ingot", given) as context, arguments.honest_when_interrupted(context):
            code = program.invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    return code if isinstance(code, int) else 0


_FAULTS = (
    click.ClickException,
    click.Abort,
    KeyboardInterrupt,
    SafetensorError,
    OSError,
    ImportError,
    MemoryError,
)


def _never_fail_to_encode() -> None:
    """Make the output escape characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
