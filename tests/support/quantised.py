"""Quantised weights of each family of formats, with the values that they mean, by plain NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy

from ingot.numpy import save_file

Array = numpy.ndarray[Any, Any]
Random = numpy.random.Generator

F4 = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], "float32")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Quantised:
    """Tensors of a model, the weights that they mean, and the settings beside them."""

    tensors: dict[str, Array]
    weights: dict[str, Array]
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Write the model with its ``config.json``. Return the path of the model."""
        folder.mkdir(exist_ok=True)
        path = folder / "model.safetensors"
        save_file(self.tensors, path, metadata=self.metadata or None)
        (folder / "config.json").write_text(json.dumps({"quantization_config": self.config}))
        return path


def scales_of(random: Random, shape: tuple[int, ...], dtype: str = "float16") -> Array:
    """Return positive scales of very different sizes."""
    return (random.random(shape) * 0.1 + 1e-3).astype(_dtype(dtype))


def _dtype(name: str) -> Any:
    return getattr(ml_dtypes, name, None) or numpy.dtype(name)


def streamed(codes: Array, bits: int) -> Array:
    """Return the words of 32 bits of codes along the last axis, as one stream of bits."""
    lanes = (codes[..., None] >> numpy.arange(bits)) & 1
    stream = lanes.reshape(*codes.shape[:-1], -1).astype("uint8")
    stream = numpy.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)])
    return numpy.ascontiguousarray(numpy.packbits(stream, axis=-1, bitorder="little")).view("<i4")


def fp8(
    random: Random,
    shape: tuple[int, ...],
    block: tuple[int, int] | str,
    *,
    suffix: str = "_scale_inv",
    dtype: str = "float8_e4m3fn",
    scale: str = "float32",
) -> Quantised:
    """Floats of 8 bits with scales for blocks, rows or the whole."""
    weight = random.standard_normal(shape).astype("float32").astype(_dtype(dtype))
    *leading, rows, columns = shape
    if block == "tensor":
        scales = scales_of(random, (), scale)
        full = numpy.broadcast_to(scales, shape)
    elif block == "row":
        scales = scales_of(random, (*leading, rows, 1), scale)
        full = numpy.broadcast_to(scales, shape)
    else:
        assert not isinstance(block, str)
        down, across = (-(-length // size) for length, size in zip((rows, columns), block, strict=True))
        scales = scales_of(random, (*leading, down, across), scale)
        full = scales.repeat(block[0], axis=-2).repeat(block[1], axis=-1)[..., :rows, :columns]
    meant = weight.astype("float32") * full.astype("float32")
    config: dict[str, Any] = {"quant_method": "fp8"}
    if not isinstance(block, str):
        config["weight_block_size"] = [*block]
    return Quantised({"x.weight": weight, f"x.weight{suffix}": scales}, {"x.weight": meant}, config)


def gptq(
    random: Random,
    bits: int,
    groups: int,
    size: int,
    outputs: int,
    *,
    version: int = 1,
    act_order: bool = False,
) -> Quantised:
    """GPTQ: words along the inputs, zero points along the outputs."""
    inputs = groups * size
    codes = random.integers(0, 2**bits, (inputs, outputs))
    # The first version stores them less one, and cannot store 0.
    zeros = random.integers(version == 1, 2**bits, (groups, outputs))
    scales = scales_of(random, (groups, outputs))
    order = numpy.arange(inputs) // size
    if act_order:
        random.shuffle(order)
    tensors = {
        "x.qweight": numpy.ascontiguousarray(streamed(codes.T, bits).T),
        "x.qzeros": streamed(zeros - (version == 1), bits),
        "x.scales": scales,
        "x.g_idx": order.astype("int32"),
    }
    meant = (codes - zeros[order]).astype("float32") * scales[order].astype("float32")
    format = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": format}
    return Quantised(tensors, {"x.weight": meant.T}, config)


def awq(random: Random, groups: int, size: int, outputs: int) -> Quantised:
    """AWQ: words along the outputs, in an order of their own."""
    codes = random.integers(0, 16, (groups * size, outputs))
    zeros = random.integers(0, 16, (groups, outputs))
    scales = scales_of(random, (groups, outputs))

    def words(numbers: Array) -> Array:
        lanes = numbers.reshape(numbers.shape[0], -1, 8)[:, :, AWQ_ORDER].astype("uint32")
        return (lanes << (4 * numpy.arange(8, dtype="uint32"))).sum(axis=-1, dtype="uint32").view("int32")

    tensors = {"x.qweight": words(codes), "x.qzeros": words(zeros), "x.scales": scales}
    meant = (codes - zeros.repeat(size, axis=0)).astype("float32")
    meant = meant * scales.repeat(size, axis=0).astype("float32")
    config = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
    return Quantised(tensors, {"x.weight": meant.T}, config)


def packed(
    random: Random,
    bits: int,
    rows: int,
    groups: int,
    size: int,
    *,
    zero_points: bool = False,
    act_order: bool = False,
) -> Quantised:
    """pack-quantized weights of compressed-tensors."""
    columns = groups * size
    codes = random.integers(0, 2**bits, (rows, columns))
    scales = scales_of(random, (rows, groups), "bfloat16")
    zeros = numpy.full((rows, groups), 2 ** (bits - 1))
    order = numpy.arange(columns) // size
    tensors: dict[str, Array] = {
        "x.weight_packed": streamed(codes, bits),
        "x.weight_scale": scales,
        "x.weight_shape": numpy.array([rows, columns]),
    }
    if zero_points:
        zeros = random.integers(0, 2**bits, (rows, groups))
        tensors["x.weight_zero_point"] = numpy.ascontiguousarray(streamed(zeros.T, bits).T)
    if act_order:
        random.shuffle(order)
        tensors["x.weight_g_idx"] = order.astype("int32")
    meant = (codes - zeros[:, order]).astype("float32") * scales.astype("float32")[:, order]
    weights = {"num_bits": bits, "group_size": size, "type": "int"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    return Quantised(tensors, {"x.weight": meant}, config)


def int8(random: Random, rows: int, columns: int, *, zero_points: bool = False) -> Quantised:
    """int-quantized weights of compressed-tensors."""
    codes = random.integers(-128, 128, (rows, columns)).astype("int8")
    scales = scales_of(random, (rows, 1), "bfloat16")
    tensors: dict[str, Array] = {"x.weight": codes, "x.weight_scale": scales}
    zeros = numpy.zeros((rows, 1), "int8")
    if zero_points:
        zeros = tensors["x.weight_zero_point"] = random.integers(-128, 128, (rows, 1)).astype("int8")
    meant = (codes.astype("float32") - zeros.astype("float32")) * scales.astype("float32")
    return Quantised(tensors, {"x.weight": meant}, {"quant_method": "compressed-tensors"})


def nibbles(codes: Array) -> Array:
    """Return two codes in each byte, the first in the lower half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype("uint8")


def nvfp4(random: Random, rows: int, blocks: int, *, divided: bool = False) -> Quantised:
    """NVFP4 of ModelOpt, or of compressed-tensors if the scale of the whole divides."""
    codes = random.integers(0, 16, (rows, 16 * blocks))
    scales = (random.random((rows, blocks)) * 400 + 1).astype(ml_dtypes.float8_e4m3fn)
    whole = numpy.array([random.random() * 1000 + 1], "float32")
    wide = scales.astype("float32")
    factors = (wide / whole if divided else wide * whole).repeat(16, axis=1)
    meant = F4[codes] * factors
    if divided:
        tensors = {
            "x.weight_packed": nibbles(codes),
            "x.weight_scale": scales,
            "x.weight_global_scale": whole,
            "x.input_global_scale": whole,
        }
        return Quantised(tensors, {"x.weight": meant}, {"format": "nvfp4-pack-quantized"})
    tensors = {
        "x.weight": nibbles(codes),
        "x.weight_scale": scales,
        "x.weight_scale_2": whole.reshape(()),
        "x.input_scale": whole.reshape(()),
    }
    return Quantised(tensors, {"x.weight": meant}, {"quant_method": "modelopt"})


def mxfp4(random: Random, leading: tuple[int, ...], outputs: int, blocks: int) -> Quantised:
    """MXFP4 of gpt-oss: the matrices of experts are transposed in the model."""
    codes = random.integers(0, 16, (*leading, outputs, blocks, 32))
    powers = random.integers(100, 140, (*leading, outputs, blocks)).astype("uint8")
    meant = F4[codes] * numpy.exp2(powers.astype("float32") - 127)[..., None]
    meant = meant.reshape(*leading, outputs, 32 * blocks)
    tensors = {"x.up_blocks": nibbles(codes), "x.up_scales": powers}
    weight = meant.swapaxes(-1, -2) if leading else meant
    return Quantised(tensors, {"x.up": weight}, {"quant_method": "mxfp4"})


def mxfp4_packed(random: Random, rows: int, blocks: int) -> Quantised:
    """mxfp4-pack-quantized weights of compressed-tensors."""
    codes = random.integers(0, 16, (rows, 32 * blocks))
    powers = random.integers(100, 140, (rows, blocks)).astype("uint8")
    meant = F4[codes] * numpy.exp2(powers.astype("float32") - 127).repeat(32, axis=1)
    tensors = {"x.weight_packed": nibbles(codes), "x.weight_scale": powers}
    return Quantised(tensors, {"x.weight": meant}, {"format": "mxfp4-pack-quantized"})


def bits4(
    random: Random, shape: tuple[int, ...], block: int, *, nested: bool = False, kind: str = "nf4"
) -> Quantised:
    """NF4 and FP4 of bitsandbytes, whose scales may be quantised."""
    count = int(numpy.prod(shape))
    codes = random.integers(0, 16, count + count % 2)
    table = numpy.sort(random.standard_normal(16)).astype("float32")
    blocks = -(-count // block)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "float16",
        "shape": [*shape],
    }
    tensors: dict[str, Array] = {
        "x.weight": (codes[::2] << 4 | codes[1::2]).astype("uint8").reshape(-1, 1),
        "x.weight.quant_map": table,
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_offset": 0.0625, "nested_dtype": "float32"}
        indices = random.integers(0, 256, blocks).astype("uint8")
        numbers = numpy.sort(random.standard_normal(256)).astype("float32")
        outer = scales_of(random, (-(-blocks // 256),), "float32")
        scales = numbers[indices] * outer.repeat(256)[:blocks] + numpy.float32(0.0625)
        tensors |= {
            "x.weight.absmax": indices,
            "x.weight.nested_absmax": outer,
            "x.weight.nested_quant_map": numbers,
        }
    else:
        scales = tensors["x.weight.absmax"] = scales_of(random, (blocks,), "float32")
    text = json.dumps(state).encode()
    tensors[f"x.weight.quant_state.bitsandbytes__{kind}"] = numpy.frombuffer(text, "uint8")
    meant = (table[codes][:count] * scales.repeat(block)[:count]).reshape(shape)
    return Quantised(tensors, {"x.weight": meant}, {"quant_method": "bitsandbytes"})


def bits8(random: Random, rows: int, columns: int) -> Quantised:
    """Integers of 8 bits of bitsandbytes."""
    codes = random.integers(-127, 128, (rows, columns)).astype("int8")
    largest = scales_of(random, (rows,), "float32")
    meant = codes.astype("float32") * largest[:, None] * numpy.float32(7.874015718698502e-3)
    tensors = {"x.weight": codes, "x.SCB": largest, "x.weight_format": numpy.array(0, "uint8")}
    return Quantised(tensors, {"x.weight": meant}, {"quant_method": "bitsandbytes"})


def torchao(random: Random, kind: str, rows: int, blocks: int, size: int) -> Quantised:
    """Flattened tensors of torchao."""
    columns = blocks * size
    settings: dict[str, Any] = {"block_size": [1, size]}
    more: dict[str, Array] = {}
    if kind == "Float8Tensor":
        data = random.standard_normal((rows, columns)).astype("float32").astype(ml_dtypes.float8_e4m3fn)
        scales = scales_of(random, (rows, blocks), "float32")
        meant = data.astype("float32") * scales.repeat(size, axis=1)
    elif kind == "IntxUnpackedToInt8Tensor":
        data = random.integers(-8, 8, (rows, columns)).astype("int8")
        scales = scales_of(random, (rows, blocks), "bfloat16")
        zeros = more["zero_point"] = random.integers(-8, 8, (rows, blocks)).astype("int8")
        wide = data.astype("float32") - zeros.astype("float32").repeat(size, axis=1)
        meant = wide * scales.astype("float32").repeat(size, axis=1)
    else:
        codes = random.integers(0, 16, (rows, columns))
        data = nibbles(codes)
        settings["block_size"] = size
        if kind == "NVFP4Tensor":
            scales = (random.random((rows, blocks)) * 400 + 1).astype(ml_dtypes.float8_e4m3fn)
            whole = more["per_tensor_scale"] = scales_of(random, (), "float32")
            factors = scales.astype("float32") * whole
        else:
            scales = random.integers(100, 140, (rows, blocks)).astype("uint8")
            factors = numpy.exp2(scales.astype("float32") - 127)
            scales = scales.view(ml_dtypes.float8_e8m0fnu)
        meant = F4[codes] * factors.repeat(size, axis=1)
    tensors = {"x._weight_qdata": data, "x._weight_scale": scales}
    tensors |= {f"x._weight_{name}": part for name, part in more.items()}
    names = ["qdata", "scale", *more]
    described = {"_type": kind, "_data": settings, "_tensor_data_names": names}
    metadata = {"tensor_names": json.dumps(["x.weight"]), "x.weight": json.dumps(described), "title": "kept"}
    return Quantised(tensors, {"x.weight": meant}, {"quant_method": "torchao"}, metadata)


def with_others(model: Quantised, others: Mapping[str, Array]) -> Quantised:
    """Return the model with tensors that are not quantised."""
    return Quantised({**model.tensors, **others}, {**model.weights, **others}, model.config, model.metadata)
