"""Numbers in the viewer, compared with the command, with ml_dtypes and with dequantised values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import ingot
import ingot.numpy
from ingot import _native
from support.models import minilm
from view import made_models
from view.conftest import Look, Opener
from view.made_models import Array, Raw, write_raw

BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8}
BITS |= {"F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
BITS |= {"I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}
# The number of elements: more than one block of a reduction, and no multiple of a block.
ELEMENTS = 40_004
RUN = """async ([job, given]) => {
  const { run } = await import("/viewer/jobs.js");
  const headers = { authorization: `Bearer ${sessionStorage.getItem("ingot-token")}` };
  // Tensors of one file have one wire.
  const wires = {};
  for (const tensor of given.pairs?.flat() ?? [given.tensor]) {
    tensor.wire = wires[tensor.wire.url] ??= { ...tensor.wire, headers };
  }
  const found = await run(job, given);
  const each = (value) => Object.fromEntries(Object.entries(value).map(([key, one]) => [key, plain(one)]));
  const plain = (value) => typeof value === "bigint" ? `int:${value}`
    : typeof value === "number" && !Number.isFinite(value) ? `float:${value}`
    : ArrayBuffer.isView(value) ? Array.from(value, plain) : Array.isArray(value) ? value.map(plain)
    : value && typeof value === "object" ? each(value) : value;
  return plain(found);
}"""


def random_of(dtype: str, seed: int = 0) -> tuple[str, tuple[int, ...], bytes]:
    """Every bit pattern in random order, for floats including NaN."""
    random = numpy.random.default_rng(seed)
    data = random.integers(0, 256, ELEMENTS * BITS[dtype] // 8, dtype=numpy.uint8).tobytes()
    if dtype == "BOOL":
        data = bytes(byte & 1 for byte in data[:-2]) + b"\x02\xff"
    if dtype in ("F32", "F64", "C64"):
        plain = random.standard_normal(len(data) // 4, dtype=numpy.float32)
        array = plain[: len(data) // 8].astype(numpy.float64) if dtype == "F64" else plain
        array[[3, 70, 20_000, 20_001, 20_002]] = [0, -0.0, numpy.nan, numpy.inf, -numpy.inf]
        data = array.tobytes()
    return dtype, (ELEMENTS,), data


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of each dtype, and tensors without finite values, of one value, and of the largest values."""
    largest = numpy.finfo(numpy.float64).max
    tensors: Raw = {dtype: random_of(dtype) for dtype in BITS}
    more = {
        "nan-only": ("F32", numpy.full(5, numpy.nan, numpy.float32)),
        "infinite-only": ("F64", numpy.array([numpy.inf, -numpy.inf])),
        "constant": ("F32", numpy.full(1000, 0.1, numpy.float32)),
        "far-from-zero": ("F32", numpy.float32(1e4) + numpy.arange(5000, dtype=numpy.float32) / 1024),
        "largest": ("F64", numpy.array([largest, -largest, largest / 2, 0])),
        "wide": ("I64", numpy.array([2**63 - 1, -(2**63), 2**53 + 1, 0, 7])),
        "one": ("F16", numpy.array(2.5, numpy.float16)),
        "none": ("F32", numpy.zeros((0, 4), numpy.float32)),
    }
    tensors |= {name: (dtype, array.shape, array.tobytes()) for name, (dtype, array) in more.items()}
    return write_raw(tmp_path_factory.mktemp("every") / "model.safetensors", tensors)


def wired(path: Path, name: str, number: int = 0) -> dict[str, Any]:
    """The arguments by which a worker reads a tensor."""
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    with ingot.safe_open(path, "np") as file:
        info = file.info(name)
    return {
        "wire": {"url": f"/f/{number}"},
        "dtype": info.dtype,
        "shape": list(info.shape),
        "nbytes": info.nbytes,
        "position": start + info.begin,
    }


def job(look: Look, name: str, **given: Any) -> Any:
    for tensor in itertools.chain(*given["pairs"]) if "pairs" in given else [given["tensor"]]:
        tensor["wire"]["url"] = look.allowed + tensor["wire"]["url"]
    return look.page.evaluate(RUN, [name, given])


def number(value: Any) -> Any:
    if isinstance(value, str):
        kind, text = value.split(":")
        return int(text) if kind == "int" else float(text)
    return value


def test_viewer_statistics_equal_the_commands(viewed: Opener, every: Path) -> None:
    look = viewed(every, modules=True)
    checkpoint = _native.Checkpoint.open(every)
    for name in checkpoint.names():
        (expected,) = _native.statistics(checkpoint, [name], bins=64)
        found = job(look, "statistics", tensor=wired(every, name), bins=64, most=10**9, exact=True)
        if expected is None or found is None:
            assert (found, expected) == (None, None), name
            continue
        for field in ("count", "zeros", "nans", "infinities", "malformed"):
            assert found[field] == expected[field], (name, field)
        for field in ("min", "max"):
            assert number(found[field]) == expected[field], (name, field)
        for field in ("mean", "std"):
            theirs = expected[field]
            assert number(found[field]) == (
                theirs if theirs is None else pytest.approx(theirs, rel=1e-9, nan_ok=True)
            ), (
                name,
                field,
            )
        if expected["min"] is not None:
            assert found["bins"] == expected["bins"], name


def test_viewer_histogram_of_one_pass_is_close_to_two(viewed: Opener) -> None:
    name = "embeddings.word_embeddings.weight"
    look = viewed(minilm(), modules=True)
    near, exact = (
        job(look, "statistics", tensor=wired(minilm(), name), bins=64, most=10**9, exact=is_exact)
        for is_exact in (False, True)
    )
    assert (near["isExact"], exact["isExact"]) == (False, True)
    assert sum(near["bins"]) == sum(exact["bins"]) == exact["count"]
    assert {key: near[key] for key in ("min", "max", "mean", "std")} == {
        key: exact[key] for key in ("min", "max", "mean", "std")
    }
    off = sum(abs(one - two) for one, two in zip(near["bins"], exact["bins"], strict=True)) / 2
    assert off < 0.05 * exact["count"]


def test_viewer_labels_a_sample(viewed: Opener) -> None:
    name = "embeddings.word_embeddings.weight"
    look = viewed(minilm(), modules=True)
    found = job(look, "statistics", tensor=wired(minilm(), name), bins=64, most=4 << 20, exact=False)
    assert found["isSample"]
    assert 3 << 20 < found["read"] <= 4 << 20
    assert found["count"] == found["read"] // 4
    array = ingot.numpy.load_file(minilm())[name]
    assert found["std"] == pytest.approx(float(array.std()), rel=0.1)


def test_viewer_values_equal_ml_dtypes(viewed: Opener, every: Path) -> None:
    look = viewed(every, modules=True)
    # No library has 6-bit floats: the tests of the decoder have them.
    names = [name for name in BITS if not name.startswith("F6_")]
    with ingot.safe_open(every, "np") as file:
        arrays = file.get_tensors(names)
    for name in names:
        layout = {"down": None, "across": None, "fixed": [], "fold": 100}
        found = job(
            look,
            "values",
            tensor=wired(every, name),
            layout=layout,
            row=0,
            rows=ELEMENTS,
            column=0,
            columns=100,
        )
        texts = [text for line in found for text in line]
        array = arrays[name].reshape(-1)
        assert len(texts) == ELEMENTS, name
        if array.dtype.kind == "c":
            values = numpy.array([complex(text) for text in texts])
            numpy.testing.assert_allclose(values.view(float), array.view(numpy.float32), rtol=1e-7)
        elif array.dtype.kind in "iub":
            assert [int(text) for text in texts] == [
                int(value) for value in array.view("u1" if name == "BOOL" else array.dtype)
            ], name
        else:
            values = numpy.array([float(text) for text in texts])
            with numpy.errstate(invalid="ignore"):
                array = array.astype(numpy.float64)
            numpy.testing.assert_allclose(
                values,
                array,
                rtol=1e-7 if name == "F32" else 1e-12 if name == "F64" else 1e-6,
            )


def test_viewer_distances_equal_the_commands(viewed: Opener, every: Path, tmp_path: Path) -> None:
    tensors = {dtype: random_of(dtype) for dtype in BITS}
    # Change one value in two hundred.
    random = numpy.random.default_rng(9)
    for dtype, (_, shape, data) in tensors.items():
        changed = bytearray(data)
        for at in random.integers(0, len(data), len(data) // 200):
            changed[at] = changed[at] ^ (1 if dtype == "BOOL" else 0x11)
        tensors[dtype] = (dtype, shape, bytes(changed))
    other = write_raw(tmp_path / "other.safetensors", tensors)
    look = viewed(every, other, modules=True)
    one, two = _native.Checkpoint.open(every), _native.Checkpoint.open(other)
    # The distances of all pairs of tensors in one job, and of each tensor from itself.
    pairs = [[wired(every, name), wired(other, name, 1)] for name in BITS]
    told = job(look, "distances", pairs=pairs)
    ours = job(look, "distances", pairs=[[wired(every, name), wired(every, name)] for name in BITS])
    assert len([one for one in look.requests if "/f/" in one.url]) < 20
    for name, found, same in zip(BITS, told, ours, strict=True):
        (expected,) = _native.distances(one, two, [name])
        if name.startswith("F6_"):
            assert found is None
            continue
        assert expected is not None
        different, *others = expected
        assert found["different"] == different, name
        for field, value in zip(("largest", "relative", "cosine"), others, strict=True):
            assert number(found[field]) == (
                value if value is None else pytest.approx(float(value), rel=1e-9, nan_ok=True)
            ), (name, field)
        assert (same["different"], same["largest"]) == (0, 0)


# By method: a function that makes the model, one of its tensors, and the method's name on the page.
QUANTISED: dict[str, tuple[Callable[[Path], Array], str, str]] = {
    "gptq": (made_models.gptq, "layer.0.q.qweight", "GPTQ, 4 bits"),
    "awq": (made_models.awq, "layer.0.q.qweight", "AWQ, 4 bits"),
    "fp8": (made_models.fp8, "layer.0.weight", "F8_E4M3, scales for blocks of 128 × 128"),
    "int8 with zero points": (made_models.int8, "layer.0.weight", "I8, scales for blocks of 1 × 70"),
    "mxfp4": (made_models.mxfp4, "experts.up_proj_blocks", "MXFP4"),
    "packed": (made_models.pack_quantized, "layer.0.weight_packed", "pack-quantized, 4 bits"),
    "packed with zero points": (
        made_models.pack_quantized_with_zero_points,
        "layer.0.weight_packed",
        "pack-quantized, 4 bits",
    ),
    "nvfp4": (made_models.nvfp4, "layer.0.weight_packed", "NVFP4"),
    "nvfp4 of ModelOpt": (made_models.nvfp4_of_modelopt, "layer.0.weight", "NVFP4"),
    "nvfp4 of experts": (
        made_models.nvfp4_of_experts,
        "experts.up_proj",
        "NVFP4, packed along the rows",
    ),
    "nvfp4 of experts, across": (made_models.nvfp4_of_experts_across, "experts.up_proj", "NVFP4"),
    "nf4": (made_models.nf4, "layer.0.weight", "bitsandbytes, NF4"),
    "nf4 nested": (made_models.nf4_nested, "layer.0.weight", "bitsandbytes, NF4, scales quantised"),
    "llm.int8": (made_models.llm_int8, "layer.0.weight", "bitsandbytes, 8 bits"),
    "packed in any order": (
        made_models.pack_quantized_in_any_order,
        "layer.0.weight_packed",
        "pack-quantized, 8 bits",
    ),
}


@pytest.mark.parametrize("scheme", QUANTISED)
def test_viewer_dequantizes_weights(viewed: Opener, tmp_path: Path, scheme: str) -> None:
    make, name, kind = QUANTISED[scheme]
    meant = make(tmp_path)
    # Wide enough for all columns of a part.
    wide = {"width": 2800, "height": 800}
    look = viewed(tmp_path, at=f"t={name}&view=values&w=0,32,0,12", viewport=wide)
    assert f"{kind}: stands for [{', '.join(map(str, meant.shape))}] numbers" in look.text()

    def shown() -> Array:
        lines = look.text("main tbody").split("\n")
        return numpy.array([[float(cell) for cell in line.split("\t")[1:]] for line in lines])

    for row, column in ((0, 0), (7, 13), (meant.shape[0] - 5, meant.shape[1] - 7)):
        look.page.evaluate(
            "(w) => { location.hash = location.hash.replace(/&w=[^&]*/, `&w=${w}`); }",
            f"{row},32,{column},12",
        )
        look.settle()
        numpy.testing.assert_allclose(
            shown(), meant[row : row + 32, column : column + 12], rtol=1e-5, atol=1e-12
        )
    row, column = 3, 5
    look.page.evaluate("() => { location.hash = location.hash.replace(/&w=[^&]*/, '&w=3,32,5,12&s=:1,:0'); }")
    look.settle()
    turned = meant.T[row : row + 32, column : column + 12]
    if turned.size:
        numpy.testing.assert_allclose(shown(), turned, rtol=1e-5, atol=1e-12)
    # The key r shows the stored numbers.
    look.page.keyboard.press("r")
    look.wait("Shown as it is stored")
    look.settle()
    look.page.click("text=Picture")
    look.settle()
    assert look.page.locator(".heat").count() == 1


def decoded(look: Look) -> Array:
    """The values of the screen as the page saves them."""
    look.page.wait_for_selector("main tbody")
    with look.page.expect_download() as waited:
        look.page.click("text=Save the tensor as .npy")
    return numpy.load(waited.value.path())


EXACT = [scheme for scheme in QUANTISED if scheme.startswith(("mxfp4", "nvfp4", "nf4", "llm.int8"))]


@pytest.mark.parametrize("scheme", EXACT)
def test_viewer_dequantizes_every_bit(viewed: Opener, tmp_path: Path, scheme: str) -> None:
    make, name, _ = QUANTISED[scheme]
    meant = make(tmp_path)
    found = decoded(viewed(tmp_path / "model.safetensors", at=f"t={name}&view=values"))
    assert found.tobytes() == meant.astype(numpy.float32).tobytes()


@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4 nested", "int8"])
def test_viewer_dequantizes_as_bitsandbytes_does(viewed: Opener, tmp_path: Path, kind: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    import torch

    from ingot.torch import save_file

    torch.manual_seed(0)
    weight = torch.randn(96, 128)
    if kind == "int8":
        packed, scales, _ = functional.int8_vectorwise_quant(weight.half())
        meant = functional.int8_vectorwise_dequant(packed, scales)
        tensors = {"x.weight": packed, "x.SCB": scales}
    else:
        packed, state = functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=kind == "nf4 nested", quant_type=kind[:3]
        )
        meant = functional.dequantize_4bit(packed, state)
        tensors = {f"x.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        tensors |= {"x.weight": packed}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    found = decoded(viewed(path, at="t=x.weight&view=values"))
    assert found.tobytes() == meant.numpy().astype(numpy.float32).tobytes()


def test_viewer_shows_an_invalid_quantisation_as_stored(viewed: Opener, tmp_path: Path) -> None:
    made_models.nf4(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"blocksize": 64', b'"blocksize": 32'))
    look = viewed(path, at="t=layer.0.weight&view=values")
    look.page.wait_for_selector("main tbody")
    assert "stands for" not in look.text()
