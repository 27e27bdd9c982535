"""Write an adapter under the names of another library."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from ingot import _native
from ingot._base.checks import format_for
from ingot._base.options import Saving
from ingot._base.text import _quoted, plural
from ingot._native import TensorInfo, replace_file
from ingot._read.kind import ADAPTER_CONFIG
from ingot._read.load import RAW
from ingot._read.select import Wanted

from ._merge import rounded
from ._names import dotted, of_unet

if TYPE_CHECKING:
    from ingot.errors import AdapterError
    from ingot.numpy import Array

    from ._adapter import Adapter, Module

_FILE = "adapter_model.safetensors"

# The end of the name of each part. A part without a name in a library cannot be written for that library.
_LYCORIS = (
    *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    *("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
)
_DIFFUSERS = {
    "down": ".lora_A.weight",
    "up": ".lora_B.weight",
    "up_bias": ".lora_B.bias",
    "magnitude": ".lora_magnitude_vector",
}
_ENDINGS = {
    "diffusers": _DIFFUSERS,
    "peft": {
        **_DIFFUSERS,
        "rows": ".lora_embedding_A",
        "columns": ".lora_embedding_B",
        **{part: f".{part}" for part in _LYCORIS if part.startswith("hada")},
    },
    "kohya": {
        "down": ".lora_down.weight",
        "up": ".lora_up.weight",
        "mid": ".lora_mid.weight",
        "magnitude": ".dora_scale",
        "difference": ".diff",
        "bias_difference": ".diff_b",
        **{part: f".{part}" for part in _LYCORIS},
    },
}
_FROM_KOHYA = {
    "lora_unet": "unet",
    "lora_transformer": "transformer",
    "lora_prior": "prior",
    "lora_te": "text_encoder",
    "lora_te1": "text_encoder",
    "lora_te2": "text_encoder_2",
    "lora_te3": "text_encoder_3",
}
_TO_KOHYA = {
    "unet": "lora_unet",
    "diffusion_model": "lora_unet",
    "transformer": "lora_unet",
    "prior": "lora_prior",
    "text_encoder": "lora_te",
    "text_encoder_2": "lora_te2",
    "text_encoder_3": "lora_te3",
}
# The first part of a path, and the part of a pipeline that has such modules.
_FIRST = {
    "text_model": "text_encoder",
    **dict.fromkeys(("transformer_blocks", "single_transformer_blocks"), "transformer"),
    **dict.fromkeys(
        ("down_blocks", "mid_block", "up_blocks", "conv_in", "conv_out", "time_embedding", "add_embedding"),
        "unet",
    ),
}


class New(NamedTuple):
    """A tensor of the new file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Array | None
    """The computed values. None if the values of `source` are copied."""
    source: TensorInfo


class Renamed:
    """An adapter under the names of another library."""

    def __init__(self, adapter: Adapter, to: str) -> None:
        self.adapter, self.to = adapter, to
        self._check()
        modules = {name: self._located(module) for name, module in adapter.modules.items()}
        self._components = {component for component, _ in modules.values()}
        if to == "peft" and len(self._components) > 1:
            found = ", ".join(sorted(map(str, self._components)))
            reason = f"an adapter of PEFT is for one model, and the file has modules of {found}"
            raise adapter.unfit(f"{reason} — keys= or drop= chooses one", "several-components", found=found)
        self.paths = {name: path for name, (_, path) in modules.items()}
        self.new = [
            new
            for name, module in adapter.modules.items()
            for new in self._of_module(module, self._name(*modules[name]))
        ]
        self.new += [
            New(f"base_model.model.{n}", i.dtype, i.shape, None, i) for n, i in adapter.whole.items()
        ]

    def _check(self) -> None:
        adapter = self.adapter
        if adapter.others:
            shown = ", ".join(map(_quoted, adapter.others[:3]))
            reason = f"{plural(len(adapter.others), 'tensor')} have no name of an adapter: {shown}"
            raise adapter.unfit(f"{reason} — drop= leaves them out", "unused-tensors", found=adapter.others)
        if adapter.whole and self.to != "peft":
            raise self._lacks("tensors that replace the base's", next(iter(adapter.whole.values())).name)
        if adapter.config.get("fan_in_fan_out") and self.to != "peft":
            raise self._lacks("weights with the inputs first (fan_in_fan_out)", None)

    def _lacks(self, what: str, tensor: str | None) -> AdapterError:
        reason = f"the format {self.to} has no names for {what} — drop= leaves tensors out"
        return self.adapter.unfit(reason, "no-name", tensor, expected=self.to)

    def _located(self, module: Module) -> tuple[str | None, str]:
        """Return the part of a pipeline and the path of a module, in the names of diffusers."""
        component, path = module.component, module.path
        if module.is_flat:
            if self.to == "kohya":
                return component, path
            component = _FROM_KOHYA.get(component or "")
            found = dotted(path)
            if component is None or found is None:
                reason = (
                    f"module {_quoted(module.name)} has a name of no known table, so its parts are unknown"
                )
                raise self.adapter.unfit(reason, "unknown-module", found=module.name)
            path = of_unet(found)
        elif component == "diffusion_model":
            component = None
        if component in (None, "unet"):
            path = of_unet(path)
            first = _FIRST.get(path.partition(".")[0])
            component = first if component is None or first == "transformer" else component
        return component, path

    def _name(self, component: str | None, path: str) -> str:
        if self.to == "peft":
            return f"base_model.model.{path}"
        if component is None:
            reason = f"module {_quoted(path)} is of no known part of a pipeline, which begins its name"
            raise self.adapter.unfit(f"{reason} in {self.to}", "unknown-module", found=path)
        if self.to == "diffusers":
            return f"{component}.{path}"
        start = _TO_KOHYA.get(component, component)
        if start == "lora_te" and "text_encoder_2" in self._components:
            start = "lora_te1"
        return f"{start}_{path.replace('.', '_')}"

    def _of_module(self, module: Module, name: str) -> Iterator[New]:
        """Yield the tensors of a module."""
        endings, parts = _ENDINGS[self.to], dict(module.parts)
        parts.pop("alpha", None)
        values: dict[str, Array] = {}
        if "mid" in parts and "mid" not in endings:
            values["down"] = self._joined(module)
            del parts["mid"]
        scaled = self._scaled(module)
        if scaled is not None:
            values[scaled] = self.adapter.numbers(parts[scaled]) * module.scaling
            if "up_bias" in parts and scaled == "up":
                values["up_bias"] = self.adapter.numbers(parts["up_bias"]) * module.scaling
        for part, info in parts.items():
            if part not in endings:
                raise self._lacks(f"this part of {module.kind}", info.name)
            found = values.get(part)
            shape = self._shape_of(module, part, info) if found is None else found.shape
            yield New(f"{name}{endings[part]}", info.dtype, shape, found, info)
        if self.to == "kohya" and module.rank:
            alpha = numpy.array(module.scaling * module.rank)
            yield New(f"{name}.alpha", "F32", (), alpha, next(iter(parts.values())))

    def _joined(self, module: Module) -> Array:
        """Return the second and the third factor of LoCon as one."""
        mid, down = (self.adapter.numbers(module.parts[part]) for part in ("mid", "down"))
        found: Array = numpy.einsum("ij...,jq->iq...", mid, down.reshape(len(down), -1))
        return found

    def _scaled(self, module: Module) -> str | None:
        """Return the part that is multiplied with the scaling, if the format has no place for an alpha."""
        if module.scaling == 1.0 or module.kind == "full":
            return None
        if self.to == "diffusers":
            return "up"
        return "lokr_w1" if self.to == "kohya" and module.rank is None else None

    def _shape_of(self, module: Module, part: str, info: TensorInfo) -> tuple[int, ...]:
        """Return the shape in the new file, which differs for the magnitudes of DoRA."""
        if part != "magnitude":
            return info.shape
        shape = info.shape
        if self.adapter.format == "kohya" and len(shape) > 1 and shape[0] == 1 != shape[1]:
            if self.to == "kohya":
                return shape
            raise self._lacks("magnitudes of inputs", info.name)
        count, down = max(shape, default=1), module.parts.get("down")
        inner = (1,) * (len(down.shape) - 2) if down is not None else ()
        if self.to == "kohya":
            return (count, 1, *inner)
        return (1, count, *inner) if inner else (count,)

    def config(self) -> dict[str, Any]:
        """Return the contents of ``adapter_config.json``."""
        modules = [*self.adapter.modules.values()]
        kinds = {{"LoHa": "LOHA"}.get(module.kind, "LORA") for module in modules}
        decomposed = {module.kind == "DoRA" for module in modules if "up" in module.parts}
        if len(kinds) > 1 or len(decomposed) > 1:
            found = ", ".join(sorted({module.kind for module in modules}))
            reason = f"an adapter of PEFT is of one kind, and the file has {found}"
            raise self.adapter.unfit(f"{reason} — keys= chooses", "several-components", found=found)
        kind = kinds.pop() if kinds else "LORA"
        ranks = {self.paths[name]: module.rank or 1 for name, module in self.adapter.modules.items()}
        alphas = {
            self.paths[name]: _plain(module.scaling * (module.rank or 1))
            for name, module in self.adapter.modules.items()
        }
        rank, alpha = _most(ranks), _most(alphas)
        config = {
            "peft_type": kind,
            "base_model_name_or_path": self.adapter.config.get("base_model_name_or_path"),
            "task_type": self.adapter.config.get("task_type"),
            "inference_mode": True,
            "r": rank,
            "lora_alpha" if kind == "LORA" else "alpha": alpha,
            "rank_pattern": _patterns(ranks, rank),
            "alpha_pattern": _patterns(alphas, alpha),
            "target_modules": sorted(ranks),
            "modules_to_save": self.adapter.config.get("modules_to_save"),
        }
        if kind == "LOHA":
            return {**config, "use_effective_conv2d": any("hada_t1" in module.parts for module in modules)}
        return {
            **config,
            "bias": self.adapter.config.get("bias", "none"),
            "fan_in_fan_out": bool(self.adapter.config.get("fan_in_fan_out")),
            "lora_bias": any("up_bias" in module.parts for module in modules),
            "use_dora": True in decomposed,
        }

    def metadata(self) -> dict[str, str]:
        """Return the metadata without records of the old names."""
        left = (*_native.RECORD_KEYS, "lora_adapter_metadata")
        return {key: text for key, text in self.adapter.metadata.items() if key not in left}

    def write(self, path: str, metadata: Mapping[str, str] | None, how: Saving) -> None:
        """Write the file, and the configuration beside it for PEFT."""
        specs = [(new.name, new.dtype, new.shape) for new in self.new]
        writer = _native.Writer.create(
            path, specs, metadata, format_for(path, how.format), **how.of_new_file()
        )
        with closing(writer):
            for new in self.new:
                given = (new.dtype, new.shape, self._data(new))
                writer.write(new.name, given, ..., lambda _, given: given)
            if self.to == "peft":
                text = json.dumps(self.config(), indent=2, sort_keys=True)
                replace_file(beside(path), [text.encode()], durable=how.flush)
            writer.commit()

    def _data(self, new: New) -> memoryview:
        if new.values is not None:
            return rounded(new.values, new.dtype)
        found: memoryview = self.adapter.checkpoint.parts(Wanted([new.source.name]), RAW)[0]
        return found[: new.source.nbytes]


def file_of(destination: str, to: str) -> str:
    """Return the path of the file at a destination, which is a folder for PEFT."""
    is_file = to != "peft" or destination.lower().endswith((".safetensors", ".bt"))
    return destination if is_file else os.path.join(destination, _FILE)


def beside(path: str) -> str:
    """Return the path of the configuration of PEFT beside a file."""
    return os.path.join(os.path.dirname(path), ADAPTER_CONFIG)


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def _most(values: Mapping[str, Any]) -> Any:
    """Return the most frequent value, the first of several."""
    return Counter(values.values()).most_common(1)[0][0] if values else 1


def _patterns(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    return {f"^{re.escape(path)}": value for path, value in values.items() if value != default}
