"""Conversion of files that TensorFlow, Keras, PaddlePaddle and flax wrote. For `make test-frameworks`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from pathlib import Path
from types import ModuleType

import numpy
import pytest

import ingot
from ingot._convert import listed
from ingot.numpy import load_file

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def imported(package: str) -> ModuleType | None:
    """The package, or None where it is not installed."""
    if importlib.util.find_spec(package) is None:
        return None
    with warnings.catch_warnings():
        # Frameworks warn about their own dependencies when they are imported.
        warnings.simplefilter("ignore")
        return importlib.import_module(package)


# In this order: paddle crashes in a process that has imported tensorflow before.
paddle = imported("paddle")
tensorflow = imported("tensorflow")
keras = imported("keras")
flax = imported("flax.serialization") if importlib.util.find_spec("flax") else None

pytestmark = pytest.mark.filterwarnings("ignore")


def needs(module: ModuleType | None, name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(module is None, reason=f"{name} is not installed")


@needs(paddle, "paddle")
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_convert_reads_what_paddle_saves(protocol: int) -> None:
    layer = paddle.nn.Linear(200, 300)
    optimiser = paddle.optimizer.Adam(parameters=layer.parameters())
    layer(paddle.ones([2, 200])).sum().backward()
    optimiser.step()
    half = paddle.ones([3], dtype="bfloat16")
    tree = {"model": layer.state_dict(), "optimizer": optimiser.state_dict(), "list": [half], "epoch": 3}
    paddle.save(tree, "in.pdparams", protocol=protocol)
    report = ingot.convert("in.pdparams", "out.safetensors")
    found = load_file("out.safetensors")
    numpy.testing.assert_array_equal(found["model.weight"], layer.weight.numpy())
    numpy.testing.assert_array_equal(found["model.bias"], layer.bias.numpy())
    for name, value in optimiser.state_dict().items():
        if isinstance(value, paddle.Tensor):
            numpy.testing.assert_array_equal(found[f"optimizer.{name}"], value.numpy())
    assert ingot.paddle.load_file("out.safetensors")["list.0"].dtype == paddle.bfloat16
    assert report.source_format == "paddle"
    assert "epoch" in {one.name for one in report.left_out}


@needs(paddle, "paddle")
def test_convert_names_a_lone_tensor_of_paddle() -> None:
    paddle.save(paddle.arange(4), "in.pdtensor")
    ingot.convert("in.pdtensor", "out.safetensors")
    assert load_file("out.safetensors")["tensor"].tolist() == [0, 1, 2, 3]


def module() -> object:
    made = tensorflow.Module()
    made.weight = tensorflow.Variable(tensorflow.reshape(tensorflow.range(12.0), [3, 4]))
    made.half = tensorflow.Variable(tensorflow.ones([2], tensorflow.bfloat16))
    made.list = [tensorflow.Variable(5)]
    made.text = tensorflow.Variable("x")
    return made


def shapes_listed(path: str) -> dict[str, object]:
    """Return the listing of each tensor by `ingot ls`."""
    return {tensor.name: tensor.shape for tensor in listed(path).tensors}


@needs(tensorflow, "tensorflow")
@pytest.mark.parametrize("path", ["ck/c-1", "ck/c-1.index", "ck"])
def test_convert_reads_variables_of_a_tensorflow_checkpoint(path: str) -> None:
    made = module()
    tensorflow.train.Checkpoint(model=made).save("ck/c")
    report = ingot.convert(path, "out.safetensors")
    found = load_file("out.safetensors")
    numpy.testing.assert_array_equal(found["model/weight"], made.weight.numpy())
    assert found["model/half"].dtype == made.half.numpy().dtype
    assert found["model/list/0"] == 5
    assert report.source_format == "tensorflow"
    assert "model/text" in {one.name for one in report.left_out}
    assert shapes_listed(path) == {name: array.shape for name, array in found.items()}


@needs(tensorflow, "tensorflow")
def test_convert_follows_no_folder_named_by_a_tensorflow_checkpoint() -> None:
    tensorflow.train.Checkpoint(model=module()).save("elsewhere/c")
    Path("ck").mkdir()
    Path("ck/checkpoint").write_text(f'model_checkpoint_path: "{Path("elsewhere/c-1").resolve()}"\n')
    with pytest.raises(ingot.ConversionError, match="ck: "):
        ingot.convert("ck", "out.safetensors")


@needs(tensorflow, "tensorflow")
def test_convert_rejects_a_damaged_tensorflow_checkpoint() -> None:
    tensorflow.train.Checkpoint(model=module()).save("ck/c")
    data = Path("ck/c-1.data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:20])
    with pytest.raises(
        ingot.ConversionError, match=r"ck/c-1: tensor `model/half`: not a TensorFlow checkpoint"
    ):
        ingot.convert("ck/c-1", "out.safetensors")
    assert not Path("out.safetensors").exists()


@needs(tensorflow, "tensorflow")
@pytest.mark.parametrize("path", ["saved", "saved/saved_model.pb"])
def test_convert_reads_variables_of_a_savedmodel(path: str) -> None:
    made = module()
    tensorflow.saved_model.save(made, "saved")
    report = ingot.convert(path, "out.safetensors")
    found = load_file("out.safetensors")
    numpy.testing.assert_array_equal(found["weight"], made.weight.numpy())
    assert report.source_format == "savedmodel"
    assert shapes_listed(path) == {name: array.shape for name, array in found.items()}


@needs(keras, "tensorflow")
@pytest.mark.parametrize("name", ["in.keras", "in.h5", "in.weights.h5"])
def test_convert_reads_weights_of_keras(name: str) -> None:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, name="dense")])
    if name == "in.weights.h5":
        model.save_weights(name)
    else:
        model.save(name)
    report = ingot.convert(name, "out.safetensors")
    found = sorted(load_file("out.safetensors").values(), key=lambda array: array.ndim)
    bias, kernel = found
    numpy.testing.assert_array_equal(kernel, model.get_weights()[0])
    numpy.testing.assert_array_equal(bias, model.get_weights()[1])
    assert report.source_format == ("keras" if name == "in.keras" else "hdf5")


@needs(flax, "flax")
def test_convert_reads_what_flax_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    # flax splits arrays above this size into chunks. The default is 1 GiB.
    monkeypatch.setattr(flax, "MAX_CHUNK_SIZE", 1000)
    tree = {
        "params": {
            "kernel": jax.random.normal(jax.random.key(0), (30, 40)),
            "bias": jax.numpy.ones(3, "bfloat16"),
        },
        "list": [jax.numpy.arange(2)],
        "scalar": numpy.float32(2.5),
        "step": 5,
    }
    Path("in.msgpack").write_bytes(flax.to_bytes(tree))
    report = ingot.convert("in.msgpack", "out.safetensors")
    found = load_file("out.safetensors")
    expected = flax.msgpack_restore(Path("in.msgpack").read_bytes())
    numpy.testing.assert_array_equal(found["params.kernel"], expected["params"]["kernel"])
    assert found["params.bias"].dtype == expected["params"]["bias"].dtype
    assert found["list.0"].tolist() == [0, 1]
    assert found["scalar"] == 2.5
    assert [(one.name, one.value) for one in report.left_out] == [("step", "5")]
