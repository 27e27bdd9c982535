"""Program of `test_every_dtype`: save each dtype of a framework in every way.

Prints a line of JSON before each attempt, with the dtype and the way, and one with the outcome after it: some
dtypes make their framework end the process.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy

import ingot
from ingot.errors import SafetensorError

Makers = dict[str, Callable[[], Any]]
NAME = "odd"


def of_numpy() -> Makers:
    """Return all dtypes of NumPy, in both byte orders, and the dtypes that ml_dtypes registers with NumPy."""
    words = {str(numpy.dtype(kind)): numpy.dtype(kind) for kind in set(numpy.sctypeDict.values())}
    words |= {
        text: numpy.dtype(text) for text in ("U3", "S3", "M8[s]", "m8[s]", "V5", "O", "i4,f4", "(2,)f4")
    }
    words["text"] = numpy.dtypes.StringDType()
    for kind in vars(import_module("ml_dtypes")).values():
        if isinstance(kind, type) and issubclass(kind, numpy.generic):
            words[kind.__name__] = numpy.dtype(kind)
    for word, dtype in list(words.items()):
        # Text of variable length has only one byte order.
        big = dtype if dtype.kind == "T" else dtype.newbyteorder(">")
        if big != dtype:
            words[f"{word}, big"] = big
    return {word: lambda dtype=dtype: numpy.zeros(4, dtype) for word, dtype in words.items()}


def of_torch() -> Makers:
    torch = import_module("torch")
    dtypes = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    makers: Makers = {word: lambda dtype=dtype: torch.empty(4, dtype=dtype) for word, dtype in dtypes.items()}
    for word in ("torch.qint8", "torch.quint8", "torch.qint32"):
        makers[word] = lambda dtype=dtypes[word]: torch.quantize_per_tensor(torch.ones(4), 1.0, 0, dtype)
    return makers


def of_flax() -> Makers:
    jax, jnp = import_module("jax"), import_module("jax.numpy")
    jax.config.update("jax_enable_x64", True)
    words = [kind for kind in vars(import_module("ml_dtypes")) if not kind.startswith("_")]
    words += [str(numpy.dtype(kind)) for kind in set(numpy.sctypeDict.values())]
    makers: Makers = {word: lambda word=word: jnp.zeros(4, word) for word in sorted(set(words))}
    makers["key"] = lambda: jax.random.split(jax.random.key(0), 4)
    makers["float0"] = lambda: numpy.zeros(4, jax.dtypes.float0)
    return makers


def of_tensorflow() -> Makers:
    tf = import_module("tensorflow")
    dtypes = {dtype.name: dtype for dtype in vars(tf.dtypes).values() if isinstance(dtype, tf.dtypes.DType)}
    makers: Makers = {}
    for word, dtype in dtypes.items():
        makers[word] = lambda dtype=dtype: tf.zeros(4, dtype)
        makers[f"{word}, cast"] = lambda dtype=dtype: tf.bitcast(tf.zeros(4, tf.int8), dtype)
    return makers


def of_mlx() -> Makers:
    mx = import_module("mlx.core")
    dtypes = {str(dtype): dtype for dtype in vars(mx).values() if isinstance(dtype, mx.Dtype)}
    return {word: lambda dtype=dtype: mx.zeros(4, dtype, stream=mx.cpu) for word, dtype in dtypes.items()}


def of_paddle() -> Makers:
    paddle = import_module("paddle")
    dtypes = {str(dtype): dtype for dtype in vars(paddle).values() if isinstance(dtype, paddle.dtype)}
    return {word: lambda dtype=dtype: paddle.zeros([4]).astype(dtype) for word, dtype in dtypes.items()}


MAKERS = {
    "numpy": of_numpy,
    "torch": of_torch,
    "flax": of_flax,
    "tensorflow": of_tensorflow,
    "mlx": of_mlx,
    "paddle": of_paddle,
}


def of_torch_alone(torch: Any, folder: Path) -> dict[str, Callable[[Any], object]]:
    path = folder / "new.safetensors"
    good = import_module("torch").ones(2)

    def model(tensor: Any) -> None:
        module = import_module("torch").nn.Module()
        module.register_buffer(NAME, tensor)
        torch.save_model(module, path)

    return {
        "alias": lambda tensor: torch.save_file({NAME: tensor, "good": good}, path, shared="alias"),
        "copy": lambda tensor: torch.save_file({NAME: tensor, "good": good}, path, shared="copy"),
        "model": model,
        "sharded": lambda tensor: torch.save_sharded({NAME: tensor, "good": good}, folder),
    }


def ways(framework: str, folder: Path) -> dict[str, Callable[[Any], object]]:
    """Return each way to save a tensor. A way returns the bytes of a file, or writes one to `folder`."""
    module = import_module(f"ingot.{framework}")
    path = folder / "new.safetensors"

    def to_object(tensor: Any) -> bytes:
        file = io.BytesIO()
        module.save_file({NAME: tensor}, file)
        return file.getvalue()

    def appended(tensor: Any) -> None:
        with ingot.Writer(path, write_options={"reserve_header": 1000}, overwrite=True) as writer:
            writer.write(NAME, tensor)
            writer.commit()

    def declared(tensor: Any) -> None:
        with ingot.Writer(path, {NAME: tensor}, overwrite=True) as writer:
            writer.write(NAME, tensor)
            writer.commit()

    def into_another(tensor: Any) -> None:
        ingot.numpy.save_file({NAME: numpy.zeros(4, numpy.int8)}, path)
        ingot.replace_tensor(path, NAME, tensor)

    found = {
        "save": lambda tensor: module.save({NAME: tensor}),
        "bintensors": lambda tensor: module.save({NAME: tensor}, format="bintensors"),
        "file": lambda tensor: module.save_file({NAME: tensor}, path),
        "in-place": lambda tensor: module.save_file({NAME: tensor}, path, atomic=False),
        "checksums": lambda tensor: module.save_file({NAME: tensor}, path, checksums=True),
        "background": lambda tensor: module.save_file({NAME: tensor}, path, background=True).result(),
        "stream": to_object,
        "appended": appended,
        "specs": declared,
        "replace": into_another,
    }
    return found | (of_torch_alone(module, folder) if framework == "torch" else {})


def outcome(framework: str, make: Callable[[], Any], way: Callable[[Any], object], folder: Path) -> str:
    """Return ``"same"`` if the loaded tensor has the saved dtype, and the error if saving failed."""
    tensor = make()
    try:
        written = way(tensor)
    except SafetensorError as error:
        files = [path.name for path in folder.iterdir() if path.name != "new.safetensors"]
        return f"{type(error).__name__} of {error.tensor}" + (f", and there is {files}" if files else "")
    module = import_module(f"ingot.{framework}")
    path = next(folder.iterdir(), None) if written is None else None
    loaded = (module.load(written) if path is None else module.load_file(path))[NAME]
    if framework == "numpy":
        return "same" if loaded.dtype == tensor.dtype.newbyteorder("=") else f"loaded as {loaded.dtype}"
    return "same" if loaded.dtype == tensor.dtype else f"loaded as {loaded.dtype}"


def main(framework: str) -> None:
    warnings.simplefilter("ignore")
    import_module(f"ingot.{framework}")
    for word, make in MAKERS[framework]().items():
        try:
            make()
        except Exception as error:
            # The framework has the dtype, but cannot make a tensor of it.
            print(json.dumps([word, "make", f"none: {type(error).__name__}"]), flush=True)
            continue
        with tempfile.TemporaryDirectory() as base:
            for number, way in enumerate(ways(framework, Path(base))):
                print(json.dumps([word, way, None]), flush=True)
                folder = Path(base, str(number))
                folder.mkdir()
                call = ways(framework, folder)[way]
                print(json.dumps([word, way, outcome(framework, make, call, folder)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
