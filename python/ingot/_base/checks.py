"""What callers give, checked at the door: after it nothing asks again."""

from __future__ import annotations

from os import environ, fsdecode
from typing import NamedTuple

from ingot._native import check_destination
from ingot.errors import OptionError, SaveError
from ingot.typing import StorageOptions

from .dtypes import F4_PACKED, IN_FILES, code_of, meant, word_of
from .text import _quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Literal

    from ingot.typing import Checksums, Dtype, Progress, Tell

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
        """Raise what a save to `path` would raise if the file that is there may not be replaced."""
        check_destination(path, **self._asdict())


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


def checked_dtype(dtype: Dtype | None) -> str | None:
    return None if dtype is None else float_code(dtype)


def checked_ahead(ahead: int) -> int:
    """`ahead`, which must be a number of bytes."""
    if ahead < 0:
        raise OptionError(
            f"ahead {ahead} is negative: expected a number of bytes", code="negative-ahead", found=ahead
        )
    return ahead
