"""Checks of arguments, made once on entry to the package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from os import environ, fsdecode
from os.path import basename
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ingot._base.text import located
from ingot._native import check_destination, check_storage_options, destination, replace_file
from ingot.errors import OptionError, SaveError
from ingot.typing import Checksums, Dtype, Progress, StorageOptions, Tell, Writable, WriteOptions

from .dtypes import F4_PACKED, IN_FILES, code_of, meant, word_of
from .text import _quoted, brief

Leniency = Literal["refuse", "accept", "salvage"]

if TYPE_CHECKING:
    from typing_extensions import Buffer, TypeIs

#: Other names for `storage_options`, in lower or upper case: of s3fs, gcsfs and adlfs, and of object_store
#: and the libraries based on it.
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
    # Options that are converted: True if the bucket is part of the host; "path" or "virtual"; the host of an
    # endpoint; whether an endpoint may be one of http://; True, or a `ca_file`; more options.
    "virtual_hosted_style_request": "aws_virtual_hosted_style_request",
    "addressing_style": "",
    "account_host": "",
    "allow_http": "aws_allow_http",
    "verify": "",
    "client_kwargs": "config_kwargs s3 client_options",
}
OPTIONS = tuple(StorageOptions.__annotations__)
#: The option for each of these names.
NAMES = {name: name for name in (*OPTIONS, *OTHER_NAMES)} | {
    other: name for name, others in OTHER_NAMES.items() for other in others.split()
}


# Codes of the dtypes that quantised weights are dequantised to.
DEQUANTISED = ("BF16", "F16", "F32", "F64")
# Codes of the dtypes that floats are converted to.
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
# Codes of the dtypes in files that are converted to one of `FLOATS`. Packed floats are not.
CONVERTED = (*FLOATS, "F8_E8M0")


BACKENDS: tuple[str, ...] = ("auto", "mmap", "pread")
FORMATS = ("safetensors", "bintensors")
ALIGNMENTS = (8, 64, 4096)
SNAPSHOTS = ("host", "device")
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# The place for the number of a file in a `filename_pattern`.
SUFFIX = "{suffix}"
_INFINITE = float("inf")
# The largest integer that the extension module takes.
_MOST = 2**63 - 1
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
TENSOR_CHECKSUMS = ("blake3", "sha256", "xxh3", "xxh3_128")


def unpacked(name: str, shape: Sequence[int]) -> list[int]:
    """Return the shape in elements of an F4 tensor whose `shape` counts bytes of two elements."""
    if not shape:
        reason = "two elements to a byte need a dimension, found a scalar"
        raise located(SaveError, reason, code="partial-byte", tensor=name)
    return [*shape[:-1], shape[-1] * 2]


def stored(name: str, dtype: Dtype, shape: Sequence[int]) -> tuple[str, Sequence[int]]:
    """Return a tensor's dtype code and shape for the header. `shape` counts elements of `dtype`."""
    code = code_of(dtype)
    if code is None:
        hint = meant(dtype) or f"expected one of {', '.join(IN_FILES)}"
        reason = f"unknown dtype {_quoted(str(dtype))}: {hint}"
        raise located(SaveError, reason, code="unknown-dtype", tensor=name, expected=IN_FILES, found=dtype)
    return code, unpacked(name, shape) if code == "F4" and word_of(dtype) == F4_PACKED else shape


def named(
    tensors: Mapping[str, Any], what: type[Exception] = TypeError, value: str = "dict"
) -> dict[str, Any]:
    """Return `tensors` as a new dict, which the caller cannot change during the save, with str for its names.

    `what` is raised if it is not a mapping: the class that upstream raises for the framework.
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


def texts(metadata: Mapping[str, str] | None, option: str = "metadata") -> dict[str, str] | None:
    """Return a copy of the dict `metadata`, which must contain only storable str, or None."""
    if metadata is None:
        return None
    if not hasattr(metadata, "keys"):
        raise TypeError(f"{option} must be a dict of str to str, found {type(metadata).__name__}")
    own = dict(metadata)
    for key, value in own.items():
        if not isinstance(key, str):
            raise TypeError(f"{option} keys must be str, found {_quoted(key)} of type {type(key).__name__}")
        if not isinstance(value, str):
            raise TypeError(
                f"{option} values must be str, found {type(value).__name__} under key {_quoted(key)}"
            )
        # A lone surrogate, which UTF-8 cannot spell.
        for part in (key, value):
            try:
                part.encode()
            except UnicodeEncodeError as fault:
                place = f"{part[fault.start]!a} at {fault.start} of the {'key' if part is key else 'value'}"
                message = f"{option} key {_quoted(key)}: {place} is not valid Unicode"
                raise SaveError(message, code="invalid-unicode") from None
    return own


# The types that can be read from and written to.


def is_path(given: object) -> bool:
    """Return whether `given` is a path. A file of fsspec may have a path too, but on another file system."""
    return isinstance(given, (str, bytes)) or (hasattr(given, "__fspath__") and not hasattr(given, "fs"))


def is_buffer(given: Any) -> bool:
    """Return whether `given` is a buffer.

    NumPy's scalars have the buffer protocol, but are not buffers here.
    """
    try:
        with memoryview(given) as view:
            return view.ndim > 0
    except TypeError:
        return False


def is_writable(given: object) -> TypeIs[Writable]:
    """Return whether bytes are written to `given` itself. A path may have a method ``write`` too."""
    return not is_path(given) and callable(getattr(given, "write", None))


def no_source(given: object) -> TypeError:
    """Return the error for an object that cannot be read from."""
    is_handle = hasattr(given, "get_tensor")
    hint = " — an open handle is not a source: pass the source that it was opened with" if is_handle else ""
    return TypeError(
        "expected a path as a str, bytes or os.PathLike object, a URL, a file that is open for reading "
        f"bytes, a buffer, a file of fsspec, or ingot.Ranges, found {type(given).__name__}{hint}"
    )


# The attributes of the objects that can be read from, beside paths and buffers.
_READABLE = (("__fspath__",), ("fs", "path"), ("store", "path"), ("getbuffer",), ("read", "seek", "tell"))


def checked_source(given: Any) -> Any:
    """Return `given`, which must be a source."""
    if is_path(given) or any(all(hasattr(given, name) for name in names) for names in _READABLE):
        return given
    if is_buffer(given):
        return given
    raise no_source(given)


def checked_sources(given: Any) -> list[Any]:
    """Return a list of `given`, which must be an iterable of sources."""
    is_one = is_path(given) or hasattr(given, "read") or isinstance(given, (bytearray, memoryview))
    if is_one or not hasattr(given, "__iter__"):
        found = f"one {type(given).__name__}" if is_one else type(given).__name__
        raise TypeError(f"expected an iterable of sources, found {found}")
    return [*map(checked_source, given)]


def checked_written(given: Any) -> Any:
    """Return the local path in `given`, or `given` itself if it is a URL of a store or has a ``write``."""
    return given if is_writable(given) else destination(given)


def one_of(option: str, value: str, choices: tuple[str, ...]) -> str:
    """Return `value`, which must be one of the choices for `option`."""
    if not isinstance(value, str) or value not in choices:
        expected = f"{', '.join(choices)}{_meant(value, choices)}"
        message = f"{option} {value!r} is unknown: expected one of {expected}"
        raise OptionError(message, code=f"unknown-{option.replace('_', '-')}", expected=choices, found=value)
    return value


def _meant(value: object, choices: Iterable[str]) -> str:
    """Return a hint at the choice that `value` is nearly."""
    near = nearest(value.lower(), choices) if isinstance(value, str) else None
    return "" if near is None else f" — did you mean {near!r}?"


def nearest(wrong: str, names: Iterable[str]) -> str | None:
    """Return the name that is most similar to `wrong`, or None."""
    # Imported here: it is for errors.
    from difflib import get_close_matches

    return next(iter(get_close_matches(wrong, names, 1)), None)


def leniency(strict: bool, lenient: bool) -> Leniency:
    """Return how a header that breaks a rule is read."""
    if strict and lenient:
        raise OptionError("strict and lenient exclude each other", code="strict-and-lenient")
    return "refuse" if strict else "salvage" if lenient else "accept"


def known_checksums(checksums: Checksums) -> list[str]:
    """Return the names in `checksums`: at most one for tensors, and ``"modelspec"``."""
    if checksums is True:
        return ["blake3"]
    if checksums is None or checksums is False:
        return []
    if not isinstance(checksums, str | list | tuple):
        found = type(checksums).__name__
        raise TypeError(f"checksums must be a bool, a str, a list or tuple of str, or None, found {found}")
    given: list[str] = [checksums] if isinstance(checksums, str) else [*checksums]
    names = list(dict.fromkeys(one_of("checksums", name, (*TENSOR_CHECKSUMS, "modelspec")) for name in given))
    of_tensors = [name for name in names if name != "modelspec"]
    if len(of_tensors) > 1:
        message = f"checksums {' and '.join(of_tensors)}: a file keeps one digest of each tensor"
        raise OptionError(message, code="unknown-checksums", expected=TENSOR_CHECKSUMS, found=tuple(given))
    return names


def alignment(align: int) -> int:
    """Return `align`, which must be one of the choices."""
    if isinstance(align, bool) or align not in ALIGNMENTS:
        message = f"align {align!r} is unknown: expected one of {', '.join(map(str, ALIGNMENTS))}"
        raise OptionError(message, code="unknown-align", expected=ALIGNMENTS, found=align)
    return align


def counted(
    option: str,
    given: Any,
    *,
    least: int = 0,
    most: int = _MOST,
    code: str = "invalid-size",
    or_none: bool = False,
) -> Any:
    """Return `given` as an int, which must be an integer of any type from `least` to `most`, or None."""
    if given is None and or_none:
        return None
    try:
        number = None if given is None or isinstance(given, bool) else index(given)
    except TypeError:
        number = None
    if number is None:
        expected = "an int or None" if or_none else "an int"
        raise TypeError(f"{option} must be {expected}, found {type(given).__name__}")
    if not least <= number <= most:
        # The largest integer of the extension module is no useful limit to print.
        expected = f"{least} or more, and less than 2^63" if most == _MOST else f"{least} to {most:,}"
        message = f"{option} {brief(number)} is out of range: expected {expected}"
        raise OptionError(message, code=code, expected=expected, found=number)
    return number


def checked_text(option: str, given: Any, *, or_none: bool = False) -> Any:
    """Return `given`, which must be a str, or None."""
    if isinstance(given, str) or (given is None and or_none):
        return given
    raise TypeError(f"{option} must be a str{' or None' if or_none else ''}, found {type(given).__name__}")


def checked_name(name: Any) -> str:
    """Return `name`, which must be a str."""
    if isinstance(name, str):
        return name
    # A program that takes a file for a list passes a position.
    raise TypeError(
        f"name must be the name of a tensor as a str, found {type(name).__name__} — `keys()` lists the names"
    )


def checked_mapping(option: str, given: Any) -> Any:
    """Return `given`, which must be a mapping with str as its keys, or None."""
    if given is None:
        return None
    if not hasattr(given, "keys"):
        raise TypeError(f"{option} must be a dict or None, found {type(given).__name__}")
    # No Python code runs for each of many names.
    if not {*map(type, given)} <= {str}:
        wrong = next((key for key in given if not isinstance(key, str)), None)
        if wrong is not None:
            raise TypeError(f"{option} must have str as its keys, found {type(wrong).__name__}")
    return given


def known_format(format: str) -> str:
    """Return `format`, which must be one of the two."""
    return one_of("format", format, FORMATS)


def format_for(path: str | bytes, format: str | None) -> str:
    """Return `format`, or the format that the ending of `path` implies."""
    if format is not None:
        return known_format(format)
    return "bintensors" if fsdecode(path).endswith(".bt") else "safetensors"


def is_durable(durable: bool | None) -> bool:
    """Return whether to flush: `durable` or, if it is None, the setting in the environment or True.

    Raises
    ------
    OptionError
        The variable is neither 0 nor 1.
    """
    if durable is not None:
        return durable
    found = environ.get("INGOT_DURABLE") or "1"
    if found not in ("0", "1"):
        message = f"INGOT_DURABLE {found!r} is invalid: expected 0 or 1"
        raise OptionError(message, code="invalid-durable", found=found)
    return found == "1"


class Existing(NamedTuple):
    """The rules for an existing file at a destination."""

    overwrite: bool = False
    replace_read_only: bool = False

    def options(self) -> dict[str, Any]:
        """Return them as the options that functions take."""
        rare: WriteOptions = {"replace_read_only": self.replace_read_only}
        return {"overwrite": self.overwrite, "write_options": rare}

    def check(self, path: str) -> None:
        """Raise the error of a save to `path` if the existing file may not be replaced."""
        check_destination(path, **self._asdict())

    def write(self, path: str, pieces: Sequence[Buffer], progress: Tell | None = None) -> None:
        """Write these pieces to `path`, and flush the file unless the environment disables that."""
        replace_file(path, pieces, durable=is_durable(None), progress=progress, **self._asdict())


def checked_backend(backend: str) -> str:
    return one_of("backend", backend, BACKENDS)


def checked_storage_options(given: StorageOptions | None) -> StorageOptions | None:
    """Return `given`, which must be a dict of known options or None."""
    if given is not None:
        if not isinstance(given, dict):
            raise TypeError(f"storage_options must be a dict or None, found {type(given).__name__}")
        check_storage_options(given)
    return given


def checked_sha256(digest: str | None) -> str | None:
    """Return `digest`, which must be a SHA-256 in hexadecimal or None."""
    if digest is None:
        return None
    if not isinstance(digest, str):
        raise TypeError(f"expected_sha256 must be a str or None, found {type(digest).__name__}")
    digits = digest.removeprefix("0x")
    if len(digits) != 64 or set(digits) - _HEX_DIGITS:
        message = f"expected_sha256 {_quoted(digest)} is not a SHA-256: expected 64 hexadecimal digits"
        raise OptionError(message, code="invalid-sha256", expected="64 hexadecimal digits", found=digest)
    return digest


def checked_flag(option: str, value: bool) -> bool:
    """Return `value`, which must be a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{option} must be True or False, found {type(value).__name__}")
    return value


def checked_durable(durable: bool | None) -> bool | None:
    """Return `durable`, which must be a bool or None."""
    if durable is not None and not isinstance(durable, bool):
        raise TypeError(f"durable must be True, False or None, found {type(durable).__name__}")
    return durable


def checked_snapshot(snapshot: bool | str) -> bool | str:
    """Return `snapshot`, which must be a bool or the location of the copies."""
    return snapshot if isinstance(snapshot, bool) else one_of("snapshot", snapshot, SNAPSHOTS)


def checked_shard_size(size: int | str) -> int:
    """Return `size` in bytes."""
    if isinstance(size, str):
        count = _counted(size)
    elif isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"max_shard_size must be an int or a str, found {type(size).__name__}")
    else:
        count = index(size)
    if not 1 <= count < _INFINITE:
        units = f"a str with a unit ({', '.join(UNITS)}), such as '5GB'"
        message = f"max_shard_size {size!r} is not a size: expected an int above 0 for bytes, or {units}"
        raise OptionError(message, code="invalid-size", expected=tuple(UNITS), found=size)
    return int(count)


def _counted(size: str) -> float:
    """Return the number of bytes in a text, or 0 if it is not a size."""
    # Imported here: few programs write such sizes.
    from re import ASCII, IGNORECASE, fullmatch

    match = fullmatch(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-z]+)\s*", size, IGNORECASE | ASCII)
    unit = UNITS.get(match[2].upper()) if match else None
    return 0 if match is None or unit is None else float(match[1]) * unit


def checked_pattern(pattern: str) -> str:
    """Return `pattern`, which must be a file name with one place for a suffix."""
    if not isinstance(pattern, str):
        raise TypeError(f"filename_pattern must be a str, found {type(pattern).__name__}")
    if pattern.count(SUFFIX) != 1 or basename(pattern) != pattern or pattern.startswith("."):
        message = f"filename_pattern {pattern!r} cannot be used: expected a file name with one {SUFFIX}"
        raise OptionError(message, code="invalid-pattern", found=pattern)
    return pattern


def checked_progress(progress: Progress) -> bool | Tell:
    """Return `progress`, which must be a bool, None for False, or a callable."""
    if progress is None:
        return False
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(
            f"progress must be True, False, None or a callable of two ints, found {type(progress).__name__}"
        )
    return progress


def float_code(dtype: Dtype) -> str:
    """Return the code of `dtype`, to which floats must be convertible."""
    code = code_of(dtype)
    if code in FLOATS:
        return code
    hint = meant(dtype) if code is None else f"{code} is only read as it is stored, without dtype"
    words = f"one of {', '.join(FLOATS)}, or a framework's name for one of them{f': {hint}' if hint else ''}"
    message = f"dtype {dtype!r} is not one that floats are converted to: expected {words}"
    raise OptionError(message, code="no-conversion", expected=FLOATS, found=dtype)


def checked_dequantize(given: bool | Dtype) -> bool | str:
    """Return the option `dequantize`: a bool, or the code of a dtype."""
    if isinstance(given, bool):
        return given
    code = code_of(given)
    if code not in DEQUANTISED:
        message = f"dequantize={given!r}: expected True, False or one of {', '.join(DEQUANTISED)}"
        raise OptionError(message, code="no-conversion", expected=DEQUANTISED, found=given)
    return str(code)


def checked_dtype(dtype: Dtype | None) -> str | None:
    return None if dtype is None else float_code(dtype)
