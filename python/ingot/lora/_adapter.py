"""Read an adapter: the modules that it changes, in the names of PEFT, kohya and diffusers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot import numpy as arrays
from ingot._base.checks import FLOATS
from ingot._base.keys import select
from ingot._base.options import Loading
from ingot._base.text import _escaped, _quoted, brief, located
from ingot._native import Checkpoint, Expression, TensorInfo, fetch_beside, is_url
from ingot._read.config import CONFIG_NBYTES, ConfigFile, file_beside
from ingot._read.door import open_source
from ingot._read.kind import ADAPTER_CONFIG, kind_of
from ingot._read.select import Wanted
from ingot.errors import AdapterError
from ingot.typing import Source

if TYPE_CHECKING:
    from ingot._base.keys import Selector

# The end of a name, and the part of the module that the tensor is. PEFT may put the adapter's name into it.
_NAMED = r"(?:\.(?!weight$|bias$)\w+)?"
_PARTS = tuple(
    (re.compile(rf"(?P<module>.+?){ending}$"), part)
    for ending, part in (
        (rf"\.lora_A{_NAMED}\.weight", "down"),
        (rf"\.lora_B{_NAMED}\.weight", "up"),
        (rf"\.lora_B{_NAMED}\.bias", "up_bias"),
        (rf"\.lora_embedding_A{_NAMED}", "rows"),
        (rf"\.lora_embedding_B{_NAMED}", "columns"),
        (rf"\.lora_magnitude_vector{_NAMED}(?:\.weight)?", "magnitude"),
        (r"\.lora_down\.weight", "down"),
        (r"\.lora_up\.weight", "up"),
        (r"\.lora_up\.bias", "up_bias"),
        (r"\.lora_mid\.weight", "mid"),
        (r"\.lora(?:_linear_layer)?\.down\.weight", "down"),
        (r"\.lora(?:_linear_layer)?\.up\.weight", "up"),
        (r"_lora\.down\.weight", "down"),
        (r"_lora\.up\.weight", "up"),
        (r"\.dora_scale", "magnitude"),
        (r"\.alpha", "alpha"),
        (r"\.diff", "difference"),
        (r"\.diff_b", "bias_difference"),
        *(
            (rf"\.{name}{_NAMED}", name)
            for name in (
                *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
                *("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
            )
        ),
    )
)
_PEFT = "base_model.model."
# kohya's names of the parts of a pipeline, and diffusers'.
KOHYA = re.compile(r"(?P<component>lora_unet|lora_te[123]?|lora_transformer|lora_prior|lycoris)_(?P<path>.+)")
_DIFFUSERS = re.compile(
    r"(?P<component>unet|transformer(?:_2)?|text_encoder(?:_[23])?|prior|diffusion_model)\.(?P<path>.+)"
)
# A module must have one part of each list.
_WHOLE = {
    "LoRA": (["up"], ["down"]),
    "embedding": (["rows"], ["columns"]),
    "LoHa": (["hada_w1_a"], ["hada_w1_b"], ["hada_w2_a"], ["hada_w2_b"]),
    "LoKr": (["lokr_w1", "lokr_w1_a"], ["lokr_w2", "lokr_w2_a"]),
}
_PAIRS = {"lokr_w1_a": "lokr_w1_b", "lokr_w2_a": "lokr_w2_b", "hada_t1": "hada_t2", "hada_t2": "hada_t1"}
_PAIRS |= {"lokr_w1_b": "lokr_w1_a", "lokr_w2_b": "lokr_w2_a", "lokr_t2": "lokr_w2_a"}
# The kind of adapter that each part belongs to. None for parts that several kinds have.
_KINDS: dict[str, str | None] = {
    **dict.fromkeys(("up", "down", "mid"), "LoRA"),
    **dict.fromkeys(("rows", "columns"), "embedding"),
    **dict.fromkeys(("alpha", "magnitude", "up_bias", "bias_difference")),
}
# The part whose first dimension is the rank.
_RANKS = ("down", "rows", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")
# Settings of PEFT with which the tensors alone do not define the adapted model.
_UNSUPPORTED = (
    "target_parameters",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "monteclora_config",
    "kasa_config",
)
# The key of the metadata with the configurations that diffusers writes.
_METADATA = "lora_adapter_metadata"
# Limits of patterns. PEFT writes at most one for each module.
_MOST_PATTERNS, _LONGEST_PATTERN = 10_000, 1000
# Patterns that `re` matches in linear time: parts of names.
_PLAIN = re.compile(r"\^?(?:[\w-]|\\?\.)*\$?")
# Syntax that Python and Rust read differently: sets within sets, possessive repetition, boundaries of words
# in Rust, verbose groups, and characters beyond ASCII.
_AMBIGUOUS = re.compile(
    r"\[\^?\]?(?:\\.|[^\\\]])*?(?:\[|--|&&|~~|\|\|)|[*+?}]\+|\\[<>]|\\[bB]\{|\(\?[a-zA-Z-]*x|[^\0-\x7f]",
    re.DOTALL,
)
# Ways to begin training that change the weights of the base.
_CHANGES_BASE = re.compile(r"pissa|olora|corda|loftq|lora_ga|eva_residual", re.IGNORECASE)


class _Patterns:
    """Values for modules, by patterns of their names. As in PEFT, the first pattern that matches decides."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        if len(values) > _MOST_PATTERNS:
            raise ValueError(f"{len(values):,} patterns: expected {_MOST_PATTERNS:,} or fewer")
        self._values = [(_matcher(pattern), value) for pattern, value in values.items()]

    def value(self, path: str, default: Any) -> Any:
        """Return the value for a module. Raises `ValueError` if a pattern is not supported for its name."""
        return next((value for matches, value in self._values if matches(path)), default)


def _matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that matches the end of a path in linear time, as PEFT does with `re`.

    Raises `ValueError` for a pattern that is not a regular expression, or that no such function supports.
    """
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"{brief(pattern)} is longer than {_LONGEST_PATTERN:,} characters")
    is_plain = _PLAIN.fullmatch(pattern) is not None
    ambiguous = None if is_plain else _AMBIGUOUS.search(pattern)
    if ambiguous is not None:
        raise ValueError(f"{brief(pattern)} has {brief(ambiguous[0])}, which is not supported")
    whole = rf"(.*\.)?({pattern})$"
    try:
        matches = re.compile(whole).match
    except (re.error, OverflowError, RecursionError) as fault:
        raise ValueError(f"{brief(pattern)} is not a regular expression: {_escaped(str(fault))}") from fault
    if is_plain:
        return matches
    try:
        return _of_ascii(Expression(f"^(?:{whole})"), pattern)
    except ValueError as fault:
        reason = f"{brief(pattern)} is not supported: {_escaped(str(fault))}"
        raise ValueError(f"{reason} — merge it with peft") from fault


def _of_ascii(expression: Expression, pattern: str) -> Callable[[str], bool]:
    """Return a function that matches text, in which `expression` has the meaning of `re` if it is ASCII."""

    def matches(path: str) -> bool:
        if not (path.isascii() and path.isprintable()):
            raise ValueError(f"{brief(pattern)} is supported for names in ASCII only, found {_quoted(path)}")
        return expression.matches(path)

    return matches


class _Settings(NamedTuple):
    """A configuration of PEFT."""

    config: Mapping[str, Any]
    where: str
    """The file or the metadata that it is in, for messages."""
    ranks: _Patterns
    alphas: _Patterns


@dataclass(slots=True)
class Module:
    """The tensors of an adapter for one module of the base."""

    name: str
    """As in the adapter's tensors."""
    component: str | None
    path: str
    """The name in the base, with ``_`` for ``.`` if `is_flat`."""
    is_flat: bool
    parts: dict[str, TensorInfo] = field(default_factory=dict)
    alpha: float | None = None
    rank: int | None = None
    scaling: float = 1.0
    fan_in_fan_out: bool = False

    @property
    def kind(self) -> str:
        """The kind of the adapter: LoRA, LoCon, DoRA, LoHa, LoKr, full or bias."""
        if "hada_w1_a" in self.parts:
            return "LoHa"
        if any(part.startswith("lokr_") for part in self.parts):
            return "LoKr"
        if "up" in self.parts or "rows" in self.parts:
            if "magnitude" in self.parts:
                return "DoRA"
            down = self.parts.get("down")
            return "LoCon" if down is not None and ("mid" in self.parts or len(down.shape) > 2) else "LoRA"
        return "full"


class Adapter:
    """An open adapter."""

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any], chosen: list[str]) -> None:
        self.checkpoint = checkpoint
        self.path = checkpoint.path or "<buffer>"
        self.metadata = _texts(checkpoint)
        names = checkpoint.names()
        is_peft = "peft_type" in config or any(name.startswith(_PEFT) for name in names)
        is_kohya = not is_peft and any(map(KOHYA.match, names))
        self.format = "peft" if is_peft else "kohya" if is_kohya else "diffusers"
        self.modules: dict[str, Module] = {}
        self.whole: dict[str, TensorInfo] = {}
        """Tensors that replace a tensor of the base, by its name."""
        self.others: list[str] = []
        """Tensors whose meaning is unknown."""
        self.config = config
        self._settings = self._read_settings()
        self._sort(map(checkpoint.info, chosen))
        if not is_peft and not any(ending.match(name) for name in names for ending, _ in _PARTS):
            reason = "is not an adapter: no tensor has a name of PEFT, kohya or diffusers"
            raise self.unfit(reason, "no-adapter")
        self._scale()

    def numbers(self, info: TensorInfo, dtype: str = "F64", rows: slice | None = None) -> Any:
        """Return the values of a tensor, or some of its rows."""
        wanted = Wanted([info.name], None if rows is None else [(rows,)], dtype)
        return self.checkpoint.parts(wanted, arrays.wrap)[0]

    def unfit(self, reason: str, code: str, tensor: str | None = None, **facts: Any) -> AdapterError:
        """Return an error that names the file."""
        return located(AdapterError, reason, code=code, path=self.path, tensor=tensor, **facts)

    @property
    def base(self) -> str | None:
        """The name of the model that the adapter was trained on, or the architecture that the shapes show."""
        keys = ("ss_base_model_version", "modelspec.architecture", "ss_sd_model_name")
        names = (self.config.get("base_model_name_or_path"), *map(self.metadata.get, keys))
        known = next((name for name in names if isinstance(name, str) and name), None)
        return known or kind_of(self.checkpoint.infos(), self.metadata, {}).base

    def _sort(self, infos: Iterator[TensorInfo]) -> None:
        """Assign each tensor to its module."""
        for info in infos:
            found = next(
                ((found, part) for ending, part in _PARTS if (found := ending.match(info.name))), None
            )
            if found is None:
                self._keep_whole(info)
                continue
            name, part = found[0]["module"], found[1]
            if info.dtype not in FLOATS and part != "alpha":
                reason = f"has the dtype {info.dtype}: expected floats"
                raise self.unfit(reason, "unsupported-adapter", info.name, found=info.dtype)
            module = self.modules.get(name) or self._module(name)
            if part in module.parts:
                other = module.parts[part].name
                reason = f"is the same part of its module as {_quoted(other)} — keys= or drop= chooses one"
                raise self.unfit(reason, "ambiguous-module", info.name, found=other)
            module.parts[part] = info
            self.modules[name] = module
        for module in self.modules.values():
            self._check_parts(module)

    def _keep_whole(self, info: TensorInfo) -> None:
        if not info.name.startswith(_PEFT):
            self.others.append(info.name)
            return
        name = re.sub(r"\.modules_to_save(\.\w+(?=\.))?|\.base_layer", "", info.name.removeprefix(_PEFT))
        if name in self.whole:
            reason = f"is the same tensor as {_quoted(self.whole[name].name)} — keys= or drop= chooses one"
            raise self.unfit(reason, "ambiguous-module", info.name)
        self.whole[name] = info

    def _module(self, name: str) -> Module:
        if self.format == "kohya" and (flat := KOHYA.match(name)):
            return Module(name, flat["component"], flat["path"], is_flat=True)
        if self.format == "peft":
            path = re.sub(r"\.base_layer(?=\.|$)", "", name.removeprefix(_PEFT))
            return Module(name, None, path, is_flat=False)
        found = _DIFFUSERS.match(name)
        component, path = (found["component"], found["path"]) if found else (None, name)
        # The names of diffusers before 0.22.
        if ".processor." in path:
            path = path.replace(".processor.", ".")
            path = f"{path}.0" if path.endswith(".to_out") else path
        if ".self_attn.to_" in path:
            path = f"{path.replace('.to_', '.')}_proj"
        return Module(name, component, path, is_flat=False)

    def _check_parts(self, module: Module) -> None:
        parts = module.parts
        needed: list[list[str]] = [[_PAIRS[part]] for part in parts if part in _PAIRS]
        kind = module.kind
        if kind in ("LoHa", "LoKr"):
            needed += _WHOLE[kind]
        elif "rows" in parts or "columns" in parts:
            needed += _WHOLE["embedding"]
        elif not parts.keys() & {"difference", "bias_difference"}:
            needed += _WHOLE["LoRA"]
        missing = next((one for one in needed if not parts.keys() & {*one}), None)
        kinds = {_KINDS.get(part, part.partition("_")[0]) for part in parts} - {None}
        if len(kinds) > 1:
            reason = f"module {_quoted(module.name)} has tensors of several kinds: {', '.join(parts)}"
            raise self.unfit(f"{reason} — keys= or drop= chooses one", "ambiguous-module", found=[*parts])
        if missing is not None:
            tensors = ", ".join(_quoted(info.name) for info in parts.values())
            reason = f"module {_quoted(module.name)} has {tensors} without {' or '.join(missing)}"
            raise self.unfit(f"{reason}: the file is incomplete", "incomplete-module", found=[*parts])

    # How much each module adds.

    def _read_settings(self) -> dict[str | None, _Settings]:
        """Return the checked settings of each component, or of the whole adapter under None."""
        if self.config:
            return {None: self._checked(self.config, ADAPTER_CONFIG)}
        configs = _configs(self.metadata)
        return {component: self._checked(config, _METADATA) for component, config in configs.items()}

    def _checked(self, config: Mapping[str, Any], where: str) -> _Settings:
        kind = str(config.get("peft_type", "LORA"))
        if kind not in ("LORA", "LOHA", "LOKR"):
            reason = f"peft_type {_quoted(kind)} is not an adapter of low rank: expected LORA, LOHA or LOKR"
            raise self.unfit(reason, "unsupported-adapter", expected=("LORA", "LOHA", "LOKR"), found=kind)
        setting = next((name for name in _UNSUPPORTED if config.get(name)), None)
        if setting is not None:
            reason = f"{where} sets {setting}, which is not supported — merge it with peft"
            raise self.unfit(reason, "unsupported-adapter", found=setting)
        start = config.get("init_lora_weights")
        if isinstance(start, str) and _CHANGES_BASE.match(start):
            reason = (
                f"init_lora_weights {_quoted(start)} changed the base before training, and the adapter "
                "belongs to the changed one — save it with path_initial_model_for_weight_conversion= of peft"
            )
            raise self.unfit(reason, "unsupported-adapter", found=start)
        ranks, alphas = (self._patterns(f"{name}_pattern", config, where) for name in ("rank", "alpha"))
        return _Settings(config, where, ranks, alphas)

    def _patterns(self, name: str, config: Mapping[str, Any], where: str) -> _Patterns:
        found = config.get(name) or {}
        if not isinstance(found, dict):
            reason = f"{name} in {where}: expected an object, found {brief(found)}"
            raise self.unfit(reason, "invalid-adapter-config", found=found)
        try:
            return _Patterns(found)
        except ValueError as fault:
            raise self.unfit(f"{name} in {where}: {fault}", "invalid-adapter-config") from fault

    def _scale(self) -> None:
        for module in self.modules.values():
            module.rank = self._rank(module)
            if "alpha" in module.parts:
                module.alpha = self._alpha(module.parts["alpha"])
            settings = self._settings.get(None) or self._settings.get(module.component or "")
            if settings is not None:
                self._configure(module, settings)
            elif self.format == "peft" and module.alpha is None and module.rank is not None:
                reason = f"{ADAPTER_CONFIG} is missing, which holds the alpha that scales the adapter"
                raise self.unfit(f"{reason} — put it beside the file", "unknown-alpha")
            # LyCORIS ignores the alpha of LoKr with two full factors, which have no rank.
            elif module.alpha is not None and module.rank:
                module.scaling = module.alpha / module.rank

    def _alpha(self, info: TensorInfo) -> float:
        if math.prod(info.shape) != 1:
            reason = f"has the shape {list(info.shape)}: expected one number"
            raise self.unfit(reason, "shape-mismatch", info.name, expected=(), found=info.shape)
        found = float(self.numbers(info).reshape(-1)[0])
        if not math.isfinite(found):
            raise self.unfit(f"is {found}: expected a finite number", "unknown-alpha", info.name, found=found)
        return found

    @staticmethod
    def _rank(module: Module) -> int | None:
        info = next((module.parts[part] for part in _RANKS if part in module.parts), None)
        return info.shape[0] if info is not None and info.shape else None

    def _configure(self, module: Module, settings: _Settings) -> None:
        """Apply a configuration of PEFT."""
        config, where = settings.config, settings.where
        try:
            rank = settings.ranks.value(module.path, config.get("r", module.rank))
            default = config.get("lora_alpha", config.get("alpha", rank))
            if module.alpha is None:
                module.alpha = settings.alphas.value(module.path, default)
        except ValueError as fault:
            reason = f"module {_quoted(module.name)}: pattern in {where}: {fault}"
            raise self.unfit(reason, "invalid-adapter-config") from fault
        if not _is_positive(rank) or module.alpha is None or not _is_finite(module.alpha):
            reason = f"module {_quoted(module.name)}: expected numbers for r and alpha"
            facts = f"found {brief(rank)} and {brief(module.alpha)}"
            raise self.unfit(f"{reason} in {where}, {facts}", "invalid-adapter-config")
        if module.rank is None and module.kind != "LoKr":
            return
        if module.rank not in (None, rank):
            reason = f"module {_quoted(module.name)} has rank {module.rank}, and {where} says {rank}"
            raise self.unfit(reason, "rank-mismatch", expected=rank, found=module.rank)
        if self._flag("use_dora", settings) and module.kind in ("LoRA", "LoCon"):
            reason = f"module {_quoted(module.name)} has no magnitudes, and {where} sets use_dora"
            raise self.unfit(f"{reason}: the file is incomplete", "incomplete-module", found=[*module.parts])
        is_stabilised = self._flag("use_rslora", settings) and module.kind not in ("LoHa", "LoKr")
        module.scaling = module.alpha / (math.sqrt(rank) if is_stabilised else rank)
        module.fan_in_fan_out = self._flag("fan_in_fan_out", settings)

    def _flag(self, name: str, settings: _Settings) -> bool:
        found = settings.config.get(name)
        if found is not None and not isinstance(found, bool):
            reason = f"{name} in {settings.where}: expected true or false, found {brief(found)}"
            raise self.unfit(reason, "invalid-adapter-config", found=found)
        return bool(found)


def _is_positive(value: Any) -> bool:
    return _is_finite(value) and isinstance(value, int) and value > 0


def _is_finite(value: Any) -> bool:
    """Return whether a value of JSON is a number that a float can hold."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _texts(checkpoint: Checkpoint) -> dict[str, str]:
    return {key: text for key, text in (checkpoint.metadata() or {}).items() if isinstance(text, str)}


def _configs(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the configurations that diffusers stores in the metadata, one of each component."""
    try:
        pairs = json.loads(metadata.get(_METADATA, "{}"))
    except (ValueError, RecursionError):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for key, value in pairs.items() if isinstance(pairs, dict) else ():
        component, _, name = key.partition(".")
        found.setdefault(component, {})[name] = value
    return found


def config_beside(source: Source, path: str | None, how: Loading) -> dict[str, Any]:
    """Return the contents of ``adapter_config.json`` beside a file or a URL, or {} without one."""
    if isinstance(source, str) and is_url(source):
        try:
            options = how.storage_options
            file = ConfigFile(*fetch_beside(source, ADAPTER_CONFIG, CONFIG_NBYTES, options))
        except (FileNotFoundError, PermissionError):
            # Stores that do not allow listing answer with this status if the file does not exist.
            return {}
    else:
        found = None if path is None else file_beside(path, ADAPTER_CONFIG)
        if found is None:
            return {}
        file = found
    try:
        config = json.loads(file.data)
    except (ValueError, RecursionError) as fault:
        reason = f"is not JSON: {_escaped(str(fault))}"
        raise located(AdapterError, reason, code="invalid-adapter-config", path=file.path) from fault
    if not isinstance(config, dict):
        reason = f"is not a JSON object: found {type(config).__name__}"
        raise located(AdapterError, reason, code="invalid-adapter-config", path=file.path)
    return config


@contextmanager
def opened(
    source: Source, how: Loading, keys: Selector | None = None, drop: Selector | None = None
) -> Iterator[Adapter]:
    """Open an adapter for the block, with the selected tensors."""
    with closing(open_source(source, how)) as checkpoint:
        yield Adapter(checkpoint, config_beside(source, checkpoint.at, how), select(checkpoint, keys, drop))
