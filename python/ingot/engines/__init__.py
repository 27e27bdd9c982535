"""Loaders and savers for engines and trainers: vLLM, SGLang, Lightning, transformers and accelerate.

vLLM and SGLang find `ingot.engines.vllm` and `ingot.engines.sglang` by their entry points, and call them.
`ingot.engines.lightning.CheckpointIO` is passed to a trainer of Lightning,
`ingot.engines.transformers.CheckpointMixin` extends a Trainer of transformers, and `ingot.engines.accelerate`
has functions for an Accelerator. Each module is imported on first
use.
"""

# No other part of the package uses it.
