"""How many parameters tensors hold, as huggingface.js counts them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import translate
from functools import cached_property
from math import floor, isfinite, prod
from typing import Any

from ingot._native import TensorInfo

Counter = Callable[[TensorInfo], int | None]
# The number of bits in an element, and the number of bits per parameter in it.
Packing = tuple[int, int]

_UNPACKED = (1, 1)

_CONTAINER_BITS = {"U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32}

# Suffixes of tensors that hold no parameters, but values that quantisation stores beside them.
_OF_WEIGHTS = ("scale", "scale_inv", "scale_2", "global_scale", "zero_point", "shape", "g_idx")
_AUXILIARY = {f"weight_{kind}" for kind in _OF_WEIGHTS}
_AUXILIARY |= {"input_scale", "input_global_scale", "input_zero_point", "zero_point"}


def stored(tensor: TensorInfo) -> int:
    """Count the elements of a tensor in the file."""
    return prod(tensor.shape)


def logical(config: Mapping[str, Any] | None, names: Callable[[], Collection[str]]) -> Counter:
    """Return a function that counts the parameters of a tensor before quantisation.

    The function returns None for a tensor that holds no parameters, such as scales. `config` is the content
    of ``config.json``; `names` returns the names of all tensors.
    """
    settings = _settings(config)
    if settings is None:
        return lambda tensor: prod(tensor.shape) if _may_count(tensor) else None
    method = settings.get("quant_method")
    kind = _METHODS.get(method, _Other) if isinstance(method, str) else _Other
    scheme = kind(settings, _object(config), names)
    is_quantised = _Quantised(settings)

    def count(tensor: TensorInfo) -> int | None:
        if not _may_count(tensor):
            return None
        suffix = tensor.name.rpartition(".")[2]
        if suffix in _AUXILIARY or scheme.is_auxiliary(tensor, suffix, is_quantised):
            return None
        packing = scheme.packing(tensor, suffix)
        if packing == _UNPACKED or not is_quantised(tensor.name):
            return prod(tensor.shape)
        container, bits = packing
        # Rounded to the nearest number.
        return (2 * prod(tensor.shape) * container + bits) // (2 * bits)

    return count


def declared(metadata: Mapping[str, Any] | None) -> int | None:
    """Return ``total_parameters`` of the metadata if it is a number, else None.

    Some writers store it as text.
    """
    said = metadata.get("total_parameters") if metadata else None
    if isinstance(said, str):
        # Like huggingface.js, parse the leading digits, so that "1e9" is 1.
        match = re.match(r"\s*([+-]?)([0-9]+)", said)
        # A plausible count has fewer digits than this.
        said = int(match[1] + (match[2].lstrip("0")[:40] or "0")) if match else None
    elif not _is_finite(said) or said == 0:
        return None
    return None if said is None or said < 0 else floor(said)


def _may_count(tensor: TensorInfo) -> bool:
    """Return whether a tensor is neither a scalar nor scales of a microscaling format."""
    return bool(tensor.shape) and tensor.dtype != "F8_E8M0"


def _packed(dtype: str, bits: Any) -> Packing:
    """Return the packing of parameters with `bits` bits each into an integer dtype."""
    container = _CONTAINER_BITS.get(dtype)
    if container is None or not _is_whole(bits) or not 0 < bits < container:
        return _UNPACKED
    return container, int(bits)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    # An int may be larger than any float.
    return _is_number(value) and (isinstance(value, int) or isfinite(value))


def _is_whole(value: Any) -> bool:
    return _is_number(value) and (isinstance(value, int) or value.is_integer())


def _number(value: Any) -> Any:
    """Return a number, also if it is given as text. None for other values."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return value if _is_finite(value) else None


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, (list, tuple)) else []


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _settings(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the settings of the quantisation, or None without one."""
    for place in (config, _object(config).get("text_config")):
        found = _mlx_settings(_object(place)) or _object(place).get("quantization_config")
        if isinstance(found, Mapping):
            return found
    return None


def _mlx_settings(place: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return mlx's settings: ``quantization`` without a method, or its copy in ``quantization_config``."""
    for settings in map(_object, (place.get("quantization"), place.get("quantization_config"))):
        if "quant_method" not in settings and {"group_size", "bits"} <= settings.keys():
            return {**settings, "quant_method": "mlx"}
    return None


class _Patterns:
    """Names, and globs in which ``*`` matches any text."""

    def __init__(self, names: set[str], globs: list[str]) -> None:
        self._names = names
        # In expressions that take time in proportion to a name. Only the star has a meaning.
        found = (translate(re.sub(r"([?[])", r"[\1]", glob)) for glob in globs)
        self._expression = re.compile("|".join(found)) if globs else None

    def match(self, name: str) -> bool:
        is_named = name in self._names
        return is_named or (self._expression is not None and self._expression.match(name) is not None)


def _targets(targets: Any) -> _Patterns:
    """Return patterns for modules as compressed-tensors names them.

    Regular expressions follow ``re:``. The common forms are supported.
    """
    texts = _texts(targets)
    globs = [_glob(text[3:]) for text in texts if text.startswith("re:")]
    names = {text for text in texts if not text.startswith("re:")}
    return _Patterns(names, [glob for glob in globs if glob is not None])


def _glob(pattern: str) -> str | None:
    """Return a glob that is equivalent to a regular expression, or None if there is none.

    The expression comes from an untrusted file, so it is never run.
    """
    body = pattern.removeprefix("^").removesuffix("$") + ("" if pattern.endswith("$") else ".*")
    pieces: list[str] = re.findall(r"\.\*|\\\.|[^\\^$.*+?()\[\]{}|]+|.", body, re.DOTALL)
    texts = {".*": "*", "\\.": "."}
    if any(piece not in texts and piece[0] in "\\^$.*+?()[]{}|" for piece in pieces):
        return None
    return "".join(texts.get(piece, piece) for piece in pieces)


class _Quantised:
    """Whether a tensor is quantised: all are, except those in modules that the configuration excludes."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._ignored = _targets(settings.get("ignore"))
        kept = _texts(settings.get("modules_to_not_convert"))
        self._kept = _Patterns(set(), [f"*{pattern}*" for pattern in kept])

    def __call__(self, name: str) -> bool:
        weight = name.rfind(".weight")
        module = name if weight < 0 else name[:weight]
        return not self._ignored.match(module) and not self._kept.match(name)


class _Other:
    """How a method quantises. The base class handles methods without a class of their own."""

    def __init__(
        self, settings: Mapping[str, Any], config: Mapping[str, Any], names: Callable[[], Collection[str]]
    ) -> None:
        self.settings = settings
        self.config = config
        self.names = names

    def is_auxiliary(self, tensor: TensorInfo, suffix: str, is_quantised: _Quantised) -> bool:
        """Return whether the method stores the tensor in addition to parameters, such as scales."""
        return False

    def packing(self, tensor: TensorInfo, suffix: str) -> Packing:
        """Return the packing of the tensor's elements if the tensor is quantised."""
        return (2, 1) if tensor.dtype == "U8" and self._is_four_bits else _UNPACKED

    @cached_property
    def _is_four_bits(self) -> bool:
        return bool(self.settings.get("load_in_4bit")) or self.settings.get("bits") == 4


class _Mxfp4(_Other):
    def is_auxiliary(self, tensor: TensorInfo, suffix: str, is_quantised: _Quantised) -> bool:
        return tensor.dtype == "U8" and suffix.endswith("_scales")

    def packing(self, tensor: TensorInfo, suffix: str) -> Packing:
        return (2, 1) if tensor.dtype == "U8" and "_blocks" in tensor.name else _UNPACKED


class _Words(_Other):
    """Methods gptq and awq: a 32-bit word holds as many parameters as fit."""

    def is_auxiliary(self, tensor: TensorInfo, suffix: str, is_quantised: _Quantised) -> bool:
        return suffix in ("qzeros", "g_idx", "scales") and is_quantised(tensor.name)

    def packing(self, tensor: TensorInfo, suffix: str) -> Packing:
        if suffix == "qweight":
            return self._in_word, 1
        return (self._in_byte, 1) if tensor.dtype == "U8" else _UNPACKED

    @cached_property
    def _in_word(self) -> int:
        bits = _number(self.settings.get("bits", 4))
        return max(1, floor(32 / bits)) if bits is not None and bits > 0 else 1

    @cached_property
    def _in_byte(self) -> int:
        bits = self.settings.get("bits", 4)
        return {4: 2, 2: 4}.get(bits, 1) if _is_number(bits) else 1


class _CompressedTensors(_Other):
    def packing(self, tensor: TensorInfo, suffix: str) -> Packing:
        if tensor.dtype not in _CONTAINER_BITS:
            return _UNPACKED
        module = tensor.name.rpartition(".")[0]
        groups = (rule for targets, rule in self._groups if targets.match(module))
        is_packed, bits = next(groups, self._elsewhere)
        return _packed(tensor.dtype, bits) if is_packed else _UNPACKED

    @cached_property
    def _groups(self) -> list[tuple[_Patterns, tuple[bool, Any]]]:
        return [(_targets(group.get("targets")), self._rule(group)) for group in self._given]

    @cached_property
    def _elsewhere(self) -> tuple[bool, Any]:
        return self._rule({})

    @cached_property
    def _given(self) -> list[Mapping[str, Any]]:
        groups = _object(self.settings.get("config_groups")).values()
        return [group for group in groups if isinstance(group, Mapping)]

    def _rule(self, group: Mapping[str, Any]) -> tuple[bool, Any]:
        """Return whether the weights of a group are packed, and the bits of each."""
        form = str(_first(group.get("format"), self.settings.get("format"), ""))
        said = [_object(place.get("weights")).get("num_bits") for place in (group, *self._given[:1])]
        digits = re.findall("[0-9]+", form)
        return form.endswith("pack-quantized"), _number(_first(*said, *digits[:1], 4))


class _Fp8(_Other):
    """Weights are stored unpacked, except that weights of experts may have fewer bits."""

    def packing(self, tensor: TensorInfo, suffix: str) -> Packing:
        is_expert = ".experts." in tensor.name and "shared_experts" not in tensor.name
        return _packed(tensor.dtype, self._bits) if is_expert else _UNPACKED

    @cached_property
    def _bits(self) -> int | None:
        own, text = self.settings, _object(self.config.get("text_config"))
        said = _first(
            *(place.get("expert_dtype") for place in (own, self.config, text)), own.get("store_dtype")
        )
        return _BITS_BY_NAME.get(said) if isinstance(said, str) else None


_BITS_BY_NAME = {"nvfp4": 4, "mxfp4": 4, "fp4": 4, "int4": 4, "uint4": 4, "nf4": 4, "int2": 2}


class _BitsAndBytes(_Other):
    def is_auxiliary(self, tensor: TensorInfo, suffix: str, is_quantised: _Quantised) -> bool:
        is_state = suffix in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        return is_state or suffix.startswith("bitsandbytes__")

    @cached_property
    def _is_four_bits(self) -> bool:
        return bool(self.settings.get("load_in_4bit"))


class _Mlx(_Other):
    """A module is quantised if its scales are present, in any file."""

    def is_auxiliary(self, tensor: TensorInfo, suffix: str, is_quantised: _Quantised) -> bool:
        if suffix not in ("scales", "biases"):
            return False
        mode = self._module(tensor.name).get("mode")
        return mode is not None and (suffix == "scales" or mode == "affine")

    def packing(self, tensor: TensorInfo, suffix: str) -> Packing:
        if tensor.dtype != "U32" or suffix != "weight":
            return _UNPACKED
        return _packed("U32", self._module(tensor.name).get("bits"))

    def _module(self, tensor: str) -> Mapping[str, Any]:
        """Return the settings of a tensor's module. Empty if the module is not quantised."""
        module = tensor.rpartition(".")[0]
        override = self.settings.get(module)
        said = {"mode": "affine", **self.settings, **_object(override)}
        needed = ("scales", "biases") if said["mode"] == "affine" else ("scales",)
        has_all = all(f"{module}.{suffix}" in self._all_names for suffix in needed)
        return said if override is not False and has_all and _is_mlx(said) else {}

    @cached_property
    def _all_names(self) -> Collection[str]:
        return frozenset(self.names())


def _is_mlx(said: Mapping[str, Any]) -> bool:
    bits: Any = said.get("bits")
    group_size = said.get("group_size")
    if said["mode"] == "affine":
        return _is_number(bits) and bits in (2, 3, 4, 5, 6, 8) and group_size in (32, 64, 128)
    return _is_whole(bits) and 0 < bits <= 32


# The classes by `quant_method`.
_METHODS: dict[str, type[_Other]] = {"awq": _Words, "gptq": _Words, "fp8": _Fp8, "mlx": _Mlx, "mxfp4": _Mxfp4}
_METHODS |= {"bitsandbytes": _BitsAndBytes, "compressed-tensors": _CompressedTensors}
