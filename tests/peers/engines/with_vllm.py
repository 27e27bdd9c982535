"""One rank of vLLM: load a model by vLLM's own format and again by ingot, and report the results.

    with_vllm.py JSON

JSON has `folder`, `rank`, `tensor`, `pipeline`, `experts` (the sizes of the parallel groups, and whether
experts are parallel), `rendezvous`, `options` (of the loader) and `report`, where the answer is written.
Everything is vLLM's: the configuration, the groups, the model and its layers, which take their weights by
loaders of their own.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import (
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.plugins import load_general_plugins
from vllm.utils.torch_utils import set_default_torch_dtype


def nbytes_read() -> int:
    """Return the bytes that this process has read by calls. Mapped pages do not count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def loaded(config: VllmConfig, load_config: LoadConfig) -> dict[str, Any]:
    # vLLM registers the layers of a model by names that the second model has too.
    config.compilation_config.static_forward_context.clear()
    model = initialize_model(vllm_config=config, model_config=config.model_config)
    for parameter in model.parameters():
        # Clear the values, so that old ones cannot pass.
        torch.nn.init.constant_(parameter, 7.0)
    loader = get_model_loader(load_config)
    before = nbytes_read()
    loader.load_weights(model, config.model_config)
    read = nbytes_read() - before
    digests = {
        name: hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, parameter in model.named_parameters()
    }
    return {"loader": type(loader).__module__, "nbytes_read": read, "digests": digests}


def main(asked: dict[str, Any]) -> None:
    model = ModelConfig(model=asked["folder"], skip_tokenizer_init=True, dtype="float32", max_model_len=64)
    parallel = ParallelConfig(
        tensor_parallel_size=asked["tensor"],
        pipeline_parallel_size=asked["pipeline"],
        rank=asked["rank"],
        enable_expert_parallel=asked["experts"],
        enable_ep_weight_filter=asked["experts"],
        distributed_executor_backend="external_launcher",
    )
    # As `vllm serve` does, by the entry points of installed packages.
    load_general_plugins()
    by_ingot = LoadConfig(
        load_format="ingot", model_loader_extra_config=asked["options"], use_tqdm_on_load=False
    )
    own = LoadConfig(load_format="safetensors", use_tqdm_on_load=False)
    config = VllmConfig(
        model_config=model,
        parallel_config=parallel,
        load_config=own,
        device_config=DeviceConfig(device="cpu"),
    )
    ranks = asked["tensor"] * asked["pipeline"]
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        init_distributed_environment(ranks, asked["rank"], asked["rendezvous"], asked["rank"], "gloo")
        initialize_model_parallel(asked["tensor"], asked["pipeline"])
        # The first load imports modules.
        report = {"vllm": loaded(config, own), "ingot": loaded(config, by_ingot)}
    Path(asked["report"]).write_text(json.dumps({**report, "version": vllm.__version__}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
