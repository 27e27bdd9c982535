"""SGLang loads weights by ingot: ``SGLANG_PLUGINS=ingot sglang serve --model-path MODEL``.

SGLang calls `register` by its entry point, in every process, unless `SGLANG_PLUGINS` excludes it.
docs/guides/engines.md lists the tested versions and the options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.nn import Module

from ._weights import Reading, Weights, has_place_for, weights

__all__ = ["register"]

OPTION = "model_loader_extra_config"
HOME = "sglang.srt.model_loader"
# SGLang's iterators over the tensors of safetensors files, with one thread and with several.
ITERATORS = ("safetensors_weights_iterator", "buffered_multi_thread_safetensors_weights_iterator")


class _Loading(NamedTuple):
    """The facts of a loader that loads by ingot."""

    how: Reading
    model: Module | None = None


_loadings: WeakKeyDictionary[Any, _Loading] = WeakKeyDictionary()
# The loader that is currently requesting an iterator, since iterators do not know their loader.
_asking: list[_Loading] = []


def register() -> None:
    """Install ingot in SGLang's loader, if the user has named it in `SGLANG_PLUGINS`.

    If that is not set, SGLang calls every installed plugin, but installing a library must not change how a
    server loads.
    """
    if "ingot" not in [name.strip() for name in (envs.SGLANG_PLUGINS.get() or "").split(",")]:
        return
    for name, hook in (
        ("loader.DefaultModelLoader.__init__", _made),
        ("loader.DefaultModelLoader._get_all_weights", _for_model),
        ("loader.DefaultModelLoader._get_weights_iterator", _asked),
        *((f"weight_utils.{name}", _given) for name in ITERATORS),
    ):
        HookRegistry.register(f"{HOME}.{name}", hook, HookType.AROUND)


def _made(original: Callable[..., None], self: Any, load_config: Any) -> None:
    """Take ``"ingot"`` out of the options of a loader, which knows its own."""
    options = load_config.model_loader_extra_config or {}
    given = options.get("ingot", {})
    if given is False:
        others = {name: value for name, value in options.items() if name != "ingot"}
        original(self, replace(load_config, model_loader_extra_config=others))
        return
    where = f'{OPTION}["ingot"]'
    if not isinstance(given, dict):
        raise TypeError(f"{where} must be a dict of options, or false, found {type(given).__name__}")
    how = Reading.of(given, where)
    others = {name: value for name, value in options.items() if name != "ingot"}
    original(self, replace(load_config, model_loader_extra_config=others))
    _loadings[self] = _Loading(how)


def _for_model(original: Callable[..., Weights], self: Any, model_config: Any, model: Module) -> Weights:
    """Record the model for which weights are loaded."""
    if self in _loadings:
        _loadings[self] = _loadings[self]._replace(model=model)
    return original(self, model_config, model)


def _asked(original: Callable[..., Weights], self: Any, *args: Any, **kwargs: Any) -> Weights:
    """Record the loader while it requests an iterator."""
    loading = _loadings.get(self)
    if loading is None:
        return original(self, *args, **kwargs)
    _asking.append(loading)
    try:
        return original(self, *args, **kwargs)
    finally:
        _asking.pop()


def _given(
    original: Callable[..., Weights], hf_weights_files: list[str], *args: Any, **kwargs: Any
) -> Weights:
    """Return the weights of files, read by ingot for loaders that enable it."""
    if not _asking:
        return original(hf_weights_files, *args, **kwargs)
    # Imported here, because SGLang calls its plugins before these modules exist.
    from sglang.srt.distributed.parallel_state import (
        get_tensor_model_parallel_world_size,
        model_parallel_is_initialized,
    )
    from sglang.srt.layers.utils import PPMissingLayer

    how, model = _asking[-1]
    ranks = get_tensor_model_parallel_world_size() if model_parallel_is_initialized() else 1

    def is_used(name: str) -> bool:
        return model is None or has_place_for(model, name, (PPMissingLayer,))

    return weights(hf_weights_files, how.decided(ranks), is_used)
