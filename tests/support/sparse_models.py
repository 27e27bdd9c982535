"""Checkpoints as large as real ones, with real headers and sparse data.

They take almost no space on a file system with sparse files. The benches use them too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

Spec = tuple[str, tuple[int, ...]]
NBYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
INDEX = "model.safetensors.index.json"


def write_file(path: Path, tensors: Mapping[str, Spec]) -> int:
    """Write a file with tensors of these dtypes and shapes, and return the size of its data."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-NBYTES[item[1][0]], item[0])):
        begin, end = end, end + NBYTES[dtype] * prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return end


def write_checkpoint(
    directory: Path, shards: Mapping[str, Mapping[str, Spec]], *, by_name: bool = True
) -> Path:
    """Write a checkpoint, and return the path of its index. It lists tensors by name, or by shard."""
    total = sum(write_file(directory / file, tensors) for file, tensors in shards.items())
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    if by_name:
        weight_map = dict(sorted(weight_map.items()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path = directory / INDEX
    path.write_text(json.dumps(index, indent=2) + "\n")
    return path


def gpt2() -> dict[str, Spec]:
    """Return GPT-2 as on the Hub, with the causal masks of its attention."""
    width, context = 768, 1024
    tensors: dict[str, Spec] = {
        "wte.weight": ("F32", (50257, width)),
        "wpe.weight": ("F32", (context, width)),
        "ln_f.weight": ("F32", (width,)),
        "ln_f.bias": ("F32", (width,)),
    }
    for layer in range(12):
        prefix = f"h.{layer}."
        for norm in ("ln_1", "ln_2"):
            tensors |= {f"{prefix}{norm}.{part}": ("F32", (width,)) for part in ("weight", "bias")}
        tensors[f"{prefix}attn.bias"] = ("F32", (1, 1, context, context))
        for name, rows, columns in [
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ]:
            tensors[f"{prefix}{name}.weight"] = ("F32", (rows, columns))
            tensors[f"{prefix}{name}.bias"] = ("F32", (columns,))
    return tensors


def bloom() -> dict[str, dict[str, Spec]]:
    """Return BLOOM: 72 shards, one for each of 70 layers, one before and one after them."""
    width, layers = 14336, 70

    def norm(name: str) -> dict[str, Spec]:
        return {f"{name}.{part}": ("BF16", (width,)) for part in ("weight", "bias")}

    def linear(name: str, out: int, into: int) -> dict[str, Spec]:
        return {f"{name}.weight": ("BF16", (out, into)), f"{name}.bias": ("BF16", (out,))}

    parts = [{"word_embeddings.weight": ("BF16", (250880, width))} | norm("word_embeddings_layernorm")]
    for layer in range(layers):
        prefix = f"h.{layer}."
        parts.append(
            norm(f"{prefix}input_layernorm")
            | norm(f"{prefix}post_attention_layernorm")
            | linear(f"{prefix}self_attention.query_key_value", 3 * width, width)
            | linear(f"{prefix}self_attention.dense", width, width)
            | linear(f"{prefix}mlp.dense_h_to_4h", 4 * width, width)
            | linear(f"{prefix}mlp.dense_4h_to_h", width, 4 * width)
        )
    parts.append(norm("ln_f"))
    return {f"model_{number:05d}-of-00072.safetensors": part for number, part in enumerate(parts, 1)}


def experts(count: int = 91_000, shards: int = 163) -> dict[str, dict[str, Spec]]:
    """Return a mixture of experts with `count` tensors: 8-bit matrices, each with a scale per block."""
    names = _expert_names()
    tensors = [next(names) for _ in range(count)]
    files = [f"model-{number:05d}-of-{shards:06d}.safetensors" for number in range(1, shards + 1)]
    bounds = [rank * count // shards for rank in range(shards + 1)]
    return {file: dict(tensors[bounds[rank] : bounds[rank + 1]]) for rank, file in enumerate(files)}


def _expert_names() -> Iterator[tuple[str, Spec]]:
    width, hidden, block = 7168, 2048, 128
    yield "model.embed_tokens.weight", ("BF16", (129280, width))
    layer = 0
    while True:
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", ("BF16", (width,))
        yield f"{prefix}mlp.gate.weight", ("BF16", (256, width))
        for expert in range(256):
            for name, out, into in [
                ("gate_proj", hidden, width),
                ("up_proj", hidden, width),
                ("down_proj", width, hidden),
            ]:
                module = f"{prefix}mlp.experts.{expert}.{name}"
                yield f"{module}.weight", ("F8_E4M3", (out, into))
                yield f"{module}.weight_scale_inv", ("F32", (out // block, into // block))
        layer += 1
