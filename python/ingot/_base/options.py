"""Groups of options: documented once in `ingot.typing`, shown and checked by functions that take them."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from ingot.errors import OptionError
from ingot.typing import CheckOptions, OpenOptions, ReadOptions, SaveOptions, SelectOptions, StorageOptions

from .checks import (
    SNAPSHOTS,
    alignment,
    checked_dtype,
    checked_progress,
    checked_threads,
    is_durable,
    known_checksums,
    one_of,
    room,
)
from .keys import checked_keys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ingot.typing import Align, Checksums, Format, Progress, Snapshot, Tell

    from .keys import Selector

Function = TypeVar("Function", bound="Callable[..., Any]")

# Their docstrings document the options of every function.
GROUPS = (ReadOptions, SelectOptions, CheckOptions, SaveOptions, OpenOptions)


class Loading(NamedTuple):
    """The options of reading, checking and selecting, checked, each with its default."""

    backend: str = "auto"
    threads: int | None = None
    progress: bool | Tell = False
    storage_options: StorageOptions | None = None
    max_header_size: int | None = None
    keys: Selector | None = None
    drop: Selector | None = None
    slices: Mapping[str, Any] | None = None
    # The code in a header.
    dtype: str | None = None
    verify: bool = False
    expected_sha256: str | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], options: Mapping[str, Any]) -> Loading:
        """Return the options that a caller of `function` gave as keywords."""
        if not options:
            # Programs load thousands of small files so.
            return _DEFAULT
        check_names(function, options)
        given = {**options}
        for name, checked in _CHECKED.items():
            if name in given:
                given[name] = checked(given[name])
        return cls(**given)


_DEFAULT = Loading()

# The options of loading that are converted, or checked before a file is opened.
_CHECKED: dict[str, Callable[[Any], Any]] = {
    "threads": checked_threads,
    "progress": checked_progress,
    "keys": lambda given: checked_keys("keys", given),
    "drop": lambda given: checked_keys("drop", given),
    "dtype": checked_dtype,
}


class Saving(NamedTuple):
    """The options of saving, each with its default. `SaveOptions` documents them."""

    format: Format | None = None
    durable: bool | None = None
    atomic: bool = True
    replace_read_only: bool = False
    progress: Progress = False
    snapshot: Snapshot = True
    reserve_header: int = 0
    align: Align = 8
    checksums: Checksums = None

    @classmethod
    def of(cls, function: Callable[..., Any], options: Mapping[str, Any]) -> Saving:
        """Return the options that a caller of `function` gave as keywords."""
        check_names(function, options)
        return cls(**options)

    def check_writable(self, file: object, background: bool) -> None:
        """Raise `OptionError` for options that need a name, since `file` is an object with a ``write``."""
        given = [name for name in _OF_NAMED_FILES if getattr(self, name) != self._field_defaults[name]]
        given += ["background"] * background
        if given:
            raise OptionError(
                f"{', '.join(given)}: goes with a file that is given by its name, found an object with a "
                f"write: {type(file).__name__}",
                code="needs-a-name",
                expected="a str, bytes or os.PathLike",
                found=type(file).__name__,
            )

    def layout(self) -> dict[str, Any]:
        """Return the options that decide the bytes, checked, by the names that the extension module has."""
        return {
            "reserve": room(self.reserve_header),
            "align": alignment(self.align),
            "checksums": known_checksums(self.checksums),
        }

    def snapshot_of(self) -> str | None:
        """Return where a background save copies its tensors: "host", "device", or None for no copy."""
        if not isinstance(self.snapshot, str):
            return "host" if self.snapshot else None
        return one_of("snapshot", self.snapshot, SNAPSHOTS)

    def of_named_file(self) -> dict[str, Any]:
        """Return the options of a file with a name, by the names that the extension module has."""
        return {
            "durable": is_durable(self.durable),
            "atomic": self.atomic,
            "replace_read_only": self.replace_read_only,
        }


# The options that an object with a `write` cannot keep.
_OF_NAMED_FILES = ("durable", "atomic", "replace_read_only", "snapshot")

_OPENING = dict.fromkeys(("strict", "lenient", "confine"), False)

DEFAULTS: dict[str, Any] = {**Loading._field_defaults, **Saving._field_defaults, **_OPENING}


def takes(options: type, **defaults: Any) -> Callable[[Function], Function]:
    """Return a decorator that shows each option of a TypedDict in place of a function's ``**options``.

    The options are in `inspect.signature`, and in the docstring instead of the entry ``**options``, as their
    group documents them. `defaults` are the defaults that differ from `DEFAULTS`.
    """

    def shows(function: Function) -> Function:
        # Imported here: frameworks have imported it, and the rest of this package does without.
        from inspect import Parameter, cleandoc, signature

        shown = signature(function)
        own = [one for one in shown.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        names = [name for name in options.__annotations__ if name not in shown.parameters]
        parameters = [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=defaults[name] if name in defaults else DEFAULTS[name],
                annotation=options.__annotations__[name].__forward_arg__,
            )
            for name in names
        ]
        whole: Any = function
        whole.__signature__ = shown.replace(parameters=own + parameters)
        # As forward references, which know the module in which they are resolved.
        whole.__annotations__.pop("options", None)
        whole.__annotations__ |= {name: options.__annotations__[name] for name in names}
        # Empty if Python runs without docstrings.
        before, marked, rest = cleandoc(function.__doc__ or "").partition("**options\n")
        _, _, after = rest.partition("\n")
        entries: dict[str, str] = {}
        for group in GROUPS:
            entries |= _entries(cleandoc(group.__doc__ or ""))
        if marked:
            whole.__doc__ = before + "".join(entries.get(name, "") for name in names) + after
        return function

    return shows


def _entries(doc: str) -> dict[str, str]:
    """Return the lines about each attribute, from a docstring that ends with them."""
    found: dict[str, str] = {}
    name = ""
    for line in doc.partition("\n----------\n")[2].splitlines():
        if not line.startswith(" "):
            name = line.partition(" : ")[0]
        found[name] = f"{found.get(name, '')}{line}\n"
    return found


def check_names(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise `TypeError` for a keyword that `function` does not take.

    The message has the nearest name, and all that the function takes.
    """
    taken: Any = function.__signature__  # type: ignore[attr-defined]
    wrong = next(iter(options.keys() - taken.parameters.keys()), None)
    if wrong is None:
        return
    from difflib import get_close_matches

    names = [name for name in taken.parameters if name != "self"]
    near = get_close_matches(wrong, names, 1)
    hint = f": did you mean {near[0]!r}?" if near else ":"
    owner, _, called = function.__qualname__.rpartition(".")
    raise TypeError(
        f"{owner if called == '__init__' else called}() got an unexpected keyword argument {wrong!r}{hint} "
        f"It takes {', '.join(names)}"
    )
