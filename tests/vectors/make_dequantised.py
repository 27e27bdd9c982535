"""Write dequantised/: small quantised models, and the values that the libraries of their formats decode.

Run it in an environment of its own with torch, safetensors, compressed-tensors 0.20, bitsandbytes 0.50,
torchao 0.18, transformers 5.24, gptqmodel 7.7 and autoawq 0.2.9 (without their dependencies, where those
conflict):

    python tests/vectors/make_dequantised.py

Each folder has ``model.safetensors`` and ``config.json``, as the library stores them, and
``values.safetensors`` with the weights that the library decodes in float32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).with_name("dequantised")
CASES: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any], torch.Tensor, dict[str, str]]]] = {}
ROWS, COLUMNS = 32, 96


def case(name: str) -> Callable[[Any], Any]:
    def note(make: Any) -> Any:
        CASES[name] = make
        return make

    return note


def weight(rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))


def any_words(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=random).to(torch.int32)


def compressed(format: str, **weights: Any) -> Any:
    """A case of compressed-tensors."""

    def make() -> Any:
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        args = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format)
        full, state = weight(), {}
        if args.strategy == "tensor":
            low, high = full.min().reshape(1), full.max().reshape(1)
        elif args.strategy == "channel":
            low, high = full.amin(1, keepdim=True), full.amax(1, keepdim=True)
        elif args.strategy == "block":
            down, across = args.block_structure
            blocks = full.reshape(ROWS // down, down, COLUMNS // across, across)
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        else:
            groups = full.reshape(ROWS, -1, args.group_size)
            low, high = groups.amin(2), groups.amax(2)
        whole = None
        if args.strategy == "tensor_group":
            whole = generate_gparam(full.min().reshape(1), full.max().reshape(1))
            state["weight_global_scale"] = whole
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        state |= {"weight": full, "weight_scale": scale, "weight_zero_point": zero}
        if args.symmetric:
            del state["weight_zero_point"]
        compressor = BaseCompressor.get_value_from_registry(format)
        stored = compressor.compress(state, scheme)
        values = compressor.decompress(stored, scheme)["weight"].float()
        if args.strategy == "tensor_group":
            values = nvfp4_values(stored, args)
        group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "format": format}
        config = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
        return {f"x.{name}": part for name, part in stored.items()}, config, values, {}

    return make


def nvfp4_values(stored: dict[str, torch.Tensor], args: Any) -> torch.Tensor:
    """Decode what the library decodes in bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed, whole = stored["weight_packed"], stored["weight_global_scale"]
    numbers = unpack_fp4_from_uint8(packed, ROWS, COLUMNS, torch.float32)
    scale = stored["weight_scale"].float()
    return dequantize(numbers, scale, args=args, global_scale=whole, dtype=torch.float32)


INT = {"type": "int", "strategy": "group", "group_size": 32}
FLOAT = {"type": "float", "num_bits": 8}
CASES |= {
    "compressed-4": compressed("pack-quantized", num_bits=4, **INT),
    "compressed-4-zero-points": compressed("pack-quantized", num_bits=4, symmetric=False, **INT),
    "compressed-3": compressed("pack-quantized", num_bits=3, symmetric=False, **INT),
    "compressed-8": compressed("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
    "compressed-int": compressed(
        "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False
    ),
    "compressed-float": compressed("float-quantized", strategy="channel", **FLOAT),
    "compressed-float-tensor": compressed("float-quantized", strategy="tensor", **FLOAT),
    "compressed-float-block": compressed(
        "float-quantized", strategy="block", block_structure=[16, 32], **FLOAT
    ),
    "compressed-nvfp4": compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "compressed-mxfp4": compressed(
        "mxfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype="torch.uint8",
    ),
    "compressed-mxfp8": compressed(
        "mxfp8-quantized", strategy="group", group_size=32, scale_dtype="torch.uint8", **FLOAT
    ),
}


def bits4(kind: str, nested: bool) -> Any:
    """A case of bitsandbytes."""

    def make() -> Any:
        from bitsandbytes import functional

        # The library's kernel for CPUs is wrong if blocks do not end with rows.
        full = weight(ROWS, 512 if nested else 128)
        packed, state = functional.quantize_4bit(
            full, blocksize=64, compress_statistics=nested, quant_type=kind
        )
        tensors = {f"x.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        values = functional.dequantize_4bit(packed, state)
        return {"x.weight": packed, **tensors}, {"quant_method": "bitsandbytes"}, values, {}

    return make


CASES |= {
    "bits-nf4": bits4("nf4", False),
    "bits-fp4": bits4("fp4", False),
    "bits-nf4-nested": bits4("nf4", True),
}


@case("bits-int8")
def _() -> Any:
    from bitsandbytes import functional

    packed, scales, _ = functional.int8_vectorwise_quant(weight().half())
    values = functional.int8_vectorwise_dequant(packed, scales).float()
    return {"x.weight": packed, "x.SCB": scales}, {"quant_method": "bitsandbytes"}, values, {}


def flattened(make: Callable[[], Any]) -> Any:
    """A case of torchao."""

    def of() -> Any:
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

        found = make()
        tensors, metadata = flatten_tensor_state_dict({"x.weight": found})
        dequantize = found.dequantize
        values = (
            dequantize(torch.float32) if "output_dtype" in dequantize.__code__.co_varnames else dequantize()
        )
        return tensors, {"quant_method": "torchao"}, values.float(), metadata

    return of


@case("torchao-float8")
@flattened
def _() -> Any:
    from torchao.quantization import Float8Tensor, PerRow

    return Float8Tensor.from_hp(weight(), granularity=PerRow())


@case("torchao-float8-tensor")
@flattened
def _() -> Any:
    from torchao.quantization import Float8Tensor, PerTensor

    return Float8Tensor.from_hp(weight(), granularity=PerTensor())


@case("torchao-int8")
@flattened
def _() -> Any:
    from torchao.quantization import Int8Tensor, PerRow

    return Int8Tensor.from_hp(weight(), granularity=PerRow())


@case("torchao-intx")
@flattened
def _() -> Any:
    from torchao.quantization import IntxUnpackedToInt8Tensor, MappingType

    return IntxUnpackedToInt8Tensor.from_hp(
        weight(), (1, 32), torch.int4, mapping_type=MappingType.ASYMMETRIC
    )


@case("torchao-mxfp4")
@flattened
def _() -> Any:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(weight(), torch.float4_e2m1fn_x2, 32)


@case("torchao-mxfp8")
@flattened
def _() -> Any:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(weight(), torch.float8_e4m3fn, 32)


@case("torchao-nvfp4")
@flattened
def _() -> Any:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    full = weight()
    return NVFP4Tensor.to_nvfp4(full, per_tensor_scale=per_tensor_amax_to_scale(full.abs().amax()))


@case("mxfp4-experts")
def _() -> Any:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, ROWS, 3, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(90, 140, (2, ROWS, 3), generator=random, dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    tensors = {"x.weight_blocks": blocks, "x.weight_scales": scales}
    return tensors, {"quant_method": "mxfp4"}, values, {}


@case("fp8-blocks")
def _() -> Any:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    quantised = weight().to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=torch.Generator().manual_seed(4))
    values = Fp8Dequantize(None)._dequantize_one(quantised, scales, torch.float32)
    config = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    return {"x.weight": quantised, "x.weight_scale_inv": scales}, config, values, {}


def gptq(bits: int, version: int, act_order: bool) -> Any:
    """A case of GPTQModel, which decodes the second version; the first is converted to it."""

    def make() -> Any:
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear
        from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

        random = torch.Generator().manual_seed(bits)
        layer = TorchLinear(bits, 32, False, act_order, COLUMNS, ROWS)
        layer.qweight.data = any_words(random, *layer.qweight.shape)
        layer.qzeros.data = any_words(random, *layer.qzeros.shape)
        layer.scales.data = torch.rand(layer.scales.shape, generator=random).half()
        if act_order:
            layer.g_idx.data = layer.g_idx[torch.randperm(COLUMNS, generator=random)]
        parts = {
            "qweight": layer.qweight,
            "qzeros": layer.qzeros,
            "scales": layer.scales,
            "g_idx": layer.g_idx,
        }
        tensors = {f"x.{name}": part.detach().clone() for name, part in parts.items()}
        if version == 1:
            convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
        layer.scales.data = layer.scales.float()
        values = layer.dequantize_weight().T.contiguous()
        format = "gptq" if version == 1 else "gptq_v2"
        config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": format}
        return tensors, config, values, {}

    return make


CASES |= {
    f"gptq-{bits}-v{version}{'-act-order' * act_order}": gptq(bits, version, act_order)
    for bits, version, act_order in [
        (2, 1, False),
        (3, 1, True),
        (4, 1, False),
        (8, 1, False),
        (3, 2, False),
        (4, 2, True),
    ]
}


@case("awq")
def _() -> Any:
    from awq.utils.packing_utils import dequantize_gemm

    random = torch.Generator().manual_seed(5)
    words, zeros = any_words(random, COLUMNS, ROWS // 8), any_words(random, COLUMNS // 32, ROWS // 8)
    scales = torch.rand(COLUMNS // 32, ROWS, generator=random).half()
    values = dequantize_gemm(words, zeros, scales.float(), 4, 32).T.contiguous()
    tensors = {"x.qweight": words, "x.qzeros": zeros, "x.scales": scales}
    return tensors, {"quant_method": "awq", "bits": 4, "version": "gemm"}, values, {}


def main() -> None:
    for name, make in CASES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        tensors, config, values, metadata = make()
        folder = FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        kept = {key: part.detach().contiguous().clone() for key, part in tensors.items()}
        save_file(kept, folder / "model.safetensors", metadata=metadata or None)
        save_file({"x.weight": values.detach().float().contiguous()}, folder / "values.safetensors")
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}, indent=1) + "\n")
        print(name, tuple(values.shape))


if __name__ == "__main__":
    main()
