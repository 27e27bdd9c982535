"""Arguments and options that several commands have, with their checks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from ingot._base.checks import FLOATS, Existing, float_code
from ingot._native import is_url, local_path
from ingot.errors import OptionError, SafetensorError
from ingot.typing import Glob

from .screen import Screen, bar, no_such, printing, shown, warn
from .sources import is_model, models_of, opened

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    Given = TypeVar("Given", str, tuple[str, ...], None)
    Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Command(click.Command):
    """A command that refuses an option with two values. click would ignore the first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words after the command."""
        if not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(args=[*args])
            for one in order:
                if isinstance(one, click.Option) and not one.multiple and order.count(one) > 1:
                    raise click.UsageError(f"{one.opts[-1]} is given twice", ctx)
        return super().parse_args(ctx, args)


command = partial(click.command, cls=Command)


class Commands(click.Group):
    """A group of commands whose errors suggest the nearest name."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command for the first word."""
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            raise no_such_command(ctx, "command", args[0], names)
        return super().resolve_command(ctx, args)


def no_such_command(ctx: click.Context, what: str, word: str, names: Sequence[str]) -> click.UsageError:
    """Return the error for a word that is not a command."""
    from difflib import get_close_matches

    return click.UsageError(no_such(what, word, get_close_matches(word, names, 1)), ctx)


# The key for the destination in the context of a command.
_TARGET = "ingot.target"


def local(context: click.Context, parameter: click.Parameter, given: Given) -> Given:
    """Return a local path, or several."""
    return _each(given, _local)


def anywhere(context: click.Context, parameter: click.Parameter, given: Given) -> Given:
    """Return a path or a URL, or several. A ``file:`` URL becomes a path."""
    return _each(given, lambda one: one if is_url(one) else _local(one))


def _each(given: Given, located: Callable[[str], str]) -> Given:
    if isinstance(given, tuple):
        return tuple(map(located, given))
    return located(given) if isinstance(given, str) else given


def _local(given: str) -> str:
    # Opening an empty path fails.
    return os.fsdecode(local_path(given))


def paths(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Make a shell complete paths as usual."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def tensor_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of tensors of PATH, in natural order. A URL is not opened for it."""
    from click.shell_completion import CompletionItem

    given = context.params.get("paths") or (context.params.get("path"),)
    path = given[0]
    if not isinstance(path, str) or is_url(path):
        return []
    with suppress(SafetensorError, OSError):
        names = [info.name for info in opened(path).in_natural_order()]
        # Unprintable names cannot be completed.
        return [CompletionItem(name) for name in names if name.startswith(incomplete) and name.isprintable()]
    return []


def matching_paths(incomplete: str) -> list[CompletionItem]:
    """Return the paths that begin with `incomplete`, as words."""
    from glob import escape, glob

    from click.shell_completion import CompletionItem

    found = sorted(glob(escape(incomplete) + "*"))
    return [CompletionItem(os.path.join(path, "") if os.path.isdir(path) else path) for path in found]


def place(name: str, metavar: str | None = None, *, is_local: bool = False, **more: Any) -> Decorator:
    """Return an argument for a path or a URL, or only for a path if `is_local`. Takes click's options."""
    located = local if is_local else anywhere
    return click.argument(name, metavar=metavar, callback=located, shell_complete=paths, **more)


def file_option(*names: str, **more: Any) -> Decorator:
    """Return an option for a local path. Takes click's options."""
    return click.option(*names, callback=local, shell_complete=paths, **more)


# Any source of `sources.opened`. Opening a missing one reports the error.
path = place("path", "PATH")
several = place("paths", "PATH...", nargs=-1, required=True)
own = place("path", "PATH", is_local=True)
source = place("path", "SOURCE")
destination = place("destination", "DESTINATION", is_local=True)
dry_run: Decorator = click.option(
    "--dry-run", is_flag=True, help="Print what would be written, and write nothing."
)


def paths_and(metavar: str) -> Decorator:
    """Return an argument of paths and then other words. `models_and_words` separates them."""
    return click.argument(
        "words", metavar=f"PATH... {metavar}", nargs=-1, required=True, shell_complete=paths
    )


def models_and_words(words: Sequence[str], *, is_local: bool = True) -> tuple[list[str], list[str]]:
    """Return the models at the first words, and the other words.

    The first word is a path. The next words are paths too as long as they are directories, URLs or names of
    files of tensors.
    """
    end = next((at for at, word in enumerate(words) if at and not is_model(word)), len(words))
    found = [word if is_url(word) and not is_local else _local(word) for word in words[:end]]
    return models_of(found), [*words[end:]]


def no_word(what: str, words: Sequence[str]) -> click.UsageError:
    """Return the error for words that are all read as paths, where `what` should follow."""
    first = words[0]
    if len(words) == 1 or is_model(first) or os.path.exists(first):
        return click.UsageError(f"expected {what}")
    return click.UsageError(f"expected {what} after the paths, found `{shown(first)}` before them")


def output(help_text: str, *, required: bool = False) -> Decorator:
    """Return an option for the destination file."""
    return file_option("-o", "--output", metavar="FILE", required=required, help=help_text)


def expected_sha256(help_text: str) -> Decorator:
    """Return the option ``--expected-sha256``."""
    return click.option("--expected-sha256", metavar="HEX", help=help_text)


def max_shard_size(help_text: str, default: str | None = None) -> Decorator:
    """Return the option ``--max-shard-size``."""
    return click.option(
        "--max-shard-size",
        metavar="SIZE",
        default=default,
        show_default=default is not None,
        callback=lambda context, parameter, given: int(given) if given and given.isdecimal() else given,
        help=f"{help_text} SIZE is a number of bytes, or one with KB, MB, GB or TB.",
    )


class FloatDtype(click.Choice[str]):
    """A dtype that floats are converted to, in any spelling. Help and shells list the codes."""

    def __init__(self, codes: Sequence[str] = FLOATS) -> None:
        super().__init__(codes, case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the code of a dtype."""
        try:
            return float_code(value)
        except OptionError as error:
            self.fail(str(error), param, ctx)


def selecting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--keys`` and ``--drop`` to a command, which receives each as a selector, or None.

    The argument ``NAME...`` of a command is a short form of ``--keys``.
    """

    @keys_option("Select these tensors: a name, or a pattern with * and ?. Repeatable.")
    @click.option(
        "--drop",
        multiple=True,
        metavar="PATTERN",
        shell_complete=tensor_names,
        help="Leave out these tensors. Repeatable.",
    )
    @wraps(function)
    def command(
        *given: Any, keys: tuple[str, ...], drop: tuple[str, ...], names: tuple[str, ...] = (), **options: Any
    ) -> Any:
        return function(*given, keys=patterns((*names, *keys)), drop=patterns(drop), **options)

    return command


def keys_option(help_text: str) -> Decorator:
    """Return the option ``--keys``."""
    return click.option(
        "--keys", multiple=True, metavar="PATTERN", shell_complete=tensor_names, help=help_text
    )


def patterns(given: tuple[str, ...]) -> Glob | None:
    """Return a selector for the patterns, or None without patterns."""
    return Glob(*given) if given else None


def existing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for an existing destination to a command, which gets both as one argument."""

    @click.option("--overwrite", is_flag=True, help="Replace an existing file.")
    @click.option(
        "--replace-read-only", is_flag=True, help="With --overwrite: also replace a read-only file."
    )
    @wraps(function)
    def command(*given: Any, overwrite: bool, replace_read_only: bool, **options: Any) -> Any:
        if replace_read_only:
            needs("--replace-read-only", "--overwrite", overwrite)
        return function(*given, existing=Existing(overwrite, replace_read_only), **options)

    return command


class Output(NamedTuple):
    """How a command writes files, and where it prints messages."""

    screen: Screen
    existing: Existing
    dry_run: bool

    @contextmanager
    def saving(self, title: str) -> Iterator[dict[str, Any]]:
        """Show a bar, and yield the options of writing that functions take."""
        with bar(self.screen, title) as tell:
            yield {**self.existing.options(), "progress": tell}

    def answer(self, value: object) -> None:
        """Print the fields of a result as JSON."""
        self.screen.reports([value])

    def wrote(self, path: str, what: str) -> None:
        """Print a line about a file that was written, or would be without ``--dry-run``."""
        self.screen.say(f"{'would write' if self.dry_run else 'wrote'} {shown(path)}: {what}")


def writing(function: Callable[..., int]) -> Callable[..., Any]:
    """Add the options of all commands that write files to a command, which gets an `Output` first."""

    @existing
    @dry_run
    @printing
    @wraps(function)
    def command(screen: Screen, /, *given: Any, existing: Existing, dry_run: bool, **options: Any) -> int:
        return function(Output(screen, existing, dry_run), *given, **options)

    return command


def needs(option: str, other: str, is_given: object) -> None:
    """Refuse `option`, which has an effect only together with `other`."""
    if not is_given:
        raise click.UsageError(f"{option} has no effect without {other}")


def exclude(option: str, other: str, is_given: object) -> None:
    """Refuse `option`, which has no effect together with `other`."""
    if is_given:
        raise click.UsageError(f"{option} has no effect with {other}")


def pairs(given: Iterable[str]) -> dict[str, str]:
    """Return the pairs that the user typed as ``KEY=VALUE``, each key once."""
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.UsageError(f"expected KEY=VALUE, found `{shown(text)}`")
        if key in found:
            raise click.UsageError(f"key `{shown(key)}` is given twice")
        found[key] = value
    return found


def target(given: str, existing: Existing) -> str:
    """Return a path to write to. Without ``--overwrite`` it must not exist.

    `honest_when_interrupted` reports it.
    """
    if os.path.isdir(given):
        raise click.UsageError(f"{shown(given)}: is a directory: expected the name of a file")
    existing.check(given)
    click.get_current_context().meta[_TARGET] = given, _identity(given)
    return given


@contextmanager
def honest_when_interrupted(context: click.Context) -> Iterator[None]:
    """Warn if Ctrl-C came after the file of `target` was renamed."""
    try:
        yield
    except (click.Abort, KeyboardInterrupt):
        given, before = context.meta.get(_TARGET, (None, None))
        if given is not None and _identity(given) not in (None, before):
            warn(f"{shown(given)}: is written and complete: the interruption came after it")
        raise


def _identity(path: str) -> tuple[int, int, int] | None:
    """Return facts that change if the file at `path` is changed or replaced."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino, found.st_mtime_ns
    return None


def pattern(text: str) -> re.Pattern[str]:
    """Return a regular expression that the user typed."""
    try:
        return re.compile(text)
    except re.error as error:
        raise click.UsageError(f"{shown(text)}: is not a regular expression: {error}") from None
