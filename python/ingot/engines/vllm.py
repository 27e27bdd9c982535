"""vLLM loads weights by ingot: ``vllm serve MODEL --load-format ingot``.

vLLM calls `register` by its entry point, in every process. docs/guides/engines.md lists the tested versions
and the options.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from torch.nn import Module
from tqdm.auto import tqdm
from vllm.distributed import get_tensor_model_parallel_world_size, model_parallel_is_initialized
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.weight_utils import enable_tqdm
from vllm.model_executor.models.utils import PPMissingLayer, StageMissingLayer

from ingot._native import in_natural_order
from ingot.errors import OptionError

from ._weights import READ, Reading, Says, Weights, has_place_for, weights, without_files

__all__ = ["register"]

OPTION = "model_loader_extra_config"
# Options of vLLM's own loader that this loader supports too.
OF_VLLM = ("enable_weights_track",)
MISSING = (PPMissingLayer, StageMissingLayer)


def register() -> None:
    """Register ``--load-format ingot`` with vLLM."""
    register_model_loader("ingot")(ModelLoader)


class ModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's loader with another reader of files. Everything else is unchanged."""

    # The start time of the first source, for vLLM's message about the time.
    counter_before_loading_weights: float

    def __init__(self, load_config: Any) -> None:
        given = load_config.model_loader_extra_config
        if not isinstance(given, dict):
            raise TypeError(f"{OPTION} must be a dict for load format ingot, found {type(given).__name__}")
        theirs = {name: value for name, value in given.items() if name in OF_VLLM}
        ours = {name: value for name, value in given.items() if name not in OF_VLLM}
        self._how = Reading.of(ours, OPTION, OF_VLLM)
        if load_config.safetensors_load_strategy is not None:
            strategy = load_config.safetensors_load_strategy
            instead = f"load format ingot takes `read` in {OPTION} ({', '.join(READ)})"
            message = f"safetensors_load_strategy {strategy!r} is for vLLM's own reading: {instead}"
            raise OptionError(message, code="unknown-loader-option", expected=READ, found=strategy)
        # vLLM finds, downloads and checks files as for this format.
        super().__init__(replace(load_config, load_format="safetensors", model_loader_extra_config=theirs))
        self._model: Module | None = None

    def get_all_weights(self, model_config: Any, model: Module) -> Weights:
        """Return all weights, and note which model they are for."""
        self._model = model
        return super().get_all_weights(model_config, model)  # type: ignore[no-any-return]

    def _prepare_weights(
        self, model_name_or_path: str, subfolder: str | None, *args: Any, **kwargs: Any
    ) -> tuple[str, list[str], bool, str]:
        """Find the files, and download them, as vLLM does. A folder without one is refused."""
        try:
            found: tuple[str, list[str], bool, str]
            found = super()._prepare_weights(model_name_or_path, subfolder, *args, **kwargs)
        except RuntimeError as fault:
            folder = os.path.join(model_name_or_path, subfolder or "")
            if not os.path.isdir(folder):
                raise
            raise without_files(folder) from fault
        folder, files, is_safetensors, index = found
        return folder, in_natural_order(files), is_safetensors, index

    def _get_weights_iterator(self, source: Any) -> Weights:
        """Return the weights of a source, prefetched or read on first use."""
        if self.load_config.safetensors_load_strategy == "torchao":
            # vLLM has found tensors of torchao, which it makes of several of the file.
            return super()._get_weights_iterator(source)  # type: ignore[no-any-return]
        names = ("model_or_path", "subfolder", "revision", "fall_back_to_pt", "allow_patterns_overrides")
        _, files, is_safetensors, _ = self._prepare_weights(*(getattr(source, name) for name in names))
        if not is_safetensors:
            # A model may name the files of its weights.
            return super()._get_weights_iterator(source)  # type: ignore[no-any-return]
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        ranks = get_tensor_model_parallel_world_size() if model_parallel_is_initialized() else 1
        is_silent = not enable_tqdm(self.load_config.use_tqdm_on_load)
        shown = tqdm(files, "Loading shards by ingot", disable=is_silent)
        found = weights(shown, self._how.decided(ranks), self._is_used(source), self._is_left_out)
        return ((source.prefix + name, tensor) for name, tensor in found)

    def _is_left_out(self, name: str) -> bool:
        """Return whether vLLM assigns this expert to another rank."""
        return should_skip_weight(name, self.local_expert_ids)  # type: ignore[no-any-return]

    def _is_used(self, source: Any) -> Says:
        """Return a function that decides whether a weight is expected to be used, by vLLM's model."""
        model = self._model
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        # For a model of which only the encoder is used.
        lacks_most = self._encoder_only_lm_prefixes is not None

        def is_used(name: str) -> bool:
            if lacks_most or (source.is_unused_weight is not None and source.is_unused_weight(name)):
                return False
            places = [source.prefix + name]
            if mapper is not None:
                places = mapper.apply_list(places)
            return any(model is None or has_place_for(model, place, MISSING) for place in places)

        return is_used
