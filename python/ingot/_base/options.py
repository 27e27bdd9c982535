"""Groups of options: documented once in `ingot.typing`, shown and checked by the functions that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Required, TypeVar

from ingot import typing
from ingot._native import local_path, shown_url
from ingot.errors import OptionError, SafetensorError

from . import checks
from .frameworks import checked_tensor, module_of
from .keys import checked_keys
from .rules import checked_rules

if TYPE_CHECKING:
    from .keys import Selector
    from .layouts import Rules

    # For overloads: the type of the result depends on an option.

    class WithMetadata(typing.LoadOptions):
        return_metadata: Required[Literal[True]]

    class WithoutMetadata(typing.LoadOptions, total=False):
        return_metadata: Literal[False]

    class InBackground(typing.SaveOptions):
        background: Required[Literal[True]]

    class AtOnce(typing.SaveOptions, total=False):
        background: Literal[False]


Function = TypeVar("Function", bound="Callable[..., Any]")

# Their docstrings document the options of every function.
GROUPS = (
    typing.ReadOptions,
    typing.SelectOptions,
    typing.CheckOptions,
    typing.SaveOptions,
    typing.ShardOptions,
    typing.OpenOptions,
    typing.LayoutOptions,
)
RARE = tuple(typing.WriteOptions.__annotations__)


class Loading(NamedTuple):
    """The options of reading, checking and selecting, checked, each with its default."""

    backend: str = "auto"
    threads: int | None = None
    progress: bool | typing.Tell = False
    storage_options: typing.StorageOptions | None = None
    max_header_size: int | None = None
    keys: Selector | None = None
    drop: Selector | None = None
    slices: Mapping[str, Any] | None = None
    # The code in a header.
    dtype: str | None = None
    verify: bool = False
    expected_sha256: str | None = None
    # True, or the code of the dtype of dequantised weights.
    dequantize: bool | str = False
    remap: Rules | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], options: Mapping[str, Any], source: object) -> Loading:
        """Return the options that a caller of `function` passed as keywords. `source` is its source."""
        if not options and (isinstance(source, str) or checks.is_path(source)):
            # Programs load thousands of small files so.
            return DEFAULT_LOADING
        return cls.among(checked(function, {_source_of(function): source, **options}))

    @classmethod
    def among(cls, given: Mapping[str, Any]) -> Loading:
        """Return the options of reading among the checked arguments `given`."""
        return cls(**{name: given[name] for name in cls._fields if name in given})

    @property
    def selects(self) -> bool:
        """Whether tensors are left out, sliced or converted."""
        return (self.keys, self.drop, self.slices, self.dtype) != (None,) * 4

    @property
    def computes(self) -> bool:
        """Whether tensors are computed from the stored ones."""
        return self.dequantize is not False or self.remap is not None

    def as_stored(self) -> Loading:
        """Return the options for reading the tensors as they are stored."""
        return self._replace(dequantize=False, remap=None) if self.computes else self

    @property
    def proves(self) -> bool:
        """Whether a digest is compared."""
        return self.verify or self.expected_sha256 is not None


DEFAULT_LOADING: Loading = Loading()


class Saving(NamedTuple):
    """The options of writing, checked, each with its default. See `SaveOptions` and `WriteOptions`."""

    metadata: dict[str, str] | None = None
    format: typing.Format | None = None
    overwrite: bool = False
    atomic: bool = True
    durable: bool | None = None
    progress: bool | typing.Tell = False
    # None if the caller passed none.
    checksums: list[str] | None = None
    background: bool = False
    align: int = 8
    reserve_header: int = 0
    replace_read_only: bool = False
    snapshot: typing.Snapshot = True
    storage_options: typing.StorageOptions | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], given: Mapping[str, Any]) -> Saving:
        """Return the options among the arguments of `function`, checked as in `checked`, or its defaults."""
        return cls.among(function, checked(function, given))

    @classmethod
    def among(cls, function: Any, given: Mapping[str, Any]) -> Saving:
        """Return the options of writing among the checked arguments `given`. `function` has the defaults."""
        known = {**function._defaults, **given, **(given.get("write_options") or {})}
        return cls(**{name: known[name] for name in cls._fields if name in known})

    def check_writable(self, file: object) -> None:
        """Raise `OptionError` for options that need a name, since `file` is an object with a ``write``."""
        given = [name for name in _OF_NAMED_FILES if getattr(self, name) != self._field_defaults[name]]
        given += ["overwrite"] * (not self.overwrite)
        if given:
            kind = type(file).__name__
            raise OptionError(
                f"{', '.join(given)}: needs a file that is given by its name, found an object with a write: "
                f"{kind}",
                code="needs-a-name",
                expected="a str, bytes or os.PathLike",
                found=kind,
            )

    def check_url(self, url: str) -> None:
        """Raise `OptionError` for options that need a path, since `url` is a URL of a store."""
        given = [name for name in ("atomic", "replace_read_only") if getattr(self, name) != DEFAULTS[name]]
        if given:
            raise OptionError(
                f"{shown_url(url)}: {', '.join(given)}: needs a path on this machine, found a URL — an "
                "object of a store is always replaced as a whole",
                code="url-for-path",
                path=shown_url(url),
            )

    @property
    def existing(self) -> checks.Existing:
        """The rules for an existing file at the destination."""
        return checks.Existing(self.overwrite, self.replace_read_only)

    @property
    def flush(self) -> bool:
        """Whether the file is flushed to the disk."""
        return checks.is_durable(self.durable)

    def of_writer(self) -> dict[str, Any]:
        """Return the options that `ingot.Writer` takes."""
        given = {name: getattr(self, name) for name in RARE if name != "snapshot"}
        return {"overwrite": self.overwrite, "durable": self.flush, "write_options": given}

    def layout(self) -> dict[str, Any]:
        """Return the options that decide the bytes, by the names that the extension module has."""
        return {"reserve": self.reserve_header, "align": self.align, "checksums": self.checksums or []}

    def of_new_file(self) -> dict[str, Any]:
        """Return the options of a file whose tensors are written one by one, in the same way."""
        return {"reserve": self.reserve_header, "align": self.align, **self.of_named_file()}

    def snapshot_of(self) -> str | None:
        """Return the location of a background save's copies: "host", "device", or None for no copy."""
        if isinstance(self.snapshot, str):
            return self.snapshot
        return "host" if self.snapshot else None

    def of_named_file(self) -> dict[str, Any]:
        """Return the options of a file with a name, by the names that the extension module has."""
        return {"durable": self.flush, **self.existing._asdict()}


# The options that are not supported for an object with a `write`.
_OF_NAMED_FILES = ("durable", "atomic", "replace_read_only", "snapshot", "background", "storage_options")

DEFAULTS: dict[str, Any] = {
    **Loading._field_defaults,
    **Saving._field_defaults,
    **dict.fromkeys(("strict", "lenient", "confine"), False),
    "write_options": None,
}

# Options that are one of a few words.
WORDS = {
    "backend": checks.BACKENDS,
    "contiguous": ("copy", "error"),
    "count": ("logical", "stored"),
    "how": ("auto", "server", "page"),
    "on_duplicate": ("error", "first", "last"),
    "orphaned": ("refuse", "finish"),
    "to": ("peft", "kohya", "diffusers"),
}

# How the value of an option is checked and converted, for every function.
_CHECKED: dict[str, Callable[[Any], Any]] = {
    "progress": checks.checked_progress,
    "storage_options": checks.checked_storage_options,
    "keys": lambda given: checked_keys("keys", given),
    "drop": lambda given: checked_keys("drop", given),
    "dequantize": checks.checked_dequantize,
    "dtype": checks.checked_dtype,
    "remap": checked_rules,
    "expected_sha256": checks.checked_sha256,
    "metadata": checks.texts,
    "others": partial(checks.texts, option="others"),
    "format": lambda format: None if format is None else checks.known_format(format),
    "framework": lambda framework: module_of(framework) and framework,
    "durable": checks.checked_durable,
    "checksums": lambda checksums: None if checksums is None else checks.known_checksums(checksums),
    "align": checks.alignment,
    "reserve_header": partial(checks.counted, "reserve_header", code="invalid-reserve"),
    "replace_read_only": partial(checks.checked_flag, "replace_read_only"),
    "snapshot": checks.checked_snapshot,
    "max_shard_size": checks.checked_shard_size,
    "filename_pattern": checks.checked_pattern,
    "threads": partial(checks.counted, "threads", least=1, code="invalid-threads", or_none=True),
    "max_header_size": partial(checks.counted, "max_header_size", least=1, or_none=True),
    "max_nbytes": partial(checks.counted, "max_nbytes", or_none=True),
    "nbytes": partial(checks.counted, "nbytes", or_none=True),
    "ahead": partial(checks.counted, "ahead"),
    "height": partial(checks.counted, "height", least=1, most=100_000),
    "bins": partial(checks.counted, "bins", most=1_000, code="invalid-bins"),
    "algorithm": partial(checks.checked_text, "algorithm"),
    "name": checks.checked_name,
    "tensor": checked_tensor,
    "root": partial(checks.checked_text, "root", or_none=True),
    "strip_prefix": partial(checks.checked_text, "strip_prefix"),
    **{name: partial(checks.one_of, name, choices=words) for name, words in WORDS.items()},
}


# How an argument is checked and converted that has this annotation.
_OF_TYPES: dict[str, Callable[[Any], Any]] = {
    "Source": checks.checked_source,
    "Source | None": lambda given: None if given is None else checks.checked_source(given),
    "Iterable[Source]": checks.checked_sources,
    "Path": local_path,
    "Path | Writable": checks.checked_written,
}


def _check_of(function: Any, name: str) -> Callable[[Any], Any] | None:
    """Return the check of an option: its own, otherwise the check of its annotation, otherwise None."""
    if name in _CHECKED:
        return _CHECKED[name]
    shown: Any = getattr(function, "__signature__", None)
    annotation = shown.parameters[name].annotation if shown is not None and name in shown.parameters else ""
    if annotation == "bool":
        return partial(checks.checked_flag, name)
    is_mapping = annotation.startswith("Mapping[") and annotation.endswith("| None")
    return partial(checks.checked_mapping, name) if is_mapping else None


def _source_of(function: Any) -> str:
    """Return the name of the parameter for the source of `function`."""
    kinds: dict[str, Callable[[Any], Any]] = function._kinds
    return next(name for name, check in kinds.items() if check is checks.checked_source)


# Names in `locals` that are not arguments.
_NOT_ARGUMENTS = ("self", "cls", "options", "__class__")


def checked(
    function: Callable[..., Any], given: Mapping[str, Any], **own: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return arguments of `function`, checked and converted. An error names the function.

    `given` are arguments by name, mostly ``locals()`` at the start of the function. Its ``options``, if any,
    are arguments too. `own` has checks for options whose meaning differs in this function.
    """
    found = {**given, **given.get("options", {})}
    for name in _NOT_ARGUMENTS:
        found.pop(name, None)
    check_names(function, found)
    usual: dict[str, Any] = getattr(function, "_usual", {})
    kinds: dict[str, Callable[[Any], Any]] = getattr(function, "_kinds", {})
    for name, value in found.items():
        if name in usual and value is usual[name]:
            continue
        if name in kinds:
            found[name] = argument(function, name, value, own.get(name, kinds[name]))
            continue
        try:
            if name == "write_options":
                found[name] = _rare(function, value)
            elif check := own.get(name) or _check_of(function, name):
                found[name] = check(value)
        except (TypeError, SafetensorError) as fault:
            fault.args = (f"{_called(function)}(): {fault}",)
            raise
    return found


def argument(function: Callable[..., Any], name: str, value: Any, check: Callable[[Any], Any]) -> Any:
    """Return the argument `name` of `function`, checked and converted. An error names both."""
    try:
        return check(value)
    except (TypeError, ValueError, SafetensorError) as fault:
        fault.args = (f"{_called(function)}(): {name}: {fault}",)
        raise


def _rare(function: Any, given: Any) -> dict[str, Any]:
    """Return the checked values of `write_options`."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise TypeError(f"write_options must be a dict or None, found {type(given).__name__}")
    taken: tuple[str, ...] = function._rare
    wrong = next((name for name in given if name not in taken), None)
    if wrong is not None:
        message = f"write_options has no key {wrong!r}{_hint(str(wrong), taken)} It takes {', '.join(taken)}"
        raise OptionError(message, code="unknown-write-option", expected=taken, found=wrong)
    return {name: _CHECKED[name](value) for name, value in given.items()}


def takes(
    options: type = typing.NoOptions, *, rare: tuple[str, ...] | None = None, **defaults: Any
) -> Callable[[Function], Function]:
    """Return a decorator that shows each option of a TypedDict in the signature instead of ``**options``.

    The options are in `inspect.signature`, and in the docstring instead of the entry ``**options``, as their
    group documents them. `rare` are the keys of `write_options` that the function takes, by default all, and
    ``snapshot`` only together with `background`. `defaults` are the defaults that differ from `DEFAULTS`.
    """

    def shows(function: Function) -> Function:
        # Imported here: frameworks import it anyway, and the rest of this package does not need it.
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
        usual = RARE if "background" in shown.parameters else RARE[:-1]
        whole._defaults, whole._rare = defaults, rare or usual
        whole._kinds = {one.name: _OF_TYPES[one.annotation] for one in own if one.annotation in _OF_TYPES}
        taken = (one for one in whole.__signature__.parameters if one not in ("self", "cls"))
        whole._taken = dict.fromkeys(taken)
        # Defaults that `checked` returns unchanged.
        given = whole.__signature__.parameters.items()
        same = {name: one.default for name, one in given if one.default in (None, False, True, (), ...)}
        whole._usual = {name: value for name, value in same.items() if name != "write_options"}
        # As forward references, which know their module.
        called: Any = vars(whole)["__init__"] if isinstance(whole, type) else whole
        hints = called.__annotations__
        hints.pop("options", None)
        hints |= {name: options.__annotations__[name] for name in names}
        # Empty if Python runs without docstrings.
        before, marked, rest = cleandoc(function.__doc__ or "").partition("**options\n")
        _, _, after = rest.partition("\n")
        if marked:
            whole.__doc__ = before + "".join(_documented().get(name, "") for name in names) + after
        return function

    return shows


@cache
def _documented() -> dict[str, str]:
    """Return the lines about each option, from the ends of the groups' docstrings."""
    from inspect import cleandoc

    found: dict[str, str] = {}
    for group in GROUPS:
        name = ""
        for line in cleandoc(group.__doc__ or "").partition("\n----------\n")[2].splitlines():
            if not line.startswith(" "):
                name = line.partition(" : ")[0]
                found[name] = ""
            found[name] += f"{line}\n"
    return found


def check_names(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise `TypeError` for a keyword that `function` does not take.

    The message has the nearest name, and all that the function takes.
    """
    if not options:
        return
    # A function that accepts any keyword has no options.
    taken: dict[str, None] | None = getattr(function, "_taken", None)
    for name in options:
        if taken is not None and name not in taken:
            raise unexpected(function, name, taken)


def unexpected(function: Callable[..., Any], wrong: str, names: Iterable[str]) -> TypeError:
    """Return the error for a keyword that is not among `names`, which `function` takes."""
    start = f"{_called(function)}() got an unexpected keyword argument {wrong!r}"
    return TypeError(f"{start}{_hint(wrong, names)} It takes {', '.join(names)}")


def _hint(wrong: str, names: Iterable[str]) -> str:
    near = checks.nearest(wrong, names)
    return f": did you mean {near!r}?" if near else ":"


def _called(function: Callable[..., Any]) -> str:
    """Return the name by which users call a function or a class."""
    owner, _, called = function.__qualname__.rpartition(".")
    return owner if called == "__init__" else called
