"""Models for tests of the viewer: quantised, very long, and with hostile names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy

Array = numpy.ndarray[Any, Any]
Raw = dict[str, tuple[str, tuple[int, ...], bytes]]

HOSTILE_NAMES = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "__proto__",
    "constructor.prototype.toString",
    "x" * 10_000,
    "a." * 5_000,
    "\u202eright-to-left\u202c",
    "bell\x07escape\x1b[31mzero\x00",
    "line\nfeed",
    "",
    ".",
    "'; rm -rf / #",
    '"""; import os',
    "${alert(1)}",
    "名前",
)


def write_raw(path: Path, tensors: Raw, metadata: dict[str, str] | None = None) -> Path:
    """Write a file of these tensors in this order."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        begin, end = end, end + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(data for _, _, data in tensors.values())
    return path


def hostile(path: Path) -> Path:
    """Write a file whose names and metadata are markup, code or control characters."""
    text = "<b onclick=alert(1)>x</b>\x1b[2J\u202e"
    metadata = {
        "<script>alert(1)</script>": text,
        "modelspec.title": text,
        "modelspec.thumbnail": "javascript:alert(1)",
        "modelspec.architecture": "<img src=x onerror=alert(1)>",
        "ss_output_name": text,
        "ss_tag_frequency": '{"a": {"<i>": 3, "__proto__": 2}}',
        "long": "y" * 100_000,
    }
    return write_raw(path, dict.fromkeys(HOSTILE_NAMES, ("F32", (1,), b"\x00\x00\x80?")), metadata)


def many(path: Path, tensors: int = 100_000) -> Path:
    """Write a file with a header as long as in the largest models, and sparse data."""
    header: dict[str, object] = {}
    for number in range(tensors):
        layer, expert = divmod(number, 1000)
        kind = ("gate_proj", "up_proj", "down_proj")[expert % 3]
        begin = number * 64
        header[f"model.layers.{layer}.mlp.experts.{expert // 3}.{kind}.{expert}.weight"] = {
            "dtype": "BF16",
            "shape": [4, 8],
            "data_offsets": [begin, begin + 64],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + tensors * 64)
    return path


def gptq(folder: Path) -> Array:
    """Add a matrix of GPTQ with 4 bits and unordered groups. Return its values."""
    random = numpy.random.default_rng(3)
    rows, columns, group = 256, 64, 32
    weights = random.integers(0, 16, (rows, columns), dtype=numpy.uint32)
    zeros = random.integers(0, 15, (rows // group, columns), dtype=numpy.uint32)
    scales = random.random((rows // group, columns), dtype=numpy.float32).astype(numpy.float16)
    groups = random.permutation(numpy.repeat(numpy.arange(rows // group), group)).astype(numpy.int32)
    shifts = numpy.arange(8, dtype=numpy.uint32) * 4
    packed = (weights.reshape(rows // 8, 8, columns) << shifts[None, :, None]).sum(1).astype(numpy.uint32)
    points = (zeros.reshape(-1, columns // 8, 8) << shifts[None, None, :]).sum(2).astype(numpy.uint32)
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": group}}
    (folder / "config.json").write_text(json.dumps(config))
    write_raw(
        folder / "model.safetensors",
        {
            "layer.0.q.g_idx": ("I32", groups.shape, groups.tobytes()),
            "layer.0.q.qweight": ("I32", packed.shape, packed.tobytes()),
            "layer.0.q.qzeros": ("I32", points.shape, points.tobytes()),
            "layer.0.q.scales": ("F16", scales.shape, scales.tobytes()),
        },
    )
    meant: Array = (weights.astype(numpy.int64) - (zeros[groups].astype(numpy.int64) + 1)) * scales[
        groups
    ].astype(numpy.float64)
    return meant


def fp8(folder: Path) -> Array:
    """Add a matrix of 8-bit floats with a scale for each block of 128 by 128. Return its values."""
    import ml_dtypes

    random = numpy.random.default_rng(4)
    weights = random.standard_normal((200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scales = random.random((2, 3), dtype=numpy.float32)
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    )
    write_raw(
        folder / "model.safetensors",
        {
            "layer.0.weight_scale_inv": ("F32", scales.shape, scales.tobytes()),
            "layer.0.weight": ("F8_E4M3", weights.shape, weights.tobytes()),
        },
    )
    spread = numpy.kron(scales, numpy.ones((128, 128)))[:200, :300]
    meant: Array = weights.astype(numpy.float64) * spread
    return meant


def mxfp4(folder: Path) -> Array:
    """Add a matrix of 4-bit floats in blocks of 32, each with a power of two. Return its values."""
    random = numpy.random.default_rng(5)
    bytes_of = random.integers(0, 256, (3, 4, 2, 16), dtype=numpy.uint8)
    scales = random.integers(120, 134, (3, 4, 2), dtype=numpy.uint8)
    values = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = numpy.concatenate([values, -values])
    halves = numpy.stack([values[bytes_of & 15], values[bytes_of >> 4]], axis=-1).reshape(3, 4, 2, 32)
    write_raw(
        folder / "model.safetensors",
        {
            "experts.up_proj_blocks": ("U8", bytes_of.shape, bytes_of.tobytes()),
            "experts.up_proj_scales": ("U8", scales.shape, scales.tobytes()),
        },
    )
    meant: Array = (halves * 2.0 ** (scales.astype(int) - 127)[..., None]).reshape(12, 64)
    return meant


def pack_quantized(folder: Path) -> Array:
    """Add a matrix as compressed-tensors packs it: words of 4 bits along its columns. Return its values."""
    random = numpy.random.default_rng(6)
    weights = random.integers(0, 16, (24, 128), dtype=numpy.uint32)
    scales = random.random((24, 4), dtype=numpy.float32)
    _write_packed(folder, 4, 32, _words(weights, 4), scales)
    meant: Array = (weights.astype(numpy.float64) - 8) * numpy.repeat(scales, 32, axis=1)
    return meant


def awq(folder: Path) -> Array:
    """Add a matrix as AutoAWQ's "gemm" packs it. Return its values."""
    random = numpy.random.default_rng(7)
    rows, columns, group = 256, 64, 64
    weights = random.integers(0, 16, (rows, columns), dtype=numpy.uint32)
    zeros = random.integers(0, 16, (rows // group, columns), dtype=numpy.uint32)
    scales = random.random((rows // group, columns), dtype=numpy.float32).astype(numpy.float16)
    packed, points = _awq_words(weights), _awq_words(zeros)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    write_raw(
        folder / "model.safetensors",
        {
            "layer.0.q.qweight": ("I32", packed.shape, packed.tobytes()),
            "layer.0.q.qzeros": ("I32", points.shape, points.tobytes()),
            "layer.0.q.scales": ("F16", scales.shape, scales.tobytes()),
        },
    )
    apart = weights.astype(numpy.float64) - numpy.repeat(zeros, group, axis=0)
    meant: Array = apart * numpy.repeat(scales.astype(numpy.float64), group, axis=0)
    return meant


def _awq_words(numbers: Array) -> Array:
    """Pack eight columns into a word: the nibble `place` holds column `order[place]`."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    words = numpy.zeros((numbers.shape[0], numbers.shape[1] // 8), numpy.uint32)
    for place, column in enumerate(order):
        words |= numbers[:, column::8] << numpy.uint32(4 * place)
    return words


def pack_quantized_with_zero_points(folder: Path) -> Array:
    """Add the same with zero points, packed along rows with a partly filled last word. Return its values."""
    random = numpy.random.default_rng(8)
    rows, columns, group = 26, 128, 32
    weights = random.integers(0, 16, (rows, columns), dtype=numpy.uint32)
    zeros = random.integers(0, 16, (rows, columns // group), dtype=numpy.uint32)
    scales = random.random((rows, columns // group), dtype=numpy.float32)
    padded = numpy.concatenate([zeros, numpy.zeros((-rows % 8, zeros.shape[1]), numpy.uint32)])
    _write_packed(folder, 4, group, _words(weights, 4), scales, _words(padded.T, 4).T)
    meant: Array = (weights.astype(numpy.float64) - numpy.repeat(zeros, group, axis=1)) * numpy.repeat(
        scales.astype(numpy.float64), group, axis=1
    )
    return meant


def pack_quantized_in_any_order(folder: Path) -> Array:
    """Add the same with 8 bits, a partly filled last word, and unordered column groups. Return its values."""
    random = numpy.random.default_rng(9)
    rows, columns, group = 24, 90, 30
    weights = random.integers(0, 256, (rows, columns), dtype=numpy.uint32)
    scales = random.random((rows, columns // group), dtype=numpy.float32)
    groups = random.permutation(numpy.repeat(numpy.arange(columns // group), group)).astype(numpy.int32)
    padded = numpy.concatenate([weights, numpy.zeros((rows, -columns % 4), numpy.uint32)], axis=1)
    _write_packed(folder, 8, group, _words(padded, 8), scales, groups=groups)
    meant: Array = (weights.astype(numpy.float64) - 128) * scales.astype(numpy.float64)[:, groups]
    return meant


def _words(numbers: Array, bits: int) -> Array:
    """Pack numbers along the last axis into words of 32 bits, the first number in the lowest bits."""
    each = 32 // bits
    shifts = numpy.arange(each, dtype=numpy.uint32) * numpy.uint32(bits)
    words: Array = (numbers.reshape(numbers.shape[0], -1, each) << shifts).sum(2).astype(numpy.uint32)
    return words


def _write_packed(
    folder: Path,
    bits: int,
    group: int,
    packed: Array,
    scales: Array,
    zeros: Array | None = None,
    groups: Array | None = None,
) -> None:
    weights = {"num_bits": bits, "group_size": group, "strategy": "group", "symmetric": zeros is None}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensors: Raw = {
        "layer.0.weight_packed": ("I32", packed.shape, packed.tobytes()),
        "layer.0.weight_scale": ("F32", scales.shape, scales.tobytes()),
    }
    if zeros is not None:
        tensors["layer.0.weight_zero_point"] = ("I32", zeros.shape, zeros.tobytes())
    if groups is not None:
        tensors["layer.0.weight_g_idx"] = ("I32", groups.shape, groups.tobytes())
    write_raw(folder / "model.safetensors", tensors)


def int8(folder: Path) -> Array:
    """Add a matrix of integers with a scale and a zero point for each row. Return its values."""
    random = numpy.random.default_rng(10)
    weights = random.integers(-128, 128, (40, 70)).astype(numpy.int8)
    scales = random.random((40, 1), dtype=numpy.float32)
    zeros = random.integers(-128, 128, (40, 1)).astype(numpy.int8)
    write_raw(
        folder / "model.safetensors",
        {
            "layer.0.weight_scale": ("F32", scales.shape, scales.tobytes()),
            "layer.0.weight": ("I8", weights.shape, weights.tobytes()),
            "layer.0.weight_zero_point": ("I8", zeros.shape, zeros.tobytes()),
        },
    )
    meant: Array = (weights.astype(numpy.float64) - zeros) * scales.astype(numpy.float64)
    return meant


def nvfp4(folder: Path, is_divided: bool = True) -> Array:
    """Add a matrix in NVFP4, as compressed-tensors writes it or as ModelOpt does. Return its values."""
    import ml_dtypes

    random = numpy.random.default_rng(11)
    rows, columns = 24, 160
    bytes_of = random.integers(0, 256, (rows, columns // 2), dtype=numpy.uint8)
    scales = (random.random((rows, columns // 16)) * 400).astype(ml_dtypes.float8_e4m3fn)
    whole = numpy.array([737.25 if is_divided else 0.00137], numpy.float32)
    names = ("weight_packed", "weight_global_scale") if is_divided else ("weight", "weight_scale_2")
    write_raw(
        folder / "model.safetensors",
        {
            f"layer.0.{names[0]}": ("U8", bytes_of.shape, bytes_of.tobytes()),
            "layer.0.weight_scale": ("F8_E4M3", scales.shape, scales.tobytes()),
            f"layer.0.{names[1]}": ("F32", whole.shape if is_divided else (), whole.tobytes()),
        },
    )
    values = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], numpy.float32)
    values = numpy.concatenate([values, -values])
    halves = numpy.stack([values[bytes_of & 15], values[bytes_of >> 4]], axis=-1).reshape(rows, columns)
    own = scales.astype(numpy.float32)
    factors = own / whole if is_divided else own * whole
    meant: Array = halves * numpy.repeat(factors, 16, axis=1)
    return meant


def nvfp4_of_modelopt(folder: Path) -> Array:
    """Add the same as ModelOpt writes it. Return its values."""
    return nvfp4(folder, is_divided=False)


def nvfp4_of_experts(folder: Path, is_across: bool = False, wholes: int = 1) -> Array:
    """Add the experts of a layer as one tensor in NVFP4. Return the values of all, below each other.

    ModelOpt packs along the rows, with one number for all experts.
    """
    import ml_dtypes

    random = numpy.random.default_rng(12)
    experts, rows, columns = 3, 32, 48
    numbers = random.integers(0, 16, (experts, rows, columns), dtype=numpy.uint8)
    blocks = (experts, rows, columns // 16) if is_across else (experts, rows // 16, columns)
    scales = (random.random(blocks) * 400).astype(ml_dtypes.float8_e4m3fn)
    whole = (random.random(wholes) / 700).astype(numpy.float32)
    low, high = (numbers[..., half::2] if is_across else numbers[:, half::2] for half in (0, 1))
    packed = low | high << 4
    write_raw(
        folder / "model.safetensors",
        {
            "experts.up_proj": ("U8", packed.shape, packed.tobytes()),
            "experts.up_proj_weight_scale": ("F8_E4M3", scales.shape, scales.tobytes()),
            "experts.up_proj_weight_scale_2": ("F32", (wholes,), whole.tobytes()),
        },
    )
    values = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], numpy.float32)
    factors = scales.astype(numpy.float32) * whole[:, None, None]
    factors = numpy.repeat(factors, 16, axis=2 if is_across else 1)
    meant: Array = numpy.concatenate([values, -values])[numbers] * factors
    return meant.reshape(-1, columns)


def nvfp4_of_experts_across(folder: Path) -> Array:
    """Add the same, packed along the columns, with a number for each expert. Return the values."""
    return nvfp4_of_experts(folder, is_across=True, wholes=3)


# The table of bitsandbytes for normally distributed numbers.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


def nf4(folder: Path, is_nested: bool = False) -> Array:
    """Add a matrix of 4 bits as bitsandbytes writes it; its rows are no whole blocks. Return its values."""
    random = numpy.random.default_rng(12)
    rows, columns, block, nested_block = 30, 80, 64, 16
    bytes_of = random.integers(0, 256, (rows * columns // 2, 1), dtype=numpy.uint8)
    table = numpy.array(NF4, numpy.float32)
    blocks = -(-rows * columns // block)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [rows, columns]}
    tensors: Raw = {
        "layer.0.weight": ("U8", bytes_of.shape, bytes_of.tobytes()),
        "layer.0.weight.quant_map": ("F32", (16,), table.tobytes()),
    }
    if is_nested:
        codes = numpy.sort(random.standard_normal(256)).astype(numpy.float32)
        inner = random.integers(0, 256, blocks, dtype=numpy.uint8)
        outer = random.random(-(-blocks // nested_block), dtype=numpy.float32)
        offset = numpy.float32(0.123456)
        scales = codes[inner] * numpy.repeat(outer, nested_block)[:blocks] + offset
        state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": float(offset)}
        tensors |= {
            "layer.0.weight.absmax": ("U8", inner.shape, inner.tobytes()),
            "layer.0.weight.nested_absmax": ("F32", outer.shape, outer.tobytes()),
            "layer.0.weight.nested_quant_map": ("F32", codes.shape, codes.tobytes()),
        }
    else:
        scales = random.random(blocks, dtype=numpy.float32)
        tensors["layer.0.weight.absmax"] = ("F32", scales.shape, scales.tobytes())
    text = json.dumps(state).encode()
    tensors["layer.0.weight.quant_state.bitsandbytes__nf4"] = ("U8", (len(text),), text)
    write_raw(folder / "model.safetensors", tensors)
    halves = numpy.stack([table[bytes_of >> 4], table[bytes_of & 15]], axis=-1).reshape(-1)
    meant: Array = (halves * numpy.repeat(scales, block)[: halves.size]).reshape(rows, columns)
    return meant


def nf4_nested(folder: Path) -> Array:
    """Add the same with quantised scales. Return its values."""
    return nf4(folder, is_nested=True)


def llm_int8(folder: Path) -> Array:
    """Add a matrix as bitsandbytes quantises it to 8 bits. Return its values."""
    random = numpy.random.default_rng(13)
    weights = random.integers(-127, 128, (40, 70)).astype(numpy.int8)
    scales = random.random(40, dtype=numpy.float32)
    write_raw(
        folder / "model.safetensors",
        {
            "layer.0.weight": ("I8", weights.shape, weights.tobytes()),
            "layer.0.SCB": ("F32", scales.shape, scales.tobytes()),
            "layer.0.weight_format": ("U8", (), b"\0"),
        },
    )
    meant: Array = (weights * scales[:, None]) * numpy.float32(7.874015718698502e-3)
    return meant


def peft(folder: Path) -> Path:
    """Write a LoRA as PEFT does, with the configuration beside it that holds its alpha. Return its path."""
    factors = {"A": (4, 64), "B": (64, 4)}
    stem = "base_model.model.h.0.attn.q_proj"
    tensors: Raw = {
        f"{stem}.lora_{factor}.weight": ("F32", shape, bytes(4 * 256)) for factor, shape in factors.items()
    }
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return write_raw(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
