#!/usr/bin/env python3
"""Write tests/vectors/kinds: the headers of published models, from their published configurations.

    pip install torch transformers diffusers peft
    tests/vectors/make_kinds.py [NAME...]

The libraries build each model on the meta device, so that no weights are needed. Files of other programs
(kohya's scripts, ComfyUI, quantisers) are derived from these by the names and shapes that the programs use.
Each file has the tensors, the metadata, the JSON files beside the model and the expected statement. Numbers
of names that differ only in a number are folded: ``layers.{0-31}.mlp``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent / "kinds"
Shapes = dict[str, tuple[str, tuple[int, ...]]]
FILES: dict[str, Callable[[], dict[str, Any]]] = {}


def file(**expected: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register the maker of a file, named as the function, with the expected statement."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        def made() -> dict[str, Any]:
            found = make()
            tensors, beside = found if isinstance(found, tuple) else (found, {})
            return {"expected": expected, **beside, "tensors": folded(tensors)}

        FILES[make.__name__.replace("_", "-")] = made
        return make

    return register


# The text form of many names.


def folded(tensors: Shapes) -> dict[str, str]:
    """Return the tensors with the numbers of similar names folded."""
    rows = {tuple(re.split(r"(?<![^._])(\d+)(?![^._])", name)): spec for name, spec in tensors.items()}
    longest = max(map(len, rows))
    for place in range(1, longest, 2):
        groups: dict[Any, list[int]] = {}
        rest = {}
        for parts, spec in rows.items():
            if place < len(parts) and parts[place].isdigit():
                groups.setdefault((parts[:place], parts[place + 1 :], spec), []).append(int(parts[place]))
            else:
                rest[parts] = spec
        for (head, tail, spec), numbers in groups.items():
            rest[(*head, ranges(sorted(numbers)), *tail)] = spec
        rows = rest
    return {"".join(parts): f"{dtype} {list(shape)}" for parts, (dtype, shape) in rows.items()}


def ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(numbers) == 1:
        return str(numbers[0])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"


# Models of the libraries.


def shapes(model: torch.nn.Module, dtype: str) -> Shapes:
    kept = {**dict(model.named_parameters(remove_duplicate=True))}
    kept |= {
        name: one
        for name, one in model.state_dict().items()
        if name not in dict(model.named_parameters(remove_duplicate=False))
    }
    return {
        name: (dtype if one.is_floating_point() else "I64", tuple(one.shape)) for name, one in kept.items()
    }


def transformer(kind: str, dtype: str, auto: str | None = None, **config: Any) -> Shapes:
    import transformers

    made = transformers.AutoConfig.for_model(kind, **config)
    name = auto or "AutoModelForCausalLM"
    with torch.device("meta"):
        cls = getattr(transformers, name)
        model = cls.from_config(made) if name.startswith("Auto") else cls(made)
    found = shapes(model, dtype)
    if getattr(made, "tie_word_embeddings", False):
        found.pop("lm_head.weight", None)
    return found


def diffuser(cls: str, dtype: str = "F16", **config: Any) -> Shapes:
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, cls)(**config)
    return shapes(model, dtype)


def unfused(
    tensors: Shapes, names: tuple[str, str, str], old: str = "mlp.experts", new: str = "mlp.experts"
) -> Shapes:
    """Return the tensors with each expert of its own, as published files have them."""
    found: Shapes = {}
    for name, (dtype, shape) in tensors.items():
        if name.endswith(f"{old}.gate_up_proj"):
            for at in range(shape[0]):
                for part in names[:2]:
                    head = name.removesuffix(f"{old}.gate_up_proj")
                    found[f"{head}{new}.{at}.{part}.weight"] = dtype, (shape[1] // 2, shape[2])
        elif name.endswith(f"{old}.down_proj"):
            for at in range(shape[0]):
                found[f"{name.removesuffix(f'{old}.down_proj')}{new}.{at}.{names[2]}.weight"] = (
                    dtype,
                    shape[1:],
                )
        else:
            found[
                name.replace("mlp.gate", new.replace("experts", "gate")) if "block_sparse" in new else name
            ] = dtype, shape
    return found


def renamed(tensors: Shapes, *pairs: tuple[str, str]) -> Shapes:
    found = {}
    for name, spec in tensors.items():
        for old, new in pairs:
            name = re.sub(old, new, name)
        found[name] = spec
    return found


def prefixed(prefix: str, tensors: Shapes) -> Shapes:
    return {prefix + name: spec for name, spec in tensors.items()}


def typed(tensors: Shapes, dtype: str) -> Shapes:
    return {name: (dtype, shape) for name, (_, shape) in tensors.items()}


LLAMA2 = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
LLAMA3 = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
MISTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
QWEN25 = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN3 = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


@file(kind="language model", base="Llama", rank=None)
def llama_2_7b() -> Any:
    return transformer("llama", "F16", **LLAMA2)


@file(kind="language model", base="Llama", rank=None)
def llama_3_8b() -> Any:
    return transformer("llama", "BF16", **LLAMA3)


@file(kind="language model", base="Llama", rank=None)
def llama_3_2_1b() -> Any:
    return transformer("llama", "BF16", **LLAMA1B)


@file(kind="language model", base="Mistral", rank=None)
def mistral_7b() -> Any:
    return transformer("mistral", "BF16", **MISTRAL)


@file(kind="language model", base="Mistral", rank=None)
def mistral_of_other_size_with_config() -> Any:
    found = transformer(
        "mistral",
        "BF16",
        **{**MISTRAL, "hidden_size": 2560, "num_attention_heads": 20, "num_key_value_heads": 4},
    )
    return found, {"config.json": {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}}


@file(kind="language model", base="Llama, Mistral or others", rank=None)
def llama_of_other_size() -> Any:
    return transformer(
        "llama",
        "BF16",
        **{
            **LLAMA2,
            "vocab_size": 49152,
            "hidden_size": 960,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
            "intermediate_size": 2560,
        },
    )


@file(kind="language model", base="Mixtral", rank=None)
def mixtral_8x7b() -> Any:
    found = transformer("mixtral", "BF16", **MISTRAL)
    return unfused(found, ("w1", "w3", "w2"), new="block_sparse_moe.experts")


@file(kind="language model", base="Qwen 1.5 to 2.5", rank=None)
def qwen_2_5_7b() -> Any:
    return transformer("qwen2", "BF16", **QWEN25)


@file(kind="language model", base="Qwen 3", rank=None)
def qwen_3_8b() -> Any:
    return transformer("qwen3", "BF16", **QWEN3)


@file(kind="language model", base="Qwen 3", rank=None)
def qwen_3_30b_a3b() -> Any:
    found = transformer(
        "qwen3_moe",
        "BF16",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        num_experts=128,
        moe_intermediate_size=768,
    )
    return unfused(found, ("gate_proj", "up_proj", "down_proj"))


@file(kind="language model", base="Gemma", rank=None)
def gemma_2b() -> Any:
    return transformer(
        "gemma",
        "BF16",
        hidden_size=2048,
        intermediate_size=16384,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=256000,
    )


@file(kind="language model", base="Gemma 2", rank=None)
def gemma_2_9b() -> Any:
    return transformer(
        "gemma2",
        "BF16",
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        vocab_size=256000,
    )


GEMMA3 = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
}


@file(kind="language model", base="Gemma 3", rank=None)
def gemma_3_4b_text() -> Any:
    return transformer("gemma3_text", "BF16", **GEMMA3)


DEEPSEEK = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}


@file(kind="language model", base="DeepSeek 3", rank=None)
def deepseek_v3() -> Any:
    return unfused(transformer("deepseek_v3", "BF16", **DEEPSEEK), ("gate_proj", "up_proj", "down_proj"))


@file(kind="language model", base="DeepSeek 2", rank=None)
def deepseek_v2_lite() -> Any:
    found = transformer(
        "deepseek_v2",
        "BF16",
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=64,
        n_shared_experts=2,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        v_head_dim=128,
        qk_nope_head_dim=128,
        first_k_dense_replace=1,
        vocab_size=102400,
    )
    return unfused(found, ("gate_proj", "up_proj", "down_proj"))


@file(kind="language model", base="GPT-2", rank=None)
def gpt2() -> Any:
    return renamed(transformer("gpt2", "F32"), ("^transformer\\.", ""))


@file(kind="text encoder", base="BERT", rank=None)
def bert_base() -> Any:
    return transformer("bert", "F32", "AutoModelForMaskedLM")


@file(kind="text encoder", base="RoBERTa", rank=None)
def roberta_base() -> Any:
    return transformer(
        "roberta",
        "F32",
        "AutoModelForMaskedLM",
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
    )


@file(kind="language model", base="T5", rank=None)
def t5_small() -> Any:
    return transformer("t5", "F32", "AutoModelForSeq2SeqLM")


@file(kind="text encoder", base="T5 1.1", rank=None)
def t5_xxl_encoder() -> Any:
    return transformer(
        "t5",
        "F16",
        "T5EncoderModel",
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=24,
        num_heads=64,
        feed_forward_proj="gated-gelu",
        vocab_size=32128,
    )


@file(kind="image and text encoder", base="CLIP", rank=None)
def clip_vit_l() -> Any:
    return transformer(
        "clip",
        "F32",
        "CLIPModel",
        projection_dim=768,
        text_config={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
        },
        vision_config={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
        },
    )


def clip_text(hidden: int, layers: int, ff: int, cls: str) -> Shapes:
    import transformers

    config = transformers.CLIPTextConfig(
        hidden_size=hidden,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        projection_dim=hidden,
    )
    with torch.device("meta"):
        return shapes(getattr(transformers, cls)(config), "F16")


@file(kind="text encoder", base="CLIP", rank=None)
def clip_text_g() -> Any:
    return clip_text(1280, 32, 5120, "CLIPTextModelWithProjection")


@file(kind="speech model", base="Whisper", rank=None)
def whisper_small() -> Any:
    found = transformer(
        "whisper",
        "F32",
        "WhisperForConditionalGeneration",
        d_model=768,
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    )
    found.pop("proj_out.weight", None)
    return found


# Quantised weights.


def quantised(tensors: Shapes, pack: Callable[[str, tuple[int, ...]], Shapes]) -> Shapes:
    found: Shapes = {}
    for name, (dtype, shape) in tensors.items():
        if re.search(r"(self_attn|mlp)\..*proj\.weight$", name):
            found |= pack(name.removesuffix(".weight"), shape)
        else:
            found[name] = dtype, shape
    return found


def gptq(bits: int, group: int = 128) -> Callable[[str, tuple[int, ...]], Shapes]:
    def pack(name: str, shape: tuple[int, ...]) -> Shapes:
        out, inner = shape
        groups = inner // group
        return {
            f"{name}.qweight": ("I32", (inner * bits // 32, out)),
            f"{name}.qzeros": ("I32", (groups, out * bits // 32)),
            f"{name}.scales": ("F16", (groups, out)),
            f"{name}.g_idx": ("I32", (inner,)),
        }

    return pack


def awq(name: str, shape: tuple[int, ...]) -> Shapes:
    out, inner = shape
    return {
        f"{name}.qweight": ("I32", (inner, out // 8)),
        f"{name}.qzeros": ("I32", (inner // 128, out // 8)),
        f"{name}.scales": ("F16", (inner // 128, out)),
    }


def nf4(name: str, shape: tuple[int, ...]) -> Shapes:
    count = shape[0] * shape[1]
    return {
        f"{name}.weight": ("U8", (count // 2, 1)),
        f"{name}.weight.absmax": ("U8", (count // 64,)),
        f"{name}.weight.nested_absmax": ("F32", (count // 64 // 256,)),
        f"{name}.weight.nested_quant_map": ("F32", (256,)),
        f"{name}.weight.quant_map": ("F32", (16,)),
        f"{name}.weight.quant_state.bitsandbytes__nf4": ("U8", (112,)),
    }


def int8(name: str, shape: tuple[int, ...]) -> Shapes:
    return {
        f"{name}.weight": ("I8", shape),
        f"{name}.SCB": ("F32", shape[:1]),
        f"{name}.weight_format": ("U8", ()),
    }


def fp8_blocks(name: str, shape: tuple[int, ...]) -> Shapes:
    blocks = tuple(-(-one // 128) for one in shape)
    return {f"{name}.weight": ("F8_E4M3", shape), f"{name}.weight_scale_inv": ("F32", blocks)}


def fp8(name: str, shape: tuple[int, ...]) -> Shapes:
    return {f"{name}.weight": ("F8_E4M3", shape), f"{name}.weight_scale": ("BF16", (shape[0], 1))}


def nvfp4(name: str, shape: tuple[int, ...]) -> Shapes:
    return {
        f"{name}.weight": ("U8", (shape[0], shape[1] // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (shape[0], shape[1] // 16)),
        f"{name}.weight_scale_2": ("F32", ()),
        f"{name}.input_scale": ("F32", ()),
    }


def pack_quantized(name: str, shape: tuple[int, ...]) -> Shapes:
    return {
        f"{name}.weight_packed": ("I32", (shape[0], shape[1] // 8)),
        f"{name}.weight_scale": ("BF16", (shape[0], shape[1] // 128)),
        f"{name}.weight_shape": ("I64", (2,)),
    }


@file(kind="language model", base="Llama", rank=None, packing="GPTQ, 4 bit")
def llama_gptq() -> Any:
    return quantised(transformer("llama", "F16", **LLAMA2), gptq(4))


@file(kind="language model", base="Llama", rank=None, packing="AWQ, 4 bit")
def llama_awq() -> Any:
    return quantised(transformer("llama", "F16", **LLAMA3), awq)


@file(kind="language model", base="Mistral", rank=None, packing="bitsandbytes NF4, 4 bit")
def mistral_nf4() -> Any:
    found = quantised(transformer("mistral", "BF16", **MISTRAL), nf4)
    return found, {
        "config.json": {"model_type": "mistral", "quantization_config": {"quant_method": "bitsandbytes"}}
    }


@file(kind="language model", base="Qwen 3", rank=None, packing="8 bit floats with scales")
def qwen_3_fp8() -> Any:
    return quantised(transformer("qwen3", "BF16", **QWEN3), fp8_blocks)


@file(kind="language model", base="Llama", rank=None, packing="NVFP4, 4 bit")
def llama_nvfp4() -> Any:
    return quantised(transformer("llama", "BF16", **LLAMA3), nvfp4)


@file(kind=None, base=None, rank=None, packing="NVFP4, 4 bit")
def llama4_nvfp4() -> Any:
    """The experts of a layer are one tensor, which ModelOpt packs along the rows."""
    found = transformer("llama4_text", "BF16")
    for name in [name for name in found if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = found.pop(name)[1]
        found[name] = "U8", (experts, rows // 2, columns)
        found[f"{name}_weight_scale"] = "F8_E4M3", (experts, rows // 16, columns)
        found[f"{name}_weight_scale_2"] = "F32", ()
    return found


@file(kind="language model", base="Llama", rank=None, packing="compressed-tensors, packed")
def llama_compressed() -> Any:
    return quantised(transformer("llama", "BF16", **LLAMA3), pack_quantized)


# Diffusion models and their parts.

ATTENTION = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
SD15 = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
SDXL = {
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
FLUX = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}
SD3 = {
    "sample_size": 128,
    "in_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "out_channels": 16,
    "pos_embed_max_size": 192,
}
WAN = {
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
}


def ldm_unet(tensors: Shapes) -> Shapes:
    """Return a UNet of diffusers with the names of the original code."""
    found = {}
    for name, spec in tensors.items():
        name = re.sub(
            r"^down_blocks\.(\d)\.(resnets|attentions)\.(\d)",
            lambda m: f"input_blocks.{3 * int(m[1]) + int(m[3]) + 1}.{int(m[2] == 'attentions')}",
            name,
        )
        name = re.sub(
            r"^down_blocks\.(\d)\.downsamplers\.0\.conv",
            lambda m: f"input_blocks.{3 * int(m[1]) + 3}.0.op",
            name,
        )
        name = re.sub(
            r"^up_blocks\.(\d)\.(resnets|attentions)\.(\d)",
            lambda m: f"output_blocks.{3 * int(m[1]) + int(m[3])}.{int(m[2] == 'attentions')}",
            name,
        )
        name = re.sub(
            r"^up_blocks\.(\d)\.upsamplers\.0\.conv",
            lambda m: f"output_blocks.{3 * int(m[1]) + 2}.2.conv",
            name,
        )
        name = re.sub(r"^mid_block\.resnets\.(\d)", lambda m: f"middle_block.{2 * int(m[1])}", name)
        name = name.replace("mid_block.attentions.0", "middle_block.1").replace(
            "conv_in.", "input_blocks.0.0."
        )
        if "_blocks." in name or "middle_block" in name:
            for old, new in (
                ("norm1.", "in_layers.0."),
                ("conv1.", "in_layers.2."),
                ("norm2.", "out_layers.0."),
                ("conv2.", "out_layers.3."),
                ("time_emb_proj.", "emb_layers.1."),
                ("conv_shortcut.", "skip_connection."),
            ):
                if "transformer_blocks" not in name:
                    name = name.replace(f".{old}", f".{new}")
        for old, new in (
            ("time_embedding.linear_1", "time_embed.0"),
            ("time_embedding.linear_2", "time_embed.2"),
            ("add_embedding.linear_1", "label_emb.0.0"),
            ("add_embedding.linear_2", "label_emb.0.2"),
            ("conv_norm_out", "out.0"),
            ("conv_out", "out.2"),
        ):
            name = name.replace(old, new)
        found[name] = spec
    return found


def ldm_vae(tensors: Shapes) -> Shapes:
    found = {}
    for name, (dtype, shape) in tensors.items():
        name = re.sub(r"encoder\.down_blocks\.(\d)\.resnets\.(\d)", r"encoder.down.\1.block.\2", name)
        name = re.sub(r"encoder\.down_blocks\.(\d)\.downsamplers\.0", r"encoder.down.\1.downsample", name)
        name = re.sub(
            r"decoder\.up_blocks\.(\d)\.resnets\.(\d)",
            lambda m: f"decoder.up.{3 - int(m[1])}.block.{m[2]}",
            name,
        )
        name = re.sub(
            r"decoder\.up_blocks\.(\d)\.upsamplers\.0", lambda m: f"decoder.up.{3 - int(m[1])}.upsample", name
        )
        name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
        name = name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        if "mid_block.attentions" in name:
            name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("group_norm", "norm")
            for old, new in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")):
                name = name.replace(f".{old}.", f".{new}.")
            shape = (*shape, 1, 1) if len(shape) == 2 else shape
        found[name] = dtype, shape
    return found


def sd15_unet() -> Shapes:
    return diffuser("UNet2DConditionModel", **SD15)


def sdxl_unet() -> Shapes:
    return diffuser("UNet2DConditionModel", **SDXL)


def vae(channels: int = 4, **more: Any) -> Shapes:
    return diffuser("AutoencoderKL", latent_channels=channels, **VAE, **more)


@file(kind="UNet", base="Stable Diffusion 1.x", rank=None)
def sd_1_5_unet() -> Any:
    return sd15_unet()


@file(kind="UNet", base="Stable Diffusion XL", rank=None)
def sdxl_unet_diffusers() -> Any:
    return sdxl_unet()


@file(kind="checkpoint", base="Stable Diffusion 1.x", rank=None)
def sd_1_5_checkpoint() -> Any:
    text = clip_text(768, 12, 3072, "CLIPTextModel")
    return {
        **prefixed("model.diffusion_model.", ldm_unet(sd15_unet())),
        **prefixed("first_stage_model.", ldm_vae(vae())),
        **prefixed("cond_stage_model.transformer.", text),
    }


@file(kind="checkpoint", base="Stable Diffusion XL", rank=None)
def sdxl_checkpoint() -> Any:
    text = clip_text(768, 12, 3072, "CLIPTextModel")
    second = {
        f"conditioner.embedders.1.model.transformer.resblocks.{at}.attn.in_proj_weight": ("F16", (3840, 1280))
        for at in range(32)
    }
    second["conditioner.embedders.1.model.text_projection"] = "F16", (1280, 1280)
    return {
        **prefixed("model.diffusion_model.", ldm_unet(sdxl_unet())),
        **prefixed("first_stage_model.", ldm_vae(vae())),
        **prefixed("conditioner.embedders.0.transformer.", text),
        **second,
    }


@file(kind="transformer", base="Stable Diffusion 3", rank=None)
def sd_3_medium() -> Any:
    return diffuser("SD3Transformer2DModel", **SD3)


@file(kind="transformer", base="Flux", rank=None)
def flux_dev() -> Any:
    return diffuser("FluxTransformer2DModel", "BF16", **FLUX)


def flux_original(guidance: bool, dtype: str = "BF16") -> Shapes:
    def linear(name: str, out: int, inner: int) -> Shapes:
        return {f"{name}.weight": (dtype, (out, inner)), f"{name}.bias": (dtype, (out,))}

    found: Shapes = {}
    embedders = {"time_in": 256, "vector_in": 768} | ({"guidance_in": 256} if guidance else {})
    for name, inner in embedders.items():
        found |= linear(f"{name}.in_layer", 3072, inner) | linear(f"{name}.out_layer", 3072, 3072)
    found |= linear("img_in", 3072, 64) | linear("txt_in", 3072, 4096)
    for at in range(19):
        for side in ("img", "txt"):
            block = f"double_blocks.{at}.{side}"
            found |= linear(f"{block}_mod.lin", 18432, 3072) | linear(f"{block}_attn.qkv", 9216, 3072)
            found |= linear(f"{block}_attn.proj", 3072, 3072)
            found |= linear(f"{block}_mlp.0", 12288, 3072) | linear(f"{block}_mlp.2", 3072, 12288)
            found |= {f"{block}_attn.norm.{one}_norm.scale": (dtype, (128,)) for one in ("query", "key")}
    for at in range(38):
        block = f"single_blocks.{at}"
        found |= linear(f"{block}.linear1", 21504, 3072) | linear(f"{block}.linear2", 3072, 15360)
        found |= linear(f"{block}.modulation.lin", 9216, 3072)
        found |= {f"{block}.norm.{one}_norm.scale": (dtype, (128,)) for one in ("query", "key")}
    return (
        found | linear("final_layer.linear", 64, 3072) | linear("final_layer.adaLN_modulation.1", 6144, 3072)
    )


@file(kind="transformer", base="Flux", rank=None)
def flux_dev_original_fp8() -> Any:
    return flux_original(guidance=True, dtype="F8_E4M3")


@file(kind="transformer", base="Wan", rank=None)
def wan_2_1_t2v_14b() -> Any:
    return diffuser("WanTransformer3DModel", "BF16", **WAN)


def wan_original(tensors: Shapes) -> Shapes:
    return renamed(
        tensors,
        (r"attn1\.to_([qkv])\.", r"self_attn.\1."), (r"attn2\.to_([qkv])\.", r"cross_attn.\1."),
        (r"attn1\.to_out\.0", "self_attn.o"), (r"attn2\.to_out\.0", "cross_attn.o"),
        (r"attn1\.norm_", "self_attn.norm_"), (r"attn2\.norm_", "cross_attn.norm_"),
        (r"attn2\.add_([kv])_proj", r"cross_attn.\1_img"),
        (r"ffn\.net\.0\.proj", "ffn.0"), (r"ffn\.net\.2", "ffn.2"),
        (r"^scale_shift_table", "head.modulation"), (r"scale_shift_table", "modulation"),
        (r"^proj_out", "head.head"),
        (r"condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
        (r"condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
        (r"condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
        (r"condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
        (r"condition_embedder\.time_proj", "time_projection.1"),
    )  # fmt: skip


@file(kind="transformer", base="Wan", rank=None)
def wan_2_1_original() -> Any:
    return prefixed("model.diffusion_model.", wan_original(diffuser("WanTransformer3DModel", "F16", **WAN)))


QWEN_IMAGE = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
}


@file(kind="transformer", base="Qwen-Image", rank=None)
def qwen_image() -> Any:
    return diffuser("QwenImageTransformer2DModel", "BF16", **QWEN_IMAGE)


@file(kind="VAE", base="Stable Diffusion 1.x, 2.x or XL", rank=None)
def sd_vae() -> Any:
    return vae()


@file(kind="VAE", base="Stable Diffusion 3 or Flux", rank=None)
def flux_vae_original() -> Any:
    return ldm_vae(typed(vae(16, use_quant_conv=False, use_post_quant_conv=False), "F32"))


@file(kind="VAE", base="Wan or Qwen-Image", rank=None)
def wan_vae() -> Any:
    return diffuser("AutoencoderKLWan", "F32")


# Adapters.


def modules(tensors: Shapes, pattern: str) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Yield the modules whose weight has at least two dimensions and matches a pattern."""
    for name, (_, shape) in tensors.items():
        if name.endswith(".weight") and len(shape) > 1 and re.search(pattern, name):
            yield name.removesuffix(".weight"), shape


def kohya(
    tensors: Shapes, pattern: str, rank: int | Callable[[str], int], prefix: str = "lora_unet_"
) -> Shapes:
    found: Shapes = {}
    for name, shape in modules(tensors, pattern):
        stem = prefix + name.replace(".", "_")
        number = rank(name) if callable(rank) else rank
        found[f"{stem}.lora_down.weight"] = "F16", (number, shape[1], *shape[2:])
        found[f"{stem}.lora_up.weight"] = "F16", (shape[0], number, *(1 for _ in shape[2:]))
        found[f"{stem}.alpha"] = "F16", ()
    return found


def peft_names(tensors: Shapes, pattern: str, rank: int, prefix: str, suffix: str = "") -> Shapes:
    found: Shapes = {}
    for name, shape in modules(tensors, pattern):
        found[f"{prefix}{name}.lora_A{suffix}.weight"] = "F32", (rank, shape[1], *shape[2:])
        found[f"{prefix}{name}.lora_B{suffix}.weight"] = "F32", (shape[0], rank, *(1 for _ in shape[2:]))
    return found


def peft(kind: str, auto: str, targets: list[str], rank: int, dora: bool = False, **config: Any) -> Shapes:
    """Return the adapter that peft saves for a model."""
    import transformers
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **config))
        model = get_peft_model(model, LoraConfig(r=rank, target_modules=targets, use_dora=dora))
        found = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: ("F32", tuple(one.shape)) for name, one in found.items()}


TRANSFORMER = r"attentions.*(attn\d\.to_[qkv]|to_out\.0|ff\.net\.(0\.proj|2)|proj_in|proj_out)\.weight"
LDM = r"\.1\.(transformer_blocks.*(attn\d\.to_[qkv]|to_out\.0|ff\.net\.(0\.proj|2))|proj_in|proj_out)\.weight"
TEXT = r"(self_attn\..*_proj|mlp\.fc\d)\.weight"


def with_text_model(tensors: Shapes) -> Shapes:
    """Return a text encoder of CLIP with the prefix that published files have."""
    return renamed(tensors, (r"^(?!text_model\.|text_projection)", "text_model."))


@file(kind="LoRA", base="Stable Diffusion 1.x", rank=[16, 16])
def kohya_sd_1_5() -> Any:
    text = with_text_model(clip_text(768, 12, 3072, "CLIPTextModel"))
    return {**kohya(sd15_unet(), TRANSFORMER, 16), **kohya(text, TEXT, 16, "lora_te_")}


@file(kind="LoRA", base="Stable Diffusion XL", rank=[4, 32])
def kohya_sdxl_of_several_ranks() -> Any:
    text = with_text_model(clip_text(768, 12, 3072, "CLIPTextModel"))
    found = kohya(ldm_unet(sdxl_unet()), LDM, lambda name: 4 if "attn1" in name else 32)
    beside = {
        "metadata": {
            "ss_base_model_version": "sdxl_base_v1-0",
            "ss_network_module": "networks.lora",
            "ss_network_alpha": "16",
        }
    }
    return {**found, **kohya(text, TEXT, 32, "lora_te1_")}, beside


@file(kind="LoRA", base=None, rank=[16, 16])
def peft_llama() -> Any:
    return peft("llama", "AutoModelForCausalLM", ["q_proj", "v_proj"], 16, **LLAMA3)


@file(kind="LoRA", base="meta-llama/Meta-Llama-3-8B", rank=[16, 16])
def peft_llama_with_config() -> Any:
    beside = {
        "adapter_config.json": {
            "peft_type": "LORA",
            "r": 16,
            "lora_alpha": 32,
            "base_model_name_or_path": "meta-llama/Meta-Llama-3-8B",
        }
    }
    return peft_llama(), beside


@file(kind="DoRA", base="GPT-2", rank=[8, 8])
def peft_gpt2_dora() -> Any:
    return peft("gpt2", "AutoModelForCausalLM", ["c_attn"], 8, dora=True)


@file(kind="LoRA", base="Flux or Chroma", rank=[16, 16])
def diffusers_flux() -> Any:
    found = diffuser("FluxTransformer2DModel", **FLUX)
    return peft_names(
        found,
        r"(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff\.net\.(0\.proj|2))\.weight",
        16,
        "transformer.",
    ) | peft_names(found, r"single.*attn\.to_[qkv]\.weight|single.*proj_mlp\.weight", 16, "transformer.")


@file(kind="LoRA", base="Flux", rank=[8, 8])
def kohya_flux() -> Any:
    return kohya(flux_original(True), r"(qkv|proj|mlp\.\d|linear\d|lin)\.weight", 8)


@file(kind="LoRA", base="Wan", rank=[32, 32])
def comfy_wan() -> Any:
    found = wan_original(diffuser("WanTransformer3DModel", **WAN))
    return peft_names(found, r"blocks.*(attn\.[qkvo]|ffn\.\d)\.weight", 32, "diffusion_model.")


@file(kind="LoRA", base="Qwen-Image", rank=[16, 16])
def diffusers_qwen_image() -> Any:
    found = diffuser("QwenImageTransformer2DModel", **QWEN_IMAGE)
    return peft_names(found, r"attn\.(to_[qkv]|to_out\.0)\.weight", 16, "transformer.")


@file(kind="LoCon", base="Stable Diffusion 1.x", rank=[4, 16])
def kohya_locon_sd_1_5() -> Any:
    unet = sd15_unet()
    return {
        **kohya(unet, TRANSFORMER, 16),
        **kohya(unet, r"(resnets.*conv\d|samplers\.0\.conv|time_emb_proj)\.weight", 4),
    }


def lokr(tensors: Shapes, pattern: str, rank: int, factor: int, prefix: str) -> Shapes:
    found: Shapes = {}
    for name, shape in modules(tensors, pattern):
        stem = prefix + name.replace(".", "_")
        found[f"{stem}.lokr_w1"] = "F16", (factor, factor)
        found[f"{stem}.lokr_w2_a"] = "F16", (shape[0] // factor, rank)
        found[f"{stem}.lokr_w2_b"] = "F16", (rank, shape[1] // factor)
        found[f"{stem}.alpha"] = "F16", ()
    return found


@file(kind="LoKr", base="Stable Diffusion XL", rank=[8, 8])
def lycoris_lokr_sdxl() -> Any:
    return lokr(ldm_unet(sdxl_unet()), LDM, 8, 8, "lora_unet_")


@file(kind="LoHa", base="Stable Diffusion 1.x", rank=[8, 8])
def lycoris_loha_sd_1_5() -> Any:
    found: Shapes = {}
    for name, shape in modules(sd15_unet(), r"attentions.*to_[qkv]\.weight"):
        stem = "lora_unet_" + name.replace(".", "_")
        for part in ("hada_w1", "hada_w2"):
            found[f"{stem}.{part}_a"] = "F16", (shape[0], 8)
            found[f"{stem}.{part}_b"] = "F16", (8, shape[1])
        found[f"{stem}.alpha"] = "F16", ()
    return found


@file(kind="textual inversion", base="Stable Diffusion 1.x", rank=None)
def textual_inversion_sd_1_5() -> Any:
    return {"emb_params": ("F32", (4, 768))}


@file(kind="textual inversion", base="Stable Diffusion XL", rank=None)
def textual_inversion_sdxl() -> Any:
    return {"clip_l": ("F16", (8, 768)), "clip_g": ("F16", (8, 1280))}


@file(kind="ControlNet", base="Stable Diffusion 1.x", rank=None)
def controlnet_sd_1_5() -> Any:
    return diffuser("ControlNetModel", cross_attention_dim=768)


@file(kind="ControlNet", base="Stable Diffusion 1.x", rank=None)
def controlnet_sd_1_5_original() -> Any:
    unet = {name: spec for name, spec in ldm_unet(sd15_unet()).items() if re.match("input|middle|time", name)}
    zero = {f"zero_convs.{at}.0.weight": ("F16", (320, 320, 1, 1)) for at in range(12)}
    hint = {f"input_hint_block.{at}.weight": ("F16", (16, 16, 3, 3)) for at in range(0, 15, 2)}
    return prefixed("control_model.", {**unet, **zero, **hint})


@file(kind="ControlNet", base="Flux", rank=None)
def controlnet_flux() -> Any:
    return diffuser("FluxControlNetModel", "BF16", **{**FLUX, "num_layers": 5, "num_single_layers": 10})


def ip_adapter(unet: Shapes, cross: int, projection: Shapes) -> Shapes:
    found = prefixed("image_proj.", projection)
    for at, (_, shape) in enumerate(modules(unet, r"attn2\.to_k\.weight")):
        for part in ("k", "v"):
            found[f"ip_adapter.{2 * at + 1}.to_{part}_ip.weight"] = "F16", (shape[0], cross)
    return found


@file(kind="IP-Adapter", base="Stable Diffusion 1.x", rank=None)
def ip_adapter_sd_1_5() -> Any:
    return ip_adapter(
        sd15_unet(), 768, {"proj.weight": ("F16", (3072, 1024)), "norm.weight": ("F16", (768,))}
    )


@file(kind="optimizer state", base=None, rank=None)
def adam_of_llama() -> Any:
    found = {}
    for at in range(290):
        for part in ("exp_avg", "exp_avg_sq"):
            found[f"state.{at}.{part}"] = "F32", (4096, 4096)
        found[f"state.{at}.step"] = "F32", ()
    return found


@file(kind=None, base=None, rank=None)
def unknown_network() -> Any:
    return {f"net.{at}.weight": ("F32", (64, 64)) for at in range(8)}


# Files that were written after the rules were frozen.


@file(kind="transformer", base="Stable Diffusion 3.5", rank=None)
def sd_3_5_large() -> Any:
    return diffuser(
        "SD3Transformer2DModel",
        "BF16",
        **{
            **SD3,
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "qk_norm": "rms_norm",
        },
    )


@file(kind="transformer", base="Flux", rank=None)
def flux_schnell_original() -> Any:
    return prefixed("model.diffusion_model.", flux_original(guidance=False))


@file(kind="transformer", base="Wan", rank=None)
def wan_2_1_i2v_14b() -> Any:
    return diffuser(
        "WanTransformer3DModel",
        "F16",
        **{**WAN, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
    )


@file(kind="language model", base="Qwen 1.5 to 2.5", rank=None)
def qwen_2_5_0_5b() -> Any:
    return transformer(
        "qwen2",
        "BF16",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    )


@file(kind="language model", base="Gemma 3", rank=None)
def gemma_3_1b_with_config() -> Any:
    found = transformer(
        "gemma3_text",
        "BF16",
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262144,
    )
    return found, {"config.json": {"model_type": "gemma3_text"}}


@file(kind="language model", base="Mistral", rank=None)
def mistral_nemo() -> Any:
    return transformer(
        "mistral",
        "BF16",
        **{**MISTRAL, "hidden_size": 5120, "num_hidden_layers": 40, "head_dim": 128, "vocab_size": 131072},
    )


@file(kind="speech model", base="Whisper", rank=None)
def whisper_large_v3() -> Any:
    found = transformer(
        "whisper",
        "F16",
        "WhisperForConditionalGeneration",
        d_model=1280,
        encoder_layers=32,
        decoder_layers=32,
        encoder_attention_heads=20,
        decoder_attention_heads=20,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
        num_mel_bins=128,
        vocab_size=51866,
    )
    found.pop("proj_out.weight", None)
    return found


@file(kind="text encoder", base="BERT", rank=None)
def bert_large_classifier() -> Any:
    return transformer(
        "bert",
        "F32",
        "AutoModelForSequenceClassification",
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    )


@file(kind="language model", base="T5 1.1", rank=None)
def flan_t5_base() -> Any:
    return transformer(
        "t5",
        "F32",
        "AutoModelForSeq2SeqLM",
        d_model=768,
        d_ff=2048,
        num_layers=12,
        num_heads=12,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        vocab_size=32128,
    )


@file(kind="UNet", base="Stable Diffusion XL", rank=None)
def sdxl_inpainting_unet() -> Any:
    return diffuser("UNet2DConditionModel", **{**SDXL, "in_channels": 9})


@file(kind="ControlNet", base="Stable Diffusion XL", rank=None)
def controlnet_sdxl() -> Any:
    dropped = ("sample_size", "up_block_types")
    return diffuser("ControlNetModel", **{key: value for key, value in SDXL.items() if key not in dropped})


@file(kind="IP-Adapter", base="Stable Diffusion XL", rank=None)
def ip_adapter_plus_sdxl() -> Any:
    projection = {"latents": ("F16", (1, 16, 1280)), "proj_in.weight": ("F16", (1280, 1280))}
    return ip_adapter(sdxl_unet(), 2048, projection)


@file(kind="LoCon", base="Stable Diffusion XL", rank=[8, 32])
def kohya_locon_sdxl_without_metadata() -> Any:
    unet = ldm_unet(sdxl_unet())
    convolutions = kohya(unet, r"(in_layers\.2|out_layers\.3|op|conv)\.weight", 8)
    return {**kohya(unet, LDM, 32), **convolutions}


@file(kind="LoKr", base="Stable Diffusion 1.x", rank=None)
def lycoris_lokr_full_sd_1_5() -> Any:
    found: Shapes = {}
    for name, shape in modules(sd15_unet(), TRANSFORMER):
        stem = "lora_unet_" + name.replace(".", "_")
        found[f"{stem}.lokr_w1"] = "F16", (4, 4)
        found[f"{stem}.lokr_w2"] = "F16", (shape[0] // 4, shape[1] // 4, *shape[2:])
        found[f"{stem}.alpha"] = "F16", ()
    return found


@file(kind="DoRA", base="Stable Diffusion XL", rank=[16, 16])
def kohya_dora_sdxl() -> Any:
    unet = ldm_unet(sdxl_unet())
    found = kohya(unet, LDM, 16)
    for name, shape in modules(unet, LDM):
        found[f"lora_unet_{name.replace('.', '_')}.dora_scale"] = "F16", (1, shape[1], *shape[2:])
    beside = {
        "metadata": {"modelspec.architecture": "stable-diffusion-xl-v1-base/lora", "ss_network_alpha": "8.0"}
    }
    return found, beside


@file(kind="LoRA", base="Stable Diffusion 1.x", rank=[4, 4])
def diffusers_sd_1_5_of_old_names() -> Any:
    found: Shapes = {}
    for name, shape in modules(sd15_unet(), r"attn\d\.(to_[qkv]|to_out\.0)\.weight"):
        head, _, last = name.removesuffix(".0").rpartition(".")
        stem = f"unet.{head}.processor.{last}_lora"
        found[f"{stem}.down.weight"] = "F32", (4, shape[1])
        found[f"{stem}.up.weight"] = "F32", (shape[0], 4)
    return found


@file(kind="LoRA", base="Stable Diffusion 3 or 3.5", rank=[32, 32])
def diffusers_sd_3() -> Any:
    return peft_names(
        diffuser("SD3Transformer2DModel", **SD3),
        r"attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)\.weight",
        32,
        "transformer.",
    )


@file(kind="LoRA", base="Qwen-Image", rank=[16, 16])
def musubi_qwen_image_with_metadata() -> Any:
    found = diffuser("QwenImageTransformer2DModel", **QWEN_IMAGE)
    pattern = r"(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|_mlp\.net\.(0\.proj|2)|_mod\.1)\.weight"
    return kohya(found, pattern, 16), {
        "metadata": {"ss_base_model_version": "qwen_image", "ss_network_dim": "16"}
    }


@file(kind="LoRA", base="Qwen/Qwen2.5-7B-Instruct", rank=[64, 64])
def peft_qwen_with_config() -> Any:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    beside = {
        "adapter_config.json": {
            "peft_type": "LORA",
            "r": 64,
            "lora_alpha": 16,
            "base_model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
        }
    }
    return peft("qwen2", "AutoModelForCausalLM", targets, 64, **QWEN25), beside


@file(kind="language model", base="Qwen 1.5 to 2.5", rank=None, packing="GPTQ, 8 bit")
def qwen_2_5_gptq_8_bit() -> Any:
    config = {"model_type": "qwen2", "quantization_config": {"quant_method": "gptq", "bits": 8}}
    return quantised(transformer("qwen2", "F16", **QWEN25), gptq(8)), {"config.json": config}


# Models with the names of others. A statement about them would be wrong.


ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}


@file(kind="text encoder", base="XLM-RoBERTa", rank=None)
def xlm_roberta_base() -> Any:
    return transformer("xlm-roberta", "F32", "AutoModel", **{**ROBERTA, "vocab_size": 250002})


@file(kind="text encoder", base="RoBERTa or a model with its layout", rank=None)
def camembert_base() -> Any:
    return transformer("camembert", "F32", "AutoModel", **{**ROBERTA, "vocab_size": 32005})


@file(kind="text encoder", base="RoBERTa or data2vec", rank=None)
def data2vec_text() -> Any:
    return transformer("data2vec-text", "F32", "AutoModel", **ROBERTA)


@file(kind="text encoder", base="data2vec-text", rank=None)
def data2vec_text_with_config() -> Any:
    beside = {"config.json": {"model_type": "data2vec-text"}}
    return transformer("data2vec-text", "F32", "AutoModel", **ROBERTA), beside


@file(kind="text encoder", base="BERT or a model with its layout", rank=None)
def ernie_of_other_vocabulary() -> Any:
    return transformer("ernie", "F32", "AutoModel", vocab_size=18000)


@file(kind="text encoder", base="ERNIE", rank=None)
def ernie_with_vocabulary_of_bert() -> Any:
    return transformer("ernie", "F32", "AutoModelForMaskedLM", vocab_size=30522)


@file(kind="text encoder", base="ERNIE", rank=None)
def ernie_with_config() -> Any:
    return transformer("ernie", "F32", "AutoModel", vocab_size=30522), {
        "config.json": {"model_type": "ernie"}
    }


@file(kind=None, base=None, rank=None)
def luke_base() -> Any:
    return transformer("luke", "F32", "AutoModel")


@file(kind=None, base=None, rank=None)
def megatron_bert() -> Any:
    return transformer("megatron-bert", "F32", "AutoModel")


@file(kind=None, base=None, rank=None)
def mobilebert() -> Any:
    return transformer("mobilebert", "F32", "AutoModel")


@file(kind=None, base=None, rank=None)
def rembert() -> Any:
    return transformer("rembert", "F32", "AutoModel")


@file(kind=None, base=None, rank=None)
def xmod_base() -> Any:
    return transformer("xmod", "F32", "AutoModel")


@file(kind=None, base=None, rank=None)
def ibert_base() -> Any:
    return transformer("ibert", "F32", "AutoModel", **ROBERTA)


@file(kind=None, base=None, rank=None)
def nystromformer() -> Any:
    return transformer("nystromformer", "F32", "AutoModelForMaskedLM")


@file(kind=None, base=None, rank=None)
def git_base() -> Any:
    return transformer("git", "F32", "GitForCausalLM")


@file(kind=None, base=None, rank=None)
def t5gemma_2b() -> Any:
    return transformer("t5gemma", "F32", "T5GemmaModel")


@file(kind=None, base=None, rank=None)
def t5gemma_2() -> Any:
    return transformer("t5gemma2", "F32", "T5Gemma2ForConditionalGeneration")


@file(kind=None, base=None, rank=None)
def helios() -> Any:
    return diffuser("HeliosTransformer3DModel")


@file(kind="VAE", base=None, rank=None)
def allegro_vae() -> Any:
    return diffuser("AutoencoderKLAllegro")


@file(kind="VAE", base=None, rank=None)
def spectrogram_vae() -> Any:
    return vae(in_channels=1, out_channels=1)


@file(kind="VAE", base=None, rank=None)
def vae_of_three_levels() -> Any:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    return diffuser("AutoencoderKL", block_out_channels=(128, 256, 512), layers_per_block=2, **blocks)


@file(kind=None, base=None, rank=None)
def audio_unet() -> Any:
    return diffuser("UNet2DConditionModel", cross_attention_dim=768, in_channels=8, out_channels=8)


# Files of other models and formats, written after the rules.


SD21 = {
    **SD15,
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}
MEDIUM = {"pos_embed_max_size": 384, "dual_attention_layers": list(range(13)), "qk_norm": "rms_norm"}


@file(kind="LoRA", base="Flux", rank=[16, 16])
def xlabs_flux() -> Any:
    found: Shapes = {}
    for at in range(19):
        for part, out in (("qkv", 9216), ("proj", 3072)):
            for side in (1, 2):
                name = f"double_blocks.{at}.processor.{part}_lora{side}"
                found[f"{name}.down.weight"] = "BF16", (16, 3072)
                found[f"{name}.up.weight"] = "BF16", (out, 16)
    return found


@file(kind="LoRA", base="Stable Diffusion 2.x", rank=[16, 16])
def kohya_sd_2() -> Any:
    return kohya(diffuser("UNet2DConditionModel", **SD21), TRANSFORMER, 16)


@file(kind="LoRA", base="Wan", rank=[32, 32])
def musubi_wan() -> Any:
    found = wan_original(diffuser("WanTransformer3DModel", **WAN))
    return kohya(found, r"blocks.*attn\.[qkvo]\.weight", 32)


@file(kind="LoRA", base=None, rank=[64, 64])
def diffusers_cogvideox() -> Any:
    found = diffuser("CogVideoXTransformer3DModel")
    return peft_names(found, r"attn1\.to_[qkv]\.weight", 64, "transformer.")


@file(kind="LoRA", base="T5, mT5 or UMT5", rank=[8, 8])
def peft_t5() -> Any:
    return peft("t5", "AutoModelForSeq2SeqLM", ["q", "v"], 8)


@file(kind="language model", base="Llama", rank=None, packing="MLX, packed")
def llama_mlx() -> Any:
    def pack(name: str, shape: tuple[int, ...]) -> Shapes:
        out, inner = shape
        factors = {f"{name}.{one}": ("BF16", (out, inner // 64)) for one in ("scales", "biases")}
        return {f"{name}.weight": ("U32", (out, inner // 8)), **factors}

    return quantised(transformer("llama", "BF16", **LLAMA1B), pack)


@file(kind="language model", base="Llama", rank=None, packing="MXFP4, 4 bit")
def llama_mxfp4() -> Any:
    def pack(name: str, shape: tuple[int, ...]) -> Shapes:
        out, inner = shape
        return {
            f"{name}.weight_packed": ("U8", (out, inner // 2)),
            f"{name}.weight_scale": ("U8", (out, inner // 32)),
        }

    return quantised(transformer("llama", "BF16", **LLAMA1B), pack)


@file(kind="language model", base="Llama, Mistral or others", rank=None)
def tinyllama() -> Any:
    sizes = {"num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4}
    return transformer("llama", "BF16", hidden_size=2048, intermediate_size=5632, vocab_size=32000, **sizes)


@file(kind="language model", base="Qwen 2 VL", rank=None)
def qwen_2_vl() -> Any:
    return transformer("qwen2_vl", "BF16", "AutoModelForImageTextToText")


@file(kind="language model", base="GPT-2", rank=None)
def gpt2_xl() -> Any:
    return transformer("gpt2", "F32", n_embd=1600, n_layer=48, n_head=25)


@file(kind=None, base=None, rank=None)
def olmo_2() -> Any:
    return transformer("olmo2", "BF16", num_hidden_layers=16, hidden_size=2048)


@file(kind="language model", base="mT5", rank=None)
def mt5_base() -> Any:
    sizes = {"d_model": 768, "d_ff": 2048, "num_heads": 12, "num_layers": 12}
    return transformer("mt5", "F32", "MT5ForConditionalGeneration", vocab_size=250112, **sizes)


@file(kind="text encoder", base="UMT5", rank=None)
def umt5_xxl_encoder() -> Any:
    sizes = {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 24}
    return transformer("umt5", "BF16", "UMT5EncoderModel", vocab_size=256384, **sizes)


@file(kind="speech model", base="Whisper", rank=None)
def whisper_large_v3_turbo() -> Any:
    heads = {"encoder_attention_heads": 20, "decoder_attention_heads": 20}
    return transformer(
        "whisper",
        "F16",
        "WhisperForConditionalGeneration",
        d_model=1280,
        encoder_layers=32,
        decoder_layers=4,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
        vocab_size=51866,
        num_mel_bins=128,
        **heads,
    )


@file(kind="UNet", base="Stable Diffusion 2.x", rank=None)
def sd_2_1_unet() -> Any:
    return diffuser("UNet2DConditionModel", **SD21)


@file(kind=None, base=None, rank=None)
def kolors_unet() -> Any:
    kolors = {"encoder_hid_dim": 4096, "encoder_hid_dim_type": "text_proj"}
    return diffuser(
        "UNet2DConditionModel", **{**SDXL, "projection_class_embeddings_input_dim": 5632, **kolors}
    )


@file(kind="transformer", base="Stable Diffusion 3.5", rank=None)
def sd_3_5_medium() -> Any:
    return diffuser("SD3Transformer2DModel", **{**SD3, **MEDIUM})


@file(kind="transformer", base="Chroma", rank=None)
def chroma() -> Any:
    return diffuser("ChromaTransformer2DModel", num_layers=19, num_single_layers=38)


@file(kind="transformer", base="Flux.2", rank=None)
def flux_2() -> Any:
    return diffuser("Flux2Transformer2DModel")


@file(kind="transformer", base="Wan", rank=None)
def wan_2_2_5b() -> Any:
    sizes = {"num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336}
    return diffuser("WanTransformer3DModel", **{**WAN, **sizes, "num_layers": 30})


@file(kind="ControlNet", base="Stable Diffusion 3", rank=None)
def controlnet_sd_3() -> Any:
    return diffuser("SD3ControlNetModel", **{**SD3, "num_layers": 6})


# Files that show less than they seem to, and models of families that the rules do not know.


@file(kind="LoRA with its base", base=None, rank=[8, 8])
def peft_llama_with_its_base() -> Any:
    base = transformer("llama", "BF16", **LLAMA1B)
    adapted = renamed(base, (r"(q_proj|v_proj)\.weight", r"\1.base_layer.weight"))
    factors = peft_names(base, r"(q_proj|v_proj)\.weight", 8, "base_model.model.", ".default")
    return {**prefixed("base_model.model.", adapted), **factors}


@file(kind="language model", base="Llama", rank=None)
def llama_first_of_two_files() -> Any:
    found = transformer("llama", "BF16", **LLAMA3)
    return {name: spec for name, spec in found.items() if re.search(r"embed_tokens|layers\.1?[0-9]\.", name)}


@file(kind=None, base=None, rank=None)
def lora_of_other_ranks() -> Any:
    return {"x.lora_down.weight": ("F16", (4, 320)), "x.lora_up.weight": ("F16", (320, 8))}


@file(kind="LoRA", base="Stable Diffusion XL or Kolors", rank=[8, 8])
def diffusers_sdxl_or_kolors() -> Any:
    return peft_names(sdxl_unet(), r"attn\d\.to_[kv]\.weight", 8, "unet.")


@file(kind="LoRA", base="Stable Diffusion XL", rank=[8, 8])
def diffusers_sdxl_with_metadata() -> Any:
    beside = {"metadata": {"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"}}
    return diffusers_sdxl_or_kolors(), beside


@file(kind="LoRA", base="Stable Diffusion 2.x or others", rank=[4, 4])
def diffusers_sd_2_or_video() -> Any:
    found = diffuser("UNet2DConditionModel", cross_attention_dim=1024)
    return peft_names(found, r"attn\d\.to_[kv]\.weight", 4, "unet.")


@file(kind="IA3 adapter", base=None, rank=None)
def ia3_of_llama() -> Any:
    found: Shapes = {}
    for at in range(16):
        layer = f"base_model.model.model.layers.{at}."
        found |= {f"{layer}self_attn.{part}_proj.ia3_l": ("F32", (512, 1)) for part in "kv"}
        found[f"{layer}mlp.down_proj.ia3_l"] = "F32", (1, 8192)
    return found


@file(kind="OFT adapter", base=None, rank=None)
def lycoris_boft_sdxl() -> Any:
    found: Shapes = {}
    for name, _ in modules(ldm_unet(sdxl_unet()), r"attn1\.to_q\.weight"):
        stem = "lora_unet_" + name.replace(".", "_")
        found |= {f"{stem}.oft_blocks": ("F16", (2, 4, 160, 160)), f"{stem}.alpha": ("F16", ())}
    return found


@file(kind="VeRA adapter", base=None, rank=None)
def vera_of_llama() -> Any:
    found: Shapes = {"base_model.vera_A": ("F32", (256, 2048)), "base_model.vera_B": ("F32", (2048, 256))}
    for at in range(16):
        stem = f"base_model.model.model.layers.{at}.self_attn.q_proj.vera_lambda_"
        found |= {f"{stem}b": ("F32", (2048,)), f"{stem}d": ("F32", (256,))}
    return found


@file(kind="ControlNet-LoRA", base="Stable Diffusion XL", rank=None)
def control_lora_sdxl() -> Any:
    found: Shapes = {"lora_controlnet": ("F16", ()), "input_hint_block.0.weight": ("F16", (16, 3, 3, 3))}
    for name, shape in modules(ldm_unet(sdxl_unet()), r"^input_blocks.*attn\d\.to_[qkv]\.weight"):
        found |= {f"{name}.up": ("F16", (shape[0], 128)), f"{name}.down": ("F16", (128, shape[1]))}
    return found | {f"zero_convs.{at}.0.weight": ("F16", (320, 320, 1, 1)) for at in range(3)}


@file(kind=None, base=None, rank=None)
def bros_base() -> Any:
    return transformer("bros", "F32", "AutoModel")


@file(kind=None, base=None, rank=None)
def lighton_ocr() -> Any:
    return transformer("lighton_ocr", "BF16", "AutoModelForImageTextToText")


@file(kind=None, base=None, rank=None)
def idefics() -> Any:
    return transformer("idefics", "F16", "AutoModel")


@file(kind=None, base=None, rank=None)
def mlcd() -> Any:
    return transformer("mlcd_vision_model", "F16", "AutoModel")


@file(kind=None, base=None, rank=None)
def controlnet_xs_sd_2() -> Any:
    return diffuser("ControlNetXSAdapter")


@file(kind=None, base=None, rank=None)
def mamba_130m() -> Any:
    return transformer("mamba", "F32", num_hidden_layers=24)


@file(kind=None, base=None, rank=None)
def rwkv_4_169m() -> Any:
    return transformer("rwkv", "F32", hidden_size=768, num_hidden_layers=12)


@file(kind=None, base=None, rank=None)
def pythia_410m() -> Any:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    return transformer("gpt_neox", "F16", num_attention_heads=16, vocab_size=50304, **sizes)


@file(kind=None, base=None, rank=None)
def phi_3_mini() -> Any:
    return transformer("phi3", "BF16")


@file(kind=None, base=None, rank=None)
def falcon_7b() -> Any:
    return transformer("falcon", "BF16")


@file(kind=None, base=None, rank=None)
def opt_125m() -> Any:
    return transformer("opt", "F16")


@file(kind=None, base=None, rank=None)
def bloom_560m() -> Any:
    return transformer("bloom", "F16", hidden_size=1024, n_layer=24, n_head=16)


@file(kind=None, base=None, rank=None)
def starcoder2_3b() -> Any:
    return transformer("starcoder2", "BF16")


@file(kind=None, base=None, rank=None)
def command_r() -> Any:
    return transformer("cohere", "BF16")


@file(kind="language model", base="Llama, Mistral or others", rank=None)
def granite_3_8b() -> Any:
    sizes = {"hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40, "vocab_size": 49155}
    return transformer("granite", "BF16", num_key_value_heads=8, **sizes)


@file(kind="language model", base="Llama, Mistral or others", rank=None)
def yi_6b() -> Any:
    return transformer("llama", "BF16", **{**LLAMA2, "vocab_size": 64000, "num_key_value_heads": 4})


@file(kind=None, base=None, rank=None)
def distilbert_base() -> Any:
    return transformer("distilbert", "F32", "AutoModelForMaskedLM")


@file(kind=None, base=None, rank=None)
def deberta_v3_base() -> Any:
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 128100}
    return transformer("deberta-v2", "F32", "AutoModel", num_attention_heads=12, **sizes)


@file(kind=None, base=None, rank=None)
def bart_large() -> Any:
    return transformer("bart", "F32", "AutoModelForSeq2SeqLM")


@file(kind=None, base=None, rank=None)
def wav2vec2_base() -> Any:
    return transformer("wav2vec2", "F32", "AutoModel")


@file(kind=None, base=None, rank=None)
def siglip_base() -> Any:
    return transformer("siglip", "F32", "AutoModel")


@file(kind=None, base=None, rank=None)
def dinov2_base() -> Any:
    return transformer("dinov2", "F32", "AutoModel")


@file(kind=None, base=None, rank=None)
def gpt_oss_20b() -> Any:
    return transformer("gpt_oss", "BF16", num_hidden_layers=24, num_local_experts=32)


if __name__ == "__main__":
    for name in sys.argv[1:] or FILES:
        text = json.dumps(FILES[name](), indent=1) + "\n"
        (FOLDER / f"{name}.json").write_text(text, "utf-8", newline="\n")
        print(f"{name}: {len(text)} bytes")
