"""ModelSpec 1.0.1: the description of a model in the metadata of its file.

The keys begin with ``modelspec.``. `metadata` makes them, `read` reads them, and `validate` lists errors in
them. The specification (https://github.com/Stability-AI/ModelSpec) has three words for a key: a file
*must*, *should* or *can* have it; which one applies may depend on what kind of model it is.

>>> from ingot import modelspec
>>> pairs = modelspec.metadata(
...     architecture="stable-diffusion-xl-v1-base/lora",
...     implementation="https://github.com/Stability-AI/generative-models",
...     title="Ducks",
...     resolution="1024x1024",
... )
>>> tensors = {"weight": numpy.ones((4, 3))}
>>> ingot.numpy.save_file(tensors, "ducks.safetensors", pairs, checksums="modelspec")
>>> ingot.verify("ducks.safetensors").ok
True
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

from ._base import images
from ._base.checks import checked_source
from ._base.options import Loading, argument, checked, takes, unexpected
from ._base.report import Report
from ._base.text import brief
from ._read.door import open_checkpoint
from .typing import HeaderOptions, Source

if TYPE_CHECKING:
    Fault = tuple["Severity", str]

__all__ = ["VERSION", "Finding", "ModelSpec", "metadata", "read", "validate"]

#: The version of ModelSpec that this module writes and checks.
VERSION = "1.0.1"

Severity = Literal["error", "warning", "note"]
_PREFIX = "modelspec."


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelSpec(Report):
    """The ModelSpec keys of one file. A key that the file lacks is None.

    Every field is the unchanged text of the key ``modelspec.`` with the name of the field. `other`
    holds the ``modelspec.`` keys that version 1.0.1 does not know, without the prefix.

    Examples
    --------
    >>> spec = ingot.modelspec.read({"modelspec.title": "Tiny", "modelspec.architecture": "unet/lora"})
    >>> spec.title, spec.base_architecture
    ('Tiny', 'unet')
    """

    _path = "modelspec.ModelSpec"

    sai_model_spec: str | None = None
    architecture: str | None = None
    implementation: str | None = None
    title: str | None = None
    resolution: str | None = None
    data_format: str | None = None
    format_type: str | None = None
    description: str | None = None
    author: str | None = None
    date: str | None = None
    hash_sha256: str | None = None
    implementation_version: str | None = None
    license: str | None = None
    usage_hint: str | None = None
    thumbnail: str | None = None
    tags: str | None = None
    merged_from: str | None = None
    trigger_phrase: str | None = None
    prediction_type: str | None = None
    timestep_range: str | None = None
    encoder_layer: str | None = None
    preprocessor: str | None = None
    is_negative_embedding: str | None = None
    unet_dtype: str | None = None
    vae_dtype: str | None = None
    language: str | None = None
    format_template: str | None = None
    other: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_architecture(self) -> str | None:
        """The model's own architecture, which is the text before the ``/``."""
        return None if self.architecture is None else self.architecture.partition("/")[0]

    @property
    def part(self) -> str | None:
        """The kind of part after the ``/``, such as ``"lora"``. None for a whole model."""
        return None if self.architecture is None else self.architecture.partition("/")[2] or None

    @property
    def tag_list(self) -> list[str]:
        """The tags one by one."""
        return [tag for tag in map(str.strip, (self.tags or "").split(",")) if tag]


_KEYS = tuple(entry.name for entry in fields(ModelSpec) if entry.name != "other")


class Finding(NamedTuple):
    """One thing that is wrong with the ModelSpec of a file.

    Examples
    --------
    >>> finding = ingot.modelspec.validate("model.safetensors")[0]
    >>> finding.severity, finding.key
    ('error', 'modelspec.sai_model_spec')
    """

    severity: Severity
    """``"error"`` for a *must* of the specification, ``"warning"`` for a *should*, ``"note"`` for advice."""
    key: str
    """The key with its prefix: ``"modelspec.title"``."""
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.key}: {self.message}"


@takes(HeaderOptions)
def read(source: Source | Mapping[str, str], **options: Unpack[HeaderOptions]) -> ModelSpec | None:
    """Read the ModelSpec of a file.

    Parameters
    ----------
    source : ingot.typing.Source, or dict of str to str
        A file of tensors, as for `ingot.open`, or the metadata of a file. Only the header is read.
    **options
        How the header is read: `ingot.typing.HeaderOptions`.

    Returns
    -------
    ModelSpec or None
        None if there is no key of ModelSpec.

    Raises
    ------
    OSError
        The file cannot be opened.
    HeaderError
        The file breaks a rule of its format.
    TypeError
        `source` cannot be read from, or an option is unknown.

    Examples
    --------
    >>> ingot.modelspec.read({"modelspec.title": "Tiny"}).title
    'Tiny'
    >>> ingot.modelspec.read("model.safetensors") is None
    True
    """
    how = Loading.among(checked(read, options))
    return _spec(_pairs(argument(read, "source", source, _known), how))


def _spec(pairs: Mapping[str, Any]) -> ModelSpec | None:
    # The index of a checkpoint may have any JSON.
    found = {
        key.removeprefix(_PREFIX): text
        for key, text in pairs.items()
        if key.startswith(_PREFIX) and isinstance(text, str)
    }
    if not found:
        return None
    known = {key: found.pop(key) for key in _KEYS if key in found}
    return ModelSpec(**known, other=found)


def metadata(
    *,
    architecture: str,
    implementation: str,
    title: str,
    others: Mapping[str, str] | None = None,
    **keys: str | None,
) -> dict[str, str]:
    """Return the metadata of a file for ``save_file(..., metadata=...)``.

    Parameters
    ----------
    architecture, implementation, title : str
        The keys that every file must have.
    others : dict of str to str, optional
        Other metadata to add.
    **keys : str
        Any other field of `ModelSpec`, such as ``resolution="1024x1024"`` or ``author="..."``. None and an
        empty text omit a field. Instead of passing ``hash_sha256``, save with ``checksums="modelspec"``,
        which computes it from the written bytes.

    Returns
    -------
    dict of str to str

    Raises
    ------
    TypeError
        A key is not one of ModelSpec, or a value is not a str.
    ValueError
        `validate` finds an error in it. The message has all of them.

    Examples
    --------
    >>> pairs = ingot.modelspec.metadata(architecture="unet", implementation="diffusers", title="Tiny")
    >>> pairs["modelspec.title"]
    'Tiny'
    """
    unknown = sorted(set(keys) - set(_KEYS))
    if unknown:
        raise unexpected(metadata, unknown[0], ["others", *_KEYS])
    named: dict[str, str | None] = {
        "sai_model_spec": VERSION,
        "architecture": architecture,
        "implementation": implementation,
        "title": title,
        **keys,
    }
    pairs: dict[str, str] = checked(metadata, {"others": others})["others"] or {}
    for key, text in named.items():
        if text is not None and not isinstance(text, str):
            raise TypeError(f"metadata(): {key} must be a str, found {type(text).__name__}")
        if text:
            pairs[_PREFIX + key] = text
    errors = [str(finding) for finding in validate(pairs) if finding.severity == "error"]
    if errors:
        raise ValueError(f"metadata(): {'; '.join(errors)}")
    return pairs


@takes(HeaderOptions)
def validate(
    source: Source | Mapping[str, str] | ModelSpec, **options: Unpack[HeaderOptions]
) -> list[Finding]:
    """Return the faults in the ModelSpec of a file.

    Parameters
    ----------
    source : ingot.typing.Source, dict of str to str, or ModelSpec
        A file of tensors, as for `ingot.open`, or the metadata of one.
    **options
        How the header is read: `ingot.typing.HeaderOptions`.

    Returns
    -------
    list of Finding
        The faults: errors first, then warnings, then notes. Only the form of the hash is checked:
        `ingot.verify` compares it with the data.

    Raises
    ------
    OSError, HeaderError, TypeError
        As `read` does.

    Examples
    --------
    >>> print(ingot.modelspec.validate("model.safetensors")[0])
    error: modelspec.sai_model_spec: is missing: the file has no ModelSpec
    """
    how = Loading.among(checked(validate, options))
    source = argument(validate, "source", source, _known)
    spec = source if isinstance(source, ModelSpec) else _spec(_pairs(source, how))
    if spec is None:
        return [Finding("error", f"{_PREFIX}sai_model_spec", "is missing: the file has no ModelSpec")]
    found = [*_missing(spec), *_malformed(spec)]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _known(source: Any) -> Any:
    """Return `source`, which must be a `ModelSpec`, metadata, or something to read from."""
    if isinstance(source, ModelSpec):
        return source
    if not isinstance(source, Mapping) or hasattr(source, "get_tensor"):
        return checked_source(source)
    wrong = [key for key in source if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"expected a dict of str to str, found the key {wrong[0]!r}")
    return source


def _pairs(source: Source | Mapping[str, str], how: Loading) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    with closing(open_checkpoint(source, how._replace(backend="pread"))) as checkpoint:
        return checkpoint.metadata() or {}


# The keys that every file must or should have.
_MUST = ("sai_model_spec", "architecture", "implementation", "title")
_SHOULD = ("description", "author", "date", "hash_sha256")

# Architectures of models that make images, by how they begin, and of models that make text.
_IMAGE = (
    "stable-diffusion",
    "stable-cascade",
    "flux",
    "chroma",
    "lumina",
    "hunyuan-image",
    "anima",
    "pixart",
    "auraflow",
    "kandinsky",
    "sana",
    "qwen-image",
)
_TEXT = ("gpt", "llama", "stablelm", "mistral", "mixtral", "qwen", "gemma", "phi", "falcon", "causal-lm")


def _category(spec: ModelSpec) -> Literal["image", "text"] | None:
    base = (spec.base_architecture or "").lower()
    # Images first: `qwen-image` begins as `qwen` does.
    if base.startswith(_IMAGE):
        return "image"
    return "text" if base.startswith(_TEXT) else None


def _missing(spec: ModelSpec) -> Iterable[Finding]:
    for key in _MUST:
        if not getattr(spec, key):
            yield Finding("error", _PREFIX + key, "is missing: every file must have it")
    category = _category(spec)
    # Adapters and components may omit keys that their model has.
    if category == "image" and spec.part is None and not spec.resolution:
        yield Finding("error", f"{_PREFIX}resolution", "is missing: a model that makes images must have it")
    if category == "text" and spec.part is None:
        if not spec.data_format:
            yield Finding(
                "error", f"{_PREFIX}data_format", "is missing: a model that makes text must have it"
            )
        if not spec.format_type:
            yield Finding(
                "warning", f"{_PREFIX}format_type", "is missing: a model that makes text should have it"
            )
    for key in _SHOULD:
        if not getattr(spec, key):
            yield Finding("warning", _PREFIX + key, "is missing: a file should have it")


def _malformed(spec: ModelSpec) -> Iterable[Finding]:
    for key, check in _CHECKS.items():
        text = getattr(spec, key)
        if text:
            yield from (Finding(severity, _PREFIX + key, message) for severity, message in check(text))
    for key in spec.other:
        yield Finding("note", _PREFIX + key, f"is not a key of version {VERSION}")


def _version(text: str) -> Iterable[Fault]:
    if not re.fullmatch(r"\d+\.\d+\.\d+", text):
        yield "error", f"must be a version such as {VERSION!r}, found {brief(text)}"
    elif text not in ("1.0.0", VERSION):
        yield "note", f"is version {text}, judged here by {VERSION}"


def _pattern(severity: Severity, pattern: str, words: str, text: str) -> Iterable[Fault]:
    if not re.fullmatch(pattern, text):
        yield severity, f"{words}, found {brief(text)}"


def _date(text: str) -> Iterable[Fault]:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        yield "error", f"must be a date by ISO 8601, such as '2024-06-03', found {brief(text)}"


def _hash(text: str) -> Iterable[Fault]:
    if not re.fullmatch(r"0x[0-9a-f]{64}", text):
        yield "error", "must be '0x' and the 64 lowercase hexadecimal digits of a SHA-256"


def _timesteps(text: str) -> Iterable[Fault]:
    match = re.fullmatch(r"(\d+),\s*(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        yield "error", f"must be the first and the last step, such as '0,999', found {brief(text)}"


THUMBNAIL_SIDE = 256
_JPEG = "image/jpeg"
_BEGINS = f"it should begin with 'data:{_JPEG};base64,'"


def _thumbnail(text: str) -> Iterable[Fault]:
    if not text.startswith("data:image/"):
        yield "error", f"must be a data URL of an image: {_BEGINS}"
        return
    kind, _, data = text.removeprefix("data:").partition(";base64,")
    if kind in images.ENDINGS:
        fault, size = _picture(kind, data)
        if fault is not None:
            yield "error", fault
            return
        if kind == _JPEG and size != (THUMBNAIL_SIDE, THUMBNAIL_SIDE):
            yield "note", f"is best {THUMBNAIL_SIDE}x{THUMBNAIL_SIDE}, found {size[0]}x{size[1]}"
    if kind != _JPEG:
        yield "warning", f"should be a JPEG: {_BEGINS}"


def _picture(kind: str, data: str) -> tuple[str | None, tuple[int, int]]:
    """Return the fault of a picture in base64, or None, and its width and height."""
    name = kind.removeprefix("image/").upper()
    try:
        image = b64decode(data, validate=True)
    except ValueError:
        return "must be valid base64", (0, 0)
    if images.type_of(image) != kind:
        return f"must be a {name}, as its data URL says", (0, 0)
    try:
        return None, images.size_of(image)
    except ValueError as fault:
        return f"must be a {name}: the image {fault}", (0, 0)


_IDENTIFIER = r"[a-z0-9.+_-]+(/[a-z0-9.+_-]+)?"
_RESOLUTION = r"[1-9]\d*x[1-9]\d*"
_CHECKS: dict[str, Callable[[str], Iterable[Fault]]] = {
    "sai_model_spec": _version,
    "architecture": partial(
        _pattern, "warning", _IDENTIFIER, "should be an identifier such as 'stable-diffusion-v1/lora'"
    ),
    "resolution": partial(
        _pattern, "error", _RESOLUTION, "must be width, 'x' and height, such as '1024x1024'"
    ),
    "date": _date,
    "hash_sha256": _hash,
    "thumbnail": _thumbnail,
    "is_negative_embedding": partial(_pattern, "error", "true|false", "must be 'true' or 'false'"),
    "prediction_type": partial(_pattern, "warning", "epsilon|v", "should be 'epsilon' or 'v'"),
    "timestep_range": _timesteps,
    "encoder_layer": partial(_pattern, "error", r"-?\d+", "must be an integer"),
}


def __dir__() -> list[str]:
    return __all__
