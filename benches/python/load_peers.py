"""Functions that load a whole file into private memory: ours and the peers'."""

import importlib
import importlib.util
import mmap
from collections.abc import Callable

import raw

Load = Callable[[str], object]

# Memory of tensors that do not keep it alive themselves.
_kept: list[object] = []


def ingot_pread(path: str) -> object:
    import ingot.torch

    return ingot.torch.load_file(path, backend="pread")


def ingot_verified(path: str) -> object:
    """Load a file with digests, and compare each tensor with its digest."""
    import ingot.torch

    return ingot.torch.load_file(path, backend="pread", verify=True)


def safetensors_pread(path: str) -> object:
    import safetensors.torch

    return safetensors.torch.load_file(path, backend="pread")


def safetensors_clone(path: str) -> object:
    import safetensors.torch

    return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}


def safetensors_touched(path: str) -> object:
    import safetensors.torch
    import torch

    tensors = safetensors.torch.load_file(path)
    for tensor in tensors.values():
        tensor.view(torch.uint8).reshape(-1)[:: mmap.PAGESIZE].sum()
    return tensors


def torch_clone(path: str) -> object:
    import torch

    loaded = torch.load(path, mmap=True, weights_only=True)
    return {name: tensor.clone() for name, tensor in loaded.items()}


def torch_plain(path: str) -> object:
    import torch

    return torch.load(path, weights_only=True)


def bintensors_clone(path: str) -> object:
    import bintensors.torch

    return {name: tensor.clone() for name, tensor in bintensors.torch.load_file(path).items()}


def numpy_load(path: str) -> object:
    """Load the bits of the floats as integers, since NumPy has no bfloat16."""
    import numpy
    import torch

    with numpy.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def runai(path: str) -> object:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        return dict(streamer.get_tensors())


def fastsafetensors(path: str) -> object:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: [path]})
    files = loader.copy_files_to_device()
    _kept.extend((loader, files))
    return {name: files.get_tensor(name) for name in files.key_to_rank_lidx}


# For each side its import, which is not timed, and its load.
SIDES: dict[str, tuple[str, Load]] = {
    "ingot": ("ingot.torch", ingot_pread),
    "ingot, verified": ("ingot.torch", ingot_verified),
    "safetensors pread": ("safetensors.torch", safetensors_pread),
    "safetensors mmap and clone": ("safetensors.torch", safetensors_clone),
    "safetensors mmap, every page touched": ("safetensors.torch", safetensors_touched),
    "torch.load(mmap=True) and clone": ("torch", torch_clone),
    "torch.load": ("torch", torch_plain),
    "bintensors and clone": ("bintensors.torch", bintensors_clone),
    "numpy.load": ("numpy", numpy_load),
    "runai-model-streamer": ("runai_model_streamer", runai),
    "fastsafetensors": ("fastsafetensors", fastsafetensors),
    "raw: 2 threads, populated huge pages": ("ctypes", raw.raw_populated),
    "raw: 1 thread": ("ctypes", raw.raw_sequential),
    "raw: 4 threads, O_DIRECT": ("ctypes", raw.raw_direct_four),
    "raw: 8 threads, O_DIRECT": ("ctypes", raw.raw_direct_eight),
}

# The file of each side that cannot read safetensors.
SUFFIXES = {
    "torch.load(mmap=True) and clone": ".pt",
    "torch.load": ".pt",
    "bintensors and clone": ".bt",
    "numpy.load": ".npz",
}


def file(side: str, path: str) -> str:
    """The file that a side reads."""
    return path + SUFFIXES.get(side, "")


def prepared(side: str) -> Load:
    """Return the load of a side, after its imports."""
    module, load = SIDES[side]
    importlib.import_module("torch")
    importlib.import_module(module)
    return load


def is_here(side: str) -> bool:
    """Return whether the packages of a side are installed."""
    try:
        return importlib.util.find_spec(SIDES[side][0].partition(".")[0]) is not None
    except ValueError:
        return False
