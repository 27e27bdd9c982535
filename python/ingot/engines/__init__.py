"""What engines load and save by: vLLM, SGLang and Lightning, each by its own door.

vLLM and SGLang find `ingot.engines.vllm` and `ingot.engines.sglang` by their entry points, and call them. Of
Lightning, `ingot.engines.lightning.CheckpointIO` goes to a trainer. Each is imported when it is asked for.

No other part of the package uses it.
"""
