"""Loaders and savers for engines: vLLM, SGLang and Lightning.

vLLM and SGLang find `ingot.engines.vllm` and `ingot.engines.sglang` by their entry points, and call them.
`ingot.engines.lightning.CheckpointIO` is passed to a trainer of Lightning. Each module is imported on first
use.
"""

# No other part of the package uses it.
