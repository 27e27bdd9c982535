"""Loading whole files."""

import bintensors.torch
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

import ingot.numpy
import ingot.torch
import same
from duel import Duel, Samples
from ingot.compat.safetensors import torch as compat
from workplace import Workplace


def torch_small(full: int):
    return _torch(lambda place: place.small_torch(full))


def numpy_small(full: int):
    return _numpy(lambda place: place.small_numpy(full))


def _torch(file, peer=safetensors.torch.load_file):
    def measure(place: Workplace, rounds: int) -> Samples:
        path = file(place)
        return Duel(lambda: ingot.torch.load_file(path), lambda: peer(path), same.tensors).run(rounds)

    return measure


def _numpy(file, **options: str):
    def measure(place: Workplace, rounds: int) -> Samples:
        path = file(place)
        return Duel(
            lambda: ingot.numpy.load_file(path, **options),
            lambda: safetensors.numpy.load_file(path),
            same.arrays,
        ).run(rounds)

    return measure


def filled(full: int, fill):
    """Filling tensors that exist, against making new ones of the same file."""

    def measure(place: Workplace, rounds: int) -> Samples:
        path = place.small_torch(full)
        tensors = ingot.torch.load_file(path, backend="pread")
        return Duel(
            fill(path, tensors), lambda: ingot.torch.load_file(path, backend="pread"), same.tensors
        ).run(rounds)

    return measure


def into_dict(path, tensors):
    def fill() -> dict[str, torch.Tensor]:
        ingot.torch.load_into(tensors, path)
        return tensors

    return fill


def into_out(path, tensors):
    return lambda: ingot.torch.load_file(path, out=tensors)


def into_module(path, tensors):
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *outer, last = name.split(".")
        inner = root
        for part in outer:
            if part not in inner._modules:
                inner.add_module(part, torch.nn.Module())
            inner = inner.get_submodule(part)
        inner.register_buffer(last, tensor)

    def fill() -> dict[str, torch.Tensor]:
        ingot.torch.load_into(root, path)
        return tensors

    return fill


def through_compat(full: int):
    """Compare the calls of programs that import safetensors with the same calls in ingot."""

    def measure(place: Workplace, rounds: int) -> Samples:
        path = place.small_vectors(full)
        return Duel(lambda: compat.load_file(path), lambda: ingot.torch.load_file(path), same.tensors).run(
            rounds
        )

    return measure


torch_model = _torch(Workplace.model)
torch_model_bt = _torch(Workplace.model_bt, bintensors.torch.load_file)
numpy_model = _numpy(Workplace.model)
numpy_large = _numpy(Workplace.one_gib)
numpy_large_owned = _numpy(Workplace.one_gib, backend="pread")


def numpy_large_touched(place: Workplace, rounds: int) -> Samples:
    """A mapped file costs nothing until it is read, so here both read it all."""
    path = place.one_gib()

    def total(load) -> dict[str, np.ndarray]:
        return {name: array.view(np.uint64).sum() for name, array in load(path).items()}

    def assert_same(ours, theirs) -> None:
        assert ours == theirs, "the sums differ"

    return Duel(
        lambda: total(ingot.numpy.load_file), lambda: total(safetensors.numpy.load_file), assert_same
    ).run(rounds)
