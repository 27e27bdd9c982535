"""Weights that are dequantised while they are read equal the values of a plain decoder in NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot
import ingot.torch
from ingot.errors import CheckpointError, ConversionError, OptionError
from ingot.numpy import load_file, save_file
from support import quantised
from support.commands import run
from support.quantised import Array, Quantised

RANDOM = numpy.random.default_rng

# By name: a model of each family and of each variant that decodes in another way.
MODELS: dict[str, Callable[[], Quantised]] = {
    "fp8 blocks": lambda: quantised.fp8(RANDOM(1), (300, 200), (128, 128)),
    "fp8 small blocks": lambda: quantised.fp8(RANDOM(2), (70, 90), (16, 32), scale="bfloat16"),
    "fp8 rows": lambda: quantised.fp8(RANDOM(3), (70, 90), "row", suffix="_scale"),
    "fp8 tensor": lambda: quantised.fp8(RANDOM(4), (70, 90), "tensor", suffix="_scale", dtype="float8_e5m2"),
    "fp8 experts": lambda: quantised.fp8(RANDOM(5), (3, 40, 70), (16, 32)),
    "fp8 rows of experts": lambda: quantised.fp8(RANDOM(6), (3, 40, 70), "row", suffix="_scale"),
    "gptq 4": lambda: quantised.gptq(RANDOM(7), 4, 3, 32, 72),
    "gptq 8": lambda: quantised.gptq(RANDOM(8), 8, 3, 32, 72),
    "gptq 2": lambda: quantised.gptq(RANDOM(9), 2, 3, 32, 96),
    "gptq 3": lambda: quantised.gptq(RANDOM(10), 3, 3, 32, 96),
    "gptq 3 act-order v2": lambda: quantised.gptq(RANDOM(11), 3, 3, 64, 96, version=2, act_order=True),
    "gptq 4 act-order": lambda: quantised.gptq(RANDOM(12), 4, 4, 32, 80, act_order=True),
    "gptq 4 v2": lambda: quantised.gptq(RANDOM(13), 4, 4, 32, 80, version=2),
    "awq": lambda: quantised.awq(RANDOM(14), 3, 40, 72),
    "packed 4": lambda: quantised.packed(RANDOM(15), 4, 70, 3, 24),
    "packed 8": lambda: quantised.packed(RANDOM(16), 8, 70, 3, 24, zero_points=True),
    "packed 3": lambda: quantised.packed(RANDOM(17), 3, 70, 3, 23, zero_points=True),
    "packed act-order": lambda: quantised.packed(RANDOM(18), 4, 70, 3, 24, act_order=True, zero_points=True),
    "int8": lambda: quantised.int8(RANDOM(19), 70, 90),
    "int8 with zero points": lambda: quantised.int8(RANDOM(20), 70, 90, zero_points=True),
    "nvfp4": lambda: quantised.nvfp4(RANDOM(21), 70, 5),
    "nvfp4 packed": lambda: quantised.nvfp4(RANDOM(22), 70, 5, divided=True),
    "mxfp4": lambda: quantised.mxfp4(RANDOM(23), (), 70, 3),
    "mxfp4 experts": lambda: quantised.mxfp4(RANDOM(24), (3,), 70, 2),
    "mxfp4 packed": lambda: quantised.mxfp4_packed(RANDOM(25), 70, 3),
    "nf4": lambda: quantised.bits4(RANDOM(26), (70, 90), 64),
    "nf4 nested": lambda: quantised.bits4(RANDOM(27), (300, 200), 64, nested=True),
    "fp4 of odd rows": lambda: quantised.bits4(RANDOM(28), (7, 9, 3), 64, kind="fp4"),
    "llm.int8": lambda: quantised.bits8(RANDOM(29), 70, 90),
    "torchao float8": lambda: quantised.torchao(RANDOM(30), "Float8Tensor", 70, 1, 90),
    "torchao intx": lambda: quantised.torchao(RANDOM(31), "IntxUnpackedToInt8Tensor", 70, 3, 32),
    "torchao nvfp4": lambda: quantised.torchao(RANDOM(32), "NVFP4Tensor", 70, 5, 16),
    "torchao mx": lambda: quantised.torchao(RANDOM(33), "MXTensor", 70, 3, 32),
}
BIAS = numpy.arange(7, dtype="float16")


def same(found: Array, meant: Array) -> bool:
    """Return whether all bits are equal."""
    return found.dtype == meant.dtype and found.shape == meant.shape and found.tobytes() == meant.tobytes()


@pytest.mark.parametrize("name", MODELS)
def test_load_file_dequantizes_every_family(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    path = quantised.with_others(model, {"x.bias": BIAS}).save(tmp_path)
    found = load_file(path, dequantize="F32")
    assert {*found} == {*model.weights, "x.bias"}
    assert same(found.pop("x.bias"), BIAS)
    for weight, meant in model.weights.items():
        assert same(found[weight], numpy.ascontiguousarray(meant, "float32")), weight


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_load_file_rounds_once(tmp_path: Path, name: str, dtype: Any) -> None:
    model = MODELS[name]()
    rounded: Any = ml_dtypes.bfloat16 if dtype == "BF16" else numpy.float16
    with numpy.errstate(over="ignore"):
        meant = {weight: values.astype(rounded) for weight, values in model.weights.items()}
    found = load_file(model.save(tmp_path), dequantize=dtype)
    assert all(same(found[weight], numpy.ascontiguousarray(values)) for weight, values in meant.items())


@pytest.mark.parametrize("name", MODELS)
def test_slices_are_the_slices_of_the_whole(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    [(weight, meant)] = model.weights.items()
    path = model.save(tmp_path)
    rows, columns = meant.shape[-2:]
    with ingot.open(path, dequantize="F32") as file:
        part = file.get_slice(weight)
        assert tuple(part.get_shape()) == meant.shape
        for index in (
            (..., slice(3, rows - 2), slice(None)),
            (..., slice(None), slice(5, columns - 3)),
            (..., slice(1, rows, 3), slice(7, 8)),
            (..., slice(None), slice(columns // 4, columns // 2)),
            (..., rows - 1, slice(2, None, 5)),
        ):
            assert same(part[index], numpy.ascontiguousarray(meant[index], "float32")), index


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_every_backend_has_the_same_values(tmp_path: Path, backend: Any) -> None:
    model = MODELS["gptq 4 act-order"]()
    found = load_file(model.save(tmp_path), dequantize="F32", backend=backend)
    assert same(found["x.weight"], numpy.ascontiguousarray(model.weights["x.weight"]))


VECTORS = Path(__file__).parents[1] / "vectors" / "dequantised"


@pytest.mark.parametrize("name", sorted(path.name for path in VECTORS.iterdir()))
def test_values_are_those_of_the_format_library(name: str) -> None:
    """`tests/vectors/make_dequantised.py` made them, with the library of each format in float32."""
    folder = VECTORS / name
    found = load_file(folder / "model.safetensors", dequantize="F32")["x.weight"]
    meant = load_file(folder / "values.safetensors")["x.weight"]
    # The sign of a zero may differ: libraries subtract in another order.
    assert found.shape == meant.shape
    numpy.testing.assert_array_max_ulp(found, meant, maxulp=0 if name not in ONE_ULP else 1)


# Libraries that multiply in another order.
ONE_ULP = {"torchao-nvfp4"}


@st.composite
def models(draw: st.DrawFn) -> Quantised:
    """Return a model of any family, with any shape."""
    random = RANDOM(draw(st.integers(0, 2**32)))
    small = st.integers(1, 5)
    rows = draw(st.integers(1, 90))
    family = draw(st.sampled_from(["fp8", "gptq", "awq", "packed", "nvfp4", "mxfp4", "bits4", "bits8"]))
    if family == "fp8":
        shape = (*draw(st.sampled_from([(), (2,)])), rows, draw(st.integers(1, 300)))
        block = draw(st.sampled_from([(128, 128), (16, 32), (1, 7), "row", "tensor"]))
        return quantised.fp8(random, shape, block)
    if family == "gptq":
        bits, version = draw(st.sampled_from([2, 3, 4, 8])), draw(st.sampled_from([1, 2]))
        size = 32 * draw(small)
        outputs = 32 * draw(small)
        order = draw(st.booleans())
        return quantised.gptq(random, bits, draw(small), size, outputs, version=version, act_order=order)
    if family == "awq":
        return quantised.awq(random, draw(small), draw(st.integers(1, 70)), 8 * draw(st.integers(1, 20)))
    if family == "packed":
        bits, size = draw(st.integers(1, 8)), draw(st.integers(9, 70))
        zero_points, order = draw(st.booleans()), draw(st.booleans())
        groups = draw(small)
        return quantised.packed(random, bits, rows, groups, size, zero_points=zero_points, act_order=order)
    if family == "nvfp4":
        return quantised.nvfp4(random, rows, draw(small), divided=draw(st.booleans()))
    if family == "mxfp4":
        return quantised.mxfp4(random, draw(st.sampled_from([(), (3,), (1,)])), rows, draw(small))
    if family == "bits4":
        block = 64 * draw(small)
        return quantised.bits4(random, (rows, draw(st.integers(1, 90))), block, nested=draw(st.booleans()))
    return quantised.bits8(random, rows, draw(st.integers(1, 200)))


def indices(draw: Any, length: int) -> slice:
    """Return a slice of a dimension that selects something."""
    begin = draw(st.integers(0, length - 1))
    return slice(begin, draw(st.integers(begin + 1, length)), draw(st.integers(1, 9)))


@given(data=st.data())
@settings(deadline=None)
def test_any_slice_of_any_model_is_right(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = data.draw(models())
    path = model.save(tmp_path_factory.mktemp("model"))
    [(weight, meant)] = model.weights.items()
    with ingot.open(path, dequantize="F32") as file:
        assert same(file.get_tensor(weight), numpy.ascontiguousarray(meant, "float32"))
        for _ in range(3):
            index = tuple(indices(data.draw, length) for length in meant.shape)
            found = file.get_slice(weight)[index]
            assert same(found, numpy.ascontiguousarray(meant[index], "float32")), index


def test_the_dtype_of_the_model_is_the_default(tmp_path: Path) -> None:
    model = MODELS["gptq 4"]()
    path = model.save(tmp_path)
    assert load_file(path, dequantize=True)["x.weight"].dtype == ml_dtypes.bfloat16
    config = {"torch_dtype": "float16", "quantization_config": model.config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_file(path, dequantize=True)["x.weight"].dtype == numpy.float16
    assert "x.qweight" in load_file(path)


def test_tensors_decide_without_a_configuration(tmp_path: Path) -> None:
    for name in ("gptq 4 act-order", "awq", "nvfp4", "nf4 nested", "packed 4"):
        model = MODELS[name]()
        path = model.save(tmp_path)
        (tmp_path / "config.json").unlink()
        meant = numpy.ascontiguousarray(model.weights["x.weight"])
        assert same(load_file(path, dequantize="F32")["x.weight"], meant), name


def test_aliases_stay(tmp_path: Path) -> None:
    """Names of a packed weight are names of the weight, and names of others keep their values."""
    model = MODELS["awq"]()
    parts = ("qweight", "qzeros", "scales")
    tensors = {name: torch.from_numpy(part.copy()) for name, part in model.tensors.items()}
    tied = {f"y.{part}": tensors[f"x.{part}"] for part in parts}
    table = numpy.arange(24, dtype="float32").reshape(4, 6)
    others = {"table": table, "whole": table, "columns": table[:, 1:3]}
    whole = torch.from_numpy(table.copy())
    path = tmp_path / "model.safetensors"
    views = {"table": whole, "whole": whole, "columns": whole[:, 1:3]}
    ingot.torch.save_file({**tensors, **tied, **views}, path, shared="alias")
    found = load_file(path, dequantize="F32")
    assert {*found} == {"x.weight", "y.weight", *others}
    meant = numpy.ascontiguousarray(model.weights["x.weight"])
    assert same(found["x.weight"], meant)
    assert same(found["y.weight"], meant)
    assert all(same(found[name], numpy.ascontiguousarray(values)) for name, values in others.items())


def test_a_model_that_is_not_quantised_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x.weight": BIAS}, path, metadata={"format": "np"})
    assert same(load_file(path, dequantize=True)["x.weight"], BIAS)


def test_a_sharded_model_is_dequantized(tmp_path: Path) -> None:
    models = {f"layers.{number}": quantised.awq(RANDOM(number), 2, 32, 64) for number in range(3)}
    tensors = {f"{at}.{name}": part for at, model in models.items() for name, part in model.tensors.items()}
    save_file(tensors, tmp_path / "whole.safetensors")
    ingot.split(tmp_path / "whole.safetensors", tmp_path / "model", max_shard_size=3000)
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "awq"}})
    )
    found = load_file(tmp_path / "model", dequantize="F32")
    assert {*found} == {f"{at}.x.weight" for at in models}
    for at, model in models.items():
        meant = numpy.ascontiguousarray(model.weights["x.weight"])
        assert same(found[f"{at}.x.weight"], meant)


def test_rewrite_writes_plain_weights(tmp_path: Path) -> None:
    model = quantised.with_others(MODELS["torchao nvfp4"](), {"x.bias": BIAS})
    path, new = model.save(tmp_path), tmp_path / "plain.safetensors"
    removed = ingot.rewrite(path, new, dequantize="F32")
    assert removed == ["x._weight_per_tensor_scale", "x._weight_qdata", "x._weight_scale"]
    found = load_file(new)
    assert {*found} == {"x.weight", "x.bias"}
    assert same(found["x.weight"], numpy.ascontiguousarray(model.weights["x.weight"]))
    with ingot.open(new) as file:
        # The entries with the classes of torchao's tensors are removed with the parts.
        assert file.metadata() == {"title": "kept"}


def test_rewrite_writes_a_configuration_without_the_quantisation(tmp_path: Path) -> None:
    path = MODELS["awq"]().save(tmp_path)
    inner = {"quantization_config": {"quant_method": "awq"}, "heads": 2}
    config = {"torch_dtype": "float16", "quantization_config": {"quant_method": "awq"}, "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "two" / "config.json").write_text("mine")
    for place in ("one", "two", "."):
        ingot.rewrite(path, tmp_path / place / "plain.safetensors", dequantize=True)
    plain = json.loads((tmp_path / "one" / "config.json").read_text())
    assert plain == {"torch_dtype": "float16", "text_config": {"heads": 2}}
    assert (tmp_path / "two" / "config.json").read_text() == "mine"
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_rewrite_command_dequantizes(tmp_path: Path) -> None:
    model = MODELS["awq"]()
    path, new = model.save(tmp_path), tmp_path / "plain.safetensors"
    words = ["rewrite", str(path), str(new), "--dequantize", "--dtype", "F32", "--json"]
    for dry in (["--dry-run"], []):
        found = run(*words, *dry).json()
        assert found["removed"] == ["x.qweight", "x.qzeros", "x.scales"]
        assert [one["dtype"] for one in found["tensors"]] == ["F32"]
        assert new.exists() == (not dry)
    assert same(load_file(new)["x.weight"], numpy.ascontiguousarray(model.weights["x.weight"]))


def test_rules_see_the_plain_weights(tmp_path: Path) -> None:
    model = MODELS["awq"]()
    path, new = model.save(tmp_path), tmp_path / "plain.safetensors"
    rules = [ingot.remap.rename("y.weight", "x.weight")]
    removed = ingot.rewrite(path, new, dequantize="F32", remap=rules)
    assert removed == ["x.qweight", "x.qzeros", "x.scales"]
    assert same(load_file(new)["y.weight"], numpy.ascontiguousarray(model.weights["x.weight"]))
    assert load_file(path, dequantize="F32", remap=rules).keys() == {"y.weight"}


REFUSED = {
    "marlin": ({"x.B": numpy.zeros((4, 4), "int32"), "x.s": BIAS}, {}, "Marlin"),
    "2:4": (
        {"x.weight_packed": numpy.zeros((4, 4), "int32"), "x.meta": numpy.zeros((4, 4), "int16")},
        {},
        "2:4",
    ),
    "gemv": (MODELS["awq"]().tensors, {"quant_method": "awq", "version": "gemv"}, "gemv"),
    "other method": (MODELS["awq"]().tensors, {"quant_method": "exllama"}, "exllama"),
    "without scales": ({"x.qweight": numpy.zeros((4, 4), "int32")}, {}, "`x.scales` is missing"),
    "scales of another shape": (
        {
            "x.weight": numpy.zeros((4, 4), ml_dtypes.float8_e4m3fn),
            "x.weight_scale": numpy.ones(3, "float32"),
        },
        {},
        "fit no blocks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_formats_that_cannot_be_undone_are_refused_by_name(tmp_path: Path, name: str) -> None:
    tensors, config, reason = REFUSED[name]
    path = Quantised(dict(tensors), {}, config).save(tmp_path)
    with pytest.raises(ConversionError, match=reason) as caught:
        load_file(path, dequantize=True)
    assert (caught.value.code, caught.value.path) == ("no-dequantization", str(path))
    assert caught.value.tensor in tensors


def test_a_group_outside_of_the_groups_is_refused(tmp_path: Path) -> None:
    model = MODELS["gptq 4"]()
    model.tensors["x.g_idx"][5] = 77
    path = model.save(tmp_path)
    with pytest.raises(ConversionError, match=r"not in 0\.\.3") as caught:
        load_file(path, dequantize=True)
    assert (caught.value.code, caught.value.tensor) == ("no-dequantization", "x.g_idx")


def changed(name: str, part: str, change: Callable[[Array], Array]) -> Quantised:
    model = MODELS[name]()
    model.tensors[part] = change(model.tensors[part])
    return model


def configured(name: str, **settings: Any) -> Quantised:
    model = MODELS[name]()
    model.config.update(settings)
    return model


def lacking(name: str, part: str) -> Quantised:
    model = MODELS[name]()
    del model.tensors[part]
    return model


def as_dtype(name: str, part: str, dtype: str) -> Quantised:
    return changed(name, part, lambda values: numpy.zeros(values.shape, dtype))


# By fault: the model, and the tensor that the error names.
FAULTS: dict[str, tuple[Callable[[], Quantised], str]] = {
    "AWQ of outputs that are no multiple of 8": (
        lambda: changed("awq", "x.scales", lambda scales: scales[:, :-1].copy()),
        "x.scales",
    ),
    "AWQ of 8 bits": (lambda: configured("awq", bits=8), "x.qweight"),
    "AWQ of other groups": (lambda: configured("awq", group_size=20), "x.scales"),
    "GPTQ of other bits": (lambda: configured("gptq 4", bits=8), "x.qweight"),
    "GPTQ of other groups": (lambda: configured("gptq 4", group_size=64), "x.scales"),
    "packed integers of other bits": (
        lambda: configured("packed 4", config_groups={"a": {"weights": {"num_bits": 8}}}),
        "x.weight_packed",
    ),
    "packed integers of other groups": (
        lambda: changed("packed 4", "x.weight_scale", lambda scales: scales[:, :-1].copy()),
        "x.weight_scale",
    ),
    "FP8 of other blocks": (
        lambda: changed(
            "fp8 blocks", "x.weight_scale_inv", lambda scales: numpy.concatenate([scales, scales[:1]])
        ),
        "x.weight_scale_inv",
    ),
    "NF4 without its state": (
        lambda: lacking("nf4", "x.weight.quant_state.bitsandbytes__nf4"),
        "x.weight",
    ),
    "LLM.int8 without maxima": (lambda: lacking("llm.int8", "x.SCB"), "x.weight"),
    "MXFP4 with powers of another dtype": (lambda: as_dtype("mxfp4", "x.up_scales", "int64"), "x.up_scales"),
    "torchao floats of another dtype": (
        lambda: as_dtype("torchao float8", "x._weight_qdata", "int64"),
        "x._weight_qdata",
    ),
    "torchao integers of another dtype": (
        lambda: as_dtype("torchao intx", "x._weight_qdata", "bool"),
        "x._weight_qdata",
    ),
    "torchao FP4 of another dtype": (
        lambda: as_dtype("torchao nvfp4", "x._weight_qdata", "float64"),
        "x._weight_qdata",
    ),
    "torchao scales that are transposed": (
        lambda: changed("torchao nvfp4", "x._weight_scale", lambda scales: scales.T.copy()),
        "x._weight_scale",
    ),
    "a torchao scale of the whole of another dtype": (
        lambda: as_dtype("torchao nvfp4", "x._weight_per_tensor_scale", "bool"),
        "x._weight_per_tensor_scale",
    ),
    "no torchao scale of the whole": (
        lambda: changed("torchao nvfp4", "x._weight_per_tensor_scale", lambda _: numpy.zeros(0, "float32")),
        "x._weight_per_tensor_scale",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_do_not_fit_are_refused_by_name(tmp_path: Path, fault: str) -> None:
    make, tensor = FAULTS[fault]
    path = make().save(tmp_path)
    with pytest.raises(ConversionError) as caught:
        load_file(path, dequantize=True)
    assert (caught.value.code, caught.value.tensor) == ("no-dequantization", tensor)


def test_modules_may_have_bits_of_their_own(tmp_path: Path) -> None:
    model = configured("gptq 8", bits=4, dynamic={"x": {"bits": 8}})
    found = load_file(model.save(tmp_path), dequantize="F32")["x.weight"]
    assert same(found, numpy.ascontiguousarray(model.weights["x.weight"]))


def test_groups_that_were_never_set_are_in_order_everywhere(tmp_path: Path) -> None:
    """A negative number in one tile decides for all: compressed-tensors looks at the whole tensor."""
    model = quantised.packed(RANDOM(34), 4, 3, 8, 4096)
    order = numpy.arange(8 * 4096, dtype="int32")[::-1] // 4096
    model.tensors["x.weight_g_idx"] = numpy.ascontiguousarray(order)
    model.tensors["x.weight_g_idx"][-1] = -1
    path, meant = model.save(tmp_path), numpy.ascontiguousarray(model.weights["x.weight"])
    assert same(load_file(path, dequantize="F32")["x.weight"], meant)
    with ingot.open(path, dequantize="F32") as file:
        found = file.get_slice("x.weight")[:, :100]
    assert same(found, numpy.ascontiguousarray(meant[:, :100]))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_scales_that_are_not_finite_stay(tmp_path: Path, value: str) -> None:
    model = MODELS["fp8 rows"]()
    model.tensors["x.weight_scale"][3] = float(value)
    found = load_file(model.save(tmp_path), dequantize="F32")["x.weight"]
    with numpy.errstate(invalid="ignore"):
        meant = model.tensors["x.weight"].astype("float32") * model.tensors["x.weight_scale"]
    assert numpy.array_equal(found, meant, equal_nan=True)


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = MODELS["awq"]().save(tmp_path)
    with pytest.raises(OptionError, match="expected True, False or one of BF16") as caught:
        load_file(path, dequantize="F8_E4M3")
    assert caught.value.code == "no-conversion"
    with pytest.raises(OptionError, match="verify the file first") as caught:
        load_file(path, dequantize=True, verify=True)
    assert caught.value.code == "verify-computed"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON") as found:
        load_file(path, dequantize=True)
    assert found.value.code == "invalid-config"
