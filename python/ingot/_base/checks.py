"""What callers give, checked at the door: after it nothing asks again."""

from __future__ import annotations

from errno import EACCES, EEXIST
from os import W_OK, access, environ, fsdecode, stat, strerror, supports_effective_ids
from os.path import lexists, samestat
from typing import NamedTuple, TypeVar

from ingot.errors import OptionError, SaveError
from ingot.typing import LoadOptions, ReadOptions, SaveOptions, StorageOptions

from .dtypes import F4_PACKED, IN_FILES, code_of, meant, word_of
from .text import _quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import Any, Literal

    from ingot._native import TensorInfo
    from ingot.typing import Align, Checksums, Dtype, Format, Progress, Snapshot, Tell

    Leniency = Literal["refuse", "accept", "salvage"]

#: The other names that `storage_options` takes, in small letters or large: those of s3fs, gcsfs and adlfs,
#: and of object_store with all that is built on it.
OTHER_NAMES = {
    "access_key_id": "key username aws_access_key_id",
    "secret_access_key": "secret password aws_secret_access_key",
    "session_token": "aws_session_token aws_token",
    "token": "bearer_token google_bearer_token azure_storage_token",
    "region": "region_name aws_region default_region aws_default_region",
    "endpoint": "endpoint_url aws_endpoint aws_endpoint_url aws_endpoint_url_s3 base_url google_base_url "
    "azure_endpoint azure_storage_endpoint",
    "request_payer": "requester_pays aws_request_payer",
    "profile": "aws_profile",
    "anonymous": "anon skip_signature aws_skip_signature google_skip_signature azure_skip_signature",
    "credentials_file": "service_account service_account_path google_service_account "
    "google_service_account_path application_credentials google_application_credentials",
    "account": "account_name azure_storage_account_name",
    "account_key": "access_key master_key azure_storage_account_key azure_storage_access_key "
    "azure_storage_master_key",
    "sas_token": "sas_key azure_storage_sas_key azure_storage_sas_token",
    "connection_string": "azure_storage_connection_string",
    "client_id": "azure_client_id azure_storage_client_id",
    "tenant_id": "authority_id azure_tenant_id azure_authority_id azure_storage_tenant_id "
    "azure_storage_authority_id",
    "client_secret": "azure_client_secret azure_storage_client_secret",
    "headers": "default_headers",
    "ca_file": "root_certificate",
    # What says the same in other words: True where the bucket stands in the host; "path" or "virtual"; the
    # host of an endpoint; whether an endpoint may be one of http://; True, or a `ca_file`; more options.
    "virtual_hosted_style_request": "aws_virtual_hosted_style_request",
    "addressing_style": "",
    "account_host": "",
    "allow_http": "aws_allow_http",
    "verify": "",
    "client_kwargs": "config_kwargs s3 client_options",
}
OPTIONS = tuple(StorageOptions.__annotations__)
#: Which option each name is.
NAMES = {name: name for name in (*OPTIONS, *OTHER_NAMES)} | {
    other: name for name, others in OTHER_NAMES.items() for other in others.split()
}


# Codes of the dtypes that floats are converted to.
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


FORMATS = ("safetensors", "bintensors")
ALIGNMENTS = (8, 64, 4096)
SNAPSHOTS = ("host", "device")
TENSOR_CHECKSUMS = ("blake3", "sha256", "xxh3", "xxh3_128")


def unpacked(name: str, shape: Sequence[int]) -> list[int]:
    """The shape in elements of a tensor of F4 whose `shape` counts bytes, each with two of them."""
    if not shape:
        raise SaveError(
            f"tensor {_quoted(name)}: two elements to a byte need a dimension, found a scalar",
            code="partial-byte",
            tensor=name,
        )
    return [*shape[:-1], shape[-1] * 2]


def stored(name: str, dtype: Dtype, shape: Sequence[int]) -> tuple[str, Sequence[int]]:
    """The header's code and shape of a tensor, whose `shape` is counted as `dtype` is by its framework."""
    code = code_of(dtype)
    if code is None:
        hint = meant(dtype)
        raise SaveError(
            f"tensor {_quoted(name)}: unknown dtype {_quoted(str(dtype))}{f': {hint}' if hint else ''}",
            code="unknown-dtype",
            tensor=name,
            expected=IN_FILES,
            found=dtype,
        )
    return code, unpacked(name, shape) if code == "F4" and word_of(dtype) == F4_PACKED else shape


def named(
    tensors: Mapping[str, Any], what: type[Exception] = TypeError, value: str = "dict"
) -> dict[str, Any]:
    """`tensors` as a dict of our own, so that nobody changes it while it is written, with str for its names.

    `what` is raised where it is no mapping: the class that upstream raises for that framework.
    """
    if not hasattr(tensors, "keys"):
        raise what(f"expected a dict of str to {value}, found {type(tensors).__name__}")
    own = dict(tensors)
    if set(map(type, own)) - {str}:
        for name in own:
            if not isinstance(name, str):
                raise TypeError(
                    f"tensor names must be str, found {_quoted(name)} of type {type(name).__name__}"
                )
    return own


def texts(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """`metadata` as a dict of our own, with nothing but str in it that a file can hold."""
    if metadata is None:
        return None
    if not hasattr(metadata, "keys"):
        raise TypeError(f"metadata must be a dict of str to str, found {type(metadata).__name__}")
    own = dict(metadata)
    for key, value in own.items():
        if not isinstance(key, str):
            raise TypeError(f"metadata keys must be str, found {_quoted(key)} of type {type(key).__name__}")
        if not isinstance(value, str):
            raise TypeError(
                f"metadata values must be str, found {type(value).__name__} under key {_quoted(key)}"
            )
        # A lone surrogate, which UTF-8 cannot spell.
        for part in (key, value):
            try:
                part.encode()
            except UnicodeEncodeError as fault:
                raise SaveError(
                    f"metadata key {_quoted(key)}: {part[fault.start]!a} at {fault.start} of the "
                    f"{'key' if part is key else 'value'} is not valid Unicode",
                    code="invalid-unicode",
                ) from None
    return own


def is_path(given: object) -> bool:
    """Whether it is a path. The files of fsspec may have one as well, and may be elsewhere."""
    return isinstance(given, (str, bytes)) or (hasattr(given, "__fspath__") and not hasattr(given, "fs"))


def one_of(option: str, value: str, choices: tuple[str, ...]) -> str:
    """`value`, which must be one of the choices for `option`."""
    if value not in choices:
        raise OptionError(
            f"{option} {value!r} is unknown: expected one of {', '.join(choices)}",
            code=f"unknown-{option.replace('_', '-')}",
            expected=choices,
            found=value,
        )
    return value


def leniency(strict: bool, lenient: bool) -> Leniency:
    """How a header is read that is not as it should be."""
    if strict and lenient:
        raise OptionError("strict and lenient exclude each other", code="strict-and-lenient")
    return "refuse" if strict else "salvage" if lenient else "accept"


def known_checksums(checksums: Checksums) -> list[str]:
    """The names in `checksums`: one of the tensors at most, and ModelSpec's."""
    if checksums is True:
        return ["blake3"]
    given = [checksums] if isinstance(checksums, str) else list(checksums or ())
    names = list(dict.fromkeys(one_of("checksums", name, (*TENSOR_CHECKSUMS, "modelspec")) for name in given))
    of_tensors = [name for name in names if name != "modelspec"]
    if len(of_tensors) > 1:
        raise OptionError(
            f"checksums {' and '.join(of_tensors)}: a file keeps one digest of each tensor",
            code="unknown-checksums",
            expected=TENSOR_CHECKSUMS,
            found=tuple(given),
        )
    return names


def alignment(align: int) -> int:
    """`align`, which must be one of the choices."""
    if align not in ALIGNMENTS:
        raise OptionError(
            f"align {align!r} is unknown: expected one of {', '.join(map(str, ALIGNMENTS))}",
            code="unknown-align",
            expected=ALIGNMENTS,
            found=align,
        )
    return align


def room(nbytes: int) -> int:
    """`nbytes` to reserve in a header, which must be a number of bytes."""
    if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
        raise TypeError(f"bytes to reserve must be an int, found {type(nbytes).__name__}")
    if not 0 <= nbytes < 2**63:
        raise OptionError(
            f"cannot reserve {nbytes} bytes: expected 0 or more, and less than 2^63",
            code="invalid-reserve",
            found=nbytes,
        )
    return nbytes


def known_format(format: str) -> str:
    """`format`, which must be one of the two."""
    return one_of("format", format, FORMATS)


def format_for(path: str | bytes, format: str | None) -> str:
    """The format to write under that name."""
    if format is not None:
        return known_format(format)
    return "bintensors" if fsdecode(path).endswith(".bt") else "safetensors"


def is_durable(durable: bool | None) -> bool:
    """Whether to flush: what the caller says, else what the environment says, else yes."""
    return environ.get("INGOT_DURABLE") != "0" if durable is None else durable


class Existing(NamedTuple):
    """What may become of a file that has the name of a destination."""

    overwrite: bool = False
    replace_read_only: bool = False

    def check(self, path: str) -> None:
        """Raise where there is something at `path` that has to stay."""
        if not lexists(path):
            return
        if not self.overwrite:
            raise FileExistsError(EEXIST, f"{strerror(EEXIST)} — overwrite=True replaces it", path)
        if not self.replace_read_only and _is_read_only(path):
            raise PermissionError(EACCES, "it is read-only — replace_read_only=True replaces it", path)


def _is_read_only(path: str) -> bool:
    """Return whether a file is there and read-only. One that another save removes meanwhile is not."""
    try:
        before = stat(path)
        may_write = access(path, W_OK, effective_ids=access in supports_effective_ids)
        return not may_write and samestat(before, stat(path))
    except OSError:
        return False


def _refuse_others(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a keyword that is no option as Python refuses it."""
    for name in options.keys() - set(known):
        raise TypeError(f"unexpected keyword argument {name!r}: expected one of {', '.join(known)}")


class Loading(NamedTuple):
    """The options of loading, checked, each with its default. `LoadOptions` documents them."""

    backend: str = "auto"
    threads: int | None = None
    progress: bool | Tell = False
    storage_options: StorageOptions | None = None
    keys: Iterable[str] | None = None
    prefix: str | tuple[str, ...] | None = None
    where: Callable[[TensorInfo], object] | None = None
    slices: Mapping[str, Any] | None = None
    # The code in a header.
    dtype: str | None = None
    verify: bool = False
    expected_sha256: str | None = None

    @classmethod
    def of(cls, options: LoadOptions | ReadOptions, known: type = LoadOptions) -> Loading:
        """What a caller gave as keywords, those of `known`."""
        if not options:
            # So it is where thousands of small files are loaded.
            return _AS_USUAL
        _refuse_others(options, known.__annotations__)
        given: dict[str, Any] = {**options}
        for name, checked in _CHECKED.items():
            if name in given:
                given[name] = checked(given[name])
        return cls(**given)


_AS_USUAL = Loading()


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
    def of(cls, options: SaveOptions) -> Saving:
        """What a caller gave as keywords."""
        _refuse_others(options, cls._fields)
        return cls(**options)

    def layout(self) -> dict[str, Any]:
        """What decides the bytes, checked, by the names that the extension module has."""
        return {
            "reserve": room(self.reserve_header),
            "align": alignment(self.align),
            "checksums": known_checksums(self.checksums),
        }

    def snapshot_of(self) -> str | None:
        """Where a save in the background copies its tensors to; None for nowhere."""
        if not isinstance(self.snapshot, str):
            return "host" if self.snapshot else None
        return one_of("snapshot", self.snapshot, SNAPSHOTS)

    def of_named_file(self) -> dict[str, Any]:
        """What a file with a name is written by, likewise."""
        return {
            "durable": is_durable(self.durable),
            "atomic": self.atomic,
            "replace_read_only": self.replace_read_only,
        }


# What an object with a `write` cannot keep.
_OF_NAMED_FILES = ("durable", "atomic", "replace_read_only", "snapshot")


def refuse_of_named_files(file: object, options: SaveOptions, background: bool) -> None:
    """Raise `OptionError` for what a caller asked of `file`, which has a `write` and no name."""
    asked = [name for name in _OF_NAMED_FILES if options.get(name) is not None]
    asked += ["background"] * background
    if asked:
        raise OptionError(
            f"{', '.join(asked)}: goes with a file that is given by its name, found an object with a write: "
            f"{type(file).__name__}",
            code="needs-a-name",
            expected="a str, bytes or os.PathLike",
            found=type(file).__name__,
        )


def checked_threads(threads: int | None) -> int | None:
    """`threads`, which must be a number of them or None."""
    if threads is None:
        return None
    if not isinstance(threads, int) or isinstance(threads, bool):
        raise TypeError(f"threads must be an int or None, found {type(threads).__name__}")
    if threads < 1:
        raise OptionError(
            f"threads {threads} is no number of threads: expected 1 or more",
            code="invalid-threads",
            expected="1 or more",
            found=threads,
        )
    return threads


def checked_progress(progress: Progress) -> bool | Tell:
    """`progress`, which must be a bool, None for False, or a callable."""
    if progress is None:
        return False
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(
            f"progress must be True, False, None or a callable of two ints, found {type(progress).__name__}"
        )
    return progress


def float_code(dtype: Dtype) -> str:
    """The code for `dtype`, which must be one that floats are converted to."""
    code = code_of(dtype)
    if code in FLOATS:
        return code
    hint = meant(dtype) if code is None else f"{code} is only read as it is stored, without dtype"
    raise OptionError(
        f"dtype {dtype!r} is none that floats are converted to: expected one of {', '.join(FLOATS)}, "
        f"or what a framework calls one of them{f': {hint}' if hint else ''}",
        code="no-conversion",
        expected=FLOATS,
        found=dtype,
    )


def _checked_dtype(dtype: Dtype | None) -> str | None:
    return None if dtype is None else float_code(dtype)


# Those of loading that are not what they were given as, or are not looked at before a file is opened.
_CHECKED: dict[str, Callable[[Any], Any]] = {
    "threads": checked_threads,
    "progress": checked_progress,
    "dtype": _checked_dtype,
}


def checked_ahead(ahead: int) -> int:
    """`ahead`, which must be a number of bytes."""
    if ahead < 0:
        raise OptionError(
            f"ahead {ahead} is negative: expected a number of bytes", code="negative-ahead", found=ahead
        )
    return ahead


Function = TypeVar("Function", bound="Callable[..., Any]")


def _showing(
    documented: type, defaults: Mapping[str, Any], known: type | None = None
) -> Callable[[Function], Function]:
    """What gives a function each option of `known` in its signature and its docstring, for its ``**options``.

    So an option is documented once, by `documented`, for all functions that take it.
    """
    names = list((known or documented).__annotations__)

    def shows(function: Function) -> Function:
        # Imported here: frameworks have imported it, and the rest of this package does without.
        from inspect import Parameter, cleandoc, signature

        shown = signature(function)
        own = [one for one in shown.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        options = [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=defaults[name],
                annotation=documented.__annotations__[name].__forward_arg__,
            )
            for name in names
        ]
        whole: Any = function
        whole.__signature__ = shown.replace(parameters=own + options)
        # Without docstrings where Python was told to leave them out.
        before, marked, rest = cleandoc(function.__doc__ or "").partition("**options\n")
        _, _, after = rest.partition("\n")
        entries = _entries(cleandoc(documented.__doc__ or ""))
        if marked:
            whole.__doc__ = before + "".join(entries.get(name, "") for name in names) + after
        return function

    return shows


def _entries(doc: str) -> dict[str, str]:
    """The lines about each attribute, of a docstring that ends with them."""
    found: dict[str, str] = {}
    name = ""
    for line in doc.partition("\n----------\n")[2].splitlines():
        if not line.startswith(" "):
            name = line.partition(" : ")[0]
        found[name] = f"{found.get(name, '')}{line}\n"
    return found


takes_save_options = _showing(SaveOptions, Saving._field_defaults)
takes_load_options = _showing(LoadOptions, Loading._field_defaults)
takes_read_options = _showing(LoadOptions, Loading._field_defaults, ReadOptions)
