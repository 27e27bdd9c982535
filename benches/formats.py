"""Properties and costs of twelve formats of tensors, all measured.

`python benches/formats.py --frameworks .venv-frameworks/bin/python` writes record/formats.md. Each figure
comes from a fresh process that has imported its library before. The same float32 tensors go through each
format by the call that its users make.

- **payload runs**: the file contains a payload that would leave a mark on the disk, and its usual call loads
  it. The payload is a pickle if the format stores objects, operations if it stores graphs, and otherwise a
  pickle as the bytes of a tensor. **yes** means that the mark was found; brackets have the result of the
  call.
- **allocated**: the growth of the process's private memory (RssAnon) by loading everything, divided by the
  bytes of the model.
- **one tensor**: the bytes read from the disk to load one tensor, divided by the bytes of that tensor. The
  file is not in the page cache before, and the system reads ahead.
- **bf16, fp8**: whether the library, used with NumPy, loads an array of that dtype unchanged.
- **save, load, load and read**: medians, from and to the page cache; the last one reads a byte of every page
  too. Nothing is flushed to the disk.
- **size limit** and **layout** are from the specifications.
"""

import os
import pickle
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

sys.path.append(str(Path(__file__).parent / "python"))

import fresh
import options
import pages

RECORD = Path(__file__).parent / "record" / "formats.md"
TENSORS = 32
# The output of the libraries is discarded, and nothing is flushed.
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "INGOT_DURABLE": "0"}
PAGE = 4096
Arrays = dict[str, Any]


class Format(NamedTuple):
    """How users save and load in a format, and facts from its specification."""

    title: str
    package: str
    save: Callable[[Arrays, str], object]
    load: Callable[[str], Arrays]
    one: Callable[[str, str], Any]
    """One tensor, in the cheapest way that the library has."""
    limit: str
    layout: str
    plant: Callable[[str, str], object] | None = None
    """Makes a file at the first path that leaves a mark at the second one if loading runs what is in it."""
    is_framework: bool = False
    """Whether its library is in the other environment."""


def all_of_it(load: Callable[[str], Arrays]) -> Callable[[str, str], Any]:
    """Return a function that loads one tensor, for a format that can only be read as a whole."""
    return lambda path, name: load(path)[name]


class Payload:
    """An object that is pickled as a call that makes a folder."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def pickle_plant(path: str, mark: str) -> None:
    pickle_save({"layer00": Payload(mark)}, path)


def pickle_save(arrays: Arrays, path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(arrays, file, 5)


def pickle_load(path: str) -> Arrays:
    with open(path, "rb") as file:
        return pickle.load(file)


def hdf5_save(arrays: Arrays, path: str) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


def hdf5_load(path: str) -> Arrays:
    import h5py

    with h5py.File(path) as file:
        return {name: file[name][()] for name in file}


def hdf5_one(path: str, name: str) -> Any:
    import h5py

    with h5py.File(path) as file:
        return file[name][()]


def savedmodel_save(arrays: Arrays, path: str) -> None:
    import tensorflow as tf

    module = tf.Module()
    for name, array in arrays.items():
        setattr(module, name, tf.Variable(array))
    tf.saved_model.save(module, path)


def savedmodel_load(path: str) -> Arrays:
    import tensorflow as tf

    module = tf.saved_model.load(path)
    names = (name for name in vars(module) if name.startswith("layer"))
    return {name: getattr(module, name).numpy() for name in names}


def savedmodel_one(path: str, name: str) -> Any:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(f"{path}/variables/variables")
    return reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE")


def savedmodel_plant(path: str, mark: str) -> None:
    import tensorflow as tf

    class Planted(tf.saved_model.experimental.TrackableResource):
        """A table that loading sets up, as tables of words are."""

        def _create_resource(self) -> Any:
            return tf.raw_ops.MutableHashTableV2(key_dtype=tf.string, value_dtype=tf.int64)

        def _initialize(self) -> None:
            tf.io.write_file(mark, "loaded")

    module = tf.Module()
    module.layer00, module.planted = tf.Variable(np.ones((2, 2), np.float32)), Planted()
    # It is only saved with a function that has to do with it.
    module.function = tf.function(lambda: module.planted.resource_handle is None, input_signature=[])
    tf.saved_model.save(module, path)


def flax_save(arrays: Arrays, path: str) -> None:
    from flax import serialization

    Path(path).write_bytes(serialization.msgpack_serialize(arrays))


def flax_load(path: str) -> Arrays:
    from flax import serialization

    return serialization.msgpack_restore(Path(path).read_bytes())


def onnx_save(arrays: Arrays, path: str) -> None:
    import onnx
    from onnx import helper, numpy_helper

    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    onnx.save(helper.make_model(helper.make_graph([], "model", [], [], tensors)), path)


def onnx_load(path: str) -> Arrays:
    import onnx
    from onnx import numpy_helper

    tensors = onnx.load(path).graph.initializer
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors}


CAPNP_SCHEMA = """@0x934efea7f017fff0;
struct Tensor { name @0 :Text; dtype @1 :Text; shape @2 :List(UInt64); data @3 :Data; }
struct Model { tensors @0 :List(Tensor); }
"""


@cache
def capnp_model() -> Any:
    import capnp

    with options.place() as folder:
        schema = folder / "model.capnp"
        schema.write_text(CAPNP_SCHEMA)
        return capnp.load(str(schema)).Model


def capnp_save(arrays: Arrays, path: str) -> None:
    model = capnp_model().new_message()
    for tensor, (name, array) in zip(model.init("tensors", len(arrays)), arrays.items(), strict=True):
        tensor.name, tensor.dtype, tensor.shape = name, array.dtype.name, list(array.shape)
        tensor.data = array.tobytes()
    with open(path, "wb") as file:
        model.write(file)


def capnp_tensors(path: str) -> Iterable[Any]:
    import mmap

    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # The limit is against amplification, and lower than a model.
    with capnp_model().from_bytes(mapped, traversal_limit_in_words=1 << 60) as model:
        yield from model.tensors


def capnp_array(tensor: Any) -> Any:
    return np.frombuffer(tensor.data, np.dtype(tensor.dtype)).reshape(list(tensor.shape))


def capnp_load(path: str) -> Arrays:
    return {tensor.name: capnp_array(tensor) for tensor in capnp_tensors(path)}


def capnp_one(path: str, name: str) -> Any:
    return next(capnp_array(tensor) for tensor in capnp_tensors(path) if tensor.name == name)


def arrow_save(arrays: Arrays, path: str) -> None:
    import pyarrow as pa

    columns = {
        name: pa.FixedShapeTensorArray.from_numpy_ndarray(array.reshape(1, *array.shape))
        for name, array in arrays.items()
    }
    table = pa.table(columns)
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def arrow_columns(path: str) -> Any:
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(path)).read_all()


def arrow_load(path: str) -> Arrays:
    table = arrow_columns(path)
    return {name: table[name].chunk(0).to_numpy_ndarray()[0] for name in table.column_names}


def arrow_one(path: str, name: str) -> Any:
    return arrow_columns(path)[name].chunk(0).to_numpy_ndarray()[0]


def npz_plant(path: str, mark: str) -> None:
    objects = np.empty(1, object)
    objects[0] = Payload(mark)
    np.savez(path, layer00=objects)


def npz_load(path: str) -> Arrays:
    with np.load(path) as file:
        return dict(file)


def npz_one(path: str, name: str) -> Any:
    with np.load(path) as file:
        return file[name]


def paddle_save(arrays: Arrays, path: str) -> None:
    import paddle

    tensors = {}
    for name, array in arrays.items():
        plain = array if array.dtype.kind == "f" else array.astype(np.float32)
        tensors[name] = paddle.to_tensor(plain).astype(array.dtype.name)
    paddle.save(tensors, path)


def paddle_load(path: str) -> Arrays:
    import paddle

    found = paddle.load(path)
    return {
        name: tensor if tensor.dtype != paddle.float32 else tensor.numpy() for name, tensor in found.items()
    }


def gguf_save(arrays: Arrays, path: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "model")
    for name, array in arrays.items():
        if array.dtype.name == "bfloat16":
            writer.add_tensor(name, array.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_load(path: str) -> Arrays:
    import gguf

    kinds = {gguf.GGMLQuantizationType.BF16: ml_dtypes.bfloat16}
    return {
        tensor.name: tensor.data.view(kinds.get(tensor.tensor_type, tensor.data.dtype))
        for tensor in gguf.GGUFReader(path).tensors
    }


def peer_save(arrays: Arrays, path: str) -> None:
    import safetensors.numpy

    safetensors.numpy.save_file(arrays, path)


def peer_load(path: str) -> Arrays:
    import safetensors.numpy

    return safetensors.numpy.load_file(path)


def peer_one(path: str, name: str) -> Any:
    import safetensors

    with safetensors.safe_open(path, "np") as file:
        return file.get_tensor(name)


def ingot_save(arrays: Arrays, path: str) -> None:
    import ingot.numpy

    ingot.numpy.save_file(arrays, path, durable=False)


def ingot_load(path: str) -> Arrays:
    import ingot.numpy

    return ingot.numpy.load_file(path)


def ingot_one(path: str, name: str) -> Any:
    import ingot

    with ingot.safe_open(path, "np") as file:
        return file[name]


ALIGNED = "tensors lie one after the other, with their places in front"
FORMATS = {
    "pickle": Format(
        "pickle",
        "numpy",
        pickle_save,
        pickle_load,
        all_of_it(pickle_load),
        "none",
        "none: a program",
        pickle_plant,
    ),
    "h5": Format(
        "HDF5", "h5py", hdf5_save, hdf5_load, hdf5_one, "none", "chunks, filters, alignment by option"
    ),
    "savedmodel": Format(
        "SavedModel",
        "tensorflow-cpu",
        savedmodel_save,
        savedmodel_load,
        savedmodel_one,
        "2 GiB of graph, none of variables",
        "none: the library decides",
        savedmodel_plant,
        is_framework=True,
    ),
    "msgpack": Format(
        "msgpack (flax)",
        "flax",
        flax_save,
        flax_load,
        all_of_it(flax_load),
        "4 GiB an array, cut by flax",
        "none",
        is_framework=True,
    ),
    "onnx": Format(
        "ONNX protobuf",
        "onnx",
        onnx_save,
        onnx_load,
        all_of_it(onnx_load),
        "2 GiB, more in files beside",
        "none",
    ),
    "capnp": Format(
        "Cap'n Proto", "pycapnp", capnp_save, capnp_load, capnp_one, "512 MiB a tensor", "words of 8 bytes"
    ),
    "arrow": Format("Arrow", "pyarrow", arrow_save, arrow_load, arrow_one, "none", "columns, 64 bytes"),
    "npz": Format(
        "npz",
        "numpy",
        lambda arrays, path: np.savez(path, **arrays),
        npz_load,
        npz_one,
        "none (ZIP64)",
        "none: positions as they fall",
        npz_plant,
    ),
    "pdparams": Format(
        "pdparams",
        "paddlepaddle",
        paddle_save,
        paddle_load,
        all_of_it(paddle_load),
        "4 GiB an array below protocol 4, cut by paddle",
        "none: a program",
        pickle_plant,
        is_framework=True,
    ),
    "gguf": Format(
        "GGUF",
        "gguf",
        gguf_save,
        gguf_load,
        all_of_it(gguf_load),
        "none; 4 dimensions",
        "any alignment, by key",
    ),
    "safetensors": Format(
        "safetensors", "safetensors", peer_save, peer_load, peer_one, "none; header 100 MB", ALIGNED
    ),
    "ingot.safetensors": Format(
        "safetensors, by ingot",
        "ingot",
        ingot_save,
        ingot_load,
        ingot_one,
        "none; header 100 MB",
        f"{ALIGNED}; 8, 64 or 4096 bytes by option",
    ),
    "ingot.bt": Format(
        ".bt, by ingot", "ingot", ingot_save, ingot_load, ingot_one, "none; header 100 MB", ALIGNED
    ),
}


def bytes_read() -> int:
    """Return the bytes that this process has read from the disk, by calls and by page faults."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def evicted(path: str) -> None:
    """Take a file, or all files of a folder, out of the page cache."""
    for file in [one for one in Path(path).rglob("*") if one.is_file()] if os.path.isdir(path) else [path]:
        pages.drop(file)


def model(nbytes: int) -> Arrays:
    random = np.random.default_rng(0)
    rows = max(nbytes // TENSORS // 4 // 1024, 1)
    return {f"layer{number:02}": random.random((rows, 1024), np.float32) for number in range(TENSORS)}


def warmed(format: Format, folder: str) -> None:
    """Save and load a small model first, so that imports and first calls are not counted."""
    path = f"{folder}/warm.{os.getpid()}.npz"
    format.save({"layer00": np.ones((2, 2), np.float32)}, path)
    format.load(path)
    format.one(path, "layer00")
    shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def touched(arrays: Arrays) -> None:
    for array in arrays.values():
        array.reshape(-1).view(np.uint8)[::PAGE].max()


def measure_save(format: Format, folder: str, path: str, nbytes: int) -> dict:
    arrays = model(nbytes)
    shutil.rmtree(path, ignore_errors=True)
    start = time.perf_counter()
    format.save(arrays, path)
    return {"save": time.perf_counter() - start}


def measure_load(format: Format, folder: str, path: str, nbytes: int) -> dict:
    before, start = fresh.resident("RssAnon"), time.perf_counter()
    arrays = format.load(path)
    load = time.perf_counter() - start
    allocated = fresh.resident("RssAnon") - before
    touched(arrays)
    read = time.perf_counter() - start
    expected = model(nbytes)
    assert all(np.array_equal(arrays[name], array) for name, array in expected.items())
    return {"load": load, "read": read, "allocated": allocated / nbytes}


def measure_one(format: Format, folder: str, path: str, nbytes: int) -> dict:
    evicted(path)
    before = bytes_read()
    array = format.one(path, "layer07")
    touched({"layer07": array})
    return {"one": (bytes_read() - before) / array.nbytes}


def measure_dtypes(format: Format, folder: str, path: str, nbytes: int) -> dict:
    found = {}
    for word, dtype in (("bf16", ml_dtypes.bfloat16), ("fp8", ml_dtypes.float8_e4m3fn)):
        small = f"{folder}/{word}.{os.path.basename(path)}"
        array = np.arange(8).astype(dtype).reshape(2, 4)
        try:
            format.save({"layer00": array}, small)
            same = format.load(small)["layer00"]
            found[word] = np.dtype(dtype).name in str(same.dtype) and list(same.shape) == [2, 4]
        except Exception:
            found[word] = False
    return found


def measure_payload(format: Format, folder: str, path: str, nbytes: int) -> dict:
    mark, evil = f"{folder}/mark.{os.getpid()}", f"{folder}/evil.{os.path.basename(path)}"
    if format.plant is not None:
        format.plant(evil, mark)
        assert not os.path.exists(mark), "the mark is there before the file is loaded"
    else:
        data = pickle.dumps({"layer00": Payload(mark)}, 4)
        values = np.frombuffer(data.ljust(-(-len(data) // 4) * 4, b"\0"), np.float32)
        format.save({"layer00": values.copy().reshape(1, -1)}, evil)
    try:
        format.load(evil)
    except Exception as error:
        return {"payload": os.path.exists(mark), "why": type(error).__name__}
    return {"payload": os.path.exists(mark), "why": "loaded"}


MEASURES = {
    "save": measure_save,
    "load": measure_load,
    "one": measure_one,
    "dtypes": measure_dtypes,
    "payload": measure_payload,
}


def one(word: str, measure: str, folder: str, nbytes: str) -> dict:
    format = FORMATS[word]
    warmed(format, folder)
    found = MEASURES[measure](format, folder, f"{folder}/model.{word}", int(nbytes))
    return found | {"version": version(format.package)}


def measured(word: str, python: str, folder: Path, nbytes: int, rounds: int) -> dict:
    """Return all figures of one format: medians of the timings."""
    found: dict[str, Any] = {}
    for measure in MEASURES:
        times = rounds if measure in ("save", "load") else 1
        ones = [
            fresh.one(Path(__file__), word, measure, folder, nbytes, python=python, **ENVIRONMENT)
            for _ in range(times)
        ]
        for key, value in ones[0].items():
            is_figure = isinstance(value, float)
            found[key] = statistics.median(one[key] for one in ones) if is_figure else value
    return found


COLUMNS: dict[str, Callable[[Format, dict], str]] = {
    "format": lambda format, one: format.title,
    "by": lambda format, one: f"{format.package} {one['version']}",
    "payload runs": lambda format, one: f"{'**yes**' if one['payload'] else 'no'} ({one['why']})",
    "allocated": lambda format, one: f"{one['allocated']:.2f}×",
    "one tensor": lambda format, one: f"{one['one']:.2f}×",
    "size limit": lambda format, one: format.limit,
    "layout": lambda format, one: format.layout,
    "bf16": lambda format, one: "yes" if one["bf16"] else "no",
    "fp8": lambda format, one: "yes" if one["fp8"] else "no",
    "save": lambda format, one: f"{one['save'] * 1e3:.0f} ms",
    "load": lambda format, one: f"{one['load'] * 1e3:.1f} ms",
    "load and read": lambda format, one: f"{one['read'] * 1e3:.1f} ms",
}


def rows(found: dict[str, dict]) -> Iterable[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for word, one in found.items():
        yield f"| {' | '.join(cell(FORMATS[word], one) for cell in COLUMNS.values())} |"


def main() -> None:
    parser = options.parser(__doc__, room="three times the size")
    parser.add_argument("--folder", dest="dir", type=Path, help="another name of --dir")
    parser.add_argument("--frameworks", help="the Python with tensorflow, paddle and flax; left out without")
    parser.add_argument("--nbytes", type=float, default=1e9, help="size of the model")
    parser.add_argument("--record", default=str(RECORD))
    parser.add_argument("--only", choices=FORMATS, nargs="*", default=list(FORMATS))
    arguments = parser.parse_args()
    found = {}
    with options.place(arguments.dir) as folder:
        for word in arguments.only:
            python = arguments.frameworks if FORMATS[word].is_framework else sys.executable
            if python is None:
                print(f"{word} is left out: --frameworks says where its library is", file=sys.stderr)
                continue
            found[word] = measured(word, python, folder, int(arguments.nbytes), arguments.rounds)
            print(word, found[word], file=sys.stderr)
    explained = (__doc__ or "").partition("- **payload")[2]
    title = f"# Formats, compared\n\n{arguments.nbytes / 1e6:.0f} MB in {TENSORS} tensors of float32, "
    text = f"{title}rounds: {arguments.rounds}, cores: {os.cpu_count()}, made by `benches/formats.py`.\n\n"
    Path(arguments.record).write_text(text + "\n".join(rows(found)) + "\n\n- **payload" + explained)


if __name__ == "__main__":
    fresh.start(one, main)
